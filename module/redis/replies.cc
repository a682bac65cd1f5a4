#include "redis/replies.h"

#include <algorithm>

#include "redis/server_sessions.h"
#include "redis/tokens.h"
#include "redis/user.h"
#include "redis/waiters.h"

namespace turnstile {
namespace {

// One pair of a map reply.
void Field(RedisModuleCtx* ctx, const char* name, long long value) {
  RedisModule_ReplyWithCString(ctx, name);
  RedisModule_ReplyWithLongLong(ctx, value);
}

void Field(RedisModuleCtx* ctx, const char* name, std::string_view bytes) {
  RedisModule_ReplyWithCString(ctx, name);
  RedisModule_ReplyWithStringBuffer(ctx, bytes.data(), bytes.size());
}

void NullField(RedisModuleCtx* ctx, const char* name) {
  RedisModule_ReplyWithCString(ctx, name);
  RedisModule_ReplyWithNull(ctx);
}

const char* NameOf(Mode mode) {
  switch (mode) {
    case Mode::kShared:
      return "shared";
    case Mode::kLimit:
      return "limit";
    case Mode::kExclusive:
      break;
  }
  return "exclusive";
}

constexpr long kHolderFields = 7;

// What a plain lock's holder has too.
void CommonHolderFields(RedisModuleCtx* ctx, uint32_t count, bool session, Millis linger) {
  Field(ctx, "count", count);
  RedisModule_ReplyWithCString(ctx, "session");
  RedisModule_ReplyWithBool(ctx, session ? 1 : 0);
  Field(ctx, "linger-ms", linger.count());
}

void ReplyHolder(RedisModuleCtx* ctx, LockName lock, const Hold& hold, Instant now) {
  RedisModule_ReplyWithMap(ctx, kHolderFields);
  Field(ctx, "owner", hold.owner.bytes);
  Field(ctx, "token", static_cast<long long>(hold.token.value));
  Field(ctx, "lease-left-ms", (hold.end - now).count());
  Field(ctx, "held-ms", std::max(now - hold.since, Millis{0}).count());
  CommonHolderFields(ctx, hold.count, TheSessions().BoundTo(lock, hold.owner).has_value(),
                     hold.linger);
}

// How long a plain lock lasts, if there is one and it ends.
void FieldOfPlainEnd(RedisModuleCtx* ctx, const PlainLock* plain, Instant now) {
  if (plain == nullptr || plain->end == kMaxInstant) {
    NullField(ctx, "lease-left-ms");
  } else {
    Field(ctx, "lease-left-ms", (plain->end - now).count());
  }
}

void ReplyPlainHolder(RedisModuleCtx* ctx, const PlainLock& plain, Instant now) {
  RedisModule_ReplyWithMap(ctx, kHolderFields);
  Field(ctx, "owner", plain.value);
  NullField(ctx, "token");
  FieldOfPlainEnd(ctx, &plain, now);
  NullField(ctx, "held-ms");
  CommonHolderFields(ctx, /*count=*/1, /*session=*/false, Millis{0});
}

// Those whose holds are live, in the order of their tokens.
void ReplyHolders(RedisModuleCtx* ctx, LockName name, const Lock& lock, Instant now) {
  RedisModule_ReplyWithArray(ctx, REDISMODULE_POSTPONED_LEN);
  long shown = 0;
  for (size_t i = 0; i < lock.size(); ++i) {
    const Hold hold = lock.at(Lock::Order::kByToken, i);
    if (!hold.LiveAt(now)) continue;
    ReplyHolder(ctx, name, hold, now);
    ++shown;
  }
  RedisModule_ReplySetArrayLength(ctx, shown);
}

// Those in front, in order.
void ReplyLine(RedisModuleCtx* ctx, const WaitQueue::Line* line) {
  constexpr long kShown = 100;
  RedisModule_ReplyWithCString(ctx, "line");
  if (line == nullptr) {
    RedisModule_ReplyWithArray(ctx, 0);
    return;
  }
  RedisModule_ReplyWithArray(ctx, std::min(static_cast<long>(line->size()), kShown));
  const Tick now = ToTick(SteadyNow());
  long shown = 0;
  for (const auto* place = line->first(); place != nullptr && shown < kShown; ++shown) {
    const WaitQueue::Waiter& waiter = place->waiter();
    RedisModule_ReplyWithMap(ctx, 4);
    Field(ctx, "owner", waiter.request().owner.bytes);
    Field(ctx, "mode", NameOf(waiter.request().mode));
    Field(ctx, "waited-ms", (now - waiter.since()).count());
    Field(ctx, "left-ms", std::max(waiter.deadline() - now, Millis{0}).count());
    place = place->behind();
  }
}

// The mode in which a lock is held, or in which the first in line asks for it.
const char* NameOfMode(const Place& place, const WaitQueue::Line* line, Instant now) {
  if (CountHolders(place, now) == 0) return NameOf(line->first()->waiter().request().mode);
  return place.plain.has_value() ? "plain" : NameOf(ModeOf(place));
}

constexpr long kSummaryFields = 10;

// One lock in a list, if the caller may know of it and somebody holds it or waits for it. Of
// several holders the one with the highest token is shown.
bool ReplySummary(RedisModuleCtx* ctx, const User& caller, RedisModuleString* name, Instant now) {
  if (!caller.MayRead(name)) return false;
  const LockKey key(ctx, name, LockKey::Access::kLook);
  if (key.wrong_type()) return false;
  const Place place = key.place();
  const WaitQueue::Line* line = TheWaiters().Find(key.lock_name());
  const size_t holders = CountHolders(place, now);
  if (holders == 0 && line == nullptr) return false;

  RedisModule_ReplyWithMap(ctx, kSummaryFields);
  Field(ctx, "key", ToView(name));
  Field(ctx, "mode", NameOfMode(place, line, now));
  Field(ctx, "holders", static_cast<long long>(holders));
  const std::optional<Hold> hold = CurrentHold(place, now);
  const PlainLock* plain = holders > 0 && place.plain.has_value() ? &*place.plain : nullptr;
  if (hold.has_value()) {
    Field(ctx, "owner", hold->owner.bytes);
    Field(ctx, "token", static_cast<long long>(hold->token.value));
    Field(ctx, "held-ms", std::max(now - hold->since, Millis{0}).count());
    Field(ctx, "lease-left-ms", (hold->end - now).count());
  } else {
    if (plain != nullptr && plain->value.size() <= kMaxOwnerBytes) {
      Field(ctx, "owner", plain->value);
    } else {
      NullField(ctx, "owner");
    }
    NullField(ctx, "token");
    NullField(ctx, "held-ms");
    FieldOfPlainEnd(ctx, plain, now);
  }
  Field(ctx, "linger-left-ms", LingerLeft(place, now).count());
  Field(ctx, "waiting", line == nullptr ? 0 : static_cast<long long>(line->size()));
  Field(ctx, "longest-wait-ms",
        line == nullptr ? 0 : (ToTick(SteadyNow()) - line->waiting_since()).count());
  return true;
}

}  // namespace

const char* TextFor(Outcome outcome) {
  switch (outcome) {
    case Outcome::kOtherMode:
      return "ERR this owner holds the lock in another mode: release it first (only SHARED can "
             "become exclusive, and exclusive SHARED)";
    case Outcome::kHoldsSome:
      return "ERR this owner holds some of these locks, but not all: release them first, or ask "
             "for the others alone";
    case Outcome::kHoldsApart:
      return "ERR this owner holds these locks under different tokens: release them first, or ask "
             "for each alone";
    case Outcome::kUpgradesSeveral:
      return "ERR ALSO cannot turn shared holds into exclusive ones: release them first, or ask "
             "for each alone";
    case Outcome::kFloorTooHigh:
      return "ERR FLOOR must not be more than ten minutes ahead of the server's clock, in "
             "microseconds of Unix time";
    case Outcome::kCountedOut:
      return "ERR this hold is counted 4294967295 times, which is the most: release some";
    default:
      return "ERR no tokens are left below 2^53: this server cannot grant new holds any more";
  }
}

std::string MovedText(Slot slot, const ClusterNode& node, std::string_view endpoint_type) {
  std::string host = node.ip;
  if (endpoint_type == "hostname") host = node.hostname.empty() ? "?" : node.hostname;
  if (endpoint_type == "unknown-endpoint") host.clear();
  return "MOVED " + std::to_string(slot) + ' ' + host + ':' + node.port;
}

int ReplyAcquired(RedisModuleCtx* ctx, const Admission& admission) {
  if (admission.granted()) return ReplyToken(ctx, admission.token);
  if (admission.busy()) return RedisModule_ReplyWithNull(ctx);
  return RedisModule_ReplyWithError(ctx, TextFor(admission.outcome));
}

int ReplyCount(RedisModuleCtx* ctx, size_t count) {
  return RedisModule_ReplyWithLongLong(ctx, static_cast<long long>(count));
}

int ReplyToken(RedisModuleCtx* ctx, std::optional<Token> token) {
  if (!token.has_value()) return RedisModule_ReplyWithNull(ctx);
  return RedisModule_ReplyWithLongLong(ctx, static_cast<long long>(token->value));
}

int ReplyFlag(RedisModuleCtx* ctx, bool flag) {
  return RedisModule_ReplyWithLongLong(ctx, flag ? 1 : 0);
}

int ReplyInfo(RedisModuleCtx* ctx, const LockKey& key, const WaitQueue::Line* line, Instant now) {
  const Place place = key.place();
  const bool held = CountHolders(place, now) > 0;
  if (!held && line == nullptr) return RedisModule_ReplyWithNull(ctx);
  RedisModule_ReplyWithMap(ctx, 6);
  Field(ctx, "mode", NameOfMode(place, line, now));
  RedisModule_ReplyWithCString(ctx, "holders");
  if (held && place.plain.has_value()) {
    RedisModule_ReplyWithArray(ctx, 1);
    ReplyPlainHolder(ctx, *place.plain, now);
  } else if (held) {
    ReplyHolders(ctx, key.lock_name(), *place.lock, now);
  } else {
    RedisModule_ReplyWithArray(ctx, 0);
  }
  Field(ctx, "linger-left-ms", LingerLeft(place, now).count());
  Field(ctx, "waiting", line == nullptr ? 0 : static_cast<long long>(line->size()));
  ReplyLine(ctx, line);
  Field(ctx, "grace-left-ms", Tokens().GraceLeft(now).count());
  return REDISMODULE_OK;
}

int ReplyList(RedisModuleCtx* ctx, RedisModuleCallReply* found, Instant now) {
  if (found == nullptr) {
    return RedisModule_ReplyWithError(ctx, "ERR LOCK.LIST needs SCAN, which this server lacks");
  }
  if (RedisModule_CallReplyType(found) == REDISMODULE_REPLY_ERROR) {
    return RedisModule_ReplyWithCallReply(ctx, found);
  }
  RedisModule_ReplyWithArray(ctx, 2);
  RedisModule_ReplyWithCallReply(ctx, RedisModule_CallReplyArrayElement(found, 0));
  RedisModule_ReplyWithArray(ctx, REDISMODULE_POSTPONED_LEN);
  const User caller(ctx);
  RedisModuleCallReply* keys = RedisModule_CallReplyArrayElement(found, 1);
  long shown = 0;
  for (size_t i = 0; i < RedisModule_CallReplyLength(keys); ++i) {
    RedisModuleString* name =
        RedisModule_CreateStringFromCallReply(RedisModule_CallReplyArrayElement(keys, i));
    if (ReplySummary(ctx, caller, name, now)) ++shown;
    RedisModule_FreeString(ctx, name);
  }
  RedisModule_ReplySetArrayLength(ctx, shown);
  return REDISMODULE_OK;
}

int ReplyTop(RedisModuleCtx* ctx, const std::vector<const WaitQueue::Line*>& lines, size_t most,
             Instant now) {
  const User caller(ctx);
  RedisModule_ReplyWithArray(ctx, REDISMODULE_POSTPONED_LEN);
  size_t shown = 0;
  for (const WaitQueue::Line* line : lines) {
    if (shown == most) break;
    const std::string_view key = line->lock().key;
    RedisModuleString* name = RedisModule_CreateString(ctx, key.data(), key.size());
    if (ReplySummary(ctx, caller, name, now)) ++shown;
    RedisModule_FreeString(ctx, name);
  }
  RedisModule_ReplySetArrayLength(ctx, static_cast<long>(shown));
  return REDISMODULE_OK;
}

int ReplyFenced(RedisModuleCtx* ctx, Token asked, std::optional<Token> holds) {
  const std::string text = "FENCED token " + std::to_string(asked.value) +
                           " does not hold the lock" +
                           (holds.has_value() ? ", token " + std::to_string(holds->value) + " does"
                                              : std::string(", no token does"));
  return RedisModule_ReplyWithError(ctx, text.c_str());
}

int ReplyNotPermitted(RedisModuleCtx* ctx, std::string_view command) {
  const std::string text =
      "NOPERM this user has no permissions to run the command after THEN: " + Quoted(command);
  return RedisModule_ReplyWithError(ctx, text.c_str());
}

int ReplyOf(RedisModuleCtx* ctx, RedisModuleCallReply* reply) {
  if (reply == nullptr) {
    return RedisModule_ReplyWithError(ctx, "ERR the command after THEN cannot be run there");
  }
  RedisModule_ReplyWithCallReply(ctx, reply);
  RedisModule_FreeCallReply(reply);
  return REDISMODULE_OK;
}

int ReplyError(RedisModuleCtx* ctx, const ParseError& error) {
  return RedisModule_ReplyWithError(ctx, error.text.c_str());
}

int ReplyWrongType(RedisModuleCtx* ctx) {
  return RedisModule_ReplyWithError(ctx, REDISMODULE_ERRORMSG_WRONGTYPE);
}

int ReplyReadOnly(RedisModuleCtx* ctx) {
  return RedisModule_ReplyWithError(
      ctx, "READONLY a replica decides nothing about locks, also a writable one: ask the primary");
}

int ReplyInternal(RedisModuleCtx* ctx, const char* command) {
  const std::string text = std::string("ERR ") + command +
                           " is internal: it is accepted from the primary and from the AOF only";
  return RedisModule_ReplyWithError(ctx, text.c_str());
}

int ReplyWaitLimit(RedisModuleCtx* ctx, size_t limit) {
  const std::string text = "WAITLIMIT " + std::to_string(limit) +
                           " clients wait on this server already, which is "
                           "turnstile.max-waiters: try again later";
  return RedisModule_ReplyWithError(ctx, text.c_str());
}

int ReplyUserWaitLimit(RedisModuleCtx* ctx, size_t limit) {
  const std::string text = "WAITLIMIT " + std::to_string(limit) +
                           " clients of this user wait on this server already, which is "
                           "turnstile.max-waiters-per-user: try again later";
  return RedisModule_ReplyWithError(ctx, text.c_str());
}

int ReplyCannotWait(RedisModuleCtx* ctx) {
  return RedisModule_ReplyWithError(
      ctx,
      "ERR this server does not let a connection wait that has subscriptions (RESP3): send "
      "LOCK.ACQUIRE with WAIT over another connection, or without WAIT");
}

int ReplyNoSession(RedisModuleCtx* ctx) {
  return RedisModule_ReplyWithError(
      ctx, "ERR SESSION needs a connection, and inside scripts and functions there is none");
}

int ReplyDeadlock(RedisModuleCtx* ctx, const std::vector<CycleStep>& cycle) {
  const User caller(ctx);
  const auto visible = [&](LockName lock) {
    RedisModuleString* name = RedisModule_CreateString(ctx, lock.key.data(), lock.key.size());
    const bool may = caller.MayRead(name);
    RedisModule_FreeString(ctx, name);
    return may;
  };
  return RedisModule_ReplyWithError(ctx, ("DEADLOCK " + DescribeCycle(cycle, visible)).c_str());
}

}  // namespace turnstile
