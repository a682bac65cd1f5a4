// The commands: one function for each, which parses, calls the engine and replies, and one table
// that describes them all. Registration, COMMAND DOCS, COMMAND GETKEYS, redis-cli's hints and
// LOCK.HELP are generated from this table; tests compare docs/commands.md with it.

#ifndef TURNSTILE_REDIS_COMMANDS_H_
#define TURNSTILE_REDIS_COMMANDS_H_

#include "redis/server.h"

namespace turnstile {

bool RegisterCommands(RedisModuleCtx* ctx);

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_COMMANDS_H_
