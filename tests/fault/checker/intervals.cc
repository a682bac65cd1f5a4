#include "fault/checker/intervals.h"

#include <algorithm>
#include <utility>

namespace turnstile::fault {

IntervalSet::IntervalSet(std::vector<Interval> intervals) : intervals_(std::move(intervals)) {
  if (intervals_.empty()) return;
  std::sort(intervals_.begin(), intervals_.end(),
            [](const Interval& a, const Interval& b) { return a.from < b.from; });
  auto last = intervals_.begin();
  for (auto next = std::next(last); next != intervals_.end(); ++next) {
    if (next->from <= last->until) {
      last->until = std::max(last->until, next->until);
    } else {
      *++last = *next;
    }
  }
  intervals_.erase(std::next(last), intervals_.end());
}

Time IntervalSet::LengthWithin(Time from, Time until) const {
  Time sum = 0;
  for (auto it = FirstEndingAfter(from); it != intervals_.end() && it->from < until; ++it) {
    sum += std::min(it->until, until) - std::max(it->from, from);
  }
  return sum;
}

Time IntervalSet::EndOfIntervalAt(Time time) const {
  const auto it = FirstEndingAfter(time);
  return it == intervals_.end() || it->from > time ? time : it->until;
}

IntervalSet::Iterator IntervalSet::FirstEndingAfter(Time time) const {
  return std::partition_point(intervals_.begin(), intervals_.end(),
                              [&](const Interval& interval) { return interval.until <= time; });
}

}  // namespace turnstile::fault
