#include "core/name_filter.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

namespace turnstile {
namespace {

std::string Name(int number) { return "lock:" + std::to_string(number); }

TEST(NameFilterTest, KnowsWhatWasAddedAndNotRemoved) {
  NameFilter names;
  EXPECT_FALSE(names.MayContain("job"));
  names.Add("job");
  EXPECT_TRUE(names.MayContain("job"));
  names.Remove(NameFilter::HashOf("job"));
  EXPECT_FALSE(names.MayContain("job"));
}

// Two databases may each have a lock of this name.
TEST(NameFilterTest, CountsNames) {
  NameFilter names;
  names.Add("job");
  names.Add("job");
  names.Remove(NameFilter::HashOf("job"));
  EXPECT_TRUE(names.MayContain("job"));
}

TEST(NameFilterTest, NeverForgetsOneOfManyNames) {
  constexpr int kMany = 100'000;
  NameFilter names;
  for (int i = 0; i < kMany; ++i) names.Add(Name(i));
  for (int i = 0; i < kMany; i += 2) names.Remove(NameFilter::HashOf(Name(i)));
  for (int i = 1; i < kMany; i += 2) ASSERT_TRUE(names.MayContain(Name(i))) << i;
}

// A counter that is full cannot count down again.
TEST(NameFilterTest, NeverForgetsOneOfManyEqualNames) {
  NameFilter names;
  for (int i = 0; i < 1000; ++i) names.Add("job");
  for (int i = 0; i < 999; ++i) names.Remove(NameFilter::HashOf("job"));
  EXPECT_TRUE(names.MayContain("job"));
  names.Clear();
  EXPECT_FALSE(names.MayContain("job"));
}

TEST(NameFilterTest, RecognisesMostOtherNames) {
  NameFilter names;
  for (int i = 0; i < 100; ++i) names.Add(Name(i));
  int taken_for_locks = 0;
  for (int i = 0; i < 10'000; ++i) {
    taken_for_locks += names.MayContain("user:" + std::to_string(i)) ? 1 : 0;
  }
  EXPECT_LT(taken_for_locks, 200);  // 61 expected
}

// Names of all lengths, which are read in different ways, and which differ in one byte.
TEST(NameFilterTest, DistinguishesNamesThatDifferInOneByte) {
  for (size_t size = 1; size <= 20; ++size) {
    std::set<NameFilter::Hash> hashes;
    for (const size_t at : {size_t{0}, size / 2, size - 1}) {
      for (char byte = 'a'; byte <= 'z'; ++byte) {
        std::string name(size, '.');
        name[at] = byte;
        hashes.insert(NameFilter::HashOf(name));
      }
    }
    // The middle of a long name does not count.
    const size_t positions = size == 1 ? 1 : size == 2 || size > 16 ? 2 : 3;
    EXPECT_GE(hashes.size(), 26 * positions) << size;
  }
}

}  // namespace
}  // namespace turnstile
