#include "core/news.h"

namespace turnstile {
namespace {

// See DecideSessionEnd: such a hold has been told as lost when its connection closed.
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
    for (size_t i = 0; i < lock->size(); ++i) {
      const Hold hold = lock->at(Lock::Order::kByToken, i);
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
  } else if (WasTold(held.hold)) {
    Add(*own, Loss::kSession, result.lost);
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

std::vector<Lost> LostWith(const Lock& lock, Loss live_ones, Instant now) {
  std::vector<Lost> lost;
  for (size_t i = 0; i < lock.size(); ++i) {
    const Hold hold = lock.at(Lock::Order::kByToken, i);
    Add(hold, hold.LiveAt(now) ? live_ones : Loss::kExpired, lost);
  }
  return lost;
}

}  // namespace turnstile
