// A restart, a reload or a move to another server leaves a lock unchanged: the same owner, token
// and end of the lease. What a running server writes to the AOF is tested in replication_test.cc,
// because it equals what is replicated.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <map>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "support/aof.h"
#include "support/client.h"
#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/ordeals.h"
#include "support/reply.h"
#include "support/resp3.h"
#include "support/server.h"
#include "support/source_files.h"

namespace turnstile::testing {
namespace {

// The wall clock in milliseconds, for when no server is running.
int64_t Now() {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  return std::chrono::duration_cast<Milliseconds>(now).count();
}

class RestartSurvivalTest : public ::testing::TestWithParam<SurvivalScenario> {};

TEST_P(RestartSurvivalTest, EveryHoldIsUnchanged) {
  Server server({.args = GetParam().args});
  Client client = server.Connect();
  std::string bytes(256, '\0');  // the longest owner, with every possible byte
  std::iota(bytes.begin(), bytes.end(), '\0');
  const Commands story = {
      {"LOCK.ACQUIRE", "fresh", "me", "PX", "60000"},
      {"LOCK.ACQUIRE", "again", "me", "PX", "60000"},
      {"LOCK.ACQUIRE", "again", "me", "EX", "50"},
      {"LOCK.ACQUIRE", "touched", "me", "EX", "60"},
      {"LOCK.TOUCH", "touched", "me", "PX", "70000"},
      {"LOCK.ACQUIRE", bytes, bytes, "PX", "60000"},
      {"LOCK.ACQUIRE", "set back", "me", "PX", "60000"},
      {"PERSIST", "set back"},
      {"LOCK.ACQUIRE", "old name", "me", "PX", "60000"},
      {"RENAME", "old name", "new name"},
      {"SET", "plain", "me", "PX", "60000"},
      {"SET", "converted", "me"},
      {"LOCK.ACQUIRE", "converted", "me", "PX", "60000"},
      {"LOCK.ACQUIRE", "released", "me", "PX", "60000"},
      {"LOCK.RELEASE", "released", "me"},
      {"SELECT", "3"},
      {"LOCK.ACQUIRE", "elsewhere", "me", "PX", "60000"},
      {"SELECT", "0"},
  };
  for (const Command& command : story) EXPECT_FALSE(client.Do(command).IsError()) << command[0];
  const std::vector<std::string> keys = {"fresh",    "again", "touched",   "set back",
                                         "new name", "plain", "converted", bytes};
  std::map<std::string, Reply> before;
  for (const std::string& key : keys) before[key] = Kept(client, key);
  const Reply size = client.Do("DBSIZE");
  EXPECT_EQ(size, Reply::Int(static_cast<int64_t>(before.size())));
  const Reply digest = client.Do("DEBUG", "DIGEST");
  client.Do("SELECT", 3);
  const Reply elsewhere = Kept(client, "elsewhere");

  GetParam().go_through(server);

  client = server.Connect();
  EXPECT_EQ(client.Do("DEBUG", "DIGEST"), digest) << "all databases";
  EXPECT_EQ(client.Do("DBSIZE"), size);
  for (const auto& [key, kept] : before) EXPECT_EQ(Kept(client, key), kept) << Quoted(key);
  client.Do("SELECT", 3);
  EXPECT_EQ(Kept(client, "elsewhere"), elsewhere);

  // And the locks work.
  client.Do("SELECT", 0);
  int64_t last = 0;
  for (const auto& [key, kept] : before) {
    const std::string owner = key == bytes ? bytes : "me";
    const Reply token = kept.Field("token");
    if (key != "plain") {
      EXPECT_EQ(client.Do("LOCK.FENCE", key, token.integer), Reply::Int(1)) << Quoted(key);
      EXPECT_EQ(client.Do("LOCK.ACQUIRE", key, owner, "PX", kMinute), token) << Quoted(key);
    }
    EXPECT_EQ(client.Do("LOCK.ACQUIRE", key, "stranger", "PX", 1), Reply::Nil()) << Quoted(key);
    EXPECT_EQ(client.Do("LOCK.TOUCH", key, owner, "PX", kMinute), Reply::Int(1)) << Quoted(key);
    EXPECT_EQ(client.Do("LOCK.RELEASE", key, owner), Reply::Int(1)) << Quoted(key);
    last = std::max(last, token.integer);
  }
  EXPECT_GT(MustAcquire(client, "fresh", "stranger"), last);
}

INSTANTIATE_TEST_SUITE_P(Every, RestartSurvivalTest, ::testing::ValuesIn(SurvivalScenarios()),
                         [](const auto& test) { return test.param.name; });

// Leases end at absolute times, also while the server is down.
TEST(PersistenceTest, LeaseEndsWhileServerIsDown) {
  const std::vector<std::vector<std::string>> kinds = {{}, Aof("no"), Aof("yes")};
  for (const auto& args : kinds) {
    Server server({.args = args});
    Client client = server.Connect();
    const int64_t token = MustAcquire(client, "job", "me", 300);
    const int64_t end = EndOf(client, "job");
    MustAcquire(client, "lasting", "me");
    EXPECT_EQ(args.empty() ? client.Do("SAVE") : Reply::Ok(), Reply::Ok());
    server.Kill9();
    ASSERT_TRUE(Eventually([end] { return Now() > end; }));
    ASSERT_TRUE(server.Restart());
    client = server.Connect();
    EXPECT_EQ(client.Do("LOCK.INFO", "job"), Reply::Nil());
    EXPECT_EQ(client.Do("LOCK.FENCE", "job", token), Reply::Int(0));
    EXPECT_EQ(client.Do("LOCK.TOUCH", "job", "me", "PX", kMinute), Reply::Int(0));
    EXPECT_EQ(client.Do("LOCK.RELEASE", "job", "me"), Reply::Int(0));
    EXPECT_EQ(client.Do("DBSIZE"), Reply::Int(1)) << "the one that lasts";
    EXPECT_GT(MustAcquire(client, "job", "stranger"), token);
  }
}

// The server saves automatically after a number of changes. They count even if nothing is
// replicated.
TEST(SavePointTest, ChangesCountTowardsSaveWithoutConsumers) {
  Server server({.args = {"--save", "3600 1000000"}});
  Client client = server.Connect();
  const auto changes = [&] {
    return std::stoll(InfoField(client, "persistence", "rdb_changes_since_last_save"));
  };
  EXPECT_EQ(InfoField(client, "replication", "repl_backlog_active"), "0");
  int64_t before = changes();
  const auto expect_change = [&](const Command& command) {
    EXPECT_FALSE(client.Do(command).IsError()) << command[0];
    EXPECT_GT(changes(), before) << command[0];
    before = changes();
  };
  expect_change({"LOCK.ACQUIRE", "job", "alice", "PX", "60000"});
  expect_change({"LOCK.ACQUIRE", "job", "alice", "PX", "60000"});
  expect_change({"LOCK.TOUCH", "job", "alice", "PX", "60000"});
  expect_change(
      {"EVAL", "return redis.call('LOCK.TOUCH', KEYS[1], 'alice', 'PX', 60000)", "1", "job"});
  Client waiter = server.Connect();
  waiter.Send("LOCK.ACQUIRE", "job", "bob", "PX", kMinute, "WAIT", kMinute);
  EXPECT_TRUE(Eventually([&] {
    const Reply info = client.Do("LOCK.INFO", "job");
    return info.IsArray() && info.Field("waiting").integer == 1;
  }));
  EXPECT_EQ(client.Do("LOCK.RELEASE", "job", "alice"), Reply::Int(1));
  EXPECT_TRUE(waiter.Read().IsInteger());
  EXPECT_GE(changes(), before + 2) << "released, and handed over";
  before = changes();
  expect_change({"LOCK.RELEASE", "job", "bob"});
}

// --- The AOF -----------------------------------------------------------------------------------

// Starts a server on an AOF written by this test.
void StartOn(Server& server, const Commands& commands) {
  server.Stop();
  std::ofstream file(server.dir() + "/appendonly.aof", std::ios::binary);
  for (const Command& command : commands) file << EncodeCommand(command);
  file.close();
  server.options().args = Aof("no");
  ASSERT_TRUE(server.Restart());
}

std::string LastToken(Client& client) {
  const std::string info = client.Do("INFO", "turnstile").text;
  const std::string field = "turnstile_last_token:";
  const size_t start = info.find(field) + field.size();
  return info.substr(start, info.find('\r', start) - start);
}

// The floor is written before the first token after each start, or right at the start if a lock or
// a floor is known.
TEST(AofTest, FloorPrecedesFirstTokenAfterEachStart) {
  Server server({.args = Aof("no")});
  Client client = server.Connect();
  EXPECT_EQ(ReadAof(server.dir()), Commands{}) << "nobody has locked anything yet";
  const std::string first = LastToken(client);
  MustAcquire(client, "job", "me");
  Commands expected = ReadAof(server.dir());
  std::erase_if(expected, [](const Command& command) {  // the order differs between engines
    return command[0] == "SELECT" || command[0] == "MULTI" || command[0] == "EXEC";
  });
  ASSERT_EQ(expected.size(), 2U);
  EXPECT_EQ(expected.at(0), (Command{"LOCK.FACT", "FLOOR", first}));
  EXPECT_EQ(expected.at(1)[0], "LOCK.HELD");
  MustAcquire(client, "other", "me");
  EXPECT_EQ(LastInAof(server.dir())[0], "LOCK.HELD") << "only once";
  Crash(server);
  client = server.Connect();
  EXPECT_EQ(LastInAof(server.dir()), (Command{"LOCK.FACT", "FLOOR", LastToken(client)}));
  EXPECT_GT(std::stoll(LastToken(client)), std::stoll(first));
}

TEST(AofTest, RewriteWritesOneFactPerLock) {
  Server server({.args = Aof("no")});
  Client client = server.Connect();
  const int64_t token = MustAcquire(client, "job", "me");
  const int64_t since = EndOf(client, "job") - kMinute;
  EXPECT_EQ(client.Do("LOCK.TOUCH", "job", "me", "PX", 70000), Reply::Int(1));
  const int64_t end = EndOf(client, "job");
  MustAcquire(client, "gone", "me");
  EXPECT_EQ(client.Do("LOCK.RELEASE", "gone", "me"), Reply::Int(1));
  RewriteAof(server);
  const Commands base = {{"SELECT", "0"},
                         HeldCommand("job", "me", {token, since, end}),
                         {"PEXPIREAT", "job", std::to_string(end)}};
  Commands aof = ReadAof(server.dir());
  ASSERT_GE(aof.size(), base.size());
  EXPECT_EQ(Commands(aof.begin(), aof.begin() + 3), base);

  // What follows the rewrite is appended to it.
  EXPECT_EQ(client.Do("LOCK.RELEASE", "job", "me"), Reply::Int(1));
  aof = ReadAof(server.dir());
  EXPECT_EQ(aof.back(), (Command{"LOCK.RELEASE", "job", "me"}));
  Crash(server);
  client = server.Connect();
  EXPECT_EQ(client.Do("DBSIZE"), Reply::Int(0));
}

// Facts about leases that ended long ago are applied nevertheless: the primary checked its clock
// when it decided.
TEST(AofTest, FactsOfEndedLeasesAreApplied) {
  const Commands written = {
      {"SELECT", "0"},
      {"LOCK.HELD", "released", "me", "5 1000 2000"},
      {"LOCK.RELEASE", "released", "me"},
      {"LOCK.HELD", "renewed", "me", "6 1000 2000"},
      {"LOCK.HELD", "renewed", "me", "6 1000 7258118400000"},
      {"LOCK.HELD", "taken over", "me", "7 1000 2000"},
      {"DEL", "taken over"},
      {"LOCK.HELD", "taken over", "you", "8 3000 7258118400000"},
      {"SET", "converted", "me"},
      {"LOCK.HELD", "converted", "me", "9 3000 7258118400000"},
      {"LOCK.HELD", "not yours", "me", "10 3000 7258118400000"},
      {"LOCK.RELEASE", "not yours", "you"},
  };
  Server server;
  StartOn(server, written);
  Client client = server.Connect();
  const std::map<std::string, std::pair<std::string, int64_t>> held = {{"renewed", {"me", 6}},
                                                                       {"taken over", {"you", 8}},
                                                                       {"converted", {"me", 9}},
                                                                       {"not yours", {"me", 10}}};
  for (const auto& [key, holder] : held) {
    const Reply kept = Kept(client, key);
    EXPECT_EQ(kept.Field("owner"), Reply::Str(holder.first)) << key;
    EXPECT_EQ(kept.Field("token"), Reply::Int(holder.second)) << key;
    EXPECT_EQ(kept.Field("end"), Reply::Int(7258118400000)) << key;
  }
  EXPECT_EQ(client.Do("EXISTS", "released"), Reply::Int(0));
  EXPECT_EQ(client.Do("DBSIZE"), Reply::Int(4));

  // Nothing of the released lock is left that would have to be removed now.
  Commands expected = written;
  expected.insert(expected.end(), {{"SELECT", "0"}, {"LOCK.FACT", "FLOOR", LastToken(client)}});
  EXPECT_EQ(ReadAof(server.dir()), expected);
}

// An invalid fact, for example from a damaged file, changes nothing and stops nothing.
TEST(AofTest, InvalidFactsAreIgnored) {
  const std::string future = "7258118400000";
  Server server;
  StartOn(server, {
                      {"SELECT", "0"},
                      {"LOCK.FACT", "HELD", "a", "me", "5", "1000", future},
                      {"LOCK.HELD", "b", "me", "9007199254740992 1000 " + future},
                      {"LOCK.HELD", "i", "me", "0 1000 " + future},
                      {"LOCK.HELD", "j", "", "5 1000 " + future},
                      {"LOCK.HELD", "k", "me", "5 1000"},
                      {"LOCK.HELD", "l", "me", "5 1000 " + future + " "},
                      {"LOCK.HELD", "m", "me", "5 1000 " + future, "more"},
                      {"LOCK.FACT", "FLOOR", "9007199254740992"},
                      {"LOCK.FACT", "FLOOR", "x"},
                      {"LOCK.FACT", "NONSENSE", "x"},
                      {"LOCK.ACQUIRE", "i", "me", "PX", "60000"},
                      {"LOCK.TOUCH", "i", "me", "PX", "60000"},
                      {"LOCK.HELD", "good", "me", "6 1000 " + future},
                  });
  Client client = server.Connect();
  EXPECT_EQ(client.Do("EXISTS", "good"), Reply::Int(1));
  EXPECT_EQ(client.Do("DBSIZE"), Reply::Int(1));
  EXPECT_LT(MustAcquire(client, "job", "me"), 1000 * (ServerNow(client) + kMinute));
}

// --- DUMP and RESTORE --------------------------------------------------------------------------

TEST(DumpRestoreTest, LeaseInPayloadOverridesTtl) {
  Server server;
  Server other;
  Client client = server.Connect();
  Client elsewhere = other.Connect();
  MustAcquire(client, "job", "me");
  client.Do("LOCK.TOUCH", "job", "me", "PX", 2 * kMinute);
  const Reply kept = Kept(client, "job");
  const int64_t end = EndOf(client, "job");
  const std::string payload = client.Do("DUMP", "job").text;
  const Commands ttls = {{"0"},
                         {"5000"},
                         {"99999999"},
                         {std::to_string(end), "ABSTTL"},
                         {std::to_string(end - 5000), "ABSTTL"},
                         {std::to_string(end + 5000), "ABSTTL"}};
  for (Client* to : {&client, &elsewhere}) {
    for (const Command& ttl : ttls) {
      to->Do("DEL", "job");
      Command restore = {"RESTORE", "job", ttl[0], payload};
      restore.insert(restore.end(), ttl.begin() + 1, ttl.end());
      EXPECT_EQ(to->Do(restore), Reply::Ok());
      EXPECT_EQ(Kept(*to, "job"), kept) << ttl[0];

      EXPECT_TRUE(to->Do(restore).IsError("BUSYKEY"));
      EXPECT_EQ(to->Do("LOCK.RELEASE", "job", "me"), Reply::Int(1));
      EXPECT_GT(MustAcquire(*to, "job", "you"), kept.Field("token").integer);
      restore.push_back("REPLACE");
      EXPECT_EQ(to->Do(restore), Reply::Ok());
      EXPECT_EQ(Kept(*to, "job"), kept) << ttl[0];
      EXPECT_EQ(to->Do("DUMP", "job"), Reply::Str(payload));
      EXPECT_EQ(to->Do("LOCK.RELEASE", "job", "you"), Reply::Int(0));
    }
  }
}

TEST(DumpRestoreTest, EndedLeaseIsNotRevived) {
  Server server;
  Client client = server.Connect();
  const int64_t token = MustAcquire(client, "job", "me", 2000);
  const int64_t end = EndOf(client, "job");
  const std::string payload = client.Do("DUMP", "job").text;
  ASSERT_TRUE(Eventually([&] { return ServerNow(client) > end; }));
  for (const char* ttl : {"0", "60000"}) {
    EXPECT_EQ(client.Do("RESTORE", "job", ttl, payload, "REPLACE"), Reply::Ok());
    EXPECT_EQ(client.Do("LOCK.INFO", "job"), Reply::Nil());
    EXPECT_EQ(client.Do("EXISTS", "job"), Reply::Int(0)) << "the TTL follows the lease";
    EXPECT_EQ(client.Do("LOCK.TOUCH", "job", "me", "PX", kMinute), Reply::Int(0));

    // In one transaction with what follows, before the TTL can be reverted.
    client.Do("MULTI");
    client.Do("RESTORE", "job", ttl, payload, "REPLACE");
    client.Do("LOCK.FENCE", "job", token);
    client.Do("LOCK.TOUCH", "job", "me", "PX", kMinute);
    client.Do("LOCK.RELEASE", "job", "me");
    client.Do("LOCK.INFO", "job");
    client.Do("LOCK.ACQUIRE", "job", "you", "PX", kMinute);
    const Reply done = client.Do("EXEC");
    ASSERT_EQ(done.elements.size(), 6U) << done;
    EXPECT_EQ(
        Reply::Array({done.elements.begin(), done.elements.end() - 1}),
        Reply::Array({Reply::Ok(), Reply::Int(0), Reply::Int(0), Reply::Int(0), Reply::Nil()}));
    EXPECT_GT(done.elements.at(5).integer, token);
    EXPECT_EQ(client.Do("LOCK.RELEASE", "job", "you"), Reply::Int(1));
  }
}

// --- Removing the module ------------------------------------------------------------------------

// The script that deletes all locks, as docs/operations.md has it.
std::string DocumentedScript() {
  for (const std::string& line : ReadSource("docs/operations.md")) {
    const size_t at = line.find("redis-cli EVAL \"");
    if (at != std::string::npos) return line.substr(at + 16, line.rfind('"') - at - 16);
  }
  return "";
}

// The procedure of docs/operations.md, after a trial in a server that runs.
TEST(ModuleRemovalTest, ModuleCanBeTriedInRunningServer) {
  Server server({.args = {"--appendonly", "yes"}, .load_module = false});
  Client client = server.Connect();
  EXPECT_EQ(client.Do("SET", "kept", "data"), Reply::Ok());
  EXPECT_EQ(client.Do("MODULE", "LOAD", ModulePath(), "token-margin-ms", 0), Reply::Ok());
  MustAcquire(client, "job", "alice");
  MustAcquire(client, "other", "bob");
  EXPECT_EQ(client.Do("LOCK.RELEASE", "job", "alice"), Reply::Int(1));
  EXPECT_FALSE(client.Do("EVAL", DocumentedScript(), 0).IsError());
  EXPECT_TRUE(Eventually([&] {
    return InfoField(client, "turnstile", "turnstile_locks") == "0" &&
           InfoField(client, "turnstile", "turnstile_clock_lead_ms") == "0";
  }));
  EXPECT_FALSE(client.Do("BGREWRITEAOF").IsError());
  EXPECT_TRUE(Eventually([&] {
    return InfoField(client, "persistence", "aof_rewrite_in_progress") == "0" &&
           InfoField(client, "persistence", "aof_rewrite_scheduled") == "0";
  }));
  ASSERT_TRUE(server.Restart());
  client = server.Connect();
  EXPECT_TRUE(client.Do("LOCK.HELP").IsError("ERR unknown command"));
  EXPECT_EQ(client.Do("GET", "kept"), Reply::Str("data"));
}

// The same with many locks, both forms of AOF, and RDB files.
TEST(ModuleRemovalTest, FilesLoadWithoutModuleAfterRemoval) {
  const std::string script = DocumentedScript();
  ASSERT_NE(script, "");
  for (const char* preamble : {"yes", "no"}) {
    SCOPED_TRACE(preamble);
    Server server({.args = {"--appendonly", "yes", "--aof-use-rdb-preamble", preamble,
                            "--turnstile.token-margin-ms", "0"}});
    {
      Client client = server.Connect();
      for (int i = 0; i < 2500; i++) MustAcquire(client, "lock:" + std::to_string(i), "alice");
      MustAcquire(client, "released", "alice");
      client.Do("LOCK.RELEASE", "released", "alice");
      client.Do("SET", "kept", "data");
      EXPECT_FALSE(client.Do("EVAL", script, 0).IsError()) << script;
      EXPECT_TRUE(Eventually([&] {
        return InfoField(client, "turnstile", "turnstile_locks") == "0" &&
               InfoField(client, "turnstile", "turnstile_clock_lead_ms") == "0";
      }));
      EXPECT_EQ(client.Do("DBSIZE"), Reply::Int(1));
      EXPECT_FALSE(client.Do("BGREWRITEAOF").IsError());
      EXPECT_TRUE(Eventually([&] {
        return InfoField(client, "persistence", "aof_rewrite_in_progress") == "0" &&
               InfoField(client, "persistence", "aof_rewrite_scheduled") == "0";
      }));
      EXPECT_EQ(client.Do("SAVE"), Reply::Ok());
    }
    server.options().load_module = false;
    server.options().args.resize(4);
    for (const char* from : {"AOF", "RDB"}) {
      SCOPED_TRACE(from);
      if (from == std::string("RDB")) server.options().args = {"--appendonly", "no"};
      ASSERT_TRUE(server.Restart());
      Client client = server.Connect();
      EXPECT_TRUE(client.Do("LOCK.HELP").IsError("ERR unknown command"));
      EXPECT_EQ(client.Do("GET", "kept"), Reply::Str("data"));
    }
  }
}

}  // namespace
}  // namespace turnstile::testing
