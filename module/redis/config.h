// What operators can set: turnstile.* in CONFIG and redis.conf, or without that prefix as arguments
// of the module, each name followed by its value.

#ifndef TURNSTILE_REDIS_CONFIG_H_
#define TURNSTILE_REDIS_CONFIG_H_

#include <optional>
#include <span>
#include <string>

#include "redis/redis_api.h"

namespace turnstile {

// Takes the arguments of the module for defaults: what redis.conf says goes before them. Returns
// what is wrong with them, if anything is.
std::optional<std::string> TakeArguments(std::span<RedisModuleString*> args);

bool RegisterConfig(RedisModuleCtx* ctx);

// All settings and their values, for the log.
std::string DescribeSettings();

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_CONFIG_H_
