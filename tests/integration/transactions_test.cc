// Locks in MULTI, scripts and functions, and their effect on WATCH and client-side caching.

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/resp3.h"

namespace turnstile::testing {
namespace {

class TransactionsTest : public SharedServerTest<TransactionsTest> {
 protected:
  Reply Do(const Command& command) { return client_.Do(command); }

  // Runs the commands as one transaction. Returns the reply to EXEC.
  Reply Transaction(const Commands& commands) {
    Do({"MULTI"});
    for (const Command& command : commands) EXPECT_EQ(Do(command), Reply::Queued()) << command[0];
    return Do({"EXEC"});
  }

  Reply Eval(const std::string& script, const std::vector<std::string>& args = {}) {
    return RunScript("EVAL", script, args);
  }

  // Runs a script with the key "job" and the given arguments.
  Reply RunScript(const std::string& how, const std::string& what,
                  const std::vector<std::string>& args) {
    Command command = {how, what, "1", "job"};
    command.insert(command.end(), args.begin(), args.end());
    return Do(command);
  }

  void AwaitEnd() {
    EXPECT_TRUE(Eventually([&] { return other_.Do("LOCK.FENCE", "job").IsNil(); }));
  }

  Client other_ = server().Connect();
};

// --- MULTI ------------------------------------------------------------------------------------

TEST_F(TransactionsTest, CommandsWorkInTransaction) {
  const Reply results = Transaction({{"LOCK.ACQUIRE", "job", "alice", "PX", "60000"},
                                     {"LOCK.ACQUIRE", "job", "bob", "PX", "60000"},
                                     {"LOCK.ACQUIRE", "job", "alice", "PX", "60000"},
                                     {"LOCK.FENCE", "job"},
                                     {"LOCK.FENCE", "job", "1"},
                                     {"LOCK.TOUCH", "job", "alice", "EX", "60"},
                                     {"LOCK.RELEASE", "job", "bob"},
                                     {"LOCK.RELEASE", "job", "alice"},
                                     {"LOCK.INFO", "job"}});
  ASSERT_EQ(results.elements.size(), 9U) << results;
  const Reply token = results.elements[0];
  EXPECT_TRUE(token.IsInteger()) << token;
  EXPECT_EQ(results, Reply::Array({token, Reply::Nil(), token, token, Reply::Int(0), Reply::Int(1),
                                   Reply::Int(0), Reply::Int(1), Reply::Nil()}));
}

TEST_F(TransactionsTest, InvalidCommandAbortsTransactionOrFailsAlone) {
  // Errors that the server itself detects abort the transaction.
  Do({"MULTI"});
  EXPECT_TRUE(Do({"LOCK.HELP", "job"}).IsError("ERR wrong number of arguments"));
  EXPECT_EQ(Do({"LOCK.ACQUIRE", "job", "alice", "PX", "60000"}), Reply::Queued());
  EXPECT_TRUE(Do({"EXEC"}).IsError("EXECABORT"));
  EXPECT_EQ(Do({"EXISTS", "job"}), Reply::Int(0));

  // Errors that only the module detects fail one command, as usual in Redis.
  const Reply results = Transaction({{"LOCK.ACQUIRE", "job", "alice", "PX", "-1"},
                                     {"LOCK.ACQUIRE", "job", "alice"},
                                     {"LOCK.ACQUIRE"},
                                     {"LOCK.ACQUIRE", "job", "alice", "PX", "60000"}});
  ASSERT_EQ(results.elements.size(), 4U) << results;
  EXPECT_TRUE(results.elements[0].IsError("ERR PX must be")) << results;
  EXPECT_TRUE(results.elements[1].IsError("ERR the lease is missing")) << results;
  EXPECT_TRUE(results.elements[2].IsError("ERR the key is missing")) << results;
  EXPECT_TRUE(results.elements[3].IsInteger()) << results;
}

// Inside a transaction the server's clock stands still, and it still returns expired keys. The
// module's clock does not: a lease ends on time.
TEST_F(TransactionsTest, LeaseEndsInsideTransaction) {
  const Reply results = Transaction({{"LOCK.ACQUIRE", "job", "alice", "PX", "10"},
                                     {"DEBUG", "SLEEP", "0.02"},
                                     {"EXISTS", "job"},
                                     {"LOCK.FENCE", "job"},
                                     {"LOCK.INFO", "job"},
                                     {"LOCK.TOUCH", "job", "alice", "PX", "60000"},
                                     {"LOCK.RELEASE", "job", "alice"},
                                     {"LOCK.ACQUIRE", "job", "bob", "PX", "60000"},
                                     {"LOCK.ACQUIRE", "job", "alice", "PX", "60000"}});
  ASSERT_EQ(results.elements.size(), 9U) << results;
  const Reply alices = results.elements[0];
  const Reply bobs = results.elements[7];
  EXPECT_EQ(results, Reply::Array({alices, Reply::Ok(), Reply::Int(1), Reply::Nil(), Reply::Nil(),
                                   Reply::Int(0), Reply::Int(0), bobs, Reply::Nil()}));
  EXPECT_GT(bobs.integer, alices.integer);
  EXPECT_EQ(Do({"LOCK.FENCE", "job"}), bobs);
  EXPECT_GT(Do({"PTTL", "job"}).integer, 10);
}

// --- WATCH ------------------------------------------------------------------------------------

class WatchTest : public TransactionsTest {
 protected:
  // Whether a transaction that watches the lock is aborted by this command of another client.
  bool Aborts(const std::function<void()>& meanwhile) {
    EXPECT_EQ(Do({"WATCH", "job"}), Reply::Ok());
    meanwhile();
    const Reply reply = Transaction({{"PING"}});
    EXPECT_TRUE(reply.IsNil() || reply == Reply::Array({Reply::Status("PONG")})) << reply;
    return reply.IsNil();
  }

  bool AbortsOn(const Command& command) {
    return Aborts([&] {
      const Reply reply = other_.Do(command);
      EXPECT_FALSE(reply.IsError("DISCONNECTED") || reply.IsError("TIMEOUT")) << reply;
    });
  }
};

TEST_F(WatchTest, AbortsWhenLockChanges) {
  EXPECT_TRUE(AbortsOn({"LOCK.ACQUIRE", "job", "alice", "PX", "60000"}));
  EXPECT_TRUE(AbortsOn({"LOCK.ACQUIRE", "job", "alice", "PX", "50000"})) << "asked again";
  EXPECT_TRUE(AbortsOn({"LOCK.TOUCH", "job", "alice", "PX", "60000"}));
  EXPECT_TRUE(AbortsOn({"LOCK.RELEASE", "job", "alice"}));
}

TEST_F(WatchTest, AbortsWhenLockIsLost) {
  MustAcquire(other_, "job", "alice");
  EXPECT_TRUE(AbortsOn({"DEL", "job"}));

  EXPECT_TRUE(Aborts([&] {
    MustAcquire(other_, "job", "alice", 5);
    AwaitEnd();
  }));

  // Expired and acquired by another owner: not the lock that was watched.
  MustAcquire(other_, "job", "alice", 100);
  EXPECT_TRUE(Aborts([&] {
    AwaitEnd();
    MustAcquire(other_, "job", "bob");
  }));
}

TEST_F(WatchTest, DoesNotAbortWhenNothingChanges) {
  const Commands looks = {{"LOCK.FENCE", "job"},
                          {"LOCK.FENCE", "job", "1"},
                          {"LOCK.INFO", "job"},
                          {"LOCK.RELEASE", "job", "stranger"},
                          {"LOCK.TOUCH", "job", "stranger", "PX", "60000"},
                          {"LOCK.ACQUIRE", "job", "bob", "PX", "-1"},
                          {"LOCK.ACQUIRE", "other", "bob", "PX", "60000"}};
  for (const Command& look : looks) EXPECT_FALSE(AbortsOn(look)) << look[0] << " when free";
  MustAcquire(other_, "job", "alice");
  for (const Command& look : looks) EXPECT_FALSE(AbortsOn(look)) << look[0] << " when held";
  EXPECT_FALSE(AbortsOn({"LOCK.ACQUIRE", "job", "bob", "PX", "60000"})) << "refused";
}

// A guarded write with WATCH: nothing happens unless the token is still current.
TEST_F(WatchTest, WatchGuardsWrite) {
  const int64_t token = MustAcquire(client_, "job", "alice");
  EXPECT_EQ(Do({"WATCH", "job"}), Reply::Ok());
  EXPECT_EQ(Do({"LOCK.FENCE", "job", std::to_string(token)}), Reply::Int(1));
  other_.Do("DEL", "job");
  MustAcquire(other_, "job", "bob");
  EXPECT_EQ(Transaction({{"SET", "result", "alice's"}}), Reply::Nil());
  EXPECT_EQ(Do({"EXISTS", "result"}), Reply::Int(0));
}

// --- Scripts ----------------------------------------------------------------------------------

TEST_F(TransactionsTest, CommandsWorkInScript) {
  const std::string acquire = "return redis.call('LOCK.ACQUIRE', KEYS[1], ARGV[1], 'PX', 60000)";
  const Reply token = Eval(acquire, {"alice"});
  EXPECT_TRUE(token.IsInteger()) << token;
  EXPECT_EQ(Do({"LOCK.FENCE", "job"}), token) << "exact, although Lua's numbers are doubles";
  EXPECT_EQ(Eval(acquire, {"alice"}), token);
  EXPECT_EQ(Eval(acquire, {"bob"}), Reply::Nil());
  EXPECT_EQ(Eval("return {redis.call('LOCK.FENCE', KEYS[1], ARGV[1]),"
                 "        redis.call('LOCK.TOUCH', KEYS[1], 'alice', 'EX', 60),"
                 "        redis.call('LOCK.INFO', KEYS[1])[2],"
                 "        redis.call('LOCK.RELEASE', KEYS[1], 'bob'),"
                 "        redis.call('LOCK.RELEASE', KEYS[1], 'alice'),"
                 "        redis.call('LOCK.FENCE', KEYS[1])}",
                 {std::to_string(token.integer)}),
            Reply::Array({Reply::Int(1), Reply::Int(1), Reply::Str("exclusive"), Reply::Int(0),
                          Reply::Int(1), Reply::Nil()}));
  EXPECT_EQ(Do({"EXISTS", "job"}), Reply::Int(0));
}

TEST_F(TransactionsTest, InfoWorksInResp3Script) {
  MustAcquire(client_, "job", "alice");
  EXPECT_EQ(Eval("redis.setresp(3)"
                 "local info = redis.call('LOCK.INFO', KEYS[1]).map "
                 "local holder = info.holders[1].map "
                 "return {info.mode, holder.owner, tostring(holder.session)}"),
            Reply::Array({Reply::Str("exclusive"), Reply::Str("alice"), Reply::Str("false")}));
}

TEST_F(TransactionsTest, InvalidCommandInScriptReturnsError) {
  const Reply error = Eval("return redis.call('LOCK.ACQUIRE', KEYS[1], 'alice', 'PX', 'soon')");
  EXPECT_TRUE(error.IsError("ERR PX must be an integer")) << error;
  EXPECT_EQ(Eval("return redis.pcall('LOCK.RELEASE', KEYS[1], '').err ~= nil"), Reply::Int(1));
}

TEST_F(TransactionsTest, ReadOnlyScriptsMayOnlyReadLocks) {
  MustAcquire(client_, "job", "alice");
  const std::string info = "return redis.call('LOCK.INFO', KEYS[1])[2]";
  EXPECT_EQ(RunScript("EVAL_RO", info, {}), Reply::Str("exclusive"));
  // LOCK.FENCE is meant for clients that are about to write.
  for (const char* call :
       {"'LOCK.ACQUIRE', KEYS[1], 'alice', 'PX', 60000", "'LOCK.RELEASE', KEYS[1], 'alice'",
        "'LOCK.TOUCH', KEYS[1], 'alice', 'PX', 60000", "'LOCK.FENCE', KEYS[1]",
        "'LOCK.FENCE', KEYS[1], 1"}) {
    const Reply reply = RunScript("EVAL_RO", "return redis.call(" + std::string(call) + ")", {});
    EXPECT_TRUE(reply.IsError("ERR Write commands are not allowed from read-only scripts"))
        << call << ": " << reply;
  }
  EXPECT_EQ(Do({"LOCK.RELEASE", "job", "alice"}), Reply::Int(1));
}

// As in a transaction: the server's clock stands still in a script, a lease does not.
TEST_F(TransactionsTest, LeaseEndsInsideScript) {
  const Reply results = Eval(std::string(kLuaNow) + R"(
    local function outlive(lease)
      redis.call('LOCK.ACQUIRE', KEYS[1], 'alice', 'PX', lease)
      local over = now() + lease + 2
      while now() < over do end
    end
    outlive(10)
    local seen = {redis.call('EXISTS', KEYS[1]),
                  redis.call('LOCK.FENCE', KEYS[1]),
                  redis.call('LOCK.INFO', KEYS[1]),
                  redis.call('LOCK.TOUCH', KEYS[1], 'alice', 'PX', 60000),
                  redis.call('LOCK.RELEASE', KEYS[1], 'alice'),
                  redis.call('LOCK.ACQUIRE', KEYS[1], 'alice', 'PX', 60000)}
    outlive(10)
    seen[7] = redis.call('LOCK.ACQUIRE', KEYS[1], 'bob', 'PX', 60000)
    return seen)");
  ASSERT_EQ(results.elements.size(), 7U) << results;
  const Reply alices = results.elements[5];
  const Reply bobs = results.elements[6];
  EXPECT_EQ(results, Reply::Array({Reply::Int(1), Reply::Nil(), Reply::Nil(), Reply::Int(0),
                                   Reply::Int(0), alices, bobs}));
  EXPECT_GT(bobs.integer, alices.integer);
  EXPECT_EQ(Do({"LOCK.FENCE", "job", std::to_string(alices.integer)}), Reply::Int(0));
  EXPECT_EQ(Do({"LOCK.FENCE", "job", std::to_string(bobs.integer)}), Reply::Int(1));
}

TEST_F(TransactionsTest, CommandsWorkInFunctions) {
  EXPECT_EQ(Do({"FUNCTION", "LOAD", "REPLACE", R"(#!lua name=locks
    redis.register_function('take', function(keys, args)
      return redis.call('LOCK.ACQUIRE', keys[1], args[1], 'PX', 60000)
    end)
    redis.register_function{function_name = 'look', flags = {'no-writes'}, callback = function(keys)
      return redis.call('LOCK.INFO', keys[1])[2]
    end}
    redis.register_function{function_name = 'sneak', flags = {'no-writes'}, callback = function(keys)
      return redis.call('LOCK.FENCE', keys[1])
    end})"}),
            Reply::Str("locks"));
  const Reply token = RunScript("FCALL", "take", {"alice"});
  EXPECT_TRUE(token.IsInteger()) << token;
  EXPECT_EQ(RunScript("FCALL", "take", {"bob"}), Reply::Nil());
  EXPECT_EQ(Do({"LOCK.FENCE", "job"}), token);
  EXPECT_EQ(RunScript("FCALL_RO", "look", {}), Reply::Str("exclusive"));
  EXPECT_TRUE(RunScript("FCALL_RO", "sneak", {}).IsError("ERR Write commands are not allowed"));
}

// --- Client-side caching ----------------------------------------------------------------------

TEST_F(TransactionsTest, ClientCachesAreInvalidatedWhenLockChanges) {
  RawConnection cache = server().ConnectRaw();
  cache.Hello(3);
  EXPECT_EQ(cache.Do("CLIENT", "TRACKING", "ON"), Reply::Ok());
  // The keys that a client that has just read the lock is told to invalidate.
  const auto forgotten = [&](const std::function<void()>& meanwhile) {
    cache.Do("LOCK.INFO", "job");
    cache.pushes().clear();
    meanwhile();
    cache.Do("PING");
    std::vector<std::string> keys;
    for (const Reply& push : cache.pushes()) {
      EXPECT_EQ(push.elements[0], Reply::Str("invalidate")) << push;
      for (const std::string& key : push.elements[1].Texts()) keys.push_back(key);
    }
    return keys;
  };
  const auto forgotten_on = [&](const Command& command) {
    return forgotten([&] { other_.Do(command); });
  };
  const std::vector<std::string> job = {"job"};
  const std::vector<std::string> nothing = {};

  EXPECT_EQ(forgotten_on({"LOCK.RELEASE", "job", "alice"}), nothing);
  EXPECT_EQ(forgotten_on({"LOCK.ACQUIRE", "job", "alice", "PX", "60000"}), job);
  EXPECT_EQ(forgotten_on({"LOCK.ACQUIRE", "job", "bob", "PX", "60000"}), nothing);
  EXPECT_EQ(forgotten_on({"LOCK.ACQUIRE", "job", "alice", "PX", "60000"}), job);
  EXPECT_EQ(forgotten_on({"LOCK.FENCE", "job"}), nothing);
  EXPECT_EQ(forgotten_on({"LOCK.TOUCH", "job", "bob", "PX", "60000"}), nothing);
  EXPECT_EQ(forgotten_on({"LOCK.TOUCH", "job", "alice", "PX", "60000"}), job);
  EXPECT_EQ(forgotten_on({"LOCK.RELEASE", "job", "bob"}), nothing);
  EXPECT_EQ(forgotten_on({"LOCK.RELEASE", "job", "alice"}), job);
  // On a slow machine the lease may end before the client has read the lock: then try again.
  EXPECT_TRUE(Eventually([&] {
    MustAcquire(other_, "job", "alice", 50);
    return forgotten([&] { AwaitEnd(); }) == job;
  }));
}

}  // namespace
}  // namespace turnstile::testing
