// A timer of the server that makes the event loop turn.

#ifndef TURNSTILE_REDIS_ALARM_H_
#define TURNSTILE_REDIS_ALARM_H_

#include <algorithm>
#include <optional>

#include "core/host.h"
#include "redis/redis_api.h"

namespace turnstile {

// One timer, for whatever is due next.
class Alarm {
 public:
  // An alarm that rings earlier than `due` is left as it is: it will be set anew when it rings. But
  // the server's timers follow the wall clock: after a step none rings when it should.
  void Set(RedisModuleCtx* ctx, Host& host, Instant due, const Now& time) {
    const Instant now = time.moment();
    const Millis ahead = now.time_since_epoch() - time.tick().time_since_epoch();
    constexpr Millis kNoStep{2};  // each of the two is cut to a millisecond
    const bool stepped = std::chrono::abs(ahead - ahead_) > kNoStep;
    if (rings_.has_value() && due >= *rings_ && !stepped) return;
    if (rings_.has_value()) RedisModule_StopTimer(ctx, timer_, nullptr);
    rings_ = due;
    ahead_ = ahead;
    timer_ = RedisModule_CreateTimer(ctx, std::max(due - now, Millis{0}).count(), Ring, this);
    // 7.0 has by now computed how long it will sleep, at most one period of its cron.
    constexpr Millis kLongestSleep{1000};
    if (due - now < kLongestSleep) host.WakeEventLoop();
  }

 private:
  static void Ring(RedisModuleCtx* /*ctx*/, void* alarm) {
    static_cast<Alarm*>(alarm)->rings_.reset();
  }

  RedisModuleTimerID timer_ = 0;
  std::optional<Instant> rings_;
  Millis ahead_{0};  // so far the wall clock was then ahead of the steady one
};

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_ALARM_H_
