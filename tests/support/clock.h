// The wall clock of one server, moved while it runs.
//
//   ClockShift clock;
//   Server server({.environment = clock.environment()});
//   clock.Set(-std::chrono::seconds{5});  // from now on the server lives five seconds in the past
//
// Only the wall clock moves. What the server measures with its monotonic clock (its event loop, the
// end of its sleep) goes on undisturbed, and the test's own clocks do too.

#ifndef TURNSTILE_TESTS_SUPPORT_CLOCK_H_
#define TURNSTILE_TESTS_SUPPORT_CLOCK_H_

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

namespace turnstile::testing {

class ClockShift {
 public:
  ClockShift();   // not shifted
  ~ClockShift();  // a server that still runs keeps the last shift
  ClockShift(const ClockShift&) = delete;
  ClockShift& operator=(const ClockShift&) = delete;

  // How far the server's clock is ahead of the true one (behind it, if negative), at once.
  void Set(std::chrono::microseconds ahead);

  // For ServerOptions. Counts for every life of the server.
  std::vector<std::string> environment() const;

 private:
  std::string path_;
  int64_t* shift_ = nullptr;  // mapped, as in the server
};

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_SUPPORT_CLOCK_H_
