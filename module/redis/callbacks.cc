#include "redis/callbacks.h"

#include <optional>
#include <string_view>
#include <utility>

#include "core/budget.h"
#include "redis/instance.h"
#include "redis/replies.h"

namespace turnstile {
namespace {

// --- The event loop -----------------------------------------------------------------------------

// About five milliseconds: see core/budget.h.
constexpr size_t kWorkPerPass = 5'000;

void OnEventLoop(RedisModuleCtx* ctx, RedisModuleEvent /*event*/, uint64_t moment, void* /*data*/) {
  if (moment != REDISMODULE_SUBEVENT_EVENTLOOP_BEFORE_SLEEP) return;
  Instance& instance = TheInstance();
  instance.engine.Drain();
  if (instance.engine.is_idle() && !instance.slots.in_cluster()) return;
  const RedisHost::Scope scope(instance.host, ctx);
  const Now now{.wall = WallNow(), .steady = SteadyNow()};
  const auto due = instance.engine.RunDueWork(now, Budget(kWorkPerPass));
  if (due.has_value()) instance.alarm.Set(ctx, instance.host, *due, now);
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

// The server forks to write down all data: for a file, or for a replica.
void OnFork(RedisModuleCtx* /*ctx*/, RedisModuleEvent /*event*/, uint64_t moment, void* /*data*/) {
  if (moment != REDISMODULE_SUBEVENT_FORK_CHILD_BORN) return;
  TheInstance().engine.OnCopy(WallNow());
  TheInstance().host.server().InvalidateCache();
}

// A copy of all data is made or taken, or a replica comes or goes.
void OnCopy(RedisModuleCtx* /*ctx*/, RedisModuleEvent /*event*/, uint64_t /*moment*/,
            void* /*data*/) {
  TheInstance().host.server().InvalidateCache();
}

void OnFlush(RedisModuleCtx* /*ctx*/, RedisModuleEvent /*event*/, uint64_t moment, void* data) {
  const int db = static_cast<RedisModuleFlushInfo*>(data)->dbnum;
  const std::optional<int> flushed = db < 0 ? std::nullopt : std::optional(db);
  Engine& engine = TheInstance().engine;
  if (moment == REDISMODULE_SUBEVENT_FLUSHDB_START) {
    // A replica that takes over a whole copy of the data empties itself first.
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

// A replica has loaded a copy of its primary's data beside its own (swapdb), and now takes it. 7.0
// does not tell rightly into which databases.
void OnAsyncLoad(RedisModuleCtx* ctx, RedisModuleEvent /*event*/, uint64_t moment, void* /*data*/) {
  if (moment != REDISMODULE_SUBEVENT_REPL_ASYNC_LOAD_COMPLETED) return;
  for (int db = 0; RedisModule_SelectDb(ctx, db) == REDISMODULE_OK; ++db) {
    TheInstance().engine.OnLocksMayBeIn(db);
  }
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

void OnModuleChange(RedisModuleCtx* /*ctx*/, RedisModuleEvent /*event*/, uint64_t change,
                    void* data) {
  if (change != REDISMODULE_SUBEVENT_MODULE_LOADED) return;
  TheInstance().host.server().ModuleCame(static_cast<RedisModuleModuleChange*>(data)->module_name);
}

// --- Keys ---------------------------------------------------------------------------------------

constexpr std::string_view kMovedTo = "move_to";

// Whether a command that publishes this event can leave a lock with a TTL that is not its lease's:
// by changing it, or by moving a lock whose TTL was changed a moment ago.
bool MayChangeTtl(std::string_view event) {
  return event == "expire" || event == "persist" || event == "restore" || event == "rename_to" ||
         event == kMovedTo;
}

bool TakesKeyAway(std::string_view event) { return event == "rename_from" || event == "move_from"; }

// Valkey 8.1 calls us on behalf of the client that runs the command, and leaves that client in the
// database of the event (valkey-io/valkey pull 4024): after a MOVE in the wrong one. We bring it
// back. For COPY … DB we cannot: only the one database is known then.
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

int OnKeyEvent(RedisModuleCtx* ctx, int type, const char* event, RedisModuleString* name) {
  const MoveRepair repair(ctx, event);
  Instance& instance = TheInstance();
  Engine& engine = instance.engine;
  const std::string_view key_name = ToView(name);
  if (type == REDISMODULE_NOTIFY_EVICTED) {
    engine.OnKeyEvicted({RedisModule_GetSelectedDb(ctx), key_name});
  }
  const bool has_locks = instance.host.StoredLocks() > 0;
  if (has_locks && TakesKeyAway(event)) {
    engine.OnKeyRenamed({RedisModule_GetSelectedDb(ctx), key_name});
  }
  engine.OnKeyChanged(key_name);
  if (!has_locks || !MayChangeTtl(event)) return REDISMODULE_OK;
  if (event == kMovedTo) {
    // The one key that is opened inside an event, to learn its database. MOVE has just looked it up
    // by the same reading of the clock, so it cannot turn out to have expired.
    const RedisHost::Scope scope(instance.host, ctx);
    const OpenKey key(instance.host, {.lock = {0, key_name}, .handle = name}, Access::kInspect);
    if (key.lock() != nullptr) engine.OnLocksMayBeIn(key.name().db);
  }
  if (instance.host.server().SourceOf(ctx) == Source::kCaller) engine.OnTtlChanged(key_name);
  return REDISMODULE_OK;
}

// --- Clusters -----------------------------------------------------------------------------------

void OnCommand(RedisModuleCommandFilterCtx* command) {
  const bool has_more = RedisModule_CommandFilterArgsCount(command) > 1;
  TheInstance().slots.OnCommand(
      ToView(RedisModule_CommandFilterArgGet(command, 0)),
      has_more ? ToView(RedisModule_CommandFilterArgGet(command, 1)) : std::string_view());
}

void OnPeerClock(RedisModuleCtx* /*ctx*/, const char* /*sender*/, uint8_t /*type*/,
                 const unsigned char* payload, uint32_t size) {
  TheInstance().slots.OnPeerClock({reinterpret_cast<const char*>(payload), size}, WallNow());
}

constexpr RedisModuleEvent kSlotMigration{.id = 19, .dataver = 1};

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
}

bool FollowSlots(RedisModuleCtx* ctx, const EngineVersion& engine) {
  Instance& instance = TheInstance();
  instance.slots.SetInCluster(instance.host.server().in_cluster());
  if (!instance.slots.in_cluster()) return true;
  RedisModule_RegisterClusterMessageReceiver(ctx, Slots::kClockMessage, OnPeerClock);
  if (MovesSlotsAtomically(engine)) {
    RedisModule_SubscribeToServerEvent(ctx, kSlotMigration, OnSlotMigration);
  }
  return RedisModule_RegisterCommandFilter(ctx, OnCommand, REDISMODULE_CMDFILTER_NOSELF) != nullptr;
}

}  // namespace

HostCallbacks CallbacksForHost() {
  return {.on_reply = OnReply,
          .on_timeout = OnTimeout,
          .on_disconnect = OnDisconnect,
          .on_free = OnFree,
          .on_key_event = OnKeyEvent};
}

bool SubscribeToEvents(RedisModuleCtx* ctx, const EngineVersion& engine) {
  const std::pair<RedisModuleEvent, RedisModuleEventCallback> callbacks[] = {
      {RedisModuleEvent_EventLoop, OnEventLoop},
      {RedisModuleEvent_ReplicationRoleChanged, OnRoleChange},
      {RedisModuleEvent_ForkChild, OnFork},
      {RedisModuleEvent_Persistence, OnCopy},
      {RedisModuleEvent_Loading, OnCopy},
      {RedisModuleEvent_ReplicaChange, OnCopy},
      {RedisModuleEvent_FlushDB, OnFlush},
      {RedisModuleEvent_SwapDB, OnSwap},
      {RedisModuleEvent_ReplAsyncLoad, OnAsyncLoad},
      {RedisModuleEvent_ClientChange, OnClientChange},
      {RedisModuleEvent_ModuleChange, OnModuleChange},
  };
  for (const auto& [event, callback] : callbacks) {
    if (RedisModule_SubscribeToServerEvent(ctx, event, callback) != REDISMODULE_OK) return false;
  }
  const int events =
      REDISMODULE_NOTIFY_GENERIC | REDISMODULE_NOTIFY_EXPIRED | REDISMODULE_NOTIFY_EVICTED;
  return RedisModule_SubscribeToKeyspaceEvents(ctx, events, OnKeyEvent) == REDISMODULE_OK &&
         FollowSlots(ctx, engine);
}

}  // namespace turnstile
