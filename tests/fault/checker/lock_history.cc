#include "fault/checker/lock_history.h"

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

namespace turnstile::fault {

void HighestTold::Assign(const std::vector<Operation>& ops, Indices indices) {
  entries_.clear();
  for (const size_t i : indices) {
    if (IsGrant(ops[i])) entries_.push_back({ops[i].answered, ops[i].token, i});
  }
  std::sort(entries_.begin(), entries_.end(),
            [](const Entry& a, const Entry& b) { return a.when < b.when; });
  for (size_t i = 1; i < entries_.size(); i++) {
    if (entries_[i].token < entries_[i - 1].token) {
      entries_[i].token = entries_[i - 1].token;
      entries_[i].op = entries_[i - 1].op;
    }
  }
}

const HighestTold::Entry* HighestTold::Before(Time time) const {
  const auto after = std::partition_point(entries_.begin(), entries_.end(),
                                          [&](const Entry& entry) { return entry.when < time; });
  return after == entries_.begin() ? nullptr : &*std::prev(after);
}

void LastSeen::Assign(const std::vector<Operation>& ops, Indices indices) {
  entries_.clear();
  for (const size_t i : indices) {
    const Operation& op = ops[i];
    if (IsGrant(op) || (op.verb == Verb::kFence && op.answer == Answer::kYes)) {
      entries_.push_back({op.token, op.sent});
    }
  }
  // Who released or touched the lock has the token that it was told last, unless it asked again and
  // was told nothing.
  struct Owner {
    int64_t token = 0;
    bool unsure = false;
    Time in_line_until = 0;  // a release may have been that of its place
  };
  std::map<uint32_t, Owner> owners;
  for (const size_t i : indices) {
    const Operation& op = ops[i];
    if (op.verb == Verb::kAcquire) {
      Owner& owner = owners[op.owner];
      if (IsGrant(op)) owner.token = op.token;
      owner.in_line_until = std::max(owner.in_line_until, op.answered);
      owner.unsure = owner.unsure || op.answer == Answer::kLost;
    } else if ((op.verb == Verb::kRelease || op.verb == Verb::kTouch) &&
               op.answer == Answer::kYes) {
      const auto owner = owners.find(op.owner);
      if (owner != owners.end() && !owner->second.unsure && owner->second.token != 0 &&
          op.sent >= owner->second.in_line_until) {
        entries_.push_back({owner->second.token, op.sent});
      }
    }
  }
  std::sort(entries_.begin(), entries_.end(),
            [](const Entry& a, const Entry& b) { return a.token < b.token; });
  for (size_t i = 1; i < entries_.size(); i++) {
    entries_[i].when = std::max(entries_[i].when, entries_[i - 1].when);
  }
}

Time LastSeen::UnderLowerTokens(int64_t token) const {
  const auto higher = std::partition_point(entries_.begin(), entries_.end(),
                                           [&](const Entry& entry) { return entry.token < token; });
  return higher == entries_.begin() ? 0 : std::prev(higher)->when;
}

LockHistory::LockHistory(const History& history, const Rules& judged_by)
    : ops(history.operations),
      rules(judged_by),
      is_new(ops.size(), false),
      is_rightful_write(ops.size(), false),
      all_marks_(history.marks) {
  std::vector<Interval> outages;
  for (const Mark& mark : all_marks_) {
    if (mark.kind == Mark::Kind::kUnavailable) outages.push_back({mark.begin, mark.end});
  }
  unavailable = IntervalSet(std::move(outages));
}

void LockHistory::Begin(Indices of_lock) {
  indices = of_lock;
  only_exclusive = std::all_of(indices.begin(), indices.end(),
                               [&](size_t i) { return ops[i].sharing == Sharing::kExclusive; });
  marks.Assign(all_marks_, ops[indices.front()].lock);
  told.Assign(ops, indices);
  // The order of tokens says nothing where older data came back or a stranger brought a lock here.
  if (only_exclusive && marks.losses().empty() && marks.forced().empty()) {
    seen.Assign(ops, indices);
  } else {
    seen.Clear();
  }
  holds.clear();
  untold_holds.clear();
}

Time LockHistory::EarliestEnd(Time from, Time until) const {
  return Excuses(Exemption::kStepMayEndLease) ? marks.EarliestEnd(from, until) : until;
}

Time LockHistory::LatestEnd(Time from, Time until) const {
  return Excuses(Exemption::kStepMayProlongLease) ? marks.LatestEnd(from, until) : until;
}

}  // namespace turnstile::fault
