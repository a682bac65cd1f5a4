// What being a node of a cluster means for locks.
//
// The server itself checks the slots of every command. But clients that wait here were let in
// before their slot began to move, and a grant to them is carried by no command: they are told by
// us when their slot is on its way (TRYAGAIN), gone (MOVED), or when the cluster is down.
//
// A slot that comes here brings the locks in it with their tokens, but nothing of the tokens of
// locks that are free: our clock has to get ahead of whatever the other node has issued. For that
// it leads the wall clock by the margin. But a node that has got slots a moment ago itself leads by
// the margin: so whenever slots come or go, nodes tell each other where their clocks stand.
//
// Before Valkey 9 no server event tells of slots. So we look at the cluster: before anything is
// granted in a slot that was not known to be ours; every second; and when a command is seen that
// may be about to change the slots. Such commands are seen by a filter, which runs before the
// server has checked who sends them, and, from Valkey 8 on, a moment before they take effect: it
// believes nothing, it only makes us look. How often we look, and how often we tell others where
// our clock stands, is bounded whatever anybody sends.

#ifndef TURNSTILE_REDIS_SLOTS_H_
#define TURNSTILE_REDIS_SLOTS_H_

#include <optional>
#include <string>
#include <string_view>

#include "core/cluster.h"
#include "core/engine.h"
#include "redis/redis_api.h"

namespace turnstile {

// One look at the cluster, taken when something is asked for the first time.
class ClusterView {
 public:
  explicit ClusterView(RedisModuleCtx* ctx) : ctx_(ctx) {}

  // Why nobody who waits here can be granted a lock of this slot any more; nothing if it can, or if
  // the server does not tell.
  std::optional<std::string> WhyLost(Slot slot);
  // Null if the server does not tell.
  const ClusterMap* Map();

 private:
  RedisModuleCtx* ctx_;
  bool looked_ = false;
  bool down_ = false;
  std::optional<ClusterMap> map_;
  std::string endpoint_type_;
};

class Slots {
 public:
  explicit Slots(Engine& engine) : engine_(engine) {}
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;

  void SetInCluster(bool in_cluster) { in_cluster_ = in_cluster; }
  bool in_cluster() const { return in_cluster_; }

  // --- For the host. These, but for the last, are called in a cluster only

  // Before a lock is granted to somebody new. If its slot was not known to be ours, the token clock
  // gets ahead of what others have issued in it.
  void CatchUp(RedisModuleCtx* ctx, Slot slot, FineInstant now);
  // When the next look, or the next message to other nodes, is due; none outside clusters. At a
  // look the token clock follows the slots, and those who wait for what is gone are told.
  std::optional<Instant> NextRefresh() const;
  // Looks if it is due. To be called in every pass of the event loop.
  void Refresh(RedisModuleCtx* ctx, FineInstant now);
  // Whether a lock that the server is removing, though it is held, goes to another node or has gone
  // there already. Where that is not known, as for a MIGRATE in MULTI, it is taken for lost.
  bool MovesAway(std::string_view key) const;
  // Whether Valkey is moving slots away in one step. It gives up if meanwhile something is
  // replicated that belongs to no slot.
  bool exporting() const { return exports_ > 0; }

  // --- For the callbacks

  // A command is about to run, or to be refused, or to be queued.
  void OnCommand(std::string_view name, std::string_view subcommand);
  // Another node told where its clock stands.
  void OnPeerClock(std::string_view message, FineInstant now);
  // Valkey 9's atomic slot migration.
  enum class Migration {
    kExportStarted,
    kExportAborted,
    kExportCompleted,
    kImportCompleted,
    kOther
  };
  void OnMigration(RedisModuleCtx* ctx, Migration moment, FineInstant now);

  // What nodes say to each other: the last token and the wall clock, in decimal digits with a space
  // between.
  static constexpr uint8_t kClockMessage = 1;

 private:
  void SlotsMayChange();
  void Follow(ClusterView& cluster, FineInstant now);
  void BroadcastClock(RedisModuleCtx* ctx, FineInstant now);
  std::optional<Instant> NextLook() const;
  std::optional<Instant> NextBroadcast() const;

  Engine& engine_;
  bool in_cluster_ = false;
  int exports_ = 0;  // that are going on

  std::optional<Instant> looked_at_;     // when we looked at the cluster last,
  Micros look_took_{0};                  // and how long that took
  bool alarmed_ = true;                  // since then a command was seen that may change the slots
  int looks_ahead_ = 0;                  // so many more will follow soon
  std::optional<Instant> broadcast_at_;  // when we told other nodes last where our clock stands
  bool wants_broadcast_ = false;         // and whether there is reason to tell them again

  // Whether the command that was seen last, and may be running, is a MIGRATE.
  bool migrates_ = false;

  // As the last look found them.
  struct {
    SlotSet ours;
    SlotSet leaving;
    SlotSet arriving;
    SlotSet gone;  // they were ours while we were a primary, and are not any more
  } known_;
};

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_SLOTS_H_
