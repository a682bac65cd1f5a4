// GoogleTest printers for the types of the core, found through their namespace.

#ifndef TURNSTILE_TESTS_UNIT_PRINTERS_H_
#define TURNSTILE_TESTS_UNIT_PRINTERS_H_

#include <ostream>

#include "core/decide.h"
#include "core/lock.h"
#include "core/request.h"
#include "core/types.h"

namespace turnstile {

inline void PrintTo(Token token, std::ostream* out) { *out << "token " << token.value; }

inline void PrintTo(Owner owner, std::ostream* out) { *out << Quoted(owner.bytes); }

inline void PrintTo(Instant moment, std::ostream* out) {
  *out << moment.time_since_epoch().count() << " ms";
}

inline void PrintTo(const Hold& hold, std::ostream* out) {
  *out << "{owner " << Quoted(hold.owner.bytes) << ", token " << hold.token.value << ", since "
       << hold.since.time_since_epoch().count() << ", end " << hold.end.time_since_epoch().count()
       << ", linger " << hold.linger.count() << ", count " << hold.count << ", weight "
       << hold.weight;
  if (hold.cap.has_value()) *out << ", cap " << hold.cap->time_since_epoch().count();
  *out << ", tag " << Quoted(hold.tag) << "}";
}

// A switch, not a table: the compiler reports a missing name.
inline void PrintTo(Mode mode, std::ostream* out) {
  switch (mode) {
    case Mode::kExclusive:
      *out << "kExclusive";
      return;
    case Mode::kShared:
      *out << "kShared";
      return;
    case Mode::kLimit:
      *out << "kLimit";
      return;
  }
  *out << "mode " << static_cast<int>(mode);
}

inline void PrintTo(Loss how, std::ostream* out) {
  switch (how) {
    case Loss::kExpired:
      *out << "kExpired";
      return;
    case Loss::kForced:
      *out << "kForced";
      return;
    case Loss::kEvicted:
      *out << "kEvicted";
      return;
    case Loss::kFlushed:
      *out << "kFlushed";
      return;
    case Loss::kSession:
      *out << "kSession";
      return;
    case Loss::kUndelivered:
      *out << "kUndelivered";
      return;
  }
  *out << "loss " << static_cast<int>(how);
}

inline const char* NameOf(Outcome outcome) {
  switch (outcome) {
    case Outcome::kGranted:
      return "kGranted";
    case Outcome::kHeldAlready:
      return "kHeldAlready";
    case Outcome::kDowngraded:
      return "kDowngraded";
    case Outcome::kUpgraded:
      return "kUpgraded";
    case Outcome::kReleased:
      return "kReleased";
    case Outcome::kTouched:
      return "kTouched";
    case Outcome::kFree:
      return "kFree";
    case Outcome::kLeaseEnded:
      return "kLeaseEnded";
    case Outcome::kLingerCut:
      return "kLingerCut";
    case Outcome::kHeldByOther:
      return "kHeldByOther";
    case Outcome::kOthersWait:
      return "kOthersWait";
    case Outcome::kGrace:
      return "kGrace";
    case Outcome::kOtherMode:
      return "kOtherMode";
    case Outcome::kOtherWeight:
      return "kOtherWeight";
    case Outcome::kHoldsSome:
      return "kHoldsSome";
    case Outcome::kHoldsApart:
      return "kHoldsApart";
    case Outcome::kUpgradesSeveral:
      return "kUpgradesSeveral";
    case Outcome::kCountedOut:
      return "kCountedOut";
    case Outcome::kFloorTooHigh:
      return "kFloorTooHigh";
    case Outcome::kTokensUsedUp:
      return "kTokensUsedUp";
  }
  return "no outcome";
}

inline void PrintTo(Outcome outcome, std::ostream* out) { *out << NameOf(outcome); }

}  // namespace turnstile

#endif  // TURNSTILE_TESTS_UNIT_PRINTERS_H_
