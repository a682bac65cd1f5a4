#include "redis/emit.h"

#include <string>

namespace turnstile {

Words::Words(const Held& held) {
  if (held.mode != Mode::kExclusive) Add(WordFor(held.mode));
  if (held.hold.count != 1) {
    Add(kCountWord);
    Add(std::to_string(held.hold.count));
  }
  if (held.hold.linger != Millis{0}) {
    Add(kLingerWord);
    Add(std::to_string(held.hold.linger.count()));
  }
}

Words::Words(std::span<const Owner> owners) {
  words_.reserve(owners.size());
  for (const Owner owner : owners) Add(owner.bytes);
}

Words::~Words() {
  for (RedisModuleString* word : words_) RedisModule_FreeString(nullptr, word);
}

void Words::Add(std::string_view word) {
  words_.push_back(RedisModule_CreateString(nullptr, word.data(), word.size()));
}

}  // namespace turnstile
