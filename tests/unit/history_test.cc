// Random histories against a naive model.
//
// A small simulated world (a primary, a replica, strangers who use plain SET and DEL, a wall clock
// that also steps back) drives the core through parse, decide, apply and replicate. After every
// step three independent parties must be content:
//   - the Model, which follows the contract in the most straightforward way and shares no code with
//     the core: same outcome, same stored state, on the primary and on the replica;
//   - the Witness, which knows only what clients were told: never two owners, tokens only rise,
//     nothing lost comes back;
//   - the lease guard: no lease got longer but by a call of its owner.
//
// Every history follows from its seed, which is printed on failure.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <ostream>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/encoding.h"
#include "core/fact.h"
#include "core/lock.h"
#include "core/request.h"
#include "core/token_clock.h"
#include "printers.h"

namespace turnstile {
namespace {

using LockPtr = std::unique_ptr<Lock>;

constexpr int64_t kMilli = 1'000;  // in microseconds, as all times of the simulation
constexpr int64_t kSecond = 1'000 * kMilli;
constexpr int64_t kMinute = 60 * kSecond;
constexpr int64_t kHour = 60 * kMinute;
constexpr int64_t kLastToken = (int64_t{1} << 53) - 1;
constexpr Limits kLimits{.max_lease = std::chrono::hours{24}};

// --- The naive model --------------------------------------------------------------------------

struct ModelHold {
  std::string owner;
  int64_t token;
  int64_t since_ms;
  int64_t end_ms;
};

struct ModelPlain {
  std::string value;
  std::optional<int64_t> end_ms;
};

using ModelEntry = std::variant<ModelHold, ModelPlain>;

class Model {
 public:
  std::map<std::string, ModelEntry> keys;
  int64_t last_token = 0;

  Outcome Acquire(const std::string& key, const std::string& owner, int64_t lease_ms, int64_t now) {
    const int64_t now_ms = now / kMilli;
    if (const ModelPlain* plain = PlainAt(key)) {
      if (plain->value != owner) return Outcome::kHeldByOther;
    }
    if (ModelHold* hold = HoldAt(key); hold != nullptr && now_ms <= hold->end_ms) {
      if (hold->owner != owner) return Outcome::kHeldByOther;
      hold->end_ms = now_ms + lease_ms;
      return Outcome::kHeldAlready;
    }
    const int64_t token = std::max(last_token + 1, now);
    if (token > kLastToken) return Outcome::kTokensUsedUp;
    last_token = token;
    keys[key] = ModelHold{owner, token, now_ms, now_ms + lease_ms};
    return Outcome::kGranted;
  }

  Outcome Release(const std::string& key, const std::string& owner, int64_t now) {
    const Outcome outcome = Look(key, owner, now, Outcome::kReleased);
    if (outcome == Outcome::kReleased) keys.erase(key);
    return outcome;
  }

  Outcome Touch(const std::string& key, const std::string& owner, int64_t lease_ms, int64_t now) {
    const Outcome outcome = Look(key, owner, now, Outcome::kTouched);
    if (outcome == Outcome::kTouched) {
      const int64_t end_ms = now / kMilli + lease_ms;
      if (ModelHold* hold = HoldAt(key)) {
        hold->end_ms = end_ms;
      } else {
        PlainAt(key)->end_ms = end_ms;
      }
    }
    return outcome;
  }

  std::optional<int64_t> Fence(const std::string& key, int64_t now) {
    const ModelHold* hold = HoldAt(key);
    if (hold == nullptr || now / kMilli > hold->end_ms) return std::nullopt;
    return hold->token;
  }

  void StartIssuing(int64_t now, int64_t margin) {
    const bool far_ahead = last_token - now >= 10 * kMinute;
    last_token = std::max(last_token, now) + (far_ahead ? 0 : margin);
    last_token = std::min(last_token, kLastToken);
  }

  // What a server knows of tokens when it has only read its locks.
  int64_t HighestStoredToken() const {
    int64_t highest = 0;
    for (const auto& [key, entry] : keys) {
      if (const auto* hold = std::get_if<ModelHold>(&entry)) {
        highest = std::max(highest, hold->token);
      }
    }
    return highest;
  }

  ModelHold* HoldAt(const std::string& key) {
    const auto found = keys.find(key);
    return found == keys.end() ? nullptr : std::get_if<ModelHold>(&found->second);
  }

  ModelPlain* PlainAt(const std::string& key) {
    const auto found = keys.find(key);
    return found == keys.end() ? nullptr : std::get_if<ModelPlain>(&found->second);
  }

  std::optional<ModelEntry> At(const std::string& key) const {
    const auto found = keys.find(key);
    return found == keys.end() ? std::nullopt : std::optional(found->second);
  }

 private:
  Outcome Look(const std::string& key, const std::string& owner, int64_t now, Outcome if_own) {
    if (const ModelPlain* plain = PlainAt(key)) {
      return plain->value == owner ? if_own : Outcome::kHeldByOther;
    }
    const ModelHold* hold = HoldAt(key);
    if (hold == nullptr) return Outcome::kFree;
    const bool own = hold->owner == owner;
    if (now / kMilli <= hold->end_ms) return own ? if_own : Outcome::kHeldByOther;
    return own ? Outcome::kLeaseEnded : Outcome::kFree;
  }
};

// --- A server: a few keys, and the core -------------------------------------------------------

using Wire = std::vector<std::string>;  // one replicated command

class Node {
 public:
  struct Entry {
    LockPtr lock;
    std::optional<std::string> plain;
    std::optional<int64_t> plain_end_ms;
  };

  std::map<std::string, Entry> keys;
  TokenClock clock;

  Place At(const std::string& key) const {
    const auto found = keys.find(key);
    if (found == keys.end()) return {};
    const Entry& entry = found->second;
    if (entry.plain.has_value()) {
      return {.lock = nullptr, .plain = PlainLock{*entry.plain, kMaxInstant}};
    }
    return {.lock = entry.lock.get(), .plain = std::nullopt};
  }

  // Carries a decided change out and says what is to be replicated.
  Wire CarryOut(const std::string& key, const std::string& owner, const Change& change) {
    if (const auto* held = std::get_if<Held>(&change)) {
      const Hold hold = held->hold;
      Wire wire = {"HELD",
                   key,
                   std::string(hold.owner.bytes),
                   std::to_string(hold.token.value),
                   std::to_string(hold.since.time_since_epoch().count()),
                   std::to_string(hold.end.time_since_epoch().count())};
      Store(key, *held);
      return wire;
    }
    if (const auto* extended = std::get_if<PlainExtended>(&change)) {
      keys.at(key).plain_end_ms = extended->end.time_since_epoch().count();
      return {"PEXPIREAT", key, std::to_string(*keys.at(key).plain_end_ms)};
    }
    keys.erase(key);
    if (std::holds_alternative<PlainFreed>(change)) return {"DEL", key};
    return {"RELEASE", key, owner};
  }

  // What a replica does with it. Returns whether it could.
  bool Obey(const Wire& wire) {
    const std::vector<std::string_view> words(wire.begin(), wire.end());
    const std::string_view name = words[0];
    if (name == "HELD" || name == "FLOOR") {
      const auto parsed = ParseFact(words);
      const auto* fact = std::get_if<Fact>(&parsed);
      if (fact == nullptr) return false;
      if (const auto* floor = std::get_if<FloorFact>(fact)) {
        clock.Observe(floor->token);
      } else {
        Store(std::string(std::get<HeldFact>(*fact).key), std::get<HeldFact>(*fact).held);
      }
    } else if (name == "RELEASE") {
      const auto parsed = ParseRelease(Args(words).subspan(2));
      const Decision decision =
          Decide(At(wire[1]), std::get<ReleaseRequest>(parsed), kBeforeAnyEnd);
      if (decision.outcome != Outcome::kReleased) return false;
      keys.erase(wire[1]);
    } else if (name == "DEL") {
      keys.erase(wire[1]);
    } else if (name == "PEXPIREAT") {
      keys.at(wire[1]).plain_end_ms = std::stoll(wire[2]);
    } else {
      Set(wire[1], wire[2], wire.size() > 3 ? std::optional(std::stoll(wire[3])) : std::nullopt);
    }
    return true;
  }

  void Set(const std::string& key, const std::string& value, std::optional<int64_t> end_ms) {
    keys[key] = Entry{.lock = nullptr, .plain = value, .plain_end_ms = end_ms};
  }

  // Reads everything that `other`, which may be this one, would write to an RDB file. Returns
  // whether all could be read.
  bool Load(const Node& other) {
    std::map<std::string, Entry> loaded;
    for (const auto& [key, entry] : other.keys) {
      Entry copy{.lock = nullptr, .plain = entry.plain, .plain_end_ms = entry.plain_end_ms};
      if (entry.lock != nullptr) {
        const std::string bytes = Encode(entry.lock->hold());
        const auto hold = Decode(bytes, kCurrentEncoding);
        if (!hold.has_value()) return false;
        clock.Observe(hold->token);
        copy.lock.reset(Lock::Make(*hold));
      }
      loaded.emplace(key, std::move(copy));
    }
    keys = std::move(loaded);
    return true;
  }

 private:
  void Store(const std::string& key, const Held& held) {
    clock.Observe(held.hold.token);
    Entry& entry = keys[key];
    entry.plain.reset();
    entry.plain_end_ms.reset();
    Lock* const stored = Apply(entry.lock.get(), held);
    if (stored != entry.lock.get()) entry.lock.reset(stored);
  }
};

bool Equal(const Node& node, const Model& model) {
  return static_cast<int64_t>(node.clock.last().value) == model.last_token &&
         std::equal(node.keys.begin(), node.keys.end(), model.keys.begin(), model.keys.end(),
                    [](const auto& a, const auto& b) {
                      if (a.first != b.first) return false;
                      if (const auto* plain = std::get_if<ModelPlain>(&b.second)) {
                        return a.second.lock == nullptr && a.second.plain == plain->value &&
                               a.second.plain_end_ms == plain->end_ms;
                      }
                      const auto& expected = std::get<ModelHold>(b.second);
                      if (a.second.lock == nullptr || a.second.plain.has_value()) return false;
                      const Hold hold = a.second.lock->hold();
                      return hold.owner.bytes == expected.owner &&
                             static_cast<int64_t>(hold.token.value) == expected.token &&
                             hold.since.time_since_epoch().count() == expected.since_ms &&
                             hold.end.time_since_epoch().count() == expected.end_ms;
                    });
}

bool SameKeys(const Node& one, const Node& other) {
  return std::equal(one.keys.begin(), one.keys.end(), other.keys.begin(), other.keys.end(),
                    [](const auto& a, const auto& b) {
                      if (a.first != b.first || a.second.plain != b.second.plain ||
                          a.second.plain_end_ms != b.second.plain_end_ms) {
                        return false;
                      }
                      const Lock* const left = a.second.lock.get();
                      const Lock* const right = b.second.lock.get();
                      if (left == nullptr || right == nullptr) return left == right;
                      return Encode(left->hold()) == Encode(right->hold());
                    });
}

// --- The witness: what clients were told ------------------------------------------------------

class Witness {
 public:
  // The highest token that anybody ever got.
  int64_t highest() const { return highest_; }

  void Granted(const std::string& key, const std::string& owner, int64_t token, int64_t end_ms,
               int64_t now_ms) {
    const auto before = believed_.find(key);
    if (before != believed_.end()) {
      EXPECT_GT(now_ms, before->second.end_ms)
          << "two owners: " << Quoted(before->second.owner) << " and " << Quoted(owner);
    }
    EXPECT_GE(token, 1);
    EXPECT_LE(token, kLastToken);
    EXPECT_GT(token, highest_of_[key]) << "the lock's tokens do not rise";
    EXPECT_GT(token, highest_) << "the server's tokens do not rise";
    highest_of_[key] = token;
    highest_ = token;
    believed_[key] = {owner, token, end_ms};
  }

  // An acquire that found the owner's own hold, or a touch.
  void Renewed(const std::string& key, const std::string& owner, std::optional<int64_t> token,
               int64_t end_ms, int64_t now_ms) {
    ExpectHolder(key, owner, now_ms);
    EXPECT_EQ(token.value_or(believed_[key].token), believed_[key].token);
    believed_[key].end_ms = end_ms;
  }

  void Released(const std::string& key, const std::string& owner, int64_t now_ms) {
    ExpectHolder(key, owner, now_ms);
    believed_.erase(key);
  }

  void Fenced(const std::string& key, std::optional<int64_t> token, int64_t now_ms) {
    const auto found = believed_.find(key);
    const bool live = found != believed_.end() && now_ms <= found->second.end_ms;
    EXPECT_EQ(token, live ? std::optional(found->second.token) : std::nullopt);
  }

  // A stranger removed the lock, or a server forgot it.
  void Gone(const std::string& key) { believed_.erase(key); }

  // A failover or a restart brought back older data: from now on that counts. Tokens still rise.
  void TakeBack(const Model& model) {
    believed_.clear();
    for (const auto& [key, entry] : model.keys) {
      if (const auto* hold = std::get_if<ModelHold>(&entry)) {
        believed_[key] = {hold->owner, hold->token, hold->end_ms};
      }
    }
  }

 private:
  struct Belief {
    std::string owner;
    int64_t token;
    int64_t end_ms;
  };

  void ExpectHolder(const std::string& key, const std::string& owner, int64_t now_ms) {
    const auto found = believed_.find(key);
    ASSERT_NE(found, believed_.end()) << Quoted(owner) << " holds nothing";
    EXPECT_EQ(found->second.owner, owner);
    EXPECT_LE(now_ms, found->second.end_ms) << "a lost hold was revived";
  }

  std::map<std::string, Belief> believed_;
  std::map<std::string, int64_t> highest_of_;
  int64_t highest_ = 0;
};

// --- The history ------------------------------------------------------------------------------

// How often each thing happened: a history in which nothing happens proves nothing.
using Coverage = std::map<std::string, int>;

class History {
 public:
  History(uint64_t seed, Coverage& coverage) : random_(seed), coverage_(coverage) {
    // Mostly today; also a machine whose clock begins in 1970, and the end of all tokens.
    constexpr std::array<int64_t, 8> kStarts = {5 * kSecond, kLastToken - 2 * kMinute};
    const size_t start = Below(kStarts.size());
    now_ = kStarts.at(start) != 0 ? kStarts.at(start) : 1'700'000'000 * kSecond;
    margin_ = std::array{int64_t{0}, kMilli, 5 * kSecond, 30 * kSecond, 10 * kMinute}.at(Below(5));
    StartIssuing();
  }

  void Run(int steps) {
    for (int step = 0; step < steps; ++step) {
      Step();
      if (testing::Test::HasFailure()) {
        ADD_FAILURE() << "step " << step << ", at " << now_ << " us: " << event_;
        return;
      }
    }
    CatchUp(log_.size());
    EXPECT_TRUE(SameKeys(primary_, replica_));
  }

 private:
  // A replicated command, and what the model says that it does.
  struct Logged {
    Wire wire;
    std::string key;  // empty: no key
    std::optional<ModelEntry> entry;
    int64_t token;  // zero: none
  };

  uint64_t Below(uint64_t bound) { return random_() % bound; }
  int64_t UpTo(int64_t bound) {
    return static_cast<int64_t>(Below(static_cast<uint64_t>(bound) + 1));
  }
  bool OneIn(uint64_t n) { return Below(n) == 0; }

  int64_t now_ms() const { return now_ / kMilli; }
  FineInstant fine_now() const { return FineInstant{Micros{now_}}; }

  std::string AnyKey() { return std::array{"red", "green", "blue"}.at(Below(3)); }

  std::string AnyOwner() {
    static const std::array kOwners = {std::string("ann"), std::string("bob"),
                                       std::string("\0\r\n\xff", 4), std::string(256, 'z')};
    return kOwners.at(Below(kOwners.size()));
  }

  int64_t AnyLease() {
    constexpr std::array<int64_t, 6> kLeases = {1, 2, 20, 500, 5'000, 60'000};
    return OneIn(3) ? 1 + UpTo(3'000) : kLeases.at(Below(kLeases.size()));
  }

  void Step() {
    PassTime();
    const uint64_t dice = Below(1'000);
    if (dice < 380) {
      Acquire();
    } else if (dice < 520) {
      Release();
    } else if (dice < 660) {
      Touch();
    } else if (dice < 760) {
      Fence();
    } else if (dice < 785) {
      StrangerSets();
    } else if (dice < 805) {
      StrangerDeletes();
    } else if (dice < 860) {
      ServerExpires();
    } else if (dice < 960) {
      CatchUp(Below(2) == 0 ? log_.size() : Below(log_.size() + 1));
    } else if (dice < 980) {
      Reload();
    } else if (dice < 986) {
      Restart(Persistence::kRdb);
    } else if (dice < 990) {
      Restart(Persistence::kNone);
    } else {
      Promote();
    }
    EXPECT_TRUE(Equal(primary_, model_)) << "the primary differs from the model";
    GuardLeases();
  }

  void PassTime() {
    const uint64_t dice = Below(1'000);
    if (dice < 600) {
      now_ += UpTo(3 * kMilli);
    } else if (dice < 750) {
      now_ += UpTo(2 * kSecond);
    } else if (dice < 870) {
      GoToAnEnd();
    } else if (dice < 930) {
      now_ -= UpTo(5 * kMilli);
    } else if (dice < 938) {
      now_ -= UpTo(20 * kSecond);
    } else if (dice < 940) {
      now_ -= UpTo(2 * kHour);
    } else if (dice < 950) {
      now_ += UpTo(2 * kMinute);
    } else if (dice < 955) {
      now_ += UpTo(3 * kHour);
    }
    now_ = std::max<int64_t>(now_, 0);
  }

  // The moments at which a comparison can be wrong by one.
  void GoToAnEnd() {
    const auto entry = model_.At(AnyKey());
    if (!entry.has_value()) return;
    const auto* hold = std::get_if<ModelHold>(&*entry);
    const auto end_ms = hold != nullptr ? hold->end_ms : std::get<ModelPlain>(*entry).end_ms;
    if (!end_ms.has_value() || *end_ms < now_ms()) return;
    now_ = *end_ms * kMilli +
           std::array<int64_t, 5>{-1, 0, kMilli - 1, kMilli, kMilli + 1}.at(Below(5));
  }

  // --- Clients

  void Acquire() {
    const std::string key = AnyKey();
    const std::string owner = AnyOwner();
    const int64_t lease = AnyLease();
    event_ = "acquire " + key + " " + Quoted(owner) + " PX " + std::to_string(lease);
    DropExpiredPlain(key);
    const std::string number = std::to_string(lease);
    const auto request = std::get<AcquireRequest>(
        ParseAcquire(std::array<std::string_view, 3>{owner, "PX", number}, kLimits));
    const Decision decision =
        Decide(primary_.At(key), request, Ahead::kNobody, fine_now(), primary_.clock);
    Expect("acquire", decision.outcome, model_.Acquire(key, owner, lease, now_));
    if (!decision.change.has_value()) return;
    ASSERT_TRUE(std::holds_alternative<Held>(*decision.change));
    const auto token = static_cast<int64_t>(std::get<Held>(*decision.change).hold.token.value);
    if (decision.outcome == Outcome::kGranted) {
      witness_.Granted(key, owner, token, now_ms() + lease, now_ms());
    } else {
      witness_.Renewed(key, owner, token, now_ms() + lease, now_ms());
    }
    Log(primary_.CarryOut(key, owner, *decision.change), key, token);
    MayProlong(key, owner);
  }

  void Release() {
    const std::string key = AnyKey();
    const std::string owner = AnyOwner();
    event_ = "release " + key + " " + Quoted(owner);
    DropExpiredPlain(key);
    const auto request =
        std::get<ReleaseRequest>(ParseRelease(std::array<std::string_view, 1>{owner}));
    const Decision decision = Decide(primary_.At(key), request, Instant{Millis{now_ms()}});
    Expect("release", decision.outcome, model_.Release(key, owner, now_));
    if (!decision.change.has_value()) return;
    if (std::holds_alternative<Freed>(*decision.change)) witness_.Released(key, owner, now_ms());
    Log(primary_.CarryOut(key, owner, *decision.change), key, 0);
  }

  void Touch() {
    const std::string key = AnyKey();
    const std::string owner = AnyOwner();
    const int64_t lease = AnyLease();
    event_ = "touch " + key + " " + Quoted(owner) + " PX " + std::to_string(lease);
    DropExpiredPlain(key);
    const std::string number = std::to_string(lease);
    const auto request = std::get<TouchRequest>(
        ParseTouch(std::array<std::string_view, 3>{owner, "PX", number}, kLimits));
    const Decision decision = Decide(primary_.At(key), request, Instant{Millis{now_ms()}});
    Expect("touch", decision.outcome, model_.Touch(key, owner, lease, now_));
    if (!decision.change.has_value()) return;
    if (std::holds_alternative<Held>(*decision.change)) {
      witness_.Renewed(key, owner, std::nullopt, now_ms() + lease, now_ms());
    }
    Log(primary_.CarryOut(key, owner, *decision.change), key, 0);
    MayProlong(key, owner);
  }

  void Fence() {
    const std::string key = AnyKey();
    event_ = "fence " + key;
    DropExpiredPlain(key);
    const Place place = primary_.At(key);
    const Instant now{Millis{now_ms()}};
    const std::optional<int64_t> expected = model_.Fence(key, now_);
    std::optional<int64_t> token;
    if (const auto current = CurrentToken(place, now)) {
      token = static_cast<int64_t>(current->value);
    }
    EXPECT_EQ(token, expected);
    witness_.Fenced(key, token, now_ms());
    const int64_t asked = expected.value_or(witness_.highest()) + UpTo(2) - 1;
    EXPECT_EQ(IsCurrent(place, Token{static_cast<uint64_t>(asked)}, now), expected == asked);
    ++coverage_[expected.has_value() ? "fence: a token" : "fence: null"];
  }

  // --- Strangers, and the server itself

  void StrangerSets() {
    const std::string key = AnyKey();
    const std::string value = OneIn(4) ? "" : AnyOwner();
    const auto end_ms = OneIn(3) ? std::nullopt : std::optional(now_ms() + AnyLease());
    event_ = "SET " + key + " " + Quoted(value);
    ++coverage_[model_.HoldAt(key) != nullptr ? "SET over a lock" : "SET"];
    model_.keys[key] = ModelPlain{value, end_ms};
    primary_.Set(key, value, end_ms);
    witness_.Gone(key);
    Wire wire = {"SET", key, value};
    if (end_ms.has_value()) wire.push_back(std::to_string(*end_ms));
    Log(std::move(wire), key, 0);
  }

  void StrangerDeletes() {
    const std::string key = AnyKey();
    event_ = "DEL " + key;
    ++coverage_["DEL"];
    Delete(key);
  }

  // The server removes keys whose time is over, sooner or later.
  void ServerExpires() {
    const std::string key = AnyKey();
    event_ = "expire " + key;
    DropExpiredPlain(key);
    const ModelHold* hold = model_.HoldAt(key);
    if (hold == nullptr || now_ms() <= hold->end_ms) return;
    ++coverage_["expired"];
    Delete(key);
  }

  void DropExpiredPlain(const std::string& key) {
    const ModelPlain* plain = model_.PlainAt(key);
    if (plain != nullptr && plain->end_ms.has_value() && now_ms() > *plain->end_ms) Delete(key);
  }

  void Delete(const std::string& key) {
    model_.keys.erase(key);
    primary_.keys.erase(key);
    witness_.Gone(key);
    Log({"DEL", key}, key, 0);
  }

  // --- Replication, persistence, failover

  void Log(Wire wire, const std::string& key, int64_t token) {
    log_.push_back({std::move(wire), key, key.empty() ? std::nullopt : model_.At(key), token});
  }

  // The replica obeys the next `count` commands.
  void CatchUp(size_t count) {
    event_ = "catch up by " + std::to_string(count) + " of " + std::to_string(log_.size());
    for (; count > 0; --count) {
      const Logged logged = std::move(log_.front());
      log_.pop_front();
      EXPECT_TRUE(replica_.Obey(logged.wire)) << testing::PrintToString(logged.wire);
      if (!logged.key.empty()) {
        replica_model_.keys.erase(logged.key);
        if (logged.entry.has_value()) replica_model_.keys.emplace(logged.key, *logged.entry);
      }
      replica_model_.last_token = std::max(replica_model_.last_token, logged.token);
    }
    EXPECT_TRUE(Equal(replica_, replica_model_)) << "the replica differs from the model";
    if (log_.empty()) {
      EXPECT_TRUE(SameKeys(primary_, replica_)) << "the replica differs from the primary";
      ++coverage_["caught up"];
    }
  }

  // DEBUG RELOAD: all locks go through their bytes.
  void Reload() {
    event_ = "reload";
    ++coverage_["reload"];
    EXPECT_TRUE(primary_.Load(primary_));
  }

  enum class Persistence { kNone, kRdb };

  void Restart(Persistence persistence) {
    const bool kept = persistence == Persistence::kRdb;
    event_ = kept ? "restart from an RDB file" : "restart with nothing";
    ++coverage_[event_];
    Node restarted;
    if (kept) {
      EXPECT_TRUE(restarted.Load(primary_));
    } else {
      model_.keys.clear();
      witness_.TakeBack(model_);
      leases_.clear();
    }
    model_.last_token = model_.HighestStoredToken();
    primary_ = std::move(restarted);
    WaitForTheGuarantee();
    SyncReplica();
    StartIssuing();
  }

  // The replica takes over, perhaps without the last writes and with a clock of its own.
  void Promote() {
    const size_t lost = OneIn(2) ? 0 : Below(log_.size() + 1);
    CatchUp(log_.size() - lost);
    event_ = "promote, " + std::to_string(lost) + " lost";
    ++coverage_[lost == 0 ? "promote" : "promote, writes lost"];
    now_ = std::max<int64_t>(now_ + UpTo(4 * kSecond) - 2 * kSecond, 0);
    std::swap(primary_, replica_);
    std::swap(model_, replica_model_);
    if (OneIn(2)) {  // the new replica is a new machine, not the old primary
      replica_ = Node();
      replica_model_ = Model();
    }
    if (lost > 0) {
      witness_.TakeBack(model_);
      leases_.clear();
    }
    WaitForTheGuarantee();
    SyncReplica();
    StartIssuing();
  }

  // Full synchronisation: the replica has what the primary has; its clock never goes back.
  void SyncReplica() {
    log_.clear();
    EXPECT_TRUE(replica_.Load(primary_));
    replica_model_.keys = model_.keys;
    replica_model_.last_token =
        std::max(replica_model_.last_token, replica_model_.HighestStoredToken());
    EXPECT_TRUE(Equal(replica_, replica_model_)) << "the replica differs from the model";
  }

  void StartIssuing() {
    const Token floor = primary_.clock.StartIssuing(fine_now(), Millis{margin_ / kMilli});
    model_.StartIssuing(now_, margin_);
    EXPECT_EQ(static_cast<int64_t>(floor.value), model_.last_token);
    EXPECT_GE(static_cast<int64_t>(floor.value), witness_.highest()) << "the margin is too small";
    if (floor.value > 0) Log({"FLOOR", std::to_string(floor.value)}, "", model_.last_token);
  }

  // Tokens rise across lost data as long as the lead of what was lost stays within the margin.
  // Where it does not, time passes until it just does.
  void WaitForTheGuarantee() {
    const bool knows_all = model_.last_token >= witness_.highest();
    if (knows_all || witness_.highest() - now_ <= margin_) return;
    now_ = witness_.highest() - margin_;
    ++coverage_["the margin just suffices"];
  }

  // --- Checks

  void Expect(const char* request, Outcome outcome, Outcome expected) {
    EXPECT_EQ(outcome, expected);
    std::string name = std::string(request) + ": ";
    name += std::to_string(static_cast<int>(expected));
    ++coverage_[name];
  }

  void MayProlong(const std::string& key, const std::string& owner) { prolonger_ = {key, owner}; }

  // No lease of anybody ends later than before this step, but the one whose owner asked for it.
  void GuardLeases() {
    for (const auto& [key, entry] : primary_.keys) {
      if (entry.lock == nullptr) {
        leases_.erase(key);
        continue;
      }
      const Hold hold = entry.lock->hold();
      const int64_t end_ms = hold.end.time_since_epoch().count();
      const auto before = leases_.find(key);
      const bool longer = before != leases_.end() && end_ms > before->second;
      if (longer && (prolonger_.first != key || prolonger_.second != hold.owner.bytes)) {
        ADD_FAILURE() << "the lease of " << key << " got longer";
      }
      leases_[key] = end_ms;
    }
    prolonger_ = {};
  }

  std::mt19937_64 random_;
  Coverage& coverage_;
  int64_t now_ = 0;
  int64_t margin_ = 0;
  std::string event_ = "start";

  Node primary_;
  Node replica_;
  Model model_;
  Model replica_model_;
  std::deque<Logged> log_;  // what the replica has not yet been told
  Witness witness_;
  std::map<std::string, int64_t> leases_;
  std::pair<std::string, std::string> prolonger_;
};

void RunHistories(uint64_t first_seed, uint64_t histories, int steps, Coverage& coverage) {
  for (uint64_t seed = first_seed; seed < first_seed + histories; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    History(seed, coverage).Run(steps);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(History, AgreesWithTheModel) {
  constexpr uint64_t kHistories = 300;
  constexpr int kSteps = 800;
  static_assert(kHistories * kSteps >= 200'000);
  Coverage coverage;
  RunHistories(1, kHistories, kSteps, coverage);
  if (HasFailure()) return;

  // Each outcome that a request can have was seen, and so was each event.
  const auto name = [](const char* request, Outcome outcome) {
    return std::string(request) + ": " + std::to_string(static_cast<int>(outcome));
  };
  std::vector<std::string> wanted = {"fence: a token",
                                     "fence: null",
                                     "SET",
                                     "SET over a lock",
                                     "DEL",
                                     "expired",
                                     "caught up",
                                     "reload",
                                     "restart from an RDB file",
                                     "restart with nothing",
                                     "promote",
                                     "promote, writes lost",
                                     "the margin just suffices"};
  for (const Outcome outcome :
       {Outcome::kGranted, Outcome::kHeldAlready, Outcome::kHeldByOther, Outcome::kTokensUsedUp}) {
    wanted.push_back(name("acquire", outcome));
  }
  for (const Outcome outcome : {Outcome::kFree, Outcome::kLeaseEnded, Outcome::kHeldByOther}) {
    wanted.push_back(name("release", outcome));
    wanted.push_back(name("touch", outcome));
  }
  wanted.push_back(name("release", Outcome::kReleased));
  wanted.push_back(name("touch", Outcome::kTouched));
  for (const std::string& thing : wanted) EXPECT_GE(coverage[thing], 100) << thing;
}

TEST(HistoryLong, AgreesWithTheModel) {
  Coverage coverage;
  RunHistories(1'000'000, 20'000, 800, coverage);
}

}  // namespace
}  // namespace turnstile
