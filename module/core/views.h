// What a request finds in the locks that it names, for the rules (decide.h) to decide on.

#ifndef TURNSTILE_CORE_VIEWS_H_
#define TURNSTILE_CORE_VIEWS_H_

#include <span>
#include <vector>

#include "core/decide.h"
#include "core/host.h"

namespace turnstile {

// A request for one lock costs no allocation.
class Sites {
 public:
  // `ahead_of` says who waits before the request, given the number of a key, the key and what is in
  // it.
  template <typename AheadOf>
  Sites(const OpenKeys& keys, AheadOf ahead_of)
      : first_(LookAt(0, keys[0], ahead_of)), sites_(&first_, 1) {
    if (keys.size() == 1) return;
    all_.reserve(keys.size());
    all_.push_back(first_);
    for (size_t i = 1; i < keys.size(); ++i) all_.push_back(LookAt(i, keys[i], ahead_of));
    sites_ = all_;
  }
  Sites(const Sites&) = delete;
  Sites& operator=(const Sites&) = delete;

  std::span<const Site> get() const { return sites_; }

 private:
  template <typename AheadOf>
  static Site LookAt(size_t index, const OpenKey& key, AheadOf& ahead_of) {
    const Place place = key.place();
    return {place, ahead_of(index, key, place)};
  }

  Site first_;
  std::vector<Site> all_;  // if there are more
  std::span<const Site> sites_;
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_VIEWS_H_
