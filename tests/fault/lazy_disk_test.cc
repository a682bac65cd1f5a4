#include "fault/lazy_disk.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/client.h"
#include "support/eventually.h"
#include "support/reply.h"
#include "support/server.h"

namespace turnstile::fault {
namespace {

using testing::Client;
using testing::Reply;
using testing::Server;

std::vector<std::string> Aof(const char* policy) {
  return {"--appendonly", "yes", "--appendfsync", policy};
}

// Sets a key, and loses what was not fsynced. Returns whether the key is there afterwards.
bool SurvivesPowerFailure(LazyDisk& disk, Server& server, const std::string& key) {
  EXPECT_EQ(server.Connect().Do("SET", key, "here"), Reply::Ok());
  server.Kill9();
  disk.LoseUnsynced(server.dir());
  server.Restart();
  return server.Connect().Do("GET", key) == Reply::Str("here");
}

TEST(LazyDiskTest, HasWhatWasSynced) {
  LazyDisk disk;
  Server server({.args = Aof("always"), .environment = disk.environment()});
  for (const char* key : {"a", "b", "c"}) EXPECT_TRUE(SurvivesPowerFailure(disk, server, key));
  EXPECT_EQ(server.Connect().Do("DBSIZE"), Reply::Int(3));
}

TEST(LazyDiskTest, LosesWhatWasNot) {
  LazyDisk disk;
  Server server({.args = Aof("no"), .environment = disk.environment()});
  for (const char* key : {"a", "b", "c"}) EXPECT_FALSE(SurvivesPowerFailure(disk, server, key));
}

TEST(LazyDiskTest, IsSlow) {
  LazyDisk disk;
  Server server({.args = Aof("always"), .environment = disk.environment()});
  Client client = server.Connect();
  EXPECT_EQ(client.Do("SET", "key", "value"), Reply::Ok());
  disk.SetDelay(200 * kMillisecond, 300 * kMillisecond);
  const auto begin = testing::Clock::now();
  EXPECT_EQ(client.Do("SET", "key", "value"), Reply::Ok());
  EXPECT_GE(testing::Clock::now() - begin, testing::Milliseconds{190});
  disk.SetDelay(0, 0);
}

}  // namespace
}  // namespace turnstile::fault
