// The simulator itself: schedules follow from their seeds, and they go where mistakes could be.

#include "fault/simulator/simulator.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "fault/checker/checker.h"
#include "fault/checker/exemptions.h"

namespace turnstile::fault {
namespace {

std::string HistoryOf(Simulator& simulator, uint64_t seed) {
  simulator.Run(seed);
  std::ostringstream text;
  Write(simulator.history(), text);
  return text.str();
}

TEST(SimulatorTest, ASeedGivesOneHistory) {
  Simulator simulator;
  std::vector<std::string> first;
  for (uint64_t seed = 1; seed <= 100; ++seed) first.push_back(HistoryOf(simulator, seed));
  for (uint64_t seed = 100; seed > 0; --seed) {
    EXPECT_EQ(HistoryOf(simulator, seed), first[seed - 1]) << "seed " << seed;
  }
  EXPECT_NE(first[0], first[1]);
}

TEST(SimulatorTest, NothingIsWrongAndEverythingHappens) {
  Simulator simulator;
  constexpr uint64_t kSchedules = 4'000;
  for (uint64_t seed = 1; seed <= kSchedules; ++seed) {
    for (const Violation& violation : simulator.Run(seed)) {
      ADD_FAILURE() << "seed " << seed << ": " << Story(simulator.history(), violation);
    }
  }
  for (size_t i = 0; i < kThings; ++i) {
    EXPECT_GT(simulator.tally().at(i), 0U) << NameOf(static_cast<Thing>(i));
  }
}

// If a seed shows nothing any more, others made other choices: tests/fault/checker/refresh-seeds
// finds new ones.
TEST(SimulatorTest, EveryExemptionIsForcedByItsSeed) {
  Simulator simulator;
  for (const ExemptionRow& row : ExemptionTable()) {
    if (row.seed == 0) continue;  // ExemptionsTest has a history for it
    EXPECT_TRUE(simulator.Run(row.seed).empty()) << row.name << ", seed " << row.seed;
    const std::vector<Violation> violations = simulator.JudgeWithout(row.exemption);
    EXPECT_FALSE(violations.empty()) << row.name << ", seed " << row.seed;
    for (const Violation& violation : violations) {
      EXPECT_NE(row.checks.find(violation.check), std::string_view::npos)
          << row.name << ", seed " << row.seed << ": " << violation.check;
    }
  }
}

}  // namespace
}  // namespace turnstile::fault
