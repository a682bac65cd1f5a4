// Differences between servers: which ones the module supports and refuses, and which features it
// uses where available.

#include <dlfcn.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "support/client.h"
#include "support/lock_test.h"
#include "support/reply.h"
#include "support/server.h"

namespace turnstile::testing {
namespace {

// --- The server that runs the tests -----------------------------------------------------------

class EngineTest : public SharedServerTest<EngineTest> {
 protected:
  std::set<std::string> Texts(const Command& command) {
    const std::vector<std::string> texts = client_.Do(command).Texts();
    return {texts.begin(), texts.end()};
  }
};

TEST_F(EngineTest, CommandsAreInAclCategoriesIfSupported) {
  const bool may = !EngineOf(client_).starts_with("Redis 7.0");
  EXPECT_EQ(Texts({"ACL", "CAT"}).count("lock"), may ? 1U : 0U);
  // Not with ACL CAT lock: Redict leaves out commands of modules.
  using Categories = std::set<std::string>;
  const auto categories_of = [&](const char* command) {
    constexpr size_t kAclCategories = 6;
    const Reply info = client_.Do("COMMAND", "INFO", command).elements.at(0);
    const std::vector<std::string> texts = info.elements.at(kAclCategories).Texts();
    return Categories(texts.begin(), texts.end());
  };
  const std::map<const char*, Categories> expected = {
      {"LOCK.ACQUIRE", {"@lock", "@write", "@fast", "@blocking"}},
      {"LOCK.RELEASE", {"@lock", "@write", "@fast"}},
      {"LOCK.TOUCH", {"@lock", "@write", "@fast"}},
      {"LOCK.FENCE", {"@lock", "@write", "@slow"}},
      {"LOCK.INFO", {"@lock", "@read", "@fast"}},
      {"LOCK.HELP", {"@lock", "@fast"}},
      {"LOCK.FACT", {}},
      {"LOCK.HELD", {}},
      {"LOCK.PROBE", {}},
  };
  for (const auto& [command, categories] : expected) {
    EXPECT_EQ(categories_of(command), may ? categories : Categories()) << command;
  }

  // The effect on a user's permissions.
  ASSERT_EQ(client_.Do("ACL", "SETUSER", "worker", "on", "nopass", "~*",
                       may ? "+@lock" : "+lock.acquire", may ? "-@read" : "-lock.info"),
            Reply::Ok());
  Client worker = server().Connect();
  ASSERT_EQ(worker.Do("AUTH", "worker", "any"), Reply::Ok());
  MustAcquire(worker, "job", "alice");
  EXPECT_TRUE(worker.Do("LOCK.INFO", "job").IsError("NOPERM"));
}

// Valkey marks modules in its log that lack an entry point of its own.
TEST_F(EngineTest, ValkeyDoesNotCallModuleLegacy) {
  Server server({.args = {"--loadmodule", TURNSTILE_FORWARDER_MODULE}});
  const std::string log = server.Log();
  const bool is_valkey = EngineOf(client_).starts_with("Valkey");
  const std::string mark = "Legacy Redis Module ";
  EXPECT_EQ(log.find(mark + ModulePath()), std::string::npos) << log;
  // This one does lack it.
  EXPECT_EQ(log.find(mark + TURNSTILE_FORWARDER_MODULE) != std::string::npos, is_valkey) << log;
}

// Valkey 8.1 does not restore the database by itself (see valkey-io/valkey#4024).
TEST_F(EngineTest, MoveKeepsSelectedDatabaseOfClient) {
  ASSERT_EQ(client_.Do("SELECT", 3), Reply::Ok());
  ASSERT_EQ(client_.Do("SET", "thing", "here"), Reply::Ok());
  ASSERT_EQ(client_.Do("MOVE", "thing", 5), Reply::Int(1));
  ASSERT_EQ(client_.Do("SET", "next", "still here"), Reply::Ok());
  EXPECT_EQ(client_.Do("SELECT", 3), Reply::Ok());
  EXPECT_EQ(client_.Do("GET", "next"), Reply::Str("still here"));
  EXPECT_EQ(client_.Do("SELECT", 5), Reply::Ok());
  EXPECT_EQ(client_.Do("GET", "thing"), Reply::Str("here"));
}

// --- Servers that are refused -----------------------------------------------------------------

// Imitates a server as far as a module inspects it while loading.
class FakeServer {
 public:
  // `info`: the fields of INFO server. A version of 0: the server does not report one.
  FakeServer(int version, std::map<std::string, std::string> info) {
    version_ = version;
    info_ = std::move(info);
    log_.clear();
  }

  // The result of the module's OnLoad: 0 if it loads.
  int Load() {
    // A new copy each time, which knows nothing of other servers. It stays loaded, because its C++
    // runtime does not clean up.
    const std::string copy = ::testing::TempDir() + "turnstile-" + std::to_string(getpid()) + "-" +
                             std::to_string(loads_++) + ".so";
    std::filesystem::copy_file(ModulePath(), copy);
    void* module = dlopen(copy.c_str(), RTLD_NOW);
    std::filesystem::remove(copy);
    if (module == nullptr) {
      ADD_FAILURE() << dlerror();
      return -1;
    }
    using OnLoad = int(void*, void**, int);
    auto* on_load = reinterpret_cast<OnLoad*>(dlsym(module, "RedisModule_OnLoad"));
    // A module finds the function that finds all others at the beginning of the context.
    void* context[8] = {reinterpret_cast<void*>(&GetApi)};
    return on_load(static_cast<void*>(context), nullptr, 0);
  }

  const std::vector<std::string>& log() const { return log_; }

 private:
  static int GetApi(const char* name, void* target) {
    static const std::map<std::string_view, void*> kFunctions = {
        {"RedisModule_SetModuleAttribs", reinterpret_cast<void*>(&SetModuleAttribs)},
        {"RedisModule_Alloc", reinterpret_cast<void*>(&std::malloc)},
        {"RedisModule_Free", reinterpret_cast<void*>(&std::free)},
        {"RedisModule_Log", reinterpret_cast<void*>(&Log)},
        {"RedisModule_GetServerVersion", reinterpret_cast<void*>(&GetServerVersion)},
        {"RedisModule_GetServerInfo", reinterpret_cast<void*>(&GetServerInfo)},
        {"RedisModule_ServerInfoGetFieldC", reinterpret_cast<void*>(&ServerInfoGetFieldC)},
        {"RedisModule_FreeServerInfo", reinterpret_cast<void*>(&FreeServerInfo)},
    };
    const auto function = kFunctions.find(name);
    if (function == kFunctions.end()) return 1;
    if (version_ == 0 && function->first == "RedisModule_GetServerVersion") return 1;
    *static_cast<void**>(target) = function->second;
    return 0;
  }

  static void SetModuleAttribs(void* /*ctx*/, const char* /*name*/, int /*version*/, int /*api*/) {}
  static void Log(void* /*ctx*/, const char* level, const char* format, ...) {
    char line[1024];
    va_list args;
    va_start(args, format);
    std::vsnprintf(line, sizeof line, format, args);
    va_end(args);
    log_.push_back(std::string(level) + ": " + line);
  }
  static int GetServerVersion() { return version_; }
  static void* GetServerInfo(void* /*ctx*/, const char* section) {
    EXPECT_STREQ(section, "server");
    return &info_;
  }
  static const char* ServerInfoGetFieldC(void* info, const char* field) {
    const auto& fields = *static_cast<std::map<std::string, std::string>*>(info);
    const auto found = fields.find(field);
    return found == fields.end() ? nullptr : found->second.c_str();
  }
  static void FreeServerInfo(void* /*ctx*/, void* /*info*/) {}

  static inline int loads_ = 0;
  static inline int version_ = 0;
  static inline std::map<std::string, std::string> info_;
  static inline std::vector<std::string> log_;
};

// A single line that contains everything.
void ExpectRefused(FakeServer& server, const std::string& engine) {
  EXPECT_EQ(server.Load(), 1);
  ASSERT_EQ(server.log().size(), 1U);
  const std::string& line = server.log().front();
  EXPECT_TRUE(line.starts_with("warning: turnstile ")) << line;
  EXPECT_TRUE(
      line.ends_with(" cannot be loaded: it requires Redis 7.0, Valkey 7.2, Redict 7.3 or "
                     "later, and this is " +
                     engine))
      << line;
}

TEST(RefusedEngineTest, TooOld) {
  FakeServer redis(0x00060214, {{"redis_version", "6.2.20"}});
  ExpectRefused(redis, "Redis 6.2.20");

  FakeServer ancient(0, {});
  ExpectRefused(ancient, "Redis older than 6.2");
}

TEST(RefusedEngineTest, Unknown) {
  FakeServer unknown(0x00090000, {{"redis_version", "7.4.0"}, {"server_name", "lookalike"}});
  ExpectRefused(unknown, "lookalike 9.0.0");
}

}  // namespace
}  // namespace turnstile::testing
