#include "redis/lock_type.h"

#include <memory>
#include <optional>
#include <string>

#include "core/encoding.h"
#include "redis/emit.h"
#include "redis/instance.h"

namespace turnstile {
namespace {

const Lock& AsLock(const void* value) { return *static_cast<const Lock*>(value); }

// What is to be done with a token that came with a value.
enum class Belief { kAdopt, kIgnore, kRefuse };

// RESTORE is the one way in which a client can hand us a token. What the server loads from its
// files or in a full synchronisation is always believed. On a replica nothing tells whether a
// RESTORE comes from the primary, whom it must obey, or from a client of a writable replica: so the
// value is taken, but the clock does not follow it anywhere.
Belief BeliefIn(Token token, RedisModuleIO* io) {
  const int flags = RedisModule_GetContextFlags(RedisModule_GetContextFromIO(io));
  const FineInstant now = WallNow();
  switch (RoleOf(flags)) {
    case Role::kLoading:
      return Belief::kAdopt;
    case Role::kReplica:
      return LeadOf(token, now) <= kLargestReplicatedLead ? Belief::kAdopt : Belief::kIgnore;
    case Role::kPrimary:
      break;
  }
  const bool may_adopt = TheInstance().engine.tokens().clock().MayAdopt(token, now);
  return may_adopt ? Belief::kAdopt : Belief::kRefuse;
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
  const Belief belief = BeliefIn(highest, io);
  if (belief == Belief::kRefuse) {
    RedisModule_LogIOError(io, "warning",
                           "token %llu leads the wall clock by more than ten minutes: not restored",
                           static_cast<unsigned long long>(highest.value));
    return nullptr;
  }
  Instance& instance = TheInstance();
  instance.host.LockMade();
  instance.engine.OnLockLoaded(RedisModule_GetDbIdFromIO(io),
                               belief == Belief::kAdopt ? std::optional(highest) : std::nullopt);
  return lock.release();
}

void RdbSave(RedisModuleIO* io, void* value) {
  const Encoded lock(AsLock(value));
  RedisModule_SaveStringBuffer(io, lock.bytes().data(), lock.bytes().size());
}

// Where the token clock stands, saved only while it leads the wall clock: an RDB file with such a
// record does not load without the module, and a token that the wall clock has passed needs no
// record. On 7.0, which would write the record always, there is none: the margin has to do.
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
    EmitHeld([io](auto... args) { RedisModule_EmitAOF(io, args...); }, key,
             Held{lock.mode(), hold});
  }
}

// May run on another thread: touches nothing but the value and an atomic count.
void Free(void* value) {
  delete static_cast<Lock*>(value);
  TheInstance().host.LockFreed();
}

// Whatever removes a lock from its key, but for FLUSHDB, FLUSHALL and SWAPDB, comes through here.
void Unlink(RedisModuleKeyOptCtx* ctx, const void* value) {
  Instance& instance = TheInstance();
  std::optional<Instant> now;
  // What is removed while data is loaded was lost long ago.
  if (!instance.engine.is_removing() && instance.host.role() != Role::kLoading) {
    now = ToInstant(WallNow());
  }
  instance.engine.OnKeyRemoved(
      {RedisModule_GetDbIdFromOptCtx(ctx), ToView(RedisModule_GetKeyNameFromOptCtx(ctx))},
      AsLock(value), now);
}

size_t FreeEffort(RedisModuleString* /*key*/, const void* value) { return AsLock(value).size(); }

size_t MemUsage(const void* value) { return AsLock(value).Allocated(RedisModule_MallocSize); }

void Digest(RedisModuleDigest* digest, void* value) {
  const Encoded lock(AsLock(value));
  RedisModule_DigestAddStringBuffer(digest, lock.bytes().data(), lock.bytes().size());
  RedisModule_DigestEndSequence(digest);
}

// A lock of many holds stays where it is: others point into it.
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
