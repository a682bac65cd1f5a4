// The rules: who gets a lock, who may release and prolong it.
//
// Leases. A hold ends by itself when its lease is over, so a crashed holder blocks nobody for ever.
// The lease stored in the lock decides, not the TTL of the Redis key, which strangers can change: a
// lock whose leases are over is free even while its key still exists. A hold that has ended is
// never revived; its owner is answered as a stranger is. A hold that lingers has ended for its
// owner, and still keeps others out.
//
// Owners. The owner string is the proof of ownership. The same owner asking again gets the token
// it already has and a lease that starts anew, so a caller whose reply was lost can simply ask
// again.
//
// The one grant rule. A request is granted when it is compatible with all other holders and with
// everybody who came before it and still waits. Exclusive requests are compatible with nobody,
// shared ones with shared ones. A request with a limit is compatible with others of its kind while
// holders, those ahead of it and itself are not more than any of them allows. However it shares the
// lock, there is also a largest number of holders, which bounds what one lock costs the server.
//
// Plain locks. A string key counts as a lock held by its value, under no token, until it goes or
// its TTL is over: clients of `SET key value NX PX` and our own keep each other out while a fleet
// changes over. As with leases, the time given here decides: the server's own idea of what has
// expired can be a moment older.

#ifndef TURNSTILE_CORE_DECIDE_H_
#define TURNSTILE_CORE_DECIDE_H_

#include <limits>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "core/lock.h"
#include "core/request.h"
#include "core/token_clock.h"
#include "core/types.h"

namespace turnstile {

// A string that somebody wrote with SET, taken as a lock.
struct PlainLock {
  std::string_view value;
  Instant end;  // kMaxInstant if it has no TTL
};

// What a key holds, as far as locks are concerned; at most one of the two.
struct Place {
  const Lock* lock = nullptr;
  std::optional<PlainLock> plain;
};

// Those who came before a request and still wait for the lock, as far as it matters to it.
struct Crowd {
  size_t size = 0;
  bool all_shared = true;
  bool all_limit = true;
  uint32_t least_limit = std::numeric_limits<uint32_t>::max();

  void Add(Mode mode, uint32_t limit);
  // Those of whom nothing is known but that nobody may pass them.
  static Crowd Incompatible() { return {.size = 1, .all_shared = false, .all_limit = false}; }
  // Nobody can be compatible with it, whoever else joins.
  bool IsMixed() const { return !all_shared && !all_limit; }
};

// One of the locks that a request asks for.
struct Site {
  Place place;
  Crowd ahead;
};

enum class Outcome {
  kGranted,      // a new hold under a new token
  kHeldAlready,  // the same owner asked again: the same token, the lease starts anew
  kDowngraded,   // an exclusive holder is a shared one now, under the same token
  kUpgraded,     // the only shared holder is an exclusive one now, under a new token
  kReleased,
  kTouched,
  kFree,             // nobody holds it
  kLeaseEnded,       // the asker held it once; its lease ran out, though the key is still there
  kLingerCut,        // the asker's hold had ended and lingered: now it does so no longer
  kHeldByOther,      // somebody else holds it
  kOthersWait,       // others came first
  kGrace,            // nobody may become a holder yet
  kOtherMode,        // the asker holds it in a mode that cannot become the one it asks for
  kHoldsSome,        // the asker holds some of the locks, but not all
  kHoldsApart,       // the asker holds all of the locks, but not under one token
  kUpgradesSeveral,  // an upgrade of several locks at once
  kCountedOut,       // the asker's hold cannot be counted any higher
  kFloorTooHigh,     // the floor that the asker names is further ahead than the clock allows
  kTokensUsedUp,     // it could be granted, but the token clock is at its end
};

// The answer to LOCK.ACQUIRE, the same for all its locks.
struct Admission {
  Outcome outcome;
  Token token;  // meaningless unless granted

  bool granted() const { return outcome <= Outcome::kUpgraded; }
  // It has a new token.
  bool is_new() const { return outcome == Outcome::kGranted || outcome == Outcome::kUpgraded; }
  // Waiting can help.
  bool busy() const {
    return outcome == Outcome::kHeldByOther || outcome == Outcome::kOthersWait ||
           outcome == Outcome::kGrace;
  }
};

// Whether a start or a promotion of this server is so short ago that holders it has not heard of
// may still be at work. Then those it knows keep what they have, and nobody gets anything new.
enum class Grace { kOver, kOn };

// What the server's settings and its state say about grants.
struct GrantRules {
  Grace grace = Grace::kOver;
  // A newcomer does not join so many holders. Whoever holds the lock keeps what it has.
  size_t max_holders = std::numeric_limits<size_t>::max();
};

// All of `sites` or none; there is at least one.
Admission Decide(std::span<const Site> sites, const AcquireRequest& request, FineInstant now,
                 const TokenClock& clock, const GrantRules& rules = {});

// What a granted request does to one of its locks.
Held HeldBy(const Place& place, const AcquireRequest& request, Token token, Instant now);

// Whether others that hold the lock or wait for it keep the request waiting.
bool IsBlocked(const Site& site, const AcquireRequest& request, Instant now,
               const GrantRules& rules = {});

// Whether the request is a shared holder's for an exclusive hold; and that holder's hold.
bool IsUpgrade(const Place& place, const AcquireRequest& request, Instant now);
std::optional<Hold> HoldToUpgrade(const Place& place, const AcquireRequest& request, Instant now);

struct Decision {
  Outcome outcome;
  std::optional<Change> change;  // absent: nothing happens
};

Decision Decide(const Place& place, const ReleaseRequest& request, Instant now);
Decision Decide(const Place& place, const TouchRequest& request, Instant now);

// The connections to which the holds of `owners` were bound have closed. Returns the owners whose
// holds end by that, to be named in SessionsEnded{now, owners}; the others have ended already.
std::vector<Owner> DecideSessionEnd(const Place& place, std::span<const Owner> owners, Instant now);

// A grant under `token` never reached its caller. If it was an upgrade, what it upgraded stays.
Decision DecideTakeBack(const Place& place, Owner owner, Token token,
                        const std::optional<Hold>& upgraded, Instant now);

// For a release that was decided elsewhere and must be obeyed: a moment at which no lease is over.
inline constexpr Instant kBeforeAnyEnd = kMinInstant;

// Holds that keep nobody out any more and that `next` would leave in the lock. They must be
// removed, by the fact that is returned, before `next` is carried out; there may be no lock then.
std::optional<Expired> OverdueBefore(const Place& place, const Change& next, Instant now);
std::optional<Expired> OverdueBefore(const Place& place, const Held& next, Instant now);
// All such holds, if there are any.
std::optional<Expired> Overdue(const Place& place, Instant now);

// The hold with the highest token among those that are live at `now`; none of a plain lock, which
// has no token.
std::optional<Hold> CurrentHold(const Place& place, Instant now);
std::optional<Token> CurrentToken(const Place& place, Instant now);

// Whether the lock is held at `now` under exactly this token.
bool IsCurrent(const Place& place, Token token, Instant now);

// How many keep others out at `now`; for a plain lock, one. None exactly when any request would be
// granted if nobody waited.
size_t CountHolders(const Place& place, Instant now);

// The first moment from `now` on at which a hold stops keeping others out; none if no hold does by
// itself.
std::optional<Instant> NextEnd(const Place& place, Instant now);

// How many hold the lock live, and how long holds that have ended go on keeping others out; zero if
// none does. Looks at each hold.
struct Occupancy {
  size_t live = 0;
  Millis linger_left{0};
};
Occupancy OccupancyOf(const Place& place, Instant now);

// The mode in which the lock is held; a plain lock is exclusive.
Mode ModeOf(const Place& place);

}  // namespace turnstile

#endif  // TURNSTILE_CORE_DECIDE_H_
