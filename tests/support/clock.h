// The wall clock of one server, moved while it runs.
//
//   ClockShift clock;
//   Server server({.environment = clock.environment()});
//   Client client = server.Connect();
//   clock.Set(-std::chrono::seconds{5}, client);  // from now on it lives five seconds in the past
//
// Only the wall clock moves. What the server measures with its monotonic clock (its event loop, the
// end of its sleep) goes on undisturbed, and the test's own clocks do too.

#ifndef TURNSTILE_TESTS_SUPPORT_CLOCK_H_
#define TURNSTILE_TESTS_SUPPORT_CLOCK_H_

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "support/client.h"

namespace turnstile::testing {

class ClockShift {
 public:
  ClockShift();   // not shifted
  ~ClockShift();  // a server that still runs keeps the last shift
  ClockShift(const ClockShift&) = delete;
  ClockShift& operator=(const ClockShift&) = delete;

  // How far the clock of the server behind `client` is ahead of the true one (behind it, if
  // negative). Returns when the server has seen it: Valkey 9 looks at the wall clock only once a
  // millisecond and counts the processor's ticks meanwhile.
  void Set(std::chrono::microseconds ahead, Client& client);

  // For ServerOptions. Counts for every life of the server.
  std::vector<std::string> environment() const;

 private:
  std::string path_;
  int64_t* shift_ = nullptr;  // mapped, as in the server
};

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_SUPPORT_CLOCK_H_
