// One lock: who holds it, and how a fact changes that.
//
// The way of a request is one-way:
//
//     Decide(place, request, now) -> change -> Apply(lock, change)
//
// *Deciding* (decide.h) looks and changes nothing; it needs the time and the token clock.
// *Applying*, here, carries out a change that was decided, here or elsewhere, and needs neither. A
// change is a fact: it names the owner, the token and the absolute end of the lease, never a
// request such as "ten seconds more". The primary decides, applies and replicates the same fact; a
// replica and the AOF only apply. So what was replicated is what was applied, by construction, and
// a replica whose clock is off cannot come to another result.
//
// All holds of a lock are of one mode. A hold that has ended stays until a fact removes it: only
// the primary knows what time it is.
//
// Nearly every lock has one holder. Such a lock is one allocation: a packed hold with its owner's
// bytes behind it. A lock with more holders has each of them in such an allocation of its own, and
// three sorted lists of pointers to them. Rejected: trees and hash tables. A thousand holders are
// 8 KB of pointers a list, which move in less time than one cache miss takes; and a lock of three
// holders, of which there may be millions, stays small.

#ifndef TURNSTILE_CORE_LOCK_H_
#define TURNSTILE_CORE_LOCK_H_

#include <new>
#include <optional>
#include <span>
#include <string_view>
#include <variant>

#include "core/types.h"

namespace turnstile {

// Facts. Those that are not about one key (see fact.h) are no business of a lock.
//
// The owner of a Held is not a view into the lock that it is about, unless the fact says just what
// the lock holds already: to carry it out may free what was there.
struct Held {  // this owner holds the lock in this mode: alone, or with others of the same mode
  Mode mode = Mode::kExclusive;
  Hold hold;
};
struct Released {  // this owner gave up one of its counted holds, and with the last the lock
  Owner owner;
};
struct Ended {  // this owner's hold is over, whatever its count
  Owner owner;
  Loss how = Loss::kExpired;
};
struct PlainFreed {};  // the string is gone
struct PlainExtended {
  Instant end;
};
using Change = std::variant<Held, Released, Ended, PlainFreed, PlainExtended>;

// The value of a lock's key: one hold or more.
class Lock {
 public:
  // The caller owns the result and ends it with `delete`, on any thread.
  static Lock* Make(const Held& held);
  // Of one hold or more, no two of the same owner.
  static Lock* Make(Mode mode, std::span<const Hold> holds);
  // The lock of one hold whose AsBytes() these are, or null. They come from operator new, and
  // belong to the lock if there is one.
  static Lock* Adopt(char* bytes, size_t size);
  static void operator delete(Lock* lock, std::destroying_delete_t destroying);
  ~Lock() = default;

  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  Mode mode() const { return static_cast<Mode>(head_ >> kModeAt & 0x3); }

  // Holds can be read in three orders. The owners in them are views into this lock.
  enum class Order { kByOwner, kByToken, kByClosing };
  size_t size() const;
  Hold at(Order order, size_t index) const;

  std::optional<Hold> Find(Owner owner) const;
  // A hold under this token that is live at `now`.
  bool HasLive(Token token, Instant now) const;
  // How many holds keep others out at `now`.
  size_t KeepingOut(Instant now) const;
  // The last millisecond in which some hold keeps others out: the TTL of the key.
  Instant closes() const { return at(Order::kByClosing, size() - 1).closes(); }

  // The sum of `size_of` over all allocations of this lock.
  size_t Allocated(size_t (*size_of)(void*)) const;
  // Whether this object is its only allocation, which can be moved as bytes.
  bool IsOneAllocation() const { return !many(); }

  // The first word of a lock: of one hold its token, the size of its owner less one and its mode;
  // of many holds only the mode, and the topmost bit.
  static constexpr int kModeAt = 61;
  static constexpr int kManyAt = 63;
  static constexpr uint64_t ManyHead(Mode mode) {
    return static_cast<uint64_t>(mode) << kModeAt | uint64_t{1} << kManyAt;
  }

  // A lock of one hold as bytes, the same for the same hold: docs/storage-format.md calls it a
  // record. The topmost bit of its first 8 bytes, which are little-endian, is zero.
  std::string_view AsBytes() const;

 protected:
  static constexpr int kOwnerSizeAt = 53;

  explicit Lock(uint64_t head) : head_(head) {}

  uint64_t head_;

 private:
  class One;
  class Many;

  bool many() const { return head_ >> kManyAt != 0; }
  const One& record(Order order, size_t index) const;
  const One* Seek(Owner owner) const;
  // What is left of the lock without this holder.
  Lock* Without(Owner holder);
  // The index of the first hold that is not `before`, or size().
  template <typename Before>
  size_t Search(Order order, Before before) const;

  friend bool EndsHold(const Lock& lock, const Released& released);
  friend Lock* Apply(Lock* lock, const Held& held);
  friend Lock* Apply(Lock* lock, const Released& released);
  friend Lock* Apply(Lock* lock, const Ended& ended);
};

// Whether a hold of `mode` joins the holds of `lock` (null: no lock). Else it takes their place.
bool Joins(const Lock* lock, Mode mode);

// Whether `held` takes the place of other owners' holds.
bool Replaces(const Lock* lock, const Held& held);

// Whether the fact takes its owner's hold out of the lock.
bool EndsHold(const Lock& lock, const Released& released);
inline bool EndsHold(const Lock& /*lock*/, const Ended& /*ended*/) { return true; }

// Carry out a fact on a key that stores `lock` (null: no lock). They return the lock to store, or
// null if nobody is left: either `lock`, changed where it is, or a new one that takes its place;
// then `lock` still belongs to the caller.
Lock* Apply(Lock* lock, const Held& held);
Lock* Apply(Lock* lock, const Released& released);
Lock* Apply(Lock* lock, const Ended& ended);

}  // namespace turnstile

#endif  // TURNSTILE_CORE_LOCK_H_
