#include "core/fact.h"

#include <limits>

namespace turnstile {
namespace {

bool IsOwner(std::string_view bytes) { return !bytes.empty() && bytes.size() <= kMaxOwnerBytes; }

// [SHARED | LIMIT] [COUNT n] [LINGER ms], in this order. False: something else.
bool ParseDetails(Args args, Held& held) {
  const auto take = [&args](std::string_view word) {
    if (args.empty() || !IsKeyword(args.front(), word)) return false;
    args = args.subspan(1);
    return true;
  };
  const auto take_number = [&args](int64_t least, int64_t most) -> std::optional<int64_t> {
    const auto number = args.empty() ? std::nullopt : ParseDigits(args.front());
    if (!number.has_value() || *number < least || *number > most) return std::nullopt;
    args = args.subspan(1);
    return number;
  };
  for (const Mode mode : {Mode::kShared, Mode::kLimit}) {
    if (held.mode == Mode::kExclusive && take(WordFor(mode))) held.mode = mode;
  }
  if (take(kCountWord)) {
    const auto count = take_number(2, std::numeric_limits<uint32_t>::max());
    if (!count.has_value()) return false;
    held.hold.count = static_cast<uint32_t>(*count);
  }
  if (take(kLingerWord)) {
    const auto linger = take_number(1, (kMaxInstant - kMinInstant).count());
    if (!linger.has_value()) return false;
    held.hold.linger = Millis{*linger};
  }
  return args.empty();
}

std::optional<Fact> ParseHeld(Args args) {
  constexpr size_t kFixedArgs = 6;
  if (args.size() < kFixedArgs) return std::nullopt;
  const auto token = ParseToken(args[3]);
  const auto since = ParseDigits(args[4]);
  const auto end = ParseDigits(args[5]);
  if (!token.has_value() || !since.has_value() || !end.has_value()) return std::nullopt;
  Held held{.hold = {.owner = Owner{args[2]},
                     .token = *token,
                     .since = Instant{Millis{*since}},
                     .end = Instant{Millis{*end}}}};
  if (!ParseDetails(args.subspan(kFixedArgs), held) || !IsWellFormed(held.hold)) {
    return std::nullopt;
  }
  return HeldFact{.key = args[1], .held = held};
}

std::optional<Fact> ParseEnded(Args args) {
  constexpr size_t kFixedArgs = 3;
  if (args.size() < kFixedArgs || args.size() > kFixedArgs + 1 || !IsOwner(args[2])) {
    return std::nullopt;
  }
  EndedFact fact{.key = args[1], .ended = Ended{Owner{args[2]}}};
  if (args.size() == kFixedArgs) return fact;
  for (const Loss how : {Loss::kSession, Loss::kUndelivered}) {
    if (!IsKeyword(args[kFixedArgs], WordFor(how))) continue;
    fact.ended.how = how;
    return fact;
  }
  return std::nullopt;
}

std::optional<Fact> TryParse(Args args) {
  if (args.empty()) return std::nullopt;
  if (IsKeyword(args[0], kFactHeld)) return ParseHeld(args);
  if (IsKeyword(args[0], kFactEnded)) return ParseEnded(args);
  if (IsKeyword(args[0], kFactFloor) && args.size() == 2) {
    const auto token = ParseToken(args[1]);
    if (token.has_value()) return FloorFact{*token};
  }
  return std::nullopt;
}

}  // namespace

std::optional<Token> ParseToken(std::string_view text) {
  const auto number = ParseDigits(text);
  if (!number.has_value()) return std::nullopt;
  const Token token{static_cast<uint64_t>(*number)};
  if (token < kMinToken || token > kMaxToken) return std::nullopt;
  return token;
}

std::string_view WordFor(Mode mode) {
  switch (mode) {
    case Mode::kShared:
      return "SHARED";
    case Mode::kLimit:
      return "LIMIT";
    case Mode::kExclusive:
      break;
  }
  return "";
}

std::string_view WordFor(Loss how) {
  switch (how) {
    case Loss::kSession:
      return "SESSION";
    case Loss::kUndelivered:
      return "UNDELIVERED";
    default:
      return "";
  }
}

Parsed<Fact> ParseFact(Args args) {
  if (const auto fact = TryParse(args); fact.has_value()) return *fact;
  return ParseError{
      "ERR not a fact: expected HELD key owner token since-ms end-ms [SHARED | LIMIT] [COUNT n] "
      "[LINGER ms], ENDED key owner [SESSION | UNDELIVERED], or FLOOR token"};
}

}  // namespace turnstile
