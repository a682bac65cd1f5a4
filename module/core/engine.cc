#include "core/engine.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "core/views.h"

namespace turnstile {

bool LockDatabases::Has(int db) const {
  return std::binary_search(databases_.begin(), databases_.end(), db);
}

void LockDatabases::Insert(int db) {
  const auto at = std::lower_bound(databases_.begin(), databases_.end(), db);
  if (at == databases_.end() || *at != db) databases_.insert(at, db);
}

void LockDatabases::Forget(std::optional<int> db) {
  if (db.has_value()) {
    std::erase(databases_, *db);
  } else {
    databases_.clear();
  }
}

void LockDatabases::Swap(int first, int second) {
  for (int& db : databases_) {
    if (db == first || db == second) db = db == first ? second : first;
  }
  std::sort(databases_.begin(), databases_.end());
}

// --- Commands -----------------------------------------------------------------------------------

// Holds whose connection has closed have ended for everybody, also those that are still in the key.
// This takes out the owner's, of which a command decides that concerns nobody else.
void Engine::EndClosedSessionsOf(OpenKeys& keys, Owner owner, Instant now) {
  if (!state_.sessions.has_ended()) return;
  for (size_t i = 0; i < keys.size(); ++i) writer_.EndClosedSessionOf(keys[i], owner, now);
}

// This takes out all of them, but of several crowded locks only a part: for the keys that it
// returns as true the rest was put off.
std::vector<bool> Engine::EndClosedSessions(OpenKeys& keys, Instant now) {
  constexpr size_t kSteps = 10'000;
  std::vector<bool> put_off;
  if (!state_.sessions.has_ended()) return put_off;
  for (size_t i = 0; i < keys.size(); ++i) {
    put_off.push_back(!writer_.EndClosedSessionsIn(keys[i], now, kSteps / keys.size()));
  }
  return put_off;
}

AcquireResult Engine::Acquire(std::span<const KeyName> names, const AcquireRequest& request,
                              const Now& now) {
  using Kind = AcquireResult::Kind;
  std::optional<uint64_t> session;
  if (request.session) {
    session = state_.host.CallerConnection();
    if (!session.has_value()) return {Kind::kNoSession};
  }
  const Instant moment = now.moment();
  state_.host.BeforeGrant(names.front().lock, now.wall);
  OpenKeys keys(state_.host, names, Access::kWrite);
  if (keys.any_wrong_type()) return {Kind::kWrongType};
  EndClosedSessionsOf(keys, request.owner, moment);
  const std::vector<bool> put_off = EndClosedSessions(keys, moment);
  const Sites sites(keys, [&](size_t index, const OpenKey& key, const Place& place) {
    if (!put_off.empty() && put_off[index]) return Crowd::Incompatible();
    return waiting_.AheadOfNewcomer(key.name(), place, request, moment);
  });
  const TokenClock& clock = state_.tokens.Issuing(now.wall);
  const Admission admission = Decide(sites.get(), request, now.wall, clock, state_.RulesAt(moment));
  if (admission.granted()) {
    ++(admission.is_new() ? state_.stats.acquired_immediately : state_.stats.reacquired);
    for (size_t i = 0; i < keys.size(); ++i) {
      writer_.ExecuteGrant(keys[i], request, admission.token, moment, session, Via::kFact);
      waiting_.OnOwnerReplied(keys[i].name(), request.owner);
    }
    return {Kind::kGranted, admission.token};
  }
  if (!admission.busy()) return {.kind = Kind::kRefused, .outcome = admission.outcome};
  if (request.wait > Millis{0} && state_.host.CallerMayBlock()) {
    return Park(keys, sites.get(), request, session, now);
  }
  ++state_.stats.rejected;
  return {Kind::kBusy};
}

AcquireResult Engine::Park(const OpenKeys& keys, std::span<const Site> sites,
                           const AcquireRequest& request, std::optional<uint64_t> session,
                           const Now& now) {
  using Kind = AcquireResult::Kind;
  ParkResult parked = waiting_.Park(keys, sites, request, session, now);
  switch (parked.kind) {
    case ParkResult::Kind::kWaits:
      return {Kind::kWaits};
    case ParkResult::Kind::kNobody:
      ++state_.stats.rejected;
      return {Kind::kBusy};
    case ParkResult::Kind::kWaitLimit:
      ++state_.stats.rejected_wait_limit;
      return {.kind = Kind::kWaitLimit, .limit = parked.limit};
    case ParkResult::Kind::kUserWaitLimit:
      ++state_.stats.rejected_wait_limit;
      return {.kind = Kind::kUserWaitLimit, .limit = parked.limit};
    case ParkResult::Kind::kCannotWait:
      return {Kind::kCannotWait};
    case ParkResult::Kind::kDeadlock:
      break;
  }
  ++state_.stats.deadlocks;
  return {.kind = Kind::kDeadlock, .cycle = std::move(parked.cycle)};
}

// The command that the request needs to change a plain lock and that the server lacks; null if
// there is none. Asked before anything is changed.
template <typename Request>
const char* Engine::MissingCommand(OpenKeys& keys, const Request& request, Instant now) {
  for (size_t i = 0; i < keys.size(); ++i) {
    if (!keys[i].is_plain()) continue;
    const Decision decision = Decide(keys[i].place(), request, now);
    if (!decision.change.has_value()) continue;
    const char* missing = state_.host.MissingCommandFor(*decision.change);
    if (missing != nullptr) return missing;
  }
  return nullptr;
}

CountResult Engine::Release(std::span<const KeyName> names, const ReleaseRequest& request,
                            Instant now) {
  OpenKeys keys(state_.host, names, Access::kWrite);
  if (keys.any_wrong_type()) return {CountResult::Kind::kWrongType};
  if (const char* missing = MissingCommand(keys, request, now); missing != nullptr) {
    return {CountResult::Kind::kMissingCommand, 0, missing};
  }
  EndClosedSessionsOf(keys, request.owner, now);
  std::vector<bool> waited;
  if (!state_.queue.empty()) {
    std::vector<LockName> locks;
    locks.reserve(keys.size());
    for (size_t i = 0; i < keys.size(); ++i) locks.push_back(keys[i].name());
    waited = waiting_.CancelWaits(locks, request.owner);
  }
  const Via via = keys.size() == 1 ? Via::kCommand : Via::kFact;
  size_t given_up = 0;  // held or waited for
  for (size_t i = 0; i < keys.size(); ++i) {
    const Decision decision = Decide(keys[i].place(), request, now);
    if (decision.change.has_value()) writer_.Execute(keys[i], *decision.change, now, via);
    const bool held = decision.outcome == Outcome::kReleased;
    if (held) ++state_.stats.released;
    if (held || (!waited.empty() && waited[i])) ++given_up;
  }
  state_.stats.stale_releases += keys.size() - given_up;
  return {CountResult::Kind::kDone, given_up};
}

CountResult Engine::Touch(std::span<const KeyName> names, const TouchRequest& request,
                          Instant now) {
  OpenKeys keys(state_.host, names, Access::kWrite);
  if (keys.any_wrong_type()) return {CountResult::Kind::kWrongType};
  if (const char* missing = MissingCommand(keys, request, now); missing != nullptr) {
    return {CountResult::Kind::kMissingCommand, 0, missing};
  }
  EndClosedSessionsOf(keys, request.owner, now);
  size_t touched = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    const Decision decision = Decide(keys[i].place(), request, now);
    if (!decision.change.has_value()) continue;
    writer_.Execute(keys[i], *decision.change, now, Via::kFact);
    waiting_.OnOwnerReplied(keys[i].name(), request.owner);
    ++touched;
  }
  state_.stats.touched += touched;
  state_.stats.stale_touches += keys.size() - touched;
  return {CountResult::Kind::kDone, touched};
}

FenceResult Engine::Fence(const KeyName& name, const FenceRequest& request, Instant now) {
  if (state_.sessions.has_ended()) {
    OpenKeys keys(state_.host, {&name, 1}, Access::kInspect);
    EndClosedSessions(keys, now);
  }
  const OpenKey key(state_.host, name, Access::kRead);
  if (key.wrong_type()) return {.wrong_type = true};
  const Place place = key.place();
  FenceResult result{.holds = CurrentToken(place, now)};
  if (!request.token.has_value()) return result;
  result.current = IsCurrent(place, *request.token, now);
  if (!request.then.empty()) {
    ++(result.current ? state_.stats.fence_passed : state_.stats.fence_rejected);
  }
  return result;
}

// --- What operators see -------------------------------------------------------------------------

namespace {

// What is in a key, as everybody should see it: without the holds that have ended with their
// connection and are not removed yet. A command that only reads cannot remove them.
class Seen {
 public:
  Seen(const OpenKey& key, const Sessions& sessions, Instant now) : place_(key.place()) {
    const LockName name = key.name();
    if (place_.lock == nullptr || sessions.CountEnded(name) == 0) return;
    std::vector<Hold> left;
    for (const Hold& hold : place_.lock->holds(Lock::Order::kByOwner)) {
      if (!sessions.HasEnded(name, hold.owner) || !hold.LiveAt(now)) {
        left.push_back(hold);
      } else if (hold.linger > Millis{0}) {
        left.push_back(AfterSession(hold, now));
      }
    }
    if (!left.empty()) lock_.reset(Lock::Make(place_.lock->mode(), left));
    place_.lock = lock_.get();
  }

  const Place& place() const { return place_; }

 private:
  Place place_;
  std::unique_ptr<Lock> lock_;
};

// How many of those who hold or wait LOCK.INFO shows one by one: it is a fast command.
constexpr size_t kMostShown = 100;

// How long a plain lock lasts, if it ends.
std::optional<Millis> LeaseLeft(const PlainLock& plain, Instant now) {
  return plain.end == kMaxInstant ? std::nullopt : std::optional<Millis>(plain.end - now);
}

Mode ShownMode(const Place& place, const WaitQueue::Line* line, bool held) {
  return held ? ModeOf(place) : line->first()->waiter().request().mode;
}

}  // namespace

std::optional<std::optional<LockInfo>> Engine::Inspect(const KeyName& name, const Now& now) {
  const OpenKey key(state_.host, name, Access::kRead);
  if (key.wrong_type()) return std::nullopt;
  const Instant moment = now.moment();
  const Seen seen(key, state_.sessions, moment);
  const Place& place = seen.place();
  const WaitQueue::Line* line = state_.queue.empty() ? nullptr : state_.queue.Find(key.name());
  const bool held = CountHolders(place, moment) > 0;
  std::optional<LockInfo> result;
  if (!held && line == nullptr) return result;

  const Occupancy occupancy = OccupancyOf(place, moment);
  LockInfo& info = result.emplace();
  info.mode = ShownMode(place, line, held);
  info.is_plain = held && place.plain.has_value();
  info.holding = occupancy.live;
  info.linger_left = occupancy.linger_left;
  info.grace_left = state_.tokens.GraceLeft(moment);
  if (info.is_plain) {
    info.holders.push_back(
        {.owner = std::string(place.plain->value), .lease_left = LeaseLeft(*place.plain, moment)});
  } else if (held) {
    for (const Hold& hold : place.lock->holds(Lock::Order::kByToken)) {
      if (info.holders.size() == kMostShown) break;
      if (!hold.LiveAt(moment)) continue;
      info.holders.push_back({.owner = std::string(hold.owner.bytes),
                              .token = hold.token,
                              .lease_left = hold.end - moment,
                              .held = std::max(moment - hold.since, Millis{0}),
                              .count = hold.count,
                              .linger = hold.linger,
                              .session = state_.sessions.BoundTo(key.name(), hold.owner)});
    }
  }
  if (line == nullptr) return result;
  info.waiting = line->size();
  const Tick tick = now.tick();
  for (const auto* place_in_line = line->first();
       place_in_line != nullptr && info.waiters.size() < kMostShown;
       place_in_line = place_in_line->behind()) {
    const WaitQueue::Waiter& waiter = place_in_line->waiter();
    info.waiters.push_back({.owner = std::string(waiter.request().owner.bytes),
                            .mode = waiter.request().mode,
                            .waited = tick - waiter.since(),
                            .left = std::max(waiter.deadline() - tick, Millis{0}),
                            .connection = waiter.client_id()});
  }
  return result;
}

std::optional<LockSummary> Engine::Summarize(const KeyName& name, const Now& now, Budget& budget) {
  constexpr size_t kTell = 5;           // ten fields
  constexpr size_t kHoldsPerUnit = 20;  // each hold is looked at
  const OpenKey key(state_.host, name, Access::kRead);
  if (key.wrong_type()) return std::nullopt;
  const Instant moment = now.moment();
  const Seen seen(key, state_.sessions, moment);
  const Place& place = seen.place();
  const WaitQueue::Line* line = state_.queue.empty() ? nullptr : state_.queue.Find(key.name());
  const bool held = CountHolders(place, moment) > 0;
  if (!held && line == nullptr) return std::nullopt;

  budget.Spend(kTell + (place.lock == nullptr ? 0 : place.lock->size() / kHoldsPerUnit));
  const Occupancy occupancy = OccupancyOf(place, moment);
  LockSummary summary{.key = std::string(key.name().key),
                      .mode = ShownMode(place, line, held),
                      .is_plain = held && place.plain.has_value(),
                      .holding = occupancy.live,
                      .linger_left = occupancy.linger_left};
  if (const std::optional<Hold> hold = CurrentHold(place, moment); hold.has_value()) {
    summary.owner = hold->owner.bytes;
    summary.token = hold->token;
    summary.held = std::max(moment - hold->since, Millis{0});
    summary.lease_left = hold->end - moment;
  } else if (summary.is_plain) {
    if (place.plain->value.size() <= kMaxOwnerBytes) summary.owner = place.plain->value;
    summary.lease_left = LeaseLeft(*place.plain, moment);
  }
  if (line != nullptr) {
    summary.waiting = line->size();
    summary.longest_wait = now.tick() - line->waiting_since();
  }
  return summary;
}

std::vector<std::string> Engine::LongestLines(int db, size_t most) const {
  std::vector<std::string> names;
  for (const WaitQueue::Line* line : state_.queue.LongestLines(db, most)) {
    names.emplace_back(line->lock().key);
  }
  return names;
}

size_t Engine::CountLocks() {
  size_t keys = 0;
  for (const int db : state_.databases.all()) keys += state_.host.CountKeys(db);
  return std::min(keys, state_.host.StoredLocks());
}

// --- What was decided elsewhere -----------------------------------------------------------------

void Engine::ApplyRelease(const KeyName& name, Owner owner) {
  OpenKey key(state_.host, name, Access::kWrite);
  writer_.ApplyReplicated(key, Released{owner});
  state_.host.ReplicateVerbatim();
}

void Engine::ApplyFact(const KeyName& name, const HeldFact& fact) {
  OpenKey key(state_.host, name, Access::kWrite);
  writer_.ApplyReplicated(key, fact.held);
  state_.host.ReplicateVerbatim();
}

void Engine::ApplyFact(const KeyName& name, const Fact& fact) {
  if (const auto* floor = std::get_if<FloorFact>(&fact)) {
    state_.tokens.Observe(floor->token);
  } else {
    OpenKey key(state_.host, name, Access::kWrite);
    if (const auto* ended = std::get_if<EndedFact>(&fact)) {
      writer_.ApplyReplicated(key, ended->ended);
    } else if (const auto* expired = std::get_if<ExpiredFact>(&fact)) {
      writer_.ApplyReplicated(key, expired->expired);
    } else if (const auto* session = std::get_if<SessionFact>(&fact)) {
      writer_.ApplyReplicated(key, session->ended());
    }
  }
  state_.host.ReplicateVerbatim();
}

// --- What happened in the server ----------------------------------------------------------------

void Engine::OnTtlChanged(std::string_view key) {
  if (!keys_with_foreign_ttl_.contains(key)) keys_with_foreign_ttl_.emplace(key);
}

void Engine::OnLockLoaded(int db, std::optional<Token> token) {
  if (db >= 0) state_.databases.Add(db);
  if (token.has_value()) state_.tokens.Observe(*token);
}

// Looks at all keys until it has found as many locks as there are, because nothing else knows which
// keys are locks and how many holders each has. That takes a fraction of the time in which the
// server frees the keys. Rejected: a table of all locks, which would make each of them larger and
// slower.
void Engine::OnFlushing(std::optional<int> db, Instant now) {
  if (CountLocks() == 0) return;
  const bool counts = state_.host.role() == Role::kPrimary;
  size_t left = state_.host.StoredLocks();
  for (const int each : state_.databases.all()) {
    if (db.has_value() && each != *db) continue;
    if (left == 0) break;
    state_.host.VisitLocks(each, [&](LockName name, const Lock& lock) {
      state_.reporter.Flushed(name, lock, counts, now);
      return --left > 0;
    });
  }
  state_.databases.Forget(db);
}

void Engine::OnFlushed(std::optional<int> db) {
  state_.sessions.UnbindAll(db);
  state_.queue.WakeAll(db);
}

void Engine::OnSwapped(int first, int second) {
  state_.databases.Swap(first, second);
  state_.sessions.SwapDatabases(first, second);
  state_.queue.WakeAll(first);
  state_.queue.WakeAll(second);
}

void Engine::OnDemoted() {
  state_.tokens.StopIssuing();
  keys_with_foreign_ttl_.clear();
  waiting_.OnDemoted();
  state_.sessions.UnbindAll(std::nullopt);  // these holds are ordinary ones now
}

void Engine::OnDisconnected(uint64_t connection) {
  state_.sessions.Close(connection);
  if (state_.sessions.has_ended()) state_.host.WakeEventLoop();
}

void Engine::OnUnblocked(WaitingCall& call, bool timed_out, Tick now) {
  waiting_.OnUnblocked(call, timed_out, now);
  const std::optional<Instant> due = waiting_.NextDue();
  if (due.has_value() && *due == kMinInstant) state_.host.WakeEventLoop();
}

// --- Work that no command carries ---------------------------------------------------------------

bool Engine::has_tasks() const {
  return state_.tokens.has_floor_to_replicate() || !keys_with_foreign_ttl_.empty() ||
         state_.sessions.has_ended();
}

bool Engine::is_idle() const {
  return state_.tokens.issuing() && !has_tasks() && waiting_.empty() &&
         !waiting_.NextDue().has_value();
}

std::optional<Instant> Engine::RunDueWork(const Now& now, Budget budget) {
  // How soon a write that is not allowed now is tried again.
  constexpr Millis kTryAgain{10};
  const Instant moment = now.moment();
  const auto next_due = [this] {
    const std::optional<Instant> waiting = waiting_.NextDue();
    const std::optional<Instant> slots = state_.host.NextSlotRefresh();
    if (!waiting.has_value() || !slots.has_value()) return waiting.has_value() ? waiting : slots;
    return std::optional(std::min(*waiting, *slots));
  };
  const bool had_tasks = has_tasks();
  waiting_.TimeOut(now.tick(), budget);
  const std::optional<Instant> due = next_due();
  const bool has_work = had_tasks || (due.has_value() && *due <= moment);
  const bool may_write = (has_work || !state_.tokens.issuing()) && state_.host.MayWrite();
  if (may_write) state_.tokens.Issuing(now.wall);
  state_.host.RefreshSlots(now.wall);
  if (may_write) {
    if (state_.host.MayReplicateFloor()) {
      const std::optional<Token> floor = state_.tokens.TakeFloorToReplicate(now.wall);
      if (floor.has_value()) state_.host.ReplicateFloor(*floor);
    }
    RestoreTtls(moment, budget);
    waiting_.TakeBackUndelivered(moment, budget);
    // First all of these: in a pass in which waiters are tried, no hold of a closed connection is
    // left.
    writer_.EndClosedSessions(moment, budget);
    waiting_.GrantWaiters(now, budget);
  }
  std::optional<Instant> next;
  if (has_work && !may_write) {
    next = moment + kTryAgain;
  } else if (!keys_with_foreign_ttl_.empty() || state_.sessions.has_ended()) {
    next = moment;  // the budget is spent
  } else if (const auto later = next_due(); later.has_value()) {
    next = std::max(moment, *later);
  }
  if (!waiting_.empty()) {
    const Instant time_out = moment + (state_.queue.NextTimeOut() - now.tick());
    next = std::min(next.value_or(time_out), time_out);
  }
  return next;
}

// The leases inside the value decide; the key's TTL only follows them. In which database the key
// was changed is not known for certain (see OnKeyChanged), and locks are in few.
void Engine::RestoreTtl(LockName name, Instant now) {
  OpenKey key(state_.host, {.lock = name}, Access::kInspect);
  const Lock* lock = key.lock();
  if (lock == nullptr || state_.host.ExpiryOf(key.content()) == lock->closes()) return;
  const Held last{lock->mode(), lock->last(Lock::Order::kByClosing)};
  writer_.Execute(key, last, now, Via::kDeferred);
}

void Engine::RestoreTtls(Instant now, Budget& budget) {
  while (!keys_with_foreign_ttl_.empty() && !budget.spent()) {
    budget.Spend(2);
    const auto key = keys_with_foreign_ttl_.extract(keys_with_foreign_ttl_.begin());
    const std::vector<int> databases = state_.databases.all();
    for (const int db : databases) RestoreTtl({db, key.value()}, now);
  }
}

}  // namespace turnstile
