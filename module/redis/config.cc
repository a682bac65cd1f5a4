#include "redis/config.h"

#include <algorithm>
#include <iterator>
#include <string_view>
#include <vector>

#include "core/token_clock.h"
#include "redis/events.h"

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

Setting max_waiters_per_user{"max-waiters-per-user", 0, 0, 1000000};  // 0: no limit

Setting* const kSettings[] = {&max_lease, &token_margin, &failover_grace, &max_waiters,
                              &max_waiters_per_user};

long long Get(const char* /*name*/, void* setting) { return static_cast<Setting*>(setting)->value; }

int Set(const char* /*name*/, long long value, void* setting, RedisModuleString** /*error*/) {
  static_cast<Setting*>(setting)->value = value;
  return REDISMODULE_OK;
}

// turnstile.reset-stats is a button: it reads as no, also after it was set to yes. (CONFIG
// RESETSTAT is not told to modules.)
constexpr const char* kResetStats = "reset-stats";

int NotReset(const char* /*name*/, void* /*data*/) { return 0; }

int Reset(const char* /*name*/, int yes, void* /*data*/, RedisModuleString** /*error*/) {
  if (yes == 0) return REDISMODULE_OK;
  Events().Drain();  // what happened before is counted before
  TheStats() = {};
  return REDISMODULE_OK;
}

Setting* FindSetting(std::string_view name) {
  constexpr std::string_view kPrefix = "turnstile.";
  if (IsKeyword(name.substr(0, kPrefix.size()), kPrefix)) name.remove_prefix(kPrefix.size());
  for (Setting* setting : kSettings) {
    if (IsKeyword(name, setting->name)) return setting;
  }
  return nullptr;
}

}  // namespace

std::optional<std::string> TakeArguments(std::span<RedisModuleString*> args) {
  std::vector<const Setting*> given;
  for (; !args.empty(); args = args.subspan(2)) {
    const std::string_view name = ToView(args[0]);
    Setting* setting = FindSetting(name);
    if (setting == nullptr) {
      std::string names;
      for (const Setting* known : kSettings) names += std::string(" ") + known->name;
      return "there is no setting " + Quoted(name) + " among" + names;
    }
    if (std::find(given.begin(), given.end(), setting) != given.end()) {
      return std::string(setting->name) + " is given twice";
    }
    given.push_back(setting);
    const std::string_view text = args.size() > 1 ? ToView(args[1]) : "";
    const std::optional<int64_t> value = ParseDigits(text);
    if (!value.has_value() || *value < setting->least || *value > setting->most) {
      return std::string(setting->name) + " must be a whole number from " +
             std::to_string(setting->least) + " to " + std::to_string(setting->most) +
             " in plain digits, not " + Quoted(text);
    }
    setting->value = *value;
  }
  return std::nullopt;
}

std::string DescribeSettings() {
  std::string text;
  for (const Setting* setting : kSettings) {
    if (!text.empty()) text += ", ";
    text += std::string(setting->name) + ' ' + std::to_string(setting->value);
  }
  return text;
}

Limits CurrentLimits() { return Limits{.max_lease = Millis{max_lease.value}}; }

Millis TokenMargin() { return Millis{token_margin.value}; }

Millis FailoverGrace() { return Millis{failover_grace.value}; }

size_t MaxWaiters() { return static_cast<size_t>(max_waiters.value); }

size_t MaxWaitersPerUser() { return static_cast<size_t>(max_waiters_per_user.value); }

bool RegisterConfig(RedisModuleCtx* ctx) {
  const bool registered =
      std::all_of(std::begin(kSettings), std::end(kSettings), [ctx](Setting* setting) {
        return RedisModule_RegisterNumericConfig(
                   ctx, setting->name, setting->value, REDISMODULE_CONFIG_DEFAULT, setting->least,
                   setting->most, Get, Set, nullptr, setting) == REDISMODULE_OK;
      });
  return registered &&
         RedisModule_RegisterBoolConfig(ctx, kResetStats, /*default_val=*/0,
                                        REDISMODULE_CONFIG_DEFAULT, NotReset, Reset, nullptr,
                                        nullptr) == REDISMODULE_OK &&
         RedisModule_LoadConfigs(ctx) == REDISMODULE_OK;
}

}  // namespace turnstile
