// A lock as bytes: what the RDB file, DUMP and a full synchronisation carry.
//
// docs/storage-format.md writes the bytes down for readers outside this code; a dump of every
// version stays in tests/golden and must load for ever.

#ifndef TURNSTILE_CORE_ENCODING_H_
#define TURNSTILE_CORE_ENCODING_H_

#include <optional>
#include <string>
#include <string_view>

#include "core/types.h"

namespace turnstile {

// Every version that was ever written has a name here and is never reused. The number travels
// outside the bytes, as the encoding version of the Redis type.
enum class EncodingVersion : int {
  kOneHold = 1,  // token, since, end, owner
};
inline constexpr EncodingVersion kCurrentEncoding = EncodingVersion::kOneHold;

// Requires IsWellFormed(hold).
std::string Encode(const Hold& hold);

// The hold, whose owner is a view into `bytes`, or nothing if the bytes are not exactly what Encode
// of that version writes. Safe on any bytes.
std::optional<Hold> Decode(std::string_view bytes, EncodingVersion version);

}  // namespace turnstile

#endif  // TURNSTILE_CORE_ENCODING_H_
