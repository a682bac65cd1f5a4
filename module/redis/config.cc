#include "redis/config.h"

#include <algorithm>
#include <iterator>
#include <string_view>
#include <vector>

#include "core/token_clock.h"
#include "redis/events.h"
#include "redis/waiters.h"

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
// A token that leads by more than this could be moved to no other server.
Setting token_margin{"token-margin-ms", 30 * kSecond, 0, kLargestAdoptedLead.count()};
Setting failover_grace{"failover-grace-ms", 0, 0, 3650 * kDay};
// The server itself takes 28 to 48 KB of memory for each waiting client.
Setting max_waiters{"max-waiters", 5000, 0, 1000000};
// Of one lock. Some commands cost in proportion to the number of its holders.
Setting max_holders{"max-holders", 10000, 1, 100000};

Setting max_waiters_per_user{"max-waiters-per-user", 0, 0, 1000000};  // 0: no limit

Setting* const kSettings[] = {&max_lease,   &token_margin,         &failover_grace,
                              &max_waiters, &max_waiters_per_user, &max_holders};

long long Get(const char* /*name*/, void* setting) { return static_cast<Setting*>(setting)->value; }

int Set(const char* /*name*/, long long value, void* setting, RedisModuleString** /*error*/) {
  static_cast<Setting*>(setting)->value = value;
  TheWaiters().DatabaseChanged(std::nullopt);  // more may hold a lock now, or the grace be over
  return REDISMODULE_OK;
}

// A setting that is yes or no.
struct Switch {
  const char* name;
  bool value;  // the default until the server sets it
};

Switch plain_locks{"plain-locks", true};

int GetSwitch(const char* /*name*/, void* setting) {
  return static_cast<Switch*>(setting)->value ? 1 : 0;
}

int SetPlainLocks(const char* /*name*/, int value, void* setting, RedisModuleString** /*error*/) {
  auto& plain = *static_cast<Switch*>(setting);
  if (plain.value == (value != 0)) return REDISMODULE_OK;
  plain.value = value != 0;
  TheWaiters().DatabaseChanged(std::nullopt);  // some may wait for a string
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

bool IsNamed(std::string_view name, const char* setting) {
  constexpr std::string_view kPrefix = "turnstile.";
  if (IsKeyword(name.substr(0, kPrefix.size()), kPrefix)) name.remove_prefix(kPrefix.size());
  return IsKeyword(name, setting);
}

// Returns what is wrong with the value, if anything is.
std::optional<std::string> Take(Setting& setting, std::string_view text) {
  const std::optional<int64_t> value = ParseDigits(text);
  if (!value.has_value() || *value < setting.least || *value > setting.most) {
    return std::string(setting.name) + " must be a whole number from " +
           std::to_string(setting.least) + " to " + std::to_string(setting.most) +
           " in plain digits, not " + Quoted(text);
  }
  setting.value = *value;
  return std::nullopt;
}

std::optional<std::string> Take(Switch& setting, std::string_view text) {
  if (!IsKeyword(text, "yes") && !IsKeyword(text, "no")) {
    return std::string(setting.name) + " must be yes or no, not " + Quoted(text);
  }
  setting.value = IsKeyword(text, "yes");
  return std::nullopt;
}

// Hands the setting of this name to `visit`. Returns whether there is one.
template <typename Visit>
bool VisitSetting(std::string_view name, Visit visit) {
  for (Setting* setting : kSettings) {
    if (IsNamed(name, setting->name)) return visit(*setting), true;
  }
  if (IsNamed(name, plain_locks.name)) return visit(plain_locks), true;
  return false;
}

}  // namespace

std::optional<std::string> TakeArguments(std::span<RedisModuleString*> args) {
  std::vector<std::string_view> given;
  for (; !args.empty(); args = args.subspan(std::min<size_t>(args.size(), 2))) {
    const std::string_view name = ToView(args[0]);
    const std::string_view value = args.size() > 1 ? ToView(args[1]) : "";
    std::optional<std::string> wrong;
    const bool found = VisitSetting(name, [&](auto& setting) {
      if (std::find(given.begin(), given.end(), setting.name) != given.end()) {
        wrong = std::string(setting.name) + " is given twice";
      } else {
        given.emplace_back(setting.name);
        wrong = Take(setting, value);
      }
    });
    if (!found) {
      std::string names;
      for (const Setting* known : kSettings) names += std::string(" ") + known->name;
      return "there is no setting " + Quoted(name) + " among" + names + ' ' + plain_locks.name;
    }
    if (wrong.has_value()) return wrong;
  }
  return std::nullopt;
}

std::string DescribeSettings() {
  std::string text;
  for (const Setting* setting : kSettings) {
    if (!text.empty()) text += ", ";
    text += std::string(setting->name) + ' ' + std::to_string(setting->value);
  }
  return text + ", " + plain_locks.name + (plain_locks.value ? " yes" : " no");
}

Limits CurrentLimits() { return Limits{.max_lease = Millis{max_lease.value}}; }

Millis TokenMargin() { return Millis{token_margin.value}; }

Millis FailoverGrace() { return Millis{failover_grace.value}; }

size_t MaxHolders() { return static_cast<size_t>(max_holders.value); }

bool PlainLocks() { return plain_locks.value; }

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
         RedisModule_RegisterBoolConfig(ctx, plain_locks.name, plain_locks.value ? 1 : 0,
                                        REDISMODULE_CONFIG_DEFAULT, GetSwitch, SetPlainLocks,
                                        nullptr, &plain_locks) == REDISMODULE_OK &&
         RedisModule_RegisterBoolConfig(ctx, kResetStats, /*default_val=*/0,
                                        REDISMODULE_CONFIG_DEFAULT, NotReset, Reset, nullptr,
                                        nullptr) == REDISMODULE_OK &&
         RedisModule_LoadConfigs(ctx) == REDISMODULE_OK;
}

}  // namespace turnstile
