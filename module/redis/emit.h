// Facts (core/fact.h) as the server wants them: the arguments of RedisModule_Replicate and
// RedisModule_EmitAOF.

#ifndef TURNSTILE_REDIS_EMIT_H_
#define TURNSTILE_REDIS_EMIT_H_

#include <span>
#include <string_view>
#include <vector>

#include "core/fact.h"
#include "core/lock.h"
#include "redis/command_names.h"
#include "redis/redis_api.h"

namespace turnstile {

// The last words of a fact, as the server wants them.
class Words {
 public:
  // The words of HELD that few holds need.
  explicit Words(const Held& held);
  explicit Words(std::span<const Owner> owners);
  ~Words();
  Words(const Words&) = delete;
  Words& operator=(const Words&) = delete;

  bool empty() const { return words_.empty(); }
  RedisModuleString** data() { return words_.data(); }
  size_t size() const { return words_.size(); }

 private:
  void Add(std::string_view word);

  std::vector<RedisModuleString*> words_;
};

// Writes a fact about the lock `key`: `emit` is called with a command's name, a format and its
// arguments, as RedisModule_Replicate and RedisModule_EmitAOF take them.
template <typename Emit>
void EmitHeld(Emit emit, RedisModuleString* key, const Held& held) {
  const std::string_view owner = held.hold.owner.bytes;
  const HeldNumbers numbers(held.hold);
  const std::string_view text = numbers.text();
  Words details(held);
  if (details.empty()) {
    emit(kHeldCommand, "sbb", key, owner.data(), owner.size(), text.data(), text.size());
  } else {
    emit(kHeldCommand, "sbbv", key, owner.data(), owner.size(), text.data(), text.size(),
         details.data(), details.size());
  }
}

template <typename Emit>
void EmitEnded(Emit emit, RedisModuleString* key, const Ended& ended) {
  const std::string_view how = WordFor(ended.how);
  const std::string_view owner = ended.owner.bytes;
  if (how.empty()) {
    emit(kFactCommand, "csb", kFactEnded.data(), key, owner.data(), owner.size());
  } else {
    emit(kFactCommand, "csbc", kFactEnded.data(), key, owner.data(), owner.size(), how.data());
  }
}

template <typename Emit>
void EmitExpired(Emit emit, RedisModuleString* key, const Expired& expired) {
  emit(kFactCommand, "csl", kFactExpired.data(), key,
       static_cast<long long>(expired.before.time_since_epoch().count()));
}

template <typename Emit>
void EmitSessionsEnded(Emit emit, RedisModuleString* key, const SessionsEnded& ended) {
  Words owners(ended.owners);
  emit(kFactCommand, "cslv", kFactSession.data(), key,
       static_cast<long long>(ended.at.time_since_epoch().count()), owners.data(), owners.size());
}

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_EMIT_H_
