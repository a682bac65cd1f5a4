// NOTIFY with replicas and files: nothing of a wait or a channel leaves the memory of the primary.

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "support/aof.h"
#include "support/eventually.h"
#include "support/failover.h"
#include "support/lock_test.h"
#include "support/notices.h"
#include "support/ordeals.h"
#include "support/replication_stream.h"
#include "support/reply.h"
#include "support/server.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

using Owners = std::vector<std::string>;

const std::string kDemotedNotice = "error UNBLOCKED this server is no longer a primary";

TEST(NotifyReplicationTest, OnlyGrantedHoldIsReplicated) {
  Server server({.args = {"--turnstile.token-margin-ms", "0"}});
  Client client = server.Connect();
  Notices notices(server);
  MustAcquire(client, "job", "alice");
  ReplicationStream stream(server.port());
  EXPECT_EQ(client.Do(Notified("job", "bob", notices, "1", {"LINGER", "7"})), Reply::Int(0));
  EXPECT_EQ(client.Do(Notified("job", "bob", notices, "2", {"LINGER", "7"})), Reply::Int(0));
  EXPECT_EQ(notices.Next(), "1 " + kSupersededNotice);
  EXPECT_EQ(client.Do(Acquiring("job", "carol", Notifying(notices.channel(), "3", 20))),
            Reply::Int(0));
  EXPECT_EQ(notices.Next(), "3 timeout job");
  EXPECT_EQ(client.Do(Notified("job", "dave", notices, "4")), Reply::Int(0));
  EXPECT_EQ(client.Do("LOCK.RELEASE", "job", "dave"), Reply::Int(1));
  EXPECT_EQ(notices.Next(), "4 " + kCancelledNotice);
  EXPECT_EQ(stream.Until(client), Commands{}) << "waits change nothing";

  EXPECT_EQ(client.Do("LOCK.RELEASE", "job", "alice"), Reply::Int(1));
  const int64_t token = MustBeGranted(client, notices, "2", "job");
  const Commands written = stream.Until(client);
  ASSERT_EQ(written.size(), 2U);
  EXPECT_EQ(written[0], (Command{"LOCK.RELEASE", "job", "alice"}));
  const HeldNumbers numbers = NumbersOf(written[1]);
  EXPECT_EQ(numbers.token, token);
  EXPECT_EQ(written[1], HeldCommand("job", "bob", numbers, {"LINGER", "7"})) << "and no channel";

  client.Do("DEL", "job");
  EXPECT_EQ(notices.Next(), LostNotice("2", token, "forced", "job"));
  EXPECT_EQ(stream.Until(client), (Commands{{"DEL", "job"}})) << "messages are not replicated";
}

// In scripts and transactions too, where the server replicates what a command did.
TEST(NotifyReplicationTest, WaitsInScriptsAndTransactionsAreNotReplicated) {
  Server server;
  Client client = server.Connect();
  Notices notices(server);
  MustAcquire(client, "job", "alice");
  ReplicationStream stream(server.port());
  client.Do("MULTI");
  client.Do(Notified("job", "bob", notices, "1"));
  EXPECT_EQ(client.Do("EXEC"), Reply::Array({Reply::Int(0)}));
  EXPECT_EQ(client.Do("EVAL",
                      "return redis.call('LOCK.ACQUIRE', 'job', 'carol', 'PX', 9, 'WAIT', 60000, "
                      "'NOTIFY', 'c', '1')",
                      1, "job"),
            Reply::Int(0));
  EXPECT_EQ(stream.Until(client), Commands{});
}

class NotifyFailoverTest : public ::testing::Test {
 protected:
  NotifyFailoverTest() { pair_.AwaitReplica(); }

  Reply Ask(const char* key, const char* owner, const std::string& id,
            const Command& options = {}) {
    return pair_.primary().Do(Notified(key, owner, notices_, id, options));
  }

  Pair pair_;
  Notices notices_{pair_.primary_server()};
};

TEST_F(NotifyFailoverTest, DemotionEndsWaitsWithErrors) {
  Client& old = pair_.primary();
  MustAcquire(old, "job", "alice");
  EXPECT_EQ(Ask("job", "bob", "1"), Reply::Int(0));
  EXPECT_EQ(Ask("job", "carol", "2", {"ALSO", "1", "other"}), Reply::Int(0));
  Waiter dave(pair_.primary_server(), "job", "dave");
  pair_.AwaitReplica();
  pair_.Promote();
  EXPECT_EQ(old.Do("REPLICAOF", "127.0.0.1", kNowhere), Reply::Ok());
  EXPECT_EQ(notices_.Next(), "1 " + kDemotedNotice);
  EXPECT_EQ(notices_.Next(), "2 " + kDemotedNotice);
  EXPECT_TRUE(dave.Read().IsError("UNBLOCKED"));
  EXPECT_EQ(QueuedNow(old), "0");
  EXPECT_EQ(LineOf(old, "job"), Owners{});
  // The new primary knows nothing of them.
  EXPECT_EQ(QueuedNow(pair_.primary()), "0");
  EXPECT_EQ(pair_.primary().Do("LOCK.RELEASE", "job", "bob"), Reply::Int(0));
}

TEST_F(NotifyFailoverTest, BindingsEndSilentlyAtDemotion) {
  Client& old = pair_.primary();
  const int64_t token = Ask("job", "alice", "1").integer;
  const int64_t brief =
      old.Do(Acquiring("brief", "alice", {"NOTIFY", notices_.channel(), "2"}, 2500)).integer;
  EXPECT_TRUE(token > 0 && brief > 0);
  pair_.AwaitReplica();
  const int64_t end = EndOf(old, "brief");
  EXPECT_EQ(old.Do("REPLICAOF", "127.0.0.1", kNowhere), Reply::Ok());
  EXPECT_EQ(old.Do("REPLICAOF", "NO", "ONE"), Reply::Ok());
  EXPECT_EQ(old.Do("DEL", "job"), Reply::Int(1));
  EXPECT_TRUE(Eventually([&] { return ServerNow(old) > end + 50; }));
  EXPECT_EQ(notices_.Until(old), Texts{});
}

// A subscriber of a replica is told nothing and does not count as a receiver.
TEST_F(NotifyFailoverTest, SubscribersOfReplicasDoNotCount) {
  Notices elsewhere(pair_.replica_server(), "far");
  Client& client = pair_.primary();
  MustAcquire(client, "job", "alice");
  EXPECT_EQ(client.Do(Acquiring("job", "bob", Notifying("far", "1"))), Reply::Int(0));
  EXPECT_EQ(Ask("job", "carol", "2"), Reply::Int(0));
  EXPECT_EQ(client.Do("LOCK.RELEASE", "job", "alice"), Reply::Int(1));
  MustBeGranted(client, notices_, "2", "job");
  pair_.AwaitReplica();
  EXPECT_FALSE(elsewhere.HasNext());
}

TEST_F(NotifyFailoverTest, ReplicaAnswersReadonly) {
  EXPECT_TRUE(pair_.replica().Do(Notified("job", "bob", notices_, "1")).IsError("READONLY"));
  Client worker = pair_.replica_server().ConnectAs("worker", {"~*", "resetchannels", "+@all"});
  EXPECT_TRUE(worker.Do(Notified("job", "bob", notices_, "1")).IsError("READONLY"))
      << "before the right to publish";
}

// The hold is an ordinary one on the new primary.
TEST_F(NotifyFailoverTest, GrantedHoldSurvivesFailoverWithoutItsChannel) {
  MustAcquire(pair_.primary(), "job", "alice");
  EXPECT_EQ(Ask("job", "bob", "1", {"REENTRANT"}), Reply::Int(0));
  pair_.primary().Do("LOCK.RELEASE", "job", "alice");
  const int64_t token = MustBeGranted(pair_.primary(), notices_, "1", "job");
  pair_.AwaitReplica();
  pair_.Promote();
  Client& client = pair_.primary();
  Notices there(pair_.primary_server(), notices_.channel());
  EXPECT_EQ(client.Do("LOCK.FENCE", "job"), Reply::Int(token));
  client.Do("DEL", "job");
  EXPECT_EQ(there.Until(client), Texts{});
}

TEST(NotifyRestartTest, WaitsAndBindingsAreNotStored) {
  Server server({.args = Aof("yes")});
  Client client = server.Connect();
  Notices notices(server);
  const int64_t token = client.Do(Notified("job", "alice", notices, "1")).integer;
  EXPECT_GT(token, 0);
  EXPECT_EQ(client.Do(Notified("job", "bob", notices, "2")), Reply::Int(0));
  Crash(server);
  client = server.Connect();
  Notices again(server, notices.channel());
  EXPECT_EQ(QueuedNow(client), "0");
  EXPECT_EQ(HolderOf(client, "job"), "alice");
  EXPECT_EQ(LineOf(client, "job"), Owners{});
  // As a client does after every new subscription.
  EXPECT_EQ(client.Do(Notified("job", "alice", again, "1")), Reply::Int(token));
  EXPECT_EQ(client.Do(Notified("job", "bob", again, "2")), Reply::Int(0));
  EXPECT_EQ(client.Do("DEL", "job"), Reply::Int(1));
  EXPECT_EQ(again.Next(), LostNotice("1", token, "forced", "job"));
  MustBeGranted(client, again, "2", "job");
}

}  // namespace
}  // namespace turnstile::testing
