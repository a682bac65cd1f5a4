// C5: who surely came first is served first, and nobody stands in a line that was too long for it.
//
// A server takes requests in the order in which they arrive, and answers those of a pass of its
// event loop at the pass's end. So what was sent before another request, which has been answered,
// had arrived by then. Who arrived before may not get a higher token, nor wait in vain while who
// came later gets the lock. Those who can hold it together come in together, in any order: of them
// nobody may be left out. It is all the same who blocks and who is notified. Who named the longest
// line that it joins may not stand behind so many who surely stood there: they came before, and
// waited until their time was over, which was later. Not wrong is what readers do that pass a
// reader which waits for another lock too; or an order of answers that were read a moment apart.

#include <algorithm>
#include <array>
#include <map>
#include <vector>

#include "fault/checker/checks.h"

namespace turnstile::fault {
namespace {

// Of those who came before: the highest token, and who stood in line for longest, in vain or not.
struct Earlier {
  int64_t token = 0;
  size_t token_op = 0;
  Time in_vain_until = 0;
  size_t in_vain_op = 0;
  Time stood_until = 0;
  size_t stood_op = 0;
};

void Remember(const LockHistory& lock, size_t i, Earlier& earlier) {
  const Operation& op = lock.ops[i];
  if (lock.is_new[i] && op.token > earlier.token) {
    earlier.token = op.token;
    earlier.token_op = i;
  }
  if (op.wait == 0 || (op.answer != Answer::kNull && !lock.is_new[i])) return;
  if (op.answered > earlier.stood_until) {
    earlier.stood_until = op.answered;
    earlier.stood_op = i;
  }
  if (op.answer == Answer::kNull && op.answered > earlier.in_vain_until) {
    earlier.in_vain_until = op.answered;
    earlier.in_vain_op = i;
  }
}

// `alike`: they can hold the lock together.
void CheckAfter(const LockHistory& lock, const Earlier& earlier, size_t i, bool alike,
                Report& report) {
  const Operation& op = lock.ops[i];
  const auto stood_longer = [&](Time until) {
    const Time excused = lock.Excuses(Exemption::kNoOrderWhileUnavailable)
                             ? lock.unavailable.LengthWithin(op.answered, until)
                             : 0;
    return until > op.answered + lock.rules.order_slack + excused;
  };
  if (alike) {
    if (stood_longer(earlier.stood_until)) {
      report.Violated("C5",
                      "somebody who came later was let in, and an earlier one of its kind was not",
                      {earlier.stood_op, i});
    }
    return;
  }
  // (A token that had been told before is a matter of C3.)
  if (earlier.token > op.token && lock.ops[earlier.token_op].answered >= op.sent) {
    report.Violated("C5", "somebody who came later was served first", {earlier.token_op, i});
  }
  if (stood_longer(earlier.in_vain_until)) {
    report.Violated("C5", "somebody who came later was served while an earlier one waited in vain",
                    {earlier.in_vain_op, i});
  }
}

// All `indices` went to one server.
void CheckOrderAt(const LockHistory& lock, const std::vector<Time>& arrived_before, Indices indices,
                  Report& report) {
  // By whether it is for several locks, and by its kind.
  std::array<std::array<Earlier, 3>, 2> earlier{};
  auto candidate = indices.begin();
  for (const size_t i : indices) {
    const Operation& op = lock.ops[i];
    for (; candidate != indices.end() && lock.ops[*candidate].sent < arrived_before[i];
         ++candidate) {
      const Operation& before = lock.ops[*candidate];
      Remember(lock, *candidate,
               earlier.at(before.several ? 1 : 0).at(static_cast<size_t>(before.sharing)));
    }
    if (!lock.is_new[i]) continue;
    if (op.retry && lock.Excuses(Exemption::kRetryMayStandInLine)) continue;
    if (candidate != indices.begin()) ++report.findings.ordered;
    for (size_t several = 0; several < earlier.size(); several++) {
      for (size_t sharing = 0; sharing < earlier.at(several).size(); sharing++) {
        const bool alike =
            sharing == static_cast<size_t>(op.sharing) && op.sharing != Sharing::kExclusive;
        if (alike && several == 1) continue;
        CheckAfter(lock, earlier.at(several).at(sharing), i, alike, report);
      }
    }
  }
}

// When a client was told anything of its request: it had arrived by then.
Time FirstAnswer(const Operation& op) {
  if (op.queued > 0) return op.queued;
  return IsAnswered(op) ? op.answered : kNever;
}

// Whether it surely stood in line until its time was over. (An answer at once may be read late.)
bool StoodInLine(const LockHistory& lock, const Operation& op) {
  if (op.wait == 0) return false;
  if (op.queued > 0) return true;
  if (op.answer != Answer::kNull) return false;
  if (op.max_line == 0) return true;
  const Time excused = lock.Excuses(Exemption::kNoOrderWhileUnavailable)
                           ? lock.unavailable.LengthWithin(op.sent, op.answered)
                           : 0;
  return op.wait > lock.rules.order_slack && op.answered - op.sent - excused >= op.wait;
}

// All `indices` went to one server.
void CheckLineAt(const LockHistory& lock, const std::vector<Time>& arrived_before, Indices indices,
                 Report& report) {
  Time longest_wait = 0;
  for (auto at = indices.begin(); at != indices.end(); ++at) {
    const Operation& op = lock.ops[*at];
    longest_wait = std::max(longest_wait, op.wait);
    if (op.max_line == 0 || op.retry || !StoodInLine(lock, op)) continue;
    const Time arrived = op.queued > 0 ? op.queued : op.answered - op.wait;
    size_t ahead = 0;
    size_t first = 0;
    for (auto before = at; before != indices.begin();) {
      const Operation& other = lock.ops[*--before];
      if (other.sent + longest_wait < arrived) break;
      if (other.sent >= arrived_before[*at] || other.owner == op.owner) continue;
      const bool stood = other.answer == Answer::kNull && StoodInLine(lock, other) &&
                         other.answered >= other.sent + other.wait;
      if (!stood || other.sent + other.wait <= arrived + lock.rules.lease_slack) continue;
      ++ahead;
      first = *before;
    }
    if (ahead >= op.max_line) {
      report.Violated("C5", "somebody joined a line that was longer than it allowed", {first, *at});
    }
  }
}

}  // namespace

std::vector<Time> FindArrivals(const std::vector<Operation>& ops) {
  std::vector<size_t> by_sent;
  std::vector<size_t> by_answer;
  for (size_t i = 0; i < ops.size(); i++) {
    if (!IsRequest(ops[i]) || !ops[i].direct) continue;
    by_sent.push_back(i);
    if (FirstAnswer(ops[i]) != kNever) by_answer.push_back(i);
  }
  const auto by = [&](auto field) {
    return [&ops, field](size_t a, size_t b) { return ops[a].*field < ops[b].*field; };
  };
  std::sort(by_sent.begin(), by_sent.end(), by(&Operation::sent));
  std::sort(by_answer.begin(), by_answer.end(),
            [&](size_t a, size_t b) { return FirstAnswer(ops[a]) < FirstAnswer(ops[b]); });
  std::vector<Time> arrived_before(ops.size(), 0);
  std::map<uint32_t, Time> arrived;  // by server: everything that was sent before this
  auto answer = by_answer.begin();
  for (const size_t i : by_sent) {
    for (; answer != by_answer.end() && FirstAnswer(ops[*answer]) < ops[i].sent; ++answer) {
      Time& until = arrived[ops[*answer].server];
      until = std::max(until, ops[*answer].sent);
    }
    arrived_before[i] = arrived[ops[i].server];
  }
  return arrived_before;
}

void CheckOrder(const LockHistory& lock, const std::vector<Time>& arrived_before, Report& report) {
  std::map<uint32_t, std::vector<size_t>> by_server;
  for (const size_t i : lock.indices) {
    const Operation& op = lock.ops[i];
    if (op.verb != Verb::kAcquire || op.stranger) continue;
    if (!op.direct && lock.Excuses(Exemption::kRequestMayBeHeldBack)) continue;
    by_server[op.server].push_back(i);
  }
  for (const auto& [server, here] : by_server) {
    CheckOrderAt(lock, arrived_before, here, report);
    CheckLineAt(lock, arrived_before, here, report);
  }
}

}  // namespace turnstile::fault
