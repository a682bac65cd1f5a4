// The clock that issues fencing tokens.
//
// Rejected: a counter. A counter is a key that FLUSHALL, eviction, a restart without persistence or
// a failover that lost writes can set back, and then tokens repeat; and one counter per lock name
// leaks a key for every name ever used. A hybrid clock needs no key: a token is the wall clock in
// microseconds, or the last token plus one if that is larger. Tokens that were forgotten are
// covered by the time that has passed, and by a margin that is added whenever a server starts to
// issue.
//
// One clock serves the whole server, so the tokens of one lock increase but are not consecutive.
//
// Noted floors. When a server begins to issue, or to issue in place of another, it notes a floor:
// every later token is above it. A floor is not a token: the clock is raised past it by the first
// grant, and a server that grants nothing has nothing to replicate.

#ifndef TURNSTILE_CORE_TOKEN_CLOCK_H_
#define TURNSTILE_CORE_TOKEN_CLOCK_H_

#include <optional>

#include "core/types.h"

namespace turnstile {

// What a start adds to the highest known token. It is more than a failed server can have issued
// between the last token that reached its successor and its last one, if its clock led the wall
// clock and so advanced by one per token. It is small, so that repeated starts hardly add up.
inline constexpr Millis kStartStep{3000};

// What another server reports about its clock: its current reading, above which its next token will
// be, and its wall clock in microseconds.
struct ClockReading {
  Token last;
  Token wall;
};

// What is known about the clocks of other servers: the highest readings received. They give an
// upper bound on what has been issued since: another wall clock advances as ours does, and no
// server issues more than one token every two microseconds, so a lead over the wall clock
// decreases. A few tokens may have been issued while the message was in transit. Old readings are
// forgotten: a wall clock that was wrong then may be right now.
class RemoteClock {
 public:
  // Small: a node that receives a slot adds it to what other nodes added when they received slots.
  // With this value the lead decreases faster than slots can be moved.
  static constexpr Millis kMessageDelay{1};
  static constexpr Millis kForgottenAfter = std::chrono::minutes{10};

  void Observe(ClockReading reading, FineInstant now);
  // An upper bound on the tokens issued by other servers until now; zero if nothing is known.
  Token UpperBound(FineInstant now) const;

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
  // The token that a grant at `now` gets, or nothing if tokens are used up. This does not issue the
  // token: the grant that uses it is a fact, and every fact is passed to Observe.
  std::optional<Token> Next(FineInstant now) const;

  // Raises the clock to `token`, which was granted here, loaded, restored or replicated.
  void Observe(Token token);

  // The process started at `now`. A promotion is not a start of the process.
  void ProcessStarted(FineInstant now) { process_start_ = now; }

  // The value of turnstile.token-margin-ms.
  void SetMargin(Millis margin) { margin_ = margin; }
  Millis margin() const { return margin_; }

  // Called when this server starts to issue: at its start and at its promotion. Notes and returns
  // the floor max(highest token known + kStartStep, now + margin). The margin covers tokens that
  // this server never received.
  Token StartIssuing(FineInstant now, Millis margin);

  // Called when this server, which already issues, starts to issue in place of another, whose clock
  // is described by `peers`. Notes a floor of at least now + margin that is above the other clock.
  // Nothing is added to an existing lead, because slots of a cluster can arrive by the thousand.
  void AdvanceBeyond(const RemoteClock& peers, FineInstant now);

  // Notes that every later token must be above `floor`.
  void NoteFloor(Token floor);
  // The server is demoted. A token issued above the noted floor has raised the clock past it; if
  // there is none, the floor no longer matters.
  void ForgetFloor() { floor_ = {}; }

  // The noted floor that a grant of `token` raises the clock past, if any.
  std::optional<Token> FloorPassedBy(Token token) const;

  // For other servers.
  ClockReading Read(FineInstant now) const;

  // The highest token issued or seen; zero if none.
  Token last() const { return last_; }
  // The current reading of the clock: every later token is above this.
  Token reading() const { return last_ > floor_ ? last_ : floor_; }

  // How far the clock is ahead of the wall clock; zero if it is not.
  Micros LeadAt(FineInstant now) const;

  // The highest FLOOR that a client may request; the clock is raised to what it requests. Normally
  // half a margin ahead, so that the other half still covers lost writes; just after a start, as
  // far as a quorum of servers that started together needs to agree on a token.
  Token HighestFloor(FineInstant now) const;

  // Whether a client may bring in a lock with this token by RESTORE, or another node of a cluster
  // may report this reading of its clock. A token far ahead could push the clock to its end.
  bool MayAdopt(Token token, FineInstant now) const;

 private:
  Token last_;
  Token floor_;
  Millis margin_{0};
  std::optional<FineInstant> process_start_;
};

// How far `token` is ahead of the wall clock; zero if it is not.
Micros LeadOf(Token token, FineInstant now);

// How far ahead of the wall clock a token from a client or from another node may be for a primary
// to adopt it,
inline constexpr Millis kLargestAdoptedLead = std::chrono::minutes{10};
// and for a replica, which cannot refuse a RESTORE: it may come from its primary, whose clock may
// be behind the replica's. Beyond that the replica accepts the lock but does not advance its clock.
inline constexpr Millis kLargestReplicatedLead = std::chrono::minutes{20};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_TOKEN_CLOCK_H_
