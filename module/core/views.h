// The lock views of a request, for the rules (decide.h) to decide on.

#ifndef TURNSTILE_CORE_VIEWS_H_
#define TURNSTILE_CORE_VIEWS_H_

#include <span>
#include <vector>

#include "core/decide.h"
#include "core/host.h"

namespace turnstile {

// A request for one lock costs no allocation.
class LockViews {
 public:
  // `ahead_of` returns the waiters ahead of the request, given the index of a key, the key and its
  // state.
  template <typename AheadOf>
  LockViews(const OpenKeys& keys, AheadOf ahead_of)
      : first_(ViewOf(0, keys[0], ahead_of)), views_(&first_, 1) {
    if (keys.size() == 1) return;
    all_.reserve(keys.size());
    all_.push_back(first_);
    for (size_t i = 1; i < keys.size(); ++i) all_.push_back(ViewOf(i, keys[i], ahead_of));
    views_ = all_;
  }
  LockViews(const LockViews&) = delete;
  LockViews& operator=(const LockViews&) = delete;

  std::span<const LockView> get() const { return views_; }

 private:
  template <typename AheadOf>
  static LockView ViewOf(size_t index, const OpenKey& key, AheadOf& ahead_of) {
    const KeyState key_state = key.state();
    return {key_state, ahead_of(index, key, key_state)};
  }

  LockView first_;
  std::vector<LockView> all_;  // if there are several
  std::span<const LockView> views_;
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_VIEWS_H_
