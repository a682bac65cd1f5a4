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
  class Share;

  explicit Budget(size_t units) : left_(units) {}

  bool spent() const { return left_ == 0; }
  // The last step of a pass may cost more than what is left.
  void Spend(size_t units) {
    left_ = units < left_ ? left_ - units : 0;
    spent_ += units;
  }
  // Half of what is left, so that one kind of work leaves something for the next. What was spent of
  // it, or beyond it by its last step, is charged to the whole when the share goes out of scope.
  Share Half();

 private:
  size_t left_;
  size_t spent_ = 0;
};

class Budget::Share {
 public:
  explicit Share(Budget& whole) : whole_(whole), part_((whole.left_ + 1) / 2) {}
  ~Share() { whole_.Spend(part_.spent_); }
  Share(const Share&) = delete;
  Share& operator=(const Share&) = delete;

  Budget& operator*() { return part_; }

 private:
  Budget& whole_;
  Budget part_;
};

inline Budget::Share Budget::Half() { return Share(*this); }

}  // namespace turnstile

#endif  // TURNSTILE_CORE_BUDGET_H_
