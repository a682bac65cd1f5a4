// The settings of operators, as the engine uses them. Their public names, ranges and defaults are
// in redis/config.cc.

#ifndef TURNSTILE_CORE_SETTINGS_H_
#define TURNSTILE_CORE_SETTINGS_H_

#include <cstddef>

#include "core/types.h"

namespace turnstile {

struct Settings {
  Millis max_lease{24LL * 3600 * 1000};
  Millis token_margin{30'000};
  Millis failover_grace{0};
  size_t max_waiters = 5'000;       // that block their clients
  size_t max_queued = 100'000;      // entries in queues of those that do not
  size_t max_waiters_per_user = 0;  // 0: no limit
  size_t max_holders = 10'000;      // of one lock
  bool plain_locks = true;          // whether a string counts as a lock held by its value
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_SETTINGS_H_
