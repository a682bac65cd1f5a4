// The contract of the lock commands, followed in the most straightforward way.
//
// An oracle for the engine. It shares no code with the core, only the words Mode and Outcome: holds
// and lines are plain lists, and a deadlock is whatever an explicit list of all obstacles says.
//
// In the model a moment is a number of milliseconds (of microseconds where tokens are issued), and
// keys, owners and calls are numbers.
//
// When an ended hold is taken out is the engine's choice, within the contract. The model is told of
// it and checks that the hold had ended (Expire, EndSession). Likewise with messages: each loss of
// a hold that is bound to a channel is told once, when the engine comes to it.

#ifndef TURNSTILE_TESTS_SIM_MODEL_H_
#define TURNSTILE_TESTS_SIM_MODEL_H_

#include <algorithm>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/decide.h"
#include "core/types.h"

namespace turnstile::sim {

inline constexpr int64_t kMilli = 1'000;
inline constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
inline constexpr int64_t kLastToken = (int64_t{1} << 53) - 1;
inline constexpr int64_t kLargestCount = std::numeric_limits<uint32_t>::max();
inline constexpr int kNobody = -1;  // also: a stranger who never asks for a lock
inline constexpr size_t kMostOwners = 32;

using KeyNumbers = std::vector<int>;
using Owners = std::bitset<kMostOwners>;

constexpr size_t Index(int number) { return static_cast<size_t>(number); }

constexpr bool IsBusy(Outcome outcome) {
  return outcome == Outcome::kHeldByOther || outcome == Outcome::kOthersWait;
}
// A grant under a new token, and any grant.
constexpr bool IsNewGrant(Outcome outcome) {
  return outcome == Outcome::kGranted || outcome == Outcome::kUpgraded;
}
constexpr bool IsGrant(Outcome outcome) {
  return IsNewGrant(outcome) || outcome == Outcome::kHeldAlready || outcome == Outcome::kDowngraded;
}

// What follows NOTIFY.
struct Target {
  std::string channel;
  std::string id;
  bool operator==(const Target&) const = default;
};

// A LOCK.ACQUIRE.
struct Ask {
  KeyNumbers keys{};
  int owner = 0;
  int64_t lease = 0;
  int64_t wait = 0;
  Mode mode = Mode::kExclusive;
  int limit = 1;
  int weight = 1;
  bool reentrant = false;
  bool session = false;
  int64_t linger = 0;
  int64_t max_hold = 0;  // 0: none
  int max_line = 0;      // 0: none
  std::string tag{};     // empty: none
  std::optional<Target> notify{};
  std::string user{};
  int64_t floor = 0;    // 0: none
  int call = 0;         // the number it gets if it waits
  int named_first = 0;  // the first of its keys, as it named them
  uint64_t connection = 0;
  bool may_block = true;
  bool may_publish = true;  // now
  bool refused = false;     // whether it will be when its turn comes
};

// What a call that asks for locks is answered at once.
enum class Reply { kToken, kError, kNull, kWaits, kDeadlock, kQueued, kMayNotPublish };
struct Answer {
  Reply reply = Reply::kNull;
  Outcome outcome = Outcome::kHeldByOther;
  int64_t token = 0;
  std::vector<Ask> superseded{};  // older calls of the same owner that end with this one
  bool line_full = false;         // null because of MAXLINE
};

// What a waiting call is answered when its turn comes.
struct Turn {
  Outcome outcome = Outcome::kGranted;
  bool refused = false;
  int64_t token = 0;
};

struct ModelHold {
  int owner;
  int64_t token;
  int64_t since;
  int64_t end;
  int64_t linger;
  int64_t count;
  int weight = 1;
  int64_t cap = kNever;  // its lease does not reach beyond
  std::string tag{};
  std::optional<uint64_t> session{};  // the connection that it ends with
  bool gone = false;                  // that connection has closed
  std::optional<Target> notify{};     // who is told if it is lost,
  std::string user{};                 // on whose behalf

  int64_t blocks_until() const { return end + linger; }
  bool IsLive(int64_t now) const { return now <= end && !gone; }
  bool KeepsOut(int64_t now) const { return now <= blocks_until() && !(gone && linger == 0); }
  bool IsOverdue(int64_t now) const { return now > blocks_until(); }
  // A lease from now on, as far as the cap allows.
  int64_t EndOfLease(int64_t lease, int64_t now) const {
    return std::max(std::min(now + lease, cap), now);
  }
};

// What has to be published: `lost`.
struct ToldLoss {
  Target to;
  std::string user;
  int key;
  int owner;
  int64_t token;
  Loss how;
  bool perhaps_expired = false;  // it may as well be said that the lease ended
};

// All holds of closed connections, or the owner's, should have been taken out by now. Returns what
// is wrong; null if nothing is.
inline const char* EndedSessions(std::vector<ModelHold>& holds, std::optional<int> owner,
                                 int64_t now) {
  for (ModelHold& hold : holds) {
    if (!hold.gone || (owner.has_value() && hold.owner != *owner)) continue;
    if (now <= hold.end) return "a hold outlives its connection";
    // Its lease ended first; as an ordinary hold it lives again if the clock is set back.
    hold.session.reset();
    hold.gone = false;
  }
  return nullptr;
}

struct ModelWait {
  Ask ask;
  int64_t deadline;   // by the clock that nobody can set
  bool gone = false;  // the connection that it ends with has closed: it must not be granted
};

enum class Stored { kNothing, kLock, kPlain };

struct ModelLock {
  Stored stored = Stored::kNothing;
  Mode mode = Mode::kExclusive;
  std::vector<ModelHold> holds{};  // also those that are over and that nobody has taken out yet
  int plain_owner = kNobody;
  int64_t expiry = kNever;  // when the server removes the key by itself
  std::vector<const ModelWait*> line{};

  bool IsPlainAt(int64_t now) const { return stored == Stored::kPlain && now <= expiry; }
  bool IsPlainOf(int owner, int64_t now) const { return IsPlainAt(now) && plain_owner == owner; }
  // The server may remove it.
  bool IsOver(int64_t now) const { return stored != Stored::kNothing && now > expiry; }
  const ModelHold* Find(int owner) const {
    for (const ModelHold& hold : holds) {
      if (hold.owner == owner) return &hold;
    }
    return nullptr;
  }
  const ModelHold* FindLive(int owner, int64_t now) const {
    const ModelHold* own = Find(owner);
    return own != nullptr && own->IsLive(now) ? own : nullptr;
  }
  int64_t blocks_until() const {
    int64_t last = 0;
    for (const ModelHold& hold : holds) last = std::max(last, hold.blocks_until());
    return last;
  }
};

class Model {
 public:
  Model(size_t keys, size_t most_holders) : locks(keys), max_holders(most_holders) {}

  std::vector<ModelLock> locks;
  size_t max_holders;
  std::map<int, ModelWait> waits;  // by call
  std::vector<ToldLoss> untold;    // losses that nobody has been told of yet
  int64_t last_token = 0;
  int64_t margin_us = 0;
  int64_t process_start_us = 0;

  ModelLock& At(int key) { return locks[Index(key)]; }
  const ModelLock& At(int key) const { return locks[Index(key)]; }

  // --- Commands

  // `has_deferred_work`: of which keys the lines have work that was put off. `tick_us`: the other
  // clock.
  Answer Acquire(const Ask& ask, const std::vector<bool>& has_deferred_work, int64_t now_us,
                 int64_t tick_us) {
    const int64_t now = now_us / kMilli;
    fewest_steps = 0;
    if (ask.notify.has_value() && !ask.may_publish) return {Reply::kMayNotPublish};
    const bool upgrade = IsUpgrade(ask, now);
    if (!upgrade) put_off_ = has_deferred_work;
    std::vector<size_t> ahead;
    for (const int key : ask.keys) ahead.push_back(PlaceOfNewcomer(key, upgrade));
    const Outcome outcome = WithToken(JudgeLocks(ask, ahead, now), ask, now_us);
    put_off_.clear();
    if (IsGrant(outcome)) return {Reply::kToken, outcome, Grant(ask, outcome, now_us)};
    if (!IsBusy(outcome)) return {Reply::kError, outcome};
    if (ask.wait == 0 || !(ask.may_block || ask.notify.has_value())) {
      return {Reply::kNull, outcome};
    }

    const std::vector<int> olders = WaitsOf(ask.owner, ask.keys);
    const bool takes_over = olders.size() == 1 && !waits.at(olders[0]).gone &&
                            IsForTheSame(waits.at(olders[0]).ask, ask);
    if (!takes_over && IsLineFull(ask)) {
      return {.reply = Reply::kNull, .outcome = outcome, .line_full = true};
    }
    const int64_t deadline = (tick_us + ask.wait * kMilli + kMilli - 1) / kMilli;
    ModelWait& wait = waits.emplace(ask.call, ModelWait{ask, deadline}).first->second;
    const auto exchange = [this](ModelWait& from, ModelWait& to) {
      for (const int key : from.ask.keys) At(key).line[StateOf(key, from)] = &to;
      to.ask.keys = from.ask.keys;
    };
    if (takes_over) {
      exchange(waits.at(olders[0]), wait);
    } else {
      for (size_t i = 0; i < ask.keys.size(); ++i) {
        auto& line = At(ask.keys[i]).line;
        line.insert(line.begin() + static_cast<std::ptrdiff_t>(ahead[i]), &wait);
      }
    }
    FindSteps(wait, olders, now);
    if (fewest_steps > 0) {
      if (takes_over) exchange(wait, waits.at(olders[0]));
      Leave(ask.call);
      return {Reply::kDeadlock, outcome};
    }
    Answer answer{ask.notify.has_value() ? Reply::kQueued : Reply::kWaits, outcome};
    for (const int call : olders) answer.superseded.push_back(Leave(call));
    return answer;
  }

  // Whether the owner gave up the lock; `waited`: or its wait for it, which is over already.
  bool Release(int key, int owner, int64_t now, bool waited) {
    ModelLock& lock = At(key);
    if (lock.IsPlainOf(owner, now)) {
      Remove(key);
      return true;
    }
    const ModelHold* own = lock.Find(owner);
    if (own == nullptr || !own->KeepsOut(now)) return waited;
    const bool live = own->IsLive(now);
    const bool counted = live && own->count > 1;
    if (!live) Lose(key, FindMutable(key, owner), Loss::kExpired, now);
    TakeOutOverdue(key, now);
    if (counted) {
      --FindMutable(key, owner).count;
      lock.expiry = lock.blocks_until();
    } else {
      TakeOut(key, owner);
    }
    return live || waited;
  }

  bool Touch(int key, int owner, int64_t lease, int64_t now) {
    ModelLock& lock = At(key);
    if (lock.IsPlainOf(owner, now)) {
      lock.expiry = now + lease;
      return true;
    }
    if (lock.FindLive(owner, now) == nullptr) return false;
    TakeOutOverdue(key, now);
    ModelHold& own = FindMutable(key, owner);
    own.end = own.EndOfLease(lease, now);
    lock.expiry = lock.blocks_until();
    return true;
  }

  // LOCK.FENCE: the highest token that holds the lock, or 0; and whether this one does.
  int64_t HighestToken(int key, int64_t now) const {
    int64_t highest = 0;
    for (const ModelHold& hold : At(key).holds) {
      if (hold.IsLive(now)) highest = std::max(highest, hold.token);
    }
    return highest;
  }
  bool IsCurrent(int key, int64_t token, int64_t now) const {
    const auto& holds = At(key).holds;
    return std::any_of(holds.begin(), holds.end(), [&](const ModelHold& hold) {
      return hold.token == token && hold.IsLive(now);
    });
  }

  // --- Strangers, and the server itself

  // All holds of the lock are lost. In its last millisecond nobody can tell whether the server has
  // expired the key by itself.
  void LoseAll(int key, Loss how, int64_t now) {
    const bool last = now == At(key).blocks_until();
    for (ModelHold& hold : At(key).holds) Lose(key, hold, how, now, last);
  }

  void Remove(int key) {
    At(key).stored = Stored::kNothing;
    At(key).holds.clear();
    At(key).expiry = kNever;
  }

  void Set(int key, int owner, int64_t end) {
    Remove(key);
    At(key).stored = Stored::kPlain;
    At(key).plain_owner = owner;
    At(key).expiry = end;
  }

  // What is stored moves; the lines stay.
  void Swap(int key, int other) {
    std::swap(At(key), At(other));
    std::swap(At(key).line, At(other).line);
  }

  void Rename(int from, int to) {
    Swap(from, to);
    Remove(from);
    Unbind(to);
  }

  void Restore(int key, ModelLock lock, int64_t expiry) {
    lock.line = At(key).line;
    lock.expiry = expiry;
    At(key) = lock;
    Unbind(key);
  }

  void Disconnect(uint64_t connection) {
    for (ModelLock& lock : locks) {
      for (ModelHold& hold : lock.holds) hold.gone = hold.gone || hold.session == connection;
    }
    for (auto& [call, wait] : waits) {
      const bool bound = wait.ask.notify.has_value() && wait.ask.session;
      wait.gone = wait.gone || (bound && wait.ask.connection == connection);
    }
  }

  // --- What the engine did by itself. They return what is wrong with it; null if nothing is.

  const char* Expire(int key, int64_t before, int64_t now) {
    if (before != now) return "holds are said to have ended at another time";
    return TakeOutOverdue(key, now) ? nullptr : "holds are said to have ended where none has";
  }

  const char* EndSession(int key, int owner, int64_t at, int64_t now) {
    const ModelHold* own = At(key).Find(owner);
    if (own == nullptr || !own->gone) return "a hold ends whose connection has not closed";
    if (at != now || now > own->end) return "a hold ends at another time than its session";
    Lose(key, FindMutable(key, owner), Loss::kSession, now);
    if (own->linger == 0) {
      TakeOut(key, owner);
      return nullptr;
    }
    // It ended long ago, by whatever clock, and keeps others out as long as it is to linger.
    ModelHold& hold = FindMutable(key, owner);
    hold.linger += now - 1;
    hold.end = 0;
    hold.session.reset();
    hold.gone = false;
    At(key).expiry = At(key).blocks_until();
    return nullptr;
  }

  const char* EndedSessions(int key, std::optional<int> owner, int64_t now) {
    return sim::EndedSessions(At(key).holds, owner, now);
  }

  // The message `lost` was published for a hold of a key for which `is_key` is true.
  template <typename IsKey>
  const char* ToldOfLoss(const ToldLoss& told, IsKey is_key, int64_t now) {
    const auto pending = std::find_if(untold.begin(), untold.end(), [&](const ToldLoss& loss) {
      return loss.to == told.to && loss.user == told.user && is_key(loss.key) &&
             loss.token == told.token &&
             (loss.how == told.how || (loss.perhaps_expired && told.how == Loss::kExpired));
    });
    if (pending != untold.end()) {
      untold.erase(pending);
      return nullptr;
    }
    for (int key = 0; Index(key) < locks.size(); ++key) {
      for (ModelHold& hold : At(key).holds) {
        if (!is_key(key) || hold.notify != told.to || hold.token != told.token) continue;
        if (hold.user != told.user) return "a loss is told on behalf of another user";
        if (told.how != Loss::kExpired || now <= hold.end) return "a hold is lost in another way";
        hold.notify.reset();
        return nullptr;
      }
    }
    return "a loss is told of what is not bound, or told twice";
  }

  // What was taken away by force may come back before anybody was told, under its token: then
  // nobody is told, and it is bound as before, unless it is bound anew. `is_dealt_with`: whether
  // the engine has come to that loss and said nothing. Returns how many have come back.
  template <typename IsDealtWith>
  size_t TakeBackLosses(IsDealtWith is_dealt_with, int64_t now) {
    return std::erase_if(untold, [&](const ToldLoss& loss) {
      if (loss.how != Loss::kForced && loss.how != Loss::kFlushed) return false;
      const ModelHold* own = At(loss.key).FindLive(loss.owner, now);
      if (own == nullptr || own->token != loss.token || !is_dealt_with(loss)) return false;
      if (own->notify.has_value()) return true;
      FindMutable(loss.key, loss.owner).notify = loss.to;
      FindMutable(loss.key, loss.owner).user = loss.user;
      return true;
    });
  }

  // By when all losses are told, if nothing but time passes.
  int64_t NextLoss() const {
    int64_t next = kNever;
    for (const ModelLock& lock : locks) {
      for (const ModelHold& hold : lock.holds) {
        if (hold.notify.has_value()) next = std::min(next, hold.end + 1);
      }
    }
    return next;
  }

  size_t CountBound() const {
    size_t bound = 0;
    for (const ModelLock& lock : locks) {
      bound += static_cast<size_t>(
          std::count_if(lock.holds.begin(), lock.holds.end(),
                        [](const ModelHold& hold) { return hold.notify.has_value(); }));
    }
    return bound;
  }

  // --- Waiting

  std::vector<int> WaitsOf(int owner, const KeyNumbers& keys) const {
    std::vector<int> calls;
    for (const auto& [call, wait] : waits) {
      const KeyNumbers& asked = wait.ask.keys;
      if (wait.ask.owner == owner &&
          std::find_first_of(asked.begin(), asked.end(), keys.begin(), keys.end()) != asked.end()) {
        calls.push_back(call);
      }
    }
    return calls;
  }

  // Returns what it asked for.
  Ask Leave(int call) {
    const ModelWait& wait = waits.at(call);
    for (const int key : wait.ask.keys) std::erase(At(key).line, &wait);
    return std::move(waits.extract(call).mapped().ask);
  }

  // The call is tried now. `received`: if it is granted, somebody hears of it.
  Turn Try(int call, bool received, int64_t now_us) {
    const ModelWait& wait = waits.at(call);
    Turn turn;
    turn.outcome = WithToken(JudgeWaiting(wait, now_us / kMilli), wait.ask, now_us);
    turn.refused = IsGrant(turn.outcome) && wait.ask.refused;
    if (IsGrant(turn.outcome) && !turn.refused) {
      turn.token = received ? Grant(wait.ask, turn.outcome, now_us)
                            : TokenFor(wait.ask, turn.outcome, now_us);
    }
    Leave(call);
    return turn;
  }

  // A call that stands before this one somewhere, though it could be granted; zero if none does.
  int FindOvertaken(int call, int64_t now) const {
    const ModelWait& wait = waits.at(call);
    for (const int key : wait.ask.keys) {
      for (const ModelWait* ahead : At(key).line) {
        if (ahead == &wait) break;
        if (MustBeGranted(*ahead, now)) return ahead->ask.call;
      }
    }
    return 0;
  }

  // A call that waits though nothing keeps it out, or zero.
  int FindLeftWaiting(int64_t now) const {
    for (const auto& [call, wait] : waits) {
      if (MustBeGranted(wait, now)) return call;
    }
    return 0;
  }

  // By the clock that nobody can set.
  int64_t NextTimeOut() const {
    int64_t next = kNever;
    for (const auto& [call, wait] : waits) next = std::min(next, wait.deadline);
    return next;
  }

  // When those holds end that somebody waits for.
  std::set<int64_t> Ends(int64_t now) const {
    std::set<int64_t> ends;
    for (const ModelLock& lock : locks) {
      if (lock.line.empty()) continue;
      if (lock.IsPlainAt(now) && lock.expiry != kNever) ends.insert(lock.expiry);
      for (const ModelHold& hold : lock.holds) {
        if (!hold.IsOverdue(now)) ends.insert(hold.blocks_until());
      }
    }
    return ends;
  }

  // By when somebody can be granted, if nothing but time passes.
  int64_t NextGrant(int64_t now) const {
    for (const int64_t end : Ends(now)) {
      if (FindLeftWaiting(end + 1) != 0) return end + 1;
    }
    return kNever;
  }

  // --- Deadlocks

  // Whoever waits for a lock at some place in its line, and whom it waits for there.
  struct Stand {
    int call;
    int owner;
    int key;
    Owners blockers;
  };
  // Of the last wait that was to begin: all who waited then, and how many steps lead from it back
  // to its owner, at least; zero if none do.
  std::vector<Stand> stands;
  int fewest_steps = 0;

  // Whether somebody waits for itself. Between requests with a limit nothing counts: who must be
  // alone may find more holders than when it began to wait.
  bool HasDeadlock(int64_t now) {
    MakeStands({}, now, /*lone_limits=*/false);
    return std::any_of(stands.begin(), stands.end(), [this](const Stand& stand) {
      return StepsTo(stand.owner, stand.blockers) > 0;
    });
  }

  std::string Describe(int key) const {
    const ModelLock& lock = At(key);
    const auto text = [](int64_t number) { return ' ' + std::to_string(number); };
    std::string all = "key" + text(key);
    if (lock.stored == Stored::kPlain) all += ", string of" + text(lock.plain_owner);
    if (lock.stored == Stored::kLock) all += ", mode" + text(static_cast<int>(lock.mode));
    if (lock.stored != Stored::kNothing) all += ", until" + text(lock.expiry);
    for (const ModelHold& hold : lock.holds) {
      all += "\n  owner" + text(hold.owner) + ", token" + text(hold.token) + ", since" +
             text(hold.since) + ", end" + text(hold.end) + ", linger" + text(hold.linger) +
             ", count" + text(hold.count) + ", weight" + text(hold.weight) + ", cap" +
             text(hold.cap) + ", tag " + hold.tag + (hold.gone ? ", gone" : "") +
             (hold.notify.has_value() ? ", bound to " + hold.notify->id : "");
    }
    for (const ModelWait* wait : lock.line) {
      all += "\n  call" + text(wait->ask.call) + " of owner" + text(wait->ask.owner) + ", until" +
             text(wait->deadline) + ", weight" + text(wait->ask.weight) + " of" +
             text(wait->ask.limit) +
             (wait->ask.notify.has_value() ? ", notifies " + wait->ask.notify->id : "") +
             (wait->gone ? ", gone" : "");
    }
    return all + '\n';
  }

 private:
  static bool IsForTheSame(const Ask& one, const Ask& other) {
    return one.mode == other.mode && one.keys.size() == other.keys.size() &&
           std::is_permutation(one.keys.begin(), one.keys.end(), other.keys.begin());
  }

  ModelHold& FindMutable(int key, int owner) {
    return const_cast<ModelHold&>(*At(key).Find(owner));
  }

  void Lose(int key, ModelHold& hold, Loss how, int64_t now, bool perhaps_expired = false) {
    if (!hold.notify.has_value()) return;
    if (now > hold.end) how = Loss::kExpired;
    untold.push_back({*hold.notify, hold.user, key, hold.owner, hold.token, how, perhaps_expired});
    hold.notify.reset();
  }

  void Unbind(int key) {
    for (ModelHold& hold : At(key).holds) {
      hold.session.reset();
      hold.notify.reset();
      hold.gone = false;
    }
  }

  void TakeOut(int key, int owner) {
    std::erase_if(At(key).holds, [owner](const ModelHold& hold) { return hold.owner == owner; });
    At(key).expiry = At(key).blocks_until();
    if (At(key).holds.empty()) Remove(key);
  }

  // Returns whether there was anything to take out.
  bool TakeOutOverdue(int key, int64_t now) {
    ModelLock& lock = At(key);
    for (ModelHold& hold : lock.holds) {
      if (hold.IsOverdue(now)) Lose(key, hold, Loss::kExpired, now);
    }
    const size_t taken =
        std::erase_if(lock.holds, [now](const ModelHold& hold) { return hold.IsOverdue(now); });
    if (taken == 0) return false;
    lock.expiry = lock.blocks_until();
    if (lock.holds.empty()) Remove(key);
    return true;
  }

  // --- Who gets a lock

  bool IsUpgrade(const Ask& ask, int64_t now) const {
    const ModelLock& lock = At(ask.keys[0]);
    return ask.keys.size() == 1 && ask.mode == Mode::kExclusive && lock.mode == Mode::kShared &&
           lock.FindLive(ask.owner, now) != nullptr;
  }

  // Whether MAXLINE keeps the call from joining. Its own older waits do not count: it would replace
  // them.
  bool IsLineFull(const Ask& ask) const {
    if (ask.max_line == 0) return false;
    return std::any_of(ask.keys.begin(), ask.keys.end(), [&](int key) {
      const auto& line = At(key).line;
      const auto others = std::count_if(line.begin(), line.end(), [&](const ModelWait* wait) {
        return wait->ask.owner != ask.owner;
      });
      return others >= ask.max_line;
    });
  }

  // How many stand before one that comes now.
  size_t PlaceOfNewcomer(int key, bool upgrade) const {
    const auto& line = At(key).line;
    if (!upgrade) return line.size();
    const auto blocked = std::find_if(line.begin(), line.end(), [](const ModelWait* wait) {
      return wait->ask.mode != Mode::kShared;
    });
    return static_cast<size_t>(blocked - line.begin());
  }

  size_t StateOf(int key, const ModelWait& wait) const {
    const auto& line = At(key).line;
    return static_cast<size_t>(std::find(line.begin(), line.end(), &wait) - line.begin());
  }

  // What keeps one out that stands behind so many.
  std::optional<Outcome> ObstacleOf(int key, size_t ahead, const Ask& ask, int64_t now) const {
    const ModelLock& lock = At(key);
    if (lock.IsPlainAt(now)) return Outcome::kHeldByOther;
    size_t others = 0;
    int64_t weight = 0;
    for (const ModelHold& hold : lock.holds) {
      if (hold.owner == ask.owner || !hold.KeepsOut(now)) continue;
      if (ask.mode == Mode::kExclusive || ask.mode != lock.mode) return Outcome::kHeldByOther;
      ++others;
      weight += hold.weight;
    }
    if (others >= max_holders) return Outcome::kHeldByOther;
    int least = ask.limit;
    weight += ask.weight;
    if (ask.mode == Mode::kLimit && weight > least) return Outcome::kHeldByOther;
    // Whoever keeps those ahead waiting does not pass them.
    const ModelHold* own = lock.Find(ask.owner);
    const bool keeps_them =
        own != nullptr && own->KeepsOut(now) && (lock.mode != ask.mode || own->weight > ask.weight);
    for (size_t i = 0; i < ahead; ++i) {
      const Ask& other = lock.line[i]->ask;
      if (keeps_them || ask.mode == Mode::kExclusive || ask.mode != other.mode) {
        return Outcome::kOthersWait;
      }
      least = std::min(least, other.limit);
      weight += other.weight;
    }
    if (ahead == 0) return std::nullopt;
    const bool too_many =
        ask.mode == Mode::kLimit && (weight > least || others + ahead + 1 > max_holders);
    const bool has_deferred_work = !put_off_.empty() && put_off_[Index(key)];
    return too_many || has_deferred_work ? std::optional(Outcome::kOthersWait) : std::nullopt;
  }

  // Whether the owner asks again under the channel and id that its hold is bound to.
  static bool IsBoundAlready(const Ask& ask, const ModelHold& own) {
    return ask.notify.has_value() && own.notify == ask.notify;
  }

  Outcome JudgeOne(int key, size_t ahead, const Ask& ask, int64_t now) const {
    const ModelLock& lock = At(key);
    if (lock.IsPlainOf(ask.owner, now)) return Outcome::kGranted;
    const ModelHold* own = lock.FindLive(ask.owner, now);
    if (own == nullptr) return ObstacleOf(key, ahead, ask, now).value_or(Outcome::kGranted);
    // Also if it would not be counted, because its channel and id are bound already.
    if (ask.reentrant && own->count == kLargestCount) return Outcome::kCountedOut;
    if (lock.mode == ask.mode) {
      return own->weight == ask.weight ? Outcome::kHeldAlready : Outcome::kOtherWeight;
    }
    if (lock.mode == Mode::kExclusive && ask.mode == Mode::kShared) return Outcome::kDowngraded;
    if (lock.mode != Mode::kShared || ask.mode != Mode::kExclusive) return Outcome::kOtherMode;
    return ObstacleOf(key, ahead, ask, now).value_or(Outcome::kUpgraded);
  }

  Outcome JudgeLocks(const Ask& ask, const std::vector<size_t>& ahead, int64_t now) const {
    // What the asker has already: locks, with their tokens, and strings.
    std::set<int64_t> tokens;
    size_t held = 0;
    size_t strings = 0;
    for (const int key : ask.keys) {
      if (At(key).IsPlainOf(ask.owner, now)) ++strings;
      if (const ModelHold* own = At(key).FindLive(ask.owner, now)) {
        tokens.insert(own->token);
        ++held;
      }
    }
    if (held + strings > 0 && held + strings < ask.keys.size()) return Outcome::kHoldsSome;
    if (tokens.size() > 1 || (held > 0 && strings > 0)) return Outcome::kHoldsApart;
    Outcome outcome = Outcome::kGranted;
    for (size_t i = 0; i < ask.keys.size(); ++i) {
      const bool reads = held > 0 && At(ask.keys[i]).mode == Mode::kShared;
      if (ask.keys.size() > 1 && reads && ask.mode == Mode::kExclusive) {
        return Outcome::kUpgradesSeveral;
      }
      outcome = JudgeOne(ask.keys[i], ahead[i], ask, now);
      if (!IsGrant(outcome)) return outcome;
    }
    return outcome;
  }

  Outcome JudgeWaiting(const ModelWait& wait, int64_t now) const {
    std::vector<size_t> ahead;
    for (const int key : wait.ask.keys) ahead.push_back(StateOf(key, wait));
    return JudgeLocks(wait.ask, ahead, now);
  }

  // Whether nothing keeps a waiting call out, so that it must be answered in this pass. Left out is
  // one that stands behind others whom its own hold keeps waiting: a stranger wrote its name there,
  // it made another call, or its hold lingers and is of another kind or takes the last place. And
  // one whose connection has closed, which is to end.
  bool MustBeGranted(const ModelWait& wait, int64_t now) const {
    const Ask& ask = wait.ask;
    if (wait.gone) return false;
    for (const int key : ask.keys) {
      const ModelLock& lock = At(key);
      const ModelHold* own = lock.Find(ask.owner);
      if (lock.IsPlainOf(ask.owner, now)) return false;
      if (own == nullptr || !own->KeepsOut(now)) continue;
      if (own->IsLive(now) || lock.mode != ask.mode || lock.holds.size() >= max_holders) {
        return false;
      }
    }
    return !IsBusy(JudgeWaiting(wait, now));
  }

  // What becomes of the judgement of the locks where a token is needed.
  Outcome WithToken(Outcome judged, const Ask& ask, int64_t now_us) const {
    const int64_t highest_floor =
        std::max({last_token, now_us + margin_us / 2, process_start_us + margin_us / 2 * 3});
    if (ask.floor > highest_floor) return Outcome::kFloorTooHigh;
    const bool used_up = std::max(last_token + 1, now_us) > kLastToken;
    return IsNewGrant(judged) && used_up ? Outcome::kTokensUsedUp : judged;
  }

  int64_t TokenFor(const Ask& ask, Outcome outcome, int64_t now_us) const {
    const int64_t token = IsNewGrant(outcome) ? std::max(last_token + 1, now_us)
                                              : At(ask.keys[0]).Find(ask.owner)->token;
    return std::max(token, ask.floor);
  }

  // Returns the token.
  int64_t Grant(const Ask& ask, Outcome outcome, int64_t now_us) {
    const int64_t now = now_us / kMilli;
    const int64_t token = TokenFor(ask, outcome, now_us);
    last_token = std::max(last_token, token);
    for (const int key : ask.keys) {
      ModelLock& lock = At(key);
      ModelHold hold{ask.owner, token, now, 0, ask.linger, 1, ask.weight};
      if (ask.session) hold.session = ask.connection;
      if (const ModelHold* own = lock.FindLive(ask.owner, now); own != nullptr) {
        hold.since = own->since;
        hold.count = own->count + (ask.reentrant && !IsBoundAlready(ask, *own) ? 1 : 0);
        hold.cap = own->cap;
        hold.tag = own->tag;
        hold.notify = own->notify;
        hold.user = own->user;
      }
      if (ask.max_hold > 0) hold.cap = std::min(hold.cap, hold.since + ask.max_hold);
      hold.end = hold.EndOfLease(ask.lease, now);
      if (!ask.tag.empty()) hold.tag = ask.tag;
      if (ask.notify.has_value()) {
        hold.notify = ask.notify;
        hold.user = ask.user;
      }
      for (ModelHold& other : lock.holds) {
        if (!other.IsLive(now) && (other.owner == ask.owner || other.IsOverdue(now))) {
          Lose(key, other, Loss::kExpired, now);
        }
      }
      std::erase_if(lock.holds, [&](const ModelHold& other) {
        return other.owner == ask.owner || other.IsOverdue(now);
      });
      lock.stored = Stored::kLock;
      lock.mode = ask.mode;
      lock.holds.push_back(hold);
      lock.expiry = lock.blocks_until();
    }
    return token;
  }

  // --- Deadlocks

  void MakeStands(const std::vector<int>& ignored, int64_t now, bool lone_limits) {
    stands.clear();
    const auto is_ignored = [&](const ModelWait* wait) {
      return wait->gone ||
             std::find(ignored.begin(), ignored.end(), wait->ask.call) != ignored.end();
    };
    for (const ModelLock& lock : locks) {
      const int key = static_cast<int>(&lock - locks.data());
      for (size_t state = 0; state < lock.line.size(); ++state) {
        if (is_ignored(lock.line[state])) continue;
        const Ask& ask = lock.line[state]->ask;
        Stand& stand = stands.emplace_back(Stand{ask.call, ask.owner, key, {}});
        const auto meet = [&](int other, Mode mode, bool holds) {
          if (other == ask.owner || other == kNobody) return;
          if (ask.mode == Mode::kShared && mode == Mode::kShared) return;
          const bool limits = ask.mode == Mode::kLimit && mode == Mode::kLimit;
          if (limits && !(lone_limits && holds && ask.weight == ask.limit)) return;
          stand.blockers.set(Index(other));
        };
        if (lock.IsPlainAt(now)) meet(lock.plain_owner, Mode::kExclusive, /*holds=*/true);
        for (const ModelHold& hold : lock.holds) {
          if (hold.IsLive(now)) meet(hold.owner, lock.mode, /*holds=*/true);
        }
        for (size_t i = 0; i < state; ++i) {
          const ModelWait* other = lock.line[i];
          if (!is_ignored(other)) meet(other->ask.owner, other->ask.mode, /*holds=*/false);
        }
      }
    }
  }

  // How many steps lead to `owner` at least, if these are reached in one; zero if none do.
  int StepsTo(int owner, Owners reached) const {
    for (int steps = 1;; ++steps) {
      if (reached.test(Index(owner))) return steps;
      Owners further = reached;
      for (const Stand& stand : stands) {
        if (reached.test(Index(stand.owner))) further |= stand.blockers;
      }
      if (further == reached) return 0;
      reached = further;
    }
  }

  void FindSteps(const ModelWait& wait, const std::vector<int>& ignored, int64_t now) {
    MakeStands(ignored, now, /*lone_limits=*/true);
    Owners reached;
    for (const Stand& stand : stands) {
      if (stand.call == wait.ask.call) reached |= stand.blockers;
    }
    fewest_steps = StepsTo(wait.ask.owner, reached);
  }

  std::vector<bool> put_off_;  // empty while those in line are judged
};

}  // namespace turnstile::sim

#endif  // TURNSTILE_TESTS_SIM_MODEL_H_
