#include "core/decide.h"

#include <algorithm>

namespace turnstile {

void WaitersAhead::Add(const AcquireRequest& request) {
  ++size;
  all_shared = all_shared && request.mode == Mode::kShared;
  all_limit = all_limit && request.mode == Mode::kLimit;
  if (request.mode != Mode::kLimit) return;
  least_limit = std::min(least_limit, request.limit);
  weight += request.weight;
}

namespace {

// The plain lock in the key, if it is still live.
const PlainLock* LivePlainLock(const KeyState& state, Instant now) {
  return state.plain.has_value() && state.plain->LiveAt(now) ? &*state.plain : nullptr;
}

bool IsOwnPlain(const KeyState& state, Owner owner, Instant now) {
  const PlainLock* plain = LivePlainLock(state, now);
  return plain != nullptr && plain->value == owner.bytes;
}

// The owner's hold, ended or not.
std::optional<Hold> OwnHold(const KeyState& state, Owner owner) {
  return state.lock == nullptr ? std::nullopt : state.lock->Find(owner);
}

std::optional<Hold> OwnLiveHold(const KeyState& state, Owner owner, Instant now) {
  const std::optional<Hold> own = OwnHold(state, owner);
  return own.has_value() && own->LiveAt(now) ? own : std::nullopt;
}

// The number of other holders that block the owner.
size_t CountBlockingOthers(const KeyState& state, Owner owner, Instant now) {
  if (const PlainLock* plain = LivePlainLock(state, now); plain != nullptr) {
    return plain->value == owner.bytes ? 0 : 1;
  }
  if (state.lock == nullptr) return 0;
  const std::optional<Hold> own = state.lock->Find(owner);
  return state.lock->CountBlocking(now) - (own.has_value() && own->BlocksAt(now) ? 1 : 0);
}

// The sum of their weights. Requires a lock with a limit.
uint64_t WeightOfOthers(const Lock& lock, Owner owner, Instant now) {
  const std::optional<Hold> own = lock.Find(owner);
  return lock.WeightBlocking(now) - (own.has_value() && own->BlocksAt(now) ? own->weight : 0);
}

// The weight of the owner's hold, ended or not; zero if there is none.
uint64_t OwnWeight(const KeyState& state, Owner owner) {
  const std::optional<Hold> own = OwnHold(state, owner);
  return own.has_value() ? own->weight : 0;
}

// Whether a request with a limit fits in with holders of its kind, of this weight together, and
// with the waiters ahead.
bool FitsLimit(const AcquireRequest& request, uint64_t held, const WaitersAhead& ahead) {
  return held + ahead.weight + request.weight <= std::min(request.limit, ahead.least_limit);
}

// What blocks the request, if anything.
std::optional<Outcome> FindObstacle(const LockView& view, const AcquireRequest& request,
                                    Instant now, const GrantRules& rules) {
  const size_t others = CountBlockingOthers(view.state, request.owner, now);
  const bool same_kind =
      ModeOf(view.state) == request.mode && LivePlainLock(view.state, now) == nullptr;
  const bool is_shared = request.mode == Mode::kShared;
  const bool is_limit = request.mode == Mode::kLimit;
  const uint64_t held = others > 0 && same_kind && is_limit
                            ? WeightOfOthers(*view.state.lock, request.owner, now)
                            : 0;
  if (others > 0) {
    const bool fits_in = is_shared || (is_limit && FitsLimit(request, held, {}));
    if (!same_kind || !fits_in || others >= rules.max_holders) return Outcome::kHeldByOther;
  }

  const WaitersAhead& ahead = view.ahead;
  if (ahead.size == 0) return std::nullopt;
  // If the caller's own hold, of another kind or of a larger weight, blocks the waiters ahead, it
  // must not overtake them.
  const bool keeps_them = CountHolders(view.state, now) > others &&
                          (!same_kind || OwnWeight(view.state, request.owner) > request.weight);
  const bool fits_ahead = (is_shared && ahead.all_shared) ||
                          (is_limit && ahead.all_limit && FitsLimit(request, held, ahead) &&
                           others + ahead.size < rules.max_holders);
  if (keeps_them || !fits_ahead) return Outcome::kOthersWait;
  return std::nullopt;
}

// The decision for one lock alone. A grant does not have its token yet.
Admission DecideOne(const LockView& view, const AcquireRequest& request, Instant now,
                    const GrantRules& rules) {
  const KeyState& state = view.state;
  if (state.lock == nullptr && !state.plain.has_value() && view.ahead.size == 0) {
    return {Outcome::kGranted, {}};
  }
  // The owner of a plain lock takes it over whoever waits: it held the lock before they arrived.
  if (IsOwnPlain(state, request.owner, now)) return {Outcome::kGranted, {}};
  const std::optional<Hold> own = OwnLiveHold(state, request.owner, now);
  if (!own.has_value()) {
    return {FindObstacle(view, request, now, rules).value_or(Outcome::kGranted), {}};
  }
  if (request.reentrant && own->count == std::numeric_limits<uint32_t>::max()) {
    return {Outcome::kCountedOut, {}};
  }
  const Mode mode = state.lock->mode();
  if (mode == request.mode) {
    const bool same_weight = own->weight == request.weight;
    return {same_weight ? Outcome::kHeldAlready : Outcome::kOtherWeight, own->token};
  }
  if (mode == Mode::kExclusive && request.mode == Mode::kShared) {
    return {Outcome::kDowngraded, own->token};
  }
  if (mode == Mode::kShared && request.mode == Mode::kExclusive) {
    return {FindObstacle(view, request, now, rules).value_or(Outcome::kUpgraded), {}};
  }
  return {Outcome::kOtherMode, {}};
}

// The decision for several locks: the one for all of them, or the reason why there is none.
Admission DecideAll(std::span<const LockView> views, const AcquireRequest& request, Instant now,
                    const GrantRules& rules) {
  size_t holds = 0;
  size_t plain = 0;
  std::optional<Token> token;
  bool apart = false;
  for (const LockView& view : views) {
    if (IsOwnPlain(view.state, request.owner, now)) {
      ++plain;
    } else if (const auto own = OwnLiveHold(view.state, request.owner, now); own.has_value()) {
      ++holds;
      apart = apart || own->token != token.value_or(own->token);
      token = own->token;
    }
  }
  if (holds + plain > 0 && holds + plain < views.size()) return {Outcome::kHoldsSome, {}};
  if (apart || (holds > 0 && plain > 0)) return {Outcome::kHoldsApart, {}};

  Admission all{Outcome::kGranted, {}};
  for (const LockView& view : views) {
    if (holds > 0 && IsUpgrade(view.state, request, now)) return {Outcome::kUpgradesSeveral, {}};
    const Admission one = DecideOne(view, request, now, rules);
    if (!one.granted()) return one;
    all = one;
  }
  return all;
}

}  // namespace

Admission Decide(std::span<const LockView> views, const AcquireRequest& request, FineInstant now,
                 const TokenClock& clock, const GrantRules& rules) {
  const Token floor = request.floor.value_or(kMinToken);
  if (request.floor.has_value() && floor > clock.HighestFloor(now)) {
    return {Outcome::kFloorTooHigh, {}};
  }
  const Instant moment = ToInstant(now);
  Admission admission = views.size() == 1 ? DecideOne(views.front(), request, moment, rules)
                                          : DecideAll(views, request, moment, rules);
  if (admission.is_new()) {
    if (rules.grace == Grace::kOn) return {Outcome::kGrace, {}};
    const std::optional<Token> token = clock.Next(now);
    if (!token.has_value()) return {Outcome::kTokensUsedUp, {}};
    admission.token = *token;
  }
  if (admission.granted()) admission.token = std::max(admission.token, floor);
  return admission;
}

bool IsSafeGrant(std::span<const LockView> views, const AcquireRequest& request,
                 const Admission& admission, Instant now) {
  return std::all_of(views.begin(), views.end(), [&](const LockView& view) {
    const size_t others = CountBlockingOthers(view.state, request.owner, now);
    if (others == 0) return true;
    if (!Joins(view.state.lock, request.mode)) return false;
    return request.mode != Mode::kLimit || !admission.is_new() ||
           FitsLimit(request, WeightOfOthers(*view.state.lock, request.owner, now), {});
  });
}

namespace {

// The end of a lease of this hold that would end at `end`. A request may set a cap that has passed:
// then the lease ends now.
Instant CutToCap(const Hold& hold, Instant end, Instant now) {
  return hold.cap.has_value() ? std::max(std::min(end, *hold.cap), now) : end;
}

}  // namespace

HoldSet HoldSetBy(const KeyState& state, const AcquireRequest& request, Token token, Instant now) {
  Hold hold{.owner = request.owner,
            .token = token,
            .since = now,
            .end = now + request.lease,
            .linger = request.linger,
            .weight = request.weight,
            .tag = request.tag};
  if (const auto own = OwnLiveHold(state, request.owner, now); own.has_value()) {
    hold.since = own->since;
    hold.count = own->count + (request.reentrant ? 1 : 0);
    hold.cap = own->cap;
    if (hold.tag.empty()) hold.tag = own->tag;
  }
  if (request.max_hold > Millis{0}) {
    const Instant cap = hold.since + request.max_hold;
    hold.cap = std::min(hold.cap.value_or(cap), cap);
  }
  hold.end = CutToCap(hold, hold.end, now);
  return HoldSet{request.mode, hold};
}

bool IsBlocked(const LockView& view, const AcquireRequest& request, Instant now,
               const GrantRules& rules) {
  return DecideOne(view, request, now, rules).busy();
}

std::optional<Hold> HoldToUpgrade(const KeyState& state, const AcquireRequest& request,
                                  Instant now) {
  if (request.mode != Mode::kExclusive || ModeOf(state) != Mode::kShared) return std::nullopt;
  return OwnLiveHold(state, request.owner, now);
}

bool IsUpgrade(const KeyState& state, const AcquireRequest& request, Instant now) {
  return HoldToUpgrade(state, request, now).has_value();
}

namespace {

// The outcome for an owner that has nothing to release or renew.
Outcome Missing(const KeyState& state, Owner owner, Instant now) {
  if (CountBlockingOthers(state, owner, now) > 0) return Outcome::kHeldByOther;
  return OwnHold(state, owner).has_value() ? Outcome::kLeaseEnded : Outcome::kFree;
}

}  // namespace

Decision Decide(const KeyState& state, const ReleaseRequest& request, Instant now) {
  if (IsOwnPlain(state, request.owner, now)) return {Outcome::kReleased, PlainFreed{}};
  const std::optional<Hold> own = OwnHold(state, request.owner);
  if (own.has_value() && own->LiveAt(now)) return {Outcome::kReleased, HoldReleased{request.owner}};
  if (own.has_value() && own->BlocksAt(now)) return {Outcome::kLingerCut, HoldEnded{request.owner}};
  return {Missing(state, request.owner, now), std::nullopt};
}

Decision Decide(const KeyState& state, const TouchRequest& request, Instant now) {
  const Instant end = now + request.lease;
  if (IsOwnPlain(state, request.owner, now)) return {Outcome::kTouched, PlainExtended{end}};
  std::optional<Hold> own = OwnLiveHold(state, request.owner, now);
  if (!own.has_value()) return {Missing(state, request.owner, now), std::nullopt};
  own->owner = request.owner;
  own->end = CutToCap(*own, end, now);
  return {Outcome::kTouched, HoldSet{state.lock->mode(), *own}};
}

std::vector<Owner> DecideSessionEnd(const KeyState& state, std::span<const Owner> owners,
                                    Instant now) {
  std::vector<Owner> end;
  for (const Owner owner : owners) {
    if (OwnLiveHold(state, owner, now).has_value()) end.push_back(owner);
  }
  return end;
}

Decision DecideTakeBack(const KeyState& state, Owner owner, Token token,
                        const std::optional<Hold>& upgraded, Instant now) {
  const std::optional<Hold> own = OwnLiveHold(state, owner, now);
  if (!own.has_value() || own->token != token) {
    return {Missing(state, owner, now), std::nullopt};
  }
  if (upgraded.has_value() && upgraded->BlocksAt(now)) {
    return {Outcome::kReleased, HoldSet{Mode::kShared, *upgraded}};
  }
  return {Outcome::kReleased, HoldEnded{owner, Loss::kUndelivered}};
}

std::optional<HoldsExpired> Overdue(const Lock* lock, Instant now) {
  if (lock == nullptr) return std::nullopt;
  const bool any = !lock->first(Lock::Order::kByBlocksUntil).BlocksAt(now);
  return any ? std::optional(HoldsExpired{now}) : std::nullopt;
}

std::optional<HoldsExpired> OverdueBefore(const Lock* lock, const HoldSet& next, Instant now) {
  if (!Joins(lock, next.mode)) return std::nullopt;  // it replaces them
  // It states what the lock holds already, and its owner may be a view into the lock.
  if (!next.hold.BlocksAt(now)) return std::nullopt;
  const std::optional<Hold> own = lock->Find(next.hold.owner);
  // If the owner's own hold is the only overdue one, it is simply replaced.
  const size_t own_overdue = own.has_value() && !own->BlocksAt(now) ? 1 : 0;
  const size_t overdue = lock->size() - lock->CountBlocking(now);
  return overdue > own_overdue ? std::optional(HoldsExpired{now}) : std::nullopt;
}

std::optional<HoldsExpired> OverdueBefore(const Lock* lock, const Change& next, Instant now) {
  if (const auto* held = std::get_if<HoldSet>(&next)) return OverdueBefore(lock, *held, now);
  // Any other change is about a hold that is not overdue, which usually is the only one.
  const bool alone = lock == nullptr || lock->size() == 1;
  return alone || std::holds_alternative<HoldsExpired>(next) ? std::nullopt : Overdue(lock, now);
}

std::optional<Hold> CurrentHold(const KeyState& state, Instant now) {
  if (state.lock == nullptr) return std::nullopt;
  const Lock::Holds holds = state.lock->holds(Lock::Order::kByToken);
  for (Lock::Iterator at = holds.end(); at != holds.begin();) {
    const Hold hold = *--at;
    if (hold.LiveAt(now)) return hold;
  }
  return std::nullopt;
}

std::optional<Token> CurrentToken(const KeyState& state, Instant now) {
  const std::optional<Hold> hold = CurrentHold(state, now);
  return hold.has_value() ? std::optional(hold->token) : std::nullopt;
}

bool IsCurrent(const KeyState& state, Token token, Instant now) {
  return state.lock != nullptr && state.lock->HasLive(token, now);
}

size_t CountHolders(const KeyState& state, Instant now) {
  if (state.lock != nullptr) return state.lock->CountBlocking(now);
  return LivePlainLock(state, now) == nullptr ? 0 : 1;
}

std::optional<Instant> NextEnd(const KeyState& state, Instant now) {
  if (const PlainLock* plain = LivePlainLock(state, now); plain != nullptr) {
    return plain->end;
  }
  const size_t holders = state.lock == nullptr ? 0 : state.lock->CountBlocking(now);
  if (holders == 0) return std::nullopt;
  return state.lock->at(Lock::Order::kByBlocksUntil, state.lock->size() - holders).blocks_until();
}

Occupancy OccupancyOf(const KeyState& state, Instant now) {
  if (state.lock == nullptr) return {.live = LivePlainLock(state, now) == nullptr ? 0U : 1U};
  if (!state.lock->MayLinger()) return {.live = state.lock->CountBlocking(now)};
  Occupancy occupancy;
  const Lock::Holds holds = state.lock->holds(Lock::Order::kByBlocksUntil);
  for (Lock::Iterator at = holds.end(); at != holds.begin();) {
    const Hold hold = *--at;
    if (!hold.BlocksAt(now)) break;
    if (hold.LiveAt(now)) {
      ++occupancy.live;
    } else {
      occupancy.linger_left = std::max(occupancy.linger_left, hold.blocks_until() - now);
    }
  }
  return occupancy;
}

Mode ModeOf(const KeyState& state) {
  return state.lock == nullptr ? Mode::kExclusive : state.lock->mode();
}

}  // namespace turnstile
