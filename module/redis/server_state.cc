#include "redis/server_state.h"

#include "redis/cluster.h"

namespace turnstile {
namespace {

bool HasListeners() {
  if (InCluster() || (RedisModule_GetContextFlags(nullptr) & REDISMODULE_CTX_FLAGS_AOF) != 0) {
    return true;
  }
  RedisModuleServerInfoData* info = RedisModule_GetServerInfo(nullptr, "replication");
  const auto count = [info](const char* field) {
    int error = REDISMODULE_OK;
    const long long value = RedisModule_ServerInfoGetFieldSigned(info, field, &error);
    return error == REDISMODULE_OK ? value : 1;  // what is not told may be
  };
  const bool any = count("connected_slaves") > 0 || count("repl_backlog_active") > 0;
  RedisModule_FreeServerInfo(nullptr, info);
  return any;
}

}  // namespace

Source ServerState::Ask(RedisModuleCtx* ctx) {
  const int flags = RedisModule_GetContextFlags(ctx);
  if ((flags & REDISMODULE_CTX_FLAGS_REPLICATED) != 0) return Source::kObeyed;
  // The node from which a slot is moved here in one step: it knows what it decided.
  if (MustObeyClient(ctx)) return Source::kObeyed;
  // Only the AOF runs commands while loading; a replica that loads asynchronously (swapdb) serves
  // clients meanwhile, and reads no AOF.
  const int loading = REDISMODULE_CTX_FLAGS_LOADING | REDISMODULE_CTX_FLAGS_ASYNC_LOADING;
  if ((flags & loading) == REDISMODULE_CTX_FLAGS_LOADING) return Source::kObeyed;
  if ((flags & REDISMODULE_CTX_FLAGS_SLAVE) != 0) return Source::kReplica;
  only_callers_ = (flags & loading) == 0 && !InCluster();
  return Source::kCaller;
}

bool ServerState::LookForListeners(Instant now) {
  constexpr Millis kEvery{1000};
  nobody_listens_ = !HasListeners();
  look_again_ = now + kEvery;
  return !nobody_listens_;
}

void ServerState::LookForModules(RedisModuleCtx* ctx) {
  RedisModuleCallReply* modules = RedisModule_Call(ctx, "MODULE", "c", "LIST");
  // We are not in the list yet. What is not told may be.
  has_other_modules_ = modules == nullptr || RedisModule_CallReplyLength(modules) > 0;
  if (modules != nullptr) RedisModule_FreeCallReply(modules);
}

ServerState& TheServer() {
  static constinit ServerState state;
  return state;
}

}  // namespace turnstile
