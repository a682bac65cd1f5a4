#include "redis/slots.h"

#include <algorithm>
#include <charconv>
#include <string_view>
#include <utility>

#include "core/fact.h"
#include "core/request.h"
#include "redis/replies.h"

namespace turnstile {
namespace {

// The reply of CLUSTER …; empty if there is none, because the command was renamed.
std::string AskCluster(RedisModuleCtx* ctx, const char* subcommand) {
  RedisModuleCallReply* reply = RedisModule_Call(ctx, "CLUSTER", "c", subcommand);
  std::string answer = TextOf(reply);
  if (reply != nullptr) RedisModule_FreeCallReply(reply);
  return answer;
}

// The number behind a word of the reply, if there is one.
std::optional<uint64_t> FieldOf(std::string_view info, std::string_view word) {
  const size_t at = info.find(word);
  if (at == std::string_view::npos) return std::nullopt;
  uint64_t value = 0;
  const char* begin = info.data() + at + word.size();
  const auto parsed = std::from_chars(begin, info.data() + info.size(), value);
  return parsed.ec == std::errc() ? std::optional(value) : std::nullopt;
}

bool ChangesSlots(std::string_view subcommand) {
  return IsKeyword(subcommand, "SETSLOT") || IsKeyword(subcommand, "ADDSLOTS") ||
         IsKeyword(subcommand, "ADDSLOTSRANGE") || IsKeyword(subcommand, "DELSLOTS") ||
         IsKeyword(subcommand, "DELSLOTSRANGE") || IsKeyword(subcommand, "FLUSHSLOTS");
}

// From Valkey 8 on such a command takes effect only when replicas have agreed, or two seconds
// later.
constexpr int kChecksAfterChange = 50;
constexpr Millis kBetweenChecks{50};

// A time in the future was recorded before the wall clock was set back.
bool IsDue(const Due& due, std::optional<Instant> last, Instant now) {
  return due.IsDueAt(now) || (!due.is_never() && last.has_value() && *last > now);
}

}  // namespace

void Slots::Sleep() {
  asleep_ = true;
  slept_ = true;
  heard_clock_ = false;
}

void Slots::WakeUp() {
  asleep_ = false;
  change_suspected_ = true;
}

void Slots::SlotsMayChange() {
  change_suspected_ = true;
  checks_left_ = kChecksAfterChange;
}

// Every command is seen before it runs, and before it is known whether it is allowed; commands of
// scripts too. Commands in MULTI are seen when they are queued, not when EXEC runs them.
bool Slots::OnCommand(std::string_view name, std::string_view subcommand) {
  // A MIGRATE that is refused removes nothing, and the next command clears this flag.
  migrates_ = IsKeyword(name, "MIGRATE");
  if (!IsKeyword(name, "CLUSTER") || !ChangesSlots(subcommand)) return false;
  SlotsMayChange();
  return true;
}

void Slots::BroadcastClock(RedisModuleCtx* ctx, FineInstant now) {
  wants_broadcast_ = false;
  broadcast_at_ = ToInstant(now);
  const ClockReading reading = tokens_.clock().Read(now);
  const std::string text =
      std::to_string(reading.last.value) + ' ' + std::to_string(reading.wall.value);
  RedisModule_SendClusterMessage(ctx, /*target=*/nullptr, kClockMessage, text.data(),
                                 static_cast<uint32_t>(text.size()));
}

void Slots::OnPeerClock(std::string_view message, FineInstant now) {
  const size_t space = std::min(message.find(' '), message.size());
  const auto last = ParseToken(message.substr(0, space));
  const auto wall = ParseToken(message.substr(std::min(space + 1, message.size())));
  heard_clock_ = true;
  if (last.has_value() && wall.has_value()) {
    tokens_.OnPeerClock({.last = *last, .wall = *wall}, now);
  }
}

void Slots::Update(ClusterView& cluster, FineInstant now) {
  change_suspected_ = false;
  checks_left_ = std::max(checks_left_ - 1, 0);
  checked_at_ = ToInstant(now);
  const ClusterMap* map = cluster.Map();
  check_cost_ = cluster.cost();
  slots_may_be_lost_ = slots_may_be_lost_ || cluster.is_down();
  if (map == nullptr) return;
  const bool same_epoch = epoch_.has_value() && cluster.epoch() == epoch_;
  epoch_ = cluster.epoch();
  if (std::exchange(slept_, false) && (heard_clock_ || !same_epoch)) known_ = {};
  // A slot whose move was aborted has been open to clients on the other node too.
  const SlotSet came = (map->ours() & ~known_.ours) | (map->arriving() & ~known_.arriving) |
                       (map->ours() & known_.leaving & ~map->leaving());
  const bool changed = map->ours() != known_.ours || map->leaving() != known_.leaving ||
                       map->arriving() != known_.arriving;
  const SlotSet gone = tokens_.issuing()
                           ? (known_.gone | known_.ours) & ~(map->ours() | map->arriving())
                           : SlotSet();
  known_ = {map->ours(), map->leaving(), map->arriving(), gone};
  slots_may_be_lost_ = slots_may_be_lost_ || changed;
  if (!tokens_.issuing()) return;
  const bool started = tokens_.TakeUnannouncedStart();  // this has already set the clock ahead
  if (came.any() && !started) tokens_.OnSlotsArrived(now);
  wants_broadcast_ = wants_broadcast_ || started || changed;
}

void Slots::OnMigration(RedisModuleCtx* ctx, Migration moment, FineInstant now) {
  SlotsMayChange();
  if (moment == Migration::kImportCompleted) tokens_.OnSlotsArrived(now);
  if (moment == Migration::kExportStarted) {
    wants_broadcast_ = true;
    ++exports_;
  } else if (moment == Migration::kExportAborted || moment == Migration::kExportCompleted) {
    exports_ = std::max(exports_ - 1, 0);  // it may have started while nothing was watched
  }
  // Now, because the server is about to remove the keys in these slots.
  if (moment == Migration::kExportCompleted) {
    ClusterView cluster(ctx);
    Update(cluster, now);
  }
}

Due Slots::NextCheck() const {
  constexpr Millis kAtRest{1000};
  constexpr Millis kAlarmed{10};
  if (asleep_) return Due::Never();
  if (!checked_at_.has_value()) return Due::AtOnce();
  // Check soon if a change is suspected. But anybody can cause that, and in a large cluster a check
  // takes a millisecond: a tenth of our time, and a hundred checks a second, are enough.
  const Millis rest = std::max(std::chrono::ceil<Millis>(check_cost_ * 9), kAlarmed);
  if (change_suspected_ || tokens_.has_unannounced_start()) return Due::At(*checked_at_ + rest);
  return Due::At(*checked_at_ + (checks_left_ > 0 ? kBetweenChecks : kAtRest));
}

// The first message after a pause is sent at once. Slots that change in quick succession do not
// cause more messages: what others know about our clock advances with time.
Due Slots::NextBroadcast() const {
  constexpr Millis kMinInterval{50};
  if (!wants_broadcast_) return Due::Never();
  return broadcast_at_.has_value() ? Due::At(*broadcast_at_ + kMinInterval) : Due::AtOnce();
}

Due Slots::NextRefresh() const {
  return in_cluster_ ? Earlier(NextCheck(), NextBroadcast()) : Due::Never();
}

void Slots::CatchUp(RedisModuleCtx* ctx, Slot slot, FineInstant now) {
  // Shortly after a suspected change, a leaving slot may be entirely ours again.
  const bool may_be_back = known_.leaving[slot] && checks_left_ > 0;
  if (known_.ours[slot] && !may_be_back && !slept_) return;
  if (!known_.arriving[slot] || slept_) {
    ClusterView cluster(ctx);
    Update(cluster, now);
  }
  // For a slot that arrives repeatedly: the other node continues to issue too.
  if (!known_.ours[slot]) tokens_.OnSlotsArrived(now);
}

bool Slots::Refresh(RedisModuleCtx* ctx, ClusterView& cluster, FineInstant now) {
  migrates_ = false;
  const Instant moment = ToInstant(now);
  const bool check = IsDue(NextCheck(), checked_at_, moment);
  if (check) Update(cluster, now);
  if (IsDue(NextBroadcast(), broadcast_at_, moment)) BroadcastClock(ctx, now);
  return check && std::exchange(slots_may_be_lost_, false);
}

bool Slots::MovesAway(std::string_view key) const {
  return in_cluster_ && (migrates_ || known_.gone[SlotOf(key)]);
}

const ClusterMap* ClusterView::Map() {
  if (!looked_) {
    looked_ = true;
    constexpr size_t kBytesPerMicro = 50;
    const std::string nodes = AskCluster(ctx_, "NODES");
    cost_ = Micros{static_cast<int64_t>(nodes.size() / kBytesPerMicro)};
    if (!nodes.empty()) map_.emplace(nodes);
    const std::string info = AskCluster(ctx_, "INFO");
    down_ = info.find("cluster_state:fail") != std::string::npos;
    epoch_ = FieldOf(info, "cluster_current_epoch:");
    endpoint_type_ = SettingOf(ctx_, "cluster-preferred-endpoint-type");
  }
  return map_.has_value() ? &*map_ : nullptr;
}

std::optional<std::string> ClusterView::RefusalFor(Slot slot) {
  const ClusterMap* map = Map();
  if (down_) return kClusterDownText;
  if (map == nullptr) return std::nullopt;
  switch (map->StateOf(slot)) {
    case SlotState::kOurs:
    case SlotState::kArriving:
      return std::nullopt;
    case SlotState::kUnserved:
      return kSlotUnservedText;
    case SlotState::kElsewhere:
      break;
  }
  return MovedText(slot, *map->ServerOf(slot), endpoint_type_);
}

}  // namespace turnstile
