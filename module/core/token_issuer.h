// The server's one token clock, and when this server issues.
//
// The floor that it then notes is replicated, and written to the AOF, as a fact: at once if this
// server knows of any lock or floor, and again whenever a copy of the data is made; otherwise
// before the first grant. So a server on which nobody locks writes nothing.

#ifndef TURNSTILE_CORE_TOKEN_ISSUER_H_
#define TURNSTILE_CORE_TOKEN_ISSUER_H_

#include <algorithm>
#include <optional>
#include <utility>

#include "core/decide.h"
#include "core/settings.h"
#include "core/token_clock.h"
#include "core/types.h"

namespace turnstile {

class TokenIssuer {
 public:
  explicit TokenIssuer(const Settings& settings) : settings_(settings) {}

  // To be called once, when the module is loaded.
  void ProcessStarted(FineInstant now) { clock_.ProcessStarted(now); }

  // The clock to decide with. The first call after a start or a promotion notes the floor and
  // begins the grace.
  const TokenClock& Issuing(FineInstant now);

  // The last moment of the grace, if there is one. Follows turnstile.failover-grace-ms.
  std::optional<Instant> GraceEnd() const;
  Grace GraceAt(Instant now) const;
  // How long from now; zero if it is over.
  Millis GraceLeft(Instant now) const;

  // A token that was granted here, loaded, restored or replicated.
  void Observe(Token token) { clock_.Observe(token); }

  // From now on this server may issue for locks for which another node of the cluster has issued.
  void SlotsCame(FineInstant now);
  // Another node tells where its clock stands. Concerns ours only if slots came a moment ago: a
  // node that has nothing to do with a move must not lead for it. Readings too far ahead are
  // ignored: nobody has to prove to be a node of the cluster, unless its bus is protected by TLS.
  void OnPeerClock(ClockReading reading, FineInstant now);

  // The server is a replica now: it issues nothing until it is promoted.
  void StopIssuing();

  // The floor that has to be replicated before a grant of `token`, if any: the grant is what raises
  // the clock past it.
  std::optional<Token> TakeFloorBefore(Token token, FineInstant now);

  // A copy of the data is about to leave (an AOF is rewritten, a replica comes) that may not carry
  // the clock: while it leads the wall clock, the floor must be replicated once more.
  void ReplicateFloorSoon(FineInstant now);
  bool has_floor_to_replicate() const { return floor_to_replicate_; }
  // What to replicate now, if anything.
  std::optional<Token> TakeFloorToReplicate(FineInstant now);

  // Where the clock stands, for a file; nothing if no token leads the wall clock or if no lock was
  // ever known.
  std::optional<Token> ToSave(FineInstant now) const;

  // Whether the clock was set ahead by a start, and other nodes of a cluster do not know yet.
  bool has_untold_start() const { return untold_start_; }
  bool TakeUntoldStart() { return std::exchange(untold_start_, false); }

  bool issuing() const { return issuing_; }
  const TokenClock& clock() const { return clock_; }

 private:
  const Settings& settings_;
  TokenClock clock_;
  bool issuing_ = false;
  bool untold_start_ = false;
  bool floor_to_replicate_ = false;
  Instant issuing_since_ = kMinInstant;
  FineInstant floor_replicated_{};  // when a grant did so last
  RemoteClock peers_;
  FineInstant slots_came_{};
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_TOKEN_ISSUER_H_
