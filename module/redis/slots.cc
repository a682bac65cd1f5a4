#include "redis/slots.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "core/fact.h"
#include "core/request.h"
#include "redis/replies.h"

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

bool ChangesSlots(std::string_view subcommand) {
  return IsKeyword(subcommand, "SETSLOT") || IsKeyword(subcommand, "ADDSLOTS") ||
         IsKeyword(subcommand, "ADDSLOTSRANGE") || IsKeyword(subcommand, "DELSLOTS") ||
         IsKeyword(subcommand, "DELSLOTSRANGE") || IsKeyword(subcommand, "FLUSHSLOTS");
}

// From Valkey 8 on such a command takes effect only when replicas have agreed, or two seconds
// later.
constexpr int kLooksAfterAlarm = 50;
constexpr Millis kBetweenThese{50};

// A moment in the future was noted before the wall clock was set back.
bool IsDue(std::optional<Instant> due, std::optional<Instant> last, Instant now) {
  return due.has_value() && (*due <= now || (last.has_value() && *last > now));
}

}  // namespace

void Slots::SlotsMayChange() {
  alarmed_ = true;
  looks_ahead_ = kLooksAfterAlarm;
}

// Every command is seen before it runs, and before it is known whether it may; those of scripts
// too. Commands in MULTI are seen when they are queued, not when EXEC runs them.
void Slots::OnCommand(std::string_view name, std::string_view subcommand) {
  // A MIGRATE that is refused removes nothing, and the next command ends this.
  migrates_ = IsKeyword(name, "MIGRATE");
  if (IsKeyword(name, "CLUSTER") && ChangesSlots(subcommand)) SlotsMayChange();
}

void Slots::BroadcastClock(RedisModuleCtx* ctx, FineInstant now) {
  wants_broadcast_ = false;
  broadcast_at_ = ToInstant(now);
  const ClockReading reading = engine_.tokens().clock().Read(now);
  const std::string text =
      std::to_string(reading.last.value) + ' ' + std::to_string(reading.wall.value);
  RedisModule_SendClusterMessage(ctx, /*target=*/nullptr, kClockMessage, text.data(),
                                 static_cast<uint32_t>(text.size()));
}

void Slots::OnPeerClock(std::string_view message, FineInstant now) {
  const size_t space = std::min(message.find(' '), message.size());
  const auto last = ParseToken(message.substr(0, space));
  const auto wall = ParseToken(message.substr(std::min(space + 1, message.size())));
  if (last.has_value() && wall.has_value()) {
    engine_.tokens().OnPeerClock({.last = *last, .wall = *wall}, now);
  }
}

void Slots::Follow(ClusterView& cluster, FineInstant now) {
  alarmed_ = false;
  looks_ahead_ = std::max(looks_ahead_ - 1, 0);
  looked_at_ = ToInstant(now);
  const ClusterMap* map = cluster.Map();
  if (map == nullptr) return;
  // A slot whose move was given up has been open to clients on the other node too.
  const SlotSet came = (map->ours() & ~known_.ours) | (map->arriving() & ~known_.arriving) |
                       (map->ours() & known_.leaving & ~map->leaving());
  const bool changed = map->ours() != known_.ours || map->leaving() != known_.leaving ||
                       map->arriving() != known_.arriving;
  TokenIssuer& tokens = engine_.tokens();
  const SlotSet gone =
      tokens.issuing() ? (known_.gone | known_.ours) & ~(map->ours() | map->arriving()) : SlotSet();
  known_ = {map->ours(), map->leaving(), map->arriving(), gone};
  if (!tokens.issuing()) return;
  const bool started = tokens.TakeUntoldStart();  // which has set the clock ahead already
  if (came.any() && !started) tokens.SlotsCame(now);
  wants_broadcast_ = wants_broadcast_ || started || changed;
}

void Slots::OnMigration(RedisModuleCtx* ctx, Migration moment, FineInstant now) {
  SlotsMayChange();
  if (moment == Migration::kImportCompleted) engine_.tokens().SlotsCame(now);
  if (moment == Migration::kExportStarted) {
    wants_broadcast_ = true;
    ++exports_;
  } else if (moment == Migration::kExportAborted || moment == Migration::kExportCompleted) {
    --exports_;
  }
  // Now, because the server is about to remove what is in them.
  if (moment == Migration::kExportCompleted) {
    ClusterView cluster(ctx);
    Follow(cluster, now);
  }
}

std::optional<Instant> Slots::NextLook() const {
  constexpr Millis kAtRest{1000};
  constexpr Millis kAlarmed{10};
  if (!looked_at_.has_value()) return kMinInstant;
  // Soon when there is an alarm, but anybody can cause one, and in a large cluster a look takes a
  // millisecond: a tenth of our time is enough, and a hundred looks a second.
  const Millis rest = std::max(std::chrono::ceil<Millis>(look_took_ * 9), kAlarmed);
  if (alarmed_ || engine_.tokens().has_untold_start()) return *looked_at_ + rest;
  return *looked_at_ + (looks_ahead_ > 0 ? kBetweenThese : kAtRest);
}

// The first message after a while goes out at once. Slots that change in quick succession make no
// more of them: what others know of our clock goes on with time.
std::optional<Instant> Slots::NextBroadcast() const {
  constexpr Millis kAtMostEvery{50};
  if (!wants_broadcast_) return std::nullopt;
  return broadcast_at_.has_value() ? *broadcast_at_ + kAtMostEvery : kMinInstant;
}

std::optional<Instant> Slots::NextRefresh() const {
  if (!in_cluster_) return std::nullopt;
  const Instant look = *NextLook();
  return std::min(look, NextBroadcast().value_or(look));
}

void Slots::CatchUp(RedisModuleCtx* ctx, Slot slot, FineInstant now) {
  // One that is about to leave may be all ours again, shortly after an alarm.
  const bool may_be_back = known_.leaving[slot] && looks_ahead_ > 0;
  if (known_.ours[slot] && !may_be_back) return;
  if (!known_.arriving[slot]) {
    ClusterView cluster(ctx);
    Follow(cluster, now);
  }
  // For one that arrives again and again: the other node goes on too.
  if (!known_.ours[slot]) engine_.tokens().SlotsCame(now);
}

void Slots::Refresh(RedisModuleCtx* ctx, FineInstant now) {
  migrates_ = false;
  const Instant moment = ToInstant(now);
  if (IsDue(NextLook(), looked_at_, moment)) {
    ClusterView cluster(ctx);
    Follow(cluster, now);
    look_took_ = std::max(WallNow() - now, Micros{0});
    engine_.EndWaits([&cluster](LockName lock) { return cluster.WhyLost(SlotOf(lock.key)); });
  }
  if (IsDue(NextBroadcast(), broadcast_at_, moment)) BroadcastClock(ctx, now);
}

bool Slots::MovesAway(std::string_view key) const {
  return in_cluster_ && (migrates_ || known_.gone[SlotOf(key)]);
}

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
