#include <gtest/gtest.h>

#include <vector>

#include "fault/checker/test_histories.h"

namespace turnstile::fault {
namespace {

TEST(ExclusionTest, TwoHoldersAtOnce) {
  EXPECT_EQ(ChecksOf({{Granted(1, 10, 0, 1), Granted(2, 20, 500, 501)}, {}}), Checks{"C1"});
  // The first lease may be over.
  EXPECT_EQ(ChecksOf({{Granted(1, 10, 0, 1), Granted(2, 20, 500, 999)}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{Granted(1, 10, 0, 1), Released(1, 400, 401), Granted(2, 20, 500, 501)}, {}}),
            Checks{});
  // A release counts from the moment of its sending, whether or not it is answered.
  EXPECT_EQ(ChecksOf({{Granted(1, 10, 0, 1), Released(1, 400, 600, Answer::kLost),
                       Granted(2, 20, 300, 500)},
                      {}}),
            Checks{});
}

TEST(ExclusionTest, ATouchMakesTheHoldLonger) {
  const Operation first = Granted(1, 10, 0, 1);
  EXPECT_EQ(ChecksOf({{first, Touched(1, 900, 901, 1000), Granted(2, 20, 1500, 1501)}, {}}),
            Checks{"C1"});
  EXPECT_EQ(ChecksOf({{first, Touched(1, 900, 901, 1000), Granted(2, 20, 1500, 1900)}, {}}),
            Checks{});
  // Or shorter, also if nobody knows whether it was carried out.
  for (const Answer answer : {Answer::kYes, Answer::kLost}) {
    EXPECT_EQ(ChecksOf({{first, Touched(1, 100, 101, 50, answer), Granted(2, 20, 500, 501)}, {}}),
              Checks{});
  }
  // And a step of the clock cuts that.
  const std::vector<Operation> lost = {first, Touched(1, 100, 101, 800, Answer::kLost),
                                       Granted(2, 20, 600, 601)};
  EXPECT_EQ(ChecksOf({lost, {}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({lost, {During(Mark::Kind::kStep, 300, 310, 350)}}), Checks{});
}

TEST(ExclusionTest, SharersAndLimits) {
  const auto limit = [](const Operation& op) { return As(Sharing::kLimit, 2, op); };
  const Operation a = Granted(1, 10, 0, 1);
  const Operation b = Granted(2, 20, 100, 101);
  const Operation c = Granted(3, 30, 200, 201);
  EXPECT_EQ(ChecksOf({{Reading(a), Reading(b), Reading(c)}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{limit(a), limit(b)}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{limit(a), limit(b), limit(c)}, {}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({{Reading(a), b}, {}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({{a, Reading(b)}, {}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({{Reading(a), limit(b)}, {}}), Checks{"C1"});
}

TEST(ExclusionTest, WeightsCountAgainstTheLimitOfTheLastGrant) {
  const Operation a = Granted(1, 10, 0, 1);
  const Operation b = Granted(2, 20, 100, 101);
  EXPECT_EQ(ChecksOf({{Weighing(2, 3, a), Weighing(1, 3, b)}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{Weighing(2, 3, a), Weighing(2, 3, b)}, {}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({{Weighing(1, 1, a), Weighing(2, 3, b)}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{Weighing(2, 3, a), Weighing(1, 1, b)}, {}}), Checks{"C1"});
  // What lingers weighs too.
  const Operation lingers = WithLinger(500, Weighing(2, 3, a));
  const auto later = [&](uint16_t weight) {
    return Weighing(weight, 3, Granted(2, 20, 1100, 1101));
  };
  EXPECT_EQ(ChecksOf({{lingers, later(1)}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{lingers, later(2)}, {}}), Checks{"C1"});
  // A floor does not tell which was granted last.
  const Operation raised = WithFloor(20, Weighing(1, 1, b));
  EXPECT_EQ(ChecksOf({{Weighing(1, 3, a), raised}, {}}), Checks{});
}

TEST(ExclusionTest, AHoldLastsNoLongerThanItMay) {
  const Operation first = Granted(1, 10, 0, 1);
  const Operation touched = Touched(1, 900, 901, 1000);
  const Operation second = Granted(2, 20, 1500, 1501);
  EXPECT_EQ(ChecksOf({{first, touched, second}, {}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({{WithMaxHold(1200, first), touched, second}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{WithMaxHold(1600, first), touched, second}, {}}), Checks{"C1"});
  // A linger follows.
  EXPECT_EQ(ChecksOf({{WithLinger(400, WithMaxHold(1200, first)), touched, second}, {}}),
            Checks{"C1"});
  // It may have become shorter by a call that was lost, and never becomes longer.
  const Operation again = WithMaxHold(1200, Granted(1, 10, 500, 501));
  EXPECT_EQ(ChecksOf({{first, again, touched, second}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{first, Lost(again), touched, second}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{WithMaxHold(1200, first), WithMaxHold(9000, again), touched, second}, {}}),
            Checks{});
  // Or by an upgrade, whose answer comes later (seed 488003).
  const Operation reads = Reading(first);
  const Operation upgrade = Granted(1, 15, 200, 900);
  const Operation third = Granted(3, 20, 600, 601);
  EXPECT_EQ(ChecksOf({{reads, WithMaxHold(300, upgrade), third}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{reads, WithMaxHold(2000, upgrade), third}, {}}), (Checks{"C1", "C1"}));
}

TEST(ExclusionTest, ToBeNotifiedChangesNothing) {
  const Operation first = Granted(1, 10, 0, 1);
  const Operation second = Granted(2, 20, 100, 501, 1000, 600);
  EXPECT_EQ(ChecksOf({{first, Notified(second, 101)}, {}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({{first, Released(1, 400, 401), Notified(second, 101)}, {}}), Checks{});
  // Who was not told by a message may hold it, and is not certain.
  EXPECT_EQ(ChecksOf({{first, Lost(Notified(second, 101))}, {}}), Checks{});
}

TEST(ExclusionTest, StrangersAndClocksEndHolds) {
  const std::vector<Operation> ops = {Granted(1, 10, 0, 1), Granted(2, 20, 500, 501)};
  EXPECT_EQ(ChecksOf({ops, {During(Mark::Kind::kForced, 300, 310)}}), Checks{});
  EXPECT_EQ(ChecksOf({ops, {During(Mark::Kind::kForced, 600, 610)}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({ops, {During(Mark::Kind::kStep, 300, 310, 600)}}), Checks{});
  EXPECT_EQ(ChecksOf({ops, {During(Mark::Kind::kStep, 300, 310, 400)}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({ops, {During(Mark::Kind::kStep, 300, 310, -600)}}), Checks{"C1"});
  // A loss of writes does not: that is what the grace is for.
  EXPECT_EQ(ChecksOf({ops, {During(Mark::Kind::kLossy, 300, 310)}}), Checks{"C1"});
}

TEST(ExclusionTest, WhatLingersKeepsOthersOut) {
  Operation first = Granted(1, 10, 0, 1);
  const Operation second = Granted(2, 20, 1100, 1101);
  EXPECT_EQ(ChecksOf({{first, second}, {}}), Checks{});
  first.linger = 500 * kMs;
  EXPECT_EQ(ChecksOf({{first, second}, {}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({{first, Released(1, 900, 901), second}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{first, second}, {During(Mark::Kind::kForced, 1050, 1051)}}), Checks{});
  // The end of a session is no release.
  const Operation closed = Op(Verb::kClose, 1, 700, 720, Answer::kYes);
  EXPECT_EQ(ChecksOf({{first, closed, second}, {}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({{first, closed, Granted(2, 20, 1250, 1251)}, {}}), Checks{});
}

// A lost hold, and the one before it, which is live again by a clock that is behind.
TEST(ExclusionTest, WhatWasReplacedMayBeLiveAgain) {
  Operation revived = Op(Verb::kTouch, 1, 350, 351, Answer::kYes);
  revived.lease = kSecond;
  Operation touched = Op(Verb::kTouch, 1, 360, 361, Answer::kYes);
  touched.lease = kSecond;
  const std::vector<Operation> ops = {Granted(1, 10, 0, 1, 100), Granted(2, 20, 200, 201), revived,
                                      touched};
  const Mark lossy = During(Mark::Kind::kLossy, 300, 310);
  const Mark back = During(Mark::Kind::kStep, 300, 310, -500);
  EXPECT_EQ(ChecksOf({ops, {lossy, back}}), Checks{});
  EXPECT_EQ(ChecksOf({ops, {lossy}}), Checks{"C1"});

  // Also if it is raised to a floor.
  Operation raised = Granted(1, 30, 350, 351);
  raised.floor = 30;
  const std::vector<Operation> by_floor = {ops[0], ops[1], raised};
  EXPECT_EQ(ChecksOf({by_floor, {lossy, back}}), Checks{});
  EXPECT_EQ(ChecksOf({by_floor, {lossy}}), Checks{"C1"});
}

}  // namespace
}  // namespace turnstile::fault
