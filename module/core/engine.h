// The engine: everything that Turnstile does, behind one narrow interface to the server (host.h).
//
//     client -> commands -> Engine <- callbacks (key changed, removed, flushed, disconnected, role)
//                             |
//                             v calls
//                            Host
//
// A command enters through one of the functions below, with the time read once. The functions that
// begin with On report what happened in the server. RunDueWork does the work that no command
// carries. A write inside a server event is applied after the command that caused the event, but
// replicated before it. Outside a command the server does not check whether a write is allowed at
// all: under CLIENT PAUSE it crashes, and a replica silently diverges. So events are only recorded,
// and the work that follows from them is done in RunDueWork, which first checks whether this server
// may write now. If it may not, the work stays pending.
//
// The following can be pending: the floor of the token clock, which is replicated when this server
// starts to issue and again when a copy of the data is made; the TTL of locks that other clients
// changed (EXPIRE, PERSIST, RESTORE), which is set back to the lease; the end of holds whose
// connection closed; and everything that waiting calls wait for.

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
    kBusy,    // it did not ask to wait, or may not
    kWaits,   // it is answered later
    kQueued,  // its outcome is published later
    kRefused,
    kWrongType,
    kNoSession,      // SESSION without a connection
    kNotifyRefused,  // NOTIFY, but the server does not let the caller publish: `text`
    kWaitLimit,      // `limit` clients are waiting already
    kUserWaitLimit,  // likewise, of this user
    kQueueLimit,     // `limit` entries of calls that do not block are in queues already
    kCannotWait,     // the server does not let this connection wait
    kDeadlock,
  };
  Kind kind;
  Token token{};                        // if granted
  Outcome outcome = Outcome::kGranted;  // if refused: why
  size_t limit = 0;
  std::vector<ParkResult::Step> cycle{};  // of a deadlock
  std::string text{};
};

// The answer to LOCK.RELEASE and LOCK.TOUCH.
struct CountResult {
  enum class Kind { kDone, kWrongType, kMissingCommand };
  Kind kind = Kind::kDone;
  size_t count = 0;               // the number of locks released or touched
  const char* missing = nullptr;  // the command that the server lacks to change a plain lock
};

// The answer to LOCK.FENCE.
struct FenceResult {
  bool wrong_type = false;
  bool current = false;          // the token holds the lock
  std::optional<Token> holds{};  // the highest token that does
};

// What LOCK.INFO shows: the first holders in order of their tokens, and the first waiters in order
// of arrival.
struct LockInfo {
  struct Holder {
    std::optional<std::string> owner;
    std::optional<Token> token;
    std::optional<Millis> lease_left;
    std::optional<Millis> held;
    uint32_t count = 1;
    Millis linger{0};
    std::optional<uint64_t> session{};  // the connection that the hold is bound to
    uint32_t weight = 1;
    std::optional<std::string> tag{};
    std::optional<Millis> max_hold_left{};
  };
  struct Waiter {
    std::string owner;
    Mode mode = Mode::kExclusive;
    Millis waited{0};
    Millis left{0};
    std::optional<uint64_t> connection;  // that waits, or that the wait is bound to
    std::optional<std::string> tag;
  };
  Mode mode = Mode::kExclusive;  // in which it is held; if it is free, that of the first waiter
  bool is_plain = false;
  size_t holding = 0;
  std::vector<Holder> holders;
  Millis linger_left{0};
  size_t waiting = 0;
  std::vector<Waiter> waiters;
  Millis grace_left{0};
};

// What LOCK.LIST and LOCK.TOP show of one lock. If it has several holders, the fields describe the
// one with the highest token.
struct LockSummary {
  std::string key;
  Mode mode = Mode::kExclusive;
  bool is_plain = false;
  size_t holding = 0;
  std::optional<std::string> owner;
  std::optional<std::string> tag{};
  std::optional<Token> token;
  std::optional<Millis> held;
  std::optional<Millis> lease_left;
  Millis linger_left{0};
  size_t waiting = 0;
  Millis longest_wait{0};
};

class Engine {
 public:
  Engine(Host& host, const HashKey& hash_key)
      : state_(host, hash_key), writer_(state_), waiting_(state_, writer_) {}
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // --- Commands of clients, on a primary. The first key is the one that the command names; the
  // others follow ALSO.

  AcquireResult Acquire(std::span<const KeyName> names, const AcquireRequest& request,
                        const Now& now);
  CountResult Release(std::span<const KeyName> names, const ReleaseRequest& request, Instant now);
  CountResult Touch(std::span<const KeyName> names, const TouchRequest& request, Instant now);
  FenceResult Fence(const KeyName& name, const FenceRequest& request, Instant now);

  // The inner optional is empty if nobody holds the lock or waits for it; the outer one is empty if
  // the key holds another type.
  std::optional<std::optional<LockInfo>> Inspect(const KeyName& name, const Now& now);
  std::optional<LockSummary> Summarize(const KeyName& name, const Now& now, Budget& budget);
  // Copies of the names of the longest lock queues of a database, longest first.
  std::vector<std::string> LongestQueues(int db, size_t most) const;
  // The number of locks on this server.
  size_t CountLocks();

  // --- What the primary or the AOF decided: applied as it is, never decided again

  void ApplyRelease(const KeyName& name, Owner owner);
  void ApplyFact(const KeyName& name, const HoldSetFact& fact);
  // `name` is the fact's key. A floor has none.
  void ApplyFact(const KeyName& name, const Fact& fact);

  // --- What happened in the server. Only recorded: no key is opened (OnFlushing visits all keys)

  // Must be called whenever a lock is removed from its key, except by a flush or a swap. If
  // is_removing(), role and time do not matter; the time is also absent while the server is
  // loading.
  void OnKeyRemoved(LockName name, const Lock& lock, Role role, std::optional<Instant> now) {
    writer_.OnKeyRemoved(name, lock, role, now);
  }
  // Whether the engine itself is removing a key.
  bool is_removing() const { return writer_.is_removing(); }
  // The key was removed because the server needed memory; or it was renamed or moved to another
  // database.
  void OnKeyEvicted(LockName name) {
    state_.reporter.OnEvicted(name);
    state_.channels.OnEvicted(name);
  }
  void OnKeyRenamed(LockName old_name);
  // A key has come to this name, or to this name in another database. Follows OnKeyRenamed.
  void OnKeyArrived(std::string_view key);
  // Whether a key of this name may be a lock. Wrong answers are possible, but only such ones.
  bool MayBeLock(std::string_view key) const { return state_.names.MayContain(key); }
  // There is no lock in any database.
  void OnLocksGone() { state_.names.Clear(); }
  // The key of this name was changed in some database: in a transaction Valkey 9 does not report
  // which.
  void OnKeyChanged(std::string_view key) {
    if (!state_.queue.empty()) state_.queue.WakeInEveryDatabase(key);
  }
  // The TTL of the key may have been changed on this primary.
  void OnTtlChanged(std::string_view key);
  // A lock with this token was loaded or restored into a database; `db` < 0 if it is not known
  // which.
  void OnLockLoaded(LockName name, std::optional<Token> token);
  void OnLocksMayBeIn(int db) { state_.databases.Add(db); }
  // A database, or all of them if `db` is absent, is about to be emptied; and has been emptied.
  void OnFlushing(std::optional<int> db, Instant now);
  void OnFlushed(std::optional<int> db);
  void OnSwapped(int first, int second);
  // The process has started, and may be a primary as soon as it has loaded its data.
  void OnStarted(FineInstant now);
  void OnPromoted();
  void OnDemoted();
  void OnDisconnected(uint64_t connection);
  // A copy of all data is about to be made.
  void OnCopy(FineInstant now);
  void OnSettingsChanged() { state_.queue.WakeAll(std::nullopt); }

  void OnUnblocked(WaitingCall& call, bool timed_out, Tick now);
  void OnReplied(WaitingCall* call, bool delivered) { waiting_.OnReplied(call, delivered); }

  // --- Work that no command carries

  // Whether RunDueWork has nothing to do, now or at any time that it has not named. Cheap.
  bool is_idle() const;
  // Does the work that is due, within the budget. Returns when it must be called again.
  Due RunDueWork(const Now& now, Budget budget);
  // Publishes and counts what is still pending. Called in every such pass, and before statistics
  // are shown.
  void PublishPending() { state_.reporter.PublishPending(); }

  // --- State

  Settings& settings() { return state_.settings; }
  const Settings& settings() const { return state_.settings; }
  Stats& stats() { return state_.stats; }
  const Stats& stats() const { return state_.stats; }
  TokenIssuer& tokens() { return state_.tokens; }
  const TokenIssuer& tokens() const { return state_.tokens; }
  const WaitQueue& queue() const { return state_.queue; }
  const Sessions& sessions() const { return state_.sessions; }
  const Channels& channels() const { return state_.channels; }
  const WaitingCalls& waiting() const { return waiting_; }
  // Whether a hold or a wait ends with its connection.
  bool has_sessions() const { return !state_.sessions.empty() || waiting_.has_sessions(); }
  // For tests: whether all redundant data structures agree.
  bool IsConsistent() {
    return state_.queue.IsConsistent() && state_.sessions.IsConsistent() &&
           state_.channels.IsConsistent();
  }

 private:
  void EndClosedSessionsOf(OpenKeys& keys, Owner owner, Instant now);
  void ConfirmGrants(const OpenKey& key, Owner owner, Instant now);
  std::vector<bool> EndClosedSessions(OpenKeys& keys, Instant now);
  template <typename Request>
  const char* MissingCommand(OpenKeys& keys, const Request& request, Instant now);
  template <typename Request>
  std::optional<CountResult> Prepare(OpenKeys& keys, const Request& request, Instant now);
  AcquireResult Park(const OpenKeys& keys, std::span<const LockView> views,
                     const AcquireRequest& request, const Host::ParkableCaller& caller,
                     const Now& now);
  // Whether there is something to write that can be done at once, without waiting for a certain
  // time.
  bool has_tasks() const;
  void RunTasks(const Now& now, Budget& budget);
  void RestoreTtls(Instant now, Budget& budget);
  void RestoreTtl(LockName name, Instant now);

  EngineState state_;
  Writer writer_;
  WaitingCalls waiting_;
  // Names of keys whose TTL was changed, or which were moved, by other commands while there were
  // locks. Some of these keys may be locks.
  std::set<std::string, std::less<>> keys_with_foreign_ttl_;
  bool lock_arrives_ = false;  // the key that is being renamed or moved is a lock
  bool must_start_ = false;    // this server may have become a primary, and does not issue yet
  bool running_ = false;       // whether RunDueWork is running; it must not be re-entered
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_ENGINE_H_
