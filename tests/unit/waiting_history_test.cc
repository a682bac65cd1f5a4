// Random histories of waiting, in simulated time, against a naive model.
//
// The Edge does with the core what module/redis does: it parks newcomers, wakes lines, answers
// those whose time is over and hands over what is free, sometimes only a part of it. Beside it runs
// the Model, which follows the contract in the most straightforward way and shares no code with the
// core: plain lists, and a deadlock is whatever an explicit list of all obstacles says. After every
// event both must agree on every hold of every lock and on every place in every line; whatever is
// granted must be granted to the same callers in the same order under the same tokens, and the same
// waits must be refused. Beyond the model some things are checked for themselves, on what the Edge
// stores: no writer beside anybody, no more holders than a limit allows, all of a set or nothing,
// nobody overtakes, tokens of a lock rise, everybody who waits is answered exactly once, a cycle
// that is named exists, nobody waits whom the grant rule admits, and what is due next is known.
//
// Whom to try, and which ended holds to take out on the way, is the Edge's choice; the Model checks
// each step, that tokens follow arrival within every lock, and that nobody is left who could be
// granted. Every history follows from its seed, which is printed on failure.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <ostream>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "core/deadlock.h"
#include "core/decide.h"
#include "core/lock.h"
#include "core/request.h"
#include "core/token_clock.h"
#include "core/types.h"
#include "core/wait_queue.h"

namespace turnstile {
namespace {

// In the simulation a moment is a number of milliseconds (of microseconds where tokens are issued),
// a key and an owner are numbers, and so is a waiting call.
constexpr int64_t kMilli = 1'000;
constexpr int64_t kNever = std::numeric_limits<int64_t>::max();
constexpr int kNobody = -1;  // also: a stranger who never asks for a lock
constexpr size_t kMostOwners = 32;

using KeyNumbers = std::vector<int>;
using Owners = std::bitset<kMostOwners>;

constexpr size_t Index(int number) { return static_cast<size_t>(number); }

// What a call that asks for locks is answered at once.
enum class Reply { kToken, kError, kNull, kWaits, kTookOver, kDeadlock };

struct Answer {
  Reply reply = Reply::kNull;
  Outcome outcome = Outcome::kHeldByOther;
  int64_t token = 0;
  std::vector<int> unblocked;  // older calls of the same owner that are answered now
  friend bool operator==(const Answer&, const Answer&) = default;
};

// What a waiting call is answered when its turn comes. A refused one lost its rights meanwhile.
struct Turn {
  int call = 0;
  bool refused = false;
  Outcome outcome = Outcome::kGranted;
  int64_t token = 0;
  friend bool operator==(const Turn&, const Turn&) = default;
};

// What a pass of the event loop does: it takes out the ended holds of a key, or answers a call.
struct PassStep {
  std::optional<int> pruned;
  Turn turn;
};

void PrintTo(const Answer& answer, std::ostream* out) {
  *out << "{reply " << static_cast<int>(answer.reply) << ", outcome "
       << static_cast<int>(answer.outcome) << ", token " << answer.token << ", unblocked";
  for (const int call : answer.unblocked) *out << " " << call;
  *out << "}";
}

void PrintTo(const Turn& turn, std::ostream* out) {
  *out << "{call " << turn.call << (turn.refused ? ", refused" : "") << ", outcome "
       << static_cast<int>(turn.outcome) << ", token " << turn.token << "}";
}

struct Ask {
  KeyNumbers keys;
  int owner = 0;
  int64_t lease = 0;
  int64_t wait = 0;
  Mode mode = Mode::kExclusive;
  int limit = 1;
  bool reentrant = false;
  int64_t linger = 0;
  int call = 0;          // the number it gets if it waits
  bool refused = false;  // whether it will be when its turn comes
};

bool IsBusy(Outcome outcome) {
  return outcome == Outcome::kHeldByOther || outcome == Outcome::kOthersWait;
}
bool IsGrant(Outcome outcome) {
  return outcome == Outcome::kGranted || outcome == Outcome::kHeldAlready ||
         outcome == Outcome::kDowngraded || outcome == Outcome::kUpgraded;
}

// --- The naive model --------------------------------------------------------------------------

struct ModelHold {
  int owner;
  int64_t token;
  int64_t since;
  int64_t end;
  int64_t linger;
  int64_t count;

  bool IsLive(int64_t now) const { return now <= end; }
  int64_t closes() const { return end + linger; }
  bool KeepsOut(int64_t now) const { return now <= closes(); }
};

struct ModelWait {
  Ask ask;
  int64_t deadline;  // as if the clock had never gone back
};

enum class Stored { kNothing, kLock, kPlain };

struct ModelLock {
  Stored stored = Stored::kNothing;
  Mode mode = Mode::kExclusive;
  std::vector<ModelHold> holds;  // also those that are over and that nobody has taken out yet
  int plain_owner = kNobody;
  int64_t plain_end = 0;
  std::vector<const ModelWait*> line;

  bool IsPlainFor(int64_t now) const { return stored == Stored::kPlain && now <= plain_end; }
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
  bool IsHeldBy(int owner, int64_t now) const {
    return FindLive(owner, now) != nullptr || (IsPlainFor(now) && plain_owner == owner);
  }
  bool IsHeldByOtherThan(int owner, int64_t now) const {
    if (IsPlainFor(now)) return plain_owner != owner;
    return std::any_of(holds.begin(), holds.end(), [&](const ModelHold& hold) {
      return hold.owner != owner && hold.KeepsOut(now);
    });
  }
  // There is something, and none of it keeps anybody out.
  bool IsOver(int64_t now) const {
    if (stored == Stored::kNothing) return false;
    if (stored == Stored::kPlain) return now > plain_end;
    return std::none_of(holds.begin(), holds.end(),
                        [&](const ModelHold& hold) { return hold.KeepsOut(now); });
  }
};

class Model {
 public:
  explicit Model(size_t keys) : locks(keys) {}

  std::vector<ModelLock> locks;
  std::map<int, ModelWait> waits;  // by call
  int64_t set_back = 0;            // so much the wall clock was
  int64_t last_token = 0;

  ModelLock& At(int key) { return locks[Index(key)]; }

  // --- Requests

  // `put_off`: of which keys the lines have work that was put off.
  Answer Acquire(const Ask& ask, const std::vector<bool>& put_off, int64_t now_us) {
    const int64_t now = now_us / kMilli;
    const bool upgrade = IsUpgrade(ask, now);
    newcomer_behind_put_off = upgrade ? std::vector<bool>(locks.size()) : put_off;
    std::vector<size_t> ahead;
    for (const int key : ask.keys) ahead.push_back(PlaceOfNewcomer(key, upgrade));
    const Outcome outcome = Judge(ask, ahead, now);
    newcomer_behind_put_off.clear();
    if (IsGrant(outcome)) return {Reply::kToken, outcome, Grant(ask, outcome, now_us), {}};
    if (!IsBusy(outcome)) return {Reply::kError, outcome, 0, {}};
    if (ask.wait == 0) return {Reply::kNull, outcome, 0, {}};

    const std::vector<int> olders = FindOverlapping(ask);
    ModelWait& wait =
        waits.emplace(ask.call, ModelWait{ask, now + set_back + ask.wait}).first->second;
    if (olders.size() == 1 && IsForTheSame(waits.at(olders[0]).ask, ask)) {
      ModelWait& older = waits.at(olders[0]);
      const auto exchange = [this](ModelWait& from, ModelWait& to) {
        for (const int key : from.ask.keys) At(key).line[PlaceOf(key, from)] = &to;
        to.ask.keys = from.ask.keys;
      };
      exchange(older, wait);
      fewest_steps = FewestSteps(wait, {olders[0]}, now);
      if (fewest_steps > 0) {
        exchange(wait, older);
        waits.erase(ask.call);
        return {Reply::kDeadlock, outcome, 0, {}};
      }
      waits.erase(olders[0]);
      return {Reply::kTookOver, outcome, 0, olders};
    }
    for (size_t i = 0; i < ask.keys.size(); ++i) {
      auto& line = At(ask.keys[i]).line;
      line.insert(line.begin() + static_cast<std::ptrdiff_t>(ahead[i]), &wait);
    }
    fewest_steps = FewestSteps(wait, olders, now);
    if (fewest_steps > 0) {
      Leave(ask.call);
      return {Reply::kDeadlock, outcome, 0, {}};
    }
    for (const int call : olders) Leave(call);
    return {Reply::kWaits, outcome, 0, olders};
  }

  // `ended`: the owner's waits for the key.
  Outcome Release(int key, int owner, int64_t now, const std::vector<int>& ended) {
    Ask waited_for{.keys = {key}};
    waited_for.owner = owner;
    EXPECT_EQ(FindOverlapping(waited_for), ended);
    for (const int call : ended) Leave(call);
    return ReleaseHold(key, owner, now);
  }

  Outcome ReleaseHold(int key, int owner, int64_t now) {
    ModelLock& lock = At(key);
    if (lock.IsPlainFor(now) && lock.plain_owner == owner) {
      Remove(key);
      return Outcome::kReleased;
    }
    const ModelHold* own = lock.Find(owner);
    if (own == nullptr || !own->KeepsOut(now)) return Missing(lock, owner, now);
    const bool live = own->IsLive(now);
    const bool counted = live && own->count > 1;
    TakeOutOverdue(key, now);
    if (counted) {
      --FindMutable(key, owner).count;
    } else {
      TakeOut(key, owner);
    }
    return live ? Outcome::kReleased : Outcome::kLingerCut;
  }

  Outcome Touch(int key, int owner, int64_t lease, int64_t now) {
    ModelLock& lock = At(key);
    if (lock.IsPlainFor(now) && lock.plain_owner == owner) {
      lock.plain_end = now + lease;
      return Outcome::kTouched;
    }
    if (lock.FindLive(owner, now) == nullptr) return Missing(lock, owner, now);
    TakeOutOverdue(key, now);
    FindMutable(key, owner).end = now + lease;
    return Outcome::kTouched;
  }

  Outcome SessionEnds(int key, int owner, int64_t now) {
    ModelLock& lock = At(key);
    const ModelHold* own = lock.FindLive(owner, now);
    if (own == nullptr) return Missing(lock, owner, now);
    const bool lingers = own->linger > 0;
    TakeOutOverdue(key, now);
    if (lingers) {
      // It ended long ago, by whatever clock, and keeps others out as long as before.
      ModelHold& hold = FindMutable(key, owner);
      hold.linger += now - 1;
      hold.end = 0;
    } else {
      TakeOut(key, owner);
    }
    return Outcome::kReleased;
  }

  // --- Strangers, and the server itself

  void Remove(int key) {
    At(key).stored = Stored::kNothing;
    At(key).holds.clear();
  }

  void Set(int key, int owner, int64_t end) {
    Remove(key);
    At(key).stored = Stored::kPlain;
    At(key).plain_owner = owner;
    At(key).plain_end = end;
  }

  // What is stored moves; the lines stay.
  void Rename(int from, int to) {
    ModelLock moved = At(from);
    std::swap(moved.line, At(to).line);
    At(to) = moved;
    Remove(from);
  }

  // The holds that keep nobody out go, and with the last of them the key.
  void TakeOutOverdue(int key, int64_t now) {
    ModelLock& lock = At(key);
    if (lock.IsOver(now)) {
      Remove(key);
    } else if (lock.stored == Stored::kLock) {
      std::erase_if(lock.holds, [now](const ModelHold& hold) { return !hold.KeepsOut(now); });
    }
  }

  void Leave(int call) {
    const ModelWait& wait = waits.at(call);
    for (const int key : wait.ask.keys) std::erase(At(key).line, &wait);
    waits.erase(call);
  }

  // The calls whose time is over, in the order of their numbers.
  std::vector<int> TimeOut(int64_t now) {
    std::vector<int> calls;
    for (const auto& [call, wait] : waits) {
      if (wait.deadline <= now + set_back) calls.push_back(call);
    }
    for (const int call : calls) Leave(call);
    return calls;
  }

  // --- Handing over

  // What the call is answered if it is tried now.
  Turn Try(int call, int64_t now_us) {
    const Ask ask = waits.at(call).ask;
    const Outcome outcome = JudgeWaiting(waits.at(call), now_us / kMilli);
    const bool refused = IsGrant(outcome) && ask.refused;
    const int64_t token = IsGrant(outcome) && !refused ? Grant(ask, outcome, now_us) : 0;
    Leave(call);
    return {call, refused, outcome, token};
  }

  // A call that waits though nothing keeps it out, or zero. Left out is one that stands behind
  // others whom its own hold keeps waiting: a stranger wrote its name there, it made another call,
  // or its hold of another kind lingers.
  int FindLeftWaiting(int64_t now) {
    for (const auto& [call, wait] : waits) {
      const Ask& ask = wait.ask;
      const bool holds = std::any_of(ask.keys.begin(), ask.keys.end(), [&](int key) {
        const ModelHold* own = At(key).Find(ask.owner);
        return At(key).IsHeldBy(ask.owner, now) ||
               (own != nullptr && own->KeepsOut(now) && At(key).mode != ask.mode);
      });
      if (!holds && !IsBusy(JudgeWaiting(wait, now))) return call;
    }
    return 0;
  }

  int64_t NextDue(int64_t now) const {
    int64_t due = kNever;
    for (const int64_t end : Ends(now)) due = std::min(due, end + 1);
    return std::min(due, NextTimeOut());
  }

  int64_t NextTimeOut() const {
    int64_t due = kNever;
    for (const auto& [call, wait] : waits) due = std::min(due, wait.deadline - set_back);
    return due;
  }

  // By when somebody can be granted, if nothing but time passes.
  int64_t NextGrant(int64_t now) {
    std::vector<int64_t> ends = Ends(now);
    std::sort(ends.begin(), ends.end());
    for (const int64_t end : ends) {
      if (FindLeftWaiting(end + 1) != 0) return end + 1;
    }
    return kNever;
  }

  // --- Deadlocks

  int fewest_steps = 0;  // of the last wait that began

  // Whoever waits for a lock at some place in its line, and whom it waits for there.
  struct Stand {
    int call;
    int owner;
    int key;
    Owners blockers;
  };
  // For the last wait that was refused.
  std::vector<Stand> stands;

  // Whether somebody waits for itself. Between requests with a limit nothing counts: who must be
  // alone may find more holders than when it began to wait.
  bool HasDeadlock(int64_t now) {
    MakeStands({}, now, /*lone_limits=*/false);
    for (const Stand& stand : stands) {
      if (ReachableFrom(stand.blockers).test(Index(stand.owner))) return true;
    }
    return false;
  }

 private:
  static bool IsForTheSame(const Ask& one, const Ask& other) {
    return one.mode == other.mode && one.keys.size() == other.keys.size() &&
           std::is_permutation(one.keys.begin(), one.keys.end(), other.keys.begin());
  }

  std::vector<int> FindOverlapping(const Ask& ask) const {
    std::vector<int> calls;
    for (const auto& [call, wait] : waits) {
      if (wait.ask.owner == ask.owner &&
          std::find_first_of(wait.ask.keys.begin(), wait.ask.keys.end(), ask.keys.begin(),
                             ask.keys.end()) != wait.ask.keys.end()) {
        calls.push_back(call);
      }
    }
    return calls;
  }

  bool IsUpgrade(const Ask& ask, int64_t now) {
    const ModelLock& lock = At(ask.keys[0]);
    return ask.keys.size() == 1 && ask.mode == Mode::kExclusive && lock.mode == Mode::kShared &&
           lock.FindLive(ask.owner, now) != nullptr;
  }

  // How many stand before one that comes now.
  size_t PlaceOfNewcomer(int key, bool upgrade) {
    const auto& line = At(key).line;
    if (!upgrade) return line.size();
    const auto blocked = std::find_if(line.begin(), line.end(), [](const ModelWait* wait) {
      return wait->ask.mode != Mode::kShared;
    });
    return static_cast<size_t>(blocked - line.begin());
  }

  size_t PlaceOf(int key, const ModelWait& wait) {
    const auto& line = At(key).line;
    return static_cast<size_t>(std::find(line.begin(), line.end(), &wait) - line.begin());
  }

  // What keeps one out that stands behind so many.
  std::optional<Outcome> ObstacleOf(int key, size_t ahead, const Ask& ask, int64_t now) {
    const ModelLock& lock = At(key);
    if (lock.IsPlainFor(now) && lock.plain_owner != ask.owner) return Outcome::kHeldByOther;
    int others = 0;
    for (const ModelHold& hold : lock.holds) {
      if (hold.owner == ask.owner || !hold.KeepsOut(now)) continue;
      if (ask.mode == Mode::kExclusive || ask.mode != lock.mode) return Outcome::kHeldByOther;
      ++others;
    }
    if (ask.mode == Mode::kLimit && others >= ask.limit) return Outcome::kHeldByOther;
    int least = ask.limit;
    const ModelHold* own = lock.Find(ask.owner);
    const bool keeps_them =
        own != nullptr && own->KeepsOut(now) && lock.mode != ask.mode && !lock.IsPlainFor(now);
    for (size_t i = 0; i < ahead; ++i) {
      const Ask& other = lock.line[i]->ask;
      if (keeps_them) return Outcome::kOthersWait;
      if (ask.mode == Mode::kExclusive || ask.mode != other.mode) return Outcome::kOthersWait;
      least = std::min(least, other.limit);
    }
    if (ahead > 0 && !newcomer_behind_put_off.empty() && newcomer_behind_put_off[Index(key)]) {
      return Outcome::kOthersWait;
    }
    const int together = others + static_cast<int>(ahead) + 1;
    if (ask.mode == Mode::kLimit && together > least) return Outcome::kOthersWait;
    return std::nullopt;
  }

  Outcome JudgeOne(int key, size_t ahead, const Ask& ask, int64_t now) {
    const ModelLock& lock = At(key);
    if (lock.IsPlainFor(now) && lock.plain_owner == ask.owner) return Outcome::kGranted;
    const bool held = lock.FindLive(ask.owner, now) != nullptr;
    if (held && lock.mode == ask.mode) return Outcome::kHeldAlready;
    if (held && lock.mode == Mode::kExclusive && ask.mode == Mode::kShared) {
      return Outcome::kDowngraded;
    }
    const bool upgrade = held && lock.mode == Mode::kShared && ask.mode == Mode::kExclusive;
    if (held && !upgrade) return Outcome::kOtherMode;
    return ObstacleOf(key, ahead, ask, now)
        .value_or(upgrade ? Outcome::kUpgraded : Outcome::kGranted);
  }

  Outcome Judge(const Ask& ask, const std::vector<size_t>& ahead, int64_t now) {
    size_t plain = 0;
    std::vector<int64_t> tokens;
    for (const int key : ask.keys) {
      const ModelLock& lock = At(key);
      if (lock.IsPlainFor(now) && lock.plain_owner == ask.owner) ++plain;
      if (const auto* own = lock.FindLive(ask.owner, now)) tokens.push_back(own->token);
    }
    const size_t held = plain + tokens.size();
    if (held > 0 && held < ask.keys.size()) return Outcome::kHoldsSome;
    const bool one_token =
        std::count(tokens.begin(), tokens.end(), tokens.empty() ? 0 : tokens[0]) ==
        static_cast<std::ptrdiff_t>(tokens.size());
    if (!one_token || (plain > 0 && !tokens.empty())) return Outcome::kHoldsApart;
    Outcome outcome = Outcome::kGranted;
    for (size_t i = 0; i < ask.keys.size(); ++i) {
      const bool reads = !tokens.empty() && At(ask.keys[i]).mode == Mode::kShared;
      if (ask.keys.size() > 1 && reads && ask.mode == Mode::kExclusive) {
        return Outcome::kUpgradesSeveral;
      }
      outcome = JudgeOne(ask.keys[i], ahead[i], ask, now);
      if (!IsGrant(outcome)) return outcome;
    }
    return outcome;
  }

  Outcome JudgeWaiting(const ModelWait& wait, int64_t now) {
    std::vector<size_t> ahead;
    for (const int key : wait.ask.keys) ahead.push_back(PlaceOf(key, wait));
    return Judge(wait.ask, ahead, now);
  }

  // Returns the token.
  int64_t Grant(const Ask& ask, Outcome outcome, int64_t now_us) {
    const int64_t now = now_us / kMilli;
    const bool fresh = outcome == Outcome::kGranted || outcome == Outcome::kUpgraded;
    if (fresh) last_token = std::max(last_token + 1, now_us);
    const int64_t token = fresh ? last_token : At(ask.keys[0]).Find(ask.owner)->token;
    for (const int key : ask.keys) {
      ModelLock& lock = At(key);
      ModelHold hold{ask.owner, token, now, now + ask.lease, ask.linger, 1};
      if (const ModelHold* own = lock.FindLive(ask.owner, now); own != nullptr) {
        if (!fresh) hold.since = own->since;
        hold.count = own->count + (ask.reentrant ? 1 : 0);
      }
      std::erase_if(lock.holds, [&](const ModelHold& other) {
        return other.owner == ask.owner || !other.KeepsOut(now);
      });
      lock.stored = Stored::kLock;
      lock.mode = ask.mode;
      lock.holds.push_back(hold);
    }
    return token;
  }

  Outcome Missing(const ModelLock& lock, int owner, int64_t now) {
    if (lock.IsHeldByOtherThan(owner, now)) return Outcome::kHeldByOther;
    return lock.Find(owner) != nullptr ? Outcome::kLeaseEnded : Outcome::kFree;
  }

  ModelHold& FindMutable(int key, int owner) {
    return const_cast<ModelHold&>(*At(key).Find(owner));
  }

  void TakeOut(int key, int owner) {
    std::erase_if(At(key).holds, [owner](const ModelHold& hold) { return hold.owner == owner; });
    if (At(key).holds.empty()) Remove(key);
  }

  // --- Deadlocks

  std::vector<int64_t> Ends(int64_t now) const {
    std::vector<int64_t> ends;
    for (const ModelLock& lock : locks) {
      if (lock.line.empty()) continue;
      if (lock.IsPlainFor(now) && lock.plain_end != kNever) ends.push_back(lock.plain_end);
      for (const ModelHold& hold : lock.holds) {
        if (hold.KeepsOut(now)) ends.push_back(hold.closes());
      }
    }
    return ends;
  }

  void MakeStands(const std::vector<int>& ignored, int64_t now, bool lone_limits = true) {
    stands.clear();
    const auto is_ignored = [&](const ModelWait* wait) {
      return std::find(ignored.begin(), ignored.end(), wait->ask.call) != ignored.end();
    };
    for (const ModelLock& lock : locks) {
      const int key = static_cast<int>(&lock - locks.data());
      for (size_t place = 0; place < lock.line.size(); ++place) {
        if (is_ignored(lock.line[place])) continue;
        const Ask& ask = lock.line[place]->ask;
        Stand& stand = stands.emplace_back(Stand{ask.call, ask.owner, key, {}});
        const auto meet = [&](int other, Mode mode, bool holds) {
          if (other == ask.owner || other == kNobody) return;
          if (ask.mode == Mode::kShared && mode == Mode::kShared) return;
          const bool limits = ask.mode == Mode::kLimit && mode == Mode::kLimit;
          if (limits && !(lone_limits && holds && ask.limit == 1)) return;
          stand.blockers.set(Index(other));
        };
        if (lock.IsPlainFor(now)) meet(lock.plain_owner, Mode::kExclusive, true);
        for (const ModelHold& hold : lock.holds) {
          if (hold.IsLive(now)) meet(hold.owner, lock.mode, true);
        }
        for (size_t i = 0; i < place; ++i) {
          const ModelWait* other = lock.line[i];
          if (!is_ignored(other)) meet(other->ask.owner, other->ask.mode, false);
        }
      }
    }
  }

  // Those, and whom they wait for, and so on.
  Owners ReachableFrom(Owners reached) const {
    for (;;) {
      const Owners further = OneStepFurther(reached);
      if (further == reached) return reached;
      reached = further;
    }
  }

  Owners OneStepFurther(const Owners& reached) const {
    Owners further = reached;
    for (const Stand& stand : stands) {
      if (reached.test(Index(stand.owner))) further |= stand.blockers;
    }
    return further;
  }

  // How many steps lead from this wait back to its owner, at least; zero if none do.
  int FewestSteps(const ModelWait& wait, const std::vector<int>& ignored, int64_t now) {
    MakeStands(ignored, now);
    Owners reached;
    for (const Stand& stand : stands) {
      if (stand.call == wait.ask.call) reached |= stand.blockers;
    }
    for (int steps = 1;; ++steps) {
      if (reached.test(Index(wait.ask.owner))) return steps;
      const Owners further = OneStepFurther(reached);
      if (further == reached) return 0;
      reached = further;
    }
  }

  std::vector<bool> newcomer_behind_put_off;  // empty while those in line are judged
};

// --- The edge: a few keys, and the core -------------------------------------------------------

Instant ToMoment(int64_t ms) { return ms == kNever ? kMaxInstant : Instant{Millis{ms}}; }
int64_t FromMoment(Instant moment) {
  return moment == kMaxInstant ? kNever : moment.time_since_epoch().count();
}

class Edge {
 public:
  struct Parked : WaitQueue::Waiter {
    Parked(const Ask& ask, const AcquireRequest& request, Tick now)
        : Waiter(request, now, now + request.wait), asked(ask), arrival(ask.call) {}
    Ask asked;
    int arrival;               // of the place: a call that takes it over inherits it
    bool was_upgrade = false;  // it stands before some who came before it
  };

  struct Slot {
    std::unique_ptr<Lock> lock;
    std::optional<std::string> plain;
    Instant plain_end;
  };

  // The same texts in each of the databases.
  Edge(int keys, int databases, std::vector<std::string> owners)
      : slots(Index(keys)), highest(Index(keys)), owners_(std::move(owners)) {
    for (int key = 0; key < keys; ++key) {
      key_texts_.push_back("key-" + std::to_string(key / databases));
      databases_.push_back(key % databases);
    }
  }

  WaitQueue queue;
  Millis set_back{0};  // so much the wall clock was
  TokenClock clock;
  std::vector<Slot> slots;
  std::vector<Token> highest;  // ever granted, by key
  std::unordered_map<int, std::unique_ptr<Parked>> parked;

  LockName NameOf(int key) const { return {databases_[Index(key)], key_texts_[Index(key)]}; }
  int KeyOf(LockName lock) const {
    for (int key = 0; key < static_cast<int>(slots.size()); ++key) {
      if (NameOf(key) == lock) return key;
    }
    return -1;
  }
  Owner OwnerOf(int owner) const { return Owner{owners_[Index(owner)]}; }
  int NumberOf(Owner owner) const {
    const auto found = std::find(owners_.begin(), owners_.end(), owner.bytes);
    return found == owners_.end() ? kNobody : static_cast<int>(found - owners_.begin());
  }

  Slot& SlotOf(int key) { return slots[Index(key)]; }

  Place PlaceOf(int key) const {
    const Slot& slot = slots[Index(key)];
    if (slot.plain.has_value()) {
      return {.lock = nullptr, .plain = PlainLock{.value = *slot.plain, .end = slot.plain_end}};
    }
    return {.lock = slot.lock.get(), .plain = std::nullopt};
  }

  // Of which keys the lines have work that was put off.
  std::vector<bool> PutOff(Instant now) {
    std::vector<bool> put_off;
    for (int key = 0; key < static_cast<int>(slots.size()); ++key) {
      const WaitQueue::Line* line = queue.Find(NameOf(key));
      put_off.push_back(line != nullptr && line->put_off(now));
    }
    return put_off;
  }

  // `cycle` is what was found if the reply is kDeadlock: the names in it are copied.
  struct NamedStep {
    int owner;
    int key;
  };
  Answer Acquire(const Ask& ask, FineInstant fine_now, std::vector<NamedStep>& cycle) {
    const Instant now = ToInstant(fine_now);
    const AcquireRequest request{.owner = OwnerOf(ask.owner),
                                 .lease = Millis{ask.lease},
                                 .wait = Millis{ask.wait},
                                 .mode = ask.mode,
                                 .limit = static_cast<uint32_t>(ask.limit),
                                 .reentrant = ask.reentrant,
                                 .linger = Millis{ask.linger}};
    const bool upgrade = ask.keys.size() == 1 && IsUpgrade(PlaceOf(ask.keys[0]), request, now);
    std::vector<LockName> locks;
    std::vector<Site> sites;
    for (const int key : ask.keys) {
      locks.push_back(NameOf(key));
      const WaitQueue::Line* line = queue.Find(locks.back());
      sites.push_back({PlaceOf(key), line == nullptr ? Crowd{} : line->Ahead(upgrade, now)});
    }
    const Admission admission = Decide(sites, request, fine_now, clock);
    if (admission.granted()) {
      ExpectSafe(ask, admission, nullptr, now);
      const int64_t token = Grant(ask.keys, request, admission, now);
      return {Reply::kToken, admission.outcome, token, {}};
    }
    if (!admission.busy()) return {Reply::kError, admission.outcome, 0, {}};
    if (request.wait == Millis{0}) return {Reply::kNull, admission.outcome, 0, {}};

    const std::vector<WaitQueue::Waiter*> olders = queue.FindWaiters(locks, request.owner);
    auto& waiter = parked[ask.call];
    waiter = std::make_unique<Parked>(ask, request, TickOf(now));
    std::vector<int> unblocked;
    for (const auto* older : olders) {
      unblocked.push_back(static_cast<const Parked*>(older)->asked.call);
    }
    std::sort(unblocked.begin(), unblocked.end());

    if (olders.size() == 1 && WaitQueue::WaitsFor(*olders[0], locks, ask.mode)) {
      const auto& older = static_cast<const Parked&>(*olders[0]);
      waiter->arrival = older.arrival;
      waiter->was_upgrade = older.was_upgrade;
      waiter->asked.keys = older.asked.keys;
      queue.TakeOver(*waiter, *olders[0]);
      EXPECT_FALSE(older.in_line());
      cycle = FindCycleOf(*waiter, olders, now);
      if (!cycle.empty()) {
        queue.TakeOver(*olders[0], *waiter);
        parked.erase(ask.call);
        return {Reply::kDeadlock, admission.outcome, 0, {}};
      }
      parked.erase(unblocked[0]);
      return {Reply::kTookOver, admission.outcome, 0, unblocked};
    }

    waiter->was_upgrade = upgrade;
    queue.Enter(*waiter, locks, request.owner, upgrade);
    Block(*waiter, sites, now);
    cycle = FindCycleOf(*waiter, olders, now);
    if (!cycle.empty()) {
      Leave(ask.call);
      return {Reply::kDeadlock, admission.outcome, 0, {}};
    }
    for (const int call : unblocked) Leave(call);
    return {Reply::kWaits, admission.outcome, 0, unblocked};
  }

  // Also gives up the owner's waits for it, which `ended` names.
  Outcome Release(int key, int owner, Instant now, std::vector<int>& ended) {
    const LockName lock = NameOf(key);
    for (WaitQueue::Waiter* wait : queue.FindWaiters(std::span(&lock, 1), OwnerOf(owner))) {
      ended.push_back(static_cast<Parked*>(wait)->asked.call);
      Leave(ended.back());
    }
    std::sort(ended.begin(), ended.end());
    return CarryOut(key, Decide(PlaceOf(key), ReleaseRequest{OwnerOf(owner), {}}, now), now);
  }
  Outcome Touch(int key, int owner, int64_t lease, Instant now) {
    return CarryOut(key, Decide(PlaceOf(key), TouchRequest{OwnerOf(owner), Millis{lease}, {}}, now),
                    now);
  }
  Outcome SessionEnds(int key, int owner, Instant now) {
    const std::array owners = {OwnerOf(owner)};
    if (DecideSessionEnd(PlaceOf(key), owners, now).empty()) {
      // Nothing happens, for the same reason for which nothing is touched; a string is not ours.
      const Decision touch = Decide(PlaceOf(key), TouchRequest{owners[0], Millis{1}, {}}, now);
      return touch.outcome == Outcome::kTouched ? Outcome::kFree : touch.outcome;
    }
    CarryOut(key, SessionsEnded{now, owners}, now);
    return Outcome::kReleased;
  }

  // --- What strangers and the server do

  void Remove(int key) {
    SlotOf(key) = Slot();
    queue.Wake(NameOf(key));
  }

  void Set(int key, std::string value, Instant end) {
    SlotOf(key) = Slot{.lock = nullptr, .plain = std::move(value), .plain_end = end};
    queue.Wake(NameOf(key));
  }

  void Rename(int from, int to) {
    SlotOf(to) = std::exchange(SlotOf(from), Slot());
    queue.Wake(NameOf(from));
    queue.Wake(NameOf(to));
  }

  // Holds that keep nobody out are told as ended; if that is all of them, the server removes the
  // key by itself.
  void TakeOutOverdue(int key, Instant now) {
    const Slot& slot = SlotOf(key);
    if (slot.plain.has_value() && slot.plain_end < now) Remove(key);
    if (slot.lock == nullptr) return;
    if (slot.lock->closes() < now) return Remove(key);
    if (const auto overdue = Overdue(PlaceOf(key), now); overdue.has_value()) Expire(key, *overdue);
  }

  // --- What the event loop does before it sleeps

  Tick TickOf(Instant now) const { return Tick{now.time_since_epoch() + set_back}; }

  Instant NextDue() const {
    if (queue.empty()) return queue.NextDue();
    return std::min(queue.NextDue(), Instant{queue.NextTimeOut().time_since_epoch() - set_back});
  }

  void Leave(int call) {
    queue.Leave(*parked.at(call));
    parked.erase(call);
  }

  std::vector<int> TimeOut(Instant now) {
    std::vector<int> calls;
    Tick last{};
    while (WaitQueue::Waiter* waiter = queue.FirstTimedOut(TickOf(now))) {
      EXPECT_LE(last, waiter->deadline()) << "not in the order of the deadlines";
      last = waiter->deadline();
      calls.push_back(static_cast<Parked*>(waiter)->asked.call);
      Leave(calls.back());
    }
    std::sort(calls.begin(), calls.end());
    return calls;
  }

  // Tries so many at most. Returns whether that was enough.
  bool Pass(FineInstant fine_now, size_t most, std::vector<PassStep>& steps) {
    const Instant now = ToInstant(fine_now);
    for (; WaitQueue::Waiter* next = queue.NextToTry(now); --most) {
      if (most == 0) return false;
      auto& waiter = static_cast<Parked&>(*next);
      ExpectSameRequest(waiter);
      if (!IsStillBlocked(waiter, now, steps)) TryGrant(waiter, fine_now, steps);
    }
    return true;
  }

 private:
  // What is known of the holders of a set is looked at alone first.
  bool IsStillBlocked(Parked& waiter, Instant now, std::vector<PassStep>& steps) {
    if (waiter.size() == 1 || !waiter.blocked_at().has_value()) return false;
    const size_t index = *waiter.blocked_at();
    const int key = waiter.asked.keys[index];
    Prune(key, now, steps);
    const Site site{PlaceOf(key), waiter.AheadOf(index)};
    if (!IsBlocked(site, waiter.request(), now)) return false;
    queue.Block(waiter, index, NextEnd(site.place, now));
    return true;
  }

  void TryGrant(Parked& waiter, FineInstant fine_now, std::vector<PassStep>& steps) {
    const Instant now = ToInstant(fine_now);
    const AcquireRequest& request = waiter.request();
    for (const int key : waiter.asked.keys) Prune(key, now, steps);
    const std::vector<Site> sites = SitesOf(waiter);
    const Admission admission = Decide(sites, request, fine_now, clock);
    if (admission.busy()) return Block(waiter, sites, now);
    const bool refused = admission.granted() && waiter.asked.refused;
    int64_t token = 0;
    if (admission.granted() && !refused) {
      ExpectSafe(waiter.asked, admission, &waiter, now);
      token = Grant(waiter.asked.keys, request, admission, now);
    }
    steps.push_back({std::nullopt, {waiter.asked.call, refused, admission.outcome, token}});
    const bool alone = token != 0 && request.mode == Mode::kExclusive;
    const int call = waiter.asked.call;
    queue.Leave(waiter, alone ? WaitQueue::Left::kHoldsAlone : WaitQueue::Left::kGone);
    parked.erase(call);
  }

  void Prune(int key, Instant now, std::vector<PassStep>& steps) {
    TakeOutOverdue(key, now);
    steps.push_back({key, {}});
  }

  std::vector<Site> SitesOf(const Parked& waiter) const {
    std::vector<Site> sites;
    for (size_t i = 0; i < waiter.size(); ++i) {
      sites.push_back({PlaceOf(waiter.asked.keys[i]), waiter.AheadOf(i)});
    }
    return sites;
  }

  void Block(Parked& waiter, const std::vector<Site>& sites, Instant now) {
    for (size_t i = 0; i < sites.size(); ++i) {
      if (!IsBlocked(sites[i], waiter.request(), now)) continue;
      queue.Block(waiter, i, NextEnd(sites[i].place, now));
      return;
    }
    ADD_FAILURE() << "call " << waiter.asked.call << " waits for nothing";
  }

  std::vector<NamedStep> FindCycleOf(const Parked& waiter,
                                     const std::vector<WaitQueue::Waiter*>& olders, Instant now) {
    const auto show = [this](LockName lock, const auto& see) { see(PlaceOf(KeyOf(lock))); };
    std::vector<NamedStep> named;
    for (const CycleStep& step : FindCycle(queue, waiter, olders, now, show)) {
      named.push_back({NumberOf(step.owner), KeyOf(step.lock)});
    }
    return named;
  }

  void ExpectSameRequest(const Parked& waiter) const {
    const AcquireRequest& request = waiter.request();
    const Ask& ask = waiter.asked;
    EXPECT_TRUE(request.owner == OwnerOf(ask.owner) && request.lease == Millis{ask.lease} &&
                request.mode == ask.mode && request.limit == static_cast<uint32_t>(ask.limit) &&
                request.reentrant == ask.reentrant && request.linger == Millis{ask.linger} &&
                waiter.deadline() == waiter.since() + Millis{ask.wait});
    ASSERT_EQ(waiter.size(), ask.keys.size());
    for (size_t i = 0; i < waiter.size(); ++i) {
      EXPECT_TRUE(waiter.lock(i) == NameOf(ask.keys[i]));
    }
  }

  // --- Checks of a grant, before it is carried out

  void ExpectSafe(const Ask& ask, const Admission& admission, const Parked* waiter, Instant now) {
    const bool fresh =
        admission.outcome == Outcome::kGranted || admission.outcome == Outcome::kUpgraded;
    for (const int key : ask.keys) {
      const bool own_plain = slots[Index(key)].plain.has_value() &&
                             *slots[Index(key)].plain == OwnerOf(ask.owner).bytes;
      if (fresh) {
        EXPECT_GT(admission.token, highest[Index(key)])
            << "tokens of key " << key << " do not rise";
        highest[Index(key)] = admission.token;
        ExpectRoom(key, ask, now);
      }
      if (!fresh || own_plain) continue;  // it held the lock before they came
      ExpectNobodyOvertaken(key, ask, admission.outcome == Outcome::kUpgraded, waiter);
    }
  }

  void ExpectRoom(int key, const Ask& ask, Instant now) const {
    const Slot& slot = slots[Index(key)];
    if (slot.plain.has_value() && now <= slot.plain_end) {
      EXPECT_EQ(*slot.plain, OwnerOf(ask.owner).bytes) << "somebody's plain lock was taken";
    }
    if (slot.lock == nullptr) return;
    int others = 0;
    for (size_t i = 0; i < slot.lock->size(); ++i) {
      const Hold hold = slot.lock->at(Lock::Order::kByOwner, i);
      if (hold.owner != OwnerOf(ask.owner) && now <= hold.end + hold.linger) ++others;
    }
    if (others == 0) return;
    EXPECT_NE(ask.mode, Mode::kExclusive) << "a writer beside others";
    EXPECT_EQ(ask.mode, slot.lock->mode()) << "two kinds of holders";
    if (ask.mode == Mode::kLimit) {
      EXPECT_LT(others, ask.limit) << "more than the limit";
    }
  }

  void ExpectNobodyOvertaken(int key, const Ask& ask, bool upgrade, const Parked* self) {
    const WaitQueue::Line* line = queue.Find(NameOf(key));
    if (line == nullptr) return;
    bool before_self = true;
    for (const auto* place = line->first(); place != nullptr; place = place->behind()) {
      const auto& other = static_cast<const Parked&>(place->waiter());
      if (&other == self) {
        before_self = false;
        continue;
      }
      // An upgrade passes those whom its shared hold blocks, and keeps that place.
      const bool passes = upgrade || (self != nullptr && self->was_upgrade);
      if (upgrade && self == nullptr && other.asked.mode != Mode::kShared) return;
      const bool came_first = self == nullptr || other.arrival < self->arrival;
      if (!before_self && (passes || !came_first)) continue;
      EXPECT_TRUE(ask.mode == other.asked.mode && ask.mode != Mode::kExclusive)
          << "call " << other.asked.call << " was overtaken";
    }
  }

  // --- Carrying out

  // Returns the token.
  int64_t Grant(const KeyNumbers& keys, const AcquireRequest& request, const Admission& admission,
                Instant now) {
    for (const int key : keys) {
      CarryOut(key, Change{HeldBy(PlaceOf(key), request, admission.token, now)}, now);
    }
    for (const int key : keys) {
      const Lock* lock = SlotOf(key).lock.get();
      const auto hold = lock == nullptr ? std::nullopt : lock->Find(request.owner);
      EXPECT_TRUE(hold.has_value() && hold->token == admission.token) << "half a set was taken";
    }
    return static_cast<int64_t>(admission.token.value);
  }

  Outcome CarryOut(int key, const Decision& decision, Instant now) {
    if (decision.change.has_value()) CarryOut(key, *decision.change, now);
    return decision.outcome;
  }

  void CarryOut(int key, const Change& change, Instant now) {
    Slot& slot = SlotOf(key);
    if (const auto overdue = OverdueBefore(PlaceOf(key), change, now); overdue.has_value()) {
      Expire(key, *overdue);
    }
    if (const auto* held = std::get_if<Held>(&change)) {
      const Instant closes = held->hold.closes();
      const bool same_mode = slot.lock != nullptr && slot.lock->mode() == held->mode;
      clock.Observe(held->hold.token);
      Store(key, Apply(slot.lock.get(), *held));
      slot.plain.reset();
      queue.NoteEnd(NameOf(key), closes);
      if (!same_mode) queue.Wake(NameOf(key));
    } else if (const auto* released = std::get_if<Released>(&change)) {
      const bool went = EndsHold(*slot.lock, *released);
      Store(key, Apply(slot.lock.get(), *released));
      if (went) queue.Wake(NameOf(key));
    } else if (const auto* ended = std::get_if<Ended>(&change)) {
      End(key, *ended);
    } else if (const auto* sessions = std::get_if<SessionsEnded>(&change)) {
      EndSessions(key, *sessions);
    } else if (const auto* extended = std::get_if<PlainExtended>(&change)) {
      slot.plain_end = extended->end;
      queue.Wake(NameOf(key));
    } else {
      Remove(key);
    }
  }

  void End(int key, const Ended& ended) {
    Store(key, Apply(SlotOf(key).lock.get(), ended));
    queue.Wake(NameOf(key));
  }

  void Expire(int key, const Expired& expired) {
    Store(key, Apply(SlotOf(key).lock.get(), expired));
    queue.Wake(NameOf(key));
  }

  void EndSessions(int key, const SessionsEnded& ended) {
    Store(key, Apply(SlotOf(key).lock.get(), ended));
    queue.Wake(NameOf(key));
    const Lock* lock = SlotOf(key).lock.get();
    for (const Owner owner : ended.owners) {
      const auto hold = lock == nullptr ? std::nullopt : lock->Find(owner);
      if (hold.has_value()) queue.NoteEnd(NameOf(key), hold->closes());
    }
  }

  void Store(int key, Lock* lock) {
    if (lock != SlotOf(key).lock.get()) SlotOf(key).lock.reset(lock);
  }

  std::vector<std::string> owners_;
  std::vector<std::string> key_texts_;
  std::vector<int> databases_;
};

// --- The history ------------------------------------------------------------------------------

// What happened: a history in which nothing happens proves nothing.
enum Thing : size_t {
  // Events.
  kGrantedExclusive,
  kGrantedShared,
  kGrantedLimit,
  kGrantedAgain,
  kGrantedAgainReentrant,
  kConvertedPlain,
  kUpgradedAtOnce,
  kDowngradedAtOnce,
  kOneTryHeld,
  kOneTryOthersWait,
  kOneTryBesideOnesOwnWait,
  kOtherMode,
  kHoldsSome,
  kHoldsApart,
  kUpgradesSeveral,
  kBeganToWait,
  kBeganToWaitForAFreeLock,
  kTookOver,
  kTookOverWithAnotherLimit,
  kOlderGaveWay,
  kDeadlock,
  kReleased,
  kReleasedOneOfSeveral,
  kReleasedInVain,
  kReleasedTooLate,
  kReleasedItsWait,
  kLingerCut,
  kTouched,
  kSessionClosed,
  kSessionClosedAndLingers,
  kHandedOverExclusive,
  kHandedOverShared,
  kHandedOverLimit,
  kHandedToOneThatHeldIt,
  kHandedUpgrade,
  kErrorAtItsTurn,
  kRefusedAtItsTurn,
  kTimedOut,
  kCancelled,
  kPlainAppeared,
  kPlainOverALock,
  kPlainChangedItsTtl,
  kDeleted,
  kExpired,
  kFlushed,
  kRenamed,
  kPaused,
  kClockWentBack,
  kEvents,
  // What was seen beside.
  kTimedOutToTheMillisecond = kEvents,
  kGrantedASet,
  kHandedOverASet,
  kGrantedAgainASet,
  kGrantedBeforeOthersThatWait,
  kNewTokenWhileItLingered,
  kUpgradeEnteredBeforeOthers,
  kUpgradeLostItsHoldAndWaits,
  kSeveralHandedOverTogether,
  kCycleOfTwo,
  kCycleOfThree,
  kCycleOfMore,
  kCycleOverAnUpgrade,
  kCycleOverASet,
  kRefusedThoughAnOlderWaits,
  kPassCutShort,
  kNewcomerBehindWorkPutOff,
  kFourHolders,
  kLineOfTenOrMore,
  kThings,
};
using Coverage = std::array<int64_t, kThings>;

class History {
 public:
  History(uint64_t seed, Coverage& coverage)
      : random_(seed),
        coverage_(coverage),
        calm_(OneIn(5)),
        owners_(calm_ ? 10 : Choose({2, 3, 4, 5, 6, 8, 12, 20})),
        databases_(Choose({1, 2, 2})),
        keys_(calm_             ? 10
              : databases_ == 1 ? Choose({1, 2, 3, 4, 5, 6})
                                : Choose({2, 4, 6, 6, 8})),
        exclusives_(calm_ ? 3 : Choose({0, 1, 1, 3, 10})),
        readers_(Choose({0, 1, 3, 3})),
        limits_(Choose({0, 1, 3, 3})),
        largest_limit_(Choose({1, 2, 3, 3, 5})),
        sets_one_in_(static_cast<uint64_t>(calm_ ? 20 : Choose({2, 2, 3, 1'000}))),
        longest_lease_(calm_ ? 2'000 : Choose({3, 20, 60, 200, 1'000})),
        longest_wait_(calm_ ? 2'000 : Choose({3, 20, 60, 400, 2'000})),
        releases_one_in_(static_cast<uint64_t>(calm_ ? 5 : Choose({1, 1, 2, 5}))),
        settles_one_in_(static_cast<uint64_t>(Choose({1, 1, 2, 4, 8}))),
        strangers_(!OneIn(3)),
        edge_(keys_, databases_, OwnerNames()),
        model_(Index(keys_)) {}

  void Run(int steps) {
    for (int step = 0; step < steps; ++step) {
      Step();
      if (testing::Test::HasFailure()) {
        ADD_FAILURE() << "step " << step << ", at " << now_us_ << " us: " << event_.what << " key "
                      << event_.key << ", owner " << event_.owner << ", " << event_.first << ", "
                      << event_.second << "; " << owners_ << " owners, " << keys_ << " keys";
        return;
      }
    }
    EverybodyLeaves();
  }

 private:
  // What is done, for the message of a failure.
  struct Event {
    const char* what = "start";
    int key = 0;
    int owner = 0;
    int64_t first = 0;
    int64_t second = 0;
  };

  uint64_t Below(uint64_t bound) { return random_() % bound; }
  bool OneIn(uint64_t n) { return Below(n) == 0; }
  int64_t From1To(int64_t most) {
    return 1 + static_cast<int64_t>(Below(static_cast<uint64_t>(most)));
  }
  int Choose(std::initializer_list<int> from) { return *(from.begin() + Below(from.size())); }
  int AnyKey() { return static_cast<int>(Below(static_cast<uint64_t>(keys_))); }
  int AnyOwner() { return static_cast<int>(Below(static_cast<uint64_t>(owners_))); }

  int64_t now_ms() const { return now_us_ / kMilli; }
  Instant now() const { return Instant{Millis{now_ms()}}; }
  FineInstant fine_now() const { return FineInstant{Micros{now_us_}}; }
  void Count(Thing thing) { ++coverage_[thing]; }

  // Some are binary, some as long as they may be.
  std::vector<std::string> OwnerNames() const {
    std::vector<std::string> names;
    for (int i = 0; i < owners_; ++i) {
      std::string name = "owner-" + std::to_string(i);
      if (i % 3 == 1) name.insert(0, std::string("\0\r\n\xff", 4));
      if (i % 4 == 3) name.insert(0, kMaxOwnerBytes - name.size(), 'z');
      names.push_back(std::move(name));
    }
    return names;
  }

  void Step() {
    PassTime();
    const uint64_t dice = Below(1'000);
    if (dice < 560) {
      Acquire();
    } else if (dice < 740) {
      Release();
    } else if (dice < 790) {
      Touch();
    } else if (dice < 820) {
      SessionEnds();
    } else if (dice < 880) {
      Cancel();
    } else if (dice < 915) {
      ServerExpires();
    } else if (dice < 935) {
      PlainClientSetsNx();
    } else if (dice < 955) {
      StrangerDeletes();
    } else if (dice < 958) {
      Flush();
    } else if (dice < 966) {
      PauseOrGoOn();
    } else if (strangers_) {
      Mischief(dice);
    }
    if (OneIn(settles_one_in_)) BeforeSleep();
    Compare();
    if (!OneIn(8)) return;
    const int left = model_.FindLeftWaiting(now_ms());
    if (left != 0) {
      EXPECT_LE(edge_.NextDue(), now()) << "nobody will look after call " << left;
    }
    if (!strangers_) {
      EXPECT_FALSE(model_.HasDeadlock(now_ms())) << "a missed deadlock";
    }
  }

  // What only a stranger can do, by which a cycle may close that nobody can refuse.
  void Mischief(uint64_t dice) {
    if (dice < 982) {
      StrangerSets();
    } else if (dice < 993) {
      Rename();
    } else {
      ClockGoesBack();
    }
  }

  void PassTime() {
    const int64_t due = model_.NextDue(now_ms());
    const uint64_t dice = Below(100);
    if (dice < 30) {
      now_us_ += static_cast<int64_t>(Below(2 * kMilli));
    } else if (dice < 35) {
      now_us_ += static_cast<int64_t>(Below(50 * kMilli));
    } else if (dice < (calm_ ? 36 : 50) && due != kNever && due > now_ms()) {
      // The moments at which a comparison can be wrong by one.
      now_us_ = due * kMilli + std::array<int64_t, 4>{-1, 0, kMilli - 1, kMilli}.at(Below(4));
    }
  }

  // Opening a key whose time is over removes it. Not always: the server's idea of the time can be
  // a moment older.
  void Open(int key) {
    if (model_.At(key).IsOver(now_ms()) && OneIn(2)) Remove(key);
  }

  void Remove(int key) {
    edge_.Remove(key);
    model_.Remove(key);
  }

  // --- Clients

  Mode AnyMode() {
    const int dice = static_cast<int>(Below(Index(exclusives_ + readers_ + limits_ + 1)));
    if (dice <= exclusives_) return Mode::kExclusive;
    return dice <= exclusives_ + readers_ ? Mode::kShared : Mode::kLimit;
  }

  KeyNumbers AnyKeys() {
    KeyNumbers keys(Index(keys_));
    std::iota(keys.begin(), keys.end(), 0);
    const size_t count = OneIn(sets_one_in_) ? 2 + Below(3) : 1;
    for (size_t i = 0; i < count && i < keys.size(); ++i) {
      std::swap(keys[i], keys[i + Below(keys.size() - i)]);
    }
    keys.resize(std::min(count, keys.size()));
    return keys;
  }

  Ask AnyAsk() {
    Ask ask{.keys = AnyKeys(), .owner = AnyOwner(), .mode = AnyMode()};
    const uint64_t dice = Below(100);
    const ModelLock& lock = model_.At(ask.keys[0]);
    if (const auto& elsewhere = model_.At(AnyKey()).holds; calm_ && !elsewhere.empty()) {
      ask.owner = elsewhere.front().owner;  // one who holds something
    } else if (dice < 20 && !lock.holds.empty()) {
      // A holder asks again, in this mode or another.
      ask.owner = lock.holds[Below(lock.holds.size())].owner;
      if (OneIn(2)) ask.mode = lock.mode;
    } else if (dice < 35 && !model_.waits.empty()) {
      // One who waits asks again, for the same or nearly the same.
      auto waiting = model_.waits.begin();
      std::advance(waiting, Below(model_.waits.size()));
      ask.owner = waiting->second.ask.owner;
      ask.keys = waiting->second.ask.keys;
      std::reverse(ask.keys.begin(), ask.keys.end());
      if (OneIn(4) && ask.keys.size() > 1) ask.keys.pop_back();
      if (!OneIn(4)) ask.mode = waiting->second.ask.mode;
    } else if (dice < 50 && !last_sets_[Index(ask.owner)].empty()) {
      ask.keys = last_sets_[Index(ask.owner)];
    }
    ask.lease = From1To(longest_lease_);
    ask.wait = OneIn(4) ? 0 : From1To(longest_wait_);
    if (ask.mode == Mode::kLimit) ask.limit = static_cast<int>(From1To(largest_limit_));
    ask.reentrant = OneIn(3);
    ask.linger = OneIn(3) ? From1To(longest_lease_) : 0;
    ask.call = next_call_++;
    ask.refused = OneIn(32);
    return ask;
  }

  bool IsCrowded(const Ask& ask) {
    return std::any_of(model_.waits.begin(), model_.waits.end(),
                       [&](const auto& wait) { return wait.second.ask.owner == ask.owner; }) ||
           std::any_of(ask.keys.begin(), ask.keys.end(),
                       [&](int key) { return !model_.At(key).line.empty(); });
  }

  void Acquire() {
    Ask ask = AnyAsk();
    if (calm_ && IsCrowded(ask)) ask.wait = 0;
    event_ = {"acquire", ask.keys[0], ask.owner, static_cast<int64_t>(ask.mode), ask.wait};
    for (const int key : ask.keys) Open(key);
    const ModelLock before = model_.At(ask.keys[0]);
    const bool one_waits =
        std::any_of(before.line.begin(), before.line.end(),
                    [&](const ModelWait* wait) { return wait->ask.owner == ask.owner; });
    const int older_limit = LimitOfOlder(ask, before);

    std::vector<Edge::NamedStep> cycle;
    model_.fewest_steps = 0;
    const std::vector<bool> put_off = edge_.PutOff(now());
    const Answer answer = edge_.Acquire(ask, fine_now(), cycle);
    EXPECT_EQ(answer, model_.Acquire(ask, put_off, now_us_));
    if (answer.reply != Reply::kToken && put_off[Index(ask.keys[0])]) {
      Count(kNewcomerBehindWorkPutOff);
    }
    for (const int call : answer.unblocked) ExpectOneAnswer(call);
    switch (answer.reply) {
      case Reply::kToken:
        CountGrant(ask, answer.outcome, before);
        last_sets_[Index(ask.owner)] = ask.keys;
        break;
      case Reply::kError:
        CountError(answer.outcome);
        break;
      case Reply::kNull:
        Count(one_waits                                 ? kOneTryBesideOnesOwnWait
              : answer.outcome == Outcome::kHeldByOther ? kOneTryHeld
                                                        : kOneTryOthersWait);
        break;
      case Reply::kWaits:
        unanswered_.emplace(ask.call, ask.keys[0]);
        Count(answer.outcome == Outcome::kHeldByOther ? kBeganToWait : kBeganToWaitForAFreeLock);
        if (!answer.unblocked.empty()) Count(kOlderGaveWay);
        if (edge_.parked.at(ask.call)->was_upgrade &&
            model_.At(ask.keys[0]).line.back()->ask.call != ask.call) {
          Count(kUpgradeEnteredBeforeOthers);
        }
        break;
      case Reply::kTookOver:
        unanswered_.emplace(ask.call, ask.keys[0]);
        Count(older_limit == ask.limit ? kTookOver : kTookOverWithAnotherLimit);
        break;
      case Reply::kDeadlock:
        ExpectRealCycle(cycle, ask);
        if (one_waits) Count(kRefusedThoughAnOlderWaits);
        Count(kDeadlock);
        break;
    }
  }

  static int LimitOfOlder(const Ask& ask, const ModelLock& lock) {
    for (const ModelWait* wait : lock.line) {
      if (wait->ask.owner == ask.owner) return wait->ask.limit;
    }
    return ask.limit;
  }

  void CountGrant(const Ask& ask, Outcome outcome, const ModelLock& before) {
    const bool set = ask.keys.size() > 1;
    switch (outcome) {
      case Outcome::kHeldAlready:
        Count(ask.reentrant ? kGrantedAgainReentrant : kGrantedAgain);
        if (set) Count(kGrantedAgainASet);
        return;
      case Outcome::kDowngraded:
        return Count(kDowngradedAtOnce);
      case Outcome::kUpgraded:
        return Count(kUpgradedAtOnce);
      default:
        break;
    }
    if (before.IsPlainFor(now_ms())) return Count(kConvertedPlain);
    if (set) Count(kGrantedASet);
    if (!before.line.empty()) Count(kGrantedBeforeOthersThatWait);
    const ModelHold* own = before.Find(ask.owner);
    if (own != nullptr && own->KeepsOut(now_ms())) Count(kNewTokenWhileItLingered);
    Count(ask.mode == Mode::kExclusive ? kGrantedExclusive
          : ask.mode == Mode::kShared  ? kGrantedShared
                                       : kGrantedLimit);
  }

  void CountError(Outcome outcome) {
    switch (outcome) {
      case Outcome::kOtherMode:
        return Count(kOtherMode);
      case Outcome::kHoldsSome:
        return Count(kHoldsSome);
      case Outcome::kHoldsApart:
        return Count(kHoldsApart);
      case Outcome::kUpgradesSeveral:
        return Count(kUpgradesSeveral);
      default:
        ADD_FAILURE() << "no error that can happen here: " << static_cast<int>(outcome);
    }
  }

  // Mostly by a holder.
  int AnyReleaser(int key) {
    const ModelLock& lock = model_.At(key);
    if (OneIn(6)) return AnyOwner();
    if (lock.stored == Stored::kPlain && lock.plain_owner != kNobody) return lock.plain_owner;
    return lock.holds.empty() ? AnyOwner() : lock.holds[Below(lock.holds.size())].owner;
  }

  void Release() {
    const int key = AnyKey();
    const int owner = AnyReleaser(key);
    event_ = {"release", key, owner, 0, 0};
    if (!OneIn(releases_one_in_)) return;
    Open(key);
    const ModelHold* own = model_.At(key).Find(owner);
    const bool counted = own != nullptr && own->count > 1;
    std::vector<int> ended;
    const Outcome outcome = edge_.Release(key, owner, now(), ended);
    EXPECT_EQ(model_.Release(key, owner, now_ms(), ended), outcome);
    for (const int call : ended) {
      ExpectOneAnswer(call);
      Count(kReleasedItsWait);
    }
    Count(outcome == Outcome::kReleased     ? (counted ? kReleasedOneOfSeveral : kReleased)
          : outcome == Outcome::kLingerCut  ? kLingerCut
          : outcome == Outcome::kLeaseEnded ? kReleasedTooLate
                                            : kReleasedInVain);
  }

  void Touch() {
    const int key = AnyKey();
    const int owner = AnyReleaser(key);
    const int64_t lease = From1To(longest_lease_);
    event_ = {"touch", key, owner, lease, 0};
    Open(key);
    const Outcome outcome = model_.Touch(key, owner, lease, now_ms());
    EXPECT_EQ(edge_.Touch(key, owner, lease, now()), outcome);
    if (outcome == Outcome::kTouched) Count(kTouched);
  }

  void SessionEnds() {
    const int key = AnyKey();
    const int owner = AnyReleaser(key);
    event_ = {"session ends", key, owner, 0, 0};
    Open(key);
    const Outcome outcome = model_.SessionEnds(key, owner, now_ms());
    EXPECT_EQ(edge_.SessionEnds(key, owner, now()), outcome);
    if (outcome != Outcome::kReleased) return;
    Count(model_.At(key).Find(owner) == nullptr ? kSessionClosed : kSessionClosedAndLingers);
  }

  // CLIENT UNBLOCK, CLIENT KILL, a closed connection: at any time, from any place.
  void Cancel() {
    if (unanswered_.empty() || (calm_ && !leaving_ && !OneIn(10))) return;
    auto waiting = unanswered_.begin();
    std::advance(waiting, Below(std::min<uint64_t>(unanswered_.size(), 8)));
    const auto [call, key] = *waiting;
    event_ = {"cancel", key, 0, call, 0};
    edge_.Leave(call);
    model_.Leave(call);
    ExpectOneAnswer(call);
    Count(kCancelled);
  }

  // --- Strangers, and the server itself

  void ServerExpires() {
    const int key = AnyKey();
    event_ = {"expire", key, 0, 0, 0};
    if (!model_.At(key).IsOver(now_ms())) return;
    Remove(key);
    Count(kExpired);
  }

  void StrangerDeletes() {
    const int key = AnyKey();
    event_ = {"delete", key, 0, 0, 0};
    if (model_.At(key).stored == Stored::kNothing) return;
    Remove(key);
    Count(kDeleted);
  }

  int64_t AnyPlainEnd() { return OneIn(3) ? kNever : now_ms() + From1To(longest_lease_); }

  // SET key value NX PX: between a release and the hand-over it may win.
  void PlainClientSetsNx() {
    const int key = AnyKey();
    const int64_t end = AnyPlainEnd();
    event_ = {"SET NX", key, kNobody, end, 0};
    Open(key);
    if (model_.At(key).stored == Stored::kPlain && strangers_) {  // PEXPIRE, PERSIST
      const int owner = model_.At(key).plain_owner;
      edge_.Set(key, *edge_.SlotOf(key).plain, ToMoment(end));
      model_.Set(key, owner, end);
      Count(kPlainChangedItsTtl);
    }
    if (model_.At(key).stored != Stored::kNothing) return;
    // A value that is nobody's name, one too long to be, and none.
    edge_.Set(key, std::array<std::string, 3>{"stranger", std::string(300, 'z'), ""}.at(Below(3)),
              ToMoment(end));
    model_.Set(key, kNobody, end);
    Count(kPlainAppeared);
  }

  // SET, with the name of one who may wait.
  void StrangerSets() {
    const int key = AnyKey();
    const int owner = AnyOwner();
    const int64_t end = AnyPlainEnd();
    event_ = {"SET", key, owner, end, 0};
    Count(model_.At(key).stored == Stored::kLock ? kPlainOverALock : kPlainAppeared);
    edge_.Set(key, std::string(edge_.OwnerOf(owner).bytes), ToMoment(end));
    model_.Set(key, owner, end);
  }

  void Rename() {
    const int from = AnyKey();
    const int to = AnyKey();
    event_ = {"rename", from, 0, to, 0};
    if (from == to || model_.At(from).stored == Stored::kNothing) return;
    edge_.Rename(from, to);
    model_.Rename(from, to);
    // Another lock's tokens: only those granted under this name rise.
    Count(kRenamed);
  }

  void Flush() {
    event_ = {.what = "flush"};
    for (int key = 0; key < keys_; ++key) Remove(key);
    Count(kFlushed);
  }

  // A hold that was over must not live again: the timers have taken it out.
  void ClockGoesBack() {
    if (paused_) return;
    event_ = {.what = "the clock goes back"};
    for (int key = 0; key < keys_; ++key) {
      edge_.TakeOutOverdue(key, now());
      model_.TakeOutOverdue(key, now_ms());
    }
    BeforeSleep();
    const auto step = static_cast<int64_t>(Below(30));
    now_us_ -= step * kMilli;
    model_.set_back += step;
    edge_.set_back += Millis{step};
    Count(kClockWentBack);
  }

  // While the server may not write, nothing is handed over; time runs on.
  void PauseOrGoOn() {
    paused_ = !paused_;
    event_ = {.what = paused_ ? "pause" : "go on"};
    Count(kPaused);
  }

  // --- Before the event loop sleeps

  void BeforeSleep() {
    TimeOut();
    if (paused_) {
      if (!OneIn(4)) return;
      paused_ = false;
    }
    Settle();
  }

  void TimeOut() {
    const std::vector<int> calls = model_.TimeOut(now_ms());
    for (const int call : calls) {
      if (edge_.parked.at(call)->deadline() == edge_.TickOf(now())) {
        Count(kTimedOutToTheMillisecond);
      }
      ExpectOneAnswer(call);
      Count(kTimedOut);
    }
    EXPECT_EQ(edge_.TimeOut(now()), calls);
  }

  void Settle() {
    std::vector<PassStep> steps;
    const bool whole = edge_.Pass(fine_now(), OneIn(4) ? Below(4) : 10'000, steps);
    if (!whole) Count(kPassCutShort);
    int granted = 0;
    for (const PassStep& step : steps) {
      if (step.pruned.has_value()) {
        model_.TakeOutOverdue(*step.pruned, now_ms());
        continue;
      }
      const Turn& turn = step.turn;
      const Ask ask = model_.waits.at(turn.call).ask;
      ASSERT_EQ(model_.Try(turn.call, now_us_), turn);
      ExpectOneAnswer(turn.call);
      CountTurn(ask, turn);
      if (IsGrant(turn.outcome) && !turn.refused) ++granted;
    }
    if (granted > 1) Count(kSeveralHandedOverTogether);
    if (!whole) {
      EXPECT_LE(edge_.NextDue(), now()) << "what was put off is forgotten";
      return;
    }
    EXPECT_EQ(model_.FindLeftWaiting(now_ms()), 0) << "it waits though nothing keeps it out";
    EXPECT_GT(edge_.NextDue(), now()) << "the loop turns for nothing";
    EXPECT_LE(FromMoment(edge_.NextDue()), model_.NextTimeOut());
    if (OneIn(4)) {
      EXPECT_LE(FromMoment(edge_.NextDue()), model_.NextGrant(now_ms())) << "nobody will look";
    }
  }

  void CountTurn(const Ask& ask, const Turn& turn) {
    if (turn.refused) return Count(kRefusedAtItsTurn);
    if (turn.outcome == Outcome::kUpgraded) return Count(kHandedUpgrade);
    if (turn.outcome != Outcome::kGranted) {
      return Count(IsGrant(turn.outcome) ? kHandedToOneThatHeldIt : kErrorAtItsTurn);
    }
    if (ask.keys.size() > 1) Count(kHandedOverASet);
    Count(ask.mode == Mode::kExclusive ? kHandedOverExclusive
          : ask.mode == Mode::kShared  ? kHandedOverShared
                                       : kHandedOverLimit);
  }

  // --- Checks

  void ExpectOneAnswer(int call) {
    EXPECT_EQ(unanswered_.erase(call), 1U)
        << "call " << call << " was answered before, or never waited";
  }

  void ExpectRealCycle(const std::vector<Edge::NamedStep>& cycle, const Ask& ask) {
    EXPECT_EQ(static_cast<int>(cycle.size()), model_.fewest_steps) << "not the shortest";
    bool over_a_set = ask.keys.size() > 1;
    for (size_t i = 0; i < cycle.size(); ++i) {
      const Edge::NamedStep& step = cycle[i];
      const int next = cycle[(i + 1) % cycle.size()].owner;
      ASSERT_NE(step.owner, kNobody);
      ASSERT_NE(next, kNobody);
      const auto stand = std::find_if(
          model_.stands.begin(), model_.stands.end(), [&](const Model::Stand& candidate) {
            return candidate.owner == step.owner && candidate.key == step.key &&
                   (i > 0 || candidate.call == ask.call) && candidate.blockers.test(Index(next));
          });
      ASSERT_NE(stand, model_.stands.end()) << "step " << i << " does not wait";
      over_a_set = over_a_set || (i > 0 && model_.waits.at(stand->call).ask.keys.size() > 1);
    }
    EXPECT_EQ(cycle.empty() ? kNobody : cycle[0].owner, ask.owner);
    if (over_a_set) Count(kCycleOverASet);
    if (ask.keys.size() == 1 && ask.mode == Mode::kExclusive &&
        model_.At(ask.keys[0]).FindLive(ask.owner, now_ms()) != nullptr) {
      Count(kCycleOverAnUpgrade);
    }
    Count(cycle.size() == 2 ? kCycleOfTwo : cycle.size() == 3 ? kCycleOfThree : kCycleOfMore);
  }

  // The edge and the model agree on everything that can be seen.
  void Compare() {
    EXPECT_EQ(edge_.queue.size(), model_.waits.size());
    EXPECT_EQ(edge_.queue.empty(), model_.waits.empty());
    EXPECT_EQ(edge_.parked.size(), unanswered_.size());
    EXPECT_EQ(model_.waits.size(), unanswered_.size());
    EXPECT_EQ(edge_.clock.last().value, static_cast<uint64_t>(model_.last_token));
    for (int key = 0; key < keys_; ++key) {
      const ModelLock& lock = model_.At(key);
      EXPECT_TRUE(SameLine(key, lock)) << "key " << key << ": the line differs";
      EXPECT_TRUE(SameStored(key, lock)) << "key " << key << ": what is stored differs";
      EXPECT_TRUE(lock.mode != Mode::kExclusive || lock.holds.size() <= 1) << "two writers";
      if (lock.line.size() >= 10) Count(kLineOfTenOrMore);
      if (lock.holds.size() >= 4) Count(kFourHolders);
    }
    // Of one call a step, what it asks for.
    if (unanswered_.empty()) return;
    const Edge::Parked& waiter = *edge_.parked.at(unanswered_.begin()->first);
    if (waiter.was_upgrade &&
        model_.At(waiter.asked.keys[0]).FindLive(waiter.asked.owner, now_ms()) == nullptr) {
      Count(kUpgradeLostItsHoldAndWaits);
    }
  }

  bool SameLine(int key, const ModelLock& lock) {
    const WaitQueue::Line* line = edge_.queue.Find(edge_.NameOf(key));
    if (line == nullptr) return lock.line.empty();
    if (line->size() != lock.line.size()) return false;
    const WaitQueue::Place* place = line->first();
    for (const ModelWait* wait : lock.line) {
      if (place == nullptr) return false;
      const auto& waiter = static_cast<const Edge::Parked&>(place->waiter());
      if (!waiter.in_line() || waiter.asked.call != wait->ask.call) return false;
      if (waiter.deadline().time_since_epoch().count() != wait->deadline) return false;
      place = place->behind();
    }
    return place == nullptr;
  }

  bool SameStored(int key, const ModelLock& lock) {
    const Edge::Slot& slot = edge_.SlotOf(key);
    switch (lock.stored) {
      case Stored::kNothing:
        return slot.lock == nullptr && !slot.plain.has_value();
      case Stored::kPlain:
        return slot.lock == nullptr && slot.plain.has_value() &&
               FromMoment(slot.plain_end) == lock.plain_end &&
               edge_.NumberOf(Owner{*slot.plain}) == lock.plain_owner;
      case Stored::kLock:
        break;
    }
    if (slot.lock == nullptr || slot.plain.has_value() || slot.lock->mode() != lock.mode ||
        slot.lock->size() != lock.holds.size()) {
      return false;
    }
    return std::all_of(lock.holds.begin(), lock.holds.end(), [&](const ModelHold& hold) {
      return slot.lock->Find(edge_.OwnerOf(hold.owner)) ==
             Hold{.owner = edge_.OwnerOf(hold.owner),
                  .token = Token{static_cast<uint64_t>(hold.token)},
                  .since = ToMoment(hold.since),
                  .end = ToMoment(hold.end),
                  .linger = Millis{hold.linger},
                  .count = static_cast<uint32_t>(hold.count)};
    });
  }

  // In any order; and then nothing is left.
  void EverybodyLeaves() {
    event_ = {.what = "everybody leaves"};
    leaving_ = true;
    while (!unanswered_.empty()) {
      Cancel();
      if (OneIn(4)) BeforeSleep();
      Compare();
      if (testing::Test::HasFailure()) return;
    }
    EXPECT_TRUE(edge_.queue.empty());
    EXPECT_EQ(edge_.queue.NextDue(), kMaxInstant);
    EXPECT_EQ(edge_.queue.NextToTry(kMaxInstant), nullptr);
    EXPECT_EQ(edge_.queue.NextTimeOut(), kMaxTick);
    EXPECT_EQ(edge_.queue.FirstTimedOut(kMaxTick), nullptr);
    EXPECT_EQ(edge_.queue.lines(), 0U);
  }

  std::mt19937_64 random_;
  Coverage& coverage_;

  // The world of this history.
  const bool calm_;  // leases are long, and few wait behind others: cycles get long
  const int owners_;
  const int databases_;
  const int keys_;
  const int exclusives_;  // how often each mode is asked for
  const int readers_;
  const int limits_;
  const int largest_limit_;
  const uint64_t sets_one_in_;
  const int64_t longest_lease_;
  const int64_t longest_wait_;
  const uint64_t releases_one_in_;
  const uint64_t settles_one_in_;
  const bool strangers_;

  int64_t now_us_ = int64_t{1'700'000'000'000} * kMilli;
  bool paused_ = false;
  bool leaving_ = false;  // the history is over
  int next_call_ = 1;
  Event event_;

  Edge edge_;
  Model model_;
  std::map<int, int> unanswered_;                  // who waits: call, one of its keys
  std::array<KeyNumbers, kMostOwners> last_sets_;  // what each owner was granted last
};

void RunHistories(uint64_t first_seed, uint64_t histories, int steps, Coverage& coverage) {
  for (uint64_t seed = first_seed; seed < first_seed + histories; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    History(seed, coverage).Run(steps);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(WaitingHistory, AgreesWithTheModel) {
  Coverage coverage{};
  RunHistories(1, 2'000, 700, coverage);
  if (HasFailure()) return;
  EXPECT_GE(std::accumulate(coverage.begin(), coverage.begin() + kEvents, int64_t{0}), 1'000'000);
  for (size_t thing = 0; thing < kThings; ++thing) {
    EXPECT_GE(coverage.at(thing), 10) << "thing number " << thing << " hardly ever happened";
  }
}

TEST(WaitingHistoryLong, AgreesWithTheModel) {
  Coverage coverage{};
  RunHistories(1'000'000, 60'000, 1'000, coverage);
}

}  // namespace
}  // namespace turnstile
