// A lock as bytes: the format in RDB files, DUMP and full synchronisations.
//
// docs/storage-format.md specifies the format for readers outside this code. A dump of every
// released version is kept in tests/golden and must remain loadable.

#ifndef TURNSTILE_CORE_ENCODING_H_
#define TURNSTILE_CORE_ENCODING_H_

#include <memory>
#include <string>
#include <string_view>

#include "core/lock.h"
#include "core/types.h"

namespace turnstile {

// Every version that was ever released has a name here, and its number is never reused. The number
// is stored outside the bytes, as the encoding version of the Redis type.
enum class EncodingVersion : int {
  kRecords = 1,  // one hold: as in memory; several: a word with the mode, and a list
};
inline constexpr EncodingVersion kCurrentEncoding = EncodingVersion::kRecords;

// A lock in the current version. Equal locks give equal bytes. A lock of one hold is not copied and
// must outlive this object.
class Encoded {
 public:
  explicit Encoded(const Lock& lock);
  Encoded(const Encoded&) = delete;
  Encoded& operator=(const Encoded&) = delete;

  std::string_view bytes() const { return bytes_; }

 private:
  std::string several_;
  std::string_view bytes_;
};
std::string Encode(const Lock& lock);

// Returns the lock, or null if the bytes are not exactly what that version writes. Safe on any
// bytes.
std::unique_ptr<Lock> Decode(std::string_view bytes, EncodingVersion version);
// Like Decode, but takes ownership of the bytes, which must come from operator new. A lock of one
// hold is not copied.
std::unique_ptr<Lock> DecodeAndTake(char* bytes, size_t size, EncodingVersion version);

}  // namespace turnstile

#endif  // TURNSTILE_CORE_ENCODING_H_
