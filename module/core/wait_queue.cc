#include "core/wait_queue.h"

#include <algorithm>

namespace turnstile {
namespace {

// A hold lives through its last millisecond.
constexpr Instant After(Instant end) { return end + Millis{1}; }

}  // namespace

AcquireRequest WaitQueue::Waiter::request() const {
  return AcquireRequest{.owner = party_->owner, .lease = lease_, .wait = Millis{0}};
}

LockName WaitQueue::Waiter::lock() const { return line_->lock_; }

WaitQueue::Line* WaitQueue::Find(LockName lock) {
  const auto db = lines_.find(lock.db);
  if (db == lines_.end()) return nullptr;
  const auto line = db->second.find(lock.key);
  return line == db->second.end() ? nullptr : &line->second;
}

std::vector<LockName> WaitQueue::Locks(std::optional<int> db) const {
  std::vector<LockName> locks;
  for (const auto& [number, of_db] : lines_) {
    if (db.has_value() && number != *db) continue;
    for (const auto& [key, line] : of_db) locks.push_back(line.lock_);
  }
  return locks;
}

WaitQueue::Party* WaitQueue::FindParty(Owner owner) {
  const auto party = parties_.find(owner.bytes);
  return party == parties_.end() ? nullptr : &party->second;
}

WaitQueue::Party& WaitQueue::PartyOf(Owner owner) {
  if (Party* party = FindParty(owner); party != nullptr) return *party;
  const auto added = parties_.try_emplace(std::string(owner.bytes)).first;
  added->second.owner = Owner{added->first};
  return added->second;
}

void WaitQueue::DropIfIdle(Party& party) {
  if (party.waits.empty() && party.held.empty()) parties_.erase(parties_.find(party.owner.bytes));
}

WaitQueue::Waiter* WaitQueue::FindWaiter(LockName lock, Owner owner) {
  const Party* party = FindParty(owner);
  if (party == nullptr) return nullptr;
  Waiter* wait = party->waits.first();
  while (wait != nullptr && wait->line_->lock_ != lock) wait = wait->of_party_.after;
  return wait;
}

void WaitQueue::Enter(Waiter& waiter, LockName lock, Owner owner) {
  const auto [found, added] = lines_[lock.db].try_emplace(std::string(lock.key));
  Line& line = found->second;
  if (added) line.lock_ = LockName{lock.db, found->first};
  waiter.line_ = &line;
  line.waiters_.Append(waiter);
  waiter.party_ = &PartyOf(owner);
  waiter.party_->waits.Append(waiter);
  timeouts_.emplace(waiter.deadline_, &waiter);
}

void WaitQueue::TakeOver(Waiter& newer, Waiter& older) {
  newer.line_ = std::exchange(older.line_, nullptr);
  newer.line_->waiters_.Replace(older, newer);
  newer.party_ = std::exchange(older.party_, nullptr);
  newer.party_->waits.Replace(older, newer);
  timeouts_.erase({older.deadline_, &older});
  timeouts_.emplace(newer.deadline_, &newer);
}

void WaitQueue::Leave(Waiter& waiter) {
  Line& line = *std::exchange(waiter.line_, nullptr);
  line.waiters_.Remove(waiter);
  Party& party = *std::exchange(waiter.party_, nullptr);
  party.waits.Remove(waiter);
  DropIfIdle(party);
  timeouts_.erase({waiter.deadline_, &waiter});
  if (line.waiters_.empty()) {
    Drop(line);
  } else {
    woken_.insert(&line);
  }
}

void WaitQueue::Drop(Line& line) {
  ClearHolder(line);
  woken_.erase(&line);
  auto& of_db = lines_.find(line.lock_.db)->second;
  of_db.erase(of_db.find(line.lock_.key));
  if (empty()) {  // after a rush the tables, though empty, would stay large
    lines_ = decltype(lines_)();
    parties_ = decltype(parties_)();
    woken_ = decltype(woken_)();
  }
}

void WaitQueue::ClearHolder(Line& line) {
  if (line.holder_ == nullptr) return;
  ends_.erase({line.holder_end_, &line});
  Party& party = *std::exchange(line.holder_, nullptr);
  party.held.Remove(line);
  DropIfIdle(party);
}

void WaitQueue::SetHolder(LockName lock, std::optional<Owner> owner, Instant end) {
  Line* line = Find(lock);
  if (line == nullptr) return;
  if (!owner.has_value()) {
    ClearHolder(*line);
    woken_.insert(line);
    return;
  }
  if (line->holder_ != nullptr && line->holder_->owner == *owner) {
    ends_.erase({line->holder_end_, line});
    line->holder_end_ = end;
    ends_.emplace(end, line);
    return;
  }
  Party& party = PartyOf(*owner);
  ClearHolder(*line);
  line->holder_ = &party;
  line->holder_end_ = end;
  party.held.Append(*line);
  ends_.emplace(end, line);
}

void WaitQueue::Wake(LockName lock) {
  if (Line* line = Find(lock); line != nullptr) woken_.insert(line);
}

WaitQueue::Line* WaitQueue::FirstWoken(Instant now) {
  while (!ends_.empty() && ends_.begin()->first < now) {
    Line* line = ends_.begin()->second;
    ClearHolder(*line);
    woken_.insert(line);
  }
  return woken_.empty() ? nullptr : *woken_.begin();
}

void WaitQueue::Settled(LockName lock) {
  if (Line* line = Find(lock); line != nullptr) woken_.erase(line);
}

WaitQueue::Waiter* WaitQueue::FirstTimedOut(Instant now) const {
  if (timeouts_.empty() || timeouts_.begin()->first > now) return nullptr;
  return timeouts_.begin()->second;
}

Instant WaitQueue::NextDue() const {
  if (!woken_.empty()) return kMinInstant;
  const Instant timeout = timeouts_.empty() ? kMaxInstant : timeouts_.begin()->first;
  const Instant end = ends_.empty() ? kMaxInstant : After(ends_.begin()->first);
  return std::min(timeout, end);
}

std::vector<WaitQueue::Step> WaitQueue::FindCycle(Owner owner, LockName lock,
                                                  std::optional<Owner> holder, Instant now) {
  const Party* self = FindParty(owner);
  if (self == nullptr) return {};

  // Breadth first over parties, so that the first way found has the fewest steps. Whoever waits in
  // a line waits for all ahead of it; where an earlier walk up the same line has been, everybody
  // further ahead has been reached too.
  const uint64_t search = ++searches_;
  std::vector<Party*> reached;
  const auto reach = [&](Party* party, const Party* from, LockName over) {
    if (party == nullptr || party->seen == search) return;
    party->seen = search;
    party->reached_from = from;
    party->reached_over = over;
    reached.push_back(party);
  };
  const auto reach_all_from = [&](Waiter* last, const Party* from, LockName over) {
    for (Waiter* other = last; other != nullptr && other->seen_ != search;
         other = other->place_.before) {
      other->seen_ = search;
      reach(other->party_, from, over);
    }
  };

  if (holder.has_value()) reach(FindParty(*holder), nullptr, lock);
  if (const Line* line = Find(lock); line != nullptr) {
    reach_all_from(line->waiters_.last(), nullptr, lock);
  }
  for (size_t i = 0; i < reached.size() && self->seen != search; ++i) {
    const Party* from = reached[i];
    for (Waiter* wait = from->waits.first(); wait != nullptr; wait = wait->of_party_.after) {
      const Line& line = *wait->line_;
      if (line.holder_ != nullptr && line.holder_end_ >= now) {
        reach(line.holder_, from, line.lock_);
      }
      reach_all_from(wait->place_.before, from, line.lock_);
    }
  }
  if (self->seen != search) return {};

  std::vector<Step> steps;
  for (const Party* party = self; party != nullptr; party = party->reached_from) {
    const Party* from = party->reached_from;
    steps.push_back({from == nullptr ? owner : from->owner, party->reached_over});
  }
  std::reverse(steps.begin(), steps.end());
  return steps;
}

std::string DescribeCycle(const std::vector<WaitQueue::Step>& cycle,
                          const std::function<bool(LockName)>& visible) {
  constexpr size_t kShown = 8;
  const auto lock_text = [&](LockName lock) { return visible(lock) ? Quoted(lock.key) : "?"; };
  std::string text = "waiting for " + lock_text(cycle.front().lock) + " would close the cycle ";
  for (size_t i = 0; i < cycle.size() && i < kShown; ++i) {
    const bool known = i == 0 || visible(cycle[i - 1].lock);
    text += (known ? Unquoted(cycle[i].owner.bytes) : "?") + " -> " + lock_text(cycle[i].lock);
    text += " -> ";
  }
  if (cycle.size() > kShown) text += "... -> ";
  return text + Unquoted(cycle.front().owner.bytes);
}

}  // namespace turnstile
