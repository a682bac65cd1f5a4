// The token clock with a manual wall clock. Instants are in microseconds, as tokens are.

#include "core/token_clock.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>

#include "printers.h"

namespace turnstile {
namespace {

constexpr uint64_t kNow = 1'700'000'000'123'456;
constexpr uint64_t kLast = (uint64_t{1} << 53) - 1;
constexpr uint64_t kSecond = 1'000'000;
constexpr uint64_t kTenMinutes = 600 * kSecond;
constexpr Millis kMargin = std::chrono::seconds{30};

constexpr FineInstant At(int64_t micros) { return FineInstant{Micros{micros}}; }
constexpr FineInstant At(uint64_t micros) { return At(static_cast<int64_t>(micros)); }

constexpr FineInstant kBigBang = FineInstant::min();
constexpr FineInstant kEndOfTime = FineInstant::max();

TokenClock ClockAt(uint64_t last) {
  TokenClock clock;
  clock.Observe(Token{last});
  return clock;
}

// Issues a token as a server does: takes the next one and observes it.
uint64_t Issue(TokenClock& clock, FineInstant now) {
  const std::optional<Token> token = clock.Next(now);
  if (!token.has_value()) return 0;
  clock.Observe(*token);
  return token->value;
}

TEST(TokenClock, StartsAtZero) {
  const TokenClock clock;
  EXPECT_EQ(clock.last(), Token{0});
  EXPECT_EQ(clock.LeadAt(At(kNow)), Micros{0});
}

TEST(TokenClock, TokenIsWallClockInMicroseconds) {
  TokenClock clock;
  EXPECT_EQ(Issue(clock, At(kNow)), kNow);
  EXPECT_EQ(Issue(clock, At(kNow + 5)), kNow + 5);
  EXPECT_EQ(Issue(clock, At(kNow + kSecond)), kNow + kSecond);
}

TEST(TokenClock, TokenIsAtLeastOneMoreThanLast) {
  TokenClock clock;
  EXPECT_EQ(Issue(clock, At(kNow)), kNow);
  EXPECT_EQ(Issue(clock, At(kNow)), kNow + 1);
  EXPECT_EQ(Issue(clock, At(kNow)), kNow + 2);
  EXPECT_EQ(Issue(clock, At(kNow + 2)), kNow + 3);  // the wall clock equals the last token
  EXPECT_EQ(Issue(clock, At(kNow + 4)), kNow + 4);  // both rules agree
  EXPECT_EQ(Issue(clock, At(kNow + 6)), kNow + 6);
}

TEST(TokenClock, TokensRiseWhenWallClockStepsBack) {
  TokenClock clock;
  EXPECT_EQ(Issue(clock, At(kNow)), kNow);
  EXPECT_EQ(Issue(clock, At(kNow - 3600 * kSecond)), kNow + 1);
  EXPECT_EQ(Issue(clock, At(uint64_t{0})), kNow + 2);
  EXPECT_EQ(Issue(clock, kBigBang), kNow + 3);
  EXPECT_EQ(Issue(clock, At(kNow + 3)), kNow + 4);
  EXPECT_EQ(Issue(clock, At(kNow + 100)), kNow + 100);
}

TEST(TokenClock, NextDoesNotAdvanceClock) {
  const TokenClock clock = ClockAt(kNow);
  EXPECT_EQ(clock.Next(At(kNow)), Token{kNow + 1});
  EXPECT_EQ(clock.Next(At(kNow)), Token{kNow + 1});
  EXPECT_EQ(clock.last(), Token{kNow});
}

TEST(TokenClock, TokensRiseForAnyWallClock) {
  constexpr uint64_t kSeed = 4711;
  SCOPED_TRACE(kSeed);
  std::mt19937_64 random(kSeed);
  TokenClock clock;
  uint64_t previous = 0;
  int64_t now = static_cast<int64_t>(kNow);
  for (int i = 0; i < 20'000; ++i) {
    now += static_cast<int64_t>(random() % 2'000) - 900;
    const uint64_t token = Issue(clock, At(now));
    ASSERT_GT(token, previous);
    ASSERT_GE(token, static_cast<uint64_t>(now));
    previous = token;
  }
}

TEST(TokenClock, ObserveNeverLowersClock) {
  TokenClock clock;
  clock.Observe(Token{kNow});
  EXPECT_EQ(clock.last(), Token{kNow});
  clock.Observe(Token{kNow - 1});
  EXPECT_EQ(clock.last(), Token{kNow});
  clock.Observe(Token{0});
  EXPECT_EQ(clock.last(), Token{kNow});
  clock.Observe(Token{kNow + 7});
  EXPECT_EQ(clock.last(), Token{kNow + 7});
  EXPECT_EQ(clock.Next(At(kNow)), Token{kNow + 8});
}

TEST(TokenClock, ObserveStopsAtLastToken) {
  for (const uint64_t token : {kLast, kLast + 1, std::numeric_limits<uint64_t>::max()}) {
    EXPECT_EQ(ClockAt(token).last(), kMaxToken);
  }
}

TEST(TokenClock, WallClockBefore1970CountsAsZero) {
  for (const FineInstant now : {At(int64_t{0}), At(int64_t{-1}), At(int64_t{-123'456}), kBigBang}) {
    const TokenClock clock;
    EXPECT_EQ(clock.Next(now), kMinToken);  // never zero
    EXPECT_EQ(clock.LeadAt(now), Micros{0});
    EXPECT_EQ(ClockAt(5).Next(now), Token{6});
    EXPECT_EQ(ClockAt(5).LeadAt(now), Micros{5});
    TokenClock started;
    EXPECT_EQ(started.StartIssuing(now, kMargin), Token{30 * kSecond});
  }
  EXPECT_EQ(TokenClock().Next(At(int64_t{1})), Token{1});
  EXPECT_EQ(TokenClock().Next(At(int64_t{2})), Token{2});
}

TEST(TokenClock, RefusesToIssueBeyondLastToken) {
  // The token clock alone reaches its end.
  TokenClock clock = ClockAt(kLast - 2);
  EXPECT_EQ(Issue(clock, At(kNow)), kLast - 1);
  EXPECT_EQ(Issue(clock, At(kNow)), kLast);
  EXPECT_EQ(clock.Next(At(kNow)), std::nullopt);
  EXPECT_EQ(clock.Next(kBigBang), std::nullopt);
  EXPECT_EQ(clock.Next(kEndOfTime), std::nullopt);
  EXPECT_EQ(clock.last(), kMaxToken);
  // The wall clock alone does.
  EXPECT_EQ(TokenClock().Next(At(kLast - 1)), Token{kLast - 1});
  EXPECT_EQ(TokenClock().Next(At(kLast)), Token{kLast});
  EXPECT_EQ(TokenClock().Next(At(kLast + 1)), std::nullopt);
  EXPECT_EQ(TokenClock().Next(At(kLast + 2)), std::nullopt);
  EXPECT_EQ(TokenClock().Next(kEndOfTime), std::nullopt);
  // A wall clock that was wrong for a while does no harm if nothing was issued.
  EXPECT_EQ(ClockAt(kNow).Next(At(kNow + 9)), Token{kNow + 9});
}

// --- Starting to issue -------------------------------------------------------------------------

TEST(TokenClock, StartRaisesFloorByMarginOrThreeSeconds) {
  struct Case {
    uint64_t last;
    uint64_t floor;
  };
  for (const auto& [last, floor] :
       {Case{0, kNow + 30 * kSecond}, Case{kNow - 5, kNow + 30 * kSecond},
        Case{kNow + 27 * kSecond, kNow + 30 * kSecond},
        Case{kNow + 27 * kSecond + 1, kNow + 30 * kSecond + 1},
        Case{kNow + 60 * kSecond, kNow + 63 * kSecond},
        Case{kNow + kTenMinutes, kNow + kTenMinutes + 3 * kSecond},
        Case{kNow + 48 * kTenMinutes, kNow + 48 * kTenMinutes + 3 * kSecond}}) {
    SCOPED_TRACE(last);
    TokenClock clock = ClockAt(last);
    EXPECT_EQ(clock.StartIssuing(At(kNow), kMargin), Token{floor});
    EXPECT_EQ(clock.reading(), Token{floor});
    EXPECT_EQ(clock.last(), Token{last}) << "a floor is no token";
    EXPECT_EQ(clock.Next(At(kNow)), Token{floor + 1});
  }
}

TEST(TokenClock, StartWithoutMarginUsesWallClockOrThreeSecondsMore) {
  TokenClock empty;
  EXPECT_EQ(empty.StartIssuing(At(kNow), Millis{0}), Token{kNow});
  EXPECT_EQ(empty.Next(At(kNow)), Token{kNow + 1});
  TokenClock ahead = ClockAt(kNow + 5);
  EXPECT_EQ(ahead.StartIssuing(At(kNow), Millis{0}), Token{kNow + 5 + 3 * kSecond});
}

TEST(TokenClock, RepeatedStartsAddThreeSecondsEach) {
  TokenClock clock;
  clock.StartIssuing(At(kNow), kMargin);
  EXPECT_EQ(Issue(clock, At(kNow)), kNow + 30 * kSecond + 1);
  for (int i = 0; i < 30; ++i) {
    const uint64_t before = clock.last().value;
    clock.StartIssuing(At(kNow), kMargin);
    EXPECT_EQ(Issue(clock, At(kNow)), before + 3 * kSecond + 1);
  }
  // Without grants, repeated starts do not add up.
  for (int i = 0; i < 30; ++i) {
    const uint64_t before = clock.last().value;
    EXPECT_EQ(clock.StartIssuing(At(kNow), kMargin), Token{before + 3 * kSecond});
  }
}

TEST(TokenClock, OnlyFirstGrantPassesFloor) {
  TokenClock clock = ClockAt(kNow);
  EXPECT_EQ(clock.FloorPassedBy(Token{kNow + 1}), std::nullopt) << "none was noted";
  clock.StartIssuing(At(kNow), kMargin);
  const Token floor = clock.reading();
  EXPECT_EQ(clock.FloorPassedBy(Token{kNow}), std::nullopt) << "a holder that reacquires";
  EXPECT_EQ(clock.FloorPassedBy(floor), std::nullopt);
  EXPECT_EQ(clock.FloorPassedBy(*clock.Next(At(kNow))), floor);
  Issue(clock, At(kNow));
  EXPECT_EQ(clock.FloorPassedBy(*clock.Next(At(kNow))), std::nullopt) << "only the first does";
}

TEST(TokenClock, DemotionDiscardsFloor) {
  TokenClock clock = ClockAt(kNow);
  clock.StartIssuing(At(kNow), kMargin);
  EXPECT_EQ(clock.LeadAt(At(kNow)), kMargin);
  clock.ForgetFloor();
  EXPECT_EQ(clock.reading(), Token{kNow});
  EXPECT_EQ(clock.LeadAt(At(kNow)), Micros{0});
}

// "As long as clock skew plus the lead of the tokens that were lost stays under the margin."
TEST(TokenClock, MarginCoversLostTokens) {
  for (const uint64_t lost_lead : {uint64_t{0}, uint64_t{1}, 29 * kSecond, 30 * kSecond}) {
    TokenClock forgetful;
    forgetful.StartIssuing(At(kNow), kMargin);
    EXPECT_GT(forgetful.Next(At(kNow))->value, kNow + lost_lead);
  }
}

TEST(TokenClock, StartStopsAtLastToken) {
  for (const uint64_t last : {kLast - 30 * kSecond + 1, kLast - 3 * kSecond, kLast - 1, kLast}) {
    TokenClock near = ClockAt(last);
    EXPECT_EQ(near.StartIssuing(At(last), kMargin), kMaxToken);
    EXPECT_EQ(near.Next(At(last)), std::nullopt);
  }
  TokenClock just = ClockAt(kLast - 30 * kSecond - 1);
  EXPECT_EQ(just.StartIssuing(At(kLast - 30 * kSecond - 1), kMargin), Token{kLast - 1});
  EXPECT_EQ(just.Next(At(uint64_t{0})), kMaxToken);
  for (const FineInstant now : {At(kLast + 1), At(kLast + 2), kEndOfTime}) {
    TokenClock lost;
    EXPECT_EQ(lost.StartIssuing(now, kMargin), kMaxToken);
    EXPECT_EQ(lost.StartIssuing(now, Millis{0}), kMaxToken);
    EXPECT_EQ(lost.Next(now), std::nullopt);
  }
}

TEST(TokenClock, LeadIsDistanceToWallClock) {
  const TokenClock clock = ClockAt(kNow);
  EXPECT_EQ(clock.LeadAt(At(kNow - 1)), Micros{1});
  EXPECT_EQ(clock.LeadAt(At(kNow)), Micros{0});
  EXPECT_EQ(clock.LeadAt(At(kNow + 1)), Micros{0});
  EXPECT_EQ(clock.LeadAt(At(kNow - kTenMinutes)), Micros{600 * int64_t{kSecond}});
  EXPECT_EQ(clock.LeadAt(kBigBang), Micros{int64_t{kNow}});
  EXPECT_EQ(clock.LeadAt(kEndOfTime), Micros{0});
}

TEST(TokenClock, LeadOfTokenIsNeverNegative) {
  EXPECT_EQ(LeadOf(Token{0}, At(kNow)), Micros{0});
  EXPECT_EQ(LeadOf(Token{kNow}, At(kNow)), Micros{0});
  EXPECT_EQ(LeadOf(Token{kNow + 3}, At(kNow)), Micros{3});
  EXPECT_EQ(LeadOf(kMaxToken, At(uint64_t{0})), Micros{int64_t{kLast}});
  EXPECT_EQ(LeadOf(kMaxToken, kEndOfTime), Micros{0});
}

// --- Bounds on what others can ask of the clock -------------------------------------------------

TEST(TokenClock, ClientFloorIsBoundedByStartWallClockAndLastToken) {
  TokenClock clock;
  clock.ProcessStarted(At(kNow));
  clock.StartIssuing(At(kNow), kMargin);
  // Just after the start of the process: one and a half margins from the start.
  EXPECT_EQ(clock.HighestFloor(At(kNow)), Token{kNow + 45 * kSecond});
  EXPECT_EQ(clock.HighestFloor(At(kNow + 30 * kSecond)), Token{kNow + 45 * kSecond});
  // Later: half a margin ahead of the wall clock.
  EXPECT_EQ(clock.HighestFloor(At(kNow + 30 * kSecond + 1)), Token{kNow + 45 * kSecond + 1});
  EXPECT_EQ(clock.HighestFloor(At(kNow + kTenMinutes)), Token{kNow + kTenMinutes + 15 * kSecond});
  // Always: what the clock has reached, or would reach with its next token.
  clock.Observe(Token{kNow + 2 * kTenMinutes});
  EXPECT_EQ(clock.HighestFloor(At(kNow + kTenMinutes)), Token{kNow + 2 * kTenMinutes});
  clock.StartIssuing(At(kNow + kTenMinutes), kMargin);
  EXPECT_EQ(clock.HighestFloor(At(kNow + kTenMinutes)),
            Token{kNow + 2 * kTenMinutes + 3 * kSecond});
}

TEST(TokenClock, PromotionDoesNotRaiseClientFloorBound) {
  TokenClock clock;
  clock.ProcessStarted(At(kNow));
  const uint64_t later = kNow + kTenMinutes;
  clock.StartIssuing(At(later), kMargin);
  EXPECT_EQ(clock.HighestFloor(At(later)), Token{later + 30 * kSecond});
}

TEST(TokenClock, ClientFloorBoundFollowsMargin) {
  TokenClock clock;
  clock.SetMargin(Millis{0});
  EXPECT_EQ(clock.HighestFloor(At(kNow)), Token{kNow});
  clock.SetMargin(Millis{1});
  EXPECT_EQ(clock.HighestFloor(At(kNow)), Token{kNow + 500});
  EXPECT_EQ(clock.HighestFloor(kEndOfTime), kMaxToken);
}

TEST(TokenClock, AdoptsTokensUpToBoundAheadOfWallClock) {
  TokenClock clock;
  EXPECT_TRUE(clock.MayAdopt(Token{kNow + kTenMinutes}, At(kNow)));
  EXPECT_FALSE(clock.MayAdopt(Token{kNow + kTenMinutes + 1}, At(kNow)));
  EXPECT_FALSE(clock.MayAdopt(kMaxToken, At(kNow)));
  // A token that the clock has already reached does no harm.
  clock.Observe(Token{kNow + 2 * kTenMinutes});
  EXPECT_TRUE(clock.MayAdopt(Token{kNow + 2 * kTenMinutes}, At(kNow)));
  EXPECT_FALSE(clock.MayAdopt(Token{kNow + 2 * kTenMinutes + 1}, At(kNow)));
}

// --- In a cluster: taking over slots of other nodes --------------------------------------------

TokenClock IssuingAt(uint64_t last) {
  TokenClock clock = ClockAt(last);
  clock.SetMargin(kMargin);
  return clock;
}

TEST(TokenClock, AdvanceBeyondLeadsByAtMostMargin) {
  TokenClock clock = IssuingAt(kNow);
  clock.AdvanceBeyond({}, At(kNow));
  EXPECT_EQ(clock.reading(), Token{kNow + 30 * kSecond});
  EXPECT_EQ(clock.last(), Token{kNow}) << "raised by the first grant";
  clock.AdvanceBeyond({}, At(kNow));
  EXPECT_EQ(clock.reading(), Token{kNow + 30 * kSecond});
  clock.AdvanceBeyond({}, At(kNow + 1));
  EXPECT_EQ(clock.LeadAt(At(kNow + 1)), kMargin);
  // A lead that is already larger is not extended.
  TokenClock far = IssuingAt(kNow + kTenMinutes);
  far.AdvanceBeyond({}, At(kNow));
  EXPECT_EQ(far.reading(), Token{kNow + kTenMinutes});
  TokenClock end = IssuingAt(kLast);
  end.AdvanceBeyond({}, At(kLast));
  EXPECT_EQ(end.reading(), kMaxToken);
}

TEST(TokenClock, AdvanceBeyondExceedsTokensOfOtherNodes) {
  RemoteClock others;
  EXPECT_EQ(others.UpperBound(At(kNow)), Token{0});
  others.Observe({.last = Token{kNow + 60 * kSecond}, .wall = Token{kNow + 2 * kSecond}}, At(kNow));
  TokenClock clock = IssuingAt(0);
  clock.AdvanceBeyond(others, At(kNow));
  EXPECT_GT(clock.reading(), Token{kNow + 60 * kSecond});
}

TEST(RemoteClock, EstimateGrowsAtMostAsFastAsServerIssues) {
  constexpr uint64_t kMessageDelay = 1000;
  RemoteClock others;
  others.Observe({.last = Token{kNow + 60 * kSecond}, .wall = Token{kNow + 2 * kSecond}}, At(kNow));
  EXPECT_EQ(others.UpperBound(At(kNow)), Token{kNow + 60 * kSecond + kMessageDelay});
  EXPECT_EQ(others.UpperBound(At(kNow + 10)), Token{kNow + 60 * kSecond + 5 + kMessageDelay});
  // The lead is used up, and what remains is a wall clock ahead of ours.
  const uint64_t later = kNow + 200 * kSecond;
  EXPECT_EQ(others.UpperBound(At(later)), Token{later + 2 * kSecond + kMessageDelay});
  // If our clock is set back, the estimate stands still.
  EXPECT_EQ(others.UpperBound(At(kNow - kSecond)), others.UpperBound(At(kNow)));
  EXPECT_EQ(others.UpperBound(kBigBang), others.UpperBound(At(kNow)));
}

TEST(RemoteClock, KeepsFurthestReadingAndExpires) {
  RemoteClock others;
  others.Observe({.last = Token{kNow + 60 * kSecond}, .wall = Token{kNow}}, At(kNow));
  const Token furthest = others.UpperBound(At(kNow));
  others.Observe({.last = Token{kNow + 50 * kSecond}, .wall = Token{kNow}}, At(kNow));
  EXPECT_EQ(others.UpperBound(At(kNow)), furthest);
  others.Observe({.last = Token{kNow + 70 * kSecond}, .wall = Token{kNow}}, At(kNow));
  EXPECT_GT(others.UpperBound(At(kNow)), furthest);

  EXPECT_GT(others.UpperBound(At(kNow + kTenMinutes)), Token{kNow});
  EXPECT_EQ(others.UpperBound(At(kNow + kTenMinutes + 1)), Token{0});
  EXPECT_EQ(others.UpperBound(kEndOfTime), Token{0});
  others.Observe({.last = Token{kNow}, .wall = Token{kNow}}, At(kNow + kTenMinutes + 1));
  EXPECT_GT(others.UpperBound(At(kNow + kTenMinutes + 1)), Token{kNow});
}

// One server has issued more tokens, another has a wall clock that is further ahead and will
// overtake it.
TEST(RemoteClock, KeepsReadingThatWillOvertake) {
  RemoteClock others;
  others.Observe({.last = Token{kNow + 10 * kSecond}, .wall = Token{kNow}}, At(kNow));
  others.Observe({.last = Token{0}, .wall = Token{kNow + 9 * kSecond}}, At(kNow));
  EXPECT_LT(others.UpperBound(At(kNow)), Token{kNow + 11 * kSecond});
  EXPECT_GT(others.UpperBound(At(kNow + 20 * kSecond)), Token{kNow + 29 * kSecond});
}

// Two nodes exchange a slot every few milliseconds. A node may or may not receive the other's clock
// reading before it issues tokens. Their wall clocks differ by more than the margin.
class SlotExchange : public ::testing::TestWithParam<uint64_t> {};

TEST_P(SlotExchange, TokensRiseAndLeadStaysBounded) {
  constexpr uint64_t kApart = 45 * kSecond;
  TokenClock clocks[2] = {IssuingAt(0), IssuingAt(0)};
  RemoteClock received[2];
  uint64_t wall = kNow;
  uint64_t last = 0;
  std::mt19937_64 random(7);
  for (int hop = 0; hop < 100'000; hop++) {
    const auto from = static_cast<size_t>(hop % 2);
    const auto to = 1 - from;
    const auto at = [&](size_t node) { return At(wall + (node == 0 ? kApart : 0)); };
    received[to].Observe(clocks[from].Read(at(from)), at(to));
    wall += random() % 8000;
    clocks[to].AdvanceBeyond(received[to], at(to));
    for (uint64_t grants = GetParam() > 0 ? random() % GetParam() : 0; grants > 0; grants--) {
      const uint64_t token = Issue(clocks[to], at(to));
      ASSERT_GT(token, last) << "hop " << hop;
      last = token;
      wall += random() % 50;
    }
  }
  // The lead stays close to the difference of the wall clocks plus the margin.
  EXPECT_LE(clocks[1].LeadAt(At(wall)), Micros{kApart} + kMargin + std::chrono::seconds{1});
}

INSTANTIATE_TEST_SUITE_P(, SlotExchange, ::testing::Values(0, 20));

}  // namespace
}  // namespace turnstile
