// The one place that words and formats all replies and errors. Opens no key.

#ifndef TURNSTILE_REDIS_REPLIES_H_
#define TURNSTILE_REDIS_REPLIES_H_

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "core/cluster.h"
#include "core/decide.h"
#include "core/engine.h"
#include "core/request.h"
#include "redis/server.h"

namespace turnstile {

// `sees`: whether the caller may see details of a lock.
int ReplyAcquired(RedisModuleCtx* ctx, const AcquireResult& result,
                  bool (*sees)(RedisModuleCtx* ctx, LockName lock));
// The reply to LOCK.RELEASE or LOCK.TOUCH, as named by `command`: the number of locks that were
// released or touched.
int ReplyCount(RedisModuleCtx* ctx, const CountResult& result, const char* command);
// The reply to a call that waited.
int ReplyWaited(RedisModuleCtx* ctx, const WaitAnswer& answer);
// The message that is published in place of such a reply, or when a hold is lost.
std::string TextOf(const Notice& notice);
int ReplyToken(RedisModuleCtx* ctx, std::optional<Token> token);
int ReplyFlag(RedisModuleCtx* ctx, bool flag);
int ReplyInfo(RedisModuleCtx* ctx, const std::optional<LockInfo>& info);
int ReplyList(RedisModuleCtx* ctx, std::string_view next_cursor,
              const std::vector<LockSummary>& locks);
int ReplyTop(RedisModuleCtx* ctx, const std::vector<LockSummary>& locks);
int ReplyHelp(RedisModuleCtx* ctx, const std::vector<std::string>& lines);

// `asked` does not hold the lock. `holds`: the highest token that does, if any.
int ReplyFenced(RedisModuleCtx* ctx, Token asked, std::optional<Token> holds);
int ReplyNotPermitted(RedisModuleCtx* ctx, std::string_view command);
// Passes on the reply of the command after THEN, and frees it.
int ReplyOf(RedisModuleCtx* ctx, RedisModuleCallReply* reply);

int ReplyError(RedisModuleCtx* ctx, const ParseError& error);
int ReplyWrongType(RedisModuleCtx* ctx);
int ReplyReadOnly(RedisModuleCtx* ctx);
int ReplyInternal(RedisModuleCtx* ctx, const char* command);
// Errors for waiting calls, worded as the server words them.
inline constexpr const char* kNoLongerPermittedText =
    "NOPERM this user may no longer acquire the lock it waited for";
// Errors for a call that wants to be notified.
inline constexpr const char* kMayNotPublishText =
    "NOPERM this user has no permissions to publish to the channel after NOTIFY";
inline constexpr const char* kChannelInOtherSlotText =
    "CROSSSLOT the channel after NOTIFY must be in the slot of the key: give it the same hash tag";
inline constexpr const char* kOutOfMemoryText =
    "OOM command not allowed when used memory > 'maxmemory'.";
inline constexpr const char* kNotNowText =
    "TRYAGAIN the server does not accept writes to this key now";
// The current location of the slot, worded as the server itself words it, because clients follow
// it. `endpoint_type`: the server's setting cluster-preferred-endpoint-type.
std::string MovedText(Slot slot, const ClusterNode& node, std::string_view endpoint_type);
inline constexpr const char* kClusterDownText = "CLUSTERDOWN The cluster is down";
inline constexpr const char* kSlotUnservedText = "CLUSTERDOWN Hash slot not served";

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_REPLIES_H_
