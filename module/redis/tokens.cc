#include "redis/tokens.h"

#include <utility>

#include "redis/config.h"

namespace turnstile {

const TokenClock& ServerTokens::Issuing(FineInstant now) {
  if (!issuing_) {
    issuing_ = true;
    untold_start_ = true;
    issuing_since_ = ToInstant(now);
    clock_.Observe(nodes_.AtMost(now));
    untold_floor_ = clock_.StartIssuing(now, TokenMargin());
  }
  return clock_;
}

Instant ServerTokens::GraceEnd() const {
  const Millis grace = FailoverGrace();
  return issuing_ && grace > Millis{0} ? issuing_since_ + grace : kMinInstant;
}

void ServerTokens::TellFloorAgain(FineInstant now) {
  if (issuing_ && clock_.LeadAt(now) > Micros{0}) untold_floor_ = clock_.last();
}

void ServerTokens::SlotsCame(FineInstant now) {
  slots_came_ = now;
  if (issuing_ && clock_.TakePlace(now, TokenMargin(), nodes_)) TellFloorSoon(now);
}

void ServerTokens::HearFromNode(ClockReading reading, FineInstant now) {
  nodes_.Observe(reading, now);
  // The message may be slower than the slot. No more than what it says: two nodes that hear of each
  // other must not push each other ahead.
  constexpr Millis kLate{10000};
  const bool just_came = slots_came_ <= now && now < slots_came_ + kLate;
  if (!issuing_ || !just_came || reading.last <= clock_.last()) return;
  clock_.Observe(reading.last);
  TellFloorSoon(now);
}

// Slots come by the thousand, and so do clients that are sent here with ASK: a fact a second is
// enough, as every grant is one too.
void ServerTokens::TellFloorSoon(FineInstant now) {
  constexpr Millis kTellEvery{1000};
  if (told_at_ <= now && now < told_at_ + kTellEvery) return;
  told_at_ = now;
  untold_floor_ = clock_.last();
}

void ServerTokens::StopIssuing() {
  issuing_ = false;
  untold_floor_.reset();
}

std::optional<Token> ServerTokens::TakeUntoldFloor() {
  return std::exchange(untold_floor_, std::nullopt);
}

ServerTokens& Tokens() {
  static constinit ServerTokens tokens;
  return tokens;
}

}  // namespace turnstile
