#include "core/request.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

namespace turnstile {
namespace {

using Options = std::vector<std::string_view>;

bool IsDigits(std::string_view text) {
  return !text.empty() &&
         std::all_of(text.begin(), text.end(), [](char c) { return c >= '0' && c <= '9'; });
}

constexpr std::string_view kAlsoGrammar = "ALSO numkeys key [key ...]";

// When a request lacks what first attempts most often lack, the error shows a form that works.
constexpr std::string_view kAcquireUsage =
    "LOCK.ACQUIRE key owner PX milliseconds, for example LOCK.ACQUIRE table:12 7d3f9a1c PX 60000";
constexpr std::string_view kReleaseUsage =
    "LOCK.RELEASE key owner, for example LOCK.RELEASE table:12 7d3f9a1c";
constexpr std::string_view kTouchUsage =
    "LOCK.TOUCH key owner PX milliseconds, for example LOCK.TOUCH table:12 7d3f9a1c PX 60000";
constexpr std::string_view kFenceUsage =
    "LOCK.FENCE key [token [THEN command [arg ...]]], for example LOCK.FENCE table:12";
constexpr std::string_view kInfoUsage = "LOCK.INFO key, for example LOCK.INFO table:12";

constexpr std::string_view kMaxLeaseSetting = "turnstile.max-lease-ms";

// Reads arguments from left to right. The first error is kept, and after it nothing is left to
// read, so a parser need not check after every step and reports the error once, in Finish.
class Reader {
 public:
  // `usage`: the form to show if a required argument is missing.
  explicit Reader(Args args, std::string_view usage = "") : rest_(args), usage_(usage) {}

  bool AtEnd() const { return rest_.empty(); }

  bool NextIsNumber() const { return !AtEnd() && IsDigits(rest_.front()); }

  bool TakeKeyword(std::string_view keyword) {
    if (AtEnd() || !IsKeyword(rest_.front(), keyword)) return false;
    rest_ = rest_.subspan(1);
    return true;
  }

  // The key that every request begins with.
  std::string_view TakeKey() {
    if (AtEnd()) FailWithUsage("the key is missing");
    return Take("the key");
  }

  Token TakeToken(std::string_view what, Token least = kMinToken) {
    return Token{static_cast<uint64_t>(TakeNumber(what, static_cast<int64_t>(least.value),
                                                  static_cast<int64_t>(kMaxToken.value)))};
  }

  Args TakeRest() { return std::exchange(rest_, {}); }

  Owner TakeOwner() {
    if (AtEnd()) FailWithUsage("the owner is missing");
    const std::string_view bytes = Take("the owner");
    if (bytes.empty() || bytes.size() > kMaxOwnerBytes) FailOnOwner(bytes.size());
    return Owner{bytes};
  }

  // A number from `least` to `most`. `what` names it in messages, and `setting` names the setting
  // that limits it.
  int64_t TakeNumber(std::string_view what, int64_t least, int64_t most,
                     std::string_view setting = "") {
    const std::string_view text = Take("the number after ", what);
    const auto number = ParseDigits(text);
    if (number.has_value() && *number >= least && *number <= most) return *number;
    FailOnNumber(what, least, most, setting, text);
    return least;
  }

  std::string_view TakeText(std::string_view what) { return Take(what); }

  // A cursor that the server itself returned: an unsigned 64-bit number.
  std::string_view TakeCursor() {
    constexpr size_t kMostDigits = 20;
    const std::string_view text = Take("the number after CURSOR");
    const bool leads_with_zero = text.size() > 1 && text.front() == '0';
    if (!IsDigits(text) || leads_with_zero || text.size() > kMostDigits) {
      Fail("CURSOR must be 0 or the cursor that the previous call returned, not " + Quoted(text));
    }
    return text;
  }

  Keys TakeKeys(size_t count) {
    if (rest_.size() < count) {
      Fail("syntax error: ALSO needs " + std::to_string(count) + " keys, but only " +
           std::to_string(rest_.size()) + " arguments follow");
      return {};
    }
    const Keys keys = rest_.subspan(0, count);
    rest_ = rest_.subspan(count);
    return keys;
  }

  void Fail(std::string_view why) {
    if (failed()) return;
    error_ = "ERR ";
    error_ += why;
    rest_ = {};
  }

  [[gnu::cold]] void FailWithUsage(std::string_view why) {
    Fail(std::string(why) + ": " + std::string(usage_));
  }

  // `expected`: the options that are allowed here.
  void FailOnUnknown(const Options& expected) {
    std::string text;
    for (size_t i = 0; i < expected.size(); ++i) {
      if (i > 0) text += i + 1 < expected.size() ? ", " : " or ";
      text += expected[i];
    }
    Fail("syntax error at " + Quoted(rest_.front()) + ": expected " +
         (text.empty() ? "nothing more" : text));
  }

  template <typename Request>
  Parsed<Request> Finish(const Request& request) {
    if (!AtEnd()) FailOnUnknown({});
    if (failed()) return ParseError{std::move(error_)};
    return request;
  }

 private:
  bool failed() const { return !error_.empty(); }

  // Error messages are built outside the path of valid requests.
  [[gnu::cold]] void FailOnMissing(std::string_view what, std::string_view which) {
    Fail("syntax error: " + std::string(what) + std::string(which) + " is missing");
  }
  [[gnu::cold]] void FailOnOwner(size_t size) {
    Fail("the owner must be 1 to " + std::to_string(kMaxOwnerBytes) + " bytes, not " +
         std::to_string(size));
  }
  [[gnu::cold]] void FailOnNumber(std::string_view what, int64_t least, int64_t most,
                                  std::string_view setting, std::string_view text) {
    const std::string limit = setting.empty() ? "" : " (" + std::string(setting) + ')';
    Fail(std::string(what) + " must be an integer from " + std::to_string(least) + " to " +
         std::to_string(most) + limit + " in plain digits, not " + Quoted(text));
  }

  // `what`, followed by `which`, names the argument in messages.
  std::string_view Take(std::string_view what, std::string_view which = "") {
    if (AtEnd()) {
      FailOnMissing(what, which);
      return {};
    }
    const std::string_view taken = rest_.front();
    rest_ = rest_.subspan(1);
    return taken;
  }

  Args rest_;
  std::string_view usage_;
  std::string error_;
};

// <PX ms | EX s>
Options LeaseOptions(const std::optional<Millis>& lease) {
  return lease.has_value() ? Options{} : Options{"PX ms", "EX s"};
}

// Takes the lease option if it is next. Returns whether it was.
bool TakeLease(Reader& reader, const Limits& limits, std::optional<Millis>& lease) {
  const bool px = reader.TakeKeyword("PX");
  if (!px && !reader.TakeKeyword("EX")) return false;
  if (lease.has_value()) reader.Fail("syntax error: the lease is given twice: give PX or EX once");
  if (reader.AtEnd()) {
    reader.FailWithUsage(px ? "the number after PX is missing" : "the number after EX is missing");
  }
  const int64_t most = px ? limits.max_lease.count()
                          : std::chrono::floor<std::chrono::seconds>(limits.max_lease).count();
  const int64_t number = reader.TakeNumber(px ? "PX" : "EX", 1, most, kMaxLeaseSetting);
  lease = px ? Millis{number} : Millis{std::chrono::seconds{number}};
  return true;
}

Millis RequireLease(Reader& reader, std::optional<Millis> lease) {
  if (!lease.has_value()) reader.FailWithUsage("the lease is missing");
  return lease.value_or(Millis{1});
}

// The next argument is not an option. A bare number where no lease was given is probably meant as
// the lease; directly after an "owner" called PX, the lease is there and the owner is missing.
void FailOnUnknown(Reader& reader, Owner owner, bool has_lease, const Options& expected) {
  if (has_lease || !reader.NextIsNumber()) {
    reader.FailOnUnknown(expected);
  } else if (IsKeyword(owner.bytes, "PX") || IsKeyword(owner.bytes, "EX")) {
    reader.FailWithUsage("the owner is missing");
  } else {
    reader.FailWithUsage("PX or EX is missing before the lease");
  }
}

// The server finds keys by the word ALSO, without knowing what the words before it mean. Another
// meaning of that word would hide keys from it, and so from its checks of access rights.
void RefuseAlso(Reader& reader, std::string_view what, std::string_view text) {
  if (!IsKeyword(text, kAlso)) return;
  reader.Fail(std::string(what) + " must not be the word ALSO, which introduces keys");
}

// Takes an option that may be given at most once.
bool TakeOnce(Reader& reader, std::string_view keyword, bool given) {
  if (!reader.TakeKeyword(keyword)) return false;
  if (given) reader.Fail("syntax error: " + std::string(keyword) + " is given twice");
  return true;
}

// [WAIT ms], [LINGER ms], [MAXHOLD ms]
bool TakeMillis(Reader& reader, std::string_view keyword, Millis least, Millis most,
                std::string_view setting, std::optional<Millis>& millis) {
  if (!TakeOnce(reader, keyword, millis.has_value())) return false;
  millis = Millis{reader.TakeNumber(keyword, least.count(), most.count(), setting)};
  return true;
}

// [SHARED | LIMIT n]
bool TakeMode(Reader& reader, std::optional<Mode>& mode, uint32_t& limit) {
  const bool shared = reader.TakeKeyword("SHARED");
  if (!shared && !reader.TakeKeyword("LIMIT")) return false;
  if (mode.has_value()) {
    reader.Fail("syntax error: the mode is given twice: give SHARED or LIMIT once");
  }
  mode = shared ? Mode::kShared : Mode::kLimit;
  if (!shared) limit = static_cast<uint32_t>(reader.TakeNumber("LIMIT", 1, kMaxLimit));
  return true;
}

// [MAXLINE n], [WEIGHT w]
bool TakeCount(Reader& reader, std::string_view keyword, uint32_t most,
               std::optional<uint32_t>& count) {
  if (!TakeOnce(reader, keyword, count.has_value())) return false;
  count = static_cast<uint32_t>(reader.TakeNumber(keyword, 1, most));
  return true;
}

// [TAG text]
bool TakeTag(Reader& reader, std::string_view& tag) {
  if (!TakeOnce(reader, "TAG", !tag.empty())) return false;
  tag = reader.TakeText("the text after TAG");
  if (!IsTag(tag)) {
    reader.Fail("TAG must be 1 to " + std::to_string(kMaxTagBytes) +
                " printable ASCII characters, not " + Quoted(tag));
  }
  RefuseAlso(reader, "the text after TAG", tag);
  return true;
}

bool IsNotifyId(std::string_view id) {
  return !id.empty() && id.size() <= kMaxNotifyIdBytes &&
         std::all_of(id.begin(), id.end(), [](char c) { return IsPrintable(c) && c != ' '; });
}

// [NOTIFY channel id]
bool TakeNotify(Reader& reader, std::optional<NotifyTarget>& notify) {
  if (!TakeOnce(reader, "NOTIFY", notify.has_value())) return false;
  const std::string_view channel = reader.TakeText("the channel after NOTIFY");
  const std::string_view id = reader.TakeText("the id after NOTIFY channel");
  notify = {.channel = channel, .id = id};
  if (channel.empty() || channel.size() > kMaxChannelBytes) {
    reader.Fail("the channel after NOTIFY must be 1 to " + std::to_string(kMaxChannelBytes) +
                " bytes, not " + std::to_string(channel.size()));
  }
  if (!IsNotifyId(id)) {
    reader.Fail("the id after NOTIFY channel must be 1 to " + std::to_string(kMaxNotifyIdBytes) +
                " printable ASCII characters without a space, not " + Quoted(id));
  }
  RefuseAlso(reader, "the channel after NOTIFY", channel);
  RefuseAlso(reader, "the id after NOTIFY channel", id);
  return true;
}

// [FLOOR token]
bool TakeFloor(Reader& reader, std::optional<Token>& floor) {
  if (!TakeOnce(reader, "FLOOR", floor.has_value())) return false;
  floor = reader.TakeToken("FLOOR");
  return true;
}

// [REENTRANT], [SESSION]
bool TakeFlag(Reader& reader, std::string_view keyword, bool& flag) {
  if (!TakeOnce(reader, keyword, flag)) return false;
  flag = true;
  return true;
}

// [ALSO numkeys key [key ...]]
bool TakeAlso(Reader& reader, std::string_view first, Keys& also) {
  if (!TakeOnce(reader, kAlso, !also.empty())) return false;
  const auto count = static_cast<size_t>(reader.TakeNumber(kAlso, 1, kMaxAlso));
  also = reader.TakeKeys(count);
  for (size_t i = 0; i < also.size(); ++i) {
    const Keys before = also.subspan(0, i);
    if (also[i] == first || std::find(before.begin(), before.end(), also[i]) != before.end()) {
      reader.Fail("the key " + Quoted(also[i]) + " is given twice: name each lock once");
    }
  }
  return true;
}

[[gnu::cold]] void CheckWeight(Reader& reader, const AcquireRequest& request) {
  if (request.mode != Mode::kLimit) {
    reader.Fail("syntax error: WEIGHT requires LIMIT");
  } else if (request.weight > request.limit) {
    reader.Fail("WEIGHT must be at most LIMIT, which is " + std::to_string(request.limit) +
                ", not " + std::to_string(request.weight));
  }
}

}  // namespace

// key owner <PX ms | EX s> [WAIT ms] [MAXLINE n] [SHARED | LIMIT n] [WEIGHT w] [REENTRANT]
// [SESSION] [LINGER ms] [MAXHOLD ms] [TAG text] [NOTIFY channel id] [FLOOR token] [ALSO numkeys key
// [key ...]]
Parsed<AcquireRequest> ParseAcquire(Args args, const Limits& limits) {
  Reader reader(args, kAcquireUsage);
  const std::string_view key = reader.TakeKey();
  AcquireRequest request{.owner = reader.TakeOwner()};
  std::optional<Millis> lease;
  std::optional<Millis> wait;
  std::optional<uint32_t> max_line;
  std::optional<Mode> mode;
  std::optional<uint32_t> weight;
  std::optional<Millis> linger;
  std::optional<Millis> max_hold;
  while (!reader.AtEnd()) {
    if (TakeLease(reader, limits, lease) ||
        TakeMillis(reader, "WAIT", Millis{0}, kMaxWait, "", wait) ||
        TakeCount(reader, "MAXLINE", kMaxLine, max_line) || TakeMode(reader, mode, request.limit) ||
        TakeCount(reader, "WEIGHT", kMaxLimit, weight) ||
        TakeFlag(reader, "REENTRANT", request.reentrant) ||
        TakeFlag(reader, "SESSION", request.session) ||
        TakeMillis(reader, "LINGER", Millis{0}, limits.max_lease, kMaxLeaseSetting, linger) ||
        TakeMillis(reader, "MAXHOLD", Millis{1}, kMaxHold, "", max_hold) ||
        TakeTag(reader, request.tag) || TakeNotify(reader, request.notify) ||
        TakeFloor(reader, request.floor) || TakeAlso(reader, key, request.also)) {
      continue;
    }
    Options expected = LeaseOptions(lease);
    if (!wait.has_value()) expected.emplace_back("WAIT ms");
    if (!max_line.has_value()) expected.emplace_back("MAXLINE n");
    if (!mode.has_value()) expected.insert(expected.end(), {"SHARED", "LIMIT n"});
    if (!weight.has_value()) expected.emplace_back("WEIGHT w");
    if (!request.reentrant) expected.emplace_back("REENTRANT");
    if (!request.session) expected.emplace_back("SESSION");
    if (!linger.has_value()) expected.emplace_back("LINGER ms");
    if (!max_hold.has_value()) expected.emplace_back("MAXHOLD ms");
    if (request.tag.empty()) expected.emplace_back("TAG text");
    if (!request.notify.has_value()) expected.emplace_back("NOTIFY channel id");
    if (!request.floor.has_value()) expected.emplace_back("FLOOR token");
    if (request.also.empty()) expected.emplace_back(kAlsoGrammar);
    FailOnUnknown(reader, request.owner, lease.has_value(), expected);
  }
  request.lease = RequireLease(reader, lease);
  request.wait = wait.value_or(Millis{0});
  request.mode = mode.value_or(Mode::kExclusive);
  request.linger = linger.value_or(Millis{0});
  request.max_line = max_line.value_or(0);
  request.weight = weight.value_or(1);
  request.max_hold = max_hold.value_or(Millis{0});
  if (max_line.has_value() && !wait.has_value()) {
    reader.Fail("syntax error: MAXLINE requires WAIT");
  }
  if (weight.has_value()) CheckWeight(reader, request);
  if (max_hold.has_value() && *max_hold < request.lease) {
    reader.Fail("MAXHOLD must be at least the lease of " + std::to_string(request.lease.count()) +
                " ms, not " + std::to_string(max_hold->count()));
  }
  if (request.reentrant && request.mode == Mode::kLimit) {
    reader.Fail("syntax error: REENTRANT cannot be combined with LIMIT");
  }
  return reader.Finish(request);
}

// key owner [ALSO numkeys key [key ...]]
Parsed<ReleaseRequest> ParseRelease(Args args) {
  Reader reader(args, kReleaseUsage);
  const std::string_view key = reader.TakeKey();
  ReleaseRequest request{.owner = reader.TakeOwner()};
  while (!reader.AtEnd()) {
    if (TakeAlso(reader, key, request.also)) continue;
    reader.FailOnUnknown(request.also.empty() ? Options{kAlsoGrammar} : Options{});
  }
  return reader.Finish(request);
}

// key owner <PX ms | EX s> [ALSO numkeys key [key ...]]
Parsed<TouchRequest> ParseTouch(Args args, const Limits& limits) {
  Reader reader(args, kTouchUsage);
  const std::string_view key = reader.TakeKey();
  TouchRequest request{.owner = reader.TakeOwner()};
  std::optional<Millis> lease;
  while (!reader.AtEnd()) {
    if (TakeLease(reader, limits, lease) || TakeAlso(reader, key, request.also)) continue;
    Options expected = LeaseOptions(lease);
    if (request.also.empty()) expected.emplace_back(kAlsoGrammar);
    FailOnUnknown(reader, request.owner, lease.has_value(), expected);
  }
  request.lease = RequireLease(reader, lease);
  return reader.Finish(request);
}

// key [token] [THEN command [arg ...]]; THEN requires a token
Parsed<FenceRequest> ParseFence(Args args) {
  Reader reader(args, kFenceUsage);
  reader.TakeKey();
  FenceRequest request;
  // 0 is what a request in line is answered: it never holds a lock.
  if (!reader.AtEnd()) request.token = reader.TakeToken("the token", Token{0});
  if (!reader.AtEnd()) {
    if (!reader.TakeKeyword(kThen)) reader.FailOnUnknown({"THEN command [arg ...]"});
    if (reader.AtEnd()) reader.Fail("syntax error: the command after THEN is missing");
    request.then = reader.TakeRest();
    if (!request.then.empty() && IsKeyword(request.then.front(), kFenceCommand) &&
        request.then.size() > kThenAt && IsKeyword(request.then[kThenAt], kThen)) {
      reader.Fail("THEN cannot be nested: give the command itself");
    }
    // The server itself refuses all other commands that change the connection: scripts may not call
    // them.
    for (const std::string_view command : {"SELECT", "READONLY", "READWRITE", "ASKING"}) {
      if (!request.then.empty() && IsKeyword(request.then.front(), command)) {
        reader.Fail(std::string(command) +
                    " is not allowed after THEN, because it changes the connection");
      }
    }
  }
  return reader.Finish(request);
}

// key
Parsed<InfoRequest> ParseInfo(Args args) {
  Reader reader(args, kInfoUsage);
  return reader.Finish(InfoRequest{.key = reader.TakeKey()});
}

// [MATCH pattern] [COUNT n] [CURSOR c]
Parsed<ListRequest> ParseList(Args args) {
  Reader reader(args);
  ListRequest request;
  std::optional<int64_t> count;
  std::optional<std::string_view> cursor;
  while (!reader.AtEnd()) {
    if (TakeOnce(reader, "MATCH", request.match.has_value())) {
      request.match = reader.TakeText("the pattern after MATCH");
    } else if (TakeOnce(reader, "COUNT", count.has_value())) {
      count = reader.TakeNumber("COUNT", 1, kMaxListCount);
    } else if (TakeOnce(reader, "CURSOR", cursor.has_value())) {
      cursor = reader.TakeCursor();
    } else {
      Options expected;
      if (!request.match.has_value()) expected.emplace_back("MATCH pattern");
      if (!count.has_value()) expected.emplace_back("COUNT n");
      if (!cursor.has_value()) expected.emplace_back("CURSOR c");
      reader.FailOnUnknown(expected);
    }
  }
  request.count = count.value_or(request.count);
  request.cursor = cursor.value_or(request.cursor);
  return reader.Finish(request);
}

// [n]
Parsed<TopRequest> ParseTop(Args args) {
  Reader reader(args);
  TopRequest request;
  if (!reader.AtEnd()) request.most = static_cast<size_t>(reader.TakeNumber("n", 1, kMaxTop));
  return reader.Finish(request);
}

std::optional<int64_t> ParseDigits(std::string_view text) {
  constexpr size_t kMostDigits = 19;  // always less than 2^64
  const bool leads_with_zero = text.size() > 1 && text.front() == '0';
  if (text.empty() || text.size() > kMostDigits || leads_with_zero) return std::nullopt;
  uint64_t number = 0;
  for (const char c : text) {
    if (c < '0' || c > '9') return std::nullopt;
    number = number * 10 + static_cast<uint64_t>(c - '0');
  }
  constexpr auto kMost = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
  if (number > kMost) return std::nullopt;
  return static_cast<int64_t>(number);
}

bool IsKeyword(std::string_view text, std::string_view keyword) {
  // A protocol must not depend on the locale.
  const auto upper = [](char c) {
    return c >= 'a' && c <= 'z' ? static_cast<char>(c - 'a' + 'A') : c;
  };
  return std::equal(text.begin(), text.end(), keyword.begin(), keyword.end(),
                    [&](char a, char b) { return upper(a) == upper(b); });
}

namespace {

constexpr size_t kShown = 40;

}  // namespace

std::string Unquoted(std::string_view bytes) {
  const auto plain = [](char c) { return IsPrintable(c) && c != ' ' && c != '"' && c != '\\'; };
  const bool word =
      !bytes.empty() && bytes.size() <= kShown && std::all_of(bytes.begin(), bytes.end(), plain);
  return word ? std::string(bytes) : Quoted(bytes);
}

std::string Quoted(std::string_view bytes) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : bytes.substr(0, kShown)) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (IsPrintable(c)) {
      out += c;
    } else {
      out += "\\x";
      out += kHex[byte >> 4];
      out += kHex[byte & 0xf];
    }
  }
  out += '"';
  if (bytes.size() > kShown) out += "... (" + std::to_string(bytes.size()) + " bytes)";
  return out;
}

}  // namespace turnstile
