#define TURNSTILE_DEFINES_MODULE_API
#include "redis/server.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdlib>
#include <ctime>
#include <iterator>
#include <new>
#include <utility>

#include "core/request.h"

namespace turnstile {
namespace {

// Calls that not every server has. Null where it does not.
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

// The oldest version of each server that has every call we need.
constexpr std::pair<std::string_view, int> kOldest[] = {
    {kRedis, Version(7, 0)}, {kValkey, Version(7, 2)}, {kRedict, Version(7, 3)}};

// docs/operations.md lists the same versions.
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
  if (!tested) return ", which is not tested";
  // See MoveRepair in callbacks.cc. It is not known which patch release fixes it.
  const bool loses_copies = name == kValkey && version >= Version(8, 1) && version < Version(8, 2);
  return loses_copies ? "; do not use COPY with DB on it, see valkey-io/valkey pull 4024" : "";
}

bool MovesSlotsAtomically(const EngineVersion& engine) {
  // Locks that arrive with slots are trusted only where they can be distinguished from a client's.
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

HashKey RandomHashKey() {
  std::array<unsigned char, sizeof(HashKey)> bytes{};
  RedisModule_GetRandomBytes(bytes.data(), bytes.size());
  return std::bit_cast<HashKey>(bytes);
}

std::string TextOf(RedisModuleCallReply* reply) {
  size_t size = 0;
  const char* bytes = reply == nullptr ? nullptr : RedisModule_CallReplyStringPtr(reply, &size);
  return bytes == nullptr ? std::string() : std::string(bytes, size);
}

std::string SettingOf(RedisModuleCtx* ctx, const char* name) {
  RedisModuleCallReply* reply = RedisModule_Call(ctx, "CONFIG", "cc", "GET", name);
  if (reply == nullptr) return "";
  std::string value = TextOf(RedisModule_CallReplyArrayElement(reply, 1));
  RedisModule_FreeCallReply(reply);
  return value;
}

// --- The role, and who consumes what is replicated -----------------------------------------------

Role RoleOf(int context_flags) {
  if ((context_flags & REDISMODULE_CTX_FLAGS_LOADING) != 0) return Role::kLoading;
  return (context_flags & REDISMODULE_CTX_FLAGS_SLAVE) != 0 ? Role::kReplica : Role::kPrimary;
}

void Server::Register(RedisModuleCtx* ctx, const EngineVersion& engine) {
  finds_clients_without_connection_ = engine.name == kValkey && engine.version >= Version(9, 0);
  in_cluster_ = (RedisModule_GetContextFlags(ctx) & REDISMODULE_CTX_FLAGS_CLUSTER) != 0;
}

bool Server::HasConsumers() const {
  if (in_cluster_ || (RedisModule_GetContextFlags(nullptr) & REDISMODULE_CTX_FLAGS_AOF) != 0) {
    return true;
  }
  RedisModuleServerInfoData* info = RedisModule_GetServerInfo(nullptr, "replication");
  const auto count = [info](const char* field) {
    int error = REDISMODULE_OK;
    const long long value = RedisModule_ServerInfoGetFieldSigned(info, field, &error);
    return error == REDISMODULE_OK ? value : 1;  // if it is not reported, there may be one
  };
  const bool any = count("connected_slaves") > 0 || count("repl_backlog_active") > 0;
  RedisModule_FreeServerInfo(nullptr, info);
  return any;
}

Source Server::DetermineSource(RedisModuleCtx* ctx) {
  const int flags = RedisModule_GetContextFlags(ctx);
  if ((flags & REDISMODULE_CTX_FLAGS_REPLICATED) != 0) return Source::kReplicated;
  // The node from which a slot is moved here atomically: it has decided.
  if (must_obey_client != nullptr && must_obey_client(ctx) != 0) return Source::kReplicated;
  // Only the AOF runs commands while loading. A replica that loads asynchronously (swapdb) serves
  // clients meanwhile, and reads no AOF.
  const int loading = REDISMODULE_CTX_FLAGS_LOADING | REDISMODULE_CTX_FLAGS_ASYNC_LOADING;
  if ((flags & loading) == REDISMODULE_CTX_FLAGS_LOADING) return Source::kReplicated;
  if (RoleOf(flags & ~REDISMODULE_CTX_FLAGS_LOADING) == Role::kReplica) {
    return Source::kClientOfReplica;
  }
  only_callers_ = (flags & loading) == 0 && !in_cluster_;
  return Source::kClient;
}

bool Server::CheckForConsumers(Instant now) {
  constexpr Millis kEvery{1000};
  const bool any = HasConsumers();
  no_consumers_ = !any && watches_copies_;
  if (any) check_again_at_ = now + kEvery;
  return any;
}

bool Server::ClientsMayListen() {
  const int events = RedisModule_GetNotifyKeyspaceEvents();
  return (events & REDISMODULE_NOTIFY_MODULE) != 0 &&
         (events & (REDISMODULE_NOTIFY_KEYSPACE | REDISMODULE_NOTIFY_KEYEVENT)) != 0;
}

void Server::CheckModules(RedisModuleCtx* ctx) {
  // Servers include modules of their own, which have nothing to do with locks.
  constexpr std::string_view kHarmless[] = {kModuleName, "vectorset", "lua"};
  has_checked_modules_ = true;
  RedisModuleCallReply* modules = RedisModule_Call(ctx, "MODULE", "c", "LIST");
  has_other_modules_ = modules == nullptr;  // if it is not reported, there may be some
  if (modules == nullptr) return;
  for (size_t i = 0; i < RedisModule_CallReplyLength(modules); ++i) {
    // A module's name is its first field, after the word "name".
    const std::string name =
        TextOf(RedisModule_CallReplyArrayElement(RedisModule_CallReplyArrayElement(modules, i), 1));
    if (std::find(std::begin(kHarmless), std::end(kHarmless), name) == std::end(kHarmless)) {
      has_other_modules_ = true;
    }
  }
  RedisModule_FreeCallReply(modules);
}

namespace {

// Whether a module calls us without a user. Only for Valkey 9 and later: older servers crash when
// they are asked for the name of a user that does not exist.
bool IsNobody(RedisModuleCtx* ctx) {
  RedisModuleString* user = RedisModule_GetCurrentUserName(ctx);
  if (user == nullptr) return true;
  RedisModule_FreeString(ctx, user);
  return false;
}

}  // namespace

std::optional<uint64_t> Server::ConnectionOf(RedisModuleCtx* ctx) const {
  if (calls_without_connection_ > 0) return std::nullopt;
  // Commands that may not block are called by a script, a module or a transaction. Only the last
  // has a connection.
  const int flags = RedisModule_GetContextFlags(ctx);
  const int called = flags & (REDISMODULE_CTX_FLAGS_DENY_BLOCKING | REDISMODULE_CTX_FLAGS_LUA |
                              REDISMODULE_CTX_FLAGS_MULTI);
  if (called != 0 &&
      called != (REDISMODULE_CTX_FLAGS_DENY_BLOCKING | REDISMODULE_CTX_FLAGS_MULTI)) {
    return std::nullopt;
  }
  // On most servers the id of a client without a connection cannot be looked up; on Valkey 9 it
  // can.
  const uint64_t id = RedisModule_GetClientId(ctx);
  if (RedisModule_GetClientInfoById(nullptr, id) != REDISMODULE_OK) return std::nullopt;
  if (finds_clients_without_connection_ && IsNobody(ctx)) return std::nullopt;
  return id;
}

// --- Users ---------------------------------------------------------------------------------------

User::User(RedisModuleString* name) : user_(RedisModule_GetModuleUserFromUserName(name)) {}

namespace {

// Whether the running command has a user. A module may call us without one, and 7.0 then crashes
// when it is asked for the user's name. But it returns an error when asked to call any command as
// that user, even one that does not exist. (A command that exists and that the user may not run
// would leave an entry in ACL LOG.)
bool HasUser(const Server& server, RedisModuleCtx* ctx) {
  if (server.ConnectionOf(ctx).has_value()) return true;
  errno = 0;
  RedisModuleCallReply* reply = RedisModule_Call(ctx, "LOCK.NOBODY", "C");
  const bool nobody = reply == nullptr && errno == ENOTSUP;
  if (reply != nullptr) RedisModule_FreeCallReply(reply);
  return !nobody;
}

}  // namespace

User::User(const Server& server, RedisModuleCtx* ctx) {
  RedisModuleString* name = HasUser(server, ctx) ? RedisModule_GetCurrentUserName(ctx) : nullptr;
  if (name == nullptr) return;
  user_ = RedisModule_GetModuleUserFromUserName(name);
  RedisModule_FreeString(ctx, name);
}

User::~User() {
  if (user_ != nullptr) RedisModule_FreeModuleUser(user_);
}

bool User::MayRun(std::span<RedisModuleString*> command) const {
  if (user_ == nullptr) return false;
  errno = 0;
  return RedisModule_ACLCheckCommandPermissions(
             user_, command.data(), static_cast<int>(command.size())) == REDISMODULE_OK ||
         errno == ENOENT;
}

bool User::MayPublish(std::span<RedisModuleString*> command) const {
  return user_ != nullptr &&
         RedisModule_ACLCheckCommandPermissions(user_, command.data(),
                                                static_cast<int>(command.size())) == REDISMODULE_OK;
}

bool User::MayInspect(RedisModuleString* key) const { return MayRunOn(kInfoCommand, key); }

bool User::MayInspect(RedisModuleCtx* ctx, LockName lock) const {
  RedisModuleString* name = RedisModule_CreateString(ctx, lock.key.data(), lock.key.size());
  const bool may = MayInspect(name);
  RedisModule_FreeString(ctx, name);
  return may;
}

bool User::MayGet(RedisModuleString* key) const { return MayRunOn("GET", key); }

// Unlike MayRun, this returns false for a command that does not exist.
bool User::MayRunOn(std::string_view command, RedisModuleString* key) const {
  if (user_ == nullptr) return false;
  const StringOf name(command);
  std::array argv = {name.get(), key};
  return RedisModule_ACLCheckCommandPermissions(user_, argv.data(), argv.size()) == REDISMODULE_OK;
}

namespace {

struct Refusal {
  RedisModuleACLLogEntryReason reason;
  RedisModuleString* object;
};

// The server reports only that something is not allowed. It would have named a key or a channel
// that the user may not use at all; otherwise the command.
Refusal FindRefusal(RedisModuleUser* user, RedisModuleCtx* ctx,
                    std::span<RedisModuleString*> command) {
  Refusal refusal{REDISMODULE_ACL_LOG_CMD, command.front()};
  int count = 0;
  int* flags = nullptr;
  int* positions = RedisModule_GetCommandKeysWithFlags(
      ctx, command.data(), static_cast<int>(command.size()), &count, &flags);
  constexpr int kUses = REDISMODULE_CMD_KEY_ACCESS | REDISMODULE_CMD_KEY_INSERT |
                        REDISMODULE_CMD_KEY_DELETE | REDISMODULE_CMD_KEY_UPDATE;
  for (int i = 0; i < count; ++i) {
    RedisModuleString* key = command[static_cast<size_t>(positions[i])];
    const int uses = flags[i] & kUses;
    if (uses != 0 && RedisModule_ACLCheckKeyPermissions(user, key, uses) != REDISMODULE_OK) {
      refusal = {REDISMODULE_ACL_LOG_KEY, key};
      break;
    }
  }
  if (positions != nullptr) RedisModule_Free(positions);
  if (flags != nullptr) RedisModule_Free(flags);
  const bool publishes = IsKeyword(ToView(command.front()), "PUBLISH") ||
                         IsKeyword(ToView(command.front()), "SPUBLISH");
  if (publishes && command.size() > 1 &&
      RedisModule_ACLCheckChannelPermissions(user, command[1], REDISMODULE_CMD_CHANNEL_PUBLISH) !=
          REDISMODULE_OK) {
    refusal = {REDISMODULE_ACL_LOG_CHANNEL, command[1]};
  }
  return refusal;
}

}  // namespace

void User::LogRefusal(RedisModuleCtx* ctx, std::span<RedisModuleString*> command) const {
  if (user_ == nullptr) return;
  const Refusal refusal = FindRefusal(user_, ctx, command);
  // The server reads the object as raw bytes, and strings of a script may not be stored that way.
  const std::string_view object = ToView(refusal.object);
  RedisModuleString* copy = RedisModule_CreateString(ctx, object.data(), object.size());
  RedisModule_ACLAddLogEntry(ctx, user_, copy, refusal.reason);
  RedisModule_FreeString(ctx, copy);
}

}  // namespace turnstile

// --- Memory --------------------------------------------------------------------------------------

// Every C++ allocation of the module comes from the server's allocator, so that it is included in
// used_memory, counts against maxmemory and can be defragmented. The linker's version script keeps
// these operators inside turnstile.so.
//
// Nothing may be allocated before the API is connected: a global object that did so would be freed
// by another allocator later.

void* operator new(size_t size) {
  if (RedisModule_Alloc == nullptr) std::abort();
  return RedisModule_Alloc(size);  // the server aborts rather than return null
}

void operator delete(void* memory) noexcept {
  if (memory != nullptr) RedisModule_Free(memory);
}

void operator delete(void* memory, size_t /*size*/) noexcept { ::operator delete(memory); }
