// The Redis type `turnstile`: how a lock lives in a key.

#ifndef TURNSTILE_REDIS_LOCK_TYPE_H_
#define TURNSTILE_REDIS_LOCK_TYPE_H_

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "core/decide.h"
#include "core/fact.h"
#include "core/lock.h"
#include "core/wait_queue.h"
#include "redis/config.h"
#include "redis/redis_api.h"

namespace turnstile {

bool RegisterLockType(RedisModuleCtx* ctx);

// The name of the type, as TYPE and SCAN … TYPE know it.
inline constexpr const char* kTypeName = "turnstile";

// The lock in an open key, or null.
Lock* LockIn(RedisModuleKey* key);

// How many locks there are in memory, also such as are in no key any more and wait to be freed.
size_t StoredLocks();
// Where they may be: not in other databases.
std::vector<int> DatabasesWithLocks();
void LocksMayBeIn(int db);
void LocksSwapped(int first, int second);
// There are none in a database, or in any.
void ForgetLocksIn(std::optional<int> db);

// A key that is open as a lock. Lives for one command and no longer.
class LockKey {
 public:
  enum class Access {
    kLook,     // for a command that only reads
    kChange,   // for a command that may write
    kInspect,  // on nobody's behalf: may write, and does not count as a use of the key (LRU, hits)
  };

  // Opening a key whose TTL has run out removes it, as any command does.
  LockKey(RedisModuleCtx* ctx, RedisModuleString* name, Access access);
  ~LockKey();
  LockKey(LockKey&& other) noexcept
      : name_(other.name_),
        key_name_(other.key_name_),
        key_(std::exchange(other.key_, nullptr)),
        type_(other.type_),
        lock_(other.lock_),
        db_(other.db_) {}
  LockKey(const LockKey&) = delete;
  LockKey& operator=(const LockKey&) = delete;

  // Neither a lock nor a plain lock nor missing.
  bool wrong_type() const {
    return type_ != REDISMODULE_KEYTYPE_EMPTY && lock_ == nullptr && !is_plain();
  }

  // A string, where strings count as locks.
  bool is_plain() const { return type_ == REDISMODULE_KEYTYPE_STRING && PlainLocks(); }

  // A plain lock's value stays valid until the key is changed or closed.
  Place place() const {
    Place place{.lock = lock_};
    if (is_plain()) place.plain = plain();
    return place;
  }

  // The lock in the key, or null.
  Lock* lock() const { return lock_; }

  // The moment at which the server will remove the key, or kMaxInstant.
  Instant expiry() const;

  RedisModuleString* name() const { return name_; }
  LockName lock_name() const { return {db_, key_name_}; }

  // Stores `lock`, which may already be in the key, to be removed after its last hold closes. What
  // was in the key before is freed.
  void Store(Lock* lock);
  void Delete();
  void Close();

 private:
  PlainLock plain() const;

  RedisModuleString* name_;
  std::string_view key_name_;
  RedisModuleKey* key_;
  int type_;    // what the server calls it
  Lock* lock_;  // null if it is none
  int db_;
};

// The keys of all the locks that a request names, open.
class LockKeys {
 public:
  LockKeys(RedisModuleCtx* ctx, RedisModuleString* first, std::span<RedisModuleString* const> more,
           LockKey::Access access)
      : first_(ctx, first, access) {
    if (!more.empty()) Open(ctx, more, access);
  }

  size_t size() const { return 1 + more_.size(); }
  LockKey& operator[](size_t index) { return index == 0 ? first_ : more_[index - 1]; }
  bool any_wrong_type() const {
    for (const LockKey& key : more_) {
      if (key.wrong_type()) return true;
    }
    return first_.wrong_type();
  }

 private:
  void Open(RedisModuleCtx* ctx, std::span<RedisModuleString* const> more, LockKey::Access access);

  LockKey first_;
  std::vector<LockKey> more_;
};

// What a request for the locks in `keys` finds there, for the core to decide on. A request for one
// lock costs no allocation.
class Sites {
 public:
  // `ahead_of` says who waits before the request, given a key and what is in it.
  template <typename AheadOf>
  Sites(LockKeys& keys, AheadOf ahead_of) : first_(LookAt(keys[0], ahead_of)), sites_(&first_, 1) {
    if (keys.size() == 1) return;
    all_.reserve(keys.size());
    all_.push_back(first_);
    for (size_t i = 1; i < keys.size(); ++i) all_.push_back(LookAt(keys[i], ahead_of));
    sites_ = all_;
  }
  Sites(const Sites&) = delete;
  Sites& operator=(const Sites&) = delete;

  std::span<const Site> get() const { return sites_; }

 private:
  template <typename AheadOf>
  static Site LookAt(const LockKey& key, AheadOf& ahead_of) {
    const Place place = key.place();
    return {place, ahead_of(key, place)};
  }

  Site first_;
  std::vector<Site> all_;  // if there are more
  std::span<const Site> sites_;
};

// The name of a lock as the server wants it, with its database selected. For work outside a
// command, where nobody holds the name for us.
class ScopedName {
 public:
  ScopedName(RedisModuleCtx* ctx, LockName lock);
  ~ScopedName();
  ScopedName(ScopedName&& other) noexcept
      : ctx_(other.ctx_), db_(other.db_), name_(std::exchange(other.name_, nullptr)) {}
  ScopedName(const ScopedName&) = delete;
  ScopedName& operator=(const ScopedName&) = delete;

  RedisModuleString* get() const { return name_; }
  LockName lock() const { return {db_, ToView(name_)}; }

 private:
  RedisModuleCtx* ctx_;
  int db_;
  RedisModuleString* name_;
};

// The commands that carry facts (see core/fact.h).
inline constexpr const char* kFactCommand = "LOCK.FACT";
inline constexpr const char* kHeldCommand = "LOCK.HELD";

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

#endif  // TURNSTILE_REDIS_LOCK_TYPE_H_
