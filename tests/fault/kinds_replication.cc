// Faults of a primary and its replica.

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fault/round.h"
#include "support/eventually.h"
#include "support/failover.h"
#include "support/lock_test.h"
#include "support/ordeals.h"

namespace turnstile::fault {
namespace {

using testing::Client;
using testing::Command;
using testing::Eventually;
using testing::InfoField;
using testing::Milliseconds;
using testing::Server;
using Args = std::vector<std::string>;
using Marked = Mark::Kind;

constexpr Milliseconds kSynchronised{20000};

// Two servers, of which one follows the other.
class Couple {
 public:
  Couple(Round& round, const Args& args)
      : round_(round),
        servers_{std::make_unique<Server>(testing::ServerOptions{.args = args}),
                 std::make_unique<Server>(testing::ServerOptions{.args = args})} {
    Follow();
  }

  Server& primary() { return *servers_.at(primary_); }
  Server& replica() { return *servers_.at(1 - primary_); }
  Address address() { return {.port = primary().port()}; }

  // The replica follows the primary, and has what it has.
  void Follow() {
    Client client = replica().Connect();
    client.Do("REPLICAOF", "127.0.0.1", primary().port());
    AwaitLink();
  }

  void AwaitLink() { round_.AwaitFollower(primary(), replica()); }

  void Swap() { primary_ = 1 - primary_; }

  void CheckCopies() {
    Client of_primary = primary().Connect();
    Client of_replica = replica().Connect();
    round_.CheckCopies(of_primary, of_replica);
  }

 private:
  Round& round_;
  std::array<std::unique_ptr<Server>, 2> servers_;
  size_t primary_ = 0;
};

// How a new replica gets its first copy.
Args Synchronisation(Round& round) {
  switch (round.Below(3)) {
    case 0:
      return {"--repl-diskless-sync", "no"};
    case 1:
      return {"--repl-diskless-sync", "yes", "--repl-diskless-load", "swapdb"};
    default:
      return {"--repl-diskless-sync", "yes", "--repl-diskless-load", "disabled"};
  }
}

// The replica hears nothing of the last grants, the primary dies, the replica is promoted.
void LossyFailover(Round& round) {
  Args args = Synchronisation(round);
  args.insert(args.end(), kGraceOfShortLeases.begin(), kGraceOfShortLeases.end());
  Couple couple(round, args);
  Driver& driver = round.Start(ShortLeases(), couple.address());
  while (!round.over()) {
    round.LetWork(20 * kMillisecond, 400 * kMillisecond);
    const Mark lossy = round.Begin(Marked::kLossy, "a failover that loses writes");
    couple.replica().Connect().Do("REPLICAOF", "127.0.0.1", testing::kNowhere);
    round.LetWork(0, 150 * kMillisecond);
    couple.primary().Kill9();
    driver.NewLife();
    couple.replica().Connect().Do("REPLICAOF", "NO", "ONE");
    couple.Swap();
    round.End(lossy);
    driver.Go(couple.address());
    round.Count("kill -9 of the primary, lossy failover");
    round.CountFailover();
    couple.replica().Restart();
    couple.Follow();
  }
  round.Finish();
  couple.CheckCopies();
}

// Nothing is lost, and nothing may be.
void PlannedFailover(Round& round) {
  Couple couple(round, Synchronisation(round));
  Driver& driver = round.Start(ForgetfulSessions(), couple.address());
  while (!round.over()) {
    round.LetWork(20 * kMillisecond, 300 * kMillisecond);
    Client client = couple.primary().Connect();
    const bool by_command = round.OneIn(2);
    if (by_command) {
      client.Do("FAILOVER", "TO", "127.0.0.1", couple.replica().port());
      round.Expect(Eventually(
                       [&] {
                         return InfoField(client, "replication", "master_failover_state") ==
                                    "no-failover" &&
                                InfoField(client, "replication", "role") == "slave";
                       },
                       kSynchronised),
                   "C4", "FAILOVER does not come to its end");
      round.Count("FAILOVER");
    } else {
      // As an operator does it by hand.
      client.Do("CLIENT", "PAUSE", 10000, "WRITE");
      Client next = couple.replica().Connect();
      Eventually(
          [&] {
            return InfoField(client, "replication", "master_repl_offset") ==
                   InfoField(next, "replication", "slave_repl_offset");
          },
          kSynchronised);
      next.Do("REPLICAOF", "NO", "ONE");
      client.Do("REPLICAOF", "127.0.0.1", couple.replica().port());
      client.Do("CLIENT", "UNPAUSE");
      round.Count("REPLICAOF, writes paused");
    }
    round.CountFailover();
    driver.NewLife();
    couple.Swap();
    driver.Go(couple.address());
    couple.AwaitLink();
  }
  round.Finish();
  couple.CheckCopies();
}

// The replica, or both, die and come back.
void KillReplica(Round& round) {
  Args args = Synchronisation(round);
  const Args aof = testing::Aof(round.OneIn(2) ? "yes" : "no");
  args.insert(args.end(), aof.begin(), aof.end());
  Couple couple(round, args);
  Driver& driver = round.Start(ForgetfulSessions(), couple.address());
  while (!round.over()) {
    round.LetWork(10 * kMillisecond, 200 * kMillisecond);
    switch (round.Below(5)) {
      case 0:
        couple.primary().Kill9();
        couple.replica().Kill9();
        couple.primary().Restart();
        couple.replica().Restart();
        driver.NewLife();
        round.Count("kill -9 of both");
        break;
      case 1:
        couple.replica().Pause();
        round.LetWork(10 * kMillisecond, 300 * kMillisecond);
        couple.replica().Continue();
        round.Count("SIGSTOP of the replica");
        break;
      case 2:
        couple.primary().Connect().Do("CLIENT", "KILL", "TYPE", "replica");
        round.Count("replica's connection closed");
        break;
      case 3:
        couple.replica().Connect().Do("DEBUG", "RELOAD");
        round.Count("DEBUG RELOAD of the replica");
        break;
      default:
        couple.replica().Kill9();
        couple.replica().Restart();
        round.Count("kill -9 of the replica");
    }
    couple.Follow();
  }
  round.Finish();
  couple.CheckCopies();
}

}  // namespace

std::vector<Kind> ReplicationKinds() {
  return {
      {"lossy-failover", "kill -9 of a primary whose replica missed the last grants, under a grace",
       &LossyFailover},
      {"planned-failover", "FAILOVER, and REPLICAOF while writes are paused", &PlannedFailover},
      {"replica", "kill -9 of the replica and of both, every way to synchronise", &KillReplica},
  };
}

}  // namespace turnstile::fault
