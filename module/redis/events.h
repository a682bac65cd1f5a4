// What happens to locks, told to whoever subscribes, and counted.
//
// Keyspace events of the class for modules (d): lock.acquired, lock.touched, lock.released, and
// lock.lost, which is followed by lock.lost.<why>. No event names an owner: channels have rights of
// their own, and an owner is what proves ownership.
//
// Locks that the server removes by itself or for others (DEL, expiry, eviction, SET, RENAME) are
// known from the type's unlink callback, a moment before the server tells why. Such a loss is kept
// until the next one, the next event of ours or the end of the pass of the event loop: so the why
// is known when it is told, the server's own event comes first, and ours come in order.

#ifndef TURNSTILE_REDIS_EVENTS_H_
#define TURNSTILE_REDIS_EVENTS_H_

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/lock.h"
#include "core/news.h"
#include "core/stats.h"
#include "core/wait_queue.h"
#include "redis/redis_api.h"

namespace turnstile {

class LockEvents {
 public:
  // Must come first.
  void Register(RedisModuleCtx* ctx);

  void Acquired(RedisModuleCtx* ctx, RedisModuleString* key);
  void Touched(RedisModuleCtx* ctx, RedisModuleString* key);
  void Released(RedisModuleCtx* ctx, RedisModuleString* key, Token token);
  // By a fact.
  void Lost(RedisModuleCtx* ctx, RedisModuleString* key, const std::vector<Lost>& lost);

  // The server is removing this lock, and no fact of ours tells it to.
  void Removed(LockName name, const Lock& lock);
  // It has just removed this key because it needed the memory.
  void Evicted(LockName name);
  // It has just taken this key to another name or database.
  void Renamed(LockName old_name);
  // Databases are about to be emptied: one, or all of them.
  void Flushing(std::optional<int> db);

  // Tells what has not been told yet.
  void Drain();

  // How many locks there are on this server.
  size_t CountLocks();

 private:
  struct Removal {
    int db;
    std::string key;
    bool counts;  // this server decides
    bool any_live = false;
    size_t ended = 0;  // holds to count whose leases were over,
    size_t live = 0;   // and those whose were not
    Loss how_live = Loss::kForced;
    std::vector<Token> tokens;  // of all holds, also those that were counted before
  };
  // At most one warning of a kind a minute; the next one tells how many there were meanwhile.
  struct Warnings {
    Instant last = kMinInstant;
    uint64_t since = 0;
  };

  void Publish(RedisModuleCtx* ctx, const char* event, RedisModuleString* key);
  void PublishLoss(RedisModuleCtx* ctx, RedisModuleString* key, Loss how);
  bool IsPending(LockName name) const;
  void CountLoss(const Hold& hold, Loss how, Instant now);
  bool TakeRenamed(Token token);
  size_t LoseLocksIn(int db, size_t at_most, bool counts);
  void Warn(Warnings& warnings, uint64_t count, std::string_view key, const char* what);

  RedisModuleCtx* ctx_ = nullptr;  // of nobody, so that its database can be selected freely
  std::optional<Removal> removal_;
  // Holds that were counted as lost when their key was renamed or moved, by token; several of a set
  // share one. They live on under another name and are not counted again when they end there.
  std::map<Token, size_t> renamed_;
  Warnings evictions_;
  Warnings undelivered_;
};

LockEvents& Events();
Stats& TheStats();

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_EVENTS_H_
