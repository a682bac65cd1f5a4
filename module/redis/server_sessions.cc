#include "redis/server_sessions.h"

#include <string>

#include "core/decide.h"
#include "redis/deferred.h"

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
  bound_.Close(client);
  if (has_ended()) WakeEventLoop();
}

void ServerSessions::EndClosed(RedisModuleCtx* ctx, Instant now, Budget& budget) {
  while (has_ended() && !budget.spent()) {
    constexpr size_t kCost = 10;
    budget.Spend(kCost);
    const ScopedName name(ctx, bound_.FirstWithEnded());
    LockKey key(ctx, name.get(), LockKey::Access::kChange);
    EndClosedIn(ctx, key, now, Carrier::kDeferred);
  }
}

void ServerSessions::EndClosedIn(RedisModuleCtx* ctx, LockKey& key, Instant now, Carrier carrier) {
  for (const std::string& owner : bound_.TakeEnded(key.lock_name())) {
    const Decision decision = DecideSessionEnd(key.place(), Owner{owner}, now);
    if (decision.change.has_value()) CarryOut(ctx, key, *decision.change, now, carrier);
  }
}

void ServerSessions::Forget() { bound_.UnbindAll(std::nullopt); }

ServerSessions& TheSessions() {
  static auto& sessions = *new ServerSessions;  // never destroyed: free callbacks may come late
  return sessions;
}

}  // namespace turnstile
