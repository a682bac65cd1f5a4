#include "redis/subscriptions.h"

namespace turnstile {
namespace {

constexpr RedisModuleEvent kSlotMigration{.id = 19, .dataver = 1};

}  // namespace

void Subscriptions::Register(RedisModuleCtx* ctx, const EngineVersion& engine) {
  ctx_ = ctx;
  moves_slots_atomically_ = MovesSlotsAtomically(engine);
}

bool Subscriptions::Subscribe(Topic topic) {
  active_[static_cast<size_t>(topic)] = true;
  SetEvents(topic, true);
  ReviewLater();
  return true;
}

void Subscriptions::GiveUp(Topic topic) {
  // Servers crash if what was not subscribed to is given up.
  if (!has(topic)) return;
  active_[static_cast<size_t>(topic)] = false;
  SetEvents(topic, false);
}

void Subscriptions::SetEvent(RedisModuleEvent event, RedisModuleEventCallback callback) {
  RedisModule_SubscribeToServerEvent(ctx_, event, callback);
}

void Subscriptions::SetEvents(Topic topic, bool active) {
  const auto if_active = [active](auto callback) { return active ? callback : nullptr; };
  switch (topic) {
    case Topic::kPasses:
      SetEvent(RedisModuleEvent_EventLoop, if_active(callbacks_.on_pass));
      SetEvent(RedisModuleEvent_Config, if_active(callbacks_.on_config));
      return;
    case Topic::kConnections:
      SetEvent(RedisModuleEvent_ClientChange, if_active(callbacks_.on_client_change));
      return;
    case Topic::kCopies:
      SetEvent(RedisModuleEvent_ForkChild, if_active(callbacks_.on_fork));
      SetEvent(RedisModuleEvent_Persistence, if_active(callbacks_.on_save));
      return;
    case Topic::kLocks:
      SetEvent(RedisModuleEvent_FlushDB, if_active(callbacks_.on_flush));
      SetEvent(RedisModuleEvent_SwapDB, if_active(callbacks_.on_swap));
      // Not when keys expire: a lock that does is reported by its type.
      if (!listens_to_keys_) {
        listens_to_keys_ = true;
        RedisModule_SubscribeToKeyspaceEvents(
            ctx_, REDISMODULE_NOTIFY_GENERIC | REDISMODULE_NOTIFY_EVICTED, callbacks_.on_key_event);
      }
      return;
    case Topic::kSlotMap:
      if (moves_slots_atomically_) {
        SetEvent(kSlotMigration, if_active(callbacks_.on_slot_migration));
      }
      if (active) {
        filter_ = RedisModule_RegisterCommandFilter(ctx_, callbacks_.on_command,
                                                    REDISMODULE_CMDFILTER_NOSELF);
      } else if (filter_ != nullptr) {
        RedisModule_UnregisterCommandFilter(ctx_, filter_);
      }
      return;
    case Topic::kStrings:
      // Not only strings: SUNIONSTORE, ZUNIONSTORE and SORT … STORE replace them by another type.
      // Waiters know when a string will expire, but on Valkey 9 one also does by EXPIRE … -1.
      RedisModule_SubscribeToKeyspaceEvents(ctx_,
                                            REDISMODULE_NOTIFY_STRING | REDISMODULE_NOTIFY_SET |
                                                REDISMODULE_NOTIFY_ZSET | REDISMODULE_NOTIFY_LIST |
                                                REDISMODULE_NOTIFY_EXPIRED,
                                            callbacks_.on_key_event);
      return;
  }
}

std::string Subscriptions::Describe() const {
  constexpr const char* kNames[kTopics] = {"passes",    "connections", "copies",
                                           "databases", "slots",       "strings"};
  std::string text = "role";
  for (size_t i = 0; i < kTopics; ++i) {
    if (active_[i]) text += std::string(",") + kNames[i];
  }
  if (listens_to_keys_) text += ",keys";
  return text;
}

void Subscriptions::ReviewLater() {
  constexpr mstime_t kSoon = 100;
  constexpr mstime_t kLater = 1000;
  if (review_ != 0) {
    if (review_is_soon_ || !costs_much()) return;
    RedisModule_StopTimer(ctx_, review_, nullptr);
  }
  review_is_soon_ = costs_much();
  review_ = RedisModule_CreateTimer(ctx_, review_is_soon_ ? kSoon : kLater, callbacks_.on_review,
                                    nullptr);
}

}  // namespace turnstile
