// The Redis type `turnstile`: how a lock lives in a key.

#ifndef TURNSTILE_REDIS_LOCK_TYPE_H_
#define TURNSTILE_REDIS_LOCK_TYPE_H_

#include <string_view>

#include "core/fact.h"
#include "core/lock.h"
#include "core/wait_queue.h"
#include "redis/redis_api.h"

namespace turnstile {

bool RegisterLockType(RedisModuleCtx* ctx);

// A key that is open as a lock. Lives for one command and no longer.
class LockKey {
 public:
  enum class Access { kLook, kChange };

  // Opening a key whose TTL has run out removes it, as any command does.
  LockKey(RedisModuleCtx* ctx, RedisModuleString* name, Access access);
  ~LockKey();
  LockKey(const LockKey&) = delete;
  LockKey& operator=(const LockKey&) = delete;

  // Neither a lock nor a string nor missing.
  bool wrong_type() const;

  // A plain lock's value stays valid until the key is changed or closed.
  Place place() const;

  // The lock in the key, or null.
  Lock* lock() const;

  // The moment at which the server will remove the key, or kMaxInstant.
  Instant expiry() const;

  RedisModuleString* name() const { return name_; }
  LockName lock_name() const { return {db_, ToView(name_)}; }

  // Stores `lock`, which may already be in the key, to be removed after `end`.
  void Store(Lock* lock, Instant end);
  void Delete();
  void Close();

 private:
  int db_;
  RedisModuleString* name_;
  RedisModuleKey* key_;
};

// The name of a lock as the server wants it, with its database selected. For work outside a
// command, where nobody holds the name for us.
class ScopedName {
 public:
  ScopedName(RedisModuleCtx* ctx, LockName lock);
  ~ScopedName();
  ScopedName(const ScopedName&) = delete;
  ScopedName& operator=(const ScopedName&) = delete;

  RedisModuleString* get() const { return name_; }
  LockName lock() const { return {db_, ToView(name_)}; }

 private:
  RedisModuleCtx* ctx_;
  int db_;
  RedisModuleString* name_;
};

// The command that carries facts.
inline constexpr const char* kFactCommand = "LOCK.FACT";

// Writes the fact that `hold` holds the lock `key`: `emit` is called with a command's name, a
// format and its arguments, as RedisModule_Replicate and RedisModule_EmitAOF take them.
template <typename Emit>
void EmitHeld(Emit emit, RedisModuleString* key, const Hold& hold) {
  emit(kFactCommand, "csblll", kFactHeld.data(), key, hold.owner.bytes.data(),
       hold.owner.bytes.size(), static_cast<long long>(hold.token.value),
       static_cast<long long>(hold.since.time_since_epoch().count()),
       static_cast<long long>(hold.end.time_since_epoch().count()));
}

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_LOCK_TYPE_H_
