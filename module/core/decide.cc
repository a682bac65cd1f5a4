#include "core/decide.h"

#include <algorithm>

namespace turnstile {

void Crowd::Add(Mode mode, uint32_t limit) {
  ++size;
  all_shared = all_shared && mode == Mode::kShared;
  all_limit = all_limit && mode == Mode::kLimit;
  if (mode == Mode::kLimit) least_limit = std::min(least_limit, limit);
}

namespace {

// A plain lock that is still in force.
const PlainLock* PlainIn(const Place& place, Instant now) {
  return place.plain.has_value() && now <= place.plain->end ? &*place.plain : nullptr;
}

bool IsOwnPlain(const Place& place, Owner owner, Instant now) {
  const PlainLock* plain = PlainIn(place, now);
  return plain != nullptr && plain->value == owner.bytes;
}

// The owner's hold, ended or not.
std::optional<Hold> OwnHold(const Place& place, Owner owner) {
  return place.lock == nullptr ? std::nullopt : place.lock->Find(owner);
}

std::optional<Hold> OwnLiveHold(const Place& place, Owner owner, Instant now) {
  const std::optional<Hold> own = OwnHold(place, owner);
  return own.has_value() && own->LiveAt(now) ? own : std::nullopt;
}

// How many others keep the owner out.
size_t OthersIn(const Place& place, Owner owner, Instant now) {
  if (const PlainLock* plain = PlainIn(place, now); plain != nullptr) {
    return plain->value == owner.bytes ? 0 : 1;
  }
  if (place.lock == nullptr) return 0;
  const std::optional<Hold> own = place.lock->Find(owner);
  return place.lock->KeepingOut(now) - (own.has_value() && own->KeepsOutAt(now) ? 1 : 0);
}

// What keeps the request waiting, if anything does.
std::optional<Outcome> ObstacleIn(const Site& site, const AcquireRequest& request, Instant now,
                                  const GrantRules& rules) {
  const size_t others = OthersIn(site.place, request.owner, now);
  const bool same_kind = ModeOf(site.place) == request.mode && PlainIn(site.place, now) == nullptr;
  const bool is_shared = request.mode == Mode::kShared;
  const bool is_limit = request.mode == Mode::kLimit;
  const size_t limit =
      is_limit ? std::min<size_t>(request.limit, rules.max_holders) : rules.max_holders;
  const bool fits_in = same_kind && (is_shared || is_limit) && others < limit;
  if (others > 0 && !fits_in) return Outcome::kHeldByOther;

  const Crowd& ahead = site.ahead;
  if (ahead.size == 0) return std::nullopt;
  // If the asker's own hold, of another kind, keeps those ahead waiting, it must not pass them.
  const bool keeps_them = !same_kind && CountHolders(site.place, now) > others;
  const bool fits_ahead = (is_shared && ahead.all_shared) ||
                          (is_limit && ahead.all_limit &&
                           others + ahead.size < std::min<size_t>(limit, ahead.least_limit));
  if (keeps_them || !fits_ahead) return Outcome::kOthersWait;
  return std::nullopt;
}

// The answer of one lock alone; a grant still lacks its token.
Admission DecideOne(const Site& site, const AcquireRequest& request, Instant now,
                    const GrantRules& rules) {
  const Place& place = site.place;
  // A plain lock is taken over by its owner whoever waits: it held the lock before they came.
  if (IsOwnPlain(place, request.owner, now)) return {Outcome::kGranted, {}};
  const std::optional<Hold> own = OwnLiveHold(place, request.owner, now);
  if (!own.has_value()) {
    return {ObstacleIn(site, request, now, rules).value_or(Outcome::kGranted), {}};
  }
  if (request.reentrant && own->count == std::numeric_limits<uint32_t>::max()) {
    return {Outcome::kCountedOut, {}};
  }
  const Mode mode = place.lock->mode();
  if (mode == request.mode) return {Outcome::kHeldAlready, own->token};
  if (mode == Mode::kExclusive && request.mode == Mode::kShared) {
    return {Outcome::kDowngraded, own->token};
  }
  if (mode == Mode::kShared && request.mode == Mode::kExclusive) {
    return {ObstacleIn(site, request, now, rules).value_or(Outcome::kUpgraded), {}};
  }
  return {Outcome::kOtherMode, {}};
}

// The answer of several locks: what is true of all of them, or the reason why not.
Admission DecideAll(std::span<const Site> sites, const AcquireRequest& request, Instant now,
                    const GrantRules& rules) {
  size_t holds = 0;
  size_t plain = 0;
  std::optional<Token> token;
  bool apart = false;
  for (const Site& site : sites) {
    if (IsOwnPlain(site.place, request.owner, now)) {
      ++plain;
    } else if (const auto own = OwnLiveHold(site.place, request.owner, now); own.has_value()) {
      ++holds;
      apart = apart || own->token != token.value_or(own->token);
      token = own->token;
    }
  }
  if (holds + plain > 0 && holds + plain < sites.size()) return {Outcome::kHoldsSome, {}};
  if (apart || (holds > 0 && plain > 0)) return {Outcome::kHoldsApart, {}};

  Admission all{Outcome::kGranted, {}};
  for (const Site& site : sites) {
    if (holds > 0 && IsUpgrade(site.place, request, now)) return {Outcome::kUpgradesSeveral, {}};
    const Admission one = DecideOne(site, request, now, rules);
    if (!one.granted()) return one;
    all = one;
  }
  return all;
}

}  // namespace

Admission Decide(std::span<const Site> sites, const AcquireRequest& request, FineInstant now,
                 const TokenClock& clock, const GrantRules& rules) {
  const Token floor = request.floor.value_or(kMinToken);
  if (request.floor.has_value() && floor > clock.HighestFloor(now)) {
    return {Outcome::kFloorTooHigh, {}};
  }
  const Instant moment = ToInstant(now);
  Admission admission = sites.size() == 1 ? DecideOne(sites.front(), request, moment, rules)
                                          : DecideAll(sites, request, moment, rules);
  if (admission.is_new()) {
    if (rules.grace == Grace::kOn) return {Outcome::kGrace, {}};
    const std::optional<Token> token = clock.Next(now);
    if (!token.has_value()) return {Outcome::kTokensUsedUp, {}};
    admission.token = *token;
  }
  if (admission.granted()) admission.token = std::max(admission.token, floor);
  return admission;
}

Held HeldBy(const Place& place, const AcquireRequest& request, Token token, Instant now) {
  Hold hold{.owner = request.owner,
            .token = token,
            .since = now,
            .end = now + request.lease,
            .linger = request.linger};
  if (const auto own = OwnLiveHold(place, request.owner, now); own.has_value()) {
    if (!IsUpgrade(place, request, now)) hold.since = own->since;
    hold.count = own->count + (request.reentrant ? 1 : 0);
  }
  return Held{request.mode, hold};
}

bool IsBlocked(const Site& site, const AcquireRequest& request, Instant now,
               const GrantRules& rules) {
  return DecideOne(site, request, now, rules).busy();
}

std::optional<Hold> HoldToUpgrade(const Place& place, const AcquireRequest& request, Instant now) {
  if (request.mode != Mode::kExclusive || ModeOf(place) != Mode::kShared) return std::nullopt;
  return OwnLiveHold(place, request.owner, now);
}

bool IsUpgrade(const Place& place, const AcquireRequest& request, Instant now) {
  return HoldToUpgrade(place, request, now).has_value();
}

namespace {

// The answer to an owner that has nothing to give up or to prolong.
Outcome Missing(const Place& place, Owner owner, Instant now) {
  if (OthersIn(place, owner, now) > 0) return Outcome::kHeldByOther;
  return OwnHold(place, owner).has_value() ? Outcome::kLeaseEnded : Outcome::kFree;
}

}  // namespace

Decision Decide(const Place& place, const ReleaseRequest& request, Instant now) {
  if (IsOwnPlain(place, request.owner, now)) return {Outcome::kReleased, PlainFreed{}};
  const std::optional<Hold> own = OwnHold(place, request.owner);
  if (own.has_value() && own->LiveAt(now)) return {Outcome::kReleased, Released{request.owner}};
  if (own.has_value() && own->KeepsOutAt(now)) return {Outcome::kLingerCut, Ended{request.owner}};
  return {Missing(place, request.owner, now), std::nullopt};
}

Decision Decide(const Place& place, const TouchRequest& request, Instant now) {
  const Instant end = now + request.lease;
  if (IsOwnPlain(place, request.owner, now)) return {Outcome::kTouched, PlainExtended{end}};
  std::optional<Hold> own = OwnLiveHold(place, request.owner, now);
  if (!own.has_value()) return {Missing(place, request.owner, now), std::nullopt};
  own->owner = request.owner;
  own->end = end;
  return {Outcome::kTouched, Held{place.lock->mode(), *own}};
}

std::vector<Owner> DecideSessionEnd(const Place& place, std::span<const Owner> owners,
                                    Instant now) {
  std::vector<Owner> end;
  for (const Owner owner : owners) {
    if (OwnLiveHold(place, owner, now).has_value()) end.push_back(owner);
  }
  return end;
}

Decision DecideTakeBack(const Place& place, Owner owner, Token token,
                        const std::optional<Hold>& upgraded, Instant now) {
  const std::optional<Hold> own = OwnLiveHold(place, owner, now);
  if (!own.has_value() || own->token != token) {
    return {Missing(place, owner, now), std::nullopt};
  }
  if (upgraded.has_value() && upgraded->KeepsOutAt(now)) {
    return {Outcome::kReleased, Held{Mode::kShared, *upgraded}};
  }
  return {Outcome::kReleased, Ended{owner, Loss::kUndelivered}};
}

std::optional<Expired> Overdue(const Place& place, Instant now) {
  if (place.lock == nullptr) return std::nullopt;
  const bool any = !place.lock->first(Lock::Order::kByClosing).KeepsOutAt(now);
  return any ? std::optional(Expired{now}) : std::nullopt;
}

std::optional<Expired> OverdueBefore(const Place& place, const Held& next, Instant now) {
  if (!Joins(place.lock, next.mode)) return std::nullopt;  // it takes their place
  // It says what the lock holds already, and its owner may be a view into the lock.
  if (!next.hold.KeepsOutAt(now)) return std::nullopt;
  const std::optional<Hold> own = place.lock->Find(next.hold.owner);
  // The owner's own hold, if it is the only one that is over, is simply replaced.
  const size_t own_overdue = own.has_value() && !own->KeepsOutAt(now) ? 1 : 0;
  const size_t overdue = place.lock->size() - place.lock->KeepingOut(now);
  return overdue > own_overdue ? std::optional(Expired{now}) : std::nullopt;
}

std::optional<Expired> OverdueBefore(const Place& place, const Change& next, Instant now) {
  if (const auto* held = std::get_if<Held>(&next)) return OverdueBefore(place, *held, now);
  // Any other change is about a hold that is not over, which is alone more often than not.
  const bool alone = place.lock == nullptr || place.lock->size() == 1;
  return alone || std::holds_alternative<Expired>(next) ? std::nullopt : Overdue(place, now);
}

std::optional<Hold> CurrentHold(const Place& place, Instant now) {
  if (place.lock == nullptr) return std::nullopt;
  const Lock::Holds holds = place.lock->holds(Lock::Order::kByToken);
  for (Lock::Iterator at = holds.end(); at != holds.begin();) {
    const Hold hold = *--at;
    if (hold.LiveAt(now)) return hold;
  }
  return std::nullopt;
}

std::optional<Token> CurrentToken(const Place& place, Instant now) {
  const std::optional<Hold> hold = CurrentHold(place, now);
  return hold.has_value() ? std::optional(hold->token) : std::nullopt;
}

bool IsCurrent(const Place& place, Token token, Instant now) {
  return place.lock != nullptr && place.lock->HasLive(token, now);
}

size_t CountHolders(const Place& place, Instant now) {
  if (place.lock != nullptr) return place.lock->KeepingOut(now);
  return PlainIn(place, now) == nullptr ? 0 : 1;
}

std::optional<Instant> NextEnd(const Place& place, Instant now) {
  if (const PlainLock* plain = PlainIn(place, now); plain != nullptr) {
    return plain->end == kMaxInstant ? std::nullopt : std::optional(plain->end);
  }
  const size_t holders = place.lock == nullptr ? 0 : place.lock->KeepingOut(now);
  if (holders == 0) return std::nullopt;
  return place.lock->at(Lock::Order::kByClosing, place.lock->size() - holders).closes();
}

Occupancy OccupancyOf(const Place& place, Instant now) {
  if (place.lock == nullptr) return {.live = PlainIn(place, now) == nullptr ? 0U : 1U};
  if (!place.lock->MayLinger()) return {.live = place.lock->KeepingOut(now)};
  Occupancy occupancy;
  const Lock::Holds holds = place.lock->holds(Lock::Order::kByClosing);
  for (Lock::Iterator at = holds.end(); at != holds.begin();) {
    const Hold hold = *--at;
    if (!hold.KeepsOutAt(now)) break;
    if (hold.LiveAt(now)) {
      ++occupancy.live;
    } else {
      occupancy.linger_left = std::max(occupancy.linger_left, hold.closes() - now);
    }
  }
  return occupancy;
}

Mode ModeOf(const Place& place) {
  return place.lock == nullptr ? Mode::kExclusive : place.lock->mode();
}

}  // namespace turnstile
