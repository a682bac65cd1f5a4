// libFuzzer: a storm over the engine that ships, on a primary and its replica, in which the input
// chooses what happens (tests/sim/storm.h): what clients ask for, what strangers and servers do to
// the keys, when time passes. The state is checked after every step.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "sim/storm.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr int kMostSteps = 100;
  turnstile::sim::ByteChoices choices({data, size});
  turnstile::sim::Storm storm(choices);
  const std::string wrong = storm.Run(kMostSteps);
  if (wrong.empty()) return 0;
  std::fprintf(stderr, "%sbroken: %s\n", storm.story().c_str(), wrong.c_str());
  std::abort();
}
