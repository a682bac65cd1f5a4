// What those who watch a lock are told of a fact.

#include "core/news.h"

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
using Losses = std::vector<std::pair<std::string, Loss>>;  // whose hold, and why it is over

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

Losses Owners(const std::vector<Lost>& lost) {
  Losses losses;
  for (const Lost& one : lost) losses.emplace_back(one.hold.owner.bytes, one.how);
  return losses;
}

void ExpectNews(const LockPtr& lock, const Held& held, News news, const Losses& lost = {}) {
  const HeldNews told = NewsOf(lock.get(), held);
  EXPECT_EQ(static_cast<int>(told.news), static_cast<int>(news));
  EXPECT_EQ(Owners(told.lost), lost);
}

TEST(NewsOf, TheFirstHold) {
  for (const Mode mode : {Mode::kExclusive, Mode::kShared, Mode::kLimit}) {
    ExpectNews(nullptr, {mode, HoldOf(kAnn, 5)}, News::kAcquired);
  }
}

TEST(NewsOf, OneMoreHold) {
  for (const Mode mode : {Mode::kShared, Mode::kLimit}) {
    ExpectNews(LockOf(mode, {HoldOf(kAnn, 5)}), {mode, HoldOf(kBob, 6)}, News::kAcquired);
    // Those that have ended beside it are told by facts of their own.
    ExpectNews(LockOf(mode, {HoldOf(kAnn, 5), HoldOf(kCat, 6)}), {mode, HoldOf(kBob, 7, kLater)},
               News::kAcquired);
  }
}

TEST(NewsOf, AskingAgainTouches) {
  const LockPtr lock = LockOf(Mode::kExclusive, {HoldOf(kAnn, 5)});
  Hold renewed = HoldOf(kAnn, 5);
  renewed.end += Millis{1};
  ExpectNews(lock, {Mode::kExclusive, renewed}, News::kTouched);
  Hold counted = HoldOf(kAnn, 5);
  counted.count = 2;
  ExpectNews(lock, {Mode::kExclusive, counted}, News::kTouched);
  ExpectNews(lock, {Mode::kShared, HoldOf(kAnn, 5)}, News::kTouched);
}

// The TTL of a key is set back by telling the same hold once more.
TEST(NewsOf, TheSameHoldIsNoNews) {
  for (const Mode mode : {Mode::kExclusive, Mode::kShared, Mode::kLimit}) {
    ExpectNews(LockOf(mode, {HoldOf(kAnn, 5)}), {mode, HoldOf(kAnn, 5)}, News::kNone);
  }
}

TEST(NewsOf, ANewTokenIsANewHold) {
  const LockPtr shared = LockOf(Mode::kShared, {HoldOf(kAnn, 5)});
  ExpectNews(shared, {Mode::kExclusive, HoldOf(kAnn, 6, kEnd)}, News::kAcquired);  // an upgrade
  Hold raised = HoldOf(kAnn, 9);  // by FLOOR: since then, as before
  ExpectNews(LockOf(Mode::kExclusive, {HoldOf(kAnn, 5)}), {Mode::kExclusive, raised},
             News::kAcquired);
}

TEST(NewsOf, WhoComesAfterTheEndTellsOfIt) {
  ExpectNews(LockOf(Mode::kExclusive, {HoldOf(kAnn, 5)}),
             {Mode::kExclusive, HoldOf(kBob, 6, kLater)}, News::kAcquired,
             {{"ann", Loss::kExpired}});
  ExpectNews(LockOf(Mode::kShared, {HoldOf(kAnn, 5), HoldOf(kBob, 6)}),
             {Mode::kExclusive, HoldOf(kCat, 7, kLater)}, News::kAcquired,
             {{"ann", Loss::kExpired}, {"bob", Loss::kExpired}});
  // Also the owner itself, which is a stranger then.
  ExpectNews(LockOf(Mode::kExclusive, {HoldOf(kAnn, 5)}),
             {Mode::kExclusive, HoldOf(kAnn, 6, kLater)}, News::kAcquired,
             {{"ann", Loss::kExpired}});
  ExpectNews(LockOf(Mode::kShared, {HoldOf(kAnn, 5), HoldOf(kBob, 6, kLater)}),
             {Mode::kShared, HoldOf(kAnn, 7, kLater)}, News::kAcquired, {{"ann", Loss::kExpired}});
}

TEST(NewsOf, AnUpgradeThatIsTakenBack) {
  ExpectNews(LockOf(Mode::kExclusive, {HoldOf(kAnn, 6)}), {Mode::kShared, HoldOf(kAnn, 5)},
             News::kNone, {{"ann", Loss::kUndelivered}});
}

// A session that closes: the hold is lost at once, and never a second time.
TEST(NewsOf, ASessionThatLingers) {
  Hold lingering = HoldOf(kAnn, 5);
  lingering.linger = Millis{1000};
  const LockPtr lock = LockOf(Mode::kExclusive, {lingering});
  const std::array owners = {kAnn, kBob};
  EXPECT_EQ(Owners(LostWith(*lock, SessionsEnded{kThen, owners})),
            (Losses{{"ann", Loss::kSession}}));

  const Held ended{Mode::kExclusive, AfterSession(lingering, kThen)};
  const LockPtr after = LockOf(Mode::kExclusive, {ended.hold});
  EXPECT_EQ(Owners(LostWith(*after, SessionsEnded{kThen, owners})), Losses{});
  EXPECT_EQ(Owners(LostWith(*after, Expired{kMaxInstant})), Losses{});
  ExpectNews(after, ended, News::kNone);
  ExpectNews(after, {Mode::kExclusive, HoldOf(kBob, 6, kLater)}, News::kAcquired);
  ExpectNews(after, {Mode::kExclusive, HoldOf(kAnn, 6)}, News::kAcquired);
  EXPECT_EQ(Owners(LostWith(*after, Loss::kForced, kThen)), Losses{});
  EXPECT_EQ(Owners(LostWith(ended.hold, Loss::kExpired)), Losses{});
}

TEST(LostWith, AHoldThatIsRemoved) {
  for (const Loss how : {Loss::kExpired, Loss::kSession, Loss::kUndelivered}) {
    EXPECT_EQ(Owners(LostWith(HoldOf(kAnn, 5), how)), (Losses{{"ann", how}}));
  }
}

TEST(LostWith, EveryHoldThatIsRemovedAsExpired) {
  const LockPtr lock = LockOf(Mode::kShared, {HoldOf(kAnn, 5), HoldOf(kBob, 6, kThen - kLease)});
  EXPECT_EQ(Owners(LostWith(*lock, Expired{kThen})), Losses{});
  EXPECT_EQ(Owners(LostWith(*lock, Expired{kEnd})), (Losses{{"bob", Loss::kExpired}}));
  EXPECT_EQ(Owners(LostWith(*lock, Expired{kLater})),
            (Losses{{"bob", Loss::kExpired}, {"ann", Loss::kExpired}}));
}

TEST(LostWith, EveryHoldWhoseSessionEnded) {
  const LockPtr lock = LockOf(Mode::kShared, {HoldOf(kAnn, 5), HoldOf(kBob, 6, kThen - kLease)});
  const std::array owners = {kCat, kBob, kAnn};
  EXPECT_EQ(Owners(LostWith(*lock, SessionsEnded{kThen, owners})),
            (Losses{{"bob", Loss::kSession}, {"ann", Loss::kSession}}));
  EXPECT_EQ(Owners(LostWith(*lock, SessionsEnded{kEnd, owners})),
            (Losses{{"ann", Loss::kSession}}));
}

TEST(LostWith, ALockThatSomebodyRemoves) {
  const LockPtr lock = LockOf(Mode::kShared, {HoldOf(kAnn, 5), HoldOf(kBob, 6, kThen - kLease)});
  for (const Loss how : {Loss::kForced, Loss::kEvicted}) {
    EXPECT_EQ(Owners(LostWith(*lock, how, kThen)), (Losses{{"ann", how}, {"bob", how}}));
    EXPECT_EQ(Owners(LostWith(*lock, how, kEnd)), (Losses{{"ann", how}, {"bob", Loss::kExpired}}));
    EXPECT_EQ(Owners(LostWith(*lock, how, kLater)),
              (Losses{{"ann", Loss::kExpired}, {"bob", Loss::kExpired}}));
  }
}

}  // namespace
}  // namespace turnstile
