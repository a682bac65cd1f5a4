#include "core/fact.h"

namespace turnstile {
namespace {

constexpr size_t kHeldArgs = 6;
constexpr size_t kFloorArgs = 2;

std::optional<Token> ParseToken(std::string_view text) {
  const auto number = ParseDigits(text);
  if (!number.has_value()) return std::nullopt;
  const Token token{static_cast<uint64_t>(*number)};
  if (token < kMinToken || token > kMaxToken) return std::nullopt;
  return token;
}

std::optional<Fact> TryParse(Args args) {
  if (args.size() == kHeldArgs && IsKeyword(args[0], kFactHeld)) {
    const auto token = ParseToken(args[3]);
    const auto since = ParseDigits(args[4]);
    const auto end = ParseDigits(args[5]);
    if (!token.has_value() || !since.has_value() || !end.has_value()) return std::nullopt;
    const Hold hold{.owner = Owner{args[2]},
                    .token = *token,
                    .since = Instant{Millis{*since}},
                    .end = Instant{Millis{*end}}};
    if (!IsWellFormed(hold)) return std::nullopt;
    return HeldFact{.key = args[1], .held = Held{hold}};
  }
  if (args.size() == kFloorArgs && IsKeyword(args[0], kFactFloor)) {
    const auto token = ParseToken(args[1]);
    if (!token.has_value()) return std::nullopt;
    return FloorFact{*token};
  }
  return std::nullopt;
}

}  // namespace

Parsed<Fact> ParseFact(Args args) {
  if (const auto fact = TryParse(args); fact.has_value()) return *fact;
  return ParseError{
      "ERR not a fact: expected HELD key owner token since-ms end-ms, or FLOOR token"};
}

}  // namespace turnstile
