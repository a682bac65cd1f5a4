#include "core/news.h"

namespace turnstile {
namespace {

// See AfterSession: such a hold has been told as lost when its connection closed.
bool WasTold(const Hold& hold) { return hold.end == kMinInstant; }

void Add(const Hold& hold, Loss how, std::vector<Lost>& lost) {
  if (!WasTold(hold)) lost.push_back({hold, how});
}

}  // namespace

HeldNews NewsOf(const Lock* lock, const Held& held) {
  HeldNews result{.news = News::kAcquired};
  if (lock == nullptr) return result;
  // Nobody gets a lock before its holders' time is over.
  if (Replaces(lock, held)) {
    for (const Hold& hold : lock->holds(Lock::Order::kByToken)) {
      if (hold.owner != held.hold.owner) Add(hold, Loss::kExpired, result.lost);
    }
  }
  const std::optional<Hold> own = lock->Find(held.hold.owner);
  if (!own.has_value()) return result;
  if (own->token < held.hold.token) {
    if (own->end < held.hold.since) Add(*own, Loss::kExpired, result.lost);
  } else if (own->token > held.hold.token) {  // what an upgrade left behind is back
    Add(*own, Loss::kUndelivered, result.lost);
    result.news = News::kNone;
  } else {
    const bool same = lock->mode() == held.mode && *own == held.hold;
    result.news = same ? News::kNone : News::kTouched;
  }
  return result;
}

std::vector<Lost> LostWith(const Hold& hold, Loss how) {
  std::vector<Lost> lost;
  Add(hold, how, lost);
  return lost;
}

std::vector<Lost> LostWith(const Lock& lock, const Expired& expired) {
  std::vector<Lost> lost;
  lost.reserve(lock.size() - lock.KeepingOut(expired.before));
  for (const Hold& hold : lock.holds(Lock::Order::kByClosing)) {
    if (hold.KeepsOutAt(expired.before)) break;
    Add(hold, Loss::kExpired, lost);
  }
  return lost;
}

std::vector<Lost> LostWith(const Lock& lock, const SessionsEnded& ended) {
  std::vector<Lost> lost;
  lost.reserve(ended.owners.size());
  for (const Owner owner : ended.owners) {
    const std::optional<Hold> hold = lock.Find(owner);
    if (hold.has_value() && hold->LiveAt(ended.at)) Add(*hold, Loss::kSession, lost);
  }
  return lost;
}

std::vector<Lost> LostWith(const Lock& lock, Loss live_ones, Instant now) {
  std::vector<Lost> lost;
  for (const Hold& hold : lock.holds(Lock::Order::kByToken)) {
    Add(hold, hold.LiveAt(now) ? live_ones : Loss::kExpired, lost);
  }
  return lost;
}

}  // namespace turnstile
