// The one door to redismodule.h.
//
// The header is Redis 7.0's; what newer servers add is looked up by name at run time, here and
// nowhere else, so that one turnstile.so serves every engine. Every other file includes this one:
// the API pointers are `extern` but in redis_api.cc, which both g++ and clang++ accept.

#ifndef TURNSTILE_REDIS_REDIS_API_H_
#define TURNSTILE_REDIS_REDIS_API_H_

#ifndef TURNSTILE_DEFINES_REDIS_API
#define REDISMODULE_API extern
#endif
#include <redismodule.h>

#include <optional>
#include <string>
#include <string_view>

#include "core/types.h"

namespace turnstile {

// Our name, as MODULE LIST knows it.
inline constexpr const char* kModuleName = "turnstile";

// Connects to the server's API. Must come first. False: the server refuses or lacks it.
bool InitRedisApi(RedisModuleCtx* ctx, int module_version);

// The server that we are in.
struct EngineVersion {
  std::string name;  // "Redis", "Valkey", "Redict"; else what it calls itself
  int version = 0;   // 0x00MMmmpp; 0 if it is too old to tell

  std::string Describe() const;  // for example "Valkey 8.1.1"
  bool IsKnown() const;          // one of the three, and not older than we need
  const char* Remark() const;    // what an operator should know of it, for the log; may be empty
};
// The version number alone cannot tell Redis 8 from Valkey 8.
EngineVersion FindEngine(RedisModuleCtx* ctx);

// Makes a category of access rights, as in ACL SETUSER … +@name. False: this server lets no module
// do so (before Redis 7.4 and Valkey 8.0), or the name is taken.
bool AddCategory(RedisModuleCtx* ctx, const char* name);
// Puts a command into categories, a list with spaces. Does nothing where no module can (before
// 7.2): there the command is in none.
bool SetCategories(RedisModuleCommand* command, const std::string& categories);

// Whether the server moves slots of a cluster in one step, if its modules agree (Valkey 9).
bool MovesSlotsAtomically(const EngineVersion& engine);
// What a module has to declare for that.
inline constexpr int kOptionAtomicSlotMigration = 1 << 5;

// The server's wall clock, but never before 1970. Read once for each request.
FineInstant WallNow();
// The server's clock that never steps.
FineTick SteadyNow();

// The value type's methods as servers from 7.2 on know them; 7.0 ignores the added field.
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

// Whether what the client says was decided elsewhere. False where the server cannot tell.
bool MustObeyClient(RedisModuleCtx* ctx);

// The connection that the running command came over; none inside scripts, functions and calls of
// modules (but see NoConnection).
std::optional<uint64_t> ConnectionOf(RedisModuleCtx* ctx);

// While one of these lives, a command that we call has no connection.
class NoConnection {
 public:
  NoConnection();
  ~NoConnection();
  NoConnection(const NoConnection&) = delete;
  NoConnection& operator=(const NoConnection&) = delete;
};

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_REDIS_API_H_
