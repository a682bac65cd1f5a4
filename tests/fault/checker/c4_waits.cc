// C4: every wait ends by its time-out plus a second. A lock that is surely free and waited for is
// granted in a tenth of a second, and so is a reader whom no writer keeps waiting.
//
// Surely free is a lock that nobody may hold: no hold that was told, at its longest; nobody who was
// not told; no stranger; nobody who waits for this and other locks at once, which keeps those
// behind it waiting. To readers it is free while no writer may hold it or waits. Not wrong is what
// takes time while the servers serve nobody.

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "fault/checker/checks.h"

namespace turnstile::fault {
namespace {

// When somebody may hold the lock.
class Occupancy {
 public:
  explicit Occupancy(const LockHistory& lock) {
    for (const LockHistory::UntoldHold& untold : lock.untold_holds) {
      Add(untold.interval, untold.sharing);
    }
    for (const size_t i : lock.indices) {
      const Operation& op = lock.ops[i];
      if (op.verb != Verb::kAcquire) continue;
      if (op.several) Add({op.sent, op.answered}, Sharing::kExclusive);
      if (op.sharing != Sharing::kShared) not_by_readers_.push_back({op.sent, op.answered});
    }
    if (lock.Excuses(Exemption::kStrangerMayHold)) {
      for (const Mark* forced : lock.marks.forced()) {
        Add({forced->begin, lock.LatestEnd(forced->begin, forced->end + forced->amount)},
            Sharing::kExclusive);
      }
    }
    for (const Hold& hold : lock.holds) {
      // A server tells of a hold as soon as there is one.
      const Operation& told = lock.ops[hold.told_by];
      const bool held_back = !told.direct && lock.Excuses(Exemption::kGrantMayBeHeldBack);
      const bool may_write = hold.may_write && lock.Excuses(Exemption::kReaderMayWrite);
      Add({held_back ? told.sent : told.answered, hold.possible_until},
          may_write ? Sharing::kExclusive : hold.sharing);
    }
  }

  IntervalSet ForReaders() { return IntervalSet(std::move(not_by_readers_)); }
  IntervalSet ForOthers() { return IntervalSet(std::move(by_anybody_)); }

 private:
  void Add(Interval interval, Sharing sharing) {
    by_anybody_.push_back(interval);
    if (sharing != Sharing::kShared) not_by_readers_.push_back(interval);
  }

  std::vector<Interval> by_anybody_;
  std::vector<Interval> not_by_readers_;
};

// The longest time for which `op` waited at a stretch while the lock was free, or the first such
// time that is too long.
Time IdleTime(const LockHistory& lock, const Operation& op, const IntervalSet& busy) {
  Time longest = 0;
  auto next = busy.FirstEndingAfter(op.sent);
  for (Time from = op.sent; from < op.answered && longest <= lock.rules.idle_limit;) {
    const Time until = next == busy.end() ? op.answered : std::min(next->from, op.answered);
    const Time excused = lock.Excuses(Exemption::kNoGrantWhileUnavailable)
                             ? lock.unavailable.LengthWithin(from, until)
                             : 0;
    longest = std::max(longest, until - from - excused);
    if (next == busy.end()) break;
    from = std::max(from, next->until);
    ++next;
  }
  return longest;
}

}  // namespace

void CheckWaits(const LockHistory& lock, Report& report) {
  for (const size_t i : lock.indices) {
    const Operation& op = lock.ops[i];
    if (!IsRequest(op)) continue;
    if (op.verb == Verb::kAcquire && op.wait > 0 && IsAnswered(op)) ++report.findings.waits;
    const Time excused = lock.Excuses(Exemption::kNoAnswerWhileUnavailable)
                             ? lock.unavailable.LengthWithin(op.sent, op.answered)
                             : 0;
    const Time late = op.answered - op.sent - op.wait - excused;
    report.findings.longest_late = std::max(report.findings.longest_late, late);
    if (late > lock.rules.wait_slack) report.Violated("C4", "no answer in time", {i});
  }
}

void CheckIdleness(const LockHistory& lock, Report& report) {
  Occupancy occupancy(lock);
  const IntervalSet busy = occupancy.ForOthers();
  const IntervalSet busy_for_readers = occupancy.ForReaders();
  for (const size_t i : lock.indices) {
    const Operation& op = lock.ops[i];
    if (op.verb != Verb::kAcquire || op.wait == 0 || op.several || !IsAnswered(op)) continue;
    if (!op.direct && lock.Excuses(Exemption::kWaiterMayBeHeldBack)) continue;
    const Time idle = IdleTime(lock, op, op.sharing == Sharing::kShared ? busy_for_readers : busy);
    report.findings.longest_idle = std::max(report.findings.longest_idle, idle);
    if (idle > lock.rules.idle_limit) {
      report.Violated("C4",
                      "the lock was free for " + std::to_string(idle / kMillisecond) +
                          " ms while somebody waited for it",
                      {i});
    }
  }
}

}  // namespace turnstile::fault
