// The Redis type `turnstile`: how a lock lives in a key.

#ifndef TURNSTILE_REDIS_LOCK_TYPE_H_
#define TURNSTILE_REDIS_LOCK_TYPE_H_

#include "redis/redis_api.h"

namespace turnstile {

bool RegisterLockType(RedisModuleCtx* ctx);

// The name of the type, as TYPE and SCAN … TYPE know it.
inline constexpr const char* kTypeName = "turnstile";

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_LOCK_TYPE_H_
