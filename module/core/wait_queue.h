// Who waits for which lock, in which order, and who would wait for whom in a circle.
//
// One line a lock, in order of arrival. A place in a line costs O(1) to enter, to leave and to be
// granted: lines are intrusive lists of waiters that the caller owns. Only what is due at some time
// (time-outs, ends of holds) is kept in order, in two ordered sets.
//
// The queue grants nothing. It says which lines may have a new holder (they were *woken*: the lock
// was freed, a lease ended, somebody left the line) and who stands first; the caller decides that
// request exactly as it decides a newcomer's, and takes the waiter out. So there is one grant rule,
// the one in lock.h; and nobody overtakes, because newcomers are told that others wait.
//
// Deadlocks. Owners wait for owners: whoever stands in a line waits for the lock's holder and for
// everybody ahead. A wait by which an owner would wait for itself, over any number of steps, must
// not begin. Nobody can wait for an owner that neither holds a lock with a line nor stands in one:
// for nearly all callers the check is that one look-up. Checking when a wait begins is enough: a
// grant and a leave only take edges away. (A stranger's SET or RENAME can still close a cycle; the
// leases open it again.)
//
// The holder of a lock with a line is remembered here, with the end of its hold, and the caller
// keeps that true (SetHolder); so the search needs to look at no key.

#ifndef TURNSTILE_CORE_WAIT_QUEUE_H_
#define TURNSTILE_CORE_WAIT_QUEUE_H_

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/intrusive_list.h"
#include "core/request.h"
#include "core/types.h"

namespace turnstile {

// A lock of this server. A view: whoever keeps it copies it.
struct LockName {
  int db = 0;
  std::string_view key;
  friend constexpr bool operator==(LockName, LockName) = default;
};

class WaitQueue {
 public:
  class Line;
  struct Party;  // an owner that waits, or that somebody waits for

  // One waiting call. Derive from it to say how to reach the caller.
  class Waiter {
   public:
    Waiter(Millis lease, Instant since, Instant deadline)
        : lease_(lease), since_(since), deadline_(deadline) {}
    Waiter(const Waiter&) = delete;
    Waiter& operator=(const Waiter&) = delete;

    // What is asked for, and of which lock. Only while the waiter stands in a line.
    AcquireRequest request() const;
    LockName lock() const;

    Instant since() const { return since_; }
    Instant deadline() const { return deadline_; }
    bool in_line() const { return line_ != nullptr; }
    const Waiter* behind() const { return place_.after; }

   private:
    friend class WaitQueue;

    Millis lease_;
    Instant since_;
    Instant deadline_;
    Line* line_ = nullptr;
    Link<Waiter> place_;  // among all who wait for the lock
    Party* party_ = nullptr;
    Link<Waiter> of_party_;  // among all waits of the owner
    uint64_t seen_ = 0;      // the last search that came past
  };

  // All who wait for one lock. Exists while somebody does.
  class Line {
   public:
    LockName lock() const { return lock_; }
    Waiter* first() const { return waiters_.first(); }
    size_t size() const { return waiters_.size(); }

   private:
    friend class WaitQueue;

    LockName lock_;  // a view of the key that this line is found by
    IntrusiveList<Waiter, &Waiter::place_> waiters_;
    Party* holder_ = nullptr;
    Instant holder_end_;    // meaningless without a holder
    Link<Line> of_holder_;  // among all lines whose locks the holder holds
  };

  // `owner` waits for `lock`; the owner of the next step, or of the first after the last, holds it
  // or stands before.
  struct Step {
    Owner owner;
    LockName lock;
  };

  WaitQueue() = default;
  WaitQueue(const WaitQueue&) = delete;
  WaitQueue& operator=(const WaitQueue&) = delete;

  size_t size() const { return timeouts_.size(); }
  bool empty() const { return timeouts_.empty(); }

  // The line of a lock, or null if nobody waits for it.
  Line* Find(LockName lock);

  // The locks that somebody waits for, of one database or of all.
  std::vector<LockName> Locks(std::optional<int> db) const;

  // The waiting call of `owner` for `lock`, or null.
  Waiter* FindWaiter(LockName lock, Owner owner);

  // The steps by which `owner` would wait for itself if it began to wait for `lock`, held by
  // `holder`: the fewest, that wait first. Empty if it would not. Views into the arguments and into
  // the queue.
  std::vector<Step> FindCycle(Owner owner, LockName lock, std::optional<Owner> holder, Instant now);

  // Puts `waiter` at the end of the line. A line that did not exist has no holder yet: SetHolder.
  void Enter(Waiter& waiter, LockName lock, Owner owner);

  // Puts `newer` into the place of `older`, a waiter for the same lock under the same owner.
  void TakeOver(Waiter& newer, Waiter& older);

  // Takes `waiter` out. Those behind move up: the line, if there still is one, wakes.
  void Leave(Waiter& waiter);

  // `owner` holds the lock until `end`, or nobody does. The line wakes when the hold is over; it
  // wakes at once when nobody holds. Nothing happens if nobody waits for the lock.
  void SetHolder(LockName lock, std::optional<Owner> owner, Instant end);

  // The lock may have changed in ways that only a look at it can tell.
  void Wake(LockName lock);

  // A woken line, or null. It stays woken until its last waiter has left or it is called settled.
  Line* FirstWoken(Instant now);

  // The lock was looked at, and whoever stands first must go on waiting.
  void Settled(LockName lock);

  // A waiter whose time is over, or null. The caller takes it out.
  Waiter* FirstTimedOut(Instant now) const;

  // The moment at which there is something to do without anything happening before; kMaxInstant if
  // there is none. A woken line makes it `kMinInstant`.
  Instant NextDue() const;

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
  };
  template <typename Value>
  using ByText = std::unordered_map<std::string, Value, Hash, std::equal_to<>>;

  Party& PartyOf(Owner owner);
  Party* FindParty(Owner owner);
  void DropIfIdle(Party& party);
  void Drop(Line& line);
  void ClearHolder(Line& line);

  std::unordered_map<int, ByText<Line>> lines_;  // by database and key
  ByText<Party> parties_;
  std::unordered_set<Line*> woken_;
  std::set<std::pair<Instant, Line*>> ends_;  // of the holds of lines
  std::set<std::pair<Instant, Waiter*>> timeouts_;
  uint64_t searches_ = 0;
};

struct WaitQueue::Party {
  Owner owner;  // a view of the key that this party is found by
  IntrusiveList<Waiter, &Waiter::of_party_> waits;
  IntrusiveList<Line, &Line::of_holder_> held;

  // How the search numbered `seen` came here: by which waiting party, over which lock.
  uint64_t seen = 0;
  const Party* reached_from = nullptr;
  LockName reached_over;
};

// For a cycle, which is not empty:
// "waiting for "b" would close the cycle worker-1 -> "b" -> worker-2 -> "a" -> worker-1". Locks
// that are not `visible` to the reader, and those who hold them or stand before, appear as "?".
std::string DescribeCycle(const std::vector<WaitQueue::Step>& cycle,
                          const std::function<bool(LockName)>& visible);

}  // namespace turnstile

#endif  // TURNSTILE_CORE_WAIT_QUEUE_H_
