// The rules: who is granted a lock, and who may release or renew it.
//
// Leases. A hold ends by itself when its lease ends, so a crashed holder cannot block others for
// ever. The lease stored in the lock decides, not the TTL of the Redis key, which other clients can
// change: a lock whose leases have all ended is free even while its key still exists. A hold that
// has ended is never revived; its owner gets the same answer as any client that does not hold the
// lock. A hold that lingers has ended for its owner but still blocks others.
//
// Owners. The owner string is the proof of ownership. If the same owner asks again, it gets the
// token it already has and a new lease, so a caller whose reply was lost can simply repeat the
// request.
//
// The one grant rule. A request is granted if it is compatible with all other holders and with all
// waiters ahead of it. An exclusive request is compatible with no other; shared requests are
// compatible with each other. A request with a limit is compatible with other holders and waiters
// of its kind as long as the weights of holders, waiters ahead and itself, which are 1 unless the
// requests say otherwise, together do not exceed the limit of any of these waiters or its own. In
// every mode there is also a maximum number of holders, which bounds what one
// lock costs the server.
//
// Plain locks. A string key counts as a lock held by its value, without a token, until the key is
// removed or its TTL ends: clients that use `SET key value NX PX` and clients of Turnstile exclude
// each other while a deployment migrates. As with leases, the time passed in here decides: the time
// that the server itself uses for expiry can be slightly older.

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

// A string that some client wrote with SET, treated as a lock.
struct PlainLock {
  std::string_view value;
  std::optional<Instant> end;  // absent: it has no TTL

  bool LiveAt(Instant now) const { return !end.has_value() || now <= *end; }
};

// What a key holds, as far as locks are concerned: a lock, a plain lock or neither.
struct KeyState {
  const Lock* lock = nullptr;
  std::optional<PlainLock> plain;
};

// The waiters that arrived before a request and are still waiting for the lock, as far as they
// matter to that request.
struct WaitersAhead {
  size_t size = 0;
  bool all_shared = true;
  bool all_limit = true;
  uint32_t least_limit = std::numeric_limits<uint32_t>::max();
  uint64_t weight = 0;  // of those with a limit

  void Add(const AcquireRequest& request);
  // Stands for waiters that no request may overtake.
  static WaitersAhead Incompatible() {
    return {.size = 1, .all_shared = false, .all_limit = false};
  }
  // No request can be compatible with these waiters, whatever others are added.
  bool IsMixed() const { return !all_shared && !all_limit; }
};

// One of the locks that a request asks for: its key state and the waiters ahead of the request.
struct LockView {
  KeyState state;
  WaitersAhead ahead;
};

enum class Outcome {
  kGranted,      // a new hold under a new token
  kHeldAlready,  // the same owner asked again: the same token, a new lease
  kDowngraded,   // an exclusive holder became a shared one, under the same token
  kUpgraded,     // the only shared holder became an exclusive one, under a new token
  kReleased,
  kTouched,
  kFree,             // nobody holds it
  kLeaseEnded,       // the caller's lease has ended, though the key still exists
  kLingerCut,        // the caller's hold had ended and lingered; it no longer does
  kHeldByOther,      // another owner holds it
  kOthersWait,       // others are waiting ahead
  kGrace,            // nobody may become a holder yet
  kOtherMode,        // the caller's mode cannot be changed to the one it asks for
  kOtherWeight,      // the caller's hold has another weight than it asks for
  kHoldsSome,        // the caller holds some of the locks, but not all
  kHoldsApart,       // the caller holds all of the locks, but not under one token
  kUpgradesSeveral,  // an upgrade of several locks at once
  kCountedOut,       // the count of the caller's hold is at its maximum
  kFloorTooHigh,     // the requested floor is further ahead than the clock allows
  kTokensUsedUp,     // it could be granted, but the token clock is at its end
};

// The decision on LOCK.ACQUIRE, the same for all its locks.
struct Admission {
  Outcome outcome;
  Token token;  // valid only if granted

  bool granted() const { return outcome <= Outcome::kUpgraded; }
  // Whether the grant carries a new token.
  bool is_new() const { return outcome == Outcome::kGranted || outcome == Outcome::kUpgraded; }
  // Whether waiting can help.
  bool busy() const {
    return outcome == Outcome::kHeldByOther || outcome == Outcome::kOthersWait ||
           outcome == Outcome::kGrace;
  }
};

// Whether this server was started or promoted so recently that holders it does not know of may
// still be working. During the grace, holders keep what they have and nobody becomes a new holder.
enum class Grace { kOver, kOn };

// What the server's settings and state say about grants.
struct GrantRules {
  Grace grace = Grace::kOver;
  // A request cannot add a holder to a lock that already has this many. Existing holders are not
  // affected.
  size_t max_holders = std::numeric_limits<size_t>::max();
};

// Decides on all of `views`, of which there must be at least one: either all locks are granted or
// none. Changes nothing.
Admission Decide(std::span<const LockView> views, const AcquireRequest& request, FineInstant now,
                 const TokenClock& clock, const GrantRules& rules = {});

// The change that a granted request makes to one of its locks. Its owner and tag are views into the
// request or into the lock.
HoldSet HoldSetBy(const KeyState& state, const AcquireRequest& request, Token token, Instant now);

// What must be true of every grant, whatever rule led to it: it displaces no other owner's hold
// that still blocks others, and exceeds no limit. Checked before a grant is carried out.
bool IsSafeGrant(std::span<const LockView> views, const AcquireRequest& request,
                 const Admission& admission, Instant now);

// Whether other holders or waiters block the request.
bool IsBlocked(const LockView& view, const AcquireRequest& request, Instant now,
               const GrantRules& rules = {});

// Whether a shared holder is asking for an exclusive hold; and that holder's current hold.
bool IsUpgrade(const KeyState& state, const AcquireRequest& request, Instant now);
std::optional<Hold> HoldToUpgrade(const KeyState& state, const AcquireRequest& request,
                                  Instant now);

struct Decision {
  Outcome outcome;
  std::optional<Change> change;  // absent: nothing changes
};

Decision Decide(const KeyState& state, const ReleaseRequest& request, Instant now);
Decision Decide(const KeyState& state, const TouchRequest& request, Instant now);

// Called when the connections that the holds of `owners` were bound to have closed. Returns the
// owners whose holds end because of that, to be named in SessionsEnded{now, owners}. The holds of
// the others have ended already.
std::vector<Owner> DecideSessionEnd(const KeyState& state, std::span<const Owner> owners,
                                    Instant now);

// Takes back a grant under `token` that never reached its caller. If it was an upgrade, the hold
// that was upgraded is restored.
Decision DecideTakeBack(const KeyState& state, Owner owner, Token token,
                        const std::optional<Hold>& upgraded, Instant now);

// Returns a fact that removes the overdue holds that `next` would leave in the lock, if there are
// any. It must be carried out before `next`; afterwards the lock may no longer exist.
std::optional<HoldsExpired> OverdueBefore(const Lock* lock, const Change& next, Instant now);
std::optional<HoldsExpired> OverdueBefore(const Lock* lock, const HoldSet& next, Instant now);
// All overdue holds, if there are any.
std::optional<HoldsExpired> Overdue(const Lock* lock, Instant now);

// The live hold with the highest token at `now`. None for a plain lock, which has no token.
std::optional<Hold> CurrentHold(const KeyState& state, Instant now);
std::optional<Token> CurrentToken(const KeyState& state, Instant now);

// Whether a hold under exactly this token is live at `now`.
bool IsCurrent(const KeyState& state, Token token, Instant now);

// The number of holds that block others at `now`; one for a plain lock. Zero if and only if any
// request would be granted if nobody waited.
size_t CountHolders(const KeyState& state, Instant now);

// The first time from `now` on at which a hold stops blocking others; none if no hold ends by
// itself.
std::optional<Instant> NextEnd(const KeyState& state, Instant now);

// The number of live holds, and for how much longer holds that have ended block others; zero if
// none does. O(number of holds).
struct Occupancy {
  size_t live = 0;
  Millis linger_left{0};
};
Occupancy OccupancyOf(const KeyState& state, Instant now);

// The mode in which the lock is held; kExclusive for a plain lock.
Mode ModeOf(const KeyState& state);

}  // namespace turnstile

#endif  // TURNSTILE_CORE_DECIDE_H_
