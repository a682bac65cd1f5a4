#include "redis/config.h"

#include <algorithm>
#include <iterator>
#include <string_view>
#include <vector>

#include "core/request.h"
#include "core/settings.h"
#include "core/token_clock.h"
#include "redis/redis_host.h"

namespace turnstile {
namespace {

constexpr long long kSecond = 1000;
constexpr long long kDay = 24LL * 3600 * kSecond;

// A number that operators can set. Its default is the one in core/settings.h.
struct Setting {
  const char* name;
  long long least;
  long long most;
  long long (*get)(const Settings& settings);
  void (*set)(Settings& settings, long long value);
};

template <Millis Settings::*kField>
constexpr Setting Duration(const char* name, long long least, long long most) {
  return {
      name, least, most,
      [](const Settings& settings) { return static_cast<long long>((settings.*kField).count()); },
      [](Settings& settings, long long value) { settings.*kField = Millis{value}; }};
}

template <size_t Settings::*kField>
constexpr Setting Number(const char* name, long long least, long long most) {
  return {
      name, least, most,
      [](const Settings& settings) { return static_cast<long long>(settings.*kField); },
      [](Settings& settings, long long value) { settings.*kField = static_cast<size_t>(value); }};
}

constexpr Setting kSettings[] = {
    // The lease limit is at least a second, so that EX can always be used, and at most ten years,
    // far below what the storage format can hold.
    Duration<&Settings::max_lease>("max-lease-ms", kSecond, 3650 * kDay),
    // A token that leads by more than this could not be moved to another server.
    Duration<&Settings::token_margin>("token-margin-ms", 0, kLargestAdoptedLead.count()),
    Duration<&Settings::failover_grace>("failover-grace-ms", 0, 3650 * kDay),
    // The server itself uses 28 to 48 KB of memory for each waiting client.
    Number<&Settings::max_waiters>("max-waiters", 0, 1000000),
    // Places of calls that do not block, each of less than a kilobyte.
    Number<&Settings::max_queued>("max-queued", 0, 10000000),
    Number<&Settings::max_waiters_per_user>("max-waiters-per-user", 0, 1000000),
    // Of one lock. The cost of some commands is proportional to the number of its holders.
    Number<&Settings::max_holders>("max-holders", 1, 100000),
};

// A setting with the values yes and no.
constexpr const char* kPlainLocks = "plain-locks";

Settings& TheSettings() { return TheInstance().engine.settings(); }

// The server keeps a pointer to the setting, which it treats as mutable private data.
const Setting& SettingOf(void* data) { return *static_cast<const Setting*>(data); }

long long Get(const char* /*name*/, void* data) { return SettingOf(data).get(TheSettings()); }

int Set(const char* /*name*/, long long value, void* data, RedisModuleString** /*error*/) {
  SettingOf(data).set(TheSettings(), value);
  TheInstance().engine.OnSettingsChanged();  // max-holders may be higher, or the grace shorter
  return REDISMODULE_OK;
}

int GetPlainLocks(const char* /*name*/, void* /*data*/) {
  return TheSettings().plain_locks ? 1 : 0;
}

int SetPlainLocks(const char* /*name*/, int value, void* /*data*/, RedisModuleString** /*error*/) {
  TheSettings().plain_locks = value != 0;
  TheInstance().engine.OnSettingsChanged();  // some calls may be waiting for a string
  return REDISMODULE_OK;
}

// turnstile.reset-stats is a button: it reads as no, even after it was set to yes. (Modules are not
// notified of CONFIG RESETSTAT.)
constexpr const char* kResetStats = "reset-stats";

int NotReset(const char* /*name*/, void* /*data*/) { return 0; }

int Reset(const char* /*name*/, int yes, void* /*data*/, RedisModuleString** /*error*/) {
  if (yes == 0) return REDISMODULE_OK;
  TheInstance().engine.PublishPending();  // so that it is counted before the reset
  TheInstance().engine.stats() = {};
  return REDISMODULE_OK;
}

bool IsNamed(std::string_view name, const char* setting) {
  constexpr std::string_view kPrefix = "turnstile.";
  if (IsKeyword(name.substr(0, kPrefix.size()), kPrefix)) name.remove_prefix(kPrefix.size());
  return IsKeyword(name, setting);
}

// Sets the named setting. Returns an error message if the value is not valid.
std::optional<std::string> Take(const Setting& setting, std::string_view text) {
  const std::optional<int64_t> value = ParseDigits(text);
  if (!value.has_value() || *value < setting.least || *value > setting.most) {
    return std::string(setting.name) + " must be an integer from " + std::to_string(setting.least) +
           " to " + std::to_string(setting.most) + " in plain digits, not " + Quoted(text);
  }
  setting.set(TheSettings(), *value);
  return std::nullopt;
}

std::optional<std::string> TakePlainLocks(std::string_view text) {
  if (!IsKeyword(text, "yes") && !IsKeyword(text, "no")) {
    return std::string(kPlainLocks) + " must be yes or no, not " + Quoted(text);
  }
  TheSettings().plain_locks = IsKeyword(text, "yes");
  return std::nullopt;
}

std::optional<std::string> TakeArgument(std::string_view name, std::string_view value,
                                        std::vector<std::string_view>& given) {
  std::string names;
  const auto is_named = [&](const char* setting) {
    names += std::string(" ") + setting;
    return IsNamed(name, setting);
  };
  const auto is_new = [&](std::string_view setting) {
    if (std::find(given.begin(), given.end(), setting) != given.end()) return false;
    given.push_back(setting);
    return true;
  };
  constexpr const char* kTwice = " is given twice";
  for (const Setting& setting : kSettings) {
    if (!is_named(setting.name)) continue;
    return is_new(setting.name) ? Take(setting, value) : setting.name + std::string(kTwice);
  }
  if (is_named(kPlainLocks)) {
    return is_new(kPlainLocks) ? TakePlainLocks(value) : kPlainLocks + std::string(kTwice);
  }
  return "unknown setting " + Quoted(name) + ", expected one of:" + names;
}

}  // namespace

std::optional<std::string> TakeArguments(std::span<RedisModuleString*> args) {
  std::vector<std::string_view> given;
  for (; !args.empty(); args = args.subspan(std::min<size_t>(args.size(), 2))) {
    const std::string_view value = args.size() > 1 ? ToView(args[1]) : "";
    auto wrong = TakeArgument(ToView(args[0]), value, given);
    if (wrong.has_value()) return wrong;
  }
  return std::nullopt;
}

std::string DescribeSettings() {
  std::string text;
  for (const Setting& setting : kSettings) {
    text += std::string(setting.name) + ' ' + std::to_string(setting.get(TheSettings())) + ", ";
  }
  return text + kPlainLocks + (TheSettings().plain_locks ? " yes" : " no");
}

bool RegisterConfig(RedisModuleCtx* ctx) {
  for (const Setting& setting : kSettings) {
    if (RedisModule_RegisterNumericConfig(ctx, setting.name, setting.get(TheSettings()),
                                          REDISMODULE_CONFIG_DEFAULT, setting.least, setting.most,
                                          Get, Set, nullptr,
                                          const_cast<Setting*>(&setting)) != REDISMODULE_OK) {
      return false;
    }
  }
  return RedisModule_RegisterBoolConfig(ctx, kPlainLocks, TheSettings().plain_locks ? 1 : 0,
                                        REDISMODULE_CONFIG_DEFAULT, GetPlainLocks, SetPlainLocks,
                                        nullptr, nullptr) == REDISMODULE_OK &&
         RedisModule_RegisterBoolConfig(ctx, kResetStats, /*default_val=*/0,
                                        REDISMODULE_CONFIG_DEFAULT, NotReset, Reset, nullptr,
                                        nullptr) == REDISMODULE_OK &&
         RedisModule_LoadConfigs(ctx) == REDISMODULE_OK;
}

}  // namespace turnstile
