// Limits how much deferred work one pass of the event loop may do.
//
// A client can accumulate work over hours; the server must not have to do all of it in one pass.
// Work is counted in units of about a microsecond rather than measured, so the same calls always
// give the same history. Work that exceeds the budget stops where it is and continues in the next
// pass.

#ifndef TURNSTILE_CORE_BUDGET_H_
#define TURNSTILE_CORE_BUDGET_H_

#include <cstddef>

namespace turnstile {

class Budget {
 public:
  explicit Budget(size_t units) : left_(units) {}

  bool spent() const { return left_ == 0; }
  // The last step of a pass may cost more than what is left.
  void Spend(size_t units) { left_ = units < left_ ? left_ - units : 0; }

 private:
  size_t left_;
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_BUDGET_H_
