// The commands as data. Registration, COMMAND DOCS, COMMAND GETKEYS, redis-cli's hints and
// LOCK.HELP all come from this one table; tests compare docs/commands.md with it.

#ifndef TURNSTILE_REDIS_COMMAND_TABLE_H_
#define TURNSTILE_REDIS_COMMAND_TABLE_H_

#include <string>
#include <vector>

#include "redis/redis_api.h"

namespace turnstile {

bool RegisterCommands(RedisModuleCtx* ctx);

// Does nothing, but is checked by the server as LOCK.ACQUIRE is: whether a grant that no command
// carries is allowed now can be asked by calling it.
inline constexpr const char* kProbeCommand = "LOCK.PROBE";

// The command whose rights a waiter needs.
inline constexpr const char* kAcquireCommand = "LOCK.ACQUIRE";

// The command whose rights decide what a user is told about a lock.
inline constexpr const char* kInfoCommand = "LOCK.INFO";

// For each command that callers may use, its grammar and, indented, what it does.
std::vector<std::string> HelpLines();

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_COMMAND_TABLE_H_
