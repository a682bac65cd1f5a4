#include "core/deadlock.h"

#include <algorithm>
#include <deque>
#include <optional>
#include <unordered_map>

namespace turnstile {

// Searches breadth first over owners, so that the first path to each has the fewest steps.
class DeadlockSearch {
 public:
  using LockQueue = WaitQueue::LockQueue;
  using OwnerNode = WaitQueue::OwnerNode;
  using Waiter = WaitQueue::Waiter;

  DeadlockSearch(const WaitQueue& queue, const Waiter& waiter, const IsLeaving& leaving,
                 Instant now, const ShowKeyState& show)
      : queue_(queue),
        waiter_(waiter),
        self_(*waiter.node_),
        is_leaving_(leaving),
        now_(now),
        show_(show),
        number_(++queue.searches_) {}

  std::vector<CycleStep> Find() {
    ReachFrom(waiter_, nullptr);
    for (size_t i = 0; i < reached_.size() && !Done(); ++i) {
      const OwnerNode& node = *reached_[i];
      for (const Waiter* wait = node.waits.first(); wait != nullptr && !Done();
           wait = wait->of_owner_.after) {
        if (!is_leaving_(*wait)) ReachFrom(*wait, &node);
      }
    }
    return Steps();
  }

 private:
  // An entry in a queue of the WaitQueue.
  using Entry = WaitQueue::Entry;

  // What the search knows about a lock queue.
  struct QueueInfo {
    std::optional<Mode> held;  // in which mode the lock is held, if at all
    std::vector<const OwnerNode*> waiting_holders;
    std::unordered_map<const OwnerNode*, std::string> tags{};  // of their holds
    bool reached_holders = false;
    // How far each of the three lists of the queue has been walked; null: not at all.
    const Entry* all = nullptr;
    const Entry* unshared = nullptr;
    const Entry* unlimited = nullptr;
  };

  bool IsReached(const OwnerNode& node) const { return node.reached_by == number_; }
  bool Done() const { return IsReached(self_) || gave_up_; }

  void ReachFrom(const Waiter& wait, const OwnerNode* from) {
    for (const Entry& entry : wait.entries()) {
      if (++entries_visited_ > kMaxEntriesSearched) gave_up_ = true;
      if (Done()) return;
      ReachHolders(entry, from);
      ReachThoseAhead(entry, from);
    }
  }

  // `from`: null for the new wait itself.
  void Reach(const OwnerNode& node, const OwnerNode* from, const LockQueue& over) {
    if (IsReached(node)) return;
    node.reached_by = number_;
    node.reached_from = from;
    node.reached_over = &over;
    reached_.push_back(&node);
  }

  static bool ConflictsWithHolders(const AcquireRequest& request, Mode held) {
    if (request.mode != held || held == Mode::kExclusive) return true;
    return held == Mode::kLimit && request.weight == request.limit;
  }

  void ReachHolders(const Entry& entry, const OwnerNode* from) {
    const Waiter& wait = *entry.waiter_;
    QueueInfo& info = InfoOf(*entry.queue_);
    if (!info.held.has_value() || !ConflictsWithHolders(wait.request_, *info.held)) return;
    const LockQueue& over = *entry.queue_;
    if (!info.reached_holders) {
      info.reached_holders = true;
      for (const OwnerNode* holder : info.waiting_holders) {
        // The waiter's own hold, as in an upgrade, does not block it; but it blocks others.
        if (holder != wait.node_) Reach(*holder, from, over);
      }
    } else if (wait.node_ != &self_ && Holds(info, self_)) {
      Reach(self_, from, over);
    }
  }

  static bool Holds(const QueueInfo& info, const OwnerNode& node) {
    return std::find(info.waiting_holders.begin(), info.waiting_holders.end(), &node) !=
           info.waiting_holders.end();
  }

  QueueInfo& InfoOf(const LockQueue& lock_queue) {
    if (lock_queue.searched_by_ == number_) return infos_[lock_queue.search_index_];
    lock_queue.searched_by_ = number_;
    lock_queue.search_index_ = static_cast<uint32_t>(infos_.size());
    QueueInfo& info = infos_.emplace_back();
    show_(lock_queue.lock_,
          [this, &info](const KeyState& state) { FindWaitingHolders(state, info); });
    return info;
  }

  void FindWaitingHolders(const KeyState& key_state, QueueInfo& info) {
    if (key_state.plain.has_value() && key_state.plain->LiveAt(now_)) {
      info.held = Mode::kExclusive;
      CountHolders(1);
      AddHolder(queue_.FindNode(Owner{key_state.plain->value}), "", info);
    }
    if (key_state.lock == nullptr) return;
    const Lock& lock = *key_state.lock;
    info.held = lock.mode();
    CountHolders(std::min(lock.size(), queue_.node_list_.size()));
    if (gave_up_) return;
    if (lock.size() <= queue_.node_list_.size()) {
      for (size_t i = 0; i < lock.size(); ++i) {
        const Hold hold = lock.at(Lock::Order::kByOwner, i);
        if (hold.LiveAt(now_)) AddHolder(queue_.FindNode(hold.owner), hold.tag, info);
      }
      return;
    }
    for (const OwnerNode* node = queue_.node_list_.first(); node != nullptr;
         node = node->link.after) {
      const std::optional<Hold> hold = lock.Find(node->owner);
      if (hold.has_value() && hold->LiveAt(now_)) AddHolder(node, hold->tag, info);
    }
  }

  void AddHolder(const OwnerNode* node, std::string_view tag, QueueInfo& info) {
    if (node == nullptr) return;
    info.waiting_holders.push_back(node);
    if (!tag.empty()) info.tags.emplace(node, tag);
  }

  // Walks from the front through the waiters that the request is not compatible with. Where an
  // earlier walk through the same list has been, all owners have been reached.
  void ReachThoseAhead(const Entry& entry, const OwnerNode* from) {
    const LockQueue& lock_queue = *entry.queue_;
    QueueInfo& info = InfoOf(lock_queue);
    const bool holds_itself = Holds(info, self_);
    switch (entry.waiter_->request_.mode) {
      case Mode::kExclusive:
        Walk(lock_queue.entries_, &Entry::link_, info.all, holds_itself, entry, from);
        break;
      case Mode::kShared:
        Walk(lock_queue.unshared_, &Entry::among_unshared_, info.unshared, holds_itself, entry,
             from);
        break;
      case Mode::kLimit:
        Walk(lock_queue.unlimited_, &Entry::among_unlimited_, info.unlimited, holds_itself, entry,
             from);
        break;
    }
  }

  template <typename List>
  void Walk(const List& list, Link<Entry> Entry::*link, const Entry*& walked, bool holds_itself,
            const Entry& entry, const OwnerNode* from) {
    const LockQueue& lock_queue = *entry.queue_;
    // Owners whose only entry is in this queue lead only to its holders, so visiting any one of
    // them is enough. But only a waiter that is not compatible with the owner's own hold leads back
    // to it.
    const bool is_self = entry.waiter_ == &waiter_;
    const size_t own = is_self && self_.entries > 1 ? 1 : 0;
    const bool lead_to_holders = lock_queue.with_other_entries_ == own;
    const bool behind_self = lead_to_holders && !is_self && IsBehindSelf(entry);
    if (behind_self && ConflictsWithSelf(entry)) Reach(self_, from, lock_queue);
    // A waiter behind the new wait that does not conflict with it may conflict with one between
    // them that does.
    const bool one_will_do =
        lead_to_holders && !(is_self && holds_itself) && (!behind_self || ConflictsWithSelf(entry));
    const Entry* next = walked == nullptr ? list.first() : (walked->*link).after;
    for (; next != nullptr && next->order() < entry.order() && !gave_up_;
         next = (next->*link).after) {
      if (++entries_visited_ > kMaxEntriesSearched) gave_up_ = true;
      walked = next;
      const Waiter& ahead = *next->waiter_;
      if (is_leaving_(ahead) || ahead.node_ == entry.waiter_->node_) continue;
      Reach(*ahead.node_, from, lock_queue);
      if (one_will_do) break;
    }
  }

  // Whether `entry` is behind the new wait, which must be the only one of its owner; and whether
  // the new wait blocks it there.
  bool IsBehindSelf(const Entry& entry) const {
    const Entry& own = waiter_.entries().front();
    return own.queue_ == entry.queue_ && own.order() < entry.order();
  }
  bool ConflictsWithSelf(const Entry& entry) const {
    const Mode mode = entry.waiter_->request_.mode;
    return mode == Mode::kExclusive || mode != waiter_.request_.mode;
  }

  void CountHolders(size_t count) {
    holders_visited_ += count;
    if (holders_visited_ > kMaxHoldersSearched) gave_up_ = true;
  }

  // How a step names who waits for `lock`: the new wait if `node` is null, or an owner.
  std::string NameOf(const OwnerNode* node, LockName lock) const {
    if (node == nullptr) {
      if (!waiter_.request_.tag.empty()) return std::string(waiter_.request_.tag);
      node = &self_;
    }
    for (const Waiter* wait = node->waits.first(); wait != nullptr; wait = wait->of_owner_.after) {
      const std::string_view tag = wait->request_.tag;
      if (!tag.empty() && !is_leaving_(*wait) && wait->WaitsFor(lock)) return std::string(tag);
    }
    // The tag of its hold of the lock over which it was reached: whoever may read the one may read
    // the other.
    const auto& tags = infos_[node->reached_over->search_index_].tags;
    const auto of_hold = tags.find(node);
    return of_hold == tags.end() ? std::string(node->owner.bytes) : of_hold->second;
  }

  // The path back from the owner itself; empty if it was not reached.
  std::vector<CycleStep> Steps() const {
    std::vector<CycleStep> steps;
    if (!IsReached(self_)) return steps;
    const OwnerNode* node = &self_;
    do {
      const OwnerNode* from = node->reached_from;
      const LockName lock = node->reached_over->lock_;
      steps.push_back({NameOf(from, lock), lock});
      node = from;
    } while (node != nullptr);
    std::reverse(steps.begin(), steps.end());
    return steps;
  }

  const WaitQueue& queue_;
  const Waiter& waiter_;
  const OwnerNode& self_;
  const IsLeaving& is_leaving_;
  Instant now_;
  const ShowKeyState& show_;
  uint64_t number_;
  std::deque<QueueInfo> infos_;
  std::vector<const OwnerNode*> reached_;
  size_t entries_visited_ = 0;
  size_t holders_visited_ = 0;
  bool gave_up_ = false;
};

std::vector<CycleStep> FindCycle(const WaitQueue& queue, const WaitQueue::Waiter& waiter,
                                 const IsLeaving& leaving, Instant now, const ShowKeyState& show) {
  return DeadlockSearch(queue, waiter, leaving, now, show).Find();
}

std::string DescribeCycle(const std::vector<CycleStep>& cycle,
                          const std::function<bool(LockName)>& visible) {
  constexpr size_t kShown = 8;
  const auto lock_text = [&](LockName lock) { return visible(lock) ? Quoted(lock.key) : "?"; };
  std::string text = "waiting for " + lock_text(cycle.front().lock) + " would close the cycle ";
  for (size_t i = 0; i < cycle.size() && i < kShown; ++i) {
    const bool known = i == 0 || visible(cycle[i - 1].lock);
    text += (known ? Unquoted(cycle[i].name) : "?") + " -> " + lock_text(cycle[i].lock);
    text += " -> ";
  }
  if (cycle.size() > kShown) text += "... -> ";
  return text + Unquoted(cycle.front().name);
}

}  // namespace turnstile
