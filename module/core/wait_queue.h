// Which calls wait for which locks, in which order, and which one to try next.
//
// There is one queue per lock (LockQueue), in order of arrival. A waiting call has an entry in the
// queue of every lock that it asks for. Entering and leaving a queue costs O(log n) in the number
// of waiters.
//
// The queue grants nothing. It returns the next waiter that may have a chance (NextToTry), and the
// caller decides that request exactly as it would decide a new one, so there is one grant rule, the
// one in decide.h. For a waiter that cannot be granted, the caller names the lock that blocks it
// (Block), and the waiter is not tried again before that lock's queue wakes: because the lock was
// freed, a lease ended, or a waiter ahead left. Waiters of queues that wake at the same time are
// tried in order of arrival over all queues, so tokens follow the order of arrival within every
// lock.
//
// While a lock blocks a waiter, all waiters behind it in that lock's queue are blocked too: nobody
// overtakes.
//
// A shared holder that waits for an upgrade to exclusive is placed ahead of all waiters that its
// shared hold already blocks: they could not be granted before it anyway, and behind them it would
// wait for ever.
//
// Order is determined by sequence numbers only, never by addresses or hashes: the same calls give
// the same history in every build.
//
// A waiting call costs less than a kilobyte, including a queue of its own if nobody else waits for
// its lock: there may be a hundred thousand.
//
// Rejected: trying every waiter of every woken queue. A call that waits for 65 locks was then tried
// 65 times for each call that left, against all waiters ahead of it in 65 queues: cubic. Rejected:
// a copy of the holders of each lock that has a queue. It made a wait cost as much as the lock has
// holders.

#ifndef TURNSTILE_CORE_WAIT_QUEUE_H_
#define TURNSTILE_CORE_WAIT_QUEUE_H_

#include <compare>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "core/decide.h"
#include "core/intrusive_heap.h"
#include "core/intrusive_list.h"
#include "core/keyed_hash.h"
#include "core/request.h"
#include "core/string_map.h"
#include "core/types.h"

namespace turnstile {

class WaitQueue {
 public:
  class LockQueue;
  class Waiter;
  struct OwnerNode;

  // The position of an entry: by arrival. An upgrade is just before the entry that it was placed
  // ahead of.
  struct Order {
    uint64_t arrival = 0;
    int32_t before = 0;  // zero or negative
    friend constexpr auto operator<=>(const Order&, const Order&) = default;
  };

  // A waiting call's entry in one queue.
  class Entry {
   public:
    Waiter& waiter() const { return *waiter_; }
    const Entry* behind() const { return link_.after; }

   private:
    friend class WaitQueue;
    friend class DeadlockSearch;

    Order order() const { return {arrival_, before_}; }

    Waiter* waiter_ = nullptr;
    LockQueue* queue_ = nullptr;
    uint64_t arrival_ = 0;  // its order
    int32_t before_ = 0;
    uint32_t among_candidates_ = 0;
    Link<Entry> link_;
    Link<Entry> among_unshared_;
    Link<Entry> among_unlimited_;
  };

  // One waiting call. Derived classes add how to reach the caller.
  class Waiter {
   public:
    // `client_id`: the connection that waits; 0 if it does not matter.
    Waiter(const AcquireRequest& request, Tick since, Tick deadline, uint64_t client_id = 0);
    Waiter(const Waiter&) = delete;
    Waiter& operator=(const Waiter&) = delete;

    // The request. Its owner is valid while the waiter is queued, its other texts always are.
    // `also` is empty: the locks are listed below.
    const AcquireRequest& request() const { return request_; }

    // The locks it waits for, in the order in which the caller named them.
    size_t size() const { return count_; }
    LockName lock(size_t index) const;
    bool WaitsFor(LockName lock) const;
    // The same for the lock of this queue, without comparing names, which may be long.
    bool IsIn(const LockQueue& queue) const;
    // The waiters ahead of this one in the queue of that lock, as far as they matter to its
    // request.
    WaitersAhead AheadOf(size_t index) const;
    // The index of the lock that was last found to block it, if any.
    std::optional<size_t> blocked_at() const {
      return blocked_at_ == kNowhere ? std::nullopt : std::optional<size_t>(blocked_at_);
    }

    Tick since() const { return since_; }
    Tick deadline() const { return deadline_; }
    uint64_t client_id() const { return client_id_; }
    bool is_queued() const { return count_ > 0; }

   private:
    friend class WaitQueue;
    friend class DeadlockSearch;

    static constexpr uint32_t kNowhere = std::numeric_limits<uint32_t>::max();

    std::span<Entry> entries() const { return {entries_.get(), count_}; }
    void SetEntries(std::unique_ptr<Entry[]> entries, size_t count) {
      entries_ = std::move(entries);
      count_ = static_cast<uint32_t>(count);
    }

    AcquireRequest request_;
    std::unique_ptr<char[]> texts_;  // of the request, but for the owner: one after the other
    Tick since_;
    Tick deadline_;
    uint64_t client_id_;
    uint64_t number_ = 0;  // unique among waiters, in order of Enter and TakeOver
    std::unique_ptr<Entry[]> entries_;
    uint32_t count_ = 0;
    uint32_t blocked_at_ = kNowhere;
    OwnerNode* node_ = nullptr;
    Link<Waiter> of_owner_;  // among all waits of the owner
    uint32_t among_timeouts_ = 0;
    bool is_candidate_ = false;  // in the queue of that lock, or in all its queues
  };

  // All waiters for one lock. Exists while there are any.
  class LockQueue {
   public:
    LockName lock() const { return lock_; }
    const Entry* first() const { return entries_.first(); }
    size_t size() const { return entries_.size(); }

    // The waiters that would be ahead of a new request. For an upgrade these are only the waiters
    // that its shared hold does not block. While the queue has deferred work, the waiters are
    // reported as compatible with no request: a new request must not be granted before them.
    WaitersAhead Ahead(bool upgrade, Instant now) const;

    // Whether a waiter that has not been tried yet may have a chance.
    bool has_deferred_work(Instant now) const { return is_woken() || wakes_after_ < now; }

    // See WaitQueue::IsConsistent.
    bool IsConsistent() const;

    // The time since which the longest-waiting call has been waiting. Checks only the front of the
    // queue, which contains that call unless many calls have taken over the entries of older ones.
    Tick waiting_since() const;

   private:
    friend class WaitQueue;
    friend class DeadlockSearch;

    // In order of their entries.
    struct EntryBefore {
      bool operator()(const Entry& a, const Entry& b) const { return a.order() < b.order(); }
    };
    // Those who wait with a limit.
    struct LimitedWaiters {
      std::map<uint32_t, size_t> limits;  // how many wait with each limit
      uint64_t weight = 0;
    };

    bool is_woken() const { return woken_ != Order{}; }
    void Insert(Entry& entry, bool upgrade);
    void Remove(Entry& entry);
    // Entries are counted by the requests of their waiters.
    void Count(const AcquireRequest& request);
    void Uncount(const AcquireRequest& request);

    LockName lock_;  // a view of the key by which this queue is found
    uint64_t number_ = 0;
    IntrusiveList<Entry, &Entry::link_> entries_;
    // The same without requests for a shared hold, and without requests with a limit: the waiters
    // that a request of that kind is not compatible with.
    UncountedList<Entry, &Entry::among_unshared_> unshared_;
    UncountedList<Entry, &Entry::among_unlimited_> unlimited_;
    std::unique_ptr<LimitedWaiters> limited_;  // null: none
    // The waiters that this lock is known to block, and those for which no blocking lock is known.
    IntrusiveHeap<Entry, &Entry::among_candidates_, EntryBefore> candidates_;
    Order woken_;  // its order among the woken queues; no arrival: it is not woken
    static constexpr Instant kNotByTime = Instant::max();
    Instant wakes_after_ = kNotByTime;  // it wakes after this time
    uint32_t among_woken_ = 0;
    uint32_t among_wake_times_ = 0;
    uint32_t with_other_entries_ = 0;  // how many have owners with more than one entry
    Link<LockQueue> of_same_size_;

    // Where the deadlock search of this number keeps its data about this queue.
    mutable uint32_t search_index_ = 0;
    mutable uint64_t searched_by_ = 0;
  };

  // An owner that waits.
  struct OwnerNode {
    Owner owner;  // a view of the key by which this node is found
    UncountedList<Waiter, &Waiter::of_owner_> waits;
    size_t entries = 0;    // of all its waits
    Link<OwnerNode> link;  // among all owner nodes, in order of arrival

    // How the deadlock search of this number reached this node: from which node, over which lock.
    mutable uint64_t reached_by = 0;
    mutable const OwnerNode* reached_from = nullptr;
    mutable const LockQueue* reached_over = nullptr;
  };

  explicit WaitQueue(const HashKey& key = {}) : hash_key_(key), nodes_(key) {}
  WaitQueue(const WaitQueue&) = delete;
  WaitQueue& operator=(const WaitQueue&) = delete;

  size_t size() const { return timeouts_.size(); }
  bool empty() const { return timeouts_.empty(); }

  // The queue of a lock, or null if nobody waits for it.
  LockQueue* Find(LockName lock);

  // The number of locks that have waiters.
  size_t queues() const { return queue_count_; }
  // The `most` longest queues of a database, longest first; queues of equal length are sorted by
  // name.
  std::vector<const LockQueue*> LongestQueues(int db, size_t most) const;

  // All waiters, in order of their deadlines.
  std::vector<Waiter*> Waiters() const;
  // The waiting calls of `owner` for any of `locks`.
  std::vector<Waiter*> FindWaiters(std::span<const LockName> locks, Owner owner);

  // Whether `waiter` waits for exactly `locks`, in any order, in this mode.
  static bool WaitsFor(const Waiter& waiter, std::span<const LockName> locks, Mode mode);

  // Adds `waiter` to the end of the queues of `locks`. An upgrade, which must be for one lock, is
  // placed ahead of all waiters that its shared hold blocks. The caller must have tried it, and
  // must then call Block or Suspend.
  void Enter(Waiter& waiter, std::span<const LockName> locks, Owner owner, bool upgrade);

  // Gives the entries of `older` to `newer`, which must wait for the same locks under the same
  // owner. The queues wake, because the newer call may ask for less than the older one.
  void TakeOver(Waiter& newer, Waiter& older);

  // Why a waiter leaves its queues.
  enum class LeaveReason {
    kGone,        // waiters behind it move up: the queues wake
    kHoldsAlone,  // it has become the only holder of its locks, which blocks all behind it
  };
  void Leave(Waiter& waiter, LeaveReason why = LeaveReason::kGone);

  // `waiter` was tried, and its lock `index` blocks it. No hold of that lock ends before
  // `next_end`; absent: no hold ends by itself.
  void Block(Waiter& waiter, size_t index, std::optional<Instant> next_end);
  // `waiter` was tried, and no lock blocks it, but nobody may become a holder now. Its queues sleep
  // until they are woken.
  void Suspend(Waiter& waiter);

  // A hold of the lock ends at `end`, which may be earlier than was known.
  void NoteHoldEnd(LockName lock, Instant end);

  // The lock may have changed in a way that allows a grant.
  void Wake(LockName lock);
  // The same for the lock of this name in every database.
  void WakeInEveryDatabase(std::string_view key);
  // The same for all locks of a database, or of all databases if `db` is absent.
  void WakeAll(std::optional<int> db);

  // Wakes up to `most` of the queues that are to wake by now. Returns how many.
  size_t WakeDue(Instant now, size_t most);
  // The earliest arrival among the waiters in woken queues that are not known to be blocked by
  // another lock; null if there is none. All queues that are to wake by now wake first. The caller
  // must try it, and then call Leave, Block or Suspend.
  Waiter* NextToTry(Instant now);

  // A waiter whose time-out has passed, or null. The caller must remove it.
  Waiter* FirstTimedOut(Tick now) const;
  // The time of the next time-out; none if nobody waits.
  std::optional<Tick> NextTimeOut() const;

  // When NextToTry will return a waiter; at once if a queue is awake.
  Due NextDue() const;

  // For tests: whether all redundant data structures agree. Checks everything.
  bool IsConsistent() const;

 private:
  friend class DeadlockSearch;

  // The queues of one database and of one length.
  struct SizeKey {
    int db;
    size_t size;
    friend constexpr auto operator<=>(const SizeKey&, const SizeKey&) = default;
  };
  using QueueList = IntrusiveList<LockQueue, &LockQueue::of_same_size_>;
  struct WokenBefore {
    bool operator()(const LockQueue& a, const LockQueue& b) const {
      return a.woken_ != b.woken_ ? a.woken_ < b.woken_ : a.number_ < b.number_;
    }
  };
  struct WakesBefore {
    bool operator()(const LockQueue& a, const LockQueue& b) const {
      return a.wakes_after_ != b.wakes_after_ ? a.wakes_after_ < b.wakes_after_
                                              : a.number_ < b.number_;
    }
  };
  struct TimesOutBefore {
    bool operator()(const Waiter& a, const Waiter& b) const {
      return a.deadline_ != b.deadline_ ? a.deadline_ < b.deadline_ : a.number_ < b.number_;
    }
  };

  LockQueue& QueueOf(LockName lock);
  OwnerNode& NodeOf(Owner owner);
  const OwnerNode* FindNode(Owner owner) const;
  void EraseIfIdle(OwnerNode& node);
  void Erase(LockQueue& queue);
  // Indexes the queue by its length.
  void AddToSizeIndex(LockQueue& queue);
  void RemoveFromSizeIndex(LockQueue& queue);
  // The only entry of an owner node that has exactly one.
  static Entry& OnlyEntry(const OwnerNode& node);

  // Makes the waiter of `entry` a candidate, to be tried when the queue wakes; or ends that.
  void AddCandidate(Entry& entry);
  void RemoveCandidate(Entry& entry);
  // Removes the waiter from the candidates of all its queues.
  void RemoveCandidate(Waiter& waiter);
  // Must be called when the first candidate of a woken queue may have changed.
  void Reorder(LockQueue& queue);
  void WakeQueue(LockQueue& queue);
  void Sleep(LockQueue& queue);
  void SetWakeTime(LockQueue& queue, Instant end);
  void NoteHoldEnd(LockQueue& queue, Instant end);

  HashKey hash_key_;
  std::map<int, StringMap<LockQueue>> queues_;  // by database and key
  std::map<SizeKey, QueueList> by_size_;
  StringMap<OwnerNode> nodes_;
  size_t queue_count_ = 0;
  size_t most_waiters_ = 0;  // since nobody waited
  IntrusiveList<OwnerNode, &OwnerNode::link> node_list_;
  IntrusiveHeap<LockQueue, &LockQueue::among_woken_, WokenBefore> woken_;
  IntrusiveHeap<LockQueue, &LockQueue::among_wake_times_, WakesBefore> wake_times_;
  IntrusiveHeap<Waiter, &Waiter::among_timeouts_, TimesOutBefore> timeouts_;
  uint64_t numbers_ = 0;           // given to waiters and queues
  mutable uint64_t searches_ = 0;  // for deadlocks
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_WAIT_QUEUE_H_
