// The words of the lock domain, as types that cannot be mixed up.
//
// The core is pure: it knows neither Redis nor a clock. Time always arrives as an argument, read
// once at the edge for each request, so every expiry and every margin can be tested by hand.

#ifndef TURNSTILE_CORE_TYPES_H_
#define TURNSTILE_CORE_TYPES_H_

#include <chrono>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace turnstile {

using Millis = std::chrono::milliseconds;
using Micros = std::chrono::microseconds;

// The wall clock of the server that decides. Only a tag: nobody can ask it for the time.
struct WallClock {};

// Leases are counted in milliseconds, as Redis counts the TTL of a key.
using Instant = std::chrono::time_point<WallClock, Millis>;
// Tokens need a finer clock; an Instant is the same moment, which is not before 1970, cut to a
// millisecond.
using FineInstant = std::chrono::time_point<WallClock, Micros>;

constexpr Instant ToInstant(FineInstant now) { return std::chrono::time_point_cast<Millis>(now); }

// Leases follow the wall clock, because other servers have to agree on them. How long somebody
// waits is a matter of this server alone, and follows a clock that nobody can set: a step of the
// wall clock must not keep a client waiting beyond its time-out. Its zero means nothing.
struct SteadyClock {};
using Tick = std::chrono::time_point<SteadyClock, Millis>;
using FineTick = std::chrono::time_point<SteadyClock, Micros>;

constexpr Tick ToTick(FineTick now) { return std::chrono::time_point_cast<Millis>(now); }

// A fencing token. Later grants of a lock carry larger ones. Every issued token is in
// [kMinToken, kMaxToken]; the upper end keeps it exact in a double (JavaScript, Lua).
struct Token {
  uint64_t value = 0;
  friend constexpr auto operator<=>(Token, Token) = default;
};
inline constexpr Token kMinToken{1};
inline constexpr Token kMaxToken{(uint64_t{1} << 53) - 1};

// Who holds a lock: any bytes, 1 to kMaxOwnerBytes of them. A view: whoever keeps it copies it.
struct Owner {
  std::string_view bytes;
  friend constexpr bool operator==(Owner, Owner) = default;
};
inline constexpr size_t kMaxOwnerBytes = 256;

// A lock of this server. A view: whoever keeps it copies it.
struct LockName {
  int db = 0;
  std::string_view key;
  friend constexpr bool operator==(LockName, LockName) = default;
};

// How holders of a lock share it.
enum class Mode : uint8_t {
  kExclusive,  // one holder
  kShared,     // any number of holders
  kLimit,      // up to as many as the request that comes in allows
};

// How a hold came to its end, if its owner did not give it up.
enum class Loss : uint8_t {
  kExpired,      // its lease ran out
  kForced,       // somebody removed or replaced the key
  kEvicted,      // the server needed the memory
  kFlushed,      // its database was emptied
  kSession,      // the connection that it was bound to closed
  kUndelivered,  // its owner was gone before it could be told of the grant
};

// One owner's hold of a lock: what is stored, replicated and persisted.
struct Hold {
  Owner owner;
  Token token;
  Instant since;      // when it was granted; a renewal leaves it alone
  Instant end;        // the last millisecond of the lease
  Millis linger{0};   // how much longer it keeps others out if nobody releases it
  uint32_t count{1};  // how many releases it takes to give it up

  friend constexpr bool operator==(const Hold&, const Hold&) = default;

  // As Redis keys do, a hold lives through the whole of its last millisecond.
  constexpr bool LiveAt(Instant now) const { return now <= end; }

  // The last millisecond in which it keeps others out.
  constexpr Instant closes() const { return end + linger; }
  constexpr bool KeepsOutAt(Instant now) const { return now <= closes(); }
};

// One reading of both clocks, taken where a call enters the module and passed down from there.
struct Now {
  FineInstant wall;
  FineTick steady;

  Instant moment() const { return ToInstant(wall); }
  Tick tick() const { return ToTick(steady); }
};

// The range of moments that a hold may name: from 1970 up to what fits beside kMaxToken. Wide
// enough for any real clock, narrow enough that no sum of two moments overflows.
inline constexpr Instant kMinInstant{Millis{0}};
inline constexpr Instant kMaxInstant{Millis{(int64_t{1} << 53) - 1}};
// Never.
inline constexpr Tick kMaxTick{kMaxInstant.time_since_epoch()};

// Whether every field is in its range. What comes from a file or from another server is asked
// this before it is believed.
constexpr bool IsWellFormed(const Hold& hold) {
  return !hold.owner.bytes.empty() && hold.owner.bytes.size() <= kMaxOwnerBytes &&
         hold.token >= kMinToken && hold.token <= kMaxToken && hold.since >= kMinInstant &&
         hold.since <= kMaxInstant && hold.end >= kMinInstant && hold.end <= kMaxInstant &&
         hold.linger >= Millis{0} && hold.linger <= kMaxInstant - kMinInstant && hold.count >= 1;
}

}  // namespace turnstile

#endif  // TURNSTILE_CORE_TYPES_H_
