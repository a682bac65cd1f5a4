#include "redis/waiters.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "redis/command_table.h"
#include "redis/config.h"
#include "redis/deferred.h"
#include "redis/effects.h"
#include "redis/tokens.h"

namespace turnstile {

// A hold that was granted to a waiter whose client may not have heard of it.
struct Waiters::Grant {
  int db;
  std::string key;
  std::string owner;
  Token token;
  bool told = false;  // by another call

  bool IsFor(LockName lock, Owner to) const {
    return db == lock.db && key == lock.key && owner == to.bytes;
  }
};

// A blocked client. Lives from Park to OnFree.
struct Waiters::Parked : WaitQueue::Waiter {
  Parked(const AcquireRequest& request, FineInstant now, RedisModuleBlockedClient* blocked,
         RedisModuleString* user_name)
      : Waiter(request.lease, ToInstant(now), std::chrono::ceil<Millis>(now + request.wait)),
        client(blocked),
        user(user_name) {}
  ~Parked() { RedisModule_FreeString(nullptr, user); }

  RedisModuleBlockedClient* client;
  RedisModuleString* user;
  Answer answer;
  std::unique_ptr<Grant> grant;
};

namespace {

// Whether `user` may still acquire the lock, and the server still takes writes to it: what a direct
// call would be refused for, a deferred grant is refused for too.
std::optional<std::string> RefusalOfGrant(RedisModuleCtx* ctx, RedisModuleString* user_name,
                                          RedisModuleString* key) {
  RedisModuleUser* user = RedisModule_GetModuleUserFromUserName(user_name);
  RedisModuleString* command =
      RedisModule_CreateString(ctx, kAcquireCommand, std::strlen(kAcquireCommand));
  std::array argv = {command, key};
  const bool allowed =
      user != nullptr && RedisModule_ACLCheckCommandPermissions(
                             user, argv.data(), static_cast<int>(argv.size())) == REDISMODULE_OK;
  RedisModule_FreeString(ctx, command);
  if (user != nullptr) RedisModule_FreeModuleUser(user);
  if (!allowed) return kNoLongerPermittedText;

  // S: as in a script, so min-replicas, disk errors and the role count. M: memory too. E: errors
  // come as replies.
  RedisModuleCallReply* reply = RedisModule_Call(ctx, kProbeCommand, "SMEs", key);
  if (reply == nullptr) return kNotNowText;
  std::optional<std::string> refusal;
  if (RedisModule_CallReplyType(reply) == REDISMODULE_REPLY_ERROR) {
    size_t size = 0;
    const char* text = RedisModule_CallReplyStringPtr(reply, &size);
    refusal.emplace(text, size);
  }
  RedisModule_FreeCallReply(reply);
  return refusal;
}

}  // namespace

int Waiters::Park(RedisModuleCtx* ctx, const LockKey& key, const AcquireRequest& request,
                  FineInstant now) {
  const LockName lock = key.lock_name();
  const Place place = key.place();
  const std::optional<Holder> holder = HolderOf(place, ToInstant(now));
  WaitQueue::Waiter* older = queue_.FindWaiter(lock, request.owner);
  if (older == nullptr) {
    if (size() >= MaxWaiters()) return ReplyWaitLimit(ctx, MaxWaiters());
    const std::optional<Owner> owner =
        holder.has_value() ? std::optional(holder->owner) : std::nullopt;
    const auto cycle = queue_.FindCycle(request.owner, lock, owner, ToInstant(now));
    if (!cycle.empty()) return ReplyDeadlock(ctx, cycle);
  }
  if (place.plain.has_value()) FollowPlainLocks(ctx);

  RedisModuleBlockedClient* client =
      RedisModule_BlockClient(ctx, OnReply, OnUnblocked, OnFree, /*timeout_ms=*/0);
  RedisModule_SetDisconnectCallback(client, OnGone);
  auto* parked = new Parked(request, now, client, RedisModule_GetCurrentUserName(ctx));
  parked_.emplace(client, parked);
  if (older == nullptr) {
    queue_.Enter(*parked, lock, request.owner);
  } else {
    queue_.TakeOver(*parked, *older);
    superseded_.push_back(static_cast<Parked*>(older)->client);
  }
  HolderChanged(lock, holder);
  return REDISMODULE_OK;
}

void Waiters::HolderChanged(LockName lock, const std::optional<Holder>& holder) {
  if (empty()) return;
  if (holder.has_value()) {
    queue_.SetHolder(lock, holder->owner, holder->end);
  } else {
    queue_.SetHolder(lock, std::nullopt, kMinInstant);
  }
}

void Waiters::KeyChanged(RedisModuleCtx* ctx, RedisModuleString* name) {
  const LockName lock{RedisModule_GetSelectedDb(ctx), ToView(name)};
  if (Find(lock) == nullptr) return;
  const LockKey key(ctx, name, LockKey::Access::kChange);
  HolderChanged(lock, HolderOf(key.place(), ToInstant(WallNow())));
  queue_.Wake(lock);
}

void Waiters::DatabaseChanged(RedisModuleCtx* ctx, std::optional<int> db) {
  for (const LockName lock : queue_.Locks(db)) KeyChanged(ctx, ScopedName(ctx, lock).get());
}

void Waiters::OwnerWasTold(LockName lock, Owner owner) {
  for (Grant* grant : in_flight_) grant->told |= grant->IsFor(lock, owner);
  for (auto& grant : to_take_back_) grant->told |= grant->IsFor(lock, owner);
}

Instant Waiters::NextDue() const {
  return superseded_.empty() && to_take_back_.empty() ? queue_.NextDue() : kMinInstant;
}

void Waiters::ForgetDebts() { to_take_back_.clear(); }

Waiters::Parked* Waiters::FindParked(RedisModuleBlockedClient* client) {
  const auto found = parked_.find(client);
  return found == parked_.end() ? nullptr : found->second;
}

// Ends the wait. From here on only OnReply and OnFree will see `parked`.
void Waiters::LetGo(Parked& parked) {
  if (parked.in_line()) queue_.Leave(parked);
  parked_.erase(parked.client);
  if (parked_.empty()) parked_ = decltype(parked_)();  // the empty table may be large
  RedisModule_UnblockClient(parked.client, &parked);
}

void Waiters::Send(Parked& parked, Answer answer) {
  parked.answer = std::move(answer);
  LetGo(parked);
}

void Waiters::TimeOut(Instant now) {
  for (RedisModuleBlockedClient* client : std::exchange(superseded_, {})) {
    if (Parked* parked = FindParked(client); parked != nullptr) {
      Send(*parked, std::string(kSupersededText));
    }
  }
  while (WaitQueue::Waiter* waiter = queue_.FirstTimedOut(now)) {
    Send(*static_cast<Parked*>(waiter), std::monostate{});
  }
}

void Waiters::Settle(RedisModuleCtx* ctx, FineInstant now) {
  for (const auto& grant : std::exchange(to_take_back_, {})) {
    if (!grant->told) TakeBack(ctx, *grant, ToInstant(now));
  }
  while (WaitQueue::Line* line = queue_.FirstWoken(ToInstant(now))) SettleLine(ctx, *line, now);
}

// Grants the lock to those in front for as long as it can be granted.
void Waiters::SettleLine(RedisModuleCtx* ctx, WaitQueue::Line& line, FineInstant now) {
  const ScopedName name(ctx, line.lock());
  LockKey key(ctx, name.get(), LockKey::Access::kChange);
  // The line itself goes with its last waiter: it is looked up again for each.
  while (WaitQueue::Line* left = queue_.Find(name.lock())) {
    auto& parked = static_cast<Parked&>(*left->first());
    const AcquireRequest request = parked.request();
    if (key.wrong_type()) {
      Send(parked, std::string(REDISMODULE_ERRORMSG_WRONGTYPE));
      continue;
    }
    const Place place = key.place();
    const Decision decision = Decide(place, request, Ahead::kNobody, now, Tokens().Issuing(now));
    if (decision.outcome == Outcome::kTokensUsedUp) {
      Send(parked, std::string(kTokensUsedUpText));
      continue;
    }
    if (!decision.change.has_value()) {
      if (place.plain.has_value()) FollowPlainLocks(ctx);
      HolderChanged(name.lock(), HolderOf(place, ToInstant(now)));
      queue_.Settled(name.lock());
      return;
    }
    if (auto refusal = RefusalOfGrant(ctx, parked.user, name.get()); refusal.has_value()) {
      Send(parked, std::move(*refusal));
      continue;
    }
    const Token token = std::get<Held>(*decision.change).hold.token;
    parked.grant = std::make_unique<Grant>(Grant{.db = name.lock().db,
                                                 .key = std::string(name.lock().key),
                                                 .owner = std::string(request.owner.bytes),
                                                 .token = token});
    in_flight_.push_back(parked.grant.get());
    CarryOut(ctx, key, *decision.change, Carrier::kDeferred);
    Send(parked, token);
  }
}

void Waiters::TakeBack(RedisModuleCtx* ctx, const Grant& grant, Instant now) {
  const ScopedName name(ctx, LockName{grant.db, grant.key});
  LockKey key(ctx, name.get(), LockKey::Access::kChange);
  const Place place = key.place();
  if (!IsCurrent(place, grant.token, now)) return;
  const Decision decision = Decide(place, ReleaseRequest{Owner{grant.owner}}, now);
  if (decision.change.has_value()) CarryOut(ctx, key, *decision.change, Carrier::kDeferred);
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
  if (parked != nullptr) self.LetGo(*parked);
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
  if (RedisModule_BlockedClientDisconnected(ctx) != 0) {
    self.to_take_back_.push_back(std::move(parked->grant));
    TurnEventLoop();
  }
}

Waiters& TheWaiters() {
  static auto& waiters = *new Waiters;  // never destroyed: clients may wait when the server ends
  return waiters;
}

}  // namespace turnstile
