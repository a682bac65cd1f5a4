// Nothing has to be replicated while there is no consumer: no replica, backlog or AOF. These tests
// are about the moments at which a consumer appears: a replica attaches or reconnects and reads the
// backlog, the AOF is enabled, a slot is exported. Every consumer must end up with the same data.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <iostream>
#include <optional>
#include <ostream>
#include <random>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "support/aof.h"
#include "support/client.h"
#include "support/cluster.h"
#include "support/eventually.h"
#include "support/failover.h"
#include "support/lock_test.h"
#include "support/ordeals.h"
#include "support/reply.h"
#include "support/resp3.h"
#include "support/server.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

constexpr Milliseconds kSyncWithin{20000};

void Append(Command& command, const Command& more) {
  command.insert(command.end(), more.begin(), more.end());
}

// Through files, because a diskless sync completes only with the replica's next acknowledgement, up
// to a second later. Changes are written to the AOF, if not synced, before the client gets its
// reply. The delay makes snapshots of many keys slow.
ServerOptions Options(const Command& more = {}) {
  ServerOptions options{.args = {"--repl-diskless-sync", "no", "--appendfsync", "no",
                                 "--repl-backlog-size", "67108864", "--rdb-key-save-delay", "500"}};
  Append(options.args, more);
  return options;
}

void AddManyKeys(Client& client) { EXPECT_EQ(client.Do("DEBUG", "POPULATE", 800), Reply::Ok()); }

// --- Replication and comparison ------------------------------------------------------------------

void AwaitInfo(Client& client, const char* section, const char* field, const std::string& value) {
  EXPECT_TRUE(Eventually([&] { return InfoField(client, section, field) == value; }, kSyncWithin))
      << client.Do("INFO", section).text;
}

// The number of syncs: "full" or "partial_ok".
int Syncs(Client& primary, const std::string& kind) {
  return std::stoi(InfoField(primary, "stats", "sync_" + kind));
}

void Follow(Client& replica, int port) {
  EXPECT_EQ(replica.Do("REPLICAOF", "127.0.0.1", port), Reply::Ok());
}

// It knows its offset in the primary's history, and may continue from there.
void Leave(Client& replica) { Follow(replica, kNowhere); }

Reply Digest(Client& client) { return client.Do("DEBUG", "DIGEST"); }

// Waits until the replica has applied everything; then its data must equal the primary's.
void ExpectSame(Client& primary, Client& replica) {
  AwaitInfo(replica, "replication", "master_link_status", "up");
  EXPECT_TRUE(Eventually(
      [&] {
        return InfoField(replica, "replication", "slave_repl_offset") ==
               InfoField(primary, "replication", "master_repl_offset");
      },
      kSyncWithin));
  EXPECT_EQ(Digest(replica), Digest(primary));
}

// A server that loads a copy of another server's AOF. It is a replica without a primary, so that it
// does not remove expired keys.
class AofReader {
 public:
  void ExpectSame(const Server& server) {
    Client client = server.Connect();
    // Asked in this order, because a scheduled rewrite becomes one in progress.
    AwaitInfo(client, "persistence", "aof_rewrite_scheduled", "0");
    AwaitInfo(client, "persistence", "aof_rewrite_in_progress", "0");
    EXPECT_EQ(InfoField(client, "persistence", "aof_enabled"), "1");
    EXPECT_EQ(InfoField(client, "persistence", "aof_last_bgrewrite_status"), "ok");
    for (const Command& command : ReadAof(server.dir())) {
      EXPECT_TRUE(command[0] != "LOCK.ACQUIRE" && command[0] != "LOCK.TOUCH") << "not a fact";
    }
    reader_.Stop();
    const std::string from = server.dir() + "/appendonlydir";
    const std::string to = reader_.dir() + "/appendonlydir";
    std::error_code error;
    // The server may still be deleting files that a rewrite has replaced.
    EXPECT_TRUE(Eventually([&] {
      std::filesystem::remove_all(to);
      std::filesystem::copy(from, to, error);
      return !error;
    })) << error.message();
    EXPECT_TRUE(reader_.Restart());
    Client reader = reader_.Connect();
    EXPECT_EQ(Digest(reader), Digest(client));
  }

 private:
  Server reader_{
      Options({"--appendonly", "yes", "--replicaof", "127.0.0.1", std::to_string(kNowhere)})};
};

// --- One after the other -------------------------------------------------------------------------

// Changes locks in every way that is replicated. Each call changes what the previous one left, so
// that no missing change goes unnoticed.
class Changes {
 public:
  explicit Changes(std::string prefix = "") : prefix_(std::move(prefix)) {}

  void Make(const Server& server) {
    Client client = server.Connect();
    const std::string last = std::to_string(calls_);
    const std::string now = std::to_string(++calls_);
    const auto key = [this](const char* name, const std::string& call = "") {
      return prefix_ + name + call;
    };
    EndSession(client);
    session_.emplace(server);
    MustObtain(*session_, Acquiring(key("bound", now), "me", {"SESSION", "LINGER", "60000"}));
    MustAcquire(client, key("handed on", now), "me");
    Waiter heir(server, key("handed on", now), "heir");
    Command script = {"EVAL", "return redis.call(unpack(ARGV))", "0"};
    Append(script, Acquiring(key("scripted", now), "me", {}));
    const Commands changes = {
        {"LOCK.RELEASE", key("handed on", now), "me"},
        Acquiring(key("released", now), "me", {}),
        {"LOCK.RELEASE", key("released", last), "me"},
        Acquiring(key("touched", now), "me", {}),
        {"LOCK.TOUCH", key("touched", last), "me", "PX", "120000"},
        {"PERSIST", key("touched", last)},
        Acquiring(key("counted", now), "me", {"REENTRANT"}),
        Acquiring(key("counted", now), "me", {"REENTRANT"}),
        {"LOCK.RELEASE", key("counted", last), "me"},
        Acquiring(key("shared"), now, {"SHARED", "LINGER", "60000"}),
        {"LOCK.RELEASE", key("shared"), last},
        Acquiring(key("limited"), now, {"LIMIT", "3", "ALSO", "1", key("also", now)}),
        {"LOCK.RELEASE", key("limited"), last, "ALSO", "1", key("also", last)},
        {"MULTI"},
        Acquiring(key("queued", now), "me", {}),
        {"LOCK.RELEASE", key("queued", last), "me"},
        {"EXEC"},
        script,
    };
    for (const Command& change : changes) {
      const Reply reply = client.Do(change);
      EXPECT_FALSE(reply.IsError() || reply.IsNil()) << change[0] << ": " << reply;
    }
    EXPECT_TRUE(heir.Read().IsInteger());
  }

 private:
  void EndSession(Client& client) {
    const std::string life = InfoField(client, "server", "run_id");
    if (session_.has_value()) session_->Close();
    if (session_.has_value() && life == life_) AwaitGone(client, session_->id());
    life_ = life;
  }

  std::string prefix_;
  int calls_ = 0;
  std::optional<Waiter> session_;
  std::string life_;  // the generation of the server that it belongs to
};

class ReplicationConsumersTest : public ::testing::Test {
 protected:
  explicit ReplicationConsumersTest(const Command& args = {}) : primary_(Options(args)) {
    // By now each server has noticed that it has no consumer.
    for (Client* each : {&client_, &copy_}) MustAcquire(*each, "alone", "me");
  }

  // Promotes the replica and requests something from it at once.
  void Promote() {
    RawConnection raw = replica_.ConnectRaw();
    const std::vector<Reply> replies =
        DoAtOnce(raw, {{"REPLICAOF", "NO", "ONE"}, Acquiring("at once", "me", {})});
    EXPECT_TRUE(replies[1].IsInteger()) << replies[1];
    changes_.Make(replica_);
  }

  Server primary_;
  Server replica_{Options()};  // does not replicate yet
  Client client_ = primary_.Connect();
  Client copy_ = replica_.Connect();
  Changes changes_;
};

TEST_F(ReplicationConsumersTest, ReconnectingReplicaGetsMissedChangesFromBacklog) {
  Follow(copy_, primary_.port());
  ExpectSame(client_, copy_);
  for (int returns = 1; returns <= 3; returns++) {
    Leave(copy_);
    AwaitInfo(client_, "replication", "connected_slaves", "0");
    changes_.Make(primary_);
    Follow(copy_, primary_.port());
    ExpectSame(client_, copy_);
    EXPECT_EQ(Syncs(client_, "partial_ok"), returns);
  }
  EXPECT_EQ(Syncs(client_, "full"), 1);
}

TEST_F(ReplicationConsumersTest, ChangesWithoutConsumersComeWithSnapshot) {
  EXPECT_EQ(client_.Do("CONFIG", "SET", "repl-backlog-ttl", 1), Reply::Ok());
  for (int syncs = 1; syncs <= 2; syncs++) {
    changes_.Make(primary_);
    Follow(copy_, primary_.port());
    ExpectSame(client_, copy_);
    EXPECT_EQ(Syncs(client_, "full"), syncs);
    changes_.Make(primary_);
    ExpectSame(client_, copy_);
    Leave(copy_);
    changes_.Make(primary_);
    AwaitInfo(client_, "replication", "repl_backlog_active", "0");
  }
}

// It continues the history stored in its RDB file: there is a backlog before anybody reads it.
TEST_F(ReplicationConsumersTest, RestartedPrimaryHasBacklogAtOnce) {
  // Then no floor is replicated, which might come after the replica has left.
  primary_.options() = Options({"--turnstile.token-margin-ms", "0"});
  ASSERT_TRUE(primary_.Restart());
  client_ = primary_.Connect();
  Follow(copy_, primary_.port());
  changes_.Make(primary_);
  ExpectSame(client_, copy_);
  Leave(copy_);
  client_.Do("SHUTDOWN", "SAVE");
  ASSERT_EQ(primary_.WaitForExit(), 0);
  ASSERT_TRUE(primary_.Restart());
  client_ = primary_.Connect();
  changes_.Make(primary_);
  Follow(copy_, primary_.port());
  ExpectSame(client_, copy_);
  EXPECT_EQ(Syncs(client_, "partial_ok"), 1);
  EXPECT_EQ(Syncs(client_, "full"), 0);
}

// A snapshot that is saved without a fork also stores the replication offset, once there is one: a
// replica waits for its sync.
TEST_F(ReplicationConsumersTest, ReplicaCanStartFromSavedCopy) {
  EXPECT_EQ(
      client_.Do("CONFIG", "SET", "repl-diskless-sync", "yes", "repl-diskless-sync-delay", 600),
      Reply::Ok());
  changes_.Make(primary_);
  Server waiting(Options());
  Client waits = waiting.Connect();
  Follow(waits, primary_.port());
  AwaitInfo(client_, "replication", "connected_slaves", "1");
  EXPECT_EQ(client_.Do("SAVE"), Reply::Ok());
  changes_.Make(primary_);
  replica_.Stop();
  std::filesystem::copy(primary_.dir() + "/dump.rdb", replica_.dir() + "/dump.rdb");
  replica_.options() = Options({"--replicaof", "127.0.0.1", std::to_string(primary_.port())});
  ASSERT_TRUE(replica_.Restart());
  copy_ = replica_.Connect();
  ExpectSame(client_, copy_);
  EXPECT_EQ(Syncs(client_, "partial_ok"), 1);
}

TEST_F(ReplicationConsumersTest, SubReplicaGetsChangesOfPromotedReplica) {
  Server last(Options());
  Client leaf = last.Connect();
  Follow(copy_, primary_.port());
  Follow(leaf, replica_.port());
  changes_.Make(primary_);
  ExpectSame(client_, copy_);
  ExpectSame(client_, leaf);
  Promote();
  ExpectSame(copy_, leaf);
  EXPECT_EQ(Syncs(copy_, "partial_ok"), 1);
}

// It never had replicas, but it has a backlog from the time when it was a replica.
TEST_F(ReplicationConsumersTest, SiblingReplicaGetsChangesOfPromotedReplica) {
  Server sibling(Options());
  Client other = sibling.Connect();
  Follow(copy_, primary_.port());
  Follow(other, primary_.port());
  changes_.Make(primary_);
  ExpectSame(client_, other);
  Leave(other);
  ExpectSame(client_, copy_);
  Promote();
  Follow(other, replica_.port());
  ExpectSame(copy_, other);
  EXPECT_EQ(Syncs(copy_, "partial_ok"), 1);
}

TEST_F(ReplicationConsumersTest, FormerPrimaryGetsChangesOfSuccessor) {
  Follow(copy_, primary_.port());
  changes_.Make(primary_);
  ExpectSame(client_, copy_);
  EXPECT_EQ(client_.Do("FAILOVER"), Reply::Ok());
  // As soon as anything is granted again.
  const Command acquire = Acquiring("at once", "me", {});
  ASSERT_TRUE(Eventually([&] { return copy_.Do(acquire).IsInteger(); }, kSyncWithin));
  changes_.Make(replica_);
  ExpectSame(copy_, client_);
  EXPECT_EQ(Syncs(copy_, "full"), 0);
}

TEST_F(ReplicationConsumersTest, AofHasEverythingSinceItWasEnabled) {
  AofReader aof;
  const Command on = {"CONFIG", "SET", "appendonly", "yes"};
  const Command off = {"CONFIG", "SET", "appendonly", "no"};
  const Command before = Acquiring("before", "me", {});
  const Command after = Acquiring("after", "me", {});
  RawConnection raw = primary_.ConnectRaw();
  for (const Commands& commands : {Commands{before, on, after},
                                   {on, off, before, on, after},
                                   {{"MULTI"}, before, on, after, {"EXEC"}},
                                   {{"MULTI"}, on, off, before, on, after, {"EXEC"}}}) {
    changes_.Make(primary_);
    const Reply last = DoAtOnce(raw, commands).back();
    EXPECT_TRUE((last.IsArray() ? last.elements.back() : last).IsInteger()) << last;
    aof.ExpectSame(primary_);
    EXPECT_EQ(client_.Do(off), Reply::Ok());
    EXPECT_EQ(client_.Do("DEL", "before", "after"), Reply::Int(2));
  }
}

TEST_F(ReplicationConsumersTest, AofHasChangesMadeDuringRewrite) {
  AofReader aof;
  AddManyKeys(client_);
  for (const bool behind_a_snapshot : {false, true}) {
    changes_.Make(primary_);
    if (behind_a_snapshot) {
      EXPECT_FALSE(client_.Do("BGSAVE").IsError());
    }
    EXPECT_EQ(client_.Do("CONFIG", "SET", "appendonly", "yes"), Reply::Ok());
    changes_.Make(primary_);
    AwaitInfo(client_, "persistence", "aof_rewrite_scheduled", "0");
    changes_.Make(primary_);
    aof.ExpectSame(primary_);
    EXPECT_FALSE(client_.Do("BGREWRITEAOF").IsError());
    changes_.Make(primary_);
    aof.ExpectSame(primary_);
    EXPECT_EQ(client_.Do("CONFIG", "SET", "appendonly", "no"), Reply::Ok());
  }
}

// For a full sync a replica disables its AOF and then enables it again.
TEST_F(ReplicationConsumersTest, AofOfReplicaHasReplicatedAndOwnChanges) {
  AofReader aof;
  EXPECT_EQ(copy_.Do("CONFIG", "SET", "appendonly", "yes"), Reply::Ok());
  Follow(copy_, primary_.port());
  ExpectSame(client_, copy_);
  changes_.Make(primary_);
  ExpectSame(client_, copy_);
  aof.ExpectSame(replica_);
  Promote();
  aof.ExpectSame(replica_);
}

// --- During a sync -------------------------------------------------------------------------------

struct Attachment {
  const char* name;
  Command args;
  bool behind_a_snapshot = false;  // one that is not meant for the replica
  const char* two_channels = "no";
};

void PrintTo(const Attachment& attachment, std::ostream* out) { *out << attachment.name; }

class ReplicaAttachTest : public ReplicationConsumersTest,
                          public ::testing::WithParamInterface<Attachment> {
 protected:
  ReplicaAttachTest() : ReplicationConsumersTest(GetParam().args) {
    AddManyKeys(client_);
    changes_.Make(primary_);
    for (Client* each : {&client_, &copy_}) {  // whichever settings the server has
      each->Do("CONFIG", "SET", "dual-channel-replication-enabled", GetParam().two_channels);
      each->Do("CONFIG", "SET", "repl-rdb-channel", GetParam().two_channels);
    }
    if (GetParam().behind_a_snapshot) client_.Do("BGSAVE");
  }
};

TEST_P(ReplicaAttachTest, ReplicaGetsChangesMadeDuringSync) {
  Follow(copy_, primary_.port());
  AwaitInfo(client_, "replication", "connected_slaves", "1");
  changes_.Make(primary_);
  // Now the snapshot has been taken, although perhaps not written yet.
  AwaitInfo(client_, "stats", "total_forks", GetParam().behind_a_snapshot ? "2" : "1");
  changes_.Make(primary_);
  ExpectSame(client_, copy_);
}

// The server handles both requests in one pass of its event loop. The lock must be in the snapshot
// or in the stream that follows.
TEST_P(ReplicaAttachTest, ReplicaGetsGrantMadeRightAfterSyncRequest) {
  RawConnection raw = primary_.ConnectRaw();
  ASSERT_EQ(raw.Do("REPLCONF", "capa", "eof", "capa", "psync2"), Reply::Ok());
  primary_.Pause();
  raw.SendCommand({"PSYNC", "?", "-1"});
  client_.Send(Acquiring("the lock", "me", {}));
  primary_.Continue();
  EXPECT_TRUE(client_.Read().IsInteger());
  ASSERT_TRUE(Eventually(
      [&] {
        return InfoField(client_, "replication", "slave0").find("state=online") !=
               std::string::npos;
      },
      kSyncWithin));
  raw.SendCommand({"REPLCONF", "ACK", "0"});  // expected by the primary after a diskless sync
  client_.Do("PUBLISH", "any", "the end");
  const std::string received = raw.ReadUntil("the end");
  EXPECT_NE(received.find("the lock"), std::string::npos);
  EXPECT_EQ(received.find("LOCK.ACQUIRE"), std::string::npos) << "only facts are replicated";
}

INSTANTIATE_TEST_SUITE_P(
    Every, ReplicaAttachTest,
    ::testing::Values(
        Attachment{"ThroughFiles", {}}, Attachment{"BehindASnapshot", {}, true},
        Attachment{"Diskless", {"--repl-diskless-sync", "yes"}},
        Attachment{"DisklessByTwoChannels", {"--repl-diskless-sync", "yes"}, false, "yes"},
        Attachment{"DisklessBehindASnapshot", {"--repl-diskless-sync", "yes"}, true},
        Attachment{"DisklessWithDelay",
                   {"--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "1"}}),
    [](const auto& test) { return test.param.name; });

// Valkey 9 moves slots in one step. While it exports a slot, the target node is a consumer like a
// replica.
TEST(SlotExportTest, TargetNodeGetsChangesMadeDuringExport) {
  const Command hold = {"DEBUG", "SLOTMIGRATION", "PREVENT-PAUSE", "1"};
  if (Server().Connect().Do(hold).IsError()) return;  // this server cannot export slots
  Cluster cluster({.primaries = 2});
  Client& from = cluster.client(0);
  Client& to = cluster.client(1);
  const std::string key = cluster.KeyOn(0);
  const int64_t slot = cluster.SlotOf(key);
  Changes changes("{" + key + "}");
  changes.Make(cluster.server(0));
  EXPECT_EQ(from.Do(hold), Reply::Ok());
  ASSERT_EQ(from.Do("CLUSTER", "MIGRATESLOTS", "SLOTSRANGE", slot, slot, "NODE", cluster.id(1)),
            Reply::Ok());
  changes.Make(cluster.server(0));
  EXPECT_TRUE(Eventually(
      [&] {
        const Reply migrations = from.Do("CLUSTER", "GETSLOTMIGRATIONS");
        return migrations.elements.at(0).Field("state") == Reply::Str("waiting-to-pause");
      },
      kClusterPatience));
  changes.Make(cluster.server(0));
  const Reply digest = Digest(from);
  EXPECT_EQ(from.Do("DEBUG", "SLOTMIGRATION", "PREVENT-PAUSE", "0"), Reply::Ok());
  EXPECT_TRUE(
      Eventually([&] { return from.Do("EXISTS", key).IsError("MOVED"); }, kClusterPatience));
  EXPECT_EQ(Digest(to), digest);
}

// --- At random times, under load -----------------------------------------------------------------

// Clients that use all commands, including ordinary commands on the keys of locks, until destroyed.
class Load {
 public:
  Load(const Server& server, unsigned seed) {
    for (unsigned i = 0; i < 6; i++) {
      threads_.emplace_back([this, port = server.port(), seed, i] { Call(port, seed + i); });
    }
  }
  ~Load() {
    stops_ = true;
    for (std::thread& thread : threads_) thread.join();
  }
  Load(const Load&) = delete;
  Load& operator=(const Load&) = delete;

 private:
  void Call(int port, unsigned seed) const {
    std::mt19937 random(seed);
    Client client(port);
    while (!stops_) {
      if (random() % 50 == 0) client = Client(port);  // ends the holds bound to the old connection
      Commands commands = {RandomCommand(random)};
      const size_t way = random() % 4;
      if (way == 0) commands = {{"MULTI"}, commands[0], RandomCommand(random), {"EXEC"}};
      if (way == 1) {
        const Command script = {"EVAL", "return redis.pcall(unpack(ARGV))", "0"};
        commands[0].insert(commands[0].begin(), script.begin(), script.end());
      }
      for (const Command& command : commands) client.Send(command);
      for (size_t i = 0; i < commands.size(); i++) {
        const Reply reply = client.Read();
        EXPECT_FALSE(reply.IsError("TIMEOUT:") || reply.IsError("DISCONNECTED:")) << reply;
      }
    }
  }

  static Command RandomCommand(std::mt19937& random) {
    const auto any = [&random](const Commands& choices) {
      return choices[random() % choices.size()];
    };
    // Some locks are contended, and some are used so rarely that a missed change is not soon
    // overwritten.
    const size_t locks = random() % 2 == 0 ? 8 : 1000;
    const std::string key = "key" + std::to_string(random() % locks);
    const std::string other = "key" + std::to_string(random() % locks);
    const std::string owner = "owner" + std::to_string(random() % 5);
    const size_t kind = random() % 10;
    if (kind == 0) {
      return any({{"DEL", key},
                  {"PERSIST", key},
                  {"PEXPIRE", key, "5"},
                  {"RENAME", key, other},
                  {"SET", key, owner, "PX", "20"}});
    }
    const char* const name = kind < 4 ? "LOCK.RELEASE" : kind == 4 ? "LOCK.TOUCH" : "LOCK.ACQUIRE";
    Command command = {name, key, owner};
    if (kind >= 4) Append(command, any({{"PX", "3"}, {"PX", "20"}, {"PX", "200"}, {"EX", "60"}}));
    if (kind > 4) {
      Append(command,
             any({{}, {"SHARED"}, {"SHARED", "REENTRANT"}, {"REENTRANT"}, {"LIMIT", "3"}}));
      Append(command, any({{}, {"SESSION"}, {"LINGER", "10"}, {"WAIT", "5"}, {"WAIT", "20"}}));
    }
    Append(command, any({{}, {}, {}, {"ALSO", "1", other}}));
    return command;
  }

  std::atomic<bool> stops_ = false;
  std::vector<std::thread> threads_;
};

class RandomConsumersTest : public ::testing::TestWithParam<unsigned> {
 protected:
  using Action = void (RandomConsumersTest::*)();

  size_t Below(size_t limit) { return random_() % limit; }
  void LetWork() { LetPass(std::chrono::microseconds(Below(100000))); }

  void ReplicaComesOrGoes() {
    Replica& replica = replicas_[Below(replicas_.size())];
    replica.follows = !replica.follows;
    Follow(replica.client, replica.follows ? primary_.port() : kNowhere);
  }

  void ReplicaLosesItsLink() {
    for (Replica& replica : replicas_) {
      if (!replica.follows || !LinkIsUp(replica.client)) continue;
      const auto syncs = [&] { return Syncs(client_, "full") + Syncs(client_, "partial_ok"); };
      const int before = syncs();
      replica.server.Pause();
      client_.Do("CLIENT", "KILL", "TYPE", "replica");
      LetWork();
      replica.server.Continue();
      EXPECT_TRUE(Eventually([&] { return syncs() > before; }, kSyncWithin));
      return;
    }
  }

  void BacklogIsForgotten() {
    for (Replica& replica : replicas_) {
      if (std::exchange(replica.follows, false)) Leave(replica.client);
    }
    AwaitInfo(client_, "replication", "repl_backlog_active", "0");
    LetPass(std::chrono::seconds{1});  // the module learns this only by polling
    ReplicaComesOrGoes();
  }

  void AofIsTurnedOnOrOff() {
    aof_is_on_ = !aof_is_on_;
    EXPECT_EQ(client_.Do("CONFIG", "SET", "appendonly", aof_is_on_ ? "yes" : "no"), Reply::Ok());
  }

  void AofIsRewritten() { client_.Do("BGREWRITEAOF"); }

  std::vector<Action> ShuffledActions() {
    using This = RandomConsumersTest;
    std::vector<Action> actions(10, &This::ReplicaComesOrGoes);
    actions.insert(actions.end(), 8, &This::ReplicaLosesItsLink);
    actions.insert(actions.end(), 7, &This::AofIsTurnedOnOrOff);
    actions.insert(actions.end(), 3, &This::AofIsRewritten);
    actions.push_back(&This::BacklogIsForgotten);
    std::shuffle(actions.begin(), actions.end(), random_);
    return actions;
  }

  // While no expired key is removed.
  void Compare() {
    EXPECT_EQ(client_.Do("DEBUG", "SET-ACTIVE-EXPIRE", 0), Reply::Ok());
    // The clients' connections are closed, and the holds bound to them have ended.
    AwaitInfo(client_, "clients", "connected_clients", "1");
    client_.Do("PING");
    for (Replica& replica : replicas_) {
      if (replica.follows) ExpectSame(client_, replica.client);
    }
    if (aof_is_on_) aof_.ExpectSame(primary_);
    EXPECT_EQ(client_.Do("DEBUG", "SET-ACTIVE-EXPIRE", 1), Reply::Ok());
  }

  struct Replica {
    Server server{Options()};
    Client client = server.Connect();
    bool follows = false;
  };

  std::mt19937 random_{GetParam()};
  Server primary_{Options({"--repl-diskless-sync", GetParam() % 2 == 0 ? "yes" : "no",
                           "--repl-backlog-ttl", "1", "--rdb-key-save-delay", "100"})};
  Client client_ = primary_.Connect();
  std::array<Replica, 2> replicas_;
  bool aof_is_on_ = false;
  AofReader aof_;
};

TEST_P(RandomConsumersTest, AllConsumersAgreeWheneverTheyAttached) {
  std::vector<Action> actions = ShuffledActions();
  int steps = 0;
  while (!actions.empty() && !HasFailure()) {
    SCOPED_TRACE("seed " + std::to_string(GetParam()) + ", step " + std::to_string(++steps));
    {
      const Load load(primary_, static_cast<unsigned>(random_()));
      for (size_t left = 1 + Below(2); left > 0 && !actions.empty(); left--) {
        LetWork();
        (this->*actions.back())();
        actions.pop_back();
      }
      LetWork();
    }
    Compare();
  }
  EXPECT_GT(Syncs(client_, "partial_ok"), 0);
  std::cout << steps << " steps, " << InfoField(client_, "turnstile", "turnstile_acquired")
            << " grants, " << Syncs(client_, "full") << " full and " << Syncs(client_, "partial_ok")
            << " partial syncs\n";
}

INSTANTIATE_TEST_SUITE_P(Seed, RandomConsumersTest, ::testing::Values(1U, 2U));

}  // namespace
}  // namespace turnstile::testing
