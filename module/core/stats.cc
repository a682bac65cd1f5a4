#include "core/stats.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace turnstile {

uint64_t Histogram::count() const {
  return std::accumulate(counts_.begin(), counts_.end(), uint64_t{0});
}

Millis Histogram::Percentile(double quantile) const {
  const uint64_t all = count();
  const auto wanted =
      std::max(static_cast<uint64_t>(std::ceil(quantile * static_cast<double>(all))), uint64_t{1});
  uint64_t seen = 0;
  for (size_t bucket = 0; bucket < kBuckets; ++bucket) {
    seen += counts_[bucket];
    if (seen < wanted) continue;
    return Millis{static_cast<int64_t>(std::min(LastOf(bucket), longest_))};
  }
  return longest();
}

double Stats::Contention() const {
  const auto contended =
      static_cast<double>(rejected + waits + deadlocks + rejected_wait_limit + rejected_line_full);
  const double all = contended + static_cast<double>(acquired_immediately);
  return all > 0 ? contended / all : 0;
}

}  // namespace turnstile
