// A primary, two replicas, and three sentinels that watch them and agree on failovers.
//
//   SentinelGroup group;
//   group.Alert();                     // from here on they are quick to find a server dead
//   group.primary().Kill9();
//   Server* next = group.AwaitPromotion();
//   group.Calm();

#ifndef TURNSTILE_TESTS_SUPPORT_SENTINEL_H_
#define TURNSTILE_TESTS_SUPPORT_SENTINEL_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <string>
#include <vector>

#include "support/eventually.h"
#include "support/server.h"

namespace turnstile::testing {

class SentinelGroup {
 public:
  // `args` are options of the servers. Returns when everybody knows everybody.
  explicit SentinelGroup(std::vector<std::string> args = {});

  // As they were at the start.
  Server& primary() { return primary_; }
  std::array<Server, 2>& replicas() { return replicas_; }

  // What a sentinel tells clients: the port of the primary. 0 if it tells none. May be called by
  // several threads; each call asks the next sentinel.
  int PrimaryPort();

  // From here until Calm() a silent server is soon taken for dead. (After more than the second
  // that they let pass before they send a new connection its first PING: with less they take each
  // server that they connect to for dead, until it answers.) At all other times that takes so long
  // that a busy machine does not start a failover that the test did not ask for.
  void Alert() { SetDownAfter(Milliseconds{1500}); }
  void Calm() { SetDownAfter(Milliseconds{60000}); }

  // Waits until a replica has been promoted, and returns it; nullptr if none was in time. Calls
  // Calm().
  Server* AwaitPromotion();

  // Whether all sentinels come to tell clients of this primary, with the failover behind them.
  bool AllAgreeOn(const Server& primary);

 private:
  void SetDownAfter(Milliseconds time);
  ServerOptions ReplicaOptions() const;
  ServerOptions SentinelOptions() const;

  std::vector<std::string> args_;
  Server primary_;
  std::array<Server, 2> replicas_;
  std::array<Server, 3> sentinels_;
  std::atomic<size_t> next_ = 0;
};

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_SUPPORT_SENTINEL_H_
