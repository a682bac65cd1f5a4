#include "redis/redis_host.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>
#include <variant>

#include "redis/command_names.h"
#include "redis/emit.h"
#include "redis/replies.h"
#include "redis/user.h"

namespace turnstile {

void RedisHost::Attach(const Settings& settings, Slots& slots) {
  settings_ = &settings;
  slots_ = &slots;
}

void RedisHost::Register(RedisModuleCtx* ctx) {
  detached_ = RedisModule_GetDetachedThreadSafeContext(ctx);
  acquire_command_ =
      RedisModule_CreateString(nullptr, kAcquireCommand, std::strlen(kAcquireCommand));
  server_.Register(ctx);
}

// --- Keys ---------------------------------------------------------------------------------------

namespace {

int ModeFor(Access access) {
  switch (access) {
    case Access::kRead:
      return REDISMODULE_READ;
    case Access::kWrite:
      return REDISMODULE_READ | REDISMODULE_WRITE;
    case Access::kInspect:
      break;
  }
  return REDISMODULE_READ | REDISMODULE_WRITE | REDISMODULE_OPEN_KEY_NOTOUCH;
}

}  // namespace

void RedisHost::Select(int db) {
  if (!db_.has_value()) db_ = RedisModule_GetSelectedDb(ctx_);
  RedisModule_SelectDb(ctx_, db);
}

Lock* RedisHost::LockIn(RedisModuleKey* key) const {
  if (RedisModule_ModuleTypeGetType(key) != type_) return nullptr;
  return static_cast<Lock*>(RedisModule_ModuleTypeGetValue(key));
}

KeyContent RedisHost::Open(const KeyName& name, Access access) {
  KeyContent content{.name = name.lock, .handle = name.handle};
  if (name.handle == nullptr) {
    Select(name.lock.db);
    RedisModuleString* created =
        RedisModule_CreateString(ctx_, name.lock.key.data(), name.lock.key.size());
    content.name.key = ToView(created);
    content.handle = created;
    content.owns_handle = true;
  }
  RedisModuleKey* key = RedisModule_OpenKey(ctx_, NameOf(content), ModeFor(access));
  content.key = key;
  // In a transaction Valkey 9 tells for the selected database the one of the last SELECT, also in
  // an event of MOVE and after RedisModule_SelectDb. The open key knows better.
  content.name.db =
      key != nullptr ? RedisModule_GetDbIdFromModuleKey(key) : RedisModule_GetSelectedDb(ctx_);
  switch (RedisModule_KeyType(key)) {
    case REDISMODULE_KEYTYPE_EMPTY:
      break;
    case REDISMODULE_KEYTYPE_MODULE:
      content.lock = LockIn(key);
      content.is_other = content.lock == nullptr;
      break;
    case REDISMODULE_KEYTYPE_STRING:
      content.is_plain = settings_->plain_locks;
      content.is_other = !content.is_plain;
      break;
    default:
      content.is_other = true;
  }
  return content;
}

// Not when the key is opened: to read a number makes the server store it anew, without its age.
PlainLock RedisHost::ReadPlain(const KeyContent& key) {
  size_t size = 0;
  const char* bytes = RedisModule_StringDMA(KeyOf(key), &size, REDISMODULE_READ);
  return {.value = {bytes, size}, .end = ExpiryOf(key).value_or(kMaxInstant)};
}

void RedisHost::Close(KeyContent& key) {
  RedisModule_CloseKey(KeyOf(key));
  key.key = nullptr;
  if (key.owns_handle) RedisModule_FreeString(ctx_, NameOf(key));
}

void RedisHost::Store(KeyContent& key, Lock* lock) {
  Lock* stored = std::exchange(key.lock, lock);
  key.is_plain = false;
  if (stored == nullptr) {
    RedisModule_ModuleTypeSetValue(KeyOf(key), type_, lock);
    ++locks_;
  } else if (stored != lock) {
    // Unlike setting it anew, this does not look as if the lock had been gone for a moment.
    RedisModule_ModuleTypeReplaceValue(KeyOf(key), type_, lock, nullptr);
    delete stored;
  }
  RedisModule_SetAbsExpire(KeyOf(key), lock->closes().time_since_epoch().count());
  RedisModule_SignalModifiedKey(ctx_, NameOf(key));
}

void RedisHost::Delete(KeyContent& key) {
  RedisModule_DeleteKey(KeyOf(key));
  key.lock = nullptr;
  RedisModule_SignalModifiedKey(ctx_, NameOf(key));
}

std::optional<Instant> RedisHost::ExpiryOf(const KeyContent& key) {
  if (key.key == nullptr) return std::nullopt;
  const mstime_t at = RedisModule_GetAbsExpire(KeyOf(key));
  return at == REDISMODULE_NO_EXPIRE ? std::nullopt : std::optional(Instant{Millis{at}});
}

namespace {

// The command by which a plain lock is changed.
const char* CommandFor(const Change& change) {
  return std::holds_alternative<PlainFreed>(change) ? "DEL" : "PEXPIREAT";
}

// There is no reply from a command that the server does not have.
void Free(RedisModuleCallReply* reply) {
  if (reply != nullptr) RedisModule_FreeCallReply(reply);
}

}  // namespace

// A command may have been renamed or disabled.
const char* RedisHost::MissingCommandFor(const Change& change) {
  const char* command = CommandFor(change);
  errno = 0;
  // Without arguments, which each of these commands needs: it does nothing, and another error
  // tells that the command is there.
  RedisModuleCallReply* reply = RedisModule_Call(ctx_, command, "");
  const bool is_there = reply != nullptr || errno != ENOENT;
  Free(reply);
  return is_there ? nullptr : command;
}

void RedisHost::ChangePlain(KeyContent& key, const Change& change) {
  RedisModule_CloseKey(KeyOf(key));
  key.key = nullptr;
  key.is_plain = false;
  const char* command = CommandFor(change);
  if (const auto* extended = std::get_if<PlainExtended>(&change)) {
    Free(RedisModule_Call(ctx_, command, "!sl", NameOf(key),
                          static_cast<long long>(extended->end.time_since_epoch().count())));
  } else {
    Free(RedisModule_Call(ctx_, command, "!s", NameOf(key)));
  }
}

size_t RedisHost::CountKeys(int db) {
  RedisModule_SelectDb(detached_, db);
  return RedisModule_DbSize(detached_);
}

void RedisHost::VisitLocks(int db, const std::function<bool(LockName, const Lock&)>& visit) {
  struct Search {
    const RedisHost& host;
    const std::function<bool(LockName, const Lock&)>& visit;
    int db;
    bool goes_on = true;
  } search{.host = *this, .visit = visit, .db = db};
  const auto look = [](RedisModuleCtx* /*ctx*/, RedisModuleString* name, RedisModuleKey* key,
                       void* data) {
    auto& found = *static_cast<Search*>(data);
    const Lock* lock = found.goes_on ? found.host.LockIn(key) : nullptr;
    if (lock != nullptr) found.goes_on = found.visit({found.db, ToView(name)}, *lock);
  };
  visiting_ = true;
  RedisModule_SelectDb(detached_, db);
  RedisModuleScanCursor* cursor = RedisModule_ScanCursorCreate();
  while (search.goes_on && RedisModule_Scan(detached_, cursor, look, &search) != 0) {
  }
  RedisModule_ScanCursorDestroy(cursor);
  visiting_ = false;
}

// --- Replication --------------------------------------------------------------------------------

void RedisHost::Replicate(const KeyContent& key, const Held& held, Via via, Instant now) {
  if (via == Via::kFact && !HasReplicationConsumers(now)) {
    // Reaches nobody, but the server counts a change, after so many of which it saves. (From the
    // moment in which the first replica asks for a copy to the one in which it is made, there
    // is a backlog that this goes into; but nobody can go on from there.)
    RedisModule_ReplicateVerbatim(ctx_);
    return;
  }
  EmitHeld([this](auto... args) { RedisModule_Replicate(ctx_, args...); }, NameOf(key), held);
}

void RedisHost::Replicate(const KeyContent& key, const Released& released, Via via) {
  if (via == Via::kCommand) {
    RedisModule_ReplicateVerbatim(ctx_);  // the LOCK.RELEASE that is running
    return;
  }
  RedisModule_Replicate(ctx_, kReleaseCommand, "sb", NameOf(key), released.owner.bytes.data(),
                        released.owner.bytes.size());
}

void RedisHost::Replicate(const KeyContent& key, const Ended& ended) {
  EmitEnded([this](auto... args) { RedisModule_Replicate(ctx_, args...); }, NameOf(key), ended);
}

void RedisHost::Replicate(const KeyContent& key, const Expired& expired) {
  EmitExpired([this](auto... args) { RedisModule_Replicate(ctx_, args...); }, NameOf(key), expired);
}

void RedisHost::Replicate(const KeyContent& key, const SessionsEnded& ended) {
  EmitSessionsEnded([this](auto... args) { RedisModule_Replicate(ctx_, args...); }, NameOf(key),
                    ended);
}

void RedisHost::ReplicateFloor(Token floor) {
  RedisModule_Replicate(ctx_, kFactCommand, "cl", kFactFloor.data(),
                        static_cast<long long>(floor.value));
}

bool RedisHost::MayReplicateFloor() { return !slots_->exporting(); }

// --- Subscribers and operators ------------------------------------------------------------------

namespace {

const char* NameOf(LockEvent event) {
  switch (event) {
    case LockEvent::kAcquired:
      return "lock.acquired";
    case LockEvent::kTouched:
      return "lock.touched";
    case LockEvent::kReleased:
      return "lock.released";
    case LockEvent::kLost:
      break;
  }
  return "lock.lost";
}

// The event that tells why, after lock.lost.
const char* NameOf(Loss how) {
  switch (how) {
    case Loss::kForced:
      return "lock.lost.forced";
    case Loss::kEvicted:
      return "lock.lost.evicted";
    case Loss::kFlushed:
      return "lock.lost.flushed";
    case Loss::kSession:
      return "lock.lost.session";
    case Loss::kUndelivered:
      return "lock.lost.undelivered";
    case Loss::kExpired:
      break;
  }
  return "lock.lost.expired";
}

void Notify(RedisModuleCtx* ctx, const char* event, RedisModuleString* key) {
  RedisModule_NotifyKeyspaceEvent(ctx, REDISMODULE_NOTIFY_MODULE, event, key);
}

}  // namespace

void RedisHost::Emit(const KeyContent& key, LockEvent event) {
  if (server_.SomebodyWatches()) Notify(ctx_, turnstile::NameOf(event), NameOf(key));
}

void RedisHost::NotifyLost(RedisModuleCtx* ctx, RedisModuleString* key, Loss how) {
  Notify(ctx, turnstile::NameOf(LockEvent::kLost), key);
  Notify(ctx, turnstile::NameOf(how), key);
}

void RedisHost::EmitLost(const KeyContent& key, Loss how) {
  if (server_.SomebodyWatches()) NotifyLost(ctx_, NameOf(key), how);
}

void RedisHost::EmitLost(LockName lock, Loss how) {
  // Other modules must not change anything while all keys are visited.
  if (visiting_ ? !ServerState::ClientsWatch() : !server_.SomebodyWatches()) return;
  RedisModule_SelectDb(detached_, lock.db);
  RedisModuleString* name = RedisModule_CreateString(detached_, lock.key.data(), lock.key.size());
  NotifyLost(detached_, name, how);
  RedisModule_FreeString(detached_, name);
}

void RedisHost::Warn(const std::string& text) {
  RedisModule_Log(detached_, "warning", "%s", text.c_str());
}

// --- The command that is running ----------------------------------------------------------------

// Inside MULTI, scripts, functions and calls of other modules a client cannot be made to wait.
bool RedisHost::CallerMayBlock() {
  return (RedisModule_GetContextFlags(ctx_) & REDISMODULE_CTX_FLAGS_DENY_BLOCKING) == 0 &&
         ConnectionOf(ctx_).has_value();
}

std::optional<std::string> RedisHost::CallerUser() {
  RedisModuleString* user = RedisModule_GetCurrentUserName(ctx_);
  if (user == nullptr) return std::nullopt;  // a module calls on behalf of nobody
  std::string name(ToView(user));
  RedisModule_FreeString(ctx_, user);
  return name;
}

// --- Calls that wait ----------------------------------------------------------------------------

bool RedisHost::Park(WaitingCall& call) {
  RedisModuleBlockedClient* client = RedisModule_BlockClient(
      ctx_, callbacks_.on_reply, callbacks_.on_timeout, callbacks_.on_free, /*timeout_ms=*/0);
  if (client == nullptr) return false;
  RedisModule_SetDisconnectCallback(client, callbacks_.on_disconnect);
  call.handle = client;
  parked_.emplace(client, &call);
  return true;
}

void RedisHost::Answer(WaitingCall& call) {
  auto* client = static_cast<RedisModuleBlockedClient*>(call.handle);
  parked_.erase(client);
  if (parked_.empty()) parked_ = decltype(parked_)();  // the empty table may be large
  RedisModule_UnblockClient(client, &call);
}

WaitingCall* RedisHost::FindParked(RedisModuleBlockedClient* client) const {
  const auto found = parked_.find(client);
  return found == parked_.end() ? nullptr : found->second;
}

bool RedisHost::IsConnected(uint64_t connection) {
  return RedisModule_GetClientInfoById(nullptr, connection) == REDISMODULE_OK;
}

// --- What the server allows now -----------------------------------------------------------------

bool RedisHost::MayWrite() {
  return RoleOf(RedisModule_GetContextFlags(ctx_)) == Role::kPrimary &&
         RedisModule_AvoidReplicaTraffic() == 0;
}

// Why the server does not take a write to the key, as it would tell a client; nothing if it does.
std::optional<std::string> RedisHost::WriteRefusal(RedisModuleString* key) {
  // The probe below knows about memory only what was true at the last command.
  if ((RedisModule_GetContextFlags(ctx_) & REDISMODULE_CTX_FLAGS_OOM) != 0) {
    return kOutOfMemoryText;
  }

  // S: as in a script, so min-replicas, disk errors and the role count. E: errors come as replies.
  errno = 0;
  RedisModuleCallReply* reply = RedisModule_Call(ctx_, kProbeCommand, "SEs", key);
  // A call tells only that the key is not served here (EPERM), or that the cluster is down.
  const bool not_here = errno == EPERM;
  const bool down = errno == ENETDOWN || errno == EROFS;
  if (reply == nullptr) return kNotNowText;
  std::optional<std::string> refusal;
  if (RedisModule_CallReplyType(reply) == REDISMODULE_REPLY_ERROR) {
    size_t size = 0;
    const char* text = RedisModule_CallReplyStringPtr(reply, &size);
    refusal.emplace(text, size);
  }
  RedisModule_FreeCallReply(reply);
  if (!refusal.has_value() || !slots_->in_cluster() || !(not_here || down)) return refusal;
  if (!view_.has_value()) view_.emplace(ctx_);
  auto lost = view_->WhyLost(SlotOf(ToView(key)));
  return lost.has_value() ? lost : not_here ? kNotNowText : refusal;
}

// Whether the user may still acquire the lock, and the server still takes writes to it: what a
// direct call would be refused for, a deferred grant is refused for too.
std::optional<std::string> RedisHost::GrantRefusal(const WaitingCall& call, const KeyContent& key) {
  RedisModuleString* user =
      RedisModule_CreateString(nullptr, call.user().data(), call.user().size());
  std::array argv = {acquire_command_, NameOf(key)};
  const bool permitted = User(user).MayRun(argv);
  RedisModule_FreeString(nullptr, user);
  return permitted ? WriteRefusal(NameOf(key)) : std::optional<std::string>(kNoLongerPermittedText);
}

void RedisHost::BeforeGrant(LockName lock, FineInstant now) {
  if (!slots_->in_cluster() || caught_up_ == SlotOf(lock.key)) return;
  caught_up_ = SlotOf(lock.key);
  slots_->CatchUp(ctx_, *caught_up_, now);
}

void RedisHost::RefreshSlots(FineInstant now) {
  if (slots_->in_cluster()) slots_->Refresh(ctx_, now);
}

// --- The event loop -----------------------------------------------------------------------------

void RedisHost::WakeEventLoop() {
  RedisModule_EventLoopAddOneShot([](void* /*unused*/) {}, nullptr);
}

// Not from the start, because it costs every SET of every client a callback.
void RedisHost::WatchStrings() {
  if (watches_strings_) return;
  // Not only strings: SUNIONSTORE, ZUNIONSTORE and SORT … STORE put another type in their place.
  watches_strings_ =
      RedisModule_SubscribeToKeyspaceEvents(ctx_,
                                            REDISMODULE_NOTIFY_STRING | REDISMODULE_NOTIFY_SET |
                                                REDISMODULE_NOTIFY_ZSET | REDISMODULE_NOTIFY_LIST,
                                            callbacks_.on_key_event) == REDISMODULE_OK;
}

}  // namespace turnstile
