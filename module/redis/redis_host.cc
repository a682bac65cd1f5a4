#include "redis/redis_host.h"

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>
#include <variant>

#include "core/check.h"
#include "redis/replies.h"

namespace turnstile {

void RedisHost::Attach(const Settings& settings, Slots& slots) {
  settings_ = &settings;
  slots_ = &slots;
}

void RedisHost::Register(RedisModuleCtx* ctx, const EngineVersion& engine) {
  detached_ = RedisModule_GetDetachedThreadSafeContext(ctx);
  acquire_command_ =
      RedisModule_CreateString(nullptr, kAcquireCommand, std::strlen(kAcquireCommand));
  server_.Register(ctx, engine);
  const char* publish = server_.in_cluster() ? "SPUBLISH" : "PUBLISH";
  publish_command_ = RedisModule_CreateString(nullptr, publish, std::strlen(publish));
  subscriptions_.Register(detached_, engine);
  while (RedisModule_SelectDb(detached_, databases_) == REDISMODULE_OK) ++databases_;
}

// --- Subscriptions ------------------------------------------------------------------------------

void RedisHost::SubscribeForLocks() {
  subscriptions_.Need(Subscriptions::Topic::kLocks);
  WatchCopies();
  server_.ForgetModules();
  // A lock may also arrive with its slot, and move on before anything is granted here.
  if (slots_->in_cluster() && role() == Role::kPrimary) WatchSlots();
}

void RedisHost::WatchCopies() {
  if (subscriptions_.Need(Subscriptions::Topic::kCopies)) server_.WatchCopies(true);
}

void RedisHost::WatchSlots() {
  if (!subscriptions_.Need(Subscriptions::Topic::kSlotMap)) return;
  slots_->WakeUp();
  RunSoon();
}

bool RedisHost::ReviewSubscriptions(RedisModuleCtx* ctx, Engine& engine, FineTick now) {
  using Topic = Subscriptions::Topic;
  subscriptions_.OnReview();
  const bool has_locks = locks_ > 0;
  const bool in_use = has_locks || !engine.queue().empty();
  // Other servers have to know a clock that leads.
  const bool leads = engine.tokens().ToSave(WallNow()).has_value();
  if (!has_locks) engine.OnLocksGone();
  if (engine.is_idle() && parked_.empty() && !runs_soon_) subscriptions_.GiveUp(Topic::kPasses);
  if (!engine.has_sessions()) subscriptions_.GiveUp(Topic::kConnections);
  if (!in_use) subscriptions_.GiveUp(Topic::kLocks);
  if (!in_use && !leads && !slots_->exporting()) {
    if (subscriptions_.has(Topic::kCopies)) server_.WatchCopies(false);
    subscriptions_.GiveUp(Topic::kCopies);
    if (watches_slots()) slots_->Sleep();
    subscriptions_.GiveUp(Topic::kSlotMap);
  }
  // After a load or a promotion.
  if (in_use && slots_->in_cluster() && role() == Role::kPrimary) WatchSlots();
  const bool any = in_use || leads || subscriptions_.has(Topic::kPasses) ||
                   subscriptions_.has(Topic::kConnections);
  if (any) subscriptions_.ReviewLater();
  if (!in_use) return false;
  // What is asked of the server shows in its statistics of commands: not at every review.
  constexpr Millis kBetweenChecks{900};
  if (checked_at_.has_value() && now - *checked_at_ < kBetweenChecks) return false;
  checked_at_ = now;
  // A module that was loaded meanwhile may listen for our events.
  if (server_.has_checked_modules()) server_.CheckModules(ctx);
  return true;
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
  if (!TURNSTILE_CHECK(ctx_ != nullptr)) {  // outside any Scope: nothing can be opened
    content.is_other = true;
    return content;
  }
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
  // In a transaction Valkey 9 reports the database of the last SELECT as the selected one, even in
  // an event of MOVE and after RedisModule_SelectDb. The open key has the right one.
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

// Not done when the key is opened: reading a number makes the server store it again, without its
// age.
PlainLock RedisHost::ReadPlain(const KeyContent& key) {
  size_t size = 0;
  const char* bytes = RedisModule_StringDMA(KeyOf(key), &size, REDISMODULE_READ);
  return {.value = {bytes, size}, .end = ExpiryOf(key)};
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
    WatchLocks();
    RedisModule_ModuleTypeSetValue(KeyOf(key), type_, lock);
    ++locks_;
  } else if (stored != lock) {
    // Unlike setting the value again, this does not look as if the lock had been deleted in
    // between.
    RedisModule_ModuleTypeReplaceValue(KeyOf(key), type_, lock, nullptr);
    delete stored;
  }
  RedisModule_SetAbsExpire(KeyOf(key), lock->blocks_until().time_since_epoch().count());
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

// The command that changes a plain lock.
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
  // Called without arguments, which each of these commands requires: it does nothing, and any other
  // error shows that the command exists.
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

FactArgs::FactArgs(const HoldSet& held) {
  const Hold& hold = held.hold;
  if (held.mode != Mode::kExclusive) Add(WordFor(held.mode));
  if (hold.weight != 1) Add(kWeightWord, std::to_string(hold.weight));
  if (hold.count != 1) Add(kCountWord, std::to_string(hold.count));
  if (hold.linger != Millis{0}) Add(kLingerWord, std::to_string(hold.linger.count()));
  if (hold.cap.has_value()) Add(kCapWord, std::to_string(hold.cap->time_since_epoch().count()));
  if (!hold.tag.empty()) Add(kTagWord, hold.tag);
}

FactArgs::FactArgs(std::span<const Owner> owners) {
  words_.reserve(owners.size());
  for (const Owner owner : owners) Add(owner.bytes);
}

FactArgs::~FactArgs() {
  for (RedisModuleString* word : words_) RedisModule_FreeString(nullptr, word);
}

void FactArgs::Add(std::string_view word, std::string_view value) {
  Add(word);
  Add(value);
}

void FactArgs::Add(std::string_view word) {
  words_.push_back(RedisModule_CreateString(nullptr, word.data(), word.size()));
}

void RedisHost::Replicate(const KeyContent& key, const HoldSet& held, Via via, Instant now) {
  if (via != Via::kCommand && !HasReplicationConsumers(now)) {
    // Reaches nobody, but the server counts a change towards its save points. (Between the time
    // when the first replica requests a copy and the time when it is made, there is a backlog that
    // this is written to; but no replica can continue from there. An AOF would not load a command
    // without words, which is what this is outside commands; but there is none.)
    RedisModule_ReplicateVerbatim(ctx_);
    return;
  }
  EmitHoldSet([this](auto... args) { RedisModule_Replicate(ctx_, args...); }, NameOf(key), held);
}

void RedisHost::Replicate(const KeyContent& key, const HoldReleased& released, Via via) {
  if (via == Via::kCommand) {
    RedisModule_ReplicateVerbatim(ctx_);  // the running LOCK.RELEASE
    return;
  }
  RedisModule_Replicate(ctx_, kReleaseCommand, "sb", NameOf(key), released.owner.bytes.data(),
                        released.owner.bytes.size());
}

void RedisHost::Replicate(const KeyContent& key, const HoldEnded& ended) {
  const std::string_view owner = ended.owner.bytes;
  const std::string_view how = WordFor(ended.how);
  if (how.empty()) {
    RedisModule_Replicate(ctx_, kFactCommand, "csb", kFactEnded.data(), NameOf(key), owner.data(),
                          owner.size());
  } else {
    RedisModule_Replicate(ctx_, kFactCommand, "csbc", kFactEnded.data(), NameOf(key), owner.data(),
                          owner.size(), how.data());
  }
}

void RedisHost::Replicate(const KeyContent& key, const HoldsExpired& expired) {
  RedisModule_Replicate(ctx_, kFactCommand, "csl", kFactExpired.data(), NameOf(key),
                        static_cast<long long>(expired.before.time_since_epoch().count()));
}

void RedisHost::Replicate(const KeyContent& key, const SessionsEnded& ended) {
  FactArgs owners(ended.owners);
  RedisModule_Replicate(ctx_, kFactCommand, "cslv", kFactSession.data(), NameOf(key),
                        static_cast<long long>(ended.at.time_since_epoch().count()), owners.data(),
                        owners.size());
}

void RedisHost::ReplicateFloor(Token floor) {
  RedisModule_Replicate(ctx_, kFactCommand, "cl", kFactFloor.data(),
                        static_cast<long long>(floor.value));
}

bool RedisHost::MayReplicateFloor() { return !slots_->exporting(); }

// --- Subscribers and operators ------------------------------------------------------------------

namespace {

const char* EventName(LockEvent event) {
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

void Notify(RedisModuleCtx* ctx, const char* event, RedisModuleString* key) {
  RedisModule_NotifyKeyspaceEvent(ctx, REDISMODULE_NOTIFY_MODULE, event, key);
}

}  // namespace

void RedisHost::OnLockCreated() {
  WatchLocks();
  ++locks_;
}

void RedisHost::Emit(const KeyContent& key, LockEvent event) {
  if (!server_.has_checked_modules() && role() != Role::kLoading) server_.CheckModules(ctx_);
  if (server_.HasEventListeners()) Notify(ctx_, EventName(event), NameOf(key));
}

void RedisHost::NotifyLost(RedisModuleCtx* ctx, RedisModuleString* key, Loss how) {
  Notify(ctx, EventName(LockEvent::kLost), key);
  Notify(ctx, ("lock.lost." + std::string(turnstile::NameOf(how))).c_str(), key);
}

void RedisHost::EmitLost(const KeyContent& key, Loss how) {
  if (server_.HasEventListeners()) NotifyLost(ctx_, NameOf(key), how);
}

void RedisHost::EmitLost(LockName lock, Loss how) {
  // Other modules must not change anything while all keys are visited.
  if (visiting_ ? !Server::ClientsMayListen() : !server_.HasEventListeners()) return;
  RedisModule_SelectDb(detached_, lock.db);
  RedisModuleString* name = RedisModule_CreateString(detached_, lock.key.data(), lock.key.size());
  NotifyLost(detached_, name, how);
  RedisModule_FreeString(detached_, name);
}

// In a cluster a channel belongs to the slot of the key, so its subscribers are on this node; the
// other nodes are not told.
//
// The cost is measured. No count would do: it depends on the length of the names, on how many
// receive the message, and on the patterns that other clients have subscribed to.
Delivery RedisHost::Publish(const Notice& notice) {
  const FineTick begin = SteadyNow();
  const StringOf user(notice.user);
  const StringOf channel(notice.to.channel);
  const StringOf message(TextOf(notice));
  std::array argv = {publish_command_, channel.get(), message.get()};
  if (!User(user.get()).MayPublish(argv)) return {};
  const int receivers = slots_->in_cluster()
                            ? RedisModule_PublishMessageShard(ctx_, channel.get(), message.get())
                            : RedisModule_PublishMessage(ctx_, channel.get(), message.get());
  constexpr Micros kOrdinary{4};
  const Micros extra = std::max(SteadyNow() - begin - kOrdinary, Micros{0});
  return {.receivers = static_cast<size_t>(std::max(receivers, 0)),
          .cost = static_cast<size_t>(extra.count())};
}

void RedisHost::Warn(const std::string& text) {
  RedisModule_Log(detached_, "warning", "%s", text.c_str());
}

// --- The running command ------------------------------------------------------------------------

std::optional<Host::ParkableCaller> RedisHost::CallerToPark() {
  const bool denied =
      (RedisModule_GetContextFlags(ctx_) & REDISMODULE_CTX_FLAGS_DENY_BLOCKING) != 0;
  const std::optional<uint64_t> connection = denied ? std::nullopt : server_.ConnectionOf(ctx_);
  if (!connection.has_value()) return std::nullopt;
  RedisModuleString* user = RedisModule_GetCurrentUserName(ctx_);
  if (user == nullptr) return std::nullopt;  // a module calls without a user
  ParkableCaller caller{.connection = *connection, .user = std::string(ToView(user))};
  RedisModule_FreeString(ctx_, user);
  return caller;
}

Host::NotifiedCaller RedisHost::CallerToNotify(std::string_view channel, LockName lock) {
  const User caller(server_, ctx_);
  const StringOf name(channel);
  const StringOf message("");
  std::array argv = {publish_command_, name.get(), message.get()};
  if (!caller.MayPublish(argv)) {
    caller.LogRefusal(ctx_, argv);
    return {.refusal = kMayNotPublishText};
  }
  if (slots_->in_cluster() && SlotOf(channel) != SlotOf(lock.key)) {
    return {.refusal = kChannelInOtherSlotText};
  }
  RedisModuleString* user = RedisModule_GetCurrentUserName(ctx_);  // it has one
  NotifiedCaller notified{.user = std::string(ToView(user))};
  RedisModule_FreeString(ctx_, user);
  return notified;
}

// --- Calls that wait ----------------------------------------------------------------------------

bool RedisHost::Park(WaitingCall& call) {
  RedisModuleBlockedClient* client = RedisModule_BlockClient(
      ctx_, callbacks_.on_reply, callbacks_.on_timeout, callbacks_.on_free, /*timeout_ms=*/0);
  if (client == nullptr) return false;
  RedisModule_SetDisconnectCallback(client, callbacks_.on_disconnect);
  call.handle = client;
  parked_.emplace(client, &call);
  WatchLocks();  // or strings that count as such
  RunSoon();
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

// Whether a primary that has memory accepts every write: it needs no replicas for that, there is no
// disk whose errors would count, and no slots.
bool RedisHost::NothingElseRefusesWrites(int context_flags) {
  const int disk = REDISMODULE_CTX_FLAGS_AOF | REDISMODULE_CTX_FLAGS_RDB;
  if (slots_->in_cluster() || (context_flags & disk) != 0) return false;
  if (!needs_replicas_.has_value()) {
    needs_replicas_ = SettingOf(ctx_, "min-replicas-to-write") != "0";
  }
  return !*needs_replicas_;
}

// The error with which the server would refuse a write to the key by a client; nothing if it would
// accept it.
std::optional<std::string> RedisHost::WriteRefusal(RedisModuleString* key) {
  // The probe below uses the memory state as of the last command.
  const int flags = RedisModule_GetContextFlags(ctx_);
  if ((flags & REDISMODULE_CTX_FLAGS_OOM) != 0) {
    return kOutOfMemoryText;
  }
  if (NothingElseRefusesWrites(flags)) return std::nullopt;

  // S: as in a script, so min-replicas, disk errors and the role count. E: errors are returned as
  // replies.
  errno = 0;
  RedisModuleCallReply* reply = RedisModule_Call(ctx_, kProbeCommand, "SEs", key);
  // A call reports only that the key is not served here (EPERM), or that the cluster is down.
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
  auto lost = View().RefusalFor(SlotOf(ToView(key)));
  return lost.has_value() ? lost : not_here ? kNotNowText : refusal;
}

// Checks whether the user may still acquire the lock, and whether the server still accepts writes
// to it: a deferred grant is refused for the same reasons as a direct call.
std::optional<std::string> RedisHost::GrantRefusal(const WaitingCall& call, const KeyContent& key) {
  const StringOf user(call.user());
  std::array argv = {acquire_command_, NameOf(key)};
  const bool permitted = User(user.get()).MayRun(argv);
  return permitted ? WriteRefusal(NameOf(key)) : std::optional<std::string>(kNoLongerPermittedText);
}

void RedisHost::BeforeGrant(LockName lock, FineInstant now) {
  if (!slots_->in_cluster() || caught_up_ == SlotOf(lock.key)) return;
  caught_up_ = SlotOf(lock.key);
  WatchSlots();
  slots_->CatchUp(ctx_, *caught_up_, now);
  // Other nodes may have to hear of it at once; in a deferred pass that is over by then.
  if (slots_->NextRefresh().IsDueAt(ToInstant(now))) WakeEventLoop();
}

// The view of the cluster for this entry into the module.
ClusterView& RedisHost::View() {
  if (!view_.has_value()) view_.emplace(ctx_);
  return *view_;
}

Host::SlotRefresh RedisHost::RefreshSlots(FineInstant now) {
  if (!slots_->in_cluster()) return {};
  if (slots_->has_news()) WatchSlots();
  const bool may_be_lost = slots_->Refresh(ctx_, View(), now);
  return {.may_be_lost = may_be_lost, .next = slots_->NextRefresh()};
}

std::optional<std::string> RedisHost::SlotRefusal(LockName lock) {
  return View().RefusalFor(SlotOf(lock.key));
}

// --- The event loop -----------------------------------------------------------------------------

void RedisHost::WakeEventLoop() {
  RunSoon();
  RedisModule_EventLoopAddOneShot([](void* /*unused*/) {}, nullptr);
}

void WakeTimer::Set(RedisModuleCtx* ctx, Host& host, Instant due, const Now& time) {
  constexpr Millis kNoStep{2};           // both clocks are truncated to a millisecond
  constexpr Millis kLongestSleep{1000};  // of the event loop: one period of the server's cron
  const Instant now = time.moment();
  const Millis difference = now.time_since_epoch() - time.tick().time_since_epoch();
  const bool stepped = std::chrono::abs(difference - wall_minus_steady_) > kNoStep;
  if (fires_at_.has_value() && due >= *fires_at_ && !stepped) return;
  if (fires_at_.has_value()) RedisModule_StopTimer(ctx, timer_, nullptr);
  host_ = &host;
  fires_at_ = due;
  wall_minus_steady_ = difference;
  timer_ = RedisModule_CreateTimer(ctx, std::max(due - now, Millis{0}).count(), OnFired, this);
  // By now 7.0 has computed how long it will sleep.
  if (due - now < kLongestSleep) host.WakeEventLoop();
}

void WakeTimer::OnFired(RedisModuleCtx* /*ctx*/, void* timer) {
  auto* fired = static_cast<WakeTimer*>(timer);
  fired->fires_at_.reset();
  fired->has_fired_ = true;
  fired->host_->RunSoon();
}

}  // namespace turnstile
