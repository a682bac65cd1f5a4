// All that a history says about one lock: what was asked and told, what was done to it, and what
// its owners are known to have had. Owners (owner.h) fill in the last; checks (checks.h) only read.

#ifndef TURNSTILE_TESTS_FAULT_CHECKER_LOCK_HISTORY_H_
#define TURNSTILE_TESTS_FAULT_CHECKER_LOCK_HISTORY_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "fault/checker/checker.h"
#include "fault/checker/exemptions.h"
#include "fault/checker/hold.h"
#include "fault/checker/intervals.h"
#include "fault/checker/marks.h"
#include "fault/history.h"

namespace turnstile::fault {

inline constexpr Time kNever = std::numeric_limits<Time>::max();

using Indices = std::span<const size_t>;  // of operations

inline bool IsRequest(const Operation& op) {
  return op.verb != Verb::kWrite && op.verb != Verb::kClose && op.verb != Verb::kLoss;
}
inline bool IsAnswered(const Operation& op) { return op.answer != Answer::kLost; }
inline bool IsGrant(const Operation& op) {
  return op.verb == Verb::kAcquire && op.answer == Answer::kToken;
}

// The highest token that clients had been told before some moment.
class HighestTold {
 public:
  struct Entry {
    Time when = 0;
    int64_t token = 0;
    size_t op = 0;
  };

  void Assign(const std::vector<Operation>& ops, Indices indices);
  const Entry* Before(Time time) const;  // nullptr if nothing had been told

 private:
  std::vector<Entry> entries_;  // in the order of time and of tokens
};

// When somebody surely still had an exclusive lock under some token: at the earliest when it sent a
// request that was then obeyed. Whoever has a higher token got it later.
class LastSeen {
 public:
  void Clear() { entries_.clear(); }
  void Assign(const std::vector<Operation>& ops, Indices indices);
  // A moment before which `token` was surely not granted.
  Time UnderLowerTokens(int64_t token) const;

 private:
  struct Entry {
    int64_t token = 0;
    Time when = 0;  // the latest, under this token or a lower one
  };
  std::vector<Entry> entries_;  // in the order of tokens
};

class LockHistory {
 public:
  LockHistory(const History& history, const Rules& judged_by);

  // From now on this is about another lock, whose operations are `of_lock`, by the time of sending.
  void Begin(Indices of_lock);

  bool Excuses(Exemption exemption) const { return rules.exemptions.Has(exemption); }

  // See LockMarks. Leases end as they say if the exemptions for steps of the clock are off.
  Time EarliestEnd(Time from, Time until) const;
  Time LatestEnd(Time from, Time until) const;

  // Of all locks:
  const std::vector<Operation>& ops;
  const Rules& rules;
  IntervalSet unavailable;

  // Of this lock:
  Indices indices;
  bool only_exclusive = true;
  LockMarks marks;
  HighestTold told;
  LastSeen seen;

  // What its owners had:
  struct UntoldHold {
    Interval interval;
    Sharing sharing = Sharing::kExclusive;
  };
  std::vector<Hold> holds;               // those of an owner one after the other
  std::vector<UntoldHold> untold_holds;  // that somebody may have had without being told
  std::vector<bool> is_new;              // by operation: it told of a new hold
  std::vector<bool> is_rightful_write;   // by operation

 private:
  const std::vector<Mark>& all_marks_;
};

}  // namespace turnstile::fault

#endif  // TURNSTILE_TESTS_FAULT_CHECKER_LOCK_HISTORY_H_
