// Says whether a history is one that the contract allows. Linear but for sorting, because tokens
// give the order of grants.
//
//   C1  Clients that certainly hold a lock at the same time may do so together.
//   C2  A register that keeps the highest token it was shown never refuses a rightful holder; the
//       server refuses no rightful holder, tells none that its hold is lost, and obeys nobody who
//       has been replaced, or whose hold is over.
//   C3  The token of a new hold is above every token of the lock that was told before it was asked
//       for, is nobody else's, is not below a floor that was asked for, and is below 2^53.
//   C4  Every wait ends by its time-out plus a second. A lock that is surely free and waited for
//       is granted in a tenth of a second, and so is a reader whom no writer keeps waiting.
//   C5  Who surely came first is served first, and nobody stands in a line that is too long for it.
//   C6  Who asks again gets the same token or a newer one. Nobody releases more often than it
//       acquired, and a stranger releases nothing.
//
// C7 (copies agree) and C8 (nothing crashes or leaks) are not about histories: who runs the servers
// checks them and reports them as violations of the same kind.

#ifndef TURNSTILE_TESTS_FAULT_CHECKER_CHECKER_H_
#define TURNSTILE_TESTS_FAULT_CHECKER_CHECKER_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "fault/checker/exemptions.h"
#include "fault/history.h"

namespace turnstile::fault {

struct Rules {
  // A server counts leases in whole milliseconds, and may read its clock a moment before a client's
  // request: a lease may seem this much shorter.
  Time lease_slack = 2 * kMillisecond;
  Time wait_slack = kSecond;
  Time idle_limit = 100 * kMillisecond;
  // Two answers that were sent in this order may be read in another one.
  Time order_slack = 20 * kMillisecond;
  Exemptions exemptions = {};
};

struct Violation {
  std::string check;  // "C1"
  std::string text;
  uint32_t lock = kAllLocks;
  Time when = 0;
  std::vector<size_t> operations;  // that show it: indices into the history
};

struct Findings {
  std::vector<Violation> violations;  // by time, then by check
  size_t operations = 0;
  size_t holds = 0;       // of which a client was told
  size_t waits = 0;       // answers that were waited for
  size_t ordered = 0;     // grants whose order of arrival was known
  size_t writes = 0;      // shown to the register,
  size_t refused = 0;     // and refused by it, each rightly
  Time longest_late = 0;  // an answer after its time-out
  Time longest_idle = 0;  // a free lock that was waited for
};

Findings Check(const History& history, const Rules& rules = {});

// The operations on that lock around the violation and the marks that touch it, in order, with
// those that show the violation pointed out; at most so many lines.
std::string Story(const History& history, const Violation& violation, size_t lines = 40);

}  // namespace turnstile::fault

#endif  // TURNSTILE_TESTS_FAULT_CHECKER_CHECKER_H_
