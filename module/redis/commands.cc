#include "redis/commands.h"

#include <algorithm>
#include <iterator>
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
#include "redis/lock_type.h"
#include "redis/redis_host.h"
#include "redis/replies.h"

namespace turnstile {
namespace {

// How the commands use their keys. The server gets this twice: from key specifications, which
// clients read too (below), and from the Handle functions themselves, when they are called to
// report the keys of a request. Only the second makes 7.0 check the slots of the keys after ALSO.
constexpr int kUpdatesKey = REDISMODULE_CMD_KEY_RW | REDISMODULE_CMD_KEY_UPDATE;
constexpr int kReleasesKey = REDISMODULE_CMD_KEY_RW | REDISMODULE_CMD_KEY_DELETE;
constexpr int kReadsKey = REDISMODULE_CMD_KEY_RO | REDISMODULE_CMD_KEY_ACCESS;

// The arguments as string views for the core. Commands are short: a request of ordinary length
// costs no allocation.
class ArgViews {
 public:
  // The arguments from argv[first] on.
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
    std::string_view few_[kFew];  // in a union, because they need not be initialised
  };
  std::vector<std::string_view> many_;
  Args args_;
};

constexpr int kKey = 1;  // argv[1] is the lock's key in every client command

// The elements of `argv` that `part`, which must be a part of `args`, refers to.
std::span<RedisModuleString*> NamesOf(Args part, const ArgViews& args, RedisModuleString** argv) {
  if (part.empty()) return {};
  return {argv + kKey + (part.data() - args.args().data()), part.size()};
}

// Reports the keys of a request that may have ALSO, if the server asks for them.
int DeclareKeys(RedisModuleCtx* ctx, RedisModuleString** argv, int argc, int use) {
  if (argc > kKey) RedisModule_KeyAtPosWithFlags(ctx, kKey, use);
  // As in the key specification: the first ALSO after the owner, which may be any word.
  int at = kKey + 2;
  while (at < argc && !IsKeyword(ToView(argv[at]), kAlso)) ++at;
  if (at + 1 >= argc) return REDISMODULE_OK;
  const int64_t count = ParseDigits(ToView(argv[at + 1])).value_or(0);
  for (int64_t i = 0; i < count && at + 2 + i < argc; ++i) {
    RedisModule_KeyAtPosWithFlags(ctx, at + 2 + static_cast<int>(i), use);
  }
  return REDISMODULE_OK;
}

// The keys of a request, as the engine takes them. A request for one key costs no allocation.
class KeyNames {
 public:
  // The first key is argv[kKey]; `also` are the others, and must be a part of `args`.
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
  std::vector<KeyName> all_;  // if there are several
  std::span<const KeyName> names_;
};

Instant ReadWallClock() { return ToInstant(WallNow()); }

// --- The command after THEN -------------------------------------------------------------------

// Reports all keys of LOCK.FENCE to the server, so that it checks access rights and slots before
// anything runs: the lock's key, which is only read, and the keys of the command after THEN, each
// as that command uses it. A nested LOCK.FENCE, which may not have a THEN of its own, is not
// inspected any further.
void DeclareFenceKeys(RedisModuleCtx* ctx, std::span<RedisModuleString*> argv) {
  if (argv.size() > kKey) RedisModule_KeyAtPosWithFlags(ctx, kKey, kReadsKey);
  const size_t first = kThenAt + 1;
  if (argv.size() <= first || !IsKeyword(ToView(argv[kThenAt]), kThen)) return;
  if (IsKeyword(ToView(argv[first]), kFenceCommand)) {
    if (argv.size() > first + kKey) {
      RedisModule_KeyAtPosWithFlags(ctx, static_cast<int>(first) + kKey, kReadsKey);
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
// replicates its effects (!). Errors are returned as replies (E). Returns null if the server does
// not even try.
RedisModuleCallReply* Run(RedisModuleCtx* ctx, std::span<RedisModuleString*> command) {
  const std::string_view name = ToView(command.front());
  if (name.find('\0') != std::string_view::npos) return nullptr;  // a name ends there in the server
  const Server::NoConnection none(TheInstance().host.server());
  return RedisModule_Call(ctx, name.data(), "v0SCEM!", command.data() + 1, command.size() - 1);
}

// LOCK.ACQUIRE key owner <PX ms | EX s> [WAIT ms] [MAXLINE n] [SHARED | LIMIT n] [WEIGHT w]
// [REENTRANT] [SESSION] [LINGER ms] [MAXHOLD ms] [TAG text] [NOTIFY channel id] [FLOOR token]
// [ALSO numkeys key [key ...]]
int HandleAcquire(RedisModuleCtx* ctx, RedisModuleString** argv, int argc) {
  if (RedisModule_IsKeysPositionRequest(ctx) != 0) return DeclareKeys(ctx, argv, argc, kUpdatesKey);
  Instance& instance = TheInstance();
  const ArgViews args(argv, argc, kKey);
  const auto parsed =
      ParseAcquire(args.args(), Limits{.max_lease = instance.engine.settings().max_lease});
  if (const auto* error = std::get_if<ParseError>(&parsed)) return ReplyError(ctx, *error);
  if (instance.host.server().SourceOf(ctx) != Source::kClient) return ReplyReadOnly(ctx);
  const auto& request = std::get<AcquireRequest>(parsed);
  const RedisHost::Scope scope(instance.host, ctx);
  const KeyNames names(args, argv, request.also);
  // Only a request that may wait needs the steady clock.
  const Now now = request.wait > Millis{0} ? ReadClocks() : Now{.wall = WallNow()};
  return ReplyAcquired(ctx, instance.engine.Acquire(names.get(), request, now),
                       [](RedisModuleCtx* caller, LockName lock) {
                         return User(TheInstance().host.server(), caller).MayInspect(caller, lock);
                       });
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
  if (source == Source::kClientOfReplica) return ReplyReadOnly(ctx);
  const auto& request = std::get<ReleaseRequest>(parsed);
  const RedisHost::Scope scope(instance.host, ctx);
  const KeyNames names(args, argv, request.also);
  if (source == Source::kReplicated) {
    for (const KeyName& name : names.get()) instance.engine.ApplyRelease(name, request.owner);
    return RedisModule_ReplyWithLongLong(ctx, static_cast<long long>(names.get().size()));
  }
  return ReplyCount(ctx, instance.engine.Release(names.get(), request, ReadWallClock()),
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
  if (instance.host.server().SourceOf(ctx) != Source::kClient) return ReplyReadOnly(ctx);
  const auto& request = std::get<TouchRequest>(parsed);
  const RedisHost::Scope scope(instance.host, ctx);
  const KeyNames names(args, argv, request.also);
  return ReplyCount(ctx, instance.engine.Touch(names.get(), request, ReadWallClock()),
                    kTouchCommand);
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
  if (instance.host.server().SourceOf(ctx) != Source::kClient) return ReplyReadOnly(ctx);
  const auto& request = std::get<FenceRequest>(parsed);
  const auto guarded = NamesOf(request.then, args, argv);
  if (!guarded.empty()) {
    const User caller(instance.host.server(), ctx);
    if (!caller.MayRun(guarded)) {
      caller.LogRefusal(ctx, guarded);
      return ReplyNotPermitted(ctx, request.then.front());
    }
  }
  const RedisHost::Scope scope(instance.host, ctx);
  const KeyNames names(args, argv, {});
  const FenceResult result = instance.engine.Fence(names.get().front(), request, ReadWallClock());
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
  auto info = instance.engine.Inspect(names.get().front(), ReadClocks());
  if (!info.has_value()) return ReplyWrongType(ctx);
  if (info->has_value() && (*info)->is_plain &&
      !User(TheInstance().host.server(), ctx).MayGet(argv[kKey])) {
    (*info)->holders.front().owner.reset();
  }
  return ReplyInfo(ctx, *info);
}

// Summaries of locks, without those on which the caller may not run LOCK.INFO. Stops when the
// budget is used up, so that the server is not blocked for long.
class Summaries {
 public:
  Summaries(RedisModuleCtx* ctx, const Now& now)
      : caller_(TheInstance().host.server(), ctx), now_(now) {}

  void Add(RedisModuleString* name) {
    constexpr size_t kLook = 2;  // the check of access rights, and opening the key
    budget_.Spend(kLook);
    if (!caller_.MayInspect(name)) return;
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
  // What one call of LOCK.LIST or LOCK.TOP may cost, however many locks there are; in units of
  // about a microsecond.
  Budget budget_{10'000};
  std::vector<LockSummary> locks_;
};

// Continues from `cursor` for as many keys as are requested, a few at a time: the cost of a key is
// known only when it is found, and SCAN cannot be interrupted. Returns the server's error, if any.
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

// LOCK.LIST [MATCH pattern] [COUNT n] [CURSOR c]
int HandleList(RedisModuleCtx* ctx, RedisModuleString** argv, int argc) {
  const ArgViews args(argv, argc, 1);
  const auto parsed = ParseList(args.args());
  if (const auto* error = std::get_if<ParseError>(&parsed)) return ReplyError(ctx, *error);
  const auto& request = std::get<ListRequest>(parsed);
  const RedisHost::Scope scope(TheInstance().host, ctx);
  Summaries summaries(ctx, ReadClocks());
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
  constexpr size_t kMaxQueuesExamined = 10'000;  // a caller may read few of them, or none
  Instance& instance = TheInstance();
  const RedisHost::Scope scope(instance.host, ctx);
  Summaries summaries(ctx, ReadClocks());
  const size_t most = std::get<TopRequest>(parsed).most;
  for (const std::string& key :
       instance.engine.LongestQueues(RedisModule_GetSelectedDb(ctx), kMaxQueuesExamined)) {
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

// LOCK.HELD key owner "token since-ms end-ms" [SHARED | LIMIT] [WEIGHT w] [COUNT n] [LINGER ms]
// [CAP ms] [TAG text]
int HandleHeld(RedisModuleCtx* ctx, RedisModuleString** argv, int argc) {
  Instance& instance = TheInstance();
  if (instance.host.server().SourceOf(ctx) != Source::kReplicated) {
    return ReplyInternal(ctx, kHeldCommand);
  }
  const ArgViews args(argv, argc, kKey);
  const auto parsed = ParseHoldSetFact(args.args());
  if (const auto* error = std::get_if<ParseError>(&parsed)) return ReplyError(ctx, *error);
  const RedisHost::Scope scope(instance.host, ctx);
  const KeyNames names(args, argv, {});
  instance.engine.ApplyFact(names.get().front(), std::get<HoldSetFact>(parsed));
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
  if (instance.host.server().SourceOf(ctx) != Source::kReplicated) {
    return ReplyInternal(ctx, kFactCommand);
  }
  const auto parsed = ParseFact(all.args());
  if (const auto* error = std::get_if<ParseError>(&parsed)) return ReplyError(ctx, *error);
  const RedisHost::Scope scope(instance.host, ctx);
  instance.engine.ApplyFact({.lock = {0, all.args()[kFactKey - 1]}, .handle = argv[kFactKey]},
                            std::get<Fact>(parsed));
  return RedisModule_ReplyWithSimpleString(ctx, "OK");
}

// --- The table -----------------------------------------------------------------------------------

int HandleHelp(RedisModuleCtx* ctx, RedisModuleString** argv, int argc);

using Arg = RedisModuleCommandArg;
using KeySpec = RedisModuleCommandKeySpec;

constexpr Arg Key() { return {.name = "key", .type = REDISMODULE_ARG_TYPE_KEY}; }

// The keys after ALSO, found by the second key specification.
constexpr Arg MoreKeys() {
  return {.name = "key",
          .type = REDISMODULE_ARG_TYPE_KEY,
          .key_spec_index = 1,
          .flags = REDISMODULE_CMD_ARG_MULTIPLE};
}

constexpr Arg Text(const char* name, const char* token = nullptr,
                   int flags = REDISMODULE_CMD_ARG_NONE) {
  return {.name = name,
          .type = REDISMODULE_ARG_TYPE_STRING,
          .key_spec_index = -1,
          .token = token,
          .flags = flags};
}

// Any number of them, including none.
constexpr Arg Texts(const char* name) {
  return {.name = name,
          .type = REDISMODULE_ARG_TYPE_STRING,
          .key_spec_index = -1,
          .flags = REDISMODULE_CMD_ARG_OPTIONAL | REDISMODULE_CMD_ARG_MULTIPLE};
}

constexpr Arg Number(const char* name, const char* token, int flags) {
  return {.name = name,
          .type = REDISMODULE_ARG_TYPE_INTEGER,
          .key_spec_index = -1,
          .token = token,
          .flags = flags};
}

constexpr Arg Word(const char* name, const char* token, int flags) {
  return {.name = name,
          .type = REDISMODULE_ARG_TYPE_PURE_TOKEN,
          .key_spec_index = -1,
          .token = token,
          .flags = flags};
}

constexpr Arg Pattern(const char* name, const char* token, int flags) {
  return {.name = name,
          .type = REDISMODULE_ARG_TYPE_PATTERN,
          .key_spec_index = -1,
          .token = token,
          .flags = flags};
}

constexpr Arg OneOf(const char* name, Arg* choices, int flags) {
  return {.name = name,
          .type = REDISMODULE_ARG_TYPE_ONEOF,
          .key_spec_index = -1,
          .flags = flags,
          .subargs = choices};
}

constexpr Arg Block(const char* name, const char* token, Arg* parts, int flags) {
  return {.name = name,
          .type = REDISMODULE_ARG_TYPE_BLOCK,
          .key_spec_index = -1,
          .token = token,
          .flags = flags,
          .subargs = parts};
}

constexpr int kRequired = REDISMODULE_CMD_ARG_NONE;
constexpr int kOptional = REDISMODULE_CMD_ARG_OPTIONAL;

// The lock's key, always the first argument.
constexpr KeySpec FirstArgument(uint64_t flags) {
  return {.flags = flags,
          .begin_search_type = REDISMODULE_KSPEC_BS_INDEX,
          .bs = {.index = {.pos = 1}},
          .find_keys_type = REDISMODULE_KSPEC_FK_RANGE,
          .fk = {.range = {.lastkey = 0, .keystep = 1, .limit = 0}}};
}

// The keys after ALSO and their number. The owner, which may be any word, comes before ALSO.
constexpr KeySpec AfterAlso(uint64_t flags) {
  return {.flags = flags,
          .begin_search_type = REDISMODULE_KSPEC_BS_KEYWORD,
          .bs = {.keyword = {.keyword = kAlso, .startfrom = 3}},
          .find_keys_type = REDISMODULE_KSPEC_FK_KEYNUM,
          .fk = {.keynum = {.keynumidx = 0, .firstkey = 1, .keystep = 1}}};
}

// The server takes these lists by pointer to mutable, terminated by an empty element.
Arg lease[] = {Number("ms", "PX", kRequired), Number("s", "EX", kRequired), {}};
Arg mode[] = {Word("shared", "SHARED", kRequired), Number("n", "LIMIT", kRequired), {}};
Arg notify[] = {Text("channel"), Text("id"), {}};
Arg also[] = {Number("numkeys", nullptr, kRequired), MoreKeys(), {}};
Arg acquire_args[] = {Key(),
                      Text("owner"),
                      OneOf("lease", lease, kRequired),
                      Number("ms", "WAIT", kOptional),
                      Number("n", "MAXLINE", kOptional),
                      OneOf("mode", mode, kOptional),
                      Number("w", "WEIGHT", kOptional),
                      Word("reentrant", "REENTRANT", kOptional),
                      Word("session", "SESSION", kOptional),
                      Number("ms", "LINGER", kOptional),
                      Number("ms", "MAXHOLD", kOptional),
                      Text("text", "TAG", kOptional),
                      Block("notify", "NOTIFY", notify, kOptional),
                      Number("token", "FLOOR", kOptional),
                      Block("also", "ALSO", also, kOptional),
                      {}};
Arg release_args[] = {Key(), Text("owner"), Block("also", "ALSO", also, kOptional), {}};
Arg touch_args[] = {Key(),
                    Text("owner"),
                    OneOf("lease", lease, kRequired),
                    Block("also", "ALSO", also, kOptional),
                    {}};
Arg then[] = {Text("command"), Texts("arg"), {}};
// THEN requires the token; but a block around both would be nested too deeply for many clients.
Arg fence_args[] = {
    Key(), Number("token", nullptr, kOptional), Block("then", "THEN", then, kOptional), {}};
Arg key_only[] = {Key(), {}};
Arg list_args[] = {Pattern("pattern", "MATCH", kOptional),
                   Number("n", "COUNT", kOptional),
                   Number("c", "CURSOR", kOptional),
                   {}};
Arg top_args[] = {Number("n", nullptr, kOptional), {}};

KeySpec updated_keys[] = {FirstArgument(kUpdatesKey), AfterAlso(kUpdatesKey), {}};
KeySpec released_keys[] = {FirstArgument(kReleasesKey), AfterAlso(kReleasesKey), {}};
KeySpec updated_key[] = {FirstArgument(kUpdatesKey), {}};
KeySpec read_key[] = {FirstArgument(kReadsKey), {}};
// The Handle function itself reports the keys of the command after THEN.
KeySpec fenced_keys[] = {FirstArgument(kReadsKey | REDISMODULE_CMD_KEY_VARIABLE_FLAGS), {}};

struct Command {
  const char* name;
  RedisModuleCmdFunc handler;
  const char* flags;
  const char* categories;  // ACL categories; empty: internal, and not shown in LOCK.HELP

  RedisModuleCommandInfo info;
};

constexpr const char* kConstant = "O(1)";
constexpr const char* kByHolders =
    "O(log N) for each lock, where N is the number of its holders; O(1) for a lock with one holder";
constexpr const char* kReleased =
    "O(log N) for each lock, where N is the number of its holders, and O(1) for each line in which "
    "this owner waits";
constexpr const char* kKeysScanned = "O(N) where N is COUNT, and the holders of the locks found";
constexpr const char* kAllQueues =
    "O(N log N) where N is the number of locks with waiting requests, and their holders";
constexpr const char* kCountedHolders =
    "O(N) where N is the number of holders, of whom at most 100 are shown";

constexpr RedisModuleCommandInfo Info(const char* summary, const char* complexity, int arity,
                                      KeySpec* keys, Arg* args) {
  return {.version = REDISMODULE_COMMAND_INFO_VERSION,
          .summary = summary,
          .complexity = complexity,
          .since = "0.1.0",
          .arity = arity,
          .key_specs = keys,
          .args = args};
}

// For commands on a lock the server is not given a minimum number of arguments: the Handle function
// itself reports what is missing and shows the correct form, instead of "wrong number of
// arguments".
//
// LOCK.FENCE only reads, but is a write command: only primaries answer it, and not while writes are
// paused for a failover. When memory is full, only commands that take memory are refused.
const Command kCommands[] = {
    {kAcquireCommand, HandleAcquire, "write deny-oom fast blocking getkeys-api",
     "write fast blocking",
     Info("Acquires a lock, or several at once, for the length of a lease. Returns the fencing "
          "token, "
          "or null if others hold the lock; with WAIT, waits in line; with NOTIFY, returns 0 while "
          "waiting and publishes the outcome to a channel.",
          kByHolders, -1, updated_keys, acquire_args)},
    {kReleaseCommand, HandleRelease, "write fast getkeys-api", "write fast",
     Info("Releases a lock, and stops waiting for it. Returns 1, or 0 if this owner neither holds "
          "nor "
          "waits for it; with ALSO, the number of locks.",
          kReleased, -1, released_keys, release_args)},
    {kTouchCommand, HandleTouch, "write fast getkeys-api", "write fast",
     Info("Renews a lease: sets it to end the given time from now. Returns 1, or 0 if this owner "
          "does not hold the lock; with ALSO, the number of leases set.",
          kByHolders, -1, updated_keys, touch_args)},
    {kFenceCommand, HandleFence, "write getkeys-api", "write slow",
     Info("Returns the highest token that holds a lock, or null; with a token, 1 if it holds the "
          "lock, else 0; with THEN, runs a command if and only if it does.",
          kByHolders, -1, fenced_keys, fence_args)},
    {kInfoCommand, HandleInfo, "readonly fast", "read fast",
     Info("Returns the holders of a lock, with their tokens and leases, and the requests that wait "
          "for it; or null.",
          kCountedHolders, -1, read_key, key_only)},
    {"LOCK.LIST", HandleList, "readonly", "read slow",
     Info("Iterates over the locks that the caller may inspect, as SCAN does over keys.",
          kKeysScanned, -1, nullptr, list_args)},
    {"LOCK.TOP", HandleTop, "readonly", "read slow",
     Info("Returns the locks with the most waiting requests, of those that the caller may inspect.",
          kAllQueues, -1, nullptr, top_args)},
    {"LOCK.HELP", HandleHelp, "fast allow-loading allow-stale", "fast",
     Info("Returns the syntax of these commands.", kConstant, 1, nullptr, nullptr)},
    {kProbeCommand, HandleProbe, "write deny-oom fast", "",
     Info("Internal: checks whether the server accepts a write now; changes nothing.", kConstant, 2,
          updated_key, key_only)},
    {kHeldCommand, HandleHeld, "write fast", "",
     Info("Internal: carries grants from a primary to its replicas and its AOF.", kByHolders, -4,
          updated_key, nullptr)},
    {kFactCommand, HandleFact, "write fast getkeys-api", "",
     Info("Internal: carries all other changes from a primary to its replicas and its AOF.",
          kByHolders, -3, nullptr, nullptr)},
};

bool IsForCallers(const Command& command) { return *command.categories != '\0'; }

constexpr const char* kCategory = "lock";

bool Register(RedisModuleCtx* ctx, const Command& command, bool has_category) {
  if (RedisModule_CreateCommand(ctx, command.name, command.handler, command.flags, 0, 0, 0) !=
      REDISMODULE_OK) {
    return false;
  }
  RedisModuleCommand* created = RedisModule_GetCommand(ctx, command.name);
  if (created == nullptr || RedisModule_SetCommandInfo(created, &command.info) != REDISMODULE_OK) {
    return false;
  }
  if (!IsForCallers(command)) return true;
  const std::string categories = command.categories;
  return SetCategories(created, has_category ? categories + ' ' + kCategory : categories);
}

std::string Grammar(const Arg* args, const char* between);

std::string Grammar(const Arg& arg) {
  const bool optional = (arg.flags & REDISMODULE_CMD_ARG_OPTIONAL) != 0;
  std::string text = arg.token == nullptr ? "" : arg.token;
  std::string value;
  if (arg.type == REDISMODULE_ARG_TYPE_ONEOF) {
    value = Grammar(arg.subargs, " | ");
    if (!optional) value = '<' + value + '>';
  } else if (arg.type == REDISMODULE_ARG_TYPE_BLOCK) {
    value = Grammar(arg.subargs, " ");
  } else if (arg.type != REDISMODULE_ARG_TYPE_PURE_TOKEN) {
    value = arg.name;
    if ((arg.flags & REDISMODULE_CMD_ARG_MULTIPLE) != 0) {
      value += optional ? " ..." : " [" + value + " ...]";
    }
  }
  if (!text.empty() && !value.empty()) text += ' ';
  text += value;
  return optional ? '[' + text + ']' : text;
}

std::string Grammar(const Arg* args, const char* between) {
  std::string text;
  for (const Arg* arg = args; arg != nullptr && arg->name != nullptr; ++arg) {
    if (arg != args) text += between;
    text += Grammar(*arg);
  }
  return text;
}

}  // namespace

bool RegisterCommands(RedisModuleCtx* ctx) {
  const bool has_category = AddCategory(ctx, kCategory);
  return std::all_of(std::begin(kCommands), std::end(kCommands),
                     [&](const Command& command) { return Register(ctx, command, has_category); });
}

namespace {

// LOCK.HELP
int HandleHelp(RedisModuleCtx* ctx, RedisModuleString** /*argv*/, int /*argc*/) {
  // For each command that callers may use: its grammar and, indented, its description.
  std::vector<std::string> lines;
  for (const Command& command : kCommands) {
    if (!IsForCallers(command)) continue;
    const std::string args = Grammar(command.info.args, " ");
    lines.push_back(args.empty() ? command.name : std::string(command.name) + ' ' + args);
    lines.push_back(std::string("    ") + command.info.summary);
  }
  return ReplyHelp(ctx, lines);
}

}  // namespace

}  // namespace turnstile
