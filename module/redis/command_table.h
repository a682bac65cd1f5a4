// The commands as data. Registration, COMMAND DOCS, COMMAND GETKEYS, redis-cli's hints and
// LOCK.HELP all come from this one table; tests compare docs/commands.md with it.

#ifndef TURNSTILE_REDIS_COMMAND_TABLE_H_
#define TURNSTILE_REDIS_COMMAND_TABLE_H_

#include "redis/redis_api.h"

namespace turnstile {

bool RegisterCommands(RedisModuleCtx* ctx);

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_COMMAND_TABLE_H_
