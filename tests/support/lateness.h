// Whether the module does something by itself, when its time has come, or only when the server's
// cron runs. Milliseconds cannot tell on a busy machine; so the cron runs once a second here, and
// what waits for it is late by half a second in the median. (The benchmark measures milliseconds.)

#ifndef TURNSTILE_TESTS_SUPPORT_LATENESS_H_
#define TURNSTILE_TESTS_SUPPORT_LATENESS_H_

#include <algorithm>
#include <iostream>
#include <string_view>
#include <vector>

#include "support/client.h"

namespace turnstile::testing {

class Lateness {
 public:
  explicit Lateness(Client& client) : client_(client) { client_.Do("CONFIG", "SET", "hz", 1); }
  ~Lateness() { client_.Do("CONFIG", "SET", "hz", 10); }
  Lateness(const Lateness&) = delete;
  Lateness& operator=(const Lateness&) = delete;

  void Add(double milliseconds) { late_ms_.push_back(milliseconds); }

  // Requires that something was added; prints it.
  bool IsLessThanCron(std::string_view what) {
    std::sort(late_ms_.begin(), late_ms_.end());
    const double median = late_ms_[late_ms_.size() / 2];
    std::cout << what << " came " << late_ms_.front() << " to " << late_ms_.back()
              << " ms late, median " << median << '\n';
    constexpr double kHalfOfMedianWithCron = 250;
    return median < kHalfOfMedianWithCron;
  }
  double least() const { return *std::min_element(late_ms_.begin(), late_ms_.end()); }

 private:
  Client& client_;
  std::vector<double> late_ms_;
};

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_SUPPORT_LATENESS_H_
