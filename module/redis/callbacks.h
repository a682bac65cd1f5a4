// Where the server enters the module other than by a command: its events, translated into calls of
// the engine.

#ifndef TURNSTILE_REDIS_CALLBACKS_H_
#define TURNSTILE_REDIS_CALLBACKS_H_

#include "redis/redis_api.h"
#include "redis/redis_host.h"

namespace turnstile {

HostCallbacks CallbacksForHost();

// False: the server lacks events.
bool SubscribeToEvents(RedisModuleCtx* ctx, const EngineVersion& engine);

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_CALLBACKS_H_
