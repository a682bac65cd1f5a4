#include "fault/network.h"

#include <gtest/gtest.h>

#include <iostream>
#include <string>
#include <vector>

#include "support/client.h"
#include "support/eventually.h"
#include "support/reply.h"
#include "support/server.h"

namespace turnstile::fault {
namespace {

using testing::Client;
using testing::Eventually;
using testing::Milliseconds;
using testing::Reply;
using testing::Server;
using testing::ServerOptions;

const Reply kPong = Reply::Status("PONG");

ServerOptions On(const Network& network, int host) {
  return {.args = {"--repl-timeout", "1000"},
          .address = Network::AddressOf(host),
          .network_namespace = network.NamespaceOf(host)};
}

// Where there can be no network there are no tests of it.
std::vector<int> HowManyHosts() {
  const std::string why = Network::WhyNot();
  if (why.empty()) return {3};
  std::cerr << "No tests of networks: " << why << "\n";
  return {};
}

class NetworkTest : public ::testing::TestWithParam<int> {
 protected:
  Network network_{GetParam()};
};

GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(NetworkTest);
INSTANTIATE_TEST_SUITE_P(Hosts, NetworkTest, ::testing::ValuesIn(HowManyHosts()));

TEST_P(NetworkTest, TheDriverReachesEachHost) {
  const Server first(On(network_, 0));
  const Server last(On(network_, 2));
  const Server own;  // with the driver
  for (const Server* server : {&first, &last, &own}) {
    Client client = server->Connect();
    EXPECT_TRUE(client.Do("LOCK.ACQUIRE", "job", "alice", "PX", 1000).IsInteger());
  }
  EXPECT_FALSE(Client(first.port()).connected());
}

TEST_P(NetworkTest, APartitionDropsAndHeals) {
  const Server server(On(network_, 0));
  Client client = server.Connect();
  EXPECT_EQ(client.Do("PING"), kPong);
  network_.Partition({0}, {Network::kDriver});
  client.Send("INCR", "count");
  EXPECT_FALSE(client.HasReply(Milliseconds{300}));
  network_.Heal();
  EXPECT_EQ(client.Read(), Reply::Int(1));  // TCP sends it again
}

TEST_P(NetworkTest, HostsLoseEachOtherButNotTheDriver) {
  const Server primary(On(network_, 0));
  const Server replica(On(network_, 1));
  Client to_primary = primary.Connect();
  Client to_replica = replica.Connect();
  EXPECT_EQ(to_replica.Do("REPLICAOF", primary.address(), primary.port()), Reply::Ok());
  const auto replicated = [&](const std::string& value) {
    return Eventually([&] { return to_replica.Do("GET", "key") == Reply::Str(value); });
  };
  EXPECT_EQ(to_primary.Do("SET", "key", "1"), Reply::Ok());
  EXPECT_TRUE(replicated("1"));
  network_.Partition({0, 2}, {1});
  EXPECT_EQ(to_primary.Do("SET", "key", "2"), Reply::Ok());
  EXPECT_EQ(to_primary.Do("WAIT", 1, 200), Reply::Int(0));
  EXPECT_EQ(to_replica.Do("GET", "key"), Reply::Str("1"));
  network_.Heal();
  EXPECT_TRUE(replicated("2"));
}

TEST_P(NetworkTest, OneWay) {
  const Server server(On(network_, 0));
  Client client = server.Connect();
  network_.PartitionOneWay({0}, {Network::kDriver});
  client.Send("INCR", "count");  // arrives, and its reply does not
  EXPECT_FALSE(client.HasReply(Milliseconds{300}));
  network_.PartitionOneWay({Network::kDriver}, {0});
  client.Close();
  network_.Heal();
  EXPECT_EQ(server.Connect().Do("GET", "count"), Reply::Str("1"));
}

TEST_P(NetworkTest, IsolatesOneHost) {
  const Server server(On(network_, 1));
  Client client = server.Connect();
  network_.Isolate(1);
  client.Send("PING");
  EXPECT_FALSE(client.HasReply(Milliseconds{300}));
  network_.Heal();
  EXPECT_EQ(client.Read(), kPong);
}

}  // namespace
}  // namespace turnstile::fault
