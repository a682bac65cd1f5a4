#include "redis/command_table.h"

#include <algorithm>
#include <iterator>

#include "redis/handlers.h"
#include "redis/lock_type.h"

namespace turnstile {
namespace {

using Arg = RedisModuleCommandArg;
using KeySpec = RedisModuleCommandKeySpec;

constexpr Arg Key() { return {.name = "key", .type = REDISMODULE_ARG_TYPE_KEY}; }

constexpr Arg Text(const char* name) {
  return {.name = name, .type = REDISMODULE_ARG_TYPE_STRING, .key_spec_index = -1};
}

constexpr Arg Number(const char* name, const char* token, int flags) {
  return {.name = name,
          .type = REDISMODULE_ARG_TYPE_INTEGER,
          .key_spec_index = -1,
          .token = token,
          .flags = flags};
}

constexpr Arg OneOf(const char* name, Arg* choices) {
  return {
      .name = name, .type = REDISMODULE_ARG_TYPE_ONEOF, .key_spec_index = -1, .subargs = choices};
}

// The lock's key, always the first argument.
constexpr KeySpec FirstArgument(uint64_t flags) {
  return {.flags = flags,
          .begin_search_type = REDISMODULE_KSPEC_BS_INDEX,
          .bs = {.index = {.pos = 1}},
          .find_keys_type = REDISMODULE_KSPEC_FK_RANGE,
          .fk = {.range = {.lastkey = 0, .keystep = 1, .limit = 0}}};
}

// The server takes these lists by pointer to mutable, ended by an empty element.
Arg lease[] = {
    Number("ms", "PX", REDISMODULE_CMD_ARG_NONE), Number("s", "EX", REDISMODULE_CMD_ARG_NONE), {}};
Arg key_owner_lease[] = {Key(), Text("owner"), OneOf("lease", lease), {}};
Arg acquire_args[] = {Key(),
                      Text("owner"),
                      OneOf("lease", lease),
                      Number("ms", "WAIT", REDISMODULE_CMD_ARG_OPTIONAL),
                      {}};
Arg key_owner[] = {Key(), Text("owner"), {}};
Arg key_token[] = {Key(), Number("token", nullptr, REDISMODULE_CMD_ARG_OPTIONAL), {}};
Arg key_only[] = {Key(), {}};

KeySpec updated_key[] = {FirstArgument(REDISMODULE_CMD_KEY_RW | REDISMODULE_CMD_KEY_UPDATE), {}};
KeySpec released_key[] = {FirstArgument(REDISMODULE_CMD_KEY_RW | REDISMODULE_CMD_KEY_DELETE), {}};
KeySpec looked_at_key[] = {FirstArgument(REDISMODULE_CMD_KEY_RO | REDISMODULE_CMD_KEY_ACCESS), {}};

struct Command {
  const char* name;
  RedisModuleCmdFunc handler;
  const char* flags;
  bool for_callers;  // shown in LOCK.HELP
  RedisModuleCommandInfo info;
};

constexpr RedisModuleCommandInfo Info(const char* summary, int arity, KeySpec* keys, Arg* args) {
  return {.version = REDISMODULE_COMMAND_INFO_VERSION,
          .summary = summary,
          .complexity = "O(1)",
          .since = "0.1.0",
          .arity = arity,
          .key_specs = keys,
          .args = args};
}

// LOCK.FENCE only looks, but is a write command: it is answered by primaries only and not while
// writes are paused for a failover. Only what takes memory is refused when memory is full.
const Command kCommands[] = {
    {kAcquireCommand, HandleAcquire, "write deny-oom fast blocking", true,
     Info("Takes a lock for a lease and answers its fencing token, or null if somebody else holds "
          "it; with WAIT, stands in line for it.",
          -5, updated_key, acquire_args)},
    {"LOCK.RELEASE", HandleRelease, "write fast", true,
     Info("Gives up a lock: 1, or 0 if this owner does not hold it.", -3, released_key, key_owner)},
    {"LOCK.TOUCH", HandleTouch, "write fast", true,
     Info("Sets a lease to end that long from now: 1, or 0 if this owner does not hold the lock.",
          -5, updated_key, key_owner_lease)},
    {"LOCK.FENCE", HandleFence, "write fast", true,
     Info("Answers the token that holds a lock, or null; with a token, 1 if it is the one, else 0.",
          -2, looked_at_key, key_token)},
    {"LOCK.INFO", HandleInfo, "readonly fast", true,
     Info("Tells who holds a lock, under which token and for how long, or null if nobody does.", 2,
          looked_at_key, key_only)},
    {"LOCK.HELP", HandleHelp, "fast allow-loading allow-stale", true,
     Info("Lists these commands.", 1, nullptr, nullptr)},
    {kProbeCommand, HandleProbe, "write deny-oom fast", false,
     Info("Internal: asks whether the server allows a write now; changes nothing.", 2, updated_key,
          key_only)},
    {kFactCommand, HandleFact, "write fast getkeys-api", false,
     Info("Internal: carries what a primary decided to its replicas and its AOF.", -3, nullptr,
          nullptr)},
};

bool Register(RedisModuleCtx* ctx, const Command& command) {
  if (RedisModule_CreateCommand(ctx, command.name, command.handler, command.flags, 0, 0, 0) !=
      REDISMODULE_OK) {
    return false;
  }
  RedisModuleCommand* created = RedisModule_GetCommand(ctx, command.name);
  return created != nullptr && RedisModule_SetCommandInfo(created, &command.info) == REDISMODULE_OK;
}

std::string Grammar(const Arg* args, const char* between);

std::string Grammar(const Arg& arg) {
  std::string text;
  if (arg.token != nullptr) text = std::string(arg.token) + ' ';
  text += arg.type == REDISMODULE_ARG_TYPE_ONEOF ? '<' + Grammar(arg.subargs, " | ") + '>'
                                                 : std::string(arg.name);
  return (arg.flags & REDISMODULE_CMD_ARG_OPTIONAL) != 0 ? '[' + text + ']' : text;
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
  return std::all_of(std::begin(kCommands), std::end(kCommands),
                     [ctx](const Command& command) { return Register(ctx, command); });
}

std::vector<std::string> HelpLines() {
  std::vector<std::string> lines;
  for (const Command& command : kCommands) {
    if (!command.for_callers) continue;
    const std::string args = Grammar(command.info.args, " ");
    lines.push_back(args.empty() ? command.name : std::string(command.name) + ' ' + args);
    lines.push_back(std::string("    ") + command.info.summary);
  }
  return lines;
}

}  // namespace turnstile
