#include "fault/small_disk.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <string>
#include <vector>

#include "support/client.h"
#include "support/eventually.h"
#include "support/reply.h"
#include "support/server.h"

namespace turnstile::fault {
namespace {

using testing::Client;
using testing::Eventually;
using testing::Milliseconds;
using testing::Reply;
using testing::Server;

// Where there can be no such disk there are no tests of it.
std::vector<size_t> Sizes() {
  const std::string why = SmallDisk::WhyNot();
  if (why.empty()) return {size_t{4} << 20};
  std::cerr << "No tests of small disks: " << why << "\n";
  return {};
}

class SmallDiskTest : public ::testing::TestWithParam<size_t> {};

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(SmallDiskTest);
INSTANTIATE_TEST_SUITE_P(Bytes, SmallDiskTest, ::testing::ValuesIn(Sizes()));

TEST_P(SmallDiskTest, IsFilledAndFreedAndGone) {
  std::string path;
  {
    const SmallDisk disk(GetParam());
    path = disk.path();
    EXPECT_EQ(disk.Left(), GetParam());
    disk.Fill();
    EXPECT_EQ(disk.Left(), 0U);
    disk.Free();
    EXPECT_EQ(disk.Left(), GetParam());
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST_P(SmallDiskTest, AServerRefusesWhileItsDiskIsFull) {
  const SmallDisk disk(GetParam());
  Server server({.args = {"--appendonly", "yes"}, .dir = disk.path()});
  Client client = server.Connect();
  int granted = 0;
  const auto acquire = [&] {
    const std::string key = "job:" + std::to_string(granted);
    Reply reply = client.Do("LOCK.ACQUIRE", key, "alice", "PX", 60000);
    if (reply.IsInteger()) granted++;
    return reply;
  };
  EXPECT_TRUE(acquire().IsInteger());
  disk.Fill();
  EXPECT_TRUE(Eventually([&] { return acquire().IsError("MISCONF"); }));
  EXPECT_NE(server.Log().find("writing to the AOF file"), std::string::npos);
  disk.Free();
  EXPECT_TRUE(Eventually([&] { return acquire().IsInteger(); }, Milliseconds{10000}));
  ASSERT_TRUE(server.Restart());
  client = server.Connect();
  EXPECT_EQ(client.Do("DBSIZE"), Reply::Int(granted));
}

TEST_P(SmallDiskTest, IsReadOnlyForAWhile) {
  const SmallDisk disk(GetParam());
  const std::string path = disk.path() + "/file";
  const auto writes = [&] { return std::ofstream(path).put('x').flush().good(); };
  EXPECT_TRUE(writes());
  disk.SetReadOnly(true);
  EXPECT_FALSE(writes());
  disk.SetReadOnly(false);
  EXPECT_TRUE(writes());
}

}  // namespace
}  // namespace turnstile::fault
