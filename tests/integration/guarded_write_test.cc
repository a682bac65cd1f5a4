// LOCK.FENCE … THEN: a command that runs if and only if the token is current, with the rights, the
// protocol and the reply of a command that the caller sent itself. Also FLOOR.

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "support/aof.h"
#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/replication_stream.h"

namespace turnstile::testing {
namespace {

class GuardedWriteTest : public SharedServerTest<GuardedWriteTest> {
 protected:
  // LOCK.FENCE lock token THEN command…, over any connection.
  template <typename Connection>
  static Reply Guard(Connection& connection, const std::string& lock, int64_t token,
                     const Command& command) {
    Command fence = {"LOCK.FENCE", lock, std::to_string(token), "THEN"};
    fence.insert(fence.end(), command.begin(), command.end());
    return connection.Do(fence);
  }

  Reply Guard(int64_t token, const Command& command) {
    return Guard(client_, "job", token, command);
  }

  Client ConnectAs(const std::vector<std::string>& rights) {
    return server().ConnectAs("worker", rights);
  }
};

TEST_F(GuardedWriteTest, CommandRunsForHolder) {
  const int64_t token = MustAcquire(client_, "job", "alice");
  EXPECT_EQ(Guard(token, {"SET", "result", "42"}), Reply::Ok());
  EXPECT_EQ(Guard(token, {"GET", "result"}), Reply::Str("42"));
  EXPECT_EQ(Guard(token, {"INCR", "result"}), Reply::Int(43));
  EXPECT_EQ(Guard(token, {"GET", "nothing"}), Reply::Nil());
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job", token, "then", "echo", "any case"),
            Reply::Str("any case"));
}

TEST_F(GuardedWriteTest, CommandIsRefusedForOtherTokens) {
  const auto refused = [&](const std::string& lock, int64_t token, const std::string& holds) {
    EXPECT_EQ(Guard(client_, lock, token, {"SET", "result", "stale"}),
              Reply::Error("FENCED token " + std::to_string(token) + " does not hold the lock, " +
                           holds));
  };
  refused("job", 7, "no token does");
  const int64_t stale = MustAcquire(client_, "job", "alice");
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "alice"), Reply::Int(1));
  refused("job", stale, "no token does");
  const int64_t token = MustAcquire(client_, "job", "bob");
  refused("job", stale, "token " + std::to_string(token) + " does");
  refused("job", token + 1, "token " + std::to_string(token) + " does");

  client_.Do("SET", "plain", "alice");
  refused("plain", 7, "no token does");
  client_.Do("LPUSH", "list", "x");
  EXPECT_TRUE(Guard(client_, "list", 7, {"SET", "result", "x"}).IsError("WRONGTYPE"));
  EXPECT_EQ(client_.Do("EXISTS", "result"), Reply::Int(0));
}

TEST_F(GuardedWriteTest, EndedOrLingeringHoldIsRefused) {
  const int64_t token = MustAcquire(client_, "job", "alice", 20);
  EXPECT_TRUE(Eventually([&] { return Guard(token, {"PING"}).IsError("FENCED"); }));
  const Reply lingers = client_.Do("LOCK.ACQUIRE", "later", "alice", "PX", 20, "LINGER", kMinute);
  ASSERT_TRUE(lingers.IsInteger());
  EXPECT_TRUE(Eventually(
      [&] { return Guard(client_, "later", lingers.integer, {"PING"}).IsError("FENCED"); }));
  EXPECT_EQ(client_.Do("EXISTS", "later"), Reply::Int(1)) << "still closed";
}

TEST_F(GuardedWriteTest, EverySharedAndLimitedHolderHasItsOwnToken) {
  std::vector<int64_t> tokens;
  for (const char* owner : {"a", "b", "c"}) {
    const Reply reply = client_.Do("LOCK.ACQUIRE", "job", owner, "PX", kMinute, "LIMIT", 3);
    ASSERT_TRUE(reply.IsInteger()) << reply;
    tokens.push_back(reply.integer);
  }
  for (const int64_t token : tokens) EXPECT_EQ(Guard(token, {"PING"}), Reply::Status("PONG"));
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "b"), Reply::Int(1));
  EXPECT_EQ(Guard(tokens[0], {"PING"}), Reply::Status("PONG"));
  EXPECT_EQ(Guard(tokens[1], {"PING"}),
            Reply::Error("FENCED token " + std::to_string(tokens[1]) +
                         " does not hold the lock, token " + std::to_string(tokens[2]) + " does"));
}

TEST_F(GuardedWriteTest, ErrorsOfCommandAreReturned) {
  const int64_t token = MustAcquire(client_, "job", "alice");
  client_.Do("SET", "text", "x");
  for (const Command& command : Commands{{"INCR", "text"},
                                         {"LPUSH", "text", "x"},
                                         {"GET"},
                                         {"GET", "a", "b"},
                                         {"SET", "text", "y", "EX", "0"},
                                         {"LOCK.TOUCH", "job", "alice", "PX", "x"}}) {
    const Reply direct = client_.Do(command);
    EXPECT_TRUE(direct.IsError());
    EXPECT_EQ(Guard(token, command), direct);
  }
  EXPECT_TRUE(Guard(token, {"NOSUCH", "x"}).IsError("ERR unknown command"));
  EXPECT_TRUE(Guard(token, {"CONFIG", "NOSUCH"}).IsError("ERR "));
  EXPECT_TRUE(Guard(token, {std::string("GET\0x", 5), "text"}).IsError("ERR "))
      << "a name ends at no NUL";
  EXPECT_TRUE(Guard(token, {""}).IsError("ERR "));
}

TEST_F(GuardedWriteTest, InvalidSyntaxIsRefused) {
  const int64_t token = MustAcquire(client_, "job", "alice");
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job", token, "THEN"),
            Reply::Error("ERR syntax error: the command after THEN is missing"));
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job", token, "ELSE", "PING"),
            Reply::Error("ERR syntax error at \"ELSE\": expected THEN command [arg ...]"));
  EXPECT_TRUE(client_.Do("LOCK.FENCE", "job", "THEN", "PING").IsError("ERR the token must be"));
  EXPECT_TRUE(client_.Do("LOCK.FENCE", "job", -1, "THEN", "PING").IsError("ERR the token must be"));
}

// The server logs commands that it denies; so does the module for the command after THEN.
TEST_F(GuardedWriteTest, DeniedCommandIsInAclLog) {
  const int64_t token = MustAcquire(client_, "job", "alice");
  Client worker =
      server().ConnectAs("worker", {"~*", "resetchannels", "&mine", "+lock.fence", "+publish",
                                    "+eval", "+multi", "+exec", "(~mine:* +set)"});
  struct Case {
    Command command;
    std::string reason;
    std::string object;
  };
  const std::vector<Case> cases = {{{"GET", "x"}, "command", "GET"},
                                   {{"config", "get", "dir"}, "command", "config"},
                                   {{"SET", "theirs", "1"}, "command", "SET"},
                                   {{"PUBLISH", "theirs", "hello"}, "channel", "theirs"}};
  for (const Case& refused : cases) {
    SCOPED_TRACE(refused.object);
    EXPECT_EQ(client_.Do("ACL", "LOG", "RESET"), Reply::Ok());
    EXPECT_TRUE(Guard(worker, "job", token, refused.command).IsError("NOPERM"));
    const std::vector<Reply> log = client_.Do("ACL", "LOG").elements;
    ASSERT_EQ(log.size(), 1U);
    EXPECT_EQ(log[0].Field("reason"), Reply::Str(refused.reason));
    EXPECT_EQ(log[0].Field("object"), Reply::Str(refused.object));
    EXPECT_EQ(log[0].Field("username"), Reply::Str("worker"));
  }
  EXPECT_EQ(client_.Do("ACL", "LOG", "RESET"), Reply::Ok());
  const std::string script = "return redis.call('LOCK.FENCE', KEYS[1], ARGV[1], 'THEN', 'GET', 7)";
  EXPECT_TRUE(worker.Do("EVAL", script, 1, "job", token).IsError());
  EXPECT_EQ(client_.Do("ACL", "LOG").elements.size(), 1U) << "in a script too";
  EXPECT_EQ(client_.Do("ACL", "LOG", "RESET"), Reply::Ok());
  EXPECT_EQ(Guard(worker, "job", token, {"PUBLISH", "mine", "hello"}), Reply::Int(0));
  EXPECT_EQ(client_.Do("ACL", "LOG"), Reply::Array({}));
}

TEST_F(GuardedWriteTest, NestedThenIsRefused) {
  const int64_t token = MustAcquire(client_, "job", "alice");
  const std::string text = std::to_string(token);
  EXPECT_EQ(Guard(token, {"LOCK.FENCE", "job", text, "THEN", "SET", "x", "1"}),
            Reply::Error("ERR THEN cannot be nested: give the command itself"));
  EXPECT_TRUE(
      Guard(token, {"lock.fence", "job", "1", "then"}).IsError("ERR THEN cannot be nested"));
  EXPECT_EQ(client_.Do("EXISTS", "x"), Reply::Int(0));
  EXPECT_EQ(Guard(token, {"LOCK.FENCE", "job", text}), Reply::Int(1)) << "read only";
  EXPECT_EQ(Guard(token, {"LOCK.FENCE", "job"}), Reply::Int(token));
}

TEST_F(GuardedWriteTest, CommandsThatChangeConnectionAreRefused) {
  const int64_t token = MustAcquire(client_, "job", "alice");
  for (const Command& command :
       Commands{{"MULTI"},
                {"EXEC"},
                {"DISCARD"},
                {"WATCH", "x"},
                {"AUTH", "x"},
                {"HELLO", "3"},
                {"RESET"},
                {"QUIT"},
                {"CLIENT", "REPLY", "OFF"},
                {"SUBSCRIBE", "x"},
                {"MONITOR"},
                {"EVAL", "return 1", "0"},
                {"SHUTDOWN"},
                {"DEBUG", "SLEEP", "0"},
                {"CONFIG", "SET", "maxmemory", "1"},
                {"LOCK.ACQUIRE", "other", "o", "PX", "60000", "SESSION"}}) {
    EXPECT_TRUE(Guard(token, command).IsError("ERR ")) << command[0];
    EXPECT_EQ(client_.Do("PING"), Reply::Status("PONG")) << "in step after " << command[0];
  }
  for (const char* command : {"SELECT", "select", "READONLY", "READWRITE", "ASKING"}) {
    const Reply reply = Guard(token, {command, "3"});
    EXPECT_NE(reply.text.find("is not allowed after THEN"), std::string::npos) << reply;
  }
}

TEST_F(GuardedWriteTest, BlockingCommandsDoNotBlock) {
  const int64_t token = MustAcquire(client_, "job", "alice");
  MustAcquire(client_, "busy", "bob");
  EXPECT_EQ(Guard(token, {"LOCK.ACQUIRE", "busy", "alice", "PX", "1000", "WAIT", "60000"}),
            Reply::Nil());
  for (const Command& command : Commands{{"BLPOP", "empty", "0"}, {"WAIT", "9", "0"}}) {
    const Reply reply = Guard(token, command);
    EXPECT_TRUE(reply.IsNil() || reply.IsInteger() || reply.IsError("ERR ")) << reply;
  }
  EXPECT_EQ(InfoField(client_, "turnstile", "turnstile_waiters"), "0");
}

TEST_F(GuardedWriteTest, CommandMayUseLockItself) {
  const int64_t token = MustAcquire(client_, "job", "alice");
  EXPECT_EQ(Guard(token, {"LOCK.TOUCH", "job", "alice", "PX", "120000"}), Reply::Int(1));
  EXPECT_GT(client_.Do("PTTL", "job").integer, kMinute);
  EXPECT_EQ(Guard(token, {"LOCK.RELEASE", "job", "alice"}), Reply::Int(1));
  EXPECT_EQ(client_.Do("EXISTS", "job"), Reply::Int(0));
  const int64_t next = MustAcquire(client_, "job", "alice");
  EXPECT_EQ(Guard(next, {"DEL", "job"}), Reply::Int(1));
  EXPECT_TRUE(Guard(next, {"PING"}).IsError("FENCED"));
}

TEST_F(GuardedWriteTest, WorksInTransactionsAndScripts) {
  const int64_t token = MustAcquire(client_, "job", "alice");
  client_.Do("MULTI");
  EXPECT_EQ(Guard(token, {"INCR", "n"}), Reply::Queued());
  EXPECT_EQ(Guard(token + 1, {"INCR", "n"}), Reply::Queued());
  const Reply results = client_.Do("EXEC");
  ASSERT_EQ(results.elements.size(), 2U) << results;
  EXPECT_EQ(results.elements[0], Reply::Int(1));
  EXPECT_TRUE(results.elements[1].IsError("FENCED"));

  const std::string script =
      "return redis.call('LOCK.FENCE', KEYS[1], ARGV[1], 'THEN', 'INCR', KEYS[2])";
  EXPECT_EQ(client_.Do("EVAL", script, 2, "job", "n", token), Reply::Int(2));
  EXPECT_TRUE(client_.Do("EVAL", script, 2, "job", "n", token + 1).IsError("FENCED"));
  EXPECT_TRUE(client_.Do("EVAL_RO", script, 2, "job", "n", token).IsError("ERR "))
      << "not in a read-only script";
  EXPECT_EQ(client_.Do("GET", "n"), Reply::Str("2"));
}

TEST_F(GuardedWriteTest, ReplyUsesCallersProtocol) {
  const int64_t token = MustAcquire(client_, "job", "alice");
  client_.Do("HSET", "hash", "field", "value");
  client_.Do("ZADD", "scores", "1.5", "x");
  for (const int version : {2, 3}) {
    RawConnection raw = server().ConnectRaw();
    raw.Hello(version);
    for (const Command& command : Commands{{"HGETALL", "hash"},
                                           {"ZSCORE", "scores", "x"},
                                           {"GET", "nothing"},
                                           {"LOCK.INFO", "none"},
                                           {"COMMAND", "COUNT"},
                                           {"SMEMBERS", "hash"}}) {
      EXPECT_EQ(Guard(raw, "job", token, command), raw.Do(command)) << command[0];
    }
  }
}

// --- Rights -----------------------------------------------------------------------------------

TEST_F(GuardedWriteTest, CommandRunsWithCallersPermissions) {
  const int64_t token = MustAcquire(client_, "job", "alice");
  client_.Do("SET", "mine:1", "1");
  Client worker = ConnectAs(
      {"%R~job", "~mine:*", "resetchannels", "&news", "+lock.fence", "+incr", "+get", "+publish"});
  EXPECT_EQ(Guard(worker, "job", token, {"INCR", "mine:1"}), Reply::Int(2));
  EXPECT_EQ(Guard(worker, "job", token, {"PUBLISH", "news", "x"}), Reply::Int(0));
  for (const Command& command :
       Commands{{"SET", "mine:1", "x"},     // no permission for the command
                {"INCR", "other"},          // no permission for the key
                {"GET", "other"},           // no permission for the key
                {"INCR", "job"},            // permission to read only
                {"PUBLISH", "other", "x"},  // no permission for the channel
                {"CONFIG", "GET", "port"}}) {
    EXPECT_TRUE(Guard(worker, "job", token, command).IsError("NOPERM")) << command[0];
    EXPECT_TRUE(Guard(worker, "job", token + 1, command).IsError("NOPERM"))
        << command[0] << ": rights come before the token";
  }
  EXPECT_TRUE(Guard(worker, "elsewhere", token, {"INCR", "mine:1"}).IsError("NOPERM"));
  EXPECT_EQ(client_.Do("GET", "mine:1"), Reply::Str("2"));
}

TEST_F(GuardedWriteTest, CommandGetKeysReportsAllKeys) {
  const auto keys = [&](Command command) {
    command.insert(command.begin(), {"COMMAND", "GETKEYS", "LOCK.FENCE", "job", "7", "THEN"});
    return client_.Do(command).Texts();
  };
  using Keys = std::vector<std::string>;
  EXPECT_EQ(keys({"SET", "a", "1"}), (Keys{"job", "a"}));
  EXPECT_EQ(keys({"MSET", "a", "1", "b", "2"}), (Keys{"job", "a", "b"}));
  EXPECT_EQ(keys({"PING"}), Keys{"job"});
  EXPECT_EQ(keys({"NOSUCH", "a"}), Keys{"job"});
  EXPECT_EQ(keys({"ZUNIONSTORE", "to", "2", "a", "b"}), (Keys{"job", "a", "b", "to"}));
  EXPECT_EQ(keys({"LOCK.ACQUIRE", "a", "o", "PX", "1", "ALSO", "1", "b"}), (Keys{"job", "a", "b"}));
  EXPECT_EQ(keys({"LOCK.FENCE", "a"}), (Keys{"job", "a"}));
  EXPECT_EQ(keys({"LOCK.FENCE", "a", "7", "THEN", "SET", "b", "1"}), (Keys{"job", "a"}));
  EXPECT_EQ(client_.Do("COMMAND", "GETKEYS", "LOCK.FENCE", "job"),
            Reply::Array({Reply::Str("job")}));

  const Reply flags =
      client_.Do("COMMAND", "GETKEYSANDFLAGS", "LOCK.FENCE", "job", "7", "THEN", "SET", "a", "1");
  ASSERT_EQ(flags.elements.size(), 2U) << flags;
  EXPECT_EQ(flags.elements[0].elements[1].Texts(), (Keys{"RO", "access"}));
  EXPECT_EQ(
      flags.elements[1].elements[1].Texts(),
      client_.Do("COMMAND", "GETKEYSANDFLAGS", "SET", "a", "1").elements[0].elements[1].Texts());
}

TEST_F(GuardedWriteTest, HugeRequestsAreHandled) {
  constexpr size_t kArguments = 300'000;
  Command nested;
  while (nested.size() < kArguments) {
    nested.insert(nested.end(), {"LOCK.FENCE", "job", "7", "THEN"});
  }
  EXPECT_TRUE(client_.Do(nested).IsError("ERR THEN cannot be nested"));
  Command wide = {"LOCK.FENCE", "job", "7", "THEN", "MGET"};
  wide.resize(kArguments, "key");
  EXPECT_TRUE(client_.Do(wide).IsError("FENCED"));
  const int64_t token = MustAcquire(client_, "job", "alice");
  wide[2] = std::to_string(token);
  EXPECT_EQ(client_.Do(wide).elements.size(), kArguments - 5);
}

TEST_F(GuardedWriteTest, MemoryLimitAppliesAsToCommandItself) {
  const int64_t token = MustAcquire(client_, "job", "alice");
  client_.Do("SET", "x", "1");
  EXPECT_EQ(client_.Do("CONFIG", "SET", "maxmemory", "1"), Reply::Ok());
  EXPECT_TRUE(Guard(token, {"SET", "x", "2"}).IsError("OOM"));
  EXPECT_EQ(Guard(token, {"GET", "x"}), Reply::Str("1"));
  EXPECT_EQ(Guard(token, {"DEL", "x"}), Reply::Int(1));
  EXPECT_EQ(client_.Do("CONFIG", "SET", "maxmemory", "0"), Reply::Ok());
}

// --- Replication ------------------------------------------------------------------------------

TEST_F(GuardedWriteTest, OnlyEffectOfCommandIsReplicated) {
  const int64_t token = MustAcquire(client_, "job", "alice");
  ReplicationStream stream(server().port());
  Guard(token, {"SET", "x", "1"});
  Guard(token, {"GET", "x"});
  Guard(token + 1, {"SET", "x", "stale"});
  Guard(token, {"INCR", "y"});
  Guard(token, {"LOCK.RELEASE", "job", "alice"});
  const std::vector<Command> expected = {
      {"SET", "x", "1"}, {"INCR", "y"}, {"LOCK.RELEASE", "job", "alice"}};
  EXPECT_EQ(stream.Until(client_), expected);
}

TEST(GuardedWriteServerTest, ReplicaRefuses) {
  Server server;
  Client client = server.Connect();
  const int64_t token = MustAcquire(client, "job", "alice");
  EXPECT_EQ(client.Do("REPLICAOF", "127.0.0.1", 1), Reply::Ok());
  EXPECT_EQ(client.Do("CONFIG", "SET", "replica-read-only", "no"), Reply::Ok());
  EXPECT_TRUE(client.Do("LOCK.FENCE", "job", token, "THEN", "SET", "x", "1").IsError("READONLY"));
  EXPECT_EQ(client.Do("EXISTS", "x"), Reply::Int(0));
}

// Another module calls without a user.
TEST(GuardedWriteServerTest, CallFromModuleWithoutUserIsDenied) {
  Server server({.args = {"--loadmodule", TURNSTILE_FORWARDER_MODULE}});
  Client client = server.Connect();
  const Reply token = client.Do("FORWARD", "LOCK.ACQUIRE", "job", "alice", "PX", kMinute);
  ASSERT_TRUE(token.IsInteger()) << token;
  EXPECT_EQ(client.Do("FORWARD", "LOCK.FENCE", "job", token.integer), Reply::Int(1));
  EXPECT_TRUE(client.Do("FORWARD", "LOCK.FENCE", "job", token.integer, "THEN", "SET", "x", "1")
                  .IsError("NOPERM"));
  EXPECT_EQ(client.Do("FORWARD", "LOCK.ACQUIRE", "job", "bob", "PX", kMinute, "WAIT", kMinute),
            Reply::Nil())
      << "one try";
  EXPECT_TRUE(client.Do("FORWARD", "LOCK.ACQUIRE", "other", "bob", "PX", kMinute, "SESSION")
                  .IsError("ERR SESSION requires a connection"));
  EXPECT_EQ(client.Do("FORWARD", "LOCK.RELEASE", "job", "alice"), Reply::Int(1));
  EXPECT_EQ(client.Do("EXISTS", "x"), Reply::Int(0));
}

TEST(GuardedWriteServerTest, InClusterAllKeysMustBeInOneSlot) {
  Server server({.args = {"--cluster-enabled", "yes"}});
  Client client = server.Connect();
  EXPECT_EQ(client.Do("CLUSTER", "ADDSLOTSRANGE", 0, 16383), Reply::Ok());
  ASSERT_TRUE(Eventually([&] {
    return client.Do("CLUSTER", "INFO").text.find("cluster_state:ok") != std::string::npos;
  }));
  const int64_t token = MustAcquire(client, "{a}job", "alice");
  EXPECT_EQ(client.Do("LOCK.FENCE", "{a}job", token, "THEN", "SET", "{a}x", "1"), Reply::Ok());
  EXPECT_TRUE(
      client.Do("LOCK.FENCE", "{a}job", token, "THEN", "SET", "{b}x", "1").IsError("CROSSSLOT"));
  EXPECT_EQ(client.Do("EXISTS", "{b}x"), Reply::Int(0));
}

// --- FLOOR ------------------------------------------------------------------------------------

class FloorTest : public SharedServerTest<FloorTest> {
 protected:
  Reply Acquire(const std::string& key, const std::string& owner, int64_t floor) {
    return client_.Do("LOCK.ACQUIRE", key, owner, "PX", kMinute, "FLOOR", floor);
  }
  // A token far ahead of all issued ones, but within the bounds.
  int64_t Ahead() {
    return std::stoll(InfoField(client_, "turnstile", "turnstile_last_token")) + 1000000;
  }
};

TEST_F(FloorTest, NewTokenIsAtLeastFloor) {
  const int64_t low = MustAcquire(client_, "low", "alice");
  EXPECT_GT(Acquire("a", "alice", 1).integer, low);
  const int64_t floor = Ahead();
  EXPECT_EQ(Acquire("b", "alice", floor), Reply::Int(floor));
  EXPECT_GT(MustAcquire(client_, "c", "alice"), floor) << "the clock was raised to it";
}

TEST_F(FloorTest, ReacquireRaisesTokenToFloor) {
  const int64_t token = MustAcquire(client_, "job", "alice");
  EXPECT_EQ(Acquire("job", "alice", token - 5), Reply::Int(token));
  EXPECT_EQ(Acquire("job", "alice", token), Reply::Int(token));
  const int64_t floor = Ahead();
  const Reply before = client_.Do("LOCK.INFO", "job");
  ReplicationStream stream(server().port());
  EXPECT_EQ(Acquire("job", "alice", floor), Reply::Int(floor));
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job", token), Reply::Int(0));
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job", floor), Reply::Int(1));
  const std::vector<Command> replicated = stream.Until(client_);
  ASSERT_EQ(replicated.size(), 1U);
  EXPECT_EQ(NumbersOf(replicated[0]).token, floor);
  EXPECT_GE(HolderField(client_.Do("LOCK.INFO", "job"), "held-ms").integer,
            HolderField(before, "held-ms").integer)
      << "it is still the same hold";
  EXPECT_EQ(Acquire("job", "bob", floor + 1), Reply::Nil()) << "nothing for others";
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job"), Reply::Int(floor));
}

TEST_F(FloorTest, FloorTooFarAheadIsRefused) {
  const int64_t minute = 60'000'000;
  const int64_t now = 1000 * ServerNow(client_);
  const std::string before = InfoField(client_, "turnstile", "turnstile_last_token");
  for (const int64_t floor : {now + minute, (int64_t{1} << 53) - 1}) {
    EXPECT_TRUE(Acquire("job", "alice", floor).IsError("ERR FLOOR is too far ahead"));
  }
  for (const char* floor : {"0", "-1", "9007199254740992", "x", "1.5", ""}) {
    EXPECT_TRUE(client_.Do("LOCK.ACQUIRE", "job", "alice", "PX", 1, "FLOOR", floor)
                    .IsError("ERR FLOOR must be an integer"))
        << floor;
  }
  EXPECT_EQ(client_.Do("LOCK.ACQUIRE", "job", "alice", "PX", 1, "FLOOR", 1, "FLOOR", 1),
            Reply::Error("ERR syntax error: FLOOR is given twice"));
  EXPECT_EQ(InfoField(client_, "turnstile", "turnstile_last_token"), before);
  EXPECT_EQ(client_.Do("EXISTS", "job"), Reply::Int(0));
}

TEST_F(FloorTest, CombinesWithEveryOtherOption) {
  int64_t floor = Ahead();
  EXPECT_EQ(client_.Do("LOCK.ACQUIRE", "a", "o", "PX", kMinute, "FLOOR", floor, "ALSO", 1, "b"),
            Reply::Int(floor));
  EXPECT_EQ(client_.Do("LOCK.FENCE", "b", floor), Reply::Int(1));
  floor += 10;
  EXPECT_EQ(client_.Do("LOCK.ACQUIRE", "a", "o", "PX", kMinute, "ALSO", 1, "b", "FLOOR", floor),
            Reply::Int(floor))
      << "raised in both";
  EXPECT_EQ(client_.Do("LOCK.FENCE", "a"), Reply::Int(floor));
  EXPECT_EQ(client_.Do("LOCK.FENCE", "b"), Reply::Int(floor));

  EXPECT_TRUE(client_.Do("LOCK.ACQUIRE", "s", "r1", "PX", kMinute, "SHARED").IsInteger());
  floor += 10;
  EXPECT_EQ(client_.Do("LOCK.ACQUIRE", "s", "r2", "PX", kMinute, "SHARED", "FLOOR", floor),
            Reply::Int(floor));
  Client waiter = server().Connect();
  floor += 10;
  waiter.Send("LOCK.ACQUIRE", "a", "next", "PX", kMinute, "WAIT", kMinute, "FLOOR", floor);
  ASSERT_TRUE(
      Eventually([&] { return InfoField(client_, "turnstile", "turnstile_waiters") == "1"; }));
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "a", "o"), Reply::Int(1));
  EXPECT_EQ(waiter.Read(), Reply::Int(floor));
}

}  // namespace
}  // namespace turnstile::testing
