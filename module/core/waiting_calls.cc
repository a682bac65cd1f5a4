#include "core/waiting_calls.h"

#include <algorithm>
#include <utility>

#include "core/check.h"
#include "core/views.h"

namespace turnstile {
namespace {

// In units of the budget: one answer; and how many entries of a queue are passed in one unit.
constexpr size_t kCostOfAnswer = 4;
constexpr size_t kEntriesPerUnit = 50;
// How many bytes of a name are copied in one unit.
constexpr size_t kBytesPerUnit = 4096;

}  // namespace

bool UnconfirmedGrant::IsFor(LockName lock, Owner to, Token under) const {
  return token == under && db == lock.db && owner == to.bytes &&
         std::find(keys.begin(), keys.end(), lock.key) != keys.end();
}

WaitingCall::WaitingCall(const AcquireRequest& request, const Now& now, uint64_t connection,
                         const std::string& user)
    : Waiter(request, now.tick(), std::chrono::ceil<Millis>(now.steady + request.wait), connection),
      user_(&user) {}

WaitingCalls::~WaitingCalls() {
  while (WaitingCall* call = notified_.first()) {
    if (call->is_queued()) queue_.Leave(*call);
    RemoveNotified(*call);
  }
}

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
  const auto is_leaving = [&](const WaitQueue::Waiter& wait) {
    return IsOrphan(static_cast<const WaitingCall&>(wait)) ||
           std::find(older_waits.begin(), older_waits.end(), &wait) != older_waits.end();
  };
  std::vector<CycleStep> cycle = turnstile::FindCycle(queue_, call, is_leaving, now, show);
  if (unsure) cycle.clear();
  return cycle;
}

ParkResult WaitingCalls::Park(const OpenKeys& keys, std::span<const LockView> views,
                              const AcquireRequest& request, const Host::ParkableCaller& caller,
                              const Now& now) {
  using Kind = ParkResult::Kind;
  const Instant moment = now.moment();
  std::vector<LockName> locks;
  locks.reserve(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) locks.push_back(keys[i].name());
  const std::vector<WaitQueue::Waiter*> older_waits = queue_.FindWaiters(locks, request.owner);
  const bool takes_over = older_waits.size() == 1 && !IsOrphan(CallOf(*older_waits.front())) &&
                          WaitQueue::WaitsFor(*older_waits.front(), locks, request.mode);
  if (!takes_over && IsLineFull(locks, request, older_waits)) return {Kind::kLineFull};
  if (auto limit = FindLimit(request, locks.size(), caller.user, older_waits); limit.has_value()) {
    return *std::move(limit);
  }

  auto call =
      std::make_unique<WaitingCall>(request, now, caller.connection, CountUser(caller.user));
  WaitQueue::Waiter* older = nullptr;  // whose entries it takes over
  if (takes_over) {
    older = older_waits.front();
    RememberNames(CallOf(*older));
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
    UncountUser(call->user());
  };
  // At the end of the only queue there is, it blocks nobody: it holds no lock that is waited for.
  const bool blocks_nobody = older_waits.empty() && queue_.queues() == 1 && keys.size() == 1 &&
                             !IsUpgrade(keys[0].state(), request, moment);
  const std::vector<CycleStep> cycle =
      blocks_nobody ? std::vector<CycleStep>() : FindCycle(*call, older_waits, moment);
  if (!cycle.empty()) {
    ParkResult result{Kind::kDeadlock};
    for (const auto& [name, lock] : cycle) {  // views into the queue
      result.cycle.push_back({name, lock.db, std::string(lock.key)});
    }
    withdraw();
    return result;
  }
  if (request.notify.has_value()) {
    size_t first = 0;
    while (call->lock(first) != locks.front()) ++first;
    AddNotified(*call, first);
  } else if (host_.Park(*call)) {
    blocked_.Append(*call);
  } else {
    withdraw();
    return {Kind::kCannotWait};
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    if (keys[i].is_plain()) host_.ListenForStringWrites();
  }
  for (WaitQueue::Waiter* each : older_waits) EndWait(CallOf(*each), WaitEnd::kSuperseded);
  static_cast<void>(call.release());  // Unpark or OnReplied destroys it
  ++state_.stats.waits;
  return {Kind::kWaits};
}

// The calls of the owner itself do not count: they would end.
bool WaitingCalls::IsLineFull(std::span<const LockName> locks, const AcquireRequest& request,
                              std::span<WaitQueue::Waiter* const> older_waits) const {
  if (request.max_line == 0) return false;
  return std::any_of(locks.begin(), locks.end(), [&](LockName lock) {
    const WaitQueue::LockQueue* lock_queue = queue_.Find(lock);
    if (lock_queue == nullptr) return false;
    const auto own = std::count_if(
        older_waits.begin(), older_waits.end(),
        [lock_queue](const WaitQueue::Waiter* wait) { return wait->IsIn(*lock_queue); });
    return lock_queue->size() - static_cast<size_t>(own) >= request.max_line;
  });
}

std::optional<ParkResult> WaitingCalls::FindLimit(
    const AcquireRequest& request, size_t places, const std::string& user,
    std::span<WaitQueue::Waiter* const> older_waits) const {
  using Kind = ParkResult::Kind;
  const Settings& settings = state_.settings;
  // What it replaces.
  size_t blocked_before = 0;
  size_t places_before = 0;
  for (const WaitQueue::Waiter* wait : older_waits) {
    if (wait->request().notify.has_value()) {
      places_before += wait->size();
    } else {
      ++blocked_before;
    }
  }
  const size_t per_user = settings.max_waiters_per_user;
  const auto of_user = waiting_by_user_.find(user);
  const bool replaces_own =
      std::any_of(older_waits.begin(), older_waits.end(), [&](const WaitQueue::Waiter* wait) {
        return static_cast<const WaitingCall*>(wait)->user() == user;
      });
  if (!replaces_own && per_user > 0 && of_user != waiting_by_user_.end() &&
      of_user->second >= per_user) {
    return ParkResult{Kind::kUserWaitLimit, per_user};
  }
  // Each wait that has ended in this pass, and what this one replaces, takes memory as a place does
  // until its end is published.
  if ((request.notify.has_value() || places_before > 0) &&
      ended_places_ + places_before > settings.max_queued) {
    return ParkResult{Kind::kQueueLimit, settings.max_queued};
  }
  if (request.notify.has_value()) {
    if (places > places_before && places_ - places_before + places > settings.max_queued) {
      return ParkResult{Kind::kQueueLimit, settings.max_queued};
    }
  } else if (blocked_before == 0 && blocked() >= settings.max_waiters) {
    return ParkResult{Kind::kWaitLimit, settings.max_waiters};
  }
  return std::nullopt;
}

const std::string& WaitingCalls::CountUser(const std::string& user) {
  auto& [name, count] = *waiting_by_user_.try_emplace(user).first;
  ++count;
  return name;
}

void WaitingCalls::UncountUser(const std::string& user) {
  const auto of_user = waiting_by_user_.find(user);
  if (TURNSTILE_CHECK(of_user != waiting_by_user_.end()) && --of_user->second == 0) {
    waiting_by_user_.erase(of_user);
  }
}

void WaitingCalls::AddNotified(WaitingCall& call, size_t first) {
  call.first_ = first & 0x7f;  // at most kMaxAlso
  call.term_ = term_;
  call.places_ = static_cast<uint8_t>(call.size());
  places_ += call.places_;
  notified_.Append(call);
  if (call.session().has_value()) {
    of_connections_[*call.session()].Append(call);
    host_.WatchConnections();
  }
  host_.WatchKeys();
  host_.RunSoon();
}

void WaitingCalls::RemoveOfKind(WaitingCall& call) {
  WaitingCall*& next = call.is_notified() ? next_notified_to_look_at_ : next_blocked_to_look_at_;
  if (next == &call) next = call.of_kind_.after;
  (call.is_notified() ? notified_ : blocked_).Remove(call);
}

// Destroys the call.
void WaitingCalls::RemoveNotified(WaitingCall& call) {
  const std::unique_ptr<WaitingCall> ends(&call);
  UncountUser(call.user());
  if (call.has_ended_ != 0) {
    ended_.Remove(call);
    ended_places_ -= call.places_;
  } else {
    places_ -= call.places_;
  }
  RemoveOfKind(call);
  if (!call.session().has_value()) return;
  const auto of_connection = of_connections_.find(*call.session());
  if (!TURNSTILE_CHECK(of_connection != of_connections_.end())) return;
  of_connection->second.Remove(call);
  if (of_connection->second.empty()) of_connections_.erase(of_connection);
}

Delivery WaitingCalls::Publish(const WaitingCall& call, WaitAnswer answer, std::string_view key) {
  return host_.Publish(
      {.to = *call.request().notify, .user = call.user(), .key = key, .what = std::move(answer)});
}

void WaitingCalls::RememberNames(WaitingCall& call) {
  if (!call.is_notified()) return;
  call.ending().key = call.lock(call.first_).key;
  call.ending().owner = call.request().owner.bytes;
}

void WaitingCalls::Leave(WaitingCall& call, WaitQueue::LeaveReason why) {
  if (!call.is_queued()) return;
  RememberNames(call);
  queue_.Leave(call, why);
}

// Ends the wait. The caller is answered in RunDueWork.
void WaitingCalls::EndWait(WaitingCall& call, WaitAnswer answer) {
  Leave(call);
  call.ending().answer = std::move(answer);
  call.has_ended_ = 1;
  ended_.Append(call);
  places_ -= call.places_;
  ended_places_ += call.places_;
}

std::vector<bool> WaitingCalls::CancelWaits(std::span<const LockName> locks, Owner owner) {
  std::vector<bool> waited(locks.size());
  const std::vector<WaitQueue::Waiter*> waits = queue_.FindWaiters(locks, owner);
  for (size_t i = 0; i < locks.size() && !waits.empty(); ++i) {
    const WaitQueue::LockQueue* lock_queue = queue_.Find(locks[i]);
    waited[i] = lock_queue != nullptr && std::any_of(waits.begin(), waits.end(),
                                                     [lock_queue](const WaitQueue::Waiter* wait) {
                                                       return wait->IsIn(*lock_queue);
                                                     });
  }
  for (WaitQueue::Waiter* wait : waits) {
    ++state_.stats.waits_cancelled;
    EndWait(CallOf(*wait), WaitEnd::kCancelled);
  }
  return waited;
}

// The earlier call has ended in this pass of the event loop, shortly before: it is among the last.
// A request can supersede as many calls as it has keys.
void WaitingCalls::Retract(Owner owner, const NotifyTarget& target) {
  constexpr int kMostLookedAt = 128;
  WaitingCall* call = ended_.last();
  for (int looked_at = 0; call != nullptr && looked_at < kMostLookedAt; ++looked_at) {
    WaitingCall* const before = call->link_.before;
    if (call->request().notify == target && call->ending().owner == owner.bytes) {
      RemoveNotified(*call);
    }
    call = before;
  }
}

void WaitingCalls::ConfirmGrants(LockName lock, Owner owner, Token token) {
  for (auto* grant = in_flight_.first(); grant != nullptr; grant = grant->link.after) {
    grant->confirmed |= grant->IsFor(lock, owner, token);
  }
  for (auto& grant : to_take_back_) grant->confirmed |= grant->IsFor(lock, owner, token);
}

Due WaitingCalls::NextDue() const {
  if (has_ended() || has_undelivered()) return Due::AtOnce();
  if (!awaits_grace_end_ || queue_.empty()) return queue_.NextDue();
  const std::optional<Instant> end = state_.tokens.GraceEnd();
  return Earlier(queue_.NextDue(), end.has_value() ? Due::At(*end + Millis{1}) : Due::AtOnce());
}

// Removes the call from all state here and answers it. From now on only the host uses `call`, or
// nobody.
size_t WaitingCalls::Unpark(WaitingCall& call) {
  Leave(call);
  if (!call.is_notified()) {
    if (call.has_ended_ != 0) ended_.Remove(call);
    call.has_ended_ = 0;
    UncountUser(call.user());
    RemoveOfKind(call);
    call.ending();
    host_.Answer(call);
    return 0;
  }
  // A grant was published before it was carried out.
  auto& [answer, key, owner, grant] = call.ending();
  size_t cost = (key.size() + owner.size()) / kBytesPerUnit;
  if (!std::holds_alternative<Token>(answer)) cost += Publish(call, std::move(answer), key).cost;
  RemoveNotified(call);
  return cost;
}

size_t WaitingCalls::AnswerWith(WaitingCall& call, WaitAnswer answer, WaitQueue::LeaveReason why) {
  call.ending().answer = std::move(answer);
  Leave(call, why);
  return Unpark(call);
}

bool WaitingCalls::IsOrphan(const WaitingCall& call) const {
  if (!call.is_notified()) return false;
  return call.term_ != term_ ||
         (!closed_.empty() && call.request().session && closed_.contains(call.client_id()));
}

// --- In RunDueWork ------------------------------------------------------------------------------

void WaitingCalls::EndOrphans(Budget& budget) {
  while (HasFormerTerm() && !budget.spent()) {
    budget.Spend(EndOrphan(*notified_.first()));
  }
  while (!closed_.empty() && !budget.spent()) {
    const auto of_connection = of_connections_.find(*closed_.begin());
    if (of_connection == of_connections_.end()) {
      closed_.erase(closed_.begin());
      continue;
    }
    budget.Spend(EndOrphan(*of_connection->second.first()));
  }
}

size_t WaitingCalls::EndOrphan(WaitingCall& call) {
  const size_t cost = kCostOfAnswer + call.size() / 4;
  return cost + AnswerWith(call, call.term_ != term_ ? WaitEnd::kDemoted : WaitEnd::kDisconnected);
}

void WaitingCalls::AnswerEnded(Budget& budget) {
  EndOrphans(budget);
  while (WaitingCall* call = ended_.first()) {
    if (budget.spent()) return;
    budget.Spend(kCostOfAnswer);
    budget.Spend(Unpark(*call));
  }
}

void WaitingCalls::TimeOut(Tick now, Budget& budget) {
  AnswerEnded(*budget.Half());
  while (WaitQueue::Waiter* waiter = queue_.FirstTimedOut(now)) {
    if (budget.spent()) return;
    budget.Spend(kCostOfAnswer + waiter->size() / 4);
    WaitingCall& call = CallOf(*waiter);
    ++state_.stats.wait_timeouts;
    CountWait(call, now);
    budget.Spend(AnswerWith(call, std::monostate{}));
  }
}

void WaitingCalls::LookForLostSlots() {
  next_blocked_to_look_at_ = blocked_.first();
  next_notified_to_look_at_ = notified_.first();
}

void WaitingCalls::EndWaitsForLostSlots(Budget& budget) {
  constexpr size_t kLooksPerUnit = 4;
  size_t looks = 0;
  for (WaitingCall** next : {&next_blocked_to_look_at_, &next_notified_to_look_at_}) {
    while (*next != nullptr && !budget.spent()) {
      WaitingCall& call = **next;
      *next = call.of_kind_.after;
      if (++looks % kLooksPerUnit == 0) budget.Spend(1);
      if (!call.is_queued()) continue;
      auto refusal = host_.SlotRefusal(call.lock(0));
      if (!refusal.has_value()) continue;
      budget.Spend(kCostOfAnswer / 2 + call.size());
      EndWait(call, std::move(*refusal));
    }
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
  // All locks whose time has come wake before anybody is tried, so that arrival decides.
  constexpr size_t kWakesPerUnit = 2;
  while (!budget.spent() && queue_.WakeDue(moment, kWakesPerUnit) > 0) budget.Spend(1);
  while (!budget.spent()) {
    WaitQueue::Waiter* waiter = queue_.NextToTry(moment);
    if (waiter == nullptr) return;
    WaitingCall& call = CallOf(*waiter);
    if (IsOrphan(call)) {  // one of so many that this pass did not end them all
      budget.Spend(EndOrphan(call));
      continue;
    }
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
  size_t cost_of_try = 2 * call.size();
  const size_t cost_of_grant = 10 + 6 * call.size();
  std::vector<KeyName> names;
  names.reserve(call.size());
  for (size_t i = 0; i < call.size(); ++i) names.push_back({.lock = call.lock(i)});
  OpenKeys keys(host_, names, Access::kInspect);
  if (keys.any_wrong_type()) {
    return cost_of_try + AnswerWith(call, WaitEnd::kWrongType);
  }
  for (size_t i = 0; i < keys.size(); ++i) writer_.RemoveOverdue(keys[i], moment);

  const LockViews views(keys, [&](size_t index, const OpenKey& key, const KeyState& /*state*/) {
    if (key.is_plain()) host_.ListenForStringWrites();
    const WaitersAhead ahead = call.AheadOf(index);
    cost_of_try += ahead.size / kEntriesPerUnit;
    return ahead;
  });
  const TokenClock& clock = state_.tokens.Issuing(now.wall);
  const Admission admission =
      Decide(views.get(), call.request(), now.wall, clock, state_.RulesAt(moment));
  if (admission.busy()) {
    Block(call, views.get(), moment);
    return cost_of_try;
  }
  if (!admission.granted()) return cost_of_try + AnswerWith(call, admission.outcome);
  for (size_t i = 0; i < keys.size(); ++i) {
    if (auto refusal = host_.GrantRefusal(call, keys[i].content()); refusal.has_value()) {
      return cost_of_grant + AnswerWith(call, std::move(*refusal));
    }
  }
  if (!TURNSTILE_CHECK(IsSafeGrant(views.get(), call.request(), admission, moment))) {
    return cost_of_grant + AnswerWith(call, std::monostate{});
  }
  size_t cost_of_message = 0;
  if (call.is_notified()) {
    const Delivery delivery = Publish(call, admission.token, call.lock(call.first_).key);
    cost_of_message = delivery.cost;
    if (delivery.receivers == 0) {
      ++state_.stats.undelivered;
      return cost_of_grant + cost_of_message + AnswerWith(call, admission.token);
    }
  }
  Grant(call, keys, views.get(), admission, now);
  return cost_of_grant + cost_of_message;
}

void WaitingCalls::Grant(WaitingCall& call, OpenKeys& keys, std::span<const LockView> views,
                         const Admission& admission, const Now& now) {
  const AcquireRequest& request = call.request();
  const Instant moment = now.moment();
  // A hold that the owner had already, which can happen after SWAPDB or RENAME, must not be taken
  // back.
  if (admission.is_new() && !call.is_notified()) {
    auto& grant = call.ending().grant;
    grant = std::make_unique<UnconfirmedGrant>(
        UnconfirmedGrant{.db = call.lock(0).db,
                         .owner = std::string(request.owner.bytes),
                         .token = admission.token,
                         .upgraded = HoldToUpgrade(views.front().state, request, moment),
                         .bound_to = state_.sessions.BoundTo(call.lock(0), request.owner)});
    if (grant->upgraded.has_value()) grant->tag = grant->upgraded->tag;
    for (size_t i = 0; i < keys.size(); ++i) grant->keys.emplace_back(call.lock(i).key);
    in_flight_.Append(*grant);
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    writer_.ExecuteGrant(keys[i], request, admission.token, moment, call.session(), call.user(),
                         Via::kDeferred);
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
  if (upgraded.has_value()) {
    upgraded->owner = owner;
    upgraded->tag = grant.tag;
  }
  for (const std::string& lock : grant.keys) {
    OpenKey key(host_, {.lock = {grant.db, lock}}, Access::kWrite);
    const Decision decision = DecideTakeBack(key.state(), owner, grant.token, upgraded, now);
    if (!decision.change.has_value()) continue;
    writer_.Execute(key, *decision.change, now, Via::kDeferred);
    const bool is_shared_again = std::holds_alternative<HoldSet>(*decision.change);
    if (!is_shared_again) continue;
    writer_.BindSession(key.name(), owner, grant.bound_to);
    // Its connection may have closed meanwhile, and that will not be reported again.
    if (grant.bound_to.has_value() && !host_.IsConnected(*grant.bound_to)) {
      state_.sessions.Close(*grant.bound_to);
    }
  }
}

// --- Reports of the host ------------------------------------------------------------------------

void WaitingCalls::OnUnblocked(WaitingCall& call, bool timed_out, Tick now) {
  if (timed_out && call.has_ended_ == 0) {
    ++state_.stats.wait_timeouts;
    CountWait(call, now);
  }
  Unpark(call);
}

void WaitingCalls::OnReplied(WaitingCall* call, bool delivered) {
  const std::unique_ptr<WaitingCall> ends(call);
  std::unique_ptr<UnconfirmedGrant>& grant = call->ending().grant;
  if (grant == nullptr) return;
  in_flight_.Remove(*grant);
  if (delivered || grant->confirmed) return;
  to_take_back_.push_back(std::move(grant));
  host_.WakeEventLoop();
}

bool WaitingCalls::OnDisconnected(uint64_t connection) {
  if (!of_connections_.contains(connection)) return false;
  closed_.insert(connection);
  return true;
}

void WaitingCalls::OnDemoted() {
  ++term_;
  to_take_back_.clear();
  // Grants that may yet turn out to be undelivered are not taken back either: from now on another
  // primary may inform the owner.
  for (auto* grant = in_flight_.first(); grant != nullptr; grant = grant->link.after) {
    grant->confirmed = true;
  }
  awaits_grace_end_ = false;
}

}  // namespace turnstile
