// The settings of operators: turnstile.* in CONFIG and redis.conf, or without that prefix as
// arguments of the module, each name followed by its value.

#ifndef TURNSTILE_REDIS_CONFIG_H_
#define TURNSTILE_REDIS_CONFIG_H_

#include <optional>
#include <span>
#include <string>

#include "redis/server.h"

namespace turnstile {

// Uses the arguments of the module as defaults; redis.conf takes precedence over them. Returns an
// error message if they are not valid.
std::optional<std::string> TakeArguments(std::span<RedisModuleString*> args);

bool RegisterConfig(RedisModuleCtx* ctx);

// All settings and their values, for the log.
std::string DescribeSettings();

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_CONFIG_H_
