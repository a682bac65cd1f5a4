// From a decision to its effects: the one place that writes keys, replicates, wakes watchers and
// words replies. A handler does none of these by itself.

#ifndef TURNSTILE_REDIS_EFFECTS_H_
#define TURNSTILE_REDIS_EFFECTS_H_

#include <optional>
#include <string>
#include <vector>

#include "core/fact.h"
#include "core/lock.h"
#include "core/request.h"
#include "core/wait_queue.h"
#include "redis/lock_type.h"
#include "redis/redis_api.h"

namespace turnstile {

// Who brings a change: the command that is running, or nobody (see deferred.h).
enum class Carrier { kCommand, kDeferred };

// Carries out what was decided here, and tells replicas and the AOF the same fact.
void CarryOut(RedisModuleCtx* ctx, LockKey& key, const Change& change, Carrier carrier);

// Carries out what the running LOCK.FACT says, and passes it on as it came.
void Obey(RedisModuleCtx* ctx, LockKey& key, const Held& held);
void Obey(RedisModuleCtx* ctx, const FloorFact& floor);

// Tells replicas and the AOF that no token up to `floor` will be issued again.
void TellFloor(RedisModuleCtx* ctx, Token floor);

int ReplyAcquired(RedisModuleCtx* ctx, const Decision& decision);
// 1 if the decision changed something, else 0: the only two answers about one lock.
int ReplyDone(RedisModuleCtx* ctx, const Decision& decision);
int ReplyToken(RedisModuleCtx* ctx, std::optional<Token> token);
int ReplyFlag(RedisModuleCtx* ctx, bool flag);
// The map of LOCK.INFO; `line` is null if nobody waits.
int ReplyInfo(RedisModuleCtx* ctx, const Place& place, const WaitQueue::Line* line, Instant now);

int ReplyError(RedisModuleCtx* ctx, const ParseError& error);
int ReplyWrongType(RedisModuleCtx* ctx);
int ReplyReadOnly(RedisModuleCtx* ctx);
int ReplyInternal(RedisModuleCtx* ctx);
int ReplyWaitLimit(RedisModuleCtx* ctx, size_t limit);
int ReplyDeadlock(RedisModuleCtx* ctx, const std::vector<WaitQueue::Step>& cycle);

// Errors for clients that wait.
inline constexpr const char* kTokensUsedUpText =
    "ERR no tokens are left below 2^53: this server cannot grant new holds any more";
inline constexpr const char* kNoLongerPermittedText =
    "NOPERM this user may no longer acquire the lock it waited for";
inline constexpr const char* kNotNowText =
    "TRYAGAIN the server does not take a write to this key now";
inline constexpr const char* kSupersededText =
    "UNBLOCKED a newer call of the same owner took over this place in the line";

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_EFFECTS_H_
