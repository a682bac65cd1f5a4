#include "support/sentinel.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

#include "support/client.h"
#include "support/fleet.h"
#include "support/ordeals.h"
#include "support/reply.h"

namespace turnstile::testing {
namespace {

constexpr const char* kName = "turnstile";

// A failover needs an election, which may fail and be repeated.
constexpr Milliseconds kFailover{30000};

Reply StateOf(const Server& sentinel) { return sentinel.Connect().Do("SENTINEL", "MASTER", kName); }

}  // namespace

SentinelGroup::SentinelGroup(std::vector<std::string> args)
    : args_(std::move(args)),
      primary_({.args = args_}),
      replicas_{Server(ReplicaOptions()), Server(ReplicaOptions())},
      sentinels_{Server(SentinelOptions()), Server(SentinelOptions()), Server(SentinelOptions())} {
  for (const Server& replica : replicas_) {
    Client client = replica.Connect();
    AwaitSync(client);
  }
  for (const Server& sentinel : sentinels_) {
    // They exchange information and check more often than the usual 2 and 10 s, and do not suspend
    // themselves for half a minute (TILT) when the machine is so busy that a timer is late.
    EXPECT_EQ(sentinel.Connect().Do("SENTINEL", "DEBUG", "publish-period", 200, "info-period", 200,
                                    "tilt-trigger", 60000),
              Reply::Ok());
  }
  for (const Server& sentinel : sentinels_) {
    EXPECT_TRUE(Eventually(
        [&] {
          const Reply state = StateOf(sentinel);
          return state.Field("num-slaves").text == "2" &&
                 state.Field("num-other-sentinels").text == "2" &&
                 state.Field("flags").text == "master";
        },
        kFailover))
        << StateOf(sentinel);
  }
}

ServerOptions SentinelGroup::ReplicaOptions() const {
  std::vector<std::string> args = args_;
  args.insert(args.end(), {"--replicaof", "127.0.0.1", std::to_string(primary_.port())});
  return {.args = std::move(args)};
}

ServerOptions SentinelGroup::SentinelOptions() const {
  const std::string name = kName;
  return {.config = "sentinel monitor " + name + " 127.0.0.1 " + std::to_string(primary_.port()) +
                    " 2\nsentinel down-after-milliseconds " + name +
                    " 60000\nsentinel failover-timeout " + name +
                    " 3000\nsentinel parallel-syncs " + name + " 2\n",
          .sentinel = true};
}

int SentinelGroup::PrimaryPort() {
  Client sentinel = sentinels_.at(next_++ % sentinels_.size()).Connect();
  const Reply address = sentinel.Do("SENTINEL", "GET-MASTER-ADDR-BY-NAME", kName);
  return address.elements.size() == 2 ? std::stoi(address.elements[1].text) : 0;
}

void SentinelGroup::SetDownAfter(Milliseconds time) {
  for (const Server& sentinel : sentinels_) {
    EXPECT_EQ(
        sentinel.Connect().Do("SENTINEL", "SET", kName, "down-after-milliseconds", time.count()),
        Reply::Ok());
  }
}

Server* SentinelGroup::AwaitPromotion() {
  Server* promoted = nullptr;
  EXPECT_TRUE(Eventually(
      [&] {
        // Sentinels close the connections of a server whose role they change, so each poll needs a
        // new one.
        for (Server& replica : replicas_) {
          Client client = replica.Connect();
          if (RoleOf(client) == "master") promoted = &replica;
        }
        return promoted != nullptr;
      },
      kFailover));
  Calm();
  return promoted;
}

bool SentinelGroup::AllAgreeOn(const Server& primary) {
  return std::all_of(sentinels_.begin(), sentinels_.end(), [&](const Server& sentinel) {
    return Eventually(
        [&] {
          const Reply state = StateOf(sentinel);
          return state.Field("port").text == std::to_string(primary.port()) &&
                 state.Field("flags").text == "master";
        },
        kFailover);
  });
}

}  // namespace turnstile::testing
