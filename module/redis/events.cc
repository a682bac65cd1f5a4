#include "redis/events.h"

#include <algorithm>
#include <bitset>
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

// A hold that is over lasted as long as its lease at most.
void AddHoldTime(const Hold& hold, Instant now) {
  TheStats().hold_times.Add(std::min(now, hold.end) - hold.since);
}

int ServerFlags() { return RedisModule_GetContextFlags(nullptr); }

bool Decides(int flags) {
  return (flags & (REDISMODULE_CTX_FLAGS_SLAVE | REDISMODULE_CTX_FLAGS_LOADING)) == 0;
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

void LockEvents::Released(RedisModuleCtx* ctx, RedisModuleString* key, Token token) {
  TakeRenamed(token);
  Publish(ctx, "lock.released", key);
}

void LockEvents::Lost(RedisModuleCtx* ctx, RedisModuleString* key,
                      const std::vector<turnstile::Lost>& lost) {
  if (lost.empty()) return;
  const bool counts = Decides(ServerFlags());
  const Instant now = ToInstant(WallNow());
  std::bitset<8> told;  // by cause: an event tells of a lock, not of a hold
  for (const auto& [hold, how] : lost) {
    if (counts) {
      CountLoss(hold, how, now);
      if (how == Loss::kUndelivered) {
        Warn(undelivered_, 1, ToView(key),
             "grants were taken back, because their clients were gone before they could be told");
      }
    }
    const auto cause = static_cast<size_t>(how);
    if (!told.test(cause)) PublishLoss(ctx, key, how);
    told.set(cause);
  }
}

void LockEvents::CountLoss(const Hold& hold, Loss how, Instant now) {
  if (TakeRenamed(hold.token)) return;
  ++CounterFor(how);
  AddHoldTime(hold, now);
}

void LockEvents::Removed(LockName name, const Lock& lock) {
  Drain();
  const int flags = ServerFlags();
  if ((flags & REDISMODULE_CTX_FLAGS_LOADING) != 0) return;  // that was long ago
  const bool moves = (flags & REDISMODULE_CTX_FLAGS_SLAVE) == 0 && MovesAway(name.key);
  Removal removal{.db = name.db, .key = std::string(name.key), .counts = Decides(flags)};
  const Instant now = ToInstant(WallNow());
  for (const auto& [hold, how] : LostWith(lock, Loss::kForced, now)) {
    const bool live = how != Loss::kExpired;
    if (live && moves) continue;
    removal.any_live = removal.any_live || live;
    removal.tokens.push_back(hold.token);
    if (!removal.counts || TakeRenamed(hold.token)) continue;
    ++(live ? removal.live : removal.ended);
    AddHoldTime(hold, now);
  }
  if (!removal.tokens.empty()) removal_ = std::move(removal);
}

bool LockEvents::IsPending(LockName name) const {
  return removal_.has_value() && removal_->db == name.db && removal_->key == name.key;
}

void LockEvents::Renamed(LockName old_name) {
  if (!IsPending(old_name) || !removal_->counts) return;
  for (const Token token : removal_->tokens) ++renamed_[token];
  // An entry is left over when the hold is upgraded. Tokens rise: the first ones are the oldest.
  constexpr size_t kMostRemembered = 100'000;
  while (renamed_.size() > kMostRemembered) renamed_.erase(renamed_.begin());
}

bool LockEvents::TakeRenamed(Token token) {
  if (renamed_.empty()) return false;
  const auto found = renamed_.find(token);
  if (found == renamed_.end()) return false;
  if (--found->second == 0) renamed_.erase(found);
  return true;
}

void LockEvents::Evicted(LockName name) {
  if (IsPending(name)) removal_->how_live = Loss::kEvicted;
}

void LockEvents::Drain() {
  if (!removal_.has_value()) return;
  const Removal removal = *std::exchange(removal_, std::nullopt);
  const Loss how = removal.any_live ? removal.how_live : Loss::kExpired;
  PublishLoss(ctx_, ScopedName(ctx_, LockName{removal.db, removal.key}).get(), how);
  if (!removal.counts) return;
  CounterFor(Loss::kExpired) += removal.ended;
  CounterFor(removal.how_live) += removal.live;
  if (how == Loss::kEvicted && removal.live > 0) {
    Warn(evictions_, removal.live, removal.key,
         "locks were lost by eviction: give locks a server with maxmemory-policy noeviction");
  }
}

void LockEvents::Flushing(std::optional<int> db) {
  const int flags = ServerFlags();
  // A replica that takes over a whole copy of the data empties itself first.
  const int copies = REDISMODULE_CTX_FLAGS_LOADING | REDISMODULE_CTX_FLAGS_REPLICA_IS_STALE;
  if ((flags & copies) != 0 || CountLocks() == 0) return;
  size_t left = StoredLocks();
  for (const int each : DatabasesWithLocks()) {
    if (!db.has_value() || each == *db) left -= LoseLocksIn(each, left, Decides(flags));
  }
  ForgetLocksIn(db);
}

size_t LockEvents::CountLocks() {
  size_t keys = 0;
  for (const int db : DatabasesWithLocks()) {
    RedisModule_SelectDb(ctx_, db);
    keys += RedisModule_DbSize(ctx_);
  }
  return std::min(keys, StoredLocks());
}

// Looks at all keys until it has found so many locks, because nothing else knows which keys are
// locks and how many holders each has. That takes a fraction of the time in which the server frees
// the keys. Rejected: a table of all locks, which would make each of them larger and slower.
size_t LockEvents::LoseLocksIn(int db, size_t at_most, bool counts) {
  struct Search {
    LockEvents& events;
    bool counts;
    bool publish;
    Instant now;
    size_t locks = 0;
  } search{.events = *this,
           .counts = counts,
           .publish = ServerState::ClientsWatch(),
           .now = ToInstant(WallNow())};
  const auto look = [](RedisModuleCtx* ctx, RedisModuleString* name, RedisModuleKey* key,
                       void* data) {
    const Lock* lock = LockIn(key);
    if (lock == nullptr) return;
    auto& found = *static_cast<Search*>(data);
    ++found.locks;
    const std::vector<turnstile::Lost> lost = LostWith(*lock, Loss::kFlushed, found.now);
    bool any_live = false;
    for (const auto& [hold, how] : lost) {
      any_live = any_live || how == Loss::kFlushed;
      if (found.counts) found.events.CountLoss(hold, how, found.now);
    }
    if (found.publish && !lost.empty()) {
      found.events.PublishLoss(ctx, name, any_live ? Loss::kFlushed : Loss::kExpired);
    }
  };
  RedisModule_SelectDb(ctx_, db);
  RedisModuleScanCursor* cursor = RedisModule_ScanCursorCreate();
  while (search.locks < at_most && RedisModule_Scan(ctx_, cursor, look, &search) != 0) {
  }
  RedisModule_ScanCursorDestroy(cursor);
  return search.locks;
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
