#include "core/waiting_calls.h"

#include <algorithm>
#include <utility>

#include "core/views.h"

namespace turnstile {

bool UnconfirmedGrant::IsFor(LockName lock, Owner to) const {
  return db == lock.db && owner == to.bytes &&
         std::find(keys.begin(), keys.end(), lock.key) != keys.end();
}

WaitingCall::WaitingCall(const AcquireRequest& request, const Now& now, uint64_t connection,
                         std::optional<uint64_t> session_connection, std::string user_name)
    : Waiter(request, now.tick(), std::chrono::ceil<Millis>(now.steady + request.wait), connection),
      session_(session_connection),
      user_(std::move(user_name)) {}

void WaitingCalls::CountWait(const WaitingCall& call, Tick now) {
  state_.stats.wait_times.Add(now - call.since());
}

Crowd WaitingCalls::AheadOfNewcomer(LockName lock, const Place& place,
                                    const AcquireRequest& request, Instant now) const {
  if (empty()) return {};
  const WaitQueue::Line* line = queue_.Find(lock);
  return line == nullptr ? Crowd() : line->Ahead(IsUpgrade(place, request, now), now);
}

void WaitingCalls::Block(WaitingCall& call, std::span<const Site> sites, Instant now) {
  const GrantRules rules = state_.RulesAt(now);
  for (size_t i = 0; i < sites.size(); ++i) {
    if (!IsBlocked(sites[i], call.request(), now, rules)) continue;
    queue_.Block(call, i, NextEnd(sites[i].place, now));
    return;
  }
  awaits_grace_ = true;  // No lock does: it is the grace.
  queue_.Suspend(call);
}

std::vector<CycleStep> WaitingCalls::FindCycle(const WaitingCall& call,
                                               std::span<WaitQueue::Waiter* const> olders,
                                               Instant now) {
  // Holders that have gone with their connections are taken out on the way. If they are too many
  // for one command, there is no verdict.
  constexpr size_t kStepsPerKey = 1'000;
  size_t crowded_keys = 10;
  bool unsure = false;
  const auto show = [&](LockName lock, const auto& see) {
    OpenKey key(host_, {.lock = lock}, Access::kInspect);
    if (state_.sessions.has_ended()) {
      if (crowded_keys == 0 || !writer_.EndClosedSessionsIn(key, now, kStepsPerKey)) {
        unsure = true;
      } else {
        --crowded_keys;
      }
    }
    see(key.place());
  };
  std::vector<CycleStep> cycle = turnstile::FindCycle(queue_, call, olders, now, show);
  if (unsure) cycle.clear();
  return cycle;
}

ParkResult WaitingCalls::Park(const OpenKeys& keys, std::span<const Site> sites,
                              const AcquireRequest& request, std::optional<uint64_t> session,
                              const Now& now) {
  using Kind = ParkResult::Kind;
  std::optional<std::string> user = host_.CallerUser();
  if (!user.has_value()) return {Kind::kNobody};  // who cannot wait
  const Instant moment = now.moment();
  std::vector<LockName> locks;
  locks.reserve(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) locks.push_back(keys[i].name());
  const std::vector<WaitQueue::Waiter*> olders = queue_.FindWaiters(locks, request.owner);
  if (olders.empty()) {
    const size_t per_user = state_.settings.max_waiters_per_user;
    const auto of_user = waiting_by_user_.find(*user);
    if (per_user > 0 && of_user != waiting_by_user_.end() && of_user->second >= per_user) {
      return {Kind::kUserWaitLimit, per_user};
    }
    const size_t all = state_.settings.max_waiters;
    if (queue_.size() >= all) return {Kind::kWaitLimit, all};
  }

  auto call = std::make_unique<WaitingCall>(request, now, host_.CallerConnection().value_or(0),
                                            session, std::move(*user));
  WaitQueue::Waiter* older = nullptr;  // whose place it takes over
  if (olders.size() == 1 && WaitQueue::WaitsFor(*olders.front(), locks, request.mode)) {
    older = olders.front();
    // Its lines wake: what blocks it is found out when it is tried. `sites` do not tell: to them
    // the older call, too, stands ahead, and its locks may come in another order.
    queue_.TakeOver(*call, *older);
  } else {
    const bool upgrade = keys.size() == 1 && IsUpgrade(keys[0].place(), request, moment);
    queue_.Enter(*call, locks, request.owner, upgrade);
    Block(*call, sites, moment);
  }
  const auto withdraw = [&] {
    if (older == nullptr) {
      queue_.Leave(*call);
    } else {
      queue_.TakeOver(*older, *call);
    }
  };
  const std::vector<CycleStep> cycle = FindCycle(*call, olders, moment);
  if (!cycle.empty()) {
    ParkResult result{Kind::kDeadlock};
    for (const auto& [owner, lock] : cycle) {  // views into the queue
      result.cycle.push_back({std::string(owner.bytes), lock.db, std::string(lock.key)});
    }
    withdraw();
    return result;
  }
  if (!host_.Park(*call)) {
    withdraw();
    return {Kind::kCannotWait};
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    if (keys[i].is_plain()) host_.WatchStrings();
  }
  ++waiting_by_user_[call->user()];
  for (WaitQueue::Waiter* each : olders) UnblockLater(CallOf(*each), WaitEnd::kSuperseded);
  static_cast<void>(call.release());  // OnReplied ends it
  ++state_.stats.waits;
  return {Kind::kWaits};
}

// The wait is over; its caller is answered in the one deferred place.
void WaitingCalls::UnblockLater(WaitingCall& call, WaitEnd why) {
  if (call.in_line()) queue_.Leave(call);
  call.answer_ = why;
  to_unblock_.push_back(&call);
}

std::vector<bool> WaitingCalls::CancelWaits(std::span<const LockName> locks, Owner owner) {
  std::vector<bool> waited(locks.size());
  for (WaitQueue::Waiter* wait : queue_.FindWaiters(locks, owner)) {
    for (size_t i = 0; i < locks.size(); ++i) waited[i] = waited[i] || wait->WaitsFor(locks[i]);
    ++state_.stats.waits_cancelled;
    UnblockLater(CallOf(*wait), WaitEnd::kCancelled);
  }
  return waited;
}

void WaitingCalls::ConfirmGrants(LockName lock, Owner owner) {
  for (auto* grant = in_flight_.first(); grant != nullptr; grant = grant->link.after) {
    grant->confirmed |= grant->IsFor(lock, owner);
  }
  for (auto& grant : to_take_back_) grant->confirmed |= grant->IsFor(lock, owner);
}

std::optional<Instant> WaitingCalls::NextDue() const {
  if (has_pending()) return kMinInstant;
  std::optional<Instant> due;
  if (const Instant next = queue_.NextDue(); next != kMaxInstant) due = next;
  if (awaits_grace_) {
    const std::optional<Instant> end = state_.tokens.GraceEnd();
    const Instant over = end.has_value() ? *end + Millis{1} : kMinInstant;
    due = std::min(due.value_or(over), over);
  }
  return due;
}

// Ends the wait. From here on only the host will see `call`.
void WaitingCalls::Unpark(WaitingCall& call) {
  if (call.in_line()) queue_.Leave(call);
  std::erase(to_unblock_, &call);  // if something else ends it first
  const auto of_user = waiting_by_user_.find(call.user());
  if (--of_user->second == 0) waiting_by_user_.erase(of_user);
  host_.Answer(call);
}

void WaitingCalls::Send(WaitingCall& call, WaitAnswer answer, WaitQueue::Left why) {
  call.answer_ = std::move(answer);
  if (call.in_line()) queue_.Leave(call, why);
  Unpark(call);
}

// --- In RunDueWork ------------------------------------------------------------------------------

void WaitingCalls::TimeOut(Tick now, Budget& budget) {
  for (WaitingCall* call : std::exchange(to_unblock_, {})) Unpark(*call);
  while (WaitQueue::Waiter* waiter = queue_.FirstTimedOut(now)) {
    if (budget.spent()) return;
    budget.Spend(2 + waiter->size() / 4);
    WaitingCall& call = CallOf(*waiter);
    ++state_.stats.wait_timeouts;
    CountWait(call, now);
    Send(call, std::monostate{});
  }
}

void WaitingCalls::EndWaits(const std::function<std::optional<std::string>(LockName)>& why) {
  for (WaitQueue::Waiter* waiter : queue_.Waiters()) {
    if (auto text = why(waiter->lock(0)); text.has_value()) Send(CallOf(*waiter), std::move(*text));
  }
}

void WaitingCalls::TakeBackUndelivered(Instant now, Budget& budget) {
  while (!to_take_back_.empty() && !budget.spent()) {
    const std::unique_ptr<UnconfirmedGrant> grant = std::move(to_take_back_.front());
    to_take_back_.pop_front();
    budget.Spend(10 * grant->keys.size());
    if (!grant->confirmed) TakeBack(*grant, now);
  }
}

void WaitingCalls::GrantWaiters(const Now& now, Budget& budget) {
  const Instant moment = now.moment();
  if (awaits_grace_ && state_.tokens.GraceAt(moment) == Grace::kOver) {
    awaits_grace_ = false;
    queue_.WakeAll(std::nullopt);
  }
  while (!budget.spent()) {
    WaitQueue::Waiter* waiter = queue_.NextToTry(moment);
    if (waiter == nullptr) return;
    WaitingCall& call = CallOf(*waiter);
    host_.BeforeGrant(call.lock(0), now.wall);
    const bool blocked = call.size() > 1 && IsStillBlocked(call, moment);
    budget.Spend(blocked ? 2 : TryGrant(call, now));
  }
}

// Looks at the lock that blocked it last: nearly always it still does, and the others of a set, of
// which there may be many, need not be opened.
bool WaitingCalls::IsStillBlocked(WaitingCall& call, Instant now) {
  if (!call.blocked_at().has_value()) return false;
  const size_t index = *call.blocked_at();
  OpenKey key(host_, {.lock = call.lock(index)}, Access::kInspect);
  if (key.wrong_type()) return false;
  writer_.RemoveOverdue(key, now);
  const Site site{key.place(), call.AheadOf(index)};
  if (key.is_plain()) host_.WatchStrings();
  if (!IsBlocked(site, call.request(), now, state_.RulesAt(now))) return false;
  queue_.Block(call, index, NextEnd(site.place, now));
  return true;
}

size_t WaitingCalls::TryGrant(WaitingCall& call, const Now& now) {
  const Instant moment = now.moment();
  const size_t cost_of_try = 2 * call.size();
  const size_t cost_of_grant = 10 + 6 * call.size();
  std::vector<KeyName> names;
  names.reserve(call.size());
  for (size_t i = 0; i < call.size(); ++i) names.push_back({.lock = call.lock(i)});
  OpenKeys keys(host_, names, Access::kInspect);
  if (keys.any_wrong_type()) {
    Send(call, WaitEnd::kWrongType);
    return cost_of_try;
  }
  for (size_t i = 0; i < keys.size(); ++i) writer_.RemoveOverdue(keys[i], moment);

  const Sites sites(keys, [&](size_t index, const OpenKey& key, const Place& /*place*/) {
    if (key.is_plain()) host_.WatchStrings();
    return call.AheadOf(index);
  });
  const TokenClock& clock = state_.tokens.Issuing(now.wall);
  const Admission admission =
      Decide(sites.get(), call.request(), now.wall, clock, state_.RulesAt(moment));
  if (admission.busy()) {
    Block(call, sites.get(), moment);
    return cost_of_try;
  }
  if (!admission.granted()) {
    Send(call, admission.outcome);
    return cost_of_try;
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    if (auto refusal = host_.GrantRefusal(call, keys[i].content()); refusal.has_value()) {
      Send(call, std::move(*refusal));
      return cost_of_grant;
    }
  }
  Grant(call, keys, sites.get(), admission, now);
  return cost_of_grant;
}

void WaitingCalls::Grant(WaitingCall& call, OpenKeys& keys, std::span<const Site> sites,
                         const Admission& admission, const Now& now) {
  const AcquireRequest& request = call.request();
  const Instant moment = now.moment();
  // A hold that the owner had already, which a SWAPDB or a RENAME can bring, is not ours to take
  // back.
  if (admission.is_new()) {
    call.grant_ = std::make_unique<UnconfirmedGrant>(
        UnconfirmedGrant{.db = call.lock(0).db,
                         .owner = std::string(request.owner.bytes),
                         .token = admission.token,
                         .upgraded = HoldToUpgrade(sites.front().place, request, moment),
                         .bound_to = state_.sessions.BoundTo(call.lock(0), request.owner)});
    for (size_t i = 0; i < keys.size(); ++i) call.grant_->keys.emplace_back(call.lock(i).key);
    in_flight_.Append(*call.grant_);
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    writer_.ExecuteGrant(keys[i], request, admission.token, moment, call.session(), Via::kDeferred);
  }
  ++state_.stats.acquired_after_wait;
  CountWait(call, now.tick());
  const bool alone = request.mode == Mode::kExclusive;
  Send(call, admission.token, alone ? WaitQueue::Left::kHoldsAlone : WaitQueue::Left::kGone);
}

void WaitingCalls::TakeBack(const UnconfirmedGrant& grant, Instant now) {
  const Owner owner{grant.owner};
  std::optional<Hold> upgraded = grant.upgraded;
  if (upgraded.has_value()) upgraded->owner = owner;
  for (const std::string& lock : grant.keys) {
    OpenKey key(host_, {.lock = {grant.db, lock}}, Access::kWrite);
    const Decision decision = DecideTakeBack(key.place(), owner, grant.token, upgraded, now);
    if (!decision.change.has_value()) continue;
    writer_.Execute(key, *decision.change, now, Via::kDeferred);
    const bool is_shared_again = std::holds_alternative<Held>(*decision.change);
    if (!is_shared_again) continue;
    writer_.Bind(key.name(), owner, grant.bound_to);
    // Its connection may have closed meanwhile, and nobody will tell again.
    if (grant.bound_to.has_value() && !host_.IsConnected(*grant.bound_to)) {
      state_.sessions.Close(*grant.bound_to);
    }
  }
}

// --- What the host tells ------------------------------------------------------------------------

void WaitingCalls::OnUnblocked(WaitingCall& call, bool timed_out, Tick now) {
  if (timed_out) {
    ++state_.stats.wait_timeouts;
    CountWait(call, now);
  }
  Unpark(call);
}

void WaitingCalls::OnReplied(WaitingCall* call, bool delivered) {
  const std::unique_ptr<WaitingCall> ends(call);
  if (call->grant_ == nullptr) return;
  in_flight_.Remove(*call->grant_);
  if (delivered || call->grant_->confirmed) return;
  to_take_back_.push_back(std::move(call->grant_));
  host_.WakeEventLoop();
}

void WaitingCalls::OnDemoted() {
  to_take_back_.clear();
  // Nor what may yet turn out not to have arrived: from here on another primary may tell the owner.
  for (auto* grant = in_flight_.first(); grant != nullptr; grant = grant->link.after) {
    grant->confirmed = true;
  }
  awaits_grace_ = false;
}

}  // namespace turnstile
