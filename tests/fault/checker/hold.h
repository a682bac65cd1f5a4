// A hold of which a client was told, as far as the client's calls and answers show it.

#ifndef TURNSTILE_TESTS_FAULT_CHECKER_HOLD_H_
#define TURNSTILE_TESTS_FAULT_CHECKER_HOLD_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "fault/history.h"

namespace turnstile::fault {

// An interval in which an owner certainly holds the lock: from an answer until the earliest end
// that its lease can have.
struct CertainHold {
  size_t op = 0;  // whose answer said so
  Time from = 0;
  Time until = 0;           // the end of its lease
  Time closed_until = 0;    // it keeps others out until here: it may linger after its lease
  Time entitled_until = 0;  // the server has to obey until here: it may forget, and then only keeps
                            // others out
};

struct Hold {
  size_t told_by = 0;  // the first grant
  uint32_t owner = 0;
  int64_t token = 0;
  Sharing sharing = Sharing::kExclusive;
  uint16_t limit = 1;
  uint16_t weight = 1;
  uint16_t least_weight = 1;  // a newer hold, of which its owner was not told, may have another
  bool undated = false;       // its token does not tell when it was granted, by a floor or because
                              // it may be a newer hold
  bool may_write = false;     // it is kShared for certain, and perhaps kExclusive

  std::vector<CertainHold> certain;
  bool revived = false;  // it is back from older data, and not certain any more

  Time live_until = 0;      // the latest end of its lease, whatever clocks did,
  Time possible_until = 0;  // and of its linger: it may keep others out until here
  Time over_at = 0;         // the latest end of its lease if no clock was set back

  // Whether the owner certainly has it, and the server knows that, all through `op`.
  bool IsCertainThrough(const Operation& op) const;

  // Its owner does not count on it after `now`. Others are kept out until `closed_until`.
  void GiveUp(Time now, Time closed_until);

  // At `now` it ends, if it only lingers.
  void EndLinger(Time now);

  // A call may have set another lease, which ends no earlier than `until`.
  void Shorten(Time until);

  // A lease has been set by a call that was sent at `sent`. It ends at `until` at the earliest, and
  // its linger at `closed_until`.
  void ReplaceLease(Time sent, Time until, Time closed_until);
};

}  // namespace turnstile::fault

#endif  // TURNSTILE_TESTS_FAULT_CHECKER_HOLD_H_
