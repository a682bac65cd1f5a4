// What a fact means to subscribers of a lock's events: a holder that wants to know whether it has
// lost the lock, or an operator at a console.
//
// Events depend only on the fact and on the lock as it was before, so a replica publishes the same
// events as its primary. Where the time of the fact is known, it decides whether a hold had ended;
// without it a hold that is granted anew in the millisecond of its first grant, after the clock was
// set back, counts as one that goes on.

#ifndef TURNSTILE_CORE_LOCK_EVENTS_H_
#define TURNSTILE_CORE_LOCK_EVENTS_H_

#include <optional>
#include <vector>

#include "core/lock.h"
#include "core/types.h"

namespace turnstile {

// A hold that its owner did not give up, and why it has ended. The owner is a view into the lock.
struct LostHold {
  Hold hold;
  Loss how;
};

// For example "expired": how events and messages name the cause.
const char* NameOf(Loss how);

// What happens to a lock, as subscribers of keyspace events see it.
enum class LockEvent : uint8_t { kAcquired, kTouched, kReleased, kLost };

// The events of applying `held` to `lock` (null: no lock). The losses, which are holds that must
// have ended for the fact to be true, are published before the event. `now`: when it was decided,
// if that is known.
struct HoldSetEvents {
  std::optional<LockEvent> event;
  std::vector<LostHold> lost;
};
HoldSetEvents EventsOf(const Lock* lock, const HoldSet& held, std::optional<Instant> now);

// What is lost with a hold that is removed as ended, by facts about many holds, or with a lock that
// is removed at `now`. Holds that ended with their session and lingered are not included: their
// loss was published when the connection closed.
std::vector<LostHold> HoldsLostWith(const Hold& hold, Loss how);
std::vector<LostHold> HoldsLostWith(const Lock& lock, const HoldsExpired& expired);
std::vector<LostHold> HoldsLostWith(const Lock& lock, const SessionsEnded& ended);
std::vector<LostHold> HoldsLostWith(const Lock& lock, Loss live_ones, Instant now);

}  // namespace turnstile

#endif  // TURNSTILE_CORE_LOCK_EVENTS_H_
