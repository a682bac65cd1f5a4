// INFO turnstile: metrics for operators.

#ifndef TURNSTILE_REDIS_INFO_H_
#define TURNSTILE_REDIS_INFO_H_

#include "redis/server.h"

namespace turnstile {

bool RegisterInfo(RedisModuleCtx* ctx);

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_INFO_H_
