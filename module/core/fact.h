// Facts on the wire: what replicas and the AOF are told.
//
//     LOCK.HELD key owner "token since-ms end-ms" [SHARED | LIMIT] [COUNT n] [LINGER ms]
//     LOCK.FACT ENDED key owner [UNDELIVERED]
//     LOCK.FACT EXPIRED key before-ms
//     LOCK.FACT SESSION key at-ms owner [owner ...]
//     LOCK.FACT FLOOR token
//
// HELD: this owner holds the lock; a hold that is neither SHARED nor LIMIT, or that is not of the
// kind of those in the lock, takes their place. ENDED: this owner's hold is over, because its lease
// is, or for the reason given. EXPIRED: every hold that kept others out until some moment before
// this one is removed. SESSION: the connections of these owners had closed at this moment; their
// holds, as far as they were live then, are removed or linger from then on. FLOOR: no token up to
// this one will be issued again.
//
// EXPIRED and SESSION tell of many holds at once, and are carried out in one pass. They compare
// stored times with the one that they name, never with a clock: stored values are the same
// everywhere, so the outcome is too.
//
// Nearly all facts are of the first kind, and to the server every word costs more than the bytes in
// it: so that one has few words, and a command of its own.
//
// All times are absolute and all numbers resolved, so the receiver has nothing to decide. A release
// needs no form of its own: it travels as the LOCK.RELEASE that it was.

#ifndef TURNSTILE_CORE_FACT_H_
#define TURNSTILE_CORE_FACT_H_

#include <array>
#include <optional>
#include <string_view>
#include <variant>
#include <vector>

#include "core/lock.h"
#include "core/request.h"
#include "core/types.h"

namespace turnstile {

inline constexpr std::string_view kFactEnded = "ENDED";
inline constexpr std::string_view kFactExpired = "EXPIRED";
inline constexpr std::string_view kFactSession = "SESSION";
inline constexpr std::string_view kFactFloor = "FLOOR";

struct HeldFact {
  std::string_view key;
  Held held;
};

struct EndedFact {
  std::string_view key;
  Ended ended;
};

struct ExpiredFact {
  std::string_view key;
  Expired expired;
};

struct SessionFact {
  std::string_view key;
  Instant at;
  std::vector<Owner> owners;

  SessionsEnded ended() const { return {at, owners}; }
};

struct FloorFact {
  Token token;
};

// What LOCK.FACT says.
using Fact = std::variant<EndedFact, ExpiredFact, SessionFact, FloorFact>;

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
