#include "redis/waiters.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "redis/command_table.h"
#include "redis/config.h"
#include "redis/deferred.h"
#include "redis/effects.h"
#include "redis/events.h"
#include "redis/replies.h"
#include "redis/server_sessions.h"
#include "redis/tokens.h"
#include "redis/user.h"

namespace turnstile {

bool Waiters::Grant::IsFor(LockName lock, Owner to) const {
  return db == lock.db && owner == to.bytes &&
         std::find(keys.begin(), keys.end(), lock.key) != keys.end();
}

// A blocked client. Lives from Park to OnFree.
struct Waiters::Parked : WaitQueue::Waiter {
  Parked(const AcquireRequest& request, FineTick now, uint64_t client_id,
         std::optional<uint64_t> session_client, RedisModuleString* user_name)
      : Waiter(request, ToTick(now), std::chrono::ceil<Millis>(now + request.wait), client_id),
        session(session_client),
        user(user_name) {}
  ~Parked() { RedisModule_FreeString(nullptr, user); }

  RedisModuleBlockedClient* client = nullptr;
  std::optional<uint64_t> session;  // the connection to bind the hold to
  RedisModuleString* user;
  Answer answer;
  std::unique_ptr<Grant> grant;
};

namespace {

// Why the server does not take a write to the key, as it would tell a client; nothing if it does.
std::optional<std::string> RefusalOfWrite(RedisModuleCtx* ctx, RedisModuleString* key,
                                          ClusterView& cluster) {
  // The probe below knows about memory only what was true at the last command.
  if ((RedisModule_GetContextFlags(ctx) & REDISMODULE_CTX_FLAGS_OOM) != 0) return kOutOfMemoryText;

  // S: as in a script, so min-replicas, disk errors and the role count. E: errors come as replies.
  errno = 0;
  RedisModuleCallReply* reply = RedisModule_Call(ctx, kProbeCommand, "SEs", key);
  // A call tells only that the key is not served here (EPERM), or that the cluster is down.
  const bool not_here = errno == EPERM;
  const bool down = errno == ENETDOWN || errno == EROFS;
  if (reply == nullptr) return kNotNowText;
  std::optional<std::string> refusal;
  if (RedisModule_CallReplyType(reply) == REDISMODULE_REPLY_ERROR) {
    size_t size = 0;
    const char* text = RedisModule_CallReplyStringPtr(reply, &size);
    refusal.emplace(text, size);
  }
  RedisModule_FreeCallReply(reply);
  if (!refusal.has_value() || !InCluster() || !(not_here || down)) return refusal;
  auto lost = cluster.WhyLost(SlotOf(ToView(key)));
  return lost.has_value() ? lost : not_here ? kNotNowText : refusal;
}

// Whether `user` may still acquire the lock, and the server still takes writes to it: what a direct
// call would be refused for, a deferred grant is refused for too.
std::optional<std::string> RefusalOfGrant(RedisModuleCtx* ctx, RedisModuleString* user_name,
                                          RedisModuleString* key, ClusterView& cluster) {
  static RedisModuleString* const command =
      RedisModule_CreateString(nullptr, kAcquireCommand, std::strlen(kAcquireCommand));
  std::array argv = {command, key};
  if (!User(user_name).MayRun(argv)) return kNoLongerPermittedText;
  return RefusalOfWrite(ctx, key, cluster);
}

void CountWait(const WaitQueue::Waiter& waiter) {
  TheStats().wait_times.Add(ToTick(SteadyNow()) - waiter.since());
}

void CountTimeOut(const WaitQueue::Waiter& waiter) {
  ++TheStats().wait_timeouts;
  CountWait(waiter);
}

}  // namespace

Crowd Waiters::AheadOfNewcomer(LockName lock, const Place& place, const AcquireRequest& request,
                               Instant now) {
  const WaitQueue::Line* line = Find(lock);
  return line == nullptr ? Crowd() : line->Ahead(IsUpgrade(place, request, now), now);
}

void Waiters::Block(Parked& parked, std::span<const Site> sites, Instant now) {
  const GrantRules rules = CurrentRules(now);
  for (size_t i = 0; i < sites.size(); ++i) {
    if (!IsBlocked(sites[i], parked.request(), now, rules)) continue;
    queue_.Block(parked, i, NextEnd(sites[i].place, now));
    return;
  }
  held_back_ = true;  // No lock does: it is the grace.
  queue_.Suspend(parked);
}

std::vector<CycleStep> Waiters::FindCycle(RedisModuleCtx* ctx, const Parked& parked,
                                          std::span<WaitQueue::Waiter* const> olders, Instant now) {
  const int db = RedisModule_GetSelectedDb(ctx);
  // Holders that have gone with their connections are taken out on the way. If they are too many
  // for one command, there is no verdict.
  constexpr size_t kStepsPerKey = 1'000;
  size_t crowded_keys = 10;
  bool unsure = false;
  const auto show = [&](LockName lock, const auto& see) {
    const ScopedName name(ctx, lock);
    LockKey key(ctx, name.get(), LockKey::Access::kInspect);
    if (TheSessions().has_ended()) {
      if (crowded_keys == 0 || !TheSessions().EndClosedIn(ctx, key, now, kStepsPerKey)) {
        unsure = true;
      } else {
        --crowded_keys;
      }
    }
    see(key.place());
  };
  std::vector<CycleStep> cycle = turnstile::FindCycle(queue_, parked, olders, now, show);
  RedisModule_SelectDb(ctx, db);
  if (unsure) cycle.clear();
  return cycle;
}

int Waiters::Park(RedisModuleCtx* ctx, LockKeys& keys, const Sites& sites,
                  const AcquireRequest& request, std::optional<uint64_t> session, FineInstant now) {
  RedisModuleString* user = RedisModule_GetCurrentUserName(ctx);
  if (user == nullptr) {  // A module calls on behalf of nobody, who cannot wait.
    ++TheStats().rejected;
    return RedisModule_ReplyWithNull(ctx);
  }
  auto parked =
      std::make_unique<Parked>(request, SteadyNow(), RedisModule_GetClientId(ctx), session, user);
  const Instant moment = ToInstant(now);
  std::vector<LockName> locks;
  for (size_t i = 0; i < keys.size(); ++i) locks.push_back(keys[i].lock_name());
  const std::vector<WaitQueue::Waiter*> olders = queue_.FindWaiters(locks, request.owner);
  if (olders.empty()) {
    const auto of_user = waiting_by_user_.find(std::string(ToView(user)));
    const bool user_has_many = MaxWaitersPerUser() > 0 && of_user != waiting_by_user_.end() &&
                               of_user->second >= MaxWaitersPerUser();
    if (size() >= MaxWaiters() || user_has_many) {
      ++TheStats().rejected_wait_limit;
      return user_has_many ? ReplyUserWaitLimit(ctx, MaxWaitersPerUser())
                           : ReplyWaitLimit(ctx, MaxWaiters());
    }
  }

  Parked* older = nullptr;  // whose place it takes over
  if (olders.size() == 1 && WaitQueue::WaitsFor(*olders.front(), locks, request.mode)) {
    older = static_cast<Parked*>(olders.front());
    // Its lines wake: what blocks it is found out when it is tried. `sites` do not tell: to them
    // the older call, too, stands ahead, and its locks may come in another order.
    queue_.TakeOver(*parked, *older);
  } else {
    const bool upgrade = keys.size() == 1 && IsUpgrade(keys[0].place(), request, moment);
    queue_.Enter(*parked, locks, request.owner, upgrade);
    Block(*parked, sites.get(), moment);
  }
  const auto withdraw = [&] {
    if (older == nullptr) {
      queue_.Leave(*parked);
    } else {
      queue_.TakeOver(*older, *parked);
    }
  };
  const std::vector<CycleStep> cycle = FindCycle(ctx, *parked, olders, moment);
  if (!cycle.empty()) {
    ++TheStats().deadlocks;
    ReplyDeadlock(ctx, cycle);
    withdraw();
    return REDISMODULE_OK;
  }
  RedisModuleBlockedClient* client =
      RedisModule_BlockClient(ctx, OnReply, OnUnblocked, OnFree, /*timeout_ms=*/0);
  if (client == nullptr) {
    withdraw();
    return ReplyCannotWait(ctx);
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    if (keys[i].place().plain.has_value()) FollowPlainLocks(ctx);
  }
  ++waiting_by_user_[std::string(ToView(user))];
  for (WaitQueue::Waiter* each : olders) {
    UnblockLater(*static_cast<Parked*>(each), kSupersededText);
  }
  Parked* waits = parked.release();  // OnFree ends it
  waits->client = client;
  RedisModule_SetDisconnectCallback(waits->client, OnDisconnect);
  parked_.emplace(waits->client, waits);
  ++TheStats().waits;
  return REDISMODULE_OK;
}

// The wait is over; its caller is answered in the one deferred place.
void Waiters::UnblockLater(Parked& parked, const char* why) {
  if (parked.in_line()) queue_.Leave(parked);
  parked.answer = std::string(why);
  to_unblock_.push_back(&parked);
}

std::vector<bool> Waiters::CancelWaits(std::span<const LockName> locks, Owner owner) {
  std::vector<bool> waited(locks.size());
  if (empty()) return waited;
  for (WaitQueue::Waiter* wait : queue_.FindWaiters(locks, owner)) {
    for (size_t i = 0; i < locks.size(); ++i) waited[i] = waited[i] || wait->WaitsFor(locks[i]);
    ++TheStats().waits_cancelled;
    UnblockLater(*static_cast<Parked*>(wait), kCancelledText);
  }
  return waited;
}

void Waiters::KeepGrants(LockName lock, Owner owner) {
  for (Grant* grant = in_flight_.first(); grant != nullptr; grant = grant->link.after) {
    grant->told |= grant->IsFor(lock, owner);
  }
  for (auto& grant : to_take_back_) grant->told |= grant->IsFor(lock, owner);
}

Instant Waiters::NextDue() const {
  if (!to_unblock_.empty() || !to_take_back_.empty()) return kMinInstant;
  Instant due = queue_.NextDue();
  if (held_back_) due = std::min(due, Tokens().GraceEnd() + Millis{1});
  return due;
}

void Waiters::LeaveLostSlots(ClusterView& cluster) {
  for (WaitQueue::Waiter* waiter : queue_.Waiters()) {
    auto why = cluster.WhyLost(SlotOf(waiter->lock(0).key));
    if (why.has_value()) Send(*static_cast<Parked*>(waiter), std::move(*why));
  }
}

void Waiters::ForgetDebts() {
  to_take_back_.clear();
  // Nor what may yet turn out not to have arrived: from here on another primary may tell the owner.
  for (Grant* grant = in_flight_.first(); grant != nullptr; grant = grant->link.after) {
    grant->told = true;
  }
  held_back_ = false;
}

Waiters::Parked* Waiters::FindParked(RedisModuleBlockedClient* client) {
  const auto found = parked_.find(client);
  return found == parked_.end() ? nullptr : found->second;
}

// Ends the wait. From here on only OnReply and OnFree will see `parked`.
void Waiters::Unpark(Parked& parked) {
  if (parked.in_line()) queue_.Leave(parked);
  std::erase(to_unblock_, &parked);  // if something else ends it first
  const auto of_user = waiting_by_user_.find(std::string(ToView(parked.user)));
  if (--of_user->second == 0) waiting_by_user_.erase(of_user);
  parked_.erase(parked.client);
  if (parked_.empty()) parked_ = decltype(parked_)();  // the empty table may be large
  RedisModule_UnblockClient(parked.client, &parked);
}

void Waiters::Send(Parked& parked, Answer answer, WaitQueue::Left why) {
  parked.answer = std::move(answer);
  if (parked.in_line()) queue_.Leave(parked, why);
  Unpark(parked);
}

void Waiters::TimeOut(Tick now, Budget& budget) {
  for (Parked* parked : std::exchange(to_unblock_, {})) Unpark(*parked);
  while (WaitQueue::Waiter* waiter = queue_.FirstTimedOut(now)) {
    if (budget.spent()) return;
    budget.Spend(2 + waiter->size() / 4);
    CountTimeOut(*waiter);
    Send(*static_cast<Parked*>(waiter), std::monostate{});
  }
}

void Waiters::TakeBackUndelivered(RedisModuleCtx* ctx, Instant now, Budget& budget) {
  while (!to_take_back_.empty() && !budget.spent()) {
    const std::unique_ptr<Grant> grant = std::move(to_take_back_.front());
    to_take_back_.pop_front();
    budget.Spend(10 * grant->keys.size());
    if (!grant->told) TakeBack(ctx, *grant, now);
  }
}

void Waiters::GrantWaiters(RedisModuleCtx* ctx, FineInstant now, Budget& budget) {
  const Instant moment = ToInstant(now);
  if (held_back_ && Tokens().GraceAt(moment) == Grace::kOver) {
    held_back_ = false;
    queue_.WakeAll(std::nullopt);
  }
  ClusterView cluster(ctx);
  std::optional<Slot> slot;  // that was caught up with last; many wait for one lock
  while (!budget.spent()) {
    WaitQueue::Waiter* waiter = queue_.NextToTry(moment);
    if (waiter == nullptr) return;
    auto& parked = *static_cast<Parked*>(waiter);
    if (InCluster() && slot != SlotOf(parked.lock(0).key)) {
      slot = SlotOf(parked.lock(0).key);
      CatchUpWithSlots(ctx, parked.lock(0).key, now);
    }
    const bool blocked = parked.size() > 1 && IsStillBlocked(ctx, parked, moment);
    budget.Spend(blocked ? 2 : TryGrant(ctx, parked, cluster, now));
  }
}

// Looks at the lock that blocked it last: nearly always it still does, and the others of a set, of
// which there may be many, need not be opened.
bool Waiters::IsStillBlocked(RedisModuleCtx* ctx, Parked& parked, Instant now) {
  if (!parked.blocked_at().has_value()) return false;
  const size_t index = *parked.blocked_at();
  const ScopedName name(ctx, parked.lock(index));
  LockKey key(ctx, name.get(), LockKey::Access::kInspect);
  if (key.wrong_type()) return false;
  RemoveOverdue(ctx, key, now);
  const Site site{key.place(), parked.AheadOf(index)};
  if (site.place.plain.has_value()) FollowPlainLocks(ctx);
  if (!IsBlocked(site, parked.request(), now, CurrentRules(now))) return false;
  queue_.Block(parked, index, NextEnd(site.place, now));
  return true;
}

size_t Waiters::TryGrant(RedisModuleCtx* ctx, Parked& parked, ClusterView& cluster,
                         FineInstant now) {
  const Instant moment = ToInstant(now);
  const size_t cost_of_try = 2 * parked.size();
  const size_t cost_of_grant = 10 + 6 * parked.size();
  const AcquireRequest& request = parked.request();
  const int db = parked.lock(0).db;
  std::vector<ScopedName> scoped;
  std::vector<RedisModuleString*> names;
  scoped.reserve(parked.size());
  for (size_t i = 0; i < parked.size(); ++i) {
    names.push_back(scoped.emplace_back(ctx, parked.lock(i)).get());
  }
  LockKeys keys(ctx, names.front(), std::span(names).subspan(1), LockKey::Access::kInspect);
  if (keys.any_wrong_type()) {
    Send(parked, std::string(REDISMODULE_ERRORMSG_WRONGTYPE));
    return cost_of_try;
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    RemoveOverdue(ctx, keys[i], moment);
  }

  size_t index = 0;
  const Sites sites(keys, [&](const LockKey& /*key*/, const Place& place) {
    if (place.plain.has_value()) FollowPlainLocks(ctx);
    return parked.AheadOf(index++);
  });
  const TokenClock& clock = Tokens().Issuing(now);
  const Admission admission = Decide(sites.get(), request, now, clock, CurrentRules(moment));
  if (admission.busy()) {
    Block(parked, sites.get(), moment);
    return cost_of_try;
  }
  if (!admission.granted()) {
    Send(parked, std::string(TextFor(admission.outcome)));
    return cost_of_try;
  }
  for (RedisModuleString* name : names) {
    if (auto refusal = RefusalOfGrant(ctx, parked.user, name, cluster); refusal.has_value()) {
      Send(parked, std::move(*refusal));
      return cost_of_grant;
    }
  }

  parked.grant = std::make_unique<Grant>(
      Grant{.db = db,
            .owner = std::string(request.owner.bytes),
            .token = admission.token,
            .upgraded = HoldToUpgrade(sites.get().front().place, request, moment),
            .bound_to = TheSessions().BoundTo(parked.lock(0), request.owner)});
  in_flight_.Append(*parked.grant);
  for (size_t i = 0; i < keys.size(); ++i) {
    parked.grant->keys.emplace_back(parked.lock(i).key);
    CarryOutGrant(ctx, keys[i], request, admission.token, moment, parked.session,
                  Carrier::kDeferred);
  }
  ++TheStats().acquired_after_wait;
  CountWait(parked);
  Send(parked, admission.token,
       request.mode == Mode::kExclusive ? WaitQueue::Left::kHoldsAlone : WaitQueue::Left::kGone);
  return cost_of_grant;
}

void Waiters::TakeBack(RedisModuleCtx* ctx, const Grant& grant, Instant now) {
  const Owner owner{grant.owner};
  std::optional<Hold> upgraded = grant.upgraded;
  if (upgraded.has_value()) upgraded->owner = owner;
  for (const std::string& lock : grant.keys) {
    const ScopedName name(ctx, LockName{grant.db, lock});
    LockKey key(ctx, name.get(), LockKey::Access::kChange);
    const Decision decision = DecideTakeBack(key.place(), owner, grant.token, upgraded, now);
    if (!decision.change.has_value()) continue;
    CarryOut(ctx, key, *decision.change, now, Carrier::kDeferred);
    const bool is_shared_again = std::holds_alternative<Held>(*decision.change);
    if (!is_shared_again) continue;
    TheSessions().Acquired(grant.bound_to, key.lock_name(), owner);
    // Its connection may have closed meanwhile, and nobody will tell again.
    if (grant.bound_to.has_value() &&
        RedisModule_GetClientInfoById(nullptr, *grant.bound_to) != REDISMODULE_OK) {
      TheSessions().ConnectionClosed(*grant.bound_to);
    }
  }
}

int Waiters::OnReply(RedisModuleCtx* ctx, RedisModuleString** /*argv*/, int /*argc*/) {
  const auto* parked = static_cast<Parked*>(RedisModule_GetBlockedClientPrivateData(ctx));
  if (const auto* token = std::get_if<Token>(&parked->answer)) return ReplyToken(ctx, *token);
  if (const auto* error = std::get_if<std::string>(&parked->answer)) {
    return RedisModule_ReplyWithError(ctx, error->c_str());
  }
  return RedisModule_ReplyWithNull(ctx);
}

int Waiters::OnUnblocked(RedisModuleCtx* ctx, RedisModuleString** /*argv*/, int /*argc*/) {
  Waiters& self = TheWaiters();
  Parked* parked = self.FindParked(RedisModule_GetBlockedClientHandle(ctx));
  if (parked != nullptr) {
    CountTimeOut(*parked);
    self.Unpark(*parked);
  }
  return RedisModule_ReplyWithNull(ctx);
}

void Waiters::OnDisconnect(RedisModuleCtx* /*ctx*/, RedisModuleBlockedClient* client) {
  Waiters& self = TheWaiters();
  if (Parked* parked = self.FindParked(client); parked != nullptr) self.Unpark(*parked);
  if (self.NextDue() == kMinInstant) WakeEventLoop();
}

void Waiters::OnFree(RedisModuleCtx* ctx, void* data) {
  const std::unique_ptr<Parked> parked(static_cast<Parked*>(data));
  if (parked->grant == nullptr) return;
  Waiters& self = TheWaiters();
  self.in_flight_.Remove(*parked->grant);
  if (RedisModule_BlockedClientDisconnected(ctx) != 0 && !parked->grant->told) {
    self.to_take_back_.push_back(std::move(parked->grant));
    WakeEventLoop();
  }
}

Waiters& TheWaiters() {
  static auto& waiters = *new Waiters;  // never destroyed: clients may wait when the server ends
  return waiters;
}

}  // namespace turnstile
