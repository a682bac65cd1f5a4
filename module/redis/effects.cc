#include "redis/effects.h"

#include <cerrno>
#include <variant>

#include "core/news.h"
#include "redis/cluster.h"
#include "redis/config.h"
#include "redis/events.h"
#include "redis/server_sessions.h"
#include "redis/server_state.h"
#include "redis/tokens.h"
#include "redis/waiters.h"

namespace turnstile {
namespace {

void Store(RedisModuleCtx* ctx, LockKey& key, const Held& held) {
  if (Replaces(key.lock(), held)) TheSessions().LockGone(key.lock_name());
  const HeldNews news = NewsOf(key.lock(), held);
  Events().Lost(ctx, key.name(), news.lost);  // first, because the owners are in the lock
  // A plain lock, too, may become a shared one.
  const bool same_mode = key.lock() != nullptr && key.lock()->mode() == held.mode;
  key.Store(Apply(key.lock(), held));
  Tokens().Observe(held.hold.token);
  TheWaiters().HoldSet(key.lock_name(), held.hold.closes());
  if (!same_mode) TheWaiters().LockChanged(key.lock_name());
  RedisModule_SignalModifiedKey(ctx, key.name());
  if (news.news == News::kAcquired) Events().Acquired(ctx, key.name());
  if (news.news == News::kTouched) Events().Touched(ctx, key.name());
}

// Applies a fact that may remove holds. Deleting the key runs the type's unlink callback, which
// wakes the line.
template <typename Fact>
void ApplyRemoval(RedisModuleCtx* ctx, LockKey& key, const Fact& fact) {
  if (Lock* left = Apply(key.lock(), fact); left != nullptr) {
    key.Store(left);
  } else {
    key.Delete();
  }
  RedisModule_SignalModifiedKey(ctx, key.name());
}

// Takes a hold, or one of several counted ones, out of the key.
template <typename Fact>
void TakeOut(RedisModuleCtx* ctx, LockKey& key, const Fact& fact) {
  // First, because the owner's bytes may be in the lock.
  if (key.lock()->size() > 1 && EndsHold(*key.lock(), fact)) {
    TheWaiters().LockChanged(key.lock_name());
    TheSessions().HoldGone(key.lock_name(), fact.owner);
  }
  ApplyRemoval(ctx, key, fact);
}

void TakeOutEnded(RedisModuleCtx* ctx, LockKey& key, const Ended& ended) {
  if (const auto hold = key.lock()->Find(ended.owner); hold.has_value()) {
    Events().Lost(ctx, key.name(), LostWith(*hold, ended.how));
  }
  TakeOut(ctx, key, ended);
}

void TakeOutExpired(RedisModuleCtx* ctx, LockKey& key, const Expired& expired) {
  const Lock& lock = *key.lock();
  if (!Overdue(key.place(), expired.before).has_value()) return;
  Events().Lost(ctx, key.name(), LostWith(lock, expired));
  if (lock.size() > 1) {
    TheWaiters().LockChanged(key.lock_name());
    for (const Hold& hold : lock.holds(Lock::Order::kByClosing)) {
      if (hold.KeepsOutAt(expired.before)) break;
      TheSessions().HoldGone(key.lock_name(), hold.owner);
    }
  }
  ApplyRemoval(ctx, key, expired);
}

void EndSessions(RedisModuleCtx* ctx, LockKey& key, const SessionsEnded& ended) {
  const std::vector<Lost> lost = LostWith(*key.lock(), ended);
  if (lost.empty()) return;
  Events().Lost(ctx, key.name(), lost);
  if (key.lock()->size() > 1) {
    TheWaiters().LockChanged(key.lock_name());
    for (const auto& [hold, how] : lost) {
      if (hold.linger == Millis{0}) TheSessions().HoldGone(key.lock_name(), hold.owner);
    }
  }
  ApplyRemoval(ctx, key, ended);
  if (key.lock() == nullptr) return;
  for (const Owner owner : ended.owners) {
    const std::optional<Hold> lingers = key.lock()->Find(owner);
    if (lingers.has_value()) TheWaiters().HoldSet(key.lock_name(), lingers->closes());
  }
}

struct Effects {
  RedisModuleCtx* ctx;
  LockKey& key;
  Instant now;
  Carrier carrier;

  void operator()(const Held& held) const {
    Store(ctx, key, held);
    if (carrier == Carrier::kFact && !TheServer().SomebodyListens(now)) {
      // Reaches nobody, but the server counts a change, after so many of which it saves. (From the
      // moment in which the first replica asks for a copy to the one in which it is made, there
      // is a backlog that this goes into; but nobody can go on from there.)
      RedisModule_ReplicateVerbatim(ctx);
      return;
    }
    EmitHeld([this](auto... args) { RedisModule_Replicate(ctx, args...); }, key.name(), held);
  }

  // Told before they are carried out: the owner's bytes may be in the lock.
  void operator()(const Released& released) const {
    if (carrier == Carrier::kCommand) {
      RedisModule_ReplicateVerbatim(ctx);  // the LOCK.RELEASE that is running
    } else {
      RedisModule_Replicate(ctx, "LOCK.RELEASE", "sb", key.name(), released.owner.bytes.data(),
                            released.owner.bytes.size());
    }
    const std::optional<Hold> hold = key.lock()->Find(released.owner);
    TakeOut(ctx, key, released);
    if (!hold.has_value() || hold->count > 1) return;
    if (now != kBeforeAnyEnd) {  // else it is only obeyed
      TheStats().hold_times.Add(now - hold->since);
    }
    Events().Released(ctx, key.name(), hold->token);
  }

  void operator()(const Ended& ended) const {
    EmitEnded([this](auto... args) { RedisModule_Replicate(ctx, args...); }, key.name(), ended);
    TakeOutEnded(ctx, key, ended);
  }

  void operator()(const Expired& expired) const {
    EmitExpired([this](auto... args) { RedisModule_Replicate(ctx, args...); }, key.name(), expired);
    TakeOutExpired(ctx, key, expired);
  }

  void operator()(const SessionsEnded& ended) const {
    EmitSessionsEnded([this](auto... args) { RedisModule_Replicate(ctx, args...); }, key.name(),
                      ended);
    EndSessions(ctx, key, ended);
  }

  // A plain lock is not ours: it is changed by the server's own commands, which also notify,
  // signal and replicate themselves.
  void operator()(const PlainFreed& freed) const {
    key.Close();
    Free(RedisModule_Call(ctx, CommandFor(freed), "!s", key.name()));
  }

  void operator()(const PlainExtended& extended) const {
    key.Close();
    Free(RedisModule_Call(ctx, CommandFor(extended), "!sl", key.name(),
                          static_cast<long long>(extended.end.time_since_epoch().count())));
  }

 private:
  // There is no reply from a command that the server does not have.
  static void Free(RedisModuleCallReply* reply) {
    if (reply != nullptr) RedisModule_FreeCallReply(reply);
  }
};

template <typename Fact>
void CarryOutFact(RedisModuleCtx* ctx, LockKey& key, const Fact& fact, Instant now,
                  Carrier carrier) {
  const Carrier of_ends = carrier == Carrier::kDeferred ? carrier : Carrier::kFact;
  if (const auto overdue = OverdueBefore(key.place(), fact, now); overdue.has_value()) {
    Effects{ctx, key, now, of_ends}(*overdue);
  }
  Effects{ctx, key, now, carrier}(fact);
}

}  // namespace

void CarryOut(RedisModuleCtx* ctx, LockKey& key, const Change& change, Instant now,
              Carrier carrier) {
  std::visit([&](const auto& fact) { CarryOutFact(ctx, key, fact, now, carrier); }, change);
}

GrantRules CurrentRules(Instant now) {
  return {.grace = Tokens().GraceAt(now), .max_holders = MaxHolders()};
}

void CarryOutGrant(RedisModuleCtx* ctx, LockKey& key, const AcquireRequest& request, Token token,
                   Instant now, std::optional<uint64_t> session, Carrier carrier) {
  const std::optional<Token> floor = Tokens().TakeFloorBefore(token, now);
  // While slots are exported the fact of the grant, which is above the floor, has to do.
  if (floor.has_value() && !ExportsSlots() && TheServer().SomebodyListens(now)) {
    TellFloor(ctx, *floor);
  }
  CarryOutFact(ctx, key, HeldBy(key.place(), request, token, now), now, carrier);
  TheSessions().Acquired(session, key.lock_name(), request.owner);
}

const char* CommandFor(const Change& change) {
  if (std::holds_alternative<PlainFreed>(change)) return "DEL";
  return std::holds_alternative<PlainExtended>(change) ? "PEXPIREAT" : nullptr;
}

bool HasCommand(RedisModuleCtx* ctx, const char* name) {
  errno = 0;
  // Without arguments, which each of these commands needs: it does nothing, and another error
  // tells that the command is there.
  RedisModuleCallReply* reply = RedisModule_Call(ctx, name, "");
  if (reply != nullptr) RedisModule_FreeCallReply(reply);
  return reply != nullptr || errno != ENOENT;
}

void RemoveOverdue(RedisModuleCtx* ctx, LockKey& key, Instant now) {
  const auto overdue = Overdue(key.place(), now);
  const bool all = key.lock() != nullptr && key.lock()->closes() < now;  // the key goes by itself
  if (overdue.has_value() && !all) Effects{ctx, key, now, Carrier::kDeferred}(*overdue);
}

void Obey(RedisModuleCtx* ctx, LockKey& key, const Held& held) {
  Store(ctx, key, held);
  RedisModule_ReplicateVerbatim(ctx);
}

void Obey(RedisModuleCtx* ctx, LockKey& key, const Ended& ended) {
  if (key.lock() != nullptr) TakeOutEnded(ctx, key, ended);
  RedisModule_ReplicateVerbatim(ctx);
}

void Obey(RedisModuleCtx* ctx, LockKey& key, const Expired& expired) {
  if (key.lock() != nullptr) TakeOutExpired(ctx, key, expired);
  RedisModule_ReplicateVerbatim(ctx);
}

void Obey(RedisModuleCtx* ctx, LockKey& key, const SessionsEnded& ended) {
  if (key.lock() != nullptr) EndSessions(ctx, key, ended);
  RedisModule_ReplicateVerbatim(ctx);
}

void Obey(RedisModuleCtx* ctx, const FloorFact& floor) {
  Tokens().Observe(floor.token);
  RedisModule_ReplicateVerbatim(ctx);
}

void TellFloor(RedisModuleCtx* ctx, Token floor) {
  RedisModule_Replicate(ctx, kFactCommand, "cl", kFactFloor.data(),
                        static_cast<long long>(floor.value));
}

}  // namespace turnstile
