#include "redis/command_table.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

#include "redis/command_names.h"
#include "redis/handlers.h"
#include "redis/replies.h"

namespace turnstile {
namespace {

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

constexpr Arg Text(const char* name) {
  return {.name = name, .type = REDISMODULE_ARG_TYPE_STRING, .key_spec_index = -1};
}

// Any number of them, also none.
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

constexpr int kMust = REDISMODULE_CMD_ARG_NONE;
constexpr int kMay = REDISMODULE_CMD_ARG_OPTIONAL;

// The lock's key, always the first argument.
constexpr KeySpec FirstArgument(uint64_t flags) {
  return {.flags = flags,
          .begin_search_type = REDISMODULE_KSPEC_BS_INDEX,
          .bs = {.index = {.pos = 1}},
          .find_keys_type = REDISMODULE_KSPEC_FK_RANGE,
          .fk = {.range = {.lastkey = 0, .keystep = 1, .limit = 0}}};
}

// The keys after ALSO and their number. The owner, which may be any word, stands before.
constexpr KeySpec AfterAlso(uint64_t flags) {
  return {.flags = flags,
          .begin_search_type = REDISMODULE_KSPEC_BS_KEYWORD,
          .bs = {.keyword = {.keyword = kAlso, .startfrom = 3}},
          .find_keys_type = REDISMODULE_KSPEC_FK_KEYNUM,
          .fk = {.keynum = {.keynumidx = 0, .firstkey = 1, .keystep = 1}}};
}

// The server takes these lists by pointer to mutable, ended by an empty element.
Arg lease[] = {Number("ms", "PX", kMust), Number("s", "EX", kMust), {}};
Arg mode[] = {Word("shared", "SHARED", kMust), Number("n", "LIMIT", kMust), {}};
Arg also[] = {Number("numkeys", nullptr, kMust), MoreKeys(), {}};
Arg acquire_args[] = {Key(),
                      Text("owner"),
                      OneOf("lease", lease, kMust),
                      Number("ms", "WAIT", kMay),
                      OneOf("mode", mode, kMay),
                      Word("reentrant", "REENTRANT", kMay),
                      Word("session", "SESSION", kMay),
                      Number("ms", "LINGER", kMay),
                      Number("token", "FLOOR", kMay),
                      Block("also", "ALSO", also, kMay),
                      {}};
Arg release_args[] = {Key(), Text("owner"), Block("also", "ALSO", also, kMay), {}};
Arg touch_args[] = {
    Key(), Text("owner"), OneOf("lease", lease, kMust), Block("also", "ALSO", also, kMay), {}};
Arg then[] = {Text("command"), Texts("arg"), {}};
// THEN needs the token; but a block around both would be nested too deeply for many clients.
Arg fence_args[] = {Key(), Number("token", nullptr, kMay), Block("then", "THEN", then, kMay), {}};
Arg key_only[] = {Key(), {}};
Arg list_args[] = {
    Pattern("pattern", "MATCH", kMay), Number("n", "COUNT", kMay), Number("c", "CURSOR", kMay), {}};
Arg top_args[] = {Number("n", nullptr, kMay), {}};

KeySpec updated_keys[] = {FirstArgument(kUpdatesKey), AfterAlso(kUpdatesKey), {}};
KeySpec released_keys[] = {FirstArgument(kReleasesKey), AfterAlso(kReleasesKey), {}};
KeySpec updated_key[] = {FirstArgument(kUpdatesKey), {}};
KeySpec looked_at_key[] = {FirstArgument(kLooksAtKey), {}};
// The handler itself tells the keys of the command after THEN.
KeySpec fenced_keys[] = {FirstArgument(kLooksAtKey | REDISMODULE_CMD_KEY_VARIABLE_FLAGS), {}};

struct Command {
  const char* name;
  RedisModuleCmdFunc handler;
  const char* flags;
  const char* categories;  // of access rights; empty: internal, and not shown in LOCK.HELP

  RedisModuleCommandInfo info;
};

constexpr const char* kConstant = "O(1)";
constexpr const char* kByHolders =
    "O(log N) for each lock, where N is the number of its holders: O(1) for nearly all";
constexpr const char* kReleased =
    "O(log N) for each lock, where N is the number of its holders, and O(1) for each line that a "
    "wait of this owner stands in";
constexpr const char* kKeysLookedAt = "O(N) where N is COUNT, and the holders of the locks found";
constexpr const char* kAllLines =
    "O(N log N) where N is the number of locks that somebody waits for, and their holders";
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

// Of the commands on a lock the server is told no least number of arguments: what is missing is
// answered by the handler, with the form that is right, and not by "wrong number of arguments".
//
// LOCK.FENCE only looks, but is a write command: it is answered by primaries only and not while
// writes are paused for a failover. Only what takes memory is refused when memory is full.
const Command kCommands[] = {
    {kAcquireCommand, HandleAcquire, "write deny-oom fast blocking getkeys-api",
     "write fast blocking",
     Info("Takes a lock, or several at once, for a lease and answers its fencing token, or null if "
          "somebody else holds it; with WAIT, stands in line for it.",
          kByHolders, -1, updated_keys, acquire_args)},
    {"LOCK.RELEASE", HandleRelease, "write fast getkeys-api", "write fast",
     Info("Gives up a lock, and stops waiting for it: 1, or 0 if this owner neither holds it nor "
          "waits for it; of several, how many.",
          kReleased, -1, released_keys, release_args)},
    {"LOCK.TOUCH", HandleTouch, "write fast getkeys-api", "write fast",
     Info(
         "Sets a lease to end that long from now: 1, or 0 if this owner does not hold the lock; of "
         "several, how many.",
         kByHolders, -1, updated_keys, touch_args)},
    {kFenceCommand, HandleFence, "write getkeys-api", "write slow",
     Info("Answers the highest token that holds a lock, or null; with a token, 1 if it holds the "
          "lock, else 0; with THEN, runs a command if and only if it does.",
          kByHolders, -1, fenced_keys, fence_args)},
    {kInfoCommand, HandleInfo, "readonly fast", "read fast",
     Info("Tells who holds a lock, under which token and for how long, and who waits; or null.",
          kCountedHolders, -1, looked_at_key, key_only)},
    {"LOCK.LIST", HandleList, "readonly", "read slow",
     Info("Lists locks that the caller may read, a part of the keys at a time, as SCAN does.",
          kKeysLookedAt, -1, nullptr, list_args)},
    {"LOCK.TOP", HandleTop, "readonly", "read slow",
     Info("Lists the locks that most clients wait for now, of those that the caller may read.",
          kAllLines, -1, nullptr, top_args)},
    {"LOCK.HELP", HandleHelp, "fast allow-loading allow-stale", "fast",
     Info("Lists these commands.", kConstant, 1, nullptr, nullptr)},
    {kProbeCommand, HandleProbe, "write deny-oom fast", "",
     Info("Internal: asks whether the server allows a write now; changes nothing.", kConstant, 2,
          updated_key, key_only)},
    {kHeldCommand, HandleHeld, "write fast", "",
     Info("Internal: carries what a primary granted to its replicas and its AOF.", kByHolders, -4,
          updated_key, nullptr)},
    {kFactCommand, HandleFact, "write fast getkeys-api", "",
     Info("Internal: carries what else a primary decided.", kByHolders, -3, nullptr, nullptr)},
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
  // For each command that callers may use, its grammar and, indented, what it does.
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
