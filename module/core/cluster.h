// Where a key lives in a cluster, and what one node knows about that.
//
// Rejected: asking the server for a key's slot. Redis 7.0 has no call for it but a command, and the
// rule is part of the cluster's specification: it cannot change without breaking every client.

#ifndef TURNSTILE_CORE_CLUSTER_H_
#define TURNSTILE_CORE_CLUSTER_H_

#include <bitset>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace turnstile {

// A hash slot. A key's is the CRC16 (XMODEM) of the key, or of what is between its first '{' and
// the next '}' unless that is nothing, modulo the number of slots.
using Slot = uint16_t;
inline constexpr Slot kSlots = 16384;
Slot SlotOf(std::string_view key);
using SlotSet = std::bitset<kSlots>;

struct ClusterNode {
  std::string ip;
  std::string port;
  std::string hostname;  // empty if none was announced
};

// How this node stands to a slot.
enum class Standing {
  kOurs,       // it serves the slot; keys of it may be on their way to another node
  kArriving,   // another node serves it, and keys of it are on their way here
  kElsewhere,  // another node serves it
  kUnserved,   // nobody does
};

// One look at the cluster.
class ClusterMap {
 public:
  // From the reply of CLUSTER NODES. What is not understood is left out.
  explicit ClusterMap(std::string_view nodes);

  Standing StandingOf(Slot slot) const;
  // The node that serves the slot; null if none does.
  const ClusterNode* ServerOf(Slot slot) const;

  // The slots that this node serves, those of them whose keys are on their way to another node, and
  // those of others whose keys are on their way here.
  const SlotSet& ours() const { return ours_; }
  const SlotSet& leaving() const { return leaving_; }
  const SlotSet& arriving() const { return arriving_; }

 private:
  void AddNode(std::string_view line);
  void AddSlots(std::string_view range, uint16_t node, bool ours);

  std::vector<ClusterNode> nodes_;
  std::vector<uint16_t> served_by_;  // by slot: 1 + the index of the node; 0: nobody
  SlotSet ours_;
  SlotSet leaving_;
  SlotSet arriving_;
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_CLUSTER_H_
