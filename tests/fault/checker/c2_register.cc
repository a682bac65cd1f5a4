// C2: a register that keeps the highest token it was shown never refuses a rightful holder; the
// server refuses no rightful holder, tells none that its hold is lost, and obeys nobody who has
// been replaced or whose hold is over, by its lease, by the most that it may last, or because that
// was said.
//
// Rightful is who certainly holds the lock from the sending of a request to its answer (owner.cc).
// Replaced, on a lock that everybody takes exclusively, is who has a lower token than somebody else
// was told before the request was sent. Not wrong is an answer that fits a hold of which the owner
// was not told, or one of older data.

#include "fault/checker/checks.h"

namespace turnstile::fault {
namespace {

bool IsReplaced(const LockHistory& lock, size_t index, int64_t token, size_t* replaced_by) {
  if (!lock.only_exclusive) return false;
  const Operation& op = lock.ops[index];
  const HighestTold::Entry* newest = lock.told.Before(op.sent);
  if (newest == nullptr || newest->token <= token) return false;
  const Operation& newer = lock.ops[newest->op];
  *replaced_by = newest->op;
  return newer.owner != op.owner &&
         !(lock.marks.MayBringLock(newer.sent, op.answered) &&
           lock.Excuses(Exemption::kStrangerMayBringHoldBack)) &&
         !(lock.marks.MayBeOlderData(newer.sent, op.answered) &&
           lock.Excuses(Exemption::kReplacedHoldMayBeBack));
}

bool IsOver(const LockHistory& lock, const Hold& hold, const Operation& op) {
  if (op.sent <= hold.live_until) return false;
  const Time since = lock.ops[hold.told_by].sent;
  return !(lock.marks.MayBeForced(since, op.answered) &&
           lock.Excuses(Exemption::kStrangerMayBringHoldBack)) &&
         !(lock.marks.MayBeOlderData(since, op.answered) &&
           lock.Excuses(Exemption::kLossMayBringHoldBack));
}

// The server did what the owner of `token` asked for.
void CheckObeyed(const LockHistory& lock, const Owner& owner, const Step& step, int64_t token,
                 Report& report) {
  size_t replaced_by = 0;
  if (IsReplaced(lock, step.index, token, &replaced_by)) {
    report.Violated("C2", "an owner that has been replaced was obeyed", {replaced_by, step.index});
  } else if (owner.has_been_told() && token == owner.token() &&
             IsOver(lock, owner.hold(), step.op)) {
    report.Violated("C2", "a hold that was over was obeyed", {owner.hold().told_by, step.index});
  }
}

// A message says that the hold is lost. It may be older than what happened since.
void CheckLoss(const LockHistory& lock, const Owner& owner, const Step& step, Report& report) {
  if (!step.rightful || !owner.ShowsItsToken(step.op)) return;
  const Time since = lock.ops[owner.told_by()].sent;
  if (lock.marks.MayBeSetBack(since, step.op.answered) &&
      lock.Excuses(Exemption::kStepMayProlongLease)) {
    return;
  }
  if (lock.marks.MayBeForced(since, step.op.answered) &&
      lock.Excuses(Exemption::kStrangerMayBringHoldBack)) {
    return;
  }
  report.Violated("C2", "a hold is said to be lost that is certainly live",
                  {owner.told_by(), step.index});
}

}  // namespace

void CheckObedience(const LockHistory& lock, const Owner& owner, const Step& step, Report& report) {
  const Operation& op = step.op;
  const bool obeyed = op.answer == Answer::kYes;
  const bool refused = op.answer == Answer::kNo && step.rightful;
  if (op.verb == Verb::kFence) {
    if (obeyed) CheckObeyed(lock, owner, step, op.token, report);
    if (refused && owner.ShowsItsToken(op)) {
      report.Violated("C2", "the token of a rightful holder was refused",
                      {owner.told_by(), step.index});
    }
  } else if (op.verb == Verb::kLoss) {
    CheckLoss(lock, owner, step, report);
  } else if (op.verb == Verb::kTouch || op.verb == Verb::kRelease) {
    // These do not name the token that they are about.
    const bool leaves_line = op.verb == Verb::kRelease && owner.MayStandInLine(op);
    if (obeyed && owner.has_been_told() && owner.state() != Owner::State::kPerhapsNewer &&
        !leaves_line) {
      CheckObeyed(lock, owner, step, owner.token(), report);
    }
    if (refused) {
      report.Violated("C2",
                      op.verb == Verb::kTouch ? "a rightful holder could not touch its lock"
                                              : "a rightful holder had nothing to release",
                      {owner.told_by(), step.index});
    }
  }
}

void CheckRegister(const LockHistory& lock, Report& report) {
  if (!lock.only_exclusive) return;
  const Operation* highest = nullptr;
  size_t highest_at = 0;
  for (const size_t i : lock.indices) {
    const Operation& op = lock.ops[i];
    if (op.verb != Verb::kWrite) continue;
    ++report.findings.writes;
    if (highest != nullptr && op.token < highest->token) {
      ++report.findings.refused;
      if (lock.is_rightful_write[i]) {
        report.Violated("C2", "the register refuses a rightful holder", {highest_at, i});
      }
      continue;
    }
    if (highest != nullptr && op.token == highest->token && op.owner != highest->owner) {
      report.Violated("C2", "the register was shown one token by two owners", {highest_at, i});
    }
    highest = &op;
    highest_at = i;
  }
}

}  // namespace turnstile::fault
