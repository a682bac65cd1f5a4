// Would a wait never end, because those it waits for wait for its own owner?
//
// Owners wait for owners: whoever stands in a line waits for those holders of the lock, and those
// ahead in the line, that it is not compatible with. A wait by which an owner would wait for
// itself, over any number of steps, must not begin. Between two requests with a limit there is no
// such edge, whether the other holds the lock or stands ahead: others may make room. Only a request
// that must be alone, LIMIT 1, waits for each holder. A hold that lingers is waited for, but its
// owner is not: it ends by itself.
//
// To check when a wait begins is enough: a grant and a leave only take edges away. (But for two
// ways: a stranger's SET or RENAME, and a request with a limit that becomes a holder before one
// that must be alone. Time-outs and leases open such a cycle again.)
//
// The search goes forward from the new wait and looks at each line once. It only needs holders that
// wait themselves, so a lock of many holders is asked for the few owners that wait, or the other
// way round, whichever are fewer. What it visits is bounded: beyond that there is no verdict, the
// wait begins, and its time-out answers.

#ifndef TURNSTILE_CORE_DEADLOCK_H_
#define TURNSTILE_CORE_DEADLOCK_H_

#include <functional>
#include <span>
#include <string>
#include <vector>

#include "core/decide.h"
#include "core/wait_queue.h"

namespace turnstile {

// `owner` waits for `lock`; the owner of the next step, or of the first after the last, holds it or
// stands before.
struct CycleStep {
  Owner owner;
  LockName lock;
};

// Shows what the key of a lock holds to `see`, which does not keep it.
using ShowPlace = std::function<void(LockName lock, const std::function<void(const Place&)>& see)>;

// The steps by which the owner of `waiter`, which is in line, waits for itself since that wait
// began: the fewest, that wait first. Empty if it does not. The waits of `ignored` are taken for
// gone; all other waits of the owner for any of the same locks must be among them. Views into the
// queue.
std::vector<CycleStep> FindCycle(WaitQueue& queue, const WaitQueue::Waiter& waiter,
                                 std::span<WaitQueue::Waiter* const> ignored, Instant now,
                                 const ShowPlace& show);

// How many places in lines, and how many holders, a search visits at most.
inline constexpr size_t kMostPlacesSearched = 10'000;
inline constexpr size_t kMostHoldersSearched = 20'000;

// For a cycle, which is not empty:
// "waiting for "b" would close the cycle worker-1 -> "b" -> worker-2 -> "a" -> worker-1". Locks
// that are not `visible` to the reader, and those who hold them or stand before, appear as "?".
std::string DescribeCycle(const std::vector<CycleStep>& cycle,
                          const std::function<bool(LockName)>& visible);

}  // namespace turnstile

#endif  // TURNSTILE_CORE_DEADLOCK_H_
