// The checker as a whole, histories as text, and stories. Each check has tests of its own, with
// small histories: each with one thing wrong, and its twin with nothing wrong.

#include "fault/checker/checker.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "fault/checker/test_histories.h"

namespace turnstile::fault {
namespace {

TEST(CheckerTest, NothingIsWrongWithNothing) { EXPECT_EQ(ChecksOf({}), Checks{}); }

TEST(HistoryTest, IsReadAsItWasWritten) {
  Operation odd = OnSeveral(As(Sharing::kLimit, 7, Granted(1, 10, 0, 1, 5, 6)));
  odd.retry = true;
  odd.reentrant = true;
  odd.session = true;
  odd.floor = 9;
  odd.linger = 3;
  odd.server = 4;
  odd.weight = 3;
  odd.max_line = 8;
  odd.max_hold = 11;
  odd.notified = true;
  odd.bound = true;
  odd.queued = 2;
  Mark mark = During(Mark::Kind::kForced, 1, 2, 3);
  mark.what = "a DEL of all";
  const History history{{odd, Released(2, 3, 4, Answer::kLost), SaidToBeLost(2, 3, 4)}, {mark}};
  std::stringstream text;
  Write(history, text);
  const std::string written = text.str();
  const History read = ReadHistory(text);
  std::stringstream again;
  Write(read, again);
  EXPECT_EQ(again.str(), written);
  EXPECT_EQ(read.marks[0].what, mark.what);
  EXPECT_EQ(ToText(read.operations[0]), ToText(odd));
}

TEST(HistoryTest, IsReadWithItsName) {
  std::stringstream one;
  WriteNamed("a name", {{Released(2, 3, 4)}, {}}, one);
  EXPECT_EQ(ReadHistory(one).operations.size(), 1U);
  std::stringstream two;
  WriteNamed("first", {{Released(2, 3, 4)}, {}}, two);
  WriteNamed("second", {}, two);
  EXPECT_THROW(ReadHistory(two), std::runtime_error);
}

TEST(HistoryTest, NonsenseIsRefused) {
  for (const char* line :
       {"op acquire token", "{}", R"({"type":"operation"})", R"({"type":"mark","kind":"lossy"})",
        R"({"type":"mark","kind":"gone","begin_us":1,"end_us":2})", R"({"type":"story"})"}) {
    std::istringstream nonsense(line);
    EXPECT_THROW(ReadHistory(nonsense), std::runtime_error) << line;
  }
}

TEST(StoryTest, TellsWhatIsNearAndPointsItOut) {
  History history{{Granted(1, 10, 0, 1), Granted(2, 20, 500, 501)},
                  {During(Mark::Kind::kLossy, 300, 310)}};
  for (uint32_t i = 0; i < 100; i++) {
    history.operations.push_back(Null(100 + i, 2000 + i, 2000 + i));
  }
  const std::vector<Violation> violations = Check(history).violations;
  ASSERT_EQ(violations.size(), 1U);
  const std::string story = Story(history, violations[0], 5);
  EXPECT_NE(story.find("  >> 0.000 ms to 1.000 ms: owner 1"), std::string::npos) << story;
  EXPECT_NE(story.find("  >> 500.000 ms to 501.000 ms: owner 2"), std::string::npos) << story;
  EXPECT_NE(story.find("lossy"), std::string::npos) << story;
  EXPECT_EQ(std::count(story.begin(), story.end(), '\n'), 6) << story;
}

}  // namespace
}  // namespace turnstile::fault
