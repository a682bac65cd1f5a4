// Random histories of waiting, in simulated time, against a naive model.
//
// The Edge does with the core what module/redis does: it parks newcomers, wakes lines, answers
// those whose time is over and hands over what is free. Beside it runs the Model, which follows the
// contract in the most straightforward way and shares no code with the core: plain lists, and a
// deadlock is whatever the closure of an explicit list of edges says. After every event both must
// agree on every lock, on every place in every line and on what is due next; whatever is granted
// must be granted to the same callers in the same order under the same tokens. Beyond the model
// some things are checked for themselves: everybody who waits is answered exactly once, nobody
// overtakes, tokens rise, a cycle that is named exists, no lock is free while somebody waits.
//
// Every history follows from its seed, which is printed on failure. (Which of several woken lines
// is settled first depends on addresses. The model follows the Edge there, and nothing is left to
// chance while lines are settled; so only the numbers of tokens differ.)

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <iterator>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <optional>
#include <ostream>
#include <random>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

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
constexpr int64_t kAtOnce = 0;
constexpr int kNobody = -1;  // also: a stranger who never asks for a lock
constexpr size_t kMostOwners = 64;

// What a call that asks for a lock is answered at once.
enum class Reply { kToken, kNull, kWaits, kTookOver, kDeadlock };

struct Answer {
  Reply reply = Reply::kNull;
  Outcome outcome = Outcome::kHeldByOther;
  int64_t token = 0;
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

void PrintTo(const Answer& answer, std::ostream* out) {
  *out << "{reply " << static_cast<int>(answer.reply) << ", outcome "
       << static_cast<int>(answer.outcome) << ", token " << answer.token << "}";
}

void PrintTo(const Turn& turn, std::ostream* out) {
  *out << "{call " << turn.call << (turn.refused ? ", refused" : "") << ", outcome "
       << static_cast<int>(turn.outcome) << ", token " << turn.token << "}";
}

struct Ask {
  int key = 0;
  int owner = 0;
  int64_t lease = 0;
  int64_t wait = 0;
  int call = 0;          // the number it gets if it waits
  bool refused = false;  // whether it will be when its turn comes
  bool dies = false;     // whether its client dies when its turn comes, before it is told
};

// --- The naive model --------------------------------------------------------------------------

struct ModelWait {
  int call;
  int owner;
  int64_t lease;
  int64_t deadline;
  bool refused;
  bool dies;
  int arrival;  // of the place: a call that takes it over inherits it
};

enum class Stored { kNothing, kLock, kPlain };

struct ModelLock {
  Stored stored = Stored::kNothing;
  int holder = kNobody;
  int64_t token = 0;
  int64_t end = 0;
  std::deque<ModelWait> line;
  bool woken = false;  // somebody should look at the line

  bool IsHeld(int64_t now) const { return stored != Stored::kNothing && now <= end; }
  void Wake() { woken = !line.empty(); }
};

class Model {
 public:
  explicit Model(size_t keys) : locks(keys) {}

  std::vector<ModelLock> locks;
  int64_t last_token = 0;

  ModelLock& At(int key) { return locks[static_cast<size_t>(key)]; }

  Answer Acquire(const Ask& ask, int64_t now_us) {
    const int64_t now = now_us / kMilli;
    ModelLock& lock = At(ask.key);
    if (lock.IsHeld(now) && lock.holder == ask.owner) {
      const Outcome outcome =
          lock.stored == Stored::kLock ? Outcome::kHeldAlready : Outcome::kGranted;
      if (outcome == Outcome::kGranted) lock.token = NextToken(now_us);
      lock.stored = Stored::kLock;
      lock.end = now + ask.lease;
      return {Reply::kToken, outcome, lock.token};
    }
    if (!lock.IsHeld(now) && lock.line.empty()) {
      Grant(lock, ask.owner, ask.lease, now_us);
      return {Reply::kToken, Outcome::kGranted, lock.token};
    }
    const Outcome outcome = lock.IsHeld(now) ? Outcome::kHeldByOther : Outcome::kOthersWait;
    if (ask.wait == 0) return {Reply::kNull, outcome, 0};
    const auto own = FindOwn(ask.key, ask.owner);
    if (own == lock.line.end() && FewestSteps(ask.owner, ask.key, now) != 0) {
      return {Reply::kDeadlock, outcome, 0};
    }
    ModelWait wait{.call = ask.call,
                   .owner = ask.owner,
                   .lease = ask.lease,
                   .deadline = now + ask.wait,
                   .refused = ask.refused,
                   .dies = ask.dies,
                   .arrival = ask.call};
    if (!lock.IsHeld(now)) lock.woken = true;
    if (own != lock.line.end()) {
      wait.arrival = own->arrival;
      *own = wait;
      return {Reply::kTookOver, outcome, 0};
    }
    lock.line.push_back(wait);
    return {Reply::kWaits, outcome, 0};
  }

  Outcome Release(int key, int owner, int64_t now) {
    const Outcome outcome = Look(key, owner, now, Outcome::kReleased);
    if (outcome == Outcome::kReleased) Remove(key);
    return outcome;
  }

  Outcome Touch(int key, int owner, int64_t lease, int64_t now) {
    const Outcome outcome = Look(key, owner, now, Outcome::kTouched);
    if (outcome != Outcome::kTouched) return outcome;
    ModelLock& lock = At(key);
    lock.end = now + lease;
    if (lock.stored == Stored::kPlain) lock.Wake();  // whoever wrote to a string is not known
    return outcome;
  }

  void Remove(int key) {
    At(key).stored = Stored::kNothing;
    At(key).Wake();
  }

  void Set(int key, int holder, int64_t end) {
    ModelLock& lock = At(key);
    lock.stored = Stored::kPlain;
    lock.holder = holder;
    lock.end = end;
    lock.Wake();
  }

  // What is stored moves; the lines stay.
  void Rename(int from, int to) {
    CopyStored(At(from), At(to));
    At(to).Wake();
    Remove(from);
  }

  void Swap(int one, int other) {
    ModelLock kept;
    CopyStored(At(one), kept);
    CopyStored(At(other), At(one));
    CopyStored(kept, At(other));
    At(one).Wake();
    At(other).Wake();
  }

  void Leave(int key, int call) {
    ModelLock& lock = At(key);
    std::erase_if(lock.line, [call](const ModelWait& wait) { return wait.call == call; });
    lock.Wake();
  }

  // The calls whose time is over, in the order of their numbers.
  std::vector<int> TimeOut(int64_t now) {
    std::vector<int> calls;
    for (ModelLock& lock : locks) {
      const size_t before = lock.line.size();
      std::erase_if(lock.line, [&](const ModelWait& wait) {
        if (wait.deadline > now) return false;
        calls.push_back(wait.call);
        return true;
      });
      if (lock.line.size() != before) lock.Wake();
    }
    std::sort(calls.begin(), calls.end());
    return calls;
  }

  bool IsToBeLookedAt(int key, int64_t now) {
    const ModelLock& lock = At(key);
    return lock.woken ||
           (!lock.line.empty() && lock.stored != Stored::kNothing && !lock.IsHeld(now));
  }

  std::vector<Turn> Settle(int key, int64_t now_us) {
    std::vector<Turn> turns;
    ModelLock& lock = At(key);
    for (; !lock.line.empty(); lock.line.pop_front()) {
      const ModelWait& first = lock.line.front();
      const bool held = lock.IsHeld(now_us / kMilli);
      if (held && lock.holder != first.owner) break;
      const bool again = held && lock.stored == Stored::kLock;
      const Outcome outcome = again ? Outcome::kHeldAlready : Outcome::kGranted;
      if (first.refused) {
        turns.push_back({first.call, true, outcome, 0});
        continue;
      }
      if (again) {
        lock.end = now_us / kMilli + first.lease;
      } else {
        Grant(lock, first.owner, first.lease, now_us);
      }
      turns.push_back({first.call, false, outcome, lock.token});
    }
    lock.woken = false;
    return turns;
  }

  int64_t NextDue() const {
    int64_t due = kNever;
    for (const ModelLock& lock : locks) {
      if (lock.woken) return kAtOnce;
      if (lock.line.empty()) continue;
      if (lock.stored != Stored::kNothing && lock.end != kNever) due = std::min(due, lock.end + 1);
      for (const ModelWait& wait : lock.line) due = std::min(due, wait.deadline);
    }
    return due;
  }

  size_t Waiting() const {
    size_t waiting = 0;
    for (const ModelLock& lock : locks) waiting += lock.line.size();
    return waiting;
  }

  bool Waits(int owner) const {
    return std::any_of(locks.begin(), locks.end(), [owner](const ModelLock& lock) {
      return std::any_of(lock.line.begin(), lock.line.end(),
                         [owner](const ModelWait& wait) { return wait.owner == owner; });
    });
  }

  // Whether `other` keeps out whoever stands at `place` in the line, or comes to its end.
  bool IsBefore(int other, int key, size_t place, int64_t now) {
    const ModelLock& lock = At(key);
    if (lock.IsHeld(now) && lock.holder == other) return true;
    const auto end = lock.line.begin() + static_cast<std::ptrdiff_t>(place);
    return std::any_of(lock.line.begin(), end,
                       [other](const ModelWait& wait) { return wait.owner == other; });
  }

  // How many steps from `owner` lead back to it, at least, if it waits for `key`; zero if none do.
  int FewestSteps(int owner, int key, int64_t now) {
    using Owners = std::bitset<kMostOwners>;
    const auto bit = [](int number) { return static_cast<size_t>(number); };
    Owners reached;
    ForEachBefore(At(key), At(key).line.size(), now, [&](int other) { reached.set(bit(other)); });
    const std::vector<Wait> edges = Edges(now);
    for (int steps = 1;; ++steps) {
      if (reached.test(bit(owner))) return steps;
      Owners further = reached;
      for (const Wait& edge : edges) {
        if (reached.test(bit(edge.from))) further.set(bit(edge.to));
      }
      if (further == reached) return 0;
      reached = further;
    }
  }

  // Whether somebody waits for itself, over any number of steps: takes away, again and again,
  // whatever leads to somebody who waits for nobody.
  bool HasCycle(int64_t now) {
    std::vector<Wait> edges = Edges(now);
    for (size_t before = edges.size() + 1; edges.size() < before;) {
      before = edges.size();
      std::bitset<kMostOwners> waits;
      for (const Wait& edge : edges) waits.set(static_cast<size_t>(edge.from));
      std::erase_if(edges, [&](const Wait& edge) { return !waits[static_cast<size_t>(edge.to)]; });
    }
    return !edges.empty();
  }

  std::deque<ModelWait>::iterator FindOwn(int key, int owner) {
    auto& line = At(key).line;
    return std::find_if(line.begin(), line.end(),
                        [owner](const ModelWait& wait) { return wait.owner == owner; });
  }

 private:
  struct Wait {
    int from;
    int to;
  };

  template <typename Function>
  static void ForEachBefore(const ModelLock& lock, size_t place, int64_t now, Function function) {
    if (lock.IsHeld(now) && lock.holder != kNobody) function(lock.holder);
    for (size_t i = 0; i < place; ++i) function(lock.line[i].owner);
  }

  // Who waits for whom.
  std::vector<Wait> Edges(int64_t now) const {
    std::vector<Wait> edges;
    for (const ModelLock& lock : locks) {
      for (size_t i = 0; i < lock.line.size(); ++i) {
        ForEachBefore(lock, i, now, [&](int other) {
          edges.push_back({lock.line[i].owner, other});
        });
      }
    }
    return edges;
  }

  static void CopyStored(const ModelLock& from, ModelLock& to) {
    to.stored = from.stored;
    to.holder = from.holder;
    to.token = from.token;
    to.end = from.end;
  }

  int64_t NextToken(int64_t now_us) { return last_token = std::max(last_token + 1, now_us); }

  void Grant(ModelLock& lock, int owner, int64_t lease, int64_t now_us) {
    lock.stored = Stored::kLock;
    lock.holder = owner;
    lock.token = NextToken(now_us);
    lock.end = now_us / kMilli + lease;
  }

  Outcome Look(int key, int owner, int64_t now, Outcome if_own) {
    const ModelLock& lock = At(key);
    if (lock.stored == Stored::kNothing) return Outcome::kFree;
    const bool own = lock.holder == owner;
    if (lock.IsHeld(now)) return own ? if_own : Outcome::kHeldByOther;
    return own ? Outcome::kLeaseEnded : Outcome::kFree;
  }
};

// --- The edge: a few keys, and the core -------------------------------------------------------

Instant ToMoment(int64_t ms) { return ms == kNever ? kMaxInstant : Instant{Millis{ms}}; }
int64_t FromMoment(Instant moment) {
  return moment == kMaxInstant ? kNever : moment.time_since_epoch().count();
}

class Edge {
 public:
  struct Parked : WaitQueue::Waiter {
    Parked(const Ask& ask, Instant now)
        : Waiter(Millis{ask.lease}, now, now + Millis{ask.wait}), asked(ask) {}
    Ask asked;
  };

  struct Slot {
    std::unique_ptr<Lock> lock;
    std::optional<std::string> plain;
    Instant plain_end;
  };

  // The same texts in each of the databases.
  Edge(int keys, int databases, std::vector<std::string> owners)
      : slots(static_cast<size_t>(keys)), owners_(std::move(owners)) {
    for (int key = 0; key < keys; ++key) {
      key_texts_.push_back("key-" + std::to_string(key / databases));
      databases_.push_back(key % databases);
    }
  }

  WaitQueue queue;
  TokenClock clock;
  std::vector<Slot> slots;
  std::unordered_map<int, std::unique_ptr<Parked>> parked;

  LockName NameOf(int key) const {
    const auto i = static_cast<size_t>(key);
    return {databases_[i], key_texts_[i]};
  }
  int KeyOf(LockName lock) const {
    for (int key = 0; key < static_cast<int>(slots.size()); ++key) {
      if (NameOf(key) == lock) return key;
    }
    return -1;
  }
  Owner OwnerOf(int owner) const { return Owner{owners_[static_cast<size_t>(owner)]}; }
  int NumberOf(Owner owner) const {
    const auto found = std::find(owners_.begin(), owners_.end(), owner.bytes);
    return found == owners_.end() ? kNobody : static_cast<int>(found - owners_.begin());
  }

  Slot& SlotOf(int key) { return slots[static_cast<size_t>(key)]; }

  Place PlaceOf(int key) const {
    const Slot& slot = slots[static_cast<size_t>(key)];
    if (slot.plain.has_value()) {
      return {.lock = nullptr, .plain = PlainLock{.value = *slot.plain, .end = slot.plain_end}};
    }
    return {.lock = slot.lock.get(), .plain = std::nullopt};
  }

  // `cycle` is what was found if the reply is kDeadlock.
  Answer Acquire(const Ask& ask, FineInstant now, std::vector<WaitQueue::Step>& cycle) {
    const LockName lock = NameOf(ask.key);
    const AcquireRequest request{OwnerOf(ask.owner), Millis{ask.lease}, Millis{ask.wait}};
    const Ahead ahead = queue.Find(lock) == nullptr ? Ahead::kNobody : Ahead::kOthers;
    const Decision decision = Decide(PlaceOf(ask.key), request, ahead, now, clock);
    if (decision.change.has_value()) {
      const int64_t token = CarryOut(ask.key, *decision.change, ToInstant(now));
      return {Reply::kToken, decision.outcome, token};
    }
    if (request.wait == Millis{0}) return {Reply::kNull, decision.outcome, 0};

    const std::optional<Holder> holder = HolderOf(PlaceOf(ask.key), ToInstant(now));
    WaitQueue::Waiter* older = queue.FindWaiter(lock, request.owner);
    if (older == nullptr) {
      cycle = FindCycle(ask.owner, ask.key, ToInstant(now));
      if (!cycle.empty()) return {Reply::kDeadlock, decision.outcome, 0};
    }
    auto& waiter = parked[ask.call];
    waiter = std::make_unique<Parked>(ask, ToInstant(now));
    if (older == nullptr) {
      queue.Enter(*waiter, lock, request.owner);
    } else {
      queue.TakeOver(*waiter, *older);
      EXPECT_FALSE(older->in_line());
      parked.erase(static_cast<Parked*>(older)->asked.call);
    }
    HolderChanged(ask.key, holder);
    return {older == nullptr ? Reply::kWaits : Reply::kTookOver, decision.outcome, 0};
  }

  std::vector<WaitQueue::Step> FindCycle(int owner, int key, Instant now) {
    const std::optional<Holder> holder = HolderOf(PlaceOf(key), now);
    return queue.FindCycle(OwnerOf(owner), NameOf(key),
                           holder.has_value() ? std::optional(holder->owner) : std::nullopt, now);
  }

  Outcome Release(int key, int owner, Instant now) {
    const Decision decision = Decide(PlaceOf(key), ReleaseRequest{OwnerOf(owner)}, now);
    if (decision.change.has_value()) CarryOut(key, *decision.change, now);
    return decision.outcome;
  }

  Outcome Touch(int key, int owner, int64_t lease, Instant now) {
    const Decision decision =
        Decide(PlaceOf(key), TouchRequest{OwnerOf(owner), Millis{lease}}, now);
    if (decision.change.has_value()) CarryOut(key, *decision.change, now);
    return decision.outcome;
  }

  // --- What strangers and the server do

  void Remove(int key, Instant now) {
    Unlink(key);
    SlotOf(key) = Slot();
    KeyChanged(key, now);
  }

  void Set(int key, std::string value, Instant end, Instant now) {
    Unlink(key);
    SlotOf(key) = Slot{.lock = nullptr, .plain = std::move(value), .plain_end = end};
    KeyChanged(key, now);
  }

  void Rename(int from, int to, Instant now) {
    Unlink(to);
    SlotOf(to) = std::exchange(SlotOf(from), Slot());
    HolderChanged(from, std::nullopt);
    KeyChanged(from, now);
    KeyChanged(to, now);
  }

  // A database was emptied, or two were exchanged.
  void AllKeysChanged(int keys, Instant now) {
    for (int key = 0; key < keys; ++key) KeyChanged(key, now);
  }

  // --- What the event loop does before it sleeps

  void Leave(int call) {
    queue.Leave(*parked.at(call));
    parked.erase(call);
  }

  std::vector<int> TimeOut(Instant now) {
    std::vector<int> calls;
    Instant last = kMinInstant;
    while (WaitQueue::Waiter* waiter = queue.FirstTimedOut(now)) {
      EXPECT_LE(last, waiter->deadline()) << "not in the order of the deadlines";
      last = waiter->deadline();
      calls.push_back(static_cast<Parked*>(waiter)->asked.call);
      Leave(calls.back());
    }
    std::sort(calls.begin(), calls.end());
    return calls;
  }

  std::vector<Turn> SettleLine(int key, FineInstant now) {
    std::vector<Turn> turns;
    while (WaitQueue::Line* line = queue.Find(NameOf(key))) {
      const auto& first = static_cast<Parked&>(*line->first());
      const AcquireRequest request = first.request();
      EXPECT_EQ(request.owner.bytes, OwnerOf(first.asked.owner).bytes);
      EXPECT_EQ(request.lease, Millis{first.asked.lease});
      EXPECT_EQ(first.deadline(), first.since() + Millis{first.asked.wait});
      const Decision decision = Decide(PlaceOf(key), request, Ahead::kNobody, now, clock);
      if (!decision.change.has_value()) {
        HolderChanged(key, HolderOf(PlaceOf(key), ToInstant(now)));
        queue.Settled(NameOf(key));
        break;
      }
      const bool refused = first.asked.refused;
      const int64_t token = refused ? 0 : CarryOut(key, *decision.change, ToInstant(now));
      turns.push_back({first.asked.call, refused, decision.outcome, token});
      Leave(first.asked.call);
    }
    return turns;
  }

 private:
  void HolderChanged(int key, const std::optional<Holder>& holder) {
    if (queue.empty()) return;
    if (holder.has_value()) {
      queue.SetHolder(NameOf(key), holder->owner, holder->end);
    } else {
      queue.SetHolder(NameOf(key), std::nullopt, kMinInstant);
    }
  }

  // A lock is taken out of its key.
  void Unlink(int key) {
    if (SlotOf(key).lock != nullptr) HolderChanged(key, std::nullopt);
  }

  void KeyChanged(int key, Instant now) {
    if (queue.Find(NameOf(key)) == nullptr) return;
    HolderChanged(key, HolderOf(PlaceOf(key), now));
    queue.Wake(NameOf(key));
  }

  // Returns the token of a hold, else zero.
  int64_t CarryOut(int key, const Change& change, Instant now) {
    Slot& slot = SlotOf(key);
    if (const auto* held = std::get_if<Held>(&change)) {
      const Token token = held->hold.token;
      const Instant end = held->hold.end;
      Lock* const stored = Apply(slot.lock.get(), *held);
      if (stored != slot.lock.get()) slot.lock.reset(stored);
      slot.plain.reset();
      clock.Observe(token);
      HolderChanged(key, Holder{stored->hold().owner, end});
      return static_cast<int64_t>(token.value);
    }
    if (const auto* extended = std::get_if<PlainExtended>(&change)) {
      slot.plain_end = extended->end;
      KeyChanged(key, now);
    } else if (std::holds_alternative<PlainFreed>(change)) {
      Remove(key, now);
    } else {
      slot.lock.reset();
      HolderChanged(key, std::nullopt);
    }
    return 0;
  }

  std::vector<std::string> owners_;
  std::vector<std::string> key_texts_;
  std::vector<int> databases_;
};

// --- The history ------------------------------------------------------------------------------

// What happened: a history in which nothing happens proves nothing.
enum Thing : size_t {
  // Events.
  kGrantedAtOnce,
  kGrantedAgain,
  kConvertedPlain,
  kOneTryHeld,
  kOneTryOthersWait,
  kBeganToWait,
  kBeganToWaitForAFreeLock,
  kTookOver,
  kDeadlock,
  kReleased,
  kReleasedInVain,
  kReleasedTooLate,
  kTouched,
  kHandedOver,
  kHandedToOneThatHeldIt,
  kRefusedAtItsTurn,
  kTimedOut,
  kCancelled,
  kTakenBack,
  kTakenBackTooLate,
  kPlainAppeared,
  kPlainOverALock,
  kPlainChangedItsTtl,
  kDeleted,
  kExpired,
  kFlushed,
  kSwapped,
  kRenamed,
  kPaused,
  kClockWentBack,
  kEvents,
  // What was seen beside.
  kTimedOutToTheMillisecond = kEvents,
  kCycleOfTwo,
  kCycleOfThree,
  kCycleOfMore,
  kCycleAcrossDatabases,
  kCycleByQueueOrderAlone,
  kWaitsInSeveralLines,
  kLineOfTenOrMore,
  kThings,
};
using Coverage = std::array<int64_t, kThings>;

class History {
 public:
  History(uint64_t seed, Coverage& coverage)
      : random_(seed),
        coverage_(coverage),
        calm_(OneIn(4)),
        owners_(calm_ ? 8 : Choose({2, 3, 4, 4, 5, 6, 8, 12, 40})),
        databases_(Choose({1, 2, 2})),
        keys_(databases_ * (calm_ ? 12 / databases_ : Choose({1, 1, 2, 3, 4, 6}))),
        longest_lease_(calm_ ? 500 : Choose({3, 20, 60, 200, 1'000})),
        longest_wait_(calm_ ? 2'000 : Choose({3, 20, 60, 400, 2'000})),
        releases_one_in_(static_cast<uint64_t>(calm_ ? 5 : Choose({1, 1, 2, 5}))),
        settles_one_in_(static_cast<uint64_t>(Choose({1, 1, 2, 4, 8}))),
        strangers_(!OneIn(3)),
        edge_(keys_, databases_, OwnerNames()),
        model_(static_cast<size_t>(keys_)) {}

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

  // A grant whose client died before it was told.
  struct Undelivered {
    int key;
    int owner;
    int64_t token;
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
    if (dice < 500) {
      Acquire();
    } else if (dice < 680) {
      Release();
    } else if (dice < 740) {
      Touch();
    } else if (dice < 820) {
      Probe();
    } else if (dice < 890) {
      Cancel();
    } else if (dice < 930) {
      ServerExpires();
    } else if (dice < 950) {
      PlainClientSetsNx();
    } else if (dice < 960) {
      StrangerDeletes();
    } else if (dice < 962) {
      Flush();
    } else if (dice < 968) {
      PauseOrGoOn();
    } else if (strangers_) {
      Mischief(dice);
    }
    if (OneIn(settles_one_in_)) BeforeSleep();
    Compare();
    if (strangers_ || !OneIn(8)) return;
    EXPECT_FALSE(model_.HasCycle(now_ms())) << "a missed deadlock";
  }

  // What only a stranger can do, by which a cycle may close that nobody can refuse.
  void Mischief(uint64_t dice) {
    if (dice < 982) {
      StrangerSets();
    } else if (dice < 990) {
      Rename();
    } else if (dice < 993) {
      SwapDatabases();
    } else {
      ClockGoesBack();
    }
  }

  void PassTime() {
    const int64_t due = model_.NextDue();
    const uint64_t dice = Below(100);
    if (dice < 30) {
      now_us_ += static_cast<int64_t>(Below(2 * kMilli));
    } else if (dice < 35) {
      now_us_ += static_cast<int64_t>(Below(50 * kMilli));
    } else if (dice < (calm_ ? 38 : 55) && due != kNever && due > now_ms()) {
      // The moments at which a comparison can be wrong by one.
      now_us_ = due * kMilli + std::array<int64_t, 4>{-1, 0, kMilli - 1, kMilli}.at(Below(4));
    }
  }

  // Opening a key whose time is over removes it. Not always: the TTL of a lock's key can be other
  // than its lease.
  void Open(int key) {
    if (model_.At(key).stored == Stored::kPlain || OneIn(2)) OpenAfterItsTime(key);
  }

  void OpenAfterItsTime(int key) {
    const ModelLock& lock = model_.At(key);
    if (lock.stored != Stored::kNothing && !lock.IsHeld(now_ms())) Remove(key);
  }

  void Remove(int key) {
    edge_.Remove(key, now());
    model_.Remove(key);
  }

  // --- Clients

  // In a calm world, where cycles get long, nobody waits twice or behind others.
  int64_t AnyWait(int key, int owner) {
    if (calm_ && (model_.Waits(owner) || !model_.At(key).line.empty())) return 0;
    return OneIn(4) ? 0 : From1To(longest_wait_);
  }

  void Acquire() {
    const int key = AnyKey();
    const int owner = AnyOwner();
    const Ask ask{.key = key,
                  .owner = owner,
                  .lease = From1To(longest_lease_),
                  .wait = AnyWait(key, owner),
                  .call = next_call_++,
                  .refused = OneIn(32),
                  .dies = OneIn(16)};
    event_ = {"acquire", ask.key, ask.owner, ask.lease, ask.wait};
    Open(ask.key);
    const ModelLock before = model_.At(ask.key);
    const auto own = model_.FindOwn(ask.key, ask.owner);
    const int older = own == model_.At(ask.key).line.end() ? 0 : own->call;
    const int fewest = model_.FewestSteps(ask.owner, ask.key, now_ms());

    std::vector<WaitQueue::Step> cycle;
    const Answer answer = edge_.Acquire(ask, fine_now(), cycle);
    EXPECT_EQ(answer, model_.Acquire(ask, now_us_));
    switch (answer.reply) {
      case Reply::kToken:
        ExpectGrant(ask.key, ask.owner, answer.outcome, answer.token);
        // A newcomer passes those who wait only if it is the holder already.
        EXPECT_TRUE(before.line.empty() || before.holder == ask.owner) << "overtaken";
        WasTold(ask.key, ask.owner);
        Count(answer.outcome == Outcome::kHeldAlready ? kGrantedAgain
              : before.stored == Stored::kPlain       ? kConvertedPlain
                                                      : kGrantedAtOnce);
        break;
      case Reply::kNull:
        Count(answer.outcome == Outcome::kHeldByOther ? kOneTryHeld : kOneTryOthersWait);
        break;
      case Reply::kWaits:
        waits_.emplace(ask.call, ask.key);
        Count(answer.outcome == Outcome::kHeldByOther ? kBeganToWait : kBeganToWaitForAFreeLock);
        break;
      case Reply::kTookOver:
        ExpectOneAnswer(older);
        waits_.emplace(ask.call, ask.key);
        Count(kTookOver);
        break;
      case Reply::kDeadlock:
        ExpectRealCycle(cycle, ask.owner, ask.key, fewest);
        Count(kDeadlock);
        break;
    }
  }

  // Looks for a cycle without beginning to wait.
  void Probe() {
    const int key = AnyKey();
    const int owner = AnyOwner();
    event_ = {"probe", key, owner, 0, 0};
    Open(key);
    ModelLock& lock = model_.At(key);
    if (lock.IsHeld(now_ms()) && lock.holder == owner) return;
    if (model_.FindOwn(key, owner) != lock.line.end()) return;
    const int fewest = model_.FewestSteps(owner, key, now_ms());
    ExpectRealCycle(edge_.FindCycle(owner, key, now()), owner, key, fewest);
  }

  // Mostly by the holder.
  int AnyReleaser(int key) {
    const int holder = model_.At(key).holder;
    return holder == kNobody || OneIn(5) ? AnyOwner() : holder;
  }

  void Release() {
    const int key = AnyKey();
    const int owner = AnyReleaser(key);
    event_ = {"release", key, owner, 0, 0};
    if (!OneIn(releases_one_in_)) return;
    Open(key);
    const Outcome outcome = model_.Release(key, owner, now_ms());
    EXPECT_EQ(edge_.Release(key, owner, now()), outcome);
    Count(outcome == Outcome::kReleased     ? kReleased
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
    if (outcome != Outcome::kTouched) return;
    WasTold(key, owner);
    Count(kTouched);
  }

  // CLIENT UNBLOCK, CLIENT KILL, a closed connection: at any time, from any place.
  void Cancel() {
    if (waits_.empty() || (calm_ && !OneIn(10))) return;
    auto waiting = waits_.begin();
    std::advance(waiting, Below(std::min<uint64_t>(waits_.size(), 8)));
    const auto [call, key] = *waiting;
    event_ = {"cancel", key, 0, call, 0};
    edge_.Leave(call);
    model_.Leave(key, call);
    ExpectOneAnswer(call);
    Count(kCancelled);
  }

  // --- Strangers, and the server itself

  void ServerExpires() {
    const int key = AnyKey();
    event_ = {"expire", key, 0, 0, 0};
    const ModelLock& lock = model_.At(key);
    if (lock.stored == Stored::kNothing || lock.IsHeld(now_ms())) return;
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
    if (model_.At(key).stored != Stored::kNothing) {
      if (model_.At(key).stored == Stored::kPlain && strangers_) SetPlain(key, end);
      return;
    }
    // A value that is nobody's name, one too long to be, and none.
    edge_.Set(key, std::array<std::string, 3>{"stranger", std::string(300, 'z'), ""}.at(Below(3)),
              ToMoment(end), now());
    model_.Set(key, kNobody, end);
    Count(kPlainAppeared);
  }

  // PEXPIRE, PERSIST.
  void SetPlain(int key, int64_t end) {
    edge_.Set(key, *edge_.SlotOf(key).plain, ToMoment(end), now());
    model_.Set(key, model_.At(key).holder, end);
    Count(kPlainChangedItsTtl);
  }

  // SET, with the name of one who may wait.
  void StrangerSets() {
    const int key = AnyKey();
    const int owner = AnyOwner();
    const int64_t end = AnyPlainEnd();
    event_ = {"SET", key, owner, end, 0};
    Count(model_.At(key).stored == Stored::kLock ? kPlainOverALock : kPlainAppeared);
    edge_.Set(key, std::string(edge_.OwnerOf(owner).bytes), ToMoment(end), now());
    model_.Set(key, owner, end);
  }

  void Rename() {
    const int from = AnyKey();
    const int to = AnyKey();
    event_ = {"rename", from, 0, to, 0};
    if (from == to || model_.At(from).stored == Stored::kNothing) return;
    edge_.Rename(from, to, now());
    model_.Rename(from, to);
    Count(kRenamed);
  }

  void Flush() {
    event_ = {.what = "flush"};
    for (int key = 0; key < keys_; ++key) {
      edge_.SlotOf(key) = Edge::Slot();
      model_.Remove(key);
    }
    edge_.AllKeysChanged(keys_, now());
    Count(kFlushed);
  }

  void SwapDatabases() {
    if (databases_ < 2) return;
    event_ = {.what = "swap"};
    for (int key = 0; key + 1 < keys_; key += 2) {
      std::swap(edge_.SlotOf(key), edge_.SlotOf(key + 1));
      model_.Swap(key, key + 1);
    }
    edge_.AllKeysChanged(keys_, now());
    Count(kSwapped);
  }

  // A hold that was over may be live again. Lines that were told so hear of it when they are
  // settled; so that comes at once.
  void ClockGoesBack() {
    if (paused_) return;
    event_ = {.what = "the clock goes back"};
    now_us_ -= static_cast<int64_t>(Below(30 * kMilli));
    BeforeSleep();
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
    TakeBack();
    Settle();
  }

  void TimeOut() {
    const std::vector<int> calls = model_.TimeOut(now_ms());
    for (const int call : calls) {
      if (edge_.parked.at(call)->deadline() == now()) Count(kTimedOutToTheMillisecond);
      ExpectOneAnswer(call);
      Count(kTimedOut);
    }
    EXPECT_EQ(edge_.TimeOut(now()), calls);
  }

  void TakeBack() {
    for (const Undelivered& grant : std::exchange(undelivered_, {})) {
      OpenAfterItsTime(grant.key);
      const ModelLock& lock = model_.At(grant.key);
      const bool current =
          lock.stored == Stored::kLock && lock.token == grant.token && lock.IsHeld(now_ms());
      const Token token{static_cast<uint64_t>(grant.token)};
      EXPECT_EQ(IsCurrent(edge_.PlaceOf(grant.key), token, now()), current);
      Count(current ? kTakenBack : kTakenBackTooLate);
      if (!current) continue;
      EXPECT_EQ(edge_.Release(grant.key, grant.owner, now()), Outcome::kReleased);
      EXPECT_EQ(model_.Release(grant.key, grant.owner, now_ms()), Outcome::kReleased);
    }
  }

  void WasTold(int key, int owner) {
    std::erase_if(undelivered_, [&](const Undelivered& grant) {
      return grant.key == key && grant.owner == owner;
    });
  }

  void Settle() {
    int lines = 0;
    while (const WaitQueue::Line* line = edge_.queue.FirstWoken(now())) {
      const int key = edge_.KeyOf(line->lock());
      ASSERT_GE(key, 0);
      ASSERT_LE(++lines, keys_) << "a line wakes again and again";
      if (model_.At(key).stored == Stored::kPlain) OpenAfterItsTime(key);
      EXPECT_TRUE(model_.IsToBeLookedAt(key, now_ms())) << "key " << key << " woke for nothing";
      const std::deque<ModelWait> before = model_.At(key).line;
      const std::vector<Turn> turns = model_.Settle(key, now_us_);
      EXPECT_EQ(edge_.SettleLine(key, fine_now()), turns) << "key " << key;
      for (size_t i = 0; i < turns.size(); ++i) ExpectTurn(key, turns[i], before, i);
    }
    for (int key = 0; key < keys_; ++key) {
      EXPECT_FALSE(model_.IsToBeLookedAt(key, now_ms())) << "key " << key << " did not wake";
      if (edge_.queue.Find(edge_.NameOf(key)) == nullptr) continue;
      const std::optional<Holder> holder = HolderOf(edge_.PlaceOf(key), now());
      EXPECT_TRUE(holder.has_value() && holder->end >= now()) << "a free lock with a waiter";
    }
  }

  void ExpectTurn(int key, const Turn& turn, const std::deque<ModelWait>& line, size_t place) {
    ASSERT_LT(place, line.size());
    const ModelWait& wait = line[place];
    EXPECT_EQ(turn.call, wait.call);
    for (size_t i = place + 1; i < line.size(); ++i) {
      EXPECT_LT(wait.arrival, line[i].arrival) << "overtaken";
    }
    ExpectOneAnswer(turn.call);
    if (turn.refused) {
      Count(kRefusedAtItsTurn);
      return;
    }
    ExpectGrant(key, wait.owner, turn.outcome, turn.token);
    Count(turn.outcome == Outcome::kGranted ? kHandedOver : kHandedToOneThatHeldIt);
    if (wait.dies) undelivered_.push_back({key, wait.owner, turn.token});
  }

  // --- Checks

  void ExpectOneAnswer(int call) {
    EXPECT_EQ(waits_.erase(call), 1U) << "call " << call << " was answered before, or never waited";
  }

  void ExpectGrant(int key, int owner, Outcome outcome, int64_t token) {
    const auto holder = HolderOf(edge_.PlaceOf(key), now());
    EXPECT_TRUE(holder.has_value() && holder->owner == edge_.OwnerOf(owner));
    if (outcome != Outcome::kGranted) return;
    EXPECT_GT(token, highest_token_) << "tokens do not rise";
    highest_token_ = token;
  }

  void ExpectRealCycle(const std::vector<WaitQueue::Step>& cycle, int owner, int key, int fewest) {
    EXPECT_EQ(static_cast<int>(cycle.size()), fewest)
        << (fewest == 0 ? "a false deadlock" : "a missed deadlock, or not the shortest");
    bool by_order_alone = !cycle.empty();
    bool across_databases = false;
    for (size_t i = 0; i < cycle.size(); ++i) {
      const int from = edge_.NumberOf(cycle[i].owner);
      const int over = edge_.KeyOf(cycle[i].lock);
      const int to = edge_.NumberOf(cycle[(i + 1) % cycle.size()].owner);
      ASSERT_GE(over, 0);
      ASSERT_NE(from, kNobody);
      ASSERT_NE(to, kNobody);
      ModelLock& lock = model_.At(over);
      size_t place = lock.line.size();
      if (i == 0) {
        EXPECT_EQ(from, owner);
        EXPECT_EQ(over, key);
      } else {
        const auto own = model_.FindOwn(over, from);
        ASSERT_NE(own, lock.line.end()) << "step " << i << " does not wait";
        place = static_cast<size_t>(own - lock.line.begin());
      }
      EXPECT_TRUE(model_.IsBefore(to, over, place, now_ms())) << "step " << i << " is not blocked";
      by_order_alone &= !lock.IsHeld(now_ms()) || lock.holder != to;
      across_databases |= cycle[i].lock.db != cycle[0].lock.db;
    }
    if (cycle.size() == 2) Count(kCycleOfTwo);
    if (cycle.size() == 3) Count(kCycleOfThree);
    if (cycle.size() > 3) Count(kCycleOfMore);
    if (by_order_alone) Count(kCycleByQueueOrderAlone);
    if (across_databases) Count(kCycleAcrossDatabases);
  }

  // The edge and the model agree on everything that can be seen.
  void Compare() {
    EXPECT_EQ(FromMoment(edge_.queue.NextDue()), model_.NextDue());
    EXPECT_EQ(edge_.queue.size(), model_.Waiting());
    EXPECT_EQ(edge_.queue.empty(), model_.Waiting() == 0);
    EXPECT_EQ(edge_.parked.size(), waits_.size());
    EXPECT_EQ(edge_.clock.last().value, static_cast<uint64_t>(model_.last_token));
    std::bitset<kMostOwners> seen;
    for (int key = 0; key < keys_; ++key) {
      const ModelLock& lock = model_.At(key);
      EXPECT_TRUE(SameLine(key, lock)) << "key " << key << ": the line differs";
      EXPECT_TRUE(SameStored(key, lock)) << "key " << key << ": what is stored differs";
      if (lock.line.size() >= 10) Count(kLineOfTenOrMore);
      for (const ModelWait& wait : lock.line) {
        const auto owner = static_cast<size_t>(wait.owner);
        if (seen.test(owner)) Count(kWaitsInSeveralLines);
        seen.set(owner);
      }
    }
    // Of one pair a step, who waits where.
    const int key = AnyKey();
    const int owner = AnyOwner();
    const auto own = model_.FindOwn(key, owner);
    const WaitQueue::Waiter* waiter =
        edge_.queue.FindWaiter(edge_.NameOf(key), edge_.OwnerOf(owner));
    EXPECT_EQ(waiter == nullptr ? 0 : static_cast<const Edge::Parked*>(waiter)->asked.call,
              own == model_.At(key).line.end() ? 0 : own->call);
  }

  bool SameLine(int key, const ModelLock& lock) {
    const WaitQueue::Line* line = edge_.queue.Find(edge_.NameOf(key));
    if (line == nullptr) return lock.line.empty();
    if (line->size() != lock.line.size()) return false;
    const WaitQueue::Waiter* waiter = line->first();
    for (const ModelWait& wait : lock.line) {
      if (waiter == nullptr || !waiter->in_line()) return false;
      if (static_cast<const Edge::Parked*>(waiter)->asked.call != wait.call) return false;
      if (FromMoment(waiter->deadline()) != wait.deadline) return false;
      waiter = waiter->behind();
    }
    return waiter == nullptr;
  }

  bool SameStored(int key, const ModelLock& lock) {
    const Edge::Slot& slot = edge_.SlotOf(key);
    switch (lock.stored) {
      case Stored::kNothing:
        return slot.lock == nullptr && !slot.plain.has_value();
      case Stored::kPlain:
        return slot.lock == nullptr && slot.plain.has_value() &&
               FromMoment(slot.plain_end) == lock.end &&
               edge_.NumberOf(Owner{*slot.plain}) == lock.holder;
      case Stored::kLock:
        break;
    }
    if (slot.lock == nullptr || slot.plain.has_value()) return false;
    const Hold hold = slot.lock->hold();
    return hold.owner == edge_.OwnerOf(lock.holder) &&
           hold.token.value == static_cast<uint64_t>(lock.token) &&
           FromMoment(hold.end) == lock.end;
  }

  // In any order; and then nothing is left.
  void EverybodyLeaves() {
    event_ = {.what = "everybody leaves"};
    while (!waits_.empty()) {
      Cancel();
      if (OneIn(4)) BeforeSleep();
      Compare();
      if (testing::Test::HasFailure()) return;
    }
    EXPECT_TRUE(edge_.queue.empty());
    EXPECT_EQ(edge_.queue.size(), 0U);
    EXPECT_EQ(edge_.queue.NextDue(), kMaxInstant);
    EXPECT_EQ(edge_.queue.FirstWoken(kMaxInstant), nullptr);
    EXPECT_EQ(edge_.queue.FirstTimedOut(kMaxInstant), nullptr);
    EXPECT_TRUE(edge_.parked.empty());
  }

  std::mt19937_64 random_;
  Coverage& coverage_;

  // The world of this history.
  const bool calm_;
  const int owners_;
  const int databases_;
  const int keys_;
  const int64_t longest_lease_;
  const int64_t longest_wait_;
  const uint64_t releases_one_in_;
  const uint64_t settles_one_in_;
  const bool strangers_;

  int64_t now_us_ = int64_t{1'700'000'000'000} * kMilli;
  bool paused_ = false;
  int next_call_ = 1;
  int64_t highest_token_ = 0;
  Event event_;

  Edge edge_;
  Model model_;
  std::map<int, int> waits_;  // who waits and has no answer yet: call, key
  std::vector<Undelivered> undelivered_;
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
  RunHistories(1, 1'500, 1'000, coverage);
  if (HasFailure()) return;
  EXPECT_GE(std::accumulate(coverage.begin(), coverage.begin() + kEvents, int64_t{0}), 1'000'000);
  for (size_t thing = 0; thing < kThings; ++thing) {
    EXPECT_GE(coverage.at(thing), 100) << "thing number " << thing << " hardly ever happened";
  }
}

TEST(WaitingHistoryLong, AgreesWithTheModel) {
  Coverage coverage{};
  RunHistories(1'000'000, 60'000, 1'000, coverage);
}

}  // namespace
}  // namespace turnstile
