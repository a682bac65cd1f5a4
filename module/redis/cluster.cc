#include "redis/cluster.h"

#include <utility>

#include "core/fact.h"
#include "core/request.h"
#include "redis/effects.h"
#include "redis/tokens.h"
#include "redis/waiters.h"

namespace turnstile {
namespace {

bool in_cluster = false;

// What a command answers, if it answers text; or the last element of what it answers.
std::string Ask(RedisModuleCtx* ctx, const char* command, const char* subcommand) {
  RedisModuleCallReply* reply = RedisModule_Call(ctx, command, "c", subcommand);
  if (reply == nullptr) return "";
  std::string answer;
  size_t size = 0;
  if (const char* text = RedisModule_CallReplyStringPtr(reply, &size); text != nullptr) {
    answer.assign(text, size);
  }
  RedisModule_FreeCallReply(reply);
  return answer;
}

// The value of a setting of the server.
std::string Setting(RedisModuleCtx* ctx, const char* name) {
  RedisModuleCallReply* reply = RedisModule_Call(ctx, "CONFIG", "cc", "GET", name);
  if (reply == nullptr) return "";
  std::string value;
  size_t size = 0;
  RedisModuleCallReply* element = RedisModule_CallReplyArrayElement(reply, 1);
  if (element != nullptr) {
    const char* text = RedisModule_CallReplyStringPtr(element, &size);
    if (text != nullptr) value.assign(text, size);
  }
  RedisModule_FreeCallReply(reply);
  return value;
}

// The other nodes have to know how far our clock is.
bool owes_reading = false;

void SlotsCome() {
  Tokens().SlotsMayCome(WallNow(), /*tell=*/true);
  owes_reading = true;
}

enum class SlotChange { kNone, kComes, kLeaves, kOther };

// What a command CLUSTER … is about to do to our slots.
SlotChange ChangeBy(RedisModuleCommandFilterCtx* command) {
  const auto arg = [command](int index) {
    return ToView(RedisModule_CommandFilterArgGet(command, index));
  };
  const int count = RedisModule_CommandFilterArgsCount(command);
  if (count < 2) return SlotChange::kNone;
  if (IsKeyword(arg(1), "ADDSLOTS") || IsKeyword(arg(1), "ADDSLOTSRANGE")) {
    return SlotChange::kComes;
  }
  if (!IsKeyword(arg(1), "SETSLOT") || count < 4) return SlotChange::kNone;
  // A move that is given up gives the slot back: meanwhile the other node may have issued for locks
  // that were free.
  if (IsKeyword(arg(3), "IMPORTING") || IsKeyword(arg(3), "STABLE")) return SlotChange::kComes;
  if (IsKeyword(arg(3), "MIGRATING")) return SlotChange::kLeaves;
  const std::string_view self(RedisModule_GetMyClusterID(), REDISMODULE_NODE_ID_LEN);
  return count == 5 && arg(4) == self ? SlotChange::kComes : SlotChange::kOther;
}

// Sees every command before it runs.
void LookAtCommand(RedisModuleCommandFilterCtx* command) {
  const std::string_view name = ToView(RedisModule_CommandFilterArgGet(command, 0));
  if (IsKeyword(name, "ASKING")) {
    // The next command of that client is let in though its slot is still on its way here.
    Tokens().SlotsMayCome(WallNow(), /*tell=*/false);
  } else if (IsKeyword(name, "CLUSTER")) {
    const SlotChange change = ChangeBy(command);
    if (change == SlotChange::kComes) SlotsCome();
    if (change == SlotChange::kLeaves) owes_reading = true;
    if (change != SlotChange::kNone) TheWaiters().SlotsChanged();
  }
}

// What nodes say to each other.
constexpr uint8_t kReadingMessage = 1;

void OnReading(RedisModuleCtx* /*ctx*/, const char* /*sender*/, uint8_t /*type*/,
               const unsigned char* payload, uint32_t size) {
  const std::string_view text(reinterpret_cast<const char*>(payload), size);
  const auto reading = ParseToken(text);
  const FineInstant now = WallNow();
  if (reading.has_value() && MayBeRestored(*reading, now)) Tokens().HearFromNode(*reading, now);
}

// Valkey 9's atomic slot migration.
constexpr RedisModuleEvent kSlotMigration{.id = 19, .dataver = 1};
constexpr uint64_t kExportStarted = 1;
constexpr uint64_t kExportAborted = 3;
constexpr uint64_t kImportCompleted = 4;
constexpr uint64_t kExportCompleted = 5;

int exports = 0;  // that are going on

void OnSlotMigration(RedisModuleCtx* /*ctx*/, RedisModuleEvent /*event*/, uint64_t moment,
                     void* /*data*/) {
  if (moment == kImportCompleted) SlotsCome();
  if (moment == kExportStarted) {
    owes_reading = true;
    ++exports;
  } else if (moment == kExportAborted || moment == kExportCompleted) {
    --exports;
  }
  TheWaiters().SlotsChanged();
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

bool ExportsSlots() { return exports > 0; }

bool OwesReading() { return owes_reading; }

void TellReading(RedisModuleCtx* ctx, FineInstant now) {
  if (!std::exchange(owes_reading, false)) return;
  const std::string reading = std::to_string(Tokens().clock().Reading(now).value);
  RedisModule_SendClusterMessage(ctx, /*target=*/nullptr, kReadingMessage, reading.data(),
                                 static_cast<uint32_t>(reading.size()));
}

ClusterView::ClusterView(RedisModuleCtx* ctx)
    : down_(Ask(ctx, "CLUSTER", "INFO").find("cluster_state:ok") == std::string::npos),
      map_(Ask(ctx, "CLUSTER", "NODES")),
      endpoint_type_(Setting(ctx, "cluster-preferred-endpoint-type")) {}

std::optional<std::string> ClusterView::WhyLost(Slot slot) const {
  if (down_) return kClusterDownText;
  switch (map_.StandingOf(slot)) {
    case Standing::kOurs:
    case Standing::kArriving:
      return std::nullopt;
    case Standing::kUnserved:
      return kSlotUnservedText;
    case Standing::kElsewhere:
      break;
  }
  return MovedText(slot, *map_.ServerOf(slot), endpoint_type_);
}

}  // namespace turnstile
