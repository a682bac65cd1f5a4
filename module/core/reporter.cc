#include "core/reporter.h"

#include <algorithm>
#include <bitset>
#include <utility>

#include "core/request.h"

namespace turnstile {

uint64_t& Reporter::CounterFor(Loss how) {
  switch (how) {
    case Loss::kForced:
    case Loss::kFlushed:
      return stats_.forced;
    case Loss::kEvicted:
      return stats_.evicted;
    case Loss::kSession:
      return stats_.session_ended;
    case Loss::kUndelivered:
      return stats_.undelivered;
    case Loss::kExpired:
      break;
  }
  return stats_.expired;
}

void Reporter::AddHoldTime(const Hold& hold, Instant now) {
  stats_.hold_times.Add(std::min(now, hold.end) - hold.since);
}

void Reporter::OnReleased(const OpenKey& key, Token token, std::optional<Millis> held) {
  if (held.has_value()) stats_.hold_times.Add(*held);
  TakeRenamed(token);
  Emit(key, LockEvent::kReleased);
}

void Reporter::OnLost(const OpenKey& key, const std::vector<LostHold>& lost,
                      std::optional<Instant> now) {
  if (lost.empty()) return;
  PublishPending();
  std::bitset<8> told;  // by cause: an event is about a lock, not about a hold
  for (const auto& [hold, how] : lost) {
    const bool is_counted = now.has_value() && CountLoss(hold, how, *now);
    if (is_counted && how == Loss::kUndelivered) {
      Warn(undelivered_, 1, key.name().key, hold.tag, *now,
           "grants were taken back because their clients were gone before the reply");
    }
    const auto cause = static_cast<size_t>(how);
    if (!told.test(cause)) host_.EmitLost(key.content(), how);
    told.set(cause);
  }
}

bool Reporter::CountLoss(const Hold& hold, Loss how, Instant now) {
  if (TakeRenamed(hold.token)) return false;
  ++CounterFor(how);
  AddHoldTime(hold, now);
  return true;
}

void Reporter::OnRemoved(LockName name, const Lock& lock, bool counts, bool moves, Instant now) {
  PublishPending();
  removal_.tokens.clear();
  removal_.tag.clear();
  removal_.any_live = false;
  removal_.ended = removal_.live = 0;
  // A lease includes its last millisecond. A server may expire the key in that millisecond already
  // (seen once, on Redis 8.0), and nothing tells that from a DEL.
  const bool expires = lock.blocks_until() <= now;
  for (const Hold& hold : lock.holds(Lock::Order::kByToken)) {
    if (hold.ended_with_session()) continue;  // reported when its connection closed
    if (hold.LiveAt(now) && moves) continue;
    const bool live = hold.LiveAt(now) && !expires;
    removal_.any_live = removal_.any_live || live;
    if (live && !hold.tag.empty()) removal_.tag = hold.tag;
    removal_.tokens.push_back(hold.token);
    if (!counts || TakeRenamed(hold.token)) continue;
    ++(live ? removal_.live : removal_.ended);
    AddHoldTime(hold, now);
  }
  if (removal_.tokens.empty()) return;
  removal_.db = name.db;
  removal_.key = name.key;
  removal_.counts = counts;
  removal_.at = now;
  removal_.how_live = Loss::kForced;
  is_pending_ = true;
  host_.RunSoon();
}

bool Reporter::IsPending(LockName name) const {
  return is_pending_ && removal_.db == name.db && removal_.key == name.key;
}

void Reporter::OnRenamed(LockName old_name) {
  if (!IsPending(old_name) || !removal_.counts) return;
  for (const Token token : removal_.tokens) ++renamed_[token];
  // An entry is left over if the hold is upgraded. Tokens increase, so the first entries are the
  // oldest.
  constexpr size_t kMostRemembered = 100'000;
  while (renamed_.size() > kMostRemembered) renamed_.erase(renamed_.begin());
}

bool Reporter::TakeRenamed(Token token) {
  if (renamed_.empty()) return false;
  const auto found = renamed_.find(token);
  if (found == renamed_.end()) return false;
  if (--found->second == 0) renamed_.erase(found);
  return true;
}

void Reporter::OnEvicted(LockName name) {
  if (IsPending(name)) removal_.how_live = Loss::kEvicted;
}

void Reporter::PublishRemoval() {
  is_pending_ = false;
  const Loss how = removal_.any_live ? removal_.how_live : Loss::kExpired;
  if (removal_.counts) {
    CounterFor(Loss::kExpired) += removal_.ended;
    CounterFor(removal_.how_live) += removal_.live;
    if (how == Loss::kEvicted && removal_.live > 0) {
      Warn(evictions_, removal_.live, removal_.key, removal_.tag, removal_.at,
           "locks were lost by eviction: use maxmemory-policy noeviction");
    }
  }
  // At the end: whoever listens may remove another lock.
  host_.EmitLost(LockName{removal_.db, removal_.key}, how);
}

void Reporter::OnFlushed(LockName name, const Lock& lock, bool counts, Instant now) {
  PublishPending();
  const std::vector<LostHold> lost = HoldsLostWith(lock, Loss::kFlushed, now);
  if (lost.empty()) return;
  bool any_live = false;
  for (const auto& [hold, how] : lost) {
    any_live = any_live || how == Loss::kFlushed;
    if (counts) CountLoss(hold, how, now);
  }
  host_.EmitLost(name, any_live ? Loss::kFlushed : Loss::kExpired);
}

void Reporter::Warn(Warnings& warnings, uint64_t count, std::string_view key, std::string_view tag,
                    Instant now, const char* what) {
  constexpr Millis kEvery{60000};
  warnings.since += count;
  const bool recent = warnings.last.has_value() && *warnings.last <= now;
  if (recent && now < *warnings.last + kEvery) return;
  warnings.last = now;
  host_.Warn(std::to_string(std::exchange(warnings.since, 0)) + ' ' + what +
             "; the last lock was " + Quoted(key) +
             (tag.empty() ? "" : ", held by " + Quoted(tag)));
}

}  // namespace turnstile
