// Detection of waits that would never end.

#include "core/deadlock.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/decide.h"
#include "core/lock.h"
#include "core/wait_queue.h"

namespace turnstile {
namespace {

using Waiter = WaitQueue::Waiter;
using Texts = std::vector<std::string>;
using Locks = std::vector<LockName>;

constexpr Instant At(int64_t ms) { return Instant{Millis{ms}}; }

constexpr Instant kNow = At(1'000);
constexpr Instant kLate = At(1'000'000);
constexpr Tick kTickNow{Millis{1'000}};
constexpr Tick kLateTick{Millis{1'000'000}};
constexpr Millis kLease{30};

constexpr LockName kA{0, "a"};
constexpr LockName kB{0, "b"};
constexpr LockName kC{0, "c"};
constexpr LockName kD{0, "d"};
constexpr LockName kOtherA{1, "a"};

AcquireRequest Exclusive() { return {.owner = {}, .lease = kLease}; }
AcquireRequest Shared() { return {.owner = {}, .lease = kLease, .mode = Mode::kShared}; }
AcquireRequest Limit(uint32_t limit) {
  return {.owner = {}, .lease = kLease, .mode = Mode::kLimit, .limit = limit};
}

AcquireRequest Limit(uint32_t limit, uint32_t weight) {
  AcquireRequest request = Limit(limit);
  request.weight = weight;
  return request;
}
AcquireRequest Tagged(AcquireRequest request, std::string_view tag) {
  request.tag = tag;
  return request;
}

// The keys of a server, as far as locks are concerned.
class Keyspace {
 public:
  void Add(LockName lock, Mode mode, std::string_view owner, Instant end, Millis linger,
           std::string_view tag = "") {
    Value& value = values_[KeyOf(lock)];
    const Hold hold{.owner = Owner{owner},
                    .token = Token{++tokens_},
                    .since = kMinInstant,
                    .end = end,
                    .linger = linger,
                    .tag = tag};
    Put(value, Apply(value.lock.get(), HoldSet{mode, hold}));
  }
  // Adds many holders at once; one by one would be slow.
  void AddMany(LockName lock, Mode mode, const std::deque<std::string>& owners) {
    std::vector<Hold> holds;
    for (const std::string& owner : owners) {
      holds.push_back(
          {.owner = Owner{owner}, .token = Token{++tokens_}, .since = kMinInstant, .end = kLate});
    }
    values_[KeyOf(lock)].lock.reset(Lock::Make(mode, holds));
  }
  void Remove(LockName lock, std::string_view owner) {
    Value& value = values_.at(KeyOf(lock));
    Put(value, Apply(value.lock.get(), HoldEnded{Owner{owner}}));
    if (value.lock == nullptr) values_.erase(KeyOf(lock));
  }
  void SetString(LockName lock, std::string_view text, Instant end) {
    values_[KeyOf(lock)] = Value{nullptr, std::pair(std::string(text), end)};
  }
  void Delete(LockName lock) { values_.erase(KeyOf(lock)); }

  bool Has(LockName lock) const { return values_.contains(KeyOf(lock)); }

  KeyState At(LockName lock) const {
    KeyState state;
    const auto found = values_.find(KeyOf(lock));
    if (found == values_.end()) return state;
    const Value& value = found->second;
    state.lock = value.lock.get();
    if (value.text.has_value()) state.plain = PlainLock{value.text->first, value.text->second};
    return state;
  }

  // The live holders of the lock.
  Texts Holders(LockName lock, Instant now) const {
    const KeyState state = At(lock);
    Texts owners;
    if (state.plain.has_value() && state.plain->LiveAt(now)) {
      owners.emplace_back(state.plain->value);
    }
    for (size_t i = 0; state.lock != nullptr && i < state.lock->size(); ++i) {
      const Hold hold = state.lock->at(Lock::Order::kByOwner, i);
      if (hold.LiveAt(now)) owners.emplace_back(hold.owner.bytes);
    }
    return owners;
  }

  std::vector<CycleStep> FindCycle(WaitQueue& queue, const Waiter& waiter,
                                   std::span<Waiter* const> ignored, Instant now) const {
    const auto show = [this](LockName lock, const auto& see) { see(At(lock)); };
    const auto is_leaving = [&](const Waiter& other) {
      return std::find(ignored.begin(), ignored.end(), &other) != ignored.end();
    };
    return turnstile::FindCycle(queue, waiter, is_leaving, now, show);
  }

 private:
  struct Value {
    std::unique_ptr<Lock> lock;
    std::optional<std::pair<std::string, Instant>> text;
  };
  using Key = std::pair<int, std::string>;

  static Key KeyOf(LockName lock) { return {lock.db, std::string(lock.key)}; }
  static void Put(Value& value, Lock* lock) {
    value.text.reset();
    if (lock != value.lock.get()) value.lock.reset(lock);
  }

  std::map<Key, Value> values_;
  uint64_t tokens_ = 0;
};

class DeadlockTest : public testing::Test {
 protected:
  void TearDown() override {
    while (Waiter* waiter = queue_.FirstTimedOut(Tick::max())) queue_.Leave(*waiter);
  }

  Waiter& Enter(std::string_view owner, const Locks& locks, const AcquireRequest& request,
                bool upgrade = false) {
    Waiter& waiter = calls_.emplace_back(request, kTickNow, kLateTick);
    queue_.Enter(waiter, locks, Owner{owner}, upgrade);
    queue_.Block(waiter, 0, std::nullopt);
    return waiter;
  }
  Waiter& Enter(std::string_view owner, LockName lock,
                const AcquireRequest& request = Exclusive()) {
    return Enter(owner, Locks{lock}, request);
  }
  Waiter& EnterUpgrade(std::string_view owner, LockName lock) {
    return Enter(owner, Locks{lock}, Exclusive(), /*upgrade=*/true);
  }

  // An exclusive holder.
  void SetHolder(LockName lock, std::string_view owner, Instant end = kLate) {
    keys_.Delete(lock);
    keys_.Add(lock, Mode::kExclusive, owner, end, Millis{0});
  }
  // Adds a holder.
  void AddHolder(LockName lock, Mode mode, std::string_view owner, Instant end = kLate,
                 Millis linger = Millis{0}) {
    keys_.Add(lock, mode, owner, end, linger);
  }
  void RemoveHolder(LockName lock, std::string_view owner) { keys_.Remove(lock, owner); }
  void ClearHolder(LockName lock) { keys_.Delete(lock); }

  // `owner` waits for `lock`, which `holder` holds.
  Waiter& EnterHeld(std::string_view owner, LockName lock, std::string_view holder,
                    Instant end = kLate) {
    Waiter& waiter = Enter(owner, lock);
    SetHolder(lock, holder, end);
    return waiter;
  }

  // One text per step, for example "ann waits for 0:b".
  static Texts TextsOf(const std::vector<CycleStep>& steps) {
    Texts texts;
    for (const CycleStep& step : steps) {
      texts.push_back(std::string(step.name) + " waits for " + std::to_string(step.lock.db) + ":" +
                      std::string(step.lock.key));
    }
    return texts;
  }

  // The cycle that a wait already in the queue has closed.
  Texts CycleOf(const Waiter& waiter, const std::vector<Waiter*>& ignored = {},
                Instant now = kNow) {
    return TextsOf(keys_.FindCycle(queue_, waiter, ignored, now));
  }

  // The cycle that this wait would close. If the lock has no holder, `holder` becomes one.
  Texts CycleOf(std::string_view owner, LockName lock, std::optional<std::string_view> holder,
                Instant now = kNow) {
    const bool is_free = !keys_.Has(lock);
    if (is_free && holder.has_value()) SetHolder(lock, *holder);
    Waiter waiter(Exclusive(), kTickNow, kLateTick);
    queue_.Enter(waiter, std::span(&lock, 1), Owner{owner}, /*upgrade=*/false);
    Texts texts = CycleOf(waiter, {}, now);
    queue_.Leave(waiter);
    if (is_free) ClearHolder(lock);
    return texts;
  }
  Texts CycleOf(std::string_view owner, const Locks& locks, const AcquireRequest& request) {
    Waiter waiter(request, kTickNow, kLateTick);
    queue_.Enter(waiter, locks, Owner{owner}, /*upgrade=*/false);
    Texts texts = CycleOf(waiter);
    queue_.Leave(waiter);
    return texts;
  }

  std::deque<Waiter> calls_;
  WaitQueue queue_;
  Keyspace keys_;
};

// --- Cycles -----------------------------------------------------------------------------------

TEST_F(DeadlockTest, NoCycleWhenNobodyWaits) {
  EXPECT_EQ(CycleOf("ann", kA, "bob"), Texts{});
  EXPECT_EQ(CycleOf("ann", kA, std::nullopt), Texts{});
}

TEST_F(DeadlockTest, NoCycleWhenNobodyWaitsForRequester) {
  EnterHeld("bob", kA, "cid");
  EnterHeld("cid", kB, "dan");
  EnterHeld("ann", kC, "bob");                    // the requester itself waits, for others
  EXPECT_EQ(CycleOf("ann", kD, "bob"), Texts{});  // the holder of d waits
  EXPECT_EQ(CycleOf("ann", kA, "cid"), Texts{});  // a has a queue
  EXPECT_EQ(CycleOf("eve", kA, "cid"), Texts{});  // eve neither holds nor waits
  EXPECT_EQ(CycleOf("dan", kD, "somebody"),
            Texts{});  // somebody waits for dan; dan waits for an owner that does not wait
}

TEST_F(DeadlockTest, FindsCycleOfTwo) {
  EnterHeld("ann", kA, "bob");
  const Texts expected = {"bob waits for 0:b", "ann waits for 0:a"};
  EXPECT_EQ(CycleOf("bob", kB, "ann"), expected);
  EXPECT_EQ(CycleOf("bob", kB, "ann"), expected) << "looking changes nothing";
  EXPECT_EQ(queue_.Find(kB), nullptr);
  EXPECT_EQ(queue_.size(), 1U);
  EXPECT_EQ(CycleOf("ann", kB, "bob"), Texts{}) << "the other way round there is none";
}

TEST_F(DeadlockTest, FindsCycleOfThree) {
  EnterHeld("ann", kA, "bob");
  EnterHeld("bob", kB, "cid");
  EXPECT_EQ(CycleOf("cid", kC, "ann"),
            (Texts{"cid waits for 0:c", "ann waits for 0:a", "bob waits for 0:b"}));
  EXPECT_EQ(CycleOf("cid", kC, "bob"), (Texts{"cid waits for 0:c", "bob waits for 0:b"}));
}

TEST_F(DeadlockTest, FindsLongCycle) {
  constexpr int kOwners = 2'000;
  const auto owner = [](int i) { return "owner-" + std::to_string(i); };
  const auto key = [](int i) { return "key-" + std::to_string(i); };
  // Owner i waits for lock i, which owner i + 1 holds.
  for (int i = 0; i + 1 < kOwners; ++i) EnterHeld(owner(i), {0, key(i)}, owner(i + 1));
  const std::string last_key = key(kOwners - 1);
  Waiter& last = EnterHeld(owner(kOwners - 1), {0, last_key}, owner(0));
  const std::vector<CycleStep> steps = keys_.FindCycle(queue_, last, {}, kNow);
  ASSERT_EQ(steps.size(), size_t{kOwners});
  EXPECT_EQ(steps[0].lock.key, last_key);
  for (int i = 1; i < kOwners; ++i) {
    EXPECT_EQ(steps[static_cast<size_t>(i)].name, owner(i - 1));
    EXPECT_EQ(steps[static_cast<size_t>(i)].lock.key, key(i - 1));
  }
}

TEST_F(DeadlockTest, FindsCycleWithFewestSteps) {
  // Long cycle: dan -> ann -> bob -> cid -> dan. Short cycle, through another wait of ann: dan ->
  // ann -> cid -> dan.
  EnterHeld("cid", kC, "dan");
  EnterHeld("bob", kB, "cid");
  const Texts fewest = {"dan waits for 0:d", "ann waits for 1:a", "cid waits for 0:c"};
  Waiter& long_way = EnterHeld("ann", kA, "bob");
  EnterHeld("ann", kOtherA, "cid");
  EXPECT_EQ(CycleOf("dan", kD, "ann"), fewest);
  // The order in which ann's waits began must not matter.
  queue_.Leave(long_way);
  EXPECT_EQ(CycleOf("dan", kD, "ann"), fewest);
  EnterHeld("ann", kA, "bob");
  EXPECT_EQ(CycleOf("dan", kD, "ann"), fewest);
}

TEST_F(DeadlockTest, HolderAndWaiterAheadAreOneStepAway) {
  // ann requests d: its holder bob leads to a long chain, cid in its queue waits for ann.
  EnterHeld("bob", kA, "eve");
  EnterHeld("eve", kB, "ann");
  EnterHeld("cid", kC, "ann");
  EnterHeld("cid", kD, "bob");
  EXPECT_EQ(CycleOf("ann", kD, "bob"), (Texts{"ann waits for 0:d", "cid waits for 0:c"}));
}

// A waiter ahead will get the lock first.
TEST_F(DeadlockTest, WaiterAheadThatWaitsForRequesterClosesCycle) {
  EnterHeld("bob", kA, "ann");
  EnterHeld("bob", kB, "stranger");
  EXPECT_EQ(CycleOf("ann", kB, "stranger"), (Texts{"ann waits for 0:b", "bob waits for 0:a"}));
  EXPECT_EQ(CycleOf("ann", kB, std::nullopt), (Texts{"ann waits for 0:b", "bob waits for 0:a"}));
}

TEST_F(DeadlockTest, QueueOrderClosesCycleAlongPath) {
  // bob waits behind ann for b; cid holds c and requests what bob holds.
  EnterHeld("ann", kB, "stranger");
  Enter("bob", kB);
  EXPECT_EQ(CycleOf("ann", kC, "bob"), (Texts{"ann waits for 0:c", "bob waits for 0:b"}));
  EXPECT_EQ(CycleOf("bob", kC, "ann"), Texts{}) << "nobody waits for those behind";

  Enter("cid", kB);
  EXPECT_EQ(CycleOf("ann", kC, "cid"), (Texts{"ann waits for 0:c", "cid waits for 0:b"}))
      << "for all ahead, not only for the next one";
  EXPECT_EQ(CycleOf("bob", kC, "cid"), (Texts{"bob waits for 0:c", "cid waits for 0:b"}));
  EXPECT_EQ(CycleOf("cid", kC, "ann"), Texts{});
}

TEST_F(DeadlockTest, QueueIsSearchedFromEveryPositionReached) {
  // Everybody waits for d, eve first. The search from ann's position reaches eve too.
  EnterHeld("eve", kD, "stranger");
  Enter("ann", kD);
  Enter("bob", kD);
  // cid requests c, held by ann: the queue of d is searched upwards from ann. Then by bob.
  EnterHeld("bob", kC, "ann");
  EnterHeld("eve", kA, "cid");
  EXPECT_EQ(CycleOf("cid", kC, "ann"),
            (Texts{"cid waits for 0:c", "ann waits for 0:d", "eve waits for 0:a"}));
  EXPECT_EQ(CycleOf("cid", kB, "bob"),
            (Texts{"cid waits for 0:b", "bob waits for 0:d", "eve waits for 0:a"}));
}

TEST_F(DeadlockTest, EndedHoldClosesNoCycle) {
  EnterHeld("ann", kA, "bob", At(2'000));
  EXPECT_EQ(CycleOf("bob", kB, "ann", At(2'000)).size(), 2U);
  EXPECT_EQ(CycleOf("bob", kB, "ann", At(2'001)), Texts{});
  EXPECT_EQ(CycleOf("bob", kB, "ann", At(2'000)).size(), 2U) << "looking changes nothing";
}

TEST_F(DeadlockTest, CycleDisappearsWithAnyOfItsSteps) {
  Waiter& ann = EnterHeld("ann", kA, "bob");
  Enter("dan", kA);
  EXPECT_EQ(CycleOf("bob", kB, "ann").size(), 2U);
  queue_.Leave(ann);  // timed out
  EXPECT_EQ(CycleOf("bob", kB, "ann"), Texts{});
  EXPECT_EQ(CycleOf("bob", kB, "dan").size(), 2U);
  ClearHolder(kA);  // bob released it
  EXPECT_EQ(CycleOf("bob", kB, "dan"), Texts{});
}

TEST_F(DeadlockTest, OwnerWaitingForSeveralLocksClosesCycle) {
  Enter("ann", kA);
  EnterHeld("ann", kB, "bob");
  Enter("ann", kC);
  EXPECT_EQ(CycleOf("bob", kD, "ann"), (Texts{"bob waits for 0:d", "ann waits for 0:b"}));
}

TEST_F(DeadlockTest, FindsCycleAcrossDatabases) {
  EnterHeld("ann", kOtherA, "bob");
  EXPECT_EQ(CycleOf("bob", kA, "ann"), (Texts{"bob waits for 0:a", "ann waits for 1:a"}));
  EnterHeld("bob", {7, "a"}, "cid");
  EXPECT_EQ(CycleOf("cid", kA, "ann"),
            (Texts{"cid waits for 0:a", "ann waits for 1:a", "bob waits for 7:a"}));
}

TEST_F(DeadlockTest, CycleAmongOthersIsNotReported) {
  // Another client's SET made ann and bob wait for each other. cid waits for them, and holds
  // something that neither of them wants.
  EnterHeld("ann", kA, "bob");
  EnterHeld("bob", kB, "ann");
  EnterHeld("dan", kC, "cid");
  EXPECT_EQ(CycleOf("cid", kD, "ann"), Texts{});
  EXPECT_EQ(CycleOf("cid", kA, "bob"), Texts{});
  EXPECT_EQ(CycleOf("ann", kD, "bob"), (Texts{"ann waits for 0:d", "bob waits for 0:b"}));
}

TEST_F(DeadlockTest, NewerCallCountsAfterTakeOver) {
  Waiter& older = EnterHeld("ann", kA, "bob");
  Enter("cid", kA);
  Waiter& newer = calls_.emplace_back(Exclusive(), kTickNow, kLateTick);
  queue_.TakeOver(newer, older);
  EXPECT_EQ(CycleOf("bob", kB, "ann").size(), 2U);
  EXPECT_EQ(CycleOf("ann", kB, "cid"), (Texts{"ann waits for 0:b", "cid waits for 0:a"}));
}

// The caller's strings live for one command only; the cycle outlives it.
TEST_F(DeadlockTest, CycleRefersToStringsOwnedByQueue) {
  EnterHeld("ann", kA, "bob");
  SetHolder(kB, "ann");
  std::string key = "b";
  std::string owner = "bob";
  const Waiter& waiter = Enter(owner, {0, key});
  const std::vector<CycleStep> cycle = keys_.FindCycle(queue_, waiter, {}, kNow);
  key = "?";
  owner = "???";
  keys_ = Keyspace();
  EXPECT_EQ(TextsOf(cycle), (Texts{"bob waits for 0:b", "ann waits for 0:a"}));
}

// --- Which holders are waited for -------------------------------------------------------------

// ann requests a, which bob holds; bob waits for ann.
class HolderEdgeTest : public DeadlockTest {
 protected:
  void SetUp() override { EnterHeld("bob", kB, "ann"); }

  bool IsEdge(const AcquireRequest& request) {
    const Texts cycle = CycleOf("ann", Locks{kA}, request);
    if (!cycle.empty()) {
      EXPECT_EQ(cycle, (Texts{"ann waits for 0:a", "bob waits for 0:b"}));
    }
    return !cycle.empty();
  }
};

TEST_F(HolderEdgeTest, EveryModeWaitsForExclusiveHolder) {
  SetHolder(kA, "bob");
  EXPECT_TRUE(IsEdge(Exclusive()));
  EXPECT_TRUE(IsEdge(Shared()));
  EXPECT_TRUE(IsEdge(Limit(1)));
  EXPECT_TRUE(IsEdge(Limit(9)));
}

TEST_F(HolderEdgeTest, EveryModeButSharedWaitsForSharedHolder) {
  AddHolder(kA, Mode::kShared, "zoe");
  AddHolder(kA, Mode::kShared, "bob");
  EXPECT_TRUE(IsEdge(Exclusive()));
  EXPECT_FALSE(IsEdge(Shared()));
  EXPECT_TRUE(IsEdge(Limit(1)));
  EXPECT_TRUE(IsEdge(Limit(9)));
}

TEST_F(HolderEdgeTest, OnlyLimitOneWaitsForLimitHolder) {
  AddHolder(kA, Mode::kLimit, "zoe");
  AddHolder(kA, Mode::kLimit, "bob");
  EXPECT_TRUE(IsEdge(Exclusive()));
  EXPECT_TRUE(IsEdge(Shared()));
  EXPECT_TRUE(IsEdge(Limit(1))) << "it must be alone";
  EXPECT_FALSE(IsEdge(Limit(2))) << "zoe may make room";
  EXPECT_FALSE(IsEdge(Limit(9)));
  RemoveHolder(kA, "zoe");
  EXPECT_FALSE(IsEdge(Limit(2)));
}

// Only what must hold the lock alone waits for each of its holders.
TEST_F(HolderEdgeTest, LimitWaitsForLimitHolderIfAndOnlyIfItTakesAllPermits) {
  AddHolder(kA, Mode::kLimit, "zoe");
  AddHolder(kA, Mode::kLimit, "bob");
  for (uint32_t limit = 1; limit <= 6; ++limit) {
    for (uint32_t weight = 1; weight <= limit; ++weight) {
      EXPECT_EQ(IsEdge(Limit(limit, weight)), weight == limit) << weight << " of " << limit;
    }
  }
  EXPECT_TRUE(IsEdge(Limit(kMaxLimit, kMaxLimit)));
  EXPECT_FALSE(IsEdge(Limit(kMaxLimit, kMaxLimit - 1)));
}

// To holders, not to waiters ahead.
TEST_F(HolderEdgeTest, NoLimitWaitsForLimitAheadWhateverTheirWeights) {
  for (const AcquireRequest& ahead : {Limit(1), Limit(9), Limit(9, 9), Limit(9, 5)}) {
    Waiter& bob = Enter("bob", kA, ahead);
    for (const AcquireRequest& request : {Limit(1), Limit(9), Limit(9, 9), Limit(9, 5)}) {
      EXPECT_FALSE(IsEdge(request));
    }
    EXPECT_TRUE(IsEdge(Exclusive()));
    EXPECT_TRUE(IsEdge(Shared()));
    queue_.Leave(bob);
  }
}

TEST_F(HolderEdgeTest, WeightDoesNotMatterToHoldersOfAnotherKind) {
  AddHolder(kA, Mode::kShared, "bob");
  EXPECT_TRUE(IsEdge(Limit(9, 3)));
  EXPECT_TRUE(IsEdge(Limit(9, 9)));
}

TEST_F(HolderEdgeTest, WaitingLimitHoldersAddNoEdge) {
  Enter("cid", kB);
  AddHolder(kA, Mode::kLimit, "bob");
  AddHolder(kA, Mode::kLimit, "cid");
  EXPECT_FALSE(IsEdge(Limit(2))) << "the time-out answers";
}

TEST_F(HolderEdgeTest, PlainLockIsHeldByItsValue) {
  keys_.SetString(kA, "bob", At(2'000));
  for (const AcquireRequest& request : {Exclusive(), Shared(), Limit(9)}) {
    EXPECT_TRUE(IsEdge(request));
  }
  keys_.SetString(kA, "bob", kMaxInstant);
  EXPECT_TRUE(IsEdge(Exclusive()));
  keys_.SetString(kA, "bob", kNow);
  EXPECT_TRUE(IsEdge(Exclusive())) << "its last millisecond";
  keys_.SetString(kA, "bob", At(999));
  EXPECT_FALSE(IsEdge(Exclusive())) << "it is over";
  keys_.SetString(kA, "bob ", kMaxInstant);
  EXPECT_FALSE(IsEdge(Exclusive())) << "of another owner";
  keys_.SetString(kA, "", kMaxInstant);
  EXPECT_FALSE(IsEdge(Exclusive()));
  keys_.SetString(kA, std::string(1'000, 'b'), kMaxInstant);
  EXPECT_FALSE(IsEdge(Exclusive()));
}

TEST_F(HolderEdgeTest, NobodyWaitsForLingeringHolder) {
  AddHolder(kA, Mode::kExclusive, "bob", At(999), Millis{500});
  EXPECT_FALSE(IsEdge(Exclusive())) << "the linger ends by itself";
  AddHolder(kA, Mode::kExclusive, "bob", kNow, Millis{500});
  EXPECT_TRUE(IsEdge(Exclusive()));
}

// If a lock has more holders than there are waiting owners, the search looks up the latter.
TEST_F(HolderEdgeTest, FindsCycleWithMoreHoldersThanWaiters) {
  for (int i = 0; i < 50; ++i) AddHolder(kA, Mode::kShared, "reader-" + std::to_string(i));
  EXPECT_FALSE(IsEdge(Exclusive()));
  AddHolder(kA, Mode::kShared, "bob", At(999), Millis{500});
  EXPECT_FALSE(IsEdge(Exclusive())) << "it lingers";
  AddHolder(kA, Mode::kShared, "bob", kNow);
  EXPECT_TRUE(IsEdge(Exclusive()));
  EXPECT_FALSE(IsEdge(Shared()));
}

TEST_F(HolderEdgeTest, FindsCycleWithMoreWaitersThanHolders) {
  std::deque<std::string> owners;
  for (int i = 0; i < 50; ++i) Enter(owners.emplace_back("waiter-" + std::to_string(i)), kC);
  AddHolder(kA, Mode::kShared, "zoe");
  AddHolder(kA, Mode::kShared, "bob", At(999), Millis{500});
  EXPECT_FALSE(IsEdge(Exclusive())) << "it lingers";
  AddHolder(kA, Mode::kShared, "bob", kNow);
  EXPECT_TRUE(IsEdge(Exclusive()));
}

// --- Which waiters ahead are waited for -------------------------------------------------------

// ann requests a, for which bob already waits; bob waits for ann.
TEST_F(HolderEdgeTest, IncompatibleWaiterAheadIsWaitedFor) {
  const auto edges = [this](const AcquireRequest& ahead) {
    Waiter& bob = Enter("bob", kA, ahead);
    std::string found;
    if (IsEdge(Exclusive())) found += "exclusive ";
    if (IsEdge(Shared())) found += "shared ";
    if (IsEdge(Limit(1))) found += "limit-1 ";
    if (IsEdge(Limit(9))) found += "limit-9 ";
    queue_.Leave(bob);
    return found;
  };
  EXPECT_EQ(edges(Exclusive()), "exclusive shared limit-1 limit-9 ");
  EXPECT_EQ(edges(Shared()), "exclusive limit-1 limit-9 ");
  EXPECT_EQ(edges(Limit(1)), "exclusive shared ");
  EXPECT_EQ(edges(Limit(9)), "exclusive shared ");
}

TEST_F(DeadlockTest, ReaderWaitsForWriterFurtherAhead) {
  // bob, a writer, waits behind the reader cid for d, and for a lock that ann holds.
  Enter("cid", {kD, kC}, Shared());
  Enter("bob", kD);
  Enter("dan", kD, Shared());
  EnterHeld("bob", kB, "ann");
  EXPECT_EQ(CycleOf("ann", Locks{kD}, Shared()), (Texts{"ann waits for 0:d", "bob waits for 0:b"}));
}

// A search on behalf of a reader skips readers without visiting them. A writer's search must not
// take them for visited.
TEST_F(DeadlockTest, WriterWaitsForReadersThatReaderSkipped) {
  Enter("eve", {kD, kOtherA}, Shared());  // a reader, first in the queue of d ...
  SetHolder(kOtherA, "ann");              // ... which waits for ann
  Enter("rob", kD, Shared());             // a reader behind it
  Enter("wes", kD);                       // and a writer
  Enter("mid", kB, Shared());
  SetHolder(kB, "rob");
  AddHolder(kC, Mode::kShared, "nobody");
  EXPECT_EQ(CycleOf("ann", Locks{kB}, Exclusive()), Texts{}) << "rob waits for no reader";

  // ann waits for rob, a reader, and for wes, a writer. The search starts from rob's position.
  Waiter& wait = Enter("ann", {kB, kC}, Exclusive());
  AddHolder(kC, Mode::kExclusive, "wes");
  EXPECT_EQ(CycleOf(wait), (Texts{"ann waits for 0:c", "wes waits for 0:d", "eve waits for 1:a"}));
}

TEST_F(DeadlockTest, TwoUpgradesDeadlock) {
  EnterUpgrade("ann", kA);
  AddHolder(kA, Mode::kShared, "ann");
  AddHolder(kA, Mode::kShared, "bob");
  AddHolder(kA, Mode::kShared, "cid");
  Waiter& bob = EnterUpgrade("bob", kA);
  EXPECT_EQ(CycleOf(bob), (Texts{"bob waits for 0:a", "ann waits for 0:a"}));
  queue_.Leave(bob);
  EXPECT_EQ(CycleOf("dan", Locks{kA}, Exclusive()), Texts{})
      << "an owner that holds nothing closes no cycle";
  RemoveHolder(kA, "bob");
  EXPECT_EQ(CycleOf("bob", Locks{kA}, Exclusive()), Texts{}) << "nor does bob, without its hold";
}

TEST_F(DeadlockTest, UpgradeWaitsOnlyForOtherReaders) {
  Waiter& ann = EnterUpgrade("ann", kA);
  AddHolder(kA, Mode::kShared, "ann");
  EXPECT_EQ(CycleOf(ann), Texts{}) << "not for its own hold";
  AddHolder(kA, Mode::kShared, "bob");
  EXPECT_EQ(CycleOf(ann), Texts{});
  EnterHeld("bob", kB, "ann");
  EXPECT_EQ(CycleOf(ann), (Texts{"ann waits for 0:a", "bob waits for 0:b"}));
}

TEST_F(DeadlockTest, AnyLockOfSetCanCloseCycle) {
  Enter("bob", {kA, kB, kC}, Exclusive());
  SetHolder(kB, "ann");
  EXPECT_EQ(CycleOf("ann", kD, "bob"), (Texts{"ann waits for 0:d", "bob waits for 0:b"}));
  EXPECT_EQ(CycleOf("ann", Locks{kOtherA, kC}, Exclusive()),
            (Texts{"ann waits for 0:c", "bob waits for 0:b"}))
      << "c is free, but bob comes first there";
  EXPECT_EQ(CycleOf("cid", Locks{kOtherA, kC}, Exclusive()), Texts{});
}

TEST_F(DeadlockTest, SetsRequestedInDifferentOrdersDoNotDeadlock) {
  // Neither waits behind the other: the first to arrive is first in every queue.
  Waiter& ann = Enter("ann", {kA, kB}, Exclusive());
  Waiter& bob = Enter("bob", {kB, kA}, Exclusive());
  EXPECT_EQ(CycleOf(ann), Texts{});
  EXPECT_EQ(CycleOf(bob), Texts{});
}

TEST_F(DeadlockTest, IgnoredWaitsCloseNoCycle) {
  // bob waits behind ann for c, and ann requests what bob holds. Its wait for c is about to end, so
  // it is ignored.
  Waiter& older = Enter("ann", {kA, kC}, Exclusive());
  Enter("bob", kC);
  Waiter& newer = Enter("ann", {kA, kB}, Exclusive());
  SetHolder(kB, "bob");
  EXPECT_EQ(CycleOf(newer), (Texts{"ann waits for 0:b", "bob waits for 0:c"}));
  EXPECT_EQ(CycleOf(newer, {&older}), Texts{});
  EXPECT_EQ(CycleOf(newer).size(), 2U) << "looking changes nothing";
}

TEST_F(DeadlockTest, OwnOlderWaitInSameQueueClosesNoCycle) {
  // bob is between ann's older wait for a and its newer one.
  Waiter& older = EnterHeld("ann", kA, "stranger");
  Enter("bob", kA);
  Waiter& newer = Enter("ann", {kA, kB}, Exclusive());
  SetHolder(kB, "bob");
  EXPECT_EQ(CycleOf(newer, {&older}), Texts{});
  EnterHeld("bob", kD, "ann");
  EXPECT_EQ(CycleOf(newer, {&older}), (Texts{"ann waits for 0:a", "bob waits for 0:d"}));
}

TEST_F(DeadlockTest, IgnoredWaitsAreSkippedAlongPath) {
  // cid waits for bob by two calls, one of which is about to end.
  EnterHeld("bob", kA, "ann");
  Waiter& one = Enter("cid", {kB, kC}, Exclusive());
  SetHolder(kB, "bob");
  Waiter& asks = EnterHeld("ann", kD, "cid");
  EXPECT_EQ(CycleOf(asks).size(), 3U);
  EXPECT_EQ(CycleOf(asks, {&one}), Texts{});
  EnterHeld("cid", kOtherA, "bob");
  EXPECT_EQ(CycleOf(asks, {&one}),
            (Texts{"ann waits for 0:d", "cid waits for 1:a", "bob waits for 0:a"}));
}

TEST_F(DeadlockTest, WaitersBlockedByUpgradeWaitForIt) {
  // An upgrade is queued before the waiters it blocks: they wait for it although it came later.
  AddHolder(kA, Mode::kShared, "ann");
  Enter("bob", kA);
  EnterHeld("ann", kB, "bob");
  EXPECT_EQ(CycleOf("cid", kB, "bob"), Texts{});
  EXPECT_EQ(CycleOf(EnterUpgrade("ann", kA)), Texts{}) << "nobody stands before it";
  EXPECT_EQ(CycleOf("cid", Locks{kA}, Shared()), Texts{});
}

TEST_F(DeadlockTest, UpgradeWaitsForReadersAheadOfIt) {
  AddHolder(kA, Mode::kShared, "ann");
  Enter("bob", {kA, kB}, Shared());
  SetHolder(kB, "ann");
  const Waiter& upgrade = EnterUpgrade("ann", kA);
  EXPECT_EQ(CycleOf(upgrade), (Texts{"ann waits for 0:a", "bob waits for 0:b"}));
}

// The shared hold of an upgrader blocks others, but not itself.
TEST_F(DeadlockTest, SharedHoldOfUpgraderBlocksOthers) {
  AddHolder(kA, Mode::kShared, "ann");
  AddHolder(kA, Mode::kShared, "bob");
  Enter("bob", kC, Exclusive());
  AddHolder(kC, Mode::kExclusive, "cid");
  Enter("cid", kA, Exclusive());
  EXPECT_EQ(CycleOf(EnterUpgrade("ann", kA)),
            (Texts{"ann waits for 0:a", "bob waits for 0:c", "cid waits for 0:a"}));
}

TEST_F(DeadlockTest, OwnerAlongPathMayHoldLockItWaitsFor) {
  // As after another client's SET: bob waits for a, which it holds now.
  EnterHeld("bob", kA, "bob");
  Enter("bob", kB);
  SetHolder(kB, "ann");
  EXPECT_EQ(CycleOf("ann", kA, std::nullopt), (Texts{"ann waits for 0:a", "bob waits for 0:b"}));
  EXPECT_EQ(CycleOf("cid", kA, std::nullopt), Texts{});
}

// --- Queues whose waiters wait for nothing else -----------------------------------------------

// The search visits one waiter on behalf of all of them.
TEST_F(DeadlockTest, OneWaiterOfQueueLeadsToHolders) {
  AddHolder(kA, Mode::kShared, "zoe");
  EnterHeld("zoe", kB, "ann");
  for (const char* owner : {"bob", "cid", "dan"}) Enter(owner, kA);
  EXPECT_EQ(CycleOf("ann", Locks{kA}, Shared()),
            (Texts{"ann waits for 0:a", "bob waits for 0:a", "zoe waits for 0:b"}));
  AddHolder(kC, Mode::kLimit, "zoe");
  Enter("eve", kC);
  Enter("fay", kC, Shared());
  EXPECT_EQ(CycleOf("ann", Locks{kC}, Limit(2)).size(), 3U);
}

TEST_F(DeadlockTest, FindsWaiterOfLongQueueThatWaitsElsewhere) {
  std::deque<std::string> owners;
  for (int i = 0; i < 10; ++i) Enter(owners.emplace_back("waiter-" + std::to_string(i)), kA);
  EXPECT_EQ(CycleOf("ann", Locks{kA}, Exclusive()), Texts{});
  // By a second call for one lock, or by one call for several.
  Waiter& second = EnterHeld("waiter-7", kB, "ann");
  const Texts over_seven = {"ann waits for 0:a", "waiter-7 waits for 0:b"};
  EXPECT_EQ(CycleOf("ann", Locks{kA}, Exclusive()), over_seven);
  EXPECT_EQ(CycleOf("ann", Locks{kA, kC}, Exclusive()), over_seven);
  queue_.Leave(second);
  EXPECT_EQ(CycleOf("ann", Locks{kA}, Exclusive()), Texts{});
  Waiter& set = Enter("set", {kA, kB}, Exclusive());
  EXPECT_EQ(CycleOf("ann", Locks{kA}, Exclusive()),
            (Texts{"ann waits for 0:a", "set waits for 0:b"}));
  queue_.Leave(set);
  EXPECT_EQ(CycleOf("ann", Locks{kA, kC}, Exclusive()), Texts{});
}

TEST_F(DeadlockTest, WaitersBehindSeeCallThatTookOver) {
  AddHolder(kA, Mode::kLimit, "zoe");
  Enter("bob", kA, Limit(2));  // is ahead of ann and leads nowhere
  Waiter& older = Enter("ann", kA, Limit(2));
  Enter("cid", kA);
  Enter("dan", kA, Limit(2));
  EnterHeld("zoe", kB, "dan");
  EXPECT_EQ(CycleOf(older), Texts{}) << "zoe, or another holder, may make room";
  Waiter& newer = calls_.emplace_back(Limit(1), kTickNow, kLateTick);
  queue_.TakeOver(newer, older);
  EXPECT_EQ(CycleOf(newer), (Texts{"ann waits for 0:a", "zoe waits for 0:b", "dan waits for 0:a",
                                   "cid waits for 0:a"}));
}

// Another client can turn a waiter into a holder: by a SET of its name.
TEST_F(DeadlockTest, CycleThroughHolderBehindNewWaitIsFound) {
  for (const char* owner : {"bob", "cid", "dan"}) Enter(owner, kA);
  Waiter& older = Enter("ann", kA, Limit(2));
  Enter("eve", kA);
  Enter("zoe", kA, Limit(2));
  keys_.SetString(kA, "zoe", kLate);
  Waiter& newer = calls_.emplace_back(Limit(2), kTickNow, kLateTick);
  queue_.TakeOver(newer, older);
  EXPECT_EQ(CycleOf(newer), (Texts{"ann waits for 0:a", "zoe waits for 0:a", "eve waits for 0:a"}));
}

TEST_F(DeadlockTest, CountOfWaitersElsewhereSurvivesTakeOver) {
  Waiter& set = Enter("bob", {kA, kB}, Exclusive());
  Enter("cid", kA);
  SetHolder(kB, "ann");
  Waiter& newer = calls_.emplace_back(Exclusive(), kTickNow, kLateTick);
  queue_.TakeOver(newer, set);
  EXPECT_EQ(CycleOf("ann", Locks{kA}, Exclusive()).size(), 2U);
  queue_.Leave(newer);
  EXPECT_EQ(CycleOf("ann", Locks{kA}, Exclusive()), Texts{});
}

// --- Bounds -----------------------------------------------------------------------------------

class DeadlockSearchBoundTest : public DeadlockTest {
 protected:
  // That many owners wait for a, each also in another queue; the first of them waits for ann.
  void FillLine(size_t count) {
    SetHolder(kB, "ann");
    Enter("first", {kA, kB}, Exclusive());
    for (size_t i = 1; i < count; ++i) {
      Enter(owners_.emplace_back("waiter-" + std::to_string(i)), {kA, kC}, Limit(5));
    }
  }

  std::deque<std::string> owners_;
};

TEST_F(DeadlockSearchBoundTest, GivesUpBeyondMaxPositions) {
  // What ann finds through d: the last waiter, which waits for all before it.
  FillLine(kMaxEntriesSearched);
  SetHolder(kOtherA, "ann");
  Enter("last", {kA, kOtherA}, Exclusive());
  SetHolder(kD, "last");
  EXPECT_EQ(CycleOf("ann", Locks{kD}, Exclusive()), Texts{}) << "no verdict: the time-out answers";
  // A short path is found before the limit is reached.
  Enter("short", {kD, kOtherA}, Exclusive());
  EXPECT_EQ(CycleOf("ann", Locks{kD}, Shared()), Texts{});
  SetHolder(kD, "short");
  EXPECT_EQ(CycleOf("ann", Locks{kD}, Shared()).size(), 2U);
}

TEST_F(DeadlockSearchBoundTest, FindsCycleWithinMaxPositions) {
  FillLine(kMaxEntriesSearched / 2);
  SetHolder(kOtherA, "ann");
  Enter("last", {kA, kOtherA}, Exclusive());
  SetHolder(kD, "last");
  EXPECT_EQ(CycleOf("ann", Locks{kD}, Exclusive()),
            (Texts{"ann waits for 0:d", "last waits for 1:a"}));
}

TEST_F(DeadlockSearchBoundTest, SkipsQueueWhoseWaitersWaitNowhereElse) {
  AddHolder(kA, Mode::kShared, "zoe");
  EnterHeld("zoe", kB, "ann");
  for (size_t i = 0; i < kMaxEntriesSearched + 10; ++i) {
    Enter(owners_.emplace_back("waiter-" + std::to_string(i)), kA);
  }
  EXPECT_EQ(CycleOf("ann", Locks{kA}, Shared()).size(), 3U);
  EXPECT_EQ(CycleOf("ann", Locks{kA, kD}, Shared()).size(), 3U) << "nor for one that does";
  Waiter& elsewhere = Enter("waiter-0", kC);
  EXPECT_EQ(CycleOf("ann", Locks{kA}, Shared()), Texts{}) << "now it is";
  queue_.Leave(elsewhere);
  EXPECT_EQ(CycleOf("ann", Locks{kA}, Shared()).size(), 3U);
}

TEST_F(DeadlockSearchBoundTest, GivesUpBeyondMaxHolders) {
  // ann requests locks with that many holders each. Only the first waiter also holds what ann
  // wants.
  constexpr size_t kHolders = 2'000;
  for (size_t i = 0; i < kHolders; ++i) {
    Enter(owners_.emplace_back("waiter-" + std::to_string(i)), kC, Limit(5));
  }
  AddHolder(kC, Mode::kLimit, "zoe");
  Enter("waiter-0", kB);
  SetHolder(kB, "ann");
  std::deque<std::string> keys;
  Locks locks;
  const auto add_lock = [&] {
    locks.push_back({0, keys.emplace_back("key-" + std::to_string(locks.size()))});
    keys_.AddMany(locks.back(), Mode::kLimit, owners_);
  };
  while ((locks.size() + 1) * kHolders < kMaxHoldersSearched) add_lock();
  locks.push_back(kOtherA);
  AddHolder(kOtherA, Mode::kExclusive, "waiter-0");
  // The last of these locks leads to the cycle.
  EXPECT_EQ(CycleOf("ann", locks, Limit(2)).size(), 2U);
  locks.pop_back();
  add_lock();
  add_lock();
  locks.push_back(kOtherA);
  EXPECT_EQ(CycleOf("ann", locks, Limit(2)), Texts{});
}

// --- Random states against a naive search -----------------------------------------------------

// Random locks, holders and waits. All edges are derived one by one from the rules, and the
// shortest cycle by breadth-first search.
class RandomState {
 public:
  explicit RandomState(unsigned seed) : random_(seed) {
    // With many owners waiting for many others, cycles are short.
    sparse_ = Pick(2) == 0;
    owners_ = static_cast<size_t>(sparse_ ? 5 + Pick(2) : 3 + Pick(4));
    locks_ = static_cast<size_t>(sparse_ ? 4 + Pick(3) : 3 + Pick(2));
    for (size_t lock = 0; lock < locks_; ++lock) HoldAtRandom(kNames.at(lock));
    const int waits = Pick(static_cast<int>(2 * owners_ + 1));
    for (int i = 0; i < waits; ++i) WaitAtRandom();
    for (int i = Pick(3); i > 0 && !waits_.empty(); --i) LeaveOrTakeOverAtRandom();
  }
  ~RandomState() {
    for (Waiter* wait : waits_) queue_.Leave(*wait);
  }
  RandomState(const RandomState&) = delete;
  RandomState& operator=(const RandomState&) = delete;

  size_t waits() const { return waits_.size(); }

  // Treats this wait as the new one. Other waits of its owner for the same locks are ignored.
  void Choose(size_t index) {
    self_ = waits_[index];
    ignored_.clear();
    for (Waiter* wait : waits_) {
      if (wait != self_ && OwnerOf(*wait) == OwnerOf(*self_) && Overlap(*wait, *self_)) {
        ignored_.push_back(wait);
      }
    }
  }

  std::vector<CycleStep> Find() { return keys_.FindCycle(queue_, *self_, ignored_, kNow); }

  // Whether each step is an edge, beginning with the new wait.
  bool IsCycle(const std::vector<CycleStep>& steps) {
    for (size_t i = 0; i < steps.size(); ++i) {
      const std::string to(steps[(i + 1) % steps.size()].name);
      bool is_edge = false;
      for (const Waiter* wait : waits_) {
        if (OwnerOf(*wait) != steps[i].name || IsIgnored(*wait)) continue;
        if (i == 0 && wait != self_) continue;
        is_edge = is_edge || Contains(WaitedFor(*wait, steps[i].lock), to);
      }
      if (!is_edge) return false;
    }
    return !steps.empty() && steps.front().name == OwnerOf(*self_);
  }

  // The length of the shortest cycle; 0 if there is none.
  size_t FewestSteps() {
    const std::string self = OwnerOf(*self_);
    Texts reached;
    AddWaitedFor(*self_, reached);
    size_t next = 0;
    for (size_t steps = 1; next < reached.size(); ++steps) {
      const size_t end = reached.size();
      for (; next < end; ++next) {
        if (reached[next] == self) return steps;
        for (const Waiter* wait : waits_) {
          if (OwnerOf(*wait) == reached[next] && !IsIgnored(*wait)) AddWaitedFor(*wait, reached);
        }
      }
    }
    return 0;
  }

 private:
  static constexpr std::array<LockName, 6> kNames = {kA, kB, kOtherA, kC, kD, {2, "b"}};

  int Pick(int below) { return static_cast<int>(random_() % static_cast<unsigned>(below)); }
  std::string PickOwner() {
    return std::string(1, static_cast<char>('p' + Pick(static_cast<int>(owners_))));
  }

  static std::string OwnerOf(const Waiter& wait) { return std::string(wait.request().owner.bytes); }
  static bool Contains(const Texts& texts, const std::string& text) {
    return std::find(texts.begin(), texts.end(), text) != texts.end();
  }
  static bool Overlap(const Waiter& a, const Waiter& b) {
    for (size_t i = 0; i < a.size(); ++i) {
      if (b.WaitsFor(a.lock(i))) return true;
    }
    return false;
  }
  bool IsIgnored(const Waiter& wait) const {
    return std::find(ignored_.begin(), ignored_.end(), &wait) != ignored_.end();
  }

  void HoldAtRandom(LockName lock) {
    const int kind = Pick(6);
    if (kind == 0 && !sparse_) return;
    if (kind == 1) {
      keys_.SetString(lock, PickOwner(), Pick(4) == 0 ? At(999) : kMaxInstant);
      return;
    }
    const auto mode = static_cast<Mode>(Pick(3));
    const int holders = sparse_ || mode == Mode::kExclusive ? 1 : 1 + Pick(3);
    for (int i = 0; i < holders; ++i) {
      const bool live = Pick(6) > 0;
      keys_.Add(lock, mode, PickOwner(), live ? kLate : At(999), Millis{live ? 0 : Pick(9)});
    }
    // Owners that wait for nothing, so that there are more holders than waiting owners.
    if (mode != Mode::kExclusive && Pick(3) == 0) {
      for (int i = 0; i < 8; ++i) {
        keys_.Add(lock, mode, "stranger-" + std::to_string(i), kLate, Millis{0});
      }
    }
  }

  // Nobody waits for a lock that it holds, except for an upgrade.
  void WaitAtRandom() {
    const std::string owner = PickOwner();
    Locks locks;
    for (int i = sparse_ || Pick(2) == 0 ? 1 : 1 + Pick(3); i > 0; --i) {
      const LockName lock = kNames.at(static_cast<size_t>(Pick(static_cast<int>(locks_))));
      if (std::find(locks.begin(), locks.end(), lock) == locks.end()) locks.push_back(lock);
    }
    AcquireRequest request{.owner = Owner{owner}, .lease = kLease};
    request.mode = static_cast<Mode>(Pick(3));
    if (request.mode == Mode::kLimit) {
      request.limit = static_cast<uint32_t>(1 + Pick(3));
      request.weight = static_cast<uint32_t>(1 + Pick(static_cast<int>(request.limit)));
    }
    const bool upgrade = locks.size() == 1 && IsUpgrade(keys_.At(locks.front()), request, kNow);
    for (const LockName lock : locks) {
      if (!upgrade && Contains(keys_.Holders(lock, kNow), owner)) return;
    }
    Waiter& wait = calls_.emplace_back(request, kTickNow, kLateTick);
    queue_.Enter(wait, locks, Owner{owner}, upgrade);
    queue_.Block(wait, 0, std::nullopt);
    waits_.push_back(&wait);
  }

  void LeaveOrTakeOverAtRandom() {
    const size_t index = static_cast<size_t>(Pick(static_cast<int>(waits_.size())));
    Waiter& wait = *waits_[index];
    if (Pick(2) == 0) {
      queue_.Leave(wait);
      waits_.erase(waits_.begin() + static_cast<std::ptrdiff_t>(index));
      return;
    }
    Waiter& newer = calls_.emplace_back(wait.request(), kTickNow, kLateTick);
    queue_.TakeOver(newer, wait);
    waits_[index] = &newer;
  }

  // The rules.
  static bool WaitsForHolders(const AcquireRequest& request, Mode held) {
    if (request.mode == Mode::kShared && held == Mode::kShared) return false;
    if (request.mode == Mode::kLimit && held == Mode::kLimit) {
      return request.weight == request.limit;
    }
    return true;
  }
  static bool WaitsForOneAhead(const AcquireRequest& request, const AcquireRequest& ahead) {
    return request.mode == Mode::kExclusive || request.mode != ahead.mode;
  }

  // The owners that the owner of `wait` waits for in one queue.
  Texts WaitedFor(const Waiter& wait, LockName lock) {
    Texts owners;
    if (!wait.WaitsFor(lock)) return owners;
    const auto add = [&](const std::string& owner) {
      if (owner != OwnerOf(wait)) owners.push_back(owner);
    };
    if (WaitsForHolders(wait.request(), ModeOf(keys_.At(lock)))) {
      for (const std::string& owner : keys_.Holders(lock, kNow)) add(owner);
    }
    const WaitQueue::Entry* state = queue_.Find(lock)->first();
    for (; &state->waiter() != &wait; state = state->behind()) {
      const Waiter& ahead = state->waiter();
      if (!IsIgnored(ahead) && WaitsForOneAhead(wait.request(), ahead.request())) {
        add(OwnerOf(ahead));
      }
    }
    return owners;
  }

  void AddWaitedFor(const Waiter& wait, Texts& reached) {
    for (size_t i = 0; i < wait.size(); ++i) {
      for (const std::string& owner : WaitedFor(wait, wait.lock(i))) {
        if (!Contains(reached, owner)) reached.push_back(owner);
      }
    }
  }

  std::mt19937 random_;
  bool sparse_ = false;
  size_t owners_ = 0;
  size_t locks_ = 0;
  std::deque<Waiter> calls_;
  WaitQueue queue_;
  Keyspace keys_;
  std::vector<Waiter*> waits_;
  Waiter* self_ = nullptr;
  std::vector<Waiter*> ignored_;
};

TEST(RandomDeadlockTest, FindsShortestCycleIfAndOnlyIfOneExists) {
  std::map<size_t, int> states;  // by length of the cycle
  for (unsigned seed = 1; seed <= 4'000; ++seed) {
    RandomState state(seed);
    for (size_t i = 0; i < state.waits(); ++i) {
      state.Choose(i);
      const std::vector<CycleStep> found = state.Find();
      const size_t fewest = state.FewestSteps();
      ++states[fewest];
      ASSERT_EQ(found.size(), fewest) << "seed " << seed << " wait " << i;
      ASSERT_EQ(state.IsCycle(found), fewest > 0) << "seed " << seed << " wait " << i;
    }
  }
  // Every length occurs often enough.
  EXPECT_GT(states[0], 2'000);
  EXPECT_GT(states[2], 1'000);
  EXPECT_GT(states[3], 200);
  EXPECT_GT(states[4], 20);
}

// --- How a cycle is described -----------------------------------------------------------------

bool Everything(LockName /*lock*/) { return true; }

TEST_F(DeadlockTest, DescriptionMatchesDocumentedText) {
  EnterHeld("worker-2", kA, "worker-1");
  const Waiter& one = EnterHeld("worker-1", kB, "worker-2");
  const auto cycle = keys_.FindCycle(queue_, one, {}, kNow);
  ASSERT_EQ(cycle.size(), 2U);
  EXPECT_EQ(
      DescribeCycle(cycle, Everything),
      R"(waiting for "b" would close the cycle worker-1 -> "b" -> worker-2 -> "a" -> worker-1)");
}

// --- By which name

// An owner is a proof: whoever reads it in an error could release the lock.
TEST_F(DeadlockTest, NamesTagOfEachWaitInPlaceOfItsOwner) {
  SetHolder(kA, "ann");
  SetHolder(kB, "bob");
  SetHolder(kC, "cid");
  Enter("bob", kA, Tagged(Exclusive(), "bob's wait"));
  Enter("cid", kB);
  const Waiter& ann = Enter("ann", kC, Tagged(Exclusive(), "ann's wait"));
  EXPECT_EQ(CycleOf(ann),
            (Texts{"ann's wait waits for 0:c", "cid waits for 0:b", "bob's wait waits for 0:a"}));
}

TEST_F(DeadlockTest, NamesTagOfTheWaitThatLeadsOn) {
  SetHolder(kA, "ann");
  SetHolder(kB, "bob");
  // Bob waits in two queues, under two tags. Only one of them is in the cycle.
  Enter("bob", kC, Tagged(Exclusive(), "for c"));
  Enter("bob", kA, Tagged(Exclusive(), "for a"));
  Enter("bob", kD, Tagged(Exclusive(), "for d"));
  const Waiter& ann = Enter("ann", kB);
  EXPECT_EQ(CycleOf(ann), (Texts{"ann waits for 0:b", "for a waits for 0:a"}));
}

TEST_F(DeadlockTest, NamesNewestTagAfterTakeOver) {
  SetHolder(kA, "ann");
  SetHolder(kB, "bob");
  Waiter& older = Enter("bob", kA, Tagged(Exclusive(), "older"));
  Waiter& newer = calls_.emplace_back(Tagged(Exclusive(), "newer"), kTickNow, kLateTick);
  queue_.TakeOver(newer, older);
  queue_.Block(newer, 0, std::nullopt);
  const Waiter& ann = Enter("ann", kB);
  EXPECT_EQ(CycleOf(ann), (Texts{"ann waits for 0:b", "newer waits for 0:a"}));
}

// Where the wait has no tag, the hold that closes the cycle may have one.
TEST_F(DeadlockTest, NamesTagOfHoldIfTheWaitHasNone) {
  keys_.Add(kA, Mode::kExclusive, "ann", kLate, Millis{0}, "ann's hold");
  keys_.Add(kB, Mode::kExclusive, "bob", kLate, Millis{0}, "bob's hold");
  keys_.Add(kC, Mode::kExclusive, "cid", kLate, Millis{0}, "cid's hold");
  Enter("bob", kA);
  Enter("cid", kB, Tagged(Exclusive(), "cid's wait"));
  const Waiter& ann = Enter("ann", kC);
  EXPECT_EQ(CycleOf(ann), (Texts{"ann's hold waits for 0:c", "cid's wait waits for 0:b",
                                 "bob's hold waits for 0:a"}));
}

// Who may read the keys of the cycle may not be allowed to read others that the search visited.
TEST_F(DeadlockTest, NamesNoTagOfHoldOfAnotherLock) {
  SetHolder(kA, "ann");
  keys_.Add(kB, Mode::kShared, "eve", kLate, Millis{0}, "");
  keys_.Add(kB, Mode::kShared, "bob", kLate, Millis{0}, "");
  keys_.Add(kC, Mode::kExclusive, "bob", kLate, Millis{0}, "bob's hold of c");
  Enter("eve", kC);
  Enter("bob", kA);
  const Waiter& ann = Enter("ann", kB);
  EXPECT_EQ(CycleOf(ann), (Texts{"ann waits for 0:b", "bob waits for 0:a"}));
}

TEST_F(DeadlockTest, DescribesTagsLikeOwners) {
  SetHolder(kA, "ann");
  SetHolder(kB, "bob");
  Enter("bob", kA, Tagged(Exclusive(), "host-2 \"x\""));
  const Waiter& ann = Enter("ann", kB, Tagged(Exclusive(), "host-1"));
  const auto cycle = keys_.FindCycle(queue_, ann, {}, kNow);
  EXPECT_EQ(DescribeCycle(cycle, Everything),
            R"(waiting for "b" would close the cycle host-1 -> "b" -> "host-2 \"x\"" -> "a" -> )"
            "host-1");
}

TEST(DescribeCycle, HidesInaccessibleLocksAndTheirOwners) {
  const std::vector<CycleStep> cycle = {{"ann", kA}, {"bob", kB}, {"cid", kC}};
  const auto without = [&](std::string_view hidden) {
    return DescribeCycle(
        cycle, [hidden](LockName lock) { return hidden.find(lock.key) == std::string_view::npos; });
  };
  EXPECT_EQ(
      without(""),
      R"(waiting for "a" would close the cycle ann -> "a" -> bob -> "b" -> cid -> "c" -> ann)");
  EXPECT_EQ(without("a"),
            R"(waiting for ? would close the cycle ann -> ? -> ? -> "b" -> cid -> "c" -> ann)");
  EXPECT_EQ(without("b"),
            R"(waiting for "a" would close the cycle ann -> "a" -> bob -> ? -> ? -> "c" -> ann)");
  EXPECT_EQ(without("c"),
            R"(waiting for "a" would close the cycle ann -> "a" -> bob -> "b" -> cid -> ? -> ann)");
  EXPECT_EQ(without("abc"),
            "waiting for ? would close the cycle ann -> ? -> ? -> ? -> ? -> ? -> ann");
}

TEST(DescribeCycle, ChecksVisibilityPerDatabase) {
  const std::vector<CycleStep> cycle = {{"ann", kA}, {"bob", kOtherA}};
  EXPECT_EQ(DescribeCycle(cycle, [](LockName lock) { return lock == kA; }),
            R"(waiting for "a" would close the cycle ann -> "a" -> bob -> ? -> ann)");
}

TEST(DescribeCycle, QuotesAndTruncatesNames) {
  const std::string binary("\0\r\n\xff", 4);
  const std::string wide(256, 'z');
  const std::vector<CycleStep> cycle = {
      {binary, {0, "say \"a\"\\"}}, {"two words", {0, binary}}, {wide, {0, ""}}};
  EXPECT_EQ(DescribeCycle(cycle, Everything),
            R"(waiting for "say \"a\"\\" would close the cycle "\x00\x0d\x0a\xff")"
            R"( -> "say \"a\"\\" -> "two words" -> "\x00\x0d\x0a\xff" -> ")" +
                std::string(40, 'z') + R"("... (256 bytes) -> "" -> "\x00\x0d\x0a\xff")");
}

TEST(DescribeCycle, TruncatesLongCycles) {
  std::vector<std::string> owners;
  for (int i = 0; i < 100; ++i) owners.push_back("w" + std::to_string(i));
  const auto describe = [&](size_t steps) {
    std::vector<CycleStep> cycle;
    for (size_t i = 0; i < steps; ++i) cycle.push_back({owners[i], kA});
    return DescribeCycle(cycle, Everything);
  };
  const std::string eight =
      R"(waiting for "a" would close the cycle w0 -> "a" -> w1 -> "a" -> w2 -> "a" -> )"
      R"(w3 -> "a" -> w4 -> "a" -> w5 -> "a" -> w6 -> "a" -> w7 -> "a" -> )";
  EXPECT_EQ(describe(8), eight + "w0");
  EXPECT_EQ(describe(9), eight + "... -> w0");
  EXPECT_EQ(describe(100), eight + "... -> w0");
  EXPECT_EQ(describe(1), R"(waiting for "a" would close the cycle w0 -> "a" -> w0)");
}

}  // namespace
}  // namespace turnstile
