// Intervals of time, from `from` up to `until`, which is not part of them.

#ifndef TURNSTILE_TESTS_FAULT_CHECKER_INTERVALS_H_
#define TURNSTILE_TESTS_FAULT_CHECKER_INTERVALS_H_

#include <vector>

#include "fault/history.h"

namespace turnstile::fault {

struct Interval {
  Time from = 0;
  Time until = 0;
};

// A union of intervals, kept as disjoint intervals in the order of time.
class IntervalSet {
 public:
  using Iterator = std::vector<Interval>::const_iterator;

  IntervalSet() = default;
  explicit IntervalSet(std::vector<Interval> intervals);  // in any order, overlapping or not

  // How much of the time from `from` to `until` is in the set.
  Time LengthWithin(Time from, Time until) const;

  // `time` itself, or the end of the interval that it lies in.
  Time EndOfIntervalAt(Time time) const;

  Iterator FirstEndingAfter(Time time) const;
  Iterator end() const { return intervals_.end(); }

 private:
  std::vector<Interval> intervals_;
};

}  // namespace turnstile::fault

#endif  // TURNSTILE_TESTS_FAULT_CHECKER_INTERVALS_H_
