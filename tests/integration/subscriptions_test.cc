// What the module subscribes to, and when. Others pay for every subscription, so there are none but
// one without locks; and nothing may be missed when locks come into use again.

#include <gtest/gtest.h>

#include <string>

#include "support/client.h"
#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/reply.h"
#include "support/server.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

std::string Subscriptions(Client& client) {
  return InfoField(client, "turnstile", "turnstile_subscriptions");
}

void AwaitSubscriptions(Client& client, const std::string& expected) {
  EXPECT_TRUE(Eventually([&] { return Subscriptions(client) == expected; }))
      << Subscriptions(client);
}

class SubscriptionsTest : public ::testing::Test {
 protected:
  // A clock that leads makes the server tell it to copies of the data.
  Server server_{{.args = {"--turnstile.token-margin-ms", "0"}}};
  Client client_ = server_.Connect();
};

TEST_F(SubscriptionsTest, ServerWithoutLocksHasOne) {
  AwaitSubscriptions(client_, "role");
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "alice"), Reply::Int(0));
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", "alice", "PX", 1000), Reply::Int(0));
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job"), Reply::Nil());
  EXPECT_EQ(client_.Do("SET", "string", "value", "PX", 60000), Reply::Ok());
  EXPECT_EQ(Subscriptions(client_), "role");
}

TEST_F(SubscriptionsTest, TheyFollowWhatIsThere) {
  MustAcquire(client_, "job", "alice");
  AwaitSubscriptions(client_, "role,copies,databases,keys");
  {
    Waiter bob(server_, "job", "bob");
    EXPECT_EQ(Subscriptions(client_), "role,passes,copies,databases,keys");
    EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "alice"), Reply::Int(1));
    EXPECT_TRUE(bob.Read().IsInteger());
  }
  AwaitSubscriptions(client_, "role,copies,databases,keys");
  {
    Client holder = server_.Connect();
    MustObtain(holder, Acquiring("session", "carol", {"SESSION"}));
    EXPECT_EQ(Subscriptions(client_), "role,connections,copies,databases,keys");
  }
  AwaitSubscriptions(client_, "role,copies,databases,keys");
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "bob"), Reply::Int(1));
  // What cannot be taken back stays.
  AwaitSubscriptions(client_, "role,keys");
}

TEST_F(SubscriptionsTest, LeadOfClockIsToldToCopiesWithoutLocks) {
  Server server({.args = {"--turnstile.token-margin-ms", "4000", "--appendonly", "yes",
                          "--aof-use-rdb-preamble", "no"}});
  Client client = server.Connect();
  MustAcquire(client, "job", "alice");
  EXPECT_EQ(client.Do("LOCK.RELEASE", "job", "alice"), Reply::Int(1));
  AwaitSubscriptions(client, "role,copies,keys");
  AwaitSubscriptions(client, "role,keys");
  EXPECT_EQ(InfoField(client, "turnstile", "turnstile_clock_lead_ms"), "0");
}

// Otherwise each save would count as a change that calls for the next one, as long as the clock
// leads.
TEST_F(SubscriptionsTest, SaveWhileClockLeadsIsNoChange) {
  Server server;
  Client client = server.Connect();
  MustAcquire(client, "job", "alice");
  EXPECT_EQ(client.Do("LOCK.RELEASE", "job", "alice"), Reply::Int(1));
  client.Do("BGSAVE");
  EXPECT_TRUE(Eventually(
      [&] { return InfoField(client, "persistence", "rdb_bgsave_in_progress") == "0"; }));
  EXPECT_NE(InfoField(client, "turnstile", "turnstile_clock_lead_ms"), "0");
  EXPECT_EQ(InfoField(client, "persistence", "rdb_changes_since_last_save"), "0");
}

// Each of these is reported by a subscription that was given up before.
TEST_F(SubscriptionsTest, NothingIsMissedWhenLocksAreUsedAgain) {
  for (int round = 1; round <= 2; round++) {
    SCOPED_TRACE(round);
    MustAcquire(client_, "job", "alice");
    EXPECT_EQ(client_.Do("PEXPIRE", "job", 1), Reply::Int(1));
    EXPECT_TRUE(Eventually([&] { return client_.Do("PTTL", "job").integer > 1000; }));

    EXPECT_EQ(client_.Do("SWAPDB", 0, 1), Reply::Ok());
    EXPECT_EQ(client_.Do("SWAPDB", 0, 1), Reply::Ok());
    EXPECT_EQ(client_.Do("RENAME", "job", "work"), Reply::Ok());
    EXPECT_EQ(client_.Do("PERSIST", "work"), Reply::Int(1));
    EXPECT_TRUE(Eventually([&] { return client_.Do("PTTL", "work").integer > 1000; }));
    {
      Client holder = server_.Connect();
      MustObtain(holder, Acquiring("session", "carol", {"SESSION"}));
    }
    EXPECT_TRUE(Eventually([&] { return client_.Do("EXISTS", "session") == Reply::Int(0); }));

    Waiter bob(server_, "work", "bob");
    EXPECT_EQ(client_.Do("FLUSHALL"), Reply::Ok());
    EXPECT_TRUE(bob.Read().IsInteger());
    EXPECT_EQ(client_.Do("LOCK.RELEASE", "work", "bob"), Reply::Int(1));
    AwaitSubscriptions(client_, "role,keys");
    EXPECT_EQ(InfoField(client_, "turnstile", "turnstile_session_ended"), std::to_string(round));
    EXPECT_EQ(InfoField(client_, "turnstile", "turnstile_forced"), std::to_string(round));
  }
}

// A consumer of what is replicated may have come while nothing was watched.
TEST_F(SubscriptionsTest, AofThatCameMeanwhileGetsTheNextLock) {
  MustAcquire(client_, "job", "alice");
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "alice"), Reply::Int(1));
  AwaitSubscriptions(client_, "role,keys");
  EXPECT_EQ(client_.Do("CONFIG", "SET", "appendonly", "yes"), Reply::Ok());
  EXPECT_TRUE(Eventually([&] {
    return InfoField(client_, "persistence", "aof_rewrite_in_progress") == "0" &&
           InfoField(client_, "persistence", "aof_rewrite_scheduled") == "0";
  }));
  MustAcquire(client_, "job", "bob");
  server_.Kill9();
  server_.options().args.insert(server_.options().args.end(), {"--appendonly", "yes"});
  ASSERT_TRUE(server_.Restart());
  client_ = server_.Connect();
  EXPECT_EQ(client_.Do("EXISTS", "job"), Reply::Int(1));
}

TEST_F(SubscriptionsTest, LoadedLocksAreWatched) {
  MustAcquire(client_, "job", "alice");
  EXPECT_TRUE(Eventually([&] { return client_.Do("SAVE") == Reply::Ok(); }));
  server_.Kill9();
  ASSERT_TRUE(server_.Restart());
  client_ = server_.Connect();
  AwaitSubscriptions(client_, "role,copies,databases,keys");
  EXPECT_EQ(client_.Do("PERSIST", "job"), Reply::Int(1));
  EXPECT_TRUE(Eventually([&] { return client_.Do("PTTL", "job").integer > 1000; }));
}

// A replica without the module is no trouble as long as no lock is taken.
TEST_F(SubscriptionsTest, ReplicaNeedsModuleOnlyFromFirstLockOn) {
  Server replica({.args = {"--replicaof", "127.0.0.1", std::to_string(server_.port()),
                           "--propagation-error-behavior", "panic"},
                  .load_module = false});
  Client copy = replica.Connect();
  EXPECT_TRUE(
      Eventually([&] { return InfoField(copy, "replication", "master_link_status") == "up"; }));
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "alice"), Reply::Int(0));
  EXPECT_TRUE(Eventually([&] { return !client_.Do("BGSAVE").IsError(); }));
  EXPECT_EQ(client_.Do("SET", "key", "value"), Reply::Ok());
  EXPECT_EQ(client_.Do("WAIT", 1, kPatience.count()), Reply::Int(1));
  EXPECT_EQ(copy.Do("GET", "key"), Reply::Str("value"));
}

}  // namespace
}  // namespace turnstile::testing
