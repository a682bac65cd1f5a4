// A lock as bytes: what was written decodes to the same lock, and anything else is refused.

#include "core/encoding.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
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
// The first hold that needs a wide record because of its lead or its end.
constexpr int64_t kTooMuchLead = int64_t{1} << 20;
constexpr Instant kTooLateEnd{Millis{int64_t{1} << 42}};
// A typical hold: its record is narrow.
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

// One of a semaphore that has everything.
constexpr Hold kFull{.owner = Owner{"y"},
                     .token = Token{7},
                     .since = Instant{Millis{2}},
                     .end = Instant{Millis{3}},
                     .linger = Millis{4},
                     .count = 5,
                     .weight = 0x0102,
                     .cap = Instant{Millis{0x0708}},
                     .tag = "host 1"};

// The bytes of these holds, written by hand. Stored data has this format: they must never change.
const std::string kExampleListed =
    "\x40\x22\x20\x18\x24\x0a\x06\x00"  // token, least byte first
    "\x7b\x68\xe5\xcf\x8b\x01\x00\x00"  // since
    "\xab\xdd\xe5\xcf\x8b\x01\x00\x00"  // end
    "\x00\x00\x00\x00\x00\x00\x00\x00"  // linger
    "\x00\x00\x00\x00\x00\x00\x00\x00"  // cap
    "\x01\x00\x00\x00"                  // count
    "\x01\x00\x00\x00"                  // weight
    "\x00"                              // the tag's size
    "\x08\x00"                          // the owner's size
    "worker-7"s;
const std::string kSecondListed =
    "\x06\x05\x04\x03\x02\x01\x00\x00"
    "\x01\x00\x00\x00\x00\x00\x00\x00"
    "\x00\x01\x00\x00\x00\x00\x00\x00"
    "\x34\x12\x00\x00\x00\x00\x00\x00"
    "\x00\x00\x00\x00\x00\x00\x00\x00"
    "\x04\x03\x02\x01"
    "\x01\x00\x00\x00"
    "\x00"
    "\x01\x00"
    "x"s;
const std::string kFullListed =
    "\x07\x00\x00\x00\x00\x00\x00\x00"
    "\x02\x00\x00\x00\x00\x00\x00\x00"
    "\x03\x00\x00\x00\x00\x00\x00\x00"
    "\x04\x00\x00\x00\x00\x00\x00\x00"
    "\x08\x07\x00\x00\x00\x00\x00\x00"
    "\x05\x00\x00\x00"
    "\x02\x01\x00\x00"
    "\x06"
    "\x01\x00"
    "y"
    "host 1"s;
// A lock of one hold is a record.
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
    "\x00\x00\x00\x00\x00\x00\x00\x00"  // cap
    "\x04\x03\x02\x01"                  // count
    "\x01\x00\x00\x00"                  // weight
    "\x00"                              // the tag's size
    "x"s;
const std::string kFullRecord =
    "\x07\x00\x00\x00\x00\x00\x00\x40"  // of a limit
    "\x01\x00\x00\x00\x00\x00\x00\x00"
    "\x02\x00\x00\x00\x00\x00\x00\x00"
    "\x03\x00\x00\x00\x00\x00\x00\x00"
    "\x04\x00\x00\x00\x00\x00\x00\x00"
    "\x08\x07\x00\x00\x00\x00\x00\x00"
    "\x05\x00\x00\x00"
    "\x02\x01\x00\x00"
    "\x06"
    "y"
    "host 1"s;

// Offsets in a listed hold,
constexpr size_t kTokenAt = 0;
constexpr size_t kSinceAt = 8;
constexpr size_t kEndAt = 16;
constexpr size_t kLingerAt = 24;
constexpr size_t kCapAt = 32;
constexpr size_t kCountAt = 40;
constexpr size_t kWeightAt = 44;
constexpr size_t kTagSizeAt = 48;
constexpr size_t kOwnerSizeAt = 49;
constexpr size_t kOwnerAt = 51;
// and in a record.
constexpr size_t kTimesAt = 8;
constexpr size_t kWideSinceAt = 16;
constexpr size_t kWideEndAt = 24;
constexpr size_t kWideLingerAt = 32;
constexpr size_t kWideCapAt = 40;
constexpr size_t kWideCountAt = 48;
constexpr size_t kWideWeightAt = 52;
constexpr size_t kWideTagSizeAt = 56;
constexpr size_t kWideOwnerAt = 57;

// --- The tables of docs/storage-format.md, implemented again ----------------------------------

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

// By how many milliseconds the token of a hold is ahead of its start.
int64_t LeadOf(const Hold& hold) {
  return static_cast<int64_t>(hold.token.value / 1000) - hold.since.time_since_epoch().count();
}

bool NeedsWidth(const Hold& hold) {
  return hold.linger != Millis{0} || hold.count != 1 || hold.weight != 1 || hold.cap.has_value() ||
         !hold.tag.empty() || LeadOf(hold) <= -kTooMuchLead || LeadOf(hold) >= kTooMuchLead ||
         hold.end >= kTooLateEnd;
}

// The two words of a narrow record that precede the owner.
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
         Word(hold.end) + Word(hold.linger) + Word(hold.cap.value_or(Instant{})) +
         Word(hold.count, 4) + Word(hold.weight, 4) + Word(hold.tag.size(), 1) +
         std::string(hold.owner.bytes) + std::string(hold.tag);
}

std::string ListedHold(const Hold& hold) {
  return Word(hold.token.value) + Word(hold.since) + Word(hold.end) + Word(hold.linger) +
         Word(hold.cap.value_or(Instant{})) + Word(hold.count, 4) + Word(hold.weight, 4) +
         Word(hold.tag.size(), 1) + Word(hold.owner.bytes.size(), 2) +
         std::string(hold.owner.bytes) + std::string(hold.tag);
}

// The word that precedes a list of holds.
std::string Head(uint64_t mode) { return Word(PowerOfTwo(63) + mode * PowerOfTwo(61)); }

std::string List(Mode mode, const Holds& holds) {
  std::string bytes = Head(static_cast<uint64_t>(mode));
  for (const Hold& hold : holds) bytes += ListedHold(hold);
  return bytes;
}

// The holds sorted by owner.
std::string BytesOf(Mode mode, const Holds& holds) {
  if (holds.size() > 1) return List(mode, holds);
  return NeedsWidth(holds[0]) ? WideRecord(mode, holds[0]) : NarrowRecord(mode, holds[0]);
}

// --- Helpers ----------------------------------------------------------------------------------

// A copy, as the server passes it.
char* NewBytes(std::string_view bytes) {
  auto* copy = static_cast<char*>(::operator new(bytes.size()));
  std::copy(bytes.begin(), bytes.end(), copy);
  return copy;
}

// Decodes a copy of exactly that size, so that a sanitizer detects reads past the end.
LockPtr DecodeExact(std::string_view bytes, EncodingVersion version = kCurrentEncoding) {
  const std::vector<char> copy(bytes.begin(), bytes.end());
  LockPtr lock = Decode({copy.data(), copy.size()}, version);
  const LockPtr taken = DecodeAndTake(NewBytes(bytes), bytes.size(), version);
  EXPECT_EQ(lock == nullptr, taken == nullptr);
  if (lock != nullptr && taken != nullptr) {
    EXPECT_EQ(Encode(*lock), Encode(*taken));
  }
  return lock;
}

Holds HoldsOf(const Lock& lock) {
  Holds holds;
  for (size_t i = 0; i < lock.size(); ++i) holds.push_back(lock.at(Lock::Order::kByOwner, i));
  return holds;
}

LockPtr LockOf(Mode mode, const Holds& holds) {
  LockPtr lock;
  for (const Hold& hold : holds) {
    Lock* const next = Apply(lock.get(), HoldSet{mode, hold});
    if (next != lock.get()) lock.reset(next);
  }
  return lock;
}

// The encoding is unique: what decodes is a lock with exactly these bytes. Returns whether it does.
bool DecodesExactly(std::string_view bytes) {
  const LockPtr lock = DecodeExact(bytes);
  if (lock == nullptr) return false;
  for (const Hold& hold : HoldsOf(*lock)) EXPECT_TRUE(IsWellFormed(hold));
  EXPECT_LE(lock->mode(), Mode::kLimit);
  EXPECT_TRUE(lock->size() == 1 || lock->mode() != Mode::kExclusive);
  EXPECT_EQ(BytesOf(lock->mode(), HoldsOf(*lock)), bytes);
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

// The same token, of a hold that started earlier by `lead`.
Hold WithLead(Hold hold, int64_t lead) {
  hold.since = Instant{Millis{static_cast<int64_t>(hold.token.value / 1000) - lead}};
  return hold;
}

// Generates random locks, and keeps the owners of the last one alive.
class Maker {
 public:
  explicit Maker(uint64_t seed) : random_(seed) {}

  uint64_t Below(uint64_t bound) { return random_() % bound; }

  // Distinct owners, unsorted.
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
  // Every second hold is close to a typical one; most of these have narrow records.
  Hold AnyHold(Owner owner) {
    Hold hold{owner, Token{1 + AnyNumber() % kMaxToken.value}, AnyMoment(), AnyMoment()};
    if (Below(2) == 0) {
      hold.linger = Millis{Below(2) == 0 ? 0 : static_cast<int64_t>(AnyNumber())};
      hold.count = static_cast<uint32_t>(Below(2) == 0 ? 1 : 1 + Below(kMaxCount));
      if (Below(2) == 0) hold.cap = std::max(AnyMoment(), kMinInstant + Millis{1});
      if (Below(2) == 0) hold.tag = std::string_view(kTags).substr(Below(8), 1 + Below(56));
      return hold;
    }
    const auto lead = static_cast<int64_t>(Below(2 * PowerOfTwo(20) + 3)) - kTooMuchLead - 1;
    hold.since = std::max(kMinInstant, WithLead(hold, lead).since);
    hold.end = Instant{hold.end.time_since_epoch() % static_cast<int64_t>(PowerOfTwo(43))};
    return hold;
  }

  // Below 2^53, of any magnitude.
  uint64_t AnyNumber() { return random_() >> (11 + Below(53)); }
  Instant AnyMoment() { return Instant{Millis{static_cast<int64_t>(AnyNumber())}}; }

  static constexpr const char* kTags =
      "host-17 pid 4711 ~ !\"#$%&'()*+,-./:;<=>?@[]^_`{|} nightly invoice run, second try";

  std::mt19937_64 random_;
  std::vector<std::string> owners_;
};

// --- The bytes --------------------------------------------------------------------------------

TEST(Encoding, OneHoldHasExpectedBytes) {
  const auto expect = [](Mode mode, const Hold& hold, const std::string& bytes) {
    EXPECT_EQ(Encode(*LockOf(mode, {hold})), bytes);
    const LockPtr lock = DecodeExact(bytes);
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
  expect(Mode::kLimit, kFull, kFullRecord);
  // The lead is stored as twice its value, modulo 2^22.
  const std::string begin = kExampleRecord.substr(0, 8);
  expect(Mode::kExclusive, WithLead(kExample, 5),
         begin + "\x0a\x00\xc0\x6a\x77\xf9\xf3\x62worker-7"s);
  expect(Mode::kExclusive, WithLead(kExample, -1),
         begin + "\xfe\xff\xff\x6a\x77\xf9\xf3\x62worker-7");
}

TEST(Encoding, TwoHoldsHaveExpectedBytes) {
  const std::string shared = "\x00\x00\x00\x00\x00\x00\x00\xa0"s + kExampleListed + kSecondListed;
  const std::string limit = "\x00\x00\x00\x00\x00\x00\x00\xc0"s + kExampleListed + kSecondListed;
  EXPECT_EQ(Encode(*LockOf(Mode::kShared, {kSecond, kExample})), shared);
  EXPECT_EQ(Encode(*LockOf(Mode::kLimit, {kExample, kSecond})), limit);
  for (const auto& [bytes, mode] : {std::pair(shared, Mode::kShared), {limit, Mode::kLimit}}) {
    const LockPtr lock = DecodeExact(bytes);
    ASSERT_NE(lock, nullptr);
    EXPECT_EQ(lock->mode(), mode);
    EXPECT_EQ(HoldsOf(*lock), (Holds{kExample, kSecond}));
    EXPECT_EQ(lock->at(Lock::Order::kByToken, 0), kSecond);
    EXPECT_EQ(lock->at(Lock::Order::kByBlocksUntil, 0), kSecond);
  }
}

// The examples in docs/storage-format.md.
TEST(Encoding, MatchesExamplesInStorageFormatDocs) {
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
            "\x00\x00\x00\x00\x00\x00\x00\x00"
            "\x01\x00\x00\x00"
            "\x01\x00\x00\x00"
            "\x00"
            "ab"s);
  EXPECT_EQ(Encode(*LockOf(Mode::kShared, {wide, other})),
            "\x00\x00\x00\x00\x00\x00\x00\xa0"
            "\xc0\xcf\x6a\x00\x00\x00\x00\x00"
            "\x56\x1b\x00\x00\x00\x00\x00\x00"
            "\x28\x23\x00\x00\x00\x00\x00\x00"
            "\x05\x00\x00\x00\x00\x00\x00\x00"
            "\x00\x00\x00\x00\x00\x00\x00\x00"
            "\x01\x00\x00\x00\x01\x00\x00\x00\x00\x02\x00"
            "ab"
            "\xc1\xcf\x6a\x00\x00\x00\x00\x00"
            "\x58\x1b\x00\x00\x00\x00\x00\x00"
            "\x1c\x25\x00\x00\x00\x00\x00\x00"
            "\x00\x00\x00\x00\x00\x00\x00\x00"
            "\x00\x00\x00\x00\x00\x00\x00\x00"
            "\x01\x00\x00\x00\x01\x00\x00\x00\x00\x01\x00"
            "c"s);
}

TEST(Encoding, VersionsAndModesKeepTheirNumbers) {
  EXPECT_EQ(static_cast<int>(EncodingVersion::kRecords), 1);
  EXPECT_EQ(kCurrentEncoding, EncodingVersion::kRecords);
  EXPECT_EQ(static_cast<int>(Mode::kExclusive), 0);
  EXPECT_EQ(static_cast<int>(Mode::kShared), 1);
  EXPECT_EQ(static_cast<int>(Mode::kLimit), 2);
}

TEST(Encoding, UnknownVersionsAreRefused) {
  for (const int version : {0, 2, 3, 255, 1023, -1, INT32_MAX, INT32_MIN}) {
    for (const std::string& bytes :
         {kExampleRecord, kSecondRecord, BytesOf(Mode::kShared, {kExample, kSecond})}) {
      EXPECT_EQ(DecodeExact(bytes, static_cast<EncodingVersion>(version)), nullptr) << version;
    }
  }
}

// --- Round trips ------------------------------------------------------------------------------

void ExpectBack(Mode mode, const Hold& hold) {
  const std::string bytes = Encode(*LockOf(mode, {hold}));
  ASSERT_EQ(bytes, BytesOf(mode, {hold}));
  const LockPtr lock = DecodeExact(bytes);
  ASSERT_NE(lock, nullptr);
  ASSERT_EQ(lock->mode(), mode);
  ASSERT_EQ(HoldsOf(*lock), Holds{hold});
  ASSERT_EQ(lock->blocks_until(), hold.blocks_until());
}

// Every boundary value of `since` and `end`, including those that depend on the token.
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

// The boundary values of every field, in every combination.
TEST(Encoding, BoundaryValuesRoundTrip) {
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

// Rare fields cost 41 bytes, and a tag its own; nothing else does.
TEST(Encoding, RecordsAreWideOnlyWhenNeeded) {
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
    EXPECT_EQ(extra(wide), 41U);
  }
  Hold tagged = kExample;
  tagged.tag = "host";
  EXPECT_EQ(extra(tagged), 45U);
  Hold capped = kExample;
  capped.cap = capped.end;
  EXPECT_EQ(extra(capped), 41U);
}

TEST(Encoding, RandomLocksRoundTrip) {
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
    const LockPtr lock = DecodeExact(bytes);
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

TEST(Encoding, ThousandHoldsRoundTrip) {
  constexpr uint64_t kSeed = 100;
  SCOPED_TRACE(kSeed);
  Maker maker(kSeed);
  const Holds holds = maker.AnyHolds(1'000);
  const LockPtr lock = LockOf(Mode::kLimit, holds);
  const std::string bytes = Encode(*lock);
  const LockPtr again = DecodeExact(bytes);
  ASSERT_NE(again, nullptr);
  EXPECT_EQ(again->size(), 1'000);
  EXPECT_EQ(HoldsOf(*again), HoldsOf(*lock));
  EXPECT_EQ(again->blocks_until(), lock->blocks_until());
  EXPECT_EQ(Encode(*again), bytes);
}

// Primary and replica compare digests of these bytes, although their locks have different
// histories.
TEST(Encoding, EqualLocksEncodeEquallyWhateverTheirHistory) {
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
    // With other holds added and removed, and with holds that once had longer leases and higher
    // counts.
    Holds detour = {{Owner{"a guest of whom nothing stays"}, kMaxToken, kMinInstant, kMaxInstant}};
    for (const Hold& hold : shuffled) detour.push_back(With(hold, kMaxLinger, 77));
    detour.insert(detour.end(), holds.begin(), holds.end());
    LockPtr lock = LockOf(mode, detour);
    ASSERT_EQ(Apply(lock.get(), HoldEnded{detour.front().owner}), lock.get());
    ASSERT_EQ(Encode(*lock), bytes);
    const LockPtr loaded = Decode(bytes, kCurrentEncoding);
    ASSERT_EQ(Encode(*loaded), bytes);
  }
}

// A wide record becomes narrow when no rare field is left.
TEST(Encoding, RecordIsNarrowAgainWithoutRareFields) {
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
    // Decremented by releases.
    LockPtr lock = LockOf(mode, {With(kExample, Millis{0}, 3)});
    for (int i = 0; i < 2; ++i) {
      Lock* const next = Apply(lock.get(), HoldReleased{kExample.owner});
      if (next != lock.get()) lock.reset(next);
    }
    EXPECT_EQ(Encode(*lock), bytes);
  }
}

// --- Ownership of the bytes -------------------------------------------------------------------

// A decoded lock owns a copy of everything.
TEST(Encoding, DecodedLockOutlivesItsBytes) {
  for (const Holds& holds : {Holds{kExample}, Holds{kSecond}, Holds{kExample, kSecond}}) {
    std::string bytes = BytesOf(Mode::kShared, holds);
    const LockPtr lock = Decode(bytes, kCurrentEncoding);
    bytes.assign(bytes.size(), '#');
    EXPECT_EQ(HoldsOf(*lock), holds);
  }
}

TEST(DecodeAndTake, ReusesBufferForOneHold) {
  for (const Mode mode : kModes) {
    for (const Hold& hold : {kExample, kSecond}) {
      const std::string bytes = BytesOf(mode, {hold});
      char* const given = NewBytes(bytes);
      LockPtr lock = DecodeAndTake(given, bytes.size(), kCurrentEncoding);
      ASSERT_NE(lock, nullptr);
      EXPECT_EQ(static_cast<void*>(lock.get()), given);
      EXPECT_EQ(lock->AsBytes().data(), given);
      EXPECT_EQ(HoldsOf(*lock), Holds{hold});
      // It is an ordinary lock: a change that needs another size replaces and frees it.
      Hold later = hold;
      later.end += Millis{1};
      EXPECT_EQ(Apply(lock.get(), HoldSet{mode, later}), lock.get());
      EXPECT_EQ(HoldsOf(*lock), Holds{later});
      Hold other = hold == kExample ? kSecond : kExample;
      other.owner = hold.owner;
      lock.reset(Apply(lock.get(), HoldSet{mode, other}));
      EXPECT_EQ(HoldsOf(*lock), Holds{other});
    }
  }
}

// A sanitizer detects what is not freed, or freed twice.
TEST(DecodeAndTake, FreesBufferWhenNotReused) {
  const auto take = [](const std::string& bytes, EncodingVersion version) {
    return DecodeAndTake(NewBytes(bytes), bytes.size(), version);
  };
  const std::string several = BytesOf(Mode::kShared, {kExample, kSecond});
  EXPECT_EQ(HoldsOf(*take(several, kCurrentEncoding)), (Holds{kExample, kSecond}));
  for (const EncodingVersion version :
       {EncodingVersion{0}, EncodingVersion::kRecords, EncodingVersion{2}}) {
    EXPECT_EQ(take("", version), nullptr);
    EXPECT_EQ(take("#", version), nullptr);
    EXPECT_EQ(take(std::string(100, '\xff'), version), nullptr);
  }
  EXPECT_EQ(take(kExampleRecord + "#", kCurrentEncoding), nullptr);
  EXPECT_EQ(take(several + "#", kCurrentEncoding), nullptr);
}

// --- Invalid bytes ----------------------------------------------------------------------------

constexpr uint64_t kLast = (uint64_t{1} << 53) - 1;

// A field of a record or of a listed hold, and its valid range.
struct Field {
  const char* name;
  std::string bytes;
  size_t at;
  size_t size;
  uint64_t least;
  uint64_t most;
};

std::vector<Field> Fields() {
  const std::string list = List(Mode::kShared, {kExample, kSecond});
  std::vector<Field> fields = {
      {"since of a wide record", kSecondRecord, kWideSinceAt, 8, 0, kLast},
      {"end of a wide record", kSecondRecord, kWideEndAt, 8, 0, kLast},
      {"linger of a wide record", kSecondRecord, kWideLingerAt, 8, 0, kLast},
      {"cap of a wide record", kSecondRecord, kWideCapAt, 8, 0, kLast},
      {"count of a wide record", kSecondRecord, kWideCountAt, 4, 1, kMaxCount},
      {"weight of a permit", kFullRecord, kWideWeightAt, 4, 1, kMaxLimit},
      {"weight of an exclusive hold", kSecondRecord, kWideWeightAt, 4, 1, 1},
      {"size of a tag", kFullRecord, kWideTagSizeAt, 1, 6, 6},
      {"token of a wide record", kSecondRecord, 0, 6, 1, PowerOfTwo(48) - 1},
  };
  for (const size_t hold_at : {size_t{8}, 8 + kExampleListed.size()}) {
    fields.push_back({"token in a list", list, hold_at + kTokenAt, 8, 1, kLast});
    fields.push_back({"since in a list", list, hold_at + kSinceAt, 8, 0, kLast});
    fields.push_back({"end in a list", list, hold_at + kEndAt, 8, 0, kLast});
    fields.push_back({"linger in a list", list, hold_at + kLingerAt, 8, 0, kLast});
    fields.push_back({"cap in a list", list, hold_at + kCapAt, 8, 0, kLast});
    fields.push_back({"count in a list", list, hold_at + kCountAt, 4, 1, kMaxCount});
    fields.push_back({"weight in a shared list", list, hold_at + kWeightAt, 4, 1, 1});
  }
  const std::string permits = List(Mode::kLimit, {kSecond, kFull});
  const size_t full_at = 8 + kSecondListed.size();
  fields.push_back({"weight in a list", permits, full_at + kWeightAt, 4, 1, kMaxLimit});
  fields.push_back({"size of a tag in a list", permits, full_at + kTagSizeAt, 1, 6, 6});
  return fields;
}

TEST(Decoder, RefusesTagsThatAreNotPrintable) {
  for (const char c : {'\0', '\n', '\x1f', '\x7f', '\x80', '\xff'}) {
    for (std::string bytes : {kFullRecord, List(Mode::kLimit, {kSecond, kFull})}) {
      EXPECT_TRUE(DecodesExactly(bytes));
      bytes.back() = c;
      EXPECT_FALSE(DecodesExactly(bytes)) << static_cast<int>(c);
    }
  }
  Hold longest = kFull;
  longest.tag = "0123456789012345678901234567890123456789012345678901234567890123";
  EXPECT_TRUE(DecodesExactly(WideRecord(Mode::kLimit, longest)));
  longest.tag = "01234567890123456789012345678901234567890123456789012345678901234";
  EXPECT_FALSE(DecodesExactly(WideRecord(Mode::kLimit, longest)));
}

TEST(Decoder, RefusesNumbersOutOfRange) {
  for (const Field& field : Fields()) {
    for (const uint64_t number :
         {uint64_t{0}, uint64_t{1}, uint64_t{6}, uint64_t{kMaxLimit}, uint64_t{kMaxLimit} + 1,
          PowerOfTwo(32) - 1, PowerOfTwo(48) - 1, kLast, kLast + 1, PowerOfTwo(62), PowerOfTwo(63),
          PowerOfTwo(63) + 1, ~uint64_t{0}}) {
      if (field.size < 8 && number >= PowerOfTwo(static_cast<int>(8 * field.size))) continue;
      const bool good = number >= field.least && number <= field.most;
      EXPECT_EQ(DecodesExactly(Patched(field.bytes, field.at, field.size, number)), good)
          << field.name << " " << number;
    }
  }
}

// Holds that differ in one field; some of them fit into a narrow record.
Hold WithEnd(Hold hold, Instant end) {
  hold.end = end;
  return hold;
}

Hold WithOwner(Hold hold, std::string_view owner) {
  hold.owner = Owner{owner};
  return hold;
}

struct Case {
  const char* name;
  std::string bytes;
  bool good = false;
};

std::vector<Case> RecordCases() {
  constexpr uint64_t kLate = 1'700'000'000'123'456;
  const auto narrow = [](uint64_t token, int64_t lead) {
    return NarrowWords(0, 1, token, lead, 9000) + "o";
  };
  std::vector<Case> cases = {
      {"no bytes", ""},
      {"token 0", narrow(0, 0)},
      {"token 0, a lead", narrow(0, -5)},
      // The smallest value of the 21-bit lead is unused, so that leads reach equally far in both
      // directions.
      {"the longest lead", narrow(kLate, kTooMuchLead - 1), true},
      {"no lead", narrow(kLate, 0), true},
      {"the longest lead behind", narrow(kLate, 1 - kTooMuchLead), true},
      {"a lead that is not in use", narrow(kLate, -kTooMuchLead)},
      {"a beginning in the first moment", narrow(5'999, 5), true},
      {"a beginning before 1970", narrow(5'999, 6)},
      {"the first token", narrow(1, 0), true},
      {"the first token, before 1970", narrow(1, 1)},
      {"the last token", narrow(kMaxToken.value, 1 - kTooMuchLead), true},
  };
  for (const std::string& record : {kExampleRecord, kSecondRecord}) {
    for (uint64_t mode = 0; mode < 8; ++mode) {  // from 4 on it would be a list
      cases.push_back({"any mode", Patched(record, 7, 1, mode * 32), mode <= 2});
    }
    for (const size_t more : {1U, 2U, 28U, 255U, 256U}) {
      cases.push_back({"zeros too many", record + std::string(more, '\0')});
      cases.push_back({"bytes too many", record + std::string(more, 'o')});
    }
    for (size_t size = 0; size < record.size(); ++size) {
      cases.push_back({"cut", record.substr(0, size)});
    }
    // Only the value 1 marks a wide record, whatever its size.
    for (const uint64_t word :
         {uint64_t{3}, PowerOfTwo(22) + 1, PowerOfTwo(63) + 1, ~uint64_t{0}}) {
      cases.push_back({"other words for wide", Patched(record, kTimesAt, 8, word)});
    }
  }
  // The record contains the owner's size, which must match the size of the record.
  for (size_t said = 1; said <= 256; ++said) {
    const std::string head = NarrowWords(0, said, 7'000'000, 2, 9000);
    const std::string wide =
        head.substr(0, kTimesAt) + kSecondRecord.substr(kTimesAt, kWideOwnerAt - kTimesAt);
    for (const size_t size : {size_t{0}, said - 1, said, said + 1, size_t{256}, size_t{257}}) {
      cases.push_back({"owner of a narrow record", head + std::string(size, 'o'), size == said});
      cases.push_back({"owner of a wide record", wide + std::string(size, 'o'), size == said});
    }
  }
  // A hold has exactly one encoding.
  for (const Mode mode : kModes) {
    for (const Hold& hold :
         {kExample, WithLead(kExample, kTooMuchLead - 1), WithLead(kExample, 1 - kTooMuchLead),
          WithEnd(kExample, kTooLateEnd - Millis{1}), WithEnd(kExample, kMinInstant)}) {
      cases.push_back({"narrow", NarrowRecord(mode, hold), true});
      cases.push_back({"wide where narrow would do", WideRecord(mode, hold)});
    }
    for (const Hold& hold : {With(kExample, Millis{1}, 1), With(kExample, Millis{0}, 2),
                             WithLead(kExample, kTooMuchLead), WithLead(kExample, -kTooMuchLead),
                             WithEnd(kExample, kTooLateEnd)}) {
      cases.push_back({"wide", WideRecord(mode, hold), true});
    }
  }
  return cases;
}

std::vector<Case> ListCases() {
  const std::string two = List(Mode::kShared, {kExample, kSecond});
  const Hold other = With(kExample, Millis{7}, 7);
  std::vector<Case> cases = {
      {"two shared", two, true},
      {"two permits", List(Mode::kLimit, {kExample, kSecond}), true},
      {"two exclusive", List(Mode::kExclusive, {kExample, kSecond})},
      {"one twice", List(Mode::kShared, {kExample, kExample})},
      {"an owner twice", List(Mode::kShared, {kExample, other})},
      {"the second of two twice", List(Mode::kShared, {kExample, kSecond, kSecond})},
      {"the first of two twice", List(Mode::kShared, {kExample, kSecond, kExample})},
      {"owners out of order", List(Mode::kShared, {kSecond, kExample})},
      {"a size of no owner", Patched(two, 8 + kOwnerSizeAt, 2, 0)},
      {"a size beyond the bytes", Patched(two, 8 + kOwnerSizeAt, 2, 0xffff)},
  };
  for (const Mode mode : kModes) {
    cases.push_back({"none", List(mode, {})});
    for (const Hold& hold : {kExample, kSecond}) cases.push_back({"one", List(mode, {hold})});
  }
  // Bytes are compared as unsigned; a prefix sorts first.
  for (const auto& [a, b] : {std::pair("\x7f"s, "\x80"s),
                             {"a"s, "aa"s},
                             {"a"s, "a\0"s},
                             {"\0"s, "\xff"s},
                             {"Z"s, "a"s}}) {
    const Hold low = WithOwner(kExample, a);
    const Hold high = WithOwner(kExample, b);
    cases.push_back({"in order", List(Mode::kLimit, {low, high}), true});
    cases.push_back({"out of order", List(Mode::kLimit, {high, low})});
  }
  for (const size_t size : {0U, 1U, 255U, 256U, 257U, 65'535U}) {
    const std::string owner(size, 'o');
    cases.push_back({"owner in a list", List(Mode::kLimit, {WithOwner(kExample, owner), kSecond}),
                     size >= 1 && size <= 256});
  }
  for (size_t size = 0; size < two.size(); ++size) cases.push_back({"cut", two.substr(0, size)});
  for (const size_t more : {size_t{1}, size_t{2}, kOwnerAt - 1, kOwnerAt, kOwnerAt + 1}) {
    cases.push_back({"zeros too many", two + std::string(more, '\0')});
    cases.push_back({"bytes too many", two + std::string(more, '\x01')});
  }
  for (uint64_t mode = 0; mode < 4; ++mode) {
    cases.push_back({"any mode", Head(mode) + two.substr(8), mode == 1 || mode == 2});
    // The two valid values differ in two bits.
    for (size_t bit = 0; bit < 64 && (mode == 1 || mode == 2); ++bit) {
      cases.push_back({"a head with a bit flipped", Flipped(Head(mode), bit) + two.substr(8)});
    }
  }
  return cases;
}

TEST(Decoder, RefusesTruncatedAndTrailingBytes) {
  for (const std::vector<Case>& cases : {RecordCases(), ListCases()}) {
    for (const auto& [name, bytes, good] : cases) {
      EXPECT_EQ(DecodesExactly(bytes), good) << name << " " << testing::PrintToString(bytes);
    }
  }
}

// A flipped bit is refused or gives another lock with its own bytes.
TEST(Decoder, FlippedBitIsRefusedOrDecodesToOtherLock) {
  for (size_t bit = 0; bit < kExampleRecord.size() * 8; ++bit) {
    // The owner's size; whether it is a list; whether it is wide; the highest bit of a lead of 0.
    const bool noticed =
        (bit >= 53 && bit < 61) || bit == 63 || bit == 8 * kTimesAt || bit == 8 * kTimesAt + 21;
    EXPECT_EQ(DecodesExactly(Flipped(kExampleRecord, bit)), !noticed) << "narrow " << bit;
  }
  for (size_t bit = 0; bit < kSecondRecord.size() * 8; ++bit) {
    const bool in_head = (bit >= 53 && bit < 61) || bit == 63;
    const bool in_times = bit >= 8 * kTimesAt && bit < 8 * kWideSinceAt;
    const bool beyond = bit >= 8 * kWideSinceAt && bit < 8 * kWideCountAt && bit % 64 >= 53;
    const bool of_limit = bit >= 8 * kWideWeightAt && bit < 8 * kWideOwnerAt;  // or of a tag
    EXPECT_EQ(DecodesExactly(Flipped(kSecondRecord, bit)),
              !in_head && !in_times && !beyond && !of_limit)
        << "wide " << bit;
  }
  int noticed = 0;
  const std::string list = List(Mode::kShared, {kExample, kSecond});
  for (size_t bit = 0; bit < list.size() * 8; ++bit) {
    if (!DecodesExactly(Flipped(list, bit))) ++noticed;
  }
  EXPECT_GE(noticed, 2 * 4 * 11 + 7) << "the eleven highest bits of four numbers, twice, and more";
}

}  // namespace
}  // namespace turnstile
