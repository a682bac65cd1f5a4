// What being a node of a cluster means for locks.
//
// The server itself checks the slots of every command. But clients that wait here were let in
// before their slot began to move, and a grant to them is carried by no command: they are told by
// us when their slot is on its way (TRYAGAIN), gone (MOVED), or when the cluster is down.
//
// A slot that comes here brings the locks in it with their tokens, but nothing of the tokens of
// locks that are free: our clock has to get ahead of whatever the other node has issued. For that
// it leads the wall clock by the margin. But a node that has got slots a moment ago itself leads by
// the margin: so whenever slots come or go, nodes tell each other how far their clocks are. Before
// Valkey 9 no server event tells of slots that come and go. But none does without a command that
// this node is given, so we look at the names of commands, in clusters only.

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

// Whether Valkey is moving slots away in one step. It gives up if meanwhile something is replicated
// that belongs to no slot.
bool ExportsSlots();

// Whether the other nodes have to be told how far our token clock is, and tells them.
bool OwesReading();
void TellReading(RedisModuleCtx* ctx, FineInstant now);

// One look at the cluster, as this node sees it now.
class ClusterView {
 public:
  explicit ClusterView(RedisModuleCtx* ctx);

  // Why nobody who waits here can be granted a lock of this slot any more; nothing if it can.
  std::optional<std::string> WhyLost(Slot slot) const;

 private:
  bool down_;
  ClusterMap map_;
  std::string endpoint_type_;
};

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_CLUSTER_H_
