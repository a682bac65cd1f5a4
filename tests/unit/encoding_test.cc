// A lock as bytes: what was written comes back, and nothing else is believed.

#include "core/encoding.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <new>
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
// The first hold for which a narrow record is not enough, by its lead or by its end.
constexpr int64_t kTooMuchLead = int64_t{1} << 20;
constexpr Instant kTooLateEnd{Millis{int64_t{1} << 42}};
// As nearly all holds are: its record is narrow.
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
const std::string kExampleListed = kExampleNumbers +                      //
                                   "\x00\x00\x00\x00\x00\x00\x00\x00"s +  // linger
                                   "\x01\x00\x00\x00"s +                  // count
                                   "\x08\x00"s +                          // the owner's size
                                   "worker-7";
const std::string kSecondListed =
    "\x06\x05\x04\x03\x02\x01\x00\x00"
    "\x01\x00\x00\x00\x00\x00\x00\x00"
    "\x00\x01\x00\x00\x00\x00\x00\x00"
    "\x34\x12\x00\x00\x00\x00\x00\x00"
    "\x04\x03\x02\x01"
    "\x01\x00"
    "x"s;
const std::string kVersion2Bytes = "\x00"s + kExampleListed;  // mode: exclusive
// In version 3 a lock of one hold is a record.
const std::string kExampleRecord =
    "\x40\x22\x20\x18\x24\x0a\xe6\x00"   // token; in the last 11 bits 7 for the owner, and the mode
    "\x00\x00\xc0\x6a\x77\xf9\xf3\x62"s  // narrow; 0 ms of lead; in the last 42 bits the end
    "worker-7";
const std::string kSecondRecord =
    "\x06\x05\x04\x03\x02\x01\x00\x00"
    "\x01\x00\x00\x00\x00\x00\x00\x00"  // wide
    "\x01\x00\x00\x00\x00\x00\x00\x00"  // since
    "\x00\x01\x00\x00\x00\x00\x00\x00"  // end
    "\x34\x12\x00\x00\x00\x00\x00\x00"  // linger
    "\x04\x03\x02\x01"                  // count
    "x"s;

// Where things are: in a hold of a list, which is the same in versions 2 and 3,
constexpr size_t kTokenAt = 0;
constexpr size_t kSinceAt = 8;
constexpr size_t kEndAt = 16;
constexpr size_t kLingerAt = 24;
constexpr size_t kCountAt = 32;
constexpr size_t kOwnerSizeAt = 36;
constexpr size_t kOwnerAt = 38;
// in version 1,
constexpr size_t kVersion1OwnerAt = 24;
// and in a record.
constexpr size_t kTimesAt = 8;
constexpr size_t kNarrowOwnerAt = 16;
constexpr size_t kWideSinceAt = 16;
constexpr size_t kWideEndAt = 24;
constexpr size_t kWideLingerAt = 32;
constexpr size_t kWideCountAt = 40;
constexpr size_t kWideOwnerAt = 44;

// --- The tables of docs/storage-format.md, once more ------------------------------------------

std::string Word(uint64_t number, size_t size = 8) {
  std::string bytes;
  for (size_t i = 0; i < size; ++i, number /= 256) bytes += static_cast<char>(number % 256);
  return bytes;
}

std::string Word(Instant moment) {
  return Word(static_cast<uint64_t>(moment.time_since_epoch().count()));
}

std::string Word(Millis time) { return Word(static_cast<uint64_t>(time.count())); }

constexpr uint64_t PowerOfTwo(int exponent) { return uint64_t{1} << exponent; }

// By how many milliseconds a hold's token leads its beginning.
int64_t LeadOf(const Hold& hold) {
  return static_cast<int64_t>(hold.token.value / 1000) - hold.since.time_since_epoch().count();
}

bool NeedsWidth(const Hold& hold) {
  return hold.linger != Millis{0} || hold.count != 1 || LeadOf(hold) <= -kTooMuchLead ||
         LeadOf(hold) >= kTooMuchLead || hold.end >= kTooLateEnd;
}

// The two words of a narrow record before its owner.
std::string NarrowWords(uint64_t mode, uint64_t owner_size, uint64_t token, int64_t lead,
                        uint64_t end) {
  const uint64_t lead_bits =
      lead >= 0 ? static_cast<uint64_t>(lead) : PowerOfTwo(21) - static_cast<uint64_t>(-lead);
  return Word(mode * PowerOfTwo(61) + (owner_size - 1) * PowerOfTwo(53) + token) +
         Word(end * PowerOfTwo(22) + lead_bits * 2);
}

std::string NarrowRecord(Mode mode, const Hold& hold) {
  return NarrowWords(static_cast<uint64_t>(mode), hold.owner.bytes.size(), hold.token.value,
                     LeadOf(hold), static_cast<uint64_t>(hold.end.time_since_epoch().count())) +
         std::string(hold.owner.bytes);
}

std::string WideRecord(Mode mode, const Hold& hold) {
  return NarrowRecord(mode, hold).substr(0, kTimesAt) + Word(1) + Word(hold.since) +
         Word(hold.end) + Word(hold.linger) + Word(hold.count, 4) + std::string(hold.owner.bytes);
}

std::string ListedHold(const Hold& hold) {
  return Word(hold.token.value) + Word(hold.since) + Word(hold.end) + Word(hold.linger) +
         Word(hold.count, 4) + Word(hold.owner.bytes.size(), 2) + std::string(hold.owner.bytes);
}

// What stands before a list of holds.
std::string Head(EncodingVersion version, uint64_t mode) {
  return version == EncodingVersion::kManyHolds ? Word(mode, 1)
                                                : Word(PowerOfTwo(63) + mode * PowerOfTwo(61));
}

std::string List(EncodingVersion version, Mode mode, const Holds& holds) {
  std::string bytes = Head(version, static_cast<uint64_t>(mode));
  for (const Hold& hold : holds) bytes += ListedHold(hold);
  return bytes;
}

// Of holds in the order of their owners, in version 2 or 3.
std::string BytesOf(EncodingVersion version, Mode mode, const Holds& holds) {
  if (version == EncodingVersion::kManyHolds || holds.size() > 1) return List(version, mode, holds);
  return NeedsWidth(holds[0]) ? WideRecord(mode, holds[0]) : NarrowRecord(mode, holds[0]);
}

std::string BytesOf(Mode mode, const Holds& holds) {
  return BytesOf(kCurrentEncoding, mode, holds);
}

// --- Helpers ----------------------------------------------------------------------------------

// A copy as the server hands it over.
char* NewBytes(std::string_view bytes) {
  auto* copy = static_cast<char*>(::operator new(bytes.size()));
  std::copy(bytes.begin(), bytes.end(), copy);
  return copy;
}

// Decodes copies of exactly that size, so that a sanitizer sees a step beyond them.
LockPtr DecodeExact(std::string_view bytes, EncodingVersion version) {
  const std::vector<char> copy(bytes.begin(), bytes.end());
  LockPtr lock = Decode({copy.data(), copy.size()}, version);
  const LockPtr taken = DecodeAndTake(NewBytes(bytes), bytes.size(), version);
  EXPECT_EQ(lock == nullptr, taken == nullptr);
  if (lock != nullptr && taken != nullptr) {
    EXPECT_EQ(Encode(*lock), Encode(*taken));
  }
  return lock;
}

LockPtr DecodeNow(std::string_view bytes) { return DecodeExact(bytes, kCurrentEncoding); }

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

// No two byte strings mean the same: what decodes is a lock that has these bytes. Says whether.
bool DecodesExactly(std::string_view bytes, EncodingVersion version) {
  const LockPtr lock = DecodeExact(bytes, version);
  if (lock == nullptr) return false;
  for (const Hold& hold : HoldsOf(*lock)) EXPECT_TRUE(IsWellFormed(hold));
  EXPECT_LE(lock->mode(), Mode::kLimit);
  EXPECT_TRUE(lock->size() == 1 || lock->mode() != Mode::kExclusive);
  EXPECT_EQ(BytesOf(version, lock->mode(), HoldsOf(*lock)), bytes);
  return true;
}

// Replaces `size` bytes at `at` by a number.
std::string Patched(std::string bytes, size_t at, size_t size, uint64_t number) {
  return bytes.replace(at, size, Word(number, size));
}

std::string Flipped(std::string bytes, size_t bit) {
  bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
  return bytes;
}

Hold With(Hold hold, Millis linger, uint32_t count) {
  hold.linger = linger;
  hold.count = count;
  return hold;
}

// The same token, of a hold that it leads by so much.
Hold WithLead(Hold hold, int64_t lead) {
  hold.since = Instant{Millis{static_cast<int64_t>(hold.token.value / 1000) - lead}};
  return hold;
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
    for (const std::string& owner : owners_) holds.push_back(AnyHold(Owner{owner}));
    return holds;
  }

  template <typename T>
  void Shuffle(std::vector<T>& items) {
    std::shuffle(items.begin(), items.end(), random_);
  }

 private:
  // One of two is near to what is usual, and most of these have narrow records.
  Hold AnyHold(Owner owner) {
    Hold hold{owner, Token{1 + AnyNumber() % kMaxToken.value}, AnyMoment(), AnyMoment()};
    if (Below(2) == 0) {
      hold.linger = Millis{Below(2) == 0 ? 0 : static_cast<int64_t>(AnyNumber())};
      hold.count = static_cast<uint32_t>(Below(2) == 0 ? 1 : 1 + Below(kMaxCount));
      return hold;
    }
    const auto lead = static_cast<int64_t>(Below(2 * PowerOfTwo(20) + 3)) - kTooMuchLead - 1;
    hold.since = std::max(kMinInstant, WithLead(hold, lead).since);
    hold.end = Instant{hold.end.time_since_epoch() % static_cast<int64_t>(PowerOfTwo(43))};
    return hold;
  }

  // Below 2^53, of any size.
  uint64_t AnyNumber() { return random_() >> (11 + Below(53)); }
  Instant AnyMoment() { return Instant{Millis{static_cast<int64_t>(AnyNumber())}}; }

  std::mt19937_64 random_;
  std::vector<std::string> owners_;
};

// --- The bytes --------------------------------------------------------------------------------

TEST(Encoding, WritesTheseBytesForOneHold) {
  const auto expect = [](Mode mode, const Hold& hold, const std::string& bytes) {
    EXPECT_EQ(Encode(*LockOf(mode, {hold})), bytes);
    const LockPtr lock = DecodeNow(bytes);
    ASSERT_NE(lock, nullptr);
    EXPECT_EQ(lock->mode(), mode);
    EXPECT_EQ(HoldsOf(*lock), Holds{hold});
  };
  expect(Mode::kExclusive, kExample, kExampleRecord);
  expect(Mode::kShared, kExample, "\x40\x22\x20\x18\x24\x0a\xe6\x20" + kExampleRecord.substr(8));
  expect(Mode::kLimit, kExample, "\x40\x22\x20\x18\x24\x0a\xe6\x40" + kExampleRecord.substr(8));
  expect(Mode::kExclusive, kSecond, kSecondRecord);
  expect(Mode::kShared, kSecond, "\x06\x05\x04\x03\x02\x01\x00\x20"s + kSecondRecord.substr(8));
  expect(Mode::kLimit, kSecond, "\x06\x05\x04\x03\x02\x01\x00\x40"s + kSecondRecord.substr(8));
  // The lead is twice its number, modulo 2^22.
  const std::string begin = kExampleRecord.substr(0, 8);
  expect(Mode::kExclusive, WithLead(kExample, 5),
         begin + "\x0a\x00\xc0\x6a\x77\xf9\xf3\x62worker-7"s);
  expect(Mode::kExclusive, WithLead(kExample, -1),
         begin + "\xfe\xff\xff\x6a\x77\xf9\xf3\x62worker-7");
}

TEST(Encoding, WritesTheseBytesForTwoHolds) {
  const std::string shared = "\x00\x00\x00\x00\x00\x00\x00\xa0"s + kExampleListed + kSecondListed;
  const std::string limit = "\x00\x00\x00\x00\x00\x00\x00\xc0"s + kExampleListed + kSecondListed;
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

// Those of version 3 in docs/storage-format.md.
TEST(Encoding, ExamplesOfTheStorageFormat) {
  const Hold narrow{Owner{"ab"}, Token{7'000'000}, Instant{Millis{6998}}, Instant{Millis{9000}}};
  const Hold wide = With(narrow, Millis{5}, 1);
  const Hold other{Owner{"c"}, Token{7'000'001}, Instant{Millis{7000}}, Instant{Millis{9500}}};
  EXPECT_EQ(Encode(*LockOf(Mode::kExclusive, {narrow})),
            "\xc0\xcf\x6a\x00\x00\x00\x20\x00"
            "\x04\x00\x00\xca\x08\x00\x00\x00"
            "ab"s);
  EXPECT_EQ(Encode(*LockOf(Mode::kShared, {wide})),
            "\xc0\xcf\x6a\x00\x00\x00\x20\x20"
            "\x01\x00\x00\x00\x00\x00\x00\x00"
            "\x56\x1b\x00\x00\x00\x00\x00\x00"
            "\x28\x23\x00\x00\x00\x00\x00\x00"
            "\x05\x00\x00\x00\x00\x00\x00\x00"
            "\x01\x00\x00\x00"
            "ab"s);
  EXPECT_EQ(Encode(*LockOf(Mode::kShared, {wide, other})),
            "\x00\x00\x00\x00\x00\x00\x00\xa0"
            "\xc0\xcf\x6a\x00\x00\x00\x00\x00"
            "\x56\x1b\x00\x00\x00\x00\x00\x00"
            "\x28\x23\x00\x00\x00\x00\x00\x00"
            "\x05\x00\x00\x00\x00\x00\x00\x00"
            "\x01\x00\x00\x00\x02\x00"
            "ab"
            "\xc1\xcf\x6a\x00\x00\x00\x00\x00"
            "\x58\x1b\x00\x00\x00\x00\x00\x00"
            "\x1c\x25\x00\x00\x00\x00\x00\x00"
            "\x00\x00\x00\x00\x00\x00\x00\x00"
            "\x01\x00\x00\x00\x01\x00"
            "c"s);
}

TEST(Encoding, VersionsAndModesKeepTheirNumbers) {
  EXPECT_EQ(static_cast<int>(EncodingVersion::kOneHold), 1);
  EXPECT_EQ(static_cast<int>(EncodingVersion::kManyHolds), 2);
  EXPECT_EQ(static_cast<int>(EncodingVersion::kRecords), 3);
  EXPECT_EQ(kCurrentEncoding, EncodingVersion::kRecords);
  EXPECT_EQ(static_cast<int>(Mode::kExclusive), 0);
  EXPECT_EQ(static_cast<int>(Mode::kShared), 1);
  EXPECT_EQ(static_cast<int>(Mode::kLimit), 2);
}

TEST(Encoding, UnknownVersions) {
  for (const int version : {0, 4, 5, 255, 1023, -1, INT32_MAX, INT32_MIN}) {
    for (const std::string& bytes : {kVersion1Bytes, kVersion2Bytes, kExampleRecord, kSecondRecord,
                                     BytesOf(Mode::kShared, {kExample, kSecond})}) {
      EXPECT_EQ(DecodeExact(bytes, static_cast<EncodingVersion>(version)), nullptr) << version;
    }
  }
}

// No version takes what another one wrote for something of its own, where it can be told.
TEST(Encoding, BytesOfAnotherVersion) {
  const auto decodes = [](const std::string& bytes, EncodingVersion version) {
    return DecodeExact(bytes, version) != nullptr;
  };
  for (const std::string& bytes :
       {kVersion2Bytes, List(EncodingVersion::kManyHolds, Mode::kShared, {kExample, kSecond})}) {
    EXPECT_FALSE(decodes(bytes, EncodingVersion::kOneHold));
    EXPECT_FALSE(decodes(bytes, EncodingVersion::kRecords));
  }
  for (const std::string& bytes :
       {kExampleRecord, kSecondRecord, BytesOf(Mode::kShared, {kExample, kSecond})}) {
    EXPECT_FALSE(decodes(bytes, EncodingVersion::kManyHolds));
  }
  EXPECT_FALSE(decodes(kVersion1Bytes, EncodingVersion::kManyHolds));
  EXPECT_FALSE(decodes(kVersion1Bytes, EncodingVersion::kRecords));
}

// --- There and back ---------------------------------------------------------------------------

void ExpectBack(Mode mode, const Hold& hold) {
  const std::string bytes = Encode(*LockOf(mode, {hold}));
  ASSERT_EQ(bytes, BytesOf(mode, {hold}));
  const LockPtr lock = DecodeNow(bytes);
  ASSERT_NE(lock, nullptr);
  ASSERT_EQ(lock->mode(), mode);
  ASSERT_EQ(HoldsOf(*lock), Holds{hold});
  ASSERT_EQ(lock->closes(), hold.closes());
}

// Every `since` and `end` that is at an edge, also those that depend on the token.
void ExpectMomentsBack(Mode mode, Hold hold) {
  std::vector<Instant> sinces = {kMinInstant, kMinInstant + Millis{1}, kMaxInstant};
  for (const int64_t lead : {int64_t{0}, int64_t{1}, kTooMuchLead - 1, kTooMuchLead}) {
    for (const int64_t sign : {-1, 1}) {
      const Instant since = WithLead(hold, sign * lead).since;
      if (since >= kMinInstant) sinces.push_back(since);
    }
  }
  for (const Instant since : sinces) {
    for (const Instant end :
         {kMinInstant, kExample.end, kTooLateEnd - Millis{1}, kTooLateEnd, kMaxInstant}) {
      hold.since = since;
      hold.end = end;
      ASSERT_NO_FATAL_FAILURE(ExpectBack(mode, hold));
    }
  }
}

// The edges of every field, in every combination.
TEST(Encoding, EdgesComeBack) {
  const std::vector<std::string> owners = {
      "o", "\0"s, "\xff", std::string(255, 'o'), std::string(256, '\0'), std::string(256, '\xff')};
  for (const std::string& owner : owners) {
    for (const Token token : {kMinToken, Token{999}, Token{1000}, kExample.token, kMaxToken}) {
      for (const Millis linger : {Millis{0}, Millis{1}, kMaxLinger}) {
        for (const uint32_t count : {1U, 2U, 256U, kMaxCount}) {
          for (const Mode mode : kModes) {
            const Hold hold{Owner{owner}, token, {}, {}, linger, count};
            ASSERT_NO_FATAL_FAILURE(ExpectMomentsBack(mode, hold));
          }
        }
      }
    }
  }
}

// What is rare costs 28 bytes more, and nothing else does.
TEST(Encoding, RecordsAreWideOnlyIfTheyMustBe) {
  const auto extra = [](const Hold& hold) {
    return Encode(*LockOf(Mode::kExclusive, {hold})).size() - 16 - hold.owner.bytes.size();
  };
  Hold last = kExample;
  last.end = Instant{Millis{4'398'046'511'103}};
  Hold later = kExample;
  later.end = Instant{Millis{4'398'046'511'104}};
  for (const Hold& narrow :
       {kExample, WithLead(kExample, 1'048'575), WithLead(kExample, -1'048'575), last}) {
    EXPECT_EQ(extra(narrow), 0U);
  }
  for (const Hold& wide : {With(kExample, Millis{1}, 1), With(kExample, Millis{0}, 2),
                           WithLead(kExample, 1'048'576), WithLead(kExample, -1'048'576), later}) {
    EXPECT_EQ(extra(wide), 28U);
  }
}

TEST(Encoding, RandomLocksComeBack) {
  constexpr uint64_t kSeed = 99;
  Maker maker(kSeed);
  int narrow = 0;
  int wide = 0;
  for (int i = 0; i < 5'000; ++i) {
    SCOPED_TRACE(testing::Message() << "seed " << kSeed << ", round " << i);
    const Mode mode = kModes[maker.Below(3)];
    Holds holds =
        maker.AnyHolds(mode == Mode::kExclusive || maker.Below(4) == 0 ? 1 : 1 + maker.Below(12));
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
    if (holds.size() == 1) ++(NeedsWidth(holds[0]) ? wide : narrow);
  }
  EXPECT_GT(narrow, 500);
  EXPECT_GT(wide, 500);
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
    for (const Hold& hold : shuffled) detour.push_back(With(hold, kMaxLinger, 77));
    detour.insert(detour.end(), holds.begin(), holds.end());
    LockPtr lock = LockOf(mode, detour);
    ASSERT_EQ(Apply(lock.get(), Ended{detour.front().owner}), lock.get());
    ASSERT_EQ(Encode(*lock), bytes);
    const LockPtr loaded = Decode(bytes, kCurrentEncoding);
    ASSERT_EQ(Encode(*loaded), bytes);
  }
}

// A record that was wide becomes narrow when nothing rare is left of it.
TEST(Encoding, RareFieldsThatCameAndWentLeaveNothing) {
  Hold late = kExample;
  late.end = kMaxInstant;
  for (const Mode mode : kModes) {
    const std::string bytes = BytesOf(mode, {kExample});
    ASSERT_EQ(bytes.size(), 24U);
    for (const Hold& rare :
         {With(kExample, Millis{5}, 1), With(kExample, Millis{0}, 3), With(kExample, Millis{5}, 3),
          WithLead(kExample, kTooMuchLead), WithLead(kExample, -kTooMuchLead), late}) {
      EXPECT_EQ(Encode(*LockOf(mode, {rare, kExample})), bytes);
      EXPECT_EQ(Encode(*LockOf(mode, {kExample, rare, kExample})), bytes);
      EXPECT_EQ(Encode(*LockOf(mode, {kExample, rare})), BytesOf(mode, {rare}));
    }
    // Counted down by releases.
    LockPtr lock = LockOf(mode, {With(kExample, Millis{0}, 3)});
    for (int i = 0; i < 2; ++i) {
      Lock* const next = Apply(lock.get(), Released{kExample.owner});
      if (next != lock.get()) lock.reset(next);
    }
    EXPECT_EQ(Encode(*lock), bytes);
  }
}

// --- Whose bytes they are ---------------------------------------------------------------------

// A decoded lock has its own copy of everything.
TEST(Encoding, DecodedLockOutlivesItsBytes) {
  for (const Holds& holds : {Holds{kExample}, Holds{kSecond}, Holds{kExample, kSecond}}) {
    std::string bytes = BytesOf(Mode::kShared, holds);
    const LockPtr lock = Decode(bytes, kCurrentEncoding);
    bytes.assign(bytes.size(), '#');
    EXPECT_EQ(HoldsOf(*lock), holds);
  }
  std::string old = kVersion1Bytes;
  const LockPtr lock = Decode(old, EncodingVersion::kOneHold);
  old.assign(old.size(), '#');
  EXPECT_EQ(HoldsOf(*lock), Holds{kExample});
}

TEST(DecodeAndTake, LeavesTheBytesOfOneHoldWhereTheyAre) {
  for (const Mode mode : kModes) {
    for (const Hold& hold : {kExample, kSecond}) {
      const std::string bytes = BytesOf(mode, {hold});
      char* const given = NewBytes(bytes);
      LockPtr lock = DecodeAndTake(given, bytes.size(), kCurrentEncoding);
      ASSERT_NE(lock, nullptr);
      EXPECT_EQ(static_cast<void*>(lock.get()), given);
      EXPECT_EQ(lock->AsBytes().data(), given);
      EXPECT_EQ(HoldsOf(*lock), Holds{hold});
      // It is a lock as any other: what needs another size takes its place, and it goes.
      Hold later = hold;
      later.end += Millis{1};
      EXPECT_EQ(Apply(lock.get(), Held{mode, later}), lock.get());
      EXPECT_EQ(HoldsOf(*lock), Holds{later});
      Hold other = hold == kExample ? kSecond : kExample;
      other.owner = hold.owner;
      lock.reset(Apply(lock.get(), Held{mode, other}));
      EXPECT_EQ(HoldsOf(*lock), Holds{other});
    }
  }
}

// A sanitizer sees what is not freed, or freed twice.
TEST(DecodeAndTake, FreesWhatTheLockDoesNotNeed) {
  const auto take = [](const std::string& bytes, EncodingVersion version) {
    return DecodeAndTake(NewBytes(bytes), bytes.size(), version);
  };
  const std::string several = BytesOf(Mode::kShared, {kExample, kSecond});
  EXPECT_EQ(HoldsOf(*take(several, kCurrentEncoding)), (Holds{kExample, kSecond}));
  EXPECT_EQ(HoldsOf(*take(kVersion1Bytes, EncodingVersion::kOneHold)), Holds{kExample});
  EXPECT_EQ(HoldsOf(*take(kVersion2Bytes, EncodingVersion::kManyHolds)), Holds{kExample});
  for (const EncodingVersion version :
       {EncodingVersion{0}, EncodingVersion::kOneHold, EncodingVersion::kManyHolds,
        EncodingVersion::kRecords, EncodingVersion{4}}) {
    EXPECT_EQ(take("", version), nullptr);
    EXPECT_EQ(take("#", version), nullptr);
    EXPECT_EQ(take(std::string(100, '\xff'), version), nullptr);
  }
  EXPECT_EQ(take(kExampleRecord + "#", kCurrentEncoding), nullptr);
  EXPECT_EQ(take(several + "#", kCurrentEncoding), nullptr);
}

// --- Version 1 --------------------------------------------------------------------------------

TEST(EncodingVersion1, StillDecodes) {
  const LockPtr lock = DecodeExact(kVersion1Bytes, EncodingVersion::kOneHold);
  ASSERT_NE(lock, nullptr);
  EXPECT_EQ(lock->mode(), Mode::kExclusive);
  EXPECT_EQ(HoldsOf(*lock), Holds{kExample});
  // What is written from now on is the current version.
  EXPECT_EQ(Encode(*lock), kExampleRecord);
}

TEST(EncodingVersion1, CutAtAnyByte) {
  for (size_t size = 0; size < kVersion1Bytes.size(); ++size) {
    const LockPtr lock = DecodeExact(kVersion1Bytes.substr(0, size), EncodingVersion::kOneHold);
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
    return DecodeExact(kExampleNumbers + std::string(size, 'o'), EncodingVersion::kOneHold) !=
           nullptr;
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
    const LockPtr lock = DecodeExact(Flipped(kVersion1Bytes, bit), EncodingVersion::kOneHold);
    // Each number is below 2^53: its highest eleven bits must be clear.
    const bool beyond = bit < kVersion1OwnerAt * 8 && bit % 64 >= 53;
    EXPECT_EQ(lock == nullptr, beyond);
    if (lock == nullptr) continue;
    EXPECT_TRUE(IsWellFormed(HoldsOf(*lock)[0]));
    EXPECT_FALSE(HoldsOf(*lock)[0] == kExample);
  }
}

// Numbers that no moment, linger or token may be.
constexpr uint64_t kLast = (uint64_t{1} << 53) - 1;
constexpr uint64_t kBeyond[] = {
    kLast + 1,   kLast + 2, uint64_t{1} << 62, uint64_t{1} << 63, (uint64_t{1} << 63) + 1,
    ~uint64_t{0}};

TEST(EncodingVersion1, NumbersOutOfRange) {
  for (const size_t field : {kTokenAt, kSinceAt, kEndAt}) {
    SCOPED_TRACE(field);
    const auto decodes = [field](uint64_t number) {
      return DecodeExact(Patched(kVersion1Bytes, field, 8, number), EncodingVersion::kOneHold) !=
             nullptr;
    };
    EXPECT_EQ(decodes(0), field != kTokenAt);  // token 0 is none
    EXPECT_TRUE(decodes(1));
    EXPECT_TRUE(decodes(kLast));
    for (const uint64_t number : kBeyond) EXPECT_FALSE(decodes(number)) << number;
  }
}

// --- Version 2 --------------------------------------------------------------------------------

TEST(EncodingVersion2, StillDecodes) {
  const LockPtr one = DecodeExact(kVersion2Bytes, EncodingVersion::kManyHolds);
  ASSERT_NE(one, nullptr);
  EXPECT_EQ(one->mode(), Mode::kExclusive);
  EXPECT_EQ(HoldsOf(*one), Holds{kExample});
  EXPECT_EQ(Encode(*one), kExampleRecord);
  const std::string holds = kExampleListed + kSecondListed;
  for (const auto& [head, mode] : {std::pair("\x01", Mode::kShared), {"\x02", Mode::kLimit}}) {
    const LockPtr two = DecodeExact(head + holds, EncodingVersion::kManyHolds);
    ASSERT_NE(two, nullptr);
    EXPECT_EQ(two->mode(), mode);
    EXPECT_EQ(HoldsOf(*two), (Holds{kExample, kSecond}));
    EXPECT_EQ(Encode(*two), BytesOf(mode, {kExample, kSecond}));
  }
}

TEST(EncodingVersion2, AnyLockComesBack) {
  constexpr uint64_t kSeed = 102;
  Maker maker(kSeed);
  for (int i = 0; i < 2'000; ++i) {
    SCOPED_TRACE(testing::Message() << "seed " << kSeed << ", round " << i);
    const Mode mode = kModes[maker.Below(3)];
    const LockPtr lock =
        LockOf(mode, maker.AnyHolds(mode == Mode::kExclusive ? 1 : 1 + maker.Below(6)));
    const std::string bytes = List(EncodingVersion::kManyHolds, mode, HoldsOf(*lock));
    const LockPtr again = DecodeExact(bytes, EncodingVersion::kManyHolds);
    ASSERT_NE(again, nullptr);
    ASSERT_EQ(again->mode(), mode);
    ASSERT_EQ(HoldsOf(*again), HoldsOf(*lock));
    ASSERT_EQ(Encode(*again), Encode(*lock));
  }
}

TEST(EncodingVersion2, EveryMode) {
  for (uint64_t mode = 0; mode < 256; ++mode) {
    const std::string bytes = Patched(kVersion2Bytes, 0, 1, mode);
    EXPECT_EQ(DecodeExact(bytes, EncodingVersion::kManyHolds) != nullptr, mode <= 2) << mode;
  }
}

// --- Version 3: records -----------------------------------------------------------------------

TEST(Record, OfEveryMode) {
  for (const std::string& record : {kExampleRecord, kSecondRecord}) {
    for (uint64_t mode = 0; mode < 8; ++mode) {
      // With the highest bit it would be a list.
      const std::string bytes = Patched(record, 7, 1, mode * 32);
      EXPECT_EQ(DecodeNow(bytes) != nullptr, mode <= 2) << mode;
    }
  }
}

TEST(Record, CutAtAnyByte) {
  for (const std::string& record : {kExampleRecord, kSecondRecord}) {
    for (size_t size = 0; size < record.size(); ++size) {
      EXPECT_EQ(DecodeNow(record.substr(0, size)), nullptr) << size;
    }
  }
}

TEST(Record, BytesTooMany) {
  for (const std::string& record : {kExampleRecord, kSecondRecord}) {
    for (const size_t more : {1U, 2U, 28U, 255U, 256U}) {
      EXPECT_EQ(DecodeNow(record + std::string(more, '\0')), nullptr) << more;
      EXPECT_EQ(DecodeNow(record + std::string(more, 'o')), nullptr) << more;
    }
  }
}

// The size of the owner is in the record, and the size of the record must agree.
TEST(Record, OwnerOf1To256Bytes) {
  for (size_t said = 1; said <= 256; ++said) {
    const std::string narrow = NarrowWords(0, said, 7'000'000, 2, 9000);
    const std::string wide = narrow.substr(0, kTimesAt) + kSecondRecord.substr(kTimesAt, 36);
    for (const size_t size : {size_t{0}, said - 1, said, said + 1, size_t{256}, size_t{257}}) {
      const std::string owner(size, 'o');
      EXPECT_EQ(DecodeNow(narrow + owner) != nullptr, size == said) << said << " " << size;
      EXPECT_EQ(DecodeNow(wide + owner) != nullptr, size == said) << said << " " << size;
    }
  }
}

// A hold has one record.
TEST(Record, WideWhereNarrowWouldDo) {
  Hold last = kExample;
  last.end = kTooLateEnd - Millis{1};
  Hold first = kExample;
  first.end = kMinInstant;
  for (const Mode mode : kModes) {
    for (const Hold& narrow : {kExample, WithLead(kExample, kTooMuchLead - 1),
                               WithLead(kExample, 1 - kTooMuchLead), last, first}) {
      EXPECT_NE(DecodeNow(NarrowRecord(mode, narrow)), nullptr);
      EXPECT_EQ(DecodeNow(WideRecord(mode, narrow)), nullptr);
    }
    Hold late = kExample;
    late.end = kTooLateEnd;
    for (const Hold& wide :
         {With(kExample, Millis{1}, 1), With(kExample, Millis{0}, 2),
          WithLead(kExample, kTooMuchLead), WithLead(kExample, -kTooMuchLead), late}) {
      EXPECT_NE(DecodeNow(WideRecord(mode, wide)), nullptr);
    }
  }
}

// Nothing but 1 says that a record is wide.
TEST(Record, OtherWordsOfAWideRecord) {
  for (size_t bit = 0; bit < 64; ++bit) {
    EXPECT_EQ(DecodeNow(Flipped(kSecondRecord, 8 * kTimesAt + bit)), nullptr) << bit;
  }
  for (const uint64_t word : {uint64_t{3}, PowerOfTwo(22) + 1, PowerOfTwo(63) + 1, ~uint64_t{0}}) {
    EXPECT_EQ(DecodeNow(Patched(kSecondRecord, kTimesAt, 8, word)), nullptr) << word;
    // Not even with the size of a narrow one.
    EXPECT_EQ(DecodeNow(Patched(kExampleRecord, kTimesAt, 8, word)), nullptr) << word;
  }
}

// The lowest of the numbers of its 21 bits is not in use: leads are as far to either side.
TEST(Record, LeadsOfANarrowRecord) {
  const auto decodes = [](uint64_t token, int64_t lead) {
    return DecodeNow(NarrowWords(0, 1, token, lead, 9000) + "o") != nullptr;
  };
  constexpr uint64_t kLate = 1'700'000'000'123'456;
  EXPECT_TRUE(decodes(kLate, kTooMuchLead - 1));
  EXPECT_TRUE(decodes(kLate, 0));
  EXPECT_TRUE(decodes(kLate, -1));
  EXPECT_TRUE(decodes(kLate, 1 - kTooMuchLead));
  EXPECT_FALSE(decodes(kLate, -kTooMuchLead));
  // Nor may a hold begin before 1970.
  EXPECT_TRUE(decodes(5'999, 5));
  EXPECT_FALSE(decodes(5'999, 6));
  EXPECT_TRUE(decodes(1, 0));
  EXPECT_FALSE(decodes(1, 1));
  EXPECT_TRUE(decodes(1, -1));
  EXPECT_TRUE(decodes(kMaxToken.value, 1 - kTooMuchLead));
}

TEST(Record, TokenZero) {
  EXPECT_EQ(DecodeNow(NarrowWords(0, 1, 0, 0, 9000) + "o"), nullptr);
  EXPECT_EQ(DecodeNow(NarrowWords(0, 1, 0, -5, 9000) + "o"), nullptr);
  EXPECT_EQ(DecodeNow(Patched(kSecondRecord, 0, 6, 0)), nullptr);
  EXPECT_NE(DecodeNow(Patched(kSecondRecord, 0, 6, 1)), nullptr);
}

TEST(Record, NumbersOutOfRangeInAWideOne) {
  for (const size_t field : {kWideSinceAt, kWideEndAt, kWideLingerAt}) {
    SCOPED_TRACE(field);
    const auto decodes = [field](uint64_t number) {
      return DecodeNow(Patched(kSecondRecord, field, 8, number)) != nullptr;
    };
    EXPECT_TRUE(decodes(0));
    EXPECT_TRUE(decodes(1));
    EXPECT_TRUE(decodes(kLast));
    for (const uint64_t number : kBeyond) EXPECT_FALSE(decodes(number)) << number;
  }
  EXPECT_EQ(DecodeNow(Patched(kSecondRecord, kWideCountAt, 4, 0)), nullptr);
  EXPECT_NE(DecodeNow(Patched(kSecondRecord, kWideCountAt, 4, 1)), nullptr);
  EXPECT_NE(DecodeNow(Patched(kSecondRecord, kWideCountAt, 4, kMaxCount)), nullptr);
}

// A flipped bit is noticed or gives another lock with bytes of its own.
TEST(Record, AnyFlippedBitOfANarrowOne) {
  for (size_t bit = 0; bit < kExampleRecord.size() * 8; ++bit) {
    SCOPED_TRACE(bit);
    const bool decodes = DecodesExactly(Flipped(kExampleRecord, bit), kCurrentEncoding);
    // The owner's size; whether it is a list; whether it is wide; the highest bit of the lead 0.
    const bool noticed =
        (bit >= 53 && bit < 61) || bit == 63 || bit == 8 * kTimesAt || bit == 8 * kTimesAt + 21;
    EXPECT_EQ(decodes, !noticed);
  }
}

TEST(Record, AnyFlippedBitOfAWideOne) {
  for (size_t bit = 0; bit < kSecondRecord.size() * 8; ++bit) {
    SCOPED_TRACE(bit);
    const bool decodes = DecodesExactly(Flipped(kSecondRecord, bit), kCurrentEncoding);
    const bool in_head = (bit >= 53 && bit < 61) || bit == 63;
    const bool in_times = bit >= 8 * kTimesAt && bit < 8 * kWideSinceAt;
    const bool beyond = bit >= 8 * kWideSinceAt && bit < 8 * kWideCountAt && bit % 64 >= 53;
    EXPECT_EQ(decodes, !in_head && !in_times && !beyond);
  }
}

// --- Lists of holds: version 2, and version 3 for several -------------------------------------

std::string VersionName(const testing::TestParamInfo<EncodingVersion>& param_info) {
  return "Version" + std::to_string(static_cast<int>(param_info.param));
}

class ListOfHolds : public testing::TestWithParam<EncodingVersion> {
 protected:
  static EncodingVersion version() { return GetParam(); }
  static std::string ListOf(Mode mode, const Holds& holds) { return List(version(), mode, holds); }
  static bool Decodes(std::string_view bytes) { return DecodesExactly(bytes, version()); }
  static size_t FirstHoldAt() { return Head(version(), 0).size(); }
};

INSTANTIATE_TEST_SUITE_P(Versions, ListOfHolds,
                         testing::Values(EncodingVersion::kManyHolds, EncodingVersion::kRecords),
                         VersionName);

TEST_P(ListOfHolds, IsNotEmpty) {
  EXPECT_FALSE(Decodes(""));
  for (const Mode mode : kModes) EXPECT_FALSE(Decodes(ListOf(mode, {})));
}

// In version 3 one hold is a record.
TEST_P(ListOfHolds, OfOneHold) {
  for (const Mode mode : kModes) {
    for (const Hold& hold : {kExample, kSecond}) {
      EXPECT_EQ(Decodes(ListOf(mode, {hold})), version() == EncodingVersion::kManyHolds);
    }
  }
}

TEST_P(ListOfHolds, OfTwoExclusiveHolds) {
  EXPECT_TRUE(Decodes(ListOf(Mode::kShared, {kExample, kSecond})));
  EXPECT_TRUE(Decodes(ListOf(Mode::kLimit, {kExample, kSecond})));
  EXPECT_FALSE(Decodes(ListOf(Mode::kExclusive, {kExample, kSecond})));
}

TEST_P(ListOfHolds, AfterAnyHead) {
  const std::string holds = kExampleListed + kSecondListed;
  const size_t bits = 8 * FirstHoldAt();
  const size_t modes = version() == EncodingVersion::kManyHolds ? 256 : 4;
  for (uint64_t mode = 0; mode < modes; ++mode) {
    EXPECT_EQ(Decodes(Head(version(), mode) + holds), mode == 1 || mode == 2) << mode;
  }
  for (const uint64_t mode : {1U, 2U}) {
    for (size_t bit = 0; bit < bits; ++bit) {
      // From one of the two to the other takes two bits.
      EXPECT_FALSE(Decodes(Flipped(Head(version(), mode), bit) + holds)) << mode << " " << bit;
    }
  }
}

TEST_P(ListOfHolds, CutAtAnyByte) {
  const std::string bytes = ListOf(Mode::kShared, {kExample, kSecond});
  for (size_t size = 0; size < bytes.size(); ++size) {
    // Between two holds is a list of the first.
    const bool whole = version() == EncodingVersion::kManyHolds &&
                       size == ListOf(Mode::kShared, {kExample}).size();
    EXPECT_EQ(Decodes(bytes.substr(0, size)), whole) << size;
  }
}

TEST_P(ListOfHolds, BytesTooMany) {
  const std::string bytes = ListOf(Mode::kShared, {kExample, kSecond});
  for (const size_t more : {size_t{1}, size_t{2}, kOwnerAt - 1, kOwnerAt, kOwnerAt + 1}) {
    EXPECT_FALSE(Decodes(bytes + std::string(more, '\0'))) << more;
    EXPECT_FALSE(Decodes(bytes + std::string(more, '\x01'))) << more;
  }
}

TEST_P(ListOfHolds, OwnersOutOfOrder) {
  for (const Mode mode : {Mode::kShared, Mode::kLimit}) {
    EXPECT_TRUE(Decodes(ListOf(mode, {kExample, kSecond})));
    EXPECT_FALSE(Decodes(ListOf(mode, {kSecond, kExample})));
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
      EXPECT_TRUE(Decodes(ListOf(mode, {low, high})));
      EXPECT_FALSE(Decodes(ListOf(mode, {high, low})));
    }
  }
}

TEST_P(ListOfHolds, AnOwnerTwice) {
  Hold other = kExample;
  other.token = Token{5};
  for (const Mode mode : kModes) {
    EXPECT_FALSE(Decodes(ListOf(mode, {kExample, kExample})));
    EXPECT_FALSE(Decodes(ListOf(mode, {kExample, other})));
  }
  EXPECT_FALSE(Decodes(ListOf(Mode::kShared, {kExample, kSecond, kSecond})));
  EXPECT_FALSE(Decodes(ListOf(Mode::kShared, {kExample, kSecond, kExample})));
}

TEST_P(ListOfHolds, NumbersOutOfRange) {
  const std::string bytes = ListOf(Mode::kShared, {kExample, kSecond});
  for (const size_t hold_at : {FirstHoldAt(), FirstHoldAt() + kExampleListed.size()}) {
    for (const size_t field : {kTokenAt, kSinceAt, kEndAt, kLingerAt}) {
      SCOPED_TRACE(testing::Message() << hold_at << " + " << field);
      const auto decodes = [&](uint64_t number) {
        return Decodes(Patched(bytes, hold_at + field, 8, number));
      };
      EXPECT_EQ(decodes(0), field != kTokenAt);
      EXPECT_TRUE(decodes(1));
      EXPECT_TRUE(decodes(kLast));
      for (const uint64_t number : kBeyond) EXPECT_FALSE(decodes(number)) << number;
    }
    EXPECT_FALSE(Decodes(Patched(bytes, hold_at + kCountAt, 4, 0)));
    EXPECT_TRUE(Decodes(Patched(bytes, hold_at + kCountAt, 4, 1)));
    EXPECT_TRUE(Decodes(Patched(bytes, hold_at + kCountAt, 4, kMaxCount)));
    EXPECT_FALSE(Decodes(Patched(bytes, hold_at + kOwnerSizeAt, 2, 0)));
    EXPECT_FALSE(Decodes(Patched(bytes, hold_at + kOwnerSizeAt, 2, 0xffff)));
  }
}

TEST_P(ListOfHolds, OwnerOf1To256Bytes) {
  const auto decodes = [](size_t size) {
    const std::string owner(size, 'o');
    Hold hold = kExample;
    hold.owner = Owner{owner};
    return Decodes(ListOf(Mode::kLimit, {hold, kSecond}));
  };
  EXPECT_FALSE(decodes(0));
  EXPECT_TRUE(decodes(1));
  EXPECT_TRUE(decodes(255));
  EXPECT_TRUE(decodes(256));
  EXPECT_FALSE(decodes(257));
  EXPECT_FALSE(decodes(65'535));
}

// A flipped bit is noticed or gives another lock with bytes of its own.
TEST_P(ListOfHolds, AnyFlippedBit) {
  int rejected = 0;
  const std::string good = ListOf(Mode::kShared, {kExample, kSecond});
  for (size_t bit = 0; bit < good.size() * 8; ++bit) {
    SCOPED_TRACE(bit);
    if (!Decodes(Flipped(good, bit))) ++rejected;
  }
  // The eleven highest bits of four numbers, twice, and more.
  EXPECT_GE(rejected, 2 * 4 * 11 + 7);
}

// --- Bytes that nobody wrote ------------------------------------------------------------------

class Damage : public testing::TestWithParam<EncodingVersion> {};

INSTANTIATE_TEST_SUITE_P(Versions, Damage,
                         testing::Values(EncodingVersion::kManyHolds, EncodingVersion::kRecords),
                         VersionName);

// Good bytes of any lock with a few bytes changed, moved, doubled or lost.
TEST_P(Damage, IsNoticedOrGivesAnotherLock) {
  constexpr uint64_t kSeed = 1234;
  Maker maker(kSeed);
  int decoded = 0;
  int rejected = 0;
  for (int i = 0; i < 40'000; ++i) {
    SCOPED_TRACE(testing::Message() << "seed " << kSeed << ", round " << i);
    const Mode mode = kModes[maker.Below(3)];
    const LockPtr lock =
        LockOf(mode, maker.AnyHolds(mode == Mode::kExclusive ? 1 : 1 + maker.Below(3)));
    std::string bytes = BytesOf(GetParam(), mode, HoldsOf(*lock));
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
    ++(DecodesExactly(bytes, GetParam()) ? decoded : rejected);
    if (HasFailure()) return;
  }
  EXPECT_GT(decoded, 1'000);
  EXPECT_GT(rejected, 1'000);
}

std::string RandomBytes(std::mt19937_64& random, size_t size) {
  std::string bytes(size, '\0');
  for (char& c : bytes) c = static_cast<char>(random() & 0xff);
  return bytes;
}

// Takes the highest bytes away from most of the numbers at these places.
std::string WithSmallNumbers(std::mt19937_64& random, std::string bytes,
                             std::initializer_list<size_t> places) {
  for (const size_t at : places) {
    if (random() % 4 != 0) bytes[at + 7] = 0;
    if (random() % 4 != 0) bytes[at + 6] = 0;
  }
  return bytes;
}

// Of the shape of a lock of one hold, so that some decode.
std::string ShapedBytes(std::mt19937_64& random, EncodingVersion version) {
  const size_t owner_size = 1 + random() % 3;
  if (version == EncodingVersion::kManyHolds) {
    const std::string bytes = WithSmallNumbers(random, RandomBytes(random, kOwnerAt + owner_size),
                                               {kTokenAt, kSinceAt, kEndAt, kLingerAt});
    return Head(version, random() % 4) + Patched(bytes, kOwnerSizeAt, 2, owner_size);
  }
  const bool wide = random() % 2 == 0;
  std::string bytes = RandomBytes(random, (wide ? kWideOwnerAt : kNarrowOwnerAt) + owner_size);
  bytes = Patched(bytes, 6, 2, (random() % 8 * 256 + owner_size - 1) * 32);
  if (!wide) return bytes;
  return WithSmallNumbers(random, Patched(bytes, kTimesAt, 8, 1),
                          {kWideSinceAt, kWideEndAt, kWideLingerAt});
}

TEST_P(Damage, OfAllBytesIsNoticedOrGivesAnotherLock) {
  constexpr uint64_t kSeed = 1235;
  SCOPED_TRACE(kSeed);
  std::mt19937_64 random(kSeed);
  int decoded = 0;
  for (int i = 0; i < 30'000; ++i) {
    const std::string bytes =
        random() % 2 == 0 ? ShapedBytes(random, GetParam()) : RandomBytes(random, random() % 300);
    if (DecodesExactly(bytes, GetParam())) ++decoded;
    if (HasFailure()) return;
  }
  EXPECT_GT(decoded, 1'000);
}

}  // namespace
}  // namespace turnstile
