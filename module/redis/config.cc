#include "redis/config.h"

#include <algorithm>
#include <iterator>

#include "core/token_clock.h"

namespace turnstile {
namespace {

struct Setting {
  const char* name;
  long long value;  // the default until the server sets it
  long long least;
  long long most;
};

constexpr long long kSecond = 1000;
constexpr long long kDay = 24LL * 3600 * kSecond;

// The least lease limit is a second, so that EX always has something to say; the most is ten years,
// far inside what the storage format can hold.
Setting max_lease{"max-lease-ms", kDay, kSecond, 3650 * kDay};
Setting token_margin{"token-margin-ms", 30 * kSecond, 0, kLargestLeadForMargin.count()};
Setting failover_grace{"failover-grace-ms", 0, 0, 3650 * kDay};
// The server itself takes 28 to 48 KB of memory for each waiting client.
Setting max_waiters{"max-waiters", 5000, 0, 1000000};

Setting* const kSettings[] = {&max_lease, &token_margin, &failover_grace, &max_waiters};

long long Get(const char* /*name*/, void* setting) { return static_cast<Setting*>(setting)->value; }

int Set(const char* /*name*/, long long value, void* setting, RedisModuleString** /*error*/) {
  static_cast<Setting*>(setting)->value = value;
  return REDISMODULE_OK;
}

}  // namespace

Limits CurrentLimits() { return Limits{.max_lease = Millis{max_lease.value}}; }

Millis TokenMargin() { return Millis{token_margin.value}; }

Millis FailoverGrace() { return Millis{failover_grace.value}; }

size_t MaxWaiters() { return static_cast<size_t>(max_waiters.value); }

bool RegisterConfig(RedisModuleCtx* ctx) {
  const bool registered =
      std::all_of(std::begin(kSettings), std::end(kSettings), [ctx](Setting* setting) {
        return RedisModule_RegisterNumericConfig(
                   ctx, setting->name, setting->value, REDISMODULE_CONFIG_DEFAULT, setting->least,
                   setting->most, Get, Set, nullptr, setting) == REDISMODULE_OK;
      });
  return registered && RedisModule_LoadConfigs(ctx) == REDISMODULE_OK;
}

}  // namespace turnstile
