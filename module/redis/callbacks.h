// The server's entry points other than commands: its events, translated into calls of the engine.

#ifndef TURNSTILE_REDIS_CALLBACKS_H_
#define TURNSTILE_REDIS_CALLBACKS_H_

#include "redis/redis_host.h"
#include "redis/server.h"

namespace turnstile {

HostCallbacks CallbacksForHost();
EventCallbacks CallbacksForEvents();

// Begins to work for the server. Returns false if the server lacks events that are needed.
bool Start(RedisModuleCtx* ctx);

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_CALLBACKS_H_
