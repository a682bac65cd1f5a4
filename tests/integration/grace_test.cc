// turnstile.failover-grace-ms: for that long after a start or promotion nobody becomes a new
// holder, so that holders unknown to this server can finish. The last test measures the purpose:
// without it, two clients believe that they hold the same lock after failovers that lose writes.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include "support/client.h"
#include "support/eventually.h"
#include "support/failover.h"
#include "support/lateness.h"
#include "support/lock_test.h"
#include "support/reply.h"
#include "support/server.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

constexpr const char* kSetting = "turnstile.failover-grace-ms";

void SetGrace(Client& client, int64_t ms) {
  EXPECT_EQ(client.Do("CONFIG", "SET", kSetting, ms), Reply::Ok());
}

int64_t GraceLeft(Client& client) {
  return std::stoll(InfoField(client, "turnstile", "turnstile_grace_left_ms"));
}

// The last millisecond of the grace period by the server's clock lies between these two.
struct End {
  int64_t earliest;
  int64_t latest;
};

// Makes a long grace period end that soon.
End EndGraceIn(Client& client, int64_t ms) {
  const int64_t whole = std::stoll(client.Do("CONFIG", "GET", kSetting).Field(kSetting).text);
  const int64_t before = ServerNow(client);
  const int64_t left = GraceLeft(client);
  const int64_t after = ServerNow(client);
  EXPECT_GT(left, ms);
  SetGrace(client, whole - left + ms);
  return {before + ms, after + ms};
}

// The time of the grant of a lock that is held for a minute, by the server's clock.
int64_t GrantedAt(Client& client, std::string_view key) { return EndOf(client, key) - kMinute; }

Reply Ask(Client& client, std::string_view key, std::string_view owner) {
  return client.Do("LOCK.ACQUIRE", key, owner, "PX", kMinute);
}

// A server that can be promoted at any time, with no waiters and no grace period at first.
class GraceTest : public SharedWaitingTest<GraceTest> {
 protected:
  GraceTest() { SetGrace(client_, 0); }

  // Holds are kept; waiters are unblocked.
  void Promote(int64_t grace_ms = kMinute) {
    SetGrace(client_, grace_ms);
    EXPECT_EQ(client_.Do("REPLICAOF", "127.0.0.1", kNowhere), Reply::Ok());
    EXPECT_EQ(GraceLeft(client_), 0) << "a replica grants nothing anyway";
    EXPECT_EQ(client_.Do("REPLICAOF", "NO", "ONE"), Reply::Ok());
  }
};

// --- Duration ------------------------------------------------------------------------------------

// Nothing is granted until the end of the grace period, and everything afterwards.
void ExpectGraceToEndAt(Client& client, const End& end) {
  EXPECT_TRUE(Eventually([&] {
    const int64_t before = ServerNow(client);
    const bool granted = Ask(client, "job", "me").IsInteger();
    const int64_t after = ServerNow(client);
    if (granted) {
      EXPECT_GT(after, end.earliest) << "too early";
    } else {
      EXPECT_LE(before, end.latest) << "too late";
    }
    return granted;
  }));
  EXPECT_EQ(GraceLeft(client), 0);
}

TEST(GraceAfterStartTest, GraceIsOffByDefault) {
  Server server;
  Client client = server.Connect();
  EXPECT_EQ(client.Do("CONFIG", "GET", kSetting).Field(kSetting), Reply::Str("0"));
  EXPECT_EQ(GraceLeft(client), 0);
  MustAcquire(client, "job", "me");
  EXPECT_EQ(client.Do("LOCK.INFO", "job").Field("grace-left-ms"), Reply::Int(0));
}

TEST(GraceAfterStartTest, NoNewHoldIsGranted) {
  Server server({.args = {std::string("--") + kSetting, std::to_string(kMinute)}});
  Client client = server.Connect();
  const int64_t left = GraceLeft(client);
  EXPECT_GT(left, kMinute / 2);
  EXPECT_LE(left, kMinute);
  EXPECT_EQ(Ask(client, "job", "me"), Reply::Nil());
  EXPECT_EQ(client.Do("DBSIZE"), Reply::Int(0));
  ExpectGraceToEndAt(client, EndGraceIn(client, 200));
}

TEST(GraceAfterStartTest, HoldersFromAofKeepTheirLocks) {
  Server server({.args = {"--appendonly", "yes", "--appendfsync", "always"}});
  Client client = server.Connect();
  const int64_t token = MustAcquire(client, "job", "me");
  server.Kill9();
  server.options().args.insert(server.options().args.end(),
                               {std::string("--") + kSetting, std::to_string(kMinute)});
  ASSERT_TRUE(server.Restart());
  client = server.Connect();
  EXPECT_EQ(Ask(client, "job", "you"), Reply::Nil());
  EXPECT_EQ(Ask(client, "job", "me"), Reply::Int(token));
  EXPECT_EQ(client.Do("LOCK.RELEASE", "job", "me"), Reply::Int(1));
  EXPECT_EQ(Ask(client, "job", "me"), Reply::Nil());
  ExpectGraceToEndAt(client, EndGraceIn(client, 50));
}

TEST_F(GraceTest, PromotionStartsGrace) {
  Promote();
  EXPECT_EQ(Ask(client_, "job", "me"), Reply::Nil());
  EXPECT_GT(GraceLeft(client_), kMinute / 2);
  ExpectGraceToEndAt(client_, EndGraceIn(client_, 200));
}

TEST_F(GraceTest, EachPromotionRestartsGrace) {
  Promote();
  EndGraceIn(client_, 20);
  ASSERT_TRUE(Eventually([&] { return GraceLeft(client_) == 0; }));
  const int64_t before = ServerNow(client_);
  Promote();
  const int64_t left = GraceLeft(client_);
  EXPECT_LE(left, kMinute);
  EXPECT_GE(ServerNow(client_) + left, before + kMinute);

  // A demotion during the grace period unblocks waiters.
  Waiter waiter(server(), "job", "me");
  Promote();
  EXPECT_TRUE(waiter.Read().IsError("UNBLOCKED"));
  EXPECT_EQ(Ask(client_, "job", "me"), Reply::Nil());
}

TEST_F(GraceTest, SettingChangesGraceAtOnce) {
  Promote();
  EXPECT_EQ(Ask(client_, "job", "me"), Reply::Nil());
  SetGrace(client_, 0);
  EXPECT_EQ(GraceLeft(client_), 0);
  MustAcquire(client_, "job", "me");
  // It counts from the promotion, whenever it is set.
  SetGrace(client_, kMinute);
  EXPECT_GT(GraceLeft(client_), kMinute / 2);
  EXPECT_EQ(Ask(client_, "other", "me"), Reply::Nil());
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "me"), Reply::Int(1));
  EXPECT_EQ(Ask(client_, "job", "me"), Reply::Nil());
}

TEST_F(GraceTest, LockInfoShowsGrace) {
  MustAcquire(client_, "job", "me");
  EXPECT_EQ(client_.Do("LOCK.INFO", "job").Field("grace-left-ms"), Reply::Int(0));
  Promote();
  const int64_t left = client_.Do("LOCK.INFO", "job").Field("grace-left-ms").integer;
  EXPECT_LE(left, kMinute);
  EXPECT_GE(left, GraceLeft(client_));
  EXPECT_GT(left, kMinute / 2);
  EXPECT_EQ(client_.Do("LOCK.INFO", "free"), Reply::Nil());
  Waiter waiter(server(), "free", "me");
  EXPECT_GT(client_.Do("LOCK.INFO", "free").Field("grace-left-ms").integer, kMinute / 2);
}

// --- Refused requests ----------------------------------------------------------------------------

TEST_F(GraceTest, NewHoldsOfEveryModeAreRefused) {
  const int64_t reader = client_.Do("LOCK.ACQUIRE", "read", "me", "PX", kMinute, "SHARED").integer;
  const int64_t one = client_.Do("LOCK.ACQUIRE", "few", "me", "PX", kMinute, "LIMIT", 5).integer;
  MustAcquire(client_, "some", "me");
  Promote();
  const std::string now = std::to_string(ServerNow(client_) * 1000);
  const Commands refused = {
      {"LOCK.ACQUIRE", "job", "you", "PX", "60000"},
      {"LOCK.ACQUIRE", "job", "you", "PX", "60000", "SHARED"},
      {"LOCK.ACQUIRE", "job", "you", "PX", "60000", "LIMIT", "5"},
      {"LOCK.ACQUIRE", "job", "you", "PX", "60000", "REENTRANT", "SESSION", "LINGER", "5"},
      {"LOCK.ACQUIRE", "job", "you", "PX", "60000", "ALSO", "1", "other"},
      {"LOCK.ACQUIRE", "job", "you", "PX", "60000", "FLOOR", now},
      {"LOCK.ACQUIRE", "job", "you", "PX", "60000", "WAIT", "0"},
      {"LOCK.ACQUIRE", "read", "you", "PX", "60000", "SHARED"},
      {"LOCK.ACQUIRE", "few", "you", "PX", "60000", "LIMIT", "5"},
      // A new hold of an owner that holds another lock.
      {"LOCK.ACQUIRE", "job", "me", "PX", "60000"},
  };
  for (const Command& command : refused) {
    EXPECT_EQ(client_.Do(command), Reply::Nil()) << command[1] << " " << command.back();
  }
  EXPECT_EQ(client_.Do("EXISTS", "job", "other"), Reply::Int(0));
  EXPECT_EQ(HolderField(client_.Do("LOCK.INFO", "read"), "token"), Reply::Int(reader));
  EXPECT_EQ(HolderField(client_.Do("LOCK.INFO", "few"), "token"), Reply::Int(one));

  // Invalid requests get the same errors as ever.
  client_.Do("RPUSH", "list", "x");
  EXPECT_TRUE(client_.Do("LOCK.ACQUIRE", "job", "you", "PX", 0).IsError("ERR"));
  EXPECT_TRUE(Ask(client_, "list", "you").IsError("WRONGTYPE"));
  EXPECT_TRUE(client_.Do("LOCK.ACQUIRE", "few", "me", "PX", 5, "SHARED").IsError("ERR this owner"));
  EXPECT_TRUE(client_.Do("LOCK.ACQUIRE", "some", "me", "PX", 5, "ALSO", 1, "job").IsError("ERR"));
  EXPECT_TRUE(
      client_.Do("LOCK.ACQUIRE", "job", "me", "PX", 5, "FLOOR", "9007199254740991").IsError("ERR"));

  SetGrace(client_, 0);
  for (const Command& command : refused) {
    EXPECT_TRUE(client_.Do(command).IsInteger()) << command[1] << " " << command.back();
    client_.Do("LOCK.RELEASE", command[1], command[2], "ALSO", 1, "other");
  }
}

TEST_F(GraceTest, UpgradesAreRefusedAndSharedHoldStays) {
  const Reply token = client_.Do("LOCK.ACQUIRE", "job", "me", "PX", kMinute, "SHARED");
  Promote();
  EXPECT_EQ(Ask(client_, "job", "me"), Reply::Nil());
  EXPECT_EQ(client_.Do("LOCK.INFO", "job").Field("mode"), Reply::Str("shared"));
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job"), token);

  // A waiting upgrade is granted at the end, under a new token.
  Waiter waiter(server(), "job", "me");
  EXPECT_EQ(client_.Do("LOCK.INFO", "job").Field("mode"), Reply::Str("shared"));
  const End end = EndGraceIn(client_, 50);
  EXPECT_GT(waiter.Read().integer, token.integer);
  EXPECT_GT(GrantedAt(client_, "job"), end.earliest);
  EXPECT_EQ(client_.Do("LOCK.INFO", "job").Field("mode"), Reply::Str("exclusive"));
}

TEST_F(GraceTest, PlainLocksAreNotConverted) {
  client_.Do("SET", "plain", "me");
  Promote();
  // SET NX is not affected.
  EXPECT_EQ(client_.Do("SET", "another", "you", "NX", "PX", kMinute), Reply::Ok());
  EXPECT_EQ(client_.Do("SET", "another", "me", "NX", "PX", kMinute), Reply::Nil());
  // A conversion would issue a new token. The owner can still touch and release what it has.
  EXPECT_EQ(Ask(client_, "plain", "me"), Reply::Nil());
  EXPECT_EQ(Ask(client_, "another", "you"), Reply::Nil());
  EXPECT_EQ(client_.Do("GET", "plain"), Reply::Str("me"));
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "plain", "me", "PX", kMinute), Reply::Int(1));
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "plain", "you"), Reply::Int(0));
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "plain", "me"), Reply::Int(1));
  EXPECT_EQ(Ask(client_, "plain", "me"), Reply::Nil());
  Waiter waiter(server(), "another", "you");
  EXPECT_EQ(client_.Do("GET", "another"), Reply::Str("you"));
  EndGraceIn(client_, 20);
  EXPECT_TRUE(waiter.Read().IsInteger());
  EXPECT_EQ(client_.Do("TYPE", "another"), Reply::Status("turnstile"));
  MustAcquire(client_, "plain", "me");
}

TEST_F(GraceTest, LingeringOwnersGetNoNewHold) {
  for (const char* key : {"job", "given up"}) {
    client_.Do("LOCK.ACQUIRE", key, "me", "PX", 1, "LINGER", kMinute);
    ASSERT_TRUE(Eventually([&] { return client_.Do("LOCK.FENCE", key).IsNil(); }));
  }
  Promote();
  EXPECT_EQ(Ask(client_, "job", "me"), Reply::Nil());
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", "me", "PX", kMinute), Reply::Int(0));
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "given up", "me"), Reply::Int(0));
  EXPECT_EQ(client_.Do("LOCK.INFO", "given up"), Reply::Nil());
  EXPECT_EQ(Ask(client_, "given up", "me"), Reply::Nil());
  EXPECT_GT(client_.Do("LOCK.INFO", "job").Field("linger-left-ms").integer, 0);
  Waiter waiter(server(), "job", "me");
  EndGraceIn(client_, 20);
  EXPECT_TRUE(waiter.Read().IsInteger());
  MustAcquire(client_, "given up", "me");
}

TEST_F(GraceTest, AppliesInTransactionsAndScripts) {
  const int64_t token = MustAcquire(client_, "mine", "me");
  Promote();
  client_.Do("MULTI");
  client_.Do(AcquireWaiting("job", "you"));
  client_.Do("LOCK.ACQUIRE", "job", "you", "PX", kMinute);
  client_.Do("LOCK.ACQUIRE", "mine", "me", "PX", kMinute);
  client_.Do("LOCK.RELEASE", "mine", "me");
  client_.Do("LOCK.ACQUIRE", "mine", "me", "PX", kMinute);
  EXPECT_EQ(client_.Do("EXEC"), Reply::Array({Reply::Nil(), Reply::Nil(), Reply::Int(token),
                                              Reply::Int(1), Reply::Nil()}));

  SetGrace(client_, 0);
  const int64_t next = MustAcquire(client_, "mine", "me");
  SetGrace(client_, kMinute);
  const char* const script =
      "local function ask(key) "
      "  return redis.call('LOCK.ACQUIRE', key, 'me', 'PX', 60000, 'WAIT', 60000) "
      "end "
      "return {ask(KEYS[1]), ask(KEYS[2])}";
  EXPECT_EQ(client_.Do("EVAL", script, 2, "mine", "job"),
            Reply::Array({Reply::Int(next), Reply::Nil()}));
  EXPECT_EQ(client_.Do("LOCK.FENCE", "mine", next, "THEN", "LOCK.ACQUIRE", "job", "me", "PX", 5),
            Reply::Nil());
  EXPECT_EQ(client_.Do("EXISTS", "job"), Reply::Int(0));
}

// --- Current holders -----------------------------------------------------------------------------

TEST_F(GraceTest, KnownHoldersKeepTheirLocks) {
  const int64_t token = MustAcquire(client_, "job", "me", 30000);
  const Reply set = client_.Do("LOCK.ACQUIRE", "x", "me", "PX", kMinute, "ALSO", 1, "y");
  const Reply reader = client_.Do("LOCK.ACQUIRE", "read", "me", "PX", kMinute, "SHARED");
  const Reply few = client_.Do("LOCK.ACQUIRE", "few", "me", "PX", kMinute, "LIMIT", 3);
  MustAcquire(client_, "down", "me");
  Promote();

  const int64_t before = ServerNow(client_);
  EXPECT_EQ(client_.Do("LOCK.ACQUIRE", "job", "me", "PX", kMinute, "REENTRANT"), Reply::Int(token));
  EXPECT_GE(EndOf(client_, "job"), before + kMinute) << "the lease restarts";
  EXPECT_EQ(HolderField(client_.Do("LOCK.INFO", "job"), "count"), Reply::Int(2));
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", "me", "PX", 2 * kMinute), Reply::Int(1));
  EXPECT_GE(EndOf(client_, "job"), before + 2 * kMinute);
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job", token, "THEN", "SET", "k", "v"), Reply::Ok());
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "me"), Reply::Int(1));
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job"), Reply::Int(token)) << "counted twice";
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "me"), Reply::Int(1));
  EXPECT_EQ(Ask(client_, "job", "me"), Reply::Nil()) << "a released lock is not granted again";

  EXPECT_EQ(client_.Do("LOCK.ACQUIRE", "x", "me", "PX", kMinute, "ALSO", 1, "y"), set);
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "x", "me", "ALSO", 1, "y"), Reply::Int(2));
  EXPECT_EQ(client_.Do("LOCK.ACQUIRE", "read", "me", "PX", kMinute, "SHARED"), reader);
  EXPECT_EQ(client_.Do("LOCK.ACQUIRE", "few", "me", "PX", kMinute, "LIMIT", 1), few);

  const Reply held = client_.Do("LOCK.FENCE", "down");
  EXPECT_EQ(client_.Do("LOCK.ACQUIRE", "down", "me", "PX", kMinute, "SHARED"), held);
  EXPECT_EQ(client_.Do("LOCK.INFO", "down").Field("mode"), Reply::Str("shared"));
  EXPECT_EQ(client_.Do("LOCK.ACQUIRE", "down", "you", "PX", kMinute, "SHARED"), Reply::Nil());
  EXPECT_EQ(Ask(client_, "down", "me"), Reply::Nil()) << "there is no way back";

  // The only way to a new token: the holder names it by FLOOR.
  const int64_t floor = held.integer + 1000;
  EXPECT_EQ(client_.Do("LOCK.ACQUIRE", "down", "me", "PX", kMinute, "SHARED", "FLOOR", floor),
            Reply::Int(floor));
}

TEST_F(GraceTest, SessionsEndDuringGrace) {
  Client session = server().Connect();
  EXPECT_TRUE(
      session.Do("LOCK.ACQUIRE", "job", "me", "PX", kMinute, "REENTRANT", "SESSION").IsInteger());
  SetGrace(client_, 60 * kMinute);  // a promotion would drop the session
  ASSERT_GT(GraceLeft(client_), 0);
  Waiter waiter(server(), "job", "you");
  session.Close();
  EXPECT_TRUE(Eventually([&] { return HolderOf(client_, "job").empty(); }));
  EXPECT_FALSE(waiter.HasReply(Milliseconds{50}));
  SetGrace(client_, 0);
  EXPECT_TRUE(waiter.Read().IsInteger());
}

// --- Waiting -------------------------------------------------------------------------------------

TEST_F(GraceTest, WaitersAreServedWhenGraceEnds) {
  Lateness lateness(client_);
  for (int round = 0; round < 9; ++round) {
    EXPECT_EQ(client_.Do("FLUSHALL"), Reply::Ok());
    Promote();
    Waiter first(server(), "x", "me");
    Waiter second(server(), "y", "me");
    const End end = EndGraceIn(client_, 40);
    EXPECT_TRUE(first.Read().IsInteger());
    EXPECT_TRUE(second.Read().IsInteger());
    for (const char* key : {"x", "y"}) {
      EXPECT_GT(GrantedAt(client_, key), end.earliest);
      lateness.Add(static_cast<double>(GrantedAt(client_, key) - end.earliest - 1));
    }
  }
  EXPECT_TRUE(lateness.IsLessThanCron("grants after the end of the grace"));
}

TEST_F(GraceTest, QueuesKeepTheirOrder) {
  Promote();
  std::vector<Waiter> waiters;
  for (const char* mode : {"SHARED", "SHARED", "", "SHARED"}) {
    Waiter& waiter = waiters.emplace_back(server());
    Command command = AcquireWaiting("job", "owner " + std::to_string(waiters.size()));
    if (*mode != '\0') command.emplace_back(mode);
    waiter.Send(command);
    AwaitBlocked(client_, waiter.id());
  }
  EXPECT_EQ(LineOf(client_, "job"),
            (std::vector<std::string>{"owner 1", "owner 2", "owner 3", "owner 4"}));
  EndGraceIn(client_, 20);
  const Reply first = waiters[0].Read();
  EXPECT_GT(waiters[1].Read().integer, first.integer) << first;
  EXPECT_EQ(LineOf(client_, "job"), (std::vector<std::string>{"owner 3", "owner 4"}));
  client_.Do("LOCK.RELEASE", "job", "owner 1");
  client_.Do("LOCK.RELEASE", "job", "owner 2");
  EXPECT_TRUE(waiters[2].Read().IsInteger());
  client_.Do("LOCK.RELEASE", "job", "owner 3");
  EXPECT_TRUE(waiters[3].Read().IsInteger());
}

TEST_F(GraceTest, WaitsTimeOutDuringGrace) {
  Promote();
  EXPECT_EQ(client_.Do(AcquireWaiting("job", "timed out", {.wait_ms = 30})), Reply::Nil());

  Waiter unblocked(server(), "job", "unblocked");
  Waiter sent_away(server(), "job", "sent away");
  Waiter gone(server(), "job", "gone");
  Waiter last(server(), "job", "last");
  EXPECT_EQ(client_.Do("CLIENT", "UNBLOCK", unblocked.id(), "TIMEOUT"), Reply::Int(1));
  EXPECT_EQ(unblocked.Read(), Reply::Nil());
  EXPECT_EQ(client_.Do("CLIENT", "UNBLOCK", sent_away.id(), "ERROR"), Reply::Int(1));
  EXPECT_TRUE(sent_away.Read().IsError("UNBLOCKED"));
  gone.Close();
  EXPECT_TRUE(Eventually([&] { return WaitersNow(client_) == "1"; }));
  EXPECT_GT(GraceLeft(client_), kMinute / 2);
  EndGraceIn(client_, 20);
  EXPECT_TRUE(last.Read().IsInteger());
}

TEST_F(GraceTest, SettingZeroEndsGraceAtOnce) {
  Promote();
  Waiter one(server(), "x", "me");
  Waiter other(server(), "y", "me");
  EXPECT_FALSE(one.HasReply(Milliseconds{30}));
  SetGrace(client_, 0);
  const int64_t after = ServerNow(client_);
  EXPECT_TRUE(one.Read().IsInteger());
  EXPECT_TRUE(other.Read().IsInteger());
  EXPECT_LE(GrantedAt(client_, "x"), after);
  EXPECT_LE(GrantedAt(client_, "y"), after);
}

// Whatever frees a lock during the grace period, its waiter is served at the end.
TEST_F(GraceTest, LockFreedDuringGraceIsGrantedAtItsEnd) {
  for (const char* key : {"released", "removed", "held on", "one of two"}) {
    MustAcquire(client_, key, "holder");
  }
  Promote();
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "held on", "holder", "PX", kMinute), Reply::Int(1));
  Waiter released(server(), "released", "me");
  Waiter removed(server(), "removed", "me");
  Waiter held_on(server(), "held on", "me");
  Waiter set(server());
  Command both = AcquireWaiting("free", "me");
  both.insert(both.end(), {"ALSO", "1", "one of two"});
  set.Send(both);
  AwaitBlocked(client_, set.id());

  client_.Do("LOCK.RELEASE", "released", "holder");
  client_.Do("LOCK.RELEASE", "one of two", "holder");
  client_.Do("DEL", "removed");
  for (Waiter* waiter : {&released, &removed, &set}) {
    EXPECT_FALSE(waiter->HasReply(Milliseconds{20}));
  }
  EXPECT_EQ(Ask(client_, "released", "holder"), Reply::Nil());
  const End end = EndGraceIn(client_, 40);
  for (Waiter* waiter : {&released, &removed, &set}) {
    EXPECT_TRUE(waiter->Read().IsInteger());
  }
  for (const char* key : {"released", "removed", "free", "one of two"}) {
    EXPECT_GT(GrantedAt(client_, key), end.earliest) << key;
  }
  EXPECT_FALSE(held_on.HasReply(Milliseconds{20}));
  client_.Do("LOCK.RELEASE", "held on", "holder");
  EXPECT_TRUE(held_on.Read().IsInteger());
}

TEST_F(GraceTest, LeaseEndingDuringGraceIsHandedOverAtItsEnd) {
  Promote();
  SetGrace(client_, 0);
  MustAcquire(client_, "job", "holder", 30);
  SetGrace(client_, kMinute);
  Waiter waiter(server(), "job", "me");
  EXPECT_TRUE(Eventually([&] { return HolderOf(client_, "job").empty(); }));
  EXPECT_FALSE(waiter.HasReply(Milliseconds{30}));
  const End end = EndGraceIn(client_, 30);
  EXPECT_TRUE(waiter.Read().IsInteger());
  EXPECT_GT(GrantedAt(client_, "job"), end.earliest);
}

TEST_F(GraceTest, DeadlocksAreDetectedDuringGrace) {
  MustAcquire(client_, "x", "alice");
  MustAcquire(client_, "y", "bob");
  Promote();
  Waiter alice(server(), "y", "alice");
  EXPECT_TRUE(client_.Do(AcquireWaiting("x", "bob")).IsError("DEADLOCK"));
}

// Waiting for the end of the grace period uses no CPU.
TEST_F(GraceTest, ServerStaysIdleDuringGrace) {
  MustAcquire(client_, "held", "holder");
  Promote();
  Waiter one(server(), "free", "me");
  Waiter other(server(), "held", "me");
  client_.Do("LOCK.RELEASE", "held", "holder");
  const auto cpu_seconds = [&] {
    return std::stod(InfoField(client_, "cpu", "used_cpu_user")) +
           std::stod(InfoField(client_, "cpu", "used_cpu_sys"));
  };
  const double before = cpu_seconds();
  EXPECT_FALSE(one.HasReply(Milliseconds{300}));
  EXPECT_LT(cpu_seconds() - before, 0.1);
}

// --- Purpose -------------------------------------------------------------------------------------

struct Beliefs {
  int lost = 0;     // holds that were granted and then lost in a failover
  int overlap = 0;  // grants to others while the old holder still believed that it held the lock
  int kept = 0;     // holds that the replica knew, and that their owners kept
};

// Clients acquire locks from a primary that is then cut off for good. Each believes in its hold for
// the lease, counted from before its request. Others request the same locks from the promoted
// replica and wait for them. (Both servers have the true time.)
Beliefs FailOver(int failovers, Milliseconds lease, Milliseconds grace) {
  Beliefs beliefs;
  Pair pair;
  for (Client* client : {&pair.primary(), &pair.replica()}) SetGrace(*client, grace.count());
  // The grace period of the start may not be over yet.
  EXPECT_TRUE(Eventually([&] { return Ask(pair.primary(), "known", "keeper").IsInteger(); }));
  const std::vector<std::string> locks = {"a", "b", "c", "d"};
  for (int i = 0; i < failovers; ++i) {
    const int64_t known = MustAcquire(pair.primary(), "known", "keeper");
    pair.AwaitReplica();
    pair.Cut();
    std::vector<int64_t> believed_until;
    for (const std::string& lock : locks) {
      believed_until.push_back(ServerNow(pair.primary()) + lease.count());
      MustAcquire(pair.primary(), lock, "old holder", lease.count());
    }
    pair.Promote();
    std::vector<Client> others;
    for (const std::string& lock : locks) {
      others.push_back(pair.primary_server().Connect());
      others.back().Send(AcquireWaiting(lock, "new holder"));
    }
    if (Ask(pair.primary(), "known", "keeper") == Reply::Int(known)) ++beliefs.kept;
    for (size_t at = 0; at < locks.size(); ++at) {
      const Reply token = others[at].Read();
      EXPECT_TRUE(token.IsInteger()) << token;
      ++beliefs.lost;
      if (GrantedAt(pair.primary(), locks[at]) < believed_until[at]) ++beliefs.overlap;
      EXPECT_EQ(pair.primary().Do("LOCK.RELEASE", locks[at], "new holder"), Reply::Int(1));
    }
    pair.Rejoin();
  }
  return beliefs;
}

TEST(GraceAtLossyFailoverTest, NoTwoClientsBelieveTheyHoldSameLock) {
  constexpr int kFailovers = 20;
  constexpr Milliseconds kLease{150};
  const Beliefs without = FailOver(kFailovers, kLease, Milliseconds{0});
  const Beliefs with = FailOver(kFailovers, kLease, kLease);
  std::cout << "| " << kFailovers << " failovers, leases of " << kLease.count()
            << " ms | holds lost | two believed at a time | known holds kept |\n|---|--:|--:|--:|\n"
            << "| without a grace | " << without.lost << " | " << without.overlap << " | "
            << without.kept << " |\n| with a grace of " << kLease.count() << " ms | " << with.lost
            << " | " << with.overlap << " | " << with.kept << " |\n";
  EXPECT_GT(without.overlap, 0) << "then this proves nothing";
  EXPECT_EQ(with.overlap, 0);
  EXPECT_EQ(without.kept, kFailovers);
  EXPECT_EQ(with.kept, kFailovers);
}

}  // namespace
}  // namespace turnstile::testing
