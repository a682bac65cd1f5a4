#include "redis/info.h"

#include "redis/tokens.h"
#include "redis/waiters.h"

namespace turnstile {
namespace {

void Info(RedisModuleInfoCtx* info, int /*for_crash_report*/) {
  RedisModule_InfoAddSection(info, "state");
  RedisModule_InfoAddFieldULongLong(info, "waiters", TheWaiters().size());
  const TokenClock& clock = Tokens().clock();
  RedisModule_InfoAddSection(info, "clock");
  RedisModule_InfoAddFieldULongLong(info, "last_token", clock.last().value);
  RedisModule_InfoAddFieldLongLong(info, "clock_lead_ms",
                                   std::chrono::floor<Millis>(clock.LeadAt(WallNow())).count());
  RedisModule_InfoAddFieldLongLong(info, "grace_left_ms",
                                   Tokens().GraceLeft(ToInstant(WallNow())).count());
}

}  // namespace

bool RegisterInfo(RedisModuleCtx* ctx) {
  return RedisModule_RegisterInfoFunc(ctx, Info) == REDISMODULE_OK;
}

}  // namespace turnstile
