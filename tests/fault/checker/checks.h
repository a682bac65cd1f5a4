// The checks C1 to C6, one file for each. Some judge each operation by what is known of its owner
// when it is sent; the others look at all of a lock when every owner has been followed.

#ifndef TURNSTILE_TESTS_FAULT_CHECKER_CHECKS_H_
#define TURNSTILE_TESTS_FAULT_CHECKER_CHECKS_H_

#include <cstddef>
#include <string>
#include <vector>

#include "fault/checker/checker.h"
#include "fault/checker/lock_history.h"
#include "fault/checker/owner.h"
#include "fault/history.h"

namespace turnstile::fault {

// Where checks put what they find.
class Report {
 public:
  explicit Report(const std::vector<Operation>& ops) : ops_(ops) {}

  // `operations` show it, the last one at last.
  void Violated(const char* check, std::string text, std::vector<size_t> operations);

  Findings findings;

 private:
  const std::vector<Operation>& ops_;
};

// C1
void CheckExclusion(const LockHistory& lock, Report& report);

// C2
void CheckObedience(const LockHistory& lock, const Owner& owner, const Step& step, Report& report);
void CheckRegister(const LockHistory& lock, Report& report);

// C3
void CheckNewToken(const LockHistory& lock, const Owner& owner, const Step& step, Report& report);
void CheckTokensDiffer(const LockHistory& lock, Report& report);

// C4
void CheckWaits(const LockHistory& lock, Report& report);
void CheckIdleness(const LockHistory& lock, Report& report);

// C5. By operation: what had been sent to the same server before this time had surely arrived there
// when the operation was sent.
std::vector<Time> FindArrivals(const std::vector<Operation>& ops);
void CheckOrder(const LockHistory& lock, const std::vector<Time>& arrived_before, Report& report);

// C6
void CheckStranger(const Operation& op, size_t index, Report& report);
void CheckAskingAgain(const LockHistory& lock, const Owner& owner, const Step& step,
                      Report& report);
void CheckCount(const LockHistory& lock, const Owner& owner, const Step& step, Report& report);

}  // namespace turnstile::fault

#endif  // TURNSTILE_TESTS_FAULT_CHECKER_CHECKS_H_
