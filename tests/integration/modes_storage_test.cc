// Locks of every mode are stored and replicated completely: all holders with their tokens, leases,
// counts and lingers, including ended holds until their end is replicated.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>
#include <memory>
#include <ostream>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/aof.h"
#include "support/client.h"
#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/ordeals.h"
#include "support/replication_stream.h"
#include "support/reply.h"
#include "support/resp3.h"
#include "support/server.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

// --- What is stored ------------------------------------------------------------------------------

std::vector<std::string> KeysOf(Client& client) {
  std::vector<std::string> keys = client.Do("KEYS", "*").Texts();
  std::sort(keys.begin(), keys.end());
  return keys;
}

// The current holders of a lock, in the order of their tokens: what of each does not change with
// time. (The digest covers the rest.)
Reply HoldsOf(Client& client, const std::string& key) {
  Reply info = client.Do("LOCK.INFO", key);
  if (!info.IsArray()) return info;
  Reply holders = Reply::Array({info.Field("mode")});
  for (const Reply& holder : info.Field("holders").elements) {
    for (const char* field : {"owner", "token", "tag", "count", "weight", "linger-ms"}) {
      holders.elements.push_back(holder.Field(field));
    }
    const bool is_capped = !holder.Field("max-hold-left-ms").IsNil();
    holders.elements.push_back(Reply::Str(is_capped ? "capped" : "not capped"));
  }
  return holders;
}

Reply DigestOf(Client& client, const std::string& key) {
  return client.Do("DEBUG", "DIGEST-VALUE", key);
}

// Everything that is stored for a lock and does not change with time.
Reply Stored(Client& client, const std::string& key) {
  return Reply::Array(
      {HoldsOf(client, key), Reply::Int(EndOf(client, key)), DigestOf(client, key)});
}

std::map<std::string, Reply> AllStored(Client& client) {
  std::map<std::string, Reply> stored;
  for (const std::string& key : KeysOf(client)) stored[key] = Stored(client, key);
  return stored;
}

// A lock in every possible state. Holds with a lease of 1 ms come last in their lock, because the
// next change would remove ended ones.
Commands Story() {
  const std::string bytes("\0\r\n\xff", 4);
  const auto acquire = [](const std::string& key, const std::string& owner,
                          const Command& options = {}) {
    Command command = {"LOCK.ACQUIRE", key, owner};
    const auto has_lease = std::find(options.begin(), options.end(), "PX") != options.end();
    if (!has_lease) command.insert(command.end(), {"PX", "60000"});
    command.insert(command.end(), options.begin(), options.end());
    return command;
  };
  Commands story = {
      acquire("exclusive", "me"),
      acquire("counted", "me", {"REENTRANT"}),
      acquire("counted", "me", {"REENTRANT"}),
      acquire("counted", "me", {"REENTRANT", "LINGER", "7"}),
      {"LOCK.RELEASE", "counted", "me"},
      acquire("shared", "c", {"SHARED"}),
      acquire("shared", "a", {"SHARED", "PX", "70000"}),
      acquire("shared", "b", {"SHARED", "LINGER", "20000"}),
      acquire("shared", bytes, {"SHARED"}),
      acquire("shared counted", "a", {"SHARED", "REENTRANT"}),
      acquire("shared counted", "b", {"SHARED", "REENTRANT"}),
      acquire("shared counted", "b", {"SHARED", "REENTRANT"}),
      acquire("limit", "c", {"LIMIT", "3"}),
      acquire("limit", "a", {"LIMIT", "3"}),
      acquire("limit", "b", {"LIMIT", "100000", "LINGER", "1"}),
      acquire("one of a limit", "a", {"LIMIT", "1"}),
      acquire("with a linger", "me", {"LINGER", "86400000"}),
      acquire("together", "me", {"ALSO", "2", "together too", "as well"}),
      acquire("shared together", "a", {"SHARED", "ALSO", "1", "shared too"}),
      acquire("shared together", "b", {"SHARED", "LINGER", "9", "ALSO", "1", "shared too"}),
      {"LOCK.TOUCH", "shared together", "a", "PX", "80000", "ALSO", "1", "shared too"},
      acquire("released", "a", {"SHARED"}),
      acquire("released", "b", {"SHARED"}),
      acquire("released", "c", {"SHARED"}),
      {"LOCK.RELEASE", "released", "b"},
      acquire("all gone", "a", {"LIMIT", "2", "ALSO", "1", "all gone too"}),
      {"LOCK.RELEASE", "all gone", "a", "ALSO", "1", "all gone too"},
      acquire("upgraded", "a", {"SHARED"}),
      acquire("upgraded", "b", {"SHARED"}),
      {"LOCK.RELEASE", "upgraded", "b"},
      acquire("upgraded", "a"),
      acquire("downgraded", "a", {"LINGER", "5"}),
      acquire("downgraded", "a", {"SHARED"}),
      acquire("downgraded", "b", {"SHARED"}),
      acquire("session", "me", {"SESSION", "REENTRANT"}),
      acquire("session", "me", {"SESSION", "REENTRANT"}),
      {"SET", "plain", "me", "PX", "60000"},
      {"SET", "converted", "me"},
      acquire("converted", "me", {"SHARED"}),
      acquire("converted", "you", {"SHARED"}),
      acquire("set back", "a", {"LIMIT", "2"}),
      acquire("set back", "b", {"LIMIT", "2", "LINGER", "3"}),
      {"PERSIST", "set back"},
      acquire("old name", "a", {"SHARED"}),
      acquire("old name", "b", {"SHARED"}),
      {"RENAME", "old name", "new name"},
      acquire("weighed", "a", {"LIMIT", "9", "WEIGHT", "2"}),
      acquire("weighed", "b", {"LIMIT", "9", "WEIGHT", "3", "LINGER", "8"}),
      acquire("weighed", "c", {"LIMIT", "9"}),
      {"LOCK.TOUCH", "weighed", "b", "PX", "70000"},
      acquire("one that weighs", "a", {"LIMIT", "100000", "WEIGHT", "100000"}),
      acquire("capped", "a", {"MAXHOLD", "65000"}),
      {"LOCK.TOUCH", "capped", "a", "PX", "90000"},
      acquire("capped together", "a", {"SHARED", "MAXHOLD", "31536000000"}),
      acquire("capped together", "b", {"SHARED", "MAXHOLD", "70000"}),
      acquire("capped together", "b", {"SHARED", "MAXHOLD", "65000", "PX", "64000"}),
      acquire("capped upgrade", "a", {"SHARED", "MAXHOLD", "65000"}),
      acquire("capped upgrade", "a", {"PX", "90000"}),
      acquire("tagged", "a", {"TAG", "LINGER 5"}),
      acquire("tagged", "a", {"TAG", "host-1 pid 7"}),
      acquire("tagged together", "a", {"SHARED", "TAG", std::string(64, '~')}),
      acquire("tagged together", "b", {"SHARED", "TAG", " "}),
      acquire("tagged together", "b", {"SHARED"}),
      acquire("tagged together", "c", {"SHARED"}),
      acquire("with everything", "a",
              {"LIMIT", "9", "WEIGHT", "4", "LINGER", "6", "MAXHOLD", "90000", "TAG", "x", "NOTIFY",
               "channel", "1", "ALSO", "1", "with everything too"}),
  };
  for (int i = 0; i < 50; i++) {
    story.push_back(acquire("a crowd", "owner " + std::to_string(i * 7919 % 50), {"SHARED"}));
  }
  story.insert(story.end(),
               {
                   acquire("lingers", "me", {"PX", "1", "LINGER", "60000"}),
                   acquire("one lingers", "a", {"SHARED"}),
                   acquire("one lingers", "b", {"SHARED", "PX", "1", "LINGER", "60000"}),
                   acquire("one has ended", "a", {"SHARED"}),
                   acquire("one has ended", "b", {"SHARED"}),
                   acquire("one has ended", "c", {"SHARED", "PX", "1"}),
                   acquire("permit has ended", "a", {"LIMIT", "2"}),
                   acquire("permit has ended", "b", {"LIMIT", "2", "PX", "1"}),
               });
  return story;
}

// How many of these locks exist in the end.
constexpr int64_t kLocksInStory = 34;

// Waits until the short leases of these locks have ended.
void AwaitEndOfShortLeases(Client& client) {
  using Owners = std::vector<std::string>;
  EXPECT_TRUE(Eventually([&] { return HoldersOf(client, "lingers").empty(); }));
  EXPECT_TRUE(Eventually([&] { return HoldersOf(client, "one lingers") == Owners{"a"}; }));
  EXPECT_TRUE(Eventually([&] { return HoldersOf(client, "one has ended") == Owners{"a", "b"}; }));
  EXPECT_TRUE(Eventually([&] { return HoldersOf(client, "permit has ended") == Owners{"a"}; }));
}

void TellStory(Client& client) {
  for (const Command& command : Story()) {
    const Reply reply = client.Do(command);
    EXPECT_FALSE(reply.IsError() || reply.IsNil()) << command[1] << ": " << reply;
  }
  AwaitEndOfShortLeases(client);
  EXPECT_EQ(client.Do("DBSIZE"), Reply::Int(kLocksInStory));
}

// Each holder that LOCK.INFO shows holds the lock, can reacquire it, and can release it as often as
// it is counted.
void ExpectUsable(Client& client, const std::string& key) {
  SCOPED_TRACE(key);
  const Reply info = client.Do("LOCK.INFO", key);
  EXPECT_EQ(client.Do("LOCK.ACQUIRE", key, "stranger", "PX", 1), Reply::Nil());
  Command mode;
  if (info.Field("mode").text == "shared") mode = {"SHARED"};
  if (info.Field("mode").text == "limit") mode = {"LIMIT", "100000"};
  for (const Reply& holder : info.Field("holders").elements) {
    const std::string owner = holder.Field("owner").text;
    const Reply token = holder.Field("token");
    if (token.IsNil()) continue;  // a plain lock
    EXPECT_EQ(holder.Field("session"), Reply::Int(0)) << "a connection is not stored";
    EXPECT_EQ(client.Do("LOCK.FENCE", key, token.integer), Reply::Int(1));
    Command again = {"LOCK.ACQUIRE", key, owner, "PX", "60000"};
    again.insert(again.end(), mode.begin(), mode.end());
    if (info.Field("mode").text == "limit") {
      again.insert(again.end(), {"WEIGHT", std::to_string(holder.Field("weight").integer)});
    }
    EXPECT_EQ(client.Do(again), token);
    for (int64_t i = 0; i < holder.Field("count").integer; i++) {
      EXPECT_EQ(client.Do("LOCK.RELEASE", key, owner), Reply::Int(1));
    }
    EXPECT_EQ(client.Do("LOCK.RELEASE", key, owner), Reply::Int(0));
  }
}

// --- Restarts ------------------------------------------------------------------------------------

class ModesRestartTest : public ::testing::TestWithParam<SurvivalScenario> {};

TEST_P(ModesRestartTest, EveryHolderIsUnchanged) {
  Server server({.args = GetParam().args});
  Client client = server.Connect();
  TellStory(client);
  const std::map<std::string, Reply> before = AllStored(client);
  const Reply digest = client.Do("DEBUG", "DIGEST");

  GetParam().go_through(server);

  client = server.Connect();  // the connection of the session, if it was still open, is closed
  EXPECT_EQ(client.Do("DEBUG", "DIGEST"), digest);
  EXPECT_EQ(AllStored(client), before);
  for (const auto& [key, stored] : before) ExpectUsable(client, key);
  EXPECT_EQ(KeysOf(client), (std::vector<std::string>{"lingers", "one lingers", "plain"}))
      << "all others were given up";
  EXPECT_EQ(client.Do("LOCK.RELEASE", "lingers", "me"), Reply::Int(0)) << "but it cuts the linger";
  MustAcquire(client, "lingers", "stranger");
}

INSTANTIATE_TEST_SUITE_P(Every, ModesRestartTest, ::testing::ValuesIn(SurvivalScenarios()),
                         [](const auto& test) { return test.param.name; });

TEST(ModesDumpTest, RestoredLockIsUnchanged) {
  Server server;
  Server other;
  Client client = server.Connect();
  Client elsewhere = other.Connect();
  TellStory(client);
  const std::map<std::string, Reply> before = AllStored(client);
  for (Client* to : {&elsewhere, &client}) {
    for (const auto& [key, stored] : before) {
      SCOPED_TRACE(key);
      const Reply payload = client.Do("DUMP", key);
      const int64_t end = stored.elements.at(1).integer;
      EXPECT_EQ(to->Do("RESTORE", key, end, payload.text, "ABSTTL", "REPLACE"), Reply::Ok());
      EXPECT_EQ(Stored(*to, key), stored);
      EXPECT_EQ(to->Do("DUMP", key), payload);
    }
  }
  EXPECT_EQ(elsewhere.Do("DEBUG", "DIGEST"), client.Do("DEBUG", "DIGEST"));

  // Without its TTL. When that is reverted, ended holds are removed.
  for (const auto& [key, stored] : before) {
    SCOPED_TRACE(key);
    if (key == "plain") continue;
    const Reply payload = client.Do("DUMP", key);
    EXPECT_EQ(elsewhere.Do("RESTORE", key, 0, payload.text, "REPLACE"), Reply::Ok());
    EXPECT_EQ(HoldsOf(elsewhere, key), stored.elements.at(0));
    EXPECT_EQ(EndOf(elsewhere, key), stored.elements.at(1).integer);
    const bool loses_one = key == "one has ended" || key == "permit has ended";
    EXPECT_EQ(DigestOf(elsewhere, key) != stored.elements.at(2), loses_one);
    ExpectUsable(elsewhere, key);
  }
}

TEST(ModesAofTest, RewriteWritesOneFactPerHolder) {
  Server server({.args = Aof("no")});
  Client client = server.Connect();
  // The first grant also replicates the floor of the token clock.
  MustAcquire(client, "first", "me");
  client.Do("DEL", "first");
  // In the order of their tokens, whatever the order of owners and ends.
  const std::vector<std::pair<std::string, int64_t>> holders = {
      {"c", 70000}, {"a", 60000}, {"b", 80000}};
  Commands expected = {{"SELECT", "0"}};
  for (const auto& [owner, lease] : holders) {
    const Reply token =
        client.Do("LOCK.ACQUIRE", "job", owner, "PX", lease, "SHARED", "LINGER", lease);
    ASSERT_TRUE(token.IsInteger()) << token;
    const Command replicated = LastInAof(server.dir());
    const int64_t since = NumbersOf(replicated).since;
    expected.push_back(HeldCommand("job", owner, {token.integer, since, since + lease},
                                   {"SHARED", "LINGER", std::to_string(lease)}));
    EXPECT_EQ(replicated, expected.back());
  }
  HeldNumbers numbers = NumbersOf(expected[2]);
  EXPECT_EQ(client.Do("LOCK.ACQUIRE", "job", "a", "PX", kMinute, "SHARED", "REENTRANT"),
            Reply::Int(numbers.token));
  const Command counted = LastInAof(server.dir());
  numbers.end = NumbersOf(counted).end;
  expected[2] = HeldCommand("job", "a", numbers, {"SHARED", "COUNT", "2"});
  EXPECT_EQ(counted, expected[2]) << "and its linger is as it was last asked for";
  expected.push_back({"PEXPIREAT", "job", std::to_string(EndOf(client, "job"))});
  RewriteAof(server);
  const Commands aof = ReadAof(server.dir());
  ASSERT_GE(aof.size(), expected.size());
  EXPECT_EQ(Commands(aof.begin(), aof.begin() + std::ssize(expected)), expected);
}

// --- Replicas ------------------------------------------------------------------------------------

// Waits until the replica has applied everything the primary has replicated so far.
void Settle(Client& primary, Client& replica) {
  const std::string replicated = InfoField(primary, "replication", "master_repl_offset");
  EXPECT_TRUE(Eventually([&] {
    return std::stoll(InfoField(replica, "replication", "slave_repl_offset")) >=
           std::stoll(replicated);
  })) << InfoField(replica, "replication", "slave_repl_offset")
      << " of " << replicated;
}

// All keys, including expired ones that are not removed yet, have the same values and TTLs.
void ExpectSame(Client& primary, Client& replica, const std::string& when) {
  Settle(primary, replica);
  EXPECT_EQ(replica.Do("DEBUG", "DIGEST"), primary.Do("DEBUG", "DIGEST")) << when;
  for (const std::string& key : KeysOf(primary)) {
    EXPECT_EQ(DigestOf(replica, key), DigestOf(primary, key)) << Quoted(key) << " " << when;
  }
}

ServerOptions ReplicaOf(const Server& primary, std::vector<std::string> args = {}) {
  args.insert(args.end(), {"--replicaof", "127.0.0.1", std::to_string(primary.port())});
  return {.args = args};
}

// A primary with a replica; both have an AOF. Synced through files, because a diskless sync
// completes only with the replica's next acknowledgement, up to a second later.
class ModesReplicaTest : public ::testing::Test {
 protected:
  ModesReplicaTest() { AwaitSync(copy_); }

  static std::vector<std::string> PrimaryArgs() {
    std::vector<std::string> args = Aof("no");
    args.insert(args.end(), {"--repl-diskless-sync", "no", "--turnstile.token-margin-ms", "0"});
    return args;
  }

  Server primary_{{.args = PrimaryArgs()}};
  Server replica_{ReplicaOf(primary_, Aof("no"))};
  Client client_ = primary_.Connect();
  Client copy_ = replica_.Connect();
};

TEST_F(ModesReplicaTest, ReplicaAgreesAfterEveryStep) {
  int step = 0;
  for (const Command& command : Story()) {
    const Reply reply = client_.Do(command);
    EXPECT_FALSE(reply.IsError()) << reply;
    std::string when = "after step " + std::to_string(++step) + ":";
    for (const std::string& word : command) when += " " + Quoted(word);
    ExpectSame(client_, copy_, when);
    EXPECT_EQ(DigestOf(copy_, command[1]), DigestOf(client_, command[1])) << when;
  }
  AwaitEndOfShortLeases(client_);
  AwaitEndOfShortLeases(copy_);
  EXPECT_EQ(AllStored(copy_), AllStored(client_));

  // And after every end. The server itself removes the plain lock and the lingering locks.
  for (const std::string& key : KeysOf(client_)) {
    if (key == "session") continue;
    ExpectUsable(client_, key);
    ExpectSame(client_, copy_, "after the releases of " + key);
  }
  client_.Close();  // the session's connection
  client_ = primary_.Connect();
  EXPECT_TRUE(Eventually([&] { return client_.Do("EXISTS", "session") == Reply::Int(0); }));
  ExpectSame(client_, copy_, "after the end of the session");
}

TEST_F(ModesReplicaTest, ReplicasOwnAofIsComplete) {
  TellStory(client_);
  client_.Do("LOCK.RELEASE", "shared counted", "b");
  client_.Do("LOCK.RELEASE", "lingers", "me");
  client_.Do("LOCK.RELEASE", "limit", "a");
  client_.Do("LOCK.TOUCH", "permit has ended", "a", "PX", kMinute);
  Settle(client_, copy_);
  const Reply digest = client_.Do("DEBUG", "DIGEST");
  const std::map<std::string, Reply> stored = AllStored(client_);
  EXPECT_FALSE(stored.contains("lingers"));
  replica_.Kill9();
  replica_.options().args = Aof("no");
  ASSERT_TRUE(replica_.Restart());
  copy_ = replica_.Connect();
  EXPECT_EQ(copy_.Do("DEBUG", "DIGEST"), digest);
  EXPECT_EQ(AllStored(copy_), stored);
}

TEST_F(ModesReplicaTest, PartialSyncAfterDroppedLink) {
  TellStory(client_);
  Settle(client_, copy_);
  replica_.Pause();
  client_.Do("CLIENT", "KILL", "TYPE", "replica");
  const Commands changes = {
      {"LOCK.RELEASE", "shared", "a"},
      {"LOCK.ACQUIRE", "shared", "new", "PX", "60000", "SHARED", "REENTRANT"},
      {"LOCK.RELEASE", "shared counted", "b"},
      {"LOCK.TOUCH", "limit", "a", "PX", "90000"},
      {"LOCK.ACQUIRE", "new", "a", "PX", "60000", "LIMIT", "2", "ALSO", "1", "new too"},
      {"LOCK.TOUCH", "one has ended", "a", "PX", "90000"},
      {"LOCK.RELEASE", "lingers", "me"},
      {"LOCK.ACQUIRE", "downgraded", "c", "PX", "60000", "SHARED", "LINGER", "60000"},
      {"PERSIST", "permit has ended"},
  };
  for (const Command& change : changes) EXPECT_FALSE(client_.Do(change).IsError()) << change[1];
  replica_.Continue();
  ASSERT_TRUE(Eventually([&] { return InfoField(client_, "stats", "sync_partial_ok") == "1"; }));
  ASSERT_TRUE(Eventually([&] { return LinkIsUp(copy_); }));
  ExpectSame(client_, copy_, "after the partial sync");
  EXPECT_EQ(InfoField(client_, "stats", "sync_full"), "1");
  EXPECT_EQ(AllStored(copy_), AllStored(client_));
}

class ModesFullSyncTest : public ::testing::TestWithParam<const char*> {};

TEST_P(ModesFullSyncTest, FullSyncTransfersEveryHolder) {
  Server primary({.args = {"--repl-diskless-sync", GetParam()}});
  Client client = primary.Connect();
  TellStory(client);
  const std::map<std::string, Reply> before = AllStored(client);
  Server replica(ReplicaOf(primary, {"--repl-diskless-load", "on-empty-db"}));
  Client copy = replica.Connect();
  AwaitSync(copy);
  ExpectSame(client, copy, "after the sync");
  EXPECT_EQ(AllStored(client), before);
  EXPECT_EQ(AllStored(copy), before);

  for (const Command& change : Commands{{"LOCK.RELEASE", "shared counted", "b"},
                                        {"LOCK.TOUCH", "one has ended", "a", "PX", "60000"},
                                        {"LOCK.RELEASE", "a crowd", "owner 7"}}) {
    EXPECT_EQ(client.Do(change), Reply::Int(1)) << change[1];
    ExpectSame(client, copy, "after " + change[1]);
  }
  EXPECT_EQ(AllStored(copy), AllStored(client));
}

INSTANTIATE_TEST_SUITE_P(Diskless, ModesFullSyncTest, ::testing::Values("no", "yes"),
                         [](const auto& test) { return test.param; });

// --- The end of one of several holds -------------------------------------------------------------

using Owners = std::vector<std::string>;

// A primary observed on the wire and through its AOF, and a replica.
class ModesHoldEndTest : public ModesReplicaTest {
 protected:
  ModesHoldEndTest() { stream_ = std::make_unique<ReplicationStream>(primary_.port()); }

  // The commands replicated since the last call, without SELECT. The AOF and the wire agree, and
  // the replica has the same values.
  Commands Replicated() {
    Commands stream = stream_->Until(client_);
    Commands aof;
    Commands news;
    // A lease that ends between the two is in the AOF already.
    Eventually([&] {
      aof = ReadAof(primary_.dir());
      news.clear();
      std::copy_if(
          aof.begin() + known_, aof.end(), std::back_inserter(news),
          [](const Command& command) { return command[0] != "SELECT" && !IsFloor(command); });
      if (news == stream) return true;
      for (Command& command : stream_->Until(client_)) stream.push_back(std::move(command));
      return false;
    });
    known_ = std::ssize(aof);
    EXPECT_EQ(news, stream);
    ExpectSame(client_, copy_, "when it was replicated");
    return stream;
  }

  int64_t Acquire(const std::string& owner, const Command& options = {"SHARED"},
                  int64_t lease = kMinute) {
    Command command = {"LOCK.ACQUIRE", "job", owner, "PX", std::to_string(lease)};
    command.insert(command.end(), options.begin(), options.end());
    const Reply token = client_.Do(command);
    EXPECT_TRUE(token.IsInteger()) << owner << ": " << token;
    return token.integer;
  }

  // Waits until only these owners hold the lock, by the clock of each server.
  void AwaitHolders(const Owners& owners) {
    for (Client* client : {&client_, &copy_}) {
      EXPECT_TRUE(Eventually([&] { return HoldersOf(*client, "job") == owners; }))
          << client->Do("LOCK.INFO", "job");
    }
  }

  // b and c hold the lock in this mode; a's hold has ended.
  void LetOneEnd(const Command& mode = {"SHARED"}) {
    Acquire("b", mode);
    Acquire("c", mode);
    Acquire("a", mode, 30);
    Replicated();
    const Reply digest = DigestOf(client_, "job");
    AwaitHolders({"b", "c"});
    EXPECT_EQ(DigestOf(client_, "job"), digest) << "it is still stored";
    EXPECT_EQ(DigestOf(copy_, "job"), digest);
    EXPECT_EQ(Replicated(), Commands{});
  }

  // The words of a fact that do not depend on tokens and time.
  static Command Gist(const Command& fact) {
    Command gist = fact;
    if (gist[0] == "LOCK.HELD" && NumbersOf(gist).token > 0) gist.erase(gist.begin() + 3);
    if (gist.size() == 4 && gist[1] == "EXPIRED") gist.pop_back();
    return gist;
  }
  Commands ReplicatedWithoutNumbers() {
    Commands gists = Replicated();
    std::transform(gists.begin(), gists.end(), gists.begin(), Gist);
    return gists;
  }

  static bool IsFloor(const Command& command) {
    return command.size() > 1 && command[1] == "FLOOR";
  }

  std::unique_ptr<ReplicationStream> stream_;

 private:
  std::ptrdiff_t known_ = std::ssize(ReadAof(primary_.dir()));
};

TEST_F(ModesHoldEndTest, EndIsReplicatedBeforeNextChange) {
  struct Next {
    Command command;
    Command replicated;
    Owners left;
  };
  const std::vector<Next> changes = {
      {{"LOCK.TOUCH", "job", "b", "PX", "60000"}, {"LOCK.HELD", "job", "b", "SHARED"}, {"b", "c"}},
      {{"LOCK.RELEASE", "job", "b"}, {"LOCK.RELEASE", "job", "b"}, {"c"}},
      {{"LOCK.ACQUIRE", "job", "b", "PX", "60000", "SHARED", "REENTRANT"},
       {"LOCK.HELD", "job", "b", "SHARED", "COUNT", "2"},
       {"b", "c"}},
      {{"LOCK.ACQUIRE", "job", "d", "PX", "60000", "SHARED", "LINGER", "5"},
       {"LOCK.HELD", "job", "d", "SHARED", "LINGER", "5"},
       {"b", "c", "d"}},
  };
  for (const auto& [command, replicated, left] : changes) {
    SCOPED_TRACE(command[0] + " " + command[2]);
    LetOneEnd();
    EXPECT_FALSE(client_.Do(command).IsError());
    EXPECT_EQ(ReplicatedWithoutNumbers(),
              (Commands{{"MULTI"}, {"LOCK.FACT", "EXPIRED", "job"}, replicated, {"EXEC"}}));
    AwaitHolders(left);
    EXPECT_EQ(client_.Do("DEL", "job"), Reply::Int(1));
    Replicated();
  }
}

TEST_F(ModesHoldEndTest, EndIsReplicatedWhenTtlIsReverted) {
  LetOneEnd({"LIMIT", "3"});
  EXPECT_EQ(client_.Do("PERSIST", "job"), Reply::Int(1));
  EXPECT_EQ(ReplicatedWithoutNumbers(), (Commands{{"PERSIST", "job"},
                                                  {"MULTI"},
                                                  {"LOCK.FACT", "EXPIRED", "job"},
                                                  {"LOCK.HELD", "job", "c", "LIMIT"},
                                                  {"EXEC"}}));
  AwaitHolders({"b", "c"});
}

// It has ended for its owner too, who gets a new hold.
TEST_F(ModesHoldEndTest, OwnerOfEndedHoldGetsNewHold) {
  LetOneEnd();
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", "a", "PX", kMinute), Reply::Int(0));
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "a"), Reply::Int(0));
  EXPECT_EQ(Replicated(), Commands{}) << "nothing has happened";
  Acquire("a");
  EXPECT_EQ(ReplicatedWithoutNumbers(), (Commands{{"LOCK.HELD", "job", "a", "SHARED"}}))
      << "the new hold takes the place of the old one";
  AwaitHolders({"b", "c", "a"});
}

TEST_F(ModesHoldEndTest, SeveralEndsAreReplicatedInOneFact) {
  Acquire("b");
  // Long enough that none ends before the last of them is granted.
  Acquire("z", {"SHARED"}, 800);
  Acquire("y", {"SHARED"}, 801);
  Acquire("x", {"SHARED", "LINGER", "20"}, 800);
  Acquire("lingers", {"SHARED", "LINGER", "60000"}, 800);
  Replicated();
  AwaitHolders({"b"});
  ASSERT_TRUE(Eventually([&] {  // the longest linger of the others has ended
    return client_.Do("LOCK.INFO", "job").Field("linger-left-ms").integer < 60000 - 30;
  }));
  EXPECT_EQ(Replicated(), Commands{});
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", "b", "PX", kMinute), Reply::Int(1));
  EXPECT_EQ(ReplicatedWithoutNumbers(), (Commands{{"MULTI"},
                                                  {"LOCK.FACT", "EXPIRED", "job"},
                                                  {"LOCK.HELD", "job", "b", "SHARED"},
                                                  {"EXEC"}}))
      << "and not the one that still lingers";
  EXPECT_EQ(InfoField(client_, "turnstile", "turnstile_expired"), "3") << "counted one by one";
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "lingers"), Reply::Int(0));
  EXPECT_EQ(Replicated(), (Commands{{"LOCK.FACT", "ENDED", "job", "lingers"}}))
      << "it was still there";
}

// An owner whose own hold has ended returns: its old hold is removed with those of the others and
// counted once, and the new hold has a new token.
TEST_F(ModesHoldEndTest, OwnEndedHoldIsRemovedWithOthers) {
  Acquire("b");
  const int64_t first = Acquire("a", {"SHARED"}, 30);
  Acquire("c", {"SHARED"}, 30);
  AwaitHolders({"b"});
  Replicated();
  EXPECT_GT(Acquire("a"), first);
  EXPECT_EQ(ReplicatedWithoutNumbers(), (Commands{{"MULTI"},
                                                  {"LOCK.FACT", "EXPIRED", "job"},
                                                  {"LOCK.HELD", "job", "a", "SHARED"},
                                                  {"EXEC"}}));
  EXPECT_EQ(InfoField(client_, "turnstile", "turnstile_expired"), "2");
  AwaitHolders({"b", "a"});
}

// All of them have ended: the fact removes the lock, and the newcomer creates a new one.
TEST_F(ModesHoldEndTest, NewcomerReplacesLockOfEndedHolds) {
  Acquire("a", {"SHARED"}, 30);
  Acquire("b", {"SHARED"}, 30);
  Replicated();
  ASSERT_TRUE(Eventually([&] { return HoldersOf(client_, "job").empty(); }));
  Acquire("c");
  AwaitHolders({"c"});
  Replicated();
  EXPECT_EQ(InfoField(client_, "turnstile", "turnstile_expired"), "2");
}

// A change that replaces all other holds needs no fact about them.
TEST_F(ModesHoldEndTest, UpgradeReplacesEndedHoldsWithoutFact) {
  LetOneEnd();
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "c"), Reply::Int(1));
  Acquire("c", {"SHARED"}, 30);
  AwaitHolders({"b"});
  Replicated();
  Acquire("b", {});
  EXPECT_EQ(ReplicatedWithoutNumbers(), (Commands{{"LOCK.HELD", "job", "b"}}));
  AwaitHolders({"b"});
  EXPECT_EQ(client_.Do("LOCK.ACQUIRE", "job", "a", "PX", 1, "SHARED"), Reply::Nil());
}

TEST_F(ModesHoldEndTest, EndIsReplicatedAtOnceWhenSomebodyWaits) {
  Acquire("b");
  Acquire("c");
  Acquire("a", {"SHARED"}, 800);
  Replicated();
  Waiter waiter(primary_, "job", "w");
  AwaitHolders({"b", "c"});
  Commands replicated;
  ASSERT_TRUE(Eventually([&] { return !(replicated = ReplicatedWithoutNumbers()).empty(); }));
  EXPECT_EQ(replicated, (Commands{{"LOCK.FACT", "EXPIRED", "job"}}));
  EXPECT_FALSE(waiter.HasReply());
  for (const char* owner : {"b", "c"}) {
    EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", owner), Reply::Int(1));
  }
  EXPECT_TRUE(waiter.Read().IsInteger());
  EXPECT_EQ(ReplicatedWithoutNumbers(), (Commands{{"LOCK.RELEASE", "job", "b"},
                                                  {"LOCK.RELEASE", "job", "c"},
                                                  {"LOCK.HELD", "job", "w"}}));
  AwaitHolders({"w"});
}

// The end of a hold before anybody waited is replicated when the first waiter comes, or with the
// next change.
TEST_F(ModesHoldEndTest, EarlierEndIsReplicatedForLaterWaiter) {
  LetOneEnd();
  Waiter waiter(primary_, "job", "w");
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "b"), Reply::Int(1));
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "c"), Reply::Int(1));
  EXPECT_TRUE(waiter.Read().IsInteger());
  Commands replicated = ReplicatedWithoutNumbers();
  std::erase_if(replicated,
                [](const Command& command) { return command.size() == 1; });  // MULTI, EXEC
  EXPECT_EQ(replicated, (Commands{{"LOCK.FACT", "EXPIRED", "job"},
                                  {"LOCK.RELEASE", "job", "b"},
                                  {"LOCK.RELEASE", "job", "c"},
                                  {"LOCK.HELD", "job", "w"}}));
  AwaitHolders({"w"});
}

TEST_F(ModesHoldEndTest, EndedPermitIsGrantedToWaiter) {
  Acquire("b", {"LIMIT", "3"});
  Acquire("c", {"LIMIT", "3"});
  Acquire("a", {"LIMIT", "3"}, 3000);
  Replicated();
  Waiter waiter(primary_);
  waiter.Send("LOCK.ACQUIRE", "job", "w", "PX", kMinute, "LIMIT", 3, "WAIT", kMinute);
  AwaitBlocked(client_, waiter.id());
  EXPECT_TRUE(waiter.Read().IsInteger());
  Commands replicated = ReplicatedWithoutNumbers();
  std::erase_if(replicated, [](const Command& command) { return command.size() == 1; });
  EXPECT_EQ(replicated,
            (Commands{{"LOCK.FACT", "EXPIRED", "job"}, {"LOCK.HELD", "job", "w", "LIMIT"}}));
  AwaitHolders({"b", "c", "w"});
}

TEST_F(ModesHoldEndTest, EndOfLastHoldIsReplicatedAsKeyRemoval) {
  Acquire("a", {"SHARED"}, 1500);
  Acquire("b", {"SHARED", "LINGER", "30"}, 1500);
  Replicated();
  ASSERT_TRUE(Eventually([&] { return client_.Do("DBSIZE") == Reply::Int(0); }));
  const Commands replicated = Replicated();
  EXPECT_TRUE(
      (replicated == Commands{{"DEL", "job"}} || replicated == Commands{{"UNLINK", "job"}}));
  EXPECT_EQ(copy_.Do("DBSIZE"), Reply::Int(0));
}

// The AOF and a restart preserve as much as the replica has: the hold exists and has ended.
TEST_F(ModesHoldEndTest, EndedHoldSurvivesRestartAsEnded) {
  LetOneEnd();
  const Reply digest = DigestOf(client_, "job");
  Crash(primary_);
  client_ = primary_.Connect();
  EXPECT_EQ(DigestOf(client_, "job"), digest);
  EXPECT_EQ(HoldersOf(client_, "job"), (Owners{"b", "c"}));
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "a"), Reply::Int(0));
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "b"), Reply::Int(1));
  Commands aof = ReadAof(primary_.dir());
  ASSERT_GE(aof.size(), 4U);
  std::transform(aof.begin(), aof.end(), aof.begin(), Gist);
  EXPECT_EQ(
      (Commands{aof.end() - 4, aof.end()}),
      (Commands{
          {"MULTI"}, {"LOCK.FACT", "EXPIRED", "job"}, {"LOCK.RELEASE", "job", "b"}, {"EXEC"}}));
  EXPECT_NE(DigestOf(client_, "job"), digest);
}

// --- Releases, lingers and sessions --------------------------------------------------------------

TEST_F(ModesHoldEndTest, ReleasesOfCountedHoldAreReplicatedOneByOne) {
  for (const Command& mode : Commands{{}, {"SHARED"}}) {
    Command reentrant = mode;
    reentrant.push_back("REENTRANT");
    if (!mode.empty()) Acquire("other", mode);
    int64_t token = 0;
    for (int i = 0; i < 3; i++) token = Acquire("me", reentrant);
    Replicated();
    for (int64_t left = 3; left > 0; left--) {
      for (Client* client : {&client_, &copy_}) {
        const Reply holder = client->Do("LOCK.INFO", "job").Field("holders").elements.back();
        EXPECT_EQ(holder.Field("owner"), Reply::Str("me"));
        EXPECT_EQ(holder.Field("count"), Reply::Int(left));
        EXPECT_EQ(holder.Field("token"), Reply::Int(token));
      }
      EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "me"), Reply::Int(1));
      EXPECT_EQ(Replicated(), (Commands{{"LOCK.RELEASE", "job", "me"}}));
    }
    EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "me"), Reply::Int(0));
    AwaitHolders(mode.empty() ? Owners{} : Owners{"other"});
    EXPECT_EQ(Replicated(), Commands{});
  }
}

// A replica whose clock says that the lease ended long ago still decrements the count.
TEST_F(ModesHoldEndTest, ReplicaAppliesReleasesWhateverItsClock) {
  Acquire("other", {"SHARED"});
  for (int i = 0; i < 3; i++) Acquire("me", {"SHARED", "REENTRANT"}, 3000);
  Settle(client_, copy_);
  replica_.Pause();
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "me"), Reply::Int(1));
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "me"), Reply::Int(1));
  const Reply digest = DigestOf(client_, "job");
  ASSERT_TRUE(Eventually([&] { return HoldersOf(client_, "job") == Owners{"other"}; }));
  replica_.Continue();
  ExpectSame(client_, copy_, "later");
  EXPECT_EQ(DigestOf(copy_, "job"), digest);
  AwaitHolders({"other"});
}

TEST_F(ModesHoldEndTest, ReleaseOfSeveralLocksIsReplicatedOneByOne) {
  EXPECT_TRUE(client_
                  .Do("LOCK.ACQUIRE", "job", "me", "PX", kMinute, "SHARED", "REENTRANT", "ALSO", 2,
                      "x", "y")
                  .IsInteger());
  EXPECT_EQ(ReplicatedWithoutNumbers(), (Commands{{"MULTI"},
                                                  {"LOCK.HELD", "job", "me", "SHARED"},
                                                  {"LOCK.HELD", "x", "me", "SHARED"},
                                                  {"LOCK.HELD", "y", "me", "SHARED"},
                                                  {"EXEC"}}));
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "y", "me", "PX", kMinute, "ALSO", 2, "free", "job"),
            Reply::Int(2));
  EXPECT_EQ(ReplicatedWithoutNumbers(), (Commands{{"MULTI"},
                                                  {"LOCK.HELD", "y", "me", "SHARED"},
                                                  {"LOCK.HELD", "job", "me", "SHARED"},
                                                  {"EXEC"}}));
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "me", "ALSO", 3, "x", "free", "y"), Reply::Int(3));
  EXPECT_EQ(Replicated(), (Commands{{"MULTI"},
                                    {"LOCK.RELEASE", "job", "me"},
                                    {"LOCK.RELEASE", "x", "me"},
                                    {"LOCK.RELEASE", "y", "me"},
                                    {"EXEC"}}));
  EXPECT_EQ(client_.Do("DBSIZE"), Reply::Int(0));
}

// Releasing a lingering hold returns 0, and its end is replicated.
TEST_F(ModesHoldEndTest, ReleaseEndingLingerIsReplicated) {
  for (const Command& mode : Commands{{}, {"SHARED"}, {"LIMIT", "2"}}) {
    Command lingering = mode;
    lingering.insert(lingering.end(), {"LINGER", "60000"});
    const Owners others = mode.empty() ? Owners{} : Owners{"other"};
    if (!mode.empty()) Acquire("other", mode);
    Acquire("me", lingering, 30);
    Replicated();
    AwaitHolders(others);
    for (Client* client : {&client_, &copy_}) {
      EXPECT_GT(client->Do("LOCK.INFO", "job").Field("linger-left-ms").integer, 0);
    }
    EXPECT_EQ(Replicated(), Commands{}) << "the linger was replicated with the grant";
    EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "me"), Reply::Int(0));
    EXPECT_EQ(Replicated(), (Commands{{"LOCK.FACT", "ENDED", "job", "me"}}));
    for (Client* client : {&client_, &copy_}) {
      const Reply info = client->Do("LOCK.INFO", "job");
      EXPECT_EQ(mode.empty() ? info : info.Field("linger-left-ms"),
                mode.empty() ? Reply::Nil() : Reply::Int(0));
    }
    EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "me"), Reply::Int(0));
    EXPECT_EQ(Replicated(), Commands{});
    const Reply digest = client_.Do("DEBUG", "DIGEST");
    EXPECT_EQ(client_.Do("DEBUG", "LOADAOF"), Reply::Ok());
    EXPECT_EQ(client_.Do("DEBUG", "DIGEST"), digest) << "also by the AOF";
    client_.Do("DEL", "job");
    Replicated();
  }
}

// One release ends a lingering counted hold, as the end of its lease does.
TEST_F(ModesHoldEndTest, OneReleaseEndsLingerOfCountedHold) {
  for (int i = 0; i < 3; i++) Acquire("me", {"REENTRANT", "LINGER", "60000"}, 30);
  Replicated();
  AwaitHolders({});
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "me"), Reply::Int(0));
  EXPECT_EQ(Replicated(), (Commands{{"LOCK.FACT", "ENDED", "job", "me"}}));
  EXPECT_EQ(copy_.Do("DBSIZE"), Reply::Int(0));
}

TEST_F(ModesHoldEndTest, SessionEndIsReplicated) {
  Acquire("other");
  auto session = std::make_unique<Client>(primary_.Connect());
  for (int i = 0; i < 2; i++) {
    EXPECT_TRUE(
        session->Do("LOCK.ACQUIRE", "job", "me", "PX", kMinute, "SHARED", "SESSION", "REENTRANT")
            .IsInteger());
  }
  EXPECT_TRUE(session
                  ->Do("LOCK.ACQUIRE", "job", "lingers", "PX", kMinute, "SHARED", "SESSION",
                       "LINGER", kMinute)
                  .IsInteger());
  EXPECT_EQ(ReplicatedWithoutNumbers().back(),
            (Command{"LOCK.HELD", "job", "lingers", "SHARED", "LINGER", "60000"}))
      << "nothing about a session";
  const int64_t before = ServerNow(client_);
  session.reset();
  AwaitHolders({"other"});
  const int64_t after = ServerNow(client_);
  Commands replicated = Replicated();
  std::erase_if(replicated, [](const Command& command) { return command.size() == 1; });
  Owners named;
  for (const Command& fact : replicated) {
    ASSERT_GE(fact.size(), 5U);
    EXPECT_EQ((Command{fact.begin(), fact.begin() + 3}), (Command{"LOCK.FACT", "SESSION", "job"}));
    EXPECT_GE(std::stoll(fact[3]), before - 1);
    EXPECT_LE(std::stoll(fact[3]), after);
    named.insert(named.end(), fact.begin() + 4, fact.end());
  }
  std::sort(named.begin(), named.end());
  EXPECT_EQ(named, (Owners{"lingers", "me"}));
  for (Client* client : {&client_, &copy_}) {
    EXPECT_GT(client->Do("LOCK.INFO", "job").Field("linger-left-ms").integer, 0);
  }
}

// --- Random requests -----------------------------------------------------------------------------

// Clients that use every kind of request, with leases that end all the time.
class Callers {
 public:
  Callers(const Server& server, unsigned seed) : server_(server), random_(seed) {
    for (int i = 0; i < kCallers; i++) callers_.push_back({server.Connect()});
  }

  static constexpr int kCallers = 6;

  // One client sends a request, reads a reply or disconnects.
  void Step(bool with_long_leases) {
    Caller& caller = callers_[Below(callers_.size())];
    if (caller.busy) {
      if (caller.client.HasReply(Milliseconds{Below(4) == 0 ? 1 : 0})) Take(caller);
      if (caller.busy && Below(50) == 0) caller = {server_.Connect()};
      return;
    }
    if (Below(60) == 0) {
      caller = {server_.Connect()};
      return;
    }
    caller.client.Send(Request(with_long_leases));
    caller.busy = true;
    asked_++;
  }

  // Reads all outstanding replies.
  void Rest() {
    for (Caller& caller : callers_) {
      if (caller.busy) Take(caller);
    }
  }

  int asked() const { return asked_; }
  int granted() const { return granted_; }

 private:
  struct Caller {
    Client client;
    bool busy = false;
  };

  size_t Below(size_t limit) { return random_() % limit; }
  std::string Number(size_t least, size_t most) {
    return std::to_string(least + Below(most - least + 1));
  }
  std::string Key() { return "key " + Number(0, 4); }
  std::string Owner() { return "owner " + Number(0, 5); }

  void Take(Caller& caller) {
    const Reply reply = caller.client.Read();
    caller.busy = false;
    if (reply.IsInteger() && reply.integer > 100) granted_++;
    const bool fine = !reply.IsError() || reply.IsError("ERR this owner holds") ||
                      reply.IsError("ERR ALSO cannot upgrade") ||
                      reply.IsError("ERR no such key") || reply.IsError("DEADLOCK") ||
                      reply.IsError("UNBLOCKED");
    EXPECT_TRUE(fine) << reply;
  }

  void AddAlso(Command& command) {
    std::vector<std::string> more;
    for (int i = 0; i < 5; i++) {
      const std::string key = "key " + std::to_string(i);
      if (key != command[1] && Below(3) == 0) more.push_back(key);
    }
    if (more.empty()) return;
    std::shuffle(more.begin(), more.end(), random_);
    command.insert(command.end(), {"ALSO", std::to_string(more.size())});
    command.insert(command.end(), more.begin(), more.end());
  }

  Command Request(bool with_long_leases) {
    const std::string lease = with_long_leases && Below(2) == 0 ? "60000" : Number(1, 25);
    const size_t kind = Below(100);
    Command command;
    if (kind < 55) {
      command = {"LOCK.ACQUIRE", Key(), Owner(), "PX", lease};
      const size_t mode = Below(5);
      if (mode < 2) command.push_back("SHARED");
      if (mode == 2 || mode == 3) command.insert(command.end(), {"LIMIT", Number(1, 4)});
      if (mode != 2 && mode != 3 && Below(4) == 0) command.push_back("REENTRANT");
      if (Below(5) == 0) command.push_back("SESSION");
      if (Below(5) == 0) command.insert(command.end(), {"LINGER", Number(0, 20)});
      if (Below(3) == 0) command.insert(command.end(), {"WAIT", Number(0, 20)});
      if (Below(7) == 0) AddAlso(command);
    } else if (kind < 75) {
      command = {"LOCK.RELEASE", Key(), Owner()};
      if (Below(4) == 0) AddAlso(command);
    } else if (kind < 90) {
      command = {"LOCK.TOUCH", Key(), Owner(), "PX", lease};
      if (Below(4) == 0) AddAlso(command);
    } else if (kind < 93) {
      command = {"LOCK.INFO", Key()};
    } else if (kind < 95) {
      command = {"PERSIST", Key()};
    } else if (kind < 97) {
      command = {"PEXPIRE", Key(), Number(1, 20)};
    } else if (kind < 99) {
      command = {"RENAME", Key(), Key()};
    } else {
      command = {"DEL", Key()};
    }
    return command;
  }

  const Server& server_;
  std::mt19937 random_;
  std::vector<Caller> callers_;
  int asked_ = 0;
  int granted_ = 0;
};

// No holder of the lock will lose it soon.
bool Lasts(Client& client, const std::string& key) {
  constexpr int64_t kSoon = 10000;
  const Reply info = client.Do("LOCK.INFO", key);
  if (info.IsNil()) return false;
  const std::vector<Reply> holders = info.Field("holders").elements;
  return EndOf(client, key) > ServerNow(client) + kSoon &&
         std::all_of(holders.begin(), holders.end(), [](const Reply& holder) {
           return holder.Field("lease-left-ms").integer > kSoon;
         });
}

class ModesMixTest : public ModesReplicaTest, public ::testing::WithParamInterface<unsigned> {
 protected:
  // Compares what the two servers store while nothing but time passes.
  void Compare(Callers& callers, const std::string& when) {
    callers.Rest();
    // The server has noticed closed connections and has ended what they held.
    const std::string clients = std::to_string(Callers::kCallers + 1);
    EXPECT_TRUE(
        Eventually([&] { return InfoField(client_, "clients", "connected_clients") == clients; }));
    EXPECT_TRUE(Eventually([&] { return WaitersNow(client_) == "0"; }));
    EXPECT_EQ(client_.Do("DEBUG", "SET-ACTIVE-EXPIRE", 0), Reply::Ok());
    ExpectSame(client_, copy_, when);
    for (int i = 0; i < 5; i++) {
      const std::string key = "key " + std::to_string(i);
      // Holds end by the clock on both servers, so the replica is compared with the primary before
      // and after.
      EXPECT_TRUE(Eventually([&] {
        const Reply before = HoldsOf(client_, key);
        const Reply there = HoldsOf(copy_, key);
        if (HoldsOf(client_, key) != before) return false;
        EXPECT_EQ(there, before) << key << " " << when;
        return true;
      }));
    }
    EXPECT_EQ(client_.Do("DEBUG", "SET-ACTIVE-EXPIRE", 1), Reply::Ok());
  }
};

TEST_P(ModesMixTest, PrimaryReplicaAndAofAgree) {
  constexpr int kRounds = 12;
  constexpr int kRequests = 250;  // in each
  Callers callers(primary_, GetParam());
  for (int round = 1; round <= kRounds; round++) {
    const bool last = round == kRounds;
    while (callers.asked() < round * kRequests) callers.Step(/*with_long_leases=*/last);
    Compare(callers, "after " + std::to_string(callers.asked()) + " requests");
    if (HasFailure()) return;
  }
  EXPECT_GT(callers.granted(), kRounds * kRequests / 10) << "otherwise the test proves nothing";

  // The short leases end; the rest survives a restart.
  for (int i = 0; i < 3; i++) {
    client_.Do("LOCK.ACQUIRE", "lasting", i, "PX", kMinute, "SHARED", "LINGER", i * 1000);
  }
  ASSERT_TRUE(Eventually([&] {
    const std::vector<std::string> keys = KeysOf(client_);
    const bool all_last = std::all_of(keys.begin(), keys.end(),
                                      [&](const std::string& key) { return Lasts(client_, key); });
    // KEYS omits expired keys that are not removed yet.
    return all_last && client_.Do("DBSIZE") == Reply::Int(std::ssize(keys));
  }));
  ExpectSame(client_, copy_, "in the end");
  const std::map<std::string, Reply> before = AllStored(client_);
  EXPECT_EQ(AllStored(copy_), before);
  const Reply digest = client_.Do("DEBUG", "DIGEST");
  Crash(primary_);
  client_ = primary_.Connect();
  EXPECT_EQ(AllStored(client_), before);
  EXPECT_EQ(client_.Do("DEBUG", "DIGEST"), digest);
  RewriteAof(primary_);
  Crash(primary_);
  client_ = primary_.Connect();
  EXPECT_EQ(AllStored(client_), before);
  EXPECT_EQ(client_.Do("DEBUG", "DIGEST"), digest);
}

INSTANTIATE_TEST_SUITE_P(Seed, ModesMixTest, ::testing::Values(1U, 2U, 3U));

// --- Memory --------------------------------------------------------------------------------------

TEST(ModesMemoryTest, MemoryUsageGrowsWithHolders) {
  Server server;
  Client client = server.Connect();
  const auto usage = [&](const std::string& key) {
    const Reply reply = client.Do("MEMORY", "USAGE", key);
    EXPECT_TRUE(reply.IsInteger()) << reply;
    return reply.integer;
  };
  const auto name = [](int i) { return "owner " + std::to_string(100000 + i); };
  std::map<int, int64_t> by_holders;
  for (int i = 1; i <= 1000; i++) {
    EXPECT_TRUE(client.Do("LOCK.ACQUIRE", "job", name(i), "PX", kMinute, "SHARED").IsInteger());
    const int64_t now = usage("job");
    if (!by_holders.empty()) {
      EXPECT_GT(now, by_holders.rbegin()->second) << i;
    }
    by_holders[i] = now;
  }
  // Each holder has two instants, a token, its name and an entry in three lists.
  const int64_t each = (by_holders[1000] - by_holders[500]) / 500;
  EXPECT_GE(each, 3 * 8 + 12);
  EXPECT_LE(each, 200);
  for (int i = 2; i <= 1000; i++) {
    EXPECT_EQ(client.Do("LOCK.RELEASE", "job", name(i)), Reply::Int(1));
  }
  EXPECT_LT(usage("job"), by_holders[1000] - int64_t{500} * (3 * 8 + 12));

  // A count and a linger need memory only if they are used.
  MustAcquire(client, "one", name(1));
  const int64_t one = usage("one");
  EXPECT_TRUE(client.Do("LOCK.ACQUIRE", "two", name(1), "PX", kMinute, "LINGER", 1, "REENTRANT")
                  .IsInteger());
  EXPECT_GT(usage("two"), one);
  EXPECT_LT(one, by_holders[2]);
}

// --- Many locks ----------------------------------------------------------------------------------

TEST(ModesStorageLong, MillionLocksOfThreeHoldersAreSavedAndLoaded) {
  constexpr Milliseconds kLong{100000};
  constexpr int kLocks = 1'000'000;
  constexpr int kBatch = 10'000;
  Server server({.start_within = kLong});
  const std::string name = "lock 0000000";
  const auto name_of = [&](int i) {
    const std::string digits = std::to_string(i);
    return std::string(name).replace(name.size() - digits.size(), digits.size(), digits);
  };
  // The three requests for one lock, in each mode; only the name has to be inserted.
  std::vector<std::string> requests;
  for (const Command& mode :
       Commands{{"SHARED"}, {"LIMIT", "3"}, {"SHARED", "REENTRANT", "LINGER", "1000"}}) {
    requests.emplace_back();
    for (const char* owner : {"c", "a", "b"}) {
      Command command = {"LOCK.ACQUIRE", name, owner, "PX", "86000000"};
      command.insert(command.end(), mode.begin(), mode.end());
      requests.back() += EncodeCommand(command);
    }
  }
  {
    RawConnection connection = server.ConnectRaw();
    for (int first = 0; first < kLocks; first += kBatch) {
      std::string bytes;
      for (int i = first; i < first + kBatch; i++) {
        size_t at = bytes.size();
        bytes += requests[static_cast<size_t>(i) % requests.size()];
        while ((at = bytes.find(name, at)) != std::string::npos) {
          bytes.replace(at, name.size(), name_of(i));
          at += name.size();
        }
      }
      connection.WriteRaw(bytes);
      // Every reply is a token, which has 16 digits until the year 2286.
      constexpr size_t kAnswer = std::string_view(":1700000000000001\r\n").size();
      const std::string answers = connection.ReadExactly(kAnswer * 3 * kBatch, kLong);
      for (size_t i = 0; i < answers.size(); i += kAnswer) ASSERT_EQ(answers[i], ':');
    }
  }
  const auto ask = [&](const Command& command) {
    RawConnection connection = server.ConnectRaw();
    connection.SendCommand(command);
    return connection.ReadReply(kLong);
  };
  EXPECT_EQ(ask({"DBSIZE"}), Reply::Int(kLocks));
  const Reply digest = ask({"DEBUG", "DIGEST"});
  EXPECT_EQ(ask({"SAVE"}), Reply::Ok());
  server.Kill9();
  ASSERT_TRUE(server.Restart());
  EXPECT_EQ(ask({"DBSIZE"}), Reply::Int(kLocks));
  EXPECT_EQ(ask({"DEBUG", "DIGEST"}), digest);
  Client client = server.Connect();
  EXPECT_EQ(HoldersOf(client, "lock 0999998"), (Owners{"c", "a", "b"}));
  EXPECT_EQ(client.Do("LOCK.RELEASE", "lock 0999998", "a"), Reply::Int(1));
  EXPECT_EQ(HoldersOf(client, "lock 0999998"), (Owners{"c", "b"}));
  server.Kill9();  // otherwise it would free them one by one
}

}  // namespace
}  // namespace turnstile::testing
