// How failed expectations show the words of the core. Found by GoogleTest through the namespace.

#ifndef TURNSTILE_TESTS_UNIT_PRINTERS_H_
#define TURNSTILE_TESTS_UNIT_PRINTERS_H_

#include <array>
#include <ostream>

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
       << "}";
}

inline void PrintTo(Outcome outcome, std::ostream* out) {
  constexpr std::array kNames = {"kGranted", "kHeldAlready", "kReleased",    "kTouched",
                                 "kFree",    "kLeaseEnded",  "kHeldByOther", "kTokensUsedUp"};
  *out << kNames.at(static_cast<size_t>(outcome));
}

}  // namespace turnstile

#endif  // TURNSTILE_TESTS_UNIT_PRINTERS_H_
