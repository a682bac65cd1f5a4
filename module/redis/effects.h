// From a decision to its effects: the one place that writes keys, replicates and notifies. A
// handler does none of these by itself.

#ifndef TURNSTILE_REDIS_EFFECTS_H_
#define TURNSTILE_REDIS_EFFECTS_H_

#include <optional>

#include "core/decide.h"
#include "core/fact.h"
#include "core/lock.h"
#include "core/request.h"
#include "redis/lock_type.h"
#include "redis/redis_api.h"

namespace turnstile {

// What carries a change to replicas and the AOF.
enum class Carrier {
  kCommand,   // the command that is running, which says just this
  kFact,      // a fact, because the command that is running says something else
  kDeferred,  // a fact, because no command of ours is running (see deferred.h)
};

// Carries out what was decided here, and tells replicas and the AOF the same fact; first the end of
// holds that are over. A change of a plain lock needs the server's own command: see HasCommand.
void CarryOut(RedisModuleCtx* ctx, LockKey& key, const Change& change, Instant now,
              Carrier carrier);

// By which rules requests are granted now.
GrantRules CurrentRules(Instant now);

// Carries out a granted request on one of its locks. `session`: the connection that the hold is
// bound to, if it is bound to one.
void CarryOutGrant(RedisModuleCtx* ctx, LockKey& key, const AcquireRequest& request, Token token,
                   Instant now, std::optional<uint64_t> session, Carrier carrier);

// The command by which a plain lock is changed, null for a change of any other lock.
const char* CommandFor(const Change& change);
// Whether the server has a command of this name: it may have been renamed or disabled.
bool HasCommand(RedisModuleCtx* ctx, const char* name);

// Removes holds that are over while others are not.
void RemoveOverdue(RedisModuleCtx* ctx, LockKey& key, Instant now);

// Carries out what the running LOCK.FACT or LOCK.HELD says, and passes it on as it came.
void Obey(RedisModuleCtx* ctx, LockKey& key, const Held& held);
void Obey(RedisModuleCtx* ctx, LockKey& key, const Ended& ended);
void Obey(RedisModuleCtx* ctx, LockKey& key, const Expired& expired);
void Obey(RedisModuleCtx* ctx, LockKey& key, const SessionsEnded& ended);
void Obey(RedisModuleCtx* ctx, const FloorFact& floor);

// Tells replicas and the AOF that no token up to `floor` will be issued again.
void TellFloor(RedisModuleCtx* ctx, Token floor);

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_EFFECTS_H_
