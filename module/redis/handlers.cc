#include "redis/handlers.h"

#include <memory>
#include <span>
#include <string_view>
#include <variant>
#include <vector>

#include "core/decide.h"
#include "core/fact.h"
#include "core/request.h"
#include "redis/cluster.h"
#include "redis/command_table.h"
#include "redis/config.h"
#include "redis/effects.h"
#include "redis/events.h"
#include "redis/lock_type.h"
#include "redis/replies.h"
#include "redis/server_sessions.h"
#include "redis/server_state.h"
#include "redis/tokens.h"
#include "redis/user.h"
#include "redis/waiters.h"

namespace turnstile {
namespace {

// The arguments as the core reads them. Commands are short: a request of ordinary length costs no
// allocation.
class ArgViews {
 public:
  // Those from argv[first] on.
  [[gnu::always_inline]] ArgViews(RedisModuleString** argv, int argc, int first) {
    const auto count = static_cast<size_t>(argc - first);
    std::string_view* to = few_;
    if (count > kFew) {
      many_.resize(count);
      to = many_.data();
    }
    for (size_t i = 0; i < count; ++i) {
      std::construct_at(to + i, ToView(argv[first + static_cast<int>(i)]));
    }
    args_ = Args(to, count);
  }
  ArgViews(const ArgViews&) = delete;
  ArgViews& operator=(const ArgViews&) = delete;

  Args args() const { return args_; }

 private:
  static constexpr size_t kFew = 8;
  union {
    std::string_view few_[kFew];  // in a union, because nobody needs them to begin as empty ones
  };
  std::vector<std::string_view> many_;
  Args args_;
};

constexpr int kKey = 1;  // argv[1] is the lock's key in every command of a client

// The arguments that `part`, a part of `args`, are views of.
std::span<RedisModuleString*> NamesOf(Args part, const ArgViews& args, RedisModuleString** argv) {
  if (part.empty()) return {};
  return {argv + kKey + (part.data() - args.args().data()), part.size()};
}

// Names the keys of a request that may have ALSO, for a server that asks.
int DeclareKeys(RedisModuleCtx* ctx, RedisModuleString** argv, int argc, int use) {
  if (argc > kKey) RedisModule_KeyAtPosWithFlags(ctx, kKey, use);
  // As the key specification has it: the first ALSO behind the owner, which may be any word.
  int at = kKey + 2;
  while (at < argc && !IsKeyword(ToView(argv[at]), kAlso)) ++at;
  if (at + 1 >= argc) return REDISMODULE_OK;
  const int64_t count = ParseDigits(ToView(argv[at + 1])).value_or(0);
  for (int64_t i = 0; i < count && at + 2 + i < argc; ++i) {
    RedisModule_KeyAtPosWithFlags(ctx, at + 2 + static_cast<int>(i), use);
  }
  return REDISMODULE_OK;
}

// Inside MULTI, scripts, functions and calls of other modules a client cannot be made to wait.
bool MayBlock(RedisModuleCtx* ctx) {
  return (RedisModule_GetContextFlags(ctx) & REDISMODULE_CTX_FLAGS_DENY_BLOCKING) == 0 &&
         ConnectionOf(ctx).has_value();
}

// Holds whose connection has closed have ended for everybody, also those that are still in the key.
// This takes out the owner's, of which a command decides that concerns nobody else.
void EndClosedSessionsOf(RedisModuleCtx* ctx, LockKeys& keys, Owner owner, Instant now) {
  ServerSessions& sessions = TheSessions();
  if (!sessions.has_ended()) return;
  for (size_t i = 0; i < keys.size(); ++i) sessions.EndClosedOf(ctx, keys[i], owner, now);
}

// This takes out all of them, but of several crowded locks only a part: for the keys that it
// returns as true the rest was put off.
std::vector<bool> EndClosedSessions(RedisModuleCtx* ctx, LockKeys& keys, Instant now) {
  constexpr size_t kSteps = 10'000;
  ServerSessions& sessions = TheSessions();
  std::vector<bool> put_off;
  if (!sessions.has_ended()) return put_off;
  for (size_t i = 0; i < keys.size(); ++i) {
    put_off.push_back(!sessions.EndClosedIn(ctx, keys[i], now, kSteps / keys.size()));
  }
  return put_off;
}

// The command that the request needs to change a plain lock and that the server lacks; null if
// there is none. Asked before anything is changed.
template <typename Request>
const char* MissingCommand(RedisModuleCtx* ctx, LockKeys& keys, const Request& request,
                           Instant now) {
  for (size_t i = 0; i < keys.size(); ++i) {
    if (!keys[i].is_plain()) continue;
    const Decision decision = Decide(keys[i].place(), request, now);
    if (!decision.change.has_value()) continue;
    const char* command = CommandFor(*decision.change);
    if (!HasCommand(ctx, command)) return command;
  }
  return nullptr;
}

// --- The command after THEN -------------------------------------------------------------------

// Tells the server all keys of LOCK.FENCE, so that it checks rights and slots before anything runs:
// the lock's, which is only read, and those of the command after THEN, each as that command uses
// it. A LOCK.FENCE inside, which may have no THEN of its own, is not looked into any further.
void DeclareFenceKeys(RedisModuleCtx* ctx, std::span<RedisModuleString*> argv) {
  if (argv.size() > kKey) RedisModule_KeyAtPosWithFlags(ctx, kKey, kLooksAtKey);
  const size_t first = kThenAt + 1;
  if (argv.size() <= first || !IsKeyword(ToView(argv[kThenAt]), kThen)) return;
  if (IsKeyword(ToView(argv[first]), kFenceCommand)) {
    if (argv.size() > first + kKey) {
      RedisModule_KeyAtPosWithFlags(ctx, static_cast<int>(first) + kKey, kLooksAtKey);
    }
    return;
  }
  int count = 0;
  int* flags = nullptr;
  int* positions = RedisModule_GetCommandKeysWithFlags(
      ctx, argv.data() + first, static_cast<int>(argv.size() - first), &count, &flags);
  for (int i = 0; i < count; ++i) {
    RedisModule_KeyAtPosWithFlags(ctx, static_cast<int>(first) + positions[i], flags[i]);
  }
  if (positions != nullptr) RedisModule_Free(positions);
  if (flags != nullptr) RedisModule_Free(flags);
}

// Runs the command as the calling user (C), as from a script (S: nothing that changes the
// connection or blocks), in the caller's RESP version (0), under the memory rules (M), and
// replicates what it does (!). Errors come as replies (E). Null if the server does not even try.
RedisModuleCallReply* Run(RedisModuleCtx* ctx, std::span<RedisModuleString*> command) {
  const std::string_view name = ToView(command.front());
  if (name.find('\0') != std::string_view::npos) return nullptr;  // names end there for the server
  const NoConnection none;
  return RedisModule_Call(ctx, name.data(), "v0SCEM!", command.data() + 1, command.size() - 1);
}

}  // namespace

// LOCK.ACQUIRE key owner <PX ms | EX s> [WAIT ms] [SHARED | LIMIT n] [REENTRANT] [SESSION]
// [LINGER ms] [FLOOR token] [ALSO numkeys key [key ...]]
int HandleAcquire(RedisModuleCtx* ctx, RedisModuleString** argv, int argc) {
  if (RedisModule_IsKeysPositionRequest(ctx) != 0) return DeclareKeys(ctx, argv, argc, kUpdatesKey);
  const ArgViews args(argv, argc, kKey);
  const auto parsed = ParseAcquire(args.args(), CurrentLimits());
  if (const auto* error = std::get_if<ParseError>(&parsed)) return ReplyError(ctx, *error);
  if (TheServer().SourceOf(ctx) != Source::kCaller) return ReplyReadOnly(ctx);
  const auto& request = std::get<AcquireRequest>(parsed);
  const auto session = request.session ? ConnectionOf(ctx) : std::nullopt;
  if (request.session && !session.has_value()) return ReplyNoSession(ctx);

  const FineInstant now = WallNow();
  const Instant moment = ToInstant(now);
  CatchUpWithSlots(ctx, args.args().front(), now);
  LockKeys keys(ctx, argv[kKey], NamesOf(request.also, args, argv), LockKey::Access::kChange);
  if (keys.any_wrong_type()) return ReplyWrongType(ctx);
  EndClosedSessionsOf(ctx, keys, request.owner, moment);
  const std::vector<bool> put_off = EndClosedSessions(ctx, keys, moment);
  Waiters& waiters = TheWaiters();
  size_t index = 0;
  const Sites sites(keys, [&](const LockKey& key, const Place& place) {
    if (!put_off.empty() && put_off[index++]) return Crowd::Incompatible();
    return waiters.AheadOfNewcomer(key.lock_name(), place, request, moment);
  });
  const TokenClock& clock = Tokens().Issuing(now);
  const Admission admission = Decide(sites.get(), request, now, clock, CurrentRules(moment));
  if (admission.granted()) {
    ++(admission.is_new() ? TheStats().acquired_immediately : TheStats().reacquired);
    for (size_t i = 0; i < keys.size(); ++i) {
      CarryOutGrant(ctx, keys[i], request, admission.token, moment, session, Carrier::kFact);
      waiters.OwnerWasTold(keys[i].lock_name(), request.owner);
    }
  } else if (admission.busy() && request.wait > Millis{0} && MayBlock(ctx)) {
    return waiters.Park(ctx, keys, sites, request, session, now);
  } else if (admission.busy()) {
    ++TheStats().rejected;
  }
  return ReplyAcquired(ctx, admission);
}

// LOCK.RELEASE key owner [ALSO numkeys key [key ...]]
int HandleRelease(RedisModuleCtx* ctx, RedisModuleString** argv, int argc) {
  if (RedisModule_IsKeysPositionRequest(ctx) != 0) {
    return DeclareKeys(ctx, argv, argc, kReleasesKey);
  }
  const ArgViews args(argv, argc, kKey);
  const auto parsed = ParseRelease(args.args());
  if (const auto* error = std::get_if<ParseError>(&parsed)) return ReplyError(ctx, *error);
  const Source source = TheServer().SourceOf(ctx);
  if (source == Source::kReplica) return ReplyReadOnly(ctx);

  const auto& request = std::get<ReleaseRequest>(parsed);
  LockKeys keys(ctx, argv[kKey], NamesOf(request.also, args, argv), LockKey::Access::kChange);
  if (keys.any_wrong_type()) return ReplyWrongType(ctx);
  const Instant now = source == Source::kObeyed ? kBeforeAnyEnd : ToInstant(WallNow());
  if (const char* missing = MissingCommand(ctx, keys, request, now); missing != nullptr) {
    return ReplyMissingCommand(ctx, "LOCK.RELEASE", missing);
  }
  if (source == Source::kCaller) EndClosedSessionsOf(ctx, keys, request.owner, now);
  const Carrier carrier = keys.size() == 1 ? Carrier::kCommand : Carrier::kFact;
  std::vector<LockName> locks;
  for (size_t i = 0; i < keys.size(); ++i) locks.push_back(keys[i].lock_name());
  const std::vector<bool> waited = TheWaiters().CancelWaits(locks, request.owner);
  size_t released = 0;
  size_t given_up = 0;  // held or waited for
  for (size_t i = 0; i < keys.size(); ++i) {
    const Decision decision = Decide(keys[i].place(), request, now);
    if (decision.change.has_value()) CarryOut(ctx, keys[i], *decision.change, now, carrier);
    const bool held = decision.outcome == Outcome::kReleased;
    if (held) ++released;
    if (held || waited[i]) ++given_up;
  }
  if (source == Source::kCaller) {
    TheStats().released += released;
    TheStats().stale_releases += keys.size() - given_up;
  }
  return ReplyCount(ctx, given_up);
}

// LOCK.TOUCH key owner <PX ms | EX s> [ALSO numkeys key [key ...]]
int HandleTouch(RedisModuleCtx* ctx, RedisModuleString** argv, int argc) {
  if (RedisModule_IsKeysPositionRequest(ctx) != 0) return DeclareKeys(ctx, argv, argc, kUpdatesKey);
  const ArgViews args(argv, argc, kKey);
  const auto parsed = ParseTouch(args.args(), CurrentLimits());
  if (const auto* error = std::get_if<ParseError>(&parsed)) return ReplyError(ctx, *error);
  if (TheServer().SourceOf(ctx) != Source::kCaller) return ReplyReadOnly(ctx);

  const auto& request = std::get<TouchRequest>(parsed);
  LockKeys keys(ctx, argv[kKey], NamesOf(request.also, args, argv), LockKey::Access::kChange);
  if (keys.any_wrong_type()) return ReplyWrongType(ctx);
  const Instant now = ToInstant(WallNow());
  if (const char* missing = MissingCommand(ctx, keys, request, now); missing != nullptr) {
    return ReplyMissingCommand(ctx, "LOCK.TOUCH", missing);
  }
  EndClosedSessionsOf(ctx, keys, request.owner, now);
  size_t touched = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    const Decision decision = Decide(keys[i].place(), request, now);
    if (!decision.change.has_value()) continue;
    CarryOut(ctx, keys[i], *decision.change, now, Carrier::kFact);
    TheWaiters().OwnerWasTold(keys[i].lock_name(), request.owner);
    ++touched;
  }
  TheStats().touched += touched;
  TheStats().stale_touches += keys.size() - touched;
  return ReplyCount(ctx, touched);
}

// LOCK.FENCE key [token] [THEN command [arg ...]]
int HandleFence(RedisModuleCtx* ctx, RedisModuleString** argv, int argc) {
  if (RedisModule_IsKeysPositionRequest(ctx) != 0) {
    DeclareFenceKeys(ctx, {argv, static_cast<size_t>(argc)});
    return REDISMODULE_OK;
  }
  const ArgViews args(argv, argc, kKey);
  const auto parsed = ParseFence(args.args());
  if (const auto* error = std::get_if<ParseError>(&parsed)) return ReplyError(ctx, *error);
  if (TheServer().SourceOf(ctx) != Source::kCaller) return ReplyReadOnly(ctx);
  const auto& request = std::get<FenceRequest>(parsed);
  const auto guarded = NamesOf(request.then, args, argv);
  if (!guarded.empty()) {
    const User caller(ctx);
    if (!caller.MayRun(guarded)) {
      caller.LogRefusal(ctx, guarded);
      return ReplyNotPermitted(ctx, request.then.front());
    }
  }

  const Instant now = ToInstant(WallNow());
  if (TheSessions().has_ended()) {
    LockKeys keys(ctx, argv[kKey], {}, LockKey::Access::kInspect);
    EndClosedSessions(ctx, keys, now);
  }
  {
    const LockKey key(ctx, argv[kKey], LockKey::Access::kLook);
    if (key.wrong_type()) return ReplyWrongType(ctx);
    const Place place = key.place();
    const std::optional<Token> holds = CurrentToken(place, now);
    if (!request.token.has_value()) return ReplyToken(ctx, holds);
    const bool current = IsCurrent(place, *request.token, now);
    if (guarded.empty()) return ReplyFlag(ctx, current);
    ++(current ? TheStats().fence_passed : TheStats().fence_rejected);
    if (!current) return ReplyFenced(ctx, *request.token, holds);
  }
  return ReplyOf(ctx, Run(ctx, guarded));
}

// LOCK.INFO key
int HandleInfo(RedisModuleCtx* ctx, RedisModuleString** argv, int argc) {
  const ArgViews args(argv, argc, kKey);
  const auto parsed = ParseInfo(args.args());
  if (const auto* error = std::get_if<ParseError>(&parsed)) return ReplyError(ctx, *error);
  const LockKey key(ctx, argv[kKey], LockKey::Access::kLook);
  if (key.wrong_type()) return ReplyWrongType(ctx);
  return ReplyInfo(ctx, key, TheWaiters().Find(key.lock_name()), ToInstant(WallNow()));
}

// LOCK.LIST [MATCH pattern] [COUNT n] [CURSOR c]
int HandleList(RedisModuleCtx* ctx, RedisModuleString** argv, int argc) {
  const ArgViews args(argv, argc, 1);
  const auto parsed = ParseList(args.args());
  if (const auto* error = std::get_if<ParseError>(&parsed)) return ReplyError(ctx, *error);
  return ReplyList(ctx, std::get<ListRequest>(parsed), ToInstant(WallNow()));
}

// LOCK.TOP [n]
int HandleTop(RedisModuleCtx* ctx, RedisModuleString** argv, int argc) {
  const ArgViews args(argv, argc, 1);
  const auto parsed = ParseTop(args.args());
  if (const auto* error = std::get_if<ParseError>(&parsed)) return ReplyError(ctx, *error);
  constexpr size_t kMostLinesExamined = 10'000;  // a caller may read few of them, or none
  return ReplyTop(ctx,
                  TheWaiters().LongestLines(RedisModule_GetSelectedDb(ctx), kMostLinesExamined),
                  std::get<TopRequest>(parsed).most, ToInstant(WallNow()));
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

// LOCK.HELD key owner "token since-ms end-ms" [SHARED | LIMIT] [COUNT n] [LINGER ms]
int HandleHeld(RedisModuleCtx* ctx, RedisModuleString** argv, int argc) {
  if (TheServer().SourceOf(ctx) != Source::kObeyed) return ReplyInternal(ctx, kHeldCommand);
  const ArgViews args(argv, argc, kKey);
  const auto parsed = ParseHeldFact(args.args());
  if (const auto* error = std::get_if<ParseError>(&parsed)) return ReplyError(ctx, *error);
  LockKey key(ctx, argv[kKey], LockKey::Access::kChange);
  Obey(ctx, key, std::get<HeldFact>(parsed).held);
  return RedisModule_ReplyWithSimpleString(ctx, "OK");
}

// LOCK.FACT HELD key owner token since-ms end-ms [SHARED | LIMIT] [COUNT n] [LINGER ms]
// LOCK.FACT ENDED key owner [UNDELIVERED]
// LOCK.FACT EXPIRED key before-ms
// LOCK.FACT SESSION key at-ms owner [owner ...]
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
  if (TheServer().SourceOf(ctx) != Source::kObeyed) return ReplyInternal(ctx, kFactCommand);
  const auto parsed = ParseFact(all.args());
  if (const auto* error = std::get_if<ParseError>(&parsed)) return ReplyError(ctx, *error);

  const auto& fact = std::get<Fact>(parsed);
  if (const auto* floor = std::get_if<FloorFact>(&fact)) {
    Obey(ctx, *floor);
  } else {
    LockKey key(ctx, argv[kFactKey], LockKey::Access::kChange);
    if (const auto* ended = std::get_if<EndedFact>(&fact)) {
      Obey(ctx, key, ended->ended);
    } else if (const auto* expired = std::get_if<ExpiredFact>(&fact)) {
      Obey(ctx, key, expired->expired);
    } else if (const auto* session = std::get_if<SessionFact>(&fact)) {
      Obey(ctx, key, session->ended());
    } else {
      Obey(ctx, key, std::get<HeldFact>(fact).held);
    }
  }
  return RedisModule_ReplyWithSimpleString(ctx, "OK");
}

}  // namespace turnstile
