// Any invalid request is refused with a one-line error and has no effect.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
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

  // The request is refused in both protocols with an error that has this prefix. No key, TTL or
  // replica changes, and nobody waits.
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
  // Strict: any byte that violates the protocol fails the test.
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

  // The complete state: keys, values, expiry times and waiters.
  std::vector<Reply> State() {
    std::vector<Reply> state = {
        client_.Do("DEBUG", "DIGEST"),
        Reply::Str(InfoField(client_, "turnstile", "turnstile_waiters")),
        Reply::Str(InfoField(client_, "turnstile", "turnstile_queued")),
        Reply::Str(InfoField(client_, "turnstile", "turnstile_last_token")),
    };
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

// Values that are not positive integers, whatever the range.
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

TEST_F(BadInputTest, RefusesWrongNumberOfArguments) {
  for (const Command& command : Commands{
           {"LOCK.HELP", "LOCK.INFO"},
           {"LOCK.FACT"},
           {"LOCK.HELD", "job", "alice"},
       }) {
    ExpectRefused(command, "ERR wrong number of arguments for '" + command[0] + "' command");
  }
}

// The most common mistakes are answered with the correct form.
TEST_F(BadInputTest, CommonMistakesAreAnsweredWithCorrectForm) {
  const auto expect_shown = [this](const Command& command, const std::string& what,
                                   const std::string& form) {
    ExpectRefused(command, "ERR " + what + ": " + form + ", for example " + command[0] + " ");
  };
  for (const std::string name : {"LOCK.ACQUIRE", "LOCK.TOUCH"}) {
    const std::string form = name + " key owner PX milliseconds";
    expect_shown({name}, "the key is missing", form);
    expect_shown({name, "job"}, "the owner is missing", form);
    expect_shown({name, "job", "PX", "60000"}, "the owner is missing", form);
    expect_shown({name, "job", "EX", "60"}, "the owner is missing", form);
    expect_shown({name, "job", "alice"}, "the lease is missing", form);
    expect_shown({name, "job", "alice", "60000"}, "PX or EX is missing before the lease", form);
    expect_shown({name, "job", "alice", "PX"}, "the number after PX is missing", form);
    expect_shown({name, "job", "alice", "EX"}, "the number after EX is missing", form);
    ExpectRefused({name, "job", "alice", "PX", "86400001"},
                  "ERR PX must be an integer from 1 to 86400000 (turnstile.max-lease-ms) in ");
    ExpectRefused({name, "job", "alice", "EX", "86401"},
                  "ERR EX must be an integer from 1 to 86400 (turnstile.max-lease-ms) in ");
  }
  expect_shown({"LOCK.RELEASE"}, "the key is missing", "LOCK.RELEASE key owner");
  expect_shown({"LOCK.RELEASE", "job"}, "the owner is missing", "LOCK.RELEASE key owner");
  expect_shown({"LOCK.FENCE"}, "the key is missing",
               "LOCK.FENCE key [token [THEN command [arg ...]]]");
  expect_shown({"LOCK.INFO"}, "the key is missing", "LOCK.INFO key");
  ExpectRefused({"LOCK.INFO", "job", "job"}, "ERR syntax error at \"job\": expected nothing more");
}

// The server asks for the keys of a request before the module sees it.
TEST_F(BadInputTest, CommandGetKeysHandlesIncompleteRequests) {
  EXPECT_TRUE(client_.Do("ACL", "SETUSER", "worker", "reset", "~lock:*", "+@all") == Reply::Ok());
  for (const char* name :
       {"LOCK.ACQUIRE", "LOCK.TOUCH", "LOCK.RELEASE", "LOCK.FENCE", "LOCK.INFO"}) {
    SCOPED_TRACE(name);
    EXPECT_EQ(client_.Do("COMMAND", "GETKEYS", name, "job"), Reply::Array({Reply::Str("job")}));
    EXPECT_EQ(client_.Do("ACL", "DRYRUN", "worker", name), Reply::Ok());
    EXPECT_NE(client_.Do("ACL", "DRYRUN", "worker", name, "job"), Reply::Ok());
    const std::string call = "return redis.call('" + std::string(name) + "')";
    EXPECT_TRUE(client_.Do("EVAL", call, 0).IsError("ERR the key is missing"));
    EXPECT_TRUE(
        client_.Do("LOCK.FENCE", "job", token_, "THEN", name).IsError("ERR the key is missing"));
  }
  for (const char* name : {"LOCK.ACQUIRE", "LOCK.TOUCH", "LOCK.RELEASE"}) {
    EXPECT_EQ(client_.Do("COMMAND", "GETKEYS", name, "job", "alice", "ALSO", 9, "task").Texts(),
              (std::vector<std::string>{"job", "task"}));
    EXPECT_EQ(client_.Do("COMMAND", "GETKEYS", name, "job", "alice", "ALSO").Texts(),
              std::vector<std::string>{"job"});
  }
}

TEST_F(BadInputTest, RefusesInvalidLeases) {
  for (const char* name : {"LOCK.ACQUIRE", "LOCK.TOUCH"}) {
    for (const std::string& number : kNoNumbers) {
      ExpectRefused({name, "job", "alice", "PX", number},
                    "ERR PX must be an integer from 1 to 86400000 (turnstile.max-lease-ms) in "
                    "plain digits, not \"");
      ExpectRefused({name, "job", "alice", "EX", number},
                    "ERR EX must be an integer from 1 to 86400 (turnstile.max-lease-ms) in "
                    "plain digits, not \"");
    }
    // One more than turnstile.max-lease-ms, and values that would be a small number of milliseconds
    // if seconds times 1000 were truncated to 64 bits.
    for (const char* number : {"86400001", "9223372036854775807"}) {
      ExpectRefused({name, "job", "alice", "PX", number}, "ERR PX must be ");
    }
    for (const char* number : {"86401", "18446744073709552", "9223372036854775807"}) {
      ExpectRefused({name, "job", "alice", "EX", number}, "ERR EX must be ");
    }
  }
}

TEST_F(BadInputTest, RefusesInvalidTokens) {
  for (const std::string& number : kNoNumbers) {
    if (number == "0") continue;
    ExpectRefused({"LOCK.FENCE", "job", number}, "ERR the token must be an integer from ");
  }
  ExpectRefused({"LOCK.FENCE", "job", "9007199254740992"}, "ERR the token must be ");
  // What a request that waits by NOTIFY is answered is never a token.
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job", "0"), Reply::Int(0));
  EXPECT_EQ(client_.Do("LOCK.FENCE", "free", "0"), Reply::Int(0));
  EXPECT_TRUE(client_.Do("LOCK.FENCE", "job", "0", "THEN", "SET", "x", "y").IsError("FENCED"));
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job", "9007199254740991"), Reply::Int(0));
}

TEST_F(BadInputTest, RefusesConflictingOptions) {
  const std::string twice = "ERR syntax error: the lease is given twice";
  for (const char* name : {"LOCK.ACQUIRE", "LOCK.TOUCH"}) {
    ExpectRefused({name, "job", "alice", "PX", "1000", "PX", "1000"}, twice);
    ExpectRefused({name, "job", "alice", "PX", "1000", "EX", "1"}, twice);
    ExpectRefused({name, "job", "alice", "EX", "1", "px", "1000"}, twice);
    ExpectRefused({name, "job", "alice", "EX", "1", "PX"}, twice);
    ExpectRefused({name, "job", "alice", "PX", "EX", "1"}, "ERR PX must be ");
    ExpectRefused({name, "job", "alice", "PX", "1000", "1000"}, "ERR syntax error at \"1000\"");
    ExpectRefused({name, "job", "alice", "1000", "PX"}, "ERR PX or EX is missing before the lease");
    ExpectRefused({name, "job", "PX", "1000", "alice"}, "ERR the owner is missing");
  }
  ExpectRefused({"LOCK.RELEASE", "job", "alice", "alice"}, "ERR syntax error at \"alice\"");
  ExpectRefused({"LOCK.RELEASE", "job", "alice", "PX", "1"}, "ERR syntax error at \"PX\"");
  ExpectRefused({"LOCK.FENCE", "job", "1", "2"}, "ERR syntax error at \"2\"");
}

// Options of SET, options that do not exist yet and options of other commands must not be mistaken
// for valid ones.
TEST_F(BadInputTest, RefusesUnknownOptions) {
  const std::string also = "ALSO numkeys key [key ...]";
  const std::string more =
      "WAIT ms, MAXLINE n, SHARED, LIMIT n, WEIGHT w, REENTRANT, SESSION, LINGER ms, MAXHOLD ms, "
      "TAG text, NOTIFY channel id, FLOOR token or " +
      also;
  const std::vector<Command> modes = {{"SHARED"},           {"LIMIT", "2"},   {"REENTRANT"},
                                      {"SESSION"},          {"LINGER", "10"}, {"WAIT", "10"},
                                      {"FLOOR", "1"},       {"MAXLINE", "1"}, {"WEIGHT", "1"},
                                      {"MAXHOLD", "60000"}, {"TAG", "x"},     {"NOTIFY", "c", "1"}};
  const Commands unknown = {
      {"FLOORS", "1"}, {"NX"},        {"XX"},           {"GET"},
      {"KEEPTTL"},     {"PXAT", "1"}, {"EXAT", "1"},    {"P"},
      {"PXX"},         {""},          {"IF", "PING"},   {"SHAREDX"},
      {"LIMIT=2"},     {"EXCLUSIVE"}, {"NUMKEYS", "1"}, {"ALSO\0"s, "1", "x"}};
  const auto refused = [&](Command command, const Command& option, const Command& end,
                           const std::string& expected) {
    command.insert(command.end(), option.begin(), option.end());
    command.insert(command.end(), end.begin(), end.end());
    const std::string shown = option[0] == "ALSO\0"s ? R"(ALSO\x00)" : option[0];
    ExpectRefused(command, "ERR syntax error at \"" + shown + "\": expected " + expected);
  };
  const Command lease = {"PX", "60000"};
  const Command acquire = {"LOCK.ACQUIRE", "job", "alice"};
  const Command touch = {"LOCK.TOUCH", "job", "alice"};
  const Command release = {"LOCK.RELEASE", "job", "alice"};
  const Command fence = {"LOCK.FENCE", "job", std::to_string(token_)};
  for (const Command& option : unknown) {
    refused(acquire, option, lease, "PX ms, EX s, " + more);
    refused({"LOCK.ACQUIRE", "job", "alice", "PX", "60000"}, option, {}, more);
  }
  Commands of_acquire = unknown;
  of_acquire.insert(of_acquire.end(), modes.begin(), modes.end());
  for (const Command& option : of_acquire) {
    refused(touch, option, lease, "PX ms, EX s or " + also);
    refused({"LOCK.TOUCH", "job", "alice", "PX", "60000"}, option, {}, also);
    refused(release, option, {}, also);
    refused({"LOCK.RELEASE", "job", "alice", "ALSO", "1", "x"}, option, {}, "nothing more");
  }
  Commands of_all = of_acquire;
  of_all.push_back({"ALSO", "1", "x"});
  for (const Command& option : of_all) {
    refused(fence, option, {}, "THEN command [arg ...]");
  }
  ExpectRefused({"LOCK.FENCE", "job", "THEN", "PING"}, "ERR the token must be ");

  // Options that were already given are not suggested.
  const std::vector<std::pair<Command, std::vector<std::string>>> given = {
      {{"WAIT", "1"}, {"WAIT ms"}},
      {{"MAXLINE", "1"}, {"MAXLINE n"}},
      {{"SHARED"}, {"SHARED", "LIMIT n"}},
      {{"LIMIT", "2"}, {"SHARED", "LIMIT n"}},
      {{"WEIGHT", "1"}, {"WEIGHT w"}},
      {{"REENTRANT"}, {"REENTRANT"}},
      {{"SESSION"}, {"SESSION"}},
      {{"LINGER", "1"}, {"LINGER ms"}},
      {{"MAXHOLD", "1"}, {"MAXHOLD ms"}},
      {{"TAG", "x"}, {"TAG text"}},
      {{"NOTIFY", "c", "1"}, {"NOTIFY channel id"}},
      {{"FLOOR", "1"}, {"FLOOR token"}},
      {{"ALSO", "1", "x"}, {also}},
      {lease, {"PX ms", "EX s"}}};
  const std::vector<std::string> offered = {
      "PX ms",      "EX s",     "WAIT ms",           "MAXLINE n",   "SHARED",
      "LIMIT n",    "WEIGHT w", "REENTRANT",         "SESSION",     "LINGER ms",
      "MAXHOLD ms", "TAG text", "NOTIFY channel id", "FLOOR token", also};
  for (const auto& [option, taken] : given) {
    Command command = acquire;
    command.insert(command.end(), option.begin(), option.end());
    command.insert(command.end(), {"NONSENSE", "NONSENSE"});
    std::string expected;
    for (const std::string& each : offered) {
      if (std::count(taken.begin(), taken.end(), each) != 0) continue;
      const bool last = each == also || (each == "FLOOR token" && taken[0] == also);
      expected += (expected.empty() ? "" : last ? " or " : ", ") + each;
    }
    ExpectRefused(command, "ERR syntax error at \"NONSENSE\": expected " + expected);
  }
}

// --- Modes ------------------------------------------------------------------------------------

// For a free lock, and for "job", which could be waited for.
TEST_F(BadInputTest, RefusesInvalidNumbersOfOptions) {
  for (const std::string& key : {"free"s, "job"s}) {
    const Command start = {"LOCK.ACQUIRE", key, "bob", "PX", "60000", "WAIT", "60000"};
    const auto refused = [&](const Command& option, const std::string& error) {
      Command command = start;
      command.insert(command.end(), option.begin(), option.end());
      ExpectRefused(command, error);
    };
    const std::string limit = "ERR LIMIT must be an integer from 1 to 100000 in plain digits, ";
    const std::string linger =
        "ERR LINGER must be an integer from 0 to 86400000 (turnstile.max-lease-ms) in plain "
        "digits, not ";
    const std::string also = "ERR ALSO must be an integer from 1 to 64 in plain digits, not ";
    for (const std::string& number : kNoNumbers) {
      refused({"LIMIT", number}, limit + "not \"");
      refused({"ALSO", number, "x"}, also + "\"");
      if (number != "0") refused({"LINGER", number}, linger + "\"");
    }
    for (const char* number : {"100001", "1000000000", "4294967297", "9223372036854775807"}) {
      refused({"LIMIT", number}, limit);
    }
    for (const char* number : {"86400001", "9223372036854775807"}) {
      refused({"LINGER", number}, linger);
    }
    for (const char* number : {"65", "10000", "9223372036854775807"}) {
      refused({"ALSO", number, "x"}, also);
    }
    refused({"LIMIT"}, "ERR syntax error: the number after LIMIT is missing");
    refused({"LINGER"}, "ERR syntax error: the number after LINGER is missing");
    refused({"ALSO"}, "ERR syntax error: the number after ALSO is missing");
  }
}

TEST_F(BadInputTest, RefusesLingerAboveMaximumLease) {
  EXPECT_EQ(client_.Do("CONFIG", "SET", "turnstile.max-lease-ms", 5000), Reply::Ok());
  ExpectRefused({"LOCK.ACQUIRE", "free", "bob", "PX", "5000", "LINGER", "5001"},
                "ERR LINGER must be an integer from 0 to 5000 (turnstile.max-lease-ms) in "
                "plain digits, not \"5001\"");
  EXPECT_TRUE(client_.Do("LOCK.ACQUIRE", "free", "bob", "PX", 5000, "LINGER", 5000).IsInteger());
  EXPECT_EQ(client_.Do("CONFIG", "SET", "turnstile.max-lease-ms", 86400000), Reply::Ok());
}

TEST_F(BadInputTest, RefusesConflictingModes) {
  for (const std::string& key : {"free"s, "job"s}) {
    const auto refused = [&](const Command& options, const std::string& error) {
      Command command = {"LOCK.ACQUIRE", key, "bob", "PX", "60000", "WAIT", "60000"};
      command.insert(command.end(), options.begin(), options.end());
      ExpectRefused(command, "ERR syntax error: " + error);
    };
    const std::string mode = "the mode is given twice: give SHARED or LIMIT once";
    refused({"SHARED", "LIMIT", "2"}, mode);
    refused({"LIMIT", "2", "SHARED"}, mode);
    refused({"LIMIT", "2", "LIMIT", "2"}, mode);
    refused({"shared", "Shared"}, mode);
    const std::string permit = "REENTRANT cannot be combined with LIMIT";
    refused({"LIMIT", "2", "REENTRANT"}, permit);
    refused({"REENTRANT", "SESSION", "LIMIT", "2"}, permit);
    refused({"REENTRANT", "REENTRANT"}, "REENTRANT is given twice");
    refused({"SESSION", "SHARED", "SESSION"}, "SESSION is given twice");
    refused({"LINGER", "1", "LINGER", "1"}, "LINGER is given twice");
    refused({"LINGER", "0", "LINGER", "1"}, "LINGER is given twice");
    refused({"WAIT", "0"}, "WAIT is given twice");
    refused({"ALSO", "1", "x", "ALSO", "1", "y"}, "ALSO is given twice");
    refused({"LIMIT", "9", "WEIGHT", "1", "WEIGHT", "1"}, "WEIGHT is given twice");
    refused({"MAXLINE", "1", "maxline", "1"}, "MAXLINE is given twice");
    refused({"MAXHOLD", "60000", "MAXHOLD", "60000"}, "MAXHOLD is given twice");
    refused({"TAG", "x", "Tag", "x"}, "TAG is given twice");
    refused({"NOTIFY", "c", "1", "NOTIFY", "c", "1"}, "NOTIFY is given twice");
  }
}

// Texts that no option accepts, and options that need another.
TEST_F(BadInputTest, RefusesInvalidWeightsLinesCapsTagsAndChannels) {
  for (const std::string& key : {"free"s, "job"s}) {
    const auto refused = [&](const Command& options, const std::string& error) {
      Command command = {"LOCK.ACQUIRE", key, "bob", "PX", "60000"};
      command.insert(command.end(), options.begin(), options.end());
      ExpectRefused(command, "ERR " + error);
    };
    const std::string digits = " in plain digits, not ";
    const std::string weight = "WEIGHT must be an integer from 1 to 100000" + digits;
    const std::string line = "MAXLINE must be an integer from 1 to 10000000" + digits;
    const std::string hold = "MAXHOLD must be an integer from 1 to 31536000000" + digits;
    for (const std::string& number : kNoNumbers) {
      refused({"LIMIT", "9", "WEIGHT", number}, weight + '"');
      refused({"WAIT", "60000", "MAXLINE", number}, line + '"');
      refused({"MAXHOLD", number}, hold + '"');
    }
    refused({"LIMIT", "9", "WEIGHT", "100001"}, weight + "\"100001\"");
    refused({"WAIT", "60000", "MAXLINE", "10000001"}, line + "\"10000001\"");
    for (const char* number : {"31536000001", "1000000000000000000", "9223372036854775807"}) {
      refused({"MAXHOLD", number}, hold + '"' + number + '"');
    }
    refused({"WEIGHT"}, "syntax error: the number after WEIGHT is missing");
    refused({"MAXLINE"}, "syntax error: the number after MAXLINE is missing");
    refused({"MAXHOLD"}, "syntax error: the number after MAXHOLD is missing");

    refused({"LIMIT", "9", "WEIGHT", "10"}, "WEIGHT must be at most LIMIT, which is 9, not 10");
    refused({"WEIGHT", "10", "LIMIT", "9"}, "WEIGHT must be at most LIMIT, which is 9, not 10");
    refused({"WEIGHT", "1"}, "syntax error: WEIGHT requires LIMIT");
    refused({"SHARED", "WEIGHT", "1"}, "syntax error: WEIGHT requires LIMIT");
    refused({"MAXLINE", "1"}, "syntax error: MAXLINE requires WAIT");
    refused({"NOTIFY", "c", "1", "MAXLINE", "1"}, "syntax error: MAXLINE requires WAIT");
    refused({"MAXHOLD", "59999"}, "MAXHOLD must be at least the lease of 60000 ms, not 59999");
    refused({"WAIT", "9", "MAXHOLD", "1"}, "MAXHOLD must be at least the lease of 60000 ms, not 1");

    const std::string tag = "TAG must be 1 to 64 printable ASCII characters, not ";
    for (const std::string& text :
         {""s, "a\nb"s, "\r"s, "\0"s, "a\0"s, "\x7f"s, "\t"s, "\x1b[31m"s, "\xc3\xa9"s, "\xff"s,
          std::string(65, 'x'), std::string(10'000'000, 'x')}) {
      refused({"TAG", text}, tag + '"');
      refused({"WAIT", "60000", "TAG", text}, tag + '"');
    }
    refused({"TAG"}, "syntax error: the text after TAG is missing");

    const std::string id =
        "the id after NOTIFY channel must be 1 to 64 printable ASCII characters without a space, "
        "not ";
    for (const std::string& text : {""s, " "s, "a b"s, "a\nb"s, "\0"s, "\x7f"s, "\xc3\xa9"s,
                                    std::string(65, 'x'), std::string(10'000'000, 'x')}) {
      refused({"WAIT", "60000", "NOTIFY", "c", text}, id + '"');
      refused({"NOTIFY", "c", text}, id + '"');
    }
    for (const size_t size : {size_t{0}, size_t{257}, size_t{10'000'000}}) {
      const std::string channel(size, 'c');
      refused({"WAIT", "60000", "NOTIFY", channel, "1"},
              "the channel after NOTIFY must be 1 to 256 bytes, not " + std::to_string(size));
    }
    refused({"NOTIFY"}, "syntax error: the channel after NOTIFY is missing");
    refused({"NOTIFY", "c"}, "syntax error: the id after NOTIFY channel is missing");
  }
}

// The server finds keys by this word, so it can be nothing else.
TEST_F(BadInputTest, RefusesTheWordAlsoAsText) {
  for (const char* word : {"ALSO", "also", "aLsO"}) {
    const std::string error = " must not be the word ALSO, which introduces keys";
    for (const char* key : {"free", "job"}) {
      const auto refused = [&](const Command& options, const std::string& what) {
        Command command = {"LOCK.ACQUIRE", key, "bob", "PX", "60000", "WAIT", "60000"};
        command.insert(command.end(), options.begin(), options.end());
        ExpectRefused(command, "ERR " + what + error);
      };
      refused({"TAG", word}, "the text after TAG");
      refused({"TAG", word, "ALSO", "1", "x"}, "the text after TAG");
      refused({"NOTIFY", word, "1"}, "the channel after NOTIFY");
      refused({"NOTIFY", word, "1", "x"}, "the channel after NOTIFY");
      refused({"NOTIFY", "c", word}, "the id after NOTIFY channel");
      refused({"NOTIFY", word, word}, "the channel after NOTIFY");
    }
  }
  // Words that only contain it are texts like any other.
  EXPECT_GT(
      client_
          .Do("LOCK.ACQUIRE", "free", "bob", "PX", 1, "TAG", "ALSO 1", "NOTIFY", "also:", "ALSO1")
          .integer,
      0);
}

// The three commands that accept several keys, for a free lock and for alice's.
Commands WithMoreKeys() {
  Commands starts;
  for (const char* key : {"job", "free"}) {
    starts.push_back({"LOCK.ACQUIRE", key, "alice", "PX", "60000", "WAIT", "60000"});
    starts.push_back({"LOCK.RELEASE", key, "alice"});
    starts.push_back({"LOCK.TOUCH", key, "alice", "PX", "60000"});
  }
  return starts;
}

TEST_F(BadInputTest, RefusesInvalidAlso) {
  client_.Do("RPUSH", "list", "alice");
  for (const Command& start : WithMoreKeys()) {
    const auto refused = [&](const Command& also, const std::string& error) {
      Command command = start;
      command.insert(command.end(), also.begin(), also.end());
      ExpectRefused(command, error);
    };
    const std::string range = "ERR ALSO must be an integer from 1 to 64 in plain digits, not ";
    refused({"ALSO", "0"}, range + "\"0\"");
    refused({"ALSO", "0", "x"}, range + "\"0\"");
    refused({"ALSO", "x", "y"}, range + "\"x\"");
    refused({"ALSO", "1"}, "ERR syntax error: ALSO needs 1 keys, but only 0 arguments follow");
    refused({"ALSO", "3", "x", "y"},
            "ERR syntax error: ALSO needs 3 keys, but only 2 arguments follow");
    refused({"ALSO", "64", "x"},
            "ERR syntax error: ALSO needs 64 keys, but only 1 arguments follow");
    refused({"ALSO", "1", "x", "y"}, "ERR syntax error at \"y\": expected ");
    refused({"ALSO", "1", "x", "ALSO", "1", "y"}, "ERR syntax error: ALSO is given twice");

    for (const size_t count : {size_t{65}, size_t{10000}}) {
      Command many = {"ALSO", std::to_string(count)};
      for (size_t i = 0; i < count; i++) many.push_back("key " + std::to_string(i));
      refused(many, range + "\"" + std::to_string(count) + "\"");
    }

    const std::string twice = " is given twice: name each lock once";
    refused({"ALSO", "1", start[1]}, "ERR the key \"" + start[1] + "\"" + twice);
    refused({"ALSO", "2", "x", start[1]}, "ERR the key \"" + start[1] + "\"" + twice);
    refused({"ALSO", "2", "x", "x"}, "ERR the key \"x\"" + twice);
    refused({"ALSO", "3", "", "x", ""}, "ERR the key \"\"" + twice);
    refused({"ALSO", "3", "x\n", "x", "x\n"}, R"(ERR the key "x\x0a")" + twice);
    Command all = {"ALSO", "64"};
    for (int i = 0; i < 63; i++) all.push_back("key " + std::to_string(i));
    all.push_back("key 0");
    refused(all, "ERR the key \"key 0\"" + twice);

    // One key of another type, at any position, leaves the others unchanged.
    const std::string wrong = "WRONGTYPE Operation against a key holding the wrong kind of value";
    refused({"ALSO", "1", "list"}, wrong);
    refused({"ALSO", "3", "x", "list", "y"}, wrong);
  }
  for (const char* name : {"LOCK.ACQUIRE", "LOCK.TOUCH"}) {
    ExpectRefused({name, "list", "alice", "PX", "60000", "ALSO", "1", "job"}, "WRONGTYPE");
  }
  ExpectRefused({"LOCK.RELEASE", "list", "alice", "ALSO", "1", "job"}, "WRONGTYPE");
}

// Well-formed requests that conflict with what their owner holds.
TEST_F(BadInputTest, RefusesRequestsThatConflictWithOwnHold) {
  for (const char* key : {"shared", "shared too"}) {
    EXPECT_TRUE(client_.Do("LOCK.ACQUIRE", key, "alice", "PX", kMinute, "SHARED").IsInteger());
  }
  EXPECT_TRUE(
      client_.Do("LOCK.ACQUIRE", "pair", "alice", "PX", kMinute, "SHARED", "ALSO", 1, "pair too")
          .IsInteger());
  EXPECT_TRUE(client_.Do("LOCK.ACQUIRE", "limit", "alice", "PX", kMinute, "LIMIT", 2).IsInteger());
  const auto refused = [&](const std::string& key, const Command& options,
                           const std::string& error) {
    Command command = {"LOCK.ACQUIRE", key, "alice", "PX", "60000", "WAIT", "60000"};
    command.insert(command.end(), options.begin(), options.end());
    ExpectRefused(command, error);
  };
  const std::string other = "ERR this owner holds the lock in another mode: release it first";
  refused("job", {"LIMIT", "2"}, other);
  refused("shared", {"LIMIT", "2"}, other);
  refused("limit", {}, other);
  refused("limit", {"SHARED"}, other);
  const std::string some = "ERR this owner holds some of these locks, but not all";
  refused("job", {"ALSO", "1", "free"}, some);
  refused("free", {"ALSO", "2", "free too", "job"}, some);
  const std::string apart = "ERR this owner holds these locks under different tokens";
  refused("shared", {"SHARED", "ALSO", "1", "shared too"}, apart);
  refused("pair", {"SHARED", "ALSO", "2", "pair too", "shared"}, apart);
  refused("pair", {"ALSO", "1", "pair too"}, "ERR ALSO cannot upgrade shared holds");
}

// A script or function has no connection that a hold could be bound to.
TEST_F(BadInputTest, RefusesSessionInScriptsAndFunctions) {
  const std::string library = R"(#!lua name=sessions
    redis.register_function('session', function(keys)
      return redis.call('LOCK.ACQUIRE', keys[1], 'alice', 'PX', 60000, 'SESSION')
    end))";
  EXPECT_EQ(client_.Do("FUNCTION", "LOAD", "REPLACE", library), Reply::Str("sessions"));
  const std::string script =
      "return redis.call('LOCK.ACQUIRE', KEYS[1], 'alice', 'PX', 60000, 'SESSION')";
  for (const char* key : {"job", "free"}) {
    const std::string error =
        "ERR SESSION requires a connection: it cannot be used in scripts, functions or after ";
    ExpectRefused({"EVAL", script, "1", key}, error);
    ExpectRefused({"FCALL", "session", "1", key}, error);
    // Also by a call whose error the script handles itself.
    ExpectRefused({"EVAL", "return redis.pcall(unpack(ARGV))", "1", key, "LOCK.ACQUIRE", key, "bob",
                   "PX", "60000", "SESSION", "SHARED", "WAIT", "60000"},
                  error);
  }
  EXPECT_EQ(client_.Do("FUNCTION", "DELETE", "sessions"), Reply::Ok());
}

// Errors quote the request's bytes so that they can do no harm.
TEST_F(BadInputTest, ErrorsQuoteBinaryInput) {
  const std::string nasty = "x\r\n+OK\r\n\0\xff\"\\\t"s;
  const std::string shown = R"(x\x0d\x0a+OK\x0d\x0a\x00\xff\"\\\x09)";
  for (const char* name : {"LOCK.ACQUIRE", "LOCK.TOUCH"}) {
    ExpectRefused({name, nasty, nasty, nasty, nasty}, "ERR syntax error at \"" + shown + "\"");
    ExpectRefused({name, nasty, nasty, "PX", nasty},
                  "ERR PX must be an integer from 1 to 86400000 (turnstile.max-lease-ms) in "
                  "plain digits, not \"" +
                      shown);
    ExpectRefused({name, nasty, nasty, "PX\0"s, "1000"}, R"(ERR syntax error at "PX\x00")");
    ExpectRefused({name, nasty, nasty, "\0PX"s, "1000"}, R"(ERR syntax error at "\x00PX")");
  }
  ExpectRefused({"LOCK.RELEASE", nasty, nasty, nasty}, "ERR syntax error at \"" + shown + "\"");
  ExpectRefused({"LOCK.FENCE", nasty, nasty}, "ERR the token must be ");
  ExpectRefused({"LOCK.FENCE", nasty, "1", nasty}, "ERR syntax error at \"" + shown + "\"");
}

TEST_F(BadInputTest, RefusesOwnersOfInvalidSize) {
  const size_t huge = size_t{10} << 20;
  for (const size_t size : {size_t{0}, size_t{257}, huge}) {
    const std::string owner(size, 'o');
    const std::string error = "ERR the owner must be 1 to 256 bytes, not " + std::to_string(size);
    ExpectRefused({"LOCK.ACQUIRE", "job", owner, "PX", "1000"}, error);
    ExpectRefused({"LOCK.TOUCH", "job", owner, "PX", "1000"}, error);
    ExpectRefused({"LOCK.RELEASE", "job", owner}, error);
  }
}

TEST_F(BadInputTest, RefusesHugeRequests) {
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
  ExpectRefused(Command(300000, "LOCK.INFO"), "ERR syntax error at \"LOCK.INFO\"");
  ExpectRefused(Command(300000, "LOCK.HELP"), "ERR wrong number of arguments");
}

TEST_F(BadInputTest, RefusesHugeNumbersOfKeys) {
  for (Command command : WithMoreKeys()) {
    command.insert(command.end(), {"ALSO", "299990"});
    command.resize(300000, "x");
    ExpectRefused(command, "ERR ALSO must be an integer from 1 to 64");
  }
}

TEST_F(BadInputTest, RefusesKeysOfOtherTypes) {
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
