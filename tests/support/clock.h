// Shifts the wall clock of one server while it runs.
//
//   ClockShift clock;
//   Server server({.environment = clock.environment()});
//   Client client = server.Connect();
//   clock.Set(-std::chrono::seconds{5}, client);  // from now on it lives five seconds in the past
//
// Only the wall clock is shifted. The server's monotonic clock (event loop, sleeps) and the test's
// own clocks are not affected.

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
  ~ClockShift();  // a running server keeps the last shift
  ClockShift(const ClockShift&) = delete;
  ClockShift& operator=(const ClockShift&) = delete;

  // Sets how far the clock of the server behind `client` is ahead of the true time (behind it, if
  // negative). Returns when the server has noticed: Valkey 9 reads the wall clock only once a
  // millisecond and counts processor ticks in between.
  void Set(std::chrono::microseconds ahead, Client& client);

  // For ServerOptions. Applies to every start of the server.
  std::vector<std::string> environment() const;

 private:
  std::string path_;
  int64_t* shift_ = nullptr;  // mapped, as in the server
};

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_SUPPORT_CLOCK_H_
