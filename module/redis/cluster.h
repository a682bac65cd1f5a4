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

#ifndef TURNSTILE_REDIS_CLUSTER_H_
#define TURNSTILE_REDIS_CLUSTER_H_

#include <optional>
#include <string>
#include <string_view>

#include "core/cluster.h"
#include "redis/redis_api.h"

namespace turnstile {

// Finds out whether this server is a node of a cluster, and if so, follows its slots.
bool RegisterCluster(RedisModuleCtx* ctx, const Engine& engine);

bool InCluster();

// To be called before a lock is granted to somebody new. If its slot was not known to be ours, the
// token clock gets ahead of what others have issued in it.
void CatchUpWithSlots(RedisModuleCtx* ctx, std::string_view key, FineInstant now);

// When the next look, or the next message to other nodes, is due; kMaxInstant outside clusters. At
// a look the token clock follows the slots, and those who wait for what is gone are told.
Instant NextLookAtCluster();
// Looks if it is due. To be called in every pass of the event loop.
void LookAtCluster(RedisModuleCtx* ctx, FineInstant now);

// Whether a lock that the server is removing, though it is held, goes to another node or has gone
// there already. Where that is not known, as for a MIGRATE in MULTI, it is taken for lost.
bool MovesAway(std::string_view key);

// Whether Valkey is moving slots away in one step. It gives up if meanwhile something is replicated
// that belongs to no slot.
bool ExportsSlots();

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

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_CLUSTER_H_
