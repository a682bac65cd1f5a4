// Fencing tokens only increase, whatever happens to keys, files and servers.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <string>
#include <vector>

#include "support/aof.h"
#include "support/client.h"
#include "support/clock.h"
#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/reply.h"
#include "support/resp3.h"
#include "support/server.h"

namespace turnstile::testing {
namespace {

constexpr int64_t kMaxToken = (int64_t{1} << 53) - 1;
constexpr int64_t kDefaultMargin = 30000;
constexpr int64_t kStartStep = 3'000'000;  // what a start adds to the highest known token

int64_t InfoNumber(Client& client, const std::string& section, const std::string& field) {
  const std::string info = client.Do("INFO", section).text;
  const size_t start = info.find("\n" + field + ":");
  EXPECT_NE(start, std::string::npos) << field << " in " << info;
  return start == std::string::npos ? -1 : std::stoll(info.substr(start + field.size() + 2));
}

int64_t LastToken(Client& client) {
  return InfoNumber(client, "turnstile", "turnstile_last_token");
}

// How far the token clock leads the wall clock, in milliseconds.
int64_t Lead(Client& client) { return InfoNumber(client, "turnstile", "turnstile_clock_lead_ms"); }

std::vector<std::string> Margin(int64_t ms, std::vector<std::string> args = {}) {
  args.insert(args.end(), {"--turnstile.token-margin-ms", std::to_string(ms)});
  return args;
}

const std::vector<std::string> kAof = {"--appendonly", "yes", "--appendfsync", "always"};

// A new hold of the lock, whoever held it before.
int64_t AcquireNewHold(Client& client, const char* key = "job") {
  client.Do("DEL", key);
  return MustAcquire(client, key, "me");
}

void AwaitLink(Client& replica) {
  EXPECT_TRUE(Eventually(
      [&] {
        return replica.Do("INFO", "replication").text.find("master_link_status:up") !=
               std::string::npos;
      },
      Milliseconds{20000}));
}

TEST(TokensTest, TokensRiseHoweverHoldEnds) {
  Server server;
  Client client = server.Connect();
  int64_t last = LastToken(client);
  const Commands ends = {{"LOCK.RELEASE", "job", "me"},
                         {"DEL", "job"},
                         {"UNLINK", "job"},
                         {"FLUSHDB"},
                         {"FLUSHALL"},
                         {"FLUSHALL", "ASYNC"},
                         {"PEXPIREAT", "job", "1"},
                         {"RENAME", "job", "elsewhere"},
                         {"SWAPDB", "0", "7"},
                         {"SET", "job", "me"}};
  for (const Command& end : ends) {
    const int64_t token = MustAcquire(client, "job", "me");
    EXPECT_GT(token, last) << "before " << end[0];
    EXPECT_EQ(LastToken(client), token);
    last = token;
    EXPECT_FALSE(client.Do(end).IsError()) << end[0];
  }
  EXPECT_GT(MustAcquire(client, "job", "me", 20), last);
  last = LastToken(client);
  ASSERT_TRUE(Eventually([&] { return client.Do("LOCK.FENCE", "job").IsNil(); }));
  EXPECT_GT(MustAcquire(client, "job", "me"), last) << "after the end of the lease";
}

TEST(TokensTest, TokenIsKeptWhileHoldLasts) {
  Server server;
  Client client = server.Connect();
  const int64_t token = MustAcquire(client, "job", "me");
  MustAcquire(client, "other", "me");
  EXPECT_EQ(MustAcquire(client, "job", "me"), token);
  EXPECT_EQ(client.Do("LOCK.TOUCH", "job", "me", "PX", kMinute), Reply::Int(1));
  client.Do("PERSIST", "job");
  client.Do("RENAME", "job", "task");
  EXPECT_EQ(MustAcquire(client, "task", "me"), token);
}

// Without a margin only the last token separates two grants within one microsecond.
TEST(TokensTest, TokensRiseWithinOneMicrosecond) {
  for (const int64_t margin : {int64_t{0}, kDefaultMargin}) {
    Server server({.args = Margin(margin)});
    Client client = server.Connect();
    int64_t last = LastToken(client);
    constexpr int kMany = 10000;
    for (int i = 0; i < kMany; i++) {
      client.Send("LOCK.ACQUIRE", "job " + std::to_string(i), "me", "PX", kMinute);
    }
    for (int i = 0; i < kMany; i++) {
      const int64_t token = client.Read().integer;
      ASSERT_GT(token, last) << i;
      last = token;
    }
    client.Do("MULTI");
    for (int i = 0; i < 100; i++) {
      client.Do("LOCK.ACQUIRE", "job", "me", "PX", kMinute);
      client.Do("LOCK.RELEASE", "job", "me");
    }
    const Reply done = client.Do("EXEC");
    ASSERT_EQ(done.elements.size(), 200U) << done;
    for (size_t i = 0; i < 200; i += 2) {
      ASSERT_GT(done.elements[i].integer, last) << i;
      last = done.elements[i].integer;
    }
    const Reply scripted = client.Do("EVAL", R"(
        local tokens = {}
        for i = 1, 100 do
          tokens[i] = redis.call('LOCK.ACQUIRE', KEYS[1], 'me', 'PX', 60000)
          redis.call('LOCK.RELEASE', KEYS[1], 'me')
        end
        return tokens)",
                                     1, "job");
    ASSERT_EQ(scripted.elements.size(), 100U) << scripted;
    for (const Reply& token : scripted.elements) {
      ASSERT_GT(token.integer, last);
      last = token.integer;
    }
    EXPECT_LE(Lead(client), margin + 100) << "a burst costs no more than its count";
  }
}

TEST(TokensTest, TokensLeadWallClockByMarginAfterStart) {
  for (const int64_t margin : {int64_t{0}, int64_t{20'000}, kDefaultMargin, int64_t{600'000}}) {
    Server server({.args = Margin(margin)});
    Client client = server.Connect();
    const int64_t before = 1000 * ServerNow(client);
    const int64_t lead = Lead(client);
    EXPECT_LE(lead, margin);
    EXPECT_GT(lead, margin - kPatience.count());
    const int64_t token = MustAcquire(client, "job", "me");
    EXPECT_LE(token, 1000 * (ServerNow(client) + 1 + margin));
    EXPECT_GT(token, before + 1000 * (margin - kPatience.count()));
    // The lead shrinks: the wall clock advances, the token clock does not.
    EXPECT_TRUE(Eventually([&] { return Lead(client) < lead || lead == 0; }));
  }
  Server server;
  Client client = server.Connect();
  EXPECT_LE(Lead(client), kDefaultMargin);
  EXPECT_GT(Lead(client), kDefaultMargin - kPatience.count());
}

// Nothing survives, but time has passed.
TEST(TokensTest, TokensRiseAcrossCrashesWithoutPersistence) {
  Server server;
  int64_t last = 0;
  for (int life = 0; life < 25; life++) {
    Client client = server.Connect();
    for (int i = 0; i < 20; i++) {
      const int64_t token = AcquireNewHold(client);
      ASSERT_GT(token, last) << "life " << life;
      last = token;
    }
    server.Kill9();
    ASSERT_TRUE(server.Restart());
  }
}

TEST(TokensTest, TokensRiseAcrossRestartsWithRdbOrAof) {
  for (const bool aof : {false, true}) {
    Server server({.args = aof ? kAof : std::vector<std::string>{}});
    int64_t last = 0;
    for (int life = 0; life < 4; life++) {
      Client client = server.Connect();
      EXPECT_GT(AcquireNewHold(client), last) << "life " << life;
      EXPECT_EQ(aof ? Reply::Ok() : client.Do("SAVE"), Reply::Ok());
      last = LastToken(client);
      server.Kill9();
      ASSERT_TRUE(server.Restart());
      client = server.Connect();
      EXPECT_GE(LastToken(client), last + kStartStep) << "what was loaded counts";
    }
  }
}

// If no locks are left, the AOF carries the last token (as the floor and the facts). The RDB does
// too, while the token leads the wall clock, on servers that can write such a record conditionally:
// all but 7.0. There it is never written, as docs/guarantees.md says.
TEST(TokensTest, AofAndRdbCarryClockWithoutLocks) {
  for (const bool aof : {false, true}) {
    Server server({.args = Margin(600'000, aof ? kAof : std::vector<std::string>{})});
    Client client = server.Connect();
    const int64_t token = MustAcquire(client, "job", "me");
    client.Do("LOCK.RELEASE", "job", "me");
    EXPECT_EQ(client.Do("SAVE"), Reply::Ok());
    const bool is_7_0 = EngineOf(client).starts_with("Redis 7.0.");
    server.Kill9();
    server.options().args = Margin(0, aof ? kAof : std::vector<std::string>{});
    ASSERT_TRUE(server.Restart());
    client = server.Connect();
    EXPECT_EQ(MustAcquire(client, "job", "me") > token, aof || !is_7_0);
  }
}

TEST(TokensTest, RdbWithoutLocksLoadsWithoutTheModule) {
  Server server({.args = Margin(0)});
  Client client = server.Connect();
  MustAcquire(client, "job", "me");
  client.Do("LOCK.RELEASE", "job", "me");
  client.Do("SET", "key", "value");
  ASSERT_TRUE(Eventually([&] { return Lead(client) == 0; }));
  EXPECT_EQ(client.Do("SAVE"), Reply::Ok());
  server.options() = {.load_module = false};
  ASSERT_TRUE(server.Restart());
  EXPECT_EQ(server.Connect().Do("GET", "key"), Reply::Str("value"));
}

TEST(TokensTest, ThirtyQuickRestartsAddLittleLead) {
  Server server({.args = Margin(kDefaultMargin, kAof)});
  Client client = server.Connect();
  int64_t last = MustAcquire(client, "job", "me");
  for (int life = 0; life < 30; life++) {
    server.Kill9();
    ASSERT_TRUE(server.Restart());
    client = server.Connect();
    const int64_t token = AcquireNewHold(client);
    EXPECT_GT(token, last) << "life " << life;
    // The margin, or three seconds more than before.
    EXPECT_LE(token, std::max(last + kStartStep + 10, 1000 * (ServerNow(client) + kDefaultMargin)));
    last = token;
  }
  EXPECT_LE(Lead(client), kDefaultMargin + 30 * kStartStep / 1000);
}

// --- A server without locks ----------------------------------------------------------------------

TEST(TokensTest, NothingIsWrittenWithoutLocks) {
  Server server({.args = Margin(kDefaultMargin, kAof)});
  Server replica({.args = {"--replicaof", "127.0.0.1", std::to_string(server.port())}});
  Client client = server.Connect();
  Client copy = replica.Connect();
  AwaitLink(copy);
  EXPECT_EQ(client.Do("SET", "key", "value"), Reply::Ok());
  EXPECT_EQ(client.Do("WAIT", 1, kPatience.count()), Reply::Int(1));
  EXPECT_EQ(copy.Do("REPLICAOF", "NO", "ONE"), Reply::Ok());
  // Refused until the server has reaped the child process of the replica's sync.
  EXPECT_TRUE(Eventually([&] { return client.Do("SAVE") == Reply::Ok(); }));
  EXPECT_EQ(InfoField(client, "persistence", "rdb_changes_since_last_save"), "0");
  EXPECT_EQ(ReadAof(server.dir()), (Commands{{"SELECT", "0"}, {"SET", "key", "value"}}));
  // The module can be removed at any restart.
  server.options().load_module = false;
  for (const char* aof : {"yes", "no"}) {
    server.options().args = {"--appendonly", aof};
    ASSERT_TRUE(server.Restart());
    EXPECT_EQ(server.Connect().Do("GET", "key"), Reply::Str("value")) << aof;
  }
}

// --- Other servers -------------------------------------------------------------------------------

TEST(TokensTest, RestoredLockRaisesClock) {
  Server ahead({.args = Margin(600'000)});
  Server behind({.args = Margin(0)});
  Client from = ahead.Connect();
  Client to = behind.Connect();
  const int64_t token = MustAcquire(from, "job", "me");
  const std::string payload = from.Do("DUMP", "job").text;
  EXPECT_LT(MustAcquire(to, "other", "me"), token);
  EXPECT_EQ(to.Do("RESTORE", "job", 0, payload), Reply::Ok());
  EXPECT_EQ(LastToken(to), token);
  EXPECT_GT(Lead(to), 500'000);
  EXPECT_EQ(MustAcquire(to, "another", "me"), token + 1);
  EXPECT_EQ(to.Do("LOCK.RELEASE", "job", "me"), Reply::Int(1));
  EXPECT_EQ(MustAcquire(to, "job", "you"), token + 2);
  // A smaller one does not set it back.
  from.Do("LOCK.RELEASE", "job", "me");
  EXPECT_EQ(to.Do("RESTORE", "job", 0, payload, "REPLACE"), Reply::Ok());
  EXPECT_EQ(MustAcquire(to, "last", "me"), token + 3);
}

// A replica that missed the last tokens, or all of them, is promoted.
TEST(TokensTest, TokensRiseAcrossLossyFailover) {
  for (const bool saw_some : {true, false}) {
    Server primary({.args = {"--repl-diskless-sync", "no"}});
    // It never was a primary, so its clock has no value of its own.
    Server replica({.args = {"--replicaof", "127.0.0.1", std::to_string(primary.port())}});
    Client client = primary.Connect();
    Client copy = replica.Connect();
    AwaitLink(copy);
    int64_t last = 0;
    if (saw_some) {
      last = MustAcquire(client, "job", "me");
      EXPECT_EQ(client.Do("WAIT", 1, kPatience.count()), Reply::Int(1));
    }
    // Disconnected, but not promoted yet.
    EXPECT_EQ(copy.Do("REPLICAOF", "127.0.0.1", 1), Reply::Ok());
    for (int i = 0; i < 100; i++) last = AcquireNewHold(client);
    EXPECT_LT(LastToken(copy), last);
    primary.Kill9();
    EXPECT_EQ(copy.Do("REPLICAOF", "NO", "ONE"), Reply::Ok());
    EXPECT_GT(AcquireNewHold(copy), last);
  }
}

// A primary that is demoted and promoted again starts from a new floor, and replicates it.
TEST(TokensTest, EachPromotionAddsThreeSeconds) {
  Server server({.args = Margin(kDefaultMargin, kAof)});
  Client client = server.Connect();
  const int64_t first = MustAcquire(client, "first", "me");
  EXPECT_EQ(client.Do("REPLICAOF", "127.0.0.1", 1), Reply::Ok());
  EXPECT_TRUE(client.Do("LOCK.ACQUIRE", "job", "me", "PX", kMinute).IsError("READONLY"));
  EXPECT_EQ(LastToken(client), first) << "a replica issues nothing";
  EXPECT_EQ(client.Do("REPLICAOF", "NO", "ONE"), Reply::Ok());
  const int64_t second = LastToken(client);
  EXPECT_EQ(second, first + kStartStep);
  EXPECT_EQ(LastInAof(server.dir()), (Command{"LOCK.FACT", "FLOOR", std::to_string(second)}));
  EXPECT_EQ(MustAcquire(client, "job", "me"), second + 1);
}

// --- How far a client can push the clock -----------------------------------------------------

TEST(TokensTest, FloorIsBoundedByMarginAndStart) {
  ClockShift clock;
  Server server({.environment = clock.environment()});
  Client client = server.Connect();
  const int64_t started = 1000 * ServerNow(client);
  const auto ask = [&](int64_t floor) {
    client.Do("DEL", "job");
    return client.Do("LOCK.ACQUIRE", "job", "me", "PX", kMinute, "FLOOR", floor);
  };
  const auto seconds = [](int64_t count) { return count * 1'000'000; };
  // Just after the start the clock leads by one margin: half a margin more is allowed.
  EXPECT_TRUE(ask(started + seconds(46)).IsError("ERR FLOOR is too far ahead"));
  const int64_t first = started + seconds(45) - seconds(10);
  EXPECT_EQ(ask(first), Reply::Int(first));
  // Half a margin ahead of the wall clock, once the lead is used up.
  clock.Set(std::chrono::minutes{10}, client);
  const int64_t later = 1000 * ServerNow(client);
  EXPECT_TRUE(ask(later + seconds(25)).IsError("ERR FLOOR is too far ahead"));
  EXPECT_EQ(ask(later + seconds(14)), Reply::Int(later + seconds(14)));
  // A promotion adds a margin, but not the half.
  EXPECT_EQ(client.Do("REPLICAOF", "127.0.0.1", 1), Reply::Ok());
  EXPECT_EQ(client.Do("REPLICAOF", "NO", "ONE"), Reply::Ok());
  const int64_t noted = LastToken(client);
  EXPECT_GE(noted, later + seconds(30));
  EXPECT_TRUE(ask(noted + 1).IsError("ERR FLOOR is too far ahead"));
  EXPECT_EQ(ask(noted), Reply::Int(noted + 1));
  // The current value of the setting counts.
  EXPECT_EQ(client.Do("CONFIG", "SET", "turnstile.token-margin-ms", 600'000), Reply::Ok());
  EXPECT_EQ(ask(later + seconds(240)), Reply::Int(later + seconds(240)));
}

// --- Exhausted tokens ----------------------------------------------------------------------------

TEST(TokensTest, ExhaustedTokensGrantNothingNewAndKeepHolds) {
  constexpr int64_t almost = kMaxToken - 1 - kStartStep;
  Server server;
  server.Stop();
  std::ofstream aof(server.dir() + "/appendonly.aof", std::ios::binary);
  for (const Command& command :
       Commands{{"SELECT", "0"},
                HeldCommand("held", "me", {1700000000000000, 1000, 7258118400000}),
                HeldCommand("almost", "me", {almost, 1000, 7258118400000}),
                {"SET", "plain", "me"}}) {
    aof << EncodeCommand(command);
  }
  aof.close();
  server.options().args = Margin(0, kAof);
  ASSERT_TRUE(server.Restart());
  Client client = server.Connect();
  EXPECT_EQ(LastToken(client), kMaxToken - 1) << "the start has added its step";
  EXPECT_EQ(MustAcquire(client, "last", "me"), kMaxToken) << "exact in a double";

  const std::string refusal = "ERR no tokens are left below 2^53";
  for (const char* key : {"free", "plain"}) {
    const Reply reply = client.Do("LOCK.ACQUIRE", key, "me", "PX", kMinute);
    EXPECT_TRUE(reply.IsError(refusal)) << reply;
  }
  EXPECT_EQ(client.Do("EXISTS", "free"), Reply::Int(0));
  EXPECT_EQ(client.Do("GET", "plain"), Reply::Str("me"));
  EXPECT_EQ(client.Do("LOCK.ACQUIRE", "held", "you", "PX", kMinute), Reply::Nil());

  EXPECT_EQ(MustAcquire(client, "held", "me"), 1700000000000000);
  EXPECT_EQ(client.Do("LOCK.TOUCH", "held", "me", "PX", kMinute), Reply::Int(1));
  EXPECT_EQ(client.Do("LOCK.RELEASE", "held", "me"), Reply::Int(1));
  EXPECT_EQ(client.Do("LOCK.TOUCH", "plain", "me", "PX", kMinute), Reply::Int(1));
  EXPECT_EQ(client.Do("LOCK.RELEASE", "plain", "me"), Reply::Int(1));
  EXPECT_EQ(client.Do("LOCK.FENCE", "last", kMaxToken), Reply::Int(1));
  EXPECT_EQ(client.Do("LOCK.RELEASE", "last", "me"), Reply::Int(1));
  EXPECT_TRUE(client.Do("LOCK.ACQUIRE", "held", "me", "PX", kMinute).IsError(refusal));

  // No margin, restart or failover helps, and none goes beyond the last token.
  server.options().args = Margin(kDefaultMargin, kAof);
  server.Kill9();
  ASSERT_TRUE(server.Restart());
  client = server.Connect();
  EXPECT_EQ(LastToken(client), kMaxToken);
  EXPECT_TRUE(client.Do("LOCK.ACQUIRE", "held", "me", "PX", kMinute).IsError(refusal));
  EXPECT_EQ(MustAcquire(client, "almost", "me"), almost);

  // A replica gets there too, by a lock (whose token a client could not RESTORE) or by a floor.
  Server replica({.args = {"--replicaof", "127.0.0.1", std::to_string(server.port())}});
  Client copy = replica.Connect();
  AwaitLink(copy);
  EXPECT_GE(LastToken(copy), almost);
  EXPECT_EQ(copy.Do("LOCK.INFO", "almost").Field("holders").elements.at(0).Field("token"),
            Reply::Int(almost));
}

// A clock that is far ahead after several starts is not lost with the old AOF.
TEST(TokensTest, TokensRiseAcrossAofRewrite) {
  for (const char* preamble : {"yes", "no"}) {
    SCOPED_TRACE(preamble);
    Server server({.args = {"--appendonly", "yes", "--appendfsync", "always",
                            "--aof-use-rdb-preamble", preamble}});
    Client client = server.Connect();
    for (int life = 0; life < 3; ++life) {  // each start is further ahead
      MustAcquire(client, "job", "me");
      server.Kill9();
      ASSERT_TRUE(server.Restart());
      client = server.Connect();
    }
    const int64_t token = MustAcquire(client, "job", "me");
    client.Do("LOCK.RELEASE", "job", "me");
    client.Do("BGREWRITEAOF");
    ASSERT_TRUE(Eventually([&] {
      const std::string info = client.Do("INFO", "persistence").text;
      return info.find("aof_rewrite_in_progress:0") != std::string::npos &&
             info.find("aof_rewrite_scheduled:0") != std::string::npos;
    }));
    server.Kill9();
    ASSERT_TRUE(server.Restart());
    client = server.Connect();
    EXPECT_GT(MustAcquire(client, "job", "you"), token);
  }
}

TEST(TokensTest, TokensRiseAcrossFullSyncAndPromotion) {
  Server primary({.args = {"--appendonly", "yes", "--repl-diskless-sync", "no"}});
  Client client = primary.Connect();
  for (int life = 0; life < 3; ++life) {
    MustAcquire(client, "job", "me");
    ASSERT_TRUE(primary.Restart());
    client = primary.Connect();
  }
  const int64_t token = MustAcquire(client, "job", "me");
  client.Do("LOCK.RELEASE", "job", "me");
  Server replica({.args = {"--replicaof", "127.0.0.1", std::to_string(primary.port())}});
  Client copy = replica.Connect();
  AwaitLink(copy);
  EXPECT_EQ(client.Do("SET", "k", "v"), Reply::Ok());
  EXPECT_EQ(client.Do("WAIT", 1, kPatience.count()), Reply::Int(1));
  EXPECT_EQ(copy.Do("REPLICAOF", "NO", "ONE"), Reply::Ok());
  EXPECT_GT(MustAcquire(copy, "job", "you"), token);
}

}  // namespace
}  // namespace turnstile::testing
