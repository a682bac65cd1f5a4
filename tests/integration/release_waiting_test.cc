// LOCK.RELEASE by an owner that waits: it leaves the queue as well as releasing what it holds.

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/replication_stream.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

using Owners = std::vector<std::string>;

class ReleaseWaitingTest : public SharedWaitingTest<ReleaseWaitingTest> {
 protected:
  Reply Release(const std::string& key, const std::string& owner) {
    return client_.Do("LOCK.RELEASE", key, owner);
  }

  static Reply Cancelled() {
    return Reply::Error("UNBLOCKED cancelled by a LOCK.RELEASE of the same owner");
  }
};

TEST_F(ReleaseWaitingTest, ReleaseEndsWaitAndAdvancesQueue) {
  MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob");
  Waiter carol(server(), "job", "carol");
  EXPECT_EQ(Release("job", "bob"), Reply::Int(1));
  EXPECT_EQ(bob.Read(), Cancelled());
  EXPECT_EQ(LineOf(client_, "job"), Owners{"carol"});
  EXPECT_EQ(WaitersNow(client_), "1");
  EXPECT_EQ(Release("job", "bob"), Reply::Int(0)) << "it waits no more";
  EXPECT_EQ(bob.Do("PING"), Reply::Status("PONG"));
  EXPECT_EQ(Release("job", "alice"), Reply::Int(1));
  EXPECT_TRUE(carol.Read().IsInteger());
}

// When a waiting writer leaves, readers behind it join the current readers.
TEST_F(ReleaseWaitingTest, WaitersBlockedByCancelledWaitAreServed) {
  MustObtain(client_, Acquiring("job", "reader", {"SHARED"}));
  Waiter writer(server(), "job", "writer");
  Waiter late(server());
  late.Wait(Acquiring("job", "late", {"SHARED", "WAIT", "60000"}));
  EXPECT_EQ(Release("job", "writer"), Reply::Int(1));
  EXPECT_EQ(writer.Read(), Cancelled());
  EXPECT_TRUE(late.Read().IsInteger());
}

TEST_F(ReleaseWaitingTest, WaitForSetEndsInAllQueues) {
  MustAcquire(client_, "a", "alice");
  Waiter bob(server());
  bob.Wait(Acquiring("a", "bob", {"WAIT", "60000", "ALSO", "2", "b", "c"}));
  Waiter carol(server(), "c", "carol");
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "b", "bob", "ALSO", 1, "elsewhere"), Reply::Int(1))
      << "only what is named is counted";
  EXPECT_EQ(bob.Read(), Cancelled());
  EXPECT_EQ(LineOf(client_, "a"), Owners{});
  EXPECT_TRUE(carol.Read().IsInteger()) << "it waited behind bob alone";
}

TEST_F(ReleaseWaitingTest, CountsEachReleasedLockAndCancelledWait) {
  MustAcquire(client_, "a", "alice");
  MustAcquire(client_, "b", "bob");
  Waiter bob(server(), "a", "bob");
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "a", "bob", "ALSO", 2, "b", "c"), Reply::Int(2));
  EXPECT_EQ(bob.Read(), Cancelled());
  EXPECT_EQ(client_.Do("EXISTS", "b"), Reply::Int(0));
}

// An upgrader both holds and waits: one call ends both, and counts the lock once.
TEST_F(ReleaseWaitingTest, CancelledUpgradeReleasesSharedHold) {
  MustObtain(client_, Acquiring("job", "bob", {"SHARED"}));
  MustObtain(client_, Acquiring("job", "other", {"SHARED"}));
  Waiter bob(server(), "job", "bob");
  EXPECT_EQ(Release("job", "bob"), Reply::Int(1));
  EXPECT_EQ(bob.Read(), Cancelled());
  EXPECT_EQ(HoldersOf(client_, "job"), Owners{"other"});
  EXPECT_EQ(LineOf(client_, "job"), Owners{});
  EXPECT_EQ(Release("job", "bob"), Reply::Int(0));
}

// One count of a counted hold is released.
TEST_F(ReleaseWaitingTest, CancelledUpgradeOfCountedHoldReleasesOneCount) {
  for (int i = 0; i < 2; i++) {
    MustObtain(client_, Acquiring("job", "bob", {"SHARED", "REENTRANT"}));
  }
  MustObtain(client_, Acquiring("job", "other", {"SHARED"}));
  Waiter bob(server(), "job", "bob");
  EXPECT_EQ(Release("job", "bob"), Reply::Int(1));
  EXPECT_EQ(bob.Read(), Cancelled());
  EXPECT_EQ(HoldOf(client_, "job", "bob").Field("count"), Reply::Int(1));
  EXPECT_EQ(Release("job", "bob"), Reply::Int(1));
  EXPECT_EQ(HoldersOf(client_, "job"), Owners{"other"});
}

// Its hold has ended and lingers; it waits to acquire the lock again.
TEST_F(ReleaseWaitingTest, LingeringHoldOfWaiterEnds) {
  MustObtain(client_, Acquiring("job", "bob", {"SHARED", "LINGER", "60000"}, 1));
  MustObtain(client_, Acquiring("job", "other", {"SHARED"}));
  EXPECT_TRUE(Eventually([&] { return HoldersOf(client_, "job") == Owners{"other"}; }));
  Waiter bob(server(), "job", "bob");
  EXPECT_EQ(Release("job", "bob"), Reply::Int(1)) << "it waited";
  EXPECT_EQ(bob.Read(), Cancelled());
  EXPECT_EQ(client_.Do("LOCK.INFO", "job").Field("linger-left-ms"), Reply::Int(0));
  EXPECT_EQ(Release("job", "bob"), Reply::Int(0));
}

TEST_F(ReleaseWaitingTest, WaitForPlainLockEnds) {
  client_.Do("SET", "job", "alice");
  Waiter bob(server(), "job", "bob");
  EXPECT_EQ(Release("job", "bob"), Reply::Int(1));
  EXPECT_EQ(bob.Read(), Cancelled());
  EXPECT_EQ(client_.Do("GET", "job"), Reply::Str("alice"));
}

TEST_F(ReleaseWaitingTest, OtherOwnersAndDatabasesAreNotAffected) {
  MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob");
  EXPECT_EQ(Release("job", "carol"), Reply::Int(0));
  Client elsewhere = server().Connect();
  elsewhere.Do("SELECT", 3);
  EXPECT_EQ(elsewhere.Do("LOCK.RELEASE", "job", "bob"), Reply::Int(0));
  EXPECT_EQ(Release("other", "bob"), Reply::Int(0));
  EXPECT_EQ(LineOf(client_, "job"), Owners{"bob"});
}

TEST_F(ReleaseWaitingTest, WorksInTransactionsAndScripts) {
  MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob");
  client_.Do("MULTI");
  client_.Do("LOCK.RELEASE", "job", "bob");
  client_.Do("LOCK.RELEASE", "job", "bob");
  EXPECT_EQ(client_.Do("EXEC"), Reply::Array({Reply::Int(1), Reply::Int(0)}));
  EXPECT_EQ(bob.Read(), Cancelled());
  Waiter carol(server(), "job", "carol");
  EXPECT_EQ(client_.Do("EVAL", "return redis.call('LOCK.RELEASE', KEYS[1], 'carol')", 1, "job"),
            Reply::Int(1));
  EXPECT_EQ(carol.Read(), Cancelled());
}

// The holder and the next waiter release in one write: the lock is not granted to the waiter that
// left.
TEST_F(ReleaseWaitingTest, CancelledWaiterIsNotGranted) {
  MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob");
  RawConnection raw = server().ConnectRaw();
  EXPECT_EQ(DoAtOnce(raw, {{"LOCK.RELEASE", "job", "alice"}, {"LOCK.RELEASE", "job", "bob"}}),
            (std::vector{Reply::Int(1), Reply::Int(1)}));
  EXPECT_EQ(bob.Read(), Cancelled());
  EXPECT_EQ(client_.Do("EXISTS", "job"), Reply::Int(0));
}

// Queues exist on this server only: only changes to holds are replicated.
TEST_F(ReleaseWaitingTest, OnlyChangesToHoldsAreReplicated) {
  MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob");
  ReplicationStream stream(server().port());
  stream.Until(client_);
  EXPECT_EQ(Release("job", "bob"), Reply::Int(1));
  EXPECT_EQ(bob.Read(), Cancelled());
  EXPECT_EQ(stream.Until(client_), Commands{});
}

}  // namespace
}  // namespace turnstile::testing
