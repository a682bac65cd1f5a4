// A string key counts as a lock held by its value, so that services can migrate from SET key value
// NX PX one at a time.

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "support/eventually.h"
#include "support/failover.h"
#include "support/lock_test.h"
#include "support/replication_stream.h"
#include "support/resp3.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

using namespace std::string_literals;

class PlainLockTest : public SharedServerTest<PlainLockTest> {
 protected:
  Reply Do(const Command& command) { return client_.Do(command); }

  // `owner` takes the lock with SET NX PX.
  void SetPlain(const std::string& owner) {
    EXPECT_EQ(Do({"SET", "job", owner, "NX", "PX", "60000"}), Reply::Ok());
  }
};

// Values that are also valid owners: 1 to 256 bytes, in each encoding of the server.
const std::vector<std::string> kOwners = {
    "alice",
    "7",
    "12345",
    "-1",
    "9223372036854775807",
    "007",
    std::string(44, 'e'),
    std::string(45, 'r'),
    std::string(256, 'x'),
    "\0\r\n\xff"s,
};

TEST_F(PlainLockTest, OtherOwnersAreBlocked) {
  // Including values that no owner can equal: only DEL removes those.
  std::vector<std::string> values = kOwners;
  values.insert(values.end(), {"", std::string(257, 'y'), std::string(300, 'z')});
  ReplicationStream stream(server().port());
  for (const std::string& value : values) {
    SCOPED_TRACE(Quoted(value));
    Do({"DEL", "job"});
    SetPlain(value);
    const int64_t end = EndOf(client_, "job");
    const std::string dump = Do({"DUMP", "job"}).text;
    stream.Until(client_);
    for (const std::string& other : {"bob"s, "1"s, "Alice"s, std::string(256, 'z')}) {
      EXPECT_EQ(Do({"LOCK.ACQUIRE", "job", other, "PX", "1"}), Reply::Nil());
      EXPECT_EQ(Do({"LOCK.RELEASE", "job", other}), Reply::Int(0));
      EXPECT_EQ(Do({"LOCK.TOUCH", "job", other, "PX", "1"}), Reply::Int(0));
    }
    EXPECT_EQ(Do({"LOCK.FENCE", "job"}), Reply::Nil()) << "there is no token";
    EXPECT_EQ(Do({"LOCK.FENCE", "job", "1"}), Reply::Int(0));
    EXPECT_EQ(Do({"GET", "job"}), Reply::Str(value));
    EXPECT_EQ(Do({"DUMP", "job"}).text, dump);
    EXPECT_EQ(EndOf(client_, "job"), end);
    EXPECT_EQ(stream.Until(client_), Commands{});
  }
}

TEST_F(PlainLockTest, OwnerCanReleaseIt) {
  ReplicationStream stream(server().port());
  for (const std::string& owner : kOwners) {
    SCOPED_TRACE(Quoted(owner));
    SetPlain(owner);
    stream.Until(client_);
    EXPECT_EQ(Do({"LOCK.RELEASE", "job", owner}), Reply::Int(1));
    EXPECT_EQ(stream.Until(client_), (Commands{{"DEL", "job"}}));
    EXPECT_EQ(Do({"EXISTS", "job"}), Reply::Int(0));
    EXPECT_EQ(Do({"LOCK.RELEASE", "job", owner}), Reply::Int(0));
  }
}

TEST_F(PlainLockTest, OwnerCanTouchIt) {
  ReplicationStream stream(server().port());
  for (const std::string& owner : kOwners) {
    SCOPED_TRACE(Quoted(owner));
    EXPECT_EQ(Do({"SET", "job", owner}), Reply::Ok());  // no TTL: now it gets one
    stream.Until(client_);
    for (const int64_t lease : {90000, 30000}) {
      const int64_t before = ServerNow(client_);
      EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", owner, "PX", lease), Reply::Int(1));
      const int64_t after = ServerNow(client_);
      const int64_t end = EndOf(client_, "job");
      EXPECT_GE(end, before + lease);
      EXPECT_LE(end, after + lease);
      EXPECT_EQ(stream.Until(client_), (Commands{{"PEXPIREAT", "job", std::to_string(end)}}));
    }
    EXPECT_EQ(Do({"GET", "job"}), Reply::Str(owner));
  }
}

TEST_F(PlainLockTest, OwnersAcquireConvertsIt) {
  MustAcquire(client_, "first", "me");  // the first grant also replicates the token clock's floor
  ReplicationStream stream(server().port());
  for (const std::string& owner : kOwners) {
    SCOPED_TRACE(Quoted(owner));
    Do({"DEL", "job"});
    SetPlain(owner);
    stream.Until(client_);
    const int64_t before = ServerNow(client_);
    const int64_t token = MustAcquire(client_, "job", owner, 90000);
    const int64_t after = ServerNow(client_);
    const int64_t end = EndOf(client_, "job");
    EXPECT_GE(end, before + 90000) << "the lease is the new one";
    EXPECT_LE(end, after + 90000);
    const Commands facts = stream.Until(client_);
    ASSERT_EQ(facts.size(), 1U);
    EXPECT_EQ(facts[0], HeldCommand("job", owner, {token, end - 90000, end}));

    // From now on it is an ordinary lock, and a GET fails.
    EXPECT_EQ(Do({"TYPE", "job"}), Reply::Status("turnstile"));
    EXPECT_EQ(client_.Do("LOCK.FENCE", "job", token), Reply::Int(1));
    EXPECT_TRUE(Do({"GET", "job"}).IsError("WRONGTYPE"));
    EXPECT_EQ(Do({"SET", "job", "bob", "NX", "PX", "1000"}), Reply::Nil());
    EXPECT_EQ(MustAcquire(client_, "job", owner), token);
    EXPECT_EQ(Do({"LOCK.RELEASE", "job", owner}), Reply::Int(1));
  }
}

TEST_F(PlainLockTest, WithoutTtlIsHeldUntilRemoved) {
  EXPECT_EQ(Do({"SET", "job", "alice"}), Reply::Ok());
  EXPECT_EQ(Do({"LOCK.ACQUIRE", "job", "bob", "PX", "1000"}), Reply::Nil());
  EXPECT_EQ(Do({"DEL", "job"}), Reply::Int(1));
  MustAcquire(client_, "job", "bob");
}

TEST_F(PlainLockTest, EndsWithItsTtl) {
  EXPECT_EQ(Do({"SET", "job", "alice", "NX", "PX", "10"}), Reply::Ok());
  EXPECT_TRUE(Eventually([&] {
    return Do({"LOCK.ACQUIRE", "job", "bob", "PX", "60000"}).IsInteger();
  }));
  EXPECT_EQ(Do({"LOCK.RELEASE", "job", "alice"}), Reply::Int(0));
}

TEST_F(PlainLockTest, InfoShowsPlainLock) {
  for (const int version : {2, 3}) {
    RawConnection raw = server().ConnectRaw();
    raw.Hello(version);
    for (const std::string& value : {"alice"s, "12345"s, ""s, std::string(300, 'z')}) {
      SCOPED_TRACE(Quoted(value) + " in RESP" + std::to_string(version));
      const auto expected = [&](const Reply& left) {
        return InfoReply(version, "plain", value, Reply::Nil(), left, Reply::Nil());
      };
      Do({"SET", "job", value});
      EXPECT_EQ(raw.Do("LOCK.INFO", "job"), expected(Reply::Nil()));
      Do({"PEXPIRE", "job", "60000"});
      const Reply info = raw.Do("LOCK.INFO", "job");
      const int64_t left = HolderField(info, "lease-left-ms").integer;
      EXPECT_GT(left, 0);
      EXPECT_LE(left, 60000);
      EXPECT_EQ(info, expected(Reply::Int(left)));
    }
  }
}

// The server shares one object for each small integer. Converting one lock must not affect another.
TEST_F(PlainLockTest, EqualValuesAreIndependentLocks) {
  Do({"MSET", "a", "7", "b", "7", "c", "7"});
  MustAcquire(client_, "a", "7");
  EXPECT_EQ(Do({"LOCK.TOUCH", "b", "7", "PX", "60000"}), Reply::Int(1));
  EXPECT_EQ(Do({"LOCK.RELEASE", "b", "7"}), Reply::Int(1));
  EXPECT_EQ(Do({"GET", "c"}), Reply::Str("7"));
  EXPECT_EQ(Do({"INCR", "c"}), Reply::Int(8));
  EXPECT_EQ(Do({"LOCK.RELEASE", "c", "8"}), Reply::Int(1)) << "the value decides, as it is now";
  EXPECT_EQ(Do({"LOCK.RELEASE", "a", "7"}), Reply::Int(1));
}

// The widespread release scripts keep working for plain locks, and fail with an error on Turnstile
// locks.
TEST_F(PlainLockTest, UsualReleaseScriptKeepsWorking) {
  const std::string script = R"(
    if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
    return 0)";
  const auto release = [&](const char* owner) { return Do({"EVAL", script, "1", "job", owner}); };
  SetPlain("alice");
  EXPECT_EQ(Do({"LOCK.ACQUIRE", "job", "bob", "PX", "60000"}), Reply::Nil());
  EXPECT_EQ(release("alice"), Reply::Int(1));
  MustAcquire(client_, "job", "bob");
  EXPECT_TRUE(release("alice").IsError("WRONGTYPE"));
  EXPECT_EQ(Do({"LOCK.RELEASE", "job", "bob"}), Reply::Int(1));
}

TEST_F(PlainLockTest, WorksInTransactionsAndScripts) {
  ReplicationStream stream(server().port());
  SetPlain("alice");
  stream.Until(client_);
  Do({"MULTI"});
  Do({"LOCK.TOUCH", "job", "alice", "PX", "60000"});
  Do({"PEXPIRETIME", "job"});
  Do({"LOCK.RELEASE", "job", "alice"});
  const Reply results = Do({"EXEC"});
  ASSERT_EQ(results.elements.size(), 3U) << results;
  EXPECT_EQ(results.elements[2], Reply::Int(1));
  const std::string end = std::to_string(results.elements[1].integer);
  EXPECT_EQ(stream.Until(client_),
            (Commands{{"MULTI"}, {"PEXPIREAT", "job", end}, {"DEL", "job"}, {"EXEC"}}));

  SetPlain("alice");
  stream.Until(client_);
  EXPECT_EQ(Do({"EVAL", "return redis.call('LOCK.RELEASE', KEYS[1], 'alice')", "1", "job"}),
            Reply::Int(1));
  EXPECT_EQ(stream.Until(client_), (Commands{{"DEL", "job"}}));
}

// If the command that would change the string is unavailable the module returns an error, changes
// nothing and keeps running.
TEST(PlainLockWithoutCommandTest, ReleaseAndTouchAreRefused) {
  const std::string release = "LOCK.RELEASE of a plain string requires the command DEL, which ";
  const std::string touch = "LOCK.TOUCH of a plain string requires the command PEXPIREAT, which ";
  Server server({.config = "rename-command DEL \"\"\nrename-command PEXPIREAT moved\n"});
  Client client = server.Connect();
  ASSERT_EQ(client.Do("SET", "job", "alice", "PX", 60000), Reply::Ok());
  MustAcquire(client, "lock", "alice");
  const int64_t end = EndOf(client, "job");
  const std::vector<std::string> also[] = {{}, {"ALSO", "1", "lock"}};
  for (const auto& more : also) {
    Command command = {"LOCK.RELEASE", "job", "alice"};
    command.insert(command.end(), more.begin(), more.end());
    EXPECT_TRUE(client.Do(command).IsError("ERR " + release + "this server has disabled"));
    command = {"LOCK.TOUCH", "job", "alice", "PX", "1000"};
    command.insert(command.end(), more.begin(), more.end());
    EXPECT_TRUE(client.Do(command).IsError("ERR " + touch + "this server has disabled"));
  }
  EXPECT_TRUE(client.Do("LOCK.RELEASE", "lock", "alice", "ALSO", 1, "job").IsError("ERR LOCK.REL"));
  EXPECT_EQ(client.Do("GET", "job"), Reply::Str("alice"));
  EXPECT_EQ(EndOf(client, "job"), end);
  EXPECT_TRUE(client.Do("LOCK.FENCE", "lock").IsInteger()) << "nothing was released";
  for (const char* counter : {"released", "touched", "stale_releases", "stale_touches"}) {
    EXPECT_EQ(InfoField(client, "turnstile", std::string("turnstile_") + counter), "0") << counter;
  }
  // Other owners get the usual replies, and the string can be converted to a lock.
  EXPECT_EQ(client.Do("LOCK.RELEASE", "job", "bob"), Reply::Int(0));
  EXPECT_EQ(client.Do("LOCK.TOUCH", "job", "bob", "PX", 1000), Reply::Int(0));
  MustAcquire(client, "job", "alice");
  EXPECT_EQ(client.Do("LOCK.RELEASE", "job", "alice"), Reply::Int(1));
}

TEST_F(PlainLockTest, WaitingReadersEnterWhenItBecomesShared) {
  SetPlain("alice");
  Waiter bob = Waiter::Asking(
      server(), {"LOCK.ACQUIRE", "job", "bob", "PX", "60000", "WAIT", "60000", "SHARED"});
  EXPECT_TRUE(Do({"LOCK.ACQUIRE", "job", "alice", "PX", "60000", "SHARED"}).IsInteger());
  EXPECT_TRUE(bob.Read().IsInteger());
}

TEST_F(PlainLockTest, WatchIsTriggeredOnlyByChanges) {
  Client other = server().Connect();
  const auto aborts = [&](const Command& command) {
    Do({"WATCH", "job"});
    other.Do(command);
    Do({"MULTI"});
    return Do({"EXEC"}).IsNil();
  };
  SetPlain("alice");
  EXPECT_FALSE(aborts({"LOCK.ACQUIRE", "job", "bob", "PX", "60000"}));
  EXPECT_FALSE(aborts({"LOCK.TOUCH", "job", "bob", "PX", "60000"}));
  EXPECT_FALSE(aborts({"LOCK.RELEASE", "job", "bob"}));
  EXPECT_FALSE(aborts({"LOCK.INFO", "job"}));
  EXPECT_TRUE(aborts({"LOCK.TOUCH", "job", "alice", "PX", "60000"}));
  EXPECT_TRUE(aborts({"LOCK.RELEASE", "job", "alice"}));
  SetPlain("alice");
  EXPECT_TRUE(aborts({"LOCK.ACQUIRE", "job", "alice", "PX", "60000"}));
}

// --- turnstile.plain-locks no ------------------------------------------------------------------

class PlainLocksDisabledTest : public SharedWaitingTest<PlainLocksDisabledTest> {
 protected:
  PlainLocksDisabledTest() { SetPlainLocks("no"); }
  ~PlainLocksDisabledTest() override { SetPlainLocks("yes"); }

  void SetPlainLocks(const char* value) {
    EXPECT_EQ(client_.Do("CONFIG", "SET", "turnstile.plain-locks", value), Reply::Ok());
  }

  Reply Do(const Command& command) { return client_.Do(command); }
};

TEST_F(PlainLocksDisabledTest, StringsAreWrongType) {
  Do({"SET", "job", "alice", "PX", "60000"});
  const std::string dump = Do({"DUMP", "job"}).text;
  for (const Command& command : Commands{{"LOCK.ACQUIRE", "job", "alice", "PX", "60000"},
                                         {"LOCK.ACQUIRE", "job", "bob", "PX", "60000", "WAIT", "9"},
                                         {"LOCK.ACQUIRE", "x", "b", "PX", "1", "ALSO", "1", "job"},
                                         {"LOCK.RELEASE", "job", "alice"},
                                         {"LOCK.TOUCH", "job", "alice", "PX", "60000"},
                                         {"LOCK.FENCE", "job"},
                                         {"LOCK.FENCE", "job", "1"},
                                         {"LOCK.FENCE", "job", "1", "THEN", "PING"},
                                         {"LOCK.INFO", "job"}}) {
    EXPECT_TRUE(Do(command).IsError("WRONGTYPE")) << command[0] << ": " << Do(command);
  }
  EXPECT_EQ(Do({"DUMP", "job"}).text, dump);
  EXPECT_EQ(Do({"EXISTS", "x"}), Reply::Int(0));
  SetPlainLocks("yes");
  EXPECT_EQ(Do({"LOCK.RELEASE", "job", "alice"}), Reply::Int(1));
}

TEST_F(PlainLocksDisabledTest, WaiterGetsErrorWhenLockBecomesString) {
  MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob");
  Waiter carol(server(), "job", "carol");
  EXPECT_EQ(Do({"SET", "job", "text"}), Reply::Ok());
  EXPECT_TRUE(bob.Read().IsError("WRONGTYPE"));
  EXPECT_TRUE(carol.Read().IsError("WRONGTYPE"));
  EXPECT_EQ(Do({"GET", "job"}), Reply::Str("text"));
}

TEST_F(PlainLocksDisabledTest, WaiterForStringGetsErrorWhenDisabled) {
  SetPlainLocks("yes");
  Do({"SET", "job", "alice"});
  Waiter bob(server(), "job", "bob");
  Waiter carol(server(), "job", "carol");
  MustAcquire(client_, "lock", "alice");
  Waiter dave(server(), "lock", "dave");
  SetPlainLocks("no");
  EXPECT_TRUE(bob.Read().IsError("WRONGTYPE"));
  EXPECT_TRUE(carol.Read().IsError("WRONGTYPE"));
  EXPECT_EQ(LineOf(client_, "lock"), std::vector<std::string>{"dave"}) << "of a lock, not a string";
  EXPECT_EQ(Do({"LOCK.RELEASE", "lock", "alice"}), Reply::Int(1));
  EXPECT_TRUE(dave.Read().IsInteger());
}

// With plain locks disabled strings are not locks: a replicated lock replaces the string.
TEST(PlainLocksDisabledReplicaTest, ReplicatedLockReplacesString) {
  Pair pair;
  EXPECT_EQ(pair.replica().Do("CONFIG", "SET", "turnstile.plain-locks", "no"), Reply::Ok());
  EXPECT_EQ(pair.primary().Do("SET", "job", "alice"), Reply::Ok());
  const int64_t token = MustAcquire(pair.primary(), "job", "alice");
  pair.AwaitReplica();
  EXPECT_EQ(HolderField(pair.replica().Do("LOCK.INFO", "job"), "token"), Reply::Int(token));
}

}  // namespace
}  // namespace turnstile::testing
