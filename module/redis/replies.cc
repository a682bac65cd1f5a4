#include "redis/replies.h"

#include <algorithm>
#include <memory>

#include "core/budget.h"
#include "redis/server_sessions.h"
#include "redis/tokens.h"
#include "redis/user.h"
#include "redis/waiters.h"

namespace turnstile {
namespace {

// What is in a key, as everybody should see it: without the holds that have ended with their
// connection and are not removed yet. A command that only reads cannot remove them.
class Seen {
 public:
  Seen(const LockKey& key, Instant now) : place_(key.place()) {
    const LockName name = key.lock_name();
    if (place_.lock == nullptr || TheSessions().CountEnded(name) == 0) return;
    std::vector<Hold> left;
    for (const Hold& hold : place_.lock->holds(Lock::Order::kByOwner)) {
      if (!TheSessions().HasEnded(name, hold.owner) || !hold.LiveAt(now)) {
        left.push_back(hold);
      } else if (hold.linger > Millis{0}) {
        left.push_back(AfterSession(hold, now));
      }
    }
    if (!left.empty()) lock_.reset(Lock::Make(place_.lock->mode(), left));
    place_.lock = lock_.get();
  }

  const Place& place() const { return place_; }

 private:
  Place place_;
  std::unique_ptr<Lock> lock_;
};

// One pair of a map reply.
void Field(RedisModuleCtx* ctx, const char* name, long long value) {
  RedisModule_ReplyWithCString(ctx, name);
  RedisModule_ReplyWithLongLong(ctx, value);
}

void Field(RedisModuleCtx* ctx, const char* name, std::string_view bytes) {
  RedisModule_ReplyWithCString(ctx, name);
  RedisModule_ReplyWithStringBuffer(ctx, bytes.data(), bytes.size());
}

void NullField(RedisModuleCtx* ctx, const char* name) {
  RedisModule_ReplyWithCString(ctx, name);
  RedisModule_ReplyWithNull(ctx);
}

void OptionalField(RedisModuleCtx* ctx, const char* name, std::optional<std::string_view> bytes) {
  bytes.has_value() ? Field(ctx, name, *bytes) : NullField(ctx, name);
}

void OptionalField(RedisModuleCtx* ctx, const char* name, std::optional<Millis> value) {
  value.has_value() ? Field(ctx, name, value->count()) : NullField(ctx, name);
}

void OptionalField(RedisModuleCtx* ctx, const char* name, std::optional<Token> token) {
  token.has_value() ? Field(ctx, name, static_cast<long long>(token->value)) : NullField(ctx, name);
}

// How long a plain lock lasts, if it ends.
std::optional<Millis> LeaseLeft(const PlainLock& plain, Instant now) {
  return plain.end == kMaxInstant ? std::nullopt : std::optional<Millis>(plain.end - now);
}

// What one call of LOCK.LIST or LOCK.TOP may do before it stops, however much there is to tell; in
// units of about a microsecond.
constexpr size_t kListBudget = 10'000;
constexpr size_t kLook = 2;           // the check of access rights, and opening the key
constexpr size_t kTell = 5;           // ten fields
constexpr size_t kHoldsPerUnit = 20;  // each hold is looked at

std::string TextOf(RedisModuleCallReply* reply) {
  size_t size = 0;
  const char* bytes = RedisModule_CallReplyStringPtr(reply, &size);
  return bytes == nullptr ? std::string() : std::string(bytes, size);
}

const char* NameOf(Mode mode) {
  switch (mode) {
    case Mode::kShared:
      return "shared";
    case Mode::kLimit:
      return "limit";
    case Mode::kExclusive:
      break;
  }
  return "exclusive";
}

// How many of those who hold or wait LOCK.INFO shows one by one: it is a fast command.
constexpr size_t kMostShown = 100;

// Whom to call: a connection and where it comes from, as CLIENT LIST has them.
constexpr long kConnectionFields = 2;
void ConnectionFields(RedisModuleCtx* ctx, std::optional<uint64_t> client) {
  if (!client.has_value()) {
    NullField(ctx, "client-id");
    NullField(ctx, "client-addr");
    return;
  }
  Field(ctx, "client-id", static_cast<long long>(*client));
  RedisModuleClientInfo info = REDISMODULE_CLIENTINFO_INITIALIZER_V1;
  if (RedisModule_GetClientInfoById(&info, *client) != REDISMODULE_OK) {
    NullField(ctx, "client-addr");
    return;
  }
  const std::string_view host = info.addr;
  const bool is_v6 = host.find(':') != std::string_view::npos;
  const std::string address =
      (is_v6 ? '[' + std::string(host) + ']' : std::string(host)) + ':' + std::to_string(info.port);
  Field(ctx, "client-addr", std::string_view(address));
}

constexpr long kHolderFields = 7 + kConnectionFields;

// What a plain lock's holder has too. `session`: the connection that the hold ends with.
void CommonHolderFields(RedisModuleCtx* ctx, uint32_t count, std::optional<uint64_t> session,
                        Millis linger) {
  Field(ctx, "count", count);
  RedisModule_ReplyWithCString(ctx, "session");
  RedisModule_ReplyWithBool(ctx, session.has_value() ? 1 : 0);
  Field(ctx, "linger-ms", linger.count());
  ConnectionFields(ctx, session);
}

void ReplyHolder(RedisModuleCtx* ctx, LockName lock, const Hold& hold, Instant now) {
  RedisModule_ReplyWithMap(ctx, kHolderFields);
  Field(ctx, "owner", hold.owner.bytes);
  Field(ctx, "token", static_cast<long long>(hold.token.value));
  Field(ctx, "lease-left-ms", (hold.end - now).count());
  Field(ctx, "held-ms", std::max(now - hold.since, Millis{0}).count());
  CommonHolderFields(ctx, hold.count, TheSessions().BoundTo(lock, hold.owner), hold.linger);
}

void ReplyPlainHolder(RedisModuleCtx* ctx, RedisModuleString* key, const PlainLock& plain,
                      Instant now) {
  RedisModule_ReplyWithMap(ctx, kHolderFields);
  OptionalField(ctx, "owner", User(ctx).MayGet(key) ? std::optional(plain.value) : std::nullopt);
  NullField(ctx, "token");
  OptionalField(ctx, "lease-left-ms", LeaseLeft(plain, now));
  NullField(ctx, "held-ms");
  CommonHolderFields(ctx, /*count=*/1, /*session=*/std::nullopt, Millis{0});
}

// Those whose holds are live, in the order of their tokens.
void ReplyHolders(RedisModuleCtx* ctx, LockName name, const Lock& lock, Instant now) {
  RedisModule_ReplyWithArray(ctx, REDISMODULE_POSTPONED_LEN);
  size_t shown = 0;
  for (const Hold& hold : lock.holds(Lock::Order::kByToken)) {
    if (shown == kMostShown) break;
    if (!hold.LiveAt(now)) continue;
    ReplyHolder(ctx, name, hold, now);
    ++shown;
  }
  RedisModule_ReplySetArrayLength(ctx, static_cast<long>(shown));
}

// Those in front, in order.
void ReplyWaiters(RedisModuleCtx* ctx, const WaitQueue::Line* line) {
  if (line == nullptr) {
    RedisModule_ReplyWithArray(ctx, 0);
    return;
  }
  RedisModule_ReplyWithArray(ctx, static_cast<long>(std::min(line->size(), kMostShown)));
  const Tick now = ToTick(SteadyNow());
  size_t shown = 0;
  for (const auto* place = line->first(); place != nullptr && shown < kMostShown; ++shown) {
    const WaitQueue::Waiter& waiter = place->waiter();
    RedisModule_ReplyWithMap(ctx, 4 + kConnectionFields);
    Field(ctx, "owner", waiter.request().owner.bytes);
    Field(ctx, "mode", NameOf(waiter.request().mode));
    Field(ctx, "waited-ms", (now - waiter.since()).count());
    Field(ctx, "left-ms", std::max(waiter.deadline() - now, Millis{0}).count());
    ConnectionFields(ctx, waiter.client_id());
    place = place->behind();
  }
}

// The mode in which a lock is held, or in which the first in line asks for it.
const char* NameOfMode(const Place& place, const WaitQueue::Line* line, Instant now) {
  if (CountHolders(place, now) == 0) return NameOf(line->first()->waiter().request().mode);
  return place.plain.has_value() ? "plain" : NameOf(ModeOf(place));
}

// What a list tells of one lock; of several holders about the one with the highest token.
struct Summary {
  std::string key;
  const char* mode = nullptr;
  size_t holding = 0;
  std::optional<std::string> owner;
  std::optional<Token> token;
  std::optional<Millis> held;
  std::optional<Millis> lease_left;
  Millis linger_left{0};
  size_t waiting = 0;
  Millis longest_wait{0};
};

// What there is to tell of a lock, if the caller may know of it and somebody holds it or waits for
// it.
std::optional<Summary> Summarize(RedisModuleCtx* ctx, const User& caller, RedisModuleString* name,
                                 Instant now, Budget& budget) {
  budget.Spend(kLook);
  if (!caller.MayLookAt(name)) return std::nullopt;
  const LockKey key(ctx, name, LockKey::Access::kLook);
  if (key.wrong_type()) return std::nullopt;
  const Seen seen(key, now);
  const Place& place = seen.place();
  const WaitQueue::Line* line = TheWaiters().Find(key.lock_name());
  if (CountHolders(place, now) == 0 && line == nullptr) return std::nullopt;

  budget.Spend(kTell + (place.lock == nullptr ? 0 : place.lock->size() / kHoldsPerUnit));
  const Occupancy occupancy = OccupancyOf(place, now);
  Summary summary{.key = std::string(ToView(name)),
                  .mode = NameOfMode(place, line, now),
                  .holding = occupancy.live,
                  .linger_left = occupancy.linger_left};
  if (const std::optional<Hold> hold = CurrentHold(place, now); hold.has_value()) {
    summary.owner = hold->owner.bytes;
    summary.token = hold->token;
    summary.held = std::max(now - hold->since, Millis{0});
    summary.lease_left = hold->end - now;
  } else if (occupancy.live > 0 && place.plain.has_value()) {
    const bool shown = place.plain->value.size() <= kMaxOwnerBytes && caller.MayGet(name);
    if (shown) summary.owner = place.plain->value;
    summary.lease_left = LeaseLeft(*place.plain, now);
  }
  if (line != nullptr) {
    summary.waiting = line->size();
    summary.longest_wait = ToTick(SteadyNow()) - line->waiting_since();
  }
  return summary;
}

void ReplySummary(RedisModuleCtx* ctx, const Summary& summary) {
  RedisModule_ReplyWithMap(ctx, 10);
  Field(ctx, "key", std::string_view(summary.key));
  Field(ctx, "mode", summary.mode);
  Field(ctx, "holding", static_cast<long long>(summary.holding));
  OptionalField(ctx, "owner", summary.owner);
  OptionalField(ctx, "token", summary.token);
  OptionalField(ctx, "held-ms", summary.held);
  OptionalField(ctx, "lease-left-ms", summary.lease_left);
  Field(ctx, "linger-left-ms", summary.linger_left.count());
  Field(ctx, "waiting", static_cast<long long>(summary.waiting));
  Field(ctx, "longest-wait-ms", summary.longest_wait.count());
}

}  // namespace

const char* TextFor(Outcome outcome) {
  switch (outcome) {
    case Outcome::kOtherMode:
      return "ERR this owner holds the lock in another mode: release it first (only SHARED can "
             "become exclusive, and exclusive SHARED)";
    case Outcome::kHoldsSome:
      return "ERR this owner holds some of these locks, but not all: release them first, or ask "
             "for the others alone";
    case Outcome::kHoldsApart:
      return "ERR this owner holds these locks under different tokens: release them first, or ask "
             "for each alone";
    case Outcome::kUpgradesSeveral:
      return "ERR ALSO cannot turn shared holds into exclusive ones: release them first, or ask "
             "for each alone";
    case Outcome::kFloorTooHigh:
      return "ERR FLOOR is too far ahead: it may be at most this server's last token "
             "(turnstile_last_token in INFO turnstile), or its wall clock in microseconds plus "
             "half "
             "of turnstile.token-margin-ms";
    case Outcome::kCountedOut:
      return "ERR this hold is counted 4294967295 times, which is the most: release some";
    default:
      return "ERR no tokens are left below 2^53: this server cannot grant new holds any more";
  }
}

std::string MovedText(Slot slot, const ClusterNode& node, std::string_view endpoint_type) {
  std::string host = node.ip;
  if (endpoint_type == "hostname") host = node.hostname.empty() ? "?" : node.hostname;
  if (endpoint_type == "unknown-endpoint") host.clear();
  return "MOVED " + std::to_string(slot) + ' ' + host + ':' + node.port;
}

int ReplyAcquired(RedisModuleCtx* ctx, const Admission& admission) {
  if (admission.granted()) return ReplyToken(ctx, admission.token);
  if (admission.busy()) return RedisModule_ReplyWithNull(ctx);
  return RedisModule_ReplyWithError(ctx, TextFor(admission.outcome));
}

int ReplyCount(RedisModuleCtx* ctx, size_t count) {
  return RedisModule_ReplyWithLongLong(ctx, static_cast<long long>(count));
}

int ReplyToken(RedisModuleCtx* ctx, std::optional<Token> token) {
  if (!token.has_value()) return RedisModule_ReplyWithNull(ctx);
  return RedisModule_ReplyWithLongLong(ctx, static_cast<long long>(token->value));
}

int ReplyFlag(RedisModuleCtx* ctx, bool flag) {
  return RedisModule_ReplyWithLongLong(ctx, flag ? 1 : 0);
}

int ReplyInfo(RedisModuleCtx* ctx, const LockKey& key, const WaitQueue::Line* line, Instant now) {
  const Seen seen(key, now);
  const Place& place = seen.place();
  const bool held = CountHolders(place, now) > 0;
  if (!held && line == nullptr) return RedisModule_ReplyWithNull(ctx);
  const Occupancy occupancy = OccupancyOf(place, now);
  RedisModule_ReplyWithMap(ctx, 7);
  Field(ctx, "mode", NameOfMode(place, line, now));
  Field(ctx, "holding", static_cast<long long>(occupancy.live));
  RedisModule_ReplyWithCString(ctx, "holders");
  if (held && place.plain.has_value()) {
    RedisModule_ReplyWithArray(ctx, 1);
    ReplyPlainHolder(ctx, key.name(), *place.plain, now);
  } else if (held) {
    ReplyHolders(ctx, key.lock_name(), *place.lock, now);
  } else {
    RedisModule_ReplyWithArray(ctx, 0);
  }
  Field(ctx, "linger-left-ms", occupancy.linger_left.count());
  Field(ctx, "waiting", line == nullptr ? 0 : static_cast<long long>(line->size()));
  RedisModule_ReplyWithCString(ctx, "waiters");
  ReplyWaiters(ctx, line);
  Field(ctx, "grace-left-ms", Tokens().GraceLeft(now).count());
  return REDISMODULE_OK;
}

namespace {

// The locks that a call of LOCK.LIST tells of.
struct Listed {
  std::string next_cursor;
  std::vector<Summary> locks;
  std::string error;  // the server's own, in place of all that
};

// Goes on for as many keys as are asked for, a few at a time: how much there is to do for a key is
// known only when it is found, and SCAN cannot be stopped in the middle.
Listed ScanLocks(RedisModuleCtx* ctx, const ListRequest& request, Instant now) {
  constexpr int64_t kStep = 100;
  const User caller(ctx);
  const std::string_view match = request.match.value_or("*");
  Listed listed{.next_cursor = std::string(request.cursor)};
  Budget budget(kListBudget);
  int64_t left = request.count;
  do {
    const int64_t step = std::min(left, kStep);
    RedisModuleCallReply* found = RedisModule_Call(
        ctx, "SCAN", "Ebcbclcc", listed.next_cursor.data(), listed.next_cursor.size(), "MATCH",
        match.data(), match.size(), "COUNT", static_cast<long long>(step), "TYPE", kTypeName);
    if (found == nullptr) {
      listed.error = "ERR LOCK.LIST needs SCAN, which this server lacks";
      return listed;
    }
    if (RedisModule_CallReplyType(found) == REDISMODULE_REPLY_ERROR) {
      listed.error = TextOf(found);
      RedisModule_FreeCallReply(found);
      return listed;
    }
    listed.next_cursor = TextOf(RedisModule_CallReplyArrayElement(found, 0));
    RedisModuleCallReply* keys = RedisModule_CallReplyArrayElement(found, 1);
    for (size_t i = 0; i < RedisModule_CallReplyLength(keys); ++i) {
      RedisModuleString* name =
          RedisModule_CreateStringFromCallReply(RedisModule_CallReplyArrayElement(keys, i));
      if (auto summary = Summarize(ctx, caller, name, now, budget); summary.has_value()) {
        listed.locks.push_back(std::move(*summary));
      }
      RedisModule_FreeString(ctx, name);
    }
    RedisModule_FreeCallReply(found);
    budget.Spend(static_cast<size_t>(step));
    left -= step;
  } while (left > 0 && !budget.spent() && listed.next_cursor != "0");
  return listed;
}

}  // namespace

int ReplyList(RedisModuleCtx* ctx, const ListRequest& request, Instant now) {
  const Listed listed = ScanLocks(ctx, request, now);
  if (!listed.error.empty()) return RedisModule_ReplyWithError(ctx, listed.error.c_str());
  RedisModule_ReplyWithArray(ctx, 2);
  RedisModule_ReplyWithStringBuffer(ctx, listed.next_cursor.data(), listed.next_cursor.size());
  RedisModule_ReplyWithArray(ctx, static_cast<long>(listed.locks.size()));
  for (const Summary& summary : listed.locks) ReplySummary(ctx, summary);
  return REDISMODULE_OK;
}

int ReplyTop(RedisModuleCtx* ctx, const std::vector<const WaitQueue::Line*>& lines, size_t most,
             Instant now) {
  const User caller(ctx);
  RedisModule_ReplyWithArray(ctx, REDISMODULE_POSTPONED_LEN);
  size_t shown = 0;
  Budget budget(kListBudget);
  for (const WaitQueue::Line* line : lines) {
    if (shown == most || budget.spent()) break;
    const std::string_view key = line->lock().key;
    RedisModuleString* name = RedisModule_CreateString(ctx, key.data(), key.size());
    if (const auto summary = Summarize(ctx, caller, name, now, budget); summary.has_value()) {
      ReplySummary(ctx, *summary);
      ++shown;
    }
    RedisModule_FreeString(ctx, name);
  }
  RedisModule_ReplySetArrayLength(ctx, static_cast<long>(shown));
  return REDISMODULE_OK;
}

int ReplyFenced(RedisModuleCtx* ctx, Token asked, std::optional<Token> holds) {
  const std::string text = "FENCED token " + std::to_string(asked.value) +
                           " does not hold the lock" +
                           (holds.has_value() ? ", token " + std::to_string(holds->value) + " does"
                                              : std::string(", no token does"));
  return RedisModule_ReplyWithError(ctx, text.c_str());
}

int ReplyNotPermitted(RedisModuleCtx* ctx, std::string_view command) {
  const std::string text =
      "NOPERM this user has no permissions to run the command after THEN: " + Quoted(command);
  return RedisModule_ReplyWithError(ctx, text.c_str());
}

int ReplyOf(RedisModuleCtx* ctx, RedisModuleCallReply* reply) {
  if (reply == nullptr) {
    return RedisModule_ReplyWithError(ctx, "ERR the command after THEN cannot be run there");
  }
  RedisModule_ReplyWithCallReply(ctx, reply);
  RedisModule_FreeCallReply(reply);
  return REDISMODULE_OK;
}

int ReplyError(RedisModuleCtx* ctx, const ParseError& error) {
  return RedisModule_ReplyWithError(ctx, error.text.c_str());
}

int ReplyWrongType(RedisModuleCtx* ctx) {
  return RedisModule_ReplyWithError(ctx, REDISMODULE_ERRORMSG_WRONGTYPE);
}

int ReplyReadOnly(RedisModuleCtx* ctx) {
  return RedisModule_ReplyWithError(
      ctx, "READONLY a replica decides nothing about locks, also a writable one: ask the primary");
}

int ReplyMissingCommand(RedisModuleCtx* ctx, const char* command, const char* missing) {
  const std::string text = std::string("ERR ") + command + " of a plain string needs the command " +
                           missing + ", which this server has disabled";
  return RedisModule_ReplyWithError(ctx, text.c_str());
}

int ReplyInternal(RedisModuleCtx* ctx, const char* command) {
  const std::string text = std::string("ERR ") + command +
                           " is internal: it is accepted from the primary and from the AOF only";
  return RedisModule_ReplyWithError(ctx, text.c_str());
}

int ReplyWaitLimit(RedisModuleCtx* ctx, size_t limit) {
  const std::string text = "WAITLIMIT " + std::to_string(limit) +
                           " clients wait on this server already, which is "
                           "turnstile.max-waiters: try again later";
  return RedisModule_ReplyWithError(ctx, text.c_str());
}

int ReplyUserWaitLimit(RedisModuleCtx* ctx, size_t limit) {
  const std::string text = "WAITLIMIT " + std::to_string(limit) +
                           " clients of this user wait on this server already, which is "
                           "turnstile.max-waiters-per-user: try again later";
  return RedisModule_ReplyWithError(ctx, text.c_str());
}

int ReplyCannotWait(RedisModuleCtx* ctx) {
  return RedisModule_ReplyWithError(
      ctx,
      "ERR this server does not let a connection wait that has subscriptions (RESP3): send "
      "LOCK.ACQUIRE with WAIT over another connection, or without WAIT");
}

int ReplyNoSession(RedisModuleCtx* ctx) {
  return RedisModule_ReplyWithError(
      ctx, "ERR SESSION needs a connection, and inside scripts and functions there is none");
}

int ReplyDeadlock(RedisModuleCtx* ctx, const std::vector<CycleStep>& cycle) {
  const User caller(ctx);
  const auto visible = [&](LockName lock) {
    RedisModuleString* name = RedisModule_CreateString(ctx, lock.key.data(), lock.key.size());
    const bool may = caller.MayLookAt(name);
    RedisModule_FreeString(ctx, name);
    return may;
  };
  return RedisModule_ReplyWithError(ctx, ("DEADLOCK " + DescribeCycle(cycle, visible)).c_str());
}

}  // namespace turnstile
