// The server as the engine sees it (core/host.h).

#ifndef TURNSTILE_REDIS_REDIS_HOST_H_
#define TURNSTILE_REDIS_REDIS_HOST_H_

#include <atomic>
#include <optional>
#include <string>
#include <unordered_map>

#include "core/engine.h"
#include "core/host.h"
#include "redis/redis_api.h"
#include "redis/server_state.h"
#include "redis/slots.h"

namespace turnstile {

// What the server calls back about calls that wait and keys that change; each finds the engine by
// itself (callbacks.cc).
struct HostCallbacks {
  RedisModuleCmdFunc on_reply;    // to write the answer
  RedisModuleCmdFunc on_timeout;  // at CLIENT UNBLOCK … TIMEOUT
  // At any other end of the wait: closed, killed, CLIENT UNBLOCK … ERROR, demoted.
  RedisModuleDisconnectFunc on_disconnect;
  void (*on_free)(RedisModuleCtx*, void*);  // at the very end
  RedisModuleNotificationFunc on_key_event;
};

class RedisHost final : public Host {
 public:
  explicit RedisHost(const HostCallbacks& callbacks) : callbacks_(callbacks) {}

  // Before anything else.
  void Attach(const Settings& settings, Slots& slots);
  void Register(RedisModuleCtx* ctx);
  void SetType(RedisModuleType* type) { type_ = type; }

  // While one of these lives, the host works for this context. To be made wherever the server
  // enters the module and keys are opened; they nest when a command of ours runs another.
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

  ServerState& server() { return server_; }
  // The lock in an open key, or null.
  Lock* LockIn(RedisModuleKey* key) const;
  // A value of our type came into memory other than by Store, or left it, on any thread.
  void LockMade() { ++locks_; }
  void LockFreed() { --locks_; }
  // The call that this client waits with; null if it was answered.
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

  void Replicate(const KeyContent& key, const Held& held, Via via, Instant now) override;
  void Replicate(const KeyContent& key, const Released& released, Via via) override;
  void Replicate(const KeyContent& key, const Ended& ended) override;
  void Replicate(const KeyContent& key, const Expired& expired) override;
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
  void Warn(const std::string& text) override;

  std::optional<uint64_t> CallerConnection() override { return ConnectionOf(ctx_); }
  bool CallerMayBlock() override;
  std::optional<std::string> CallerUser() override;

  bool Park(WaitingCall& call) override;
  void Answer(WaitingCall& call) override;
  bool IsConnected(uint64_t connection) override;

  Role role() override { return RoleOf(RedisModule_GetContextFlags(nullptr)); }
  bool MayWrite() override;
  std::optional<std::string> GrantRefusal(const WaitingCall& call, const KeyContent& key) override;
  void BeforeGrant(LockName lock, FineInstant now) override;
  void RefreshSlots(FineInstant now) override;
  std::optional<Instant> NextSlotRefresh() override { return slots_->NextRefresh(); }
  bool MovesAway(LockName lock) override { return slots_->MovesAway(lock.key); }

  void WakeEventLoop() override;
  void WatchStrings() override;

 private:
  static RedisModuleKey* KeyOf(const KeyContent& key) {
    return static_cast<RedisModuleKey*>(key.key);
  }
  static RedisModuleString* NameOf(const KeyContent& key) {
    return static_cast<RedisModuleString*>(key.handle);
  }
  // Selects the database for work on a key that is no argument of the running command.
  void Select(int db);
  std::optional<std::string> WriteRefusal(RedisModuleString* key);
  void NotifyLost(RedisModuleCtx* ctx, RedisModuleString* key, Loss how);

  HostCallbacks callbacks_;
  const Settings* settings_ = nullptr;
  Slots* slots_ = nullptr;
  RedisModuleCtx* ctx_ = nullptr;
  std::optional<int> db_;               // that was selected when a scope began to select others
  RedisModuleCtx* detached_ = nullptr;  // nobody's, so that its database can be selected freely
  RedisModuleType* type_ = nullptr;
  RedisModuleString* acquire_command_ = nullptr;
  std::atomic<size_t> locks_ = 0;  // values are freed on other threads too
  ServerState server_;
  std::unordered_map<RedisModuleBlockedClient*, WaitingCall*> parked_;  // not answered yet
  // In one entry into the module, which slot was caught up with last, and how the cluster looks:
  // many wait for one lock.
  std::optional<Slot> caught_up_;
  std::optional<ClusterView> view_;
  bool watches_strings_ = false;
  bool visiting_ = false;
};

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_REDIS_HOST_H_
