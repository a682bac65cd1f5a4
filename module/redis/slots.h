// What it means for locks that the server is a node of a cluster.
//
// The server itself checks the slots of every command. But clients that are waiting here were
// accepted before their slot began to move, and no command carries a grant to them. So the module
// itself answers them when their slot is moving (TRYAGAIN), has moved (MOVED), or when the cluster
// is down.
//
// A slot that arrives here brings its locks with their tokens, but no information about the tokens
// of locks that are free: our clock must be advanced beyond whatever the other node has issued. To
// do so it leads the wall clock by the margin. But a node that has itself received slots recently
// also leads by the margin. So whenever slots arrive or leave, nodes send each other the readings
// of their clocks.
//
// Before Valkey 9 no server event reports slot changes. So we check the slot map, while there are
// locks: before granting anything in a slot that was not known to be ours; every second; and when a
// command is seen that may be about to change the slots. Such commands are seen by a command
// filter, which runs before the server has checked who sends them and, from Valkey 8 on, shortly
// before they take effect. So the filter trusts nothing; it only triggers a check. How often we
// check, and how often we send our clock to others, is bounded whatever clients send.

#ifndef TURNSTILE_REDIS_SLOTS_H_
#define TURNSTILE_REDIS_SLOTS_H_

#include <optional>
#include <string>
#include <string_view>

#include "core/cluster.h"
#include "core/token_issuer.h"
#include "redis/server.h"

namespace turnstile {

// A snapshot of the cluster, taken when it is first needed.
class ClusterView {
 public:
  explicit ClusterView(RedisModuleCtx* ctx) : ctx_(ctx) {}

  // Why waiting calls can no longer be granted a lock of this slot here; nothing if they can, or if
  // the server does not report it.
  std::optional<std::string> RefusalFor(Slot slot);
  // Null if the server does not report it.
  const ClusterMap* Map();
  // The number that increases whenever a node takes over slots of another. Requires Map().
  std::optional<uint64_t> epoch() const { return epoch_; }
  // Whether it serves no slots at all. Requires Map().
  bool is_down() const { return down_; }
  // About how long it takes to query the server and to parse its reply.
  Micros cost() const { return cost_; }

 private:
  RedisModuleCtx* ctx_;
  bool looked_ = false;
  bool down_ = false;
  Micros cost_{0};
  std::optional<uint64_t> epoch_;
  std::optional<ClusterMap> map_;
  std::string endpoint_type_;
};

class Slots {
 public:
  explicit Slots(TokenIssuer& tokens) : tokens_(tokens) {}
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;

  void SetInCluster() { in_cluster_ = true; }
  bool in_cluster() const { return in_cluster_; }

  // While no lock needs it, nothing is checked. A slot that left and came back meanwhile cannot be
  // told from one that stayed. But whenever a node takes a slot over, the epoch of the cluster
  // increases, or, if somebody assigns slots by hand, that node sends us its clock: after either of
  // these all slots count as arrived.
  void Sleep();
  void WakeUp();

  // --- For the host. All but the last are called in a cluster only

  // Must be called before a lock is granted to a new holder. If its slot was not known to be ours,
  // the token clock is advanced beyond what other nodes have issued for it.
  void CatchUp(RedisModuleCtx* ctx, Slot slot, FineInstant now);
  // When the next check, or the next message to other nodes, is due; never outside clusters. At a
  // check the token clock is advanced for arrived slots, and waits for lost slots are ended.
  Due NextRefresh() const;
  // Whether other nodes have to hear of a start.
  bool has_news() const { return tokens_.has_unannounced_start(); }
  // Checks if a check is due. Returns whether slots may have been lost since the last check that
  // returned it. Must be called in every pass of the event loop.
  bool Refresh(RedisModuleCtx* ctx, ClusterView& cluster, FineInstant now);
  // Whether a lock that the server is removing while it is held is moving to another node or has
  // already moved there. Where that is not known, as for a MIGRATE in MULTI, the lock counts as
  // lost.
  bool MovesAway(std::string_view key) const;
  // Whether Valkey is moving slots away atomically. It aborts the move if anything is replicated
  // meanwhile that belongs to no slot.
  bool exporting() const { return exports_ > 0; }

  // --- For the callbacks

  // A command is about to be run, refused or queued. Returns whether a check is due soon.
  bool OnCommand(std::string_view name, std::string_view subcommand);
  // Another node reported the reading of its clock.
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

  // The message between nodes: the last token and the wall clock, in decimal digits, separated by a
  // space.
  static constexpr uint8_t kClockMessage = 1;

 private:
  void SlotsMayChange();
  void Update(ClusterView& cluster, FineInstant now);
  void BroadcastClock(RedisModuleCtx* ctx, FineInstant now);
  Due NextCheck() const;
  Due NextBroadcast() const;

  TokenIssuer& tokens_;
  bool in_cluster_ = false;
  int exports_ = 0;  // in progress

  std::optional<Instant> checked_at_;  // time of the last check,
  Micros check_cost_{0};               // and about how long one takes
  bool asleep_ = false;
  bool slept_ = false;                   // since the last check,
  bool heard_clock_ = false;             // and another node sent its clock meanwhile
  std::optional<uint64_t> epoch_;        // of the cluster at the last check
  bool change_suspected_ = true;         // a command that may change the slots was seen since then
  int checks_left_ = 0;                  // how many more checks will follow soon
  std::optional<Instant> broadcast_at_;  // when we last sent our clock to other nodes
  bool slots_may_be_lost_ = true;        // since Refresh last returned it
  bool wants_broadcast_ = false;         // whether there is reason to send it again

  // Whether the last command seen, which may be running, is a MIGRATE.
  bool migrates_ = false;

  // As the last check found them.
  struct {
    SlotSet ours;
    SlotSet leaving;
    SlotSet arriving;
    SlotSet gone;  // were ours while we were a primary, and no longer are
  } known_;
};

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_SLOTS_H_
