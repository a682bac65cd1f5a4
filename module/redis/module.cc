// OnLoad, and nothing else: each room registers its own things.

#include <algorithm>
#include <string>
#include <string_view>

#include "core/request.h"
#include "redis/callbacks.h"
#include "redis/command_table.h"
#include "redis/config.h"
#include "redis/info.h"
#include "redis/instance.h"
#include "redis/lock_type.h"
#include "redis/redis_api.h"

namespace turnstile {

Instance& TheInstance() {
  // Never destroyed: locks are freed and clients wait when the server ends.
  static auto& instance = *new Instance(CallbacksForHost());
  return instance;
}

namespace {

int Refuse(RedisModuleCtx* ctx, const std::string& why) {
  RedisModule_Log(ctx, "warning", "turnstile %s cannot be loaded: %s", TURNSTILE_VERSION,
                  why.c_str());
  return REDISMODULE_ERR;
}

// A lock is a key with a TTL: every policy but noeviction may evict it.
void WarnOfEviction(RedisModuleCtx* ctx) {
  RedisModuleServerInfoData* memory = RedisModule_GetServerInfo(ctx, "memory");
  const char* limit = RedisModule_ServerInfoGetFieldC(memory, "maxmemory");
  const char* policy = RedisModule_ServerInfoGetFieldC(memory, "maxmemory_policy");
  if (limit != nullptr && policy != nullptr && std::string_view(limit) != "0" &&
      std::string_view(policy) != "noeviction") {
    RedisModule_Log(ctx, "warning",
                    "with maxmemory and maxmemory-policy %s the server may evict locks "
                    "that are held: give locks a server with noeviction",
                    policy);
  }
  RedisModule_FreeServerInfo(ctx, memory);
}

void OnConfigChange(RedisModuleCtx* ctx, RedisModuleEvent /*event*/, uint64_t /*change*/,
                    void* data) {
  TheInstance().host.server().InvalidateCache();
  const auto& change = *static_cast<RedisModuleConfigChange*>(data);
  const bool concerns_us = std::any_of(
      change.config_names, change.config_names + change.num_changes, [](const char* name) {
        return IsKeyword(name, "maxmemory") || IsKeyword(name, "maxmemory-policy");
      });
  if (concerns_us) WarnOfEviction(ctx);
}

int OnLoad(RedisModuleCtx* ctx, RedisModuleString** argv, int argc) {
  if (!InitRedisApi(ctx, TURNSTILE_VERSION_NUMBER)) return REDISMODULE_ERR;
  const EngineVersion engine = FindEngine(ctx);
  if (!engine.IsKnown()) {
    return Refuse(ctx, "it needs Redis 7.0, Valkey 7.2, Redict 7.3 or later, and this is " +
                           engine.Describe());
  }
  if (const auto wrong = TakeArguments({argv, static_cast<size_t>(argc)}); wrong.has_value()) {
    return Refuse(ctx, *wrong);
  }
  TheInstance().host.Register(ctx);
  TheInstance().engine.tokens().ProcessStarted(WallNow());
  const bool atomic_slots = MovesSlotsAtomically(engine);
  RedisModule_SetModuleOptions(ctx, REDISMODULE_OPTIONS_HANDLE_IO_ERRORS |
                                        REDISMODULE_OPTIONS_HANDLE_REPL_ASYNC_LOAD |
                                        REDISMODULE_OPTION_NO_IMPLICIT_SIGNAL_MODIFIED |
                                        (atomic_slots ? kOptionAtomicSlotMigration : 0));
  if (!RegisterLockType(ctx)) return Refuse(ctx, "the type turnstile is taken");
  if (!RegisterCommands(ctx)) return Refuse(ctx, "a LOCK command is taken");
  if (!RegisterConfig(ctx)) return Refuse(ctx, "a turnstile.* setting is wrong");
  if (!RegisterInfo(ctx) || !SubscribeToEvents(ctx, engine) ||
      RedisModule_SubscribeToServerEvent(ctx, RedisModuleEvent_Config, OnConfigChange) !=
          REDISMODULE_OK) {
    return Refuse(ctx, "the server lacks events");
  }
  RedisModule_Log(ctx, "notice", "turnstile %s on %s%s: %s", TURNSTILE_VERSION,
                  engine.Describe().c_str(), engine.Remark(), DescribeSettings().c_str());
  WarnOfEviction(ctx);
  return REDISMODULE_OK;
}

}  // namespace
}  // namespace turnstile

extern "C" __attribute__((visibility("default"))) int RedisModule_OnLoad(RedisModuleCtx* ctx,
                                                                         RedisModuleString** argv,
                                                                         int argc) {
  return turnstile::OnLoad(ctx, argv, argc);
}
