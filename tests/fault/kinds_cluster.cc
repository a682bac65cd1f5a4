// Faults of a cluster, and failovers that sentinels decide.

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "fault/round.h"
#include "support/client.h"
#include "support/cluster.h"
#include "support/eventually.h"
#include "support/fleet.h"
#include "support/lock_test.h"
#include "support/ordeals.h"
#include "support/resp3.h"
#include "support/sentinel.h"

namespace turnstile::fault {
namespace {

using testing::Client;
using testing::Cluster;
using testing::Eventually;
using testing::kClusterPatience;
using testing::Milliseconds;
using testing::Reply;
using testing::Server;
using testing::SlotMove;
using Args = std::vector<std::string>;
using Marked = Mark::Kind;

// All locks are in one slot.
constexpr char kPrefix[] = "{t}lock:";

size_t NodeServing(Cluster& cluster) {
  size_t node = 0;
  while (cluster.client(node).Do("LOCK.INFO", kPrefix).IsError("MOVED")) ++node;
  return node;
}

Address AddressOf(const Server& server) { return {.port = server.port()}; }

// --- Slots that move ----------------------------------------------------------------------------

// A slot that wanders from node to node while clients work with the locks in it. Nothing may be
// lost by that.
class WanderingSlot {
 public:
  explicit WanderingSlot(Round& round)
      : round_(round),
        cluster_({.primaries = 2 + round.Below(2)}),
        slot_(cluster_.SlotOf(kPrefix)),
        at_(NodeServing(cluster_)) {}

  Address address() { return AddressOf(cluster_.server(at_)); }

  void Move() {
    const size_t to = AnotherNode();
    const SlotMove move = Begin(to);
    while (move.MoveKeys(Few()) > 0) Work();
    Work();
    End(move, to);
    round_.Count("slot moved");
  }

  // The other node is ready, but nobody has been sent there yet.
  void GiveUpAtOnce() {
    const size_t to = AnotherNode();
    MakeReady(to);
    Work();
    SlotMove(cluster_, slot_, at_, to).Abort();
    round_.Count("move given up before it began");
  }

  // What redis-cli --cluster fix does, and then back.
  void FinishAndMoveBack() {
    const size_t from = at_;
    const size_t to = AnotherNode();
    const SlotMove there = Begin(to);
    MoveSome(there);
    while (there.MoveKeys() > 0) Work();
    End(there, to);
    // A node that gets a slot back before it has heard of the first move takes an epoch that is too
    // low, and the nodes never agree: tests/cluster/slot_agreement.
    AwaitOk();
    const SlotMove back = Begin(from);
    while (back.MoveKeys(Few()) > 0) Work();
    End(back, from);
    round_.Count("move finished in haste, and back");
  }

  // A careful operator gives up: the other node has to rest, and what it has got is back in the
  // same breath in which the slot is settled again.
  void GiveUpAndBringBack() {
    const size_t to = AnotherNode();
    const SlotMove move = Begin(to);
    LetReadingsArrive();
    MoveSome(move);
    Client& other = cluster_.client(to);
    other.Do("CLIENT", "PAUSE", 10000, "WRITE");
    std::string breath =
        testing::EncodeCommand({"CLUSTER", "SETSLOT", std::to_string(slot_), "STABLE"});
    size_t commands = 1;
    for (const std::string& key : KeysOn(to)) {
      other.Do("ASKING");
      const Reply payload = other.Do("DUMP", key);
      if (payload.IsNil()) continue;
      breath += testing::EncodeCommand({"RESTORE", key, "0", payload.text});
      ++commands;
    }
    testing::RawConnection connection = cluster_.server(at_).ConnectRaw();
    round_.driver().NewLife();
    connection.WriteRaw(breath);
    for (; commands > 0; commands--) {
      const Reply reply = connection.ReadReply();
      round_.Expect(reply == Reply::Ok(), "C7", "a key cannot be brought back: " + reply.text);
    }
    // In one breath: for Valkey SETSLOT is a write, which would wait for the end of the pause.
    testing::RawConnection rested = cluster_.server(to).ConnectRaw();
    rested.WriteRaw(
        testing::EncodeCommand({"CLIENT", "UNPAUSE"}) +
        testing::EncodeCommand({"CLUSTER", "SETSLOT", std::to_string(slot_), "STABLE"}));
    for (int replies = 0; replies < 2; replies++) {
      round_.Expect(rested.ReadReply() == Reply::Ok(), "C7", "the move cannot be given up");
    }
    round_.driver().NewLife();
    round_.Count("move given up, keys brought back");
  }

  // A careless one leaves behind what the other node has got. The server cannot help it: locks are
  // lost.
  void GiveUpAndForget() {
    const size_t to = AnotherNode();
    const SlotMove move = Begin(to);
    LetReadingsArrive();
    MoveSome(move);
    const Workload& workload = round_.driver().workload();
    round_.driver().NewLife();
    const Mark forced = round_.Begin(Marked::kForced, "a move given up, keys left behind");
    move.Abort();
    round_.End(forced, workload.longest_lease + workload.longest_linger);
    round_.driver().NewLife();
    round_.Count("move given up, keys left behind");
  }

  void AwaitOk() { cluster_.AwaitOk(); }

 private:
  size_t AnotherNode() {
    return (at_ + 1 + static_cast<size_t>(round_.Below(cluster_.size() - 1))) % cluster_.size();
  }
  int64_t Few() { return round_.Between(1, 12); }
  void Work() { round_.LetWork(0, 25 * kMillisecond); }
  // A node whose slot comes back has to know how far the other one's clock leads, or tokens may
  // fall (docs/guarantees.md). A message on the bus of the cluster may take 50 ms on loopback.
  void LetReadingsArrive() { round_.LetWork(150 * kMillisecond, 200 * kMillisecond); }

  Args KeysOn(size_t node) {
    return cluster_.client(node).Do("CLUSTER", "GETKEYSINSLOT", slot_, 1000).Texts();
  }

  // Keys that were left behind there are of no use any more.
  void MakeReady(size_t to) {
    // Who was sent there by a move before is not late: the node would let it in again.
    round_.driver().AwaitService(kClusterPatience);
    round_.LetWork(10 * kMillisecond, 30 * kMillisecond);
    Client& client = cluster_.client(to);
    client.Do("CLUSTER", "SETSLOT", slot_, "IMPORTING", cluster_.id(at_));
    for (const std::string& key : KeysOn(to)) {
      client.Do("ASKING");
      client.Do("DEL", key);
    }
  }

  SlotMove Begin(size_t to) {
    MakeReady(to);
    const SlotMove move(cluster_, slot_, at_, to);
    round_.driver().NewLife();
    move.Begin();
    Work();
    return move;
  }

  void MoveSome(const SlotMove& move) {
    for (uint64_t times = round_.Below(4); times > 0; times--) {
      move.MoveKeys(Few());
      Work();
    }
  }

  void End(const SlotMove& move, size_t to) {
    move.End();
    at_ = to;
    round_.driver().NewLife();
  }

  Round& round_;
  Cluster cluster_;
  const int64_t slot_;
  size_t at_;
};

void Migrate(Round& round) {
  WanderingSlot slot(round);
  Workload workload;
  workload.prefix = kPrefix;
  workload.sharded = true;
  workload.sessions = false;  // A move ends their binding, and a client that is sent away hangs up.
  round.Start(workload, slot.address());
  while (!round.over()) {
    round.LetWork(0, 100 * kMillisecond);
    switch (round.Below(8)) {
      case 0:
        slot.GiveUpAtOnce();
        break;
      case 1:
        slot.FinishAndMoveBack();
        break;
      case 2:
        slot.GiveUpAndBringBack();
        break;
      case 3:
        slot.GiveUpAndForget();
        break;
      default:
        slot.Move();
    }
    slot.AwaitOk();
  }
  round.Finish();
}

// --- Failovers ----------------------------------------------------------------------------------

// Replicas hear nothing from here on, and cannot come back to hear more. A restart ends that.
void CutReplicasOff(const Server& primary) {
  Client client = primary.Connect();
  client.Do("ACL", "SETUSER", "default", "-psync", "-sync");
  client.Do("CLIENT", "KILL", "TYPE", "replica");
}

void LetReplicasIn(const Server& primary) {
  primary.Connect().Do("ACL", "SETUSER", "default", "+psync", "+sync");
}

// Connections end when a role changes, so each look has one of its own.
bool IsPrimary(const Server& server) {
  Client client = server.Connect();
  return testing::RoleOf(client) == "master";
}

// It dies or stands still, and replicas may not have heard of all that it granted.
bool Strike(Round& round, Server& primary) {
  if (round.OneIn(2)) {
    CutReplicasOff(primary);
    round.LetWork(0, 150 * kMillisecond);
  }
  const bool dies = round.OneIn(2);
  if (dies) {
    primary.Kill9();
  } else {
    primary.Pause();
  }
  round.Count(dies ? "kill -9 of the primary" : "SIGSTOP of the primary");
  return dies;
}

// Clients have hung up on the old primary, and it comes back.
void Revive(Server& old, bool died) {
  if (died) {
    old.Restart();
  } else {
    old.Continue();
    LetReplicasIn(old);
  }
}

// Who was elected when, of the nodes of a cluster.
class Elections {
 public:
  explicit Elections(Round& round) : round_(round) {}

  // A replica of Redis 7.0 that was elected a moment ago counts those votes again: it takes itself
  // for elected in an epoch that is over, and others do not. Votes count for four times the
  // node's time-out.
  void LetVotesExpire(size_t node) {
    const Time left = elected_.at(node) + 4200 * kMillisecond - Now();
    if (left > 0) round_.LetWork(left, left);
  }

  // By that command, or without one by the cluster itself.
  void Promote(size_t node, const Server& next, const std::string& name,
               const testing::Command& command) {
    // A replica gives up after five seconds, for example because it was not voted for in time.
    constexpr Milliseconds kTry{6000};
    bool promoted = false;
    for (int attempt = 0; attempt < 4 && !promoted; attempt++) {
      if (!command.empty()) next.Connect().Do(command);
      promoted = Eventually([&] { return IsPrimary(next); }, kTry);
    }
    elected_.at(node) = Now();
    round_.Expect(promoted, "C4", "no replica was promoted: " + name);
    round_.Count(name);
    round_.CountFailover();
  }

  // For kinds that use this.
  static Args Arguments() {
    Args args = kGraceOfShortLeases;
    args.insert(args.end(), {"--cluster-node-timeout", "1000", "--repl-diskless-sync", "no"});
    return args;
  }

 private:
  Round& round_;
  std::array<Time, 6> elected_{};  // by node
};

class ClusterFailovers {
 public:
  explicit ClusterFailovers(Round& round)
      : round_(round),
        cluster_({.primaries = 3, .replicas_each = 1, .args = Elections::Arguments()}),
        elections_(round) {}

  const Server& primary() { return cluster_.server(primary_); }

  void Planned() {
    elections_.LetVotesExpire(replica_);
    Promote("CLUSTER FAILOVER", {"CLUSTER", "FAILOVER"});
    // Clients are told at once where to go, or find out by themselves.
    if (round_.OneIn(2)) round_.LetWork(0, 300 * kMillisecond);
    Swap();
    AwaitEnd();
  }

  void Lossy() {
    const uint64_t way = round_.Below(3);
    if (way != kTakeover) elections_.LetVotesExpire(replica_);
    const Mark lossy = round_.Begin(Marked::kLossy, "a failover that loses writes");
    const bool died = Strike(round_, cluster_.server(primary_));
    switch (way) {
      case kTakeover:
        Promote("CLUSTER FAILOVER TAKEOVER", {"CLUSTER", "FAILOVER", "TAKEOVER"});
        break;
      case kForce:
        Promote("CLUSTER FAILOVER FORCE", {"CLUSTER", "FAILOVER", "FORCE"});
        break;
      default:
        Promote("failover that the cluster decides", {});
    }
    round_.End(lossy);
    Swap();
    round_.Expect(round_.driver().AwaitService(kClusterPatience), "C4",
                  "nothing is granted after a failover");
    Revive(cluster_.server(replica_), died);
    AwaitEnd();
  }

  void CheckCopies() { round_.CheckCopies(cluster_.client(primary_), cluster_.client(replica_)); }

 private:
  static constexpr uint64_t kTakeover = 0;
  static constexpr uint64_t kForce = 1;

  void Promote(const std::string& name, const testing::Command& command) {
    elections_.Promote(replica_, cluster_.server(replica_), name, command);
  }

  void Swap() {
    std::swap(primary_, replica_);
    round_.driver().NewLife();
    round_.driver().Go(AddressOf(primary()));
  }

  void AwaitEnd() {
    round_.AwaitFollower(primary(), cluster_.server(replica_));
    for (const size_t node : {primary_, replica_}) cluster_.Reconnect(node);
    cluster_.AwaitOk();
  }

  Round& round_;
  Cluster cluster_;
  size_t primary_ = NodeServing(cluster_);
  size_t replica_ = primary_ + 3;
  Elections elections_;
};

void ClusterFailover(Round& round) {
  ClusterFailovers cluster(round);
  Workload workload = ShortLeases();
  workload.prefix = kPrefix;
  workload.sharded = true;
  round.Start(workload, AddressOf(cluster.primary()));
  do {
    round.LetWork(100 * kMillisecond, 600 * kMillisecond);
    if (round.OneIn(3)) {
      cluster.Planned();
    } else {
      cluster.Lossy();
    }
  } while (!round.over());
  round.Finish();
  cluster.CheckCopies();
}

// --- Failovers in the middle of a move ----------------------------------------------------------

// Two shards of a primary and a replica each, between which a slot moves back and forth. In the
// middle of each move one of the two fails over. Older servers do not tell a replica that a slot is
// on its way: its operator does, when it has become the primary.
class MovingShards {
 public:
  explicit MovingShards(Round& round)
      : round_(round),
        cluster_({.primaries = 2, .replicas_each = 1, .args = Elections::Arguments()}),
        slot_(cluster_.SlotOf(kPrefix)),
        elections_(round),
        shards_{Shard{0, 2}, Shard{1, 3}},
        from_(NodeServing(cluster_)) {}

  Address address() { return AddressOf(cluster_.server(source().primary)); }

  void Move() {
    const size_t victim = round_.Below(2) == 0 ? from_ : 1 - from_;
    const bool planned = round_.OneIn(2);
    const bool gives_up = round_.OneIn(3);
    if (planned) elections_.LetVotesExpire(shards_.at(victim).replica);
    LetLeadMelt();
    Begin();
    for (uint64_t times = round_.Below(5); times > 0; times--) MoveSome();
    FailOver(victim, planned);
    if (gives_up && IsLeadSmall()) {
      GiveUp();
    } else {
      Complete();
    }
    round_.Count(victim == from_ ? "failover of the node that a slot leaves"
                                 : "failover of the node that a slot goes to");
    AwaitFollower(victim);
    cluster_.AwaitOk();
  }

  void CheckCopies() {
    for (const Shard& shard : shards_) {
      round_.CheckCopies(cluster_.client(shard.primary), cluster_.client(shard.replica));
    }
  }

 private:
  struct Shard {
    size_t primary;
    size_t replica;
  };

  Shard& source() { return shards_.at(from_); }
  Shard& target() { return shards_.at(1 - from_); }
  SlotMove TheMove() { return {cluster_, slot_, source().primary, target().primary}; }
  void Work() { round_.LetWork(0, 25 * kMillisecond); }
  void MoveSome() {
    TheMove().MoveKeys(round_.Between(1, 12));
    Work();
  }

  // Two nodes issue tokens for the slot, and may not hear of each other's in time: so these may not
  // lead the clock by more than the margin. Each failover adds three seconds to a lead.
  void LetLeadMelt() {
    const Time left = failed_over_ + 3600 * kMillisecond - Now();
    if (left > 0) round_.LetWork(left, left);
  }

  bool IsLeadSmall() {
    return Eventually(
        [&] {
          for (const Shard& shard : shards_) {
            const std::string lead = testing::InfoField(cluster_.client(shard.primary), "turnstile",
                                                        "turnstile_clock_lead_ms");
            if (std::stoll(lead) > kMarginOfShortLeasesMs) return false;
          }
          return true;
        },
        Milliseconds{3000});
  }

  // All that was held when a failover began is over after that.
  Time LongestHold() {
    const Workload& workload = round_.driver().workload();
    return workload.longest_lease + workload.longest_linger + 10 * kMillisecond;
  }

  void SetSlot(const Shard& at, const char* state, const Shard& other) {
    // A node may not have heard yet that the other one is a primary.
    Reply reply;
    Eventually([&] {
      reply = cluster_.client(at.primary)
                  .Do("CLUSTER", "SETSLOT", slot_, state, cluster_.id(other.primary));
      return reply == Reply::Ok();
    });
    round_.Expect(reply == Reply::Ok(), "C8",
                  std::string("CLUSTER SETSLOT ") + state + ": " + reply.ToString());
  }

  void TellOfMove() {
    // A node of Redis 7.0 into which a slot moves believes nobody else about who has the slot.
    SetSlot(target(), "NODE", source());
    SetSlot(target(), "IMPORTING", source());
    SetSlot(source(), "MIGRATING", target());
  }

  void Begin() {
    round_.driver().AwaitService(kClusterPatience);
    round_.LetWork(10 * kMillisecond, 30 * kMillisecond);
    SetSlot(target(), "IMPORTING", source());
    // What a move that was given up has left there is of no use.
    Client& client = cluster_.client(target().primary);
    for (const std::string& key : client.Do("CLUSTER", "GETKEYSINSLOT", slot_, 1000).Texts()) {
      client.Do("ASKING");
      client.Do("DEL", key);
    }
    round_.driver().NewLife();
    SetSlot(source(), "MIGRATING", target());
    Work();
  }

  // Until the new primary knows of the move, holds that are on the other node are unknown to it,
  // but it grants nothing during its grace. After that it may grant what is held over there.
  void FailOver(size_t victim, bool planned) {
    Shard& shard = shards_.at(victim);
    Driver& driver = round_.driver();
    const Mark lossy = round_.Begin(Marked::kLossy, "a failover in the middle of a move");
    Mark late = lossy;
    late.kind = Marked::kForced;
    Mark away = lossy;
    away.kind = Marked::kUnavailable;
    bool died = false;
    if (planned) {
      elections_.Promote(shard.replica, cluster_.server(shard.replica), "CLUSTER FAILOVER",
                         {"CLUSTER", "FAILOVER"});
    } else {
      died = Strike(round_, cluster_.server(shard.primary));
      late.begin = Now();
      elections_.Promote(shard.replica, cluster_.server(shard.replica), "CLUSTER FAILOVER TAKEOVER",
                         {"CLUSTER", "FAILOVER", "TAKEOVER"});
    }
    std::swap(shard.primary, shard.replica);
    failed_over_ = Now();
    cluster_.Reconnect(shard.primary);
    driver.NewLife();
    driver.Go(address());
    TellOfMove();
    driver.NewLife();
    constexpr Time kSafely = 140 * kMillisecond;  // shorter than the grace
    if (victim == from_ && Now() - late.begin > kSafely) round_.End(late, LongestHold());
    round_.End(lossy);
    round_.End(away);
    if (planned) return;
    // What is on both nodes by now is live on one of them only.
    round_.LetWork(LongestHold(), LongestHold());
    Revive(cluster_.server(shard.replica), died);
  }

  void Complete() {
    while (TheMove().MoveKeys(round_.Between(1, 12)) > 0) Work();
    Work();
    TheMove().End();
    from_ = 1 - from_;
    round_.driver().NewLife();
    round_.Count("slot moved");
  }

  // What the other node has got is lost.
  void GiveUp() {
    round_.driver().NewLife();
    const Mark forced = round_.Begin(Marked::kForced, "a move given up, keys left behind");
    TheMove().Abort();
    round_.End(forced, LongestHold());
    round_.driver().NewLife();
    round_.Count("move given up, keys left behind");
  }

  void AwaitFollower(size_t of) {
    const Shard& shard = shards_.at(of);
    round_.AwaitFollower(cluster_.server(shard.primary), cluster_.server(shard.replica));
    for (const size_t node : {shard.primary, shard.replica}) cluster_.Reconnect(node);
  }

  Round& round_;
  Time failed_over_ = Now();  // or started
  Cluster cluster_;
  const int64_t slot_;
  Elections elections_;
  std::array<Shard, 2> shards_;
  size_t from_;  // the shard that has the slot
};

void MoveFailover(Round& round) {
  MovingShards shards(round);
  Workload workload = ShortLeases();
  workload.prefix = kPrefix;
  workload.sharded = true;
  workload.sessions = false;
  round.Start(workload, shards.address());
  do {
    round.LetWork(50 * kMillisecond, 300 * kMillisecond);
    shards.Move();
  } while (!round.over());
  round.Finish();
  shards.CheckCopies();
}

// --- Sentinel -----------------------------------------------------------------------------------

void Sentinel(Round& round) {
  testing::SentinelGroup group(kGraceOfShortLeases);
  auto& [first_replica, second_replica] = group.replicas();
  const std::array<Server*, 3> servers = {&group.primary(), &first_replica, &second_replica};
  Server* primary = servers[0];
  Driver& driver = round.Start(ShortLeases(), AddressOf(*primary));
  do {
    round.LetWork(200 * kMillisecond, 800 * kMillisecond);
    Server* const old = primary;
    const Mark lossy = round.Begin(Marked::kLossy, "a failover that loses writes");
    const bool died = Strike(round, *old);
    group.Alert();
    const bool promoted = Eventually(
        [&] {
          for (Server* server : servers) {
            if (server != old && IsPrimary(*server)) primary = server;
          }
          return primary != old;
        },
        kClusterPatience);
    group.Calm();
    round.End(lossy);
    if (!round.Expect(promoted, "C4", "sentinels promote nobody")) {
      Revive(*old, died);
      break;
    }
    round.Count("failover by sentinels");
    round.CountFailover();
    driver.NewLife();
    driver.Go(AddressOf(*primary));
    round.Expect(group.AllAgreeOn(*primary), "C4", "sentinels do not agree on the new primary");
    round.Expect(driver.AwaitService(kClusterPatience), "C4",
                 "nothing is granted after a failover");
    Revive(*old, died);
    for (Server* server : servers) {
      if (server != primary) round.AwaitFollower(*primary, *server);
    }
  } while (!round.over());
  round.Finish();
  Client client = primary->Connect();
  for (Server* server : servers) {
    if (server == primary) continue;
    Client replica = server->Connect();
    round.CheckCopies(client, replica);
  }
}

}  // namespace

std::vector<Kind> ClusterKinds() {
  return {
      {"migrate", "slots that move under the locks, moves that are given up", &Migrate},
      {"cluster-failover",
       "CLUSTER FAILOVER, FORCE and TAKEOVER, elections, of primaries that died or stand still",
       &ClusterFailover},
      {"move-failover", "failovers, planned and of primaries that died, in the middle of a move",
       &MoveFailover},
      {"sentinel", "primaries that die or stand still, replicas that sentinels promote", &Sentinel},
  };
}

}  // namespace turnstile::fault
