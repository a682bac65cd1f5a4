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

AcquireRequest RequestOf(const Call& call) {
  return {.owner = Owner{NameOfOwner(call.owner)},
          .lease = call.lease,
          .wait = call.wait,
          .mode = call.mode,
          .limit = call.limit,
          .reentrant = call.reentrant,
          .session = call.session,
          .linger = call.linger,
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

Server::Server(const Settings& settings, Ledger& ledger) : settings_(settings), ledger_(ledger) {
  host_.engine().settings().token_margin = settings.margin;
  host_.engine().settings().failover_grace = settings.grace;
  host_.on_hold_set = [this](LockName lock, const HoldSet& held) {
    Instant& latest = ledger_[LockOf(lock.key)][NumberOf(held.hold.owner)];
    latest = std::max(latest, held.hold.blocks_until());
  };
}

void Server::Handle(const Call& call, const Now& now) {
  Reply reply{.call = call.number, .connection = call.connection, .answer = Answer::kError};
  if (!is_primary()) {
    replies_.push_back(reply);
    return;
  }
  const sim::Caller caller{.connection = call.connection, .tag = call.number};
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
