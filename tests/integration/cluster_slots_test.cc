// Slots that move while locks in them are held and waited for.

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

// What a client does whom the old node sends to the new one with ASK.
Reply DoAsking(Client& client, const Command& command) {
  EXPECT_EQ(client.Do("ASKING"), Reply::Ok());
  return client.Do(command);
}

// Two nodes, a lock on the first, and its slot about to move to the second.
class SlotMoveTest : public ::testing::Test {
 protected:
  // One who was sent after the lock, with ASK, and waits for it where it arrives.
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

TEST_F(SlotMoveTest, AHeldLockStaysHeldUnderItsToken) {
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
  MustObtain(old_, Acquiring(permits, "bob", {"LIMIT", "2"}));
  const Reply shared = Kept(old_, key_);
  const Reply limited = Kept(old_, permits);
  move_.Whole();
  EXPECT_EQ(Kept(new_, key_), shared);
  EXPECT_EQ(Kept(new_, permits), limited);
  EXPECT_EQ(new_.Do("LOCK.ACQUIRE", permits, "carol", "PX", kMinute, "LIMIT", 2), Reply::Nil());
}

TEST_F(SlotMoveTest, WaitersAreToldWhenTheirLockHasGone) {
  const int64_t token = MustAcquire(old_, key_, "alice");
  Waiter bob(cluster_.server(0), key_, "bob");
  Waiter carol(cluster_.server(0), key_, "carol");
  move_.Begin();
  // The lock is still here, and so is its line.
  EXPECT_EQ(LineOf(old_, key_), (std::vector<std::string>{"bob", "carol"}));
  EXPECT_FALSE(bob.HasReply());
  ASSERT_EQ(move_.MoveKeys(), 1);
  for (Waiter* waiter : {&bob, &carol}) {
    const Reply reply = waiter->Read();
    EXPECT_TRUE(reply.IsError("TRYAGAIN")) << reply;
  }
  EXPECT_EQ(WaitersNow(old_), "0");

  // They ask again: the old node sends them to the new one, where they stand in line until the slot
  // has arrived and longer.
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

TEST_F(SlotMoveTest, NothingIsGrantedWhereTheSlotIsLeaving) {
  MustAcquire(old_, key_, "alice");
  Waiter bob(cluster_.server(0), key_, "bob");
  move_.Begin();
  EXPECT_EQ(old_.Do("LOCK.RELEASE", key_, "alice"), Reply::Int(1));
  const Reply reply = bob.Read();
  EXPECT_TRUE(reply.IsError("TRYAGAIN")) << reply;
  EXPECT_EQ(old_.Do("CLUSTER", "COUNTKEYSINSLOT", slot_), Reply::Int(0));
  EXPECT_TRUE(DoAsking(new_, AcquireWaiting(key_, "bob")).IsInteger());
}

TEST_F(SlotMoveTest, NorWhenALeaseEndsThere) {
  MustAcquire(old_, key_, "alice");
  Waiter bob(cluster_.server(0), key_, "bob");
  move_.Begin();
  EXPECT_EQ(old_.Do("LOCK.TOUCH", key_, "alice", "PX", 20), Reply::Int(1));
  const Reply reply = bob.Read();
  EXPECT_TRUE(reply.IsError("TRYAGAIN")) << reply;
  EXPECT_EQ(old_.Do("CLUSTER", "COUNTKEYSINSLOT", slot_), Reply::Int(0));
}

// Were it granted there, a move that is given up on the old node first would leave two holders.
TEST_F(SlotMoveTest, NorToWaitersWhereItIsArriving) {
  MustAcquire(old_, key_, "alice");
  move_.Begin();
  ASSERT_EQ(move_.MoveKeys(), 1);
  Waiter bob = WaitsThere("bob");
  EXPECT_EQ(DoAsking(new_, {"LOCK.RELEASE", key_, "alice"}), Reply::Int(1));
  const Reply reply = bob.Read();
  EXPECT_TRUE(reply.IsError("TRYAGAIN")) << reply;
  EXPECT_EQ(new_.Do("CLUSTER", "COUNTKEYSINSLOT", slot_), Reply::Int(0));
}

TEST_F(SlotMoveTest, WaitersOfASlotThatIsGoneAreSentAfterIt) {
  MustAcquire(old_, key_, "alice");
  Waiter bob(cluster_.server(0), key_, "bob");
  Waiter carol(cluster_.server(0), key_, "carol");
  // Nobody moves the key, and nobody tells the old node: it hears of it from the new one.
  ASSERT_EQ(new_.Do("CLUSTER", "SETSLOT", slot_, "IMPORTING", cluster_.id(0)), Reply::Ok());
  ASSERT_EQ(new_.Do("CLUSTER", "SETSLOT", slot_, "NODE", cluster_.id(1)), Reply::Ok());
  for (Waiter* waiter : {&bob, &carol}) {
    EXPECT_EQ(waiter->Read(kClusterPatience), Reply::Error(MovedTo(cluster_, slot_, 1)));
  }
}

TEST_F(SlotMoveTest, AbortedBeforeAKeyHasMoved) {
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

// Once keys have moved there is no safe way to give up, with any kind of key: the old node takes
// them back only when it serves the slot again. One finishes the move, as redis-cli --cluster fix
// does, and moves the slot back.
TEST_F(SlotMoveTest, FinishedAndMovedBack) {
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

TEST_F(SlotMoveTest, WaitersOfAnAbortedArrivalAreSentBack) {
  MustAcquire(old_, key_, "alice");
  move_.Begin();
  ASSERT_EQ(move_.MoveKeys(), 1);
  Waiter bob = WaitsThere("bob");
  move_.Abort();
  EXPECT_EQ(bob.Read(), Reply::Error(MovedTo(cluster_, slot_, 0)));
}

TEST_F(SlotMoveTest, OtherSlotsAreLeftAlone) {
  const std::string other = cluster_.KeyOn(0);
  MustAcquire(old_, key_, "alice");
  const int64_t token = MustAcquire(old_, other, "alice");
  Waiter bob(cluster_.server(0), other, "bob");
  move_.Whole();
  EXPECT_EQ(WaitingFor(old_, other), 1);
  EXPECT_EQ(old_.Do("LOCK.RELEASE", other, "alice"), Reply::Int(1));
  EXPECT_GT(bob.Read().integer, token);
}

// A crowd that has to go must not stop the server: one look at the cluster is enough for all.
TEST_F(SlotMoveTest, ManyWaitersAreToldTogether) {
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
  EXPECT_LT(std::stoi(calls.substr(6)), 20) << calls;
}

// --- Tokens -----------------------------------------------------------------------------------

using std::chrono::seconds;

// A lock that is free when its slot moves brings nothing along from which the new node could know
// what tokens it had.
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
  // As if so much time had passed for all.
  void PassTime(seconds time) {
    passed_ += time;
    cluster_.clock(0).Set(passed_, cluster_.client(0));
    cluster_.clock(1).Set(passed_ - kBehind, cluster_.client(1));
  }

  // Where one clock leads already, the margin is not enough: what counts is the message by which a
  // node tells where its clock stands. That takes a moment.
  void AwaitHeard(size_t node) {
    const auto last = [&](size_t of) {
      return std::stoll(InfoField(cluster_.client(of), "turnstile", "turnstile_last_token"));
    };
    EXPECT_TRUE(Eventually([&] { return last(node) >= last(1 - node); }));
  }

  static constexpr seconds kBehind{5};  // the new node's clock, less than the margin of 10 s
  seconds passed_{0};
  Cluster cluster_{
      {.primaries = 2, .args = {"--turnstile.token-margin-ms", "10000"}, .own_clocks = true}};
  const std::string key_ = cluster_.KeyOn(0);
  const int64_t slot_ = cluster_.SlotOf(key_);
};

TEST_F(SlotTokenTest, RiseWithTheSlotToANodeWhoseClockIsBehind) {
  PassTime(seconds{60});  // the lead of the start has melted away
  SlotMove there(cluster_, slot_, 0, 1);
  const int64_t first = Token(cluster_.client(0));
  there.Whole();
  EXPECT_GT(Token(cluster_.client(1)), first);
}

TEST_F(SlotTokenTest, RiseThroughALongMove) {
  PassTime(seconds{60});
  SlotMove there(cluster_, slot_, 0, 1);
  MustObtain(cluster_.client(0), Acquiring(key_, "bob", {"SHARED"}, 10 * kMinute));
  there.Begin();
  PassTime(seconds{60});
  // The old node still grants what concerns a lock that is there, just before somebody asks for
  // that lock on the new one.
  const int64_t first = MustAcquire(cluster_.client(0), key_, "bob");
  EXPECT_EQ(cluster_.client(0).Do("LOCK.RELEASE", key_, "bob"), Reply::Int(1));
  EXPECT_GT(TokenAsking(cluster_.client(1)), first);
  there.End();
}

// The lock was free, so it could be had on the new node for as long as the move went on.
TEST_F(SlotTokenTest, RiseWhenAMoveIsGivenUp) {
  PassTime(seconds{60});
  const SlotMove there(cluster_, slot_, 0, 1);
  const int64_t last = Token(cluster_.client(0));
  there.Begin();
  PassTime(seconds{20});
  const int64_t next = TokenAsking(cluster_.client(1));
  EXPECT_GT(next, last);
  there.Abort();
  AwaitHeard(0);
  EXPECT_GT(Token(cluster_.client(0)), next);
}

TEST_F(SlotTokenTest, RiseThereAndBackAgain) {
  PassTime(seconds{60});
  int64_t last = Token(cluster_.client(0));
  for (int round = 0; round < 10; round++) {
    for (const size_t from : {size_t{0}, size_t{1}}) {
      SlotMove(cluster_, slot_, from, 1 - from).Whole();
      cluster_.AwaitOk();
      AwaitHeard(1 - from);
      const int64_t next = Token(cluster_.client(1 - from));
      EXPECT_GT(next, last);
      last = next;
    }
  }
  // And the clock does not run away, however often a slot comes.
  EXPECT_LE(std::stoll(InfoField(cluster_.client(1), "turnstile", "turnstile_clock_lead_ms")),
            17000);
}

// --- The clock of those who have nothing to do with it -----------------------------------------

int64_t LeadOf(Client& client) {
  return std::stoll(InfoField(client, "turnstile", "turnstile_clock_lead_ms"));
}

// Were it to lead by more than the margin, a failover that loses writes would not be covered.
TEST(SlotBystanderTest, NodesThatExchangeSlotsPushNobodyAhead) {
  Cluster cluster({.primaries = 3, .args = {"--turnstile.token-margin-ms", "1000"}});
  for (int64_t slot = 0; slot < 200; slot++) SlotMove(cluster, slot, 0, 1).Whole();
  for (size_t node = 0; node < 3; node++) EXPECT_LE(LeadOf(cluster.client(node)), 1100) << node;
}

// What is refused has no effect; also what the server refuses only after we have seen it.
TEST(SlotBystanderTest, CommandsThatAreRefusedHaveNoEffect) {
  Cluster cluster({.primaries = 2, .args = {"--turnstile.token-margin-ms", "300"}});
  Client& client = cluster.client(0);
  ASSERT_EQ(client.Do("ACL", "SETUSER", "default", "off"), Reply::Ok());
  ASSERT_TRUE(Eventually([&] { return LeadOf(client) == 0; }));
  Client stranger = cluster.server(0).Connect();
  for (int i = 0; i < 50; i++) {
    for (const Command& command : {Command{"CLUSTER", "SETSLOT", "1", "IMPORTING", cluster.id(1)},
                                   {"CLUSTER", "ADDSLOTS", "1"},
                                   {"CLUSTER", "SETSLOT"},
                                   {"CLUSTER"},
                                   {"ASKING"}}) {
      EXPECT_TRUE(stranger.Do(command).IsError()) << command.back();
    }
  }
  for (const Command& command : {Command{"CLUSTER", "SETSLOT", "1", "IMPORTING", cluster.id(0)},
                                 {"CLUSTER", "SETSLOT", "nonsense", "NODE", cluster.id(0)},
                                 {"CLUSTER", "ADDSLOTS", "99999"}}) {
    EXPECT_TRUE(client.Do(command).IsError()) << command.back();
  }
  EXPECT_EQ(LeadOf(client), 0);
}

int64_t ClockMessagesSent(Client& client) {
  const std::string info = client.Do("CLUSTER", "INFO").text;
  const std::string field = "cluster_stats_messages_module_sent:";
  const size_t start = info.find(field);
  return start == std::string::npos ? 0 : std::stoll(info.substr(start + field.size()));
}

// Anybody can send what looks like a change of slots, before it is known who sends it.
TEST(SlotBystanderTest, CommandsThatAreRefusedMakeNoTraffic) {
  Cluster cluster({.primaries = 2});
  Client& client = cluster.client(0);
  ASSERT_EQ(client.Do("ACL", "SETUSER", "default", "off"), Reply::Ok());
  Client stranger = cluster.server(0).Connect();
  // One that has the right makes some, so that they can be counted.
  const int64_t slot = cluster.SlotOf(cluster.KeyOn(0));
  EXPECT_EQ(client.Do("CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.id(1)), Reply::Ok());
  ASSERT_TRUE(Eventually([&] { return ClockMessagesSent(client) > 0; }));
  EXPECT_EQ(client.Do("CONFIG", "RESETSTAT"), Reply::Ok());
  const int64_t before = ClockMessagesSent(client);
  const int64_t begin = ServerNow(client);
  for (int i = 0; i < 500; i++) {
    EXPECT_TRUE(stranger.Do("CLUSTER", "SETSLOT", "1", "NODE", cluster.id(1)).IsError());
  }
  const int64_t took_ms = ServerNow(client) - begin;
  EXPECT_LE(ClockMessagesSent(client), before);
  const std::string calls = InfoField(client, "commandstats", "cmdstat_cluster|nodes");
  ASSERT_TRUE(calls.starts_with("calls=")) << calls;
  EXPECT_LE(std::stoi(calls.substr(6)), took_ms / 10 + 3) << "a look every ten milliseconds";
}

// Slots that really change, in quick succession, make a bounded number of messages.
TEST(SlotBystanderTest, ChangesInQuickSuccessionMakeFewMessages) {
  Cluster cluster({.primaries = 2});
  Client& client = cluster.client(0);
  const int64_t slot = cluster.SlotOf(cluster.KeyOn(0));
  const int64_t before = ClockMessagesSent(client);
  const int64_t begin = ServerNow(client);
  for (int i = 0; i < 200; i++) {
    EXPECT_EQ(client.Do("CLUSTER", "SETSLOT", slot, "MIGRATING", cluster.id(1)), Reply::Ok());
    EXPECT_EQ(client.Do("CLUSTER", "SETSLOT", slot, "STABLE"), Reply::Ok());
  }
  const int64_t took_ms = ServerNow(client) - begin;
  EXPECT_LE(ClockMessagesSent(client) - before, took_ms / 50 + 2);
}

// A node whose clock is wrong, or whoever can speak on the bus, pushes nobody far ahead.
TEST(SlotBystanderTest, ReadingsFarAheadAreNotBelieved) {
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

// A lock that is deleted is lost, whatever was refused just before.
TEST(SlotBystanderTest, RefusedMigrateHidesNoLoss) {
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

// Nobody is told that the cluster is down only because we cannot ask.
TEST(SlotBystanderTest, WithoutTheCommandClusterNobodyIsSentAway) {
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
  EXPECT_FALSE(bob.HasReply(Milliseconds{1500}));  // longer than from one look to the next
  EXPECT_EQ(client.Do("LOCK.RELEASE", key, "alice"), Reply::Int(1));
  EXPECT_GT(bob.Read().integer, token);
}

}  // namespace
}  // namespace turnstile::testing
