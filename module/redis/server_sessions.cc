#include "redis/server_sessions.h"

#include <string>
#include <vector>

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
  const std::vector<std::string> names = bound_.TakeEnded(key.lock_name());
  std::vector<Owner> owners;
  owners.reserve(names.size());
  for (const std::string& name : names) owners.push_back(Owner{name});
  owners = DecideSessionEnd(key.place(), owners, now);
  if (!owners.empty()) CarryOut(ctx, key, SessionsEnded{now, owners}, now, carrier);
}

void ServerSessions::Forget() { bound_.UnbindAll(std::nullopt); }

ServerSessions& TheSessions() {
  static auto& sessions = *new ServerSessions;  // never destroyed: free callbacks may come late
  return sessions;
}

}  // namespace turnstile
