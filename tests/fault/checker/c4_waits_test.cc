#include <gtest/gtest.h>

#include <vector>

#include "fault/checker/test_histories.h"

namespace turnstile::fault {
namespace {

TEST(WaitsTest, EndInTime) {
  const Operation holder = Granted(9, 1, 0, 1, 60000);
  EXPECT_EQ(ChecksOf({{holder, Null(1, 2, 1602, 500)}, {}}), Checks{"C4"});
  EXPECT_EQ(ChecksOf({{holder, Null(1, 2, 1402, 500)}, {}}), Checks{});
  EXPECT_EQ(
      ChecksOf({{holder, Null(1, 2, 1602, 500)}, {During(Mark::Kind::kUnavailable, 100, 300)}}),
      Checks{});
}

// Owner 1 releases at 400 ms what owner 2 waits for, and gets at `at`.
std::vector<Operation> HandedOver(Time at) {
  return {Granted(1, 10, 0, 1), Granted(2, 20, 100, at, 1000, 2000), Released(1, 400, 401)};
}

TEST(WaitsTest, AReleasedLockIsHandedOver) {
  EXPECT_EQ(ChecksOf({HandedOver(450), {}}), Checks{});
  EXPECT_EQ(ChecksOf({HandedOver(600), {}}), Checks{"C4"});
  EXPECT_EQ(ChecksOf({HandedOver(600), {During(Mark::Kind::kUnavailable, 420, 580)}}), Checks{});
}

TEST(WaitsTest, ALockWhoseLeaseAndLingerAreOverIsHandedOver) {
  const auto expired = [](Time linger, Time at) {
    return std::vector<Operation>{WithLinger(linger, Granted(1, 10, 0, 1)),
                                  Granted(2, 20, 100, at, 1000, 2000)};
  };
  EXPECT_EQ(ChecksOf({expired(0, 1050), {}}), Checks{});
  EXPECT_EQ(ChecksOf({expired(0, 1150), {}}), Checks{"C4"});
  EXPECT_EQ(ChecksOf({expired(300, 1350), {}}), Checks{});
}

TEST(WaitsTest, AReleaseMayBeLostWithAServer) {
  EXPECT_EQ(ChecksOf({HandedOver(950), {During(Mark::Kind::kLossy, 395, 410)}}), Checks{});
  EXPECT_EQ(ChecksOf({HandedOver(950), {During(Mark::Kind::kLossy, 495, 510)}}), Checks{"C4"});
  EXPECT_EQ(ChecksOf({HandedOver(1150), {During(Mark::Kind::kLossy, 395, 410)}}), Checks{"C4"});
}

TEST(WaitsTest, ALockIsHandedOverWhenASessionEnds) {
  std::vector<Operation> closed = HandedOver(600);
  closed[2] = Op(Verb::kClose, 1, 400, 420, Answer::kYes);
  EXPECT_EQ(ChecksOf({closed, {}}), Checks{"C4"});
  closed[2].answer = Answer::kLost;
  EXPECT_EQ(ChecksOf({closed, {}}), Checks{});
}

TEST(WaitsTest, WhoseAnswerWasLostMayHoldTheLock) {
  std::vector<Operation> ops = HandedOver(600);
  ops.push_back(Lost(Granted(3, 0, 50, 60, 1000)));
  EXPECT_EQ(ChecksOf({ops, {}}), Checks{});
  // For longer, if the clock is set back meanwhile.
  ops.back().lease = 100 * kMs;
  EXPECT_EQ(ChecksOf({ops, {}}), Checks{"C4"});
  EXPECT_EQ(ChecksOf({ops, {During(Mark::Kind::kStep, 90, 91, -450)}}), Checks{});
}

TEST(WaitsTest, ReadersAreLetInBesideReaders) {
  const Operation reader = Reading(Granted(1, 10, 0, 1));
  const Operation late = Reading(Granted(2, 20, 100, 350, 1000, 2000));
  EXPECT_EQ(ChecksOf({{reader, late}, {}}), Checks{"C4"});
  EXPECT_EQ(ChecksOf({{reader, late}, {During(Mark::Kind::kUnavailable, 100, 300)}}), Checks{});
  // Unless somebody waits who wants to write.
  EXPECT_EQ(ChecksOf({{reader, Null(3, 90, 300, 210), late}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{reader, Null(3, 90, 200, 110), late}, {}}), Checks{"C4"});
  // A writer that reads from now on lets them in.
  const Operation writer = Granted(1, 10, 0, 1);
  const auto downgraded = [&](Time at) { return Reading(Granted(1, 10, at, at + 1)); };
  EXPECT_EQ(ChecksOf({{writer, downgraded(300), late}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{writer, downgraded(200), late}, {}}), Checks{"C4"});
}

TEST(WaitsTest, AreToldByAMessageInTime) {
  const Operation holder = Granted(9, 1, 0, 1, 60000);
  EXPECT_EQ(ChecksOf({{holder, Notified(Null(1, 2, 1602, 500), 3)}, {}}), Checks{"C4"});
  EXPECT_EQ(ChecksOf({{holder, Notified(Null(1, 2, 1402, 500), 3)}, {}}), Checks{});
  // Who gives up at once when it hears nothing any more has nothing to complain of.
  EXPECT_EQ(ChecksOf({{holder, Lost(Notified(Null(1, 2, 1602, 500), 3))}, {}}), Checks{"C4"});
  EXPECT_EQ(ChecksOf({{holder, Lost(Notified(Null(1, 2, 300, 500), 3))}, {}}), Checks{});
}

TEST(WaitsTest, ALockIsHandedOverToWhoIsNotified) {
  const auto handed_over = [](Time at) {
    std::vector<Operation> ops = HandedOver(at);
    ops[1] = Notified(ops[1], 101);
    return ops;
  };
  EXPECT_EQ(ChecksOf({handed_over(450), {}}), Checks{});
  EXPECT_EQ(ChecksOf({handed_over(600), {}}), Checks{"C4"});
}

TEST(WaitsTest, ALockThatHasBeenHeldAsLongAsItMayIsHandedOver) {
  const auto capped = [](Time linger, Time at) {
    return std::vector<Operation>{WithLinger(linger, WithMaxHold(1200, Granted(1, 10, 0, 1))),
                                  Touched(1, 900, 901, 1000), Granted(2, 20, 1000, at, 1000, 2000)};
  };
  EXPECT_EQ(ChecksOf({capped(0, 1250), {}}), Checks{});
  EXPECT_EQ(ChecksOf({capped(0, 1350), {}}), Checks{"C4"});
  EXPECT_EQ(ChecksOf({capped(300, 1550), {}}), Checks{});
  EXPECT_EQ(ChecksOf({capped(300, 1650), {}}), Checks{"C4"});
}

TEST(WaitsTest, ALockThatIsSaidToBeLostIsHandedOver) {
  const auto lost = [](Time at, bool said) {
    std::vector<Operation> ops = {Granted(1, 10, 0, 900), Granted(2, 20, 950, at, 1000, 2000)};
    if (said) ops.push_back(SaidToBeLost(1, 10, 1100));
    return ops;
  };
  EXPECT_EQ(ChecksOf({lost(1150, true), {}}), Checks{});
  EXPECT_EQ(ChecksOf({lost(1250, true), {}}), Checks{"C4"});
  EXPECT_EQ(ChecksOf({lost(1250, false), {}}), Checks{});
}

}  // namespace
}  // namespace turnstile::fault
