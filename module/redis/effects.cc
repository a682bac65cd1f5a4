#include "redis/effects.h"

#include <algorithm>
#include <variant>

#include "redis/tokens.h"
#include "redis/waiters.h"

namespace turnstile {
namespace {

void Store(RedisModuleCtx* ctx, LockKey& key, const Held& held) {
  key.Store(Apply(key.lock(), held), held.hold.end);
  Tokens().Observe(held.hold.token);
  TheWaiters().HolderChanged(key.lock_name(), Holder{held.hold.owner, held.hold.end});
  RedisModule_SignalModifiedKey(ctx, key.name());
}

struct Effects {
  RedisModuleCtx* ctx;
  LockKey& key;
  Carrier carrier;

  void operator()(const Held& held) const {
    Store(ctx, key, held);
    EmitHeld([this](auto... args) { RedisModule_Replicate(ctx, args...); }, key.name(), held.hold);
  }

  // Deleting the key runs the type's unlink callback, which wakes the line.
  void operator()(const Freed& freed) const {
    key.Delete();
    RedisModule_SignalModifiedKey(ctx, key.name());
    if (carrier == Carrier::kCommand) {
      RedisModule_ReplicateVerbatim(ctx);  // the LOCK.RELEASE that is running
    } else {
      RedisModule_Replicate(ctx, "LOCK.RELEASE", "sb", key.name(), freed.owner.bytes.data(),
                            freed.owner.bytes.size());
    }
  }

  // A plain lock is not ours: it is changed by the server's own commands, which also notify,
  // signal and replicate themselves.
  void operator()(const PlainFreed& /*freed*/) const {
    key.Close();
    RedisModule_FreeCallReply(RedisModule_Call(ctx, "DEL", "!s", key.name()));
  }

  void operator()(const PlainExtended& extended) const {
    key.Close();
    RedisModule_FreeCallReply(
        RedisModule_Call(ctx, "PEXPIREAT", "!sl", key.name(),
                         static_cast<long long>(extended.end.time_since_epoch().count())));
  }
};

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

// What is true of every holder.
void CommonHolderFields(RedisModuleCtx* ctx) {
  Field(ctx, "count", 1);
  RedisModule_ReplyWithCString(ctx, "session");
  RedisModule_ReplyWithBool(ctx, 0);
}

constexpr long kHolderFields = 6;

void ReplyHolder(RedisModuleCtx* ctx, const Hold& hold, Instant now) {
  RedisModule_ReplyWithMap(ctx, kHolderFields);
  Field(ctx, "owner", hold.owner.bytes);
  Field(ctx, "token", static_cast<long long>(hold.token.value));
  Field(ctx, "lease-left-ms", (hold.end - now).count());
  Field(ctx, "held-ms", std::max(now - hold.since, Millis{0}).count());
  CommonHolderFields(ctx);
}

void ReplyPlainHolder(RedisModuleCtx* ctx, const PlainLock& plain, Instant now) {
  RedisModule_ReplyWithMap(ctx, kHolderFields);
  Field(ctx, "owner", plain.value);
  NullField(ctx, "token");
  if (plain.end == kMaxInstant) {
    NullField(ctx, "lease-left-ms");
  } else {
    Field(ctx, "lease-left-ms", (plain.end - now).count());
  }
  NullField(ctx, "held-ms");
  CommonHolderFields(ctx);
}

// Those in front, in order.
void ReplyLine(RedisModuleCtx* ctx, const WaitQueue::Line* line, Instant now) {
  constexpr long kShown = 100;
  RedisModule_ReplyWithCString(ctx, "line");
  if (line == nullptr) {
    RedisModule_ReplyWithArray(ctx, 0);
    return;
  }
  RedisModule_ReplyWithArray(ctx, std::min(static_cast<long>(line->size()), kShown));
  long shown = 0;
  for (const auto* waiter = line->first(); waiter != nullptr && shown < kShown; ++shown) {
    RedisModule_ReplyWithMap(ctx, 4);
    Field(ctx, "owner", waiter->request().owner.bytes);
    Field(ctx, "mode", "exclusive");
    Field(ctx, "waited-ms", std::max(now - waiter->since(), Millis{0}).count());
    Field(ctx, "left-ms", std::max(waiter->deadline() - now, Millis{0}).count());
    waiter = waiter->behind();
  }
}

// Whether the calling client may read a key.
bool CallerMayRead(RedisModuleCtx* ctx, std::string_view key) {
  RedisModuleString* user_name = RedisModule_GetCurrentUserName(ctx);
  RedisModuleUser* user = RedisModule_GetModuleUserFromUserName(user_name);
  RedisModuleString* name = RedisModule_CreateString(ctx, key.data(), key.size());
  const bool may = user != nullptr && RedisModule_ACLCheckKeyPermissions(
                                          user, name, REDISMODULE_CMD_KEY_ACCESS) == REDISMODULE_OK;
  RedisModule_FreeString(ctx, name);
  if (user != nullptr) RedisModule_FreeModuleUser(user);
  RedisModule_FreeString(ctx, user_name);
  return may;
}

}  // namespace

void CarryOut(RedisModuleCtx* ctx, LockKey& key, const Change& change, Carrier carrier) {
  std::visit(Effects{ctx, key, carrier}, change);
}

void Obey(RedisModuleCtx* ctx, LockKey& key, const Held& held) {
  Store(ctx, key, held);
  RedisModule_ReplicateVerbatim(ctx);
}

void Obey(RedisModuleCtx* ctx, const FloorFact& floor) {
  Tokens().Observe(floor.token);
  RedisModule_ReplicateVerbatim(ctx);
}

void TellFloor(RedisModuleCtx* ctx, Token floor) {
  RedisModule_Replicate(ctx, kFactCommand, "cl", kFactFloor.data(),
                        static_cast<long long>(floor.value));
}

int ReplyAcquired(RedisModuleCtx* ctx, const Decision& decision) {
  if (decision.outcome == Outcome::kTokensUsedUp) {
    return RedisModule_ReplyWithError(ctx, kTokensUsedUpText);
  }
  if (!decision.change.has_value()) return RedisModule_ReplyWithNull(ctx);
  return ReplyToken(ctx, std::get<Held>(*decision.change).hold.token);
}

int ReplyDone(RedisModuleCtx* ctx, const Decision& decision) {
  return ReplyFlag(ctx, decision.change.has_value());
}

int ReplyToken(RedisModuleCtx* ctx, std::optional<Token> token) {
  if (!token.has_value()) return RedisModule_ReplyWithNull(ctx);
  return RedisModule_ReplyWithLongLong(ctx, static_cast<long long>(token->value));
}

int ReplyFlag(RedisModuleCtx* ctx, bool flag) {
  return RedisModule_ReplyWithLongLong(ctx, flag ? 1 : 0);
}

int ReplyInfo(RedisModuleCtx* ctx, const Place& place, const WaitQueue::Line* line, Instant now) {
  const bool held = HolderOf(place, now).has_value();
  if (!held && line == nullptr) return RedisModule_ReplyWithNull(ctx);
  const bool plain = held && place.plain.has_value();
  RedisModule_ReplyWithMap(ctx, 5);
  Field(ctx, "mode", plain ? "plain" : "exclusive");
  RedisModule_ReplyWithCString(ctx, "holders");
  RedisModule_ReplyWithArray(ctx, held ? 1 : 0);
  if (plain) {
    ReplyPlainHolder(ctx, *place.plain, now);
  } else if (held) {
    ReplyHolder(ctx, place.lock->hold(), now);
  }
  Field(ctx, "linger-left-ms", 0);
  Field(ctx, "waiting", line == nullptr ? 0 : static_cast<long long>(line->size()));
  ReplyLine(ctx, line, now);
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

int ReplyInternal(RedisModuleCtx* ctx) {
  return RedisModule_ReplyWithError(
      ctx, "ERR LOCK.FACT is internal: it is accepted from the primary and from the AOF only");
}

int ReplyWaitLimit(RedisModuleCtx* ctx, size_t limit) {
  const std::string text = "WAITLIMIT " + std::to_string(limit) +
                           " clients wait on this server already, which is "
                           "turnstile.max-waiters: try again later";
  return RedisModule_ReplyWithError(ctx, text.c_str());
}

int ReplyDeadlock(RedisModuleCtx* ctx, const std::vector<WaitQueue::Step>& cycle) {
  const std::string text = "DEADLOCK " + DescribeCycle(cycle, [ctx](LockName lock) {
                             return CallerMayRead(ctx, lock.key);
                           });
  return RedisModule_ReplyWithError(ctx, text.c_str());
}

}  // namespace turnstile
