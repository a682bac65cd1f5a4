#include "redis/lock_type.h"

#include <memory>
#include <optional>
#include <string>

#include "core/encoding.h"
#include "redis/redis_host.h"

namespace turnstile {
namespace {

const Lock& AsLock(const void* value) { return *static_cast<const Lock*>(value); }

// How to treat a token that arrived with a value.
enum class TokenTrust { kAdopt, kIgnore, kRefuse };

// RESTORE is the only way in which a client can bring in a token. What the server loads from its
// files or in a full synchronisation is always trusted. On a replica it cannot be determined
// whether a RESTORE comes from the primary, which must be followed, or from a client of a writable
// replica. So the value is accepted, but the clock does not follow its token without limit.
TokenTrust TrustIn(Token token, RedisModuleIO* io) {
  const int flags = RedisModule_GetContextFlags(RedisModule_GetContextFromIO(io));
  const FineInstant now = WallNow();
  switch (RoleOf(flags)) {
    case Role::kLoading:
      return TokenTrust::kAdopt;
    case Role::kReplica:
      return LeadOf(token, now) <= kLargestReplicatedLead ? TokenTrust::kAdopt
                                                          : TokenTrust::kIgnore;
    case Role::kPrimary:
      break;
  }
  const bool may_adopt = TheInstance().engine.tokens().clock().MayAdopt(token, now);
  return may_adopt ? TokenTrust::kAdopt : TokenTrust::kRefuse;
}

// Whether a replica is loading a copy of its primary's data beside its own (swapdb), to switch to
// it at the end. 7.0 does not report correctly into which databases.
bool IsLoadedAside(RedisModuleIO* io) {
  return (RedisModule_GetContextFlags(RedisModule_GetContextFromIO(io)) &
          REDISMODULE_CTX_FLAGS_ASYNC_LOADING) != 0;
}

void* RdbLoad(RedisModuleIO* io, int encver) {
  size_t size = 0;
  char* bytes = RedisModule_LoadStringBuffer(io, &size);
  if (RedisModule_IsIOError(io) != 0) return nullptr;
  std::unique_ptr<Lock> lock = DecodeAndTake(bytes, size, static_cast<EncodingVersion>(encver));
  if (lock == nullptr) {
    RedisModule_LogIOError(io, "warning", "not a lock: %zu bytes, encoding version %d", size,
                           encver);
    return nullptr;
  }
  const Token highest = lock->last(Lock::Order::kByToken).token;
  const TokenTrust belief = TrustIn(highest, io);
  if (belief == TokenTrust::kRefuse) {
    RedisModule_LogIOError(io, "warning",
                           "token %llu leads the wall clock by more than ten minutes: not restored",
                           static_cast<unsigned long long>(highest.value));
    return nullptr;
  }
  Instance& instance = TheInstance();
  instance.host.OnLockCreated();
  // A value that another module loads belongs to no key.
  const RedisModuleString* key = RedisModule_GetKeyNameFromIO(io);
  instance.engine.OnLockLoaded(
      {RedisModule_GetDbIdFromIO(io), key == nullptr ? std::string_view() : ToView(key)},
      belief == TokenTrust::kAdopt ? std::optional(highest) : std::nullopt);
  if (IsLoadedAside(io)) {
    for (int db = 0; db < instance.host.CountDatabases(); ++db) instance.engine.OnLocksMayBeIn(db);
  }
  return lock.release();
}

void RdbSave(RedisModuleIO* io, void* value) {
  const Encoded lock(AsLock(value));
  RedisModule_SaveStringBuffer(io, lock.bytes().data(), lock.bytes().size());
}

// Saves the reading of the token clock, but only while it leads the wall clock: an RDB file with
// such a record does not load without the module, and a token that the wall clock has passed needs
// no record. On 7.0, which would always write the record, there is none: the margin has to suffice.
void AuxSave(RedisModuleIO* io, int /*when*/) {
  const std::optional<Token> token = TheInstance().engine.tokens().ToSave(WallNow());
  if (token.has_value()) RedisModule_SaveUnsigned(io, token->value);
}

int AuxLoad(RedisModuleIO* io, int encver, int /*when*/) {
  if (encver > static_cast<int>(kCurrentEncoding)) return REDISMODULE_ERR;
  const Token token{RedisModule_LoadUnsigned(io)};
  if (RedisModule_IsIOError(io) != 0 || token > kMaxToken) return REDISMODULE_ERR;
  TheInstance().engine.tokens().Observe(token);
  return REDISMODULE_OK;
}

void AofRewrite(RedisModuleIO* io, RedisModuleString* key, void* value) {
  const Lock& lock = AsLock(value);
  for (const Hold& hold : lock.holds(Lock::Order::kByToken)) {
    EmitHoldSet([io](auto... args) { RedisModule_EmitAOF(io, args...); }, key,
                HoldSet{lock.mode(), hold});
  }
}

// May run on another thread: uses only the value and an atomic counter.
void Free(void* value) {
  delete static_cast<Lock*>(value);
  TheInstance().host.OnLockFreed();
}

// Called whenever a lock is removed from its key, except by FLUSHDB, FLUSHALL and SWAPDB.
void Unlink(RedisModuleKeyOptCtx* ctx, const void* value) {
  Instance& instance = TheInstance();
  Role role = Role::kPrimary;
  std::optional<Instant> now;
  if (!instance.engine.is_removing()) {
    role = instance.host.role();
    // What is removed while data is being loaded was lost long ago.
    if (role != Role::kLoading) now = ToInstant(WallNow());
  }
  instance.engine.OnKeyRemoved(
      {RedisModule_GetDbIdFromOptCtx(ctx), ToView(RedisModule_GetKeyNameFromOptCtx(ctx))},
      AsLock(value), role, now);
}

size_t FreeEffort(RedisModuleString* /*key*/, const void* value) { return AsLock(value).size(); }

size_t MemUsage(const void* value) { return AsLock(value).Allocated(RedisModule_MallocSize); }

void Digest(RedisModuleDigest* digest, void* value) {
  const Encoded lock(AsLock(value));
  RedisModule_DigestAddStringBuffer(digest, lock.bytes().data(), lock.bytes().size());
  RedisModule_DigestEndSequence(digest);
}

// A lock of many holds is not moved: others point into it.
int Defrag(RedisModuleDefragCtx* ctx, RedisModuleString* /*key*/, void** value) {
  if (!AsLock(*value).IsOneAllocation()) return 0;
  if (void* moved = RedisModule_DefragAlloc(ctx, *value); moved != nullptr) *value = moved;
  return 0;
}

}  // namespace

bool RegisterLockType(RedisModuleCtx* ctx) {
  // Without a copy callback the server refuses COPY: a copied lock would be a second holder under
  // the same token.
  TypeMethodsV5 methods{.v4 = {.version = kTypeMethodsV5,
                               .rdb_load = RdbLoad,
                               .rdb_save = RdbSave,
                               .aof_rewrite = AofRewrite,
                               .mem_usage = MemUsage,
                               .digest = Digest,
                               .free = Free,
                               .aux_load = AuxLoad,
                               .aux_save = nullptr,
                               .aux_save_triggers = REDISMODULE_AUX_BEFORE_RDB,
                               .free_effort = FreeEffort,
                               .unlink = nullptr,
                               .copy = nullptr,
                               .defrag = Defrag,
                               .mem_usage2 = nullptr,
                               .free_effort2 = nullptr,
                               .unlink2 = Unlink,
                               .copy2 = nullptr},
                        .aux_save2 = AuxSave};
  RedisModuleType* type =
      RedisModule_CreateDataType(ctx, kTypeName, static_cast<int>(kCurrentEncoding), &methods.v4);
  TheInstance().host.SetType(type);
  return type != nullptr;
}

}  // namespace turnstile
