// Parsing, as tables: which requests are accepted, and with which message others are refused.

#include "core/request.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "printers.h"

namespace turnstile {
namespace {

using namespace std::string_literals;
using namespace std::string_view_literals;
using Words = std::vector<std::string_view>;

constexpr Limits kDay{.max_lease = std::chrono::hours{24}};
constexpr Limits kNoLimit{.max_lease = Millis::max()};

template <typename Request>
std::string ErrorOf(const Parsed<Request>& parsed) {
  const auto* error = std::get_if<ParseError>(&parsed);
  return error == nullptr ? "(accepted)" : error->text;
}

// The words of a command, with an arbitrary key.
Words WithKey(Words words) {
  words.insert(words.begin(), "the key");
  return words;
}

// The options that may follow the owner of LOCK.ACQUIRE.
constexpr std::string_view kAnyOption =
    "PX ms, EX s, WAIT ms, MAXLINE n, SHARED, LIMIT n, WEIGHT w, REENTRANT, SESSION, LINGER ms, "
    "MAXHOLD ms, TAG text, NOTIFY channel id, FLOOR token or ALSO numkeys key [key ...]";

bool IsOnePrintableLine(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; });
}

// Spellings that are never accepted as integers, in addition to zero and numbers out of range.
const std::vector<std::string> kNotPlainDigits = {
    "",    "00",       "01",       "007",          "-1",     "-0",    "+1",
    " 1",  "1 ",       "\t1",      "1\n",          "1\r\n1", "1 000", "1\0"s,
    "\0"s, "\0001"s,   "1\0001"s,  "1.0",          "1.",     ".5",    "1.5",
    "1e3", "1E3",      "1e0",      "0x10",         "0X1",    "0b1",   "10h",
    "a",   "1a",       "a1",       "1_000",        "1,000",  "1'000", "--1",
    "inf", "infinity", "nan",      "PX",           "1PX",    "/",     ":",
    "1/",  "1:",       "\xd9\xa1", "\xef\xbc\x91", "\xff",   "\xb1",  "1\x80",
};

// Plain digits that do not fit into 63 bits. Truncated to 64 bits, some would be small valid
// numbers.
const std::vector<std::string> kTooHuge = {
    "9223372036854775808",    // 2^63
    "9223372036854775809",    // 2^63 + 1
    "18446744073709551615",   // 2^64 - 1
    "18446744073709551616",   // 2^64
    "18446744073709551617",   // 2^64 + 1
    "36893488147419103233",   // 2^65 + 1
    "184467440737095516160",  // 2^64 * 10
    "1" + std::string(39, '0'), std::string(400, '9'), std::string(size_t{10} << 20, '7'),
};

// --- LOCK.ACQUIRE and LOCK.TOUCH: key owner <PX ms | EX s> ------------------------------------

// The usage texts that are shown when an argument is missing.
const std::string kAcquireUsage =
    "LOCK.ACQUIRE key owner PX milliseconds, for example LOCK.ACQUIRE table:12 7d3f9a1c PX 60000";
const std::string kTouchUsage =
    "LOCK.TOUCH key owner PX milliseconds, for example LOCK.TOUCH table:12 7d3f9a1c PX 60000";
const std::string kReleaseUsage =
    "LOCK.RELEASE key owner, for example LOCK.RELEASE table:12 7d3f9a1c";

struct LeaseReading {
  std::string owner;
  std::optional<Millis> lease;
  std::string error = "(accepted)";
};

template <typename Request, Parsed<Request> (*kParse)(Args, const Limits&)>
LeaseReading ReadLease(const Words& words, const Limits& limits) {
  const Parsed<Request> parsed = kParse(WithKey(words), limits);
  if (const auto* error = std::get_if<ParseError>(&parsed)) return {.error = error->text};
  const auto& request = std::get<Request>(parsed);
  return {.owner = std::string(request.owner.bytes), .lease = request.lease};
}

struct LeaseCommand {
  const char* name;
  LeaseReading (*read)(const Words&, const Limits&);
  std::string usage;
};

class LeaseRequest : public testing::TestWithParam<LeaseCommand> {
 protected:
  static LeaseReading Read(const Words& words, const Limits& limits = kDay) {
    return GetParam().read(words, limits);
  }
  static std::string Error(const Words& words, const Limits& limits = kDay) {
    return Read(words, limits).error;
  }
  static bool is_acquire() { return GetParam().name == std::string_view("Acquire"); }
};

INSTANTIATE_TEST_SUITE_P(
    Commands, LeaseRequest,
    testing::Values(LeaseCommand{"Acquire", &ReadLease<AcquireRequest, ParseAcquire>,
                                 kAcquireUsage},
                    LeaseCommand{"Touch", &ReadLease<TouchRequest, ParseTouch>, kTouchUsage}),
    [](const auto& param_info) { return std::string(param_info.param.name); });

TEST_P(LeaseRequest, AcceptsValidRequests) {
  struct Case {
    Words words;
    int64_t lease;
  };
  const std::vector<Case> cases = {
      {{"o", "PX", "1"}, 1},
      {{"o", "px", "2"}, 2},
      {{"o", "Px", "3"}, 3},
      {{"o", "pX", "4"}, 4},
      {{"o", "EX", "1"}, 1000},
      {{"o", "ex", "2"}, 2000},
      {{"o", "Ex", "3"}, 3000},
      {{"o", "eX", "4"}, 4000},
      {{"o", "PX", "10"}, 10},
      {{"o", "PX", "1000"}, 1000},
      {{"o", "PX", "86399999"}, 86399999},
      {{"o", "PX", "86400000"}, 86400000},
      {{"o", "EX", "86400"}, 86400000},
      // The owner is recognised by its position, whatever it looks like.
      {{"PX", "PX", "5"}, 5},
      {{"EX", "EX", "5"}, 5000},
      {{"px", "EX", "5"}, 5000},
      {{"SHARED", "PX", "5"}, 5},
      {{"7", "PX", "5"}, 5},
      {{" ", "PX", "5"}, 5},
      {{"\0"sv, "PX", "5"}, 5},
      {{"a\0b\r\n\xff"sv, "PX", "5"}, 5},
  };
  for (const auto& [words, lease] : cases) {
    SCOPED_TRACE(testing::PrintToString(words));
    const LeaseReading reading = Read(words);
    EXPECT_EQ(reading.error, "(accepted)");
    EXPECT_EQ(reading.owner, words[0]);
    EXPECT_EQ(reading.lease, Millis{lease});
  }
}

TEST_P(LeaseRequest, OwnerMustHave1To256Bytes) {
  for (const size_t size : {size_t{1}, size_t{2}, size_t{255}, size_t{256}}) {
    for (const char byte : {'o', '\0', '\xff', '\n'}) {
      const std::string owner(size, byte);
      EXPECT_EQ(Read({owner, "PX", "1"}).owner, owner) << size;
    }
  }
  const std::string huge(size_t{10} << 20, 'o');
  EXPECT_EQ(Error({"", "PX", "1"}), "ERR the owner must be 1 to 256 bytes, not 0");
  EXPECT_EQ(Error({std::string(257, 'o'), "PX", "1"}),
            "ERR the owner must be 1 to 256 bytes, not 257");
  EXPECT_EQ(Error({huge, "PX", "1"}), "ERR the owner must be 1 to 256 bytes, not 10485760");
  // It is the first argument, so it is reported first.
  EXPECT_EQ(Error({""}), "ERR the owner must be 1 to 256 bytes, not 0");
  EXPECT_EQ(Error({"", "PX", "x", "PX"}), "ERR the owner must be 1 to 256 bytes, not 0");
}

TEST_P(LeaseRequest, RefusesMissingArguments) {
  EXPECT_EQ(ErrorOf(ParseAcquire({}, kDay)), "ERR the key is missing: " + kAcquireUsage);
  EXPECT_EQ(ErrorOf(ParseTouch({}, kDay)), "ERR the key is missing: " + kTouchUsage);
  const std::string usage = ": " + GetParam().usage;
  EXPECT_EQ(Error({}), "ERR the owner is missing" + usage);
  EXPECT_EQ(Error({"o"}), "ERR the lease is missing" + usage);
  for (const std::string_view option : {"PX", "px"}) {
    EXPECT_EQ(Error({"o", option}), "ERR the number after PX is missing" + usage);
  }
  for (const std::string_view option : {"EX", "ex"}) {
    EXPECT_EQ(Error({"o", option}), "ERR the number after EX is missing" + usage);
  }
}

// A number without its option, where no lease was given.
TEST_P(LeaseRequest, SuggestsOptionForBareLeaseNumber) {
  const std::string usage = ": " + GetParam().usage;
  for (const Words& words :
       {Words{"o", "60000"}, {"o", "60000", "PX"}, {"o", "0"}, {"o", "ALSO", "1", "a", "5"}}) {
    EXPECT_EQ(Error(words), "ERR PX or EX is missing before the lease" + usage);
  }
  for (const Words& words : {Words{"PX", "60000"}, {"ex", "5"}, {"Px", "5", "ALSO", "1", "a"}}) {
    EXPECT_EQ(Error(words), "ERR the owner is missing" + usage);
  }
  EXPECT_EQ(Read({"PX", "PX", "60000"}).error, "(accepted)") << "an owner may have that name";
  EXPECT_TRUE(Error({"o", "PX", "1", "60000"}).starts_with("ERR syntax error at \"60000\""))
      << "twice";
  EXPECT_TRUE(Error({"o", "-1"}).starts_with("ERR syntax error at \"-1\""));
}

TEST_P(LeaseRequest, RefusesNumbersThatAreNotPlainDigits) {
  for (const std::string& number : kNotPlainDigits) {
    EXPECT_EQ(Error({"o", "PX", number}),
              "ERR PX must be an integer from 1 to 86400000 (turnstile.max-lease-ms) in plain "
              "digits, not " +
                  Quoted(number));
    EXPECT_EQ(Error({"o", "EX", number}),
              "ERR EX must be an integer from 1 to 86400 (turnstile.max-lease-ms) in plain "
              "digits, not " +
                  Quoted(number));
  }
  EXPECT_EQ(Error({"o", "px", "-5"}),
            "ERR PX must be an integer from 1 to 86400000 (turnstile.max-lease-ms) in plain "
            "digits, not \"-5\"");
  EXPECT_EQ(Error({"o", "ex", "1\n"}),
            "ERR EX must be an integer from 1 to 86400 (turnstile.max-lease-ms) in plain "
            "digits, not \"1\\x0a\"");
}

TEST_P(LeaseRequest, RefusesNumbersOutOfRange) {
  EXPECT_EQ(Error({"o", "PX", "0"}),
            "ERR PX must be an integer from 1 to 86400000 (turnstile.max-lease-ms) in plain "
            "digits, not \"0\"");
  EXPECT_EQ(Error({"o", "EX", "0"}),
            "ERR EX must be an integer from 1 to 86400 (turnstile.max-lease-ms) in plain "
            "digits, not \"0\"");
  EXPECT_EQ(Error({"o", "PX", "86400001"}),
            "ERR PX must be an integer from 1 to 86400000 (turnstile.max-lease-ms) in plain "
            "digits, not \"86400001\"");
  EXPECT_EQ(Error({"o", "EX", "86401"}),
            "ERR EX must be an integer from 1 to 86400 (turnstile.max-lease-ms) in plain "
            "digits, not \"86401\"");
  EXPECT_TRUE(Error({"o", "PX", "9223372036854775807"}).starts_with("ERR PX must be"));
  for (const std::string& number : kTooHuge) {
    for (const Limits& limits : {kDay, kNoLimit}) {
      EXPECT_TRUE(Error({"o", "PX", number}, limits).starts_with("ERR PX must be"));
      EXPECT_TRUE(Error({"o", "EX", number}, limits).starts_with("ERR EX must be"));
    }
  }
}

TEST_P(LeaseRequest, AcceptsLeaseUpToMaximum) {
  struct Case {
    int64_t max_lease;
    int64_t most_seconds;
  };
  for (const auto& [max_lease, most_seconds] :
       {Case{1000, 1}, Case{1001, 1}, Case{1500, 1}, Case{1999, 1}, Case{2000, 2}, Case{2001, 2},
        Case{86399999, 86399}, Case{86400000, 86400}, Case{86400001, 86400}}) {
    SCOPED_TRACE(max_lease);
    const Limits limits{.max_lease = Millis{max_lease}};
    const auto number = [](int64_t value) { return std::to_string(value); };
    EXPECT_EQ(Read({"o", "PX", number(max_lease)}, limits).lease, Millis{max_lease});
    EXPECT_EQ(Error({"o", "PX", number(max_lease + 1)}, limits),
              "ERR PX must be an integer from 1 to " + number(max_lease) +
                  " (turnstile.max-lease-ms) in plain digits, not \"" + number(max_lease + 1) +
                  "\"");
    EXPECT_EQ(Read({"o", "EX", number(most_seconds)}, limits).lease, Millis{most_seconds * 1000});
    EXPECT_EQ(Error({"o", "EX", number(most_seconds + 1)}, limits),
              "ERR EX must be an integer from 1 to " + number(most_seconds) +
                  " (turnstile.max-lease-ms) in plain digits, not \"" + number(most_seconds + 1) +
                  "\"");
  }
  // Below one second EX cannot express any lease.
  for (const int64_t max_lease : {1, 2, 999}) {
    const Limits limits{.max_lease = Millis{max_lease}};
    EXPECT_EQ(Read({"o", "PX", std::to_string(max_lease)}, limits).lease, Millis{max_lease});
    EXPECT_TRUE(Error({"o", "PX", std::to_string(max_lease + 1)}, limits).starts_with("ERR PX"));
    EXPECT_TRUE(Error({"o", "EX", "1"}, limits).starts_with("ERR EX"));
  }
}

TEST_P(LeaseRequest, SecondsDoNotOverflow) {
  EXPECT_EQ(Read({"o", "PX", "9223372036854775807"}, kNoLimit).lease, Millis::max());
  EXPECT_EQ(Read({"o", "EX", "9223372036854775"}, kNoLimit).lease, Millis{9223372036854775000});
  for (const std::string_view seconds :
       {"9223372036854776", "18446744073709552", "9223372036854775807"}) {
    EXPECT_TRUE(Error({"o", "EX", seconds}, kNoLimit).starts_with("ERR EX must be")) << seconds;
  }
}

TEST_P(LeaseRequest, RefusesDuplicateLease) {
  for (const Words& words : std::vector<Words>{
           {"o", "PX", "1", "PX", "1"},
           {"o", "PX", "1", "px", "2"},
           {"o", "EX", "1", "EX", "1"},
           {"o", "PX", "1000", "EX", "1"},
           {"o", "EX", "1", "PX", "1000"},
           {"o", "EX", "1", "PX"},
           {"o", "PX", "1", "EX", "nonsense"},
           {"o", "PX", "1", "PX", "1", "WAIT", "5"},
       }) {
    EXPECT_EQ(Error(words), "ERR syntax error: the lease is given twice: give PX or EX once")
        << testing::PrintToString(words);
  }
}

// Those of SET, and words that only look like an option.
TEST_P(LeaseRequest, RefusesUnknownOptions) {
  const std::string all =
      is_acquire() ? std::string(kAnyOption) : "PX ms, EX s or ALSO numkeys key [key ...]";
  const std::string all_but_lease =
      is_acquire() ? all.substr("PX ms, EX s, "sv.size()) : all.substr("PX ms, EX s or "sv.size());
  for (const std::string_view option :
       {"WAITS"sv,    "WAI"sv,      "FLOORS"sv,   "NX"sv,       "XX"sv,       "PXAT"sv,
        "EXAT"sv,     "KEEPTTL"sv,  "GET"sv,      "TTL"sv,      "P"sv,        "X"sv,
        "PXX"sv,      "PX "sv,      " PX"sv,      "PX\0"sv,     "\0PX"sv,     "P X"sv,
        "PX=5"sv,     "-PX"sv,      "\xf0\x50"sv, "\xff"sv,     "o"sv,        "\x10X"sv,
        "\x30X"sv,    "owner"sv,    ""sv,         "P\0"sv,      "\0\0"sv,     "P\xd8"sv,
        "\xd0X"sv,    "PEXPIRE"sv,  "EXP"sv,      "SHARE"sv,    "SHARED\0"sv, "SHAREDX"sv,
        "LIMITS"sv,   "LIMIT=3"sv,  "MAXLINES"sv, "MAXLIN"sv,   "WEIGHTS"sv,  "WEIGH"sv,
        "MAXHOLDS"sv, "MAX"sv,      "TAGS"sv,     "TA"sv,       "TAG\0"sv,    "NOTIF"sv,
        "NOTIFYX"sv,  "PUBLISH"sv,  "REENTRAN"sv, "SESSIONS"sv, "LINGERS"sv,  "ALS"sv,
        "ALSO "sv,    "EXCLUSIVE"sv}) {
    const std::string state = "ERR syntax error at " + Quoted(option) + ": expected ";
    for (const Words& words :
         std::vector<Words>{{"o", option}, {"o", option, "100"}, {"o", option, "100", "PX", "5"}}) {
      EXPECT_EQ(Error(words), state + all);
    }
    for (const Words& words : std::vector<Words>{{"o", "PX", "5", option},
                                                 {"o", "PX", "5", option, "100"},
                                                 {"o", "EX", "5", option, "100", "PX", "5"}}) {
      EXPECT_EQ(Error(words), state + all_but_lease);
    }
  }
  if (is_acquire()) return;
  for (const std::string_view option :
       {"WAIT"sv, "MAXLINE"sv, "SHARED"sv, "LIMIT"sv, "WEIGHT"sv, "REENTRANT"sv, "SESSION"sv,
        "LINGER"sv, "MAXHOLD"sv, "TAG"sv, "NOTIFY"sv}) {
    EXPECT_EQ(Error({"o", option, "1"}),
              "ERR syntax error at " + Quoted(option) + ": expected " + all);
  }
}

TEST_P(LeaseRequest, ReportsFirstError) {
  EXPECT_TRUE(Error({"o", "PX", "x", "EX", "y"}).starts_with("ERR PX must be"));
  EXPECT_TRUE(Error({"o", "EX", "y", "PX", "x"}).starts_with("ERR EX must be"));
  EXPECT_TRUE(Error({"o", "PX", "0", "NIX"}).starts_with("ERR PX must be"));
  EXPECT_TRUE(Error({"o", "NIX", "PX", "0"}).starts_with("ERR syntax error at \"NIX\""));
}

// --- The key ----------------------------------------------------------------------------------

// The key is recognised by its position, whatever it looks like; the parsers skip it.
TEST(AnyRequest, AcceptsAnyKey) {
  const std::string huge(size_t{1} << 20, 'k');
  for (const std::string_view key :
       {""sv, "k"sv, "PX"sv, "ALSO"sv, "5"sv, "\0"sv, "a\0b\r\n\xff"sv, std::string_view(huge)}) {
    const auto acquire = ParseAcquire(Words{key, "o", "PX", "5"}, kDay);
    ASSERT_EQ(ErrorOf(acquire), "(accepted)");
    EXPECT_EQ(std::get<AcquireRequest>(acquire).owner, Owner{"o"});
    const auto touch = ParseTouch(Words{key, "o", "PX", "5"}, kDay);
    ASSERT_EQ(ErrorOf(touch), "(accepted)");
    EXPECT_EQ(std::get<TouchRequest>(touch).owner, Owner{"o"});
    const auto release = ParseRelease(Words{key, "o"});
    ASSERT_EQ(ErrorOf(release), "(accepted)");
    EXPECT_EQ(std::get<ReleaseRequest>(release).owner, Owner{"o"});
    EXPECT_EQ(ErrorOf(ParseFence(Words{key})), "(accepted)");
  }
  EXPECT_EQ(ErrorOf(ParseRelease({})), "ERR the key is missing: " + kReleaseUsage);
  EXPECT_EQ(ErrorOf(ParseFence({})),
            "ERR the key is missing: LOCK.FENCE key [token [THEN command [arg ...]]], for example "
            "LOCK.FENCE table:12");
}

// --- LOCK.ACQUIRE only ------------------------------------------------------------------------

Parsed<AcquireRequest> Acquire(const Words& words, const Limits& limits = kDay) {
  return ParseAcquire(WithKey(words), limits);
}

// An acquire with a lease and these options.
Words Plus(const Words& options) {
  Words words = {"o", "PX", "5"};
  words.insert(words.end(), options.begin(), options.end());
  return words;
}

void ExpectReads(const Words& words, const AcquireRequest& expected) {
  SCOPED_TRACE(testing::PrintToString(words));
  const Words command = WithKey(words);  // owns the keys of the request
  const auto parsed = ParseAcquire(command, kDay);
  ASSERT_EQ(ErrorOf(parsed), "(accepted)");
  const auto& request = std::get<AcquireRequest>(parsed);
  EXPECT_EQ(request.owner, expected.owner);
  EXPECT_EQ(request.lease, expected.lease);
  EXPECT_EQ(request.wait, expected.wait);
  EXPECT_EQ(request.max_line, expected.max_line);
  EXPECT_EQ(request.mode, expected.mode);
  EXPECT_EQ(request.limit, expected.limit);
  EXPECT_EQ(request.weight, expected.weight);
  EXPECT_EQ(request.reentrant, expected.reentrant);
  EXPECT_EQ(request.session, expected.session);
  EXPECT_EQ(request.linger, expected.linger);
  EXPECT_EQ(request.max_hold, expected.max_hold);
  EXPECT_EQ(request.tag, expected.tag);
  EXPECT_EQ(request.notify, expected.notify);
  EXPECT_EQ(request.floor, expected.floor);
  EXPECT_EQ(Words(request.also.begin(), request.also.end()),
            Words(expected.also.begin(), expected.also.end()));
}

// For its numbers only: the other keys would refer to words that have been freed.
AcquireRequest Accepted(const Words& words) {
  const auto parsed = Acquire(words);
  EXPECT_EQ(ErrorOf(parsed), "(accepted)") << testing::PrintToString(words);
  const auto* request = std::get_if<AcquireRequest>(&parsed);
  AcquireRequest copy = request == nullptr ? AcquireRequest{} : *request;
  copy.also = {};
  return copy;
}

// Whatever is refused leaves no request behind, not even a part of one.
std::string Refused(const Words& words) { return ErrorOf(Acquire(words)); }

TEST(AcquireRequest, DefaultsToExclusiveWithoutWaiting) {
  ExpectReads({"o", "PX", "5"}, {.owner = Owner{"o"},
                                 .lease = Millis{5},
                                 .wait = Millis{0},
                                 .max_line = 0,
                                 .mode = Mode::kExclusive,
                                 .limit = 1,
                                 .weight = 1,
                                 .reentrant = false,
                                 .session = false,
                                 .linger = Millis{0},
                                 .max_hold = Millis{0},
                                 .tag = "",
                                 .notify = std::nullopt,
                                 .floor = std::nullopt,
                                 .also = {}});
}

TEST(AcquireRequest, OptionsAreCaseInsensitive) {
  const AcquireRequest bare{.owner = Owner{"o"}, .lease = Millis{5}};
  AcquireRequest expected = bare;
  expected.wait = Millis{70};
  for (const char* word : {"WAIT", "wait", "wAiT"}) ExpectReads(Plus({word, "70"}), expected);
  expected = bare;
  expected.mode = Mode::kShared;
  for (const char* word : {"SHARED", "shared", "sHaReD"}) ExpectReads(Plus({word}), expected);
  expected = bare;
  expected.mode = Mode::kLimit;
  expected.limit = 3;
  for (const char* word : {"LIMIT", "limit", "LiMiT"}) ExpectReads(Plus({word, "3"}), expected);
  expected = bare;
  expected.reentrant = true;
  for (const char* word : {"REENTRANT", "reentrant"}) ExpectReads(Plus({word}), expected);
  expected = bare;
  expected.session = true;
  for (const char* word : {"SESSION", "session"}) ExpectReads(Plus({word}), expected);
  expected = bare;
  expected.linger = Millis{60};
  for (const char* word : {"LINGER", "linger"}) ExpectReads(Plus({word, "60"}), expected);
  expected = bare;
  expected.max_line = 4;
  for (const char* word : {"MAXLINE", "maxline", "MaxLine"}) {
    ExpectReads(Plus({"WAIT", "0", word, "4"}), expected);
  }
  expected = bare;
  expected.mode = Mode::kLimit;
  expected.limit = 3;
  expected.weight = 2;
  for (const char* word : {"WEIGHT", "weight", "wEiGhT"}) {
    ExpectReads(Plus({"LIMIT", "3", word, "2"}), expected);
  }
  expected = bare;
  expected.max_hold = Millis{60};
  for (const char* word : {"MAXHOLD", "maxhold", "mAXhOLD"}) {
    ExpectReads(Plus({word, "60"}), expected);
  }
  expected = bare;
  expected.tag = "a Tag";
  for (const char* word : {"TAG", "tag", "tAg"}) ExpectReads(Plus({word, "a Tag"}), expected);
  expected = bare;
  expected.notify = {.channel = "a Channel", .id = "anId"};
  for (const char* word : {"NOTIFY", "notify", "nOtIfY"}) {
    ExpectReads(Plus({word, "a Channel", "anId"}), expected);
  }
  expected = bare;
  const Words keys = {"a", "b"};
  expected.also = keys;
  for (const char* word : {"ALSO", "also"}) ExpectReads(Plus({word, "2", "a", "b"}), expected);
}

// All options, in six groups, in all 720 orders of those; once shared and reentrant, once with a
// limit.
TEST(AcquireRequest, AcceptsOptionsInAnyOrder) {
  const Words keys = {"PX", "LIMIT", ""};  // keys, although they look like options
  for (const bool shared : {true, false}) {
    const AcquireRequest expected{.owner = Owner{"WAIT"},
                                  .lease = Millis{5000},
                                  .wait = Millis{70},
                                  .max_line = 4,
                                  .mode = shared ? Mode::kShared : Mode::kLimit,
                                  .limit = shared ? 1U : 9U,
                                  .weight = shared ? 1U : 9U,
                                  .reentrant = shared,
                                  .session = true,
                                  .linger = Millis{60},
                                  .max_hold = Millis{5000},
                                  .tag = "NOTIFY",
                                  .notify = NotifyTarget{"TAG", "PX"},
                                  .floor = Token{8},
                                  .also = keys};
    // Each word that looks like an option is one only where no other option takes it.
    std::vector<Words> options = {
        {"EX", "5", "TAG", "NOTIFY"},
        {"WAIT", "70", "NOTIFY", "TAG", "PX"},
        shared ? Words{"SHARED", "REENTRANT"} : Words{"WEIGHT", "9", "LIMIT", "9"},
        {"MAXHOLD", "5000", "SESSION"},
        {"MAXLINE", "4", "LINGER", "60", "FLOOR", "8"},
        {"ALSO", "3", "PX", "LIMIT", ""}};
    std::sort(options.begin(), options.end());
    int orders = 0;
    do {
      Words words = {"WAIT"};
      for (const Words& option : options) words.insert(words.end(), option.begin(), option.end());
      ExpectReads(words, expected);
      ++orders;
    } while (std::next_permutation(options.begin(), options.end()) && !testing::Test::HasFailure());
    EXPECT_EQ(orders, 720);
  }
}

TEST(AcquireRequest, AcceptsBoundaryNumbers) {
  EXPECT_EQ(Accepted(Plus({"WAIT", "0"})).wait, Millis{0});
  EXPECT_EQ(Accepted(Plus({"WAIT", "315360000000"})).wait, kMaxWait);
  EXPECT_EQ(Accepted(Plus({"LIMIT", "1"})).limit, 1);
  EXPECT_EQ(Accepted(Plus({"LIMIT", "1"})).mode, Mode::kLimit);
  EXPECT_EQ(Accepted(Plus({"LIMIT", "100000"})).limit, kMaxLimit);
  EXPECT_EQ(Accepted(Plus({"LINGER", "0"})).linger, Millis{0});
  EXPECT_EQ(Accepted(Plus({"LINGER", "86400000"})).linger, kDay.max_lease);
  EXPECT_EQ(Accepted(Plus({"WAIT", "1", "MAXLINE", "1"})).max_line, 1);
  EXPECT_EQ(Accepted(Plus({"WAIT", "0", "MAXLINE", "10000000"})).max_line, kMaxLine);
  EXPECT_EQ(Accepted(Plus({"LIMIT", "1", "WEIGHT", "1"})).weight, 1);
  EXPECT_EQ(Accepted(Plus({"LIMIT", "100000", "WEIGHT", "100000"})).weight, kMaxLimit);
  EXPECT_EQ(Accepted({"o", "PX", "1", "MAXHOLD", "1"}).max_hold, Millis{1});
  EXPECT_EQ(Accepted(Plus({"MAXHOLD", "31536000000"})).max_hold, kMaxHold);
}

// The error about a number; the given value follows in quotes.
std::string MustBe(std::string_view option, const std::string& range) {
  return "ERR " + std::string(option) + " must be an integer from " + range +
         " in plain digits, not ";
}

std::string NumberMissing(std::string_view option) {
  return "ERR syntax error: the number after " + std::string(option) + " is missing";
}

TEST(AcquireRequest, RefusesNumbersOutOfRange) {
  const std::vector<std::pair<std::string, std::string>> ranges = {
      {"WAIT", "0 to 315360000000"},   {"MAXLINE", "1 to 10000000"},
      {"LIMIT", "1 to 100000"},        {"WEIGHT", "1 to 100000"},
      {"MAXHOLD", "1 to 31536000000"}, {"LINGER", "0 to 86400000 (turnstile.max-lease-ms)"}};
  for (const auto& [option, range] : ranges) {
    const std::string must = MustBe(option, range);
    for (const std::string& number : kNotPlainDigits) {
      EXPECT_EQ(Refused(Plus({option, number})), must + Quoted(number));
    }
    for (const std::string& number : kTooHuge) {
      EXPECT_EQ(Refused(Plus({option, number})), must + Quoted(number));
    }
    EXPECT_EQ(Refused(Plus({option, "9223372036854775807"})), must + "\"9223372036854775807\"");
    EXPECT_EQ(Refused(Plus({option})), NumberMissing(option));
    EXPECT_EQ(Refused(Plus({option, "SESSION"})), must + "\"SESSION\"");
  }
  EXPECT_EQ(Refused(Plus({"WAIT", "315360000001"})),
            "ERR WAIT must be an integer from 0 to 315360000000 in plain digits, not "
            "\"315360000001\"");
  for (const std::string_view limit : {"0", "100001", "1000000000", "4294967296", "4294967297"}) {
    EXPECT_EQ(
        Refused(Plus({"LIMIT", limit})),
        "ERR LIMIT must be an integer from 1 to 100000 in plain digits, not " + Quoted(limit));
  }
  EXPECT_EQ(Refused(Plus({"LINGER", "86400001"})),
            "ERR LINGER must be an integer from 0 to 86400000 (turnstile.max-lease-ms) in "
            "plain digits, not "
            "\"86400001\"");
}

// Also where the words that they go with are there.
TEST(AcquireRequest, RefusesNewNumbersOutOfRange) {
  struct Case {
    Words before;
    std::string_view option;
    std::string range;
    Words numbers;
  };
  const std::vector<Case> cases = {
      {{"WAIT", "5"}, "MAXLINE", "1 to 10000000", {"0", "10000001", "4294967296", "4294967297"}},
      {{"LIMIT", "9"}, "WEIGHT", "1 to 100000", {"0", "100001", "4294967296", "4294967297"}},
      {{}, "MAXHOLD", "1 to 31536000000", {"0", "31536000001", "315360000000"}},
  };
  for (const Case& each : cases) {
    for (const std::string_view number : each.numbers) {
      Words after = each.before;
      after.insert(after.end(), {each.option, number});
      EXPECT_EQ(Refused(Plus(after)), MustBe(each.option, each.range) + Quoted(number));
      Words first = {each.option, number};
      first.insert(first.end(), each.before.begin(), each.before.end());
      EXPECT_EQ(Refused(Plus(first)), MustBe(each.option, each.range) + Quoted(number));
    }
  }
}

// --- Options that need another one, or do not go with it

TEST(AcquireRequest, WeightIsFrom1ToLimit) {
  const std::string needs = "ERR syntax error: WEIGHT requires LIMIT";
  EXPECT_EQ(Refused(Plus({"WEIGHT", "1"})), needs);
  EXPECT_EQ(Refused(Plus({"WEIGHT", "2", "WAIT", "5"})), needs);
  EXPECT_EQ(Refused(Plus({"SHARED", "WEIGHT", "1"})), needs);
  EXPECT_EQ(Refused(Plus({"WEIGHT", "1", "SHARED"})), needs);
  const auto above = [](int limit, int weight) {
    return "ERR WEIGHT must be at most LIMIT, which is " + std::to_string(limit) + ", not " +
           std::to_string(weight);
  };
  EXPECT_EQ(Refused(Plus({"LIMIT", "1", "WEIGHT", "2"})), above(1, 2));
  EXPECT_EQ(Refused(Plus({"WEIGHT", "10", "LIMIT", "9"})), above(9, 10));
  EXPECT_EQ(Refused(Plus({"LIMIT", "99999", "WEIGHT", "100000"})), above(99999, 100000));
  for (const uint32_t weight : {1U, 2U, 8U, 9U}) {
    for (const bool limit_first : {true, false}) {
      const std::string number = std::to_string(weight);
      const AcquireRequest request = Accepted(limit_first ? Plus({"LIMIT", "9", "WEIGHT", number})
                                                          : Plus({"WEIGHT", number, "LIMIT", "9"}));
      EXPECT_EQ(request.weight, weight);
      EXPECT_EQ(request.limit, 9);
    }
  }
}

TEST(AcquireRequest, MaxLineNeedsWaitOfAnyLength) {
  const std::string needs = "ERR syntax error: MAXLINE requires WAIT";
  EXPECT_EQ(Refused(Plus({"MAXLINE", "1"})), needs);
  EXPECT_EQ(Refused(Plus({"MAXLINE", "1", "NOTIFY", "c", "i"})), needs);
  EXPECT_EQ(Refused({"o", "MAXLINE", "7", "EX", "5", "SHARED"}), needs);
  EXPECT_EQ(Accepted(Plus({"MAXLINE", "1", "WAIT", "0"})).max_line, 1);
  EXPECT_EQ(Accepted(Plus({"WAIT", "0", "MAXLINE", "1"})).max_line, 1);
}

TEST(AcquireRequest, MaxHoldIsAtLeastTheLease) {
  const auto below = [](int64_t lease, int64_t max_hold) {
    return "ERR MAXHOLD must be at least the lease of " + std::to_string(lease) + " ms, not " +
           std::to_string(max_hold);
  };
  EXPECT_EQ(Refused({"o", "PX", "5", "MAXHOLD", "4"}), below(5, 4));
  EXPECT_EQ(Refused({"o", "MAXHOLD", "4", "PX", "5"}), below(5, 4));
  EXPECT_EQ(Refused({"o", "EX", "5", "MAXHOLD", "4999"}), below(5000, 4999));
  EXPECT_EQ(Refused({"o", "PX", "86400000", "MAXHOLD", "1"}), below(86'400'000, 1));
  EXPECT_EQ(Accepted({"o", "PX", "5", "MAXHOLD", "5"}).max_hold, Millis{5});
  EXPECT_EQ(Accepted({"o", "EX", "5", "MAXHOLD", "5000"}).max_hold, Millis{5000});
  EXPECT_EQ(Accepted({"o", "MAXHOLD", "5000", "EX", "5"}).max_hold, Millis{5000});
  // The linger follows the cap and does not count.
  EXPECT_EQ(Accepted({"o", "PX", "5", "LINGER", "70", "MAXHOLD", "5"}).max_hold, Millis{5});
  // It is not limited by the setting that limits leases.
  const Words words = {"k", "o", "PX", "10", "MAXHOLD", "31536000000"};
  EXPECT_EQ(ErrorOf(ParseAcquire(words, Limits{.max_lease = Millis{10}})), "(accepted)");
}

// --- TAG and NOTIFY, whose arguments are texts

TEST(AcquireRequest, TagIs1To64PrintableCharacters) {
  std::string printable;
  for (char c = ' '; c <= '~'; ++c) printable += c;
  for (const std::string& tag : {"a"s, " "s, "~"s, std::string(63, 'x'), std::string(64, 'x'),
                                 printable.substr(0, 64), printable.substr(printable.size() - 64),
                                 "PX"s, "TAG"s, "5"s, "ALS"s, "ALSOS"s, "ALSO "s, " ALSO"s}) {
    EXPECT_EQ(Accepted(Plus({"TAG", tag})).tag, tag);
  }
  const auto error = [](std::string_view tag) {
    return "ERR TAG must be 1 to 64 printable ASCII characters, not " + Quoted(tag);
  };
  for (const std::string& tag :
       {""s, std::string(65, 'x'), std::string(size_t{10} << 20, 'x'), "a\nb"s, "\r\n"s, "\t"s,
        "\0"s, "a\0"s, "\x1f"s, "\x7f"s, "\x80"s, "\xff"s, "\xc3\xa4"s}) {
    EXPECT_EQ(Refused(Plus({"TAG", tag})), error(tag));
    EXPECT_EQ(Refused({"o", "TAG", tag, "PX", "5"}), error(tag));
  }
  EXPECT_EQ(Refused(Plus({"TAG"})), "ERR syntax error: the text after TAG is missing");
}

TEST(AcquireRequest, ChannelIs1To256BytesOfAnyKind) {
  const std::string longest(256, 'c');
  for (const std::string& channel : {"c"s, " "s, "\0"s, "a\r\nb"s, "\xff"s, "NOTIFY"s, "PX"s,
                                     "ALS"s, "ALSO "s, "ALSO\0"s, longest}) {
    EXPECT_EQ(Accepted(Plus({"NOTIFY", channel, "i"})).notify, (NotifyTarget{channel, "i"}));
  }
  const auto error = [](size_t size) {
    return "ERR the channel after NOTIFY must be 1 to 256 bytes, not " + std::to_string(size);
  };
  EXPECT_EQ(Refused(Plus({"NOTIFY", "", "i"})), error(0));
  EXPECT_EQ(Refused(Plus({"NOTIFY", longest + "c", "i"})), error(257));
  EXPECT_EQ(Refused(Plus({"NOTIFY", std::string(size_t{10} << 20, 'c'), "i"})), error(10485760));
  // Of two errors the first.
  EXPECT_EQ(Refused(Plus({"NOTIFY", "", ""})), error(0));
  EXPECT_EQ(Refused(Plus({"NOTIFY"})), "ERR syntax error: the channel after NOTIFY is missing");
}

TEST(AcquireRequest, NotifyIdIs1To64PrintableCharactersWithoutSpace) {
  std::string printable;
  for (char c = '!'; c <= '~'; ++c) printable += c;
  for (const std::string& id :
       {"i"s, "!"s, "~"s, "7"s, "PX"s, "NOTIFY"s, "ALSOS"s, std::string(64, 'i'),
        printable.substr(0, 64), printable.substr(printable.size() - 64)}) {
    EXPECT_EQ(Accepted(Plus({"NOTIFY", "c", id})).notify, (NotifyTarget{"c", id}));
  }
  const auto error = [](std::string_view id) {
    return "ERR the id after NOTIFY channel must be 1 to 64 printable ASCII characters without a "
           "space, not " +
           Quoted(id);
  };
  for (const std::string& id :
       {""s, " "s, "a b"s, " a"s, "a "s, "a\nb"s, "\n"s, "\0"s, "\x1f"s, "\x7f"s, "\x80"s,
        "\xc3\xa4"s, std::string(65, 'i'), std::string(size_t{10} << 20, 'i')}) {
    EXPECT_EQ(Refused(Plus({"NOTIFY", "c", id})), error(id));
  }
  for (const Words& words : {Words{"o", "PX", "5", "NOTIFY", "c"}, {"o", "NOTIFY", "PX"}}) {
    EXPECT_EQ(Refused(words), "ERR syntax error: the id after NOTIFY channel is missing");
  }
}

// The server looks for keys behind the first ALSO that it finds. If that were a text, it would
// check the rights for other keys than those that are locked.
TEST(AcquireRequest, NoTextIsTheWordAlso) {
  const auto error = [](std::string_view what) {
    return "ERR the " + std::string(what) + " must not be the word ALSO, which introduces keys";
  };
  for (const std::string_view word : {"ALSO", "also", "Also", "aLsO"}) {
    EXPECT_EQ(Refused(Plus({"TAG", word})), error("text after TAG"));
    EXPECT_EQ(Refused(Plus({"NOTIFY", word, "i"})), error("channel after NOTIFY"));
    EXPECT_EQ(Refused(Plus({"NOTIFY", "c", word})), error("id after NOTIFY channel"));
    EXPECT_EQ(Refused(Plus({"NOTIFY", word, word})), error("channel after NOTIFY"));
    // What looks like the keys of it does not help.
    EXPECT_EQ(Refused(Plus({"TAG", word, "1", "k"})), error("text after TAG"));
    EXPECT_EQ(Refused(Plus({"NOTIFY", "c", word, "1", "k"})), error("id after NOTIFY channel"));
  }
}

// At most the maximum lease, whatever that is set to.
TEST(AcquireRequest, LingerIsAtMostMaximumLease) {
  for (const int64_t most : {int64_t{1}, int64_t{999}, int64_t{60'000}, int64_t{315'360'000'000}}) {
    const Limits limits{.max_lease = Millis{most}};
    const std::string last = std::to_string(most);
    const std::string beyond = std::to_string(most + 1);
    const auto parsed = Acquire({"o", "PX", "1", "LINGER", last}, limits);
    ASSERT_EQ(ErrorOf(parsed), "(accepted)");
    EXPECT_EQ(std::get<AcquireRequest>(parsed).linger, Millis{most});
    EXPECT_EQ(ErrorOf(Acquire({"o", "PX", "1", "LINGER", beyond}, limits)),
              MustBe("LINGER", "0 to " + last + " (turnstile.max-lease-ms)") + Quoted(beyond));
  }
}

TEST(AcquireRequest, RefusesDuplicateOptions) {
  const std::vector<std::pair<Words, std::string>> cases = {
      {{"WAIT", "1", "WAIT", "1"}, "WAIT is given twice"},
      {{"WAIT", "0", "wait", "0"}, "WAIT is given twice"},
      {{"WAIT", "1", "WAIT"}, "WAIT is given twice"},
      {{"WAIT", "1", "SHARED", "WAIT", "x"}, "WAIT is given twice"},
      {{"REENTRANT", "REENTRANT"}, "REENTRANT is given twice"},
      {{"REENTRANT", "SESSION", "reentrant"}, "REENTRANT is given twice"},
      {{"SESSION", "SESSION"}, "SESSION is given twice"},
      {{"session", "LINGER", "5", "SESSION"}, "SESSION is given twice"},
      {{"LINGER", "5", "LINGER", "5"}, "LINGER is given twice"},
      {{"LINGER", "0", "LINGER", "0"}, "LINGER is given twice"},
      {{"ALSO", "1", "a", "ALSO", "1", "b"}, "ALSO is given twice"},
      {{"ALSO", "1", "a", "ALSO"}, "ALSO is given twice"},
      {{"SHARED", "SHARED"}, "the mode is given twice: give SHARED or LIMIT once"},
      {{"LIMIT", "3", "LIMIT", "3"}, "the mode is given twice: give SHARED or LIMIT once"},
      {{"SHARED", "LIMIT", "3"}, "the mode is given twice: give SHARED or LIMIT once"},
      {{"LIMIT", "3", "SHARED"}, "the mode is given twice: give SHARED or LIMIT once"},
      {{"LIMIT", "3", "SESSION", "limit"}, "the mode is given twice: give SHARED or LIMIT once"},
      {{"LIMIT", "3", "LIMIT", "0"}, "the mode is given twice: give SHARED or LIMIT once"},
      {{"WAIT", "5", "MAXLINE", "1", "MAXLINE", "1"}, "MAXLINE is given twice"},
      {{"MAXLINE", "1", "maxline", "2"}, "MAXLINE is given twice"},
      {{"MAXLINE", "1", "MAXLINE"}, "MAXLINE is given twice"},
      {{"LIMIT", "3", "WEIGHT", "1", "WEIGHT", "1"}, "WEIGHT is given twice"},
      {{"WEIGHT", "1", "weight", "x"}, "WEIGHT is given twice"},
      {{"MAXHOLD", "5", "MAXHOLD", "5"}, "MAXHOLD is given twice"},
      {{"MAXHOLD", "1", "SESSION", "MAXHOLD", "9"}, "MAXHOLD is given twice"},
      {{"TAG", "a", "TAG", "a"}, "TAG is given twice"},
      {{"TAG", "a", "tag"}, "TAG is given twice"},
      {{"TAG", "TAG", "TAG", "ALSO"}, "TAG is given twice"},
      {{"NOTIFY", "c", "i", "NOTIFY", "c", "i"}, "NOTIFY is given twice"},
      {{"NOTIFY", "c", "i", "notify"}, "NOTIFY is given twice"},
      {{"NOTIFY", "NOTIFY", "i", "NOTIFY", "", ""}, "NOTIFY is given twice"},
      {{"PX", "5"}, "the lease is given twice: give PX or EX once"},
      {{"SHARED", "EX", "5"}, "the lease is given twice: give PX or EX once"},
  };
  for (const auto& [options, error] : cases) {
    EXPECT_EQ(Refused(Plus(options)), "ERR syntax error: " + error)
        << testing::PrintToString(options);
  }
}

TEST(AcquireRequest, RefusesReentrantWithLimit) {
  const std::string error = "ERR syntax error: REENTRANT cannot be combined with LIMIT";
  EXPECT_EQ(Refused(Plus({"REENTRANT", "LIMIT", "3"})), error);
  EXPECT_EQ(Refused(Plus({"LIMIT", "1", "SESSION", "REENTRANT"})), error);
  EXPECT_EQ(Refused({"o", "LIMIT", "1", "REENTRANT", "EX", "5"}), error);
  EXPECT_TRUE(Accepted(Plus({"REENTRANT", "SHARED"})).reentrant);
  // A missing argument is reported first.
  EXPECT_EQ(Refused({"o", "LIMIT", "1", "REENTRANT"}),
            "ERR the lease is missing: " + kAcquireUsage);
}

TEST(AcquireRequest, SyntaxErrorListsRemainingOptions) {
  const std::vector<std::pair<Words, std::string>> cases = {
      {{"SHARED"},
       "WAIT ms, MAXLINE n, WEIGHT w, REENTRANT, SESSION, LINGER ms, MAXHOLD ms, TAG text, NOTIFY "
       "channel id, FLOOR token or ALSO numkeys key [key ...]"},
      {{"LIMIT", "2", "WAIT", "1"},
       "MAXLINE n, WEIGHT w, REENTRANT, SESSION, LINGER ms, MAXHOLD ms, TAG text, NOTIFY channel "
       "id, FLOOR token or ALSO numkeys key [key ...]"},
      {{"WEIGHT", "1", "MAXLINE", "1", "REENTRANT", "LINGER", "0", "MAXHOLD", "9"},
       "WAIT ms, SHARED, LIMIT n, SESSION, TAG text, NOTIFY channel id, FLOOR token or ALSO "
       "numkeys key [key ...]"},
      {{"SHARED", "WAIT", "1", "REENTRANT", "SESSION", "FLOOR", "5", "MAXLINE", "1", "WEIGHT", "1",
        "MAXHOLD", "9", "TAG", "t"},
       "LINGER ms, NOTIFY channel id or ALSO numkeys key [key ...]"},
      {{"SHARED", "WAIT", "1", "REENTRANT", "SESSION", "LINGER", "0", "NOTIFY", "c", "i", "MAXLINE",
        "1", "WEIGHT", "1"},
       "MAXHOLD ms, TAG text, FLOOR token or ALSO numkeys key [key ...]"},
      {{"SHARED", "WAIT",    "0", "REENTRANT", "SESSION", "LINGER",  "0", "FLOOR",
        "5",      "MAXLINE", "1", "WEIGHT",    "1",       "MAXHOLD", "9", "TAG",
        "t",      "NOTIFY",  "c", "i",         "ALSO",    "1",       "a"},
       "nothing more"},
  };
  for (const auto& [options, expected] : cases) {
    Words words = Plus(options);
    words.emplace_back("NIX");
    EXPECT_EQ(Refused(words), "ERR syntax error at \"NIX\": expected " + expected);
  }
  EXPECT_EQ(Refused({"o", "NIX"}),
            "ERR syntax error at \"NIX\": expected " + std::string(kAnyOption));
}

TEST(AcquireRequest, RefusesMissingLeaseDespiteOtherOptions) {
  EXPECT_EQ(Refused({"o", "SHARED", "WAIT", "1", "SESSION", "LINGER", "5", "ALSO", "1", "a"}),
            "ERR the lease is missing: " + kAcquireUsage);
  // Before what is wrong between options.
  EXPECT_EQ(
      Refused({"o", "WEIGHT", "2", "MAXLINE", "1", "MAXHOLD", "1", "TAG", "t", "NOTIFY", "c", "i"}),
      "ERR the lease is missing: " + kAcquireUsage);
}

// --- ALSO, an option of three commands --------------------------------------------------------

struct AlsoReading {
  Words also;
  std::string error = "(accepted)";
};

template <typename Request>
AlsoReading ReadAlso(const Parsed<Request>& parsed) {
  if (const auto* error = std::get_if<ParseError>(&parsed)) return {.error = error->text};
  const Keys also = std::get<Request>(parsed).also;
  return {.also = Words(also.begin(), also.end())};
}

struct AlsoCommand {
  const char* name;
  Words before;  // the words before the options
  AlsoReading (*read)(const Words&);
};

class AlsoOption : public testing::TestWithParam<AlsoCommand> {
 protected:
  // The command for the key "first" with `ALSO count keys...`.
  static AlsoReading Read(std::string_view count, const Words& keys, const Words& after = {}) {
    Words words = GetParam().before;
    words.insert(words.end(), {"ALSO", count});
    words.insert(words.end(), keys.begin(), keys.end());
    words.insert(words.end(), after.begin(), after.end());
    return GetParam().read(words);
  }
  static std::string Error(std::string_view count, const Words& keys, const Words& after = {}) {
    return Read(count, keys, after).error;
  }
  static std::vector<std::string> Names(size_t count) {
    std::vector<std::string> names;
    for (size_t i = 0; i < count; ++i) names.push_back("key " + std::to_string(i));
    return names;
  }
};

INSTANTIATE_TEST_SUITE_P(
    Commands, AlsoOption,
    testing::Values(
        AlsoCommand{"Acquire",
                    {"first", "o", "PX", "5"},
                    [](const Words& words) { return ReadAlso(ParseAcquire(words, kDay)); }},
        AlsoCommand{"Touch",
                    {"first", "o", "PX", "5"},
                    [](const Words& words) { return ReadAlso(ParseTouch(words, kDay)); }},
        AlsoCommand{"Release",
                    {"first", "o"},
                    [](const Words& words) { return ReadAlso(ParseRelease(words)); }}),
    [](const auto& param_info) { return std::string(param_info.param.name); });

TEST_P(AlsoOption, AcceptsAnnouncedNumberOfKeys) {
  EXPECT_EQ(Read("1", {"a"}).also, Words{"a"});
  EXPECT_EQ(Read("3", {"c", "a", "b"}).also, (Words{"c", "a", "b"}));
  // Keys are any bytes, including those that look like options.
  const Words odd = {"ALSO", "PX", "5", "", "\0"sv, "\0\0"sv, "o", "FIRST", "first\0"sv, "\xff"};
  EXPECT_EQ(Read("10", odd).also, odd);
  for (const size_t count : {size_t{63}, size_t{64}}) {
    const std::vector<std::string> names = Names(count);
    const Words keys(names.begin(), names.end());
    EXPECT_EQ(Read(std::to_string(count), keys).also, keys);
  }
}

TEST_P(AlsoOption, RefusesInvalidNumberOfKeys) {
  const std::string must = "ERR ALSO must be an integer from 1 to 64 in plain digits, not ";
  const std::vector<std::string> names = Names(70);
  const Words keys(names.begin(), names.end());
  for (const std::string_view count : {"0", "65", "10000", "4294967297", "9223372036854775807"}) {
    EXPECT_EQ(Error(count, keys), must + Quoted(count));
  }
  for (const std::string& count : kNotPlainDigits) {
    EXPECT_EQ(Error(count, keys), must + Quoted(count));
  }
  for (const std::string& count : kTooHuge) EXPECT_EQ(Error(count, keys), must + Quoted(count));
  Words bare = GetParam().before;
  bare.emplace_back("ALSO");
  EXPECT_EQ(GetParam().read(bare).error, "ERR syntax error: the number after ALSO is missing");
}

TEST_P(AlsoOption, RefusesTooFewKeys) {
  const auto error = [](int announced, int follow) {
    return "ERR syntax error: ALSO needs " + std::to_string(announced) + " keys, but only " +
           std::to_string(follow) + " arguments follow";
  };
  EXPECT_EQ(Error("1", {}), error(1, 0));
  EXPECT_EQ(Error("2", {"a"}), error(2, 1));
  EXPECT_EQ(Error("64", {"a", "b", "c"}), error(64, 3));
}

TEST_P(AlsoOption, RefusesTooManyKeys) {
  const std::string error = Error("1", {"a", "b"});
  EXPECT_TRUE(error.starts_with("ERR syntax error at \"b\": expected ")) << error;
  if (GetParam().name != "Acquire"sv) {
    EXPECT_TRUE(error.ends_with("expected nothing more")) << error;
  }
}

TEST_P(AlsoOption, RefusesDuplicateOption) {
  EXPECT_EQ(Error("1", {"a"}, {"ALSO", "1", "b"}), "ERR syntax error: ALSO is given twice");
  EXPECT_EQ(Error("1", {"a"}, {"also"}), "ERR syntax error: ALSO is given twice");
}

TEST_P(AlsoOption, RefusesDuplicateKeys) {
  const auto error = [](std::string_view key) {
    return "ERR the key " + Quoted(key) + " is given twice: name each lock once";
  };
  EXPECT_EQ(Error("1", {"first"}), error("first"));
  EXPECT_EQ(Error("2", {"a", "first"}), error("first"));
  EXPECT_EQ(Error("2", {"a", "a"}), error("a"));
  EXPECT_EQ(Error("3", {"a", "b", "a"}), error("a"));
  EXPECT_EQ(Error("2", {"", ""}), error(""));
  EXPECT_EQ(Error("2", {"\r\n"sv, "\r\n"sv}), error("\r\n"));
  const std::string huge(size_t{1} << 20, 'k');
  EXPECT_EQ(Error("2", {huge, huge}), error(huge));
  // The first and the last key of the longest list.
  std::vector<std::string> names = Names(64);
  names.back() = names.front();
  EXPECT_EQ(Error("64", Words(names.begin(), names.end())), error("key 0"));
  names.back() = "first";
  EXPECT_EQ(Error("64", Words(names.begin(), names.end())), error("first"));
}

// Keys that a careless comparison would consider equal.
TEST_P(AlsoOption, ComparesKeysByteByByte) {
  const Words keys = {"a"sv, "A"sv, "a\0"sv, "a "sv, "aa"sv, "First"sv, "first "sv, "firs"sv};
  EXPECT_EQ(Read("8", keys).also, keys);
}

TEST(AlsoOptionOfTouch, MayPrecedeOrFollowLease) {
  const auto parsed = ParseTouch(Words{"first", "o", "ALSO", "2", "a", "PX", "PX", "5"}, kDay);
  ASSERT_EQ(ErrorOf(parsed), "(accepted)");
  EXPECT_EQ(std::get<TouchRequest>(parsed).lease, Millis{5});
  EXPECT_EQ(std::get<TouchRequest>(parsed).also.size(), 2);
  EXPECT_EQ(ErrorOf(ParseTouch(Words{"first", "o", "ALSO", "1", "a"}, kDay)),
            "ERR the lease is missing: " + kTouchUsage);
  EXPECT_EQ(ErrorOf(ParseTouch(Words{"first", "o", "ALSO", "1", "a", "NIX"}, kDay)),
            "ERR syntax error at \"NIX\": expected PX ms or EX s");
}

// --- LOCK.RELEASE: key owner [ALSO numkeys key [key ...]] -------------------------------------

TEST(ReleaseRequest, AcceptsValidRequests) {
  for (const std::string& owner :
       {"o"s, "PX"s, " "s, "\0"s, "a\0b\r\n\xff"s, "ALSO"s, std::string(256, '\xfe')}) {
    const auto parsed = ParseRelease(WithKey({owner}));
    ASSERT_EQ(ErrorOf(parsed), "(accepted)");
    EXPECT_EQ(std::get<ReleaseRequest>(parsed).owner, Owner{owner});
    EXPECT_TRUE(std::get<ReleaseRequest>(parsed).also.empty());
  }
}

TEST(ReleaseRequest, RefusesInvalidRequests) {
  const std::string long_owner(257, 'o');
  const std::string huge_owner(size_t{10} << 20, 'o');
  const std::string also = "expected ALSO numkeys key [key ...]";
  const std::vector<std::pair<Words, std::string>> cases = {
      {{}, "ERR the owner is missing: " + kReleaseUsage},
      {{""}, "ERR the owner must be 1 to 256 bytes, not 0"},
      {{long_owner}, "ERR the owner must be 1 to 256 bytes, not 257"},
      {{huge_owner}, "ERR the owner must be 1 to 256 bytes, not 10485760"},
      {{"", "more"}, "ERR the owner must be 1 to 256 bytes, not 0"},
      {{"o", "o"}, "ERR syntax error at \"o\": " + also},
      {{"o", ""}, "ERR syntax error at \"\": " + also},
      {{"o", "PX", "5"}, "ERR syntax error at \"PX\": " + also},
      {{"o", "ALSOS", "1", "k"}, "ERR syntax error at \"ALSOS\": " + also},
      {{"o", "ALSO", "1", "k", "k"}, "ERR syntax error at \"k\": expected nothing more"},
      {{"o", "\r\n+OK"}, "ERR syntax error at \"\\x0d\\x0a+OK\": " + also},
  };
  for (const auto& [words, error] : cases) EXPECT_EQ(ErrorOf(ParseRelease(WithKey(words))), error);
}

// --- LOCK.FENCE: key [token] ------------------------------------------------------------------

TEST(FenceRequest, AcceptsValidRequests) {
  const auto without = ParseFence(Words{"k"});
  ASSERT_EQ(ErrorOf(without), "(accepted)");
  EXPECT_EQ(std::get<FenceRequest>(without).token, std::nullopt);
  // 0 is what a call in line is answered. It is no token, and never current.
  for (const uint64_t token : {uint64_t{0}, uint64_t{1}, uint64_t{9}, uint64_t{10},
                               uint64_t{1700000000000000}, kMaxToken.value - 1, kMaxToken.value}) {
    const std::string text = std::to_string(token);
    const auto parsed = ParseFence(Words{"k", text});
    ASSERT_EQ(ErrorOf(parsed), "(accepted)");
    EXPECT_EQ(std::get<FenceRequest>(parsed).token, Token{token});
  }
}

TEST(FenceRequest, RefusesInvalidRequests) {
  const std::string must =
      "ERR the token must be an integer from 0 to 9007199254740991 in plain digits, not ";
  const auto error = [](const Words& words) { return ErrorOf(ParseFence(WithKey(words))); };
  EXPECT_EQ(error({"9007199254740992"}), must + "\"9007199254740992\"");
  EXPECT_EQ(error({"9223372036854775807"}), must + "\"9223372036854775807\"");
  for (const std::string& number : kNotPlainDigits) {
    EXPECT_EQ(error({number}), must + Quoted(number));
  }
  for (const std::string& number : kTooHuge) EXPECT_EQ(error({number}), must + Quoted(number));
  EXPECT_EQ(error({"5", "5"}), "ERR syntax error at \"5\": expected THEN command [arg ...]");
  EXPECT_EQ(error({"5", "THEN"}), "ERR syntax error: the command after THEN is missing");
  EXPECT_EQ(error({"5", "THE", "SET"}),
            "ERR syntax error at \"THE\": expected THEN command [arg ...]");
  EXPECT_EQ(error({"x", "THEN"}), must + "\"x\"");
  EXPECT_EQ(error({"THEN", "SET"}), must + "\"THEN\"");
}

TEST(FenceRequest, KeepsCommandAfterThenUnchanged) {
  const Words words = {"k", "7", "then", "SET", "THEN", "", std::string_view("a\0b", 3)};
  const auto parsed = ParseFence(words);
  ASSERT_EQ(ErrorOf(parsed), "(accepted)");
  const auto& request = std::get<FenceRequest>(parsed);
  EXPECT_EQ(request.token, Token{7});
  ASSERT_EQ(request.then.size(), 4U);
  EXPECT_EQ(request.then.data(), words.data() + 3) << "a part of the arguments themselves";
}

TEST(FenceRequest, RefusesNestedThen) {
  const auto error = [](const Words& words) {
    Words fence = {"k", "7", "THEN"};
    fence.insert(fence.end(), words.begin(), words.end());
    return ErrorOf(ParseFence(fence));
  };
  const std::string refused = "ERR THEN cannot be nested: give the command itself";
  EXPECT_EQ(error({"LOCK.FENCE", "k", "7", "THEN", "SET", "a", "b"}), refused);
  EXPECT_EQ(error({"lock.fence", "k", "7", "then"}), refused);
  EXPECT_EQ(error({"lock.fence", "k", "x", "then", "SET"}), refused);
  EXPECT_EQ(error({"LOCK.FENCE", "k", "7"}), "(accepted)");
  EXPECT_EQ(error({"LOCK.FENCE", "THEN"}), "(accepted)");
  EXPECT_EQ(error({"LOCK.FENCE", "k", "THEN"}), "(accepted)");
  EXPECT_EQ(error({"MSET", "a", "b", "THEN"}), "(accepted)");
  EXPECT_EQ(error({"select", "3"}),
            "ERR SELECT is not allowed after THEN, because it changes the connection");
}

TEST(AcquireRequest, AcceptsFloor) {
  const auto floor = [](const Words& words) -> std::optional<Token> {
    const auto parsed = ParseAcquire(WithKey(words), Limits{std::chrono::hours{1}});
    EXPECT_EQ(ErrorOf(parsed), "(accepted)");
    return std::get<AcquireRequest>(parsed).floor;
  };
  EXPECT_EQ(floor({"o", "PX", "5"}), std::nullopt);
  EXPECT_EQ(floor({"o", "PX", "5", "floor", "1"}), Token{1});
  EXPECT_EQ(floor({"o", "FLOOR", "9007199254740991", "PX", "5"}), kMaxToken);
  const auto error = [](const Words& words) {
    return ErrorOf(ParseAcquire(WithKey(words), Limits{std::chrono::hours{1}}));
  };
  const std::string must =
      "ERR FLOOR must be an integer from 1 to 9007199254740991 in plain digits, not ";
  for (const std::string_view number : {"0", "9007199254740992", "-1", "1.5", "x", ""}) {
    EXPECT_EQ(error({"o", "PX", "5", "FLOOR", number}), must + Quoted(number));
  }
  EXPECT_EQ(error({"o", "PX", "5", "FLOOR"}),
            "ERR syntax error: the number after FLOOR is missing");
  EXPECT_EQ(error({"o", "PX", "5", "FLOOR", "1", "FLOOR", "1"}),
            "ERR syntax error: FLOOR is given twice");
}

// --- Helpers of the parsers -------------------------------------------------------------------

// --- LOCK.LIST and LOCK.TOP ---------------------------------------------------------------------

TEST(ListRequest, AcceptsValidRequests) {
  const auto nothing = ParseList({});
  ASSERT_TRUE(std::holds_alternative<ListRequest>(nothing));
  EXPECT_EQ(std::get<ListRequest>(nothing).match, std::nullopt);
  EXPECT_EQ(std::get<ListRequest>(nothing).count, 100);
  EXPECT_EQ(std::get<ListRequest>(nothing).cursor, "0");

  const Words words = {"cursor", "18446744073709551615", "Match", "", "COUNT", "100000"};
  const auto all = ParseList(words);
  ASSERT_TRUE(std::holds_alternative<ListRequest>(all)) << ErrorOf(all);
  EXPECT_EQ(std::get<ListRequest>(all).match, "");
  EXPECT_EQ(std::get<ListRequest>(all).count, 100000);
  EXPECT_EQ(std::get<ListRequest>(all).cursor, "18446744073709551615");

  const Words keyword = {"MATCH", "COUNT"};  // any word is a valid pattern
  const auto odd = ParseList(keyword);
  ASSERT_TRUE(std::holds_alternative<ListRequest>(odd));
  EXPECT_EQ(std::get<ListRequest>(odd).match, "COUNT");
}

TEST(ListRequest, RefusesInvalidRequests) {
  const auto error = [](const Words& words) { return ErrorOf(ParseList(words)); };
  EXPECT_EQ(error({"*"}), "ERR syntax error at \"*\": expected MATCH pattern, COUNT n or CURSOR c");
  EXPECT_EQ(error({"MATCH", "a", "CURSOR", "0", "b"}),
            "ERR syntax error at \"b\": expected COUNT n");
  EXPECT_EQ(error({"MATCH", "a", "CURSOR", "0", "COUNT", "1", "b"}),
            "ERR syntax error at \"b\": expected nothing more");
  EXPECT_EQ(error({"MATCH"}), "ERR syntax error: the pattern after MATCH is missing");
  EXPECT_EQ(error({"COUNT"}), "ERR syntax error: the number after COUNT is missing");
  EXPECT_EQ(error({"CURSOR"}), "ERR syntax error: the number after CURSOR is missing");
  EXPECT_EQ(error({"MATCH", "a", "match", "b"}), "ERR syntax error: MATCH is given twice");
  EXPECT_EQ(error({"COUNT", "1", "COUNT", "1"}), "ERR syntax error: COUNT is given twice");
  EXPECT_EQ(error({"CURSOR", "1", "CURSOR", "1"}), "ERR syntax error: CURSOR is given twice");
  for (const std::string_view count : {"0"sv, "100001"sv, "-1"sv, ""sv, "ten"sv}) {
    EXPECT_EQ(
        error({"COUNT", count}),
        "ERR COUNT must be an integer from 1 to 100000 in plain digits, not " + Quoted(count));
  }
  for (const std::string_view cursor :
       {""sv, "-1"sv, "x"sv, "1 "sv, "00"sv, "184467440737095516150"sv}) {
    EXPECT_EQ(error({"CURSOR", cursor}),
              "ERR CURSOR must be 0 or the cursor that the previous call returned, not " +
                  Quoted(cursor));
  }
}

TEST(TopRequest, AcceptsOptionalCount) {
  const auto most = [](const Words& words) { return std::get<TopRequest>(ParseTop(words)).most; };
  EXPECT_EQ(most({}), 10U);
  EXPECT_EQ(most({"1"}), 1U);
  EXPECT_EQ(most({"1000"}), 1000U);
  for (const std::string_view n : {"0"sv, "1001"sv, "-1"sv, ""sv, "all"sv}) {
    const Words words = {n};
    EXPECT_EQ(ErrorOf(ParseTop(words)),
              "ERR n must be an integer from 1 to 1000 in plain digits, not " + Quoted(n));
  }
  const Words two = {"1", "2"};
  EXPECT_EQ(ErrorOf(ParseTop(two)), "ERR syntax error at \"2\": expected nothing more");
}

TEST(ParseDigits, ReadsPlainDigitsOnly) {
  for (const int64_t number :
       {int64_t{0}, int64_t{1}, int64_t{9}, int64_t{10}, int64_t{99}, int64_t{100}, INT64_MAX}) {
    EXPECT_EQ(ParseDigits(std::to_string(number)), number);
  }
  for (const std::string& text : kNotPlainDigits) EXPECT_EQ(ParseDigits(text), std::nullopt);
  for (const std::string& text : kTooHuge) EXPECT_EQ(ParseDigits(text), std::nullopt);
}

TEST(ParseDigits, DoesNotReadPastEnd) {
  EXPECT_EQ(ParseDigits("12345"sv.substr(0, 3)), 123);
  EXPECT_EQ(ParseDigits("12345"sv.substr(1, 1)), 2);
  EXPECT_EQ(ParseDigits("1 2"sv.substr(0, 1)), 1);
}

TEST(IsKeyword, IgnoresOnlyCaseOfLetters) {
  EXPECT_TRUE(IsKeyword("SHARED", "SHARED"));
  EXPECT_TRUE(IsKeyword("sHaReD", "SHARED"));
  EXPECT_FALSE(IsKeyword("SHARE", "SHARED"));
  EXPECT_FALSE(IsKeyword("SHAREDX", "SHARED"));
  EXPECT_FALSE(IsKeyword("", "SHARED"));
  EXPECT_FALSE(IsKeyword("SHARED\0"sv, "SHARED"));
  for (int byte = 0; byte < 256; ++byte) {
    const std::string text{'P', static_cast<char>(byte)};
    EXPECT_EQ(IsKeyword(text, "PX"), byte == 'X' || byte == 'x') << byte;
  }
}

TEST(Quoted, EscapesNonPrintableBytes) {
  EXPECT_EQ(Quoted(""), R"("")");
  EXPECT_EQ(Quoted("plain text ~"), R"("plain text ~")");
  EXPECT_EQ(Quoted("a\"b\\c"), R"("a\"b\\c")");
  EXPECT_EQ(Quoted("\r\n\t\0\x1f\x7f\x80\xff"sv), R"("\x0d\x0a\x09\x00\x1f\x7f\x80\xff")");
  for (int byte = 0; byte < 256; ++byte) {
    EXPECT_TRUE(IsOnePrintableLine(Quoted(std::string(3, static_cast<char>(byte))))) << byte;
  }
}

TEST(Quoted, ShowsAtMost40Bytes) {
  const std::string forty = "0123456789012345678901234567890123456789";
  EXPECT_EQ(Quoted(forty), '"' + forty + '"');
  EXPECT_EQ(Quoted(forty + "x"), '"' + forty + "\"... (41 bytes)");
  EXPECT_EQ(Quoted(std::string(size_t{10} << 20, 'a')),
            '"' + std::string(40, 'a') + "\"... (10485760 bytes)");
  // The limit counts bytes of the input, not the characters that show them.
  EXPECT_EQ(Quoted(std::string(40, '\0')).size(), 40 * 4 + 2);
  EXPECT_EQ(Quoted(std::string(41, '\0')).size(), 40 * 4 + 2 + "... (41 bytes)"sv.size());
}

TEST(Unquoted, LeavesPlainWordUnchanged) {
  const std::string forty(40, 'w');
  for (const std::string& word : {"orders:42"s, "{tag}a"s, "'"s, "!"s, "~"s, forty}) {
    EXPECT_EQ(Unquoted(word), word);
  }
  for (const std::string& other :
       {""s, "two words"s, "a\"b"s, "a\\b"s, "\n"s, "\0"s, "\x7f"s, "\xff"s, forty + "w"}) {
    EXPECT_EQ(Unquoted(other), Quoted(other));
  }
}

// Any input gives a request within its ranges, or one printable line that begins with ERR.
TEST(AnyRequest, RandomBytesGiveValidRequestOrPrintableError) {
  constexpr uint64_t kSeed = 20260115;
  constexpr int kRounds = 50'000;
  const std::array known = {"PX"sv,      "ex"sv,
                            "owner"sv,   "1"sv,
                            "2"sv,       "86400"sv,
                            "WAIT"sv,    "SHARED"sv,
                            "limit"sv,   "REENTRANT"sv,
                            "SESSION"sv, "LINGER"sv,
                            "ALSO"sv,    "9007199254740991"sv,
                            "MATCH"sv,   "COUNT"sv,
                            "CURSOR"sv,  "MAXLINE"sv,
                            "WEIGHT"sv,  "maxhold"sv,
                            "TAG"sv,     "NOTIFY"sv};
  std::mt19937_64 random(kSeed);
  const auto below = [&](uint64_t bound) { return random() % bound; };
  int accepted = 0;
  int refused = 0;
  const auto check = [&](const auto& parsed, const auto& is_valid) {
    if (const auto* error = std::get_if<ParseError>(&parsed)) {
      EXPECT_TRUE(error->text.starts_with("ERR ") && error->text.size() < 400 &&
                  IsOnePrintableLine(error->text))
          << error->text;
      ++refused;
    } else {
      EXPECT_TRUE(is_valid(std::get<0>(parsed)));
      ++accepted;
    }
  };
  const auto is_owned = [](const auto& request) {
    return !request.owner.bytes.empty() && request.owner.bytes.size() <= 256 &&
           request.also.size() <= 64;
  };
  const auto is_leased = [&](const auto& request) {
    return is_owned(request) && request.lease >= Millis{1} && request.lease <= kDay.max_lease;
  };
  for (int round = 0; round < kRounds && !testing::Test::HasFailure(); ++round) {
    SCOPED_TRACE(testing::Message() << "seed " << kSeed << ", round " << round);
    std::vector<std::string> args(below(9));
    for (std::string& arg : args) {
      if (below(4) != 0) {
        arg = known.at(below(known.size()));
      } else {
        arg.resize(below(8) == 0 ? below(300) : below(8));
        std::generate(arg.begin(), arg.end(), [&] { return static_cast<char>(below(256)); });
      }
    }
    const Words words(args.begin(), args.end());
    check(ParseAcquire(words, kDay), [&](const AcquireRequest& request) {
      return is_leased(request) && request.wait >= Millis{0} && request.wait <= kMaxWait &&
             request.linger >= Millis{0} && request.linger <= kDay.max_lease &&
             request.limit >= 1 && request.limit <= kMaxLimit &&
             (request.mode == Mode::kLimit ? !request.reentrant : request.limit == 1) &&
             request.weight >= 1 && request.weight <= request.limit &&
             request.max_line <= kMaxLine &&
             (request.max_hold == Millis{0} ||
              (request.max_hold >= request.lease && request.max_hold <= kMaxHold)) &&
             (request.tag.empty() || IsTag(request.tag)) &&
             (!request.notify.has_value() ||
              (!request.notify->channel.empty() && request.notify->channel.size() <= 256 &&
               !request.notify->id.empty() && request.notify->id.size() <= 64));
    });
    check(ParseTouch(words, kDay), is_leased);
    check(ParseRelease(words), is_owned);
    check(ParseFence(words), [](const FenceRequest& request) {
      return !request.token.has_value() || *request.token <= kMaxToken;
    });
    check(ParseList(words), [](const ListRequest& request) {
      return request.count >= 1 && request.count <= kMaxListCount && !request.cursor.empty();
    });
    check(ParseTop(words), [](const TopRequest& request) {
      return request.most >= 1 && request.most <= static_cast<size_t>(kMaxTop);
    });
  }
  EXPECT_GT(accepted, 1000);
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace turnstile
