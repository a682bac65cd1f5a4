// A lock as a container of holds: the effect of facts, and the ways to read it.

#include "core/lock.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <new>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "printers.h"

namespace turnstile {
namespace {

using namespace std::string_literals;
using namespace std::string_view_literals;
using LockPtr = std::unique_ptr<Lock>;
using Order = Lock::Order;
using Holds = std::vector<Hold>;

constexpr Owner kAnn{"ann"};
constexpr Owner kBob{"bob"};
constexpr Owner kCat{"cat"};
constexpr Token kToken{1'700'000'000'000'042};
constexpr Instant kSince{Millis{1'700'000'000'000}};
constexpr Instant kEnd = kSince + Millis{30'000};
constexpr Millis kTick{1};
constexpr uint32_t kMaxCount = std::numeric_limits<uint32_t>::max();
constexpr Hold kAnnsHold{.owner = kAnn, .token = kToken, .since = kSince, .end = kEnd};
constexpr Hold kBobsHold{
    .owner = kBob, .token = Token{kToken.value + 1}, .since = kSince, .end = kEnd - Millis{10}};
constexpr Hold kCatsHold{
    .owner = kCat, .token = Token{kToken.value + 2}, .since = kSince, .end = kEnd - Millis{20}};
constexpr Mode kModes[] = {Mode::kExclusive, Mode::kShared, Mode::kLimit};
constexpr Mode kModesOfMany[] = {Mode::kShared, Mode::kLimit};
constexpr Order kOrders[] = {Order::kByOwner, Order::kByToken, Order::kByBlocksUntil};

// The same hold with the rarely used fields set.
Hold Rare(Hold hold, Millis linger, uint32_t count) {
  hold.linger = linger;
  hold.count = count;
  return hold;
}

Hold Weighing(Hold hold, uint32_t weight) {
  hold.weight = weight;
  return hold;
}

Hold Tagged(Hold hold, std::string_view tag) {
  hold.tag = tag;
  return hold;
}

Hold Capped(Hold hold, std::optional<Instant> cap) {
  hold.cap = cap;
  return hold;
}

// Ann's hold with each field in turn just beyond what a narrow record can store; all but those with
// a tag need the same space.
Holds WideHolds() {
  constexpr Millis kTooMuchLead{1 << 20};
  Holds holds = {Rare(kAnnsHold, Millis{5}, 1), Rare(kAnnsHold, Millis{0}, 2),
                 Rare(kAnnsHold, Millis{5}, 2), Capped(kAnnsHold, kEnd)};
  for (const Instant since : {kSince - kTooMuchLead, kSince + kTooMuchLead}) {
    holds.push_back(kAnnsHold);
    holds.back().since = since;
  }
  holds.push_back(kAnnsHold);
  holds.back().end = Instant{Millis{int64_t{1} << 42}};
  return holds;
}

Holds HoldsOf(const Lock& lock, Order order = Order::kByOwner) {
  Holds holds;
  for (size_t i = 0; i < lock.size(); ++i) holds.push_back(lock.at(order, i));
  return holds;
}

// A key: like the server it stores what Apply returns and frees the previous lock.
class Cell {
 public:
  template <typename Fact>
  Cell& operator<<(const Fact& fact) {
    Lock* const next = Apply(lock_.get(), fact);
    if (next != lock_.get()) lock_.reset(next);
    return *this;
  }

  const Lock* get() const { return lock_.get(); }
  const Lock& operator*() const { return *lock_; }
  const Lock* operator->() const { return lock_.get(); }

 private:
  LockPtr lock_;
};

// --- Instants ---------------------------------------------------------------------------------

TEST(Hold, IsLiveThroughLastMillisecond) {
  EXPECT_TRUE(kAnnsHold.LiveAt(kMinInstant));
  EXPECT_TRUE(kAnnsHold.LiveAt(kEnd - kTick));
  EXPECT_TRUE(kAnnsHold.LiveAt(kEnd));
  EXPECT_FALSE(kAnnsHold.LiveAt(kEnd + kTick));
}

TEST(Hold, WithoutLingerBlocksOthersOnlyWhileLive) {
  EXPECT_EQ(kAnnsHold.blocks_until(), kEnd);
  EXPECT_TRUE(kAnnsHold.BlocksAt(kEnd));
  EXPECT_FALSE(kAnnsHold.BlocksAt(kEnd + kTick));
}

TEST(Hold, WithLingerBlocksOthersAfterEnd) {
  const Hold lingers = Rare(kAnnsHold, Millis{500}, 1);
  EXPECT_EQ(lingers.blocks_until(), kEnd + Millis{500});
  EXPECT_FALSE(lingers.LiveAt(kEnd + kTick));
  EXPECT_TRUE(lingers.BlocksAt(kEnd + kTick));
  EXPECT_TRUE(lingers.BlocksAt(kEnd + Millis{500}));
  EXPECT_FALSE(lingers.BlocksAt(kEnd + Millis{501}));
}

TEST(ToInstant, RoundsDownToMillisecond) {
  EXPECT_EQ(ToInstant(FineInstant{Micros{1'999}}), Instant{Millis{1}});
  EXPECT_EQ(ToInstant(FineInstant{Micros{2'000}}), Instant{Millis{2}});
  EXPECT_EQ(ToInstant(FineInstant{Micros{0}}), kMinInstant);
}

TEST(IsWellFormed, ChecksEveryField) {
  const std::string longest(kMaxOwnerBytes, 'o');
  const std::string too_long(kMaxOwnerBytes + 1, 'o');
  const Millis longest_linger = kMaxInstant - kMinInstant;
  EXPECT_TRUE(IsWellFormed(kAnnsHold));
  EXPECT_TRUE(IsWellFormed(
      {Owner{longest}, kMaxToken, kMaxInstant, kMaxInstant, longest_linger, kMaxCount}));
  EXPECT_TRUE(IsWellFormed({Owner{"o"}, kMinToken, kMinInstant, kMinInstant, Millis{0}, 1}));
  EXPECT_TRUE(IsWellFormed({Owner{"o"}, kMinToken, kMaxInstant, kMinInstant}));
  EXPECT_FALSE(IsWellFormed({Owner{""}, kToken, kSince, kEnd}));
  EXPECT_FALSE(IsWellFormed({Owner{too_long}, kToken, kSince, kEnd}));
  EXPECT_FALSE(IsWellFormed({kAnn, Token{0}, kSince, kEnd}));
  EXPECT_FALSE(IsWellFormed({kAnn, Token{kMaxToken.value + 1}, kSince, kEnd}));
  EXPECT_FALSE(IsWellFormed({kAnn, kToken, kMinInstant - kTick, kEnd}));
  EXPECT_FALSE(IsWellFormed({kAnn, kToken, kMaxInstant + kTick, kEnd}));
  EXPECT_FALSE(IsWellFormed({kAnn, kToken, kSince, kMinInstant - kTick}));
  EXPECT_FALSE(IsWellFormed({kAnn, kToken, kSince, kMaxInstant + kTick}));
  EXPECT_FALSE(IsWellFormed(Rare(kAnnsHold, Millis{-1}, 1)));
  EXPECT_FALSE(IsWellFormed(Rare(kAnnsHold, longest_linger + kTick, 1)));
  EXPECT_FALSE(IsWellFormed(Rare(kAnnsHold, Millis{0}, 0)));
  EXPECT_TRUE(IsWellFormed(Weighing(kAnnsHold, kMaxLimit)));
  EXPECT_FALSE(IsWellFormed(Weighing(kAnnsHold, 0)));
  EXPECT_FALSE(IsWellFormed(Weighing(kAnnsHold, kMaxLimit + 1)));
  EXPECT_TRUE(IsWellFormed(Capped(kAnnsHold, kMinInstant + kTick)));
  EXPECT_TRUE(IsWellFormed(Capped(kAnnsHold, kMaxInstant)));
  EXPECT_FALSE(IsWellFormed(Capped(kAnnsHold, kMinInstant))) << "it would be stored as none";
  EXPECT_FALSE(IsWellFormed(Capped(kAnnsHold, kMaxInstant + kTick)));
  EXPECT_TRUE(IsWellFormed(Tagged(kAnnsHold, std::string(64, '~'))));
  EXPECT_FALSE(IsWellFormed(Tagged(kAnnsHold, std::string(65, '~'))));
  for (const std::string_view tag : {"\n"sv, "a\0"sv, "\x1f"sv, "\x7f"sv, "\x80"sv, "\xff"sv}) {
    EXPECT_FALSE(IsWellFormed(Tagged(kAnnsHold, tag)));
  }
}

TEST(IsTag, Takes1To64PrintableAsciiCharacters) {
  for (int byte = 0; byte < 256; ++byte) {
    EXPECT_EQ(IsTag(std::string(1, static_cast<char>(byte))), byte >= 0x20 && byte <= 0x7e) << byte;
  }
  EXPECT_FALSE(IsTag(""));
  EXPECT_TRUE(IsTag(std::string(64, 't')));
  EXPECT_FALSE(IsTag(std::string(65, 't')));
}

// --- A lock of one hold -----------------------------------------------------------------------

TEST(LockOfOne, ReturnsFieldsOfItsHold) {
  for (const Mode mode : kModes) {
    for (const Hold& hold : {kAnnsHold, Rare(kAnnsHold, Millis{7}, 1),
                             Rare(kAnnsHold, Millis{0}, 2), Rare(kAnnsHold, Millis{7}, 2)}) {
      const LockPtr lock(Lock::Make({mode, hold}));
      EXPECT_EQ(lock->mode(), mode);
      EXPECT_EQ(lock->size(), 1);
      for (const Order order : kOrders) EXPECT_EQ(lock->at(order, 0), hold);
      EXPECT_EQ(lock->Find(kAnn), hold);
      EXPECT_EQ(lock->Find(kBob), std::nullopt);
      EXPECT_EQ(lock->blocks_until(), hold.blocks_until());
      EXPECT_TRUE(lock->IsOneAllocation());
    }
  }
}

TEST(LockOfOne, KeepsBoundaryValues) {
  for (const Mode mode : kModes) {
    for (const Token token : {kMinToken, kToken, kMaxToken}) {
      for (const Instant since : {kMinInstant, kSince, kMaxInstant}) {
        for (const Instant end : {kMinInstant, kEnd, kMaxInstant}) {
          for (const Millis linger : {Millis{0}, Millis{1}, kMaxInstant - kMinInstant}) {
            for (const uint32_t count : {uint32_t{1}, uint32_t{2}, kMaxCount}) {
              const Hold hold{kAnn, token, since, end, linger, count};
              const LockPtr lock(Lock::Make({mode, hold}));
              ASSERT_EQ(lock->at(Order::kByOwner, 0), hold);
              ASSERT_EQ(lock->mode(), mode);
              ASSERT_EQ(lock->blocks_until(), hold.blocks_until());
            }
          }
        }
      }
    }
  }
}

TEST(LockOfOne, KeepsBinaryOwnersOf1To256Bytes) {
  for (size_t size = 1; size <= kMaxOwnerBytes; ++size) {
    std::string owner(size, '\0');
    for (size_t i = 0; i < size; ++i) owner[i] = static_cast<char>((i * 37 + size) & 0xff);
    const std::string copy = owner;
    for (const uint32_t count : {1U, 9U}) {
      owner = copy;
      const LockPtr lock(
          Lock::Make({Mode::kShared, {Owner{owner}, kToken, kSince, kEnd, Millis{0}, count}}));
      owner.assign(size, '#');  // the lock has its own copy
      EXPECT_EQ(lock->at(Order::kByOwner, 0),
                (Hold{Owner{copy}, kToken, kSince, kEnd, Millis{0}, count}));
      EXPECT_EQ(lock->Find(Owner{owner}), std::nullopt);
      EXPECT_TRUE(lock->Find(Owner{copy}).has_value());
    }
  }
}

// The memory that nearly every lock costs.
TEST(LockOfOne, NarrowRecordTakesTwoWordsPlusOwner) {
  Hold early = kAnnsHold;
  early.since = kSince - Millis{(1 << 20) - 1};
  Hold late = kAnnsHold;
  late.since = kSince + Millis{(1 << 20) - 1};
  late.end = Instant{Millis{(int64_t{1} << 42) - 1}};
  for (const Hold& narrow : {kAnnsHold, early, late}) {
    const LockPtr lock(Lock::Make({Mode::kExclusive, narrow}));
    EXPECT_EQ(lock->AsBytes().size(), 16 + 3);
    EXPECT_EQ(HoldsOf(*lock), Holds{narrow});
  }
  for (const Hold& wide : WideHolds()) {
    const LockPtr lock(Lock::Make({Mode::kExclusive, wide}));
    EXPECT_EQ(lock->AsBytes().size(), 16 + 41 + 3);
    EXPECT_EQ(HoldsOf(*lock), Holds{wide});
  }
  for (const std::string& tag : {"t"s, std::string(64, 't')}) {
    const LockPtr lock(Lock::Make({Mode::kExclusive, Tagged(kAnnsHold, tag)}));
    EXPECT_EQ(lock->AsBytes().size(), 16 + 41 + 3 + tag.size());
  }
}

TEST(LockOfOne, KeepsWeightCapAndTag) {
  const std::string longest(64, '~');
  const std::string owner(256, 'o');
  for (const uint32_t weight : {1U, 2U, kMaxLimit}) {
    for (const auto cap : {std::optional<Instant>(), std::optional(kMinInstant + kTick),
                           std::optional(kEnd), std::optional(kMaxInstant)}) {
      for (const std::string_view tag : {""sv, " "sv, "tag"sv, std::string_view(longest)}) {
        for (const Owner of : {kAnn, Owner{owner}}) {
          Hold hold = Capped(Tagged(Weighing(kAnnsHold, weight), tag), cap);
          hold.owner = of;
          const LockPtr lock(Lock::Make({Mode::kLimit, hold}));
          ASSERT_EQ(lock->at(Order::kByOwner, 0), hold);
          ASSERT_EQ(lock->Find(of), hold);
          ASSERT_EQ(lock->blocks_until(), hold.blocks_until()) << "a cap ends nothing by itself";
          // The bytes are all there is.
          const std::string bytes(lock->AsBytes());
          auto* copy = static_cast<char*>(::operator new(bytes.size()));
          std::copy(bytes.begin(), bytes.end(), copy);
          const LockPtr adopted(Lock::Adopt(copy, bytes.size()));
          ASSERT_NE(adopted, nullptr);
          ASSERT_EQ(adopted->at(Order::kByOwner, 0), hold);
        }
      }
    }
  }
}

// --- Weights ------------------------------------------------------------------------------------

TEST(WeightBlocking, OfOneHoldIsItsWeightWhileItBlocks) {
  for (const uint32_t weight : {1U, 7U, kMaxLimit}) {
    const LockPtr lock(
        Lock::Make({Mode::kLimit, Weighing(Rare(kAnnsHold, Millis{500}, 1), weight)}));
    EXPECT_EQ(lock->WeightBlocking(kMinInstant), weight);
    EXPECT_EQ(lock->WeightBlocking(kEnd + Millis{500}), weight) << "it lingers";
    EXPECT_EQ(lock->WeightBlocking(kEnd + Millis{501}), 0);
  }
  const LockPtr narrow(Lock::Make({Mode::kLimit, kAnnsHold}));
  EXPECT_EQ(narrow->WeightBlocking(kEnd), 1);
  EXPECT_EQ(narrow->WeightBlocking(kEnd + kTick), 0);
}

// Cat's hold ends first, then Bob's, then Ann's.
TEST(WeightBlocking, OfSeveralHoldsIsTheSumOfThoseThatBlock) {
  struct Case {
    uint32_t ann;
    uint32_t bob;
    uint32_t cat;
  };
  for (const auto& [ann, bob, cat] : {Case{1, 1, 1}, Case{5, 1, 1}, Case{1, 5, 1}, Case{1, 1, 5},
                                      Case{2, 30, 400}, Case{kMaxLimit, kMaxLimit, kMaxLimit}}) {
    Cell cell;
    cell << HoldSet{Mode::kLimit, Weighing(kBobsHold, bob)}
         << HoldSet{Mode::kLimit, Weighing(kAnnsHold, ann)}
         << HoldSet{Mode::kLimit, Weighing(kCatsHold, cat)};
    EXPECT_EQ(cell->WeightBlocking(kMinInstant), uint64_t{ann} + bob + cat);
    EXPECT_EQ(cell->WeightBlocking(kEnd - Millis{20}), uint64_t{ann} + bob + cat);
    EXPECT_EQ(cell->WeightBlocking(kEnd - Millis{19}), uint64_t{ann} + bob);
    EXPECT_EQ(cell->WeightBlocking(kEnd - Millis{9}), ann);
    EXPECT_EQ(cell->WeightBlocking(kEnd), ann);
    EXPECT_EQ(cell->WeightBlocking(kEnd + kTick), 0);
  }
}

TEST(WeightBlocking, FollowsEveryChange) {
  Cell cell;
  const auto weight = [&cell] { return cell->WeightBlocking(kSince); };
  cell << HoldSet{Mode::kLimit, Weighing(kAnnsHold, 3)};
  cell << HoldSet{Mode::kLimit, Weighing(kBobsHold, 4)};
  EXPECT_EQ(weight(), 7) << "a lock of one became a lock of two";
  cell << HoldSet{Mode::kLimit, Weighing(kAnnsHold, 30)};
  EXPECT_EQ(weight(), 34) << "heavier";
  cell << HoldSet{Mode::kLimit, kAnnsHold};
  EXPECT_EQ(weight(), 5) << "narrow again";
  cell << HoldSet{Mode::kLimit, Weighing(kCatsHold, 9)};
  EXPECT_EQ(weight(), 14);
  cell << HoldReleased{kBob};
  EXPECT_EQ(weight(), 10);
  cell << HoldSet{Mode::kLimit, Weighing(kBobsHold, 2)} << HoldEnded{kCat};
  EXPECT_EQ(weight(), 3);
  cell << HoldSet{Mode::kLimit, Weighing(Rare(kCatsHold, Millis{9}, 1), 6)};
  const std::array owners = {kCat, kBob};
  cell << SessionsEnded{kSince, owners};
  EXPECT_EQ(cell->WeightBlocking(kSince), 7) << "Bob's is gone, Cat's lingers";
  EXPECT_EQ(cell->WeightBlocking(kSince + Millis{9}), 1) << "and is over";
  cell << HoldsExpired{kSince + Millis{9}};
  EXPECT_EQ(weight(), 1);
  cell << HoldSet{Mode::kLimit, Weighing(kBobsHold, 2)};
  cell << HoldSet{Mode::kShared, kBobsHold};
  EXPECT_EQ(weight(), 1) << "a hold of another kind takes the place of all";
  const Holds holds = {Weighing(kAnnsHold, 8), Weighing(kBobsHold, 20)};
  const LockPtr made(Lock::Make(Mode::kLimit, holds));
  EXPECT_EQ(made->WeightBlocking(kSince), 28);
}

// With few and with many holds that have ended, over several leaves, where weights are mixed or
// nearly all 1.
TEST(WeightBlocking, OfManyHoldsIsRightAtAllTimes) {
  constexpr size_t kHolds = 1'500;
  for (const uint64_t one_heavy_in : {uint64_t{1}, uint64_t{7}, uint64_t{kHolds}}) {
    std::mt19937_64 random(one_heavy_in);
    std::vector<std::string> owners;
    std::vector<Hold> holds;
    std::vector<uint64_t> expected(kHolds + 1, 0);  // by how many milliseconds have passed
    for (size_t i = 0; i < kHolds; ++i) owners.push_back(std::to_string(i));
    for (size_t i = 0; i < kHolds; ++i) {
      const auto weight =
          static_cast<uint32_t>(random() % one_heavy_in == 0 ? 1 + random() % 1'000 : 1);
      const size_t ends = random() % kHolds;
      const size_t lingers = random() % (kHolds - ends);
      holds.push_back(
          Weighing({Owner{owners[i]}, Token{1 + i}, kSince, kSince + Millis{ends}, Millis{lingers}},
                   weight));
      for (size_t ms = 0; ms <= ends + lingers; ++ms) expected[ms] += weight;
    }
    const LockPtr made(Lock::Make(Mode::kLimit, holds));
    Cell cell;
    for (const Hold& hold : holds) cell << HoldSet{Mode::kLimit, hold};
    for (size_t ms = 0; ms <= kHolds; ++ms) {
      ASSERT_EQ(made->WeightBlocking(kSince + Millis{ms}), expected[ms]) << ms;
      ASSERT_EQ(cell->WeightBlocking(kSince + Millis{ms}), expected[ms]) << ms;
    }
    // Half of them at once.
    const HoldsExpired half{kSince + Millis{kHolds / 2}};
    cell << half;
    for (size_t ms = kHolds / 2; ms <= kHolds; ++ms) {
      ASSERT_EQ(cell->WeightBlocking(kSince + Millis{ms}), expected[ms]) << ms;
    }
  }
}

TEST(LockOfOne, CanBeConstructedFromItsBytes) {
  for (const Mode mode : kModes) {
    for (const Hold& hold : {kAnnsHold, Rare(kAnnsHold, Millis{7}, 2)}) {
      const LockPtr lock(Lock::Make({mode, hold}));
      const std::string_view bytes = lock->AsBytes();
      auto* copy = static_cast<char*>(::operator new(bytes.size()));
      std::copy(bytes.begin(), bytes.end(), copy);
      // Invalid bytes are left unchanged and remain the caller's.
      EXPECT_EQ(Lock::Adopt(copy, bytes.size() - 1), nullptr);
      EXPECT_EQ(std::string_view(copy, bytes.size()), bytes);
      const LockPtr adopted(Lock::Adopt(copy, bytes.size()));
      ASSERT_NE(adopted, nullptr);
      EXPECT_EQ(adopted->AsBytes().data(), copy);
      EXPECT_EQ(adopted->mode(), mode);
      EXPECT_EQ(HoldsOf(*adopted), Holds{hold});
    }
  }
}

TEST(LockOfOne, HasTokenOnlyWhileLive) {
  const LockPtr lock(Lock::Make({Mode::kExclusive, Rare(kAnnsHold, Millis{500}, 1)}));
  EXPECT_TRUE(lock->HasLive(kToken, kMinInstant));
  EXPECT_TRUE(lock->HasLive(kToken, kEnd));
  EXPECT_FALSE(lock->HasLive(kToken, kEnd + kTick));  // although it lingers
  for (const Token other :
       {Token{0}, kMinToken, Token{kToken.value - 1}, Token{kToken.value + 1}, kMaxToken}) {
    EXPECT_FALSE(lock->HasLive(other, kEnd)) << other.value;
  }
}

TEST(LockOfOne, BlocksUntilItCloses) {
  const LockPtr plain(Lock::Make({Mode::kExclusive, kAnnsHold}));
  EXPECT_EQ(plain->CountBlocking(kEnd), 1);
  EXPECT_EQ(plain->CountBlocking(kEnd + kTick), 0);
  const LockPtr lingers(Lock::Make({Mode::kExclusive, Rare(kAnnsHold, Millis{500}, 1)}));
  EXPECT_EQ(lingers->CountBlocking(kEnd + Millis{500}), 1);
  EXPECT_EQ(lingers->CountBlocking(kEnd + Millis{501}), 0);
}

// --- Held -------------------------------------------------------------------------------------

TEST(ApplyHeld, CreatesMissingLock) {
  for (const Mode mode : kModes) {
    EXPECT_FALSE(Joins(nullptr, mode));
    const LockPtr lock(Apply(nullptr, HoldSet{mode, kAnnsHold}));
    ASSERT_NE(lock, nullptr);
    EXPECT_EQ(HoldsOf(*lock), Holds{kAnnsHold});
    EXPECT_EQ(lock->mode(), mode);
  }
}

TEST(ApplyHeld, UpdatesHoldOfSameOwnerInPlace) {
  const Hold renewed{.owner = kAnn,
                     .token = Token{kToken.value + 5},
                     .since = kSince + Millis{2},
                     .end = kEnd - Millis{7}};
  for (const Mode before : kModes) {
    for (const Mode after : kModes) {
      const LockPtr lock(Lock::Make({before, kAnnsHold}));
      EXPECT_EQ(Apply(lock.get(), HoldSet{after, renewed}), lock.get());
      EXPECT_EQ(HoldsOf(*lock), Holds{renewed});
      EXPECT_EQ(lock->mode(), after);
    }
  }
}

// A linger, a count above 1, a token far from its grant time and a distant end each need a wide
// record, and all wide records have the same size.
TEST(ApplyHeld, UpdatesWideHoldInPlace) {
  const Holds wide = WideHolds();
  for (const Mode mode : kModes) {
    const LockPtr lock(Lock::Make({mode, Rare(kAnnsHold, Millis{9}, 3)}));
    for (const Hold& next : wide) {
      EXPECT_EQ(Apply(lock.get(), HoldSet{mode, next}), lock.get());
      EXPECT_EQ(HoldsOf(*lock), Holds{next});
      EXPECT_EQ(lock->blocks_until(), next.blocks_until());
      EXPECT_EQ(lock->mode(), mode);
    }
  }
}

// Also from wide to narrow: equal locks have equal records, whatever preceded them.
TEST(ApplyHeld, ReallocatesLockForRecordOfOtherSize) {
  for (const Mode mode : kModes) {
    for (const Hold& wide : WideHolds()) {
      for (const auto& [before, after] : {std::pair(kAnnsHold, wide), {wide, kAnnsHold}}) {
        const LockPtr old(Lock::Make({mode, before}));
        const LockPtr stored(Apply(old.get(), HoldSet{mode, after}));
        ASSERT_NE(stored, old);
        EXPECT_EQ(HoldsOf(*stored), Holds{after});
        EXPECT_EQ(stored->mode(), mode);
        EXPECT_EQ(stored->AsBytes(), LockPtr(Lock::Make({mode, after}))->AsBytes());
        EXPECT_EQ(HoldsOf(*old), Holds{before});  // still the caller's
      }
    }
  }
}

// In a lock of several holds only the owner's record is reallocated.
TEST(ApplyHeld, ReallocatesOnlyOwnRecordAmongSeveral) {
  for (const Hold& wide : WideHolds()) {
    Cell cell;
    cell << HoldSet{Mode::kShared, kAnnsHold} << HoldSet{Mode::kShared, kBobsHold};
    const Lock* const before = cell.get();
    for (const Hold& next : {wide, kAnnsHold, wide}) {
      cell << HoldSet{Mode::kShared, next};
      EXPECT_EQ(cell.get(), before);
      EXPECT_EQ(HoldsOf(*cell), (Holds{next, kBobsHold}));
      EXPECT_EQ(cell->blocks_until(), std::max(next.blocks_until(), kBobsHold.blocks_until()));
    }
  }
}

// The size of a wide record depends on the tag and on nothing else.
TEST(ApplyHeld, ReallocatesLockOnlyIfTheSizeOfTheTagChanges) {
  const Hold plain = Rare(kAnnsHold, Millis{5}, 1);
  const std::string longest(64, 'x');
  const std::vector<std::string> tags = {"", "a", "b", "ab", longest};
  for (const Mode mode : kModes) {
    for (const std::string& before : tags) {
      for (const std::string& after : tags) {
        for (const bool capped : {false, true}) {
          const LockPtr old(Lock::Make({mode, Tagged(plain, before)}));
          const Hold next =
              Capped(Tagged(plain, after), capped ? std::optional(kEnd) : std::nullopt);
          Lock* const stored = Apply(old.get(), HoldSet{mode, next});
          const LockPtr owned(stored == old.get() ? nullptr : stored);
          EXPECT_EQ(stored == old.get(), before.size() == after.size());
          EXPECT_EQ(HoldsOf(*stored), Holds{next});
          EXPECT_EQ(stored->AsBytes(), LockPtr(Lock::Make({mode, next}))->AsBytes());
          if (owned != nullptr) {
            EXPECT_EQ(HoldsOf(*old), Holds{Tagged(plain, before)});
          }
        }
      }
    }
  }
}

// Every way from one hold to another, in a lock of one and of several: what is left of the former
// never shows.
TEST(ApplyHeld, AnyHoldMayFollowAnyOther) {
  const std::string longest(64, 'x');
  Holds kinds = WideHolds();
  kinds.push_back(kAnnsHold);
  kinds.push_back(Weighing(kAnnsHold, 9));
  kinds.push_back(Tagged(kAnnsHold, "t"));
  kinds.push_back(Tagged(kAnnsHold, longest));
  kinds.push_back(Capped(Tagged(Weighing(Rare(kAnnsHold, Millis{3}, 4), 5), "u"), kEnd + kTick));
  for (const Hold& before : kinds) {
    for (const Hold& after : kinds) {
      Cell one;
      one << HoldSet{Mode::kLimit, before} << HoldSet{Mode::kLimit, after};
      ASSERT_EQ(HoldsOf(*one), Holds{after});
      ASSERT_EQ(one->AsBytes(), LockPtr(Lock::Make({Mode::kLimit, after}))->AsBytes());
      Cell many;
      many << HoldSet{Mode::kLimit, before} << HoldSet{Mode::kLimit, kBobsHold};
      many << HoldSet{Mode::kLimit, after};
      ASSERT_EQ(HoldsOf(*many), (Holds{after, kBobsHold}));
      ASSERT_EQ(many->WeightBlocking(kSince), after.weight + 1);
      many << HoldEnded{kBob};
      ASSERT_EQ(HoldsOf(*many), Holds{after});
    }
  }
}

// As in a renewal: the tag of the new hold is the one in the record that is written or freed.
TEST(ApplyHeld, AcceptsTagThatRefersToLocksOwnBytes) {
  for (const bool crowded : {false, true}) {
    for (const std::string& tag : {"t"s, std::string(64, 'x')}) {
      Cell cell;
      cell << HoldSet{Mode::kLimit, Tagged(kAnnsHold, tag)};
      if (crowded) cell << HoldSet{Mode::kLimit, Tagged(kBobsHold, "bob's")};
      Hold hold = *cell->Find(kAnn);
      hold.end += kTick;
      hold.weight = 3;
      cell << HoldSet{Mode::kLimit, hold};  // in place
      EXPECT_EQ(cell->Find(kAnn)->tag, tag);
      EXPECT_EQ(cell->Find(kAnn)->end, kEnd + kTick);
      // Moved by its token: the record is not in one of the lists for a moment.
      hold = *cell->Find(kAnn);
      hold.token = Token{kToken.value + 7};
      cell << HoldSet{Mode::kLimit, hold};
      EXPECT_EQ(cell->Find(kAnn)->tag, tag);
      // A part of it: the record is too large, and freed.
      hold = *cell->Find(kAnn);
      hold.tag = hold.tag.substr(tag.size() / 2);
      const std::string part(hold.tag);
      cell << HoldSet{Mode::kLimit, hold};
      EXPECT_EQ(cell->Find(kAnn)->tag, part);
      // The whole lock is replaced.
      hold = *cell->Find(kAnn);
      hold.weight = 1;
      cell << HoldSet{Mode::kExclusive, hold};
      EXPECT_EQ(HoldsOf(*cell), Holds{Tagged({.owner = kAnn,
                                              .token = Token{kToken.value + 7},
                                              .since = kSince,
                                              .end = kEnd + kTick},
                                             part)});
    }
  }
}

// The tag and the cap of a hold survive what changes its count, and what ends its session.
TEST(ApplyHeld, ReleaseAndSessionKeepTagAndCap) {
  for (const bool crowded : {false, true}) {
    const Hold hold = Capped(Tagged(Weighing(Rare(kAnnsHold, Millis{40}, 2), 5), "t"), kEnd);
    Cell cell;
    cell << HoldSet{Mode::kLimit, hold};
    if (crowded) cell << HoldSet{Mode::kLimit, kBobsHold};
    cell << HoldReleased{kAnn};
    Hold expected = hold;
    expected.count = 1;
    EXPECT_EQ(cell->Find(kAnn), expected);
    const std::array owners = {kAnn};
    cell << SessionsEnded{kSince, owners};
    EXPECT_EQ(cell->Find(kAnn), AfterSession(expected, kSince));
    EXPECT_EQ(cell->Find(kAnn)->tag, "t");
    EXPECT_EQ(cell->Find(kAnn)->cap, kEnd);
    EXPECT_EQ(cell->Find(kAnn)->weight, 5);
  }
}

// The decision to renew refers to the lock that it is applied to.
TEST(ApplyHeld, AcceptsFactThatRefersToLocksOwnBytes) {
  for (const bool crowded : {false, true}) {
    Cell cell;
    cell << HoldSet{Mode::kShared, kAnnsHold};
    if (crowded) cell << HoldSet{Mode::kShared, kBobsHold};
    Hold hold = *cell->Find(kAnn);
    hold.end += kTick;
    cell << HoldSet{Mode::kShared, hold};
    EXPECT_EQ(cell->Find(kAnn)->end, kEnd + kTick);
    // This one needs more room: the record that contains the owner's bytes is freed.
    hold = *cell->Find(kAnn);
    hold.count = 5;
    cell << HoldSet{Mode::kShared, hold};
    EXPECT_EQ(cell->Find(kAnn)->count, 5);
    EXPECT_EQ(cell->Find(kAnn)->owner, kAnn);
    // And this one replaces the whole lock.
    hold = *cell->Find(kAnn);
    hold.linger = Millis{3};
    cell << HoldSet{Mode::kExclusive, hold};
    EXPECT_EQ(HoldsOf(*cell), (Holds{{kAnn, kToken, kSince, kEnd + kTick, Millis{3}, 5}}));
  }
}

TEST(ApplyHeld, ReplacesExclusiveLockOfOtherOwner) {
  for (const std::string_view other : {"bob"sv, "an"sv, "annn"sv, "ANN"sv}) {
    const LockPtr old(Lock::Make({Mode::kExclusive, kAnnsHold}));
    const Hold others{Owner{other}, Token{kToken.value + 1}, kEnd, kEnd + Millis{9}};
    const LockPtr stored(Apply(old.get(), HoldSet{Mode::kExclusive, others}));
    ASSERT_NE(stored, old);
    EXPECT_EQ(HoldsOf(*stored), Holds{others});
    EXPECT_EQ(HoldsOf(*old), Holds{kAnnsHold});
  }
}

TEST(ApplyHeld, JoinsOnlyHoldsOfSameMode) {
  for (const Mode before : kModes) {
    for (const Mode after : kModes) {
      const bool joins = before == after && after != Mode::kExclusive;
      const LockPtr old(Lock::Make({before, kAnnsHold}));
      EXPECT_EQ(Joins(old.get(), after), joins);
      const LockPtr stored(Apply(old.get(), HoldSet{after, kBobsHold}));
      ASSERT_NE(stored, old);
      EXPECT_EQ(stored->mode(), after);
      EXPECT_EQ(HoldsOf(*stored), joins ? (Holds{kAnnsHold, kBobsHold}) : Holds{kBobsHold});
      EXPECT_EQ(stored->IsOneAllocation(), !joins);
      EXPECT_EQ(HoldsOf(*old), Holds{kAnnsHold});
    }
  }
}

TEST(ApplyHeld, ReplacesAllHoldsOfOtherMode) {
  for (const Mode before : kModesOfMany) {
    for (const Mode after : kModes) {
      if (before == after) continue;
      for (const Hold& hold : {kAnnsHold, kCatsHold}) {
        Cell cell;
        cell << HoldSet{before, kAnnsHold} << HoldSet{before, kBobsHold};
        EXPECT_FALSE(Joins(cell.get(), after));
        cell << HoldSet{after, hold};
        EXPECT_EQ(HoldsOf(*cell), Holds{hold});
        EXPECT_EQ(cell->mode(), after);
        EXPECT_TRUE(cell->IsOneAllocation());
      }
    }
  }
}

// A fact is applied unconditionally: neither its times nor its token are compared with anything.
TEST(ApplyHeld, AppliesFactsWithEarlierTimesAndTokens) {
  const Hold older{kAnn, kMinToken, kMinInstant, kMinInstant};
  const LockPtr lock(Lock::Make({Mode::kExclusive, kAnnsHold}));
  EXPECT_EQ(Apply(lock.get(), HoldSet{Mode::kExclusive, older}), lock.get());
  EXPECT_EQ(HoldsOf(*lock), Holds{older});

  Cell many;
  many << HoldSet{Mode::kShared, kAnnsHold} << HoldSet{Mode::kShared, kBobsHold};
  many << HoldSet{Mode::kShared, older};
  EXPECT_EQ(HoldsOf(*many), (Holds{older, kBobsHold}));
  EXPECT_EQ(HoldsOf(*many, Order::kByToken), (Holds{older, kBobsHold}));
  EXPECT_EQ(HoldsOf(*many, Order::kByBlocksUntil), (Holds{older, kBobsHold}));
}

// --- A lock of many holds ---------------------------------------------------------------------

class LockOfMany : public testing::Test {
 protected:
  // Sorted by token and by closing time they have opposite orders; by owner a third one.
  LockOfMany() {
    cell_ << HoldSet{Mode::kShared, kCatsHold} << HoldSet{Mode::kShared, kAnnsHold}
          << HoldSet{Mode::kShared, kBobsHold};
  }

  Cell cell_;
};

TEST_F(LockOfMany, IteratesInThreeOrders) {
  EXPECT_EQ(cell_->size(), 3);
  EXPECT_EQ(HoldsOf(*cell_, Order::kByOwner), (Holds{kAnnsHold, kBobsHold, kCatsHold}));
  EXPECT_EQ(HoldsOf(*cell_, Order::kByToken), (Holds{kAnnsHold, kBobsHold, kCatsHold}));
  EXPECT_EQ(HoldsOf(*cell_, Order::kByBlocksUntil), (Holds{kCatsHold, kBobsHold, kAnnsHold}));
  EXPECT_EQ(cell_->blocks_until(), kEnd);
}

TEST_F(LockOfMany, RenewedHoldMovesInEveryOrder) {
  const Lock* const before = cell_.get();
  Hold renewed = kAnnsHold;
  renewed.token = Token{kToken.value + 9};
  renewed.end = kEnd - Millis{15};
  cell_ << HoldSet{Mode::kShared, renewed};
  EXPECT_EQ(cell_.get(), before);
  EXPECT_EQ(HoldsOf(*cell_, Order::kByOwner), (Holds{renewed, kBobsHold, kCatsHold}));
  EXPECT_EQ(HoldsOf(*cell_, Order::kByToken), (Holds{kBobsHold, kCatsHold, renewed}));
  EXPECT_EQ(HoldsOf(*cell_, Order::kByBlocksUntil), (Holds{kCatsHold, renewed, kBobsHold}));
  EXPECT_EQ(cell_->blocks_until(), kEnd - Millis{10});
}

// A long linger determines the TTL of the key, whatever the order of the ends.
TEST_F(LockOfMany, ClosesWithLastLinger) {
  const Hold lingers = Rare(kCatsHold, Millis{1000}, 1);
  cell_ << HoldSet{Mode::kShared, lingers};
  EXPECT_EQ(HoldsOf(*cell_, Order::kByBlocksUntil), (Holds{kBobsHold, kAnnsHold, lingers}));
  EXPECT_EQ(cell_->blocks_until(), kCatsHold.end + Millis{1000});
}

TEST_F(LockOfMany, FindsExactlyItsOwners) {
  EXPECT_EQ(cell_->Find(kAnn), kAnnsHold);
  EXPECT_EQ(cell_->Find(kBob), kBobsHold);
  EXPECT_EQ(cell_->Find(kCat), kCatsHold);
  for (const std::string_view other :
       {""sv, "a"sv, "ann\0"sv, "bo"sv, "bobo"sv, "cau"sv, "zoe"sv, "\0"sv, "\xff"sv, "BOB"sv}) {
    EXPECT_EQ(cell_->Find(Owner{other}), std::nullopt) << other;
  }
}

TEST_F(LockOfMany, CountsHoldsThatStillBlock) {
  EXPECT_EQ(cell_->CountBlocking(kMinInstant), 3);
  EXPECT_EQ(cell_->CountBlocking(kEnd - Millis{20}), 3);
  EXPECT_EQ(cell_->CountBlocking(kEnd - Millis{19}), 2);
  EXPECT_EQ(cell_->CountBlocking(kEnd - Millis{10}), 2);
  EXPECT_EQ(cell_->CountBlocking(kEnd - Millis{9}), 1);
  EXPECT_EQ(cell_->CountBlocking(kEnd), 1);
  EXPECT_EQ(cell_->CountBlocking(kEnd + kTick), 0);
  cell_ << HoldSet{Mode::kShared, Rare(kCatsHold, Millis{30}, 1)};
  EXPECT_EQ(cell_->CountBlocking(kEnd + Millis{10}), 1);
  EXPECT_EQ(cell_->CountBlocking(kEnd + Millis{11}), 0);
}

TEST_F(LockOfMany, HasTokensOfLiveHoldsOnly) {
  EXPECT_TRUE(cell_->HasLive(kCatsHold.token, kCatsHold.end));
  EXPECT_FALSE(cell_->HasLive(kCatsHold.token, kCatsHold.end + kTick));
  EXPECT_TRUE(cell_->HasLive(kBobsHold.token, kCatsHold.end + kTick));
  EXPECT_TRUE(cell_->HasLive(kAnnsHold.token, kEnd));
  EXPECT_FALSE(cell_->HasLive(Token{kToken.value - 1}, kSince));
  EXPECT_FALSE(cell_->HasLive(Token{kToken.value + 3}, kSince));
}

// A server never issues this, but facts can contain it, and facts are applied unconditionally.
TEST_F(LockOfMany, AllowsTwoOwnersUnderOneToken) {
  Hold same = kAnnsHold;
  same.owner = Owner{"zoe"};
  same.end = kEnd - Millis{5};
  Hold first = same;
  first.owner = Owner{"abe"};
  first.end = kEnd - Millis{6};
  cell_ << HoldSet{Mode::kShared, same} << HoldSet{Mode::kShared, first};
  EXPECT_EQ(HoldsOf(*cell_, Order::kByToken),
            (Holds{first, kAnnsHold, same, kBobsHold, kCatsHold}));
  EXPECT_TRUE(cell_->HasLive(kToken, kEnd));
  cell_ << HoldEnded{kAnn};
  EXPECT_TRUE(cell_->HasLive(kToken, kEnd - Millis{5}));  // the second of the two
  EXPECT_FALSE(cell_->HasLive(kToken, kEnd - Millis{4}));
  cell_ << HoldEnded{same.owner};
  EXPECT_TRUE(cell_->HasLive(kToken, kEnd - Millis{6}));
  EXPECT_FALSE(cell_->HasLive(kToken, kEnd - Millis{5}));
}

// Owners are stored in the order of their bytes, compared as unsigned numbers.
TEST(LockOfManyOwners, AreSortedByUnsignedBytes) {
  const std::vector<std::string> sorted = {"\0"s, "\0\0"s, "\0z"s, "A",    "a",    "a\0"s,
                                           "aa",  "b",     "\x7f", "\x80", "\xff", "\xff\0"s};
  std::vector<std::string> shuffled = sorted;
  std::shuffle(shuffled.begin(), shuffled.end(), std::mt19937_64(7));
  Cell cell;
  for (const std::string& owner : shuffled) {
    cell << HoldSet{Mode::kLimit, {Owner{owner}, kToken, kSince, kEnd}};
  }
  ASSERT_EQ(cell->size(), sorted.size());
  // With equal tokens and ends the other orders fall back to owners.
  for (const Order order : kOrders) {
    for (size_t i = 0; i < sorted.size(); ++i) {
      EXPECT_EQ(cell->at(order, i).owner, Owner{sorted[i]}) << i;
    }
  }
  for (const std::string& owner : sorted) EXPECT_TRUE(cell->Find(Owner{owner}).has_value());
}

// --- Released and Ended -----------------------------------------------------------------------

TEST(ApplyEnded, LastHoldRemovesLock) {
  for (const Mode mode : kModes) {
    const LockPtr lock(Lock::Make({mode, Rare(kAnnsHold, Millis{9}, 7)}));
    EXPECT_EQ(Apply(lock.get(), HoldEnded{kAnn}), nullptr);
    EXPECT_EQ(HoldsOf(*lock), Holds{Rare(kAnnsHold, Millis{9}, 7)});  // still the caller's
  }
}

TEST(ApplyEnded, KeepsOtherHolds) {
  Cell cell;
  cell << HoldSet{Mode::kLimit, kAnnsHold} << HoldSet{Mode::kLimit, kBobsHold}
       << HoldSet{Mode::kLimit, Rare(kCatsHold, Millis{5}, 3)};
  const Lock* const before = cell.get();
  cell << HoldEnded{kCat};
  EXPECT_EQ(HoldsOf(*cell), (Holds{kAnnsHold, kBobsHold}));
  EXPECT_EQ(HoldsOf(*cell, Order::kByBlocksUntil), (Holds{kBobsHold, kAnnsHold}));
  cell << HoldEnded{kAnn};
  EXPECT_EQ(HoldsOf(*cell), Holds{kBobsHold});
  EXPECT_EQ(cell->blocks_until(), kBobsHold.end);
  EXPECT_EQ(cell.get(), before);
  EXPECT_EQ(cell->mode(), Mode::kLimit);
  cell << HoldEnded{kBob};
  EXPECT_EQ(cell.get(), nullptr);
}

// The removal of an overdue hold refers to the lock's own bytes.
TEST(ApplyEnded, AcceptsOwnerThatRefersToLocksOwnBytes) {
  Cell cell;
  cell << HoldSet{Mode::kShared, kAnnsHold} << HoldSet{Mode::kShared, kBobsHold}
       << HoldSet{Mode::kShared, kCatsHold};
  while (cell.get() != nullptr) cell << HoldEnded{cell->at(Order::kByBlocksUntil, 0).owner};
  cell << HoldSet{Mode::kShared, kAnnsHold};
  cell << HoldReleased{cell->at(Order::kByBlocksUntil, 0).owner};
  EXPECT_EQ(cell.get(), nullptr);
}

TEST(ApplyReleased, DecrementsCountByOne) {
  for (const Mode mode : kModes) {
    for (const bool crowded : {false, true}) {
      if (crowded && mode == Mode::kExclusive) continue;
      Cell cell;
      cell << HoldSet{mode, Rare(kAnnsHold, Millis{9}, 3)};
      if (crowded) cell << HoldSet{mode, kBobsHold};
      const Lock* const before = cell.get();
      for (const uint32_t left : {2U, 1U}) {
        cell << HoldReleased{kAnn};
        ASSERT_NE(cell.get(), nullptr);
        EXPECT_EQ(cell->Find(kAnn), Rare(kAnnsHold, Millis{9}, left));
      }
      EXPECT_EQ(cell->mode(), mode);
      EXPECT_EQ(cell.get(), before);
      cell << HoldReleased{kAnn};
      if (crowded) {
        EXPECT_EQ(HoldsOf(*cell), Holds{kBobsHold});
      } else {
        EXPECT_EQ(cell.get(), nullptr);
      }
    }
  }
}

// When the count drops to 1 the room for it is freed, unless another field needs it.
TEST(ApplyReleased, NarrowsRecordWhenCountReachesOne) {
  for (const bool crowded : {false, true}) {
    Cell cell;
    if (crowded) cell << HoldSet{Mode::kShared, kBobsHold};
    cell << HoldSet{Mode::kShared, Rare(kAnnsHold, Millis{0}, 2)} << HoldReleased{kAnn};
    EXPECT_EQ(cell->Find(kAnn), kAnnsHold);
    if (crowded) cell << HoldEnded{kBob};
    EXPECT_EQ(cell->AsBytes(), LockPtr(Lock::Make({Mode::kShared, kAnnsHold}))->AsBytes());
  }
}

TEST(ApplyReleased, DecrementsMaximumCount) {
  Cell cell;
  cell << HoldSet{Mode::kExclusive, Rare(kAnnsHold, Millis{0}, kMaxCount)} << HoldReleased{kAnn};
  EXPECT_EQ(cell->Find(kAnn)->count, kMaxCount - 1);
}

TEST(ApplyReleasedOrEnded, IgnoresMissingHold) {
  EXPECT_EQ(Apply(nullptr, HoldReleased{kAnn}), nullptr);
  EXPECT_EQ(Apply(nullptr, HoldEnded{kAnn}), nullptr);
  Cell cell;
  cell << HoldSet{Mode::kShared, kAnnsHold};
  for (const bool crowded : {false, true}) {
    if (crowded) cell << HoldSet{Mode::kShared, kBobsHold};
    const Holds before = HoldsOf(*cell);
    const Lock* const lock = cell.get();
    for (const std::string_view other : {"an"sv, "annn"sv, "ANN"sv, "zoe"sv, "\0"sv}) {
      cell << HoldReleased{Owner{other}} << HoldEnded{Owner{other}};
    }
    EXPECT_EQ(cell.get(), lock);
    EXPECT_EQ(HoldsOf(*cell), before);
  }
}

// A lock that had several holds works as before with one.
TEST(LockOfManyWithOneLeft, BehavesLikeLockOfOne) {
  for (const Mode mode : kModesOfMany) {
    Cell cell;
    cell << HoldSet{mode, kAnnsHold} << HoldSet{mode, kBobsHold} << HoldEnded{kAnn};
    EXPECT_EQ(cell->size(), 1);
    EXPECT_EQ(cell->blocks_until(), kBobsHold.end);
    EXPECT_EQ(cell->CountBlocking(kBobsHold.end + kTick), 0);
    cell << HoldSet{mode, Rare(kBobsHold, Millis{4}, 2)};
    EXPECT_EQ(HoldsOf(*cell), Holds{Rare(kBobsHold, Millis{4}, 2)});
    cell << HoldSet{mode, kCatsHold};
    EXPECT_EQ(cell->size(), 2);
    cell << HoldEnded{kCat} << HoldSet{Mode::kExclusive, kBobsHold};  // an upgrade
    EXPECT_EQ(HoldsOf(*cell), Holds{kBobsHold});
    EXPECT_EQ(cell->mode(), Mode::kExclusive);
    EXPECT_TRUE(cell->IsOneAllocation());
    cell << HoldSet{mode, kAnnsHold};
    EXPECT_EQ(HoldsOf(*cell), Holds{kAnnsHold});
  }
}

// --- Memory -----------------------------------------------------------------------------------

std::set<void*>& Seen() {
  static std::set<void*> seen;
  return seen;
}

size_t Remember(void* allocation) {
  EXPECT_TRUE(Seen().insert(allocation).second) << "counted twice";
  return 100;
}

TEST(Allocated, CountsEveryAllocationOnce) {
  Seen().clear();
  Cell cell;
  cell << HoldSet{Mode::kShared, kAnnsHold};
  EXPECT_EQ(cell->Allocated(Remember), 100);
  EXPECT_EQ(Seen().count(const_cast<Lock*>(cell.get())), 1);
  for (const Hold& hold : {kBobsHold, kCatsHold}) {
    cell << HoldSet{Mode::kShared, hold};
    Seen().clear();
    // The lock, its three lists, the holds.
    EXPECT_EQ(cell->Allocated(Remember), 100 * (1 + 3 + cell->size()));
    EXPECT_EQ(Seen().size(), 1 + 3 + cell->size());
    EXPECT_EQ(Seen().count(const_cast<Lock*>(cell.get())), 1);
    EXPECT_FALSE(cell->IsOneAllocation());
  }
}

// In the order of the numbers, which are below 9000.
std::string NumberedOwner(int number) { return "owner" + std::to_string(1'000 + number); }

Cell SharedByOwners(int owners) {
  Cell cell;
  for (int i = 0; i < owners; ++i) {
    const std::string owner = NumberedOwner(i);
    cell << HoldSet{Mode::kShared, {Owner{owner}, kToken, kSince, kEnd}};
  }
  return cell;
}

TEST(Allocated, CountsHoldsInEveryLeaf) {
  Seen().clear();
  SharedByOwners(1'000)->Allocated(Remember);
  EXPECT_GT(Seen().size(), 1'000);
}

TEST(Allocated, ShrinksWithTheNumberOfHolds) {
  constexpr int kMost = 400;  // in one leaf
  constexpr int kLeft = 10;
  Cell cell = SharedByOwners(kMost);
  for (int i = kLeft; i < kMost; ++i) cell << HoldEnded{Owner{NumberedOwner(i)}};
  ASSERT_EQ(cell->size(), kLeft);
  EXPECT_LT(cell->Allocated(malloc_usable_size),
            3 * SharedByOwners(kLeft)->Allocated(malloc_usable_size));
}

TEST(Allocated, OneHoldLessMovesNothing) {
  Cell cell = SharedByOwners(100);
  Seen().clear();
  cell->Allocated(Remember);
  const std::set<void*> before = Seen();
  cell << HoldEnded{Owner{NumberedOwner(42)}};
  Seen().clear();
  cell->Allocated(Remember);
  EXPECT_TRUE(std::includes(before.begin(), before.end(), Seen().begin(), Seen().end()));
}

// Neighbouring leaves that are nearly empty become one, whichever of them lost the hold.
TEST(Allocated, NeighbouringLeavesAreMerged) {
  Cell cell = SharedByOwners(600);  // 512 and 88
  for (int i = 0; i < 312; ++i) cell << HoldEnded{Owner{NumberedOwner(i)}};
  Seen().clear();
  EXPECT_GT(cell->Allocated(Remember), 100 * (1 + 3 + cell->size())) << "not yet";
  for (int i = 550; i < 600; ++i) cell << HoldEnded{Owner{NumberedOwner(i)}};
  ASSERT_EQ(cell->size(), 238);
  Seen().clear();
  EXPECT_EQ(cell->Allocated(Remember), 100 * (1 + 3 + cell->size()));
}

#ifdef __GLIBC__
TEST(Allocated, DeletedLockLeavesNothing) {
  const auto allocated = [] {
    const auto info = mallinfo2();  // zero under AddressSanitizer
    return static_cast<int64_t>(info.uordblks + info.hblkhd);
  };
  SharedByOwners(1'500);
  const int64_t before = allocated();
  for (int i = 0; i < 5; ++i) SharedByOwners(1'500);
  EXPECT_LT(allocated() - before, 16'384);
}
#endif

// --- Comparison with a map --------------------------------------------------------------------

// The tags of a random walk.
constexpr std::array kTags = {""sv, ""sv, ""sv, "a"sv, "b"sv, "host:12"sv};

// A reference implementation: a map that goes through the same changes as the lock.
class Model {
 public:
  void ApplyFact(const HoldSet& held) {
    if (held.mode != mode_ || held.mode == Mode::kExclusive) holds_.clear();
    mode_ = held.mode;
    Hold& hold = holds_[std::string(held.hold.owner.bytes)];
    hold = held.hold;
    // The bytes of the tag may be the lock's.
    hold.tag = *std::find(kTags.begin(), kTags.end(), held.hold.tag);
  }
  void ApplyFact(const HoldReleased& released) {
    const auto found = holds_.find(std::string(released.owner.bytes));
    if (found == holds_.end()) return;
    if (--found->second.count == 0) holds_.erase(found);
  }
  void ApplyFact(const HoldEnded& ended) { holds_.erase(std::string(ended.owner.bytes)); }
  void ApplyFact(const HoldsExpired& expired) {
    std::erase_if(holds_, [&](const auto& entry) {
      return entry.second.end + entry.second.linger < expired.before;
    });
  }
  void ApplyFact(const SessionsEnded& ended) {
    for (const Owner owner : ended.owners) {
      const auto found = holds_.find(std::string(owner.bytes));
      if (found == holds_.end() || ended.at > found->second.end) continue;
      Hold& hold = found->second;
      if (hold.linger == Millis{0}) {
        holds_.erase(found);
      } else {
        hold.linger += ended.at - kTick - kMinInstant;
        hold.end = kMinInstant;
      }
    }
  }

  size_t size() const { return holds_.size(); }

  Holds Sorted(Order order) const {
    Holds holds;
    for (const auto& [owner, hold] : holds_) {
      holds.push_back(hold);
      holds.back().owner = Owner{owner};
    }
    const auto key = [order](const Hold& hold) {
      const int64_t first = order == Order::kByToken ? static_cast<int64_t>(hold.token.value)
                            : order == Order::kByBlocksUntil
                                ? (hold.end + hold.linger - kSince).count()
                                : 0;
      return std::pair(first, hold.owner.bytes);
    };
    std::sort(holds.begin(), holds.end(),
              [&](const Hold& a, const Hold& b) { return key(a) < key(b); });
    return holds;
  }

  void Check(const Lock* lock) const {
    ASSERT_EQ(lock == nullptr, holds_.empty());
    if (lock == nullptr) return;
    ASSERT_EQ(lock->mode(), mode_);
    for (const Order order : kOrders) ASSERT_EQ(HoldsOf(*lock, order), Sorted(order));
    ASSERT_EQ(lock->blocks_until(), Sorted(Order::kByBlocksUntil).back().blocks_until());
  }

  void CheckPoint(const Lock* lock, Owner owner, Token token, Instant now) const {
    if (lock == nullptr) return;
    const auto found = holds_.find(std::string(owner.bytes));
    std::optional<Hold> expected;
    if (found != holds_.end()) {
      expected = found->second;
      expected->owner = owner;
    }
    ASSERT_EQ(lock->Find(owner), expected);
    size_t keeping_out = 0;
    uint64_t weight = 0;
    bool live = false;
    for (const auto& [name, hold] : holds_) {
      if (now <= hold.end + hold.linger) {
        ++keeping_out;
        weight += hold.weight;
      }
      live = live || (hold.token == token && now <= hold.end);
    }
    ASSERT_EQ(lock->CountBlocking(now), keeping_out);
    ASSERT_EQ(lock->WeightBlocking(now), weight);
    ASSERT_EQ(lock->HasLive(token, now), live);
  }

 private:
  Mode mode_ = Mode::kExclusive;
  std::map<std::string, Hold> holds_;  // the bytes that their `owner` refers to may have been freed
};

struct Walk {
  const char* name;
  uint64_t seed;
  int steps;
  uint64_t owners;
  uint64_t change_mode_once_in;
  uint64_t held_of_ten;  // how many steps of ten add or renew
  int check_all_once_in;
  uint64_t sweep_once_in;  // one in so many of the other steps removes several at once
};

std::vector<Owner> ViewsOf(const std::vector<std::string>& names) {
  std::vector<Owner> owners;
  for (const std::string& name : names) owners.push_back(Owner{name});
  return owners;
}

class RandomWalk : public testing::TestWithParam<Walk> {};

TEST_P(RandomWalk, MatchesReferenceMap) {
  const Walk& walk = GetParam();
  std::mt19937_64 random(walk.seed);
  const auto below = [&](uint64_t bound) { return random() % bound; };
  Cell cell;
  Model model;
  Mode mode = Mode::kShared;
  size_t most = 0;
  for (int step = 0; step < walk.steps; ++step) {
    SCOPED_TRACE(testing::Message() << "seed " << walk.seed << ", step " << step);
    if (below(walk.change_mode_once_in) == 0) mode = kModes[below(3)];
    std::string name = "owner " + std::to_string(below(walk.owners));
    Owner owner{name};
    // As in a decision, a fact often refers to the lock's own bytes.
    if (cell.get() != nullptr && below(2) == 0) {
      if (const auto own = cell->Find(owner); own.has_value()) owner = own->owner;
    }
    const std::string said(owner.bytes);
    const Token token{kToken.value + below(2 * walk.owners)};
    const Instant now = kSince + Millis{below(100)};
    if (below(10) < walk.held_of_ten) {
      HoldSet held{mode,
                   {owner, token, kSince - Millis{below(9)}, kSince + Millis{below(100)},
                    Millis{below(3) == 0 ? below(30) : 0},
                    static_cast<uint32_t>(below(3) == 0 ? 1 + below(3) : 1)}};
      if (mode == Mode::kLimit && below(3) == 0) {
        held.hold.weight = static_cast<uint32_t>(1 + below(9));
      }
      if (below(4) == 0) held.hold.cap = kSince + Millis{1 + below(200)};
      held.hold.tag = kTags.at(below(kTags.size()));
      // As when an owner asks again without a tag.
      const auto own = cell.get() == nullptr ? std::nullopt : cell->Find(owner);
      if (own.has_value() && below(2) == 0) held.hold.tag = own->tag;
      model.ApplyFact(held);
      cell << held;
    } else if (below(walk.sweep_once_in) == 0) {
      const HoldsExpired expired{kSince + Millis{below(130)}};
      model.ApplyFact(expired);
      cell << expired;
    } else if (below(walk.sweep_once_in) == 0) {
      std::vector<std::string> names;
      for (uint64_t i = 0, count = 1 + below(walk.owners); i < count; ++i) {
        names.push_back("owner " + std::to_string(below(walk.owners)));  // with repetitions
      }
      const std::vector<Owner> owners(ViewsOf(names));
      const SessionsEnded ended{now, owners};
      model.ApplyFact(ended);
      cell << ended;
    } else if (below(2) == 0) {
      model.ApplyFact(HoldReleased{owner});
      cell << HoldReleased{owner};
    } else {
      model.ApplyFact(HoldEnded{owner});
      cell << HoldEnded{owner};
    }
    most = std::max(most, model.size());
    model.CheckPoint(cell.get(), Owner{said}, token, now);
    if (step % walk.check_all_once_in == 0) model.Check(cell.get());
    if (HasFatalFailure()) return;
  }
  model.Check(cell.get());
  EXPECT_GE(most, walk.owners * 9 / 10);  // the walk reached the intended size
}

INSTANTIATE_TEST_SUITE_P(
    Walks, RandomWalk,
    testing::Values(Walk{"FewOwners", 11, 30'000, 4, 20, 6, 1, 10},
                    Walk{"SomeOwners", 12, 15'000, 20, 1'000, 7, 3, 20},
                    Walk{"ThousandOwners", 13, 12'000, 1'000, 100'000, 9, 1'000, 3'000},
                    Walk{"ManyLeaves", 14, 25'000, 2'000, 400'000, 9, 10'000, 4'000}),
    [](const auto& param_info) { return std::string(param_info.param.name); });

// Holds are added and removed in an order that none of the lists has.
TEST(LockOfMany1000, HoldsCanBeRemovedInAnyOrder) {
  constexpr size_t kOwners = 1'000;
  for (const bool rare : {false, true}) {
    std::vector<std::string> owners;
    for (size_t i = 0; i < kOwners; ++i) owners.push_back(std::to_string(i * 7919 % kOwners));
    Cell cell;
    for (size_t i = 0; i < kOwners; ++i) {
      cell << HoldSet{Mode::kLimit,
                      {Owner{owners[i]}, Token{1 + i * 31 % kOwners}, kSince,
                       kSince + Millis{i * 17 % kOwners}, Millis{rare ? 1 : 0}}};
      ASSERT_EQ(cell->size(), i + 1);
    }
    for (size_t i = 0; i < kOwners; ++i) {
      EXPECT_EQ(cell->CountBlocking(kSince + Millis{i + (rare ? 1 : 0)}), kOwners - i);
      EXPECT_EQ(cell->at(Order::kByToken, i).token, Token{1 + i});
    }
    std::shuffle(owners.begin(), owners.end(), std::mt19937_64(3));
    for (size_t i = 0; i < kOwners; ++i) {
      ASSERT_TRUE(cell->Find(Owner{owners[i]}).has_value());
      cell << HoldReleased{Owner{owners[i]}};
      if (i + 1 == kOwners) break;
      ASSERT_EQ(cell->size(), kOwners - i - 1);
      ASSERT_EQ(cell->Find(Owner{owners[i]}), std::nullopt);
    }
    EXPECT_EQ(cell.get(), nullptr);
  }
}

// --- Many holds removed at once ---------------------------------------------------------------

TEST(ApplyExpired, RemovesHoldsClosedBeforeGivenTime) {
  for (const Mode mode : kModesOfMany) {
    Cell cell;
    cell << HoldSet{mode, kAnnsHold} << HoldSet{mode, kBobsHold} << HoldSet{mode, kCatsHold};
    const Lock* const before = cell.get();
    cell << HoldsExpired{kCatsHold.end};
    EXPECT_EQ(cell->size(), 3) << "it closes at that moment, not before";
    cell << HoldsExpired{kCatsHold.end + kTick};
    EXPECT_EQ(HoldsOf(*cell), (Holds{kAnnsHold, kBobsHold}));
    EXPECT_EQ(cell.get(), before);
    cell << HoldSet{mode, Rare(kBobsHold, Millis{500}, 1)} << HoldsExpired{kEnd + kTick};
    EXPECT_EQ(HoldsOf(*cell), Holds{Rare(kBobsHold, Millis{500}, 1)}) << "it lingers";
    EXPECT_EQ(Apply(const_cast<Lock*>(cell.get()), HoldsExpired{kMaxInstant}), nullptr);
    EXPECT_EQ(cell->size(), 1) << "still the caller's";
  }
}

TEST(ApplyExpired, RemovesWholeLockOfOneHold) {
  for (const Mode mode : kModes) {
    const LockPtr lock(Lock::Make({mode, kAnnsHold}));
    EXPECT_EQ(Apply(lock.get(), HoldsExpired{kEnd}), lock.get());
    EXPECT_EQ(Apply(lock.get(), HoldsExpired{kEnd + kTick}), nullptr);
  }
  EXPECT_EQ(Apply(nullptr, HoldsExpired{kMaxInstant}), nullptr);
}

TEST(ApplySessionsEnded, RemovesLiveHoldsAndLetsOthersLinger) {
  const std::array owners = {kAnn, kCat, kBob, kAnn, Owner{"zoe"}};
  for (const Mode mode : kModesOfMany) {
    Cell cell;
    cell << HoldSet{mode, kAnnsHold} << HoldSet{mode, Rare(kBobsHold, Millis{500}, 2)}
         << HoldSet{mode, kCatsHold};
    cell << SessionsEnded{kCatsHold.end + kTick, owners};  // Cat's hold had ended before
    const Hold lingers = AfterSession(Rare(kBobsHold, Millis{500}, 2), kCatsHold.end + kTick);
    EXPECT_EQ(HoldsOf(*cell), (Holds{lingers, kCatsHold}));
    EXPECT_EQ(lingers.blocks_until(), kCatsHold.end + Millis{500});
    EXPECT_FALSE(lingers.LiveAt(kMinInstant + kTick));
    EXPECT_EQ(HoldsOf(*cell, Order::kByBlocksUntil), (Holds{kCatsHold, lingers}));
  }
}

TEST(ApplySessionsEnded, EndOfAllHoldersLeavesLockToCaller) {
  const std::array owners = {kAnn, kBob};
  Cell cell;
  cell << HoldSet{Mode::kShared, kAnnsHold} << HoldSet{Mode::kShared, kBobsHold};
  EXPECT_EQ(Apply(const_cast<Lock*>(cell.get()), SessionsEnded{kSince, owners}), nullptr);
  EXPECT_EQ(HoldsOf(*cell), (Holds{kAnnsHold, kBobsHold}));
  for (const Mode mode : kModes) {
    const LockPtr one(Lock::Make({mode, kAnnsHold}));
    EXPECT_EQ(Apply(one.get(), SessionsEnded{kEnd, owners}), nullptr);
    EXPECT_EQ(Apply(one.get(), SessionsEnded{kEnd + kTick, owners}), one.get());
    EXPECT_EQ(Apply(one.get(), SessionsEnded{kEnd, std::span(owners).subspan(1)}), one.get());
  }
  EXPECT_EQ(Apply(nullptr, SessionsEnded{kSince, owners}), nullptr);
}

// In both directions, in all orders, across many leaves.
TEST(LockOfMany5000, IteratesInBothDirections) {
  constexpr size_t kOwners = 5'000;
  Cell cell;
  for (size_t i = 0; i < kOwners; ++i) {
    const std::string owner = std::to_string(i * 7919 % kOwners);
    cell << HoldSet{
        Mode::kLimit,
        {Owner{owner}, Token{1 + i * 31 % kOwners}, kSince, kSince + Millis{i * 17 % kOwners}}};
  }
  for (const Order order : kOrders) {
    const Holds indexed = HoldsOf(*cell, order);
    const Lock::Holds range = cell->holds(order);
    EXPECT_EQ(Holds(range.begin(), range.end()), indexed);
    Holds backwards;
    for (Lock::Iterator at = range.end(); at != range.begin();) backwards.push_back(*--at);
    std::reverse(backwards.begin(), backwards.end());
    EXPECT_EQ(backwards, indexed);
    EXPECT_EQ(cell->first(order), indexed.front());
    EXPECT_EQ(cell->last(order), indexed.back());
  }
}

// Leaves are freed as holds are removed, in whatever order.
TEST(LockOfMany5000, FreesMemoryAsHoldsEnd) {
  constexpr size_t kOwners = 5'000;
  for (const bool at_once : {false, true}) {
    Cell cell;
    for (size_t i = 0; i < kOwners; ++i) {
      const std::string owner = std::to_string(i);
      cell << HoldSet{Mode::kShared, {Owner{owner}, kToken, kSince, kSince + Millis{i}}};
    }
    const Instant last = kSince + Millis{kOwners - 3};
    for (size_t i = 0; !at_once && i < kOwners - 3; ++i) {
      cell << HoldEnded{Owner{std::to_string(i)}};
    }
    cell << HoldsExpired{last};
    ASSERT_EQ(cell->size(), 3);
    Seen().clear();
    EXPECT_EQ(cell->Allocated(Remember), 100 * (1 + 3 + cell->size()));
  }
}

// Deleted with all its holds, as FLUSHALL does on another thread.
TEST(LockOfMany1000, CanBeDeletedWhileHeld) {
  Cell cell;
  for (int i = 0; i < 1'000; ++i) {
    const std::string owner = std::to_string(i);
    cell << HoldSet{Mode::kShared, {Owner{owner}, kToken, kSince, kEnd, Millis{i % 2}}};
  }
  EXPECT_EQ(cell->size(), 1'000);
}

}  // namespace
}  // namespace turnstile
