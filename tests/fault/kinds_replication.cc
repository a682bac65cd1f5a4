// Faults of a primary and its replica.

#include <array>
#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "fault/hostile_client.h"
#include "fault/round.h"
#include "support/clock.h"
#include "support/eventually.h"
#include "support/failover.h"
#include "support/lock_test.h"
#include "support/ordeals.h"

namespace turnstile::fault {
namespace {

using testing::Client;
using testing::ClockShift;
using testing::Eventually;
using testing::InfoField;
using testing::Milliseconds;
using testing::Server;
using Args = std::vector<std::string>;
using Marked = Mark::Kind;

constexpr Milliseconds kSynchronised{20000};

// Two servers, of which one follows the other. Each has a clock of its own.
class Couple {
 public:
  Couple(Round& round, const Args& args) : round_(round), nodes_{Node(args), Node(args)} {
    Follow();
  }

  Server& primary() { return nodes_.at(primary_).server; }
  Server& replica() { return nodes_.at(1 - primary_).server; }
  Address address() { return {.port = primary().port()}; }

  // The replica follows the primary, and has what it has.
  void Follow() {
    Client client = replica().Connect();
    client.Do("REPLICAOF", "127.0.0.1", primary().port());
    AwaitLink();
  }

  void AwaitLink() { round_.AwaitFollower(primary(), replica()); }

  void Swap() { primary_ = 1 - primary_; }

  // How far the replica's clock is ahead of the primary's.
  Time skew() const { return nodes_.at(1 - primary_).ahead - nodes_.at(primary_).ahead; }
  // Sets a clock so far ahead of the true one. Returns the step.
  Time SetPrimaryClock(Time ahead) { return nodes_.at(primary_).SetClock(ahead); }
  Time SetReplicaClock(Time ahead) { return nodes_.at(1 - primary_).SetClock(ahead); }

  void CheckCopies() {
    Client of_primary = primary().Connect();
    Client of_replica = replica().Connect();
    round_.CheckCopies(of_primary, of_replica);
  }

 private:
  struct Node {
    explicit Node(const Args& args) : server({.args = args, .environment = clock.environment()}) {}

    Time SetClock(Time to) {
      Client client = server.Connect();
      clock.Set(std::chrono::microseconds(to), client);
      return to - std::exchange(ahead, to);
    }

    ClockShift clock;
    Server server;
    Time ahead = 0;
  };

  Round& round_;
  std::array<Node, 2> nodes_;
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
void FailOverLossy(Round& round, Couple& couple) {
  const Mark lossy = round.Begin(Marked::kLossy, "a failover that loses writes");
  couple.replica().Connect().Do("REPLICAOF", "127.0.0.1", testing::kNowhere);
  round.LetWork(0, 150 * kMillisecond);
  couple.primary().Kill9();
  round.driver().NewLife();
  couple.replica().Connect().Do("REPLICAOF", "NO", "ONE");
  couple.Swap();
  round.End(lossy);
  round.driver().Go(couple.address());
  round.Count("kill -9 of the primary, lossy failover");
  round.CountFailover();
}

// After that: the old primary, which has nothing any more, follows the new one.
void Rejoin(Couple& couple) {
  couple.replica().Restart();
  couple.Follow();
}

// Nothing is lost, and nothing may be.
void FailOverPlanned(Round& round, Couple& couple) {
  if (round.OneIn(2)) {
    round.FailOverTo(couple.primary(), couple.replica());
  } else {
    // As an operator does it by hand.
    Client client = couple.primary().Connect();
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
    round.CountFailover();
  }
  round.driver().NewLife();
  couple.Swap();
  round.driver().Go(couple.address());
}

Args WithGraceOfShortLeases(Args args) {
  args.insert(args.end(), kGraceOfShortLeases.begin(), kGraceOfShortLeases.end());
  return args;
}

void LossyFailover(Round& round) {
  Couple couple(round, WithGraceOfShortLeases(Synchronisation(round)));
  round.Start(ShortLeases(), couple.address());
  while (!round.over()) {
    round.LetWork(20 * kMillisecond, 400 * kMillisecond);
    FailOverLossy(round, couple);
    Rejoin(couple);
  }
  round.Finish();
  couple.CheckCopies();
}

void PlannedFailover(Round& round) {
  Couple couple(round, Synchronisation(round));
  round.Start(ForgetfulSessions(), couple.address());
  while (!round.over()) {
    round.LetWork(20 * kMillisecond, 300 * kMillisecond);
    FailOverPlanned(round, couple);
    couple.AwaitLink();
  }
  round.Finish();
  couple.CheckCopies();
}

// For who holds something, a failover to a server with another clock is a step of the clock. They
// are apart by less than the margin.
void SkewedFailover(Round& round) {
  static constexpr Time kFarthest = kSecond;
  Couple couple(round, WithGraceOfShortLeases(Synchronisation(round)));
  round.Start(ShortLeases(), couple.address());
  const auto any = [&] {
    const Time size = round.OneIn(2) ? kFarthest : kFarthest / 10;
    return round.Between(-size, size);
  };
  while (!round.over()) {
    round.LetWork(20 * kMillisecond, 300 * kMillisecond);
    if (round.OneIn(4)) {
      const Mark step = round.Begin(Marked::kStep, "the wall clock of the primary is moved");
      round.End(step, couple.SetPrimaryClock(any()));
      round.Count("clock of the primary moved");
    }
    couple.SetReplicaClock(any());
    const Time skew = couple.skew();
    const Mark step = round.Begin(Marked::kStep, "a failover to a server with another clock");
    const bool lossy = round.OneIn(2);
    if (lossy) {
      FailOverLossy(round, couple);
    } else {
      FailOverPlanned(round, couple);
    }
    round.End(step, skew);
    round.Count(skew > 0 ? "failover to a clock ahead" : "failover to a clock behind");
    if (lossy) {
      Rejoin(couple);
    } else {
      couple.AwaitLink();
    }
  }
  round.Finish();
  couple.CheckCopies();
}

// Of the locks of a hostile client a replica has thousands too.
void HostileFailover(Round& round) {
  Couple couple(round, WithGraceOfShortLeases(Synchronisation(round)));
  round.Start(ShortLeases(), couple.address());
  HostileClient hostile(couple.primary().port(), round.Below(uint64_t{1} << 32));
  while (!round.over()) {
    round.LetWork(50 * kMillisecond, 500 * kMillisecond);
    const bool lossy = round.OneIn(2);
    if (lossy) {
      FailOverLossy(round, couple);
    } else {
      FailOverPlanned(round, couple);
    }
    // Until then it is still at the old one.
    if (round.OneIn(2)) round.LetWork(0, 50 * kMillisecond);
    hostile.Go(couple.primary().port());
    if (lossy) {
      Rejoin(couple);
    } else {
      couple.AwaitLink();
    }
  }
  for (const auto& [deed, times] : hostile.Finish()) round.Count(deed, times);
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
      {"skewed-failover", "both, between servers whose wall clocks differ by up to 2 s, and step",
       &SkewedFailover},
      {"hostile-failover", "the same with a client that makes the servers work as hard as it may",
       &HostileFailover},
      {"replica", "kill -9 of the replica and of both, every way to synchronise", &KillReplica},
  };
}

}  // namespace turnstile::fault
