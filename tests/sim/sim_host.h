// A server in simulated time, around the engine that ships.
//
// It has databases of keys, connections, a replication stream, events in the order in which real
// servers send them, and whatever real servers do to a module: keys that expire while they are
// opened, writes that are refused now and allowed later, callers that vanish before or after they
// were answered, rights and slots that go. What the engine decides goes into a log as the words of
// real commands, which is both its AOF and its stream to replicas; who reads the log parses those
// words again. A copy of its data is the real encoded bytes.

#ifndef TURNSTILE_TESTS_SIM_SIM_HOST_H_
#define TURNSTILE_TESTS_SIM_SIM_HOST_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "core/budget.h"
#include "core/engine.h"
#include "core/host.h"
#include "core/request.h"
#include "core/types.h"

namespace turnstile::sim {

// Commands, each a row of words for one database.
class CommandLog {
 public:
  struct Command {
    int db = 0;
    std::vector<std::string_view> words;  // views into the log
  };

  size_t size() const { return commands_.size(); }
  void Clear();
  void Append(int db, std::span<const std::string_view> words);
  Command Read(size_t index) const;

 private:
  struct End {
    uint32_t words;  // where the command ends in words_
    int db;
  };
  std::string bytes_;
  std::vector<uint32_t> words_;  // where each ends in bytes_
  std::vector<End> commands_;
};

// Who runs a command. The tag comes back with the answer to a call that waited.
struct Caller {
  uint64_t connection = 1;
  uint64_t tag = 0;
  int db = 0;
  std::string user = "default";  // empty: a module that calls on behalf of nobody
  bool may_block = true;
  bool in_script = false;  // nothing there tells the connection
};

// The answer to a call that waited. Somebody has to say whether it reached the caller (Replied).
struct Answered {
  WaitingCall* call;
  uint64_t connection;
  uint64_t tag;
  size_t log_size;  // how much had been replicated by then
};

class SimHost final : public Host {
 public:
  // All data at one moment, as an RDB file or a full synchronisation carries it.
  struct Copy {
    struct Value {
      enum class Kind { kLock, kString, kList } kind = Kind::kLock;
      std::string bytes;  // of a lock encoded
      std::optional<Instant> expiry;
    };
    std::map<std::pair<int, std::string>, Value> values;
    std::optional<Token> clock;  // if it leads the wall clock
  };

  SimHost();
  ~SimHost();
  SimHost(const SimHost&) = delete;
  SimHost& operator=(const SimHost&) = delete;

  Engine& engine() { return engine_; }
  const Engine& engine() const { return engine_; }

  // --- What clients do

  AcquireResult Acquire(const Caller& caller, std::span<const std::string_view> keys,
                        const AcquireRequest& request, const Now& now);
  CountResult Release(const Caller& caller, std::span<const std::string_view> keys, Owner owner,
                      const Now& now);
  CountResult Touch(const Caller& caller, std::span<const std::string_view> keys, Owner owner,
                    Millis lease, const Now& now);
  FenceResult Fence(const Caller& caller, std::string_view key, Token token, const Now& now);
  // LOCK.INFO, and what LOCK.LIST and LOCK.TOP show of a lock: nothing if it is free.
  std::optional<LockInfo> Inspect(int db, std::string_view key, const Now& now);
  std::optional<LockSummary> Summarize(int db, std::string_view key, const Now& now);
  void Disconnect(uint64_t connection, const Now& now);
  // CLIENT UNBLOCK. Returns whether somebody waited there.
  bool Unblock(uint64_t connection, bool as_timeout, const Now& now);

  // Answers to calls that waited, in order. Each is to be taken out and shown to Replied.
  std::vector<Answered>& answered() { return answered_; }
  void Replied(const Answered& answered, bool delivered);

  // Who was sent away from its wait by a demotion, or by CLIENT UNBLOCK, with an error.
  struct SentAway {
    uint64_t connection;
    uint64_t tag;
  };
  std::vector<SentAway>& sent_away() { return sent_away_; }

  // --- What strangers do, on a primary

  bool Delete(int db, std::string_view key, const Now& now);
  void Set(int db, std::string_view key, std::string_view value, std::optional<Instant> end,
           const Now& now);
  void Push(int db, std::string_view key, const Now& now);  // a list
  bool Rename(int db, std::string_view from, std::string_view to, const Now& now);
  bool Move(int db, std::string_view key, int to, const Now& now);
  void Swap(int first, int second, const Now& now);
  void Flush(std::optional<int> db, const Now& now);
  // EXPIRE, or PERSIST without an end.
  bool Expire(int db, std::string_view key, std::optional<Instant> end, const Now& now);
  // RESTORE of what DUMP gave; false if it is refused.
  std::string Dump(int db, std::string_view key);
  bool Restore(int db, std::string_view key, std::string_view bytes, Instant end, const Now& now);

  // --- What the server does by itself

  // MIGRATE: the key goes to another node of the cluster, which the source sees as a deletion.
  bool Migrate(int db, std::string_view key, const Now& now);
  // A pass of the event loop.
  void Turn(const Now& now, size_t budget = 5'000);
  // When the next pass has something to do; at once if that is in the past.
  Due NextDue() const { return wants_turn_ ? Due::AtOnce() : due_; }
  bool Evict(int db, std::string_view key, const Now& now);
  // Removes a key whose time is over, as the server's cron does.
  void ExpireCycle(const Now& now);

  Role role() override { return role_; }
  void BecomePrimary();
  // Has been one for so long that nothing of its start matters any more.
  void BeOldPrimary(FineInstant now);
  // Those who wait are sent away.
  void BecomeReplica(const Now& now);

  // A command of the log of the primary, or of its own.
  void Apply(const CommandLog::Command& command);
  Copy Save(FineInstant now);
  void Load(const Copy& copy);
  // Obeys a log from its beginning, as a server that starts does its AOF.
  void Replay(const CommandLog& log);

  // Nobody reads what it replicates any more; or somebody begins to, with a copy of all data, and
  // finds the rest in a log that begins there.
  void LoseConsumers() { has_consumers_ = false; }
  Copy GainConsumers(FineInstant now);
  bool has_consumers() const { return has_consumers_; }

  // --- What it does not allow now

  bool may_write = true;  // outside commands: CLIENT PAUSE, a failover
  bool out_of_memory = false;
  // So many grants fit into memory, if they are counted.
  std::optional<size_t> grants_until_out_of_memory;
  bool lacks_replicas = false;            // min-replicas-to-write
  bool lets_nobody_wait = false;          // it refuses to block clients
  bool may_replicate_floor = true;        // no slot is on its way to another node
  const char* missing_command = nullptr;  // renamed or disabled: DEL or PEXPIREAT
  Millis expiry_lag{0};                   // by so much the server's own idea of the time is older
  std::set<std::string, std::less<>> users_without_rights;
  std::set<std::string, std::less<>> users_who_may_not_publish;
  // How many subscribe to each channel. The engine is told; the messages may still be lost.
  std::map<std::string, size_t, std::less<>> subscribers;
  std::set<std::string, std::less<>> keys_of_lost_slots;
  // Keys of slots that came: another node has issued for them.
  std::set<std::string, std::less<>> keys_of_new_slots;

  // Why a client's write to the key is refused, in the first word of the server's error.
  std::optional<std::string> WriteRefusal(std::string_view user, std::string_view key,
                                          bool needs_memory) const;

  // --- What others see

  const CommandLog& log() const { return log_; }
  const Lock* FindLock(int db, std::string_view key) const;
  std::optional<Instant> ExpiryOf(int db, std::string_view key) const;
  KeyState StateOf(int db, std::string_view key) const;
  std::vector<std::pair<int, std::string>> Keys() const;
  bool HasSameData(const SimHost& other) const;
  std::string Describe() const;

  // Called with each hold that is decided here.
  std::function<void(LockName, const HoldSet&)> on_hold_set;
  // Called with each event that is published, and with why a lock was lost; and with each warning.
  std::function<void(LockName, LockEvent, std::optional<Loss>)> on_event;
  std::function<void(const std::string&)> on_warning;
  // Called with each message that is published, and with how many subscribers it was sent to.
  std::function<void(const Notice&, size_t)> on_notice;

  // What cannot be, if anything of that happened: the first that did.
  const char* fault() const { return fault_; }
  void Fail(const char* what) {
    if (fault_ == nullptr) fault_ = what;
  }

  size_t waiting() const { return parked_.size(); }
  bool IsParked(uint64_t connection) const;
  // Somebody waits though nothing keeps it from its lock, and nobody will look after it.
  bool LeavesSomebodyWaiting(const Now& now);
  bool KeepsSomebodyTooLong(FineTick now) const;
  // Nothing is left of those who waited.
  bool IsQueueClean() const;

  // --- Host

  KeyContent Open(const KeyName& name, Access access) override;
  void Close(KeyContent& key) override;
  PlainLock ReadPlain(const KeyContent& content) override;
  void Store(KeyContent& content, Lock* lock) override;
  void Delete(KeyContent& content) override;
  std::optional<Instant> ExpiryOf(const KeyContent& content) override;
  const char* MissingCommandFor(const Change& change) override;
  void ChangePlain(KeyContent& content, const Change& change) override;
  size_t StoredLocks() override;
  size_t CountKeys(int db) override;
  void VisitLocks(int db, const std::function<bool(LockName, const Lock&)>& visit) override;

  void Replicate(const KeyContent& key, const HoldSet& held, Via via, Instant now) override;
  void Replicate(const KeyContent& key, const HoldReleased& released, Via via) override;
  void Replicate(const KeyContent& key, const HoldEnded& ended) override;
  void Replicate(const KeyContent& key, const HoldsExpired& expired) override;
  void Replicate(const KeyContent& key, const SessionsEnded& ended) override;
  void ReplicateVerbatim() override;
  void ReplicateFloor(Token floor) override;
  bool HasReplicationConsumers(Instant /*now*/) override { return has_consumers_; }
  bool MayReplicateFloor() override { return may_replicate_floor; }

  void Emit(const KeyContent& key, LockEvent event) override {
    if (on_event) on_event(key.name, event, std::nullopt);
  }
  void EmitLost(const KeyContent& key, Loss how) override { EmitLost(key.name, how); }
  void EmitLost(LockName lock, Loss how) override {
    if (on_event) on_event(lock, LockEvent::kLost, how);
  }
  Delivery Publish(const Notice& notice) override;
  void Warn(const std::string& text) override {
    if (on_warning) on_warning(text);
  }

  std::optional<uint64_t> CallerConnection() override;
  std::optional<ParkableCaller> CallerToPark() override;
  NotifiedCaller CallerToNotify(std::string_view channel, LockName lock) override;

  bool Park(WaitingCall& call) override;
  void Answer(WaitingCall& call) override;
  bool IsConnected(uint64_t connection) override { return !closed_.contains(connection); }

  bool MayWrite() override { return role_ == Role::kPrimary && may_write; }
  std::optional<std::string> GrantRefusal(const WaitingCall& call, const KeyContent& key) override;
  void BeforeGrant(LockName lock, FineInstant now) override;
  SlotRefresh RefreshSlots(FineInstant /*now*/) override {
    const bool changed = keys_of_lost_slots != known_lost_slots_;
    if (changed) known_lost_slots_ = keys_of_lost_slots;
    return {.may_be_lost = changed};
  }
  std::optional<std::string> SlotRefusal(LockName lock) override;
  bool MovesAway(LockName lock) override {
    return migrates_ || keys_of_lost_slots.contains(lock.key);
  }

  void RunSoon() override { runs_passes_ = true; }
  void WakeEventLoop() override { runs_passes_ = wants_turn_ = true; }
  void WatchConnections() override { watches_connections_ = true; }
  void WatchKeys() override {}
  void ListenForStringWrites() override { listens_for_string_writes_ = true; }

 private:
  struct Key {
    std::unique_ptr<Lock> lock;
    std::optional<std::string> text;  // neither: a list
    std::optional<Instant> expiry;
  };
  using Database = std::map<std::string, Key, std::less<>>;
  struct ParkedCall {
    WaitingCall* call;
    uint64_t connection;
    uint64_t tag;
    FineTick until;
    std::string owner;
    std::vector<std::pair<int, std::string>> locks{};
  };
  // What the server is doing, while it does.
  enum class Doing { kNothing, kCommand, kEvent, kPass, kApplying, kLoading };
  class As;

  Database& DatabaseOf(int db);
  Key* Find(int db, std::string_view key);
  const Key* Find(int db, std::string_view key) const;
  bool IsOver(const Key& key) const;
  // Looks a key up as any command does: removes it if its time is over.
  Key* LookUp(int db, std::string_view key);
  // Takes a key out, whatever is in it: the server tells first of the lock, then of the key.
  void Remove(int db, std::string_view key);
  // Likewise, but the server tells only of the lock: something else takes its place.
  void Replace(int db, std::string_view key);
  void WriteLog(int db, std::span<const std::string_view> words);
  void CheckMayChange();
  void CheckMayChange(const KeyContent& content);
  // A change of a key by its own command, of which servers tell only if asked to.
  void StringChanged(std::string_view key);
  void Tell(int db, std::initializer_list<std::string_view> words);
  void CheckVia(Via via);
  void NoteSession(LockName lock, Owner owner, bool session, uint64_t connection);
  void ForgetSessions(int db, std::string_view key);
  // Each hold of a closed connection whose end the engine has dealt with has ended.
  void CheckClosedSessions();
  KeyState StateIn(const Key* key) const;
  std::vector<KeyName> NamesOf(const Caller& caller, std::span<const std::string_view> keys) const;
  void SendAway(const ParkedCall& parked, bool as_timeout, Tick now);

  Role role_ = Role::kReplica;
  Doing doing_ = Doing::kNothing;
  Now now_{};
  std::map<int, Database> databases_;
  std::vector<ParkedCall> parked_;
  std::vector<Answered> answered_;
  std::vector<SentAway> sent_away_;
  std::set<WaitingCall*> unreplied_;  // answered, and not shown to Replied yet
  std::set<uint64_t> closed_;         // connections
  // By database, key and owner: the connection that a hold was last asked for over, if it is to end
  // with it. Holds that are gone may still be here.
  std::map<std::tuple<int, std::string, std::string>, uint64_t> sessions_;
  const Caller* caller_ = nullptr;
  size_t keys_of_command_ = 0;  // of the release that is running
  bool only_reads_ = false;     // the command that is running
  const CommandLog::Command* applying_ = nullptr;
  bool wants_turn_ = false;
  bool runs_passes_ = false;          // the engine has asked to be run in every pass
  bool watches_connections_ = false;  // it has asked to be told when one closes
  bool listens_for_string_writes_ = false;
  bool has_consumers_ = true;
  std::set<std::string, std::less<>> known_lost_slots_;  // at the last look
  bool migrates_ = false;                                // a key, now
  Due due_;
  CommandLog log_;
  const char* fault_ = nullptr;
  Engine engine_;
};

}  // namespace turnstile::sim

#endif  // TURNSTILE_TESTS_SIM_SIM_HOST_H_
