// What operators can set, as turnstile.* in CONFIG, redis.conf and on the command line.

#ifndef TURNSTILE_REDIS_CONFIG_H_
#define TURNSTILE_REDIS_CONFIG_H_

#include "core/request.h"
#include "redis/redis_api.h"

namespace turnstile {

// turnstile.max-lease-ms
Limits CurrentLimits();

// turnstile.token-margin-ms
Millis TokenMargin();

// turnstile.failover-grace-ms
Millis FailoverGrace();

// turnstile.max-waiters
size_t MaxWaiters();

bool RegisterConfig(RedisModuleCtx* ctx);

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_CONFIG_H_
