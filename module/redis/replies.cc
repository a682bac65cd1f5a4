#include "redis/replies.h"

#include <variant>

#include "core/deadlock.h"

namespace turnstile {
namespace {

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

// Whom to contact: a connection and its address, as in CLIENT LIST.
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

void ReplyHolder(RedisModuleCtx* ctx, const LockInfo::Holder& holder) {
  RedisModule_ReplyWithMap(ctx, 10 + kConnectionFields);
  OptionalField(ctx, "owner", holder.owner);
  OptionalField(ctx, "token", holder.token);
  OptionalField(ctx, "tag", holder.tag);
  OptionalField(ctx, "lease-left-ms", holder.lease_left);
  OptionalField(ctx, "held-ms", holder.held);
  Field(ctx, "count", holder.count);
  Field(ctx, "weight", holder.weight);
  RedisModule_ReplyWithCString(ctx, "session");
  RedisModule_ReplyWithBool(ctx, holder.session.has_value() ? 1 : 0);
  Field(ctx, "linger-ms", holder.linger.count());
  OptionalField(ctx, "max-hold-left-ms", holder.max_hold_left);
  ConnectionFields(ctx, holder.session);
}

void ReplyWaiter(RedisModuleCtx* ctx, const LockInfo::Waiter& waiter) {
  RedisModule_ReplyWithMap(ctx, 5 + kConnectionFields);
  Field(ctx, "owner", std::string_view(waiter.owner));
  OptionalField(ctx, "tag", waiter.tag);
  Field(ctx, "mode", NameOf(waiter.mode));
  Field(ctx, "waited-ms", waiter.waited.count());
  Field(ctx, "left-ms", waiter.left.count());
  ConnectionFields(ctx, waiter.connection);
}

void ReplySummary(RedisModuleCtx* ctx, const LockSummary& summary) {
  RedisModule_ReplyWithMap(ctx, 11);
  Field(ctx, "key", std::string_view(summary.key));
  Field(ctx, "mode", summary.is_plain ? "plain" : NameOf(summary.mode));
  Field(ctx, "holding", static_cast<long long>(summary.holding));
  OptionalField(ctx, "owner", summary.owner);
  OptionalField(ctx, "tag", summary.tag);
  OptionalField(ctx, "token", summary.token);
  OptionalField(ctx, "held-ms", summary.held);
  OptionalField(ctx, "lease-left-ms", summary.lease_left);
  Field(ctx, "linger-left-ms", summary.linger_left.count());
  Field(ctx, "waiting", static_cast<long long>(summary.waiting));
  Field(ctx, "longest-wait-ms", summary.longest_wait.count());
}

int ReplyText(RedisModuleCtx* ctx, const std::string& text) {
  return RedisModule_ReplyWithError(ctx, text.c_str());
}

// The error for a request that is neither granted nor busy.
const char* TextFor(Outcome outcome) {
  switch (outcome) {
    case Outcome::kOtherMode:
      return "ERR this owner holds the lock in another mode: release it first (only SHARED can be "
             "upgraded to exclusive, and exclusive downgraded to SHARED)";
    case Outcome::kOtherWeight:
      return "ERR this owner holds the lock with another weight: use the same WEIGHT, or release "
             "it first";
    case Outcome::kHoldsSome:
      return "ERR this owner holds some of these locks, but not all: release them first, or "
             "acquire the others separately";
    case Outcome::kHoldsApart:
      return "ERR this owner holds these locks under different tokens: release them first, or "
             "acquire each separately";
    case Outcome::kUpgradesSeveral:
      return "ERR ALSO cannot upgrade shared holds: release them first, or upgrade each separately";
    case Outcome::kFloorTooHigh:
      return "ERR FLOOR is too far ahead: it may be at most the highest of turnstile_last_token "
             "(INFO turnstile), the wall clock plus half of turnstile.token-margin-ms, and the "
             "wall clock at the start of the server plus one and a half of it";
    case Outcome::kCountedOut:
      return "ERR this hold is already counted 4294967295 times, the maximum: release it first";
    default:
      return "ERR no tokens are left below 2^53: this server cannot grant new holds any more";
  }
}

const char* TextFor(WaitEnd end) {
  switch (end) {
    case WaitEnd::kSuperseded:
      return "UNBLOCKED replaced by a newer call of the same owner";
    case WaitEnd::kCancelled:
      return "UNBLOCKED cancelled by a LOCK.RELEASE of the same owner";
    case WaitEnd::kDisconnected:
      return "UNBLOCKED the connection of this call closed";
    case WaitEnd::kDemoted:
      return "UNBLOCKED this server is no longer a primary";
    case WaitEnd::kWrongType:
      break;
  }
  return REDISMODULE_ERRORMSG_WRONGTYPE;
}

// The error of a wait that ended, without the key.
std::string ErrorText(const WaitAnswer& answer) {
  if (const auto* outcome = std::get_if<Outcome>(&answer)) return TextFor(*outcome);
  if (const auto* end = std::get_if<WaitEnd>(&answer)) return TextFor(*end);
  return std::get<std::string>(answer);
}

std::string WaitLimitText(size_t limit, const char* what, const char* setting) {
  return "WAITLIMIT this server allows at most " + std::to_string(limit) + ' ' + what + " (" +
         setting + "): try again later";
}

std::string DeadlockText(const std::vector<ParkResult::Step>& cycle,
                         const std::function<bool(LockName)>& sees) {
  std::vector<CycleStep> steps;
  steps.reserve(cycle.size());
  for (const auto& [name, db, key] : cycle) steps.push_back({name, LockName{db, key}});
  return "DEADLOCK " + DescribeCycle(steps, sees);
}

}  // namespace

std::string TextOf(const Notice& notice) {
  std::string text(notice.to.id);
  const std::string key = ' ' + std::string(notice.key);
  if (const auto* lost = std::get_if<HoldLoss>(&notice.what)) {
    return text + " lost " + std::to_string(lost->token.value) + ' ' + NameOf(lost->how) + key;
  }
  const auto& answer = std::get<WaitAnswer>(notice.what);
  if (const auto* token = std::get_if<Token>(&answer)) {
    return text + " granted " + std::to_string(token->value) + key;
  }
  if (std::holds_alternative<std::monostate>(answer)) return text + " timeout" + key;
  return text + " error " + ErrorText(answer);
}

std::string MovedText(Slot slot, const ClusterNode& node, std::string_view endpoint_type) {
  std::string host = node.ip;
  if (endpoint_type == "hostname") host = node.hostname.empty() ? "?" : node.hostname;
  if (endpoint_type == "unknown-endpoint") host.clear();
  return "MOVED " + std::to_string(slot) + ' ' + host + ':' + node.port;
}

int ReplyAcquired(RedisModuleCtx* ctx, const AcquireResult& result,
                  bool (*sees)(RedisModuleCtx* ctx, LockName lock)) {
  using Kind = AcquireResult::Kind;
  switch (result.kind) {
    case Kind::kGranted:
      return ReplyToken(ctx, result.token);
    case Kind::kBusy:
      return RedisModule_ReplyWithNull(ctx);
    case Kind::kWaits:
      return REDISMODULE_OK;
    case Kind::kQueued:
      return RedisModule_ReplyWithLongLong(ctx, 0);
    case Kind::kRefused:
      return RedisModule_ReplyWithError(ctx, TextFor(result.outcome));
    case Kind::kWrongType:
      return ReplyWrongType(ctx);
    case Kind::kNoSession:
      return RedisModule_ReplyWithError(ctx,
                                        "ERR SESSION requires a connection: it cannot be used in "
                                        "scripts, functions or after THEN");
    case Kind::kNotifyRefused:
      return ReplyText(ctx, result.text);
    case Kind::kWaitLimit:
      return ReplyText(ctx,
                       WaitLimitText(result.limit, "waiting clients", "turnstile.max-waiters"));
    case Kind::kUserWaitLimit:
      return ReplyText(ctx, WaitLimitText(result.limit, "waiting requests of this user",
                                          "turnstile.max-waiters-per-user"));
    case Kind::kQueueLimit:
      return ReplyText(ctx, WaitLimitText(result.limit, "queue entries", "turnstile.max-queued"));
    case Kind::kCannotWait:
      return RedisModule_ReplyWithError(
          ctx,
          "ERR this server cannot block a RESP3 connection that has subscriptions: use another "
          "connection for WAIT, or NOTIFY");
    case Kind::kDeadlock:
      break;
  }
  return ReplyText(ctx, DeadlockText(result.cycle, [&](LockName lock) { return sees(ctx, lock); }));
}

int ReplyCount(RedisModuleCtx* ctx, const CountResult& result, const char* command) {
  switch (result.kind) {
    case CountResult::Kind::kDone:
      return RedisModule_ReplyWithLongLong(ctx, static_cast<long long>(result.count));
    case CountResult::Kind::kWrongType:
      return ReplyWrongType(ctx);
    case CountResult::Kind::kMissingCommand:
      break;
  }
  return ReplyText(ctx, std::string("ERR ") + command + " of a plain string requires the command " +
                            result.missing + ", which this server has disabled");
}

int ReplyWaited(RedisModuleCtx* ctx, const WaitAnswer& answer) {
  if (const auto* token = std::get_if<Token>(&answer)) return ReplyToken(ctx, *token);
  if (std::holds_alternative<std::monostate>(answer)) return RedisModule_ReplyWithNull(ctx);
  return ReplyText(ctx, ErrorText(answer));
}

int ReplyToken(RedisModuleCtx* ctx, std::optional<Token> token) {
  if (!token.has_value()) return RedisModule_ReplyWithNull(ctx);
  return RedisModule_ReplyWithLongLong(ctx, static_cast<long long>(token->value));
}

int ReplyFlag(RedisModuleCtx* ctx, bool flag) {
  return RedisModule_ReplyWithLongLong(ctx, flag ? 1 : 0);
}

int ReplyInfo(RedisModuleCtx* ctx, const std::optional<LockInfo>& info) {
  if (!info.has_value()) return RedisModule_ReplyWithNull(ctx);
  RedisModule_ReplyWithMap(ctx, 7);
  Field(ctx, "mode", info->is_plain ? "plain" : NameOf(info->mode));
  Field(ctx, "holding", static_cast<long long>(info->holding));
  RedisModule_ReplyWithCString(ctx, "holders");
  RedisModule_ReplyWithArray(ctx, static_cast<long>(info->holders.size()));
  for (const LockInfo::Holder& holder : info->holders) ReplyHolder(ctx, holder);
  Field(ctx, "linger-left-ms", info->linger_left.count());
  Field(ctx, "waiting", static_cast<long long>(info->waiting));
  RedisModule_ReplyWithCString(ctx, "waiters");
  RedisModule_ReplyWithArray(ctx, static_cast<long>(info->waiters.size()));
  for (const LockInfo::Waiter& waiter : info->waiters) ReplyWaiter(ctx, waiter);
  Field(ctx, "grace-left-ms", info->grace_left.count());
  return REDISMODULE_OK;
}

int ReplyList(RedisModuleCtx* ctx, std::string_view next_cursor,
              const std::vector<LockSummary>& locks) {
  RedisModule_ReplyWithArray(ctx, 2);
  RedisModule_ReplyWithStringBuffer(ctx, next_cursor.data(), next_cursor.size());
  return ReplyTop(ctx, locks);
}

int ReplyTop(RedisModuleCtx* ctx, const std::vector<LockSummary>& locks) {
  RedisModule_ReplyWithArray(ctx, static_cast<long>(locks.size()));
  for (const LockSummary& summary : locks) ReplySummary(ctx, summary);
  return REDISMODULE_OK;
}

int ReplyHelp(RedisModuleCtx* ctx, const std::vector<std::string>& lines) {
  RedisModule_ReplyWithArray(ctx, static_cast<long>(lines.size()));
  for (const std::string& line : lines) {
    RedisModule_ReplyWithStringBuffer(ctx, line.data(), line.size());
  }
  return REDISMODULE_OK;
}

int ReplyFenced(RedisModuleCtx* ctx, Token asked, std::optional<Token> holds) {
  const std::string text = "FENCED token " + std::to_string(asked.value) +
                           " does not hold the lock" +
                           (holds.has_value() ? ", token " + std::to_string(holds->value) + " does"
                                              : std::string(", no token does"));
  return ReplyText(ctx, text);
}

int ReplyNotPermitted(RedisModuleCtx* ctx, std::string_view command) {
  const std::string text =
      "NOPERM this user has no permissions to run the command after THEN: " + Quoted(command);
  return RedisModule_ReplyWithError(ctx, text.c_str());
}

int ReplyOf(RedisModuleCtx* ctx, RedisModuleCallReply* reply) {
  if (reply == nullptr) {
    return RedisModule_ReplyWithError(ctx,
                                      "ERR the command after THEN cannot be run in this context");
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
      ctx, "READONLY locks are granted by the primary only, even if this replica is writable");
}

int ReplyInternal(RedisModuleCtx* ctx, const char* command) {
  const std::string text = std::string("ERR ") + command +
                           " is internal: it is accepted only from the primary and the AOF";
  return RedisModule_ReplyWithError(ctx, text.c_str());
}

}  // namespace turnstile
