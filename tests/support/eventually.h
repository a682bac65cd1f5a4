// Waiting. No test waits for a fixed time and hopes for the best: it states what must become true
// and by when, and continues as soon as it is.
//
//   EXPECT_TRUE(Eventually([&] { return client.Do("EXISTS", "job") == Reply::Int(0); }));

#ifndef TURNSTILE_TESTS_SUPPORT_EVENTUALLY_H_
#define TURNSTILE_TESTS_SUPPORT_EVENTUALLY_H_

#include <poll.h>
#include <time.h>

#include <algorithm>
#include <cerrno>
#include <chrono>

namespace turnstile::testing {

using Milliseconds = std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// How long a test waits for what should happen at once. Long, because it costs time only in a test
// that fails, and a busy machine must not make one fail.
inline constexpr Milliseconds kPatience{15000};

// Waits until `fd` is readable (data, end of file or a pending error); false at the deadline. An fd
// of -1 is never readable: then it only waits.
inline bool WaitReadable(int fd, Clock::time_point deadline) {
  for (;;) {
    const auto left = std::max(deadline - Clock::now(), Clock::duration::zero());
    const auto seconds = std::chrono::floor<std::chrono::seconds>(left);
    const timespec time{seconds.count(), std::chrono::nanoseconds(left - seconds).count()};
    pollfd entry{fd, POLLIN, 0};
    const int ready = ppoll(&entry, 1, &time, nullptr);
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) return false;
    if (left == Clock::duration::zero()) return false;
  }
}

// Sleeps. Only for work that takes time, and to show that something does NOT happen within that
// time, or has not happened too early; otherwise use Eventually().
inline void LetPass(std::chrono::nanoseconds time) { WaitReadable(-1, Clock::now() + time); }

// Polls `predicate` until it holds (true) or the time is over (false). It is called at least once,
// and once more at the deadline.
template <typename Predicate>
bool Eventually(Predicate&& predicate, Milliseconds within = kPatience) {
  const auto deadline = Clock::now() + within;
  for (Milliseconds step{1};; step = std::min(step * 2, Milliseconds{20})) {
    const bool last = Clock::now() >= deadline;
    if (predicate()) return true;
    if (last) return false;
    WaitReadable(-1, std::min(Clock::now() + step, deadline));
  }
}

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_SUPPORT_EVENTUALLY_H_
