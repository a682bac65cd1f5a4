// The promise about tokens, measured: a later grant of a lock has a larger token than every earlier
// one, as long as clock skew plus the lead of the tokens that were lost stays under the margin.
//
// In the same runs the usual way to make fencing tokens is measured next to it: a lock made with
// SET NX PX, and INCR of a counter for the token. Each test is one row of a table that is printed
// at the end, for all the tests that ran in the process:
//
//   turnstile_integration_tests --gtest_filter='TokenProof*'

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "support/client.h"
#include "support/clock.h"
#include "support/eventually.h"
#include "support/failover.h"
#include "support/lock_test.h"
#include "support/reply.h"
#include "support/server.h"

namespace turnstile::testing {
namespace {

using std::chrono::microseconds;
using std::chrono::seconds;

const std::vector<std::string> kLocks = {"a", "b", "c", "d", "e", "f", "g", "h"};
constexpr seconds kDefaultMargin{30};

Milliseconds Lead(Client& client) {
  return Milliseconds{std::stoll(InfoField(client, "turnstile", "turnstile_clock_lead_ms"))};
}

// --- The clock shift -----------------------------------------------------------------------------

// Without it, the tests below would prove nothing.
TEST(ClockShiftTest, MovesWallClockOfRunningServer) {
  ClockShift clock;
  Server server({.load_module = false, .environment = clock.environment()});
  Server other({.load_module = false});
  Client client = server.Connect();
  Client reference = other.Connect();
  const auto expect_ahead = [&](int64_t ms) {
    // Between two readings of the true time.
    const int64_t before = ServerNow(reference);
    const int64_t there = ServerNow(client);
    const int64_t after = ServerNow(reference);
    EXPECT_GE(there, before + ms - 1);
    EXPECT_LE(there, after + ms + 1);
  };
  expect_ahead(0);
  for (const int64_t ms : {int64_t{1}, int64_t{-1}, int64_t{3'600'000}, int64_t{-86'400'999}}) {
    clock.Set(Milliseconds{ms}, client);
    expect_ahead(ms);
  }
  server.Kill9();
  ASSERT_TRUE(server.Restart());
  client = server.Connect();
  expect_ahead(-86'400'999);

  // Leases follow it too.
  EXPECT_EQ(client.Do("SET", "key", "value", "EX", 3600), Reply::Ok());
  clock.Set(seconds{-86'400 + 3601}, client);
  EXPECT_EQ(client.Do("EXISTS", "key"), Reply::Int(0));
}

// --- Both kinds of tokens ------------------------------------------------------------------------

// The tokens issued by one of the two ways.
class Ledger {
 public:
  void Add(const std::string& lock, const Reply& token) {
    EXPECT_TRUE(token.IsInteger()) << token;
    int64_t& highest = highest_[lock];
    ++grants_;
    if (token.integer <= highest) ++regressions_;
    highest = std::max(highest, token.integer);
  }

  // What follows happens on other servers.
  void Forget() { highest_.clear(); }

  int grants() const { return grants_; }
  // The tokens that were not above every earlier one of the same lock.
  int regressions() const { return regressions_; }

 private:
  std::map<std::string, int64_t> highest_;
  int grants_ = 0;
  int regressions_ = 0;
};

class TokenProofTest : public ::testing::Test {
 public:
  static void TearDownTestSuite() {
    if (rows_.empty()) return;
    std::cout << "\n| what happened | rounds | grants of each kind "
                 "| Turnstile: tokens not above an earlier one | SET NX + INCR: the same |\n"
                 "|---|--:|--:|--:|--:|\n";
    for (const std::string& row : rows_) std::cout << row << "\n";
    std::cout << "\n";
    rows_.clear();
  }

 protected:
  // Acquires every lock so many times in both ways, each time from its current holder. The last
  // holds stay.
  void TakeTurns(Client& client, int turns) {
    for (int turn = 0; turn < turns; ++turn) {
      const std::string owner = "owner " + std::to_string(++owners_);
      for (const std::string& lock : kLocks) {
        client.Send("DEL", lock, "plain:" + lock);
        client.Send("LOCK.ACQUIRE", lock, owner, "PX", kMinute);
        client.Send("SET", "plain:" + lock, owner, "NX", "PX", kMinute);
        client.Send("INCR", "fence:" + lock);
      }
      for (const std::string& lock : kLocks) {
        EXPECT_TRUE(client.Read().IsInteger());
        turnstile_.Add(lock, client.Read());
        EXPECT_EQ(client.Read(), Reply::Ok());
        counter_.Add(lock, client.Read());
      }
    }
  }

  static void FreeAll(Client& client) {
    for (const std::string& lock : kLocks) client.Do("DEL", lock, "plain:" + lock);
  }

  void FailOver(Pair& pair);
  void FailOverCleanly(Pair& pair);
  void PushClock(Client& client);
  void FailOverAndOver(int rounds, const std::function<seconds(int round)>& skew);

  // The row of this test. The promise must have been kept.
  void Conclude(const std::string& what_happened, int rounds) {
    EXPECT_EQ(turnstile_.regressions(), 0);
    std::ostringstream row;
    row << "| " << what_happened << " | " << rounds << " | " << turnstile_.grants() << " | "
        << turnstile_.regressions() << " | " << counter_.regressions() << " |";
    rows_.push_back(row.str());
  }

  Ledger turnstile_;
  Ledger counter_;

 private:
  static inline std::vector<std::string> rows_;
  int owners_ = 0;
};

// --- One server ----------------------------------------------------------------------------------

TEST_F(TokenProofTest, CrashesWithoutPersistence) {
  constexpr int kRounds = 50;
  Server server;
  for (int round = 0; round < kRounds; ++round) {
    Client client = server.Connect();
    TakeTurns(client, 5);
    server.Kill9();
    ASSERT_TRUE(server.Restart());
  }
  Client client = server.Connect();
  TakeTurns(client, 5);
  EXPECT_GT(counter_.regressions(), 0);
  Conclude("`kill -9`, restart without persistence", kRounds);
}

TEST_F(TokenProofTest, Flush) {
  constexpr int kRounds = 50;
  Server server;
  Client client = server.Connect();
  const Commands ways = {
      {"FLUSHALL"}, {"FLUSHALL", "ASYNC"}, {"FLUSHALL", "SYNC"}, {"FLUSHDB"}, {"FLUSHDB", "ASYNC"}};
  for (size_t round = 0; round < kRounds; ++round) {
    TakeTurns(client, 5);
    EXPECT_EQ(client.Do(ways[round % ways.size()]), Reply::Ok());
  }
  TakeTurns(client, 5);
  EXPECT_GT(counter_.regressions(), 0);
  Conclude("`FLUSHALL`, `FLUSHDB`", kRounds);
}

TEST_F(TokenProofTest, Eviction) {
  constexpr int kRounds = 10;
  ClockShift clock;
  Server server({.args = {"--maxmemory", "4mb", "--maxmemory-policy", "allkeys-lru"},
                 .environment = clock.environment()});
  Client client = server.Connect();
  Command count = {"EXISTS"};
  for (const std::string& lock : kLocks) count.insert(count.end(), {lock, "fence:" + lock});
  const std::string value(4000, 'x');
  int fillers = 0;
  for (int round = 0; round < kRounds; ++round) {
    TakeTurns(client, 5);
    clock.Set((round + 1) * seconds{10}, client);  // what was used before is old now
    EXPECT_TRUE(Eventually([&] {
      constexpr int kBatch = 100;
      for (int i = 0; i < kBatch; ++i) client.Send("SET", "f:" + std::to_string(++fillers), value);
      for (int i = 0; i < kBatch; ++i) {
        EXPECT_EQ(client.Read(), Reply::Ok());
      }
      return client.Do(count) == Reply::Int(0);
    })) << "locks and counters are still there: "
        << client.Do(count);
  }
  TakeTurns(client, 5);
  EXPECT_GT(counter_.regressions(), 0);
  Conclude("eviction of locks and counters (`allkeys-lru`)", kRounds);
}

TEST_F(TokenProofTest, RewrittenAof) {
  constexpr int kRounds = 12;
  Server server(
      {.args = {"--appendonly", "yes", "--appendfsync", "always", "--aof-use-rdb-preamble", "no"}});
  for (int round = 0; round < kRounds; ++round) {
    Client client = server.Connect();
    TakeTurns(client, 5);
    // With no lock left, only the floor carries the clock.
    if (round % 2 == 1) FreeAll(client);
    const std::string forks = InfoField(client, "stats", "total_forks");
    client.Do("BGREWRITEAOF");
    ASSERT_TRUE(Eventually([&] {
      return InfoField(client, "stats", "total_forks") != forks &&
             InfoField(client, "persistence", "aof_rewrite_in_progress") == "0" &&
             InfoField(client, "persistence", "aof_rewrite_scheduled") == "0";
    }));
    EXPECT_EQ(InfoField(client, "persistence", "aof_last_bgrewrite_status"), "ok");
    server.Kill9();
    ASSERT_TRUE(server.Restart());
  }
  Client client = server.Connect();
  TakeTurns(client, 5);
  EXPECT_EQ(counter_.regressions(), 0) << "nothing is lost, so a counter does as well";
  Conclude("AOF rewritten without RDB preamble, `kill -9`, restart", kRounds);
}

// --- Two servers ---------------------------------------------------------------------------------

// The replica is disconnected, the primary goes on granting, all of that is lost, and the replica
// is promoted.
void TokenProofTest::FailOver(Pair& pair) {
  TakeTurns(pair.primary(), 3);
  pair.AwaitReplica();
  pair.Cut();
  TakeTurns(pair.primary(), 5);
  pair.Promote();
  TakeTurns(pair.primary(), 3);
  pair.Rejoin();
}

// The replica has received everything.
void TokenProofTest::FailOverCleanly(Pair& pair) {
  TakeTurns(pair.primary(), 3);
  pair.AwaitReplica();
  pair.Promote();
  pair.Rejoin();
}

// The promoted replica's clock is ahead of the old primary's by `skew`.
void TokenProofTest::FailOverAndOver(int rounds, const std::function<seconds(int round)>& skew) {
  Pair pair;
  Milliseconds ahead{0};  // the primary's clock
  for (int round = 0; round < rounds; ++round) {
    // After a promotion the lead is at least the margin. Just enough time passes for the promise to
    // hold again.
    const Milliseconds distance = std::chrono::abs(skew(round));
    const Milliseconds most = kDefaultMargin - distance - Milliseconds{100};
    ahead += std::max(Lead(pair.primary()) - most, Milliseconds{0});
    pair.SetClocks(ahead, skew(round));
    ASSERT_LT(Lead(pair.primary()) + distance, kDefaultMargin);
    FailOver(pair);
    ahead += skew(round);
  }
  EXPECT_GT(counter_.regressions(), 0);
}

TEST_F(TokenProofTest, LossyFailover) {
  constexpr int kRounds = 50;
  FailOverAndOver(kRounds, [](int) { return seconds{0}; });
  Conclude("failover that lost writes", kRounds);
}

TEST_F(TokenProofTest, LossyFailoverToAClockBehind) {
  constexpr int kRounds = 20;
  FailOverAndOver(kRounds, [](int) { return seconds{-5}; });
  Conclude("the same, the promoted replica's clock 5 s behind", kRounds);
}

TEST_F(TokenProofTest, LossyFailoverToAClockAhead) {
  constexpr int kRounds = 20;
  FailOverAndOver(kRounds, [](int) { return seconds{5}; });
  Conclude("the same, the promoted replica's clock 5 s ahead", kRounds);
}

TEST_F(TokenProofTest, LossyFailoversBackAndForth) {
  constexpr int kRounds = 20;
  FailOverAndOver(kRounds, [](int round) { return seconds{round % 2 == 0 ? -5 : 5}; });
  Conclude("the same, back and forth between two servers 5 s apart", kRounds);
}

// From the second failover on the lead is more than the promise covers. It still holds, because the
// replica received the position of the clock, and starts three seconds above it.
TEST_F(TokenProofTest, LossyFailoversInQuickSuccession) {
  constexpr int kRounds = 30;
  Pair pair;
  for (int round = 0; round < kRounds; ++round) FailOver(pair);
  EXPECT_LE(Lead(pair.primary()), kDefaultMargin + kRounds * seconds{3});
  EXPECT_GT(counter_.regressions(), 0);
  Conclude("the same, in quick succession", kRounds);
}

// Acquires a lock with the highest FLOOR that the server accepts.
void TokenProofTest::PushClock(Client& client) {
  const std::string& lock = kLocks.front();
  client.Do("DEL", lock);
  for (seconds ahead = std::chrono::minutes{10}; ahead > seconds{0}; ahead -= seconds{1}) {
    const int64_t floor = (ServerNow(client) + Milliseconds{ahead}.count()) * 1000;
    const Reply token = client.Do("LOCK.ACQUIRE", lock, "pusher", "PX", kMinute, "FLOOR", floor);
    if (!token.IsInteger()) continue;
    EXPECT_EQ(token.integer, floor);
    turnstile_.Add(lock, token);
    return;
  }
  ADD_FAILURE() << "no floor is accepted";
}

TEST_F(TokenProofTest, FloorThenACleanAndALossyFailover) {
  constexpr int kRounds = 5;
  for (int round = 0; round < kRounds; ++round) {
    Pair pair;
    PushClock(pair.primary());
    FailOverCleanly(pair);
    FailOver(pair);
    EXPECT_LE(Lead(pair.primary()), kDefaultMargin * 3 / 2 + 2 * seconds{3});
    turnstile_.Forget();
    counter_.Forget();
  }
  Conclude("`FLOOR` as far as allowed, a clean failover, one that lost writes, within 30 s",
           kRounds);
}

// The clock is pushed when the lead of the start is used up: the other half of the margin covers
// what is lost.
TEST_F(TokenProofTest, FloorThenALossyFailover) {
  constexpr int kRounds = 5;
  Pair pair;
  std::chrono::minutes passed{0};
  for (int round = 0; round < kRounds; ++round) {
    pair.SetClocks(passed += std::chrono::minutes{2}, seconds{0});
    pair.Cut();
    PushClock(pair.primary());
    TakeTurns(pair.primary(), 3);
    pair.Promote();
    TakeTurns(pair.primary(), 3);
    pair.Rejoin();
  }
  Conclude("`FLOOR` as far as allowed, and a failover that lost it", kRounds);
}

TEST_F(TokenProofTest, QuickRestartsWithAnAof) {
  constexpr int kRounds = 30;
  Server server({.args = {"--appendonly", "yes", "--appendfsync", "always"}});
  Client client = server.Connect();
  for (int round = 0; round < kRounds; ++round) {
    TakeTurns(client, 3);
    server.Kill9();
    ASSERT_TRUE(server.Restart());
    client = server.Connect();
    EXPECT_LE(Lead(client), kDefaultMargin + (round + 1) * seconds{3} + seconds{1});
  }
  TakeTurns(client, 3);
  Conclude("AOF, `kill -9`, restart, in quick succession", kRounds);
}

// --- The boundary of the promise -----------------------------------------------------------------

class TokenProofBoundaryTest : public ::testing::Test {
 protected:
  static constexpr Milliseconds kMargin{2000};

  TokenProofBoundaryTest() {
    pair_.Cut();
    // So that it accepts floors beyond the margin of the other.
    EXPECT_EQ(pair_.primary().Do("CONFIG", "SET", "turnstile.token-margin-ms", 5 * kMargin.count()),
              Reply::Ok());
  }

  // The primary grants a token that leads its clock by `lead`, and crashes. A replica whose clock
  // is `skew` behind, and that has received nothing for a minute, is promoted and grants the same
  // lock. Returns whether that token fails to exceed the lost one.
  bool Regresses(Milliseconds skew, Milliseconds lead) {
    passed_ += seconds{60};
    pair_.SetClocks(passed_, -skew);
    Client& primary = pair_.primary();
    Client& replica = pair_.replica();
    const int64_t floor = (ServerNow(primary) + lead.count()) * 1000;
    primary.Do("DEL", "job");
    const Reply lost = primary.Do("LOCK.ACQUIRE", "job", "old", "PX", kMinute, "FLOOR", floor);
    EXPECT_TRUE(lost.IsInteger()) << lost;
    EXPECT_GE(lost.integer, floor);
    EXPECT_EQ(replica.Do("REPLICAOF", "NO", "ONE"), Reply::Ok());
    const int64_t next = MustAcquire(replica, "job", "new");
    replica.Do("DEL", "job");
    EXPECT_EQ(replica.Do("REPLICAOF", "127.0.0.1", kNowhere), Reply::Ok());
    return next <= lost.integer;
  }

 private:
  Pair pair_{{"--turnstile.token-margin-ms", std::to_string(kMargin.count())}};
  seconds passed_{0};
};

TEST_F(TokenProofBoundaryTest, TokensRiseExactlyWithinMargin) {
  std::ostringstream table;
  table
      << "\n| lead of the lost token | largest skew without a regression | smallest skew with one "
         "| lead + that skew | margin |\n|--:|--:|--:|--:|--:|\n";
  for (const int lead_ms : {0, 250, 500, 1000, 1500, 1990}) {
    const Milliseconds lead{lead_ms};
    constexpr Milliseconds kStep{500};
    constexpr Milliseconds kFine{1};
    // Within the promise, up to its boundary, every time.
    for (const Milliseconds left : {kMargin, kMargin / 2, Milliseconds{100}, Milliseconds{1}}) {
      for (int i = 0; i < 5 && lead + left <= kMargin; ++i) {
        EXPECT_FALSE(Regresses(kMargin - lead - left, lead)) << lead_ms << " " << left.count();
      }
    }
    // Well outside. (The time between the two grants helps if the machine is busy.)
    EXPECT_TRUE(Eventually([&] { return Regresses(kMargin - lead + seconds{1}, lead); }));

    Milliseconds good{0};
    Milliseconds bad = kStep;
    for (; !Regresses(bad, lead); bad += kStep) {
      good = bad;
      ASSERT_LT(bad, 2 * kMargin) << "no regression, however large the skew";
    }
    while (bad - good > kFine) {
      const Milliseconds middle = (good + bad) / 2;
      (Regresses(middle, lead) ? bad : good) = middle;
    }
    EXPECT_GE(lead + bad, kMargin);
    table << "| " << lead.count() << " ms | " << good.count() << " ms | " << bad.count() << " ms | "
          << (lead + bad).count() << " ms | " << kMargin.count() << " ms |\n";
  }
  std::cout << table.str() << "\n";
}

}  // namespace
}  // namespace turnstile::testing
