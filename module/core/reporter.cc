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

void Reporter::Released(const OpenKey& key, Token token, std::optional<Millis> held) {
  if (held.has_value()) stats_.hold_times.Add(*held);
  TakeRenamed(token);
  Emit(key, LockEvent::kReleased);
}

void Reporter::Lost(const OpenKey& key, const std::vector<turnstile::Lost>& lost,
                    std::optional<Instant> now) {
  if (lost.empty()) return;
  Drain();
  std::bitset<8> told;  // by cause: an event tells of a lock, not of a hold
  for (const auto& [hold, how] : lost) {
    if (now.has_value()) {
      CountLoss(hold, how, *now);
      if (how == Loss::kUndelivered) {
        Warn(undelivered_, 1, key.name().key, *now,
             "grants were taken back, because their clients were gone before they could be told");
      }
    }
    const auto cause = static_cast<size_t>(how);
    if (!told.test(cause)) host_.EmitLost(key.content(), how);
    told.set(cause);
  }
}

void Reporter::CountLoss(const Hold& hold, Loss how, Instant now) {
  if (TakeRenamed(hold.token)) return;
  ++CounterFor(how);
  AddHoldTime(hold, now);
}

void Reporter::Removed(LockName name, const Lock& lock, bool counts, bool moves, Instant now) {
  Drain();
  Removal removal{.db = name.db, .key = std::string(name.key), .counts = counts, .at = now};
  for (const auto& [hold, how] : LostWith(lock, Loss::kForced, now)) {
    const bool live = how != Loss::kExpired;
    if (live && moves) continue;
    removal.any_live = removal.any_live || live;
    removal.tokens.push_back(hold.token);
    if (!counts || TakeRenamed(hold.token)) continue;
    ++(live ? removal.live : removal.ended);
    AddHoldTime(hold, now);
  }
  if (!removal.tokens.empty()) removal_ = std::move(removal);
}

bool Reporter::IsPending(LockName name) const {
  return removal_.has_value() && removal_->db == name.db && removal_->key == name.key;
}

void Reporter::Renamed(LockName old_name) {
  if (!IsPending(old_name) || !removal_->counts) return;
  for (const Token token : removal_->tokens) ++renamed_[token];
  // An entry is left over when the hold is upgraded. Tokens rise: the first ones are the oldest.
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

void Reporter::Evicted(LockName name) {
  if (IsPending(name)) removal_->how_live = Loss::kEvicted;
}

void Reporter::DrainRemoval() {
  const Removal removal = *std::exchange(removal_, std::nullopt);
  const Loss how = removal.any_live ? removal.how_live : Loss::kExpired;
  host_.EmitLost(LockName{removal.db, removal.key}, how);
  if (!removal.counts) return;
  CounterFor(Loss::kExpired) += removal.ended;
  CounterFor(removal.how_live) += removal.live;
  if (how == Loss::kEvicted && removal.live > 0) {
    Warn(evictions_, removal.live, removal.key, removal.at,
         "locks were lost by eviction: give locks a server with maxmemory-policy noeviction");
  }
}

void Reporter::Flushed(LockName name, const Lock& lock, bool counts, Instant now) {
  Drain();
  const std::vector<turnstile::Lost> lost = LostWith(lock, Loss::kFlushed, now);
  if (lost.empty()) return;
  bool any_live = false;
  for (const auto& [hold, how] : lost) {
    any_live = any_live || how == Loss::kFlushed;
    if (counts) CountLoss(hold, how, now);
  }
  host_.EmitLost(name, any_live ? Loss::kFlushed : Loss::kExpired);
}

void Reporter::Warn(Warnings& warnings, uint64_t count, std::string_view key, Instant now,
                    const char* what) {
  constexpr Millis kEvery{60000};
  warnings.since += count;
  const bool recent = warnings.last.has_value() && *warnings.last <= now;
  if (recent && now < *warnings.last + kEvery) return;
  warnings.last = now;
  host_.Warn(std::to_string(std::exchange(warnings.since, 0)) + ' ' + what +
             "; the last lock was " + Quoted(key));
}

}  // namespace turnstile
