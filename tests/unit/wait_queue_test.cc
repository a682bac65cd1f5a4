// Every operation of the waiting lines, with hand-set time.

#include "core/wait_queue.h"

#include <gtest/gtest.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <algorithm>
#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <limits>
#include <list>
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
#include "core/intrusive_list.h"
#include "core/lock.h"
#include "core/token_clock.h"
#include "printers.h"

namespace turnstile {
namespace {

using namespace std::string_literals;
using Waiter = WaitQueue::Waiter;
using Left = WaitQueue::Left;
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
    EXPECT_EQ(queue_.lines(), 0U);
    EXPECT_TRUE(queue_.LongestLines(0, 1).empty());
  }

  Waiter& NewCall(const AcquireRequest& request, Tick deadline = kLateTick) {
    return calls_.emplace_back(request, kTickNow, deadline);
  }
  Waiter& NewCall(Tick deadline = kLateTick) { return NewCall(Exclusive(), deadline); }

  void EnterCall(Waiter& waiter, LockName lock, std::string_view owner) {
    queue_.Enter(waiter, std::span(&lock, 1), Owner{owner}, /*upgrade=*/false);
    queue_.Block(waiter, 0, std::nullopt);
  }

  // A waiter that was found to be blocked by the first of its locks.
  Waiter& Enter(std::string_view owner, LockName lock, Tick deadline = kLateTick) {
    Waiter& waiter = NewCall(deadline);
    EnterCall(waiter, lock, owner);
    return waiter;
  }
  Waiter& Enter(std::string_view owner, const Locks& locks, const AcquireRequest& request,
                std::optional<Instant> next_end = std::nullopt) {
    Waiter& waiter = NewCall(request);
    queue_.Enter(waiter, locks, Owner{owner}, /*upgrade=*/false);
    queue_.Block(waiter, 0, next_end);
    return waiter;
  }
  Waiter& Enter(std::string_view owner, LockName lock, const AcquireRequest& request) {
    return Enter(owner, Locks{lock}, request);
  }
  Waiter& EnterUpgrade(std::string_view owner, LockName lock) {
    Waiter& waiter = NewCall();
    queue_.Enter(waiter, std::span(&lock, 1), Owner{owner}, /*upgrade=*/true);
    queue_.Block(waiter, 0, std::nullopt);
    return waiter;
  }
  // An exclusive waiter for a lock of which a hold ends at `end`.
  Waiter& EnterUntil(std::string_view owner, LockName lock, Instant end) {
    return Enter(owner, Locks{lock}, Exclusive(), end);
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
      EXPECT_TRUE(waiter.WaitsFor(lock));
      owners.emplace_back(waiter.request().owner.bytes);
    }
    EXPECT_EQ(line->size(), owners.size());
    EXPECT_NE(line->size(), 0U);
    return owners;
  }

  // Whom the queue wants tried next; "" for nobody.
  std::string NextToTry(Instant now = kNow) {
    const Waiter* waiter = queue_.NextToTry(now);
    EXPECT_EQ(queue_.NextToTry(now), waiter) << "asking twice makes no difference";
    if (waiter == nullptr) return "";
    EXPECT_EQ(Ms(queue_.NextDue()), kDueAtOnce);
    return std::string(waiter->request().owner.bytes);
  }

  // All whom the queue wants tried, each of whom is found to be blocked where it was before.
  Texts TryAll(Instant now = kNow) {
    Texts tried;
    for (std::string owner = NextToTry(now); !owner.empty(); owner = NextToTry(now)) {
      tried.push_back(owner);
      if (tried.size() > 10'000) {
        ADD_FAILURE() << "whoever is blocked is tried again and again";
        break;
      }
      Waiter& waiter = *queue_.NextToTry(now);
      queue_.Block(waiter, waiter.blocked_at().value_or(0), std::nullopt);
    }
    return tried;
  }

  // Whether the line is to be worked on at `now`.
  bool IsPutOff(LockName lock, Instant now = kNow) {
    return queue_.Find(lock)->Ahead(/*upgrade=*/false, now).IsMixed();
  }

  // Both clocks show the same here.
  int64_t NextDue() const { return std::min(Ms(queue_.NextDue()), Ms(queue_.NextTimeOut())); }

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
  EXPECT_EQ(queue_.NextToTry(kLate), nullptr);
  EXPECT_EQ(queue_.lines(), 0U);
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
  EXPECT_EQ(queue_.lines(), 2U);
  queue_.Leave(waiter);
  EXPECT_EQ(queue_.Find(kA), nullptr);
  EXPECT_EQ(queue_.lines(), 1U);
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

  queue_.Wake(kOtherA);
  EXPECT_EQ(TryAll(), (Texts{"bob"}));
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
  const Waiter& waiter = Enter(owner, {0, key});
  key = "????????";
  owner = "???";
  EXPECT_EQ(waiter.request().owner.bytes, "ann");
  EXPECT_EQ(waiter.lock(0).key, "resource");
  EXPECT_EQ(LineOf({0, "resource"}), (Texts{"ann"}));
  EXPECT_EQ(FindWaiter({0, "resource"}, "ann"), &waiter);
}

TEST_F(WaitQueueTest, WaiterTellsWhatItAsksFor) {
  Waiter waiter(Exclusive(Millis{1'234}), TickAt(5), TickAt(77), /*client_id=*/42);
  EXPECT_FALSE(waiter.in_line());
  EnterCall(waiter, kOtherA, "ann");
  EXPECT_TRUE(waiter.in_line());
  EXPECT_EQ(waiter.request().owner.bytes, "ann");
  EXPECT_EQ(waiter.request().lease, Millis{1'234});
  EXPECT_TRUE(waiter.lock(0) == kOtherA);
  EXPECT_EQ(waiter.client_id(), 42U);
  EXPECT_EQ(Ms(waiter.since()), 5);
  EXPECT_EQ(Ms(waiter.deadline()), 77);
  queue_.Leave(waiter);
  EXPECT_EQ(Ms(waiter.since()), 5);
  EXPECT_EQ(Ms(waiter.deadline()), 77);
}

// The other keys of a request are views into the caller's command.
TEST_F(WaitQueueTest, WaiterKeepsNoViewOfOtherKeys) {
  const std::array<std::string_view, 1> also = {"b"};
  AcquireRequest request = Exclusive();
  request.also = also;
  const Waiter waiter(request, kTickNow, kLateTick);
  EXPECT_TRUE(waiter.request().also.empty());
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
  TryAll();
  EXPECT_EQ(newer.request().lease, Millis{20});
  EXPECT_EQ(newer.request().owner.bytes, "ann");
  EXPECT_EQ(Ms(newer.since()), 50);
  EXPECT_EQ(NextDue(), 150);
  EXPECT_EQ(queue_.FirstTimedOut(TickAt(149)), nullptr);
  EXPECT_EQ(queue_.FirstTimedOut(TickAt(150)), &newer);

  queue_.TakeOver(newest, newer);  // an earlier deadline counts as well
  TryAll();
  EXPECT_EQ(NextDue(), 70);
  EXPECT_EQ(queue_.FirstTimedOut(TickAt(70)), &newest);
  EXPECT_EQ(queue_.size(), 1U);
  queue_.Leave(newest);
  EXPECT_TRUE(queue_.empty());
}

TEST_F(WaitQueueTest, TakeOverIsTriedAtOnceAtThePlaceOfTheOlder) {
  Waiter& older = Enter("ann", kA);
  Enter("bob", kB);
  queue_.Wake(kB);
  Waiter& newer = NewCall();
  queue_.TakeOver(newer, older);
  EXPECT_EQ(newer.blocked_at(), std::nullopt) << "it may ask for less than the older did";
  EXPECT_EQ(TryAll(), (Texts{"ann", "bob"}));
  EXPECT_EQ(newer.blocked_at(), 0U);
}

TEST_F(WaitQueueTest, TakeOverLetsThoseBehindItBeTriedToo) {
  Waiter& older = Enter("ann", {kA, kB}, Limit(1));
  Enter("bob", kA, Limit(5));
  Enter("cid", kB, Limit(5));
  Waiter& newer = NewCall(Limit(5));
  queue_.TakeOver(newer, older);
  EXPECT_EQ(NextToTry(), "ann");
  queue_.Block(newer, 1, std::nullopt);
  EXPECT_EQ(TryAll(), (Texts{"bob"})) << "of b the first one is blocked, and so are all behind";
}

TEST_F(WaitQueueTest, TakeOverThatIsBlockedAtOncePutsTheLineToSleep) {
  Waiter& older = Enter("ann", kA);
  Enter("bob", kA);
  Waiter& newer = NewCall();
  queue_.TakeOver(newer, older);
  queue_.Block(newer, 0, At(2'000));
  EXPECT_EQ(NextToTry(), "");
  EXPECT_EQ(NextDue(), 2'001);
}

TEST_F(WaitQueueTest, TakeOverCanBeTakenBack) {
  Waiter& older = Enter("ann", {kA, kB}, Limit(3));
  Enter("bob", kA);
  Waiter& newer = NewCall(Limit(1), TickAt(5'000));
  queue_.TakeOver(newer, older);
  queue_.Block(newer, 1, std::nullopt);
  queue_.TakeOver(older, newer);
  EXPECT_FALSE(newer.in_line());
  EXPECT_EQ(LineOf(kA), (Texts{"ann", "bob"}));
  EXPECT_EQ(FindWaiter(kB, "ann"), &older);
  EXPECT_EQ(queue_.Find(kB)->Ahead(false, kNow).least_limit, 3U);
  EXPECT_EQ(TryAll(), (Texts{"ann"}));
  EXPECT_EQ(queue_.NextTimeOut(), kLateTick);
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
  EXPECT_TRUE(set.WaitsFor(kA));
  EXPECT_FALSE(set.WaitsFor(kOtherA));

  queue_.Leave(set);
  EXPECT_FALSE(set.in_line());
  EXPECT_EQ(LineOf(kA), (Texts{"cid"}));
  EXPECT_EQ(LineOf(kB), (Texts{"ann"}));
  EXPECT_EQ(queue_.Find(kC), nullptr);
  EXPECT_EQ(TryAll(), (Texts{"ann", "cid"})) << "all lines that are left";
}

TEST_F(WaitQueueTest, TakeOverOfSeveralPlaces) {
  Enter("zoe", kA);
  Waiter& older = Enter("ann", {kA, kB}, Limit(2));
  Enter("bob", kA);
  Enter("bob", kB);
  Waiter& newer = NewCall(Limit(7), TickAt(5'000));
  queue_.TakeOver(newer, older);
  EXPECT_FALSE(older.in_line());
  EXPECT_EQ(newer.size(), 2U);
  EXPECT_EQ(newer.request().limit, 7U);
  EXPECT_EQ(queue_.Find(kB)->Ahead(/*upgrade=*/false, kNow).least_limit, 7U);
  EXPECT_EQ(newer.request().owner.bytes, "ann");
  EXPECT_EQ(LineOf(kA), (Texts{"zoe", "ann", "bob"}));
  EXPECT_EQ(LineOf(kB), (Texts{"ann", "bob"}));
  EXPECT_EQ(&queue_.Find(kB)->first()->waiter(), &newer);
  EXPECT_TRUE(IsPutOff(kA));
  EXPECT_TRUE(IsPutOff(kB));
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

// --- Those ahead ------------------------------------------------------------------------------

TEST_F(WaitQueueTest, CrowdAheadOfANewcomer) {
  Enter("ann", {kA, kB}, Limit(7));
  Waiter& bob = Enter("bob", kA, Limit(4));
  Crowd crowd = queue_.Find(kA)->Ahead(/*upgrade=*/false, kNow);
  EXPECT_EQ(crowd.size, 2U);
  EXPECT_TRUE(crowd.all_limit);
  EXPECT_FALSE(crowd.all_shared);
  EXPECT_EQ(crowd.least_limit, 4U);
  crowd = queue_.Find(kB)->Ahead(false, kNow);
  EXPECT_EQ(crowd.size, 1U);
  EXPECT_EQ(crowd.least_limit, 7U);
  queue_.Leave(bob);
  EXPECT_EQ(queue_.Find(kA)->Ahead(false, kNow).least_limit, 7U);

  Enter("cid", kC, Shared());
  Enter("dan", kC, Shared());
  crowd = queue_.Find(kC)->Ahead(false, kNow);
  EXPECT_EQ(crowd.size, 2U);
  EXPECT_TRUE(crowd.all_shared);
  EXPECT_FALSE(crowd.all_limit);
  Enter("eve", kC);
  crowd = queue_.Find(kC)->Ahead(false, kNow);
  EXPECT_FALSE(crowd.all_shared);
  EXPECT_TRUE(crowd.IsMixed());
}

TEST_F(WaitQueueTest, CrowdAheadOfAnUpgradeIsThoseItDoesNotBlock) {
  Enter("ann", {kA, kB}, Shared());
  Enter("bob", kA);
  Enter("cid", kA, Shared());
  Crowd crowd = queue_.Find(kA)->Ahead(/*upgrade=*/true, kNow);
  EXPECT_EQ(crowd.size, 1U);
  EXPECT_TRUE(crowd.all_shared);
  Enter("dan", kC);
  crowd = queue_.Find(kC)->Ahead(true, kNow);
  EXPECT_EQ(crowd.size, 0U);
  queue_.Wake(kC);
  EXPECT_EQ(queue_.Find(kC)->Ahead(true, kNow).size, 0U) << "it does not stand behind that work";
}

TEST_F(WaitQueueTest, CrowdAheadOfEachPlace) {
  Enter("ann", kA, Shared());
  Waiter& set = Enter("bob", {kB, kA}, Shared());
  Enter("cid", kA);
  Waiter& last = Enter("dan", {kA, kB}, Limit(3));
  EXPECT_EQ(set.AheadOf(0).size, 0U);
  EXPECT_EQ(set.AheadOf(1).size, 1U);
  EXPECT_TRUE(set.AheadOf(1).all_shared);
  EXPECT_FALSE(last.AheadOf(0).all_limit);
  EXPECT_EQ(last.AheadOf(1).size, 1U);
  EXPECT_FALSE(last.AheadOf(1).all_limit) << "it does not count itself";
  queue_.Leave(set);
  EXPECT_EQ(last.AheadOf(1).size, 0U);
}

TEST_F(WaitQueueTest, CrowdAheadOfALimitCountsThoseThatMatter) {
  Enter("ann", kA, Limit(2));
  Enter("bob", kA, Limit(9));
  Enter("cid", kA, Limit(8));
  const Crowd crowd = Enter("dan", kA, Limit(7)).AheadOf(0);
  EXPECT_EQ(crowd.size, 3U);
  EXPECT_TRUE(crowd.all_limit);
  EXPECT_EQ(crowd.least_limit, 2U);
  EXPECT_EQ(Enter("eve", kA, Limit(2)).AheadOf(0).size, 2U) << "more than fit beside it";
  Enter("fay", kA, Limit(1));
  EXPECT_EQ(Enter("gus", kA, Limit(9)).AheadOf(0).size, 1U) << "nobody fits beside fay";
}

TEST_F(WaitQueueTest, NewcomerIsNotCompatibleWhileALineHasWorkPutOff) {
  Enter("ann", {kA, kB}, Shared());
  Enter("bob", {kC, kD}, Limit(5));
  EXPECT_TRUE(queue_.Find(kA)->Ahead(false, kNow).all_shared);
  EXPECT_TRUE(queue_.Find(kC)->Ahead(false, kNow).all_limit);
  queue_.Wake(kA);
  queue_.Wake(kC);
  EXPECT_TRUE(IsPutOff(kA));
  EXPECT_TRUE(IsPutOff(kC));
  EXPECT_FALSE(IsPutOff(kB)) << "there is nothing to do in that line";
  EXPECT_EQ(TryAll(), (Texts{"ann", "bob"}));
  EXPECT_FALSE(IsPutOff(kA));
  EXPECT_FALSE(IsPutOff(kC));
}

TEST_F(WaitQueueTest, NewcomerIsNotCompatibleOnceAHoldHasEnded) {
  Enter("ann", Locks{kA}, Shared(), At(2'000));
  EXPECT_FALSE(IsPutOff(kA, At(2'000))) << "a hold lives through its last millisecond";
  EXPECT_TRUE(IsPutOff(kA, At(2'001)));
  EXPECT_EQ(TryAll(At(2'001)), (Texts{"ann"}));
  EXPECT_FALSE(IsPutOff(kA, At(2'001)));
}

TEST_F(WaitQueueTest, NewcomerBehindWorkPutOffIsTriedInItsTurn) {
  Waiter& ann = Enter("ann", kA, Shared());
  queue_.Wake(kA);
  Waiter& bob = Enter("bob", kA, Shared());
  EXPECT_EQ(NextToTry(), "ann") << "whoever joins behind does not put the line to sleep";
  queue_.Leave(ann);
  EXPECT_EQ(NextToTry(), "bob");
  queue_.Block(bob, 0, std::nullopt);
  EXPECT_EQ(NextToTry(), "");
}

// --- Upgrades ---------------------------------------------------------------------------------

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

TEST_F(WaitQueueTest, UpgradeIsTriedBeforeThoseItBlocks) {
  Enter("ann", kA);
  Enter("bob", kB);
  Waiter& upgrade = EnterUpgrade("cid", kA);
  queue_.WakeAll(std::nullopt);
  EXPECT_EQ(TryAll(), (Texts{"cid", "bob"})) << "by the arrival of those it stands before";
  queue_.WakeAll(std::nullopt);
  queue_.Leave(upgrade);
  EXPECT_EQ(TryAll(), (Texts{"ann", "bob"}));
}

TEST_F(WaitQueueTest, UpgradeBehindAReaderLeavesTheLineAwake) {
  Enter("ann", kA, Shared());
  Enter("bob", kA);
  queue_.Wake(kA);
  EnterUpgrade("cid", kA);
  EXPECT_EQ(LineOf(kA), (Texts{"ann", "cid", "bob"}));
  EXPECT_EQ(NextToTry(), "ann");
  queue_.Leave(*FindWaiter(kA, "ann"));
  EXPECT_EQ(TryAll(), (Texts{"cid"}));
}

TEST_F(WaitQueueTest, UpgradeIsInTheWayOfALimitBehindIt) {
  const Waiter& limit = Enter("ann", kA, Limit(5));
  Enter("bob", kA);
  EXPECT_EQ(limit.AheadOf(0).size, 0U);
  EnterUpgrade("cid", kA);
  EXPECT_EQ(LineOf(kA), (Texts{"cid", "ann", "bob"}));
  EXPECT_EQ(limit.AheadOf(0).size, 1U);
  EXPECT_FALSE(limit.AheadOf(0).all_limit);
}

TEST_F(WaitQueueTest, UpgradesComeAndGoBeforeTheSamePlace) {
  Enter("ann", kA);
  for (int i = 0; i < 3; ++i) {
    Waiter& bob = EnterUpgrade("bob", kA);
    Waiter& cid = EnterUpgrade("cid", kA);
    EXPECT_EQ(LineOf(kA), (Texts{"cid", "bob", "ann"}));
    queue_.Leave(i % 2 == 0 ? bob : cid);
    EnterUpgrade("dan", kA);
    EXPECT_EQ(LineOf(kA).front(), "dan");
    queue_.Wake(kA);
    EXPECT_EQ(TryAll(), (Texts{"dan"}));
    for (const char* owner : {"dan", "bob", "cid"}) {
      if (Waiter* waiter = FindWaiter(kA, owner); waiter != nullptr) queue_.Leave(*waiter);
    }
  }
}

// --- Whom to try ------------------------------------------------------------------------------

TEST_F(WaitQueueTest, EnteringWakesNobody) {
  Enter("ann", kA);
  Enter("bob", kA);
  EXPECT_EQ(NextToTry(), "");
  EXPECT_EQ(NextDue(), Ms(kLate));
}

TEST_F(WaitQueueTest, WhoeverLeavesWakesTheLine) {
  for (const size_t leaver : {0U, 1U, 2U}) {
    std::vector<Waiter*> waiters;
    for (const char* owner : {"ann", "bob", "cid"}) waiters.push_back(&Enter(owner, kA));
    Enter("dan", kB);
    queue_.Leave(*waiters[leaver]);
    EXPECT_EQ(NextDue(), kDueAtOnce);
    EXPECT_EQ(TryAll(), (Texts{leaver == 0 ? "bob" : "ann"}));
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
  EXPECT_EQ(NextToTry(), "");
  EXPECT_EQ(NextDue(), Ms(kLate));
  queue_.Wake(kB);
  queue_.Leave(cid);
  EXPECT_EQ(queue_.NextToTry(kNow), nullptr);
  EXPECT_EQ(NextDue(), kNothingDue);
}

TEST_F(WaitQueueTest, LineStaysAwakeUntilItsFirstIsBlocked) {
  Waiter& ann = Enter("ann", kA);
  Waiter& bob = Enter("bob", kA);
  Enter("cid", kA);
  queue_.Wake(kA);
  EXPECT_EQ(NextToTry(), "ann");
  EXPECT_EQ(NextToTry(kLate), "ann");
  queue_.Leave(ann);
  EXPECT_EQ(NextToTry(), "bob");
  queue_.Block(bob, 0, std::nullopt);
  EXPECT_EQ(NextToTry(), "") << "nobody overtakes bob";
  EXPECT_EQ(NextDue(), Ms(kLate));
  EXPECT_EQ(LineOf(kA), (Texts{"bob", "cid"}));
}

TEST_F(WaitQueueTest, TriesWaitersOfAllWokenLinesByArrival) {
  Enter("w1", kC);
  Enter("w2", kA);
  Enter("w3", kOtherA);
  Enter("w4", kA);
  Enter("w5", kB);
  Enter("w6", kD);
  for (const LockName lock : {kB, kA, kOtherA, kC}) queue_.Wake(lock);
  EXPECT_EQ(NextToTry(), "w1");
  queue_.Leave(*FindWaiter(kC, "w1"));
  EXPECT_EQ(NextToTry(), "w2");
  queue_.Leave(*FindWaiter(kA, "w2"));
  EXPECT_EQ(TryAll(), (Texts{"w3", "w4", "w5"}));
}

TEST_F(WaitQueueTest, LineThatWakesLateIsTriedByArrivalToo) {
  Enter("w1", kA);
  Enter("w2", kB);
  queue_.Wake(kB);
  EXPECT_EQ(NextToTry(), "w2");
  queue_.Wake(kA);
  EXPECT_EQ(TryAll(), (Texts{"w1", "w2"}));
}

TEST_F(WaitQueueTest, NotTriedAgainUntilTheBlockingLineWakes) {
  Waiter& ann = Enter("ann", {kA, kB, kC}, Exclusive());
  queue_.Wake(kA);
  EXPECT_EQ(NextToTry(), "ann");
  queue_.Block(ann, 1, std::nullopt);
  EXPECT_EQ(ann.blocked_at(), 1U);
  EXPECT_EQ(NextToTry(), "");
  for (const LockName lock : {kA, kC}) {
    queue_.Wake(lock);
    EXPECT_EQ(NextToTry(), "") << lock.key;
  }
  queue_.Wake(kB);
  EXPECT_EQ(TryAll(), (Texts{"ann"}));
}

TEST_F(WaitQueueTest, WaiterForManyLocksIsTriedOnceForEachWakeOfTheOneThatBlocksIt) {
  std::deque<std::string> keys;
  Locks locks;
  for (int i = 0; i < 65; ++i) {
    locks.push_back({0, keys.emplace_back("key-" + std::to_string(i))});
  }
  Enter("ann", locks, Exclusive());
  Enter("bob", locks, Exclusive());
  for (int round = 0; round < 3; ++round) {
    for (const LockName lock : locks) queue_.Wake(lock);
    EXPECT_EQ(TryAll(), (Texts{"ann"}));
  }
}

TEST_F(WaitQueueTest, LineWithNobodyBlockedThereDoesNotWake) {
  Waiter& ann = Enter("ann", {kA, kB}, Shared());
  queue_.Wake(kA);
  queue_.Block(ann, 1, std::nullopt);
  queue_.Wake(kA);
  EXPECT_EQ(NextDue(), Ms(kLate));
  EXPECT_FALSE(IsPutOff(kA));
  queue_.NoteEnd(kA, At(2'000));
  EXPECT_EQ(NextDue(), Ms(kLate)) << "the end of a hold there is nobody's business";
}

TEST_F(WaitQueueTest, WhoeverIsBlockedElsewhereLetsThoseBehindBeTried) {
  for (const char* owner : {"ann", "bob", "cid"}) Enter(owner, {kA, kB}, Shared());
  queue_.Wake(kA);
  EXPECT_EQ(NextToTry(), "ann");
  queue_.Block(*FindWaiter(kA, "ann"), 1, std::nullopt);
  EXPECT_EQ(NextToTry(), "bob");
  queue_.Leave(*FindWaiter(kA, "bob"));
  EXPECT_EQ(NextToTry(), "ann") << "bob left the line that blocks ann, too";
  queue_.Block(*FindWaiter(kA, "ann"), 1, std::nullopt);
  EXPECT_EQ(TryAll(), (Texts{"cid"}));
}

TEST_F(WaitQueueTest, WhoeverTurnsOutToBeBlockedHereKeepsThoseBehindWaiting) {
  Waiter& ann = Enter("ann", {kB, kA}, Exclusive());
  Enter("bob", kA);
  queue_.Wake(kA);
  queue_.Wake(kB);
  EXPECT_EQ(NextToTry(), "ann");
  queue_.Block(ann, 1, std::nullopt);
  EXPECT_EQ(NextToTry(), "") << "bob stands behind ann in the line that has just blocked it";
  queue_.Wake(kB);
  EXPECT_EQ(NextToTry(), "");
  queue_.Wake(kA);
  EXPECT_EQ(TryAll(), (Texts{"ann"}));
}

TEST_F(WaitQueueTest, WhoeverLeavesAnotherLineWakesThoseBehindIt) {
  Waiter& ann = Enter("ann", {kA, kB, kC}, Exclusive());
  Enter("bob", kB);
  Enter("cid", kC);
  queue_.Leave(ann);
  EXPECT_EQ(TryAll(), (Texts{"bob", "cid"}));
}

TEST_F(WaitQueueTest, ExclusiveGrantPutsTheLineToSleep) {
  Waiter& ann = Enter("ann", {kA, kB}, Exclusive());
  Enter("bob", kA);
  Enter("cid", kB);
  Enter("dan", kC);
  for (const LockName lock : {kA, kB, kC}) queue_.Wake(lock);
  EXPECT_EQ(NextToTry(), "ann");
  queue_.NoteEnd(kA, At(5'000));
  queue_.NoteEnd(kB, At(6'000));
  queue_.Leave(ann, Left::kHoldsAlone);
  EXPECT_EQ(TryAll(), (Texts{"dan"}));
  EXPECT_EQ(NextDue(), 5'001) << "the end of the new hold is known";
  EXPECT_EQ(TryAll(At(5'001)), (Texts{"bob"}));
  EXPECT_EQ(TryAll(At(6'001)), (Texts{"cid"}));
}

TEST_F(WaitQueueTest, ExclusiveGrantToTheLastInLine) {
  queue_.Leave(Enter("ann", {kA, kB}, Exclusive()), Left::kHoldsAlone);
  EXPECT_TRUE(queue_.empty());
  EXPECT_EQ(NextDue(), kNothingDue);
}

TEST_F(WaitQueueTest, WakesTheLineOfOneLock) {
  Enter("ann", kA);
  Enter("bob", kOtherA);
  queue_.Wake(kA);
  queue_.Wake(kB);  // nobody waits there
  EXPECT_EQ(TryAll(), (Texts{"ann"}));
}

TEST_F(WaitQueueTest, WakesTheLinesOfOneNameInEveryDatabase) {
  Enter("ann", kA);
  Enter("bob", kB);
  Enter("cid", kOtherA);
  Enter("dan", {7, "a"});
  queue_.WakeEvery("a");
  queue_.WakeEvery("nobody waits there");
  EXPECT_EQ(TryAll(), (Texts{"ann", "cid", "dan"}));
}

TEST_F(WaitQueueTest, WakesTheLinesOfADatabaseOrOfAll) {
  Enter("ann", kA);
  Enter("bob", kOtherA);
  Enter("cid", kB);
  queue_.WakeAll(0);
  EXPECT_EQ(TryAll(), (Texts{"ann", "cid"}));
  queue_.WakeAll(1);
  EXPECT_EQ(TryAll(), (Texts{"bob"}));
  queue_.WakeAll(2);
  EXPECT_EQ(TryAll(), Texts{});
  queue_.WakeAll(std::nullopt);
  EXPECT_EQ(TryAll(), (Texts{"ann", "bob", "cid"}));
}

// --- Nobody may become a holder now -----------------------------------------------------------

TEST_F(WaitQueueTest, SuspendedWaitersAreTriedAfterWakeAll) {
  Waiter& ann = Enter("ann", {kA, kB}, Exclusive());
  Waiter& bob = Enter("bob", kA, Shared());
  queue_.Wake(kA);
  queue_.Suspend(ann);
  queue_.Suspend(bob);
  EXPECT_EQ(ann.blocked_at(), std::nullopt);
  EXPECT_EQ(NextToTry(), "");
  EXPECT_EQ(NextDue(), Ms(kLate));
  queue_.WakeAll(std::nullopt);
  EXPECT_EQ(NextToTry(), "ann");
  queue_.Leave(ann);
  EXPECT_EQ(TryAll(), (Texts{"bob"}));
}

TEST_F(WaitQueueTest, SuspendedWaiterIsTriedWhenAnyOfItsLocksWakes) {
  Waiter& ann = NewCall();
  queue_.Enter(ann, Locks{kA, kB, kC}, Owner{"ann"}, /*upgrade=*/false);
  queue_.Suspend(ann);
  for (const LockName lock : {kC, kA, kB}) {
    queue_.Wake(lock);
    EXPECT_EQ(NextToTry(), "ann") << lock.key;
    queue_.Suspend(ann);
    EXPECT_EQ(NextToTry(), "") << lock.key;
  }
  queue_.Wake(kA);
  queue_.Block(ann, 1, std::nullopt);
  queue_.Wake(kA);
  queue_.Wake(kC);
  EXPECT_EQ(NextToTry(), "") << "now it is known what blocks it";
}

TEST_F(WaitQueueTest, WaiterThatIsSuspendedForgetsWhenAHoldEnds) {
  Waiter& ann = EnterUntil("ann", kA, At(2'000));
  queue_.Wake(kA);
  queue_.Suspend(ann);
  EXPECT_EQ(TryAll(At(2'001)), Texts{});
}

// --- Ends of holds ----------------------------------------------------------------------------

TEST_F(WaitQueueTest, LineWakesAfterTheLastMillisecondOfTheHold) {
  EnterUntil("ann", kA, At(2'000));
  EXPECT_EQ(NextDue(), 2'001);
  EXPECT_EQ(TryAll(At(1'999)), Texts{});
  EXPECT_EQ(TryAll(At(2'000)), Texts{}) << "a hold lives through its last millisecond";
  EXPECT_EQ(NextDue(), 2'001);
  EXPECT_EQ(TryAll(At(2'001)), (Texts{"ann"}));
  EXPECT_EQ(TryAll(At(2'001)), Texts{}) << "once is enough";
  EXPECT_EQ(NextDue(), Ms(kLate)) << "the hold is over: only the time-out is left";
}

TEST_F(WaitQueueTest, HoldThatWasOverBeforeTheWait) {
  EnterUntil("ann", kA, At(500));
  EXPECT_EQ(NextDue(), 501);
  EXPECT_EQ(TryAll(kNow), (Texts{"ann"}));
}

TEST_F(WaitQueueTest, HoldThatDoesNotEndByItself) {
  Enter("ann", kA);
  EXPECT_EQ(TryAll(kMaxInstant), Texts{});
  EXPECT_EQ(Ms(queue_.NextDue()), kNothingDue);
}

TEST_F(WaitQueueTest, EarlierEndIsNotedAndALaterOneIsNot) {
  EnterUntil("ann", kA, At(3'000));
  queue_.NoteEnd(kA, At(2'000));
  EXPECT_EQ(NextDue(), 2'001);
  queue_.NoteEnd(kA, At(4'000));
  EXPECT_EQ(NextDue(), 2'001) << "another hold may still end then";
  queue_.NoteEnd(kOtherA, At(1'500));  // there is no line
  queue_.NoteEnd(kB, At(1'500));
  EXPECT_EQ(NextDue(), 2'001);
  EXPECT_EQ(TryAll(At(2'001)), (Texts{"ann"}));
}

TEST_F(WaitQueueTest, EndIsNotedWhereNoneWasKnown) {
  Enter("ann", kA);
  queue_.NoteEnd(kA, At(2'000));
  EXPECT_EQ(NextDue(), 2'001);
}

TEST_F(WaitQueueTest, BlockOfTheFirstTellsTheEndAnew) {
  Waiter& ann = EnterUntil("ann", kA, At(2'000));
  EXPECT_EQ(NextToTry(At(2'001)), "ann");
  queue_.Block(ann, 0, At(3'000));  // it was renewed
  EXPECT_EQ(NextDue(), 3'001);
  queue_.Wake(kA);
  queue_.Block(ann, 0, At(2'500));
  EXPECT_EQ(NextDue(), 2'501);
  queue_.Wake(kA);
  queue_.Block(ann, 0, std::nullopt);
  EXPECT_EQ(NextDue(), Ms(kLate)) << "nor is an end remembered";
}

TEST_F(WaitQueueTest, BlockKeepsTheEarlierEndOfSomebodyAhead) {
  EnterUntil("ann", kA, At(2'000));
  Waiter& bob = EnterUntil("bob", kA, At(3'000));
  EXPECT_EQ(NextDue(), 2'001);
  queue_.Leave(bob);
  TryAll();
  queue_.NoteEnd(kA, At(2'000));
  Enter("cid", kA);
  EXPECT_EQ(NextDue(), 2'001) << "an end that is not known takes nothing away";
  EnterUntil("dan", kA, At(1'500));
  EXPECT_EQ(NextDue(), 1'501);
  EXPECT_EQ(TryAll(At(1'501)), (Texts{"ann"}));
}

TEST_F(WaitQueueTest, EndIsForgottenWhenNobodyIsBlockedThereAnyMore) {
  Waiter& ann = Enter("ann", {kA, kB}, Exclusive(), At(2'000));
  queue_.Wake(kA);
  queue_.Block(ann, 1, At(3'000));
  EXPECT_EQ(NextDue(), 3'001);
  queue_.Wake(kB);
  queue_.Block(ann, 0, std::nullopt);
  EXPECT_EQ(NextDue(), Ms(kLate));
}

TEST_F(WaitQueueTest, EndStaysForThoseWhoAreLeft) {
  Waiter& ann = EnterUntil("ann", kA, At(2'000));
  Enter("bob", kA);
  queue_.Leave(ann, Left::kHoldsAlone);
  EXPECT_EQ(NextDue(), 2'001);
  EXPECT_EQ(TryAll(At(2'001)), (Texts{"bob"}));
}

TEST_F(WaitQueueTest, EndIsForgottenWithTheLine) {
  queue_.Leave(EnterUntil("ann", kA, At(2'000)));
  EXPECT_EQ(NextDue(), kNothingDue);
  Enter("ann", kA);
  EXPECT_EQ(NextDue(), Ms(kLate));
  EXPECT_EQ(TryAll(At(2'001)), Texts{});
}

TEST_F(WaitQueueTest, HoldsThatEndTogetherAreServedByArrival) {
  EnterUntil("ann", kD, At(2'001));
  EnterUntil("bob", kC, At(2'000));
  EnterUntil("cid", kA, At(2'000));
  EnterUntil("dan", kB, At(1'990));
  EXPECT_EQ(TryAll(At(2'001)), (Texts{"bob", "cid", "dan"}));
  EXPECT_EQ(NextDue(), 2'002);
  EXPECT_EQ(TryAll(At(2'002)), (Texts{"ann"}));
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

TEST_F(WaitQueueTest, ListsAllWhoWaitByTimeOut) {
  const Waiter& ann = Enter("ann", kA, TickAt(2'002));
  const Waiter& bob = Enter("bob", kB, TickAt(2'000));
  Waiter& cid = Enter("cid", kA, TickAt(2'001));
  EXPECT_EQ(queue_.Waiters(),
            (std::vector<Waiter*>{FindWaiter(kB, "bob"), &cid, FindWaiter(kA, "ann")}));
  EXPECT_EQ(queue_.Waiters().front(), &bob);
  queue_.Leave(cid);
  EXPECT_EQ(queue_.Waiters().size(), 2U);
  EXPECT_EQ(queue_.Waiters().back(), &ann);
}

TEST_F(WaitQueueTest, NextDueIsTheEarliestOfAll) {
  Waiter& ann = Enter("ann", kA, TickAt(5'000));
  EXPECT_EQ(NextDue(), 5'000);
  Waiter& bob = Enter("bob", kB, TickAt(4'000));
  EXPECT_EQ(NextDue(), 4'000);
  queue_.NoteEnd(kA, At(3'000));
  EXPECT_EQ(NextDue(), 3'001);
  queue_.NoteEnd(kB, At(2'000));
  EXPECT_EQ(NextDue(), 2'001);
  queue_.Block(bob, 0, At(3'999));
  EXPECT_EQ(NextDue(), 3'001);
  queue_.Block(ann, 0, At(4'000));
  EXPECT_EQ(NextDue(), 4'000) << "the end would be 4001, the time-out is 4000";
  queue_.Wake(kA);
  EXPECT_EQ(NextDue(), kDueAtOnce);
  queue_.Block(ann, 0, At(4'000));
  EXPECT_EQ(NextDue(), 4'000);
  queue_.Leave(bob);
  EXPECT_EQ(NextDue(), 4'001);
  queue_.Leave(ann);
  EXPECT_EQ(NextDue(), kNothingDue);
}

// --- What operators see -----------------------------------------------------------------------

TEST_F(WaitQueueTest, TellsWhichLinesAreLongest) {
  const auto longest = [this](int db) {
    Texts keys;
    for (const WaitQueue::Line* line : queue_.LongestLines(db, 100)) {
      keys.emplace_back(line->lock().key);
    }
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

TEST_F(WaitQueueTest, TellsNoMoreLinesThanAskedFor) {
  for (int i = 0; i < 10; ++i) {
    for (int j = 0; j <= i; ++j) {
      Enter(std::to_string(j), {0, std::string(1, static_cast<char>('z' - i))});
    }
  }
  const auto longest = queue_.LongestLines(0, 3);
  ASSERT_EQ(longest.size(), 3U);
  for (size_t i = 0; i < longest.size(); ++i) EXPECT_EQ(longest[i]->size(), 10 - i);
  EXPECT_EQ(queue_.LongestLines(0, 0).size(), 0U);
  EXPECT_EQ(queue_.LongestLines(0, 100).size(), 10U);
}

// --- Random histories against a list for each lock --------------------------------------------

// Locks, holders and waiters, worked on as the server does it; and beside the queue, which knows
// what woke and what blocks whom, a plain list of those who wait for each lock. Whoever could be
// granted a lock by a look at everything must never be left asleep by the queue.
class QueueHistory {
 public:
  explicit QueueHistory(unsigned seed) : random_(seed) {}
  ~QueueHistory() {
    while (!calls_.empty()) Leave(calls_.front(), Left::kGone);
  }
  QueueHistory(const QueueHistory&) = delete;
  QueueHistory& operator=(const QueueHistory&) = delete;

  void Step() {
    switch (Pick(24)) {
      case 0:
      case 1:
      case 2:
      case 3:
      case 4:
      case 5:
      case 6:
      case 7:
        Ask();
        break;
      case 8:
      case 9:
      case 10:
        Release();
        break;
      case 11:
        Touch();
        break;
      case 12:
        TouchKey();
        break;
      case 13:
      case 14:
        now_ += Millis{Pick(4)};
        break;
      case 15:
      case 16:
        if (!calls_.empty()) Leave(AnyCall(), Left::kGone);
        break;
      case 17:
        if (Pick(8) == 0) SetGrace(Grace::kOn);
        if (Pick(2) == 0) SetGrace(Grace::kOver);
        break;
      case 18:
        WakeSomething();
        break;
      case 19:
      case 20:
        Work(Pick(4));
        break;
      default:
        Work(1'000);
        CheckThatWorkIsDone();
    }
    Check();
  }

  int granted() const { return granted_; }
  int taken_over() const { return taken_over_; }
  int upgrades() const { return upgrades_; }

 private:
  static constexpr std::array<LockName, 4> kNames = {kA, kB, kC, kOtherA};
  static constexpr int kOwners = 6;

  // Where a waiter stands: by arrival, an upgrade just before the waiter that it was put before.
  struct Rank {
    uint64_t arrival = 0;
    int64_t before = 0;
    friend constexpr auto operator<=>(const Rank&, const Rank&) = default;
  };

  struct Call {
    Call(const AcquireRequest& request, const std::vector<size_t>& of)
        : waiter(request, kTickNow, kLateTick), owner(request.owner.bytes), locks(of) {}

    Waiter waiter;
    std::string owner;
    std::vector<size_t> locks;
    Rank rank;
  };

  struct State {
    std::unique_ptr<Lock> lock;
    std::optional<std::pair<std::string, Instant>> plain;
    std::vector<Call*> line;

    Place place() const {
      Place place;
      place.lock = lock.get();
      if (plain.has_value()) place.plain = PlainLock{plain->first, plain->second};
      return place;
    }
  };

  int Pick(int below) { return static_cast<int>(random_() % static_cast<unsigned>(below)); }
  size_t PickLock() { return static_cast<size_t>(Pick(kNames.size())); }
  std::string PickOwner() { return std::string(1, static_cast<char>('p' + Pick(kOwners))); }
  Call& AnyCall() { return *std::next(calls_.begin(), Pick(static_cast<int>(calls_.size()))); }

  static Locks NamesOf(const std::vector<size_t>& locks) {
    Locks names;
    for (const size_t lock : locks) names.push_back(kNames.at(lock));
    return names;
  }

  // --- The naive side ---

  // Those ahead of `call`, or of a newcomer if that is null.
  Crowd Ahead(size_t lock, const Call* call, bool upgrade = false) const {
    Crowd crowd;
    for (const Call* other : locks_.at(lock).line) {
      const AcquireRequest& request = other->waiter.request();
      if (other == call || (upgrade && request.mode != Mode::kShared)) break;
      crowd.Add(request.mode, request.limit);
    }
    return crowd;
  }

  Outcome Decided(const std::vector<Site>& sites, const AcquireRequest& request) const {
    return Decide(sites, request, FineInstant(now_), clock_, {.grace = grace_}).outcome;
  }

  static bool IsGrant(Outcome outcome) { return Admission{outcome, {}}.granted(); }
  static bool IsBusy(Outcome outcome) { return Admission{outcome, {}}.busy(); }

  Outcome NaiveOutcome(const Call& call) const {
    std::vector<Site> sites;
    for (const size_t lock : call.locks) {
      sites.push_back({locks_.at(lock).place(), Ahead(lock, &call)});
    }
    return Decided(sites, call.waiter.request());
  }

  // Whether the owner has come to hold one of the locks in another way: then it is answered when
  // its turn comes, and not at once.
  bool HoldsAlready(const Call& call) const {
    const Owner owner{call.owner};
    return std::any_of(call.locks.begin(), call.locks.end(), [&](size_t index) {
      const Place place = locks_.at(index).place();
      if (place.plain.has_value()) return place.plain->value == call.owner;
      if (place.lock == nullptr) return false;
      const auto hold = place.lock->Find(owner);
      return hold.has_value() && hold->LiveAt(now_) &&
             !(call.locks.size() == 1 && IsUpgrade(place, call.waiter.request(), now_));
    });
  }

  bool CouldBeGranted(const Call& call) const {
    return !HoldsAlready(call) && IsGrant(NaiveOutcome(call));
  }

  // --- What the server does ---

  void Store(size_t index, const Held& held) {
    State& state = locks_.at(index);
    const bool other_mode =
        state.plain.has_value() || (state.lock != nullptr && state.lock->mode() != held.mode);
    state.plain.reset();
    if (Lock* stored = Apply(state.lock.get(), held); stored != state.lock.get()) {
      state.lock.reset(stored);
    }
    clock_.Observe(held.hold.token);
    queue_.NoteEnd(kNames.at(index), held.hold.closes());
    if (other_mode) queue_.Wake(kNames.at(index));
  }

  template <typename Fact>
  void TakeOut(size_t index, const Fact& fact) {
    State& state = locks_.at(index);
    if (EndsHold(*state.lock, fact)) queue_.Wake(kNames.at(index));
    if (Lock* left = Apply(state.lock.get(), fact); left != state.lock.get()) {
      state.lock.reset(left);
    }
  }

  void RemoveOverdue(size_t index) {
    const auto overdue = Overdue(locks_.at(index).place(), now_);
    if (!overdue.has_value()) return;
    State& state = locks_.at(index);
    queue_.Wake(kNames.at(index));
    if (Lock* left = Apply(state.lock.get(), *overdue); left != state.lock.get()) {
      state.lock.reset(left);
    }
  }

  void Grant(const std::vector<size_t>& locks, const AcquireRequest& request, Token token) {
    for (const size_t index : locks) {
      const Held held = HeldBy(locks_.at(index).place(), request, token, now_);
      if (Joins(locks_.at(index).lock.get(), held.mode)) RemoveOverdue(index);
      Store(index, held);
    }
  }

  void BlockCall(Call& call, const std::vector<Site>& sites) {
    for (size_t i = 0; i < sites.size(); ++i) {
      if (!IsBlocked(sites[i], call.waiter.request(), now_)) continue;
      queue_.Block(call.waiter, i, NextEnd(sites[i].place, now_));
      return;
    }
    EXPECT_EQ(grace_, Grace::kOn) << "somebody waits whom nothing blocks";
    held_back_ = true;
    queue_.Suspend(call.waiter);
  }

  void Ask() {
    std::string owner = PickOwner();
    std::vector<size_t> locks;
    for (int i = Pick(5) < 3 ? 1 : 1 + Pick(3); i > 0; --i) {
      const size_t lock = PickLock();
      if (std::find(locks.begin(), locks.end(), lock) == locks.end()) locks.push_back(lock);
    }
    AcquireRequest request{.owner = Owner{owner}, .lease = Millis{1 + Pick(12)}};
    request.mode = static_cast<Mode>(Pick(3));
    if (request.mode == Mode::kLimit) request.limit = static_cast<uint32_t>(1 + Pick(3));
    if (Pick(4) == 0) request.linger = Millis{Pick(4)};
    const Lock* lock = locks_.at(locks.front()).lock.get();
    if (lock != nullptr && lock->mode() == Mode::kShared && Pick(2) == 0) {  // an upgrade
      const size_t holder = static_cast<size_t>(Pick(static_cast<int>(lock->size())));
      owner = lock->at(Lock::Order::kByOwner, holder).owner.bytes;
      locks.resize(1);
      request.owner = Owner{owner};
      request.mode = Mode::kExclusive;
    }

    std::vector<Site> sites;
    std::vector<Site> naive;
    bool put_off = false;
    for (const size_t index : locks) {
      const Place place = locks_.at(index).place();
      const bool upgrade = IsUpgrade(place, request, now_);
      const WaitQueue::Line* line = queue_.Find(kNames.at(index));
      sites.push_back({place, line == nullptr ? Crowd() : line->Ahead(upgrade, now_)});
      naive.push_back({place, Ahead(index, nullptr, upgrade)});
      put_off = put_off || (line != nullptr && line->Ahead(false, now_).IsMixed());
    }
    const Admission admission =
        Decide(sites, request, FineInstant(now_), clock_, {.grace = grace_});
    if (!put_off) {
      EXPECT_EQ(admission.outcome, Decided(naive, request));
    }
    if (admission.granted()) {
      if (admission.is_new()) CheckThatNobodyWasPassed(locks, request);
      Grant(locks, request, admission.token);
    } else if (admission.busy() && Pick(8) > 0) {
      Park(locks, request, sites);
    }
  }

  void Park(const std::vector<size_t>& locks, const AcquireRequest& request,
            const std::vector<Site>& sites) {
    const Locks names = NamesOf(locks);
    const std::vector<Waiter*> olders = queue_.FindWaiters(names, request.owner);
    Call& call = calls_.emplace_back(request, locks);
    const bool withdraw = Pick(8) == 0;  // as one that would close a cycle
    if (olders.size() == 1 && WaitQueue::WaitsFor(*olders.front(), names, request.mode)) {
      ++taken_over_;
      Call& older = CallOf(*olders.front());
      queue_.TakeOver(call.waiter, older.waiter);
      Replace(older, call);
      if (!withdraw) {
        Forget(older);
        return;
      }
      queue_.TakeOver(older.waiter, call.waiter);
      Replace(call, older);
      Forget(call);
      return;
    }
    const bool upgrade =
        locks.size() == 1 && IsUpgrade(locks_.at(locks.front()).place(), request, now_);
    upgrades_ += upgrade ? 1 : 0;
    queue_.Enter(call.waiter, names, request.owner, upgrade);
    Insert(call, upgrade);
    BlockCall(call, sites);
    if (withdraw) {
      Leave(call, Left::kGone);
      return;
    }
    for (Waiter* older : olders) Leave(CallOf(*older), Left::kGone);
  }

  void Insert(Call& call, bool upgrade) {
    call.rank = {.arrival = ++arrivals_};
    for (const size_t lock : call.locks) {
      std::vector<Call*>& line = locks_.at(lock).line;
      auto at = line.end();
      if (upgrade) {
        at = std::find_if(line.begin(), line.end(), [](const Call* other) {
          return other->waiter.request().mode != Mode::kShared;
        });
        if (at != line.end()) call.rank = {(*at)->rank.arrival, (*at)->rank.before - 1};
      }
      line.insert(at, &call);
    }
  }

  void Replace(Call& older, Call& newer) {
    newer.rank = older.rank;
    newer.locks = older.locks;
    for (const size_t lock : older.locks) {
      std::vector<Call*>& line = locks_.at(lock).line;
      std::replace(line.begin(), line.end(), &older, &newer);
    }
  }

  void Forget(const Call& call) {
    calls_.remove_if([&call](const Call& each) { return &each == &call; });
  }

  void Leave(Call& call, Left why) {
    queue_.Leave(call.waiter, why);
    for (const size_t lock : call.locks) std::erase(locks_.at(lock).line, &call);
    Forget(call);
  }

  void Release() {
    const size_t index = PickLock();
    const std::string owner = PickOwner();
    State& state = locks_.at(index);
    const Decision decision = Decide(state.place(), ReleaseRequest{.owner = Owner{owner}}, now_);
    if (!decision.change.has_value()) return;
    if (std::holds_alternative<PlainFreed>(*decision.change)) {
      state.plain.reset();
      queue_.WakeEvery(kNames.at(index).key);
    } else if (std::holds_alternative<Ended>(*decision.change)) {
      TakeOut(index, Ended{Owner{owner}});
    } else {
      TakeOut(index, Released{Owner{owner}});
    }
  }

  void Touch() {
    const size_t index = PickLock();
    const std::string owner = PickOwner();
    State& state = locks_.at(index);
    const TouchRequest request{.owner = Owner{owner}, .lease = Millis{Pick(15)}};
    const Decision decision = Decide(state.place(), request, now_);
    if (!decision.change.has_value()) return;
    if (const auto* held = std::get_if<Held>(&*decision.change)) {
      Store(index, *held);
    } else {
      state.plain->second = now_ + request.lease;
      queue_.WakeEvery(kNames.at(index).key);
    }
  }

  // As SET and DEL do.
  void TouchKey() {
    const size_t index = PickLock();
    State& state = locks_.at(index);
    state.lock.reset();
    state.plain.reset();
    if (Pick(2) == 0) {
      const bool ends = Pick(3) > 0;
      state.plain = std::pair(PickOwner(), ends ? now_ + Millis{1 + Pick(12)} : kMaxInstant);
    }
    queue_.WakeEvery(kNames.at(index).key);
  }

  void WakeSomething() {
    switch (Pick(4)) {
      case 0:
        queue_.WakeEvery(kNames.at(PickLock()).key);
        break;
      case 1:
        queue_.WakeAll(Pick(2));
        break;
      default:
        queue_.Wake(kNames.at(PickLock()));
    }
  }

  void SetGrace(Grace grace) {
    grace_ = grace;
    if (grace == Grace::kOn || !std::exchange(held_back_, false)) return;
    queue_.WakeAll(std::nullopt);
  }

  void Work(int budget) {
    for (; budget > 0; --budget) {
      Waiter* waiter = queue_.NextToTry(now_);
      if (waiter == nullptr) return;
      Try(CallOf(*waiter));
    }
  }

  Site SiteOf(const Call& call, size_t index) const {
    return {locks_.at(call.locks[index]).place(), call.waiter.AheadOf(index)};
  }

  void Try(Call& call) {
    if (call.locks.size() > 1 && call.waiter.blocked_at().has_value()) {
      const size_t index = *call.waiter.blocked_at();
      RemoveOverdue(call.locks[index]);
      const Site site = SiteOf(call, index);
      if (IsBlocked(site, call.waiter.request(), now_)) {
        queue_.Block(call.waiter, index, NextEnd(site.place, now_));
        return;
      }
    }
    for (const size_t lock : call.locks) RemoveOverdue(lock);
    std::vector<Site> sites;
    for (size_t i = 0; i < call.locks.size(); ++i) sites.push_back(SiteOf(call, i));
    const AcquireRequest& request = call.waiter.request();
    const Admission admission =
        Decide(sites, request, FineInstant(now_), clock_, {.grace = grace_});
    EXPECT_EQ(admission.outcome, NaiveOutcome(call));
    if (admission.busy()) {
      BlockCall(call, sites);
      return;
    }
    if (!admission.granted()) {
      Leave(call, Left::kGone);
      return;
    }
    ++granted_;
    for (const Call& other : calls_) {
      if (HoldsAlready(call) || !(other.rank < call.rank)) continue;
      EXPECT_FALSE(CouldBeGranted(other)) << call.owner << " is served before " << other.owner;
    }
    Grant(call.locks, request, admission.token);
    const bool alone = request.mode == Mode::kExclusive;
    Leave(call, alone ? Left::kHoldsAlone : Left::kGone);
  }

  Call& CallOf(const Waiter& waiter) {
    return *std::find_if(calls_.begin(), calls_.end(),
                         [&waiter](const Call& call) { return &call.waiter == &waiter; });
  }

  // --- Checks ---

  // A newcomer got locks that others, who want them and nothing else, were entitled to.
  void CheckThatNobodyWasPassed(const std::vector<size_t>& locks, const AcquireRequest& request) {
    for (const size_t lock : locks) {
      const bool upgrade = IsUpgrade(locks_.at(lock).place(), request, now_);
      for (const Call* call : locks_.at(lock).line) {
        if (call->locks.size() > 1 || upgrade) continue;
        EXPECT_FALSE(CouldBeGranted(*call)) << request.owner.bytes << " passes " << call->owner;
      }
    }
  }

  void Check() {
    EXPECT_EQ(queue_.size(), calls_.size());
    for (size_t lock = 0; lock < locks_.size(); ++lock) {
      const WaitQueue::Line* line = queue_.Find(kNames.at(lock));
      const WaitQueue::Place* place = line == nullptr ? nullptr : line->first();
      for (const Call* call : locks_.at(lock).line) {
        ASSERT_NE(place, nullptr);
        EXPECT_EQ(&place->waiter(), &call->waiter);
        place = place->behind();
      }
      EXPECT_EQ(place, nullptr);
    }
    const bool idle = queue_.NextDue() > now_;
    for (const Call& call : calls_) {
      for (size_t i = 0; i < call.locks.size(); ++i) {
        const Place place = locks_.at(call.locks[i]).place();
        const Site naive{place, Ahead(call.locks[i], &call)};
        EXPECT_EQ(IsBlocked({place, call.waiter.AheadOf(i)}, call.waiter.request(), now_),
                  IsBlocked(naive, call.waiter.request(), now_));
      }
      if (!idle || grace_ == Grace::kOn || HoldsAlready(call)) continue;
      EXPECT_TRUE(IsBusy(NaiveOutcome(call))) << call.owner << " sleeps";
      // Whoever is to be tried when any of its lines wakes sleeps in all of them.
      for (size_t i = 0; i < call.locks.size(); ++i) {
        if (call.waiter.blocked_at().value_or(i) != i) continue;
        const Site site{locks_.at(call.locks[i]).place(), Ahead(call.locks[i], &call)};
        EXPECT_TRUE(IsBlocked(site, call.waiter.request(), now_))
            << call.owner << " is known to be blocked by the wrong lock";
      }
    }
  }

  // Nothing is left to do; and if a lock wakes, the first of those that it blocks is tried.
  void CheckThatWorkIsDone() {
    ASSERT_EQ(queue_.NextToTry(now_), nullptr);
    EXPECT_GT(queue_.NextDue(), now_);
    const size_t lock = PickLock();
    const std::vector<Call*>& line = locks_.at(lock).line;
    const auto first = std::find_if(line.begin(), line.end(), [lock](const Call* call) {
      const auto at = call->waiter.blocked_at();
      return !at.has_value() || call->locks[*at] == lock;
    });
    queue_.Wake(kNames.at(lock));
    EXPECT_EQ(queue_.NextToTry(now_), first == line.end() ? nullptr : &(*first)->waiter);
  }

  std::mt19937 random_;
  Instant now_ = kNow;
  Grace grace_ = Grace::kOver;
  bool held_back_ = false;  // somebody waits for the end of the grace
  TokenClock clock_;
  std::list<Call> calls_;
  std::array<State, kNames.size()> locks_;
  uint64_t arrivals_ = 0;
  int granted_ = 0;
  int taken_over_ = 0;
  int upgrades_ = 0;
  WaitQueue queue_;
};

TEST(WaitQueueHistoryTest, NobodyWhoCouldBeGrantedIsLeftAsleep) {
  int granted = 0;
  int taken_over = 0;
  int upgrades = 0;
  for (unsigned seed = 1; seed <= 20; ++seed) {
    SCOPED_TRACE(seed);
    QueueHistory history(seed);
    for (int step = 0; step < 1'500; ++step) {
      SCOPED_TRACE(step);
      history.Step();
      if (testing::Test::HasFailure()) return;
    }
    granted += history.granted();
    taken_over += history.taken_over();
    upgrades += history.upgrades();
  }
  // All of it happened, and often.
  EXPECT_GT(granted, 1'000);
  EXPECT_GT(taken_over, 100);
  EXPECT_GT(upgrades, 100);
}

// --- Memory -----------------------------------------------------------------------------------

static_assert(sizeof(Waiter) <= 192);

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
  EXPECT_LE(each, 450);
  for (Waiter& waiter : calls_) queue_.Leave(waiter);
  std::deque<Waiter>().swap(calls_);
  // The allocator itself keeps a few blocks at hand.
  EXPECT_LT(Allocated() - before, 16'384) << "after a rush nothing is kept";
}

TEST_F(WaitQueueTest, NothingIsLeftOfThoseWhoWent) {
  Enter("somebody", {0, "busy"});  // the queue never gets empty
  const int64_t before = Allocated();
  for (int i = 0; i < 20'000; ++i) {
    Waiter waiter(Limit(3), kTickNow, kLateTick);
    Waiter newer(Limit(2), kTickNow, kLateTick);
    const std::string number = std::to_string(i);
    const std::string key = "the key of a lock that is used once: " + number;
    const std::string other_key = "another such key: " + number;
    const Locks locks = {{0, key}, {0, other_key}};
    queue_.Enter(waiter, locks, Owner{"a waiter that never comes back: " + number},
                 /*upgrade=*/false);
    queue_.Block(waiter, 1, At(2'000));
    if (i % 2 == 0) queue_.Wake(locks[1]);
    if (i % 3 == 0) queue_.NoteEnd(locks[0], At(1'500));
    queue_.TakeOver(newer, waiter);
    queue_.Leave(newer);
  }
  EXPECT_LT(Allocated() - before, 64 * 1'024);
}
#endif

}  // namespace
}  // namespace turnstile
