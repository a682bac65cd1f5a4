#include "core/token_clock.h"

#include <algorithm>

namespace turnstile {
namespace {

// The wall clock as a token value. A clock before 1970 or past the last token is held at the ends
// of the range, so that no arithmetic below can overflow.
constexpr uint64_t WallReading(FineInstant now) {
  return static_cast<uint64_t>(
      std::clamp<int64_t>(now.time_since_epoch().count(), 0, int64_t{kMaxToken.value} + 1));
}

}  // namespace

std::optional<Token> TokenClock::Next(FineInstant now) const {
  const Token next{std::max(last_.value + 1, WallReading(now))};
  if (next > kMaxToken) return std::nullopt;
  return next;
}

void TokenClock::Observe(Token token) { last_ = std::max(last_, std::min(token, kMaxToken)); }

Token TokenClock::StartIssuing(FineInstant now, Millis margin) {
  const Micros added = LeadAt(now) >= kLargestLeadForMargin ? Micros{0} : Micros{margin};
  const uint64_t start = std::max(last_.value, WallReading(now));
  Observe(Token{start + static_cast<uint64_t>(added.count())});
  return last_;
}

bool TokenClock::TakePlace(FineInstant now, Millis margin, const RemoteClock& remote) {
  const Token before = last_;
  Observe(Token{WallReading(now) + static_cast<uint64_t>(Micros{margin}.count())});
  Observe(remote.AtMost(now));
  return last_ > before;
}

ClockReading TokenClock::Read(FineInstant now) const {
  return {.last = last_, .wall = std::min(Token{WallReading(now)}, kMaxToken)};
}

uint64_t RemoteClock::Growing::At(FineInstant now, uint64_t micros_for_one) const {
  const Micros gone = now > since ? now - since : Micros{0};
  if (value == 0 || gone > kForgottenAfter) return 0;
  return value + static_cast<uint64_t>(gone.count()) / micros_for_one;
}

void RemoteClock::Observe(ClockReading reading, FineInstant now) {
  if (reading.last.value >= last_.At(now, kMicrosForToken)) last_ = {reading.last.value, now};
  if (reading.wall.value >= wall_.At(now, 1)) wall_ = {reading.wall.value, now};
}

Token RemoteClock::AtMost(FineInstant now) const {
  const uint64_t furthest = std::max(last_.At(now, kMicrosForToken), wall_.At(now, 1));
  if (furthest == 0) return {};
  return Token{furthest + static_cast<uint64_t>(Micros{kOnTheWay}.count())};
}

Micros TokenClock::LeadAt(FineInstant now) const { return LeadOf(last_, now); }

Micros LeadOf(Token token, FineInstant now) {
  const uint64_t reading = WallReading(now);
  return Micros{token.value > reading ? static_cast<int64_t>(token.value - reading) : 0};
}

bool MayBeFloor(Token floor, FineInstant now) { return LeadOf(floor, now) <= kLargestFloorLead; }

bool MayBeRestored(Token token, FineInstant now) {
  return LeadOf(token, now) <= kLargestRestoredLead;
}

}  // namespace turnstile
