#include "core/lock.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <new>

namespace turnstile {

Lock* Lock::Make(const Hold& hold) {
  // The owner begins right behind the last field, inside the padding that the compiler leaves.
  const size_t bytes = offsetof(Lock, owner_size_less_one_) + 1 + hold.owner.bytes.size();
  return ::new (::operator new(std::max(bytes, sizeof(Lock)))) Lock(hold);
}

void Lock::operator delete(void* memory) { ::operator delete(memory); }

Lock::Lock(const Hold& hold)
    : token_(hold.token),
      since_(hold.since),
      end_(hold.end),
      owner_size_less_one_(static_cast<uint8_t>(hold.owner.bytes.size() - 1)) {
  std::memcpy(owner_bytes(), hold.owner.bytes.data(), hold.owner.bytes.size());
}

char* Lock::owner_bytes() { return reinterpret_cast<char*>(&owner_size_less_one_) + 1; }

const char* Lock::owner_bytes() const {
  return reinterpret_cast<const char*>(&owner_size_less_one_) + 1;
}

Hold Lock::hold() const {
  const Owner owner{std::string_view(owner_bytes(), size_t{owner_size_less_one_} + 1)};
  return Hold{.owner = owner, .token = token_, .since = since_, .end = end_};
}

void Lock::Renew(const Hold& hold) {
  token_ = hold.token;
  since_ = hold.since;
  end_ = hold.end;
}

namespace {

// How `owner` stands to the lock at `now`.
enum class Standing { kFree, kOwnPlain, kOwn, kEnded, kOthers };

Standing StandingOf(Owner owner, const Place& place, Instant now) {
  if (place.plain.has_value()) {
    if (now > place.plain->end) return Standing::kFree;
    return place.plain->value == owner.bytes ? Standing::kOwnPlain : Standing::kOthers;
  }
  if (place.lock == nullptr) return Standing::kFree;
  const Hold hold = place.lock->hold();
  const bool own = hold.owner == owner;
  if (!hold.LiveAt(now)) return own ? Standing::kEnded : Standing::kFree;
  return own ? Standing::kOwn : Standing::kOthers;
}

// The answer to an owner that has nothing to give up or to prolong.
Outcome Missing(Standing standing) {
  switch (standing) {
    case Standing::kEnded:
      return Outcome::kLeaseEnded;
    case Standing::kOthers:
      return Outcome::kHeldByOther;
    default:
      return Outcome::kFree;
  }
}

}  // namespace

Decision Decide(const Place& place, const AcquireRequest& request, Ahead ahead, FineInstant now,
                const TokenClock& clock) {
  const Instant since = ToInstant(now);
  const Instant end = since + request.lease;
  switch (StandingOf(request.owner, place, since)) {
    case Standing::kOthers:
      return {Outcome::kHeldByOther, std::nullopt};
    case Standing::kOwn: {
      Hold hold = place.lock->hold();
      hold.end = end;
      return {Outcome::kHeldAlready, Held{hold}};
    }
    case Standing::kFree:
    case Standing::kEnded:
      if (ahead == Ahead::kOthers) return {Outcome::kOthersWait, std::nullopt};
      break;
    case Standing::kOwnPlain:
      break;
  }
  const std::optional<Token> token = clock.Next(now);
  if (!token.has_value()) return {Outcome::kTokensUsedUp, std::nullopt};
  return {Outcome::kGranted, Held{Hold{request.owner, *token, since, end}}};
}

Decision Decide(const Place& place, const ReleaseRequest& request, Instant now) {
  switch (const Standing standing = StandingOf(request.owner, place, now); standing) {
    case Standing::kOwn:
      return {Outcome::kReleased, Freed{request.owner}};
    case Standing::kOwnPlain:
      return {Outcome::kReleased, PlainFreed{}};
    default:
      return {Missing(standing), std::nullopt};
  }
}

Decision Decide(const Place& place, const TouchRequest& request, Instant now) {
  const Instant end = now + request.lease;
  switch (const Standing standing = StandingOf(request.owner, place, now); standing) {
    case Standing::kOwn: {
      Hold hold = place.lock->hold();
      hold.end = end;
      return {Outcome::kTouched, Held{hold}};
    }
    case Standing::kOwnPlain:
      return {Outcome::kTouched, PlainExtended{end}};
    default:
      return {Missing(standing), std::nullopt};
  }
}

std::optional<Token> CurrentToken(const Place& place, Instant now) {
  if (place.lock == nullptr) return std::nullopt;
  const Hold hold = place.lock->hold();
  return hold.LiveAt(now) ? std::optional(hold.token) : std::nullopt;
}

bool IsCurrent(const Place& place, Token token, Instant now) {
  return CurrentToken(place, now) == token;
}

std::optional<Holder> HolderOf(const Place& place, Instant now) {
  if (place.plain.has_value()) {
    if (now > place.plain->end) return std::nullopt;
    const std::string_view value = place.plain->value;
    return Holder{Owner{value.size() <= kMaxOwnerBytes ? value : ""}, place.plain->end};
  }
  if (place.lock == nullptr) return std::nullopt;
  const Hold hold = place.lock->hold();
  if (!hold.LiveAt(now)) return std::nullopt;
  return Holder{hold.owner, hold.end};
}

Lock* Apply(Lock* lock, const Held& held) {
  if (lock == nullptr || lock->hold().owner != held.hold.owner) return Lock::Make(held.hold);
  lock->Renew(held.hold);
  return lock;
}

}  // namespace turnstile
