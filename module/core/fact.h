// Facts on the wire: what replicas and the AOF are told.
//
//     LOCK.HELD key owner "token since-ms end-ms" [SHARED | LIMIT] [COUNT n] [LINGER ms]
//     LOCK.FACT ENDED key owner [SESSION | UNDELIVERED]
//     LOCK.FACT FLOOR token
//
// HELD: this owner holds the lock; a hold that is neither SHARED nor LIMIT, or that is not of the
// kind of those in the lock, takes their place. ENDED: this owner's hold is over, because its lease
// is, or for the reason given. FLOOR: no token up to this one will be issued again.
//
// Nearly all facts are of the first kind, and to the server every word costs more than the bytes in
// it: so that one has few words. It was first written as LOCK.FACT HELD key owner token since-ms
// end-ms …, which is still understood.
//
// All times are absolute and all numbers resolved, so the receiver has nothing to decide. A release
// needs no form of its own: it travels as the LOCK.RELEASE that it was.

#ifndef TURNSTILE_CORE_FACT_H_
#define TURNSTILE_CORE_FACT_H_

#include <array>
#include <optional>
#include <string_view>
#include <variant>

#include "core/lock.h"
#include "core/request.h"
#include "core/types.h"

namespace turnstile {

inline constexpr std::string_view kFactHeld = "HELD";
inline constexpr std::string_view kFactEnded = "ENDED";
inline constexpr std::string_view kFactFloor = "FLOOR";

struct HeldFact {
  std::string_view key;
  Held held;
};

struct EndedFact {
  std::string_view key;
  Ended ended;
};

struct FloorFact {
  Token token;
};

using Fact = std::variant<HeldFact, EndedFact, FloorFact>;

// A token in decimal digits; nothing if it is none.
std::optional<Token> ParseToken(std::string_view text);

// `args` are all arguments after the command's name, LOCK.FACT or LOCK.HELD.
Parsed<Fact> ParseFact(Args args);
Parsed<HeldFact> ParseHeldFact(Args args);

// The third word of LOCK.HELD, of a hold that is well-formed.
class HeldNumbers {
 public:
  explicit HeldNumbers(const Hold& hold);
  std::string_view text() const { return {digits_.data(), size_}; }

 private:
  std::array<char, 64> digits_;  // three numbers of up to 16 digits, two spaces
  size_t size_;
};

// The word for a mode in HELD; empty for an exclusive hold, which has none.
std::string_view WordFor(Mode mode);
// The word for a loss in ENDED; empty for the end of a lease, which has none.
std::string_view WordFor(Loss how);
inline constexpr std::string_view kCountWord = "COUNT";
inline constexpr std::string_view kLingerWord = "LINGER";

}  // namespace turnstile

#endif  // TURNSTILE_CORE_FACT_H_
