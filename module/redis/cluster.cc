#include "redis/cluster.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "core/fact.h"
#include "core/request.h"
#include "redis/replies.h"
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
int exports = 0;  // that are going on

Instant looked_at = kMinInstant;     // when we looked at the cluster last,
Micros look_took{0};                 // and how long that took
bool alarmed = true;                 // since then a command was seen that may change the slots
int looks_ahead = 0;                 // so many more will follow soon
Instant broadcast_at = kMinInstant;  // when we told other nodes last where our clock stands
bool wants_broadcast = false;        // and whether there is reason to tell them again

// Whether the command that was seen last, and may be running, is a MIGRATE.
bool migrates = false;

// As the last look found them.
struct {
  SlotSet ours;
  SlotSet leaving;
  SlotSet arriving;
  SlotSet gone;  // they were ours while we were a primary, and are not any more
} constinit known;

bool ChangesSlots(std::string_view subcommand) {
  return IsKeyword(subcommand, "SETSLOT") || IsKeyword(subcommand, "ADDSLOTS") ||
         IsKeyword(subcommand, "ADDSLOTSRANGE") || IsKeyword(subcommand, "DELSLOTS") ||
         IsKeyword(subcommand, "DELSLOTSRANGE") || IsKeyword(subcommand, "FLUSHSLOTS");
}

// From Valkey 8 on such a command takes effect only when replicas have agreed, or two seconds
// later.
constexpr int kLooksAfterAlarm = 50;
constexpr Millis kBetweenThese{50};

void SlotsMayChange() {
  alarmed = true;
  looks_ahead = kLooksAfterAlarm;
}

// Sees every command before it runs, and before it is known whether it may; those of scripts too.
// Commands in MULTI are seen when they are queued, not when EXEC runs them.
void LookAtCommand(RedisModuleCommandFilterCtx* command) {
  const std::string_view name = ToView(RedisModule_CommandFilterArgGet(command, 0));
  // A MIGRATE that is refused removes nothing, and the next command ends this.
  migrates = IsKeyword(name, "MIGRATE");
  if (IsKeyword(name, "CLUSTER") && RedisModule_CommandFilterArgsCount(command) > 1 &&
      ChangesSlots(ToView(RedisModule_CommandFilterArgGet(command, 1)))) {
    SlotsMayChange();
  }
}

// What nodes say to each other: the last token and the wall clock, in decimal digits with a space
// between.
constexpr uint8_t kReadingMessage = 1;

void BroadcastClock(RedisModuleCtx* ctx, FineInstant now) {
  wants_broadcast = false;
  broadcast_at = ToInstant(now);
  const ClockReading reading = Tokens().clock().Read(now);
  const std::string text =
      std::to_string(reading.last.value) + ' ' + std::to_string(reading.wall.value);
  RedisModule_SendClusterMessage(ctx, /*target=*/nullptr, kReadingMessage, text.data(),
                                 static_cast<uint32_t>(text.size()));
}

void OnReading(RedisModuleCtx* /*ctx*/, const char* /*sender*/, uint8_t /*type*/,
               const unsigned char* payload, uint32_t size) {
  const std::string_view text(reinterpret_cast<const char*>(payload), size);
  const size_t space = std::min(text.find(' '), text.size());
  const auto last = ParseToken(text.substr(0, space));
  const auto wall = ParseToken(text.substr(std::min(space + 1, text.size())));
  if (last.has_value() && wall.has_value()) {
    Tokens().OnPeerClock({.last = *last, .wall = *wall}, WallNow());
  }
}

void FollowSlots(ClusterView& cluster, FineInstant now) {
  alarmed = false;
  looks_ahead = std::max(looks_ahead - 1, 0);
  looked_at = ToInstant(now);
  const ClusterMap* map = cluster.Map();
  if (map == nullptr) return;
  // A slot whose move was given up has been open to clients on the other node too.
  const SlotSet came = (map->ours() & ~known.ours) | (map->arriving() & ~known.arriving) |
                       (map->ours() & known.leaving & ~map->leaving());
  const bool changed = map->ours() != known.ours || map->leaving() != known.leaving ||
                       map->arriving() != known.arriving;
  const SlotSet gone =
      Tokens().issuing() ? (known.gone | known.ours) & ~(map->ours() | map->arriving()) : SlotSet();
  known = {map->ours(), map->leaving(), map->arriving(), gone};
  if (!Tokens().issuing()) return;
  const bool started = Tokens().TakeUntoldStart();  // which has set the clock ahead already
  if (came.any() && !started) Tokens().SlotsCame(now);
  wants_broadcast = wants_broadcast || started || changed;
}

// Valkey 9's atomic slot migration.
constexpr RedisModuleEvent kSlotMigration{.id = 19, .dataver = 1};
constexpr uint64_t kExportStarted = 1;
constexpr uint64_t kExportAborted = 3;
constexpr uint64_t kImportCompleted = 4;
constexpr uint64_t kExportCompleted = 5;

void OnSlotMigration(RedisModuleCtx* ctx, RedisModuleEvent /*event*/, uint64_t moment,
                     void* /*data*/) {
  SlotsMayChange();
  if (moment == kImportCompleted) Tokens().SlotsCame(WallNow());
  if (moment == kExportStarted) {
    wants_broadcast = true;
    ++exports;
  } else if (moment == kExportAborted || moment == kExportCompleted) {
    --exports;
  }
  // Now, because the server is about to remove what is in them.
  if (moment == kExportCompleted) {
    ClusterView cluster(ctx);
    FollowSlots(cluster, WallNow());
  }
}

Instant NextLook() {
  constexpr Millis kAtRest{1000};
  constexpr Millis kAlarmed{10};
  if (looked_at == kMinInstant) return kMinInstant;
  // Soon when there is an alarm, but anybody can cause one, and in a large cluster a look takes a
  // millisecond: a tenth of our time is enough, and a hundred looks a second.
  const Millis rest = std::max(std::chrono::ceil<Millis>(look_took * 9), kAlarmed);
  if (alarmed || Tokens().has_untold_start()) return looked_at + rest;
  return looked_at + (looks_ahead > 0 ? kBetweenThese : kAtRest);
}

// The first message after a while goes out at once. Slots that change in quick succession make no
// more of them: what others know of our clock goes on with time.
Instant NextBroadcast() {
  constexpr Millis kAtMostEvery{50};
  if (!wants_broadcast) return kMaxInstant;
  return broadcast_at == kMinInstant ? kMinInstant : broadcast_at + kAtMostEvery;
}

// A moment in the future was noted before the wall clock was set back.
bool IsDue(Instant due, Instant last, Instant now) {
  return due <= now || (last > now && due != kMaxInstant);
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

void CatchUpWithSlots(RedisModuleCtx* ctx, std::string_view key, FineInstant now) {
  if (!in_cluster) return;
  const Slot slot = SlotOf(key);
  // One that is about to leave may be all ours again, shortly after an alarm.
  const bool may_be_back = known.leaving[slot] && looks_ahead > 0;
  if (known.ours[slot] && !may_be_back) return;
  if (!known.arriving[slot]) {
    ClusterView cluster(ctx);
    FollowSlots(cluster, now);
  }
  // For one that arrives again and again: the other node goes on too.
  if (!known.ours[slot]) Tokens().SlotsCame(now);
}

Instant NextLookAtCluster() {
  return in_cluster ? std::min(NextLook(), NextBroadcast()) : kMaxInstant;
}

void LookAtCluster(RedisModuleCtx* ctx, FineInstant now) {
  migrates = false;
  const Instant moment = ToInstant(now);
  if (IsDue(NextLook(), looked_at, moment)) {
    ClusterView cluster(ctx);
    FollowSlots(cluster, now);
    look_took = std::max(WallNow() - now, Micros{0});
    TheWaiters().LeaveLostSlots(cluster);
  }
  if (IsDue(NextBroadcast(), broadcast_at, moment)) BroadcastClock(ctx, now);
}

bool MovesAway(std::string_view key) {
  if (!in_cluster) return false;
  return migrates || known.gone[SlotOf(key)];
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
