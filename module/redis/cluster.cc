#include "redis/cluster.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "core/fact.h"
#include "core/request.h"
#include "redis/effects.h"
#include "redis/tokens.h"
#include "redis/waiters.h"

namespace turnstile {
namespace {

std::string TextOf(RedisModuleCallReply* reply) {
  size_t size = 0;
  const char* text = reply == nullptr ? nullptr : RedisModule_CallReplyStringPtr(reply, &size);
  return text == nullptr ? std::string() : std::string(text, size);
}

// What CLUSTER … answers; empty if it does not, because it was renamed.
std::string AskCluster(RedisModuleCtx* ctx, const char* subcommand) {
  RedisModuleCallReply* reply = RedisModule_Call(ctx, "CLUSTER", "c", subcommand);
  std::string answer = TextOf(reply);
  if (reply != nullptr) RedisModule_FreeCallReply(reply);
  return answer;
}

// The value of a setting of the server.
std::string Setting(RedisModuleCtx* ctx, const char* name) {
  RedisModuleCallReply* reply = RedisModule_Call(ctx, "CONFIG", "cc", "GET", name);
  if (reply == nullptr) return "";
  std::string value = TextOf(RedisModule_CallReplyArrayElement(reply, 1));
  RedisModule_FreeCallReply(reply);
  return value;
}

bool in_cluster = false;
// A command may have changed the slots since they were looked at: for the clock, for the waiters.
bool clock_may_lag = true;
bool waiters_may_lag = true;
Instant next_look = kMinInstant;
int exports = 0;  // that are going on

// As the last look found them.
struct {
  SlotSet ours;
  SlotSet leaving;
  SlotSet arriving;
} constinit known;

bool ChangesSlots(std::string_view subcommand) {
  return IsKeyword(subcommand, "SETSLOT") || IsKeyword(subcommand, "ADDSLOTS") ||
         IsKeyword(subcommand, "ADDSLOTSRANGE") || IsKeyword(subcommand, "DELSLOTS") ||
         IsKeyword(subcommand, "DELSLOTSRANGE") || IsKeyword(subcommand, "FLUSHSLOTS");
}

void SlotsMayHaveChanged() { clock_may_lag = waiters_may_lag = true; }

// Sees every command before it runs, and before it is known whether it may.
void LookAtCommand(RedisModuleCommandFilterCtx* command) {
  const std::string_view name = ToView(RedisModule_CommandFilterArgGet(command, 0));
  if (IsKeyword(name, "ASKING")) {
    if (known.arriving.any()) Tokens().SlotsCame(WallNow());
  } else if (IsKeyword(name, "CLUSTER") && RedisModule_CommandFilterArgsCount(command) > 1 &&
             ChangesSlots(ToView(RedisModule_CommandFilterArgGet(command, 1)))) {
    SlotsMayHaveChanged();
  }
}

// What nodes say to each other: the highest token in a hold and the wall clock, in decimal digits
// with a space between.
constexpr uint8_t kReadingMessage = 1;

void TellReading(RedisModuleCtx* ctx, FineInstant now) {
  const ClockReading reading = Tokens().clock().Read(now);
  const std::string text =
      std::to_string(reading.held.value) + ' ' + std::to_string(reading.wall.value);
  RedisModule_SendClusterMessage(ctx, /*target=*/nullptr, kReadingMessage, text.data(),
                                 static_cast<uint32_t>(text.size()));
}

void OnReading(RedisModuleCtx* /*ctx*/, const char* /*sender*/, uint8_t /*type*/,
               const unsigned char* payload, uint32_t size) {
  const std::string_view text(reinterpret_cast<const char*>(payload), size);
  const size_t space = std::min(text.find(' '), text.size());
  const auto held = ParseToken(text.substr(0, space));
  const auto wall = ParseToken(text.substr(std::min(space + 1, text.size())));
  const FineInstant now = WallNow();
  // A clock that leads by more is broken, and would break ours.
  if (!wall.has_value() || !MayBeFloor(*wall, now)) return;
  // A node that has granted nothing yet says 0.
  const Token highest = held.value_or(Token{});
  if (MayBeFloor(highest, now)) Tokens().HearFromNode({.held = highest, .wall = *wall}, now);
}

// Valkey 9's atomic slot migration.
constexpr RedisModuleEvent kSlotMigration{.id = 19, .dataver = 1};
constexpr uint64_t kExportStarted = 1;
constexpr uint64_t kExportAborted = 3;
constexpr uint64_t kImportCompleted = 4;
constexpr uint64_t kExportCompleted = 5;

void OnSlotMigration(RedisModuleCtx* ctx, RedisModuleEvent /*event*/, uint64_t moment,
                     void* /*data*/) {
  SlotsMayHaveChanged();
  if (moment == kImportCompleted) Tokens().SlotsCame(WallNow());
  if (moment == kExportStarted) {
    TellReading(ctx, WallNow());
    ++exports;
  } else if (moment == kExportAborted || moment == kExportCompleted) {
    --exports;
  }
}

void FollowSlots(RedisModuleCtx* ctx, ClusterView& cluster, FineInstant now) {
  clock_may_lag = false;
  const ClusterMap* map = cluster.Map();
  if (map == nullptr) return;
  // A slot whose move was given up has been open to clients on the other node too.
  const SlotSet came = (map->ours() & ~known.ours) | (map->arriving() & ~known.arriving) |
                       (map->ours() & known.leaving & ~map->leaving());
  const bool changed = map->ours() != known.ours || map->leaving() != known.leaving ||
                       map->arriving() != known.arriving;
  known = {map->ours(), map->leaving(), map->arriving()};
  if (came.any()) Tokens().SlotsCame(now);
  if (changed && Tokens().issuing()) TellReading(ctx, now);
}

}  // namespace

bool RegisterCluster(RedisModuleCtx* ctx, const Engine& engine) {
  in_cluster = (RedisModule_GetContextFlags(ctx) & REDISMODULE_CTX_FLAGS_CLUSTER) != 0;
  if (!in_cluster) return true;
  RedisModule_RegisterClusterMessageReceiver(ctx, kReadingMessage, OnReading);
  if (MovesSlotsAtomically(engine)) {
    RedisModule_SubscribeToServerEvent(ctx, kSlotMigration, OnSlotMigration);
  }
  return RedisModule_RegisterCommandFilter(ctx, LookAtCommand, REDISMODULE_CMDFILTER_NOSELF) !=
         nullptr;
}

bool InCluster() { return in_cluster; }

void CatchUpWithSlots(RedisModuleCtx* ctx, FineInstant now) {
  if (!in_cluster || !clock_may_lag) return;
  ClusterView cluster(ctx);
  FollowSlots(ctx, cluster, now);
}

Instant NextLookAtCluster() {
  if (!in_cluster) return kMaxInstant;
  return waiters_may_lag ? kMinInstant : next_look;
}

void LookAtCluster(RedisModuleCtx* ctx, FineInstant now) {
  constexpr Millis kLookEvery{1000};
  const Instant moment = ToInstant(now);
  // One that is too far away was set before the wall clock was set back.
  if (!waiters_may_lag && moment < next_look && next_look <= moment + kLookEvery) return;
  waiters_may_lag = false;
  next_look = moment + kLookEvery;
  ClusterView cluster(ctx);
  FollowSlots(ctx, cluster, now);
  TheWaiters().LeaveLostSlots(cluster);
}

bool ExportsSlots() { return exports > 0; }

const ClusterMap* ClusterView::Map() {
  if (!looked_) {
    looked_ = true;
    const std::string nodes = AskCluster(ctx_, "NODES");
    if (!nodes.empty()) map_.emplace(nodes);
    down_ = AskCluster(ctx_, "INFO").find("cluster_state:fail") != std::string::npos;
    endpoint_type_ = Setting(ctx_, "cluster-preferred-endpoint-type");
  }
  return map_.has_value() ? &*map_ : nullptr;
}

std::optional<std::string> ClusterView::WhyLost(Slot slot) {
  const ClusterMap* map = Map();
  if (down_) return kClusterDownText;
  if (map == nullptr) return std::nullopt;
  switch (map->StandingOf(slot)) {
    case Standing::kOurs:
    case Standing::kArriving:
      return std::nullopt;
    case Standing::kUnserved:
      return kSlotUnservedText;
    case Standing::kElsewhere:
      break;
  }
  return MovedText(slot, *map->ServerOf(slot), endpoint_type_);
}

}  // namespace turnstile
