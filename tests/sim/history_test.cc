// Random histories against a naive model.
//
// A simulated server (sim_host) runs the engine that ships, in simulated time: clients in every
// mode and with every option, strangers who use SET, DEL, EXPIRE, RENAME or RESTORE, connections
// that close, event loops that get only a part of their work done, pauses, restarts, failovers that
// lose writes, and a wall clock that also steps back. After every step three independent parties
// must be content:
//   - the Model (model.h), which follows the contract in the most straightforward way: same
//     answers, same tokens, same cycles, same stored holds and TTLs, same places in every line;
//   - the Witness, which knows only what clients were told: never two writers, never a writer with
//     a reader, never more permits than the request allows, tokens only rise, nothing lost comes
//     back, a set of locks is taken whole or not at all;
//   - a replica, which knows only the log.
// Some calls block, some are notified (NOTIFY): both stand in the same lines. Channels have
// subscribers or none, and users lose the right to publish. Every message is one that the model
// expects, and each is told once.
// Beyond that some things are checked for themselves: nobody overtakes, everybody who waits is
// answered exactly once, a cycle that is named exists and is the shortest, nobody waits whom the
// grant rule admits, and what is due next is known.
//
// Whom to try, and which ended holds to take out on the way, is the engine's choice. The log tells
// of it; the model follows, and checks each step.
//
// Every history follows from its seed, which is printed on failure with all that happened.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <initializer_list>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/encoding.h"
#include "core/fact.h"
#include "core/request.h"
#include "sim/model.h"
#include "sim/sim_host.h"
#include "unit/printers.h"

namespace turnstile::sim {
namespace {

constexpr int64_t kSecond = 1'000 * kMilli;
constexpr int64_t kLongestLease = 86'400'000;
constexpr Limits kLimits{.max_lease = Millis{kLongestLease}};
constexpr size_t kWholePass = 1'000'000;
constexpr const char* kRefusedUser = "outcast";
constexpr const char* kMuteUser = "mute";  // who may publish at some times only
// Nobody ever listens to the last of them.
const std::array kChannels = {std::string("news"), std::string("b\0 \n", 4), std::string("empty")};

int64_t Number(Token token) { return static_cast<int64_t>(token.value); }
Token ToToken(int64_t number) { return Token{static_cast<uint64_t>(number)}; }
std::optional<Instant> ToExpiry(int64_t end) {
  return end == kNever ? std::nullopt : std::optional(Instant{Millis{end}});
}

// --- The witness: what clients were told --------------------------------------------------------

class Witness {
 public:
  explicit Witness(size_t keys) : told_(keys) {}

  // The highest token that anybody ever got.
  int64_t highest() const { return highest_; }

  // LOCK.ACQUIRE was answered with a token, at once or after a wait.
  void Granted(const Ask& ask, int64_t token, int64_t now) {
    EXPECT_GE(token, 1);
    EXPECT_LE(token, kLastToken);
    bool is_new = false;
    for (const int key : ask.keys) is_new = GrantedOne(key, ask, token, now) || is_new;
    if (is_new) {
      EXPECT_GT(token, highest_) << "the server's tokens do not rise";
    }
    highest_ = std::max(highest_, token);
  }

  void Touched(int key, int owner, int64_t lease, int64_t now) {
    ModelHold* own = Find(key, owner);
    ASSERT_NE(own, nullptr) << "what is not held was touched";
    EXPECT_TRUE(own->IsLive(now)) << "a lost hold was revived";
    own->end = own->EndOfLease(lease, now);
  }

  // `gave_up`: whether the owner was told that it gave something up, where nothing but this lock
  // can have been meant.
  void HoldReleased(int key, int owner, std::optional<bool> gave_up, int64_t now) {
    ModelHold* own = Find(key, owner);
    const bool live = own != nullptr && own->IsLive(now);
    EXPECT_EQ(gave_up.value_or(live), live) << "a release of what was not held, or in vain";
    if (own == nullptr || own->IsOverdue(now)) return;
    if (!live || --own->count == 0) Forget(key, owner);
  }

  void Disconnected(uint64_t connection) {
    for (Told& told : told_) {
      for (ModelHold& hold : told.holds) hold.gone = hold.gone || hold.session == connection;
    }
  }

  // The events lock.lost.
  void SessionEnded(int key, int owner, int64_t now) {
    ModelHold* own = Find(key, owner);
    ASSERT_NE(own, nullptr) << "lost what was not held";
    EXPECT_TRUE(own->gone) << "lost though the connection is open";
    if (own->linger == 0) return Forget(key, owner);
    own->linger += now - 1;
    own->end = 0;
    own->gone = false;
    own->session.reset();
  }
  // The message `lost`: if the hold lives again, because the clock was set back, it is not bound.
  void HeardOfLoss(int key, const Target& to, int64_t token) {
    for (ModelHold& hold : told_[Index(key)].holds) {
      if (hold.token == token && hold.notify == to) hold.notify.reset();
    }
  }
  // Nobody was told of a loss: what has come back is bound as before.
  void CameBack(int key, const ModelLock& lock) {
    for (ModelHold& hold : told_[Index(key)].holds) {
      const ModelHold* own = lock.Find(hold.owner);
      if (own != nullptr && own->token == hold.token) hold.notify = own->notify;
    }
  }
  const char* EndedSessions(int key, std::optional<int> owner, int64_t now) {
    return sim::EndedSessions(told_[Index(key)].holds, owner, now);
  }
  void HoldsExpired(int key, int64_t now) {
    std::erase_if(told_[Index(key)].holds,
                  [now](const ModelHold& hold) { return hold.IsOverdue(now); });
  }
  // The key went. `when`: by itself, and not because of a TTL that a stranger gave it.
  void Gone(int key, std::optional<int64_t> when = std::nullopt) {
    for (const ModelHold& hold : told_[Index(key)].holds) {
      EXPECT_TRUE(!when.has_value() || hold.IsOverdue(*when)) << "the key expired too early";
    }
    told_[Index(key)].holds.clear();
  }

  // The answer to LOCK.FENCE.
  void Fenced(int key, int64_t token, int64_t now) const {
    int64_t expected = 0;
    for (const ModelHold& hold : told_[Index(key)].holds) {
      if (hold.IsLive(now)) expected = std::max(expected, hold.token);
    }
    EXPECT_EQ(token, expected) << "fence";
  }

  // A failover, a restart, RENAME, SWAPDB or RESTORE brought data from elsewhere: from now on that
  // counts. Tokens still rise.
  void TakeBack(int key, const ModelLock& lock) {
    told_[Index(key)].mode = lock.mode;
    told_[Index(key)].holds = lock.holds;
  }

 private:
  struct Told {
    Mode mode = Mode::kExclusive;
    std::vector<ModelHold> holds;  // as their owners believe
    int64_t highest = 0;           // the highest token ever
  };

  // Returns whether the token has to be a new one.
  bool GrantedOne(int key, const Ask& ask, int64_t token, int64_t now) {
    Told& told = told_[Index(key)];
    ModelHold hold{ask.owner, token, now, 0, ask.linger, 1, ask.weight};
    if (ask.session) hold.session = ask.connection;
    const ModelHold* own = Find(key, ask.owner);
    const bool live = own != nullptr && own->IsLive(now);
    if (live) {
      hold.since = own->since;
      hold.cap = own->cap;
      hold.notify = own->notify;
    }
    if (ask.max_hold > 0) hold.cap = std::min(hold.cap, hold.since + ask.max_hold);
    hold.end = hold.EndOfLease(ask.lease, now);
    const bool stays = live && (told.mode == ask.mode ||
                                (told.mode == Mode::kExclusive && ask.mode == Mode::kShared));
    const bool repeats = live && ask.notify.has_value() && own->notify == ask.notify;
    if (live) hold.count = own->count + (ask.reentrant && !repeats ? 1 : 0);
    if (ask.notify.has_value()) hold.notify = ask.notify;
    if (stays) {
      EXPECT_EQ(token, std::max(own->token, ask.floor)) << "another token for the same hold";
      EXPECT_TRUE(own->weight == ask.weight || told.mode != ask.mode) << "another weight";
    } else {
      EXPECT_TRUE(!live || (told.mode == Mode::kShared && ask.mode == Mode::kExclusive))
          << "a new token for a live hold";
      EXPECT_GT(token, told.highest) << "the lock's tokens do not rise";
    }
    told.highest = std::max(told.highest, token);
    Forget(key, ask.owner);
    HoldsExpired(key, now);
    int others = 0;
    int64_t weight = ask.weight;
    for (const ModelHold& other : told.holds) {
      if (!other.KeepsOut(now)) continue;
      ++others;
      weight += other.weight;
    }
    if (others > 0) {
      EXPECT_NE(ask.mode, Mode::kExclusive) << "a writer came to " << others << " others";
      EXPECT_EQ(ask.mode, told.mode) << "two modes in one lock";
      if (ask.mode == Mode::kLimit && !stays) {
        EXPECT_LE(weight, ask.limit) << "too many permits";
      }
    }
    told.mode = ask.mode;
    told.holds.push_back(hold);
    return !stays;
  }

  ModelHold* Find(int key, int owner) {
    for (ModelHold& hold : told_[Index(key)].holds) {
      if (hold.owner == owner) return &hold;
    }
    return nullptr;
  }

  void Forget(int key, int owner) {
    std::erase_if(told_[Index(key)].holds,
                  [owner](const ModelHold& hold) { return hold.owner == owner; });
  }

  std::vector<Told> told_;
  int64_t highest_ = 0;
};

// --- The history --------------------------------------------------------------------------------

// How often each thing happened: a history in which nothing happens proves nothing.
using Coverage = std::map<std::string, int, std::less<>>;

class History {
 public:
  History(uint64_t seed, Coverage& coverage)
      : random_(seed),
        coverage_(coverage),
        calm_(OneIn(5)),
        crowded_(!calm_ && OneIn(6)),
        owners_(calm_      ? 10
                : crowded_ ? 20
                           : Choose({2, 3, 4, 5, 6, 8, 12, 20})),
        databases_(Choose({1, 2, 2})),
        keys_(calm_ ? 10 : databases_ * (crowded_ ? 1 : Choose({1, 2, 3, 4}))),
        exclusives_(calm_ ? 3 : Choose({0, 1, 1, 3, 10})),
        readers_(Choose({0, 1, 3, 3})),
        limits_(Choose({0, 1, 3, 3})),
        largest_limit_(Choose({1, 2, 3, 3, 5})),
        heavy_one_in_(Choose({1, 2, 4, 1'000})),
        capped_one_in_(Choose({2, 6, 1'000})),
        notified_one_in_(Choose({1, 2, 2, 4, 1'000})),
        sets_one_in_(calm_ ? 20 : Choose({2, 2, 3, 1'000})),
        longest_lease_(calm_      ? 2'000
                       : crowded_ ? 200
                                  : Choose({3, 20, 60, 200, 1'000})),
        longest_wait_(calm_ || crowded_ ? 2'000 : Choose({3, 20, 60, 400, 2'000})),
        releases_one_in_(calm_ || crowded_ ? 5 : Choose({1, 1, 2, 5})),
        turns_one_in_(Choose({1, 1, 2, 4, 8})),
        strangers_(!OneIn(3)),
        margin_(Millis{Choose({0, 0, 1, 5'000, 30'000, 600'000})}),
        max_holders_(Index(Choose({2, 4, 10'000, 10'000}))),
        expiry_lag_(Millis{Choose({0, 1})}),
        model_(Index(keys_), max_holders_),
        witness_(Index(keys_)) {
    // Mostly today; also a machine whose clock begins in 1970, and the end of all tokens.
    constexpr std::array<int64_t, 16> kStarts = {5 * kSecond, kLastToken - 120 * kSecond};
    const int64_t start = kStarts.at(Below(kStarts.size()));
    now_.wall = FineInstant{Micros{start != 0 ? start : 1'700'000'000 * kSecond}};
    model_.margin_us = Micros{margin_}.count();
    for (int i = 0; i < owners_; ++i) owner_names_.push_back(MakeOwner(i));
    for (int i = 0; i < keys_ / databases_; ++i) key_names_.push_back(MakeKey(i));
    for (uint64_t& connection : connections_) connection = next_connection_++;
    subscribers_ = {{kChannels[0], 1}, {kChannels[1], Below(2)}};
    primary_ = NewServer();
    model_.process_start_us = wall_us();
    StartIssuing();
  }

  void Run(int steps) {
    for (int step = 0; step < steps && !testing::Test::HasFailure(); ++step) Step();
    if (!testing::Test::HasFailure()) EverybodyLeaves();
    if (!testing::Test::HasFailure()) return;
    for (int key = 0; key < keys_; ++key) story_ += model_.Describe(key);
    ADD_FAILURE() << story_ << "The server has\n" << primary_->Describe();
  }

 private:
  // A call whose wait is over, and which has not been answered yet.
  struct EndedWait {
    WaitEnd why;
    Ask ask;
  };

  // What was published.
  struct Message {
    Target to;
    std::string user;
    std::string key;
    std::variant<WaitAnswer, HoldLoss> what;
    size_t receivers;
    size_t answers_before;  // how many calls had been answered in this pass by then
    size_t log_size;        // and how much had been replicated
  };

  // What is checked over all answers of one pass.
  struct PassSoFar {
    int64_t last_deadline = 0;
    int turns = 0;
  };

  uint64_t Below(uint64_t bound) { return random_() % bound; }
  bool OneIn(int n) { return Below(Index(n)) == 0; }
  int64_t From1To(int64_t most) {
    return 1 + static_cast<int64_t>(Below(static_cast<uint64_t>(most)));
  }
  int Choose(std::initializer_list<int> from) { return *(from.begin() + Below(from.size())); }
  int AnyKey() { return static_cast<int>(Below(Index(keys_))); }
  int AnyOwner() { return static_cast<int>(Below(Index(owners_))); }

  int64_t wall_us() const { return now_.wall.time_since_epoch().count(); }
  int64_t now() const { return wall_us() / kMilli; }
  int64_t tick_us() const { return now_.steady.time_since_epoch().count(); }
  int64_t tick() const { return tick_us() / kMilli; }
  void Advance(int64_t micros) {
    now_.wall += Micros{micros};
    now_.steady += Micros{micros};
  }

  void Saw(std::string_view thing) {
    auto seen = coverage_.find(thing);
    if (seen == coverage_.end()) seen = coverage_.emplace(thing, 0).first;
    ++seen->second;
  }
  void SawOutcome(std::string what, const Ask& ask, Outcome outcome) {
    what += NameOf(outcome);
    if (outcome == Outcome::kGranted) {
      what += " in mode " + std::to_string(static_cast<int>(ask.mode));
    }
    Saw(what);
    if (ask.keys.size() > 1) Saw(what + ", a set");
  }
  void Tell(const std::string& what) { story_ += std::to_string(wall_us()) + ' ' + what + '\n'; }
  void Tell(const std::string& what, int64_t number) { Tell(what + " " + std::to_string(number)); }
  static void ExpectRight(const char* wrong) { EXPECT_EQ(wrong, nullptr) << wrong; }

  // --- Names. Some are hard on a protocol: no bytes, odd bytes, a keyword, the longest owner, an
  // owner that begins like another.

  static std::string MakeOwner(int number) {
    std::string name = number == 0 ? "LIMIT" : "owner-" + std::to_string(number);
    if (number % 3 == 1) name.insert(0, std::string("\0\r\n\xff", 4));
    if (number % 4 == 3) name.insert(0, kMaxOwnerBytes - name.size(), 'z');
    return name;
  }
  static std::string MakeKey(int number) {
    if (number == 1) return {};
    return number == 2 ? std::string("b\0\r\n", 4) : "key-" + std::to_string(number);
  }

  // The same names in each of the databases.
  int DbOf(int key) const { return key % databases_; }
  const std::string& NameOfKey(int key) const { return key_names_[Index(key / databases_)]; }
  int KeyOf(int db, std::string_view name) const {
    const auto found = std::find(key_names_.begin(), key_names_.end(), name);
    return static_cast<int>(found - key_names_.begin()) * databases_ + db;
  }
  Owner OwnerOf(int owner) const { return Owner{owner_names_[Index(owner)]}; }
  int NumberOf(std::string_view owner) const {
    const auto found = std::find(owner_names_.begin(), owner_names_.end(), owner);
    return found == owner_names_.end() ? kNobody : static_cast<int>(found - owner_names_.begin());
  }
  std::vector<std::string_view> NamesOf(const KeyNumbers& keys) const {
    std::vector<std::string_view> names;
    for (const int key : keys) names.emplace_back(NameOfKey(key));
    return names;
  }

  // --- A step

  void Step() {
    struct Event {
      int often;
      void (History::*happens)();
    };
    static constexpr Event kEvents[] = {
        {500, &History::Acquire},
        {170, &History::Release},
        {50, &History::Touch},
        {40, &History::Fence},
        {40, &History::CloseConnection},
        {45, &History::Cancel},
        {20, &History::ServerExpiresKeys},
        {20, &History::PlainClientSetsNx},
        {20, &History::StrangerDeletes},
        {15, &History::StrangerExpires},
        {8, &History::ServerEvicts},
        {12, &History::ChangeListeners},
        {3, &History::Flush},
        {8, &History::PauseOrGoOn},
        {2, &History::CheckCopy},
        {1, &History::ReplacePrimary},
    };
    // What only a stranger can do, by which a cycle may close that nobody can refuse.
    static constexpr Event kMischief[] = {
        {18, &History::StrangerSets}, {8, &History::Rename},        {3, &History::SwapDatabases},
        {7, &History::Restore},       {9, &History::ClockGoesBack},
    };
    PassTime();
    int dice = static_cast<int>(Below(1'000));
    for (const Event& event : kEvents) {
      if (dice >= 0 && (dice -= event.often) < 0) (this->*event.happens)();
    }
    for (const Event& event : kMischief) {
      if (strangers_ && dice >= 0 && (dice -= event.often) < 0) (this->*event.happens)();
    }
    if (OneIn(turns_one_in_)) Pass(OneIn(4) ? 1 + Below(30) : kWholePass);
    if (OneIn(4)) Sync();
    if (!testing::Test::HasFailure()) Compare();
    if (!strangers_ && OneIn(8)) {
      EXPECT_FALSE(model_.HasDeadlock(now())) << "a missed deadlock";
    }
  }

  void PassTime() {
    const uint64_t dice = Below(100);
    if (dice < 30) return Advance(static_cast<int64_t>(Below(2 * kMilli)));
    if (dice < 35) return Advance(static_cast<int64_t>(Below(50 * kMilli)));
    if (dice >= (calm_ ? 36 : 50)) return;
    // The moments at which a comparison can be wrong by one.
    const std::set<int64_t> ends = model_.Ends(now());
    int64_t due = ends.empty() ? kNever : *ends.begin();
    if (!model_.waits.empty()) due = std::min(due, model_.NextTimeOut() - tick() + now());
    if (OneIn(2)) due = std::min(due, model_.NextLoss() - 1);
    if (due > now() + 10'000) return;
    const int64_t at[] = {-1, 0, kMilli - 1, kMilli};
    Advance(std::max<int64_t>(due * kMilli + at[Below(4)] - wall_us(), 0));
  }

  // --- What is asked. Much of it is about what is there already, so that something happens.

  uint64_t AnyConnection() {
    uint64_t& connection = connections_.at(Below(connections_.size()));
    if (primary_->IsParked(connection)) connection = next_connection_++;
    return connection;
  }
  Caller CallerFor(int key) { return {.connection = AnyConnection(), .db = DbOf(key)}; }

  Mode AnyMode() {
    const int dice = static_cast<int>(Below(Index(exclusives_ + readers_ + limits_ + 1)));
    if (dice <= exclusives_) return Mode::kExclusive;
    return dice <= exclusives_ + readers_ ? Mode::kShared : Mode::kLimit;
  }

  // Of one database.
  KeyNumbers AnyKeys(int sets_one_in) {
    const int db = static_cast<int>(Below(Index(databases_)));
    KeyNumbers keys(key_names_.size());
    for (size_t i = 0; i < keys.size(); ++i) keys[i] = static_cast<int>(i) * databases_ + db;
    const size_t count = std::min(keys.size(), OneIn(sets_one_in) ? 2 + Below(3) : 1);
    for (size_t i = 0; i < count; ++i) std::swap(keys[i], keys[i + Below(keys.size() - i)]);
    keys.resize(count);
    return keys;
  }

  int64_t AnyLease() { return OneIn(100) ? kLongestLease : From1To(longest_lease_); }

  int64_t AnyFloor(const Ask& ask) {
    const ModelHold* own = model_.At(ask.keys[0]).Find(ask.owner);
    const int64_t near = own != nullptr && OneIn(2) ? own->token
                         : OneIn(2)                 ? model_.last_token
                                                    : wall_us() + model_.margin_us / 2;
    return std::clamp<int64_t>(near + From1To(5) - 3, 1, kLastToken);
  }

  Ask AnyAsk() {
    Ask ask{.keys = AnyKeys(sets_one_in_), .owner = AnyOwner(), .mode = AnyMode()};
    const uint64_t dice = Below(100);
    const ModelLock& lock = model_.At(ask.keys[0]);
    if (const auto& elsewhere = model_.At(AnyKey()).holds; calm_ && !elsewhere.empty()) {
      ask.owner = elsewhere.front().owner;  // one who holds something
    } else if (dice < 20 && !lock.holds.empty()) {
      // A holder asks again, in this mode or another.
      ask.owner = lock.holds[Below(lock.holds.size())].owner;
      if (OneIn(2)) ask.mode = lock.mode;
    } else if (dice < 20 && lock.stored == Stored::kPlain && lock.plain_owner != kNobody) {
      ask.owner = lock.plain_owner;
      for (int key = DbOf(ask.keys[0]); key < keys_; key += databases_) {
        const bool named = std::count(ask.keys.begin(), ask.keys.end(), key) > 0;
        if (!named && model_.At(key).IsPlainOf(ask.owner, now())) ask.keys.push_back(key);
      }
    } else if (dice < 35 && !model_.waits.empty()) {
      // One who waits asks again, for the same or nearly the same.
      const Ask& older = std::next(model_.waits.begin(), Any(model_.waits.size()))->second.ask;
      ask.owner = older.owner;
      ask.keys = older.keys;
      std::reverse(ask.keys.begin(), ask.keys.end());
      if (OneIn(4) && ask.keys.size() > 1) ask.keys.pop_back();
      if (!OneIn(4)) ask.mode = older.mode;
    } else if (dice < 50 && !last_sets_[Index(ask.owner)].empty()) {
      ask.keys = last_sets_[Index(ask.owner)];
    }
    ask.lease = AnyLease();
    ask.wait = OneIn(4) || (calm_ && IsCrowded(ask)) ? 0 : From1To(longest_wait_);
    if (ask.mode == Mode::kLimit) {
      ask.limit =
          OneIn(30) ? static_cast<int>(kMaxLimit) : 1 + Choose({0, 1, 2, 3, 4}) % largest_limit_;
      ask.weight = OneIn(heavy_one_in_) ? AnyWeight(ask) : 1;
      ask.limit = std::max(ask.limit, ask.weight);
    } else {
      ask.reentrant = OneIn(3);
    }
    ask.session = OneIn(4);
    ask.linger = OneIn(3) ? AnyLease() : 0;
    if (OneIn(capped_one_in_)) {
      ask.max_hold = ask.lease + (OneIn(4) ? 0 : From1To(2 * longest_lease_));
    }
    if (OneIn(5)) ask.max_line = static_cast<int>(From1To(3));
    if (OneIn(3)) ask.tag = AnyTag(ask.owner);
    if (OneIn(10)) ask.floor = AnyFloor(ask);
    ask.call = next_call_++;
    ask.named_first = ask.keys[0];
    ask.connection = AnyConnection();
    ask.may_block = !OneIn(30);
    ask.refused = OneIn(32);
    ask.user = ask.refused ? kRefusedUser : OneIn(8) ? kMuteUser : "default";
    ask.may_publish = !mute_ || ask.user != kMuteUser;
    if (OneIn(notified_one_in_)) ask.notify = AnyTarget(ask);
    return ask;
  }

  // Mostly that of its hold, if it has one.
  int AnyWeight(const Ask& ask) {
    const ModelHold* own = model_.At(ask.keys[0]).FindLive(ask.owner, now());
    if (own != nullptr && !OneIn(4)) return own->weight;
    return OneIn(4) ? ask.limit : static_cast<int>(From1To(std::min(ask.limit, 5)));
  }

  // Several owners may have the same one.
  std::string AnyTag(int owner) {
    switch (Below(4)) {
      case 0:
        return std::string(kMaxTagBytes, '~');
      case 1:
        return " WAIT";
      default:
        return "host " + std::to_string(owner) + (OneIn(2) ? "" : ", pid 1");
    }
  }

  // An id belongs to one owner, and here also to one database: it tells whose message it is.
  Target AnyTarget(const Ask& ask) {
    const auto again = model_.waits.lower_bound(static_cast<int>(Below(Index(next_call_))));
    if (again != model_.waits.end() && again->second.ask.owner == ask.owner &&
        DbOf(again->second.ask.keys[0]) == DbOf(ask.keys[0]) &&
        again->second.ask.notify.has_value() && OneIn(2)) {
      return *again->second.ask.notify;
    }
    return {OneIn(8) ? kChannels[2] : kChannels.at(Below(2)),
            "o" + std::to_string(ask.owner) + "d" + std::to_string(DbOf(ask.keys[0])) + "n" +
                std::to_string(Below(2))};
  }

  std::ptrdiff_t Any(size_t size) { return static_cast<std::ptrdiff_t>(Below(size)); }

  bool IsCrowded(const Ask& ask) const {
    return std::any_of(model_.waits.begin(), model_.waits.end(),
                       [&](const auto& wait) { return wait.second.ask.owner == ask.owner; }) ||
           std::any_of(ask.keys.begin(), ask.keys.end(),
                       [&](int key) { return !model_.At(key).line.empty(); });
  }

  // Mostly a holder.
  int AnyHolder(int key) {
    const ModelLock& lock = model_.At(key);
    if (OneIn(6)) return AnyOwner();
    if (!lock.line.empty() && OneIn(8)) return lock.line[Below(lock.line.size())]->ask.owner;
    if (lock.stored == Stored::kPlain && lock.plain_owner != kNobody) return lock.plain_owner;
    return lock.holds.empty() ? AnyOwner() : lock.holds[Below(lock.holds.size())].owner;
  }

  // --- How it is said: through the parser, keywords in any case, options in any order

  void Begin(const KeyNumbers& keys, int owner) {
    said_ = {NameOfKey(keys[0]), owner_names_[Index(owner)]};
  }
  void Say(std::string_view upper, std::string_view lower, std::optional<int64_t> number = {}) {
    said_.emplace_back(OneIn(4) ? lower : upper);
    if (number.has_value()) said_.push_back(std::to_string(*number));
  }
  void SayLease(int64_t lease) {
    const bool seconds = lease % 1'000 == 0 && OneIn(2);
    seconds ? Say("EX", "ex", lease / 1'000) : Say("PX", "px", lease);
  }
  void SayAlso(const KeyNumbers& keys) {
    if (keys.size() == 1) return;
    Say("ALSO", "also", static_cast<int64_t>(keys.size()) - 1);
    for (size_t i = 1; i < keys.size(); ++i) said_.push_back(NameOfKey(keys[i]));
  }
  void SayOption(const Ask& ask, size_t option) {
    if (option == 0) SayLease(ask.lease);
    if (option == 1 && ask.mode == Mode::kShared) Say("SHARED", "shared");
    if (option == 1 && ask.mode == Mode::kLimit) Say("LIMIT", "limit", ask.limit);
    if (option == 2 && ask.reentrant) Say("REENTRANT", "Reentrant");
    if (option == 3) SayAlso(ask.keys);
    if (option == 4 && (ask.linger > 0 || OneIn(8))) Say("LINGER", "linger", ask.linger);
    if (option == 5 && (ask.wait > 0 || ask.max_line > 0 || OneIn(8))) {
      Say("WAIT", "wait", ask.wait);
    }
    if (option == 6 && ask.session) Say("SESSION", "session");
    if (option == 7 && ask.floor > 0) Say("FLOOR", "floor", ask.floor);
    if (option == 8 && ask.mode == Mode::kLimit && (ask.weight != 1 || OneIn(4))) {
      Say("WEIGHT", "weight", ask.weight);
    }
    if (option == 9 && ask.max_hold > 0) Say("MAXHOLD", "maxHold", ask.max_hold);
    if (option == 10 && ask.max_line > 0) Say("MAXLINE", "maxline", ask.max_line);
    if (option == 11 && !ask.tag.empty()) {
      Say("TAG", "tag");
      said_.push_back(ask.tag);
    }
    if (option == 12 && ask.notify.has_value()) {
      Say("NOTIFY", "notify");
      said_.insert(said_.end(), {ask.notify->channel, ask.notify->id});
    }
  }
  Args Said(std::string text, int key) {
    for (const std::string& word : said_) text += ' ' + Unquoted(word.substr(0, 20));
    Tell(text + " in database " + std::to_string(DbOf(key)));
    views_.assign(said_.begin(), said_.end());
    return views_;
  }
  template <typename Request>
  static const Request& Understood(const Parsed<Request>& parsed) {
    static const Request kNothing{};
    const auto* request = std::get_if<Request>(&parsed);
    EXPECT_NE(request, nullptr) << std::get<ParseError>(parsed).text;
    return request == nullptr ? kNothing : *request;
  }

  // --- Clients

  void Acquire() {
    const Ask ask = AnyAsk();
    Begin(ask.keys, ask.owner);
    constexpr size_t kOptions = 13;
    const size_t first = Below(kOptions);
    for (size_t i = 0; i < kOptions; ++i) SayOption(ask, (first + i) % kOptions);
    const std::string call = std::to_string(ask.call) + " over " + std::to_string(ask.connection);
    const auto parsed = ParseAcquire(Said("acquire, call " + call + ':', ask.keys[0]), kLimits);

    std::vector<bool> has_deferred_work(Index(keys_));
    for (const auto& [key, line] : Lines()) {
      has_deferred_work[Index(key)] = line->has_deferred_work(now_.moment());
    }
    const Caller caller{.connection = ask.connection,
                        .tag = static_cast<uint64_t>(ask.call),
                        .db = DbOf(ask.keys[0]),
                        .user = ask.user,
                        .may_block = ask.may_block,
                        .in_script = !ask.may_block && !ask.session};
    const uint64_t full = primary_->engine().stats().rejected_line_full;
    const AcquireResult result =
        primary_->Acquire(caller, NamesOf(ask.keys), Understood(parsed), now_);
    const std::vector<bool> removed = FollowCommand();
    for (const int key : ask.keys) {
      if (result.kind == AcquireResult::Kind::kNotifyRefused) break;  // it has not looked
      ExpectSessionsEnded(key);
      // What was removed just now may have put off the line, if somebody there is to be tried.
      const bool decided = result.kind == AcquireResult::Kind::kGranted ||
                           result.kind == AcquireResult::Kind::kRefused;
      if (removed[Index(key)] && !decided) has_deferred_work[Index(key)] = true;
    }
    const ModelLock before = model_.At(ask.keys[0]);
    const Answer answer = model_.Acquire(ask, has_deferred_work, wall_us(), tick_us());
    NoteSituation(ask, answer, before, has_deferred_work);
    ExpectSame(result, answer);
    EXPECT_EQ(primary_->engine().stats().rejected_line_full - full, answer.line_full ? 1U : 0U);
    if (answer.reply == Reply::kToken) IsTold(ask, answer.token);
    if (answer.reply == Reply::kDeadlock) ExpectRealCycle(result.cycle, ask);
    // Its channel and id are now those of this call: nothing more is heard of waits that have
    // ended.
    if (ask.notify.has_value() &&
        (answer.reply == Reply::kToken || answer.reply == Reply::kQueued)) {
      const size_t retracted = std::erase_if(
          ended_, [&](const auto& wait) { return wait.second.ask.notify == ask.notify; });
      if (retracted > 0) Saw("the end of an older wait is not told any more");
    }
    for (const Ask& older : answer.superseded) {
      const bool same = older.keys.size() == ask.keys.size() && older.mode == ask.mode;
      // Of a wait whose channel and id are now this one's nothing is heard any more.
      if (older.notify.has_value() && older.notify == ask.notify) {
        Saw(same ? "taken over silently" : "given up silently");
        continue;
      }
      ended_.emplace(older.call, EndedWait{WaitEnd::kSuperseded, older});
      Saw(older.limit == ask.limit ? "superseded" : "superseded, with another limit");
      if (older.weight != ask.weight) Saw("superseded, with another weight");
      if (older.notify.has_value()) {
        Saw(!ask.notify.has_value()                        ? "notified, then blocked"
            : older.notify->channel != ask.notify->channel ? "superseded by another channel"
                                                           : "superseded by another id");
      } else if (ask.notify.has_value()) {
        Saw("blocked, then notified");
      }
    }
  }

  static void ExpectSame(const AcquireResult& result, const Answer& answer) {
    using Kind = AcquireResult::Kind;
    constexpr Kind kKinds[] = {Kind::kGranted,  Kind::kRefused, Kind::kBusy,         Kind::kWaits,
                               Kind::kDeadlock, Kind::kQueued,  Kind::kNotifyRefused};
    EXPECT_EQ(static_cast<int>(result.kind),
              static_cast<int>(kKinds[static_cast<size_t>(answer.reply)]))
        << "the model says " << NameOf(answer.outcome);
    EXPECT_EQ(Number(result.token), answer.token);
    if (answer.reply == Reply::kError) {
      EXPECT_EQ(result.outcome, answer.outcome);
    }
  }

  // A client was told that it holds its locks: all of them.
  void IsTold(const Ask& ask, int64_t token) {
    last_sets_[Index(ask.owner)] = ask.keys;
    witness_.Granted(ask, token, now());
    for (const int key : ask.keys) {
      const Lock* lock = primary_->FindLock(DbOf(key), NameOfKey(key));
      EXPECT_TRUE(lock != nullptr && lock->HasLive(ToToken(token), now_.moment()))
          << "granted, but not held";
    }
  }

  // Situations that must come up for the histories to be worth something.
  void NoteSituation(const Ask& ask, const Answer& answer, const ModelLock& before,
                     const std::vector<bool>& has_deferred_work) {
    constexpr const char* kReplies[] = {
        "token: ", "error: ", "null: ", "waits: ", "deadlock: ", "queued: "};
    if (answer.reply == Reply::kMayNotPublish) return Saw("may not publish");
    SawOutcome(kReplies[static_cast<size_t>(answer.reply)], ask, answer.outcome);
    NoteOptions(ask, answer, before);
    const ModelHold* own = before.Find(ask.owner);
    const bool granted = answer.reply == Reply::kToken;
    if (granted && before.IsPlainAt(now())) {
      Saw(ask.keys.size() > 1 ? "a set of strings is taken over" : "a string is taken over");
    }
    if (granted && ask.reentrant && !IsNewGrant(answer.outcome)) Saw("one count more");
    if (granted && ask.floor == answer.token) {
      Saw(IsNewGrant(answer.outcome) ? "a floor is a new token" : "a floor is a hold's new token");
    }
    if (granted && own != nullptr && own->session.has_value()) {
      Saw(ask.session ? "a session moves" : "a session becomes an ordinary hold");
    }
    if (granted && own != nullptr && own->end < now()) {
      Saw("a new token while the old hold lingers");
    }
    if (granted && IsNewGrant(answer.outcome) && !before.line.empty()) Saw("granted past a line");
    if (granted && before.holds.size() + 1 == max_holders_) Saw("the last place on the server");
    if (!granted && !before.line.empty() && has_deferred_work[Index(ask.keys[0])]) {
      Saw("a newcomer joins a line with work put off");
    }
    if ((answer.reply == Reply::kWaits || answer.reply == Reply::kQueued) &&
        answer.superseded.empty() && model_.At(ask.keys[0]).line.back()->ask.call != ask.call) {
      Saw("an upgrade enters the line before others");
    }
    if (!granted && !model_.WaitsOf(ask.owner, ask.keys).empty()) {
      if (answer.reply == Reply::kNull) Saw("one try beside one's own wait");
      if (answer.reply == Reply::kDeadlock) Saw("deadlock though an older call waits");
    }
  }

  void NoteOptions(const Ask& ask, const Answer& answer, const ModelLock& before) {
    const ModelHold* own = before.FindLive(ask.owner, now());
    const ModelHold* after = model_.At(ask.keys[0]).Find(ask.owner);
    const bool granted = answer.reply == Reply::kToken;
    const bool waits = answer.reply == Reply::kWaits || answer.reply == Reply::kQueued;
    if (ask.max_line > 0) {
      if (answer.line_full) Saw("the line is full");
      if (answer.line_full && ask.keys.size() > 1) Saw("the line is full, a set");
      if (answer.line_full && !model_.WaitsOf(ask.owner, ask.keys).empty()) {
        Saw("the line is full, and an older wait stays");
      }
      if (waits && answer.superseded.empty()) Saw("the line is not full");
      if (waits && model_.At(ask.keys[0]).line.size() > Index(ask.max_line)) {
        Saw("takes over its place in a full line");
      }
    }
    const bool lingers = own == nullptr && before.Find(ask.owner) != nullptr &&
                         before.Find(ask.owner)->KeepsOut(now());
    if (lingers && before.mode == Mode::kLimit && ask.mode == Mode::kLimit &&
        before.Find(ask.owner)->weight > ask.weight && answer.outcome == Outcome::kOthersWait) {
      Saw("a lighter request does not pass those whom its own linger keeps waiting");
    }
    if (ask.mode == Mode::kLimit && ask.weight > 1) {
      if (granted) Saw(own != nullptr ? "a heavy hold is asked for again" : "a heavy hold");
      if (granted && !before.holds.empty() && own == nullptr) Saw("a heavy hold beside others");
      if (waits) Saw("a heavy wait");
    }
    if (waits && ask.notify.has_value() && !ask.may_block) Saw("queued where nobody can block");
    if (!granted) return;
    if (after->end < now() + ask.lease) Saw("a cap cuts a lease");
    if (own != nullptr && ask.max_hold > 0 && own->cap != kNever) {
      Saw(after->cap < own->cap ? "a cap is shortened" : "a cap is not lengthened");
    }
    if (own != nullptr && after->cap < now()) Saw("a cap in the past ends the lease at once");
    if (own != nullptr && own->cap != kNever) {
      if (answer.outcome == Outcome::kUpgraded) Saw("a cap goes through an upgrade");
      if (answer.outcome == Outcome::kDowngraded) Saw("a cap goes through a downgrade");
    }
    if (own != nullptr && answer.outcome == Outcome::kUpgraded && own->since < now()) {
      Saw("an upgrade keeps the time of the first grant");
    }
    if (own != nullptr && !own->tag.empty()) {
      Saw(ask.tag.empty() ? "a tag is kept" : "a tag is replaced");
    }
    if (own == nullptr && after->notify.has_value()) Saw("a new hold is bound to a channel");
    if (own == nullptr || !own->notify.has_value()) return;
    Saw(!ask.notify.has_value()     ? "a channel stays bound"
        : ask.notify == own->notify ? "a channel is bound again"
                                    : "another channel is bound");
    if (ask.reentrant && ask.notify == own->notify) Saw("a repeated call is not counted");
    if (!ask.notify.has_value() && answer.outcome == Outcome::kUpgraded) {
      Saw("a channel stays bound through an upgrade");
    }
  }

  void Release() {
    if (!OneIn(releases_one_in_)) return;
    const KeyNumbers keys = AnyKeys(5);
    ReleaseBy(AnyHolder(keys[0]), keys);
  }

  void ReleaseBy(int owner, const KeyNumbers& keys) {
    Begin(keys, owner);
    SayAlso(keys);
    const auto parsed = ParseRelease(Said("release", keys[0]));
    const CountResult result =
        primary_->Release(CallerFor(keys[0]), NamesOf(keys), Understood(parsed).owner, now_);
    FollowCommand();

    std::vector<bool> waited(keys.size());
    for (const int call : model_.WaitsOf(owner, keys)) {
      const Ask ask = model_.Leave(call);
      for (size_t i = 0; i < keys.size(); ++i) {
        waited[i] = waited[i] || std::count(ask.keys.begin(), ask.keys.end(), keys[i]) > 0;
      }
      ended_.emplace(call, EndedWait{WaitEnd::kCancelled, ask});
      Saw(ask.notify.has_value() ? "a release ends a notified wait" : "a release ends a wait");
    }
    size_t given_up = 0;
    for (size_t i = 0; i < keys.size(); ++i) {
      ExpectSessionsEnded(keys[i], owner);
      const ModelLock before = model_.At(keys[i]);
      if (model_.Release(keys[i], owner, now(), waited[i])) ++given_up;
      const ModelHold* own = before.Find(owner);
      Saw(before.IsPlainOf(owner, now())              ? "a string is released"
          : own == nullptr                            ? "released in vain"
          : own->IsOverdue(now())                     ? "released too late"
          : !own->IsLive(now())                       ? "a release cuts the linger"
          : model_.At(keys[i]).Find(owner) == nullptr ? "released"
                                                      : "one of several counts is released");
      if (before.stored == Stored::kPlain) continue;
      const bool clear = keys.size() == 1 && !waited[i];
      witness_.HoldReleased(keys[i], owner, clear ? std::optional(result.count == 1) : std::nullopt,
                            now());
    }
    EXPECT_EQ(result.count, given_up);
  }

  void Touch() {
    const KeyNumbers keys = AnyKeys(5);
    const int owner = AnyHolder(keys[0]);
    const int64_t lease = AnyLease();
    Begin(keys, owner);
    const bool lease_first = OneIn(2);
    if (lease_first) SayLease(lease);
    SayAlso(keys);
    if (!lease_first) SayLease(lease);
    const auto parsed = ParseTouch(Said("touch", keys[0]), kLimits);
    const TouchRequest& request = Understood(parsed);
    const CountResult result =
        primary_->Touch(CallerFor(keys[0]), NamesOf(keys), request.owner, request.lease, now_);
    FollowCommand();
    size_t touched = 0;
    for (const int key : keys) {
      ExpectSessionsEnded(key, owner);
      const bool plain = model_.At(key).IsPlainAt(now());
      if (!model_.Touch(key, owner, lease, now())) continue;
      ++touched;
      Saw(plain ? "a string is touched" : "touched");
      if (plain) continue;
      if (model_.At(key).Find(owner)->end < now() + lease) Saw("a cap cuts a touch");
      witness_.Touched(key, owner, lease, now());
    }
    EXPECT_EQ(result.count, touched);
  }

  void Fence() {
    const int key = AnyKey();
    const auto& holds = model_.At(key).holds;
    const int64_t token = (holds.empty() ? witness_.highest() : holds[Below(holds.size())].token) +
                          (OneIn(3) ? 1 : 0);
    Tell("fence key", key);
    const FenceResult result =
        primary_->Fence(CallerFor(key), NameOfKey(key), ToToken(token), now_);
    FollowCommand();
    ExpectSessionsEnded(key);
    EXPECT_EQ(result.current, model_.IsCurrent(key, token, now()));
    const int64_t highest = Number(result.holds.value_or(Token{}));
    EXPECT_EQ(highest, model_.HighestToken(key, now()));
    witness_.Fenced(key, highest, now());
    Saw(result.current ? "fence: passes" : highest != 0 ? "fence: another" : "fence: free");
  }

  // --- Connections

  // That of a hold, or any.
  void CloseConnection() {
    uint64_t connection = connections_.at(Below(connections_.size()));
    for (const ModelHold& hold : model_.At(AnyKey()).holds) {
      connection = hold.session.value_or(connection);
    }
    Close(connection);
  }

  void Close(uint64_t connection) {
    Tell("closes: connection", static_cast<int64_t>(connection));
    primary_->Disconnect(connection, now_);
    closed_.insert(connection);
    LeavesFrom(connection);
    model_.Disconnect(connection);
    witness_.Disconnected(connection);
    std::replace(connections_.begin(), connections_.end(), connection, next_connection_);
    ++next_connection_;
  }

  // A call that waited there is not answered any more.
  void LeavesFrom(uint64_t connection) {
    const auto blocks = [&](const auto& wait) {
      return !wait.second.ask.notify.has_value() && wait.second.ask.connection == connection;
    };
    std::erase_if(ended_, blocks);
    const auto waits = std::find_if(model_.waits.begin(), model_.waits.end(), blocks);
    if (waits != model_.waits.end()) model_.Leave(waits->first);
  }

  // CLIENT UNBLOCK, CLIENT KILL, a closed connection, or LOCK.RELEASE where nobody is blocked: at
  // any time, from any place.
  void Cancel() {
    if (model_.waits.empty() || (calm_ && !leaving_ && !OneIn(10))) return;
    const auto waiting =
        std::next(model_.waits.begin(), Any(std::min<size_t>(model_.waits.size(), 8)));
    const Ask& ask = waiting->second.ask;
    const uint64_t connection = ask.connection;
    Saw("a wait is given up");
    if (ask.notify.has_value() && !(ask.session && OneIn(2))) {
      return ReleaseBy(ask.owner, {ask.keys[Below(ask.keys.size())]});
    }
    if (ask.notify.has_value() || OneIn(3)) return Close(connection);
    Tell("is unblocked: connection", static_cast<int64_t>(connection));
    EXPECT_TRUE(primary_->Unblock(connection, OneIn(2), now_));
    LeavesFrom(connection);
  }

  // --- Strangers, and the server itself

  void ServerExpiresKeys() {
    Tell("the server expires keys");
    primary_->ExpireCycle(now_);
    FollowCommand();
  }

  // While it may not write outside commands nothing is handed over; time runs on.
  void PauseOrGoOn() {
    primary_->may_write = !primary_->may_write;
    Tell(primary_->may_write ? "goes on" : "writes are paused");
    if (!primary_->may_write) Saw("writes are paused");
  }

  void Removed(int key, Loss how = Loss::kForced) {
    model_.LoseAll(key, how, now());
    model_.Remove(key);
    witness_.Gone(key);
  }

  void ServerEvicts() {
    const int key = AnyKey();
    // Of a string that was written in place of a lock the engine learns only the eviction, and
    // takes it for the reason why the lock is gone. Both happened.
    if (model_.At(key).stored == Stored::kPlain && !model_.untold.empty()) return;
    Tell("evicts key", key);
    const bool evicted = primary_->Evict(DbOf(key), NameOfKey(key), now_);
    if (evicted) {
      Removed(key, Loss::kEvicted);
      Saw("eviction");
    }
    FollowCommand();
  }

  // Subscribers come and go, and so does somebody's right to publish.
  void ChangeListeners() {
    if (OneIn(3)) {
      mute_ = !mute_;
    } else {
      subscribers_[kChannels.at(Below(2))] = Below(3);
    }
    Tell("listeners: " + std::to_string(subscribers_[kChannels[0]]) + " and " +
         std::to_string(subscribers_[kChannels[1]]) + (mute_ ? ", mute" : ""));
    TellListeners();
  }

  void TellListeners() {
    primary_->subscribers.clear();
    primary_->subscribers.insert(subscribers_.begin(), subscribers_.end());
    primary_->users_who_may_not_publish.clear();
    if (mute_) primary_->users_who_may_not_publish.emplace(kMuteUser);
  }

  void StrangerDeletes() {
    const int key = AnyKey();
    Tell("DEL key", key);
    const bool deleted = primary_->Delete(DbOf(key), NameOfKey(key), now_);
    FollowCommand();
    if (!deleted) return;
    Saw("DEL");
    Removed(key);
  }

  // SET key value NX PX: between a release and the hand-over it may win.
  void PlainClientSetsNx() {
    const int key = AnyKey();
    if (model_.At(key).stored == Stored::kNothing) Set(key, kNobody);
  }

  // SET, with the name of one who may wait; of one key or of several.
  void StrangerSets() {
    const int owner = AnyOwner();
    for (const int key : AnyKeys(2)) Set(key, owner);
  }

  // A value may also be nobody's name, be too long for one, or have no bytes.
  void Set(int key, int owner) {
    const std::string others[] = {"stranger", std::string(300, 'z'), ""};
    const std::string value = owner != kNobody ? owner_names_[Index(owner)] : others[Below(3)];
    const int64_t end = OneIn(3) ? kNever : now() + AnyLease();
    Tell("SET by " + std::to_string(owner) + " key", key);
    Saw(model_.At(key).stored == Stored::kLock ? "SET over a lock" : "SET");
    primary_->Set(DbOf(key), NameOfKey(key), value, ToExpiry(end), now_);
    FollowCommand();
    Removed(key);
    model_.Set(key, owner, end);
  }

  // EXPIRE, PERSIST. Of a string they change its end; of a lock nothing for long.
  void StrangerExpires() {
    const int key = AnyKey();
    const int64_t end = OneIn(3) ? kNever : now() + From1To(60) - 5;
    Tell("EXPIRE key", key);
    const bool done = primary_->Expire(DbOf(key), NameOfKey(key), ToExpiry(end), now_);
    FollowCommand();
    if (!done) return;
    if (end <= now()) return Removed(key);
    model_.At(key).expiry = end;
    foreign_ttls_.insert(NameOfKey(key));
    Saw(model_.At(key).stored == Stored::kLock ? "EXPIRE of a lock" : "EXPIRE of a string");
  }

  void Flush() {
    const std::optional<int> db = OneIn(2) ? std::nullopt : std::optional(DbOf(AnyKey()));
    Tell("flush");
    primary_->Flush(db, now_);
    Saw("flush");
    for (int key = 0; key < keys_; ++key) {
      if (DbOf(key) == db.value_or(DbOf(key))) Removed(key, Loss::kFlushed);
    }
  }

  void Rename() {
    const int from = AnyKey();
    const int to = KeyOf(DbOf(from), NameOfKey(AnyKey()));
    Tell("RENAME key " + std::to_string(from) + " to key", to);
    const bool renamed = primary_->Rename(DbOf(from), NameOfKey(from), NameOfKey(to), now_);
    FollowCommand();
    if (!renamed) return;
    for (const int key : {from, to}) model_.LoseAll(key, Loss::kForced, now());
    model_.Rename(from, to);
    foreign_ttls_.insert(NameOfKey(to));
    witness_.Gone(from);
    witness_.TakeBack(to, model_.At(to));
    Saw("RENAME");
  }

  void SwapDatabases() {
    if (databases_ == 1) return;
    Tell("SWAPDB");
    primary_->Swap(0, 1, now_);
    for (int key = 0; key < keys_; key += 2) model_.Swap(key, key + 1);
    for (int key = 0; key < keys_; ++key) witness_.TakeBack(key, model_.At(key));
    Saw("SWAPDB");
  }

  // A client restores a lock as it was once, or as it might have been elsewhere: with counts and
  // tokens that no history here comes to.
  void Restore() {
    const int key = AnyKey();
    if (model_.At(key).stored == Stored::kLock && OneIn(2)) {
      dump_ = primary_->Dump(DbOf(key), NameOfKey(key));
      dumped_ = model_.At(key);
      return;
    }
    if (dump_.empty() || OneIn(2)) MakeDump();
    const int64_t end = OneIn(2) ? dumped_.blocks_until() : now() + From1To(60);
    Tell("RESTORE key", key);
    const bool restored =
        primary_->Restore(DbOf(key), NameOfKey(key), dump_, Instant{Millis{end}}, now_);
    FollowCommand();
    if (!restored) return;
    model_.LoseAll(key, Loss::kForced, now());
    model_.Restore(key, dumped_, end);
    for (const ModelHold& hold : dumped_.holds) {
      model_.last_token = std::max(model_.last_token, hold.token);
    }
    foreign_ttls_.insert(NameOfKey(key));
    witness_.TakeBack(key, model_.At(key));
    Saw("RESTORE");
  }

  void MakeDump() {
    dumped_ = {.stored = Stored::kLock, .mode = AnyMode()};
    const int holds = dumped_.mode == Mode::kExclusive ? 1 : std::min(owners_, Choose({1, 2, 3}));
    const int first = AnyOwner();
    const int64_t token = std::clamp<int64_t>(model_.last_token + From1To(6) - 4, 2, kLastToken);
    std::vector<Hold> stored;
    for (int i = 0; i < holds; ++i) {
      dumped_.holds.push_back({.owner = (first + i) % owners_,
                               .token = OneIn(2) ? token : token - 1,
                               .since = std::max<int64_t>(now() - From1To(1'000), 0),
                               .end = std::max<int64_t>(now() + From1To(100) - 20, 0),
                               .linger = OneIn(2) ? AnyLease() : 0,
                               .count = kLargestCount - (OneIn(2) ? 1 : 0)});
      ModelHold& hold = dumped_.holds.back();
      if (dumped_.mode == Mode::kLimit) hold.weight = static_cast<int>(From1To(largest_limit_));
      if (OneIn(2)) hold.cap = std::max<int64_t>(hold.end + (OneIn(2) ? 0 : From1To(60)), 1);
      if (OneIn(2)) hold.tag = AnyTag(hold.owner);
    }
    for (const ModelHold& hold : dumped_.holds) stored.push_back(ToHold(hold));
    const std::unique_ptr<Lock> lock(Lock::Make(dumped_.mode, stored));
    dump_ = Encode(*lock);
  }

  Hold ToHold(const ModelHold& hold) const {
    return {.owner = OwnerOf(hold.owner),
            .token = ToToken(hold.token),
            .since = Instant{Millis{hold.since}},
            .end = Instant{Millis{hold.end}},
            .linger = Millis{hold.linger},
            .count = static_cast<uint32_t>(hold.count),
            .weight = static_cast<uint32_t>(hold.weight),
            .cap = ToExpiry(hold.cap),
            .tag = hold.tag};
  }

  void ClockGoesBack() {
    if (!primary_->may_write) return;
    Pass(kWholePass);
    Tell("the clock goes back");
    const int64_t step = From1To(OneIn(10) ? 5'000 : 30) * kMilli;
    now_.wall -= Micros{std::min(step, wall_us() - kMilli)};
    Pass(kWholePass);  // timers are set anew
    Saw("the clock goes back");
  }

  // --- What the engine does by itself

  // As the log tells it, up to the entry `to`. Returns from which keys something was removed.
  std::vector<bool> Follow(size_t to, bool in_pass) {
    std::vector<bool> removed(Index(keys_));
    for (; followed_ < to; ++followed_) {
      const CommandLog::Command command = primary_->log().Read(followed_);
      const auto& words = command.words;
      const std::string_view fact = words[0] == "LOCK.FACT" ? words[1] : "";
      const size_t key_at = fact.empty() ? 1 : 2;
      if (fact == kFactFloor || words.size() <= key_at) continue;
      const int key = KeyOf(command.db, words[key_at]);
      if (key >= keys_) continue;
      ModelLock& lock = model_.At(key);
      if (words[0] == "DEL" && lock.IsOver(now())) {
        const bool own_ttl = lock.stored == Stored::kLock && lock.expiry == lock.blocks_until();
        witness_.Gone(key, own_ttl ? std::optional(now()) : std::nullopt);
        // If a lease has not ended, a stranger gave the key this TTL.
        model_.LoseAll(key, Loss::kForced, now());
        model_.Remove(key);
        removed[Index(key)] = true;
        Saw("a key that is over is removed");
      } else if (fact == kFactExpired) {
        ExpectRight(model_.Expire(key, ParseDigits(words[3]).value_or(0), now()));
        witness_.HoldsExpired(key, now());
        Saw("a hold that is over is taken out");
      } else if (fact == kFactSession) {
        EndSessions(key, std::span(words).subspan(3));
        removed[Index(key)] = true;
      } else if (in_pass && words[0] == "LOCK.HELD" && lock.expiry != lock.blocks_until() &&
                 lock.Find(NumberOf(words[2])) != nullptr) {
        lock.expiry = lock.blocks_until();
        Saw("the TTL of a lock is restored");
      }
    }
    return removed;
  }
  // Before the model decides: what is removed is over, and its end decides nothing.
  std::vector<bool> FollowCommand() { return Follow(primary_->log().size(), /*in_pass=*/false); }

  void EndSessions(int key, std::span<const std::string_view> when_and_owners) {
    const int64_t at = ParseDigits(when_and_owners[0]).value_or(0);
    if (when_and_owners.size() > 2) Saw("several sessions end at once");
    for (const std::string_view owner : when_and_owners.subspan(1)) {
      ExpectRight(model_.EndSession(key, NumberOf(owner), at, now()));
      witness_.SessionEnded(key, NumberOf(owner), now());
      const bool lingers = model_.At(key).Find(NumberOf(owner)) != nullptr;
      Saw(lingers ? "a session ends, and its hold lingers" : "a session ends");
    }
  }

  void ExpectSessionsEnded(int key, std::optional<int> owner = std::nullopt) {
    ExpectRight(model_.EndedSessions(key, owner, now()));
    ExpectRight(witness_.EndedSessions(key, owner, now()));
  }

  // A pass of the event loop. What it says is looked at in the order in which it was said.
  void Pass(size_t budget) {
    primary_->Turn(now_, budget);
    const std::vector<Answered> answers = std::exchange(primary_->answered(), {});
    const std::vector<Message> messages = std::exchange(messages_, {});
    // Before anybody is granted anything: those that are not told, and are not left for later.
    TakeBackLosses([&](const ToldLoss& loss) {
      return !primary_->engine().channels().has_unpublished() &&
             std::none_of(messages.begin(), messages.end(), [&](const Message& message) {
               const auto* told = std::get_if<HoldLoss>(&message.what);
               return told != nullptr && message.to == loss.to &&
                      message.key == NameOfKey(loss.key) && Number(told->token) == loss.token;
             });
    });
    PassSoFar so_far;
    size_t answered = 0;
    for (const Message& message : messages) {
      while (answered < message.answers_before) IsAnswered(answers[answered++], so_far);
      Hears(message, so_far);
    }
    while (answered < answers.size()) IsAnswered(answers[answered++], so_far);
    if (!testing::Test::HasFailure()) Follow(primary_->log().size(), /*in_pass=*/true);
    for (const Answered& answer : answers) primary_->Replied(answer, /*delivered=*/true);
    TakeBackLosses([this](const ToldLoss& loss) {
      const Channels& channels = primary_->engine().channels();
      return !channels.has_unpublished() ||
             channels.IsBoundTo({DbOf(loss.key), NameOfKey(loss.key)}, OwnerOf(loss.owner),
                                {loss.to.channel, loss.to.id});
    });
    if (!testing::Test::HasFailure()) CheckRest(budget);
  }

  template <typename IsDealtWith>
  void TakeBackLosses(IsDealtWith is_dealt_with) {
    if (model_.TakeBackLosses(is_dealt_with, now()) == 0) return;
    for (int key = 0; key < keys_; ++key) witness_.CameBack(key, model_.At(key));
    Saw("what was lost has come back");
  }

  void IsAnswered(const Answered& answered, PassSoFar& so_far) {
    if (testing::Test::HasFailure()) return;
    Follow(answered.log_size, /*in_pass=*/true);
    const int call = static_cast<int>(answered.tag);
    const WaitAnswer& answer = answered.call->answer();
    if (const auto* why = std::get_if<WaitEnd>(&answer)) {
      Tell("has ended: call", call);
      const auto ended = ended_.extract(call);
      EXPECT_TRUE(!ended.empty() && ended.mapped().why == *why) << "call " << call;
    } else if (!model_.waits.contains(call)) {
      ADD_FAILURE() << "call " << call << " was answered before, or never waited";
    } else {
      EXPECT_FALSE(model_.waits.at(call).ask.notify.has_value()) << "notified, and answered";
      IsToldOutcome(call, answer, /*received=*/true, so_far);
    }
  }

  void IsToldOutcome(int call, const WaitAnswer& answer, bool received, PassSoFar& so_far) {
    if (std::holds_alternative<std::monostate>(answer)) {
      return TimesOut(call, so_far.last_deadline);
    }
    HasItsTurn(call, answer, received);
    if (++so_far.turns == 2) Saw("several are handed over together");
  }

  void Hears(const Message& message, PassSoFar& so_far) {
    if (testing::Test::HasFailure()) return;
    Follow(message.log_size, /*in_pass=*/true);
    Tell("publishes " + message.to.id + " to", static_cast<int64_t>(message.receivers));
    if (const auto* loss = std::get_if<HoldLoss>(&message.what)) return HearsLoss(message, *loss);
    const auto& answer = std::get<WaitAnswer>(message.what);
    if (const auto* why = std::get_if<WaitEnd>(&answer)) return HearsEnd(message, *why);
    const int call = WaitOf(message);
    if (call == 0) {
      ADD_FAILURE() << "a message that nobody waits for: " << message.to.id;
      return;
    }
    const Ask ask = model_.waits.at(call).ask;
    const auto* token = std::get_if<Token>(&answer);
    const bool received = token == nullptr || message.receivers > 0;
    // It is published, then written.
    if (token != nullptr && received) Follow(EndOfGrant(ask), /*in_pass=*/true);
    if (token != nullptr) {
      Saw(received                         ? "a grant is published"
          : mute_ && ask.user == kMuteUser ? "a grant by one who may not publish any more"
                                           : "a grant that nobody received");
    } else {
      Saw(std::holds_alternative<std::monostate>(answer) ? "a time-out is published"
                                                         : "an error is published");
    }
    IsToldOutcome(call, answer, received, so_far);
  }

  // Up to where the log tells of the grant that was just published.
  size_t EndOfGrant(const Ask& ask) {
    KeyNumbers left = ask.keys;
    for (size_t i = followed_; i < primary_->log().size(); ++i) {
      const CommandLog::Command command = primary_->log().Read(i);
      if (command.words[0] != "LOCK.HELD" || NumberOf(command.words[2]) != ask.owner) continue;
      std::erase(left, KeyOf(command.db, command.words[1]));
      if (left.empty()) return i + 1;
    }
    ADD_FAILURE() << "a grant that was received is not written";
    return followed_;
  }

  bool IsMeant(const Ask& ask, const Message& message) const {
    return ask.notify == message.to && ask.user == message.user &&
           NameOfKey(ask.named_first) == message.key;
  }

  // The call that waits to hear this, or zero.
  int WaitOf(const Message& message) const {
    for (const auto& [call, wait] : model_.waits) {
      if (IsMeant(wait.ask, message)) return call;
    }
    return 0;
  }

  void HearsEnd(const Message& message, WaitEnd why) {
    // Of one that has ended twice either may be told.
    const auto ended = std::find_if(ended_.begin(), ended_.end(), [&](const auto& wait) {
      const Ask& ask = wait.second.ask;
      const bool is_gone = ask.session && closed_.contains(ask.connection);
      const bool twice = (is_gone && why == WaitEnd::kDisconnected) ||
                         (primary_->role() == Role::kReplica && why == WaitEnd::kDemoted);
      return (wait.second.why == why || twice) && IsMeant(ask, message);
    });
    if (ended == ended_.end() && (why == WaitEnd::kDisconnected || why == WaitEnd::kDemoted)) {
      const int call = WaitOf(message);
      const bool right =
          call != 0 && (why == WaitEnd::kDisconnected ? model_.waits.at(call).gone
                                                      : primary_->role() == Role::kReplica);
      EXPECT_TRUE(right) << "a wait is ended that should not be: " << message.to.id;
      if (!right) return;
      Saw(why == WaitEnd::kDemoted ? "a demotion ends a wait" : "a wait ends with its connection");
      model_.Leave(call);
      return;
    }
    EXPECT_NE(ended, ended_.end()) << "the end of a wait is told wrongly: " << message.to.id;
    if (ended == ended_.end()) return;
    Saw(why == WaitEnd::kCancelled    ? "a release is published"
        : why == WaitEnd::kSuperseded ? "a newer call is published"
                                      : "ended twice, told once");
    ended_.erase(ended);
  }

  void HearsLoss(const Message& message, const HoldLoss& loss) {
    const ToldLoss told{message.to, message.user, 0, kNobody, Number(loss.token), loss.how};
    const char* wrong = model_.ToldOfLoss(
        told, [&](int key) { return NameOfKey(key) == message.key; }, now());
    EXPECT_EQ(wrong, nullptr) << wrong << ": " << message.to.id << " under " << Number(loss.token)
                              << ", reason " << testing::PrintToString(loss.how);
    for (int key = 0; key < keys_; ++key) {
      if (NameOfKey(key) == message.key) {
        witness_.HeardOfLoss(key, message.to, Number(loss.token));
      }
    }
    Saw("lost: " + testing::PrintToString(loss.how));
  }

  void TimesOut(int call, int64_t& last_deadline) {
    Tell("times out: call", call);
    const int64_t deadline = model_.waits.at(call).deadline;
    EXPECT_LE(deadline, tick()) << "too early";
    EXPECT_LE(last_deadline, deadline) << "not in the order of the deadlines";
    last_deadline = deadline;
    Saw(deadline == tick() ? "a time-out to the millisecond" : "a time-out");
    model_.Leave(call);
  }

  // `received`: if it is granted, somebody hears of it.
  void HasItsTurn(int call, const WaitAnswer& answer, bool received) {
    Tell("has its turn: call", call);
    const auto* token = std::get_if<Token>(&answer);
    const Ask ask = model_.waits.at(call).ask;
    EXPECT_FALSE(model_.waits.at(call).gone) << "call " << call << " has ended";
    EXPECT_TRUE(token == nullptr || model_.FindOvertaken(call, now()) == 0)
        << "call " << call << " overtakes " << model_.FindOvertaken(call, now());
    const ModelLock before = model_.At(ask.keys[0]);
    const Turn turn = model_.Try(call, received, wall_us());
    SawOutcome(turn.refused ? "refused: " : "turn: ", ask, turn.outcome);
    EXPECT_FALSE(IsBusy(turn.outcome)) << "call " << call << " has to wait";
    EXPECT_EQ(turn.refused, std::holds_alternative<std::string>(answer));
    EXPECT_EQ(turn.token, token == nullptr ? 0 : Number(*token));
    if (const auto* outcome = std::get_if<Outcome>(&answer)) {
      EXPECT_EQ(turn.outcome, *outcome);
    }
    if (turn.token == 0 || !received) return;
    IsTold(ask, turn.token);
    if (ask.session) Saw("a hold with a session is handed over");
    if (ask.session && ask.notify.has_value()) Saw("a session and a channel are handed over");
    if (ask.weight > 1) Saw("a heavy hold is handed over");
    const ModelHold* own = before.FindLive(ask.owner, now());
    if (own == nullptr || turn.outcome != Outcome::kUpgraded) return;
    if (own->since < now()) Saw("an upgrade keeps the time of the first grant");
    if (own->cap != kNever) Saw("a cap goes through an upgrade");
    if (own->notify.has_value() && !ask.notify.has_value()) {
      Saw("a channel stays bound through an upgrade");
    }
  }

  // After a pass: nothing is left that could be done, or the engine knows that there is.
  void CheckRest(size_t budget) {
    if (!primary_->may_write) return;
    const auto next = primary_->NextDue().NotBefore(Instant{Millis{now()}});
    const int64_t due = next.has_value() ? next->time_since_epoch().count() : kNever;
    if (due <= now()) {
      EXPECT_LT(budget, kWholePass) << "the loop turns for nothing";
      return Saw("a pass is cut short");
    }
    EXPECT_EQ(model_.FindLeftWaiting(now()), 0) << "it waits though nothing keeps it out";
    EXPECT_TRUE(ended_.empty()) << "somebody is not told that its wait has ended";
    EXPECT_TRUE(model_.untold.empty()) << "nobody is told on " << model_.untold.front().to.id
                                       << " that " << model_.untold.front().token << " was lost";
    EXPECT_GT(model_.NextLoss(), now()) << "nobody is told that a lease has ended";
    EXPECT_LE(due, model_.NextLoss()) << "nobody will look after a lease";
    EXPECT_EQ(primary_->engine().channels().size(), model_.CountBound()) << "another binding";
    for (const auto& [call, wait] : model_.waits) {
      EXPECT_FALSE(wait.gone) << "call " << call << " outlives its connection";
    }
    for (int key = 0; key < keys_; ++key) {
      ExpectSessionsEnded(key);
      const ModelLock& lock = model_.At(key);
      if (lock.stored != Stored::kLock || !foreign_ttls_.contains(NameOfKey(key))) continue;
      EXPECT_EQ(lock.expiry, lock.blocks_until()) << "a TTL is not restored";
    }
    foreign_ttls_.clear();
    if (model_.waits.empty()) return;
    EXPECT_GT(model_.NextTimeOut(), tick()) << "a time-out is forgotten";
    EXPECT_LE(due - now(), model_.NextTimeOut() - tick()) << "nobody will look";
    if (OneIn(4)) {
      EXPECT_LE(due, model_.NextGrant(now())) << "nobody will look";
    }
  }

  // --- Replication, copies, restarts, failovers

  std::unique_ptr<SimHost> NewServer() {
    auto server = std::make_unique<SimHost>();
    server->engine().settings().token_margin = margin_;
    server->engine().settings().max_holders = max_holders_;
    server->engine().OnStarted(now_.wall);
    server->expiry_lag = expiry_lag_;
    server->users_without_rights.emplace(kRefusedUser);
    server->on_notice = [this, host = server.get()](const Notice& notice, size_t receivers) {
      if (host != primary_.get()) return host->Fail("a replica publishes");
      messages_.push_back({.to = {std::string(notice.to.channel), std::string(notice.to.id)},
                           .user = std::string(notice.user),
                           .key = std::string(notice.key),
                           .what = notice.what,
                           .receivers = receivers,
                           .answers_before = host->answered().size(),
                           .log_size = host->log().size()});
    };
    return server;
  }

  // The replica obeys what it has not heard yet.
  void Sync() {
    for (; applied_ < primary_->log().size(); ++applied_) {
      replica_->Apply(primary_->log().Read(applied_));
    }
    EXPECT_EQ(replica_->fault(), nullptr) << replica_->fault();
    EXPECT_EQ(replica_->log().size(), applied_ - loaded_) << "not all is passed on";
    EXPECT_TRUE(replica_->HasSameData(*primary_)) << "the replica has\n" << replica_->Describe();
    if (witness_.highest() > issued_before_) {
      EXPECT_GE(Number(replica_->engine().tokens().clock().last()), witness_.highest())
          << "the replica's clock is behind";
    }
    synced_ = model_.locks;
  }

  void CheckCopy() {
    SimHost copy;
    copy.Load(primary_->Save(now_.wall));
    EXPECT_TRUE(copy.HasSameData(*primary_)) << "the copy has\n" << copy.Describe();
    Saw("a copy");
  }

  // Those who wait to be notified are told that this server is no longer a primary, each once; of
  // losses only those that happened before.
  void Demote() {
    primary_->BecomeReplica(now_);
    std::erase_if(ended_, [](const auto& wait) { return !wait.second.ask.notify.has_value(); });
    std::vector<int> blocked;
    for (const auto& [call, wait] : model_.waits) {
      if (!wait.ask.notify.has_value()) blocked.push_back(call);
    }
    for (const int call : blocked) model_.Leave(call);
    followed_ = primary_->log().size();
    primary_->Turn(now_, kWholePass);
    EXPECT_EQ(primary_->log().size(), followed_) << "written after the demotion";
    PassSoFar so_far;
    for (const Message& message : std::exchange(messages_, {})) Hears(message, so_far);
    EXPECT_TRUE(ended_.empty()) << "somebody is not told that its wait has ended";
    EXPECT_TRUE(model_.waits.empty()) << "somebody is not told of the demotion";
  }

  // A restart, with a file or with nothing; or the replica takes over, perhaps without the last
  // writes. Nobody waits any more, and no hold is bound to a connection.
  void ReplacePrimary() {
    const bool restart = OneIn(3);
    const bool loses = OneIn(2);
    const std::string what =
        std::string(restart ? "restart" : "failover") + (loses ? " with losses" : "");
    Tell(what);
    Saw(what);
    if (restart) {
      const SimHost::Copy copy = primary_->Save(now_.wall);
      primary_ = NewServer();
      model_.process_start_us = wall_us();
      if (!loses) primary_->Load(copy);
    } else {
      if (!loses) Sync();
      Demote();
      primary_ = std::move(replica_);
      model_.process_start_us = replica_start_us_;
    }
    while (!model_.waits.empty()) model_.Leave(model_.waits.begin()->first);
    ended_.clear();
    model_.untold.clear();
    foreign_ttls_.clear();  // the successor does not know of them
    for (int key = 0; key < keys_; ++key) {
      ModelLock lock = model_.At(key);
      if (loses) lock = restart ? ModelLock() : synced_[Index(key)];
      model_.Restore(key, lock, lock.expiry);
      witness_.TakeBack(key, model_.At(key));
    }
    // Tokens rise across lost data as long as their lead stays within the margin.
    const int64_t too_far = witness_.highest() - model_.margin_us - wall_us();
    if (loses && too_far > 0) {
      Advance(too_far);
      Saw("the margin just suffices");
    }
    StartIssuing();
  }

  void StartIssuing() {
    primary_->BecomePrimary();
    TellListeners();
    followed_ = primary_->log().size();
    Pass(kWholePass);
    const int64_t reading = Number(primary_->engine().tokens().clock().reading());
    const int64_t least = std::min(wall_us() + model_.margin_us, kLastToken);
    EXPECT_GE(reading, std::max(least, witness_.highest())) << "the margin is too small";
    EXPECT_LE(reading, std::max(least, model_.last_token + 3 * kSecond)) << "the lead grows";
    model_.last_token = reading;
    issued_before_ = witness_.highest();
    replica_ = NewServer();
    replica_start_us_ = wall_us();
    replica_->Load(primary_->Save(now_.wall));
    loaded_ = applied_ = primary_->log().size();
    Pass(kWholePass);  // it tells the replica where its clock stands
    Sync();
  }

  // --- Checks

  void ExpectRealCycle(const std::vector<ParkResult::Step>& cycle, const Ask& ask) {
    EXPECT_EQ(static_cast<int>(cycle.size()), model_.fewest_steps) << "not the shortest";
    // All ways to read it: several waits may have the same tag.
    std::vector<const Model::Stand*> reached;
    bool over_a_set = ask.keys.size() > 1;
    for (size_t i = 0; i < cycle.size(); ++i) {
      std::vector<const Model::Stand*> next;
      for (const Model::Stand& stand : model_.stands) {
        if (i == 0 ? stand.call != ask.call : !IsAnyBlockedBy(reached, stand.owner)) continue;
        const Ask& waits = i == 0 || stand.call == ask.call ? ask : model_.waits.at(stand.call).ask;
        const auto& before = cycle[(i + cycle.size() - 1) % cycle.size()];
        if (stand.key != KeyOf(cycle[i].db, cycle[i].key)) continue;
        if (!IsNamed(cycle[i].name, waits, KeyOf(before.db, before.key))) continue;
        next.push_back(&stand);
        over_a_set = over_a_set || waits.keys.size() > 1;
        if (!waits.tag.empty()) Saw("a cycle names a tag");
        if (waits.mode == Mode::kLimit && waits.weight > 1 && waits.weight == waits.limit &&
            model_.At(stand.key).mode == Mode::kLimit && !model_.At(stand.key).holds.empty()) {
          Saw("a cycle over one who needs all of a limit");
        }
      }
      ASSERT_FALSE(next.empty()) << "step " << i << ", " << Quoted(cycle[i].name)
                                 << ", does not wait";
      reached = next;
    }
    ASSERT_TRUE(IsAnyBlockedBy(reached, ask.owner)) << "the cycle is not closed";
    if (over_a_set) Saw("a cycle over a set");
    if (ask.mode == Mode::kExclusive &&
        model_.At(ask.keys[0]).FindLive(ask.owner, now()) != nullptr) {
      Saw("a cycle over an upgrade");
    }
    Saw("a cycle of " + std::to_string(std::min<size_t>(cycle.size(), 4)));
  }

  // The tag of the wait; if it has none, that of a hold of its owner; and the owner itself only if
  // the hold that keeps the one before waiting has no tag either.
  bool IsNamed(const std::string& name, const Ask& waits, int held) const {
    if (!waits.tag.empty()) return name == waits.tag;
    const ModelHold* hold = model_.At(held).FindLive(waits.owner, now());
    if (name == owner_names_[Index(waits.owner)]) return hold == nullptr || hold->tag.empty();
    return std::any_of(model_.locks.begin(), model_.locks.end(), [&](const ModelLock& lock) {
      const ModelHold* own = lock.FindLive(waits.owner, now());
      return own != nullptr && own->tag == name;
    });
  }

  static bool IsAnyBlockedBy(const std::vector<const Model::Stand*>& stands, int owner) {
    return std::any_of(stands.begin(), stands.end(), [owner](const Model::Stand* stand) {
      return stand->blockers.test(Index(owner));
    });
  }

  std::map<int, const WaitQueue::LockQueue*> Lines() const {
    std::map<int, const WaitQueue::LockQueue*> lines;
    for (int db = 0; db < databases_; ++db) {
      for (const auto* line : primary_->engine().queue().LongestQueues(db, Index(keys_))) {
        lines.emplace(KeyOf(db, line->lock().key), line);
      }
    }
    return lines;
  }

  // The server and the model agree on everything that can be seen.
  void Compare() {
    EXPECT_EQ(primary_->fault(), nullptr) << primary_->fault();
    size_t blocked = 0;
    size_t places = 0;
    size_t ended_places = 0;
    for (const auto& [call, wait] : model_.waits) {
      wait.ask.notify.has_value() ? places += wait.ask.keys.size() : ++blocked;
    }
    for (const auto& [call, wait] : ended_) {
      wait.ask.notify.has_value() ? ended_places += wait.ask.keys.size() : ++blocked;
    }
    EXPECT_EQ(primary_->waiting(), blocked);
    EXPECT_EQ(primary_->engine().waiting().places(), places);
    EXPECT_EQ(primary_->engine().waiting().ended_places(), ended_places);
    EXPECT_EQ(primary_->engine().queue().size(), model_.waits.size());
    EXPECT_EQ(Number(primary_->engine().tokens().clock().reading()), model_.last_token);
    const auto lines = Lines();
    for (int key = 0; key < keys_; ++key) {
      const ModelLock& lock = model_.At(key);
      const auto line = lines.find(key);
      EXPECT_TRUE(line == lines.end() ? lock.line.empty() : IsSameLine(*line->second, lock))
          << "the line of key " << key << " differs";
      EXPECT_TRUE(IsSameStored(key, lock)) << "what is stored in key " << key << " differs";
      if (lock.line.size() >= 10) Saw("a line of ten or more");
      if (lock.holds.size() >= 4) Saw("four holders or more");
      NoteLine(lock);
    }
  }

  static bool IsSameLine(const WaitQueue::LockQueue& line, const ModelLock& lock) {
    const WaitQueue::Entry* state = line.first();
    for (const ModelWait* wait : lock.line) {
      if (state == nullptr) return false;
      const Ask& ask = wait->ask;
      const AcquireRequest& request = state->waiter().request();
      const bool belongs = !ask.notify.has_value() || ask.session;  // to its connection
      if (state->waiter().client_id() != (belongs ? ask.connection : 0)) return false;
      if (state->waiter().deadline() != Tick{Millis{wait->deadline}}) return false;
      if (request.mode != ask.mode || request.limit != static_cast<uint32_t>(ask.limit) ||
          request.weight != static_cast<uint32_t>(ask.weight) || request.tag != ask.tag ||
          request.max_hold != Millis{ask.max_hold} ||
          request.notify.has_value() != ask.notify.has_value()) {
        return false;
      }
      state = state->behind();
    }
    return state == nullptr && line.size() == lock.line.size();
  }

  bool IsSameStored(int key, const ModelLock& lock) const {
    const KeyState state = primary_->StateOf(DbOf(key), NameOfKey(key));
    if ((state.lock != nullptr) != (lock.stored == Stored::kLock)) return false;
    if (state.plain.has_value() != (lock.stored == Stored::kPlain)) return false;
    if (lock.stored == Stored::kNothing) return true;
    if (primary_->ExpiryOf(DbOf(key), NameOfKey(key)) != ToExpiry(lock.expiry)) return false;
    if (state.plain.has_value()) return NumberOf(state.plain->value) == lock.plain_owner;
    return state.lock->mode() == lock.mode && state.lock->size() == lock.holds.size() &&
           std::all_of(lock.holds.begin(), lock.holds.end(), [&](const ModelHold& hold) {
             return state.lock->Find(OwnerOf(hold.owner)) == ToHold(hold) &&
                    IsSameBinding(key, hold);
           });
  }

  bool IsSameBinding(int key, const ModelHold& hold) const {
    return !hold.notify.has_value() ||
           primary_->engine().channels().IsBoundTo({DbOf(key), NameOfKey(key)}, OwnerOf(hold.owner),
                                                   {hold.notify->channel, hold.notify->id});
  }

  void NoteLine(const ModelLock& lock) {
    bool blocked = false;
    bool notified = false;
    bool heavy = false;
    for (const ModelWait* wait : lock.line) {
      (wait->ask.notify.has_value() ? notified : blocked) = true;
      if (heavy && wait->ask.mode == Mode::kLimit && wait->ask.weight == 1) {
        Saw("a heavy wait holds back a light one");
      }
      heavy = heavy || wait->ask.weight > 1;
    }
    if (blocked && notified) Saw("blocked and notified calls in one line");
  }

  // In any order; and then nothing is left.
  void EverybodyLeaves() {
    leaving_ = true;
    primary_->may_write = true;
    while (!model_.waits.empty() && !testing::Test::HasFailure()) {
      Cancel();
      if (OneIn(4)) Pass(kWholePass);
      Compare();
    }
    Pass(kWholePass);
    Sync();
    Compare();
    EXPECT_TRUE(primary_->IsQueueClean());
  }

  std::mt19937_64 random_;
  Coverage& coverage_;

  // The world of this history.
  const bool calm_;     // leases are long, and few wait behind others: cycles get long
  const bool crowded_;  // many want the same lock
  const int owners_;
  const int databases_;
  const int keys_;
  const int exclusives_;  // how often each mode is asked for
  const int readers_;
  const int limits_;
  const int largest_limit_;
  const int heavy_one_in_;  // how often weights, caps and channels are asked for
  const int capped_one_in_;
  const int notified_one_in_;
  const int sets_one_in_;
  const int64_t longest_lease_;
  const int64_t longest_wait_;
  const int releases_one_in_;
  const int turns_one_in_;
  const bool strangers_;
  const Millis margin_;
  const size_t max_holders_;
  const Millis expiry_lag_;
  std::vector<std::string> owner_names_;
  std::vector<std::string> key_names_;

  Now now_{.wall = {}, .steady = FineTick{std::chrono::hours{100}}};
  bool leaving_ = false;  // the history is over
  int next_call_ = 1;
  uint64_t next_connection_ = 1;
  std::array<uint64_t, 4> connections_{};  // that requests come over; those that wait are replaced
  std::set<uint64_t> closed_;
  std::vector<std::string> said_;
  std::vector<std::string_view> views_;
  std::string story_;

  std::map<std::string, size_t> subscribers_;  // of each channel
  bool mute_ = false;                          // kMuteUser may not publish now
  std::vector<Message> messages_;              // that nobody has looked at yet
  std::unique_ptr<SimHost> primary_;
  std::unique_ptr<SimHost> replica_;
  size_t followed_ = 0;  // of the primary's log, by the model
  size_t applied_ = 0;   // and by the replica
  size_t loaded_ = 0;    // where the replica began
  int64_t replica_start_us_ = 0;
  int64_t issued_before_ = 0;  // the highest token that another primary issued
  Model model_;
  Witness witness_;
  std::vector<ModelLock> synced_;                  // what the replica has
  std::map<int, EndedWait> ended_;                 // by call
  std::set<std::string> foreign_ttls_;             // keys whose TTL a stranger may have changed
  std::array<KeyNumbers, kMostOwners> last_sets_;  // what each owner was granted last
  std::string dump_;
  ModelLock dumped_;
};

void RunHistories(uint64_t first_seed, uint64_t histories, int steps, Coverage& coverage) {
  for (uint64_t seed = first_seed; seed < first_seed + histories; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    History(seed, coverage).Run(steps);
    if (testing::Test::HasFailure()) return;
  }
}

// Answers at once, answers to those who waited, and situations. Modes: 0 is exclusive, 1 shared, 2
// with a limit.
constexpr std::string_view kToBeSeen =
    R"(a cap cuts a lease; a cap cuts a touch; a cap goes through a downgrade;
a cap goes through an upgrade; a cap in the past ends the lease at once; a cap is not lengthened;
a cap is shortened; a channel is bound again; a channel stays bound;
a channel stays bound through an upgrade; a cycle names a tag;
a cycle over one who needs all of a limit; a demotion ends a wait;
a grant by one who may not publish any more; a grant is published; a grant that nobody received;
a heavy hold; a heavy hold beside others; a heavy hold is asked for again;
a heavy hold is handed over; a heavy wait; a heavy wait holds back a light one;
a lighter request does not pass those whom its own linger keeps waiting;
a new hold is bound to a channel; a newer call is published; a release ends a notified wait;
a release is published; a repeated call is not counted; a session and a channel are handed over;
a tag is kept; a tag is replaced; a time-out is published; a wait ends with its connection;
an error is published; an upgrade keeps the time of the first grant; another channel is bound;
blocked and notified calls in one line; blocked, then notified; error: kOtherWeight; eviction;
given up silently; lost: kEvicted; lost: kExpired; lost: kFlushed; lost: kForced; lost: kSession;
may not publish; notified, then blocked; queued where nobody can block; queued: kHeldByOther;
queued: kHeldByOther, a set; queued: kOthersWait; queued: kOthersWait, a set;
superseded by another channel; superseded by another id; superseded, with another weight;
taken over silently; takes over its place in a full line; the line is full; the line is full, a set;
the end of an older wait is not told any more; the line is full, and an older wait stays;
the line is not full; what was lost has come back;
token: kGranted in mode 0; token: kGranted in mode 0, a set; token: kGranted in mode 1;
token: kGranted in mode 1, a set; token: kGranted in mode 2; token: kGranted in mode 2, a set;
token: kHeldAlready; token: kHeldAlready, a set; token: kDowngraded; token: kDowngraded, a set;
token: kUpgraded; error: kOtherMode; error: kHoldsSome; error: kHoldsApart;
error: kUpgradesSeveral; error: kCountedOut; error: kFloorTooHigh; error: kTokensUsedUp;
null: kHeldByOther; null: kOthersWait; waits: kHeldByOther; waits: kHeldByOther, a set;
waits: kOthersWait; waits: kOthersWait, a set; deadlock: kHeldByOther; deadlock: kOthersWait;
turn: kGranted in mode 0; turn: kGranted in mode 0, a set; turn: kGranted in mode 1;
turn: kGranted in mode 1, a set; turn: kGranted in mode 2; turn: kGranted in mode 2, a set;
turn: kHeldAlready; turn: kUpgraded; turn: kHoldsSome; turn: kOtherMode; turn: kTokensUsedUp;
refused: kGranted in mode 0; refused: kGranted in mode 1; refused: kGranted in mode 2; a copy;
a cycle of 2; a cycle of 3; a cycle of 4; a cycle over a set; a cycle over an upgrade;
a floor is a hold's new token; a floor is a new token; a hold that is over is taken out;
a hold with a session is handed over; a key that is over is removed; a line of ten or more;
a new token while the old hold lingers; a newcomer joins a line with work put off;
a pass is cut short; a release cuts the linger; a release ends a wait;
a session becomes an ordinary hold; a session ends; a session ends, and its hold lingers;
a session moves; a set of strings is taken over; a string is released; a string is taken over;
a string is touched; a time-out; a time-out to the millisecond; a wait is given up;
an upgrade enters the line before others; deadlock though an older call waits; DEL;
EXPIRE of a lock; EXPIRE of a string; failover; failover with losses; fence: another;
fence: free; fence: passes; flush; four holders or more; granted past a line; one count more;
one of several counts is released; one try beside one's own wait; released; released in vain;
released too late; RENAME; restart; restart with losses; RESTORE; SET; SET over a lock;
several are handed over together; several sessions end at once; superseded;
superseded, with another limit; SWAPDB; the clock goes back; the last place on the server;
the margin just suffices; the TTL of a lock is restored; touched; writes are paused;
)";

TEST(EngineHistory, AgreesWithTheModel) {
  constexpr uint64_t kEnoughToSeeAll = 1'200;
  const char* wanted = std::getenv("TURNSTILE_HISTORIES");
  const uint64_t histories =
      wanted == nullptr ? kEnoughToSeeAll : std::strtoull(wanted, nullptr, 10);
  Coverage coverage;
  RunHistories(1, histories, 600, coverage);
  if (HasFailure() || histories < kEnoughToSeeAll) return;
  for (size_t begin = 0; begin < kToBeSeen.size();) {
    const size_t end = kToBeSeen.find(';', begin);
    const std::string_view thing = kToBeSeen.substr(begin, end - begin);
    const auto seen = coverage.find(thing);
    EXPECT_TRUE(seen != coverage.end() && seen->second >= 10) << "hardly ever seen: " << thing;
    begin = end + 2;  // past a space or the end of the line
  }
}

TEST(EngineHistoryLong, AgreesWithTheModel) {
  Coverage coverage;
  RunHistories(1'000'000, 30'000, 1'000, coverage);
}

}  // namespace
}  // namespace turnstile::sim
