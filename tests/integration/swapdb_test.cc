// SWAPDB while somebody waits: a replica and the AOF must end up with the data of the primary.

#include <gtest/gtest.h>

#include <string>

#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/ordeals.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

// Alice holds "k" in database 0, and Bob waits for it. Database 1 has an expired "k" that was not
// removed. If that key were opened while the databases are swapped, its removal would be replicated
// before SWAPDB and would delete Alice's lock.
class SwapDbTest : public ::testing::Test {
 protected:
  SwapDbTest() {
    client_.Do("SELECT", 1);
    client_.Do("DEBUG", "SET-ACTIVE-EXPIRE", 0);
    client_.Do("SET", "k", "expired", "PX", 1);
    client_.Do("SELECT", 0);
    const int64_t set = ServerNow(client_);
    EXPECT_TRUE(Eventually([&] { return ServerNow(client_) > set + 5; }));
    token_ = MustAcquire(client_, "k", "alice");
  }

  // Alice's lock is in database 1 now, and nowhere else.
  void ExpectAliceHolds(Client& client) {
    client.Do("SELECT", 1);
    EXPECT_EQ(HolderOf(client, "k"), "alice");
    client.Do("SELECT", 0);
    EXPECT_EQ(HolderOf(client, "k"), "bob");
  }

  Server server_{{.args = {"--appendonly", "yes", "--repl-diskless-sync", "no"}}};
  Client client_ = server_.Connect();
  int64_t token_ = 0;
};

TEST_F(SwapDbTest, SwapDbKeepsLiveLockOnReplicas) {
  Server replica({.args = {"--replicaof", "127.0.0.1", std::to_string(server_.port())}});
  Client copy = replica.Connect();
  AwaitSync(copy);
  Waiter bob(server_, "k", "bob");
  EXPECT_EQ(client_.Do("SWAPDB", 0, 1), Reply::Ok());
  EXPECT_TRUE(bob.Read().IsInteger()) << "in database 0 nobody holds it";
  EXPECT_EQ(client_.Do("WAIT", 1, kMinute), Reply::Int(1));
  ExpectAliceHolds(client_);
  ExpectAliceHolds(copy);
  EXPECT_EQ(copy.Do("REPLICAOF", "NO", "ONE"), Reply::Ok());
  copy.Do("SELECT", 1);
  EXPECT_EQ(copy.Do("LOCK.ACQUIRE", "k", "mallory", "PX", kMinute), Reply::Nil());
  EXPECT_EQ(copy.Do("LOCK.FENCE", "k", token_), Reply::Int(1));
}

TEST_F(SwapDbTest, SwapDbKeepsLiveLockInAof) {
  Waiter bob(server_, "k", "bob");
  EXPECT_EQ(client_.Do("SWAPDB", 0, 1), Reply::Ok());
  EXPECT_TRUE(bob.Read().IsInteger());
  server_.Stop();
  ASSERT_TRUE(server_.Restart());
  Client client = server_.Connect();
  ExpectAliceHolds(client);
}

}  // namespace
}  // namespace turnstile::testing
