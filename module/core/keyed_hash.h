// A hash of names that clients cannot make collide, because they do not know its key: SipHash with
// one round a word and three at the end (Aumasson and Bernstein, 2012), as in Redis and Valkey.
//
// Whoever can make names collide can make a table as slow as a list, and 100,000 requests may wait.

#ifndef TURNSTILE_CORE_KEYED_HASH_H_
#define TURNSTILE_CORE_KEYED_HASH_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace turnstile {

// Random, and another for each process.
struct HashKey {
  uint64_t first = 0;
  uint64_t second = 0;
};

class KeyedHash {
 public:
  explicit KeyedHash(const HashKey& key) : key_(key) {}

  size_t operator()(std::string_view text) const {
    State state(key_);
    const char* at = text.data();
    for (size_t left = text.size() / kWord; left > 0; --left, at += kWord) {
      state.Add(Load(at, kWord));
    }
    const size_t rest = text.size() % kWord;
    state.Add(uint64_t{text.size()} << 56 | Load(at, rest));
    return state.End();
  }

 private:
  static constexpr size_t kWord = sizeof(uint64_t);

  static uint64_t Load(const char* from, size_t size) {
    uint64_t word = 0;
    if (size > 0) std::memcpy(&word, from, size);
    return word;
  }

  class State {
   public:
    explicit State(const HashKey& key)
        : a_(key.first ^ 0x736f6d6570736575),  // the four constants of SipHash
          b_(key.second ^ 0x646f72616e646f6d),
          c_(key.first ^ 0x6c7967656e657261),
          d_(key.second ^ 0x7465646279746573) {}

    void Add(uint64_t word) {
      d_ ^= word;
      Round();
      a_ ^= word;
    }
    uint64_t End() {
      c_ ^= 0xff;
      for (int i = 0; i < 3; ++i) Round();
      return a_ ^ b_ ^ c_ ^ d_;
    }

   private:
    void Round() {
      a_ += b_;
      c_ += d_;
      b_ = std::rotl(b_, 13) ^ a_;
      d_ = std::rotl(d_, 16) ^ c_;
      a_ = std::rotl(a_, 32);
      c_ += b_;
      a_ += d_;
      b_ = std::rotl(b_, 17) ^ c_;
      d_ = std::rotl(d_, 21) ^ a_;
      c_ = std::rotl(c_, 32);
    }

    uint64_t a_, b_, c_, d_;
  };

  HashKey key_;
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_KEYED_HASH_H_
