// The clock that fencing tokens are read from.
//
// Rejected: a counter. A counter is a key that FLUSHALL, eviction, a restart without persistence
// or a failover that lost writes can set back, and then tokens repeat; and one counter a lock name
// leaks a key for every name ever used. A hybrid clock needs no key: a token is the wall clock in
// microseconds, or one more than the last token if that is larger. What was forgotten is covered
// by time having passed, and by a margin that is added whenever a server starts to issue.
//
// One clock serves the whole server, so tokens of one lock rise but are not consecutive.

#ifndef TURNSTILE_CORE_TOKEN_CLOCK_H_
#define TURNSTILE_CORE_TOKEN_CLOCK_H_

#include <optional>

#include "core/types.h"

namespace turnstile {

// While the clock leads the wall clock by this much, starting to issue adds no margin: servers that
// restart in a loop must not run away from the wall clock.
inline constexpr Millis kLargestLeadForMargin = std::chrono::minutes{10};

// What another server tells of its clock: where it stands, which is where its next token comes
// from, and its wall clock in microseconds.
struct ClockReading {
  Token last;
  Token wall;
};

// What is known of the clocks of other servers: the furthest readings that came from one. From them
// one knows what has been issued later, at most: a wall clock goes on as ours does, and nobody
// issues more than a token in two microseconds, so that a lead over the wall clock melts away. A
// few tokens may have been issued while the message was on its way. A reading that is old is
// forgotten: a wall clock that was wrong then may be right now.
class RemoteClock {
 public:
  // Little: a node that gets a slot adds it to what others, who got slots of it, have added. With
  // this the lead melts faster than slots can be moved.
  static constexpr Millis kOnTheWay{1};
  static constexpr Millis kForgottenAfter = std::chrono::minutes{10};

  void Observe(ClockReading reading, FineInstant now);
  // What the others have issued by now at most; zero if nothing is known.
  Token AtMost(FineInstant now) const;

 private:
  // A value that grows with time.
  struct Growing {
    uint64_t value = 0;
    FineInstant since{};

    uint64_t At(FineInstant now, uint64_t micros_for_one) const;
  };
  static constexpr uint64_t kMicrosForToken = 2;

  Growing last_;
  Growing wall_;
};

class TokenClock {
 public:
  // The token that a grant at `now` gets, or nothing when tokens are used up. Issues nothing by
  // itself: the grant that uses the token is a fact, and every fact is shown to Observe.
  std::optional<Token> Next(FineInstant now) const;

  // Raises the clock to `token`, which was granted here, loaded, restored or replicated.
  void Observe(Token token);

  // Called when this server starts to issue: at its start and at its promotion. The clock becomes
  // max(last, now) + margin; the margin covers tokens that this server never heard of.
  // Returns the new value, below which this server will issue nothing.
  Token StartIssuing(FineInstant now, Millis margin);

  // Called when this server, which issues already, comes to issue in another's place, of which
  // `remote` is known: the clock becomes at least now + margin, and more than the other's. Unlike a
  // start this adds nothing to a lead that is there: slots of a cluster come by the thousand.
  // Returns whether that raised the clock.
  bool TakePlace(FineInstant now, Millis margin, const RemoteClock& remote);

  // For other servers.
  ClockReading Read(FineInstant now) const;

  // The highest token issued or seen; zero if none.
  Token last() const { return last_; }

  // How far the clock is ahead of the wall clock; zero if it is not.
  Micros LeadAt(FineInstant now) const;

 private:
  Token last_;
};

// How far `token` is ahead of the wall clock; zero if it is not.
Micros LeadOf(Token token, FineInstant now);

// Whether a client may ask for a token of at least `floor`: it pushes the clock as far.
inline constexpr Millis kLargestFloorLead = std::chrono::minutes{10};
bool MayBeFloor(Token floor, FineInstant now);

// Whether a client may bring this token in, by RESTORE, or another node of a cluster: one that
// leads the wall clock by more than an hour is taken for forged, because it could push the clock to
// its end.
inline constexpr Millis kLargestRestoredLead = std::chrono::hours{1};
bool MayBeRestored(Token token, FineInstant now);

}  // namespace turnstile

#endif  // TURNSTILE_CORE_TOKEN_CLOCK_H_
