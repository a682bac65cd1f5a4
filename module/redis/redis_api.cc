#define TURNSTILE_DEFINES_REDIS_API
#include "redis/redis_api.h"

#include <algorithm>
#include <ctime>
#include <iterator>
#include <utility>

#include "core/request.h"

namespace turnstile {
namespace {

// Calls that not every server has. Null where it has not.
long long (*server_microseconds)() = nullptr;
int (*add_acl_category)(RedisModuleCtx*, const char*) = nullptr;
int (*set_command_acl_categories)(RedisModuleCommand*, const char*) = nullptr;
int (*must_obey_client)(RedisModuleCtx*) = nullptr;

template <typename Function>
void Find(const char* name, Function& function) {
  RedisModule_GetApi(name, static_cast<void*>(&function));
}

constexpr int Version(int major, int minor) { return major << 16 | minor << 8; }

constexpr std::string_view kRedis = "Redis";
constexpr std::string_view kValkey = "Valkey";
constexpr std::string_view kRedict = "Redict";

// The oldest version of each that has every call we need.
constexpr std::pair<std::string_view, int> kOldest[] = {
    {kRedis, Version(7, 0)}, {kValkey, Version(7, 2)}, {kRedict, Version(7, 3)}};

// docs/operations.md tells the same.
struct TestedEngine {
  std::string_view name;
  int from;
  int before;
};
constexpr TestedEngine kTested[] = {
    {kRedis, Version(7, 0), Version(7, 1)},  {kRedis, Version(8, 0), Version(8, 1)},
    {kValkey, Version(8, 0), Version(8, 2)}, {kValkey, Version(9, 0), Version(10, 0)},
    {kRedict, Version(7, 3), Version(7, 4)},
};

}  // namespace

bool InitRedisApi(RedisModuleCtx* ctx, int module_version) {
  if (RedisModule_Init(ctx, kModuleName, module_version, REDISMODULE_APIVER_1) != REDISMODULE_OK) {
    return false;
  }
  Find("RedisModule_Microseconds", server_microseconds);
  Find("RedisModule_AddACLCategory", add_acl_category);
  Find("RedisModule_SetCommandACLCategories", set_command_acl_categories);
  Find("RedisModule_MustObeyClient", must_obey_client);
  return true;
}

namespace {

bool finds_clients_without_connection = false;

}  // namespace

EngineVersion FindEngine(RedisModuleCtx* ctx) {
  EngineVersion engine{.name = std::string(kRedis)};
  if (RedisModule_GetServerVersion == nullptr || RedisModule_GetServerInfo == nullptr) {
    return engine;
  }
  engine.version = RedisModule_GetServerVersion();
  RedisModuleServerInfoData* info = RedisModule_GetServerInfo(ctx, "server");
  const auto field = [info](const char* name) {
    return RedisModule_ServerInfoGetFieldC(info, name);
  };
  if (field("valkey_version") != nullptr) {
    engine.name = kValkey;
  } else if (field("redict_version") != nullptr) {
    engine.name = kRedict;
  } else if (const char* name = field("server_name");
             name != nullptr && !IsKeyword(name, "redis")) {
    engine.name = name;
  }
  RedisModule_FreeServerInfo(ctx, info);
  finds_clients_without_connection = engine.name == kValkey && engine.version >= Version(9, 0);
  return engine;
}

std::string EngineVersion::Describe() const {
  if (version == 0) return name + " older than 6.2";
  const auto number = static_cast<unsigned>(version);
  return name + ' ' + std::to_string(number >> 16) + '.' + std::to_string(number >> 8 & 0xff) +
         '.' + std::to_string(number & 0xff);
}

bool EngineVersion::IsKnown() const {
  return std::any_of(std::begin(kOldest), std::end(kOldest), [this](const auto& oldest) {
    return name == oldest.first && version >= oldest.second;
  });
}

const char* EngineVersion::Remark() const {
  const bool tested =
      std::any_of(std::begin(kTested), std::end(kTested), [this](const TestedEngine& engine) {
        return name == engine.name && version >= engine.from && version < engine.before;
      });
  if (!tested) return ", which is untested";
  // See MoveRepair in callbacks.cc. Which patch release mends it we do not know.
  const bool loses_copies = name == kValkey && version >= Version(8, 1) && version < Version(8, 2);
  return loses_copies ? "; do not use COPY with DB on it, see valkey-io/valkey pull 4024" : "";
}

bool MovesSlotsAtomically(const EngineVersion& engine) {
  // What comes with the slots is believed only where it can be told from a client's.
  return engine.name == kValkey && engine.version >= Version(9, 0) && must_obey_client != nullptr;
}

bool AddCategory(RedisModuleCtx* ctx, const char* name) {
  return add_acl_category != nullptr && add_acl_category(ctx, name) == REDISMODULE_OK;
}

bool SetCategories(RedisModuleCommand* command, const std::string& categories) {
  return set_command_acl_categories == nullptr ||
         set_command_acl_categories(command, categories.c_str()) == REDISMODULE_OK;
}

FineInstant WallNow() {
  Micros now{};
  if (server_microseconds != nullptr) {
    now = Micros{server_microseconds()};
  } else {
    timespec time{};
    clock_gettime(CLOCK_REALTIME, &time);
    now = std::chrono::seconds{time.tv_sec} + Micros{time.tv_nsec / 1000};
  }
  return FineInstant{std::max(now, Micros{0})};
}

FineTick SteadyNow() {
  return FineTick{Micros{static_cast<int64_t>(RedisModule_MonotonicMicroseconds())}};
}

bool MustObeyClient(RedisModuleCtx* ctx) {
  return must_obey_client != nullptr && must_obey_client(ctx) != 0;
}

namespace {

int without_connection = 0;

// Whether a module calls us on behalf of nobody. Only for Valkey 9 and later: older servers crash
// when they are asked for the name of a user who is not there.
bool IsNobody(RedisModuleCtx* ctx) {
  RedisModuleString* user = RedisModule_GetCurrentUserName(ctx);
  if (user == nullptr) return true;
  RedisModule_FreeString(ctx, user);
  return false;
}

}  // namespace

NoConnection::NoConnection() { ++without_connection; }
NoConnection::~NoConnection() { --without_connection; }

std::optional<uint64_t> ConnectionOf(RedisModuleCtx* ctx) {
  if (without_connection > 0) return std::nullopt;
  // What may not block is called by a script, a module or a transaction. Only the last has a
  // connection.
  const int flags = RedisModule_GetContextFlags(ctx);
  const int called = flags & (REDISMODULE_CTX_FLAGS_DENY_BLOCKING | REDISMODULE_CTX_FLAGS_LUA |
                              REDISMODULE_CTX_FLAGS_MULTI);
  if (called != 0 &&
      called != (REDISMODULE_CTX_FLAGS_DENY_BLOCKING | REDISMODULE_CTX_FLAGS_MULTI)) {
    return std::nullopt;
  }
  // On most servers the id of a client without connection cannot be looked up; on Valkey 9 it can.
  const uint64_t id = RedisModule_GetClientId(ctx);
  if (RedisModule_GetClientInfoById(nullptr, id) != REDISMODULE_OK) return std::nullopt;
  if (finds_clients_without_connection && IsNobody(ctx)) return std::nullopt;
  return id;
}

}  // namespace turnstile
