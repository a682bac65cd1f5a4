#include "sim/sim_host.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "core/check.h"
#include "core/encoding.h"
#include "core/fact.h"

namespace turnstile::sim {
namespace {

std::string Digits(int64_t number) { return std::to_string(number); }
std::string Digits(Instant moment) { return std::to_string(moment.time_since_epoch().count()); }

Instant ParseInstant(std::string_view text) {
  return Instant{Millis{ParseDigits(text).value_or(0)}};
}

}  // namespace

// --- The log ------------------------------------------------------------------------------------

void CommandLog::Clear() {
  bytes_.clear();
  words_.clear();
  commands_.clear();
}

void CommandLog::Append(int db, std::span<const std::string_view> words) {
  for (const std::string_view word : words) {
    bytes_ += word;
    words_.push_back(static_cast<uint32_t>(bytes_.size()));
  }
  commands_.push_back({static_cast<uint32_t>(words_.size()), db});
}

CommandLog::Command CommandLog::Read(size_t index) const {
  const size_t first = index == 0 ? 0 : commands_[index - 1].words;
  const size_t last = commands_[index].words;
  size_t begin = first == 0 ? 0 : words_[first - 1];
  Command command{.db = commands_[index].db};
  command.words.reserve(last - first);
  for (size_t i = first; i < last; ++i) {
    command.words.push_back(std::string_view(bytes_).substr(begin, words_[i] - begin));
    begin = words_[i];
  }
  return command;
}

// --- What the server is doing -------------------------------------------------------------------

namespace {

// The server in which the engine runs now, on this thread.
thread_local SimHost* running = nullptr;

}  // namespace

class SimHost::As {
 public:
  As(SimHost& host, Doing doing, const Caller* caller = nullptr)
      : host_(host),
        doing_(std::exchange(host.doing_, doing)),
        caller_(std::exchange(host.caller_, caller)),
        running_(std::exchange(running, &host)) {}
  As(SimHost& host, Doing doing, const Now& now, const Caller* caller = nullptr)
      : As(host, doing, caller) {
    // What has ended may live again when the clock is set back, so it is looked at before.
    if (now.wall < host.now_.wall) host.CheckClosedSessions();
    host.now_ = now;
  }
  ~As() {
    host_.doing_ = doing_;
    host_.caller_ = caller_;
    running = running_;
  }
  As(const As&) = delete;
  As& operator=(const As&) = delete;

 private:
  SimHost& host_;
  Doing doing_;
  const Caller* caller_;
  SimHost* running_;
};

SimHost::SimHost() : engine_(*this, HashKey{}) {}

SimHost::~SimHost() {
  // As at the end of a process nobody is answered; but the calls have to be freed.
  for (const ParkedCall& parked : std::vector(parked_)) SendAway(parked, false, Tick{});
  for (const Answered& answered : answered_) Replied(answered, /*delivered=*/true);
}

SimHost::Database& SimHost::DatabaseOf(int db) { return databases_[db]; }

SimHost::Key* SimHost::Find(int db, std::string_view key) {
  const auto database = databases_.find(db);
  if (database == databases_.end()) return nullptr;
  const auto found = database->second.find(key);
  return found == database->second.end() ? nullptr : &found->second;
}

const SimHost::Key* SimHost::Find(int db, std::string_view key) const {
  return const_cast<SimHost*>(this)->Find(db, key);
}

bool SimHost::IsOver(const Key& key) const {
  return key.expiry.has_value() && *key.expiry < now_.moment() - expiry_lag;
}

// A replica, and whoever applies what was decided elsewhere, removes nothing by itself.
SimHost::Key* SimHost::LookUp(int db, std::string_view key) {
  Key* found = Find(db, key);
  if (found == nullptr || !IsOver(*found) || doing_ == Doing::kApplying) return found;
  if (role_ != Role::kPrimary) return nullptr;
  const std::string name(key);
  Tell(db, {"DEL", name});
  Remove(db, name);
  return nullptr;
}

void SimHost::Replace(int db, std::string_view key) {
  Database& database = DatabaseOf(db);
  const auto found = database.find(key);
  if (found == database.end()) return;
  const std::string name(key);
  const auto removed = database.extract(found);
  ForgetSessions(db, name);
  const As as(*this, Doing::kEvent);
  const Lock* lock = removed.mapped().lock.get();
  if (lock == nullptr) return;
  const bool told = !engine_.is_removing() && role_ != Role::kLoading;
  engine_.OnKeyRemoved({db, name}, *lock, role_,
                       told ? std::optional(now_.moment()) : std::nullopt);
}

void SimHost::Remove(int db, std::string_view key) {
  if (Find(db, key) == nullptr) return;
  const std::string name(key);
  Replace(db, name);
  const As as(*this, Doing::kEvent);
  // Of what a module deletes the server tells nobody else.
  if (!engine_.is_removing()) engine_.OnKeyChanged(name);
}

void SimHost::StringChanged(std::string_view key) {
  if (!listens_for_string_writes_) return;
  const As as(*this, Doing::kEvent);
  engine_.OnKeyChanged(key);
}

void SimHost::WriteLog(int db, std::span<const std::string_view> words) {
  if (has_consumers_) log_.Append(db, words);
}

void SimHost::Tell(int db, std::initializer_list<std::string_view> words) {
  WriteLog(db, std::span(words.begin(), words.size()));
}

KeyState SimHost::StateIn(const Key* key) const {
  KeyState state;
  if (key == nullptr) return state;
  state.lock = key->lock.get();
  if (key->text.has_value() && engine_.settings().plain_locks) {
    state.plain = PlainLock{.value = *key->text, .end = key->expiry};
  }
  return state;
}

// --- What clients do ----------------------------------------------------------------------------

std::vector<KeyName> SimHost::NamesOf(const Caller& caller,
                                      std::span<const std::string_view> keys) const {
  std::vector<KeyName> names;
  names.reserve(keys.size());
  for (const std::string_view key : keys) names.push_back({.lock = {caller.db, key}});
  return names;
}

AcquireResult SimHost::Acquire(const Caller& caller, std::span<const std::string_view> keys,
                               const AcquireRequest& request, const Now& now) {
  const As as(*this, Doing::kCommand, now, &caller);
  AcquireResult result = engine_.Acquire(NamesOf(caller, keys), request, now);
  if (result.kind == AcquireResult::Kind::kGranted) {
    for (const std::string_view key : keys) {
      NoteSession({caller.db, key}, request.owner, request.session, caller.connection);
    }
  }
  return result;
}

void SimHost::NoteSession(LockName lock, Owner owner, bool session, uint64_t connection) {
  std::tuple hold(lock.db, std::string(lock.key), std::string(owner.bytes));
  if (session) {
    sessions_.insert_or_assign(std::move(hold), connection);
  } else {
    sessions_.erase(hold);
  }
}

void SimHost::ForgetSessions(int db, std::string_view key) {
  std::erase_if(sessions_, [&](const auto& session) {
    return std::get<0>(session.first) == db && std::get<1>(session.first) == key;
  });
}

void SimHost::CheckClosedSessions() {
  std::erase_if(sessions_, [this](const auto& session) {
    const auto& [db, key, owner] = session.first;
    if (!closed_.contains(session.second)) return false;
    if (engine_.sessions().IsBound({db, key}, Owner{owner})) return false;  // not yet
    const Lock* lock = FindLock(db, key);
    const auto hold = lock == nullptr ? std::nullopt : lock->Find(Owner{owner});
    if (hold.has_value() && hold->LiveAt(now_.moment())) Fail("a hold outlives its connection");
    return true;
  });
  if (role_ == Role::kPrimary && engine_.sessions().has_ended() && NextDue().is_never()) {
    Fail("a session that has ended is forgotten");
  }
}

CountResult SimHost::Release(const Caller& caller, std::span<const std::string_view> keys,
                             Owner owner, const Now& now) {
  const As as(*this, Doing::kCommand, now, &caller);
  keys_of_command_ = keys.size();
  return engine_.Release(NamesOf(caller, keys), {.owner = owner, .also = keys.subspan(1)},
                         now.moment());
}

CountResult SimHost::Touch(const Caller& caller, std::span<const std::string_view> keys,
                           Owner owner, Millis lease, const Now& now) {
  const As as(*this, Doing::kCommand, now, &caller);
  return engine_.Touch(NamesOf(caller, keys),
                       {.owner = owner, .lease = lease, .also = keys.subspan(1)}, now.moment());
}

FenceResult SimHost::Fence(const Caller& caller, std::string_view key, Token token,
                           const Now& now) {
  const As as(*this, Doing::kCommand, now, &caller);
  only_reads_ = true;
  const FenceResult result =
      engine_.Fence({.lock = {caller.db, key}}, {.token = token, .then = {}}, now.moment());
  only_reads_ = false;
  return result;
}

std::optional<LockInfo> SimHost::Inspect(int db, std::string_view key, const Now& now) {
  const As as(*this, Doing::kCommand, now);
  only_reads_ = true;
  auto info = engine_.Inspect({.lock = {db, key}}, now).value_or(std::nullopt);
  only_reads_ = false;
  return info;
}

std::optional<LockSummary> SimHost::Summarize(int db, std::string_view key, const Now& now) {
  const As as(*this, Doing::kCommand, now);
  Budget budget(1);
  only_reads_ = true;
  auto summary = engine_.Summarize({.lock = {db, key}}, now, budget);
  only_reads_ = false;
  return summary;
}

void SimHost::SendAway(const ParkedCall& parked, bool as_timeout, Tick now) {
  WaitingCall* call = parked.call;
  const As as(*this, Doing::kEvent);
  engine_.OnUnblocked(*call, as_timeout, now);
  // The server frees it without asking for an answer.
  std::erase_if(answered_, [call](const Answered& answered) { return answered.call == call; });
  unreplied_.erase(call);
  engine_.OnReplied(call, /*delivered=*/true);
}

void SimHost::Disconnect(uint64_t connection, const Now& now) {
  now_ = now;
  closed_.insert(connection);
  for (const ParkedCall& parked : std::vector(parked_)) {
    if (parked.connection == connection) SendAway(parked, /*as_timeout=*/false, now.tick());
  }
  const As as(*this, Doing::kEvent);
  if (watches_connections_) {
    engine_.OnDisconnected(connection);
  } else if (engine_.sessions().HasAny(connection) || engine_.waiting().has_sessions()) {
    Fail("nobody watches a connection that holds or waits are bound to");
  }
}

bool SimHost::Unblock(uint64_t connection, bool as_timeout, const Now& now) {
  now_ = now;
  for (const ParkedCall& parked : std::vector(parked_)) {
    if (parked.connection != connection) continue;
    SendAway(parked, as_timeout, now.tick());
    return true;
  }
  return false;
}

void SimHost::Replied(const Answered& answered, bool delivered) {
  if (unreplied_.erase(answered.call) == 0) return Fail("a call is answered twice");
  if (!delivered) {  // what is taken back may be bound as it was before
    std::erase_if(sessions_,
                  [&](const auto& session) { return session.second == answered.connection; });
  }
  engine_.OnReplied(answered.call, delivered);
}

// --- What strangers do --------------------------------------------------------------------------
//
// The server changes its data, tells modules, and only then replicates the command.

bool SimHost::Delete(int db, std::string_view key, const Now& now) {
  const As as(*this, Doing::kCommand, now);
  if (LookUp(db, key) == nullptr) return false;
  Remove(db, key);
  Tell(db, {"DEL", key});
  return true;
}

bool SimHost::Evict(int db, std::string_view key, const Now& now) {
  const As as(*this, Doing::kCommand, now);
  if (LookUp(db, key) == nullptr) return false;
  Replace(db, key);
  {
    const As event(*this, Doing::kEvent);
    engine_.OnKeyEvicted({db, key});
    engine_.OnKeyChanged(key);
  }
  Tell(db, {"DEL", key});
  return true;
}

bool SimHost::Migrate(int db, std::string_view key, const Now& now) {
  migrates_ = true;
  const bool went = Delete(db, key, now);
  migrates_ = false;
  return went;
}

void SimHost::Set(int db, std::string_view key, std::string_view value, std::optional<Instant> end,
                  const Now& now) {
  const As as(*this, Doing::kCommand, now);
  LookUp(db, key);
  Replace(db, key);
  DatabaseOf(db).insert_or_assign(std::string(key), Key{{}, std::string(value), end});
  StringChanged(key);
  Tell(db, {"SET", key, value, end.has_value() ? Digits(*end) : ""});
}

void SimHost::Push(int db, std::string_view key, const Now& now) {
  const As as(*this, Doing::kCommand, now);
  LookUp(db, key);
  Replace(db, key);
  DatabaseOf(db).insert_or_assign(std::string(key), Key{});
  StringChanged(key);
  Tell(db, {"LPUSH", key});
}

bool SimHost::Rename(int db, std::string_view from, std::string_view to, const Now& now) {
  const As as(*this, Doing::kCommand, now);
  if (from == to || LookUp(db, from) == nullptr) return false;
  LookUp(db, to);
  Replace(db, to);
  auto moved = DatabaseOf(db).extract(DatabaseOf(db).find(from));
  ForgetSessions(db, from);
  if (moved.mapped().lock != nullptr) {
    const As event(*this, Doing::kEvent);
    engine_.OnKeyRemoved({db, from}, *moved.mapped().lock, role_, now.moment());
  }
  moved.key() = std::string(to);
  DatabaseOf(db).insert(std::move(moved));
  const As event(*this, Doing::kEvent);
  engine_.OnKeyRenamed({db, from});
  engine_.OnKeyChanged(from);
  engine_.OnKeyArrived(to);
  engine_.OnKeyChanged(to);
  if (role_ == Role::kPrimary) engine_.OnTtlChanged(to);
  Tell(db, {"RENAME", from, to});
  return true;
}

bool SimHost::Move(int db, std::string_view key, int to, const Now& now) {
  const As as(*this, Doing::kCommand, now);
  if (db == to || LookUp(db, key) == nullptr || LookUp(to, key) != nullptr) return false;
  auto moved = DatabaseOf(db).extract(DatabaseOf(db).find(key));
  ForgetSessions(db, key);
  const bool is_lock = moved.mapped().lock != nullptr;
  if (is_lock) {
    const As event(*this, Doing::kEvent);
    engine_.OnKeyRemoved({db, key}, *moved.mapped().lock, role_, now.moment());
  }
  DatabaseOf(to).insert(std::move(moved));
  const As event(*this, Doing::kEvent);
  engine_.OnKeyRenamed({db, key});
  engine_.OnKeyChanged(key);  // move_from
  engine_.OnKeyArrived(key);
  engine_.OnKeyChanged(key);  // move_to
  if (is_lock) engine_.OnLocksMayBeIn(to);
  if (role_ == Role::kPrimary) engine_.OnTtlChanged(key);
  const std::string target = std::to_string(to);
  Tell(db, {"MOVE", key, target});
  return true;
}

void SimHost::Swap(int first, int second, const Now& now) {
  const As as(*this, Doing::kCommand, now);
  std::swap(DatabaseOf(first), DatabaseOf(second));
  sessions_.clear();  // some go on in the other one
  {
    const As event(*this, Doing::kEvent);
    engine_.OnSwapped(first, second);
  }
  const std::string a = std::to_string(first);
  const std::string b = std::to_string(second);
  Tell(first, {"SWAPDB", a, b});
}

void SimHost::Flush(std::optional<int> db, const Now& now) {
  const As as(*this, Doing::kCommand, now);
  const As event(*this, Doing::kEvent);
  engine_.OnFlushing(db, now.moment());
  sessions_.clear();
  for (auto& [number, database] : databases_) {
    if (!db.has_value() || number == *db) database.clear();
  }
  engine_.OnFlushed(db);
  Tell(db.value_or(0), {db.has_value() ? "FLUSHDB" : "FLUSHALL"});
}

bool SimHost::Expire(int db, std::string_view key, std::optional<Instant> end, const Now& now) {
  const As as(*this, Doing::kCommand, now);
  Key* found = LookUp(db, key);
  if (found == nullptr) return false;
  if (end.has_value() && *end <= now.moment()) return Delete(db, key, now);
  found->expiry = end;
  {
    const As event(*this, Doing::kEvent);
    engine_.OnKeyChanged(key);
    if (role_ == Role::kPrimary && StoredLocks() > 0) engine_.OnTtlChanged(key);
  }
  Tell(db, {"PEXPIREAT", key, end.has_value() ? Digits(*end) : ""});
  return true;
}

std::string SimHost::Dump(int db, std::string_view key) {
  const Lock* lock = FindLock(db, key);
  return lock == nullptr ? std::string() : Encode(*lock);
}

bool SimHost::Restore(int db, std::string_view key, std::string_view bytes, Instant end,
                      const Now& now) {
  const As as(*this, Doing::kCommand, now);
  std::unique_ptr<Lock> lock = Decode(bytes, kCurrentEncoding);
  if (lock == nullptr) return false;
  const Token highest = lock->last(Lock::Order::kByToken).token;
  if (!engine_.tokens().clock().MayAdopt(highest, now.wall)) return false;
  LookUp(db, key);
  {
    const As event(*this, Doing::kEvent);
    engine_.OnLockLoaded({db, key}, highest);
  }
  Replace(db, key);
  DatabaseOf(db).insert_or_assign(std::string(key), Key{std::move(lock), {}, end});
  {
    const As event(*this, Doing::kEvent);
    engine_.OnKeyChanged(key);
    engine_.OnTtlChanged(key);
  }
  Tell(db, {"RESTORE", key, bytes, Digits(end)});
  return true;
}

// --- What the server does by itself -------------------------------------------------------------

void SimHost::Turn(const Now& now, size_t budget) {
  const As as(*this, Doing::kPass, now);
  wants_turn_ = false;
  for (const auto& [db, database] : databases_) {
    for (const auto& [name, key] : database) {
      if (key.lock != nullptr && !engine_.MayBeLock(name)) Fail("a lock is taken for another key");
    }
  }
  if (StoredLocks() == 0) engine_.OnLocksGone();
  if (!runs_passes_ && !due_.IsDueAt(now.moment())) {
    if (!engine_.is_idle()) Fail("the engine has work and has not asked to be run");
    return;
  }
  engine_.PublishPending();
  due_ = engine_.RunDueWork(now, Budget(budget));
  runs_passes_ = !engine_.is_idle();
  if (!engine_.has_sessions()) watches_connections_ = false;
  CheckClosedSessions();
}

void SimHost::ExpireCycle(const Now& now) {
  const As as(*this, Doing::kCommand, now);
  if (role_ != Role::kPrimary || !may_write) return;
  for (const auto& [db, key] : Keys()) LookUp(db, key);
}

void SimHost::BecomePrimary() {
  role_ = Role::kPrimary;
  const As as(*this, Doing::kEvent);
  engine_.OnPromoted();
}

void SimHost::BeOldPrimary(FineInstant now) {
  BecomePrimary();
  engine_.OnStarted(now - std::chrono::hours{24});
  const Millis margin = std::exchange(engine_.settings().token_margin, Millis{0});
  engine_.tokens().Issuing(now - engine_.settings().failover_grace - Millis{1} - kStartStep);
  engine_.settings().token_margin = margin;
}

void SimHost::BecomeReplica(const Now& now) {
  now_ = now;
  role_ = Role::kReplica;
  {
    const As as(*this, Doing::kEvent);
    engine_.OnDemoted();
    sessions_.clear();
  }
  for (const ParkedCall& parked : std::vector(parked_)) {
    sent_away_.push_back({parked.connection, parked.tag});
    SendAway(parked, /*as_timeout=*/false, now.tick());
  }
}

void SimHost::Apply(const CommandLog::Command& command) {
  const As as(*this, Doing::kApplying);
  applying_ = &command;
  const Args args = std::span(command.words).subspan(1);
  const std::string_view name = command.words.front();
  const int db = command.db;
  if (name == kHeldCommand) {
    const auto parsed = ParseHoldSetFact(args);
    const auto* fact = std::get_if<HoldSetFact>(&parsed);
    fact == nullptr ? Fail("a fact is not understood")
                    : engine_.ApplyFact({.lock = {db, fact->key}}, *fact);
  } else if (name == kFactCommand) {
    const auto parsed = ParseFact(args);
    const auto* fact = std::get_if<Fact>(&parsed);
    fact == nullptr ? Fail("a fact is not understood")
                    : engine_.ApplyFact({.lock = {db, args[1]}}, *fact);
  } else if (name == kReleaseCommand) {
    const auto parsed = ParseRelease(args);
    const auto* request = std::get_if<ReleaseRequest>(&parsed);
    request == nullptr ? Fail("a release is not understood")
                       : engine_.ApplyRelease({.lock = {db, args[0]}}, request->owner);
  } else {
    WriteLog(db, command.words);
    if (name == "DEL") {
      Remove(db, args[0]);
    } else if (name == "FLUSHALL" || name == "FLUSHDB") {
      const std::optional<int> flushed = name == "FLUSHDB" ? std::optional(db) : std::nullopt;
      for (auto& [number, database] : databases_) {
        if (!flushed.has_value() || number == *flushed) database.clear();
      }
      engine_.OnFlushed(flushed);
    } else if (name == "SET" || name == "LPUSH") {
      Remove(db, args[0]);
      Key key;
      if (name == "SET") {
        key.text = std::string(args[1]);
        if (!args[2].empty()) key.expiry = ParseInstant(args[2]);
      }
      DatabaseOf(db).insert_or_assign(std::string(args[0]), std::move(key));
    } else if (name == "RENAME" || name == "MOVE") {
      const bool rename = name == "RENAME";
      const int to = rename ? db : static_cast<int>(ParseDigits(args[1]).value_or(0));
      const std::string_view new_name = rename ? args[1] : args[0];
      auto moved = DatabaseOf(db).extract(DatabaseOf(db).find(args[0]));
      if (moved.empty()) {
        Fail("a key is moved that is not there");
      } else {
        Remove(to, new_name);
        if (moved.mapped().lock != nullptr) {
          engine_.OnKeyRemoved({db, args[0]}, *moved.mapped().lock, role_, std::nullopt);
        }
        engine_.OnKeyRenamed({db, args[0]});
        engine_.OnKeyArrived(new_name);
        moved.key() = std::string(new_name);
        DatabaseOf(to).insert(std::move(moved));
        engine_.OnLocksMayBeIn(to);
      }
    } else if (name == "SWAPDB") {
      const int first = static_cast<int>(ParseDigits(args[0]).value_or(0));
      const int second = static_cast<int>(ParseDigits(args[1]).value_or(0));
      std::swap(DatabaseOf(first), DatabaseOf(second));
      engine_.OnSwapped(first, second);
    } else if (name == "PEXPIREAT") {
      Key* key = Find(db, args[0]);
      if (key != nullptr) {
        key->expiry = args[1].empty() ? std::nullopt : std::optional(ParseInstant(args[1]));
      }
    } else if (name == "RESTORE") {
      Remove(db, args[0]);
      std::unique_ptr<Lock> lock = Decode(args[1], kCurrentEncoding);
      engine_.OnLockLoaded({db, args[0]}, lock->last(Lock::Order::kByToken).token);
      DatabaseOf(db).insert_or_assign(std::string(args[0]),
                                      Key{std::move(lock), {}, ParseInstant(args[2])});
    } else {
      Fail("a command is not understood");
    }
  }
  applying_ = nullptr;
}

SimHost::Copy SimHost::GainConsumers(FineInstant now) {
  has_consumers_ = true;
  log_.Clear();
  return Save(now);
}

SimHost::Copy SimHost::Save(FineInstant now) {
  const As as(*this, Doing::kEvent);
  Copy copy;
  for (const auto& [db, database] : databases_) {
    for (const auto& [name, key] : database) {
      Copy::Value value{.kind = Copy::Value::Kind::kList, .expiry = key.expiry};
      if (key.lock != nullptr) {
        value.kind = Copy::Value::Kind::kLock;
        value.bytes = Encode(*key.lock);
      } else if (key.text.has_value()) {
        value.kind = Copy::Value::Kind::kString;
        value.bytes = *key.text;
      }
      copy.values.emplace(std::pair(db, name), std::move(value));
    }
  }
  copy.clock = engine_.tokens().ToSave(now);
  engine_.OnCopy(now);
  return copy;
}

void SimHost::Load(const Copy& copy) {
  const As as(*this, Doing::kLoading);
  const Role before = std::exchange(role_, Role::kLoading);
  log_.Clear();
  databases_.clear();
  engine_.OnFlushed(std::nullopt);
  for (const auto& [where, value] : copy.values) {
    Key key{.expiry = value.expiry};
    if (value.kind == Copy::Value::Kind::kLock) {
      key.lock = Decode(value.bytes, kCurrentEncoding);
      if (key.lock == nullptr) return Fail("a lock that was saved does not load");
      engine_.OnLockLoaded({where.first, where.second},
                           key.lock->last(Lock::Order::kByToken).token);
    } else if (value.kind == Copy::Value::Kind::kString) {
      key.text = value.bytes;
    }
    DatabaseOf(where.first).insert_or_assign(where.second, std::move(key));
  }
  if (copy.clock.has_value()) engine_.tokens().Observe(*copy.clock);
  role_ = before;
}

void SimHost::Replay(const CommandLog& log) {
  const Role before = std::exchange(role_, Role::kLoading);
  for (size_t i = 0; i < log.size(); ++i) Apply(log.Read(i));
  role_ = before;
}

// --- What others see ----------------------------------------------------------------------------

const Lock* SimHost::FindLock(int db, std::string_view key) const {
  const Key* found = Find(db, key);
  return found == nullptr ? nullptr : found->lock.get();
}

std::optional<Instant> SimHost::ExpiryOf(int db, std::string_view key) const {
  const Key* found = Find(db, key);
  return found == nullptr ? std::nullopt : found->expiry;
}

KeyState SimHost::StateOf(int db, std::string_view key) const { return StateIn(Find(db, key)); }

std::vector<std::pair<int, std::string>> SimHost::Keys() const {
  std::vector<std::pair<int, std::string>> keys;
  for (const auto& [db, database] : databases_) {
    for (const auto& [name, key] : database) keys.emplace_back(db, name);
  }
  return keys;
}

std::string SimHost::Describe() const {
  std::string text;
  for (const auto& [db, database] : databases_) {
    for (const auto& [name, key] : database) {
      text += std::to_string(db) + ' ' + name + ' ';
      if (key.lock != nullptr) {
        for (const Hold& hold : key.lock->holds(Lock::Order::kByToken)) {
          text += std::string(hold.owner.bytes) + ':' + std::to_string(hold.token.value) + ':' +
                  Digits(hold.blocks_until()) + ' ';
        }
      } else {
        text += key.text.value_or("(a list)") + ' ';
      }
      text += key.expiry.has_value() ? Digits(*key.expiry) : "never";
      text += '\n';
    }
  }
  return text;
}

bool SimHost::HasSameData(const SimHost& other) const {
  const std::vector<std::pair<int, std::string>> keys = Keys();
  if (keys != other.Keys()) return false;
  return std::all_of(keys.begin(), keys.end(), [&](const auto& name) {
    const Key& a = *Find(name.first, name.second);
    const Key& b = *other.Find(name.first, name.second);
    if ((a.lock == nullptr) != (b.lock == nullptr) || a.text != b.text || a.expiry != b.expiry) {
      return false;
    }
    return a.lock == nullptr || Encoded(*a.lock).bytes() == Encoded(*b.lock).bytes();
  });
}

bool SimHost::IsParked(uint64_t connection) const {
  return std::any_of(parked_.begin(), parked_.end(), [connection](const ParkedCall& parked) {
    return parked.connection == connection;
  });
}

bool SimHost::LeavesSomebodyWaiting(const Now& now) {
  const Instant moment = now.moment();
  if (role_ != Role::kPrimary || NextDue().IsDueAt(moment)) return false;
  for (const ParkedCall& parked : parked_) {
    if (!parked.call->is_queued()) return true;  // answered in the last pass
  }
  for (const WaitQueue::Waiter* waiter : engine_.queue().Waiters()) {
    const WaitQueue::Waiter& call = *waiter;
    std::vector<LockView> views;
    // One whose own hold keeps those ahead waiting is right where it is, unless it stands in front
    // because of that.
    bool holds = false;
    for (size_t i = 0; i < call.size(); ++i) {
      const KeyState state = StateOf(call.lock(i).db, call.lock(i).key);
      views.push_back({state, call.AheadOf(i)});
      // Strings are not watched while nobody waits for one: whoever gets the lock by a SET of its
      // own name is looked at when its line wakes (storm 8173).
      if (state.plain.has_value() && state.plain->value == call.request().owner.bytes) holds = true;
      holds =
          holds || (state.lock != nullptr && state.lock->Find(call.request().owner).has_value() &&
                    !(call.size() == 1 && IsUpgrade(state, call.request(), moment)));
    }
    if (holds) continue;
    const GrantRules rules{.grace = engine_.tokens().GraceAt(moment),
                           .max_holders = engine_.settings().max_holders};
    if (turnstile::Decide(views, call.request(), now.wall, engine_.tokens().clock(), rules)
            .granted()) {
      return true;
    }
  }
  return false;
}

bool SimHost::KeepsSomebodyTooLong(FineTick now) const {
  if (NextDue().IsDueAt(now_.moment())) return false;  // it goes on at once
  const std::optional<Tick> first = engine_.queue().NextTimeOut();
  if (first.has_value() && *first + Millis{1} < now) return true;
  return std::any_of(parked_.begin(), parked_.end(),
                     [now](const ParkedCall& parked) { return parked.until + Millis{1} < now; });
}

bool SimHost::IsQueueClean() const {
  return parked_.empty() && engine_.queue().empty() && engine_.queue().queues() == 0;
}

// --- Host: keys ---------------------------------------------------------------------------------

KeyContent SimHost::Open(const KeyName& name, Access access) {
  if (doing_ == Doing::kEvent || doing_ == Doing::kNothing) Fail("a key is opened inside an event");
  if (only_reads_ && access == Access::kWrite) {
    Fail("a command that only reads opens a key to write");
  }
  if (doing_ == Doing::kApplying && access != Access::kWrite) {
    Fail("a fact opens a key as if it were no command");
  }
  auto* handle = new std::string(name.lock.key);
  KeyContent content{.name = {name.lock.db, *handle},
                     .key = access == Access::kRead ? nullptr : handle,
                     .handle = handle,
                     .owns_handle = true};
  Key* key = LookUp(name.lock.db, *handle);
  if (key == nullptr) return content;
  content.lock = key->lock.get();
  content.is_plain = key->text.has_value() && engine_.settings().plain_locks;
  content.is_other = content.lock == nullptr && !content.is_plain;
  return content;
}

PlainLock SimHost::ReadPlain(const KeyContent& content) {
  const KeyState state = StateOf(content.name.db, content.name.key);
  if (!state.plain.has_value()) {
    Fail("a plain lock has gone while it was open");
    return {};
  }
  return *state.plain;
}

void SimHost::Close(KeyContent& key) { delete static_cast<std::string*>(key.handle); }

// Outside commands nobody else sees to it that a server that must not write does not.
void SimHost::CheckMayChange() {
  if (doing_ == Doing::kPass && !MayWrite()) Fail("a write that is not allowed now");
}

void SimHost::CheckMayChange(const KeyContent& content) {
  CheckMayChange();
  if (content.key == nullptr) Fail("a key is written that was opened to be read");
}

void SimHost::Store(KeyContent& content, Lock* lock) {
  CheckMayChange(content);
  if (content.is_other && doing_ != Doing::kApplying) Fail("what is no lock is overwritten");
  Database& database = DatabaseOf(content.name.db);
  auto found = database.find(content.name.key);
  if (found != database.end() && found->second.lock == nullptr) {
    Replace(content.name.db, content.name.key);  // by a module: the server tells nobody
    found = database.end();
  }
  if (found == database.end()) {
    found = database.emplace(std::string(content.name.key), Key{}).first;
  }
  Key& key = found->second;
  if (key.lock.get() != content.lock) Fail("a key has changed while it was open");
  if (key.lock.get() != lock) key.lock.reset(lock);
  key.expiry = lock->blocks_until();
  content.lock = lock;
  content.is_plain = false;
}

void SimHost::Delete(KeyContent& content) {
  CheckMayChange(content);
  if (!engine_.is_removing()) Fail("a key is deleted without a word");
  Remove(content.name.db, content.name.key);
  content.lock = nullptr;
}

std::optional<Instant> SimHost::ExpiryOf(const KeyContent& content) {
  return ExpiryOf(content.name.db, content.name.key);
}

const char* SimHost::MissingCommandFor(const Change& change) {
  const std::string_view needed = std::holds_alternative<PlainFreed>(change) ? "DEL" : "PEXPIREAT";
  return missing_command != nullptr && missing_command == needed ? missing_command : nullptr;
}

void SimHost::ChangePlain(KeyContent& content, const Change& change) {
  CheckMayChange(content);
  if (MissingCommandFor(change) != nullptr) return Fail("a command is called that is not there");
  const auto [db, key] = content.name;
  content.is_plain = false;
  if (const auto* extended = std::get_if<PlainExtended>(&change)) {
    Key* found = Find(db, key);
    if (found == nullptr) return Fail("a plain lock has gone while it was open");
    found->expiry = extended->end;
    {
      const As event(*this, Doing::kEvent);
      engine_.OnKeyChanged(key);
      if (StoredLocks() > 0) engine_.OnTtlChanged(key);
    }
    Tell(db, {"PEXPIREAT", key, Digits(extended->end)});
  } else {
    Remove(db, key);
    Tell(db, {"DEL", key});
  }
}

size_t SimHost::StoredLocks() {
  size_t locks = 0;
  for (const auto& [db, database] : databases_) {
    for (const auto& [name, key] : database) locks += key.lock != nullptr ? 1U : 0U;
  }
  return locks;
}

size_t SimHost::CountKeys(int db) { return DatabaseOf(db).size(); }

void SimHost::VisitLocks(int db, const std::function<bool(LockName, const Lock&)>& visit) {
  for (const auto& [name, key] : DatabaseOf(db)) {
    if (key.lock != nullptr && !visit({db, name}, *key.lock)) return;
  }
}

// --- Host: replication --------------------------------------------------------------------------

void SimHost::CheckVia(Via via) {
  if ((via == Via::kDeferred) != (doing_ == Doing::kPass)) {
    Fail("a change is replicated as if it were made elsewhere");
  }
}

void SimHost::Replicate(const KeyContent& key, const HoldSet& held, Via via, Instant /*now*/) {
  CheckVia(via);
  if (via == Via::kCommand) Fail("a command is replicated that only asks");
  if (on_hold_set) on_hold_set(key.name, held);
  // A call that was notified may have unbound it; what a blocked one does is noted when it is
  // answered.
  if (doing_ == Doing::kPass) NoteSession(key.name, held.hold.owner, /*session=*/false, 0);
  if (!has_consumers_) return;
  const HoldNumbers numbers(held.hold);
  const std::string weight = Digits(held.hold.weight);
  const std::string count = Digits(held.hold.count);
  const std::string linger = Digits(held.hold.linger.count());
  const std::string cap = Digits(held.hold.cap.value_or(Instant{}));
  std::vector<std::string_view> words = {kHeldCommand, key.name.key, held.hold.owner.bytes,
                                         numbers.text()};
  if (held.mode != Mode::kExclusive) words.push_back(WordFor(held.mode));
  if (held.hold.weight != 1) words.insert(words.end(), {kWeightWord, weight});
  if (held.hold.count != 1) words.insert(words.end(), {kCountWord, count});
  if (held.hold.linger != Millis{0}) words.insert(words.end(), {kLingerWord, linger});
  if (held.hold.cap.has_value()) words.insert(words.end(), {kCapWord, cap});
  if (!held.hold.tag.empty()) words.insert(words.end(), {kTagWord, held.hold.tag});
  WriteLog(key.name.db, words);
}

void SimHost::Replicate(const KeyContent& key, const HoldReleased& released, Via via) {
  CheckVia(via);
  if (via == Via::kCommand && keys_of_command_ != 1) {
    Fail("a command is replicated that says more than what is done");
  }
  Tell(key.name.db, {kReleaseCommand, key.name.key, released.owner.bytes});
}

void SimHost::Replicate(const KeyContent& key, const HoldEnded& ended) {
  std::vector<std::string_view> words = {kFactCommand, kFactEnded, key.name.key, ended.owner.bytes};
  if (const std::string_view how = WordFor(ended.how); !how.empty()) words.push_back(how);
  WriteLog(key.name.db, words);
}

void SimHost::Replicate(const KeyContent& key, const HoldsExpired& expired) {
  Tell(key.name.db, {kFactCommand, kFactExpired, key.name.key, Digits(expired.before)});
}

void SimHost::Replicate(const KeyContent& key, const SessionsEnded& ended) {
  const std::string at = Digits(ended.at);
  std::vector<std::string_view> words = {kFactCommand, kFactSession, key.name.key, at};
  for (const Owner owner : ended.owners) words.push_back(owner.bytes);
  WriteLog(key.name.db, words);
}

void SimHost::ReplicateVerbatim() {
  if (applying_ == nullptr) return Fail("nothing is running that could be replicated");
  WriteLog(applying_->db, applying_->words);
}

void SimHost::ReplicateFloor(Token floor) {
  CheckMayChange();
  if (!may_replicate_floor) Fail("a fact without a key is replicated while a slot leaves");
  if (!has_consumers_) Fail("a floor is replicated though nobody reads it");
  Tell(0, {kFactCommand, kFactFloor, Digits(static_cast<int64_t>(floor.value))});
}

// --- Host: callers ------------------------------------------------------------------------------

std::optional<uint64_t> SimHost::CallerConnection() {
  if (caller_ == nullptr || caller_->in_script) return std::nullopt;
  return caller_->connection;
}

Host::NotifiedCaller SimHost::CallerToNotify(std::string_view /*channel*/, LockName /*lock*/) {
  if (caller_->user.empty() || users_who_may_not_publish.contains(caller_->user)) {
    return {.user = {}, .refusal = "NOPERM"};
  }
  return {.user = caller_->user, .refusal = std::nullopt};
}

// The cost is counted, so that a seed gives one history.
Delivery SimHost::Publish(const Notice& notice) {
  if (doing_ != Doing::kPass) Fail("published outside a pass");
  const bool permitted = !users_who_may_not_publish.contains(notice.user);
  const auto found = subscribers.find(notice.to.channel);
  const size_t receivers = permitted && found != subscribers.end() ? found->second : 0;
  if (on_notice) on_notice(notice, receivers);
  constexpr size_t kBytesPerUnit = 4096;
  return {.receivers = receivers,
          .cost = (receivers > 1 ? receivers - 1 : 0) +
                  notice.key.size() * (receivers + 1) / kBytesPerUnit};
}

std::optional<Host::ParkableCaller> SimHost::CallerToPark() {
  const bool may_park = caller_ != nullptr && caller_->may_block && !caller_->in_script;
  if (!may_park || caller_->user.empty()) return std::nullopt;
  return ParkableCaller{.connection = caller_->connection, .user = caller_->user};
}

bool SimHost::Park(WaitingCall& call) {
  if (caller_ == nullptr) {
    Fail("nobody waits");
    return false;
  }
  if (lets_nobody_wait) return false;
  if (IsParked(caller_->connection)) Fail("a connection waits twice");
  runs_passes_ = true;
  parked_.push_back({&call, caller_->connection, caller_->tag,
                     now_.steady + std::chrono::ceil<Millis>(call.request().wait),
                     std::string(call.request().owner.bytes)});
  for (size_t i = 0; i < call.size(); ++i) {
    parked_.back().locks.emplace_back(call.lock(i).db, call.lock(i).key);
  }
  return true;
}

void SimHost::Answer(WaitingCall& call) {
  const auto found =
      std::find_if(parked_.begin(), parked_.end(),
                   [&call](const ParkedCall& parked) { return parked.call == &call; });
  if (found == parked_.end()) return Fail("a call is answered twice");
  if (doing_ == Doing::kCommand) Fail("a call is answered inside a command");
  if (std::holds_alternative<Token>(call.answer())) {
    for (const auto& [db, key] : found->locks) {
      NoteSession({db, key}, Owner{found->owner}, call.request().session, found->connection);
    }
  }
  answered_.push_back({&call, found->connection, found->tag, log_.size()});
  unreplied_.insert(&call);
  parked_.erase(found);
}

std::optional<std::string> SimHost::WriteRefusal(std::string_view user, std::string_view key,
                                                 bool needs_memory) const {
  if (keys_of_lost_slots.contains(key)) return "MOVED";
  if (users_without_rights.contains(user)) return "NOPERM";
  if (needs_memory && (out_of_memory || grants_until_out_of_memory == 0U)) return "OOM";
  if (lacks_replicas) return "NOREPLICAS";
  return std::nullopt;
}

std::optional<std::string> SimHost::GrantRefusal(const WaitingCall& call, const KeyContent& key) {
  if (!MayWrite()) Fail("somebody is granted a lock while writes are not allowed");
  std::optional<std::string> refusal = WriteRefusal(call.user(), key.name.key, true);
  if (!refusal.has_value() && grants_until_out_of_memory.has_value()) {
    --*grants_until_out_of_memory;
  }
  return refusal;
}

void SimHost::BeforeGrant(LockName lock, FineInstant now) {
  const auto came = keys_of_new_slots.find(lock.key);
  if (came == keys_of_new_slots.end()) return;
  keys_of_new_slots.erase(came);
  engine_.tokens().OnSlotsArrived(now);
}

std::optional<std::string> SimHost::SlotRefusal(LockName lock) {
  return keys_of_lost_slots.contains(lock.key) ? std::optional<std::string>("MOVED") : std::nullopt;
}

}  // namespace turnstile::sim

// A broken invariant is a fault of the server that runs, so that the run with its seed reports it.
void turnstile::OnCheckFailed(const char* condition, const char* function) {
  if (sim::running == nullptr) {
    std::fprintf(stderr, "%s: not (%s)\n", function, condition);
    std::abort();
  }
  sim::running->Fail(condition);
}
