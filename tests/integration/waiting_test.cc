// LOCK.ACQUIRE … WAIT: the order of the queue, and what LOCK.INFO shows about it.

#include "support/waiting.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/resp3.h"

namespace turnstile::testing {
namespace {

using Owners = std::vector<std::string>;

class WaitingTest : public SharedWaitingTest<WaitingTest> {
 protected:
  Reply Release(std::string_view key, std::string_view owner) {
    return client_.Do("LOCK.RELEASE", key, owner);
  }
};

// --- Waiting ----------------------------------------------------------------------------------

TEST_F(WaitingTest, LeaseAndTokenAreFixedAtGrant) {
  const int64_t alice = MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob", {.lease_ms = 40000});
  // Tokens issued to others meanwhile are smaller than his.
  const int64_t other = MustAcquire(client_, "other", "alice");
  EXPECT_GT(other, alice);
  EXPECT_FALSE(bob.HasReply(Milliseconds{50}));
  const int64_t before = ServerNow(client_);
  EXPECT_EQ(Release("job", "alice"), Reply::Int(1));
  const Reply token = bob.Read();
  const int64_t after = ServerNow(client_);
  EXPECT_GT(token.integer, other) << token;
  EXPECT_GE(EndOf(client_, "job"), before + 40000);
  EXPECT_LE(EndOf(client_, "job"), after + 40000);
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job"), token);
  EXPECT_EQ(HolderOf(client_, "job"), "bob");
  EXPECT_EQ(WaitersNow(client_), "0");
  EXPECT_EQ(bob.Do("LOCK.RELEASE", "job", "bob"), Reply::Int(1));
}

TEST_F(WaitingTest, AnswersAtOnceIfWaitingIsNotNeeded) {
  EXPECT_TRUE(client_.Do(AcquireWaiting("job", "alice")).IsInteger()) << "it is free";
  const Reply token = client_.Do("LOCK.FENCE", "job");
  EXPECT_EQ(client_.Do(AcquireWaiting("job", "alice")), token) << "it is hers";
  EXPECT_EQ(client_.Do(AcquireWaiting("job", "bob", {.wait_ms = 0})), Reply::Nil()) << "one try";
  EXPECT_EQ(client_.Do("lock.acquire", "job", "bob", "wait", 0, "ex", 1), Reply::Nil());
  EXPECT_EQ(WaitersNow(client_), "0");
}

TEST_F(WaitingTest, DoesNotWaitInTransactionsAndScripts) {
  MustAcquire(client_, "job", "alice");
  const Command wait = AcquireWaiting("job", "bob");
  client_.Do("MULTI");
  EXPECT_EQ(client_.Do(wait), Reply::Queued());
  EXPECT_EQ(client_.Do("EXEC"), Reply::Array({Reply::Nil()}));

  const std::string call = "redis.call('LOCK.ACQUIRE', 'job', 'bob', 'PX', 1000, 'WAIT', 60000)";
  EXPECT_EQ(client_.Do("EVAL", "return " + call, 1, "job"), Reply::Nil());
  client_.Do(
      "FUNCTION", "LOAD", "REPLACE",
      "#!lua name=waits\nredis.register_function('try', function() return " + call + " end)");
  EXPECT_EQ(client_.Do("FCALL", "try", 1, "job"), Reply::Nil());
  EXPECT_EQ(WaitersNow(client_), "0");

  // Also if others wait, and if it is granted.
  Waiter carol(server(), "job", "carol");
  EXPECT_EQ(client_.Do("EVAL", "return " + call, 1, "job"), Reply::Nil());
  EXPECT_EQ(LineOf(client_, "job"), Owners{"carol"});
  carol.Close();
  ASSERT_TRUE(Eventually([&] { return WaitersNow(client_) == "0"; }));
  Release("job", "alice");
  EXPECT_TRUE(client_.Do("EVAL", "return " + call, 1, "job").IsInteger());
}

TEST_F(WaitingTest, AcceptsBinaryKeysAndOwners) {
  const std::string key("\0\r\n*3\xff", 6);
  const std::string owner = std::string("\r\n\0", 3) + std::string(253, '\xfe');
  MustAcquire(client_, key, "alice");
  Waiter waiter(server(), key, owner);
  EXPECT_EQ(LineOf(client_, key), Owners{owner});
  Release(key, "alice");
  EXPECT_TRUE(waiter.Read().IsInteger());
  EXPECT_EQ(HolderOf(client_, key), owner);
}

// --- Order ------------------------------------------------------------------------------------

TEST_F(WaitingTest, ThousandWaitersAreServedInOrder) {
  constexpr int kWaiters = 1000;
  int64_t last = MustAcquire(client_, "job", "alice");
  std::vector<Waiter> waiters;
  waiters.reserve(kWaiters);
  for (int i = 0; i < kWaiters; i++) waiters.emplace_back(server(), "job", std::to_string(i));
  EXPECT_EQ(WaitersNow(client_), "1000");
  EXPECT_EQ(Release("job", "alice"), Reply::Int(1));
  for (int i = 0; i < kWaiters; i++) {
    Waiter& now = waiters[static_cast<size_t>(i)];
    const Reply token = now.Read();
    ASSERT_GT(token.integer, last) << i << ": " << token;
    last = token.integer;
    ASSERT_EQ(WaitingFor(client_, "job"), kWaiters - 1 - i);
    ASSERT_EQ(now.Do("LOCK.RELEASE", "job", std::to_string(i)), Reply::Int(1));
  }
  EXPECT_EQ(client_.Do("LOCK.INFO", "job"), Reply::Nil());
}

// Commands sent right after the release, before the server could serve anybody.
TEST_F(WaitingTest, NobodyOvertakesQueueInPassOfRelease) {
  const Command release = {"LOCK.RELEASE", "job", "alice"};
  const Command acquire = {"LOCK.ACQUIRE", "job", "mallory", "PX", "60000"};
  const Command script = {"EVAL",
                          "return {redis.call('LOCK.RELEASE', KEYS[1], 'alice'), "
                          "redis.call('LOCK.ACQUIRE', KEYS[1], 'mallory', 'PX', 60000, 'WAIT', 9)}",
                          "1", "job"};
  struct Try {
    Commands commands;
    std::vector<Reply> replies;
  };
  const Reply released_only = Reply::Array({Reply::Int(1), Reply::Nil()});
  const std::vector<Try> tries = {
      {{release, acquire, acquire}, {Reply::Int(1), Reply::Nil(), Reply::Nil()}},
      {{release, AcquireWaiting("job", "mallory", {.wait_ms = 0})}, {Reply::Int(1), Reply::Nil()}},
      {{{"DEL", "job"}, acquire}, {Reply::Int(1), Reply::Nil()}},
      {{{"FLUSHALL"}, acquire}, {Reply::Ok(), Reply::Nil()}},
      {{{"MULTI"}, release, acquire, {"EXEC"}},
       {Reply::Ok(), Reply::Queued(), Reply::Queued(), released_only}},
      {{script}, {released_only}},
  };
  RawConnection mallory = server().ConnectRaw();
  for (const Try& attempt : tries) {
    SCOPED_TRACE(attempt.commands[0][0]);
    MustAcquire(client_, "job", "alice");
    Waiter bob(server(), "job", "bob");
    EXPECT_EQ(DoAtOnce(mallory, attempt.commands), attempt.replies);
    EXPECT_TRUE(bob.Read().IsInteger());
    EXPECT_EQ(HolderOf(client_, "job"), "bob");
    Release("job", "bob");
  }
}

TEST_F(WaitingTest, NewcomerEntersAtEndOfQueue) {
  MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob");
  Waiter carol(server(), "job", "carol");
  RawConnection mallory = server().ConnectRaw();
  SendAtOnce(mallory, {{"LOCK.RELEASE", "job", "alice"}, AcquireWaiting("job", "mallory")});
  EXPECT_EQ(mallory.ReadReply(), Reply::Int(1));
  EXPECT_TRUE(bob.Read().IsInteger());
  EXPECT_EQ(LineOf(client_, "job"), (Owners{"carol", "mallory"}));
  Release("job", "bob");
  EXPECT_TRUE(carol.Read().IsInteger());
  EXPECT_FALSE(mallory.Readable());
  Release("job", "carol");
  EXPECT_TRUE(mallory.ReadReply().IsInteger());
}

// The former holder is treated like any newcomer.
TEST_F(WaitingTest, FormerHolderEntersAtEndOfQueue) {
  MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob");
  RawConnection alice = server().ConnectRaw();
  SendAtOnce(alice, {{"LOCK.RELEASE", "job", "alice"},
                     {"LOCK.ACQUIRE", "job", "alice", "PX", "60000"},
                     AcquireWaiting("job", "alice")});
  EXPECT_EQ(ReadReplies(alice, 2), (std::vector{Reply::Int(1), Reply::Nil()}));
  EXPECT_TRUE(bob.Read().IsInteger());
  EXPECT_EQ(LineOf(client_, "job"), Owners{"alice"});
  Release("job", "bob");
  EXPECT_TRUE(alice.ReadReply().IsInteger());
}

// Clients that bypass the queue may win before the grant; then everybody waits for them.
TEST_F(WaitingTest, SetNxMayWinBeforeHandOver) {
  MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob");
  RawConnection plain = server().ConnectRaw();
  EXPECT_EQ(DoAtOnce(plain, {{"LOCK.RELEASE", "job", "alice"},
                             {"SET", "job", "plain", "NX", "PX", "60000"}}),
            (std::vector{Reply::Int(1), Reply::Ok()}));
  EXPECT_EQ(HolderOf(client_, "job"), "plain");
  EXPECT_FALSE(bob.HasReply());
  EXPECT_EQ(plain.Do("DEL", "job"), Reply::Int(1));
  EXPECT_TRUE(bob.Read().IsInteger());
}

TEST_F(WaitingTest, HolderCanReacquireAndTouchWhileOthersWait) {
  const int64_t token = MustAcquire(client_, "job", "alice", 3000);
  Waiter bob(server(), "job", "bob");
  EXPECT_EQ(MustAcquire(client_, "job", "alice"), token);
  EXPECT_EQ(client_.Do(AcquireWaiting("job", "alice")), Reply::Int(token));
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", "alice", "PX", kMinute), Reply::Int(1));
  EXPECT_FALSE(bob.HasReply(Milliseconds{3100})) << "the first lease would be over";
  EXPECT_EQ(LineOf(client_, "job"), Owners{"bob"});

  // A shorter lease takes effect too, set by a touch or by a call, without the server's own expiry.
  client_.Do("DEBUG", "SET-ACTIVE-EXPIRE", 0);
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", "alice", "PX", 1), Reply::Int(1));
  EXPECT_TRUE(bob.Read().IsInteger());
  Waiter carol(server(), "job", "carol");
  MustAcquire(client_, "job", "bob", 1);
  EXPECT_TRUE(carol.Read().IsInteger());
  client_.Do("DEBUG", "SET-ACTIVE-EXPIRE", 1);
}

TEST_F(WaitingTest, WaitingOwnerKeepsUsingItsOtherLocks) {
  MustAcquire(client_, "job", "alice");
  MustAcquire(client_, "mine", "bob");
  Waiter bob(server(), "job", "bob");
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", "bob", "PX", 1), Reply::Int(0)) << "not his yet";
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "mine", "bob", "PX", kMinute), Reply::Int(1));
  Waiter carol(server(), "mine", "carol");
  EXPECT_EQ(Release("mine", "bob"), Reply::Int(1));
  EXPECT_TRUE(carol.Read().IsInteger());
  EXPECT_EQ(LineOf(client_, "job"), Owners{"bob"});
  EXPECT_EQ(WaitersNow(client_), "1");
}

TEST_F(WaitingTest, EachDatabaseHasItsOwnQueues) {
  Client other = server().Connect();
  other.Do("SELECT", 9);
  MustAcquire(client_, "job", "alice");
  MustAcquire(other, "job", "alice");
  Waiter bob(server(), "job", "bob");
  Waiter carol(server(), {"SELECT", "9"});
  carol.Wait("job", "carol");
  EXPECT_EQ(LineOf(client_, "job"), Owners{"bob"});
  EXPECT_EQ(LineOf(other, "job"), Owners{"carol"});
  EXPECT_EQ(other.Do("LOCK.RELEASE", "job", "alice"), Reply::Int(1));
  EXPECT_TRUE(carol.Read().IsInteger());
  EXPECT_EQ(HolderOf(other, "job"), "carol");
  EXPECT_EQ(HolderOf(client_, "job"), "alice");
  EXPECT_FALSE(bob.HasReply());
}

// WATCH is triggered by grants, not by waiters that enter and leave.
TEST_F(WaitingTest, WatchIsTriggeredOnlyByGrants) {
  MustAcquire(client_, "job", "alice");
  Client watcher = server().Connect();
  watcher.Do("WATCH", "job");
  {
    Waiter bob(server(), "job", "bob");
    Waiter carol(server(), "job", "carol", {.wait_ms = 1});
    EXPECT_EQ(carol.Read(), Reply::Nil());
  }
  ASSERT_TRUE(Eventually([&] { return WaitersNow(client_) == "0"; }));
  watcher.Do("MULTI");
  EXPECT_EQ(watcher.Do("EXEC"), Reply::Array({}));

  Waiter bob(server(), "job", "bob");
  RawConnection raw = server().ConnectRaw();
  EXPECT_EQ(DoAtOnce(raw, {{"LOCK.RELEASE", "job", "alice"}, {"WATCH", "job"}}),
            (std::vector{Reply::Int(1), Reply::Ok()}));
  EXPECT_TRUE(bob.Read().IsInteger());
  EXPECT_EQ(DoAtOnce(raw, {{"MULTI"}, {"EXEC"}}), (std::vector{Reply::Ok(), Reply::Nil()}));
}

// --- The same owner twice ---------------------------------------------------------------------

TEST_F(WaitingTest, NewerCallTakesOverPosition) {
  MustAcquire(client_, "job", "alice");
  Waiter older(server(), "job", "bob", {.wait_ms = 2 * kMinute, .lease_ms = 1});
  Waiter carol(server(), "job", "carol");
  Waiter newer(server(), "job", "bob", {.lease_ms = 30000});
  EXPECT_EQ(older.Read(), Reply::Error("UNBLOCKED replaced by a newer call of the same owner"));
  EXPECT_EQ(LineOf(client_, "job"), (Owners{"bob", "carol"}));
  EXPECT_LE(client_.Do("LOCK.INFO", "job").Field("waiters").elements[0].Field("left-ms").integer,
            kMinute + 1);
  EXPECT_EQ(WaitersNow(client_), "2");
  EXPECT_EQ(older.Do("PING"), Reply::Status("PONG"));
  Release("job", "alice");
  EXPECT_TRUE(newer.Read().IsInteger());
  EXPECT_GT(client_.Do("PTTL", "job").integer, 20000) << "the newer call's lease";
  EXPECT_FALSE(carol.HasReply());
}

TEST_F(WaitingTest, LastOfManyNewerCallsTakesOver) {
  MustAcquire(client_, "job", "alice");
  std::vector<RawConnection> calls;
  for (int i = 0; i < 20; i++) calls.push_back(server().ConnectRaw());
  server().Pause();
  for (const RawConnection& call : calls) call.SendCommand(AcquireWaiting("job", "bob"));
  server().Continue();
  // Which of them came last is up to the server.
  ASSERT_TRUE(Eventually([&] {
    return std::count_if(calls.begin(), calls.end(), [](auto& c) { return c.Readable(); }) == 19;
  }));
  EXPECT_EQ(WaitersNow(client_), "1");
  Release("job", "alice");
  int granted = 0;
  for (RawConnection& call : calls) {
    const Reply reply = call.ReadReply();
    if (reply.IsInteger()) granted++;
    EXPECT_TRUE(reply.IsInteger() || reply.IsError("UNBLOCKED ")) << reply;
  }
  EXPECT_EQ(granted, 1);
}

TEST_F(WaitingTest, CallWithoutWaitDoesNotDisturbWaitingCall) {
  MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob");
  EXPECT_EQ(client_.Do("LOCK.ACQUIRE", "job", "bob", "PX", 1), Reply::Nil());
  EXPECT_EQ(client_.Do(AcquireWaiting("job", "bob", {.wait_ms = 0})), Reply::Nil());
  EXPECT_EQ(
      client_.Do("EVAL", "return redis.call('LOCK.ACQUIRE','job','bob','PX',1,'WAIT',9)", 1, "job"),
      Reply::Nil());
  EXPECT_EQ(LineOf(client_, "job"), Owners{"bob"});
  Release("job", "alice");
  EXPECT_TRUE(bob.Read().IsInteger());
}

TEST_F(WaitingTest, OwnerCanWaitInSeveralQueues) {
  MustAcquire(client_, "a", "alice");
  MustAcquire(client_, "b", "alice");
  Waiter first(server(), "a", "bob");
  Waiter second(server(), "b", "bob");
  Waiter third(server(), {"SELECT", "5"});
  Client other = server().Connect();
  other.Do("SELECT", 5);
  MustAcquire(other, "a", "alice");
  third.Wait("a", "bob");
  EXPECT_EQ(WaitersNow(client_), "3");
  Release("b", "alice");
  EXPECT_TRUE(second.Read().IsInteger());
  Release("a", "alice");
  EXPECT_TRUE(first.Read().IsInteger());
  EXPECT_FALSE(third.HasReply());
  other.Do("LOCK.RELEASE", "a", "alice");
  EXPECT_TRUE(third.Read().IsInteger());
}

// CLIENT UNBLOCK ends the older call in the same pass in which the newer one arrives, and its
// connection waits again at once. That wait must not be affected.
TEST_F(WaitingTest, UnblockOfSupersededCallDoesNotAffectNextWait) {
  MustAcquire(client_, "job", "alice");
  MustAcquire(client_, "task", "alice");
  for (int round = 0; round < 50; round++) {
    Waiter older(server(), "job", "bob");
    older.Send(AcquireWaiting("task", "carol"));  // runs when the first call has been answered
    RawConnection newer = server().ConnectRaw();
    RawConnection operator_ = server().ConnectRaw();
    for (RawConnection* connection : {&newer, &operator_}) {  // else it is read in a later pass
      connection->SendCommand({"PING"});
      connection->ReadReply();
    }
    server().Pause();
    newer.SendCommand(AcquireWaiting("job", "bob"));
    operator_.SendCommand({"CLIENT", "UNBLOCK", std::to_string(older.id())});
    server().Continue();
    const Reply unblocked = operator_.ReadReply();
    const Reply first = older.Read();
    ASSERT_TRUE(first.IsNil() || first.IsError("UNBLOCKED")) << first << " " << unblocked;
    AwaitBlocked(client_, older.id());
    ASSERT_EQ(LineOf(client_, "task"), Owners{"carol"}) << "round " << round;
    ASSERT_FALSE(older.HasReply()) << older.Read();
    ASSERT_EQ(LineOf(client_, "job"), Owners{"bob"});
    older.Close();
    newer.Close();
    ASSERT_TRUE(Eventually([&] { return WaitersNow(client_) == "0"; }));
  }
}

// --- LOCK.INFO --------------------------------------------------------------------------------

TEST_F(WaitingTest, InfoShowsQueue) {
  MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob", {.wait_ms = 50000});
  Waiter carol(server(), "job", "carol", {.wait_ms = 40000});
  ASSERT_TRUE(Eventually([&] {
    const Reply line = client_.Do("LOCK.INFO", "job").Field("waiters");
    return line.elements.size() == 2 && line.elements[1].Field("waited-ms").integer >= 30;
  }));
  for (const int version : {2, 3}) {
    RawConnection raw = server().ConnectRaw();
    raw.Hello(version);
    const auto map = [version](std::vector<Reply> fields) {
      return version == 3 ? Reply::Map(std::move(fields)) : Reply::Array(std::move(fields));
    };
    const Reply info = raw.Do("LOCK.INFO", "job");
    EXPECT_EQ(info.Field("mode"), Reply::Str("exclusive"));
    EXPECT_EQ(info.Field("waiting"), Reply::Int(2));
    const Reply line = info.Field("waiters");
    ASSERT_EQ(line.elements.size(), 2U) << info;
    const auto place = [&](const std::string& owner, int64_t waited, int64_t left, int64_t id) {
      return map({Reply::Str("owner"), Reply::Str(owner), Reply::Str("tag"), Reply::Nil(),
                  Reply::Str("mode"), Reply::Str("exclusive"), Reply::Str("waited-ms"),
                  Reply::Int(waited), Reply::Str("left-ms"), Reply::Int(left),
                  Reply::Str("client-id"), Reply::Int(id), Reply::Str("client-addr"),
                  Reply::Str(AddressOf(client_, id))});
    };
    std::vector<Reply> expected;
    for (const auto& [owner, wait_ms, id] :
         {std::tuple{"bob", 50000, bob.id()}, {"carol", 40000, carol.id()}}) {
      const Reply& shown = line.elements[expected.size()];
      const int64_t waited = shown.Field("waited-ms").integer;
      const int64_t left = shown.Field("left-ms").integer;
      EXPECT_GE(waited, 30);
      EXPECT_GE(waited + left, wait_ms);
      EXPECT_LE(waited + left, wait_ms + 1) << "a wait never ends too early";
      expected.push_back(place(owner, waited, left, id));
    }
    EXPECT_EQ(line, Reply::Array(expected));
  }
}

TEST_F(WaitingTest, InfoShowsFirst100Waiters) {
  MustAcquire(client_, "job", "alice");
  std::vector<Waiter> waiters;
  Owners owners;
  for (int i = 0; i < 150; i++) {
    waiters.emplace_back(server(), "job", std::to_string(i));
    if (i < 100) owners.push_back(std::to_string(i));
  }
  EXPECT_EQ(WaitingFor(client_, "job"), 150);
  EXPECT_EQ(LineOf(client_, "job"), owners);
  // A waiter in the middle leaves: the 101st appears.
  waiters[50].Close();
  ASSERT_TRUE(Eventually([&] { return WaitingFor(client_, "job") == 149; }));
  owners.erase(owners.begin() + 50);
  owners.emplace_back("100");
  EXPECT_EQ(LineOf(client_, "job"), owners);
}

TEST_F(WaitingTest, InfoShowsWaitersForPlainLock) {
  client_.Do("SET", "job", "alice");
  Waiter bob(server(), "job", "bob");
  const Reply info = client_.Do("LOCK.INFO", "job");
  EXPECT_EQ(info.Field("mode"), Reply::Str("plain"));
  EXPECT_EQ(info.Field("waiting"), Reply::Int(1));
  EXPECT_EQ(LineOf(client_, "job"), Owners{"bob"});
}

// There is no holder any more and no new one yet.
TEST_F(WaitingTest, InfoShowsNoHolderBetweenReleaseAndGrant) {
  MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob");
  RawConnection raw = server().ConnectRaw();
  const auto replies = DoAtOnce(raw, {{"LOCK.RELEASE", "job", "alice"}, {"LOCK.INFO", "job"}});
  EXPECT_EQ(replies[1].Field("holders"), Reply::Array({}));
  EXPECT_EQ(replies[1].Field("waiting"), Reply::Int(1));
  EXPECT_TRUE(bob.Read().IsInteger());
}

// --- Refused waits ----------------------------------------------------------------------------

TEST_F(WaitingTest, RefusesInvalidWaits) {
  MustAcquire(client_, "job", "alice");
  const std::string range =
      "ERR WAIT must be an integer from 0 to 315360000000 in plain "
      "digits, not ";
  for (const std::string value : {"-1", "+1", "1.5", "1e3", "01", " 1", "1 ", "", "0x10", "ms",
                                  "315360000001", "9223372036854775808", "99999999999999999999"}) {
    EXPECT_EQ(client_.Do("LOCK.ACQUIRE", "job", "bob", "PX", 1, "WAIT", value),
              Reply::Error(range + Quoted(value)));
  }
  for (const Command& command :
       Commands{{"LOCK.ACQUIRE", "job", "bob", "PX", "1", "WAIT"},
                {"LOCK.ACQUIRE", "job", "bob", "PX", "1", "WAIT", "1", "WAIT", "1"},
                {"LOCK.ACQUIRE", "job", "bob", "WAIT", "1"},
                {"LOCK.ACQUIRE", "job", "bob", "PX", "1", "WAIT", "1", "2"},
                {"LOCK.TOUCH", "job", "alice", "PX", "1", "WAIT", "1"},
                {"LOCK.RELEASE", "job", "alice", "WAIT", "1"}}) {
    const Reply reply = client_.Do(command);
    EXPECT_TRUE(reply.IsError("ERR ")) << reply;
  }
  EXPECT_EQ(WaitersNow(client_), "0");
  EXPECT_EQ(HolderOf(client_, "job"), "alice");
}

TEST_F(WaitingTest, AcceptsLongestWait) {
  MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob", {.wait_ms = 315360000000});
  Release("job", "alice");
  EXPECT_TRUE(bob.Read().IsInteger());
}

TEST_F(WaitingTest, MaxWaitersLimitsWaitingCalls) {
  EXPECT_EQ(client_.Do("CONFIG", "GET", "turnstile.max-waiters").elements[1], Reply::Str("5000"));
  EXPECT_EQ(client_.Do("CONFIG", "SET", "turnstile.max-waiters", 2), Reply::Ok());
  MustAcquire(client_, "job", "alice");
  MustAcquire(client_, "other", "alice");
  Waiter bob(server(), "job", "bob");
  Waiter carol(server(), "other", "carol");
  const Reply full = Reply::Error(
      "WAITLIMIT this server allows at most 2 waiting clients (turnstile.max-waiters): try again "
      "later");
  EXPECT_EQ(client_.Do(AcquireWaiting("job", "dave")), full);
  EXPECT_EQ(client_.Do(AcquireWaiting("other", "dave")), full);
  // Calls that need no new position are still served.
  EXPECT_EQ(client_.Do("LOCK.ACQUIRE", "job", "dave", "PX", 1), Reply::Nil());
  EXPECT_TRUE(client_.Do(AcquireWaiting("free", "dave")).IsInteger());
  Waiter again(server(), "job", "bob");
  EXPECT_TRUE(bob.Read().IsError("UNBLOCKED"));
  // A position becomes free.
  Release("job", "alice");
  EXPECT_TRUE(again.Read().IsInteger());
  Waiter dave(server(), "job", "dave");
  EXPECT_EQ(client_.Do("CONFIG", "SET", "turnstile.max-waiters", 0), Reply::Ok());
  EXPECT_TRUE(
      client_.Do(AcquireWaiting("job", "erin")).IsError("WAITLIMIT this server allows at most 0 "));
  Release("job", "bob");
  EXPECT_TRUE(dave.Read().IsInteger()) << "existing waiters stay";
  EXPECT_EQ(client_.Do("CONFIG", "SET", "turnstile.max-waiters", 5000), Reply::Ok());
}

}  // namespace
}  // namespace turnstile::testing
