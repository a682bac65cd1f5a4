// OnLoad, and the definition of the instance. Each unit registers its own commands, types and
// events.

#include <cstdlib>
#include <string>

#include "core/check.h"
#include "redis/callbacks.h"
#include "redis/commands.h"
#include "redis/config.h"
#include "redis/info.h"
#include "redis/lock_type.h"
#include "redis/redis_host.h"
#include "redis/server.h"

namespace turnstile {

namespace {

// Created by OnLoad and never destroyed: when the server exits, there are still locks to be freed
// and clients that wait.
Instance* the_instance = nullptr;

}  // namespace

Instance& TheInstance() { return *the_instance; }

// Limited, because what fails once may fail in every command.
void OnCheckFailed(const char* condition, const char* function) {
  constexpr size_t kMaxLogged = 100;
  if (++TheInstance().failed_checks <= kMaxLogged) {
    RedisModule_Log(nullptr, "warning",
                    "turnstile %s: internal error in %s: not (%s); the operation was refused. "
                    "Please report this with the lines above",
                    TURNSTILE_VERSION, function, condition);
  }
#ifdef TURNSTILE_DCHECKS
  std::abort();
#endif
}

namespace {

int Refuse(RedisModuleCtx* ctx, const std::string& why) {
  RedisModule_Log(ctx, "warning", "turnstile %s cannot be loaded: %s", TURNSTILE_VERSION,
                  why.c_str());
  return REDISMODULE_ERR;
}

int OnLoad(RedisModuleCtx* ctx, RedisModuleString** argv, int argc) {
  if (!InitRedisApi(ctx, TURNSTILE_VERSION_NUMBER)) return REDISMODULE_ERR;
  const EngineVersion engine = FindEngine(ctx);
  if (!engine.IsKnown()) {
    return Refuse(ctx, "it requires Redis 7.0, Valkey 7.2, Redict 7.3 or later, and this is " +
                           engine.Describe());
  }
  the_instance = new Instance(CallbacksForHost(), CallbacksForEvents());
  if (const auto wrong = TakeArguments({argv, static_cast<size_t>(argc)}); wrong.has_value()) {
    return Refuse(ctx, *wrong);
  }
  TheInstance().host.Register(ctx, engine);
  const bool atomic_slots = MovesSlotsAtomically(engine);
  RedisModule_SetModuleOptions(ctx, REDISMODULE_OPTIONS_HANDLE_IO_ERRORS |
                                        REDISMODULE_OPTIONS_HANDLE_REPL_ASYNC_LOAD |
                                        REDISMODULE_OPTION_NO_IMPLICIT_SIGNAL_MODIFIED |
                                        (atomic_slots ? kOptionAtomicSlotMigration : 0));
  if (!RegisterLockType(ctx)) {
    return Refuse(ctx, "another module has registered the key type turnstile");
  }
  if (!RegisterCommands(ctx)) {
    return Refuse(ctx, "another module has registered one of the LOCK commands");
  }
  if (!RegisterConfig(ctx)) return Refuse(ctx, "a turnstile.* setting is invalid");
  if (!RegisterInfo(ctx)) return Refuse(ctx, "its INFO section cannot be registered");
  RedisModule_Log(ctx, "notice", "turnstile %s on %s%s: %s", TURNSTILE_VERSION,
                  engine.Describe().c_str(), engine.Remark(), DescribeSettings().c_str());
  return Start(ctx) ? REDISMODULE_OK : Refuse(ctx, "the server lacks an event that it requires");
}

}  // namespace
}  // namespace turnstile

// What Redis and Redict call.
extern "C" __attribute__((visibility("default"))) int RedisModule_OnLoad(RedisModuleCtx* ctx,
                                                                         RedisModuleString** argv,
                                                                         int argc) {
  return turnstile::OnLoad(ctx, argv, argc);
}

// What Valkey calls first. It hands out the same functions under the names of either API, but calls
// a module that has only the other entry point a legacy one in its log.
extern "C" __attribute__((visibility("default"))) int ValkeyModule_OnLoad(RedisModuleCtx* ctx,
                                                                          RedisModuleString** argv,
                                                                          int argc) {
  return turnstile::OnLoad(ctx, argv, argc);
}
