// TAG: a public name of a hold or wait.

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

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

class TagTest : public SharedNotifyTest<TagTest> {
 protected:
  int64_t Must(std::string_view owner, const Command& options, std::string_view key = "job") {
    return MustObtain(client_, Acquiring(key, owner, options));
  }
  Reply TagOf(std::string_view owner, std::string_view key = "job") {
    return HoldOf(client_, key, owner).Field("tag");
  }
  Reply TagOfWaiter(size_t index) {
    return client_.Do("LOCK.INFO", "job").Field("waiters").elements.at(index).Field("tag");
  }
};

TEST_F(TagTest, HolderShowsItsTag) {
  Must("alice", {"TAG", "host-1 pid 77: nightly report"});
  EXPECT_EQ(TagOf("alice"), Reply::Str("host-1 pid 77: nightly report"));
  Must("bob", {"SHARED", "TAG", "a"}, "shared");
  Must("carol", {"SHARED"}, "shared");
  EXPECT_EQ(TagOf("bob", "shared"), Reply::Str("a"));
  EXPECT_EQ(TagOf("carol", "shared"), Reply::Nil()) << "none";
  client_.Do("SET", "plain", "x");
  EXPECT_EQ(TagOf("x", "plain"), Reply::Nil());
}

TEST_F(TagTest, WaiterShowsItsTag) {
  MustAcquire(client_, "job", "alice");
  Waiter bob = Waiter::Asking(
      server(), Acquiring("job", "bob", {"WAIT", "60000", "TAG", "waits and blocks"}));
  MustQueue("job", "carol", "1", {"TAG", "waits"});
  MustQueue("job", "dave", "2");
  EXPECT_EQ(TagOfWaiter(0), Reply::Str("waits and blocks"));
  EXPECT_EQ(TagOfWaiter(1), Reply::Str("waits"));
  EXPECT_EQ(TagOfWaiter(2), Reply::Nil());
  Release("job", "alice");
  EXPECT_TRUE(bob.Read().IsInteger());
  EXPECT_EQ(TagOf("bob"), Reply::Str("waits and blocks")) << "the hold has it too";
  Release("job", "bob");
  MustBeGranted("1", "job");
  EXPECT_EQ(TagOf("carol"), Reply::Str("waits"));
}

TEST_F(TagTest, AskingAgainKeepsOrReplacesTag) {
  const int64_t token = Must("alice", {"TAG", "first"});
  EXPECT_EQ(Must("alice", {}), token);
  EXPECT_EQ(TagOf("alice"), Reply::Str("first"));
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", "alice", "PX", 30000), Reply::Int(1));
  EXPECT_EQ(TagOf("alice"), Reply::Str("first"));
  EXPECT_EQ(Must("alice", {"TAG", "second, and longer"}), token);
  EXPECT_EQ(TagOf("alice"), Reply::Str("second, and longer"));
  // A new hold has none.
  Release("job", "alice");
  Must("alice", {});
  EXPECT_EQ(TagOf("alice"), Reply::Nil());
  EXPECT_EQ(Must("alice", {"TAG", "late"}), HoldOf(client_, "job", "alice").Field("token").integer);
  EXPECT_EQ(TagOf("alice"), Reply::Str("late"));
}

TEST_F(TagTest, TagFollowsUpgradeDowngradeAndCount) {
  Must("alice", {"SHARED", "REENTRANT", "TAG", "mine"});
  Must("alice", {"REENTRANT"});
  EXPECT_EQ(ModeOf(client_, "job"), "exclusive");
  EXPECT_EQ(TagOf("alice"), Reply::Str("mine"));
  Must("alice", {"SHARED"});
  EXPECT_EQ(TagOf("alice"), Reply::Str("mine"));
  EXPECT_EQ(Release("job", "alice"), Reply::Int(1));
  EXPECT_EQ(TagOf("alice"), Reply::Str("mine")) << "one count less";
}

TEST_F(TagTest, NewerCallSetsTagOfWait) {
  MustAcquire(client_, "job", "alice");
  MustQueue("job", "bob", "1", {"TAG", "first"});
  MustQueue("job", "bob", "1", {"TAG", "second"});
  EXPECT_EQ(TagOfWaiter(0), Reply::Str("second"));
  MustQueue("job", "bob", "1");
  EXPECT_EQ(TagOfWaiter(0), Reply::Nil()) << "a wait is what the newest call says";
}

TEST_F(TagTest, ListAndTopShowTagOfHolder) {
  Must("alice", {"TAG", "nightly report"});
  MustQueue("job", "bob", "1", {"TAG", "bob's"});
  Must("a", {"SHARED", "TAG", "older"}, "shared");
  Must("b", {"SHARED", "TAG", "newer"}, "shared");
  MustAcquire(client_, "untagged", "alice");
  const Reply list = client_.Do("LOCK.LIST", "COUNT", 1000);
  ASSERT_EQ(list.elements.size(), 2U) << list;
  EXPECT_EQ(list.elements[1].elements.size(), 3U);
  for (const Reply& lock : list.elements[1].elements) {
    const std::string key = lock.Field("key").text;
    const Reply expected = key == "job"      ? Reply::Str("nightly report")
                           : key == "shared" ? Reply::Str("newer")
                                             : Reply::Nil();
    EXPECT_EQ(lock.Field("tag"), expected) << key << ", that of the owner shown";
  }
  const Reply top = client_.Do("LOCK.TOP");
  ASSERT_EQ(top.elements.size(), 1U) << top;
  EXPECT_EQ(top.elements[0].Field("tag"), Reply::Str("nightly report"));
}

// An owner proves something, a tag does not: where there is one, the cycle names it.
TEST_F(TagTest, DeadlockNamesTagsInPlaceOfOwners) {
  Must("alice", {}, "a");
  Must("bob", {"TAG", "holds-b"}, "b");
  MustQueue(Notified("b", "alice", notices_, "1", {"TAG", "host-1"}));
  const std::string cycle = "DEADLOCK waiting for \"a\" would close the cycle ";
  EXPECT_EQ(client_.Do(Acquiring("a", "bob", {"WAIT", "60000", "TAG", "host-2"})),
            Reply::Error(cycle + "host-2 -> \"a\" -> host-1 -> \"b\" -> host-2"));
  EXPECT_EQ(client_.Do(AcquireWaiting("a", "bob")),
            Reply::Error(cycle + "holds-b -> \"a\" -> host-1 -> \"b\" -> holds-b"))
      << "the tag of the hold, where the wait has none";
  // Quoted like an owner, so that it cannot be mistaken for more of the cycle.
  EXPECT_EQ(client_.Do(Acquiring("a", "bob", {"WAIT", "60000", "TAG", "x -> \"y\""})),
            Reply::Error(cycle + R"("x -> \"y\"" -> "a" -> host-1 -> "b" -> "x -> \"y\"")"));
}

// Who may not read a lock learns neither.
TEST_F(TagTest, DeadlockHidesTagsOfLocksThatCallerMayNotRead) {
  Must("alice", {}, "hidden");
  Must("bob", {}, "lock:b");
  Must("carol", {}, "lock:c");
  MustQueue(Notified("lock:c", "alice", notices_, "1", {"TAG", "secret"}));
  MustQueue(Notified("hidden", "bob", notices_, "2", {"TAG", "bob's"}));
  Client worker = server().ConnectAs("worker", {"~lock:*", "+lock.acquire", "+lock.info"});
  EXPECT_EQ(
      worker.Do(AcquireWaiting("lock:b", "carol")),
      Reply::Error("DEADLOCK waiting for \"lock:b\" would close the cycle carol -> \"lock:b\" "
                   "-> bob's -> ? -> ? -> \"lock:c\" -> carol"));
}

TEST_F(TagTest, AppliesToEveryLockOfASet) {
  Must("alice", {"TAG", "both", "ALSO", "1", "task"});
  EXPECT_EQ(TagOf("alice"), Reply::Str("both"));
  EXPECT_EQ(TagOf("alice", "task"), Reply::Str("both"));
}

TEST_F(TagTest, EveryPrintableByteIsAllowed) {
  std::string all;
  for (char c = ' '; c <= '~'; c++) all += c;
  for (size_t at = 0; at < all.size(); at += 64) {
    const std::string tag = all.substr(at, 64);
    Must("alice", {"TAG", tag});
    EXPECT_EQ(TagOf("alice"), Reply::Str(tag));
  }
  Must("alice", {"TAG", std::string(64, '~')});
  Must("alice", {"TAG", "TAG"});
  EXPECT_EQ(TagOf("alice"), Reply::Str("TAG"));
}

// --- Restarts and replicas --------------------------------------------------------------------

TEST(TagRestartTest, TagIsThereAfterRestart) {
  Reply digest;
  AcrossRestarts(
      [&](Client& client) {
        MustObtain(client, Acquiring("job", "alice", {"TAG", "host 1, COUNT 5"}));
        digest = client.Do("DEBUG", "DIGEST-VALUE", "job");
      },
      [&](Client& client) {
        EXPECT_EQ(HoldOf(client, "job", "alice").Field("tag"), Reply::Str("host 1, COUNT 5"));
        EXPECT_EQ(client.Do("DEBUG", "DIGEST-VALUE", "job"), digest);
        EXPECT_EQ(client.Do("LOCK.TOUCH", "job", "alice", "PX", kMinute), Reply::Int(1));
        EXPECT_EQ(HoldOf(client, "job", "alice").Field("tag"), Reply::Str("host 1, COUNT 5"));
      });
}

TEST(TagReplicaTest, ReplicaShowsTag) {
  Pair pair;
  MustObtain(pair.primary(), Acquiring("job", "alice", {"SHARED", "TAG", "first"}));
  MustObtain(pair.primary(), Acquiring("job", "bob", {"SHARED"}));
  MustObtain(pair.primary(), Acquiring("job", "alice", {"SHARED", "TAG", "second"}));
  pair.AwaitReplica();
  EXPECT_EQ(HoldOf(pair.replica(), "job", "alice").Field("tag"), Reply::Str("second"));
  EXPECT_EQ(HoldOf(pair.replica(), "job", "bob").Field("tag"), Reply::Nil());
  EXPECT_EQ(pair.replica().Do("DEBUG", "DIGEST-VALUE", "job"),
            pair.primary().Do("DEBUG", "DIGEST-VALUE", "job"));
  pair.Promote();
  EXPECT_EQ(pair.primary().Do("LOCK.TOUCH", "job", "alice", "PX", kMinute), Reply::Int(1));
  EXPECT_EQ(HoldOf(pair.primary(), "job", "alice").Field("tag"), Reply::Str("second"));
}

}  // namespace
}  // namespace turnstile::testing
