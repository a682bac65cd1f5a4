// libFuzzer: the decoder on any bytes, in every version.
//
// Bytes decode exactly when docs/storage-format.md says so. What decodes is well-formed, has these
// bytes and no others, however its holds came into the lock, and can be taken apart again.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/encoding.h"
#include "core/lock.h"

namespace turnstile {
namespace {

using LockPtr = std::unique_ptr<Lock>;
using Bytes = std::span<const uint8_t>;
using Order = Lock::Order;

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "broken: %s\n", what);
  std::abort();
}

// What docs/storage-format.md says, once more.

uint64_t NumberAt(Bytes bytes, size_t at, size_t size) {
  uint64_t number = 0;
  for (size_t i = size; i > 0; --i) number = number * 256 + bytes[at + i - 1];
  return number;
}

// Token, since and end.
bool AreNumbersInRange(Bytes bytes, size_t count) {
  for (size_t field = 0; field < count; ++field) {
    const uint64_t number = NumberAt(bytes, field * 8, 8);
    if (number >= uint64_t{1} << 53) return false;
    if (field == 0 && number == 0) return false;
  }
  return true;
}

bool ShouldDecodeVersion1(Bytes bytes) {
  return bytes.size() >= 24 + 1 && bytes.size() <= 24 + 256 && AreNumbersInRange(bytes, 3);
}

bool ShouldDecodeVersion2(Bytes bytes) {
  if (bytes.empty() || bytes[0] > 2) return false;
  const bool exclusive = bytes[0] == 0;
  bytes = bytes.subspan(1);
  Bytes last;
  size_t holds = 0;
  while (!bytes.empty()) {
    if (bytes.size() < 38 || !AreNumbersInRange(bytes, 4)) return false;
    if (NumberAt(bytes, 32, 4) == 0) return false;
    const size_t owner_size = NumberAt(bytes, 36, 2);
    if (owner_size < 1 || owner_size > 256 || owner_size > bytes.size() - 38) return false;
    const Bytes owner = bytes.subspan(38, owner_size);
    if (!std::lexicographical_compare(last.begin(), last.end(), owner.begin(), owner.end())) {
      return false;
    }
    last = owner;
    ++holds;
    bytes = bytes.subspan(38 + owner_size);
  }
  return holds == 1 || (holds > 1 && !exclusive);
}

template <typename Fact>
void Store(LockPtr& lock, const Fact& fact) {
  if (Lock* const next = Apply(lock.get(), fact); next != lock.get()) lock.reset(next);
}

void CheckOrders(const Lock& lock) {
  for (size_t i = 0; i < lock.size(); ++i) {
    const Hold hold = lock.at(Order::kByOwner, i);
    Require(IsWellFormed(hold), "what decodes is well-formed");
    Require(lock.Find(hold.owner) == hold, "every owner is found");
    Require(lock.HasLive(hold.token, hold.end), "every token is found");
    Require(hold.closes() <= lock.closes(), "the lock closes last");
    if (i == 0) continue;
    Require(lock.at(Order::kByToken, i - 1).token <= lock.at(Order::kByToken, i).token,
            "tokens are in order");
    Require(lock.at(Order::kByClosing, i - 1).closes() <= lock.at(Order::kByClosing, i).closes(),
            "closings are in order");
  }
}

// In the current version.
void CheckLock(const Lock& lock, std::string_view bytes) {
  Require(lock.size() == 1 || lock.mode() != Mode::kExclusive, "one exclusive hold");
  CheckOrders(lock);
  Require(Encode(lock) == bytes, "a lock has these bytes");

  LockPtr backwards;
  for (size_t i = lock.size(); i > 0; --i) {
    Store(backwards, Held{lock.mode(), lock.at(Order::kByClosing, i - 1)});
  }
  Require(Encode(*backwards) == bytes, "the order of coming does not matter");
  while (backwards != nullptr) {
    const size_t size = backwards->size();
    Store(backwards, Ended{backwards->at(Order::kByToken, size / 2).owner});
    Require(backwards == nullptr ? size == 1 : backwards->size() == size - 1, "one goes at a time");
    if (backwards != nullptr) CheckOrders(*backwards);
    if (size > 20) return;  // long enough
  }
}

}  // namespace
}  // namespace turnstile

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace turnstile;  // NOLINT(google-build-using-namespace)
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  for (const int version : {0, 3, -1, size > 0 ? 3 + data[0] : 0}) {
    Require(Decode(bytes, static_cast<EncodingVersion>(version)) == nullptr,
            "an unknown version is refused");
  }

  const LockPtr one = Decode(bytes, EncodingVersion::kOneHold);
  Require((one != nullptr) == ShouldDecodeVersion1({data, size}), "version 1 decodes as it should");
  if (one != nullptr) {
    const std::string today = Encode(*one);
    Require(one->size() == 1 && one->mode() == Mode::kExclusive, "version 1 is one exclusive hold");
    Require(today.substr(1, 24) == bytes.substr(0, 24), "the numbers are the same");
    Require(today.substr(39) == bytes.substr(24), "the owner is the same");
    CheckLock(*one, today);
    const LockPtr again = Decode(today, kCurrentEncoding);
    Require(again != nullptr && Encode(*again) == today, "what is written is read");
  }

  const LockPtr many = Decode(bytes, EncodingVersion::kManyHolds);
  Require((many != nullptr) == ShouldDecodeVersion2({data, size}),
          "version 2 decodes as it should");
  if (many != nullptr) CheckLock(*many, bytes);
  return 0;
}
