// Histograms of durations, and the share of contended requests.

#include "core/stats.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace turnstile {
namespace {

TEST(Histogram, EmptyHistogramReportsZero) {
  const Histogram histogram;
  EXPECT_EQ(histogram.count(), 0U);
  EXPECT_EQ(histogram.longest(), Millis{0});
  for (const double quantile : {0.0, 0.5, 0.999, 1.0}) {
    EXPECT_EQ(histogram.Percentile(quantile), Millis{0});
  }
}

TEST(Histogram, OneDurationIsEveryPercentile) {
  for (const int64_t ms : {0LL, 1LL, 31LL, 32LL, 33LL, 1000LL, 86'400'000LL, 315'360'000'000LL}) {
    Histogram histogram;
    histogram.Add(Millis{ms});
    EXPECT_EQ(histogram.count(), 1U);
    for (const double quantile : {0.0, 0.5, 0.999, 1.0}) {
      EXPECT_EQ(histogram.Percentile(quantile), Millis{ms}) << quantile;
    }
  }
}

TEST(Histogram, ShortDurationsAreExact) {
  Histogram histogram;
  for (int64_t ms = 0; ms < 32; ++ms) histogram.Add(Millis{ms});
  for (int64_t ms = 0; ms < 32; ++ms) {
    EXPECT_EQ(histogram.Percentile(static_cast<double>(ms + 1) / 32), Millis{ms});
  }
}

TEST(Histogram, NegativeDurationCountsAsZero) {
  Histogram histogram;
  histogram.Add(Millis{-5});
  EXPECT_EQ(histogram.count(), 1U);
  EXPECT_EQ(histogram.longest(), Millis{0});
}

TEST(Histogram, AcceptsLongestDurations) {
  Histogram histogram;
  histogram.Add(Millis{std::numeric_limits<int64_t>::max()});
  histogram.Add(kMaxInstant - kMinInstant);
  histogram.Add(Millis{7});
  EXPECT_EQ(histogram.count(), 3U);
  EXPECT_EQ(histogram.longest(), Millis{std::numeric_limits<int64_t>::max()});
  EXPECT_EQ(histogram.Percentile(0.3), Millis{7});
}

// Compared with a sorted list: never below the true value, and at most a sixteenth above it.
TEST(Histogram, PercentilesAreWithinSixteenth) {
  std::mt19937_64 random(7);  // NOLINT(cert-msc32-c,cert-msc51-cpp): reproducible
  for (int round = 0; round < 200; ++round) {
    Histogram histogram;
    std::vector<int64_t> sorted;
    const size_t count = 1 + random() % 2000;
    for (size_t i = 0; i < count; ++i) {
      const auto ms = static_cast<int64_t>(random() >> (24 + random() % 40));
      histogram.Add(Millis{ms});
      sorted.push_back(ms);
    }
    std::sort(sorted.begin(), sorted.end());
    EXPECT_EQ(histogram.count(), count);
    EXPECT_EQ(histogram.longest().count(), sorted.back());
    for (const double quantile : {0.01, 0.5, 0.9, 0.99, 0.999, 1.0}) {
      const auto rank = static_cast<size_t>(std::ceil(quantile * static_cast<double>(count)));
      const int64_t truth = sorted[std::max<size_t>(rank, 1) - 1];
      const int64_t reported = histogram.Percentile(quantile).count();
      EXPECT_GE(reported, truth) << quantile;
      EXPECT_LE(reported, truth + truth / 16) << quantile;
    }
  }
}

TEST(Contention, IsShareOfContendedRequests) {
  Stats stats;
  EXPECT_EQ(stats.Contention(), 0);
  stats.acquired_immediately = 95;
  EXPECT_EQ(stats.Contention(), 0);
  stats.rejected = 3;
  stats.waits = 2;
  EXPECT_DOUBLE_EQ(stats.Contention(), 0.05);
  stats.acquired_after_wait = 2;  // of the requests that waited
  stats.reacquired = 1000;
  EXPECT_DOUBLE_EQ(stats.Contention(), 0.05);
  stats.deadlocks = 2;
  stats.rejected_wait_limit = 3;
  EXPECT_DOUBLE_EQ(stats.Contention(), 10.0 / 105);
  stats.acquired_immediately = 0;
  EXPECT_EQ(stats.Contention(), 1);
}

}  // namespace
}  // namespace turnstile
