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

namespace {

void EndHolds(RedisModuleCtx* ctx, LockKey& key, const std::vector<std::string>& names, Instant now,
              Carrier carrier) {
  std::vector<Owner> owners;
  owners.reserve(names.size());
  for (const std::string& name : names) owners.push_back(Owner{name});
  owners = DecideSessionEnd(key.place(), owners, now);
  if (!owners.empty()) CarryOut(ctx, key, SessionsEnded{now, owners}, now, carrier);
}

}  // namespace

void ServerSessions::EndClosed(RedisModuleCtx* ctx, Instant now, Budget& budget) {
  constexpr size_t kSteps = 500;
  constexpr size_t kCostOfKey = 10;
  while (has_ended() && !budget.spent()) {
    const ScopedName name(ctx, bound_.FirstWithEnded());
    const Sessions::EndedHolds ended = bound_.TakeFirstEnded(kSteps);
    LockKey key(ctx, name.get(), LockKey::Access::kChange);
    EndHolds(ctx, key, ended.owners, now, Carrier::kDeferred);
    budget.Spend(kCostOfKey + 2 * ended.owners.size());
  }
}

bool ServerSessions::EndClosedIn(RedisModuleCtx* ctx, LockKey& key, Instant now, size_t steps) {
  const Sessions::EndedHolds ended = bound_.TakeEnded(key.lock_name(), steps);
  EndHolds(ctx, key, ended.owners, now, Carrier::kFact);
  return !ended.more;
}

void ServerSessions::EndClosedOf(RedisModuleCtx* ctx, LockKey& key, Owner owner, Instant now) {
  if (!bound_.HasEnded(key.lock_name(), owner)) return;
  bound_.Unbind(key.lock_name(), owner);
  EndHolds(ctx, key, {std::string(owner.bytes)}, now, Carrier::kFact);
}

void ServerSessions::Forget() { bound_.UnbindAll(std::nullopt); }

ServerSessions& TheSessions() {
  static auto& sessions = *new ServerSessions;  // never destroyed: free callbacks may come late
  return sessions;
}

}  // namespace turnstile
