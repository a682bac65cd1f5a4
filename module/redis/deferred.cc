#include "redis/deferred.h"

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "redis/effects.h"
#include "redis/lock_type.h"
#include "redis/tokens.h"

namespace turnstile {
namespace {

struct KeyName {
  int db;
  std::string name;
};

// Locks whose TTL somebody changed.
std::vector<KeyName>& Tampered() {
  static constinit std::vector<KeyName> keys;
  return keys;
}

bool MayWrite(RedisModuleCtx* ctx) {
  const int flags = RedisModule_GetContextFlags(ctx);
  return (flags & (REDISMODULE_CTX_FLAGS_SLAVE | REDISMODULE_CTX_FLAGS_LOADING)) == 0 &&
         RedisModule_AvoidReplicaTraffic() == 0;
}

// The leases inside the value decide; the key's TTL only follows them.
void SetBack(RedisModuleCtx* ctx, const KeyName& tampered) {
  if (RedisModule_SelectDb(ctx, tampered.db) != REDISMODULE_OK) return;
  RedisModuleString* name =
      RedisModule_CreateString(ctx, tampered.name.data(), tampered.name.size());
  {
    LockKey key(ctx, name, LockKey::Access::kChange);
    if (const Lock* lock = key.lock(); lock != nullptr && key.expiry() != lock->hold().end) {
      CarryOut(ctx, key, Held{lock->hold()});
    }
  }
  RedisModule_FreeString(ctx, name);
}

void PayDebts(RedisModuleCtx* ctx, RedisModuleEvent /*event*/, uint64_t moment, void* /*data*/) {
  if (moment != REDISMODULE_SUBEVENT_EVENTLOOP_BEFORE_SLEEP) return;
  ServerTokens& tokens = Tokens();
  if (tokens.issuing() && !tokens.has_untold_floor() && Tampered().empty()) return;
  if (!MayWrite(ctx)) return;
  tokens.Issuing(WallNow());
  if (const auto floor = tokens.TakeUntoldFloor(); floor.has_value()) TellFloor(ctx, *floor);
  for (const KeyName& tampered : std::exchange(Tampered(), {})) SetBack(ctx, tampered);
}

void OnRoleChange(RedisModuleCtx* /*ctx*/, RedisModuleEvent /*event*/, uint64_t role,
                  void* /*data*/) {
  if (role != REDISMODULE_EVENT_REPLROLECHANGED_NOW_REPLICA) return;
  Tokens().StopIssuing();
  Tampered().clear();
}

int OnGenericEvent(RedisModuleCtx* ctx, int /*type*/, const char* event, RedisModuleString* name) {
  const std::string_view what = event;
  if (what != "expire" && what != "persist" && what != "restore") return REDISMODULE_OK;
  if (SourceOf(ctx) != Source::kCaller) return REDISMODULE_OK;
  // Opened for change because that, unlike a look, leaves the server's hit counters alone.
  const LockKey key(ctx, name, LockKey::Access::kChange);
  if (key.lock() != nullptr) {
    Tampered().push_back({RedisModule_GetSelectedDb(ctx), std::string(ToView(name))});
  }
  return REDISMODULE_OK;
}

}  // namespace

bool SubscribeToEvents(RedisModuleCtx* ctx) {
  return RedisModule_SubscribeToServerEvent(ctx, RedisModuleEvent_EventLoop, PayDebts) ==
             REDISMODULE_OK &&
         RedisModule_SubscribeToServerEvent(ctx, RedisModuleEvent_ReplicationRoleChanged,
                                            OnRoleChange) == REDISMODULE_OK &&
         RedisModule_SubscribeToKeyspaceEvents(ctx, REDISMODULE_NOTIFY_GENERIC, OnGenericEvent) ==
             REDISMODULE_OK;
}

}  // namespace turnstile
