#include "redis/user.h"

#include <cerrno>

namespace turnstile {

User::User(RedisModuleString* name) : user_(RedisModule_GetModuleUserFromUserName(name)) {}

namespace {

// Whether somebody stands behind the running command. A module may call us as nobody, and 7.0 then
// crashes when it is asked for the user's name; but it says so when asked to call as that user.
bool HasUser(RedisModuleCtx* ctx) {
  if (ConnectionOf(ctx).has_value()) return true;
  errno = 0;
  RedisModuleCallReply* reply = RedisModule_Call(ctx, "PING", "C");
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

bool User::MayRead(RedisModuleString* key) const {
  return user_ != nullptr && RedisModule_ACLCheckKeyPermissions(
                                 user_, key, REDISMODULE_CMD_KEY_ACCESS) == REDISMODULE_OK;
}

}  // namespace turnstile
