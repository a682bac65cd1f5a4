#include "core/engine.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "core/check.h"
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

// Holds whose connection has closed have ended for everybody, even while they are still in the key.
// This removes the holds of `owner`, for a command that concerns only that owner.
void Engine::EndClosedSessionsOf(OpenKeys& keys, Owner owner, Instant now) {
  for (size_t i = 0; i < keys.size(); ++i) writer_.EndClosedSessionOf(keys[i], owner, now);
}

// This removes all of them, but if several locks have many, only some: for the keys whose result is
// true the rest was deferred.
std::vector<bool> Engine::EndClosedSessions(OpenKeys& keys, Instant now) {
  constexpr size_t kSteps = 10'000;
  std::vector<bool> deferred;
  for (size_t i = 0; i < keys.size(); ++i) {
    deferred.push_back(!writer_.EndClosedSessionsIn(keys[i], now, kSteps / keys.size()));
  }
  return deferred;
}

// The owner is about to be told of the hold that it has, whatever becomes of its token: an upgrade
// or a floor may raise it.
void Engine::ConfirmGrants(const OpenKey& key, Owner owner, Instant now) {
  const std::optional<Hold> own = key.lock() == nullptr ? std::nullopt : key.lock()->Find(owner);
  if (own.has_value() && own->LiveAt(now)) waiting_.ConfirmGrants(key.name(), owner, own->token);
}

AcquireResult Engine::Acquire(std::span<const KeyName> names, const AcquireRequest& request,
                              const Now& now) {
  using Kind = AcquireResult::Kind;
  TURNSTILE_DCHECK(!running_);
  std::optional<uint64_t> session;
  if (request.session) {
    session = state_.host.CallerConnection();
    if (!session.has_value()) return {Kind::kNoSession};
  }
  std::string user;  // who is to be notified
  if (request.notify.has_value()) {
    auto caller = state_.host.CallerToNotify(request.notify->channel, names.front().lock);
    if (caller.refusal.has_value()) {
      return {.kind = Kind::kNotifyRefused, .text = *std::move(caller.refusal)};
    }
    user = std::move(caller.user);
  }
  const Instant moment = now.moment();
  state_.host.BeforeGrant(names.front().lock, now.wall);
  OpenKeys keys(state_.host, names, Access::kWrite);
  if (keys.any_wrong_type()) return {Kind::kWrongType};
  std::vector<bool> deferred;
  if (state_.sessions.has_ended()) {
    EndClosedSessionsOf(keys, request.owner, moment);
    deferred = EndClosedSessions(keys, moment);
  }
  const LockViews views(keys, [&](size_t index, const OpenKey& key, const KeyState& key_state) {
    if (!deferred.empty() && deferred[index]) return WaitersAhead::Incompatible();
    if (state_.queue.empty()) return WaitersAhead();
    return waiting_.AheadOfNewcomer(key.name(), key_state, request, moment);
  });
  const TokenClock& clock = state_.tokens.Issuing(now.wall);
  const Admission admission = Decide(views.get(), request, now.wall, clock, state_.RulesAt(moment));
  if (admission.granted()) {
    if (!TURNSTILE_CHECK(IsSafeGrant(views.get(), request, admission, moment))) {
      ++state_.stats.rejected;
      return {Kind::kBusy};
    }
    ++(admission.is_new() ? state_.stats.acquired_immediately : state_.stats.reacquired);
    for (size_t i = 0; i < keys.size(); ++i) {
      if (waiting_.has_unconfirmed()) ConfirmGrants(keys[i], request.owner, moment);
      writer_.ExecuteGrant(keys[i], request, admission.token, moment, session, user, Via::kFact);
    }
    if (request.notify.has_value()) waiting_.Retract(request.owner, *request.notify);
    return {Kind::kGranted, admission.token};
  }
  if (!admission.busy()) return {.kind = Kind::kRefused, .outcome = admission.outcome};
  if (request.wait > Millis{0}) {
    auto caller = request.notify.has_value()
                      ? std::optional(Host::ParkableCaller{session.value_or(0), std::move(user)})
                      : state_.host.CallerToPark();
    if (caller.has_value()) {
      return Park(keys, views.get(), request, *caller, now);
    }
  }
  ++state_.stats.rejected;
  return {Kind::kBusy};
}

AcquireResult Engine::Park(const OpenKeys& keys, std::span<const LockView> views,
                           const AcquireRequest& request, const Host::ParkableCaller& caller,
                           const Now& now) {
  using Kind = AcquireResult::Kind;
  ParkResult parked = waiting_.Park(keys, views, request, caller, now);
  switch (parked.kind) {
    case ParkResult::Kind::kWaits:
      if (!request.notify.has_value()) return {Kind::kWaits};
      waiting_.Retract(request.owner, *request.notify);
      return {Kind::kQueued};
    case ParkResult::Kind::kLineFull:
      ++state_.stats.rejected_line_full;
      return {Kind::kBusy};
    case ParkResult::Kind::kQueueLimit:
      ++state_.stats.rejected_wait_limit;
      return {.kind = Kind::kQueueLimit, .limit = parked.limit};
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

// The command that the server lacks and that the request needs to change a plain lock; null if
// there is none. Must be called before anything is changed.
template <typename Request>
const char* Engine::MissingCommand(OpenKeys& keys, const Request& request, Instant now) {
  for (size_t i = 0; i < keys.size(); ++i) {
    if (!keys[i].is_plain()) continue;
    const Decision decision = Decide(keys[i].state(), request, now);
    if (!decision.change.has_value()) continue;
    const char* missing = state_.host.MissingCommandFor(*decision.change);
    if (missing != nullptr) return missing;
  }
  return nullptr;
}

// The common beginning of a release and a touch. Returns a result if nothing can be done.
template <typename Request>
std::optional<CountResult> Engine::Prepare(OpenKeys& keys, const Request& request, Instant now) {
  if (keys.any_wrong_type()) return CountResult{CountResult::Kind::kWrongType};
  if (const char* missing = MissingCommand(keys, request, now); missing != nullptr) {
    return CountResult{CountResult::Kind::kMissingCommand, 0, missing};
  }
  if (state_.sessions.has_ended()) EndClosedSessionsOf(keys, request.owner, now);
  return std::nullopt;
}

CountResult Engine::Release(std::span<const KeyName> names, const ReleaseRequest& request,
                            Instant now) {
  OpenKeys keys(state_.host, names, Access::kWrite);
  if (const auto refusal = Prepare(keys, request, now); refusal.has_value()) return *refusal;
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
    const Decision decision = Decide(keys[i].state(), request, now);
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
  if (const auto refusal = Prepare(keys, request, now); refusal.has_value()) return *refusal;
  size_t touched = 0;
  for (size_t i = 0; i < keys.size(); ++i) {
    const Decision decision = Decide(keys[i].state(), request, now);
    if (!decision.change.has_value()) continue;
    if (waiting_.has_unconfirmed()) ConfirmGrants(keys[i], request.owner, now);
    writer_.Execute(keys[i], *decision.change, now, Via::kFact);
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
  const KeyState key_state = key.state();
  FenceResult result{.holds = CurrentToken(key_state, now)};
  if (!request.token.has_value()) return result;
  result.current = IsCurrent(key_state, *request.token, now);
  if (!request.then.empty()) {
    ++(result.current ? state_.stats.fence_passed : state_.stats.fence_rejected);
  }
  return result;
}

// --- What operators see -------------------------------------------------------------------------

namespace {

// The key state as every caller should see it: without holds that have ended with their connection
// and are not removed yet. A command that only reads cannot remove them.
class VisibleState {
 public:
  VisibleState(const OpenKey& key, const Sessions& sessions, Instant now)
      : key_state_(key.state()) {
    const LockName name = key.name();
    if (key_state_.lock == nullptr || sessions.CountEnded(name) == 0) return;
    std::vector<Hold> left;
    for (const Hold& hold : key_state_.lock->holds(Lock::Order::kByOwner)) {
      if (!sessions.HasEnded(name, hold.owner) || !hold.LiveAt(now)) {
        left.push_back(hold);
      } else if (hold.linger > Millis{0}) {
        left.push_back(AfterSession(hold, now));
      }
    }
    if (!left.empty()) lock_.reset(Lock::Make(key_state_.lock->mode(), left));
    key_state_.lock = lock_.get();
  }

  const KeyState& state() const { return key_state_; }

 private:
  KeyState key_state_;
  std::unique_ptr<Lock> lock_;
};

// The largest number of holders and of waiters that LOCK.INFO lists: it is a fast command.
constexpr size_t kMostShown = 100;

// The time until a plain lock ends, if it does.
std::optional<Millis> LeaseLeft(const PlainLock& plain, Instant now) {
  return plain.end.has_value() ? std::optional<Millis>(*plain.end - now) : std::nullopt;
}

std::optional<std::string> TagOf(std::string_view tag) {
  return tag.empty() ? std::nullopt : std::optional<std::string>(tag);
}

// A call that is notified has a connection only if it ends with it.
std::optional<uint64_t> ConnectionOf(const WaitQueue::Waiter& waiter) {
  const uint64_t connection = waiter.client_id();
  return connection == 0 ? std::nullopt : std::optional(connection);
}

Mode ShownMode(const KeyState& key_state, const WaitQueue::LockQueue* lock_queue, bool held) {
  return held ? ModeOf(key_state) : lock_queue->first()->waiter().request().mode;
}

}  // namespace

std::optional<std::optional<LockInfo>> Engine::Inspect(const KeyName& name, const Now& now) {
  const OpenKey key(state_.host, name, Access::kRead);
  if (key.wrong_type()) return std::nullopt;
  const Instant moment = now.moment();
  const VisibleState visible(key, state_.sessions, moment);
  const KeyState& key_state = visible.state();
  const WaitQueue::LockQueue* lock_queue =
      state_.queue.empty() ? nullptr : state_.queue.Find(key.name());
  const bool held = CountHolders(key_state, moment) > 0;
  std::optional<LockInfo> result;
  if (!held && lock_queue == nullptr) return result;

  const Occupancy occupancy = OccupancyOf(key_state, moment);
  LockInfo& info = result.emplace();
  info.mode = ShownMode(key_state, lock_queue, held);
  info.is_plain = held && key_state.plain.has_value();
  info.holding = occupancy.live;
  info.linger_left = occupancy.linger_left;
  info.grace_left = state_.tokens.GraceLeft(moment);
  if (info.is_plain) {
    info.holders.push_back({.owner = std::string(key_state.plain->value),
                            .lease_left = LeaseLeft(*key_state.plain, moment)});
  } else if (held) {
    for (const Hold& hold : key_state.lock->holds(Lock::Order::kByToken)) {
      if (info.holders.size() == kMostShown) break;
      if (!hold.LiveAt(moment)) continue;
      info.holders.push_back({.owner = std::string(hold.owner.bytes),
                              .token = hold.token,
                              .lease_left = hold.end - moment,
                              .held = std::max(moment - hold.since, Millis{0}),
                              .count = hold.count,
                              .linger = hold.linger,
                              .session = state_.sessions.BoundTo(key.name(), hold.owner),
                              .weight = hold.weight,
                              .tag = TagOf(hold.tag)});
      if (hold.cap.has_value()) {
        info.holders.back().max_hold_left = std::max(*hold.cap - moment, Millis{0});
      }
    }
  }
  if (lock_queue == nullptr) return result;
  info.waiting = lock_queue->size();
  const Tick tick = now.tick();
  for (const auto* entry = lock_queue->first();
       entry != nullptr && info.waiters.size() < kMostShown; entry = entry->behind()) {
    const WaitQueue::Waiter& waiter = entry->waiter();
    info.waiters.push_back({.owner = std::string(waiter.request().owner.bytes),
                            .mode = waiter.request().mode,
                            .waited = tick - waiter.since(),
                            .left = std::max(waiter.deadline() - tick, Millis{0}),
                            .connection = ConnectionOf(waiter),
                            .tag = TagOf(waiter.request().tag)});
  }
  return result;
}

std::optional<LockSummary> Engine::Summarize(const KeyName& name, const Now& now, Budget& budget) {
  constexpr size_t kTell = 5;           // ten fields
  constexpr size_t kHoldsPerUnit = 20;  // each hold is visited
  const OpenKey key(state_.host, name, Access::kRead);
  if (key.wrong_type()) return std::nullopt;
  const Instant moment = now.moment();
  const VisibleState visible(key, state_.sessions, moment);
  const KeyState& key_state = visible.state();
  const WaitQueue::LockQueue* lock_queue =
      state_.queue.empty() ? nullptr : state_.queue.Find(key.name());
  const bool held = CountHolders(key_state, moment) > 0;
  if (!held && lock_queue == nullptr) return std::nullopt;

  budget.Spend(kTell + (key_state.lock == nullptr ? 0 : key_state.lock->size() / kHoldsPerUnit));
  const Occupancy occupancy = OccupancyOf(key_state, moment);
  LockSummary summary{.key = std::string(key.name().key),
                      .mode = ShownMode(key_state, lock_queue, held),
                      .is_plain = held && key_state.plain.has_value(),
                      .holding = occupancy.live,
                      .linger_left = occupancy.linger_left};
  if (const std::optional<Hold> hold = CurrentHold(key_state, moment); hold.has_value()) {
    summary.owner = hold->owner.bytes;
    summary.tag = TagOf(hold->tag);
    summary.token = hold->token;
    summary.held = std::max(moment - hold->since, Millis{0});
    summary.lease_left = hold->end - moment;
  } else if (summary.is_plain) {
    if (key_state.plain->value.size() <= kMaxOwnerBytes) summary.owner = key_state.plain->value;
    summary.lease_left = LeaseLeft(*key_state.plain, moment);
  }
  if (lock_queue != nullptr) {
    summary.waiting = lock_queue->size();
    summary.longest_wait = now.tick() - lock_queue->waiting_since();
  }
  return summary;
}

std::vector<std::string> Engine::LongestQueues(int db, size_t most) const {
  std::vector<std::string> names;
  for (const WaitQueue::LockQueue* lock_queue : state_.queue.LongestQueues(db, most)) {
    names.emplace_back(lock_queue->lock().key);
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
  writer_.ApplyReplicated(key, HoldReleased{owner});
  state_.host.ReplicateVerbatim();
}

void Engine::ApplyFact(const KeyName& name, const HoldSetFact& fact) {
  OpenKey key(state_.host, name, Access::kWrite);
  writer_.ApplyReplicated(key, fact.held);
  state_.host.ReplicateVerbatim();
}

void Engine::ApplyFact(const KeyName& name, const Fact& fact) {
  if (const auto* floor = std::get_if<FloorFact>(&fact)) {
    state_.tokens.Observe(floor->token);
  } else {
    OpenKey key(state_.host, name, Access::kWrite);
    if (const auto* ended = std::get_if<HoldEndedFact>(&fact)) {
      writer_.ApplyReplicated(key, ended->ended);
    } else if (const auto* expired = std::get_if<HoldsExpiredFact>(&fact)) {
      writer_.ApplyReplicated(key, expired->expired);
    } else if (const auto* session = std::get_if<SessionsEndedFact>(&fact)) {
      writer_.ApplyReplicated(key, session->ended());
    }
  }
  state_.host.ReplicateVerbatim();
}

// --- What happened in the server ----------------------------------------------------------------

void Engine::OnKeyRenamed(LockName old_name) {
  state_.reporter.OnRenamed(old_name);
  lock_arrives_ = writer_.WasLastRemoved(old_name.key);
}

void Engine::OnKeyArrived(std::string_view key) {
  if (std::exchange(lock_arrives_, false)) state_.names.Add(key);
}

void Engine::OnTtlChanged(std::string_view key) {
  if (!MayBeLock(key)) return;
  if (!keys_with_foreign_ttl_.contains(key)) keys_with_foreign_ttl_.emplace(key);
  state_.host.RunSoon();
}

void Engine::OnLockLoaded(LockName name, std::optional<Token> token) {
  if (name.db >= 0) state_.databases.Add(name.db);
  state_.names.Add(name.key);
  if (token.has_value()) state_.tokens.Observe(*token);
}

// Visits keys until it has found as many locks as there are, because nothing else records which
// keys are locks and how many holders each has. That takes a fraction of the time in which the
// server frees the keys. Rejected: a table of all locks, which would make each of them larger and
// slower.
void Engine::OnFlushing(std::optional<int> db, Instant now) {
  if (!state_.channels.empty()) {
    state_.channels.OnFlushed(db, now);
    state_.host.RunSoon();
  }
  if (CountLocks() == 0) return;
  const bool counts = state_.host.role() == Role::kPrimary;
  size_t left = state_.host.StoredLocks();
  for (const int each : state_.databases.all()) {
    if (db.has_value() && each != *db) continue;
    if (left == 0) break;
    state_.host.VisitLocks(each, [&](LockName name, const Lock& lock) {
      state_.reporter.OnFlushed(name, lock, counts, now);
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
  state_.channels.SwapDatabases(first, second);
  state_.queue.WakeAll(first);
  state_.queue.WakeAll(second);
}

void Engine::OnStarted(FineInstant now) {
  state_.tokens.ProcessStarted(now);
  must_start_ = true;
  state_.host.RunSoon();
}

void Engine::OnPromoted() {
  waiting_.OnPromoted();
  must_start_ = true;
  state_.host.RunSoon();
}

void Engine::OnCopy(FineInstant now) {
  state_.tokens.ReplicateFloorSoon(now);
  if (has_tasks()) state_.host.RunSoon();
}

void Engine::OnDemoted() {
  must_start_ = false;
  state_.tokens.StopIssuing();
  keys_with_foreign_ttl_.clear();
  waiting_.OnDemoted();
  // These holds are ordinary ones now.
  state_.sessions.UnbindAll(std::nullopt);
  state_.channels.Clear();
  if (waiting_.has_ended()) state_.host.WakeEventLoop();
}

void Engine::OnDisconnected(uint64_t connection) {
  state_.sessions.Close(connection);
  const bool ends_waits = waiting_.OnDisconnected(connection);
  if (ends_waits || state_.sessions.has_ended()) state_.host.WakeEventLoop();
}

void Engine::OnUnblocked(WaitingCall& call, bool timed_out, Tick now) {
  waiting_.OnUnblocked(call, timed_out, now);
  if (waiting_.NextDue() == Due::AtOnce()) state_.host.WakeEventLoop();
}

// --- Work that no command carries ---------------------------------------------------------------

bool Engine::has_tasks() const {
  return must_start_ || state_.tokens.has_floor_to_replicate() || !keys_with_foreign_ttl_.empty() ||
         state_.sessions.has_ended();
}

bool Engine::is_idle() const {
  return !has_tasks() && !state_.reporter.has_pending() && waiting_.empty() &&
         waiting_.NextDue().is_never() && !state_.channels.has_unpublished() &&
         !state_.channels.IsDueEarlier();
}

Due Engine::RunDueWork(const Now& now, Budget budget) {
  if (!TURNSTILE_CHECK(!running_)) return Due::AtOnce();
  running_ = true;
  // How soon a write that is not allowed now is tried again.
  constexpr Millis kRetryAfter{10};
  const Instant moment = now.moment();
  if (must_start_ && state_.host.role() == Role::kReplica) must_start_ = false;
  const bool has_work = has_tasks() || waiting_.NextDue().IsDueAt(moment) ||
                        state_.queue.FirstTimedOut(now.tick()) != nullptr ||
                        state_.channels.has_unpublished();
  const bool may_write = has_work && state_.host.MayWrite();
  if (may_write) {
    must_start_ = false;
    state_.tokens.Issuing(now.wall);
  }
  const Host::SlotRefresh slots = state_.host.RefreshSlots(now.wall);
  if (slots.may_be_lost) waiting_.LookForLostSlots();
  waiting_.EndWaitsForLostSlots(*budget.Half());
  // What was lost is published before what is granted because of that, unless there is very much of
  // it: half of what is left goes to each, so that messages do not keep free locks from waiters.
  state_.channels.Publish(state_.host, moment, may_write, *budget.Half());
  waiting_.TimeOut(now.tick(), *budget.Half());
  if (may_write) RunTasks(now, budget);
  state_.channels.Publish(state_.host, moment, may_write, budget);
  waiting_.AnswerEnded(budget);

  const bool budget_spent = !keys_with_foreign_ttl_.empty() || state_.sessions.has_ended();
  Due next = waiting_.NextDue();
  if (budget_spent) next = Due::AtOnce();
  if (has_work && !may_write) next = Due::At(moment + kRetryAfter);
  if (waiting_.has_ended()) next = Due::AtOnce();  // which needs no write
  next = Earlier(next, slots.next);
  next = Earlier(next, state_.channels.NextDue());
  if (const auto time_out = state_.queue.NextTimeOut(); time_out.has_value()) {
    next = Earlier(next, Due::At(moment + (*time_out - now.tick())));
  }
  running_ = false;
  return next;
}

// The writes of this server outside commands. Requires that it may write.
void Engine::RunTasks(const Now& now, Budget& budget) {
  const Instant moment = now.moment();
  if (state_.tokens.has_floor_to_replicate() && state_.host.MayReplicateFloor()) {
    const std::optional<Token> floor = state_.tokens.TakeFloorToReplicate(now.wall);
    // Where nobody consumes it, it would only count as a change, and lead to the next save.
    if (floor.has_value() && state_.host.HasReplicationConsumers(moment)) {
      state_.host.ReplicateFloor(*floor);
    }
  }
  RestoreTtls(moment, budget);
  if (waiting_.has_undelivered()) waiting_.TakeBackUndelivered(moment, budget);
  // All of these before any waiter is tried, so that no hold of a closed connection is left.
  if (state_.sessions.has_ended()) writer_.EndClosedSessions(moment, budget);
  state_.channels.Publish(state_.host, moment, /*may_look=*/true, *budget.Half());
  waiting_.GrantWaiters(now, budget);
}

// The leases in the value decide; the TTL of the key only follows them. It is not certain in which
// database the key was changed (see OnKeyChanged), but few databases contain locks.
void Engine::RestoreTtl(LockName name, Instant now) {
  OpenKey key(state_.host, {.lock = name}, Access::kInspect);
  const Lock* lock = key.lock();
  if (lock == nullptr || state_.host.ExpiryOf(key.content()) == lock->blocks_until()) return;
  const HoldSet last{lock->mode(), lock->last(Lock::Order::kByBlocksUntil)};
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
