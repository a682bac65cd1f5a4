// The Redis type `turnstile`: the value of a key that stores a lock.

#ifndef TURNSTILE_REDIS_LOCK_TYPE_H_
#define TURNSTILE_REDIS_LOCK_TYPE_H_

#include "redis/server.h"

namespace turnstile {

bool RegisterLockType(RedisModuleCtx* ctx);

// The name of the type in TYPE and SCAN … TYPE.
inline constexpr const char* kTypeName = "turnstile";

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_LOCK_TYPE_H_
