// Storms: random histories of everything that clients, strangers and servers can do to a primary
// and its replica, over several databases, checked after every step.
//
// The simulator (tests/fault/simulator) judges what clients were told; here the state is judged.
// Nothing may be lost that nobody gave up, copies agree, everybody is answered once.

#include <gtest/gtest.h>

#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "sim/sim_host.h"

namespace turnstile::sim {
namespace {

constexpr int kDatabases = 3;
constexpr std::string_view kKeys[] = {"a", "b", "c", "d"};
constexpr std::string_view kOwners[] = {"1", "2", "3", "4", "5", "an-owner-with-a-long-name"};
constexpr std::string_view kUsers[] = {"default", "guest"};

// A hold that somebody may rely on.
struct LiveHold {
  int db;
  std::string key;
  std::string owner;
  Token token;
  friend auto operator<=>(const LiveHold&, const LiveHold&) = default;
};

class Storm {
 public:
  explicit Storm(uint64_t seed) : random_(seed) {
    primary_ = std::make_unique<SimHost>();
    replica_ = std::make_unique<SimHost>();
    for (SimHost* host : {primary_.get(), replica_.get()}) {
      host->engine().settings().token_margin = Millis{1000};
      host->engine().settings().max_holders = 1 + Below(4);
      if (OneIn(4)) host->engine().settings().failover_grace = Millis{Below(30)};
    }
    budget_ = OneIn(3) ? 1 + Below(20) : 5'000;
    primary_->expiry_lag = Millis{OneIn(3) ? 1 : 0};
    primary_->BeOldPrimary(now_.wall);
  }

  // What is wrong; empty if nothing is.
  std::string Run(int steps) {
    for (int i = 0; i < steps && wrong_.empty(); ++i) {
      Step();
      Pass(OneIn(3));
    }
    if (wrong_.empty()) ComeToRest();
    return wrong_;
  }
  const std::string& story() const { return story_; }
  ~Storm() {
    for (const Answered& answered : in_flight_) primary_->Replied(answered, /*delivered=*/true);
  }

 private:
  // What a call that waits has asked for.
  struct Asked {
    std::vector<std::string> keys;
    std::string user;
  };

  uint64_t Below(uint64_t bound) { return random_() % bound; }
  bool OneIn(uint64_t n) { return Below(n) == 0; }
  int AnyDb() { return OneIn(2) ? 0 : static_cast<int>(Below(kDatabases)); }
  template <size_t kSize>
  std::string_view Any(const std::string_view (&names)[kSize]) {
    return names[Below(kSize)];
  }

  void Wrong(const std::string& what) {
    if (wrong_.empty()) wrong_ = what;
  }
  void Tell(const std::string& what) {
    story_ += std::to_string(now_.moment().time_since_epoch().count()) + ' ' + what + '\n';
  }

  std::set<LiveHold> LiveHolds() const {
    std::set<LiveHold> holds;
    for (const auto& [db, key] : primary_->Keys()) {
      const Lock* lock = primary_->FindLock(db, key);
      if (lock == nullptr) continue;
      // A stranger's EXPIRE counts while writes are paused, and the lease cannot be restored.
      const std::optional<Instant> expiry = primary_->ExpiryOf(db, key);
      if (expiry.has_value() && *expiry < now_.moment()) continue;
      for (const Hold& hold : lock->holds(Lock::Order::kByToken)) {
        if (!hold.LiveAt(now_.moment())) continue;
        const auto bound = primary_->engine().sessions().BoundTo({db, key}, hold.owner);
        if (bound.has_value() && gone_.contains(*bound)) continue;  // it has ended
        holds.insert({db, key, std::string(hold.owner.bytes), hold.token});
      }
    }
    return holds;
  }

  // Whatever was live before the step is still there, but for what `may_go` explains.
  template <typename MayGo>
  void ExpectKept(const std::set<LiveHold>& before, const char* what, MayGo may_go) {
    const std::set<LiveHold> after = LiveHolds();
    for (const LiveHold& hold : before) {
      if (after.contains(hold) || may_go(hold)) continue;
      Wrong(std::string(what) + " loses the hold of " + hold.owner + " on " + hold.key);
    }
  }

  void ShowToken(Token token, const std::set<LiveHold>& before) {
    if (token > highest_) {
      highest_ = token;
      return;
    }
    const bool known = std::any_of(before.begin(), before.end(),
                                   [&](const LiveHold& hold) { return hold.token == token; });
    if (!known) Wrong("a token is not above all before it");
  }

  Caller NewCaller() {
    return {.connection = next_connection_++,
            .tag = next_tag_++,
            .db = AnyDb(),
            .user = std::string(Any(kUsers)),
            .may_block = !OneIn(10)};
  }

  std::vector<std::string_view> SomeKeys() {
    std::set<std::string_view> keys = {Any(kKeys)};
    while (OneIn(3)) keys.insert(Any(kKeys));
    return {keys.begin(), keys.end()};
  }

  void Acquire() {
    const Caller caller = NewCaller();
    const std::vector<std::string_view> keys = SomeKeys();
    AcquireRequest request{.owner = Owner{Any(kOwners)}, .lease = Millis{1 + Below(40)}};
    if (OneIn(2)) request.wait = Millis{1 + Below(60)};
    const uint64_t mode = Below(3);
    if (mode == 1) request.mode = Mode::kShared;
    if (mode == 2) {
      request.mode = Mode::kLimit;
      request.limit = static_cast<uint32_t>(1 + Below(3));
    }
    request.reentrant = mode != 2 && OneIn(4);
    request.session = OneIn(3);
    if (OneIn(4)) request.linger = Millis{1 + Below(20)};
    const std::set<LiveHold> before = LiveHolds();
    const AcquireResult result = primary_->Acquire(caller, keys, request, now_);
    Tell("acquire " + std::string(keys.front()) + "+" + std::to_string(keys.size() - 1) + " by " +
         std::string(request.owner.bytes) + " in " + std::to_string(caller.db) + " over " +
         std::to_string(caller.connection) + ": " + std::to_string(static_cast<int>(result.kind)) +
         ' ' + std::to_string(result.token.value));
    const bool granted = result.kind == AcquireResult::Kind::kGranted;
    ExpectKept(before, "LOCK.ACQUIRE", [&](const LiveHold& hold) {
      return granted && hold.owner == request.owner.bytes;  // an upgrade has another token
    });
    if (granted) {
      ShowToken(result.token, before);
      new_in_flight_.erase(result.token);
      for (const std::string_view key : keys) {
        const Lock* lock = primary_->FindLock(caller.db, key);
        if (lock == nullptr || !lock->Find(request.owner).has_value()) Wrong("granted, not held");
        if (lock != nullptr && request.mode == Mode::kExclusive && lock->size() != 1) {
          Wrong("an exclusive holder is not alone");
        }
      }
      Bound(result.token, {keys.begin(), keys.end()},
            request.session ? std::optional(caller.connection) : std::nullopt);
    }
    if (result.kind == AcquireResult::Kind::kWaits) {
      waiting_.emplace(caller.tag, caller.connection);
      asked_[caller.tag] = {{keys.begin(), keys.end()}, caller.user};
      if (request.session) wants_session_.insert(caller.connection);
    }
  }

  // Under this token the owner's hold is bound to a connection now, or to none.
  void Bound(Token token, const std::vector<std::string>& keys,
             std::optional<uint64_t> connection) {
    for (const std::string& key : keys) {
      bound_.erase({token, key});
      if (connection.has_value()) bound_.emplace(std::pair(token, key), *connection);
    }
    if (connection.has_value()) sessions_.push_back(*connection);
  }

  // No hold outlives the connection that it is bound to, once nothing is pending.
  void CheckSessions() {
    if (primary_->engine().sessions().has_ended()) return;
    for (const LiveHold& hold : LiveHolds()) {
      const auto bound = bound_.find({hold.token, hold.key});
      if (bound != bound_.end() && gone_.contains(bound->second)) {
        Wrong("the hold of " + hold.owner + " on " + hold.key + " outlives its connection");
      }
    }
  }

  // Holds that a stranger takes elsewhere or brings back are ordinary ones from then on.
  void Unbind(int db, std::string_view key) {
    const Lock* lock = primary_->FindLock(db, key);
    if (lock == nullptr) return;
    for (const Hold& hold : lock->holds(Lock::Order::kByToken)) {
      std::erase_if(bound_, [&](const auto& bound) { return bound.first.first == hold.token; });
    }
  }

  void Release() {
    const Caller caller = NewCaller();
    const std::vector<std::string_view> keys = SomeKeys();
    const Owner owner{Any(kOwners)};
    const std::set<LiveHold> before = LiveHolds();
    primary_->Release(caller, keys, owner, now_);
    Tell("release " + std::string(keys.front()) + " by " + std::string(owner.bytes) + " in " +
         std::to_string(caller.db));
    ExpectKept(before, "LOCK.RELEASE", [&](const LiveHold& hold) {
      return hold.owner == owner.bytes && hold.db == caller.db &&
             std::find(keys.begin(), keys.end(), hold.key) != keys.end();
    });
  }

  void Touch() {
    const Caller caller = NewCaller();
    const std::vector<std::string_view> keys = SomeKeys();
    const std::set<LiveHold> before = LiveHolds();
    const Owner owner{Any(kOwners)};
    Tell("touch by " + std::string(owner.bytes));
    primary_->Touch(caller, keys, owner, Millis{1 + Below(40)}, now_);
    for (const LiveHold& hold : before) {
      const bool touched = hold.db == caller.db && hold.owner == owner.bytes &&
                           std::find(keys.begin(), keys.end(), hold.key) != keys.end();
      if (touched) new_in_flight_.erase(hold.token);  // its owner has heard of it
    }
    ExpectKept(before, "LOCK.TOUCH", [](const LiveHold&) { return false; });
  }

  void Leave() {
    if (sessions_.empty() || OneIn(2)) {
      if (waiting_.empty()) return;
      auto waits = waiting_.begin();
      std::advance(waits, static_cast<ptrdiff_t>(Below(waiting_.size())));
      const auto [tag, connection] = *waits;
      waiting_.erase(waits);
      Tell("leaves its wait: " + std::to_string(connection));
      if (OneIn(2)) {
        primary_->Unblock(connection, OneIn(2), now_);
      } else {
        gone_.insert(connection);
        primary_->Disconnect(connection, now_);
      }
      return;
    }
    const uint64_t connection = sessions_[Below(sessions_.size())];
    Tell("disconnects: " + std::to_string(connection));
    gone_.insert(connection);
    std::erase(sessions_, connection);
    std::erase_if(waiting_, [&](const auto& waits) { return waits.second == connection; });
    primary_->Disconnect(connection, now_);
  }

  void Meddle() {
    const int db = AnyDb();
    const std::string_view key = Any(kKeys);
    const std::string where = std::string(key) + " in " + std::to_string(db);
    switch (Below(11)) {
      case 0:
        Tell("DEL " + where);
        primary_->Delete(db, key, now_);
        break;
      case 1: {
        const bool ends = !OneIn(4);
        Tell("SET " + where);
        primary_->Set(db, key, OneIn(3) ? Any(kOwners) : "x",
                      ends ? std::optional(now_.moment() + Millis{1 + Below(30)}) : std::nullopt,
                      now_);
        break;
      }
      case 2:
        if (!OneIn(4)) break;
        Tell("LPUSH " + where);
        primary_->Push(db, key, now_);
        break;
      case 3:
        Tell("RENAME " + where);
        Unbind(db, key);
        primary_->Rename(db, key, Any(kKeys), now_);
        break;
      case 4:
        Tell("MOVE " + where);
        Unbind(db, key);
        primary_->Move(db, key, static_cast<int>(Below(kDatabases)), now_);
        break;
      case 5:
      case 6:
        Tell("SWAPDB");
        primary_->Swap(db, static_cast<int>(Below(kDatabases)), now_);
        break;
      case 7:
        if (!OneIn(4)) break;
        Tell("FLUSH");
        primary_->Flush(OneIn(2) ? std::nullopt : std::optional(db), now_);
        break;
      case 8:
        Tell("EXPIRE " + where);
        primary_->Expire(db, key,
                         OneIn(3) ? std::nullopt : std::optional(now_.moment() + Millis{Below(60)}),
                         now_);
        break;
      case 9:
        Tell("evicts " + where);
        primary_->Evict(db, key, now_);
        break;
      default: {
        const std::string_view from = Any(kKeys);
        const std::string bytes = primary_->Dump(db, from);
        if (bytes.empty()) break;
        Unbind(db, from);
        Tell("RESTORE " + where);
        primary_->Restore(db, key, bytes, now_.moment() + Millis{1 + Below(40)}, now_);
      }
    }
  }

  void Change() {
    switch (Below(5)) {
      case 0:
        primary_->may_write = OneIn(2);
        break;
      case 1:
        primary_->out_of_memory = OneIn(3);
        break;
      case 2:
        primary_->users_without_rights.clear();
        if (OneIn(3)) primary_->users_without_rights.emplace("guest");
        break;
      case 3:
        primary_->keys_of_lost_slots.clear();
        if (OneIn(4)) primary_->keys_of_lost_slots.emplace(Any(kKeys));
        break;
      default:
        primary_->engine().settings().plain_locks = !OneIn(4);
        primary_->engine().settings().max_holders = 1 + Below(4);
        primary_->engine().OnSettingsChanged();
    }
    Tell("settings change");
  }

  void Step() {
    const auto passes = Micros{static_cast<int64_t>(OneIn(3) ? Below(20'000) : Below(2'000))};
    now_.wall += passes;
    now_.steady += passes;
    if (OneIn(5)) primary_->ExpireCycle(now_);
    switch (Below(20)) {
      case 0:
      case 1:
      case 2:
        Release();
        break;
      case 3:
        Touch();
        break;
      case 4:
      case 5:
        Leave();
        break;
      case 6:
      case 7:
      case 8:
        Meddle();
        break;
      case 9:
        if (OneIn(2)) Change();
        break;
      case 10:
        if (OneIn(10)) FailOver();
        break;
      case 11:
        if (OneIn(5)) Restart();
        break;
      default:
        Acquire();
    }
    Check();
  }

  // Answers arrive, or turn out not to.
  void Deliver() {
    for (const Answered& answered : std::exchange(in_flight_, {})) {
      const auto* token = std::get_if<Token>(&answered.call->answer());
      const bool lost = OneIn(5);
      if (lost) Tell("the answer to " + std::to_string(answered.connection) + " is lost");
      if (token != nullptr && new_in_flight_.erase(*token) > 0 && lost) {
        undelivered_.insert(*token);
      }
      primary_->Replied(answered, !lost);
      if (!lost) continue;
      gone_.insert(answered.connection);
      std::erase(sessions_, answered.connection);
      primary_->Disconnect(answered.connection, now_);
    }
  }

  // What a direct call would be refused for, a call that waited is refused for too.
  void CheckAllowed(const Asked& asked) {
    bool allowed = !primary_->out_of_memory && !primary_->users_without_rights.contains(asked.user);
    for (const std::string& key : asked.keys) {
      allowed = allowed && !primary_->keys_of_lost_slots.contains(key);
    }
    if (!allowed) Wrong("granted what must be refused");
  }

  // The lease decides, not the TTL that a stranger has given to the key.
  void CheckTtls() {
    const std::optional<Instant> due = primary_->NextDue();
    if (!primary_->may_write || (due.has_value() && *due <= now_.moment())) return;
    for (const auto& [db, key] : primary_->Keys()) {
      const Lock* lock = primary_->FindLock(db, key);
      if (lock != nullptr && primary_->ExpiryOf(db, key) != lock->closes()) {
        Wrong("the TTL of " + key + " is not that of its lease");
      }
    }
  }

  // A pass of the event loop, and what the network does with its answers.
  void Pass(bool often) {
    do {
      Deliver();
      const std::set<LiveHold> before = LiveHolds();
      primary_->Turn(now_, budget_);
      std::set<Token> granted;
      for (const Answered& answered : std::exchange(primary_->answered(), {})) {
        if (waiting_.erase(answered.tag) == 0) Wrong("an answer that nobody waits for");
        const auto* token = std::get_if<Token>(&answered.call->answer());
        Tell("answers " + std::to_string(answered.connection) +
             (token != nullptr ? " with " + std::to_string(token->value) : ""));
        if (token != nullptr) {
          ShowToken(*token, before);
          granted.insert(*token);
          CheckAllowed(asked_[answered.tag]);
          const bool session = wants_session_.contains(answered.connection);
          Bound(*token, asked_[answered.tag].keys,
                session ? std::optional(answered.connection) : std::nullopt);
          const bool is_new = std::none_of(before.begin(), before.end(), [&](const LiveHold& hold) {
            return hold.token == *token;
          });
          if (is_new) new_in_flight_.insert(*token);
        }
        in_flight_.push_back(answered);
      }
      if (!OneIn(4)) Deliver();
      ExpectKept(before, "a pass", [&](const LiveHold& hold) {
        // Taken back, or upgraded.
        if (undelivered_.contains(hold.token)) return true;
        const Lock* lock = primary_->FindLock(hold.db, hold.key);
        const auto own = lock == nullptr ? std::nullopt : lock->Find(Owner{hold.owner});
        return own.has_value() && granted.contains(own->token);
      });
      Check();
      CheckWaits();
      CheckSessions();
      CheckTtls();
    } while (often && OneIn(2) && wrong_.empty());
  }

  void Replicate() {
    while (applied_ < primary_->log().size()) {
      replica_->Apply(primary_->log().Read(applied_++));
    }
  }

  void Check() {
    if (primary_->fault() != nullptr) Wrong(primary_->fault());
    if (OneIn(3)) {
      Replicate();
      if (replica_->fault() != nullptr) Wrong(std::string("replica: ") + replica_->fault());
      if (!primary_->HasSameData(*replica_)) {
        Wrong("the replica differs:\n" + primary_->Describe() + "from\n" + replica_->Describe());
      }
    }
    if (primary_->waiting() != waiting_.size()) Wrong("somebody's wait is forgotten");
  }

  void CheckWaits() {
    const bool allowed = primary_->may_write && !primary_->out_of_memory &&
                         primary_->users_without_rights.empty() &&
                         primary_->keys_of_lost_slots.empty();
    if (allowed && primary_->LeavesSomebodyWaiting(now_)) Wrong("somebody waits for nothing");
    if (primary_->KeepsSomebodyTooLong(now_.steady - std::chrono::milliseconds{25})) {
      Wrong("somebody waits for too long");
    }
  }

  // A clean one: the replica has everything.
  void FailOver() {
    Tell("fails over");
    Deliver();
    // A TTL that a stranger changed in the very pass in which a primary is replaced is not set back
    // by its successor (storm 427).
    primary_->may_write = true;
    budget_ = 5'000;
    Pass(/*often=*/false);
    Deliver();
    Replicate();
    primary_->BecomeReplica(now_);
    for (const auto& [connection, tag] : std::exchange(primary_->sent_away(), {})) {
      if (waiting_.erase(tag) == 0) Wrong("somebody is sent away who does not wait");
    }
    std::swap(primary_, replica_);
    // The old one takes a copy, as after a change of the stream.
    const SimHost::Copy copy = primary_->Save(now_.wall);
    replica_->Load(copy);
    bases_[replica_.get()] = copy;
    applied_ = primary_->log().size();
    primary_->may_write = true;
    undelivered_.clear();
    sessions_.clear();
    bound_.clear();
    primary_->BecomePrimary();
  }

  // From its own log, which is its AOF.
  void Restart() {
    SimHost again;
    again.engine().settings() = primary_->engine().settings();
    again.Load(bases_[primary_.get()]);
    for (size_t i = 0; i < primary_->log().size(); ++i) again.Apply(primary_->log().Read(i));
    if (again.fault() != nullptr) Wrong(std::string("restart: ") + again.fault());
    if (!again.HasSameData(*primary_)) {
      Wrong("a restart brings back something else:\n" + primary_->Describe() + "from\n" +
            again.Describe());
    }
  }

  // Everything is allowed again, and nobody comes any more.
  void ComeToRest() {
    primary_->may_write = true;
    primary_->out_of_memory = false;
    primary_->users_without_rights.clear();
    primary_->keys_of_lost_slots.clear();
    for (int i = 0; i < 400 && wrong_.empty(); ++i) {
      now_.wall += Millis{1};
      now_.steady += Millis{1};
      Pass(/*often=*/true);
    }
    if (!primary_->IsQueueClean()) Wrong("something is left of those who waited");
    if (primary_->engine().sessions().has_ended()) Wrong("a session does not end");
  }

  std::mt19937_64 random_;
  Now now_{.wall = FineInstant{std::chrono::hours{24 * 365 * 50}},
           .steady = FineTick{std::chrono::hours{100}}};
  std::unique_ptr<SimHost> primary_;
  std::unique_ptr<SimHost> replica_;
  size_t applied_ = 0;
  std::map<const SimHost*, SimHost::Copy> bases_;  // what each one's log begins with
  size_t budget_ = 5'000;
  uint64_t next_connection_ = 1;
  uint64_t next_tag_ = 1;
  Token highest_;
  std::map<uint64_t, uint64_t> waiting_;  // tag to connection
  std::map<uint64_t, Asked> asked_;       // tag to keys
  std::vector<uint64_t> sessions_;        // connections that may have a hold bound to them
  std::set<uint64_t> wants_session_;      // connections of those who wait for such a hold
  std::map<std::pair<Token, std::string>, uint64_t> bound_;  // to which connection
  std::set<uint64_t> gone_;
  std::vector<Answered> in_flight_;
  std::set<Token> new_in_flight_;  // nobody but the answer on its way tells of these
  std::set<Token> undelivered_;
  std::string wrong_;
  std::string story_;
};

TEST(StormTest, NothingIsLostAndEverybodyIsAnswered) {
  const char* wanted = std::getenv("TURNSTILE_STORMS");
  const uint64_t storms = wanted == nullptr ? 500 : std::strtoull(wanted, nullptr, 10);
  for (uint64_t seed = 1; seed <= storms; ++seed) {
    Storm storm(seed);
    const std::string wrong = storm.Run(120);
    ASSERT_EQ(wrong, "") << "seed " << seed << '\n' << storm.story();
  }
}

}  // namespace
}  // namespace turnstile::sim
