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

}  // namespace
}  // namespace turnstile::fault
