// Which names may be those of locks.
//
// The server reports changes of every key, and opening a key to see whether it is a lock costs more
// than the command that changed it. This filter answers for most keys that they are no locks. It
// may answer wrongly that one could be a lock, but never the other way round. It does not know
// databases: not every server reports which one a key was changed in.

#ifndef TURNSTILE_CORE_NAME_FILTER_H_
#define TURNSTILE_CORE_NAME_FILTER_H_

#include <array>
#include <climits>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string_view>

namespace turnstile {

class NameFilter {
 public:
  // A hash of a name, computed in a few instructions from its length, its first and its last bytes:
  // that is where names differ. Whoever makes names collide only makes changes of them more costly.
  using Hash = uint64_t;
  static Hash HashOf(std::string_view key) {
    constexpr uint64_t kFirstFactor = 0x9e3779b97f4a7c15;  // odd numbers with bits all over
    constexpr uint64_t kLastFactor = 0xd6e8feb86659fd93;
    const auto mix = [](uint64_t value) { return value ^ (value >> 32); };
    if (key.size() < sizeof(uint32_t)) {
      uint64_t all = key.size();
      for (const char byte : key) all = all << CHAR_BIT | static_cast<unsigned char>(byte);
      return mix(all * kFirstFactor);
    }
    const bool is_long = key.size() >= sizeof(uint64_t);
    const uint64_t first = is_long ? Load<uint64_t>(key.data()) : Load<uint32_t>(key.data());
    const char* end = key.data() + key.size();
    const uint64_t last =
        is_long ? Load<uint64_t>(end - sizeof(uint64_t)) : Load<uint32_t>(end - sizeof(uint32_t));
    return mix(mix((first + key.size()) * kFirstFactor) + last * kLastFactor);
  }

  bool MayContain(std::string_view key) const {
    return counts_ != nullptr && (*counts_)[HashOf(key) % kSize] > 0;
  }
  void Add(std::string_view key) {
    if (counts_ == nullptr) counts_ = std::make_unique<Counts>();
    uint8_t& count = (*counts_)[HashOf(key) % kSize];
    if (count < kFull) ++count;
  }
  // Requires that a name of this hash was added as often as it is removed.
  void Remove(Hash hash) {
    if (counts_ == nullptr) return;
    uint8_t& count = (*counts_)[hash % kSize];
    // From a count that is full nobody knows how many to subtract.
    if (count > 0 && count < kFull) --count;
  }
  void Clear() { counts_.reset(); }

 private:
  static constexpr size_t kSize = size_t{1} << 14;
  static constexpr uint8_t kFull = UINT8_MAX;
  using Counts = std::array<uint8_t, kSize>;

  template <typename Number>
  static Number Load(const char* bytes) {
    Number number = 0;
    std::memcpy(&number, bytes, sizeof(number));
    return number;
  }

  std::unique_ptr<Counts> counts_;
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_NAME_FILTER_H_
