#include "sim/storm.h"

#include <gtest/gtest.h>

#include <cstdlib>

namespace turnstile::sim {
namespace {

TEST(StormTest, NothingIsLostAndEverybodyIsAnswered) {
  const char* wanted = std::getenv("TURNSTILE_STORMS");
  const uint64_t storms = wanted == nullptr ? 500 : std::strtoull(wanted, nullptr, 10);
  for (uint64_t seed = 1; seed <= storms; ++seed) {
    SeededChoices choices(seed);
    Storm storm(choices);
    const std::string wrong = storm.Run(120);
    ASSERT_EQ(wrong, "") << "seed " << seed << '\n' << storm.story();
  }
}

}  // namespace
}  // namespace turnstile::sim
