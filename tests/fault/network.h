// Hosts of their own, for servers that can be cut off from each other as if a cable was pulled.
//
//   if (const std::string why = Network::WhyNot(); !why.empty()) ...
//   Network network(3);                                    // before any thread is started
//   Server server({.address = network.AddressOf(0),
//                  .network_namespace = network.NamespaceOf(0)});
//   network.Partition({0}, {1, 2, Network::kDriver});      // packets are dropped, both ways
//   network.Heal();
//
// Each host is a network namespace with an address in 10.77.0.0/24, joined by a bridge in one more
// namespace, in which the driver is. Nothing of the machine's own network changes. The namespaces
// have no names: the kernel removes them when this process and its servers are gone, also when they
// were killed.

#ifndef TURNSTILE_TESTS_FAULT_NETWORK_H_
#define TURNSTILE_TESTS_FAULT_NETWORK_H_

#include <string>
#include <vector>

#include "support/eventually.h"

namespace turnstile::fault {

class Network {
 public:
  // The driver among the hosts.
  static constexpr int kDriver = -1;

  // Why there can be no Network here: no root, no `ip` or `nft`, a kernel without what it takes.
  // Empty if there can.
  static std::string WhyNot();

  // Moves the calling thread into the bridge's namespace, and so the threads and processes that it
  // starts from then on; threads that are already there stay outside. There it has a loopback
  // address too. Throws std::runtime_error.
  explicit Network(int hosts);
  ~Network();  // by the same thread, which goes back to where it was
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  int hosts() const { return static_cast<int>(spaces_.size()) - 1; }
  static std::string AddressOf(int host);

  // For ServerOptions::network_namespace. Valid as long as the Network is.
  std::string NamespaceOf(int host) const;

  // Drops the packets between each of the one group and each of the other, also those of
  // connections that are open. Partitions add up.
  void Partition(const std::vector<int>& group, const std::vector<int>& other) const;
  // Only those that `from` sends.
  void PartitionOneWay(const std::vector<int>& from, const std::vector<int>& to) const;
  // From all other hosts and from the driver.
  void Isolate(int host) const;
  // Ends all partitions. Connections go on when TCP sends again.
  void Heal() const;

 private:
  void Build() const;
  void Leave() const;
  int SpaceOf(int host) const;
  // Runs a program in the namespace of a host. What it writes goes to `*output`.
  bool Run(int host, std::vector<std::string> arguments, const std::string& input,
           std::string* output) const;
  void MustRun(int host, const std::vector<std::string>& arguments, const std::string& input) const;

  int original_ = -1;        // the namespace in which the thread was before
  std::vector<int> spaces_;  // descriptors of the hosts' namespaces, and at last the driver's
};

}  // namespace turnstile::fault

#endif  // TURNSTILE_TESTS_FAULT_NETWORK_H_
