#include <gtest/gtest.h>

#include <vector>

#include "fault/checker/test_histories.h"

namespace turnstile::fault {
namespace {

TEST(OwnersTest, WhoAsksAgainKeepsItsTokenOrGetsANewerOne) {
  const Operation first = Granted(1, 10, 0, 1);
  EXPECT_EQ(ChecksOf({{first, Granted(1, 10, 100, 101)}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{first, Granted(1, 12, 100, 101)}, {}}), Checks{"C6"});
  EXPECT_EQ(ChecksOf({{first, Null(1, 100, 101)}, {}}), Checks{"C6"});
  EXPECT_EQ(ChecksOf({{first, Granted(1, 12, 1100, 1101)}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{first, Granted(1, 9, 1100, 1101)}, {}}), (Checks{"C3", "C6"}));
  // Unless what was there before is back.
  EXPECT_EQ(ChecksOf({{first, Granted(1, 9, 1100, 1101)}, {During(Mark::Kind::kLossy, 500, 510)}}),
            Checks{});
}

TEST(OwnersTest, AStrangerReleasesNothing) {
  Operation stranger = Released(7, 100, 101);
  stranger.stranger = true;
  EXPECT_EQ(ChecksOf({{Granted(1, 10, 0, 1), stranger}, {}}), Checks{"C6"});
}

// An owner that took its hold twice.
class ReentrantHoldTest : public testing::Test {
 protected:
  const Operation first_ = Reentrant(Granted(1, 10, 0, 1));
  const Operation again_ = Reentrant(Granted(1, 10, 100, 101));
  const Operation once_ = Released(1, 200, 201);
  const Operation twice_ = Released(1, 300, 301);
  const Operation next_ = Granted(2, 20, 400, 401);
};

TEST_F(ReentrantHoldTest, EachGrantHasToBeReleased) {
  EXPECT_EQ(ChecksOf({{first_, again_, once_, twice_, next_}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{first_, again_, once_, next_}, {}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({{first_, again_, once_, Released(1, 300, 301, Answer::kNo)}, {}}),
            Checks{"C2"});
  EXPECT_EQ(ChecksOf({{first_, once_, twice_}, {}}), Checks{"C6"});
  // Without REENTRANT the second is the same grant.
  EXPECT_EQ(ChecksOf({{first_, Granted(1, 10, 100, 101), once_, next_}, {}}), Checks{});
}

TEST_F(ReentrantHoldTest, WhatWasLostCountsOrNot) {
  EXPECT_EQ(ChecksOf({{first_, Lost(again_), once_, next_}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{first_, Lost(again_), once_, twice_, next_}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{first_, again_, Lost(once_), next_}, {}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({{first_, again_, Lost(once_), twice_, next_}, {}}), Checks{});
}

TEST_F(ReentrantHoldTest, OneReleaseEndsItsLinger) {
  const Operation lingers = WithLinger(500, again_);
  const Operation later = Granted(2, 20, 1300, 1301);
  EXPECT_EQ(ChecksOf({{first_, lingers, later}, {}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({{first_, lingers, Lost(Released(1, 1200, 1201)), later}, {}}), Checks{});
}

TEST_F(ReentrantHoldTest, IsFreeAtTheLastReleaseAndNotBefore) {
  const auto handed_over = [&](Time at) {
    return std::vector<Operation>{first_, again_, once_, twice_,
                                  Granted(2, 20, 150, at, 1000, 2000)};
  };
  EXPECT_EQ(ChecksOf({handed_over(350), {}}), Checks{});
  EXPECT_EQ(ChecksOf({handed_over(250), {}}), (Checks{"C1", "C2"}));
  EXPECT_EQ(ChecksOf({handed_over(450), {}}), Checks{"C4"});
}

TEST_F(ReentrantHoldTest, HasAnotherCountInOlderData) {
  for (const auto kind : {Mark::Kind::kLossy, Mark::Kind::kForced}) {
    const Mark mark = During(kind, 150, 151);
    EXPECT_EQ(ChecksOf({{first_, again_, once_, next_}, {mark}}), Checks{});
    EXPECT_EQ(ChecksOf({{first_, again_, once_, twice_, Released(1, 310, 311)}, {mark}}), Checks{});
  }
  // Also if it came back after the owner had got another hold.
  EXPECT_EQ(
      ChecksOf({{first_, again_, Reentrant(Granted(1, 15, 170, 171)), Granted(1, 10, 190, 191),
                 once_, twice_, Released(1, 310, 311)},
                {During(Mark::Kind::kForced, 150, 180), During(Mark::Kind::kLossy, 150, 180)}}),
      Checks{});
}

TEST_F(ReentrantHoldTest, MayBeLiveAgainWhenTheClockIsSetBack) {
  const std::vector<Operation> over = {first_, Released(1, 1100, 1101, Answer::kNo),
                                       Released(1, 1200, 1201)};
  EXPECT_EQ(ChecksOf({over, {}}), (Checks{"C2", "C6"}));
  EXPECT_EQ(ChecksOf({over, {During(Mark::Kind::kStep, 1150, 1160, -500)}}), Checks{});
}

TEST_F(ReentrantHoldTest, EndsWithItsSession) {
  EXPECT_EQ(ChecksOf({{first_, again_, Op(Verb::kClose, 1, 200, 220, Answer::kYes), next_}, {}}),
            Checks{});
}

TEST(OwnersTest, AReaderThatWritesGetsANewToken) {
  const Operation reader = Reading(Granted(1, 10, 0, 1));
  const Operation upgraded = Granted(1, 12, 100, 101);
  const Operation other = Reading(Granted(2, 20, 300, 301));
  EXPECT_EQ(ChecksOf({{reader, upgraded}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{reader, Granted(1, 10, 100, 101)}, {}}), Checks{"C6"});
  // To ask for it may be in vain.
  EXPECT_EQ(ChecksOf({{reader, Null(1, 100, 101), other}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{reader, Null(1, 100, 101), Granted(2, 20, 300, 301)}, {}}), Checks{"C1"});
  // It keeps others out, and is the only hold of its owner.
  EXPECT_EQ(ChecksOf({{reader, upgraded, other}, {}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({{reader, upgraded, Released(1, 200, 201), Granted(2, 20, 300, 301)}, {}}),
            Checks{});
  // If the answer was lost it writes or not.
  const Operation lost = Lost(upgraded);
  EXPECT_EQ(ChecksOf({{reader, lost, other}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{reader, lost, Shown(Verb::kFence, 1, 10, 200, Answer::kNo)}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{reader, lost, Granted(2, 20, 300, 301)}, {}}), Checks{"C1"});
}

TEST(OwnersTest, AWriterThatReadsKeepsItsTokenAndLetsReadersIn) {
  const Operation writer = Granted(1, 10, 0, 1);
  const Operation downgraded = Reading(Granted(1, 10, 100, 101));
  const Operation other = Reading(Granted(2, 20, 300, 301));
  EXPECT_EQ(ChecksOf({{writer, downgraded, other}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{writer, downgraded, Granted(2, 20, 300, 301)}, {}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({{writer, Reading(Granted(1, 12, 100, 101))}, {}}), Checks{"C6"});
  EXPECT_EQ(ChecksOf({{writer, Reading(Null(1, 100, 101))}, {}}), Checks{"C6"});
  EXPECT_EQ(ChecksOf({{writer, Lost(downgraded), other}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{writer, Lost(downgraded), Granted(2, 20, 300, 301)}, {}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({{writer, downgraded, Released(1, 200, 201), Granted(2, 20, 300, 301)}, {}}),
            Checks{});
}

// A change may be undone, or not be carried out: then nobody knows whether its owner writes.
TEST(OwnersTest, AReaderMayWriteAfterALostChange) {
  const Operation touched = Touched(1, 300, 301, 1000);
  const Operation reader = Reading(Granted(1, 10, 0, 1));
  const Operation upgraded = Granted(1, 12, 100, 101);
  const Operation other = Reading(Granted(2, 20, 1150, 1151));
  const Mark lossy = During(Mark::Kind::kLossy, 200, 210);
  EXPECT_EQ(ChecksOf({{reader, upgraded, touched, other}, {}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({{reader, upgraded, touched, other}, {lossy}}), Checks{});
  EXPECT_EQ(ChecksOf({{reader, upgraded, touched, Granted(2, 20, 1150, 1151)}, {lossy}}),
            Checks{"C1"});
  EXPECT_EQ(ChecksOf({{reader, upgraded, touched, Null(1, 310, 311)}, {}}), Checks{"C6"});
  EXPECT_EQ(ChecksOf({{reader, upgraded, touched, Null(1, 310, 311)}, {lossy}}), Checks{});
  // Others wait for who perhaps writes.
  const Operation writer = Granted(1, 10, 0, 1);
  const Operation downgraded = Reading(Granted(1, 10, 100, 101));
  const Operation waiter = Reading(Granted(2, 20, 350, 900, 1000, 2000));
  EXPECT_EQ(ChecksOf({{writer, downgraded, touched, waiter}, {}}), Checks{"C4"});
  EXPECT_EQ(ChecksOf({{writer, downgraded, touched, waiter}, {lossy}}), Checks{});
  EXPECT_EQ(ChecksOf({{writer, Lost(downgraded), touched, waiter}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{reader, Lost(upgraded), touched, waiter}, {}}), Checks{});
}

TEST(OwnersTest, WhoAsksAgainWithAnotherWeightIsRefused) {
  const Operation first = Weighing(2, 3, Granted(1, 10, 0, 1));
  const auto again = [](uint16_t weight) { return Weighing(weight, 3, Granted(1, 10, 100, 101)); };
  EXPECT_EQ(ChecksOf({{first, again(2)}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{first, again(1)}, {}}), Checks{"C6"});
  Operation refused = again(1);
  refused.answer = Answer::kError;
  EXPECT_EQ(ChecksOf({{first, refused}, {}}), Checks{});
  // What is over does not count.
  EXPECT_EQ(ChecksOf({{first, Weighing(1, 3, Granted(1, 12, 1100, 1101))}, {}}), Checks{});
}

TEST(OwnersTest, AReleaseLeavesTheLine) {
  const Operation first = Granted(1, 10, 0, 1, 100);
  const Operation other = Granted(2, 20, 200, 201);
  Operation waits = Notified(Granted(1, 0, 300, 410, 1000, 500), 301);
  waits.answer = Answer::kError;
  const Operation leaves = Released(1, 400, 401);
  EXPECT_EQ(ChecksOf({{first, other, waits, leaves}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{first, other, leaves}, {}}), Checks{"C2"});
  // Once.
  EXPECT_EQ(ChecksOf({{first, other, waits, leaves, Released(1, 420, 421)}, {}}),
            (Checks{"C2", "C6"}));
  EXPECT_EQ(ChecksOf({{first, Released(1, 20, 21), other, waits, leaves}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{first, Released(1, 20, 21), other, leaves}, {}}), (Checks{"C2", "C6"}));
}

// Both the hold and the place, also if it was told late that the place had brought it another hold.
TEST(OwnersTest, AReleaseGivesUpWhatItsOwnerReadWhileItWaitedToWrite) {
  const Operation reads = Reading(Granted(1, 10, 0, 1));
  const Operation writes = Notified(Granted(1, 12, 100, 500, 1000, 600), 101);
  const Operation other = Granted(2, 20, 350, 400);
  EXPECT_EQ(ChecksOf({{reads, writes, Released(1, 300, 301), other}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{reads, writes, other}, {}}), (Checks{"C1", "C1"}));
}

// Who asks again because it may have missed a message does not get one more.
TEST(OwnersTest, WhoAsksAgainByTheSameChannelIsNotCountedOnceMore) {
  const Operation first = Notified(Reentrant(Granted(1, 10, 0, 1)));
  const Operation again = Reentrant(Granted(1, 10, 100, 101));
  const Operation once = Released(1, 200, 201);
  const Operation twice = Released(1, 300, 301);
  EXPECT_EQ(ChecksOf({{first, Notified(again), once, twice}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{first, NotifiedAsBefore(again), once, twice}, {}}), Checks{"C6"});
  EXPECT_EQ(ChecksOf({{first, NotifiedAsBefore(again), once, Granted(2, 20, 400, 401)}, {}}),
            Checks{});
  EXPECT_EQ(ChecksOf({{first, Notified(again), once, Granted(2, 20, 400, 401)}, {}}), Checks{"C1"});
}

}  // namespace
}  // namespace turnstile::fault
