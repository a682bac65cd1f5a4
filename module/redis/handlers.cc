#include "redis/handlers.h"

#include <algorithm>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/engine.h"
#include "core/fact.h"
#include "core/request.h"
#include "redis/command_names.h"
#include "redis/instance.h"
#include "redis/lock_type.h"
#include "redis/replies.h"
#include "redis/user.h"

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

// The keys of a request, as the engine wants them. A request for one costs no allocation.
class KeyNames {
 public:
  // The first is argv[kKey]; `also` are others, and a part of `args`.
  KeyNames(const ArgViews& args, RedisModuleString** argv, Keys also)
      : first_{.lock = {0, args.args().front()}, .handle = argv[kKey]}, names_(&first_, 1) {
    if (also.empty()) return;
    const auto names = NamesOf(also, args, argv);
    all_.reserve(1 + also.size());
    all_.push_back(first_);
    for (size_t i = 0; i < also.size(); ++i) {
      all_.push_back({.lock = {0, also[i]}, .handle = names[i]});
    }
    names_ = all_;
  }
  KeyNames(const KeyNames&) = delete;
  KeyNames& operator=(const KeyNames&) = delete;

  std::span<const KeyName> get() const { return names_; }

 private:
  KeyName first_;
  std::vector<KeyName> all_;  // if there are more
  std::span<const KeyName> names_;
};

Instant MomentNow() { return ToInstant(WallNow()); }
Now BothNow() { return {.wall = WallNow(), .steady = SteadyNow()}; }

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
  Instance& instance = TheInstance();
  const ArgViews args(argv, argc, kKey);
  const auto parsed =
      ParseAcquire(args.args(), Limits{.max_lease = instance.engine.settings().max_lease});
  if (const auto* error = std::get_if<ParseError>(&parsed)) return ReplyError(ctx, *error);
  if (instance.host.server().SourceOf(ctx) != Source::kCaller) return ReplyReadOnly(ctx);
  const auto& request = std::get<AcquireRequest>(parsed);
  const RedisHost::Scope scope(instance.host, ctx);
  const KeyNames names(args, argv, request.also);
  const AcquireResult result = instance.engine.Acquire(names.get(), request, BothNow());
  return ReplyAcquired(ctx, result,
                       [ctx](LockName lock) { return User(ctx).MayLookAt(ctx, lock); });
}

// LOCK.RELEASE key owner [ALSO numkeys key [key ...]]
int HandleRelease(RedisModuleCtx* ctx, RedisModuleString** argv, int argc) {
  if (RedisModule_IsKeysPositionRequest(ctx) != 0) {
    return DeclareKeys(ctx, argv, argc, kReleasesKey);
  }
  Instance& instance = TheInstance();
  const ArgViews args(argv, argc, kKey);
  const auto parsed = ParseRelease(args.args());
  if (const auto* error = std::get_if<ParseError>(&parsed)) return ReplyError(ctx, *error);
  const Source source = instance.host.server().SourceOf(ctx);
  if (source == Source::kReplica) return ReplyReadOnly(ctx);
  const auto& request = std::get<ReleaseRequest>(parsed);
  const RedisHost::Scope scope(instance.host, ctx);
  const KeyNames names(args, argv, request.also);
  if (source == Source::kObeyed) {
    for (const KeyName& name : names.get()) instance.engine.ApplyRelease(name, request.owner);
    return RedisModule_ReplyWithLongLong(ctx, static_cast<long long>(names.get().size()));
  }
  return ReplyCount(ctx, instance.engine.Release(names.get(), request, MomentNow()),
                    kReleaseCommand);
}

// LOCK.TOUCH key owner <PX ms | EX s> [ALSO numkeys key [key ...]]
int HandleTouch(RedisModuleCtx* ctx, RedisModuleString** argv, int argc) {
  if (RedisModule_IsKeysPositionRequest(ctx) != 0) return DeclareKeys(ctx, argv, argc, kUpdatesKey);
  Instance& instance = TheInstance();
  const ArgViews args(argv, argc, kKey);
  const auto parsed =
      ParseTouch(args.args(), Limits{.max_lease = instance.engine.settings().max_lease});
  if (const auto* error = std::get_if<ParseError>(&parsed)) return ReplyError(ctx, *error);
  if (instance.host.server().SourceOf(ctx) != Source::kCaller) return ReplyReadOnly(ctx);
  const auto& request = std::get<TouchRequest>(parsed);
  const RedisHost::Scope scope(instance.host, ctx);
  const KeyNames names(args, argv, request.also);
  return ReplyCount(ctx, instance.engine.Touch(names.get(), request, MomentNow()), kTouchCommand);
}

// LOCK.FENCE key [token] [THEN command [arg ...]]
int HandleFence(RedisModuleCtx* ctx, RedisModuleString** argv, int argc) {
  if (RedisModule_IsKeysPositionRequest(ctx) != 0) {
    DeclareFenceKeys(ctx, {argv, static_cast<size_t>(argc)});
    return REDISMODULE_OK;
  }
  Instance& instance = TheInstance();
  const ArgViews args(argv, argc, kKey);
  const auto parsed = ParseFence(args.args());
  if (const auto* error = std::get_if<ParseError>(&parsed)) return ReplyError(ctx, *error);
  if (instance.host.server().SourceOf(ctx) != Source::kCaller) return ReplyReadOnly(ctx);
  const auto& request = std::get<FenceRequest>(parsed);
  const auto guarded = NamesOf(request.then, args, argv);
  if (!guarded.empty()) {
    const User caller(ctx);
    if (!caller.MayRun(guarded)) {
      caller.LogRefusal(ctx, guarded);
      return ReplyNotPermitted(ctx, request.then.front());
    }
  }
  const RedisHost::Scope scope(instance.host, ctx);
  const KeyNames names(args, argv, {});
  const FenceResult result = instance.engine.Fence(names.get().front(), request, MomentNow());
  if (result.wrong_type) return ReplyWrongType(ctx);
  if (!request.token.has_value()) return ReplyToken(ctx, result.holds);
  if (guarded.empty()) return ReplyFlag(ctx, result.current);
  if (!result.current) return ReplyFenced(ctx, *request.token, result.holds);
  return ReplyOf(ctx, Run(ctx, guarded));
}

// LOCK.INFO key
int HandleInfo(RedisModuleCtx* ctx, RedisModuleString** argv, int argc) {
  Instance& instance = TheInstance();
  const ArgViews args(argv, argc, kKey);
  const auto parsed = ParseInfo(args.args());
  if (const auto* error = std::get_if<ParseError>(&parsed)) return ReplyError(ctx, *error);
  const RedisHost::Scope scope(instance.host, ctx);
  const KeyNames names(args, argv, {});
  auto info = instance.engine.Inspect(names.get().front(), BothNow());
  if (!info.has_value()) return ReplyWrongType(ctx);
  if (info->has_value() && (*info)->is_plain && !User(ctx).MayGet(argv[kKey])) {
    (*info)->holders.front().owner.reset();
  }
  return ReplyInfo(ctx, *info);
}

namespace {

// Summaries of locks, without those on which the caller may not run LOCK.INFO. Stops when it has
// done much, so that the server is not held up.
class Summaries {
 public:
  Summaries(RedisModuleCtx* ctx, const Now& now) : caller_(ctx), now_(now) {}

  void Add(RedisModuleString* name) {
    constexpr size_t kLook = 2;  // the check of access rights, and opening the key
    budget_.Spend(kLook);
    if (!caller_.MayLookAt(name)) return;
    auto summary =
        TheInstance().engine.Summarize({.lock = {0, ToView(name)}, .handle = name}, now_, budget_);
    if (!summary.has_value()) return;
    if (summary->is_plain && !caller_.MayGet(name)) summary->owner.reset();
    locks_.push_back(std::move(*summary));
  }

  Budget& budget() { return budget_; }
  const std::vector<LockSummary>& locks() const { return locks_; }

 private:
  User caller_;
  Now now_;
  // What one call of LOCK.LIST or LOCK.TOP may do, however much there is to tell; in units of about
  // a microsecond.
  Budget budget_{10'000};
  std::vector<LockSummary> locks_;
};

std::string TextOf(RedisModuleCallReply* reply) {
  size_t size = 0;
  const char* bytes = RedisModule_CallReplyStringPtr(reply, &size);
  return bytes == nullptr ? std::string() : std::string(bytes, size);
}

// Goes on from `cursor` for as many keys as are asked for, a few at a time: how much there is to do
// for a key is known only when it is found, and SCAN cannot be stopped in the middle. Returns the
// server's error, if there is one.
std::string ScanLocks(RedisModuleCtx* ctx, const ListRequest& request, std::string& cursor,
                      Summaries& summaries) {
  constexpr int64_t kStep = 100;
  const std::string_view match = request.match.value_or("*");
  int64_t left = request.count;
  do {
    const int64_t step = std::min(left, kStep);
    RedisModuleCallReply* found = RedisModule_Call(
        ctx, "SCAN", "Ebcbclcc", cursor.data(), cursor.size(), "MATCH", match.data(), match.size(),
        "COUNT", static_cast<long long>(step), "TYPE", kTypeName);
    if (found == nullptr) return "ERR LOCK.LIST needs SCAN, which this server lacks";
    if (RedisModule_CallReplyType(found) == REDISMODULE_REPLY_ERROR) {
      std::string error = TextOf(found);
      RedisModule_FreeCallReply(found);
      return error;
    }
    cursor = TextOf(RedisModule_CallReplyArrayElement(found, 0));
    RedisModuleCallReply* keys = RedisModule_CallReplyArrayElement(found, 1);
    for (size_t i = 0; i < RedisModule_CallReplyLength(keys); ++i) {
      RedisModuleString* name =
          RedisModule_CreateStringFromCallReply(RedisModule_CallReplyArrayElement(keys, i));
      summaries.Add(name);
      RedisModule_FreeString(ctx, name);
    }
    RedisModule_FreeCallReply(found);
    summaries.budget().Spend(static_cast<size_t>(step));
    left -= step;
  } while (left > 0 && !summaries.budget().spent() && cursor != "0");
  return "";
}

}  // namespace

// LOCK.LIST [MATCH pattern] [COUNT n] [CURSOR c]
int HandleList(RedisModuleCtx* ctx, RedisModuleString** argv, int argc) {
  const ArgViews args(argv, argc, 1);
  const auto parsed = ParseList(args.args());
  if (const auto* error = std::get_if<ParseError>(&parsed)) return ReplyError(ctx, *error);
  const auto& request = std::get<ListRequest>(parsed);
  const RedisHost::Scope scope(TheInstance().host, ctx);
  Summaries summaries(ctx, BothNow());
  std::string cursor(request.cursor);
  const std::string error = ScanLocks(ctx, request, cursor, summaries);
  if (!error.empty()) return RedisModule_ReplyWithError(ctx, error.c_str());
  return ReplyList(ctx, cursor, summaries.locks());
}

// LOCK.TOP [n]
int HandleTop(RedisModuleCtx* ctx, RedisModuleString** argv, int argc) {
  const ArgViews args(argv, argc, 1);
  const auto parsed = ParseTop(args.args());
  if (const auto* error = std::get_if<ParseError>(&parsed)) return ReplyError(ctx, *error);
  constexpr size_t kMostLinesExamined = 10'000;  // a caller may read few of them, or none
  Instance& instance = TheInstance();
  const RedisHost::Scope scope(instance.host, ctx);
  Summaries summaries(ctx, BothNow());
  const size_t most = std::get<TopRequest>(parsed).most;
  for (const std::string& key :
       instance.engine.LongestLines(RedisModule_GetSelectedDb(ctx), kMostLinesExamined)) {
    if (summaries.locks().size() == most || summaries.budget().spent()) break;
    RedisModuleString* name = RedisModule_CreateString(ctx, key.data(), key.size());
    summaries.Add(name);
    RedisModule_FreeString(ctx, name);
  }
  return ReplyTop(ctx, summaries.locks());
}

// LOCK.PROBE key
int HandleProbe(RedisModuleCtx* ctx, RedisModuleString** /*argv*/, int /*argc*/) {
  return RedisModule_ReplyWithSimpleString(ctx, "OK");
}

// LOCK.HELD key owner "token since-ms end-ms" [SHARED | LIMIT] [COUNT n] [LINGER ms]
int HandleHeld(RedisModuleCtx* ctx, RedisModuleString** argv, int argc) {
  Instance& instance = TheInstance();
  if (instance.host.server().SourceOf(ctx) != Source::kObeyed) {
    return ReplyInternal(ctx, kHeldCommand);
  }
  const ArgViews args(argv, argc, kKey);
  const auto parsed = ParseHeldFact(args.args());
  if (const auto* error = std::get_if<ParseError>(&parsed)) return ReplyError(ctx, *error);
  const RedisHost::Scope scope(instance.host, ctx);
  const KeyNames names(args, argv, {});
  instance.engine.ApplyFact(names.get().front(), std::get<HeldFact>(parsed));
  return RedisModule_ReplyWithSimpleString(ctx, "OK");
}

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
  Instance& instance = TheInstance();
  if (instance.host.server().SourceOf(ctx) != Source::kObeyed) {
    return ReplyInternal(ctx, kFactCommand);
  }
  const auto parsed = ParseFact(all.args());
  if (const auto* error = std::get_if<ParseError>(&parsed)) return ReplyError(ctx, *error);
  const RedisHost::Scope scope(instance.host, ctx);
  instance.engine.ApplyFact({.lock = {0, all.args()[kFactKey - 1]}, .handle = argv[kFactKey]},
                            std::get<Fact>(parsed));
  return RedisModule_ReplyWithSimpleString(ctx, "OK");
}

}  // namespace turnstile
