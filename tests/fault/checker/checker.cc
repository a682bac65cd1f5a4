#include "fault/checker/checker.h"

#include <algorithm>
#include <numeric>
#include <sstream>
#include <tuple>
#include <utility>

#include "fault/checker/checks.h"
#include "fault/checker/lock_history.h"
#include "fault/checker/owner.h"

namespace turnstile::fault {
namespace {

// Calls `use` with each stretch of `indices` whose operations agree in `field`.
template <typename Field, typename Use>
void ForEachGroup(const std::vector<Operation>& ops, Indices indices, Field field, Use use) {
  for (auto begin = indices.begin(); begin != indices.end();) {
    const auto end = std::find_if(begin, indices.end(),
                                  [&](size_t i) { return ops[i].*field != ops[*begin].*field; });
    use(Indices(begin, end));
    begin = end;
  }
}

void FollowOwner(LockHistory& lock, Indices indices, Report& report) {
  Owner owner(lock);
  for (const size_t i : indices) {
    if (lock.ops[i].stranger) {
      CheckStranger(lock.ops[i], i, report);
      continue;
    }
    const Step step = owner.Meet(i);
    CheckObedience(lock, owner, step, report);
    CheckNewToken(lock, owner, step, report);
    CheckAskingAgain(lock, owner, step, report);
    CheckCount(lock, owner, step, report);
    owner.Follow(step);
    if (lock.is_new[i]) ++report.findings.holds;
  }
}

}  // namespace

void Report::Violated(const char* check, std::string text, std::vector<size_t> operations) {
  const Operation& last = ops_[operations.back()];
  findings.violations.push_back(
      {check, std::move(text), last.lock, last.answered, std::move(operations)});
}

Findings Check(const History& history, const Rules& rules) {
  const std::vector<Operation>& ops = history.operations;
  const std::vector<Time> arrived_before = FindArrivals(ops);
  LockHistory lock(history, rules);
  Report report(ops);
  report.findings.operations = ops.size();

  std::vector<size_t> order(ops.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return std::tuple(ops[a].lock, ops[a].sent, a) < std::tuple(ops[b].lock, ops[b].sent, b);
  });
  ForEachGroup(ops, order, &Operation::lock, [&](Indices of_lock) {
    lock.Begin(of_lock);
    std::vector<size_t> by_owner(of_lock.begin(), of_lock.end());
    std::stable_sort(by_owner.begin(), by_owner.end(),
                     [&](size_t a, size_t b) { return ops[a].owner < ops[b].owner; });
    ForEachGroup(ops, by_owner, &Operation::owner,
                 [&](Indices of_owner) { FollowOwner(lock, of_owner, report); });
    CheckExclusion(lock, report);
    CheckRegister(lock, report);
    CheckTokensDiffer(lock, report);
    CheckWaits(lock, report);
    CheckIdleness(lock, report);
    CheckOrder(lock, arrived_before, report);
  });
  std::vector<Violation>& violations = report.findings.violations;
  std::stable_sort(violations.begin(), violations.end(),
                   [](const Violation& a, const Violation& b) {
                     return std::tie(a.when, a.check) < std::tie(b.when, b.check);
                   });
  return std::move(report.findings);
}

std::string Story(const History& history, const Violation& violation, size_t lines) {
  struct Line {
    Time when;
    size_t distance;  // from what shows the violation
    std::string text;
  };
  const auto shows = [&](size_t i) {
    return std::find(violation.operations.begin(), violation.operations.end(), i) !=
           violation.operations.end();
  };
  Time from = violation.when;
  Time until = violation.when;
  for (const size_t i : violation.operations) {
    from = std::min(from, history.operations[i].sent);
    until = std::max(until, history.operations[i].answered);
  }
  const auto distance = [&](Time begin, Time end) {
    return static_cast<size_t>(std::max({Time{0}, from - end, begin - until}));
  };
  std::vector<Line> all;
  for (size_t i = 0; i < history.operations.size(); i++) {
    const Operation& op = history.operations[i];
    if (op.lock != violation.lock && !shows(i)) continue;
    all.push_back({op.sent, shows(i) ? 0 : 1 + distance(op.sent, op.answered),
                   (shows(i) ? "  >> " : "     ") + ToText(op)});
  }
  for (const Mark& mark : history.marks) {
    if (mark.lock != violation.lock && mark.lock != kAllLocks) continue;
    all.push_back({mark.begin, distance(mark.begin, mark.end), "   * " + ToText(mark)});
  }
  // Those nearest to the violation, in the order of time.
  std::stable_sort(all.begin(), all.end(),
                   [](const Line& a, const Line& b) { return a.distance < b.distance; });
  if (all.size() > lines) all.resize(lines);
  std::stable_sort(all.begin(), all.end(),
                   [](const Line& a, const Line& b) { return a.when < b.when; });
  std::ostringstream out;
  out << violation.check;
  if (violation.lock != kAllLocks) out << ", lock " << violation.lock;
  out << ": " << violation.text << '\n';
  for (const Line& line : all) out << line.text << '\n';
  return out.str();
}

}  // namespace turnstile::fault
