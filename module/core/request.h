// Requests of callers, and how a list of strings is parsed into one.
//
// A request is parsed completely before any key is opened: a request with an error anywhere changes
// nothing. Keywords are case-insensitive, options may be in any order, an option given twice is an
// error, and integers are plain decimal digits: no sign, space, leading zero or exponent.

#ifndef TURNSTILE_CORE_REQUEST_H_
#define TURNSTILE_CORE_REQUEST_H_

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <variant>

#include "core/types.h"

namespace turnstile {

// Keys of the other locks that the request names. Views, like everything in a request.
using Keys = std::span<const std::string_view>;

// Where the outcome of a request, and the loss of its hold, is published; and the name under which.
struct NotifyTarget {
  std::string_view channel;
  std::string_view id;
  friend constexpr bool operator==(const NotifyTarget&, const NotifyTarget&) = default;
};

struct AcquireRequest {
  Owner owner;
  Millis lease;
  Millis wait{0};         // how long to wait in the queue; zero: one attempt
  uint32_t max_line = 0;  // do not wait behind this many; zero: behind any number
  Mode mode = Mode::kExclusive;
  uint32_t limit = 1;   // how many may hold the lock at a time; only for Mode::kLimit
  uint32_t weight = 1;  // as how many of them this hold counts
  bool reentrant = false;
  bool session = false;
  Millis linger{0};
  Millis max_hold{0};                  // how long it may be held at most; zero: for ever
  std::string_view tag;                // empty: none
  std::optional<NotifyTarget> notify;  // then the call does not block
  std::optional<Token> floor;          // the token must be at least this
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
  // A command and its arguments, to be run if the token holds the lock; empty: only reply.
  std::span<const std::string_view> then;
};

struct InfoRequest {
  std::string_view key;
};

struct ListRequest {
  std::optional<std::string_view> match;
  int64_t count = 100;            // about how many keys to scan
  std::string_view cursor = "0";  // where to continue; decimal digits
};

struct TopRequest {
  size_t most = 10;
};

// The error reply to send, including the error code. One line of printable characters, whatever
// bytes the caller sent.
struct ParseError {
  std::string text;
};

template <typename Request>
using Parsed = std::variant<Request, ParseError>;

// The arguments after the command name. For commands on a lock, the first one is its key.
using Args = std::span<const std::string_view>;

// The longest wait that can be requested: ten years, so that no sum of times overflows.
inline constexpr Millis kMaxWait = std::chrono::hours{24 * 3650};

// The longest MAXHOLD that can be requested: a year.
inline constexpr Millis kMaxHold = std::chrono::hours{24 * 365};

// The largest MAXLINE that can be requested, far beyond what a queue can hold.
inline constexpr uint32_t kMaxLine = 10'000'000;

// The longest channel and id after NOTIFY.
inline constexpr size_t kMaxChannelBytes = 256;
inline constexpr size_t kMaxNotifyIdBytes = 64;

// The keyword that precedes further keys; the only option that the server must understand too.
inline constexpr const char* kAlso = "ALSO";

// The largest number of keys after ALSO.
inline constexpr size_t kMaxAlso = 64;

// The largest number of keys that one LOCK.LIST scans, and of locks that one LOCK.TOP returns.
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

// The names of commands that are used in more than one file.
inline constexpr const char* kAcquireCommand = "LOCK.ACQUIRE";
inline constexpr const char* kReleaseCommand = "LOCK.RELEASE";
inline constexpr const char* kTouchCommand = "LOCK.TOUCH";
inline constexpr const char* kFenceCommand = "LOCK.FENCE";
inline constexpr const char* kInfoCommand = "LOCK.INFO";

// In the argv of LOCK.FENCE, with the command name at index 0, THEN is at index kThenAt.
inline constexpr std::string_view kThen = "THEN";
inline constexpr size_t kThenAt = 3;

// A whole number in plain decimal digits, from 0 to 2^63 - 1; nothing for any other spelling.
std::optional<int64_t> ParseDigits(std::string_view text);

// Whether `text` is `keyword`, ignoring case. Safe on any bytes.
bool IsKeyword(std::string_view text, std::string_view keyword);

// Makes arbitrary bytes readable in a message: quoted, escaped, and truncated if long.
std::string Quoted(std::string_view bytes);

// The same, but without quotes if it is a plain word.
std::string Unquoted(std::string_view bytes);

}  // namespace turnstile

#endif  // TURNSTILE_CORE_REQUEST_H_
