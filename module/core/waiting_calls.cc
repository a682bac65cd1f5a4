#include "core/waiting_calls.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/views.h"

namespace turnstile {

bool UnconfirmedGrant::IsFor(LockName lock, Owner to, Token under) const {
  return token == under && db == lock.db && owner == to.bytes &&
         std::find(keys.begin(), keys.end(), lock.key) != keys.end();
}

WaitingCall::WaitingCall(const AcquireRequest& request, const Now& now, Host::ParkableCaller caller,
                         std::optional<uint64_t> session_connection)
    : Waiter(request, now.tick(), std::chrono::ceil<Millis>(now.steady + request.wait),
             caller.connection),
      session_(session_connection),
      user_(std::move(caller.user)) {}

void WaitingCalls::CountWait(const WaitingCall& call, Tick now) {
  state_.stats.wait_times.Add(now - call.since());
}

WaitersAhead WaitingCalls::AheadOfNewcomer(LockName lock, const KeyState& key_state,
                                           const AcquireRequest& request, Instant now) const {
  const WaitQueue::LockQueue* lock_queue = queue_.Find(lock);
  return lock_queue == nullptr ? WaitersAhead()
                               : lock_queue->Ahead(IsUpgrade(key_state, request, now), now);
}

void WaitingCalls::Block(WaitingCall& call, std::span<const LockView> views, Instant now) {
  const GrantRules rules = state_.RulesAt(now);
  for (size_t i = 0; i < views.size(); ++i) {
    if (!IsBlocked(views[i], call.request(), now, rules)) continue;
    queue_.Block(call, i, NextEnd(views[i].state, now));
    return;
  }
  awaits_grace_end_ = true;  // no lock blocks it: it is the grace
  queue_.Suspend(call);
}

std::vector<CycleStep> WaitingCalls::FindCycle(const WaitingCall& call,
                                               std::span<WaitQueue::Waiter* const> older_waits,
                                               Instant now) {
  // Holders whose connections have closed are removed on the way. If there are too many for one
  // command, there is no verdict.
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
    see(key.state());
  };
  std::vector<CycleStep> cycle = turnstile::FindCycle(queue_, call, older_waits, now, show);
  if (unsure) cycle.clear();
  return cycle;
}

ParkResult WaitingCalls::Park(const OpenKeys& keys, std::span<const LockView> views,
                              const AcquireRequest& request, std::optional<uint64_t> session,
                              Host::ParkableCaller caller, const Now& now) {
  using Kind = ParkResult::Kind;
  const Instant moment = now.moment();
  std::vector<LockName> locks;
  locks.reserve(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) locks.push_back(keys[i].name());
  const std::vector<WaitQueue::Waiter*> older_waits = queue_.FindWaiters(locks, request.owner);
  if (older_waits.empty()) {
    const size_t per_user = state_.settings.max_waiters_per_user;
    const auto of_user = waiting_by_user_.find(caller.user);
    if (per_user > 0 && of_user != waiting_by_user_.end() && of_user->second >= per_user) {
      return {Kind::kUserWaitLimit, per_user};
    }
    const size_t all = state_.settings.max_waiters;
    if (queue_.size() >= all) return {Kind::kWaitLimit, all};
  }

  auto call = std::make_unique<WaitingCall>(request, now, std::move(caller), session);
  WaitQueue::Waiter* older = nullptr;  // whose entries it takes over
  if (older_waits.size() == 1 && WaitQueue::WaitsFor(*older_waits.front(), locks, request.mode)) {
    older = older_waits.front();
    // Its queues wake, and what blocks it is found when it is tried. `views` do not show it: in
    // them the older call is ahead too, and its locks may be in another order.
    queue_.TakeOver(*call, *older);
  } else {
    const bool upgrade = keys.size() == 1 && IsUpgrade(keys[0].state(), request, moment);
    queue_.Enter(*call, locks, request.owner, upgrade);
    Block(*call, views, moment);
  }
  const auto withdraw = [&] {
    if (older == nullptr) {
      queue_.Leave(*call);
    } else {
      queue_.TakeOver(*older, *call);
    }
  };
  // At the end of the only queue there is, it blocks nobody: it holds no lock that is waited for.
  const bool blocks_nobody = older_waits.empty() && queue_.queues() == 1 && keys.size() == 1 &&
                             !IsUpgrade(keys[0].state(), request, moment);
  const std::vector<CycleStep> cycle =
      blocks_nobody ? std::vector<CycleStep>() : FindCycle(*call, older_waits, moment);
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
    if (keys[i].is_plain()) host_.ListenForStringWrites();
  }
  ++waiting_by_user_[call->user()];
  for (WaitQueue::Waiter* each : older_waits) EndWait(CallOf(*each), WaitEnd::kSuperseded);
  static_cast<void>(call.release());  // OnReplied destroys it
  ++state_.stats.waits;
  return {Kind::kWaits};
}

// Ends the wait. The caller is answered in RunDueWork.
void WaitingCalls::EndWait(WaitingCall& call, WaitAnswer answer) {
  if (call.is_queued()) queue_.Leave(call);
  call.answer_ = std::move(answer);
  call.has_ended_ = true;
  ended_.Append(call);
}

std::vector<bool> WaitingCalls::CancelWaits(std::span<const LockName> locks, Owner owner) {
  std::vector<bool> waited(locks.size());
  for (WaitQueue::Waiter* wait : queue_.FindWaiters(locks, owner)) {
    for (size_t i = 0; i < locks.size(); ++i) waited[i] = waited[i] || wait->WaitsFor(locks[i]);
    ++state_.stats.waits_cancelled;
    EndWait(CallOf(*wait), WaitEnd::kCancelled);
  }
  return waited;
}

void WaitingCalls::ConfirmGrants(LockName lock, Owner owner, Token token) {
  for (auto* grant = in_flight_.first(); grant != nullptr; grant = grant->link.after) {
    grant->confirmed |= grant->IsFor(lock, owner, token);
  }
  for (auto& grant : to_take_back_) grant->confirmed |= grant->IsFor(lock, owner, token);
}

Due WaitingCalls::NextDue() const {
  if (!ended_.empty() || has_undelivered()) return Due::AtOnce();
  if (!awaits_grace_end_ || queue_.empty()) return queue_.NextDue();
  const std::optional<Instant> end = state_.tokens.GraceEnd();
  return Earlier(queue_.NextDue(), end.has_value() ? Due::At(*end + Millis{1}) : Due::AtOnce());
}

// Removes the call from all state here. From now on only the host uses `call`.
void WaitingCalls::Unpark(WaitingCall& call) {
  if (call.is_queued()) queue_.Leave(call);
  if (std::exchange(call.has_ended_, false)) ended_.Remove(call);
  const auto of_user = waiting_by_user_.find(call.user());
  if (TURNSTILE_CHECK(of_user != waiting_by_user_.end()) && --of_user->second == 0) {
    waiting_by_user_.erase(of_user);
  }
  host_.Answer(call);
}

void WaitingCalls::AnswerWith(WaitingCall& call, WaitAnswer answer, WaitQueue::LeaveReason why) {
  call.answer_ = std::move(answer);
  if (call.is_queued()) queue_.Leave(call, why);
  Unpark(call);
}

// --- In RunDueWork ------------------------------------------------------------------------------

void WaitingCalls::TimeOut(Tick now, Budget& budget) {
  while (WaitingCall* call = ended_.first()) {
    if (budget.spent()) return;
    budget.Spend(2);
    Unpark(*call);
  }
  while (WaitQueue::Waiter* waiter = queue_.FirstTimedOut(now)) {
    if (budget.spent()) return;
    budget.Spend(2 + waiter->size() / 4);
    WaitingCall& call = CallOf(*waiter);
    ++state_.stats.wait_timeouts;
    CountWait(call, now);
    AnswerWith(call, std::monostate{});
  }
}

void WaitingCalls::EndWaitsForLostSlots() {
  for (WaitQueue::Waiter* waiter : queue_.Waiters()) {
    auto refusal = host_.SlotRefusal(waiter->lock(0));
    if (refusal.has_value()) EndWait(CallOf(*waiter), std::move(*refusal));
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
  if (awaits_grace_end_ && state_.tokens.GraceAt(moment) == Grace::kOver) {
    awaits_grace_end_ = false;
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

// Checks the lock that blocked the call last: nearly always it still does, and the other locks of
// the request, of which there may be many, need not be opened.
bool WaitingCalls::IsStillBlocked(WaitingCall& call, Instant now) {
  if (!call.blocked_at().has_value()) return false;
  const size_t index = *call.blocked_at();
  OpenKey key(host_, {.lock = call.lock(index)}, Access::kInspect);
  if (key.wrong_type()) return false;
  writer_.RemoveOverdue(key, now);
  const LockView view{key.state(), call.AheadOf(index)};
  if (key.is_plain()) host_.ListenForStringWrites();
  if (!IsBlocked(view, call.request(), now, state_.RulesAt(now))) return false;
  queue_.Block(call, index, NextEnd(view.state, now));
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
    AnswerWith(call, WaitEnd::kWrongType);
    return cost_of_try;
  }
  for (size_t i = 0; i < keys.size(); ++i) writer_.RemoveOverdue(keys[i], moment);

  const LockViews views(keys, [&](size_t index, const OpenKey& key, const KeyState& /*state*/) {
    if (key.is_plain()) host_.ListenForStringWrites();
    return call.AheadOf(index);
  });
  const TokenClock& clock = state_.tokens.Issuing(now.wall);
  const Admission admission =
      Decide(views.get(), call.request(), now.wall, clock, state_.RulesAt(moment));
  if (admission.busy()) {
    Block(call, views.get(), moment);
    return cost_of_try;
  }
  if (!admission.granted()) {
    AnswerWith(call, admission.outcome);
    return cost_of_try;
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    if (auto refusal = host_.GrantRefusal(call, keys[i].content()); refusal.has_value()) {
      AnswerWith(call, std::move(*refusal));
      return cost_of_grant;
    }
  }
  if (!TURNSTILE_CHECK(IsSafeGrant(views.get(), call.request(), admission, moment))) {
    AnswerWith(call, std::monostate{});
    return cost_of_grant;
  }
  Grant(call, keys, views.get(), admission, now);
  return cost_of_grant;
}

void WaitingCalls::Grant(WaitingCall& call, OpenKeys& keys, std::span<const LockView> views,
                         const Admission& admission, const Now& now) {
  const AcquireRequest& request = call.request();
  const Instant moment = now.moment();
  // A hold that the owner had already, which can happen after SWAPDB or RENAME, must not be taken
  // back.
  if (admission.is_new()) {
    call.grant_ = std::make_unique<UnconfirmedGrant>(
        UnconfirmedGrant{.db = call.lock(0).db,
                         .owner = std::string(request.owner.bytes),
                         .token = admission.token,
                         .upgraded = HoldToUpgrade(views.front().state, request, moment),
                         .bound_to = state_.sessions.BoundTo(call.lock(0), request.owner)});
    for (size_t i = 0; i < keys.size(); ++i) call.grant_->keys.emplace_back(call.lock(i).key);
    in_flight_.Append(*call.grant_);
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    writer_.ExecuteGrant(keys[i], request, admission.token, moment, call.session(), Via::kDeferred);
  }
  ++(admission.is_new() ? state_.stats.acquired_after_wait : state_.stats.reacquired);
  CountWait(call, now.tick());
  const bool alone = request.mode == Mode::kExclusive;
  AnswerWith(call, admission.token,
             alone ? WaitQueue::LeaveReason::kHoldsAlone : WaitQueue::LeaveReason::kGone);
}

void WaitingCalls::TakeBack(const UnconfirmedGrant& grant, Instant now) {
  const Owner owner{grant.owner};
  std::optional<Hold> upgraded = grant.upgraded;
  if (upgraded.has_value()) upgraded->owner = owner;
  for (const std::string& lock : grant.keys) {
    OpenKey key(host_, {.lock = {grant.db, lock}}, Access::kWrite);
    const Decision decision = DecideTakeBack(key.state(), owner, grant.token, upgraded, now);
    if (!decision.change.has_value()) continue;
    writer_.Execute(key, *decision.change, now, Via::kDeferred);
    const bool is_shared_again = std::holds_alternative<HoldSet>(*decision.change);
    if (!is_shared_again) continue;
    writer_.Bind(key.name(), owner, grant.bound_to);
    // Its connection may have closed meanwhile, and that will not be reported again.
    if (grant.bound_to.has_value() && !host_.IsConnected(*grant.bound_to)) {
      state_.sessions.Close(*grant.bound_to);
    }
  }
}

// --- Reports of the host ------------------------------------------------------------------------

void WaitingCalls::OnUnblocked(WaitingCall& call, bool timed_out, Tick now) {
  if (timed_out && !call.has_ended_) {
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
  // Grants that may yet turn out to be undelivered are not taken back either: from now on another
  // primary may inform the owner.
  for (auto* grant = in_flight_.first(); grant != nullptr; grant = grant->link.after) {
    grant->confirmed = true;
  }
  awaits_grace_end_ = false;
}

}  // namespace turnstile
