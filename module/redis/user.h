// A user of the server, and what it may do now.

#ifndef TURNSTILE_REDIS_USER_H_
#define TURNSTILE_REDIS_USER_H_

#include <span>

#include "core/types.h"
#include "redis/redis_api.h"

namespace turnstile {

class User {
 public:
  // The one whose command is running. Nobody, if a module calls as nobody: then nothing is allowed.
  explicit User(RedisModuleCtx* ctx);
  // The one of this name. One that is gone may do nothing.
  explicit User(RedisModuleString* name);
  ~User();
  User(const User&) = delete;
  User& operator=(const User&) = delete;

  // The command, on the keys and channels that it names. One that does not exist may be tried: the
  // server will refuse it in its own words.
  bool MayRun(std::span<RedisModuleString*> command) const;
  // LOCK.INFO on this key. Whoever may not is told nothing about its holders.
  bool MayLookAt(RedisModuleString* key) const;
  bool MayLookAt(RedisModuleCtx* ctx, LockName lock) const;
  // GET on this key. Whoever may not is not told the value of a string.
  bool MayGet(RedisModuleString* key) const;

  // Leaves a trace in ACL LOG, as the server does, of a command that this user may not run.
  void LogRefusal(RedisModuleCtx* ctx, std::span<RedisModuleString*> command) const;

 private:
  bool MayRunOn(RedisModuleString* command, RedisModuleString* key) const;

  RedisModuleUser* user_ = nullptr;
};

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_USER_H_
