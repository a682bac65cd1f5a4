// INFO turnstile: what operators read.

#ifndef TURNSTILE_REDIS_INFO_H_
#define TURNSTILE_REDIS_INFO_H_

#include "redis/redis_api.h"

namespace turnstile {

bool RegisterInfo(RedisModuleCtx* ctx);

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_INFO_H_
