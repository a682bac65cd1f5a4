#include "fault/simulator/server.h"

#include <algorithm>
#include <charconv>
#include <string>
#include <utility>
#include <variant>

namespace turnstile::fault {
namespace {

uint32_t LockOf(std::string_view name) { return static_cast<uint32_t>(name.front() - 'a'); }

size_t NumberOf(Owner owner) {
  size_t number = 0;
  std::from_chars(owner.bytes.data(), owner.bytes.data() + owner.bytes.size(), number);
  return number;
}

// Some are short and some long, because they are stored behind what is fixed.
std::array<std::string, kOwners> MakeOwnerNames() {
  std::array<std::string, kOwners> names;
  for (size_t i = 0; i < kOwners; ++i) {
    names[i] = std::to_string(i);
    if (i % 4 == 3) names[i] += "-and-a-name-that-is-as-long-as-a-uuid";
  }
  return names;
}

template <size_t kSize>
std::array<std::string, kSize> MakeNames(std::string_view prefix) {
  std::array<std::string, kSize> names;
  for (size_t i = 0; i < kSize; ++i) names[i] = std::string(prefix) + std::to_string(i);
  return names;
}

uint32_t NumberAfter(std::string_view prefix, std::string_view name) {
  uint32_t number = 0;
  std::from_chars(name.data() + prefix.size(), name.data() + name.size(), number);
  return number;
}

constexpr std::string_view kIdPrefix = "id:";
constexpr std::string_view kChannelPrefix = "channel of ";

AcquireRequest RequestOf(const Call& call) {
  return {.owner = Owner{NameOfOwner(call.owner)},
          .lease = call.lease,
          .wait = call.wait,
          .max_line = call.max_line,
          .mode = call.mode,
          .limit = call.limit,
          .weight = call.weight,
          .reentrant = call.reentrant,
          .session = call.session,
          .linger = call.linger,
          .max_hold = call.max_hold,
          .tag = call.tagged ? NameOfTag(call.owner) : std::string_view(),
          .notify = call.notify ? std::optional(NotifyTarget{.channel = NameOfChannel(call.client),
                                                             .id = NameOfId(call.id)})
                                : std::nullopt,
          .floor = call.token.value > 0 ? std::optional(call.token) : std::nullopt};
}

std::vector<std::string_view> KeysOf(const Call& call) {
  std::vector<std::string_view> keys;
  for (size_t i = 0; i < call.count; ++i) keys.push_back(NameOfLock(call.locks[i]));
  return keys;
}

void Answered(const WaitAnswer& answer, Reply& reply) {
  if (const auto* token = std::get_if<Token>(&answer)) {
    reply.answer = Answer::kToken;
    reply.token = static_cast<int64_t>(token->value);
  } else {
    reply.answer = std::holds_alternative<std::monostate>(answer) ? Answer::kNull : Answer::kError;
  }
}

}  // namespace

std::string_view NameOfLock(uint32_t lock) { return std::string_view("abc").substr(lock, 1); }

std::string_view NameOfOwner(uint32_t owner) {
  static const std::array<std::string, kOwners> names = MakeOwnerNames();
  return names[owner];
}

std::string_view NameOfTag(uint32_t owner) {
  static const auto names = MakeNames<kOwners>("tag of ");
  return names[owner];
}

std::string_view NameOfId(uint32_t id) {
  static const auto names = MakeNames<kOwners * kIdsOfOwner>(kIdPrefix);
  return names[id];
}

std::string_view NameOfChannel(uint32_t client) {
  static const auto names = MakeNames<kMostClients>(kChannelPrefix);
  return names[client];
}

std::string_view NameOfUser(uint32_t client) {
  static const auto names = MakeNames<kMostClients>("user ");
  return names[client];
}

Server::Server(const Settings& settings, Ledger& ledger) : settings_(settings), ledger_(ledger) {
  host_.engine().settings().token_margin = settings.margin;
  host_.engine().settings().failover_grace = settings.grace;
  host_.on_hold_set = [this](LockName lock, const HoldSet& held) { OnHoldSet(lock, held); };
  host_.on_notice = [this](const Notice& notice, size_t receivers) { OnNotice(notice, receivers); };
  for (uint32_t client = 0; client < kMostClients && settings.listened; ++client) Subscribe(client);
}

void Server::OnHoldSet(LockName lock, const HoldSet& held) {
  const Hold& hold = held.hold;
  const size_t owner = NumberOf(hold.owner);
  Instant& latest = ledger_[LockOf(lock.key)][owner];
  latest = std::max(latest, hold.blocks_until());
  if (hold.cap == hold.end) ++leases_cut_;
  const auto is_this = [&](const PublishedGrant& grant) {
    return grant.owner == owner && grant.token == hold.token;
  };
  if (std::any_of(unreceived_.begin(), unreceived_.end(), is_this)) {
    Fail("a grant is written that nobody received");
  }
  for (PublishedGrant& grant : published_) {
    if (is_this(grant) && grant.unwritten > 0) --grant.unwritten;
  }
}

void Server::OnNotice(const Notice& notice, size_t receivers) {
  const uint32_t id = NumberAfter(kIdPrefix, notice.to.id);
  Message message{.client = NumberAfter(kChannelPrefix, notice.to.channel),
                  .id = id,
                  .lock = LockOf(notice.key)};
  if (const auto* loss = std::get_if<HoldLoss>(&notice.what)) {
    OnLossNotice(notice, id, *loss);
    message.kind = Message::Kind::kLost;
    message.token = static_cast<int64_t>(loss->token.value);
  } else {
    const auto wait = waits_.extract(id);
    if (wait.empty()) return Fail("a message is about a wait that was over");
    const auto& answer = std::get<WaitAnswer>(notice.what);
    if (const auto* token = std::get_if<Token>(&answer)) {
      OnGrantNotice(wait.mapped(), *token, receivers);
      message.token = static_cast<int64_t>(token->value);
    } else if (std::holds_alternative<std::monostate>(answer)) {
      message.kind = Message::Kind::kTimeout;
      if (now_.steady < wait.mapped().until) Fail("a wait is said to be over before its time");
    } else {
      message.kind = Message::Kind::kError;
      const auto* end = std::get_if<WaitEnd>(&answer);
      message.demoted = end != nullptr && *end == WaitEnd::kDemoted;
    }
  }
  if (receivers > 0) messages_.push_back(message);
}

void Server::OnGrantNotice(const NotifiedWait& wait, Token token, size_t receivers) {
  const PublishedGrant grant{.owner = wait.owner, .token = token, .unwritten = wait.count};
  (receivers > 0 ? published_ : unreceived_).push_back(grant);
  if (receivers == 0) ++sent_to_nobody_;
}

void Server::OnLossNotice(const Notice& notice, uint32_t id, const HoldLoss& loss) {
  const Lock* lock = host_.FindLock(0, notice.key);
  if (lock == nullptr) return;
  // The hold that came with another name may have the same owner and token (seed 255).
  if (brought_[LockOf(notice.key)]) return;
  const std::optional<Hold> hold = lock->Find(Owner{NameOfOwner(OwnerOfId(id))});
  if (hold.has_value() && hold->token == loss.token && hold->end >= now_.moment()) {
    Fail("a hold is said to be lost that is live");
  }
}

void Server::Turn(const Now& now) {
  now_ = now;
  published_.clear();
  unreceived_.clear();
  host_.Turn(now, settings_.budget);
  for (const PublishedGrant& grant : published_) {
    if (grant.unwritten > 0) Fail("a grant is published that is not written");
  }
  published_.clear();
  unreceived_.clear();
}

std::vector<Message> Server::TakeMessages() { return std::exchange(messages_, {}); }

void Server::SetMayPublish(uint32_t client, bool may) {
  if (may) {
    host_.users_who_may_not_publish.erase(std::string(NameOfUser(client)));
  } else {
    host_.users_who_may_not_publish.emplace(NameOfUser(client));
  }
}

bool Server::KeepsSomebodyTooLong(FineTick now) const {
  if (host_.KeepsSomebodyTooLong(now)) return true;
  return !host_.NextDue().IsDueAt(now_.moment()) &&
         std::any_of(waits_.begin(), waits_.end(),
                     [now](const auto& wait) { return wait.second.until + Millis{1} < now; });
}

bool Server::HasForeignTag() const {
  for (uint32_t i = 0; i < kLocks; ++i) {
    const Lock* lock = host_.FindLock(0, NameOfLock(i));
    if (lock == nullptr) continue;
    for (const Hold& hold : lock->holds(Lock::Order::kByOwner)) {
      const auto owner = static_cast<uint32_t>(NumberOf(hold.owner));
      if (!hold.tag.empty() && hold.tag != NameOfTag(owner)) return true;
    }
  }
  return false;
}

void Server::Handle(const Call& call, const Now& now) {
  Reply reply{.call = call.number, .connection = call.connection, .answer = Answer::kError};
  if (!is_primary()) {
    replies_.push_back(reply);
    return;
  }
  const sim::Caller caller{.connection = call.connection,
                           .tag = call.number,
                           .user = std::string(NameOfUser(call.client))};
  const std::vector<std::string_view> keys = KeysOf(call);
  const Owner owner{NameOfOwner(call.owner)};
  const auto count = [&reply](const CountResult& result) {
    reply.done = result.count;
    reply.answer = result.count == 0 ? Answer::kNo : Answer::kYes;
  };
  switch (call.verb) {
    case Verb::kAcquire: {
      const AcquireResult result = host_.Acquire(caller, keys, RequestOf(call), now);
      if (result.kind == AcquireResult::Kind::kWaits) return;
      if (result.kind == AcquireResult::Kind::kQueued) {
        reply.queued = true;
        waits_[call.id] = {
            .until = now.steady + call.wait, .owner = call.owner, .count = call.count};
      }
      reply.refused = result.kind == AcquireResult::Kind::kNotifyRefused;
      if (result.kind == AcquireResult::Kind::kBusy) reply.answer = Answer::kNull;
      if (result.kind == AcquireResult::Kind::kGranted) Answered(result.token, reply);
      break;
    }
    case Verb::kRelease:
      count(host_.Release(caller, keys, owner, now));
      break;
    case Verb::kTouch:
      count(host_.Touch(caller, keys, owner, call.lease, now));
      break;
    default:
      reply.answer =
          host_.Fence(caller, keys.front(), call.token, now).current ? Answer::kYes : Answer::kNo;
  }
  replies_.push_back(reply);
}

std::vector<Reply> Server::TakeReplies(bool to_waiters) {
  if (!to_waiters) return std::exchange(replies_, {});
  for (const sim::Answered& answered : std::exchange(host_.answered(), {})) {
    Reply reply{.call = static_cast<uint32_t>(answered.tag),
                .connection = static_cast<uint32_t>(answered.connection),
                .waited = true};
    Answered(answered.call->answer(), reply);
    reply.waiting_call = answered.call;
    replies_.push_back(reply);
  }
  return std::exchange(replies_, {});
}

void Server::Replied(const Reply& reply, bool delivered) {
  host_.Replied({reply.waiting_call, reply.connection, reply.call}, delivered);
}

void Server::Rename(uint32_t from, uint32_t to, const Now& now) {
  if (!host_.Rename(0, NameOfLock(from), NameOfLock(to), now)) return;
  brought_[to] = true;
  for (size_t owner = 0; owner < kOwners; ++owner) {
    ledger_[to][owner] = std::max(ledger_[to][owner], ledger_[from][owner]);
  }
}

void Server::BecomeReplica(const Now& now) {
  host_.BecomeReplica(now);
  for (const auto& [connection, tag] : std::exchange(host_.sent_away(), {})) {
    replies_.push_back({.call = static_cast<uint32_t>(tag),
                        .connection = static_cast<uint32_t>(connection),
                        .answer = Answer::kError});
  }
}

bool Server::HasLongerLease() const {
  for (uint32_t i = 0; i < kLocks; ++i) {
    const Lock* lock = host_.FindLock(0, NameOfLock(i));
    if (lock == nullptr) continue;
    for (const Hold& hold : lock->holds(Lock::Order::kByOwner)) {
      if (hold.blocks_until() > ledger_[i][NumberOf(hold.owner)]) return true;
    }
  }
  return false;
}

}  // namespace turnstile::fault
