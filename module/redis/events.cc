#include "redis/events.h"

#include <algorithm>
#include <utility>

#include "core/request.h"
#include "redis/cluster.h"
#include "redis/lock_type.h"
#include "redis/server_state.h"

namespace turnstile {
namespace {

// The event that tells why, after lock.lost.
const char* EventFor(Loss how) {
  switch (how) {
    case Loss::kForced:
      return "lock.lost.forced";
    case Loss::kEvicted:
      return "lock.lost.evicted";
    case Loss::kFlushed:
      return "lock.lost.flushed";
    case Loss::kSession:
      return "lock.lost.session";
    case Loss::kUndelivered:
      return "lock.lost.undelivered";
    case Loss::kExpired:
      break;
  }
  return "lock.lost.expired";
}

// Where losses are counted: not by a replica, which only hears of them.
uint64_t& CounterFor(Loss how) {
  Stats& stats = TheStats();
  switch (how) {
    case Loss::kForced:
    case Loss::kFlushed:
      return stats.forced;
    case Loss::kEvicted:
      return stats.evicted;
    case Loss::kSession:
      return stats.session_ended;
    case Loss::kUndelivered:
      return stats.undelivered;
    case Loss::kExpired:
      break;
  }
  return stats.expired;
}

int ServerFlags() { return RedisModule_GetContextFlags(nullptr); }

bool Decides(int flags) {
  return (flags & (REDISMODULE_CTX_FLAGS_SLAVE | REDISMODULE_CTX_FLAGS_LOADING)) == 0;
}

// A hold that is over lasted as long as its lease at most.
void CountHold(const Hold& hold, Instant now) {
  TheStats().hold_times.Add(std::min(now, hold.end) - hold.since);
}

}  // namespace

void LockEvents::Register(RedisModuleCtx* ctx) {
  ctx_ = RedisModule_GetDetachedThreadSafeContext(ctx);
}

void LockEvents::Publish(RedisModuleCtx* ctx, const char* event, RedisModuleString* key) {
  Drain();
  if (TheServer().SomebodyWatches()) {
    RedisModule_NotifyKeyspaceEvent(ctx, REDISMODULE_NOTIFY_MODULE, event, key);
  }
}

void LockEvents::PublishLoss(RedisModuleCtx* ctx, RedisModuleString* key, Loss how) {
  Publish(ctx, "lock.lost", key);
  Publish(ctx, EventFor(how), key);
}

void LockEvents::Acquired(RedisModuleCtx* ctx, RedisModuleString* key) {
  Publish(ctx, "lock.acquired", key);
}

void LockEvents::Touched(RedisModuleCtx* ctx, RedisModuleString* key) {
  Publish(ctx, "lock.touched", key);
}

void LockEvents::Released(RedisModuleCtx* ctx, RedisModuleString* key) {
  Publish(ctx, "lock.released", key);
}

void LockEvents::Lost(RedisModuleCtx* ctx, RedisModuleString* key,
                      const std::vector<turnstile::Lost>& lost) {
  if (lost.empty()) return;
  const bool counts = Decides(ServerFlags());
  const Instant now = ToInstant(WallNow());
  for (const auto& [hold, how] : lost) {
    if (counts) {
      ++CounterFor(how);
      CountHold(hold, now);
      if (how == Loss::kUndelivered) {
        Warn(undelivered_, 1, ToView(key),
             "grants were taken back, because their clients were gone before they could be told");
      }
    }
    PublishLoss(ctx, key, how);
  }
}

void LockEvents::Removed(LockName name, const Lock& lock) {
  Drain();
  const int flags = ServerFlags();
  if ((flags & REDISMODULE_CTX_FLAGS_LOADING) != 0) return;  // that was long ago
  const bool moves = (flags & REDISMODULE_CTX_FLAGS_SLAVE) == 0 && MovesAway(name.key);
  Removal removal{.db = name.db, .key = std::string(name.key), .counts = Decides(flags)};
  const Instant now = ToInstant(WallNow());
  for (const auto& [hold, how] : LostWith(lock, Loss::kForced, now)) {
    if (how != Loss::kExpired && moves) continue;
    ++(how == Loss::kExpired ? removal.ended : removal.live);
    if (removal.counts) CountHold(hold, now);
  }
  if (removal.ended + removal.live > 0) removal_ = std::move(removal);
}

void LockEvents::Evicted(LockName name) {
  if (removal_.has_value() && removal_->db == name.db && removal_->key == name.key) {
    removal_->how_live = Loss::kEvicted;
  }
}

void LockEvents::Drain() {
  if (!removal_.has_value()) return;
  const Removal removal = *std::exchange(removal_, std::nullopt);
  const Loss how = removal.live > 0 ? removal.how_live : Loss::kExpired;
  PublishLoss(ctx_, ScopedName(ctx_, LockName{removal.db, removal.key}).get(), how);
  if (!removal.counts) return;
  CounterFor(Loss::kExpired) += removal.ended;
  CounterFor(removal.how_live) += removal.live;
  if (how == Loss::kEvicted) {
    Warn(evictions_, removal.live, removal.key,
         "locks were lost by eviction: give locks a server with maxmemory-policy noeviction");
  }
}

void LockEvents::Flushing(std::optional<int> db) {
  const int flags = ServerFlags();
  // A replica that takes over a whole copy of the data empties itself first.
  const int copies = REDISMODULE_CTX_FLAGS_LOADING | REDISMODULE_CTX_FLAGS_REPLICA_IS_STALE;
  if ((flags & copies) != 0 || CountLocks() == 0) return;
  const bool publish = ServerState::ClientsWatch();
  const std::vector<int> with_locks = DatabasesWithLocks();
  size_t flushed = 0;
  if (!publish && (!db.has_value() || with_locks == std::vector{*db})) {
    flushed = CountLocks();  // without a look at each key
  } else {
    for (const int each : with_locks) {
      if (!db.has_value() || each == *db) flushed += TellFlushed(each, publish);
    }
  }
  ForgetLocksIn(db);
  if (Decides(flags)) CounterFor(Loss::kFlushed) += flushed;
}

size_t LockEvents::CountLocks() {
  size_t keys = 0;
  for (const int db : DatabasesWithLocks()) {
    RedisModule_SelectDb(ctx_, db);
    keys += RedisModule_DbSize(ctx_);
  }
  return std::min(keys, StoredLocks());
}

// Looks at the keys one by one, because nothing else knows which of them are locks, until all locks
// are found.
size_t LockEvents::TellFlushed(int db, bool publish) {
  struct Search {
    LockEvents& events;
    bool publish;
    Instant now;
    size_t locks = 0;
    size_t live = 0;
  } search{.events = *this, .publish = publish, .now = ToInstant(WallNow())};
  const auto look = [](RedisModuleCtx* ctx, RedisModuleString* name, RedisModuleKey* key,
                       void* data) {
    const Lock* lock = LockIn(key);
    if (lock == nullptr) return;
    auto& found = *static_cast<Search*>(data);
    ++found.locks;
    const std::vector<turnstile::Lost> lost = LostWith(*lock, Loss::kFlushed, found.now);
    const bool live = std::any_of(lost.begin(), lost.end(), [](const turnstile::Lost& hold) {
      return hold.how == Loss::kFlushed;
    });
    if (live) ++found.live;
    if (found.publish && !lost.empty()) {
      found.events.PublishLoss(ctx, name, live ? Loss::kFlushed : Loss::kExpired);
    }
  };
  RedisModule_SelectDb(ctx_, db);
  RedisModuleScanCursor* cursor = RedisModule_ScanCursorCreate();
  while (search.locks < StoredLocks() && RedisModule_Scan(ctx_, cursor, look, &search) != 0) {
  }
  RedisModule_ScanCursorDestroy(cursor);
  return search.live;
}

void LockEvents::Warn(Warnings& warnings, uint64_t count, std::string_view key, const char* what) {
  constexpr Millis kEvery{60000};
  warnings.since += count;
  const Instant now = ToInstant(WallNow());
  if (warnings.last <= now && now < warnings.last + kEvery) return;
  warnings.last = now;
  RedisModule_Log(ctx_, "warning", "%llu %s; the last lock was %s",
                  static_cast<unsigned long long>(std::exchange(warnings.since, 0)), what,
                  Quoted(key).c_str());
}

LockEvents& Events() {
  static auto& events = *new LockEvents;  // never destroyed: locks may be removed late
  return events;
}

Stats& TheStats() {
  static constinit Stats stats;
  return stats;
}

}  // namespace turnstile
