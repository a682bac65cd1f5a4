// SESSION: holds that end with their connection. LINGER: locks that stay closed for a while after a
// hold ended without a release.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <iostream>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "support/eventually.h"
#include "support/lateness.h"
#include "support/lock_test.h"
#include "support/replication_stream.h"
#include "support/resp3.h"
#include "support/server.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

using Owners = std::vector<std::string>;

const Command kSession = {"SESSION"};

class SessionsTest : public SharedWaitingTest<SessionsTest> {
 protected:
  Reply Release(std::string_view key, std::string_view owner) {
    return client_.Do("LOCK.RELEASE", key, owner);
  }

  // Whether the owner's hold is bound to a connection; null if it holds nothing.
  Reply IsSession(std::string_view key, std::string_view owner) {
    const Reply hold = HoldOf(client_, key, owner);
    return hold.IsNil() ? hold : hold.Field("session");
  }

  bool BecomesFree(std::string_view key) {
    return Eventually([&] { return client_.Do("LOCK.INFO", key).IsNil(); });
  }

  // Closes the connection and waits until the server has handled that.
  void Close(Waiter& connection) {
    connection.Close();
    AwaitGone(client_, connection.id());
  }
};

const Reply kYes = Reply::Int(1);
const Reply kNo = Reply::Int(0);

// --- Ends -------------------------------------------------------------------------------------

struct End {
  const char* name;
  std::function<void(RawWaiter&, Client&)> end;
};

const std::vector<End> kEnds = {
    {"closed", [](RawWaiter& holder, Client& /*client*/) { holder.connection.Close(); }},
    {"half-closed", [](RawWaiter& holder, Client& /*client*/) { holder.HalfClose(); }},
    {"reset", [](RawWaiter& holder, Client& /*client*/) { holder.Reset(); }},
    {"CLIENT KILL",
     [](RawWaiter& holder, Client& client) {
       EXPECT_EQ(client.Do("CLIENT", "KILL", "ID", holder.id()), Reply::Int(1));
     }},
    {"CLIENT KILL of itself",
     [](RawWaiter& holder, Client& /*client*/) {
       EXPECT_EQ(holder.connection.Do("CLIENT", "KILL", "ID", holder.id(), "SKIPME", "no"),
                 Reply::Int(1));
     }},
    {"QUIT", [](RawWaiter& holder,
                Client& /*client*/) { EXPECT_EQ(holder.connection.Do("QUIT"), Reply::Ok()); }},
    {"QUIT in a pipeline",
     [](RawWaiter& holder, Client& /*client*/) {
       SendAtOnce(holder.connection, {{"LOCK.TOUCH", "job", "alice", "PX", "60000"}, {"QUIT"}});
     }},
    {"broken protocol",
     [](RawWaiter& holder, Client& /*client*/) { holder.connection.WriteRaw("*1\r\n!\r\n"); }},
    {"too slow a reader",
     [](RawWaiter& holder, Client& client) {
       EXPECT_EQ(client.Do("CONFIG", "SET", "client-output-buffer-limit", "normal 100000 0 0"),
                 Reply::Ok());
       client.Do("SETRANGE", "large", 4'000'000, "x");
       SendAtOnce(holder.connection, Commands(10, {"GETRANGE", "large", "0", "-1"}));
       AwaitGone(client, holder.id());
       client.Do("CONFIG", "SET", "client-output-buffer-limit", "normal 0 0 0");
     }},
    {"killed while it waits for another lock",
     [](RawWaiter& holder, Client& client) {
       MustAcquire(client, "task", "zoe");
       holder.Wait("task", "alice");
       EXPECT_EQ(client.Do("CLIENT", "KILL", "ID", holder.id()), Reply::Int(1));
     }},
};

// At once, whatever the lease, the count and the number of locks.
TEST_F(SessionsTest, HoldEndsWithItsConnection) {
  for (const End& end : kEnds) {
    SCOPED_TRACE(end.name);
    StartAfresh();
    RawWaiter holder(server());
    const int64_t token = MustObtain(holder.connection, Acquiring("job", "alice", kSession));
    EXPECT_EQ(IsSession("job", "alice"), kYes);
    EXPECT_EQ(client_.Do("LOCK.FENCE", "job", token), Reply::Int(1));
    Waiter bob(server(), "job", "bob");
    end.end(holder, client_);
    const Reply next = bob.Read();
    EXPECT_GT(next.integer, token) << next;
    EXPECT_EQ(HoldersOf(client_, "job"), Owners{"bob"});
    EXPECT_EQ(IsSession("job", "bob"), kNo);
    EXPECT_EQ(Release("job", "alice"), Reply::Int(0));
  }
}

TEST_F(SessionsTest, HoldWithoutSessionOutlivesConnection) {
  Waiter holder(server());
  MustAcquire(holder, "job", "alice");
  MustObtain(holder, Acquiring("task", "alice", kSession));
  EXPECT_EQ(IsSession("job", "alice"), kNo);
  Close(holder);
  EXPECT_EQ(HoldersOf(client_, "job"), Owners{"alice"});
  EXPECT_EQ(client_.Do("LOCK.INFO", "task"), Reply::Nil());
}

TEST_F(SessionsTest, NextWaiterIsGrantedWhenSessionEnds) {
  Lateness lateness(client_);
  for (int round = 0; round < 15; round++) {
    Waiter holder(server());
    MustObtain(holder, Acquiring("job", "alice", kSession));
    Waiter bob(server(), "job", "bob");
    const auto start = Clock::now();
    holder.Close();
    ASSERT_TRUE(bob.Read().IsInteger());
    const std::chrono::duration<double, std::milli> took = Clock::now() - start;
    lateness.Add(took.count());
    ASSERT_EQ(Release("job", "bob"), Reply::Int(1));
  }
  EXPECT_TRUE(lateness.IsLessThanCron("locks of closed sessions"));
}

TEST_F(SessionsTest, ResetKeepsConnectionAndHold) {
  Waiter holder(server());
  const int64_t token = MustObtain(holder, Acquiring("job", "alice", kSession));
  EXPECT_EQ(holder.Do("RESET"), Reply::Status("RESET"));
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job"), Reply::Int(token));
  EXPECT_EQ(IsSession("job", "alice"), kYes);
  Close(holder);
  EXPECT_EQ(client_.Do("LOCK.INFO", "job"), Reply::Nil());
}

TEST_F(SessionsTest, CountedHoldEndsCompletely) {
  Waiter holder(server());
  for (int i = 0; i < 3; i++) {
    MustObtain(holder, Acquiring("job", "alice", {"SESSION", "REENTRANT"}));
  }
  EXPECT_EQ(HoldOf(client_, "job", "alice").Field("count"), Reply::Int(3));
  EXPECT_EQ(holder.Do("LOCK.RELEASE", "job", "alice"), Reply::Int(1));
  EXPECT_EQ(IsSession("job", "alice"), kYes) << "two are left";
  Close(holder);
  EXPECT_EQ(client_.Do("LOCK.INFO", "job"), Reply::Nil());
}

TEST_F(SessionsTest, AllLocksOfSetEnd) {
  Waiter holder(server());
  MustObtain(holder, Acquiring("a", "alice", {"SESSION", "ALSO", "2", "b", "c"}));
  for (const char* key : {"a", "b", "c"}) EXPECT_EQ(IsSession(key, "alice"), kYes) << key;
  Waiter bob = Waiter::Asking(
      server(), Acquiring("c", "bob", {"SESSION", "WAIT", "60000", "ALSO", "1", "a"}));
  EXPECT_EQ(Release("b", "alice"), Reply::Int(1));
  Close(holder);
  EXPECT_TRUE(bob.Read().IsInteger());
  EXPECT_EQ(HoldersOf(client_, "a"), Owners{"bob"});
  EXPECT_EQ(HoldersOf(client_, "c"), Owners{"bob"});
  EXPECT_EQ(IsSession("a", "bob"), kYes) << "granted while it waited";
  Close(bob);
  EXPECT_EQ(client_.Do("DBSIZE"), Reply::Int(0));
}

TEST_F(SessionsTest, ManyLocksOfOneConnectionEnd) {
  RawWaiter holder(server());
  Commands acquires;
  for (int i = 0; i < 2000; i++) {
    acquires.push_back(Acquiring("k" + std::to_string(i), "alice", kSession));
  }
  for (const Reply& reply : DoAtOnce(holder.connection, acquires)) ASSERT_TRUE(reply.IsInteger());
  EXPECT_EQ(client_.Do("DBSIZE"), Reply::Int(2000));
  holder.connection.Close();
  AwaitGone(client_, holder.id());
  // They are removed in batches, but for every client they have already ended.
  EXPECT_EQ(client_.Do("LOCK.FENCE", "k1999"), Reply::Nil());
  EXPECT_EQ(client_.Do("LOCK.INFO", "k1998"), Reply::Nil());
  MustAcquire(client_, "k1997", "bob");
  EXPECT_TRUE(Eventually([&] { return client_.Do("DBSIZE") == Reply::Int(1); }));
}

// Each of several holders is bound independently.
TEST_F(SessionsTest, EachHolderIsBoundSeparately) {
  for (const Command& mode : Commands{{"SHARED"}, {"LIMIT", "3"}}) {
    SCOPED_TRACE(mode[0]);
    StartAfresh();
    Command session = mode;
    session.emplace_back("SESSION");
    Waiter alice(server());
    Waiter bob(server());
    MustObtain(alice, Acquiring("job", "alice", session));
    MustObtain(bob, Acquiring("job", "bob", session));
    MustObtain(client_, Acquiring("job", "carol", mode));
    EXPECT_EQ(IsSession("job", "alice"), kYes);
    EXPECT_EQ(IsSession("job", "bob"), kYes);
    EXPECT_EQ(IsSession("job", "carol"), kNo);
    Close(alice);
    EXPECT_EQ(HoldersOf(client_, "job"), (Owners{"bob", "carol"}));
    EXPECT_EQ(Release("job", "carol"), Reply::Int(1));
    EXPECT_EQ(IsSession("job", "bob"), kYes) << "alone now";
    MustObtain(client_, Acquiring("job", "dave", mode));
    EXPECT_EQ(IsSession("job", "bob"), kYes) << "and in company again";
    Close(bob);
    EXPECT_EQ(HoldersOf(client_, "job"), Owners{"dave"});
  }
}

TEST_F(SessionsTest, BindingFollowsUpgradeAndDowngrade) {
  Waiter alice(server());
  MustObtain(alice, Acquiring("job", "alice", {"SHARED", "SESSION"}));
  MustObtain(alice, Acquiring("job", "alice", kSession));
  EXPECT_EQ(IsSession("job", "alice"), kYes);
  MustObtain(alice, Acquiring("job", "alice", {"SHARED", "SESSION"}));
  EXPECT_EQ(IsSession("job", "alice"), kYes);
  // The connection on which she waits for the upgrade is not that of her shared hold.
  MustObtain(client_, Acquiring("job", "bob", {"SHARED"}));
  Waiter upgrade =
      Waiter::Asking(server(), Acquiring("job", "alice", {"SESSION", "WAIT", "60000"}));
  Close(alice);
  EXPECT_EQ(HoldersOf(client_, "job"), Owners{"bob"}) << "the shared hold has ended";
  EXPECT_EQ(LineOf(client_, "job"), Owners{"alice"}) << "and the request stays";
  Release("job", "bob");
  EXPECT_TRUE(upgrade.Read().IsInteger());
  EXPECT_EQ(IsSession("job", "alice"), kYes);
  Close(upgrade);
  EXPECT_EQ(client_.Do("LOCK.INFO", "job"), Reply::Nil());
}

// --- Binding and unbinding --------------------------------------------------------------------

TEST_F(SessionsTest, ReacquireMovesBindingToNewConnection) {
  Waiter first(server());
  Waiter second(server());
  const int64_t token = MustObtain(first, Acquiring("job", "alice", kSession));
  EXPECT_EQ(MustObtain(second, Acquiring("job", "alice", kSession)), token);
  Close(first);
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job"), Reply::Int(token));
  EXPECT_EQ(IsSession("job", "alice"), kYes);
  Close(second);
  EXPECT_EQ(client_.Do("LOCK.INFO", "job"), Reply::Nil());
}

TEST_F(SessionsTest, AcquireWithoutSessionRemovesBinding) {
  for (const bool same_connection : {true, false}) {
    SCOPED_TRACE(same_connection ? "same connection" : "another connection");
    StartAfresh();
    Waiter holder(server());
    const int64_t token = MustObtain(holder, Acquiring("job", "alice", kSession));
    EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", "alice", "PX", kMinute), Reply::Int(1));
    EXPECT_EQ(IsSession("job", "alice"), kYes) << "TOUCH leaves it alone";
    EXPECT_EQ(MustAcquire(same_connection ? holder : client_, "job", "alice"), token);
    EXPECT_EQ(IsSession("job", "alice"), kNo);
    Close(holder);
    EXPECT_EQ(client_.Do("LOCK.FENCE", "job"), Reply::Int(token));
    // An ordinary hold can be bound.
    Waiter binder(server());
    EXPECT_EQ(MustObtain(binder, Acquiring("job", "alice", kSession)), token);
    EXPECT_EQ(IsSession("job", "alice"), kYes);
    Close(binder);
    EXPECT_EQ(client_.Do("LOCK.INFO", "job"), Reply::Nil());
  }
}

TEST_F(SessionsTest, GrantToWaiterIsBound) {
  MustAcquire(client_, "job", "alice");
  Waiter bob = Waiter::Asking(server(), Acquiring("job", "bob", {"SESSION", "WAIT", "60000"}));
  Waiter carol = Waiter::Asking(server(), Acquiring("job", "carol", {"WAIT", "60000"}));
  Release("job", "alice");
  EXPECT_TRUE(bob.Read().IsInteger());
  EXPECT_EQ(IsSession("job", "bob"), kYes);
  bob.Close();
  EXPECT_TRUE(carol.Read().IsInteger());
  EXPECT_EQ(IsSession("job", "carol"), kNo);
}

// A newer call takes over the position: its connection counts.
TEST_F(SessionsTest, NewerCallBindsToItsConnection) {
  MustAcquire(client_, "job", "alice");
  const Command wait = Acquiring("job", "bob", {"SESSION", "WAIT", "60000"});
  Waiter older = Waiter::Asking(server(), wait);
  Waiter newer = Waiter::Asking(server(), wait);
  EXPECT_TRUE(older.Read().IsError("UNBLOCKED "));
  Release("job", "alice");
  EXPECT_TRUE(newer.Read().IsInteger());
  Close(older);
  EXPECT_EQ(IsSession("job", "bob"), kYes);
  Close(newer);
  EXPECT_EQ(client_.Do("LOCK.INFO", "job"), Reply::Nil());
}

// first waits with SESSION. alice releases, and around that time first is killed. Whether or not it
// was granted and bound, it holds nothing in the end, and second is next.
TEST_F(SessionsTest, KilledWaiterLeavesNoHold) {
  for (int round = 0; round < 200; round++) {
    MustAcquire(client_, "job", "alice");
    Waiter first =
        Waiter::Asking(server(), Acquiring("job", "first", {"SESSION", "WAIT", "60000"}));
    Waiter second(server());
    second.Send(AcquireWaiting("job", "second"));
    ASSERT_TRUE(Eventually([&] { return WaitingFor(client_, "job") == 2; }));
    const Command release = {"LOCK.RELEASE", "job", "alice"};
    const Command kill = {"CLIENT", "KILL", "ID", std::to_string(first.id())};
    RawConnection driver = server().ConnectRaw();
    const std::vector<Commands> passes = {{release, kill},
                                          InPasses({{release}, {kill}}),
                                          InPasses({{release}, {}, {kill}}),
                                          {kill, release}};
    for (const Reply& reply :
         DoAtOnce(driver, passes[static_cast<size_t>(round) % passes.size()])) {
      ASSERT_FALSE(reply.IsError()) << reply;
    }
    ASSERT_TRUE(second.Read().IsInteger()) << "round " << round;
    ASSERT_EQ(HoldersOf(client_, "job"), Owners{"second"});
    ASSERT_EQ(WaitersNow(client_), "0");
    ASSERT_EQ(Release("job", "second"), Reply::Int(1));
  }
}

// alice's connection is killed before it receives the reply to her upgrade, and the lease of her
// shared hold has ended when the upgrade is reverted: nothing is left that could be bound.
TEST_F(SessionsTest, RevertedUpgradeOfEndedHoldLeavesNothing) {
  const bool delivers_at_once = EngineOf(client_).starts_with("Redis 7.0.");
  int taken_back = 0;
  for (int round = 0; round < 5; round++) {
    MustAcquire(client_, "other", "alice");
    const std::string dump = client_.Do("DUMP", "other").text;
    Client alice = server().Connect();
    MustObtain(alice, Acquiring("job", "alice", {"SHARED", "SESSION"}, 150));
    const int64_t end = EndOf(client_, "job");
    MustObtain(client_, Acquiring("job", "bob", {"SHARED"}));
    RawWaiter upgrade(server());
    upgrade.Wait("job", "alice");
    RawConnection driver = server().ConnectRaw();
    DoAtOnce(driver, InPasses({{{"LOCK.RELEASE", "job", "bob"}},
                               {{"CLIENT", "PAUSE", "60000", "WRITE"},
                                {"CLIENT", "KILL", "ID", std::to_string(upgrade.id())}}}));
    const bool delivered = !upgrade.connection.Ends();
    ASSERT_TRUE(Eventually([&] { return ServerNow(client_) > end; }));
    ASSERT_EQ(client_.Do("CLIENT", "UNPAUSE"), Reply::Ok());
    if (!delivered) {
      taken_back++;
      ASSERT_TRUE(BecomesFree("job"));
      ASSERT_EQ(client_.Do("RESTORE", "job", 0, dump), Reply::Ok());
      EXPECT_EQ(IsSession("job", "alice"), kNo);
    }
    client_.Do("DEL", "job", "other");
  }
  std::cout << taken_back << " of 5 upgrades were taken back\n";
  EXPECT_EQ(taken_back == 0, delivers_at_once);
}

// The reply arrives before the connection closes.
TEST_F(SessionsTest, AcquireBeforeQuitIsAnswered) {
  for (int round = 0; round < 20; round++) {
    RawConnection raw = server().ConnectRaw();
    const auto replies = DoAtOnce(raw, {Acquiring("job", "alice", kSession), {"QUIT"}});
    EXPECT_TRUE(replies[0].IsInteger()) << replies[0];
    ASSERT_TRUE(BecomesFree("job"));
  }
}

// All readers disconnect at once.
TEST_F(SessionsTest, AllHoldsEndWhenManyConnectionsClose) {
  std::vector<Client> readers;
  for (int i = 0; i < 100; i++) {
    readers.push_back(server().Connect());
    MustObtain(readers.back(),
               Acquiring("job", "reader " + std::to_string(i), {"SHARED", "SESSION"}));
  }
  MustObtain(client_, Acquiring("job", "stays", {"SHARED"}));
  Waiter writer(server(), "job", "writer");
  server().Pause();
  readers.clear();
  server().Continue();
  ASSERT_TRUE(Eventually([&] { return HoldersOf(client_, "job") == Owners{"stays"}; }));
  EXPECT_FALSE(writer.HasReply());
  Release("job", "stays");
  EXPECT_TRUE(writer.Read().IsInteger());
}

TEST_F(SessionsTest, WorksInTransactions) {
  Waiter holder(server());
  holder.Do("MULTI");
  holder.Do(Acquiring("job", "alice", {"SESSION", "WAIT", "1000"}));
  holder.Do(Acquiring("job", "bob", {"SESSION", "WAIT", "1000"}));
  const Reply replies = holder.Do("EXEC");
  ASSERT_EQ(replies.elements.size(), 2U) << replies;
  EXPECT_TRUE(replies.elements[0].IsInteger());
  EXPECT_EQ(replies.elements[1], Reply::Nil()) << "one try";
  EXPECT_EQ(IsSession("job", "alice"), kYes);
  Close(holder);
  EXPECT_EQ(client_.Do("LOCK.INFO", "job"), Reply::Nil());
}

TEST_F(SessionsTest, IsRefusedInScriptsAndFunctions) {
  const std::string call = "redis.pcall('LOCK.ACQUIRE', 'job', 'alice', 'PX', 60000, 'SESSION')";
  const std::string error =
      "ERR SESSION requires a connection: it cannot be used in scripts, functions or after THEN";
  client_.Do(
      "FUNCTION", "LOAD", "REPLACE",
      "#!lua name=sessions\nredis.register_function('bind', function() return " + call + " end)");
  for (const Command& command :
       Commands{{"EVAL", "return " + call, "1", "job"}, {"FCALL", "bind", "1", "job"}}) {
    EXPECT_EQ(client_.Do(command), Reply::Error(error));
    EXPECT_EQ(client_.Do("DBSIZE"), Reply::Int(0)) << "nothing has happened";
    // Nor does the owner's existing hold become bound or unbound.
    Waiter holder(server());
    MustObtain(holder, Acquiring("job", "alice", kSession));
    EXPECT_EQ(client_.Do(command), Reply::Error(error));
    EXPECT_EQ(IsSession("job", "alice"), kYes);
    Close(holder);
    client_.Do("MULTI");
    client_.Do(command);
    EXPECT_EQ(client_.Do("EXEC"), Reply::Array({Reply::Error(error)}));
    EXPECT_EQ(client_.Do("DBSIZE"), Reply::Int(0));
  }
}

// An acquire without SESSION in a script unbinds like any other call.
TEST_F(SessionsTest, AcquireInScriptRemovesBinding) {
  Waiter holder(server());
  const int64_t token = MustObtain(holder, Acquiring("job", "alice", kSession));
  EXPECT_EQ(client_.Do("EVAL", "return redis.call('LOCK.ACQUIRE', 'job', 'alice', 'PX', 60000)", 1,
                       "job"),
            Reply::Int(token));
  EXPECT_EQ(IsSession("job", "alice"), kNo);
  Close(holder);
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job"), Reply::Int(token));
}

// --- An old connection and a new hold ---------------------------------------------------------

// Whatever ends a hold ends its binding: a new hold of the same owner is not bound.
TEST_F(SessionsTest, NewHoldOfSameOwnerIsNotBound) {
  const std::vector<Commands> ways = {
      {{"LOCK.RELEASE", "job", "alice"}},
      {{"DEL", "job"}},
      {{"UNLINK", "job"}},
      {{"FLUSHALL"}},
      {{"FLUSHALL", "ASYNC"}},
      {{"FLUSHDB"}},
      {{"RENAME", "job", "elsewhere"}},
      {{"MOVE", "job", "9"}},
      {{"SET", "job", "x"}, {"DEL", "job"}},
      {{"SET", "job", "alice"}},
      {{"EXPIRE", "job", "-1"}},
      {{"LOCK.TOUCH", "job", "alice", "PX", "1"}, {"DEBUG", "SLEEP", "0.005"}},
      {{"MULTI"}, {"DEL", "job"}, {"EXEC"}},
      {{"LOCK.ACQUIRE", "other", "zoe", "PX", "60000"}, {"RENAME", "other", "job"}, {"DEL", "job"}},
  };
  for (const Commands& way : ways) {
    SCOPED_TRACE(way[0][0] + " " + way.back()[0]);
    StartAfresh();
    Waiter holder(server());
    const int64_t old = MustObtain(holder, Acquiring("job", "alice", kSession));
    for (const Command& command : way) {
      const Reply reply = client_.Do(command);
      EXPECT_FALSE(reply.IsError()) << reply;
    }
    const int64_t token = MustAcquire(client_, "job", "alice");
    EXPECT_GT(token, old);
    EXPECT_EQ(IsSession("job", "alice"), kNo);
    Close(holder);
    EXPECT_EQ(client_.Do("LOCK.FENCE", "job"), Reply::Int(token));
  }
}

// The same if the lock always had a holder.
TEST_F(SessionsTest, NewHoldOfSameOwnerAmongOthersIsNotBound) {
  MustObtain(client_, Acquiring("job", "bob", {"SHARED"}));
  Waiter holder(server());
  const int64_t old = MustObtain(holder, Acquiring("job", "alice", {"SHARED", "SESSION"}, 20));
  ASSERT_TRUE(Eventually([&] { return HoldersOf(client_, "job") == Owners{"bob"}; }));
  const int64_t token = MustObtain(client_, Acquiring("job", "alice", {"SHARED"}));
  EXPECT_GT(token, old);
  Close(holder);
  EXPECT_EQ(HoldersOf(client_, "job"), (Owners{"bob", "alice"}));
}

// Another owner's hold is not ended either.
TEST_F(SessionsTest, OtherOwnersHoldIsNotEnded) {
  Waiter holder(server());
  MustObtain(holder, Acquiring("job", "alice", kSession, 300));
  Waiter bob(server(), "job", "bob");
  EXPECT_TRUE(bob.Read().IsInteger());
  Close(holder);
  EXPECT_EQ(HoldersOf(client_, "job"), Owners{"bob"});
}

// The close of the old connection and the new call arrive in one pass of the event loop: the old
// hold has ended for every client, and the new token is valid.
TEST_F(SessionsTest, AcquireInSamePassAsCloseGetsNewHold) {
  struct Case {
    Commands between;
    Command acquire;
    bool session;
  };
  const Command plain = Acquiring("job", "alice", {});
  const Command bound = Acquiring("job", "alice", kSession);
  const std::vector<Case> cases = {
      {{}, plain, false},
      {{}, bound, true},
      {{}, Acquiring("job", "bob", {}), false},
      {{{"LOCK.RELEASE", "job", "alice"}}, plain, false},
      {{{"DEL", "job"}}, bound, true},
      {{{"FLUSHALL"}}, plain, false},
      {{{"LOCK.RELEASE", "job", "alice"}}, Acquiring("job", "bob", {}), false},
      {{{"RENAME", "job", "elsewhere"}}, plain, false},
  };
  for (const Case& test : cases) {
    SCOPED_TRACE((test.between.empty() ? "" : test.between[0][0] + " ") + test.acquire.back());
    StartAfresh();
    Waiter holder(server());
    const int64_t old = MustObtain(holder, bound);
    RawConnection driver = server().ConnectRaw();
    Commands commands = {{"CLIENT", "KILL", "ID", std::to_string(holder.id())}};
    commands.insert(commands.end(), test.between.begin(), test.between.end());
    commands.push_back(test.acquire);
    const Reply token = DoAtOnce(driver, commands).back();
    ASSERT_TRUE(token.IsInteger()) << token;
    EXPECT_GT(token.integer, old);
    AwaitGone(client_, holder.id());
    EXPECT_EQ(client_.Do("LOCK.FENCE", "job"), token);
    EXPECT_EQ(IsSession("job", test.acquire[2]), Reply::Int(test.session ? 1 : 0));
    driver.Close();
    if (test.session) {
      EXPECT_TRUE(BecomesFree("job"));
    }
  }
}

// In whatever order the server sees them.
TEST_F(SessionsTest, ConcurrentCloseAndAcquireStayConsistent) {
  int same = 0;
  constexpr int kRounds = 60;
  for (int round = 0; round < kRounds; round++) {
    Waiter holder(server());
    const int64_t old = MustObtain(holder, Acquiring("job", "alice", kSession));
    RawConnection next = server().ConnectRaw();
    const bool session = round % 2 == 0;
    server().Pause();
    if (round % 4 < 2) holder.Close();
    next.SendCommand(Acquiring("job", "alice", session ? kSession : Command{}));
    if (round % 4 >= 2) holder.Close();
    server().Continue();
    const Reply token = next.ReadReply();
    ASSERT_TRUE(token.IsInteger()) << token;
    if (token.integer == old) same++;
    AwaitGone(client_, holder.id());
    ASSERT_EQ(client_.Do("LOCK.FENCE", "job"), token) << "round " << round;
    ASSERT_EQ(IsSession("job", "alice"), Reply::Int(session ? 1 : 0));
    client_.Do("DEL", "job");
  }
  std::cout << same << " of " << kRounds << " new calls found the old hold\n";
}

// --- Whether a binding follows a lock that moves ----------------------------------------------

TEST_F(SessionsTest, RenameMoveAndRestoreRemoveBinding) {
  const std::vector<Commands> ways = {
      {{"RENAME", "job", "task"}},
      {{"RENAMENX", "job", "task"}},
      {{"MOVE", "job", "9"},
       {"SELECT", "9"},
       {"RENAME", "job", "task"},
       {"MOVE", "task", "0"},
       {"SELECT", "0"}},
      {{"RESTORE", "task", "0", "PAYLOAD"}, {"DEL", "job"}},
      {{"RESTORE", "job", "0", "PAYLOAD", "REPLACE"}, {"RENAME", "job", "task"}},
  };
  for (const Commands& way : ways) {
    SCOPED_TRACE(way[0][0]);
    StartAfresh();
    Waiter holder(server());
    const int64_t token = MustObtain(holder, Acquiring("job", "alice", kSession));
    const std::string payload = client_.Do("DUMP", "job").text;
    for (Command command : way) {
      std::replace(command.begin(), command.end(), std::string("PAYLOAD"), payload);
      const Reply reply = client_.Do(command);
      EXPECT_FALSE(reply.IsError()) << reply;
    }
    EXPECT_EQ(IsSession("task", "alice"), kNo);
    Close(holder);
    EXPECT_EQ(client_.Do("LOCK.FENCE", "task"), Reply::Int(token)) << "its lease is what is left";
  }
}

TEST_F(SessionsTest, SwapDbKeepsBinding) {
  Client other = server().Connect();
  other.Do("SELECT", 9);
  Waiter holder(server());
  MustObtain(holder, Acquiring("job", "alice", kSession));
  MustAcquire(other, "job", "alice");
  EXPECT_EQ(client_.Do("SWAPDB", 0, 9), Reply::Ok());
  EXPECT_EQ(IsSession("job", "alice"), kNo);
  EXPECT_EQ(HoldOf(other, "job", "alice").Field("session"), kYes);
  Close(holder);
  EXPECT_EQ(HoldersOf(client_, "job"), Owners{"alice"});
  EXPECT_EQ(other.Do("LOCK.INFO", "job"), Reply::Nil());
  // Close and swap in one pass.
  Waiter second(server());
  MustObtain(second, Acquiring("task", "alice", kSession));
  RawConnection driver = server().ConnectRaw();
  DoAtOnce(driver, {{"CLIENT", "KILL", "ID", std::to_string(second.id())}, {"SWAPDB", "0", "9"}});
  EXPECT_EQ(client_.Do("LOCK.INFO", "task"), Reply::Nil());
  EXPECT_TRUE(Eventually([&] { return other.Do("LOCK.INFO", "task").IsNil(); }));
  EXPECT_EQ(HoldersOf(other, "job"), Owners{"alice"});
}

TEST_F(SessionsTest, DatabasesAreBoundSeparately) {
  Client other = server().Connect();
  other.Do("SELECT", 9);
  Waiter holder(server());
  MustObtain(holder, Acquiring("job", "alice", kSession));
  holder.Do("SELECT", 9);
  MustObtain(holder, Acquiring("job", "alice", kSession));
  MustAcquire(client_, "job", "alice");  // unbinds the hold in database 0
  EXPECT_EQ(IsSession("job", "alice"), kNo);
  EXPECT_EQ(HoldOf(other, "job", "alice").Field("session"), kYes);
  holder.Do("SELECT", 5);
  Close(holder);
  EXPECT_EQ(HoldersOf(client_, "job"), Owners{"alice"});
  EXPECT_EQ(other.Do("LOCK.INFO", "job"), Reply::Nil());
}

// --- Paused writes ----------------------------------------------------------------------------

TEST_F(SessionsTest, WritePausePostponesEnd) {
  Waiter holder(server());
  MustObtain(holder, Acquiring("job", "alice", kSession));
  Waiter bob(server(), "job", "bob");
  EXPECT_EQ(client_.Do("CLIENT", "PAUSE", kMinute, "WRITE"), Reply::Ok());
  Close(holder);
  EXPECT_FALSE(bob.HasReply(Milliseconds{50}));
  EXPECT_EQ(HoldersOf(client_, "job"), Owners{}) << "it has ended for everybody";
  EXPECT_EQ(client_.Do("EXISTS", "job"), Reply::Int(1)) << "but is not removed yet";
  EXPECT_EQ(client_.Do("CLIENT", "UNPAUSE"), Reply::Ok());
  EXPECT_TRUE(bob.Read().IsInteger());
  EXPECT_EQ(HoldersOf(client_, "job"), Owners{"bob"});
}

TEST_F(SessionsTest, FullPausePostponesEnd) {
  Waiter holder(server());
  MustObtain(holder, Acquiring("job", "alice", kSession));
  Waiter bob(server(), "job", "bob");
  const int64_t before = ServerNow(client_);
  EXPECT_EQ(client_.Do("CLIENT", "PAUSE", 150, "ALL"), Reply::Ok());
  holder.Close();
  EXPECT_TRUE(bob.Read().IsInteger());
  EXPECT_GE(EndOf(client_, "job") - kMinute, before + 150);
}

// Events before the end of the pause count: the owner's new call, the end of the lease.
TEST_F(SessionsTest, AcquireQueuedDuringPauseGetsValidToken) {
  Waiter holder(server());
  const int64_t token = MustObtain(holder, Acquiring("job", "alice", kSession));
  MustObtain(holder, Acquiring("task", "alice", kSession, 100));
  EXPECT_EQ(client_.Do("CLIENT", "PAUSE", kMinute, "WRITE"), Reply::Ok());
  RawWaiter next(server());
  next.connection.SendCommand(Acquiring("job", "alice", {}));
  Close(holder);
  ASSERT_TRUE(Eventually([&] { return client_.Do("EXISTS", "task") == Reply::Int(0); }));
  EXPECT_EQ(client_.Do("EXISTS", "job"), Reply::Int(1));
  EXPECT_EQ(client_.Do("CLIENT", "UNPAUSE"), Reply::Ok());
  // The call came after the close, although before it was handled: either way its reply is valid.
  const Reply reply = next.connection.ReadReply();
  ASSERT_TRUE(reply.IsInteger()) << reply;
  EXPECT_GE(reply.integer, token);
  client_.Do("PING");
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job"), reply);
}

// --- Memory -----------------------------------------------------------------------------------

// However a bound hold ends, no memory of its binding is left.
TEST_F(SessionsTest, MemoryDoesNotGrow) {
  struct Load {
    const char* name;
    int rounds;
    std::function<Commands(int)> commands;
    Milliseconds pause{0};
  };
  const auto key = [](int round, int i) {
    return "k" + std::to_string(round) + "." + std::to_string(i);
  };
  constexpr int kBatch = 500;
  const auto batch = [](const std::function<Commands(int)>& one) {
    Commands commands;
    for (int i = 0; i < kBatch; i++) {
      for (Command& command : one(i)) commands.push_back(std::move(command));
    }
    return commands;
  };
  const std::vector<Load> loads = {
      {"acquire and release", 12,
       [&](int round) {
         return batch([&](int i) {
           return Commands{Acquiring(key(round, i), "alice", kSession),
                           {"LOCK.RELEASE", key(round, i), "alice"}};
         });
       }},
      {"acquire again and again", 12,
       [&](int /*round*/) {
         return batch([](int /*i*/) { return Commands{Acquiring("job", "alice", kSession)}; });
       }},
      {"bind and unbind", 12,
       [&](int /*round*/) {
         return batch([](int /*i*/) {
           return Commands{Acquiring("job", "alice", kSession), Acquiring("job", "alice", {})};
         });
       }},
      {"DEL", 12,
       [&](int round) {
         return batch([&](int i) {
           return Commands{Acquiring(key(round, i), "alice", kSession), {"DEL", key(round, i)}};
         });
       }},
      {"FLUSHALL", 12,
       [&](int round) {
         Commands commands =
             batch([&](int i) { return Commands{Acquiring(key(round, i), "alice", kSession)}; });
         commands.push_back({"FLUSHALL"});
         return commands;
       }},
      {"readers come and go", 12,
       [&](int round) {
         Commands commands = batch([&](int i) {
           return Commands{Acquiring("job", key(round, i), {"SHARED", "SESSION"}),
                           {"LOCK.RELEASE", "job", key(round, i)}};
         });
         commands.insert(commands.begin(), Acquiring("job", "alice", {"SHARED"}));
         return commands;
       }},
      {"readers' leases end", 12,
       [&](int round) {
         Commands commands = batch([&](int i) {
           return Commands{Acquiring("job", key(round, i), {"SHARED", "SESSION"}, 30)};
         });
         commands.insert(commands.begin(), Acquiring("job", "alice", {"SHARED"}));
         return commands;
       },
       Milliseconds{35}},
      {"readers' leases end, the last one is upgraded", 12,
       [&](int round) {
         Commands commands = batch([&](int i) {
           return Commands{Acquiring("job", key(round, i), {"SHARED", "SESSION"}, 30)};
         });
         commands.insert(commands.begin(),
                         {Acquiring("job", "alice", {}), Acquiring("job", "alice", {"SHARED"})});
         return commands;
       },
       Milliseconds{35}},
  };
  for (const Load& load : loads) {
    SCOPED_TRACE(load.name);
    StartAfresh();
    RawConnection connection = server().ConnectRaw();
    const auto round = [&](int number) {
      for (const Reply& reply : DoAtOnce(connection, load.commands(number))) {
        ASSERT_FALSE(reply.IsError() || reply.IsNil()) << reply;
      }
      LetPass(load.pause);
    };
    const auto used = [&] {
      // Remaining data, if any, is not measured here.
      client_.Do("FLUSHALL");
      return std::stoll(InfoField(client_, "memory", "used_memory"));
    };
    ASSERT_NO_FATAL_FAILURE(round(0));
    ASSERT_NO_FATAL_FAILURE(round(1));
    const int64_t flushed = used();
    int64_t before = 0;
    int64_t after = 0;
    // FLUSHALL unbinds everything, so it must not come between the rounds.
    for (int i = 0; i < load.rounds; i++) {
      ASSERT_NO_FATAL_FAILURE(round(i + 2));
      const int64_t now = std::stoll(InfoField(client_, "memory", "used_memory"));
      if (i == 1) before = now;
      after = now;
    }
    EXPECT_LT(after - before, 200'000) << "in " << (load.rounds - 2) * kBatch << " holds";
    EXPECT_LT(used() - flushed, 100'000);
  }
}

// --- Replicas ---------------------------------------------------------------------------------

class SessionReplicaTest : public ::testing::Test {
 protected:
  SessionReplicaTest() {
    EXPECT_TRUE(
        Eventually([&] { return InfoField(copy_, "replication", "master_link_status") == "up"; },
                   Milliseconds{20000}));
  }

  void ExpectSame() {
    EXPECT_TRUE(Eventually([&] {
      return copy_.Do("DEBUG", "DIGEST") == client_.Do("DEBUG", "DIGEST");
    })) << copy_.Do("LOCK.INFO", "job");
  }

  Server primary_{{.args = {"--repl-diskless-sync", "no"}}};
  Server replica_{{.args = {"--repl-diskless-sync", "no", "--replicaof", "127.0.0.1",
                            std::to_string(primary_.port())}}};
  Client client_ = primary_.Connect();
  Client copy_ = replica_.Connect();
};

TEST_F(SessionReplicaTest, SessionEndIsReplicatedAsFact) {
  ReplicationStream stream(primary_.port());
  const auto replicated = [&] {
    Commands commands = stream.Until(client_);
    std::erase_if(commands, [](const Command& c) { return c[0] == "MULTI" || c[0] == "EXEC"; });
    return commands;
  };
  Waiter holder(primary_);
  MustObtain(holder, Acquiring("job", "alice", kSession));
  ExpectSame();
  EXPECT_EQ(HoldOf(client_, "job", "alice").Field("session"), kYes);
  EXPECT_EQ(HoldOf(copy_, "job", "alice").Field("session"), kNo) << "not on replicas";
  replicated();
  holder.Close();
  AwaitGone(client_, holder.id());
  const Commands end = replicated();
  ASSERT_EQ(end.size(), 1U);
  ASSERT_EQ(end[0].size(), 5U);  // and the time
  EXPECT_EQ((Command{end[0].begin(), end[0].begin() + 3}),
            (Command{"LOCK.FACT", "SESSION", "job"}));
  EXPECT_EQ(end[0][4], "alice");
  ExpectSame();
  EXPECT_EQ(copy_.Do("EXISTS", "job"), Reply::Int(0));

  // One of several holders, one with a count, and one that lingers.
  Waiter second(primary_);
  MustObtain(client_, Acquiring("job", "bob", {"SHARED"}));
  MustObtain(second, Acquiring("job", "alice", {"SHARED", "SESSION", "REENTRANT"}));
  MustObtain(second, Acquiring("job", "alice", {"SHARED", "SESSION", "REENTRANT"}));
  const int64_t token =
      MustObtain(second, Acquiring("task", "alice", {"SESSION", "LINGER", "60000"}));
  replicated();
  second.Close();
  AwaitGone(client_, second.id());
  const Commands ends = replicated();
  ASSERT_EQ(ends.size(), 2U);
  for (const Command& fact : ends) {
    EXPECT_EQ(fact[1], "SESSION");
    EXPECT_EQ(fact.back(), "alice");
  }
  ExpectSame();
  EXPECT_EQ(HoldersOf(copy_, "job"), Owners{"bob"});
  EXPECT_EQ(HoldersOf(copy_, "task"), Owners{});
  EXPECT_EQ(EndOf(copy_, "task"), EndOf(client_, "task"));
  EXPECT_GT(copy_.Do("LOCK.INFO", "task").Field("linger-left-ms").integer, 50000);
  EXPECT_EQ(client_.Do("LOCK.FENCE", "task", token), Reply::Int(0));
}

// After a failover it is an ordinary hold, on the new primary and on the old one.
TEST_F(SessionReplicaTest, FailoverRemovesBindings) {
  Waiter holder(primary_);
  const int64_t token = MustObtain(holder, Acquiring("job", "alice", kSession));
  ExpectSame();
  EXPECT_EQ(client_.Do("FAILOVER"), Reply::Ok());
  ASSERT_TRUE(Eventually(
      [&] {
        return InfoField(copy_, "replication", "role") == "master" &&
               InfoField(client_, "replication", "role") == "slave" &&
               InfoField(client_, "replication", "master_link_status") == "up";
      },
      Milliseconds{20000}));
  EXPECT_EQ(HoldOf(client_, "job", "alice").Field("session"), kNo);
  holder.Close();
  AwaitGone(client_, holder.id());
  EXPECT_EQ(copy_.Do("LOCK.FENCE", "job"), Reply::Int(token));
  EXPECT_EQ(HoldOf(copy_, "job", "alice").Field("session"), kNo);
  ExpectSame();
  // It can be bound again there, to a connection of the new primary.
  Waiter next(replica_);
  EXPECT_EQ(MustObtain(next, Acquiring("job", "alice", kSession)), token);
  EXPECT_EQ(HoldOf(copy_, "job", "alice").Field("session"), kYes);
  next.Close();
  AwaitGone(copy_, next.id());
  EXPECT_EQ(copy_.Do("LOCK.INFO", "job"), Reply::Nil());
  ExpectSame();
}

// The connection closes while a failover is in progress and nothing may be written.
TEST_F(SessionReplicaTest, CloseDuringFailoverKeepsHold) {
  Waiter holder(primary_);
  const int64_t token = MustObtain(holder, Acquiring("job", "alice", kSession));
  ExpectSame();
  replica_.Pause();
  EXPECT_EQ(client_.Do("FAILOVER"), Reply::Ok());
  holder.Close();
  AwaitGone(client_, holder.id());
  EXPECT_EQ(client_.Do("EXISTS", "job"), Reply::Int(1)) << "it cannot be replicated now";
  replica_.Continue();
  ASSERT_TRUE(Eventually([&] { return InfoField(copy_, "replication", "role") == "master"; },
                         Milliseconds{20000}));
  EXPECT_EQ(copy_.Do("LOCK.FENCE", "job"), Reply::Int(token));
  ASSERT_TRUE(
      Eventually([&] { return InfoField(client_, "replication", "master_link_status") == "up"; },
                 Milliseconds{20000}));
  ExpectSame();
  EXPECT_EQ(HoldersOf(client_, "job"), Owners{"alice"});
}

// Promoted manually: the new primary knows nothing about connections of the old one.
TEST_F(SessionReplicaTest, PromotedReplicaHasNoBindings) {
  Waiter holder(primary_);
  const int64_t token = MustObtain(holder, Acquiring("job", "alice", kSession));
  ExpectSame();
  EXPECT_EQ(copy_.Do("REPLICAOF", "NO", "ONE"), Reply::Ok());
  holder.Close();
  AwaitGone(client_, holder.id());
  EXPECT_EQ(client_.Do("LOCK.INFO", "job"), Reply::Nil()) << "it is still a primary too";
  EXPECT_EQ(copy_.Do("LOCK.FENCE", "job"), Reply::Int(token));
  EXPECT_EQ(HoldOf(copy_, "job", "alice").Field("session"), kNo);
  EXPECT_EQ(copy_.Do("LOCK.TOUCH", "job", "alice", "PX", kMinute), Reply::Int(1));
}

// A primary that becomes a replica and a primary again has dropped its bindings.
TEST_F(SessionReplicaTest, DemotionRemovesBindings) {
  Waiter holder(primary_);
  const int64_t token = MustObtain(holder, Acquiring("job", "alice", kSession));
  ExpectSame();
  copy_.Do("REPLICAOF", "NO", "ONE");
  EXPECT_EQ(client_.Do("REPLICAOF", "127.0.0.1", replica_.port()), Reply::Ok());
  EXPECT_EQ(client_.Do("REPLICAOF", "NO", "ONE"), Reply::Ok());
  EXPECT_EQ(HoldOf(client_, "job", "alice").Field("session"), kNo);
  holder.Close();
  AwaitGone(client_, holder.id());
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job"), Reply::Int(token));
}

// --- LINGER -----------------------------------------------------------------------------------

class LingerTest : public SessionsTest {
 protected:
  static constexpr int64_t kLinger = 40000;
  static Command Linger(int64_t ms = kLinger) { return {"LINGER", std::to_string(ms)}; }

  // alice's hold has ended and lingers. Returns its token.
  int64_t LetLinger(const Command& options = Linger()) {
    const int64_t token = MustObtain(client_, Acquiring("job", "alice", options, 1));
    EXPECT_TRUE(
        Eventually([&] { return client_.Do("LOCK.FENCE", "job", token) == Reply::Int(0); }));
    return token;
  }

  int64_t LingerLeft() { return client_.Do("LOCK.INFO", "job").Field("linger-left-ms").integer; }
};

TEST_F(LingerTest, LockStaysClosedAfterLeaseEnds) {
  const int64_t token = MustObtain(client_, Acquiring("job", "alice", Linger(), 30000));
  EXPECT_GT(client_.Do("PTTL", "job").integer, 60000) << "lease and linger";
  EXPECT_LE(client_.Do("PTTL", "job").integer, 70000);
  EXPECT_LE(HoldOf(client_, "job", "alice").Field("lease-left-ms").integer, 30000);
  EXPECT_EQ(HoldOf(client_, "job", "alice").Field("linger-ms"), Reply::Int(kLinger));
  EXPECT_EQ(LingerLeft(), 0) << "not yet";
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", "alice", "PX", 1), Reply::Int(1));
  ASSERT_TRUE(Eventually([&] { return HoldersOf(client_, "job").empty(); }));

  const Reply info = client_.Do("LOCK.INFO", "job");
  EXPECT_EQ(info.Field("mode"), Reply::Str("exclusive"));
  EXPECT_EQ(info.Field("holders"), Reply::Array({}));
  EXPECT_GT(LingerLeft(), kLinger - 10000);
  EXPECT_LE(LingerLeft(), kLinger);
  EXPECT_EQ(client_.Do("TYPE", "job"), Reply::Status("turnstile"));
  EXPECT_GT(client_.Do("PTTL", "job").integer, kLinger - 10000);
  EXPECT_LE(client_.Do("PTTL", "job").integer, kLinger);
  // For its owner it has ended.
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", "alice", "PX", kMinute), Reply::Int(0));
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job", token), Reply::Int(0));
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job"), Reply::Nil());
  // For others it counts.
  EXPECT_EQ(client_.Do(Acquiring("job", "bob", {})), Reply::Nil());
  EXPECT_EQ(client_.Do(Acquiring("job", "bob", {"SHARED"})), Reply::Nil());
  EXPECT_EQ(client_.Do(Acquiring("job", "bob", {"LIMIT", "9"})), Reply::Nil());
  EXPECT_EQ(client_.Do("SET", "job", "plain", "NX"), Reply::Nil());
}

TEST_F(LingerTest, LockStaysClosedAfterSessionEnds) {
  Waiter holder(server());
  MustObtain(holder, Acquiring("job", "alice", {"SESSION", "LINGER", "40000"}));
  const int64_t before = ServerNow(client_);
  Close(holder);
  EXPECT_EQ(HoldersOf(client_, "job"), Owners{});
  EXPECT_GT(LingerLeft(), kLinger - 10000);
  EXPECT_LE(LingerLeft(), kLinger);
  EXPECT_GE(EndOf(client_, "job"), before + kLinger - 1);
  EXPECT_LE(EndOf(client_, "job"), ServerNow(client_) + kLinger);
  EXPECT_EQ(client_.Do(Acquiring("job", "bob", {})), Reply::Nil());
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", "alice", "PX", 1), Reply::Int(0));
}

TEST_F(LingerTest, ReleaseAndRemovalLeaveNoLinger) {
  for (const Command& command : Commands{{"LOCK.RELEASE", "job", "alice"},
                                         {"DEL", "job"},
                                         {"UNLINK", "job"},
                                         {"FLUSHALL"},
                                         {"FLUSHDB"},
                                         {"RENAME", "job", "elsewhere"}}) {
    SCOPED_TRACE(command[0]);
    for (const bool ended : {false, true}) {
      StartAfresh();
      if (ended) {
        LetLinger();
      } else {
        MustObtain(client_, Acquiring("job", "alice", Linger()));
      }
      Waiter bob(server(), "job", "bob");
      EXPECT_FALSE(client_.Do(command).IsError());
      EXPECT_TRUE(bob.Read().IsInteger());
      EXPECT_EQ(HoldersOf(client_, "job"), Owners{"bob"});
      EXPECT_EQ(LingerLeft(), 0);
    }
  }
}

TEST_F(LingerTest, ZeroMeansNoLinger) {
  const int64_t token = LetLinger(Linger(0));
  EXPECT_GT(MustAcquire(client_, "job", "bob"), token);
}

TEST_F(LingerTest, OwnersAcquireDuringLingerIsNewHold) {
  for (const Command& mode : Commands{{}, {"SHARED"}, {"LIMIT", "1"}}) {
    StartAfresh();
    const int64_t old = LetLinger();
    const int64_t token = MustObtain(client_, Acquiring("job", "alice", mode));
    EXPECT_GT(token, old);
    EXPECT_EQ(client_.Do("LOCK.FENCE", "job"), Reply::Int(token));
    EXPECT_EQ(client_.Do("LOCK.FENCE", "job", old), Reply::Int(0));
    EXPECT_EQ(LingerLeft(), 0) << "the old hold lingers no more";
    EXPECT_LE(client_.Do("PTTL", "job").integer, kMinute);
    EXPECT_EQ(Release("job", "alice"), Reply::Int(1));
    EXPECT_EQ(client_.Do("EXISTS", "job"), Reply::Int(0));
  }
}

// Unless there are waiters.
TEST_F(LingerTest, OwnerDoesNotOvertakeWaiters) {
  LetLinger();
  Waiter bob(server(), "job", "bob");
  EXPECT_EQ(client_.Do(Acquiring("job", "alice", {})), Reply::Nil());
  EXPECT_EQ(Release("job", "alice"), Reply::Int(0));
  EXPECT_TRUE(bob.Read().IsInteger());
}

// A linger ends by itself, whatever its owner waits for, so it closes no cycle.
TEST_F(LingerTest, LingerClosesNoCycle) {
  LetLinger();
  Waiter bob(server(), "job", "bob");
  Waiter alice(server(), "job", "alice");
  EXPECT_EQ(LineOf(client_, "job"), (Owners{"bob", "alice"}));
  client_.Do("DEL", "job");
  EXPECT_TRUE(bob.Read().IsInteger());
  EXPECT_FALSE(alice.HasReply());
  Release("job", "bob");
  EXPECT_TRUE(alice.Read().IsInteger());

  // Over two locks.
  client_.Do("DEL", "job");
  LetLinger();
  MustAcquire(client_, "task", "bob");
  Waiter other(server(), "task", "alice");
  const Reply reply = client_.Do(Acquiring("job", "bob", {"WAIT", "20"}));
  EXPECT_EQ(reply, Reply::Nil());
}

TEST_F(LingerTest, OwnersReleaseEndsLinger) {
  const int64_t token = LetLinger();
  Waiter bob(server(), "job", "bob");
  EXPECT_EQ(Release("job", "stranger"), Reply::Int(0));
  EXPECT_FALSE(bob.HasReply());
  EXPECT_EQ(Release("job", "alice"), Reply::Int(0)) << "the hold was over";
  EXPECT_GT(bob.Read().integer, token);
  // Nobody waits: the key is gone.
  Release("job", "bob");
  LetLinger();
  EXPECT_EQ(Release("job", "alice"), Reply::Int(0));
  EXPECT_EQ(client_.Do("EXISTS", "job"), Reply::Int(0));
}

// Whether the lease or the session ended, the waiter is served after the linger and no earlier.
TEST_F(LingerTest, WaitersAreServedWhenLingerEnds) {
  for (const bool active_expiry : {true, false}) {
    for (const bool session : {true, false}) {
      SCOPED_TRACE(std::string(session ? "session" : "lease") + (active_expiry ? ", expiry" : ""));
      StartAfresh();
      client_.Do("DEBUG", "SET-ACTIVE-EXPIRE", active_expiry ? 1 : 0);
      Waiter holder(server());
      Command options = Linger(1500);
      if (session) options.emplace_back("SESSION");
      MustObtain(holder, Acquiring("job", "alice", options, session ? kMinute : 100));
      Waiter bob(server(), "job", "bob");
      int64_t end = EndOf(client_, "job");
      if (session) {
        end = ServerNow(client_) + 1499;
        Close(holder);
        EXPECT_EQ(LineOf(client_, "job"), Owners{"bob"});
      }
      const Reply token = bob.Read();
      ASSERT_TRUE(token.IsInteger()) << token;
      const int64_t granted = EndOf(client_, "job") - kMinute;
      const int64_t free = active_expiry ? FirstFree(client_, end) : end + 1;
      EXPECT_GE(granted, session ? end : free);
      EXPECT_LT(granted, end + 5000) << "by time alone";
    }
  }
  client_.Do("DEBUG", "SET-ACTIVE-EXPIRE", 1);
}

TEST_F(LingerTest, LingeringReaderBlocksWritersAndUpgrades) {
  LetLinger({"SHARED", "LINGER", "40000"});
  EXPECT_EQ(ModeOf(client_, "job"), "shared");
  EXPECT_EQ(client_.Do(Acquiring("job", "writer", {})), Reply::Nil());
  const int64_t bob = MustObtain(client_, Acquiring("job", "bob", {"SHARED"}));
  EXPECT_EQ(HoldersOf(client_, "job"), Owners{"bob"});
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job"), Reply::Int(bob));
  EXPECT_GT(LingerLeft(), 30000);
  EXPECT_EQ(client_.Do(Acquiring("job", "bob", {})), Reply::Nil()) << "no upgrade beside it";
  Waiter upgrade(server(), "job", "bob");
  EXPECT_EQ(Release("job", "alice"), Reply::Int(0));
  EXPECT_GT(upgrade.Read().integer, bob);
  EXPECT_EQ(ModeOf(client_, "job"), "exclusive");
}

// The key exists as long as the linger, even if all others have left.
TEST_F(LingerTest, KeyOutlivesLastReaderUntilLingerEnds) {
  MustObtain(client_, Acquiring("job", "bob", {"SHARED"}));
  LetLinger({"SHARED", "LINGER", "40000"});
  EXPECT_EQ(Release("job", "bob"), Reply::Int(1));
  EXPECT_LE(client_.Do("PTTL", "job").integer, kLinger);
  EXPECT_GT(client_.Do("PTTL", "job").integer, kLinger - 10000);
  EXPECT_EQ(client_.Do(Acquiring("job", "writer", {})), Reply::Nil());
}

TEST_F(LingerTest, LingeringPermitIsNotFreeForOthers) {
  LetLinger({"LIMIT", "2", "LINGER", "40000"});
  MustObtain(client_, Acquiring("job", "bob", {"LIMIT", "2"}));
  EXPECT_EQ(client_.Do(Acquiring("job", "carol", {"LIMIT", "2"})), Reply::Nil())
      << "its permit is not free";
  MustObtain(client_, Acquiring("job", "alice", {"LIMIT", "2"}));
  EXPECT_EQ(HoldersOf(client_, "job"), (Owners{"bob", "alice"})) << "but for herself it is";
  EXPECT_EQ(Release("job", "alice"), Reply::Int(1));
  EXPECT_EQ(LingerLeft(), 0);
  MustObtain(client_, Acquiring("job", "carol", {"LIMIT", "2"}));
}

// A waiter gets the permit when the linger ends, while others keep theirs.
TEST_F(LingerTest, WaiterGetsPermitWhenLingerEnds) {
  MustObtain(client_, Acquiring("job", "alice", {"LIMIT", "2", "LINGER", "1500"}, 50));
  const int64_t end = EndOf(client_, "job");
  MustObtain(client_, Acquiring("job", "bob", {"LIMIT", "2"}, 30000));
  Waiter carol =
      Waiter::Asking(server(), Acquiring("job", "carol", {"LIMIT", "2", "WAIT", "60000"}));
  EXPECT_TRUE(carol.Read().IsInteger());
  EXPECT_GT(EndOf(client_, "job") - kMinute, end);
  EXPECT_EQ(HoldersOf(client_, "job"), (Owners{"bob", "carol"}));
}

TEST_F(LingerTest, TouchKeepsLingerAndReacquireReplacesIt) {
  const int64_t token = MustObtain(client_, Acquiring("job", "alice", Linger()));
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", "alice", "PX", 30000), Reply::Int(1));
  EXPECT_EQ(HoldOf(client_, "job", "alice").Field("linger-ms"), Reply::Int(kLinger));
  EXPECT_EQ(client_.Do(Acquiring("job", "alice", Linger(7))), Reply::Int(token));
  EXPECT_EQ(HoldOf(client_, "job", "alice").Field("linger-ms"), Reply::Int(7));
  EXPECT_LE(client_.Do("PTTL", "job").integer, kMinute + 7);
}

// A TTL set by another client is reverted to the end of the linger.
TEST_F(LingerTest, ChangedTtlIsRevertedToEndOfLinger) {
  for (const bool ended : {false, true}) {
    StartAfresh();
    MustObtain(client_, Acquiring("job", "bob", {"SHARED"}, 20000));
    if (ended) {
      LetLinger({"SHARED", "LINGER", "40000"});
    } else {
      MustObtain(client_, Acquiring("job", "alice", {"SHARED", "LINGER", "40000"}));
    }
    const int64_t end = EndOf(client_, "job");
    for (const Command& trick : Commands{{"PERSIST", "job"},
                                         {"PEXPIREAT", "job", std::to_string(end - 10000)},
                                         {"PEXPIREAT", "job", std::to_string(end + 10000)}}) {
      EXPECT_EQ(client_.Do(trick), Reply::Int(1));
      EXPECT_EQ(EndOf(client_, "job"), end) << trick[0];
    }
    EXPECT_EQ(HoldersOf(client_, "job"), ended ? Owners{"bob"} : (Owners{"bob", "alice"}));
  }
}

TEST_F(LingerTest, AllLocksOfSetLinger) {
  MustObtain(client_, Acquiring("a", "alice", {"LINGER", "40000", "ALSO", "1", "b"}, 1));
  ASSERT_TRUE(Eventually(
      [&] { return HoldersOf(client_, "a").empty() && HoldersOf(client_, "b").empty(); }));
  EXPECT_EQ(client_.Do(Acquiring("b", "bob", {})), Reply::Nil());
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "a", "alice", "PX", 1, "ALSO", 1, "b"), Reply::Int(0));
  Waiter bob = Waiter::Asking(server(), Acquiring("b", "bob", {"WAIT", "60000", "ALSO", "1", "a"}));
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "a", "alice", "ALSO", 1, "b"), Reply::Int(0));
  EXPECT_TRUE(bob.Read().IsInteger());
}

TEST_F(LingerTest, InvalidLingersAreRefused) {
  const std::string range =
      "ERR LINGER must be an integer from 0 to 86400000 (turnstile.max-lease-ms) in plain "
      "digits, not ";
  for (const std::string value : {"-1", "01", "1.5", "", "x", "86400001", "99999999999999999999"}) {
    EXPECT_EQ(client_.Do(Acquiring("job", "alice", {"LINGER", value})),
              Reply::Error(range + Quoted(value)));
  }
  EXPECT_TRUE(client_.Do(Acquiring("job", "alice", {"LINGER"})).IsError("ERR "));
  EXPECT_TRUE(
      client_.Do(Acquiring("job", "alice", {"LINGER", "1", "LINGER", "1"})).IsError("ERR "));
  EXPECT_TRUE(client_.Do(Acquiring("job", "alice", {"SESSION", "SESSION"})).IsError("ERR "));
  EXPECT_TRUE(client_.Do("LOCK.TOUCH", "job", "alice", "PX", 1, "LINGER", 1).IsError("ERR "));
  EXPECT_EQ(client_.Do("DBSIZE"), Reply::Int(0));
  MustObtain(client_, Acquiring("job", "alice", {"LINGER", "86400000"}, 86400000));
}

}  // namespace
}  // namespace turnstile::testing
