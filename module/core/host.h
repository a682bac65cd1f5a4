// The interface through which the engine uses a server.
//
// The engine (engine.h) decides and keeps the state; a host opens and writes keys, replicates,
// publishes and answers. There are two hosts: redis/redis_host, a real server, and
// tests/sim/sim_host, a simulated server in simulated time that can behave as badly as real ones.
// So the simulator, the fuzzer and the history tests run the code that ships.
//
// Some of these calls make the server report an event at once, by calling one of the engine's
// functions that begin with On, which only record. Open, Store, Delete and ChangePlain may remove
// or change a key. BeforeGrant and RefreshSlots may raise the token clock.

#ifndef TURNSTILE_CORE_HOST_H_
#define TURNSTILE_CORE_HOST_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "core/decide.h"
#include "core/lock.h"
#include "core/lock_events.h"
#include "core/notice.h"
#include "core/types.h"

namespace turnstile {

class Host;
class WaitingCall;

// The role of a server, as far as locks are concerned.
enum class Role {
  kPrimary,  // decides
  kReplica,  // applies what its primary decided
  kLoading,  // is loading its data
};

enum class Access {
  kRead,     // for a command that only reads
  kWrite,    // for a command that may write
  kInspect,  // for internal work: may write, and does not count as a use of the key (LRU, hits)
};

// A key to open. If the key is an argument of the running command, `handle` is the host's name for
// it; the host then determines the database itself.
struct KeyName {
  LockName lock;
  void* handle = nullptr;
};

// What a host finds in a key, and what it needs to write it.
struct KeyContent {
  LockName name;
  Lock* lock = nullptr;
  bool is_plain = false;  // a string, where strings count as locks
  bool is_other = false;  // neither a lock nor a plain lock, and not empty
  // For the host's own use.
  void* key = nullptr;
  void* handle = nullptr;
  bool owns_handle = false;
};

// An open key. It must not outlive the step of the engine that opened it.
class OpenKey {
 public:
  // Opening a key whose TTL has ended removes it, as with any command.
  OpenKey(Host& host, const KeyName& name, Access access);
  ~OpenKey();
  OpenKey(OpenKey&& other) noexcept
      : host_(std::exchange(other.host_, nullptr)), content_(other.content_) {}
  OpenKey(const OpenKey&) = delete;
  OpenKey& operator=(const OpenKey&) = delete;

  LockName name() const { return content_.name; }
  Lock* lock() const { return content_.lock; }
  bool is_plain() const { return content_.is_plain; }
  bool wrong_type() const { return content_.is_other; }
  // The value of a plain lock is valid until the key is changed or closed.
  KeyState state() const;

  // For hosts.
  KeyContent& content() { return content_; }
  const KeyContent& content() const { return content_; }

 private:
  Host* host_;
  KeyContent content_;
};

// The open keys of all locks that a request names. A request for one lock costs no allocation.
class OpenKeys {
 public:
  OpenKeys(Host& host, std::span<const KeyName> names, Access access)
      : first_(host, names.front(), access) {
    if (names.size() == 1) return;
    more_.reserve(names.size() - 1);
    for (const KeyName& name : names.subspan(1)) more_.emplace_back(host, name, access);
  }

  size_t size() const { return 1 + more_.size(); }
  OpenKey& operator[](size_t index) { return index == 0 ? first_ : more_[index - 1]; }
  const OpenKey& operator[](size_t index) const { return index == 0 ? first_ : more_[index - 1]; }
  bool any_wrong_type() const {
    for (const OpenKey& key : more_) {
      if (key.wrong_type()) return true;
    }
    return first_.wrong_type();
  }

 private:
  OpenKey first_;
  std::vector<OpenKey> more_;
};

// What came of a message.
struct Delivery {
  size_t receivers = 0;  // the subscribers of this server that it was sent to
  // What it cost more than an ordinary message, in units of the budget (budget.h): anybody may
  // subscribe a thousand connections to a channel, or to ten thousand patterns, each of which the
  // server compares with the channel.
  size_t cost = 0;
};

// What carries a change to replicas and the AOF.
enum class Via {
  kCommand,   // the running command, which says exactly this
  kFact,      // a fact, because the running command says something else
  kDeferred,  // a fact, because no command of ours is running
};

class Host {
 public:
  // --- Keys

  virtual KeyContent Open(const KeyName& name, Access access) = 0;
  virtual void Close(KeyContent& key) = 0;
  // Requires a key that holds a plain lock.
  virtual PlainLock ReadPlain(const KeyContent& key) = 0;
  // Stores `lock`, which may already be in the key, and sets the key to expire when the last hold
  // stops blocking others. Frees what was in the key before.
  virtual void Store(KeyContent& key, Lock* lock) = 0;
  virtual void Delete(KeyContent& key) = 0;
  // The time at which the server will remove the key by itself, if any.
  virtual std::optional<Instant> ExpiryOf(const KeyContent& key) = 0;
  // A plain lock is not a value of ours: it is changed by the server's own commands, which notify
  // and replicate by themselves. Returns the name of the command for such a change if the server
  // lacks it, otherwise null.
  virtual const char* MissingCommandFor(const Change& change) = 0;
  virtual void ChangePlain(KeyContent& key, const Change& change) = 0;
  // The number of locks in memory, including values that are not yet lazily freed.
  virtual size_t StoredLocks() = 0;
  virtual size_t CountKeys(int db) = 0;
  // Calls `visit` for each lock of a database until it returns false or there are no more.
  virtual void VisitLocks(int db, const std::function<bool(LockName, const Lock&)>& visit) = 0;

  // --- Replication

  virtual void Replicate(const KeyContent& key, const HoldSet& held, Via via, Instant now) = 0;
  virtual void Replicate(const KeyContent& key, const HoldReleased& released, Via via) = 0;
  virtual void Replicate(const KeyContent& key, const HoldEnded& ended) = 0;
  virtual void Replicate(const KeyContent& key, const HoldsExpired& expired) = 0;
  virtual void Replicate(const KeyContent& key, const SessionsEnded& ended) = 0;
  // Replicates the fact that is being run to this server's own replicas and AOF.
  virtual void ReplicateVerbatim() = 0;
  virtual void ReplicateFloor(Token floor) = 0;
  // Whether anybody consumes what is replicated; and whether a fact that belongs to no slot may be
  // replicated now.
  virtual bool HasReplicationConsumers(Instant now) = 0;
  virtual bool MayReplicateFloor() = 0;

  // --- Subscribers and operators

  virtual void Emit(const KeyContent& key, LockEvent event) = 0;
  virtual void EmitLost(const KeyContent& key, Loss how) = 0;
  virtual void EmitLost(LockName lock, Loss how) = 0;
  // Publishes a message if its user may still publish to its channel. Requires that the engine is
  // in RunDueWork.
  virtual Delivery Publish(const Notice& notice) = 0;
  virtual void Warn(const std::string& text) = 0;

  // --- The running command

  // The connection that it came over; none inside scripts, functions and calls of modules.
  virtual std::optional<uint64_t> CallerConnection() = 0;
  // The caller that would be blocked if the command waited; none where a client cannot be blocked:
  // inside MULTI, scripts, functions and calls of modules.
  struct ParkableCaller {
    uint64_t connection;
    std::string user;
  };
  virtual std::optional<ParkableCaller> CallerToPark() = 0;
  // The user that wants to be notified of what becomes of this lock; or the error with which the
  // server would refuse to publish that to this channel on its behalf.
  struct NotifiedCaller {
    std::string user;
    std::optional<std::string> refusal;
  };
  virtual NotifiedCaller CallerToNotify(std::string_view channel, LockName lock) = 0;

  // --- Calls that wait

  // Blocks the caller of the running command until Answer is called. Returns false if the server
  // does not allow it.
  virtual bool Park(WaitingCall& call) = 0;
  // Ends the wait. The host reports later whether the answer reached the caller
  // (Engine::OnReplied).
  virtual void Answer(WaitingCall& call) = 0;
  virtual bool IsConnected(uint64_t connection) = 0;

  // --- What the server allows now

  virtual Role role() = 0;
  // Whether a write outside a command is allowed.
  virtual bool MayWrite() = 0;
  // The error with which the server would refuse a direct call that asks for what this waiting call
  // is about to be granted (access rights, slot, memory, replicas), worded as the server words it;
  // none if it would accept the call.
  virtual std::optional<std::string> GrantRefusal(const WaitingCall& call,
                                                  const KeyContent& key) = 0;
  // Called before anybody becomes a new holder of this lock. In a cluster the token clock may have
  // to be advanced beyond what another node has issued (Engine::tokens().OnSlotsArrived).
  virtual void BeforeGrant(LockName lock, FineInstant now) = 0;
  // In a cluster, checks which slots are served here, if a check is due. The token clock is
  // advanced for slots that have arrived (TokenIssuer::OnSlotsArrived).
  struct SlotRefresh {
    bool may_be_lost = false;  // whether slots may have been lost: see SlotRefusal
    Due next = Due::Never();   // when to call again
  };
  virtual SlotRefresh RefreshSlots(FineInstant now) = 0;
  // Why the lock can no longer be granted on this node, worded as the server words it; none if its
  // slot is served here.
  virtual std::optional<std::string> SlotRefusal(LockName lock) = 0;
  // Whether a lock that is being removed while it is held moves to another node of a cluster.
  virtual bool MovesAway(LockName lock) = 0;

  // --- The event loop

  // A host calls RunDueWork when it is due, and at the end of every pass of the event loop in which
  // or after which a call was parked or RunSoon was called, until the engine is idle. At other
  // times the module must not cost the server anything.
  virtual void RunSoon() = 0;
  // Likewise, for what was recorded outside a client's command: the loop must not sleep before.
  virtual void WakeEventLoop() = 0;
  // From now on the host must report connections that close (Engine::OnDisconnected), as long as
  // any hold or wait is bound to one.
  virtual void WatchConnections() = 0;
  // From now on the host must report changes of keys, as it does while there are locks, as long as
  // any call waits. Implied by Park.
  virtual void WatchKeys() = 0;
  // From now on the host must report every write that can change a string (Engine::OnKeyChanged).
  virtual void ListenForStringWrites() = 0;

 protected:
  ~Host() = default;
};

inline OpenKey::OpenKey(Host& host, const KeyName& name, Access access)
    : host_(&host), content_(host.Open(name, access)) {}

inline OpenKey::~OpenKey() {
  if (host_ != nullptr) host_->Close(content_);
}

inline KeyState OpenKey::state() const {
  KeyState key_state{.lock = content_.lock};
  if (content_.is_plain) key_state.plain = host_->ReadPlain(content_);
  return key_state;
}

}  // namespace turnstile

#endif  // TURNSTILE_CORE_HOST_H_
