#include "redis/server_sessions.h"

#include <utility>

#include "core/decide.h"
#include "redis/deferred.h"
#include "redis/effects.h"
#include "redis/lock_type.h"

namespace turnstile {

void ServerSessions::Acquired(std::optional<Sessions::Client> client, LockName lock, Owner owner) {
  if (client.has_value()) {
    bound_.Bind(*client, lock, owner);
  } else if (!bound_.empty()) {
    bound_.Unbind(lock, owner);
  }
}

void ServerSessions::HoldGone(LockName lock, Owner owner) {
  if (!bound_.empty()) bound_.Unbind(lock, owner);
}

void ServerSessions::LockGone(LockName lock) {
  if (!bound_.empty()) bound_.UnbindAll(lock);
}

void ServerSessions::ConnectionClosed(Sessions::Client client) {
  if (!bound_.HasAny(client)) return;
  closed_.push_back(client);
  TurnEventLoop();
}

void ServerSessions::EndClosed(RedisModuleCtx* ctx, Instant now) {
  for (const Sessions::Client client : std::exchange(closed_, {})) {
    for (const Sessions::BoundHold& hold : bound_.Close(client)) {
      const ScopedName name(ctx, hold.lock());
      LockKey key(ctx, name.get(), LockKey::Access::kChange);
      const Decision decision = DecideSessionEnd(key.place(), Owner{hold.owner}, now);
      if (decision.change.has_value()) {
        CarryOut(ctx, key, *decision.change, now, Carrier::kDeferred);
      }
    }
  }
}

void ServerSessions::Forget() {
  bound_.UnbindAll(std::nullopt);
  closed_.clear();
}

ServerSessions& TheSessions() {
  static auto& sessions = *new ServerSessions;  // never destroyed: free callbacks may come late
  return sessions;
}

}  // namespace turnstile
