#include "fault/checker/hold.h"

#include <algorithm>

namespace turnstile::fault {
namespace {

void Lower(Time& time, Time bound) { time = std::min(time, bound); }

}  // namespace

bool Hold::IsCertainThrough(const Operation& op) const {
  return std::any_of(certain.rbegin(), certain.rend(), [&](const CertainHold& interval) {
    return interval.from <= op.sent && op.answered < interval.entitled_until;
  });
}

void Hold::GiveUp(Time now, Time closed_until) {
  for (CertainHold& interval : certain) {
    Lower(interval.until, now);
    Lower(interval.closed_until, closed_until);
    Lower(interval.entitled_until, now);
  }
}

void Hold::EndLinger(Time now) {
  for (CertainHold& interval : certain) {
    Lower(interval.closed_until, std::max(interval.until, now));
  }
}

void Hold::Shorten(Time until) {
  for (CertainHold& interval : certain) {
    Lower(interval.until, std::max(interval.from, until));
    Lower(interval.closed_until, interval.until);
    Lower(interval.entitled_until, interval.until);
  }
}

void Hold::ReplaceLease(Time sent, Time until, Time closed_until) {
  for (CertainHold& interval : certain) {
    Lower(interval.until, std::max(until, sent));
    Lower(interval.closed_until, std::max(closed_until, sent));
    Lower(interval.entitled_until, interval.until);
  }
}

}  // namespace turnstile::fault
