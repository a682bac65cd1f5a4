// The server's one token clock, and when this server issues.
//
// The floor noted when the server starts to issue is replicated, and written to the AOF, as a fact:
// at once if this server knows of any lock or floor, and again whenever a copy of the data is made;
// otherwise before the first grant. So a server without locks writes nothing.

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

  // Must be called once, when the module is loaded.
  void ProcessStarted(FineInstant now) { clock_.ProcessStarted(now); }

  // The clock to decide with. The first call after a start or a promotion notes the floor and
  // begins the grace.
  const TokenClock& Issuing(FineInstant now);

  // The last millisecond of the grace, if there is one. Depends on turnstile.failover-grace-ms.
  std::optional<Instant> GraceEnd() const;
  Grace GraceAt(Instant now) const;
  // The time left until the grace ends; zero if it has ended.
  Millis GraceLeft(Instant now) const;

  // Observes a token that was granted here, loaded, restored or replicated.
  void Observe(Token token) { clock_.Observe(token); }

  // From now on this server may issue tokens for locks for which another node of the cluster has
  // issued.
  void OnSlotsArrived(FineInstant now);
  // Another node reports its clock. Affects ours only if slots arrived recently: a node that is not
  // involved in a move must not get a lead from it. Readings too far ahead are ignored: nobody has
  // to prove to be a node of the cluster, unless its bus is protected by TLS.
  void OnPeerClock(ClockReading reading, FineInstant now);

  // This server has become a replica: it issues nothing until it is promoted.
  void StopIssuing();

  // The floor that must be replicated before a grant of `token`, if any: the grant raises the clock
  // past it.
  std::optional<Token> TakeFloorBefore(Token token, FineInstant now);

  // A copy of the data that may not contain the clock is about to be made (an AOF is rewritten, a
  // replica attaches): if the clock leads the wall clock, the floor must be replicated once more.
  void ReplicateFloorSoon(FineInstant now);
  bool has_floor_to_replicate() const { return floor_to_replicate_; }
  // The floor to replicate now, if any.
  std::optional<Token> TakeFloorToReplicate(FineInstant now);

  // The reading of the clock to write into a file; nothing if the clock does not lead the wall
  // clock or if no lock was ever known.
  std::optional<Token> ToSave(FineInstant now) const;

  // Whether a start has set the clock ahead and other nodes of the cluster have not been informed
  // yet.
  bool has_unannounced_start() const { return unannounced_start_; }
  bool TakeUnannouncedStart() { return std::exchange(unannounced_start_, false); }

  bool issuing() const { return issuing_since_.has_value(); }
  const TokenClock& clock() const { return clock_; }

 private:
  const Settings& settings_;
  TokenClock clock_;
  bool unannounced_start_ = false;
  bool floor_to_replicate_ = false;
  std::optional<Instant> issuing_since_;
  std::optional<FineInstant> floor_replicated_;  // when a grant last replicated a floor
  RemoteClock peers_;
  std::optional<FineInstant> slots_arrived_;
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_TOKEN_ISSUER_H_
