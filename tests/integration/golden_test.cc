// Files of every released version must load for ever; see tests/golden/README.md.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <map>
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

struct GoldenHold {
  std::string owner;
  int64_t token;
  int64_t since;
  int64_t end;
  int64_t linger = 0;
  int64_t count = 1;
  int64_t weight = 1;
  int64_t cap = 0;  // none
  std::string tag{};
};

struct GoldenLock {
  int db;
  std::string key;
  std::string mode;
  std::vector<GoldenHold> holds;  // in the order of their tokens
};

// The table in tests/golden/README.md; golden:elsewhere is the last.
std::vector<GoldenLock> GoldenLocks() {
  return {
      {0,
       "golden:narrow",
       "exclusive",
       {{"golden-owner", 1700000000011011, 1700000000011, 4102444800011}}},
      {0,
       "golden:leading",
       "shared",
       {{"reader-a", 1700000000012012, 1699998951437, 4102444800012}}},
      {0, "golden:led", "limit", {{"worker-1", 1700000000013013, 1700001048588, 4398046511103}}},
      {0,
       "golden:job",
       "exclusive",
       {{"golden-owner", 1700000000000001, 1700000000000, 7258118400000}}},
      {0,
       "golden:long",
       "exclusive",
       {{std::string(256, 'o'), 1700000000000002, 1700000000123, 7258118400123}}},
      {0,
       "golden:shared",
       "shared",
       {{"reader-c", 1700000000000004, 1700000000004, 7258118400004},
        {"reader-a", 1700000000000006, 1700000000006, 7258118400006, 60000, 2},
        {"reader-b", 1700000000000007, 1700000000007, 7258118400007}}},
      {0,
       "golden:limit",
       "limit",
       {{"worker-2", 1700000000000008, 1700000000008, 7258118400008},
        {"worker-1", 1700000000000009, 1700000000009, 7258118400009, 1}}},
      {0,
       "golden:counted",
       "exclusive",
       {{"golden-owner", 1700000000000010, 1700000000010, 7258118400010, 5000, 3}}},
      {0,
       "golden:tagged",
       "exclusive",
       {{"golden-owner", 1700000000000014, 1700000000014, 7258118400014, 5, 2, 1, 7258118400014,
         "host-1 pid 42"}}},
      {0,
       "golden:weighted",
       "limit",
       {{"worker-1", 1700000000000015, 1700000000015, 7258118400015, 0, 1, 100000}}},
      {0,
       "golden:pool",
       "limit",
       {{"worker-2", 1700000000000016, 1700000000016, 7258118400016, 0, 1, 2, 0,
         "tag-of-64-bytes-" + std::string(48, 't')},
        {"worker-1", 1700000000000017, 1700000000017, 7258118400017, 0, 1, 1, 9007199254740991},
        {"worker-3", 1700000000000018, 1700000000018, 7258118400018, 7, 1, 3, 7258118400019, "~"},
        {"worker-4", 1700000000000019, 1700000000019, 7258118400019}}},
      {3,
       "golden:elsewhere",
       "exclusive",
       {{"x", 1, 0, 9007199254740991, 9007199254740991, 4294967295}}},
  };
}

// The DUMP payloads as bytes, without the comments.
std::map<std::string, std::string> GoldenDumps() {
  std::map<std::string, std::string> dumps;
  std::string key;
  for (const std::string& line : ReadSource("tests/golden/v1-locks.dump.hex")) {
    if (line.starts_with("#")) continue;
    if (line.starts_with("golden:")) {
      key = line;
      continue;
    }
    for (size_t i = 0; i + 1 < line.size(); i += 2) {
      dumps[key] += static_cast<char>(std::stoi(line.substr(i, 2), nullptr, 16));
    }
  }
  return dumps;
}

void ExpectHeld(Client& client, const GoldenLock& lock) {
  SCOPED_TRACE(lock.key);
  EXPECT_EQ(client.Do("SELECT", lock.db), Reply::Ok());
  EXPECT_EQ(client.Do("TYPE", lock.key), Reply::Status("turnstile"));
  int64_t closes = 0;
  for (const GoldenHold& hold : lock.holds) closes = std::max(closes, hold.end + hold.linger);
  EXPECT_EQ(EndOf(client, lock.key), closes);
  const int64_t before = ServerNow(client);
  const Reply info = client.Do("LOCK.INFO", lock.key);
  const int64_t after = ServerNow(client);
  ASSERT_TRUE(info.IsArray()) << info;
  EXPECT_EQ(info.Field("mode"), Reply::Str(lock.mode));
  const std::vector<Reply> holders = info.Field("holders").elements;
  ASSERT_EQ(holders.size(), lock.holds.size()) << info;
  for (size_t i = 0; i < holders.size(); i++) {
    const GoldenHold& hold = lock.holds[i];
    const Reply& holder = holders[i];
    EXPECT_EQ(holder.Field("owner"), Reply::Str(hold.owner));
    EXPECT_EQ(holder.Field("token"), Reply::Int(hold.token));
    EXPECT_GE(holder.Field("held-ms").integer, before - hold.since);
    EXPECT_LE(holder.Field("held-ms").integer, after - hold.since);
    EXPECT_GE(holder.Field("lease-left-ms").integer, hold.end - after);
    EXPECT_LE(holder.Field("lease-left-ms").integer, hold.end - before);
    EXPECT_EQ(holder.Field("count"), Reply::Int(hold.count));
    EXPECT_EQ(holder.Field("session"), Reply::Int(0));
    EXPECT_EQ(holder.Field("linger-ms"), Reply::Int(hold.linger));
    EXPECT_EQ(holder.Field("weight"), Reply::Int(hold.weight));
    EXPECT_EQ(holder.Field("tag"), hold.tag.empty() ? Reply::Nil() : Reply::Str(hold.tag));
    if (hold.cap == 0) {
      EXPECT_EQ(holder.Field("max-hold-left-ms"), Reply::Nil());
    } else {
      EXPECT_GE(holder.Field("max-hold-left-ms").integer, hold.cap - after);
      EXPECT_LE(holder.Field("max-hold-left-ms").integer, hold.cap - before);
    }
  }
}

// Other owners are blocked, and every holder can touch and release its lock.
void ExpectUsable(Client& client, const GoldenLock& lock) {
  SCOPED_TRACE(lock.key);
  EXPECT_EQ(client.Do("LOCK.ACQUIRE", lock.key, "stranger", "PX", 1), Reply::Nil());
  for (const GoldenHold& hold : lock.holds) {
    EXPECT_EQ(client.Do("LOCK.FENCE", lock.key, hold.token), Reply::Int(1));
    EXPECT_EQ(client.Do("LOCK.TOUCH", lock.key, hold.owner, "PX", kMinute), Reply::Int(1));
    for (int64_t i = 0; i < hold.count; i++) {
      EXPECT_EQ(client.Do("LOCK.RELEASE", lock.key, hold.owner), Reply::Int(1));
    }
    EXPECT_EQ(client.Do("LOCK.RELEASE", lock.key, hold.owner), Reply::Int(0));
  }
  EXPECT_GT(MustAcquire(client, lock.key, "stranger"), 1700000000013013);
}

// Starts a server on one of the files, under the name that servers expect.
void ExpectGolden(const std::string& file, const std::string& name,
                  const std::vector<std::string>& args) {
  Server server;
  server.Stop();
  std::filesystem::copy_file(SourcePath("tests/golden/" + file), server.dir() + "/" + name);
  server.options().args = args;
  ASSERT_TRUE(server.Restart());
  Client client = server.Connect();
  const std::vector<GoldenLock> locks = GoldenLocks();
  for (const GoldenLock& lock : locks) ExpectHeld(client, lock);
  EXPECT_EQ(client.Do("DBSIZE"), Reply::Int(1));
  client.Do("SELECT", 0);
  EXPECT_EQ(client.Do("DBSIZE"), Reply::Int(static_cast<int64_t>(locks.size())))
      << "one is elsewhere, and one is plain";
  EXPECT_EQ(client.Do("LOCK.INFO", "golden:released"), Reply::Nil());
  EXPECT_EQ(client.Do("LOCK.INFO", "golden:plain").Field("holders").elements.at(0).Field("owner"),
            Reply::Str("plain-owner"));

  // Saving writes back the same bytes. (The footer contains the RDB version of the server.)
  for (const auto& [key, golden] : GoldenDumps()) {
    const auto dump = DumpPayload::Open(client.Do("DUMP", key).text);
    ASSERT_TRUE(dump.has_value());
    EXPECT_EQ(dump->body, DumpPayload::Open(golden)->body) << key;
  }
  for (const GoldenLock& lock : locks) {
    if (lock.db == 0) ExpectUsable(client, lock);
  }
}

TEST(GoldenTest, Rdb) { ExpectGolden("v1.rdb", "dump.rdb", {"--rdbcompression", "no"}); }

TEST(GoldenTest, Aof) {
  ExpectGolden("v1.aof", "appendonly.aof", {"--appendonly", "yes", "--rdbcompression", "no"});
}

TEST(GoldenTest, Dumps) {
  Server server;
  Client client = server.Connect();
  const std::map<std::string, std::string> dumps = GoldenDumps();
  size_t restored = 0;
  for (const GoldenLock& lock : GoldenLocks()) {
    const auto golden = dumps.find(lock.key);
    if (golden == dumps.end()) continue;
    ASSERT_TRUE(DumpPayload::Open(golden->second).has_value()) << "the file itself is damaged";
    EXPECT_EQ(client.Do("RESTORE", lock.key, 0, golden->second), Reply::Ok());
    ExpectHeld(client, lock);
    ExpectUsable(client, lock);
    restored++;
  }
  EXPECT_EQ(restored, dumps.size());
}

}  // namespace
}  // namespace turnstile::testing
