// Parsing, as tables: what is accepted, what is refused, and with which words.

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

bool IsOnePrintableLine(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; });
}

// What no integer of ours may look like, beside zero and numbers out of range.
const std::vector<std::string> kNotPlainDigits = {
    "",    "00",       "01",       "007",          "-1",     "-0",    "+1",
    " 1",  "1 ",       "\t1",      "1\n",          "1\r\n1", "1 000", "1\0"s,
    "\0"s, "\0001"s,   "1\0001"s,  "1.0",          "1.",     ".5",    "1.5",
    "1e3", "1E3",      "1e0",      "0x10",         "0X1",    "0b1",   "10h",
    "a",   "1a",       "a1",       "1_000",        "1,000",  "1'000", "--1",
    "inf", "infinity", "nan",      "PX",           "1PX",    "/",     ":",
    "1/",  "1:",       "\xd9\xa1", "\xef\xbc\x91", "\xff",   "\xb1",  "1\x80",
};

// Plain digits, but none of these fits into 63 bits. Cut to 64 bits, some would be small and fine.
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

// --- LOCK.ACQUIRE and LOCK.TOUCH: owner <PX ms | EX s> ----------------------------------------

// What either command makes of its arguments.
struct LeaseReading {
  std::string owner;
  std::optional<Millis> lease;
  std::string error = "(accepted)";
};

template <typename Request, Parsed<Request> (*kParse)(Args, const Limits&)>
LeaseReading ReadLease(const Words& words, const Limits& limits) {
  const Parsed<Request> parsed = kParse(words, limits);
  if (const auto* error = std::get_if<ParseError>(&parsed)) return {.error = error->text};
  const auto& request = std::get<Request>(parsed);
  return {.owner = std::string(request.owner.bytes), .lease = request.lease};
}

struct LeaseCommand {
  const char* name;
  LeaseReading (*read)(const Words&, const Limits&);
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
    testing::Values(LeaseCommand{"Acquire", &ReadLease<AcquireRequest, ParseAcquire>},
                    LeaseCommand{"Touch", &ReadLease<TouchRequest, ParseTouch>}),
    [](const auto& param_info) { return std::string(param_info.param.name); });

TEST_P(LeaseRequest, Accepts) {
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
      // An owner is what stands in the owner's place, whatever it looks like.
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

TEST_P(LeaseRequest, OwnerHas1To256Bytes) {
  for (const size_t size : {size_t{1}, size_t{2}, size_t{255}, size_t{256}}) {
    for (const char byte : {'o', '\0', '\xff', '\n'}) {
      const std::string owner(size, byte);
      EXPECT_EQ(Read({owner, "PX", "1"}).owner, owner) << size;
    }
  }
  const std::string huge(size_t{10} << 20, 'o');
  EXPECT_EQ(Error({"", "PX", "1"}), "ERR the owner must have 1 to 256 bytes, not 0");
  EXPECT_EQ(Error({std::string(257, 'o'), "PX", "1"}),
            "ERR the owner must have 1 to 256 bytes, not 257");
  EXPECT_EQ(Error({huge, "PX", "1"}), "ERR the owner must have 1 to 256 bytes, not 10485760");
  // It stands first, so it is blamed first.
  EXPECT_EQ(Error({""}), "ERR the owner must have 1 to 256 bytes, not 0");
  EXPECT_EQ(Error({"", "PX", "x", "PX"}), "ERR the owner must have 1 to 256 bytes, not 0");
}

TEST_P(LeaseRequest, RefusesWhatIsMissing) {
  EXPECT_EQ(Error({}), "ERR syntax error: an owner is missing");
  EXPECT_EQ(Error({"o"}), "ERR syntax error: the lease is missing, give PX ms or EX s");
  for (const std::string_view option : {"PX", "EX", "px", "ex"}) {
    const std::string error = Error({"o", option});
    const std::string_view upper = option == "PX" || option == "px" ? "PX" : "EX";
    EXPECT_TRUE(error.starts_with("ERR syntax error")) << error;
    EXPECT_NE(error.find(upper), std::string::npos) << error;
    EXPECT_NE(error.find("missing"), std::string::npos) << error;
  }
}

TEST_P(LeaseRequest, RefusesNumbersThatAreNotPlainDigits) {
  for (const std::string& number : kNotPlainDigits) {
    EXPECT_EQ(
        Error({"o", "PX", number}),
        "ERR PX must be a whole number from 1 to 86400000 in plain digits, not " + Quoted(number));
    EXPECT_EQ(
        Error({"o", "EX", number}),
        "ERR EX must be a whole number from 1 to 86400 in plain digits, not " + Quoted(number));
  }
  EXPECT_EQ(Error({"o", "px", "-5"}),
            "ERR PX must be a whole number from 1 to 86400000 in plain digits, not \"-5\"");
  EXPECT_EQ(Error({"o", "ex", "1\n"}),
            "ERR EX must be a whole number from 1 to 86400 in plain digits, not \"1\\x0a\"");
}

TEST_P(LeaseRequest, RefusesNumbersOutOfRange) {
  EXPECT_EQ(Error({"o", "PX", "0"}),
            "ERR PX must be a whole number from 1 to 86400000 in plain digits, not \"0\"");
  EXPECT_EQ(Error({"o", "EX", "0"}),
            "ERR EX must be a whole number from 1 to 86400 in plain digits, not \"0\"");
  EXPECT_EQ(Error({"o", "PX", "86400001"}),
            "ERR PX must be a whole number from 1 to 86400000 in plain digits, not \"86400001\"");
  EXPECT_EQ(Error({"o", "EX", "86401"}),
            "ERR EX must be a whole number from 1 to 86400 in plain digits, not \"86401\"");
  EXPECT_TRUE(Error({"o", "PX", "9223372036854775807"}).starts_with("ERR PX must be"));
  for (const std::string& number : kTooHuge) {
    for (const Limits& limits : {kDay, kNoLimit}) {
      EXPECT_TRUE(Error({"o", "PX", number}, limits).starts_with("ERR PX must be"));
      EXPECT_TRUE(Error({"o", "EX", number}, limits).starts_with("ERR EX must be"));
    }
  }
}

TEST_P(LeaseRequest, LimitIsTheLastAllowedLease) {
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
              "ERR PX must be a whole number from 1 to " + number(max_lease) +
                  " in plain digits, not \"" + number(max_lease + 1) + "\"");
    EXPECT_EQ(Read({"o", "EX", number(most_seconds)}, limits).lease, Millis{most_seconds * 1000});
    EXPECT_EQ(Error({"o", "EX", number(most_seconds + 1)}, limits),
              "ERR EX must be a whole number from 1 to " + number(most_seconds) +
                  " in plain digits, not \"" + number(most_seconds + 1) + "\"");
  }
  // Under a second there is nothing left to say with EX.
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

TEST_P(LeaseRequest, RefusesALeaseGivenTwice) {
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
    EXPECT_EQ(Error(words), "ERR syntax error: the lease is given twice, give PX or EX once")
        << testing::PrintToString(words);
  }
}

// Those of the contract that later work adds, those of SET, and what only looks like an option.
TEST_P(LeaseRequest, RefusesOptionsThatDoNotExist) {
  for (const std::string_view option :
       {"WAITS"sv,    "WAI"sv,  "SHARED"sv, "LIMIT"sv, "REENTRANT"sv, "SESSION"sv, "LINGER"sv,
        "FLOOR"sv,    "ALSO"sv, "NX"sv,     "XX"sv,    "PXAT"sv,      "EXAT"sv,    "KEEPTTL"sv,
        "GET"sv,      "TTL"sv,  "P"sv,      "X"sv,     "PXX"sv,       "PX "sv,     " PX"sv,
        "PX\0"sv,     "\0PX"sv, "P X"sv,    "PX=5"sv,  "-PX"sv,       "5"sv,       "5000"sv,
        "\xf0\x50"sv, "\xff"sv, "o"sv,      "\x10X"sv, "\x30X"sv,     "owner"sv,   ""sv,
        "P\0"sv,      "\0\0"sv, "P\xd8"sv,  "\xd0X"sv, "PEXPIRE"sv,   "EXP"sv}) {
    const std::string place = "ERR syntax error at " + Quoted(option) + ": expected ";
    for (const Words& words :
         std::vector<Words>{{"o", option}, {"o", option, "100"}, {"o", option, "100", "PX", "5"}}) {
      EXPECT_EQ(Error(words), place + (is_acquire() ? "PX ms, EX s or WAIT ms" : "PX ms or EX s"));
    }
    for (const Words& words : std::vector<Words>{{"o", "PX", "5", option},
                                                 {"o", "PX", "5", option, "100"},
                                                 {"o", "EX", "5", option, "100", "PX", "5"}}) {
      EXPECT_EQ(Error(words), place + (is_acquire() ? "WAIT ms" : "nothing more"));
    }
  }
}

TEST_P(LeaseRequest, BlamesTheFirstMistake) {
  EXPECT_TRUE(Error({"o", "PX", "x", "EX", "y"}).starts_with("ERR PX must be"));
  EXPECT_TRUE(Error({"o", "EX", "y", "PX", "x"}).starts_with("ERR EX must be"));
  EXPECT_TRUE(Error({"o", "PX", "0", "NIX"}).starts_with("ERR PX must be"));
  EXPECT_TRUE(Error({"o", "NIX", "PX", "0"}).starts_with("ERR syntax error at \"NIX\""));
}

// --- LOCK.ACQUIRE only: [WAIT ms] -------------------------------------------------------------

Parsed<AcquireRequest> Acquire(const Words& words) { return ParseAcquire(words, kDay); }

TEST(AcquireRequest, WaitsAnywhereAmongTheOptions) {
  for (const Words& words : std::vector<Words>{{"o", "PX", "5", "WAIT", "70"},
                                               {"o", "WAIT", "70", "PX", "5"},
                                               {"o", "wait", "70", "px", "5"}}) {
    const auto parsed = Acquire(words);
    ASSERT_EQ(ErrorOf(parsed), "(accepted)") << testing::PrintToString(words);
    EXPECT_EQ(std::get<AcquireRequest>(parsed).wait, Millis{70});
    EXPECT_EQ(std::get<AcquireRequest>(parsed).lease, Millis{5});
  }
}

TEST(AcquireRequest, DoesNotWaitUnlessAsked) {
  EXPECT_EQ(std::get<AcquireRequest>(Acquire({"o", "PX", "5"})).wait, Millis{0});
  EXPECT_EQ(std::get<AcquireRequest>(Acquire({"o", "PX", "5", "WAIT", "0"})).wait, Millis{0});
}

TEST(AcquireRequest, WaitsAtMostTenYears) {
  EXPECT_EQ(std::get<AcquireRequest>(Acquire({"o", "PX", "5", "WAIT", "315360000000"})).wait,
            kMaxWait);
}

TEST(AcquireRequest, RefusesOtherWaits) {
  for (const std::string_view wait : {"-1"sv, "+1"sv, " 1"sv, "1 "sv, "01"sv, "1.5"sv, "1e3"sv,
                                      ""sv, "x"sv, "315360000001"sv, "99999999999999999999"sv}) {
    EXPECT_EQ(ErrorOf(Acquire({"o", "PX", "5", "WAIT", wait})),
              "ERR WAIT must be a whole number from 0 to 315360000000 in plain digits, not " +
                  Quoted(wait));
  }
  EXPECT_EQ(ErrorOf(Acquire({"o", "PX", "5", "WAIT"})),
            "ERR syntax error: the number after WAIT is missing");
  EXPECT_EQ(ErrorOf(Acquire({"o", "WAIT", "1", "PX", "5", "WAIT", "1"})),
            "ERR syntax error: WAIT is given twice");
  EXPECT_EQ(ErrorOf(Acquire({"o", "WAIT", "1"})),
            "ERR syntax error: the lease is missing, give PX ms or EX s");
}

// --- LOCK.RELEASE: owner ----------------------------------------------------------------------

TEST(ReleaseRequest, Accepts) {
  for (const std::string& owner :
       {"o"s, "PX"s, " "s, "\0"s, "a\0b\r\n\xff"s, std::string(256, '\xfe')}) {
    const auto parsed = ParseRelease(Words{owner});
    ASSERT_EQ(ErrorOf(parsed), "(accepted)");
    EXPECT_EQ(std::get<ReleaseRequest>(parsed).owner, Owner{owner});
  }
}

TEST(ReleaseRequest, Refuses) {
  const std::string long_owner(257, 'o');
  const std::string huge_owner(size_t{10} << 20, 'o');
  const std::vector<std::pair<Words, std::string>> cases = {
      {{}, "ERR syntax error: an owner is missing"},
      {{""}, "ERR the owner must have 1 to 256 bytes, not 0"},
      {{long_owner}, "ERR the owner must have 1 to 256 bytes, not 257"},
      {{huge_owner}, "ERR the owner must have 1 to 256 bytes, not 10485760"},
      {{"", "more"}, "ERR the owner must have 1 to 256 bytes, not 0"},
      {{"o", "o"}, "ERR syntax error at \"o\": expected nothing more"},
      {{"o", ""}, "ERR syntax error at \"\": expected nothing more"},
      {{"o", "PX", "5"}, "ERR syntax error at \"PX\": expected nothing more"},
      {{"o", "ALSO", "1", "k"}, "ERR syntax error at \"ALSO\": expected nothing more"},
      {{"o", "\r\n+OK"}, "ERR syntax error at \"\\x0d\\x0a+OK\": expected nothing more"},
  };
  for (const auto& [words, error] : cases) EXPECT_EQ(ErrorOf(ParseRelease(words)), error);
}

// --- LOCK.FENCE: [token] ----------------------------------------------------------------------

TEST(FenceRequest, Accepts) {
  const auto without = ParseFence({});
  ASSERT_EQ(ErrorOf(without), "(accepted)");
  EXPECT_EQ(std::get<FenceRequest>(without).token, std::nullopt);
  for (const uint64_t token : {uint64_t{1}, uint64_t{9}, uint64_t{10}, uint64_t{1700000000000000},
                               kMaxToken.value - 1, kMaxToken.value}) {
    const std::string text = std::to_string(token);
    const auto parsed = ParseFence(Words{text});
    ASSERT_EQ(ErrorOf(parsed), "(accepted)");
    EXPECT_EQ(std::get<FenceRequest>(parsed).token, Token{token});
  }
}

TEST(FenceRequest, Refuses) {
  const std::string must =
      "ERR the token must be a whole number from 1 to 9007199254740991 in plain digits, not ";
  EXPECT_EQ(ErrorOf(ParseFence(Words{"0"})), must + "\"0\"");
  EXPECT_EQ(ErrorOf(ParseFence(Words{"9007199254740992"})), must + "\"9007199254740992\"");
  EXPECT_EQ(ErrorOf(ParseFence(Words{"9223372036854775807"})), must + "\"9223372036854775807\"");
  for (const std::string& number : kNotPlainDigits) {
    EXPECT_EQ(ErrorOf(ParseFence(Words{number})), must + Quoted(number));
  }
  for (const std::string& number : kTooHuge) {
    EXPECT_EQ(ErrorOf(ParseFence(Words{number})), must + Quoted(number));
  }
  EXPECT_EQ(ErrorOf(ParseFence(Words{"5", "THEN", "SET"})),
            "ERR syntax error at \"THEN\": expected nothing more");
  EXPECT_EQ(ErrorOf(ParseFence(Words{"5", "5"})),
            "ERR syntax error at \"5\": expected nothing more");
  EXPECT_EQ(ErrorOf(ParseFence(Words{"x", "THEN"})), must + "\"x\"");
}

// --- The pieces -------------------------------------------------------------------------------

TEST(ParseDigits, ReadsPlainDigitsOnly) {
  for (const int64_t number :
       {int64_t{0}, int64_t{1}, int64_t{9}, int64_t{10}, int64_t{99}, int64_t{100}, INT64_MAX}) {
    EXPECT_EQ(ParseDigits(std::to_string(number)), number);
  }
  for (const std::string& text : kNotPlainDigits) EXPECT_EQ(ParseDigits(text), std::nullopt);
  for (const std::string& text : kTooHuge) EXPECT_EQ(ParseDigits(text), std::nullopt);
}

TEST(ParseDigits, ReadsNoByteBehindItsText) {
  EXPECT_EQ(ParseDigits("12345"sv.substr(0, 3)), 123);
  EXPECT_EQ(ParseDigits("12345"sv.substr(1, 1)), 2);
  EXPECT_EQ(ParseDigits("1 2"sv.substr(0, 1)), 1);
}

TEST(IsKeyword, IgnoresTheCaseOfLettersAndNothingElse) {
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

TEST(Quoted, EscapesWhatIsNotPrintable) {
  EXPECT_EQ(Quoted(""), R"("")");
  EXPECT_EQ(Quoted("plain text ~"), R"("plain text ~")");
  EXPECT_EQ(Quoted("a\"b\\c"), R"("a\"b\\c")");
  EXPECT_EQ(Quoted("\r\n\t\0\x1f\x7f\x80\xff"sv), R"("\x0d\x0a\x09\x00\x1f\x7f\x80\xff")");
  for (int byte = 0; byte < 256; ++byte) {
    EXPECT_TRUE(IsOnePrintableLine(Quoted(std::string(3, static_cast<char>(byte))))) << byte;
  }
}

TEST(Quoted, ShowsFortyBytesAtMost) {
  const std::string forty = "0123456789012345678901234567890123456789";
  EXPECT_EQ(Quoted(forty), '"' + forty + '"');
  EXPECT_EQ(Quoted(forty + "x"), '"' + forty + "\"... (41 bytes)");
  EXPECT_EQ(Quoted(std::string(size_t{10} << 20, 'a')),
            '"' + std::string(40, 'a') + "\"... (10485760 bytes)");
  // Bytes are counted, not the signs they are shown with.
  EXPECT_EQ(Quoted(std::string(40, '\0')).size(), 40 * 4 + 2);
  EXPECT_EQ(Quoted(std::string(41, '\0')).size(), 40 * 4 + 2 + "... (41 bytes)"sv.size());
}

// Whatever bytes come in: a request in its ranges, or one printable line that begins with ERR.
TEST(AnyRequest, RandomBytesGiveAValidRequestOrAPrintableLine) {
  constexpr uint64_t kSeed = 20260115;
  constexpr int kRounds = 50'000;
  const std::array known = {"PX"sv, "ex"sv, "owner"sv, "1"sv, "86400"sv, "9007199254740991"sv};
  std::mt19937_64 random(kSeed);
  const auto below = [&](uint64_t bound) { return random() % bound; };
  int accepted = 0;
  int refused = 0;
  const auto check = [&](const auto& parsed, const auto& is_valid) {
    if (const auto* error = std::get_if<ParseError>(&parsed)) {
      EXPECT_TRUE(error->text.starts_with("ERR ") && error->text.size() < 300 &&
                  IsOnePrintableLine(error->text))
          << error->text;
      ++refused;
    } else {
      EXPECT_TRUE(is_valid(std::get<0>(parsed)));
      ++accepted;
    }
  };
  const auto is_owner = [](Owner owner) {
    return !owner.bytes.empty() && owner.bytes.size() <= 256;
  };
  const auto is_leased = [&](const auto& request) {
    return is_owner(request.owner) && request.lease >= Millis{1} && request.lease <= kDay.max_lease;
  };
  for (int round = 0; round < kRounds && !testing::Test::HasFailure(); ++round) {
    SCOPED_TRACE(testing::Message() << "seed " << kSeed << ", round " << round);
    std::vector<std::string> args(below(5));
    for (std::string& arg : args) {
      if (below(2) == 0) {
        arg = known.at(below(known.size()));
      } else {
        arg.resize(below(8) == 0 ? below(300) : below(8));
        std::generate(arg.begin(), arg.end(), [&] { return static_cast<char>(below(256)); });
      }
    }
    const Words words(args.begin(), args.end());
    check(ParseAcquire(words, kDay), is_leased);
    check(ParseTouch(words, kDay), is_leased);
    check(ParseRelease(words), [&](const auto& request) { return is_owner(request.owner); });
    check(ParseFence(words), [](const FenceRequest& request) {
      return !request.token.has_value() ||
             (*request.token >= kMinToken && *request.token <= kMaxToken);
    });
  }
  EXPECT_GT(accepted, 1000);
  EXPECT_GT(refused, 1000);
}

}  // namespace
}  // namespace turnstile
