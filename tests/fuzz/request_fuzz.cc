// libFuzzer: every parser of the core on any arguments.
//
// Input: the first byte picks the separator, the second the longest lease; what follows, if there
// is anything, is cut into arguments at the separator. More is checked than "no crash": an accepted
// request is in its ranges and says the same when written in another way; a refusal is one
// printable line.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
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

void CheckOwner(Owner owner, const Words& words) {
  Require(!owner.bytes.empty() && owner.bytes.size() <= kMaxOwnerBytes,
          "an owner has 1..256 bytes");
  Require(owner.bytes.data() == words[0].data() && owner.bytes.size() == words[0].size(),
          "the owner is the first argument");
}

template <typename Request>
void CheckLeaseRequest(Parsed<Request> (*parse)(Args, const Limits&), const Words& words,
                       const Limits& limits) {
  const Parsed<Request> parsed = parse(words, limits);
  const Request* request = Accepted(parsed);
  if (request == nullptr) return;
  CheckOwner(request->owner, words);
  Require(request->lease >= Millis{1} && request->lease <= limits.max_lease, "a lease is in range");
  constexpr bool kMayWait = std::is_same_v<Request, AcquireRequest>;
  Require(words.size() == 3 || (kMayWait && words.size() == 5), "an owner, options with a value");

  const std::string millis = std::to_string(request->lease.count());
  std::vector<std::string> options;
  for (size_t i = 1; i < words.size(); i += 2) options.push_back(SwapCase(words[i]));
  Words swapped = words;
  for (size_t i = 0; i < options.size(); ++i) swapped[2 * i + 1] = options[i];
  for (const Words& same : {Words{words[0], "PX", millis}, swapped}) {
    const Parsed<Request> again = parse(same, limits);
    const Request* equal = Accepted(again);
    Require(equal != nullptr && equal->owner == request->owner && equal->lease == request->lease,
            "another spelling means the same");
  }
  for (const std::string_view option_again : {"PX", "EX"}) {
    Words twice = words;
    twice.push_back(option_again);
    twice.push_back("1");
    Require(Accepted(parse(twice, limits)) == nullptr, "a lease is given once");
  }
}

void CheckRelease(const Words& words) {
  const auto parsed = ParseRelease(words);
  const ReleaseRequest* request = Accepted(parsed);
  const bool valid = words.size() == 1 && !words[0].empty() && words[0].size() <= kMaxOwnerBytes;
  Require((request != nullptr) == valid, "a release is one owner");
  if (request != nullptr) CheckOwner(request->owner, words);
}

void CheckFence(const Words& words) {
  const auto parsed = ParseFence(words);
  const FenceRequest* request = Accepted(parsed);
  if (words.empty()) Require(request != nullptr && !request->token.has_value(), "a bare fence");
  if (words.empty() || request == nullptr) return;
  Require(words.size() == 1 && request->token.has_value(), "one argument is a token");
  Require(*request->token >= kMinToken && *request->token <= kMaxToken, "a token is in range");
  Require(std::to_string(request->token->value) == words[0], "a number has one spelling");
}

void CheckFact(const Words& words) {
  const auto parsed = ParseFact(words);
  const Fact* fact = Accepted(parsed);
  if (fact == nullptr) return;
  std::vector<std::string> spelled;
  if (const auto* floor = std::get_if<FloorFact>(fact)) {
    Require(floor->token >= kMinToken && floor->token <= kMaxToken, "a floor is in range");
    spelled = {"FLOOR", std::to_string(floor->token.value)};
  } else {
    const auto& held = std::get<HeldFact>(*fact);
    const Hold hold = held.held.hold;
    Require(IsWellFormed(hold), "a held fact is well-formed");
    spelled = {"HELD",
               std::string(held.key),
               std::string(hold.owner.bytes),
               std::to_string(hold.token.value),
               std::to_string(hold.since.time_since_epoch().count()),
               std::to_string(hold.end.time_since_epoch().count())};
  }
  // But for the case of its first word a fact has one spelling.
  Require(spelled.size() == words.size(), "a fact has so many words");
  Require(spelled[0] == words[0] ||
              std::equal(words[0].begin(), words[0].end(), spelled[0].begin(), spelled[0].end(),
                         [](char a, char b) { return (a & ~0x20) == b; }),
          "a fact begins with its name");
  Require(std::equal(words.begin() + 1, words.end(), spelled.begin() + 1), "a fact says it all");
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

  CheckLeaseRequest<AcquireRequest>(ParseAcquire, words, limits);
  CheckLeaseRequest<TouchRequest>(ParseTouch, words, limits);
  CheckRelease(words);
  CheckFence(words);
  CheckFact(words);
  for (const std::string_view word : words) CheckPieces(word);
  return 0;
}
