#include "core/fact.h"

#include <algorithm>
#include <charconv>
#include <limits>

namespace turnstile {
namespace {

bool IsOwner(std::string_view bytes) { return !bytes.empty() && bytes.size() <= kMaxOwnerBytes; }

// [SHARED | LIMIT] [WEIGHT w] [COUNT n] [LINGER ms] [CAP ms] [TAG text], in this order. Returns
// false for anything else.
bool ParseDetails(Args args, HoldSet& held) {
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
  if (take(kWeightWord)) {
    const auto weight = take_number(2, kMaxLimit);
    if (!weight.has_value() || held.mode != Mode::kLimit) return false;
    held.hold.weight = static_cast<uint32_t>(*weight);
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
  if (take(kCapWord)) {
    const auto cap = take_number(1, (kMaxInstant - kMinInstant).count());
    if (!cap.has_value()) return false;
    held.hold.cap = Instant{Millis{*cap}};
  }
  if (take(kTagWord)) {
    if (args.empty() || !IsTag(args.front())) return false;
    held.hold.tag = args.front();
    args = args.subspan(1);
  }
  return args.empty();
}

// key owner "token since-ms end-ms" …
std::optional<HoldSetFact> TryParseHoldSet(Args args) {
  constexpr size_t kFixedArgs = 3;
  if (args.size() < kFixedArgs) return std::nullopt;
  std::array<std::string_view, 3> numbers;
  std::string_view rest = args[2];
  for (std::string_view& number : numbers) {
    number = rest.substr(0, rest.find(' '));
    rest.remove_prefix(std::min(number.size() + 1, rest.size()));
  }
  // Nothing may be left over, not even a trailing space.
  const size_t size = numbers[0].size() + numbers[1].size() + numbers[2].size() + 2;
  if (size != args[2].size()) return std::nullopt;
  const auto token = ParseToken(numbers[0]);
  const auto since = ParseDigits(numbers[1]);
  const auto end = ParseDigits(numbers[2]);
  if (!token.has_value() || !since.has_value() || !end.has_value()) return std::nullopt;
  HoldSet held{.hold = {.owner = Owner{args[1]},
                        .token = *token,
                        .since = Instant{Millis{*since}},
                        .end = Instant{Millis{*end}}}};
  if (!ParseDetails(args.subspan(kFixedArgs), held) || !IsWellFormed(held.hold)) {
    return std::nullopt;
  }
  return HoldSetFact{.key = args[0], .held = held};
}

std::optional<Fact> ParseEnded(Args args) {
  constexpr size_t kFixedArgs = 3;
  if (args.size() < kFixedArgs || args.size() > kFixedArgs + 1 || !IsOwner(args[2])) {
    return std::nullopt;
  }
  HoldEndedFact fact{.key = args[1], .ended = HoldEnded{Owner{args[2]}}};
  if (args.size() == kFixedArgs) return fact;
  if (!IsKeyword(args[kFixedArgs], WordFor(Loss::kUndelivered))) return std::nullopt;
  fact.ended.how = Loss::kUndelivered;
  return fact;
}

std::optional<Instant> ParseInstant(std::string_view text) {
  const auto number = ParseDigits(text);
  if (!number.has_value()) return std::nullopt;
  const Instant moment{Millis{*number}};
  return moment <= kMaxInstant ? std::optional(moment) : std::nullopt;
}

std::optional<Fact> ParseExpired(Args args) {
  if (args.size() != 3) return std::nullopt;
  const auto before = ParseInstant(args[2]);
  if (!before.has_value()) return std::nullopt;
  return HoldsExpiredFact{.key = args[1], .expired = HoldsExpired{*before}};
}

std::optional<Fact> ParseSession(Args args) {
  constexpr size_t kFixedArgs = 3;
  if (args.size() <= kFixedArgs) return std::nullopt;
  const auto at = ParseInstant(args[2]);
  if (!at.has_value()) return std::nullopt;
  SessionsEndedFact fact{.key = args[1], .at = *at, .owners = {}};
  fact.owners.reserve(args.size() - kFixedArgs);
  for (const std::string_view owner : args.subspan(kFixedArgs)) {
    if (!IsOwner(owner)) return std::nullopt;
    fact.owners.push_back(Owner{owner});
  }
  return fact;
}

std::optional<Fact> TryParse(Args args) {
  if (args.empty()) return std::nullopt;
  if (IsKeyword(args[0], kFactEnded)) return ParseEnded(args);
  if (IsKeyword(args[0], kFactExpired)) return ParseExpired(args);
  if (IsKeyword(args[0], kFactSession)) return ParseSession(args);
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

std::string_view WordFor(Loss how) { return how == Loss::kUndelivered ? "UNDELIVERED" : ""; }

Parsed<Fact> ParseFact(Args args) {
  if (auto fact = TryParse(args); fact.has_value()) return *std::move(fact);
  return ParseError{
      "ERR not a fact: expected ENDED key owner [UNDELIVERED], EXPIRED key before-ms, SESSION key "
      "at-ms owner [owner ...], or FLOOR token"};
}

Parsed<HoldSetFact> ParseHoldSetFact(Args args) {
  if (const auto fact = TryParseHoldSet(args); fact.has_value()) return *fact;
  return ParseError{
      "ERR not a fact: expected key owner \"token since-ms end-ms\" [SHARED | LIMIT] [WEIGHT "
      "w] [COUNT n] [LINGER ms] [CAP ms] [TAG text]"};
}

HoldNumbers::HoldNumbers(const Hold& hold) {
  char* at = digits_.data();
  char* const end = at + digits_.size();
  at = std::to_chars(at, end, hold.token.value).ptr;
  for (const Instant moment : {hold.since, hold.end}) {
    *at++ = ' ';
    at = std::to_chars(at, end, moment.time_since_epoch().count()).ptr;
  }
  size_ = static_cast<size_t>(at - digits_.data());
}

}  // namespace turnstile
