// One lock: who holds it, and the two functions that every change goes through.
//
// The way of a request is one-way:
//
//     Decide(place, request, now) -> Decision{outcome, change} -> Apply(lock, change)
//
// *Deciding* looks and changes nothing; it needs the time and the token clock. *Applying* carries
// out a change that was decided, here or elsewhere, and needs neither. A change is a fact: it names
// the owner, the token and the absolute end of the lease, never a request such as "ten seconds
// more". The primary decides, applies and replicates the same fact; a replica and the AOF only
// apply. So what was replicated is what was applied, by construction, and a replica whose clock is
// off cannot come to another result.
//
// Leases. A hold ends by itself when its lease is over, so a crashed holder blocks nobody for ever.
// The lease stored here decides, not the TTL of the Redis key, which strangers can change: a lock
// whose lease is over is free even while its key still exists. A hold that has ended is never
// revived; its owner is answered as a stranger is.
//
// Owners. The owner string is the proof of ownership. The same owner asking again gets the token
// it already has and a lease that starts anew, so a caller whose reply was lost can simply ask
// again.
//
// Plain locks. A string key counts as a lock held by its value, under no token, until it goes or
// its TTL is over: clients of `SET key value NX PX` and our own keep each other out while a fleet
// changes over. As with leases, the time given here decides: the server's own idea of what has
// expired can be a moment older.

#ifndef TURNSTILE_CORE_LOCK_H_
#define TURNSTILE_CORE_LOCK_H_

#include <optional>
#include <string_view>
#include <variant>

#include "core/request.h"
#include "core/token_clock.h"
#include "core/types.h"

namespace turnstile {

// The value of a lock's key: one hold, its owner's bytes behind it in the same allocation.
class Lock {
 public:
  // The caller owns the result and ends it with `delete`, on any thread.
  static Lock* Make(const Hold& hold);

  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  // The owner in it is a view into this lock.
  Hold hold() const;

  // Moves the hold to the values of `hold`, which has the same owner.
  void Renew(const Hold& hold);

  static void operator delete(void* memory);

 private:
  explicit Lock(const Hold& hold);
  char* owner_bytes();
  const char* owner_bytes() const;

  Token token_;
  Instant since_;
  Instant end_;
  uint8_t owner_size_less_one_;  // 1 to 256 bytes fit into one
};

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

// Facts. Those that are not about one key (see fact.h) are no business of a lock.
struct Held {  // this owner holds the lock, and nobody else
  Hold hold;
};
struct Freed {  // its owner gave it up: nobody holds the lock any more
  Owner owner;
};
struct PlainFreed {};  // the string is gone
struct PlainExtended {
  Instant end;
};
using Change = std::variant<Held, Freed, PlainFreed, PlainExtended>;

enum class Outcome {
  kGranted,      // a new hold under a new token
  kHeldAlready,  // the same owner asked again: the same token, the lease starts anew
  kReleased,
  kTouched,
  kFree,          // nobody holds it
  kLeaseEnded,    // the asker held it once; its lease ran out, though the key is still there
  kHeldByOther,   // somebody else holds it
  kOthersWait,    // nobody holds it, but others came first
  kTokensUsedUp,  // it could be granted, but the token clock is at its end
};

struct Decision {
  Outcome outcome;
  std::optional<Change> change;  // absent: nothing happens
};

// Who came before this request and still waits for the lock.
enum class Ahead { kNobody, kOthers };

Decision Decide(const Place& place, const AcquireRequest& request, Ahead ahead, FineInstant now,
                const TokenClock& clock);
Decision Decide(const Place& place, const ReleaseRequest& request, Instant now);
Decision Decide(const Place& place, const TouchRequest& request, Instant now);

// For a release that was decided elsewhere and must be obeyed: a moment at which no lease is over.
inline constexpr Instant kBeforeAnyEnd = kMinInstant;

// The token under which the lock is held at `now`, if it is held under one.
std::optional<Token> CurrentToken(const Place& place, Instant now);

// Whether the lock is held at `now` under exactly this token.
bool IsCurrent(const Place& place, Token token, Instant now);

// Who keeps others out at `now`, and until when, which is not before `now`. Absent exactly when a
// stranger's request would be granted if nobody waited.
struct Holder {
  Owner owner;  // empty, which no owner is, if a plain lock's value is too long to be one
  Instant end;
};
std::optional<Holder> HolderOf(const Place& place, Instant now);

// Carries out `held` on a key that stores `lock` (null: no lock). Returns the lock to store: either
// `lock`, changed where it is, or a new one that takes its place; then `lock` still belongs to the
// caller (a Redis key frees it when the new one is stored).
Lock* Apply(Lock* lock, const Held& held);

}  // namespace turnstile

#endif  // TURNSTILE_CORE_LOCK_H_
