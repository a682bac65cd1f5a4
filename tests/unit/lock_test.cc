// Every transition of a lock, with hand-set time.

#include "core/lock.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "printers.h"

namespace turnstile {
namespace {

using namespace std::string_view_literals;
using LockPtr = std::unique_ptr<Lock>;

constexpr Owner kAnn{"ann"};
constexpr Owner kBob{"bob"};
constexpr Token kToken{1'700'000'000'000'042};
constexpr Instant kSince{Millis{1'700'000'000'000}};
constexpr Instant kEnd = kSince + Millis{30'000};
constexpr Millis kTick{1};
constexpr Hold kAnnsHold{.owner = kAnn, .token = kToken, .since = kSince, .end = kEnd};

TokenClock ClockAt(Token last) {
  TokenClock clock;
  clock.Observe(last);
  return clock;
}

// What is stored at the key, at the moment of the request.
enum class Stored {
  kNothing,
  kAnnsLock,
  kAnnsPlain,
  kEmptyPlain,     // SET key ""
  kOversizePlain,  // a value that begins with "ann" and that no owner can equal
};

// Owns what a Place refers to.
class Scene {
 public:
  explicit Scene(Stored stored, const Hold& hold = kAnnsHold) {
    switch (stored) {
      case Stored::kNothing:
        break;
      case Stored::kAnnsLock:
        lock_.reset(Lock::Make(hold));
        break;
      case Stored::kAnnsPlain:
        plain_ = kAnn.bytes;
        break;
      case Stored::kEmptyPlain:
        plain_ = "";
        break;
      case Stored::kOversizePlain:
        plain_ = std::string(kAnn.bytes) + std::string(1000, '!');
        break;
    }
  }

  Place place() const {
    if (plain_.has_value()) return {.lock = nullptr, .plain = PlainLock{*plain_, kMaxInstant}};
    return {.lock = lock_.get(), .plain = std::nullopt};
  }

  // Whether all is still as it was built.
  bool IsUntouched(const Hold& hold = kAnnsHold) const {
    return lock_ == nullptr || lock_->hold() == hold;
  }

 private:
  LockPtr lock_;
  std::optional<std::string> plain_;
};

// The hold of a Held change; fails the test if the change is another one.
Hold HoldOf(const Decision& decision) {
  const auto* held = decision.change.has_value() ? std::get_if<Held>(&*decision.change) : nullptr;
  if (held == nullptr) {
    ADD_FAILURE() << "not a Held";
    return {};
  }
  return held->hold;
}

template <typename Fact>
bool Is(const Decision& decision) {
  return decision.change.has_value() && std::holds_alternative<Fact>(*decision.change);
}

// --- All situations ---------------------------------------------------------------------------

struct Situation {
  const char* name;
  Stored stored;
  Owner asker;
  Millis after_end;  // the moment of the request, counted from the end of the hold
  Outcome acquire;
  Outcome release;
  Outcome touch;
  bool current;  // whether the hold's token is
};

class LockSituation : public testing::TestWithParam<Situation> {
 protected:
  static constexpr Millis kLease{1'234};

  const Situation& s() const { return GetParam(); }
  Instant now() const { return kEnd + s().after_end; }
  // Not on a whole millisecond: leases are cut to one, tokens are not.
  FineInstant fine_now() const { return now() + Micros{567}; }
  Token next_token() const {
    return Token{static_cast<uint64_t>(fine_now().time_since_epoch().count())};
  }

  const TokenClock clock_ = ClockAt(kToken);
};

constexpr Situation kSituations[] = {
    // Nobody.
    {"Nothing", Stored::kNothing, kAnn, Millis{0},  //
     Outcome::kGranted, Outcome::kFree, Outcome::kFree, false},
    // The holder itself.
    {"OwnAtTheStart", Stored::kAnnsLock, kAnn, kSince - kEnd,  //
     Outcome::kHeldAlready, Outcome::kReleased, Outcome::kTouched, true},
    {"OwnBeforeTheStart", Stored::kAnnsLock, kAnn, kSince - kEnd - Millis{5'000},  //
     Outcome::kHeldAlready, Outcome::kReleased, Outcome::kTouched, true},
    {"OwnBeforeTheEnd", Stored::kAnnsLock, kAnn, -kTick,  //
     Outcome::kHeldAlready, Outcome::kReleased, Outcome::kTouched, true},
    {"OwnAtTheEnd", Stored::kAnnsLock, kAnn, Millis{0},  //
     Outcome::kHeldAlready, Outcome::kReleased, Outcome::kTouched, true},
    {"OwnAfterTheEnd", Stored::kAnnsLock, kAnn, kTick,  //
     Outcome::kGranted, Outcome::kLeaseEnded, Outcome::kLeaseEnded, false},
    {"OwnMuchLater", Stored::kAnnsLock, kAnn, std::chrono::hours{1000},  //
     Outcome::kGranted, Outcome::kLeaseEnded, Outcome::kLeaseEnded, false},
    // Somebody else.
    {"OthersAtTheStart", Stored::kAnnsLock, kBob, kSince - kEnd,  //
     Outcome::kHeldByOther, Outcome::kHeldByOther, Outcome::kHeldByOther, true},
    {"OthersBeforeTheEnd", Stored::kAnnsLock, kBob, -kTick,  //
     Outcome::kHeldByOther, Outcome::kHeldByOther, Outcome::kHeldByOther, true},
    {"OthersAtTheEnd", Stored::kAnnsLock, kBob, Millis{0},  //
     Outcome::kHeldByOther, Outcome::kHeldByOther, Outcome::kHeldByOther, true},
    {"OthersAfterTheEnd", Stored::kAnnsLock, kBob, kTick,  //
     Outcome::kGranted, Outcome::kFree, Outcome::kFree, false},
    // A string, which has no lease that we know of.
    {"OwnPlain", Stored::kAnnsPlain, kAnn, Millis{0},  //
     Outcome::kGranted, Outcome::kReleased, Outcome::kTouched, false},
    {"OthersPlain", Stored::kAnnsPlain, kBob, Millis{0},  //
     Outcome::kHeldByOther, Outcome::kHeldByOther, Outcome::kHeldByOther, false},
    {"PlainMuchLater", Stored::kAnnsPlain, kBob, std::chrono::hours{1000},  //
     Outcome::kHeldByOther, Outcome::kHeldByOther, Outcome::kHeldByOther, false},
    {"EmptyPlain", Stored::kEmptyPlain, kAnn, Millis{0},  //
     Outcome::kHeldByOther, Outcome::kHeldByOther, Outcome::kHeldByOther, false},
    {"OversizePlain", Stored::kOversizePlain, kAnn, Millis{0},  //
     Outcome::kHeldByOther, Outcome::kHeldByOther, Outcome::kHeldByOther, false},
};

INSTANTIATE_TEST_SUITE_P(All, LockSituation, testing::ValuesIn(kSituations),
                         [](const auto& param_info) { return std::string(param_info.param.name); });

TEST_P(LockSituation, Acquire) {
  const Scene scene(s().stored);
  const Decision decision =
      Decide(scene.place(), AcquireRequest{s().asker, kLease}, Ahead::kNobody, fine_now(), clock_);
  EXPECT_EQ(decision.outcome, s().acquire);
  if (s().acquire == Outcome::kGranted) {
    EXPECT_EQ(
        HoldOf(decision),
        (Hold{.owner = s().asker, .token = next_token(), .since = now(), .end = now() + kLease}));
  } else if (s().acquire == Outcome::kHeldAlready) {
    EXPECT_EQ(HoldOf(decision),
              (Hold{.owner = s().asker, .token = kToken, .since = kSince, .end = now() + kLease}));
  } else {
    EXPECT_FALSE(decision.change.has_value());
  }
  EXPECT_TRUE(scene.IsUntouched());
  EXPECT_EQ(clock_.last(), kToken);
}

TEST_P(LockSituation, Release) {
  const Scene scene(s().stored);
  const Decision decision = Decide(scene.place(), ReleaseRequest{s().asker}, now());
  EXPECT_EQ(decision.outcome, s().release);
  const bool released = s().release == Outcome::kReleased;
  const bool plain = scene.place().plain.has_value();
  EXPECT_EQ(decision.change.has_value(), released);
  EXPECT_EQ(Is<Freed>(decision), released && !plain);
  EXPECT_EQ(Is<PlainFreed>(decision), released && plain);
  EXPECT_TRUE(scene.IsUntouched());
}

TEST_P(LockSituation, Touch) {
  const Scene scene(s().stored);
  const Decision decision = Decide(scene.place(), TouchRequest{s().asker, kLease}, now());
  EXPECT_EQ(decision.outcome, s().touch);
  if (s().touch != Outcome::kTouched) {
    EXPECT_FALSE(decision.change.has_value());
  } else if (scene.place().plain.has_value()) {
    ASSERT_TRUE(Is<PlainExtended>(decision));
    EXPECT_EQ(std::get<PlainExtended>(*decision.change).end, now() + kLease);
  } else {
    EXPECT_EQ(HoldOf(decision),
              (Hold{.owner = s().asker, .token = kToken, .since = kSince, .end = now() + kLease}));
  }
  EXPECT_TRUE(scene.IsUntouched());
}

TEST_P(LockSituation, Fence) {
  const Scene scene(s().stored);
  const Place place = scene.place();
  EXPECT_EQ(CurrentToken(place, now()), s().current ? std::optional(kToken) : std::nullopt);
  EXPECT_EQ(IsCurrent(place, kToken, now()), s().current);
  for (const Token other :
       {Token{0}, kMinToken, Token{kToken.value - 1}, Token{kToken.value + 1}, kMaxToken}) {
    EXPECT_FALSE(IsCurrent(place, other, now())) << other.value;
  }
}

// At the end of the token clock only those are turned away who need a new token.
TEST_P(LockSituation, AcquireWhenTokensAreUsedUp) {
  const Scene scene(s().stored);
  const Decision decision = Decide(scene.place(), AcquireRequest{s().asker, kLease}, Ahead::kNobody,
                                   fine_now(), ClockAt(kMaxToken));
  if (s().acquire == Outcome::kGranted) {
    EXPECT_EQ(decision.outcome, Outcome::kTokensUsedUp);
    EXPECT_FALSE(decision.change.has_value());
  } else {
    EXPECT_EQ(decision.outcome, s().acquire);
    EXPECT_EQ(decision.change.has_value(), s().acquire == Outcome::kHeldAlready);
  }
}

// Whoever does not hold the lock stands behind those who wait for it.
TEST_P(LockSituation, AcquireWhileOthersWait) {
  const Scene scene(s().stored);
  const Decision decision =
      Decide(scene.place(), AcquireRequest{s().asker, kLease}, Ahead::kOthers, fine_now(), clock_);
  const bool free = s().acquire == Outcome::kGranted && !scene.place().plain.has_value();
  EXPECT_EQ(decision.outcome, free ? Outcome::kOthersWait : s().acquire);
  EXPECT_EQ(decision.change.has_value(), !free && s().acquire != Outcome::kHeldByOther);
}

TEST_P(LockSituation, Holder) {
  const Scene scene(s().stored);
  const std::optional<Holder> holder = HolderOf(scene.place(), now());
  if (scene.place().plain.has_value()) {
    const bool too_long = s().stored == Stored::kOversizePlain;
    ASSERT_TRUE(holder.has_value());
    EXPECT_EQ(holder->owner.bytes, too_long ? "" : scene.place().plain->value);
    EXPECT_EQ(holder->end, kMaxInstant);
  } else {
    ASSERT_EQ(holder.has_value(), s().current);
    if (!s().current) return;
    EXPECT_EQ(holder->owner, kAnn);
    EXPECT_EQ(holder->end, kEnd);
  }
}

// Lines are settled by what both say: if they differed, a line would be looked at for ever.
TEST_P(LockSituation, HolderIsWhoKeepsStrangersOut) {
  const Scene scene(s().stored);
  const Outcome outcome = Decide(scene.place(), AcquireRequest{Owner{"zoe"}, kLease},
                                 Ahead::kNobody, fine_now(), clock_)
                              .outcome;
  const std::optional<Holder> holder = HolderOf(scene.place(), now());
  EXPECT_EQ(holder.has_value(), outcome == Outcome::kHeldByOther);
  if (holder.has_value()) {
    EXPECT_GE(holder->end, now());
  }
}

// A release that was decided elsewhere is obeyed at any time, by the owner only.
TEST_P(LockSituation, ReleaseThatMustBeObeyed) {
  const Scene scene(s().stored);
  const Decision decision = Decide(scene.place(), ReleaseRequest{s().asker}, kBeforeAnyEnd);
  if (s().stored == Stored::kAnnsLock) {
    EXPECT_EQ(Is<Freed>(decision), s().asker == kAnn);
    EXPECT_EQ(decision.outcome, s().asker == kAnn ? Outcome::kReleased : Outcome::kHeldByOther);
  } else {
    EXPECT_EQ(decision.outcome, s().release);
  }
}

// The server may show a string whose TTL is over by our clock: its own is a moment older.
TEST(PlainLockTest, IsOverAfterItsEnd) {
  const Place place{.lock = nullptr, .plain = PlainLock{kAnn.bytes, kEnd}};
  const auto acquire = [&place](Owner owner, FineInstant now) {
    return Decide(place, AcquireRequest{owner, kTick}, Ahead::kNobody, now, TokenClock()).outcome;
  };
  EXPECT_EQ(acquire(kBob, kEnd + Micros{999}), Outcome::kHeldByOther);
  EXPECT_EQ(acquire(kBob, kEnd + Micros{1000}), Outcome::kGranted);
  EXPECT_EQ(Decide(place, ReleaseRequest{kAnn}, kEnd).outcome, Outcome::kReleased);
  EXPECT_EQ(Decide(place, ReleaseRequest{kAnn}, kEnd + kTick).outcome, Outcome::kFree);
  EXPECT_EQ(Decide(place, TouchRequest{kAnn, kTick}, kEnd + kTick).outcome, Outcome::kFree);
  EXPECT_TRUE(HolderOf(place, kEnd).has_value());
  EXPECT_FALSE(HolderOf(place, kEnd + kTick).has_value());
}

// --- Moments and leases -----------------------------------------------------------------------

TEST(Hold, LivesThroughItsLastMillisecond) {
  EXPECT_TRUE(kAnnsHold.LiveAt(kBeforeAnyEnd));
  EXPECT_TRUE(kAnnsHold.LiveAt(kEnd - kTick));
  EXPECT_TRUE(kAnnsHold.LiveAt(kEnd));
  EXPECT_FALSE(kAnnsHold.LiveAt(kEnd + kTick));
}

TEST(Hold, LivesThroughTheLastMicrosecondOfItsLastMillisecond) {
  const Scene scene(Stored::kAnnsLock);
  const auto ask = [&](FineInstant now) {
    return Decide(scene.place(), AcquireRequest{kBob, kTick}, Ahead::kNobody, now, ClockAt(kToken))
        .outcome;
  };
  EXPECT_EQ(ask(kEnd + Micros{999}), Outcome::kHeldByOther);
  EXPECT_EQ(ask(kEnd + Micros{1000}), Outcome::kGranted);
}

TEST(ToInstant, CutsToTheMillisecondBelow) {
  EXPECT_EQ(ToInstant(FineInstant{Micros{1'999}}), Instant{Millis{1}});
  EXPECT_EQ(ToInstant(FineInstant{Micros{2'000}}), Instant{Millis{2}});
  EXPECT_EQ(ToInstant(FineInstant{Micros{-1}}), Instant{Millis{-1}});
}

TEST(Lock, LeaseCountsFromTheRequestAndMayGetShorter) {
  const Scene scene(Stored::kAnnsLock);
  const Instant now = kSince + Millis{10};
  for (const int64_t lease : {int64_t{1}, int64_t{100}, int64_t{29'990}, int64_t{86'400'000}}) {
    const Instant end = now + Millis{lease};
    EXPECT_EQ(HoldOf(Decide(scene.place(), TouchRequest{kAnn, Millis{lease}}, now)).end, end);
    EXPECT_EQ(HoldOf(Decide(scene.place(), AcquireRequest{kAnn, Millis{lease}}, Ahead::kNobody,
                            FineInstant(now), TokenClock()))
                  .end,
              end);
  }
}

TEST(Lock, ClockThatSteppedBackMovesTheEndBack) {
  const Scene scene(Stored::kAnnsLock);
  const Instant now = kSince - std::chrono::hours{1};
  const Hold hold = HoldOf(Decide(scene.place(), TouchRequest{kAnn, Millis{5}}, now));
  EXPECT_EQ(hold.since, kSince);
  EXPECT_EQ(hold.end, now + Millis{5});
  EXPECT_TRUE(IsWellFormed(hold));
}

TEST(Lock, NewHoldTakesTheHigherOfClockAndWallClock) {
  const Scene scene(Stored::kNothing);
  const AcquireRequest request{kAnn, kTick};
  const TokenClock ahead = ClockAt(Token{kToken.value + 1'000'000'000});
  EXPECT_EQ(
      HoldOf(Decide(scene.place(), request, Ahead::kNobody, FineInstant(kSince), ahead)).token,
      Token{kToken.value + 1'000'000'001});
  EXPECT_EQ(
      HoldOf(Decide(scene.place(), request, Ahead::kNobody, FineInstant(kSince), TokenClock()))
          .token,
      Token{1'700'000'000'000'000});
}

// The whole life of a lock, step by step, as a server leads it.
TEST(Lock, StolenLockStory) {
  LockPtr lock;
  TokenClock clock;
  const auto place = [&] { return Place{.lock = lock.get(), .plain = std::nullopt}; };
  const auto acquire = [&](Owner owner, Instant now) {
    const Decision decision = Decide(place(), AcquireRequest{owner, Millis{100}}, Ahead::kNobody,
                                     FineInstant(now), clock);
    if (decision.change.has_value()) {
      const Held held = std::get<Held>(*decision.change);
      Lock* const stored = Apply(lock.get(), held);
      if (stored != lock.get()) lock.reset(stored);
      clock.Observe(held.hold.token);
    }
    return decision.outcome;
  };

  EXPECT_EQ(acquire(kAnn, kSince), Outcome::kGranted);
  const Token anns = lock->hold().token;
  EXPECT_EQ(acquire(kAnn, kSince + Millis{50}), Outcome::kHeldAlready);
  EXPECT_EQ(lock->hold().token, anns);
  EXPECT_EQ(acquire(kBob, kSince + Millis{150}), Outcome::kHeldByOther);
  EXPECT_EQ(acquire(kBob, kSince + Millis{151}), Outcome::kGranted);
  const Token bobs = lock->hold().token;
  EXPECT_GT(bobs, anns);

  const Instant later = kSince + Millis{160};
  EXPECT_EQ(Decide(place(), ReleaseRequest{kAnn}, later).outcome, Outcome::kHeldByOther);
  EXPECT_EQ(Decide(place(), TouchRequest{kAnn, kTick}, later).outcome, Outcome::kHeldByOther);
  EXPECT_FALSE(IsCurrent(place(), anns, later));
  EXPECT_TRUE(IsCurrent(place(), bobs, later));
  EXPECT_EQ(lock->hold().owner, kBob);
}

TEST(Lock, LostHoldIsNeverRevived) {
  const Scene scene(Stored::kAnnsLock);
  const Instant now = kEnd + kTick;
  EXPECT_FALSE(Decide(scene.place(), TouchRequest{kAnn, Millis{1000}}, now).change.has_value());
  EXPECT_FALSE(Decide(scene.place(), ReleaseRequest{kAnn}, now).change.has_value());
  const Decision again = Decide(scene.place(), AcquireRequest{kAnn, Millis{1000}}, Ahead::kNobody,
                                FineInstant(now), ClockAt(kToken));
  EXPECT_EQ(again.outcome, Outcome::kGranted);
  EXPECT_GT(HoldOf(again).token, kToken);
  EXPECT_EQ(HoldOf(again).since, now);
}

// --- Owners -----------------------------------------------------------------------------------

// Owners that a careless comparison would take for one.
TEST(Owner, IsComparedByteForByte) {
  const std::vector<std::string_view> owners = {"a"sv,    "A"sv,  "aa"sv,  "a\0"sv, "\0a"sv, "\0"sv,
                                                "\0\0"sv, "a "sv, "a\n"sv, "b"sv,   "\xe1"sv};
  for (const std::string_view holder : owners) {
    const LockPtr lock(Lock::Make({Owner{holder}, kToken, kSince, kEnd}));
    const Place held{.lock = lock.get(), .plain = std::nullopt};
    const Place plain{.lock = nullptr, .plain = PlainLock{holder, kMaxInstant}};
    for (const std::string_view asker : owners) {
      const ReleaseRequest request{Owner{asker}};
      const Outcome expected = asker == holder ? Outcome::kReleased : Outcome::kHeldByOther;
      EXPECT_EQ(Decide(held, request, kSince).outcome, expected);
      EXPECT_EQ(Decide(plain, request, kSince).outcome, expected);
    }
  }
}

TEST(Lock, KeepsOwnersOf1To256AnyBytes) {
  for (size_t size = 1; size <= kMaxOwnerBytes; ++size) {
    std::string owner(size, '\0');
    for (size_t i = 0; i < size; ++i) owner[i] = static_cast<char>((i * 37 + size) & 0xff);
    const std::string copy = owner;
    const LockPtr lock(Lock::Make({Owner{owner}, kToken, kSince, kEnd}));
    owner.assign(size, '#');  // the lock has its own copy
    EXPECT_EQ(lock->hold(), (Hold{Owner{copy}, kToken, kSince, kEnd}));
    lock->Renew({Owner{copy}, kMaxToken, kMaxInstant, kMinInstant});
    EXPECT_EQ(lock->hold(), (Hold{Owner{copy}, kMaxToken, kMaxInstant, kMinInstant}));
  }
}

// --- Apply ------------------------------------------------------------------------------------

TEST(Apply, MakesALockWhereThereIsNone) {
  const LockPtr lock(Apply(nullptr, Held{kAnnsHold}));
  ASSERT_NE(lock, nullptr);
  EXPECT_EQ(lock->hold(), kAnnsHold);
}

TEST(Apply, ChangesTheLockOfTheSameOwnerWhereItIs) {
  const LockPtr lock(Lock::Make(kAnnsHold));
  const Hold renewed{.owner = kAnn,
                     .token = Token{kToken.value + 5},
                     .since = kSince + Millis{2},
                     .end = kEnd - Millis{7}};
  EXPECT_EQ(Apply(lock.get(), Held{renewed}), lock.get());
  EXPECT_EQ(lock->hold(), renewed);
}

// The fact that Decide gives for a renewal refers to the very lock that it is applied to.
TEST(Apply, TakesAFactWhoseOwnerIsInsideTheLock) {
  const LockPtr lock(Lock::Make(kAnnsHold));
  const Decision decision =
      Decide({.lock = lock.get(), .plain = std::nullopt}, TouchRequest{kAnn, kTick}, kEnd);
  EXPECT_EQ(Apply(lock.get(), std::get<Held>(*decision.change)), lock.get());
  EXPECT_EQ(lock->hold(), (Hold{kAnn, kToken, kSince, kEnd + kTick}));
}

TEST(Apply, PutsANewLockInTheOldOnesPlaceForAnotherOwner) {
  for (const std::string_view other : {"bob"sv, "an"sv, "annn"sv, "ANN"sv}) {
    const LockPtr old(Lock::Make(kAnnsHold));
    const Hold others{Owner{other}, Token{kToken.value + 1}, kEnd, kEnd + Millis{9}};
    Lock* const applied = Apply(old.get(), Held{others});
    ASSERT_NE(applied, old.get());
    const LockPtr stored(applied);
    EXPECT_EQ(stored->hold(), others);
    EXPECT_EQ(old->hold(), kAnnsHold);
  }
}

// A fact is obeyed, not judged: neither its time nor its token is compared with anything.
TEST(Apply, ObeysFactsThatGoBack) {
  const LockPtr lock(Lock::Make(kAnnsHold));
  const Hold older{kAnn, kMinToken, kMinInstant, kMinInstant};
  EXPECT_EQ(Apply(lock.get(), Held{older}), lock.get());
  EXPECT_EQ(lock->hold(), older);
}

// --- IsWellFormed -----------------------------------------------------------------------------

TEST(IsWellFormed, ChecksEveryField) {
  const std::string longest(kMaxOwnerBytes, 'o');
  const std::string too_long(kMaxOwnerBytes + 1, 'o');
  EXPECT_TRUE(IsWellFormed(kAnnsHold));
  EXPECT_TRUE(IsWellFormed({Owner{longest}, kMaxToken, kMaxInstant, kMaxInstant}));
  EXPECT_TRUE(IsWellFormed({Owner{"o"}, kMinToken, kMinInstant, kMinInstant}));
  EXPECT_TRUE(IsWellFormed({Owner{"o"}, kMinToken, kMaxInstant, kMinInstant}));
  EXPECT_FALSE(IsWellFormed({Owner{""}, kToken, kSince, kEnd}));
  EXPECT_FALSE(IsWellFormed({Owner{too_long}, kToken, kSince, kEnd}));
  EXPECT_FALSE(IsWellFormed({kAnn, Token{0}, kSince, kEnd}));
  EXPECT_FALSE(IsWellFormed({kAnn, Token{kMaxToken.value + 1}, kSince, kEnd}));
  EXPECT_FALSE(IsWellFormed({kAnn, kToken, kMinInstant - kTick, kEnd}));
  EXPECT_FALSE(IsWellFormed({kAnn, kToken, kMaxInstant + kTick, kEnd}));
  EXPECT_FALSE(IsWellFormed({kAnn, kToken, kSince, kMinInstant - kTick}));
  EXPECT_FALSE(IsWellFormed({kAnn, kToken, kSince, kMaxInstant + kTick}));
}

}  // namespace
}  // namespace turnstile
