#include "redis/lock_type.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <string>

#include "core/encoding.h"
#include "redis/events.h"
#include "redis/server_sessions.h"
#include "redis/tokens.h"
#include "redis/waiters.h"

namespace turnstile {
namespace {

RedisModuleType* lock_type = nullptr;

// Values are freed on other threads too.
constinit std::atomic<size_t> locks = 0;
// By database: 1 if there may be any.
constinit std::vector<char> has_locks;

const Lock& AsLock(const void* value) { return *static_cast<const Lock*>(value); }

// What is to be done with a token that came with a value.
enum class Belief { kAdopt, kIgnore, kRefuse };

// RESTORE is the one way in which a client can hand us a token. What the server loads from its
// files or in a full synchronisation is always believed. On a replica nothing tells whether a
// RESTORE comes from the primary, whom it must obey, or from a client of a writable replica: so the
// value is taken, but the clock does not follow it anywhere.
Belief BeliefIn(Token token, RedisModuleIO* io) {
  const int flags = RedisModule_GetContextFlags(RedisModule_GetContextFromIO(io));
  if ((flags & REDISMODULE_CTX_FLAGS_LOADING) != 0) return Belief::kAdopt;
  const FineInstant now = WallNow();
  if ((flags & REDISMODULE_CTX_FLAGS_SLAVE) != 0) {
    return LeadOf(token, now) <= kLargestReplicatedLead ? Belief::kAdopt : Belief::kIgnore;
  }
  return Tokens().clock().MayAdopt(token, now) ? Belief::kAdopt : Belief::kRefuse;
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
  if (belief == Belief::kAdopt) Tokens().Observe(highest);
  ++locks;
  LocksMayBeIn(RedisModule_GetDbIdFromIO(io));
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
  const std::optional<Token> token = Tokens().ToSave(WallNow());
  if (token.has_value()) RedisModule_SaveUnsigned(io, token->value);
}

int AuxLoad(RedisModuleIO* io, int encver, int /*when*/) {
  if (encver > static_cast<int>(kCurrentEncoding)) return REDISMODULE_ERR;
  const Token token{RedisModule_LoadUnsigned(io)};
  if (RedisModule_IsIOError(io) != 0 || token > kMaxToken) return REDISMODULE_ERR;
  Tokens().Observe(token);
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
  --locks;
}

// While a fact of ours deletes a key: the callback is not told who does.
bool deleting = false;

// Whatever removes a lock from its key, but for FLUSHDB, FLUSHALL and SWAPDB, comes through here.
void Unlink(RedisModuleKeyOptCtx* ctx, const void* value) {
  const LockName lock{RedisModule_GetDbIdFromOptCtx(ctx),
                      ToView(RedisModule_GetKeyNameFromOptCtx(ctx))};
  if (!deleting) Events().Removed(lock, AsLock(value));
  TheWaiters().LockChanged(lock);
  TheSessions().LockGone(lock);
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
  lock_type =
      RedisModule_CreateDataType(ctx, kTypeName, static_cast<int>(kCurrentEncoding), &methods.v4);
  return lock_type != nullptr;
}

namespace {

int ModeFor(LockKey::Access access) {
  switch (access) {
    case LockKey::Access::kLook:
      return REDISMODULE_READ;
    case LockKey::Access::kChange:
      return REDISMODULE_READ | REDISMODULE_WRITE;
    case LockKey::Access::kInspect:
      break;
  }
  return REDISMODULE_READ | REDISMODULE_WRITE | REDISMODULE_OPEN_KEY_NOTOUCH;
}

}  // namespace

LockKey::LockKey(RedisModuleCtx* ctx, RedisModuleString* name, Access access)
    : name_(name),
      key_name_(ToView(name)),
      key_(RedisModule_OpenKey(ctx, name, ModeFor(access))),
      type_(RedisModule_KeyType(key_)),
      lock_(type_ == REDISMODULE_KEYTYPE_MODULE ? LockIn(key_) : nullptr),
      // In a transaction Valkey 9 tells for the selected database the one of the last SELECT, also
      // in an event of MOVE and after RedisModule_SelectDb. The open key knows better.
      db_(key_ != nullptr ? RedisModule_GetDbIdFromModuleKey(key_)
                          : RedisModule_GetSelectedDb(ctx)) {}

LockKey::~LockKey() { Close(); }

void LockKey::Close() {
  RedisModule_CloseKey(key_);
  key_ = nullptr;
  type_ = REDISMODULE_KEYTYPE_EMPTY;
  lock_ = nullptr;
}

Lock* LockIn(RedisModuleKey* key) {
  if (RedisModule_ModuleTypeGetType(key) != lock_type) return nullptr;
  return static_cast<Lock*>(RedisModule_ModuleTypeGetValue(key));
}

size_t StoredLocks() { return locks; }

std::vector<int> DatabasesWithLocks() {
  std::vector<int> found;
  for (size_t db = 0; db < has_locks.size(); ++db) {
    if (has_locks[db] != 0) found.push_back(static_cast<int>(db));
  }
  return found;
}

void LocksMayBeIn(int db) {
  if (db < 0) return;  // a value that is loaded into no key
  const auto index = static_cast<size_t>(db);
  if (index >= has_locks.size()) has_locks.resize(index + 1);
  has_locks[index] = 1;
}

void LocksSwapped(int first, int second) {
  const auto larger = static_cast<size_t>(std::max(first, second));
  if (larger >= has_locks.size()) has_locks.resize(larger + 1);
  std::swap(has_locks[static_cast<size_t>(first)], has_locks[static_cast<size_t>(second)]);
}

void ForgetLocksIn(std::optional<int> db) {
  if (!db.has_value()) {
    has_locks.clear();
  } else if (static_cast<size_t>(*db) < has_locks.size()) {
    has_locks[static_cast<size_t>(*db)] = 0;
  }
}

PlainLock LockKey::plain() const {
  size_t size = 0;
  const char* bytes = RedisModule_StringDMA(key_, &size, REDISMODULE_READ);
  return {.value = {bytes, size}, .end = expiry()};
}

Instant LockKey::expiry() const {
  if (key_ == nullptr) return kMaxInstant;
  const mstime_t at = RedisModule_GetAbsExpire(key_);
  return at == REDISMODULE_NO_EXPIRE ? kMaxInstant : Instant{Millis{at}};
}

void LockKey::Store(Lock* lock_to_store) {
  Lock* stored = std::exchange(lock_, lock_to_store);
  type_ = REDISMODULE_KEYTYPE_MODULE;
  if (stored == nullptr) {
    RedisModule_ModuleTypeSetValue(key_, lock_type, lock_);
    ++locks;
    LocksMayBeIn(db_);
  } else if (stored != lock_) {
    // Unlike setting it anew, this does not look as if the lock had been gone for a moment.
    RedisModule_ModuleTypeReplaceValue(key_, lock_type, lock_, nullptr);
    delete stored;
  }
  RedisModule_SetAbsExpire(key_, lock_->closes().time_since_epoch().count());
}

void LockKey::Delete() {
  deleting = true;
  RedisModule_DeleteKey(key_);
  deleting = false;
  type_ = REDISMODULE_KEYTYPE_EMPTY;
  lock_ = nullptr;
}

ScopedName::ScopedName(RedisModuleCtx* ctx, LockName lock)
    : ctx_(ctx),
      db_(lock.db),
      name_(RedisModule_CreateString(ctx, lock.key.data(), lock.key.size())) {
  RedisModule_SelectDb(ctx, lock.db);
}

ScopedName::~ScopedName() {
  if (name_ != nullptr) RedisModule_FreeString(ctx_, name_);
}

void LockKeys::Open(RedisModuleCtx* ctx, std::span<RedisModuleString* const> more,
                    LockKey::Access access) {
  more_.reserve(more.size());
  for (RedisModuleString* name : more) more_.emplace_back(ctx, name, access);
}

Words::Words(const Held& held) {
  if (held.mode != Mode::kExclusive) Add(WordFor(held.mode));
  if (held.hold.count != 1) {
    Add(kCountWord);
    Add(std::to_string(held.hold.count));
  }
  if (held.hold.linger != Millis{0}) {
    Add(kLingerWord);
    Add(std::to_string(held.hold.linger.count()));
  }
}

Words::Words(std::span<const Owner> owners) {
  words_.reserve(owners.size());
  for (const Owner owner : owners) Add(owner.bytes);
}

Words::~Words() {
  for (RedisModuleString* word : words_) RedisModule_FreeString(nullptr, word);
}

void Words::Add(std::string_view word) {
  words_.push_back(RedisModule_CreateString(nullptr, word.data(), word.size()));
}

}  // namespace turnstile
