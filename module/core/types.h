// The terms of the lock domain, as types that cannot be confused with each other.
//
// The core is pure: it knows neither Redis nor a clock. Time is always an argument, read once per
// request where it enters the module, so every expiry and every margin can be tested with chosen
// times.

#ifndef TURNSTILE_CORE_TYPES_H_
#define TURNSTILE_CORE_TYPES_H_

#include <chrono>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace turnstile {

using Millis = std::chrono::milliseconds;
using Micros = std::chrono::microseconds;

// The wall clock of the server that decides. Only a tag: it cannot be read.
struct WallClock {};

// Leases are counted in milliseconds, like the TTL of a Redis key.
using Instant = std::chrono::time_point<WallClock, Millis>;
// Tokens need a finer clock. The Instant of a FineInstant is the same time, truncated to a
// millisecond; it is never before 1970.
using FineInstant = std::chrono::time_point<WallClock, Micros>;

constexpr Instant ToInstant(FineInstant now) { return std::chrono::time_point_cast<Millis>(now); }

// Leases follow the wall clock, because other servers have to agree on them. How long a client
// waits concerns only this server and follows a clock that nobody can set: a step of the wall clock
// must not keep a client waiting beyond its time-out. Its zero has no meaning.
struct SteadyClock {};
using Tick = std::chrono::time_point<SteadyClock, Millis>;
using FineTick = std::chrono::time_point<SteadyClock, Micros>;

constexpr Tick ToTick(FineTick now) { return std::chrono::time_point_cast<Millis>(now); }

// A fencing token. Later grants of a lock have larger tokens. Every issued token is in [kMinToken,
// kMaxToken]; the upper bound keeps it exact in a double (JavaScript, Lua).
struct Token {
  uint64_t value = 0;
  friend constexpr auto operator<=>(Token, Token) = default;
};
inline constexpr Token kMinToken{1};
inline constexpr Token kMaxToken{(uint64_t{1} << 53) - 1};

// The owner of a hold: any bytes, 1 to kMaxOwnerBytes of them. A view: copy the bytes to keep them.
struct Owner {
  std::string_view bytes;
  friend constexpr bool operator==(Owner, Owner) = default;
};
inline constexpr size_t kMaxOwnerBytes = 256;

// A public name of a hold or a wait, which proves nothing: printable ASCII, at most this long.
inline constexpr size_t kMaxTagBytes = 64;

constexpr bool IsPrintable(char c) { return c >= ' ' && c <= '~'; }
constexpr bool IsTag(std::string_view text) {
  if (text.empty() || text.size() > kMaxTagBytes) return false;
  for (const char c : text) {
    if (!IsPrintable(c)) return false;
  }
  return true;
}

// The largest LIMIT, and so the largest weight of a hold.
inline constexpr uint32_t kMaxLimit = 100'000;

// A lock of this server. A view: copy the key to keep it.
struct LockName {
  int db = 0;
  std::string_view key;
  friend constexpr bool operator==(LockName, LockName) = default;
};

// How holders of a lock share it.
enum class Mode : uint8_t {
  kExclusive,  // one holder
  kShared,     // any number of holders
  kLimit,      // up to as many as the incoming request allows
};

// Why a hold ended that its owner did not give up.
enum class Loss : uint8_t {
  kExpired,      // its lease ended
  kForced,       // the key was removed or replaced
  kEvicted,      // the server needed memory
  kFlushed,      // its database was emptied
  kSession,      // the connection that it was bound to closed
  kUndelivered,  // its owner disconnected before the grant could be delivered
};

// One owner's hold of a lock: what is stored, replicated and persisted.
struct Hold {
  Owner owner;
  Token token;
  Instant since;       // when it was first granted; renewals and changes of mode do not change it
  Instant end;         // the last millisecond of the lease
  Millis linger{0};    // how much longer it blocks others if it is not released
  uint32_t count{1};   // how many releases are needed to give it up
  uint32_t weight{1};  // how many of the permits of a limit it takes
  std::optional<Instant> cap;  // no lease of this hold ends after this
  std::string_view tag;        // empty: none

  friend constexpr bool operator==(const Hold&, const Hold&) = default;

  // Like a Redis key, a hold is live through the whole of its last millisecond.
  constexpr bool LiveAt(Instant now) const { return now <= end; }

  // Its connection closed while it was live, and it lingers (see AfterSession in lock.h).
  constexpr bool ended_with_session() const { return end == Instant{}; }

  // The last millisecond in which it blocks others.
  constexpr Instant blocks_until() const { return end + linger; }
  constexpr bool BlocksAt(Instant now) const { return now <= blocks_until(); }
};

// One reading of both clocks, taken where a call enters the module and passed down from there.
struct Now {
  FineInstant wall;
  FineTick steady;

  Instant moment() const { return ToInstant(wall); }
  Tick tick() const { return ToTick(steady); }
};

// The range of times in a hold: from 1970 up to the same bound as kMaxToken. Wide enough for any
// real clock, narrow enough that no sum of two times overflows.
inline constexpr Instant kMinInstant{Millis{0}};
inline constexpr Instant kMaxInstant{Millis{(int64_t{1} << 53) - 1}};

// When something must be done if nothing happens before: never, at once, or at a given time.
class Due {
 public:
  static constexpr Due Never() { return {}; }
  static constexpr Due AtOnce() {
    Due due;
    due.at_once_ = true;
    return due;
  }
  static constexpr Due At(Instant moment) {
    Due due;
    due.moment_ = moment;
    return due;
  }

  constexpr bool is_never() const { return !at_once_ && !moment_.has_value(); }
  constexpr bool IsDueAt(Instant now) const {
    return at_once_ || (moment_.has_value() && *moment_ <= now);
  }
  // The due time, but not before `now`; none if never.
  constexpr std::optional<Instant> NotBefore(Instant now) const {
    return IsDueAt(now) ? std::optional(now) : moment_;
  }

  friend constexpr bool operator==(const Due&, const Due&) = default;
  friend constexpr Due Earlier(const Due& a, const Due& b) {
    if (a.at_once_ || b.is_never()) return a;
    if (b.at_once_ || a.is_never()) return b;
    return *a.moment_ <= *b.moment_ ? a : b;
  }

 private:
  bool at_once_ = false;
  std::optional<Instant> moment_;
};

// Whether every field is in its range. Must be checked before a hold from a file or from another
// server is accepted.
constexpr bool IsWellFormed(const Hold& hold) {
  return !hold.owner.bytes.empty() && hold.owner.bytes.size() <= kMaxOwnerBytes &&
         hold.token >= kMinToken && hold.token <= kMaxToken && hold.since >= kMinInstant &&
         hold.since <= kMaxInstant && hold.end >= kMinInstant && hold.end <= kMaxInstant &&
         hold.linger >= Millis{0} && hold.linger <= kMaxInstant - kMinInstant && hold.count >= 1 &&
         hold.weight >= 1 && hold.weight <= kMaxLimit &&
         (!hold.cap.has_value() || (*hold.cap > kMinInstant && *hold.cap <= kMaxInstant)) &&
         (hold.tag.empty() || IsTag(hold.tag));
}

}  // namespace turnstile

#endif  // TURNSTILE_CORE_TYPES_H_
