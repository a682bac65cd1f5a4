// Counters and measurements for operators.
//
// Counting must cost next to nothing: a counter is one addition, a duration is one addition in a
// table. Everything that needs computation (percentiles, ratios) is computed when it is requested.

#ifndef TURNSTILE_CORE_STATS_H_
#define TURNSTILE_CORE_STATS_H_

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "core/types.h"

namespace turnstile {

// A histogram of durations of fixed size. Durations below 32 ms are counted exactly, longer ones in
// buckets of at most a sixteenth of their length, up to more than the longest lease and wait.
class Histogram {
 public:
  void Add(Millis duration) {
    const auto ms = static_cast<uint64_t>(std::max(duration, Millis{0}).count());
    ++counts_[BucketOf(ms)];
    if (ms > longest_) longest_ = ms;
  }

  uint64_t count() const;
  Millis longest() const { return Millis{static_cast<int64_t>(longest_)}; }

  // The smallest duration, as exact as the buckets allow, that at least the fraction `quantile` of
  // all durations did not exceed: 0.99 gives the 99th percentile. Never less than the true value,
  // never more than longest(). Zero if nothing was added.
  Millis Percentile(double quantile) const;

 private:
  static constexpr int kExactBits = 5;  // below 2^5 each has its own bucket
  static constexpr size_t kPerOctave = 1U << (kExactBits - 1);
  static constexpr int kMostBits = 40;  // 2^40 ms are 34 years
  static constexpr size_t kBuckets = kPerOctave * (kMostBits - kExactBits + 2);

  static constexpr size_t BucketOf(uint64_t ms) {
    const auto bits = static_cast<int>(std::bit_width(ms));
    if (bits <= kExactBits) return ms;
    if (bits > kMostBits) return kBuckets - 1;
    const int shift = bits - kExactBits;
    return kPerOctave * static_cast<size_t>(shift) + (ms >> shift);
  }
  // The longest duration in a bucket.
  static constexpr uint64_t LastOf(size_t bucket) {
    if (bucket < 2 * kPerOctave) return bucket;
    const size_t shift = bucket / kPerOctave - 1;
    return ((bucket % kPerOctave + kPerOctave + 1) << shift) - 1;
  }

  std::array<uint64_t, kBuckets> counts_{};
  uint64_t longest_ = 0;
};

// Counted since the server started or since the last reset. Requests are counted once, however many
// locks they name; leases that are set, and holds that are given up or lost, are counted one by
// one.
struct Stats {
  uint64_t acquired_immediately = 0;  // granted under a new token, without a wait
  uint64_t acquired_after_wait = 0;   // granted under a new token to a client that waited
  uint64_t reacquired = 0;            // granted to an owner that already held the lock
  uint64_t rejected = 0;              // answered null at once
  uint64_t waits = 0;                 // requests that began to wait
  uint64_t wait_timeouts = 0;         // waits that timed out
  uint64_t waits_cancelled = 0;       // waits ended by a LOCK.RELEASE of their owner
  uint64_t deadlocks = 0;             // rejected: the wait would have closed a cycle
  uint64_t rejected_wait_limit = 0;   // rejected: too many clients were waiting
  uint64_t rejected_line_full = 0;    // answered null at once: the queue was too long for MAXLINE
  uint64_t released = 0;              // by their owners
  uint64_t stale_releases = 0;        // answered 0
  uint64_t touched = 0;               // leases that LOCK.TOUCH set
  uint64_t stale_touches = 0;         // answered 0
  uint64_t expired = 0;               // lost: the lease ended
  uint64_t evicted = 0;               // lost: the server needed memory
  uint64_t forced = 0;                // lost: the key was removed, renamed, replaced or flushed
  uint64_t session_ended = 0;         // lost: the connection closed
  uint64_t undelivered = 0;           // grants taken back, because nobody was there to be told
  uint64_t fence_passed = 0;          // commands after THEN that ran
  uint64_t fence_rejected = 0;        // commands after THEN that did not
  Histogram wait_times;               // of waits that were granted or timed out
  Histogram hold_times;

  // The fraction of requests, by owners that did not hold the lock, that had to wait or were
  // rejected because of others.
  double Contention() const;
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_STATS_H_
