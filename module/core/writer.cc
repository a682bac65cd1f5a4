#include "core/writer.h"

#include <variant>

#include "core/check.h"
#include "core/lock_events.h"

namespace turnstile {

void Writer::Set(OpenKey& key, const HoldSet& held, std::optional<Instant> now) {
  const Lock* lock = key.lock();
  const LockName name = key.name();
  if (!state_.sessions.empty() && Replaces(lock, held)) state_.sessions.UnbindAll(name);
  const HoldSetEvents events = EventsOf(lock, held, now);
  // First, because the owners are views into the lock.
  if (!events.lost.empty()) ReportLost(key, events.lost, now);
  // A plain lock may also become a shared one.
  const bool same_mode = lock != nullptr && lock->mode() == held.mode;
  if (lock == nullptr) state_.names.Add(name.key);
  host_.Store(key.content(), Apply(key.lock(), held));
  state_.databases.Add(name.db);
  state_.tokens.Observe(held.hold.token);
  NoteHoldEnd(name, held.hold.blocks_until());
  if (!same_mode) LockChanged(name);
  if (!state_.channels.empty()) {
    state_.channels.Renew(name, held.hold);
    PublishSoon();
  }
  if (events.event.has_value()) state_.reporter.Emit(key, *events.event);
}

void Writer::ReportLost(OpenKey& key, const std::vector<LostHold>& lost,
                        std::optional<Instant> now) {
  state_.reporter.OnLost(key, lost, now);
  if (state_.channels.empty()) return;
  for (const auto& [hold, how] : lost) {
    // The hold before an upgrade that is taken back goes on.
    if (how != Loss::kUndelivered) state_.channels.Lose(key.name(), hold.owner, how);
  }
  PublishSoon();
}

// Applies a fact that may remove holds. If the key is deleted, OnKeyRemoved wakes the queue.
template <typename Fact>
void Writer::StoreWithout(OpenKey& key, const Fact& fact) {
  TURNSTILE_DCHECK(!deleting_);
  if (Lock* left = Apply(key.lock(), fact); left != nullptr) {
    host_.Store(key.content(), left);
  } else {
    Delete(key);
  }
}

void Writer::Delete(OpenKey& key) {
  deleting_ = true;
  host_.Delete(key.content());
  deleting_ = false;
}

// Removes a hold, or one of several counted ones, from the key.
template <typename Fact>
void Writer::RemoveHold(OpenKey& key, const Fact& fact) {
  // First, because the owner's bytes may be in the lock.
  if (key.lock()->size() > 1 && EndsHold(*key.lock(), fact)) {
    LockChanged(key.name());
    HoldGone(key.name(), fact.owner);
  }
  StoreWithout(key, fact);
}

void Writer::Release(OpenKey& key, const HoldReleased& released, std::optional<Instant> now) {
  if (!TURNSTILE_CHECK(key.lock() != nullptr)) return;
  const std::optional<Hold> hold = key.lock()->Find(released.owner);
  if (!hold.has_value()) return;
  const Token token = hold->token;
  const Instant since = hold->since;
  const bool is_last = hold->count == 1;
  if (is_last && key.lock()->size() == 1) {
    Delete(key);
  } else {
    RemoveHold(key, released);
  }
  if (!is_last) return;
  state_.reporter.OnReleased(key, token,
                             now.has_value() ? std::optional<Millis>(*now - since) : std::nullopt);
}

void Writer::End(OpenKey& key, const HoldEnded& ended, std::optional<Instant> now) {
  if (!TURNSTILE_CHECK(key.lock() != nullptr)) return;
  if (const auto hold = key.lock()->Find(ended.owner); hold.has_value()) {
    ReportLost(key, HoldsLostWith(*hold, ended.how), now);
    // A grant is taken back whose owner was bound to a channel before: by a hold that has ended.
    if (ended.how == Loss::kUndelivered && !state_.channels.empty()) {
      state_.channels.Lose(key.name(), ended.owner, Loss::kExpired);
      PublishSoon();
    }
  }
  RemoveHold(key, ended);
}

void Writer::Expire(OpenKey& key, const HoldsExpired& expired, std::optional<Instant> now) {
  if (!TURNSTILE_CHECK(key.lock() != nullptr)) return;
  const Lock& lock = *key.lock();
  if (!Overdue(key.lock(), expired.before).has_value()) return;
  ReportLost(key, HoldsLostWith(lock, expired), now);
  if (lock.size() > 1) {
    LockChanged(key.name());
    for (const Hold& hold : lock.holds(Lock::Order::kByBlocksUntil)) {
      if (hold.BlocksAt(expired.before)) break;
      HoldGone(key.name(), hold.owner);
    }
  }
  StoreWithout(key, expired);
}

void Writer::EndSessions(OpenKey& key, const SessionsEnded& ended, std::optional<Instant> now) {
  if (!TURNSTILE_CHECK(key.lock() != nullptr)) return;
  const std::vector<LostHold> lost = HoldsLostWith(*key.lock(), ended);
  if (lost.empty()) return;
  ReportLost(key, lost, now);
  if (key.lock()->size() > 1) {
    LockChanged(key.name());
    for (const auto& [hold, how] : lost) {
      if (hold.linger == Millis{0}) HoldGone(key.name(), hold.owner);
    }
  }
  StoreWithout(key, ended);
  if (key.lock() == nullptr) return;
  for (const Owner owner : ended.owners) {
    const std::optional<Hold> lingers = key.lock()->Find(owner);
    if (lingers.has_value()) NoteHoldEnd(key.name(), lingers->blocks_until());
  }
}

// --- What was decided here ----------------------------------------------------------------------

void Writer::Do(OpenKey& key, const HoldSet& held, Instant now, Via via) {
  if (!held.hold.tag.empty()) {
    // The tag may be in the lock.
    const std::string tag(held.hold.tag);
    HoldSet tagged = held;
    tagged.hold.tag = tag;
    Set(key, tagged, now);
    host_.Replicate(key.content(), tagged, via, now);
    return;
  }
  Set(key, held, now);
  host_.Replicate(key.content(), held, via, now);
}

// The others are replicated before they are applied: the owner's bytes may be in the lock.
void Writer::Do(OpenKey& key, const HoldReleased& released, Instant now, Via via) {
  host_.Replicate(key.content(), released, via);
  Release(key, released, now);
}

void Writer::Do(OpenKey& key, const HoldEnded& ended, Instant now, Via /*via*/) {
  host_.Replicate(key.content(), ended);
  End(key, ended, now);
}

void Writer::Do(OpenKey& key, const HoldsExpired& expired, Instant now, Via /*via*/) {
  host_.Replicate(key.content(), expired);
  Expire(key, expired, now);
}

void Writer::Do(OpenKey& key, const SessionsEnded& ended, Instant now, Via /*via*/) {
  host_.Replicate(key.content(), ended);
  EndSessions(key, ended, now);
}

void Writer::Do(OpenKey& key, const PlainFreed& freed, Instant /*now*/, Via /*via*/) {
  host_.ChangePlain(key.content(), freed);
}

void Writer::Do(OpenKey& key, const PlainExtended& extended, Instant /*now*/, Via /*via*/) {
  host_.ChangePlain(key.content(), extended);
}

template <typename Fact>
void Writer::ExecuteFact(OpenKey& key, const Fact& fact, Instant now, Via via) {
  const Via of_ends = via == Via::kDeferred ? via : Via::kFact;
  if (const auto overdue = OverdueBefore(key.lock(), fact, now); overdue.has_value()) {
    Do(key, *overdue, now, of_ends);
  }
  Do(key, fact, now, via);
}

void Writer::Execute(OpenKey& key, const Change& change, Instant now, Via via) {
  std::visit([&](const auto& fact) { ExecuteFact(key, fact, now, via); }, change);
}

void Writer::ExecuteGrant(OpenKey& key, const AcquireRequest& request, Token token, Instant now,
                          std::optional<uint64_t> session, std::string_view user, Via via) {
  const std::optional<Token> floor = state_.tokens.TakeFloorBefore(token, now);
  // While the floor may not be replicated, the fact of the grant, which is above the floor, takes
  // its place.
  if (floor.has_value() && host_.MayReplicateFloor() && host_.HasReplicationConsumers(now)) {
    host_.ReplicateFloor(*floor);
  }
  const LockName name = key.name();
  if (!request.notify.has_value()) {
    ExecuteFact(key, HoldSetBy(key.state(), request, token, now), now, via);
    BindSession(name, request.owner, session);
    return;
  }
  // An owner that asks again for what it was told on this channel does not enter once more.
  AcquireRequest asked = request;
  if (state_.channels.IsBoundTo(name, request.owner, *request.notify)) asked.reentrant = false;
  const HoldSet held = HoldSetBy(key.state(), asked, token, now);
  ExecuteFact(key, held, now, via);
  BindSession(name, request.owner, session);
  state_.channels.Bind(name, held.hold, *request.notify, user);
  PublishSoon();
}

void Writer::RemoveOverdue(OpenKey& key, Instant now) {
  const auto overdue = Overdue(key.lock(), now);
  const bool all =
      key.lock() != nullptr && key.lock()->blocks_until() < now;  // the key expires by itself
  if (overdue.has_value() && !all) Do(key, *overdue, now, Via::kDeferred);
}

// --- What was decided elsewhere -----------------------------------------------------------------

void Writer::ApplyReplicated(OpenKey& key, const HoldReleased& released) {
  if (key.lock() != nullptr) Release(key, released, std::nullopt);
}

void Writer::ApplyReplicated(OpenKey& key, const HoldEnded& ended) {
  if (key.lock() != nullptr) End(key, ended, std::nullopt);
}

void Writer::ApplyReplicated(OpenKey& key, const HoldsExpired& expired) {
  if (key.lock() != nullptr) Expire(key, expired, std::nullopt);
}

void Writer::ApplyReplicated(OpenKey& key, const SessionsEnded& ended) {
  if (key.lock() != nullptr) EndSessions(key, ended, std::nullopt);
}

// --- Sessions -----------------------------------------------------------------------------------

void Writer::BindSession(LockName lock, Owner owner, std::optional<uint64_t> connection) {
  if (connection.has_value()) {
    host_.WatchConnections();
    state_.sessions.Bind(*connection, lock, owner);
  } else if (!state_.sessions.empty()) {
    state_.sessions.Unbind(lock, owner);
  }
}

void Writer::EndHolds(OpenKey& key, const std::vector<std::string>& names, Instant now, Via via) {
  std::vector<Owner> owners;
  owners.reserve(names.size());
  for (const std::string& name : names) owners.push_back(Owner{name});
  owners = DecideSessionEnd(key.state(), owners, now);
  if (!owners.empty()) Execute(key, SessionsEnded{now, owners}, now, via);
}

void Writer::EndClosedSessions(Instant now, Budget& budget) {
  constexpr size_t kSteps = 500;
  constexpr size_t kCostOfKey = 10;
  while (state_.sessions.has_ended() && !budget.spent()) {
    const LockName first = state_.sessions.FirstWithEnded();
    const std::string name(first.key);
    const int db = first.db;
    const Sessions::EndedHolds ended = state_.sessions.TakeFirstEnded(kSteps);
    OpenKey key(host_, {.lock = {db, name}}, Access::kWrite);
    EndHolds(key, ended.owners, now, Via::kDeferred);
    budget.Spend(kCostOfKey + 2 * ended.owners.size());
  }
}

bool Writer::EndClosedSessionsIn(OpenKey& key, Instant now, size_t steps) {
  const Sessions::EndedHolds ended = state_.sessions.TakeEnded(key.name(), steps);
  EndHolds(key, ended.owners, now, Via::kFact);
  return !ended.more;
}

void Writer::EndClosedSessionOf(OpenKey& key, Owner owner, Instant now) {
  if (!state_.sessions.HasEnded(key.name(), owner)) return;
  state_.sessions.Unbind(key.name(), owner);
  EndHolds(key, {std::string(owner.bytes)}, now, Via::kFact);
}

void Writer::OnKeyRemoved(LockName name, const Lock& lock, Role role, std::optional<Instant> now) {
  const bool is_primary = role == Role::kPrimary;
  const bool is_loss = !deleting_ && now.has_value();
  const bool moves = is_loss && is_primary && host_.MovesAway(name);
  if (is_loss) state_.reporter.OnRemoved(name, lock, is_primary, moves, *now);
  if (is_loss) {
    const bool expires = lock.blocks_until() <= *now;
    if (state_.channels.OnRemoved(name, expires, moves, *now)) PublishSoon();
  } else {
    state_.channels.UnbindAll(name);
  }
  last_removed_ = NameFilter::HashOf(name.key);
  state_.names.Remove(*last_removed_);
  LockChanged(name);
  if (!state_.sessions.empty()) state_.sessions.UnbindAll(name);
}

}  // namespace turnstile
