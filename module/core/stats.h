// What the server counts and measures for its operators.
//
// Counting must cost nothing worth mentioning: a counter is one addition, a duration is one
// addition in a table. Everything that takes thought (percentiles, shares) is computed when
// somebody asks.

#ifndef TURNSTILE_CORE_STATS_H_
#define TURNSTILE_CORE_STATS_H_

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "core/types.h"

namespace turnstile {

// How long things took. Its size is fixed: durations below 32 ms are counted one by one, longer
// ones in buckets of at most a sixteenth of their length, up to more than the longest lease and
// wait.
class Histogram {
 public:
  void Add(Millis duration) {
    const auto ms = static_cast<uint64_t>(std::max(duration, Millis{0}).count());
    ++counts_[BucketOf(ms)];
    if (ms > longest_) longest_ = ms;
  }

  uint64_t count() const;
  Millis longest() const { return Millis{static_cast<int64_t>(longest_)}; }

  // The least duration, as exact as the buckets are, that at least `share` of all did not exceed:
  // 0.99 gives the 99th percentile. Never less than the truth, never more than longest(). Zero if
  // nothing was added.
  Millis AtMost(double share) const;

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

// Since the server started, or since they were reset. What is asked for is counted by requests,
// what is given up or lost by locks.
struct Stats {
  uint64_t acquired_at_once = 0;  // granted to somebody who did not hold the lock
  uint64_t handed_over = 0;       // granted to somebody who had waited
  uint64_t asked_again = 0;       // by a holder, and granted
  uint64_t refused = 0;           // answered null at once
  uint64_t waited = 0;            // began to wait
  uint64_t timed_out = 0;         // waited in vain
  uint64_t waits_cancelled = 0;   // by a LOCK.RELEASE of their owners
  uint64_t deadlocks = 0;         // refused, because the wait would have closed a cycle
  uint64_t wait_limited = 0;      // refused, because too many waited
  uint64_t released = 0;          // by their owners
  uint64_t stale_releases = 0;    // answered 0
  uint64_t touched = 0;
  uint64_t stale_touches = 0;   // answered 0
  uint64_t expired = 0;         // their leases ran out
  uint64_t evicted = 0;         // the server needed their memory
  uint64_t forced = 0;          // somebody removed or replaced the key
  uint64_t sessions_ended = 0;  // their connections closed
  uint64_t undelivered = 0;     // grants taken back, because the client was gone
  uint64_t fenced_passed = 0;   // commands after THEN that were run,
  uint64_t fenced_refused = 0;  // and that were not
  Histogram waits;              // of those who were served or timed out
  Histogram holds;

  // What share of the requests of those who did not hold the lock had to wait or was refused, for
  // whatever reason that lies in others.
  double Contention() const;
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_STATS_H_
