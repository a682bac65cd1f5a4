// Random histories against a naive model.
//
// A small simulated world (a primary, a replica, strangers who use plain SET and DEL, a wall clock
// that also steps back) drives the core through parse, decide, apply and replicate, in every mode
// and in mixtures of them. Nobody stands in line here. After every step two independent parties
// must be content:
//   - the Model, which follows the contract in the most straightforward way and shares no code with
//     the core: same outcome, same token, same stored holds, on the primary and on the replica;
//   - the Witness, which knows only what clients were told: never two writers, never a writer with
//     a reader, never more permits than the request allows, tokens only rise, nothing lost comes
//     back, a set of locks is taken whole or not at all.
//
// Every history follows from its seed, which is printed on failure.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/decide.h"
#include "core/encoding.h"
#include "core/fact.h"
#include "core/lock.h"
#include "core/request.h"
#include "core/token_clock.h"

namespace turnstile {
namespace {

constexpr int64_t kMilli = 1'000;  // in microseconds, as all times of the simulation
constexpr int64_t kSecond = 1'000 * kMilli;
constexpr int64_t kMinute = 60 * kSecond;
constexpr int64_t kHour = 60 * kMinute;
constexpr int64_t kLastToken = (int64_t{1} << 53) - 1;
constexpr int64_t kLargestCount = std::numeric_limits<uint32_t>::max();
constexpr Limits kLimits{.max_lease = std::chrono::hours{24}};

// Keys and owners go by their number. Some are hard on a protocol: no bytes, odd bytes, a keyword,
// the longest owner, an owner that begins like another.
const std::array kKeys = {std::string("red"), std::string("green"), std::string("b\0\r\n", 4),
                          std::string()};
const std::array kOwners = {std::string("ann"),    std::string("an"),
                            std::string("bob"),    std::string("\0\r\n\xff", 4),
                            std::string(256, 'z'), std::string("4fd1c2a7-6c1e-4d0c-a3f0"),
                            std::string("LIMIT")};

std::string_view NameOf(Outcome outcome) {
  constexpr std::array<std::string_view, 19> kNames = {
      "granted",          "held already", "downgraded",     "upgraded",      "released",
      "touched",          "free",         "lease ended",    "linger cut",    "held by other",
      "others wait",      "grace",        "other mode",     "holds some",    "holds apart",
      "upgrades several", "counted out",  "floor too high", "tokens used up"};
  return kNames.at(static_cast<size_t>(outcome));
}

// --- The naive model --------------------------------------------------------------------------

struct Ask {  // a LOCK.ACQUIRE
  std::vector<size_t> keys;
  size_t owner = 0;
  int64_t lease_ms = 0;
  int64_t wait_ms = 0;
  Mode mode = Mode::kExclusive;
  uint32_t limit = 1;
  bool reentrant = false;
  bool session = false;
  int64_t linger_ms = 0;
};

struct ModelHold {
  size_t owner;
  int64_t token;
  int64_t since_ms;
  int64_t end_ms;
  int64_t linger_ms;
  int64_t count;

  int64_t closes_ms() const { return end_ms + linger_ms; }
};

struct ModelLock {
  Mode mode;
  std::vector<ModelHold> holds;  // in no order
};

struct ModelPlain {
  std::string value;
  std::optional<int64_t> end_ms;
};

using ModelEntry = std::variant<std::monostate, ModelLock, ModelPlain>;
using ModelKeys = std::array<ModelEntry, kKeys.size()>;

class Model {
 public:
  ModelKeys keys;
  int64_t last_token = 0;

  struct Reply {
    Outcome outcome;
    int64_t token = 0;
  };

  Reply Acquire(const Ask& ask, int64_t now) {
    const int64_t now_ms = now / kMilli;
    // What the asker has already: locks, with their tokens, and strings.
    std::set<int64_t> tokens;
    size_t locks = 0;
    size_t strings = 0;
    for (const size_t key : ask.keys) {
      if (const ModelPlain* plain = PlainAt(key, now_ms)) {
        if (plain->value == kOwners.at(ask.owner)) ++strings;
      } else if (const ModelHold* own = LiveHold(key, ask.owner, now_ms)) {
        tokens.insert(own->token);
        ++locks;
      }
    }
    if (ask.keys.size() > 1) {
      if (locks + strings > 0 && locks + strings < ask.keys.size()) return {Outcome::kHoldsSome};
      if (tokens.size() > 1 || (locks > 0 && strings > 0)) return {Outcome::kHoldsApart};
    }
    Outcome outcome = Outcome::kGranted;
    for (const size_t key : ask.keys) {
      const bool upgrade = ask.mode == Mode::kExclusive && LockAt(key) != nullptr &&
                           LockAt(key)->mode == Mode::kShared && locks > 0;
      if (ask.keys.size() > 1 && upgrade) return {Outcome::kUpgradesSeveral};
      outcome = AcquireOne(key, ask, now_ms);
      if (outcome > Outcome::kUpgraded) return {outcome};
    }
    int64_t token = 0;
    if (outcome == Outcome::kGranted || outcome == Outcome::kUpgraded) {
      token = std::max(last_token + 1, now);
      if (token > kLastToken) return {Outcome::kTokensUsedUp};
      last_token = token;
    } else {
      token = *tokens.begin();
    }
    for (const size_t key : ask.keys) Put(key, ask, token, now_ms);
    return {outcome, token};
  }

  Outcome Release(size_t key, size_t owner, int64_t now_ms) {
    if (const ModelPlain* plain = PlainAt(key, now_ms); IsValueOf(plain, owner)) {
      keys.at(key) = {};
      return Outcome::kReleased;
    }
    ModelHold* hold = HoldOf(key, owner);
    if (hold == nullptr || now_ms > hold->closes_ms()) return Missing(key, owner, now_ms);
    const bool live = now_ms <= hold->end_ms;
    if (live && hold->count > 1) {
      --hold->count;
    } else {
      Remove(key, owner);
    }
    Sweep(key, now_ms);
    return live ? Outcome::kReleased : Outcome::kLingerCut;
  }

  Outcome Touch(size_t key, size_t owner, int64_t lease_ms, int64_t now_ms) {
    if (ModelPlain* plain = PlainAt(key, now_ms); IsValueOf(plain, owner)) {
      plain->end_ms = now_ms + lease_ms;
      return Outcome::kTouched;
    }
    ModelHold* hold = LiveHold(key, owner, now_ms);
    if (hold == nullptr) return Missing(key, owner, now_ms);
    hold->end_ms = now_ms + lease_ms;
    Sweep(key, now_ms);
    return Outcome::kTouched;
  }

  // Returns whether a hold came to its end.
  bool EndSession(size_t key, size_t owner, int64_t now_ms) {
    ModelHold* hold = LiveHold(key, owner, now_ms);
    if (hold == nullptr) return false;
    hold->linger_ms = hold->linger_ms == 0 ? 0 : hold->linger_ms + now_ms - 1;
    hold->end_ms = 0;  // never live again, whatever the clock does
    Sweep(key, now_ms);
    return true;
  }

  // Holds that keep nobody out any more go. Returns how many.
  size_t Sweep(size_t key, int64_t now_ms) {
    ModelLock* lock = LockAt(key);
    if (lock == nullptr) return 0;
    const size_t swept = std::erase_if(
        lock->holds, [&](const ModelHold& hold) { return now_ms > hold.closes_ms(); });
    if (lock->holds.empty()) keys.at(key) = {};
    return swept;
  }

  std::optional<int64_t> Fence(size_t key, int64_t now_ms) {
    std::optional<int64_t> highest;
    for (const ModelHold& hold : HoldsAt(key)) {
      if (now_ms <= hold.end_ms) highest = std::max(highest.value_or(0), hold.token);
    }
    return highest;
  }

  bool FenceBy(size_t key, int64_t token, int64_t now_ms) {
    const auto& holds = HoldsAt(key);
    return std::any_of(holds.begin(), holds.end(), [&](const ModelHold& hold) {
      return hold.token == token && now_ms <= hold.end_ms;
    });
  }

  void StartIssuing(int64_t now, int64_t margin) {
    const int64_t known = last_token == 0 ? 0 : last_token + 3 * kSecond;
    last_token = std::min(std::max(known, now + margin), kLastToken);
  }

  // What a server knows of tokens when it has only read its locks.
  int64_t HighestStoredToken() {
    int64_t highest = 0;
    for (size_t key = 0; key < keys.size(); ++key) {
      for (const ModelHold& hold : HoldsAt(key)) highest = std::max(highest, hold.token);
    }
    return highest;
  }

  ModelLock* LockAt(size_t key) { return std::get_if<ModelLock>(&keys.at(key)); }

  const std::vector<ModelHold>& HoldsAt(size_t key) {
    static const std::vector<ModelHold> kNone;
    const ModelLock* lock = LockAt(key);
    return lock == nullptr ? kNone : lock->holds;
  }

  // A string that is still there by the clock.
  ModelPlain* PlainAt(size_t key, int64_t now_ms) {
    auto* plain = std::get_if<ModelPlain>(&keys.at(key));
    return plain != nullptr && now_ms <= plain->end_ms.value_or(now_ms) ? plain : nullptr;
  }

  ModelHold* HoldOf(size_t key, size_t owner) {
    ModelLock* lock = LockAt(key);
    if (lock == nullptr) return nullptr;
    for (ModelHold& hold : lock->holds) {
      if (hold.owner == owner) return &hold;
    }
    return nullptr;
  }

  ModelHold* LiveHold(size_t key, size_t owner, int64_t now_ms) {
    ModelHold* hold = HoldOf(key, owner);
    return hold != nullptr && now_ms <= hold->end_ms ? hold : nullptr;
  }

  // How many others keep this owner out, lingering or not.
  size_t OthersIn(size_t key, size_t owner, int64_t now_ms) {
    if (const ModelPlain* plain = PlainAt(key, now_ms)) return IsValueOf(plain, owner) ? 0 : 1;
    size_t others = 0;
    for (const ModelHold& hold : HoldsAt(key)) {
      if (hold.owner != owner && now_ms <= hold.closes_ms()) ++others;
    }
    return others;
  }

 private:
  static bool IsValueOf(const ModelPlain* plain, size_t owner) {
    return plain != nullptr && plain->value == kOwners.at(owner);
  }

  // The answer if this were the only key.
  Outcome AcquireOne(size_t key, const Ask& ask, int64_t now_ms) {
    const size_t others = OthersIn(key, ask.owner, now_ms);
    if (PlainAt(key, now_ms) != nullptr) {
      return others == 0 ? Outcome::kGranted : Outcome::kHeldByOther;
    }
    if (const ModelHold* own = LiveHold(key, ask.owner, now_ms)) {
      if (ask.reentrant && own->count == kLargestCount) return Outcome::kCountedOut;
      const Mode mode = LockAt(key)->mode;
      if (mode == ask.mode) return Outcome::kHeldAlready;
      if (mode == Mode::kExclusive && ask.mode == Mode::kShared) return Outcome::kDowngraded;
      if (mode == Mode::kShared && ask.mode == Mode::kExclusive) {
        return others == 0 ? Outcome::kUpgraded : Outcome::kHeldByOther;
      }
      return Outcome::kOtherMode;
    }
    if (others == 0) return Outcome::kGranted;
    const Mode mode = LockAt(key)->mode;
    const bool both_shared = mode == Mode::kShared && ask.mode == Mode::kShared;
    const bool both_limit = mode == Mode::kLimit && ask.mode == Mode::kLimit;
    const bool room = both_shared || (both_limit && others < ask.limit);
    return room ? Outcome::kGranted : Outcome::kHeldByOther;
  }

  void Put(size_t key, const Ask& ask, int64_t token, int64_t now_ms) {
    ModelHold hold = {ask.owner, token, now_ms, now_ms + ask.lease_ms, ask.linger_ms, 1};
    if (const ModelHold* own = LiveHold(key, ask.owner, now_ms)) {
      if (own->token == token) hold.since_ms = own->since_ms;
      hold.count = own->count + (ask.reentrant ? 1 : 0);
    }
    Remove(key, ask.owner);
    Sweep(key, now_ms);
    // Whoever is left now shares the lock with the asker.
    ModelLock lock{ask.mode, HoldsAt(key)};
    lock.holds.push_back(hold);
    keys.at(key) = std::move(lock);
  }

  void Remove(size_t key, size_t owner) {
    ModelLock* lock = LockAt(key);
    if (lock == nullptr) return;
    std::erase_if(lock->holds, [&](const ModelHold& hold) { return hold.owner == owner; });
    if (lock->holds.empty()) keys.at(key) = {};
  }

  Outcome Missing(size_t key, size_t owner, int64_t now_ms) {
    if (OthersIn(key, owner, now_ms) > 0) return Outcome::kHeldByOther;
    return HoldOf(key, owner) != nullptr ? Outcome::kLeaseEnded : Outcome::kFree;
  }
};

// --- A server: a few keys, and the core -------------------------------------------------------

using Wire = std::vector<std::string>;  // one replicated command

int64_t Count(Instant moment) { return moment.time_since_epoch().count(); }

class Node {
 public:
  struct Entry {
    std::unique_ptr<Lock> lock;
    std::optional<std::string> plain;
    std::optional<int64_t> plain_end_ms;
  };

  std::array<Entry, kKeys.size()> keys;
  TokenClock clock;

  Place At(size_t key) const {
    const Entry& entry = keys.at(key);
    if (!entry.plain.has_value()) return {.lock = entry.lock.get(), .plain = std::nullopt};
    const Instant end =
        entry.plain_end_ms.has_value() ? Instant{Millis{*entry.plain_end_ms}} : kMaxInstant;
    return {.lock = nullptr, .plain = PlainLock{*entry.plain, end}};
  }

  // Carries a decided change out and says what is to be replicated.
  Wire CarryOut(size_t key, const Change& change) {
    Entry& entry = keys.at(key);
    if (const auto* held = std::get_if<Held>(&change)) {
      Wire wire = WireOf(key, *held);
      Store(entry, *held);
      return wire;
    }
    if (const auto* released = std::get_if<Released>(&change)) {
      Wire wire = {"RELEASE", kKeys.at(key), std::string(released->owner.bytes)};
      Keep(entry, Apply(entry.lock.get(), *released));
      return wire;
    }
    if (const auto* ended = std::get_if<Ended>(&change)) {
      Wire wire = {"ENDED", kKeys.at(key), std::string(ended->owner.bytes)};
      Keep(entry, Apply(entry.lock.get(), *ended));
      return wire;
    }
    if (const auto* expired = std::get_if<Expired>(&change)) {
      Keep(entry, Apply(entry.lock.get(), *expired));
      return {"EXPIRED", kKeys.at(key), std::to_string(Count(expired->before))};
    }
    if (const auto* sessions = std::get_if<SessionsEnded>(&change)) {
      Wire wire = {"SESSION", kKeys.at(key), std::to_string(Count(sessions->at))};
      for (const Owner owner : sessions->owners) wire.emplace_back(owner.bytes);
      Keep(entry, Apply(entry.lock.get(), *sessions));
      return wire;
    }
    if (const auto* extended = std::get_if<PlainExtended>(&change)) {
      entry.plain_end_ms = Count(extended->end);
      return {"PEXPIREAT", kKeys.at(key), std::to_string(*entry.plain_end_ms)};
    }
    entry = {};
    return {"DEL", kKeys.at(key)};
  }

  // What a replica does with it. Returns whether it could.
  bool Obey(const Wire& wire) {
    const std::vector<std::string_view> words(wire.begin(), wire.end());
    const std::string_view name = words[0];
    constexpr std::array<std::string_view, 5> kFacts = {"HELD", "ENDED", "EXPIRED", "SESSION",
                                                        "FLOOR"};
    if (std::find(kFacts.begin(), kFacts.end(), name) != kFacts.end()) return Believe(words);
    const auto key = NumberOf(words[1]);
    if (!key.has_value()) return false;
    Entry& entry = keys.at(*key);
    if (name == "RELEASE") {
      const auto parsed = ParseRelease(Args(words).subspan(1));
      const auto* request = std::get_if<ReleaseRequest>(&parsed);
      if (request == nullptr) return false;
      const Decision decision = Decide(At(*key), *request, kBeforeAnyEnd);
      if (!decision.change.has_value()) return false;
      const auto* released = std::get_if<Released>(&*decision.change);
      if (released == nullptr) return false;
      Keep(entry, Apply(entry.lock.get(), *released));
    } else if (name == "DEL") {
      entry = {};
    } else if (name == "PEXPIREAT") {
      entry.plain_end_ms = std::stoll(wire[2]);
    } else if (name == "RESTORE") {
      return Restore(*key, wire[2]);
    } else {
      Set(*key, wire[2], wire.size() > 3 ? std::optional(std::stoll(wire[3])) : std::nullopt);
    }
    return true;
  }

  void Set(size_t key, const std::string& value, std::optional<int64_t> end_ms) {
    keys.at(key) = Entry{.lock = nullptr, .plain = value, .plain_end_ms = end_ms};
  }

  bool Restore(size_t key, std::string_view bytes) {
    std::unique_ptr<Lock> lock = Decode(bytes, kCurrentEncoding);
    if (lock == nullptr) return false;
    for (size_t i = 0; i < lock->size(); ++i) {
      clock.Observe(lock->at(Lock::Order::kByToken, i).token);
    }
    keys.at(key) = Entry{.lock = std::move(lock), .plain = {}, .plain_end_ms = {}};
    return true;
  }

  // Reads everything that `other`, which may be this one, would write to an RDB file. Returns
  // whether all could be read.
  bool Load(const Node& other) {
    for (size_t key = 0; key < keys.size(); ++key) {
      const Entry& entry = other.keys.at(key);
      if (entry.lock != nullptr) {
        if (!Restore(key, Encode(*entry.lock))) return false;
      } else if (this != &other) {
        keys.at(key) = Entry{nullptr, entry.plain, entry.plain_end_ms};
      }
    }
    return true;
  }

 private:
  static std::optional<size_t> NumberOf(std::string_view key) {
    const auto* const found = std::find(kKeys.begin(), kKeys.end(), key);
    if (found == kKeys.end()) return std::nullopt;
    return static_cast<size_t>(found - kKeys.begin());
  }

  static Wire WireOf(size_t key, const Held& held) {
    const Hold& hold = held.hold;
    Wire wire = {"HELD", kKeys.at(key), std::string(hold.owner.bytes),
                 std::string(HeldNumbers(hold).text())};
    if (!WordFor(held.mode).empty()) wire.emplace_back(WordFor(held.mode));
    if (hold.count > 1) {
      wire.insert(wire.end(), {std::string(kCountWord), std::to_string(hold.count)});
    }
    if (hold.linger > Millis{0}) {
      wire.insert(wire.end(), {std::string(kLingerWord), std::to_string(hold.linger.count())});
    }
    return wire;
  }

  bool Believe(const std::vector<std::string_view>& words) {
    if (words[0] == "HELD") {
      const auto parsed = ParseHeldFact(Args(words).subspan(1));
      const auto* held = std::get_if<HeldFact>(&parsed);
      const auto key = held == nullptr ? std::nullopt : NumberOf(held->key);
      if (!key.has_value()) return false;
      Store(keys.at(*key), held->held);
      return true;
    }
    const auto parsed = ParseFact(words);
    const auto* fact = std::get_if<Fact>(&parsed);
    if (fact == nullptr) return false;
    if (const auto* floor = std::get_if<FloorFact>(fact)) {
      clock.Observe(floor->token);
      return true;
    }
    const auto key = NumberOf(words[1]);
    if (!key.has_value() || keys.at(*key).lock == nullptr) return false;
    Entry& entry = keys.at(*key);
    if (const auto* expired = std::get_if<ExpiredFact>(fact)) {
      Keep(entry, Apply(entry.lock.get(), expired->expired));
    } else if (const auto* session = std::get_if<SessionFact>(fact)) {
      Keep(entry, Apply(entry.lock.get(), session->ended()));
    } else {
      Keep(entry, Apply(entry.lock.get(), std::get<EndedFact>(*fact).ended));
    }
    return true;
  }

  void Store(Entry& entry, const Held& held) {
    clock.Observe(held.hold.token);
    Keep(entry, Apply(entry.lock.get(), held));
    entry.plain.reset();
    entry.plain_end_ms.reset();
  }

  static void Keep(Entry& entry, Lock* stored) {
    if (stored != entry.lock.get()) entry.lock.reset(stored);
  }
};

bool IsHold(const Hold& hold, const ModelHold& expected) {
  return hold.owner.bytes == kOwners.at(expected.owner) &&
         static_cast<int64_t>(hold.token.value) == expected.token &&
         Count(hold.since) == expected.since_ms && Count(hold.end) == expected.end_ms &&
         hold.linger.count() == expected.linger_ms && int64_t{hold.count} == expected.count;
}

// Whether each order of the lock's holds is one, and all are of the same holds.
bool IsInOrder(const Lock& lock) {
  const auto closes = [](const Hold& hold) { return Count(hold.end) + hold.linger.count(); };
  uint64_t sum_by_owner = 0;
  uint64_t sum_by_token = 0;
  uint64_t sum_by_closing = 0;
  std::string_view last_owner;
  Token last_token;
  int64_t last_closes = 0;
  for (size_t i = 0; i < lock.size(); ++i) {
    const Hold by_owner = lock.at(Lock::Order::kByOwner, i);
    const Hold by_token = lock.at(Lock::Order::kByToken, i);
    const Hold by_closing = lock.at(Lock::Order::kByClosing, i);
    if (by_owner.owner.bytes <= last_owner || by_token.token < last_token ||
        closes(by_closing) < last_closes) {
      return false;
    }
    last_owner = by_owner.owner.bytes;
    last_token = by_token.token;
    last_closes = closes(by_closing);
    sum_by_owner += by_owner.token.value;
    sum_by_token += by_token.token.value;
    sum_by_closing += by_closing.token.value;
  }
  return sum_by_owner == sum_by_token && sum_by_owner == sum_by_closing;
}

bool IsStored(const Node::Entry& entry, const ModelEntry& expected) {
  if (const auto* plain = std::get_if<ModelPlain>(&expected)) {
    return entry.lock == nullptr && entry.plain == plain->value &&
           entry.plain_end_ms == plain->end_ms;
  }
  if (entry.plain.has_value()) return false;
  const auto* lock = std::get_if<ModelLock>(&expected);
  if (lock == nullptr) return entry.lock == nullptr;
  if (entry.lock == nullptr || entry.lock->size() != lock->holds.size() ||
      entry.lock->mode() != lock->mode || !IsInOrder(*entry.lock)) {
    return false;
  }
  return std::all_of(lock->holds.begin(), lock->holds.end(), [&](const ModelHold& hold) {
    const std::optional<Hold> stored = entry.lock->Find(Owner{kOwners.at(hold.owner)});
    return stored.has_value() && IsHold(*stored, hold);
  });
}

std::string Describe(const Node::Entry& entry) {
  if (entry.plain.has_value()) {
    return "string " + Quoted(*entry.plain) + " until " +
           std::to_string(entry.plain_end_ms.value_or(0));
  }
  if (entry.lock == nullptr) return "nothing";
  std::string text = "lock in mode " + std::to_string(static_cast<int>(entry.lock->mode()));
  for (size_t i = 0; i < entry.lock->size(); ++i) {
    const Hold hold = entry.lock->at(Lock::Order::kByOwner, i);
    text += "\n  " + Quoted(hold.owner.bytes) + " token " + std::to_string(hold.token.value) +
            " since " + std::to_string(Count(hold.since)) + " end " +
            std::to_string(Count(hold.end)) + " linger " + std::to_string(hold.linger.count()) +
            " count " + std::to_string(hold.count);
  }
  return text;
}

std::string Describe(const ModelEntry& entry) {
  if (const auto* plain = std::get_if<ModelPlain>(&entry)) {
    return "string " + Quoted(plain->value) + " until " + std::to_string(plain->end_ms.value_or(0));
  }
  const auto* lock = std::get_if<ModelLock>(&entry);
  if (lock == nullptr) return "nothing";
  std::string text = "lock in mode " + std::to_string(static_cast<int>(lock->mode));
  for (const ModelHold& hold : lock->holds) {
    text += "\n  " + Quoted(kOwners.at(hold.owner)) + " token " + std::to_string(hold.token) +
            " since " + std::to_string(hold.since_ms) + " end " + std::to_string(hold.end_ms) +
            " linger " + std::to_string(hold.linger_ms) + " count " + std::to_string(hold.count);
  }
  return text;
}

bool AreStored(const Node& node, const ModelKeys& expected) {
  return std::equal(node.keys.begin(), node.keys.end(), expected.begin(), IsStored);
}

bool SameBytes(const Node::Entry& one, const Node::Entry& other) {
  if (one.plain != other.plain || one.plain_end_ms != other.plain_end_ms) return false;
  if (one.lock == nullptr || other.lock == nullptr) return one.lock == other.lock;
  return Encode(*one.lock) == Encode(*other.lock);
}

// --- The witness: what clients were told ------------------------------------------------------

class Witness {
 public:
  // The highest token that anybody ever got.
  int64_t highest() const { return highest_; }

  // A request, for one lock or for several, was answered with a new token.
  void Issued(int64_t token) {
    EXPECT_GE(token, 1);
    EXPECT_LE(token, kLastToken);
    EXPECT_GT(token, highest_) << "the server's tokens do not rise";
    highest_ = token;
  }

  // ... and this is one of its locks. An upgrade takes the asker's own shared hold.
  void Granted(size_t key, const Ask& ask, int64_t token, bool upgrade, int64_t now_ms) {
    Told& told = told_.at(key);
    EXPECT_GT(token, highest_of_.at(key)) << "the lock's tokens do not rise";
    highest_of_.at(key) = token;
    int64_t count = 1;
    if (const Belief* own = Find(key, ask.owner)) {
      EXPECT_EQ(now_ms <= own->end_ms, upgrade) << "a new token for a live hold";
      if (upgrade) count = own->count + (ask.reentrant ? 1 : 0);
    } else {
      EXPECT_FALSE(upgrade) << "an upgrade of nothing";
    }
    Forget(key, ask.owner);
    const auto others = std::count_if(told.holds.begin(), told.holds.end(),
                                      [&](const Belief& hold) { return now_ms <= hold.closes_ms; });
    if (others > 0) {
      EXPECT_TRUE(ask.mode != Mode::kExclusive) << "a writer came to " << others << " others";
      EXPECT_TRUE(told.mode == ask.mode) << "two modes in one lock";
      if (ask.mode == Mode::kLimit) {
        EXPECT_LT(others, int64_t{ask.limit}) << "too many permits";
      }
      EXPECT_EQ(others, static_cast<int64_t>(told.holds.size())) << "an ended hold was kept";
    } else {
      told.holds.clear();
    }
    told.mode = ask.mode;
    told.holds.push_back({ask.owner, token, now_ms + ask.lease_ms, 0, ask.linger_ms, count});
    told.holds.back().SetEnd(now_ms + ask.lease_ms);
  }

  // An acquire that found the owner's own hold.
  void GrantedAgain(size_t key, const Ask& ask, int64_t token, int64_t now_ms) {
    Belief* own = ExpectHolder(key, ask.owner, now_ms);
    if (own == nullptr) return;
    EXPECT_EQ(token, own->token) << "another token for the same hold";
    own->count += ask.reentrant ? 1 : 0;
    own->linger_ms = ask.linger_ms;
    own->SetEnd(now_ms + ask.lease_ms);
    told_.at(key).mode = ask.mode;
  }

  void Touched(size_t key, size_t owner, int64_t end_ms, int64_t now_ms) {
    if (Belief* own = ExpectHolder(key, owner, now_ms)) own->SetEnd(end_ms);
  }

  void Released(size_t key, size_t owner, int64_t now_ms) {
    Belief* own = ExpectHolder(key, owner, now_ms);
    if (own != nullptr && --own->count == 0) Forget(key, owner);
  }

  void LingerCut(size_t key, size_t owner, int64_t now_ms) {
    const Belief* own = Find(key, owner);
    ASSERT_NE(own, nullptr);
    EXPECT_TRUE(own->end_ms < now_ms && now_ms <= own->closes_ms) << "it does not linger";
    Forget(key, owner);
  }

  void SessionEnded(size_t key, size_t owner, int64_t now_ms) {
    Belief* own = ExpectHolder(key, owner, now_ms);
    if (own == nullptr) return;
    own->SessionEnded(now_ms);
    if (own->linger_ms == 0) Forget(key, owner);
  }

  // The event lock.lost: lease and linger are over.
  void Lost(size_t key, size_t owner, int64_t now_ms) {
    const Belief* own = Find(key, owner);
    ASSERT_NE(own, nullptr) << "lost what was not held";
    EXPECT_GT(now_ms, own->closes_ms) << "lost too early";
    Forget(key, owner);
  }

  void Expired(size_t key, int64_t now_ms) {
    for (const Belief& hold : told_.at(key).holds) {
      EXPECT_GT(now_ms, hold.closes_ms) << "the key expired too early";
    }
    Gone(key);
  }

  // A stranger removed the lock.
  void Gone(size_t key) { told_.at(key).holds.clear(); }

  // The answer to LOCK.FENCE.
  void Fenced(size_t key, std::optional<Token> token, int64_t now_ms) {
    int64_t expected = 0;
    for (const Belief& hold : told_.at(key).holds) {
      if (now_ms <= hold.end_ms) expected = std::max(expected, hold.token);
    }
    EXPECT_EQ(static_cast<int64_t>(token.value_or(Token{0}).value), expected);
  }

  // The answer to LOCK.INFO of a lock: these and no others, and none for longer than it was told.
  void Informed(size_t key, const Lock* lock, size_t holders, int64_t now_ms) {
    size_t expected = 0;
    for (const Belief& hold : told_.at(key).holds) {
      if (now_ms > hold.closes_ms) continue;
      ++expected;
      const auto held = lock == nullptr ? std::nullopt : lock->Find(Owner{kOwners.at(hold.owner)});
      EXPECT_TRUE(held.has_value() && Count(held->closes()) == hold.closes_ms)
          << Quoted(kOwners.at(hold.owner));
    }
    EXPECT_EQ(holders, expected);
  }

  // A failover, a restart or RESTORE brought back older data: from now on that counts. Tokens
  // still rise.
  void TakeBack(size_t key, const ModelEntry& entry) {
    Gone(key);
    const auto* lock = std::get_if<ModelLock>(&entry);
    if (lock == nullptr) return;
    told_.at(key).mode = lock->mode;
    for (const ModelHold& hold : lock->holds) {
      told_.at(key).holds.push_back(
          {hold.owner, hold.token, hold.end_ms, hold.closes_ms(), hold.linger_ms, hold.count});
    }
  }

  void TakeBackAll(const ModelKeys& keys) {
    for (size_t key = 0; key < keys.size(); ++key) TakeBack(key, keys.at(key));
  }

 private:
  struct Belief {
    size_t owner;
    int64_t token;
    int64_t end_ms;
    int64_t closes_ms;
    int64_t linger_ms;
    int64_t count;

    void SetEnd(int64_t new_end_ms) {
      end_ms = new_end_ms;
      closes_ms = new_end_ms + linger_ms;
    }

    void SessionEnded(int64_t now_ms) {
      end_ms = 0;
      closes_ms = now_ms - 1 + linger_ms;
    }
  };

  struct Told {
    Mode mode = Mode::kExclusive;
    std::vector<Belief> holds;
  };

  Belief* Find(size_t key, size_t owner) {
    for (Belief& hold : told_.at(key).holds) {
      if (hold.owner == owner) return &hold;
    }
    return nullptr;
  }

  void Forget(size_t key, size_t owner) {
    std::erase_if(told_.at(key).holds, [&](const Belief& hold) { return hold.owner == owner; });
  }

  Belief* ExpectHolder(size_t key, size_t owner, int64_t now_ms) {
    Belief* own = Find(key, owner);
    EXPECT_NE(own, nullptr) << Quoted(kOwners.at(owner)) << " holds nothing";
    if (own != nullptr) {
      EXPECT_LE(now_ms, own->end_ms) << "a lost hold was revived";
    }
    return own;
  }

  std::array<Told, kKeys.size()> told_;
  std::array<int64_t, kKeys.size()> highest_of_{};
  int64_t highest_ = 0;
};

// --- The history ------------------------------------------------------------------------------

// How often each thing happened: a history in which nothing happens proves nothing.
struct Coverage {
  std::map<std::string_view, int> events;
  std::map<std::pair<std::string_view, Outcome>, int> outcomes;
};

class History {
 public:
  History(uint64_t seed, Coverage& coverage) : random_(seed), coverage_(coverage) {
    // Mostly today; also a machine whose clock begins in 1970, and the end of all tokens.
    constexpr std::array<int64_t, 16> kStarts = {5 * kSecond, kLastToken - 2 * kMinute};
    const size_t start = Below(kStarts.size());
    now_ = kStarts.at(start) != 0 ? kStarts.at(start) : 1'700'000'000 * kSecond;
    margin_ = std::array{int64_t{0}, kMilli, 5 * kSecond, 30 * kSecond, 10 * kMinute}.at(Below(5));
    calm_ = OneIn(2);
    StartIssuing();
    Flush();
  }

  void Run(int steps) {
    for (int step = 0; step < steps; ++step) {
      Step();
      if (testing::Test::HasFailure()) {
        ADD_FAILURE() << "step " << step << ", at " << now_ << " us: " << event_ << ": " << Said();
        return;
      }
    }
    CatchUp(log_.size());
    CheckAll();
  }

 private:
  // What one step replicates, as a whole, and what the model says that it does.
  struct Logged {
    std::vector<Wire> wires;
    std::vector<std::pair<size_t, ModelEntry>> entries;
    int64_t last_token = 0;
  };

  uint64_t Below(uint64_t bound) { return random_() % bound; }
  int64_t UpTo(int64_t bound) {
    return static_cast<int64_t>(Below(static_cast<uint64_t>(bound) + 1));
  }
  bool OneIn(uint64_t n) { return Below(n) == 0; }

  int64_t now_ms() const { return now_ / kMilli; }
  Instant now() const { return Instant{Millis{now_ms()}}; }
  FineInstant fine_now() const { return FineInstant{Micros{now_}}; }
  void SetTime(int64_t now) { now_ = std::max(now, kMilli); }

  void Saw(std::string_view event) { ++coverage_.events[event]; }

  // --- What is asked. Half of it is about what is there already, so that something happens.

  size_t AnyKey() { return Below(kKeys.size()); }

  size_t AnyOwner() { return Below(kOwners.size()); }

  size_t AnyOwnerFor(size_t key) {
    const auto& holds = model_.HoldsAt(key);
    if (!holds.empty() && OneIn(2)) return holds.at(Below(holds.size())).owner;
    if (const ModelPlain* plain = model_.PlainAt(key, now_ms()); plain != nullptr && OneIn(2)) {
      const auto* const found = std::find(kOwners.begin(), kOwners.end(), plain->value);
      if (found != kOwners.end()) return static_cast<size_t>(found - kOwners.begin());
    }
    return AnyOwner();
  }

  Mode AnyMode() { return std::array{Mode::kExclusive, Mode::kShared, Mode::kLimit}.at(Below(3)); }

  int64_t AnyLease() {
    constexpr std::array<int64_t, 8> kLeases = {1, 2, 20, 500, 1'000, 5'000, 60'000, 86'400'000};
    if (calm_ && !OneIn(3)) return 200 + UpTo(20'000);
    return OneIn(3) ? 1 + UpTo(3'000) : kLeases.at(Below(kLeases.size()));
  }

  int64_t AnyLinger() {
    constexpr std::array<int64_t, 6> kLingers = {1, 2, 10, 300, 5'000, 86'400'000};
    return OneIn(3) ? 1 + UpTo(2'000) : kLingers.at(Below(kLingers.size()));
  }

  // `key`, and perhaps others: any, or those to which the owner stands as it does to `key`. It has
  // them under the same token, has written its name there as a string, or has nothing there.
  std::vector<size_t> AnyKeysWith(size_t key, size_t owner) {
    std::vector<size_t> keys = {key};
    if (!OneIn(model_.LiveHold(key, owner, now_ms()) != nullptr ? 2 : 4)) return keys;
    const auto standing = [&](size_t each) {
      const ModelPlain* plain = model_.PlainAt(each, now_ms());
      const ModelHold* hold = model_.LiveHold(each, owner, now_ms());
      return std::pair(plain != nullptr && plain->value == kOwners.at(owner),
                       hold != nullptr ? hold->token : 0);
    };
    const bool alike = !OneIn(3);
    const size_t first = Below(kKeys.size());
    for (size_t i = 0; i < kKeys.size(); ++i) {
      const size_t other = (first + i) % kKeys.size();
      if (other == key) continue;
      if (alike ? standing(other) == standing(key) : OneIn(2)) keys.push_back(other);
    }
    return keys;
  }

  Ask AnyAsk() {
    Ask ask;
    const size_t key = AnyKey();
    ask.owner = AnyOwnerFor(key);
    ask.keys = AnyKeysWith(key, ask.owner);
    ask.lease_ms = AnyLease();
    ask.wait_ms = OneIn(8) ? UpTo(10'000) : 0;
    const ModelLock* lock = model_.LockAt(key);
    ask.mode = lock != nullptr && OneIn(2) ? lock->mode : AnyMode();
    if (ask.mode == Mode::kLimit) {
      ask.limit = OneIn(16) ? kMaxLimit : static_cast<uint32_t>(1 + Below(5));
    } else {
      ask.reentrant = OneIn(4);
    }
    ask.session = OneIn(8);
    ask.linger_ms = OneIn(3) ? AnyLinger() : 0;
    return ask;
  }

  // Keywords in any case.
  void SayWord(std::string_view upper, std::string_view lower) {
    said_.emplace_back(OneIn(4) ? lower : upper);
  }

  void SayNumber(int64_t number) { said_.push_back(std::to_string(number)); }

  void SayLease(int64_t lease_ms) {
    const bool seconds = lease_ms % 1'000 == 0 && OneIn(2);
    seconds ? SayWord("EX", "ex") : SayWord("PX", "px");
    SayNumber(seconds ? lease_ms / 1'000 : lease_ms);
  }

  void SayAlso(const std::vector<size_t>& keys) {
    if (keys.size() == 1) return;
    SayWord("ALSO", "also");
    SayNumber(static_cast<int64_t>(keys.size()) - 1);
    for (size_t i = 1; i < keys.size(); ++i) said_.push_back(kKeys.at(keys.at(i)));
  }

  void Begin(const char* event, size_t key, size_t owner) {
    event_ = event;
    said_.clear();
    said_.push_back(kKeys.at(key));
    said_.push_back(kOwners.at(owner));
  }

  void SayOption(const Ask& ask, size_t option) {
    switch (option) {
      case 0:
        SayLease(ask.lease_ms);
        return;
      case 1:
        if (ask.mode == Mode::kShared) SayWord("SHARED", "shared");
        if (ask.mode == Mode::kLimit) {
          SayWord("LIMIT", "limit");
          SayNumber(ask.limit);
        }
        return;
      case 2:
        if (ask.reentrant) SayWord("REENTRANT", "Reentrant");
        return;
      case 3:
        SayAlso(ask.keys);
        return;
      case 4:
        if (ask.linger_ms == 0 && !OneIn(8)) return;
        SayWord("LINGER", "linger");
        SayNumber(ask.linger_ms);
        return;
      case 5:
        if (ask.wait_ms == 0 && !OneIn(8)) return;
        SayWord("WAIT", "wait");
        SayNumber(ask.wait_ms);
        return;
      default:
        if (ask.session) SayWord("SESSION", "session");
        return;
    }
  }

  Args Views() {
    views_.assign(said_.begin(), said_.end());
    return views_;
  }

  std::string Said() const {
    std::string text;
    for (const std::string& word : said_) text += Unquoted(word) + " ";
    return text;
  }

  // --- A step

  void Step() {
    PassTime();
    said_.clear();
    const uint64_t dice = Below(calm_ && !OneIn(8) ? 770 : 1'000);
    if (dice < 420) {
      Acquire();
    } else if (dice < 570) {
      Release();
    } else if (dice < 660) {
      Touch();
    } else if (dice < 710) {
      EndSession();
    } else if (dice < 770) {
      LookAround();
    } else if (dice < 795) {
      StrangerSets();
    } else if (dice < 810) {
      StrangerDeletes();
    } else if (dice < 850) {
      ServerExpires();
    } else if (dice < 910) {
      TimerFires();
    } else if (dice < 920) {
      Dump();
    } else if (dice < 935) {
      Restore();
    } else if (dice < 950) {
      Reload();
    } else if (dice < 985) {
      ChangeLink();
    } else if (dice < 988) {
      Restart(Persistence::kRdb);
    } else if (dice < 990) {
      Restart(Persistence::kNone);
    } else {
      Promote();
    }
    Flush();
  }

  void PassTime() {
    const uint64_t dice = calm_ && !OneIn(8) ? 0 : Below(1'000);
    if (dice < 600) {
      SetTime(now_ + UpTo(3 * kMilli));
    } else if (dice < 700) {
      SetTime(now_ + UpTo(2 * kSecond));
    } else if (dice < 860) {
      GoToAnEnd();
    } else if (dice < 920) {
      SetTime(now_ - UpTo(5 * kMilli));
    } else if (dice < 928) {
      SetTime(now_ - UpTo(20 * kSecond));
    } else if (dice < 930) {
      SetTime(now_ - UpTo(2 * kHour));
    } else if (dice < 940) {
      SetTime(now_ + UpTo(2 * kMinute));
    } else if (dice < 945) {
      SetTime(now_ + UpTo(3 * kHour));
    }
  }

  // The moments at which a comparison can be wrong by one.
  void GoToAnEnd() {
    const size_t key = AnyKey();
    std::optional<int64_t> end_ms;
    if (const auto& holds = model_.HoldsAt(key); !holds.empty()) {
      const ModelHold& hold = holds.at(Below(holds.size()));
      end_ms = OneIn(2) ? hold.end_ms : hold.closes_ms();
    } else if (const ModelPlain* plain = model_.PlainAt(key, now_ms())) {
      end_ms = plain->end_ms;
    }
    // Not far: else time would run from one of the longest leases to the next.
    if (!end_ms.has_value() || *end_ms < now_ms() || *end_ms > now_ms() + 120'000) return;
    SetTime(*end_ms * kMilli +
            std::array<int64_t, 5>{-1, 0, kMilli - 1, kMilli, kMilli + 1}.at(Below(5)));
  }

  // --- Clients

  void Acquire() {
    const Ask ask = AnyAsk();
    Begin("acquire", ask.keys.front(), ask.owner);
    constexpr size_t kOptions = 7;
    const size_t first = Below(kOptions);
    for (size_t i = 0; i < kOptions; ++i) SayOption(ask, (first + i) % kOptions);
    const auto parsed = ParseAcquire(Views(), kLimits);
    const auto* request = std::get_if<AcquireRequest>(&parsed);
    ASSERT_NE(request, nullptr) << std::get<ParseError>(parsed).text;
    EXPECT_EQ(request->session, ask.session);
    EXPECT_EQ(request->wait.count(), ask.wait_ms);
    ExpectKeys(request->also, ask.keys);

    std::vector<Site> sites;
    for (const size_t key : ask.keys) DropExpiredPlain(key);
    for (const size_t key : ask.keys) sites.push_back({primary_.At(key), {}});
    const Admission admission = Decide(sites, *request, fine_now(), primary_.clock);
    NoteSituation(ask);
    const bool strings = model_.PlainAt(ask.keys.front(), now_ms()) != nullptr;
    const Model::Reply expected = model_.Acquire(ask, now_);
    Expect("acquire", admission.outcome, expected.outcome);
    ASSERT_EQ(admission.granted(), expected.outcome <= Outcome::kUpgraded);
    EXPECT_FALSE(admission.busy() && expected.outcome != Outcome::kHeldByOther);
    if (ask.keys.size() > 1) NoteSet(strings, admission.outcome);
    if (admission.granted()) Admit(ask, *request, admission, expected);
    // Refused or not, clients see what they were told, on every key of the set.
    for (const size_t key : ask.keys) {
      witness_.Fenced(key, CurrentToken(primary_.At(key), now()), now_ms());
      Touch(key);
    }
  }

  void Admit(const Ask& ask, const AcquireRequest& request, const Admission& admission,
             const Model::Reply& expected) {
    const auto token = static_cast<int64_t>(admission.token.value);
    EXPECT_EQ(token, expected.token);
    const bool upgrade = admission.outcome == Outcome::kUpgraded;
    const bool is_new = admission.outcome == Outcome::kGranted || upgrade;
    if (is_new) witness_.Issued(token);
    for (const size_t key : ask.keys) {
      CarryOut(key, HeldBy(primary_.At(key), request, admission.token, now()));
      if (is_new) {
        witness_.Granted(key, ask, token, upgrade, now_ms());
      } else {
        witness_.GrantedAgain(key, ask, token, now_ms());
      }
      EXPECT_TRUE(IsCurrent(primary_.At(key), admission.token, now())) << "a set taken in part";
    }
  }

  void NoteSet(bool strings, Outcome outcome) {
    if (outcome == Outcome::kGranted) {
      Saw(strings ? "a set of strings is taken over" : "a set is taken");
    } else if (outcome == Outcome::kHeldAlready) {
      Saw("a set is asked for again");
    } else if (outcome == Outcome::kDowngraded) {
      Saw("a set is downgraded");
    } else {
      Saw("a set is refused");
    }
  }

  // Situations that must come up for the histories to be worth something.
  void NoteSituation(const Ask& ask) {
    const size_t key = ask.keys.front();
    if (const ModelPlain* plain = model_.PlainAt(key, now_ms())) {
      Saw(plain->value == kOwners.at(ask.owner) ? "the owner of a string asks"
                                                : "a stranger's string is in the way");
    }
    const size_t others = model_.OthersIn(key, ask.owner, now_ms());
    const ModelHold* own = model_.HoldOf(key, ask.owner);
    if (own != nullptr && own->end_ms < now_ms() && now_ms() <= own->closes_ms()) {
      Saw(others == 0 ? "the owner of a lingering hold asks, alone"
                      : "the owner of a lingering hold asks, with others there");
    }
    const ModelLock* lock = model_.LockAt(key);
    if (lock == nullptr || others == 0) return;
    bool any_live = false;
    bool any_over = false;
    for (const ModelHold& hold : lock->holds) {
      if (hold.owner == ask.owner) continue;
      any_live = any_live || now_ms() <= hold.end_ms;
      any_over = any_over || now_ms() > hold.closes_ms();
    }
    if (!any_live) Saw("only lingering holds are there");
    if (any_over) Saw("some holds are over, some are not");
    if (lock->mode == Mode::kLimit && ask.mode == Mode::kLimit && own == nullptr) {
      if (others + 1 == ask.limit) Saw("the last permit is asked for");
      if (others == ask.limit) Saw("one permit too many is asked for");
      if (others > ask.limit) Saw("a limit below the number of holders");
    }
    if (lock->mode == Mode::kShared && others >= 5) Saw("five readers or more");
  }

  void Release() {
    const size_t key = AnyKey();
    const size_t owner = AnyOwnerFor(key);
    const std::vector<size_t> keys = AnyKeysWith(key, owner);
    Begin("release", key, owner);
    SayAlso(keys);
    const auto parsed = ParseRelease(Views());
    const auto* request = std::get_if<ReleaseRequest>(&parsed);
    ASSERT_NE(request, nullptr) << std::get<ParseError>(parsed).text;
    ExpectKeys(request->also, keys);
    for (const size_t each : keys) ReleaseOne(each, owner, *request);
  }

  void ReleaseOne(size_t key, size_t owner, const ReleaseRequest& request) {
    DropExpiredPlain(key);
    const bool plain = model_.PlainAt(key, now_ms()) != nullptr;
    const Decision decision = Decide(primary_.At(key), request, now());
    Expect("release", decision.outcome, model_.Release(key, owner, now_ms()));
    ASSERT_EQ(decision.change.has_value(),
              decision.outcome == Outcome::kReleased || decision.outcome == Outcome::kLingerCut);
    if (!decision.change.has_value()) return;
    CarryOut(key, *decision.change);
    if (plain) {
      Saw("a string is released");
    } else if (decision.outcome == Outcome::kLingerCut) {
      witness_.LingerCut(key, owner, now_ms());
    } else {
      witness_.Released(key, owner, now_ms());
      if (model_.HoldOf(key, owner) != nullptr) Saw("one of several counts is released");
    }
  }

  void Touch() {
    const size_t key = AnyKey();
    const size_t owner = AnyOwnerFor(key);
    const std::vector<size_t> keys = AnyKeysWith(key, owner);
    const int64_t lease_ms = AnyLease();
    Begin("touch", key, owner);
    const bool lease_first = OneIn(2);
    if (lease_first) SayLease(lease_ms);
    SayAlso(keys);
    if (!lease_first) SayLease(lease_ms);
    const auto parsed = ParseTouch(Views(), kLimits);
    const auto* request = std::get_if<TouchRequest>(&parsed);
    ASSERT_NE(request, nullptr) << std::get<ParseError>(parsed).text;
    ExpectKeys(request->also, keys);
    for (const size_t each : keys) TouchOne(each, owner, lease_ms, *request);
  }

  void TouchOne(size_t key, size_t owner, int64_t lease_ms, const TouchRequest& request) {
    DropExpiredPlain(key);
    const bool plain = model_.PlainAt(key, now_ms()) != nullptr;
    const Decision decision = Decide(primary_.At(key), request, now());
    Expect("touch", decision.outcome, model_.Touch(key, owner, lease_ms, now_ms()));
    ASSERT_EQ(decision.change.has_value(), decision.outcome == Outcome::kTouched);
    if (!decision.change.has_value()) return;
    CarryOut(key, *decision.change);
    if (plain) {
      Saw("a string is touched");
    } else {
      witness_.Touched(key, owner, now_ms() + lease_ms, now_ms());
    }
  }

  // Connections close. A string is bound to none.
  void EndSession() {
    const size_t key = AnyKey();
    const size_t first = AnyOwnerFor(key);
    Begin("session ends", key, first);
    DropExpiredPlain(key);
    std::vector<Owner> owners = {Owner{kOwners.at(first)}};
    for (size_t owner = 0; owner < kOwners.size(); ++owner) {
      if (owner != first && OneIn(4)) owners.push_back(Owner{kOwners.at(owner)});
    }
    const std::vector<Owner> end = DecideSessionEnd(primary_.At(key), owners, now());
    std::vector<size_t> ended;
    for (const Owner owner : owners) {
      const auto number = static_cast<size_t>(
          std::find(kOwners.begin(), kOwners.end(), owner.bytes) - kOwners.begin());
      if (model_.EndSession(key, number, now_ms())) ended.push_back(number);
    }
    ASSERT_EQ(end.size(), ended.size());
    if (end.empty()) {
      Saw("a session ends without a hold");
      return;
    }
    if (end.size() > 1) Saw("several sessions end at once");
    for (const size_t owner : ended) {
      Saw(model_.HoldOf(key, owner) != nullptr ? "a session ends, its hold lingers"
                                               : "a session ends with its hold");
    }
    // Owners whose holds have ended already may be named too.
    CarryOut(key, SessionsEnded{now(), OneIn(2) ? end : owners});
    for (const size_t owner : ended) witness_.SessionEnded(key, owner, now_ms());
  }

  // LOCK.FENCE and LOCK.INFO.
  void LookAround() {
    const size_t key = AnyKey();
    event_ = "fence and info";
    said_ = {kKeys.at(key)};
    DropExpiredPlain(key);
    const Place place = primary_.At(key);
    const std::optional<Token> token = CurrentToken(place, now());
    Saw(token.has_value() ? "fence: a token" : "fence: null");
    witness_.Fenced(key, token, now_ms());
    const size_t holders = CountHolders(place, now());
    if (model_.PlainAt(key, now_ms()) != nullptr) {
      ASSERT_EQ(holders, 1U);
    } else {
      witness_.Informed(key, place.lock, holders, now_ms());
      EXPECT_EQ(holders == 0, model_.OthersIn(key, kOwners.size(), now_ms()) == 0);
    }
    Touch(key);
  }

  // --- Strangers, and the server itself

  void StrangerSets() {
    const size_t key = AnyKey();
    const std::string value =
        OneIn(4) ? std::string(OneIn(2) ? 0 : 300, 'v') : kOwners.at(AnyOwner());
    event_ = "SET";
    said_ = {kKeys.at(key), value};
    Set(key, value);
    if (OneIn(3)) Set((key + 1) % kKeys.size(), value);
  }

  void Set(size_t key, const std::string& value) {
    const auto end_ms = OneIn(3) ? std::nullopt : std::optional(now_ms() + AnyLease());
    Saw(model_.LockAt(key) != nullptr ? "SET over a lock" : "SET");
    model_.keys.at(key) = ModelPlain{value, end_ms};
    primary_.Set(key, value, end_ms);
    witness_.Gone(key);
    Wire wire = {"SET", kKeys.at(key), value};
    if (end_ms.has_value()) wire.push_back(std::to_string(*end_ms));
    Log(key, std::move(wire));
  }

  void StrangerDeletes() {
    const size_t key = AnyKey();
    event_ = "DEL";
    said_ = {kKeys.at(key)};
    Saw("DEL");
    witness_.Gone(key);
    Delete(key);
  }

  // The server removes keys whose time is over, sooner or later. It goes by the TTL of the key,
  // which is when the lock closes.
  void ServerExpires() {
    const size_t key = AnyKey();
    event_ = "expire";
    said_ = {kKeys.at(key)};
    DropExpiredPlain(key);
    const Lock* lock = primary_.At(key).lock;
    if (lock == nullptr || now() <= lock->closes()) return;
    Saw("expired");
    witness_.Expired(key, now_ms());
    Delete(key);
  }

  // A string whose time is over may be removed before the request is looked at, or not.
  void DropExpiredPlain(size_t key) {
    const auto* plain = std::get_if<ModelPlain>(&model_.keys.at(key));
    if (plain == nullptr || model_.PlainAt(key, now_ms()) != nullptr) return;
    Saw("a string is over");
    if (OneIn(2)) Delete(key);
  }

  void Delete(size_t key) {
    model_.keys.at(key) = {};
    primary_.keys.at(key) = {};
    Log(key, {"DEL", kKeys.at(key)});
  }

  // The primary's timer: what is over is told to be over.
  void TimerFires() {
    const size_t key = AnyKey();
    event_ = "timer";
    said_ = {kKeys.at(key)};
    const std::optional<Expired> overdue = Overdue(primary_.At(key), now());
    const size_t swept = model_.Sweep(key, now_ms());
    EXPECT_EQ(overdue.has_value(), swept > 0);
    if (overdue.has_value()) {
      EXPECT_EQ(Expire(key, *overdue), swept);
      Saw(model_.LockAt(key) == nullptr ? "the timer ends a lock" : "the timer ends some holds");
    }
    Touch(key);
  }

  // --- Carrying out

  // Returns how many holds were removed.
  size_t Expire(size_t key, const Expired& expired) {
    size_t removed = 0;
    for (const Hold& hold : primary_.At(key).lock->holds(Lock::Order::kByOwner)) {
      if (hold.KeepsOutAt(expired.before)) continue;
      const auto* const found = std::find(kOwners.begin(), kOwners.end(), hold.owner.bytes);
      EXPECT_NE(found, kOwners.end());
      witness_.Lost(key, static_cast<size_t>(found - kOwners.begin()), now_ms());
      ++removed;
    }
    Log(key, primary_.CarryOut(key, expired));
    return removed;
  }

  void CarryOut(size_t key, const Change& change) {
    if (const auto overdue = OverdueBefore(primary_.At(key), change, now()); overdue.has_value()) {
      Expire(key, *overdue);
      Saw("a hold is ended before the next change");
    }
    Log(key, primary_.CarryOut(key, change));
  }

  // --- Replication, persistence, failover

  void Log(size_t key, Wire wire) {
    group_.wires.push_back(std::move(wire));
    Touch(key);
  }

  void Touch(size_t key) { touched_.at(key) = true; }

  // The end of a step: what it replicates is sent, and what it touched is looked at.
  void Flush() {
    if (!group_.wires.empty()) {
      for (size_t key = 0; !linked_ && key < kKeys.size(); ++key) {
        if (touched_.at(key)) group_.entries.emplace_back(key, model_.keys.at(key));
      }
      group_.last_token = model_.last_token;
      log_.push_back(std::move(group_));
      group_ = {};
    }
    if (linked_) CatchUp(log_.size());
    for (size_t key = 0; key < kKeys.size(); ++key) {
      if (touched_.at(key)) Check(key);
    }
    touched_ = {};
    EXPECT_EQ(static_cast<int64_t>(primary_.clock.last().value), model_.last_token);
  }

  // The replica obeys what the next `count` steps replicated.
  void CatchUp(size_t count) {
    for (; count > 0; --count) {
      const Logged logged = std::move(log_.front());
      log_.pop_front();
      for (const Wire& wire : logged.wires) {
        EXPECT_TRUE(replica_.Obey(wire)) << testing::PrintToString(wire);
      }
      for (const auto& [key, entry] : logged.entries) replica_keys_.at(key) = entry;
      replica_token_ = std::max(replica_token_, logged.last_token);
    }
    EXPECT_EQ(static_cast<int64_t>(replica_.clock.last().value), replica_token_);
  }

  // The link to the replica breaks, or comes back and the replica gets what it missed.
  void ChangeLink() {
    if (linked_ && !OneIn(4)) return;
    event_ = "link";
    if (linked_) {
      replica_keys_ = model_.keys;
    } else {
      CatchUp(log_.size());
      EXPECT_TRUE(AreStored(replica_, replica_keys_)) << "the replica differs from the model";
      Saw("caught up");
    }
    linked_ = !linked_;
    CheckAll();
  }

  // DEBUG RELOAD: all locks go through their bytes.
  void Reload() {
    event_ = "reload";
    Saw("reload");
    EXPECT_TRUE(primary_.Load(primary_));
    touched_.fill(true);
  }

  // DUMP, for a later RESTORE.
  void Dump() {
    const size_t key = AnyKey();
    const Lock* lock = primary_.At(key).lock;
    if (lock == nullptr) return;
    event_ = "DUMP";
    dump_ = Encode(*lock);
    dumped_ = *model_.LockAt(key);
  }

  // A client restores a lock as it was once, or as it might have been elsewhere: with counts and
  // tokens that no history here comes to.
  void Restore() {
    const size_t key = AnyKey();
    event_ = "RESTORE";
    said_ = {kKeys.at(key)};
    if (dump_.empty() || OneIn(2)) MakeDump();
    Saw("RESTORE");
    ASSERT_TRUE(primary_.Restore(key, dump_));
    model_.keys.at(key) = dumped_;
    for (const ModelHold& hold : dumped_.holds) {
      model_.last_token = std::max(model_.last_token, hold.token);
    }
    witness_.TakeBack(key, model_.keys.at(key));
    Log(key, {"RESTORE", kKeys.at(key), dump_});
  }

  void MakeDump() {
    dumped_ = {AnyMode(), {}};
    const size_t holds = dumped_.mode == Mode::kExclusive ? 1 : 1 + Below(3);
    const size_t first = AnyOwner();
    const int64_t token = std::clamp<int64_t>(model_.last_token + UpTo(5) - 3, 1, kLastToken);
    std::unique_ptr<Lock> lock;
    for (size_t i = 0; i < holds; ++i) {
      const ModelHold hold = {(first + i) % kOwners.size(),
                              OneIn(2) ? token : std::max<int64_t>(token - 1, 1),
                              std::max<int64_t>(now_ms() - UpTo(1'000), 0),
                              std::max<int64_t>(now_ms() + UpTo(3'000) - 500, 0),
                              OneIn(2) ? AnyLinger() : 0,
                              kLargestCount - UpTo(1)};
      const Held held{dumped_.mode,
                      {.owner = Owner{kOwners.at(hold.owner)},
                       .token = Token{static_cast<uint64_t>(hold.token)},
                       .since = Instant{Millis{hold.since_ms}},
                       .end = Instant{Millis{hold.end_ms}},
                       .linger = Millis{hold.linger_ms},
                       .count = static_cast<uint32_t>(hold.count)}};
      if (Lock* next = Apply(lock.get(), held); next != lock.get()) lock.reset(next);
      dumped_.holds.push_back(hold);
    }
    dump_ = Encode(*lock);
  }

  enum class Persistence { kNone, kRdb };

  void Restart(Persistence persistence) {
    const bool kept = persistence == Persistence::kRdb;
    event_ = kept ? "restart from an RDB file" : "restart with nothing";
    Saw(event_);
    Node restarted;
    if (kept) {
      EXPECT_TRUE(restarted.Load(primary_));
    } else {
      model_.keys = {};
      witness_.TakeBackAll(model_.keys);
    }
    model_.last_token = model_.HighestStoredToken();
    primary_ = std::move(restarted);
    WaitForTheGuarantee();
    SyncReplica();
    StartIssuing();
  }

  // The replica takes over, perhaps without the last writes and with a clock of its own.
  void Promote() {
    if (linked_) replica_keys_ = model_.keys;
    const size_t lost = OneIn(4) ? 0 : Below(log_.size() + 1);
    CatchUp(log_.size() - lost);
    EXPECT_TRUE(AreStored(replica_, replica_keys_)) << "the replica differs from the model";
    event_ = "promote";
    Saw(lost == 0 ? "promote" : "promote, writes lost");
    SetTime(now_ + UpTo(4 * kSecond) - 2 * kSecond);
    std::swap(primary_, replica_);
    model_.keys = replica_keys_;
    std::swap(model_.last_token, replica_token_);
    if (OneIn(2)) {  // the new replica is a new machine, not the old primary
      replica_ = Node();
      replica_token_ = 0;
    }
    if (lost > 0) witness_.TakeBackAll(model_.keys);
    WaitForTheGuarantee();
    SyncReplica();
    StartIssuing();
  }

  // Full synchronisation: the replica has what the primary has; its clock never goes back.
  void SyncReplica() {
    log_.clear();
    linked_ = true;
    EXPECT_TRUE(replica_.Load(primary_));
    replica_token_ = std::max(replica_token_, model_.HighestStoredToken());
    CheckAll();
  }

  void StartIssuing() {
    const Token floor = primary_.clock.StartIssuing(fine_now(), Millis{margin_ / kMilli});
    primary_.clock.Observe(floor);  // as everybody who is told of it
    model_.StartIssuing(now_, margin_);
    EXPECT_EQ(static_cast<int64_t>(floor.value), model_.last_token);
    EXPECT_GE(static_cast<int64_t>(floor.value), witness_.highest()) << "the margin is too small";
    group_.wires.push_back({"FLOOR", std::to_string(floor.value)});
  }

  // Tokens rise across lost data as long as the lead of what was lost stays within the margin.
  // Where it does not, time passes until it just does.
  void WaitForTheGuarantee() {
    const bool knows_all = model_.last_token >= witness_.highest();
    if (knows_all || witness_.highest() - now_ <= margin_) return;
    SetTime(witness_.highest() - margin_);
    Saw("the margin just suffices");
  }

  // --- Checks

  void Expect(std::string_view request, Outcome outcome, Outcome expected) {
    EXPECT_EQ(NameOf(outcome), NameOf(expected)) << request;
    ++coverage_.outcomes[{request, expected}];
  }

  static void ExpectKeys(Keys also, const std::vector<size_t>& keys) {
    ASSERT_EQ(also.size() + 1, keys.size());
    for (size_t i = 0; i < also.size(); ++i) EXPECT_EQ(also[i], kKeys.at(keys.at(i + 1)));
  }

  void CheckAll() {
    for (size_t key = 0; key < kKeys.size(); ++key) Check(key);
  }

  // The primary is as the model says, and the replica, if it knows all, as the primary.
  void Check(size_t key) {
    EXPECT_TRUE(IsStored(primary_.keys.at(key), model_.keys.at(key)))
        << Quoted(kKeys.at(key)) << " on the primary is\n"
        << Describe(primary_.keys.at(key)) << "\nbut should be\n"
        << Describe(model_.keys.at(key));
    if (linked_ && log_.empty()) {
      EXPECT_TRUE(SameBytes(primary_.keys.at(key), replica_.keys.at(key)))
          << Quoted(kKeys.at(key)) << " on the replica is\n"
          << Describe(replica_.keys.at(key)) << "\nbut on the primary\n"
          << Describe(primary_.keys.at(key));
    }
    const Place place = primary_.At(key);
    const std::optional<int64_t> current = model_.Fence(key, now_ms());
    const std::optional<Token> token = CurrentToken(place, now());
    EXPECT_EQ(token.has_value() ? static_cast<int64_t>(token->value) : 0, current.value_or(0));
    ExpectIsCurrent(key, current.value_or(witness_.highest()) + 1);
    if (place.lock == nullptr) return;
    int64_t closes_ms = 0;
    for (const ModelHold& hold : model_.HoldsAt(key)) {
      closes_ms = std::max(closes_ms, hold.closes_ms());
      ExpectIsCurrent(key, hold.token);
    }
    EXPECT_EQ(Count(place.lock->closes()), closes_ms) << "the TTL of the key";
    EXPECT_EQ(place.lock->KeepingOut(now()), model_.OthersIn(key, kOwners.size(), now_ms()));
  }

  void ExpectIsCurrent(size_t key, int64_t token) {
    EXPECT_EQ(IsCurrent(primary_.At(key), Token{static_cast<uint64_t>(token)}, now()),
              model_.FenceBy(key, token, now_ms()))
        << "fence by token " << token;
  }

  std::mt19937_64 random_;
  Coverage& coverage_;
  int64_t now_ = 0;
  int64_t margin_ = 0;
  bool calm_ = false;  // leases last, little time passes, strangers are rare: locks fill up

  // What happens in this step.
  const char* event_ = "start";
  std::vector<std::string> said_;
  std::vector<std::string_view> views_;
  Logged group_;
  std::array<bool, kKeys.size()> touched_{};

  Node primary_;
  Node replica_;
  Model model_;
  Witness witness_;
  bool linked_ = true;
  std::deque<Logged> log_;  // what the replica has not yet been told
  ModelKeys replica_keys_;  // what it should have, while there is no link
  int64_t replica_token_ = 0;
  std::string dump_;
  ModelLock dumped_{};
};

void RunHistories(uint64_t first_seed, uint64_t histories, int steps, Coverage& coverage) {
  for (uint64_t seed = first_seed; seed < first_seed + histories; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    History(seed, coverage).Run(steps);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(History, AgreesWithTheModel) {
  constexpr uint64_t kHistories = 1'000;
  constexpr int kSteps = 1'000;
  static_assert(kHistories * kSteps >= 500'000);
  Coverage coverage;
  RunHistories(1, kHistories, kSteps, coverage);
  if (HasFailure()) return;

  // Each outcome that a request can have was seen, and so was each event.
  const auto expect_seen = [&](std::string_view request, const std::vector<Outcome>& outcomes) {
    for (const Outcome outcome : outcomes) {
      const int times = coverage.outcomes[std::pair(request, outcome)];
      EXPECT_GE(times, 100) << request << ": " << NameOf(outcome);
    }
  };
  expect_seen("acquire", {Outcome::kGranted, Outcome::kHeldAlready, Outcome::kDowngraded,
                          Outcome::kUpgraded, Outcome::kHeldByOther, Outcome::kOtherMode,
                          Outcome::kHoldsSome, Outcome::kHoldsApart, Outcome::kUpgradesSeveral,
                          Outcome::kCountedOut, Outcome::kTokensUsedUp});
  expect_seen("release", {Outcome::kReleased, Outcome::kFree, Outcome::kLeaseEnded,
                          Outcome::kLingerCut, Outcome::kHeldByOther});
  expect_seen("touch",
              {Outcome::kTouched, Outcome::kFree, Outcome::kLeaseEnded, Outcome::kHeldByOther});
  for (const std::string_view event : {"a hold is ended before the next change",
                                       "a limit below the number of holders",
                                       "a session ends with its hold",
                                       "a session ends without a hold",
                                       "a session ends, its hold lingers",
                                       "several sessions end at once",
                                       "a set is asked for again",
                                       "a set is downgraded",
                                       "a set is refused",
                                       "a set is taken",
                                       "a set of strings is taken over",
                                       "a stranger's string is in the way",
                                       "a string is over",
                                       "a string is released",
                                       "a string is touched",
                                       "caught up",
                                       "DEL",
                                       "expired",
                                       "five readers or more",
                                       "fence: a token",
                                       "fence: null",
                                       "one of several counts is released",
                                       "one permit too many is asked for",
                                       "only lingering holds are there",
                                       "promote",
                                       "promote, writes lost",
                                       "reload",
                                       "restart from an RDB file",
                                       "restart with nothing",
                                       "RESTORE",
                                       "SET",
                                       "SET over a lock",
                                       "some holds are over, some are not",
                                       "the last permit is asked for",
                                       "the margin just suffices",
                                       "the owner of a lingering hold asks, alone",
                                       "the owner of a lingering hold asks, with others there",
                                       "the owner of a string asks",
                                       "the timer ends a lock",
                                       "the timer ends some holds"}) {
    EXPECT_GE(coverage.events[event], 100) << event;
  }
}

TEST(HistoryLong, AgreesWithTheModel) {
  Coverage coverage;
  RunHistories(1'000'000, 16'000, 1'000, coverage);
}

}  // namespace
}  // namespace turnstile
