// How much deferred work one pass of the event loop may do.
//
// One client must not make the server do in one go what it has piled up over hours. Work is counted
// in units of about a microsecond, not measured: the same calls then give the same history. Whoever
// runs out stops where it is and goes on in the next pass.

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
