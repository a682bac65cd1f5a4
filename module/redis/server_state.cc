#include "redis/server_state.h"

#include <algorithm>
#include <iterator>

namespace turnstile {
Role RoleOf(int context_flags) {
  if ((context_flags & REDISMODULE_CTX_FLAGS_LOADING) != 0) return Role::kLoading;
  return (context_flags & REDISMODULE_CTX_FLAGS_SLAVE) != 0 ? Role::kReplica : Role::kPrimary;
}

void ServerState::Register(RedisModuleCtx* ctx) {
  in_cluster_ = (RedisModule_GetContextFlags(ctx) & REDISMODULE_CTX_FLAGS_CLUSTER) != 0;
  LookForModules(ctx);
}

bool ServerState::HasConsumers() const {
  if (in_cluster_ || (RedisModule_GetContextFlags(nullptr) & REDISMODULE_CTX_FLAGS_AOF) != 0) {
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

Source ServerState::Ask(RedisModuleCtx* ctx) {
  const int flags = RedisModule_GetContextFlags(ctx);
  if ((flags & REDISMODULE_CTX_FLAGS_REPLICATED) != 0) return Source::kObeyed;
  // The node from which a slot is moved here in one step: it knows what it decided.
  if (MustObeyClient(ctx)) return Source::kObeyed;
  // Only the AOF runs commands while loading; a replica that loads asynchronously (swapdb) serves
  // clients meanwhile, and reads no AOF.
  const int loading = REDISMODULE_CTX_FLAGS_LOADING | REDISMODULE_CTX_FLAGS_ASYNC_LOADING;
  if ((flags & loading) == REDISMODULE_CTX_FLAGS_LOADING) return Source::kObeyed;
  if (RoleOf(flags & ~REDISMODULE_CTX_FLAGS_LOADING) == Role::kReplica) return Source::kReplica;
  only_callers_ = (flags & loading) == 0 && !in_cluster_;
  return Source::kCaller;
}

bool ServerState::LookForConsumers(Instant now) {
  constexpr Millis kEvery{1000};
  no_consumers_ = !HasConsumers();
  look_again_ = now + kEvery;
  return !no_consumers_;
}

bool ServerState::ClientsWatch() {
  const int events = RedisModule_GetNotifyKeyspaceEvents();
  return (events & REDISMODULE_NOTIFY_MODULE) != 0 &&
         (events & (REDISMODULE_NOTIFY_KEYSPACE | REDISMODULE_NOTIFY_KEYEVENT)) != 0;
}

void ServerState::LookForModules(RedisModuleCtx* ctx) {
  RedisModuleCallReply* modules = RedisModule_Call(ctx, "MODULE", "c", "LIST");
  if (modules == nullptr) {
    has_other_modules_ = true;  // what is not told may be
    return;
  }
  for (size_t i = 0; i < RedisModule_CallReplyLength(modules); ++i) {
    // A module's name comes first, behind the word "name".
    RedisModuleCallReply* module = RedisModule_CallReplyArrayElement(modules, i);
    size_t size = 0;
    const char* name =
        RedisModule_CallReplyStringPtr(RedisModule_CallReplyArrayElement(module, 1), &size);
    ModuleCame({name, name == nullptr ? 0 : size});
  }
  RedisModule_FreeCallReply(modules);
}

void ServerState::ModuleCame(std::string_view name) {
  // Servers bring modules of their own, which do not care about locks.
  constexpr std::string_view kHarmless[] = {kModuleName, "vectorset", "lua"};
  if (std::find(std::begin(kHarmless), std::end(kHarmless), name) == std::end(kHarmless)) {
    has_other_modules_ = true;
  }
}

}  // namespace turnstile
