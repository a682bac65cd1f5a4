#include "fault/checker/owner.h"

#include <algorithm>
#include <utility>

namespace turnstile::fault {

void CountRange::BeAtLeastOne() { Set(std::max(least, 1), std::max(most, 1)); }

void CountRange::BeAny() { Set(std::min(least, 1), std::numeric_limits<int>::max() / 2); }

// --- What is known ------------------------------------------------------------------------------

Time Owner::AskingSince(const Operation& op) const {
  if (lock_.marks.MayBeOlderData(first_asked_, op.answered) &&
      lock_.Excuses(Exemption::kGrantOfOlderHold)) {
    return std::min(first_asked_, op.sent);
  }
  return lock_.Excuses(Exemption::kGrantOfLostCall) ? std::min(lost_.first_asked, op.sent)
                                                    : op.sent;
}

bool Owner::IsRaised(const Operation& grant) const {
  return grant.token == grant.floor && grant.floor > token();
}

bool Owner::MayHaveAnotherToken() const {
  return (lost_.upgrade && lock_.Excuses(Exemption::kLostUpgradeMayChangeToken)) ||
         (lost_.highest_floor > token() && lock_.Excuses(Exemption::kLostFloorMayChangeToken));
}

bool Owner::ShowsItsToken(const Operation& op) const {
  return op.token == token() && state_ != State::kPerhapsNewer && !MayHaveAnotherToken() &&
         !(lock_.marks.MayBeOlderData(lock_.ops[told_by_].sent, op.answered) &&
           lock_.Excuses(Exemption::kTokenOfOlderHold));
}

bool Owner::MayHaveOlderHold(const Operation& op) const {
  return lock_.marks.MayBeOlderData(first_asked_, op.answered) ||
         lock_.marks.MayBeForced(first_asked_, op.answered);
}

// --- Transitions --------------------------------------------------------------------------------

Step Owner::Meet(size_t index) {
  Step step{index, lock_.ops[index]};
  if (!has_been_told()) return step;
  step.rightful = state_ != State::kGaveUp && hold().IsCertainThrough(step.op);
  DoubtMode(step.op);
  step.upgrade = step.op.verb == Verb::kAcquire && step.op.sharing == Sharing::kExclusive &&
                 hold().sharing == Sharing::kShared;
  return step;
}

void Owner::Follow(const Step& step) {
  if (step.op.verb == Verb::kAcquire) {
    Acquired(step);
    return;
  }
  if (!has_been_told()) return;
  switch (step.op.verb) {
    case Verb::kTouch:
      Touched(step);
      break;
    case Verb::kRelease:
      Released(step);
      break;
    case Verb::kClose:
      Closed(step);
      break;
    case Verb::kLoss:
      ToldOfLoss(step.op);
      break;
    case Verb::kWrite:
      // One whose hold came back with older data is rightful here, and rightly refused there.
      lock_.is_rightful_write[step.index] =
          step.rightful && ShowsItsToken(step.op) &&
          !(lock_.marks.MayBeOlderData(first_asked_, step.op.answered) &&
            lock_.Excuses(Exemption::kRegisterKnowsNewerHold));
      break;
    default:  // tells nothing new
      break;
  }
}

// Nobody knows whether an owner reads or writes after a change between the two was lost, or where
// one may have been undone.
void Owner::DoubtMode(const Operation& op) {
  const bool changes = op.verb == Verb::kAcquire && op.sharing != hold().sharing;
  mode_.changes = mode_.changes || changes;
  if (!mode_.changes) return;
  if (changes && op.answer == Answer::kLost) {
    mode_.unsure = mode_.unsure || lock_.Excuses(Exemption::kChangeOfModeMayBeLost);
  }
  if (MayHaveOlderHold(op)) {
    mode_.unsure = mode_.unsure || lock_.Excuses(Exemption::kChangeOfModeMayBeUndone);
  }
  if (!mode_.unsure) return;
  ReadOnlyFrom(op.sent);
  current().may_write = true;
}

void Owner::Acquired(const Step& step) {
  const Operation& op = step.op;
  first_asked_ = std::min(first_asked_, op.sent);
  in_line_until_ = std::max(in_line_until_, op.answered);
  linger_ = std::max(linger_, op.linger);
  reentrant_ = reentrant_ || op.reentrant;
  if (op.answer == Answer::kLost) {
    LoseAcquire(step);
  } else if (op.answer == Answer::kToken) {
    TakeGrant(step);
  } else if (state_ == State::kNeverAsked) {
    state_ = State::kUntold;
  }
}

void Owner::LoseAcquire(const Step& step) {
  const Operation& op = step.op;
  lost_.first_asked = std::min(lost_.first_asked, op.sent);
  lost_.held_back = lost_.held_back || !op.direct;
  lost_.upgrade = lost_.upgrade || step.upgrade;
  lost_.highest_floor = std::max(lost_.highest_floor, op.floor);
  if (op.max_hold > 0) lost_.least_max_hold = std::min(lost_.least_max_hold, op.max_hold);
  if (op.reentrant && lock_.Excuses(Exemption::kLostGrantMayCount)) {
    ++lost_.reentrant;
    count_.AddPerhaps(1);
  }
  const Time latest = LatestArrival(op) + op.wait + op.lease + kMillisecond;
  if (lock_.Excuses(Exemption::kUntoldMayHold)) {
    lock_.untold_holds.push_back(
        {{op.sent, lock_.LatestEnd(op.sent, latest + op.linger)}, op.sharing});
  }
  ShortenBy(op);
  if (!has_been_told()) {
    state_ = State::kUntold;
    return;
  }
  current().least_weight = std::min(current().least_weight, op.weight);
  if (lock_.Excuses(Exemption::kLostCallMayRenew)) {
    const Time until = std::min(lock_.LatestEnd(op.sent, latest), LatestCap(0));
    current().live_until = std::max(current().live_until, until);
  }
  if (lock_.Excuses(Exemption::kLostCallMayGrant)) state_ = State::kPerhapsNewer;
}

void Owner::TakeGrant(const Step& step) {
  const Operation& op = step.op;
  if (!has_been_told() || op.token != token()) {
    // A token that is raised is that of the same hold, and so is that of an upgrade.
    const bool raised = IsRaised(op);
    const bool may_be_same = raised || step.upgrade || MayHaveAnotherToken();
    const int grants = op.reentrant ? 1 : 0;
    BeginCap(step, may_be_same && has_been_told(), step.rightful && (raised || step.upgrade));
    count_.Set(step.rightful && raised ? count_.least + (op.bound ? 0 : grants) : 1,
               std::max(1 + lost_.reentrant, may_be_same ? count_.most + grants : 0));
    BeginHold(step);
  } else {
    if (op.sharing == Sharing::kShared && hold().sharing == Sharing::kExclusive) {
      End(op, op.answered);
      ReadOnlyFrom(op.sent);
    }
    count_.BeAtLeastOne();
    if (op.reentrant) CountGrant(op);
  }
  if (op.max_hold > 0) {
    cap_.perhaps = std::min(cap_.perhaps, op.max_hold);
    cap_.surely = std::min(cap_.surely, op.max_hold);
  }
  Renew(step);
  if (op.notified) bound_at_ = op.server;
  told_by_ = step.index;
  state_ = lost_.held_back && lock_.Excuses(Exemption::kHeldBackCallMayGrant) ? State::kPerhapsNewer
                                                                              : State::kHolds;
}

// Who asks again by the channel and id of its hold has it as often as before. A server that did not
// grant the hold knows of no channel.
void Owner::CountGrant(const Operation& op) {
  if (!op.bound) {
    count_.Add(1);
  } else if (op.server != bound_at_ && lock_.Excuses(Exemption::kBindingMayBeForgotten)) {
    count_.AddPerhaps(1);
  }
}

void Owner::BeginCap(const Step& step, bool may_be_same, bool is_same) {
  const Operation& op = step.op;
  if (!may_be_same) cap_ = {.granted_from = kNever};
  cap_.granted_from = std::min(cap_.granted_from, AskingSince(op));
  if (is_same) return;
  cap_.granted_until = op.answered;
  cap_.surely = kNever;
}

Time Owner::EarliestCap(Time max_hold, Time linger) const {
  if (max_hold == kNever) return kNever;
  return lock_.EarliestEnd(cap_.granted_from,
                           cap_.granted_from + max_hold + linger - lock_.rules.lease_slack);
}

Time Owner::LatestCap(Time linger) const {
  if (cap_.surely == kNever) return kNever;
  return lock_.LatestEnd(cap_.granted_from, cap_.granted_until + cap_.surely + linger +
                                                kMillisecond + lock_.rules.lease_slack);
}

void Owner::BeginHold(const Step& step) {
  const Operation& op = step.op;
  // One that is raised to a floor is the hold that it was (seed 5679423).
  const bool revived = has_been_told() && IsRaised(op) && IsRevived(op);
  if (has_been_told()) {
    // The hold so far is replaced, also if it only lingered.
    End(op, op.answered);
    current().Shorten(EarliestEndBy(op));
    for (CertainHold& interval : current().certain) {
      interval.until = std::min(interval.until, op.answered);
    }
    current().EndLinger(op.sent);
  }
  lock_.is_new[step.index] = true;
  Hold& hold = lock_.holds.emplace_back();
  hold.told_by = step.index;
  hold.owner = op.owner;
  hold.token = op.token;
  hold.sharing = mode_.unsure ? Sharing::kShared : op.sharing;
  hold.may_write = mode_.unsure;
  hold.limit = op.limit;
  hold.weight = op.weight;
  hold.least_weight = op.weight;
  hold.undated = op.floor == op.token;
  hold.revived = revived;
}

void Owner::Touched(const Step& step) {
  const Operation& op = step.op;
  if (op.answer == Answer::kYes) {
    count_.BeAtLeastOne();
    if (state_ == State::kPerhapsNewer || MayHaveOlderHold(op)) current().undated = true;
    Renew(step);
    if (state_ == State::kGaveUp) state_ = State::kHolds;
  } else if (op.answer == Answer::kLost) {
    if (lock_.Excuses(Exemption::kLostCallMayRenew)) {
      const Time latest = LatestArrival(op) + op.lease + kMillisecond;
      Hold& hold = current();
      hold.live_until =
          std::max(hold.live_until, std::min(lock_.LatestEnd(op.sent, latest), LatestCap(0)));
      hold.possible_until =
          std::max(hold.possible_until,
                   std::min(lock_.LatestEnd(op.sent, latest + linger_), LatestCap(linger_)));
    }
    ShortenBy(op);
  }
}

void Owner::Released(const Step& step) {
  const Operation& op = step.op;
  CountRelease(op);
  if (op.answer == Answer::kLost && lock_.Excuses(Exemption::kLostReleaseMayEndLinger)) {
    // One that comes when the lease is over ends the linger, whatever the count.
    current().EndLinger(op.sent);
  }
  if (count_.least > 0) return;
  GiveUp(op, 0);
  if (op.answer == Answer::kNo) {
    // One that was over may still be stored, and live again when the clock is set back.
    End(op, lock_.LatestEnd(op.sent, op.answered));
  } else if (op.answer == Answer::kYes && count_.most <= 0) {
    End(op, op.answered);
  }
}

void Owner::CountRelease(const Operation& op) {
  if (reentrant_ && MayHaveOlderHold(op) && lock_.Excuses(Exemption::kCountOfOlderHold)) {
    count_.BeAny();
  }
  if (op.answer == Answer::kYes) count_.Subtract();
  if (op.answer == Answer::kLost && lock_.Excuses(Exemption::kLostReleaseMayCount)) {
    count_.SubtractPerhaps();
  }
  if (op.answer == Answer::kNo) count_.Set(0, 0);
}

// The end of a session is no release: the hold lingers. It ends whatever its count.
void Owner::Closed(const Step& step) {
  GiveUp(step.op, linger_);
  if (step.op.answer == Answer::kYes) End(step.op, step.op.answered + linger_);
}

// It was over when that was said. It may be back since, or live again by a clock that was set back.
void Owner::ToldOfLoss(const Operation& op) {
  if (op.token != token()) return;
  if (MayHaveOlderHold(op) && lock_.Excuses(Exemption::kLossMayBringHoldBack) &&
      lock_.Excuses(Exemption::kStrangerMayBringHoldBack)) {
    return;
  }
  // Read while the owner asked again: then it may be older than the answer (seed 2092400).
  const bool may_be_older = op.sent < lock_.ops[told_by_].answered;
  const Time since = may_be_older ? 0 : lock_.ops[told_by_].sent;
  if (lock_.marks.MayBeSetBack(since, op.answered) &&
      lock_.Excuses(Exemption::kStepMayProlongLease)) {
    return;
  }
  current().live_until = std::min(current().live_until, lock_.LatestEnd(since, op.sent));
  End(op, lock_.LatestEnd(since, op.sent + linger_ + kMillisecond));
}

// Whatever the answer, the owner does not count on the hold any more. (The millisecond in which the
// hold ended counts as one of the linger's.)
void Owner::GiveUp(const Operation& op, Time linger) {
  const Time closed =
      lock_.EarliestEnd(op.sent, op.sent + linger - kMillisecond - lock_.rules.lease_slack);
  // What it had before is as good as over, but for a call that waited meanwhile (seed 307572).
  for (auto hold = lock_.holds.rbegin(); hold != lock_.holds.rend() && hold->owner == op.owner;
       ++hold) {
    hold->GiveUp(op.sent, std::max(closed, op.sent));
  }
  if (state_ == State::kHolds) state_ = State::kGaveUp;
}

// --- Leases -------------------------------------------------------------------------------------

// The lease begins anew.
void Owner::Renew(const Step& step) {
  const Operation& op = step.op;
  Hold& hold = current();
  const Time begin =
      std::max(op.sent, std::min(lock_.seen.UnderLowerTokens(op.token), op.answered));
  const Time lease = std::min(op.lease, lost_.least_lease) - lock_.rules.lease_slack;
  const Time max_hold = std::min(cap_.perhaps, lost_.least_max_hold);
  const Time until = std::min(lock_.EarliestEnd(op.sent, begin + lease), EarliestCap(max_hold, 0));
  const Time closed =
      std::min(lock_.EarliestEnd(op.sent, begin + lease + linger_), EarliestCap(max_hold, linger_));
  hold.ReplaceLease(op.sent, until, closed);

  CertainHold certain{
      .op = step.index, .from = op.answered, .until = until, .closed_until = closed};
  if (lock_.Excuses(Exemption::kStrangerMayEndHold)) {
    for (const Mark* forced : lock_.marks.forced()) {
      if (forced->end < op.sent) continue;
      certain.until = std::min(certain.until, forced->begin);
      certain.closed_until = std::min(certain.closed_until, forced->begin);
    }
  }
  certain.entitled_until = certain.until;
  if (lock_.Excuses(Exemption::kServerMayForgetHold)) {
    for (const Mark* loss : lock_.marks.losses()) {
      if (loss->end < op.sent) continue;
      certain.entitled_until = std::min(certain.entitled_until, loss->begin);
    }
  }
  hold.revived = hold.revived || IsRevived(op);
  if (certain.from < certain.until && !hold.revived) hold.certain.push_back(certain);

  // It lives through the whole of its last millisecond.
  const Time latest = op.answered + op.lease + kMillisecond + lock_.rules.lease_slack;
  const bool may_be_lost = lock_.marks.MayBeOlderData(op.sent, op.answered) &&
                           lock_.Excuses(Exemption::kRenewalMayBeLost);
  // A cap that has passed when it is set ends the lease in that millisecond.
  const Time at_least = op.answered + kMillisecond + lock_.rules.lease_slack;
  const auto cut = [&](Time linger) {
    return std::min(lock_.LatestEnd(op.sent, latest + linger),
                    std::max(LatestCap(linger), lock_.LatestEnd(op.sent, at_least + linger)));
  };
  hold.over_at = cap_.surely == kNever
                     ? latest
                     : std::min(latest, std::max(cap_.granted_until + cap_.surely, op.answered) +
                                            kMillisecond + lock_.rules.lease_slack);
  hold.live_until = cut(0);
  hold.possible_until = std::max(cut(linger_), may_be_lost ? hold.possible_until : 0);
}

// A hold that was over, and replaced, is live again where the one that replaced it was lost and
// the clock is behind: then nobody holds the lock for certain.
bool Owner::IsRevived(const Operation& op) const {
  const Time since = lock_.ops[hold().told_by].sent;
  return hold().over_at != 0 && op.sent > hold().over_at &&
         lock_.marks.MayBeOlderData(since, op.answered) &&
         lock_.marks.MayBeSetBack(since, op.answered) &&
         lock_.Excuses(Exemption::kReplacedHoldMayBeRevived);
}

// From `now` on all that is certain is that the owner reads.
void Owner::ReadOnlyFrom(Time now) {
  if (hold().sharing != Sharing::kExclusive) return;
  Hold shared = hold();
  shared.sharing = Sharing::kShared;
  for (CertainHold& interval : shared.certain) interval.from = std::max(interval.from, now);
  current().GiveUp(now, now);
  lock_.holds.push_back(std::move(shared));
}

Time Owner::EarliestEndBy(const Operation& op) const {
  const Time cap = op.max_hold > 0 ? EarliestCap(op.max_hold, 0) : kNever;
  const Time lease = op.sent + op.lease - lock_.rules.lease_slack;
  return std::min(lock_.EarliestEnd(op.sent, lease), std::max(cap, op.sent));
}

// A call whose answer was lost may have set a shorter lease, or may set it later.
void Owner::ShortenBy(const Operation& op) {
  if (has_been_told() && lock_.Excuses(Exemption::kLostCallMayShortenLease)) {
    current().Shorten(EarliestEndBy(op));
  }
  if (lock_.Excuses(Exemption::kLateCallMayShortenLease)) {
    lost_.least_lease = std::min(lost_.least_lease, op.lease);
  }
}

void Owner::End(const Operation& op, Time latest) {
  if (lock_.marks.MayBeOlderData(op.sent, op.answered) &&
      lock_.Excuses(Exemption::kReleaseMayBeLost)) {
    return;  // it keeps others out for as long as its lease says to the server that still has it
  }
  current().possible_until = std::min(current().possible_until, latest);
}

// When a lost call is carried out at the latest: what is on its way to a server that is unavailable
// reaches it in the end.
Time Owner::LatestArrival(const Operation& op) const {
  return lock_.Excuses(Exemption::kLostCallMayWaitForServer)
             ? lock_.unavailable.EndOfIntervalAt(op.answered)
             : op.answered;
}

}  // namespace turnstile::fault
