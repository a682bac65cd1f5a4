// Failovers that lose writes.
//
//   Pair pair({"--turnstile.token-margin-ms", "2000"});
//   pair.Cut();                     // the replica receives nothing from here on
//   ... pair.primary() grants: all of that will be lost ...
//   pair.Promote();                 // now the replica is pair.primary()
//   pair.Rejoin();                  // and the old primary follows it

#ifndef TURNSTILE_TESTS_SUPPORT_FAILOVER_H_
#define TURNSTILE_TESTS_SUPPORT_FAILOVER_H_

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include "support/client.h"
#include "support/clock.h"
#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/reply.h"
#include "support/server.h"

namespace turnstile::testing {

// Nothing listens on this port: a replica of it receives nothing, and is not promoted either.
inline constexpr int kNowhere = 1;

// A primary and its replica, which swap roles at each failover. Each has its own clock.
class Pair {
 public:
  explicit Pair(const std::vector<std::string>& args = {})
      : nodes_{Node(WithOurs(args)), Node(WithOurs(args))} {
    Rejoin();
  }

  Client& primary() { return nodes_[primary_].client; }
  Client& replica() { return nodes_[1 - primary_].client; }
  const Server& primary_server() const { return nodes_[primary_].server; }
  const Server& replica_server() const { return nodes_[1 - primary_].server; }

  // Sets the primary's clock `ahead` of the true time, and the replica's `skew` ahead of the
  // primary's.
  void SetClocks(std::chrono::microseconds ahead, std::chrono::microseconds skew) {
    Node& primary = nodes_[primary_];
    Node& replica = nodes_[1 - primary_];
    primary.clock.Set(ahead, primary.client);
    replica.clock.Set(ahead + skew, replica.client);
  }

  // Waits until the replica has applied everything the primary has done so far.
  void AwaitReplica() {
    EXPECT_TRUE(primary().Do("INCR", "settled").IsInteger());
    EXPECT_EQ(primary().Do("WAIT", 1, kPatience.count()), Reply::Int(1));
  }

  void Cut() { EXPECT_EQ(replica().Do("REPLICAOF", "127.0.0.1", kNowhere), Reply::Ok()); }

  void Promote() {
    EXPECT_EQ(replica().Do("REPLICAOF", "NO", "ONE"), Reply::Ok());
    primary_ = 1 - primary_;
  }

  // The old primary discards its data and replicates the new one.
  void Rejoin() {
    const int port = primary_server().port();
    EXPECT_EQ(replica().Do("REPLICAOF", "127.0.0.1", port), Reply::Ok());
    EXPECT_TRUE(Eventually(
        [&] { return InfoField(replica(), "replication", "master_link_status") == "up"; },
        Milliseconds{20000}));
  }

 private:
  struct Node {
    explicit Node(std::vector<std::string> args)
        : server({.args = std::move(args), .environment = clock.environment()}) {}

    ClockShift clock;
    Server server;
    Client client = server.Connect();
  };

  // Through files, because a diskless sync completes only with the replica's next acknowledgement,
  // up to a second later. The time-out is for clocks that jump.
  static std::vector<std::string> WithOurs(std::vector<std::string> args) {
    args.insert(args.end(), {"--repl-diskless-sync", "no", "--repl-timeout", "1000000"});
    return args;
  }

  std::array<Node, 2> nodes_;
  size_t primary_ = 0;
};

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_SUPPORT_FAILOVER_H_
