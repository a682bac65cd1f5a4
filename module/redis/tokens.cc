#include "redis/tokens.h"

#include <utility>

#include "redis/config.h"

namespace turnstile {

const TokenClock& ServerTokens::Issuing(FineInstant now) {
  if (!issuing_) {
    issuing_ = true;
    issuing_since_ = ToInstant(now);
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

void ServerTokens::SlotsMayCome(FineInstant now, bool tell) {
  if (issuing_ && clock_.TakePlace(now, TokenMargin(), nodes_) && tell) {
    untold_floor_ = clock_.last();
  }
}

void ServerTokens::HearFromNode(ClockReading reading, FineInstant now) {
  nodes_.Observe(reading, now);
  if (issuing_) clock_.Observe(nodes_.AtMost(now));
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
