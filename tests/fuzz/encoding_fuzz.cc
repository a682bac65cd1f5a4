// libFuzzer: the decoder on any bytes.
//
// Bytes decode exactly when their numbers are in range and the owner's size is; what decodes is
// well-formed, has these bytes and no others, and survives the way through a stored lock.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <string_view>

#include "core/encoding.h"
#include "core/lock.h"

namespace turnstile {
namespace {

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "broken: %s\n", what);
  std::abort();
}

// What docs/storage-format.md says, once more.
bool ShouldDecode(const uint8_t* data, size_t size) {
  if (size < 24 + 1 || size > 24 + 256) return false;
  for (size_t field = 0; field < 3; ++field) {
    uint64_t number = 0;
    for (size_t i = 8; i > 0; --i) number = number * 256 + data[field * 8 + i - 1];
    if (number >= uint64_t{1} << 53) return false;
    if (field == 0 && number == 0) return false;
  }
  return true;
}

}  // namespace
}  // namespace turnstile

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace turnstile;  // NOLINT(google-build-using-namespace)
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto hold = Decode(bytes, EncodingVersion::kOneHold);
  Require(hold.has_value() == ShouldDecode(data, size), "what decodes is what should");
  for (const int version : {0, 2, -1, size > 0 ? 2 + data[0] : 0}) {
    Require(!Decode(bytes, static_cast<EncodingVersion>(version)).has_value(),
            "an unknown version is refused");
  }
  if (!hold.has_value()) return 0;

  Require(IsWellFormed(*hold), "what decodes is well-formed");
  Require(hold->owner.bytes.data() == bytes.data() + 24, "the owner is inside the bytes");
  Require(Encode(*hold) == bytes, "what decodes has these bytes");
  const std::unique_ptr<Lock> lock(Lock::Make(*hold));
  Require(lock->hold() == *hold, "a stored lock says the same");
  Require(Encode(lock->hold()) == bytes, "a stored lock has the same bytes");
  return 0;
}
