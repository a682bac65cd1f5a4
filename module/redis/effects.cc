#include "redis/effects.h"

#include <algorithm>
#include <variant>

#include "redis/tokens.h"

namespace turnstile {
namespace {

void Store(RedisModuleCtx* ctx, LockKey& key, const Held& held) {
  key.Store(Apply(key.lock(), held), held.hold.end);
  Tokens().Observe(held.hold.token);
  RedisModule_SignalModifiedKey(ctx, key.name());
}

struct Effects {
  RedisModuleCtx* ctx;
  LockKey& key;

  void operator()(const Held& held) const {
    Store(ctx, key, held);
    EmitHeld([this](auto... args) { RedisModule_Replicate(ctx, args...); }, key.name(), held.hold);
  }

  void operator()(const Freed& /*freed*/) const {
    key.Delete();
    RedisModule_SignalModifiedKey(ctx, key.name());
    RedisModule_ReplicateVerbatim(ctx);  // the LOCK.RELEASE that is running
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

void EmptyField(RedisModuleCtx* ctx, const char* name) {
  RedisModule_ReplyWithCString(ctx, name);
  RedisModule_ReplyWithArray(ctx, 0);
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

void ReplyPlainHolder(RedisModuleCtx* ctx, const PlainLock& plain, Instant expiry, Instant now) {
  RedisModule_ReplyWithMap(ctx, kHolderFields);
  Field(ctx, "owner", plain.value);
  NullField(ctx, "token");
  if (expiry == kMaxInstant) {
    NullField(ctx, "lease-left-ms");
  } else {
    Field(ctx, "lease-left-ms", std::max(expiry - now, Millis{0}).count());
  }
  NullField(ctx, "held-ms");
  CommonHolderFields(ctx);
}

}  // namespace

void CarryOut(RedisModuleCtx* ctx, LockKey& key, const Change& change) {
  std::visit(Effects{ctx, key}, change);
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
    return RedisModule_ReplyWithError(
        ctx, "ERR no tokens are left below 2^53: this server cannot grant new holds any more");
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

int ReplyInfo(RedisModuleCtx* ctx, const Place& place, Instant expiry, Instant now) {
  const bool live = place.lock != nullptr && place.lock->hold().LiveAt(now);
  if (!live && !place.plain.has_value()) return RedisModule_ReplyWithNull(ctx);
  RedisModule_ReplyWithMap(ctx, 5);
  Field(ctx, "mode", live ? "exclusive" : "plain");
  RedisModule_ReplyWithCString(ctx, "holders");
  RedisModule_ReplyWithArray(ctx, 1);
  if (live) {
    ReplyHolder(ctx, place.lock->hold(), now);
  } else {
    ReplyPlainHolder(ctx, *place.plain, expiry, now);
  }
  Field(ctx, "linger-left-ms", 0);
  Field(ctx, "waiting", 0);
  EmptyField(ctx, "line");
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

}  // namespace turnstile
