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

WaitQueue::Waiter::Waiter(const AcquireRequest& request, Tick since, Tick deadline,
                          uint64_t client_id)
    : request_(request), since_(since), deadline_(deadline), client_id_(client_id) {
  request_.also = {};
  const NotifyTarget notify = request.notify.value_or(NotifyTarget{});
  const size_t size = request.tag.size() + notify.channel.size() + notify.id.size();
  if (size == 0) return;
  texts_ = std::make_unique<char[]>(size);
  char* end = texts_.get();
  const auto copy = [&end](std::string_view text) {
    char* const begin = end;
    end = std::copy(text.begin(), text.end(), begin);
    return std::string_view(begin, text.size());
  };
  request_.tag = copy(request.tag);
  if (request_.notify.has_value()) {
    request_.notify->channel = copy(notify.channel);
    request_.notify->id = copy(notify.id);
  }
}

LockName WaitQueue::Waiter::lock(size_t index) const { return entries_[index].queue_->lock_; }

bool WaitQueue::Waiter::WaitsFor(LockName lock) const {
  const std::span<Entry> all = entries();
  return std::any_of(all.begin(), all.end(),
                     [lock](const Entry& entry) { return entry.queue_->lock_ == lock; });
}

bool WaitQueue::Waiter::IsIn(const LockQueue& queue) const {
  const std::span<Entry> all = entries();
  return std::any_of(all.begin(), all.end(),
                     [&queue](const Entry& entry) { return entry.queue_ == &queue; });
}

// An exclusive request is incompatible with every waiter and a shared one with every waiter that is
// not shared, so it is enough to know whether there is one. For a request with a limit, the waiters
// ahead are counted, until they leave no room for it.
WaitersAhead WaitQueue::Waiter::AheadOf(size_t index) const {
  const Entry& entry = entries_[index];
  const LockQueue& queue = *entry.queue_;
  WaitersAhead ahead;
  if (queue.entries_.first() == &entry) return ahead;
  const auto is_ahead = [&entry](const Entry* other) {
    return other != nullptr && other->order() < entry.order();
  };
  if (request_.mode != Mode::kLimit || is_ahead(queue.unlimited_.first())) {
    ahead.size = 1;
    ahead.all_limit = false;
    ahead.all_shared = !is_ahead(queue.unshared_.first());
    return ahead;
  }
  for (const Entry* other = entry.link_.before;
       other != nullptr && ahead.weight < std::min(request_.limit, ahead.least_limit);
       other = other->link_.before) {
    ahead.Add(other->waiter_->request_);
  }
  return ahead;
}

WaitersAhead WaitQueue::LockQueue::Ahead(bool upgrade, Instant now) const {
  WaitersAhead ahead;
  if (upgrade) {
    // Shared requests at the front of the queue. It is enough to know that there is one.
    if (first()->waiter().request().mode == Mode::kShared) ahead.Add(first()->waiter().request());
    return ahead;
  }
  ahead.size = size();
  ahead.all_shared = unshared_.empty() && !has_deferred_work(now);
  ahead.all_limit = unlimited_.empty() && !has_deferred_work(now);
  if (limited_ != nullptr) {
    ahead.least_limit = limited_->limits.begin()->first;
    ahead.weight = limited_->weight;
  }
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
  entry.arrival_ = next == nullptr ? entry.waiter_->number_ : next->arrival_;
  entry.before_ = next == nullptr ? 0 : next->before_ - 1;
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
  if (request.mode != Mode::kLimit) return;
  if (limited_ == nullptr) limited_ = std::make_unique<LimitedWaiters>();
  ++limited_->limits[request.limit];
  limited_->weight += request.weight;
}

void WaitQueue::LockQueue::Uncount(const AcquireRequest& request) {
  if (request.mode != Mode::kLimit) return;
  if (!TURNSTILE_CHECK(limited_ != nullptr)) return;
  std::map<uint32_t, size_t>& limits = limited_->limits;
  const auto same = limits.find(request.limit);
  if (!TURNSTILE_CHECK(same != limits.end())) return;
  limited_->weight -= request.weight;
  if (--same->second == 0) limits.erase(same);
  if (limits.empty()) limited_.reset();
}

WaitQueue::LockQueue* WaitQueue::Find(LockName lock) {
  const auto db = queues_.find(lock.db);
  return db == queues_.end() ? nullptr : db->second.Find(lock.key);
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
  auto& [key, added] = queues_.try_emplace(lock.db, hash_key_).first->second.Add(lock.key);
  added.lock_ = LockName{lock.db, key};
  added.number_ = ++numbers_;
  ++queue_count_;
  return added;
}

const WaitQueue::OwnerNode* WaitQueue::FindNode(Owner owner) const {
  return nodes_.Find(owner.bytes);
}

WaitQueue::OwnerNode& WaitQueue::NodeOf(Owner owner) {
  if (OwnerNode* known = nodes_.Find(owner.bytes); known != nullptr) return *known;
  auto& [key, added] = nodes_.Add(owner.bytes);
  added.owner = Owner{key};
  node_list_.Append(added);
  return added;
}

void WaitQueue::EraseIfIdle(OwnerNode& node) {
  if (!node.waits.empty()) return;
  node_list_.Remove(node);
  nodes_.Erase(node.owner.bytes);
}

WaitQueue::Entry& WaitQueue::OnlyEntry(const OwnerNode& node) {
  return node.waits.first()->entries().front();
}

std::vector<WaitQueue::Waiter*> WaitQueue::Waiters() const {
  std::vector<Waiter*> waiters = timeouts_.all();
  std::sort(waiters.begin(), waiters.end(),
            [](const Waiter* a, const Waiter* b) { return TimesOutBefore()(*a, *b); });
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
  // An owner has at most one wait in a queue. Its waits are many, or the waiters in the queues.
  size_t queued = 0;
  for (const LockQueue* queue : queues) queued += queue->size();
  if (queued < node->entries) {
    for (const LockQueue* queue : queues) {
      for (const Entry* entry = queue->first(); entry != nullptr; entry = entry->behind()) {
        Waiter* wait = entry->waiter_;
        const bool is_new = std::find(found.begin(), found.end(), wait) == found.end();
        if (wait->node_ == node && is_new) found.push_back(wait);
      }
    }
    std::sort(found.begin(), found.end(),
              [](const Waiter* a, const Waiter* b) { return a->number_ < b->number_; });
    return found;
  }
  for (Waiter* wait = node->waits.first(); wait != nullptr; wait = wait->of_owner_.after) {
    const std::span<Entry> entries = wait->entries();
    const bool overlaps =
        std::any_of(entries.begin(), entries.end(), [&queues](const Entry& entry) {
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
  waiter.blocked_at_ = Waiter::kNowhere;
  waiter.SetEntries(std::make_unique<Entry[]>(locks.size()), locks.size());
  for (size_t i = 0; i < locks.size(); ++i) {
    Entry& entry = waiter.entries()[i];
    LockQueue& queue = QueueOf(locks[i]);
    entry.waiter_ = &waiter;
    entry.queue_ = &queue;
    RemoveFromSizeIndex(queue);
    queue.Insert(entry, upgrade);
    AddToSizeIndex(queue);
    if (node.entries > 1) ++queue.with_other_entries_;
  }
  timeouts_.Add(waiter);
  most_waiters_ = std::max(most_waiters_, size());
}

void WaitQueue::TakeOver(Waiter& newer, Waiter& older) {
  TURNSTILE_DCHECK(older.is_queued() && !newer.is_queued());
  RemoveCandidate(older);
  timeouts_.Remove(older);
  newer.SetEntries(std::move(older.entries_), std::exchange(older.count_, 0));
  newer.node_ = std::exchange(older.node_, nullptr);
  newer.node_->waits.Append(newer);
  newer.node_->waits.Remove(older);
  newer.request_.owner = newer.node_->owner;
  newer.number_ = ++numbers_;
  newer.blocked_at_ = Waiter::kNowhere;
  newer.is_candidate_ = true;
  timeouts_.Add(newer);
  for (Entry& entry : newer.entries()) {
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
  timeouts_.Remove(waiter);
  OwnerNode& node = *std::exchange(waiter.node_, nullptr);
  node.waits.Remove(waiter);
  const bool had_others = node.entries > 1;
  node.entries -= waiter.size();
  if (had_others && node.entries == 1) --OnlyEntry(node).queue_->with_other_entries_;
  EraseIfIdle(node);
  for (Entry& entry : waiter.entries()) {
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
  waiter.SetEntries(nullptr, 0);
  constexpr size_t kFew = 100;
  if (!empty() || std::exchange(most_waiters_, 0) <= kFew) return;
  // After a burst the tables, though empty, would stay large.
  queues_.clear();
  nodes_.Clear();
}

void WaitQueue::Erase(LockQueue& queue) {
  --queue_count_;
  queues_.find(queue.lock_.db)->second.Erase(queue.lock_.key);
}

void WaitQueue::AddCandidate(Entry& entry) {
  LockQueue& queue = *entry.queue_;
  queue.candidates_.Add(entry);
  Reorder(queue);
}

void WaitQueue::RemoveCandidate(Entry& entry) {
  LockQueue& queue = *entry.queue_;
  queue.candidates_.Remove(entry);
  Reorder(queue);
  if (queue.candidates_.empty()) SetWakeTime(queue, LockQueue::kNotByTime);
}

void WaitQueue::RemoveCandidate(Waiter& waiter) {
  if (!std::exchange(waiter.is_candidate_, false)) return;
  if (waiter.blocked_at_ != Waiter::kNowhere) {
    RemoveCandidate(waiter.entries()[waiter.blocked_at_]);
  } else {
    for (Entry& entry : waiter.entries()) RemoveCandidate(entry);
  }
}

void WaitQueue::Reorder(LockQueue& queue) {
  if (!queue.is_woken()) return;
  if (queue.candidates_.empty()) {
    Sleep(queue);
  } else if (const Order first = queue.candidates_.first()->order(); first != queue.woken_) {
    woken_.Remove(queue);
    queue.woken_ = first;
    woken_.Add(queue);
  }
}

void WaitQueue::WakeQueue(LockQueue& queue) {
  if (queue.is_woken() || queue.candidates_.empty()) return;
  queue.woken_ = queue.candidates_.first()->order();
  woken_.Add(queue);
}

void WaitQueue::Sleep(LockQueue& queue) {
  if (!queue.is_woken()) return;
  woken_.Remove(queue);
  queue.woken_ = Order{};
}

void WaitQueue::SetWakeTime(LockQueue& queue, Instant end) {
  if (queue.wakes_after_ == end) return;
  if (queue.wakes_after_ != LockQueue::kNotByTime) wake_times_.Remove(queue);
  queue.wakes_after_ = end;
  if (end != LockQueue::kNotByTime) wake_times_.Add(queue);
}

void WaitQueue::Block(Waiter& waiter, size_t index, std::optional<Instant> next_end) {
  TURNSTILE_DCHECK(index < waiter.size());
  Entry& entry = waiter.entries()[index];
  LockQueue& queue = *entry.queue_;
  if (!waiter.is_candidate_ || waiter.blocked_at_ != index) {
    RemoveCandidate(waiter);
    waiter.blocked_at_ = static_cast<uint32_t>(index);
    waiter.is_candidate_ = true;
    AddCandidate(entry);
  }
  if (queue.candidates_.first() == &entry) {
    Sleep(queue);
    SetWakeTime(queue, next_end.value_or(LockQueue::kNotByTime));
  } else if (next_end.has_value()) {
    // A waiter ahead is to be tried too: keep what was to wake it.
    NoteHoldEnd(queue, *next_end);
  }
}

void WaitQueue::Suspend(Waiter& waiter) {
  RemoveCandidate(waiter);
  waiter.blocked_at_ = Waiter::kNowhere;
  waiter.is_candidate_ = true;
  for (Entry& entry : waiter.entries()) {
    AddCandidate(entry);
    Sleep(*entry.queue_);
  }
}

void WaitQueue::NoteHoldEnd(LockName lock, Instant end) {
  LockQueue* queue = Find(lock);
  if (queue != nullptr && !queue->candidates_.empty()) NoteHoldEnd(*queue, end);
}

void WaitQueue::NoteHoldEnd(LockQueue& queue, Instant end) {
  if (end < queue.wakes_after_) SetWakeTime(queue, end);
}

void WaitQueue::Wake(LockName lock) {
  if (LockQueue* queue = Find(lock); queue != nullptr) WakeQueue(*queue);
}

void WaitQueue::WakeInEveryDatabase(std::string_view key) {
  for (auto& [number, of_db] : queues_) {
    if (LockQueue* queue = of_db.Find(key); queue != nullptr) WakeQueue(*queue);
  }
}

void WaitQueue::WakeAll(std::optional<int> db) {
  for (auto& [number, of_db] : queues_) {
    if (db.has_value() && number != *db) continue;
    of_db.ForEach([this](const auto& /*key*/, LockQueue& queue) { WakeQueue(queue); });
  }
}

size_t WaitQueue::WakeDue(Instant now, size_t most) {
  size_t woken = 0;
  for (; woken < most && !wake_times_.empty() && wake_times_.first()->wakes_after_ < now; ++woken) {
    LockQueue& queue = *wake_times_.first();
    SetWakeTime(queue, LockQueue::kNotByTime);
    WakeQueue(queue);
  }
  return woken;
}

WaitQueue::Waiter* WaitQueue::NextToTry(Instant now) {
  WakeDue(now, wake_times_.size());
  return woken_.empty() ? nullptr : woken_.first()->candidates_.first()->waiter_;
}

WaitQueue::Waiter* WaitQueue::FirstTimedOut(Tick now) const {
  Waiter* first = timeouts_.first();
  return first == nullptr || first->deadline_ > now ? nullptr : first;
}

std::optional<Tick> WaitQueue::NextTimeOut() const {
  return timeouts_.empty() ? std::nullopt : std::optional(timeouts_.first()->deadline_);
}

Due WaitQueue::NextDue() const {
  if (!woken_.empty()) return Due::AtOnce();
  return wake_times_.empty() ? Due::Never() : Due::At(After(wake_times_.first()->wakes_after_));
}

// --- Invariants ---------------------------------------------------------------------------------

bool WaitQueue::LockQueue::IsConsistent() const {
  const Entry* unshared = unshared_.first();
  const Entry* unlimited = unlimited_.first();
  size_t limits = 0;
  uint64_t weight = 0;
  for (const Entry* entry = first(); entry != nullptr; entry = entry->link_.after) {
    const Waiter& waiter = *entry->waiter_;
    const bool is_entry_of_waiter =
        entry >= waiter.entries_.get() && entry < waiter.entries_.get() + waiter.size();
    if (entry->queue_ != this || !is_entry_of_waiter) return false;
    if (entry->link_.after != nullptr && entry->link_.after->order() <= entry->order()) {
      return false;
    }
    const Mode mode = waiter.request_.mode;
    if (mode == Mode::kLimit) {
      ++limits;
      weight += waiter.request_.weight;
    }
    if (mode != Mode::kShared &&
        std::exchange(unshared, unshared->among_unshared_.after) != entry) {
      return false;
    }
    if (mode != Mode::kLimit &&
        std::exchange(unlimited, unlimited->among_unlimited_.after) != entry) {
      return false;
    }
  }
  if (limited_ != nullptr) {
    for (const auto& [limit, count] : limited_->limits) limits -= count;
    if (limited_->limits.empty() || limited_->weight != weight) return false;
  }
  for (const Entry* entry : candidates_.all()) {
    const Waiter& waiter = *entry->waiter_;
    const bool is_blocked_here =
        waiter.blocked_at_ == Waiter::kNowhere || &waiter.entries()[waiter.blocked_at_] == entry;
    if (!waiter.is_candidate_ || !is_blocked_here) return false;
  }
  return unshared == nullptr && unlimited == nullptr && limits == 0 && size() > 0 &&
         candidates_.IsConsistent() &&
         (!is_woken() || (!candidates_.empty() && woken_ == candidates_.first()->order()));
}

bool WaitQueue::IsConsistent() const {
  size_t entries_of_waiters = 0;
  for (const Waiter* waiter : timeouts_.all()) {
    entries_of_waiters += waiter->size();
    if (!waiter->is_queued()) return false;
  }
  bool is_consistent =
      timeouts_.IsConsistent() && woken_.IsConsistent() && wake_times_.IsConsistent();
  size_t queues = 0;
  size_t entries_of_queues = 0;
  size_t woken = 0;
  size_t with_wake_time = 0;
  for (const auto& [db, of_db] : queues_) {
    of_db.ForEach([&, in = db](const auto& key, const LockQueue& queue) {
      if (queue.lock_ != LockName{in, key} || !queue.IsConsistent()) is_consistent = false;
      ++queues;
      entries_of_queues += queue.size();
      if (queue.is_woken()) ++woken;
      if (queue.wakes_after_ != LockQueue::kNotByTime) ++with_wake_time;
    });
  }
  size_t nodes = 0;
  size_t entries_of_nodes = 0;
  nodes_.ForEach([&](const auto& /*owner*/, const OwnerNode& node) {
    size_t entries = 0;
    for (const Waiter* wait = node.waits.first(); wait != nullptr; wait = wait->of_owner_.after) {
      entries += wait->size();
    }
    if (entries != node.entries || entries == 0) is_consistent = false;
    ++nodes;
    entries_of_nodes += entries;
  });
  return is_consistent && entries_of_queues == entries_of_waiters &&
         entries_of_nodes == entries_of_waiters && queues == queue_count_ &&
         woken == woken_.size() && with_wake_time == wake_times_.size() &&
         node_list_.size() == nodes;
}

}  // namespace turnstile
