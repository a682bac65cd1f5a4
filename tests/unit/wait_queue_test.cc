// Every operation of the waiting lines, with hand-set time.

#include "core/wait_queue.h"

#include <gtest/gtest.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/intrusive_list.h"

namespace turnstile {
namespace {

using namespace std::string_literals;
using Waiter = WaitQueue::Waiter;
using Step = WaitQueue::Step;
using Company = WaitQueue::Company;
using Offered = WaitQueue::Offered;
using Texts = std::vector<std::string>;

constexpr Instant At(int64_t ms) { return Instant{Millis{ms}}; }
constexpr Tick TickAt(int64_t ms) { return Tick{Millis{ms}}; }
// Moments as numbers: failures are easier to read.
constexpr int64_t Ms(Instant moment) { return moment.time_since_epoch().count(); }
constexpr int64_t Ms(Tick tick) { return tick.time_since_epoch().count(); }

constexpr Instant kNow = At(1'000);
constexpr Instant kLate = At(1'000'000);
constexpr Tick kTickNow = TickAt(Ms(kNow));
constexpr Tick kLateTick = TickAt(Ms(kLate));
constexpr Millis kLease{30};
constexpr int64_t kNothingDue = Ms(kMaxInstant);
constexpr int64_t kDueAtOnce = Ms(kMinInstant);

constexpr LockName kA{0, "a"};
constexpr LockName kB{0, "b"};
constexpr LockName kC{0, "c"};
constexpr LockName kD{0, "d"};
constexpr LockName kOtherA{1, "a"};

AcquireRequest Exclusive(Millis lease = kLease) { return {.owner = {}, .lease = lease}; }
AcquireRequest Shared() { return {.owner = {}, .lease = kLease, .mode = Mode::kShared}; }
AcquireRequest Limit(uint32_t limit) {
  return {.owner = {}, .lease = kLease, .mode = Mode::kLimit, .limit = limit};
}

using Locks = std::vector<LockName>;

class WaitQueueTest : public testing::Test {
 protected:
  // A queue goes when nobody waits any more; and then nothing is left.
  void TearDown() override {
    while (Waiter* waiter = queue_.FirstTimedOut(kMaxTick)) queue_.Leave(*waiter);
    EXPECT_TRUE(queue_.empty());
    EXPECT_EQ(NextDue(), kNothingDue);
    EXPECT_TRUE(queue_.Locks(std::nullopt).empty());
  }

  Waiter& NewCall(const AcquireRequest& request, Tick deadline = kLateTick) {
    return calls_.emplace_back(request, kTickNow, deadline);
  }
  Waiter& NewCall(Tick deadline = kLateTick) { return NewCall(Exclusive(), deadline); }

  void EnterCall(Waiter& waiter, LockName lock, std::string_view owner) {
    queue_.Enter(waiter, std::span(&lock, 1), Owner{owner}, /*upgrade=*/false);
  }

  Waiter& Enter(std::string_view owner, LockName lock, Tick deadline = kLateTick) {
    Waiter& waiter = NewCall(deadline);
    EnterCall(waiter, lock, owner);
    return waiter;
  }
  Waiter& Enter(std::string_view owner, const Locks& locks, const AcquireRequest& request) {
    Waiter& waiter = NewCall(request);
    queue_.Enter(waiter, locks, Owner{owner}, /*upgrade=*/false);
    return waiter;
  }
  Waiter& Enter(std::string_view owner, LockName lock, const AcquireRequest& request) {
    return Enter(owner, Locks{lock}, request);
  }
  Waiter& EnterUpgrade(std::string_view owner, LockName lock) {
    Waiter& waiter = NewCall();
    queue_.Enter(waiter, std::span(&lock, 1), Owner{owner}, /*upgrade=*/true);
    return waiter;
  }

  // An exclusive holder.
  void SetHolder(LockName lock, std::string_view owner, Instant end = kLate) {
    queue_.SetHolder(lock, Mode::kExclusive, Owner{owner}, end, Company::kAlone);
  }
  // One more holder.
  void AddHolder(LockName lock, Mode mode, std::string_view owner, Instant end = kLate) {
    queue_.SetHolder(lock, mode, Owner{owner}, end, Company::kWithOthers);
  }
  void ClearHolder(LockName lock) { queue_.ClearHolders(lock); }

  // `owner` waits for `lock`, which `holder` holds.
  Waiter& EnterHeld(std::string_view owner, LockName lock, std::string_view holder,
                    Instant end = kLate) {
    Waiter& waiter = Enter(owner, lock);
    SetHolder(lock, holder, end);
    return waiter;
  }

  // The only wait of `owner` for `lock`, or null.
  Waiter* FindWaiter(LockName lock, std::string_view owner) {
    const std::vector<Waiter*> found = queue_.FindWaiters(std::span(&lock, 1), Owner{owner});
    EXPECT_LE(found.size(), 1U);
    return found.empty() ? nullptr : found.front();
  }

  Texts LineOf(LockName lock) {
    const WaitQueue::Line* line = queue_.Find(lock);
    if (line == nullptr) return {};
    EXPECT_TRUE(line->lock() == lock);
    Texts owners;
    for (const WaitQueue::Place* place = line->first(); place != nullptr; place = place->behind()) {
      const Waiter& waiter = place->waiter();
      EXPECT_TRUE(waiter.in_line());
      bool names_it = false;
      for (size_t i = 0; i < waiter.size(); ++i) names_it = names_it || waiter.lock(i) == lock;
      EXPECT_TRUE(names_it);
      owners.emplace_back(waiter.request().owner.bytes);
    }
    EXPECT_EQ(line->size(), owners.size());
    EXPECT_NE(line->size(), 0U);
    return owners;
  }

  // Nobody in the line can be granted anything.
  void SettleAsBlocked(LockName lock) {
    WaitQueue::Line* line = queue_.Find(lock);
    if (line == nullptr) return;
    queue_.Settle(*line, [](Waiter&, const Crowd&) { return Offered::kBlockedHere; });
  }

  // The lines that are woken at `now`, in order of their names. Settles them.
  Texts TakeWoken(Instant now) {
    Texts woken;
    while (const WaitQueue::Line* line = queue_.FirstWoken(now)) {
      EXPECT_EQ(queue_.FirstWoken(now), line) << "asking twice makes no difference";
      EXPECT_EQ(Ms(queue_.NextDue()), kDueAtOnce);
      woken.push_back(std::to_string(line->lock().db) + ":" + std::string(line->lock().key));
      if (woken.size() > 10'000) {
        ADD_FAILURE() << "Settle leaves the line woken";
        break;
      }
      SettleAsBlocked(line->lock());
    }
    std::sort(woken.begin(), woken.end());
    return woken;
  }

  // Both clocks show the same here.
  int64_t NextDue() const { return std::min(Ms(queue_.NextDue()), Ms(queue_.NextTimeOut())); }

  // "ann waits for 0:b": one text a step.
  static Texts TextsOf(const std::vector<Step>& steps) {
    Texts texts;
    for (const Step& step : steps) {
      texts.push_back(std::string(step.owner.bytes) + " waits for " + std::to_string(step.lock.db) +
                      ":" + std::string(step.lock.key));
    }
    return texts;
  }

  // The cycle that a wait already begun has closed.
  Texts CycleOf(Waiter& waiter, std::vector<Waiter*> ignored = {}, Instant now = kNow) {
    return TextsOf(queue_.FindCycle(waiter, ignored, now));
  }

  // The cycle that this wait would close. A holder is named if the lock has no line yet.
  Texts CycleOf(std::string_view owner, LockName lock, std::optional<std::string_view> holder,
                Instant now = kNow) {
    const bool is_new = queue_.Find(lock) == nullptr;
    Waiter waiter(Exclusive(), kTickNow, kLateTick);
    EnterCall(waiter, lock, owner);
    if (is_new && holder.has_value()) SetHolder(lock, *holder);
    Texts texts = CycleOf(waiter, {}, now);
    queue_.Leave(waiter);
    return texts;
  }
  Texts CycleOf(std::string_view owner, const Locks& locks, const AcquireRequest& request) {
    Waiter waiter(request, kTickNow, kLateTick);
    queue_.Enter(waiter, locks, Owner{owner}, /*upgrade=*/false);
    Texts texts = CycleOf(waiter);
    queue_.Leave(waiter);
    return texts;
  }

  // Whom Settle offers, "ann behind 0", as long as `answer` says.
  template <typename Answer>
  Texts Offers(LockName lock, Answer answer) {
    Texts offers;
    queue_.Settle(*queue_.Find(lock), [&](Waiter& waiter, const Crowd& ahead) {
      const std::string owner(waiter.request().owner.bytes);
      offers.push_back(owner + " behind " + std::to_string(ahead.size));
      const Offered offered = answer(owner);
      if (offered == Offered::kLeft || offered == Offered::kTookAll) queue_.Leave(waiter);
      return offered;
    });
    return offers;
  }

  std::deque<Waiter> calls_;
  WaitQueue queue_;
};

// --- The lists that lines are made of ---------------------------------------------------------

struct Bead {
  int number = 0;
  Link<Bead> red{};
  Link<Bead> blue{};
};

template <Link<Bead> Bead::*kLink>
std::vector<int> NumbersIn(const IntrusiveList<Bead, kLink>& list) {
  std::vector<int> numbers;
  std::vector<int> backwards;
  for (const Bead* bead = list.first(); bead != nullptr; bead = (bead->*kLink).after) {
    numbers.push_back(bead->number);
  }
  for (const Bead* bead = list.last(); bead != nullptr; bead = (bead->*kLink).before) {
    backwards.insert(backwards.begin(), bead->number);
  }
  EXPECT_EQ(numbers, backwards);
  EXPECT_EQ(list.size(), numbers.size());
  EXPECT_EQ(list.empty(), numbers.empty());
  return numbers;
}

TEST(IntrusiveList, InsertsAnywhere) {
  std::array<Bead, 5> beads = {{{1}, {2}, {3}, {4}, {5}}};
  IntrusiveList<Bead, &Bead::red> list;
  EXPECT_EQ(NumbersIn(list), std::vector<int>{});
  list.InsertBefore(nullptr, beads[2]);
  list.InsertBefore(&beads[2], beads[0]);
  list.InsertBefore(&beads[2], beads[1]);
  list.Append(beads[3]);
  list.InsertBefore(nullptr, beads[4]);
  EXPECT_EQ(NumbersIn(list), (std::vector<int>{1, 2, 3, 4, 5}));
}

TEST(IntrusiveList, RemovesFromAnywhereAndTakesBack) {
  std::array<Bead, 4> beads = {{{1}, {2}, {3}, {4}}};
  std::vector<size_t> order = {0, 1, 2, 3};
  do {
    IntrusiveList<Bead, &Bead::red> list;
    std::vector<int> left;
    for (Bead& bead : beads) {
      list.Append(bead);
      left.push_back(bead.number);
    }
    for (const size_t i : order) {
      list.Remove(beads.at(i));
      std::erase(left, beads.at(i).number);
      EXPECT_EQ(NumbersIn(list), left);
      EXPECT_EQ(beads.at(i).red.before, nullptr);
      EXPECT_EQ(beads.at(i).red.after, nullptr);
    }
    list.Append(beads[0]);
    EXPECT_EQ(NumbersIn(list), (std::vector<int>{1}));
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(IntrusiveList, ElementStandsInTwoLists) {
  std::array<Bead, 3> beads = {{{1}, {2}, {3}}};
  IntrusiveList<Bead, &Bead::red> red;
  IntrusiveList<Bead, &Bead::blue> blue;
  for (Bead& bead : beads) {
    red.Append(bead);
    blue.InsertBefore(blue.first(), bead);
  }
  red.Remove(beads[1]);
  EXPECT_EQ(NumbersIn(red), (std::vector<int>{1, 3}));
  EXPECT_EQ(NumbersIn(blue), (std::vector<int>{3, 2, 1}));
}

// --- Lines ------------------------------------------------------------------------------------

TEST_F(WaitQueueTest, BeginsEmpty) {
  EXPECT_TRUE(queue_.empty());
  EXPECT_EQ(queue_.size(), 0U);
  EXPECT_EQ(queue_.Find(kA), nullptr);
  EXPECT_EQ(FindWaiter(kA, "ann"), nullptr);
  EXPECT_EQ(queue_.FirstWoken(kLate), nullptr);
  EXPECT_EQ(queue_.FirstTimedOut(kLateTick), nullptr);
  EXPECT_EQ(NextDue(), kNothingDue);
}

TEST_F(WaitQueueTest, KeepsTheOrderOfArrival) {
  // Neither names nor deadlines have a say.
  Enter("dan", kA, TickAt(3'000));
  Enter("ann", kA, TickAt(1'000));
  Enter("cid", kA, TickAt(4'000));
  Enter("bob", kA, TickAt(2'000));
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
  queue_.Leave(*FindWaiter(kB, "bob"));
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
  EXPECT_NE(FindWaiter(kZero, "\0y"sv), nullptr);
  EXPECT_EQ(FindWaiter(kZero, "\0"sv), nullptr);
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
  EXPECT_EQ(waiter.lock(0).key, "resource");
  EXPECT_EQ(LineOf({0, "resource"}), (Texts{"ann"}));
  EXPECT_EQ(CycleOf("bob", kB, "ann"), (Texts{"bob waits for 0:b", "ann waits for 0:resource"}));
}

TEST_F(WaitQueueTest, WaiterTellsWhatItAsksFor) {
  Waiter waiter(Exclusive(Millis{1'234}), TickAt(5), TickAt(77));
  EXPECT_FALSE(waiter.in_line());
  EnterCall(waiter, kOtherA, "ann");
  EXPECT_TRUE(waiter.in_line());
  EXPECT_EQ(waiter.request().owner.bytes, "ann");
  EXPECT_EQ(waiter.request().lease, Millis{1'234});
  EXPECT_TRUE(waiter.lock(0) == kOtherA);
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
  EnterCall(waiter, kA, "ann");
  EXPECT_EQ(LineOf(kA), (Texts{"bob", "ann"}));
  queue_.Leave(waiter);
  EnterCall(waiter, kB, "cid");
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
      Enter(owner(line, place), {line % 3, key(line)}, TickAt(10'000 + line * kEach + place));
    }
  }
  EXPECT_EQ(queue_.size(), size_t{kLines} * kEach);
  for (int line = 0; line < kLines; ++line) {
    Texts expected;
    for (int place = 0; place < kEach; ++place) expected.push_back(owner(line, place));
    EXPECT_EQ(LineOf({line % 3, key(line)}), expected);
  }
  for (int due = 10'000; due < 10'000 + kLines * kEach; ++due) {
    EXPECT_EQ(queue_.FirstTimedOut(TickAt(due - 1)), nullptr);
    Waiter* waiter = queue_.FirstTimedOut(TickAt(due));
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
    EXPECT_EQ(&queue_.Find(kA)->first()->waiter(), waiters[0]);
    EXPECT_FALSE(older.in_line());
    EXPECT_TRUE(newer.in_line());
    EXPECT_EQ(FindWaiter(kA, owners[place]), &newer);

    // The links behind it are right, too: all leave from the end on.
    Enter("dan", kA);
    EXPECT_EQ(LineOf(kA), (Texts{"ann", "bob", "cid", "dan"}));
    queue_.Leave(*FindWaiter(kA, "dan"));
    queue_.Leave(*waiters[2]);
    EXPECT_EQ(LineOf(kA), (Texts{"ann", "bob"}));
    queue_.Leave(*waiters[1]);
    EXPECT_EQ(LineOf(kA), (Texts{"ann"}));
    queue_.Leave(*waiters[0]);
    EXPECT_TRUE(queue_.empty());
  }
}

TEST_F(WaitQueueTest, TakeOverBringsItsOwnTimesAndLease) {
  Waiter older(Exclusive(Millis{10}), TickAt(1), TickAt(100));
  Waiter newer(Exclusive(Millis{20}), TickAt(50), TickAt(150));
  Waiter newest(Exclusive(Millis{30}), TickAt(60), TickAt(70));
  EnterCall(older, kA, "ann");
  queue_.TakeOver(newer, older);
  SettleAsBlocked(kA);
  EXPECT_EQ(newer.request().lease, Millis{20});
  EXPECT_EQ(newer.request().owner.bytes, "ann");
  EXPECT_EQ(Ms(newer.since()), 50);
  EXPECT_EQ(NextDue(), 150);
  EXPECT_EQ(queue_.FirstTimedOut(TickAt(149)), nullptr);
  EXPECT_EQ(queue_.FirstTimedOut(TickAt(150)), &newer);

  queue_.TakeOver(newest, newer);  // an earlier deadline counts as well
  SettleAsBlocked(kA);
  EXPECT_EQ(NextDue(), 70);
  EXPECT_EQ(queue_.FirstTimedOut(TickAt(70)), &newest);
  EXPECT_EQ(queue_.size(), 1U);
  queue_.Leave(newest);
  EXPECT_TRUE(queue_.empty());
}

TEST_F(WaitQueueTest, TakeOverChangesNothingElse) {
  Waiter& older = EnterHeld("ann", kA, "bob", At(2'000));
  Enter("ann", kB);
  queue_.TakeOver(NewCall(), older);
  EXPECT_EQ(TakeWoken(At(2'000)), (Texts{"0:a"})) << "it may ask for less than the older did";
  EXPECT_EQ(CycleOf("bob", kC, "ann"), (Texts{"bob waits for 0:c", "ann waits for 0:a"}));
  EXPECT_EQ(TakeWoken(At(2'001)), (Texts{"0:a"})) << "the holder is still known";

  queue_.Wake(kA);
  queue_.TakeOver(NewCall(), *FindWaiter(kA, "ann"));
  EXPECT_EQ(TakeWoken(At(2'001)), (Texts{"0:a"})) << "a woken line stays so";
}

TEST_F(WaitQueueTest, TakeOverInOneOfSeveralLines) {
  const std::vector<LockName> locks = {kA, kB, kC};
  for (const LockName taken : locks) {
    for (const LockName lock : locks) Enter("ann", lock);
    Waiter& newer = NewCall();
    queue_.TakeOver(newer, *FindWaiter(taken, "ann"));
    EXPECT_EQ(FindWaiter(taken, "ann"), &newer);
    for (const LockName lock : locks) {
      Waiter* waiter = FindWaiter(lock, "ann");
      ASSERT_NE(waiter, nullptr);
      EXPECT_TRUE(waiter->lock(0) == lock);
      queue_.Leave(*waiter);
      EXPECT_EQ(FindWaiter(lock, "ann"), nullptr);
    }
    EXPECT_TRUE(queue_.empty());
  }
}

// --- One owner in several lines ---------------------------------------------------------------

TEST_F(WaitQueueTest, FindsTheWaiterOfAnOwner) {
  Waiter& ann = Enter("ann", kA);
  Waiter& bob = Enter("bob", kA);
  EXPECT_EQ(FindWaiter(kA, "ann"), &ann);
  EXPECT_EQ(FindWaiter(kA, "bob"), &bob);
  EXPECT_EQ(FindWaiter(kA, "cid"), nullptr);
  EXPECT_EQ(FindWaiter(kB, "ann"), nullptr);
  EXPECT_EQ(FindWaiter(kOtherA, "ann"), nullptr);
  queue_.Leave(ann);
  EXPECT_EQ(FindWaiter(kA, "ann"), nullptr);
  EXPECT_EQ(FindWaiter(kA, "bob"), &bob);
}

TEST_F(WaitQueueTest, HolderIsNoWaiter) {
  EnterHeld("ann", kA, "bob");
  EXPECT_EQ(FindWaiter(kA, "bob"), nullptr);
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
        EXPECT_EQ(FindWaiter(locks[i], "ann"), waits[i] ? waiters[i] : nullptr);
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
  EXPECT_EQ(TakeWoken(kNow), (Texts{"0:a"})) << "only Settle does";
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
        EXPECT_EQ(CycleOf("bob", kC, "waiter-" + std::to_string(i)).size(), held[i] ? 2U : 0U);
      }
    }
    TakeWoken(kNow);
    for (size_t i = 0; i < locks.size(); ++i) {
      queue_.Leave(*FindWaiter(locks[i], "waiter-" + std::to_string(i)));
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
    queue_.Leave(*FindWaiter(kB, "dan"));
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
  SettleAsBlocked(kA);
  EXPECT_EQ(queue_.FirstWoken(kNow), nullptr);
  EXPECT_EQ(NextDue(), Ms(kLate));
}

TEST_F(WaitQueueTest, SettledMeansOneLine) {
  EnterHeld("ann", kA, "bob", At(2'000));
  EnterHeld("ann", kOtherA, "bob", At(3'000));
  Enter("ann", kB);
  queue_.Wake(kA);
  queue_.Wake(kOtherA);
  SettleAsBlocked(kB);
  SettleAsBlocked(kC);  // there is no such line
  SettleAsBlocked(kA);
  EXPECT_EQ(NextDue(), kDueAtOnce);
  EXPECT_EQ(TakeWoken(kNow), (Texts{"1:a"}));
  EXPECT_EQ(LineOf(kA), (Texts{"ann"})) << "whoever waits goes on waiting";
  EXPECT_EQ(NextDue(), 2'001) << "and the end of the hold is still watched";
  EXPECT_EQ(TakeWoken(At(2'001)), (Texts{"0:a"}));
  EXPECT_EQ(TakeWoken(At(3'001)), (Texts{"1:a"}));
}

TEST_F(WaitQueueTest, TellsWhichLinesAreLongest) {
  const auto longest = [this](int db) {
    Texts keys;
    for (const WaitQueue::Line* line : queue_.LongestLines(db, 100))
      keys.emplace_back(line->lock().key);
    return keys;
  };
  EXPECT_EQ(longest(0), Texts{});
  EXPECT_EQ(queue_.lines(), 0U);
  Enter("w1", kC);
  Enter("w2", kB);
  Waiter& third = Enter("w3", kB);
  Enter("w4", kOtherA);
  Enter("w5", Locks{kA, kC}, Exclusive());
  EXPECT_EQ(longest(0), (Texts{"b", "c", "a"})) << "equal ones by name";
  EXPECT_EQ(longest(1), Texts{"a"});
  EXPECT_EQ(longest(2), Texts{});
  EXPECT_EQ(queue_.lines(), 4U);
  queue_.Leave(third);
  EXPECT_EQ(longest(0), (Texts{"c", "a", "b"}));
}

TEST_F(WaitQueueTest, TellsSinceWhenSomebodyWaits) {
  Waiter& late = calls_.emplace_back(Exclusive(), kTickNow + Millis{5}, kLateTick);
  EnterCall(late, kA, "late");
  EXPECT_EQ(queue_.Find(kA)->waiting_since(), kTickNow + Millis{5});
  Waiter& early = Enter("early", kA);  // as one that asked elsewhere first, or took over a place
  EXPECT_EQ(queue_.Find(kA)->waiting_since(), kTickNow);
  queue_.Leave(early);
  EXPECT_EQ(queue_.Find(kA)->waiting_since(), kTickNow + Millis{5});
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
  Waiter& waiter = Enter("ann", kA, TickAt(2'000));
  EXPECT_EQ(queue_.FirstTimedOut(TickAt(1'999)), nullptr);
  EXPECT_EQ(queue_.FirstTimedOut(TickAt(2'000)), &waiter);
  EXPECT_EQ(queue_.FirstTimedOut(TickAt(2'001)), &waiter);
  EXPECT_TRUE(waiter.in_line()) << "the caller takes it out";
  queue_.Leave(waiter);
  EXPECT_EQ(queue_.FirstTimedOut(kLateTick), nullptr);
}

TEST_F(WaitQueueTest, EarliestDeadlineFirst) {
  Waiter& ann = Enter("ann", kA, TickAt(2'002));
  Waiter& bob = Enter("bob", kA, TickAt(2'001));
  Waiter& cid = Enter("cid", kOtherA, TickAt(2'000));
  EXPECT_EQ(queue_.FirstTimedOut(TickAt(9'000)), &cid);
  queue_.Leave(cid);
  EXPECT_EQ(queue_.FirstTimedOut(TickAt(9'000)), &bob);
  EXPECT_EQ(queue_.FirstTimedOut(TickAt(2'000)), nullptr);
  queue_.Leave(bob);
  EXPECT_EQ(queue_.FirstTimedOut(TickAt(9'000)), &ann);
  queue_.Leave(ann);
  EXPECT_EQ(queue_.FirstTimedOut(TickAt(9'000)), nullptr);
}

TEST_F(WaitQueueTest, SameDeadline) {
  for (const char* owner : {"ann", "bob", "cid"}) Enter(owner, kA, TickAt(2'000));
  Enter("dan", kA, TickAt(2'001));
  Texts gone;
  while (Waiter* waiter = queue_.FirstTimedOut(TickAt(2'000))) {
    gone.emplace_back(waiter->request().owner.bytes);
    queue_.Leave(*waiter);
  }
  std::sort(gone.begin(), gone.end());
  EXPECT_EQ(gone, (Texts{"ann", "bob", "cid"}));
  EXPECT_EQ(LineOf(kA), (Texts{"dan"}));
}

TEST_F(WaitQueueTest, NextDueIsTheEarliestOfAll) {
  Waiter& ann = Enter("ann", kA, TickAt(5'000));
  EXPECT_EQ(NextDue(), 5'000);
  Waiter& bob = Enter("bob", kB, TickAt(4'000));
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
  SettleAsBlocked(kA);
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
  Waiter& last = EnterHeld(owner(kOwners - 1), {0, last_key}, owner(0));
  const std::vector<Step> steps = queue_.FindCycle(last, {}, kNow);
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

// Whoever takes over a place and asks for less room keeps those behind waiting who were not kept
// before: a cycle then begins at another wait of its owner.
TEST_F(WaitQueueTest, CycleThatATakeOverWithLessRoomCloses) {
  EnterHeld("ann", kB, "bob");                 // ann waits for bob,
  Waiter& roomy = Enter("ann", kA, Limit(2));  // and stands in another line,
  Enter("bob", kA, Limit(2));                  // where bob fits beside her
  AddHolder(kA, Mode::kShared, "reader");      // as soon as somebody else is gone
  EXPECT_EQ(queue_.FindCycle(roomy, {}, kNow, WaitQueue::From::kAnyWait).size(), 0U);
  Waiter& narrow = NewCall(Limit(1));
  queue_.TakeOver(narrow, roomy);
  EXPECT_EQ(queue_.FindCycle(narrow, {}, kNow).size(), 0U);
  EXPECT_EQ(queue_.FindCycle(narrow, {}, kNow, WaitQueue::From::kAnyWait).size(), 2U);
}

TEST_F(WaitQueueTest, AfterATakeOverTheNewCallCounts) {
  Waiter& older = EnterHeld("ann", kA, "bob");
  Enter("cid", kA);
  queue_.TakeOver(NewCall(), older);
  EXPECT_EQ(CycleOf("bob", kB, "ann").size(), 2U);
  EXPECT_EQ(CycleOf("ann", kB, "cid"), (Texts{"ann waits for 0:b", "cid waits for 0:a"}));
}

// --- Deadlocks among holders of several kinds -------------------------------------------------

TEST_F(WaitQueueTest, ReadersDoNotWaitForReaders) {
  // bob reads a and waits to read b, which ann holds; ann asks to read a, behind another reader.
  Enter("bob", kB, Shared());
  SetHolder(kB, "ann");
  Waiter& reader = Enter("bob", {kA, kC}, Shared());
  AddHolder(kA, Mode::kShared, "bob");
  EXPECT_EQ(CycleOf("ann", Locks{kA}, Shared()), Texts{}) << "a reader holds, a reader is ahead";
  EXPECT_EQ(CycleOf("ann", Locks{kA}, Exclusive()),
            (Texts{"ann waits for 0:a", "bob waits for 0:b"}));
  EXPECT_EQ(CycleOf("ann", Locks{kA}, Limit(9)), (Texts{"ann waits for 0:a", "bob waits for 0:b"}))
      << "a limit is no kind of reading";
  queue_.RemoveHolder(kA, Owner{"bob"});
  EXPECT_EQ(CycleOf("ann", Locks{kA}, Exclusive()).size(), 2U) << "bob is ahead";
  queue_.Leave(reader);
  EXPECT_EQ(CycleOf("ann", Locks{kA}, Exclusive()), Texts{});
}

TEST_F(WaitQueueTest, ReaderWaitsForAWriterFurtherAhead) {
  // bob, a writer, waits behind the reader cid for d, and for what ann holds.
  Enter("cid", {kD, kC}, Shared());
  Enter("bob", kD);
  Enter("dan", kD, Shared());
  EnterHeld("bob", kB, "ann");
  EXPECT_EQ(CycleOf("ann", Locks{kD}, Shared()), (Texts{"ann waits for 0:d", "bob waits for 0:b"}));
}

// A walk on behalf of a reader passes readers without reaching them; a writer's must not rely on
// where it has been.
TEST_F(WaitQueueTest, WriterMindsTheReadersThatAReaderPassed) {
  Enter("eve", {kD, kOtherA}, Shared());  // a reader, first in line of d ...
  SetHolder(kOtherA, "ann");              // ... who waits for ann
  Enter("rob", kD, Shared());             // a reader behind it
  Enter("wes", kD);                       // and a writer
  Enter("mid", kB, Shared());
  SetHolder(kB, "rob");
  AddHolder(kC, Mode::kShared, "nobody");
  EXPECT_EQ(CycleOf("ann", Locks{kB}, Exclusive()), Texts{}) << "rob waits for no reader";

  // ann waits for rob, who reads, and for wes, who writes: rob's place is walked from first.
  Waiter& wait = Enter("ann", {kB, kC}, Exclusive());
  AddHolder(kC, Mode::kExclusive, "wes");
  EXPECT_EQ(CycleOf(wait), (Texts{"ann waits for 0:c", "wes waits for 0:d", "eve waits for 1:a"}));
}

TEST_F(WaitQueueTest, UpgradeAgainstUpgrade) {
  EnterUpgrade("ann", kA);
  AddHolder(kA, Mode::kShared, "ann");
  AddHolder(kA, Mode::kShared, "bob");
  AddHolder(kA, Mode::kShared, "cid");
  Waiter& bob = EnterUpgrade("bob", kA);
  EXPECT_EQ(CycleOf(bob), (Texts{"bob waits for 0:a", "ann waits for 0:a"}));
  queue_.Leave(bob);
  EXPECT_EQ(CycleOf("dan", Locks{kA}, Exclusive()), Texts{}) << "who holds nothing closes nothing";
  queue_.RemoveHolder(kA, Owner{"bob"});
  EXPECT_EQ(CycleOf("bob", Locks{kA}, Exclusive()), Texts{}) << "nor does bob, without its hold";
}

TEST_F(WaitQueueTest, UpgradeAloneWaitsForNobodyButOtherReaders) {
  Waiter& ann = EnterUpgrade("ann", kA);
  AddHolder(kA, Mode::kShared, "ann");
  EXPECT_EQ(CycleOf(ann), Texts{}) << "not for its own hold";
  AddHolder(kA, Mode::kShared, "bob");
  EXPECT_EQ(CycleOf(ann), Texts{});
  EnterHeld("bob", kB, "ann");
  EXPECT_EQ(CycleOf(ann), (Texts{"ann waits for 0:a", "bob waits for 0:b"}));
}

TEST_F(WaitQueueTest, CycleOverAnyLockOfASet) {
  Enter("bob", {kA, kB, kC}, Exclusive());
  SetHolder(kB, "ann");
  EXPECT_EQ(CycleOf("ann", kD, "bob"), (Texts{"ann waits for 0:d", "bob waits for 0:b"}));
  EXPECT_EQ(CycleOf("ann", Locks{kOtherA, kC}, Exclusive()),
            (Texts{"ann waits for 0:c", "bob waits for 0:b"}))
      << "c is free, but bob comes first there";
  EXPECT_EQ(CycleOf("cid", Locks{kOtherA, kC}, Exclusive()), Texts{});
}

TEST_F(WaitQueueTest, SetsWhoseLinesWereEnteredInDifferentOrders) {
  // Both stand behind the other? No: who came first is first everywhere.
  Waiter& ann = Enter("ann", {kA, kB}, Exclusive());
  Waiter& bob = Enter("bob", {kB, kA}, Exclusive());
  EXPECT_EQ(CycleOf(ann), Texts{});
  EXPECT_EQ(CycleOf(bob), Texts{});
}

TEST_F(WaitQueueTest, IgnoredWaitsAreTakenForGone) {
  // bob waits behind ann for c, and ann asks for what bob holds; then it will not want c any more.
  Waiter& older = Enter("ann", {kA, kC}, Exclusive());
  Enter("bob", kC);
  Waiter& newer = Enter("ann", {kA, kB}, Exclusive());
  SetHolder(kB, "bob");
  EXPECT_EQ(CycleOf(newer), (Texts{"ann waits for 0:b", "bob waits for 0:c"}));
  EXPECT_EQ(CycleOf(newer, {&older}), Texts{});
  EXPECT_EQ(CycleOf(newer).size(), 2U) << "looking changes nothing";
}

TEST_F(WaitQueueTest, OnesOwnOlderWaitInTheSameLine) {
  // bob stands between ann's older wait for a and its newer one.
  Waiter& older = EnterHeld("ann", kA, "stranger");
  Enter("bob", kA);
  Waiter& newer = Enter("ann", {kA, kB}, Exclusive());
  SetHolder(kB, "bob");
  EXPECT_EQ(CycleOf(newer, {&older}), Texts{});
  EnterHeld("bob", kD, "ann");
  EXPECT_EQ(CycleOf(newer, {&older}), (Texts{"ann waits for 0:a", "bob waits for 0:d"}));
}

TEST_F(WaitQueueTest, IgnoredWaitsInTheMiddleOfAWay) {
  // cid waits for bob by two calls; one of them will be gone.
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

// --- Deadlocks among limits -------------------------------------------------------------------

// ann holds x. Of the holders of the limited lock a, those in `stuck` wait for x.
class LimitCycleTest : public WaitQueueTest {
 protected:
  void Holders(const Texts& stuck, const Texts& others) {
    Enter("nobody", kA, Limit(100));  // keeps the line
    for (const std::string& owner : stuck) {
      EnterHeld(owner, kB, "ann");
      AddHolder(kA, Mode::kLimit, owner);
    }
    for (const std::string& owner : others) AddHolder(kA, Mode::kLimit, owner);
  }
  // What ann finds when it asks for a.
  Texts CycleWith(uint32_t limit) { return CycleOf("ann", Locks{kA}, Limit(limit)); }

  const Texts over_bob_{"ann waits for 0:a", "bob waits for 0:b"};
};

TEST_F(LimitCycleTest, OneOfTwoHoldersCanMakeRoom) {
  Holders({"bob"}, {"cid"});
  EXPECT_EQ(CycleWith(2), Texts{}) << "cid can make room";
  EXPECT_EQ(CycleWith(1), over_bob_) << "with a limit of one bob must go";
}

TEST_F(LimitCycleTest, NobodyElseCanMakeRoom) {
  Holders({"bob", "cid"}, {});
  EXPECT_EQ(CycleWith(2), over_bob_);
  EXPECT_EQ(CycleWith(3), Texts{});
}

TEST_F(LimitCycleTest, TooFewOthersCanMakeRoom) {
  Holders({"bob", "cid", "dan"}, {"eve", "fay"});
  EXPECT_EQ(CycleWith(4), Texts{});
  EXPECT_EQ(CycleWith(3), over_bob_);
}

TEST_F(LimitCycleTest, HoldThatIsOverMakesRoom) {
  Holders({"bob", "cid"}, {});
  EXPECT_EQ(CycleWith(2), over_bob_);
  AddHolder(kA, Mode::kLimit, "cid", At(999));
  EXPECT_EQ(CycleWith(2), Texts{});
  AddHolder(kA, Mode::kLimit, "cid", kNow);
  EXPECT_EQ(CycleWith(2), over_bob_);
}

// A long line before a semaphore, in which one also wants what ann holds. A search that looks at
// everybody ahead of everybody, again and again, would take minutes.
TEST_F(LimitCycleTest, LongLines) {
  constexpr int kWaiters = 5'000;
  for (const uint32_t limit : {1U, 5U}) {
    std::deque<std::string> owners;
    for (int i = 0; i < kWaiters; ++i) {
      owners.push_back(std::to_string(limit) + " waiter " + std::to_string(i));
      Enter(owners.back(), kA, Limit(limit));
    }
    AddHolder(kA, Mode::kLimit, "holder");
    Enter("both", {kA, kB}, Limit(limit));
    AddHolder(kB, Mode::kLimit, "ann");
    const bool blocked = limit == 1;  // else others make room for both of them
    EXPECT_EQ(CycleWith(limit),
              blocked ? (Texts{"ann waits for 0:a", "both waits for 0:b"}) : Texts{});
    TearDown();
  }
}

TEST_F(LimitCycleTest, HoldersOfAnotherKindMustAllGo) {
  Enter("nobody", kA);
  EnterHeld("bob", kB, "ann");
  AddHolder(kA, Mode::kShared, "bob");
  AddHolder(kA, Mode::kShared, "cid");
  EXPECT_EQ(CycleWith(100), over_bob_);
}

TEST_F(LimitCycleTest, StuckOverAnotherLimit) {
  // bob and cid hold a. cid waits for c, of which dan and eve hold two; eve waits for ann.
  Enter("nobody", kA, Limit(100));
  AddHolder(kA, Mode::kLimit, "bob");
  AddHolder(kA, Mode::kLimit, "cid");
  EnterHeld("bob", kB, "ann");
  Waiter& cid = Enter("cid", kC, Limit(2));
  AddHolder(kC, Mode::kLimit, "dan");
  AddHolder(kC, Mode::kLimit, "eve");
  EnterHeld("eve", kD, "ann");
  EXPECT_EQ(CycleWith(2), Texts{}) << "dan lets cid in, and cid makes room";
  EXPECT_EQ(CycleWith(1), over_bob_);
  queue_.Leave(cid);
  Enter("cid", kC, Limit(1));
  AddHolder(kC, Mode::kLimit, "dan");
  AddHolder(kC, Mode::kLimit, "eve");
  EXPECT_EQ(CycleWith(2), over_bob_) << "cid needs c for itself";
}

TEST_F(LimitCycleTest, StoneInTheCycleBesideAWayOut) {
  // The way over the limited lock is open, the one over d is not.
  Holders({"bob"}, {"cid"});
  EnterHeld("dan", kOtherA, "ann");
  Enter("somebody", kD);
  SetHolder(kD, "dan");
  EXPECT_EQ(CycleOf("ann", Locks{kA, kD}, Limit(2)),
            (Texts{"ann waits for 0:d", "dan waits for 1:a"}));
}

TEST_F(LimitCycleTest, WaitersAheadTakeRoomToo) {
  // Nobody holds a; bob and cid, who wait for ann, stand first there (and elsewhere for more).
  EnterHeld("bob", kB, "ann");
  Enter("cid", kB);
  Enter("bob", {kA, kC}, Limit(5));
  EXPECT_EQ(CycleWith(2), Texts{}) << "there is room for both";
  EXPECT_EQ(CycleWith(1), over_bob_);
  Enter("cid", {kA, kC}, Limit(3));
  EXPECT_EQ(CycleWith(3), Texts{});
  EXPECT_EQ(CycleWith(2), (Texts{"ann waits for 0:a", "cid waits for 0:b"}));
}

TEST_F(LimitCycleTest, SmallestLimitOfThoseAheadCounts) {
  EnterHeld("bob", kB, "ann");
  Enter("bob", {kA, kC}, Limit(1));
  EXPECT_EQ(CycleWith(9), over_bob_) << "bob wants to be alone, and comes first";
}

TEST_F(LimitCycleTest, LimitOfOneWhoCanMoveDoesNotCount) {
  // dan, who wants to be alone, is ahead; but dan waits for nobody in the cycle.
  Enter("dan", {kA, kD}, Limit(1));
  SetHolder(kD, "stranger");
  EnterHeld("bob", kB, "ann");
  AddHolder(kA, Mode::kLimit, "bob");
  Waiter& ann = Enter("ann", kA, Limit(9));
  EXPECT_EQ(CycleOf(ann), over_bob_) << "dan never gets a while bob holds it";
  queue_.Leave(ann);
  queue_.Leave(*FindWaiter(kA, "dan"));
  Enter("dan", {kA, kD}, Limit(2));
  AddHolder(kA, Mode::kLimit, "bob");
  AddHolder(kA, Mode::kLimit, "cid");
  EXPECT_EQ(CycleWith(9), Texts{}) << "cid can make room for dan, and then for ann";
}

// --- Several places of one waiter -------------------------------------------------------------

TEST_F(WaitQueueTest, WaiterStandsInTheLineOfEachLock) {
  Enter("ann", kB);
  Waiter& set = Enter("bob", {kC, kA, kB}, Exclusive());
  Enter("cid", kA);
  EXPECT_EQ(LineOf(kA), (Texts{"bob", "cid"}));
  EXPECT_EQ(LineOf(kB), (Texts{"ann", "bob"}));
  EXPECT_EQ(LineOf(kC), (Texts{"bob"}));
  EXPECT_EQ(queue_.size(), 3U) << "calls, not places";
  ASSERT_EQ(set.size(), 3U);
  EXPECT_TRUE(set.lock(0) == kC) << "in the order in which they were named";
  EXPECT_TRUE(set.lock(1) == kA);
  EXPECT_TRUE(set.lock(2) == kB);
  TakeWoken(kNow);

  queue_.Leave(set);
  EXPECT_FALSE(set.in_line());
  EXPECT_EQ(LineOf(kA), (Texts{"cid"}));
  EXPECT_EQ(LineOf(kB), (Texts{"ann"}));
  EXPECT_EQ(queue_.Find(kC), nullptr);
  EXPECT_EQ(TakeWoken(kNow), (Texts{"0:a", "0:b"})) << "all lines that are left";
}

TEST_F(WaitQueueTest, TakeOverOfSeveralPlaces) {
  Enter("zoe", kA);
  Waiter& older = Enter("ann", {kA, kB}, Limit(2));
  Enter("bob", kA);
  Enter("bob", kB);
  TakeWoken(kNow);
  Waiter& newer = NewCall(Limit(7), TickAt(5'000));
  queue_.TakeOver(newer, older);
  EXPECT_FALSE(older.in_line());
  EXPECT_EQ(newer.size(), 2U);
  EXPECT_EQ(newer.request().limit, 7U);
  EXPECT_EQ(newer.request().owner.bytes, "ann");
  EXPECT_EQ(LineOf(kA), (Texts{"zoe", "ann", "bob"}));
  EXPECT_EQ(LineOf(kB), (Texts{"ann", "bob"}));
  EXPECT_EQ(&queue_.Find(kB)->first()->waiter(), &newer);
  EXPECT_EQ(TakeWoken(kNow), (Texts{"0:a", "0:b"}));
  EXPECT_EQ(queue_.FirstTimedOut(TickAt(5'000)), &newer);
  queue_.Leave(newer);
  EXPECT_EQ(LineOf(kA), (Texts{"zoe", "bob"}));
  EXPECT_EQ(LineOf(kB), (Texts{"bob"}));
}

TEST_F(WaitQueueTest, FindsAllWaitsThatOverlap) {
  Waiter& ab = Enter("ann", {kA, kB}, Exclusive());
  Waiter& c = Enter("ann", kC);
  Enter("ann", kOtherA);
  Enter("bob", {kA, kC}, Exclusive());
  const auto find = [this](const Locks& locks) {
    std::vector<Waiter*> found = queue_.FindWaiters(locks, Owner{"ann"});
    std::sort(found.begin(), found.end());
    return found;
  };
  std::vector<Waiter*> both = {&ab, &c};
  std::sort(both.begin(), both.end());
  EXPECT_EQ(find({kB}), (std::vector<Waiter*>{&ab}));
  EXPECT_EQ(find({kB, kA}), (std::vector<Waiter*>{&ab})) << "once";
  EXPECT_EQ(find({kD, kC, kA}), both);
  EXPECT_EQ(find({kD}), std::vector<Waiter*>{});
}

TEST_F(WaitQueueTest, SameLocksInWhateverOrder) {
  const Waiter& set = Enter("ann", {kA, kB, kC}, Shared());
  EXPECT_TRUE(WaitQueue::WaitsFor(set, Locks{kA, kB, kC}, Mode::kShared));
  EXPECT_TRUE(WaitQueue::WaitsFor(set, Locks{kC, kA, kB}, Mode::kShared));
  EXPECT_FALSE(WaitQueue::WaitsFor(set, Locks{kA, kB, kC}, Mode::kExclusive));
  EXPECT_FALSE(WaitQueue::WaitsFor(set, Locks{kA, kB}, Mode::kShared));
  EXPECT_FALSE(WaitQueue::WaitsFor(set, Locks{kA, kB, kD}, Mode::kShared));
  EXPECT_FALSE(WaitQueue::WaitsFor(set, Locks{kA, kB, kC, kD}, Mode::kShared));
  EXPECT_FALSE(WaitQueue::WaitsFor(set, Locks{kOtherA, kB, kC}, Mode::kShared));
}

TEST_F(WaitQueueTest, MayBeWaitedFor) {
  const auto may = [this](std::string_view owner) { return queue_.MayBeWaitedFor(Owner{owner}); };
  SetHolder(kA, "bob");
  EXPECT_FALSE(may("bob")) << "there is no line";
  Waiter& ann = EnterHeld("ann", kA, "bob", At(2'000));
  EXPECT_TRUE(may("ann"));
  EXPECT_TRUE(may("bob"));
  EXPECT_FALSE(may("cid"));
  Enter("dan", kB);
  queue_.FirstWoken(At(2'001));
  EXPECT_FALSE(may("bob")) << "its hold is over";
  queue_.Leave(ann);
  EXPECT_FALSE(may("ann"));
}

// --- Those ahead ------------------------------------------------------------------------------

TEST_F(WaitQueueTest, CrowdAheadOfANewcomer) {
  Enter("ann", {kA, kB}, Limit(7));
  Enter("bob", kA, Limit(4));
  Crowd crowd = queue_.Find(kA)->Ahead(/*upgrade=*/false);
  EXPECT_EQ(crowd.size, 2U);
  EXPECT_TRUE(crowd.all_limit);
  EXPECT_FALSE(crowd.all_shared);
  EXPECT_EQ(crowd.least_limit, 4U);
  crowd = queue_.Find(kB)->Ahead(false);
  EXPECT_EQ(crowd.size, 1U);
  EXPECT_EQ(crowd.least_limit, 7U);

  Enter("cid", kC, Shared());
  Enter("dan", kC, Shared());
  crowd = queue_.Find(kC)->Ahead(false);
  EXPECT_EQ(crowd.size, 2U);
  EXPECT_TRUE(crowd.all_shared);
  EXPECT_FALSE(crowd.all_limit);
  Enter("eve", kC);
  crowd = queue_.Find(kC)->Ahead(false);
  EXPECT_FALSE(crowd.all_shared);
  EXPECT_TRUE(crowd.IsMixed());
}

TEST_F(WaitQueueTest, CrowdAheadOfAnUpgradeIsThoseItDoesNotBlock) {
  Enter("ann", {kA, kB}, Shared());
  Enter("bob", kA);
  Enter("cid", kA, Shared());
  Crowd crowd = queue_.Find(kA)->Ahead(/*upgrade=*/true);
  EXPECT_EQ(crowd.size, 1U);
  EXPECT_TRUE(crowd.all_shared);
  Enter("dan", kC);
  crowd = queue_.Find(kC)->Ahead(true);
  EXPECT_EQ(crowd.size, 0U);
}

TEST_F(WaitQueueTest, CrowdAheadOfEachPlace) {
  Enter("ann", kA, Shared());
  Waiter& set = Enter("bob", {kB, kA}, Shared());
  Enter("cid", kA);
  Waiter& last = Enter("dan", {kA, kB}, Limit(3));
  EXPECT_EQ(set.AheadOf(0).size, 0U);
  EXPECT_EQ(set.AheadOf(1).size, 1U);
  EXPECT_TRUE(set.AheadOf(1).all_shared);
  EXPECT_TRUE(last.AheadOf(0).IsMixed());
  EXPECT_EQ(last.AheadOf(1).size, 1U);
  EXPECT_TRUE(last.AheadOf(1).all_shared) << "it does not count itself";
  queue_.Leave(set);
  EXPECT_EQ(last.AheadOf(1).size, 0U);
}

TEST_F(WaitQueueTest, UpgradeStandsBeforeAllWhomItBlocks) {
  EnterUpgrade("ann", kA);  // also where nobody stands
  EXPECT_EQ(LineOf(kA), (Texts{"ann"}));
  Enter("bob", {kB, kC}, Shared());
  Enter("cid", {kB, kC}, Shared());
  Enter("dan", kB, Limit(2));
  Enter("eve", kB, Shared());
  EnterUpgrade("fay", kB);
  EXPECT_EQ(LineOf(kB), (Texts{"bob", "cid", "fay", "dan", "eve"}));
  EnterUpgrade("gus", kC);
  EXPECT_EQ(LineOf(kC), (Texts{"bob", "cid", "gus"})) << "readers are not blocked";
}

TEST_F(WaitQueueTest, UpgradeStandsBeforeOneThatLostItsHold) {
  // ann's shared hold ended while it waited for an exclusive one: now it is like any other.
  EnterUpgrade("ann", kA);
  Enter("cid", kA);
  EnterUpgrade("bob", kA);
  EXPECT_EQ(LineOf(kA), (Texts{"bob", "ann", "cid"}));
}

// --- Several holders --------------------------------------------------------------------------

TEST_F(WaitQueueTest, EachHolderIsRememberedAlone) {
  Enter("ann", kA);
  AddHolder(kA, Mode::kShared, "bob", At(2'000));
  AddHolder(kA, Mode::kShared, "cid", At(3'000));
  AddHolder(kA, Mode::kShared, "dan", At(4'000));
  EXPECT_EQ(TakeWoken(At(2'000)), Texts{});
  EXPECT_EQ(NextDue(), 2'001);
  EXPECT_EQ(TakeWoken(At(2'001)), (Texts{"0:a"}));
  EXPECT_EQ(NextDue(), 3'001);
  queue_.RemoveHolder(kA, Owner{"cid"});
  EXPECT_EQ(NextDue(), kDueAtOnce);
  EXPECT_EQ(TakeWoken(At(2'001)), (Texts{"0:a"}));
  EXPECT_EQ(NextDue(), 4'001);
  EXPECT_EQ(CycleOf("dan", kB, "ann").size(), 2U);
  EXPECT_EQ(CycleOf("cid", kB, "ann"), Texts{});
  ClearHolder(kA);
  EXPECT_EQ(TakeWoken(At(2'001)), (Texts{"0:a"}));
  EXPECT_EQ(NextDue(), Ms(kLate));
}

TEST_F(WaitQueueTest, RenewalAmongSeveralHolders) {
  Enter("ann", kA);
  AddHolder(kA, Mode::kLimit, "bob", At(2'000));
  AddHolder(kA, Mode::kLimit, "cid", At(3'000));
  AddHolder(kA, Mode::kLimit, "bob", At(5'000));
  EXPECT_EQ(NextDue(), 3'001) << "bob's old end is forgotten, and nobody woke";
  EXPECT_EQ(TakeWoken(At(3'001)), (Texts{"0:a"}));
  EXPECT_EQ(NextDue(), 5'001);
}

TEST_F(WaitQueueTest, HolderAloneTakesThePlaceOfAllOthers) {
  Enter("ann", kA);
  for (const char* owner : {"bob", "cid", "dan"}) AddHolder(kA, Mode::kShared, owner, At(2'000));
  queue_.SetHolder(kA, Mode::kExclusive, Owner{"cid"}, At(3'000), Company::kAlone);
  TakeWoken(kNow);
  EXPECT_EQ(NextDue(), 3'001);
  EXPECT_EQ(CycleOf("bob", kB, "ann"), Texts{});
  EXPECT_EQ(CycleOf("dan", kB, "ann"), Texts{});
  EXPECT_EQ(CycleOf("cid", kB, "ann").size(), 2U);
}

TEST_F(WaitQueueTest, AnotherModeWakesTheLine) {
  Enter("ann", kA, Shared());
  SetHolder(kA, "bob");
  EXPECT_EQ(TakeWoken(kNow), Texts{}) << "the first holder of a line is no change";
  SetHolder(kA, "bob", At(3'000));
  EXPECT_EQ(TakeWoken(kNow), Texts{});
  queue_.SetHolder(kA, Mode::kShared, Owner{"bob"}, At(3'000), Company::kAlone);
  EXPECT_EQ(TakeWoken(kNow), (Texts{"0:a"})) << "a downgrade lets readers in";
  AddHolder(kA, Mode::kShared, "cid");
  EXPECT_EQ(TakeWoken(kNow), Texts{});
}

TEST_F(WaitQueueTest, ModeOfThoseWhoWentDoesNotMatter) {
  Enter("ann", kA, Shared());
  SetHolder(kA, "bob");
  queue_.RemoveHolder(kA, Owner{"bob"});
  TakeWoken(kNow);
  AddHolder(kA, Mode::kShared, "cid");
  EXPECT_EQ(TakeWoken(kNow), Texts{});
}

TEST_F(WaitQueueTest, RemovingOneWhoHoldsNothingStillWakes) {
  EnterHeld("ann", kA, "bob", At(2'000));
  EnterHeld("ann", kB, "cid", At(2'000));
  queue_.RemoveHolder(kA, Owner{"cid"});      // holds another lock
  queue_.RemoveHolder(kB, Owner{"whoever"});  // unknown
  queue_.RemoveHolder(kC, Owner{"bob"});      // there is no line
  EXPECT_EQ(TakeWoken(kNow), (Texts{"0:a", "0:b"}));
  EXPECT_EQ(NextDue(), 2'001);
  EXPECT_EQ(CycleOf("bob", kD, "ann").size(), 2U);
  EXPECT_EQ(CycleOf("cid", kD, "ann").size(), 2U);
}

TEST_F(WaitQueueTest, HolderThatWaitsInItsOwnLine) {
  Waiter& ann = EnterUpgrade("ann", kA);
  AddHolder(kA, Mode::kShared, "ann", At(2'000));
  EXPECT_EQ(FindWaiter(kA, "ann"), &ann);
  EXPECT_EQ(TakeWoken(At(2'001)), (Texts{"0:a"})) << "its own hold is over";
  EXPECT_EQ(LineOf(kA), (Texts{"ann"}));
  AddHolder(kA, Mode::kShared, "ann", At(3'000));
  queue_.Leave(ann);
  EXPECT_TRUE(queue_.empty());
  EXPECT_FALSE(queue_.MayBeWaitedFor(Owner{"ann"}));
  EXPECT_EQ(NextDue(), kNothingDue);
}

// --- Settling ---------------------------------------------------------------------------------

TEST_F(WaitQueueTest, WhoeverIsBlockedHereBlocksAllBehind) {
  for (const char* owner : {"ann", "bob", "cid"}) Enter(owner, kA);
  queue_.Wake(kA);
  EXPECT_EQ(Offers(kA, [](const std::string&) { return Offered::kBlockedHere; }),
            (Texts{"ann behind 0"}));
  EXPECT_EQ(queue_.FirstWoken(kNow), nullptr);
  EXPECT_EQ(LineOf(kA), (Texts{"ann", "bob", "cid"}));
}

TEST_F(WaitQueueTest, WhoeverIsBlockedElsewhereIsPassedAndCounted) {
  Enter("ann", {kA, kB}, Shared());
  Enter("bob", kA, Shared());
  Enter("cid", {kA, kB}, Shared());
  Enter("dan", kA, Shared());
  queue_.Wake(kA);
  EXPECT_EQ(Offers(kA,
                   [](const std::string& owner) {
                     return owner == "ann" || owner == "cid" ? Offered::kBlockedElsewhere
                                                             : Offered::kLeft;
                   }),
            (Texts{"ann behind 0", "bob behind 1", "cid behind 1", "dan behind 2"}));
  EXPECT_EQ(LineOf(kA), (Texts{"ann", "cid"}));
  EXPECT_EQ(queue_.FirstWoken(kNow), nullptr) << "though some left while it was settled";
}

TEST_F(WaitQueueTest, AfterOneIsBlockedHereNobodyIsOffered) {
  for (const char* owner : {"ann", "bob", "cid", "dan"}) Enter(owner, {kA, kB}, Exclusive());
  queue_.Wake(kA);
  EXPECT_EQ(Offers(kA,
                   [](const std::string& owner) {
                     if (owner == "ann") return Offered::kLeft;
                     return owner == "bob" ? Offered::kBlockedElsewhere : Offered::kBlockedHere;
                   }),
            (Texts{"ann behind 0", "bob behind 0", "cid behind 1"}));
  EXPECT_EQ(LineOf(kA), (Texts{"bob", "cid", "dan"}));
  EXPECT_EQ(TakeWoken(kNow), (Texts{"0:b"})) << "ann left that line too";
}

TEST_F(WaitQueueTest, AfterOneTookAllNobodyIsOffered) {
  for (const char* owner : {"ann", "bob", "cid"}) Enter(owner, {kA, kB}, Exclusive());
  queue_.Wake(kA);
  EXPECT_EQ(Offers(kA,
                   [](const std::string& owner) {
                     return owner == "ann" ? Offered::kLeft : Offered::kTookAll;
                   }),
            (Texts{"ann behind 0", "bob behind 0"}));
  EXPECT_EQ(LineOf(kA), (Texts{"cid"}));
  EXPECT_EQ(TakeWoken(kNow), (Texts{"0:b"})) << "not the line in which nobody can enter";
  queue_.Wake(kA);
  EXPECT_EQ(Offers(kA, [](const std::string&) { return Offered::kTookAll; }),
            (Texts{"cid behind 0"}));
  EXPECT_TRUE(queue_.empty()) << "the last takes the line along";
  EXPECT_EQ(queue_.FirstWoken(kNow), nullptr);
}

TEST_F(WaitQueueTest, SettleTellsWhatIsAhead) {
  Enter("ann", {kA, kB}, Limit(8));
  Enter("bob", {kA, kB}, Limit(5));
  Enter("cid", {kA, kB}, Limit(9));
  std::vector<uint32_t> least;
  queue_.Settle(*queue_.Find(kA), [&](Waiter&, const Crowd& ahead) {
    least.push_back(ahead.least_limit);
    EXPECT_TRUE(ahead.all_limit);
    return Offered::kBlockedElsewhere;
  });
  EXPECT_EQ(least, (std::vector<uint32_t>{std::numeric_limits<uint32_t>::max(), 8, 5}));
}

TEST_F(WaitQueueTest, AllLeaveWhileTheLineIsSettled) {
  for (const char* owner : {"ann", "bob"}) Enter(owner, {kB, kA}, Exclusive());
  Enter("cid", kB);
  queue_.Wake(kA);
  EXPECT_EQ(Offers(kA, [](const std::string&) { return Offered::kLeft; }),
            (Texts{"ann behind 0", "bob behind 0"}));
  EXPECT_EQ(queue_.Find(kA), nullptr);
  EXPECT_EQ(TakeWoken(kNow), (Texts{"0:b"}));
  queue_.Wake(kB);
  EXPECT_EQ(Offers(kB, [](const std::string&) { return Offered::kLeft; }), (Texts{"cid behind 0"}));
  EXPECT_TRUE(queue_.empty()) << "the last of all";
  EXPECT_EQ(queue_.FirstWoken(kNow), nullptr);
}

// --- How a cycle is described -----------------------------------------------------------------

bool Everything(LockName /*lock*/) { return true; }

TEST(DescribeCycle, AsTheContractSaysIt) {
  WaitQueue queue;
  Waiter one(Exclusive(), kTickNow, kLateTick);
  Waiter two(Exclusive(), kTickNow, kLateTick);
  queue.Enter(two, std::span(&kA, 1), Owner{"worker-2"}, /*upgrade=*/false);
  queue.SetHolder(kA, Mode::kExclusive, Owner{"worker-1"}, kLate, Company::kAlone);
  queue.Enter(one, std::span(&kB, 1), Owner{"worker-1"}, /*upgrade=*/false);
  queue.SetHolder(kB, Mode::kExclusive, Owner{"worker-2"}, kLate, Company::kAlone);
  const auto cycle = queue.FindCycle(one, {}, kNow);
  ASSERT_EQ(cycle.size(), 2U);
  EXPECT_EQ(
      DescribeCycle(cycle, Everything),
      R"(waiting for "b" would close the cycle worker-1 -> "b" -> worker-2 -> "a" -> worker-1)");
  queue.Leave(one);
  queue.Leave(two);
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

static_assert(sizeof(Waiter) <= 168);

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
  }
  const int64_t before = Allocated();
  for (int64_t i = 0; i < kWaiters; ++i) NewCall();
  const int64_t outside = Allocated();
  for (size_t i = 0; i < owners.size(); ++i) EnterCall(calls_[i], kA, owners[i]);
  const int64_t each = (Allocated() - outside) / kWaiters;
  RecordProperty("bytes_each", std::to_string(each));
  EXPECT_LE(each, 400);
  for (Waiter& waiter : calls_) queue_.Leave(waiter);
  std::deque<Waiter>().swap(calls_);
  // The allocator itself keeps a few blocks at hand.
  EXPECT_LT(Allocated() - before, 16'384) << "after a rush nothing is kept";
}

TEST_F(WaitQueueTest, NothingIsLeftOfThoseWhoWent) {
  EnterHeld("somebody", {0, "busy"}, "holder");  // the queue never gets empty
  const int64_t before = Allocated();
  for (int i = 0; i < 20'000; ++i) {
    Waiter waiter(Exclusive(kLease), kTickNow, kLateTick);
    Waiter newer(Exclusive(kLease), kTickNow, kLateTick);
    const std::string number = std::to_string(i);
    const std::string key = "the key of a lock that is used once: " + number;
    EnterCall(waiter, {0, key}, "a waiter that never comes back: " + number);
    AddHolder({0, key}, Mode::kShared, "a holder that never comes back: " + number);
    AddHolder({0, key}, Mode::kShared, "another holder: " + number);
    if (i % 3 == 0) queue_.RemoveHolder({0, key}, Owner{"another holder: " + number});
    if (i % 3 == 1) ClearHolder({0, key});
    queue_.TakeOver(newer, waiter);
    queue_.Leave(newer);
  }
  EXPECT_LT(Allocated() - before, 64 * 1'024);
}
#endif

}  // namespace
}  // namespace turnstile
