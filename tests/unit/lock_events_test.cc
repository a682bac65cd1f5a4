// Which events a fact leads to.

#include "core/lock_events.h"

#include <gtest/gtest.h>

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/decide.h"
#include "printers.h"

namespace turnstile {
namespace {

using LockPtr = std::unique_ptr<Lock>;
using Losses = std::vector<std::pair<std::string, Loss>>;  // whose hold, and why it ended

constexpr Owner kAnn{"ann"};
constexpr Owner kBob{"bob"};
constexpr Owner kCat{"cat"};
constexpr Instant kThen{Millis{1'700'000'000'000}};
constexpr Millis kLease{30'000};
constexpr Instant kEnd = kThen + kLease;
constexpr Instant kLater = kEnd + Millis{1};

Hold HoldOf(Owner owner, uint64_t token, Instant since = kThen) {
  return {.owner = owner, .token = Token{token}, .since = since, .end = since + kLease};
}

LockPtr LockOf(Mode mode, const std::vector<Hold>& holds) {
  return LockPtr(Lock::Make(mode, holds));
}

Losses Owners(const std::vector<LostHold>& lost) {
  Losses losses;
  for (const LostHold& one : lost) losses.emplace_back(one.hold.owner.bytes, one.how);
  return losses;
}

void ExpectEvent(const LockPtr& lock, const HoldSet& held, std::optional<LockEvent> event,
                 const Losses& lost = {}, std::optional<Instant> now = std::nullopt) {
  const HoldSetEvents result = EventsOf(lock.get(), held, now);
  EXPECT_EQ(result.event, event);
  EXPECT_EQ(Owners(result.lost), lost);
}

TEST(EventsOf, FirstHoldIsAcquired) {
  for (const Mode mode : {Mode::kExclusive, Mode::kShared, Mode::kLimit}) {
    ExpectEvent(nullptr, {mode, HoldOf(kAnn, 5)}, LockEvent::kAcquired);
  }
}

TEST(EventsOf, AdditionalHoldIsAcquired) {
  for (const Mode mode : {Mode::kShared, Mode::kLimit}) {
    ExpectEvent(LockOf(mode, {HoldOf(kAnn, 5)}), {mode, HoldOf(kBob, 6)}, LockEvent::kAcquired);
    // Ended holds of other owners are removed by facts of their own.
    ExpectEvent(LockOf(mode, {HoldOf(kAnn, 5), HoldOf(kCat, 6)}), {mode, HoldOf(kBob, 7, kLater)},
                LockEvent::kAcquired);
  }
}

TEST(EventsOf, ReacquireIsTouched) {
  const LockPtr lock = LockOf(Mode::kExclusive, {HoldOf(kAnn, 5)});
  Hold renewed = HoldOf(kAnn, 5);
  renewed.end += Millis{1};
  ExpectEvent(lock, {Mode::kExclusive, renewed}, LockEvent::kTouched);
  Hold counted = HoldOf(kAnn, 5);
  counted.count = 2;
  ExpectEvent(lock, {Mode::kExclusive, counted}, LockEvent::kTouched);
  ExpectEvent(lock, {Mode::kShared, HoldOf(kAnn, 5)}, LockEvent::kTouched);
}

// The TTL of a key is reverted by repeating the fact about its hold.
TEST(EventsOf, UnchangedHoldIsNoNews) {
  for (const Mode mode : {Mode::kExclusive, Mode::kShared, Mode::kLimit}) {
    ExpectEvent(LockOf(mode, {HoldOf(kAnn, 5)}), {mode, HoldOf(kAnn, 5)}, std::nullopt);
  }
}

TEST(EventsOf, NewTokenIsAcquired) {
  const LockPtr shared = LockOf(Mode::kShared, {HoldOf(kAnn, 5)});
  ExpectEvent(shared, {Mode::kExclusive, HoldOf(kAnn, 6, kEnd)},
              LockEvent::kAcquired);  // an upgrade
  Hold raised = HoldOf(kAnn, 9);      // by FLOOR: `since` is unchanged
  ExpectEvent(LockOf(Mode::kExclusive, {HoldOf(kAnn, 5)}), {Mode::kExclusive, raised},
              LockEvent::kAcquired);
}

TEST(EventsOf, NewHoldReportsReplacedHoldsAsExpired) {
  ExpectEvent(LockOf(Mode::kExclusive, {HoldOf(kAnn, 5)}),
              {Mode::kExclusive, HoldOf(kBob, 6, kLater)}, LockEvent::kAcquired,
              {{"ann", Loss::kExpired}});
  ExpectEvent(LockOf(Mode::kShared, {HoldOf(kAnn, 5), HoldOf(kBob, 6)}),
              {Mode::kExclusive, HoldOf(kCat, 7, kLater)}, LockEvent::kAcquired,
              {{"ann", Loss::kExpired}, {"bob", Loss::kExpired}});
  // Also the owner itself, whose hold has ended.
  ExpectEvent(LockOf(Mode::kExclusive, {HoldOf(kAnn, 5)}),
              {Mode::kExclusive, HoldOf(kAnn, 6, kLater)}, LockEvent::kAcquired,
              {{"ann", Loss::kExpired}});
  ExpectEvent(LockOf(Mode::kShared, {HoldOf(kAnn, 5), HoldOf(kBob, 6, kLater)}),
              {Mode::kShared, HoldOf(kAnn, 7, kLater)}, LockEvent::kAcquired,
              {{"ann", Loss::kExpired}});
}

// After the clock was set back, the times of the holds do not tell a hold that goes on from one
// that ended, lingered, and was granted anew in the millisecond of its first grant.
TEST(EventsOf, TimeOfDecisionTellsWhetherHoldHadEnded) {
  Hold ended = HoldOf(kAnn, 5);
  ended.linger = Millis{1000};
  ended.end = kThen - Millis{1};
  const LockPtr lock = LockOf(Mode::kExclusive, {ended});
  const HoldSet anew{Mode::kExclusive, HoldOf(kAnn, 6)};
  ExpectEvent(lock, anew, LockEvent::kAcquired, {{"ann", Loss::kExpired}}, kThen);
  ExpectEvent(lock, anew, LockEvent::kAcquired, {}, kThen - Millis{1});
  ExpectEvent(lock, anew, LockEvent::kAcquired, {});
}

TEST(EventsOf, RevertedUpgradeIsLostAsUndelivered) {
  ExpectEvent(LockOf(Mode::kExclusive, {HoldOf(kAnn, 6)}), {Mode::kShared, HoldOf(kAnn, 5)},
              std::nullopt, {{"ann", Loss::kUndelivered}});
}

// When a session ends the hold is lost at once, and never a second time.
TEST(EventsOf, SessionHoldIsLostOnceDespiteLinger) {
  Hold lingering = HoldOf(kAnn, 5);
  lingering.linger = Millis{1000};
  const LockPtr lock = LockOf(Mode::kExclusive, {lingering});
  const std::array owners = {kAnn, kBob};
  EXPECT_EQ(Owners(HoldsLostWith(*lock, SessionsEnded{kThen, owners})),
            (Losses{{"ann", Loss::kSession}}));

  const HoldSet ended{Mode::kExclusive, AfterSession(lingering, kThen)};
  const LockPtr after = LockOf(Mode::kExclusive, {ended.hold});
  EXPECT_EQ(Owners(HoldsLostWith(*after, SessionsEnded{kThen, owners})), Losses{});
  EXPECT_EQ(Owners(HoldsLostWith(*after, HoldsExpired{kMaxInstant})), Losses{});
  ExpectEvent(after, ended, std::nullopt);
  ExpectEvent(after, {Mode::kExclusive, HoldOf(kBob, 6, kLater)}, LockEvent::kAcquired);
  ExpectEvent(after, {Mode::kExclusive, HoldOf(kAnn, 6)}, LockEvent::kAcquired);
  EXPECT_EQ(Owners(HoldsLostWith(*after, Loss::kForced, kThen)), Losses{});
  EXPECT_EQ(Owners(HoldsLostWith(ended.hold, Loss::kExpired)), Losses{});
}

TEST(HoldsLostWith, RemovedHoldIsLostForGivenReason) {
  for (const Loss how : {Loss::kExpired, Loss::kSession, Loss::kUndelivered}) {
    EXPECT_EQ(Owners(HoldsLostWith(HoldOf(kAnn, 5), how)), (Losses{{"ann", how}}));
  }
}

TEST(HoldsLostWith, ReportsEveryExpiredHold) {
  const LockPtr lock = LockOf(Mode::kShared, {HoldOf(kAnn, 5), HoldOf(kBob, 6, kThen - kLease)});
  EXPECT_EQ(Owners(HoldsLostWith(*lock, HoldsExpired{kThen})), Losses{});
  EXPECT_EQ(Owners(HoldsLostWith(*lock, HoldsExpired{kEnd})), (Losses{{"bob", Loss::kExpired}}));
  EXPECT_EQ(Owners(HoldsLostWith(*lock, HoldsExpired{kLater})),
            (Losses{{"bob", Loss::kExpired}, {"ann", Loss::kExpired}}));
}

TEST(HoldsLostWith, ReportsEveryLiveHoldOfEndedSessions) {
  const LockPtr lock = LockOf(Mode::kShared, {HoldOf(kAnn, 5), HoldOf(kBob, 6, kThen - kLease)});
  const std::array owners = {kCat, kBob, kAnn};
  EXPECT_EQ(Owners(HoldsLostWith(*lock, SessionsEnded{kThen, owners})),
            (Losses{{"bob", Loss::kSession}, {"ann", Loss::kSession}}));
  EXPECT_EQ(Owners(HoldsLostWith(*lock, SessionsEnded{kEnd, owners})),
            (Losses{{"ann", Loss::kSession}}));
}

TEST(HoldsLostWith, RemovedLockReportsLiveAndExpiredHolds) {
  const LockPtr lock = LockOf(Mode::kShared, {HoldOf(kAnn, 5), HoldOf(kBob, 6, kThen - kLease)});
  for (const Loss how : {Loss::kForced, Loss::kEvicted}) {
    EXPECT_EQ(Owners(HoldsLostWith(*lock, how, kThen)), (Losses{{"ann", how}, {"bob", how}}));
    EXPECT_EQ(Owners(HoldsLostWith(*lock, how, kEnd)),
              (Losses{{"ann", how}, {"bob", Loss::kExpired}}));
    EXPECT_EQ(Owners(HoldsLostWith(*lock, how, kLater)),
              (Losses{{"ann", Loss::kExpired}, {"bob", Loss::kExpired}}));
  }
}

}  // namespace
}  // namespace turnstile
