// The Host (core/host.h) for a real server; and the one instance of the module's state.

#ifndef TURNSTILE_REDIS_REDIS_HOST_H_
#define TURNSTILE_REDIS_REDIS_HOST_H_

#include <algorithm>
#include <atomic>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/engine.h"
#include "core/fact.h"
#include "core/host.h"
#include "redis/server.h"
#include "redis/slots.h"
#include "redis/subscriptions.h"

namespace turnstile {

// Does nothing, but the server checks it as it checks LOCK.ACQUIRE. Calling it shows whether a
// grant that no command carries is allowed now.
inline constexpr const char* kProbeCommand = "LOCK.PROBE";

// What the server calls for waiting calls. Each callback finds the engine by itself (callbacks.cc).
struct HostCallbacks {
  RedisModuleCmdFunc on_reply;    // to write the answer
  RedisModuleCmdFunc on_timeout;  // at CLIENT UNBLOCK … TIMEOUT
  // At any other end of the wait: disconnected, killed, CLIENT UNBLOCK … ERROR, demoted.
  RedisModuleDisconnectFunc on_disconnect;
  void (*on_free)(RedisModuleCtx*, void*);  // at the very end
};

class RedisHost final : public Host {
 public:
  RedisHost(const HostCallbacks& callbacks, const EventCallbacks& event_callbacks)
      : callbacks_(callbacks), subscriptions_(event_callbacks) {}

  // Must be called first.
  void Attach(const Settings& settings, Slots& slots);
  void Register(RedisModuleCtx* ctx, const EngineVersion& engine);
  void SetType(RedisModuleType* type) { type_ = type; }

  // While an object of this class exists, the host works for this context. Must be created wherever
  // the server enters the module and keys are opened. Scopes nest when a command of ours runs
  // another.
  class Scope {
   public:
    Scope(RedisHost& host, RedisModuleCtx* ctx)
        : host_(host),
          ctx_(std::exchange(host.ctx_, ctx)),
          db_(std::exchange(host.db_, std::nullopt)) {
      host.caught_up_.reset();
      host.view_.reset();
    }
    ~Scope() {
      if (host_.db_.has_value()) RedisModule_SelectDb(host_.ctx_, *host_.db_);
      host_.ctx_ = ctx_;
      host_.db_ = db_;
    }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    RedisHost& host_;
    RedisModuleCtx* ctx_;
    std::optional<int> db_;
  };

  Server& server() { return server_; }

  // Subscribes to what is needed from the first lock on.
  void WatchLocks() {
    if (!subscriptions_.has(Subscriptions::Topic::kLocks)) SubscribeForLocks();
  }
  void WatchCopies();
  // In a cluster only.
  void WatchSlots();
  // A setting of the server may have changed. Reported while passes are.
  void OnSettingsChanged() { needs_replicas_.reset(); }
  // The end of a pass of the event loop.
  void OnPass() { runs_soon_ = false; }
  // Gives up what nothing needs any more. Must not be called inside an event of the server.
  // Returns, about once a second, whether there are locks, or calls that wait.
  bool ReviewSubscriptions(RedisModuleCtx* ctx, Engine& engine, FineTick now);
  std::string DescribeSubscriptions() const { return subscriptions_.Describe(); }
  bool watches_slots() const { return subscriptions_.has(Subscriptions::Topic::kSlotMap); }

  int CountDatabases() const { return databases_; }
  // The lock in an open key, or null.
  Lock* LockIn(RedisModuleKey* key) const;
  // A value of our type was created other than by Store; or was freed, which may be on any thread.
  void OnLockCreated();
  void OnLockFreed() { --locks_; }
  // The call that this client waits with; null if it has been answered.
  WaitingCall* FindParked(RedisModuleBlockedClient* client) const;

  // --- Host

  KeyContent Open(const KeyName& name, Access access) override;
  void Close(KeyContent& key) override;
  PlainLock ReadPlain(const KeyContent& key) override;
  void Store(KeyContent& key, Lock* lock) override;
  void Delete(KeyContent& key) override;
  std::optional<Instant> ExpiryOf(const KeyContent& key) override;
  const char* MissingCommandFor(const Change& change) override;
  void ChangePlain(KeyContent& key, const Change& change) override;
  size_t StoredLocks() override { return locks_; }
  size_t CountKeys(int db) override;
  void VisitLocks(int db, const std::function<bool(LockName, const Lock&)>& visit) override;

  void Replicate(const KeyContent& key, const HoldSet& held, Via via, Instant now) override;
  void Replicate(const KeyContent& key, const HoldReleased& released, Via via) override;
  void Replicate(const KeyContent& key, const HoldEnded& ended) override;
  void Replicate(const KeyContent& key, const HoldsExpired& expired) override;
  void Replicate(const KeyContent& key, const SessionsEnded& ended) override;
  void ReplicateVerbatim() override { RedisModule_ReplicateVerbatim(ctx_); }
  void ReplicateFloor(Token floor) override;
  bool HasReplicationConsumers(Instant now) override {
    return server_.HasReplicationConsumers(now);
  }
  bool MayReplicateFloor() override;

  void Emit(const KeyContent& key, LockEvent event) override;
  void EmitLost(const KeyContent& key, Loss how) override;
  void EmitLost(LockName lock, Loss how) override;
  Delivery Publish(const Notice& notice) override;
  void Warn(const std::string& text) override;

  std::optional<uint64_t> CallerConnection() override { return server_.ConnectionOf(ctx_); }
  std::optional<ParkableCaller> CallerToPark() override;
  NotifiedCaller CallerToNotify(std::string_view channel, LockName lock) override;

  bool Park(WaitingCall& call) override;
  void Answer(WaitingCall& call) override;
  bool IsConnected(uint64_t connection) override;

  Role role() override { return RoleOf(RedisModule_GetContextFlags(nullptr)); }
  bool MayWrite() override;
  std::optional<std::string> GrantRefusal(const WaitingCall& call, const KeyContent& key) override;
  void BeforeGrant(LockName lock, FineInstant now) override;
  SlotRefresh RefreshSlots(FineInstant now) override;
  std::optional<std::string> SlotRefusal(LockName lock) override;
  bool MovesAway(LockName lock) override { return slots_->MovesAway(lock.key); }

  void RunSoon() override {
    runs_soon_ = true;
    if (subscriptions_.Need(Subscriptions::Topic::kPasses)) needs_replicas_.reset();
  }
  void WakeEventLoop() override;
  void WatchConnections() override { subscriptions_.Need(Subscriptions::Topic::kConnections); }
  void WatchKeys() override { WatchLocks(); }
  void ListenForStringWrites() override { subscriptions_.Need(Subscriptions::Topic::kStrings); }

 private:
  static RedisModuleKey* KeyOf(const KeyContent& key) {
    return static_cast<RedisModuleKey*>(key.key);
  }
  static RedisModuleString* NameOf(const KeyContent& key) {
    return static_cast<RedisModuleString*>(key.handle);
  }
  // Selects the database for work on a key that is not an argument of the running command.
  void Select(int db);
  ClusterView& View();
  bool NothingElseRefusesWrites(int context_flags);
  std::optional<std::string> WriteRefusal(RedisModuleString* key);
  void NotifyLost(RedisModuleCtx* ctx, RedisModuleString* key, Loss how);
  void SubscribeForLocks();

  HostCallbacks callbacks_;
  Subscriptions subscriptions_;
  const Settings* settings_ = nullptr;
  Slots* slots_ = nullptr;
  RedisModuleCtx* ctx_ = nullptr;
  std::optional<int> db_;               // the database selected before this scope selected others
  RedisModuleCtx* detached_ = nullptr;  // belongs to no client, so any database can be selected
  RedisModuleType* type_ = nullptr;
  RedisModuleString* acquire_command_ = nullptr;
  RedisModuleString* publish_command_ = nullptr;  // in a cluster that for a shard
  std::atomic<size_t> locks_ = 0;                 // values are freed on other threads too
  Server server_;
  int databases_ = 0;
  std::unordered_map<RedisModuleBlockedClient*, WaitingCall*> parked_;  // not answered yet
  // Valid for one entry into the module: the slot that the token clock was last advanced for, and
  // the view of the cluster. They are cached because many calls may wait for one lock.
  std::optional<Slot> caught_up_;
  std::optional<ClusterView> view_;
  bool visiting_ = false;
  std::optional<bool> needs_replicas_;  // for writes (min-replicas-to-write); absent: not known
  bool runs_soon_ = false;              // the end of this pass must be reported
  std::optional<FineTick> checked_at_;  // when ReviewSubscriptions last asked the server
};

// Facts (core/fact.h) in the form that the server requires: the arguments of RedisModule_Replicate
// and RedisModule_EmitAOF.

// The trailing arguments of a fact, as strings of the server.
class FactArgs {
 public:
  // The optional arguments of HELD, which few holds need.
  explicit FactArgs(const HoldSet& held);
  explicit FactArgs(std::span<const Owner> owners);
  ~FactArgs();
  FactArgs(const FactArgs&) = delete;
  FactArgs& operator=(const FactArgs&) = delete;

  bool empty() const { return words_.empty(); }
  RedisModuleString** data() { return words_.data(); }
  size_t size() const { return words_.size(); }

 private:
  void Add(std::string_view word);
  void Add(std::string_view word, std::string_view value);

  std::vector<RedisModuleString*> words_;
};

// Writes a fact about the lock `key`: calls `emit` with the command name, a format and its
// arguments, as RedisModule_Replicate and RedisModule_EmitAOF take them.
template <typename Emit>
void EmitHoldSet(Emit emit, RedisModuleString* key, const HoldSet& held) {
  const std::string_view owner = held.hold.owner.bytes;
  const HoldNumbers numbers(held.hold);
  const std::string_view text = numbers.text();
  FactArgs details(held);
  if (details.empty()) {
    emit(kHeldCommand, "sbb", key, owner.data(), owner.size(), text.data(), text.size());
  } else {
    emit(kHeldCommand, "sbbv", key, owner.data(), owner.size(), text.data(), text.size(),
         details.data(), details.size());
  }
}

// The timer for the next due work, which is done at the end of the pass in which it fires.
class WakeTimer {
 public:
  // A timer that fires before `due` is not changed: it is set again when it fires. But the server's
  // timers follow the wall clock, so after a step of that clock the timer is always set again.
  void Set(RedisModuleCtx* ctx, Host& host, Instant due, const Now& time);
  // Whether it has fired since this was last asked: then there is due work.
  bool TakeFired() { return std::exchange(has_fired_, false); }

 private:
  static void OnFired(RedisModuleCtx* ctx, void* timer);

  Host* host_ = nullptr;
  RedisModuleTimerID timer_ = 0;
  std::optional<Instant> fires_at_;
  Millis wall_minus_steady_{0};  // when it was set
  bool has_fired_ = false;
};

// The one instance of the module's state. The server's callbacks have no context argument, so the
// entry points that the server calls (commands, callbacks, the type, INFO, CONFIG) get it from one
// function, defined in module.cc. No lower layer uses that function.
struct Instance {
  Instance(const HostCallbacks& callbacks, const EventCallbacks& event_callbacks)
      : host(callbacks, event_callbacks), engine(host, RandomHashKey()), slots(engine.tokens()) {
    host.Attach(engine.settings(), slots);
  }

  RedisHost host;
  Engine engine;
  Slots slots;
  WakeTimer timer;
  size_t failed_checks = 0;
  std::string warned_of_policy;  // for eviction; empty: none
  int moved_from = 0;            // the database that the running MOVE takes its key from
};

Instance& TheInstance();

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_REDIS_HOST_H_
