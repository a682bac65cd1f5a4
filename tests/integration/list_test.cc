// LOCK.LIST and LOCK.TOP: which locks exist, and which of them clients wait for.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "support/cluster.h"
#include "support/eventually.h"
#include "support/failover.h"
#include "support/lock_test.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

using Keys = std::vector<std::string>;

// Every lock in the replies of LOCK.LIST, from the first call to the last.
std::vector<Reply> ListAll(Client& client, const Command& options = {}) {
  std::vector<Reply> locks;
  std::string cursor = "0";
  int calls = 0;
  do {
    Command list = {"LOCK.LIST", "CURSOR", cursor};
    list.insert(list.end(), options.begin(), options.end());
    const Reply reply = client.Do(list);
    if (!reply.IsArray() || reply.elements.size() != 2) {
      ADD_FAILURE() << reply;
      return locks;
    }
    cursor = reply.elements[0].text;
    const std::vector<Reply>& found = reply.elements[1].elements;
    locks.insert(locks.end(), found.begin(), found.end());
  } while (cursor != "0" && ++calls < 100000);
  EXPECT_EQ(cursor, "0");
  return locks;
}

Keys KeysOf(const std::vector<Reply>& locks) {
  Keys keys;
  for (const Reply& lock : locks) keys.push_back(lock.Field("key").text);
  return keys;
}

Keys Sorted(Keys keys) {
  std::sort(keys.begin(), keys.end());
  return keys;
}

Keys TopKeys(Client& client, const Command& arguments = {}) {
  Command top = {"LOCK.TOP"};
  top.insert(top.end(), arguments.begin(), arguments.end());
  return KeysOf(client.Do(top).elements);
}

class ListTest : public SharedWaitingTest<ListTest> {
 protected:
  Reply Do(const Command& command) { return client_.Do(command); }
};

TEST_F(ListTest, NoLocksGiveEmptyReplies) {
  EXPECT_EQ(Do({"LOCK.LIST"}), Reply::Array({Reply::Str("0"), Reply::Array({})}));
  EXPECT_EQ(Do({"LOCK.TOP"}), Reply::Array({}));
}

TEST_F(ListTest, ShowsEveryFieldOfLock) {
  const int64_t token = MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob");
  Waiter carol(server(), "job", "carol");
  for (const Reply& lock : {ListAll(client_).at(0), Do({"LOCK.TOP"}).elements.at(0)}) {
    EXPECT_EQ(lock.elements.size(), 22U) << lock;
    EXPECT_EQ(lock.Field("key"), Reply::Str("job"));
    EXPECT_EQ(lock.Field("mode"), Reply::Str("exclusive"));
    EXPECT_EQ(lock.Field("holding"), Reply::Int(1));
    EXPECT_EQ(lock.Field("owner"), Reply::Str("alice"));
    EXPECT_EQ(lock.Field("tag"), Reply::Nil());
    EXPECT_EQ(lock.Field("token"), Reply::Int(token));
    EXPECT_GE(lock.Field("held-ms").integer, 0);
    EXPECT_LE(lock.Field("lease-left-ms").integer, kMinute);
    EXPECT_GT(lock.Field("lease-left-ms").integer, 0);
    EXPECT_EQ(lock.Field("linger-left-ms"), Reply::Int(0));
    EXPECT_EQ(lock.Field("waiting"), Reply::Int(2));
    EXPECT_LT(lock.Field("longest-wait-ms").integer, kMinute);
  }
  EXPECT_TRUE(Eventually(
      [&] { return Do({"LOCK.TOP"}).elements.at(0).Field("longest-wait-ms").integer > 20; }));
}

TEST_F(ListTest, RepliesWithMapsInResp3) {
  MustAcquire(client_, "job", "alice");
  RawConnection raw = server().ConnectRaw();
  raw.Hello(3);
  const Reply reply = raw.Do("LOCK.LIST");
  ASSERT_EQ(reply.elements.size(), 2U) << reply;
  EXPECT_TRUE(reply.elements[1].elements.at(0).IsMap());
}

TEST_F(ListTest, ShowsModesAndLingeringLocks) {
  MustObtain(client_, Acquiring("shared", "a", {"SHARED"}));
  const int64_t highest = MustObtain(client_, Acquiring("shared", "b", {"SHARED"}));
  MustObtain(client_, Acquiring("limit", "a", {"LIMIT", "5"}));
  MustObtain(client_, Acquiring("lingers", "a", {"LINGER", "60000"}, 1));
  EXPECT_TRUE(Eventually([&] { return Do({"LOCK.FENCE", "lingers"}).IsNil(); }));
  std::vector<Reply> locks = ListAll(client_);
  std::sort(locks.begin(), locks.end(), [](const Reply& a, const Reply& b) {
    return a.Field("key").text < b.Field("key").text;
  });
  ASSERT_EQ(KeysOf(locks), (Keys{"limit", "lingers", "shared"}));
  EXPECT_EQ(locks[0].Field("mode"), Reply::Str("limit"));
  EXPECT_EQ(locks[1].Field("owner"), Reply::Nil());
  EXPECT_EQ(locks[1].Field("token"), Reply::Nil());
  EXPECT_EQ(locks[1].Field("held-ms"), Reply::Nil());
  EXPECT_EQ(locks[1].Field("lease-left-ms"), Reply::Nil());
  EXPECT_EQ(locks[1].Field("holding"), Reply::Int(0));
  EXPECT_GT(locks[1].Field("linger-left-ms").integer, 0);
  EXPECT_EQ(locks[2].Field("mode"), Reply::Str("shared"));
  EXPECT_EQ(locks[2].Field("holding"), Reply::Int(2));
  EXPECT_EQ(locks[2].Field("owner"), Reply::Str("b")) << "of the highest token";
  EXPECT_EQ(locks[2].Field("token"), Reply::Int(highest));
}

TEST_F(ListTest, ListsAllLocksAmongManyOtherKeys) {
  std::set<std::string> expected;
  for (int i = 0; i < 1000; i++) Do({"SET", "string:" + std::to_string(i), "x"});
  for (int i = 0; i < 200; i++) {
    expected.insert("lock:" + std::to_string(i));
    MustAcquire(client_, "lock:" + std::to_string(i), "alice");
  }
  for (const Command& options : Commands{{}, {"COUNT", "1"}, {"COUNT", "7"}, {"COUNT", "100000"}}) {
    const Keys keys = KeysOf(ListAll(client_, options));
    EXPECT_EQ(std::set(keys.begin(), keys.end()), expected);
  }
  const Reply first = Do({"LOCK.LIST", "COUNT", "10"});
  EXPECT_NE(first.elements.at(0), Reply::Str("0")) << "a part at a time";
  EXPECT_LT(first.elements.at(1).elements.size(), 100U);
}

// One call does a limited amount of work, whatever COUNT says; the cursor continues from there.
TEST_F(ListTest, LargeCallStopsEarlyAndContinuesByCursor) {
  constexpr size_t kLocks = 6000;
  std::set<std::string> expected;
  Commands commands;
  for (size_t i = 0; i < kLocks; i++) {
    const std::string key = "lock:" + std::to_string(i);
    expected.insert(key);
    commands.push_back({"LOCK.ACQUIRE", key, "alice", "PX", "60000"});
  }
  RawConnection raw = server().ConnectRaw();
  for (const Reply& reply : DoAtOnce(raw, commands)) ASSERT_TRUE(reply.IsInteger()) << reply;
  const Reply first = Do({"LOCK.LIST", "COUNT", "100000"});
  EXPECT_NE(first.elements.at(0), Reply::Str("0"));
  EXPECT_LT(first.elements.at(1).elements.size(), kLocks);
  EXPECT_GT(first.elements.at(1).elements.size(), 100U);
  const Keys keys = KeysOf(ListAll(client_, {"COUNT", "100000"}));
  EXPECT_EQ(std::set(keys.begin(), keys.end()), expected);
}

TEST_F(ListTest, MatchFiltersKeys) {
  for (const char* key : {"table:1", "table:12", "room:1", "TABLE:1"}) {
    MustAcquire(client_, key, "alice");
  }
  EXPECT_EQ(Sorted(KeysOf(ListAll(client_, {"MATCH", "table:*"}))), (Keys{"table:1", "table:12"}));
  EXPECT_EQ(KeysOf(ListAll(client_, {"MATCH", "r?om:[12]"})), Keys{"room:1"});
  EXPECT_EQ(KeysOf(ListAll(client_, {"MATCH", ""})), Keys{});
  EXPECT_EQ(KeysOf(ListAll(client_, {"match", "*", "count", "1000"})).size(), 4U);
}

TEST_F(ListTest, ListsOnlySelectedDatabase) {
  MustAcquire(client_, "zero", "alice");
  Waiter waits(server(), "zero", "bob");
  Client other = server().Connect();
  other.Do("SELECT", 4);
  EXPECT_EQ(ListAll(other), std::vector<Reply>{});
  EXPECT_EQ(TopKeys(other), Keys{});
  MustAcquire(other, "four", "alice");
  Waiter four(server(), {"SELECT", "4"});
  four.Wait("four", "bob");
  EXPECT_EQ(KeysOf(ListAll(other)), Keys{"four"});
  EXPECT_EQ(TopKeys(other), Keys{"four"});
  EXPECT_EQ(TopKeys(client_), Keys{"zero"});
}

TEST_F(ListTest, ListsBinaryKeysAndOwners) {
  const std::string key("\0\r\n\xff", 4);
  const std::string owner("\x1b[31m\0", 6);
  MustAcquire(client_, key, owner);
  const Reply lock = ListAll(client_).at(0);
  EXPECT_EQ(lock.Field("key"), Reply::Str(key));
  EXPECT_EQ(lock.Field("owner"), Reply::Str(owner));
}

TEST_F(ListTest, RefusesInvalidRequests) {
  for (const Command& wrong : Commands{{"LOCK.LIST", "0"},
                                       {"LOCK.LIST", "COUNT", "0"},
                                       {"LOCK.LIST", "CURSOR", "x"},
                                       {"LOCK.LIST", "TYPE", "string"},
                                       {"LOCK.TOP", "0"},
                                       {"LOCK.TOP", "1", "2"},
                                       {"LOCK.TOP", "1001"}}) {
    EXPECT_TRUE(Do(wrong).IsError("ERR ")) << Do(wrong);
  }
  // More than 64 bits: the server itself refuses it, or takes it for another number.
  EXPECT_FALSE(Do({"LOCK.LIST", "CURSOR", "99999999999999999999"}).text.starts_with("DISCONN"));
}

TEST_F(ListTest, WorksInTransactionsAndScripts) {
  MustAcquire(client_, "job", "alice");
  Waiter waits(server(), "job", "bob");
  Do({"MULTI"});
  Do({"LOCK.LIST"});
  Do({"LOCK.TOP", "1"});
  const Reply results = Do({"EXEC"});
  ASSERT_EQ(results.elements.size(), 2U) << results;
  EXPECT_EQ(results.elements[0].elements.at(1).elements.size(), 1U) << results;
  EXPECT_EQ(results.elements[1].elements.size(), 1U) << results;
  EXPECT_EQ(Do({"EVAL", "return #redis.call('LOCK.LIST')[2] + #redis.call('LOCK.TOP')", "0"}),
            Reply::Int(2));
}

// --- LOCK.TOP ---------------------------------------------------------------------------------

TEST_F(ListTest, TopShowsLongestQueuesFirst) {
  for (const char* key : {"one", "two", "three", "nobody"}) MustAcquire(client_, key, "alice");
  std::vector<std::unique_ptr<Waiter>> waiters;
  const auto wait = [&](const std::string& key) {
    waiters.push_back(
        std::make_unique<Waiter>(server(), key, "w" + std::to_string(waiters.size())));
  };
  wait("one");
  for (int i = 0; i < 2; i++) wait("two");
  for (int i = 0; i < 3; i++) wait("three");
  EXPECT_EQ(TopKeys(client_), (Keys{"three", "two", "one"}));
  EXPECT_EQ(TopKeys(client_, {"2"}), (Keys{"three", "two"}));
  for (int i = 0; i < 3; i++) wait("one");
  EXPECT_EQ(TopKeys(client_), (Keys{"one", "three", "two"}));
  EXPECT_EQ(Do({"LOCK.TOP", "1"}).elements.at(0).Field("waiting"), Reply::Int(4));
}

TEST_F(ListTest, TopShowsTenByDefault) {
  std::vector<std::unique_ptr<Waiter>> waiters;
  for (int i = 0; i < 12; i++) {
    const std::string key = "job:" + std::to_string(i);
    MustAcquire(client_, key, "alice");
    waiters.push_back(std::make_unique<Waiter>(server(), key, "bob"));
  }
  EXPECT_EQ(TopKeys(client_).size(), 10U);
  EXPECT_EQ(TopKeys(client_, {"1000"}).size(), 12U);
}

TEST_F(ListTest, TopShowsContendedPlainLocks) {
  Do({"SET", "plain", "alice", "PX", "60000"});
  Do({"SET", "for-ever", "bob"});
  Do({"SET", "long", std::string(300, 'x')});
  Waiter first(server(), "plain", "w");
  Waiter second(server(), "for-ever", "w");
  Waiter third(server(), "long", "w");
  EXPECT_EQ(ListAll(client_), std::vector<Reply>{}) << "strings are not listed";
  const std::vector<Reply> locks = Do({"LOCK.TOP"}).elements;
  ASSERT_EQ(KeysOf(locks), (Keys{"for-ever", "long", "plain"}));
  for (const Reply& lock : locks) {
    EXPECT_EQ(lock.Field("mode"), Reply::Str("plain"));
    EXPECT_EQ(lock.Field("holding"), Reply::Int(1));
    EXPECT_EQ(lock.Field("token"), Reply::Nil());
    EXPECT_EQ(lock.Field("held-ms"), Reply::Nil());
  }
  EXPECT_EQ(locks[0].Field("owner"), Reply::Str("bob"));
  EXPECT_EQ(locks[0].Field("lease-left-ms"), Reply::Nil());
  EXPECT_EQ(locks[1].Field("owner"), Reply::Nil()) << "too long to be an owner";
  EXPECT_EQ(locks[2].Field("owner"), Reply::Str("alice"));
  EXPECT_GT(locks[2].Field("lease-left-ms").integer, 0);
}

// --- Visibility -------------------------------------------------------------------------------

TEST_F(ListTest, HidesKeysCallerMayNotRead) {
  for (const char* key : {"ours:1", "ours:2", "theirs"}) MustAcquire(client_, key, "alice");
  Waiter a(server(), "theirs", "w1");
  Waiter b(server(), "theirs", "w2");
  Waiter c(server(), "ours:1", "w3");
  Client reader =
      server().ConnectAs("reader", {"%R~ours:*", "+lock.list", "+lock.top", "+lock.info"});
  EXPECT_EQ(Sorted(KeysOf(ListAll(reader))), (Keys{"ours:1", "ours:2"}));
  EXPECT_EQ(TopKeys(reader), Keys{"ours:1"});
  EXPECT_EQ(TopKeys(reader, {"1"}), Keys{"ours:1"}) << "hidden locks do not count";
  Client writer =
      server().ConnectAs("writer", {"%W~ours:*", "+lock.list", "+lock.top", "+lock.info"});
  EXPECT_EQ(ListAll(writer), std::vector<Reply>{}) << "permission to write does not allow reading";
  EXPECT_EQ(TopKeys(writer), Keys{});
  Client nobody = server().ConnectAs("nobody", {"~*", "+get"});
  EXPECT_TRUE(nobody.Do("LOCK.LIST").IsError("NOPERM"));
  EXPECT_TRUE(nobody.Do("LOCK.TOP").IsError("NOPERM"));
  // SCAN would show all names.
  Client scanner = server().ConnectAs("scanner", {"%R~ours:*", "+scan"});
  EXPECT_EQ(scanner.Do("SCAN", 0, "TYPE", "turnstile").elements.at(1).elements.size(), 3U);
  // Scripts run with the caller's rights.
  Client script = server().ConnectAs("script", {"%R~ours:*", "+lock.list", "+lock.info", "+eval"});
  EXPECT_EQ(script.Do("EVAL", "return #redis.call('LOCK.LIST')[2]", 0), Reply::Int(2));
}

// Permission to read a key by another command does not include permission to see who holds the
// lock.
TEST_F(ListTest, HidesLocksOnWhichCallerMayNotRunInfo) {
  for (const char* key : {"bob:1", "secret:1"}) MustAcquire(client_, key, "alice");
  Waiter a(server(), "secret:1", "w1");
  Waiter b(server(), "bob:1", "w2");
  Client bob = server().ConnectAs(
      "bob", {"~bob:*", "+lock.list", "+lock.top", "+lock.info", "(~secret:* +get)"});
  EXPECT_TRUE(bob.Do("LOCK.INFO", "secret:1").IsError("NOPERM"));
  EXPECT_EQ(KeysOf(ListAll(bob)), Keys{"bob:1"});
  EXPECT_EQ(TopKeys(bob), Keys{"bob:1"});
  // Nor does permission to list.
  Client lister = server().ConnectAs("lister", {"~*", "+lock.list", "+lock.top"});
  EXPECT_EQ(ListAll(lister), std::vector<Reply>{});
  EXPECT_EQ(TopKeys(lister), Keys{});
  Client both = server().ConnectAs("both", {"+lock.list", "+lock.top", "(~s* +lock.info)"});
  EXPECT_EQ(KeysOf(ListAll(both)), Keys{"secret:1"});
  EXPECT_EQ(TopKeys(both), Keys{"secret:1"});
}

TEST_F(ListTest, ShowsStringValueOnlyToUsersAllowedToGetIt) {
  Do({"SET", "plain", "its-value"});
  Waiter waits(server(), "plain", "w");
  const auto owner = [](Client& client) {
    return client.Do("LOCK.TOP").elements.at(0).Field("owner");
  };
  Client may = server().ConnectAs("may", {"~*", "+lock.top", "+lock.info", "+get"});
  EXPECT_EQ(owner(may), Reply::Str("its-value"));
  Client may_not = server().ConnectAs("may_not", {"~*", "+lock.top", "+lock.info"});
  EXPECT_EQ(owner(may_not), Reply::Nil());
}

TEST(ListOnReplicaTest, ListsLocksAndHasNoQueues) {
  Pair pair;
  MustAcquire(pair.primary(), "job", "alice");
  Waiter bob(pair.primary_server(), "job", "bob");
  pair.AwaitReplica();
  const std::vector<Reply> locks = ListAll(pair.replica());
  ASSERT_EQ(KeysOf(locks), Keys{"job"});
  EXPECT_EQ(locks[0].Field("owner"), Reply::Str("alice"));
  EXPECT_EQ(locks[0].Field("waiting"), Reply::Int(0));
  EXPECT_EQ(TopKeys(pair.replica()), Keys{});
}

TEST(ListInClusterTest, EachNodeListsItsOwnLocks) {
  Cluster cluster({.primaries = 2});
  const std::string here = cluster.KeyOn(0);
  const std::string there = cluster.KeyOn(1);
  MustAcquire(cluster.client(0), here, "alice");
  MustAcquire(cluster.client(1), there, "alice");
  EXPECT_EQ(KeysOf(ListAll(cluster.client(0))), Keys{here});
  EXPECT_EQ(KeysOf(ListAll(cluster.client(1))), Keys{there});
}

}  // namespace
}  // namespace turnstile::testing
