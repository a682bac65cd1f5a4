// NOTIFY in a cluster: channels are those of the shard, and slots move away.

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "support/cluster.h"
#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/notices.h"
#include "support/reply.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

using Owners = std::vector<std::string>;

// Two nodes, and a lock and a channel in a slot of the first.
class NotifyClusterTest : public ::testing::Test {
 protected:
  Reply Ask(const char* owner, const std::string& id, const Command& options = {}) {
    return node_.Do(Notified(key_, owner, notices_, id, options));
  }
  Reply Release(const char* owner) { return node_.Do("LOCK.RELEASE", key_, owner); }

  Cluster cluster_{{.primaries = 2}};
  const std::string key_ = cluster_.KeyOn(0);
  const int64_t slot_ = cluster_.SlotOf(key_);
  const std::string channel_ = "channel of {" + key_ + "}";
  const SlotMove move_{cluster_, slot_, 0, 1};
  Client& node_ = cluster_.client(0);
  Client& other_ = cluster_.client(1);
  Notices notices_{cluster_.server(0), channel_, "SSUBSCRIBE"};
};

TEST_F(NotifyClusterTest, ChannelOfTheShardIsTold) {
  MustAcquire(node_, key_, "alice");
  Notices ordinary(cluster_.server(0), channel_);
  EXPECT_EQ(Ask("bob", "1"), Reply::Int(0));
  EXPECT_EQ(Release("alice"), Reply::Int(1));
  const int64_t token = MustBeGranted(node_, notices_, "1", key_);
  node_.Do("DEL", key_);
  EXPECT_EQ(notices_.Next(), LostNotice("1", token, "forced", key_));
  EXPECT_EQ(ordinary.Until(node_), Texts{}) << "not by PUBLISH";
}

TEST_F(NotifyClusterTest, OrdinarySubscriberDoesNotCount) {
  const std::string name = "other channel of {" + key_ + "}";
  Notices ordinary(cluster_.server(0), name);
  MustAcquire(node_, key_, "alice");
  EXPECT_EQ(node_.Do(Acquiring(key_, "bob", Notifying(name, "1"))), Reply::Int(0));
  EXPECT_EQ(Ask("carol", "2"), Reply::Int(0));
  EXPECT_EQ(Release("alice"), Reply::Int(1));
  MustBeGranted(node_, notices_, "2", key_);
  EXPECT_EQ(ordinary.Until(node_), Texts{});
}

TEST_F(NotifyClusterTest, ChannelMustBeInSlotOfKey) {
  const Reply crossslot = Reply::Error(
      "CROSSSLOT the channel after NOTIFY must be in the slot of the key: give it the same hash "
      "tag");
  for (const std::string& channel : {cluster_.KeyOn(0), cluster_.KeyOn(1)}) {
    EXPECT_EQ(node_.Do(Acquiring(key_, "bob", Notifying(channel, "1"))), crossslot);
    EXPECT_EQ(node_.Do(Acquiring(key_, "bob", {"NOTIFY", channel, "1"})), crossslot);
  }
  EXPECT_EQ(node_.Do("EXISTS", key_), Reply::Int(0));
  EXPECT_GT(node_.Do(Acquiring(key_, "bob", {"NOTIFY", key_, "1"})).integer, 0)
      << "the key itself is such a channel";
}

TEST_F(NotifyClusterTest, CallNeedsRightToPublishToTheShard) {
  const Command rights = {"~*", "&*", "+lock.acquire"};
  Client worker = cluster_.server(0).ConnectAs("worker", rights);
  const Command request = Notified(key_, "bob", notices_, "1");
  EXPECT_EQ(node_.Do("ACL", "SETUSER", "worker", "+publish"), Reply::Ok());
  EXPECT_TRUE(worker.Do(request).IsError("NOPERM")) << "PUBLISH is not enough";
  EXPECT_EQ(node_.Do("ACL", "SETUSER", "worker", "-publish", "+spublish"), Reply::Ok());
  EXPECT_GT(worker.Do(request).integer, 0);
  // At the grant, too.
  EXPECT_EQ(worker.Do(Notified(key_, "carol", notices_, "2")), Reply::Int(0));
  EXPECT_EQ(Ask("dave", "3"), Reply::Int(0));
  EXPECT_EQ(node_.Do("ACL", "SETUSER", "worker", "-spublish"), Reply::Ok());
  EXPECT_EQ(Release("bob"), Reply::Int(1));
  MustBeGranted(node_, notices_, "3", key_);
}

TEST_F(NotifyClusterTest, WaitersGetTryAgainWhenTheirLockHasMoved) {
  MustAcquire(node_, key_, "alice");
  EXPECT_EQ(Ask("bob", "1"), Reply::Int(0));
  EXPECT_EQ(Ask("carol", "2"), Reply::Int(0));
  move_.Begin();
  EXPECT_EQ(LineOf(node_, key_), (Owners{"bob", "carol"}));
  ASSERT_EQ(move_.MoveKeys(), 1);
  for (const std::string id : {"1", "2"}) {
    const std::string message = notices_.Next();
    EXPECT_TRUE(message.starts_with(id + " error TRYAGAIN ")) << message;
  }
  EXPECT_EQ(QueuedNow(node_), "0");
  move_.End();
  // They subscribe and ask again on the new node.
  Notices there(cluster_.server(1), channel_, "SSUBSCRIBE");
  EXPECT_EQ(other_.Do(Notified(key_, "bob", there, "1")), Reply::Int(0));
  EXPECT_EQ(other_.Do("LOCK.RELEASE", key_, "alice"), Reply::Int(1));
  MustBeGranted(other_, there, "1", key_);
}

TEST_F(NotifyClusterTest, MigratingNodeGrantsNothing) {
  MustAcquire(node_, key_, "alice");
  EXPECT_EQ(Ask("bob", "1"), Reply::Int(0));
  move_.Begin();
  EXPECT_EQ(Release("alice"), Reply::Int(1));
  const std::string message = notices_.Next();
  EXPECT_TRUE(message.starts_with("1 error TRYAGAIN ")) << message;
  EXPECT_EQ(node_.Do("CLUSTER", "COUNTKEYSINSLOT", slot_), Reply::Int(0));
}

// The old node learns from the new one that the slot is gone. By then it has ended the
// subscriptions of the slot, so perhaps nobody hears the error; but no wait is left.
TEST_F(NotifyClusterTest, WaitsForMovedSlotEnd) {
  MustAcquire(node_, key_, "alice");
  EXPECT_EQ(Ask("bob", "1"), Reply::Int(0));
  EXPECT_EQ(Ask("carol", "2"), Reply::Int(0));
  ASSERT_EQ(other_.Do("CLUSTER", "SETSLOT", slot_, "IMPORTING", cluster_.id(0)), Reply::Ok());
  ASSERT_EQ(other_.Do("CLUSTER", "SETSLOT", slot_, "NODE", cluster_.id(1)), Reply::Ok());
  EXPECT_TRUE(Eventually([&] { return QueuedNow(node_) == "0"; }, kClusterPatience));
  for (const std::string& message : notices_.Until(node_)) {
    // The server's own message that it has unsubscribed the client is the name of the channel.
    EXPECT_TRUE(message.find(" error MOVED ") != std::string::npos || !message.starts_with("1 "))
        << message;
  }
  EXPECT_EQ(InfoField(node_, "turnstile", "turnstile_undelivered"), "0");
}

TEST_F(NotifyClusterTest, NothingIsSaidOfHoldThatMovesAway) {
  const int64_t token = Ask("alice", "1").integer;
  EXPECT_GT(token, 0);
  move_.Begin();
  ASSERT_EQ(move_.MoveKeys(), 1);
  EXPECT_EQ(notices_.Until(node_), Texts{}) << "it is not lost";
  move_.End();
  EXPECT_EQ(other_.Do("LOCK.FENCE", key_), Reply::Int(token));
}

TEST_F(NotifyClusterTest, SetsAreNotifiedOnce) {
  const std::string second = "second of {" + key_ + "}";
  MustAcquire(node_, second, "alice");
  EXPECT_EQ(Ask("bob", "1", {"ALSO", "1", second}), Reply::Int(0));
  EXPECT_EQ(node_.Do("LOCK.RELEASE", second, "alice"), Reply::Int(1));
  MustBeGranted(node_, notices_, "1", key_);
  EXPECT_EQ(notices_.Until(node_), Texts{});
}

}  // namespace
}  // namespace turnstile::testing
