// Cluster nodes that fail, and replicas that replace them.

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "support/client.h"
#include "support/cluster.h"
#include "support/events.h"
#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/reply.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

struct Takeover {
  const char* name;
  Command failover;
};

void PrintTo(const Takeover& takeover, std::ostream* out) { *out << takeover.name; }

class ClusterFailoverTest : public ::testing::TestWithParam<Takeover> {
 protected:
  static constexpr size_t kPrimary = 0;
  static constexpr size_t kReplica = 3;

  // Waits until the replica has applied everything the primary has done so far.
  void AwaitReplica() {
    EXPECT_EQ(cluster_.client(kPrimary).Do("WAIT", 1, kPatience.count()), Reply::Int(1));
  }

  void AwaitRole(size_t node, const char* role) {
    EXPECT_TRUE(Eventually(
        [&] {
          // A node that becomes a replica closes connections.
          if (!cluster_.client(node).connected()) cluster_.Reconnect(node);
          return InfoField(cluster_.client(node), "replication", "role") == role;
        },
        kClusterPatience));
  }

  Cluster cluster_{{.replicas_each = 1}};
};

TEST_P(ClusterFailoverTest, HoldersKeepLocksAndWaitersAreRedirected) {
  Client& primary = cluster_.client(kPrimary);
  const std::string key = cluster_.KeyOn(kPrimary);
  const std::string other = cluster_.KeyOn(kPrimary);
  const int64_t token = MustAcquire(primary, key, "alice");
  const int64_t gone = MustAcquire(primary, other, "alice");
  EXPECT_EQ(primary.Do("LOCK.RELEASE", other, "alice"), Reply::Int(1));
  Waiter bob(cluster_.server(kPrimary), key, "bob");
  AwaitReplica();
  const Reply kept = Kept(primary, key);

  ASSERT_EQ(cluster_.client(kReplica).Do(GetParam().failover), Reply::Ok());
  AwaitRole(kReplica, "master");
  Client& promoted = cluster_.client(kReplica);
  EXPECT_EQ(Kept(promoted, key), kept);

  // bob gets an error that cluster clients handle, or a closed connection.
  const Reply reply = bob.Read(kClusterPatience);
  EXPECT_TRUE(reply.IsError("UNBLOCKED") || reply.IsError("MOVED") || reply.IsError("DISCONNECTED"))
      << reply;
  AwaitRole(kPrimary, "slave");
  const Reply sent_on = cluster_.client(kPrimary).Do("LOCK.FENCE", key);
  EXPECT_EQ(sent_on, Reply::Error("MOVED " + std::to_string(cluster_.SlotOf(key)) + " " +
                                  cluster_.AddressOf(kReplica)));

  cluster_.AwaitOk();
  Waiter bob_again(cluster_.server(kReplica), key, "bob");
  EXPECT_EQ(promoted.Do("LOCK.RELEASE", key, "alice"), Reply::Int(1));
  EXPECT_GT(bob_again.Read().integer, token);
  EXPECT_GT(MustAcquire(promoted, other, "carol"), gone);
}

INSTANTIATE_TEST_SUITE_P(, ClusterFailoverTest,
                         ::testing::Values(Takeover{"Plain", {"CLUSTER", "FAILOVER"}},
                                           Takeover{"Force", {"CLUSTER", "FAILOVER", "FORCE"}},
                                           Takeover{"Takeover",
                                                    {"CLUSTER", "FAILOVER", "TAKEOVER"}}),
                         [](const auto& instance) { return instance.param.name; });

TEST(ClusterCrashTest, ReplicaOfCrashedNodeKeepsItsLocks) {
  Cluster cluster({.replicas_each = 1});
  const std::string key = cluster.KeyOn(0);
  const int64_t token = MustAcquire(cluster.client(0), key, "alice");
  EXPECT_EQ(cluster.client(0).Do("WAIT", 1, kPatience.count()), Reply::Int(1));
  const Reply kept = Kept(cluster.client(0), key);
  cluster.server(0).Kill9();
  EXPECT_TRUE(
      Eventually([&] { return InfoField(cluster.client(3), "replication", "role") == "master"; },
                 kClusterPatience));
  cluster.AwaitOk();
  EXPECT_EQ(Kept(cluster.client(3), key), kept);
  Waiter bob(cluster.server(3), key, "bob");
  EXPECT_EQ(cluster.client(3).Do("LOCK.RELEASE", key, "alice"), Reply::Int(1));
  EXPECT_GT(bob.Read().integer, token);
}

// Some servers answer blocked clients themselves, some leave them blocked for ever.
TEST(ClusterCrashTest, WaitersAreAnsweredWhenClusterGoesDown) {
  Cluster cluster;
  const std::string key = cluster.KeyOn(0);
  MustAcquire(cluster.client(0), key, "alice");
  Waiter bob(cluster.server(0), key, "bob");
  cluster.server(1).Kill9();  // a third of the slots becomes unavailable
  const Reply reply = bob.Read(kClusterPatience);
  EXPECT_TRUE(reply.IsError("CLUSTERDOWN")) << reply;
  EXPECT_EQ(WaitersNow(cluster.client(0)), "0");
  // The lock is still there when the cluster recovers.
  cluster.server(1).Restart();
  cluster.Reconnect(1);
  cluster.AwaitOk();
  EXPECT_EQ(HolderOf(cluster.client(0), key), "alice");
}

// With cluster-require-full-coverage no, unaffected slots keep working.
TEST(ClusterCrashTest, WithoutFullCoverageOtherSlotsKeepWorking) {
  Cluster cluster({.args = {"--cluster-require-full-coverage", "no"}});
  const std::string key = cluster.KeyOn(0);
  const int64_t token = MustAcquire(cluster.client(0), key, "alice");
  Waiter bob(cluster.server(0), key, "bob");
  cluster.server(1).Kill9();
  EXPECT_TRUE(Eventually(
      [&] {
        return cluster.client(0).Do("CLUSTER", "NODES").text.find(",fail ") != std::string::npos ||
               cluster.client(0).Do("CLUSTER", "NODES").text.find("master,fail") !=
                   std::string::npos;
      },
      kClusterPatience));
  EXPECT_EQ(WaitingFor(cluster.client(0), key), 1);
  EXPECT_EQ(cluster.client(0).Do("LOCK.RELEASE", key, "alice"), Reply::Int(1));
  EXPECT_GT(bob.Read().integer, token);
}

// --- Redirections -----------------------------------------------------------------------------

TEST(ClusterTest, EveryCommandIsRedirectedToOwnerOfSlot) {
  Cluster cluster({.primaries = 2});
  const std::string key = cluster.KeyOn(1);
  const std::string moved =
      "MOVED " + std::to_string(cluster.SlotOf(key)) + " " + cluster.AddressOf(1);
  const std::string twin = "{" + key + "}twin";
  const Commands commands = {
      Acquiring(key, "alice", {}),
      Acquiring(key, "alice", {"ALSO", "1", twin}),
      AcquireWaiting(key, "alice"),
      {"LOCK.RELEASE", key, "alice"},
      {"LOCK.RELEASE", key, "alice", "ALSO", "1", twin},
      {"LOCK.TOUCH", key, "alice", "PX", "1000"},
      {"LOCK.FENCE", key},
      {"LOCK.FENCE", key, "1", "THEN", "SET", twin, "x"},
      {"LOCK.INFO", key},
  };
  for (const Command& command : commands) {
    EXPECT_EQ(cluster.client(0).Do(command), Reply::Error(moved)) << command[0];
  }
  const std::string elsewhere = cluster.KeyOn(0);
  const Commands crossing = {
      Acquiring(key, "alice", {"ALSO", "1", elsewhere}),
      {"LOCK.RELEASE", key, "alice", "ALSO", "1", elsewhere},
      {"LOCK.TOUCH", key, "alice", "PX", "1000", "ALSO", "1", elsewhere},
      {"LOCK.FENCE", key, "1", "THEN", "SET", elsewhere, "x"},
      {"LOCK.FENCE", key, "1", "THEN", "LOCK.ACQUIRE", key, "bob", "PX", "1", "ALSO", "1",
       elsewhere},
  };
  for (const Command& command : crossing) {
    for (const size_t node : {size_t{0}, size_t{1}}) {
      const Reply reply = cluster.client(node).Do(command);
      EXPECT_TRUE(reply.IsError("CROSSSLOT")) << reply;
    }
  }
  const int64_t token = MustObtain(cluster.client(1), Acquiring(key, "alice", {"ALSO", "1", twin}));
  EXPECT_EQ(cluster.client(1).Do("LOCK.FENCE", twin, token, "THEN", "SET", twin + "2", "x"),
            Reply::Ok());
}

TEST(ClusterTest, WaitersAreRedirectedToPreferredEndpoint) {
  Cluster cluster({.primaries = 2,
                   .args = {"--cluster-announce-hostname", "locks.example",
                            "--cluster-preferred-endpoint-type", "hostname"}});
  const std::string key = cluster.KeyOn(0);
  const int64_t slot = cluster.SlotOf(key);
  const std::string port = std::to_string(cluster.server(1).port());
  // Hostnames spread with the nodes' pings.
  EXPECT_TRUE(Eventually(
      [&] {
        const std::string nodes = cluster.client(0).Do("CLUSTER", "NODES").text;
        const size_t first = nodes.find("locks.example");
        return first != std::string::npos &&
               nodes.find("locks.example", first + 1) != std::string::npos;
      },
      kClusterPatience));
  const auto moved_to = [&](const char* type) {
    EXPECT_EQ(cluster.client(0).Do("CONFIG", "SET", "cluster-preferred-endpoint-type", type),
              Reply::Ok());
    MustAcquire(cluster.client(0), key, "alice");
    Waiter bob(cluster.server(0), key, "bob");
    EXPECT_EQ(cluster.client(1).Do("CLUSTER", "SETSLOT", slot, "IMPORTING", cluster.id(0)),
              Reply::Ok());
    EXPECT_EQ(cluster.client(1).Do("CLUSTER", "SETSLOT", slot, "NODE", cluster.id(1)), Reply::Ok());
    const Reply reply = bob.Read(kClusterPatience);
    // A call that does not wait gets the same redirection from the server itself.
    EXPECT_EQ(reply, cluster.client(0).Do("LOCK.FENCE", key));
    SlotMove(cluster, slot, 1, 0).Whole();
    cluster.AwaitOk();
    return reply.text;
  };
  const std::string begin = "MOVED " + std::to_string(slot) + " ";
  EXPECT_EQ(moved_to("ip"), begin + "127.0.0.1:" + port);
  EXPECT_EQ(moved_to("hostname"), begin + "locks.example:" + port);
  EXPECT_EQ(moved_to("unknown-endpoint"), begin + ":" + port);
}

// --- Valkey 9: atomic slot migration ----------------------------------------------------------

class AtomicMigrationTest : public ::testing::Test {
 protected:
  bool Offered() {
    const std::vector<std::string> help = old_.Do("CLUSTER", "HELP").Texts();
    for (const std::string& line : help) {
      if (line.starts_with("MIGRATESLOTS")) return true;
    }
    return false;
  }
  // The answer of servers without it.
  void ExpectUnknown() {
    const Reply reply =
        old_.Do("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot_, slot_, "NODE", cluster_.id(1));
    EXPECT_TRUE(reply.IsError("ERR unknown subcommand")) << reply;
  }
  void Migrate(size_t from, size_t to) {
    const Reply reply = cluster_.client(from).Do("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot_,
                                                 slot_, "NODE", cluster_.id(to));
    ASSERT_EQ(reply, Reply::Ok());
    EXPECT_TRUE(Eventually(
        [&] {
          return !cluster_.client(to).Do("LOCK.INFO", key_).IsError("MOVED") &&
                 cluster_.client(from).Do("LOCK.INFO", key_).IsError("MOVED");
        },
        kClusterPatience))
        << cluster_.client(from).Do("CLUSTER", "GETSLOTMIGRATIONS");
    cluster_.AwaitOk();
  }

  Cluster cluster_{{.primaries = 2}};
  const std::string key_ = cluster_.KeyOn(0);
  const int64_t slot_ = cluster_.SlotOf(key_);
  Client& old_ = cluster_.client(0);
  Client& new_ = cluster_.client(1);
};

TEST_F(AtomicMigrationTest, HoldsMoveAndWaitersAreRedirected) {
  if (!Offered()) return ExpectUnknown();
  const int64_t token = MustAcquire(old_, key_, "alice");
  const std::string shared = "{" + key_ + "}shared";
  MustObtain(old_, Acquiring(shared, "alice", {"SHARED", "LINGER", "1000"}));
  MustObtain(old_, Acquiring(shared, "bob", {"SHARED", "REENTRANT"}));
  MustObtain(old_, Acquiring(shared, "bob", {"SHARED", "REENTRANT"}));
  const Reply kept = Kept(old_, key_);
  const Reply kept_shared = Kept(old_, shared);
  Waiter bob(cluster_.server(0), key_, "bob");
  EXPECT_EQ(old_.Do("CONFIG", "SET", "notify-keyspace-events", "Kd"), Reply::Ok());
  EventLog log(cluster_.server(0));
  Migrate(0, 1);
  EXPECT_EQ(log.Until(old_), Texts{}) << "no lock is lost";
  EXPECT_EQ(InfoField(old_, "turnstile", "turnstile_forced"), "0");
  EXPECT_EQ(Kept(new_, key_), kept);
  EXPECT_EQ(Kept(new_, shared), kept_shared);
  EXPECT_EQ(bob.Read(),
            Reply::Error("MOVED " + std::to_string(slot_) + " " + cluster_.AddressOf(1)));
  EXPECT_EQ(MustAcquire(new_, key_, "alice"), token);
  Waiter bob_again(cluster_.server(1), key_, "bob");
  EXPECT_EQ(new_.Do("LOCK.RELEASE", key_, "alice"), Reply::Int(1));
  EXPECT_GT(bob_again.Read().integer, token);
}

TEST_F(AtomicMigrationTest, TokensRiseWhenSlotMovesThereAndBack) {
  if (!Offered()) return ExpectUnknown();
  int64_t last = 0;
  for (int round = 0; round < 3; round++) {
    for (const size_t from : {size_t{0}, size_t{1}}) {
      Client& client = cluster_.client(from);
      const int64_t token = MustAcquire(client, key_, "alice");
      EXPECT_EQ(client.Do("LOCK.RELEASE", key_, "alice"), Reply::Int(1));
      EXPECT_GT(token, last);
      last = token;
      Migrate(from, 1 - from);
    }
  }
}

TEST_F(AtomicMigrationTest, CancelledMigrationKeepsHoldsAndWaiters) {
  if (!Offered()) return ExpectUnknown();
  // Enough data to make the copy take a while.
  const std::string ballast = "{" + key_ + "}ballast";
  ASSERT_EQ(old_.Do("DEBUG", "POPULATE", 200000, ballast, 100), Reply::Ok());
  const int64_t token = MustAcquire(old_, key_, "alice");
  Waiter bob(cluster_.server(0), key_, "bob");
  ASSERT_EQ(old_.Do("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot_, slot_, "NODE", cluster_.id(1)),
            Reply::Ok());
  ASSERT_EQ(old_.Do("CLUSTER", "CANCELSLOTMIGRATIONS"), Reply::Ok());
  EXPECT_EQ(LineOf(old_, key_), std::vector<std::string>{"bob"});
  EXPECT_EQ(old_.Do("LOCK.RELEASE", key_, "alice"), Reply::Int(1));
  EXPECT_GT(bob.Read().integer, token);
}

}  // namespace
}  // namespace turnstile::testing
