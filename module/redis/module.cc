// OnLoad, and nothing else: each room registers its own things.

#include <string>

#include "redis/cluster.h"
#include "redis/command_table.h"
#include "redis/config.h"
#include "redis/deferred.h"
#include "redis/info.h"
#include "redis/lock_type.h"
#include "redis/redis_api.h"

namespace turnstile {
namespace {

int Refuse(RedisModuleCtx* ctx, const std::string& why) {
  RedisModule_Log(ctx, "warning", "turnstile %s cannot be loaded: %s", TURNSTILE_VERSION,
                  why.c_str());
  return REDISMODULE_ERR;
}

int OnLoad(RedisModuleCtx* ctx, int argc) {
  if (!InitRedisApi(ctx, "turnstile", TURNSTILE_VERSION_NUMBER)) return REDISMODULE_ERR;
  const Engine engine = FindEngine(ctx);
  if (!engine.IsKnown()) {
    return Refuse(ctx, "it needs Redis 7.0, Valkey 7.2, Redict 7.3 or later, and this is " +
                           engine.Describe());
  }
  if (argc > 0) {
    return Refuse(ctx, "it takes no module arguments; set turnstile.* in the configuration");
  }
  const bool atomic_slots = MovesSlotsAtomically(engine);
  RedisModule_SetModuleOptions(ctx, REDISMODULE_OPTIONS_HANDLE_IO_ERRORS |
                                        REDISMODULE_OPTIONS_HANDLE_REPL_ASYNC_LOAD |
                                        REDISMODULE_OPTION_NO_IMPLICIT_SIGNAL_MODIFIED |
                                        (atomic_slots ? kOptionAtomicSlotMigration : 0));
  if (!RegisterLockType(ctx)) return Refuse(ctx, "the type turnstile is taken");
  if (!RegisterCommands(ctx)) return Refuse(ctx, "a LOCK command is taken");
  if (!RegisterConfig(ctx)) return Refuse(ctx, "a turnstile.* setting is wrong");
  if (!RegisterInfo(ctx) || !SubscribeToEvents(ctx) || !RegisterCluster(ctx, engine)) {
    return Refuse(ctx, "the server lacks events");
  }
  RedisModule_Log(ctx, "notice", "turnstile %s on %s%s", TURNSTILE_VERSION,
                  engine.Describe().c_str(), engine.Remark());
  return REDISMODULE_OK;
}

}  // namespace
}  // namespace turnstile

extern "C" __attribute__((visibility("default"))) int RedisModule_OnLoad(
    RedisModuleCtx* ctx, RedisModuleString** /*argv*/, int argc) {
  return turnstile::OnLoad(ctx, argc);
}
