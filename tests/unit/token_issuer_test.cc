// When a server issues tokens, its grace, and the floors that it replicates. Manual clocks.

#include "core/token_issuer.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>

#include "core/settings.h"
#include "core/token_clock.h"
#include "core/types.h"
#include "printers.h"

namespace turnstile {
namespace {

constexpr FineInstant kNow{Micros{1'700'000'000'123'000}};
constexpr Instant kMoment = ToInstant(kNow);
constexpr Millis kTick{1};
constexpr Micros kMicro{1};
constexpr Millis kSecond{1'000};
constexpr Millis kMargin{30'000};
constexpr Millis kGrace{5'000};
constexpr Millis kLate{10'000};

constexpr Token At(FineInstant time) {
  return Token{static_cast<uint64_t>(time.time_since_epoch().count())};
}
constexpr Token Above(Token token, uint64_t by = 1) { return Token{token.value + by}; }

class TokenIssuerTest : public testing::Test {
 protected:
  Settings settings_{.token_margin = kMargin, .failover_grace = kGrace};
  TokenIssuer tokens_{settings_};
};

TEST_F(TokenIssuerTest, FirstCallBeginsToIssue) {
  EXPECT_FALSE(tokens_.issuing());
  EXPECT_FALSE(tokens_.has_unannounced_start());
  EXPECT_EQ(tokens_.Issuing(kNow).reading(), At(kNow + kMargin));
  EXPECT_TRUE(tokens_.issuing());
  EXPECT_TRUE(tokens_.has_unannounced_start());
  EXPECT_TRUE(tokens_.TakeUnannouncedStart());
  EXPECT_FALSE(tokens_.TakeUnannouncedStart());
}

TEST_F(TokenIssuerTest, LaterCallsRaiseNothingAndFollowTheSettings) {
  tokens_.Issuing(kNow);
  tokens_.TakeUnannouncedStart();
  settings_.token_margin = Millis{7};
  const TokenClock& clock = tokens_.Issuing(kNow + kSecond);
  EXPECT_EQ(clock.reading(), At(kNow + kMargin));
  EXPECT_EQ(clock.margin(), Millis{7});
  EXPECT_FALSE(tokens_.has_unannounced_start());
}

TEST_F(TokenIssuerTest, StartIsAboveTheClocksOfOtherNodes) {
  const Token far = At(kNow + 3 * kMargin);
  tokens_.OnPeerClock({.last = far, .wall = At(kNow)}, kNow);
  EXPECT_GT(tokens_.Issuing(kNow).reading(), far);
}

TEST_F(TokenIssuerTest, GraceEndsWithItsLastMillisecond) {
  EXPECT_EQ(tokens_.GraceEnd(), std::nullopt);
  EXPECT_EQ(tokens_.GraceAt(kMoment), Grace::kOver);
  EXPECT_EQ(tokens_.GraceLeft(kMoment), Millis{0});
  tokens_.Issuing(kNow);
  EXPECT_EQ(tokens_.GraceEnd(), kMoment + kGrace);
  EXPECT_EQ(tokens_.GraceAt(kMoment), Grace::kOn);
  EXPECT_EQ(tokens_.GraceLeft(kMoment + kTick), kGrace - kTick);
  EXPECT_EQ(tokens_.GraceAt(kMoment + kGrace), Grace::kOn);
  EXPECT_EQ(tokens_.GraceLeft(kMoment + kGrace), Millis{0});
  EXPECT_EQ(tokens_.GraceAt(kMoment + kGrace + kTick), Grace::kOver);
  EXPECT_EQ(tokens_.GraceLeft(kMoment + kGrace + kTick), Millis{0});
}

TEST_F(TokenIssuerTest, WithoutGraceThereIsNoneAtAll) {
  settings_.failover_grace = Millis{0};
  tokens_.Issuing(kNow);
  EXPECT_EQ(tokens_.GraceEnd(), std::nullopt);
  EXPECT_EQ(tokens_.GraceAt(kMoment), Grace::kOver);
}

TEST_F(TokenIssuerTest, DemotedServerForgetsItsStart) {
  tokens_.Observe(At(kNow));
  tokens_.Issuing(kNow);
  ASSERT_TRUE(tokens_.has_floor_to_replicate());
  ASSERT_NE(tokens_.TakeFloorBefore(At(kNow + 2 * kMargin), kNow), std::nullopt);
  tokens_.StopIssuing();
  EXPECT_FALSE(tokens_.issuing());
  EXPECT_FALSE(tokens_.has_floor_to_replicate());
  EXPECT_EQ(tokens_.TakeFloorToReplicate(kNow), std::nullopt);
  EXPECT_EQ(tokens_.GraceEnd(), std::nullopt);
  EXPECT_EQ(tokens_.clock().reading(), At(kNow));
  // The next start replicates its floor however soon it comes.
  tokens_.Issuing(kNow);
  EXPECT_NE(tokens_.TakeFloorBefore(At(kNow + 2 * kMargin), kNow), std::nullopt);
}

TEST_F(TokenIssuerTest, FloorOfAStartIsReplicatedAtOnceIfAnyLockWasKnown) {
  tokens_.Observe(At(kNow));
  tokens_.Issuing(kNow);
  EXPECT_TRUE(tokens_.has_floor_to_replicate());
  EXPECT_EQ(tokens_.TakeFloorToReplicate(kNow), At(kNow + kMargin));
  EXPECT_FALSE(tokens_.has_floor_to_replicate());
  EXPECT_EQ(tokens_.TakeFloorToReplicate(kNow), std::nullopt);
  // Others know it: it is the clock's own, and no grant replicates it again.
  EXPECT_EQ(tokens_.clock().last(), At(kNow + kMargin));
  EXPECT_EQ(tokens_.TakeFloorBefore(At(kNow + 2 * kMargin), kNow), std::nullopt);
}

TEST_F(TokenIssuerTest, ServerThatKnowsNoLockReplicatesItsFloorWithTheFirstGrant) {
  const Token first = Above(tokens_.Issuing(kNow).reading());
  EXPECT_FALSE(tokens_.has_floor_to_replicate());
  EXPECT_EQ(tokens_.ToSave(kNow), std::nullopt);
  EXPECT_EQ(tokens_.TakeFloorBefore(first, kNow), At(kNow + kMargin));
}

TEST_F(TokenIssuerTest, FloorThatTheWallClockHasReachedIsNotReplicated) {
  tokens_.Observe(At(kNow));
  const Token floor = tokens_.Issuing(kNow).reading();
  EXPECT_EQ(tokens_.ToSave(kNow + kMargin - kMicro), floor);
  EXPECT_EQ(tokens_.ToSave(kNow + kMargin), std::nullopt);
  EXPECT_EQ(tokens_.TakeFloorBefore(Above(floor), kNow + kMargin), std::nullopt);
  EXPECT_EQ(tokens_.TakeFloorBefore(Above(floor), kNow + kMargin - kMicro), floor);
}

TEST_F(TokenIssuerTest, GrantsReplicateOneFloorPerSecond) {
  const Token above = At(kNow + 2 * kMargin);
  tokens_.Issuing(kNow);
  EXPECT_NE(tokens_.TakeFloorBefore(above, kNow), std::nullopt);
  EXPECT_EQ(tokens_.TakeFloorBefore(above, kNow), std::nullopt);
  EXPECT_EQ(tokens_.TakeFloorBefore(above, kNow + kSecond - kMicro), std::nullopt);
  EXPECT_NE(tokens_.TakeFloorBefore(above, kNow + kSecond), std::nullopt);
  // Of a wall clock that was set back nobody knows how long ago that was.
  EXPECT_NE(tokens_.TakeFloorBefore(above, kNow + kSecond - kMicro), std::nullopt);
}

TEST_F(TokenIssuerTest, CopyOfTheDataGetsTheFloorOnlyIfTheClockLeads) {
  tokens_.Observe(At(kNow));
  tokens_.ReplicateFloorSoon(kNow - kSecond);  // a replica replicates nothing
  EXPECT_FALSE(tokens_.has_floor_to_replicate());
  tokens_.Issuing(kNow);
  tokens_.TakeFloorToReplicate(kNow);
  tokens_.ReplicateFloorSoon(kNow + kMargin);
  EXPECT_FALSE(tokens_.has_floor_to_replicate());
  tokens_.ReplicateFloorSoon(kNow + kMargin - kMicro);
  EXPECT_TRUE(tokens_.has_floor_to_replicate());
  EXPECT_EQ(tokens_.TakeFloorToReplicate(kNow + kMargin), std::nullopt);
}

TEST_F(TokenIssuerTest, SlotsThatArriveRaiseAClockThatIssues) {
  tokens_.OnSlotsArrived(kNow);
  EXPECT_EQ(tokens_.clock().reading(), Token{});
  tokens_.Issuing(kNow);
  settings_.token_margin = 2 * kMargin;
  tokens_.OnSlotsArrived(kNow);
  EXPECT_EQ(tokens_.clock().margin(), 2 * kMargin);
  EXPECT_EQ(tokens_.clock().reading(), At(kNow + 2 * kMargin));
}

TEST_F(TokenIssuerTest, SlotsThatArriveAreAboveTheClocksOfOtherNodes) {
  const Token far = At(kNow + 3 * kMargin);
  tokens_.Issuing(kNow);
  tokens_.OnPeerClock({.last = far, .wall = At(kNow)}, kNow);
  EXPECT_EQ(tokens_.clock().reading(), At(kNow + kMargin));
  tokens_.OnSlotsArrived(kNow);
  EXPECT_GT(tokens_.clock().reading(), far);
}

TEST_F(TokenIssuerTest, ClockOfAnotherNodeCountsForTenSecondsAfterSlotsArrived) {
  const Token far = At(kNow + 3 * kMargin);
  const auto hears = [&](FineInstant when) {
    const Token before = tokens_.clock().reading();
    tokens_.OnPeerClock({.last = Above(before), .wall = At(kNow)}, when);
    return tokens_.clock().reading() == Above(before);
  };
  tokens_.Issuing(kNow);
  tokens_.OnPeerClock({.last = far, .wall = At(kNow)}, kNow);
  EXPECT_LT(tokens_.clock().reading(), far) << "no slot has arrived";
  tokens_.OnSlotsArrived(kNow);
  EXPECT_TRUE(hears(kNow));
  EXPECT_TRUE(hears(kNow + kLate - kMicro));
  EXPECT_FALSE(hears(kNow + kLate));
  EXPECT_FALSE(hears(kNow - kMicro)) << "the wall clock was set back";
}

TEST_F(TokenIssuerTest, ClockOfAnotherNodeDoesNotRaiseAReplicas) {
  tokens_.OnSlotsArrived(kNow);
  tokens_.OnPeerClock({.last = At(kNow), .wall = At(kNow)}, kNow);
  EXPECT_EQ(tokens_.clock().reading(), Token{});
}

TEST_F(TokenIssuerTest, ReadingsTooFarAheadAreIgnored) {
  const Token most = At(kNow + kLargestAdoptedLead);
  tokens_.Issuing(kNow);
  tokens_.OnSlotsArrived(kNow);
  const Token before = tokens_.clock().reading();
  tokens_.OnPeerClock({.last = Above(most), .wall = At(kNow)}, kNow);
  tokens_.OnPeerClock({.last = At(kNow), .wall = Above(most)}, kNow);
  tokens_.OnSlotsArrived(kNow);
  EXPECT_EQ(tokens_.clock().reading(), before);
  tokens_.OnPeerClock({.last = most, .wall = most}, kNow);
  EXPECT_EQ(tokens_.clock().reading(), most);
}

}  // namespace
}  // namespace turnstile
