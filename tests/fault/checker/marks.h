// What was done to one lock and to its servers: the marks of a history that matter to it.

#ifndef TURNSTILE_TESTS_FAULT_CHECKER_MARKS_H_
#define TURNSTILE_TESTS_FAULT_CHECKER_MARKS_H_

#include <cstdint>
#include <vector>

#include "fault/history.h"

namespace turnstile::fault {

class LockMarks {
 public:
  void Assign(const std::vector<Mark>& marks, uint32_t lock);

  // Whether writes of that time may have been lost, so that older data may be back.
  bool MayBeOlderData(Time since, Time until) const { return Touch(losses_, since, until); }

  // Whether a stranger may have removed or replaced the lock in that time.
  bool MayBeForced(Time since, Time until) const { return Touch(forced_, since, until); }

  // Whether another client may have brought a lock from elsewhere in that time.
  bool MayBringLock(Time since, Time until) const;

  // Whether a clock may have been set back in that time.
  bool MayBeSetBack(Time since, Time until) const;

  // How much earlier than `until` a lease may end that was to last from `from` until then: clocks
  // may have been set forward meanwhile.
  Time EarliestEnd(Time from, Time until) const;

  // How long a lease may last that was to last from `from` until `until`: clocks may have been set
  // back meanwhile, or later so far that it is live again.
  Time LatestEnd(Time from, Time until) const;

  const std::vector<const Mark*>& forced() const { return forced_; }
  const std::vector<const Mark*>& losses() const { return losses_; }

 private:
  static bool Touch(const std::vector<const Mark*>& marks, Time since, Time until);

  std::vector<const Mark*> forced_;
  std::vector<const Mark*> losses_;
  std::vector<const Mark*> steps_;  // in the order of time
};

}  // namespace turnstile::fault

#endif  // TURNSTILE_TESTS_FAULT_CHECKER_MARKS_H_
