// The base of tests of the commands: a server that the tests of one suite share, and common calls.
//
//   class CommandsTest : public SharedServerTest<CommandsTest> {};
//
//   TEST_F(CommandsTest, OnlyTheOwnerReleases) {
//     MustAcquire(client_, "job", "alice");
//     EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "bob"), Reply::Int(0));
//   }

#ifndef TURNSTILE_TESTS_SUPPORT_LOCK_TEST_H_
#define TURNSTILE_TESTS_SUPPORT_LOCK_TEST_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/aof.h"
#include "support/client.h"
#include "support/reply.h"
#include "support/server.h"

namespace turnstile::testing {

using Commands = std::vector<Command>;

// A lease that does not end during a test.
inline constexpr int64_t kMinute = 60000;

// The tests of `Suite` share one server, which is empty at the start of each. A suite that needs
// server options hides Options() with its own.
template <typename Suite>
class SharedServerTest : public ::testing::Test {
 public:
  static void SetUpTestSuite() { server_ = std::make_unique<Server>(Suite::Options()); }
  static void TearDownTestSuite() { server_.reset(); }
  static ServerOptions Options() { return {}; }

 protected:
  SharedServerTest() { EXPECT_EQ(client_.Do("FLUSHALL"), Reply::Ok()); }
  ~SharedServerTest() override {
    EXPECT_TRUE(server_->running());
    EXPECT_EQ(server_->CrashReport(), "");
  }

  static Server& server() { return *server_; }

  Client client_ = server_->Connect();

 private:
  static inline std::unique_ptr<Server> server_;
};

// Acquires a lock that must be free or already held by the owner. Returns the token; 0 after a
// failure.
template <typename Connection>
int64_t MustAcquire(Connection& connection, std::string_view key, std::string_view owner,
                    int64_t lease_ms = kMinute) {
  const Reply reply = connection.Do("LOCK.ACQUIRE", key, owner, "PX", lease_ms);
  EXPECT_TRUE(reply.IsInteger()) << reply;
  return reply.integer;
}

// The server's wall clock in milliseconds.
inline int64_t ServerNow(Client& client) {
  const std::vector<std::string> time = client.Do("TIME").Texts();
  EXPECT_EQ(time.size(), 2U);
  return time.size() == 2 ? std::stoll(time[0]) * 1000 + std::stoll(time[1]) / 1000 : 0;
}

// Lua: now(), in milliseconds since an arbitrary time, for scripts that let time pass. It advances
// at most as fast as the wall clock. (In newer servers TIME stands still in a script; 7.0 has no
// os.clock.)
inline constexpr std::string_view kLuaNow = R"(
  local newer, os = pcall(function() return os end)
  local function now()
    if newer then return os.clock() * 1000 end
    local time = redis.call('TIME')
    return time[1] * 1000 + time[2] / 1000
  end)";

// When the key expires, as server time in milliseconds; -1 never, -2 no such key.
inline int64_t EndOf(Client& client, std::string_view key) {
  return client.Do("PEXPIRETIME", key).integer;
}

// The fact that `owner` was granted `key` for a minute, according to the current state of the lock.
inline Command GrantedFact(Client& client, const std::string& key, const std::string& owner,
                           const Reply& token) {
  const int64_t end = EndOf(client, key);
  return HeldCommand(key, owner, {token.integer, end - kMinute, end});
}

// The complete reply of LOCK.INFO, in either version of the protocol, for a lock with this one
// holder.
inline Reply InfoReply(int version, std::string mode, std::string owner, Reply token, Reply left_ms,
                       Reply held_ms) {
  const auto map = [version](std::vector<Reply> fields) {
    return version == 3 ? Reply::Map(std::move(fields)) : Reply::Array(std::move(fields));
  };
  // clang-format off
  const Reply holder = map({
      Reply::Str("owner"), Reply::Str(std::move(owner)),
      Reply::Str("token"), std::move(token),
      Reply::Str("tag"), Reply::Nil(),
      Reply::Str("lease-left-ms"), std::move(left_ms),
      Reply::Str("held-ms"), std::move(held_ms),
      Reply::Str("count"), Reply::Int(1),
      Reply::Str("weight"), Reply::Int(1),
      Reply::Str("session"), version == 3 ? Reply::Bool(false) : Reply::Int(0),
      Reply::Str("linger-ms"), Reply::Int(0),
      Reply::Str("max-hold-left-ms"), Reply::Nil(),
      Reply::Str("client-id"), Reply::Nil(),
      Reply::Str("client-addr"), Reply::Nil()});
  return map({
      Reply::Str("mode"), Reply::Str(std::move(mode)),
      Reply::Str("holding"), Reply::Int(1),
      Reply::Str("holders"), Reply::Array({holder}),
      Reply::Str("linger-left-ms"), Reply::Int(0),
      Reply::Str("waiting"), Reply::Int(0),
      Reply::Str("waiters"), Reply::Array({}),
      Reply::Str("grace-left-ms"), Reply::Int(0)});
  // clang-format on
}

// One field of the only holder in a reply of LOCK.INFO.
inline Reply HolderField(const Reply& info, std::string_view field) {
  const Reply holders = info.Field("holders");
  return holders.elements.size() == 1 ? holders.elements[0].Field(field) : holders;
}

// The value of a field of INFO.
inline std::string InfoField(Client& client, std::string_view section, const std::string& field) {
  const std::string info = "\n" + client.Do("INFO", section).text;
  const size_t start = info.find("\n" + field + ":");
  if (start == std::string::npos) return "no field " + field;
  const size_t value = start + field.size() + 2;
  return info.substr(value, info.find('\r', value) - value);
}

// For example "Valkey 8.1.1". Valkey and Redict also report a redis_version: that of the Redis
// version they are compatible with.
inline std::string EngineOf(Client& client) {
  for (const auto& [name, field] : {std::pair{"Valkey ", "valkey_version"},
                                    {"Redict ", "redict_version"},
                                    {"Redis ", "redis_version"}}) {
    const std::string version = InfoField(client, "server", field);
    if (!version.starts_with("no field")) return name + version;
  }
  return "an unknown server";
}

// Everything that is stored for a lock and does not change with time. (The digest covers everything
// in the value, including the time of the grant.)
inline Reply Kept(Client& client, const std::string& key) {
  const Reply info = client.Do("LOCK.INFO", key);
  const std::vector<Reply> holders = info.Field("holders").elements;
  const Reply holder = holders.empty() ? Reply::Nil() : holders[0];
  // clang-format off
  return Reply::Array({
      Reply::Str("mode"), info.Field("mode"),
      Reply::Str("owner"), holder.Field("owner"),
      Reply::Str("token"), holder.Field("token"),
      Reply::Str("end"), Reply::Int(EndOf(client, key)),
      Reply::Str("digest"), client.Do("DEBUG", "DIGEST-VALUE", key),
  });
  // clang-format on
}

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_SUPPORT_LOCK_TEST_H_
