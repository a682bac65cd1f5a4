// libFuzzer: every parser of the core on any arguments.
//
// Input: the first byte picks the separator, the second the longest lease; what follows, if there
// is anything, is cut into arguments at the separator. They are parsed as they are and once more
// behind a key. More is checked than "no crash": an accepted request is in its ranges and says the
// same when written in another way; a refusal is one printable line.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "core/fact.h"
#include "core/request.h"

namespace turnstile {
namespace {

using Words = std::vector<std::string_view>;

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "broken: %s\n", what);
  std::abort();
}

Words Split(std::string_view bytes, char separator) {
  Words words;
  while (true) {
    const size_t at = bytes.find(separator);
    words.push_back(bytes.substr(0, at));
    if (at == std::string_view::npos) return words;
    bytes.remove_prefix(at + 1);
  }
}

// The same letters in the other case.
std::string SwapCase(std::string_view text) {
  std::string swapped(text);
  for (char& c : swapped) {
    if ((c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z')) c = static_cast<char>(c ^ 0x20);
  }
  return swapped;
}

std::string Upper(std::string_view text) {
  std::string upper(text);
  for (char& c : upper) {
    if (c >= 'a' && c <= 'z') c = static_cast<char>(c ^ 0x20);
  }
  return upper;
}

// The request, if there is one; what is not one must be a proper error.
template <typename Request>
const Request* Accepted(const Parsed<Request>& parsed) {
  if (const auto* error = std::get_if<ParseError>(&parsed)) {
    const std::string& text = error->text;
    Require(text.starts_with("ERR "), "an error begins with ERR");
    Require(text.size() > 10 && text.size() < 400, "an error has the length of a line");
    Require(std::all_of(text.begin(), text.end(), [](char c) { return c >= ' ' && c <= '~'; }),
            "an error is printable");
    return nullptr;
  }
  return std::get_if<Request>(&parsed);
}

// The same view, not only the same bytes: a request refers to its arguments.
bool IsArgument(std::string_view view, std::string_view argument) {
  return view.data() == argument.data() && view.size() == argument.size();
}

void CheckOwner(Owner owner, const Words& words) {
  Require(!owner.bytes.empty() && owner.bytes.size() <= kMaxOwnerBytes,
          "an owner has 1..256 bytes");
  Require(IsArgument(owner.bytes, words[1]), "the owner is the second argument");
}

void CheckAlso(Keys also, const Words& words) {
  Require(also.size() <= kMaxAlso, "no more keys than allowed");
  if (also.empty()) return;
  const auto first = std::find_if(words.begin(), words.end(), [&](std::string_view word) {
    return IsArgument(also.front(), word);
  });
  Require(static_cast<size_t>(words.end() - first) >= also.size(), "keys are arguments");
  std::vector<std::string_view> keys(also.begin(), also.end());
  keys.push_back(words[0]);
  std::sort(keys.begin(), keys.end());
  Require(std::adjacent_find(keys.begin(), keys.end()) == keys.end(), "each key is named once");
}

// The options of a request, one spelling of many. Strings, because numbers are made here.
using Option = std::vector<std::string>;

Option AlsoOption(Keys also) {
  Option option = {"also", std::to_string(also.size())};
  option.insert(option.end(), also.begin(), also.end());
  return option;
}

std::vector<Option> OptionsOf(const AcquireRequest& request) {
  std::vector<Option> options = {{"px", std::to_string(request.lease.count())}};
  if (request.wait > Millis{0} || request.max_line > 0) {
    options.push_back({"wait", std::to_string(request.wait.count())});
  }
  if (request.max_line > 0) options.push_back({"maxline", std::to_string(request.max_line)});
  if (request.mode == Mode::kShared) options.push_back({"shared"});
  if (request.mode == Mode::kLimit) options.push_back({"limit", std::to_string(request.limit)});
  if (request.weight > 1) options.push_back({"weight", std::to_string(request.weight)});
  if (request.reentrant) options.push_back({"reentrant"});
  if (request.session) options.push_back({"session"});
  if (request.linger > Millis{0}) {
    options.push_back({"linger", std::to_string(request.linger.count())});
  }
  if (request.max_hold > Millis{0}) {
    options.push_back({"maxhold", std::to_string(request.max_hold.count())});
  }
  if (!request.tag.empty()) options.push_back({"tag", std::string(request.tag)});
  if (request.notify.has_value()) {
    options.push_back(
        {"notify", std::string(request.notify->channel), std::string(request.notify->id)});
  }
  if (request.floor.has_value()) options.push_back({"floor", std::to_string(request.floor->value)});
  if (!request.also.empty()) options.push_back(AlsoOption(request.also));
  return options;
}

std::vector<Option> OptionsOf(const TouchRequest& request) {
  std::vector<Option> options = {{"px", std::to_string(request.lease.count())}};
  if (!request.also.empty()) options.push_back(AlsoOption(request.also));
  return options;
}

std::vector<Option> OptionsOf(const ReleaseRequest& request) {
  if (request.also.empty()) return {};
  return {AlsoOption(request.also)};
}

bool IsPrintableText(std::string_view text, char first) {
  return std::all_of(text.begin(), text.end(), [first](char c) { return c >= first && c <= '~'; });
}

bool IsAnnouncement(std::string_view text) { return Upper(text) == kAlso; }

void CheckRanges(const AcquireRequest& request, const Limits& limits) {
  Require(request.lease >= Millis{1} && request.lease <= limits.max_lease, "a lease is in range");
  Require(request.wait >= Millis{0} && request.wait <= kMaxWait, "a wait is in range");
  Require(request.linger >= Millis{0} && request.linger <= limits.max_lease,
          "a linger is in range");
  Require(request.limit >= 1 && request.limit <= kMaxLimit, "a limit is in range");
  Require(request.mode == Mode::kLimit ? !request.reentrant : request.limit == 1,
          "a limit has its mode");
  Require(request.weight >= 1 && request.weight <= request.limit, "a weight is within the limit");
  Require(request.max_line <= kMaxLine, "a line is in range");
  Require(request.max_hold == Millis{0} ||
              (request.max_hold >= request.lease && request.max_hold <= kMaxHold),
          "a cap is in range");
  Require(request.tag.size() <= kMaxTagBytes && IsPrintableText(request.tag, ' ') &&
              !IsAnnouncement(request.tag),
          "a tag is printable");
  if (!request.notify.has_value()) return;
  const auto& [channel, id] = *request.notify;
  Require(!channel.empty() && channel.size() <= kMaxChannelBytes && !IsAnnouncement(channel),
          "a channel has its size");
  Require(!id.empty() && id.size() <= kMaxNotifyIdBytes && IsPrintableText(id, '!') &&
              !IsAnnouncement(id),
          "an id is printable, without a space");
}

void CheckRanges(const TouchRequest& request, const Limits& limits) {
  Require(request.lease >= Millis{1} && request.lease <= limits.max_lease, "a lease is in range");
}

void CheckRanges(const ReleaseRequest& /*request*/, const Limits& /*limits*/) {}

// `parse` takes the words of a command and gives a request with an owner and other keys.
template <typename Request, typename Parse>
void CheckOwned(Parse parse, const Words& words, const Limits& limits) {
  const Parsed<Request> parsed = parse(words);
  const Request* request = Accepted(parsed);
  if (request == nullptr) return;
  CheckOwner(request->owner, words);
  CheckAlso(request->also, words);
  CheckRanges(*request, limits);

  const std::vector<Option> options = OptionsOf(*request);
  for (const bool backwards : {false, true}) {
    std::vector<Option> order = options;
    if (backwards) std::reverse(order.begin(), order.end());
    Words same = {words[0], words[1]};
    for (const Option& option : order) same.insert(same.end(), option.begin(), option.end());
    const Parsed<Request> again = parse(same);
    const Request* equal = Accepted(again);
    Require(equal != nullptr && equal->owner == request->owner && OptionsOf(*equal) == options,
            "another spelling means the same");
  }
  for (const Option& option : options) {
    Words twice = words;
    twice.insert(twice.end(), option.begin(), option.end());
    Require(Accepted(parse(twice)) == nullptr, "an option is given once");
  }
}

void CheckFence(const Words& words) {
  const auto parsed = ParseFence(words);
  const FenceRequest* request = Accepted(parsed);
  if (words.size() == 1) Require(request != nullptr && !request->token.has_value(), "a bare fence");
  if (words.size() == 1 || request == nullptr) return;
  Require(request->token.has_value(), "a second argument is a token");
  if (words.size() > 2) {
    Require(Upper(words[2]) == kThen && request->then.size() == words.size() - 3,
            "all behind THEN is the command");
    Require(IsArgument(request->then.front(), words[3]), "as it came");
  }
  Require(*request->token <= kMaxToken, "a token, or 0, is in range");
  Require(std::to_string(request->token->value) == words[1], "a number has one spelling");
}

void CheckList(const Words& words) {
  const auto parsed = ParseList(words);
  const ListRequest* request = Accepted(parsed);
  if (words.empty()) Require(request != nullptr, "a bare list");
  if (request == nullptr) return;
  Require(request->count >= 1 && request->count <= kMaxListCount, "a count is in range");
  Require(!request->cursor.empty() && request->cursor.size() <= 20 &&
              request->cursor.find_first_not_of("0123456789") == std::string_view::npos,
          "a cursor is digits");
  Require(words.size() % 2 == 0 && words.size() <= 6, "each option has a value, and comes once");
}

void CheckTop(const Words& words) {
  const auto parsed = ParseTop(words);
  const TopRequest* request = Accepted(parsed);
  if (words.empty()) Require(request != nullptr, "a bare top");
  if (words.empty() || request == nullptr) return;
  Require(request->most >= 1 && request->most <= static_cast<size_t>(kMaxTop), "in range");
  Require(words.size() == 1 && std::to_string(request->most) == words[0], "one number");
}

void CheckInfo(const Words& words) {
  const auto parsed = ParseInfo(words);
  const InfoRequest* request = Accepted(parsed);
  Require((request != nullptr) == (words.size() == 1), "one argument, which may be any");
  Require(request == nullptr || IsArgument(request->key, words[0]), "it is the key");
}

// A fact as it is written, and which of its words are keywords.
struct Spelling {
  std::vector<std::string> words;
  std::vector<size_t> keywords;

  void AddKeyword(std::string_view word) {
    keywords.push_back(words.size());
    words.emplace_back(word);
  }

  void AddDetails(const HoldSet& held) {
    if (held.mode != Mode::kExclusive) AddKeyword(WordFor(held.mode));
    if (held.hold.weight != 1) {
      AddKeyword(kWeightWord);
      words.push_back(std::to_string(held.hold.weight));
    }
    if (held.hold.count != 1) {
      AddKeyword(kCountWord);
      words.push_back(std::to_string(held.hold.count));
    }
    if (held.hold.linger != Millis{0}) {
      AddKeyword(kLingerWord);
      words.push_back(std::to_string(held.hold.linger.count()));
    }
    if (held.hold.cap.has_value()) {
      AddKeyword(kCapWord);
      words.push_back(std::to_string(held.hold.cap->time_since_epoch().count()));
    }
    if (!held.hold.tag.empty()) {
      AddKeyword(kTagWord);
      words.emplace_back(held.hold.tag);
    }
  }

  // But for the case of its keywords a fact has one spelling.
  void Compare(const Words& given) const {
    Require(words.size() == given.size(), "a fact has so many words");
    for (size_t i = 0; i < given.size(); ++i) {
      const bool keyword = std::find(keywords.begin(), keywords.end(), i) != keywords.end();
      Require(given[i] == words[i] || (keyword && Upper(given[i]) == words[i]),
              "a fact says it all");
    }
  }
};

std::string Digits(Instant moment) { return std::to_string(moment.time_since_epoch().count()); }

void CheckFact(const Words& words) {
  const auto parsed = ParseFact(words);
  const Fact* fact = Accepted(parsed);
  if (fact == nullptr) return;
  Spelling spelled;
  if (const auto* floor = std::get_if<FloorFact>(fact)) {
    Require(floor->token >= kMinToken && floor->token <= kMaxToken, "a floor is in range");
    spelled = {{"FLOOR", std::to_string(floor->token.value)}, {0}};
  } else if (const auto* ended = std::get_if<HoldEndedFact>(fact)) {
    const std::string owner(ended->ended.owner.bytes);
    Require(!owner.empty() && owner.size() <= kMaxOwnerBytes, "an owner has its size");
    spelled = {{"ENDED", std::string(ended->key), owner}, {0}};
    if (const auto how = WordFor(ended->ended.how); !how.empty()) spelled.AddKeyword(how);
  } else if (const auto* expired = std::get_if<HoldsExpiredFact>(fact)) {
    const Instant before = expired->expired.before;
    Require(before >= kMinInstant && before <= kMaxInstant, "a moment is in range");
    spelled = {{"EXPIRED", std::string(expired->key), Digits(before)}, {0}};
  } else {
    const auto& session = std::get<SessionsEndedFact>(*fact);
    Require(session.at >= kMinInstant && session.at <= kMaxInstant, "a moment is in range");
    spelled = {{"SESSION", std::string(session.key), Digits(session.at)}, {0}};
    Require(!session.owners.empty(), "a session had an owner");
    for (const Owner& owner : session.owners) {
      Require(!owner.bytes.empty() && owner.bytes.size() <= kMaxOwnerBytes,
              "an owner has its size");
      spelled.words.emplace_back(owner.bytes);
    }
  }
  spelled.Compare(words);
}

void CheckHeld(const Words& words) {
  const auto parsed = ParseHoldSetFact(words);
  const HoldSetFact* fact = Accepted(parsed);
  if (fact == nullptr) return;
  const Hold& hold = fact->held.hold;
  Require(IsWellFormed(hold), "a held fact is well-formed");
  Spelling spelled{{std::string(fact->key), std::string(hold.owner.bytes),
                    std::string(HoldNumbers(hold).text())},
                   {}};
  spelled.AddDetails(fact->held);
  spelled.Compare(words);
}

void CheckPieces(std::string_view word) {
  const std::optional<int64_t> number = ParseDigits(word);
  Require(!number.has_value() || std::to_string(*number) == word, "a number has one spelling");
  Require(IsKeyword(word, SwapCase(word)), "a word is itself in the other case");
  const std::string quoted = Quoted(word);
  Require(quoted.front() == '"' && quoted.size() < 40 * 4 + 2 + 40, "a quotation is short");
}

}  // namespace
}  // namespace turnstile

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace turnstile;  // NOLINT(google-build-using-namespace)
  constexpr std::array<int64_t, 8> kMaxLeases = {
      1, 999, 1000, 1500, 60000, 86'400'000, 315'360'000'000, INT64_MAX};
  if (size < 2) return 0;
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const Limits limits{.max_lease = Millis{kMaxLeases.at(data[1] % kMaxLeases.size())}};
  const Words words = size == 2 ? Words{} : Split(bytes.substr(2), bytes[0]);

  Words behind_a_key = {"key"};
  behind_a_key.insert(behind_a_key.end(), words.begin(), words.end());
  for (const Words& command : {words, behind_a_key}) {
    CheckOwned<AcquireRequest>([&](Args args) { return ParseAcquire(args, limits); }, command,
                               limits);
    CheckOwned<TouchRequest>([&](Args args) { return ParseTouch(args, limits); }, command, limits);
    CheckOwned<ReleaseRequest>([](Args args) { return ParseRelease(args); }, command, limits);
    CheckFence(command);
    CheckInfo(command);
  }
  CheckList(words);
  CheckTop(words);
  CheckFact(words);
  CheckHeld(words);
  for (const std::string_view word : words) CheckPieces(word);
  return 0;
}
