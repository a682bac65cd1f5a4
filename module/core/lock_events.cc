#include "core/lock_events.h"

namespace turnstile {
namespace {

void Add(const Hold& hold, Loss how, std::vector<LostHold>& lost) {
  // Such a hold was reported as lost when its connection closed.
  if (!hold.ended_with_session()) lost.push_back({hold, how});
}

}  // namespace

const char* NameOf(Loss how) {
  switch (how) {
    case Loss::kForced:
      return "forced";
    case Loss::kEvicted:
      return "evicted";
    case Loss::kFlushed:
      return "flushed";
    case Loss::kSession:
      return "session";
    case Loss::kUndelivered:
      return "undelivered";
    case Loss::kExpired:
      break;
  }
  return "expired";
}

HoldSetEvents EventsOf(const Lock* lock, const HoldSet& held, std::optional<Instant> now) {
  HoldSetEvents result{.event = LockEvent::kAcquired, .lost = {}};
  if (lock == nullptr) return result;
  // A lock is never granted to others before its holds have ended.
  if (Replaces(lock, held)) {
    for (const Hold& hold : lock->holds(Lock::Order::kByToken)) {
      if (hold.owner != held.hold.owner) Add(hold, Loss::kExpired, result.lost);
    }
  }
  const std::optional<Hold> own = lock->Find(held.hold.owner);
  if (!own.has_value()) return result;
  if (own->token < held.hold.token) {
    // A hold that goes on under a larger token keeps the time of its first grant.
    const bool has_ended = now.has_value()
                               ? !own->LiveAt(*now)
                               : own->since != held.hold.since && own->end < held.hold.since;
    if (has_ended) Add(*own, Loss::kExpired, result.lost);
  } else if (own->token > held.hold.token) {  // the hold before an upgrade is restored
    Add(*own, Loss::kUndelivered, result.lost);
    result.event.reset();
  } else {
    const bool same = lock->mode() == held.mode && *own == held.hold;
    result.event = same ? std::nullopt : std::optional(LockEvent::kTouched);
  }
  return result;
}

std::vector<LostHold> HoldsLostWith(const Hold& hold, Loss how) {
  std::vector<LostHold> lost;
  Add(hold, how, lost);
  return lost;
}

std::vector<LostHold> HoldsLostWith(const Lock& lock, const HoldsExpired& expired) {
  std::vector<LostHold> lost;
  lost.reserve(lock.size() - lock.CountBlocking(expired.before));
  for (const Hold& hold : lock.holds(Lock::Order::kByBlocksUntil)) {
    if (hold.BlocksAt(expired.before)) break;
    Add(hold, Loss::kExpired, lost);
  }
  return lost;
}

std::vector<LostHold> HoldsLostWith(const Lock& lock, const SessionsEnded& ended) {
  std::vector<LostHold> lost;
  lost.reserve(ended.owners.size());
  for (const Owner owner : ended.owners) {
    const std::optional<Hold> hold = lock.Find(owner);
    if (hold.has_value() && hold->LiveAt(ended.at)) Add(*hold, Loss::kSession, lost);
  }
  return lost;
}

std::vector<LostHold> HoldsLostWith(const Lock& lock, Loss live_ones, Instant now) {
  std::vector<LostHold> lost;
  for (const Hold& hold : lock.holds(Lock::Order::kByToken)) {
    Add(hold, hold.LiveAt(now) ? live_ones : Loss::kExpired, lost);
  }
  return lost;
}

}  // namespace turnstile
