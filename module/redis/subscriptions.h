// Subscriptions to events of the server, made when they are first needed and given up when nothing
// needs them any more.
//
// Every subscription makes the server slower for everybody: each pass of its event loop, each key
// that is changed, each connection. So a server in which nobody uses locks has one only, to changes
// of its role. The rest is subscribed to where the need arises, and a timer gives up what is not
// needed any more. What a server cannot take back stays: subscriptions to changes of keys. They are
// made with the first lock.

#ifndef TURNSTILE_REDIS_SUBSCRIPTIONS_H_
#define TURNSTILE_REDIS_SUBSCRIPTIONS_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

#include "redis/server.h"

namespace turnstile {

// What the server calls. Each callback finds the engine by itself (callbacks.cc).
struct EventCallbacks {
  RedisModuleEventCallback on_pass;
  RedisModuleEventCallback on_client_change;
  RedisModuleEventCallback on_fork;
  RedisModuleEventCallback on_save;
  RedisModuleEventCallback on_flush;
  RedisModuleEventCallback on_swap;
  RedisModuleEventCallback on_config;
  RedisModuleEventCallback on_slot_migration;
  RedisModuleNotificationFunc on_key_event;
  RedisModuleCommandFilterFunc on_command;
  RedisModuleTimerProc on_review;  // has to give up what is not needed, and may call ReviewLater
};

class Subscriptions {
 public:
  enum class Topic : uint8_t {
    kPasses,       // of the event loop, and settings that matter to grants in them
    kConnections,  // that close
    kCopies,       // of all data that are made
    kLocks,        // whatever can happen to them: databases flushed or swapped, keys changed
    kSlotMap,      // of a cluster: commands that may change them, migrations
    kStrings,      // that change
  };

  explicit Subscriptions(const EventCallbacks& callbacks) : callbacks_(callbacks) {}
  Subscriptions(const Subscriptions&) = delete;
  Subscriptions& operator=(const Subscriptions&) = delete;

  // Must be called first. `ctx` must belong to no client.
  void Register(RedisModuleCtx* ctx, const EngineVersion& engine);

  bool has(Topic topic) const { return active_[static_cast<size_t>(topic)]; }
  // May be called anywhere, also inside an event. Returns whether it was not subscribed to before.
  bool Need(Topic topic) { return !has(topic) && Subscribe(topic); }
  // Must not be called inside any event of the server, which would go on with freed memory.
  void GiveUp(Topic topic);

  // What is subscribed to, as words separated by commas, for operators.
  std::string Describe() const;

  // Calls on_review once more, soon if there is something that costs much.
  void ReviewLater();
  void OnReview() { review_ = 0; }

 private:
  bool Subscribe(Topic topic);
  void SetEvent(RedisModuleEvent event, RedisModuleEventCallback callback);
  void SetEvents(Topic topic, bool active);
  bool costs_much() const { return has(Topic::kPasses) || has(Topic::kConnections); }

  static constexpr size_t kTopics = 6;

  EventCallbacks callbacks_;
  RedisModuleCtx* ctx_ = nullptr;
  bool moves_slots_atomically_ = false;
  std::array<bool, kTopics> active_{};
  bool listens_to_keys_ = false;
  RedisModuleCommandFilter* filter_ = nullptr;
  RedisModuleTimerID review_ = 0;  // 0: none
  bool review_is_soon_ = false;
};

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_SUBSCRIPTIONS_H_
