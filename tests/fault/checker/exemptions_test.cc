// Each exemption of the checker is needed: here is a history in which nothing is wrong, and of
// which a check would say so without it.

#include "fault/checker/exemptions.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "fault/checker/test_histories.h"

namespace turnstile::fault {
namespace {

struct Twin {
  Exemption exemption;
  const char* check;  // that calls it wrong without the exemption
  History history;
};

Mark Loss(Time begin, Time end) { return During(Mark::Kind::kLossy, begin, end); }
Mark Outage(Time begin, Time end) { return During(Mark::Kind::kUnavailable, begin, end); }
Mark ClockStep(Time at, Time amount) { return During(Mark::Kind::kStep, at, at, amount); }
Mark Stranger(Time at, Time has_it_for = 0) {
  return During(Mark::Kind::kForced, at, at, has_it_for);
}
Operation Retry(Operation op) {
  op.retry = true;
  return op;
}

std::vector<Twin> CertainHoldTwins() {
  const Operation first = Granted(1, 10, 0, 1);
  const Operation second = Granted(2, 20, 500, 501);
  const Operation counted = Reentrant(first);
  const Operation counted_twice = Reentrant(Granted(1, 10, 100, 101));
  const Operation reads = Reading(Granted(1, 0, 100, 101));
  return {
      {Exemption::kStrangerMayEndHold, "C1", {{first, second}, {Stranger(300)}}},
      {Exemption::kServerMayForgetHold,
       "C2",
       {{first, Touched(1, 500, 501, 1000, Answer::kNo)}, {Loss(100, 200)}}},
      {Exemption::kStepMayEndLease, "C1", {{first, second}, {ClockStep(300, 600)}}},
      {Exemption::kLostCallMayShortenLease,
       "C1",
       {{first, Lost(Touched(1, 100, 101, 50)), second}, {}}},
      {Exemption::kLateCallMayShortenLease,
       "C1",
       {{first, HeldBack(Lost(Touched(1, 100, 150, 50))), Touched(1, 200, 201, 1000), second}, {}}},
      {Exemption::kReplacedHoldMayBeRevived,
       "C1",
       {{Granted(1, 10, 0, 1, 100), Granted(2, 20, 200, 201), Touched(1, 350, 351, 1000)},
        {Loss(300, 310), ClockStep(305, -500)}}},
      {Exemption::kChangeOfModeMayBeLost,
       "C1",
       {{first, Lost(reads), Reading(Granted(2, 20, 300, 301))}, {}}},
      {Exemption::kChangeOfModeMayBeUndone,
       "C1",
       {{Reading(first), Granted(1, 12, 100, 101), Touched(1, 300, 301, 1000),
         Reading(Granted(2, 20, 1150, 1151))},
        {Loss(200, 210)}}},
      {Exemption::kLostGrantMayCount,
       "C4",
       {{counted, Lost(Reentrant(Granted(1, 0, 100, 101, 10))), Touched(1, 110, 111, 1000),
         Released(1, 120, 121), Granted(2, 20, 115, 900, 1000, 2000)},
        {}}},
      {Exemption::kLostReleaseMayCount, "C1", {{first, Lost(Released(1, 400, 600)), second}, {}}},
      {Exemption::kCountOfOlderHold,
       "C1",
       {{counted, counted_twice, Released(1, 200, 201), second}, {Loss(99, 150)}}},
      {Exemption::kLostReleaseMayEndLinger,
       "C1",
       {{counted, WithLinger(500, counted_twice), Lost(Released(1, 1200, 1201)),
         Granted(2, 20, 1300, 1301)},
        {}}},
  };
}

std::vector<Twin> PossibleHoldTwins() {
  const Operation first = Granted(1, 10, 0, 1);
  const Operation lost_touch = Lost(Touched(1, 500, 510, 1000));
  return {
      {Exemption::kStepMayProlongLease,
       "C2",
       {{first, Released(1, 1100, 1101)}, {ClockStep(500, -200)}}},
      {Exemption::kLostCallMayRenew, "C2", {{first, lost_touch, Released(1, 1100, 1101)}, {}}},
      {Exemption::kLostCallMayWaitForServer,
       "C2",
       {{first, lost_touch, Released(1, 2000, 2001)}, {Outage(505, 1500)}}},
      {Exemption::kLostCallMayGrant,
       "C2",
       {{first, Granted(2, 20, 1100, 1101), Released(2, 1150, 1151),
         Lost(Granted(1, 0, 1200, 1300)), Released(1, 1400, 1401)},
        {}}},
      {Exemption::kHeldBackCallMayGrant,
       "C2",
       {{Granted(1, 10, 0, 1, 50), HeldBack(Lost(Granted(1, 0, 60, 900, 50))),
         Granted(1, 12, 910, 911, 50), Granted(2, 20, 970, 971, 20), Touched(1, 1000, 1001, 10)},
        {}}},
      {Exemption::kLostUpgradeMayChangeToken,
       "C6",
       {{Reading(first), Lost(Granted(1, 0, 100, 101)), Reading(Granted(1, 12, 200, 201))}, {}}},
      {Exemption::kLostFloorMayChangeToken,
       "C6",
       {{first, Lost(WithFloor(12, Granted(1, 0, 100, 101))), Granted(1, 12, 200, 201)}, {}}},
      {Exemption::kTokenOfOlderHold,
       "C2",
       {{first, Touched(1, 400, 401, 1000), Shown(Verb::kFence, 1, 10, 500, Answer::kNo)},
        {Loss(300, 310)}}},
  };
}

std::vector<Twin> RegisterTwins() {
  const Operation first = Granted(1, 10, 0, 1);
  return {
      {Exemption::kReplacedHoldMayBeBack,
       "C2",
       {{first, Granted(2, 20, 1500, 1501), Shown(Verb::kFence, 1, 10, 1600)}, {Loss(1550, 1560)}}},
      {Exemption::kStrangerMayBringHoldBack,
       "C2",
       {{first, Released(1, 1600, 1601)}, {Stranger(1500)}}},
      {Exemption::kLossMayBringHoldBack,
       "C2",
       {{first, Touched(1, 100, 101, 50), Released(1, 500, 501)}, {Loss(99, 110)}}},
      {Exemption::kRegisterKnowsNewerHold,
       "C2",
       {{first, Released(1, 50, 51), Granted(2, 20, 100, 101, 50), Shown(Verb::kWrite, 2, 20, 110),
         WithFloor(12, Granted(1, 12, 300, 301)), Shown(Verb::kWrite, 1, 12, 310)},
        {Loss(49, 201)}}},
  };
}

std::vector<Twin> TokenTwins() {
  const Operation first = Granted(1, 10, 0, 1);
  return {
      {Exemption::kGrantOfLostCall,
       "C3",
       {{Lost(Reading(Granted(1, 0, 0, 1))), Reading(Granted(2, 20, 100, 101)),
         Reading(Granted(1, 10, 200, 201))},
        {}}},
      {Exemption::kGrantOfOlderHold,
       "C3",
       {{first, Released(1, 100, 101), Granted(1, 15, 200, 201), Granted(1, 10, 400, 401)},
        {Loss(99, 310)}}},
      {Exemption::kFloorMayHaveBeenGiven,
       "C3",
       {{first, Released(1, 50, 51), Granted(2, 12, 100, 101, 50),
         WithFloor(12, Granted(1, 12, 300, 301))},
        {Loss(49, 201)}}},
  };
}

std::vector<Twin> WaitTwins() {
  const Operation first = Granted(1, 10, 0, 1);
  const Operation release = Released(1, 400, 401);
  const Operation waiter = Granted(2, 20, 100, 600, 1000, 2000);
  return {
      {Exemption::kNoAnswerWhileUnavailable,
       "C4",
       {{Granted(9, 1, 0, 1, 60000), Null(1, 2, 1602, 500)}, {Outage(100, 300)}}},
      {Exemption::kNoGrantWhileUnavailable, "C4", {{first, release, waiter}, {Outage(420, 580)}}},
      {Exemption::kReleaseMayBeLost, "C4", {{first, release, waiter}, {Loss(395, 410)}}},
      {Exemption::kRenewalMayBeLost,
       "C4",
       {{first, Touched(1, 200, 201, 50), waiter}, {Loss(199, 205)}}},
      {Exemption::kStrangerMayHold, "C4", {{waiter}, {Stranger(90, 500)}}},
      {Exemption::kUntoldMayHold,
       "C4",
       {{first, release, waiter, Lost(Granted(3, 0, 50, 60))}, {}}},
      {Exemption::kGrantMayBeHeldBack,
       "C4",
       {{HeldBack(Granted(1, 10, 0, 500)), Granted(2, 20, 100, 1010, 1000, 2000)}, {}}},
      {Exemption::kWaiterMayBeHeldBack,
       "C4",
       {{first, release, HeldBack(Null(2, 100, 600, 290))}, {}}},
      {Exemption::kReaderMayWrite,
       "C4",
       {{first, Reading(Granted(1, 10, 20, 21)), Touched(1, 60, 61, 1000), Reading(waiter)},
        {Loss(30, 40)}}},
  };
}

// As in c5_order_test.cc.
std::vector<Twin> OrderTwins() {
  const Operation holder = Granted(8, 1, 0, 1, 60000);
  const Operation between = Null(9, 110, 120);
  const Operation release = Released(8, 300, 301);
  const Operation early = Granted(1, 20, 100, 340, 10, 1000);
  const Operation late = Granted(2, 10, 200, 302, 10, 1000);
  return {
      {Exemption::kRequestMayBeHeldBack,
       "C5",
       {{holder, between, release, HeldBack(early), late}, {}}},
      {Exemption::kRetryMayStandInLine, "C5", {{holder, between, release, early, Retry(late)}, {}}},
      {Exemption::kNoOrderWhileUnavailable,
       "C5",
       {{holder, between, release, Null(1, 100, 390, 280), late}, {Outage(303, 380)}}},
  };
}

std::vector<Twin> OwnerTwins() {
  const Operation first = Granted(1, 10, 0, 1);
  const Operation release = Released(1, 100, 101);
  Operation elsewhere = NotifiedAsBefore(Reentrant(Granted(1, 10, 100, 101)));
  elsewhere.server = 2;
  return {
      {Exemption::kTokenMayBeOfOlderHold,
       "C6",
       {{first, release, Granted(1, 15, 200, 201), Granted(1, 10, 400, 401)}, {Loss(99, 310)}}},
      {Exemption::kReaderMayWriteAlready,
       "C6",
       {{first, Lost(Reading(Granted(1, 0, 100, 101))), Granted(1, 10, 200, 201)}, {}}},
      {Exemption::kUntoldGrantMayBeReleased,
       "C6",
       {{first, release, Lost(Granted(1, 0, 200, 201)), Released(1, 300, 301)}, {}}},
      {Exemption::kOlderHoldMayBeReleased,
       "C6",
       {{first, release, Released(1, 300, 301)}, {Loss(99, 200)}}},
      {Exemption::kBindingMayBeForgotten,
       "C6",
       {{Notified(Reentrant(first)), elsewhere, Released(1, 200, 201), Released(1, 300, 301)}, {}}},
      {Exemption::kStepMayLetReleaseAgain,
       "C6",
       {{first, Released(1, 1100, 1101, Answer::kNo), Released(1, 1200, 1201)},
        {ClockStep(1150, -500)}}},
  };
}

std::vector<Twin> AllTwins() {
  std::vector<Twin> all;
  for (const auto twins : {CertainHoldTwins, PossibleHoldTwins, RegisterTwins, TokenTwins,
                           WaitTwins, OrderTwins, OwnerTwins}) {
    for (Twin& twin : twins()) all.push_back(std::move(twin));
  }
  return all;
}

TEST(ExemptionsTest, EachIsForcedByItsTwin) {
  for (const Twin& twin : AllTwins()) {
    SCOPED_TRACE(ExemptionTable()[static_cast<size_t>(twin.exemption)].name);
    EXPECT_EQ(ChecksOf(twin.history), Checks{});
    const Rules strict{.exemptions = Exemptions().Without(twin.exemption)};
    EXPECT_EQ(ChecksOf(twin.history, strict), Checks{twin.check});
  }
}

TEST(ExemptionsTest, EachHasARowThatSaysWhatForcesIt) {
  const std::vector<Twin> twins = AllTwins();
  ASSERT_EQ(ExemptionTable().size(), kExemptions);
  for (size_t i = 0; i < kExemptions; ++i) {
    const ExemptionRow& row = ExemptionTable()[i];
    EXPECT_EQ(static_cast<size_t>(row.exemption), i) << row.name;
    EXPECT_EQ(FindExemption(row.name), row.exemption);
    const bool has_twin = std::any_of(twins.begin(), twins.end(), [&](const Twin& twin) {
      return twin.exemption == row.exemption;
    });
    EXPECT_TRUE(has_twin || row.seed != 0) << row.name;
    EXPECT_EQ(row.kind.empty(), row.seed != 0) << row.name;
  }
}

}  // namespace
}  // namespace turnstile::fault
