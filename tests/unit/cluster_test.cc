// Hash slots, and the map of the cluster as one node sees it.

#include "core/cluster.h"

#include <gtest/gtest.h>

#include <initializer_list>
#include <string_view>
#include <utility>

namespace turnstile {
namespace {

using namespace std::string_view_literals;

using Slots = std::initializer_list<Slot>;

// The expected numbers are those that CLUSTER KEYSLOT returns.
TEST(Slot, SlotOfKeyMatchesServer) {
  const std::pair<std::string_view, Slot> known[] = {
      {"", 0}, {"a", 15495}, {"foo", 12182}, {"123456789", 12739}, {"a\xff\0b"sv, 11489},
  };
  for (const auto& [key, slot] : known) EXPECT_EQ(SlotOf(key), slot) << key;
}

TEST(Slot, HashTagDeterminesSlot) {
  const std::pair<std::string_view, Slot> known[] = {
      {"{a}", 15495},
      {"{user1000}.following", 3443},
      {"foo{}{bar}", 8363},
      {"foo{{bar}}zap", 4015},
      {"foo{bar}{zap}", 5061},
      {"{}x", 10595},
      {"a{b", 13340},
      {"a}b{c}", 7365},
      {"x{", 3596},
  };
  for (const auto& [key, slot] : known) EXPECT_EQ(SlotOf(key), slot) << key;
  EXPECT_EQ(SlotOf("{user1000}.following"), SlotOf("{user1000}.followers"));
  EXPECT_EQ(SlotOf("{user1000}.following"), SlotOf("user1000"));
  EXPECT_EQ(SlotOf("a}b{c}"), SlotOf("c"));
}

constexpr std::string_view kNodes =
    "id1 10.0.0.1:7001@17001,one.example,shard-id=abc myself,master - 0 0 1 connected "
    "0-4 7 [93-<-id2] [3->-id2]\n"
    "id2 10.0.0.2:7002@17002 master - 0 1426238316232 2 connected 5-6 93-100\n"
    "id3 fe80::1:7003@17003,three.example slave,fail? id2 0 1426238316232 3 connected\n"
    "id4 :0@0 master,noaddr - 0 0 0 disconnected 200\n";

TEST(ClusterMap, ClassifiesSlotsAsOursElsewhereArrivingOrUnserved) {
  const ClusterMap map(kNodes);
  for (const Slot slot : Slots{0, 3, 4, 7}) {
    EXPECT_EQ(map.StateOf(slot), SlotState::kOurs) << slot;
  }
  for (const Slot slot : Slots{5, 6, 94, 100, 200}) {
    EXPECT_EQ(map.StateOf(slot), SlotState::kElsewhere) << slot;
  }
  EXPECT_EQ(map.StateOf(93), SlotState::kArriving);
  for (const Slot slot : Slots{8, 92, 101, 16383}) {
    EXPECT_EQ(map.StateOf(slot), SlotState::kUnserved) << slot;
    EXPECT_EQ(map.ServerOf(slot), nullptr);
  }
}

TEST(ClusterMap, ParsesAddressOfSlotServer) {
  const ClusterMap map(kNodes);
  ASSERT_NE(map.ServerOf(0), nullptr);
  EXPECT_EQ(map.ServerOf(0)->ip, "10.0.0.1");
  EXPECT_EQ(map.ServerOf(0)->port, "7001");
  EXPECT_EQ(map.ServerOf(0)->hostname, "one.example");
  ASSERT_NE(map.ServerOf(93), nullptr);
  EXPECT_EQ(map.ServerOf(93)->port, "7002");
  EXPECT_EQ(map.ServerOf(93)->hostname, "");

  const ClusterMap ipv6("x fe80::1:7003@17003,three.example master - 0 0 3 connected 1\n");
  EXPECT_EQ(ipv6.ServerOf(1)->ip, "fe80::1");
  EXPECT_EQ(ipv6.ServerOf(1)->port, "7003");
  EXPECT_EQ(ipv6.StateOf(1), SlotState::kElsewhere);  // no node is marked "myself"
}

TEST(ClusterMap, IgnoresMalformedInput) {
  for (const std::string_view text :
       {""sv, "\n"sv, "garbage"sv, "a b\n"sv, "a b master\n"sv,
        "a b myself - 0 0 0 connected x-y"sv, "a b myself - 0 0 0 connected 16384"sv,
        "a b myself - 0 0 0 connected 0-16384"sv, "a b myself - 0 0 0 connected -1"sv,
        "a b myself - 0 0 0 connected [x-<-y] [ ["sv,
        "a b myself - 0 0 0 connected 99999999999999999999"sv}) {
    const ClusterMap map(text);
    for (const Slot slot : Slots{0, 1, 16383}) {
      EXPECT_EQ(map.StateOf(slot), SlotState::kUnserved) << text;
    }
  }
  EXPECT_EQ(ClusterMap("a b myself,master - 0 0 0 connected 5-3 0-16383").StateOf(16383),
            SlotState::kOurs);
}

}  // namespace
}  // namespace turnstile
