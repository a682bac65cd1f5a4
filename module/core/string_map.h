// A hash table by strings that grows in small steps: it is made of many tables, each of which is
// rehashed by itself. One large table would stop the server for tens of milliseconds when it grows.

#ifndef TURNSTILE_CORE_STRING_MAP_H_
#define TURNSTILE_CORE_STRING_MAP_H_

#include <array>
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>

namespace turnstile {

template <typename Value>
class StringMap {
 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
  };
  using Part = std::unordered_map<std::string, Value, Hash, std::equal_to<>>;

 public:
  Value* Find(std::string_view key) {
    Part& part = PartOf(key);
    const auto found = part.find(key);
    return found == part.end() ? nullptr : &found->second;
  }
  const Value* Find(std::string_view key) const { return const_cast<StringMap*>(this)->Find(key); }

  // Adds an element, which must not exist. Key and value keep their addresses.
  std::pair<const std::string, Value>& Add(std::string_view key) {
    return *PartOf(key).try_emplace(std::string(key)).first;
  }
  void Erase(std::string_view key) {
    Part& part = PartOf(key);
    part.erase(part.find(key));
  }
  // Also frees the tables themselves, which stay large when elements are erased.
  void Clear() {
    for (Part& part : parts_) part = Part();
  }

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
  static constexpr size_t kParts = 64;

  Part& PartOf(std::string_view key) {
    return parts_[Hash()(key) >> (8 * sizeof(size_t) - 6)];  // the tables use the lower bits
  }

  std::array<Part, kParts> parts_;
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_STRING_MAP_H_
