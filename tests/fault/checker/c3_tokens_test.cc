#include <gtest/gtest.h>

#include <vector>

#include "fault/checker/test_histories.h"

namespace turnstile::fault {
namespace {

TEST(TokensTest, Rise) {
  const Operation first = Granted(1, 10, 0, 1, 100);
  EXPECT_EQ(ChecksOf({{first, Granted(2, 9, 200, 201)}, {}}), Checks{"C3"});
  EXPECT_EQ(ChecksOf({{first, Granted(2, 10, 200, 201)}, {}}), (Checks{"C3", "C3"}));
  EXPECT_EQ(ChecksOf({{first, Granted(2, 11, 200, 201)}, {}}), Checks{});
  // It was asked for before the other token was told.
  EXPECT_EQ(ChecksOf({{Granted(1, 10, 0, 5, 1), Granted(2, 9, 4, 30)}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{Granted(1, int64_t{1} << 53, 0, 1)}, {}}), Checks{"C3"});
}

// The next hold of an owner is a new one too.
TEST(TokensTest, RiseForWhoComesAgain) {
  const std::vector<Operation> ops = {Granted(1, 100, 0, 1), Granted(2, 200, 1100, 1101),
                                      Released(2, 1150, 1151), Granted(1, 150, 1200, 1201)};
  EXPECT_EQ(ChecksOf({ops, {}}), Checks{"C3"});
}

TEST(TokensTest, AreNotBelowTheFloorThatWasAskedFor) {
  const Operation first = Granted(1, 10, 0, 1);
  EXPECT_EQ(ChecksOf({{WithFloor(10, first)}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{WithFloor(11, first)}, {}}), Checks{"C3"});
  // A holder keeps a token that is high enough, and gets exactly the floor otherwise.
  EXPECT_EQ(ChecksOf({{first, WithFloor(9, Granted(1, 10, 100, 101))}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{first, WithFloor(9, Granted(1, 12, 100, 101))}, {}}), Checks{"C6"});
  EXPECT_EQ(ChecksOf({{first, WithFloor(12, Granted(1, 12, 100, 101))}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{first, WithFloor(12, Granted(1, 13, 100, 101))}, {}}), Checks{"C6"});
}

TEST(TokensTest, AreUnknownIfACallWithAFloorWasLost) {
  const Operation first = Granted(1, 10, 0, 1);
  const Operation lost = Lost(WithFloor(12, Granted(1, 0, 100, 101)));
  EXPECT_EQ(ChecksOf({{first, lost, Shown(Verb::kFence, 1, 10, 200, Answer::kNo)}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{first, lost, Granted(1, 12, 200, 201)}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{first, Shown(Verb::kFence, 1, 10, 200, Answer::kNo)}, {}}), Checks{"C2"});
}

// A token is raised, and the hold is the same: a release ends it.
TEST(TokensTest, AreRaisedWithinAHold) {
  const Operation first = Granted(1, 10, 0, 1);
  EXPECT_EQ(ChecksOf({{first, WithFloor(12, Granted(1, 12, 100, 101)), Released(1, 200, 201),
                       Granted(2, 20, 300, 301)},
                      {}}),
            Checks{});
  EXPECT_EQ(
      ChecksOf({{first, WithFloor(12, Granted(1, 12, 100, 101)), Granted(2, 20, 300, 301)}, {}}),
      Checks{"C1"});
  const auto handed_over = [&](Time at) {
    return std::vector<Operation>{first, WithFloor(12, Granted(1, 12, 100, 101)),
                                  Released(1, 200, 201), Granted(2, 20, 150, at, 1000, 2000)};
  };
  EXPECT_EQ(ChecksOf({handed_over(250), {}}), Checks{});
  EXPECT_EQ(ChecksOf({handed_over(350), {}}), Checks{"C4"});
}

// Readers beside it may have got higher ones.
TEST(TokensTest, AreRaisedBesideOtherReaders) {
  const Operation first = Reading(Granted(1, 10, 0, 1));
  const Operation beside = Reading(Granted(2, 20, 50, 51));
  EXPECT_EQ(ChecksOf({{first, beside, Reading(WithFloor(12, Granted(1, 12, 100, 101)))}, {}}),
            Checks{});
  EXPECT_EQ(ChecksOf({{first, beside, Reading(Granted(3, 12, 100, 101))}, {}}), Checks{"C3"});
  // It has to be its own hold that is raised.
  EXPECT_EQ(ChecksOf({{beside, Reading(WithFloor(12, Granted(1, 12, 100, 101)))}, {}}),
            Checks{"C3"});
}

TEST(TokensTest, MayBeGivenAgainToWhoIsBackWithOlderData) {
  const Operation first = Granted(1, 10, 0, 1);
  // It names a token that was given since.
  const std::vector<Operation> back = {first, Released(1, 50, 51), Granted(2, 12, 100, 101, 50),
                                       WithFloor(12, Granted(1, 12, 300, 301))};
  EXPECT_EQ(ChecksOf({back, {During(Mark::Kind::kLossy, 200, 201)}}), Checks{});
  EXPECT_EQ(ChecksOf({back, {}}), (Checks{"C3", "C3"}));
  // Or a lower one, which the register refuses.
  const std::vector<Operation> refused = {first,
                                          Released(1, 50, 51),
                                          Granted(2, 20, 100, 101, 50),
                                          Shown(Verb::kWrite, 2, 20, 110),
                                          WithFloor(12, Granted(1, 12, 300, 301)),
                                          Shown(Verb::kWrite, 1, 12, 310)};
  EXPECT_EQ(ChecksOf({refused, {During(Mark::Kind::kLossy, 200, 201)}}), Checks{});
  EXPECT_EQ(ChecksOf({refused, {}}), (Checks{"C3", "C2"}));
}

TEST(TokensTest, OfMessagesRiseToo) {
  const Operation first = Granted(1, 10, 0, 1, 100);
  EXPECT_EQ(ChecksOf({{first, Notified(Granted(2, 9, 150, 250, 100, 200), 151)}, {}}),
            Checks{"C3"});
  EXPECT_EQ(ChecksOf({{first, Notified(Granted(2, 11, 150, 250, 100, 200), 151)}, {}}), Checks{});
}

}  // namespace
}  // namespace turnstile::fault
