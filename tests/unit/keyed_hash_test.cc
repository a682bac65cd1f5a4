#include "core/keyed_hash.h"

#include <gtest/gtest.h>

#include <cstddef>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

namespace turnstile {
namespace {

using namespace std::string_view_literals;

// As CPython 3.11, which has the same function for bytes, answers with PYTHONHASHSEED=0.
TEST(KeyedHash, IsSipHash13) {
  const std::vector<std::pair<std::string_view, size_t>> vectors = {
      {"a", 0x407448d2b89b1813},
      {"abcdefg", 0x6db12aae9070f506},
      {"abcdefgh", 0x3f7b849c0b8e35ea},
      {"the quick brown fox jumps", 0x00c98b97e4f70042},
      {"\0\1\2\3\4\5\6\7\x8\x9\xa\xb\xc\xd\xe"sv, 0xf30eb725bb91c9ea},
  };
  const KeyedHash hash(HashKey{});
  for (const auto& [text, expected] : vectors) EXPECT_EQ(hash(text), expected) << text;
}

TEST(KeyedHash, DependsOnBothHalvesOfTheKey) {
  std::unordered_set<size_t> hashes;
  for (const HashKey& key : {HashKey{0, 0}, HashKey{1, 0}, HashKey{0, 1}, HashKey{1, 1}}) {
    hashes.insert(KeyedHash(key)("turnstile"));
  }
  EXPECT_EQ(hashes.size(), 4U);
}

}  // namespace
}  // namespace turnstile
