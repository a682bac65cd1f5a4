// Holds that end with their connection, on this server.
//
// The server says when a connection closes, in the middle of whatever it is doing: that is only
// recorded. The holds end just before the event loop sleeps (see deferred.h), some in each pass if
// they are many, or before the next command that concerns their lock.

#ifndef TURNSTILE_REDIS_SERVER_SESSIONS_H_
#define TURNSTILE_REDIS_SERVER_SESSIONS_H_

#include <optional>

#include "core/budget.h"
#include "core/sessions.h"
#include "redis/effects.h"
#include "redis/lock_type.h"
#include "redis/redis_api.h"

namespace turnstile {

class ServerSessions {
 public:
  std::optional<Sessions::Client> BoundTo(LockName lock, Owner owner) const {
    return bound_.BoundTo(lock, owner);
  }

  // The owner acquired the lock over this connection, or without binding it to one.
  void Acquired(std::optional<Sessions::Client> client, LockName lock, Owner owner);
  // The owner's hold is over.
  void HoldGone(LockName lock, Owner owner);
  // All holds of a lock are, or of a database, or of all.
  void LockGone(LockName lock);
  void DatabaseGone(std::optional<int> db) { bound_.UnbindAll(db); }
  void DatabasesSwapped(int first, int second) { bound_.SwapDatabases(first, second); }

  void ConnectionClosed(Sessions::Client client);
  // Whether there are holds that have ended with their connection and are still in their keys: they
  // count as ended for everybody.
  bool has_ended() const { return bound_.has_ended(); }
  size_t CountEnded(LockName lock) const { return bound_.CountEnded(lock); }
  bool HasEnded(LockName lock, Owner owner) const { return bound_.HasEnded(lock, owner); }
  // Takes such holds out of their keys, as many as the budget allows. Only where this server may
  // write.
  void EndClosed(RedisModuleCtx* ctx, Instant now, Budget& budget);
  // Within a command: those of one key that are found in so many steps. Returns whether these were
  // all.
  bool EndClosedIn(RedisModuleCtx* ctx, LockKey& key, Instant now, size_t steps);
  // Within a command: that of one owner, if it has ended.
  void EndClosedOf(RedisModuleCtx* ctx, LockKey& key, Owner owner, Instant now);

  // This server was demoted: the holds are ordinary ones now.
  void Forget();

 private:
  Sessions bound_;
};

ServerSessions& TheSessions();

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_SERVER_SESSIONS_H_
