#include "fault/checker/marks.h"

#include <algorithm>

namespace turnstile::fault {

void LockMarks::Assign(const std::vector<Mark>& marks, uint32_t lock) {
  forced_.clear();
  losses_.clear();
  steps_.clear();
  for (const Mark& mark : marks) {
    if (mark.lock != lock && mark.lock != kAllLocks) continue;
    if (mark.kind == Mark::Kind::kForced) forced_.push_back(&mark);
    if (mark.kind == Mark::Kind::kLossy) losses_.push_back(&mark);
    if (mark.kind == Mark::Kind::kStep) steps_.push_back(&mark);
  }
  std::sort(steps_.begin(), steps_.end(),
            [](const Mark* a, const Mark* b) { return a->begin < b->begin; });
}

bool LockMarks::Touch(const std::vector<const Mark*>& marks, Time since, Time until) {
  return std::any_of(marks.begin(), marks.end(),
                     [&](const Mark* mark) { return mark->begin <= until && mark->end >= since; });
}

bool LockMarks::MayBringLock(Time since, Time until) const {
  return std::any_of(forced_.begin(), forced_.end(), [&](const Mark* forced) {
    return forced->amount > 0 && forced->end >= since && forced->begin <= until;
  });
}

bool LockMarks::MayBeSetBack(Time since, Time until) const {
  return std::any_of(steps_.begin(), steps_.end(), [&](const Mark* step) {
    return step->amount < 0 && step->begin <= until && step->end >= since;
  });
}

Time LockMarks::EarliestEnd(Time from, Time until) const {
  Time earliest = until;
  for (const Mark* step : steps_) {
    if (step->amount > 0 && step->end >= from && step->begin <= until) earliest -= step->amount;
  }
  return earliest;
}

Time LockMarks::LatestEnd(Time from, Time until) const {
  for (const Mark* step : steps_) {
    const Time later = until - step->amount;
    if (later > until && step->end >= from && step->begin <= later) until = later;
  }
  return until;
}

}  // namespace turnstile::fault
