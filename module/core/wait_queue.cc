#include "core/wait_queue.h"

#include <algorithm>
#include <functional>
#include <utility>

#include "core/check.h"

namespace turnstile {
namespace {

// A hold is live through its last millisecond.
constexpr Instant After(Instant end) { return end + Millis{1}; }

}  // namespace

LockName WaitQueue::Waiter::lock(size_t index) const { return entries_[index].queue_->lock_; }

bool WaitQueue::Waiter::WaitsFor(LockName lock) const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [lock](const Entry& entry) { return entry.queue_->lock_ == lock; });
}

// An exclusive request is incompatible with every waiter and a shared one with every waiter that is
// not shared, so it is enough to know whether there is one. For a request with a limit, the waiters
// ahead are counted, up to its limit.
WaitersAhead WaitQueue::Waiter::AheadOf(size_t index) const {
  const Entry& entry = entries_[index];
  const LockQueue& queue = *entry.queue_;
  WaitersAhead ahead;
  if (queue.entries_.first() == &entry) return ahead;
  const auto is_ahead = [&entry](const Entry* other) {
    return other != nullptr && other->order_ < entry.order_;
  };
  if (request_.mode != Mode::kLimit || is_ahead(queue.unlimited_.first())) {
    ahead.size = 1;
    ahead.all_limit = false;
    ahead.all_shared = !is_ahead(queue.unshared_.first());
    return ahead;
  }
  for (const Entry* other = entry.link_.before;
       other != nullptr && ahead.size < std::min(request_.limit, ahead.least_limit);
       other = other->link_.before) {
    ahead.Add(Mode::kLimit, other->waiter_->request_.limit);
  }
  return ahead;
}

WaitersAhead WaitQueue::LockQueue::Ahead(bool upgrade, Instant now) const {
  WaitersAhead ahead;
  if (upgrade) {
    // Shared requests at the front of the queue. It is enough to know that there is one.
    if (first()->waiter().request().mode == Mode::kShared) ahead.Add(Mode::kShared, /*limit=*/1);
    return ahead;
  }
  ahead.size = size();
  ahead.all_shared = unshared_.empty() && !has_deferred_work(now);
  ahead.all_limit = unlimited_.empty() && !has_deferred_work(now);
  if (!limits_.empty()) ahead.least_limit = limits_.begin()->first;
  return ahead;
}

Tick WaitQueue::LockQueue::waiting_since() const {
  constexpr int kFront = 100;
  const Entry* entry = first();
  Tick since = entry->waiter().since();
  for (int i = 0; entry != nullptr && i < kFront; ++i, entry = entry->behind()) {
    since = std::min(since, entry->waiter().since());
  }
  return since;
}

void WaitQueue::LockQueue::Insert(Entry& entry, bool upgrade) {
  const AcquireRequest& request = entry.waiter_->request_;
  Entry* next = upgrade ? unshared_.first() : nullptr;
  entry.order_ = next == nullptr ? Order{.arrival = entry.waiter_->number_}
                                 : Order{next->order_.arrival, next->order_.before - 1};
  entries_.InsertBefore(next, entry);
  if (request.mode != Mode::kShared) unshared_.InsertBefore(next, entry);
  if (request.mode != Mode::kLimit) {
    // All waiters ahead of an upgrade ask for a shared hold, so they are in this list.
    Entry* next_unlimited = nullptr;
    if (next != nullptr) {
      const Entry* before = entry.link_.before;
      next_unlimited = before == nullptr ? unlimited_.first() : before->among_unlimited_.after;
    }
    unlimited_.InsertBefore(next_unlimited, entry);
  }
  Count(request);
}

void WaitQueue::LockQueue::Remove(Entry& entry) {
  const AcquireRequest& request = entry.waiter_->request_;
  entries_.Remove(entry);
  if (request.mode != Mode::kShared) unshared_.Remove(entry);
  if (request.mode != Mode::kLimit) unlimited_.Remove(entry);
  Uncount(request);
}

void WaitQueue::LockQueue::Count(const AcquireRequest& request) {
  if (request.mode == Mode::kLimit) ++limits_[request.limit];
}

void WaitQueue::LockQueue::Uncount(const AcquireRequest& request) {
  if (request.mode != Mode::kLimit) return;
  const auto same = limits_.find(request.limit);
  if (!TURNSTILE_CHECK(same != limits_.end())) return;
  if (--same->second == 0) limits_.erase(same);
}

WaitQueue::LockQueue* WaitQueue::Find(LockName lock) {
  const auto db = queues_.find(lock.db);
  if (db == queues_.end()) return nullptr;
  const auto queue = db->second.find(lock.key);
  return queue == db->second.end() ? nullptr : &queue->second;
}

size_t WaitQueue::queues() const {
  size_t count = 0;
  for (const auto& [db, of_db] : queues_) count += of_db.size();
  return count;
}

std::vector<const WaitQueue::LockQueue*> WaitQueue::LongestQueues(int db, size_t most) const {
  std::vector<const LockQueue*> found;
  auto of_size = by_size_.lower_bound(SizeKey{db + 1, 0});
  while (of_size != by_size_.begin() && found.size() < most) {
    --of_size;
    if (of_size->first.db != db) break;
    for (const LockQueue* queue = of_size->second.first(); queue != nullptr && found.size() < most;
         queue = queue->of_same_size_.after) {
      found.push_back(queue);
    }
  }
  std::sort(found.begin(), found.end(), [](const LockQueue* a, const LockQueue* b) {
    return a->size() != b->size() ? a->size() > b->size() : a->lock_.key < b->lock_.key;
  });
  return found;
}

void WaitQueue::AddToSizeIndex(LockQueue& queue) {
  if (queue.size() > 0) by_size_[{queue.lock_.db, queue.size()}].Append(queue);
}

void WaitQueue::RemoveFromSizeIndex(LockQueue& queue) {
  const auto of_size = by_size_.find({queue.lock_.db, queue.size()});
  if (of_size == by_size_.end()) return;
  of_size->second.Remove(queue);
  if (of_size->second.empty()) by_size_.erase(of_size);
}

WaitQueue::LockQueue& WaitQueue::QueueOf(LockName lock) {
  if (LockQueue* queue = Find(lock); queue != nullptr) return *queue;
  const auto added = queues_[lock.db].try_emplace(std::string(lock.key)).first;
  added->second.lock_ = LockName{lock.db, added->first};
  added->second.number_ = ++numbers_;
  return added->second;
}

const WaitQueue::OwnerNode* WaitQueue::FindNode(Owner owner) const {
  const auto node = nodes_.find(owner.bytes);
  return node == nodes_.end() ? nullptr : &node->second;
}

WaitQueue::OwnerNode& WaitQueue::NodeOf(Owner owner) {
  const auto known = nodes_.find(owner.bytes);
  if (known != nodes_.end()) return known->second;
  const auto added = nodes_.try_emplace(std::string(owner.bytes)).first;
  added->second.owner = Owner{added->first};
  node_list_.Append(added->second);
  return added->second;
}

void WaitQueue::EraseIfIdle(OwnerNode& node) {
  if (!node.waits.empty()) return;
  node_list_.Remove(node);
  nodes_.erase(nodes_.find(node.owner.bytes));
}

WaitQueue::Entry& WaitQueue::OnlyEntry(const OwnerNode& node) {
  return node.waits.first()->entries_.front();
}

std::vector<WaitQueue::Waiter*> WaitQueue::Waiters() const {
  std::vector<Waiter*> waiters;
  waiters.reserve(size());
  for (const auto& [when, waiter] : timeouts_) waiters.push_back(waiter);
  return waiters;
}

std::vector<WaitQueue::Waiter*> WaitQueue::FindWaiters(std::span<const LockName> locks,
                                                       Owner owner) {
  std::vector<Waiter*> found;
  const OwnerNode* node = FindNode(owner);
  if (node == nullptr) return found;
  std::vector<const LockQueue*> queues;  // compared by address; their order does not matter
  for (const LockName lock : locks) {
    if (const LockQueue* queue = Find(lock); queue != nullptr) queues.push_back(queue);
  }
  if (queues.empty()) return found;
  std::sort(queues.begin(), queues.end(), std::less<>());
  for (Waiter* wait = node->waits.first(); wait != nullptr; wait = wait->of_owner_.after) {
    const bool overlaps =
        std::any_of(wait->entries_.begin(), wait->entries_.end(), [&queues](const Entry& entry) {
          return std::binary_search(queues.begin(), queues.end(), entry.queue_, std::less<>());
        });
    if (overlaps) found.push_back(wait);
  }
  return found;
}

bool WaitQueue::WaitsFor(const Waiter& waiter, std::span<const LockName> locks, Mode mode) {
  return waiter.request_.mode == mode && waiter.size() == locks.size() &&
         std::all_of(locks.begin(), locks.end(),
                     [&waiter](LockName lock) { return waiter.WaitsFor(lock); });
}

void WaitQueue::Enter(Waiter& waiter, std::span<const LockName> locks, Owner owner, bool upgrade) {
  TURNSTILE_DCHECK(!waiter.is_queued() && !locks.empty());
  OwnerNode& node = NodeOf(owner);
  if (node.entries == 1) ++OnlyEntry(node).queue_->with_other_entries_;
  node.entries += locks.size();
  node.waits.Append(waiter);
  waiter.node_ = &node;
  waiter.request_.owner = node.owner;
  waiter.number_ = ++numbers_;
  waiter.blocked_at_.reset();
  waiter.entries_.resize(locks.size());
  for (size_t i = 0; i < locks.size(); ++i) {
    Entry& entry = waiter.entries_[i];
    LockQueue& queue = QueueOf(locks[i]);
    entry.waiter_ = &waiter;
    entry.queue_ = &queue;
    RemoveFromSizeIndex(queue);
    queue.Insert(entry, upgrade);
    AddToSizeIndex(queue);
    if (node.entries > 1) ++queue.with_other_entries_;
  }
  timeouts_.emplace(std::pair(waiter.deadline_, waiter.number_), &waiter);
}

void WaitQueue::TakeOver(Waiter& newer, Waiter& older) {
  TURNSTILE_DCHECK(older.is_queued() && !newer.is_queued());
  RemoveCandidate(older);
  newer.entries_ = std::exchange(older.entries_, {});
  newer.node_ = std::exchange(older.node_, nullptr);
  newer.node_->waits.Append(newer);
  newer.node_->waits.Remove(older);
  newer.request_.owner = newer.node_->owner;
  newer.number_ = ++numbers_;
  newer.blocked_at_.reset();
  newer.is_candidate_ = true;
  timeouts_.erase({older.deadline_, older.number_});
  timeouts_.emplace(std::pair(newer.deadline_, newer.number_), &newer);
  for (Entry& entry : newer.entries_) {
    LockQueue& queue = *entry.queue_;
    entry.waiter_ = &newer;
    queue.Uncount(older.request_);
    queue.Count(newer.request_);
    AddCandidate(entry);
    WakeQueue(queue);
  }
}

void WaitQueue::Leave(Waiter& waiter, LeaveReason why) {
  if (!TURNSTILE_CHECK(waiter.is_queued())) return;
  RemoveCandidate(waiter);
  timeouts_.erase({waiter.deadline_, waiter.number_});
  OwnerNode& node = *std::exchange(waiter.node_, nullptr);
  node.waits.Remove(waiter);
  const bool had_others = node.entries > 1;
  node.entries -= waiter.size();
  if (had_others && node.entries == 1) --OnlyEntry(node).queue_->with_other_entries_;
  EraseIfIdle(node);
  for (Entry& entry : waiter.entries_) {
    LockQueue& queue = *entry.queue_;
    if (had_others) --queue.with_other_entries_;
    RemoveFromSizeIndex(queue);
    queue.Remove(entry);
    AddToSizeIndex(queue);
    if (queue.entries_.empty()) {
      Erase(queue);
    } else if (why == LeaveReason::kHoldsAlone) {
      Sleep(queue);
    } else {
      WakeQueue(queue);
    }
  }
  waiter.entries_ = std::vector<Entry>();
  if (!empty()) return;
  // After a burst the tables, though empty, would stay large.
  queues_ = decltype(queues_)();
  nodes_ = decltype(nodes_)();
}

void WaitQueue::Erase(LockQueue& queue) {
  auto& of_db = queues_.find(queue.lock_.db)->second;
  of_db.erase(of_db.find(queue.lock_.key));
}

void WaitQueue::AddCandidate(Entry& entry) {
  LockQueue& queue = *entry.queue_;
  queue.candidates_.emplace_hint(queue.candidates_.end(), entry.order_, &entry);
  Reorder(queue);
}

void WaitQueue::RemoveCandidate(Entry& entry) {
  LockQueue& queue = *entry.queue_;
  queue.candidates_.erase(entry.order_);
  Reorder(queue);
  if (queue.candidates_.empty()) SetWakeTime(queue, std::nullopt);
}

void WaitQueue::RemoveCandidate(Waiter& waiter) {
  if (!std::exchange(waiter.is_candidate_, false)) return;
  if (waiter.blocked_at_.has_value()) {
    RemoveCandidate(waiter.entries_[*waiter.blocked_at_]);
  } else {
    for (Entry& entry : waiter.entries_) RemoveCandidate(entry);
  }
}

void WaitQueue::Reorder(LockQueue& queue) {
  if (!queue.woken_.has_value()) return;
  if (queue.candidates_.empty()) {
    Sleep(queue);
  } else if (const Order first = queue.candidates_.begin()->first; first != *queue.woken_) {
    woken_.erase({*queue.woken_, queue.number_});
    queue.woken_ = first;
    woken_.emplace(std::pair(first, queue.number_), &queue);
  }
}

void WaitQueue::WakeQueue(LockQueue& queue) {
  if (queue.woken_.has_value() || queue.candidates_.empty()) return;
  queue.woken_ = queue.candidates_.begin()->first;
  woken_.emplace(std::pair(*queue.woken_, queue.number_), &queue);
}

void WaitQueue::Sleep(LockQueue& queue) {
  if (!queue.woken_.has_value()) return;
  woken_.erase({*queue.woken_, queue.number_});
  queue.woken_.reset();
}

void WaitQueue::SetWakeTime(LockQueue& queue, std::optional<Instant> end) {
  if (queue.wakes_after_ == end) return;
  if (queue.wakes_after_.has_value()) wake_times_.erase({*queue.wakes_after_, queue.number_});
  queue.wakes_after_ = end;
  if (end.has_value()) wake_times_.emplace(std::pair(*end, queue.number_), &queue);
}

void WaitQueue::Block(Waiter& waiter, size_t index, std::optional<Instant> next_end) {
  TURNSTILE_DCHECK(index < waiter.size());
  Entry& entry = waiter.entries_[index];
  LockQueue& queue = *entry.queue_;
  if (!waiter.is_candidate_ || waiter.blocked_at_ != index) {
    RemoveCandidate(waiter);
    waiter.blocked_at_ = index;
    waiter.is_candidate_ = true;
    AddCandidate(entry);
  }
  if (queue.candidates_.begin()->second == &entry) {
    Sleep(queue);
    SetWakeTime(queue, next_end);
  } else if (next_end.has_value()) {
    // A waiter ahead is to be tried too: keep what was to wake it.
    NoteHoldEnd(queue, *next_end);
  }
}

void WaitQueue::Suspend(Waiter& waiter) {
  RemoveCandidate(waiter);
  waiter.blocked_at_.reset();
  waiter.is_candidate_ = true;
  for (Entry& entry : waiter.entries_) {
    AddCandidate(entry);
    Sleep(*entry.queue_);
  }
}

void WaitQueue::NoteHoldEnd(LockName lock, Instant end) {
  LockQueue* queue = Find(lock);
  if (queue != nullptr && !queue->candidates_.empty()) NoteHoldEnd(*queue, end);
}

void WaitQueue::NoteHoldEnd(LockQueue& queue, Instant end) {
  if (!queue.wakes_after_.has_value() || end < *queue.wakes_after_) SetWakeTime(queue, end);
}

void WaitQueue::Wake(LockName lock) {
  if (LockQueue* queue = Find(lock); queue != nullptr) WakeQueue(*queue);
}

void WaitQueue::WakeInEveryDatabase(std::string_view key) {
  for (auto& [number, of_db] : queues_) {
    if (const auto queue = of_db.find(key); queue != of_db.end()) WakeQueue(queue->second);
  }
}

void WaitQueue::WakeAll(std::optional<int> db) {
  for (auto& [number, of_db] : queues_) {
    if (db.has_value() && number != *db) continue;
    for (auto& [key, queue] : of_db) WakeQueue(queue);
  }
}

WaitQueue::Waiter* WaitQueue::NextToTry(Instant now) {
  while (!wake_times_.empty() && wake_times_.begin()->first.first < now) {
    LockQueue& queue = *wake_times_.begin()->second;
    SetWakeTime(queue, std::nullopt);
    WakeQueue(queue);
  }
  return woken_.empty() ? nullptr : woken_.begin()->second->candidates_.begin()->second->waiter_;
}

WaitQueue::Waiter* WaitQueue::FirstTimedOut(Tick now) const {
  if (timeouts_.empty() || timeouts_.begin()->first.first > now) return nullptr;
  return timeouts_.begin()->second;
}

std::optional<Tick> WaitQueue::NextTimeOut() const {
  return timeouts_.empty() ? std::nullopt : std::optional(timeouts_.begin()->first.first);
}

Due WaitQueue::NextDue() const {
  if (!woken_.empty()) return Due::AtOnce();
  return wake_times_.empty() ? Due::Never() : Due::At(After(wake_times_.begin()->first.first));
}

// --- Invariants ---------------------------------------------------------------------------------

bool WaitQueue::LockQueue::IsConsistent() const {
  const Entry* unshared = unshared_.first();
  const Entry* unlimited = unlimited_.first();
  size_t limits = 0;
  for (const Entry* entry = first(); entry != nullptr; entry = entry->link_.after) {
    const Waiter& waiter = *entry->waiter_;
    const bool is_entry_of_waiter =
        entry >= waiter.entries_.data() && entry < waiter.entries_.data() + waiter.size();
    if (entry->queue_ != this || !is_entry_of_waiter) return false;
    if (entry->link_.after != nullptr && entry->link_.after->order_ <= entry->order_) return false;
    const Mode mode = waiter.request_.mode;
    if (mode == Mode::kLimit) ++limits;
    if (mode != Mode::kShared &&
        std::exchange(unshared, unshared->among_unshared_.after) != entry) {
      return false;
    }
    if (mode != Mode::kLimit &&
        std::exchange(unlimited, unlimited->among_unlimited_.after) != entry) {
      return false;
    }
  }
  for (const auto& [limit, count] : limits_) limits -= count;
  for (const auto& [order, entry] : candidates_) {
    const Waiter& waiter = *entry->waiter_;
    const bool is_blocked_here =
        !waiter.blocked_at_.has_value() || &waiter.entries_[*waiter.blocked_at_] == entry;
    if (entry->order_ != order || !waiter.is_candidate_ || !is_blocked_here) return false;
  }
  return unshared == nullptr && unlimited == nullptr && limits == 0 && size() > 0 &&
         (!woken_.has_value() || *woken_ == candidates_.begin()->first);
}

bool WaitQueue::IsConsistent() const {
  size_t entries_of_waiters = 0;
  for (const auto& [when, waiter] : timeouts_) {
    entries_of_waiters += waiter->size();
    if (!waiter->is_queued() || waiter->deadline_ != when.first) return false;
  }
  size_t entries_of_queues = 0;
  size_t entries_of_nodes = 0;
  size_t woken = 0;
  size_t with_wake_time = 0;
  for (const auto& [db, of_db] : queues_) {
    for (const auto& [key, queue] : of_db) {
      if (queue.lock_ != LockName{db, key} || !queue.IsConsistent()) return false;
      entries_of_queues += queue.size();
      if (queue.woken_.has_value()) ++woken;
      if (queue.wakes_after_.has_value()) ++with_wake_time;
    }
  }
  for (const auto& [owner, node] : nodes_) {
    size_t entries = 0;
    for (const Waiter* wait = node.waits.first(); wait != nullptr; wait = wait->of_owner_.after) {
      entries += wait->size();
    }
    if (entries != node.entries || entries == 0) return false;
    entries_of_nodes += entries;
  }
  return entries_of_queues == entries_of_waiters && entries_of_nodes == entries_of_waiters &&
         woken == woken_.size() && with_wake_time == wake_times_.size() &&
         node_list_.size() == nodes_.size();
}

}  // namespace turnstile
