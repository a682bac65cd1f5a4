// Everything that lets the next one in, and what replicas and the AOF are told about it.

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

// Commands that are tried one after the other, each on a fresh start.
struct Way {
  Commands commands;
  Commands told = {};  // if it is not the commands themselves
};

std::string Spelled(const Way& way) {
  std::string text;
  for (const Command& command : way.commands) {
    for (const std::string& word : command) text += (text.empty() ? "" : " ") + word;
  }
  return text;
}

// A primary that is overheard three times: on the wire, through its AOF, and by a real replica.
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
    // The first grant also tells the floor of the token clock.
    MustAcquire(client, "first", "me");
    stream_ = std::make_unique<ReplicationStream>(server().port());
    // FLUSHALL would end a process that still saves, and with it the stream.
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
  // Nobody but us removes keys whose time is over.
  HandOverTest() { client_.Do("DEBUG", "SET-ACTIVE-EXPIRE", 0); }

  // What was told since this was last asked, without SELECT; lazy deletions as DEL. The AOF and the
  // wire must agree.
  Commands Told() {
    Commands told = stream_->Until(client_);
    const Commands aof = ReadAof(server().dir());
    Commands news;
    std::copy_if(aof.begin() + known_, aof.end(), std::back_inserter(news),
                 [](const Command& command) { return command[0] != "SELECT"; });
    EXPECT_EQ(news, told);
    known_ = std::ssize(aof);
    for (Command& command : told) {
      if (command[0] == "UNLINK") command[0] = "DEL";
    }
    return told;
  }

  // The same without the brackets of transactions.
  Commands ToldPlainly() {
    Commands told = Told();
    std::erase_if(told, [](const Command& c) { return c[0] == "MULTI" || c[0] == "EXEC"; });
    return told;
  }

  // See GrantedFact.
  Command Granted(const std::string& key, const std::string& owner, const Reply& token) {
    return GrantedFact(client_, key, owner, token);
  }

  // The replica has the same keys with the same values, in all databases; and so has whoever reads
  // the AOF.
  void ExpectSameElsewhere() {
    const Reply digest = client_.Do("DEBUG", "DIGEST");
    EXPECT_TRUE(Eventually([&] { return copy_.Do("DEBUG", "DIGEST") == digest; }));
    EXPECT_EQ(client_.Do("DEBUG", "LOADAOF"), Reply::Ok());
    EXPECT_EQ(client_.Do("DEBUG", "DIGEST"), digest);
  }

  // PAYLOAD among the arguments stands for `payload`.
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
  static inline std::ptrdiff_t known_ = 0;  // so much of the AOF was told before
};

// --- The lock goes away -----------------------------------------------------------------------

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

TEST_F(HandOverTest, WhenTheLockGoesAway) {
  for (const Way& way : kWaysToFree) {
    SCOPED_TRACE(Spelled(way));
    StartAfresh();
    const int64_t alice = MustAcquire(client_, "job", "alice");
    Waiter bob(server(), "job", "bob");
    Waiter carol(server(), "job", "carol");
    Told();

    DoAll(way.commands);
    const Reply token = bob.Read();
    ASSERT_GT(token.integer, alice) << token;
    EXPECT_EQ(HolderOf(client_, "job"), "bob");
    EXPECT_EQ(LineOf(client_, "job"), Owners{"carol"});
    Commands expected = way.told.empty() ? way.commands : way.told;
    expected.push_back(Granted("job", "bob", token));
    EXPECT_EQ(Told(), expected);
    ExpectSameElsewhere();

    EXPECT_EQ(bob.Do("LOCK.RELEASE", "job", "bob"), Reply::Int(1));
    const Reply next = carol.Read();
    EXPECT_GT(next.integer, token.integer) << next;
    EXPECT_EQ(Told(), (Commands{{"LOCK.RELEASE", "job", "bob"}, Granted("job", "carol", next)}));
    ExpectSameElsewhere();
  }
}

// The lock that went elsewhere is still alice's.
TEST_F(HandOverTest, ALockThatMovedLivesOn) {
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

TEST_F(HandOverTest, EmptyingOneDatabaseIsNoBusinessOfAnother) {
  Client other = server().Connect();
  other.Do("SELECT", 3);
  MustAcquire(client_, "job", "alice");
  MustAcquire(other, "job", "alice");
  Waiter bob(server(), "job", "bob");
  Waiter carol(server(), {"SELECT", "3"});
  carol.Wait("job", "carol");
  Told();
  EXPECT_EQ(other.Do("FLUSHDB"), Reply::Ok());
  const Reply token = carol.Read();
  EXPECT_EQ(Told(), (Commands{{"FLUSHDB"}, GrantedFact(other, "job", "carol", token)}));
  EXPECT_FALSE(bob.HasReply());
  EXPECT_EQ(LineOf(client_, "job"), Owners{"bob"});
  // Both of them see that databases change places: carol's lock comes here, alice's goes there.
  EXPECT_EQ(client_.Do("SWAPDB", 0, 3), Reply::Ok());
  EXPECT_EQ(HolderOf(client_, "job"), "carol");
  EXPECT_FALSE(bob.HasReply());
  client_.Do("LOCK.RELEASE", "job", "carol");
  EXPECT_TRUE(bob.Read().IsInteger());
  ExpectSameElsewhere();
}

TEST_F(HandOverTest, ManyLinesAtOnce) {
  std::vector<Waiter> waiters;
  for (int i = 0; i < 100; i++) {
    const std::string key = std::to_string(i);
    MustAcquire(client_, key, "alice");
    waiters.emplace_back(server(), key, "owner of " + key);
    waiters.emplace_back(server(), key, "next of " + key);
  }
  Told();
  client_.Do("FLUSHALL");
  Commands expected;
  for (int i = 0; i < 100; i++) {
    const std::string key = std::to_string(i);
    const Reply token = waiters[2 * static_cast<size_t>(i)].Read();
    ASSERT_TRUE(token.IsInteger()) << token;
    expected.push_back(Granted(key, "owner of " + key, token));
  }
  Commands told = ToldPlainly();
  ASSERT_EQ(told.front(), Command{"FLUSHALL"});
  told.erase(told.begin());
  std::sort(told.begin(), told.end());
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(told, expected);
  EXPECT_EQ(WaitersNow(client_), "100");
  ExpectSameElsewhere();
}

TEST(MigrateTest, ALockThatGoesToAnotherServerMakesRoom) {
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

TEST_F(HandOverTest, TheLeaseEnds) {
  for (const int active : {1, 0}) {
    SCOPED_TRACE(active != 0 ? "with active expiry" : "without active expiry");
    client_.Do("DEBUG", "SET-ACTIVE-EXPIRE", active);
    const int64_t alice = MustAcquire(client_, "job", "alice", 200);
    const int64_t end = EndOf(client_, "job");
    Waiter bob(server(), "job", "bob");
    Told();
    const Reply token = bob.Read();
    EXPECT_GT(token.integer, alice) << token;
    const Command granted = Granted("job", "bob", token);
    EXPECT_GE(NumbersOf(granted).since, active != 0 ? FirstFree(client_, end) : end + 1)
        << "a hold lives through its last millisecond";
    EXPECT_EQ(ToldPlainly(), (Commands{{"DEL", "job"}, granted}));
    ExpectSameElsewhere();
    client_.Do("LOCK.RELEASE", "job", "bob");
  }
}

// Somebody else's look removes the key before our timer can ring.
TEST_F(HandOverTest, TheKeyExpiresUnderAStrangersHands) {
  MustAcquire(client_, "job", "alice", 100);
  Waiter bob(server(), "job", "bob");
  Told();
  RawConnection stranger = server().ConnectRaw();
  EXPECT_EQ(DoAtOnce(stranger, {{"DEBUG", "SLEEP", "0.15"}, {"EXISTS", "job"}}),
            (std::vector{Reply::Ok(), Reply::Int(0)}));
  const Reply token = bob.Read();
  EXPECT_EQ(ToldPlainly(), (Commands{{"DEL", "job"}, Granted("job", "bob", token)}));
  ExpectSameElsewhere();
}

// One after the other, each for its own lease, without anybody's help.
TEST_F(HandOverTest, ALineMovesByLeasesAlone) {
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

// A stranger's TTL is set back to the lease; who waits, waits for the lease.
TEST_F(HandOverTest, AStrangersTtlIsSetBack) {
  const int64_t token = MustAcquire(client_, "job", "alice", 1000);
  const int64_t end = EndOf(client_, "job");
  const Command held = HeldCommand("job", "alice", {token, end - 1000, end});
  Waiter bob(server(), "job", "bob");
  Told();
  for (const Command& trick : Commands{{"PERSIST", "job"},
                                       {"PEXPIREAT", "job", std::to_string(end - 500)},
                                       {"PEXPIREAT", "job", std::to_string(end + 100000)}}) {
    EXPECT_EQ(client_.Do(trick), Reply::Int(1));
    EXPECT_EQ(EndOf(client_, "job"), end);
    EXPECT_EQ(Told(), (Commands{trick, held}));
  }
  const Reply next = bob.Read();
  const Command granted = Granted("job", "bob", next);
  EXPECT_GT(NumbersOf(granted).since, end);
  EXPECT_EQ(ToldPlainly(), (Commands{{"DEL", "job"}, granted}));
  ExpectSameElsewhere();
}

// --- Another lock in its place ----------------------------------------------------------------

// Commands that put zoe's lock, which is in "other", into the place of alice's.
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

TEST_F(HandOverTest, WhenAnotherLockComesInItsPlace) {
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

    // Her lease counts now.
    EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", "zoe", "PX", 50), Reply::Int(1));
    const int64_t end = EndOf(client_, "job");
    const Reply token = bob.Read();
    ASSERT_TRUE(token.IsInteger()) << token;
    EXPECT_GT(NumbersOf(Granted("job", "bob", token)).since, end);
    ExpectSameElsewhere();
  }
}

// The lease of a lock that came from elsewhere is known at once.
TEST_F(HandOverTest, TheLeaseOfALockThatCameByRename) {
  MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob");
  MustAcquire(client_, "other", "zoe", 500);
  const int64_t end = EndOf(client_, "other");
  EXPECT_EQ(client_.Do("RENAME", "other", "job"), Reply::Ok());
  const Reply token = bob.Read();
  ASSERT_TRUE(token.IsInteger()) << token;
  EXPECT_GT(NumbersOf(Granted("job", "bob", token)).since, end);
}

// bob's own lock comes to where bob waits: he has what he asked for.
TEST_F(HandOverTest, TheWaitersOwnLockComes) {
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

// Commands that let bob in while "job" is a string that says alice, and "string" one that says bob.
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

TEST_F(HandOverTest, WhenAStringGoesAwayOrBecomesTheWaiters) {
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
      EXPECT_EQ(ToldPlainly().back(), Granted("job", "bob", token));
      ExpectSameElsewhere();
    }
  }
}

TEST_F(HandOverTest, NumbersAreValuesToo) {
  client_.Do("SET", "job", 7);
  Waiter eight(server(), "job", "8");
  client_.Do("INCR", "job");
  EXPECT_TRUE(eight.Read().IsInteger());
  EXPECT_EQ(client_.Do("TYPE", "job"), Reply::Status("turnstile"));
}

TEST_F(HandOverTest, TheEndOfAString) {
  client_.Do("SET", "job", "alice", "PX", 200);
  const int64_t end = EndOf(client_, "job");
  Waiter bob(server(), "job", "bob");
  Told();
  const Reply token = bob.Read();
  ASSERT_TRUE(token.IsInteger()) << token;
  const Command granted = Granted("job", "bob", token);
  EXPECT_GT(NumbersOf(granted).since, end);
  EXPECT_EQ(ToldPlainly(), (Commands{{"DEL", "job"}, granted}));
  ExpectSameElsewhere();
}

// What prolongs the string's life, or changes its value to somebody else's, goes on keeping out.
TEST_F(HandOverTest, AStringThatLivesLonger) {
  const std::vector<Command> prolongings = {
      {"PERSIST"},          {"PEXPIRE", "60000"},
      {"SET", "zoe"},       {"SET", "alice", "PX", "60000"},
      {"GETEX", "PERSIST"}, {"LOCK.TOUCH", "alice", "PX", "60000"}};
  std::vector<Waiter> waiters;
  for (Command command : prolongings) {
    command.insert(command.begin() + 1, "job:" + std::to_string(waiters.size()));
    client_.Do("SET", command[1], "alice", "PX", 300);
    waiters.emplace_back(server(), command[1], "bob");
    EXPECT_FALSE(client_.Do(command).IsError());
  }
  LetPass(Milliseconds{350});
  for (size_t i = 0; i < waiters.size(); i++) {
    SCOPED_TRACE(prolongings[i][0] + " " + std::to_string(i));
    const std::string key = "job:" + std::to_string(i);
    EXPECT_FALSE(waiters[i].HasReply());
    EXPECT_EQ(LineOf(client_, key), Owners{"bob"});
    EXPECT_EQ(client_.Do("DEL", key), Reply::Int(1));
    EXPECT_TRUE(waiters[i].Read().IsInteger());
  }
}

// A lock that a stranger overwrites: forced open for its holder, closed for those who wait.
TEST_F(HandOverTest, AStringInPlaceOfTheLock) {
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

// A value that nobody can have as an owner.
TEST_F(HandOverTest, LongAndEmptyStrings) {
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

// --- Something else in its place --------------------------------------------------------------

// Commands that put a key of another type there: neither a lock nor a string.
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

TEST_F(HandOverTest, WhenSomethingElseComesInItsPlace) {
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

TEST(EvictionTest, AnEvictedLockMakesRoom) {
  for (const char* policy : {"volatile-ttl", "allkeys-random"}) {
    SCOPED_TRACE(policy);
    Server server({.args = {"--maxmemory-policy", policy}});
    Client client = server.Connect();
    const int64_t alice = MustAcquire(client, "job", "alice");
    Waiter bob(server, "job", "bob");
    const int64_t used = std::stoll(InfoField(client, "memory", "used_memory"));
    EXPECT_EQ(client.Do("CONFIG", "SET", "maxmemory", used + 4'000'000), Reply::Ok());
    // Other keys that may go live longer, but in the end it is the lock's turn.
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

// --- WAIT, the server's own -------------------------------------------------------------------

TEST(WaitForReplicasTest, CoversTheGrant) {
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
