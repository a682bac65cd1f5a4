// libFuzzer: the decoder on any bytes.
//
// Bytes decode exactly when docs/storage-format.md says so, to what it says. What decodes is
// well-formed, has bytes that do not tell how its holds came into the lock, and can be taken apart
// again.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <new>
#include <optional>
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

constexpr uint64_t PowerOfTwo(int exponent) { return uint64_t{1} << exponent; }

// Numbers of 8 bytes: tokens, moments and lingers.
bool AreNumbersInRange(Bytes bytes, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    if (NumberAt(bytes, i * 8, 8) >= PowerOfTwo(53)) return false;
  }
  return true;
}

// A weight is one unless the mode is that of a limit. Modes as they are stored.
bool IsWeight(uint64_t weight, uint64_t mode) {
  return weight >= 1 && weight <= (mode == 2 ? 100'000 : 1);
}

bool IsTagText(Bytes tag) {
  return tag.size() <= 64 && std::all_of(tag.begin(), tag.end(),
                                         [](uint8_t byte) { return byte >= ' ' && byte <= '~'; });
}

// How many holds these bytes list; 0 if that is not what they do.
size_t ListedHolds(Bytes bytes, uint64_t mode) {
  Bytes last;
  size_t holds = 0;
  while (!bytes.empty()) {
    if (bytes.size() < 51 || !AreNumbersInRange(bytes, 5)) return 0;
    if (NumberAt(bytes, 0, 8) == 0 || NumberAt(bytes, 40, 4) == 0) return 0;
    if (!IsWeight(NumberAt(bytes, 44, 4), mode)) return 0;
    const size_t tag_size = NumberAt(bytes, 48, 1);
    const size_t owner_size = NumberAt(bytes, 49, 2);
    if (owner_size < 1 || owner_size > 256 || owner_size + tag_size > bytes.size() - 51) return 0;
    const Bytes owner = bytes.subspan(51, owner_size);
    if (!IsTagText(bytes.subspan(51 + owner_size, tag_size))) return 0;
    if (!std::lexicographical_compare(last.begin(), last.end(), owner.begin(), owner.end())) {
      return 0;
    }
    last = owner;
    ++holds;
    bytes = bytes.subspan(51 + owner_size + tag_size);
  }
  return holds;
}

Instant MomentAt(Bytes bytes, size_t at) {
  return Instant{Millis{static_cast<int64_t>(NumberAt(bytes, at, 8))}};
}

// The hold of a record, or nothing if these bytes are none.
std::optional<Hold> HoldOfRecord(Bytes bytes) {
  if (bytes.size() < 16) return std::nullopt;
  const uint64_t head = NumberAt(bytes, 0, 8);
  const uint64_t times = NumberAt(bytes, 8, 8);
  const bool wide = times % 2 == 1;
  const size_t owner_at = wide ? 57 : 16;
  const size_t owner_size = head / PowerOfTwo(53) % 256 + 1;
  Hold hold{.token = Token{head % PowerOfTwo(53)}};
  const uint64_t mode = head / PowerOfTwo(61);
  if (mode > 2 || hold.token.value == 0 || bytes.size() < owner_at) return std::nullopt;
  const size_t tag_size = wide ? NumberAt(bytes, 56, 1) : 0;
  if (bytes.size() != owner_at + owner_size + tag_size) return std::nullopt;
  hold.owner = Owner{{reinterpret_cast<const char*>(bytes.data()) + owner_at, owner_size}};

  constexpr int64_t kTooMuchLead = 1 << 20;
  const auto moment = static_cast<int64_t>(hold.token.value / 1000);
  if (!wide) {
    auto lead = static_cast<int64_t>(times / 2 % PowerOfTwo(21));
    if (lead >= kTooMuchLead) lead -= 2 * kTooMuchLead;
    if (lead == -kTooMuchLead || lead > moment) return std::nullopt;
    hold.since = Instant{Millis{moment - lead}};
    hold.end = Instant{Millis{static_cast<int64_t>(times / PowerOfTwo(22))}};
    return hold;
  }
  if (times != 1 || !AreNumbersInRange(bytes.subspan(16), 4)) return std::nullopt;
  hold.since = MomentAt(bytes, 16);
  hold.end = MomentAt(bytes, 24);
  hold.linger = MomentAt(bytes, 32).time_since_epoch();
  if (NumberAt(bytes, 40, 8) != 0) hold.cap = MomentAt(bytes, 40);
  hold.count = static_cast<uint32_t>(NumberAt(bytes, 48, 4));
  if (hold.count == 0) return std::nullopt;
  hold.weight = static_cast<uint32_t>(NumberAt(bytes, 52, 4));
  const Bytes tag = bytes.subspan(owner_at + owner_size);
  if (!IsWeight(hold.weight, mode) || !IsTagText(tag)) return std::nullopt;
  hold.tag = {reinterpret_cast<const char*>(tag.data()), tag.size()};
  const int64_t lead = moment - hold.since.time_since_epoch().count();
  const bool needless = hold.linger == Millis{0} && hold.count == 1 && hold.weight == 1 &&
                        !hold.cap.has_value() && hold.tag.empty() && lead < kTooMuchLead &&
                        lead > -kTooMuchLead && NumberAt(bytes, 24, 8) < PowerOfTwo(42);
  return needless ? std::nullopt : std::optional(hold);
}

bool ShouldDecode(Bytes bytes) {
  if (bytes.size() < 8) return false;
  const uint64_t head = NumberAt(bytes, 0, 8);
  if (head < PowerOfTwo(63)) return HoldOfRecord(bytes).has_value();
  const bool shared = head == PowerOfTwo(63) + PowerOfTwo(61);
  const bool limit = head == PowerOfTwo(63) + PowerOfTwo(62);
  return (shared || limit) && ListedHolds(bytes.subspan(8), shared ? 1 : 2) >= 2;
}

// The holds of a lock as they are listed.
std::string Listed(const Lock& lock) {
  std::string bytes;
  const auto put = [&bytes](uint64_t number, size_t size) {
    for (size_t i = 0; i < size; ++i, number /= 256) bytes += static_cast<char>(number % 256);
  };
  for (size_t i = 0; i < lock.size(); ++i) {
    const Hold hold = lock.at(Order::kByOwner, i);
    put(hold.token.value, 8);
    put(static_cast<uint64_t>(hold.since.time_since_epoch().count()), 8);
    put(static_cast<uint64_t>(hold.end.time_since_epoch().count()), 8);
    put(static_cast<uint64_t>(hold.linger.count()), 8);
    put(static_cast<uint64_t>(hold.cap.value_or(kMinInstant).time_since_epoch().count()), 8);
    put(hold.count, 4);
    put(hold.weight, 4);
    put(hold.tag.size(), 1);
    put(hold.owner.bytes.size(), 2);
    bytes += hold.owner.bytes;
    bytes += hold.tag;
  }
  return bytes;
}

// What the code says.

LockPtr DecodeInBothWays(std::string_view bytes, EncodingVersion version) {
  LockPtr lock = Decode(bytes, version);
  auto* given = static_cast<char*>(::operator new(bytes.size()));
  std::copy(bytes.begin(), bytes.end(), given);
  const LockPtr taken = DecodeAndTake(given, bytes.size(), version);
  Require((lock == nullptr) == (taken == nullptr), "both ways to decode agree");
  if (lock == nullptr) return lock;
  Require(lock->mode() == taken->mode() && Listed(*lock) == Listed(*taken),
          "both ways to decode give the same");
  return lock;
}

template <typename Fact>
void Store(LockPtr& lock, const Fact& fact) {
  if (Lock* const next = Apply(lock.get(), fact); next != lock.get()) lock.reset(next);
}

uint64_t WeightAt(const Lock& lock, Instant now) {
  uint64_t weight = 0;
  for (const Hold& hold : lock.holds(Order::kByOwner)) {
    weight += hold.BlocksAt(now) ? hold.weight : 0;
  }
  return weight;
}

void CheckOrders(const Lock& lock) {
  for (size_t i = 0; i < lock.size(); ++i) {
    const Hold hold = lock.at(Order::kByOwner, i);
    Require(IsWellFormed(hold), "what decodes is well-formed");
    Require(lock.Find(hold.owner) == hold, "every owner is found");
    Require(lock.HasLive(hold.token, hold.end), "every token is found");
    Require(hold.blocks_until() <= lock.blocks_until(), "the lock closes last");
    if (i < 20) {
      const Instant last = hold.blocks_until();
      Require(lock.WeightBlocking(last) == WeightAt(lock, last), "weights are summed");
    }
    if (i == 0) continue;
    Require(lock.at(Order::kByToken, i - 1).token <= lock.at(Order::kByToken, i).token,
            "tokens are in order");
    Require(lock.at(Order::kByBlocksUntil, i - 1).blocks_until() <=
                lock.at(Order::kByBlocksUntil, i).blocks_until(),
            "closings are in order");
  }
}

void CheckLock(const Lock& lock) {
  Require(lock.size() == 1 || lock.mode() != Mode::kExclusive, "one exclusive hold");
  CheckOrders(lock);
  const std::string bytes = Encode(lock);
  const LockPtr again = DecodeInBothWays(bytes, kCurrentEncoding);
  Require(again != nullptr && again->mode() == lock.mode() && Listed(*again) == Listed(lock),
          "what is written is read");

  LockPtr backwards;
  for (size_t i = lock.size(); i > 0; --i) {
    const Hold hold = lock.at(Order::kByBlocksUntil, i - 1);
    Hold before = hold;
    before.count = hold.count == 1 ? 2 : 1;
    before.weight = lock.mode() == Mode::kLimit && hold.weight == 1 ? 7 : 1;
    before.tag = hold.tag.empty() ? "before" : "";
    if (!before.cap.has_value()) before.cap = kMaxInstant;
    Store(backwards, HoldSet{lock.mode(), before});
    Store(backwards, HoldSet{lock.mode(), hold});
  }
  Require(Encode(*backwards) == bytes, "the way to a lock does not matter");
  const LockPtr half(DecodeInBothWays(bytes, kCurrentEncoding));
  const Instant middle = lock.at(Order::kByBlocksUntil, lock.size() / 2).blocks_until();
  Lock* const left = Apply(half.get(), HoldsExpired{middle});
  Require(left == half.get() && left->size() == lock.CountBlocking(middle),
          "what closed before a moment is removed");
  CheckOrders(*left);
  while (backwards != nullptr) {
    const size_t size = backwards->size();
    Store(backwards, HoldEnded{backwards->at(Order::kByToken, size / 2).owner});
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
  for (const int version : {0, 2, -1, size > 0 ? 2 + data[0] : 0}) {
    Require(DecodeInBothWays(bytes, static_cast<EncodingVersion>(version)) == nullptr,
            "an unknown version is refused");
  }

  const LockPtr lock = DecodeInBothWays(bytes, EncodingVersion::kRecords);
  Require((lock != nullptr) == ShouldDecode({data, size}), "bytes decode as they should");
  if (lock != nullptr) {
    Require(static_cast<uint8_t>(lock->mode()) == data[7] / 32 % 4, "the mode is the same");
    if (lock->size() == 1) {
      Require(lock->at(Order::kByOwner, 0) == HoldOfRecord({data, size}), "the hold is the same");
    } else {
      Require(Listed(*lock) == bytes.substr(8), "the holds are the same");
    }
    Require(Encode(*lock) == bytes, "a lock has these bytes");
    CheckLock(*lock);
  }
  return 0;
}
