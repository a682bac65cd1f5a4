// Facts on the wire: what is sent to replicas and written to the AOF.
//
//     LOCK.HELD key owner "token since-ms end-ms" [SHARED | LIMIT] [WEIGHT w] [COUNT n] [LINGER ms]
//               [CAP ms] [TAG text]
//     LOCK.FACT ENDED key owner [UNDELIVERED]
//     LOCK.FACT EXPIRED key before-ms
//     LOCK.FACT SESSION key at-ms owner [owner ...]
//     LOCK.FACT FLOOR token
//
// HELD: this owner holds the lock. CAP: no lease of it ends after this time. A hold that is neither
// SHARED nor LIMIT, or whose mode differs from that of the holds in the lock, replaces them. ENDED:
// this owner's hold has ended, because its lease has ended or for the reason given. EXPIRED: every
// hold that blocks others only until before this time is removed. SESSION: the connections of these
// owners had closed at this time; those of their holds that were live then are removed, or linger
// from then on. FLOOR: no token up to this one will be issued again.
//
// EXPIRED and SESSION describe many holds at once and are applied in one pass. They compare stored
// times with the time in the fact, never with a clock: stored values are the same on every server,
// so the result is too.
//
// Nearly all facts are of the first kind, and each argument costs the server more than the bytes in
// it. So this kind has few arguments and a command of its own.
//
// All times are absolute and all numbers resolved, so the receiver has nothing to decide. A release
// needs no form of its own: it is replicated as the original LOCK.RELEASE.

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

// The commands that carry facts.
inline constexpr const char* kFactCommand = "LOCK.FACT";
inline constexpr const char* kHeldCommand = "LOCK.HELD";

inline constexpr std::string_view kFactEnded = "ENDED";
inline constexpr std::string_view kFactExpired = "EXPIRED";
inline constexpr std::string_view kFactSession = "SESSION";
inline constexpr std::string_view kFactFloor = "FLOOR";

struct HoldSetFact {
  std::string_view key;
  HoldSet held;
};

struct HoldEndedFact {
  std::string_view key;
  HoldEnded ended;
};

struct HoldsExpiredFact {
  std::string_view key;
  HoldsExpired expired;
};

struct SessionsEndedFact {
  std::string_view key;
  Instant at;
  std::vector<Owner> owners;

  SessionsEnded ended() const { return {at, owners}; }
};

struct FloorFact {
  Token token;
};

// The contents of a LOCK.FACT.
using Fact = std::variant<HoldEndedFact, HoldsExpiredFact, SessionsEndedFact, FloorFact>;

// Parses a token in decimal digits; nothing if `text` is not a valid token.
std::optional<Token> ParseToken(std::string_view text);

// `args` are all arguments after the command name, LOCK.FACT or LOCK.HELD.
Parsed<Fact> ParseFact(Args args);
Parsed<HoldSetFact> ParseHoldSetFact(Args args);

// The third argument of LOCK.HELD. The hold must be well-formed.
class HoldNumbers {
 public:
  explicit HoldNumbers(const Hold& hold);
  std::string_view text() const { return {digits_.data(), size_}; }

 private:
  std::array<char, 64> digits_;  // three numbers of up to 16 digits, two spaces
  size_t size_;
};

// The keyword for a mode in HELD; empty for an exclusive hold, which has none.
std::string_view WordFor(Mode mode);
// The keyword for a loss in ENDED; empty for the end of a lease, which has none.
std::string_view WordFor(Loss how);
inline constexpr std::string_view kWeightWord = "WEIGHT";
inline constexpr std::string_view kCountWord = "COUNT";
inline constexpr std::string_view kLingerWord = "LINGER";
inline constexpr std::string_view kCapWord = "CAP";
inline constexpr std::string_view kTagWord = "TAG";

}  // namespace turnstile

#endif  // TURNSTILE_CORE_FACT_H_
