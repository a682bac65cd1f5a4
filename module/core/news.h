// What a fact is to those who watch a lock: the holder that wants to know whether it lost it, the
// operator at the console.
//
// The news is read off the fact and the lock as it was before, and off nothing else: so a replica
// publishes what its primary did.

#ifndef TURNSTILE_CORE_NEWS_H_
#define TURNSTILE_CORE_NEWS_H_

#include <vector>

#include "core/lock.h"
#include "core/types.h"

namespace turnstile {

// A hold that its owner did not give up, and why it is over. The owner is a view into the lock.
struct Lost {
  Hold hold;
  Loss how;
};

enum class News { kNone, kAcquired, kTouched };

// What `held` is, if it is applied to `lock` (null: no lock). It comes after the losses, which are
// the holds that the fact shows to be over.
struct HeldNews {
  News news = News::kNone;
  std::vector<Lost> lost;
};
HeldNews NewsOf(const Lock* lock, const Held& held);

// What is lost with a hold that is removed as ended, by facts about many holds, or with a lock that
// somebody removes at `now`.
// Nothing for holds whose loss has been told already: those that ended with their session and
// lingered on.
std::vector<Lost> LostWith(const Hold& hold, Loss how);
std::vector<Lost> LostWith(const Lock& lock, const Expired& expired);
std::vector<Lost> LostWith(const Lock& lock, const SessionsEnded& ended);
std::vector<Lost> LostWith(const Lock& lock, Loss live_ones, Instant now);

}  // namespace turnstile

#endif  // TURNSTILE_CORE_NEWS_H_
