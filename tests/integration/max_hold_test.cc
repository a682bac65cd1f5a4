// MAXHOLD: a hold ends at most that long after its first grant, whatever renews it.

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "support/clock.h"
#include "support/eventually.h"
#include "support/failover.h"
#include "support/lock_test.h"
#include "support/notices.h"
#include "support/reply.h"
#include "support/restarts.h"
#include "support/server.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

using Owners = std::vector<std::string>;

Command MaxHold(int64_t ms, const Command& options = {}) {
  Command all = {"MAXHOLD", std::to_string(ms)};
  all.insert(all.end(), options.begin(), options.end());
  return all;
}

class MaxHoldTest : public SharedNotifyTest<MaxHoldTest> {
 protected:
  static constexpr int64_t kLease = 20000;

  int64_t Must(std::string_view owner, const Command& options, int64_t lease_ms = kLease) {
    return MustObtain(client_, Acquiring("job", owner, options, lease_ms));
  }
  Reply Touch(std::string_view owner, int64_t lease_ms) {
    return client_.Do("LOCK.TOUCH", "job", owner, "PX", lease_ms);
  }
  Reply MaxHoldLeft(std::string_view owner) {
    return HoldOf(client_, "job", owner).Field("max-hold-left-ms");
  }
};

TEST_F(MaxHoldTest, TouchIsCutToTheCap) {
  const int64_t token = Must("alice", MaxHold(30000));
  const int64_t start = EndOf(client_, "job") - kLease;
  EXPECT_LE(MaxHoldLeft("alice").integer, 30000);
  EXPECT_GT(MaxHoldLeft("alice").integer, 20000);
  EXPECT_EQ(Touch("alice", 25000), Reply::Int(1));
  EXPECT_LE(EndOf(client_, "job"), ServerNow(client_) + 25000) << "not beyond the cap";
  EXPECT_LT(EndOf(client_, "job"), start + 30000);
  EXPECT_EQ(Touch("alice", kMinute), Reply::Int(1)) << "it succeeds, and is cut";
  EXPECT_EQ(EndOf(client_, "job"), start + 30000);
  EXPECT_EQ(Touch("alice", 86400000), Reply::Int(1));
  EXPECT_EQ(EndOf(client_, "job"), start + 30000);
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job"), Reply::Int(token));
  EXPECT_EQ(Touch("alice", 1000), Reply::Int(1)) << "it may still be shortened";
  EXPECT_LE(EndOf(client_, "job"), ServerNow(client_) + 1000);
}

TEST_F(MaxHoldTest, AskingAgainIsCutToTheCap) {
  const int64_t token = Must("alice", MaxHold(30000));
  const int64_t start = EndOf(client_, "job") - kLease;
  EXPECT_EQ(Must("alice", {}, kMinute), token) << "without MAXHOLD the cap stays";
  EXPECT_EQ(EndOf(client_, "job"), start + 30000);
  // With a later one, too.
  EXPECT_EQ(Must("alice", MaxHold(90000), kMinute), token);
  EXPECT_EQ(EndOf(client_, "job"), start + 30000);
  EXPECT_LE(MaxHoldLeft("alice").integer, 30000);
  // An earlier one counts from the first grant.
  EXPECT_EQ(Must("alice", MaxHold(25000)), token);
  EXPECT_EQ(Touch("alice", kMinute), Reply::Int(1));
  EXPECT_EQ(EndOf(client_, "job"), start + 25000);
  EXPECT_LE(MaxHoldLeft("alice").integer, 25000);
}

TEST_F(MaxHoldTest, HoldWithoutCapMayGetOne) {
  const int64_t token = Must("alice", {});
  EXPECT_EQ(MaxHoldLeft("alice"), Reply::Nil());
  const int64_t start = EndOf(client_, "job") - kLease;
  EXPECT_EQ(Must("alice", MaxHold(30000)), token);
  EXPECT_EQ(Touch("alice", kMinute), Reply::Int(1));
  EXPECT_EQ(EndOf(client_, "job"), start + 30000) << "it counts from the first grant";
}

// The first grant may be longer ago than the new cap allows.
TEST_F(MaxHoldTest, CapInThePastEndsTheHoldAtOnce) {
  const int64_t token = Must("alice", {});
  const int64_t start = EndOf(client_, "job") - kLease;
  EXPECT_TRUE(Eventually([&] { return ServerNow(client_) > start + 20; }));
  EXPECT_EQ(Must("alice", MaxHold(10), 10), token);
  EXPECT_LE(EndOf(client_, "job"), ServerNow(client_));
  EXPECT_TRUE(Eventually([&] { return client_.Do("LOCK.FENCE", "job").IsNil(); }));
  EXPECT_GT(MustAcquire(client_, "job", "bob"), token);
}

TEST_F(MaxHoldTest, HoldEndsAtTheCapThoughSomethingGoesOnRenewing) {
  MustObtain(client_,
             Acquiring("job", "alice", MaxHold(2500, {"NOTIFY", notices_.channel(), "1"}), 1500));
  const int64_t start = EndOf(client_, "job") - 1500;
  MustQueue("job", "bob", "2");
  EXPECT_TRUE(Eventually([&] { return Touch("alice", 1500) == Reply::Int(0); }));
  EXPECT_GE(ServerNow(client_), FirstFree(client_, start + 2500));
  EXPECT_TRUE(notices_.Next().ends_with(" expired job"));
  MustBeGranted("2", "job");
  EXPECT_GE(EndOf(client_, "job") - kMinute, FirstFree(client_, start + 2500));
  EXPECT_EQ(MaxHoldLeft("bob"), Reply::Nil()) << "the cap was that of the hold";
}

TEST_F(MaxHoldTest, NewHoldOfSameOwnerStartsWithoutCap) {
  Must("alice", MaxHold(30000));
  Release("job", "alice");
  Must("alice", {}, kMinute);
  EXPECT_EQ(MaxHoldLeft("alice"), Reply::Nil());
  EXPECT_GT(client_.Do("PTTL", "job").integer, 30000);
  // Also after a linger.
  client_.Do("DEL", "job");
  Must("alice", MaxHold(30000, {"LINGER", "60000"}), 1);
  EXPECT_TRUE(Eventually([&] { return client_.Do("LOCK.FENCE", "job").IsNil(); }));
  Must("alice", {}, kMinute);
  EXPECT_EQ(MaxHoldLeft("alice"), Reply::Nil());
}

TEST_F(MaxHoldTest, CapSurvivesUpgradeAndDowngrade) {
  const int64_t shared = Must("alice", MaxHold(30000, {"SHARED"}));
  const int64_t start = EndOf(client_, "job") - kLease;
  EXPECT_GT(Must("alice", {}, kMinute), shared);
  EXPECT_EQ(EndOf(client_, "job"), start + 30000);
  EXPECT_LE(MaxHoldLeft("alice").integer, 30000);
  Must("alice", {"SHARED"}, kMinute);
  EXPECT_EQ(EndOf(client_, "job"), start + 30000);
  EXPECT_EQ(Must("alice", MaxHold(90000, {"SHARED"}), kMinute),
            HoldOf(client_, "job", "alice").Field("token").integer);
  EXPECT_EQ(EndOf(client_, "job"), start + 30000);
  // An upgrade that waited.
  MustObtain(client_, Acquiring("job", "bob", {"SHARED"}));
  Waiter upgrade(server(), "job", "alice");
  Release("job", "bob");
  EXPECT_TRUE(upgrade.Read().IsInteger());
  EXPECT_EQ(EndOf(client_, "job"), start + 30000);
}

// Through upgrades the hold is the same one.
TEST_F(MaxHoldTest, HeldTimeCountsFromFirstGrantAlsoThroughUpgrade) {
  const auto held = [this] { return HoldOf(client_, "job", "alice").Field("held-ms").integer; };
  Must("alice", {"SHARED"});
  EXPECT_TRUE(Eventually([&] { return held() > 50; }));
  Must("alice", {});
  EXPECT_GT(held(), 50);
}

TEST_F(MaxHoldTest, CountedHoldIsCutToo) {
  Must("alice", MaxHold(30000, {"REENTRANT"}));
  const int64_t start = EndOf(client_, "job") - kLease;
  Must("alice", {"REENTRANT"}, kMinute);
  EXPECT_EQ(EndOf(client_, "job"), start + 30000);
  EXPECT_EQ(Release("job", "alice"), Reply::Int(1));
  EXPECT_EQ(Touch("alice", kMinute), Reply::Int(1));
  EXPECT_EQ(EndOf(client_, "job"), start + 30000);
}

// The cap begins with the grant, not with the wait.
TEST_F(MaxHoldTest, CapCountsFromGrantOfWaiter) {
  MustAcquire(client_, "job", "alice");
  MustQueue("job", "bob", "1", MaxHold(60000));
  EXPECT_TRUE(Eventually([&] {
    return client_.Do("LOCK.INFO", "job")
               .Field("waiters")
               .elements.at(0)
               .Field("waited-ms")
               .integer > 30;
  }));
  const int64_t before = ServerNow(client_);
  Release("job", "alice");
  MustBeGranted("1", "job");
  EXPECT_EQ(Touch("bob", 90000), Reply::Int(1));
  EXPECT_GE(EndOf(client_, "job"), before + 60000);
  EXPECT_LE(EndOf(client_, "job"), ServerNow(client_) + 60000);
}

TEST_F(MaxHoldTest, LingerFollowsTheCap) {
  Must("alice", MaxHold(2000, {"LINGER", "40000"}), 1500);
  const int64_t start = EndOf(client_, "job") - 1500 - 40000;
  EXPECT_EQ(Touch("alice", kMinute), Reply::Int(1));
  EXPECT_EQ(EndOf(client_, "job"), start + 2000 + 40000);
  EXPECT_TRUE(Eventually([&] { return client_.Do("LOCK.FENCE", "job").IsNil(); }));
  EXPECT_EQ(Touch("alice", kMinute), Reply::Int(0));
  EXPECT_EQ(client_.Do(Acquiring("job", "bob", {})), Reply::Nil()) << "closed for the linger";
  EXPECT_GT(client_.Do("LOCK.INFO", "job").Field("linger-left-ms").integer, 30000);
}

TEST_F(MaxHoldTest, EachHolderHasItsOwnCap) {
  Must("alice", MaxHold(30000, {"LIMIT", "3"}));
  Must("bob", MaxHold(40000, {"LIMIT", "3"}));
  Must("carol", {"LIMIT", "3"});
  for (const char* owner : {"alice", "bob", "carol"}) Touch(owner, kMinute);
  const auto left = [this](const char* owner) {
    return HoldOf(client_, "job", owner).Field("lease-left-ms").integer;
  };
  EXPECT_LE(left("alice"), 30000);
  EXPECT_TRUE(left("bob") > 30000 && left("bob") <= 40000) << left("bob");
  EXPECT_GT(left("carol"), 40000);
  EXPECT_EQ(MaxHoldLeft("carol"), Reply::Nil());
}

TEST_F(MaxHoldTest, AppliesToEveryLockOfASet) {
  Must("alice", MaxHold(30000, {"ALSO", "1", "task"}));
  const int64_t start = EndOf(client_, "job") - kLease;
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", "alice", "PX", kMinute, "ALSO", 1, "task"),
            Reply::Int(2));
  EXPECT_EQ(EndOf(client_, "job"), start + 30000);
  EXPECT_EQ(EndOf(client_, "task"), start + 30000);
}

// A generic command cannot lengthen it: the TTL follows the leases.
TEST_F(MaxHoldTest, ChangedTtlIsRevertedToTheCap) {
  Must("alice", MaxHold(30000));
  Touch("alice", kMinute);
  const int64_t end = EndOf(client_, "job");
  EXPECT_EQ(client_.Do("PERSIST", "job"), Reply::Int(1));
  EXPECT_EQ(EndOf(client_, "job"), end);
}

TEST_F(MaxHoldTest, SmallestAndLargestCapsWork) {
  Must("alice", MaxHold(1), 1);
  client_.Do("DEL", "job");
  Must("alice", MaxHold(kLease));
  EXPECT_LE(MaxHoldLeft("alice").integer, kLease);
  client_.Do("DEL", "job");
  Must("alice", MaxHold(31536000000));
  EXPECT_GT(MaxHoldLeft("alice").integer, 31535990000);
}

// --- Restarts and failovers -------------------------------------------------------------------

TEST(MaxHoldRestartTest, CapStillCutsAfterRestart) {
  int64_t start = 0;
  AcrossRestarts(
      [&](Client& client) {
        MustObtain(client, Acquiring("job", "alice", MaxHold(30000), 20000));
        start = EndOf(client, "job") - 20000;
      },
      [&](Client& client) {
        EXPECT_EQ(client.Do("LOCK.TOUCH", "job", "alice", "PX", kMinute), Reply::Int(1));
        EXPECT_EQ(EndOf(client, "job"), start + 30000);
        MustObtain(client, Acquiring("job", "alice", MaxHold(90000)));
        EXPECT_EQ(EndOf(client, "job"), start + 30000);
      });
}

TEST(MaxHoldFailoverTest, CapStillCutsOnNewPrimary) {
  Pair pair;
  const int64_t token =
      MustObtain(pair.primary(), Acquiring("job", "alice", MaxHold(30000), 20000));
  const int64_t start = EndOf(pair.primary(), "job") - 20000;
  EXPECT_EQ(pair.primary().Do("LOCK.TOUCH", "job", "alice", "PX", 22000), Reply::Int(1));
  pair.AwaitReplica();
  EXPECT_EQ(pair.replica().Do("DEBUG", "DIGEST-VALUE", "job"),
            pair.primary().Do("DEBUG", "DIGEST-VALUE", "job"));
  EXPECT_LE(HoldOf(pair.replica(), "job", "alice").Field("max-hold-left-ms").integer, 30000);
  pair.Promote();
  EXPECT_EQ(pair.primary().Do("LOCK.TOUCH", "job", "alice", "PX", kMinute), Reply::Int(1));
  EXPECT_EQ(EndOf(pair.primary(), "job"), start + 30000);
  EXPECT_EQ(pair.primary().Do("LOCK.FENCE", "job"), Reply::Int(token));
}

}  // namespace
}  // namespace turnstile::testing
