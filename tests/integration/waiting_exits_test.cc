// Every way in which a wait can end without a grant, and everything that delays a grant.

#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include "support/aof.h"
#include "support/clock.h"
#include "support/eventually.h"
#include "support/lateness.h"
#include "support/lock_test.h"
#include "support/resp3.h"
#include "support/server.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

using Owners = std::vector<std::string>;

class WaitExitsTest : public SharedWaitingTest<WaitExitsTest> {
 protected:
  Reply Release(std::string_view key, std::string_view owner) {
    return client_.Do("LOCK.RELEASE", key, owner);
  }

  bool LineBecomes(std::string_view key, const Owners& owners) {
    return Eventually([&] { return LineOf(client_, key) == owners; });
  }
};

// --- Leaving the queue ------------------------------------------------------------------------

struct Exit {
  const char* name;
  std::function<void(RawWaiter&, Client&)> leave;
  // What the leaving client still receives.
  std::function<bool(RawConnection&)> receives;
};

const std::vector<Exit> kExits = {
    {"CLIENT UNBLOCK",
     [](RawWaiter& waiter, Client& client) {
       EXPECT_EQ(client.Do("CLIENT", "UNBLOCK", waiter.id()), Reply::Int(1));
     },
     [](RawConnection& connection) { return connection.ReadReply().IsNil(); }},
    {"CLIENT UNBLOCK TIMEOUT",
     [](RawWaiter& waiter, Client& client) {
       EXPECT_EQ(client.Do("CLIENT", "UNBLOCK", waiter.id(), "TIMEOUT"), Reply::Int(1));
     },
     [](RawConnection& connection) { return connection.ReadReply().IsNil(); }},
    {"CLIENT UNBLOCK ERROR",
     [](RawWaiter& waiter, Client& client) {
       EXPECT_EQ(client.Do("CLIENT", "UNBLOCK", waiter.id(), "ERROR"), Reply::Int(1));
     },
     [](RawConnection& connection) { return connection.ReadReply().IsError("UNBLOCKED "); }},
    {"CLIENT KILL",
     [](RawWaiter& waiter, Client& client) {
       EXPECT_EQ(client.Do("CLIENT", "KILL", "ID", waiter.id()), Reply::Int(1));
     },
     [](RawConnection& connection) { return connection.Ends(); }},
    {"half-closed", [](RawWaiter& waiter, Client& /*client*/) { waiter.HalfClose(); },
     [](RawConnection& connection) { return connection.Ends(); }},
    {"closed", [](RawWaiter& waiter, Client& /*client*/) { waiter.connection.Close(); },
     [](RawConnection& /*connection*/) { return true; }},
    {"reset", [](RawWaiter& waiter, Client& /*client*/) { waiter.Reset(); },
     [](RawConnection& /*connection*/) { return true; }},
};

TEST_F(WaitExitsTest, QueueAdvancesHoweverWaiterLeaves) {
  for (const Exit& exit : kExits) {
    for (const size_t place : {0U, 1U, 2U}) {
      SCOPED_TRACE(std::string(exit.name) + ", place " + std::to_string(place));
      StartAfresh();
      MustAcquire(client_, "job", "alice");
      RawWaiter leaver(server());
      Waiter other(server());
      Waiter last(server());
      Owners line;
      for (size_t i = 0; i < 3; i++) {
        if (i == place) {
          leaver.Wait("job", "leaver");
        } else {
          (line.empty() ? other : last).Wait("job", line.empty() ? "other" : "last");
          line.emplace_back(line.empty() ? "other" : "last");
        }
      }
      exit.leave(leaver, client_);
      ASSERT_TRUE(exit.receives(leaver.connection));
      ASSERT_TRUE(LineBecomes("job", line));
      EXPECT_EQ(WaitersNow(client_), "2");
      EXPECT_EQ(HolderOf(client_, "job"), "alice");
      EXPECT_EQ(Release("job", "alice"), Reply::Int(1));
      ASSERT_TRUE(other.Read().IsInteger());
      EXPECT_EQ(Release("job", "other"), Reply::Int(1));
      ASSERT_TRUE(last.Read().IsInteger());
    }
  }
}

// Release and leave in one pass: the waiter is gone before anybody is served.
TEST_F(WaitExitsTest, WaiterLeavingInPassOfReleaseGetsNothing) {
  for (const char* how : {"TIMEOUT", "ERROR", "KILL"}) {
    SCOPED_TRACE(how);
    StartAfresh();
    MustAcquire(client_, "job", "alice");
    RawWaiter leaver(server());
    leaver.Wait("job", "leaver");
    Waiter other(server(), "job", "other");
    const std::string id = std::to_string(leaver.id());
    const Command leave = how == std::string("KILL") ? Command{"CLIENT", "KILL", "ID", id}
                                                     : Command{"CLIENT", "UNBLOCK", id, how};
    RawConnection raw = server().ConnectRaw();
    EXPECT_EQ(DoAtOnce(raw, {{"MULTI"}, {"LOCK.RELEASE", "job", "alice"}, leave, {"EXEC"}}).back(),
              Reply::Array({Reply::Int(1), Reply::Int(1)}));
    EXPECT_TRUE(other.Read().IsInteger());
    EXPECT_EQ(HolderOf(client_, "job"), "other");
    if (how == std::string("KILL")) {
      EXPECT_TRUE(leaver.connection.Ends());
    } else {
      EXPECT_FALSE(leaver.connection.ReadReply().IsInteger());
      EXPECT_EQ(leaver.connection.Do("PING"), Reply::Status("PONG"));
    }
  }
}

TEST_F(WaitExitsTest, AllWaitersCanBeKilledAtOnce) {
  MustAcquire(client_, "job", "alice");
  MustAcquire(client_, "task", "alice");
  std::vector<Waiter> waiters;
  for (int i = 0; i < 200; i++) {
    waiters.emplace_back(server(), i % 2 == 0 ? "job" : "task", std::to_string(i));
  }
  EXPECT_EQ(WaitersNow(client_), "200");
  EXPECT_EQ(client_.Do("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"), Reply::Int(200));
  EXPECT_EQ(WaitersNow(client_), "0");
  EXPECT_EQ(LineOf(client_, "job"), Owners{});
  EXPECT_EQ(HolderOf(client_, "job"), "alice");
}

TEST_F(WaitExitsTest, PipelinedCommandsAfterWaitKeepTheirOrder) {
  const auto expect_order = [this](const std::string& how, const std::function<void(int64_t)>& end,
                                   const std::function<bool(const Reply&)>& expected) {
    SCOPED_TRACE(how);
    StartAfresh();
    MustAcquire(client_, "job", "alice");
    Waiter bob(server());
    bob.Send("INCR", "n");
    bob.Send(AcquireWaiting("job", "bob", {.wait_ms = how == "time-out" ? 2000 : kMinute}));
    bob.Send("INCR", "n");
    bob.Send("LOCK.INFO", "job");
    bob.Send("PING");
    EXPECT_EQ(bob.Read(), Reply::Int(1));
    AwaitBlocked(client_, bob.id());
    EXPECT_EQ(client_.Do("GET", "n"), Reply::Str("1"));
    EXPECT_FALSE(bob.HasReply());
    end(bob.id());
    const Reply answer = bob.Read();
    EXPECT_TRUE(expected(answer)) << answer;
    EXPECT_EQ(bob.Read(), Reply::Int(2));
    EXPECT_FALSE(bob.Read().IsError());
    EXPECT_EQ(bob.Read(), Reply::Status("PONG"));
  };
  const auto is_null = [](const Reply& reply) { return reply.IsNil(); };
  expect_order(
      "grant", [this](int64_t) { Release("job", "alice"); },
      [](const Reply& reply) { return reply.IsInteger(); });
  expect_order(
      "time-out", [](int64_t) {}, is_null);
  expect_order(
      "unblock", [this](int64_t id) { client_.Do("CLIENT", "UNBLOCK", id); }, is_null);
  expect_order(
      "unblock error", [this](int64_t id) { client_.Do("CLIENT", "UNBLOCK", id, "ERROR"); },
      [](const Reply& reply) { return reply.IsError("UNBLOCKED"); });
}

TEST_F(WaitExitsTest, Resp3RepliesWithNullOnTimeOut) {
  MustAcquire(client_, "job", "alice");
  RawWaiter bob(server());
  bob.connection.Hello(3);
  bob.connection.SendCommand(AcquireWaiting("job", "bob", {.wait_ms = 1}));
  EXPECT_EQ(bob.connection.ReadUntil("\r\n"), "_");
  bob.Wait("job", "bob");
  client_.Do("CLIENT", "UNBLOCK", bob.id());
  EXPECT_EQ(bob.connection.ReadUntil("\r\n"), "_");
  bob.Wait("job", "bob");
  Release("job", "alice");
  EXPECT_TRUE(bob.connection.ReadReply().IsInteger());
}

// --- Time -------------------------------------------------------------------------------------

TEST_F(WaitExitsTest, TimeOutsDoNotWaitForCron) {
  MustAcquire(client_, "job", "alice");
  constexpr Milliseconds kWait{55};
  Lateness lateness(client_);
  for (int round = 0; round < 15; round++) {
    Client bob = server().Connect();
    const auto start = Clock::now();
    EXPECT_EQ(bob.Do(AcquireWaiting("job", "bob", {.wait_ms = kWait.count()})), Reply::Nil());
    const std::chrono::duration<double, std::milli> late = Clock::now() - start - kWait;
    lateness.Add(late.count());
  }
  EXPECT_TRUE(lateness.IsLessThanCron("time-outs of 55 ms"));
  EXPECT_GE(lateness.least(), -1) << "the server counts whole milliseconds";
  EXPECT_EQ(WaitersNow(client_), "0");
}

TEST_F(WaitExitsTest, EachWaitHasItsOwnTimeOut) {
  MustAcquire(client_, "job", "alice");
  Waiter first(server(), "job", "first", {.wait_ms = 3000});
  Client second = server().Connect();
  second.Send(AcquireWaiting("job", "second", {.wait_ms = 250}));
  Waiter third(server(), "job", "third");
  EXPECT_EQ(second.Read(), Reply::Nil());
  EXPECT_FALSE(first.HasReply());
  EXPECT_EQ(LineOf(client_, "job"), (Owners{"first", "third"}));
  EXPECT_EQ(first.Read(), Reply::Nil());
  EXPECT_EQ(LineOf(client_, "job"), Owners{"third"});
  Release("job", "alice");
  EXPECT_TRUE(third.Read().IsInteger());
}

// Leases follow the wall clock, waits do not.
TEST(SteppedClockTest, ClockStepsDoNotChangeLengthOfWait) {
  constexpr int64_t kHour = 60 * kMinute;
  ClockShift clock;
  const Server server({.environment = clock.environment()});
  Client client = server.Connect();
  for (const int64_t ahead : {-kHour, kHour}) {
    SCOPED_TRACE(ahead);
    MustAcquire(client, "job", "alice", 5 * kHour);
    const auto asked = Clock::now();
    Waiter bob(server, "job", "bob", {.wait_ms = 2000});
    Waiter carol(server, "job", "carol");
    clock.Set(Milliseconds{ahead}, client);
    const Reply info = client.Do("LOCK.INFO", "job");
    for (const Reply& place : info.Field("waiters").elements) {
      EXPECT_LT(place.Field("waited-ms").integer, kHour);
      EXPECT_LT(place.Field("left-ms").integer, kHour);
    }
    EXPECT_EQ(bob.Read(), Reply::Nil());
    EXPECT_GE(Clock::now() - asked, Milliseconds{2000});
    EXPECT_EQ(client.Do("LOCK.RELEASE", "job", "alice"), Reply::Int(1));
    EXPECT_TRUE(carol.Read().IsInteger());
    EXPECT_EQ(client.Do("LOCK.RELEASE", "job", "carol"), Reply::Int(1));
  }
  EXPECT_LT(std::stod(InfoField(client, "turnstile", "turnstile_wait_p999_ms")), kHour);
}

// After a step forward the timer for the next due work no longer fires when expected.
TEST(SteppedClockTest, ShorterWaitAfterClockStepForwardEndsInTime) {
  ClockShift clock;
  // Between two runs of its cron an idle server has only its timers.
  const Server server({.args = {"--hz", "1"}, .environment = clock.environment()});
  Client client = server.Connect();
  constexpr int64_t kHour = 60 * kMinute;
  MustAcquire(client, "job", "alice", 5 * kHour);
  Waiter carol(server, "job", "carol");
  clock.Set(Milliseconds{2 * kMinute}, client);
  std::vector<Milliseconds> took;
  for (int round = 0; round < 5; round++) {
    const auto asked = Clock::now();
    EXPECT_EQ(client.Do(AcquireWaiting("job", "bob", {.wait_ms = 50})), Reply::Nil());
    took.push_back(std::chrono::duration_cast<Milliseconds>(Clock::now() - asked));
  }
  std::sort(took.begin(), took.end());
  EXPECT_LT(took[took.size() / 2], Milliseconds{500}) << "a turn of the cron takes a second";
}

// bob's lease had ended when carol entered the queue, and is live again after the clock was set
// back. alice, a reader, is queued before carol when she requests an upgrade: when his lease ends
// for the second time it is her turn.
TEST(SteppedClockTest, UpgradeIsServedAfterClockStepBack) {
  ClockShift clock;
  const Server server({.environment = clock.environment()});
  Client client = server.Connect();
  MustObtain(client, Acquiring("job", "alice", {"SHARED"}));
  const int64_t earliest_end = ServerNow(client) + 100;
  MustObtain(client, Acquiring("job", "bob", {"SHARED"}, 100));
  const int64_t over = ServerNow(client) + 100;
  ASSERT_TRUE(Eventually([&] { return ServerNow(client) > over; }));
  Waiter carol(server, "job", "carol");
  clock.Set(-Milliseconds{3000}, client);
  Waiter alice(server, "job", "alice", {.wait_ms = 10000});
  EXPECT_EQ(HoldersOf(client, "job"), (Owners{"alice", "bob"}));
  EXPECT_TRUE(alice.Read().IsInteger());
  EXPECT_GE(ServerNow(client), earliest_end);
  EXPECT_EQ(LineOf(client, "job"), Owners{"carol"});
}

// Either the lease or the wait ends first, by a few milliseconds.
TEST_F(WaitExitsTest, SimultaneousEndOfLeaseAndWaitIsConsistent) {
  for (const int64_t wait_ms : {94, 97, 98, 99, 100, 101, 102, 103, 106}) {
    StartAfresh();
    Waiter bob(server());
    MustAcquire(client_, "job", "alice", 100);
    bob.Send(AcquireWaiting("job", "bob", {.wait_ms = wait_ms}));
    const Reply reply = bob.Read();
    ASSERT_TRUE(reply.IsNil() || reply.IsInteger()) << reply;
    EXPECT_EQ(HolderOf(client_, "job") == "bob", reply.IsInteger());
    EXPECT_EQ(WaitersNow(client_), "0");
  }
}

// --- Grants for which a direct call would be refused ------------------------------------------

class RefusedGrantTest : public WaitExitsTest {
 protected:
  // A waiter for "job" with limited rights, and another waiter behind it.
  void Queue(const std::string& owner) {
    EXPECT_EQ(client_.Do("ACL", "SETUSER", "worker", "reset", "on", ">secret", "~job",
                         "+lock.acquire", "+client"),
              Reply::Ok());
    MustAcquire(client_, "job", "alice");
    worker_.emplace_back(server(), Command{"AUTH", "worker", "secret"});
    worker_.back().Wait("job", owner);
    other_.emplace_back(server(), "job", "other");
  }

  // One after the other, kept until the end.
  std::vector<Waiter> worker_;
  std::vector<Waiter> other_;
};

TEST_F(RefusedGrantTest, WaiterThatLostPermissionIsRefused) {
  for (const Command& less : Commands{{"resetkeys"},
                                      {"resetkeys", "~other"},
                                      {"resetkeys", "%R~job"},
                                      {"-lock.acquire"},
                                      {"-@all"}}) {
    SCOPED_TRACE(less.back());
    StartAfresh();
    Queue("worker");
    Command set_user = {"ACL", "SETUSER", "worker"};
    set_user.insert(set_user.end(), less.begin(), less.end());
    EXPECT_EQ(client_.Do(set_user), Reply::Ok());
    EXPECT_FALSE(worker_.back().HasReply()) << "nothing is granted or refused before its time";
    Release("job", "alice");
    EXPECT_EQ(worker_.back().Read(),
              Reply::Error("NOPERM this user may no longer acquire the lock it waited for"));
    EXPECT_TRUE(other_.back().Read().IsInteger());
    EXPECT_EQ(HolderOf(client_, "job"), "other");
    EXPECT_TRUE(worker_.back().Do("LOCK.ACQUIRE", "job", "worker", "PX", 1).IsError("NOPERM"));
    worker_.back().Close();
    other_.back().Close();
  }
}

TEST_F(RefusedGrantTest, WaiterWithRestoredPermissionIsGranted) {
  Queue("worker");
  client_.Do("ACL", "SETUSER", "worker", "resetkeys");
  client_.Do("ACL", "SETUSER", "worker", "~j*", "off");  // clients that are logged in stay so
  Release("job", "alice");
  EXPECT_TRUE(worker_.back().Read().IsInteger());
}

TEST_F(RefusedGrantTest, WaiterOfDeletedUserIsDisconnected) {
  Queue("worker");
  EXPECT_EQ(client_.Do("ACL", "DELUSER", "worker"), Reply::Int(1));
  EXPECT_TRUE(worker_.back().Read().IsError("DISCONNECTED:"));
  EXPECT_EQ(LineOf(client_, "job"), Owners{"other"});
  Release("job", "alice");
  EXPECT_TRUE(other_.back().Read().IsInteger());
}

TEST_F(RefusedGrantTest, NothingIsGrantedWithoutEnoughReplicas) {
  MustAcquire(client_, "job", "alice");
  RawWaiter bob(server());
  bob.Wait("job", "bob");
  RawWaiter carol(server());
  carol.Wait("job", "carol");
  RawConnection raw = server().ConnectRaw();
  EXPECT_EQ(DoAtOnce(raw, {{"LOCK.TOUCH", "job", "alice", "PX", "1"},
                           {"CONFIG", "SET", "min-replicas-to-write", "1"}}),
            (std::vector{Reply::Int(1), Reply::Ok()}));
  const Reply direct = client_.Do("LOCK.ACQUIRE", "job", "dave", "PX", kMinute);
  EXPECT_TRUE(direct.IsError("NOREPLICAS")) << direct;
  EXPECT_EQ(bob.connection.ReadReply(), direct);
  EXPECT_EQ(carol.connection.ReadReply(), direct);
  EXPECT_EQ(WaitersNow(client_), "0");
  EXPECT_EQ(client_.Do("LOCK.INFO", "job"), Reply::Nil());
  EXPECT_EQ(client_.Do("CONFIG", "SET", "min-replicas-to-write", 0), Reply::Ok());
  MustAcquire(client_, "job", "dave");
}

TEST_F(RefusedGrantTest, WaiterIsRefusedWhenMemoryIsFull) {
  MustAcquire(client_, "job", "alice");
  RawWaiter bob(server());
  bob.Wait("job", "bob");
  client_.Do("CONFIG", "SET", "maxmemory", 1);
  const Reply direct = client_.Do("LOCK.ACQUIRE", "job", "dave", "PX", kMinute);
  EXPECT_TRUE(direct.IsError("OOM")) << direct;
  EXPECT_EQ(Release("job", "alice"), Reply::Int(1));
  const Reply refused = bob.connection.ReadReply();
  EXPECT_TRUE(refused.IsError("OOM ")) << refused;
  client_.Do("CONFIG", "SET", "maxmemory", 0);
  MustAcquire(client_, "job", "dave");
}

TEST(MisconfTest, NothingIsGrantedWhenServerCannotSave) {
  Server server({.args = {"--save", "3600 1"}});
  Client client = server.Connect();
  MustAcquire(client, "job", "alice", 3000);
  RawWaiter bob(server);
  bob.Wait("job", "bob");
  // The file cannot replace a folder.
  std::filesystem::create_directory(server.dir() + "/dump.rdb");
  std::filesystem::create_directory(server.dir() + "/dump.rdb/in the way");
  client.Do("BGSAVE");
  ASSERT_TRUE(Eventually(
      [&] { return InfoField(client, "persistence", "rdb_last_bgsave_status") == "err"; }));
  const Reply direct = client.Do("LOCK.ACQUIRE", "other", "dave", "PX", kMinute);
  EXPECT_TRUE(direct.IsError("MISCONF")) << direct;
  const Reply refused = bob.connection.ReadReply();
  EXPECT_TRUE(refused.IsError("MISCONF ")) << refused;
  EXPECT_EQ(client.Do("LOCK.INFO", "job"), Reply::Nil());
}

// --- Paused writes ----------------------------------------------------------------------------

class PausedWritesTest : public SharedWaitingTest<PausedWritesTest> {
 public:
  static ServerOptions Options() { return {.args = {"--appendonly", "yes"}}; }

 protected:
  // The lease of "job" ends in the first moments of the pause.
  void PauseAndLetLeaseEnd(int64_t pause_ms, const std::string& what) {
    RawConnection raw = server().ConnectRaw();
    EXPECT_EQ(DoAtOnce(raw, {{"LOCK.TOUCH", "job", "alice", "PX", "1"},
                             {"CLIENT", "PAUSE", std::to_string(pause_ms), what}}),
              (std::vector{Reply::Int(1), Reply::Ok()}));
  }

  // Waits for "job". It is in the line when this returns, unless its time is already over.
  RawConnection WaitBriefly(const std::string& owner, int64_t wait_ms) {
    RawConnection connection = server().ConnectRaw();
    SendAtOnce(connection, {{"PING"}, AcquireWaiting("job", owner, {.wait_ms = wait_ms})});
    EXPECT_EQ(connection.ReadReply(), Reply::Status("PONG"));
    return connection;
  }
};

TEST_F(PausedWritesTest, PauseDelaysGrantsButNotTimeOuts) {
  MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob");
  RawConnection carol = WaitBriefly("carol", 250);
  PauseAndLetLeaseEnd(60000, "WRITE");
  const int64_t end = ServerNow(client_) + 1;  // at the latest
  EXPECT_EQ(carol.ReadReply(), Reply::Nil());
  EXPECT_TRUE(Eventually([&] { return ServerNow(client_) > end; }));
  EXPECT_FALSE(bob.HasReply(Milliseconds{50}));
  EXPECT_EQ(LineOf(client_, "job"), Owners{"bob"});
  EXPECT_EQ(client_.Do("CLIENT", "UNPAUSE"), Reply::Ok());
  EXPECT_TRUE(bob.Read().IsInteger());
  EXPECT_EQ(HolderOf(client_, "job"), "bob");
}

// A lock that was freed in the pass in which the pause began is granted after it.
TEST_F(PausedWritesTest, LockFreedJustBeforePauseIsGrantedAfterIt) {
  for (const Command& freeing :
       Commands{{"LOCK.RELEASE", "job", "alice"}, {"DEL", "job"}, {"SWAPDB", "0", "5"}}) {
    StartAfresh();
    MustAcquire(client_, "job", "alice");
    Waiter bob(server(), "job", "bob");
    RawConnection raw = server().ConnectRaw();
    DoAtOnce(raw, {freeing, {"CLIENT", "PAUSE", "60000", "WRITE"}});
    EXPECT_FALSE(bob.HasReply(Milliseconds{50}));
    EXPECT_EQ(client_.Do("CLIENT", "UNPAUSE"), Reply::Ok());
    EXPECT_TRUE(bob.Read().IsInteger());
  }
}

TEST_F(PausedWritesTest, WaitersCanLeaveDuringPause) {
  MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob");
  Waiter carol(server(), "job", "carol");
  Waiter dave(server(), "job", "dave");
  PauseAndLetLeaseEnd(60000, "WRITE");
  bob.Close();
  client_.Do("CLIENT", "UNBLOCK", carol.id(), "ERROR");
  EXPECT_TRUE(carol.Read().IsError("UNBLOCKED"));
  EXPECT_TRUE(Eventually([&] { return LineOf(client_, "job") == Owners{"dave"}; }));
  EXPECT_FALSE(dave.HasReply(Milliseconds{60}));
  client_.Do("CLIENT", "UNPAUSE");
  EXPECT_TRUE(dave.Read().IsInteger());
}

// An undelivered grant is taken back when writes are allowed again.
TEST_F(PausedWritesTest, UndeliveredGrantIsTakenBackAfterPause) {
  for (int round = 0; round < 20; round++) {
    StartAfresh();
    MustAcquire(client_, "job", "alice");
    RawWaiter bob(server());
    bob.Wait("job", "bob");
    Waiter carol(server(), "job", "carol");
    RawConnection driver = server().ConnectRaw();
    const Commands commands = InPasses({{{"LOCK.RELEASE", "job", "alice"}},
                                        {{"CLIENT", "PAUSE", "60000", "WRITE"},
                                         {"CLIENT", "KILL", "ID", std::to_string(bob.id())}}});
    EXPECT_EQ(DoAtOnce(driver, commands).back(), Reply::Int(1));
    const bool delivered = !bob.connection.Ends(Milliseconds{100});
    EXPECT_EQ(HolderOf(client_, "job"), "bob") << "nothing is written during the pause";
    EXPECT_FALSE(carol.HasReply());
    client_.Do("CLIENT", "UNPAUSE");
    if (delivered) client_.Do("LOCK.RELEASE", "job", "bob");
    ASSERT_TRUE(carol.Read().IsInteger());
  }
}

TEST_F(PausedWritesTest, FullPauseDelaysGrantsButNotTimeOuts) {
  MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob");
  RawConnection carol = WaitBriefly("carol", 250);
  const auto start = Clock::now();
  PauseAndLetLeaseEnd(3000, "ALL");
  EXPECT_EQ(carol.ReadReply(), Reply::Nil());
  EXPECT_LT(Clock::now() - start, Milliseconds{2900}) << "during the pause";
  EXPECT_TRUE(bob.Read().IsInteger());
  EXPECT_GE(Clock::now() - start, Milliseconds{2999}) << "after the pause";
}

// Waiting uses no CPU, even while a free lock cannot be granted.
TEST_F(PausedWritesTest, ServerStaysIdleDuringPause) {
  const auto cpu_ms = [this] {
    return 1000 * (std::stod(InfoField(client_, "cpu", "used_cpu_user")) +
                   std::stod(InfoField(client_, "cpu", "used_cpu_sys")));
  };
  const auto busy_ms = [&] {
    const double start = cpu_ms();
    LetPass(Milliseconds{300});
    return cpu_ms() - start;
  };
  MustAcquire(client_, "job", "alice");
  MustAcquire(client_, "short", "alice", 1);
  client_.Do("SET", "plain", "alice");
  Waiter bob(server(), "job", "bob");
  Waiter carol(server(), "job", "carol");
  Waiter dave(server(), "plain", "dave");
  EXPECT_LT(busy_ms(), 60) << "while everybody waits";
  RawConnection raw = server().ConnectRaw();
  DoAtOnce(raw, {{"DEL", "job"}, {"CLIENT", "PAUSE", "60000", "WRITE"}});
  EXPECT_LT(busy_ms(), 60) << "while nothing may be written";
  client_.Do("CLIENT", "UNPAUSE");
  EXPECT_TRUE(bob.Read().IsInteger());
  EXPECT_LT(busy_ms(), 60) << "afterwards";
}

TEST_F(PausedWritesTest, QueueSurvivesReload) {
  for (const char* how : {"RELOAD", "LOADAOF"}) {
    SCOPED_TRACE(how);
    StartAfresh();
    MustAcquire(client_, "job", "alice");
    MustAcquire(client_, "short", "alice");
    client_.Do("SET", "plain", "alice");
    Waiter bob(server(), "job", "bob");
    Waiter carol(server(), "short", "carol");
    Waiter dave(server(), "plain", "dave");
    EXPECT_EQ(client_.Do("LOCK.TOUCH", "short", "alice", "PX", 700), Reply::Int(1));
    EXPECT_EQ(client_.Do("DEBUG", how), Reply::Ok());
    EXPECT_FALSE(bob.HasReply());
    EXPECT_EQ(HolderOf(client_, "job"), "alice");
    EXPECT_EQ(LineOf(client_, "job"), Owners{"bob"});
    EXPECT_TRUE(client_.Do(AcquireWaiting("job", "alice")).IsInteger()) << "still the holder";
    EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "alice"), Reply::Int(1));
    EXPECT_TRUE(bob.Read().IsInteger());
    client_.Do("DEL", "plain");
    EXPECT_TRUE(dave.Read().IsInteger());
    EXPECT_TRUE(carol.Read().IsInteger()) << "by the end of the lease alone";
  }
}

// --- Long scripts -----------------------------------------------------------------------------

TEST_F(WaitExitsTest, LongScriptDelaysGrant) {
  MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob");
  RawConnection raw = server().ConnectRaw();
  const auto start = Clock::now();
  EXPECT_EQ(DoAtOnce(raw, {{"LOCK.TOUCH", "job", "alice", "PX", "1"}, BusyScript(250)}),
            (std::vector{Reply::Int(1), Reply::Nil()}));
  EXPECT_TRUE(bob.Read().IsInteger());
  EXPECT_GE(Clock::now() - start, Milliseconds{250});
  EXPECT_EQ(HolderOf(client_, "job"), "bob");
}

// While the server answers BUSY, connections can close, but nothing else happens.
TEST_F(WaitExitsTest, WaitersCanLeaveDuringLongScript) {
  client_.Do("CONFIG", "SET", "busy-reply-threshold", 10);
  MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob");
  Waiter carol(server(), "job", "carol");
  Waiter dave(server(), "job", "dave");
  RawConnection raw = server().ConnectRaw();
  SendAtOnce(raw, {{"LOCK.TOUCH", "job", "alice", "PX", "1"}, BusyScript(20000)});
  ASSERT_TRUE(Eventually([&] { return client_.Do("PING").IsError("BUSY"); }));
  bob.Close();
  EXPECT_FALSE(carol.HasReply(Milliseconds{150})) << "the lease is over, but the script is not";
  EXPECT_TRUE(client_.Do("PING").IsError("BUSY"));
  carol.Close();
  EXPECT_EQ(client_.Do("SCRIPT", "KILL"), Reply::Ok());
  EXPECT_EQ(raw.ReadReply(), Reply::Int(1));
  EXPECT_TRUE(raw.ReadReply().IsError());
  // Whether the server noticed carol's disconnection before it granted the lock is open.
  if (HolderOf(client_, "job") == "carol") Release("job", "carol");
  EXPECT_TRUE(dave.Read().IsInteger());
  client_.Do("CONFIG", "SET", "busy-reply-threshold", 5000);
}

// --- Demotion and shutdown --------------------------------------------------------------------

TEST(DemotionTest, DemotedServerUnblocksWaiters) {
  Server server({.args = {"--appendonly", "yes"}});
  Client client = server.Connect();
  for (int round = 0; round < 3; round++) {
    const int64_t token = MustAcquire(client, "job", "alice");
    RawWaiter bob(server);
    bob.Wait("job", "bob");
    RawConnection raw = server.ConnectRaw();
    // The last time with the lock free: it is too late to grant it.
    Commands demotion = {{"REPLICAOF", "127.0.0.1", "1"}};
    if (round == 2) demotion.insert(demotion.begin(), {"LOCK.RELEASE", "job", "alice"});
    EXPECT_EQ(DoAtOnce(raw, demotion).back(), Reply::Ok());
    EXPECT_TRUE(bob.connection.ReadReply().IsError("UNBLOCKED "));
    EXPECT_TRUE(bob.connection.Ends());
    EXPECT_EQ(WaitersNow(client), "0");
    EXPECT_EQ(HolderOf(client, "job"), round == 2 ? "" : "alice");

    EXPECT_EQ(client.Do("REPLICAOF", "NO", "ONE"), Reply::Ok());
    EXPECT_EQ(HolderOf(client, "job"), round == 2 ? "" : "alice");
    if (round < 2) {
      EXPECT_EQ(client.Do("LOCK.FENCE", "job"), Reply::Int(token));
      Waiter dave(server, "job", "dave");
      EXPECT_EQ(client.Do("LOCK.RELEASE", "job", "alice"), Reply::Int(1));
      EXPECT_GT(dave.Read().integer, token);
      client.Do("LOCK.RELEASE", "job", "dave");
    }
    client.Do("FLUSHALL");
  }
}

TEST(DemotionTest, FailoverUnblocksWaiters) {
  Server primary({.args = {"--repl-diskless-sync", "no"}});
  Server replica({.args = {"--replicaof", "127.0.0.1", std::to_string(primary.port()),
                           "--repl-diskless-sync", "no"}});
  Client client = primary.Connect();
  Client copy = replica.Connect();
  ASSERT_TRUE(
      Eventually([&] { return InfoField(copy, "replication", "master_link_status") == "up"; },
                 Milliseconds{20000}));
  const int64_t token = MustAcquire(client, "job", "alice");
  RawWaiter bob(primary);
  bob.Wait("job", "bob");
  EXPECT_EQ(client.Do("FAILOVER"), Reply::Ok());
  EXPECT_TRUE(bob.connection.ReadReply().IsError("UNBLOCKED "));
  EXPECT_TRUE(bob.connection.Ends());
  ASSERT_TRUE(Eventually([&] {
    return InfoField(copy, "replication", "role") == "master" &&
           InfoField(client, "replication", "master_link_status") == "up";
  }));
  EXPECT_EQ(WaitersNow(client), "0");
  EXPECT_TRUE(client.Do(AcquireWaiting("job", "bob")).IsError("READONLY"));
  // bob retries on the new primary.
  Waiter again(replica, "job", "bob");
  EXPECT_EQ(copy.Do("LOCK.RELEASE", "job", "alice"), Reply::Int(1));
  EXPECT_GT(again.Read().integer, token);
  EXPECT_TRUE(Eventually([&] { return HolderOf(client, "job") == "bob"; }));
}

// A server is demoted between a grant and its delivery, the owner learns of the grant from the new
// primary, and then the old one becomes primary again: it has nothing to take back any more.
TEST(DemotionTest, GrantConfirmedByNewPrimaryIsNotTakenBack) {
  Server server({.args = {"--repl-diskless-sync", "no"}});
  Server other({.args = {"--replicaof", "127.0.0.1", std::to_string(server.port()),
                         "--repl-diskless-sync", "no"}});
  Client client = server.Connect();
  Client there = other.Connect();
  const auto link_is_up = [](Client& replica) {
    return Eventually(
        [&] { return InfoField(replica, "replication", "master_link_status") == "up"; },
        Milliseconds{20000});
  };
  ASSERT_TRUE(link_is_up(there));
  MustAcquire(client, "job", "alice");
  RawWaiter bob(server);
  bob.Wait("job", "bob");
  RawConnection driver = server.ConnectRaw();
  SendAtOnce(driver, InPasses({{{"LOCK.RELEASE", "job", "alice"}},
                               {{"REPLICAOF", "127.0.0.1", std::to_string(other.port())}}}));
  ASSERT_TRUE(Eventually([&] { return HolderOf(there, "job") == "bob"; }));
  ASSERT_EQ(there.Do("REPLICAOF", "NO", "ONE"), Reply::Ok());
  const int64_t token = MustAcquire(there, "job", "bob");
  client = server.Connect();
  ASSERT_TRUE(link_is_up(client));
  ASSERT_EQ(client.Do("REPLICAOF", "NO", "ONE"), Reply::Ok());
  EXPECT_EQ(client.Do("LOCK.FENCE", "job"), Reply::Int(token));
  EXPECT_EQ(client.Do("LOCK.TOUCH", "job", "bob", "PX", kMinute), Reply::Int(1));
}

TEST(ShutdownTest, ServerWithWaitersShutsDownCleanly) {
  Server server;
  for (const bool by_signal : {false, true}) {
    Client client = server.Connect();
    MustAcquire(client, "job", "alice");
    MustAcquire(client, "short", "alice", 1);
    std::vector<Waiter> waiters;
    for (int i = 0; i < 10; i++) waiters.emplace_back(server, "job", std::to_string(i));
    if (by_signal) {
      kill(server.pid(), SIGTERM);
    } else {
      client.Send("SHUTDOWN", "NOSAVE");
    }
    EXPECT_EQ(server.WaitForExit(), 0);
    for (Waiter& waiter : waiters) {
      const Reply reply = waiter.Read();
      EXPECT_TRUE(reply.IsError("DISCONNECTED:")) << reply;
    }
    ASSERT_TRUE(server.Restart());
  }
}

TEST(ShutdownTest, RestartKeepsLocksButNotQueues) {
  Server server;
  Client client = server.Connect();
  const int64_t token = MustAcquire(client, "job", "alice");
  Waiter bob(server, "job", "bob");
  client.Send("SHUTDOWN", "SAVE");
  EXPECT_EQ(server.WaitForExit(), 0);
  ASSERT_TRUE(server.Restart());
  client = server.Connect();
  EXPECT_EQ(client.Do("LOCK.FENCE", "job"), Reply::Int(token));
  EXPECT_EQ(WaitingFor(client, "job"), 0);
  Waiter again(server, "job", "bob");
  client.Do("LOCK.RELEASE", "job", "alice");
  EXPECT_GT(again.Read().integer, token);
}

}  // namespace
}  // namespace turnstile::testing
