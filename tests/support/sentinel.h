// A primary, two replicas, and three sentinels that monitor them and agree on failovers.
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
  // `args` are options of the servers. Returns when all of them know each other.
  explicit SentinelGroup(std::vector<std::string> args = {});

  // The roles at the start.
  Server& primary() { return primary_; }
  std::array<Server, 2>& replicas() { return replicas_; }

  // The port of the primary according to a sentinel; 0 if it reports none. Thread-safe; each call
  // asks the next sentinel.
  int PrimaryPort();

  // From here until Calm() a silent server is soon considered down, but only after more than the
  // second that sentinels wait before they send the first PING on a new connection: with less they
  // would consider each new server down until it answers. At all other times it takes so long that
  // a busy machine does not start an unwanted failover.
  void Alert() { SetDownAfter(Milliseconds{1500}); }
  void Calm() { SetDownAfter(Milliseconds{60000}); }

  // Waits until a replica has been promoted and returns it; nullptr if none was in time. Calls
  // Calm().
  Server* AwaitPromotion();

  // Whether all sentinels eventually report this primary, with the failover completed.
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
