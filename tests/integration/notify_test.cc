// LOCK.ACQUIRE with NOTIFY: the call never blocks, and what becomes of the request and of the hold
// is published.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <string>
#include <string_view>
#include <vector>

#include "support/events.h"
#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/notices.h"
#include "support/replication_stream.h"
#include "support/reply.h"
#include "support/resp3.h"
#include "support/server.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

using namespace std::string_literals;

using Owners = std::vector<std::string>;

class NotifyTest : public SharedNotifyTest<NotifyTest> {
 protected:
  // A free lock that is granted at once and bound to the channel.
  int64_t MustHold(std::string_view key, std::string_view owner, const std::string& id,
                   const Command& options = {}, int64_t lease_ms = kMinute) {
    Command all = {"NOTIFY", notices_.channel(), id};
    all.insert(all.end(), options.begin(), options.end());
    const int64_t token = MustObtain(client_, Acquiring(key, owner, all, lease_ms));
    EXPECT_GT(token, 0);
    return token;
  }

  // What has been published since the last message that was read.
  Texts Published() { return notices_.Until(client_); }
};

// --- The reply --------------------------------------------------------------------------------

TEST_F(NotifyTest, CallThatWouldWaitAnswersZeroAtOnce) {
  const int64_t first = MustAcquire(client_, "job", "alice");
  MustQueue("job", "bob", "id-1");
  EXPECT_EQ(client_.Do("PING"), Reply::Status("PONG")) << "the connection is not blocked";
  EXPECT_EQ(WaitersNow(client_), "0");
  EXPECT_EQ(QueuedNow(client_), "1");
  EXPECT_EQ(Figure("contended_locks"), "1");
  const Reply info = client_.Do("LOCK.INFO", "job");
  EXPECT_EQ(info.Field("waiting"), Reply::Int(1));
  const Reply waiter = info.Field("waiters").elements.at(0);
  EXPECT_EQ(waiter.Field("owner"), Reply::Str("bob"));
  EXPECT_EQ(waiter.Field("mode"), Reply::Str("exclusive"));
  EXPECT_GT(waiter.Field("left-ms").integer, kMinute - 10000);
  EXPECT_EQ(waiter.Field("client-id"), Reply::Nil()) << "it belongs to no connection";
  EXPECT_EQ(waiter.Field("client-addr"), Reply::Nil());
  EXPECT_EQ(Published(), Texts{});

  const int64_t before = ServerNow(client_);
  EXPECT_EQ(Release("job", "alice"), Reply::Int(1));
  const int64_t token = MustBeGranted("id-1", "job");
  EXPECT_GT(token, first);
  EXPECT_EQ(HolderOf(client_, "job"), "bob");
  EXPECT_GE(EndOf(client_, "job"), before + kMinute) << "the lease begins with the grant";
  EXPECT_EQ(QueuedNow(client_), "0");
  EXPECT_EQ(Published(), Texts{}) << "once";
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", "bob", "PX", kMinute), Reply::Int(1));
}

TEST_F(NotifyTest, TokenThatTheCallAnswersIsNotPublished) {
  const int64_t token = MustHold("job", "alice", "1");
  EXPECT_EQ(client_.Do(Notified("job", "alice", notices_, "1")), Reply::Int(token));
  EXPECT_EQ(Published(), Texts{});
}

TEST_F(NotifyTest, WithoutWaitIsOneTry) {
  MustAcquire(client_, "job", "alice");
  EXPECT_EQ(client_.Do(Acquiring("job", "bob", {"NOTIFY", notices_.channel(), "1"})), Reply::Nil());
  EXPECT_EQ(client_.Do(Acquiring("job", "bob", Notifying(notices_.channel(), "1", 0))),
            Reply::Nil());
  EXPECT_EQ(QueuedNow(client_), "0");
  EXPECT_EQ(Figure("rejected"), "2");
  Release("job", "alice");
  EXPECT_EQ(Published(), Texts{});
}

TEST_F(NotifyTest, WaitsAlsoInTransactions) {
  MustAcquire(client_, "job", "alice");
  EXPECT_EQ(client_.Do("MULTI"), Reply::Ok());
  EXPECT_EQ(client_.Do(Notified("job", "bob", notices_, "b")), Reply::Queued());
  EXPECT_EQ(client_.Do(Notified("job", "carol", notices_, "c")), Reply::Queued());
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "alice"), Reply::Queued());
  EXPECT_EQ(client_.Do("EXEC"), Reply::Array({Reply::Int(0), Reply::Int(0), Reply::Int(1)}));
  MustBeGranted("b", "job");
  EXPECT_EQ(LineOf(client_, "job"), Owners{"carol"});
}

TEST_F(NotifyTest, WaitsAlsoInScriptsAndFunctions) {
  const int64_t token = MustAcquire(client_, "job", "alice");
  const auto call = [](const char* owner) {
    return "redis.call('LOCK.ACQUIRE', KEYS[1], '" + std::string(owner) +
           "', 'PX', 60000, 'WAIT', 60000, 'NOTIFY', ARGV[1], '" + owner + "')";
  };
  const std::string& channel = notices_.channel();
  EXPECT_EQ(client_.Do("EVAL", "return " + call("bob"), 1, "job", channel), Reply::Int(0));
  // 0 is true in Lua, as every token is.
  EXPECT_EQ(client_.Do("EVAL", "return " + call("carol") + " > 0 and 'granted' or 'in line'", 1,
                       "job", channel),
            Reply::Str("in line"));
  EXPECT_EQ(client_.Do("FUNCTION", "LOAD", "REPLACE",
                       "#!lua name=ours\nredis.register_function('ask', function(KEYS, ARGV) "
                       "return " +
                           call("dave") + " end)"),
            Reply::Str("ours"));
  EXPECT_EQ(client_.Do("FCALL", "ask", 1, "job", channel), Reply::Int(0));
  EXPECT_EQ(LineOf(client_, "job"), (Owners{"bob", "carol", "dave"}));
  // A script that releases the lock does not see the hand-over, which comes after it.
  EXPECT_EQ(client_.Do("EVAL",
                       "redis.call('LOCK.RELEASE', KEYS[1], 'alice') "
                       "return redis.call('LOCK.FENCE', KEYS[1])",
                       1, "job"),
            Reply::Nil());
  EXPECT_GT(MustBeGranted("bob", "job"), token);
  for (const auto& [owner, next] : {std::pair("bob", "carol"), std::pair("carol", "dave")}) {
    EXPECT_EQ(Release("job", owner), Reply::Int(1));
    MustBeGranted(next, "job");
  }
  client_.Do("FUNCTION", "FLUSH");
}

TEST_F(NotifyTest, WaitsAlsoAfterThen) {
  const int64_t guard = MustAcquire(client_, "guard", "me");
  MustAcquire(client_, "job", "alice");
  Command fenced = {"LOCK.FENCE", "guard", std::to_string(guard), "THEN"};
  const Command request = Notified("job", "bob", notices_, "1");
  fenced.insert(fenced.end(), request.begin(), request.end());
  EXPECT_EQ(client_.Do(fenced), Reply::Int(0));
  EXPECT_EQ(LineOf(client_, "job"), Owners{"bob"});
  fenced[2] = std::to_string(guard + 1);
  EXPECT_TRUE(client_.Do(fenced).IsError("FENCED"));
  Release("job", "alice");
  MustBeGranted("1", "job");
}

TEST_F(NotifyTest, OneConnectionStandsInAThousandLines) {
  constexpr int kLines = 1000;
  const auto key = [](int i) { return "job:" + std::to_string(i); };
  RawConnection raw = server().ConnectRaw();
  Commands requests;
  Commands releases;
  for (int i = 0; i < kLines; i++) {
    MustAcquire(client_, key(i), "alice");
    requests.push_back(Notified(key(i), "bob", notices_, std::to_string(i)));
    releases.push_back({"LOCK.RELEASE", key(i), "alice"});
  }
  for (const Reply& reply : DoAtOnce(raw, requests)) ASSERT_EQ(reply, Reply::Int(0));
  EXPECT_EQ(QueuedNow(client_), std::to_string(kLines));
  for (const Reply& reply : DoAtOnce(raw, releases)) ASSERT_EQ(reply, Reply::Int(1));
  // Those that became free in the same moment are served in the order of arrival.
  int64_t last = 0;
  for (int i = 0; i < kLines; i++) {
    const int64_t token = MustBeGranted(std::to_string(i), key(i));
    ASSERT_GT(token, last);
    last = token;
  }
  EXPECT_EQ(Published(), Texts{});
}

TEST_F(NotifyTest, WaiterTakesLessThanAKilobyte) {
  constexpr int64_t kWaiters = 20000;
  client_.Do("CONFIG", "SET", "latency-tracking", "no");
  MustAcquire(client_, "job", "alice");
  MustQueue("job", "bob", "first");
  const auto used = [this] { return std::stoll(InfoField(client_, "memory", "used_memory")); };
  const int64_t before = used();
  {
    RawConnection raw = server().ConnectRaw();
    const std::string owner = "00000000-0000-0000-0000-0000";
    for (int64_t sent = 0; sent < kWaiters;) {
      Commands requests;
      for (int i = 0; i < 1000; i++, sent++) {
        const std::string id = owner + std::to_string(10000000 + sent);
        requests.push_back(Notified("job", id, notices_, id));
      }
      for (const Reply& reply : DoAtOnce(raw, requests)) ASSERT_EQ(reply, Reply::Int(0));
    }
  }
  EXPECT_EQ(WaitingFor(client_, "job"), kWaiters + 1);
  const auto each = [&] { return (used() - before) / kWaiters; };
  EXPECT_TRUE(Eventually([&] { return each() < 1024; })) << each();
  std::cout << "a waiter takes " << each() << " bytes\n";
  notices_.Close(client_);
  client_.Do("DEL", "job");
  EXPECT_TRUE(Eventually([&] { return QueuedNow(client_) == "0"; }));
  EXPECT_TRUE(Eventually([&] { return each() < 100; })) << each() << " left";
}

// --- How a wait ends --------------------------------------------------------------------------

TEST_F(NotifyTest, TimeOutIsPublished) {
  MustAcquire(client_, "job", "alice");
  const int64_t before = ServerNow(client_);
  MustQueue(Acquiring("job", "bob", Notifying(notices_.channel(), "1", 50)));
  MustQueue("job", "carol", "2");
  EXPECT_EQ(notices_.Next(), "1 timeout job");
  EXPECT_GE(ServerNow(client_), before + 50);
  EXPECT_EQ(LineOf(client_, "job"), Owners{"carol"});
  EXPECT_EQ(Figure("wait_timeouts"), "1");
  Release("job", "alice");
  MustBeGranted("2", "job");
  EXPECT_EQ(Published(), Texts{});
}

TEST_F(NotifyTest, WrongTypeIsPublished) {
  MustAcquire(client_, "job", "alice");
  MustQueue("job", "bob", "1");
  client_.Do("MULTI");
  client_.Do("DEL", "job");
  client_.Do("LPUSH", "job", "x");
  client_.Do("EXEC");
  EXPECT_EQ(notices_.Next(),
            "1 error WRONGTYPE Operation against a key holding the wrong kind of value");
  EXPECT_EQ(QueuedNow(client_), "0");
}

TEST_F(NotifyTest, FullMemoryIsPublished) {
  MustAcquire(client_, "job", "alice");
  MustQueue("job", "bob", "1");
  EXPECT_EQ(client_.Do("CONFIG", "SET", "maxmemory", 1), Reply::Ok());
  EXPECT_EQ(Release("job", "alice"), Reply::Int(1));
  const std::string message = notices_.Next();
  EXPECT_TRUE(message.starts_with("1 error OOM ")) << message;
  EXPECT_EQ(client_.Do("CONFIG", "SET", "maxmemory", 0), Reply::Ok());
  EXPECT_EQ(client_.Do("EXISTS", "job"), Reply::Int(0));
}

TEST_F(NotifyTest, MissingReplicasArePublished) {
  MustAcquire(client_, "job", "alice");
  MustQueue("job", "bob", "1");
  RawConnection raw = server().ConnectRaw();
  EXPECT_EQ(DoAtOnce(raw, {{"LOCK.TOUCH", "job", "alice", "PX", "1"},
                           {"CONFIG", "SET", "min-replicas-to-write", "1"}}),
            (std::vector{Reply::Int(1), Reply::Ok()}));
  const std::string message = notices_.Next();
  EXPECT_EQ(client_.Do("CONFIG", "SET", "min-replicas-to-write", 0), Reply::Ok());
  EXPECT_TRUE(message.starts_with("1 error NOREPLICAS ")) << message;
}

// bob comes to hold the lock by a stranger's command, in a mode that he did not ask for.
TEST_F(NotifyTest, OtherModeIsPublished) {
  MustObtain(client_, Acquiring("other", "bob", {"LIMIT", "2"}));
  MustAcquire(client_, "job", "alice");
  MustQueue("job", "bob", "1");
  EXPECT_EQ(client_.Do("RENAME", "other", "job"), Reply::Ok());
  const std::string message = notices_.Next();
  EXPECT_TRUE(message.starts_with("1 error ERR this owner holds the lock in another mode"))
      << message;
}

TEST_F(NotifyTest, ReleaseByOwnerEndsWait) {
  MustAcquire(client_, "job", "alice");
  MustQueue("job", "bob", "1");
  MustQueue("job", "carol", "2");
  EXPECT_EQ(Release("job", "stranger"), Reply::Int(0));
  EXPECT_EQ(Release("job", "bob"), Reply::Int(1));
  EXPECT_EQ(notices_.Next(), "1 " + kCancelledNotice);
  EXPECT_EQ(LineOf(client_, "job"), Owners{"carol"});
  EXPECT_EQ(Figure("waits_cancelled"), "1");
  EXPECT_EQ(Release("job", "bob"), Reply::Int(0));
  Release("job", "alice");
  MustBeGranted("2", "job");
}

// As a client does that gives up: it cannot know whether the ACQUIRE has been granted.
TEST_F(NotifyTest, ReleaseBehindAcquireCancelsItWhetherGrantedOrNot) {
  RawConnection raw = server().ConnectRaw();
  for (const bool busy : {true, false}) {
    if (busy) MustAcquire(client_, "job", "alice");
    const std::vector<Reply> replies =
        DoAtOnce(raw, {Notified("job", "bob", notices_, "1"), {"LOCK.RELEASE", "job", "bob"}});
    EXPECT_EQ(replies[0].integer == 0, busy) << replies[0];
    EXPECT_EQ(replies[1], Reply::Int(1));
    EXPECT_EQ(HolderOf(client_, "job"), busy ? "alice" : "");
    EXPECT_EQ(Published(), busy ? Texts{"1 " + kCancelledNotice} : Texts{});
    client_.Do("DEL", "job");
  }
}

TEST_F(NotifyTest, WaitOutlivesConnectionThatAsked) {
  MustAcquire(client_, "job", "alice");
  Waiter caller(server());
  EXPECT_EQ(caller.Do(Notified("job", "bob", notices_, "1")), Reply::Int(0));
  EXPECT_EQ(client_.Do("CLIENT", "KILL", "ID", caller.id()), Reply::Int(1));
  AwaitGone(client_, caller.id());
  EXPECT_EQ(LineOf(client_, "job"), Owners{"bob"});
  Release("job", "alice");
  MustBeGranted("1", "job");
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", "bob", "PX", kMinute), Reply::Int(1));
}

// It is not blocked, so there is nothing to unblock.
TEST_F(NotifyTest, ClientUnblockDoesNotEndWait) {
  MustAcquire(client_, "job", "alice");
  Waiter caller(server());
  EXPECT_EQ(caller.Do(Notified("job", "bob", notices_, "1")), Reply::Int(0));
  EXPECT_EQ(client_.Do("CLIENT", "UNBLOCK", caller.id(), "ERROR"), Reply::Int(0));
  EXPECT_EQ(LineOf(client_, "job"), Owners{"bob"});
}

// --- Order ------------------------------------------------------------------------------------

TEST_F(NotifyTest, BlockedAndNotifiedWaitersAreServedInOrderOfArrival) {
  int64_t last = MustAcquire(client_, "job", "alice");
  MustQueue("job", "n1", "n1");
  Waiter b1(server(), "job", "b1");
  MustQueue("job", "n2", "n2");
  MustQueue("job", "n3", "n3");
  Waiter b2(server(), "job", "b2");
  const Owners line = {"n1", "b1", "n2", "n3", "b2"};
  EXPECT_EQ(LineOf(client_, "job"), line);
  EXPECT_EQ(WaitersNow(client_), "2");
  EXPECT_EQ(QueuedNow(client_), "3");
  std::string holder = "alice";
  for (const std::string& next : line) {
    EXPECT_EQ(Release("job", holder), Reply::Int(1));
    int64_t token = 0;
    if (next.starts_with("n")) {
      token = MustBeGranted(next, "job");
    } else {
      token = (next == "b1" ? b1 : b2).Read().integer;
    }
    EXPECT_GT(token, last);
    EXPECT_EQ(HolderOf(client_, "job"), next);
    EXPECT_EQ(Published(), Texts{}) << "nobody overtakes";
    last = token;
    holder = next;
  }
}

TEST_F(NotifyTest, ReadersThatStandTogetherEnterTogether) {
  MustAcquire(client_, "job", "alice");
  MustQueue("job", "r1", "r1", {"SHARED"});
  Waiter blocked = Waiter::Asking(server(), Acquiring("job", "r2", {"SHARED", "WAIT", "60000"}));
  MustQueue("job", "r3", "r3", {"SHARED"});
  MustQueue("job", "writer", "w");
  MustQueue("job", "r4", "r4", {"SHARED"});
  Release("job", "alice");
  const int64_t first = MustBeGranted("r1", "job");
  const int64_t second = blocked.Read().integer;
  const int64_t third = MustBeGranted("r3", "job");
  EXPECT_TRUE(first < second && second < third);
  EXPECT_EQ(LineOf(client_, "job"), (Owners{"writer", "r4"}));
  for (const char* owner : {"r1", "r2", "r3"}) Release("job", owner);
  MustBeGranted("w", "job");
  Release("job", "writer");
  MustBeGranted("r4", "job");
  EXPECT_EQ(Published(), Texts{});
}

TEST_F(NotifyTest, UpgradeIsGrantedUnderNewToken) {
  MustObtain(client_, Acquiring("job", "alice", {"SHARED"}));
  MustObtain(client_, Acquiring("job", "bob", {"SHARED"}));
  MustQueue("job", "alice", "up");
  EXPECT_EQ(HoldersOf(client_, "job"), (Owners{"alice", "bob"})) << "still shared";
  Release("job", "bob");
  MustBeGranted("up", "job");
  EXPECT_EQ(ModeOf(client_, "job"), "exclusive");
}

TEST_F(NotifyTest, WaitClosesCycles) {
  MustAcquire(client_, "a", "alice");
  MustAcquire(client_, "b", "bob");
  MustQueue("b", "alice", "1");
  const Reply cycle = Reply::Error(
      "DEADLOCK waiting for \"a\" would close the cycle bob -> \"a\" -> alice -> \"b\" -> bob");
  EXPECT_EQ(client_.Do(Notified("a", "bob", notices_, "2")), cycle) << "the call itself says so";
  EXPECT_EQ(client_.Do(AcquireWaiting("a", "bob")), cycle);
  EXPECT_EQ(QueuedNow(client_), "1");
  EXPECT_EQ(Published(), Texts{});
  // And the other way round: she blocks, he would be notified.
  EXPECT_EQ(Release("b", "alice"), Reply::Int(1));
  EXPECT_EQ(notices_.Next(), "1 " + kCancelledNotice);
  Waiter alice(server(), "b", "alice");
  EXPECT_EQ(client_.Do(Notified("a", "bob", notices_, "2")), cycle);
  EXPECT_EQ(QueuedNow(client_), "0");
}

// --- Receivers --------------------------------------------------------------------------------

TEST_F(NotifyTest, GrantWithoutReceiverIsNotWrittenAndNextIsServed) {
  MustAcquire(client_, "job", "alice");
  for (const std::string owner : {"bob", "carol", "dave"}) {
    MustQueue(Acquiring("job", owner, Notifying("nobody listens", owner)));
  }
  MustQueue("job", "erin", "1");
  Waiter frank(server(), "job", "frank");
  ReplicationStream stream(server().port());
  EventLog events(server());
  EXPECT_EQ(client_.Do("CONFIG", "SET", "notify-keyspace-events", "Kd"), Reply::Ok());
  EXPECT_EQ(Release("job", "alice"), Reply::Int(1));
  const int64_t token = MustBeGranted("1", "job");
  const Commands written = stream.Until(client_);
  ASSERT_EQ(written.size(), 2U);
  EXPECT_EQ(written[0], (Command{"LOCK.RELEASE", "job", "alice"}));
  EXPECT_EQ(written[1].at(2), "erin");
  EXPECT_EQ(NumbersOf(written[1]).token, token);
  EXPECT_EQ(events.Until(client_, 2), (Texts{"job lock.released", "job lock.acquired"}));
  EXPECT_EQ(client_.Do("CONFIG", "SET", "notify-keyspace-events", ""), Reply::Ok());
  EXPECT_EQ(HoldersOf(client_, "job"), Owners{"erin"});
  EXPECT_EQ(LineOf(client_, "job"), Owners{"frank"});
  EXPECT_EQ(Figure("undelivered"), "3");
  EXPECT_EQ(Figure("acquired_after_wait"), "1");
  EXPECT_EQ(QueuedNow(client_), "0");
}

TEST_F(NotifyTest, LockIsFreeWhenNobodyReceivesAnything) {
  MustAcquire(client_, "job", "alice");
  for (const std::string owner : {"bob", "carol"}) {
    MustQueue(Acquiring("job", owner, Notifying("nobody listens", owner)));
  }
  Release("job", "alice");
  EXPECT_TRUE(Eventually([&] { return QueuedNow(client_) == "0"; }));
  EXPECT_EQ(client_.Do("LOCK.INFO", "job"), Reply::Nil());
  EXPECT_EQ(client_.Do("DBSIZE"), Reply::Int(0));
  EXPECT_EQ(Figure("undelivered"), "2");
  EXPECT_EQ(Figure("acquired_after_wait"), "0");
}

TEST_F(NotifyTest, UndeliveredSetLeavesAllItsLines) {
  MustAcquire(client_, "b", "alice");
  MustQueue(Acquiring("a", "bob",
                      {"WAIT", "60000", "NOTIFY", "nobody listens", "1", "ALSO", "2", "b", "c"}));
  MustQueue("c", "carol", "c");  // free, but bob came first
  MustQueue("b", "dave", "b");
  Waiter erin(server(), "a", "erin");
  Release("b", "alice");
  MustBeGranted("c", "c");
  MustBeGranted("b", "b");
  EXPECT_TRUE(erin.Read().IsInteger());
  EXPECT_EQ(Figure("undelivered"), "1") << "one request";
}

// A channel that lost its subscriber while the wait went on.
TEST_F(NotifyTest, SubscriberThatLeftDoesNotCount) {
  MustAcquire(client_, "job", "alice");
  MustQueue("job", "bob", "1");
  Waiter carol(server(), "job", "carol");
  notices_.Close(client_);
  Release("job", "alice");
  EXPECT_TRUE(carol.Read().IsInteger());
  EXPECT_EQ(Figure("undelivered"), "1");
}

TEST_F(NotifyTest, UndeliveredUpgradeLeavesSharedHold) {
  const int64_t shared = MustObtain(client_, Acquiring("job", "alice", {"SHARED"}));
  MustObtain(client_, Acquiring("job", "bob", {"SHARED"}));
  MustQueue(Acquiring("job", "alice", Notifying("nobody listens", "1")));
  Release("job", "bob");
  EXPECT_TRUE(Eventually([&] { return QueuedNow(client_) == "0"; }));
  EXPECT_EQ(ModeOf(client_, "job"), "shared");
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job", shared), Reply::Int(1));
}

TEST_F(NotifyTest, PatternSubscriberCounts) {
  Notices pattern(server(), "workers:*", "PSUBSCRIBE");
  MustAcquire(client_, "job", "alice");
  MustQueue(Acquiring("job", "bob", Notifying("workers:7", "1")));
  Release("job", "alice");
  testing::MustBeGranted(client_, pattern, "1", "job");
  EXPECT_EQ(Figure("undelivered"), "0");
}

TEST_F(NotifyTest, AllSubscribersReceiveEveryMessage) {
  Notices other(server(), notices_.channel());
  MustAcquire(client_, "job", "alice");
  MustQueue("job", "bob", "1");
  Release("job", "alice");
  const int64_t token = MustBeGranted("1", "job");
  EXPECT_EQ(other.Next(), GrantedNotice("1", token, "job"));
}

// One connection that asks and is told, also where the server does not let it block.
TEST_F(NotifyTest, Resp3ConnectionIsToldItself) {
  RawConnection raw = server().ConnectRaw();
  raw.Hello(3);
  raw.SendCommand({"SUBSCRIBE", "mine"});
  EXPECT_EQ(raw.ReadReply().kind, Reply::Kind::kPush);
  MustAcquire(client_, "job", "alice");
  EXPECT_EQ(raw.Do(Acquiring("job", "bob", Notifying("mine", "1"))), Reply::Int(0));
  EXPECT_EQ(raw.Do("PING"), Reply::Status("PONG"));
  // Even of what its own command has caused.
  EXPECT_EQ(raw.Do("LOCK.RELEASE", "job", "alice"), Reply::Int(1));
  if (raw.pushes().empty()) raw.pushes().push_back(raw.ReadReply());
  const Reply push = raw.pushes().at(0);
  EXPECT_EQ(push.kind, Reply::Kind::kPush);
  const int64_t token = client_.Do("LOCK.FENCE", "job").integer;
  EXPECT_EQ(push.Texts(), (Texts{"message", "mine", GrantedNotice("1", token, "job")}));
  EXPECT_EQ(raw.Do("LOCK.TOUCH", "job", "bob", "PX", kMinute), Reply::Int(1));
}

// --- What becomes of the hold -----------------------------------------------------------------

TEST_F(NotifyTest, NothingIsSaidOfARelease) {
  MustHold("job", "alice", "1");
  MustQueue("job", "bob", "2");
  EXPECT_EQ(Release("job", "alice"), Reply::Int(1));
  MustBeGranted("2", "job");
  EXPECT_EQ(Release("job", "bob"), Reply::Int(1));
  EXPECT_EQ(Published(), Texts{});
  // Nor of a later hold by somebody who did not ask for it.
  MustAcquire(client_, "job", "alice");
  client_.Do("DEL", "job");
  EXPECT_EQ(Published(), Texts{});
}

TEST_F(NotifyTest, ForcedReleaseIsPublished) {
  const Commands ways = {{"DEL", "job"},           {"UNLINK", "job"},
                         {"RENAME", "job", "x"},   {"SET", "job", "plain"},
                         {"MOVE", "job", "3"},     {"COPY", "list", "job", "REPLACE"},
                         {"RENAME", "list", "job"}};
  for (const Command& way : ways) {
    SCOPED_TRACE(way[0]);
    StartAfresh();
    client_.Do("LPUSH", "list", "x");
    // Granted at once, and after a wait.
    const int64_t shared = MustHold("job", "alice", "1", {"SHARED"});
    EXPECT_FALSE(client_.Do(way).IsError());
    EXPECT_EQ(notices_.Next(), LostNotice("1", shared, "forced", "job"));
    client_.Do("FLUSHALL");
    client_.Do("LPUSH", "list", "x");
    MustAcquire(client_, "job", "alice");
    MustQueue("job", "bob", "2");
    Release("job", "alice");
    const int64_t token = MustBeGranted("2", "job");
    EXPECT_FALSE(client_.Do(way).IsError());
    EXPECT_EQ(notices_.Next(), LostNotice("2", token, "forced", "job"));
    EXPECT_EQ(Published(), Texts{}) << "once";
  }
}

TEST_F(NotifyTest, FlushIsPublished) {
  for (const Command& flush : Commands{{"FLUSHALL"},
                                       {"FLUSHDB"},
                                       {"FLUSHALL", "ASYNC"},
                                       {"FLUSHDB", "ASYNC"},
                                       {"FLUSHALL", "SYNC"}}) {
    SCOPED_TRACE(flush[0]);
    const int64_t a = MustHold("a", "alice", "1", {"SHARED"});
    const int64_t b = MustHold("a", "bob", "2", {"SHARED"});
    const int64_t c = MustHold("c", "carol", "3");
    EXPECT_EQ(client_.Do(flush), Reply::Ok());
    Texts lost = {notices_.Next(), notices_.Next(), notices_.Next()};
    std::sort(lost.begin(), lost.end());
    EXPECT_EQ(lost, (Texts{LostNotice("1", a, "flushed", "a"), LostNotice("2", b, "flushed", "a"),
                           LostNotice("3", c, "flushed", "c")}));
    EXPECT_EQ(Published(), Texts{});
  }
}

TEST_F(NotifyTest, FlushOfAnotherDatabaseIsNone) {
  MustHold("job", "alice", "1");
  client_.Do("SELECT", 3);
  client_.Do("SET", "x", "y");
  EXPECT_EQ(client_.Do("FLUSHDB"), Reply::Ok());
  client_.Do("SELECT", 0);
  EXPECT_EQ(Published(), Texts{});
}

TEST_F(NotifyTest, EvictionIsPublished) {
  const int64_t token = MustHold("job", "alice", "1");
  client_.Do("CONFIG", "SET", "maxmemory-policy", "allkeys-random", "maxmemory", 1);
  EXPECT_TRUE(Eventually([&] {
    client_.Do("SET", "x", "y");  // memory is checked before a command that may need more
    return client_.Do("EXISTS", "job") == Reply::Int(0);
  }));
  client_.Do("CONFIG", "SET", "maxmemory", 0, "maxmemory-policy", "noeviction");
  EXPECT_EQ(notices_.Next(), LostNotice("1", token, "evicted", "job"));
  EXPECT_EQ(Published(), Texts{});
}

// Though nothing else looks at the lock.
TEST_F(NotifyTest, EndOfLeaseIsPublishedWithinMillisecondsThoughNobodyWaits) {
  // How late the message is in the median of several rounds.
  const auto lateness = [this](bool active_expiry) {
    std::vector<int64_t> late_ms;
    for (int round = 0; round < 9; round++) {
      const int64_t token = MustHold("job", "alice", "1", {}, 50);
      const int64_t end = EndOf(client_, "job");
      EXPECT_EQ(notices_.Next(), LostNotice("1", token, "expired", "job"));
      const int64_t now = ServerNow(client_);
      EXPECT_GE(now, active_expiry ? FirstFree(client_, end) : end + 1) << "too early";
      late_ms.push_back(now - end);
    }
    std::sort(late_ms.begin(), late_ms.end());
    std::cout << "published " << late_ms.front() << " to " << late_ms.back()
              << " ms after the end of the lease, median " << late_ms[late_ms.size() / 2] << '\n';
    return late_ms[late_ms.size() / 2];
  };
  for (const bool active_expiry : {true, false}) {
    SCOPED_TRACE(active_expiry ? "the server expires keys" : "nobody looks at the key");
    client_.Do("DEBUG", "SET-ACTIVE-EXPIRE", active_expiry ? 1 : 0);
    // A busy machine may be late more than once.
    EXPECT_TRUE(Eventually([&] { return lateness(active_expiry) <= 10 || HasFailure(); },
                           Milliseconds{30000}));
  }
  client_.Do("DEBUG", "SET-ACTIVE-EXPIRE", 1);
  EXPECT_EQ(Published(), Texts{}) << "once";
}

TEST_F(NotifyTest, EndOfLeaseIsPublishedBeforeLinger) {
  const int64_t token = MustHold("job", "alice", "1", {"LINGER", "40000"}, 50);
  EXPECT_EQ(notices_.Next(), LostNotice("1", token, "expired", "job"));
  EXPECT_GT(client_.Do("LOCK.INFO", "job").Field("linger-left-ms").integer, 30000);
  // And once, whatever becomes of the linger.
  MustQueue("job", "bob", "2");
  EXPECT_EQ(client_.Do("DEL", "job"), Reply::Int(1));
  MustBeGranted("2", "job");
  EXPECT_EQ(Published(), Texts{});
}

TEST_F(NotifyTest, EachHolderIsToldOfItsOwnLease) {
  const int64_t a = MustHold("job", "a", "a", {"SHARED"}, 1500);
  const int64_t b = MustHold("job", "b", "b", {"SHARED"}, 50);
  MustHold("job", "c", "c", {"SHARED"});
  EXPECT_EQ(notices_.Next(), LostNotice("b", b, "expired", "job"));
  EXPECT_EQ(notices_.Next(), LostNotice("a", a, "expired", "job"));
  EXPECT_EQ(HoldersOf(client_, "job"), Owners{"c"});
  EXPECT_EQ(Published(), Texts{});
}

TEST_F(NotifyTest, LossIsPublishedBeforeGrantThatItAllows) {
  const int64_t token = MustHold("job", "alice", "1");
  MustQueue("job", "bob", "2");
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", "alice", "PX", 20), Reply::Int(1));
  EXPECT_EQ(notices_.Next(), LostNotice("1", token, "expired", "job"));
  const int64_t next = MustBeGranted("2", "job");
  MustQueue("job", "carol", "3");
  client_.Do("DEL", "job");
  EXPECT_EQ(notices_.Next(), LostNotice("2", next, "forced", "job"));
  MustBeGranted("3", "job");
}

TEST_F(NotifyTest, LossOfSessionIsPublishedBeforeGrantThatItAllows) {
  Waiter holder(server());
  const int64_t token =
      MustObtain(holder, Acquiring("job", "alice", {"SESSION", "NOTIFY", notices_.channel(), "1"}));
  MustQueue("job", "bob", "2");
  holder.Close();
  EXPECT_EQ(notices_.Next(), LostNotice("1", token, "session", "job"));
  MustBeGranted("2", "job");
}

TEST_F(NotifyTest, TouchMovesTheEnd) {
  RawConnection raw = server().ConnectRaw();
  const std::vector<Reply> replies =
      DoAtOnce(raw, {Acquiring("job", "alice", {"NOTIFY", notices_.channel(), "1"}, 100),
                     {"LOCK.TOUCH", "job", "alice", "PX", "400"},
                     {"PEXPIRETIME", "job"}});
  const int64_t token = replies[0].integer;
  EXPECT_GT(token, 0) << replies[0];
  EXPECT_EQ(replies[1], Reply::Int(1));
  const int64_t end = replies[2].integer;
  EXPECT_EQ(notices_.Next(), LostNotice("1", token, "expired", "job"));
  EXPECT_GE(ServerNow(client_), FirstFree(client_, end));

  const int64_t other = MustHold("job", "alice", "1");
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", "alice", "PX", 20), Reply::Int(1));
  EXPECT_EQ(notices_.Next(), LostNotice("1", other, "expired", "job"));
}

TEST_F(NotifyTest, HoldOfSessionIsPublishedWhenConnectionCloses) {
  Waiter holder(server());
  const int64_t token =
      MustObtain(holder, Acquiring("job", "alice", {"SESSION", "NOTIFY", notices_.channel(), "1"}));
  EXPECT_EQ(HoldOf(client_, "job", "alice").Field("client-id"), Reply::Int(holder.id()));
  holder.Close();
  EXPECT_EQ(notices_.Next(), LostNotice("1", token, "session", "job"));
  EXPECT_EQ(client_.Do("LOCK.INFO", "job"), Reply::Nil());
}

TEST_F(NotifyTest, WaitOfSessionEndsWithItsConnection) {
  MustAcquire(client_, "job", "alice");
  Waiter caller(server());
  EXPECT_EQ(caller.Do(Notified("job", "bob", notices_, "1", {"SESSION"})), Reply::Int(0));
  const Reply waiter = client_.Do("LOCK.INFO", "job").Field("waiters").elements.at(0);
  EXPECT_EQ(waiter.Field("client-id"), Reply::Int(caller.id()));
  EXPECT_EQ(waiter.Field("client-addr"), Reply::Str(AddressOf(client_, caller.id())));
  MustQueue("job", "carol", "2");
  caller.Close();
  EXPECT_EQ(notices_.Next(), "1 error UNBLOCKED the connection of this call closed");
  EXPECT_EQ(LineOf(client_, "job"), Owners{"carol"});
  Release("job", "alice");
  MustBeGranted("2", "job");
}

TEST_F(NotifyTest, SessionCoversGrantAfterWait) {
  MustAcquire(client_, "job", "alice");
  Waiter caller(server());
  EXPECT_EQ(caller.Do(Notified("job", "bob", notices_, "1", {"SESSION"})), Reply::Int(0));
  Release("job", "alice");
  const int64_t token = MustBeGranted("1", "job");
  EXPECT_EQ(HoldOf(client_, "job", "bob").Field("client-id"), Reply::Int(caller.id()));
  caller.Close();
  EXPECT_EQ(notices_.Next(), LostNotice("1", token, "session", "job"));
  EXPECT_EQ(client_.Do("LOCK.INFO", "job"), Reply::Nil());
}

TEST_F(NotifyTest, SessionHasNoConnectionInScripts) {
  MustAcquire(client_, "job", "alice");
  const Reply reply = client_.Do("EVAL",
                                 "return redis.call('LOCK.ACQUIRE', 'job', 'bob', 'PX', 1, 'WAIT', "
                                 "9, 'SESSION', 'NOTIFY', 'c', '1')",
                                 1, "job");
  EXPECT_TRUE(reply.IsError("ERR SESSION requires a connection")) << reply;
  EXPECT_EQ(QueuedNow(client_), "0");
}

// --- Which channel a hold is bound to ---------------------------------------------------------

TEST_F(NotifyTest, AcquireWithoutNotifyLeavesBinding) {
  const int64_t token = MustHold("job", "alice", "1");
  EXPECT_EQ(MustAcquire(client_, "job", "alice"), token);
  EXPECT_EQ(client_.Do(AcquireWaiting("job", "alice")), Reply::Int(token));
  client_.Do("DEL", "job");
  EXPECT_EQ(notices_.Next(), LostNotice("1", token, "forced", "job"));
  EXPECT_EQ(Published(), Texts{});
}

TEST_F(NotifyTest, AcquireWithNotifyMovesBinding) {
  Notices other(server());
  const int64_t token = MustHold("job", "alice", "1");
  EXPECT_EQ(client_.Do(Acquiring("job", "alice", {"NOTIFY", other.channel(), "2"})),
            Reply::Int(token));
  client_.Do("DEL", "job");
  EXPECT_EQ(other.Next(), LostNotice("2", token, "forced", "job"));
  EXPECT_EQ(Published(), Texts{}) << "it was moved";
  // Also to a hold that was not bound.
  const int64_t plain = MustAcquire(client_, "job", "alice");
  EXPECT_EQ(MustHold("job", "alice", "3"), plain);
  client_.Do("DEL", "job");
  EXPECT_EQ(notices_.Next(), LostNotice("3", plain, "forced", "job"));
}

TEST_F(NotifyTest, OneTryThatFailsLeavesBinding) {
  const int64_t token = MustHold("job", "alice", "1", {"SHARED"});
  MustObtain(client_, Acquiring("job", "bob", {"SHARED"}));
  EXPECT_EQ(client_.Do(Acquiring("job", "alice", {"NOTIFY", notices_.channel(), "2"})),
            Reply::Nil())
      << "no upgrade beside bob";
  client_.Do("DEL", "job");
  EXPECT_EQ(notices_.Next(), LostNotice("1", token, "forced", "job"));
  EXPECT_EQ(Published(), Texts{});
}

TEST_F(NotifyTest, BindingFollowsUpgradeAndDowngrade) {
  const int64_t shared = MustHold("job", "alice", "1", {"SHARED"});
  const int64_t exclusive = MustAcquire(client_, "job", "alice");
  EXPECT_GT(exclusive, shared);
  EXPECT_EQ(Published(), Texts{}) << "nothing is lost";
  EXPECT_EQ(MustObtain(client_, Acquiring("job", "alice", {"SHARED"})), exclusive);
  client_.Do("DEL", "job");
  EXPECT_EQ(notices_.Next(), LostNotice("1", exclusive, "forced", "job"));
  EXPECT_EQ(Published(), Texts{});
}

TEST_F(NotifyTest, BindingFollowsBlockedUpgrade) {
  MustHold("job", "alice", "1", {"SHARED"});
  MustObtain(client_, Acquiring("job", "bob", {"SHARED"}));
  Waiter upgrade(server(), "job", "alice");
  Release("job", "bob");
  const int64_t token = upgrade.Read().integer;
  client_.Do("DEL", "job");
  EXPECT_EQ(notices_.Next(), LostNotice("1", token, "forced", "job"));
  EXPECT_EQ(Published(), Texts{});
}

TEST_F(NotifyTest, FloorRaisesTokenThatIsPublished) {
  const int64_t token = MustHold("job", "alice", "1");
  EXPECT_EQ(client_.Do(Acquiring("job", "alice", {"FLOOR", std::to_string(token + 5)})),
            Reply::Int(token + 5));
  client_.Do("DEL", "job");
  EXPECT_EQ(notices_.Next(), LostNotice("1", token + 5, "forced", "job"));
}

TEST_F(NotifyTest, RetryOfReentrantCallDoesNotCountTwice) {
  const auto count = [this] { return HoldOf(client_, "job", "alice").Field("count").integer; };
  const int64_t token = MustHold("job", "alice", "1", {"REENTRANT"});
  for (int i = 0; i < 3; i++) {
    EXPECT_EQ(client_.Do(Notified("job", "alice", notices_, "1", {"REENTRANT"})),
              Reply::Int(token));
  }
  EXPECT_EQ(count(), 1) << "a retry of a call that was answered";
  EXPECT_EQ(MustHold("job", "alice", "2", {"REENTRANT"}), token);
  EXPECT_EQ(count(), 2) << "another call";
  EXPECT_EQ(MustHold("job", "alice", "1", {"REENTRANT"}), token);
  EXPECT_EQ(count(), 3) << "that id is bound no more";
  MustObtain(client_, Acquiring("job", "alice", {"REENTRANT"}));
  EXPECT_EQ(count(), 4) << "a call that is not notified always counts";
  EXPECT_EQ(MustHold("job", "alice", "1", {"REENTRANT"}), token);
  EXPECT_EQ(count(), 4);
  // One count less is no loss and leaves the binding.
  EXPECT_EQ(Release("job", "alice"), Reply::Int(1));
  EXPECT_EQ(Published(), Texts{});
  client_.Do("DEL", "job");
  EXPECT_EQ(notices_.Next(), LostNotice("1", token, "forced", "job"));
}

// The message may be lost with a connection: after a new subscription the client asks again.
TEST_F(NotifyTest, AskingAgainAfterGrantGivesTokenAndCountsOnce) {
  MustAcquire(client_, "job", "alice");
  MustQueue("job", "bob", "1", {"REENTRANT"});
  Release("job", "alice");
  const int64_t token = MustBeGranted("1", "job");
  EXPECT_EQ(client_.Do(Notified("job", "bob", notices_, "1", {"REENTRANT"})), Reply::Int(token));
  EXPECT_EQ(HoldOf(client_, "job", "bob").Field("count"), Reply::Int(1));
  EXPECT_EQ(Release("job", "bob"), Reply::Int(1));
  EXPECT_EQ(client_.Do("EXISTS", "job"), Reply::Int(0));
  EXPECT_EQ(Published(), Texts{});
}

// --- The same owner asks again while it waits --------------------------------------------------

TEST_F(NotifyTest, SameChannelAndIdTakesOverPlaceSilently) {
  MustAcquire(client_, "job", "alice");
  MustQueue("job", "bob", "1");
  MustQueue("job", "carol", "2");
  MustQueue("job", "bob", "1");
  EXPECT_EQ(LineOf(client_, "job"), (Owners{"bob", "carol"}));
  EXPECT_EQ(QueuedNow(client_), "2");
  EXPECT_EQ(Published(), Texts{});
  Release("job", "alice");
  MustBeGranted("1", "job");
  EXPECT_EQ(Published(), Texts{});
}

TEST_F(NotifyTest, NewerCallSetsTimeOut) {
  MustAcquire(client_, "job", "alice");
  RawConnection raw = server().ConnectRaw();
  EXPECT_EQ(DoAtOnce(raw, {Acquiring("job", "bob", Notifying(notices_.channel(), "1", 100)),
                           Notified("job", "bob", notices_, "1")}),
            (std::vector{Reply::Int(0), Reply::Int(0)}));
  const int64_t end = ServerNow(client_) + 100;
  ASSERT_TRUE(Eventually([&] { return ServerNow(client_) > end + 20; }));
  EXPECT_EQ(Published(), Texts{}) << "the first time-out is void";
  EXPECT_EQ(LineOf(client_, "job"), Owners{"bob"});
  MustQueue(Acquiring("job", "bob", Notifying(notices_.channel(), "1", 20)));
  EXPECT_EQ(notices_.Next(), "1 timeout job");
  EXPECT_EQ(Published(), Texts{});
}

TEST_F(NotifyTest, OtherIdOrChannelSupersedesAndKeepsPlace) {
  Notices other(server());
  MustAcquire(client_, "job", "alice");
  MustQueue("job", "bob", "1");
  MustQueue("job", "carol", "c");
  MustQueue("job", "bob", "2");
  EXPECT_EQ(notices_.Next(), "1 " + kSupersededNotice);
  MustQueue(Notified("job", "bob", other, "2"));
  EXPECT_EQ(notices_.Next(), "2 " + kSupersededNotice);
  EXPECT_EQ(LineOf(client_, "job"), (Owners{"bob", "carol"}));
  EXPECT_EQ(QueuedNow(client_), "2");
  Release("job", "alice");
  testing::MustBeGranted(client_, other, "2", "job");
  EXPECT_EQ(Published(), Texts{});
}

TEST_F(NotifyTest, BlockingCallTakesOverNotifiedWait) {
  MustAcquire(client_, "job", "alice");
  MustQueue("job", "bob", "1");
  MustQueue("job", "carol", "c");
  Waiter bob(server(), "job", "bob");
  EXPECT_EQ(notices_.Next(), "1 " + kSupersededNotice);
  EXPECT_EQ(LineOf(client_, "job"), (Owners{"bob", "carol"}));
  EXPECT_EQ(WaitersNow(client_), "1");
  EXPECT_EQ(QueuedNow(client_), "1");
  Release("job", "alice");
  EXPECT_TRUE(bob.Read().IsInteger());
  EXPECT_EQ(Published(), Texts{});
}

TEST_F(NotifyTest, NotifiedWaitTakesOverBlockingCall) {
  MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob");
  MustQueue("job", "carol", "c");
  MustQueue("job", "bob", "1");
  EXPECT_TRUE(bob.Read().IsError("UNBLOCKED replaced by a newer call"));
  EXPECT_EQ(LineOf(client_, "job"), (Owners{"bob", "carol"}));
  EXPECT_EQ(WaitersNow(client_), "0");
  Release("job", "alice");
  MustBeGranted("1", "job");
}

// With another mode or other keys the place is given up.
TEST_F(NotifyTest, OtherModeOrKeysGoToTheEnd) {
  MustAcquire(client_, "job", "alice");
  MustAcquire(client_, "task", "alice");
  MustQueue("job", "bob", "1");
  MustQueue("job", "carol", "c");
  MustQueue("job", "bob", "1", {"SHARED"});
  EXPECT_EQ(LineOf(client_, "job"), (Owners{"carol", "bob"}));
  EXPECT_EQ(Published(), Texts{}) << "the id belongs to the newer call";
  MustQueue("job", "dave", "d");
  MustQueue("job", "bob", "2", {"ALSO", "1", "task"});
  EXPECT_EQ(notices_.Next(), "1 " + kSupersededNotice);
  EXPECT_EQ(LineOf(client_, "job"), (Owners{"carol", "dave", "bob"}));
  EXPECT_EQ(LineOf(client_, "task"), Owners{"bob"});
  MustQueue("job", "bob", "2");
  EXPECT_EQ(LineOf(client_, "task"), Owners{});
  EXPECT_EQ(QueuedNow(client_), "3");
  EXPECT_EQ(Published(), Texts{});
}

TEST_F(NotifyTest, OneTryLeavesWaitAlone) {
  MustAcquire(client_, "job", "alice");
  MustQueue("job", "bob", "1");
  EXPECT_EQ(client_.Do(Acquiring("job", "bob", {})), Reply::Nil());
  EXPECT_EQ(client_.Do(Acquiring("job", "bob", {"NOTIFY", notices_.channel(), "1"})), Reply::Nil());
  EXPECT_EQ(client_.Do(Acquiring("job", "bob", {"NOTIFY", notices_.channel(), "2"})), Reply::Nil());
  EXPECT_EQ(Published(), Texts{});
  EXPECT_EQ(LineOf(client_, "job"), Owners{"bob"});
  Release("job", "alice");
  MustBeGranted("1", "job");
}

// A refused call leaves the older one as it was.
TEST_F(NotifyTest, RefusedCallLeavesOlderWait) {
  MustAcquire(client_, "a", "alice");
  MustAcquire(client_, "b", "bob");
  MustAcquire(client_, "c", "carol");
  MustQueue("b", "alice", "1");
  MustQueue("c", "bob", "2");
  EXPECT_TRUE(
      client_.Do(Notified("c", "bob", notices_, "2", {"ALSO", "1", "a"})).IsError("DEADLOCK"));
  EXPECT_EQ(LineOf(client_, "c"), Owners{"bob"});
  EXPECT_EQ(Published(), Texts{});
  EXPECT_EQ(Release("c", "carol"), Reply::Int(1));
  MustBeGranted("2", "c");
}

TEST_F(NotifyTest, SessionMovesToConnectionOfNewerCall) {
  MustAcquire(client_, "job", "alice");
  Waiter first(server());
  Waiter second(server());
  const Command request = Notified("job", "bob", notices_, "1", {"SESSION"});
  EXPECT_EQ(first.Do(request), Reply::Int(0));
  EXPECT_EQ(second.Do(request), Reply::Int(0));
  first.Close();
  AwaitGone(client_, first.id());
  EXPECT_EQ(Published(), Texts{});
  EXPECT_EQ(LineOf(client_, "job"), Owners{"bob"});
  // And without SESSION it belongs to no connection.
  MustQueue("job", "bob", "1");
  second.Close();
  AwaitGone(client_, second.id());
  EXPECT_EQ(LineOf(client_, "job"), Owners{"bob"});
  EXPECT_EQ(Published(), Texts{});
}

// --- Sets of locks ----------------------------------------------------------------------------

TEST_F(NotifyTest, SetIsGrantedByOneMessageAndLostOncePerLock) {
  MustAcquire(client_, "m", "alice");
  // The message names the first key of the request, whatever their order.
  MustQueue("z", "bob", "1", {"ALSO", "2", "m", "a"});
  EXPECT_EQ(QueuedNow(client_), "3");
  EXPECT_EQ(client_.Do(Acquiring("a", "carol", {})), Reply::Nil()) << "he keeps his place in it";
  Release("m", "alice");
  const int64_t token = MustBeGranted("1", "z");
  EXPECT_EQ(Published(), Texts{});
  for (const char* key : {"a", "m", "z"}) EXPECT_EQ(HolderOf(client_, key), "bob");
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "z", "bob", "PX", kMinute, "ALSO", 2, "m", "a"),
            Reply::Int(3));
  client_.Do("DEL", "m");
  EXPECT_EQ(notices_.Next(), LostNotice("1", token, "forced", "m"));
  EXPECT_EQ(Release("z", "bob"), Reply::Int(1));
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "a", "bob", "PX", 20), Reply::Int(1));
  EXPECT_EQ(notices_.Next(), LostNotice("1", token, "expired", "a"));
  EXPECT_EQ(Published(), Texts{});
}

TEST_F(NotifyTest, SetThatIsFreeIsBoundToTheChannel) {
  const int64_t token = MustHold("z", "bob", "1", {"ALSO", "1", "a"});
  client_.Do("DEL", "z", "a");
  Texts lost = {notices_.Next(), notices_.Next()};
  std::sort(lost.begin(), lost.end());
  EXPECT_EQ(lost,
            (Texts{LostNotice("1", token, "forced", "a"), LostNotice("1", token, "forced", "z")}));
}

TEST_F(NotifyTest, EndOfWaitForSetIsPublishedOnceWithFirstKey) {
  MustAcquire(client_, "m", "alice");
  Command request = Notifying(notices_.channel(), "1", 20);
  request.insert(request.end(), {"ALSO", "2", "m", "a"});
  MustQueue(Acquiring("z", "bob", request));
  EXPECT_EQ(notices_.Next(), "1 timeout z");
  MustQueue("z", "bob", "2", {"ALSO", "2", "m", "a"});
  EXPECT_EQ(Release("m", "bob"), Reply::Int(1)) << "it ends in all its lines";
  EXPECT_EQ(notices_.Next(), "2 " + kCancelledNotice);
  EXPECT_EQ(QueuedNow(client_), "0");
  EXPECT_EQ(Published(), Texts{});
}

// The order of the keys does not matter to the place, but the message names the first one.
TEST_F(NotifyTest, TakenOverSetNamesFirstKeyOfNewerCall) {
  MustAcquire(client_, "m", "alice");
  MustQueue("z", "bob", "1", {"ALSO", "1", "m"});
  MustQueue("m", "bob", "1", {"ALSO", "1", "z"});
  EXPECT_EQ(QueuedNow(client_), "2");
  Release("m", "alice");
  MustBeGranted("1", "m");
  EXPECT_EQ(Published(), Texts{});
}

// --- Keys, databases and bytes ----------------------------------------------------------------

TEST_F(NotifyTest, KeysAndChannelsAreAnyBytes) {
  for (const std::string& bytes :
       {"a b"s, " "s, "\0"s, "a\0b c\r\n\xff"s, std::string(256, '\0'), "granted 1"s, "*"s}) {
    SCOPED_TRACE(Quoted(bytes));
    Notices notices(server(), bytes);
    MustAcquire(client_, bytes, "alice");
    MustQueue(Acquiring(bytes, "bob", Notifying(bytes, "1")));
    Release(bytes, "alice");
    const int64_t token = testing::MustBeGranted(client_, notices, "1", bytes);
    client_.Do("DEL", bytes);
    EXPECT_EQ(notices.Next(), LostNotice("1", token, "forced", bytes));
  }
}

TEST_F(NotifyTest, LongestChannelAndIdWork) {
  const std::string id(64, '~');
  Notices notices(server(), std::string(256, 'c'));
  MustAcquire(client_, "job", "alice");
  MustQueue(Notified("job", "bob", notices, id));
  Release("job", "alice");
  testing::MustBeGranted(client_, notices, id, "job");
}

TEST_F(NotifyTest, RemovedKeyIsHandedOn) {
  for (const Command& way : Commands{{"DEL", "job"},
                                     {"UNLINK", "job"},
                                     {"FLUSHALL"},
                                     {"FLUSHDB", "ASYNC"},
                                     {"RENAME", "job", "away"},
                                     {"MOVE", "job", "7"}}) {
    SCOPED_TRACE(way[0]);
    StartAfresh();
    MustAcquire(client_, "job", "alice");
    MustQueue("job", "bob", "1");
    EXPECT_FALSE(client_.Do(way).IsError());
    MustBeGranted("1", "job");
    EXPECT_EQ(HolderOf(client_, "job"), "bob");
    EXPECT_EQ(Published(), Texts{});
  }
}

TEST_F(NotifyTest, WaitersFollowPlainLocks) {
  client_.Do("SET", "job", "plain", "PX", 5000);
  MustQueue("job", "bob", "1");
  EXPECT_EQ(client_.Do("PEXPIRE", "job", 60000), Reply::Int(1));
  EXPECT_EQ(client_.Do("DEL", "job"), Reply::Int(1));
  MustBeGranted("1", "job");
}

// A waiter waits for a name in a database, whatever is there.
TEST_F(NotifyTest, SwapdbServesWaitersOfDatabaseThatBecameFree) {
  const int64_t held = MustHold("job", "alice", "1");
  MustQueue("job", "bob", "2");
  EXPECT_EQ(client_.Do("SWAPDB", 0, 9), Reply::Ok());
  const int64_t token = MustBeGranted("2", "job");
  // Bindings move with their holds.
  client_.Do("SELECT", 9);
  EXPECT_EQ(HolderOf(client_, "job"), "alice");
  client_.Do("DEL", "job");
  EXPECT_EQ(notices_.Next(), LostNotice("1", held, "forced", "job"));
  client_.Do("SELECT", 0);
  EXPECT_EQ(client_.Do("SWAPDB", 0, 9), Reply::Ok());
  EXPECT_EQ(client_.Do("SWAPDB", 0, 9), Reply::Ok());
  client_.Do("LOCK.TOUCH", "job", "bob", "PX", 20);
  EXPECT_EQ(notices_.Next(), LostNotice("2", token, "expired", "job"));
  EXPECT_EQ(Published(), Texts{});
}

TEST_F(NotifyTest, DatabasesAreIndependent) {
  Client other = server().Connect();
  other.Do("SELECT", 5);
  MustAcquire(client_, "job", "alice");
  MustAcquire(other, "job", "alice");
  MustQueue("job", "bob", "0");
  EXPECT_EQ(other.Do(Notified("job", "bob", notices_, "5")), Reply::Int(0));
  EXPECT_EQ(other.Do("LOCK.RELEASE", "job", "alice"), Reply::Int(1));
  testing::MustBeGranted(other, notices_, "5", "job");
  EXPECT_EQ(LineOf(client_, "job"), Owners{"bob"});
  EXPECT_EQ(Published(), Texts{});
}

// What the server must not write, nobody is told of.
TEST_F(NotifyTest, NothingIsGrantedWhileWritesArePaused) {
  MustAcquire(client_, "job", "alice");
  MustQueue("job", "bob", "1");
  RawConnection raw = server().ConnectRaw();
  EXPECT_EQ(DoAtOnce(raw, {{"LOCK.TOUCH", "job", "alice", "PX", "1"},
                           {"CLIENT", "PAUSE", "60000", "WRITE"}}),
            (std::vector{Reply::Int(1), Reply::Ok()}));
  const int64_t end = ServerNow(client_) + 1;  // at the latest
  EXPECT_TRUE(Eventually([&] { return ServerNow(client_) > end + 100; }));
  EXPECT_FALSE(notices_.HasNext());
  EXPECT_EQ(client_.Do("CLIENT", "UNPAUSE"), Reply::Ok());
  MustBeGranted("1", "job");
}

// --- Counters ---------------------------------------------------------------------------------

TEST_F(NotifyTest, WaitsAreCountedLikeThoseOfBlockedClients) {
  MustAcquire(client_, "job", "alice");
  MustQueue("job", "bob", "1");
  MustQueue(Acquiring("job", "carol", Notifying(notices_.channel(), "2", 20)));
  EXPECT_EQ(notices_.Next(), "2 timeout job");
  Release("job", "alice");
  MustBeGranted("1", "job");
  for (const auto& [name, value] :
       {std::pair("acquired", "2"), std::pair("acquired_immediately", "1"),
        std::pair("acquired_after_wait", "1"), std::pair("waits", "2"),
        std::pair("wait_timeouts", "1"), std::pair("rejected", "0"), std::pair("released", "1"),
        std::pair("undelivered", "0")}) {
    EXPECT_EQ(Figure(name), value) << name;
  }
  EXPECT_GE(std::stoll(Figure("wait_max_ms")), 20);
  client_.Do("DEL", "job");
  EXPECT_EQ(Figure("forced"), "1");
}

}  // namespace
}  // namespace turnstile::testing
