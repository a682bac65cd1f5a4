#include "redis/handlers.h"

#include <algorithm>
#include <array>
#include <string_view>
#include <variant>
#include <vector>

#include "core/fact.h"
#include "core/lock.h"
#include "core/request.h"
#include "redis/command_table.h"
#include "redis/config.h"
#include "redis/effects.h"
#include "redis/lock_type.h"
#include "redis/tokens.h"
#include "redis/waiters.h"

namespace turnstile {
namespace {

// The arguments as the core reads them. Commands are short: a request of ordinary length costs no
// allocation.
class ArgViews {
 public:
  // Those from argv[first] on.
  ArgViews(RedisModuleString** argv, int argc, int first) {
    const auto count = static_cast<size_t>(argc - first);
    std::string_view* to = few_.data();
    if (count > few_.size()) {
      many_.resize(count);
      to = many_.data();
    }
    std::transform(argv + first, argv + argc, to, ToView);
    args_ = Args(to, count);
  }
  ArgViews(const ArgViews&) = delete;
  ArgViews& operator=(const ArgViews&) = delete;

  Args args() const { return args_; }

 private:
  std::array<std::string_view, 8> few_;
  std::vector<std::string_view> many_;
  Args args_;
};

constexpr int kKey = 1;       // argv[1] is the lock's key in every command of a client
constexpr int kAfterKey = 2;  // where the rest of the request begins

// Inside MULTI, scripts, functions and calls of other modules a client cannot be made to wait.
bool MayBlock(RedisModuleCtx* ctx) {
  return (RedisModule_GetContextFlags(ctx) & REDISMODULE_CTX_FLAGS_DENY_BLOCKING) == 0;
}

}  // namespace

// LOCK.ACQUIRE key owner <PX ms | EX s> [WAIT ms]
int HandleAcquire(RedisModuleCtx* ctx, RedisModuleString** argv, int argc) {
  const ArgViews rest(argv, argc, kAfterKey);
  const auto parsed = ParseAcquire(rest.args(), CurrentLimits());
  if (const auto* error = std::get_if<ParseError>(&parsed)) return ReplyError(ctx, *error);
  if (SourceOf(ctx) != Source::kCaller) return ReplyReadOnly(ctx);

  LockKey key(ctx, argv[kKey], LockKey::Access::kChange);
  if (key.wrong_type()) return ReplyWrongType(ctx);
  const auto& request = std::get<AcquireRequest>(parsed);
  Waiters& waiters = TheWaiters();
  const Ahead ahead = waiters.Find(key.lock_name()) == nullptr ? Ahead::kNobody : Ahead::kOthers;
  const FineInstant now = WallNow();
  const Decision decision = Decide(key.place(), request, ahead, now, Tokens().Issuing(now));
  if (decision.change.has_value()) {
    CarryOut(ctx, key, *decision.change, Carrier::kCommand);
    waiters.OwnerWasTold(key.lock_name(), request.owner);
  } else if (request.wait > Millis{0} && MayBlock(ctx) &&
             decision.outcome != Outcome::kTokensUsedUp) {
    return waiters.Park(ctx, key, request, now);
  }
  return ReplyAcquired(ctx, decision);
}

// LOCK.RELEASE key owner
int HandleRelease(RedisModuleCtx* ctx, RedisModuleString** argv, int argc) {
  const ArgViews rest(argv, argc, kAfterKey);
  const auto parsed = ParseRelease(rest.args());
  if (const auto* error = std::get_if<ParseError>(&parsed)) return ReplyError(ctx, *error);
  const Source source = SourceOf(ctx);
  if (source == Source::kReplica) return ReplyReadOnly(ctx);

  LockKey key(ctx, argv[kKey], LockKey::Access::kChange);
  if (key.wrong_type()) return ReplyWrongType(ctx);
  const Instant now = source == Source::kObeyed ? kBeforeAnyEnd : ToInstant(WallNow());
  const Decision decision = Decide(key.place(), std::get<ReleaseRequest>(parsed), now);
  if (decision.change.has_value()) CarryOut(ctx, key, *decision.change, Carrier::kCommand);
  return ReplyDone(ctx, decision);
}

// LOCK.TOUCH key owner <PX ms | EX s>
int HandleTouch(RedisModuleCtx* ctx, RedisModuleString** argv, int argc) {
  const ArgViews rest(argv, argc, kAfterKey);
  const auto parsed = ParseTouch(rest.args(), CurrentLimits());
  if (const auto* error = std::get_if<ParseError>(&parsed)) return ReplyError(ctx, *error);
  if (SourceOf(ctx) != Source::kCaller) return ReplyReadOnly(ctx);

  LockKey key(ctx, argv[kKey], LockKey::Access::kChange);
  if (key.wrong_type()) return ReplyWrongType(ctx);
  const auto& request = std::get<TouchRequest>(parsed);
  const Decision decision = Decide(key.place(), request, ToInstant(WallNow()));
  if (decision.change.has_value()) {
    CarryOut(ctx, key, *decision.change, Carrier::kCommand);
    TheWaiters().OwnerWasTold(key.lock_name(), request.owner);
  }
  return ReplyDone(ctx, decision);
}

// LOCK.FENCE key [token]
int HandleFence(RedisModuleCtx* ctx, RedisModuleString** argv, int argc) {
  const ArgViews rest(argv, argc, kAfterKey);
  const auto parsed = ParseFence(rest.args());
  if (const auto* error = std::get_if<ParseError>(&parsed)) return ReplyError(ctx, *error);
  if (SourceOf(ctx) != Source::kCaller) return ReplyReadOnly(ctx);

  const LockKey key(ctx, argv[kKey], LockKey::Access::kLook);
  if (key.wrong_type()) return ReplyWrongType(ctx);
  const auto& request = std::get<FenceRequest>(parsed);
  const Place place = key.place();
  const Instant now = ToInstant(WallNow());
  if (request.token.has_value()) return ReplyFlag(ctx, IsCurrent(place, *request.token, now));
  return ReplyToken(ctx, CurrentToken(place, now));
}

// LOCK.INFO key
int HandleInfo(RedisModuleCtx* ctx, RedisModuleString** argv, int /*argc*/) {
  const LockKey key(ctx, argv[kKey], LockKey::Access::kLook);
  if (key.wrong_type()) return ReplyWrongType(ctx);
  return ReplyInfo(ctx, key.place(), TheWaiters().Find(key.lock_name()), ToInstant(WallNow()));
}

// LOCK.HELP
int HandleHelp(RedisModuleCtx* ctx, RedisModuleString** /*argv*/, int /*argc*/) {
  const std::vector<std::string> lines = HelpLines();
  RedisModule_ReplyWithArray(ctx, static_cast<long>(lines.size()));
  for (const std::string& line : lines) {
    RedisModule_ReplyWithStringBuffer(ctx, line.data(), line.size());
  }
  return REDISMODULE_OK;
}

// LOCK.PROBE key
int HandleProbe(RedisModuleCtx* ctx, RedisModuleString** /*argv*/, int /*argc*/) {
  return RedisModule_ReplyWithSimpleString(ctx, "OK");
}

// LOCK.FACT HELD key owner token since-ms end-ms
// LOCK.FACT FLOOR token
int HandleFact(RedisModuleCtx* ctx, RedisModuleString** argv, int argc) {
  constexpr int kFactKey = 2;
  const ArgViews all(argv, argc, 1);
  if (RedisModule_IsKeysPositionRequest(ctx) != 0) {
    if (argc > kFactKey && !IsKeyword(all.args()[0], kFactFloor)) {
      RedisModule_KeyAtPosWithFlags(ctx, kFactKey, REDISMODULE_CMD_KEY_OW);
    }
    return REDISMODULE_OK;
  }
  if (SourceOf(ctx) != Source::kObeyed) return ReplyInternal(ctx);
  const auto parsed = ParseFact(all.args());
  if (const auto* error = std::get_if<ParseError>(&parsed)) return ReplyError(ctx, *error);

  const auto& fact = std::get<Fact>(parsed);
  if (const auto* floor = std::get_if<FloorFact>(&fact)) {
    Obey(ctx, *floor);
  } else {
    LockKey key(ctx, argv[kFactKey], LockKey::Access::kChange);
    Obey(ctx, key, std::get<HeldFact>(fact).held);
  }
  return RedisModule_ReplyWithSimpleString(ctx, "OK");
}

}  // namespace turnstile
