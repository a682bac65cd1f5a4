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

}  // namespace
}  // namespace turnstile::fault
