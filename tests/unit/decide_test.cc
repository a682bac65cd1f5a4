// The rules of granting, releasing and touching a lock, with a manual clock.

#include "core/decide.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "core/encoding.h"
#include "printers.h"

namespace turnstile {
namespace {

using namespace std::string_view_literals;

constexpr Owner kAnn{"ann"};
constexpr Owner kBob{"bob"};
constexpr Owner kCat{"cat"};
constexpr Owner kDan{"dan"};
constexpr Owner kZoe{"zoe"};
constexpr Token kToken{1'700'000'000'000'042};
constexpr Instant kSince{Millis{1'700'000'000'000}};
constexpr Instant kEnd = kSince + Millis{30'000};
constexpr Millis kTick{1};
constexpr Millis kLease{1'234};
constexpr Millis kLinger{500};
constexpr uint32_t kMaxCount = std::numeric_limits<uint32_t>::max();
constexpr Mode kModes[] = {Mode::kExclusive, Mode::kShared, Mode::kLimit};
constexpr Hold kAnnsHold{.owner = kAnn, .token = kToken, .since = kSince, .end = kEnd};

constexpr Token Later(Token token, uint64_t by) { return Token{token.value + by}; }

TokenClock ClockAt(Token last) {
  TokenClock clock;
  clock.Observe(last);
  return clock;
}

Hold HoldOf(Owner owner, Token token, Instant end = kEnd, Millis linger = Millis{0},
            uint32_t count = 1) {
  return {owner, token, kSince, end, linger, count};
}

// Owns what a Place refers to. bytes() shows whether deciding changed it.
class Scene {
 public:
  Scene() = default;
  explicit Scene(std::string_view plain, std::optional<Instant> end = std::nullopt)
      : plain_(plain), end_(end) {}
  Scene(Mode mode, const std::vector<Hold>& holds) {
    for (const Hold& hold : holds) ApplyFact(HoldSet{mode, hold});
  }

  template <typename Fact>
  void ApplyFact(const Fact& fact) {
    Lock* const next = Apply(lock_.get(), fact);
    if (next != lock_.get()) lock_.reset(next);
  }

  KeyState state() const {
    if (plain_.has_value()) return {.lock = nullptr, .plain = PlainLock{*plain_, end_}};
    return {.lock = lock_.get(), .plain = std::nullopt};
  }
  LockView view(const WaitersAhead& ahead = {}) const { return {state(), ahead}; }
  const Lock* lock() const { return lock_.get(); }
  std::string bytes() const { return lock_ == nullptr ? "" : Encode(*lock_); }

 private:
  std::unique_ptr<Lock> lock_;
  std::optional<std::string> plain_;
  std::optional<Instant> end_;
};

AcquireRequest Ask(Owner owner, Mode mode = Mode::kExclusive, uint32_t limit = 1) {
  return {.owner = owner, .lease = kLease, .mode = mode, .limit = limit};
}

// A request with a limit that asks for several permits.
AcquireRequest Heavy(Owner owner, uint32_t limit, uint32_t weight) {
  AcquireRequest request = Ask(owner, Mode::kLimit, limit);
  request.weight = weight;
  return request;
}

Hold Weighing(Hold hold, uint32_t weight) {
  hold.weight = weight;
  return hold;
}

AcquireRequest Reentrant(AcquireRequest request) {
  request.reentrant = true;
  return request;
}

WaitersAhead CrowdOf(const std::vector<AcquireRequest>& waiting) {
  WaitersAhead crowd;
  for (const AcquireRequest& request : waiting) crowd.Add(request);
  return crowd;
}

Admission Acquire(const KeyState& state, const AcquireRequest& request, FineInstant now,
                  const WaitersAhead& ahead = {}, const TokenClock& clock = ClockAt(kToken)) {
  const LockView view{state, ahead};
  return Decide(std::span(&view, 1), request, now, clock);
}

Outcome OutcomeOf(const Scene& scene, const AcquireRequest& request, Instant now,
                  const WaitersAhead& ahead = {}) {
  return Acquire(scene.state(), request, now, ahead).outcome;
}

// The change of a decision, if it is of this kind.
template <typename Fact>
std::optional<Fact> ChangeOf(const Decision& decision) {
  if (!decision.change.has_value()) return std::nullopt;
  const auto* fact = std::get_if<Fact>(&*decision.change);
  return fact == nullptr ? std::nullopt : std::optional(*fact);
}

using Owners = std::vector<Owner>;

// The owners whose holds the fact would remove, in the order in which they closed.
Owners RemovedBy(const std::optional<HoldsExpired>& expired, const Scene& scene) {
  Owners owners;
  if (!expired.has_value()) return owners;
  for (const Hold& hold : scene.lock()->holds(Lock::Order::kByBlocksUntil)) {
    if (!hold.BlocksAt(expired->before)) owners.push_back(hold.owner);
  }
  return owners;
}

Owners EndedBySession(const Scene& scene, Owner owner, Instant now) {
  return DecideSessionEnd(scene.state(), std::span(&owner, 1), now);
}

void EndSession(Scene& scene, Owner owner, Instant now) {
  scene.ApplyFact(SessionsEnded{now, std::span(&owner, 1)});
}

// --- One exclusive holder, or a plain lock ----------------------------------------------------

enum class Stored {
  kNothing,
  kAnnsLock,
  kAnnsLingeringLock,  // as kAnnsLock, with a linger
  kAnnsPlain,
  kEmptyPlain,     // SET key ""
  kOversizePlain,  // begins with "ann" and is too long to equal any owner
};

Scene SceneOf(Stored stored) {
  switch (stored) {
    case Stored::kNothing:
      break;
    case Stored::kAnnsLock:
      return Scene(Mode::kExclusive, {kAnnsHold});
    case Stored::kAnnsLingeringLock:
      return Scene(Mode::kExclusive, {HoldOf(kAnn, kToken, kEnd, kLinger)});
    case Stored::kAnnsPlain:
      return Scene(kAnn.bytes);
    case Stored::kEmptyPlain:
      return Scene("");
    case Stored::kOversizePlain:
      return Scene(std::string(kAnn.bytes) + std::string(1000, '!'));
  }
  return {};
}

struct Situation {
  const char* name;
  Stored stored;
  Owner requester;
  Millis after_end;  // time of the request, relative to the end of the hold
  Outcome acquire;
  Outcome release;
  Outcome touch;
  bool current;  // whether the token of the hold is current
  bool closed;   // whether other owners are blocked
};

class LockSituation : public testing::TestWithParam<Situation> {
 protected:
  const Situation& s() const { return GetParam(); }
  Instant now() const { return kEnd + s().after_end; }
  // Not a whole millisecond: leases are rounded to one, tokens are not.
  FineInstant fine_now() const { return now() + Micros{567}; }
  Token next_token() const {
    return Token{static_cast<uint64_t>(fine_now().time_since_epoch().count())};
  }
  bool is_lock() const {
    return s().stored == Stored::kAnnsLock || s().stored == Stored::kAnnsLingeringLock;
  }

  const TokenClock clock_ = ClockAt(kToken);
  const Scene scene_ = SceneOf(GetParam().stored);
  const std::string bytes_ = scene_.bytes();

  void TearDown() override { EXPECT_EQ(scene_.bytes(), bytes_) << "deciding changed the lock"; }
};

constexpr Situation kSituations[] = {
    // Free.
    {"FreeKey", Stored::kNothing, kAnn, Millis{0},  //
     Outcome::kGranted, Outcome::kFree, Outcome::kFree, false, false},
    // Held by the requester.
    {"OwnAtStart", Stored::kAnnsLock, kAnn, kSince - kEnd,  //
     Outcome::kHeldAlready, Outcome::kReleased, Outcome::kTouched, true, true},
    {"OwnBeforeStart", Stored::kAnnsLock, kAnn, kSince - kEnd - Millis{5'000},  //
     Outcome::kHeldAlready, Outcome::kReleased, Outcome::kTouched, true, true},
    {"OwnBeforeEnd", Stored::kAnnsLock, kAnn, -kTick,  //
     Outcome::kHeldAlready, Outcome::kReleased, Outcome::kTouched, true, true},
    {"OwnAtEnd", Stored::kAnnsLock, kAnn, Millis{0},  //
     Outcome::kHeldAlready, Outcome::kReleased, Outcome::kTouched, true, true},
    {"OwnAfterEnd", Stored::kAnnsLock, kAnn, kTick,  //
     Outcome::kGranted, Outcome::kLeaseEnded, Outcome::kLeaseEnded, false, false},
    {"OwnLongAfterEnd", Stored::kAnnsLock, kAnn, std::chrono::hours{1000},  //
     Outcome::kGranted, Outcome::kLeaseEnded, Outcome::kLeaseEnded, false, false},
    // Held by another owner.
    {"OtherAtStart", Stored::kAnnsLock, kBob, kSince - kEnd,  //
     Outcome::kHeldByOther, Outcome::kHeldByOther, Outcome::kHeldByOther, true, true},
    {"OtherBeforeEnd", Stored::kAnnsLock, kBob, -kTick,  //
     Outcome::kHeldByOther, Outcome::kHeldByOther, Outcome::kHeldByOther, true, true},
    {"OtherAtEnd", Stored::kAnnsLock, kBob, Millis{0},  //
     Outcome::kHeldByOther, Outcome::kHeldByOther, Outcome::kHeldByOther, true, true},
    {"OtherAfterEnd", Stored::kAnnsLock, kBob, kTick,  //
     Outcome::kGranted, Outcome::kFree, Outcome::kFree, false, false},
    // A lingering hold has ended for its owner, but still blocks others.
    {"OwnWithLingerAtEnd", Stored::kAnnsLingeringLock, kAnn, Millis{0},  //
     Outcome::kHeldAlready, Outcome::kReleased, Outcome::kTouched, true, true},
    {"OwnDuringLinger", Stored::kAnnsLingeringLock, kAnn, kTick,  //
     Outcome::kGranted, Outcome::kLingerCut, Outcome::kLeaseEnded, false, true},
    {"OwnAtEndOfLinger", Stored::kAnnsLingeringLock, kAnn, kLinger,  //
     Outcome::kGranted, Outcome::kLingerCut, Outcome::kLeaseEnded, false, true},
    {"OwnAfterLinger", Stored::kAnnsLingeringLock, kAnn, kLinger + kTick,  //
     Outcome::kGranted, Outcome::kLeaseEnded, Outcome::kLeaseEnded, false, false},
    {"OtherDuringLinger", Stored::kAnnsLingeringLock, kBob, kTick,  //
     Outcome::kHeldByOther, Outcome::kHeldByOther, Outcome::kHeldByOther, false, true},
    {"OtherAtEndOfLinger", Stored::kAnnsLingeringLock, kBob, kLinger,  //
     Outcome::kHeldByOther, Outcome::kHeldByOther, Outcome::kHeldByOther, false, true},
    {"OtherAfterLinger", Stored::kAnnsLingeringLock, kBob, kLinger + kTick,  //
     Outcome::kGranted, Outcome::kFree, Outcome::kFree, false, false},
    // A string without a TTL.
    {"OwnPlain", Stored::kAnnsPlain, kAnn, Millis{0},  //
     Outcome::kGranted, Outcome::kReleased, Outcome::kTouched, false, true},
    {"OtherPlain", Stored::kAnnsPlain, kBob, Millis{0},  //
     Outcome::kHeldByOther, Outcome::kHeldByOther, Outcome::kHeldByOther, false, true},
    {"OtherPlainMuchLater", Stored::kAnnsPlain, kBob, std::chrono::hours{1000},  //
     Outcome::kHeldByOther, Outcome::kHeldByOther, Outcome::kHeldByOther, false, true},
    {"EmptyPlain", Stored::kEmptyPlain, kAnn, Millis{0},  //
     Outcome::kHeldByOther, Outcome::kHeldByOther, Outcome::kHeldByOther, false, true},
    {"OversizePlain", Stored::kOversizePlain, kAnn, Millis{0},  //
     Outcome::kHeldByOther, Outcome::kHeldByOther, Outcome::kHeldByOther, false, true},
};

INSTANTIATE_TEST_SUITE_P(All, LockSituation, testing::ValuesIn(kSituations),
                         [](const auto& param_info) { return std::string(param_info.param.name); });

TEST_P(LockSituation, Acquire) {
  const AcquireRequest request = Ask(s().requester);
  const Admission admission = Acquire(scene_.state(), request, fine_now(), {}, clock_);
  EXPECT_EQ(admission.outcome, s().acquire);
  EXPECT_EQ(admission.busy(), s().acquire == Outcome::kHeldByOther);
  ASSERT_EQ(admission.granted(), s().acquire != Outcome::kHeldByOther);
  if (!admission.granted()) return;
  const HoldSet held = HoldSetBy(scene_.state(), request, admission.token, now());
  EXPECT_EQ(held.mode, Mode::kExclusive);
  const bool again = s().acquire == Outcome::kHeldAlready;
  EXPECT_EQ(held.hold, (Hold{.owner = s().requester,
                             .token = again ? kToken : next_token(),
                             .since = again ? kSince : now(),
                             .end = now() + kLease}));
}

// If an exclusive request is granted, so is one in any other mode. Only the current holder may not
// switch to any mode.
TEST_P(LockSituation, AcquireInOtherModes) {
  for (const AcquireRequest& request :
       {Ask(s().requester, Mode::kShared), Ask(s().requester, Mode::kLimit, 1),
        Ask(s().requester, Mode::kLimit, 1000)}) {
    const Admission admission = Acquire(scene_.state(), request, fine_now(), {}, clock_);
    if (s().acquire != Outcome::kHeldAlready) {
      EXPECT_EQ(admission.outcome, s().acquire);
    } else if (request.mode == Mode::kShared) {
      EXPECT_EQ(admission.outcome, Outcome::kDowngraded);
      EXPECT_EQ(admission.token, kToken);
    } else {
      EXPECT_EQ(admission.outcome, Outcome::kOtherMode);
    }
  }
}

TEST_P(LockSituation, Release) {
  const Decision decision = Decide(scene_.state(), ReleaseRequest{s().requester}, now());
  EXPECT_EQ(decision.outcome, s().release);
  const bool released = s().release == Outcome::kReleased;
  const bool cut = s().release == Outcome::kLingerCut;
  EXPECT_EQ(decision.change.has_value(), released || cut);
  EXPECT_EQ(ChangeOf<HoldReleased>(decision).has_value(), released && is_lock());
  EXPECT_EQ(ChangeOf<PlainFreed>(decision).has_value(), released && !is_lock());
  EXPECT_EQ(ChangeOf<HoldEnded>(decision).has_value(), cut);
  if (released && is_lock()) {
    EXPECT_EQ(ChangeOf<HoldReleased>(decision)->owner, s().requester);
  }
  if (cut) {
    EXPECT_EQ(ChangeOf<HoldEnded>(decision)->owner, s().requester);
  }
}

TEST_P(LockSituation, Touch) {
  const Decision decision = Decide(scene_.state(), TouchRequest{s().requester, kLease}, now());
  EXPECT_EQ(decision.outcome, s().touch);
  if (s().touch != Outcome::kTouched) {
    EXPECT_FALSE(decision.change.has_value());
  } else if (!is_lock()) {
    ASSERT_TRUE(ChangeOf<PlainExtended>(decision).has_value());
    EXPECT_EQ(ChangeOf<PlainExtended>(decision)->end, now() + kLease);
  } else {
    Hold expected = scene_.lock()->at(Lock::Order::kByOwner, 0);
    expected.end = now() + kLease;
    ASSERT_TRUE(ChangeOf<HoldSet>(decision).has_value());
    EXPECT_EQ(ChangeOf<HoldSet>(decision)->hold, expected);
  }
}

TEST_P(LockSituation, SessionEnd) {
  const Owners ended = EndedBySession(scene_, s().requester, now());
  if (s().touch != Outcome::kTouched || !is_lock()) {
    // Only holds of the module's own type can be bound to a connection.
    EXPECT_EQ(ended, Owners{});
    return;
  }
  EXPECT_EQ(ended, Owners{kAnn});
  Scene after(Mode::kExclusive, {scene_.lock()->first(Lock::Order::kByOwner)});
  EndSession(after, kAnn, now());
  if (s().stored == Stored::kAnnsLock) {
    EXPECT_EQ(after.lock(), nullptr);
  } else {
    const Hold left = after.lock()->Find(kAnn).value();
    EXPECT_EQ(left.token, kToken);
    EXPECT_EQ(left.blocks_until(), now() - kTick + kLinger);
    EXPECT_FALSE(left.LiveAt(now()));
  }
}

TEST_P(LockSituation, Fence) {
  const KeyState state = scene_.state();
  EXPECT_EQ(CurrentToken(state, now()), s().current ? std::optional(kToken) : std::nullopt);
  EXPECT_EQ(IsCurrent(state, kToken, now()), s().current);
  for (const Token other :
       {Token{0}, kMinToken, Token{kToken.value - 1}, Token{kToken.value + 1}, kMaxToken}) {
    EXPECT_FALSE(IsCurrent(state, other, now())) << other.value;
  }
}

// When the tokens are exhausted, only requests that need a new one are refused.
TEST_P(LockSituation, AcquireWhenTokensAreExhausted) {
  const Admission admission =
      Acquire(scene_.state(), Ask(s().requester), fine_now(), {}, ClockAt(kMaxToken));
  const bool needs_one = s().acquire == Outcome::kGranted;
  EXPECT_EQ(admission.outcome, needs_one ? Outcome::kTokensUsedUp : s().acquire);
  EXPECT_EQ(admission.granted(), s().acquire == Outcome::kHeldAlready);
}

// An owner that does not hold the lock waits behind the waiters.
TEST_P(LockSituation, AcquireWhileOthersWait) {
  const bool own_plain = s().stored == Stored::kAnnsPlain && s().requester == kAnn;
  const Outcome expected =
      s().acquire == Outcome::kGranted && !own_plain ? Outcome::kOthersWait : s().acquire;
  for (const Mode mode : kModes) {
    const WaitersAhead ahead = CrowdOf({Ask(kZoe, mode, 1000)});
    EXPECT_EQ(Acquire(scene_.state(), Ask(s().requester), fine_now(), ahead).outcome, expected);
  }
}

TEST_P(LockSituation, CountsHoldersAndFindsNextEnd) {
  EXPECT_EQ(CountHolders(scene_.state(), now()), s().closed ? 1 : 0);
  const std::optional<Instant> end = NextEnd(scene_.state(), now());
  ASSERT_EQ(end.has_value(), s().closed && is_lock()) << "these plain locks have no end";
  if (!end.has_value()) return;
  EXPECT_EQ(*end, scene_.lock()->blocks_until());
  EXPECT_GE(*end, now());
}

// The queue relies on Decide and IsBlocked agreeing: otherwise a waiter would be retried for ever.
TEST_P(LockSituation, OtherOwnersAreBlockedWhileHeld) {
  for (const Mode mode : kModes) {
    const AcquireRequest request = Ask(kZoe, mode, 1000);
    const Admission admission = Acquire(scene_.state(), request, fine_now());
    EXPECT_EQ(admission.outcome, s().closed ? Outcome::kHeldByOther : Outcome::kGranted);
    EXPECT_EQ(IsBlocked(scene_.view(), request, now()), s().closed);
  }
}

TEST(Admission, ReportsGrantedAndBusy) {
  for (const Outcome outcome :
       {Outcome::kGranted, Outcome::kHeldAlready, Outcome::kDowngraded, Outcome::kUpgraded}) {
    EXPECT_TRUE((Admission{outcome, kToken}.granted()));
    EXPECT_FALSE((Admission{outcome, kToken}.busy()));
  }
  for (const Outcome outcome : {Outcome::kHeldByOther, Outcome::kOthersWait, Outcome::kGrace}) {
    EXPECT_FALSE((Admission{outcome, kToken}.granted()));
    EXPECT_TRUE((Admission{outcome, kToken}.busy()));
  }
  for (const Outcome outcome :
       {Outcome::kOtherMode, Outcome::kOtherWeight, Outcome::kHoldsSome, Outcome::kHoldsApart,
        Outcome::kUpgradesSeveral, Outcome::kCountedOut, Outcome::kFloorTooHigh,
        Outcome::kTokensUsedUp}) {
    EXPECT_FALSE((Admission{outcome, kToken}.granted()));
    EXPECT_FALSE((Admission{outcome, kToken}.busy()));
  }
}

// --- The grant rule ---------------------------------------------------------------------------

// A naive model of the documented rules for one lock: it counts holders and checks waiters one by
// one.
struct Naive {
  enum class Own { kNone, kLive, kLingers, kOver };

  Mode mode;          // of the holds
  size_t others = 0;  // blocking holders other than the requester
  Own own = Own::kNone;
  std::vector<AcquireRequest> waiting;

  bool FitsHolders(const AcquireRequest& request) const {
    if (others == 0) return true;
    if (mode == Mode::kShared && request.mode == Mode::kShared) return true;
    return mode == Mode::kLimit && request.mode == Mode::kLimit && others < request.limit;
  }

  bool FitsWaiters(const AcquireRequest& request) const {
    size_t smallest = request.limit;
    const bool keeps_them = (own == Own::kLive || own == Own::kLingers) && mode != request.mode;
    for (const AcquireRequest& waiter : waiting) {
      if (keeps_them) return false;
      if (request.mode == Mode::kExclusive || waiter.mode != request.mode) return false;
      smallest = std::min<size_t>(smallest, waiter.limit);
    }
    if (request.mode != Mode::kLimit || waiting.empty()) return true;
    return others + waiting.size() + 1 <= smallest;
  }

  Outcome Answer(const AcquireRequest& request) const {
    Outcome fits = Outcome::kGranted;
    if (own == Own::kLive) {
      if (mode == request.mode) return Outcome::kHeldAlready;
      if (mode == Mode::kExclusive && request.mode == Mode::kShared) return Outcome::kDowngraded;
      if (mode != Mode::kShared || request.mode != Mode::kExclusive) return Outcome::kOtherMode;
      fits = Outcome::kUpgraded;
    }
    if (!FitsHolders(request)) return Outcome::kHeldByOther;
    return FitsWaiters(request) ? fits : Outcome::kOthersWait;
  }
};

// Every lock with up to four holders in every state, every requester and every possible waiter
// ahead.
TEST(GrantRule, MatchesNaiveModelInEverySituation) {
  const Instant now = kEnd + kTick;
  // Others: live, lingering, over.
  const std::vector<Hold> states = {HoldOf(kZoe, kToken, now), HoldOf(kZoe, kToken, kEnd, kLinger),
                                    HoldOf(kZoe, kToken, kEnd)};
  const std::vector<std::string> names = {"a", "n", "z"};  // sort around the requester's
  const std::vector<AcquireRequest> kinds = {
      Ask(kZoe, Mode::kExclusive), Ask(kZoe, Mode::kShared),   Ask(kZoe, Mode::kLimit, 1),
      Ask(kZoe, Mode::kLimit, 2),  Ask(kZoe, Mode::kLimit, 3), Ask(kZoe, Mode::kLimit, 5)};
  std::vector<std::vector<AcquireRequest>> lines = {{}};
  for (const AcquireRequest& first : kinds) {
    lines.push_back({first});
    for (const AcquireRequest& second : kinds) {
      lines.push_back({first, second});
      lines.push_back({first, second, first});
    }
  }
  int checked = 0;
  for (const Mode mode : kModes) {
    for (int shape = 0; shape < 4 * 4 * 4 * 4; ++shape) {
      // Base-four digits: the requester's own hold, then those of three others.
      Naive naive{.mode = mode, .own = static_cast<Naive::Own>(shape % 4)};
      std::vector<Hold> holds;
      if (naive.own != Naive::Own::kNone) {
        holds.push_back(states.at(static_cast<size_t>(naive.own) - 1));
        holds.back().owner = Owner{"m"};
      }
      for (size_t other = 0, rest = static_cast<size_t>(shape) / 4; other < 3; ++other, rest /= 4) {
        if (rest % 4 == 0) continue;
        holds.push_back(states.at(rest % 4 - 1));
        holds.back().owner = Owner{names.at(other)};
        holds.back().token = Later(kToken, 1 + other);
        if (rest % 4 < 3) ++naive.others;
      }
      if (mode == Mode::kExclusive && holds.size() > 1) continue;
      const Scene scene(mode, holds);
      const std::string bytes = scene.bytes();
      for (AcquireRequest request : kinds) {
        request.owner = Owner{"m"};
        for (const std::vector<AcquireRequest>& line : lines) {
          naive.waiting = line;
          const Outcome expected = naive.Answer(request);
          const LockView view = scene.view(CrowdOf(line));
          const Admission admission = Decide(std::span(&view, 1), request, now, ClockAt(kToken));
          ASSERT_EQ(admission.outcome, expected)
              << "mode " << static_cast<int>(mode) << ", shape " << shape << ", request "
              << static_cast<int>(request.mode) << " " << request.limit << ", " << line.size()
              << " wait";
          ASSERT_EQ(IsBlocked(view, request, now), admission.busy());
          ++checked;
        }
        ASSERT_EQ(IsUpgrade(scene.state(), request, now), naive.own == Naive::Own::kLive &&
                                                              mode == Mode::kShared &&
                                                              request.mode == Mode::kExclusive);
      }
      ASSERT_EQ(scene.bytes(), bytes);
      // An unrelated owner is blocked by the others and by the requester.
      const bool own_keeps_out =
          naive.own == Naive::Own::kLive || naive.own == Naive::Own::kLingers;
      const size_t holders = CountHolders(scene.state(), now);
      ASSERT_EQ(holders, naive.others + (own_keeps_out ? 1 : 0));
      ASSERT_EQ(holders == 0, OutcomeOf(scene, Ask(kDan), now) == Outcome::kGranted);
    }
  }
  EXPECT_GT(checked, 200'000);
}

TEST(GrantRule, SharedHoldersCoexistAndBlockWriters) {
  const Scene scene(Mode::kShared, {HoldOf(kAnn, kToken), HoldOf(kBob, Later(kToken, 1))});
  EXPECT_EQ(OutcomeOf(scene, Ask(kCat, Mode::kShared), kEnd), Outcome::kGranted);
  EXPECT_EQ(OutcomeOf(scene, Ask(kCat), kEnd), Outcome::kHeldByOther);
  EXPECT_EQ(OutcomeOf(scene, Ask(kCat, Mode::kLimit, 100), kEnd), Outcome::kHeldByOther);
  EXPECT_EQ(OutcomeOf(scene, Ask(kCat), kEnd + kTick), Outcome::kGranted);
}

// A reader that came after a writer does not overtake it, even if a reader holds the lock.
TEST(GrantRule, ReadersWaitBehindWriter) {
  const Scene scene(Mode::kShared, {HoldOf(kAnn, kToken)});
  const AcquireRequest reader = Ask(kCat, Mode::kShared);
  EXPECT_EQ(OutcomeOf(scene, reader, kEnd, CrowdOf({Ask(kBob)})), Outcome::kOthersWait);
  EXPECT_EQ(OutcomeOf(scene, reader, kEnd, CrowdOf({Ask(kBob, Mode::kShared)})), Outcome::kGranted);
  EXPECT_EQ(OutcomeOf(scene, reader, kEnd, CrowdOf({Ask(kBob, Mode::kShared), Ask(kDan)})),
            Outcome::kOthersWait);
  EXPECT_EQ(OutcomeOf(scene, reader, kEnd, CrowdOf({Ask(kBob, Mode::kLimit, 9)})),
            Outcome::kOthersWait);
}

// The new request says how many may hold the lock, whatever earlier requests said.
TEST(GrantRule, LimitOfNewRequestDecides) {
  const Scene scene(Mode::kLimit, {HoldOf(kAnn, kToken), HoldOf(kBob, Later(kToken, 1))});
  EXPECT_EQ(OutcomeOf(scene, Ask(kCat, Mode::kLimit, 1), kEnd), Outcome::kHeldByOther);
  EXPECT_EQ(OutcomeOf(scene, Ask(kCat, Mode::kLimit, 2), kEnd), Outcome::kHeldByOther);
  EXPECT_EQ(OutcomeOf(scene, Ask(kCat, Mode::kLimit, 3), kEnd), Outcome::kGranted);
  EXPECT_EQ(OutcomeOf(scene, Ask(kCat, Mode::kShared), kEnd), Outcome::kHeldByOther);
  EXPECT_EQ(OutcomeOf(scene, Ask(kCat), kEnd), Outcome::kHeldByOther);
}

TEST(GrantRule, LimitReservesPermitsForWaitersAhead) {
  const Scene scene(Mode::kLimit, {HoldOf(kAnn, kToken)});
  const auto ask = [&](uint32_t limit, const std::vector<AcquireRequest>& waiting) {
    return OutcomeOf(scene, Ask(kCat, Mode::kLimit, limit), kEnd, CrowdOf(waiting));
  };
  // One holder, one waiter and the requester: three.
  EXPECT_EQ(ask(2, {Ask(kBob, Mode::kLimit, 9)}), Outcome::kOthersWait);
  EXPECT_EQ(ask(3, {Ask(kBob, Mode::kLimit, 9)}), Outcome::kGranted);
  EXPECT_EQ(ask(9, {Ask(kBob, Mode::kLimit, 3)}), Outcome::kGranted);
  EXPECT_EQ(ask(9, {Ask(kBob, Mode::kLimit, 2)}), Outcome::kOthersWait);
  EXPECT_EQ(ask(9, {Ask(kBob, Mode::kLimit, 9), Ask(kDan, Mode::kLimit, 4)}), Outcome::kGranted);
  EXPECT_EQ(ask(9, {Ask(kBob, Mode::kLimit, 3), Ask(kDan, Mode::kLimit, 9)}), Outcome::kOthersWait);
  EXPECT_EQ(ask(9, {Ask(kBob, Mode::kShared)}), Outcome::kOthersWait);
}

TEST(GrantRule, Allows100000LimitHolders) {
  const Scene scene(Mode::kLimit, {HoldOf(kAnn, kToken)});
  WaitersAhead crowd;
  for (uint32_t i = 0; i < kMaxLimit - 2; ++i) crowd.Add(Ask(kBob, Mode::kLimit, kMaxLimit));
  EXPECT_EQ(OutcomeOf(scene, Ask(kCat, Mode::kLimit, kMaxLimit), kEnd, crowd), Outcome::kGranted);
  crowd.Add(Ask(kBob, Mode::kLimit, kMaxLimit));
  EXPECT_EQ(OutcomeOf(scene, Ask(kCat, Mode::kLimit, kMaxLimit), kEnd, crowd),
            Outcome::kOthersWait);
}

TEST(WaitersAhead, IsMixedWhenNoModeIsCompatible) {
  EXPECT_FALSE(CrowdOf({}).IsMixed());
  EXPECT_TRUE(CrowdOf({Ask(kAnn)}).IsMixed());
  EXPECT_FALSE(CrowdOf({Ask(kAnn, Mode::kShared), Ask(kBob, Mode::kShared)}).IsMixed());
  EXPECT_FALSE(CrowdOf({Ask(kAnn, Mode::kLimit, 2), Ask(kBob, Mode::kLimit, 3)}).IsMixed());
  EXPECT_TRUE(CrowdOf({Ask(kAnn, Mode::kLimit, 2), Ask(kBob, Mode::kShared)}).IsMixed());
  EXPECT_TRUE(CrowdOf({Ask(kAnn, Mode::kShared), Ask(kBob)}).IsMixed());
  EXPECT_EQ(CrowdOf({Ask(kAnn, Mode::kLimit, 5), Ask(kBob, Mode::kLimit, 3),
                     Ask(kCat, Mode::kLimit, 4), Ask(kDan, Mode::kShared)})
                .least_limit,
            3);
  EXPECT_EQ(CrowdOf({Ask(kAnn), Ask(kBob)}).size, 2);
}

// --- Weights ------------------------------------------------------------------------------------

// Bob holds, Cat's hold lingers, and Dan's and Zoe's requests wait ahead of Ann's.
TEST(Weight, HoldersLingeringHoldersAndWaitersAheadAreSummed) {
  struct Case {
    uint32_t bob;
    uint32_t cat;
    std::vector<std::pair<uint32_t, uint32_t>> ahead;  // limit and weight of each
    uint32_t limit;
    uint32_t weight;
    Outcome outcome;
  };
  const std::vector<Case> cases = {
      // Holders only: 3 + 2.
      {3, 2, {}, 10, 5, Outcome::kGranted},
      {3, 2, {}, 10, 6, Outcome::kHeldByOther},
      {3, 2, {}, 5, 1, Outcome::kHeldByOther},
      {3, 2, {}, 6, 1, Outcome::kGranted},
      {1, 1, {}, 3, 1, Outcome::kGranted},
      {1, 1, {}, 3, 2, Outcome::kHeldByOther},
      {9, 2, {}, 10, 1, Outcome::kHeldByOther},  // more than the limit, as of another request
      {kMaxLimit, kMaxLimit, {}, kMaxLimit, kMaxLimit, Outcome::kHeldByOther},
      // 3 + 2 and those ahead.
      {3, 2, {{10, 3}}, 10, 2, Outcome::kGranted},
      {3, 2, {{10, 3}}, 10, 3, Outcome::kOthersWait},
      {3, 2, {{10, 1}, {10, 2}}, 10, 2, Outcome::kGranted},
      {3, 2, {{10, 1}, {10, 2}}, 10, 3, Outcome::kOthersWait},
      // The smallest n, whoever says it.
      {3, 2, {{8, 2}}, 100, 1, Outcome::kGranted},
      {3, 2, {{8, 2}}, 100, 2, Outcome::kOthersWait},
      {3, 2, {{100, 2}, {8, 2}}, 100, 1, Outcome::kOthersWait},
      {3, 2, {{8, 1}, {100, 1}}, 100, 1, Outcome::kGranted},
      {3, 2, {{100, 1}}, 7, 1, Outcome::kGranted},
      {3, 2, {{100, 1}}, 7, 2, Outcome::kOthersWait},
      // It fits in with the holders, but a heavy one ahead does not leave room.
      {1, 1, {{10, 8}}, 10, 1, Outcome::kOthersWait},
      {1, 1, {{10, 10}}, 10, 1, Outcome::kOthersWait},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    const Case& each = cases[i];
    const Instant now = kEnd + kTick;
    const Scene scene(Mode::kLimit,
                      {Weighing(HoldOf(kBob, kToken, now), each.bob),
                       Weighing(HoldOf(kCat, Later(kToken, 1), kEnd, kLinger), each.cat)});
    std::vector<AcquireRequest> ahead;
    for (const auto& [limit, weight] : each.ahead) ahead.push_back(Heavy(kDan, limit, weight));
    EXPECT_EQ(OutcomeOf(scene, Heavy(kAnn, each.limit, each.weight), now, CrowdOf(ahead)),
              each.outcome)
        << "case " << i;
    // When the linger is over its weight does not count any more.
    EXPECT_EQ(OutcomeOf(scene, Heavy(kAnn, kMaxLimit, kMaxLimit), kEnd + kLinger + kTick),
              Outcome::kGranted);
  }
}

TEST(Weight, EndedHoldsDoNotCount) {
  const Scene scene(Mode::kLimit, {Weighing(HoldOf(kBob, kToken, kEnd), 5),
                                   Weighing(HoldOf(kCat, Later(kToken, 1), kEnd - kTick), 4)});
  EXPECT_EQ(OutcomeOf(scene, Heavy(kAnn, 10, 5), kEnd), Outcome::kGranted);
  EXPECT_EQ(OutcomeOf(scene, Heavy(kAnn, 10, 6), kEnd), Outcome::kHeldByOther);
  EXPECT_EQ(OutcomeOf(scene, Heavy(kAnn, 10, 2), kEnd - kTick), Outcome::kHeldByOther);
  EXPECT_EQ(OutcomeOf(scene, Heavy(kAnn, 10, 10), kEnd + kTick), Outcome::kGranted);
}

// Somebody who comes back while its own hold lingers replaces that hold.
TEST(Weight, OwnLingeringHoldDoesNotCount) {
  const Instant now = kEnd + kTick;
  const Hold own = Weighing(HoldOf(kAnn, kToken, kEnd, kLinger), 7);
  const Scene alone(Mode::kLimit, {own});
  EXPECT_EQ(OutcomeOf(alone, Heavy(kAnn, 10, 10), now), Outcome::kGranted);
  EXPECT_EQ(OutcomeOf(alone, Heavy(kBob, 10, 3), now), Outcome::kGranted);
  EXPECT_EQ(OutcomeOf(alone, Heavy(kBob, 10, 4), now), Outcome::kHeldByOther);
  const Scene both(Mode::kLimit, {own, Weighing(HoldOf(kBob, Later(kToken, 1), now), 2)});
  EXPECT_EQ(OutcomeOf(both, Heavy(kAnn, 10, 8), now), Outcome::kGranted);
  EXPECT_EQ(OutcomeOf(both, Heavy(kAnn, 10, 9), now), Outcome::kHeldByOther);
  EXPECT_EQ(OutcomeOf(both, Heavy(kAnn, 20, 7), now, CrowdOf({Heavy(kDan, 20, 11)})),
            Outcome::kGranted);
  EXPECT_EQ(OutcomeOf(both, Heavy(kAnn, 20, 8), now, CrowdOf({Heavy(kDan, 20, 11)})),
            Outcome::kOthersWait);
  // The new hold has the new weight.
  EXPECT_EQ(HoldSetBy(both.state(), Heavy(kAnn, 10, 8), Later(kToken, 9), now).hold.weight, 8);
}

// It is its own hold that keeps the others waiting: with less it would overtake them.
TEST(Weight, WhoComesBackForLessWaitsBehindThoseThatItKeptWaiting) {
  const Instant now = kEnd + kTick;
  const Scene scene(Mode::kLimit, {Weighing(HoldOf(kAnn, kToken, kEnd, kLinger), 7)});
  const WaitersAhead dan = CrowdOf({Heavy(kDan, 10, 4)});
  EXPECT_EQ(OutcomeOf(scene, Heavy(kAnn, 20, 6), now, dan), Outcome::kOthersWait);
  EXPECT_EQ(OutcomeOf(scene, Heavy(kAnn, 20, 1), now, dan), Outcome::kOthersWait);
  EXPECT_EQ(OutcomeOf(scene, Heavy(kAnn, 20, 1), now), Outcome::kGranted) << "nobody waits";
  EXPECT_EQ(OutcomeOf(scene, Heavy(kAnn, 20, 1), kEnd + kLinger + kTick, dan), Outcome::kGranted)
      << "its old hold blocks nobody any more";
  EXPECT_EQ(OutcomeOf(scene, Heavy(kBob, 20, 1), now, CrowdOf({Heavy(kDan, 20, 4)})),
            Outcome::kGranted)
      << "others do not keep them waiting";
}

TEST(Weight, DoesNotMatterToOtherModes) {
  const Scene limit(Mode::kLimit, {Weighing(HoldOf(kBob, kToken), 1)});
  EXPECT_EQ(OutcomeOf(limit, Ask(kAnn), kEnd), Outcome::kHeldByOther);
  EXPECT_EQ(OutcomeOf(limit, Ask(kAnn, Mode::kShared), kEnd), Outcome::kHeldByOther);
  const Scene shared(Mode::kShared, {HoldOf(kBob, kToken)});
  EXPECT_EQ(OutcomeOf(shared, Heavy(kAnn, 10, 3), kEnd), Outcome::kHeldByOther);
  EXPECT_EQ(OutcomeOf(shared, Ask(kAnn, Mode::kShared), kEnd, CrowdOf({Heavy(kDan, 9, 3)})),
            Outcome::kOthersWait);
  EXPECT_EQ(OutcomeOf(Scene("bob"), Heavy(kAnn, 10, 3), kEnd), Outcome::kHeldByOther);
}

TEST(Weight, OfTheHoldMustBeAskedForAgain) {
  const Scene scene(Mode::kLimit, {Weighing(HoldOf(kAnn, kToken), 3)});
  for (const uint32_t limit : {3U, 4U, 100U}) {
    EXPECT_EQ(OutcomeOf(scene, Heavy(kAnn, limit, 3), kEnd), Outcome::kHeldAlready) << limit;
    EXPECT_EQ(OutcomeOf(scene, Heavy(kAnn, limit, 2), kEnd), Outcome::kOtherWeight) << limit;
    EXPECT_EQ(OutcomeOf(scene, Ask(kAnn, Mode::kLimit, limit), kEnd), Outcome::kOtherWeight)
        << "without WEIGHT it is 1";
  }
  EXPECT_EQ(OutcomeOf(scene, Heavy(kAnn, 4, 4), kEnd), Outcome::kOtherWeight);
  const Scene light(Mode::kLimit, {HoldOf(kAnn, kToken)});
  EXPECT_EQ(OutcomeOf(light, Ask(kAnn, Mode::kLimit, 5), kEnd), Outcome::kHeldAlready);
  EXPECT_EQ(OutcomeOf(light, Heavy(kAnn, 5, 2), kEnd), Outcome::kOtherWeight);
  // It is an error, not something to wait for, whoever waits ahead; and it changes nothing.
  const LockView view = scene.view(CrowdOf({Ask(kBob)}));
  EXPECT_FALSE(IsBlocked(view, Heavy(kAnn, 9, 2), kEnd));
  EXPECT_EQ(OutcomeOf(scene, Heavy(kAnn, 9, 2), kEnd, CrowdOf({Ask(kBob)})), Outcome::kOtherWeight);
  // A change of mode is the other error.
  EXPECT_EQ(OutcomeOf(scene, Ask(kAnn), kEnd), Outcome::kOtherMode);
  EXPECT_EQ(OutcomeOf(scene, Ask(kAnn, Mode::kShared), kEnd), Outcome::kOtherMode);
  // A hold that has ended asks for nothing.
  EXPECT_EQ(OutcomeOf(scene, Heavy(kAnn, 9, 2), kEnd + kTick), Outcome::kGranted);
}

TEST(Weight, OfEveryLockOfASetIsCompared) {
  const Hold ann = HoldOf(kAnn, kToken);
  const Scene three(Mode::kLimit, {Weighing(ann, 3)});
  const Scene two(Mode::kLimit, {Weighing(ann, 2)});
  const auto ask = [](const Scene& a, const Scene& b, const AcquireRequest& request) {
    const LockView views[] = {a.view(), b.view()};
    return Decide(views, request, kEnd, ClockAt(kToken)).outcome;
  };
  EXPECT_EQ(ask(three, three, Heavy(kAnn, 9, 3)), Outcome::kHeldAlready);
  EXPECT_EQ(ask(three, two, Heavy(kAnn, 9, 3)), Outcome::kOtherWeight);
  EXPECT_EQ(ask(two, three, Heavy(kAnn, 9, 3)), Outcome::kOtherWeight);
  EXPECT_EQ(ask(three, two, Heavy(kBob, 5, 3)), Outcome::kHeldByOther);
  EXPECT_EQ(ask(three, two, Heavy(kBob, 6, 3)), Outcome::kGranted);
}

TEST(Weight, IsKeptByTouchAndByAskingAgain) {
  const Scene scene(Mode::kLimit, {Weighing(HoldOf(kAnn, kToken), 3)});
  EXPECT_EQ(HoldSetBy(scene.state(), Heavy(kAnn, 9, 3), kToken, kEnd).hold.weight, 3);
  EXPECT_EQ(ChangeOf<HoldSet>(Decide(scene.state(), TouchRequest{kAnn, kLease}, kEnd))->hold.weight,
            3);
}

// max-holders bounds what a lock costs the server, so it counts holders.
TEST(Weight, MaxHoldersCountsHoldersNotWeights) {
  constexpr GrantRules kThree{.max_holders = 3};
  const auto ask = [&](const Scene& scene, const AcquireRequest& request,
                       const WaitersAhead& ahead) {
    const LockView view = scene.view(ahead);
    const Outcome outcome =
        Decide(std::span(&view, 1), request, kEnd, ClockAt(kToken), kThree).outcome;
    EXPECT_EQ(IsBlocked(view, request, kEnd, kThree), outcome != Outcome::kGranted);
    return outcome;
  };
  const Hold bob = Weighing(HoldOf(kBob, kToken), 50);
  const Hold cat = Weighing(HoldOf(kCat, Later(kToken, 1)), 20);
  const Hold dan = HoldOf(kDan, Later(kToken, 2));
  EXPECT_EQ(ask(Scene(Mode::kLimit, {bob, cat}), Heavy(kAnn, 100, 30), {}), Outcome::kGranted);
  EXPECT_EQ(ask(Scene(Mode::kLimit, {bob, cat, dan}), Heavy(kAnn, 100, 1), {}),
            Outcome::kHeldByOther);
  EXPECT_EQ(ask(Scene(Mode::kLimit, {bob}), Heavy(kAnn, 100, 20), CrowdOf({Heavy(kZoe, 100, 30)})),
            Outcome::kGranted);
  EXPECT_EQ(
      ask(Scene(Mode::kLimit, {bob, cat}), Heavy(kAnn, 100, 1), CrowdOf({Heavy(kZoe, 100, 1)})),
      Outcome::kOthersWait)
      << "the third place is Zoe's";
}

TEST(WaitersAhead, SumsWeightsOfLimitRequestsOnly) {
  EXPECT_EQ(CrowdOf({}).weight, 0);
  EXPECT_EQ(CrowdOf({Ask(kAnn), Ask(kBob, Mode::kShared)}).weight, 0);
  EXPECT_EQ(CrowdOf({Heavy(kAnn, 9, 4), Ask(kBob, Mode::kLimit, 3), Ask(kCat)}).weight, 5);
  const WaitersAhead many =
      CrowdOf(std::vector<AcquireRequest>(100'000, Heavy(kAnn, kMaxLimit, kMaxLimit)));
  EXPECT_EQ(many.weight, uint64_t{100'000} * kMaxLimit) << "more than 32 bits";
}

// Every combination of two other holders, of the own hold and of two waiters ahead, against the
// text of the rule.
TEST(Weight, MatchesSumInEverySituation) {
  const Instant now = kEnd + kTick;
  enum { kNone, kLive, kLingering, kOver, kStates };
  const auto hold_in = [&](int state, Owner owner, uint32_t weight) {
    Hold hold = Weighing(HoldOf(owner, kToken, state == kLive ? now : kEnd), weight);
    if (state == kLingering) hold.linger = kLinger;
    return hold;
  };
  const std::vector<AcquireRequest> kinds = {Heavy(kZoe, 3, 1), Heavy(kZoe, 5, 3),
                                             Heavy(kZoe, 5, 5), Heavy(kZoe, 8, 2)};
  std::vector<std::vector<AcquireRequest>> lines = {{}};
  for (const AcquireRequest& first : kinds) {
    lines.push_back({first});
    for (const AcquireRequest& second : kinds) lines.push_back({first, second});
  }
  int granted = 0;
  int refused = 0;
  for (int shape = 0; shape < kStates * kStates * 3; ++shape) {
    const int bob = shape % kStates;
    const int cat = shape / kStates % kStates;
    const int own = shape / kStates / kStates == 0 ? kNone : shape / kStates / kStates + 1;
    std::vector<Hold> holds;
    uint64_t held = 0;
    const auto add = [&](int state, Owner owner, uint32_t weight, bool counts) {
      if (state == kNone) return;
      holds.push_back(hold_in(state, owner, weight));
      if (counts && state != kOver) held += weight;
    };
    add(bob, kBob, 2, true);
    add(cat, kCat, 1, true);
    add(own, kAnn, 4, false);
    const Scene scene(Mode::kLimit, holds);
    for (AcquireRequest request : kinds) {
      request.owner = kAnn;
      for (const std::vector<AcquireRequest>& line : lines) {
        uint64_t sum = held + request.weight;
        uint32_t least = request.limit;
        for (const AcquireRequest& ahead : line) {
          sum += ahead.weight;
          least = std::min(least, ahead.limit);
        }
        const LockView view = scene.view(CrowdOf(line));
        const Admission admission = Decide(std::span(&view, 1), request, now, ClockAt(kToken));
        // Its own hold, which weighs 4, keeps those ahead waiting.
        const bool keeps_them = own == kLingering && request.weight < 4 && !line.empty();
        const bool fits = sum <= least && !keeps_them;
        ASSERT_EQ(admission.granted(), fits) << "shape " << shape;
        ASSERT_EQ(admission.busy(), !fits);
        if (admission.busy()) {
          const bool by_holders = held + request.weight > request.limit;
          ASSERT_EQ(admission.outcome, by_holders ? Outcome::kHeldByOther : Outcome::kOthersWait);
        } else {
          ASSERT_TRUE(IsSafeGrant(std::span(&view, 1), request, admission, now));
        }
        ++(admission.granted() ? granted : refused);
      }
    }
  }
  EXPECT_GT(granted, 200);
  EXPECT_GT(refused, 300);
}

// --- What must be true of every grant -----------------------------------------------------------

TEST(IsSafeGrant, ExceedsNoLimitByWeight) {
  const Admission fresh{Outcome::kGranted, Later(kToken, 9)};
  const Admission again{Outcome::kHeldAlready, kToken};
  const Scene scene(Mode::kLimit,
                    {Weighing(HoldOf(kBob, kToken), 3),
                     Weighing(HoldOf(kCat, Later(kToken, 1), kEnd - kTick, kLinger), 2)});
  const auto is_safe = [&](const AcquireRequest& request, const Admission& admission,
                           Instant now = kEnd) {
    const LockView view = scene.view();
    return IsSafeGrant(std::span(&view, 1), request, admission, now);
  };
  EXPECT_TRUE(is_safe(Heavy(kAnn, 10, 5), fresh));
  EXPECT_FALSE(is_safe(Heavy(kAnn, 10, 6), fresh)) << "a lingering hold counts";
  EXPECT_FALSE(is_safe(Heavy(kAnn, 5, 1), fresh));
  EXPECT_TRUE(is_safe(Heavy(kCat, 10, 7), fresh)) << "its own does not";
  EXPECT_FALSE(is_safe(Heavy(kCat, 10, 8), fresh));
  EXPECT_TRUE(is_safe(Heavy(kBob, 3, 3), again)) << "it has them already";
  EXPECT_FALSE(is_safe(Ask(kAnn), fresh));
  EXPECT_FALSE(is_safe(Ask(kAnn, Mode::kShared), fresh));
  EXPECT_TRUE(is_safe(Heavy(kAnn, 10, 10), fresh, kEnd + kLinger + kTick));
  EXPECT_TRUE(is_safe(Ask(kAnn), fresh, kEnd + kLinger + kTick));
}

TEST(IsSafeGrant, HoldsForEveryLockOfASet) {
  const Admission fresh{Outcome::kGranted, Later(kToken, 9)};
  const Scene free;
  const Scene light(Mode::kLimit, {Weighing(HoldOf(kBob, kToken), 2)});
  const Scene heavy(Mode::kLimit, {Weighing(HoldOf(kBob, kToken), 3)});
  const auto is_safe = [&](std::vector<const Scene*> scenes) {
    std::vector<LockView> views;
    for (const Scene* scene : scenes) views.push_back(scene->view());
    return IsSafeGrant(views, Heavy(kAnn, 5, 3), fresh, kEnd);
  };
  EXPECT_TRUE(is_safe({&free, &light}));
  EXPECT_FALSE(is_safe({&light, &heavy}));
  EXPECT_FALSE(is_safe({&heavy, &free}));
}

TEST(IsSafeGrant, DisplacesNobody) {
  const Admission fresh{Outcome::kGranted, Later(kToken, 9)};
  const auto is_safe = [&](const Scene& scene, const AcquireRequest& request) {
    const LockView view = scene.view();
    return IsSafeGrant(std::span(&view, 1), request, fresh, kEnd);
  };
  for (const Mode mode : kModes) {
    EXPECT_TRUE(is_safe(Scene(), Ask(kAnn, mode, 5)));
    EXPECT_TRUE(is_safe(Scene(mode, {HoldOf(kAnn, kToken)}), Ask(kAnn)));
    EXPECT_FALSE(is_safe(Scene(mode, {HoldOf(kBob, kToken)}), Ask(kAnn)));
    EXPECT_FALSE(is_safe(Scene("bob"), Ask(kAnn, mode, 5)));
    EXPECT_TRUE(is_safe(Scene("ann"), Ask(kAnn, mode, 5)));
    for (const Mode other : {Mode::kShared, Mode::kLimit}) {
      EXPECT_EQ(is_safe(Scene(mode, {HoldOf(kBob, kToken)}), Ask(kAnn, other, 5)), mode == other);
    }
  }
}

// --- MAXHOLD ------------------------------------------------------------------------------------

AcquireRequest Capped(AcquireRequest request, Millis max_hold) {
  request.max_hold = max_hold;
  return request;
}

Hold CappedAt(Hold hold, std::optional<Instant> cap) {
  hold.cap = cap;
  return hold;
}

TEST(MaxHold, CapsANewHoldFromItsGrantOn) {
  const Instant now = kEnd + kTick;
  const Scene over(Mode::kExclusive, {CappedAt(HoldOf(kAnn, kToken), kEnd)});
  const Scene free;
  for (const Scene* scene : {&free, &over}) {
    for (const Millis max_hold : {kLease, kLease + kTick, Millis{1'000'000}}) {
      const Hold hold =
          HoldSetBy(scene->state(), Capped(Ask(kAnn), max_hold), Later(kToken, 1), now).hold;
      EXPECT_EQ(hold.since, now);
      EXPECT_EQ(hold.cap, now + max_hold);
      EXPECT_EQ(hold.end, now + kLease);
      EXPECT_TRUE(IsWellFormed(hold));
    }
    // The cap of a hold that has ended is not inherited.
    EXPECT_EQ(HoldSetBy(scene->state(), Ask(kAnn), Later(kToken, 1), now).hold.cap, std::nullopt);
  }
  // Nor is that of another owner, whose place this one takes.
  EXPECT_EQ(HoldSetBy(over.state(), Ask(kBob), Later(kToken, 1), now).hold.cap, std::nullopt);
}

// A lease of kLease is asked for at `at` after the first grant.
TEST(MaxHold, AskingAgainMayShortenTheCapNeverLengthenIt) {
  struct Case {
    std::optional<int64_t> cap;  // of the hold, after its first grant
    int64_t at;
    int64_t max_hold;  // of the request, 0: none
    std::optional<int64_t> new_cap;
    int64_t end;
  };
  const int64_t lease = kLease.count();  // 1234
  const std::vector<Case> cases = {
      {std::nullopt, 100, 0, std::nullopt, 100 + lease},
      {std::nullopt, 100, 5'000, 5'000, 100 + lease},
      {std::nullopt, 4'000, 5'000, 5'000, 5'000},  // counted from the first grant
      {5'000, 100, 0, 5'000, 100 + lease},
      {5'000, 4'000, 0, 5'000, 5'000},
      {5'000, 5'000, 0, 5'000, 5'000},
      {5'000, 100, 9'000, 5'000, 100 + lease},
      {5'000, 4'500, 9'000, 5'000, 5'000},
      {5'000, 100, 2'000, 2'000, 100 + lease},
      {5'000, 1'500, 2'000, 2'000, 2'000},
      // A cap that has passed ends the lease now: it is live through this millisecond.
      {5'000, 3'000, 2'000, 2'000, 3'000},
      {std::nullopt, 3'000, lease, lease, 3'000},
      {5'000, 3'000, 3'000, 3'000, 3'000},
      {5'000, 3'000, 3'001, 3'001, 3'001},
  };
  const auto after = [](int64_t ms) { return kSince + Millis{ms}; };
  for (size_t i = 0; i < cases.size(); ++i) {
    const auto& [cap, at, max_hold, new_cap, end] = cases[i];
    for (const Mode mode : kModes) {
      const Hold before = CappedAt(HoldOf(kAnn, kToken, after(10'000)),
                                   cap.has_value() ? std::optional(after(*cap)) : std::nullopt);
      const Scene scene(mode, {before});
      const AcquireRequest request = Capped(Ask(kAnn, mode, 5), Millis{max_hold});
      ASSERT_EQ(OutcomeOf(scene, request, after(at)), Outcome::kHeldAlready);
      const Hold hold = HoldSetBy(scene.state(), request, kToken, after(at)).hold;
      EXPECT_EQ(hold.since, kSince) << "case " << i;
      EXPECT_EQ(hold.cap, new_cap.has_value() ? std::optional(after(*new_cap)) : std::nullopt)
          << "case " << i;
      EXPECT_EQ(hold.end, after(end)) << "case " << i;
      EXPECT_TRUE(hold.LiveAt(after(at)));
      EXPECT_TRUE(IsWellFormed(hold));
    }
  }
}

TEST(MaxHold, GoesOnThroughUpgradesAndDowngrades) {
  const Instant cap = kSince + Millis{20'000};
  const Instant now = cap - kLease + Millis{10};
  const Scene shared(Mode::kShared, {CappedAt(HoldOf(kAnn, kToken), cap)});
  const Scene exclusive(Mode::kExclusive, {CappedAt(HoldOf(kAnn, kToken), cap)});
  const std::pair<const Scene*, AcquireRequest> changes[] = {
      {&shared, Ask(kAnn)}, {&exclusive, Ask(kAnn, Mode::kShared)}};
  for (const auto& [scene, request] : changes) {
    const Admission admission = Acquire(scene->state(), request, now);
    ASSERT_TRUE(admission.granted());
    const Hold hold = HoldSetBy(scene->state(), request, admission.token, now).hold;
    EXPECT_EQ(hold.since, kSince) << "of the first grant";
    EXPECT_EQ(hold.cap, cap);
    EXPECT_EQ(hold.end, cap) << "cut";
    // A new cap counts from the first grant too.
    const Hold shorter =
        HoldSetBy(scene->state(), Capped(request, Millis{19'999}), admission.token, now).hold;
    EXPECT_EQ(shorter.cap, kSince + Millis{19'999});
    const Hold longer =
        HoldSetBy(scene->state(), Capped(request, Millis{25'000}), admission.token, now).hold;
    EXPECT_EQ(longer.cap, cap);
  }
}

TEST(MaxHold, CutsTouch) {
  const Instant cap = kSince + Millis{20'000};
  const Scene scene(Mode::kShared, {CappedAt(HoldOf(kAnn, kToken, kEnd, kLinger, 2), cap),
                                    HoldOf(kBob, Later(kToken, 1))});
  const auto touch = [&](Instant now, Millis lease) {
    const Decision decision = Decide(scene.state(), TouchRequest{kAnn, lease}, now);
    EXPECT_EQ(decision.outcome, Outcome::kTouched);
    const Hold hold = ChangeOf<HoldSet>(decision)->hold;
    EXPECT_EQ(hold, CappedAt(HoldOf(kAnn, kToken, hold.end, kLinger, 2), cap)) << "only the end";
    return hold.end;
  };
  EXPECT_EQ(touch(kSince, Millis{19'999}), cap - kTick);
  EXPECT_EQ(touch(kSince, Millis{20'000}), cap);
  EXPECT_EQ(touch(kSince, Millis{20'001}), cap);
  EXPECT_EQ(touch(cap - kTick, Millis{86'400'000}), cap);
  EXPECT_EQ(touch(cap, Millis{5}), cap);
  // A clock that was set forward, or a hold that another server wrote.
  EXPECT_EQ(touch(cap + Millis{7}, Millis{5}), cap + Millis{7}) << "it ends now";
  // Others are not cut.
  const Decision bob = Decide(scene.state(), TouchRequest{kBob, Millis{90'000}}, kSince);
  EXPECT_EQ(ChangeOf<HoldSet>(bob)->hold.end, kSince + Millis{90'000});
}

TEST(MaxHold, LingerFollowsTheCap) {
  AcquireRequest request = Capped(Ask(kAnn), kLease);
  request.linger = kLinger;
  const Scene scene;
  const HoldSet held = HoldSetBy(scene.state(), request, kToken, kSince);
  EXPECT_EQ(held.hold.end, kSince + kLease);
  EXPECT_EQ(held.hold.blocks_until(), kSince + kLease + kLinger);
}

TEST(MaxHold, ZeroMeansNone) {
  EXPECT_EQ(HoldSetBy(Scene().state(), Ask(kAnn), kToken, kSince).hold.cap, std::nullopt);
}

// --- TAG ----------------------------------------------------------------------------------------

TEST(Tag, IsKeptUnlessTheRequestHasOne) {
  Hold tagged = HoldOf(kAnn, kToken);
  tagged.tag = "old";
  AcquireRequest with = Ask(kAnn);
  with.tag = "new";
  const Scene free;
  const Scene held(Mode::kExclusive, {tagged});
  const Scene shared(Mode::kShared, {tagged});
  const Instant over = kEnd + kTick;
  EXPECT_EQ(HoldSetBy(free.state(), Ask(kAnn), kToken, kSince).hold.tag, "");
  EXPECT_EQ(HoldSetBy(free.state(), with, kToken, kSince).hold.tag, "new");
  EXPECT_EQ(HoldSetBy(held.state(), Ask(kAnn), kToken, kEnd).hold.tag, "old");
  EXPECT_EQ(HoldSetBy(held.state(), with, kToken, kEnd).hold.tag, "new");
  EXPECT_EQ(HoldSetBy(held.state(), Ask(kAnn), kToken, over).hold.tag, "") << "a new hold";
  EXPECT_EQ(HoldSetBy(held.state(), with, kToken, over).hold.tag, "new");
  EXPECT_EQ(HoldSetBy(held.state(), Ask(kBob), kToken, over).hold.tag, "") << "another owner";
  // Through a change of mode, and a touch.
  EXPECT_EQ(HoldSetBy(held.state(), Ask(kAnn, Mode::kShared), kToken, kEnd).hold.tag, "old");
  EXPECT_EQ(HoldSetBy(shared.state(), Ask(kAnn), kToken, kEnd).hold.tag, "old");
  EXPECT_EQ(HoldSetBy(shared.state(), with, kToken, kEnd).hold.tag, "new");
  EXPECT_EQ(ChangeOf<HoldSet>(Decide(held.state(), TouchRequest{kAnn, kLease}, kEnd))->hold.tag,
            "old");
}

// While it lingers a hold has ended for its owner.
TEST(Tag, AndCapOfLingeringHoldAreNotInherited) {
  Hold lingers = CappedAt(HoldOf(kAnn, kToken, kEnd, kLinger), kEnd);
  lingers.tag = "old";
  const Scene scene(Mode::kExclusive, {lingers});
  const Hold hold = HoldSetBy(scene.state(), Ask(kAnn), Later(kToken, 1), kEnd + kTick).hold;
  EXPECT_EQ(hold, (Hold{.owner = kAnn,
                        .token = Later(kToken, 1),
                        .since = kEnd + kTick,
                        .end = kEnd + kTick + kLease}));
}

TEST(TakeBack, OfUpgradeRestoresCapAndTag) {
  Hold before = CappedAt(HoldOf(kAnn, kToken), kEnd);
  before.tag = "reader";
  Hold after = CappedAt(HoldOf(kAnn, Later(kToken, 5)), kEnd - Millis{5});
  after.tag = "writer";
  const Scene scene(Mode::kExclusive, {after});
  const Decision decision =
      DecideTakeBack(scene.state(), kAnn, Later(kToken, 5), before, kEnd - Millis{50});
  ASSERT_TRUE(ChangeOf<HoldSet>(decision).has_value());
  EXPECT_EQ(ChangeOf<HoldSet>(decision)->hold, before);
}

// --- Reacquiring ------------------------------------------------------------------------------

TEST(Reacquire, KeepsTokenAndStartAndRestartsLease) {
  const Instant now = kSince + Millis{10};
  for (const Mode mode : kModes) {
    const Scene scene(mode, {kAnnsHold});
    for (const int64_t lease : {int64_t{1}, int64_t{100}, int64_t{29'990}, int64_t{86'400'000}}) {
      AcquireRequest request = Ask(kAnn, mode, 7);
      request.lease = Millis{lease};
      const Admission admission = Acquire(scene.state(), request, now);
      EXPECT_EQ(admission.outcome, Outcome::kHeldAlready);
      EXPECT_EQ(admission.token, kToken);
      const HoldSet held = HoldSetBy(scene.state(), request, admission.token, now);
      EXPECT_EQ(held.mode, mode);
      EXPECT_EQ(held.hold, HoldOf(kAnn, kToken, now + Millis{lease}));
      const Decision touch = Decide(scene.state(), TouchRequest{kAnn, Millis{lease}}, now);
      EXPECT_EQ(ChangeOf<HoldSet>(touch)->hold, HoldOf(kAnn, kToken, now + Millis{lease}));
      EXPECT_EQ(ChangeOf<HoldSet>(touch)->mode, mode);
    }
  }
}

TEST(Reacquire, AlwaysSucceedsInSameMode) {
  const std::vector<AcquireRequest> line = {Ask(kBob), Ask(kCat, Mode::kShared),
                                            Ask(kDan, Mode::kLimit, 1)};
  const Scene alone(Mode::kExclusive, {kAnnsHold});
  EXPECT_EQ(OutcomeOf(alone, Ask(kAnn), kEnd, CrowdOf(line)), Outcome::kHeldAlready);
  for (const Mode mode : {Mode::kShared, Mode::kLimit}) {
    const Scene crowded(mode, {kAnnsHold, HoldOf(kZoe, Later(kToken, 1)),
                               HoldOf(kDan, Later(kToken, 2), kSince, kLinger)});
    EXPECT_EQ(OutcomeOf(crowded, Ask(kAnn, mode, 1), kEnd, CrowdOf(line)), Outcome::kHeldAlready);
  }
}

TEST(Reacquire, AfterClockStepBackMovesEndBack) {
  const Scene scene(Mode::kExclusive, {kAnnsHold});
  const Instant now = kSince - std::chrono::hours{1};
  const Hold again = HoldSetBy(scene.state(), Ask(kAnn), kToken, now).hold;
  const Hold touched =
      ChangeOf<HoldSet>(Decide(scene.state(), TouchRequest{kAnn, kLease}, now))->hold;
  for (const Hold& hold : {again, touched}) {
    EXPECT_EQ(hold, HoldOf(kAnn, kToken, now + kLease));
    EXPECT_TRUE(IsWellFormed(hold));
  }
}

// The latest request determines the linger.
TEST(Reacquire, ReplacesLinger) {
  const Scene scene(Mode::kShared, {HoldOf(kAnn, kToken, kEnd, kLinger)});
  AcquireRequest request = Ask(kAnn, Mode::kShared);
  EXPECT_EQ(HoldSetBy(scene.state(), request, kToken, kEnd).hold.linger, Millis{0});
  request.linger = Millis{77};
  EXPECT_EQ(HoldSetBy(scene.state(), request, kToken, kEnd).hold.linger, Millis{77});
  // A touch changes nothing but the lease.
  const Decision touch = Decide(scene.state(), TouchRequest{kAnn, kLease}, kEnd);
  EXPECT_EQ(ChangeOf<HoldSet>(touch)->hold, HoldOf(kAnn, kToken, kEnd + kLease, kLinger));
}

TEST(Reacquire, AfterEndCreatesNewHold) {
  const Instant now = kEnd + kTick;
  for (const Mode mode : kModes) {
    for (const Millis linger : {Millis{0}, kLinger}) {
      const Scene scene(mode, {HoldOf(kAnn, kToken, kEnd, linger, 5)});
      for (const Mode next : kModes) {
        const AcquireRequest request = Reentrant(Ask(kAnn, next));
        const Admission admission = Acquire(scene.state(), request, now);
        EXPECT_EQ(admission.outcome, Outcome::kGranted);
        EXPECT_GT(admission.token, kToken);
        const HoldSet held = HoldSetBy(scene.state(), request, admission.token, now);
        EXPECT_EQ(held.mode, next);
        // The count ended with the old hold.
        EXPECT_EQ(held.hold, (Hold{kAnn, admission.token, now, now + kLease}));
      }
    }
  }
}

// --- Change of mode ---------------------------------------------------------------------------

TEST(Upgrade, OnlyHolderGetsNewHoldUnderNewToken) {
  const Scene scene(Mode::kShared, {HoldOf(kAnn, kToken, kEnd, kLinger, 3)});
  const Instant now = kEnd - Millis{5};
  for (const bool reentrant : {false, true}) {
    AcquireRequest request = Ask(kAnn);
    request.reentrant = reentrant;
    const Admission admission = Acquire(scene.state(), request, now);
    EXPECT_EQ(admission.outcome, Outcome::kUpgraded);
    EXPECT_GT(admission.token, kToken);
    EXPECT_TRUE(IsUpgrade(scene.state(), request, now));
    const HoldSet held = HoldSetBy(scene.state(), request, admission.token, now);
    EXPECT_EQ(held.mode, Mode::kExclusive);
    // As many releases as before are owed, and the time of the first grant stays.
    EXPECT_EQ(held.hold, (Hold{kAnn, admission.token, scene.state().lock->Find(kAnn)->since,
                               now + kLease, Millis{0}, reentrant ? 4U : 3U}));
  }
}

TEST(Upgrade, WaitsForOtherHoldersAndTheirLinger) {
  const Hold live = HoldOf(kBob, Later(kToken, 1));
  const Hold lingers = HoldOf(kBob, Later(kToken, 1), kSince, kEnd - kSince);
  for (const Hold& other : {live, lingers}) {
    const Scene scene(Mode::kShared, {HoldOf(kAnn, kToken, kEnd + Millis{50}), other});
    EXPECT_EQ(OutcomeOf(scene, Ask(kAnn), kEnd), Outcome::kHeldByOther);
    EXPECT_TRUE(IsUpgrade(scene.state(), Ask(kAnn), kEnd));
    EXPECT_TRUE(IsBlocked(scene.view(), Ask(kAnn), kEnd));
    EXPECT_EQ(OutcomeOf(scene, Ask(kAnn), kEnd + kTick), Outcome::kUpgraded);
  }
}

TEST(Upgrade, WaitsBehindWaitersAhead) {
  const Scene scene(Mode::kShared, {kAnnsHold});
  for (const Mode mode : kModes) {
    EXPECT_EQ(OutcomeOf(scene, Ask(kAnn), kEnd, CrowdOf({Ask(kBob, mode, 9)})),
              Outcome::kOthersWait);
  }
}

TEST(Upgrade, NeedsNewToken) {
  const Scene scene(Mode::kShared, {kAnnsHold});
  EXPECT_EQ(Acquire(scene.state(), Ask(kAnn), kEnd, {}, ClockAt(kMaxToken)).outcome,
            Outcome::kTokensUsedUp);
}

TEST(Upgrade, RequiresLiveSharedHold) {
  const Scene scene(Mode::kShared, {HoldOf(kAnn, kToken, kEnd, kLinger)});
  EXPECT_TRUE(IsUpgrade(scene.state(), Ask(kAnn), kEnd));
  EXPECT_FALSE(IsUpgrade(scene.state(), Ask(kAnn), kEnd + kTick));
  EXPECT_FALSE(IsUpgrade(scene.state(), Ask(kBob), kEnd));
  EXPECT_FALSE(IsUpgrade(scene.state(), Ask(kAnn, Mode::kShared), kEnd));
  EXPECT_FALSE(IsUpgrade(Scene().state(), Ask(kAnn), kEnd));
  EXPECT_FALSE(IsUpgrade(Scene(kAnn.bytes).state(), Ask(kAnn), kEnd));
  EXPECT_FALSE(IsUpgrade(Scene(Mode::kLimit, {kAnnsHold}).state(), Ask(kAnn), kEnd));
  EXPECT_FALSE(IsUpgrade(Scene(Mode::kExclusive, {kAnnsHold}).state(), Ask(kAnn), kEnd));
}

TEST(Downgrade, IsImmediateAndKeepsToken) {
  const Scene scene(Mode::kExclusive, {HoldOf(kAnn, kToken, kEnd, kLinger, 3)});
  for (const Mode waiting : kModes) {
    const Admission admission = Acquire(scene.state(), Ask(kAnn, Mode::kShared), kEnd,
                                        CrowdOf({Ask(kBob, waiting)}), ClockAt(kMaxToken));
    EXPECT_EQ(admission.outcome, Outcome::kDowngraded);
    EXPECT_EQ(admission.token, kToken);
  }
  const HoldSet held = HoldSetBy(scene.state(), Ask(kAnn, Mode::kShared), kToken, kEnd);
  EXPECT_EQ(held.mode, Mode::kShared);
  EXPECT_EQ(held.hold, HoldOf(kAnn, kToken, kEnd + kLease, Millis{0}, 3));
  EXPECT_EQ(HoldSetBy(scene.state(), Reentrant(Ask(kAnn, Mode::kShared)), kToken, kEnd).hold.count,
            4);
}

TEST(OtherChangesOfMode, AreRefused) {
  constexpr std::pair<Mode, Mode> kChanges[] = {{Mode::kExclusive, Mode::kLimit},
                                                {Mode::kShared, Mode::kLimit},
                                                {Mode::kLimit, Mode::kExclusive},
                                                {Mode::kLimit, Mode::kShared}};
  for (const auto& [from, to] : kChanges) {
    const Scene scene(from, {HoldOf(kAnn, kToken, kEnd, kLinger)});
    EXPECT_EQ(OutcomeOf(scene, Ask(kAnn, to, 5), kEnd), Outcome::kOtherMode);
    EXPECT_EQ(OutcomeOf(scene, Ask(kAnn, to, 5), kEnd, CrowdOf({Ask(kBob)})), Outcome::kOtherMode);
    EXPECT_FALSE(IsBlocked(scene.view(), Ask(kAnn, to, 5), kEnd));
    // An ended hold does not restrict the mode of the next one.
    EXPECT_EQ(OutcomeOf(scene, Ask(kAnn, to, 5), kEnd + kTick), Outcome::kGranted);
  }
}

// --- REENTRANT --------------------------------------------------------------------------------

TEST(ReentrantHold, CountsOnlyReentrantCalls) {
  for (const Mode mode : {Mode::kExclusive, Mode::kShared}) {
    Scene scene;
    const auto acquire = [&](bool reentrant) {
      AcquireRequest request = Ask(kAnn, mode);
      request.reentrant = reentrant;
      const Admission admission = Acquire(scene.state(), request, kSince);
      EXPECT_TRUE(admission.granted());
      scene.ApplyFact(HoldSetBy(scene.state(), request, admission.token, kSince));
      return scene.lock()->Find(kAnn)->count;
    };
    const auto release = [&] {
      const Decision decision = Decide(scene.state(), ReleaseRequest{kAnn}, kSince);
      EXPECT_EQ(decision.outcome, Outcome::kReleased);
      scene.ApplyFact(ChangeOf<HoldReleased>(decision).value());
      return scene.lock() == nullptr ? 0 : scene.lock()->Find(kAnn)->count;
    };
    EXPECT_EQ(acquire(true), 1);
    const Token token = scene.lock()->Find(kAnn)->token;
    EXPECT_EQ(acquire(true), 2);
    EXPECT_EQ(acquire(false), 2);
    EXPECT_EQ(acquire(true), 3);
    EXPECT_EQ(release(), 2);
    EXPECT_EQ(acquire(true), 3);
    EXPECT_EQ(scene.lock()->Find(kAnn)->token, token);
    EXPECT_EQ(release(), 2);
    EXPECT_EQ(release(), 1);
    EXPECT_EQ(release(), 0);
    EXPECT_EQ(scene.lock(), nullptr);
    EXPECT_EQ(Decide(scene.state(), ReleaseRequest{kAnn}, kSince).outcome, Outcome::kFree);
  }
}

TEST(ReentrantHold, RefusesCallBeyondMaximumCount) {
  for (const Mode mode : {Mode::kExclusive, Mode::kShared}) {
    const Scene last(mode, {HoldOf(kAnn, kToken, kEnd, Millis{0}, kMaxCount - 1)});
    EXPECT_EQ(OutcomeOf(last, Reentrant(Ask(kAnn, mode)), kEnd), Outcome::kHeldAlready);
    EXPECT_EQ(HoldSetBy(last.state(), Reentrant(Ask(kAnn, mode)), kToken, kEnd).hold.count,
              kMaxCount);

    const Scene full(mode, {HoldOf(kAnn, kToken, kEnd, Millis{0}, kMaxCount)});
    for (const Mode next : {Mode::kExclusive, Mode::kShared}) {
      const Admission admission = Acquire(full.state(), Reentrant(Ask(kAnn, next)), kEnd);
      EXPECT_EQ(admission.outcome, Outcome::kCountedOut);
      EXPECT_FALSE(admission.granted() || admission.busy());
    }
    EXPECT_EQ(OutcomeOf(full, Ask(kAnn, mode), kEnd), Outcome::kHeldAlready);
    EXPECT_EQ(HoldSetBy(full.state(), Ask(kAnn, mode), kToken, kEnd).hold.count, kMaxCount);
    EXPECT_EQ(OutcomeOf(full, Reentrant(Ask(kAnn, mode)), kEnd + kTick), Outcome::kGranted);
    EXPECT_EQ(Decide(full.state(), ReleaseRequest{kAnn}, kEnd).outcome, Outcome::kReleased);
  }
}

TEST(ReentrantHold, TouchKeepsCount) {
  const Scene scene(Mode::kExclusive, {HoldOf(kAnn, kToken, kEnd, kLinger, 9)});
  const Decision touch = Decide(scene.state(), TouchRequest{kAnn, kLease}, kEnd);
  EXPECT_EQ(ChangeOf<HoldSet>(touch)->hold, HoldOf(kAnn, kToken, kEnd + kLease, kLinger, 9));
}

// --- Linger -----------------------------------------------------------------------------------

// Each of several holds lingers independently.
TEST(Linger, BlocksOthersLikeHolder) {
  const Instant now = kEnd + kTick;
  const Scene shared(Mode::kShared, {HoldOf(kAnn, kToken, kEnd, kLinger)});
  EXPECT_EQ(OutcomeOf(shared, Ask(kBob, Mode::kShared), now), Outcome::kGranted);
  EXPECT_EQ(OutcomeOf(shared, Ask(kBob), now), Outcome::kHeldByOther);
  const Scene limit(Mode::kLimit, {HoldOf(kAnn, kToken, kEnd, kLinger),
                                   HoldOf(kCat, Later(kToken, 1), kEnd + kLease)});
  EXPECT_EQ(OutcomeOf(limit, Ask(kBob, Mode::kLimit, 2), now), Outcome::kHeldByOther);
  EXPECT_EQ(OutcomeOf(limit, Ask(kBob, Mode::kLimit, 3), now), Outcome::kGranted);
  EXPECT_EQ(OutcomeOf(limit, Ask(kBob, Mode::kLimit, 2), kEnd + kLinger + kTick),
            Outcome::kGranted);
}

// The owner's own lingering hold does not block it.
TEST(Linger, DoesNotBlockItsOwner) {
  const Instant now = kEnd + kTick;
  const Scene full(Mode::kLimit, {HoldOf(kAnn, kToken, kEnd, kLinger),
                                  HoldOf(kCat, Later(kToken, 1), kEnd + kLease)});
  EXPECT_EQ(OutcomeOf(full, Ask(kAnn, Mode::kLimit, 2), now), Outcome::kGranted);
  EXPECT_EQ(OutcomeOf(full, Ask(kAnn, Mode::kLimit, 1), now), Outcome::kHeldByOther);
  const Scene alone(Mode::kExclusive, {HoldOf(kAnn, kToken, kEnd, kLinger)});
  EXPECT_EQ(OutcomeOf(alone, Ask(kAnn), now), Outcome::kGranted);
  EXPECT_EQ(OutcomeOf(alone, Ask(kAnn), now, CrowdOf({Ask(kBob)})), Outcome::kOthersWait);
  EXPECT_FALSE(IsBlocked(alone.view(), Ask(kAnn), now));
}

TEST(Linger, ReleaseEndsLinger) {
  for (const uint32_t count : {1U, 5U}) {
    Scene scene(Mode::kExclusive, {HoldOf(kAnn, kToken, kEnd, kLinger, count)});
    const Decision decision = Decide(scene.state(), ReleaseRequest{kAnn}, kEnd + kTick);
    EXPECT_EQ(decision.outcome, Outcome::kLingerCut);
    ASSERT_TRUE(ChangeOf<HoldEnded>(decision).has_value());
    scene.ApplyFact(*ChangeOf<HoldEnded>(decision));
    EXPECT_EQ(scene.lock(), nullptr);
  }
}

TEST(Linger, CleanReleaseLeavesNoLinger) {
  Scene scene(Mode::kExclusive, {HoldOf(kAnn, kToken, kEnd, kLinger)});
  scene.ApplyFact(
      ChangeOf<HoldReleased>(Decide(scene.state(), ReleaseRequest{kAnn}, kEnd)).value());
  EXPECT_EQ(OutcomeOf(scene, Ask(kBob), kEnd), Outcome::kGranted);
}

TEST(Linger, GrantStoresRequestedLinger) {
  AcquireRequest request = Ask(kAnn);
  request.linger = kLinger;
  EXPECT_EQ(HoldSetBy(Scene().state(), request, kToken, kSince).hold,
            HoldOf(kAnn, kToken, kSince + kLease, kLinger));
}

// --- The end of a session ---------------------------------------------------------------------

TEST(SessionEnd, EndsHoldWhateverItsCount) {
  for (const Mode mode : kModes) {
    Scene scene(mode, {HoldOf(kAnn, kToken, kEnd, Millis{0}, 5)});
    EXPECT_EQ(EndedBySession(scene, kAnn, kSince), Owners{kAnn});
    EndSession(scene, kAnn, kSince);
    EXPECT_EQ(scene.lock(), nullptr);
  }
}

TEST(SessionEnd, LeavesRequestedLinger) {
  for (const Mode mode : kModes) {
    Scene scene(mode, {HoldOf(kAnn, kToken, kEnd, kLinger, 2)});
    const Instant now = kSince + Millis{10};
    EXPECT_EQ(EndedBySession(scene, kAnn, now), Owners{kAnn});
    EndSession(scene, kAnn, now);
    EXPECT_EQ(scene.lock()->mode(), mode);
    EXPECT_FALSE(IsCurrent(scene.state(), kToken, now));
    EXPECT_EQ(OutcomeOf(scene, Ask(kBob), now), Outcome::kHeldByOther);
    EXPECT_EQ(OutcomeOf(scene, Ask(kBob), now + kLinger - kTick), Outcome::kHeldByOther);
    EXPECT_EQ(OutcomeOf(scene, Ask(kBob), now + kLinger), Outcome::kGranted);
    EXPECT_TRUE(IsWellFormed(scene.lock()->first(Lock::Order::kByOwner)));
  }
}

// Setting the clock back does not revive the hold.
TEST(SessionEnd, ClockStepBackDoesNotReviveHold) {
  Scene scene(Mode::kExclusive, {HoldOf(kAnn, kToken, kEnd, kLinger, 2)});
  EndSession(scene, kAnn, kEnd);
  for (const Instant now : {kEnd, kEnd - kTick, kSince, kSince - std::chrono::hours{1000}}) {
    EXPECT_FALSE(IsCurrent(scene.state(), kToken, now));
    EXPECT_EQ(CurrentToken(scene.state(), now), std::nullopt);
    EXPECT_FALSE(Decide(scene.state(), TouchRequest{kAnn, kLease}, now).change.has_value());
    EXPECT_EQ(Decide(scene.state(), ReleaseRequest{kAnn}, now).outcome, Outcome::kLingerCut);
    EXPECT_EQ(EndedBySession(scene, kAnn, now), Owners{});
    const Admission again = Acquire(scene.state(), Ask(kAnn), now);
    EXPECT_EQ(again.outcome, Outcome::kGranted);
    EXPECT_GT(again.token, kToken);
    EXPECT_EQ(OutcomeOf(scene, Ask(kBob), now), Outcome::kHeldByOther);
  }
}

TEST(SessionEnd, LeavesOtherHoldersAlone) {
  Scene scene(Mode::kShared, {kAnnsHold, HoldOf(kBob, Later(kToken, 1))});
  EndSession(scene, kAnn, kSince);
  EXPECT_EQ(scene.lock()->size(), 1);
  EXPECT_EQ(scene.lock()->Find(kBob), HoldOf(kBob, Later(kToken, 1)));
}

TEST(SessionEnd, IgnoresMissingHold) {
  const Scene scene(Mode::kExclusive, {HoldOf(kAnn, kToken, kEnd, kLinger)});
  EXPECT_EQ(EndedBySession(scene, kAnn, kEnd + kTick), Owners{});
  EXPECT_EQ(EndedBySession(scene, kBob, kEnd), Owners{});
  EXPECT_EQ(EndedBySession(Scene(), kAnn, kEnd), Owners{});
  EXPECT_EQ(EndedBySession(Scene(kAnn.bytes), kAnn, kEnd), Owners{});
}

TEST(SessionEnd, EndsOnlyLiveHolds) {
  const Scene scene(Mode::kShared, {kAnnsHold, HoldOf(kBob, Later(kToken, 1), kSince),
                                    HoldOf(kCat, Later(kToken, 2), kEnd, kLinger)});
  const std::array owners = {kZoe, kCat, kBob, kAnn};
  EXPECT_EQ(DecideSessionEnd(scene.state(), owners, kEnd), (Owners{kCat, kAnn}));
}

TEST(SessionEnd, AtTimeLimitsStaysWellFormed) {
  const Hold longest = HoldOf(kAnn, kToken, kMaxInstant, kMaxInstant - kMinInstant);
  for (const Hold& hold : {HoldOf(kAnn, kToken, kEnd, kLinger), longest}) {
    for (const Instant at : {kMinInstant, kMinInstant + kTick, kMaxInstant}) {
      EXPECT_TRUE(IsWellFormed(AfterSession(hold, at)));
    }
  }
}

// --- A grant whose reply was lost -------------------------------------------------------------

// Nobody uses the grant: it ends at once, whatever its linger and count.
TEST(TakeBack, EndsGrantAtOnce) {
  for (const Mode mode : kModes) {
    const Scene scene(mode, {HoldOf(kAnn, kToken, kEnd, kLinger, 3)});
    const Decision decision = DecideTakeBack(scene.state(), kAnn, kToken, std::nullopt, kSince);
    EXPECT_EQ(decision.outcome, Outcome::kReleased);
    ASSERT_TRUE(ChangeOf<HoldEnded>(decision).has_value());
    EXPECT_EQ(ChangeOf<HoldEnded>(decision)->owner, kAnn);
  }
}

TEST(TakeBack, OfUpgradeRestoresSharedHold) {
  const Hold shared = HoldOf(kAnn, kToken, kEnd, kLinger, 3);
  Scene scene(Mode::kExclusive, {HoldOf(kAnn, Later(kToken, 5), kEnd + kLease, Millis{0}, 4)});
  const Instant now = kEnd - kTick;
  const Decision decision = DecideTakeBack(scene.state(), kAnn, Later(kToken, 5), shared, now);
  EXPECT_EQ(decision.outcome, Outcome::kReleased);
  ASSERT_TRUE(ChangeOf<HoldSet>(decision).has_value());
  scene.ApplyFact(*ChangeOf<HoldSet>(decision));
  EXPECT_EQ(scene.lock()->mode(), Mode::kShared);
  EXPECT_EQ(scene.lock()->Find(kAnn), shared);
  EXPECT_TRUE(IsCurrent(scene.state(), kToken, now));
  EXPECT_FALSE(IsCurrent(scene.state(), Later(kToken, 5), now));
}

// The shared hold ended in the meantime: what remains is its linger, then nothing.
TEST(TakeBack, OfUpgradeRestoresLingerOfEndedSharedHold) {
  const Hold shared = HoldOf(kAnn, kToken, kEnd, kLinger);
  const Scene scene(Mode::kExclusive, {HoldOf(kAnn, Later(kToken, 5), kEnd + kLease)});
  const auto take_back = [&](Instant now) {
    return DecideTakeBack(scene.state(), kAnn, Later(kToken, 5), shared, now);
  };
  EXPECT_EQ(ChangeOf<HoldSet>(take_back(kEnd + kTick)).value().hold, shared);
  EXPECT_EQ(ChangeOf<HoldSet>(take_back(kEnd + kLinger)).value().hold, shared);
  EXPECT_TRUE(ChangeOf<HoldEnded>(take_back(kEnd + kLinger + kTick)).has_value());
}

TEST(TakeBack, IgnoresOtherGrantsAndMissingHolds) {
  const Scene scene(Mode::kExclusive, {kAnnsHold});
  const auto changes = [](const Scene& at, Owner owner, Token token, Instant now) {
    return DecideTakeBack(at.state(), owner, token, std::nullopt, now).change.has_value();
  };
  EXPECT_TRUE(changes(scene, kAnn, kToken, kEnd));
  EXPECT_FALSE(changes(scene, kAnn, Later(kToken, 1), kEnd));
  EXPECT_FALSE(changes(scene, kBob, kToken, kEnd));
  EXPECT_FALSE(changes(scene, kAnn, kToken, kEnd + kTick));
  EXPECT_FALSE(changes(Scene(), kAnn, kToken, kEnd));
  EXPECT_FALSE(changes(Scene(kAnn.bytes), kAnn, kToken, kEnd));
}

// --- Release and touch among several holders --------------------------------------------------

// Carrying out a fact may free the lock it refers to, so the fact must not point into the lock.
TEST(Touch, RefersToOwnerBytesOfCaller) {
  const std::string mine(kAnn.bytes);
  for (const Mode mode : {Mode::kExclusive, Mode::kShared}) {
    const Scene scene(mode, {HoldOf(kAnn, kToken)});
    const Decision decision =
        Decide(scene.state(), TouchRequest{.owner = Owner{mine}, .lease = kLease}, kSince);
    EXPECT_EQ(std::get<HoldSet>(decision.change.value()).hold.owner.bytes.data(), mine.data());
  }
}

TEST(SessionEnd, RefersToOwnerBytesOfCaller) {
  const std::string mine(kAnn.bytes);
  const Scene scene(Mode::kExclusive, {kAnnsHold});
  const Owners ended = EndedBySession(scene, Owner{mine}, kSince);
  EXPECT_EQ(ended.at(0).bytes.data(), mine.data());
}

TEST(SeveralHolders, ReleaseAndTouchAffectOnlyOwnHold) {
  for (const Mode mode : {Mode::kShared, Mode::kLimit}) {
    const Scene scene(mode, {kAnnsHold, HoldOf(kBob, Later(kToken, 1), kEnd - kTick, kLinger, 2)});
    EXPECT_EQ(ChangeOf<HoldReleased>(Decide(scene.state(), ReleaseRequest{kAnn}, kSince))->owner,
              kAnn);
    const HoldSet touched =
        *ChangeOf<HoldSet>(Decide(scene.state(), TouchRequest{kBob, kLease}, kSince));
    EXPECT_EQ(touched.mode, mode);
    EXPECT_EQ(touched.hold, HoldOf(kBob, Later(kToken, 1), kSince + kLease, kLinger, 2));
    // Bob's lease is over, Ann's is not.
    EXPECT_EQ(Decide(scene.state(), TouchRequest{kBob, kLease}, kEnd).outcome,
              Outcome::kHeldByOther);
    EXPECT_EQ(Decide(scene.state(), ReleaseRequest{kBob}, kEnd).outcome, Outcome::kLingerCut);
    EXPECT_EQ(Decide(scene.state(), ReleaseRequest{kCat}, kEnd).outcome, Outcome::kHeldByOther);
  }
}

// --- Plain locks ------------------------------------------------------------------------------

// A string is one exclusive holder, whatever the mode of the request.
TEST(PlainLock, IsExclusiveToOthersInEveryMode) {
  for (const Mode mode : kModes) {
    for (const uint32_t limit : {1U, 2U, kMaxLimit}) {
      const Scene scene(kAnn.bytes);
      const AcquireRequest request = Ask(kBob, mode, limit);
      EXPECT_EQ(OutcomeOf(scene, request, kSince), Outcome::kHeldByOther);
      EXPECT_EQ(OutcomeOf(scene, request, kSince, CrowdOf({Ask(kCat, mode, limit)})),
                Outcome::kHeldByOther);
      EXPECT_TRUE(IsBlocked(scene.view(), request, kSince));
    }
  }
  EXPECT_EQ(ModeOf(Scene(kAnn.bytes).state()), Mode::kExclusive);
}

// The owner held the lock before the waiters came.
TEST(PlainLock, OwnerConvertsItInEveryModeDespiteWaiters) {
  const Scene scene(kAnn.bytes);
  for (const Mode mode : kModes) {
    for (const Mode waiting : kModes) {
      const AcquireRequest request = Reentrant(Ask(kAnn, mode));
      const Admission admission =
          Acquire(scene.state(), request, kSince, CrowdOf({Ask(kBob, waiting)}));
      EXPECT_EQ(admission.outcome, Outcome::kGranted);
      EXPECT_GT(admission.token, kToken);
      const HoldSet held = HoldSetBy(scene.state(), request, admission.token, kSince);
      EXPECT_EQ(held.mode, mode);
      EXPECT_EQ(held.hold, HoldOf(kAnn, admission.token, kSince + kLease));
    }
  }
  EXPECT_EQ(Acquire(scene.state(), Ask(kAnn), kSince, {}, ClockAt(kMaxToken)).outcome,
            Outcome::kTokensUsedUp);
}

TEST(PlainLock, EmptyValueMatchesNoOwner) {
  const Scene scene("");
  for (const Mode mode : kModes) {
    EXPECT_EQ(OutcomeOf(scene, Ask(kAnn, mode, 9), kSince), Outcome::kHeldByOther);
  }
}

// The server may still return a string whose TTL has passed: its cached clock is slightly behind.
TEST(PlainLock, IsFreeAfterItsEnd) {
  const Scene scene(kAnn.bytes, kEnd);
  const KeyState state = scene.state();
  for (const Mode mode : kModes) {
    const AcquireRequest request = Ask(kBob, mode);
    EXPECT_EQ(Acquire(state, request, kEnd + Micros{999}).outcome, Outcome::kHeldByOther);
    EXPECT_EQ(Acquire(state, request, kEnd + Micros{1000}).outcome, Outcome::kGranted);
    EXPECT_EQ(OutcomeOf(scene, request, kEnd + kTick, CrowdOf({Ask(kCat)})), Outcome::kOthersWait);
  }
  EXPECT_EQ(Decide(state, ReleaseRequest{kAnn}, kEnd).outcome, Outcome::kReleased);
  EXPECT_EQ(Decide(state, ReleaseRequest{kAnn}, kEnd + kTick).outcome, Outcome::kFree);
  EXPECT_EQ(Decide(state, TouchRequest{kAnn, kTick}, kEnd + kTick).outcome, Outcome::kFree);
  EXPECT_EQ(CountHolders(state, kEnd), 1);
  EXPECT_EQ(NextEnd(state, kEnd), kEnd);
  EXPECT_EQ(CountHolders(state, kEnd + kTick), 0);
  EXPECT_EQ(NextEnd(state, kEnd + kTick), std::nullopt);
}

// --- Several locks ----------------------------------------------------------------------------

// Locks requested together.
Admission AcquireAll(const std::vector<const Scene*>& scenes, const AcquireRequest& request,
                     Instant now = kEnd, const TokenClock& clock = ClockAt(Later(kToken, 9))) {
  std::vector<LockView> views;
  for (const Scene* scene : scenes) views.push_back(scene->view());
  return Decide(views, request, now, clock);
}

Outcome OutcomeOfAll(const std::vector<const Scene*>& scenes, const AcquireRequest& request,
                     Instant now = kEnd) {
  return AcquireAll(scenes, request, now).outcome;
}

TEST(SeveralLocks, AreGrantedUnderOneToken) {
  const Scene free;
  const Scene over(Mode::kExclusive, {HoldOf(kBob, kToken, kEnd - kTick)});
  const Scene lingering(Mode::kShared, {HoldOf(kAnn, kToken, kEnd - kTick, kLinger)});
  const Admission admission = AcquireAll({&free, &over, &lingering}, Ask(kAnn));
  EXPECT_EQ(admission.outcome, Outcome::kGranted);
  EXPECT_GT(admission.token, kToken);
  for (const Scene* scene : {&free, &over, &lingering}) {
    EXPECT_EQ(HoldSetBy(scene->state(), Ask(kAnn), admission.token, kEnd).hold,
              (Hold{kAnn, admission.token, kEnd, kEnd + kLease}));
  }
}

TEST(SeveralLocks, AreGrantedAllOrNothing) {
  const Scene free;
  const Scene busy(Mode::kExclusive, {HoldOf(kBob, kToken)});
  const Scene readers(Mode::kShared, {HoldOf(kBob, kToken)});
  const Scene plain(kBob.bytes);
  EXPECT_EQ(OutcomeOfAll({&free, &free}, Ask(kAnn)), Outcome::kGranted);
  for (const Scene* other : {&busy, &readers, &plain}) {
    EXPECT_EQ(OutcomeOfAll({other, &free, &free}, Ask(kAnn)), Outcome::kHeldByOther);
    EXPECT_EQ(OutcomeOfAll({&free, &free, other}, Ask(kAnn)), Outcome::kHeldByOther);
  }
  EXPECT_EQ(OutcomeOfAll({&free, &readers}, Ask(kAnn, Mode::kShared)), Outcome::kGranted);
  EXPECT_EQ(OutcomeOfAll({&readers, &busy}, Ask(kAnn, Mode::kShared)), Outcome::kHeldByOther);
}

TEST(SeveralLocks, WaitBehindWaitersOfAnyLock) {
  const Scene free;
  for (const size_t crowded : {0U, 1U, 2U}) {
    std::vector<LockView> views(3, free.view());
    views.at(crowded).ahead = CrowdOf({Ask(kBob, Mode::kShared)});
    EXPECT_EQ(Decide(views, Ask(kAnn), kEnd, TokenClock()).outcome, Outcome::kOthersWait);
    EXPECT_EQ(Decide(views, Ask(kAnn, Mode::kShared), kEnd, TokenClock()).outcome,
              Outcome::kGranted);
  }
}

TEST(SeveralLocks, LimitAppliesToEachLock) {
  const Scene one(Mode::kLimit, {HoldOf(kBob, kToken)});
  const Scene two(Mode::kLimit, {HoldOf(kBob, kToken), HoldOf(kCat, Later(kToken, 1))});
  EXPECT_EQ(OutcomeOfAll({&one, &two}, Ask(kAnn, Mode::kLimit, 2)), Outcome::kHeldByOther);
  EXPECT_EQ(OutcomeOfAll({&one, &two}, Ask(kAnn, Mode::kLimit, 3)), Outcome::kGranted);
}

TEST(SeveralLocks, CanBeReacquired) {
  const Scene first(Mode::kExclusive, {HoldOf(kAnn, kToken, kEnd, kLinger, 2)});
  const Scene second(Mode::kExclusive, {HoldOf(kAnn, kToken, kEnd + kTick, Millis{0}, 5)});
  std::vector<LockView> views = {first.view(CrowdOf({Ask(kBob)})), second.view()};
  const Admission admission = Decide(views, Ask(kAnn), kEnd, ClockAt(kMaxToken));
  EXPECT_EQ(admission.outcome, Outcome::kHeldAlready);
  EXPECT_EQ(admission.token, kToken);
  // Each lock keeps its own start and count.
  EXPECT_EQ(HoldSetBy(first.state(), Reentrant(Ask(kAnn)), kToken, kEnd).hold.count, 3);
  EXPECT_EQ(HoldSetBy(second.state(), Reentrant(Ask(kAnn)), kToken, kEnd).hold.count, 6);
}

TEST(SeveralLocks, PartlyHeldAreRefused) {
  const Scene own(Mode::kExclusive, {kAnnsHold});
  const Scene free;
  const Scene busy(Mode::kExclusive, {HoldOf(kBob, Later(kToken, 1))});
  const Scene lingering(Mode::kExclusive, {HoldOf(kAnn, kToken, kEnd - kTick, kLinger)});
  const Scene plain(kAnn.bytes);
  for (const Scene* held : {&own, &plain}) {
    for (const Scene* other : {&free, &busy, &lingering}) {
      EXPECT_EQ(OutcomeOfAll({held, other}, Ask(kAnn)), Outcome::kHoldsSome);
      EXPECT_EQ(OutcomeOfAll({other, held}, Ask(kAnn)), Outcome::kHoldsSome);
      EXPECT_EQ(OutcomeOfAll({held, other, held}, Ask(kAnn, Mode::kShared)), Outcome::kHoldsSome);
    }
  }
  EXPECT_FALSE(AcquireAll({&own, &busy}, Ask(kAnn)).busy());
}

TEST(SeveralLocks, HeldUnderDifferentTokensAreRefused) {
  const Scene first(Mode::kExclusive, {kAnnsHold});
  const Scene second(Mode::kExclusive, {HoldOf(kAnn, Later(kToken, 1))});
  const Scene plain(kAnn.bytes);
  EXPECT_EQ(OutcomeOfAll({&first, &second}, Ask(kAnn)), Outcome::kHoldsApart);
  EXPECT_EQ(OutcomeOfAll({&first, &first, &second}, Ask(kAnn)), Outcome::kHoldsApart);
  EXPECT_EQ(OutcomeOfAll({&first, &second, &first}, Ask(kAnn)), Outcome::kHoldsApart);
  EXPECT_EQ(OutcomeOfAll({&first, &first}, Ask(kAnn)), Outcome::kHeldAlready);
  // A string has no token.
  EXPECT_EQ(OutcomeOfAll({&first, &plain}, Ask(kAnn)), Outcome::kHoldsApart);
  EXPECT_EQ(OutcomeOfAll({&plain, &first}, Ask(kAnn)), Outcome::kHoldsApart);
}

TEST(SeveralLocks, OwnPlainLocksAreConvertedTogether) {
  const Scene plain(kAnn.bytes);
  const Admission admission = AcquireAll({&plain, &plain}, Ask(kAnn));
  EXPECT_EQ(admission.outcome, Outcome::kGranted);
  EXPECT_GT(admission.token, kToken);
}

TEST(SeveralLocks, UpgradeIsRefused) {
  const Scene shared(Mode::kShared, {kAnnsHold});
  const Scene crowded(Mode::kShared, {kAnnsHold, HoldOf(kBob, Later(kToken, 1))});
  const Scene exclusive(Mode::kExclusive, {kAnnsHold});
  EXPECT_EQ(OutcomeOfAll({&shared, &shared}, Ask(kAnn)), Outcome::kUpgradesSeveral);
  EXPECT_EQ(OutcomeOfAll({&crowded, &shared}, Ask(kAnn)), Outcome::kUpgradesSeveral);
  EXPECT_EQ(OutcomeOfAll({&exclusive, &shared}, Ask(kAnn)), Outcome::kUpgradesSeveral);
  EXPECT_EQ(OutcomeOfAll({&shared, &exclusive}, Ask(kAnn)), Outcome::kUpgradesSeveral);
  EXPECT_FALSE(AcquireAll({&crowded, &shared}, Ask(kAnn)).busy());
  // A single lock can be upgraded.
  EXPECT_EQ(OutcomeOfAll({&shared}, Ask(kAnn)), Outcome::kUpgraded);
}

TEST(SeveralLocks, AreDowngradedTogether) {
  const Scene shared(Mode::kShared, {kAnnsHold});
  const Scene exclusive(Mode::kExclusive, {kAnnsHold});
  for (const std::vector<const Scene*>& scenes : std::vector<std::vector<const Scene*>>{
           {&exclusive, &exclusive}, {&shared, &exclusive}, {&exclusive, &shared}}) {
    const Admission admission = AcquireAll(scenes, Ask(kAnn, Mode::kShared));
    EXPECT_TRUE(admission.granted());
    EXPECT_EQ(admission.token, kToken);
  }
  EXPECT_EQ(OutcomeOfAll({&exclusive, &exclusive}, Ask(kAnn, Mode::kShared)), Outcome::kDowngraded);
}

TEST(SeveralLocks, OneInOtherModeIsRefused) {
  const Scene limit(Mode::kLimit, {kAnnsHold});
  const Scene exclusive(Mode::kExclusive, {kAnnsHold});
  EXPECT_EQ(OutcomeOfAll({&limit, &exclusive}, Ask(kAnn)), Outcome::kOtherMode);
  EXPECT_EQ(OutcomeOfAll({&exclusive, &limit}, Ask(kAnn)), Outcome::kOtherMode);
}

TEST(SeveralLocks, OneAtMaximumCountIsRefused) {
  const Scene full(Mode::kExclusive, {HoldOf(kAnn, kToken, kEnd, Millis{0}, kMaxCount)});
  const Scene own(Mode::kExclusive, {kAnnsHold});
  EXPECT_EQ(OutcomeOfAll({&own, &full}, Reentrant(Ask(kAnn))), Outcome::kCountedOut);
  EXPECT_EQ(OutcomeOfAll({&full, &own}, Reentrant(Ask(kAnn))), Outcome::kCountedOut);
  EXPECT_EQ(OutcomeOfAll({&own, &full}, Ask(kAnn)), Outcome::kHeldAlready);
}

TEST(SeveralLocks, NeedOneNewToken) {
  const Scene free;
  EXPECT_EQ(AcquireAll({&free, &free}, Ask(kAnn), kEnd, ClockAt(kMaxToken)).outcome,
            Outcome::kTokensUsedUp);
  const Token last = Token{kMaxToken.value - 1};
  EXPECT_EQ(AcquireAll({&free, &free}, Ask(kAnn), kEnd, ClockAt(last)).token, kMaxToken);
}

// Any two locks together, compared with the decisions for each alone.
TEST(SeveralLocks, PairsAgreeWithSingleDecisions) {
  const Token other = Later(kToken, 1);
  std::vector<Scene> scenes;
  scenes.emplace_back();
  scenes.emplace_back(kAnn.bytes);
  scenes.emplace_back(kBob.bytes);
  for (const Mode mode : kModes) {
    scenes.emplace_back(mode, std::vector{HoldOf(kBob, kToken)});
    scenes.emplace_back(mode, std::vector{kAnnsHold});
    scenes.emplace_back(mode, std::vector{HoldOf(kAnn, other)});
    scenes.emplace_back(mode, std::vector{HoldOf(kAnn, kToken, kSince, kEnd - kSince)});
    if (mode == Mode::kExclusive) continue;
    scenes.emplace_back(mode, std::vector{HoldOf(kBob, other), kAnnsHold});
  }
  const auto token_of = [](const Scene& scene) -> std::optional<Token> {
    if (scene.lock() == nullptr) return std::nullopt;
    const auto own = scene.lock()->Find(kAnn);
    return own.has_value() && own->LiveAt(kEnd) ? std::optional(own->token) : std::nullopt;
  };
  const auto holds = [&](const Scene& scene) {
    return token_of(scene).has_value() ||
           (scene.state().plain.has_value() && scene.state().plain->value == kAnn.bytes);
  };
  for (const AcquireRequest& request : {Ask(kAnn), Ask(kAnn, Mode::kShared),
                                        Ask(kAnn, Mode::kLimit, 1), Ask(kAnn, Mode::kLimit, 2)}) {
    for (const Scene& a : scenes) {
      for (const Scene& b : scenes) {
        const Admission both = AcquireAll({&a, &b}, request);
        const Admission first = Acquire(a.state(), request, kEnd);
        const Admission second = Acquire(b.state(), request, kEnd);
        if (holds(a) != holds(b)) {
          EXPECT_EQ(both.outcome, Outcome::kHoldsSome);
        } else if (token_of(a) != token_of(b)) {
          EXPECT_EQ(both.outcome, Outcome::kHoldsApart);
        } else if (holds(a) &&
                   (IsUpgrade(a.state(), request, kEnd) || IsUpgrade(b.state(), request, kEnd))) {
          EXPECT_FALSE(both.granted() || both.busy());
        } else if (!first.granted() || !second.granted()) {
          EXPECT_EQ(both.outcome, first.granted() ? second.outcome : first.outcome);
        } else {
          EXPECT_TRUE(both.granted());
          EXPECT_EQ(both.token, token_of(a).value_or(Token{1'700'000'030'000'000}));
        }
      }
    }
  }
}

TEST(SeveralLocks, AllowsUpTo65) {
  const Scene free;
  const Scene busy(Mode::kExclusive, {HoldOf(kBob, kToken)});
  std::vector<const Scene*> scenes(1 + kMaxAlso, &free);
  EXPECT_EQ(OutcomeOfAll(scenes, Ask(kAnn)), Outcome::kGranted);
  scenes.back() = &busy;
  EXPECT_EQ(OutcomeOfAll(scenes, Ask(kAnn)), Outcome::kHeldByOther);
}

// --- Tokens -----------------------------------------------------------------------------------

TEST(NewHold, TokenIsHigherOfTokenClockAndWallClock) {
  const TokenClock ahead = ClockAt(Later(kToken, 1'000'000'000));
  for (const Mode mode : kModes) {
    EXPECT_EQ(Acquire(Scene().state(), Ask(kAnn, mode), kSince, {}, ahead).token,
              Later(kToken, 1'000'000'001));
    EXPECT_EQ(Acquire(Scene().state(), Ask(kAnn, mode), kSince, {}, TokenClock()).token,
              Token{1'700'000'000'000'000});
  }
}

TEST(CurrentToken, IsHighestTokenOfLiveHolds) {
  // The hold with the highest token has ended, the next one lingers.
  const Scene scene(Mode::kShared, {HoldOf(kAnn, Token{40}, kEnd), HoldOf(kBob, Token{30}, kEnd),
                                    HoldOf(kCat, Token{50}, kSince, kEnd - kSince + kLease),
                                    HoldOf(kDan, Token{60}, kSince)});
  const KeyState state = scene.state();
  EXPECT_EQ(CurrentToken(state, kSince), Token{60});
  EXPECT_EQ(CurrentToken(state, kSince + kTick), Token{40});
  EXPECT_EQ(CurrentToken(state, kEnd), Token{40});
  EXPECT_EQ(CurrentToken(state, kEnd + kTick), std::nullopt);
  for (const uint64_t token : {30U, 40U}) EXPECT_TRUE(IsCurrent(state, Token{token}, kEnd));
  for (const uint64_t token : {29U, 35U, 50U, 60U}) {
    EXPECT_FALSE(IsCurrent(state, Token{token}, kEnd));
  }
}

// What a call in line is answered.
TEST(CurrentToken, IsNeverZero) {
  for (const Mode mode : kModes) {
    const Scene scene(mode, {HoldOf(kAnn, kMinToken)});
    EXPECT_TRUE(IsCurrent(scene.state(), kMinToken, kEnd));
    EXPECT_FALSE(IsCurrent(scene.state(), Token{0}, kEnd));
  }
  EXPECT_FALSE(IsCurrent(Scene().state(), Token{0}, kEnd));
  EXPECT_FALSE(IsCurrent(Scene("ann").state(), Token{0}, kEnd));
}

TEST(CurrentToken, IsNoneForPlainLockAndFreeKey) {
  for (const std::string_view value : {"ann"sv, "1700000000000042"sv}) {
    EXPECT_EQ(CurrentToken(Scene(value).state(), kSince), std::nullopt);
    EXPECT_FALSE(IsCurrent(Scene(value).state(), kToken, kSince));
  }
  EXPECT_EQ(CurrentToken(Scene().state(), kSince), std::nullopt);
  EXPECT_FALSE(IsCurrent(Scene().state(), kToken, kSince));
}

// --- Blocking holders -------------------------------------------------------------------------

TEST(Holders, CountUntilTheirLingerEnds) {
  const Scene scene(Mode::kLimit, {HoldOf(kAnn, Token{40}, kEnd), HoldOf(kBob, Token{30}, kEnd),
                                   HoldOf(kCat, Token{35}, kSince, kEnd - kSince + kLease),
                                   HoldOf(kDan, Token{60}, kSince)});
  EXPECT_EQ(CountHolders(scene.state(), kSince), 4);
  EXPECT_EQ(NextEnd(scene.state(), kSince), kSince);
  EXPECT_EQ(CountHolders(scene.state(), kEnd), 3);
  EXPECT_EQ(NextEnd(scene.state(), kEnd), kEnd);
  EXPECT_EQ(CountHolders(scene.state(), kEnd + kTick), 1);
  EXPECT_EQ(NextEnd(scene.state(), kEnd + kTick), kEnd + kLease);
  EXPECT_EQ(CountHolders(Scene().state(), kEnd), 0);
  EXPECT_EQ(NextEnd(Scene().state(), kEnd), std::nullopt);
}

TEST(ModeOf, IsModeOfHolds) {
  EXPECT_EQ(ModeOf(Scene().state()), Mode::kExclusive);
  for (const Mode mode : kModes) EXPECT_EQ(ModeOf(Scene(mode, {kAnnsHold}).state()), mode);
}

// --- Overdue holds ----------------------------------------------------------------------------

class OverdueTest : public testing::Test {
 protected:
  // The holds of Ann and Dan are overdue, Dan's first; Bob's is live; Cat's lingers.
  OverdueTest()
      : scene_(Mode::kShared,
               {HoldOf(kAnn, Token{1}, kSince + kTick), HoldOf(kBob, Token{2}, kEnd),
                HoldOf(kCat, Token{3}, kSince, kEnd - kSince), HoldOf(kDan, Token{4}, kSince)}) {}

  Owners Before(const Change& next) const {
    return RemovedBy(OverdueBefore(scene_.state().lock, next, kEnd), scene_);
  }

  Scene scene_;
};

TEST_F(OverdueTest, HoldsThatBlockNobodyAreOverdue) {
  const auto at = [&](Instant now) { return RemovedBy(Overdue(scene_.state().lock, now), scene_); };
  EXPECT_EQ(at(kSince), Owners{});
  EXPECT_EQ(at(kSince + kTick), Owners{kDan});
  EXPECT_EQ(at(kEnd), (Owners{kDan, kAnn}));
  EXPECT_EQ(at(kEnd + kTick), (Owners{kDan, kAnn, kBob, kCat}));
  EXPECT_FALSE(Overdue(Scene().state().lock, kEnd).has_value());
  EXPECT_FALSE(Overdue(Scene(kAnn.bytes, kSince).state().lock, kEnd).has_value());
}

TEST_F(OverdueTest, AreRemovedBeforeChangeThatKeepsThem) {
  for (const Owner owner : {kBob, kCat, kZoe}) {
    EXPECT_EQ(Before(HoldSet{Mode::kShared, HoldOf(owner, kToken)}), (Owners{kDan, kAnn}));
    EXPECT_EQ(Before(HoldReleased{owner}), (Owners{kDan, kAnn}));
    EXPECT_EQ(Before(HoldEnded{owner}), (Owners{kDan, kAnn}));
    EXPECT_EQ(Before(SessionsEnded{kEnd, std::span(&owner, 1)}), (Owners{kDan, kAnn}));
  }
}

// The owner's own ended hold is removed with those of others. If it is the only one, no fact is
// needed.
TEST_F(OverdueTest, OwnOverdueHoldIsReplacedWithoutFact) {
  EXPECT_EQ(Before(HoldSet{Mode::kShared, HoldOf(kAnn, kToken)}), (Owners{kDan, kAnn}));
  scene_.ApplyFact(HoldEnded{kDan});
  EXPECT_EQ(Before(HoldSet{Mode::kShared, HoldOf(kAnn, kToken)}), Owners{});
  EXPECT_EQ(Before(HoldSet{Mode::kShared, HoldOf(kBob, kToken)}), Owners{kAnn});
}

// As when the TTL of a key is reverted: the fact refers to the lock's own bytes.
TEST_F(OverdueTest, AreKeptByFactThatChangesNothing) {
  const HoldSet last{Mode::kShared, scene_.lock()->last(Lock::Order::kByBlocksUntil)};
  EXPECT_FALSE(OverdueBefore(scene_.state().lock, last, kEnd + kLease).has_value());
}

TEST_F(OverdueTest, NeedNoRemovalBeforeChangeThatReplacesAll) {
  EXPECT_EQ(Before(HoldSet{Mode::kExclusive, HoldOf(kBob, kToken)}), Owners{});
  EXPECT_EQ(Before(HoldSet{Mode::kLimit, HoldOf(kZoe, kToken)}), Owners{});
  EXPECT_EQ(Before(HoldsExpired{kEnd}), Owners{});
  const auto none_before = [](const Scene& scene, const Change& next) {
    return !OverdueBefore(scene.state().lock, next, kEnd).has_value();
  };
  const Scene over(Mode::kExclusive, {HoldOf(kAnn, kToken, kSince)});
  EXPECT_TRUE(none_before(over, HoldSet{Mode::kExclusive, HoldOf(kBob, kToken)}));
  const Scene plain(kAnn.bytes);
  EXPECT_TRUE(none_before(plain, PlainFreed{}));
  EXPECT_TRUE(none_before(plain, PlainExtended{kEnd}));
  EXPECT_TRUE(none_before(Scene(), HoldSet{Mode::kShared, kAnnsHold}));
}

// As the server does it: after the overdue holds are removed and the change is applied, nothing
// overdue is left, and every other blocking holder is still there.
TEST(OverdueBefore, LeavesNothingOverdue) {
  constexpr uint64_t kSeed = 4711;
  constexpr int kRounds = 20'000;
  const std::vector<std::string> names = {"a", "b", "c", "d", "e", "f"};
  std::mt19937_64 random(kSeed);
  const auto below = [&](uint64_t bound) { return random() % bound; };
  int removals = 0;
  for (int round = 0; round < kRounds; ++round) {
    SCOPED_TRACE(testing::Message() << "seed " << kSeed << ", round " << round);
    const Mode mode = kModes[below(3)];
    const auto any_hold = [&] {
      return HoldOf(Owner{names.at(below(names.size()))}, Token{1 + below(9)},
                    kSince + Millis{below(10)}, Millis{below(3) == 0 ? below(5) : 0});
    };
    std::vector<Hold> holds;
    for (uint64_t i = 0, size = 1 + below(6); i < size; ++i) holds.push_back(any_hold());
    Scene scene(mode, holds);
    const Instant now = kSince + Millis{below(14)};
    std::vector<std::string> holders_before;  // copies, because the lock may be freed
    for (const Hold& hold : scene.lock()->holds(Lock::Order::kByToken)) {
      if (hold.BlocksAt(now)) holders_before.emplace_back(hold.owner.bytes);
    }

    const AcquireRequest request{.owner = Owner{names.at(below(names.size()))},
                                 .lease = kLease,
                                 .mode = kModes[below(3)],
                                 .limit = static_cast<uint32_t>(1 + below(6))};
    std::optional<Change> next;
    if (below(2) == 0) {
      next = Decide(scene.state(), ReleaseRequest{request.owner}, now).change;
    } else if (const Admission a = Acquire(scene.state(), request, now); a.granted()) {
      next = HoldSetBy(scene.state(), request, a.token, now);
    }
    if (!next.has_value()) continue;
    if (const auto overdue = OverdueBefore(scene.state().lock, *next, now); overdue.has_value()) {
      scene.ApplyFact(*overdue);
      // A new hold does not need the others; every other change finds its own hold.
      ASSERT_TRUE(scene.lock() != nullptr || std::holds_alternative<HoldSet>(*next));
      ++removals;
    }
    std::visit(
        [&](const auto& change) {
          using Fact = std::decay_t<decltype(change)>;
          if constexpr (std::is_same_v<Fact, HoldSet> || std::is_same_v<Fact, HoldReleased> ||
                        std::is_same_v<Fact, HoldEnded>) {
            scene.ApplyFact(change);
          }
        },
        *next);
    ASSERT_FALSE(Overdue(scene.state().lock, now).has_value());
    for (const std::string& owner : holders_before) {
      if (owner == request.owner.bytes) continue;
      ASSERT_TRUE(scene.lock() != nullptr && scene.lock()->Find(Owner{owner}).has_value());
    }
  }
  EXPECT_GT(removals, 1'000);
}

// --- Owners -----------------------------------------------------------------------------------

// Owners that a careless comparison would consider equal.
TEST(Owner, IsComparedByteByByte) {
  const std::vector<std::string_view> owners = {"a"sv,    "A"sv,  "aa"sv,  "a\0"sv, "\0a"sv, "\0"sv,
                                                "\0\0"sv, "a "sv, "a\n"sv, "b"sv,   "\xe1"sv};
  for (const std::string_view holder : owners) {
    const Scene held(Mode::kExclusive, {HoldOf(Owner{holder}, kToken)});
    const Scene plain(holder);
    for (const std::string_view requester : owners) {
      const ReleaseRequest request{Owner{requester}};
      const Outcome expected = requester == holder ? Outcome::kReleased : Outcome::kHeldByOther;
      EXPECT_EQ(Decide(held.state(), request, kSince).outcome, expected);
      EXPECT_EQ(Decide(plain.state(), request, kSince).outcome, expected);
    }
  }
}

// --- Scenarios --------------------------------------------------------------------------------

// A key and its token clock, driven as a server drives them.
class LockScenario : public testing::Test {
 protected:
  Outcome AcquireAt(int64_t millis, const AcquireRequest& request, const WaitersAhead& ahead = {}) {
    const Instant now = kSince + Millis{millis};
    const Admission admission = Acquire(scene_.state(), request, now, ahead, clock_);
    if (admission.granted()) {
      Execute(HoldSetBy(scene_.state(), request, admission.token, now), now);
      clock_.Observe(admission.token);
    }
    return admission.outcome;
  }

  Outcome ReleaseAt(int64_t millis, Owner owner) {
    const Instant now = kSince + Millis{millis};
    const Decision decision = Decide(scene_.state(), ReleaseRequest{owner}, now);
    if (const auto released = ChangeOf<HoldReleased>(decision)) Execute(*released, now);
    if (const auto ended = ChangeOf<HoldEnded>(decision)) Execute(*ended, now);
    return decision.outcome;
  }

  template <typename Fact>
  void Execute(const Fact& fact, Instant now) {
    const auto overdue = OverdueBefore(scene_.state().lock, fact, now);
    if (overdue.has_value()) scene_.ApplyFact(*overdue);
    scene_.ApplyFact(fact);
  }

  Token token_of(Owner owner) const { return scene_.lock()->Find(owner).value().token; }

  Scene scene_;
  TokenClock clock_;
};

TEST_F(LockScenario, ExpiredLockIsTakenByAnotherOwner) {
  AcquireRequest anns = Ask(kAnn);
  AcquireRequest bobs = Ask(kBob);
  anns.lease = bobs.lease = Millis{100};
  EXPECT_EQ(AcquireAt(0, anns), Outcome::kGranted);
  const Token first = token_of(kAnn);
  EXPECT_EQ(AcquireAt(50, anns), Outcome::kHeldAlready);
  EXPECT_EQ(token_of(kAnn), first);
  EXPECT_EQ(AcquireAt(150, bobs), Outcome::kHeldByOther);
  EXPECT_EQ(AcquireAt(151, bobs), Outcome::kGranted);
  const Token second = token_of(kBob);
  EXPECT_GT(second, first);
  EXPECT_EQ(ReleaseAt(160, kAnn), Outcome::kHeldByOther);
  const Instant later = kSince + Millis{160};
  EXPECT_EQ(Decide(scene_.state(), TouchRequest{kAnn, kTick}, later).outcome,
            Outcome::kHeldByOther);
  EXPECT_FALSE(IsCurrent(scene_.state(), first, later));
  EXPECT_TRUE(IsCurrent(scene_.state(), second, later));
  EXPECT_EQ(ReleaseAt(160, kBob), Outcome::kReleased);
  EXPECT_EQ(ReleaseAt(160, kBob), Outcome::kFree);
  EXPECT_EQ(scene_.lock(), nullptr);
}

TEST_F(LockScenario, ReadersUpgradeAndDowngrade) {
  EXPECT_EQ(AcquireAt(0, Ask(kAnn, Mode::kShared)), Outcome::kGranted);
  EXPECT_EQ(AcquireAt(1, Ask(kBob, Mode::kShared)), Outcome::kGranted);
  EXPECT_NE(token_of(kAnn), token_of(kBob));
  EXPECT_EQ(AcquireAt(2, Ask(kAnn)), Outcome::kHeldByOther);
  EXPECT_EQ(ReleaseAt(3, kBob), Outcome::kReleased);
  const Token shared = token_of(kAnn);
  EXPECT_EQ(AcquireAt(4, Ask(kAnn)), Outcome::kUpgraded);
  EXPECT_GT(token_of(kAnn), shared);
  EXPECT_FALSE(IsCurrent(scene_.state(), shared, kSince + Millis{4}));
  EXPECT_EQ(AcquireAt(5, Ask(kBob, Mode::kShared)), Outcome::kHeldByOther);
  const Token exclusive = token_of(kAnn);
  EXPECT_EQ(AcquireAt(6, Ask(kAnn, Mode::kShared)), Outcome::kDowngraded);
  EXPECT_EQ(token_of(kAnn), exclusive);
  EXPECT_EQ(AcquireAt(7, Ask(kBob, Mode::kShared)), Outcome::kGranted);
  EXPECT_EQ(scene_.lock()->size(), 2);
}

TEST_F(LockScenario, ExpiredPermitIsReused) {
  AcquireRequest brief = Ask(kAnn, Mode::kLimit, 2);
  brief.lease = Millis{10};
  EXPECT_EQ(AcquireAt(0, brief), Outcome::kGranted);
  EXPECT_EQ(AcquireAt(0, Ask(kBob, Mode::kLimit, 2)), Outcome::kGranted);
  EXPECT_EQ(AcquireAt(10, Ask(kCat, Mode::kLimit, 2)), Outcome::kHeldByOther);
  // Ann's permit expired: Cat takes it, and Ann's hold is removed by a fact.
  EXPECT_EQ(AcquireAt(11, Ask(kCat, Mode::kLimit, 2)), Outcome::kGranted);
  EXPECT_EQ(scene_.lock()->size(), 2);
  EXPECT_EQ(scene_.lock()->Find(kAnn), std::nullopt);
  EXPECT_EQ(ReleaseAt(12, kAnn), Outcome::kHeldByOther);
  EXPECT_EQ(AcquireAt(12, brief), Outcome::kHeldByOther);
  EXPECT_EQ(ReleaseAt(13, kBob), Outcome::kReleased);
  EXPECT_EQ(AcquireAt(13, brief), Outcome::kGranted);
}

TEST_F(LockScenario, OwnerReturnsDuringItsLinger) {
  AcquireRequest anns = Reentrant(Ask(kAnn));
  anns.lease = Millis{10};
  anns.linger = Millis{5};
  EXPECT_EQ(AcquireAt(0, anns), Outcome::kGranted);
  EXPECT_EQ(AcquireAt(0, anns), Outcome::kHeldAlready);
  const Token first = token_of(kAnn);
  EXPECT_EQ(AcquireAt(15, Ask(kBob)), Outcome::kHeldByOther);
  // After its crash Ann does not wait for its own linger; the count starts again at 1.
  EXPECT_EQ(AcquireAt(15, anns), Outcome::kGranted);
  EXPECT_GT(token_of(kAnn), first);
  EXPECT_EQ(ReleaseAt(16, kAnn), Outcome::kReleased);
  EXPECT_EQ(AcquireAt(16, Ask(kBob)), Outcome::kGranted);
}

// --- FLOOR ------------------------------------------------------------------------------------

// A request for one lock at `now`, with a floor.
Admission AskWithFloor(const Scene& scene, AcquireRequest request, Token floor, FineInstant now,
                       const TokenClock& clock) {
  request.floor = floor;
  const LockView view = scene.view({});
  return Decide(std::span(&view, 1), request, now, clock);
}

constexpr FineInstant kFloorNow{Micros{kToken.value}};

TEST(Floor, NewTokenIsAtLeastFloor) {
  const Scene free;
  TokenClock clock;
  clock.SetMargin(Millis{2});
  const Token own = *clock.Next(kFloorNow);
  for (const uint64_t ahead : {0U, 1U, 1000U}) {
    const Token floor{own.value + ahead};
    EXPECT_EQ(AskWithFloor(free, Ask(kAnn), floor, kFloorNow, clock).token, floor);
  }
  EXPECT_EQ(AskWithFloor(free, Ask(kAnn), Token{1}, kFloorNow, clock).token, own);
}

TEST(Floor, HoldersTokenIsRaisedToFloor) {
  const Instant now = ToInstant(kFloorNow);
  for (const Mode mode : kModes) {
    const Scene scene(mode, {HoldOf(kAnn, kToken, now)});
    TokenClock clock = ClockAt(kToken);
    clock.SetMargin(Millis{2});
    const Token above{kToken.value + 5};
    const auto ask = [&](Token floor) {
      return AskWithFloor(scene, Ask(kAnn, mode), floor, kFloorNow, clock);
    };
    EXPECT_EQ(ask(Token{1}).token, kToken);
    EXPECT_EQ(ask(kToken).token, kToken);
    const Admission raised = ask(above);
    EXPECT_EQ(raised.outcome, Outcome::kHeldAlready);
    EXPECT_EQ(raised.token, above);
    const HoldSet held = HoldSetBy(scene.state(), Ask(kAnn, mode), raised.token, now);
    EXPECT_EQ(held.hold.token, above);
    EXPECT_EQ(held.hold.since, HoldOf(kAnn, kToken, now).since) << "it is the same hold";
  }
}

TEST(Floor, OtherOwnersTokensAreNotRaised) {
  const Scene scene(Mode::kExclusive, {HoldOf(kBob, kToken, ToInstant(kFloorNow))});
  EXPECT_EQ(AskWithFloor(scene, Ask(kAnn), Token{5}, kFloorNow, ClockAt(kToken)).outcome,
            Outcome::kHeldByOther);
}

TEST(Floor, AboveClockBoundIsRefused) {
  const Scene free;
  const auto now = static_cast<uint64_t>(kFloorNow.time_since_epoch().count());
  TokenClock clock;
  clock.SetMargin(Millis{2});
  const auto ask = [&](uint64_t floor) {
    return AskWithFloor(free, Ask(kAnn), Token{floor}, kFloorNow, clock);
  };
  EXPECT_EQ(ask(now + 1000).token, Token{now + 1000});
  EXPECT_EQ(ask(now + 1001).outcome, Outcome::kFloorTooHigh);
  EXPECT_EQ(ask(kMaxToken.value).outcome, Outcome::kFloorTooHigh);
  EXPECT_FALSE(ask(kMaxToken.value).busy()) << "waiting does not help";
  // Tokens that the clock has noted or issued are allowed, however far ahead.
  clock.NoteFloor(Token{now + 5000});
  EXPECT_EQ(ask(now + 5000).token, Token{now + 5001});
  EXPECT_EQ(ask(now + 5001).outcome, Outcome::kFloorTooHigh);
}

// --- The largest number of holders ------------------------------------------------------------

class MaxHolders : public testing::TestWithParam<Mode> {
 protected:
  static constexpr GrantRules kRules{.max_holders = 3};

  static AcquireRequest From(Owner owner) { return Ask(owner, GetParam(), /*limit=*/100); }
  static Outcome OutcomeFor(const Scene& scene, const AcquireRequest& request,
                            const WaitersAhead& ahead = {}) {
    const LockView view = scene.view(ahead);
    const Outcome outcome =
        Decide(std::span(&view, 1), request, FineInstant{kSince}, ClockAt(kToken), kRules).outcome;
    const bool busy = outcome == Outcome::kHeldByOther || outcome == Outcome::kOthersWait;
    EXPECT_EQ(IsBlocked(view, request, kSince, kRules), busy);
    return outcome;
  }

  const std::vector<Hold> three_ = {kAnnsHold, HoldOf(kBob, Later(kToken, 1)),
                                    HoldOf(kCat, Later(kToken, 2), kSince - kTick, kLinger)};
};

INSTANTIATE_TEST_SUITE_P(Modes, MaxHolders, testing::Values(Mode::kShared, Mode::kLimit));

TEST_P(MaxHolders, NewcomerIsBlockedAtMaximum) {
  const Scene two(GetParam(), {three_[0], three_[1]});
  EXPECT_EQ(OutcomeFor(two, From(kZoe)), Outcome::kGranted);
  const Scene three(GetParam(), three_);
  EXPECT_EQ(OutcomeFor(three, From(kZoe)), Outcome::kHeldByOther);
  const Scene over(GetParam(), {three_[0], three_[1], HoldOf(kCat, Token{1}, kSince - kTick)});
  EXPECT_EQ(OutcomeFor(over, From(kZoe)), Outcome::kGranted) << "an ended hold does not count";
}

TEST_P(MaxHolders, CurrentHolderIsNotBlockedAtMaximum) {
  std::vector<Hold> four = three_;
  four.push_back(HoldOf(kDan, Later(kToken, 3)));
  const Scene full(GetParam(), four);  // as loaded from a file
  EXPECT_EQ(OutcomeFor(full, From(kAnn)), Outcome::kHeldAlready);
  EXPECT_TRUE(Decide(full.state(), TouchRequest{kAnn, kLease}, kSince).change.has_value());
  EXPECT_EQ(OutcomeFor(full, From(kCat)), Outcome::kHeldByOther) << "its hold only lingers";
  const Scene three(GetParam(), three_);
  EXPECT_EQ(OutcomeFor(three, From(kCat)), Outcome::kGranted) << "its own hold is replaced";
}

// One more holder fits. A permit is reserved for the waiter ahead; readers pass readers ahead,
// which wait for something else.
TEST_P(MaxHolders, PermitIsReservedForWaiterAhead) {
  const Scene two(GetParam(), {three_[0], three_[1]});
  WaitersAhead ahead;
  ahead.Add(Ask(kBob, GetParam(), /*limit=*/100));
  EXPECT_EQ(OutcomeFor(two, From(kZoe), ahead),
            GetParam() == Mode::kLimit ? Outcome::kOthersWait : Outcome::kGranted);
  const Scene one(GetParam(), {three_[0]});
  EXPECT_EQ(OutcomeFor(one, From(kZoe), ahead), Outcome::kGranted);
}

TEST(MaxHoldersOfOne, AllowsOneHolderInAnyMode) {
  constexpr GrantRules kOne{.max_holders = 1};
  for (const Mode mode : kModes) {
    const Scene free;
    const LockView view = free.view();
    const Admission admission =
        Decide(std::span(&view, 1), Ask(kAnn, mode), FineInstant{kSince}, ClockAt(kToken), kOne);
    EXPECT_EQ(admission.outcome, Outcome::kGranted);
  }
}

// --- The grace period -------------------------------------------------------------------------

TEST(GracePeriod, GrantsNoNewHolds) {
  const Instant now = ToInstant(kFloorNow);
  const auto ask = [&](const Scene& scene, const AcquireRequest& request) {
    const LockView view = scene.view({});
    return Decide(std::span(&view, 1), request, kFloorNow, ClockAt(kToken), {.grace = Grace::kOn});
  };
  const Scene free;
  const Scene exclusive(Mode::kExclusive, {HoldOf(kAnn, kToken, now)});
  const Scene shared(Mode::kShared, {HoldOf(kAnn, kToken, now)});
  const Scene lingers(Mode::kExclusive, {HoldOf(kAnn, kToken, now - kTick, kLinger)});
  EXPECT_EQ(ask(free, Ask(kAnn)).outcome, Outcome::kGrace);
  EXPECT_TRUE(ask(free, Ask(kAnn)).busy()) << "it can be waited for";
  EXPECT_EQ(ask(shared, Ask(kBob, Mode::kShared)).outcome, Outcome::kGrace);
  EXPECT_EQ(ask(shared, Ask(kAnn)).outcome, Outcome::kGrace) << "no upgrade";
  EXPECT_EQ(ask(lingers, Ask(kAnn)).outcome, Outcome::kGrace);
  EXPECT_EQ(ask(exclusive, Ask(kBob)).outcome, Outcome::kHeldByOther);
  // Current holders keep their locks.
  EXPECT_EQ(ask(exclusive, Ask(kAnn)).outcome, Outcome::kHeldAlready);
  EXPECT_EQ(ask(exclusive, Ask(kAnn)).token, kToken);
  EXPECT_EQ(ask(exclusive, Ask(kAnn, Mode::kShared)).outcome, Outcome::kDowngraded);
  EXPECT_EQ(ask(shared, Ask(kAnn, Mode::kShared)).outcome, Outcome::kHeldAlready);
}

}  // namespace
}  // namespace turnstile
