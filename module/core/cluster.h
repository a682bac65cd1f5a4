// The mapping of keys to hash slots, and the slot map of a cluster as one node sees it.
//
// Rejected: asking the server for a key's slot. Redis 7.0 offers no API call for it, only a
// command, and the rule is part of the cluster specification: it cannot change without breaking
// every client.

#ifndef TURNSTILE_CORE_CLUSTER_H_
#define TURNSTILE_CORE_CLUSTER_H_

#include <bitset>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace turnstile {

// A hash slot. The slot of a key is the CRC16 (XMODEM) of the key modulo the number of slots. If
// the key has a non-empty part between its first '{' and the next '}', only that part is hashed.
using Slot = uint16_t;
inline constexpr Slot kSlots = 16384;
Slot SlotOf(std::string_view key);
using SlotSet = std::bitset<kSlots>;

struct ClusterNode {
  std::string ip;
  std::string port;
  std::string hostname;  // empty if none was announced
};

// The state of a slot from the point of view of this node.
enum class SlotState {
  kOurs,       // this node serves it; its keys may be migrating to another node
  kArriving,   // another node serves it, and its keys are migrating here
  kElsewhere,  // another node serves it
  kUnserved,   // no node serves it
};

// A snapshot of the cluster's slot map.
class ClusterMap {
 public:
  // Parses the reply of CLUSTER NODES. Ignores what it does not understand.
  explicit ClusterMap(std::string_view nodes);

  SlotState StateOf(Slot slot) const;
  // The node that serves the slot; null if none does.
  const ClusterNode* ServerOf(Slot slot) const;

  // The slots that this node serves; those of them whose keys are migrating to another node; and
  // the slots of other nodes whose keys are migrating here.
  const SlotSet& ours() const { return ours_; }
  const SlotSet& leaving() const { return leaving_; }
  const SlotSet& arriving() const { return arriving_; }

 private:
  void AddNode(std::string_view line);
  void AddSlots(std::string_view range, uint16_t node, bool ours);

  std::vector<ClusterNode> nodes_;
  std::vector<uint16_t> served_by_;  // by slot: 1 + the index of the node; 0: no node
  SlotSet ours_;
  SlotSet leaving_;
  SlotSet arriving_;
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_CLUSTER_H_
