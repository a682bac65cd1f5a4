// The clock that fencing tokens are read from.
//
// Rejected: a counter. A counter is a key that FLUSHALL, eviction, a restart without persistence
// or a failover that lost writes can set back, and then tokens repeat; and one counter a lock name
// leaks a key for every name ever used. A hybrid clock needs no key: a token is the wall clock in
// microseconds, or one more than the last token if that is larger. What was forgotten is covered
// by time having passed, and by a margin that is added whenever a server starts to issue.
//
// One clock serves the whole server, so tokens of one lock rise but are not consecutive.
//
// Noted floors. When a server begins to issue, or to issue in another's place, it notes a floor:
// every later token is above it. A floor is no token: the clock is raised past it by the first
// grant, and a server that grants nothing has nothing to tell.

#ifndef TURNSTILE_CORE_TOKEN_CLOCK_H_
#define TURNSTILE_CORE_TOKEN_CLOCK_H_

#include <optional>

#include "core/types.h"

namespace turnstile {

// What a start adds to the highest token known. More than a server that dies can have issued
// between the last token that reached its successor and its last one, if it led the wall clock then
// and so counted on by one a token; and little, so that starts in a row hardly add up.
inline constexpr Millis kStartStep{3000};

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

  // The process started at `now`; a promotion is no start of a process.
  void ProcessStarted(FineInstant now) { process_start_ = now; }

  // The value of turnstile.token-margin-ms.
  void SetMargin(Millis margin) { margin_ = margin; }
  Millis margin() const { return margin_; }

  // Called when this server starts to issue: at its start and at its promotion. Notes and returns
  // the floor max(highest token known + kStartStep, now + margin); the margin covers tokens that
  // this server never heard of.
  Token StartIssuing(FineInstant now, Millis margin);

  // Called when this server, which issues already, comes to issue in another's place, of which
  // `peers` tells: notes a floor of at least now + margin that is above the other's clock. Nothing
  // is added to a lead that is there: slots of a cluster come by the thousand.
  void AdvanceBeyond(const RemoteClock& peers, FineInstant now);

  // Notes that every later token must be above `floor`.
  void NoteFloor(Token floor);
  // The server is demoted: nothing was issued under the noted floor, so it means nothing any more.
  void ForgetFloor() { floor_ = {}; }

  // The noted floor that a grant of `token` raises the clock past, if it does.
  std::optional<Token> FloorPassedBy(Token token) const;

  // For other servers.
  ClockReading Read(FineInstant now) const;

  // The highest token issued or seen; zero if none.
  Token last() const { return last_; }
  // Where the clock stands: every later token is above this.
  Token reading() const { return last_ > floor_ ? last_ : floor_; }

  // How far the clock is ahead of the wall clock; zero if it is not.
  Micros LeadAt(FineInstant now) const;

  // The highest FLOOR that a client may ask for: what it asks for, the clock is raised to. In
  // ordinary times half a margin ahead, so that the other half still covers lost writes; and just
  // after a start as far as a quorum of servers that started together needs to agree on a token.
  Token HighestFloor(FineInstant now) const;

  // Whether a client may bring in a lock with this token by RESTORE, or another node of a cluster
  // tell that its clock stands there. A token far ahead could push the clock to its end.
  bool MayAdopt(Token token, FineInstant now) const;

 private:
  Token last_;
  Token floor_;
  Millis margin_{0};
  FineInstant process_start_{};
};

// How far `token` is ahead of the wall clock; zero if it is not.
Micros LeadOf(Token token, FineInstant now);

// How far ahead of the wall clock a primary adopts a token from a client or from another node,
inline constexpr Millis kLargestAdoptedLead = std::chrono::minutes{10};
// and how far a replica, which cannot refuse a RESTORE: its primary may have sent it, whose clock
// may be behind the replica's. Beyond that it takes the lock and leaves its clock alone.
inline constexpr Millis kLargestReplicatedLead = std::chrono::minutes{20};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_TOKEN_CLOCK_H_
