// Slots that move while their locks are held and waited for.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "support/client.h"
#include "support/cluster.h"
#include "support/events.h"
#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/reply.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

std::string MovedTo(const Cluster& cluster, int64_t slot, size_t node) {
  return "MOVED " + std::to_string(slot) + " " + cluster.AddressOf(node);
}

// What a client does when the old node redirects it with ASK.
Reply DoAsking(Client& client, const Command& command) {
  EXPECT_EQ(client.Do("ASKING"), Reply::Ok());
  return client.Do(command);
}

// Two nodes, a lock on the first, and its slot about to move to the second.
class SlotMoveTest : public ::testing::Test {
 protected:
  // A client that was redirected with ASK and waits on the importing node.
  Waiter WaitsThere(const char* owner) {
    Waiter waiter(cluster_.server(1));
    EXPECT_EQ(waiter.Do("ASKING"), Reply::Ok());
    waiter.Wait(key_, owner);
    return waiter;
  }

  Cluster cluster_{{.primaries = 2}};
  const std::string key_ = cluster_.KeyOn(0);
  const int64_t slot_ = cluster_.SlotOf(key_);
  const SlotMove move_{cluster_, slot_, 0, 1};
  Client& old_ = cluster_.client(0);
  Client& new_ = cluster_.client(1);
};

TEST_F(SlotMoveTest, HeldLockKeepsItsToken) {
  const int64_t token = MustAcquire(old_, key_, "alice");
  const Reply kept = Kept(old_, key_);
  move_.Whole();
  EXPECT_EQ(Kept(new_, key_), kept);
  EXPECT_EQ(old_.Do("LOCK.FENCE", key_), Reply::Error(MovedTo(cluster_, slot_, 1)));
  EXPECT_EQ(new_.Do("LOCK.ACQUIRE", key_, "bob", "PX", kMinute), Reply::Nil());
  EXPECT_EQ(MustAcquire(new_, key_, "alice"), token);
  EXPECT_EQ(new_.Do("LOCK.TOUCH", key_, "alice", "PX", kMinute), Reply::Int(1));
  EXPECT_EQ(new_.Do("LOCK.RELEASE", key_, "alice"), Reply::Int(1));
  EXPECT_GT(MustAcquire(new_, key_, "bob"), token);
}

TEST_F(SlotMoveTest, EveryKindOfHoldMoves) {
  MustObtain(old_, Acquiring(key_, "alice", {"SHARED", "LINGER", "1000"}));
  MustObtain(old_, Acquiring(key_, "bob", {"SHARED", "REENTRANT"}));
  MustObtain(old_, Acquiring(key_, "bob", {"SHARED", "REENTRANT"}));
  const std::string permits = key_ + "{" + key_ + "}";
  ASSERT_EQ(cluster_.SlotOf(permits), slot_);
  MustObtain(old_, Acquiring(permits, "alice", {"LIMIT", "2"}));
  MustObtain(old_, Acquiring(permits, "bob", {"LIMIT", "3", "WEIGHT", "2", "TAG", "heavy"}));
  MustObtain(old_, Acquiring(key_, "carol", {"SHARED", "MAXHOLD", "90000", "TAG", "x"}));
  const Reply shared = Kept(old_, key_);
  const Reply limited = Kept(old_, permits);
  move_.Whole();
  EXPECT_EQ(Kept(new_, key_), shared);
  EXPECT_EQ(Kept(new_, permits), limited);
  EXPECT_EQ(new_.Do("LOCK.ACQUIRE", permits, "carol", "PX", kMinute, "LIMIT", 3), Reply::Nil());
  EXPECT_EQ(HoldOf(new_, permits, "bob").Field("weight"), Reply::Int(2));
  EXPECT_EQ(HoldOf(new_, permits, "bob").Field("tag"), Reply::Str("heavy"));
  EXPECT_LE(HoldOf(new_, key_, "carol").Field("max-hold-left-ms").integer, 90000);
}

TEST_F(SlotMoveTest, WaitersGetTryAgainWhenTheirLockHasMoved) {
  const int64_t token = MustAcquire(old_, key_, "alice");
  Waiter bob(cluster_.server(0), key_, "bob");
  Waiter carol(cluster_.server(0), key_, "carol");
  move_.Begin();
  // The lock is still here, and so is its queue.
  EXPECT_EQ(LineOf(old_, key_), (std::vector<std::string>{"bob", "carol"}));
  EXPECT_FALSE(bob.HasReply());
  ASSERT_EQ(move_.MoveKeys(), 1);
  for (Waiter* waiter : {&bob, &carol}) {
    const Reply reply = waiter->Read();
    EXPECT_TRUE(reply.IsError("TRYAGAIN")) << reply;
  }
  EXPECT_EQ(WaitersNow(old_), "0");

  // They retry: the old node redirects them to the new one, where they wait until the slot has
  // moved and the lock is free.
  EXPECT_TRUE(old_.Do(AcquireWaiting(key_, "bob")).IsError("ASK"));
  Waiter bob_again = WaitsThere("bob");
  move_.End();
  Waiter carol_again(cluster_.server(1), key_, "carol");
  EXPECT_EQ(new_.Do("LOCK.RELEASE", key_, "alice"), Reply::Int(1));
  const Reply granted = bob_again.Read();
  EXPECT_GT(granted.integer, token) << granted;
  EXPECT_EQ(new_.Do("LOCK.RELEASE", key_, "bob"), Reply::Int(1));
  EXPECT_GT(carol_again.Read().integer, granted.integer);
}

TEST_F(SlotMoveTest, MigratingNodeGrantsNothingAfterRelease) {
  MustAcquire(old_, key_, "alice");
  Waiter bob(cluster_.server(0), key_, "bob");
  move_.Begin();
  EXPECT_EQ(old_.Do("LOCK.RELEASE", key_, "alice"), Reply::Int(1));
  const Reply reply = bob.Read();
  EXPECT_TRUE(reply.IsError("TRYAGAIN")) << reply;
  EXPECT_EQ(old_.Do("CLUSTER", "COUNTKEYSINSLOT", slot_), Reply::Int(0));
  EXPECT_TRUE(DoAsking(new_, AcquireWaiting(key_, "bob")).IsInteger());
}

TEST_F(SlotMoveTest, MigratingNodeGrantsNothingAfterLeaseEnds) {
  MustAcquire(old_, key_, "alice");
  Waiter bob(cluster_.server(0), key_, "bob");
  move_.Begin();
  EXPECT_EQ(old_.Do("LOCK.TOUCH", key_, "alice", "PX", 20), Reply::Int(1));
  const Reply reply = bob.Read();
  EXPECT_TRUE(reply.IsError("TRYAGAIN")) << reply;
  EXPECT_EQ(old_.Do("CLUSTER", "COUNTKEYSINSLOT", slot_), Reply::Int(0));
}

// If it were granted there, aborting the move on the old node first would leave two holders.
TEST_F(SlotMoveTest, ImportingNodeGrantsNothingToWaiters) {
  MustAcquire(old_, key_, "alice");
  move_.Begin();
  ASSERT_EQ(move_.MoveKeys(), 1);
  Waiter bob = WaitsThere("bob");
  EXPECT_EQ(DoAsking(new_, {"LOCK.RELEASE", key_, "alice"}), Reply::Int(1));
  const Reply reply = bob.Read();
  EXPECT_TRUE(reply.IsError("TRYAGAIN")) << reply;
  EXPECT_EQ(new_.Do("CLUSTER", "COUNTKEYSINSLOT", slot_), Reply::Int(0));
}

TEST_F(SlotMoveTest, WaitersOfMovedSlotAreRedirected) {
  MustAcquire(old_, key_, "alice");
  Waiter bob(cluster_.server(0), key_, "bob");
  Waiter carol(cluster_.server(0), key_, "carol");
  // Nobody moves the key or tells the old node: it learns it from the new one.
  ASSERT_EQ(new_.Do("CLUSTER", "SETSLOT", slot_, "IMPORTING", cluster_.id(0)), Reply::Ok());
  ASSERT_EQ(new_.Do("CLUSTER", "SETSLOT", slot_, "NODE", cluster_.id(1)), Reply::Ok());
  for (Waiter* waiter : {&bob, &carol}) {
    EXPECT_EQ(waiter->Read(kClusterPatience), Reply::Error(MovedTo(cluster_, slot_, 1)));
  }
}

TEST_F(SlotMoveTest, MoveAbortedBeforeKeysMovedChangesNothing) {
  const int64_t token = MustAcquire(old_, key_, "alice");
  const Reply kept = Kept(old_, key_);
  Waiter bob(cluster_.server(0), key_, "bob");
  move_.Begin();
  move_.Abort();
  EXPECT_EQ(Kept(old_, key_), kept);
  EXPECT_EQ(LineOf(old_, key_), std::vector<std::string>{"bob"});
  EXPECT_EQ(old_.Do("LOCK.RELEASE", key_, "alice"), Reply::Int(1));
  EXPECT_GT(bob.Read().integer, token);
}

// Once keys have moved a move cannot be aborted safely, whatever the type of key: the old node
// accepts them only when it owns the slot again. The way out is to finish the move, as redis-cli
// --cluster fix does, and to move the slot back.
TEST_F(SlotMoveTest, SlotCanBeMovedBack) {
  const int64_t token = MustAcquire(old_, key_, "alice");
  const Reply kept = Kept(old_, key_);
  Waiter bob(cluster_.server(0), key_, "bob");
  move_.Begin();
  ASSERT_EQ(move_.MoveKeys(), 1);
  EXPECT_TRUE(bob.Read().IsError("TRYAGAIN"));
  move_.End();
  Waiter carol(cluster_.server(1), key_, "carol");
  SlotMove(cluster_, slot_, 1, 0).Whole();
  EXPECT_TRUE(carol.Read().IsError("TRYAGAIN"));
  EXPECT_EQ(Kept(old_, key_), kept);
  EXPECT_EQ(MustAcquire(old_, key_, "alice"), token);
  Waiter bob_again(cluster_.server(0), key_, "bob");
  EXPECT_EQ(old_.Do("LOCK.RELEASE", key_, "alice"), Reply::Int(1));
  EXPECT_GT(bob_again.Read().integer, token);
}

// The node in between has granted nothing, and had no lock before.
TEST_F(SlotMoveTest, LockThatPassesThroughANodeIsNotLostThere) {
  const int64_t token = MustAcquire(old_, key_, "alice");
  move_.Whole();
  SlotMove(cluster_, slot_, 1, 0).Whole();
  EXPECT_EQ(old_.Do("LOCK.FENCE", key_), Reply::Int(token));
  EXPECT_EQ(InfoField(new_, "turnstile", "turnstile_forced"), "0");
}

TEST_F(SlotMoveTest, WaitersOfAbortedImportAreRedirectedBack) {
  MustAcquire(old_, key_, "alice");
  move_.Begin();
  ASSERT_EQ(move_.MoveKeys(), 1);
  Waiter bob = WaitsThere("bob");
  move_.Abort();
  EXPECT_EQ(bob.Read(), Reply::Error(MovedTo(cluster_, slot_, 0)));
}

TEST_F(SlotMoveTest, OtherSlotsAreNotAffected) {
  const std::string other = cluster_.KeyOn(0);
  MustAcquire(old_, key_, "alice");
  const int64_t token = MustAcquire(old_, other, "alice");
  Waiter bob(cluster_.server(0), other, "bob");
  move_.Whole();
  EXPECT_EQ(WaitingFor(old_, other), 1);
  EXPECT_EQ(old_.Do("LOCK.RELEASE", other, "alice"), Reply::Int(1));
  EXPECT_GT(bob.Read().integer, token);
}

// Many waiters that must leave must not stall the server: one look at the cluster state serves all.
TEST_F(SlotMoveTest, ManyWaitersAreRedirectedTogether) {
  MustAcquire(old_, key_, "alice");
  std::vector<Waiter> crowd;
  for (int i = 0; i < 200; i++) {
    crowd.emplace_back(cluster_.server(0));
    crowd.back().Send(AcquireWaiting(key_, "bob-" + std::to_string(i)));
  }
  EXPECT_TRUE(Eventually([&] { return WaitersNow(old_) == "200"; })) << WaitersNow(old_);
  move_.Begin();
  EXPECT_EQ(old_.Do("CONFIG", "RESETSTAT"), Reply::Ok());
  ASSERT_EQ(move_.MoveKeys(), 1);
  for (Waiter& waiter : crowd) EXPECT_TRUE(waiter.Read().IsError("TRYAGAIN"));
  const std::string calls = InfoField(old_, "commandstats", "cmdstat_cluster|nodes");
  ASSERT_TRUE(calls.starts_with("calls=")) << calls;
  EXPECT_LT(std::stoi(calls.substr(6)), 100) << calls;
}

// --- Tokens -----------------------------------------------------------------------------------

using std::chrono::seconds;

int64_t LeadOf(Client& client) {
  return std::stoll(InfoField(client, "turnstile", "turnstile_clock_lead_ms"));
}

// The number of messages of modules that a node has "sent" or "received".
int64_t ClockMessages(Client& client, const std::string& which) {
  const std::string info = client.Do("CLUSTER", "INFO").text;
  const std::string field = "cluster_stats_messages_module_" + which + ':';
  const size_t start = info.find(field);
  return start == std::string::npos ? 0 : std::stoll(info.substr(start + field.size()));
}

// How often the module has looked at the slots.
int64_t SlotChecks(Client& client) {
  const std::string calls = InfoField(client, "commandstats", "cmdstat_cluster|nodes");
  return calls.starts_with("calls=") ? std::stoll(calls.substr(6)) : 0;
}

// When the slot of a free lock moves, no key tells the new node which tokens were issued for it.
class SlotTokenTest : public ::testing::Test {
 protected:
  int64_t Token(Client& client) {
    const int64_t token = MustAcquire(client, key_, "alice");
    EXPECT_EQ(client.Do("LOCK.RELEASE", key_, "alice"), Reply::Int(1));
    return token;
  }
  int64_t TokenAsking(Client& client) {
    const Reply token = DoAsking(client, Acquiring(key_, "alice", {}));
    EXPECT_TRUE(token.IsInteger()) << token;
    EXPECT_EQ(DoAsking(client, {"LOCK.RELEASE", key_, "alice"}), Reply::Int(1));
    return token.integer;
  }
  // Simulates that so much time has passed on all nodes.
  void PassTime(seconds time) {
    passed_ += time;
    cluster_.clock(0).Set(passed_, cluster_.client(0));
    cluster_.clock(1).Set(passed_ - kBehind, cluster_.client(1));
  }

  // If a clock already leads, the margin is not sufficient: the new node needs the message with the
  // old node's clock reading, which takes a moment to arrive.
  void AwaitClockReading(size_t from, int64_t sent_before) {
    Client& sender = cluster_.client(from);
    EXPECT_TRUE(Eventually([&] {
      const int64_t sent = ClockMessages(sender, "sent");
      return (sent > sent_before || LeadOf(sender) == 0) &&
             ClockMessages(cluster_.client(1 - from), "received") >= sent;
    })) << "sent "
        << sent_before << ", then " << ClockMessages(sender, "sent") << ", received "
        << ClockMessages(cluster_.client(1 - from), "received") << ", lead " << LeadOf(sender)
        << InfoField(sender, "turnstile", "turnstile_subscriptions");
  }

  static constexpr seconds kBehind{5};  // of the new node's clock; less than the margin of 10 s
  seconds passed_{0};
  Cluster cluster_{
      {.primaries = 2, .args = {"--turnstile.token-margin-ms", "10000"}, .own_clocks = true}};
  const std::string key_ = cluster_.KeyOn(0);
  const int64_t slot_ = cluster_.SlotOf(key_);
};

TEST_F(SlotTokenTest, TokensRiseOnNodeWithClockBehind) {
  PassTime(seconds{60});  // the lead of the start is used up
  SlotMove there(cluster_, slot_, 0, 1);
  const int64_t first = Token(cluster_.client(0));
  there.Whole();
  EXPECT_GT(Token(cluster_.client(1)), first);
}

TEST_F(SlotTokenTest, TokensRiseDuringLongMove) {
  PassTime(seconds{60});
  SlotMove there(cluster_, slot_, 0, 1);
  MustObtain(cluster_.client(0), Acquiring(key_, "bob", {"SHARED"}, 10 * kMinute));
  there.Begin();
  PassTime(seconds{60});
  // The old node still grants locks whose keys have not moved, right before the same lock is
  // requested on the new node.
  const int64_t first = MustAcquire(cluster_.client(0), key_, "bob");
  EXPECT_EQ(cluster_.client(0).Do("LOCK.RELEASE", key_, "bob"), Reply::Int(1));
  EXPECT_GT(TokenAsking(cluster_.client(1)), first);
  there.End();
}

// The lock was free, so the new node could grant it as long as the move went on.
TEST_F(SlotTokenTest, TokensRiseWhenMoveIsAborted) {
  PassTime(seconds{60});
  const SlotMove there(cluster_, slot_, 0, 1);
  const int64_t last = Token(cluster_.client(0));
  there.Begin();
  PassTime(seconds{20});
  const int64_t sent = ClockMessages(cluster_.client(1), "sent");
  const int64_t next = TokenAsking(cluster_.client(1));
  EXPECT_GT(next, last);
  there.Abort();
  AwaitClockReading(1, sent);
  EXPECT_GT(Token(cluster_.client(0)), next);
}

TEST_F(SlotTokenTest, TokensRiseWhenSlotMovesThereAndBack) {
  PassTime(seconds{60});
  int64_t last = Token(cluster_.client(0));
  for (int round = 0; round < 10; round++) {
    for (const size_t from : {size_t{0}, size_t{1}}) {
      const int64_t sent = ClockMessages(cluster_.client(from), "sent");
      SlotMove(cluster_, slot_, from, 1 - from).Whole();
      cluster_.AwaitOk();
      AwaitClockReading(from, sent);
      const int64_t next = Token(cluster_.client(1 - from));
      EXPECT_GT(next, last);
      last = next;
    }
  }
  // And the lead stays bounded, however often the slot moves.
  EXPECT_LE(std::stoll(InfoField(cluster_.client(1), "turnstile", "turnstile_clock_lead_ms")),
            17000);
}

// --- Effects on nodes that are not involved ----------------------------------------------------

// If a clock led by more than the margin, a lossy failover would not be covered.
TEST(SlotBystanderTest, SlotExchangeDoesNotAdvanceOtherClocks) {
  Cluster cluster({.primaries = 3, .args = {"--turnstile.token-margin-ms", "1000"}});
  for (int64_t slot = 0; slot < 200; slot++) SlotMove(cluster, slot, 0, 1).Whole();
  for (size_t node = 0; node < 3; node++) EXPECT_LE(LeadOf(cluster.client(node)), 1100) << node;
}

// Refused commands have no effect, including those that the server refuses only after the module
// has seen them.
TEST(SlotBystanderTest, RefusedCommandsHaveNoEffect) {
  Cluster cluster({.primaries = 2, .args = {"--turnstile.token-margin-ms", "300"}});
  Client& client = cluster.client(0);
  ASSERT_EQ(client.Do("ACL", "SETUSER", "default", "off"), Reply::Ok());
  ASSERT_TRUE(Eventually([&] { return LeadOf(client) == 0; }));
  Client other_client = cluster.server(0).Connect();
  for (int i = 0; i < 50; i++) {
    for (const Command& command : {Command{"CLUSTER", "SETSLOT", "1", "IMPORTING", cluster.id(1)},
                                   {"CLUSTER", "ADDSLOTS", "1"},
                                   {"CLUSTER", "SETSLOT"},
                                   {"CLUSTER"},
                                   {"ASKING"}}) {
      EXPECT_TRUE(other_client.Do(command).IsError()) << command.back();
    }
  }
  for (const Command& command : {Command{"CLUSTER", "SETSLOT", "1", "IMPORTING", cluster.id(0)},
                                 {"CLUSTER", "SETSLOT", "nonsense", "NODE", cluster.id(0)},
                                 {"CLUSTER", "ADDSLOTS", "99999"}}) {
    EXPECT_TRUE(client.Do(command).IsError()) << command.back();
  }
  EXPECT_EQ(LeadOf(client), 0);
}

// Anybody can send what looks like a slot change, before the server authenticates the sender.
TEST(SlotBystanderTest, RefusedCommandsSendNoMessages) {
  Cluster cluster({.primaries = 2});
  Client& client = cluster.client(0);
  ASSERT_EQ(client.Do("ACL", "SETUSER", "default", "off"), Reply::Ok());
  Client other_client = cluster.server(0).Connect();
  MustAcquire(client, cluster.KeyOn(0), "alice");  // a node without locks sends nothing
  // An authorised change sends messages, so that they can be counted.
  const int64_t slot = cluster.SlotOf(cluster.KeyOn(0));
  EXPECT_EQ(client.Do("CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.id(1)), Reply::Ok());
  ASSERT_TRUE(Eventually([&] { return ClockMessages(client, "sent") > 0; }));
  // Whatever the grant and the change have to send is sent after one of the next checks.
  const int64_t checks = SlotChecks(client);
  ASSERT_TRUE(Eventually([&] { return SlotChecks(client) >= checks + 5; }));
  EXPECT_EQ(client.Do("CONFIG", "RESETSTAT"), Reply::Ok());
  const int64_t before = ClockMessages(client, "sent");
  const int64_t begin = ServerNow(client);
  for (int i = 0; i < 500; i++) {
    EXPECT_TRUE(other_client.Do("CLUSTER", "SETSLOT", "1", "NODE", cluster.id(1)).IsError());
  }
  EXPECT_LE(ClockMessages(client, "sent"), before);
  // All of that may have taken less time than there is between two checks.
  int64_t checked = 0;
  ASSERT_TRUE(Eventually([&] { return (checked = SlotChecks(client)) > 0; }));
  const int64_t took_ms = ServerNow(client) - begin;
  EXPECT_LE(checked, took_ms / 10 + 3) << "one check every ten milliseconds";
}

// Frequent real slot changes send a bounded number of messages.
TEST(SlotBystanderTest, FrequentSlotChangesSendFewMessages) {
  Cluster cluster({.primaries = 2});
  Client& client = cluster.client(0);
  const int64_t slot = cluster.SlotOf(cluster.KeyOn(0));
  const int64_t before = ClockMessages(client, "sent");
  const int64_t begin = ServerNow(client);
  for (int i = 0; i < 200; i++) {
    EXPECT_EQ(client.Do("CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.id(1)), Reply::Ok());
    EXPECT_EQ(client.Do("CLUSTER", "SETSLOT", slot, "STABLE"), Reply::Ok());
  }
  const int64_t took_ms = ServerNow(client) - begin;
  EXPECT_LE(ClockMessages(client, "sent") - before, took_ms / 50 + 2);
}

// A node with a wrong clock, or anybody with access to the bus, cannot push clocks far ahead.
TEST(SlotBystanderTest, ClockReadingsFarAheadAreIgnored) {
  Cluster cluster(
      {.primaries = 2, .args = {"--turnstile.token-margin-ms", "1000"}, .own_clocks = true});
  cluster.clock(1).Set(std::chrono::minutes{15}, cluster.client(1));
  ASSERT_TRUE(cluster.server(1).Restart());
  cluster.Reconnect(1);
  cluster.AwaitOk();
  const std::string key = cluster.KeyOn(1);
  SlotMove(cluster, cluster.SlotOf(key), 1, 0).Whole();
  cluster.AwaitOk();
  MustAcquire(cluster.client(0), key, "alice");
  EXPECT_LE(LeadOf(cluster.client(0)), 1000);
}

// A deleted lock is lost, whatever was refused just before.
TEST(SlotBystanderTest, LossAfterRefusedMigrateIsReported) {
  Cluster cluster({.primaries = 2, .args = {"--notify-keyspace-events", "Kd"}});
  const std::string key = cluster.KeyOn(0);
  Client& client = cluster.client(0);
  ASSERT_EQ(client.Do("ACL", "SETUSER", "eve", "on", "nopass", "~*", "+del", "+multi", "+exec"),
            Reply::Ok());
  const Command migrate = {"MIGRATE", "127.0.0.1", std::to_string(cluster.server(1).port()),
                           key,       "0",         "1000"};
  Client eve = cluster.server(0).Connect();
  ASSERT_EQ(eve.Do("AUTH", "eve", ""), Reply::Ok());
  EventLog log(cluster.server(0));
  for (const Commands& pipeline :
       {Commands{migrate, {"DEL", key}}, Commands{{"MULTI"}, migrate, {"EXEC"}, {"DEL", key}}}) {
    MustAcquire(client, key, "alice");
    for (const Command& command : pipeline) eve.Send(command);
    for (size_t i = 1; i < pipeline.size(); i++) eve.Read();
    EXPECT_EQ(eve.Read(), Reply::Int(1));
    const Texts events = log.Until(client);
    EXPECT_EQ(std::count(events.begin(), events.end(), key + " lock.lost"), 1);
  }
}

// Waiters are not told that the cluster is down merely because the module cannot query it.
TEST(SlotBystanderTest, WaitersStayWhenClusterCommandIsUnavailable) {
  Cluster cluster({.primaries = 2});
  const std::string key = cluster.KeyOn(0);
  Server& server = cluster.server(0);
  server.options().args.insert(server.options().args.end(), {"--rename-command", "CLUSTER", ""});
  ASSERT_TRUE(server.Restart());
  cluster.Reconnect(0);
  Client& client = cluster.client(0);
  int64_t token = 0;
  EXPECT_TRUE(Eventually(
      [&] {
        token = client.Do("LOCK.ACQUIRE", key, "alice", "PX", kMinute).integer;
        return token > 0;
      },
      kClusterPatience));
  Waiter bob(server, key, "bob");
  EXPECT_FALSE(bob.HasReply(Milliseconds{1500}));  // longer than the interval between two checks
  EXPECT_EQ(client.Do("LOCK.RELEASE", key, "alice"), Reply::Int(1));
  EXPECT_GT(bob.Read().integer, token);
}

}  // namespace
}  // namespace turnstile::testing
