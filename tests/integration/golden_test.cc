// Files of every version that was ever released must load for ever: see tests/golden/README.md.

#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <vector>

#include "support/client.h"
#include "support/dump_payload.h"
#include "support/lock_test.h"
#include "support/reply.h"
#include "support/server.h"
#include "support/source_files.h"

namespace turnstile::testing {
namespace {

struct GoldenLock {
  int db;
  std::string key;
  std::string owner;
  int64_t token;
  int64_t since;
  int64_t end;
};

// The table in tests/golden/README.md.
std::vector<GoldenLock> GoldenLocks() {
  return {{0, "golden:job", "golden-owner", 1700000000000001, 1700000000000, 7258118400000},
          {0, "golden:long", std::string(256, 'o'), 1700000000000002, 1700000000123, 7258118400123},
          {3, "golden:elsewhere", "x", 1, 0, 9007199254740991}};
}

// The text of the DUMP, without its comments, as bytes.
std::string GoldenDump() {
  std::string bytes;
  for (const std::string& line : ReadSource("tests/golden/v1-lock.dump.hex")) {
    if (line.starts_with("#")) continue;
    for (size_t i = 0; i + 1 < line.size(); i += 2) {
      bytes += static_cast<char>(std::stoi(line.substr(i, 2), nullptr, 16));
    }
  }
  return bytes;
}

void ExpectHeld(Client& client, const GoldenLock& lock) {
  SCOPED_TRACE(lock.key);
  EXPECT_EQ(client.Do("SELECT", lock.db), Reply::Ok());
  EXPECT_EQ(client.Do("TYPE", lock.key), Reply::Status("turnstile"));
  EXPECT_EQ(EndOf(client, lock.key), lock.end);
  const int64_t before = ServerNow(client);
  const Reply info = client.Do("LOCK.INFO", lock.key);
  const int64_t after = ServerNow(client);
  ASSERT_TRUE(info.IsArray()) << info;
  EXPECT_EQ(info.Field("mode"), Reply::Str("exclusive"));
  ASSERT_EQ(info.Field("holders").elements.size(), 1U);
  const Reply holder = info.Field("holders").elements.at(0);
  EXPECT_EQ(holder.Field("owner"), Reply::Str(lock.owner));
  EXPECT_EQ(holder.Field("token"), Reply::Int(lock.token));
  EXPECT_GE(holder.Field("held-ms").integer, before - lock.since);
  EXPECT_LE(holder.Field("held-ms").integer, after - lock.since);
  EXPECT_GE(holder.Field("lease-left-ms").integer, lock.end - after);
  EXPECT_LE(holder.Field("lease-left-ms").integer, lock.end - before);
  EXPECT_EQ(holder.Field("count"), Reply::Int(1));
  EXPECT_EQ(holder.Field("session"), Reply::Int(0));
}

// Starts a server on one of the files, under the name by which servers look for it.
void ExpectGolden(const std::string& file, const std::string& name,
                  const std::vector<std::string>& args) {
  Server server;
  server.Stop();
  std::filesystem::copy_file(SourcePath("tests/golden/" + file), server.dir() + "/" + name);
  server.options().args = args;
  ASSERT_TRUE(server.Restart());
  Client client = server.Connect();
  for (const GoldenLock& lock : GoldenLocks()) ExpectHeld(client, lock);
  EXPECT_EQ(client.Do("DBSIZE"), Reply::Int(1));
  client.Do("SELECT", 0);
  EXPECT_EQ(client.Do("DBSIZE"), Reply::Int(3));
  EXPECT_EQ(client.Do("LOCK.INFO", "golden:released"), Reply::Nil());
  EXPECT_EQ(client.Do("LOCK.INFO", "golden:plain").Field("holders").elements.at(0).Field("owner"),
            Reply::Str("plain-owner"));

  // The value is still written as it was then. (The footer has the RDB version of the server.)
  const auto dump = DumpPayload::Open(client.Do("DUMP", "golden:job").text);
  ASSERT_TRUE(dump.has_value());
  EXPECT_EQ(dump->body, DumpPayload::Open(GoldenDump())->body);

  EXPECT_EQ(client.Do("LOCK.ACQUIRE", "golden:job", "stranger", "PX", 1), Reply::Nil());
  EXPECT_EQ(client.Do("LOCK.TOUCH", "golden:job", "golden-owner", "PX", kMinute), Reply::Int(1));
  EXPECT_EQ(client.Do("LOCK.RELEASE", "golden:job", "golden-owner"), Reply::Int(1));
  EXPECT_GT(MustAcquire(client, "golden:job", "stranger"), 1700000000000003);
}

TEST(GoldenTest, Rdb) { ExpectGolden("v1.rdb", "dump.rdb", {"--rdbcompression", "no"}); }

TEST(GoldenTest, Aof) {
  ExpectGolden("v1.aof", "appendonly.aof", {"--appendonly", "yes", "--rdbcompression", "no"});
}

TEST(GoldenTest, Dump) {
  Server server;
  Client client = server.Connect();
  const std::string golden = GoldenDump();
  ASSERT_TRUE(DumpPayload::Open(golden).has_value()) << "the file itself is damaged";
  EXPECT_EQ(client.Do("RESTORE", "golden:job", 0, golden), Reply::Ok());
  ExpectHeld(client, GoldenLocks()[0]);
  EXPECT_EQ(client.Do("LOCK.RELEASE", "golden:job", "golden-owner"), Reply::Int(1));
}

}  // namespace
}  // namespace turnstile::testing
