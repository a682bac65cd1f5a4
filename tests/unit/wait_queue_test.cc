// Every operation of the waiting lines, with hand-set time.

#include "core/wait_queue.h"

#include <gtest/gtest.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace turnstile {
namespace {

using namespace std::string_literals;
using Waiter = WaitQueue::Waiter;
using Step = WaitQueue::Step;
using Texts = std::vector<std::string>;

constexpr Instant At(int64_t ms) { return Instant{Millis{ms}}; }
// Moments as numbers: failures are easier to read.
constexpr int64_t Ms(Instant moment) { return moment.time_since_epoch().count(); }

constexpr Instant kNow = At(1'000);
constexpr Instant kLate = At(1'000'000);
constexpr Millis kLease{30};
constexpr int64_t kNothingDue = Ms(kMaxInstant);
constexpr int64_t kDueAtOnce = Ms(kMinInstant);

constexpr LockName kA{0, "a"};
constexpr LockName kB{0, "b"};
constexpr LockName kC{0, "c"};
constexpr LockName kD{0, "d"};
constexpr LockName kOtherA{1, "a"};

class WaitQueueTest : public testing::Test {
 protected:
  Waiter& NewCall(Instant deadline = kLate) { return calls_.emplace_back(kLease, kNow, deadline); }

  Waiter& Enter(std::string_view owner, LockName lock, Instant deadline = kLate) {
    Waiter& waiter = NewCall(deadline);
    queue_.Enter(waiter, lock, Owner{owner});
    return waiter;
  }

  void SetHolder(LockName lock, std::string_view owner, Instant end = kLate) {
    queue_.SetHolder(lock, Owner{owner}, end);
  }
  void ClearHolder(LockName lock) { queue_.SetHolder(lock, std::nullopt, kMinInstant); }

  // `owner` waits for `lock`, which `holder` holds.
  Waiter& EnterHeld(std::string_view owner, LockName lock, std::string_view holder,
                    Instant end = kLate) {
    Waiter& waiter = Enter(owner, lock);
    SetHolder(lock, holder, end);
    return waiter;
  }

  Texts LineOf(LockName lock) {
    const WaitQueue::Line* line = queue_.Find(lock);
    if (line == nullptr) return {};
    EXPECT_TRUE(line->lock() == lock);
    Texts owners;
    for (const Waiter* waiter = line->first(); waiter != nullptr; waiter = waiter->behind()) {
      EXPECT_TRUE(waiter->in_line());
      EXPECT_TRUE(waiter->lock() == lock);
      owners.emplace_back(waiter->request().owner.bytes);
    }
    EXPECT_EQ(line->size(), owners.size());
    EXPECT_NE(line->size(), 0U);
    return owners;
  }

  // The lines that are woken at `now`, in order of their names. Settles them.
  Texts TakeWoken(Instant now) {
    Texts woken;
    while (const WaitQueue::Line* line = queue_.FirstWoken(now)) {
      EXPECT_EQ(queue_.FirstWoken(now), line) << "asking twice makes no difference";
      EXPECT_EQ(Ms(queue_.NextDue()), kDueAtOnce);
      woken.push_back(std::to_string(line->lock().db) + ":" + std::string(line->lock().key));
      if (woken.size() > 10'000) {
        ADD_FAILURE() << "Settled does nothing";
        break;
      }
      queue_.Settled(line->lock());
    }
    std::sort(woken.begin(), woken.end());
    return woken;
  }

  int64_t NextDue() const { return Ms(queue_.NextDue()); }

  std::vector<Step> FindCycle(std::string_view owner, LockName lock,
                              std::optional<std::string_view> holder, Instant now = kNow) {
    return queue_.FindCycle(Owner{owner}, lock,
                            holder.has_value() ? std::optional(Owner{*holder}) : std::nullopt, now);
  }

  // "ann waits for 0:b": one text a step.
  Texts CycleOf(std::string_view owner, LockName lock, std::optional<std::string_view> holder,
                Instant now = kNow) {
    Texts texts;
    for (const Step& step : FindCycle(owner, lock, holder, now)) {
      texts.push_back(std::string(step.owner.bytes) + " waits for " + std::to_string(step.lock.db) +
                      ":" + std::string(step.lock.key));
    }
    return texts;
  }

  std::deque<Waiter> calls_;
  WaitQueue queue_;
};

// --- Lines ------------------------------------------------------------------------------------

TEST_F(WaitQueueTest, BeginsEmpty) {
  EXPECT_TRUE(queue_.empty());
  EXPECT_EQ(queue_.size(), 0U);
  EXPECT_EQ(queue_.Find(kA), nullptr);
  EXPECT_EQ(queue_.FindWaiter(kA, Owner{"ann"}), nullptr);
  EXPECT_EQ(queue_.FirstWoken(kLate), nullptr);
  EXPECT_EQ(queue_.FirstTimedOut(kLate), nullptr);
  EXPECT_EQ(NextDue(), kNothingDue);
}

TEST_F(WaitQueueTest, KeepsTheOrderOfArrival) {
  // Neither names nor deadlines have a say.
  Enter("dan", kA, At(3'000));
  Enter("ann", kA, At(1'000));
  Enter("cid", kA, At(4'000));
  Enter("bob", kA, At(2'000));
  EXPECT_EQ(LineOf(kA), (Texts{"dan", "ann", "cid", "bob"}));
  EXPECT_EQ(queue_.size(), 4U);
  EXPECT_FALSE(queue_.empty());
}

TEST_F(WaitQueueTest, FirstOneLeaves) {
  Waiter& first = Enter("ann", kA);
  Enter("bob", kA);
  Enter("cid", kA);
  queue_.Leave(first);
  EXPECT_FALSE(first.in_line());
  EXPECT_EQ(first.behind(), nullptr);
  EXPECT_EQ(LineOf(kA), (Texts{"bob", "cid"}));
  EXPECT_EQ(queue_.size(), 2U);
  Enter("dan", kA);
  EXPECT_EQ(LineOf(kA), (Texts{"bob", "cid", "dan"}));
}

TEST_F(WaitQueueTest, OneInTheMiddleLeaves) {
  Enter("ann", kA);
  Waiter& middle = Enter("bob", kA);
  Enter("cid", kA);
  queue_.Leave(middle);
  EXPECT_FALSE(middle.in_line());
  EXPECT_EQ(middle.behind(), nullptr);
  EXPECT_EQ(LineOf(kA), (Texts{"ann", "cid"}));
  Enter("dan", kA);
  EXPECT_EQ(LineOf(kA), (Texts{"ann", "cid", "dan"}));
}

TEST_F(WaitQueueTest, LastOneLeaves) {
  Enter("ann", kA);
  Enter("bob", kA);
  Waiter& last = Enter("cid", kA);
  queue_.Leave(last);
  EXPECT_EQ(LineOf(kA), (Texts{"ann", "bob"}));
  Enter("dan", kA);
  EXPECT_EQ(LineOf(kA), (Texts{"ann", "bob", "dan"}));
}

// All orders in which four can leave.
TEST_F(WaitQueueTest, LineIsRightInWhateverOrderTheyLeave) {
  const Texts owners = {"ann", "bob", "cid", "dan"};
  std::vector<size_t> order = {0, 1, 2, 3};
  do {
    std::vector<Waiter*> waiters;
    for (const std::string& owner : owners) waiters.push_back(&Enter(owner, kA));
    Texts left = owners;
    for (const size_t leaver : order) {
      queue_.Leave(*waiters[leaver]);
      left.erase(std::find(left.begin(), left.end(), owners[leaver]));
      EXPECT_EQ(LineOf(kA), left);
      EXPECT_EQ(queue_.size(), left.size());
    }
    EXPECT_EQ(queue_.Find(kA), nullptr);
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_F(WaitQueueTest, LineGoesWithItsLastWaiter) {
  Waiter& waiter = Enter("ann", kA);
  Enter("bob", kB);
  EXPECT_NE(queue_.Find(kA), nullptr);
  queue_.Leave(waiter);
  EXPECT_EQ(queue_.Find(kA), nullptr);
  EXPECT_EQ(LineOf(kB), (Texts{"bob"}));
  EXPECT_EQ(queue_.size(), 1U);
  queue_.Leave(*queue_.FindWaiter(kB, Owner{"bob"}));
  EXPECT_TRUE(queue_.empty());
}

TEST_F(WaitQueueTest, SameKeyInTwoDatabasesIsTwoLocks) {
  Waiter& here = Enter("ann", kA);
  Enter("bob", kOtherA);
  EXPECT_EQ(LineOf(kA), (Texts{"ann"}));
  EXPECT_EQ(LineOf(kOtherA), (Texts{"bob"}));
  EXPECT_EQ(queue_.Find({2, "a"}), nullptr);

  ClearHolder(kOtherA);
  EXPECT_EQ(TakeWoken(kNow), (Texts{"1:a"}));
  queue_.Leave(here);
  EXPECT_EQ(queue_.Find(kA), nullptr);
  EXPECT_EQ(LineOf(kOtherA), (Texts{"bob"}));
}

TEST_F(WaitQueueTest, KeysAndOwnersAreAnyBytes) {
  using namespace std::string_view_literals;
  constexpr LockName kEmpty{0, ""sv};
  constexpr LockName kZero{0, "\0"sv};
  constexpr LockName kTwoZeros{0, "\0\0"sv};
  Enter("\0x"sv, kEmpty);
  Enter("\0y"sv, kZero);
  Enter("\0"sv, kTwoZeros);
  EXPECT_EQ(LineOf(kEmpty), (Texts{"\0x"s}));
  EXPECT_EQ(LineOf(kZero), (Texts{"\0y"s}));
  EXPECT_EQ(LineOf(kTwoZeros), (Texts{"\0"s}));
  EXPECT_NE(queue_.FindWaiter(kZero, Owner{"\0y"sv}), nullptr);
  EXPECT_EQ(queue_.FindWaiter(kZero, Owner{"\0"sv}), nullptr);
}

// The caller's strings live for one command only.
TEST_F(WaitQueueTest, KeepsItsOwnCopyOfNames) {
  std::string key = "resource";
  std::string owner = "ann";
  std::string holder = "bob";
  Waiter& waiter = Enter(owner, {0, key});
  SetHolder({0, key}, holder);
  key = "????????";
  owner = holder = "???";
  EXPECT_EQ(waiter.request().owner.bytes, "ann");
  EXPECT_EQ(waiter.lock().key, "resource");
  EXPECT_EQ(LineOf({0, "resource"}), (Texts{"ann"}));
  EXPECT_EQ(CycleOf("bob", kB, "ann"), (Texts{"bob waits for 0:b", "ann waits for 0:resource"}));
}

TEST_F(WaitQueueTest, WaiterTellsWhatItAsksFor) {
  Waiter waiter(Millis{1'234}, At(5), At(77));
  EXPECT_FALSE(waiter.in_line());
  queue_.Enter(waiter, kOtherA, Owner{"ann"});
  EXPECT_TRUE(waiter.in_line());
  EXPECT_EQ(waiter.request().owner.bytes, "ann");
  EXPECT_EQ(waiter.request().lease, Millis{1'234});
  EXPECT_TRUE(waiter.lock() == kOtherA);
  EXPECT_EQ(Ms(waiter.since()), 5);
  EXPECT_EQ(Ms(waiter.deadline()), 77);
  queue_.Leave(waiter);
  EXPECT_EQ(Ms(waiter.since()), 5);
  EXPECT_EQ(Ms(waiter.deadline()), 77);
}

TEST_F(WaitQueueTest, WhoLeftMayEnterAgain) {
  Waiter& waiter = Enter("ann", kA);
  Enter("bob", kA);
  queue_.Leave(waiter);
  queue_.Enter(waiter, kA, Owner{"ann"});
  EXPECT_EQ(LineOf(kA), (Texts{"bob", "ann"}));
  queue_.Leave(waiter);
  queue_.Enter(waiter, kB, Owner{"cid"});
  EXPECT_EQ(LineOf(kA), (Texts{"bob"}));
  EXPECT_EQ(LineOf(kB), (Texts{"cid"}));
}

// Enough of all that every table has grown several times while it was in use.
TEST_F(WaitQueueTest, ManyLinesAndOwners) {
  constexpr int kLines = 500;
  constexpr int kEach = 5;
  const auto key = [](int line) { return "key-" + std::to_string(line); };
  const auto owner = [](int line, int place) {
    return "owner-" + std::to_string(line) + "-" + std::to_string(place);
  };
  for (int place = 0; place < kEach; ++place) {
    for (int line = 0; line < kLines; ++line) {
      Enter(owner(line, place), {line % 3, key(line)}, At(10'000 + line * kEach + place));
    }
  }
  EXPECT_EQ(queue_.size(), size_t{kLines} * kEach);
  for (int line = 0; line < kLines; ++line) {
    Texts expected;
    for (int place = 0; place < kEach; ++place) expected.push_back(owner(line, place));
    EXPECT_EQ(LineOf({line % 3, key(line)}), expected);
  }
  for (int due = 10'000; due < 10'000 + kLines * kEach; ++due) {
    EXPECT_EQ(queue_.FirstTimedOut(At(due - 1)), nullptr);
    Waiter* waiter = queue_.FirstTimedOut(At(due));
    ASSERT_NE(waiter, nullptr);
    queue_.Leave(*waiter);
  }
  EXPECT_TRUE(queue_.empty());
}

// --- Taking over a place ----------------------------------------------------------------------

TEST_F(WaitQueueTest, TakeOverKeepsThePlace) {
  for (const size_t place : {0U, 1U, 2U}) {
    const Texts owners = {"ann", "bob", "cid"};
    std::vector<Waiter*> waiters;
    for (const std::string& owner : owners) waiters.push_back(&Enter(owner, kA));
    Waiter& older = *waiters[place];
    Waiter& newer = NewCall();
    queue_.TakeOver(newer, older);
    waiters[place] = &newer;

    EXPECT_EQ(LineOf(kA), owners);
    EXPECT_EQ(queue_.size(), 3U);
    EXPECT_EQ(queue_.Find(kA)->first(), waiters[0]);
    EXPECT_FALSE(older.in_line());
    EXPECT_EQ(older.behind(), nullptr);
    EXPECT_TRUE(newer.in_line());
    EXPECT_EQ(queue_.FindWaiter(kA, Owner{owners[place]}), &newer);

    // The links behind it are right, too: all leave from the end on.
    Enter("dan", kA);
    EXPECT_EQ(LineOf(kA), (Texts{"ann", "bob", "cid", "dan"}));
    queue_.Leave(*queue_.FindWaiter(kA, Owner{"dan"}));
    queue_.Leave(*waiters[2]);
    EXPECT_EQ(LineOf(kA), (Texts{"ann", "bob"}));
    queue_.Leave(*waiters[1]);
    EXPECT_EQ(LineOf(kA), (Texts{"ann"}));
    queue_.Leave(*waiters[0]);
    EXPECT_TRUE(queue_.empty());
  }
}

TEST_F(WaitQueueTest, TakeOverBringsItsOwnTimesAndLease) {
  Waiter older(Millis{10}, At(1), At(100));
  Waiter newer(Millis{20}, At(50), At(150));
  Waiter newest(Millis{30}, At(60), At(70));
  queue_.Enter(older, kA, Owner{"ann"});
  queue_.TakeOver(newer, older);
  EXPECT_EQ(newer.request().lease, Millis{20});
  EXPECT_EQ(newer.request().owner.bytes, "ann");
  EXPECT_EQ(Ms(newer.since()), 50);
  EXPECT_EQ(NextDue(), 150);
  EXPECT_EQ(queue_.FirstTimedOut(At(149)), nullptr);
  EXPECT_EQ(queue_.FirstTimedOut(At(150)), &newer);

  queue_.TakeOver(newest, newer);  // an earlier deadline counts as well
  EXPECT_EQ(NextDue(), 70);
  EXPECT_EQ(queue_.FirstTimedOut(At(70)), &newest);
  EXPECT_EQ(queue_.size(), 1U);
  queue_.Leave(newest);
  EXPECT_TRUE(queue_.empty());
}

TEST_F(WaitQueueTest, TakeOverChangesNothingElse) {
  Waiter& older = EnterHeld("ann", kA, "bob", At(2'000));
  Enter("ann", kB);
  queue_.TakeOver(NewCall(), older);
  EXPECT_EQ(TakeWoken(At(2'000)), Texts{}) << "nobody moved up";
  EXPECT_EQ(CycleOf("bob", kC, "ann"), (Texts{"bob waits for 0:c", "ann waits for 0:a"}));
  EXPECT_EQ(TakeWoken(At(2'001)), (Texts{"0:a"})) << "the holder is still known";

  queue_.Wake(kA);
  queue_.TakeOver(NewCall(), *queue_.FindWaiter(kA, Owner{"ann"}));
  EXPECT_EQ(TakeWoken(At(2'001)), (Texts{"0:a"})) << "a woken line stays so";
}

TEST_F(WaitQueueTest, TakeOverInOneOfSeveralLines) {
  const std::vector<LockName> locks = {kA, kB, kC};
  for (const LockName taken : locks) {
    for (const LockName lock : locks) Enter("ann", lock);
    Waiter& newer = NewCall();
    queue_.TakeOver(newer, *queue_.FindWaiter(taken, Owner{"ann"}));
    EXPECT_EQ(queue_.FindWaiter(taken, Owner{"ann"}), &newer);
    for (const LockName lock : locks) {
      Waiter* waiter = queue_.FindWaiter(lock, Owner{"ann"});
      ASSERT_NE(waiter, nullptr);
      EXPECT_TRUE(waiter->lock() == lock);
      queue_.Leave(*waiter);
      EXPECT_EQ(queue_.FindWaiter(lock, Owner{"ann"}), nullptr);
    }
    EXPECT_TRUE(queue_.empty());
  }
}

// --- One owner in several lines ---------------------------------------------------------------

TEST_F(WaitQueueTest, FindsTheWaiterOfAnOwner) {
  Waiter& ann = Enter("ann", kA);
  Waiter& bob = Enter("bob", kA);
  EXPECT_EQ(queue_.FindWaiter(kA, Owner{"ann"}), &ann);
  EXPECT_EQ(queue_.FindWaiter(kA, Owner{"bob"}), &bob);
  EXPECT_EQ(queue_.FindWaiter(kA, Owner{"cid"}), nullptr);
  EXPECT_EQ(queue_.FindWaiter(kB, Owner{"ann"}), nullptr);
  EXPECT_EQ(queue_.FindWaiter(kOtherA, Owner{"ann"}), nullptr);
  queue_.Leave(ann);
  EXPECT_EQ(queue_.FindWaiter(kA, Owner{"ann"}), nullptr);
  EXPECT_EQ(queue_.FindWaiter(kA, Owner{"bob"}), &bob);
}

TEST_F(WaitQueueTest, HolderIsNoWaiter) {
  EnterHeld("ann", kA, "bob");
  EXPECT_EQ(queue_.FindWaiter(kA, Owner{"bob"}), nullptr);
}

TEST_F(WaitQueueTest, OwnerStandsInSeveralLines) {
  const std::vector<LockName> locks = {kA, kB, kOtherA};
  std::vector<size_t> order = {0, 1, 2};
  do {
    std::vector<Waiter*> waiters;
    for (const LockName lock : locks) waiters.push_back(&Enter("ann", lock));
    std::vector<bool> waits(locks.size(), true);
    for (const size_t leaver : order) {
      queue_.Leave(*waiters[leaver]);
      waits[leaver] = false;
      for (size_t i = 0; i < locks.size(); ++i) {
        EXPECT_EQ(queue_.FindWaiter(locks[i], Owner{"ann"}), waits[i] ? waiters[i] : nullptr);
      }
    }
    EXPECT_TRUE(queue_.empty());
  } while (std::next_permutation(order.begin(), order.end()));
}

// --- Holders ----------------------------------------------------------------------------------

TEST_F(WaitQueueTest, LineWakesAfterTheLastMillisecondOfTheHold) {
  EnterHeld("ann", kA, "bob", At(2'000));
  EXPECT_EQ(NextDue(), 2'001);
  EXPECT_EQ(TakeWoken(At(1'999)), Texts{});
  EXPECT_EQ(TakeWoken(At(2'000)), Texts{}) << "a hold lives through its last millisecond";
  EXPECT_EQ(NextDue(), 2'001);
  EXPECT_EQ(TakeWoken(At(2'001)), (Texts{"0:a"}));
  EXPECT_EQ(TakeWoken(At(2'001)), Texts{}) << "once is enough";
  EXPECT_EQ(NextDue(), Ms(kLate)) << "the hold is over: only the time-out is left";
}

TEST_F(WaitQueueTest, HoldThatWasOverWhenItWasTold) {
  EnterHeld("ann", kA, "bob", At(500));
  EXPECT_EQ(NextDue(), 501);
  EXPECT_EQ(TakeWoken(kNow), (Texts{"0:a"}));
}

TEST_F(WaitQueueTest, RenewalMovesTheEnd) {
  EnterHeld("ann", kA, "bob", At(2'000));
  SetHolder(kA, "bob", At(3'000));
  EXPECT_EQ(NextDue(), 3'001) << "a renewal wakes nobody";
  EXPECT_EQ(TakeWoken(At(3'000)), Texts{});
  SetHolder(kA, "bob", At(2'500));  // also to an earlier moment
  EXPECT_EQ(NextDue(), 2'501);
  EXPECT_EQ(TakeWoken(At(2'501)), (Texts{"0:a"}));
  EXPECT_EQ(TakeWoken(At(9'000)), Texts{}) << "no earlier end is remembered";
}

TEST_F(WaitQueueTest, AnotherHolder) {
  EnterHeld("ann", kA, "bob", At(2'000));
  SetHolder(kA, "cid", At(2'000));
  EXPECT_EQ(NextDue(), 2'001);
  EXPECT_EQ(CycleOf("bob", kB, "ann"), Texts{}) << "nobody waits for bob any more";
  EXPECT_EQ(CycleOf("cid", kB, "ann"), (Texts{"cid waits for 0:b", "ann waits for 0:a"}));
}

TEST_F(WaitQueueTest, LineWakesAtOnceWhenNobodyHolds) {
  EnterHeld("ann", kA, "bob", At(2'000));
  EXPECT_EQ(TakeWoken(kNow), Texts{});
  ClearHolder(kA);
  EXPECT_EQ(NextDue(), kDueAtOnce);
  EXPECT_EQ(TakeWoken(kNow), (Texts{"0:a"}));
  EXPECT_EQ(NextDue(), Ms(kLate)) << "the end of the old hold is forgotten";
  EXPECT_EQ(TakeWoken(At(2'001)), Texts{});
}

TEST_F(WaitQueueTest, NobodyHoldsTwice) {
  Enter("ann", kA);
  ClearHolder(kA);  // also a line that never had a holder wakes
  EXPECT_EQ(TakeWoken(kNow), (Texts{"0:a"}));
  ClearHolder(kA);
  EXPECT_EQ(TakeWoken(kNow), (Texts{"0:a"}));
}

TEST_F(WaitQueueTest, NewHolderDoesNotPutALineToSleep) {
  EnterHeld("ann", kA, "bob");
  ClearHolder(kA);
  SetHolder(kA, "cid", At(2'000));
  EXPECT_EQ(TakeWoken(kNow), (Texts{"0:a"})) << "only Settled does";
  EXPECT_EQ(NextDue(), 2'001);
}

TEST_F(WaitQueueTest, HolderOfALockWithoutALineIsNobodysBusiness) {
  SetHolder(kA, "bob", At(2'000));
  ClearHolder(kB);
  EXPECT_TRUE(queue_.empty());
  EXPECT_EQ(queue_.Find(kA), nullptr);
  EXPECT_EQ(NextDue(), kNothingDue);
  EXPECT_EQ(TakeWoken(kLate), Texts{});

  Enter("ann", kA);
  EXPECT_EQ(NextDue(), Ms(kLate)) << "a new line has no holder yet";
  EXPECT_EQ(CycleOf("bob", kB, "ann"), Texts{});
}

TEST_F(WaitQueueTest, HolderIsForgottenWithTheLine) {
  Waiter& waiter = EnterHeld("ann", kA, "bob", At(2'000));
  Enter("cid", kB);
  queue_.Leave(waiter);
  EXPECT_EQ(NextDue(), Ms(kLate));
  Enter("ann", kA);
  EXPECT_EQ(NextDue(), Ms(kLate));
  EXPECT_EQ(TakeWoken(At(2'001)), Texts{});
  EXPECT_EQ(CycleOf("bob", kC, "ann"), Texts{});
}

TEST_F(WaitQueueTest, OneOwnerHoldsSeveralLocks) {
  const std::vector<LockName> locks = {kA, kB, kOtherA};
  std::vector<size_t> order = {0, 1, 2};
  do {
    for (size_t i = 0; i < locks.size(); ++i) {
      EnterHeld("waiter-" + std::to_string(i), locks[i], "bob");
    }
    std::vector<bool> held(locks.size(), true);
    for (const size_t freed : order) {
      ClearHolder(locks[freed]);
      held[freed] = false;
      for (size_t i = 0; i < locks.size(); ++i) {
        EXPECT_EQ(FindCycle("bob", kC, "waiter-" + std::to_string(i)).size(), held[i] ? 2U : 0U);
      }
    }
    TakeWoken(kNow);
    for (size_t i = 0; i < locks.size(); ++i) {
      queue_.Leave(*queue_.FindWaiter(locks[i], Owner{"waiter-" + std::to_string(i)}));
    }
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST_F(WaitQueueTest, HoldsThatEndTogether) {
  EnterHeld("ann", kA, "bob", At(2'000));
  EnterHeld("ann", kB, "bob", At(2'000));
  EnterHeld("ann", kC, "cid", At(2'000));
  EnterHeld("ann", kD, "cid", At(2'001));
  EXPECT_EQ(TakeWoken(At(2'001)), (Texts{"0:a", "0:b", "0:c"}));
  EXPECT_EQ(NextDue(), 2'002);
  EXPECT_EQ(TakeWoken(At(2'002)), (Texts{"0:d"}));
}

TEST_F(WaitQueueTest, HoldWithoutAnEnd) {
  EnterHeld("ann", kA, "bob", kMaxInstant);
  EXPECT_EQ(NextDue(), Ms(kLate));
  EXPECT_EQ(TakeWoken(kMaxInstant), Texts{});
  EXPECT_EQ(CycleOf("bob", kB, "ann"), (Texts{"bob waits for 0:b", "ann waits for 0:a"}));
}

// --- Waking and settling ----------------------------------------------------------------------

TEST_F(WaitQueueTest, EnteringWakesNobody) {
  Enter("ann", kA);
  Enter("bob", kA);
  EXPECT_EQ(TakeWoken(kNow), Texts{});
}

TEST_F(WaitQueueTest, WhoeverLeavesWakesTheLine) {
  for (const size_t leaver : {0U, 1U, 2U}) {
    std::vector<Waiter*> waiters;
    for (const char* owner : {"ann", "bob", "cid"}) waiters.push_back(&Enter(owner, kA));
    Enter("dan", kB);
    queue_.Leave(*waiters[leaver]);
    EXPECT_EQ(NextDue(), kDueAtOnce);
    EXPECT_EQ(TakeWoken(kNow), (Texts{"0:a"}));
    for (Waiter* waiter : waiters) {
      if (waiter->in_line()) queue_.Leave(*waiter);
    }
    queue_.Leave(*queue_.FindWaiter(kB, Owner{"dan"}));
  }
}

TEST_F(WaitQueueTest, LineThatIsGoneDoesNotWake) {
  Waiter& ann = Enter("ann", kA);
  Waiter& bob = Enter("bob", kA);
  Waiter& cid = Enter("cid", kB);
  queue_.Leave(ann);
  queue_.Wake(kA);
  queue_.Leave(bob);
  EXPECT_EQ(queue_.FirstWoken(kNow), nullptr);
  EXPECT_EQ(NextDue(), Ms(kLate));
  queue_.Wake(kB);
  queue_.Leave(cid);
  EXPECT_EQ(queue_.FirstWoken(kNow), nullptr);
  EXPECT_EQ(NextDue(), kNothingDue);
}

TEST_F(WaitQueueTest, Wake) {
  EnterHeld("ann", kA, "bob", At(2'000));
  Enter("ann", kOtherA);
  queue_.Wake(kA);
  queue_.Wake(kB);  // nobody waits there
  EXPECT_EQ(TakeWoken(kNow), (Texts{"0:a"}));
  EXPECT_EQ(NextDue(), 2'001) << "what is known of the holder stays";
  EXPECT_EQ(CycleOf("bob", kB, "ann").size(), 2U);
}

TEST_F(WaitQueueTest, LineStaysWokenUntilItIsSettled) {
  Enter("ann", kA);
  Waiter& bob = Enter("bob", kA);
  queue_.Wake(kA);
  queue_.Leave(bob);  // as one that is granted does
  ASSERT_NE(queue_.FirstWoken(kNow), nullptr);
  EXPECT_TRUE(queue_.FirstWoken(kNow)->lock() == kA);
  EXPECT_TRUE(queue_.FirstWoken(kLate)->lock() == kA);
  EXPECT_EQ(NextDue(), kDueAtOnce);
  queue_.Settled(kA);
  EXPECT_EQ(queue_.FirstWoken(kNow), nullptr);
  EXPECT_EQ(NextDue(), Ms(kLate));
}

TEST_F(WaitQueueTest, SettledMeansOneLine) {
  EnterHeld("ann", kA, "bob", At(2'000));
  EnterHeld("ann", kOtherA, "bob", At(3'000));
  Enter("ann", kB);
  queue_.Wake(kA);
  queue_.Wake(kOtherA);
  queue_.Settled(kB);
  queue_.Settled(kC);  // there is no such line
  queue_.Settled(kA);
  EXPECT_EQ(NextDue(), kDueAtOnce);
  EXPECT_EQ(TakeWoken(kNow), (Texts{"1:a"}));
  EXPECT_EQ(LineOf(kA), (Texts{"ann"})) << "whoever waits goes on waiting";
  EXPECT_EQ(NextDue(), 2'001) << "and the end of the hold is still watched";
  EXPECT_EQ(TakeWoken(At(2'001)), (Texts{"0:a"}));
  EXPECT_EQ(TakeWoken(At(3'001)), (Texts{"1:a"}));
}

TEST_F(WaitQueueTest, TellsWhichLocksHaveALine) {
  EXPECT_TRUE(queue_.Locks(std::nullopt).empty());
  Waiter& ann = Enter("ann", kA);
  Enter("bob", kA);
  Enter("ann", kOtherA);
  Enter("cid", kB);
  const auto names = [this](std::optional<int> db) {
    Texts texts;
    for (const LockName lock : queue_.Locks(db)) {
      texts.push_back(std::to_string(lock.db) + ":" + std::string(lock.key));
    }
    std::sort(texts.begin(), texts.end());
    return texts;
  };
  EXPECT_EQ(names(std::nullopt), (Texts{"0:a", "0:b", "1:a"}));
  EXPECT_EQ(names(0), (Texts{"0:a", "0:b"}));
  EXPECT_EQ(names(1), (Texts{"1:a"}));
  EXPECT_EQ(names(2), Texts{});
  queue_.Leave(ann);
  EXPECT_EQ(names(0), (Texts{"0:a", "0:b"})) << "bob still waits";
}

// --- Time-outs, and what is due next ----------------------------------------------------------

TEST_F(WaitQueueTest, TimeIsOverAtTheDeadline) {
  Waiter& waiter = Enter("ann", kA, At(2'000));
  EXPECT_EQ(queue_.FirstTimedOut(At(1'999)), nullptr);
  EXPECT_EQ(queue_.FirstTimedOut(At(2'000)), &waiter);
  EXPECT_EQ(queue_.FirstTimedOut(At(2'001)), &waiter);
  EXPECT_TRUE(waiter.in_line()) << "the caller takes it out";
  queue_.Leave(waiter);
  EXPECT_EQ(queue_.FirstTimedOut(kLate), nullptr);
}

TEST_F(WaitQueueTest, EarliestDeadlineFirst) {
  Waiter& ann = Enter("ann", kA, At(2'002));
  Waiter& bob = Enter("bob", kA, At(2'001));
  Waiter& cid = Enter("cid", kOtherA, At(2'000));
  EXPECT_EQ(queue_.FirstTimedOut(At(9'000)), &cid);
  queue_.Leave(cid);
  EXPECT_EQ(queue_.FirstTimedOut(At(9'000)), &bob);
  EXPECT_EQ(queue_.FirstTimedOut(At(2'000)), nullptr);
  queue_.Leave(bob);
  EXPECT_EQ(queue_.FirstTimedOut(At(9'000)), &ann);
  queue_.Leave(ann);
  EXPECT_EQ(queue_.FirstTimedOut(At(9'000)), nullptr);
}

TEST_F(WaitQueueTest, SameDeadline) {
  for (const char* owner : {"ann", "bob", "cid"}) Enter(owner, kA, At(2'000));
  Enter("dan", kA, At(2'001));
  Texts gone;
  while (Waiter* waiter = queue_.FirstTimedOut(At(2'000))) {
    gone.emplace_back(waiter->request().owner.bytes);
    queue_.Leave(*waiter);
  }
  std::sort(gone.begin(), gone.end());
  EXPECT_EQ(gone, (Texts{"ann", "bob", "cid"}));
  EXPECT_EQ(LineOf(kA), (Texts{"dan"}));
}

TEST_F(WaitQueueTest, NextDueIsTheEarliestOfAll) {
  Waiter& ann = Enter("ann", kA, At(5'000));
  EXPECT_EQ(NextDue(), 5'000);
  Waiter& bob = Enter("bob", kB, At(4'000));
  EXPECT_EQ(NextDue(), 4'000);
  SetHolder(kA, "cid", At(3'000));
  EXPECT_EQ(NextDue(), 3'001);
  SetHolder(kB, "cid", At(2'000));
  EXPECT_EQ(NextDue(), 2'001);
  SetHolder(kB, "cid", At(3'999));
  EXPECT_EQ(NextDue(), 3'001);
  SetHolder(kA, "cid", At(4'000));
  EXPECT_EQ(NextDue(), 4'000) << "4001 would be the end, 4000 is the time-out";
  queue_.Wake(kA);
  EXPECT_EQ(NextDue(), kDueAtOnce);
  queue_.Settled(kA);
  EXPECT_EQ(NextDue(), 4'000);
  queue_.Leave(bob);
  EXPECT_EQ(NextDue(), 4'001);
  queue_.Leave(ann);
  EXPECT_EQ(NextDue(), kNothingDue);
}

// --- Deadlocks --------------------------------------------------------------------------------

TEST_F(WaitQueueTest, NoCycleWhenNobodyWaits) {
  EXPECT_EQ(CycleOf("ann", kA, "bob"), Texts{});
  EXPECT_EQ(CycleOf("ann", kA, std::nullopt), Texts{});
}

TEST_F(WaitQueueTest, NoCycleWhenNobodyWaitsForTheAsker) {
  EnterHeld("bob", kA, "cid");
  EnterHeld("cid", kB, "dan");
  EnterHeld("ann", kC, "bob");                    // the asker waits itself, for others
  EXPECT_EQ(CycleOf("ann", kD, "bob"), Texts{});  // whoever holds d waits
  EXPECT_EQ(CycleOf("ann", kA, "cid"), Texts{});  // the line of a is there
  EXPECT_EQ(CycleOf("eve", kA, "cid"), Texts{});  // eve is unknown
  EXPECT_EQ(CycleOf("dan", kD, "somebody"),
            Texts{});  // one waits for dan; dan waits for a stranger
}

TEST_F(WaitQueueTest, CycleOfTwo) {
  EnterHeld("ann", kA, "bob");
  const Texts expected = {"bob waits for 0:b", "ann waits for 0:a"};
  EXPECT_EQ(CycleOf("bob", kB, "ann"), expected);
  EXPECT_EQ(CycleOf("bob", kB, "ann"), expected) << "looking changes nothing";
  EXPECT_EQ(LineOf(kB), Texts{});
  EXPECT_EQ(queue_.size(), 1U);
  EXPECT_EQ(CycleOf("ann", kB, "bob"), Texts{}) << "the other way round there is none";
}

TEST_F(WaitQueueTest, StepsNameWhatTheCallerAskedFor) {
  const std::string key = "b";
  const std::string owner = "bob";
  EnterHeld("ann", kA, "bob");
  const std::vector<Step> steps = FindCycle(owner, {0, key}, "ann");
  ASSERT_EQ(steps.size(), 2U);
  EXPECT_EQ(steps[0].owner.bytes.data(), owner.data()) << "a view into the arguments";
  EXPECT_EQ(steps[0].lock.key.data(), key.data());
}

TEST_F(WaitQueueTest, CycleOfThree) {
  EnterHeld("ann", kA, "bob");
  EnterHeld("bob", kB, "cid");
  EXPECT_EQ(CycleOf("cid", kC, "ann"),
            (Texts{"cid waits for 0:c", "ann waits for 0:a", "bob waits for 0:b"}));
  EXPECT_EQ(CycleOf("cid", kC, "bob"), (Texts{"cid waits for 0:c", "bob waits for 0:b"}));
}

TEST_F(WaitQueueTest, CycleOfManySteps) {
  constexpr int kOwners = 2'000;
  const auto owner = [](int i) { return "owner-" + std::to_string(i); };
  const auto key = [](int i) { return "key-" + std::to_string(i); };
  // Number i waits for lock i, which number i + 1 holds.
  for (int i = 0; i + 1 < kOwners; ++i) EnterHeld(owner(i), {0, key(i)}, owner(i + 1));
  const std::string last_key = key(kOwners - 1);
  const std::vector<Step> steps = FindCycle(owner(kOwners - 1), {0, last_key}, owner(0));
  ASSERT_EQ(steps.size(), size_t{kOwners});
  EXPECT_EQ(steps[0].lock.key, last_key);
  for (int i = 1; i < kOwners; ++i) {
    EXPECT_EQ(steps[static_cast<size_t>(i)].owner.bytes, owner(i - 1));
    EXPECT_EQ(steps[static_cast<size_t>(i)].lock.key, key(i - 1));
  }
}

TEST_F(WaitQueueTest, CycleWithTheFewestSteps) {
  // The long way: dan -> ann -> bob -> cid -> dan. The short one: dan -> ann -> cid -> dan, over
  // another wait of ann.
  EnterHeld("cid", kC, "dan");
  EnterHeld("bob", kB, "cid");
  const Texts fewest = {"dan waits for 0:d", "ann waits for 1:a", "cid waits for 0:c"};
  Waiter& long_way = EnterHeld("ann", kA, "bob");
  EnterHeld("ann", kOtherA, "cid");
  EXPECT_EQ(CycleOf("dan", kD, "ann"), fewest);
  // In whichever order ann's waits began.
  queue_.Leave(long_way);
  EXPECT_EQ(CycleOf("dan", kD, "ann"), fewest);
  EnterHeld("ann", kA, "bob");
  EXPECT_EQ(CycleOf("dan", kD, "ann"), fewest);
}

TEST_F(WaitQueueTest, HolderAndLineAreTheSameNumberOfStepsAway) {
  // ann asks for d: its holder bob waits for a long row, cid in its line waits for ann.
  EnterHeld("bob", kA, "eve");
  EnterHeld("eve", kB, "ann");
  EnterHeld("cid", kC, "ann");
  EnterHeld("cid", kD, "bob");
  EXPECT_EQ(CycleOf("ann", kD, "bob"), (Texts{"ann waits for 0:d", "cid waits for 0:c"}));
}

// Whoever stands ahead will have the lock first.
TEST_F(WaitQueueTest, WaitBehindOneThatWaitsForTheAsker) {
  EnterHeld("bob", kA, "ann");
  EnterHeld("bob", kB, "stranger");
  EXPECT_EQ(CycleOf("ann", kB, "stranger"), (Texts{"ann waits for 0:b", "bob waits for 0:a"}));
  EXPECT_EQ(CycleOf("ann", kB, std::nullopt), (Texts{"ann waits for 0:b", "bob waits for 0:a"}));
}

TEST_F(WaitQueueTest, QueueOrderCountsFurtherOn) {
  // bob stands behind ann in b; cid holds c and asks for what bob holds.
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

TEST_F(WaitQueueTest, LineIsWalkedUpFromEveryPlaceInIt) {
  // All who wait for d: first eve, whom the walk from ann's place in the line reaches too.
  EnterHeld("eve", kD, "stranger");
  Enter("ann", kD);
  Enter("bob", kD);
  // cid asks for c, held by ann; the line of d has been walked from ann up; then by bob.
  EnterHeld("bob", kC, "ann");
  EnterHeld("eve", kA, "cid");
  EXPECT_EQ(CycleOf("cid", kC, "ann"),
            (Texts{"cid waits for 0:c", "ann waits for 0:d", "eve waits for 0:a"}));
  EXPECT_EQ(CycleOf("cid", kB, "bob"),
            (Texts{"cid waits for 0:b", "bob waits for 0:d", "eve waits for 0:a"}));
}

TEST_F(WaitQueueTest, HoldThatIsOverDoesNotCount) {
  EnterHeld("ann", kA, "bob", At(2'000));
  EXPECT_EQ(CycleOf("bob", kB, "ann", At(2'000)).size(), 2U);
  EXPECT_EQ(CycleOf("bob", kB, "ann", At(2'001)), Texts{});
  EXPECT_EQ(CycleOf("bob", kB, "ann", At(2'000)).size(), 2U) << "looking changes nothing";
}

TEST_F(WaitQueueTest, HolderThatTheCallerDoesNotNameDoesNotCount) {
  // bob's hold of b ended, and ann asks for b. Had it not, there would be a cycle.
  EnterHeld("bob", kA, "ann");
  EXPECT_EQ(CycleOf("ann", kB, "bob").size(), 2U);
  EXPECT_EQ(CycleOf("ann", kB, std::nullopt), Texts{});
}

TEST_F(WaitQueueTest, CycleGoesWithAnyOfItsParts) {
  Waiter& ann = EnterHeld("ann", kA, "bob");
  Enter("dan", kA);
  EXPECT_EQ(CycleOf("bob", kB, "ann").size(), 2U);
  queue_.Leave(ann);  // gave up
  EXPECT_EQ(CycleOf("bob", kB, "ann"), Texts{});
  EXPECT_EQ(CycleOf("bob", kB, "dan").size(), 2U);
  ClearHolder(kA);  // bob gave it up
  EXPECT_EQ(CycleOf("bob", kB, "dan"), Texts{});
}

TEST_F(WaitQueueTest, CycleOfOneWhoWaitsForSeveralLocks) {
  Enter("ann", kA);
  EnterHeld("ann", kB, "bob");
  Enter("ann", kC);
  EXPECT_EQ(CycleOf("bob", kD, "ann"), (Texts{"bob waits for 0:d", "ann waits for 0:b"}));
}

TEST_F(WaitQueueTest, CycleAcrossDatabases) {
  EnterHeld("ann", kOtherA, "bob");
  EXPECT_EQ(CycleOf("bob", kA, "ann"), (Texts{"bob waits for 0:a", "ann waits for 1:a"}));
  EnterHeld("bob", {7, "a"}, "cid");
  EXPECT_EQ(CycleOf("cid", kA, "ann"),
            (Texts{"cid waits for 0:a", "ann waits for 1:a", "bob waits for 7:a"}));
}

TEST_F(WaitQueueTest, CycleOfOthersIsNotTheAskers) {
  // A stranger's SET made ann and bob wait for each other. cid waits for them and holds something
  // that nobody in that circle wants.
  EnterHeld("ann", kA, "bob");
  EnterHeld("bob", kB, "ann");
  EnterHeld("dan", kC, "cid");
  EXPECT_EQ(CycleOf("cid", kD, "ann"), Texts{});
  EXPECT_EQ(CycleOf("cid", kA, "bob"), Texts{});
  EXPECT_EQ(CycleOf("ann", kD, "bob"), (Texts{"ann waits for 0:d", "bob waits for 0:b"}));
}

TEST_F(WaitQueueTest, HolderThatNobodyKnows) {
  // The value of a plain lock that is too long to be an owner's.
  EnterHeld("ann", kA, "");
  EnterHeld("bob", kB, "");
  EXPECT_EQ(CycleOf("ann", kB, ""), Texts{});
  EXPECT_EQ(CycleOf("cid", kB, ""), Texts{});
}

TEST_F(WaitQueueTest, AfterATakeOverTheNewCallCounts) {
  Waiter& older = EnterHeld("ann", kA, "bob");
  Enter("cid", kA);
  queue_.TakeOver(NewCall(), older);
  EXPECT_EQ(CycleOf("bob", kB, "ann").size(), 2U);
  EXPECT_EQ(CycleOf("ann", kB, "cid"), (Texts{"ann waits for 0:b", "cid waits for 0:a"}));
}

// --- How a cycle is described -----------------------------------------------------------------

bool Everything(LockName /*lock*/) { return true; }

TEST(DescribeCycle, AsTheContractSaysIt) {
  WaitQueue queue;
  Waiter waiter(kLease, kNow, kLate);
  queue.Enter(waiter, kA, Owner{"worker-2"});
  queue.SetHolder(kA, Owner{"worker-1"}, kLate);
  const auto cycle = queue.FindCycle(Owner{"worker-1"}, kB, Owner{"worker-2"}, kNow);
  ASSERT_EQ(cycle.size(), 2U);
  EXPECT_EQ(
      DescribeCycle(cycle, Everything),
      R"(waiting for "b" would close the cycle worker-1 -> "b" -> worker-2 -> "a" -> worker-1)");
}

TEST(DescribeCycle, HiddenLocksAndTheirOwners) {
  const std::vector<Step> cycle = {{Owner{"ann"}, kA}, {Owner{"bob"}, kB}, {Owner{"cid"}, kC}};
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

TEST(DescribeCycle, VisibilityIsAskedForTheLockInItsDatabase) {
  const std::vector<Step> cycle = {{Owner{"ann"}, kA}, {Owner{"bob"}, kOtherA}};
  EXPECT_EQ(DescribeCycle(cycle, [](LockName lock) { return lock == kA; }),
            R"(waiting for "a" would close the cycle ann -> "a" -> bob -> ? -> ann)");
}

TEST(DescribeCycle, NamesAreFitToBeRead) {
  const std::string binary("\0\r\n\xff", 4);
  const std::string wide(256, 'z');
  const std::vector<Step> cycle = {{Owner{binary}, {0, "say \"a\"\\"}},
                                   {Owner{"two words"}, {0, binary}},
                                   {Owner{wide}, {0, ""}}};
  EXPECT_EQ(DescribeCycle(cycle, Everything),
            R"(waiting for "say \"a\"\\" would close the cycle "\x00\x0d\x0a\xff")"
            R"( -> "say \"a\"\\" -> "two words" -> "\x00\x0d\x0a\xff" -> ")" +
                std::string(40, 'z') + R"("... (256 bytes) -> "" -> "\x00\x0d\x0a\xff")");
}

TEST(DescribeCycle, LongCyclesAreCut) {
  std::vector<std::string> owners;
  for (int i = 0; i < 100; ++i) owners.push_back("w" + std::to_string(i));
  const auto describe = [&](size_t steps) {
    std::vector<Step> cycle;
    for (size_t i = 0; i < steps; ++i) cycle.push_back({Owner{owners[i]}, kA});
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

// --- Memory -----------------------------------------------------------------------------------

static_assert(sizeof(Waiter) <= 96);

#ifdef __GLIBC__
// What this process has got from malloc, in bytes; always zero under AddressSanitizer.
int64_t Allocated() {
  const auto info = mallinfo2();
  return static_cast<int64_t>(info.uordblks + info.hblkhd);
}

TEST_F(WaitQueueTest, PlaceInALineIsSmall) {
  constexpr int64_t kWaiters = 5'000;
  std::deque<std::string> owners;  // as long as a UUID
  for (int64_t i = 0; i < kWaiters; ++i) {
    owners.push_back("0123456789abcdef0123456789ab-" + std::to_string(1'000'000 + i));
    NewCall();
  }
  const int64_t before = Allocated();
  for (size_t i = 0; i < owners.size(); ++i) queue_.Enter(calls_[i], kA, Owner{owners[i]});
  const int64_t each = (Allocated() - before) / kWaiters;
  RecordProperty("bytes_each", std::to_string(each));
  EXPECT_LE(each, 320);
  for (Waiter& waiter : calls_) queue_.Leave(waiter);
  EXPECT_LT(Allocated() - before, 4'096) << "after a rush nothing is kept";
}

TEST_F(WaitQueueTest, NothingIsLeftOfThoseWhoWent) {
  EnterHeld("somebody", {0, "busy"}, "holder");  // the queue never gets empty
  const int64_t before = Allocated();
  for (int i = 0; i < 20'000; ++i) {
    Waiter waiter(kLease, kNow, kLate);
    Waiter newer(kLease, kNow, kLate);
    const std::string number = std::to_string(i);
    const std::string key = "the key of a lock that is used once: " + number;
    queue_.Enter(waiter, {0, key}, Owner{"a waiter that never comes back: " + number});
    queue_.SetHolder({0, key}, Owner{"a holder that never comes back: " + number}, kLate);
    queue_.SetHolder({0, key}, Owner{"another holder: " + number}, kLate);
    if (i % 2 == 0) queue_.SetHolder({0, key}, std::nullopt, kMinInstant);
    queue_.TakeOver(newer, waiter);
    queue_.Leave(newer);
  }
  EXPECT_LT(Allocated() - before, 64 * 1'024);
}
#endif

}  // namespace
}  // namespace turnstile
