// Parsing of the facts that a primary replicates.

#include "core/fact.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
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

constexpr std::string_view kRefusal =
    "ERR not a fact: expected ENDED key owner [UNDELIVERED], EXPIRED key before-ms, SESSION key "
    "at-ms owner [owner ...], or FLOOR token";
constexpr std::string_view kHeldRefusal =
    "ERR not a fact: expected key owner \"token since-ms end-ms\" [SHARED | LIMIT] [WEIGHT w] "
    "[COUNT n] [LINGER ms] [CAP ms] [TAG text]";
constexpr std::string_view kLast = "9007199254740991";    // 2^53 - 1
constexpr std::string_view kBeyond = "9007199254740992";  // 2^53

// The words of LOCK.HELD, one for each number; `Join` packs the numbers into one word.
struct HeldWords {
  std::string key = "key";
  std::string owner = "owner";
  std::string token = "42";
  std::string since = "1000";
  std::string end = "2000";
  Words details;

  std::string Join() const { return token + ' ' + since + ' ' + end; }
};

Parsed<HoldSetFact> ParseWords(const HeldWords& held, std::string_view numbers) {
  Words words = {held.key, held.owner, numbers};
  words.insert(words.end(), held.details.begin(), held.details.end());
  return ParseHoldSetFact(words);
}

// For valid facts; the key and the owner are views into `held`.
std::optional<HoldSetFact> ParseHeld(const HeldWords& held) {
  const std::string numbers = held.Join();
  const auto parsed = ParseWords(held, numbers);
  const auto* fact = std::get_if<HoldSetFact>(&parsed);
  if (fact == nullptr) return std::nullopt;
  EXPECT_EQ(HoldNumbers(fact->held.hold).text(), numbers) << "as it is written";
  return *fact;
}

void ExpectHeldRefused(const HeldWords& held) {
  const auto parsed = ParseWords(held, held.Join());
  const auto* error = std::get_if<ParseError>(&parsed);
  EXPECT_EQ(error == nullptr ? "(accepted)" : error->text, kHeldRefusal)
      << testing::PrintToString(held.key) << " " << testing::PrintToString(held.owner) << " "
      << testing::PrintToString(held.Join()) << " " << testing::PrintToString(held.details);
}

std::optional<HoldEndedFact> ParseEnded(const Words& words) {
  const auto parsed = ParseFact(words);
  const auto* fact = std::get_if<Fact>(&parsed);
  const auto* ended = fact == nullptr ? nullptr : std::get_if<HoldEndedFact>(fact);
  return ended == nullptr ? std::nullopt : std::optional(*ended);
}

std::optional<Token> ParseFloor(const Words& words) {
  const auto parsed = ParseFact(words);
  const auto* fact = std::get_if<Fact>(&parsed);
  const auto* floor = fact == nullptr ? nullptr : std::get_if<FloorFact>(fact);
  return floor == nullptr ? std::nullopt : std::optional(floor->token);
}

void ExpectRefused(const Words& words) {
  const auto parsed = ParseFact(words);
  const auto* error = std::get_if<ParseError>(&parsed);
  EXPECT_EQ(error == nullptr ? "(accepted)" : error->text, kRefusal)
      << testing::PrintToString(words);
}

constexpr Hold kHold{.owner = Owner{"owner"},
                     .token = Token{42},
                     .since = Instant{Millis{1000}},
                     .end = Instant{Millis{2000}}};

// Spellings that are not accepted as numbers.
const std::vector<std::string> kBadNumbers = {"",
                                              "-1",
                                              "+1",
                                              " 1",
                                              "1 ",
                                              "01",
                                              "00",
                                              "1.0",
                                              "1e3",
                                              "0x1",
                                              "abc",
                                              "1\0"s,
                                              "1\n"s,
                                              "nan",
                                              "9223372036854775808",
                                              "18446744073709551617",
                                              std::string(100, '9')};

TEST(HoldSetFact, ParsesKeyOwnerAndNumbers) {
  const HeldWords words{.key = "the key",
                        .owner = "the owner",
                        .token = "1700000000000042",
                        .since = "1700000000000",
                        .end = "1700000030000",
                        .details = {}};
  const auto fact = ParseHeld(words);
  ASSERT_TRUE(fact.has_value());
  EXPECT_EQ(fact->key, "the key");
  EXPECT_EQ(fact->held.mode, Mode::kExclusive);
  EXPECT_EQ(fact->held.hold, (Hold{.owner = Owner{"the owner"},
                                   .token = Token{1'700'000'000'000'042},
                                   .since = Instant{Millis{1'700'000'000'000}},
                                   .end = Instant{Millis{1'700'000'030'000}}}));
}

TEST(HoldSetFact, AcceptsBinaryKeysAndOwners) {
  HeldWords words;
  for (const std::string_view key : {""sv, "\0"sv, "\r\n"sv, "HELD"sv, "\xff\xfe"sv}) {
    words.key = key;
    EXPECT_EQ(ParseHeld(words)->key, key);
  }
  for (const std::string& owner : {std::string(256, '\xff'), "\0"s, " "s, "SHARED"s}) {
    words.owner = owner;
    EXPECT_EQ(ParseHeld(words)->held.hold.owner, Owner{owner});
  }
}

// Each number of LOCK.HELD in turn.
constexpr std::string HeldWords::*kNumbers[] = {&HeldWords::token, &HeldWords::since,
                                                &HeldWords::end};

TEST(HoldSetFact, AcceptsBoundaryValues) {
  const auto with = [](std::string HeldWords::*number, std::string_view text) {
    HeldWords words;
    words.*number = text;
    return ParseHeld(words)->held.hold;
  };
  EXPECT_EQ(with(&HeldWords::token, "1").token, kMinToken);
  EXPECT_EQ(with(&HeldWords::token, kLast).token, kMaxToken);
  EXPECT_EQ(with(&HeldWords::since, "0").since, kMinInstant);
  EXPECT_EQ(with(&HeldWords::since, kLast).since, kMaxInstant);
  EXPECT_EQ(with(&HeldWords::end, "0").end, kMinInstant);
  EXPECT_EQ(with(&HeldWords::end, kLast).end, kMaxInstant);
}

TEST(HoldSetFact, RefusesInvalidFields) {
  ExpectHeldRefused({.owner = "", .details = {}});
  ExpectHeldRefused({.owner = std::string(257, 'o'), .details = {}});
  ExpectHeldRefused({.token = "0", .details = {}});
  for (std::string HeldWords::*const number : kNumbers) {
    HeldWords words;
    for (const std::string_view bad : {kBeyond, "9223372036854775807"sv}) {
      words.*number = bad;
      ExpectHeldRefused(words);
    }
    for (const std::string& bad : kBadNumbers) {
      words.*number = bad;
      ExpectHeldRefused(words);
    }
  }
}

TEST(HoldSetFact, ParsesPackedNumbers) {
  for (const std::string_view numbers :
       {""sv, " "sv, "  "sv, "42"sv, "42 1000"sv, "42 1000 "sv, " 42 1000 2000"sv,
        "42  1000 2000"sv, "42 1000 2000 "sv, "42 1000 2000 3000"sv, "42,1000,2000"sv,
        "42 1000\t2000"sv, "42 1000 2000\n"sv, "42 1000 2000\0"sv}) {
    const Words words = {"key", "owner", numbers};
    EXPECT_TRUE(std::holds_alternative<ParseError>(ParseHoldSetFact(words))) << numbers;
  }
  const Words good = {"key", "owner", "42 1000 2000"};
  EXPECT_EQ(std::get<HoldSetFact>(ParseHoldSetFact(good)).held.hold, kHold);
  for (size_t size = 0; size < good.size(); ++size) {
    const Words fewer(good.begin(), good.begin() + static_cast<std::ptrdiff_t>(size));
    EXPECT_TRUE(std::holds_alternative<ParseError>(ParseHoldSetFact(fewer))) << size;
  }
}

// --- The details of LOCK.HELD: [SHARED | LIMIT] [WEIGHT w] [COUNT n] [LINGER ms] [CAP ms] [TAG
// text]

TEST(HeldDetails, SetOneFieldEach) {
  struct Case {
    Words details;
    Mode mode;
    Hold hold;
  };
  const std::string longest(64, '~');
  const auto with = [](auto change) {
    Hold hold = kHold;
    change(hold);
    return hold;
  };
  const auto count = [&](uint32_t n) { return with([n](Hold& hold) { hold.count = n; }); };
  const auto linger = [&](int64_t ms) {
    return with([ms](Hold& hold) { hold.linger = Millis{ms}; });
  };
  const auto weight = [&](uint32_t w) { return with([w](Hold& hold) { hold.weight = w; }); };
  const auto cap = [&](int64_t ms) {
    return with([ms](Hold& hold) { hold.cap = Instant{Millis{ms}}; });
  };
  const auto tag = [&](std::string_view text) {
    return with([text](Hold& hold) { hold.tag = text; });
  };
  const std::vector<Case> cases = {
      {{}, Mode::kExclusive, kHold},
      {{"SHARED"}, Mode::kShared, kHold},
      {{"LIMIT"}, Mode::kLimit, kHold},
      {{"COUNT", "2"}, Mode::kExclusive, count(2)},
      {{"COUNT", "4294967295"}, Mode::kExclusive, count(4294967295)},
      {{"LINGER", "1"}, Mode::kExclusive, linger(1)},
      {{"LINGER", kLast}, Mode::kExclusive, linger((int64_t{1} << 53) - 1)},
      {{"SHARED", "COUNT", "3"}, Mode::kShared, count(3)},
      {{"SHARED", "LINGER", "500"}, Mode::kShared, linger(500)},
      {{"LIMIT", "LINGER", "500"}, Mode::kLimit, linger(500)},
      {{"LIMIT", "WEIGHT", "2"}, Mode::kLimit, weight(2)},
      {{"LIMIT", "WEIGHT", "100000"}, Mode::kLimit, weight(kMaxLimit)},
      {{"CAP", "1"}, Mode::kExclusive, cap(1)},
      {{"CAP", kLast}, Mode::kExclusive, cap((int64_t{1} << 53) - 1)},
      {{"SHARED", "CAP", "500"}, Mode::kShared, cap(500)},
      {{"CAP", "2000"}, Mode::kExclusive, cap(2000)},
      {{"CAP", "1999"}, Mode::kExclusive, cap(1999)},  // servers do not compare it with the end
      {{"TAG", "a"}, Mode::kExclusive, tag("a")},
      {{"TAG", longest}, Mode::kExclusive, tag(longest)},
      {{"TAG", " two words "}, Mode::kExclusive, tag(" two words ")},
      {{"TAG", "TAG"}, Mode::kExclusive, tag("TAG")},
      {{"TAG", "SHARED"}, Mode::kExclusive, tag("SHARED")},
      {{"TAG", "ALSO"}, Mode::kExclusive, tag("ALSO")},  // only requests must not say that
      {{"LIMIT", "TAG", "7"}, Mode::kLimit, tag("7")},
  };
  for (const auto& [details, mode, hold] : cases) {
    SCOPED_TRACE(testing::PrintToString(details));
    const HeldWords words{.details = details};
    const auto fact = ParseHeld(words);
    ASSERT_TRUE(fact.has_value());
    EXPECT_EQ(fact->held.hold, hold);
    EXPECT_EQ(fact->held.mode, mode);
  }
}

// One word or two for each detail, in the order in which they are written.
const std::vector<Words> kDetailsInOrder = {{"LIMIT"},         {"WEIGHT", "4"}, {"COUNT", "9"},
                                            {"LINGER", "500"}, {"CAP", "3000"}, {"TAG", "t"}};

// Any of them may be missing, but for LIMIT where there is a weight.
TEST(HeldDetails, AnyMayBeMissing) {
  for (unsigned present = 0; present < 1U << kDetailsInOrder.size(); ++present) {
    const auto has = [present](unsigned detail) { return (present >> detail & 1) != 0; };
    HeldWords words;
    for (unsigned i = 0; i < kDetailsInOrder.size(); ++i) {
      if (!has(i)) continue;
      words.details.insert(words.details.end(), kDetailsInOrder[i].begin(),
                           kDetailsInOrder[i].end());
    }
    if (has(1) && !has(0)) {
      ExpectHeldRefused(words);
      continue;
    }
    SCOPED_TRACE(testing::PrintToString(words.details));
    const auto fact = ParseHeld(words);
    ASSERT_TRUE(fact.has_value());
    Hold expected = kHold;
    if (has(1)) expected.weight = 4;
    if (has(2)) expected.count = 9;
    if (has(3)) expected.linger = Millis{500};
    if (has(4)) expected.cap = Instant{Millis{3000}};
    if (has(5)) expected.tag = "t";
    EXPECT_EQ(fact->held.hold, expected);
    EXPECT_EQ(fact->held.mode, has(0) ? Mode::kLimit : Mode::kExclusive);
  }
}

TEST(HeldDetails, HaveOneOrder) {
  std::vector<size_t> order = {0, 1, 2, 3, 4, 5};
  int orders = 0;
  do {
    HeldWords words;
    for (const size_t i : order) {
      words.details.insert(words.details.end(), kDetailsInOrder[i].begin(),
                           kDetailsInOrder[i].end());
    }
    if (std::is_sorted(order.begin(), order.end())) {
      EXPECT_TRUE(ParseHeld(words).has_value());
    } else {
      ExpectHeldRefused(words);
    }
    ++orders;
  } while (std::next_permutation(order.begin(), order.end()));
  EXPECT_EQ(orders, 720);
}

TEST(HeldDetails, WordsAreCaseInsensitiveButTheTagIsNot) {
  const HeldWords words{.details = {"lImIt", "weight", "2", "cOuNt", "9", "linger", "500", "Cap",
                                    "3000", "tag", "aB"}};
  const auto fact = ParseHeld(words);
  ASSERT_TRUE(fact.has_value());
  EXPECT_EQ(fact->held.hold.weight, 2);
  EXPECT_EQ(fact->held.hold.count, 9);
  EXPECT_EQ(fact->held.hold.cap, Instant{Millis{3000}});
  EXPECT_EQ(fact->held.hold.tag, "aB");
}

// Writer and parser share one table of keywords.
TEST(HeldDetails, ParserAcceptsWrittenKeywords) {
  EXPECT_EQ(WordFor(Mode::kExclusive), "");
  EXPECT_EQ(WordFor(Mode::kShared), "SHARED");
  EXPECT_EQ(WordFor(Mode::kLimit), "LIMIT");
  for (const Mode mode : {Mode::kShared, Mode::kLimit}) {
    const HeldWords words{.details = {WordFor(mode), kCountWord, "7", kLingerWord, "8", kCapWord,
                                      "9", kTagWord, "text"}};
    const auto fact = ParseHeld(words);
    ASSERT_TRUE(fact.has_value());
    EXPECT_EQ(fact->held.mode, mode);
    EXPECT_EQ(fact->held.hold.count, 7);
    EXPECT_EQ(fact->held.hold.linger, Millis{8});
    EXPECT_EQ(fact->held.hold.cap, Instant{Millis{9}});
    EXPECT_EQ(fact->held.hold.tag, "text");
  }
  const HeldWords heavy{.details = {WordFor(Mode::kLimit), kWeightWord, "6"}};
  EXPECT_EQ(ParseHeld(heavy)->held.hold.weight, 6);
}

// Redundant words are never written, so they are not accepted: a fact has exactly one spelling.
TEST(HeldDetails, RefuseAnyOtherSpelling) {
  const std::string too_long(65, 't');
  for (const Words& details : std::vector<Words>{
           {""},
           {"EXCLUSIVE"},
           {"SHARED", "SHARED"},
           {"SHARED", "LIMIT"},
           {"LIMIT", "SHARED"},
           {"LIMIT", "3"},
           {"LIMIT", "LIMIT"},
           {"SHARE"},
           {"SHARED\0"sv},
           {"COUNT"},
           {"COUNT", "0"},
           {"COUNT", "1"},
           {"COUNT", "4294967296"},
           {"COUNT", "4294967298"},
           {"COUNT", "2", "COUNT", "2"},
           {"COUNT", "SHARED"},
           {"COUNT", "2", "SHARED"},
           {"LINGER"},
           {"LINGER", "0"},
           {"LINGER", kBeyond},
           {"LINGER", "9223372036854775807"},
           {"LINGER", "5", "LINGER", "5"},
           {"LINGER", "5", "COUNT", "2"},
           {"LINGER", "5", "SHARED"},
           {"SHARED", "LINGER", "5", "COUNT", "2"},
           {"SHARED", "COUNT", "2", "LINGER", "5", "5"},
           {"SHARED", "COUNT", "2", "LINGER"},
           {"SESSION"},
           {"REENTRANT"},
           {"2"},
           {"WEIGHT"},
           {"WEIGHT", "2"},
           {"SHARED", "WEIGHT", "2"},
           {"LIMIT", "WEIGHT"},
           {"LIMIT", "WEIGHT", "0"},
           {"LIMIT", "WEIGHT", "1"},
           {"LIMIT", "WEIGHT", "100001"},
           {"LIMIT", "WEIGHT", "4294967298"},
           {"LIMIT", "WEIGHT", "2", "WEIGHT", "2"},
           {"CAP"},
           {"CAP", "0"},
           {"CAP", kBeyond},
           {"CAP", "9223372036854775807"},
           {"CAP", "5", "CAP", "5"},
           {"MAXHOLD", "5"},
           {"TAG"},
           {"TAG", ""},
           {"TAG", too_long},
           {"TAG", "a\nb"},
           {"TAG", "a\0b"sv},
           {"TAG", "\x7f"},
           {"TAG", "\x1f"},
           {"TAG", "\xc3\xa4"},
           {"TAG", "a", "b"},
           {"TAG", "a", "TAG", "a"},
           {"TAG", "a", "SHARED"},
           {"NOTIFY", "c", "i"},
       }) {
    ExpectHeldRefused({.details = details});
  }
  for (const std::string& bad : kBadNumbers) {
    ExpectHeldRefused({.details = {"COUNT", bad}});
    ExpectHeldRefused({.details = {"LINGER", bad}});
    ExpectHeldRefused({.details = {"LIMIT", "WEIGHT", bad}});
    ExpectHeldRefused({.details = {"CAP", bad}});
  }
}

TEST(HeldDetails, DoNotMaskInvalidHold) {
  ExpectHeldRefused({.owner = "", .details = {"SHARED"}});
  ExpectHeldRefused({.token = "0", .details = {"SHARED"}});
  ExpectHeldRefused({.end = "", .details = {"SHARED"}});
  ExpectHeldRefused({.end = std::string(kBeyond), .details = {"LINGER", "5"}});
  ExpectHeldRefused({.owner = "", .details = {"TAG", "t"}});
  ExpectHeldRefused({.token = "0", .details = {"LIMIT", "WEIGHT", "2"}});
  ExpectHeldRefused({.end = std::string(kBeyond), .details = {"CAP", "5"}});
}

// --- ENDED --------------------------------------------------------------------------------------

TEST(HoldEndedFact, ParsesOwner) {
  const std::string longest(256, '\xff');
  for (const std::string_view word : {"ENDED", "ended", "EnDeD"}) {
    for (const std::string_view owner :
         {"o"sv, "\0"sv, " "sv, "SHARED"sv, std::string_view(longest)}) {
      for (const std::string_view key : {""sv, "key"sv, "\0"sv, "\r\n"sv}) {
        const auto fact = ParseEnded({word, key, owner});
        ASSERT_TRUE(fact.has_value());
        EXPECT_EQ(fact->key, key);
        EXPECT_EQ(fact->ended.owner, Owner{owner});
        EXPECT_EQ(fact->ended.how, Loss::kExpired);
      }
    }
  }
}

TEST(HoldEndedFact, ParsesOptionalReason) {
  for (const std::string_view word : {"UNDELIVERED", "Undelivered"}) {
    const auto fact = ParseEnded({"ENDED", "key", "owner", word});
    ASSERT_TRUE(fact.has_value()) << word;
    EXPECT_EQ(fact->ended.how, Loss::kUndelivered) << word;
  }
}

TEST(HoldEndedFact, EveryReasonRoundTrips) {
  EXPECT_EQ(WordFor(Loss::kUndelivered), "UNDELIVERED");
  EXPECT_EQ(WordFor(Loss::kExpired), "") << "goes without saying";
}

TEST(HoldEndedFact, RefusesInvalidWords) {
  ExpectRefused({"ENDED"});
  ExpectRefused({"ENDED", "key"});
  ExpectRefused({"ENDED", "key", ""});
  ExpectRefused({"ENDED", "key", std::string(257, 'o')});
  ExpectRefused({"ENDED", "key", "owner", "owner"});
  ExpectRefused({"ENDED", "key", "owner", ""});
  ExpectRefused({"ENDED", "key", "owner", "EXPIRED"});
  ExpectRefused({"ENDED", "key", "owner", "SESSION"});
  ExpectRefused({"ENDED", "key", "owner", "UNDELIVERED\0"sv});
  ExpectRefused({"ENDED", "key", "owner", "UNDELIVERED", "UNDELIVERED"});
  ExpectRefused({"ENDED", "key", "owner", "42", "1000", "2000"});
  for (const std::string_view word :
       {""sv, "END"sv, "ENDED\0"sv, "RELEASED"sv, "HELD"sv, "FLOOR"sv}) {
    ExpectRefused({word, "key", "owner"});
  }
}

// --- EXPIRED ------------------------------------------------------------------------------------

std::optional<Fact> ParseAny(const Words& words) {
  const auto parsed = ParseFact(words);
  const auto* fact = std::get_if<Fact>(&parsed);
  return fact == nullptr ? std::nullopt : std::optional(*fact);
}

TEST(HoldsExpiredFact, ParsesTime) {
  for (const auto& [word, before] :
       {std::pair("0"sv, kMinInstant), std::pair("1000"sv, Instant{Millis{1000}}),
        std::pair(kLast, kMaxInstant)}) {
    const auto fact = ParseAny({"Expired", "key", word});
    ASSERT_TRUE(fact.has_value() && std::holds_alternative<HoldsExpiredFact>(*fact)) << word;
    EXPECT_EQ(std::get<HoldsExpiredFact>(*fact).key, "key");
    EXPECT_EQ(std::get<HoldsExpiredFact>(*fact).expired.before, before);
  }
}

TEST(HoldsExpiredFact, RefusesInvalidWords) {
  ExpectRefused({"EXPIRED"});
  ExpectRefused({"EXPIRED", "key"});
  ExpectRefused({"EXPIRED", "key", kBeyond});
  ExpectRefused({"EXPIRED", "key", "1000", "owner"});
  for (const std::string& bad : kBadNumbers) ExpectRefused({"EXPIRED", "key", bad});
}

// --- SESSION ------------------------------------------------------------------------------------

TEST(SessionsEndedFact, ParsesTimeAndOwners) {
  const std::string longest(256, '\xff');
  for (const Words& owners :
       std::vector<Words>{{"o"}, {"SESSION"}, {"a", "\0"sv, longest}, {"same", "same"}}) {
    Words words = {"session", "key", "1000"};
    words.insert(words.end(), owners.begin(), owners.end());
    const auto fact = ParseAny(words);
    ASSERT_TRUE(fact.has_value() && std::holds_alternative<SessionsEndedFact>(*fact));
    const auto& session = std::get<SessionsEndedFact>(*fact);
    EXPECT_EQ(session.key, "key");
    EXPECT_EQ(session.ended().at, Instant{Millis{1000}});
    ASSERT_EQ(session.ended().owners.size(), owners.size());
    for (size_t i = 0; i < owners.size(); ++i) {
      EXPECT_EQ(session.ended().owners[i], Owner{owners[i]});
    }
  }
}

TEST(SessionsEndedFact, RefusesInvalidWords) {
  ExpectRefused({"SESSION"});
  ExpectRefused({"SESSION", "key"});
  ExpectRefused({"SESSION", "key", "1000"});
  ExpectRefused({"SESSION", "key", kBeyond, "owner"});
  ExpectRefused({"SESSION", "key", "1000", ""});
  ExpectRefused({"SESSION", "key", "1000", "owner", std::string(257, 'o')});
  for (const std::string& bad : kBadNumbers) ExpectRefused({"SESSION", "key", bad, "owner"});
}

// --- FLOOR --------------------------------------------------------------------------------------

TEST(FloorFact, ParsesToken) {
  EXPECT_EQ(ParseFloor({"FLOOR", "1700000000000042"}), Token{1'700'000'000'000'042});
  EXPECT_EQ(ParseFloor({"floor", "1"}), kMinToken);
  EXPECT_EQ(ParseFloor({"FlOoR", kLast}), kMaxToken);
}

TEST(FloorFact, RefusesInvalidWords) {
  ExpectRefused({"FLOOR", "0"});
  ExpectRefused({"FLOOR", kBeyond});
  ExpectRefused({"FLOOR", "9223372036854775807"});
  for (const std::string& bad : kBadNumbers) ExpectRefused({"FLOOR", bad});
  // Holds have a command of their own.
  ExpectRefused({"HELD", "key", "owner", "42", "1000", "2000"});
  ExpectRefused({"HELD", "key", "owner", "42 1000 2000"});
  ExpectRefused({"FLOORS", "5"});
  ExpectRefused({"5", "FLOOR"});
}

// A fact has a fixed number of words: only servers write it, so the parser need not be lenient.
TEST(AnyFact, RefusesWrongNumberOfWords) {
  ExpectRefused({});
  ExpectHeldRefused({.details = {"7"}});
  ExpectRefused({"FLOOR"});
  ExpectRefused({"FLOOR", "5", "5"});
  ExpectRefused({"FLOOR", "key", "owner", "42", "1000", "2000"});
}

// The refusal does not repeat bytes of the input.
TEST(AnyFact, RefusalIsOneFixedMessage) {
  ExpectRefused({"\r\n+OK\r\n"sv});
  ExpectRefused({"ENDED", "\n", "\n", "\n"});
  ExpectHeldRefused({.key = "\n", .owner = "\n", .token = "\n", .details = {"\n"}});
  ExpectRefused({std::string(size_t{10} << 20, '\n')});
}

}  // namespace
}  // namespace turnstile
