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

// Holds that were granted to a waiter whose client may not have heard of it.
struct Waiters::Grant {
  int db;
  std::vector<std::string> keys;
  std::string owner;
  Token token;
  std::optional<Hold> upgraded;      // the shared hold that became this one; its owner is `owner`
  std::optional<uint64_t> bound_to;  // what connection that one was bound to
  bool told = false;                 // by another call, or it is not ours to take back any more

  bool IsFor(LockName lock, Owner to) const {
    return db == lock.db && owner == to.bytes &&
           std::find(keys.begin(), keys.end(), lock.key) != keys.end();
  }
};

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

// Whether `user` may still acquire the lock, and the server still takes writes to it: what a direct
// call would be refused for, a deferred grant is refused for too.
std::optional<std::string> RefusalOfGrant(RedisModuleCtx* ctx, RedisModuleString* user_name,
                                          RedisModuleString* key, ClusterView& cluster) {
  static RedisModuleString* const command =
      RedisModule_CreateString(nullptr, kAcquireCommand, std::strlen(kAcquireCommand));
  std::array argv = {command, key};
  if (!User(user_name).MayRun(argv)) return kNoLongerPermittedText;

  // S: as in a script, so min-replicas, disk errors and the role count. M: memory too. E: errors
  // come as replies.
  errno = 0;
  RedisModuleCallReply* reply = RedisModule_Call(ctx, kProbeCommand, "SMEs", key);
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

void CountWait(const WaitQueue::Waiter& waiter) {
  TheStats().waits.Add(ToTick(SteadyNow()) - waiter.since());
}

void CountTimeOut(const WaitQueue::Waiter& waiter) {
  ++TheStats().timed_out;
  CountWait(waiter);
}

}  // namespace

Crowd Waiters::AheadOfNewcomer(LockName lock, const Place& place, const AcquireRequest& request,
                               Instant now) {
  const WaitQueue::Line* line = Find(lock);
  return line == nullptr ? Crowd() : line->Ahead(IsUpgrade(place, request, now));
}

int Waiters::Park(RedisModuleCtx* ctx, LockKeys& keys, const AcquireRequest& request,
                  std::optional<uint64_t> session, FineInstant now) {
  const Instant moment = ToInstant(now);
  std::vector<LockName> locks;
  for (size_t i = 0; i < keys.size(); ++i) locks.push_back(keys[i].lock_name());
  const std::vector<WaitQueue::Waiter*> olders = queue_.FindWaiters(locks, request.owner);
  if (olders.empty() && size() >= MaxWaiters()) {
    ++TheStats().wait_limited;
    return ReplyWaitLimit(ctx, MaxWaiters());
  }

  auto parked = std::make_unique<Parked>(request, SteadyNow(), RedisModule_GetClientId(ctx),
                                         session, RedisModule_GetCurrentUserName(ctx));
  if (olders.size() == 1 && WaitQueue::WaitsFor(*olders.front(), locks, request.mode)) {
    WaitQueue::Waiter& older = *olders.front();
    const bool asks_for_less_room = request.limit < older.request().limit;
    queue_.TakeOver(*parked, older);
    if (asks_for_less_room) {
      const auto cycle = queue_.FindCycle(*parked, {}, moment, WaitQueue::From::kAnyWait);
      if (!cycle.empty()) {
        ++TheStats().deadlocks;
        ReplyDeadlock(ctx, cycle);
        queue_.TakeOver(older, *parked);
        return REDISMODULE_OK;
      }
    }
  } else {
    const bool may_close_cycle = queue_.MayBeWaitedFor(request.owner);
    const bool upgrade = keys.size() == 1 && IsUpgrade(keys[0].place(), request, moment);
    queue_.Enter(*parked, locks, request.owner, upgrade);
    for (size_t i = 0; i < keys.size(); ++i) {
      if (Find(locks[i])->size() == 1) {
        LookAtHolders(locks[i], keys[i].place(), moment);
      } else if (upgrade) {  // It stands in front, and nobody else will look.
        LookAgain(locks[i], keys[i].place(), moment);
      }
    }
    if (may_close_cycle) {
      const auto cycle = queue_.FindCycle(*parked, olders, moment);
      if (!cycle.empty()) {
        ++TheStats().deadlocks;
        ReplyDeadlock(ctx, cycle);
        queue_.Leave(*parked);
        return REDISMODULE_OK;
      }
    }
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    if (keys[i].place().plain.has_value()) FollowPlainLocks(ctx);
  }
  held_back_ = held_back_ || Tokens().GraceAt(moment) == Grace::kOn;
  for (WaitQueue::Waiter* older : olders)
    UnblockLater(*static_cast<Parked*>(older), kSupersededText);
  Parked* waits = parked.release();  // OnFree ends it
  waits->client = RedisModule_BlockClient(ctx, OnReply, OnUnblocked, OnFree, /*timeout_ms=*/0);
  RedisModule_SetDisconnectCallback(waits->client, OnGone);
  parked_.emplace(waits->client, waits);
  ++TheStats().waited;
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

void Waiters::LockHeld(LockName name, const Lock& lock, const Hold& hold) {
  if (empty()) return;
  const auto company =
      lock.size() == 1 ? WaitQueue::Company::kAlone : WaitQueue::Company::kWithOthers;
  queue_.SetHolder(name, lock.mode(), hold.owner, hold.closes(), company, hold.linger);
}

void Waiters::HoldGone(LockName lock, Owner owner) {
  if (!empty()) queue_.RemoveHolder(lock, owner);
}

void Waiters::LockGone(LockName lock) {
  if (!empty()) queue_.ClearHolders(lock);
}

void Waiters::LookAtHolders(LockName lock, const Place& place, Instant now) {
  for (const Holder& holder : HoldersOf(place, now)) {
    queue_.SetHolder(lock, ModeOf(place), holder.owner, holder.until,
                     WaitQueue::Company::kWithOthers, holder.linger);
  }
}

// Those who hold a lock are known from the facts about it. This is for what facts do not tell: a
// plain lock that came before anybody listened, and a wall clock that was set back.
void Waiters::LookAgain(LockName lock, const Place& place, Instant now) {
  if (!place.plain.has_value() && Find(lock)->holders() == CountHolders(place, now)) return;
  queue_.ClearHolders(lock);
  LookAtHolders(lock, place, now);
}

void Waiters::KeyChanged(RedisModuleCtx* ctx, RedisModuleString* name) {
  const LockKey key(ctx, name, LockKey::Access::kChange);
  const LockName lock = key.lock_name();
  if (Find(lock) == nullptr) return;
  queue_.ClearHolders(lock);
  LookAtHolders(lock, key.place(), ToInstant(WallNow()));
}

void Waiters::DatabaseChanged(RedisModuleCtx* ctx, std::optional<int> db) {
  for (const LockName lock : queue_.Locks(db)) KeyChanged(ctx, ScopedName(ctx, lock).get());
}

void Waiters::KeepGrants(LockName lock, Owner owner) {
  for (Grant* grant : in_flight_) grant->told |= grant->IsFor(lock, owner);
  for (auto& grant : to_take_back_) grant->told |= grant->IsFor(lock, owner);
}

Instant Waiters::NextDue() const {
  if (!to_unblock_.empty() || !to_take_back_.empty()) return kMinInstant;
  Instant due = queue_.NextDue();
  if (held_back_) due = std::min(due, Tokens().GraceEnd() + Millis{1});
  return due;
}

void Waiters::LeaveLostSlots(ClusterView& cluster) {
  std::vector<std::pair<Parked*, std::string>> lost;
  for (const auto& [client, parked] : parked_) {
    if (!parked->in_line()) continue;  // its place was taken over
    auto why = cluster.WhyLost(SlotOf(parked->lock(0).key));
    if (why.has_value()) lost.emplace_back(parked, std::move(*why));
  }
  for (auto& [parked, why] : lost) Send(*parked, std::move(why));
}

void Waiters::ForgetDebts() {
  to_take_back_.clear();
  // Nor what may yet turn out not to have arrived: from here on another primary may tell the owner.
  for (Grant* grant : in_flight_) grant->told = true;
  held_back_ = false;
}

Waiters::Parked* Waiters::FindParked(RedisModuleBlockedClient* client) {
  const auto found = parked_.find(client);
  return found == parked_.end() ? nullptr : found->second;
}

// Ends the wait. From here on only OnReply and OnFree will see `parked`.
void Waiters::LetGo(Parked& parked) {
  if (parked.in_line()) queue_.Leave(parked);
  std::erase(to_unblock_, &parked);  // if something else ends it first
  parked_.erase(parked.client);
  if (parked_.empty()) parked_ = decltype(parked_)();  // the empty table may be large
  RedisModule_UnblockClient(parked.client, &parked);
}

void Waiters::Send(Parked& parked, Answer answer) {
  parked.answer = std::move(answer);
  LetGo(parked);
}

void Waiters::TimeOut(Tick now) {
  for (Parked* parked : std::exchange(to_unblock_, {})) LetGo(*parked);
  while (WaitQueue::Waiter* waiter = queue_.FirstTimedOut(now)) {
    CountTimeOut(*waiter);
    Send(*static_cast<Parked*>(waiter), std::monostate{});
  }
}

void Waiters::TakeBackUndelivered(RedisModuleCtx* ctx, Instant now) {
  for (const auto& grant : std::exchange(to_take_back_, {})) {
    if (!grant->told) TakeBack(ctx, *grant, now);
  }
}

void Waiters::Settle(RedisModuleCtx* ctx, FineInstant now) {
  if (held_back_ && Tokens().GraceAt(ToInstant(now)) == Grace::kOver) {
    held_back_ = false;
    queue_.WakeAll();
  }
  ClusterView cluster(ctx);
  while (WaitQueue::Line* line = queue_.FirstWoken(ToInstant(now))) {
    SettleLine(ctx, *line, cluster, now);
  }
}

// Grants the lock to those in front for as long as it can be granted.
void Waiters::SettleLine(RedisModuleCtx* ctx, WaitQueue::Line& line, ClusterView& cluster,
                         FineInstant now) {
  const ScopedName name(ctx, line.lock());
  CatchUpWithSlots(ctx, name.lock().key, now);
  {
    LockKey key(ctx, name.get(), LockKey::Access::kChange);
    RemoveOverdue(ctx, key, ToInstant(now));
  }
  queue_.Settle(line, [&](WaitQueue::Waiter& waiter, const Crowd& ahead) {
    return Offer(ctx, static_cast<Parked&>(waiter), name.lock(), ahead, cluster, now);
  });
}

WaitQueue::Offered Waiters::Offer(RedisModuleCtx* ctx, Parked& parked, LockName here,
                                  const Crowd& ahead, ClusterView& cluster, FineInstant now) {
  const Instant moment = ToInstant(now);
  const AcquireRequest& request = parked.request();
  std::vector<ScopedName> scoped;
  std::vector<RedisModuleString*> names;
  scoped.reserve(parked.size());
  for (size_t i = 0; i < parked.size(); ++i) {
    names.push_back(scoped.emplace_back(ctx, parked.lock(i)).get());
  }
  LockKeys keys(ctx, names.front(), std::span(names).subspan(1), LockKey::Access::kChange);
  if (keys.any_wrong_type()) {
    Send(parked, std::string(REDISMODULE_ERRORMSG_WRONGTYPE));
    return WaitQueue::Offered::kLeft;
  }

  size_t index = 0;
  size_t here_at = 0;
  const Sites sites(keys, [&](const LockKey& /*key*/, const Place& place) {
    if (place.plain.has_value()) FollowPlainLocks(ctx);
    const size_t at = index++;
    if (parked.lock(at) != here) return parked.AheadOf(at);
    here_at = at;
    return ahead;
  });
  const Site& site_here = sites.get()[here_at];
  const TokenClock& clock = Tokens().Issuing(now);
  const Admission admission = Decide(sites.get(), request, now, clock, Tokens().GraceAt(moment));
  if (admission.busy()) {
    held_back_ = held_back_ || admission.outcome == Outcome::kGrace;
    if (!IsBlocked(site_here, request, moment)) return WaitQueue::Offered::kBlockedElsewhere;
    LookAgain(here, site_here.place, moment);
    return WaitQueue::Offered::kBlockedHere;
  }
  if (!admission.granted()) {
    Send(parked, std::string(TextFor(admission.outcome)));
    return WaitQueue::Offered::kLeft;
  }
  for (RedisModuleString* name : names) {
    if (auto refusal = RefusalOfGrant(ctx, parked.user, name, cluster); refusal.has_value()) {
      Send(parked, std::move(*refusal));
      return WaitQueue::Offered::kLeft;
    }
  }

  parked.grant = std::make_unique<Grant>(
      Grant{.db = here.db,
            .owner = std::string(request.owner.bytes),
            .token = admission.token,
            .upgraded = HoldToUpgrade(sites.get().front().place, request, moment),
            .bound_to = TheSessions().BoundTo(here, request.owner)});
  in_flight_.push_back(parked.grant.get());
  for (size_t i = 0; i < keys.size(); ++i) {
    parked.grant->keys.emplace_back(parked.lock(i).key);
    CarryOutGrant(ctx, keys[i], request, admission.token, moment, parked.session,
                  Carrier::kDeferred);
  }
  ++TheStats().handed_over;
  CountWait(parked);
  const bool alone = request.mode == Mode::kExclusive;
  Send(parked, admission.token);
  return alone ? WaitQueue::Offered::kTookAll : WaitQueue::Offered::kLeft;
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
    if (is_shared_again) TheSessions().Acquired(grant.bound_to, key.lock_name(), owner);
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
    self.LetGo(*parked);
  }
  return RedisModule_ReplyWithNull(ctx);
}

void Waiters::OnGone(RedisModuleCtx* /*ctx*/, RedisModuleBlockedClient* client) {
  Waiters& self = TheWaiters();
  if (Parked* parked = self.FindParked(client); parked != nullptr) self.LetGo(*parked);
  if (self.NextDue() == kMinInstant) TurnEventLoop();
}

void Waiters::OnFree(RedisModuleCtx* ctx, void* data) {
  const std::unique_ptr<Parked> parked(static_cast<Parked*>(data));
  if (parked->grant == nullptr) return;
  Waiters& self = TheWaiters();
  std::erase(self.in_flight_, parked->grant.get());
  if (RedisModule_BlockedClientDisconnected(ctx) != 0 && !parked->grant->told) {
    self.to_take_back_.push_back(std::move(parked->grant));
    TurnEventLoop();
  }
}

Waiters& TheWaiters() {
  static auto& waiters = *new Waiters;  // never destroyed: clients may wait when the server ends
  return waiters;
}

}  // namespace turnstile
