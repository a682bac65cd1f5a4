// Facts on the wire: what replicas and the AOF are told.
//
//     LOCK.FACT HELD key owner token since-ms end-ms     this owner holds the lock, nobody else
//     does LOCK.FACT FLOOR token                              no token up to this one will be
//     issued again
//
// All times are absolute and all numbers resolved, so the receiver has nothing to decide. A release
// needs no form of its own: it travels as the LOCK.RELEASE that it was.

#ifndef TURNSTILE_CORE_FACT_H_
#define TURNSTILE_CORE_FACT_H_

#include <string_view>
#include <variant>

#include "core/lock.h"
#include "core/request.h"
#include "core/types.h"

namespace turnstile {

inline constexpr std::string_view kFactHeld = "HELD";
inline constexpr std::string_view kFactFloor = "FLOOR";

struct HeldFact {
  std::string_view key;
  Held held;
};

struct FloorFact {
  Token token;
};

using Fact = std::variant<HeldFact, FloorFact>;

// `args` are all arguments after the command's name.
Parsed<Fact> ParseFact(Args args);

}  // namespace turnstile

#endif  // TURNSTILE_CORE_FACT_H_
