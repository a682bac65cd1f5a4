// Failovers decided by sentinels: a primary that crashes, and one that is isolated and returns.

#include "support/sentinel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iostream>
#include <limits>
#include <string>
#include <vector>

#include "support/client.h"
#include "support/eventually.h"
#include "support/fleet.h"
#include "support/lock_test.h"
#include "support/ordeals.h"
#include "support/reply.h"
#include "support/server.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

// Waits until so many replicas have applied everything the primary has replicated so far.
void Settle(Client& primary, int replicas) {
  EXPECT_TRUE(primary.Do("INCR", "settled").IsInteger());
  EXPECT_EQ(primary.Do("WAIT", replicas, kPatience.count()), Reply::Int(replicas));
}

// Waits until sentinels have demoted this server, which still considers itself a primary.
void AwaitDemotion(const Server& server) {
  // They close its connections then, so each poll needs a new one.
  EXPECT_TRUE(Eventually(
      [&] {
        Client client = server.Connect();
        return RoleOf(client) == "slave" && LinkIsUp(client);
      },
      Milliseconds{30000}));
}

void ExpectSame(Client& primary, Client& replica) {
  std::vector<std::string> keys = primary.Do("KEYS", "*").Texts();
  std::sort(keys.begin(), keys.end());
  EXPECT_EQ(KeptOfAll(replica, keys), KeptOfAll(primary, keys));
}

// The reply to a waiter whose server crashed or was demoted, which tells a client to retry.
bool IsRetryable(const Reply& reply) {
  return reply.IsError("UNBLOCKED") || reply.IsError("DISCONNECTED:");
}

// Milliseconds between two times, at least 0: the first is when a poll noticed it.
int64_t Between(Clock::time_point from, Clock::time_point to) {
  return std::max<int64_t>(std::chrono::duration_cast<Milliseconds>(to - from).count(), 0);
}

// Replication promises only that a write which every promotable replica has acknowledged survives
// the failover. A grant that only the dead primary knew is lost, and another client may be granted
// the lock at once. So the workers enter only after WAIT has confirmed that both replicas know of
// the grant. One would not suffice, because a sentinel compares the replicas by the offsets that
// they last reported, and may prefer the one that lags. The workers confirm releases likewise,
// otherwise a failover could bring back what they have released. After the failover one replica is
// left, and a WAIT for one covers it.
TEST(SentinelTest, AcknowledgedGrantsSurviveCrashOfPrimary) {
  SentinelGroup group;
  Server& old = group.primary();
  Client client = old.Connect();
  const std::vector<std::string> standing = HoldOneOfEachKind(client);
  Settle(client, 2);
  const std::vector<Reply> before = KeptOfAll(client, standing);
  const int64_t standing_token = client.Do("LOCK.FENCE", standing.back()).integer;
  std::vector<Waiter> waiters;
  for (const char* owner : {"first", "second", "third"}) {
    waiters.emplace_back(old, standing.front(), owner);
  }
  Fleet fleet([&] { return group.PrimaryPort(); });
  fleet.ConfirmBy(2);
  using Mode = FleetJob::Mode;
  fleet.Start({{.lock = "a"},
               {.lock = "a"},
               {.lock = "a", .session = true},
               {.lock = "b"},
               {.lock = "b", .mode = Mode::kShared},
               {.lock = "b", .mode = Mode::kShared},
               {.lock = "c", .mode = Mode::kLimit},
               {.lock = "c", .mode = Mode::kLimit},
               {.lock = "c", .mode = Mode::kLimit}});
  ASSERT_TRUE(fleet.AllAdvance(3));

  group.Alert();
  old.Kill9();
  const auto died = Clock::now();
  for (Waiter& waiter : waiters) {
    const Reply reply = waiter.Read();
    EXPECT_TRUE(reply.IsError("DISCONNECTED:")) << reply;
  }
  Server* const promoted = group.AwaitPromotion();
  ASSERT_NE(promoted, nullptr);
  const auto promotion = Clock::now();
  fleet.ConfirmBy(1);
  client = promoted->Connect();
  EXPECT_EQ(KeptOfAll(client, standing), before);
  // It can grant at once, before the sentinels have informed all clients.
  const int64_t first_token = MustAcquire(client, "new", "me");
  const auto first = Clock::now();
  ASSERT_TRUE(group.AllAgreeOn(*promoted));

  ASSERT_TRUE(fleet.AllAdvance(3)) << "each goes on";
  int64_t highest_before = standing_token;
  int64_t lowest_after = first_token;
  auto first_grant = Clock::time_point::max();
  for (const Fleet::Grant& grant : fleet.grants()) {
    if (grant.port == old.port()) highest_before = std::max(highest_before, grant.token);
    if (grant.port != promoted->port()) continue;
    first_grant = std::min(first_grant, grant.when);
    // A grant that was requested before may be one of the old primary.
    if (!grant.asked_again) lowest_after = std::min(lowest_after, grant.token);
  }
  EXPECT_GT(lowest_after, highest_before);

  // The same owners retry in the same order.
  for (Waiter& waiter : waiters) waiter = Waiter(*promoted);
  const std::vector<std::string> owners = {"first", "second", "third"};
  for (size_t at = 0; at < owners.size(); ++at) waiters[at].Wait(standing.front(), owners[at]);
  EXPECT_EQ(LineOf(client, standing.front()), owners);
  EXPECT_EQ(client.Do("LOCK.RELEASE", standing.front(), "holder"), Reply::Int(1));
  for (size_t at = 0; at < owners.size(); ++at) {
    const Reply token = waiters[at].Read();
    EXPECT_TRUE(token.IsInteger()) << token;
    EXPECT_GT(token.integer, highest_before);
    EXPECT_EQ(client.Do("LOCK.RELEASE", standing.front(), owners[at]), Reply::Int(1));
  }

  // The old primary returns empty, as a primary. The sentinels demote it.
  ASSERT_TRUE(old.Restart());
  AwaitDemotion(old);
  EXPECT_TRUE(fleet.AllAdvance(1));
  fleet.Stop();
  Settle(client, 2);
  const auto expect_to_follow = [&](const Server& server) {
    Client replica = server.Connect();
    EXPECT_TRUE(replica.Do("LOCK.ACQUIRE", "a", "me", "PX", kMinute).IsError("READONLY"));
    ExpectSame(client, replica);
  };
  expect_to_follow(old);
  for (const Server& replica : group.replicas()) {
    if (&replica != promoted) expect_to_follow(replica);
  }

  ASSERT_TRUE(fleet.FirstInside(promoted->port()).has_value());
  const int64_t promoted_ms = Between(died, promotion);
  const int64_t direct_ms = Between(promotion, first);
  const int64_t grant_ms = Between(promotion, first_grant);
  const int64_t inside_ms = Between(promotion, *fleet.FirstInside(promoted->port()));
  RecordProperty("promotion_after_death_ms", std::to_string(promoted_ms));
  RecordProperty("direct_grant_after_promotion_ms", std::to_string(direct_ms));
  RecordProperty("fleet_grant_after_promotion_ms", std::to_string(grant_ms));
  RecordProperty("fleet_confirmed_after_promotion_ms", std::to_string(inside_ms));
  std::cout << "promoted " << promoted_ms << " ms after the primary's death; from there to the "
            << "first grant " << direct_ms << " ms, to the first of a client that asks a sentinel "
            << grant_ms << " ms, to the first that a replica confirms " << inside_ms << " ms\n";
  for (const auto& [error, times] : fleet.errors()) std::cout << error << " " << times << "  ";
  std::cout << fleet.grants().size() << " grants\n";
}

TEST(SentinelTest, IsolatedPrimaryIsDemotedWhenItReturns) {
  SentinelGroup group;
  Server& old = group.primary();
  Client client = old.Connect();
  const int64_t stale = MustAcquire(client, "job", "stale");
  const int64_t kept = MustAcquire(client, "kept", "keeper");
  Waiter heir(old, "job", "heir");
  Waiter patient(old, "kept", "patient");
  Settle(client, 2);
  // Both end while the primary is isolated.
  Waiter timed(old, "kept", "timed", {.wait_ms = 5000});
  EXPECT_EQ(client.Do("LOCK.TOUCH", "job", "stale", "PX", 4000), Reply::Int(1));
  const int64_t end = EndOf(client, "job");
  Settle(client, 2);
  EXPECT_FALSE(heir.HasReply());
  old.Pause();
  group.Alert();
  Server* const promoted = group.AwaitPromotion();
  ASSERT_NE(promoted, nullptr);

  Client next = promoted->Connect();
  const Reply rival = [&] {
    Client waiter = promoted->Connect();
    waiter.Send(AcquireWaiting("job", "rival"));
    return waiter.Read();
  }();
  ASSERT_TRUE(rival.IsInteger()) << rival;
  EXPECT_GT(rival.integer, stale);
  EXPECT_GT(EndOf(next, "job") - kMinute, end) << "not before the lease was over";
  const auto write = [&](const char* key, int64_t token, const char* value) {
    return next.Do("LOCK.FENCE", key, token, "THEN", "SET", "guarded", value);
  };
  EXPECT_TRUE(write("job", stale, "stale").IsError("FENCED"));
  EXPECT_EQ(next.Do("EXISTS", "guarded"), Reply::Int(0));
  EXPECT_EQ(write("job", rival.integer, "rival"), Reply::Ok());
  EXPECT_EQ(write("kept", kept, "keeper"), Reply::Ok()) << "who is still the holder";

  ASSERT_TRUE(group.AllAgreeOn(*promoted));
  for (Waiter* waiter : {&heir, &patient, &timed}) EXPECT_FALSE(waiter->HasReply());
  old.Continue();
  // It still considers itself a primary: for a while it may grant what has become free.
  constexpr Milliseconds kDemotion{30000};
  const Reply answer = heir.Read(kDemotion);
  EXPECT_TRUE(answer.IsInteger() || IsRetryable(answer)) << answer;
  if (answer.IsInteger()) {
    EXPECT_LT(answer.integer, rival.integer) << "so that an external store can detect it";
    EXPECT_TRUE(write("job", answer.integer, "heir").IsError("FENCED"));
  }
  const Reply sent_away = patient.Read(kDemotion);
  EXPECT_TRUE(IsRetryable(sent_away)) << sent_away;
  const Reply timed_out = timed.Read(kDemotion);
  EXPECT_TRUE(timed_out.IsNil() || IsRetryable(timed_out)) << timed_out;
  std::cout << "who waited for the lock that became free: " << answer
            << "\nfor the other: " << sent_away
            << "\nfor the other, with a short time-out: " << timed_out << '\n';

  AwaitDemotion(old);
  Client copy = old.Connect();
  EXPECT_TRUE(copy.Do("LOCK.ACQUIRE", "job", "heir", "PX", kMinute).IsError("READONLY"));
  Settle(next, 2);
  ExpectSame(next, copy);
  EXPECT_EQ(HoldersOf(copy, "job"), std::vector<std::string>{"rival"});
  EXPECT_EQ(copy.Do("GET", "guarded"), Reply::Str("keeper"));
  // The same owners continue where the locks are.
  Waiter again(*promoted, "job", "heir");
  EXPECT_EQ(next.Do("LOCK.RELEASE", "job", "rival"), Reply::Int(1));
  EXPECT_GT(again.Read().integer, rival.integer);
}

}  // namespace
}  // namespace turnstile::testing
