// What the waiting of one client can and cannot do to others, and who may wait at all.

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

using Owners = std::vector<std::string>;

class WaitingLimitsTest : public SharedWaitingTest<WaitingLimitsTest> {
 protected:
  void Release(std::string_view key, std::string_view owner) {
    EXPECT_EQ(client_.Do("LOCK.RELEASE", key, owner), Reply::Int(1));
  }
};

// --- Order ------------------------------------------------------------------------------------

// Two queues wake at the same time: waiters are served in order of arrival, whatever the keys.
TEST_F(WaitingLimitsTest, TokensFollowArrivalAcrossQueuesThatWakeTogether) {
  for (const auto& [first, second] : {std::pair("x", "y"), {"y", "x"}}) {
    StartAfresh();
    MustObtain(client_, Acquiring(second, "bob", {"ALSO", "1", first}));
    Waiter carol = Waiter::Asking(server(), Acquiring(first, "carol", {"SHARED", "WAIT", "60000"}));
    Waiter alice = Waiter::Asking(
        server(), Acquiring(second, "alice", {"SHARED", "WAIT", "60000", "ALSO", "1", first}));
    MustObtain(client_, Acquiring(first, "bob", {"SHARED", "ALSO", "1", second}));
    const int64_t earlier = carol.Read().integer;
    EXPECT_GT(earlier, 0);
    EXPECT_GT(alice.Read().integer, earlier);
  }
}

// Between the release and the grant a newcomer must not be served before the waiters, even if it is
// compatible with them.
TEST_F(WaitingLimitsTest, NewcomerIsNotServedBeforeHandOver) {
  for (const Command& mode : Commands{{"SHARED"}, {"LIMIT", "5"}}) {
    StartAfresh();
    MustAcquire(client_, "job", "alice");
    Command waits = mode;
    waits.insert(waits.end(), {"WAIT", "60000"});
    Waiter bob = Waiter::Asking(server(), Acquiring("job", "bob", waits));
    RawConnection newcomer = server().ConnectRaw();
    const std::vector<Reply> replies =
        DoAtOnce(newcomer, {{"LOCK.RELEASE", "job", "alice"}, Acquiring("job", "carol", mode)});
    EXPECT_EQ(replies[1], Reply::Nil());
    EXPECT_TRUE(bob.Read().IsInteger());
    EXPECT_TRUE(client_.Do(Acquiring("job", "carol", mode)).IsInteger());
  }
}

// So much work that it takes several passes of the event loop.
TEST_F(WaitingLimitsTest, HandOverInBatchesKeepsOrder) {
  constexpr size_t kWaiters = 100;
  Command options = {"SHARED", "WAIT", "60000", "ALSO", "60"};
  for (int i = 0; i < 60; i++) options.push_back("k" + std::to_string(i));
  MustAcquire(client_, "job", "alice");
  std::vector<RawConnection> waiters;
  for (size_t i = 0; i < kWaiters; i++) {
    waiters.push_back(server().ConnectRaw());
    waiters.back().SendCommand(Acquiring("job", "owner-" + std::to_string(i), options));
    ASSERT_TRUE(Eventually([&] { return WaitersNow(client_) == std::to_string(i + 1); }));
  }
  Release("job", "alice");
  int64_t last = 0;
  for (RawConnection& waiter : waiters) {
    const Reply token = waiter.ReadReply();
    ASSERT_TRUE(token.IsInteger()) << token;
    EXPECT_GT(token.integer, last);
    last = token.integer;
  }
  EXPECT_EQ(WaitersNow(client_), "0");
}

// When one of many waiters for a set leaves, the others keep their positions, and nobody is
// forgotten.
TEST_F(WaitingLimitsTest, WaiterLeavingDoesNotDisturbOthers) {
  MustAcquire(client_, "a", "alice");
  MustAcquire(client_, "b", "bea");
  Waiter bob = Waiter::Asking(
      server(), Acquiring("a", "bob", {"SHARED", "WAIT", "60000", "ALSO", "2", "b", "c"}));
  Waiter carol = Waiter::Asking(
      server(), Acquiring("a", "carol", {"SHARED", "WAIT", "60000", "ALSO", "2", "b", "c"}));
  Waiter dave(server(), "c", "dave");  // behind both, for a lock that nobody holds
  EXPECT_EQ(client_.Do("CLIENT", "KILL", "ID", bob.id()), Reply::Int(1));
  AwaitGone(client_, bob.id());
  EXPECT_EQ(LineOf(client_, "c"), (Owners{"carol", "dave"}));
  Release("a", "alice");
  EXPECT_FALSE(carol.HasReply());
  Release("b", "bea");
  EXPECT_TRUE(carol.Read().IsInteger());
  EXPECT_FALSE(dave.HasReply());
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "a", "carol", "ALSO", 2, "b", "c"), Reply::Int(3));
  EXPECT_TRUE(dave.Read().IsInteger());
}

// --- Who may wait -----------------------------------------------------------------------------

TEST_F(WaitingLimitsTest, WaitersOfOneUserAreLimited) {
  const auto set_limit = [&](int64_t limit) {
    EXPECT_EQ(client_.Do("CONFIG", "SET", "turnstile.max-waiters-per-user", limit), Reply::Ok());
  };
  const Command rights = {"on", "nopass", "~*", "+@all"};
  Client as_user = server().ConnectAs("greedy", rights);
  set_limit(2);
  MustAcquire(client_, "job", "alice");
  auto bob = std::make_unique<Waiter>(server(), Command{"AUTH", "greedy", "x"});
  bob->Wait("job", "bob");
  Waiter carol(server(), {"AUTH", "greedy", "x"});
  carol.Wait("job", "carol");
  EXPECT_EQ(as_user.Do(AcquireWaiting("job", "dave")),
            Reply::Error("WAITLIMIT this server allows at most 2 waiting requests of this user "
                         "(turnstile.max-waiters-per-user): try again later"));
  // A newer call of the same owner takes over its position, so it does not count; other users can
  // wait.
  Waiter again(server(), {"AUTH", "greedy", "x"});
  again.Wait("job", "bob");
  EXPECT_TRUE(bob->Read().IsError("UNBLOCKED "));
  Waiter other(server(), "job", "other");
  EXPECT_TRUE(as_user.Do(AcquireWaiting("job", "dave")).IsError("WAITLIMIT "));
  // A waiter that leaves makes room.
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "carol"), Reply::Int(1));
  EXPECT_TRUE(carol.Read().IsError("UNBLOCKED "));
  Waiter dave(server(), {"AUTH", "greedy", "x"});
  dave.Wait("job", "dave");
  set_limit(0);
  Waiter erin(server(), {"AUTH", "greedy", "x"});
  erin.Wait("job", "erin");
  EXPECT_EQ(LineOf(client_, "job"), (Owners{"bob", "other", "dave", "erin"}));
}

// A higher limit admits waiters.
TEST_F(WaitingLimitsTest, RaisingMaxHoldersServesWaiters) {
  const auto set_limit = [&](int64_t limit) {
    EXPECT_EQ(client_.Do("CONFIG", "SET", "turnstile.max-holders", limit), Reply::Ok());
  };
  for (const Command& mode : Commands{{"SHARED"}, {"LIMIT", "5"}}) {
    StartAfresh();
    set_limit(1);
    MustObtain(client_, Acquiring("job", "alice", mode));
    EXPECT_EQ(client_.Do(Acquiring("job", "bob", mode)), Reply::Nil());
    Command waits = mode;
    waits.insert(waits.end(), {"WAIT", "60000"});
    Waiter bob = Waiter::Asking(server(), Acquiring("job", "bob", waits));
    set_limit(10'000);
    EXPECT_TRUE(bob.Read().IsInteger());
  }
}

// Some servers do not block a RESP3 client that has subscriptions. There it gets an error;
// elsewhere it waits like any other.
TEST_F(WaitingLimitsTest, SubscribedResp3ClientWaitsOrGetsError) {
  MustAcquire(client_, "job", "alice");
  RawConnection subscriber = server().ConnectRaw();
  subscriber.Hello(3);
  subscriber.SendCommand({"SUBSCRIBE", "news"});
  subscriber.ReadReply();
  const Reply reply = subscriber.Do(AcquireWaiting("job", "bob", {.wait_ms = 50}));
  if (!reply.IsNil()) {
    EXPECT_TRUE(reply.IsError("ERR this server cannot block a RESP3 connection ")) << reply;
  }
  EXPECT_EQ(WaitersNow(client_), "0");
  Release("job", "alice");
  EXPECT_TRUE(subscriber.Do(AcquireWaiting("job", "bob")).IsInteger()) << "it need not wait";
}

// Another module calls without a user, and allows the call to block if the server supports that.
TEST(ModuleCallerTest, CallFromModuleDoesNotWait) {
  Server server({.args = {"--loadmodule", TURNSTILE_FORWARDER_MODULE}});
  Client client = server.Connect();
  MustAcquire(client, "job", "alice");
  const Reply reply =
      client.Do("FORWARD.WAITING", "LOCK.ACQUIRE", "job", "bob", "PX", kMinute, "WAIT", kMinute);
  EXPECT_TRUE(reply.IsNil() || reply == Reply::Error("ERR no reply")) << reply;
  EXPECT_EQ(WaitersNow(client), "0");
  const Reply session =
      client.Do("FORWARD.WAITING", "LOCK.ACQUIRE", "other", "bob", "PX", kMinute, "SESSION");
  EXPECT_TRUE(session.IsError("ERR ")) << session;
  EXPECT_EQ(client.Do("PING"), Reply::Status("PONG"));
  EXPECT_EQ(server.CrashReport(), "");
}

// --- Memory -----------------------------------------------------------------------------------

// The memory at the time of the grant counts, not that at the last command.
TEST(WaitingMemoryTest, GrantIsRefusedOnlyIfMemoryIsFullAtGrant) {
  Server server;
  Client client = server.Connect();
  const Command shorten = {"LOCK.TOUCH", "job", "alice", "PX", "300"};
  const Command fill = {"CONFIG", "SET", "maxmemory", "1"};
  const Command empty = {"CONFIG", "SET", "maxmemory", "0"};
  RawConnection raw = server.ConnectRaw();
  MustAcquire(client, "job", "alice");
  Waiter bob(server, "job", "bob");
  EXPECT_EQ(DoAtOnce(raw, {shorten, fill}), (std::vector{Reply::Int(1), Reply::Ok()}));
  EXPECT_TRUE(bob.Read().IsError("OOM "));

  EXPECT_EQ(client.Do(empty), Reply::Ok());
  MustAcquire(client, "job", "alice");
  Waiter carol(server, "job", "carol");
  EXPECT_TRUE(DoAtOnce(raw, {shorten, fill, {"SET", "x", "1"}, empty})[2].IsError("OOM "));
  EXPECT_TRUE(carol.Read().IsInteger());
}

// --- Unrelated keys ---------------------------------------------------------------------------

// While locks are held and waited for, other keys keep the idle time and frequency that they were
// restored with.
TEST(UnrelatedKeysTest, RestoredKeysKeepIdleTimeAndFrequency) {
  Server server;
  Client client = server.Connect();
  MustAcquire(client, "job", "alice");
  Waiter bob(server, "job", "bob");
  client.Do("SET", "x", "value");
  const std::string payload = client.Do("DUMP", "x").text;
  EXPECT_EQ(client.Do("RESTORE", "old", 0, payload, "IDLETIME", 1000), Reply::Ok());
  client.Do("PING");
  EXPECT_GE(client.Do("OBJECT", "IDLETIME", "old").integer, 1000);
  client.Do("CONFIG", "SET", "maxmemory-policy", "allkeys-lfu");
  EXPECT_EQ(client.Do("RESTORE", "often", 0, payload, "FREQ", 200), Reply::Ok());
  client.Do("PING");
  EXPECT_EQ(client.Do("OBJECT", "FREQ", "often"), Reply::Int(200));
}

// Repeated changes of one key by a script are handled once.
TEST(UnrelatedKeysTest, RepeatedChangesKeepOneCopyOfKeyName) {
  Server server;
  Client client = server.Connect();
  MustAcquire(client, "job", "alice");
  const std::string name(1024 * 1024, 'n');
  MustAcquire(client, name, "alice");
  const int64_t end = EndOf(client, name);
  EXPECT_EQ(
      client.Do("EVAL", "for i = 1, 150 do redis.call('PEXPIRE', KEYS[1], 5000 + i) end", 1, name),
      Reply::Nil());
  EXPECT_EQ(EndOf(client, name), end) << "the lease decides";
  const int64_t peak = std::stoll(InfoField(client, "memory", "used_memory_peak"));
  EXPECT_LT(peak, int64_t{100} * 1024 * 1024);
}

}  // namespace
}  // namespace turnstile::testing
