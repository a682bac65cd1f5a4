// Whatever is wrong with a request, it is refused in one clean line and nothing has happened.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "support/lock_test.h"
#include "support/replication_stream.h"
#include "support/resp3.h"

namespace turnstile::testing {
namespace {

using namespace std::string_literals;

class BadInputTest : public SharedServerTest<BadInputTest> {
 protected:
  BadInputTest() {
    resp3_.Hello(3);
    token_ = MustAcquire(client_, "job", "alice");
  }

  // The request is refused, in both protocols, with an error that begins so; and no key, no TTL
  // and no replica learns of it.
  void ExpectRefused(const Command& command, std::string_view error) {
    SCOPED_TRACE(Shown(command));
    stream_.Until(client_);
    const std::vector<Reply> before = State();
    for (RawConnection* connection : {&resp2_, &resp3_}) {
      const Reply reply = connection->Do(command);
      EXPECT_TRUE(reply.IsError(error)) << reply << "\ninstead of " << error;
      EXPECT_TRUE(IsShortAndPrintable(reply.text)) << Quoted(reply.text);
    }
    EXPECT_EQ(State(), before);
    EXPECT_EQ(stream_.Until(client_), Commands{});
  }

  int64_t token_ = 0;
  // Strict: a byte that the protocol does not allow fails the test.
  RawConnection resp2_ = server().ConnectRaw();
  RawConnection resp3_ = server().ConnectRaw();

 private:
  static bool IsShortAndPrintable(const std::string& text) {
    return text.size() < 400 &&
           std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; });
  }

  static std::string Shown(const Command& command) {
    std::string text;
    for (size_t i = 0; i < std::min<size_t>(command.size(), 10); i++) {
      text += Quoted(command[i].substr(0, 50)) + " ";
    }
    return text + "(" + std::to_string(command.size()) + " arguments)";
  }

  // Everything there is: keys, values and ends.
  std::vector<Reply> State() {
    std::vector<Reply> state = {client_.Do("DEBUG", "DIGEST")};
    std::vector<std::string> keys = client_.Do("KEYS", "*").Texts();
    std::sort(keys.begin(), keys.end());
    for (const std::string& key : keys) {
      for (const char* question : {"DUMP", "PEXPIRETIME"}) {
        state.push_back(client_.Do(question, key));
      }
    }
    return state;
  }

  ReplicationStream stream_{server().port()};
};

// What is no positive integer of ours, whatever its range.
const std::vector<std::string> kNoNumbers = {
    "",
    "0",
    "00",
    "01",
    "-1",
    "-0",
    "+1",
    " 1",
    "1 ",
    "1\n",
    "\r\n1",
    "1\0"s,
    "\0"s,
    "1 2",
    "1.0",
    "1e3",
    "1E3",
    "0x10",
    "1000ms",
    "ten",
    "inf",
    "nan",
    "1_000",
    "1,000",
    "\xd9\xa1",
    "\xff\xfe",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551617",
    "-9223372036854775808",
    std::string(400, '9'),
};

TEST_F(BadInputTest, WrongNumberOfArguments) {
  for (const Command& command : Commands{
           {"LOCK.ACQUIRE"},
           {"LOCK.ACQUIRE", "job"},
           {"LOCK.ACQUIRE", "job", "alice"},
           {"LOCK.ACQUIRE", "job", "alice", "PX"},
           {"LOCK.RELEASE"},
           {"LOCK.RELEASE", "job"},
           {"LOCK.TOUCH"},
           {"LOCK.TOUCH", "job"},
           {"LOCK.TOUCH", "job", "alice"},
           {"LOCK.TOUCH", "job", "alice", "PX"},
           {"LOCK.FENCE"},
           {"LOCK.INFO"},
           {"LOCK.INFO", "job", "job"},
           {"LOCK.HELP", "LOCK.INFO"},
           {"LOCK.FACT"},
       }) {
    ExpectRefused(command, "ERR wrong number of arguments for '" + command[0] + "' command");
  }
}

TEST_F(BadInputTest, Leases) {
  for (const char* name : {"LOCK.ACQUIRE", "LOCK.TOUCH"}) {
    for (const std::string& number : kNoNumbers) {
      ExpectRefused({name, "job", "alice", "PX", number},
                    "ERR PX must be a whole number from 1 to 86400000 in plain digits, not \"");
      ExpectRefused({name, "job", "alice", "EX", number},
                    "ERR EX must be a whole number from 1 to 86400 in plain digits, not \"");
    }
    // One more than turnstile.max-lease-ms, and what would be a small number of milliseconds if the
    // product of seconds and 1000 were cut to 64 bits.
    for (const char* number : {"86400001", "9223372036854775807"}) {
      ExpectRefused({name, "job", "alice", "PX", number}, "ERR PX must be ");
    }
    for (const char* number : {"86401", "18446744073709552", "9223372036854775807"}) {
      ExpectRefused({name, "job", "alice", "EX", number}, "ERR EX must be ");
    }
  }
}

TEST_F(BadInputTest, Tokens) {
  for (const std::string& number : kNoNumbers) {
    ExpectRefused(
        {"LOCK.FENCE", "job", number},
        "ERR the token must be a whole number from 1 to 9007199254740991 in plain digits");
  }
  ExpectRefused({"LOCK.FENCE", "job", "9007199254740992"}, "ERR the token must be ");
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job", "9007199254740991"), Reply::Int(0));
}

TEST_F(BadInputTest, OptionsThatDoNotGoTogether) {
  const std::string twice = "ERR syntax error: the lease is given twice";
  for (const char* name : {"LOCK.ACQUIRE", "LOCK.TOUCH"}) {
    ExpectRefused({name, "job", "alice", "PX", "1000", "PX", "1000"}, twice);
    ExpectRefused({name, "job", "alice", "PX", "1000", "EX", "1"}, twice);
    ExpectRefused({name, "job", "alice", "EX", "1", "px", "1000"}, twice);
    ExpectRefused({name, "job", "alice", "EX", "1", "PX"}, twice);
    ExpectRefused({name, "job", "alice", "PX", "EX", "1"}, "ERR PX must be ");
    ExpectRefused({name, "job", "alice", "PX", "1000", "1000"}, "ERR syntax error at \"1000\"");
    ExpectRefused({name, "job", "alice", "1000", "PX"}, "ERR syntax error at \"1000\"");
    ExpectRefused({name, "job", "PX", "1000", "alice"}, "ERR syntax error at \"1000\"");
  }
  ExpectRefused({"LOCK.RELEASE", "job", "alice", "alice"}, "ERR syntax error at \"alice\"");
  ExpectRefused({"LOCK.RELEASE", "job", "alice", "PX", "1"}, "ERR syntax error at \"PX\"");
  ExpectRefused({"LOCK.FENCE", "job", "1", "2"}, "ERR syntax error at \"2\"");
}

// Options of SET, and options of ours that do not exist yet, must not be taken for something else.
TEST_F(BadInputTest, UnknownOptions) {
  const Commands options = {
      {"SHARED"},     {"LIMIT", "2"},     {"REENTRANT"}, {"SESSION"}, {"LINGER", "10"},
      {"FLOOR", "1"}, {"ALSO", "1", "x"}, {"NX"},        {"XX"},      {"GET"},
      {"KEEPTTL"},    {"PXAT", "1"},      {"EXAT", "1"}, {"P"},       {"PXX"},
      {""},           {"THEN", "PING"}};
  for (const Command& option : options) {
    const std::string error = "ERR syntax error at \"" + option[0] + "\": expected ";
    for (const char* name : {"LOCK.ACQUIRE", "LOCK.TOUCH"}) {
      Command after = {name, "job", "alice", "PX", "60000"};
      after.insert(after.end(), option.begin(), option.end());
      ExpectRefused(after, error);
      Command before = {name, "job", "alice"};
      before.insert(before.end(), option.begin(), option.end());
      before.insert(before.end(), {"PX", "60000"});
      ExpectRefused(before, error);
    }
    Command release = {"LOCK.RELEASE", "job", "alice"};
    release.insert(release.end(), option.begin(), option.end());
    ExpectRefused(release, error);
    Command fence = {"LOCK.FENCE", "job", std::to_string(token_)};
    fence.insert(fence.end(), option.begin(), option.end());
    ExpectRefused(fence, error);
  }
  ExpectRefused({"LOCK.FENCE", "job", "THEN", "PING"}, "ERR the token must be ");
}

// The bytes of a request come back in errors only where they cannot do harm.
TEST_F(BadInputTest, BytesThatAreNoText) {
  const std::string nasty = "x\r\n+OK\r\n\0\xff\"\\\t"s;
  const std::string shown = R"(x\x0d\x0a+OK\x0d\x0a\x00\xff\"\\\x09)";
  for (const char* name : {"LOCK.ACQUIRE", "LOCK.TOUCH"}) {
    ExpectRefused({name, nasty, nasty, nasty, nasty}, "ERR syntax error at \"" + shown + "\"");
    ExpectRefused(
        {name, nasty, nasty, "PX", nasty},
        "ERR PX must be a whole number from 1 to 86400000 in plain digits, not \"" + shown);
    ExpectRefused({name, nasty, nasty, "PX\0"s, "1000"}, R"(ERR syntax error at "PX\x00")");
    ExpectRefused({name, nasty, nasty, "\0PX"s, "1000"}, R"(ERR syntax error at "\x00PX")");
  }
  ExpectRefused({"LOCK.RELEASE", nasty, nasty, nasty}, "ERR syntax error at \"" + shown + "\"");
  ExpectRefused({"LOCK.FENCE", nasty, nasty}, "ERR the token must be ");
  ExpectRefused({"LOCK.FENCE", nasty, "1", nasty}, "ERR syntax error at \"" + shown + "\"");
}

TEST_F(BadInputTest, OwnersOfTheWrongSize) {
  const size_t huge = size_t{10} << 20;
  for (const size_t size : {size_t{0}, size_t{257}, huge}) {
    const std::string owner(size, 'o');
    const std::string error = "ERR the owner must have 1 to 256 bytes, not " + std::to_string(size);
    ExpectRefused({"LOCK.ACQUIRE", "job", owner, "PX", "1000"}, error);
    ExpectRefused({"LOCK.TOUCH", "job", owner, "PX", "1000"}, error);
    ExpectRefused({"LOCK.RELEASE", "job", owner}, error);
  }
}

TEST_F(BadInputTest, HugeRequests) {
  const std::string word(size_t{10} << 20, 'w');
  ExpectRefused({"LOCK.ACQUIRE", "job", "alice", word, "1000"}, "ERR syntax error at \"wwwwwwww");
  ExpectRefused({"LOCK.ACQUIRE", "job", "alice", "PX", word}, "ERR PX must be ");
  ExpectRefused({"LOCK.FENCE", "job", word}, "ERR the token must be ");
  for (const Command& start : Commands{{"LOCK.ACQUIRE", "job", "alice", "PX", "1000"},
                                       {"LOCK.TOUCH", "job", "alice", "PX", "1000"},
                                       {"LOCK.RELEASE", "job", "alice"},
                                       {"LOCK.FENCE", "job", "1"}}) {
    Command many = start;
    many.resize(300000, "PX");
    ExpectRefused(many, "ERR syntax error");
  }
  ExpectRefused(Command(300000, "LOCK.INFO"), "ERR wrong number of arguments");
  ExpectRefused(Command(300000, "LOCK.HELP"), "ERR wrong number of arguments");
}

TEST_F(BadInputTest, KeysOfOtherTypes) {
  const Commands makers = {{"RPUSH", "list", "alice"},
                           {"HSET", "hash", "alice", "1"},
                           {"SADD", "set", "alice"},
                           {"ZADD", "zset", "1", "alice"},
                           {"XADD", "stream", "*", "alice", "1"}};
  for (const Command& maker : makers) EXPECT_FALSE(client_.Do(maker).IsError()) << maker[0];
  client_.Do("EXPIRE", "list", 1000);
  for (const Command& maker : makers) {
    const std::string& key = maker[1];
    for (const Command& command : Commands{{"LOCK.ACQUIRE", key, "alice", "PX", "1000"},
                                           {"LOCK.RELEASE", key, "alice"},
                                           {"LOCK.TOUCH", key, "alice", "PX", "1000"},
                                           {"LOCK.FENCE", key},
                                           {"LOCK.FENCE", key, "1"},
                                           {"LOCK.INFO", key}}) {
      ExpectRefused(command, "WRONGTYPE Operation against a key holding the wrong kind of value");
    }
  }
}

}  // namespace
}  // namespace turnstile::testing
