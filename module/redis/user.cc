#include "redis/user.h"

#include <array>
#include <cerrno>
#include <cstring>

#include "core/request.h"
#include "redis/command_names.h"

namespace turnstile {

User::User(RedisModuleString* name) : user_(RedisModule_GetModuleUserFromUserName(name)) {}

namespace {

// Whether somebody stands behind the running command. A module may call us as nobody, and 7.0 then
// crashes when it is asked for the user's name; but it says so when asked to call as that user,
// even a command that does not exist. (One that does, and that the user may not run, would leave an
// entry in ACL LOG.)
bool HasUser(RedisModuleCtx* ctx) {
  if (ConnectionOf(ctx).has_value()) return true;
  errno = 0;
  RedisModuleCallReply* reply = RedisModule_Call(ctx, "LOCK.NOBODY", "C");
  const bool nobody = reply == nullptr && errno == ENOTSUP;
  if (reply != nullptr) RedisModule_FreeCallReply(reply);
  return !nobody;
}

}  // namespace

User::User(RedisModuleCtx* ctx) {
  RedisModuleString* name = HasUser(ctx) ? RedisModule_GetCurrentUserName(ctx) : nullptr;
  if (name == nullptr) return;
  user_ = RedisModule_GetModuleUserFromUserName(name);
  RedisModule_FreeString(ctx, name);
}

User::~User() {
  if (user_ != nullptr) RedisModule_FreeModuleUser(user_);
}

bool User::MayRun(std::span<RedisModuleString*> command) const {
  if (user_ == nullptr) return false;
  errno = 0;
  return RedisModule_ACLCheckCommandPermissions(
             user_, command.data(), static_cast<int>(command.size())) == REDISMODULE_OK ||
         errno == ENOENT;
}

bool User::MayLookAt(RedisModuleString* key) const {
  static RedisModuleString* const info =
      RedisModule_CreateString(nullptr, kInfoCommand, std::strlen(kInfoCommand));
  return MayRunOn(info, key);
}

bool User::MayLookAt(RedisModuleCtx* ctx, LockName lock) const {
  RedisModuleString* name = RedisModule_CreateString(ctx, lock.key.data(), lock.key.size());
  const bool may = MayLookAt(name);
  RedisModule_FreeString(ctx, name);
  return may;
}

bool User::MayGet(RedisModuleString* key) const {
  static RedisModuleString* const get = RedisModule_CreateString(nullptr, "GET", 3);
  return MayRunOn(get, key);
}

// Unlike MayRun, a command that does not exist is not allowed.
bool User::MayRunOn(RedisModuleString* command, RedisModuleString* key) const {
  std::array argv = {command, key};
  return user_ != nullptr &&
         RedisModule_ACLCheckCommandPermissions(user_, argv.data(), argv.size()) == REDISMODULE_OK;
}

namespace {

struct Refusal {
  RedisModuleACLLogEntryReason reason;
  RedisModuleString* object;
};

// The server tells only that something is not allowed. A key or a channel that the user may not
// use at all is what it would have named; else it is the command.
Refusal FindRefusal(RedisModuleUser* user, RedisModuleCtx* ctx,
                    std::span<RedisModuleString*> command) {
  Refusal refusal{REDISMODULE_ACL_LOG_CMD, command.front()};
  int count = 0;
  int* flags = nullptr;
  int* positions = RedisModule_GetCommandKeysWithFlags(
      ctx, command.data(), static_cast<int>(command.size()), &count, &flags);
  constexpr int kUses = REDISMODULE_CMD_KEY_ACCESS | REDISMODULE_CMD_KEY_INSERT |
                        REDISMODULE_CMD_KEY_DELETE | REDISMODULE_CMD_KEY_UPDATE;
  for (int i = 0; i < count; ++i) {
    RedisModuleString* key = command[static_cast<size_t>(positions[i])];
    const int uses = flags[i] & kUses;
    if (uses != 0 && RedisModule_ACLCheckKeyPermissions(user, key, uses) != REDISMODULE_OK) {
      refusal = {REDISMODULE_ACL_LOG_KEY, key};
      break;
    }
  }
  if (positions != nullptr) RedisModule_Free(positions);
  if (flags != nullptr) RedisModule_Free(flags);
  const bool publishes = IsKeyword(ToView(command.front()), "PUBLISH") ||
                         IsKeyword(ToView(command.front()), "SPUBLISH");
  if (publishes && command.size() > 1 &&
      RedisModule_ACLCheckChannelPermissions(user, command[1], REDISMODULE_CMD_CHANNEL_PUBLISH) !=
          REDISMODULE_OK) {
    refusal = {REDISMODULE_ACL_LOG_CHANNEL, command[1]};
  }
  return refusal;
}

}  // namespace

void User::LogRefusal(RedisModuleCtx* ctx, std::span<RedisModuleString*> command) const {
  if (user_ == nullptr) return;
  const Refusal refusal = FindRefusal(user_, ctx, command);
  // The server reads the object as raw bytes, which those of a script need not be.
  const std::string_view object = ToView(refusal.object);
  RedisModuleString* copy = RedisModule_CreateString(ctx, object.data(), object.size());
  RedisModule_ACLAddLogEntry(ctx, user_, copy, refusal.reason);
  RedisModule_FreeString(ctx, copy);
}

}  // namespace turnstile
