#include "core/token_clock.h"

#include <algorithm>

namespace turnstile {
namespace {

// The wall clock as a token value. A clock before 1970 or past the last token is clamped to the
// ends of the range, so that no arithmetic below can overflow.
constexpr uint64_t WallReading(FineInstant now) {
  return static_cast<uint64_t>(
      std::clamp<int64_t>(now.time_since_epoch().count(), 0, int64_t{kMaxToken.value} + 1));
}

constexpr uint64_t Ticks(Micros time) { return static_cast<uint64_t>(time.count()); }

}  // namespace

std::optional<Token> TokenClock::Next(FineInstant now) const {
  const Token next{std::max(reading().value + 1, WallReading(now))};
  if (next > kMaxToken) return std::nullopt;
  return next;
}

void TokenClock::Observe(Token token) { last_ = std::max(last_, std::min(token, kMaxToken)); }

void TokenClock::NoteFloor(Token floor) { floor_ = std::max(floor_, std::min(floor, kMaxToken)); }

Token TokenClock::StartIssuing(FineInstant now, Millis margin) {
  margin_ = margin;
  floor_ = {};
  if (last_.value > 0) NoteFloor(Token{last_.value + Ticks(kStartStep)});
  NoteFloor(Token{WallReading(now) + Ticks(margin_)});
  return reading();
}

void TokenClock::AdvanceBeyond(const RemoteClock& peers, FineInstant now) {
  NoteFloor(Token{WallReading(now) + Ticks(margin_)});
  NoteFloor(peers.UpperBound(now));
}

std::optional<Token> TokenClock::FloorPassedBy(Token token) const {
  return last_ < floor_ && floor_ < token ? std::optional(floor_) : std::nullopt;
}

ClockReading TokenClock::Read(FineInstant now) const {
  return {.last = reading(), .wall = std::min(Token{WallReading(now)}, kMaxToken)};
}

Token TokenClock::HighestFloor(FineInstant now) const {
  const Token ahead{WallReading(now) + Ticks(margin_) / 2};
  Token of_start;
  if (process_start_.has_value()) {
    of_start = Token{WallReading(*process_start_) + Ticks(margin_) / 2 * 3};
  }
  return std::min(std::max({reading(), ahead, of_start}), kMaxToken);
}

bool TokenClock::MayAdopt(Token token, FineInstant now) const {
  return token <= reading() || LeadOf(token, now) <= kLargestAdoptedLead;
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

Token RemoteClock::UpperBound(FineInstant now) const {
  const uint64_t furthest = std::max(last_.At(now, kMicrosForToken), wall_.At(now, 1));
  if (furthest == 0) return {};
  return Token{furthest + static_cast<uint64_t>(Micros{kMessageDelay}.count())};
}

Micros TokenClock::LeadAt(FineInstant now) const { return LeadOf(reading(), now); }

Micros LeadOf(Token token, FineInstant now) {
  const uint64_t wall = WallReading(now);
  return Micros{token.value > wall ? static_cast<int64_t>(token.value - wall) : 0};
}

}  // namespace turnstile
