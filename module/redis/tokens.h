// The server's one token clock, and when it starts to issue.

#ifndef TURNSTILE_REDIS_TOKENS_H_
#define TURNSTILE_REDIS_TOKENS_H_

#include <algorithm>
#include <optional>
#include <utility>

#include "core/decide.h"
#include "core/token_clock.h"
#include "core/types.h"

namespace turnstile {

class ServerTokens {
 public:
  // The clock to decide with. The first call after a start or a promotion adds the margin and
  // begins the grace.
  const TokenClock& Issuing(FineInstant now);

  // The last moment of the grace. Follows turnstile.failover-grace-ms.
  Instant GraceEnd() const;
  Grace GraceAt(Instant now) const { return now <= GraceEnd() ? Grace::kOn : Grace::kOver; }
  // How long from now; zero if it is over.
  Millis GraceLeft(Instant now) const { return std::max(GraceEnd() - now, Millis{0}); }

  // A token that was granted here, loaded, restored or replicated.
  void Observe(Token token) { clock_.Observe(token); }

  // From now on this server may issue for locks for which another node of the cluster has issued.
  void SlotsCame(FineInstant now);
  // Another node tells where its clock stands. Raises ours only if slots came a moment ago: who has
  // nothing to do with a move must not lead for it.
  void HearFromNode(ClockReading reading, FineInstant now);

  // The server is a replica now: it issues nothing until it is promoted.
  void StopIssuing();

  // A copy of the data is about to leave (an AOF is rewritten, a replica syncs) that does not carry
  // the clock: while it leads the wall clock, the floor must be told once more.
  void TellFloorAgain(FineInstant now);

  // The floor that replicas and the AOF have not been told yet, if any; the caller tells them.
  std::optional<Token> TakeUntoldFloor();

  // Whether the clock was set ahead by a start, and other nodes of a cluster do not know yet.
  bool has_untold_start() const { return untold_start_; }
  bool TakeUntoldStart() { return std::exchange(untold_start_, false); }

  bool issuing() const { return issuing_; }
  bool has_untold_floor() const { return untold_floor_.has_value(); }
  const TokenClock& clock() const { return clock_; }

 private:
  void TellFloorSoon(FineInstant now);

  TokenClock clock_;
  bool issuing_ = false;
  bool untold_start_ = false;
  Instant issuing_since_ = kMinInstant;
  std::optional<Token> untold_floor_;
  FineInstant told_at_{};  // when a floor was told last because slots came
  RemoteClock nodes_;
  FineInstant slots_came_{};
};

ServerTokens& Tokens();

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_TOKENS_H_
