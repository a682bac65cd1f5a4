#include "redis/lock_type.h"

#include <string>

#include "core/encoding.h"
#include "redis/tokens.h"
#include "redis/waiters.h"

namespace turnstile {
namespace {

RedisModuleType* lock_type = nullptr;

const Lock& AsLock(const void* value) { return *static_cast<const Lock*>(value); }

// A client's RESTORE on a primary is the one way in which a stranger can hand us a token. What the
// server itself loads, and what a primary sends, is believed.
bool ComesFromClient(RedisModuleIO* io) {
  const int flags = RedisModule_GetContextFlags(RedisModule_GetContextFromIO(io));
  return (flags & (REDISMODULE_CTX_FLAGS_LOADING | REDISMODULE_CTX_FLAGS_SLAVE)) == 0;
}

void* RdbLoad(RedisModuleIO* io, int encver) {
  size_t size = 0;
  char* bytes = RedisModule_LoadStringBuffer(io, &size);
  if (RedisModule_IsIOError(io) != 0) return nullptr;
  Lock* lock = nullptr;
  const auto hold = Decode({bytes, size}, static_cast<EncodingVersion>(encver));
  if (!hold.has_value()) {
    RedisModule_LogIOError(io, "warning", "not a lock: %zu bytes, encoding version %d", size,
                           encver);
  } else if (ComesFromClient(io) && !MayBeRestored(hold->token, WallNow())) {
    RedisModule_LogIOError(io, "warning",
                           "token %llu leads the wall clock by more than an hour: not restored",
                           static_cast<unsigned long long>(hold->token.value));
  } else {
    Tokens().Observe(hold->token);
    lock = Lock::Make(*hold);
  }
  RedisModule_Free(bytes);
  return lock;
}

void RdbSave(RedisModuleIO* io, void* value) {
  const std::string bytes = Encode(AsLock(value).hold());
  RedisModule_SaveStringBuffer(io, bytes.data(), bytes.size());
}

// The last token, saved only while it leads the wall clock: an RDB file with such a record does not
// load without the module, and a token that the wall clock has passed needs no record. On 7.0,
// which would write the record always, there is none: the margin has to do.
void AuxSave(RedisModuleIO* io, int /*when*/) {
  const TokenClock& clock = Tokens().clock();
  if (clock.LeadAt(WallNow()) > Micros{0}) RedisModule_SaveUnsigned(io, clock.last().value);
}

int AuxLoad(RedisModuleIO* io, int encver, int /*when*/) {
  if (encver != static_cast<int>(kCurrentEncoding)) return REDISMODULE_ERR;
  const Token token{RedisModule_LoadUnsigned(io)};
  if (RedisModule_IsIOError(io) != 0 || token > kMaxToken) return REDISMODULE_ERR;
  Tokens().Observe(token);
  return REDISMODULE_OK;
}

void AofRewrite(RedisModuleIO* io, RedisModuleString* key, void* value) {
  EmitHeld([io](auto... args) { RedisModule_EmitAOF(io, args...); }, key, AsLock(value).hold());
}

// May run on another thread: touches nothing but the value.
void Free(void* value) { delete static_cast<Lock*>(value); }

// Whatever removes a lock from its key, but for FLUSHDB, FLUSHALL and SWAPDB, comes through here.
void Unlink(RedisModuleKeyOptCtx* ctx, const void* /*value*/) {
  const LockName lock{RedisModule_GetDbIdFromOptCtx(ctx),
                      ToView(RedisModule_GetKeyNameFromOptCtx(ctx))};
  TheWaiters().HolderChanged(lock, std::nullopt);
}

size_t FreeEffort(RedisModuleString* /*key*/, const void* /*value*/) { return 1; }

size_t MemUsage(const void* value) { return RedisModule_MallocSize(const_cast<void*>(value)); }

void Digest(RedisModuleDigest* digest, void* value) {
  const std::string bytes = Encode(AsLock(value).hold());
  RedisModule_DigestAddStringBuffer(digest, bytes.data(), bytes.size());
  RedisModule_DigestEndSequence(digest);
}

int Defrag(RedisModuleDefragCtx* ctx, RedisModuleString* /*key*/, void** value) {
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
  lock_type =
      RedisModule_CreateDataType(ctx, "turnstile", static_cast<int>(kCurrentEncoding), &methods.v4);
  return lock_type != nullptr;
}

LockKey::LockKey(RedisModuleCtx* ctx, RedisModuleString* name, Access access)
    : db_(RedisModule_GetSelectedDb(ctx)),
      name_(name),
      key_(RedisModule_OpenKey(
          ctx, name,
          access == Access::kLook ? REDISMODULE_READ : REDISMODULE_READ | REDISMODULE_WRITE)) {}

LockKey::~LockKey() { Close(); }

void LockKey::Close() {
  RedisModule_CloseKey(key_);
  key_ = nullptr;
}

bool LockKey::wrong_type() const {
  const int type = RedisModule_KeyType(key_);
  return type != REDISMODULE_KEYTYPE_EMPTY && type != REDISMODULE_KEYTYPE_STRING &&
         lock() == nullptr;
}

Lock* LockKey::lock() const {
  if (RedisModule_ModuleTypeGetType(key_) != lock_type) return nullptr;
  return static_cast<Lock*>(RedisModule_ModuleTypeGetValue(key_));
}

Place LockKey::place() const {
  if (RedisModule_KeyType(key_) != REDISMODULE_KEYTYPE_STRING) return {.lock = lock(), .plain = {}};
  size_t size = 0;
  const char* bytes = RedisModule_StringDMA(key_, &size, REDISMODULE_READ);
  return {.lock = nullptr, .plain = PlainLock{.value = {bytes, size}, .end = expiry()}};
}

Instant LockKey::expiry() const {
  if (key_ == nullptr) return kMaxInstant;
  const mstime_t at = RedisModule_GetAbsExpire(key_);
  return at == REDISMODULE_NO_EXPIRE ? kMaxInstant : Instant{Millis{at}};
}

void LockKey::Store(Lock* lock_to_store, Instant end) {
  if (lock_to_store != lock()) RedisModule_ModuleTypeSetValue(key_, lock_type, lock_to_store);
  RedisModule_SetAbsExpire(key_, end.time_since_epoch().count());
}

void LockKey::Delete() { RedisModule_DeleteKey(key_); }

ScopedName::ScopedName(RedisModuleCtx* ctx, LockName lock)
    : ctx_(ctx),
      db_(lock.db),
      name_(RedisModule_CreateString(ctx, lock.key.data(), lock.key.size())) {
  RedisModule_SelectDb(ctx, lock.db);
}

ScopedName::~ScopedName() { RedisModule_FreeString(ctx_, name_); }

}  // namespace turnstile
