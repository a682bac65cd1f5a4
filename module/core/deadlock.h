// Deadlock detection: would a wait never end because it would close a cycle of waits?
//
// A waiting owner waits for other owners: for the holders of the lock that its request is not
// compatible with, and for the waiters ahead of it in the lock queue that it is not compatible
// with. A wait that would make an owner wait for itself, over any number of steps, must not begin.
// There is no edge between two requests with a limit, whether the other one holds the lock or waits
// ahead, because any other holder may free a place. Only a request whose weight is its limit, which
// must hold the lock alone, waits for every holder. A request waits for a lingering hold, but not
// for its owner: the hold ends by itself.
//
// Checking when a wait begins is sufficient, because a grant or a waiter that leaves only removes
// edges. There are two exceptions: SET or RENAME by another client, and a request with a limit that
// becomes a holder before a request that must hold the lock alone. Time-outs and leases break the
// cycles that these can create.
//
// The search runs forward from the new wait and visits each lock queue once. Only holders that are
// waiting themselves matter, so for a lock with many holders it either looks up the few waiting
// owners among the holders, or the holders among the waiting owners, whichever are fewer. The
// amount of work is bounded: if the bound is exceeded there is no verdict, the wait begins, and its
// time-out resolves any deadlock.

#ifndef TURNSTILE_CORE_DEADLOCK_H_
#define TURNSTILE_CORE_DEADLOCK_H_

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/decide.h"
#include "core/wait_queue.h"

namespace turnstile {

// Somebody waits for `lock`, and the one of the next step holds that lock or waits ahead in its
// queue. The step after the last is the first.
struct CycleStep {
  std::string name;  // the tag of the wait or of a hold, or else the owner: an owner is a proof
  LockName lock;
};

// Calls `see` with the key state of a lock. `see` must not keep it.
using ShowKeyState =
    std::function<void(LockName lock, const std::function<void(const KeyState&)>& see)>;

using IsLeaving = std::function<bool(const WaitQueue::Waiter&)>;

// Returns the shortest cycle of waits by which the owner of `waiter` waits for itself, starting
// with `waiter`; empty if there is none. `waiter` must already be queued. Waiters that are
// `leaving` are treated as if they had left; they must include all other waits of the owner for any
// of the same locks. The result contains views into the queue.
std::vector<CycleStep> FindCycle(const WaitQueue& queue, const WaitQueue::Waiter& waiter,
                                 const IsLeaving& leaving, Instant now, const ShowKeyState& show);

// The largest number of queue entries, and of holders, that a search visits.
inline constexpr size_t kMaxEntriesSearched = 10'000;
inline constexpr size_t kMaxHoldersSearched = 20'000;

// Describes a cycle, which must not be empty:
//
//     waiting for "b" would close the cycle worker-1 -> "b" -> worker-2 -> "a" -> worker-1
//
// Locks that are not `visible` to the reader, and the owners that hold them or wait ahead for them,
// appear as "?".
std::string DescribeCycle(const std::vector<CycleStep>& cycle,
                          const std::function<bool(LockName)>& visible);

}  // namespace turnstile

#endif  // TURNSTILE_CORE_DEADLOCK_H_
