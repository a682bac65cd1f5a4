#include "redis/callbacks.h"

#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "core/budget.h"
#include "redis/redis_host.h"
#include "redis/replies.h"

namespace turnstile {
namespace {

// --- The event loop -----------------------------------------------------------------------------

// About two milliseconds: see core/budget.h. A command that arrives during a pass is answered after
// the work of the next one, so a client may wait for two of them.
constexpr size_t kWorkPerPass = 2'000;

void OnEventLoop(RedisModuleCtx* ctx, RedisModuleEvent /*event*/, uint64_t moment, void* /*data*/) {
  if (moment != REDISMODULE_SUBEVENT_EVENTLOOP_BEFORE_SLEEP) return;
  Instance& instance = TheInstance();
  instance.host.OnPass();
  instance.engine.PublishPending();
  const bool is_due = instance.timer.TakeFired();
  if (!is_due && instance.engine.is_idle() && !instance.host.watches_slots()) return;
  const RedisHost::Scope scope(instance.host, ctx);
  const Now now = ReadClocks();
  const Due next = instance.engine.RunDueWork(now, Budget(kWorkPerPass));
  const std::optional<Instant> due = next.NotBefore(now.moment());
  if (due.has_value()) instance.timer.Set(ctx, instance.host, *due, now);
  if (instance.engine.tokens().ToSave(now.wall).has_value()) instance.host.WatchCopies();
}

// --- Calls that wait ----------------------------------------------------------------------------

int OnReply(RedisModuleCtx* ctx, RedisModuleString** /*argv*/, int /*argc*/) {
  return ReplyWaited(
      ctx, static_cast<WaitingCall*>(RedisModule_GetBlockedClientPrivateData(ctx))->answer());
}

int OnTimeout(RedisModuleCtx* ctx, RedisModuleString** /*argv*/, int /*argc*/) {
  Instance& instance = TheInstance();
  WaitingCall* call = instance.host.FindParked(RedisModule_GetBlockedClientHandle(ctx));
  if (call != nullptr) {
    instance.engine.OnUnblocked(*call, /*timed_out=*/true, ToTick(SteadyNow()));
  }
  return RedisModule_ReplyWithNull(ctx);
}

void OnDisconnect(RedisModuleCtx* /*ctx*/, RedisModuleBlockedClient* client) {
  Instance& instance = TheInstance();
  WaitingCall* call = instance.host.FindParked(client);
  if (call == nullptr) return;
  instance.engine.OnUnblocked(*call, /*timed_out=*/false, ToTick(SteadyNow()));
}

void OnFree(RedisModuleCtx* ctx, void* data) {
  TheInstance().engine.OnReplied(static_cast<WaitingCall*>(data),
                                 RedisModule_BlockedClientDisconnected(ctx) == 0);
}

// --- Data ---------------------------------------------------------------------------------------

// The server forks to write all data, to a file or to a replica.
void OnFork(RedisModuleCtx* /*ctx*/, RedisModuleEvent /*event*/, uint64_t moment, void* /*data*/) {
  if (moment != REDISMODULE_SUBEVENT_FORK_CHILD_BORN) return;
  TheInstance().engine.OnCopy(WallNow());
  TheInstance().host.server().InvalidateCache();
}

// All data is saved, possibly without a fork.
void OnSave(RedisModuleCtx* /*ctx*/, RedisModuleEvent /*event*/, uint64_t /*moment*/,
            void* /*data*/) {
  TheInstance().host.server().InvalidateCache();
}

void OnFlush(RedisModuleCtx* /*ctx*/, RedisModuleEvent /*event*/, uint64_t moment, void* data) {
  const int db = static_cast<RedisModuleFlushInfo*>(data)->dbnum;
  const std::optional<int> flushed = db < 0 ? std::nullopt : std::optional(db);
  Engine& engine = TheInstance().engine;
  if (moment == REDISMODULE_SUBEVENT_FLUSHDB_START) {
    // A replica that is about to load a full copy of the data empties itself first.
    const int copies = REDISMODULE_CTX_FLAGS_LOADING | REDISMODULE_CTX_FLAGS_REPLICA_IS_STALE;
    if ((RedisModule_GetContextFlags(nullptr) & copies) == 0) {
      engine.OnFlushing(flushed, ToInstant(WallNow()));
    }
  } else if (moment == REDISMODULE_SUBEVENT_FLUSHDB_END) {
    engine.OnFlushed(flushed);
  }
}

void OnSwap(RedisModuleCtx* /*ctx*/, RedisModuleEvent /*event*/, uint64_t /*moment*/, void* data) {
  const auto& swapped = *static_cast<RedisModuleSwapDbInfo*>(data);
  TheInstance().engine.OnSwapped(swapped.dbnum_first, swapped.dbnum_second);
}

// --- The server ---------------------------------------------------------------------------------

void OnRoleChange(RedisModuleCtx* /*ctx*/, RedisModuleEvent /*event*/, uint64_t role,
                  void* /*data*/) {
  Instance& instance = TheInstance();
  instance.host.server().InvalidateCache();
  if (role == REDISMODULE_EVENT_REPLROLECHANGED_NOW_REPLICA) {
    instance.engine.OnDemoted();
  } else {
    instance.engine.OnPromoted();
  }
}

void OnClientChange(RedisModuleCtx* /*ctx*/, RedisModuleEvent /*event*/, uint64_t change,
                    void* data) {
  if (change != REDISMODULE_SUBEVENT_CLIENT_CHANGE_DISCONNECTED) return;
  TheInstance().engine.OnDisconnected(static_cast<RedisModuleClientInfo*>(data)->id);
}

// A lock is a key with a TTL: every policy except noeviction may evict it.
void WarnOfEviction(RedisModuleCtx* ctx) {
  const std::string limit = SettingOf(ctx, "maxmemory");
  const std::string policy = SettingOf(ctx, "maxmemory-policy");
  const bool may_evict = !limit.empty() && limit != "0" && policy != "noeviction";
  std::string& warned_of = TheInstance().warned_of_policy;
  if (may_evict && warned_of != policy) {
    RedisModule_Log(ctx, "warning",
                    "with maxmemory-policy %s the server may evict locks that are held: use "
                    "noeviction on a server with locks",
                    policy.c_str());
  }
  warned_of = may_evict ? policy : "";
}

void OnConfigChange(RedisModuleCtx* /*ctx*/, RedisModuleEvent /*event*/, uint64_t /*change*/,
                    void* /*data*/) {
  TheInstance().host.OnSettingsChanged();
}

void OnReview(RedisModuleCtx* ctx, void* /*data*/) {
  Instance& instance = TheInstance();
  if (instance.host.ReviewSubscriptions(ctx, instance.engine, SteadyNow())) WarnOfEviction(ctx);
}

// --- Keys ---------------------------------------------------------------------------------------

constexpr std::string_view kMovedTo = "move_to";

bool BringsKey(std::string_view event) { return event == "rename_to" || event == kMovedTo; }

// Whether a command that publishes this event can leave a lock with a TTL that differs from its
// lease: by changing it, or by moving a lock whose TTL was changed just before.
bool MayChangeTtl(std::string_view event) {
  return event == "expire" || event == "persist" || event == "restore" || BringsKey(event);
}

bool TakesKeyAway(std::string_view event) { return event == "rename_from" || event == "move_from"; }

// Valkey 8.1 calls us on behalf of the client that runs the command, and leaves that client in the
// database of the event (valkey-io/valkey pull 4024): after a MOVE, in the wrong one. We select the
// original database again. For COPY … DB we cannot: only one of the databases is known then.
class MoveRepair {
 public:
  MoveRepair(RedisModuleCtx* ctx, std::string_view event) : ctx_(ctx), ends_(event == kMovedTo) {
    if (event == "move_from") TheInstance().moved_from = RedisModule_GetSelectedDb(ctx);
  }
  ~MoveRepair() {
    if (ends_) RedisModule_SelectDb(ctx_, TheInstance().moved_from);
  }
  MoveRepair(const MoveRepair&) = delete;
  MoveRepair& operator=(const MoveRepair&) = delete;

 private:
  RedisModuleCtx* ctx_;
  bool ends_;
};

// Unlike a comparison of strings, this is a few instructions.
template <size_t kSize>
bool Is(const char* event, const char (&name)[kSize]) {
  for (size_t i = 0; i < kSize; ++i) {
    if (event[i] != name[i]) return false;
  }
  return true;
}

int OnKeyEvent(RedisModuleCtx* ctx, int type, const char* event_name, RedisModuleString* name) {
  Instance& instance = TheInstance();
  Engine& engine = instance.engine;
  const std::string_view key_name = ToView(name);
  // Most events are of these two kinds, and about keys that have nothing to do with locks.
  const bool is_common =
      Is(event_name, "del") || (Is(event_name, "expire") && !engine.MayBeLock(key_name));
  if (is_common && engine.queue().empty()) return REDISMODULE_OK;
  const std::string_view event = event_name;
  const MoveRepair repair(ctx, event);
  if (type == REDISMODULE_NOTIFY_EVICTED) {
    engine.OnKeyEvicted({RedisModule_GetSelectedDb(ctx), key_name});
  }
  engine.OnKeyChanged(key_name);
  if (instance.host.StoredLocks() == 0) return REDISMODULE_OK;
  if (TakesKeyAway(event)) engine.OnKeyRenamed({RedisModule_GetSelectedDb(ctx), key_name});
  if (BringsKey(event)) engine.OnKeyArrived(key_name);
  if (!MayChangeTtl(event) || !engine.MayBeLock(key_name)) return REDISMODULE_OK;
  if (event == kMovedTo) {
    // The only key that is opened inside an event, to determine its database. MOVE has just looked
    // it up with the same cached time, so it cannot have expired.
    const RedisHost::Scope scope(instance.host, ctx);
    const OpenKey key(instance.host, {.lock = {0, key_name}, .handle = name}, Access::kInspect);
    if (key.lock() != nullptr) engine.OnLocksMayBeIn(key.name().db);
  }
  if (instance.host.server().DetermineSource(ctx) == Source::kClient) engine.OnTtlChanged(key_name);
  return REDISMODULE_OK;
}

// --- Clusters -----------------------------------------------------------------------------------

void OnCommand(RedisModuleCommandFilterCtx* command) {
  Instance& instance = TheInstance();
  const bool has_more = RedisModule_CommandFilterArgsCount(command) > 1;
  const bool may_change = instance.slots.OnCommand(
      ToView(RedisModule_CommandFilterArgGet(command, 0)),
      has_more ? ToView(RedisModule_CommandFilterArgGet(command, 1)) : std::string_view());
  if (may_change) instance.host.RunSoon();
}

void OnPeerClock(RedisModuleCtx* /*ctx*/, const char* /*sender*/, uint8_t /*type*/,
                 const unsigned char* payload, uint32_t size) {
  TheInstance().slots.OnPeerClock({reinterpret_cast<const char*>(payload), size}, WallNow());
}

void OnSlotMigration(RedisModuleCtx* ctx, RedisModuleEvent /*event*/, uint64_t moment,
                     void* /*data*/) {
  using Migration = Slots::Migration;
  constexpr std::pair<uint64_t, Migration> kMoments[] = {{1, Migration::kExportStarted},
                                                         {3, Migration::kExportAborted},
                                                         {4, Migration::kImportCompleted},
                                                         {5, Migration::kExportCompleted}};
  Migration what = Migration::kOther;
  for (const auto& [number, migration] : kMoments) {
    if (number == moment) what = migration;
  }
  TheInstance().slots.OnMigration(ctx, what, WallNow());
  TheInstance().host.RunSoon();
}

}  // namespace

HostCallbacks CallbacksForHost() {
  return {.on_reply = OnReply,
          .on_timeout = OnTimeout,
          .on_disconnect = OnDisconnect,
          .on_free = OnFree};
}

EventCallbacks CallbacksForEvents() {
  return {.on_pass = OnEventLoop,
          .on_client_change = OnClientChange,
          .on_fork = OnFork,
          .on_save = OnSave,
          .on_flush = OnFlush,
          .on_swap = OnSwap,
          .on_config = OnConfigChange,
          .on_slot_migration = OnSlotMigration,
          .on_key_event = OnKeyEvent,
          .on_command = OnCommand,
          .on_review = OnReview};
}

bool Start(RedisModuleCtx* ctx) {
  if (RedisModule_SubscribeToServerEvent(ctx, RedisModuleEvent_ReplicationRoleChanged,
                                         OnRoleChange) != REDISMODULE_OK) {
    return false;
  }
  Instance& instance = TheInstance();
  if (instance.host.server().in_cluster()) {
    instance.slots.SetInCluster();
    RedisModule_RegisterClusterMessageReceiver(ctx, Slots::kClockMessage, OnPeerClock);
  }
  WarnOfEviction(ctx);
  instance.engine.OnStarted(WallNow());
  return true;
}

}  // namespace turnstile
