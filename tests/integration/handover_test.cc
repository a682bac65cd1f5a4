// Everything that lets the next waiter in, and what is replicated and written to the AOF.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "support/aof.h"
#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/replication_stream.h"
#include "support/server.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

using Owners = std::vector<std::string>;

// Commands that are tried one after the other, each on a fresh state.
struct Way {
  Commands commands;
  Commands replicated = {};  // what is replicated, if not the commands themselves
};

std::string Spelled(const Way& way) {
  std::string text;
  for (const Command& command : way.commands) {
    for (const std::string& word : command) text += (text.empty() ? "" : " ") + word;
  }
  return text;
}

// A primary whose changes are observed in three ways: on the wire, in its AOF, and by a real
// replica.
class HandOverTest : public SharedWaitingTest<HandOverTest> {
 public:
  static ServerOptions Options() {
    return {
        .args = {"--appendonly", "yes", "--appendfsync", "always", "--repl-diskless-sync", "no"}};
  }
  static void SetUpTestSuite() {
    SharedServerTest::SetUpTestSuite();
    replica_ = std::make_unique<Server>(
        ServerOptions{.args = {"--replicaof", "127.0.0.1", std::to_string(server().port())}});
    Client client = server().Connect();
    Client copy = replica_->Connect();
    EXPECT_TRUE(
        Eventually([&] { return InfoField(copy, "replication", "master_link_status") == "up"; },
                   Milliseconds{20000}));
    // The first grant also replicates the floor of the token clock.
    MustAcquire(client, "first", "me");
    stream_ = std::make_unique<ReplicationStream>(server().port());
    // FLUSHALL would kill a process that is still saving, and with it the stream.
    EXPECT_TRUE(Eventually(
        [&] { return InfoField(client, "persistence", "rdb_bgsave_in_progress") == "0"; }));
    stream_->Until(client);
    known_ = std::ssize(ReadAof(server().dir()));
  }
  static void TearDownTestSuite() {
    stream_.reset();
    replica_.reset();
    SharedServerTest::TearDownTestSuite();
  }

 protected:
  // Active expiry is off, so that only the module removes expired keys.
  HandOverTest() { client_.Do("DEBUG", "SET-ACTIVE-EXPIRE", 0); }

  // The commands replicated since the last call, without SELECT, and with lazy deletions as DEL.
  // The AOF and the wire must agree.
  Commands Replicated() {
    Commands replicated = stream_->Until(client_);
    const Commands aof = ReadAof(server().dir());
    Commands news;
    std::copy_if(aof.begin() + known_, aof.end(), std::back_inserter(news),
                 [](const Command& command) { return command[0] != "SELECT"; });
    EXPECT_EQ(news, replicated);
    known_ = std::ssize(aof);
    for (Command& command : replicated) {
      if (command[0] == "UNLINK") command[0] = "DEL";
    }
    return replicated;
  }

  // The same without MULTI and EXEC.
  Commands ReplicatedWithoutMulti() {
    Commands replicated = Replicated();
    std::erase_if(replicated, [](const Command& c) { return c[0] == "MULTI" || c[0] == "EXEC"; });
    return replicated;
  }

  // See GrantedFact.
  Command Granted(const std::string& key, const std::string& owner, const Reply& token) {
    return GrantedFact(client_, key, owner, token);
  }

  // The replica, and a server that loads the AOF, have the same keys with the same values in all
  // databases.
  void ExpectSameElsewhere() {
    const Reply digest = client_.Do("DEBUG", "DIGEST");
    EXPECT_TRUE(Eventually([&] { return copy_.Do("DEBUG", "DIGEST") == digest; }));
    EXPECT_EQ(client_.Do("DEBUG", "LOADAOF"), Reply::Ok());
    EXPECT_EQ(client_.Do("DEBUG", "DIGEST"), digest);
  }

  // Replaces PAYLOAD among the arguments by `payload`.
  void DoAll(const Commands& commands, const std::string& payload = "") {
    for (Command command : commands) {
      std::replace(command.begin(), command.end(), std::string("PAYLOAD"), payload);
      const Reply reply = client_.Do(command);
      EXPECT_FALSE(reply.IsError()) << command[0] << ": " << reply;
    }
    client_.Do("SELECT", 0);
  }

  Client copy_ = replica_->Connect();

 private:
  static inline std::unique_ptr<Server> replica_;
  static inline std::unique_ptr<ReplicationStream> stream_;
  static inline std::ptrdiff_t known_ = 0;  // size of the AOF at the last call
};

// --- The lock is removed ----------------------------------------------------------------------

const Commands kDeleted = {{"DEL", "job"}};

const std::vector<Way> kWaysToFree = {
    {{{"LOCK.RELEASE", "job", "alice"}}},
    {kDeleted},
    {{{"UNLINK", "job"}}, kDeleted},
    {{{"EXPIRE", "job", "-1"}}, kDeleted},
    {{{"PEXPIREAT", "job", "1"}}, kDeleted},
    {{{"RENAME", "job", "away"}}},
    {{{"RENAMENX", "job", "away"}}},
    {{{"MOVE", "job", "5"}}},
    {{{"FLUSHDB"}}},
    {{{"FLUSHDB", "ASYNC"}}},
    {{{"FLUSHALL"}}},
    {{{"FLUSHALL", "ASYNC"}}},
    {{{"SWAPDB", "0", "7"}}},
    {{{"SWAPDB", "7", "0"}}},
    {{{"SINTERSTORE", "job", "none"}}},
    {{{"SORT", "none", "STORE", "job"}}},
    {{{"MULTI"}, {"DEL", "job"}, {"INCR", "n"}, {"EXEC"}}},
    {{{"MULTI"}, {"MOVE", "job", "5"}, {"INCR", "n"}, {"EXEC"}}},
    {{{"EVAL", "return redis.call('DEL', KEYS[1])", "1", "job"}}, kDeleted},
    {{{"EVAL", "return redis.call('LOCK.RELEASE', KEYS[1], 'alice')", "1", "job"}},
     {{"LOCK.RELEASE", "job", "alice"}}},
};

TEST_F(HandOverTest, NextWaiterIsGrantedHoweverLockIsRemoved) {
  for (const Way& way : kWaysToFree) {
    SCOPED_TRACE(Spelled(way));
    StartAfresh();
    const int64_t alice = MustAcquire(client_, "job", "alice");
    Waiter bob(server(), "job", "bob");
    Waiter carol(server(), "job", "carol");
    Replicated();

    DoAll(way.commands);
    const Reply token = bob.Read();
    ASSERT_GT(token.integer, alice) << token;
    EXPECT_EQ(HolderOf(client_, "job"), "bob");
    EXPECT_EQ(LineOf(client_, "job"), Owners{"carol"});
    Commands expected = way.replicated.empty() ? way.commands : way.replicated;
    expected.push_back(Granted("job", "bob", token));
    EXPECT_EQ(Replicated(), expected);
    ExpectSameElsewhere();

    EXPECT_EQ(bob.Do("LOCK.RELEASE", "job", "bob"), Reply::Int(1));
    const Reply next = carol.Read();
    EXPECT_GT(next.integer, token.integer) << next;
    EXPECT_EQ(Replicated(),
              (Commands{{"LOCK.RELEASE", "job", "bob"}, Granted("job", "carol", next)}));
    ExpectSameElsewhere();
  }
}

// The lock that moved is still alice's.
TEST_F(HandOverTest, MovedLockKeepsItsHolder) {
  Client other = server().Connect();
  other.Do("SELECT", 5);
  const int64_t token = MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob");
  client_.Do("RENAME", "job", "away");
  EXPECT_TRUE(bob.Read().IsInteger());
  EXPECT_EQ(client_.Do("LOCK.FENCE", "away"), Reply::Int(token));
  Waiter carol(server(), "away", "carol");
  DoAll({{"MOVE", "away", "5"}});
  EXPECT_TRUE(carol.Read().IsInteger());
  EXPECT_EQ(other.Do("LOCK.FENCE", "away"), Reply::Int(token));
  EXPECT_EQ(other.Do("LOCK.RELEASE", "away", "alice"), Reply::Int(1));
  ExpectSameElsewhere();
}

TEST_F(HandOverTest, FlushOfOneDatabaseServesOnlyItsWaiters) {
  Client other = server().Connect();
  other.Do("SELECT", 3);
  MustAcquire(client_, "job", "alice");
  MustAcquire(other, "job", "alice");
  Waiter bob(server(), "job", "bob");
  Waiter carol(server(), {"SELECT", "3"});
  carol.Wait("job", "carol");
  Replicated();
  EXPECT_EQ(other.Do("FLUSHDB"), Reply::Ok());
  const Reply token = carol.Read();
  EXPECT_EQ(Replicated(), (Commands{{"FLUSHDB"}, GrantedFact(other, "job", "carol", token)}));
  EXPECT_FALSE(bob.HasReply());
  EXPECT_EQ(LineOf(client_, "job"), Owners{"bob"});
  // Both waiters notice that databases are swapped: carol's lock comes here, alice's goes there.
  EXPECT_EQ(client_.Do("SWAPDB", 0, 3), Reply::Ok());
  EXPECT_EQ(HolderOf(client_, "job"), "carol");
  EXPECT_FALSE(bob.HasReply());
  client_.Do("LOCK.RELEASE", "job", "carol");
  EXPECT_TRUE(bob.Read().IsInteger());
  ExpectSameElsewhere();
}

TEST_F(HandOverTest, ManyQueuesAreServedAtOnce) {
  std::vector<Waiter> waiters;
  for (int i = 0; i < 100; i++) {
    const std::string key = std::to_string(i);
    MustAcquire(client_, key, "alice");
    waiters.emplace_back(server(), key, "owner of " + key);
    waiters.emplace_back(server(), key, "next of " + key);
  }
  Replicated();
  client_.Do("FLUSHALL");
  Commands expected;
  for (int i = 0; i < 100; i++) {
    const std::string key = std::to_string(i);
    const Reply token = waiters[2 * static_cast<size_t>(i)].Read();
    ASSERT_TRUE(token.IsInteger()) << token;
    expected.push_back(Granted(key, "owner of " + key, token));
  }
  Commands replicated = ReplicatedWithoutMulti();
  ASSERT_EQ(replicated.front(), Command{"FLUSHALL"});
  replicated.erase(replicated.begin());
  std::sort(replicated.begin(), replicated.end());
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(replicated, expected);
  EXPECT_EQ(WaitersNow(client_), "100");
  ExpectSameElsewhere();
}

TEST(MigrateTest, MigratedLockIsGrantedToNextWaiter) {
  Server source;
  Server target;
  Client client = source.Connect();
  Client there = target.Connect();
  const int64_t token = MustAcquire(client, "job", "alice");
  Waiter bob(source, "job", "bob");
  EXPECT_EQ(client.Do("MIGRATE", "127.0.0.1", target.port(), "job", 0, 5000), Reply::Ok());
  EXPECT_GT(bob.Read().integer, token);
  EXPECT_EQ(there.Do("LOCK.FENCE", "job"), Reply::Int(token));
}

// --- Leases -----------------------------------------------------------------------------------

TEST_F(HandOverTest, NextWaiterIsGrantedWhenLeaseEnds) {
  for (const int active : {1, 0}) {
    SCOPED_TRACE(active != 0 ? "with active expiry" : "without active expiry");
    client_.Do("DEBUG", "SET-ACTIVE-EXPIRE", active);
    const int64_t alice = MustAcquire(client_, "job", "alice", 2500);
    const int64_t end = EndOf(client_, "job");
    Waiter bob(server(), "job", "bob");
    Replicated();
    const Reply token = bob.Read();
    EXPECT_GT(token.integer, alice) << token;
    const Command granted = Granted("job", "bob", token);
    EXPECT_GE(NumbersOf(granted).since, active != 0 ? FirstFree(client_, end) : end + 1)
        << "a hold lives through its last millisecond";
    EXPECT_EQ(ReplicatedWithoutMulti(), (Commands{{"DEL", "job"}, granted}));
    ExpectSameElsewhere();
    client_.Do("LOCK.RELEASE", "job", "bob");
  }
}

// Another client's access removes the key before the module's timer fires.
TEST_F(HandOverTest, NextWaiterIsGrantedWhenOtherCommandExpiresKey) {
  MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob");
  Replicated();
  RawConnection other_client = server().ConnectRaw();
  EXPECT_EQ(DoAtOnce(other_client, {{"LOCK.TOUCH", "job", "alice", "PX", "100"},
                                    {"DEBUG", "SLEEP", "0.15"},
                                    {"EXISTS", "job"}}),
            (std::vector{Reply::Int(1), Reply::Ok(), Reply::Int(0)}));
  const Reply token = bob.Read();
  Commands replicated = ReplicatedWithoutMulti();
  ASSERT_FALSE(replicated.empty());
  EXPECT_EQ(replicated.front()[0], "LOCK.HELD") << "the touch";
  replicated.erase(replicated.begin());
  EXPECT_EQ(replicated, (Commands{{"DEL", "job"}, Granted("job", "bob", token)}));
  ExpectSameElsewhere();
}

// One after the other, each for its own lease, with nothing but leases ending.
TEST_F(HandOverTest, QueueAdvancesByLeasesAlone) {
  MustAcquire(client_, "job", "alice", 20);
  std::vector<Waiter> waiters;
  for (int i = 0; i < 10; i++) {
    waiters.emplace_back(server());
    waiters.back().Send(AcquireWaiting("job", std::to_string(i), {.lease_ms = 20}));
  }
  int64_t last = 0;
  for (Waiter& waiter : waiters) {
    const Reply token = waiter.Read();
    EXPECT_TRUE(token.IsInteger()) << token;
    last = std::max(last, token.integer);
  }
  ASSERT_TRUE(Eventually([&] { return client_.Do("EXISTS", "job") == Reply::Int(0); }));
  EXPECT_GT(MustAcquire(client_, "job", "zoe"), last);
  ExpectSameElsewhere();
}

// A TTL set by another client is reverted to the lease; the waiter waits for the lease.
TEST_F(HandOverTest, ChangedTtlIsRevertedToLease) {
  const int64_t token = MustAcquire(client_, "job", "alice", 3000);
  const int64_t end = EndOf(client_, "job");
  const Command held = HeldCommand("job", "alice", {token, end - 3000, end});
  Waiter bob(server(), "job", "bob");
  Replicated();
  for (const Command& trick : Commands{{"PERSIST", "job"},
                                       {"PEXPIREAT", "job", std::to_string(end - 500)},
                                       {"PEXPIREAT", "job", std::to_string(end + 100000)}}) {
    EXPECT_EQ(client_.Do(trick), Reply::Int(1));
    EXPECT_EQ(EndOf(client_, "job"), end);
    EXPECT_EQ(Replicated(), (Commands{trick, held}));
  }
  const Reply next = bob.Read();
  const Command granted = Granted("job", "bob", next);
  EXPECT_GT(NumbersOf(granted).since, end);
  EXPECT_EQ(ReplicatedWithoutMulti(), (Commands{{"DEL", "job"}, granted}));
  ExpectSameElsewhere();
}

// --- Another lock in its place ----------------------------------------------------------------

// Commands that replace alice's lock by zoe's, which is in "other".
const std::vector<Way> kWaysToReplace = {
    {{{"RENAME", "other", "job"}}},
    {{{"RESTORE", "job", "0", "PAYLOAD", "REPLACE"}}},
    {{{"MULTI"}, {"DEL", "job"}, {"RESTORE", "job", "0", "PAYLOAD"}, {"EXEC"}}},
    {{{"SELECT", "5"}, {"RESTORE", "job", "0", "PAYLOAD"}, {"SWAPDB", "0", "5"}}},
    {{{"SELECT", "5"},
      {"RESTORE", "job", "0", "PAYLOAD"},
      {"MULTI"},
      {"SELECT", "0"},
      {"DEL", "job"},
      {"SELECT", "5"},
      {"MOVE", "job", "0"},
      {"EXEC"}}},
};

TEST_F(HandOverTest, WaiterWaitsForLockThatReplacedFirstOne) {
  for (const Way& way : kWaysToReplace) {
    SCOPED_TRACE(Spelled(way));
    StartAfresh();
    MustAcquire(client_, "job", "alice");
    Waiter bob(server(), "job", "bob");
    MustAcquire(client_, "other", "zoe");
    DoAll(way.commands, client_.Do("DUMP", "other").text);
    EXPECT_EQ(HolderOf(client_, "job"), "zoe");
    EXPECT_EQ(LineOf(client_, "job"), Owners{"bob"});
    EXPECT_FALSE(bob.HasReply());
    ExpectSameElsewhere();

    // Now her lease counts.
    RawConnection raw = server().ConnectRaw();
    const std::vector<Reply> shorter =
        DoAtOnce(raw, {{"LOCK.TOUCH", "job", "zoe", "PX", "50"}, {"PEXPIRETIME", "job"}});
    EXPECT_EQ(shorter[0], Reply::Int(1));
    const int64_t end = shorter[1].integer;
    const Reply token = bob.Read();
    ASSERT_TRUE(token.IsInteger()) << token;
    EXPECT_GT(NumbersOf(Granted("job", "bob", token)).since, end);
    ExpectSameElsewhere();
  }
}

// The lease of a lock that was renamed onto the key is known at once.
TEST_F(HandOverTest, LeaseOfRenamedLockIsTracked) {
  MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob");
  MustAcquire(client_, "other", "zoe", 2000);
  const int64_t end = EndOf(client_, "other");
  EXPECT_EQ(client_.Do("RENAME", "other", "job"), Reply::Ok());
  const Reply token = bob.Read();
  ASSERT_TRUE(token.IsInteger()) << token;
  EXPECT_GT(NumbersOf(Granted("job", "bob", token)).since, end);
}

// bob's own lock is renamed onto the key that he waits for: he has what he asked for.
TEST_F(HandOverTest, WaiterWhoseLockIsRenamedOntoKeyIsGranted) {
  MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob");
  const int64_t token = MustAcquire(client_, "other", "bob");
  EXPECT_EQ(client_.Do("RENAME", "other", "job"), Reply::Ok());
  EXPECT_EQ(bob.Read(), Reply::Int(token));
  EXPECT_EQ(WaitersNow(client_), "0");
}

// --- Strings ----------------------------------------------------------------------------------

const std::string kTheUsualRelease =
    "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) "
    "else return 0 end";

// Commands that let bob in while "job" is the string "alice", and "string" is the string "bob".
const std::vector<Way> kWaysToFreeAString = {
    {{{"DEL", "job"}}},
    {{{"UNLINK", "job"}}},
    {{{"GETDEL", "job"}}},
    {{{"RENAME", "job", "away"}}},
    {{{"MOVE", "job", "5"}}},
    {{{"FLUSHALL"}}},
    {{{"SWAPDB", "0", "7"}}},
    {{{"EXPIRE", "job", "-1"}}},
    {{{"GETEX", "job", "PXAT", "1"}}},
    {{{"PEXPIRE", "job", "30"}}},
    {{{"GETEX", "job", "PX", "30"}}},
    {{{"PSETEX", "job", "30", "alice"}}},
    {{{"SET", "job", "someone else", "PX", "30"}}},
    {{{"LOCK.TOUCH", "job", "alice", "PX", "30"}}},
    {{{"LOCK.RELEASE", "job", "alice"}}},
    {{{"EVAL", kTheUsualRelease, "1", "job", "alice"}}},
    // The string becomes bob's own.
    {{{"SET", "job", "bob"}}},
    {{{"SET", "job", "bob", "KEEPTTL"}}},
    {{{"GETSET", "job", "bob"}}},
    {{{"MSET", "job", "bob"}}},
    {{{"SET", "job", "b"}, {"APPEND", "job", "ob"}}},
    {{{"SET", "job", "bxx"}, {"SETRANGE", "job", "1", "ob"}}},
    {{{"SET", "job", "\xe2ob"}, {"SETBIT", "job", "0", "0"}}},
    {{{"RENAME", "string", "job"}}},
    {{{"COPY", "string", "job", "REPLACE"}}},
    {{{"BITOP", "OR", "job", "string"}}},
    {{{"RESTORE", "job", "0", "PAYLOAD", "REPLACE"}}},
};

TEST_F(HandOverTest, WaiterIsGrantedWhenStringIsRemovedOrNamesIt) {
  for (const Way& way : kWaysToFreeAString) {
    for (const bool with_ttl : {false, true}) {
      SCOPED_TRACE(Spelled(way) + (with_ttl ? " with a TTL" : " without a TTL"));
      StartAfresh();
      DoAll({{"SET", "job", "alice"}, {"SET", "string", "bob"}});
      if (with_ttl) client_.Do("PEXPIRE", "job", kMinute);
      Waiter bob(server(), "job", "bob");
      Waiter carol(server(), "job", "carol");
      DoAll(way.commands, client_.Do("DUMP", "string").text);
      const Reply token = bob.Read();
      ASSERT_TRUE(token.IsInteger()) << token;
      EXPECT_EQ(client_.Do("LOCK.FENCE", "job"), token);
      EXPECT_EQ(LineOf(client_, "job"), Owners{"carol"});
      EXPECT_EQ(ReplicatedWithoutMulti().back(), Granted("job", "bob", token));
      ExpectSameElsewhere();
    }
  }
}

TEST_F(HandOverTest, WaiterIsGrantedWhenIncrMakesStringNameIt) {
  client_.Do("SET", "job", 7);
  Waiter eight(server(), "job", "8");
  client_.Do("INCR", "job");
  EXPECT_TRUE(eight.Read().IsInteger());
  EXPECT_EQ(client_.Do("TYPE", "job"), Reply::Status("turnstile"));
}

TEST_F(HandOverTest, WaiterIsGrantedWhenStringExpires) {
  client_.Do("SET", "job", "alice", "PX", 1500);
  const int64_t end = EndOf(client_, "job");
  Waiter bob(server(), "job", "bob");
  Replicated();
  const Reply token = bob.Read();
  ASSERT_TRUE(token.IsInteger()) << token;
  const Command granted = Granted("job", "bob", token);
  EXPECT_GT(NumbersOf(granted).since, end);
  EXPECT_EQ(ReplicatedWithoutMulti(), (Commands{{"DEL", "job"}, granted}));
  ExpectSameElsewhere();
}

// A string whose TTL is extended, or whose value becomes another owner's, still blocks.
TEST_F(HandOverTest, ProlongedStringStillBlocksWaiters) {
  const std::vector<Command> prolongings = {
      {"PERSIST"},          {"PEXPIRE", "60000"},
      {"SET", "zoe"},       {"SET", "alice", "PX", "60000"},
      {"GETEX", "PERSIST"}, {"LOCK.TOUCH", "alice", "PX", "60000"}};
  std::vector<Waiter> waiters;
  for (Command command : prolongings) {
    command.insert(command.begin() + 1, "job:" + std::to_string(waiters.size()));
    client_.Do("SET", command[1], "alice", "PX", 1500);
    waiters.emplace_back(server(), command[1], "bob");
    EXPECT_FALSE(client_.Do(command).IsError());
  }
  LetPass(Milliseconds{1600});
  for (size_t i = 0; i < waiters.size(); i++) {
    SCOPED_TRACE(prolongings[i][0] + " " + std::to_string(i));
    const std::string key = "job:" + std::to_string(i);
    EXPECT_FALSE(waiters[i].HasReply());
    EXPECT_EQ(LineOf(client_, key), Owners{"bob"});
    EXPECT_EQ(client_.Do("DEL", key), Reply::Int(1));
    EXPECT_TRUE(waiters[i].Read().IsInteger());
  }
}

// A lock overwritten by another client is lost to its holder, and still blocked for its waiters.
TEST_F(HandOverTest, StringThatReplacesLockBlocksWaiters) {
  for (const Command& command : Commands{{"SET", "job", "zoe"},
                                         {"MSET", "job", "zoe"},
                                         {"RENAME", "string", "job"},
                                         {"COPY", "string", "job", "REPLACE"},
                                         {"BITOP", "OR", "job", "string"}}) {
    SCOPED_TRACE(command[0]);
    client_.Do("FLUSHALL");
    client_.Do("SET", "string", "zoe");
    MustAcquire(client_, "job", "alice");
    Waiter bob(server(), "job", "bob");
    EXPECT_FALSE(client_.Do(command).IsError());
    EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "alice"), Reply::Int(0));
    EXPECT_EQ(HolderOf(client_, "job"), "zoe");
    EXPECT_EQ(LineOf(client_, "job"), Owners{"bob"});
    EXPECT_FALSE(bob.HasReply());
    EXPECT_EQ(client_.Do("SET", "job", "zoe", "PX", 20), Reply::Ok());
    EXPECT_TRUE(bob.Read().IsInteger());
    ExpectSameElsewhere();
  }
}

// Values that no owner can equal.
TEST_F(HandOverTest, StringsThatNoOwnerCanEqualBlockWaiters) {
  for (const std::string& value :
       {std::string(), std::string(257, 'x'), std::string(100000, 'x')}) {
    client_.Do("SET", "job", value);
    Waiter bob(server(), "job", "bob");
    EXPECT_EQ(LineOf(client_, "job"), Owners{"bob"});
    client_.Do("DEL", "job");
    EXPECT_TRUE(bob.Read().IsInteger());
    client_.Do("LOCK.RELEASE", "job", "bob");
  }
}

// --- Keys of other types ----------------------------------------------------------------------

// Commands that replace the key by another type: neither a lock nor a string.
const std::vector<Way> kWaysToWrongTypes = {
    {{{"RENAME", "list", "job"}}},
    {{{"RESTORE", "job", "0", "PAYLOAD", "REPLACE"}}},
    {{{"COPY", "list", "job", "REPLACE"}}},
    {{{"MULTI"}, {"DEL", "job"}, {"RPUSH", "job", "x"}, {"EXEC"}}},
    {{{"SUNIONSTORE", "job", "set"}}},
    {{{"ZUNIONSTORE", "job", "1", "set"}}},
    {{{"SORT", "list", "STORE", "job"}}},
    {{{"GEOADD", "geo", "13", "38", "x"},
      {"GEOSEARCHSTORE", "job", "geo", "FROMMEMBER", "x", "BYRADIUS", "1", "km"}}},
};

TEST_F(HandOverTest, WaitersAreRefusedWhenKeyOfOtherTypeReplacesLock) {
  for (const Command& before : Commands{{"LOCK.ACQUIRE", "job", "alice", "PX", "60000"},
                                        {"SET", "job", "alice"},
                                        {"SET", "job", "alice", "PX", "60000"}}) {
    for (const Way& way : kWaysToWrongTypes) {
      SCOPED_TRACE(Spelled(way) + " after " + before[0]);
      StartAfresh();
      DoAll({{"RPUSH", "list", "2", "1"}, {"SADD", "set", "x"}, before});
      Waiter bob(server(), "job", "bob");
      Waiter carol(server(), "job", "carol");
      DoAll(way.commands, client_.Do("DUMP", "list").text);
      const Reply direct = client_.Do("LOCK.ACQUIRE", "job", "dave", "PX", 1);
      EXPECT_TRUE(direct.IsError("WRONGTYPE ")) << direct;
      ASSERT_EQ(bob.Read(), direct);
      ASSERT_EQ(carol.Read(), direct);
      EXPECT_EQ(WaitersNow(client_), "0");
    }
  }
}

// --- Memory -----------------------------------------------------------------------------------

TEST(EvictionTest, EvictedLockIsGrantedToNextWaiter) {
  for (const char* policy : {"volatile-ttl", "allkeys-random"}) {
    SCOPED_TRACE(policy);
    Server server({.args = {"--maxmemory-policy", policy}});
    Client client = server.Connect();
    const int64_t alice = MustAcquire(client, "job", "alice");
    Waiter bob(server, "job", "bob");
    const int64_t used = std::stoll(InfoField(client, "memory", "used_memory"));
    EXPECT_EQ(client.Do("CONFIG", "SET", "maxmemory", used + 4'000'000), Reply::Ok());
    // Other keys can be evicted first, but in the end the lock is.
    int64_t filler = 0;
    ASSERT_TRUE(Eventually(
        [&] {
          for (int i = 0; i < 20; i++) {
            client.Do("SET", "filler:" + std::to_string(filler++), std::string(100000, 'x'), "EX",
                      900);
          }
          return bob.HasReply();
        },
        Milliseconds{20000}));
    const Reply token = bob.Read();
    EXPECT_GT(token.integer, alice) << token;
    EXPECT_NE(InfoField(client, "stats", "evicted_keys"), "0");
  }
}

// --- WAIT, the server's own command -----------------------------------------------------------

TEST(WaitForReplicasTest, WaitCommandCoversGrantToWaiter) {
  Server primary({.args = {"--repl-diskless-sync", "no"}});
  Server replica({.args = {"--replicaof", "127.0.0.1", std::to_string(primary.port())}});
  Client client = primary.Connect();
  Client copy = replica.Connect();
  ASSERT_TRUE(
      Eventually([&] { return InfoField(copy, "replication", "master_link_status") == "up"; },
                 Milliseconds{20000}));
  for (const bool reachable : {true, false}) {
    MustAcquire(client, "job", "alice");
    Waiter bob(primary, "job", "bob");
    bob.Send("WAIT", 1, reachable ? kPatience.count() : 100);
    ASSERT_EQ(client.Do("WAIT", 1, kPatience.count()), Reply::Int(1));
    if (!reachable) replica.Pause();
    client.Do("LOCK.RELEASE", "job", "alice");
    EXPECT_TRUE(bob.Read().IsInteger());
    EXPECT_EQ(bob.Read(), Reply::Int(reachable ? 1 : 0));
    if (reachable) {
      EXPECT_EQ(HolderOf(copy, "job"), "bob");
    }
    client.Do("LOCK.RELEASE", "job", "bob");
  }
  replica.Continue();
}

}  // namespace
}  // namespace turnstile::testing
