// Keyspace events about locks: which ones, in which order, on which channels, and the reasons of
// losses.

#include "support/events.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <regex>
#include <string>
#include <vector>

#include "support/cluster.h"
#include "support/eventually.h"
#include "support/failover.h"
#include "support/lock_test.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

const Texts kLostExpired = {"job lock.lost", "job lock.lost.expired"};
const Texts kLostForced = {"job lock.lost", "job lock.lost.forced"};
const Texts kLostSession = {"job lock.lost", "job lock.lost.session"};

Texts operator+(Texts first, const Texts& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

class EventsTest : public SharedWaitingTest<EventsTest> {
 protected:
  EventsTest() { Listen("KEA"); }

  Reply Do(const Command& command) { return client_.Do(command); }
  void Listen(const std::string& classes) {
    EXPECT_EQ(Do({"CONFIG", "SET", "notify-keyspace-events", classes}), Reply::Ok());
  }
  // A log that has already received everything so far.
  std::unique_ptr<EventLog> NewLog() { return std::make_unique<EventLog>(server()); }
  // The events caused by the command.
  Texts EventsOf(const Command& command) {
    EventLog log(server());
    EXPECT_FALSE(Do(command).IsError());
    return log.Until(client_);
  }
};

TEST_F(EventsTest, AcquireTouchAndReleaseArePublished) {
  EXPECT_EQ(EventsOf({"LOCK.ACQUIRE", "job", "alice", "PX", "60000"}), Texts{"job lock.acquired"});
  EXPECT_EQ(EventsOf({"LOCK.ACQUIRE", "job", "bob", "PX", "60000"}), Texts{}) << "refused";
  EXPECT_EQ(EventsOf({"LOCK.ACQUIRE", "job", "alice", "PX", "50000"}), Texts{"job lock.touched"});
  EXPECT_EQ(EventsOf({"LOCK.TOUCH", "job", "alice", "PX", "60000"}), Texts{"job lock.touched"});
  EXPECT_EQ(EventsOf({"LOCK.TOUCH", "job", "bob", "PX", "60000"}), Texts{});
  EXPECT_EQ(EventsOf({"LOCK.RELEASE", "job", "bob"}), Texts{});
  EXPECT_EQ(EventsOf({"LOCK.RELEASE", "job", "alice"}), Texts{"job lock.released"});
  EXPECT_EQ(EventsOf({"LOCK.RELEASE", "job", "alice"}), Texts{});
}

TEST_F(EventsTest, ModesAndCountsPublishExpectedEvents) {
  EXPECT_EQ(EventsOf(Acquiring("job", "a", {"SHARED", "REENTRANT"})), Texts{"job lock.acquired"});
  EXPECT_EQ(EventsOf(Acquiring("job", "a", {"SHARED", "REENTRANT"})), Texts{"job lock.touched"});
  EXPECT_EQ(EventsOf({"LOCK.RELEASE", "job", "a"}), Texts{}) << "it still holds the lock";
  EXPECT_EQ(EventsOf(Acquiring("job", "b", {"SHARED"})), Texts{"job lock.acquired"});
  EXPECT_EQ(EventsOf({"LOCK.RELEASE", "job", "b"}), Texts{"job lock.released"});
  EXPECT_EQ(EventsOf(Acquiring("job", "a", {})), Texts{"job lock.acquired"}) << "an upgrade";
  EXPECT_EQ(EventsOf(Acquiring("job", "a", {"SHARED"})), Texts{"job lock.touched"});
  EXPECT_EQ(EventsOf({"LOCK.RELEASE", "job", "a", "ALSO", "1", "other"}),
            Texts{"job lock.released"});
  EXPECT_EQ(EventsOf(Acquiring("job", "a", {"ALSO", "2", "x", "y"})),
            (Texts{"job lock.acquired", "x lock.acquired", "y lock.acquired"}));
}

TEST_F(EventsTest, PublishesOnKeyspaceAndKeyeventChannels) {
  Client subscriber = server().Connect();
  EXPECT_TRUE(subscriber.Do("PSUBSCRIBE", "__key*@0__:*").IsArray());
  MustAcquire(client_, "job", "alice");
  EXPECT_EQ(subscriber.Read().Texts(),
            (Texts{"pmessage", "__key*@0__:*", "__keyspace@0__:job", "lock.acquired"}));
  EXPECT_EQ(subscriber.Read().Texts(),
            (Texts{"pmessage", "__key*@0__:*", "__keyevent@0__:lock.acquired", "job"}));
}

TEST_F(EventsTest, PublishesNothingUnlessClassIsEnabled) {
  for (const char* classes : {"", "KE", "KEg$lshzxet", "d"}) {
    Listen(classes);
    auto log = NewLog();
    MustAcquire(client_, "job", "alice");
    client_.Do("LOCK.TOUCH", "job", "alice", "PX", kMinute);
    client_.Do("LOCK.RELEASE", "job", "alice");
    MustAcquire(client_, "job", "alice");
    client_.Do("DEL", "job");
    MustAcquire(client_, "job", "alice");
    client_.Do("FLUSHALL");
    Texts events = log->Until(client_);
    std::erase(events, "job del");
    EXPECT_EQ(events, Texts{}) << classes;
  }
}

TEST_F(EventsTest, RevertedExpirePublishesNoLockEvent) {
  MustAcquire(client_, "job", "alice");
  EXPECT_EQ(EventsOf({"PERSIST", "job"}), Texts{"job persist"});
  EXPECT_EQ(EventsOf({"PEXPIRE", "job", "1000000"}), Texts{"job expire"});
}

TEST_F(EventsTest, HandOverPublishesReleaseThenAcquire) {
  MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob");
  auto log = NewLog();
  client_.Do("LOCK.RELEASE", "job", "alice");
  EXPECT_TRUE(bob.Read().IsInteger());
  EXPECT_EQ(log->Until(client_), (Texts{"job lock.released", "job lock.acquired"}));
}

// --- Losses -----------------------------------------------------------------------------------

// A command that removes a lock, and the events that the server itself publishes.
struct Removal {
  Command command;
  Texts before;
};

TEST_F(EventsTest, DeletedLockIsPublishedAsForced) {
  const std::vector<Removal> removals = {
      {{"DEL", "job"}, {"job del"}},
      {{"UNLINK", "job"}, {"job del"}},
      {{"RENAME", "job", "old"}, {"job rename_from", "old rename_to"}},
      {{"MOVE", "job", "1"}, {"job move_from"}},
      {{"SET", "job", "x"}, {"job set"}},
  };
  for (const auto& [command, before] : removals) {
    SCOPED_TRACE(command[0]);
    Do({"FLUSHALL"});
    MustAcquire(client_, "job", "alice");
    EXPECT_EQ(EventsOf(command), before + kLostForced);
  }
}

TEST_F(EventsTest, LockReplacedByRestoreIsPublishedAsForced) {
  MustAcquire(client_, "job", "alice");
  const std::string dump = Do({"DUMP", "job"}).text;
  EXPECT_EQ(EventsOf({"RESTORE", "job", "0", dump, "REPLACE"}), Texts{"job restore"} + kLostForced);
}

TEST_F(EventsTest, RemovalOfSeveralHoldersIsPublishedOnce) {
  MustObtain(client_, Acquiring("job", "a", {"SHARED"}));
  MustObtain(client_, Acquiring("job", "b", {"SHARED"}));
  EXPECT_EQ(EventsOf({"DEL", "job"}), Texts{"job del"} + kLostForced);
}

TEST_F(EventsTest, RemovalIsPublishedOnceEvenIfSomeHoldsHadEnded) {
  MustObtain(client_, Acquiring("job", "ended", {"SHARED"}, 5));
  MustObtain(client_, Acquiring("job", "live", {"SHARED"}));
  EXPECT_TRUE(Eventually([&] { return HoldersOf(client_, "job").size() == 1; }));
  Do({"CONFIG", "SET", "turnstile.reset-stats", "yes"});
  EXPECT_EQ(EventsOf({"DEL", "job"}), Texts{"job del"} + kLostForced);
  EXPECT_EQ(InfoField(client_, "turnstile", "turnstile_expired"), "1");
  EXPECT_EQ(InfoField(client_, "turnstile", "turnstile_forced"), "1");
}

TEST_F(EventsTest, LossIsPublishedBeforeNextEvent) {
  MustAcquire(client_, "job", "alice");
  auto log = NewLog();
  RawConnection raw = server().ConnectRaw();
  DoAtOnce(raw, {{"DEL", "job"}, {"LOCK.ACQUIRE", "job", "bob", "PX", "60000"}, {"DEL", "job"}});
  EXPECT_EQ(log->Until(client_), Texts{"job del"} + kLostForced + Texts{"job lock.acquired"} +
                                     Texts{"job del"} + kLostForced);
  // Also in a transaction.
  DoAtOnce(raw, {{"MULTI"},
                 {"LOCK.ACQUIRE", "job", "bob", "PX", "60000"},
                 {"DEL", "job"},
                 {"LOCK.ACQUIRE", "job", "carol", "PX", "60000"},
                 {"EXEC"}});
  EXPECT_EQ(log->Until(client_), Texts{"job lock.acquired"} + Texts{"job del"} + kLostForced +
                                     Texts{"job lock.acquired"});
}

TEST_F(EventsTest, ExpiryIsPublishedWhenLockIsRead) {
  auto log = NewLog();
  MustAcquire(client_, "job", "alice", 20);
  EXPECT_TRUE(Eventually([&] { return Do({"LOCK.FENCE", "job"}).IsNil(); }));
  EXPECT_EQ(log->Until(client_, 4),
            Texts{"job lock.acquired"} + Texts{"job expired"} + kLostExpired);
}

TEST_F(EventsTest, ExpiryIsPublishedWhenSomebodyWaits) {
  auto log = NewLog();
  MustAcquire(client_, "job", "alice", 20);
  EXPECT_TRUE(client_.Do(AcquireWaiting("job", "bob")).IsInteger());
  EXPECT_EQ(log->Until(client_), Texts{"job lock.acquired"} + Texts{"job expired"} + kLostExpired +
                                     Texts{"job lock.acquired"});
}

TEST_F(EventsTest, ExpiryIsPublishedWhenNobodyReadsLock) {
  auto log = NewLog();
  MustAcquire(client_, "job", "alice", 20);
  EXPECT_EQ(log->Until(client_, 4),
            Texts{"job lock.acquired"} + Texts{"job expired"} + kLostExpired);
}

// An ended hold among others is removed, and its event published, with the next change.
TEST_F(EventsTest, ExpiryOfOneOfSeveralHoldersIsPublished) {
  MustObtain(client_, Acquiring("job", "long", {"SHARED"}));
  MustObtain(client_, Acquiring("job", "short", {"SHARED"}, 20));
  EXPECT_TRUE(Eventually([&] { return HoldersOf(client_, "job").size() == 1; }));
  EXPECT_EQ(EventsOf({"LOCK.TOUCH", "job", "long", "PX", "60000"}),
            kLostExpired + Texts{"job lock.touched"});
  // Or when somebody waits for it.
  MustObtain(client_, Acquiring("job", "short", {"SHARED"}, 20));
  auto log = NewLog();
  Waiter writer(server(), "job", "writer");
  EXPECT_EQ(log->Until(client_, 2), kLostExpired);
}

TEST_F(EventsTest, LingeringHoldIsPublishedAsExpiredWhenLingerEnds) {
  MustObtain(client_, Acquiring("job", "alice", {"LINGER", "60000"}, 20));
  auto log = NewLog();
  EXPECT_TRUE(Eventually([&] { return Do({"LOCK.FENCE", "job"}).IsNil(); }));
  EXPECT_EQ(log->Until(client_), Texts{});
  EXPECT_EQ(Do({"LOCK.RELEASE", "job", "alice"}), Reply::Int(0));
  EXPECT_EQ(log->Until(client_), kLostExpired);
}

TEST_F(EventsTest, SessionEndIsPublishedOnce) {
  for (const Command& options : Commands{{"SESSION"}, {"SESSION", "LINGER", "60000"}}) {
    Waiter holder(server());
    MustObtain(holder, Acquiring("job", "alice", options));
    auto log = NewLog();
    holder.Close();
    EXPECT_EQ(log->Until(client_, 2), kLostSession);
    // Whatever ends the linger, the hold is not lost a second time.
    client_.Do("DEL", "job");
    Texts events = log->Until(client_);
    std::erase(events, "job del");
    EXPECT_EQ(events, Texts{});
  }
}

TEST_F(EventsTest, FlushedLocksArePublished) {
  for (const Command& flush :
       Commands{{"FLUSHALL"}, {"FLUSHDB"}, {"FLUSHALL", "ASYNC"}, {"FLUSHDB", "SYNC"}}) {
    SCOPED_TRACE(flush[0]);
    for (int i = 0; i < 3; i++) Do({"SET", "string:" + std::to_string(i), "x"});
    MustAcquire(client_, "job", "alice");
    MustObtain(client_, Acquiring("task", "b", {"SHARED"}));
    MustObtain(client_, Acquiring("task", "c", {"SHARED"}));
    Texts events = EventsOf(flush);
    std::sort(events.begin(), events.end());
    EXPECT_EQ(events, (Texts{"job lock.lost", "job lock.lost.flushed", "task lock.lost",
                             "task lock.lost.flushed"}));
  }
}

// Only in the flushed database, wherever its locks came from.
TEST_F(EventsTest, FlushIsPublishedOnlyInItsDatabase) {
  Client other = server().Connect();
  EXPECT_EQ(other.Do("SELECT", 3), Reply::Ok());
  EventLog log(server(), 3);
  MustAcquire(other, "acquired", "alice");
  MustAcquire(client_, "moved", "alice");
  EXPECT_EQ(client_.Do("MOVE", "moved", 3), Reply::Int(1));
  MustAcquire(client_, "job", "alice");
  EXPECT_EQ(other.Do("RESTORE", "restored", 0, Do({"DUMP", "job"}).text), Reply::Ok());
  log.Until(client_);
  auto zero = NewLog();
  EXPECT_EQ(client_.Do("FLUSHDB"), Reply::Ok());
  EXPECT_EQ(zero->Until(client_), (Texts{"job lock.lost", "job lock.lost.flushed"}));
  EXPECT_EQ(log.Until(client_), Texts{});
  EXPECT_EQ(other.Do("FLUSHDB"), Reply::Ok());
  EXPECT_EQ(log.Until(client_).size(), 6U);

  MustAcquire(client_, "job", "alice");
  EXPECT_EQ(client_.Do("SWAPDB", 0, 3), Reply::Ok());
  EXPECT_EQ(client_.Do("FLUSHDB"), Reply::Ok());
  log.Until(client_);
  EXPECT_EQ(other.Do("FLUSHDB"), Reply::Ok());
  EXPECT_EQ(log.Until(client_), (Texts{"job lock.lost", "job lock.lost.flushed"}));
}

TEST_F(EventsTest, EventsCarryBinaryKeys) {
  const std::string key("a\0\r\n\xff b", 7);
  EventLog log(server());
  MustAcquire(client_, key, "alice");
  client_.Do("DEL", key);
  EXPECT_EQ(log.Until(client_), (Texts{key + " lock.acquired", key + " del", key + " lock.lost",
                                       key + " lock.lost.forced"}));
}

// Subscribers may lack the permission to read the key, so no event names an owner.
TEST_F(EventsTest, EventsNeverNameOwners) {
  Client subscriber = server().Connect();
  EXPECT_TRUE(subscriber.Do("PSUBSCRIBE", "*").IsArray());
  MustAcquire(client_, "job", "the-owner");
  client_.Do("DEL", "job");
  client_.Do("PUBLISH", "end", "end");
  for (Texts message; message.empty() || message.back() != "end";) {
    message = subscriber.Read().Texts();
    ASSERT_EQ(message.size(), 4U);
    EXPECT_EQ(message.back().find("the-owner"), std::string::npos);
    EXPECT_EQ(message[2].find("the-owner"), std::string::npos);
  }
}

// --- Random histories -------------------------------------------------------------------------

// The events about a lock are consistent whatever happens to it: it is acquired, touched any number
// of times and then released or lost once before it is acquired again. The counters match the
// events.
TEST_F(EventsTest, RandomHistoriesPublishConsistentEvents) {
  constexpr uint64_t kSeed = 20261116;
  constexpr int kSteps = 4000;
  std::mt19937_64 random(kSeed);
  const auto below = [&](uint64_t bound) { return random() % bound; };
  const Texts keys = {"x", "y", "z"};
  const Texts owners = {"ann", "bob", "cat"};
  EXPECT_EQ(Do({"CONFIG", "SET", "turnstile.reset-stats", "yes"}), Reply::Ok());
  EventLog log(server());
  Texts events;
  std::vector<std::unique_ptr<Client>> connections;
  for (int step = 0; step < kSteps; step++) {
    const std::string& key = keys[below(keys.size())];
    const std::string& owner = owners[below(owners.size())];
    const std::string lease = below(3) == 0 ? std::to_string(1 + below(5)) : "60000";
    Command acquire = {"LOCK.ACQUIRE", key, owner, "PX", lease};
    if (below(4) == 0) acquire.insert(acquire.end(), {"LINGER", std::to_string(1 + below(5))});
    if (below(4) == 0) acquire.emplace_back("REENTRANT");
    switch (below(12)) {
      case 0:
      case 1:
        Do(acquire);
        break;
      case 2:  // and waits a while
        acquire.insert(acquire.end(), {"WAIT", std::to_string(1 + below(5))});
        Do(acquire);
        break;
      case 3:
        acquire.emplace_back("SESSION");
        connections.push_back(std::make_unique<Client>(server().Connect()));
        connections.back()->Do(acquire);
        if (connections.size() > 3) connections.erase(connections.begin());
        break;
      case 4:
        connections.push_back(std::make_unique<Client>(server().Connect()));
        acquire.insert(acquire.end(), {"WAIT", std::to_string(1 + below(20))});
        connections.back()->Send(acquire);  // whether or not anybody reads the reply
        if (connections.size() > 3) connections.erase(connections.begin());
        break;
      case 5:
      case 6:
      case 7:
        Do({"LOCK.RELEASE", key, owner});
        break;
      case 8:
        Do({"LOCK.TOUCH", key, owner, "PX", lease});
        break;
      case 9:
        Do({"DEL", key});
        break;
      case 10:
        Do(below(2) == 0 ? Command{"PERSIST", key} : Command{"PEXPIRE", key, "1"});
        break;
      default:
        if (below(20) == 0) Do({"FLUSHDB"});
    }
    if (step % 100 == 0) {
      const Texts more = log.Until(client_);
      events.insert(events.end(), more.begin(), more.end());
    }
  }
  connections.clear();
  EXPECT_TRUE(Eventually([&] { return WaitersNow(client_) == "0"; }));
  for (const std::string& key : keys) Do({"DEL", key});
  const Texts rest = log.Until(client_);
  events.insert(events.end(), rest.begin(), rest.end());

  std::map<std::string, int64_t> counts;
  for (const std::string& key : keys) {
    std::string story;  // one letter per lock event
    for (const std::string& event : events) {
      if (!event.starts_with(key + " lock.")) continue;
      const std::string what = event.substr(key.size() + 6);
      counts[what]++;
      story += what.starts_with("lost.") ? 'w' : what == "touched" ? 't' : what[0];
    }
    EXPECT_TRUE(std::regex_match(story, std::regex("(at*(r|lw))*"))) << key << ": " << story;
  }
  const auto counted = [&](const std::string& name) {
    return std::stoll(InfoField(client_, "turnstile", "turnstile_" + name));
  };
  EXPECT_EQ(counts["acquired"], counted("acquired"));
  EXPECT_EQ(counts["lost.expired"], counted("expired"));
  EXPECT_EQ(counts["lost.session"], counted("session_ended"));
  EXPECT_EQ(counts["lost.forced"] + counts["lost.flushed"], counted("forced"));
  EXPECT_EQ(counts["lost.undelivered"], counted("undelivered"));
  EXPECT_GT(counts["lost.expired"], 20);
  EXPECT_GT(counts["lost.session"], 20);
  EXPECT_GT(counts["lost.forced"], 20);
  EXPECT_GT(counts["lost.flushed"], 5);
}

// --- Eviction ---------------------------------------------------------------------------------

class LockEvictionTest : public SharedServerTest<LockEvictionTest> {
 protected:
  ~LockEvictionTest() override {
    client_.Do("CONFIG", "SET", "maxmemory", 0, "maxmemory-policy", "noeviction");
  }
};

TEST_F(LockEvictionTest, EvictedLocksArePublishedCountedAndLogged) {
  client_.Do("CONFIG", "SET", "notify-keyspace-events", "Ked");
  for (int i = 0; i < 3; i++) MustAcquire(client_, "job:" + std::to_string(i) + "\n", "alice");
  EventLog log(server());
  EXPECT_EQ(client_.Do("CONFIG", "SET", "maxmemory-policy", "allkeys-random", "maxmemory", 1),
            Reply::Ok());
  EXPECT_TRUE(Eventually([&] {
    client_.Do("SET", "x", "y");  // memory is checked before a command that may need more
    return client_.Do("DBSIZE") == Reply::Int(0);
  }));
  Texts events = log.Until(client_);
  std::sort(events.begin(), events.end());
  Texts expected;
  for (int i = 0; i < 3; i++) {
    const std::string key = "job:" + std::to_string(i) + "\n ";
    expected.insert(expected.end(),
                    {key + "evicted", key + "lock.lost", key + "lock.lost.evicted"});
  }
  EXPECT_EQ(events, expected);
  EXPECT_EQ(InfoField(client_, "turnstile", "turnstile_evicted"), "3");
  EXPECT_EQ(InfoField(client_, "turnstile", "turnstile_forced"), "0");

  const std::string text = server().Log();
  const std::string warning = "1 locks were lost by eviction";
  EXPECT_NE(text.find(warning), std::string::npos) << text;
  EXPECT_EQ(text.find("lost by eviction"), text.rfind("lost by eviction")) << "not for each";
  EXPECT_NE(text.find(R"(the last lock was "job:)"), std::string::npos) << text;
  EXPECT_NE(text.find(R"(\x0a")"), std::string::npos) << "never the bytes themselves";
}

// A string of the same name in another database is not the lock.
TEST_F(LockEvictionTest, EvictionOfSameKeyInOtherDatabaseIsIgnored) {
  Client other = server().Connect();
  EXPECT_EQ(other.Do("SELECT", 1), Reply::Ok());
  MustAcquire(other, "k", "alice");
  client_.Do("SET", "k", "a string");
  client_.Do("CONFIG", "SET", "turnstile.reset-stats", "yes");
  RawConnection raw = server().ConnectRaw();
  DoAtOnce(raw, {{"SELECT", "1"},
                 {"DEL", "k"},
                 {"CONFIG", "SET", "maxmemory-policy", "allkeys-random", "maxmemory", "1"}});
  EXPECT_TRUE(Eventually([&] { return client_.Do("DBSIZE") == Reply::Int(0); }));
  EXPECT_EQ(InfoField(client_, "turnstile", "turnstile_forced"), "1");
  EXPECT_EQ(InfoField(client_, "turnstile", "turnstile_evicted"), "0");
}

// --- Replicas ---------------------------------------------------------------------------------

class ReplicaEventsTest : public ::testing::Test {
 protected:
  ReplicaEventsTest() : log_(pair_.replica_server()) {
    EXPECT_EQ(pair_.replica().Do("CONFIG", "SET", "notify-keyspace-events", "KEA"), Reply::Ok());
  }

  // The lock events that the replica publishes while the primary does this.
  Texts EventsOf(const Commands& commands) {
    for (const Command& command : commands) EXPECT_FALSE(pair_.primary().Do(command).IsError());
    return Published();
  }
  Texts Published() {
    pair_.AwaitReplica();
    Texts events = log_.Until(pair_.replica());
    std::erase_if(events, [](const std::string& e) { return e.find(" lock.") == e.npos; });
    return events;
  }

  Pair pair_;
  EventLog log_;
};

TEST_F(ReplicaEventsTest, ReplicaPublishesSameEventsAsPrimary) {
  EXPECT_EQ(EventsOf({{"LOCK.ACQUIRE", "job", "alice", "PX", "60000"}}),
            Texts{"job lock.acquired"});
  EXPECT_EQ(EventsOf({{"LOCK.TOUCH", "job", "alice", "PX", "50000"}}), Texts{"job lock.touched"});
  EXPECT_EQ(EventsOf({{"PERSIST", "job"}}), Texts{});
  EXPECT_EQ(EventsOf({{"LOCK.RELEASE", "job", "alice"}}), Texts{"job lock.released"});
  EXPECT_EQ(
      EventsOf({Acquiring("job", "a", {"SHARED", "REENTRANT"}),
                Acquiring("job", "a", {"SHARED", "REENTRANT"}),
                Acquiring("job", "b", {"SHARED"}),
                {"LOCK.RELEASE", "job", "a"},
                {"LOCK.RELEASE", "job", "a"},
                {"DEL", "job"}}),
      (Texts{"job lock.acquired", "job lock.touched", "job lock.acquired", "job lock.released"} +
       kLostForced));
  EXPECT_EQ(EventsOf({{"LOCK.ACQUIRE", "job", "alice", "PX", "60000"}, {"FLUSHALL"}}),
            (Texts{"job lock.acquired", "job lock.lost", "job lock.lost.flushed"}));
}

TEST_F(ReplicaEventsTest, ReplicaPublishesExpiry) {
  EXPECT_EQ(EventsOf({{"LOCK.ACQUIRE", "job", "alice", "PX", "60000"}}),
            Texts{"job lock.acquired"});
  EXPECT_EQ(pair_.primary().Do("LOCK.TOUCH", "job", "alice", "PX", 20), Reply::Int(1));
  EXPECT_TRUE(Eventually([&] { return pair_.primary().Do("LOCK.FENCE", "job").IsNil(); }));
  EXPECT_EQ(Published(), Texts{"job lock.touched"} + kLostExpired);
  // That one of several holds has ended is told with the next change.
  EXPECT_EQ(
      EventsOf({Acquiring("job", "long", {"SHARED"}), Acquiring("job", "short", {"SHARED"}, 20)}),
      (Texts{"job lock.acquired", "job lock.acquired"}));
  EXPECT_TRUE(Eventually([&] { return HoldersOf(pair_.primary(), "job").size() == 1; }));
  EXPECT_EQ(EventsOf({{"LOCK.RELEASE", "job", "long"}}), kLostExpired + Texts{"job lock.released"});
}

TEST_F(ReplicaEventsTest, ReplicaPublishesSessionEnd) {
  for (const Command& options :
       Commands{{"SESSION"}, {"SESSION", "LINGER", "60000"}, {"SESSION", "SHARED"}}) {
    Client holder = pair_.primary_server().Connect();
    MustObtain(holder, Acquiring("job", "alice", options));
    EXPECT_EQ(Published(), Texts{"job lock.acquired"});
    holder.Close();
    EXPECT_TRUE(Eventually([&] { return pair_.primary().Do("LOCK.FENCE", "job").IsNil(); }));
    EXPECT_EQ(Published(), kLostSession);
    EXPECT_EQ(EventsOf({{"DEL", "job"}}), Texts{});
  }
}

// A full sync does not lose locks.
TEST_F(ReplicaEventsTest, FullSyncPublishesNothing) {
  EXPECT_EQ(EventsOf({{"LOCK.ACQUIRE", "job", "alice", "PX", "60000"}}),
            Texts{"job lock.acquired"});
  for (const char* dual : {"no", "yes"}) {
    for (Client* client : {&pair_.primary(), &pair_.replica()}) {  // if the server has this setting
      client->Do("CONFIG", "SET", "dual-channel-replication-enabled", dual);
      client->Do("CONFIG", "SET", "repl-diskless-sync", dual);
    }
    for (int round = 0; round < 4; round++) {
      pair_.Cut();
      EXPECT_EQ(pair_.primary().Do("DEBUG", "CHANGE-REPL-ID"), Reply::Ok());
      pair_.Rejoin();
      EXPECT_EQ(Published(), Texts{}) << dual;
    }
  }
  EXPECT_EQ(pair_.replica().Do("LOCK.INFO", "job").Field("mode"), Reply::Str("exclusive"));
}

// Whatever kind of sync is used, and whichever databases have locks.
TEST(SwapdbEventsTest, FlushesArePublishedInEveryDatabase) {
  Pair pair({"--repl-diskless-load", "swapdb", "--repl-diskless-sync", "yes"});
  for (Client* client : {&pair.primary(), &pair.replica()}) {
    EXPECT_EQ(client->Do("CONFIG", "SET", "notify-keyspace-events", "Kd"), Reply::Ok());
  }
  Client third = pair.primary_server().Connect();
  EXPECT_EQ(third.Do("SELECT", 3), Reply::Ok());
  MustAcquire(third, "job", "alice");
  pair.AwaitReplica();
  EventLog zero(pair.replica_server());
  EventLog three(pair.replica_server(), 3);
  pair.Cut();
  EXPECT_EQ(pair.primary().Do("DEBUG", "CHANGE-REPL-ID"), Reply::Ok());
  pair.Rejoin();
  pair.AwaitReplica();
  EXPECT_EQ(three.Until(pair.replica()), Texts{}) << "a copy loses nothing";
  EXPECT_EQ(third.Do("FLUSHDB"), Reply::Ok());
  pair.AwaitReplica();
  EXPECT_EQ(three.Until(pair.replica()), (Texts{"job lock.lost", "job lock.lost.flushed"}));
  EXPECT_EQ(zero.Until(pair.replica()), Texts{});
}

// A replica counts nothing: it only applies what its primary did.
TEST_F(ReplicaEventsTest, ReplicaCountsNothing) {
  EventsOf({{"LOCK.ACQUIRE", "job", "alice", "PX", "60000"},
            {"LOCK.TOUCH", "job", "alice", "PX", "60000"},
            {"LOCK.RELEASE", "job", "alice"},
            {"LOCK.ACQUIRE", "job", "alice", "PX", "60000"},
            {"DEL", "job"},
            {"LOCK.ACQUIRE", "job", "alice", "PX", "60000"},
            {"FLUSHALL"},
            {"LOCK.ACQUIRE", "job", "alice", "PX", "60000"}});
  for (const char* field :
       {"acquired", "touched", "released", "forced", "expired", "hold_max_ms"}) {
    EXPECT_EQ(InfoField(pair_.replica(), "turnstile", std::string("turnstile_") + field), "0")
        << field;
  }
  EXPECT_TRUE(Eventually([&] {  // flushed data may be freed later
    return InfoField(pair_.replica(), "turnstile", "turnstile_locks") == "1";
  }));
  EXPECT_EQ(InfoField(pair_.primary(), "turnstile", "turnstile_forced"), "2");
}

// --- Cluster ----------------------------------------------------------------------------------

TEST(ClusterEventsTest, MovedLockIsNotReportedAsLost) {
  Cluster cluster({.primaries = 2, .args = {"--notify-keyspace-events", "KEA"}});
  const std::string key = cluster.KeyOn(0);
  MustAcquire(cluster.client(0), key, "alice");
  EventLog log(cluster.server(0));
  EventLog target(cluster.server(1));
  const SlotMove move(cluster, cluster.SlotOf(key), 0, 1);
  move.Whole();
  EXPECT_EQ(cluster.client(1).Do("LOCK.FENCE", key).IsInteger(), true);
  for (const std::string& event : log.Until(cluster.client(0))) {
    EXPECT_EQ(event.find("lock.lost"), std::string::npos) << event;
  }
  EXPECT_EQ(InfoField(cluster.client(0), "turnstile", "turnstile_forced"), "0");
  EXPECT_EQ(cluster.client(1).Do("DEL", key), Reply::Int(1));
  const Texts events = target.Until(cluster.client(1));
  EXPECT_EQ(events.back(), key + " lock.lost.forced");
  // Moves another lock on the same node manually.
  const std::string stays = cluster.KeyOn(0);
  MustAcquire(cluster.client(0), stays, "alice");
  EXPECT_EQ(cluster.client(0).Do("DEL", stays), Reply::Int(1));
  EXPECT_EQ(log.Until(cluster.client(0)).back(), stays + " lock.lost.forced");
}

class ClusterLossTest : public ::testing::Test {
 protected:
  std::string Lost() {
    return InfoField(cluster_.client(0), "turnstile", "turnstile_forced") + " forced, " +
           InfoField(cluster_.client(0), "turnstile", "turnstile_expired") + " expired";
  }
  Cluster cluster_{{.primaries = 2, .args = {"--notify-keyspace-events", "Kd"}}};
  const std::string key_ = cluster_.KeyOn(0);
};

// A MIGRATE that was refused, or that ended long ago, hides no loss.
TEST_F(ClusterLossTest, LossAfterFailedMigrateIsReported) {
  Client& client = cluster_.client(0);
  EventLog log(cluster_.server(0));
  MustAcquire(client, key_, "alice", 20);
  EXPECT_TRUE(client.Do("MIGRATE", "x").IsError());
  EXPECT_EQ(log.Until(client, 3),
            (Texts{key_ + " lock.acquired", key_ + " lock.lost", key_ + " lock.lost.expired"}));
  MustAcquire(client, key_, "alice");
  EXPECT_TRUE(client.Do("MIGRATE", "x").IsError());
  EXPECT_EQ(client.Do("DEL", key_), Reply::Int(1));
  EXPECT_EQ(Lost(), "1 forced, 1 expired");
}

TEST_F(ClusterLossTest, LossOnImportingNodeIsReported) {
  const std::string key = cluster_.KeyOn(1);
  const SlotMove move(cluster_, cluster_.SlotOf(key), 1, 0);
  move.Begin();
  Client& client = cluster_.client(0);
  EXPECT_EQ(client.Do("ASKING"), Reply::Ok());
  MustAcquire(client, key, "alice");
  EXPECT_EQ(client.Do("ASKING"), Reply::Ok());
  EXPECT_EQ(client.Do("DEL", key), Reply::Int(1));
  EXPECT_EQ(Lost(), "1 forced, 0 expired");
  move.End();
}

// No notification class is enabled, but another module subscribes to all events, whichever module
// was loaded first. One that is loaded while there are locks is noticed within a second.
TEST(ModuleEventsTest, OtherModulesReceiveEvents) {
  const auto receives_both = [](Client& client) {
    const int64_t before = client.Do("FORWARD.EVENTS").integer;
    MustAcquire(client, "job", "alice");
    EXPECT_EQ(client.Do("LOCK.RELEASE", "job", "alice"), Reply::Int(1));
    return client.Do("FORWARD.EVENTS").integer == before + 2;
  };
  const auto expect_received = [&](Client& client) { EXPECT_TRUE(receives_both(client)); };
  Server first({.args = {"--loadmodule", TURNSTILE_FORWARDER_MODULE}});
  Client client = first.Connect();
  expect_received(client);

  Server server;
  client = server.Connect();
  MustAcquire(client, "held", "alice");
  EXPECT_EQ(client.Do("MODULE", "LOAD", TURNSTILE_FORWARDER_MODULE), Reply::Ok());
  EXPECT_TRUE(Eventually([&] { return receives_both(client); }));

  Server last({.args = {"--loadmodule", TURNSTILE_FORWARDER_MODULE}, .load_module = false});
  client = last.Connect();
  EXPECT_EQ(client.Do("MODULE", "LOAD", ModulePath()), Reply::Ok());
  expect_received(client);
}

TEST(ClusterRenamedCommandTest, LossIsReportedWhenClusterCommandIsRenamed) {
  Server server({.args = {"--cluster-enabled", "yes", "--rename-command", "CLUSTER", "XC"}});
  Client client = server.Connect();
  EXPECT_EQ(client.Do("XC", "ADDSLOTSRANGE", 0, 16383), Reply::Ok());
  EXPECT_TRUE(Eventually([&] { return !client.Do("EXISTS", "job").IsError(); }, kClusterPatience));
  MustAcquire(client, "job", "alice");
  EXPECT_EQ(client.Do("DEL", "job"), Reply::Int(1));
  EXPECT_EQ(InfoField(client, "turnstile", "turnstile_forced"), "1");
}

}  // namespace
}  // namespace turnstile::testing
