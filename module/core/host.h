// All that the engine may ask of a server.
//
// The engine (engine.h) decides and keeps the books; a host opens and writes keys, replicates,
// publishes and answers. There are two: redis/redis_host, a real server, and tests/sim/sim_host, a
// simulated one in simulated time that can be as nasty as real ones. So what the simulator, the
// fuzzer and the history tests run is the code that ships.
//
// Some of these calls make the server tell of something at once, by one of the engine's functions
// that begin with On and only record: Open, Store, Delete and ChangePlain may remove or change a
// key; BeforeGrant and RefreshSlots may raise the token clock, and RefreshSlots answer those who
// wait for slots that are gone.

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
#include "core/types.h"

namespace turnstile {

class Host;
class WaitingCall;

// What a server is, as far as locks are concerned.
enum class Role {
  kPrimary,  // decides
  kReplica,  // applies what its primary decided
  kLoading,  // reads its data
};

enum class Access {
  kRead,     // for a command that only reads
  kWrite,    // for a command that may write
  kInspect,  // on nobody's behalf: may write, and does not count as a use of the key (LRU, hits)
};

// A key to open. `handle`: what the host knows it by, if it is an argument of the running command;
// then the host knows its database better than whoever asks.
struct KeyName {
  LockName lock;
  void* handle = nullptr;
};

// What a host finds in a key, and what it needs to write it.
struct KeyContent {
  LockName name;
  Lock* lock = nullptr;
  bool is_plain = false;  // a string, where strings count as locks
  bool is_other = false;  // neither a lock nor a plain lock nor nothing
  // The host's own.
  void* key = nullptr;
  void* handle = nullptr;
  bool owns_handle = false;
};

// A key that is open. Lives for one step of the engine and no longer.
class OpenKey {
 public:
  // Opening a key whose TTL has run out removes it, as any command does.
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
  Place place() const;

  // For hosts.
  KeyContent& content() { return content_; }
  const KeyContent& content() const { return content_; }

 private:
  Host* host_;
  KeyContent content_;
};

// The keys of all the locks that a request names, open. A request for one costs no allocation.
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

// What carries a change to replicas and the AOF.
enum class Via {
  kCommand,   // the command that is running, which says just this
  kFact,      // a fact, because the command that is running says something else
  kDeferred,  // a fact, because no command of ours is running
};

// What happens to locks, as those who subscribe to keyspace events are told.
enum class LockEvent : uint8_t { kAcquired, kTouched, kReleased, kLost };

class Host {
 public:
  // --- Keys

  virtual KeyContent Open(const KeyName& name, Access access) = 0;
  virtual void Close(KeyContent& key) = 0;
  // The plain lock in a key that has one.
  virtual PlainLock ReadPlain(const KeyContent& key) = 0;
  // Stores `lock`, which may already be in the key, to be removed after its last hold closes. What
  // was in the key before is freed.
  virtual void Store(KeyContent& key, Lock* lock) = 0;
  virtual void Delete(KeyContent& key) = 0;
  // The moment at which the server will remove the key by itself, if it will.
  virtual std::optional<Instant> ExpiryOf(const KeyContent& key) = 0;
  // A plain lock is not ours: it is changed by the server's own commands, which notify and
  // replicate themselves. The name of the command for such a change if the server lacks it, else
  // null.
  virtual const char* MissingCommandFor(const Change& change) = 0;
  virtual void ChangePlain(KeyContent& key, const Change& change) = 0;
  // How many locks there are in memory, including values not yet lazily freed.
  virtual size_t StoredLocks() = 0;
  virtual size_t CountKeys(int db) = 0;
  // Shows the locks of a database to `visit`, until it returns false or there are no more.
  virtual void VisitLocks(int db, const std::function<bool(LockName, const Lock&)>& visit) = 0;

  // --- Replication

  virtual void Replicate(const KeyContent& key, const Held& held, Via via, Instant now) = 0;
  virtual void Replicate(const KeyContent& key, const Released& released, Via via) = 0;
  virtual void Replicate(const KeyContent& key, const Ended& ended) = 0;
  virtual void Replicate(const KeyContent& key, const Expired& expired) = 0;
  virtual void Replicate(const KeyContent& key, const SessionsEnded& ended) = 0;
  // The fact that is running, to our own replicas and AOF.
  virtual void ReplicateVerbatim() = 0;
  virtual void ReplicateFloor(Token floor) = 0;
  // Whether anybody would get what is replicated; and whether a fact that belongs to no slot may be
  // replicated now.
  virtual bool HasReplicationConsumers(Instant now) = 0;
  virtual bool MayReplicateFloor() = 0;

  // --- Subscribers and operators

  virtual void Emit(const KeyContent& key, LockEvent event) = 0;
  virtual void EmitLost(const KeyContent& key, Loss how) = 0;
  virtual void EmitLost(LockName lock, Loss how) = 0;
  virtual void Warn(const std::string& text) = 0;

  // --- The command that is running

  // The connection that it came over; none inside scripts, functions and calls of modules.
  virtual std::optional<uint64_t> CallerConnection() = 0;
  virtual bool CallerMayBlock() = 0;
  // None if a module calls on behalf of nobody.
  virtual std::optional<std::string> CallerUser() = 0;

  // --- Calls that wait

  // Lets the running command wait, to be answered by Answer; false if the server does not allow it.
  virtual bool Park(WaitingCall& call) = 0;
  // Ends the wait. The host says later whether the answer reached the caller (Engine::OnReplied).
  virtual void Answer(WaitingCall& call) = 0;
  virtual bool IsConnected(uint64_t connection) = 0;

  // --- What the server allows now

  virtual Role role() = 0;
  // Whether a write outside a command is allowed.
  virtual bool MayWrite() = 0;
  // Why a direct call would be refused that a waiting call is about to be granted: rights, slot,
  // memory, replicas. In the words of the server.
  virtual std::optional<std::string> GrantRefusal(const WaitingCall& call,
                                                  const KeyContent& key) = 0;
  // Somebody is about to become a holder of this lock: in a cluster the token clock may have to
  // get ahead of what another node has issued (Engine::tokens().SlotsCame).
  virtual void BeforeGrant(LockName lock, FineInstant now) = 0;
  // In a cluster, looks at the slots if that is due: the token clock follows those that come, and
  // those who wait for what is gone are answered (Engine::EndWaits). And when it is due next.
  virtual void RefreshSlots(FineInstant now) = 0;
  virtual std::optional<Instant> NextSlotRefresh() = 0;
  // Whether a lock that is being removed, though it is held, goes to another node of a cluster.
  virtual bool MovesAway(LockName lock) = 0;

  // --- The event loop

  // RunDueWork is to be called soon: something was recorded outside a client's command.
  virtual void WakeEventLoop() = 0;
  // From now on every write that can change a string is told (Engine::OnKeyChanged).
  virtual void WatchStrings() = 0;

 protected:
  ~Host() = default;
};

inline OpenKey::OpenKey(Host& host, const KeyName& name, Access access)
    : host_(&host), content_(host.Open(name, access)) {}

inline OpenKey::~OpenKey() {
  if (host_ != nullptr) host_->Close(content_);
}

inline Place OpenKey::place() const {
  Place place{.lock = content_.lock};
  if (content_.is_plain) place.plain = host_->ReadPlain(content_);
  return place;
}

}  // namespace turnstile

#endif  // TURNSTILE_CORE_HOST_H_
