// A client with the right to lock that makes a server work as hard as it may: many holders, long
// lines, many lines at once, big names, much that ends at the same moment (tests/abuse measures
// what each costs). It works in a thread of its own, on keys of its own, and gets over every error.

#ifndef TURNSTILE_TESTS_FAULT_HOSTILE_CLIENT_H_
#define TURNSTILE_TESTS_FAULT_HOSTILE_CLIENT_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <string>
#include <thread>

#include "support/client.h"

namespace turnstile::fault {

class HostileClient {
 public:
  HostileClient(int port, uint64_t seed);
  ~HostileClient();
  HostileClient(const HostileClient&) = delete;
  HostileClient& operator=(const HostileClient&) = delete;

  // From its next deed on it works there.
  void Go(int port) { port_ = port; }

  // Ends it. Returns what it did, and how often.
  std::map<std::string, uint64_t> Finish();

 private:
  using Make = std::function<testing::Command(int number)>;

  void Work();
  void DoSomething();
  void ManyHolders();
  void LongLine();
  void ManyLines();
  void BigNames();
  void TimeOutsTogether();
  void LeasesTogether();
  void BlockedConnections();
  void Lists();

  uint64_t Below(uint64_t end) { return random_() % end; }
  int Between(int least, int most) {
    return least + static_cast<int>(Below(static_cast<uint64_t>(most - least + 1)));
  }
  // In one go.
  void Send(int times, const Make& make);

  std::mt19937_64 random_;
  std::atomic<int> port_;
  std::atomic<bool> stopping_ = false;
  std::optional<testing::Client> client_;
  std::map<std::string, uint64_t> deeds_;
  std::thread thread_;
};

}  // namespace turnstile::fault

#endif  // TURNSTILE_TESTS_FAULT_HOSTILE_CLIENT_H_
