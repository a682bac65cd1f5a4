// What callers ask for, and how a row of strings becomes such a request.
//
// A request is parsed as a whole before anybody looks at a key: a request that is wrong anywhere
// changes nothing. Keywords are case-insensitive, options come in any order, an option given twice
// is an error, and integers are plain decimal digits: no sign, space, leading zero, exponent.

#ifndef TURNSTILE_CORE_REQUEST_H_
#define TURNSTILE_CORE_REQUEST_H_

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "core/types.h"

namespace turnstile {

// Keys of other locks that the request is about too. Views, as everything in a request.
using Keys = std::span<const std::string_view>;

struct AcquireRequest {
  Owner owner;
  Millis lease;
  Millis wait{0};  // how long to stand in line; zero: one try
  Mode mode = Mode::kExclusive;
  uint32_t limit = 1;  // how many may hold at a time; only for Mode::kLimit
  bool reentrant = false;
  bool session = false;
  Millis linger{0};
  std::optional<Token> floor;  // the token must be at least this
  Keys also;
};

struct ReleaseRequest {
  Owner owner;
  Keys also;
};

struct TouchRequest {
  Owner owner;
  Millis lease;
  Keys also;
};

struct FenceRequest {
  std::optional<Token> token;  // absent: which token holds the lock?
  // A command and its arguments, to be run if the token does; empty: only tell.
  std::span<const std::string_view> then;
};

struct InfoRequest {
  std::string_view key;
};

struct ListRequest {
  std::optional<std::string_view> match;
  int64_t count = 100;            // about how many keys to look at
  std::string_view cursor = "0";  // where to go on; decimal digits
};

struct TopRequest {
  size_t most = 10;
};

// The error reply to send, first word included; one line of printable characters, whatever bytes
// the caller sent.
struct ParseError {
  std::string text;
};

template <typename Request>
using Parsed = std::variant<Request, ParseError>;

// Arguments that follow the command's name. The first of a lock's command is its key.
using Args = std::span<const std::string_view>;

// The longest wait that can be asked for: ten years, which no sum of moments overflows.
inline constexpr Millis kMaxWait = std::chrono::hours{24 * 3650};

// More holders of one lock cannot be asked for.
inline constexpr uint32_t kMaxLimit = 100'000;

// The word that more keys follow; the only option that the server must understand too.
inline constexpr const char* kAlso = "ALSO";

// More locks cannot be named after it.
inline constexpr size_t kMaxAlso = 64;

// More keys are not looked at in one call, and more locks not told of.
inline constexpr int64_t kMaxListCount = 100'000;
inline constexpr int64_t kMaxTop = 1000;

// What the server's configuration allows.
struct Limits {
  Millis max_lease;
};

Parsed<AcquireRequest> ParseAcquire(Args args, const Limits& limits);
Parsed<ReleaseRequest> ParseRelease(Args args);
Parsed<TouchRequest> ParseTouch(Args args, const Limits& limits);
Parsed<FenceRequest> ParseFence(Args args);
Parsed<InfoRequest> ParseInfo(Args args);
Parsed<ListRequest> ParseList(Args args);
Parsed<TopRequest> ParseTop(Args args);

// The parts of LOCK.FENCE that are looked for inside another one: in argv, with the command's name
// at 0, THEN stands at kThenAt.
inline constexpr const char* kFenceCommand = "LOCK.FENCE";
inline constexpr std::string_view kThen = "THEN";
inline constexpr size_t kThenAt = 3;

// A whole number in plain decimal digits, from 0 to 2^63 - 1; nothing for any other spelling.
std::optional<int64_t> ParseDigits(std::string_view text);

// Whether `text` is `keyword`, upper or lower case. Safe on any bytes.
bool IsKeyword(std::string_view text, std::string_view keyword);

// Bytes that somebody sent, made fit to be read in a message: quoted, escaped, cut when long.
std::string Quoted(std::string_view bytes);

// The same, but a plain word goes without quotes.
std::string Unquoted(std::string_view bytes);

}  // namespace turnstile

#endif  // TURNSTILE_CORE_REQUEST_H_
