// What a primary replicates, and the effect: the exact commands on the wire and in the AOF, and
// real replicas that hold the same locks, also after a failover.

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "support/aof.h"
#include "support/client.h"
#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/ordeals.h"
#include "support/replication_stream.h"
#include "support/reply.h"
#include "support/server.h"

namespace turnstile::testing {
namespace {

const std::vector<std::string> kAof = {"--appendonly", "yes", "--appendfsync", "always"};

std::string LastToken(Client& client) {
  return InfoField(client, "turnstile", "turnstile_last_token");
}

// --- Replicated commands -------------------------------------------------------------------------

// A primary observed in two ways, on the wire and through its AOF.
class ReplicatedCommandsTest : public ::testing::Test {
 protected:
  // The commands replicated since the last call, without SELECT. The AOF and the wire must agree.
  Commands Replicated() {
    Commands stream = stream_.Until(client_);
    const Commands aof = ReadAof(server_.dir());
    Commands news;
    std::copy_if(aof.begin() + known_, aof.end(), std::back_inserter(news),
                 [](const Command& command) { return command[0] != "SELECT"; });
    EXPECT_EQ(news, stream);
    known_ = std::ssize(aof);
    return stream;
  }

  // The fact that `owner` has held `key` since `since`, until the key expires.
  Command Held(const std::string& key, const std::string& owner, int64_t token, int64_t since) {
    return HeldCommand(key, owner, {token, since, EndOf(client_, key)});
  }

  // The time of the grant of a lock with a lease of a minute that was not renewed.
  int64_t SinceOf(const std::string& key) { return EndOf(client_, key) - kMinute; }

  void Multi(const Commands& commands) {
    EXPECT_EQ(client_.Do("MULTI"), Reply::Ok());
    for (const Command& command : commands) EXPECT_EQ(client_.Do(command), Reply::Queued());
    EXPECT_EQ(client_.Do("EXEC").elements.size(), commands.size());
  }

  // Without a margin the clock does not lead, and no floor is replicated after the sync.
  Server server_{{.args = {"--appendonly", "yes", "--appendfsync", "always",
                           "--turnstile.token-margin-ms", "0"}}};
  Client client_ = server_.Connect();
  ReplicationStream stream_{server_.port()};

 private:
  std::ptrdiff_t known_ = std::ssize(ReadAof(server_.dir()));  // size of the AOF before the stream
};

TEST_F(ReplicatedCommandsTest, GrantsRenewalsAndReleasesAreReplicated) {
  const int64_t token = MustAcquire(client_, "job", "me");
  const int64_t since = SinceOf("job");
  EXPECT_EQ(Replicated(), (Commands{Held("job", "me", token, since)}));

  MustAcquire(client_, "job", "me", 50000);
  EXPECT_EQ(Replicated(), (Commands{Held("job", "me", token, since)}));

  EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", "me", "EX", 70), Reply::Int(1));
  EXPECT_EQ(Replicated(), (Commands{Held("job", "me", token, since)}));

  EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "me"), Reply::Int(1));
  EXPECT_EQ(Replicated(), (Commands{{"LOCK.RELEASE", "job", "me"}}));

  const int64_t next = MustAcquire(client_, "job", "you");
  EXPECT_EQ(Replicated(), (Commands{Held("job", "you", next, SinceOf("job"))}));
}

TEST_F(ReplicatedCommandsTest, BinaryKeysAndOwnersAreReplicated) {
  const std::string bytes("\0\r\n*3\xff", 6);
  const int64_t token = MustAcquire(client_, bytes, bytes);
  EXPECT_EQ(Replicated(), (Commands{Held(bytes, bytes, token, SinceOf(bytes))}));
  EXPECT_EQ(client_.Do("LOCK.RELEASE", bytes, bytes), Reply::Int(1));
  EXPECT_EQ(Replicated(), (Commands{{"LOCK.RELEASE", bytes, bytes}}));
}

TEST_F(ReplicatedCommandsTest, RefusedRequestsAreNotReplicated) {
  const int64_t token = MustAcquire(client_, "job", "me");
  client_.Do("SET", "plain", "me");
  client_.Do("RPUSH", "list", "x");
  Replicated();
  EXPECT_EQ(client_.Do("LOCK.ACQUIRE", "job", "you", "PX", 5), Reply::Nil());
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "you"), Reply::Int(0));
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", "you", "PX", 5), Reply::Int(0));
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "free", "me"), Reply::Int(0));
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "free", "me", "PX", 5), Reply::Int(0));
  EXPECT_EQ(client_.Do("LOCK.ACQUIRE", "plain", "you", "PX", 5), Reply::Nil());
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "plain", "you"), Reply::Int(0));
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "plain", "you", "PX", 5), Reply::Int(0));
  EXPECT_TRUE(client_.Do("LOCK.ACQUIRE", "job", "me", "PX", 0).IsError("ERR"));
  EXPECT_TRUE(client_.Do("LOCK.ACQUIRE", "list", "me", "PX", 5).IsError("WRONGTYPE"));
  EXPECT_TRUE(client_.Do("LOCK.RELEASE", "list", "me").IsError("WRONGTYPE"));
  EXPECT_TRUE(client_.Do("LOCK.FACT", "FLOOR", 5).IsError("ERR LOCK.FACT is internal"));
  EXPECT_TRUE(client_.Do("LOCK.HELD", "job", "you", "5 1 2").IsError("ERR LOCK.HELD"));
  EXPECT_TRUE(client_.Do("COPY", "job", "copy").IsError("ERR"));
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job"), Reply::Int(token));
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job", token), Reply::Int(1));
  EXPECT_FALSE(client_.Do("LOCK.INFO", "job").IsError());
  EXPECT_FALSE(client_.Do("LOCK.HELP").IsError());
  EXPECT_EQ(client_.Do("EVAL", "return redis.call('LOCK.RELEASE', KEYS[1], 'you')", 1, "job"),
            Reply::Int(0));
  Multi({{"LOCK.RELEASE", "job", "you"}, {"LOCK.FENCE", "job"}});
  EXPECT_EQ(Replicated(), Commands{});
}

TEST_F(ReplicatedCommandsTest, ChangesToPlainLocksAreReplicated) {
  client_.Do("SET", "plain", "me");
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "plain", "me", "PX", 5000), Reply::Int(1));
  const std::string end = std::to_string(EndOf(client_, "plain"));
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "plain", "me"), Reply::Int(1));
  EXPECT_EQ(Replicated(),
            (Commands{{"SET", "plain", "me"}, {"PEXPIREAT", "plain", end}, {"DEL", "plain"}}));

  // Acquired by its own value, a plain lock becomes a Turnstile lock.
  client_.Do("SET", "plain", "me");
  const int64_t token = MustAcquire(client_, "plain", "me");
  EXPECT_EQ(Replicated(),
            (Commands{{"SET", "plain", "me"}, Held("plain", "me", token, SinceOf("plain"))}));
}

// The command of the other client, then the fact that reverts it.
TEST_F(ReplicatedCommandsTest, RevertedTtlIsReplicated) {
  const int64_t token = MustAcquire(client_, "job", "me");
  const int64_t end = EndOf(client_, "job");
  const Command held = Held("job", "me", token, SinceOf("job"));
  const std::string payload = client_.Do("DUMP", "job").text;
  Replicated();
  const std::string earlier = std::to_string(end - 1000);
  const std::string later = std::to_string(end + 1000);

  const Commands tricks = {{"PERSIST", "job"},
                           {"PEXPIREAT", "job", earlier},
                           {"PEXPIREAT", "job", later},
                           {"RESTORE", "job", "0", payload, "REPLACE"},
                           {"RESTORE", "job", later, payload, "ABSTTL", "REPLACE"}};
  for (const Command& trick : tricks) {
    EXPECT_FALSE(client_.Do(trick).IsError());
    EXPECT_EQ(EndOf(client_, "job"), end);
    EXPECT_EQ(Replicated(), (Commands{trick, held})) << trick[0];
  }
  EXPECT_EQ(client_.Do("EXPIRE", "job", 5), Reply::Int(1));
  Commands replicated = Replicated();
  ASSERT_EQ(replicated.size(), 2U);
  EXPECT_EQ(replicated.at(0).at(0), "PEXPIREAT");
  EXPECT_EQ(replicated.at(1), held);

  Multi({{"PEXPIREAT", "job", later}, {"PERSIST", "job"}});
  EXPECT_EQ(Replicated(),
            (Commands{{"MULTI"}, {"PEXPIREAT", "job", later}, {"PERSIST", "job"}, {"EXEC"}, held}));
  EXPECT_EQ(client_.Do("EVAL", "return redis.call('PERSIST', KEYS[1])", 1, "job"), Reply::Int(1));
  EXPECT_EQ(Replicated(), (Commands{{"PERSIST", "job"}, held}));

  // Commands that leave the TTL unchanged need no revert.
  const Command exact = {"RESTORE", "job", std::to_string(end), payload, "ABSTTL", "REPLACE"};
  EXPECT_EQ(client_.Do(exact), Reply::Ok());
  EXPECT_EQ(client_.Do("PEXPIREAT", "job", later, "LT"), Reply::Int(0));
  EXPECT_EQ(Replicated(), (Commands{exact}));
}

TEST_F(ReplicatedCommandsTest, OrdinaryCommandsAreReplicatedUnchanged) {
  for (const Command& command : {Command{"DEL", "job"}, {"SET", "job", "x"}, {"FLUSHALL"}}) {
    client_.Do("DEL", "job");
    MustAcquire(client_, "job", "me");
    Replicated();
    EXPECT_FALSE(client_.Do(command).IsError());
    EXPECT_EQ(Replicated(), (Commands{command}));
  }
  const int64_t token = MustAcquire(client_, "job", "me");
  Replicated();
  client_.Do("RENAME", "job", "task");
  EXPECT_EQ(Replicated(), (Commands{{"RENAME", "job", "task"}}));
  client_.Do("LOCK.TOUCH", "task", "me", "PX", kMinute);
  EXPECT_EQ(NumbersOf(Replicated().at(0)).token, token);
}

TEST_F(ReplicatedCommandsTest, TransactionsAndScriptsAreReplicated) {
  const int64_t before = MustAcquire(client_, "job", "me");
  client_.Do("LOCK.RELEASE", "job", "me");
  Replicated();
  Multi({{"LOCK.ACQUIRE", "job", "me", "PX", "60000"},
         {"LOCK.ACQUIRE", "job", "you", "PX", "60000"},
         {"LOCK.RELEASE", "job", "me"},
         {"LOCK.ACQUIRE", "job", "you", "PX", "60000"}});
  const Reply fence = client_.Do("LOCK.FENCE", "job");
  Commands replicated = Replicated();
  ASSERT_EQ(replicated.size(), 5U);
  EXPECT_EQ(replicated.at(0), Command{"MULTI"});
  const HeldNumbers first = NumbersOf(replicated.at(1));
  EXPECT_EQ(replicated.at(1), HeldCommand("job", "me", first));
  EXPECT_GT(first.token, before);
  EXPECT_LT(first.token, fence.integer);
  EXPECT_EQ(replicated.at(2), (Command{"LOCK.RELEASE", "job", "me"}));
  EXPECT_EQ(replicated.at(3), Held("job", "you", fence.integer, SinceOf("job")));
  EXPECT_EQ(replicated.at(4), Command{"EXEC"});

  client_.Do("EVAL", "redis.call('LOCK.RELEASE', KEYS[1], 'you')", 1, "job");
  EXPECT_EQ(Replicated(), (Commands{{"LOCK.RELEASE", "job", "you"}}));

  const char* const script = R"(
      local token = redis.call('LOCK.ACQUIRE', KEYS[1], 'me', 'PX', 60000)
      redis.call('SET', KEYS[2], 'done')
      redis.call('LOCK.TOUCH', KEYS[1], 'me', 'PX', 70000)
      return token)";
  const Reply token = client_.Do("EVAL", script, 2, "job", "work");
  ASSERT_TRUE(token.IsInteger()) << token;
  replicated = Replicated();
  ASSERT_EQ(replicated.size(), 5U);
  const int64_t since = NumbersOf(replicated.at(1)).since;
  const Command touched = Held("job", "me", token.integer, since);
  const Command acquired = HeldCommand("job", "me", {token.integer, since, since + kMinute});
  EXPECT_EQ(replicated,
            (Commands{{"MULTI"}, acquired, {"SET", "work", "done"}, touched, {"EXEC"}}));
}

TEST_F(ReplicatedCommandsTest, EndOfLeaseIsReplicatedAsKeyRemoval) {
  const int64_t token = MustAcquire(client_, "job", "me", 20);
  ASSERT_TRUE(Eventually([&] { return client_.Do("DBSIZE") == Reply::Int(0); }));
  const Commands replicated = Replicated();
  ASSERT_EQ(replicated.size(), 2U);
  EXPECT_EQ(NumbersOf(replicated.at(0)).token, token);
  EXPECT_TRUE(
      (replicated.at(1) == Command{"DEL", "job"} || replicated.at(1) == Command{"UNLINK", "job"}));
}

TEST_F(ReplicatedCommandsTest, FactsAreReplicatedInDatabaseOfKey) {
  client_.Do("SELECT", 3);
  MustAcquire(client_, "job", "me");
  EXPECT_EQ(stream_.Next().at(1), "job");
  EXPECT_EQ(stream_.db(), 3);
  // Also if the fact is sent in a later pass of the event loop.
  client_.Do("PERSIST", "job");
  client_.Do("SELECT", 0);
  EXPECT_EQ(stream_.Next(), (Command{"PERSIST", "job"}));
  EXPECT_EQ(stream_.Next().at(0), "LOCK.HELD");
  EXPECT_EQ(stream_.db(), 3);
}

// --- Replicas ------------------------------------------------------------------------------------

// Waits until the replica has applied everything the primary has replicated so far.
void Settle(Client& primary) {
  EXPECT_TRUE(primary.Do("INCR", "settled").IsInteger());
  EXPECT_EQ(primary.Do("WAIT", 1, kPatience.count()), Reply::Int(1));
}

// Through files, because a diskless sync completes only with the replica's next acknowledgement, up
// to a second later.
const std::vector<std::string> kPrimary = {"--repl-diskless-sync", "no"};

// A server that replicates `primary` from its start, so that it never issued a token itself.
ServerOptions ReplicaOf(const Server& primary, std::vector<std::string> args = kPrimary) {
  args.insert(args.end(), {"--replicaof", "127.0.0.1", std::to_string(primary.port())});
  return {.args = args};
}

// Makes a primary a replica.
void Follow(Client& replica, const Server& primary) {
  EXPECT_EQ(replica.Do("REPLICAOF", "127.0.0.1", primary.port()), Reply::Ok());
  AwaitSync(replica);
}

// All keys of all databases have the same values and, here, TTLs.
void ExpectSame(Client& primary, Client& replica, const std::string& when) {
  EXPECT_EQ(replica.Do("DEBUG", "DIGEST"), primary.Do("DEBUG", "DIGEST")) << when;
  const std::vector<std::string> keys = primary.Do("KEYS", "*").Texts();
  for (const std::string& key : keys) {
    EXPECT_EQ(Kept(replica, key), Kept(primary, key)) << Quoted(key) << " " << when;
  }
}

class ReplicaTest : public ::testing::Test {
 protected:
  ReplicaTest() { AwaitSync(copy_); }

  Server primary_{{.args = kPrimary}};
  Server replica_{ReplicaOf(primary_)};
  Client client_ = primary_.Connect();
  Client copy_ = replica_.Connect();
};

TEST_F(ReplicaTest, ReplicaAgreesAfterEveryChange) {
  MustAcquire(client_, "dumped", "me");
  const std::string payload = client_.Do("DUMP", "dumped").text;
  const Commands changes = {
      {"LOCK.ACQUIRE", "job", "me", "PX", "60000"},
      {"LOCK.ACQUIRE", "job", "me", "PX", "50000"},
      {"LOCK.ACQUIRE", "job", "you", "PX", "70000"},
      {"LOCK.TOUCH", "job", "me", "EX", "70"},
      {"EXPIRE", "job", "5"},
      {"PEXPIRE", "job", "99999999"},
      {"PERSIST", "job"},
      {"RENAME", "job", "task"},
      {"SWAPDB", "0", "2"},
      {"LOCK.ACQUIRE", "task", "me", "EX", "80"},
      {"SWAPDB", "0", "2"},
      {"LOCK.ACQUIRE", "job", "me", "PX", "60000"},
      {"LOCK.RELEASE", "job", "me"},
      {"LOCK.ACQUIRE", "job", "you", "PX", "60000"},
      {"SET", "plain", "me", "PX", "60000"},
      {"LOCK.TOUCH", "plain", "me", "PX", "70000"},
      {"LOCK.ACQUIRE", "plain", "me", "PX", "60000"},
      {"LOCK.RELEASE", "plain", "me"},
      {"SET", "plain", "me"},
      {"LOCK.RELEASE", "plain", "me"},
      {"RESTORE", "dumped", "0", payload, "REPLACE"},
      {"RESTORE", "dumped", "5000", payload, "REPLACE"},
      {"RESTORE", "again", "0", payload},
      {"EVAL", "return redis.call('LOCK.ACQUIRE', KEYS[1], 'me', 'EX', 60)", "1", "scripted"},
      {"DEL", "dumped"},
      {"DEBUG", "RELOAD"},
      {"LOCK.TOUCH", "job", "you", "EX", "70"},
      {"SET", "again", "something else"},
      {"FLUSHDB"},
      {"LOCK.ACQUIRE", "job", "me", "PX", "60000"},
      {"FLUSHALL"},
  };
  for (const Command& change : changes) {
    const Reply reply = client_.Do(change);
    EXPECT_FALSE(reply.IsError()) << change[0] << ": " << reply;
    Settle(client_);
    std::string when = "after";
    for (const std::string& word : change) when += " " + Quoted(word);
    ExpectSame(client_, copy_, when);
    EXPECT_EQ(LastToken(copy_), LastToken(client_)) << when;
  }
}

struct Sync {
  const char* name;
  const char* diskless_sync;  // at the primary
  const char* diskless_load;  // at the replica
};

void PrintTo(const Sync& sync, std::ostream* out) { *out << sync.name; }

class FullSyncTest : public ::testing::TestWithParam<Sync> {};

TEST_P(FullSyncTest, TransfersEveryHoldAndReplacesOldData) {
  Server primary(
      {.args = {"--repl-diskless-sync", GetParam().diskless_sync, "--repl-backlog-size", "16384"}});
  Server replica({.args = {"--repl-diskless-load", GetParam().diskless_load}});
  Client client = primary.Connect();
  Client copy = replica.Connect();
  const int64_t token = MustAcquire(client, "job", "me");
  client.Do("LOCK.TOUCH", "job", "me", "PX", 2 * kMinute);
  const std::string bytes("\0\r\n\xff", 4);
  MustAcquire(client, bytes, bytes);
  MustAcquire(copy, "job", "somebody else");
  MustAcquire(copy, "other", "somebody else");
  Follow(copy, primary);
  EXPECT_EQ(Kept(copy, "job").Field("token"), Reply::Int(token));
  ExpectSame(client, copy, "after the first sync");

  // The replica is disconnected for longer than the backlog lasts. It knows the history of the
  // sync, and (with swapdb) keeps serving its data meanwhile.
  replica.Pause();
  client.Do("CLIENT", "KILL", "TYPE", "replica");
  client.Do("LOCK.RELEASE", "job", "me");
  MustAcquire(client, "job", "you");
  for (int i = 0; i < 4; i++) client.Do("SET", "filler", std::string(16384, 'x'));
  replica.Continue();
  const auto full_syncs = [&] { return InfoField(client, "stats", "sync_full"); };
  ASSERT_TRUE(
      Eventually([&] { return full_syncs() == "2" && LinkIsUp(copy); }, Milliseconds{20000}));
  Settle(client);
  ExpectSame(client, copy, "after the second sync");

  // And continues from there.
  client.Do("LOCK.TOUCH", "job", "you", "PX", 3 * kMinute);
  client.Do("LOCK.RELEASE", bytes, bytes);
  Settle(client);
  ExpectSame(client, copy, "after the next changes");
}

INSTANTIATE_TEST_SUITE_P(Every, FullSyncTest,
                         ::testing::Values(Sync{"ThroughFiles", "no", "disabled"},
                                           Sync{"Diskless", "yes", "on-empty-db"},
                                           Sync{"SwapDb", "yes", "swapdb"}),
                         [](const auto& test) { return test.param.name; });

// Separate, because Valkey 8.1 handles it wrongly when a module subscribes to keyspace events: it
// stays in the other database and replicates that (valkey-io/valkey#4024).
TEST_F(ReplicaTest, ReplicaAgreesAfterMove) {
  MustAcquire(client_, "job", "me");
  EXPECT_EQ(client_.Do("MOVE", "job", 2), Reply::Int(1));
  Settle(client_);
  ExpectSame(client_, copy_, "after MOVE");
  for (Client* each : {&client_, &copy_}) each->Do("SELECT", 2);
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", "me", "PX", kMinute), Reply::Int(1));
  Settle(client_);
  ExpectSame(client_, copy_, "in the other database");
}

TEST_F(ReplicaTest, PartialSyncAfterDroppedLink) {
  for (const char* key : {"released", "touched"}) MustAcquire(client_, key, "me");
  Settle(client_);
  replica_.Pause();
  client_.Do("CLIENT", "KILL", "TYPE", "replica");
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "released", "me"), Reply::Int(1));
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "touched", "me", "PX", 2 * kMinute), Reply::Int(1));
  MustAcquire(client_, "new", "me");
  EXPECT_EQ(client_.Do("PERSIST", "touched"), Reply::Int(1));
  replica_.Continue();
  ASSERT_TRUE(Eventually([&] { return InfoField(client_, "stats", "sync_partial_ok") == "1"; }));
  Settle(client_);
  ExpectSame(client_, copy_, "after the partial sync");
  EXPECT_EQ(InfoField(client_, "stats", "sync_full"), "1");
}

TEST(ChainTest, SubReplicasAndAofsGetEveryFact) {
  // Without a margin no floor is replicated.
  std::vector<std::string> args = kPrimary;
  args.insert(args.end(), {"--turnstile.token-margin-ms", "0"});
  Server primary({.args = args});
  Client client = primary.Connect();
  Server replica(ReplicaOf(primary, kAof));
  Client middle = replica.Connect();
  AwaitSync(middle);
  Server last(ReplicaOf(replica, kAof));
  Client leaf = last.Connect();
  AwaitSync(leaf);
  ReplicationStream stream(primary.port());
  ReplicationStream passed_on(replica.port());

  MustAcquire(client, "job", "me");
  client.Do("LOCK.TOUCH", "job", "me", "PX", 2 * kMinute);
  client.Do("PERSIST", "job");
  MustAcquire(client, "gone", "me");
  client.Do("LOCK.RELEASE", "gone", "me");
  client.Do("SET", "plain", "me");
  MustAcquire(client, "plain", "me");
  client.Do("INCR", "end");
  const Commands expected = stream.Until(client);
  EXPECT_EQ(expected.size(), 9U);
  Commands passed;
  while (passed.size() < expected.size()) {
    passed.push_back(passed_on.Next());
    ASSERT_FALSE(passed.back().empty());
  }
  EXPECT_EQ(passed, expected);

  for (Server* server : {&replica, &last}) {
    Client copy = server->Connect();
    ASSERT_TRUE(Eventually([&] { return copy.Do("GET", "end") == Reply::Str("1"); }));
    ExpectSame(client, copy, "while following");
    const Commands aof = ReadAof(server->dir());
    ASSERT_GE(aof.size(), expected.size());
    EXPECT_EQ((Commands{aof.end() - std::ssize(expected), aof.end()}), expected);
  }

  // Without their primary, and with nothing but their AOF.
  last.Kill9();
  replica.Kill9();
  for (Server* server : {&replica, &last}) {
    server->options().args = kAof;
    ASSERT_TRUE(server->Restart());
    Client copy = server->Connect();
    EXPECT_EQ(InfoField(copy, "replication", "role"), "master");
    ExpectSame(client, copy, "after a restart");
    EXPECT_GT(MustAcquire(copy, "new", "me"), std::stoll(LastToken(client)));
  }
}

TEST_F(ReplicaTest, ReplicaServesOnlyReadCommands) {
  const int64_t token = MustAcquire(client_, "job", "me");
  Settle(client_);
  for (const char* read_only : {"yes", "no"}) {
    EXPECT_EQ(copy_.Do("CONFIG", "SET", "replica-read-only", read_only), Reply::Ok());
    const Commands decisions = {{"LOCK.ACQUIRE", "job", "me", "PX", "60000"},
                                {"LOCK.ACQUIRE", "free", "me", "PX", "60000"},
                                {"LOCK.RELEASE", "job", "me"},
                                {"LOCK.RELEASE", "free", "me"},
                                {"LOCK.TOUCH", "job", "me", "PX", "60000"},
                                {"LOCK.FENCE", "job"},
                                {"LOCK.FENCE", "job", std::to_string(token)}};
    for (const Command& command : decisions) {
      EXPECT_TRUE(copy_.Do(command).IsError("READONLY")) << command[0] << " " << read_only;
      Command script = {"EVAL", "return redis.call(unpack(ARGV))", "0"};
      script.insert(script.end(), command.begin(), command.end());
      EXPECT_TRUE(copy_.Do(script).IsError()) << command[0] << " " << read_only;
    }
    const Commands facts = {{"LOCK.FACT", "ENDED", "job", "you"},
                            {"LOCK.FACT", "FLOOR", "9007199254740991"},
                            {"LOCK.HELD", "free", "you", "5 1000 7258118400000"},
                            {"LOCK.HELD", "job", "you", "5 1000 7258118400000"}};
    for (const Command& fact : facts) {
      const std::string refusal =
          std::string_view(read_only) == "yes" ? "READONLY" : "ERR " + fact[0] + " is internal";
      EXPECT_TRUE(copy_.Do(fact).IsError(refusal)) << copy_.Do(fact);
      Command script = {"EVAL", "return redis.call(unpack(ARGV))", "0"};
      script.insert(script.end(), fact.begin(), fact.end());
      EXPECT_TRUE(copy_.Do(script).IsError()) << fact[1] << " " << read_only;
    }
    EXPECT_EQ(copy_.Do("LOCK.HELP"), client_.Do("LOCK.HELP"));
    EXPECT_EQ(copy_.Do("LOCK.INFO", "free"), Reply::Nil());
    EXPECT_EQ(Kept(copy_, "job").Field("token"), Reply::Int(token));
    ExpectSame(client_, copy_, read_only);
  }
  EXPECT_LE(std::stoll(LastToken(copy_)), std::stoll(LastToken(client_)));
}

// A lagging replica receives a release and a renewal when, by its own clock, the lease ended long
// ago. It applies them.
TEST_F(ReplicaTest, ReplicaAppliesFactsWhateverItsClock) {
  for (const char* key : {"released", "touched", "asked again"}) {
    MustAcquire(client_, key, "me", 3000);
  }
  Settle(client_);
  const int64_t end = EndOf(client_, "asked again");
  replica_.Pause();
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "released", "me"), Reply::Int(1));
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "touched", "me", "PX", kMinute), Reply::Int(1));
  MustAcquire(client_, "asked again", "me");
  ASSERT_TRUE(Eventually([&] { return ServerNow(client_) > end; }));
  replica_.Continue();
  Settle(client_);
  EXPECT_EQ(copy_.Do("DBSIZE"), client_.Do("DBSIZE"))
      << "also expired keys that are not removed yet";
  ExpectSame(client_, copy_, "later");
  EXPECT_EQ(Kept(copy_, "touched").Field("owner"), Reply::Str("me"));
  EXPECT_EQ(Kept(copy_, "asked again").Field("owner"), Reply::Str("me"));
}

TEST_F(ReplicaTest, ReplicaRemovesExpiredLockWhenPrimaryDoes) {
  client_.Do("DEBUG", "SET-ACTIVE-EXPIRE", 0);
  MustAcquire(client_, "job", "me", 100);
  Settle(client_);
  ASSERT_TRUE(Eventually([&] { return copy_.Do("LOCK.INFO", "job").IsNil(); }));
  EXPECT_EQ(copy_.Do("DBSIZE"), Reply::Int(2)) << "this and 'settled'";
  client_.Do("DEBUG", "SET-ACTIVE-EXPIRE", 1);
  EXPECT_TRUE(Eventually([&] { return copy_.Do("DBSIZE") == Reply::Int(1); }));
}

// --- Failover ------------------------------------------------------------------------------------

TEST(FailoverTest, PromotedReplicaKeepsLocksAndIssuesLargerTokens) {
  Server primary({.args = kPrimary});
  Server replica(ReplicaOf(primary, kAof));
  Server last(ReplicaOf(replica));
  Client client = primary.Connect();
  Client copy = replica.Connect();
  Client leaf = last.Connect();
  AwaitSync(copy);
  AwaitSync(leaf);
  std::vector<Reply> kept;
  for (const char* key : {"touched", "released", "asked again"}) {
    MustAcquire(client, key, "me");
    kept.push_back(Kept(client, key));
  }
  MustAcquire(client, "free", "me");
  client.Do("LOCK.RELEASE", "free", "me");
  Settle(client);
  const int64_t old_token = std::stoll(LastToken(client));
  EXPECT_EQ(std::stoll(LastToken(copy)), old_token);
  primary.Kill9();

  EXPECT_EQ(copy.Do("REPLICAOF", "NO", "ONE"), Reply::Ok());
  const std::string floor = LastToken(copy);
  EXPECT_GE(std::stoll(floor), old_token + 3'000'000);
  EXPECT_EQ(LastInAof(replica.dir()), (Command{"LOCK.FACT", "FLOOR", floor}));
  EXPECT_EQ(Kept(copy, "touched"), kept.at(0));
  EXPECT_EQ(Kept(copy, "released"), kept.at(1));
  EXPECT_EQ(Kept(copy, "asked again"), kept.at(2));
  // Its own replica receives the floor too.
  EXPECT_TRUE(Eventually([&] { return LastToken(leaf) == floor; })) << LastToken(leaf);

  EXPECT_EQ(copy.Do("LOCK.ACQUIRE", "touched", "you", "PX", kMinute), Reply::Nil());
  EXPECT_EQ(copy.Do("LOCK.TOUCH", "touched", "me", "PX", kMinute), Reply::Int(1));
  EXPECT_EQ(copy.Do("LOCK.RELEASE", "released", "me"), Reply::Int(1));
  EXPECT_EQ(copy.Do("LOCK.ACQUIRE", "asked again", "me", "PX", kMinute), kept.at(2).Field("token"));
  EXPECT_GT(MustAcquire(copy, "released", "you"), std::stoll(floor));
  EXPECT_GT(MustAcquire(copy, "free", "you"), std::stoll(floor));

  // The old primary returns empty, becomes a replica, and is promoted in turn.
  ASSERT_TRUE(primary.Restart());
  client = primary.Connect();
  MustAcquire(client, "touched", "split brain");
  Follow(client, replica);
  EXPECT_TRUE(client.Do("LOCK.TOUCH", "touched", "me", "PX", kMinute).IsError("READONLY"));
  ExpectSame(copy, client, "after the demotion");
  const int64_t second = MustAcquire(copy, "second", "me");
  EXPECT_TRUE(Eventually([&] { return LastToken(client) == LastToken(copy); }));
  EXPECT_EQ(client.Do("REPLICAOF", "NO", "ONE"), Reply::Ok());
  EXPECT_GT(MustAcquire(client, "third", "me"), second);
  EXPECT_EQ(client.Do("LOCK.RELEASE", "touched", "me"), Reply::Int(1));
}

TEST(FailoverTest, CoordinatedFailoverLosesNothing) {
  Server primary({.args = kPrimary});
  Server replica(ReplicaOf(primary));
  Client client = primary.Connect();
  Client copy = replica.Connect();
  AwaitSync(copy);
  const int64_t token = MustAcquire(client, "job", "me");
  const Reply kept = Kept(client, "job");
  EXPECT_EQ(client.Do("FAILOVER"), Reply::Ok());
  ASSERT_TRUE(Eventually([&] {
    return InfoField(copy, "replication", "role") == "master" &&
           InfoField(client, "replication", "role") == "slave" && LinkIsUp(client);
  }));
  EXPECT_EQ(Kept(copy, "job"), kept);
  EXPECT_TRUE(client.Do("LOCK.RELEASE", "job", "me").IsError("READONLY"));
  EXPECT_EQ(copy.Do("LOCK.RELEASE", "job", "me"), Reply::Int(1));
  EXPECT_GT(MustAcquire(copy, "job", "you"), token);
  Settle(copy);
  ExpectSame(copy, client, "after the failover");
  EXPECT_EQ(LastToken(client), LastToken(copy));
}

// A restarted primary continues the history in its RDB file, and so does its replica: the new floor
// is part of the history.
TEST(FailoverTest, RestartedPrimaryReplicatesNewFloor) {
  Server primary({.args = kPrimary});
  Server replica(ReplicaOf(primary, kAof));
  Client client = primary.Connect();
  Client copy = replica.Connect();
  AwaitSync(copy);
  MustAcquire(client, "job", "me");
  Settle(client);
  client.Send("SHUTDOWN", "SAVE");
  EXPECT_EQ(primary.WaitForExit(), 0);
  ASSERT_TRUE(primary.Restart());
  client = primary.Connect();
  ASSERT_TRUE(Eventually([&] { return InfoField(client, "stats", "sync_partial_ok") == "1"; }));
  EXPECT_EQ(InfoField(client, "stats", "sync_full"), "0");
  EXPECT_TRUE(Eventually([&] { return LastToken(copy) == LastToken(client); }))
      << LastToken(copy) << " " << LastToken(client);
  EXPECT_EQ(LastInAof(replica.dir()), (Command{"LOCK.FACT", "FLOOR", LastToken(client)}));
  ExpectSame(client, copy, "after the restart");
}

}  // namespace
}  // namespace turnstile::testing
