// Loading the module, its settings, INFO, and the memory used by locks.

#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <regex>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/server.h"
#include "support/source_files.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

class ConfigTest : public SharedServerTest<ConfigTest> {
 protected:
  Reply Do(const Command& command) { return client_.Do(command); }

  void Set(const std::string& name, int64_t value) {
    EXPECT_EQ(client_.Do("CONFIG", "SET", name, value), Reply::Ok());
  }
  ~ConfigTest() override { Set("turnstile.max-lease-ms", 86400000); }
};

std::vector<std::string> LinesWith(const std::string& text, std::string_view part) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    if (line.find(part) != std::string::npos) lines.push_back(line);
  }
  return lines;
}

// A number in the server's INFO.
int64_t InfoNumber(Client& client, const std::string& section, const std::string& field) {
  const std::string info = client.Do("INFO", section).text;
  std::smatch match;
  if (std::regex_search(info, match, std::regex("\\n" + field + ":(-?\\d+)\r\n"))) {
    return std::stoll(match[1]);
  }
  ADD_FAILURE() << "no " << field << " in: " << info;
  return 0;
}

// The entry of the module in MODULE LIST.
Reply ModuleEntry(Client& client) {
  const Reply modules = client.Do("MODULE", "LIST");
  Reply entry;
  int entries = 0;
  for (const Reply& module : modules.elements) {  // some servers come with modules of their own
    if (module.Field("name") != Reply::Str("turnstile")) continue;
    entry = module;
    ++entries;
  }
  EXPECT_EQ(entries, 1) << modules;
  return entry;
}

// The version of the project in CMakeLists.txt.
struct Version {
  std::string text;
  int64_t number = 0;  // as modules report it: major, minor and patch, two digits each
};

Version ProjectVersion() {
  const std::regex version(R"(\s*VERSION ((\d+)\.(\d+)\.(\d+))\b.*)");
  for (const std::string& line : ReadSource("CMakeLists.txt")) {
    std::smatch match;
    if (!std::regex_match(line, match, version)) continue;
    return {match[1],
            std::stoll(match[2]) * 10000 + std::stoll(match[3]) * 100 + std::stoll(match[4])};
  }
  ADD_FAILURE() << "no VERSION in CMakeLists.txt";
  return {};
}

// --- Settings ---------------------------------------------------------------------------------

TEST_F(ConfigTest, MaxLeaseTakesEffectAtOnce) {
  MustAcquire(client_, "job", "alice", 86400000);
  Set("turnstile.max-lease-ms", 5999);
  for (const char* name : {"LOCK.ACQUIRE", "LOCK.TOUCH"}) {
    EXPECT_TRUE(
        Do({name, "job", "alice", "PX", "6000"})
            .IsError("ERR PX must be an integer from 1 to 5999 (turnstile.max-lease-ms) in"));
    EXPECT_TRUE(Do({name, "job", "alice", "EX", "6"})
                    .IsError("ERR EX must be an integer from 1 to 5 (turnstile.max-lease-ms) in"));
  }
  EXPECT_GT(Do({"PTTL", "job"}).integer, 5999) << "what was granted stays granted";
  EXPECT_EQ(Do({"LOCK.TOUCH", "job", "alice", "PX", "5999"}), Reply::Int(1));
  EXPECT_EQ(Do({"LOCK.TOUCH", "job", "alice", "EX", "5"}), Reply::Int(1));

  // The maximum of all: ten years.
  Set("turnstile.max-lease-ms", 315360000000);
  EXPECT_EQ(Do({"LOCK.TOUCH", "job", "alice", "PX", "315360000000"}), Reply::Int(1));
  EXPECT_GT(Do({"PTTL", "job"}).integer, 315359000000);
  EXPECT_EQ(Do({"LOCK.TOUCH", "job", "alice", "EX", "315360000"}), Reply::Int(1));
  EXPECT_GT(HolderField(Do({"LOCK.INFO", "job"}), "lease-left-ms").integer, 315359000000);
  EXPECT_TRUE(Do({"LOCK.TOUCH", "job", "alice", "PX", "315360000001"}).IsError("ERR PX must be"));
}

TEST_F(ConfigTest, MaxHoldersTakesEffectAtOnce) {
  for (const Command& mode : Commands{{"SHARED"}, {"LIMIT", "9"}}) {
    const auto acquire = [&](const std::string& owner, const Command& options = {}) {
      Command command = {"LOCK.ACQUIRE", "job", owner, "PX", "60000"};
      command.insert(command.end(), mode.begin(), mode.end());
      command.insert(command.end(), options.begin(), options.end());
      return command;
    };
    Set("turnstile.max-holders", 100000);
    for (const char* owner : {"a", "b", "c"}) EXPECT_TRUE(Do(acquire(owner)).IsInteger());
    Set("turnstile.max-holders", 2);
    EXPECT_EQ(Do(acquire("d")), Reply::Nil());
    EXPECT_TRUE(Do(acquire("a")).IsInteger()) << "the holder reacquires";
    EXPECT_EQ(Do({"LOCK.TOUCH", "job", "b", "PX", "60000"}), Reply::Int(1));

    // Waiters are served by the same rule, in order.
    Waiter first(server());
    Waiter second(server());
    first.Send(acquire("d", {"WAIT", "60000"}));
    AwaitBlocked(client_, first.id());
    second.Send(acquire("e", {"WAIT", "60000"}));
    AwaitBlocked(client_, second.id());
    EXPECT_EQ(Do({"LOCK.RELEASE", "job", "a"}), Reply::Int(1));
    EXPECT_FALSE(first.HasReply());
    EXPECT_EQ(Do({"LOCK.RELEASE", "job", "b"}), Reply::Int(1));
    EXPECT_TRUE(first.Read().IsInteger());
    EXPECT_FALSE(second.HasReply());
    EXPECT_EQ(Do(acquire("f")), Reply::Nil());
    EXPECT_EQ(Do({"LOCK.RELEASE", "job", "c"}), Reply::Int(1));
    EXPECT_TRUE(second.Read().IsInteger());
    EXPECT_EQ(Do({"LOCK.INFO", "job"}).Field("holders").elements.size(), 2U);
    EXPECT_EQ(Do({"DEL", "job"}), Reply::Int(1));
  }
  Set("turnstile.max-holders", 10000);
}

TEST_F(ConfigTest, InvalidValuesAreRefused) {
  for (const char* name :
       {"turnstile.max-lease-ms", "turnstile.token-margin-ms", "turnstile.max-holders"}) {
    const Reply before = Do({"CONFIG", "GET", name});
    for (const char* value :
         {"", "-1", "ten", "1e6", "0x1000", "9223372036854775808", "999999999999999"}) {
      EXPECT_TRUE(Do({"CONFIG", "SET", name, value}).IsError("ERR CONFIG SET failed")) << value;
    }
    EXPECT_EQ(Do({"CONFIG", "GET", name}), before);
  }
  // One invalid setting leaves the others unchanged.
  EXPECT_TRUE(
      Do({"CONFIG", "SET", "turnstile.max-lease-ms", "5000", "turnstile.token-margin-ms", "600001"})
          .IsError("ERR CONFIG SET failed"));
  const std::string name = "turnstile.max-lease-ms";
  EXPECT_EQ(Do({"CONFIG", "GET", name}).Field(name), Reply::Str("86400000"));
  EXPECT_TRUE(Do({"CONFIG", "SET", "turnstile.nonsense", "1"}).IsError("ERR Unknown option"));
}

TEST(ModuleLoadTest, SettingsCanBeGivenOnCommandLine) {
  Server server({.args = {"--turnstile.max-lease-ms", "5000", "--turnstile.token-margin-ms", "0"}});
  Client client = server.Connect();
  const Reply settings = client.Do("CONFIG", "GET", "turnstile.*");
  EXPECT_EQ(settings.Field("turnstile.max-lease-ms"), Reply::Str("5000"));
  EXPECT_EQ(settings.Field("turnstile.token-margin-ms"), Reply::Str("0"));
  EXPECT_TRUE(client.Do("LOCK.ACQUIRE", "job", "alice", "PX", 5001).IsError("ERR PX must be"));
  MustAcquire(client, "job", "alice", 5000);
  // Without a margin tokens start at the wall clock.
  EXPECT_LE(InfoNumber(client, "turnstile", "turnstile_clock_lead_ms"), 0);
}

TEST(ModuleLoadTest, InvalidSettingPreventsStart) {
  for (const auto& [name, value] :
       {std::pair("max-lease-ms", "999"), std::pair("max-lease-ms", "315360000001"),
        std::pair("max-lease-ms", "soon"), std::pair("token-margin-ms", "600001"),
        std::pair("token-margin-ms", "-1")}) {
    Server server({.args = {std::string("--turnstile.") + name, value}, .must_start = false});
    SCOPED_TRACE(server.Log());
    EXPECT_FALSE(server.running());
    EXPECT_EQ(server.exit_code(), 1);
    // The server names the setting; the module adds whose it is.
    EXPECT_FALSE(LinesWith(server.Log(), name).empty());
    EXPECT_FALSE(
        LinesWith(server.Log(), "cannot be loaded: a turnstile.* setting is invalid").empty());
  }
}

TEST(ModuleLoadTest, UnknownSettingPreventsStart) {
  Server server({.args = {"--turnstile.nonsense", "1"}, .must_start = false});
  EXPECT_FALSE(server.running());
  EXPECT_EQ(server.exit_code(), 1);
}

// --- Loading ----------------------------------------------------------------------------------

const std::string kDefaultSettings =
    "max-lease-ms 86400000, token-margin-ms 30000, failover-grace-ms 0, max-waiters 5000, "
    "max-queued 100000, max-waiters-per-user 0, max-holders 10000, plain-locks yes";

TEST_F(ConfigTest, LoadLogsOneLineWithVersion) {
  const Version version = ProjectVersion();
  const std::vector<std::string> lines = LinesWith(server().Log(), "<turnstile>");
  ASSERT_EQ(lines.size(), 1U) << server().Log();
  const std::string engine = EngineOf(client_);
  std::string expected = "turnstile " + version.text + " on " + engine;
  if (engine.starts_with("Valkey 8.1")) {
    expected += "; do not use COPY with DB on it, see valkey-io/valkey pull 4024";
  }
  expected += ": " + kDefaultSettings;
  EXPECT_TRUE(lines[0].ends_with(expected)) << lines[0] << "\ninstead of " << expected;

  const Reply entry = ModuleEntry(client_);
  EXPECT_EQ(entry.Field("name"), Reply::Str("turnstile"));
  EXPECT_EQ(entry.Field("ver"), Reply::Int(version.number));
}

TEST_F(ConfigTest, ModuleCannotBeUnloaded) {
  MustAcquire(client_, "job", "alice");
  EXPECT_TRUE(Do({"MODULE", "UNLOAD", "turnstile"}).IsError("ERR Error unloading module"));
  EXPECT_EQ(Do({"LOCK.RELEASE", "job", "alice"}), Reply::Int(1));
}

// --- Arguments of the module --------------------------------------------------------------------

std::string SettingOf(Client& client, const std::string& name) {
  return client.Do("CONFIG", "GET", "turnstile." + name).Field("turnstile." + name).text;
}

TEST(ModuleLoadTest, ModuleArgumentsAreSettings) {
  Server server(
      {.module_args = {"max-lease-ms", "5000", "TURNSTILE.Max-Waiters", "7", "plain-locks", "No"}});
  Client client = server.Connect();
  EXPECT_EQ(SettingOf(client, "max-lease-ms"), "5000");
  EXPECT_EQ(SettingOf(client, "max-waiters"), "7");
  EXPECT_EQ(SettingOf(client, "token-margin-ms"), "30000");
  EXPECT_EQ(SettingOf(client, "plain-locks"), "no");
  EXPECT_EQ(
      LinesWith(server.Log(),
                ": max-lease-ms 5000, token-margin-ms 30000, "
                "failover-grace-ms 0, max-waiters 7, max-queued 100000, max-waiters-per-user 0, "
                "max-holders 10000, plain-locks no")
          .size(),
      1U)
      << server.Log();
  EXPECT_TRUE(client.Do("LOCK.ACQUIRE", "job", "alice", "PX", 5001).IsError("ERR PX must be"));
  // They can be changed like any other setting.
  EXPECT_EQ(client.Do("CONFIG", "SET", "turnstile.max-waiters", 8), Reply::Ok());
  EXPECT_EQ(SettingOf(client, "max-waiters"), "8");
}

TEST(ModuleLoadTest, ConfigurationOverridesModuleArguments) {
  Server server({.args = {"--turnstile.max-waiters", "9"},
                 .module_args = {"max-waiters", "7", "token-margin-ms", "100"}});
  Client client = server.Connect();
  EXPECT_EQ(SettingOf(client, "max-waiters"), "9");
  EXPECT_EQ(SettingOf(client, "token-margin-ms"), "100");
}

TEST(ModuleLoadTest, InvalidModuleArgumentsAreRefused) {
  const std::string range = " must be an integer from 0 to 1000000 in plain digits, not ";
  const std::vector<std::pair<Command, std::string>> wrong = {
      {{"max-waiter", "7"},
       "unknown setting \"max-waiter\", expected one of: max-lease-ms token-margin-ms "
       "failover-grace-ms "
       "max-waiters max-queued max-waiters-per-user max-holders plain-locks"},
      {{"max-holders", "0"},
       "max-holders must be an integer from 1 to 100000 in plain digits, not \"0\""},
      {{"max-holders", "100001"}, "max-holders must be an integer from 1 to 100000 in plain"},
      {{"max-queued", "10000001"},
       "max-queued must be an integer from 0 to 10000000 in plain digits, not \"10000001\""},
      {{"reset-stats", "yes"}, "unknown setting \"reset-stats\", expected one of:"},
      {{"turnstile."}, "unknown setting \"turnstile.\", expected one of:"},
      {{"\x1b[31m"}, R"(unknown setting "\x1b[31m", expected one of:)"},
      {{"max-waiters"}, "max-waiters" + range + "\"\""},
      {{"max-waiters", "-1"}, "max-waiters" + range + "\"-1\""},
      {{"max-waiters", "1000001"}, "max-waiters" + range + "\"1000001\""},
      {{"max-waiters", "1\t"}, "max-waiters" + range + R"("1\x09")"},
      {{"max-waiters", "1", "max-lease-ms", "2000", "max-waiters", "1"},
       "max-waiters is given twice"},
      {{"plain-locks"}, "plain-locks must be yes or no, not \"\""},
      {{"plain-locks", "1"}, "plain-locks must be yes or no, not \"1\""},
      {{"plain-locks", "no", "turnstile.plain-locks", "no"}, "plain-locks is given twice"},
  };
  for (const auto& [args, why] : wrong) {
    Server server({.module_args = args, .must_start = false});
    EXPECT_FALSE(server.running());
    EXPECT_EQ(server.exit_code(), 1);
    EXPECT_EQ(LinesWith(server.Log(), "cannot be loaded: " + why).size(), 1U) << why << "\n"
                                                                              << server.Log();
  }
}

TEST(ModuleLoadTest, ConfigRewriteKeepsSettingsAndArguments) {
  std::string rewritten;
  {
    Server server({.args = {"--turnstile.token-margin-ms", "77"},
                   .config = "# ours\n",
                   .module_args = {"max-waiters", "7"}});
    Client client = server.Connect();
    EXPECT_EQ(client.Do("CONFIG", "SET", "turnstile.max-lease-ms", 5000), Reply::Ok());
    EXPECT_EQ(client.Do("CONFIG", "SET", "turnstile.reset-stats", "yes"), Reply::Ok());
    EXPECT_EQ(client.Do("CONFIG", "REWRITE"), Reply::Ok());
    std::ifstream file(server.dir() + "/server.conf");
    for (std::string line; std::getline(file, line);) {
      if (!line.starts_with("dir ") && !line.starts_with("port ")) rewritten += line + "\n";
    }
  }
  EXPECT_TRUE(LinesWith(rewritten, "reset-stats").empty()) << rewritten;
  Server server({.config = rewritten, .load_module = false});
  Client client = server.Connect();
  EXPECT_EQ(SettingOf(client, "max-lease-ms"), "5000");
  EXPECT_EQ(SettingOf(client, "token-margin-ms"), "77");
  EXPECT_EQ(SettingOf(client, "max-waiters"), "7");
}

TEST_F(ConfigTest, CanBeLoadedIntoRunningServer) {
  const std::string path = ModuleEntry(client_).Field("path").text;
  // Each refused load leaks what the C++ runtime inside the module allocates.
  Server other({.load_module = false, .environment = {"ASAN_OPTIONS=detect_leaks=0"}});
  Client client = other.Connect();
  EXPECT_TRUE(client.Do("LOCK.HELP").IsError("ERR unknown command"));
  EXPECT_TRUE(client.Do("MODULE", "LOAD", path, "argument").IsError("ERR Error loading"));
  EXPECT_FALSE(LinesWith(other.Log(), "unknown setting \"argument\", expected one of:").empty());
  EXPECT_TRUE(client.Do("MODULE", "LOADEX", path, "CONFIG", "turnstile.max-lease-ms", 5)
                  .IsError("ERR Error loading"));
  EXPECT_TRUE(client.Do("LOCK.HELP").IsError("ERR unknown command")) << "nothing is left of it";
  EXPECT_EQ(client.Do("MODULE", "LOADEX", path, "CONFIG", "turnstile.max-lease-ms", 5000),
            Reply::Ok());
  EXPECT_TRUE(client.Do("LOCK.ACQUIRE", "job", "alice", "PX", 5001).IsError("ERR PX must be"));
  MustAcquire(client, "job", "alice", 5000);
  EXPECT_TRUE(client.Do("MODULE", "LOAD", path).IsError("ERR Error loading")) << "a second time";
  EXPECT_EQ(client.Do("LOCK.RELEASE", "job", "alice"), Reply::Int(1));
}

// --- The log ------------------------------------------------------------------------------------

constexpr std::string_view kMayEvict = "the server may evict locks that are held";

TEST(LogTest, WarnsOnceThatLocksMayBeEvicted) {
  Server server({.args = {"--maxmemory", "1gb", "--maxmemory-policy", "volatile-lru"}});
  const auto lines = LinesWith(server.Log(), kMayEvict);
  ASSERT_EQ(lines.size(), 1U) << server.Log();
  EXPECT_NE(lines[0].find("maxmemory-policy volatile-lru "), std::string::npos) << lines[0];
  EXPECT_NE(lines[0].find(" # "), std::string::npos) << "a warning: " << lines[0];
}

TEST(LogTest, WarnsWhenSettingsMakeEvictionPossible) {
  Server server;
  Client client = server.Connect();
  const auto warnings = [&] { return LinesWith(server.Log(), kMayEvict).size(); };
  // Nobody is warned before there is a lock: this server may be a cache.
  EXPECT_EQ(client.Do("CONFIG", "SET", "maxmemory", "1gb", "maxmemory-policy", "allkeys-lru"),
            Reply::Ok());
  MustAcquire(client, "job", "alice");
  EXPECT_TRUE(Eventually([&] { return warnings() == 1; }));
  EXPECT_EQ(client.Do("CONFIG", "SET", "maxmemory-policy", "volatile-ttl"), Reply::Ok());
  EXPECT_TRUE(Eventually([&] { return warnings() == 2; }));
}

TEST(LogTest, OrdinaryCommandsLogNothing) {
  Server server;
  Client client = server.Connect();
  for (int i = 0; i < 100; i++) {
    MustAcquire(client, "job", "alice");
    client.Do("LOCK.ACQUIRE", "job", "bob", "PX", 0);
    client.Do("LOCK.ACQUIRE", "job", "bob", "PX", 1000);
    client.Do("LOCK.RELEASE", "job", "alice");
    client.Do("LOCK.FENCE", "job", 1, "THEN", "SET", "x", "y");
  }
  EXPECT_EQ(LinesWith(server.Log(), "<turnstile>").size(), 1U) << server.Log();
}

// --- INFO -------------------------------------------------------------------------------------

TEST_F(ConfigTest, InfoSectionShowsTokenClock) {
  const int64_t token = MustAcquire(client_, "job", "alice");
  EXPECT_EQ(InfoNumber(client_, "turnstile", "turnstile_last_token"), token);
  // How far the last token leads the clock; both values are rounded.
  const int64_t before = ServerNow(client_);
  const int64_t lead = InfoNumber(client_, "turnstile", "turnstile_clock_lead_ms");
  const int64_t after = ServerNow(client_);
  EXPECT_LE(lead, token / 1000 - before + 1);
  EXPECT_GE(lead, token / 1000 - after - 1);

  EXPECT_EQ(LinesWith(Do({"INFO"}).text, "turnstile_").size(), 0U) << "not in the short INFO";
  EXPECT_FALSE(LinesWith(Do({"INFO", "everything"}).text, "turnstile_last_token:").empty());
}

// --- Memory -----------------------------------------------------------------------------------

TEST_F(ConfigTest, MemoryUsageOfLockIsSmall) {
  MustAcquire(client_, "job", "a");
  const int64_t small = Do({"MEMORY", "USAGE", "job"}).integer;
  EXPECT_GE(small, 3 * 8 + 1) << "three numbers and an owner";
  EXPECT_LE(small, 200);
  MustAcquire(client_, "log", std::string(256, 'a'));
  const int64_t large = Do({"MEMORY", "USAGE", "log"}).integer;
  EXPECT_GE(large, small + 200);
  EXPECT_LE(large, small + 400);
}

TEST_F(ConfigTest, MemoryIsFreedHoweverLockEnds) {
  // At the first call of each command the server allocates 24 KB for its latency histogram.
  EXPECT_EQ(Do({"CONFIG", "SET", "latency-tracking", "no"}), Reply::Ok());
  const std::string owner(250, 'o');
  const auto used = [this] { return InfoNumber(client_, "memory", "used_memory"); };
  const auto each = [](const auto& action) {
    for (int i = 0; i < 1000; i++) action("lock:" + std::to_string(i));
  };
  // Every way in which a lock can end.
  const std::vector<Command> ends = {
      {"LOCK.RELEASE", "", owner}, {"DEL", ""}, {"SET", "", "x", "PX", "1"}};
  const auto before = used();
  for (const Command& end : ends) {
    SCOPED_TRACE(end[0]);
    each([&](const std::string& key) { MustAcquire(client_, key, owner); });
    const auto full = used();
    EXPECT_GT(full - before, 1000 * 250) << "the module allocates from the server";
    each([&](const std::string& key) { MustAcquire(client_, key, owner, 90000); });
    EXPECT_LT(used() - full, 20000) << "asking again takes nothing more";
    each([&](const std::string& key) {
      Command command = end;
      command[1] = key;
      Do(command);
    });
    EXPECT_TRUE(Eventually([&] {
      return Do({"DBSIZE"}) == Reply::Int(0) && used() - before < (full - before) / 5;
    })) << used() - before
        << " of " << full - before;
  }
}

}  // namespace
}  // namespace turnstile::testing
