// The engine: everything that Turnstile does, behind one narrow interface to the server (host.h).
//
//     client -> commands -> Engine <- callbacks (key changed, removed, flushed, disconnected, role)
//                             |
//                             v asks and tells
//                            Host
//
// A command enters by one function below, with the time read once; the functions that begin with
// On tell what happened in the server; RunDueWork does what no command carries. Inside an event of
// the server a write is applied after, but replicated before, the command that caused it; and
// outside a command the server does not check whether a write is allowed at all: under CLIENT PAUSE
// it crashes, on a replica it silently diverges. So what happened is only recorded, and the work
// that follows from it is done in RunDueWork, which first asks whether this server may write now.
// If it may not, the work stays pending.
//
// Pending may be: the floor of the token clock, to be replicated when this server starts to issue,
// and again to those who get a copy of the data; the TTL of locks that strangers changed (EXPIRE,
// PERSIST, RESTORE), to be set back to their leases; the end of holds whose connection closed; and
// everything that waiting calls wait for.

#ifndef TURNSTILE_CORE_ENGINE_H_
#define TURNSTILE_CORE_ENGINE_H_

#include <functional>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/budget.h"
#include "core/decide.h"
#include "core/engine_state.h"
#include "core/fact.h"
#include "core/host.h"
#include "core/request.h"
#include "core/waiting_calls.h"
#include "core/writer.h"

namespace turnstile {

// The answer to LOCK.ACQUIRE.
struct AcquireResult {
  enum class Kind {
    kGranted,
    kBusy,   // it did not wait, or may not
    kWaits,  // it is answered later
    kRefused,
    kWrongType,
    kNoSession,      // SESSION without a connection
    kWaitLimit,      // `limit` calls wait already
    kUserWaitLimit,  // likewise, of this user
    kCannotWait,     // the server does not let this connection wait
    kDeadlock,
  };
  Kind kind;
  Token token{};                        // if granted
  Outcome outcome = Outcome::kGranted;  // if refused: why
  size_t limit = 0;
  std::vector<ParkResult::Step> cycle{};  // of a deadlock
};

// The answer to LOCK.RELEASE and LOCK.TOUCH.
struct CountResult {
  enum class Kind { kDone, kWrongType, kMissingCommand };
  Kind kind = Kind::kDone;
  size_t count = 0;               // of locks that it was done to
  const char* missing = nullptr;  // the command that the server lacks to change a plain lock
};

// The answer to LOCK.FENCE.
struct FenceResult {
  bool wrong_type = false;
  bool current = false;          // the token holds the lock
  std::optional<Token> holds{};  // the highest one that does
};

// What LOCK.INFO tells. Holders and waiters are the first ones, in order of their tokens and of
// arrival.
struct LockInfo {
  struct Holder {
    std::optional<std::string> owner;
    std::optional<Token> token;
    std::optional<Millis> lease_left;
    std::optional<Millis> held;
    uint32_t count = 1;
    Millis linger{0};
    std::optional<uint64_t> session;  // the connection that the hold ends with
  };
  struct Waiter {
    std::string owner;
    Mode mode = Mode::kExclusive;
    Millis waited{0};
    Millis left{0};
    uint64_t connection = 0;
  };
  Mode mode = Mode::kExclusive;  // in which it is held, or in which the first in line asks for it
  bool is_plain = false;
  size_t holding = 0;
  std::vector<Holder> holders;
  Millis linger_left{0};
  size_t waiting = 0;
  std::vector<Waiter> waiters;
  Millis grace_left{0};
};

// What LOCK.LIST and LOCK.TOP tell of one lock; of several holders about the one with the highest
// token.
struct LockSummary {
  std::string key;
  Mode mode = Mode::kExclusive;
  bool is_plain = false;
  size_t holding = 0;
  std::optional<std::string> owner;
  std::optional<Token> token;
  std::optional<Millis> held;
  std::optional<Millis> lease_left;
  Millis linger_left{0};
  size_t waiting = 0;
  Millis longest_wait{0};
};

class Engine {
 public:
  explicit Engine(Host& host) : state_(host), writer_(state_), waiting_(state_, writer_) {}
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // --- Commands of clients, on a primary. The first key is the one that the command names, the
  // others follow ALSO.

  AcquireResult Acquire(std::span<const KeyName> names, const AcquireRequest& request,
                        const Now& now);
  CountResult Release(std::span<const KeyName> names, const ReleaseRequest& request, Instant now);
  CountResult Touch(std::span<const KeyName> names, const TouchRequest& request, Instant now);
  FenceResult Fence(const KeyName& name, const FenceRequest& request, Instant now);

  // Null if nobody holds the lock or waits for it; nothing if the key holds something else.
  std::optional<std::optional<LockInfo>> Inspect(const KeyName& name, const Now& now);
  std::optional<LockSummary> Summarize(const KeyName& name, const Now& now, Budget& budget);
  // Copies of the names of the longest lines of a database, the longest first.
  std::vector<std::string> LongestLines(int db, size_t most) const;
  // How many locks there are on this server.
  size_t CountLocks();

  // --- What the primary, or the AOF, says: applied as it is, never decided

  void ApplyRelease(const KeyName& name, Owner owner);
  void ApplyFact(const KeyName& name, const HeldFact& fact);
  // `name` is of the fact's key; a floor has none.
  void ApplyFact(const KeyName& name, const Fact& fact);

  // --- What happened in the server. Only recorded: no key is opened

  // Whatever removes a lock from its key, other than a flush or a swap, is told here. `now`: none
  // while the server loads, or if is_removing().
  void OnKeyRemoved(LockName name, const Lock& lock, std::optional<Instant> now) {
    writer_.OnKeyRemoved(name, lock, now);
  }
  // Whether it is the engine itself that removes a key now.
  bool is_removing() const { return writer_.is_removing(); }
  // It was removed because the server needed the memory, or taken to another name or database.
  void OnKeyEvicted(LockName name) { state_.reporter.Evicted(name); }
  void OnKeyRenamed(LockName old_name) { state_.reporter.Renamed(old_name); }
  // The key of this name was changed, in whatever database: in a transaction Valkey 9 does not tell
  // which.
  void OnKeyChanged(std::string_view key) {
    if (!state_.queue.empty()) state_.queue.WakeEvery(key);
  }
  // Its TTL may have been changed on this primary.
  void OnTtlChanged(std::string_view key);
  // A lock with this token was loaded or restored into a database, or a value of no key (< 0).
  void OnLockLoaded(int db, std::optional<Token> token);
  void OnLocksMayBeIn(int db) { state_.databases.Add(db); }
  // A database, or all of them, is about to be emptied; and was.
  void OnFlushing(std::optional<int> db, Instant now);
  void OnFlushed(std::optional<int> db);
  void OnSwapped(int first, int second);
  void OnPromoted() { waiting_.OnPromoted(); }
  void OnDemoted();
  void OnDisconnected(uint64_t connection);
  // A copy of all data is about to be made.
  void OnCopy(FineInstant now) { state_.tokens.ReplicateFloorSoon(now); }
  void OnSettingsChanged() { state_.queue.WakeAll(std::nullopt); }

  void OnUnblocked(WaitingCall& call, bool timed_out, Tick now);
  void OnReplied(WaitingCall* call, bool delivered) { waiting_.OnReplied(call, delivered); }

  // --- Work that no command carries

  // Whether RunDueWork has nothing to do, now or later. Cheap.
  bool is_idle() const;
  // Returns when it has to be called again, if nothing happens before.
  std::optional<Instant> RunDueWork(const Now& now, Budget budget);
  // Tells subscribers what has not been told yet.
  void Drain() { state_.reporter.Drain(); }

  // Answers those who wait for locks of which `why` tells why they cannot be granted here any more.
  void EndWaits(const std::function<std::optional<std::string>(LockName)>& why) {
    waiting_.EndWaits(why);
  }

  // --- What it keeps

  Settings& settings() { return state_.settings; }
  const Settings& settings() const { return state_.settings; }
  Stats& stats() { return state_.stats; }
  const Stats& stats() const { return state_.stats; }
  TokenIssuer& tokens() { return state_.tokens; }
  const TokenIssuer& tokens() const { return state_.tokens; }
  const WaitQueue& queue() const { return state_.queue; }
  const Sessions& sessions() const { return state_.sessions; }

 private:
  void EndClosedSessionsOf(OpenKeys& keys, Owner owner, Instant now);
  std::vector<bool> EndClosedSessions(OpenKeys& keys, Instant now);
  template <typename Request>
  const char* MissingCommand(OpenKeys& keys, const Request& request, Instant now);
  AcquireResult Park(const OpenKeys& keys, std::span<const Site> sites,
                     const AcquireRequest& request, std::optional<uint64_t> session,
                     const Now& now);
  // Whether there is something to write that does not wait for a moment to come.
  bool has_tasks() const;
  void RestoreTtls(Instant now, Budget& budget);
  void RestoreTtl(LockName name, Instant now);

  EngineState state_;
  Writer writer_;
  WaitingCalls waiting_;
  // Names of keys whose TTL somebody changed, or moved, while there were locks: some may be locks.
  std::set<std::string, std::less<>> keys_with_foreign_ttl_;
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_ENGINE_H_
