// A hash table by strings that grows in small steps: it is made of many tables, each of which is
// rehashed by itself. One large table would stop the server for tens of milliseconds when it grows.

#ifndef TURNSTILE_CORE_STRING_MAP_H_
#define TURNSTILE_CORE_STRING_MAP_H_

#include <cstddef>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/keyed_hash.h"

namespace turnstile {

template <typename Value>
class StringMap {
 private:
  // A key with its hash, which is computed once for the choice of the part and for the table.
  struct Hashed {
    std::string_view key;
    size_t hash;
  };
  struct Hash {
    using is_transparent = void;
    size_t operator()(const std::string& key) const { return keyed(key); }
    size_t operator()(const Hashed& hashed) const { return hashed.hash; }
    KeyedHash keyed;
  };
  struct Equal {
    using is_transparent = void;
    bool operator()(const std::string& a, const std::string& b) const { return a == b; }
    bool operator()(const Hashed& a, const std::string& b) const { return a.key == b; }
    bool operator()(const std::string& a, const Hashed& b) const { return a == b.key; }
  };
  using Part = std::unordered_map<std::string, Value, Hash, Equal>;

 public:
  explicit StringMap(const HashKey& key) : hash_{KeyedHash(key)}, parts_(Empty()) {}

  Value* Find(std::string_view key) {
    const Hashed hashed = HashedOf(key);
    Part& part = PartOf(hashed);
    const auto found = part.find(hashed);
    return found == part.end() ? nullptr : &found->second;
  }
  const Value* Find(std::string_view key) const { return const_cast<StringMap*>(this)->Find(key); }

  // Adds an element, which must not exist. Key and value keep their addresses.
  std::pair<const std::string, Value>& Add(std::string_view key) {
    return *PartOf(HashedOf(key)).try_emplace(std::string(key)).first;
  }
  void Erase(std::string_view key) {
    const Hashed hashed = HashedOf(key);
    Part& part = PartOf(hashed);
    part.erase(part.find(hashed));
  }
  // Also frees the tables themselves, which stay large when elements are erased.
  void Clear() { parts_ = Empty(); }

  // In no particular order.
  template <typename Visit>
  void ForEach(Visit visit) {
    for (Part& part : parts_) {
      for (auto& [key, value] : part) visit(key, value);
    }
  }
  template <typename Visit>
  void ForEach(Visit visit) const {
    for (const Part& part : parts_) {
      for (const auto& [key, value] : part) visit(key, value);
    }
  }

 private:
  // There are 64 parts, so six bits choose one: the highest, as the tables use the lower ones.
  Part& PartOf(const Hashed& hashed) { return parts_[hashed.hash >> (8 * sizeof(size_t) - 6)]; }
  Hashed HashedOf(std::string_view key) const { return {key, hash_.keyed(key)}; }
  std::vector<Part> Empty() const {
    constexpr size_t kParts = 64;
    std::vector<Part> parts;
    parts.reserve(kParts);
    while (parts.size() < kParts) parts.emplace_back(0, hash_);
    return parts;
  }

  Hash hash_;
  std::vector<Part> parts_;
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_STRING_MAP_H_
