// The state machine of one owner of one lock. It is shown the owner's operations by the time of
// their sending, and knows before each what the owner has, as far as its answers tell.
//
//   state          ACQUIRE: token    ACQUIRE: lost    TOUCH: 1    last RELEASE, CLOSE
//   kNeverAsked    kHolds            kUntold
//   kUntold        kHolds            kUntold
//   kHolds         kHolds            kPerhapsNewer    kHolds      kGaveUp
//   kPerhapsNewer  kHolds            kPerhapsNewer    same        same
//   kGaveUp        kHolds            kPerhapsNewer    kHolds      kGaveUp
//
// Other answers change nothing but that who was refused has asked. An owner that gave up, whatever
// the answer, may still be obeyed: its release was not the last, or was lost with the server's
// data; so may one that was told by a message that its hold is lost. Beside the state, which says
// what the owner was told, there is what it was not told: calls that were lost may have been
// carried out, or may be yet.

#ifndef TURNSTILE_TESTS_FAULT_CHECKER_OWNER_H_
#define TURNSTILE_TESTS_FAULT_CHECKER_OWNER_H_

#include <cstddef>
#include <cstdint>
#include <limits>

#include "fault/checker/hold.h"
#include "fault/checker/lock_history.h"
#include "fault/history.h"

namespace turnstile::fault {

// How often an owner has its hold, which is how often it has to release it.
struct CountRange {
  int least = 0;
  int most = 0;

  void Set(int new_least, int new_most) { least = new_least, most = new_most; }
  void Add(int grants) { Set(least + grants, most + grants); }
  void AddPerhaps(int grants) { most += grants; }
  void Subtract() { Set(least - 1, most - 1); }
  void SubtractPerhaps() { --least; }
  void BeAtLeastOne();
  void BeAny();
};

// Calls whose answers were lost.
struct LostCalls {
  Time first_asked = kNever;  // of an ACQUIRE
  bool held_back = false;     // one may arrive after what was asked since
  bool upgrade = false;       // one asked to write, and its owner reads
  int64_t highest_floor = 0;
  int reentrant = 0;          // how many ask for the hold once more
  Time least_lease = kNever;  // of ACQUIREs and TOUCHes
  Time least_max_hold = kNever;
};

// How long the hold may last after its first grant, through changes of mode and of token.
struct CapBelief {
  Time granted_from = 0;   // the first grant was not earlier than this,
  Time granted_until = 0;  // and not later
  Time perhaps = kNever;   // the shortest MAXHOLD that may count,
  Time surely = kNever;    // and the shortest that does
};

// Whether an owner reads or writes. One that never changes between the two has no doubts.
struct ModeBelief {
  bool changes = false;
  bool unsure = false;  // it reads at least
};

// An operation, and how the owner stands when it is sent.
struct Step {
  size_t index;
  const Operation& op;
  bool rightful = false;  // it certainly holds the lock, and the server knows it, until the answer
  bool upgrade = false;   // it reads, and asks to write
};

class Owner {
 public:
  enum class State : uint8_t {
    kNeverAsked,
    kUntold,        // it asked, and was told of no hold
    kHolds,         // it was told of a hold
    kPerhapsNewer,  // and asked again and was not told: it may have another one
    kGaveUp,        // it released the hold, as often as it surely has to, or closed its session
  };

  explicit Owner(LockHistory& lock) : lock_(lock) {}

  // Begins with the next operation. After checks have looked at it, Follow() ends with it.
  Step Meet(size_t index);
  void Follow(const Step& step);

  State state() const { return state_; }
  bool has_been_told() const { return state_ >= State::kHolds; }

  // Of who has been told of a hold:
  const Hold& hold() const { return lock_.holds.back(); }
  size_t told_by() const { return told_by_; }
  int64_t token() const { return has_been_told() ? lock_.ops[told_by_].token : 0; }
  const CountRange& count() const { return count_; }

  Time first_asked() const { return first_asked_; }
  const LostCalls& lost() const { return lost_; }

  // Since when the owner has been asking for what `op`, a grant, tells.
  Time AskingSince(const Operation& op) const;

  // Whether a grant tells another token because it was asked to raise it to a floor.
  bool IsRaised(const Operation& grant) const;

  // Whether a call that was lost may have changed the token of the hold.
  bool MayHaveAnotherToken() const;

  // Whether the token that `op` shows is that of the hold. (A touch does not tell what it touched.)
  bool ShowsItsToken(const Operation& op) const;

  // Whether it may have stood in line for the lock when it sent `op`: a release gives up the place,
  // whether or not there is a hold.
  bool MayStandInLine(const Operation& op) const { return op.sent < in_line_until_; }

  // Whether what the owner has may be of any time since it first asked.
  bool MayHaveOlderHold(const Operation& op) const;

 private:
  void DoubtMode(const Operation& op);

  void Acquired(const Step& step);
  void LoseAcquire(const Step& step);
  void TakeGrant(const Step& step);
  void BeginHold(const Step& step);
  void Touched(const Step& step);
  void Released(const Step& step);
  void Closed(const Step& step);
  void ToldOfLoss(const Operation& op);

  void BeginCap(const Step& step, bool may_be_same, bool is_same);
  // When the lease that this call sets for the hold so far ends at the earliest.
  Time EarliestEndBy(const Operation& op) const;
  // The earliest and the latest end of a hold with this cap and a linger, or kNever.
  Time EarliestCap(Time max_hold, Time linger) const;
  Time LatestCap(Time linger) const;
  void CountGrant(const Operation& op);
  void CountRelease(const Operation& op);
  void Renew(const Step& step);
  bool IsRevived(const Operation& op) const;
  void ReadOnlyFrom(Time now);
  void ShortenBy(const Operation& op);
  void GiveUp(const Operation& op, Time linger);
  // By `op` the hold has ended at `latest`.
  void End(const Operation& op, Time latest);
  Time LatestArrival(const Operation& op) const;

  Hold& current() { return lock_.holds.back(); }

  LockHistory& lock_;
  State state_ = State::kNeverAsked;
  size_t told_by_ = 0;     // the last grant
  uint32_t bound_at_ = 0;  // which server knows the channel of the hold
  Time first_asked_ = kNever;
  Time in_line_until_ = 0;
  Time linger_ = 0;         // the longest that it asked for
  bool reentrant_ = false;  // it asked for some grants to be counted
  CountRange count_;
  LostCalls lost_;
  CapBelief cap_;
  ModeBelief mode_;
};

}  // namespace turnstile::fault

#endif  // TURNSTILE_TESTS_FAULT_CHECKER_OWNER_H_
