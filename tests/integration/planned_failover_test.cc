// FAILOVER: a planned handover from a primary to its replica. The primary stops writing, waits
// until the replica has everything and steps down. No hold may be lost, and none granted in
// between.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <iostream>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "support/client.h"
#include "support/eventually.h"
#include "support/fleet.h"
#include "support/lock_test.h"
#include "support/ordeals.h"
#include "support/reply.h"
#include "support/resp3.h"
#include "support/server.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

// Through files, because a diskless sync completes only with the replica's next acknowledgement, up
// to a second later.
ServerOptions Options(std::vector<std::string> args = {}) {
  args.insert(args.end(), {"--repl-diskless-sync", "no"});
  return {.args = args};
}

class PlannedFailoverTest : public ::testing::Test {
 protected:
  PlannedFailoverTest() { AwaitSync(copy()); }

  Server& primary() { return *servers_.at(primary_); }
  Server& replica() { return *servers_.at(1 - primary_); }
  Client& client() { return clients_.at(primary_); }    // of the primary
  Client& copy() { return clients_.at(1 - primary_); }  // of the replica

  void Settle() {
    EXPECT_TRUE(client().Do("INCR", "settled").IsInteger());
    EXPECT_EQ(client().Do("WAIT", 1, kPatience.count()), Reply::Int(1));
  }

  Command FailoverTo(const Server& server, const Command& more = {}) {
    Command command = {"FAILOVER", "TO", "127.0.0.1", std::to_string(server.port())};
    command.insert(command.end(), more.begin(), more.end());
    return command;
  }

  // Waits until the two have swapped roles; then primary() and replica() are swapped, too.
  void AwaitSwap() {
    EXPECT_TRUE(Eventually(
        [&] {
          return RoleOf(copy()) == "master" && RoleOf(client()) == "slave" && LinkIsUp(client());
        },
        Milliseconds{30000}));
    primary_ = 1 - primary_;
  }

  // The replica is stopped, so that the failover cannot proceed, and the lease of "ending" ends
  // soon after it has begun. (In one write, otherwise the lease might end before.)
  void BeginWithTheReplicaPaused(const Command& failover) {
    replica().Pause();
    RawConnection raw = primary().ConnectRaw();
    EXPECT_EQ(DoAtOnce(raw, {{"LOCK.TOUCH", "ending", "alice", "PX", "50"}, failover}),
              (std::vector<Reply>{Reply::Int(1), Reply::Ok()}));
  }

  std::vector<std::string> Keys() {
    std::vector<std::string> keys = client().Do("KEYS", "*").Texts();
    std::sort(keys.begin(), keys.end());
    return keys;
  }

  void ExpectSame() {
    Settle();
    EXPECT_EQ(KeptOfAll(copy(), Keys()), KeptOfAll(client(), Keys()));
  }

 private:
  Server first_{Options()};
  Server second_{Options({"--replicaof", "127.0.0.1", std::to_string(first_.port())})};
  std::array<Server*, 2> servers_{&first_, &second_};
  std::array<Client, 2> clients_{first_.Connect(), second_.Connect()};
  size_t primary_ = 0;
};

// --- Repeated failovers --------------------------------------------------------------------------

// A waiter for a lock whose lease ends at about the time when the failover begins.
struct Heir {
  int64_t lease_ms;  // of the previous holder
  std::string key;
  std::string owner;
  std::optional<Waiter> waiter;
};

// Clients do not use WAIT here: FAILOVER alone must ensure that the new primary has every grant
// that a client received.
TEST_F(PlannedFailoverTest, NoGrantIsLostInRepeatedFailovers) {
  Fleet fleet([ports = std::array{primary().port(), replica().port()}] {
    for (const int port : ports) {
      Client client(port);
      if (RoleOf(client) == "master") return port;
    }
    return 0;
  });
  using Mode = FleetJob::Mode;
  fleet.Start({{.lock = "a"},
               {.lock = "a"},
               {.lock = "a"},
               {.lock = "b"},
               {.lock = "b", .mode = Mode::kShared},
               {.lock = "b", .mode = Mode::kShared},
               {.lock = "c", .mode = Mode::kLimit},
               {.lock = "c", .mode = Mode::kLimit},
               {.lock = "c", .mode = Mode::kLimit},
               {.lock = "d", .session = true},
               {.lock = "d", .session = true}});
  // A round takes about a second, because replicas report their offset once a second.
  constexpr int kRounds = 10;
  int granted_before = 0;
  int granted_untold = 0;
  std::vector<int64_t> last_tokens(4, 0);
  for (int round = 0; round < kRounds; ++round) {
    SCOPED_TRACE("failover " + std::to_string(round + 1));
    Client holder = primary().Connect();
    const std::vector<std::string> standing = HoldOneOfEachKind(holder);
    Waiter patient(primary(), standing[0], "patient");
    Waiter reader(primary());
    reader.Wait(Acquiring(standing[0], "reader", {"SHARED", "WAIT", "60000"}));
    Client timed = primary().Connect();
    timed.Send(AcquireWaiting(standing[0], "timed", {.wait_ms = 20 + 15 * round}));
    std::vector<Heir> heirs;
    for (const int64_t lease_ms : {20, 21, 22, 24}) {
      Heir& heir = heirs.emplace_back();
      heir.lease_ms = lease_ms;
      heir.key = "ending" + std::to_string(lease_ms);
      heir.owner = "heir" + std::to_string(round);
      MustAcquire(client(), heir.key, "leaves");
      heir.waiter.emplace(primary(), heir.key, heir.owner);
    }
    const std::vector<Reply> before = KeptOfAll(client(), standing);
    Commands begin;
    for (const Heir& heir : heirs) {
      begin.push_back({"LOCK.TOUCH", heir.key, "leaves", "PX", std::to_string(heir.lease_ms)});
    }
    // In some rounds it begins before all leases end, in others right after the first has ended.
    const Command failover = round % 3 == 0 ? Command{"FAILOVER"} : FailoverTo(replica());
    const bool after_the_first = round % 3 != 1;
    if (!after_the_first) begin.push_back(failover);
    RawConnection raw = primary().ConnectRaw();
    const std::vector<Reply> begun = DoAtOnce(raw, begin);
    if (after_the_first) {
      ASSERT_TRUE(heirs[0].waiter->HasReply(kPatience));
      EXPECT_EQ(raw.Do(failover), Reply::Ok());
    } else {
      EXPECT_EQ(begun.back(), Reply::Ok());
    }

    const Reply timed_out = timed.Read();
    EXPECT_TRUE(timed_out.IsNil() || timed_out.IsError("UNBLOCKED")) << timed_out;
    for (Waiter* waiter : {&patient, &reader}) {
      const Reply sent_away = waiter->Read();
      EXPECT_TRUE(sent_away.IsError("UNBLOCKED")) << sent_away;
    }
    std::vector<Reply> answers;
    for (Heir& heir : heirs) {
      answers.push_back(heir.waiter->Read());
      EXPECT_TRUE(answers.back().IsInteger() || answers.back().IsError("UNBLOCKED"))
          << heir.key << ": " << answers.back();
    }
    AwaitSwap();
    EXPECT_EQ(KeptOfAll(client(), standing), before);
    EXPECT_EQ(KeptOfAll(copy(), standing), before);
    for (size_t at = 0; at < heirs.size(); ++at) {
      const Heir& heir = heirs[at];
      // The lock is held by the owner that received a token. One that did not may hold it too, and
      // gets it by reacquiring.
      const Reply found = client().Do("LOCK.FENCE", heir.key);
      if (answers[at].IsInteger()) {
        EXPECT_EQ(found, answers[at]) << heir.key;
        ++granted_before;
      } else if (found.IsInteger() && HolderOf(client(), heir.key) == heir.owner) {
        ++granted_untold;
      }
      Client retry = primary().Connect();
      retry.Send(AcquireWaiting(heir.key, heir.owner));
      const Reply token = retry.Read();
      ASSERT_TRUE(token.IsInteger()) << heir.key << ": " << token;
      if (answers[at].IsInteger()) {
        EXPECT_EQ(token, answers[at]);
      }
      EXPECT_GT(token.integer, last_tokens[at]);
      last_tokens[at] = token.integer;
      EXPECT_EQ(client().Do("LOCK.RELEASE", heir.key, heir.owner), Reply::Int(1));
    }
    ASSERT_TRUE(fleet.AllAdvance(1)) << "each goes on";
    // The session was dropped: what was bound to this connection is an ordinary hold now.
    holder.Close();
    EXPECT_TRUE(client().Do("LOCK.FENCE", "standing:session").IsInteger());
  }
  fleet.Stop();
  ExpectSame();
  std::cout << fleet.grants().size() << " grants; of " << 4 * kRounds
            << " locks whose lease ended at a failover " << granted_before
            << " were handed over before it, " << granted_untold << " without telling; errors: ";
  for (const auto& [error, times] : fleet.errors()) std::cout << error << " " << times << "  ";
  std::cout << '\n';
}

// --- During the failover -------------------------------------------------------------------------

TEST_F(PlannedFailoverTest, LeaseEndingDuringFailoverIsHandedOverByNewPrimary) {
  MustAcquire(client(), "ending", "alice");
  const int64_t token = MustAcquire(client(), "kept", "keeper");
  Waiter heir(primary(), "ending", "heir");
  Waiter patient(primary(), "kept", "patient");
  Client timed = primary().Connect();
  timed.Send(AcquireWaiting("kept", "timed", {.wait_ms = 300}));
  const std::vector<Reply> before = KeptOfAll(client(), {"kept"});
  Settle();
  BeginWithTheReplicaPaused(FailoverTo(replica()));
  EXPECT_EQ(timed.Read(), Reply::Nil()) << "time-outs go on";
  EXPECT_TRUE(Eventually([&] { return HoldersOf(client(), "ending").empty(); }));
  EXPECT_FALSE(heir.HasReply(Milliseconds{50}));
  EXPECT_EQ(LineOf(client(), "ending"), std::vector<std::string>{"heir"});

  replica().Continue();
  for (Waiter* waiter : {&heir, &patient}) {
    const Reply sent_away = waiter->Read();
    EXPECT_TRUE(sent_away.IsError("UNBLOCKED")) << sent_away;
  }
  AwaitSwap();
  EXPECT_EQ(HoldersOf(client(), "ending"), std::vector<std::string>{}) << "granted to nobody";
  EXPECT_EQ(KeptOfAll(client(), {"kept"}), before);
  EXPECT_GT(MustAcquire(client(), "ending", "heir"), token);
  Waiter again(primary(), "kept", "patient");
  EXPECT_EQ(client().Do("LOCK.RELEASE", "kept", "keeper"), Reply::Int(1));
  EXPECT_GT(again.Read().integer, token);
  ExpectSame();
}

TEST_F(PlannedFailoverTest, AbortedFailoverServesWaiters) {
  for (const Command& failover : {Command{"FAILOVER"}, FailoverTo(replica())}) {
    MustAcquire(client(), "ending", "alice");
    const int64_t token = MustAcquire(client(), "kept", "keeper");
    Waiter heir(primary(), "ending", "heir");
    Waiter next(primary(), "ending", "next");
    Waiter patient(primary(), "kept", "patient");
    Client timed = primary().Connect();
    timed.Send(AcquireWaiting("kept", "timed", {.wait_ms = 300}));
    Settle();
    BeginWithTheReplicaPaused(failover);
    EXPECT_EQ(timed.Read(), Reply::Nil());
    EXPECT_TRUE(Eventually([&] { return HoldersOf(client(), "ending").empty(); }));
    EXPECT_FALSE(heir.HasReply(Milliseconds{50}));
    // Postponed by the server until it may write.
    Client late = primary().Connect();
    late.Send("LOCK.RELEASE", "kept", "keeper");
    EXPECT_FALSE(late.HasReply(Milliseconds{50}));
    EXPECT_EQ(HolderOf(client(), "kept"), "keeper");

    EXPECT_EQ(client().Do("FAILOVER", "ABORT"), Reply::Ok());
    EXPECT_GT(heir.Read().integer, token);
    EXPECT_EQ(late.Read(), Reply::Int(1));
    EXPECT_GT(patient.Read().integer, token);
    EXPECT_FALSE(next.HasReply());
    EXPECT_EQ(client().Do("LOCK.RELEASE", "ending", "heir"), Reply::Int(1));
    EXPECT_GT(next.Read().integer, token);
    EXPECT_EQ(RoleOf(client()), "master");
    replica().Continue();
    ExpectSame();
    EXPECT_EQ(client().Do("LOCK.RELEASE", "ending", "next"), Reply::Int(1));
    EXPECT_EQ(client().Do("LOCK.RELEASE", "kept", "patient"), Reply::Int(1));
  }
}

TEST_F(PlannedFailoverTest, TimedOutFailoverServesWaiters) {
  constexpr int64_t kTimeOut = 500;
  const int64_t token = MustAcquire(client(), "ending", "alice");
  Waiter heir(primary(), "ending", "heir");
  Settle();
  const int64_t start = ServerNow(client());
  BeginWithTheReplicaPaused({"FAILOVER", "TIMEOUT", std::to_string(kTimeOut)});
  EXPECT_GT(heir.Read().integer, token);
  EXPECT_GE(EndOf(client(), "ending") - kMinute, start + kTimeOut) << "not during the failover";
  EXPECT_EQ(RoleOf(client()), "master");
  replica().Continue();
  ExpectSame();
}

// A primary that has stepped down although the replica has not answered yet: the failover can still
// fail. Redis unblocks waiters when it steps down; Valkey 9 when the replica has taken over.
class ForcedFailoverTest : public PlannedFailoverTest {
 protected:
  void Force() {
    BeginWithTheReplicaPaused(FailoverTo(replica(), {"TIMEOUT", "300", "FORCE"}));
    ASSERT_TRUE(Eventually([&] { return RoleOf(client()) == "slave"; }));
    EXPECT_TRUE(client().Do("LOCK.ACQUIRE", "new", "me", "PX", kMinute).IsError("READONLY"));
  }
};

// Writes that the replica did not receive may be lost; those that it acknowledged are not.
TEST_F(ForcedFailoverTest, KeepsWhatReplicaAcknowledged) {
  MustAcquire(client(), "ending", "alice");
  Client holder = primary().Connect();
  const std::vector<std::string> standing = HoldOneOfEachKind(holder);
  Waiter heir(primary(), "ending", "heir");
  Waiter patient(primary(), standing[0], "patient");
  Client timed = primary().Connect();
  timed.Send(AcquireWaiting(standing[0], "timed", {.wait_ms = 1000}));
  Settle();
  const std::vector<Reply> before = KeptOfAll(client(), standing);
  const int64_t last_token = std::stoll(InfoField(client(), "turnstile", "turnstile_last_token"));
  Force();
  const Reply timed_out = timed.Read();
  EXPECT_TRUE(timed_out.IsNil() || timed_out.IsError("UNBLOCKED")) << timed_out;
  replica().Continue();
  for (Waiter* waiter : {&heir, &patient}) {
    const Reply sent_away = waiter->Read();
    EXPECT_TRUE(sent_away.IsError("UNBLOCKED")) << sent_away;
  }
  AwaitSwap();
  EXPECT_EQ(KeptOfAll(client(), standing), before);
  // Whether it received the end of this lease is open.
  const Reply released = client().Do("LOCK.RELEASE", "ending", "alice");
  EXPECT_TRUE(released.IsInteger()) << released;
  EXPECT_GT(MustAcquire(client(), "ending", "heir"), last_token);
  Waiter again(primary(), standing[0], "patient");
  EXPECT_EQ(client().Do("LOCK.RELEASE", standing[0], "holder"), Reply::Int(1));
  EXPECT_GT(again.Read().integer, last_token);
  ExpectSame();
}

// It is a primary again, with its queue unless it has unblocked the waiters.
TEST_F(ForcedFailoverTest, AbortedFailoverServesRemainingWaiters) {
  MustAcquire(client(), "ending", "alice");
  const int64_t token = MustAcquire(client(), "kept", "keeper");
  Waiter heir(primary(), "ending", "heir");
  Waiter patient(primary(), "kept", "patient");
  Settle();
  Force();
  EXPECT_EQ(client().Do("FAILOVER", "ABORT"), Reply::Ok());
  EXPECT_EQ(RoleOf(client()), "master");
  EXPECT_EQ(client().Do("LOCK.RELEASE", "kept", "keeper"), Reply::Int(1));
  for (Waiter* waiter : {&heir, &patient}) {
    const Reply reply = waiter->Read();
    EXPECT_TRUE(reply.IsError("UNBLOCKED") || reply.integer > token) << reply;
  }
  EXPECT_GT(MustAcquire(client(), "ending", "heir"), token);
  EXPECT_GT(MustAcquire(client(), "kept", "patient"), token);
  replica().Continue();
  AwaitSync(copy());
  ExpectSame();
}

TEST_F(ForcedFailoverTest, AbortedFailoverServesWaitersHeldByGrace) {
  MustAcquire(client(), "ending", "alice");
  Settle();
  EXPECT_EQ(client().Do("CONFIG", "SET", "turnstile.failover-grace-ms", kMinute), Reply::Ok());
  Waiter held_back(primary(), "free", "me");
  Force();
  EXPECT_EQ(client().Do("FAILOVER", "ABORT"), Reply::Ok());
  EXPECT_EQ(client().Do("CONFIG", "SET", "turnstile.failover-grace-ms", 0), Reply::Ok());
  const Reply reply = held_back.Read();
  EXPECT_TRUE(reply.IsError("UNBLOCKED") || reply.IsInteger()) << reply;
  MustAcquire(client(), "free", "me");
  replica().Continue();
  AwaitSync(copy());
  ExpectSame();
}

}  // namespace
}  // namespace turnstile::testing
