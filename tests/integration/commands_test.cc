// The replies of every command in both protocols, and the ownership of locks over time.

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/resp3.h"

namespace turnstile::testing {
namespace {

class CommandsTest : public SharedServerTest<CommandsTest> {
 protected:
  Reply Do(const Command& command) { return client_.Do(command); }

  // Waits for the end of the lease by the server's clock, not for the removal of the key.
  void AwaitEnd(const std::string& key) {
    EXPECT_TRUE(Eventually([&] { return Do({"LOCK.FENCE", key}).IsNil(); }));
  }

  Reply Holder(const std::string& key, std::string_view field) {
    return HolderField(Do({"LOCK.INFO", key}), field);
  }

  RawConnection ConnectRaw(int version) {
    RawConnection raw = server().ConnectRaw();
    raw.Hello(version);
    return raw;
  }
};

// --- Replies ----------------------------------------------------------------------------------

// The complete reply of LOCK.INFO for one exclusive holder. Its times are taken from `seen`, the
// reply itself, and checked separately.
Reply ExpectedInfo(int version, const std::string& owner, int64_t token, const Reply& seen) {
  return InfoReply(version, "exclusive", owner, Reply::Int(token),
                   Reply::Int(HolderField(seen, "lease-left-ms").integer),
                   Reply::Int(HolderField(seen, "held-ms").integer));
}

// Each command in each of its situations, over any connection.
template <typename Connection>
void CheckReplies(int version, Connection& connection) {
  const auto ask = [&connection](const auto&... args) { return connection.Do(args...); };
  EXPECT_EQ(ask("LOCK.FENCE", "job"), Reply::Nil());
  EXPECT_EQ(ask("LOCK.FENCE", "job", 1), Reply::Int(0));
  EXPECT_EQ(ask("LOCK.INFO", "job"), Reply::Nil());
  EXPECT_EQ(ask("LOCK.RELEASE", "job", "alice"), Reply::Int(0));
  EXPECT_EQ(ask("LOCK.TOUCH", "job", "alice", "PX", 60000), Reply::Int(0));
  EXPECT_EQ(ask("EXISTS", "job"), Reply::Int(0));

  const Reply token = ask("LOCK.ACQUIRE", "job", "alice", "PX", 60000);
  ASSERT_TRUE(token.IsInteger()) << token;
  EXPECT_GT(token.integer, 0);
  EXPECT_LT(token.integer, int64_t{1} << 53);
  EXPECT_EQ(ask("LOCK.ACQUIRE", "job", "bob", "PX", 60000), Reply::Nil());
  EXPECT_EQ(ask("LOCK.ACQUIRE", "job", "alice", "EX", 60), token);
  EXPECT_EQ(ask("LOCK.FENCE", "job"), token);
  EXPECT_EQ(ask("LOCK.FENCE", "job", token.integer), Reply::Int(1));
  EXPECT_EQ(ask("LOCK.FENCE", "job", token.integer - 1), Reply::Int(0));
  EXPECT_EQ(ask("LOCK.FENCE", "job", token.integer + 1), Reply::Int(0));
  EXPECT_EQ(ask("LOCK.TOUCH", "job", "bob", "PX", 60000), Reply::Int(0));
  EXPECT_EQ(ask("LOCK.TOUCH", "job", "alice", "EX", 60), Reply::Int(1));
  EXPECT_EQ(ask("TYPE", "job"), Reply::Status("turnstile"));

  const Reply info = ask("LOCK.INFO", "job");
  EXPECT_EQ(info, ExpectedInfo(version, "alice", token.integer, info));

  EXPECT_EQ(ask("LOCK.RELEASE", "job", "bob"), Reply::Int(0));
  EXPECT_EQ(ask("LOCK.RELEASE", "job", "alice"), Reply::Int(1));
  EXPECT_EQ(ask("LOCK.RELEASE", "job", "alice"), Reply::Int(0));
  EXPECT_EQ(ask("EXISTS", "job"), Reply::Int(0));

  const Reply help = ask("LOCK.HELP");
  ASSERT_TRUE(help.IsArray()) << help;
  ASSERT_FALSE(help.elements.empty());
  EXPECT_EQ(help.elements[0],
            Reply::Str("LOCK.ACQUIRE key owner <PX ms | EX s> [WAIT ms] [MAXLINE n] "
                       "[SHARED | LIMIT n] [WEIGHT w] [REENTRANT] [SESSION] [LINGER ms] "
                       "[MAXHOLD ms] [TAG text] [NOTIFY channel id] [FLOOR token] "
                       "[ALSO numkeys key [key ...]]"));
  for (const Reply& line : help.elements) EXPECT_TRUE(line.IsString()) << line;
}

TEST_F(CommandsTest, RepliesInResp2) { CheckReplies(2, client_); }

TEST_F(CommandsTest, RawRepliesInResp2AreWellFormed) {
  RawConnection raw = ConnectRaw(2);
  CheckReplies(2, raw);
}

TEST_F(CommandsTest, RepliesInResp3) {
  RawConnection raw = ConnectRaw(3);
  CheckReplies(3, raw);
}

TEST_F(CommandsTest, NullReplyFollowsProtocolVersion) {
  MustAcquire(client_, "busy", "alice");
  for (const auto& [version, null] : {std::pair(2, "$-1"), std::pair(3, "_")}) {
    RawConnection raw = ConnectRaw(version);
    for (const Command& command : Commands{{"LOCK.ACQUIRE", "busy", "bob", "PX", "60000"},
                                           {"LOCK.FENCE", "free"},
                                           {"LOCK.INFO", "free"}}) {
      raw.SendCommand(command);
      EXPECT_EQ(raw.ReadUntil("\r\n"), null) << command[0] << " in RESP" << version;
    }
  }
}

TEST_F(CommandsTest, InfoReportsTimes) {
  MustAcquire(client_, "job", "alice", 60000);
  EXPECT_TRUE(Eventually([&] { return Holder("job", "held-ms").integer >= 5; }));
  const int64_t before = ServerNow(client_);
  const int64_t left = Holder("job", "lease-left-ms").integer;
  const int64_t after = ServerNow(client_);
  const int64_t end = EndOf(client_, "job");
  EXPECT_LE(left, end - before);
  EXPECT_GE(left, end - after);

  // A renewal is not a new grant.
  MustAcquire(client_, "job", "alice", 90000);
  EXPECT_EQ(Do({"LOCK.TOUCH", "job", "alice", "PX", "90000"}), Reply::Int(1));
  EXPECT_GE(Holder("job", "held-ms").integer, 5);
  EXPECT_GT(Holder("job", "lease-left-ms").integer, 60000);
}

TEST_F(CommandsTest, KeywordsIgnoreCaseAlsoInInlineCommands) {
  EXPECT_TRUE(Do({"lock.acquire", "job", "alice", "px", "60000"}).IsInteger());
  EXPECT_EQ(Do({"Lock.Touch", "job", "alice", "eX", "60"}), Reply::Int(1));
  EXPECT_EQ(Do({"lock.release", "job", "ALICE"}), Reply::Int(0)) << "an owner is bytes";
  RawConnection raw = ConnectRaw(2);
  raw.WriteRaw("LOCK.RELEASE job alice\r\n");
  EXPECT_EQ(raw.ReadReply(), Reply::Int(1));
}

// --- Ownership --------------------------------------------------------------------------------

TEST_F(CommandsTest, ReacquireKeepsTokenAndCountsOnce) {
  const int64_t token = MustAcquire(client_, "job", "alice", 60000);
  EXPECT_EQ(MustAcquire(client_, "job", "alice", 500000), token);
  EXPECT_GT(Do({"PTTL", "job"}).integer, 60000) << "the lease restarts, longer";
  EXPECT_EQ(MustAcquire(client_, "job", "alice", 30000), token);
  EXPECT_LE(Do({"PTTL", "job"}).integer, 30000) << "or shorter";
  EXPECT_EQ(Do({"DBSIZE"}), Reply::Int(1));

  // It holds the lock once, however often it asked.
  EXPECT_EQ(Do({"LOCK.RELEASE", "job", "alice"}), Reply::Int(1));
  EXPECT_EQ(Do({"LOCK.RELEASE", "job", "alice"}), Reply::Int(0));
}

// A lease ends exactly that long after the command ran.
TEST_F(CommandsTest, LeaseIsExactAndTtlFollowsIt) {
  const std::vector<std::pair<Command, int64_t>> cases = {
      {{"LOCK.ACQUIRE", "job", "alice", "PX", "50001"}, 50001},
      {{"LOCK.ACQUIRE", "job", "alice", "EX", "7"}, 7000},
      {{"LOCK.TOUCH", "job", "alice", "PX", "86400000"}, 86400000},
      {{"LOCK.TOUCH", "job", "alice", "PX", "5000"}, 5000},
      {{"LOCK.TOUCH", "job", "alice", "EX", "86400"}, 86400000},
  };
  for (const auto& [command, lease] : cases) {
    const int64_t before = ServerNow(client_);
    EXPECT_GT(Do(command).integer, 0);
    const int64_t after = ServerNow(client_);
    EXPECT_GE(EndOf(client_, "job"), before + lease) << command[0] << " " << command[4];
    EXPECT_LE(EndOf(client_, "job"), after + lease) << command[0] << " " << command[4];
  }
}

// Like a Redis key, a hold is live through the whole of its last millisecond and no longer. A
// script polls without a pause to hit the last millisecond and the one after it. While it runs the
// server removes no keys, so it is the lease that ends. TIME may stand still in a script, so
// another lock serves as the clock; the server's own clock confirms it before and after.
TEST_F(CommandsTest, HoldEndsAfterLastMillisecondOfLease) {
  const std::string script = R"(
    redis.call('LOCK.ACQUIRE', KEYS[2], 'clock', 'PX', 60000)
    local full = redis.call('PEXPIRETIME', KEYS[2])
    local function now()
      local holder = redis.call('LOCK.INFO', KEYS[2])[6][1]
      assert(holder[7] == 'lease-left-ms')
      return full - holder[8]
    end
    local start = now()
    redis.call('LOCK.ACQUIRE', KEYS[1], 'alice', 'PX', 5)
    local last = redis.call('PEXPIRETIME', KEYS[1])
    local met = {}
    local before, verdict
    repeat
      before = now()
      local live = redis.call('LOCK.FENCE', KEYS[1])
      local after = now()
      if live and before > last then verdict = 'live after its end' end
      if not live and after <= last then verdict = 'over before its end' end
      if before == after then met[before] = true end
    until before > last + 1
    return {verdict or met[last] and met[last + 1] and 'right' or 'missed', start, before})";
  Reply verdict;
  EXPECT_TRUE(Eventually([&] {
    const int64_t start = ServerNow(client_);
    const Reply seen = Do({"EVAL", script, "2", "job", "clock"});
    const int64_t end = ServerNow(client_);
    if (seen.elements.size() != 3) {
      ADD_FAILURE() << seen;
      return true;
    }
    EXPECT_GE(seen.elements[1].integer, start);
    EXPECT_LE(seen.elements[2].integer, end);
    verdict = seen.elements[0];
    return verdict != Reply::Str("missed");  // which a busy machine may do more than once
  }));
  EXPECT_EQ(verdict, Reply::Str("right"));
}

TEST_F(CommandsTest, ServerRemovesExpiredLockNobodyAsksFor) {
  MustAcquire(client_, "job", "alice", 1);
  EXPECT_TRUE(Eventually([&] { return Do({"DBSIZE"}) == Reply::Int(0); }));
}

TEST_F(CommandsTest, LostHoldIsNeverRevived) {
  const int64_t token = MustAcquire(client_, "job", "alice", 5);
  AwaitEnd("job");
  EXPECT_EQ(Do({"LOCK.TOUCH", "job", "alice", "PX", "60000"}), Reply::Int(0));
  EXPECT_EQ(Do({"LOCK.RELEASE", "job", "alice"}), Reply::Int(0));
  EXPECT_EQ(Do({"LOCK.FENCE", "job", std::to_string(token)}), Reply::Int(0));
  EXPECT_EQ(Do({"LOCK.INFO", "job"}), Reply::Nil());
  EXPECT_EQ(Do({"EXISTS", "job"}), Reply::Int(0));
  EXPECT_GT(MustAcquire(client_, "job", "alice"), token) << "a new hold, not the old one";
  EXPECT_EQ(Do({"LOCK.FENCE", "job", std::to_string(token)}), Reply::Int(0));
}

TEST_F(CommandsTest, FormerHolderCannotAffectNewHolder) {
  const int64_t alices = MustAcquire(client_, "job", "alice", 5);
  AwaitEnd("job");
  const int64_t bobs = MustAcquire(client_, "job", "bob");
  EXPECT_GT(bobs, alices);
  const int64_t end = EndOf(client_, "job");

  EXPECT_EQ(Do({"LOCK.RELEASE", "job", "alice"}), Reply::Int(0));
  EXPECT_EQ(Do({"LOCK.TOUCH", "job", "alice", "PX", "1"}), Reply::Int(0));
  EXPECT_EQ(Do({"LOCK.ACQUIRE", "job", "alice", "PX", "1"}), Reply::Nil());
  EXPECT_EQ(Do({"LOCK.FENCE", "job", std::to_string(alices)}), Reply::Int(0));

  EXPECT_EQ(Do({"LOCK.FENCE", "job", std::to_string(bobs)}), Reply::Int(1));
  EXPECT_EQ(Holder("job", "owner"), Reply::Str("bob"));
  EXPECT_EQ(EndOf(client_, "job"), end);
  EXPECT_EQ(Do({"LOCK.RELEASE", "job", "bob"}), Reply::Int(1));
}

TEST_F(CommandsTest, ShortenedLeaseEndsSooner) {
  MustAcquire(client_, "touched", "alice");
  EXPECT_EQ(Do({"LOCK.TOUCH", "touched", "alice", "PX", "1"}), Reply::Int(1));
  MustAcquire(client_, "reacquired", "alice");
  MustAcquire(client_, "reacquired", "alice", 1);
  for (const char* key : {"touched", "reacquired"}) {
    AwaitEnd(key);
    MustAcquire(client_, key, "bob");
  }
}

TEST_F(CommandsTest, LaterGrantHasLargerToken) {
  int64_t last = 0;
  for (int i = 0; i < 100; i++) {
    const int64_t token = MustAcquire(client_, "job", i % 2 == 0 ? "alice" : "bob");
    EXPECT_GT(token, last);
    last = token;
    EXPECT_EQ(Do({"LOCK.RELEASE", "job", i % 2 == 0 ? "alice" : "bob"}), Reply::Int(1));
  }
}

// Owners are identified by their name, not by a connection.
TEST_F(CommandsTest, OwnerMayUseAnyConnection) {
  Client other = server().Connect();
  const int64_t token = MustAcquire(client_, "job", "alice");
  EXPECT_EQ(MustAcquire(other, "job", "alice"), token);
  client_.Close();
  EXPECT_EQ(other.Do("LOCK.RELEASE", "job", "alice"), Reply::Int(1));
}

// --- Names ------------------------------------------------------------------------------------

TEST_F(CommandsTest, KeysAndOwnersAreAnyBytes) {
  std::string every_byte;
  for (int byte = 0; byte < 256; byte++) every_byte += static_cast<char>(byte);
  std::string almost = every_byte;
  almost.back() = 'x';

  const int64_t token = MustAcquire(client_, every_byte, every_byte);
  for (const int version : {2, 3}) {
    const Reply info = ConnectRaw(version).Do("LOCK.INFO", every_byte);
    EXPECT_EQ(info, ExpectedInfo(version, every_byte, token, info));
  }
  EXPECT_EQ(Do({"LOCK.FENCE", almost}), Reply::Nil());
  for (const std::string& other : {almost, every_byte.substr(0, 255), every_byte.substr(1)}) {
    EXPECT_EQ(Do({"LOCK.RELEASE", every_byte, other}), Reply::Int(0));
  }
  EXPECT_EQ(Do({"LOCK.TOUCH", every_byte, every_byte, "EX", "60"}), Reply::Int(1));
  EXPECT_EQ(Do({"LOCK.RELEASE", every_byte, every_byte}), Reply::Int(1));

  // NUL bytes are significant.
  MustAcquire(client_, "job", std::string(2, '\0'));
  for (const size_t size : {1U, 3U}) {
    EXPECT_EQ(Do({"LOCK.RELEASE", "job", std::string(size, '\0')}), Reply::Int(0));
  }
  EXPECT_EQ(Do({"LOCK.RELEASE", "job", std::string(2, '\0')}), Reply::Int(1));
}

TEST_F(CommandsTest, EmptyKeyIsValid) {
  const int64_t token = MustAcquire(client_, "", "alice");
  EXPECT_EQ(Do({"LOCK.ACQUIRE", "", "bob", "PX", "1"}), Reply::Nil());
  EXPECT_EQ(Do({"LOCK.FENCE", "", std::to_string(token)}), Reply::Int(1));
  EXPECT_EQ(Do({"LOCK.TOUCH", "", "alice", "PX", "1000"}), Reply::Int(1));
  EXPECT_EQ(Holder("", "owner"), Reply::Str("alice"));
  EXPECT_EQ(Do({"LOCK.RELEASE", "", "alice"}), Reply::Int(1));
  EXPECT_EQ(Do({"EXISTS", ""}), Reply::Int(0));
}

TEST_F(CommandsTest, LocksOfDifferentDatabasesAreIndependent) {
  MustAcquire(client_, "job", "alice");
  EXPECT_EQ(Do({"SELECT", "5"}), Reply::Ok());
  EXPECT_EQ(Do({"LOCK.FENCE", "job"}), Reply::Nil());
  MustAcquire(client_, "job", "bob");
  EXPECT_EQ(Holder("job", "owner"), Reply::Str("bob"));
  EXPECT_EQ(Do({"SELECT", "0"}), Reply::Ok());
  EXPECT_EQ(Holder("job", "owner"), Reply::Str("alice"));
}

}  // namespace
}  // namespace turnstile::testing
