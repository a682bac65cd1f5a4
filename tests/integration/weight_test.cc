// WEIGHT: a hold that counts as several of the permits of a lock with LIMIT.

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/notices.h"
#include "support/reply.h"
#include "support/restarts.h"
#include "support/server.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

using Owners = std::vector<std::string>;

Command Weighing(int64_t weight, int64_t limit, const Command& options = {}) {
  Command all = {"LIMIT", std::to_string(limit), "WEIGHT", std::to_string(weight)};
  all.insert(all.end(), options.begin(), options.end());
  return all;
}

const Command kWait = {"WAIT", "60000"};

class WeightTest : public SharedNotifyTest<WeightTest> {
 protected:
  Reply Ask(std::string_view owner, int64_t weight, int64_t limit, const Command& options = {}) {
    return client_.Do(Acquiring("job", owner, Weighing(weight, limit, options)));
  }
  int64_t Must(std::string_view owner, int64_t weight, int64_t limit, const Command& options = {}) {
    return MustObtain(client_, Acquiring("job", owner, Weighing(weight, limit, options)));
  }
  static Waiter Wait(std::string_view owner, int64_t weight, int64_t limit) {
    return Waiter::Asking(server(), Acquiring("job", owner, Weighing(weight, limit, kWait)));
  }
  int64_t WeightOf(std::string_view owner) {
    return HoldOf(client_, "job", owner).Field("weight").integer;
  }
};

TEST_F(WeightTest, HoldersFitWhileTheirWeightsAreAtMostTheLimit) {
  const int64_t alice = Must("alice", 4, 10);
  Must("bob", 5, 10);
  EXPECT_EQ(Ask("carol", 2, 10), Reply::Nil());
  Must("carol", 1, 10);
  EXPECT_EQ(client_.Do(Acquiring("job", "dave", {"LIMIT", "10"})), Reply::Nil()) << "full";
  EXPECT_EQ(WeightOf("alice"), 4);
  EXPECT_EQ(WeightOf("bob"), 5);
  EXPECT_EQ(WeightOf("carol"), 1);
  EXPECT_EQ(client_.Do("LOCK.INFO", "job").Field("holding"), Reply::Int(3)) << "holders";
  EXPECT_EQ(Release("job", "alice"), Reply::Int(1));
  EXPECT_EQ(Ask("dave", 5, 10), Reply::Nil());
  EXPECT_GT(Must("dave", 4, 10), alice);
}

TEST_F(WeightTest, WholeLimitExcludesEverybodyElse) {
  Must("alice", 100000, 100000);
  EXPECT_EQ(Ask("bob", 1, 100000), Reply::Nil());
  EXPECT_EQ(client_.Do(Acquiring("job", "bob", {"SHARED"})), Reply::Nil());
  EXPECT_EQ(client_.Do(Acquiring("job", "bob", {})), Reply::Nil());
  Release("job", "alice");
  Must("bob", 1, 100000);
  EXPECT_EQ(Ask("alice", 100000, 100000), Reply::Nil());
}

// The limit of the request counts, whatever the limits of the holders were.
TEST_F(WeightTest, EachRequestIsJudgedByItsOwnLimit) {
  Must("alice", 3, 5);
  EXPECT_EQ(Ask("bob", 3, 5), Reply::Nil());
  Must("bob", 3, 6);
  EXPECT_EQ(Ask("carol", 1, 6), Reply::Nil());
  Must("carol", 4, 10);
}

TEST_F(WeightTest, WeightIsOneByDefault) {
  MustObtain(client_, Acquiring("job", "alice", {"LIMIT", "2"}));
  EXPECT_EQ(WeightOf("alice"), 1);
  MustAcquire(client_, "exclusive", "alice");
  EXPECT_EQ(HoldOf(client_, "exclusive", "alice").Field("weight"), Reply::Int(1));
  client_.Do("SET", "plain", "alice");
  EXPECT_EQ(HoldOf(client_, "plain", "alice").Field("weight"), Reply::Int(1));
}

TEST_F(WeightTest, AskingAgainNeedsTheSameWeight) {
  const int64_t token = Must("alice", 2, 3);
  const Reply other = Reply::Error(
      "ERR this owner holds the lock with another weight: use the same WEIGHT, or release it "
      "first");
  EXPECT_EQ(client_.Do(Acquiring("job", "alice", {"LIMIT", "3"})), other) << "absent means 1";
  EXPECT_EQ(Ask("alice", 1, 3), other);
  EXPECT_EQ(Ask("alice", 3, 3), other);
  EXPECT_EQ(Ask("alice", 3, 3, kWait), other);
  EXPECT_EQ(Must("alice", 2, 3), token);
  EXPECT_EQ(Must("alice", 2, 2), token) << "also with a smaller limit";
  Must("bob", 1, 3);
  Waiter carol = Wait("carol", 1, 3);
  EXPECT_EQ(Must("alice", 2, 3), token) << "also with others waiting";
  EXPECT_EQ(WeightOf("alice"), 2);
  // One of weight 1 may ask with and without it.
  const int64_t bob = HoldOf(client_, "job", "bob").Field("token").integer;
  EXPECT_EQ(Must("bob", 1, 3), bob);
  EXPECT_EQ(client_.Do(Acquiring("job", "bob", {"LIMIT", "3"})), Reply::Int(bob));
  // After a release it may weigh something else.
  Release("job", "alice");
  EXPECT_TRUE(carol.Read().IsInteger());
  Must("alice", 1, 3);
}

TEST_F(WeightTest, HeavyRequestThatWaitsHoldsBackLighterOnesBehindIt) {
  Must("alice", 2, 4);
  Waiter heavy = Wait("heavy", 3, 4);
  EXPECT_EQ(Ask("light", 1, 4), Reply::Nil()) << "it would fit, but heavy came first";
  MustQueue("job", "light", "1", Weighing(1, 4));
  EXPECT_EQ(LineOf(client_, "job"), (Owners{"heavy", "light"}));
  EXPECT_FALSE(heavy.HasReply());
  EXPECT_EQ(Release("job", "alice"), Reply::Int(1));
  EXPECT_TRUE(heavy.Read().IsInteger());
  MustBeGranted("1", "job");
  EXPECT_EQ(HoldersOf(client_, "job"), (Owners{"heavy", "light"}));
}

// With the waiters ahead, the smallest limit among them counts.
TEST_F(WeightTest, WaitersAheadCountWithTheirWeights) {
  Must("alice", 3, 4);
  Waiter bob = Wait("bob", 2, 4);
  Waiter carol = Wait("carol", 2, 6);  // 3 + 2 + 2 is more than 4
  Waiter dave = Wait("dave", 1, 6);
  EXPECT_EQ(LineOf(client_, "job"), (Owners{"bob", "carol", "dave"}));
  EXPECT_EQ(Release("job", "alice"), Reply::Int(1));
  // 2, 2 + 2 and 2 + 2 + 1.
  EXPECT_TRUE(bob.Read().IsInteger());
  EXPECT_TRUE(carol.Read().IsInteger());
  EXPECT_TRUE(dave.Read().IsInteger());
  EXPECT_EQ(HoldersOf(client_, "job"), (Owners{"bob", "carol", "dave"}));
}

TEST_F(WeightTest, HeavyRequestThatLeavesLetsOthersIn) {
  Must("alice", 2, 4);
  Waiter heavy = Wait("heavy", 4, 4);
  Waiter light = Wait("light", 2, 4);
  heavy.Close();
  EXPECT_TRUE(light.Read().IsInteger());
}

TEST_F(WeightTest, WeightIsFreedWhenLeaseEnds) {
  MustObtain(client_, Acquiring("job", "alice", Weighing(3, 4), 1500));
  const int64_t end = EndOf(client_, "job");
  Must("bob", 1, 4);
  Waiter carol = Wait("carol", 3, 4);
  EXPECT_TRUE(carol.Read().IsInteger());
  EXPECT_GT(ServerNow(client_), end);
  EXPECT_EQ(HoldersOf(client_, "job"), (Owners{"bob", "carol"}));
}

TEST_F(WeightTest, LingeringHoldKeepsItsWeight) {
  MustObtain(client_, Acquiring("job", "alice", Weighing(3, 4, {"LINGER", "60000"}), 1));
  EXPECT_TRUE(Eventually([&] { return HoldersOf(client_, "job").empty(); }));
  EXPECT_EQ(Ask("bob", 2, 4), Reply::Nil());
  Must("bob", 1, 4);
  // For its owner it has ended, so another weight is a new hold.
  Must("alice", 2, 4);
  EXPECT_EQ(WeightOf("alice"), 2);
  EXPECT_EQ(client_.Do("LOCK.INFO", "job").Field("linger-left-ms"), Reply::Int(0));
}

TEST_F(WeightTest, TouchKeepsWeight) {
  Must("alice", 3, 4);
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", "alice", "PX", 30000), Reply::Int(1));
  EXPECT_EQ(WeightOf("alice"), 3);
  EXPECT_EQ(Ask("bob", 2, 4), Reply::Nil());
}

TEST_F(WeightTest, AppliesToEveryLockOfASet) {
  MustObtain(client_, Acquiring("job", "alice", Weighing(2, 3, {"ALSO", "1", "task"})));
  for (const char* key : {"job", "task"}) {
    EXPECT_EQ(HoldOf(client_, key, "alice").Field("weight"), Reply::Int(2));
    EXPECT_EQ(client_.Do(Acquiring(key, "bob", Weighing(2, 3))), Reply::Nil());
    MustObtain(client_, Acquiring(key, "bob", Weighing(1, 3)));
  }
  EXPECT_TRUE(client_.Do(Acquiring("job", "alice", Weighing(1, 3, {"ALSO", "1", "task"})))
                  .IsError("ERR this owner holds the lock with another weight"));
}

// max-holders counts holders, not weights.
TEST_F(WeightTest, MaxHoldersCountsHolders) {
  EXPECT_EQ(client_.Do("CONFIG", "SET", "turnstile.max-holders", 2), Reply::Ok());
  Must("alice", 50, 100);
  Must("bob", 1, 100);
  EXPECT_EQ(Ask("carol", 1, 100), Reply::Nil());
  EXPECT_EQ(client_.Do("CONFIG", "SET", "turnstile.max-holders", 10000), Reply::Ok());
  Must("carol", 49, 100);
}

// --- Deadlocks --------------------------------------------------------------------------------

// Between requests with a limit there is no edge, because a permit may become free; but a request
// for all of them waits for every holder.
TEST_F(WeightTest, RequestForWholeLimitClosesCycles) {
  Must("alice", 1, 3);
  MustAcquire(client_, "other", "bob");
  Waiter alice(server(), "other", "alice");
  const Reply reply = Ask("bob", 3, 3, kWait);
  EXPECT_EQ(reply, Reply::Error("DEADLOCK waiting for \"job\" would close the cycle bob -> "
                                "\"job\" -> alice -> \"other\" -> bob"));
  EXPECT_EQ(client_.Do(Notified("job", "bob", notices_, "1", Weighing(3, 3))), reply);
}

TEST_F(WeightTest, RequestForPartOfLimitClosesNoCycle) {
  Must("alice", 2, 3);
  MustAcquire(client_, "other", "bob");
  Waiter alice(server(), "other", "alice");
  EXPECT_EQ(Ask("bob", 2, 3, {"WAIT", "20"}), Reply::Nil()) << "it waited in vain";
  EXPECT_EQ(Figure("deadlocks"), "0");
}

// --- Restarts ---------------------------------------------------------------------------------

// That every way to store and replicate a lock keeps the weight is tested in modes_storage_test.cc.
TEST(WeightRestartTest, WeightsCountAfterRestart) {
  int64_t token = 0;
  AcrossRestarts(
      [&](Client& client) {
        token = MustObtain(client, Acquiring("job", "alice", Weighing(3, 4)));
      },
      [&](Client& client) {
        EXPECT_EQ(client.Do(Acquiring("job", "bob", Weighing(2, 4))), Reply::Nil());
        MustObtain(client, Acquiring("job", "bob", Weighing(1, 4)));
        EXPECT_EQ(MustObtain(client, Acquiring("job", "alice", Weighing(3, 4))), token);
      });
}

}  // namespace
}  // namespace turnstile::testing
