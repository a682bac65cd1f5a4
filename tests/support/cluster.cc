#include "support/cluster.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <sstream>
#include <utility>

#include "support/lock_test.h"

namespace turnstile::testing {
namespace {

constexpr int64_t kSlots = 16384;

// A short node time-out, so that a failed node is detected soon, but not so short that a busy
// machine looks like one.
std::vector<std::string> NodeArgs(const std::vector<std::string>& args) {
  std::vector<std::string> all = {
      "--cluster-enabled", "yes", "--cluster-node-timeout", "5000", "--repl-diskless-sync", "yes",
  };
  all.insert(all.end(), args.begin(), args.end());
  return all;
}

bool HasField(Client& client, const std::string& field) {
  return client.Do("CLUSTER", "INFO").text.find(field + "\r\n") != std::string::npos;
}

// For each node its id, its primary if it has one, its epoch, and the slots that it owns.
std::set<std::string> WhoServesWhat(Client& client) {
  std::set<std::string> view;
  std::istringstream lines(client.Do("CLUSTER", "NODES").text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string id;
    std::string skipped;
    std::string primary;
    std::string epoch;
    words >> id >> skipped >> skipped >> primary >> skipped >> skipped >> epoch >> skipped;
    std::string node = std::move(id);
    node.append(" ").append(primary).append(" ").append(epoch);
    for (std::string range; words >> range;) {
      if (!range.starts_with('[')) node += " " + range;
    }
    view.insert(std::move(node));
  }
  return view;
}

}  // namespace

Cluster::Node::Node(const ClusterOptions& options)
    : server(std::make_unique<Server>(ServerOptions{
          .args = NodeArgs(options.args),
          .environment = options.own_clocks ? clock.environment() : std::vector<std::string>{}})),
      client(server->Connect()),
      id(client.Do("CLUSTER", "MYID").text) {}

Cluster::Cluster(const ClusterOptions& options) : primaries_(options.primaries) {
  const size_t nodes = options.primaries * (1 + options.replicas_each);
  for (size_t i = 0; i < nodes; i++) nodes_.push_back(std::make_unique<Node>(options));
  const auto primaries = static_cast<int64_t>(primaries_);
  for (int64_t i = 0; i < primaries; i++) {
    Client& primary = client(static_cast<size_t>(i));
    EXPECT_EQ(primary.Do("CLUSTER", "ADDSLOTSRANGE", i * kSlots / primaries,
                         (i + 1) * kSlots / primaries - 1),
              Reply::Ok());
    EXPECT_EQ(primary.Do("CLUSTER", "SET-CONFIG-EPOCH", i + 1), Reply::Ok());
  }
  for (size_t i = 1; i < nodes; i++) {
    EXPECT_EQ(client(i).Do("CLUSTER", "MEET", "127.0.0.1", server(0).port()), Reply::Ok());
  }
  for (size_t i = 0; i < nodes; i++) {
    EXPECT_TRUE(Eventually(
        [&] { return HasField(client(i), "cluster_known_nodes:" + std::to_string(nodes)); },
        kClusterPatience))
        << client(i).Do("CLUSTER", "NODES");
  }
  for (size_t i = primaries_; i < nodes; i++) {
    // Refused until the replica knows the role of its primary.
    EXPECT_TRUE(Eventually(
        [&] { return client(i).Do("CLUSTER", "REPLICATE", id(i % primaries_)) == Reply::Ok(); },
        kClusterPatience));
    EXPECT_TRUE(Eventually(
        [&] { return InfoField(client(i), "replication", "master_link_status") == "up"; },
        kClusterPatience));
  }
  AwaitOk();
}

std::string Cluster::AddressOf(size_t node) const {
  return "127.0.0.1:" + std::to_string(nodes_[node]->server->port());
}

int64_t Cluster::SlotOf(std::string_view key) {
  return client(0).Do("CLUSTER", "KEYSLOT", key).integer;
}

std::string Cluster::KeyOn(size_t node) {
  const int64_t share = kSlots / static_cast<int64_t>(primaries_);
  for (;;) {
    std::string key = "lock:" + std::to_string(names_++);
    const auto served_by = static_cast<size_t>(SlotOf(key) / share);
    if (std::min(served_by, primaries_ - 1) == node) return key;
  }
}

void Cluster::AwaitOk() {
  EXPECT_TRUE(Eventually(
      [&] {
        std::set<std::set<std::string>> views;
        for (auto& node : nodes_) {
          if (!node->server->running()) continue;
          if (!HasField(node->client, "cluster_state:ok") ||
              !HasField(node->client, "cluster_slots_assigned:16384")) {
            return false;
          }
          views.insert(WhoServesWhat(node->client));
        }
        return views.size() == 1;
      },
      kClusterPatience));
}

void Cluster::Reconnect(size_t node) { nodes_[node]->client = server(node).Connect(); }

void SlotMove::Begin() const {
  EXPECT_EQ(cluster_.client(to_).Do("CLUSTER", "SETSLOT", slot_, "IMPORTING", cluster_.id(from_)),
            Reply::Ok());
  EXPECT_EQ(cluster_.client(from_).Do("CLUSTER", "SETSLOT", slot_, "MIGRATING", cluster_.id(to_)),
            Reply::Ok());
}

int64_t SlotMove::MoveKeys(int64_t most) const {
  Client& client = cluster_.client(from_);
  const std::vector<std::string> keys = client.Do("CLUSTER", "GETKEYSINSLOT", slot_, most).Texts();
  if (keys.empty()) return 0;
  Command migrate = {"MIGRATE", "127.0.0.1", std::to_string(cluster_.server(to_).port()), "", "0",
                     "10000",   "KEYS"};
  migrate.insert(migrate.end(), keys.begin(), keys.end());
  const Reply moved = client.Do(migrate);
  // If the keys are gone by now there is nothing to move.
  EXPECT_TRUE(moved == Reply::Ok() || moved == Reply::Status("NOKEY")) << moved;
  return static_cast<int64_t>(keys.size());
}

void SlotMove::End() const {
  for (const size_t node : {to_, from_}) {
    EXPECT_EQ(cluster_.client(node).Do("CLUSTER", "SETSLOT", slot_, "NODE", cluster_.id(to_)),
              Reply::Ok());
  }
}

void SlotMove::Abort() const {
  for (const size_t node : {to_, from_}) {
    EXPECT_EQ(cluster_.client(node).Do("CLUSTER", "SETSLOT", slot_, "STABLE"), Reply::Ok());
  }
}

}  // namespace turnstile::testing
