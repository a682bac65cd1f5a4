// Access rights, and what still works when memory is full.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "support/lock_test.h"
#include "support/markdown.h"
#include "support/replication_stream.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

class AccessTest : public SharedServerTest<AccessTest> {
 protected:
  Reply Do(const Command& command) { return client_.Do(command); }

  // A connection of a new user that has exactly these rights.
  Client ConnectAs(const std::string& user, const Command& rights) {
    return server().ConnectAs(user, rights);
  }
};

// Every command that clients may use, as alice would call it.
Commands CommandsOn(const std::string& key) {
  return {{"LOCK.ACQUIRE", key, "alice", "PX", "60000"},
          {"LOCK.TOUCH", key, "alice", "EX", "60"},
          {"LOCK.FENCE", key},
          {"LOCK.FENCE", key, "1"},
          {"LOCK.INFO", key},
          {"LOCK.RELEASE", key, "alice"}};
}

// --- ACL --------------------------------------------------------------------------------------

TEST_F(AccessTest, CommandsRequirePermissionForKey) {
  Client worker = ConnectAs("worker", {"~lock:*", "+lock.acquire", "+lock.release", "+lock.touch",
                                       "+lock.fence", "+lock.info", "+lock.help"});
  for (const Command& command : CommandsOn("lock:1")) {
    const Reply reply = worker.Do(command);
    EXPECT_FALSE(reply.IsError()) << command[0] << ": " << reply;
  }
  EXPECT_FALSE(worker.Do("LOCK.HELP").IsError());
  for (const Command& command : CommandsOn("other")) {
    const Reply reply = worker.Do(command);
    EXPECT_TRUE(reply.IsError("NOPERM")) << command[0] << ": " << reply;
  }
  EXPECT_EQ(Do({"DBSIZE"}), Reply::Int(0));
}

TEST_F(AccessTest, CommandsRequirePermissionForCommand) {
  Client worker = ConnectAs("worker", {"~lock:*", "+lock.acquire", "+lock.release"});
  EXPECT_TRUE(worker.Do("LOCK.ACQUIRE", "lock:1", "alice", "PX", kMinute).IsInteger());
  for (const Command& command : Commands{{"LOCK.TOUCH", "lock:1", "alice", "PX", "1"},
                                         {"LOCK.FENCE", "lock:1"},
                                         {"LOCK.INFO", "lock:1"},
                                         {"LOCK.HELP"},
                                         {"LOCK.FACT", "FLOOR", "1"},
                                         {"LOCK.HELD", "lock:1", "alice", "5 1 2"},
                                         {"DEL", "lock:1"}}) {
    const Reply reply = worker.Do(command);
    EXPECT_TRUE(reply.IsError("NOPERM")) << command[0] << ": " << reply;
  }
  EXPECT_EQ(worker.Do("LOCK.RELEASE", "lock:1", "alice"), Reply::Int(1));
}

TEST_F(AccessTest, ReadPermissionSufficesForReadOnlyCommands) {
  Client reader = ConnectAs("reader", {"%R~lock:*", "+@all"});
  const int64_t token = MustAcquire(client_, "lock:1", "alice");
  EXPECT_EQ(reader.Do("LOCK.FENCE", "lock:1"), Reply::Int(token));
  EXPECT_EQ(reader.Do("LOCK.FENCE", "lock:1", token), Reply::Int(1));
  EXPECT_EQ(HolderField(reader.Do("LOCK.INFO", "lock:1"), "owner"), Reply::Str("alice"));
  for (const char* key : {"lock:1", "lock:free"}) {
    for (const Command& command : Commands{{"LOCK.ACQUIRE", key, "alice", "PX", "1"},
                                           {"LOCK.TOUCH", key, "alice", "PX", "1"},
                                           {"LOCK.RELEASE", key, "alice"}}) {
      const Reply reply = reader.Do(command);
      EXPECT_TRUE(reply.IsError("NOPERM")) << command[0] << ": " << reply;
    }
  }
  EXPECT_TRUE(reader.Do("LOCK.INFO", "other").IsError("NOPERM"));

  EXPECT_EQ(client_.Do("LOCK.FENCE", "lock:1", token), Reply::Int(1));
}

TEST_F(AccessTest, WritePermissionDoesNotAllowReading) {
  Client writer = ConnectAs("writer", {"%W~lock:*", "+@all"});
  EXPECT_TRUE(writer.Do("LOCK.ACQUIRE", "lock:1", "alice", "PX", kMinute).IsInteger());
  EXPECT_EQ(writer.Do("LOCK.TOUCH", "lock:1", "alice", "PX", kMinute), Reply::Int(1));
  EXPECT_TRUE(writer.Do("LOCK.FENCE", "lock:1").IsError("NOPERM"));
  EXPECT_TRUE(writer.Do("LOCK.FENCE", "lock:1", 1).IsError("NOPERM"));
  EXPECT_TRUE(writer.Do("LOCK.INFO", "lock:1").IsError("NOPERM"));
  EXPECT_EQ(writer.Do("LOCK.RELEASE", "lock:1", "alice"), Reply::Int(1));
}

TEST_F(AccessTest, PermissionsApplyInScripts) {
  Client worker = ConnectAs("worker", {"~lock:*", "+eval", "+lock.acquire"});
  const auto eval = [&worker](const std::string& call, const std::string& key) {
    return worker.Do("EVAL", "return redis.call(" + call + ")", 1, key);
  };
  EXPECT_TRUE(eval("'LOCK.ACQUIRE', KEYS[1], 'alice', 'PX', 60000", "lock:1").IsInteger());
  EXPECT_TRUE(eval("'LOCK.RELEASE', KEYS[1], 'alice'", "lock:1").IsError());
  EXPECT_TRUE(eval("'LOCK.ACQUIRE', 'other', 'alice', 'PX', 60000", "lock:1").IsError());
  EXPECT_EQ(Do({"EXISTS", "lock:1", "other"}), Reply::Int(1));
}

// The module changes plain locks with commands of the server, for which the caller needs no rights.
TEST_F(AccessTest, PlainLocksNeedNoExtraPermissions) {
  Client worker = ConnectAs("worker", {"~lock:*", "+lock.acquire", "+lock.release", "+lock.touch"});
  Do({"SET", "lock:1", "alice"});
  EXPECT_EQ(worker.Do("LOCK.TOUCH", "lock:1", "alice", "PX", kMinute), Reply::Int(1));
  EXPECT_EQ(worker.Do("LOCK.RELEASE", "lock:1", "alice"), Reply::Int(1));
  Do({"SET", "lock:1", "alice"});
  EXPECT_TRUE(worker.Do("LOCK.ACQUIRE", "lock:1", "alice", "PX", kMinute).IsInteger());
}

// Permission to inspect a lock does not include permission to read strings.
TEST_F(AccessTest, InfoShowsStringValueOnlyToUsersAllowedToGetIt) {
  Do({"SET", "lock:1", "its-value"});
  const auto owner = [](Client& client) {
    return HolderField(client.Do("LOCK.INFO", "lock:1"), "owner");
  };
  Client may = ConnectAs("may", {"~lock:*", "+lock.info", "+get"});
  EXPECT_EQ(owner(may), Reply::Str("its-value"));
  for (const Command& rights : Commands{{"~lock:*", "+lock.info"},
                                        {"~lock:*", "+lock.info", "(~other +get)"},
                                        {"+lock.info", "%W~lock:*", "(~lock:* +lock.info)"}}) {
    Client may_not = ConnectAs("may_not", rights);
    EXPECT_EQ(may_not.Do("LOCK.INFO", "lock:1").Field("mode"), Reply::Str("plain"));
    EXPECT_EQ(owner(may_not), Reply::Nil()) << rights.back();
  }
  // Scripts run with the caller's rights.
  Client script = ConnectAs("script", {"~lock:*", "+lock.info", "+eval"});
  EXPECT_EQ(script.Do("EVAL", "return redis.call('LOCK.INFO', KEYS[1])", 1, "lock:1")
                .ToString()
                .find("its-value"),
            std::string::npos);
}

// A disabled user cannot log in; existing connections go on, as for every command of the server.
TEST_F(AccessTest, DisabledUserIsStillGrantedItsWait) {
  const auto log_in = [](Waiter& waiter) {
    EXPECT_EQ(waiter.Do("AUTH", "worker", "secret"), Reply::Ok());
  };
  ConnectAs("worker", {"~lock:*", "+lock.acquire", "+ping"});
  MustAcquire(client_, "lock:1", "alice");
  Waiter waits(server());
  log_in(waits);
  waits.Wait("lock:1", "bob");
  EXPECT_EQ(Do({"ACL", "SETUSER", "worker", "off"}), Reply::Ok());
  EXPECT_EQ(Do({"LOCK.RELEASE", "lock:1", "alice"}), Reply::Int(1));
  EXPECT_TRUE(waits.Read().IsInteger());
  EXPECT_EQ(waits.Do("PING"), Reply::Status("PONG")) << "as a direct call is answered";
  EXPECT_TRUE(waits.Do("LOCK.ACQUIRE", "lock:2", "bob", "PX", kMinute).IsInteger());
  Client late = server().Connect();
  EXPECT_TRUE(late.Do("AUTH", "worker", "secret").IsError("WRONGPASS"));
}

// --- The rule sets of docs/operations.md -------------------------------------------------------

// The users created as the document says, each with a connection, and the table of their rights.
// Each row has one or two commands that show it.
class AclRuleSetTest : public AccessTest {
 protected:
  AclRuleSetTest() {
    for (const std::string& line : ReadSource("docs/operations.md")) {
      const std::vector<std::string> words = Split(line, ' ');
      const auto acl = std::find(words.begin(), words.end(), "ACL");
      if (!line.starts_with("    ACL SETUSER ") || acl == words.end()) continue;
      const Command set_user(acl, words.end());
      EXPECT_EQ(Do(set_user), Reply::Ok()) << line;
      names_.push_back(set_user.at(2));
      users_.push_back(server().Connect());
      EXPECT_EQ(users_.back().Do("AUTH", names_.back(), "change-me"), Reply::Ok());
    }
    EXPECT_EQ(names_, (std::vector<std::string>{"worker", "operator", "dashboard"}));
  }

  std::vector<std::string> names_;
  std::vector<Client> users_;
};

TEST_F(AclRuleSetTest, EachUserHasExactlyDocumentedPermissions) {
  const std::map<std::string, Commands> shown = {
      {"take, renew and give up locks under `lock:",
       {{"LOCK.ACQUIRE", "lock:1", "me", "PX", "60000"},
        {"LOCK.TOUCH", "lock:1", "me", "PX", "60000"},
        {"LOCK.FENCE", "lock:1"},
        {"LOCK.RELEASE", "lock:1", "me"}}},
      {"write `data:` keys, also after THEN",
       {{"SET", "data:1", "x"},
        {"LOCK.FENCE", "lock:held", "TOKEN", "THEN", "SET", "data:1", "y"}}},
      {"subscribe to what happens to its locks", {{"SUBSCRIBE", "__keyspace@0__:lock:1"}}},
      {"see who holds a lock and who waits", {{"LOCK.INFO", "lock:held"}}},
      {"list locks and the longest lines", {{"LOCK.LIST"}, {"LOCK.TOP"}}},
      {"read the figures", {{"INFO", "turnstile"}}},
      {"force a release (`DEL`)", {{"DEL", "lock:nobody"}, {"UNLINK", "lock:nobody"}}},
      {"end a client's wait", {{"CLIENT", "UNBLOCK", "999999"}}},
      {"touch keys elsewhere",
       {{"LOCK.ACQUIRE", "other", "me", "PX", "60000"},
        {"LOCK.INFO", "other"},
        {"LOCK.RELEASE", "other", "me"},
        {"LOCK.FENCE", "other"},
        {"GET", "other"},
        {"DEL", "other"},
        {"SUBSCRIBE", "__keyspace@0__x:other"}}},
      {"change settings", {{"CONFIG", "SET", "turnstile.max-waiters", "5000"}}},
  };
  const int64_t token = MustAcquire(client_, "lock:held", "the-owner");
  const std::vector<Row> rows = ReadTable("docs/operations.md", "may");
  EXPECT_EQ(rows.size(), shown.size());
  for (const Row& row : rows) {
    SCOPED_TRACE(row.at(0));
    ASSERT_TRUE(shown.contains(row[0]));
    ASSERT_EQ(row.size(), 1 + names_.size());
    for (size_t user = 0; user < names_.size(); user++) {
      for (Command command : shown.at(row[0])) {
        std::replace(command.begin(), command.end(), std::string("TOKEN"), std::to_string(token));
        // A connection of its own, because SUBSCRIBE changes its state.
        Client client = server().Connect();
        client.Do("AUTH", names_[user], "change-me");
        const Reply reply = client.Do(command);
        EXPECT_EQ(!reply.IsError(), row[1 + user] == "yes")
            << names_[user] << ": " << command[0] << ' ' << reply;
        if (row[1 + user] != "yes") {
          EXPECT_TRUE(reply.IsError("NOPERM")) << reply;
        }
      }
    }
  }
}

// No user may run commands that reveal the owners of others, or that administer the server.
TEST_F(AclRuleSetTest, NoUserMayRunPrivilegedCommands) {
  for (const Command& command : Commands{{"MONITOR"},
                                         {"CONFIG", "SET", "dir", "/"},
                                         {"CONFIG", "GET", "requirepass"},
                                         {"CONFIG", "GET", "requirepass"},
                                         {"FLUSHALL"},
                                         {"ACL", "WHOAMI"},
                                         {"DEBUG", "SLEEP", "0"},
                                         {"KEYS", "*"},
                                         {"EVAL", "return 1", "0"},
                                         {"SHUTDOWN"},
                                         {"LOCK.FACT", "FLOOR", "1"},
                                         {"LOCK.HELD", "lock:1", "alice", "5 1 2"},
                                         {"LOCK.PROBE", "lock:1"}}) {
    for (size_t user = 0; user < names_.size(); user++) {
      EXPECT_TRUE(users_[user].Do(command).IsError("NOPERM")) << names_[user] << ' ' << command[0];
    }
  }
}

// A worker cannot learn the owner of a lock that it may not read by any command; and of a lock that
// it may read only from a deadlock that it would be part of.
TEST_F(AclRuleSetTest, WorkersCannotLearnOwners) {
  const std::string secret = "secret-of-another";
  MustAcquire(client_, "lock:theirs", secret);
  MustAcquire(client_, "hidden", secret);
  Client& worker = users_[0];
  for (const std::string key : {"lock:theirs", "hidden"}) {
    for (const Command& command :
         Commands{{"LOCK.ACQUIRE", key, "me", "PX", "1000"},
                  {"LOCK.ACQUIRE", key, "me", "PX", "1000", "WAIT", "1"},
                  {"LOCK.ACQUIRE", key, "me", "PX", "1000", "SHARED", "ALSO", "1", "lock:free"},
                  {"LOCK.TOUCH", key, "me", "PX", "1000"},
                  {"LOCK.RELEASE", key, "me"},
                  {"LOCK.FENCE", key},
                  {"LOCK.FENCE", key, "1"},
                  {"LOCK.FENCE", key, "1", "THEN", "GET", "data:1"},
                  {"LOCK.INFO", key},
                  {"LOCK.LIST"},
                  {"LOCK.TOP"},
                  {"GET", key},
                  {"DUMP", key}}) {
      const Reply reply = worker.Do(command);
      EXPECT_EQ(reply.ToString().find(secret), std::string::npos) << command[0] << ": " << reply;
    }
  }
  EXPECT_EQ(Do({"INFO", "everything"}).text.find(secret), std::string::npos);
  EXPECT_EQ(Do({"CLIENT", "LIST"}).text.find(secret), std::string::npos);
  EXPECT_EQ(server().Log().find(secret), std::string::npos);
}

// --- The internal commands --------------------------------------------------------------------

TEST_F(AccessTest, ClientsCannotCallInternalCommands) {
  MustAcquire(client_, "held", "alice");
  ReplicationStream stream(server().port());
  const Reply digest = Do({"DEBUG", "DIGEST"});
  // Without what the server subscribes to, which may change a moment after a command.
  const auto counters = [&] {
    const std::string info = Do({"INFO", "turnstile"}).text;
    const size_t begin = info.find("# turnstile_counters");
    return info.substr(begin, info.find("turnstile_clock_lead_ms") - begin);
  };
  const std::string before = counters();
  ASSERT_NE(before.find("turnstile_last_token:"), std::string::npos) << before;
  const std::string end = std::to_string(ServerNow(client_) + kMinute);

  const Commands facts = {{"LOCK.FACT", "ENDED", "held", "alice"},
                          {"lock.fact", "expired", "held", end},
                          {"LOCK.FACT", "SESSION", "held", "1", "alice"},
                          {"LOCK.FACT", "FLOOR", "9007199254740991"},
                          {"LOCK.FACT", "NONSENSE", "1"},
                          {"LOCK.HELD", "free", "mallory", "5 1 " + end},
                          {"LOCK.HELD", "held", "mallory", "5 1 " + end},
                          {"LOCK.HELD", "held", "alice", "9007199254740991 1 " + end},
                          {"LOCK.HELD", "held", "mallory", "nonsense"}};
  Do({"FUNCTION", "LOAD", "REPLACE",
      "#!lua name=forgery\nredis.register_function('forge', function(keys, args) "
      "return redis.call(unpack(args)) end)"});
  for (const Command& fact : facts) {
    SCOPED_TRACE(fact[0] + " " + fact[1] + " " + fact[2]);
    const std::string internal =
        fact[0] == "LOCK.HELD" ? "ERR LOCK.HELD is internal" : "ERR LOCK.FACT is internal";
    EXPECT_TRUE(Do(fact).IsError(internal));

    Do({"MULTI"});
    EXPECT_EQ(Do(fact), Reply::Queued());
    const Reply results = Do({"EXEC"});
    ASSERT_EQ(results.elements.size(), 1U) << results;
    EXPECT_TRUE(results.elements[0].IsError(internal)) << results;

    for (const Command& way :
         Commands{{"EVAL", "return redis.call(unpack(ARGV))", "0"}, {"FCALL", "forge", "0"}}) {
      Command call = way;
      call.insert(call.end(), fact.begin(), fact.end());
      EXPECT_TRUE(Do(call).IsError(internal)) << way[0];
    }
  }
  EXPECT_EQ(Do({"DEBUG", "DIGEST"}), digest);
  EXPECT_EQ(counters(), before);
  EXPECT_EQ(stream.Until(client_).size(), 1U) << "FUNCTION LOAD and nothing else";
}

TEST_F(AccessTest, InternalCommandsDeclareTheirKey) {
  EXPECT_EQ(Do({"COMMAND", "GETKEYS", "LOCK.FACT", "ENDED", "job", "alice"}),
            Reply::Array({Reply::Str("job")}));
  EXPECT_TRUE(Do({"COMMAND", "GETKEYS", "LOCK.FACT", "FLOOR", "1"}).IsError());
  // So ACLs are checked before everything else.
  Client worker = ConnectAs("worker", {"~lock:*", "+@all"});
  EXPECT_TRUE(worker.Do("LOCK.FACT", "ENDED", "other", "x").IsError("NOPERM"));
  EXPECT_TRUE(worker.Do("LOCK.FACT", "ENDED", "lock:1", "x").IsError("ERR LOCK.FACT is"));
  EXPECT_EQ(Do({"COMMAND", "GETKEYS", "LOCK.HELD", "job", "alice", "1 1 1"}),
            Reply::Array({Reply::Str("job")}));
  EXPECT_TRUE(worker.Do("LOCK.HELD", "other", "x", "1 1 1").IsError("NOPERM"));
  EXPECT_TRUE(worker.Do("LOCK.HELD", "lock:1", "x", "1 1 1").IsError("ERR LOCK.HELD is"));
}

// --- Memory -----------------------------------------------------------------------------------

class FullMemoryTest : public AccessTest {
 protected:
  void Fill() {
    EXPECT_EQ(Do({"CONFIG", "SET", "maxmemory", "1", "maxmemory-policy", "noeviction"}),
              Reply::Ok());
  }
  ~FullMemoryTest() override { Do({"CONFIG", "SET", "maxmemory", "0"}); }
};

TEST_F(FullMemoryTest, HeldLocksCanBeTouchedAndReleased) {
  const int64_t token = MustAcquire(client_, "job", "alice");
  Fill();
  EXPECT_TRUE(Do({"LOCK.ACQUIRE", "free", "alice", "PX", "1000"}).IsError("OOM"));
  EXPECT_TRUE(Do({"LOCK.ACQUIRE", "job", "alice", "PX", "1000"}).IsError("OOM"));
  EXPECT_TRUE(Do({"LOCK.ACQUIRE", "job", "bob", "PX", "1000"}).IsError("OOM"));
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job", token), Reply::Int(1));
  EXPECT_EQ(Do({"LOCK.FENCE", "job"}), Reply::Int(token));
  EXPECT_EQ(Do({"LOCK.INFO", "job"}).Field("mode"), Reply::Str("exclusive"));
  EXPECT_EQ(Do({"LOCK.TOUCH", "job", "alice", "PX", "500000"}), Reply::Int(1));
  EXPECT_GT(Do({"PTTL", "job"}).integer, 60000);
  EXPECT_EQ(Do({"PERSIST", "job"}), Reply::Int(1));
  EXPECT_GT(Do({"PTTL", "job"}).integer, 60000) << "reverted nevertheless";
  EXPECT_EQ(Do({"LOCK.RELEASE", "job", "alice"}), Reply::Int(1));
  EXPECT_TRUE(Do({"LOCK.HELP"}).IsArray());
}

TEST_F(FullMemoryTest, PlainLocksCanBeTouchedAndReleased) {
  Do({"SET", "job", "alice"});
  Fill();
  EXPECT_TRUE(Do({"LOCK.ACQUIRE", "job", "alice", "PX", "1000"}).IsError("OOM"));
  EXPECT_EQ(Do({"LOCK.TOUCH", "job", "alice", "PX", "60000"}), Reply::Int(1));
  EXPECT_EQ(Do({"LOCK.RELEASE", "job", "alice"}), Reply::Int(1));
}

TEST_F(FullMemoryTest, ScriptsCanTouchAndReleaseButNotAcquire) {
  MustAcquire(client_, "job", "alice");
  Fill();
  const auto eval = [this](const std::string& call) {
    return Do({"EVAL", "return redis.call(" + call + ")", "1", "job"});
  };
  EXPECT_TRUE(eval("'LOCK.ACQUIRE', KEYS[1], 'alice', 'PX', 60000").IsError("OOM"));
  EXPECT_EQ(eval("'LOCK.TOUCH', KEYS[1], 'alice', 'PX', 60000"), Reply::Int(1));
  EXPECT_EQ(eval("'LOCK.RELEASE', KEYS[1], 'alice'"), Reply::Int(1));
}

}  // namespace
}  // namespace turnstile::testing
