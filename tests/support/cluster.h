// A cluster of real servers owned by one test.
//
//   Cluster cluster({.primaries = 2});
//   const std::string key = cluster.KeyOn(0);          // a name that node 0 serves
//   MustAcquire(cluster.client(0), key, "alice");
//   SlotMove move(cluster, SlotOf(key), 0, 1);
//   move.Begin();                                      // IMPORTING and MIGRATING
//   move.MoveKeys();                                   // MIGRATE
//   move.End();                                        // now node 1 serves the slot

#ifndef TURNSTILE_TESTS_SUPPORT_CLUSTER_H_
#define TURNSTILE_TESTS_SUPPORT_CLUSTER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "support/client.h"
#include "support/clock.h"
#include "support/eventually.h"
#include "support/reply.h"
#include "support/server.h"

namespace turnstile::testing {

// Clusters are slow to notice changes.
inline constexpr Milliseconds kClusterPatience{30000};

struct ClusterOptions {
  size_t primaries = 3;
  size_t replicas_each = 0;  // replica r of primary p is node primaries * (1 + r) + p
  std::vector<std::string> args = {};
  bool own_clocks = false;  // see clock()
};

class Cluster {
 public:
  // Starts the nodes, assigns each primary an equal share of the slots, and waits until all nodes
  // know each other and every replica is connected.
  explicit Cluster(const ClusterOptions& options = {});

  size_t size() const { return nodes_.size(); }
  Server& server(size_t node) { return *nodes_[node]->server; }
  Client& client(size_t node) { return nodes_[node]->client; }
  ClockShift& clock(size_t node) { return nodes_[node]->clock; }  // only with own_clocks
  const std::string& id(size_t node) const { return nodes_[node]->id; }
  // "127.0.0.1:port"
  std::string AddressOf(size_t node) const;

  // The slot of a key, according to a node.
  int64_t SlotOf(std::string_view key);
  // A key in a slot that the node owned at the beginning; a new one for each call.
  std::string KeyOn(size_t node);

  // Waits until every running node reports a working cluster, and all agree.
  void AwaitOk();
  // Reconnects to a node: after its restart, or if it has closed the connection.
  void Reconnect(size_t node);

 private:
  struct Node {
    explicit Node(const ClusterOptions& options);

    ClockShift clock;
    std::unique_ptr<Server> server;
    Client client;
    std::string id;
  };

  std::vector<std::unique_ptr<Node>> nodes_;
  size_t primaries_;
  int64_t names_ = 0;
};

// Moves a slot step by step, like redis-cli --cluster reshard.
class SlotMove {
 public:
  SlotMove(Cluster& cluster, int64_t slot, size_t from, size_t to)
      : cluster_(cluster), slot_(slot), from_(from), to_(to) {}

  void Begin() const;
  // Moves up to `most` of the remaining keys; returns how many were moved.
  int64_t MoveKeys(int64_t most = 1000) const;
  void End() const;
  // Aborts the move: both nodes consider the slot stable at its source.
  void Abort() const;

  void Whole() const {
    Begin();
    while (MoveKeys() > 0) {
    }
    End();
  }

 private:
  Cluster& cluster_;
  int64_t slot_;
  size_t from_;
  size_t to_;
};

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_SUPPORT_CLUSTER_H_
