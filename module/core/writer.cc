#include "core/writer.h"

#include <variant>

#include "core/news.h"

namespace turnstile {

void Writer::Set(OpenKey& key, const Held& held, std::optional<Instant> now) {
  const Lock* lock = key.lock();
  const LockName name = key.name();
  if (!state_.sessions.empty() && Replaces(lock, held)) state_.sessions.UnbindAll(name);
  const HeldNews news = NewsOf(lock, held);
  state_.reporter.Lost(key, news.lost, now);  // first, because the owners are in the lock
  // A plain lock, too, may become a shared one.
  const bool same_mode = lock != nullptr && lock->mode() == held.mode;
  host_.Store(key.content(), Apply(key.lock(), held));
  state_.databases.Add(name.db);
  state_.tokens.Observe(held.hold.token);
  NoteEnd(name, held.hold.closes());
  if (!same_mode) LockChanged(name);
  if (news.news == News::kAcquired) state_.reporter.Acquired(key);
  if (news.news == News::kTouched) state_.reporter.Touched(key);
}

// Applies a fact that may remove holds. When the key goes, OnKeyRemoved wakes the queue.
template <typename Fact>
void Writer::StoreWithout(OpenKey& key, const Fact& fact) {
  if (Lock* left = Apply(key.lock(), fact); left != nullptr) {
    host_.Store(key.content(), left);
  } else {
    deleting_ = true;
    host_.Delete(key.content());
    deleting_ = false;
  }
}

// Takes a hold, or one of several counted ones, out of the key.
template <typename Fact>
void Writer::RemoveHold(OpenKey& key, const Fact& fact) {
  // First, because the owner's bytes may be in the lock.
  if (key.lock()->size() > 1 && EndsHold(*key.lock(), fact)) {
    LockChanged(key.name());
    HoldGone(key.name(), fact.owner);
  }
  StoreWithout(key, fact);
}

void Writer::Release(OpenKey& key, const Released& released, std::optional<Instant> now) {
  const std::optional<Hold> hold = key.lock()->Find(released.owner);
  if (!hold.has_value()) return;
  const Token token = hold->token;
  const Instant since = hold->since;
  const bool is_last = hold->count == 1;
  RemoveHold(key, released);
  if (!is_last) return;
  state_.reporter.Released(key, token,
                           now.has_value() ? std::optional<Millis>(*now - since) : std::nullopt);
}

void Writer::End(OpenKey& key, const Ended& ended, std::optional<Instant> now) {
  if (const auto hold = key.lock()->Find(ended.owner); hold.has_value()) {
    state_.reporter.Lost(key, LostWith(*hold, ended.how), now);
  }
  RemoveHold(key, ended);
}

void Writer::Expire(OpenKey& key, const Expired& expired, std::optional<Instant> now) {
  const Lock& lock = *key.lock();
  if (!Overdue(key.place(), expired.before).has_value()) return;
  state_.reporter.Lost(key, LostWith(lock, expired), now);
  if (lock.size() > 1) {
    LockChanged(key.name());
    for (const Hold& hold : lock.holds(Lock::Order::kByClosing)) {
      if (hold.KeepsOutAt(expired.before)) break;
      HoldGone(key.name(), hold.owner);
    }
  }
  StoreWithout(key, expired);
}

void Writer::EndSessions(OpenKey& key, const SessionsEnded& ended, std::optional<Instant> now) {
  const std::vector<Lost> lost = LostWith(*key.lock(), ended);
  if (lost.empty()) return;
  state_.reporter.Lost(key, lost, now);
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
    if (lingers.has_value()) NoteEnd(key.name(), lingers->closes());
  }
}

// --- What was decided here ----------------------------------------------------------------------

void Writer::Do(OpenKey& key, const Held& held, Instant now, Via via) {
  Set(key, held, now);
  host_.Replicate(key.content(), held, via, now);
}

// The others are replicated before they are carried out: the owner's bytes may be in the lock.
void Writer::Do(OpenKey& key, const Released& released, Instant now, Via via) {
  host_.Replicate(key.content(), released, via);
  Release(key, released, now);
}

void Writer::Do(OpenKey& key, const Ended& ended, Instant now, Via /*via*/) {
  host_.Replicate(key.content(), ended);
  End(key, ended, now);
}

void Writer::Do(OpenKey& key, const Expired& expired, Instant now, Via /*via*/) {
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
  if (const auto overdue = OverdueBefore(key.place(), fact, now); overdue.has_value()) {
    Do(key, *overdue, now, of_ends);
  }
  Do(key, fact, now, via);
}

void Writer::Execute(OpenKey& key, const Change& change, Instant now, Via via) {
  std::visit([&](const auto& fact) { ExecuteFact(key, fact, now, via); }, change);
}

void Writer::ExecuteGrant(OpenKey& key, const AcquireRequest& request, Token token, Instant now,
                          std::optional<uint64_t> session, Via via) {
  const std::optional<Token> floor = state_.tokens.TakeFloorBefore(token, now);
  // While it may not be replicated the fact of the grant, which is above the floor, has to do.
  if (floor.has_value() && host_.MayReplicateFloor() && host_.HasReplicationConsumers(now)) {
    host_.ReplicateFloor(*floor);
  }
  ExecuteFact(key, HeldBy(key.place(), request, token, now), now, via);
  Bind(key.name(), request.owner, session);
}

void Writer::RemoveOverdue(OpenKey& key, Instant now) {
  const auto overdue = Overdue(key.place(), now);
  const bool all = key.lock() != nullptr && key.lock()->closes() < now;  // the key goes by itself
  if (overdue.has_value() && !all) Do(key, *overdue, now, Via::kDeferred);
}

// --- What was decided elsewhere -----------------------------------------------------------------

void Writer::ApplyReplicated(OpenKey& key, const Released& released) {
  if (key.lock() != nullptr) Release(key, released, std::nullopt);
}

void Writer::ApplyReplicated(OpenKey& key, const Ended& ended) {
  if (key.lock() != nullptr) End(key, ended, std::nullopt);
}

void Writer::ApplyReplicated(OpenKey& key, const Expired& expired) {
  if (key.lock() != nullptr) Expire(key, expired, std::nullopt);
}

void Writer::ApplyReplicated(OpenKey& key, const SessionsEnded& ended) {
  if (key.lock() != nullptr) EndSessions(key, ended, std::nullopt);
}

// --- Sessions -----------------------------------------------------------------------------------

void Writer::Bind(LockName lock, Owner owner, std::optional<uint64_t> connection) {
  if (connection.has_value()) {
    state_.sessions.Bind(*connection, lock, owner);
  } else {
    HoldGone(lock, owner);
  }
}

void Writer::EndHolds(OpenKey& key, const std::vector<std::string>& names, Instant now, Via via) {
  std::vector<Owner> owners;
  owners.reserve(names.size());
  for (const std::string& name : names) owners.push_back(Owner{name});
  owners = DecideSessionEnd(key.place(), owners, now);
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

void Writer::OnKeyRemoved(LockName name, const Lock& lock, std::optional<Instant> now) {
  if (!deleting_ && now.has_value()) {
    const bool is_primary = host_.role() == Role::kPrimary;
    const bool moves = is_primary && host_.MovesAway(name);
    state_.reporter.Removed(name, lock, is_primary, moves, *now);
  }
  LockChanged(name);
  if (!state_.sessions.empty()) state_.sessions.UnbindAll(name);
}

}  // namespace turnstile
