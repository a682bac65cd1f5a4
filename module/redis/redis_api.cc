#define TURNSTILE_DEFINES_REDIS_API
#include "redis/redis_api.h"

#include <algorithm>
#include <ctime>

namespace turnstile {
namespace {

// Redis 7.2 and later.
long long (*server_microseconds)() = nullptr;

}  // namespace

bool InitRedisApi(RedisModuleCtx* ctx, const char* module_name, int module_version) {
  if (RedisModule_Init(ctx, module_name, module_version, REDISMODULE_APIVER_1) != REDISMODULE_OK) {
    return false;
  }
  RedisModule_GetApi("RedisModule_Microseconds", static_cast<void*>(&server_microseconds));
  return true;
}

std::string EngineName() {
  // Those that descend from Redis have each call under their own name too.
  std::string name = "Redis";
  for (const char* descendant : {"Valkey", "Redict"}) {
    const std::string call = std::string(descendant) + "Module_GetServerVersion";
    void* unused = nullptr;
    if (RedisModule_GetApi(call.c_str(), static_cast<void*>(&unused)) == REDISMODULE_OK) {
      name = descendant;
    }
  }
  const auto version = static_cast<unsigned>(RedisModule_GetServerVersion());
  return name + ' ' + std::to_string(version >> 16) + '.' + std::to_string(version >> 8 & 0xff) +
         '.' + std::to_string(version & 0xff);
}

FineInstant WallNow() {
  Micros now{};
  if (server_microseconds != nullptr) {
    now = Micros{server_microseconds()};
  } else {
    timespec time{};
    clock_gettime(CLOCK_REALTIME, &time);
    now = std::chrono::seconds{time.tv_sec} +
          std::chrono::floor<Micros>(std::chrono::nanoseconds{time.tv_nsec});
  }
  return FineInstant{std::max(now, Micros{0})};
}

Source SourceOf(RedisModuleCtx* ctx) {
  const int flags = RedisModule_GetContextFlags(ctx);
  if ((flags & REDISMODULE_CTX_FLAGS_REPLICATED) != 0) return Source::kObeyed;
  // Only the AOF runs commands while loading; a replica that loads asynchronously (swapdb) serves
  // clients meanwhile, and reads no AOF.
  const int loading = REDISMODULE_CTX_FLAGS_LOADING | REDISMODULE_CTX_FLAGS_ASYNC_LOADING;
  if ((flags & loading) == REDISMODULE_CTX_FLAGS_LOADING) return Source::kObeyed;
  return (flags & REDISMODULE_CTX_FLAGS_SLAVE) != 0 ? Source::kReplica : Source::kCaller;
}

namespace {

int without_connection = 0;

}  // namespace

NoConnection::NoConnection() { ++without_connection; }
NoConnection::~NoConnection() { --without_connection; }

std::optional<uint64_t> ConnectionOf(RedisModuleCtx* ctx) {
  if (without_connection > 0) return std::nullopt;
  // What may not block is called by a script, a module or a transaction. Only the last has a
  // connection.
  const int flags = RedisModule_GetContextFlags(ctx);
  const int called = flags & (REDISMODULE_CTX_FLAGS_DENY_BLOCKING | REDISMODULE_CTX_FLAGS_LUA |
                              REDISMODULE_CTX_FLAGS_MULTI);
  if (called != 0 &&
      called != (REDISMODULE_CTX_FLAGS_DENY_BLOCKING | REDISMODULE_CTX_FLAGS_MULTI)) {
    return std::nullopt;
  }
  // On most servers the id of a client without connection cannot be looked up; on Valkey 9 it can.
  const uint64_t id = RedisModule_GetClientId(ctx);
  if (RedisModule_GetClientInfoById(nullptr, id) != REDISMODULE_OK) return std::nullopt;
  return id;
}

}  // namespace turnstile
