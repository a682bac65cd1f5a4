// C1: clients that certainly hold a lock at the same time may do so together.
//
// Wrong is an overlap of certain holds (hold.h) of two owners, unless both read or both take some
// of a limited number; and more of the latter at once, by their weights, than the one named as its
// limit that was granted last: the highest token tells which, unless it was asked for as a floor or
// may have been replaced.
// Not wrong is what overlaps by a hold that only may still be there: owner.cc cuts a certain hold
// short as soon as something may have ended it.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "fault/checker/checks.h"

namespace turnstile::fault {
namespace {

struct Inside {
  const Hold* hold = nullptr;
  size_t op = 0;
  Time from = 0;
  Time until = 0;
};

// When each hold certainly keeps others out, by its beginning.
std::vector<Inside> FindInside(const std::vector<Hold>& holds) {
  std::vector<Inside> all;
  for (const Hold& hold : holds) {
    for (const CertainHold& certain : hold.certain) {
      if (certain.from >= certain.closed_until) continue;
      if (!all.empty() && all.back().hold == &hold && certain.from <= all.back().until) {
        all.back().until = std::max(all.back().until, certain.closed_until);
      } else {
        all.push_back({&hold, certain.op, certain.from, certain.closed_until});
      }
    }
  }
  std::sort(all.begin(), all.end(),
            [](const Inside& a, const Inside& b) { return a.from < b.from; });
  return all;
}

}  // namespace

void CheckExclusion(const LockHistory& lock, Report& report) {
  const std::vector<Inside> all = FindInside(lock.holds);
  std::vector<const Inside*> present;
  for (const Inside& next : all) {
    std::erase_if(present, [&](const Inside* other) { return other->until <= next.from; });
    size_t weight = next.hold->least_weight;
    const Hold* last = next.hold;
    bool undated = next.hold->undated;
    uint16_t largest = next.hold->limit;
    for (const Inside* other : present) {
      if (other->hold->owner == next.hold->owner) continue;
      weight += other->hold->least_weight;
      if (other->hold->token > last->token) last = other->hold;
      undated = undated || other->hold->undated;
      largest = std::max(largest, other->hold->limit);
      const bool alike =
          other->hold->sharing == next.hold->sharing && next.hold->sharing != Sharing::kExclusive;
      if (!alike) {
        report.Violated("C1", "two owners hold the lock that may not do so together",
                        {other->op, next.op});
      }
    }
    const uint16_t limit = undated ? largest : last->limit;
    if (next.hold->sharing == Sharing::kLimit && weight > limit && !present.empty()) {
      report.Violated("C1", "more of the lock is held than its limit allows",
                      {present.front()->op, next.op});
    }
    present.push_back(&next);
  }
}

}  // namespace turnstile::fault
