// C3: the token of a new hold is above every token of the lock that was told before it was asked
// for, is nobody else's, is not below a floor that was asked for, and is below 2^53.
//
// New is a hold whose token its owner had not been told last. Not wrong is a token that may have
// been given earlier than its answer looks: by a call that was lost before, or from older data; or
// that of a reader who raised its own to one that was given for another lock.

#include <algorithm>

#include "fault/checker/checks.h"

namespace turnstile::fault {
namespace {

constexpr int64_t kTokensEnd = int64_t{1} << 53;

bool MayShareToken(const LockHistory& lock, const Operation& a, const Operation& b) {
  const bool is_floor = a.floor == a.token || b.floor == b.token;
  return is_floor &&
         lock.marks.MayBeOlderData(std::min(a.sent, b.sent), std::max(a.answered, b.answered)) &&
         lock.Excuses(Exemption::kFloorMayHaveBeenGiven);
}

}  // namespace

void CheckNewToken(const LockHistory& lock, const Owner& owner, const Step& step, Report& report) {
  const Operation& op = step.op;
  if (!IsGrant(op)) return;
  if (op.token < op.floor) {
    report.Violated("C3", "a token below the floor that was asked for", {step.index});
  }
  if (owner.has_been_told() && op.token == owner.token()) return;
  // The token of a reader may be raised to less than what others were given beside it.
  const bool beside_others =
      op.sharing == Sharing::kShared && owner.has_been_told() &&
      (owner.IsRaised(op) || (op.token <= owner.lost().highest_floor &&
                              lock.Excuses(Exemption::kLostFloorMayChangeToken)));
  if (op.token <= 0 || op.token >= kTokensEnd) {
    report.Violated("C3", "a token out of range", {step.index});
  }
  if (beside_others) return;
  const HighestTold::Entry* before = lock.told.Before(owner.AskingSince(op));
  if (before != nullptr && before->token >= op.token) {
    report.Violated("C3",
                    "a new hold has a token that is not above one told before it was asked for",
                    {before->op, step.index});
  }
}

void CheckTokensDiffer(const LockHistory& lock, Report& report) {
  std::vector<const Hold*> by_token;
  by_token.reserve(lock.holds.size());
  for (const Hold& hold : lock.holds) by_token.push_back(&hold);
  std::sort(by_token.begin(), by_token.end(),
            [](const Hold* a, const Hold* b) { return a->token < b->token; });
  for (size_t i = 1; i < by_token.size(); i++) {
    const Hold& a = *by_token[i - 1];
    const Hold& b = *by_token[i];
    if (a.token != b.token || a.owner == b.owner) continue;
    if (MayShareToken(lock, lock.ops[a.told_by], lock.ops[b.told_by])) continue;
    report.Violated("C3", "two owners have the same token", {a.told_by, b.told_by});
  }
}

}  // namespace turnstile::fault
