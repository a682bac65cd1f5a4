// What callers read: the one place that words and formats replies and errors.

#ifndef TURNSTILE_REDIS_REPLIES_H_
#define TURNSTILE_REDIS_REPLIES_H_

#include <optional>
#include <string>
#include <vector>

#include "core/cluster.h"
#include "core/deadlock.h"
#include "core/decide.h"
#include "core/request.h"
#include "core/wait_queue.h"
#include "redis/lock_type.h"
#include "redis/redis_api.h"

namespace turnstile {

int ReplyAcquired(RedisModuleCtx* ctx, const Admission& admission);
// How many of the locks that a request named it was done to.
int ReplyCount(RedisModuleCtx* ctx, size_t count);
int ReplyToken(RedisModuleCtx* ctx, std::optional<Token> token);
int ReplyFlag(RedisModuleCtx* ctx, bool flag);
// The map of LOCK.INFO; `line` is null if nobody waits.
int ReplyInfo(RedisModuleCtx* ctx, const LockKey& key, const WaitQueue::Line* line, Instant now);

// Summaries of locks, without those on which the caller may not run LOCK.INFO. Either stops when
// it has done much, so that the server is not held up.
int ReplyList(RedisModuleCtx* ctx, const ListRequest& request, Instant now);
int ReplyTop(RedisModuleCtx* ctx, const std::vector<const WaitQueue::Line*>& lines, size_t most,
             Instant now);

// The token that asked does not hold the lock; the highest one that does, if any.
int ReplyFenced(RedisModuleCtx* ctx, Token asked, std::optional<Token> holds);
int ReplyNotPermitted(RedisModuleCtx* ctx, std::string_view command);
// Passes on what the command after THEN answered, and ends the reply.
int ReplyOf(RedisModuleCtx* ctx, RedisModuleCallReply* reply);

int ReplyError(RedisModuleCtx* ctx, const ParseError& error);
int ReplyWrongType(RedisModuleCtx* ctx);
int ReplyReadOnly(RedisModuleCtx* ctx);
// `command`, of a plain lock, needs a command of the server that was renamed or disabled.
int ReplyMissingCommand(RedisModuleCtx* ctx, const char* command, const char* missing);
int ReplyInternal(RedisModuleCtx* ctx, const char* command);
int ReplyWaitLimit(RedisModuleCtx* ctx, size_t limit);
int ReplyUserWaitLimit(RedisModuleCtx* ctx, size_t limit);
int ReplyCannotWait(RedisModuleCtx* ctx);
int ReplyNoSession(RedisModuleCtx* ctx);
int ReplyDeadlock(RedisModuleCtx* ctx, const std::vector<CycleStep>& cycle);

// The error for a request that is neither granted nor busy.
const char* TextFor(Outcome outcome);

// Errors for clients that wait.
inline constexpr const char* kNoLongerPermittedText =
    "NOPERM this user may no longer acquire the lock it waited for";
inline constexpr const char* kOutOfMemoryText =
    "OOM command not allowed when used memory > 'maxmemory'.";
inline constexpr const char* kNotNowText =
    "TRYAGAIN the server does not take a write to this key now";
// Where the slot is now, worded as the server itself words it: clients follow it.
// `endpoint_type`: the server's setting cluster-preferred-endpoint-type.
std::string MovedText(Slot slot, const ClusterNode& node, std::string_view endpoint_type);
inline constexpr const char* kClusterDownText = "CLUSTERDOWN The cluster is down";
inline constexpr const char* kSlotUnservedText = "CLUSTERDOWN Hash slot not served";
inline constexpr const char* kSupersededText =
    "UNBLOCKED a newer call of the same owner took over this place in the line";
inline constexpr const char* kCancelledText =
    "UNBLOCKED a LOCK.RELEASE of the same owner ended this wait";

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_REPLIES_H_
