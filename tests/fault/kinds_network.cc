// Servers that are cut off from each other and from their clients.

#include <array>
#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fault/network.h"
#include "fault/round.h"
#include "support/client.h"
#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/ordeals.h"
#include "support/reply.h"

namespace turnstile::fault {
namespace {

using testing::Client;
using testing::Eventually;
using testing::InfoField;
using testing::Milliseconds;
using testing::Reply;
using testing::Server;
using Args = std::vector<std::string>;
using Marked = Mark::Kind;

constexpr Milliseconds kSynchronised{20000};

// A packet that was dropped is sent again after a pause that is twice as long each time, and the
// first packet of a connection after a second: so long after a cut, which is shorter than a second,
// something may still be on its way.
constexpr Time kStillUnderWay = 1250 * kMillisecond;

// A primary and its replica, each on a host of its own, and the clients on a third one.
class DividedPair {
 public:
  explicit DividedPair(Round& round) : round_(round), patient_(round.OneIn(2)) { Follow(); }

  Address address() const { return {Network::AddressOf(primary_), primary().port()}; }

  // The replica hears nothing, or is not heard, or both.
  void CutReplicaOff() {
    const bool strict = round_.OneIn(3);
    if (strict) SetNeededReplicas(1);
    Cut(primary_, replica(), "replica");
    if (strict) {
      CheckNothingIsGranted();
    } else {
      round_.LetWork(20 * kMillisecond, 1500 * kMillisecond);
    }
    network_.Heal();
    if (strict) SetNeededReplicas(0);
    round_.AwaitFollower(primary(), server(replica()));
  }

  // Requests do not arrive, or answers do not, or both. Nothing is lost, but some of it is late.
  void CutClientsOff() {
    Driver& driver = round_.driver();
    const Time begin = Now();
    Cut(Network::kDriver, primary_, "clients");
    round_.LetWork(50 * kMillisecond, 900 * kMillisecond);
    network_.Heal();
    // Some do not wait for what is late.
    if (round_.OneIn(3)) driver.Go(address());
    driver.Note({.begin = begin, .end = Now() + kStillUnderWay, .what = "clients were cut off"});
    round_.LetWork(kStillUnderWay, kStillUnderWay);
  }

  // Nobody hears from the primary, and another is promoted in its place.
  void CutPrimaryOff() {
    Driver& driver = round_.driver();
    const Mark lossy = round_.Begin(Marked::kLossy, "a failover that loses writes");
    if (round_.OneIn(2)) {
      network_.Partition({primary_}, {replica()});
      round_.LetWork(0, 200 * kMillisecond);
    }
    network_.Isolate(primary_);
    round_.LetWork(0, 400 * kMillisecond);
    Client next = server(replica()).Connect();
    round_.Expect(next.Do("REPLICAOF", "NO", "ONE") == Reply::Ok(), "C4",
                  "the replica cannot be promoted");
    round_.End(lossy);
    primary_ = replica();
    driver.NewLife();
    driver.Go(address());
    round_.Expect(driver.AwaitService(kSynchronised), "C4", "nothing is granted after a failover");
    round_.Count("primary cut off, failover");
    round_.CountFailover();
    // By now all clients have hung up on the old one.
    network_.Heal();
    Follow();
  }

  void CheckCopies() {
    Client of_primary = primary().Connect();
    Client of_replica = server(replica()).Connect();
    round_.CheckCopies(of_primary, of_replica);
  }

 private:
  testing::ServerOptions OptionsOf(int host) {
    Args args = kGraceOfShortLeases;
    // In the one case the servers wait until the network is back, in the other they give up before
    // and connect anew.
    args.insert(args.end(), {"--repl-diskless-sync", "no", "--repl-ping-replica-period", "1",
                             "--repl-timeout", patient_ ? "60" : "2"});
    return {.args = std::move(args),
            .address = Network::AddressOf(host),
            .network_namespace = network_.NamespaceOf(host)};
  }

  int replica() const { return 1 - primary_; }
  const Server& server(int host) const { return *servers_.at(static_cast<size_t>(host)); }
  const Server& primary() const { return server(primary_); }

  void Follow() {
    server(replica()).Connect().Do("REPLICAOF", Network::AddressOf(primary_), primary().port());
    round_.AwaitFollower(primary(), server(replica()));
  }

  void Cut(int host, int other, const std::string& whom) {
    switch (round_.Below(3)) {
      case 0:
        network_.PartitionOneWay({host}, {other});
        round_.Count(whom + " cut off, one way");
        break;
      case 1:
        network_.PartitionOneWay({other}, {host});
        round_.Count(whom + " cut off, the other way");
        break;
      default:
        network_.Partition({host}, {other});
        round_.Count(whom + " cut off, both ways");
    }
  }

  void SetNeededReplicas(int count) {
    const Reply set = primary().Connect().Do("CONFIG", "SET", "min-replicas-to-write", count,
                                             "min-replicas-max-lag", 1);
    round_.Expect(set == Reply::Ok(), "C8", "CONFIG SET: " + set.text);
  }

  // A primary that has noticed that its replica is gone grants nothing, neither to who asks nor to
  // who waits.
  void CheckNothingIsGranted() {
    constexpr Milliseconds kNoticed{10000};
    Client client = primary().Connect();
    const bool refuses = Eventually(
        [&] { return client.Do("LOCK.ACQUIRE", "mine", "me", "PX", 1).IsError("NOREPLICAS"); },
        kNoticed);
    if (!round_.Expect(refuses, "C1", "a primary without its replica goes on")) return;
    const std::string before = InfoField(client, "turnstile", "turnstile_acquired");
    round_.LetWork(100 * kMillisecond, 500 * kMillisecond);
    const std::string after = InfoField(client, "turnstile", "turnstile_acquired");
    round_.Expect(before == after, "C1",
                  "a primary without its replica grants to those who wait: " + before +
                      " grants, then " + after);
    round_.Count("grants refused for want of a replica");
  }

  Round& round_;
  const bool patient_;
  const Network network_{2};
  const std::array<std::unique_ptr<Server>, 2> servers_ = {std::make_unique<Server>(OptionsOf(0)),
                                                           std::make_unique<Server>(OptionsOf(1))};
  int primary_ = 0;
};

void Partition(Round& round) {
  DividedPair pair(round);
  Workload workload = ShortLeases();
  workload.direct = false;
  round.Start(workload, pair.address());
  while (!round.over()) {
    round.LetWork(50 * kMillisecond, 400 * kMillisecond);
    switch (round.Below(3)) {
      case 0:
        pair.CutReplicaOff();
        break;
      case 1:
        pair.CutClientsOff();
        break;
      default:
        pair.CutPrimaryOff();
    }
  }
  round.Finish();
  pair.CheckCopies();
}

}  // namespace

std::vector<Kind> NetworkKinds() {
  return {
      {"partition", "hosts that are cut off, both ways or one way: replica, clients, primary",
       &Partition, &Network::WhyNot},
  };
}

}  // namespace turnstile::fault
