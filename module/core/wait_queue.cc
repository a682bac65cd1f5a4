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
  if (party.first_wait != nullptr || party.first_held != nullptr) return;
  parties_.erase(parties_.find(party.owner.bytes));
}

WaitQueue::Waiter* WaitQueue::FindWaiter(LockName lock, Owner owner) {
  const Party* party = FindParty(owner);
  if (party == nullptr) return nullptr;
  Waiter* wait = party->first_wait;
  while (wait != nullptr && wait->line_->lock_ != lock) wait = wait->next_of_party_;
  return wait;
}

void WaitQueue::Enter(Waiter& waiter, LockName lock, Owner owner) {
  const auto [found, added] = lines_[lock.db].try_emplace(std::string(lock.key));
  Line& line = found->second;
  if (added) line.lock_ = LockName{lock.db, found->first};

  waiter.line_ = &line;
  waiter.ahead_ = line.last_;
  (line.last_ == nullptr ? line.first_ : line.last_->behind_) = &waiter;
  line.last_ = &waiter;
  ++line.size_;

  Party& party = PartyOf(owner);
  waiter.party_ = &party;
  waiter.next_of_party_ = party.first_wait;
  if (party.first_wait != nullptr) party.first_wait->previous_of_party_ = &waiter;
  party.first_wait = &waiter;

  timeouts_.emplace(waiter.deadline_, &waiter);
}

void WaitQueue::TakeOver(Waiter& newer, Waiter& older) {
  newer.line_ = std::exchange(older.line_, nullptr);
  newer.ahead_ = std::exchange(older.ahead_, nullptr);
  newer.behind_ = std::exchange(older.behind_, nullptr);
  (newer.ahead_ == nullptr ? newer.line_->first_ : newer.ahead_->behind_) = &newer;
  (newer.behind_ == nullptr ? newer.line_->last_ : newer.behind_->ahead_) = &newer;

  newer.party_ = std::exchange(older.party_, nullptr);
  newer.previous_of_party_ = std::exchange(older.previous_of_party_, nullptr);
  newer.next_of_party_ = std::exchange(older.next_of_party_, nullptr);
  (newer.previous_of_party_ == nullptr ? newer.party_->first_wait
                                       : newer.previous_of_party_->next_of_party_) = &newer;
  if (newer.next_of_party_ != nullptr) newer.next_of_party_->previous_of_party_ = &newer;

  timeouts_.erase({older.deadline_, &older});
  timeouts_.emplace(newer.deadline_, &newer);
}

void WaitQueue::Unlink(Waiter& waiter) {
  Line& line = *std::exchange(waiter.line_, nullptr);
  (waiter.ahead_ == nullptr ? line.first_ : waiter.ahead_->behind_) = waiter.behind_;
  (waiter.behind_ == nullptr ? line.last_ : waiter.behind_->ahead_) = waiter.ahead_;
  waiter.ahead_ = waiter.behind_ = nullptr;
  --line.size_;

  Party& party = *std::exchange(waiter.party_, nullptr);
  (waiter.previous_of_party_ == nullptr ? party.first_wait
                                        : waiter.previous_of_party_->next_of_party_) =
      waiter.next_of_party_;
  if (waiter.next_of_party_ != nullptr) {
    waiter.next_of_party_->previous_of_party_ = waiter.previous_of_party_;
  }
  waiter.previous_of_party_ = waiter.next_of_party_ = nullptr;
  DropIfIdle(party);

  timeouts_.erase({waiter.deadline_, &waiter});
}

void WaitQueue::Leave(Waiter& waiter) {
  Line& line = *waiter.line_;
  Unlink(waiter);
  if (line.first_ == nullptr) {
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
  (line.previous_of_holder_ == nullptr ? party.first_held
                                       : line.previous_of_holder_->next_of_holder_) =
      line.next_of_holder_;
  if (line.next_of_holder_ != nullptr) {
    line.next_of_holder_->previous_of_holder_ = line.previous_of_holder_;
  }
  line.previous_of_holder_ = line.next_of_holder_ = nullptr;
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
  line->next_of_holder_ = party.first_held;
  if (party.first_held != nullptr) party.first_held->previous_of_holder_ = line;
  party.first_held = line;
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
    for (Waiter* other = last; other != nullptr && other->seen_ != search; other = other->ahead_) {
      other->seen_ = search;
      reach(other->party_, from, over);
    }
  };

  if (holder.has_value()) reach(FindParty(*holder), nullptr, lock);
  if (const Line* line = Find(lock); line != nullptr) reach_all_from(line->last_, nullptr, lock);
  for (size_t i = 0; i < reached.size() && self->seen != search; ++i) {
    const Party* from = reached[i];
    for (Waiter* wait = from->first_wait; wait != nullptr; wait = wait->next_of_party_) {
      const Line& line = *wait->line_;
      if (line.holder_ != nullptr && line.holder_end_ >= now) {
        reach(line.holder_, from, line.lock_);
      }
      reach_all_from(wait->ahead_, from, line.lock_);
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
