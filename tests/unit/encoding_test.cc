// A lock as bytes: what was written comes back, and nothing else is believed.

#include "core/encoding.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "printers.h"

namespace turnstile {
namespace {

using namespace std::string_literals;
using LockPtr = std::unique_ptr<Lock>;
using Holds = std::vector<Hold>;

constexpr Mode kModes[] = {Mode::kExclusive, Mode::kShared, Mode::kLimit};
constexpr uint32_t kMaxCount = std::numeric_limits<uint32_t>::max();
constexpr Millis kMaxLinger = kMaxInstant - kMinInstant;
constexpr Hold kExample{.owner = Owner{"worker-7"},
                        .token = Token{1'700'000'000'123'456},
                        .since = Instant{Millis{1'700'000'000'123}},
                        .end = Instant{Millis{1'700'000'030'123}}};
constexpr Hold kSecond{.owner = Owner{"x"},
                       .token = Token{0x01'02'03'04'05'06},
                       .since = Instant{Millis{1}},
                       .end = Instant{Millis{256}},
                       .linger = Millis{0x1234},
                       .count = 0x01020304};

// The bytes of these holds, written down by hand. Stored data looks like this: they never change.
const std::string kExampleNumbers =
    "\x40\x22\x20\x18\x24\x0a\x06\x00"    // token, least byte first
    "\x7b\x68\xe5\xcf\x8b\x01\x00\x00"    // since
    "\xab\xdd\xe5\xcf\x8b\x01\x00\x00"s;  // end
const std::string kVersion1Bytes = kExampleNumbers + "worker-7";
const std::string kExampleBytes = "\x00"s +                              // mode: exclusive
                                  kExampleNumbers +                      //
                                  "\x00\x00\x00\x00\x00\x00\x00\x00"s +  // linger
                                  "\x01\x00\x00\x00"s +                  // count
                                  "\x08\x00"s +                          // the owner's size
                                  "worker-7";
const std::string kSecondBytes =
    "\x06\x05\x04\x03\x02\x01\x00\x00"
    "\x01\x00\x00\x00\x00\x00\x00\x00"
    "\x00\x01\x00\x00\x00\x00\x00\x00"
    "\x34\x12\x00\x00\x00\x00\x00\x00"
    "\x04\x03\x02\x01"
    "\x01\x00"
    "x"s;

// Where things are in the bytes of version 2.
constexpr size_t kFirstHoldAt = 1;
constexpr size_t kTokenAt = 0;  // inside a hold
constexpr size_t kSinceAt = 8;
constexpr size_t kEndAt = 16;
constexpr size_t kLingerAt = 24;
constexpr size_t kCountAt = 32;
constexpr size_t kOwnerSizeAt = 36;
constexpr size_t kOwnerAt = 38;
constexpr size_t kVersion1OwnerAt = 24;

LockPtr DecodeNow(std::string_view bytes) { return Decode(bytes, kCurrentEncoding); }

Holds HoldsOf(const Lock& lock) {
  Holds holds;
  for (size_t i = 0; i < lock.size(); ++i) holds.push_back(lock.at(Lock::Order::kByOwner, i));
  return holds;
}

LockPtr LockOf(Mode mode, const Holds& holds) {
  LockPtr lock;
  for (const Hold& hold : holds) {
    Lock* const next = Apply(lock.get(), Held{mode, hold});
    if (next != lock.get()) lock.reset(next);
  }
  return lock;
}

// The bytes of one hold, by the table of docs/storage-format.md.
std::string BytesOf(const Hold& hold) {
  std::string bytes;
  const auto put = [&](uint64_t number, size_t size) {
    for (size_t i = 0; i < size; ++i, number /= 256) bytes += static_cast<char>(number % 256);
  };
  put(hold.token.value, 8);
  put(static_cast<uint64_t>(hold.since.time_since_epoch().count()), 8);
  put(static_cast<uint64_t>(hold.end.time_since_epoch().count()), 8);
  put(static_cast<uint64_t>(hold.linger.count()), 8);
  put(hold.count, 4);
  put(hold.owner.bytes.size(), 2);
  return bytes + std::string(hold.owner.bytes);
}

std::string BytesOf(Mode mode, const Holds& holds) {
  std::string bytes(1, static_cast<char>(mode));
  for (const Hold& hold : holds) bytes += BytesOf(hold);
  return bytes;
}

// Makes random locks, and keeps the owners of the last one.
class Maker {
 public:
  explicit Maker(uint64_t seed) : random_(seed) {}

  uint64_t Below(uint64_t bound) { return random_() % bound; }

  // Different owners, in no order.
  Holds AnyHolds(size_t count) {
    owners_.clear();
    std::set<std::string> seen;
    while (owners_.size() < count) {
      const size_t size = 1 + (Below(8) == 0 ? Below(kMaxOwnerBytes) : Below(3));
      std::string owner(size, '\0');
      for (char& c : owner) c = static_cast<char>(Below(4) == 0 ? Below(256) : 'a' + Below(3));
      if (seen.insert(owner).second) owners_.push_back(std::move(owner));
    }
    Holds holds;
    for (const std::string& owner : owners_) {
      holds.push_back({Owner{owner}, Token{1 + AnyNumber() % kMaxToken.value}, AnyMoment(),
                       AnyMoment(), Millis{Below(2) == 0 ? 0 : static_cast<int64_t>(AnyNumber())},
                       static_cast<uint32_t>(Below(2) == 0 ? 1 : 1 + Below(kMaxCount))});
    }
    return holds;
  }

  template <typename T>
  void Shuffle(std::vector<T>& items) {
    std::shuffle(items.begin(), items.end(), random_);
  }

 private:
  // Below 2^53, of any size.
  uint64_t AnyNumber() { return random_() >> (11 + Below(53)); }
  Instant AnyMoment() { return Instant{Millis{static_cast<int64_t>(AnyNumber())}}; }

  std::mt19937_64 random_;
  std::vector<std::string> owners_;
};

// --- The bytes --------------------------------------------------------------------------------

TEST(Encoding, WritesTheseBytesForOneHold) {
  EXPECT_EQ(Encode(*LockOf(Mode::kExclusive, {kExample})), kExampleBytes);
  const LockPtr lock = DecodeNow(kExampleBytes);
  ASSERT_NE(lock, nullptr);
  EXPECT_EQ(lock->mode(), Mode::kExclusive);
  EXPECT_EQ(HoldsOf(*lock), Holds{kExample});
}

TEST(Encoding, WritesTheseBytesForTwoHolds) {
  const std::string shared = "\x01" + kExampleBytes.substr(1) + kSecondBytes;
  const std::string limit = "\x02" + kExampleBytes.substr(1) + kSecondBytes;
  EXPECT_EQ(Encode(*LockOf(Mode::kShared, {kSecond, kExample})), shared);
  EXPECT_EQ(Encode(*LockOf(Mode::kLimit, {kExample, kSecond})), limit);
  for (const auto& [bytes, mode] : {std::pair(shared, Mode::kShared), {limit, Mode::kLimit}}) {
    const LockPtr lock = DecodeNow(bytes);
    ASSERT_NE(lock, nullptr);
    EXPECT_EQ(lock->mode(), mode);
    EXPECT_EQ(HoldsOf(*lock), (Holds{kExample, kSecond}));
    EXPECT_EQ(lock->at(Lock::Order::kByToken, 0), kSecond);
    EXPECT_EQ(lock->at(Lock::Order::kByClosing, 0), kSecond);
  }
}

TEST(Encoding, VersionsAndModesKeepTheirNumbers) {
  EXPECT_EQ(static_cast<int>(EncodingVersion::kOneHold), 1);
  EXPECT_EQ(static_cast<int>(EncodingVersion::kManyHolds), 2);
  EXPECT_EQ(kCurrentEncoding, EncodingVersion::kManyHolds);
  EXPECT_EQ(static_cast<int>(Mode::kExclusive), 0);
  EXPECT_EQ(static_cast<int>(Mode::kShared), 1);
  EXPECT_EQ(static_cast<int>(Mode::kLimit), 2);
}

TEST(Encoding, UnknownVersions) {
  for (const int version : {0, 3, 4, 255, 1023, -1, INT32_MAX, INT32_MIN}) {
    EXPECT_EQ(Decode(kExampleBytes, static_cast<EncodingVersion>(version)), nullptr) << version;
    EXPECT_EQ(Decode(kVersion1Bytes, static_cast<EncodingVersion>(version)), nullptr) << version;
  }
}

// --- There and back ---------------------------------------------------------------------------

// The edges of every field, in every combination.
TEST(Encoding, EdgesComeBack) {
  const std::vector<std::string> owners = {"o", "\0"s, "\xff", std::string(256, '\0'),
                                           std::string(256, '\xff')};
  for (const std::string& owner : owners) {
    for (const Token token : {kMinToken, Token{255}, Token{256}, kExample.token, kMaxToken}) {
      for (const Instant since : {kMinInstant, kExample.since, kMaxInstant}) {
        for (const Instant end : {kMinInstant, kExample.end, kMaxInstant}) {
          for (const Millis linger : {Millis{0}, Millis{1}, kMaxLinger}) {
            for (const uint32_t count : {1U, 2U, 256U, kMaxCount}) {
              const Hold hold{Owner{owner}, token, since, end, linger, count};
              const std::string bytes = Encode(*LockOf(Mode::kExclusive, {hold}));
              ASSERT_EQ(bytes, BytesOf(Mode::kExclusive, {hold}));
              const LockPtr lock = DecodeNow(bytes);
              ASSERT_NE(lock, nullptr);
              ASSERT_EQ(HoldsOf(*lock), Holds{hold});
            }
          }
        }
      }
    }
  }
}

TEST(Encoding, RandomLocksComeBack) {
  constexpr uint64_t kSeed = 99;
  Maker maker(kSeed);
  for (int i = 0; i < 5'000; ++i) {
    SCOPED_TRACE(testing::Message() << "seed " << kSeed << ", round " << i);
    const Mode mode = kModes[maker.Below(3)];
    Holds holds = maker.AnyHolds(mode == Mode::kExclusive ? 1 : 1 + maker.Below(12));
    const std::string bytes = Encode(*LockOf(mode, holds));
    std::sort(holds.begin(), holds.end(),
              [](const Hold& a, const Hold& b) { return a.owner.bytes < b.owner.bytes; });
    ASSERT_EQ(bytes, BytesOf(mode, holds));
    const LockPtr lock = DecodeNow(bytes);
    ASSERT_NE(lock, nullptr);
    ASSERT_EQ(lock->mode(), mode);
    ASSERT_EQ(HoldsOf(*lock), holds);
    ASSERT_EQ(Encode(*lock), bytes);
    ASSERT_EQ(lock->IsOneAllocation(), holds.size() == 1);
  }
}

TEST(Encoding, ThousandHoldsComeBack) {
  constexpr uint64_t kSeed = 100;
  SCOPED_TRACE(kSeed);
  Maker maker(kSeed);
  const Holds holds = maker.AnyHolds(1'000);
  const LockPtr lock = LockOf(Mode::kLimit, holds);
  const std::string bytes = Encode(*lock);
  const LockPtr again = DecodeNow(bytes);
  ASSERT_NE(again, nullptr);
  EXPECT_EQ(again->size(), 1'000);
  EXPECT_EQ(HoldsOf(*again), HoldsOf(*lock));
  EXPECT_EQ(again->closes(), lock->closes());
  EXPECT_EQ(Encode(*again), bytes);
}

// A decoded lock has its own copy of everything.
TEST(Encoding, DecodedLockOutlivesItsBytes) {
  std::string bytes = BytesOf(Mode::kShared, {kExample, kSecond});
  const LockPtr lock = DecodeNow(bytes);
  bytes.assign(bytes.size(), '#');
  EXPECT_EQ(HoldsOf(*lock), (Holds{kExample, kSecond}));
}

// Primary and replica compare digests of these bytes, and came to their locks in different ways.
TEST(Encoding, EqualLocksGiveEqualBytesHoweverTheyCameAbout) {
  constexpr uint64_t kSeed = 101;
  Maker maker(kSeed);
  for (int i = 0; i < 1'000; ++i) {
    SCOPED_TRACE(testing::Message() << "seed " << kSeed << ", round " << i);
    const Mode mode = maker.Below(2) == 0 ? Mode::kShared : Mode::kLimit;
    const Holds holds = maker.AnyHolds(1 + maker.Below(8));
    const std::string bytes = Encode(*LockOf(mode, holds));
    Holds shuffled = holds;
    maker.Shuffle(shuffled);
    ASSERT_EQ(Encode(*LockOf(mode, shuffled)), bytes);
    // With others that came and went, and with holds that were once longer and counted higher.
    Holds detour = {{Owner{"a guest of whom nothing stays"}, kMaxToken, kMinInstant, kMaxInstant}};
    for (Hold hold : shuffled) {
      hold.linger = kMaxLinger;
      hold.count = 77;
      detour.push_back(hold);
    }
    detour.insert(detour.end(), holds.begin(), holds.end());
    LockPtr lock = LockOf(mode, detour);
    ASSERT_EQ(Apply(lock.get(), Ended{detour.front().owner}), lock.get());
    ASSERT_EQ(Encode(*lock), bytes);
  }
}

// --- Version 1 --------------------------------------------------------------------------------

TEST(EncodingVersion1, StillDecodes) {
  const LockPtr lock = Decode(kVersion1Bytes, EncodingVersion::kOneHold);
  ASSERT_NE(lock, nullptr);
  EXPECT_EQ(lock->mode(), Mode::kExclusive);
  EXPECT_EQ(HoldsOf(*lock), Holds{kExample});
  // What is written from now on is version 2.
  EXPECT_EQ(Encode(*lock), kExampleBytes);
}

TEST(EncodingVersion1, CutAtAnyByte) {
  for (size_t size = 0; size < kVersion1Bytes.size(); ++size) {
    // A copy of exactly that size, so that a sanitizer sees a step beyond it.
    const std::vector<char> cut(kVersion1Bytes.begin(),
                                kVersion1Bytes.begin() + static_cast<std::ptrdiff_t>(size));
    const LockPtr lock = Decode({cut.data(), cut.size()}, EncodingVersion::kOneHold);
    if (size <= kVersion1OwnerAt) {
      EXPECT_EQ(lock, nullptr) << size;
    } else {
      // The owner has no length of its own: the container of the bytes has.
      ASSERT_NE(lock, nullptr) << size;
      EXPECT_EQ(HoldsOf(*lock)[0].owner.bytes, "worker-7"s.substr(0, size - kVersion1OwnerAt));
    }
  }
}

TEST(EncodingVersion1, OwnerOf1To256Bytes) {
  const auto decodes = [](size_t size) {
    return Decode(kExampleNumbers + std::string(size, 'o'), EncodingVersion::kOneHold) != nullptr;
  };
  EXPECT_FALSE(decodes(0));
  EXPECT_TRUE(decodes(1));
  EXPECT_TRUE(decodes(256));
  EXPECT_FALSE(decodes(257));
  EXPECT_FALSE(decodes(size_t{10} << 20));
}

TEST(EncodingVersion1, AnyFlippedBit) {
  for (size_t bit = 0; bit < kVersion1Bytes.size() * 8; ++bit) {
    SCOPED_TRACE(bit);
    std::string bytes = kVersion1Bytes;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
    const LockPtr lock = Decode(bytes, EncodingVersion::kOneHold);
    // Each number is below 2^53: its highest eleven bits must be clear.
    const bool beyond = bit < kVersion1OwnerAt * 8 && bit % 64 >= 53;
    EXPECT_EQ(lock == nullptr, beyond);
    if (lock == nullptr) continue;
    EXPECT_TRUE(IsWellFormed(HoldsOf(*lock)[0]));
    EXPECT_FALSE(HoldsOf(*lock)[0] == kExample);
  }
}

TEST(EncodingVersion1, NumbersOutOfRange) {
  constexpr uint64_t kLast = (uint64_t{1} << 53) - 1;
  for (size_t field = 0; field < 3; ++field) {
    const auto decodes = [field](uint64_t word) {
      std::string bytes = kVersion1Bytes;
      for (size_t i = 0; i < 8; ++i, word /= 256) {
        bytes[field * 8 + i] = static_cast<char>(word % 256);
      }
      return Decode(bytes, EncodingVersion::kOneHold) != nullptr;
    };
    SCOPED_TRACE(field);
    EXPECT_EQ(decodes(0), field != 0);  // token 0 is none
    EXPECT_TRUE(decodes(1));
    EXPECT_TRUE(decodes(kLast));
    for (const uint64_t word : {kLast + 1, kLast + 2, uint64_t{1} << 62, uint64_t{1} << 63,
                                (uint64_t{1} << 63) + 1, ~uint64_t{0}}) {
      EXPECT_FALSE(decodes(word)) << word;
    }
  }
}

// --- Bytes that nobody wrote ------------------------------------------------------------------

// Replaces `size` bytes at `at` by a number.
std::string Patched(std::string bytes, size_t at, size_t size, uint64_t number) {
  for (size_t i = 0; i < size; ++i, number /= 256) bytes[at + i] = static_cast<char>(number % 256);
  return bytes;
}

TEST(Decoding, NothingAndOnlyAMode) {
  EXPECT_EQ(DecodeNow(""), nullptr);
  for (const Mode mode : kModes) {
    EXPECT_EQ(DecodeNow(std::string(1, static_cast<char>(mode))), nullptr);
  }
}

TEST(Decoding, EveryMode) {
  for (int mode = 0; mode < 256; ++mode) {
    std::string bytes = kExampleBytes;
    bytes[0] = static_cast<char>(mode);
    EXPECT_EQ(DecodeNow(bytes) != nullptr, mode <= 2) << mode;
  }
}

TEST(Decoding, CutAtAnyByte) {
  const std::string one = BytesOf(Mode::kShared, {kExample});
  const std::string bytes = BytesOf(Mode::kShared, {kExample, kSecond});
  for (size_t size = 0; size < bytes.size(); ++size) {
    const std::vector<char> cut(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
    const LockPtr lock = DecodeNow({cut.data(), cut.size()});
    // Between two holds is a lock of the first.
    EXPECT_EQ(lock != nullptr, size == one.size()) << size;
  }
}

TEST(Decoding, BytesTooMany) {
  const std::string bytes = BytesOf(Mode::kShared, {kExample, kSecond});
  for (const size_t more : {size_t{1}, size_t{2}, kOwnerAt - 1, kOwnerAt, kOwnerAt + 1}) {
    EXPECT_EQ(DecodeNow(bytes + std::string(more, '\0')), nullptr) << more;
    EXPECT_EQ(DecodeNow(bytes + std::string(more, '\x01')), nullptr) << more;
  }
}

TEST(Decoding, OwnersOutOfOrder) {
  for (const Mode mode : {Mode::kShared, Mode::kLimit}) {
    EXPECT_NE(DecodeNow(BytesOf(mode, {kExample, kSecond})), nullptr);
    EXPECT_EQ(DecodeNow(BytesOf(mode, {kSecond, kExample})), nullptr);
    Hold low = kExample;
    Hold high = kExample;
    // The order is of unsigned bytes, the shorter first.
    for (const auto& [a, b] : {std::pair("\x7f"s, "\x80"s),
                               {"a"s, "aa"s},
                               {"a"s, "a\0"s},
                               {"\0"s, "\xff"s},
                               {"Z"s, "a"s}}) {
      low.owner = Owner{a};
      high.owner = Owner{b};
      EXPECT_NE(DecodeNow(BytesOf(mode, {low, high})), nullptr);
      EXPECT_EQ(DecodeNow(BytesOf(mode, {high, low})), nullptr);
    }
  }
}

TEST(Decoding, AnOwnerTwice) {
  Hold other = kExample;
  other.token = Token{5};
  for (const Mode mode : kModes) {
    EXPECT_EQ(DecodeNow(BytesOf(mode, {kExample, kExample})), nullptr);
    EXPECT_EQ(DecodeNow(BytesOf(mode, {kExample, other})), nullptr);
  }
  EXPECT_EQ(DecodeNow(BytesOf(Mode::kShared, {kExample, kSecond, kSecond})), nullptr);
  EXPECT_EQ(DecodeNow(BytesOf(Mode::kShared, {kExample, kSecond, kExample})), nullptr);
}

TEST(Decoding, TwoExclusiveHolds) {
  EXPECT_NE(DecodeNow(BytesOf(Mode::kExclusive, {kExample})), nullptr);
  EXPECT_EQ(DecodeNow(BytesOf(Mode::kExclusive, {kExample, kSecond})), nullptr);
}

TEST(Decoding, NumbersOutOfRange) {
  constexpr uint64_t kLast = (uint64_t{1} << 53) - 1;
  const std::string bytes = BytesOf(Mode::kShared, {kExample, kSecond});
  const size_t second_at = kFirstHoldAt + BytesOf(kExample).size();
  for (const size_t hold_at : {kFirstHoldAt, second_at}) {
    for (const size_t field : {kTokenAt, kSinceAt, kEndAt, kLingerAt}) {
      SCOPED_TRACE(testing::Message() << hold_at << " + " << field);
      const auto decodes = [&](uint64_t number) {
        return DecodeNow(Patched(bytes, hold_at + field, 8, number)) != nullptr;
      };
      EXPECT_EQ(decodes(0), field != kTokenAt);
      EXPECT_TRUE(decodes(1));
      EXPECT_TRUE(decodes(kLast));
      for (const uint64_t number : {kLast + 1, kLast + 2, uint64_t{1} << 62, uint64_t{1} << 63,
                                    (uint64_t{1} << 63) + 1, ~uint64_t{0}}) {
        EXPECT_FALSE(decodes(number)) << number;
      }
    }
    EXPECT_EQ(DecodeNow(Patched(bytes, hold_at + kCountAt, 4, 0)), nullptr);
    EXPECT_NE(DecodeNow(Patched(bytes, hold_at + kCountAt, 4, 1)), nullptr);
    EXPECT_NE(DecodeNow(Patched(bytes, hold_at + kCountAt, 4, kMaxCount)), nullptr);
    EXPECT_EQ(DecodeNow(Patched(bytes, hold_at + kOwnerSizeAt, 2, 0)), nullptr);
    EXPECT_EQ(DecodeNow(Patched(bytes, hold_at + kOwnerSizeAt, 2, 0xffff)), nullptr);
  }
}

TEST(Decoding, OwnerOf1To256Bytes) {
  const auto decodes = [](size_t size) {
    const std::string owner(size, 'o');
    Hold hold = kExample;
    hold.owner = Owner{owner};
    return DecodeNow(BytesOf(Mode::kLimit, {hold})) != nullptr;
  };
  EXPECT_FALSE(decodes(0));
  EXPECT_TRUE(decodes(1));
  EXPECT_TRUE(decodes(255));
  EXPECT_TRUE(decodes(256));
  EXPECT_FALSE(decodes(257));
  EXPECT_FALSE(decodes(65'535));
}

// A flipped bit is noticed or gives another lock with bytes of its own: no two byte strings mean
// the same.
TEST(Decoding, AnyFlippedBit) {
  int rejected = 0;
  const std::string good = BytesOf(Mode::kShared, {kExample, kSecond});
  for (size_t bit = 0; bit < good.size() * 8; ++bit) {
    SCOPED_TRACE(bit);
    std::string bytes = good;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
    const LockPtr lock = DecodeNow(bytes);
    if (lock == nullptr) {
      ++rejected;
      continue;
    }
    for (const Hold& hold : HoldsOf(*lock)) EXPECT_TRUE(IsWellFormed(hold));
    EXPECT_EQ(Encode(*lock), bytes);
  }
  // The eleven highest bits of four numbers, twice, and more.
  EXPECT_GE(rejected, 2 * 4 * 11 + 7);
}

// Good bytes of any lock with a few bytes changed, moved, doubled or lost.
TEST(Decoding, DamagedBytesAreRejectedOrExact) {
  constexpr uint64_t kSeed = 1234;
  Maker maker(kSeed);
  int decoded = 0;
  int rejected = 0;
  for (int i = 0; i < 40'000; ++i) {
    SCOPED_TRACE(testing::Message() << "seed " << kSeed << ", round " << i);
    const Mode mode = kModes[maker.Below(3)];
    std::string bytes =
        Encode(*LockOf(mode, maker.AnyHolds(mode == Mode::kExclusive ? 1 : 1 + maker.Below(3))));
    for (uint64_t damage = 1 + maker.Below(2); damage > 0; --damage) {
      const size_t at = maker.Below(bytes.size());
      const size_t size = 1 + maker.Below(60);
      switch (maker.Below(5)) {
        case 0:
          bytes.erase(at, size);
          break;
        case 1:
          bytes.insert(at, bytes.substr(maker.Below(bytes.size()), size));
          break;
        default:
          bytes[at] = static_cast<char>(maker.Below(3) == 0 ? maker.Below(3) : maker.Below(256));
      }
      if (bytes.empty()) bytes = "\x01";
    }
    // A copy of exactly that size, so that a sanitizer sees a step beyond it.
    const std::vector<char> exact(bytes.begin(), bytes.end());
    const LockPtr lock = DecodeNow({exact.data(), exact.size()});
    if (lock == nullptr) {
      ++rejected;
      continue;
    }
    ++decoded;
    for (const Hold& hold : HoldsOf(*lock)) ASSERT_TRUE(IsWellFormed(hold));
    ASSERT_TRUE(lock->size() == 1 || lock->mode() != Mode::kExclusive);
    ASSERT_EQ(Encode(*lock), bytes);
  }
  EXPECT_GT(decoded, 1'000);
  EXPECT_GT(rejected, 1'000);
}

TEST(Decoding, RandomBytesAreRejectedOrExact) {
  constexpr uint64_t kSeed = 1235;
  SCOPED_TRACE(kSeed);
  std::mt19937_64 random(kSeed);
  int decoded = 0;
  for (int i = 0; i < 30'000; ++i) {
    // Half of them of the shape of one hold with a short owner, so that some decode.
    const size_t owner_size = 1 + random() % 3;
    const bool shaped = random() % 2 == 0;
    std::string bytes(shaped ? kFirstHoldAt + kOwnerAt + owner_size : random() % 300, '\0');
    for (char& c : bytes) c = static_cast<char>(random() & 0xff);
    if (shaped) {
      bytes[0] = static_cast<char>(random() % 4);
      for (const size_t field : {kTokenAt, kSinceAt, kEndAt, kLingerAt}) {
        if (random() % 4 != 0) bytes[kFirstHoldAt + field + 7] = 0;
        if (random() % 4 != 0) bytes[kFirstHoldAt + field + 6] = 0;
      }
      bytes = Patched(bytes, kFirstHoldAt + kOwnerSizeAt, 2, owner_size);
    }
    const LockPtr lock = DecodeNow(bytes);
    if (lock == nullptr) continue;
    ++decoded;
    for (const Hold& hold : HoldsOf(*lock)) ASSERT_TRUE(IsWellFormed(hold));
    ASSERT_EQ(Encode(*lock), bytes);
  }
  EXPECT_GT(decoded, 1'000);
}

}  // namespace
}  // namespace turnstile
