// Single scenarios on the engine that ships: regressions that random runs found.

#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <variant>
#include <vector>

#include "sim/sim_host.h"

namespace turnstile::sim {
namespace {

constexpr Now kNow{.wall = FineInstant{Micros{1'576'800'000'000'000}},
                   .steady = FineTick{Micros{5'000'000}}};

class EngineTest : public testing::Test {
 protected:
  EngineTest() { host_.BeOldPrimary(kNow.wall); }
  ~EngineTest() override { EXPECT_EQ(host_.fault(), nullptr) << host_.fault(); }
  EngineTest(const EngineTest&) = delete;
  EngineTest& operator=(const EngineTest&) = delete;

  AcquireResult Acquire(uint64_t connection, const std::vector<std::string_view>& keys,
                        std::string_view owner, Millis wait = Millis{0},
                        std::optional<Token> floor = std::nullopt) {
    const AcquireRequest request{
        .owner = Owner{owner}, .lease = Millis{60'000}, .wait = wait, .floor = floor};
    return host_.Acquire({.connection = connection, .tag = connection}, keys, request, kNow);
  }

  // The owner waits for a and b and is granted both. Its answer is on its way.
  Answered GrantSetAfterWait(std::string_view owner) {
    Acquire(1, {"a"}, "ann");
    EXPECT_EQ(Acquire(2, {"a", "b"}, owner, Millis{1'000}).kind, AcquireResult::Kind::kWaits);
    host_.Release({.connection = 1}, std::vector<std::string_view>{"a"}, Owner{"ann"}, kNow);
    host_.Turn(kNow);
    EXPECT_EQ(host_.answered().size(), 1);
    const Answered answered = host_.answered().front();
    host_.answered().clear();
    return answered;
  }

  SimHost host_;
};

// The owner was told of a new hold of one lock, not of the set that it was granted before.
TEST_F(EngineTest, UndeliveredSetIsTakenBackThoughOneOfItsLocksWasAcquiredAnew) {
  const Answered lost = GrantSetAfterWait("bob");
  host_.Delete(0, "a", kNow);
  const AcquireResult anew = Acquire(3, {"a"}, "bob");
  ASSERT_EQ(anew.kind, AcquireResult::Kind::kGranted);
  host_.Replied(lost, /*delivered=*/false);
  host_.Turn(kNow);

  EXPECT_EQ(host_.FindLock(0, "b"), nullptr);
  const Lock* lock = host_.FindLock(0, "a");
  ASSERT_NE(lock, nullptr);
  EXPECT_TRUE(lock->HasLive(anew.token, kNow.moment()));
}

// It was told of that hold, though under a higher token.
TEST_F(EngineTest, UndeliveredSetIsKeptIfOwnerWasToldByRaisingOneToken) {
  const Answered lost = GrantSetAfterWait("bob");
  const Token token = std::get<Token>(lost.call->answer());
  ASSERT_EQ(Acquire(3, {"a"}, "bob", Millis{0}, Token{token.value + 1}).token.value,
            token.value + 1);
  host_.Replied(lost, /*delivered=*/false);
  host_.Turn(kNow);
  EXPECT_NE(host_.FindLock(0, "a"), nullptr);
  EXPECT_NE(host_.FindLock(0, "b"), nullptr);
}

// The shared hold that is left was bound to a connection that closed while the upgrade was granted.
TEST_F(EngineTest, SharedHoldOfClosedConnectionEndsWhenUpgradeIsTakenBack) {
  const auto acquire = [this](uint64_t connection, std::string_view owner, Mode mode, Millis wait,
                              bool session) {
    const AcquireRequest request{.owner = Owner{owner},
                                 .lease = Millis{60'000},
                                 .wait = wait,
                                 .mode = mode,
                                 .session = session};
    return host_
        .Acquire({.connection = connection, .tag = connection}, std::vector<std::string_view>{"a"},
                 request, kNow)
        .kind;
  };
  using Kind = AcquireResult::Kind;
  ASSERT_EQ(acquire(1, "ann", Mode::kShared, Millis{0}, false), Kind::kGranted);
  ASSERT_EQ(acquire(2, "bob", Mode::kShared, Millis{0}, true), Kind::kGranted);
  ASSERT_EQ(acquire(3, "bob", Mode::kExclusive, Millis{1'000}, false), Kind::kWaits);
  host_.Release({.connection = 1}, std::vector<std::string_view>{"a"}, Owner{"ann"}, kNow);
  host_.Turn(kNow);
  ASSERT_EQ(host_.answered().size(), 1);
  const Answered lost = host_.answered().front();
  host_.answered().clear();
  host_.Disconnect(2, kNow);
  host_.Replied(lost, /*delivered=*/false);
  host_.Turn(kNow);
  host_.Turn(kNow);
  EXPECT_EQ(host_.FindLock(0, "a"), nullptr);
}

// It was told that it holds them, by the answer to its LOCK.TOUCH.
TEST_F(EngineTest, UndeliveredSetIsKeptIfOwnerHasTouchedIt) {
  const Answered lost = GrantSetAfterWait("bob");
  EXPECT_EQ(host_
                .Touch({.connection = 3}, std::vector<std::string_view>{"b"}, Owner{"bob"},
                       Millis{60'000}, kNow)
                .count,
            1);
  host_.Replied(lost, /*delivered=*/false);
  host_.Turn(kNow);
  EXPECT_NE(host_.FindLock(0, "a"), nullptr);
  EXPECT_NE(host_.FindLock(0, "b"), nullptr);
}

// The hold came by RENAME while its owner waited: it was told of it when it acquired it.
TEST_F(EngineTest, HoldThatOwnerHadAlreadyIsNotTakenBack) {
  Acquire(1, {"b"}, "bob");
  Acquire(1, {"a"}, "ann");
  ASSERT_EQ(Acquire(2, {"a"}, "bob", Millis{1'000}).kind, AcquireResult::Kind::kWaits);
  ASSERT_TRUE(host_.Rename(0, "b", "a", kNow));
  host_.Turn(kNow);
  ASSERT_EQ(host_.answered().size(), 1);
  host_.Replied(host_.answered().front(), /*delivered=*/false);
  host_.answered().clear();
  host_.Turn(kNow);
  const Lock* lock = host_.FindLock(0, "a");
  ASSERT_NE(lock, nullptr);
  EXPECT_TRUE(lock->Find(Owner{"bob"}).has_value());
}

// A server may expire a key in the last millisecond of its TTL, in which its hold is still live.
TEST_F(EngineTest, HoldWhoseKeyIsRemovedInItsLastMillisecondHasExpired) {
  Acquire(1, {"a"}, "ann");
  Now last = kNow;
  last.wall += Millis{60'000};
  last.steady += Millis{60'000};
  ASSERT_TRUE(host_.FindLock(0, "a")->blocks_until() == last.moment());
  host_.Delete(0, "a", last);
  host_.Turn(last);
  EXPECT_EQ(host_.engine().stats().expired, 1);
  EXPECT_EQ(host_.engine().stats().forced, 0);
}

// Earlier it was removed by force.
TEST_F(EngineTest, HoldWhoseKeyIsRemovedBeforeItsLastMillisecondIsForced) {
  Acquire(1, {"a"}, "ann");
  Now before = kNow;
  before.wall += Millis{59'999};
  before.steady += Millis{59'999};
  host_.Delete(0, "a", before);
  host_.Turn(before);
  EXPECT_EQ(host_.engine().stats().expired, 0);
  EXPECT_EQ(host_.engine().stats().forced, 1);
}

// What would be written is a change of its own, and leads to the next save.
TEST_F(EngineTest, FloorOfStartIsReplicatedOnlyIfSomebodyReadsIt) {
  const auto replicated_by_start = [this] {
    const size_t before = host_.log().size();
    host_.BecomeReplica(kNow);
    host_.BecomePrimary();
    host_.Turn(kNow);
    return host_.log().size() - before;
  };
  Acquire(1, {"a"}, "ann");
  EXPECT_EQ(replicated_by_start(), 1);
  host_.LoseConsumers();
  EXPECT_EQ(replicated_by_start(), 0);
}

// While a slot was on its way to another node it could not be replicated.
TEST_F(EngineTest, FloorThatIsOverWhenItMayBeReplicatedIsNot) {
  Acquire(1, {"a"}, "ann");
  host_.BecomeReplica(kNow);
  host_.BecomePrimary();
  host_.may_replicate_floor = false;
  host_.Turn(kNow);
  const size_t before = host_.log().size();
  Now later = kNow;
  later.wall += host_.engine().settings().token_margin + Millis{1};
  later.steady += host_.engine().settings().token_margin + Millis{1};
  host_.may_replicate_floor = true;
  host_.Turn(later);
  EXPECT_EQ(host_.log().size(), before);
}

TEST_F(EngineTest, RequestsAreCountedByWhatTheyCameTo) {
  const Stats& stats = host_.engine().stats();
  const std::vector<std::string_view> both = {"a", "b"};
  const auto touch = [&](std::string_view owner) {
    host_.Touch({.connection = 1}, both, Owner{owner}, Millis{60'000}, kNow);
  };
  Acquire(1, {"a"}, "ann");
  EXPECT_EQ(stats.acquired_immediately, 1);
  Acquire(1, {"a"}, "ann");
  EXPECT_EQ(stats.acquired_immediately, 1);
  EXPECT_EQ(stats.reacquired, 1);
  Acquire(2, {"a"}, "bob");
  EXPECT_EQ(stats.rejected, 1);
  touch("ann");
  EXPECT_EQ(stats.touched, 1);
  EXPECT_EQ(stats.stale_touches, 1);
  host_.Release({.connection = 1}, both, Owner{"bob"}, kNow);
  EXPECT_EQ(stats.released, 0);
  EXPECT_EQ(stats.stale_releases, 2);

  Acquire(2, {"a"}, "bob", Millis{1'000});
  host_.Release({.connection = 1}, both, Owner{"bob"}, kNow);
  EXPECT_EQ(stats.waits_cancelled, 1);
  EXPECT_EQ(stats.stale_releases, 3) << "of b: in the line of a it gave up its place";
  host_.Release({.connection = 1}, both, Owner{"ann"}, kNow);
  EXPECT_EQ(stats.released, 1);
  EXPECT_EQ(stats.stale_releases, 4);

  Acquire(1, {"a"}, "ann");
  Acquire(2, {"b"}, "bob");
  Acquire(1, {"b"}, "ann", Millis{1'000});
  EXPECT_EQ(Acquire(2, {"a"}, "bob", Millis{1'000}).kind, AcquireResult::Kind::kDeadlock);
  EXPECT_EQ(stats.deadlocks, 1);
  EXPECT_EQ(stats.waits, 2);
  host_.engine().settings().max_waiters = 1;
  EXPECT_EQ(Acquire(3, {"a"}, "cat", Millis{1'000}).kind, AcquireResult::Kind::kWaitLimit);
  EXPECT_EQ(stats.rejected_wait_limit, 1);
  EXPECT_EQ(stats.rejected, 1);
}

TEST_F(EngineTest, WaitsAreCountedWithTheirLength) {
  const auto later = [](Millis by) {
    return Now{.wall = kNow.wall + by, .steady = kNow.steady + by};
  };
  const Stats& stats = host_.engine().stats();
  Acquire(1, {"a"}, "ann");
  for (const uint64_t connection : {2U, 3U, 4U}) {
    const std::string owner = "owner" + std::to_string(connection);
    ASSERT_EQ(Acquire(connection, {"a"}, owner, Millis{1'000}).kind, AcquireResult::Kind::kWaits);
  }
  EXPECT_EQ(stats.waits, 3);
  ASSERT_TRUE(host_.Unblock(3, /*as_timeout=*/true, later(Millis{20})));
  EXPECT_EQ(stats.wait_timeouts, 1);
  EXPECT_EQ(stats.wait_times.count(), 1);
  EXPECT_EQ(stats.wait_times.longest(), Millis{20});
  // Somebody sent it away: it did not wait as long as it wanted.
  ASSERT_TRUE(host_.Unblock(4, /*as_timeout=*/false, later(Millis{25})));
  EXPECT_EQ(stats.wait_timeouts, 1);
  EXPECT_EQ(stats.wait_times.count(), 1);

  host_.Release({.connection = 1}, std::vector<std::string_view>{"a"}, Owner{"ann"},
                later(Millis{30}));
  host_.Turn(later(Millis{30}));
  EXPECT_EQ(stats.acquired_after_wait, 1);
  EXPECT_EQ(stats.wait_times.count(), 2);
  EXPECT_EQ(stats.wait_times.longest(), Millis{30});
  EXPECT_EQ(stats.released, 1);
  EXPECT_EQ(stats.hold_times.longest(), Millis{30});

  ASSERT_EQ(Acquire(5, {"a"}, "eve", Millis{1'000}).kind, AcquireResult::Kind::kWaits);
  host_.Turn(later(Millis{1'000}));
  EXPECT_EQ(stats.wait_timeouts, 2);
  EXPECT_EQ(stats.wait_times.longest(), Millis{1'000});
}

TEST_F(EngineTest, RenamedLockTakesItsNameAlong) {
  const Engine& engine = host_.engine();
  Acquire(1, {"a"}, "ann");
  ASSERT_TRUE(host_.Rename(0, "a", "b", kNow));
  EXPECT_FALSE(engine.MayBeLock("a"));
  EXPECT_TRUE(engine.MayBeLock("b"));
  // What is no lock does not become one.
  host_.Push(0, "x", kNow);
  ASSERT_TRUE(host_.Rename(0, "x", "y", kNow));
  EXPECT_FALSE(engine.MayBeLock("y"));
}

// Some operators rename commands. Then nothing is changed, not even the locks that are no strings.
TEST_F(EngineTest, PlainLockIsNotChangedWithoutTheCommandForIt) {
  const std::vector<std::string_view> keys = {"a", "b"};
  Acquire(1, {"a"}, "ann");
  host_.Set(0, "b", "ann", std::nullopt, kNow);
  host_.missing_command = "DEL";
  const CountResult refused = host_.Release({.connection = 1}, keys, Owner{"ann"}, kNow);
  EXPECT_EQ(refused.kind, CountResult::Kind::kMissingCommand);
  EXPECT_EQ(refused.missing, std::string_view("DEL"));
  EXPECT_NE(host_.FindLock(0, "a"), nullptr);
  const auto touch = [&] {
    return host_.Touch({.connection = 1}, keys, Owner{"ann"}, Millis{1'000}, kNow);
  };
  EXPECT_EQ(touch().count, 2);
  host_.missing_command = "PEXPIREAT";
  EXPECT_EQ(touch().kind, CountResult::Kind::kMissingCommand);
  host_.missing_command = nullptr;
  const CountResult done = host_.Release({.connection = 1}, keys, Owner{"ann"}, kNow);
  EXPECT_EQ(done.kind, CountResult::Kind::kDone);
  EXPECT_EQ(done.count, 2);
}

// A client may have any number of sessions' locks: they must not keep the server from others.
TEST_F(EngineTest, PassEndsOnlyAsManyHoldsAsItsBudgetAllows) {
  constexpr size_t kLocks = 300;
  for (size_t i = 0; i < kLocks; ++i) {
    const std::string key = "lock" + std::to_string(i);
    const AcquireRequest request{.owner = Owner{"ann"}, .lease = Millis{60'000}, .session = true};
    host_.Acquire({.connection = 7, .tag = 7}, std::vector<std::string_view>{key}, request, kNow);
  }
  host_.Disconnect(7, kNow);
  constexpr size_t kBudget = 1'000;
  host_.Turn(kNow, kBudget);
  const size_t ended = kLocks - host_.StoredLocks();
  EXPECT_GT(ended, 10);
  EXPECT_LE(ended, kBudget / 10) << "a key costs at least ten units";
  for (int i = 0; i < 30; ++i) host_.Turn(kNow, kBudget);
  EXPECT_EQ(host_.StoredLocks(), 0);
}

// Changes of other keys stay cheap: the engine remembers only the names that are locks now.
TEST_F(EngineTest, NameOfLockThatIsGoneIsNoLongerThatOfALock) {
  EXPECT_FALSE(host_.engine().MayBeLock("a"));
  Acquire(1, {"a"}, "ann");
  EXPECT_TRUE(host_.engine().MayBeLock("a"));
  host_.Release({.connection = 1}, std::vector<std::string_view>{"a"}, Owner{"ann"}, kNow);
  EXPECT_FALSE(host_.engine().MayBeLock("a"));
  Acquire(1, {"a"}, "ann");
  host_.Delete(0, "a", kNow);
  EXPECT_FALSE(host_.engine().MayBeLock("a"));
}

// An operator whose server evicts thousands of locks does not want thousands of lines.
TEST_F(EngineTest, EvictionsAreWarnedOfOncePerMinute) {
  std::vector<std::string> warnings;
  host_.on_warning = [&](const std::string& text) { warnings.push_back(text); };
  const AcquireRequest request{
      .owner = Owner{"ann"}, .lease = Millis{200'000}, .tag = std::string_view("web 1")};
  const auto evict = [&](std::string_view key, Millis later) {
    Now when = kNow;
    when.wall += later;
    when.steady += later;
    warnings.clear();
    host_.Acquire({.connection = 1, .tag = 1}, std::vector<std::string_view>{key}, request, kNow);
    EXPECT_TRUE(host_.Evict(0, key, when));
    host_.Turn(when);
  };
  const std::string what =
      " locks were lost by eviction: use maxmemory-policy noeviction; the last lock was ";

  evict("a", Millis{0});
  EXPECT_EQ(warnings, std::vector{"1" + what + R"("a", held by "web 1")"});
  evict("b", Millis{59'999});
  EXPECT_TRUE(warnings.empty());
  evict("c", Millis{60'000});
  EXPECT_EQ(warnings, std::vector{"2" + what + R"("c", held by "web 1")"});
  evict("d", Millis{59'999});
  EXPECT_EQ(warnings, std::vector{"1" + what + R"("d", held by "web 1")"})
      << "the clock was set back";
}

// --- What operators see ---

class InfoTest : public EngineTest {
 protected:
  static constexpr Millis kLease{60'000};

  static Now At(Millis later) {
    Now now = kNow;
    now.wall += later;
    now.steady += later;
    return now;
  }

  AcquireResult Ask(uint64_t connection, const AcquireRequest& request, const Now& now = kNow) {
    return host_.Acquire({.connection = connection, .tag = connection},
                         std::vector<std::string_view>{"a"}, request, now);
  }

  static std::vector<std::string> OwnersOf(const LockInfo& info) {
    std::vector<std::string> owners;
    for (const LockInfo::Holder& holder : info.holders) {
      owners.push_back(holder.owner.value_or("?"));
    }
    return owners;
  }
};

TEST_F(InfoTest, FreeLockHasNone) {
  EXPECT_FALSE(host_.Inspect(0, "a", kNow).has_value());
  EXPECT_FALSE(host_.Summarize(0, "a", kNow).has_value());
}

TEST_F(InfoTest, ShowsWhatHoldersAskedFor) {
  const Token token = Ask(7, {.owner = Owner{"ann"},
                              .lease = kLease,
                              .mode = Mode::kLimit,
                              .limit = 5,
                              .weight = 2,
                              .session = true,
                              .linger = Millis{300},
                              .max_hold = Millis{90'000},
                              .tag = "web 1"})
                          .token;
  Ask(7,
      {.owner = Owner{"ann"},
       .lease = kLease,
       .mode = Mode::kLimit,
       .limit = 5,
       .weight = 2,
       .reentrant = true,
       .session = true,
       .linger = Millis{300}},
      At(Millis{10}));
  Ask(8, {.owner = Owner{"bob"}, .lease = kLease, .mode = Mode::kLimit, .limit = 5},
      At(Millis{20}));
  const auto info = host_.Inspect(0, "a", At(Millis{1'000}));
  ASSERT_TRUE(info.has_value());
  EXPECT_EQ(info->mode, Mode::kLimit);
  EXPECT_FALSE(info->is_plain);
  EXPECT_EQ(info->holding, 2);
  EXPECT_EQ(info->waiting, 0);
  EXPECT_EQ(info->linger_left, Millis{0});
  ASSERT_EQ(OwnersOf(*info), (std::vector<std::string>{"ann", "bob"}));
  const LockInfo::Holder& ann = info->holders[0];
  EXPECT_EQ(ann.token, token);
  EXPECT_EQ(ann.lease_left, kLease - Millis{990});
  EXPECT_EQ(ann.held, Millis{1'000});
  EXPECT_EQ(ann.count, 2);
  EXPECT_EQ(ann.linger, Millis{300});
  EXPECT_EQ(ann.session, 7);
  EXPECT_EQ(ann.weight, 2);
  EXPECT_EQ(ann.tag, "web 1");
  EXPECT_EQ(ann.max_hold_left, Millis{89'000});
  const LockInfo::Holder& bob = info->holders[1];
  EXPECT_EQ(bob.count, 1);
  EXPECT_EQ(bob.linger, Millis{0});
  EXPECT_EQ(bob.session, std::nullopt);
  EXPECT_EQ(bob.weight, 1);
  EXPECT_EQ(bob.tag, std::nullopt);
  EXPECT_EQ(bob.max_hold_left, std::nullopt);

  // Of several holders the one with the highest token.
  const auto summary = host_.Summarize(0, "a", At(Millis{1'000}));
  ASSERT_TRUE(summary.has_value());
  EXPECT_EQ(summary->key, "a");
  EXPECT_EQ(summary->mode, Mode::kLimit);
  EXPECT_FALSE(summary->is_plain);
  EXPECT_EQ(summary->holding, 2);
  EXPECT_EQ(summary->owner, "bob");
  EXPECT_EQ(summary->tag, std::nullopt);
  EXPECT_EQ(summary->token, bob.token);
  EXPECT_EQ(summary->held, Millis{980});
  EXPECT_EQ(summary->lease_left, kLease - Millis{980});
  EXPECT_EQ(summary->waiting, 0);
}

TEST_F(InfoTest, ShowsWhoWaits) {
  Ask(1, {.owner = Owner{"ann"}, .lease = kLease, .tag = "web 1"});
  Ask(2,
      {.owner = Owner{"bob"},
       .lease = kLease,
       .wait = Millis{5'000},
       .mode = Mode::kShared,
       .tag = "web 2"},
      At(Millis{100}));
  Ask(3, {.owner = Owner{"cat"}, .lease = kLease, .wait = Millis{9'000}}, At(Millis{300}));
  const auto info = host_.Inspect(0, "a", At(Millis{1'000}));
  ASSERT_TRUE(info.has_value());
  EXPECT_EQ(info->mode, Mode::kExclusive);
  EXPECT_EQ(info->waiting, 2);
  ASSERT_EQ(info->waiters.size(), 2);
  EXPECT_EQ(info->waiters[0].owner, "bob");
  EXPECT_EQ(info->waiters[0].mode, Mode::kShared);
  EXPECT_EQ(info->waiters[0].waited, Millis{900});
  EXPECT_EQ(info->waiters[0].left, Millis{4'100});
  EXPECT_EQ(info->waiters[0].connection, 2);
  EXPECT_EQ(info->waiters[0].tag, "web 2");
  EXPECT_EQ(info->waiters[1].owner, "cat");
  EXPECT_EQ(info->waiters[1].tag, std::nullopt);
  const auto summary = host_.Summarize(0, "a", At(Millis{1'000}));
  ASSERT_TRUE(summary.has_value());
  EXPECT_EQ(summary->tag, "web 1");
  EXPECT_EQ(summary->waiting, 2);
  EXPECT_EQ(summary->longest_wait, Millis{900});

  // A free lock has the mode of the first waiter, until that is granted it.
  const auto free = host_.Inspect(0, "a", At(kLease + Millis{1}));
  ASSERT_TRUE(free.has_value());
  EXPECT_EQ(free->mode, Mode::kShared);
  EXPECT_EQ(free->holding, 0);
  EXPECT_TRUE(free->holders.empty());
  EXPECT_EQ(free->waiters[0].left, Millis{0});
}

TEST_F(InfoTest, ShowsFirst100HoldersAndWaiters) {
  const auto name = [](int i) { return "owner" + std::to_string(100 + i); };
  for (int i = 0; i < 101; ++i) {
    const std::string owner = name(i);
    Ask(1, {.owner = Owner{owner}, .lease = kLease, .mode = Mode::kShared});
  }
  for (uint64_t i = 0; i < 101; ++i) {
    const std::string owner = "writer" + std::to_string(i);
    Ask(2 + i, {.owner = Owner{owner}, .lease = kLease, .wait = Millis{1'000}});
  }
  const auto info = host_.Inspect(0, "a", kNow);
  ASSERT_TRUE(info.has_value());
  EXPECT_EQ(info->holding, 101);
  EXPECT_EQ(info->holders.size(), 100);
  EXPECT_EQ(info->holders.back().owner, name(99));
  EXPECT_EQ(info->waiting, 101);
  EXPECT_EQ(info->waiters.size(), 100);
}

TEST_F(InfoTest, HidesHoldsWhoseLeaseHasEnded) {
  Ask(1,
      {.owner = Owner{"ann"}, .lease = Millis{100}, .mode = Mode::kShared, .linger = Millis{500}});
  Ask(2, {.owner = Owner{"bob"}, .lease = kLease, .mode = Mode::kShared});
  const auto last = host_.Inspect(0, "a", At(Millis{100}));
  EXPECT_EQ(OwnersOf(*last), (std::vector<std::string>{"ann", "bob"}));
  const auto info = host_.Inspect(0, "a", At(Millis{101}));
  EXPECT_EQ(OwnersOf(*info), std::vector<std::string>{"bob"});
  EXPECT_EQ(info->holding, 1);
  EXPECT_EQ(info->linger_left, Millis{499});
  EXPECT_EQ(host_.Summarize(0, "a", At(Millis{101}))->linger_left, Millis{499});
}

// They are removed as soon as the server may write.
TEST_F(InfoTest, HidesHoldsOfClosedConnections) {
  for (const auto& [connection, owner, linger, session] :
       {std::tuple{1, "ann", 0, true}, {2, "bob", 0, false}, {1, "cat", 700, true}}) {
    Ask(static_cast<uint64_t>(connection), {.owner = Owner{owner},
                                            .lease = kLease,
                                            .mode = Mode::kShared,
                                            .session = session,
                                            .linger = Millis{linger}});
  }
  host_.may_write = false;
  host_.Disconnect(1, kNow);
  const Now now = At(Millis{1'000});
  const auto info = host_.Inspect(0, "a", now);
  ASSERT_TRUE(info.has_value());
  EXPECT_EQ(OwnersOf(*info), std::vector<std::string>{"bob"});
  EXPECT_EQ(info->holding, 1);
  EXPECT_EQ(info->linger_left, Millis{699});  // its lease was over a millisecond ago
  const auto summary = host_.Summarize(0, "a", now);
  EXPECT_EQ(summary->owner, "bob");
  EXPECT_EQ(summary->holding, 1);
  EXPECT_EQ(summary->linger_left, Millis{699});

  host_.may_write = true;
  host_.Turn(now);
  EXPECT_EQ(OwnersOf(*host_.Inspect(0, "a", now)), std::vector<std::string>{"bob"});
}

TEST_F(InfoTest, LockOfWhichOnlyHoldsOfClosedConnectionsAreLeftIsFree) {
  Ask(1, {.owner = Owner{"ann"}, .lease = kLease, .session = true});
  host_.may_write = false;
  host_.Disconnect(1, kNow);
  EXPECT_FALSE(host_.Inspect(0, "a", kNow).has_value());
  EXPECT_FALSE(host_.Summarize(0, "a", kNow).has_value());
}

TEST_F(InfoTest, ShowsPlainLock) {
  host_.Set(0, "a", "ann", kNow.moment() + kLease, kNow);
  const auto info = host_.Inspect(0, "a", At(Millis{10}));
  ASSERT_TRUE(info.has_value());
  EXPECT_TRUE(info->is_plain);
  EXPECT_EQ(info->holding, 1);
  ASSERT_EQ(OwnersOf(*info), std::vector<std::string>{"ann"});
  EXPECT_EQ(info->holders[0].token, std::nullopt);
  EXPECT_EQ(info->holders[0].lease_left, kLease - Millis{10});
  const auto summary = host_.Summarize(0, "a", At(Millis{10}));
  ASSERT_TRUE(summary.has_value());
  EXPECT_TRUE(summary->is_plain);
  EXPECT_EQ(summary->owner, "ann");
  EXPECT_EQ(summary->lease_left, kLease - Millis{10});

  const std::string longest(kMaxOwnerBytes, 'x');
  host_.Set(0, "a", longest, std::nullopt, kNow);
  EXPECT_EQ(host_.Summarize(0, "a", kNow)->owner, longest);
  EXPECT_EQ(host_.Summarize(0, "a", kNow)->lease_left, std::nullopt);
  host_.Set(0, "a", longest + "x", std::nullopt, kNow);
  EXPECT_EQ(host_.Summarize(0, "a", kNow)->owner, std::nullopt);
}

TEST_F(InfoTest, ShowsHowMuchOfTheGraceIsLeft) {
  Ask(1, {.owner = Owner{"ann"}, .lease = kLease});
  host_.engine().settings().failover_grace = Millis{5'000};
  host_.BecomeReplica(kNow);
  host_.BecomePrimary();
  host_.Turn(kNow);
  EXPECT_EQ(host_.Inspect(0, "a", At(Millis{1'000}))->grace_left, Millis{4'000});
}

}  // namespace
}  // namespace turnstile::sim
