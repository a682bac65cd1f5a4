#include <gtest/gtest.h>

#include "fault/checker/test_histories.h"

namespace turnstile::fault {
namespace {

// What owner 9 asks and is told in between shows that the first of two requests had arrived.
class OrderTest : public testing::Test {
 protected:
  static Checks ChecksOfLine(const Operation& first, const Operation& second) {
    return ChecksOf(
        {{Granted(8, 1, 0, 1, 60000), Null(9, 110, 120), Released(8, 300, 301), first, second},
         {}});
  }

  const Operation early_ = Granted(1, 20, 100, 340, 10, 1000);
  const Operation late_ = Granted(2, 10, 200, 302, 10, 1000);
};

TEST_F(OrderTest, FirstComeFirstServed) {
  EXPECT_EQ(ChecksOfLine(early_, late_), Checks{"C5"});
  // Nothing shows which of them came first.
  EXPECT_EQ(ChecksOf({{Granted(8, 1, 0, 1, 60000), Released(8, 300, 301), early_, late_}, {}}),
            Checks{});
  // A call before this one may still have stood in line.
  Operation again = late_;
  again.retry = true;
  EXPECT_EQ(ChecksOfLine(early_, again), Checks{});
}

TEST_F(OrderTest, NobodyWaitsInVainWhileALaterOneIsServed) {
  EXPECT_EQ(ChecksOfLine(Null(1, 100, 390, 280), late_), Checks{"C5"});
  EXPECT_EQ(ChecksOfLine(Null(1, 100, 310, 200), late_), Checks{});
}

TEST_F(OrderTest, ReadersComeInTogetherInAnyOrder) {
  const Operation soon = Granted(1, 20, 100, 310, 10, 1000);
  EXPECT_EQ(ChecksOfLine(Reading(soon), Reading(late_)), Checks{});
  EXPECT_EQ(ChecksOfLine(Reading(early_), Reading(late_)), Checks{"C5"});
}

TEST_F(OrderTest, ReadersPassAReaderThatWaitsForAnotherLock) {
  EXPECT_EQ(ChecksOfLine(OnSeveral(Reading(early_)), Reading(late_)), Checks{});
  EXPECT_EQ(ChecksOfLine(OnSeveral(Reading(early_)), late_), Checks{"C5"});
}

TEST_F(OrderTest, HoldsBetweenWhoBlocksAndWhoIsNotified) {
  for (const bool first : {false, true}) {
    for (const bool second : {false, true}) {
      const Operation early = first ? Notified(early_, 101) : early_;
      const Operation late = second ? Notified(late_, 201) : late_;
      EXPECT_EQ(ChecksOfLine(early, late), Checks{"C5"});
      const Operation in_vain = Null(1, 100, 390, 280);
      EXPECT_EQ(ChecksOfLine(first ? Notified(in_vain, 101) : in_vain, late), Checks{"C5"});
    }
  }
  // One to whom nothing could be said was left out.
  EXPECT_EQ(ChecksOfLine(Lost(Notified(Null(1, 100, 390, 280), 101)), late_), Checks{});
}

// That it is in line shows that a request has arrived, and those before it.
TEST_F(OrderTest, ToBeInLineIsToHaveArrived) {
  const Operation holder = Granted(8, 1, 0, 1, 60000);
  const auto line = [&](Time queued) {
    return History{
        {holder, Released(8, 300, 301), early_, late_, Notified(Null(7, 110, 280, 160), queued)},
        {}};
  };
  EXPECT_EQ(ChecksOf(line(120)), Checks{"C5"});
  EXPECT_EQ(ChecksOf(line(0)), Checks{});
}

TEST_F(OrderTest, NobodyStandsInALineThatIsTooLongForIt) {
  const Operation holder = Granted(8, 1, 0, 1, 60000);
  Operation picky = Null(3, 200, 420, 210);
  const auto line = [&](const Operation& last) {
    return ChecksOf({{holder, Null(1, 100, 590, 480), Notified(Null(2, 105, 590, 480), 106),
                      Null(9, 110, 120), last},
                     {}});
  };
  EXPECT_EQ(line(picky), Checks{});
  picky.max_line = 3;
  EXPECT_EQ(line(picky), Checks{});
  picky.max_line = 2;
  EXPECT_EQ(line(picky), Checks{"C5"});
  EXPECT_EQ(line(Notified(picky, 201)), Checks{"C5"});
  // It is refused at once, takes over its own place, or comes when the others may be gone.
  Operation refused = picky;
  refused.answered = 202 * kMs;
  EXPECT_EQ(line(refused), Checks{});
  Operation again = picky;
  again.retry = true;
  EXPECT_EQ(line(again), Checks{});
  // Or what refused it at once was read late.
  EXPECT_EQ(ChecksOf({{holder, Null(1, 100, 590, 480), Notified(Null(2, 105, 590, 480), 106),
                       Null(9, 110, 120), picky},
                      {During(Mark::Kind::kUnavailable, 300, 400)}}),
            Checks{});
  Operation late = Notified(Null(3, 580, 790, 200), 586);
  late.max_line = 2;
  EXPECT_EQ(line(late), Checks{});
}

}  // namespace
}  // namespace turnstile::fault
