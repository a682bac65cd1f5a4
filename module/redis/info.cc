#include "redis/info.h"

#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>

#include "core/stats.h"
#include "redis/redis_host.h"

namespace turnstile {
namespace {

struct Counter {
  const char* name;
  uint64_t Stats::*value;
};

// docs/operations.md explains each of them.
constexpr Counter kCounters[] = {
    {"acquired_immediately", &Stats::acquired_immediately},
    {"acquired_after_wait", &Stats::acquired_after_wait},
    {"reacquired", &Stats::reacquired},
    {"rejected", &Stats::rejected},
    {"waits", &Stats::waits},
    {"wait_timeouts", &Stats::wait_timeouts},
    {"waits_cancelled", &Stats::waits_cancelled},
    {"deadlocks", &Stats::deadlocks},
    {"rejected_wait_limit", &Stats::rejected_wait_limit},
    {"rejected_line_full", &Stats::rejected_line_full},
    {"released", &Stats::released},
    {"stale_releases", &Stats::stale_releases},
    {"touched", &Stats::touched},
    {"stale_touches", &Stats::stale_touches},
    {"expired", &Stats::expired},
    {"evicted", &Stats::evicted},
    {"forced", &Stats::forced},
    {"session_ended", &Stats::session_ended},
    {"undelivered", &Stats::undelivered},
    {"fence_passed", &Stats::fence_passed},
    {"fence_rejected", &Stats::fence_rejected},
};

void AddPercentiles(RedisModuleInfoCtx* info, const std::string& what, const Histogram& took) {
  constexpr std::pair<const char*, double> kPercentiles[] = {
      {"_p50_ms", 0.5}, {"_p99_ms", 0.99}, {"_p999_ms", 0.999}};
  for (const auto& [name, quantile] : kPercentiles) {
    RedisModule_InfoAddFieldLongLong(info, (what + name).c_str(),
                                     took.Percentile(quantile).count());
  }
  RedisModule_InfoAddFieldLongLong(info, (what + "_max_ms").c_str(), took.longest().count());
}

void Info(RedisModuleInfoCtx* info, int for_crash_report) {
  Engine& engine = TheInstance().engine;
  if (for_crash_report == 0) engine.PublishPending();
  const Stats& stats = engine.stats();
  const FineInstant now = WallNow();

  RedisModule_InfoAddSection(info, "state");
  RedisModule_InfoAddFieldULongLong(info, "locks", engine.CountLocks());
  RedisModule_InfoAddFieldULongLong(info, "waiters", engine.waiting().blocked());
  RedisModule_InfoAddFieldULongLong(info, "queued", engine.waiting().places());
  RedisModule_InfoAddFieldULongLong(info, "contended_locks", engine.queue().queues());
  RedisModule_InfoAddFieldCString(info, "subscriptions",
                                  TheInstance().host.DescribeSubscriptions().c_str());

  RedisModule_InfoAddSection(info, "counters");
  RedisModule_InfoAddFieldULongLong(info, "acquired",
                                    stats.acquired_immediately + stats.acquired_after_wait);
  for (const Counter& counter : kCounters) {
    RedisModule_InfoAddFieldULongLong(info, counter.name, stats.*counter.value);
  }
  char percent[16];
  std::snprintf(percent, sizeof(percent), "%.2f", 100 * stats.Contention());
  RedisModule_InfoAddFieldCString(info, "contention_percent", percent);

  RedisModule_InfoAddSection(info, "latencies");
  AddPercentiles(info, "wait", stats.wait_times);
  AddPercentiles(info, "hold", stats.hold_times);

  const TokenClock& clock = engine.tokens().clock();
  RedisModule_InfoAddSection(info, "clock");
  RedisModule_InfoAddFieldULongLong(info, "last_token", clock.reading().value);
  RedisModule_InfoAddFieldLongLong(info, "clock_lead_ms",
                                   std::chrono::floor<Millis>(clock.LeadAt(now)).count());
  RedisModule_InfoAddFieldLongLong(info, "grace_left_ms",
                                   engine.tokens().GraceLeft(ToInstant(now)).count());
}

}  // namespace

bool RegisterInfo(RedisModuleCtx* ctx) {
  return RedisModule_RegisterInfoFunc(ctx, Info) == REDISMODULE_OK;
}

}  // namespace turnstile
