#include "redis/deferred.h"

#include <algorithm>
#include <functional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/budget.h"
#include "redis/cluster.h"
#include "redis/effects.h"
#include "redis/events.h"
#include "redis/lock_type.h"
#include "redis/server_sessions.h"
#include "redis/server_state.h"
#include "redis/tokens.h"
#include "redis/waiters.h"

namespace turnstile {
namespace {

// Names of keys whose TTL somebody changed, or moved, while there were locks: some may be locks.
std::set<std::string, std::less<>>& KeysWithForeignTtl() {
  static auto& keys = *new std::set<std::string, std::less<>>;
  return keys;
}

bool MayWrite(RedisModuleCtx* ctx) {
  const int flags = RedisModule_GetContextFlags(ctx);
  return (flags & (REDISMODULE_CTX_FLAGS_SLAVE | REDISMODULE_CTX_FLAGS_LOADING)) == 0 &&
         RedisModule_AvoidReplicaTraffic() == 0;
}

// The leases inside the value decide; the key's TTL only follows them. In which database the key
// was changed is not known for certain (see Waiters::KeyChanged), and locks are in few.
void RestoreTtl(RedisModuleCtx* ctx, std::string_view key_name, Instant now) {
  for (const int db : DatabasesWithLocks()) {
    const ScopedName name(ctx, LockName{db, key_name});
    LockKey key(ctx, name.get(), LockKey::Access::kInspect);
    if (const Lock* lock = key.lock(); lock != nullptr && key.expiry() != lock->closes()) {
      const Held last{lock->mode(), lock->last(Lock::Order::kByClosing)};
      CarryOut(ctx, key, last, now, Carrier::kDeferred);
    }
  }
}

void RestoreTtls(RedisModuleCtx* ctx, Instant now, Budget& budget) {
  auto& keys = KeysWithForeignTtl();
  while (!keys.empty() && !budget.spent()) {
    budget.Spend(2);
    const auto key = keys.extract(keys.begin());
    RestoreTtl(ctx, key.value(), now);
  }
}

// One timer, for whatever is due next. It only makes the event loop turn.
class Alarm {
 public:
  // An alarm that rings earlier than `due` is left as it is: it will be set anew when it rings. But
  // the server's timers follow the wall clock: after a step none rings when it should.
  void Set(RedisModuleCtx* ctx, Instant due, Instant now, Tick tick) {
    const Millis ahead = now.time_since_epoch() - tick.time_since_epoch();
    constexpr Millis kNoStep{2};  // each of the two is cut to a millisecond
    const bool stepped = std::chrono::abs(ahead - ahead_) > kNoStep;
    if (due >= rings_ && !stepped) return;
    if (rings_ != kMaxInstant) RedisModule_StopTimer(ctx, timer_, nullptr);
    rings_ = due;
    ahead_ = ahead;
    timer_ = RedisModule_CreateTimer(ctx, std::max(due - now, Millis{0}).count(), Ring, this);
    // 7.0 has by now computed how long it will sleep, at most one period of its cron.
    constexpr Millis kLongestSleep{1000};
    if (due - now < kLongestSleep) WakeEventLoop();
  }

 private:
  static void Ring(RedisModuleCtx* /*ctx*/, void* alarm) {
    static_cast<Alarm*>(alarm)->rings_ = kMaxInstant;
  }

  RedisModuleTimerID timer_ = 0;
  Instant rings_ = kMaxInstant;  // kMaxInstant: not set
  Millis ahead_{0};              // so far the wall clock was then ahead of the steady one
};

constinit Alarm alarm_clock;

// How soon a write that is not allowed now is tried again.
constexpr Millis kTryAgain{10};

// About five milliseconds: see core/budget.h.
constexpr size_t kWorkPerPass = 5'000;

void PayDebts(RedisModuleCtx* ctx, RedisModuleEvent /*event*/, uint64_t moment, void* /*data*/) {
  if (moment != REDISMODULE_SUBEVENT_EVENTLOOP_BEFORE_SLEEP) return;
  Events().Drain();
  ServerTokens& tokens = Tokens();
  Waiters& waiters = TheWaiters();
  ServerSessions& sessions = TheSessions();
  const bool owes = !tokens.issuing() || tokens.has_floor_to_replicate() ||
                    !KeysWithForeignTtl().empty() || sessions.has_ended();
  const auto next_due = [&] { return std::min(waiters.NextDue(), NextLookAtCluster()); };
  if (!owes && waiters.empty() && next_due() == kMaxInstant) return;

  const FineInstant now = WallNow();
  const Tick tick = ToTick(SteadyNow());
  Instant next = ToInstant(now);
  Budget budget(kWorkPerPass);
  waiters.TimeOut(tick, budget);
  const bool to_pay = owes || next_due() <= now;
  const bool may_write = to_pay && MayWrite(ctx);
  if (may_write) tokens.Issuing(now);
  if (InCluster()) LookAtCluster(ctx, now);
  if (may_write) {
    if (!ExportsSlots()) {
      const std::optional<Token> floor = tokens.TakeFloorToReplicate(now);
      if (floor.has_value()) TellFloor(ctx, *floor);
    }
    RestoreTtls(ctx, ToInstant(now), budget);
    waiters.TakeBackUndelivered(ctx, ToInstant(now), budget);
    // First all of these: in a pass in which waiters are tried, no hold of a closed connection is
    // left.
    sessions.EndClosed(ctx, ToInstant(now), budget);
    waiters.GrantWaiters(ctx, now, budget);
  } else if (to_pay) {
    next += kTryAgain;
  }
  const bool has_more = may_write && (!KeysWithForeignTtl().empty() || sessions.has_ended());
  if (!has_more) next = std::max(next, next_due());
  if (!waiters.empty()) next = std::min(next, ToInstant(now) + (waiters.NextTimeOut() - tick));
  if (next != kMaxInstant) alarm_clock.Set(ctx, next, ToInstant(now), tick);
}

// The server forks to write down all data: for a file, or for a replica.
void OnFork(RedisModuleCtx* /*ctx*/, RedisModuleEvent /*event*/, uint64_t moment, void* /*data*/) {
  if (moment != REDISMODULE_SUBEVENT_FORK_CHILD_BORN) return;
  Tokens().ReplicateFloorSoon(WallNow());
  TheServer().MayHaveChanged();
}

// A copy of all data is made or taken, or a replica comes or goes.
void OnCopy(RedisModuleCtx* /*ctx*/, RedisModuleEvent /*event*/, uint64_t /*moment*/,
            void* /*data*/) {
  TheServer().MayHaveChanged();
}

void OnFlush(RedisModuleCtx* /*ctx*/, RedisModuleEvent /*event*/, uint64_t moment, void* data) {
  const int db = static_cast<RedisModuleFlushInfo*>(data)->dbnum;
  const std::optional<int> flushed = db < 0 ? std::nullopt : std::optional(db);
  if (moment == REDISMODULE_SUBEVENT_FLUSHDB_START) Events().Flushing(flushed);
  if (moment != REDISMODULE_SUBEVENT_FLUSHDB_END) return;
  TheSessions().DatabaseGone(flushed);
  TheWaiters().DatabaseChanged(flushed);
}

void OnSwap(RedisModuleCtx* /*ctx*/, RedisModuleEvent /*event*/, uint64_t /*moment*/, void* data) {
  const auto& swapped = *static_cast<RedisModuleSwapDbInfo*>(data);
  LocksSwapped(swapped.dbnum_first, swapped.dbnum_second);
  TheSessions().DatabasesSwapped(swapped.dbnum_first, swapped.dbnum_second);
  TheWaiters().DatabaseChanged(swapped.dbnum_first);
  TheWaiters().DatabaseChanged(swapped.dbnum_second);
}

// A replica has loaded a copy of its primary's data beside its own (swapdb), and now takes it. 7.0
// does not tell rightly into which databases.
void OnAsyncLoad(RedisModuleCtx* ctx, RedisModuleEvent /*event*/, uint64_t moment, void* /*data*/) {
  if (moment != REDISMODULE_SUBEVENT_REPL_ASYNC_LOAD_COMPLETED) return;
  for (int db = 0; RedisModule_SelectDb(ctx, db) == REDISMODULE_OK; ++db) LocksMayBeIn(db);
}

void OnRoleChange(RedisModuleCtx* /*ctx*/, RedisModuleEvent /*event*/, uint64_t role,
                  void* /*data*/) {
  TheServer().MayHaveChanged();
  if (role != REDISMODULE_EVENT_REPLROLECHANGED_NOW_REPLICA) {
    TheWaiters().Promoted();
    return;
  }
  Tokens().StopIssuing();
  KeysWithForeignTtl().clear();
  TheWaiters().ForgetDebts();
  TheSessions().Forget();
}

void OnClientChange(RedisModuleCtx* /*ctx*/, RedisModuleEvent /*event*/, uint64_t change,
                    void* data) {
  if (change != REDISMODULE_SUBEVENT_CLIENT_CHANGE_DISCONNECTED) return;
  TheSessions().ConnectionClosed(static_cast<RedisModuleClientInfo*>(data)->id);
}

void OnModuleChange(RedisModuleCtx* /*ctx*/, RedisModuleEvent /*event*/, uint64_t change,
                    void* data) {
  if (change != REDISMODULE_SUBEVENT_MODULE_LOADED) return;
  TheServer().ModuleCame(static_cast<RedisModuleModuleChange*>(data)->module_name);
}

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
    if (event == "move_from") from_ = RedisModule_GetSelectedDb(ctx);
  }
  ~MoveRepair() {
    if (ends_) RedisModule_SelectDb(ctx_, from_);
  }
  MoveRepair(const MoveRepair&) = delete;
  MoveRepair& operator=(const MoveRepair&) = delete;

 private:
  static constinit inline int from_ = 0;
  RedisModuleCtx* ctx_;
  bool ends_;
};

int OnKeyEvent(RedisModuleCtx* ctx, int type, const char* event, RedisModuleString* name) {
  const MoveRepair repair(ctx, event);
  if (type == REDISMODULE_NOTIFY_EVICTED) {
    Events().Evicted({RedisModule_GetSelectedDb(ctx), ToView(name)});
  }
  if (StoredLocks() > 0 && TakesKeyAway(event)) {
    Events().Renamed({RedisModule_GetSelectedDb(ctx), ToView(name)});
  }
  const std::string_view key_name = ToView(name);
  TheWaiters().KeyChanged(key_name);
  if (StoredLocks() == 0 || !MayChangeTtl(event)) return REDISMODULE_OK;
  if (event == kMovedTo) {
    // The one key that is opened inside an event, to learn its database. MOVE has just looked it up
    // by the same reading of the clock, so it cannot turn out to have expired.
    const LockKey key(ctx, name, LockKey::Access::kInspect);
    if (key.lock() != nullptr) LocksMayBeIn(key.lock_name().db);
  }
  if (TheServer().SourceOf(ctx) == Source::kCaller) {
    auto& keys = KeysWithForeignTtl();
    if (!keys.contains(key_name)) keys.emplace(key_name);
  }
  return REDISMODULE_OK;
}

}  // namespace

bool SubscribeToEvents(RedisModuleCtx* ctx) {
  Events().Register(ctx);
  TheServer().LookForModules(ctx);
  const std::pair<RedisModuleEvent, RedisModuleEventCallback> callbacks[] = {
      {RedisModuleEvent_EventLoop, PayDebts},
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
  return RedisModule_SubscribeToKeyspaceEvents(
             ctx,
             REDISMODULE_NOTIFY_GENERIC | REDISMODULE_NOTIFY_EXPIRED | REDISMODULE_NOTIFY_EVICTED,
             OnKeyEvent) == REDISMODULE_OK;
}

void FollowPlainLocks(RedisModuleCtx* ctx) {
  static bool follows = false;
  if (follows) return;
  // Not only strings: SUNIONSTORE, ZUNIONSTORE and SORT … STORE put another type in their place.
  follows =
      RedisModule_SubscribeToKeyspaceEvents(ctx,
                                            REDISMODULE_NOTIFY_STRING | REDISMODULE_NOTIFY_SET |
                                                REDISMODULE_NOTIFY_ZSET | REDISMODULE_NOTIFY_LIST,
                                            OnKeyEvent) == REDISMODULE_OK;
}

void WakeEventLoop() {
  RedisModule_EventLoopAddOneShot([](void* /*unused*/) {}, nullptr);
}

}  // namespace turnstile
