// Every operation of the wait queues, with a manual clock.

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
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/decide.h"
#include "printers.h"

namespace turnstile {
namespace {

using namespace std::string_literals;
using Waiter = WaitQueue::Waiter;
using Left = WaitQueue::LeaveReason;
using Texts = std::vector<std::string>;

constexpr Instant At(int64_t ms) { return Instant{Millis{ms}}; }
constexpr Tick TickAt(int64_t ms) { return Tick{Millis{ms}}; }
// Instants as numbers, which are easier to read in failures.
constexpr int64_t Ms(Instant moment) { return moment.time_since_epoch().count(); }
constexpr int64_t Ms(Tick tick) { return tick.time_since_epoch().count(); }

constexpr Instant kNow = At(1'000);
constexpr Instant kLate = At(1'000'000);
constexpr Tick kTickNow = TickAt(Ms(kNow));
constexpr Tick kLateTick = TickAt(Ms(kLate));
constexpr Millis kLease{30};
constexpr int64_t kNothingDue = Ms(kMaxInstant);
constexpr int64_t kDueAtOnce = Ms(kMinInstant);
constexpr Tick kEndOfTime{kMaxInstant.time_since_epoch()};

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

AcquireRequest Limit(uint32_t limit, uint32_t weight) {
  AcquireRequest request = Limit(limit);
  request.weight = weight;
  return request;
}

using Locks = std::vector<LockName>;

class WaitQueueTest : public testing::Test {
 protected:
  // Queues are removed when nobody waits; then nothing is left.
  void TearDown() override {
    while (Waiter* waiter = queue_.FirstTimedOut(kEndOfTime)) queue_.Leave(*waiter);
    EXPECT_TRUE(queue_.empty());
    EXPECT_EQ(NextDue(), kNothingDue);
    EXPECT_EQ(queue_.queues(), 0U);
    EXPECT_TRUE(queue_.LongestQueues(0, 1).empty());
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
  // An exclusive waiter for a lock with a hold that ends at `end`.
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
    const WaitQueue::LockQueue* lock_queue = queue_.Find(lock);
    if (lock_queue == nullptr) return {};
    EXPECT_TRUE(lock_queue->lock() == lock);
    Texts owners;
    for (const WaitQueue::Entry* state = lock_queue->first(); state != nullptr;
         state = state->behind()) {
      const Waiter& waiter = state->waiter();
      EXPECT_TRUE(waiter.is_queued());
      EXPECT_TRUE(waiter.WaitsFor(lock));
      owners.emplace_back(waiter.request().owner.bytes);
    }
    EXPECT_EQ(lock_queue->size(), owners.size());
    EXPECT_NE(lock_queue->size(), 0U);
    return owners;
  }

  // The owner to be tried next; "" for nobody.
  std::string NextToTry(Instant now = kNow) {
    const Waiter* waiter = queue_.NextToTry(now);
    EXPECT_EQ(queue_.NextToTry(now), waiter) << "asking twice makes no difference";
    if (waiter == nullptr) return "";
    EXPECT_EQ(queue_.NextDue(), Due::AtOnce());
    return std::string(waiter->request().owner.bytes);
  }

  // All owners to be tried. Each is found to be blocked by the same lock as before.
  Texts TryAll(Instant now = kNow) {
    Texts tried;
    for (std::string owner = NextToTry(now); !owner.empty(); owner = NextToTry(now)) {
      tried.push_back(owner);
      if (tried.size() > 10'000) {
        ADD_FAILURE() << "a blocked waiter is tried again and again";
        break;
      }
      Waiter& waiter = *queue_.NextToTry(now);
      queue_.Block(waiter, waiter.blocked_at().value_or(0), std::nullopt);
    }
    return tried;
  }

  // Whether the queue has work to do at `now`.
  bool HasPendingWork(LockName lock, Instant now = kNow) {
    return queue_.Find(lock)->Ahead(/*upgrade=*/false, now).IsMixed();
  }

  // Wall clock and steady clock show the same time here.
  // In milliseconds, time-outs included; as if the two clocks were the same.
  int64_t NextDue() const {
    const std::optional<Instant> due = queue_.NextDue().NotBefore(kMinInstant);
    const std::optional<Tick> time_out = queue_.NextTimeOut();
    return std::min(due.has_value() ? Ms(*due) : kNothingDue,
                    time_out.has_value() ? Ms(*time_out) : kNothingDue);
  }

  std::deque<Waiter> calls_;
  WaitQueue queue_;
};

// --- The intrusive lists that queues are made of ----------------------------------------------

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

TEST(IntrusiveList, InsertsAtAnyPosition) {
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

TEST(IntrusiveList, RemovesAnyElementAndReinsertsIt) {
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

TEST(IntrusiveList, ElementCanBeInTwoLists) {
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

// --- Queues -----------------------------------------------------------------------------------

TEST_F(WaitQueueTest, StartsEmpty) {
  EXPECT_TRUE(queue_.empty());
  EXPECT_EQ(queue_.size(), 0U);
  EXPECT_EQ(queue_.Find(kA), nullptr);
  EXPECT_EQ(FindWaiter(kA, "ann"), nullptr);
  EXPECT_EQ(queue_.NextToTry(kLate), nullptr);
  EXPECT_EQ(queue_.queues(), 0U);
  EXPECT_EQ(queue_.FirstTimedOut(kLateTick), nullptr);
  EXPECT_EQ(NextDue(), kNothingDue);
}

TEST_F(WaitQueueTest, KeepsOrderOfArrival) {
  // Neither names nor deadlines matter.
  Enter("dan", kA, TickAt(3'000));
  Enter("ann", kA, TickAt(1'000));
  Enter("cid", kA, TickAt(4'000));
  Enter("bob", kA, TickAt(2'000));
  EXPECT_EQ(LineOf(kA), (Texts{"dan", "ann", "cid", "bob"}));
  EXPECT_EQ(queue_.size(), 4U);
  EXPECT_FALSE(queue_.empty());
}

TEST_F(WaitQueueTest, FirstWaiterLeaves) {
  Waiter& first = Enter("ann", kA);
  Enter("bob", kA);
  Enter("cid", kA);
  queue_.Leave(first);
  EXPECT_FALSE(first.is_queued());
  EXPECT_EQ(LineOf(kA), (Texts{"bob", "cid"}));
  EXPECT_EQ(queue_.size(), 2U);
  Enter("dan", kA);
  EXPECT_EQ(LineOf(kA), (Texts{"bob", "cid", "dan"}));
}

TEST_F(WaitQueueTest, MiddleWaiterLeaves) {
  Enter("ann", kA);
  Waiter& middle = Enter("bob", kA);
  Enter("cid", kA);
  queue_.Leave(middle);
  EXPECT_FALSE(middle.is_queued());
  EXPECT_EQ(LineOf(kA), (Texts{"ann", "cid"}));
  Enter("dan", kA);
  EXPECT_EQ(LineOf(kA), (Texts{"ann", "cid", "dan"}));
}

TEST_F(WaitQueueTest, LastWaiterLeaves) {
  Enter("ann", kA);
  Enter("bob", kA);
  Waiter& last = Enter("cid", kA);
  queue_.Leave(last);
  EXPECT_EQ(LineOf(kA), (Texts{"ann", "bob"}));
  Enter("dan", kA);
  EXPECT_EQ(LineOf(kA), (Texts{"ann", "bob", "dan"}));
}

// All orders in which four waiters can leave.
TEST_F(WaitQueueTest, QueueIsConsistentWhateverOrderWaitersLeaveIn) {
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

TEST_F(WaitQueueTest, QueueIsRemovedWithItsLastWaiter) {
  Waiter& waiter = Enter("ann", kA);
  Enter("bob", kB);
  EXPECT_NE(queue_.Find(kA), nullptr);
  EXPECT_EQ(queue_.queues(), 2U);
  queue_.Leave(waiter);
  EXPECT_EQ(queue_.Find(kA), nullptr);
  EXPECT_EQ(queue_.queues(), 1U);
  EXPECT_EQ(LineOf(kB), (Texts{"bob"}));
  EXPECT_EQ(queue_.size(), 1U);
  queue_.Leave(*FindWaiter(kB, "bob"));
  EXPECT_TRUE(queue_.empty());
}

TEST_F(WaitQueueTest, SameKeyInTwoDatabasesHasTwoQueues) {
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
TEST_F(WaitQueueTest, CopiesKeysAndOwners) {
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

TEST_F(WaitQueueTest, WaiterReturnsItsRequest) {
  Waiter waiter(Exclusive(Millis{1'234}), TickAt(5), TickAt(77), /*client_id=*/42);
  EXPECT_FALSE(waiter.is_queued());
  EnterCall(waiter, kOtherA, "ann");
  EXPECT_TRUE(waiter.is_queued());
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

// All texts of a request are views into the caller's command.
TEST_F(WaitQueueTest, CopiesTextsOfRequest) {
  struct Case {
    std::string tag;
    std::optional<std::pair<std::string, std::string>> notify;
  };
  const std::vector<Case> cases = {
      {"", std::nullopt},
      {"a tag", std::nullopt},
      {"", std::pair("channel"s, "id"s)},
      {"a tag", std::pair("channel"s, "id"s)},
      {std::string(64, 't'), std::pair(std::string(256, '\0'), std::string(64, 'i'))},
      {"t", std::pair("c"s, "i"s)},
  };
  for (const Case& each : cases) {
    Case given = each;  // it is overwritten below
    AcquireRequest request = Exclusive();
    request.tag = given.tag;
    if (given.notify.has_value()) request.notify = {given.notify->first, given.notify->second};
    Waiter& waiter = NewCall(request);
    given.tag.assign(given.tag.size(), '?');
    if (given.notify.has_value()) {
      given.notify->first.assign(given.notify->first.size(), '?');
      given.notify->second.assign(given.notify->second.size(), '?');
    }
    const auto check = [&](const char* when) {
      EXPECT_EQ(waiter.request().tag, each.tag) << when;
      ASSERT_EQ(waiter.request().notify.has_value(), each.notify.has_value());
      if (!each.notify.has_value()) return;
      EXPECT_EQ(waiter.request().notify->channel, each.notify->first) << when;
      EXPECT_EQ(waiter.request().notify->id, each.notify->second) << when;
    };
    check("before it waits");
    EnterCall(waiter, kA, "ann");
    check("while it waits");
    Waiter& newer = NewCall();
    queue_.TakeOver(newer, waiter);
    check("when another took over");
    EXPECT_EQ(newer.request().tag, "") << "its own";
    queue_.TakeOver(waiter, newer);
    check("when it came back");
    queue_.Leave(waiter);
    check("when it has left");
  }
}

// The other keys of a request are views into the caller's command.
TEST_F(WaitQueueTest, WaiterKeepsNoViewOfCallersKeys) {
  const std::array<std::string_view, 1> also = {"b"};
  AcquireRequest request = Exclusive();
  request.also = also;
  const Waiter waiter(request, kTickNow, kLateTick);
  EXPECT_TRUE(waiter.request().also.empty());
}

TEST_F(WaitQueueTest, WaiterThatLeftCanEnterAgain) {
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

// Enough for every table to grow several times while in use.
TEST_F(WaitQueueTest, HandlesManyLocksAndOwners) {
  constexpr int kLines = 500;
  constexpr int kEach = 5;
  const auto key = [](int lock_queue) { return "key-" + std::to_string(lock_queue); };
  const auto owner = [](int lock_queue, int state) {
    return "owner-" + std::to_string(lock_queue) + "-" + std::to_string(state);
  };
  for (int state = 0; state < kEach; ++state) {
    for (int lock_queue = 0; lock_queue < kLines; ++lock_queue) {
      Enter(owner(lock_queue, state), {lock_queue % 3, key(lock_queue)},
            TickAt(10'000 + lock_queue * kEach + state));
    }
  }
  EXPECT_EQ(queue_.size(), size_t{kLines} * kEach);
  for (int lock_queue = 0; lock_queue < kLines; ++lock_queue) {
    Texts expected;
    for (int state = 0; state < kEach; ++state) expected.push_back(owner(lock_queue, state));
    EXPECT_EQ(LineOf({lock_queue % 3, key(lock_queue)}), expected);
  }
  for (int due = 10'000; due < 10'000 + kLines * kEach; ++due) {
    EXPECT_EQ(queue_.FirstTimedOut(TickAt(due - 1)), nullptr);
    Waiter* waiter = queue_.FirstTimedOut(TickAt(due));
    ASSERT_NE(waiter, nullptr);
    queue_.Leave(*waiter);
  }
  EXPECT_TRUE(queue_.empty());
}

// --- Taking over a position -------------------------------------------------------------------

TEST_F(WaitQueueTest, TakeOverKeepsPosition) {
  for (const size_t state : {0U, 1U, 2U}) {
    const Texts owners = {"ann", "bob", "cid"};
    std::vector<Waiter*> waiters;
    for (const std::string& owner : owners) waiters.push_back(&Enter(owner, kA));
    Waiter& older = *waiters[state];
    Waiter& newer = NewCall();
    queue_.TakeOver(newer, older);
    waiters[state] = &newer;

    EXPECT_EQ(LineOf(kA), owners);
    EXPECT_EQ(queue_.size(), 3U);
    EXPECT_EQ(&queue_.Find(kA)->first()->waiter(), waiters[0]);
    EXPECT_FALSE(older.is_queued());
    EXPECT_TRUE(newer.is_queued());
    EXPECT_EQ(FindWaiter(kA, owners[state]), &newer);

    // The links behind it are intact, too: all leave, last to first.
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

TEST_F(WaitQueueTest, TakeOverUsesDeadlineAndLeaseOfNewerCall) {
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

  queue_.TakeOver(newest, newer);  // an earlier deadline takes effect as well
  TryAll();
  EXPECT_EQ(NextDue(), 70);
  EXPECT_EQ(queue_.FirstTimedOut(TickAt(70)), &newest);
  EXPECT_EQ(queue_.size(), 1U);
  queue_.Leave(newest);
  EXPECT_TRUE(queue_.empty());
}

TEST_F(WaitQueueTest, NewerCallIsTriedAtPositionItTookOver) {
  Waiter& older = Enter("ann", kA);
  Enter("bob", kB);
  queue_.Wake(kB);
  Waiter& newer = NewCall();
  queue_.TakeOver(newer, older);
  EXPECT_EQ(newer.blocked_at(), std::nullopt) << "it may ask for less than the older did";
  EXPECT_EQ(TryAll(), (Texts{"ann", "bob"}));
  EXPECT_EQ(newer.blocked_at(), 0U);
}

TEST_F(WaitQueueTest, TakeOverLetsWaitersBehindBeTried) {
  Waiter& older = Enter("ann", {kA, kB}, Limit(1));
  Enter("bob", kA, Limit(5));
  Enter("cid", kB, Limit(5));
  Waiter& newer = NewCall(Limit(5));
  queue_.TakeOver(newer, older);
  EXPECT_EQ(NextToTry(), "ann");
  queue_.Block(newer, 1, std::nullopt);
  EXPECT_EQ(TryAll(), (Texts{"bob"})) << "of b the first one is blocked, and so are all behind";
}

TEST_F(WaitQueueTest, BlockedTakeOverPutsQueueToSleep) {
  Waiter& older = Enter("ann", kA);
  Enter("bob", kA);
  Waiter& newer = NewCall();
  queue_.TakeOver(newer, older);
  queue_.Block(newer, 0, At(2'000));
  EXPECT_EQ(NextToTry(), "");
  EXPECT_EQ(NextDue(), 2'001);
}

TEST_F(WaitQueueTest, TakeOverCanBeReverted) {
  Waiter& older = Enter("ann", {kA, kB}, Limit(3));
  Enter("bob", kA);
  Waiter& newer = NewCall(Limit(1), TickAt(5'000));
  queue_.TakeOver(newer, older);
  queue_.Block(newer, 1, std::nullopt);
  queue_.TakeOver(older, newer);
  EXPECT_FALSE(newer.is_queued());
  EXPECT_EQ(LineOf(kA), (Texts{"ann", "bob"}));
  EXPECT_EQ(FindWaiter(kB, "ann"), &older);
  EXPECT_EQ(queue_.Find(kB)->Ahead(false, kNow).least_limit, 3U);
  EXPECT_EQ(TryAll(), (Texts{"ann"}));
  EXPECT_EQ(queue_.NextTimeOut(), kLateTick);
}

TEST_F(WaitQueueTest, TakeOverInOneQueueLeavesOtherWaitsAlone) {
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

// --- One owner in several queues --------------------------------------------------------------

TEST_F(WaitQueueTest, FindsWaiterOfOwner) {
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

TEST_F(WaitQueueTest, OwnerCanWaitInSeveralQueues) {
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

// --- One waiter in several queues -------------------------------------------------------------

TEST_F(WaitQueueTest, WaiterIsInQueueOfEachLock) {
  Enter("ann", kB);
  Waiter& set = Enter("bob", {kC, kA, kB}, Exclusive());
  Enter("cid", kA);
  EXPECT_EQ(LineOf(kA), (Texts{"bob", "cid"}));
  EXPECT_EQ(LineOf(kB), (Texts{"ann", "bob"}));
  EXPECT_EQ(LineOf(kC), (Texts{"bob"}));
  EXPECT_EQ(queue_.size(), 3U) << "calls, not positions";
  ASSERT_EQ(set.size(), 3U);
  EXPECT_TRUE(set.lock(0) == kC) << "in the order in which they were named";
  EXPECT_TRUE(set.lock(1) == kA);
  EXPECT_TRUE(set.lock(2) == kB);
  EXPECT_TRUE(set.WaitsFor(kA));
  EXPECT_FALSE(set.WaitsFor(kOtherA));

  queue_.Leave(set);
  EXPECT_FALSE(set.is_queued());
  EXPECT_EQ(LineOf(kA), (Texts{"cid"}));
  EXPECT_EQ(LineOf(kB), (Texts{"ann"}));
  EXPECT_EQ(queue_.Find(kC), nullptr);
  EXPECT_EQ(TryAll(), (Texts{"ann", "cid"})) << "all remaining queues";
}

TEST_F(WaitQueueTest, TakeOverOfSeveralPositions) {
  Enter("zoe", kA);
  Waiter& older = Enter("ann", {kA, kB}, Limit(2));
  Enter("bob", kA);
  Enter("bob", kB);
  Waiter& newer = NewCall(Limit(7), TickAt(5'000));
  queue_.TakeOver(newer, older);
  EXPECT_FALSE(older.is_queued());
  EXPECT_EQ(newer.size(), 2U);
  EXPECT_EQ(newer.request().limit, 7U);
  EXPECT_EQ(queue_.Find(kB)->Ahead(/*upgrade=*/false, kNow).least_limit, 7U);
  EXPECT_EQ(newer.request().owner.bytes, "ann");
  EXPECT_EQ(LineOf(kA), (Texts{"zoe", "ann", "bob"}));
  EXPECT_EQ(LineOf(kB), (Texts{"ann", "bob"}));
  EXPECT_EQ(&queue_.Find(kB)->first()->waiter(), &newer);
  EXPECT_TRUE(HasPendingWork(kA));
  EXPECT_TRUE(HasPendingWork(kB));
  EXPECT_EQ(queue_.FirstTimedOut(TickAt(5'000)), &newer);
  queue_.Leave(newer);
  EXPECT_EQ(LineOf(kA), (Texts{"zoe", "bob"}));
  EXPECT_EQ(LineOf(kB), (Texts{"bob"}));
}

TEST_F(WaitQueueTest, FindsAllOverlappingWaits) {
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

TEST_F(WaitQueueTest, WaitsForIgnoresOrderOfLocks) {
  const Waiter& set = Enter("ann", {kA, kB, kC}, Shared());
  EXPECT_TRUE(WaitQueue::WaitsFor(set, Locks{kA, kB, kC}, Mode::kShared));
  EXPECT_TRUE(WaitQueue::WaitsFor(set, Locks{kC, kA, kB}, Mode::kShared));
  EXPECT_FALSE(WaitQueue::WaitsFor(set, Locks{kA, kB, kC}, Mode::kExclusive));
  EXPECT_FALSE(WaitQueue::WaitsFor(set, Locks{kA, kB}, Mode::kShared));
  EXPECT_FALSE(WaitQueue::WaitsFor(set, Locks{kA, kB, kD}, Mode::kShared));
  EXPECT_FALSE(WaitQueue::WaitsFor(set, Locks{kA, kB, kC, kD}, Mode::kShared));
  EXPECT_FALSE(WaitQueue::WaitsFor(set, Locks{kOtherA, kB, kC}, Mode::kShared));
}

// It looks at the waits of the owner or at the queues of the locks, whichever are fewer.
TEST_F(WaitQueueTest, FindsSameWaitsWhicheverSideIsShorter) {
  constexpr int kLocks = 40;
  std::deque<std::string> keys;
  Locks all;
  for (int i = 0; i < kLocks; ++i) all.push_back({0, keys.emplace_back("k" + std::to_string(i))});
  // Ann's waits, of which some cover two of the locks asked for, in an order of their own.
  std::vector<Waiter*> of_ann;
  for (int i = kLocks - 2; i >= 0; i -= 2) {
    const auto at = static_cast<size_t>(i);
    of_ann.push_back(&Enter("ann", Locks{all[at + 1], all[at]}, Exclusive()));
  }
  // One of them is taken over and so becomes the last.
  Waiter& newer = NewCall();
  queue_.TakeOver(newer, *of_ann[3]);
  of_ann.erase(of_ann.begin() + 3);
  of_ann.push_back(&newer);

  const auto expected = [&](const Locks& locks, const std::vector<Waiter*>& waits) {
    std::vector<Waiter*> found;
    for (Waiter* wait : waits) {
      if (std::any_of(locks.begin(), locks.end(),
                      [wait](LockName lock) { return wait->WaitsFor(lock); })) {
        found.push_back(wait);
      }
    }
    return found;
  };
  const std::vector<Locks> asked = {
      {all[0]}, {all[1], all[0]}, {all[32], all[5], kD}, {all[33], all[32], all[0], all[12]}, {kD},
      all};
  // Short queues first, then long ones: of others that wait for the same locks.
  std::deque<std::string> others;
  for (int round = 0; round < 2; ++round) {
    for (const Locks& locks : asked) {
      EXPECT_EQ(queue_.FindWaiters(locks, Owner{"ann"}), expected(locks, of_ann));
      EXPECT_TRUE(queue_.FindWaiters(locks, Owner{"nobody"}).empty());
    }
    for (int i = 0; i < 60 && round == 0; ++i) {
      Enter(others.emplace_back("other " + std::to_string(i)), Locks{all[0], all[1], all[32]},
            Shared());
    }
  }
  const std::vector<Waiter*> other = queue_.FindWaiters(Locks{all[1], all[0]}, Owner{"other 7"});
  ASSERT_EQ(other.size(), 1U);
  EXPECT_EQ(other[0]->request().owner.bytes, "other 7");
}

// --- Waiters ahead ----------------------------------------------------------------------------

TEST_F(WaitQueueTest, CrowdAheadOfNewcomerWeighsAllWithALimit) {
  const auto weight = [this](LockName lock) {
    return queue_.Find(lock)->Ahead(/*upgrade=*/false, kNow).weight;
  };
  Waiter& ann = Enter("ann", {kA, kB}, Limit(9, 4));
  EXPECT_EQ(weight(kA), 4U);
  EXPECT_EQ(weight(kB), 4U);
  Waiter& bob = Enter("bob", kA, Limit(9, 3));
  Enter("cid", kA);
  Enter("dan", kA, Limit(9));
  EXPECT_EQ(weight(kA), 8U);
  // Taking over may change the weight, in all queues.
  Waiter& newer = NewCall(Limit(7, 6));
  queue_.TakeOver(newer, ann);
  EXPECT_EQ(weight(kA), 10U);
  EXPECT_EQ(weight(kB), 6U);
  EXPECT_EQ(queue_.Find(kA)->Ahead(false, kNow).least_limit, 7U);
  queue_.TakeOver(ann, newer);
  EXPECT_EQ(weight(kA), 8U);
  EXPECT_EQ(weight(kB), 4U);
  queue_.Leave(bob);
  EXPECT_EQ(weight(kA), 5U);
  queue_.Leave(ann);
  EXPECT_EQ(weight(kA), 1U);
  EXPECT_EQ(queue_.Find(kB), nullptr);
  Enter("eve", kB, Limit(9));
  EXPECT_EQ(weight(kB), 1U) << "nothing is left of those before";
  Enter("fay", kC, Shared());
  EXPECT_EQ(weight(kC), 0U);
  EXPECT_TRUE(queue_.IsConsistent());
}

TEST_F(WaitQueueTest, CrowdAheadOfLimitWeighsWaitersBeforeIt) {
  Enter("ann", kA, Limit(20, 2));
  Enter("bob", kA, Limit(10, 3));
  Waiter& cid = Enter("cid", {kB, kA}, Limit(20, 4));
  Enter("dan", kA, Limit(20, 5));
  EXPECT_EQ(cid.AheadOf(0).weight, 0U);
  const WaitersAhead crowd = cid.AheadOf(1);
  EXPECT_EQ(crowd.size, 2U);
  EXPECT_EQ(crowd.weight, 5U);
  EXPECT_EQ(crowd.least_limit, 10U);
  EXPECT_TRUE(crowd.all_limit);
  // Where those ahead leave no room it need not look further.
  const WaitersAhead enough = Enter("eve", kA, Limit(9, 1)).AheadOf(0);
  EXPECT_EQ(enough.weight, 9U);
  EXPECT_EQ(enough.size, 2U);
  EXPECT_GE(Enter("fay", kA, Limit(20, 20)).AheadOf(0).weight, 10U);
}

// Whatever was left out of the crowd ahead does not matter: with any weight of the holders the
// request fits exactly if it does with all that are ahead.
TEST_F(WaitQueueTest, CrowdAheadOfLimitDecidesLikeThePlainSum) {
  std::mt19937 random(7);
  const auto below = [&](unsigned bound) { return static_cast<uint32_t>(random() % bound); };
  int fit = 0;
  for (int round = 0; round < 300; ++round) {
    std::vector<Waiter*> line;
    for (unsigned i = 0; i < 12; ++i) {
      const uint32_t limit = 1 + below(40);
      line.push_back(
          &Enter("owner " + std::to_string(i), kA, Limit(limit, 1 + below(std::min(limit, 6U)))));
    }
    // Some leave or are replaced.
    for (int i = 0; i < 4; ++i) {
      const size_t at = below(static_cast<unsigned>(line.size()));
      if (below(2) == 0) {
        queue_.Leave(*line[at]);
        line.erase(line.begin() + static_cast<std::ptrdiff_t>(at));
      } else {
        Waiter& newer = NewCall(Limit(40, 1 + below(3)));
        queue_.TakeOver(newer, *line[at]);
        line[at] = &newer;
      }
    }
    uint64_t weight = 0;
    uint32_t least = kMaxLimit;
    for (size_t i = 0; i < line.size(); ++i) {
      const AcquireRequest& request = line[i]->request();
      const WaitersAhead ahead = line[i]->AheadOf(0);
      const uint64_t room = std::min(request.limit, least);
      const bool fits = weight + request.weight <= room;
      ASSERT_EQ(ahead.weight + request.weight <= std::min(request.limit, ahead.least_limit), fits);
      if (fits && i > 0) {
        ASSERT_EQ(ahead.weight, weight);
        ASSERT_EQ(ahead.least_limit, least);
        ASSERT_EQ(ahead.size, i);
        ++fit;
      }
      weight += request.weight;
      least = std::min(least, request.limit);
    }
    ASSERT_EQ(queue_.Find(kA)->Ahead(false, kNow).weight, weight);
    ASSERT_TRUE(queue_.IsConsistent());
    for (Waiter* waiter : line) queue_.Leave(*waiter);
  }
  EXPECT_GT(fit, 300);
}

TEST_F(WaitQueueTest, CrowdAheadOfNewcomerIsWholeQueue) {
  Enter("ann", {kA, kB}, Limit(7));
  Waiter& bob = Enter("bob", kA, Limit(4));
  WaitersAhead crowd = queue_.Find(kA)->Ahead(/*upgrade=*/false, kNow);
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

TEST_F(WaitQueueTest, CrowdAheadOfUpgradeExcludesWaitersItBlocks) {
  Enter("ann", {kA, kB}, Shared());
  Enter("bob", kA);
  Enter("cid", kA, Shared());
  WaitersAhead crowd = queue_.Find(kA)->Ahead(/*upgrade=*/true, kNow);
  EXPECT_EQ(crowd.size, 1U);
  EXPECT_TRUE(crowd.all_shared);
  Enter("dan", kC);
  crowd = queue_.Find(kC)->Ahead(true, kNow);
  EXPECT_EQ(crowd.size, 0U);
  queue_.Wake(kC);
  EXPECT_EQ(queue_.Find(kC)->Ahead(true, kNow).size, 0U) << "it is not behind that work";
}

TEST_F(WaitQueueTest, CrowdAheadOfEachWaiterIsThoseBeforeIt) {
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

TEST_F(WaitQueueTest, CrowdAheadOfLimitCountsRelevantWaiters) {
  Enter("ann", kA, Limit(2));
  Enter("bob", kA, Limit(9));
  Enter("cid", kA, Limit(8));
  const WaitersAhead crowd = Enter("dan", kA, Limit(7)).AheadOf(0);
  EXPECT_EQ(crowd.size, 3U);
  EXPECT_TRUE(crowd.all_limit);
  EXPECT_EQ(crowd.least_limit, 2U);
  EXPECT_EQ(Enter("eve", kA, Limit(2)).AheadOf(0).size, 2U) << "more than fit beside it";
  Enter("fay", kA, Limit(1));
  EXPECT_EQ(Enter("gus", kA, Limit(9)).AheadOf(0).size, 1U) << "nobody fits beside fay";
}

TEST_F(WaitQueueTest, NewcomerWaitsWhileQueueHasPendingWork) {
  Enter("ann", {kA, kB}, Shared());
  Enter("bob", {kC, kD}, Limit(5));
  EXPECT_TRUE(queue_.Find(kA)->Ahead(false, kNow).all_shared);
  EXPECT_TRUE(queue_.Find(kC)->Ahead(false, kNow).all_limit);
  queue_.Wake(kA);
  queue_.Wake(kC);
  EXPECT_TRUE(HasPendingWork(kA));
  EXPECT_TRUE(HasPendingWork(kC));
  EXPECT_FALSE(HasPendingWork(kB)) << "that queue has nothing to do";
  EXPECT_EQ(TryAll(), (Texts{"ann", "bob"}));
  EXPECT_FALSE(HasPendingWork(kA));
  EXPECT_FALSE(HasPendingWork(kC));
}

TEST_F(WaitQueueTest, NewcomerWaitsOnceHoldHasEnded) {
  Enter("ann", Locks{kA}, Shared(), At(2'000));
  EXPECT_FALSE(HasPendingWork(kA, At(2'000))) << "a hold lives through its last millisecond";
  EXPECT_TRUE(HasPendingWork(kA, At(2'001)));
  EXPECT_EQ(TryAll(At(2'001)), (Texts{"ann"}));
  EXPECT_FALSE(HasPendingWork(kA, At(2'001)));
}

TEST_F(WaitQueueTest, NewcomerBehindPendingWorkIsTriedInTurn) {
  Waiter& ann = Enter("ann", kA, Shared());
  queue_.Wake(kA);
  Waiter& bob = Enter("bob", kA, Shared());
  EXPECT_EQ(NextToTry(), "ann") << "a waiter that joins behind does not put the queue to sleep";
  queue_.Leave(ann);
  EXPECT_EQ(NextToTry(), "bob");
  queue_.Block(bob, 0, std::nullopt);
  EXPECT_EQ(NextToTry(), "");
}

// --- Upgrades ---------------------------------------------------------------------------------

TEST_F(WaitQueueTest, UpgradeEntersBeforeWaitersItBlocks) {
  EnterUpgrade("ann", kA);  // also into an empty queue
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

TEST_F(WaitQueueTest, UpgradeEntersBeforeUpgraderThatLostItsHold) {
  // ann's shared hold ended while it waited for the upgrade: now it is an ordinary waiter.
  EnterUpgrade("ann", kA);
  Enter("cid", kA);
  EnterUpgrade("bob", kA);
  EXPECT_EQ(LineOf(kA), (Texts{"bob", "ann", "cid"}));
}

TEST_F(WaitQueueTest, UpgradeIsTriedBeforeWaitersItBlocks) {
  Enter("ann", kA);
  Enter("bob", kB);
  Waiter& upgrade = EnterUpgrade("cid", kA);
  queue_.WakeAll(std::nullopt);
  EXPECT_EQ(TryAll(), (Texts{"cid", "bob"})) << "by the arrival of the waiters it is before";
  queue_.WakeAll(std::nullopt);
  queue_.Leave(upgrade);
  EXPECT_EQ(TryAll(), (Texts{"ann", "bob"}));
}

TEST_F(WaitQueueTest, UpgradeBehindReaderKeepsQueueAwake) {
  Enter("ann", kA, Shared());
  Enter("bob", kA);
  queue_.Wake(kA);
  EnterUpgrade("cid", kA);
  EXPECT_EQ(LineOf(kA), (Texts{"ann", "cid", "bob"}));
  EXPECT_EQ(NextToTry(), "ann");
  queue_.Leave(*FindWaiter(kA, "ann"));
  EXPECT_EQ(TryAll(), (Texts{"cid"}));
}

TEST_F(WaitQueueTest, UpgradeBlocksLimitBehindIt) {
  const Waiter& limit = Enter("ann", kA, Limit(5));
  Enter("bob", kA);
  EXPECT_EQ(limit.AheadOf(0).size, 0U);
  EnterUpgrade("cid", kA);
  EXPECT_EQ(LineOf(kA), (Texts{"cid", "ann", "bob"}));
  EXPECT_EQ(limit.AheadOf(0).size, 1U);
  EXPECT_FALSE(limit.AheadOf(0).all_limit);
}

TEST_F(WaitQueueTest, UpgradesEnterAndLeaveBeforeSameWaiter) {
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

// --- Which waiters to try ---------------------------------------------------------------------

TEST_F(WaitQueueTest, EnteringWakesNobody) {
  Enter("ann", kA);
  Enter("bob", kA);
  EXPECT_EQ(NextToTry(), "");
  EXPECT_EQ(NextDue(), Ms(kLate));
}

TEST_F(WaitQueueTest, LeavingWakesQueue) {
  for (const size_t leaver : {0U, 1U, 2U}) {
    std::vector<Waiter*> waiters;
    for (const char* owner : {"ann", "bob", "cid"}) waiters.push_back(&Enter(owner, kA));
    Enter("dan", kB);
    queue_.Leave(*waiters[leaver]);
    EXPECT_EQ(NextDue(), kDueAtOnce);
    EXPECT_EQ(TryAll(), (Texts{leaver == 0 ? "bob" : "ann"}));
    for (Waiter* waiter : waiters) {
      if (waiter->is_queued()) queue_.Leave(*waiter);
    }
    queue_.Leave(*FindWaiter(kB, "dan"));
  }
}

TEST_F(WaitQueueTest, RemovedQueueDoesNotWake) {
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

TEST_F(WaitQueueTest, QueueStaysAwakeUntilFirstWaiterIsBlocked) {
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

TEST_F(WaitQueueTest, WaitersOfAllWokenQueuesAreTriedByArrival) {
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

TEST_F(WaitQueueTest, QueueThatWakesLaterIsTriedByArrival) {
  Enter("w1", kA);
  Enter("w2", kB);
  queue_.Wake(kB);
  EXPECT_EQ(NextToTry(), "w2");
  queue_.Wake(kA);
  EXPECT_EQ(TryAll(), (Texts{"w1", "w2"}));
}

TEST_F(WaitQueueTest, WaiterIsNotRetriedUntilBlockingQueueWakes) {
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

TEST_F(WaitQueueTest, WaiterForManyLocksIsTriedOncePerWakeOfBlockingQueue) {
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

TEST_F(WaitQueueTest, QueueThatBlocksNobodyDoesNotWake) {
  Waiter& ann = Enter("ann", {kA, kB}, Shared());
  queue_.Wake(kA);
  queue_.Block(ann, 1, std::nullopt);
  queue_.Wake(kA);
  EXPECT_EQ(NextDue(), Ms(kLate));
  EXPECT_FALSE(HasPendingWork(kA));
  queue_.NoteHoldEnd(kA, At(2'000));
  EXPECT_EQ(NextDue(), Ms(kLate)) << "the end of a hold there affects nobody";
}

TEST_F(WaitQueueTest, WaiterBlockedElsewhereLetsThoseBehindBeTried) {
  for (const char* owner : {"ann", "bob", "cid"}) Enter(owner, {kA, kB}, Shared());
  queue_.Wake(kA);
  EXPECT_EQ(NextToTry(), "ann");
  queue_.Block(*FindWaiter(kA, "ann"), 1, std::nullopt);
  EXPECT_EQ(NextToTry(), "bob");
  queue_.Leave(*FindWaiter(kA, "bob"));
  EXPECT_EQ(NextToTry(), "ann") << "bob also left the queue that blocks ann";
  queue_.Block(*FindWaiter(kA, "ann"), 1, std::nullopt);
  EXPECT_EQ(TryAll(), (Texts{"cid"}));
}

TEST_F(WaitQueueTest, WaiterBlockedHereKeepsThoseBehindWaiting) {
  Waiter& ann = Enter("ann", {kB, kA}, Exclusive());
  Enter("bob", kA);
  queue_.Wake(kA);
  queue_.Wake(kB);
  EXPECT_EQ(NextToTry(), "ann");
  queue_.Block(ann, 1, std::nullopt);
  EXPECT_EQ(NextToTry(), "") << "bob is behind ann in the queue that has just blocked it";
  queue_.Wake(kB);
  EXPECT_EQ(NextToTry(), "");
  queue_.Wake(kA);
  EXPECT_EQ(TryAll(), (Texts{"ann"}));
}

TEST_F(WaitQueueTest, LeavingWakesOtherQueuesOfWaiter) {
  Waiter& ann = Enter("ann", {kA, kB, kC}, Exclusive());
  Enter("bob", kB);
  Enter("cid", kC);
  queue_.Leave(ann);
  EXPECT_EQ(TryAll(), (Texts{"bob", "cid"}));
}

TEST_F(WaitQueueTest, ExclusiveGrantPutsQueueToSleep) {
  Waiter& ann = Enter("ann", {kA, kB}, Exclusive());
  Enter("bob", kA);
  Enter("cid", kB);
  Enter("dan", kC);
  for (const LockName lock : {kA, kB, kC}) queue_.Wake(lock);
  EXPECT_EQ(NextToTry(), "ann");
  queue_.NoteHoldEnd(kA, At(5'000));
  queue_.NoteHoldEnd(kB, At(6'000));
  queue_.Leave(ann, Left::kHoldsAlone);
  EXPECT_EQ(TryAll(), (Texts{"dan"}));
  EXPECT_EQ(NextDue(), 5'001) << "the end of the new hold is known";
  EXPECT_EQ(TryAll(At(5'001)), (Texts{"bob"}));
  EXPECT_EQ(TryAll(At(6'001)), (Texts{"cid"}));
}

TEST_F(WaitQueueTest, ExclusiveGrantToLastWaiterEmptiesQueue) {
  queue_.Leave(Enter("ann", {kA, kB}, Exclusive()), Left::kHoldsAlone);
  EXPECT_TRUE(queue_.empty());
  EXPECT_EQ(NextDue(), kNothingDue);
}

TEST_F(WaitQueueTest, WakesQueueOfOneLock) {
  Enter("ann", kA);
  Enter("bob", kOtherA);
  queue_.Wake(kA);
  queue_.Wake(kB);  // has no waiters
  EXPECT_EQ(TryAll(), (Texts{"ann"}));
}

TEST_F(WaitQueueTest, WakesQueuesOfKeyInEveryDatabase) {
  Enter("ann", kA);
  Enter("bob", kB);
  Enter("cid", kOtherA);
  Enter("dan", {7, "a"});
  queue_.WakeInEveryDatabase("a");
  queue_.WakeInEveryDatabase("nobody waits there");
  EXPECT_EQ(TryAll(), (Texts{"ann", "cid", "dan"}));
}

TEST_F(WaitQueueTest, WakesQueuesOfOneDatabaseOrAll) {
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

// --- Grace: nobody may become a holder --------------------------------------------------------

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

TEST_F(WaitQueueTest, SuspendedWaiterIgnoresEndOfHold) {
  Waiter& ann = EnterUntil("ann", kA, At(2'000));
  queue_.Wake(kA);
  queue_.Suspend(ann);
  EXPECT_EQ(TryAll(At(2'001)), Texts{});
}

// --- Ends of holds ----------------------------------------------------------------------------

TEST_F(WaitQueueTest, QueueWakesAfterLastMillisecondOfHold) {
  EnterUntil("ann", kA, At(2'000));
  EXPECT_EQ(NextDue(), 2'001);
  EXPECT_EQ(TryAll(At(1'999)), Texts{});
  EXPECT_EQ(TryAll(At(2'000)), Texts{}) << "a hold lives through its last millisecond";
  EXPECT_EQ(NextDue(), 2'001);
  EXPECT_EQ(TryAll(At(2'001)), (Texts{"ann"}));
  EXPECT_EQ(TryAll(At(2'001)), Texts{}) << "once is enough";
  EXPECT_EQ(NextDue(), Ms(kLate)) << "the hold is over: only the time-out is left";
}

TEST_F(WaitQueueTest, WaiterForEndedHoldIsTriedAtOnce) {
  EnterUntil("ann", kA, At(500));
  EXPECT_EQ(NextDue(), 501);
  EXPECT_EQ(TryAll(kNow), (Texts{"ann"}));
}

TEST_F(WaitQueueTest, HoldWithoutEndNeverWakesQueue) {
  Enter("ann", kA);
  EXPECT_EQ(TryAll(kMaxInstant), Texts{});
  EXPECT_TRUE(queue_.NextDue().is_never());
}

TEST_F(WaitQueueTest, OnlyEarlierEndIsNoted) {
  EnterUntil("ann", kA, At(3'000));
  queue_.NoteHoldEnd(kA, At(2'000));
  EXPECT_EQ(NextDue(), 2'001);
  queue_.NoteHoldEnd(kA, At(4'000));
  EXPECT_EQ(NextDue(), 2'001) << "another hold may still end then";
  queue_.NoteHoldEnd(kOtherA, At(1'500));  // has no queue
  queue_.NoteHoldEnd(kB, At(1'500));
  EXPECT_EQ(NextDue(), 2'001);
  EXPECT_EQ(TryAll(At(2'001)), (Texts{"ann"}));
}

TEST_F(WaitQueueTest, EndIsNotedIfNoneWasKnown) {
  Enter("ann", kA);
  queue_.NoteHoldEnd(kA, At(2'000));
  EXPECT_EQ(NextDue(), 2'001);
}

TEST_F(WaitQueueTest, BlockingFirstWaiterReplacesEnd) {
  Waiter& ann = EnterUntil("ann", kA, At(2'000));
  EXPECT_EQ(NextToTry(At(2'001)), "ann");
  queue_.Block(ann, 0, At(3'000));  // the hold was renewed
  EXPECT_EQ(NextDue(), 3'001);
  queue_.Wake(kA);
  queue_.Block(ann, 0, At(2'500));
  EXPECT_EQ(NextDue(), 2'501);
  queue_.Wake(kA);
  queue_.Block(ann, 0, std::nullopt);
  EXPECT_EQ(NextDue(), Ms(kLate)) << "nor is an end remembered";
}

TEST_F(WaitQueueTest, BlockKeepsEarlierEndOfWaiterAhead) {
  EnterUntil("ann", kA, At(2'000));
  Waiter& bob = EnterUntil("bob", kA, At(3'000));
  EXPECT_EQ(NextDue(), 2'001);
  queue_.Leave(bob);
  TryAll();
  queue_.NoteHoldEnd(kA, At(2'000));
  Enter("cid", kA);
  EXPECT_EQ(NextDue(), 2'001) << "an end that is not known takes nothing away";
  EnterUntil("dan", kA, At(1'500));
  EXPECT_EQ(NextDue(), 1'501);
  EXPECT_EQ(TryAll(At(1'501)), (Texts{"ann"}));
}

TEST_F(WaitQueueTest, EndIsDroppedWhenNobodyIsBlocked) {
  Waiter& ann = Enter("ann", {kA, kB}, Exclusive(), At(2'000));
  queue_.Wake(kA);
  queue_.Block(ann, 1, At(3'000));
  EXPECT_EQ(NextDue(), 3'001);
  queue_.Wake(kB);
  queue_.Block(ann, 0, std::nullopt);
  EXPECT_EQ(NextDue(), Ms(kLate));
}

TEST_F(WaitQueueTest, EndIsKeptForRemainingWaiters) {
  Waiter& ann = EnterUntil("ann", kA, At(2'000));
  Enter("bob", kA);
  queue_.Leave(ann, Left::kHoldsAlone);
  EXPECT_EQ(NextDue(), 2'001);
  EXPECT_EQ(TryAll(At(2'001)), (Texts{"bob"}));
}

TEST_F(WaitQueueTest, EndIsDroppedWithQueue) {
  queue_.Leave(EnterUntil("ann", kA, At(2'000)));
  EXPECT_EQ(NextDue(), kNothingDue);
  Enter("ann", kA);
  EXPECT_EQ(NextDue(), Ms(kLate));
  EXPECT_EQ(TryAll(At(2'001)), Texts{});
}

TEST_F(WaitQueueTest, WaitersOfHoldsEndingTogetherAreTriedByArrival) {
  EnterUntil("ann", kD, At(2'001));
  EnterUntil("bob", kC, At(2'000));
  EnterUntil("cid", kA, At(2'000));
  EnterUntil("dan", kB, At(1'990));
  EXPECT_EQ(TryAll(At(2'001)), (Texts{"bob", "cid", "dan"}));
  EXPECT_EQ(NextDue(), 2'002);
  EXPECT_EQ(TryAll(At(2'002)), (Texts{"ann"}));
}

// --- Time-outs, and what is due next ----------------------------------------------------------

TEST_F(WaitQueueTest, WaiterTimesOutAtDeadline) {
  Waiter& waiter = Enter("ann", kA, TickAt(2'000));
  EXPECT_EQ(queue_.FirstTimedOut(TickAt(1'999)), nullptr);
  EXPECT_EQ(queue_.FirstTimedOut(TickAt(2'000)), &waiter);
  EXPECT_EQ(queue_.FirstTimedOut(TickAt(2'001)), &waiter);
  EXPECT_TRUE(waiter.is_queued()) << "the caller takes it out";
  queue_.Leave(waiter);
  EXPECT_EQ(queue_.FirstTimedOut(kLateTick), nullptr);
}

TEST_F(WaitQueueTest, EarliestDeadlineTimesOutFirst) {
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

TEST_F(WaitQueueTest, WaitersWithSameDeadlineAllTimeOut) {
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

TEST_F(WaitQueueTest, ListsWaitersByDeadline) {
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

TEST_F(WaitQueueTest, NextDueIsEarliestEndOrDeadline) {
  Waiter& ann = Enter("ann", kA, TickAt(5'000));
  EXPECT_EQ(NextDue(), 5'000);
  Waiter& bob = Enter("bob", kB, TickAt(4'000));
  EXPECT_EQ(NextDue(), 4'000);
  queue_.NoteHoldEnd(kA, At(3'000));
  EXPECT_EQ(NextDue(), 3'001);
  queue_.NoteHoldEnd(kB, At(2'000));
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

// --- Reports for operators --------------------------------------------------------------------

TEST_F(WaitQueueTest, ReportsLongestQueues) {
  const auto longest = [this](int db) {
    Texts keys;
    for (const WaitQueue::LockQueue* lock_queue : queue_.LongestQueues(db, 100)) {
      keys.emplace_back(lock_queue->lock().key);
    }
    return keys;
  };
  EXPECT_EQ(longest(0), Texts{});
  EXPECT_EQ(queue_.queues(), 0U);
  Enter("w1", kC);
  Enter("w2", kB);
  Waiter& third = Enter("w3", kB);
  Enter("w4", kOtherA);
  Enter("w5", Locks{kA, kC}, Exclusive());
  EXPECT_EQ(longest(0), (Texts{"b", "c", "a"})) << "equal ones by name";
  EXPECT_EQ(longest(1), Texts{"a"});
  EXPECT_EQ(longest(2), Texts{});
  EXPECT_EQ(queue_.queues(), 4U);
  queue_.Leave(third);
  EXPECT_EQ(longest(0), (Texts{"c", "a", "b"}));
}

TEST_F(WaitQueueTest, ReportsOldestWaitOfQueue) {
  Waiter& late = calls_.emplace_back(Exclusive(), kTickNow + Millis{5}, kLateTick);
  EnterCall(late, kA, "late");
  EXPECT_EQ(queue_.Find(kA)->waiting_since(), kTickNow + Millis{5});
  Waiter& early = Enter("early", kA);  // like a call that took over a position
  EXPECT_EQ(queue_.Find(kA)->waiting_since(), kTickNow);
  queue_.Leave(early);
  EXPECT_EQ(queue_.Find(kA)->waiting_since(), kTickNow + Millis{5});
}

// However long it is: LOCK.TOP asks this of many queues.
TEST_F(WaitQueueTest, LooksForOldestWaitAmongTheFirst100) {
  const auto enter = [this](Millis later) {
    EnterCall(calls_.emplace_back(Exclusive(), kTickNow + later, kLateTick), kA, "waiter");
  };
  for (int i = 0; i < 99; ++i) enter(Millis{9});
  enter(Millis{5});
  EXPECT_EQ(queue_.Find(kA)->waiting_since(), kTickNow + Millis{5});
  enter(Millis{3});
  EXPECT_EQ(queue_.Find(kA)->waiting_since(), kTickNow + Millis{5});
}

TEST_F(WaitQueueTest, ReportsAtMostRequestedNumberOfQueues) {
  for (int i = 0; i < 10; ++i) {
    for (int j = 0; j <= i; ++j) {
      Enter(std::to_string(j), {0, std::string(1, static_cast<char>('z' - i))});
    }
  }
  const auto longest = queue_.LongestQueues(0, 3);
  ASSERT_EQ(longest.size(), 3U);
  for (size_t i = 0; i < longest.size(); ++i) EXPECT_EQ(longest[i]->size(), 10 - i);
  EXPECT_EQ(queue_.LongestQueues(0, 0).size(), 0U);
  EXPECT_EQ(queue_.LongestQueues(0, 100).size(), 10U);
}

// --- Memory -----------------------------------------------------------------------------------

static_assert(sizeof(Waiter) <= 320);

#ifdef __GLIBC__
// The bytes this process has obtained from malloc; always zero under AddressSanitizer.
int64_t Allocated() {
  const auto info = mallinfo2();
  return static_cast<int64_t>(info.uordblks + info.hblkhd);
}

TEST_F(WaitQueueTest, MemoryPerWaiterIsBounded) {
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
  // The allocator itself caches a few blocks.
  EXPECT_LT(Allocated() - before, 16'384) << "after a rush nothing is kept";
}

TEST_F(WaitQueueTest, MemoryIsFreedWhenWaitersLeave) {
  Enter("somebody", {0, "busy"});  // keeps the queue from becoming empty
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
    if (i % 3 == 0) queue_.NoteHoldEnd(locks[0], At(1'500));
    queue_.TakeOver(newer, waiter);
    queue_.Leave(newer);
  }
  EXPECT_LT(Allocated() - before, 64 * 1'024);
}
#endif

}  // namespace
}  // namespace turnstile
