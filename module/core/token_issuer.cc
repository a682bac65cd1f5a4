#include "core/token_issuer.h"

namespace turnstile {

const TokenClock& TokenIssuer::Issuing(FineInstant now) {
  if (issuing()) {
    clock_.SetMargin(settings_.token_margin);
  } else {
    unannounced_start_ = true;
    issuing_since_ = ToInstant(now);
    clock_.StartIssuing(now, settings_.token_margin);
    clock_.NoteFloor(peers_.UpperBound(now));
    // At once, not with the first grant: if that grant were lost with this server, a replica that
    // knows what this server knew would start from the same floor.
    ReplicateFloorSoon(now);
  }
  return clock_;
}

std::optional<Instant> TokenIssuer::GraceEnd() const {
  if (!issuing() || settings_.failover_grace == Millis{0}) return std::nullopt;
  return *issuing_since_ + settings_.failover_grace;
}

Grace TokenIssuer::GraceAt(Instant now) const {
  const std::optional<Instant> end = GraceEnd();
  return end.has_value() && now <= *end ? Grace::kOn : Grace::kOver;
}

Millis TokenIssuer::GraceLeft(Instant now) const {
  const std::optional<Instant> end = GraceEnd();
  return end.has_value() ? std::max(*end - now, Millis{0}) : Millis{0};
}

void TokenIssuer::OnSlotsArrived(FineInstant now) {
  slots_arrived_ = now;
  if (!issuing()) return;
  clock_.SetMargin(settings_.token_margin);
  clock_.AdvanceBeyond(peers_, now);
}

void TokenIssuer::OnPeerClock(ClockReading reading, FineInstant now) {
  if (!clock_.MayAdopt(reading.last, now) || !clock_.MayAdopt(reading.wall, now)) return;
  peers_.Observe(reading, now);
  // The message may arrive after the slot. The clock is raised no further than the message says:
  // two nodes that receive messages from each other must not push each other ahead.
  constexpr Millis kLate{10000};
  const bool just_arrived =
      slots_arrived_.has_value() && *slots_arrived_ <= now && now < *slots_arrived_ + kLate;
  if (issuing() && just_arrived) clock_.NoteFloor(reading.last);
}

void TokenIssuer::StopIssuing() {
  issuing_since_.reset();
  floor_to_replicate_ = false;
  floor_replicated_.reset();
  clock_.ForgetFloor();
}

// Slots can arrive by the thousand, and so can clients that are redirected here with ASK, each time
// with a higher floor. One such fact per second is enough, because every grant is a fact too.
std::optional<Token> TokenIssuer::TakeFloorBefore(Token token, FineInstant now) {
  constexpr Millis kMinInterval{1000};
  const std::optional<Token> floor = clock_.FloorPassedBy(token);
  if (!floor.has_value() || LeadOf(*floor, now) == Micros{0}) return std::nullopt;
  const bool recently = floor_replicated_.has_value() && *floor_replicated_ <= now &&
                        now < *floor_replicated_ + kMinInterval;
  if (recently) return std::nullopt;
  floor_replicated_ = now;
  return floor;
}

void TokenIssuer::ReplicateFloorSoon(FineInstant now) {
  if (issuing() && ToSave(now).has_value()) floor_to_replicate_ = true;
}

std::optional<Token> TokenIssuer::TakeFloorToReplicate(FineInstant now) {
  if (!std::exchange(floor_to_replicate_, false)) return std::nullopt;
  const std::optional<Token> floor = ToSave(now);
  if (floor.has_value()) clock_.Observe(*floor);  // from here on others know it
  return floor;
}

std::optional<Token> TokenIssuer::ToSave(FineInstant now) const {
  if (clock_.last() == Token{} || clock_.LeadAt(now) == Micros{0}) return std::nullopt;
  return clock_.reading();
}

}  // namespace turnstile
