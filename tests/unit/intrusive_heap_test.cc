// The heap that queues and time-outs are kept in.

#include "core/intrusive_heap.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <deque>
#include <random>
#include <set>
#include <vector>

namespace turnstile {
namespace {

struct Element {
  int value = 0;
  uint32_t at = 0;
};
struct Before {
  bool operator()(const Element& a, const Element& b) const { return a.value < b.value; }
};
using Heap = IntrusiveHeap<Element, &Element::at, Before>;

TEST(IntrusiveHeap, StartsEmpty) {
  const Heap heap;
  EXPECT_TRUE(heap.empty());
  EXPECT_EQ(heap.first(), nullptr);
  EXPECT_TRUE(heap.IsConsistent());
}

// Every order of adding seven elements, and every single one removed.
TEST(IntrusiveHeap, FindsFirstWhateverTheOrder) {
  std::vector<int> values = {1, 2, 3, 4, 5, 6, 7};
  do {
    for (size_t removed = 0; removed < values.size(); ++removed) {
      Heap heap;
      std::deque<Element> elements;
      for (const int value : values) {
        heap.Add(elements.emplace_back(Element{value}));
        ASSERT_TRUE(heap.IsConsistent());
      }
      ASSERT_EQ(heap.first()->value, 1);
      heap.Remove(elements[removed]);
      ASSERT_TRUE(heap.IsConsistent());
      ASSERT_EQ(heap.size(), 6U);
      ASSERT_EQ(heap.first()->value, values[removed] == 1 ? 2 : 1);
    }
  } while (std::next_permutation(values.begin(), values.end()) && !testing::Test::HasFailure());
}

TEST(IntrusiveHeap, MatchesSortedSetInRandomWalk) {
  std::mt19937 random(11);
  for (const size_t most : {size_t{3}, size_t{20}, size_t{300}}) {
    Heap heap;
    std::deque<Element> all;
    for (size_t i = 0; i < most; ++i) all.push_back({static_cast<int>(random())});
    std::set<int> expected;
    const auto is_in = [&](const Element& element) { return expected.contains(element.value); };
    for (int step = 0; step < 20'000; ++step) {
      Element& element = all[random() % most];
      // It grows and shrinks by turns.
      const bool grows = step / 2'000 % 2 == 0 ? random() % 4 > 0 : random() % 4 == 0;
      if (!is_in(element) && grows) {
        element.value = static_cast<int>(random());
        if (!expected.insert(element.value).second) continue;
        heap.Add(element);
      } else if (is_in(element) && !grows) {
        expected.erase(element.value);
        heap.Remove(element);
      }
      ASSERT_EQ(heap.size(), expected.size());
      ASSERT_EQ(heap.first() == nullptr ? 0 : heap.first()->value,
                expected.empty() ? 0 : *expected.begin());
      if (step % 50 == 0) {
        ASSERT_TRUE(heap.IsConsistent());
      }
    }
    // Sorted, if the first is taken each time.
    while (!heap.empty()) {
      ASSERT_EQ(heap.first()->value, *expected.begin());
      expected.erase(expected.begin());
      heap.Remove(*heap.first());
    }
    EXPECT_TRUE(expected.empty());
  }
}

}  // namespace
}  // namespace turnstile
