// What other clients can do to a lock with ordinary commands: remove it, or nothing.

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/replication_stream.h"

namespace turnstile::testing {
namespace {

// Alice holds "job".
class KeyspaceTest : public SharedServerTest<KeyspaceTest> {
 protected:
  Reply Do(const Command& command) { return client_.Do(command); }

  void AliceAcquires() {
    token_ = MustAcquire(client_, "job", "alice");
    end_ = EndOf(client_, "job");
  }
  KeyspaceTest() { AliceAcquires(); }

  // Alice holds `key` until the original end.
  void ExpectHeld(std::string_view key) {
    EXPECT_EQ(client_.Do("LOCK.FENCE", key, token_), Reply::Int(1));
    EXPECT_EQ(EndOf(client_, key), end_);
    EXPECT_EQ(client_.Do("LOCK.ACQUIRE", key, "bob", "PX", 1), Reply::Nil());
    EXPECT_EQ(client_.Do("TYPE", key), Reply::Status("turnstile"));
  }

  // "job" is free: Alice's calls fail, and a new holder gets a larger token.
  void ExpectFree() {
    EXPECT_EQ(Do({"EXISTS", "job"}), Reply::Int(0));
    EXPECT_EQ(Do({"LOCK.FENCE", "job"}), Reply::Nil());
    EXPECT_EQ(client_.Do("LOCK.FENCE", "job", token_), Reply::Int(0));
    EXPECT_EQ(Do({"LOCK.TOUCH", "job", "alice", "PX", "60000"}), Reply::Int(0));
    EXPECT_EQ(Do({"LOCK.RELEASE", "job", "alice"}), Reply::Int(0));
    EXPECT_GT(MustAcquire(client_, "job", "bob"), token_);
    EXPECT_EQ(Do({"LOCK.RELEASE", "job", "bob"}), Reply::Int(1));
  }

  Reply Transaction(const Commands& commands) {
    Do({"MULTI"});
    for (const Command& command : commands) EXPECT_EQ(Do(command), Reply::Queued()) << command[0];
    return Do({"EXEC"});
  }

  // Commands that change the TTL of "job" without removing it.
  Commands TtlChanges() const {
    return {{"PERSIST", "job"},
            {"EXPIRE", "job", "5"},
            {"EXPIRE", "job", "100000"},
            {"EXPIRE", "job", "5", "LT"},
            {"EXPIRE", "job", "100000", "GT"},
            {"PEXPIRE", "job", "5000"},
            {"EXPIREAT", "job", std::to_string(end_ / 1000 + 1000)},
            {"PEXPIREAT", "job", std::to_string(end_ - 1)},
            {"PEXPIREAT", "job", std::to_string(end_ + 1)}};
  }

  int64_t token_ = 0;
  int64_t end_ = 0;
};

// --- Removing ---------------------------------------------------------------------------------

TEST_F(KeyspaceTest, RemovingKeyFreesLock) {
  for (const Command& command : Commands{{"DEL", "job"},
                                         {"UNLINK", "job"},
                                         {"FLUSHDB"},
                                         {"FLUSHDB", "ASYNC"},
                                         {"FLUSHALL"},
                                         {"FLUSHALL", "ASYNC"},
                                         {"EXPIRE", "job", "0"},
                                         {"EXPIRE", "job", "-1"},
                                         {"PEXPIREAT", "job", "1"},
                                         {"EVAL", "return redis.call('DEL', KEYS[1])", "1", "job"},
                                         {"RENAME", "job", "elsewhere"},
                                         {"MOVE", "job", "1"},
                                         {"SWAPDB", "0", "2"}}) {
    SCOPED_TRACE(command[0]);
    AliceAcquires();
    EXPECT_FALSE(Do(command).IsError());
    ExpectFree();
  }
}

TEST_F(KeyspaceTest, OverwritingKeyFreesLock) {
  Do({"SADD", "set", "alice"});
  Do({"SET", "string", "bob"});
  for (const Command& command : Commands{{"SET", "job", "bob"},
                                         {"SET", "job", "bob", "XX", "KEEPTTL"},
                                         {"SETEX", "job", "60", "bob"},
                                         {"MSET", "job", "bob"},
                                         {"COPY", "string", "job", "REPLACE"}}) {
    SCOPED_TRACE(command[0]);
    Do({"DEL", "job"});
    AliceAcquires();
    EXPECT_FALSE(Do(command).IsError());
    // The key is now a plain lock of the client that wrote it.
    EXPECT_EQ(client_.Do("LOCK.FENCE", "job", token_), Reply::Int(0));
    EXPECT_EQ(Do({"LOCK.RELEASE", "job", "alice"}), Reply::Int(0));
    EXPECT_EQ(Do({"GET", "job"}), Reply::Str("bob"));
  }
  Do({"DEL", "job"});
  AliceAcquires();
  EXPECT_EQ(Do({"SUNIONSTORE", "job", "set"}), Reply::Int(1));
  EXPECT_TRUE(Do({"LOCK.RELEASE", "job", "alice"}).IsError("WRONGTYPE"));
}

// --- Changing the TTL -------------------------------------------------------------------------

TEST_F(KeyspaceTest, ChangedTtlIsRevertedAtOnce) {
  for (const Command& change : TtlChanges()) {
    SCOPED_TRACE(change[0] + " " + change.back());
    EXPECT_EQ(Do(change), Reply::Int(1));
    ExpectHeld("job");
  }
}

TEST_F(KeyspaceTest, TtlChangedInTransactionIsReverted) {
  EXPECT_TRUE(Transaction(TtlChanges()).IsArray());
  ExpectHeld("job");
}

TEST_F(KeyspaceTest, TtlChangedInScriptIsReverted) {
  for (const Command& change : TtlChanges()) {
    SCOPED_TRACE(change[0] + " " + change.back());
    Command eval = {"EVAL", "return redis.call(ARGV[1], KEYS[1], unpack(ARGV, 2))", "1", "job",
                    change[0]};
    eval.insert(eval.end(), change.begin() + 2, change.end());
    EXPECT_EQ(Do(eval), Reply::Int(1));
    ExpectHeld("job");
  }
}

TEST_F(KeyspaceTest, ChangedTtlIsRevertedInEveryDatabase) {
  Do({"SELECT", "7"});
  AliceAcquires();
  for (const Command& change : TtlChanges()) {
    EXPECT_EQ(Do(change), Reply::Int(1));
    ExpectHeld("job");
  }
  // Also if it was changed from another database.
  Do({"SELECT", "0"});
  EXPECT_EQ(
      Do({"EVAL", "redis.call('SELECT', 7) return redis.call('PERSIST', KEYS[1])", "1", "job"}),
      Reply::Int(1));
  Do({"SELECT", "7"});
  ExpectHeld("job");
}

TEST_F(KeyspaceTest, RevertedTtlIsReplicatedOnce) {
  Do({"DEL", "job"});
  ReplicationStream stream(server().port());
  AliceAcquires();
  const Command fact = stream.Next();
  EXPECT_EQ(NumbersOf(fact).end, end_);
  stream.Until(client_);

  Do({"PERSIST", "job"});
  EXPECT_EQ(stream.Until(client_), (Commands{{"PERSIST", "job"}, fact}));
  Transaction({{"PERSIST", "job"}, {"EXPIRE", "other", "5"}, {"PERSIST", "job"}});
  EXPECT_EQ(stream.Until(client_), (Commands{{"PERSIST", "job"}, fact}));
  const std::string end = std::to_string(end_);
  Do({"PEXPIREAT", "job", end});
  EXPECT_EQ(stream.Until(client_), (Commands{{"PEXPIREAT", "job", end}})) << "nothing to revert";
  Do({"EXPIRE", "job", "5", "GT"});
  EXPECT_EQ(stream.Until(client_), Commands{}) << "nothing was changed";

  Do({"SELECT", "3"});
  AliceAcquires();
  stream.Until(client_);
  Do({"PERSIST", "job"});
  EXPECT_EQ(stream.Next(), (Command{"PERSIST", "job"}));
  EXPECT_EQ(NumbersOf(stream.Next()).end, end_);
  EXPECT_EQ(stream.db(), 3);
}

// The TTL change and the move arrive before the server can revert the TTL.
TEST_F(KeyspaceTest, ChangedTtlIsRevertedAfterLockMoved) {
  for (const Command& change : {Command{"PERSIST", "job"}, Command{"EXPIRE", "job", "5"}}) {
    AliceAcquires();
    Transaction({change, {"RENAME", "job", "renamed"}});
    ExpectHeld("renamed");

    AliceAcquires();
    Transaction({change, {"MOVE", "job", "1"}});
    Do({"SELECT", "1"});
    ExpectHeld("job");
    Do({"FLUSHALL"});
    Do({"SELECT", "0"});

    AliceAcquires();
    Transaction({change, {"SWAPDB", "0", "1"}});
    Do({"SELECT", "1"});
    ExpectHeld("job");
    Do({"FLUSHALL"});
    Do({"SELECT", "0"});
  }
}

// A lock that was removed or replaced is not brought back.
TEST_F(KeyspaceTest, RemovedLockIsNotRestoredByTtlRevert) {
  Transaction({{"PERSIST", "job"}, {"DEL", "job"}});
  ExpectFree();
  AliceAcquires();
  Transaction({{"PERSIST", "job"}, {"SET", "job", "x"}});
  EXPECT_EQ(Do({"PTTL", "job"}), Reply::Int(-1));
  EXPECT_EQ(Do({"GETDEL", "job"}), Reply::Str("x"));
  AliceAcquires();
  Transaction({{"PERSIST", "job"}, {"LOCK.RELEASE", "job", "alice"}});
  ExpectFree();
}

// --- Paused writes ----------------------------------------------------------------------------

// Nothing may be written while writes are paused: with a replica attached the server would abort.
TEST_F(KeyspaceTest, ChangedTtlIsRevertedAfterPause) {
  ReplicationStream stream(server().port());
  Transaction({{"PERSIST", "job"}, {"CLIENT", "PAUSE", "100000", "WRITE"}});
  EXPECT_EQ(EndOf(client_, "job"), -1);
  LetPass(Milliseconds{150});  // more than one turn of the server's cron
  EXPECT_EQ(EndOf(client_, "job"), -1);
  EXPECT_EQ(Do({"CLIENT", "UNPAUSE"}), Reply::Ok());
  EXPECT_TRUE(Eventually([&] { return EndOf(client_, "job") == end_; }));
  ExpectHeld("job");
}

// A TTL set by another client expires before it can be reverted: the lock is gone or unchanged.
TEST_F(KeyspaceTest, TtlExpiringDuringPauseLeavesLockOrRemovesIt) {
  ReplicationStream stream(server().port());
  Transaction({{"PEXPIRE", "job", "20"}, {"CLIENT", "PAUSE", "100000", "WRITE"}});
  EXPECT_TRUE(Eventually([&] { return Do({"EXISTS", "job"}) == Reply::Int(0); }));
  EXPECT_EQ(Do({"CLIENT", "UNPAUSE"}), Reply::Ok());
  const Reply current = client_.Do("LOCK.FENCE", "job", token_);
  EXPECT_EQ(EndOf(client_, "job"), current == Reply::Int(1) ? end_ : -2);
}

TEST_F(KeyspaceTest, WhileWritesArePausedOnlyInfoAnswers) {
  Client requester = server().Connect();
  EXPECT_EQ(Do({"CLIENT", "PAUSE", "100000", "WRITE"}), Reply::Ok());
  EXPECT_EQ(requester.Do("LOCK.INFO", "job").Field("mode"), Reply::Str("exclusive"));
  EXPECT_TRUE(requester.Do("LOCK.HELP").IsArray());
  requester.Send("LOCK.FENCE", "job", token_);
  EXPECT_FALSE(requester.HasReply(Milliseconds{50})) << "it may not be current any more elsewhere";
  EXPECT_EQ(Do({"CLIENT", "UNPAUSE"}), Reply::Ok());
  EXPECT_EQ(requester.Read(), Reply::Int(1));
}

TEST_F(KeyspaceTest, LeaseEndingDuringPauseFreesLock) {
  Client requester = server().Connect();
  MustAcquire(client_, "short", "alice", 20);
  EXPECT_EQ(Do({"CLIENT", "PAUSE", "100000", "WRITE"}), Reply::Ok());
  requester.Send("LOCK.ACQUIRE", "short", "bob", "PX", kMinute);
  EXPECT_TRUE(Eventually([&] { return Do({"LOCK.INFO", "short"}).IsNil(); }));
  EXPECT_EQ(Do({"CLIENT", "UNPAUSE"}), Reply::Ok());
  EXPECT_TRUE(requester.Read().IsInteger());
}

// --- Renaming, moving, copying ----------------------------------------------------------------

TEST_F(KeyspaceTest, RenameMovesLock) {
  EXPECT_EQ(Do({"RENAME", "job", "new"}), Reply::Ok());
  ExpectHeld("new");
  EXPECT_EQ(Do({"LOCK.FENCE", "job"}), Reply::Nil());

  // Over another lock: that one is lost.
  const int64_t bobs = MustAcquire(client_, "job", "bob");
  EXPECT_EQ(Do({"RENAMENX", "new", "job"}), Reply::Int(0));
  ExpectHeld("new");
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job", bobs), Reply::Int(1));
  EXPECT_EQ(Do({"RENAME", "new", "job"}), Reply::Ok());
  ExpectHeld("job");
  EXPECT_EQ(Do({"LOCK.RELEASE", "job", "bob"}), Reply::Int(0));

  EXPECT_EQ(Do({"RENAMENX", "job", "new"}), Reply::Int(1));
  ExpectHeld("new");
  EXPECT_EQ(Do({"LOCK.RELEASE", "new", "alice"}), Reply::Int(1));
}

TEST_F(KeyspaceTest, MoveAndSwapDbMoveLock) {
  EXPECT_EQ(Do({"MOVE", "job", "4"}), Reply::Int(1));
  EXPECT_EQ(Do({"LOCK.FENCE", "job"}), Reply::Nil());
  Do({"SELECT", "4"});
  ExpectHeld("job");
  EXPECT_EQ(Do({"SWAPDB", "4", "5"}), Reply::Ok());
  EXPECT_EQ(Do({"LOCK.FENCE", "job"}), Reply::Nil());
  Do({"SELECT", "5"});
  ExpectHeld("job");
  EXPECT_EQ(Do({"LOCK.RELEASE", "job", "alice"}), Reply::Int(1));
}

// A copy would be a second holder under the same token.
TEST_F(KeyspaceTest, CopyIsRefused) {
  for (const Command& copy : Commands{{"COPY", "job", "copy"},
                                      {"COPY", "job", "copy", "REPLACE"},
                                      {"COPY", "job", "job", "DB", "1"}}) {
    const Reply reply = Do(copy);
    EXPECT_TRUE(reply.IsError("ERR not supported for this module key")) << reply;
  }
  EXPECT_EQ(Do({"EXISTS", "copy"}), Reply::Int(0));
  ExpectHeld("job");
  Do({"SELECT", "1"});
  EXPECT_EQ(Do({"EXISTS", "job"}), Reply::Int(0));
}

// --- Commands of other types, and read-only commands ------------------------------------------

TEST_F(KeyspaceTest, SetNxFailsWhileLockIsHeld) {
  EXPECT_EQ(Do({"SET", "job", "bob", "NX", "PX", "1000"}), Reply::Nil());
  EXPECT_EQ(Do({"SETNX", "job", "bob"}), Reply::Int(0));
  EXPECT_EQ(Do({"MSETNX", "job", "bob", "other", "bob"}), Reply::Int(0));
  ExpectHeld("job");
}

TEST_F(KeyspaceTest, CommandsOfOtherTypesAreRefused) {
  for (const Command& command : Commands{{"GET", "job"},
                                         {"GETSET", "job", "x"},
                                         {"GETDEL", "job"},
                                         {"GETEX", "job", "PERSIST"},
                                         {"SET", "job", "x", "GET"},
                                         {"APPEND", "job", "x"},
                                         {"INCR", "job"},
                                         {"STRLEN", "job"},
                                         {"SETRANGE", "job", "0", "x"},
                                         {"SETBIT", "job", "0", "1"},
                                         {"PFADD", "job", "x"},
                                         {"LPUSH", "job", "x"},
                                         {"HSET", "job", "x", "x"},
                                         {"SADD", "job", "x"},
                                         {"ZADD", "job", "1", "x"},
                                         {"XADD", "job", "*", "x", "x"},
                                         {"SORT", "job"}}) {
    const Reply reply = Do(command);
    EXPECT_TRUE(reply.IsError("WRONGTYPE")) << command[0] << ": " << reply;
    ExpectHeld("job");
  }
}

TEST_F(KeyspaceTest, ReadOnlyCommandsDoNotChangeLock) {
  EXPECT_EQ(Do({"CONFIG", "SET", "maxmemory-policy", "allkeys-lfu"}), Reply::Ok());
  Do({"SET", "string", "x"});
  ReplicationStream stream(server().port());
  const std::string dump = Do({"DUMP", "job"}).text;

  EXPECT_EQ(Do({"EXISTS", "job"}), Reply::Int(1));
  EXPECT_EQ(Do({"TYPE", "job"}), Reply::Status("turnstile"));
  EXPECT_GT(Do({"TTL", "job"}).integer, 0);
  EXPECT_EQ(Do({"SCAN", "0", "COUNT", "1000", "TYPE", "turnstile"}),
            Reply::Array({Reply::Str("0"), Reply::Array({Reply::Str("job")})}));
  EXPECT_EQ(Do({"KEYS", "j*"}), Reply::Array({Reply::Str("job")}));
  EXPECT_EQ(Do({"TOUCH", "job"}), Reply::Int(1));
  EXPECT_EQ(Do({"OBJECT", "REFCOUNT", "job"}), Reply::Int(1));
  EXPECT_TRUE(Do({"OBJECT", "FREQ", "job"}).IsInteger());
  EXPECT_TRUE(Do({"OBJECT", "ENCODING", "job"}).IsString());
  EXPECT_GT(Do({"MEMORY", "USAGE", "job"}).integer, 0);
  EXPECT_FALSE(Do({"DEBUG", "OBJECT", "job"}).IsError());
  Do({"DEL", "string"});
  EXPECT_EQ(Do({"RANDOMKEY"}), Reply::Str("job"));
  EXPECT_EQ(Do({"CONFIG", "SET", "maxmemory-policy", "noeviction"}), Reply::Ok());
  EXPECT_GE(Do({"OBJECT", "IDLETIME", "job"}).integer, 0);

  EXPECT_EQ(Do({"DUMP", "job"}).text, dump);
  EXPECT_EQ(stream.Until(client_), (Commands{{"DEL", "string"}}));
  ExpectHeld("job");
}

}  // namespace
}  // namespace turnstile::testing
