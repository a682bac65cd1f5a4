// C6: who asks again gets the same token or a newer one, and is not refused while it holds the
// lock. Nobody releases more often than it acquired, and a stranger releases nothing.
//
// A holder that asks again keeps its token, unless it asks for a higher one or, having read, to
// write: that may be in vain, and gives a new token. Who asks again with another weight is refused.
// Who asks again by the channel and id of its hold has to release it no more often. Who stands in
// line releases its place. Not wrong is
// what fits a hold of which the owner was not told, or one of older data.

#include "fault/checker/checks.h"

namespace turnstile::fault {
namespace {

// An owner was told another token than before.
void CheckOtherToken(const LockHistory& lock, const Owner& owner, const Step& step,
                     Report& report) {
  const Operation& op = step.op;
  const Operation& told = lock.ops[owner.told_by()];
  if (lock.marks.MayBeOlderData(told.sent, op.answered) &&
      lock.Excuses(Exemption::kTokenMayBeOfOlderHold)) {
    return;
  }
  if (op.token < told.token && op.sent > told.answered) {
    report.Violated("C6", "an owner that asked again got an older token",
                    {owner.told_by(), step.index});
  }
  // What it touched since may be what a lost call got it.
  const bool may_be_newer = owner.state() == Owner::State::kPerhapsNewer && owner.hold().undated;
  if (step.rightful && !step.upgrade && !owner.IsRaised(op) && !owner.MayHaveAnotherToken() &&
      !may_be_newer) {
    report.Violated("C6", "an owner that holds the lock and asked again got another token",
                    {owner.told_by(), step.index});
  }
}

}  // namespace

void CheckStranger(const Operation& op, size_t index, Report& report) {
  if (op.answer == Answer::kYes) {
    report.Violated("C6", "a request of another owner was obeyed", {index});
  }
}

void CheckAskingAgain(const LockHistory& lock, const Owner& owner, const Step& step,
                      Report& report) {
  const Operation& op = step.op;
  if (op.verb != Verb::kAcquire || !owner.has_been_told()) return;
  if (op.answer == Answer::kNull && step.rightful && !step.upgrade) {
    report.Violated("C6", "a rightful holder asked again in vain", {owner.told_by(), step.index});
  }
  if (op.answer != Answer::kToken) return;
  const bool may_write = owner.hold().may_write && lock.Excuses(Exemption::kReaderMayWriteAlready);
  const bool other_weight = op.sharing == Sharing::kLimit && op.weight != owner.hold().weight;
  if (other_weight && step.rightful && op.token == owner.token()) {
    report.Violated("C6", "a holder that asked again with another weight was not refused",
                    {owner.told_by(), step.index});
  }
  if (op.token != owner.token()) {
    CheckOtherToken(lock, owner, step, report);
  } else if (step.upgrade && !may_write) {
    report.Violated("C6", "a hold became exclusive under its old token",
                    {owner.told_by(), step.index});
  }
}

void CheckCount(const LockHistory& lock, const Owner& owner, const Step& step, Report& report) {
  const Operation& op = step.op;
  if (op.verb != Verb::kRelease || op.answer != Answer::kYes || !owner.has_been_told() ||
      owner.count().most > 0 || owner.MayStandInLine(op)) {
    return;
  }
  const bool untold = owner.lost().first_asked != kNever;
  if (untold && lock.Excuses(Exemption::kUntoldGrantMayBeReleased)) return;
  if (owner.MayHaveOlderHold(op) && lock.Excuses(Exemption::kOlderHoldMayBeReleased)) return;
  if (lock.marks.MayBeSetBack(owner.first_asked(), op.answered) &&
      lock.Excuses(Exemption::kStepMayLetReleaseAgain)) {
    return;
  }
  report.Violated("C6", "a hold was released more often than it was acquired",
                  {owner.told_by(), step.index});
}

}  // namespace turnstile::fault
