// The server that the module runs in: the only file that includes redismodule.h, what newer servers
// add to it, both clocks, the role, users.
//
// The header is that of Redis 7.0. What newer servers add is looked up by name at run time, in this
// unit only, so that one turnstile.so works with every server. Every other file includes this one:
// the API pointers are `extern` except in server.cc, which both g++ and clang++ accept.

#ifndef TURNSTILE_REDIS_SERVER_H_
#define TURNSTILE_REDIS_SERVER_H_

#ifndef TURNSTILE_DEFINES_MODULE_API
#define REDISMODULE_API extern
#endif
#include <redismodule.h>

#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/host.h"
#include "core/keyed_hash.h"
#include "core/types.h"

namespace turnstile {

// The module's name, as shown by MODULE LIST.
inline constexpr const char* kModuleName = "turnstile";

// Connects to the server's API. Must be called first. Returns false if the server refuses or lacks
// it.
bool InitRedisApi(RedisModuleCtx* ctx, int module_version);

// The name and version of the server.
struct EngineVersion {
  std::string name;  // "Redis", "Valkey", "Redict"; otherwise what it calls itself
  int version = 0;   // 0x00MMmmpp; 0 if it is too old to report it

  std::string Describe() const;  // for example "Valkey 8.1.1"
  bool IsKnown() const;          // one of the three, and not older than required
  const char* Remark() const;    // a remark for operators, for the log; may be empty
};
// The version number alone cannot distinguish Redis 8 from Valkey 8.
EngineVersion FindEngine(RedisModuleCtx* ctx);

// Creates an ACL category, as in ACL SETUSER … +@name. Returns false if this server does not let
// modules do so (before Redis 7.4 and Valkey 8.0), or if the name is taken.
bool AddCategory(RedisModuleCtx* ctx, const char* name);
// Adds a command to categories, separated by spaces. Does nothing where modules cannot (before
// 7.2): there the command is in no category.
bool SetCategories(RedisModuleCommand* command, const std::string& categories);

// Whether the server moves slots of a cluster atomically if its modules agree (Valkey 9).
bool MovesSlotsAtomically(const EngineVersion& engine);
// The option that a module has to declare for that.
inline constexpr int kOptionAtomicSlotMigration = 1 << 5;

// The server's wall clock, but never before 1970. Read once for each request.
FineInstant WallNow();
// The server's monotonic clock.
FineTick SteadyNow();
// Both clocks, for an entry point that needs both.
inline Now ReadClocks() { return {.wall = WallNow(), .steady = SteadyNow()}; }

HashKey RandomHashKey();

// The methods of a value type as servers from 7.2 on define them; 7.0 ignores the added field.
struct TypeMethodsV5 {
  RedisModuleTypeMethods v4;
  RedisModuleTypeAuxSaveFunc aux_save2;  // writes nothing into the RDB unless the callback does
};
inline constexpr uint64_t kTypeMethodsV5 = 5;

inline std::string_view ToView(const RedisModuleString* string) {
  size_t size = 0;
  const char* bytes = RedisModule_StringPtrLen(string, &size);
  return {bytes, size};
}

// A string of the server that belongs to no context.
class StringOf {
 public:
  explicit StringOf(std::string_view bytes)
      : string_(RedisModule_CreateString(nullptr, bytes.data(), bytes.size())) {}
  ~StringOf() { RedisModule_FreeString(nullptr, string_); }
  StringOf(const StringOf&) = delete;
  StringOf& operator=(const StringOf&) = delete;

  RedisModuleString* get() const { return string_; }

 private:
  RedisModuleString* string_;
};

// The text of a reply to RedisModule_Call; empty if there is none.
std::string TextOf(RedisModuleCallReply* reply);

// The value of a setting of the server; empty if it is not reported.
std::string SettingOf(RedisModuleCtx* ctx, const char* name);

// The source of a command determines what may be done with it.
enum class Source {
  kClient,           // a client of a primary: decide
  kReplicated,       // the primary or the AOF: apply what was decided, never decide
  kClientOfReplica,  // a client of a replica: only read, even if the replica is writable
};

// Determines the role of this server from the flags of a context. The only place that does.
Role RoleOf(int context_flags);

// The current state of this server, as far as every command needs it: who may decide, and whether
// anybody consumes what is replicated. Asking the server each time costs too much, so answers are
// cached until an event indicates that they may have changed.
class Server {
 public:
  Server() = default;
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // Must be called when the module is loaded.
  void Register(RedisModuleCtx* ctx, const EngineVersion& engine);
  bool in_cluster() const { return in_cluster_; }

  // The connection that the running command came over; none inside scripts, functions and calls of
  // modules (but see NoConnection).
  std::optional<uint64_t> ConnectionOf(RedisModuleCtx* ctx) const;

  // While an object of this class exists, commands that we call have no connection.
  class NoConnection {
   public:
    explicit NoConnection(Server& server) : server_(server) { ++server_.calls_without_connection_; }
    ~NoConnection() { --server_.calls_without_connection_; }
    NoConnection(const NoConnection&) = delete;
    NoConnection& operator=(const NoConnection&) = delete;

   private:
    Server& server_;
  };

  Source SourceOf(RedisModuleCtx* ctx) {
    return only_callers_ && RedisModule_GetClientId(ctx) != kAofClient ? Source::kClient
                                                                       : DetermineSource(ctx);
  }
  // Likewise, for a callback, which may be called while data is being loaded.
  Source DetermineSource(RedisModuleCtx* ctx);

  // Whether a change has to be replicated. Building a fact costs more than granting a lock, and
  // most of that cost arises even when nobody consumes it: no replica, no backlog from which one
  // could catch up, no AOF. No consumer appears without a copy of all data or a change of the role:
  // that there is none is cached as long as copies are watched. While there is a consumer, this is
  // checked again once a second, because the server does not report when it drops its backlog.
  bool HasReplicationConsumers(Instant now) {
    return !no_consumers_ &&
           ((check_again_at_.has_value() && now < *check_again_at_) || CheckForConsumers(now));
  }

  // Whether a client may be listening for the events that we publish; and whether any listener may
  // be, including another module.
  static bool ClientsMayListen();
  bool HasEventListeners() const { return has_other_modules_ || ClientsMayListen(); }

  // Must be called when the server forks, saves its data or changes its role.
  void InvalidateCache() {
    only_callers_ = false;
    no_consumers_ = false;
    check_again_at_.reset();
  }
  // Whether InvalidateCache is called at each copy from now on.
  void WatchCopies(bool watches) {
    watches_copies_ = watches;
    InvalidateCache();
  }

  // Looks whether there are other modules. Until the first call there may be.
  void CheckModules(RedisModuleCtx* ctx);
  bool has_checked_modules() const { return has_checked_modules_; }
  void ForgetModules() {
    has_other_modules_ = true;
    has_checked_modules_ = false;
  }

 private:
  // The id of the client that runs the commands of an AOF which is being loaded.
  static constexpr unsigned long long kAofClient = UINT64_MAX;

  bool HasConsumers() const;
  bool CheckForConsumers(Instant now);

  bool in_cluster_ = false;
  bool only_callers_ = false;              // a primary that is not in a cluster
  bool no_consumers_ = false;              // never in a cluster, where slots are copied too
  std::optional<Instant> check_again_at_;  // absent: at once
  bool watches_copies_ = false;
  bool has_other_modules_ = true;
  bool has_checked_modules_ = false;
  bool finds_clients_without_connection_ = false;  // by RedisModule_GetClientInfoById
  int calls_without_connection_ = 0;
};

// A user of the server, and what it may do now.
class User {
 public:
  // The user whose command is running. If a module calls without a user, nothing is allowed.
  User(const Server& server, RedisModuleCtx* ctx);
  // The user of this name. If it no longer exists, nothing is allowed.
  explicit User(RedisModuleString* name);
  ~User();
  User(const User&) = delete;
  User& operator=(const User&) = delete;

  // Whether the user may run the command on the keys and channels that it names. True for a command
  // that does not exist: the server refuses it with its own error.
  bool MayRun(std::span<RedisModuleString*> command) const;
  // PUBLISH or SPUBLISH, with a channel and a message. False if the server has no such command.
  bool MayPublish(std::span<RedisModuleString*> command) const;
  // LOCK.INFO on this key. A user without this right sees nothing about its holders.
  bool MayInspect(RedisModuleString* key) const;
  bool MayInspect(RedisModuleCtx* ctx, LockName lock) const;
  // GET on this key. A user without this right does not see the value of a string.
  bool MayGet(RedisModuleString* key) const;

  // Adds an entry to ACL LOG, as the server does, for a command that this user may not run.
  void LogRefusal(RedisModuleCtx* ctx, std::span<RedisModuleString*> command) const;

 private:
  bool MayRunOn(std::string_view command, RedisModuleString* key) const;

  RedisModuleUser* user_ = nullptr;
};

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_SERVER_H_
