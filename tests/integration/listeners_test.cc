// While nobody listens, nothing need be told. These tests are about the moments in which somebody
// begins to: a replica attaches, or comes back for what the backlog has kept, the AOF is turned on,
// a slot is handed over. Whoever listens must end up with the same data, every time.

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

// Through files, because a diskless sync ends only with the replica's next acknowledgement, up to
// a second later. What goes to the AOF is in its file when the client is answered. The delay makes
// snapshots of many keys last.
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

// How many syncs there were: "full" or "partial_ok".
int Syncs(Client& primary, const std::string& kind) {
  return std::stoi(InfoField(primary, "stats", "sync_" + kind));
}

void Follow(Client& replica, int port) {
  EXPECT_EQ(replica.Do("REPLICAOF", "127.0.0.1", port), Reply::Ok());
}

// It knows how far it has got in the primary's history, and may go on from there.
void Leave(Client& replica) { Follow(replica, kNowhere); }

Reply Digest(Client& client) { return client.Do("DEBUG", "DIGEST"); }

// The replica gets all that it is told, and then has all that the primary has.
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

// A server that starts on a copy of another's AOF. It is a replica, if one that hears nothing, so
// that it does not remove keys whose time is over.
class AofReader {
 public:
  void ExpectSame(const Server& server) {
    Client client = server.Connect();
    // In this order, because the one turns into the other.
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
    // The server may still be removing files that a rewrite has replaced.
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

// Changes locks in each of the ways that are told. What one call leaves is changed by the next, so
// that none of it can be missed without a trace.
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
  std::string life_;  // of the server that knows it
};

class ListenersTest : public ::testing::Test {
 protected:
  explicit ListenersTest(const Command& args = {}) : primary_(Options(args)) {
    // By now each of them knows that nobody listens.
    for (Client* each : {&client_, &copy_}) MustAcquire(*each, "alone", "me");
  }

  // The replica becomes a primary, and at once somebody wants something of it.
  void Promote() {
    RawConnection raw = replica_.ConnectRaw();
    const std::vector<Reply> replies =
        DoAtOnce(raw, {{"REPLICAOF", "NO", "ONE"}, Acquiring("at once", "me", {})});
    EXPECT_TRUE(replies[1].IsInteger()) << replies[1];
    changes_.Make(replica_);
  }

  Server primary_;
  Server replica_{Options()};  // it does not follow yet
  Client client_ = primary_.Connect();
  Client copy_ = replica_.Connect();
  Changes changes_;
};

TEST_F(ListenersTest, WhatNoReplicaHeardIsKeptInTheBacklog) {
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

TEST_F(ListenersTest, WhatNobodyHeardComesWithTheSnapshot) {
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

// It goes on with the history that its RDB file tells of: there is a backlog before there is
// anybody to read it.
TEST_F(ListenersTest, ARestartedPrimaryHasABacklogAtOnce) {
  // Then no floor is told, which might come after the replica has left.
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

// A copy that is saved without a fork also tells how far the history has got, once there is one: a
// replica waits for its sync.
TEST_F(ListenersTest, AReplicaBeginsWithASavedCopy) {
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

TEST_F(ListenersTest, APromotedReplicaIsHeardByItsOwnReplica) {
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

// Nobody has ever followed it, but it has a backlog from the time when it followed.
TEST_F(ListenersTest, APromotedReplicaIsHeardByOneThatFollowedWithIt) {
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

TEST_F(ListenersTest, APrimaryThatHandsOverHearsItsSuccessor) {
  Follow(copy_, primary_.port());
  changes_.Make(primary_);
  ExpectSame(client_, copy_);
  EXPECT_EQ(client_.Do("FAILOVER"), Reply::Ok());
  // As soon as it is granted at all.
  const Command acquire = Acquiring("at once", "me", {});
  ASSERT_TRUE(Eventually([&] { return copy_.Do(acquire).IsInteger(); }, kSyncWithin));
  changes_.Make(replica_);
  ExpectSame(copy_, client_);
  EXPECT_EQ(Syncs(copy_, "full"), 0);
}

TEST_F(ListenersTest, TheAofHasAllFromTheMomentItIsTurnedOn) {
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

TEST_F(ListenersTest, TheAofHasWhatChangesWhileItIsWritten) {
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

// For a full sync a replica turns its AOF off and, by itself, on again.
TEST_F(ListenersTest, TheAofOfAReplicaHasWhatItHearsAndWhatItDoesWhenPromoted) {
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
  bool behind_a_snapshot = false;  // which is not meant for the replica
  const char* two_channels = "no";
};

void PrintTo(const Attachment& attachment, std::ostream* out) { *out << attachment.name; }

class AttachmentTest : public ListenersTest, public ::testing::WithParamInterface<Attachment> {
 protected:
  AttachmentTest() : ListenersTest(GetParam().args) {
    AddManyKeys(client_);
    changes_.Make(primary_);
    for (Client* each : {&client_, &copy_}) {  // whichever they know
      each->Do("CONFIG", "SET", "dual-channel-replication-enabled", GetParam().two_channels);
      each->Do("CONFIG", "SET", "repl-rdb-channel", GetParam().two_channels);
    }
    if (GetParam().behind_a_snapshot) client_.Do("BGSAVE");
  }
};

TEST_P(AttachmentTest, TheReplicaHearsWhatChangesMeanwhile) {
  Follow(copy_, primary_.port());
  AwaitInfo(client_, "replication", "connected_slaves", "1");
  changes_.Make(primary_);
  // Now the snapshot has been taken, if not yet written.
  AwaitInfo(client_, "stats", "total_forks", GetParam().behind_a_snapshot ? "2" : "1");
  changes_.Make(primary_);
  ExpectSame(client_, copy_);
}

// The server takes both requests in one pass of its event loop. The lock must be in the snapshot or
// in what follows.
TEST_P(AttachmentTest, AReplicaHearsWhatIsGrantedRightBehindItsRequest) {
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
  raw.SendCommand({"REPLCONF", "ACK", "0"});  // which the primary awaits after a diskless sync
  client_.Do("PUBLISH", "any", "the end");
  const std::string heard = raw.ReadUntil("the end");
  EXPECT_NE(heard.find("the lock"), std::string::npos);
  EXPECT_EQ(heard.find("LOCK.ACQUIRE"), std::string::npos) << "only facts are told";
}

INSTANTIATE_TEST_SUITE_P(
    Every, AttachmentTest,
    ::testing::Values(
        Attachment{"ThroughFiles", {}}, Attachment{"BehindASnapshot", {}, true},
        Attachment{"Diskless", {"--repl-diskless-sync", "yes"}},
        Attachment{"DisklessByTwoChannels", {"--repl-diskless-sync", "yes"}, false, "yes"},
        Attachment{"DisklessBehindASnapshot", {"--repl-diskless-sync", "yes"}, true},
        Attachment{"DisklessWithDelay",
                   {"--repl-diskless-sync", "yes", "--repl-diskless-sync-delay", "1"}}),
    [](const auto& test) { return test.param.name; });

// Valkey 9 moves slots in one step, before which it tells the other node as it tells a replica.
TEST(SlotExportTest, TheOtherNodeHearsWhatChangesMeanwhile) {
  const Command hold = {"DEBUG", "SLOTMIGRATION", "PREVENT-PAUSE", "1"};
  if (Server().Connect().Do(hold).IsError()) return;  // there is no such thing
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

// --- At random moments, under load ---------------------------------------------------------------

// Callers that ask for everything there is, and strangers, for as long as this lives.
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
      if (random() % 50 == 0) client = Client(port);  // what was bound to the old one ends
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
    // Some locks many want, and some so few that what was missed is not soon made good.
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

class RandomListenersTest : public ::testing::TestWithParam<unsigned> {
 protected:
  using Deed = void (RandomListenersTest::*)();

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
    LetPass(
        std::chrono::seconds{1});  // nobody is told when it goes, but may look from time to time
    ReplicaComesOrGoes();
  }

  void AofIsTurnedOnOrOff() {
    aof_is_on_ = !aof_is_on_;
    EXPECT_EQ(client_.Do("CONFIG", "SET", "appendonly", aof_is_on_ ? "yes" : "no"), Reply::Ok());
  }

  void AofIsRewritten() { client_.Do("BGREWRITEAOF"); }

  std::vector<Deed> ShuffledDeeds() {
    using This = RandomListenersTest;
    std::vector<Deed> deeds(10, &This::ReplicaComesOrGoes);
    deeds.insert(deeds.end(), 8, &This::ReplicaLosesItsLink);
    deeds.insert(deeds.end(), 7, &This::AofIsTurnedOnOrOff);
    deeds.insert(deeds.end(), 3, &This::AofIsRewritten);
    deeds.push_back(&This::BacklogIsForgotten);
    std::shuffle(deeds.begin(), deeds.end(), random_);
    return deeds;
  }

  // While no key is removed because its time is over.
  void Compare() {
    EXPECT_EQ(client_.Do("DEBUG", "SET-ACTIVE-EXPIRE", 0), Reply::Ok());
    // The callers' connections are gone, and what was bound to them has ended.
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

TEST_P(RandomListenersTest, AllAgreeWheneverTheyBeganToListen) {
  std::vector<Deed> deeds = ShuffledDeeds();
  int steps = 0;
  while (!deeds.empty() && !HasFailure()) {
    SCOPED_TRACE("seed " + std::to_string(GetParam()) + ", step " + std::to_string(++steps));
    {
      const Load load(primary_, static_cast<unsigned>(random_()));
      for (size_t left = 1 + Below(2); left > 0 && !deeds.empty(); left--) {
        LetWork();
        (this->*deeds.back())();
        deeds.pop_back();
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

INSTANTIATE_TEST_SUITE_P(Seed, RandomListenersTest, ::testing::Values(1U, 2U));

}  // namespace
}  // namespace turnstile::testing
