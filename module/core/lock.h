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
// three sorted lists of pointers to them. A list is cut into leaves of at most 512 pointers, so a
// change moves at most 4 KB of memory, whether there are a thousand holders or a hundred thousand;
// and a lock of three holders, of which there may be millions, has one leaf per list and stays
// small. Rejected: one array per list, in which each change moves memory in proportion to the
// number of holders; search trees, which take three nodes of 40 bytes for each hold.

#ifndef TURNSTILE_CORE_LOCK_H_
#define TURNSTILE_CORE_LOCK_H_

#include <cstddef>
#include <iterator>
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
struct Expired {  // every hold that kept others out until some moment before this one is removed
  Instant before;
};
// The connections to which these owners' holds were bound had closed at this moment. Those holds
// that were live then have ended: they are removed, or linger from then on if they are to linger.
struct SessionsEnded {
  Instant at;
  std::span<const Owner> owners;
};
struct PlainFreed {};  // the string is gone
struct PlainExtended {
  Instant end;
};
using Change =
    std::variant<Held, Released, Ended, Expired, SessionsEnded, PlainFreed, PlainExtended>;

// What is left of a live hold that lingers, after its session ended. From here on it only lingers:
// at no moment, not even of a clock that is set back, is it live again.
Hold AfterSession(const Hold& hold, Instant at);

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
  class Iterator;
  struct Holds;
  Holds holds(Order order) const;
  size_t size() const;
  // Costs a step for each 512 holds between this one and the nearer end.
  Hold at(Order order, size_t index) const;
  Hold first(Order order) const;
  Hold last(Order order) const;

  std::optional<Hold> Find(Owner owner) const;
  // A hold under this token that is live at `now`.
  bool HasLive(Token token, Instant now) const;
  // How many holds keep others out at `now`.
  size_t KeepingOut(Instant now) const;
  // False: no hold lingers, so those that keep others out are live.
  bool MayLinger() const;
  // The last millisecond in which some hold keeps others out: the TTL of the key.
  Instant closes() const { return last(Order::kByClosing).closes(); }

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
  class Leaf;
  class List;
  class Many;
  // Where a record is in an order: in which leaf, and where in it. Behind the last record is the
  // end of the last leaf. The one record of a lock of one hold is at {0, 0}.
  struct Position {
    size_t leaf = 0;
    size_t at = 0;
    friend bool operator==(Position, Position) = default;
  };

  bool many() const { return head_ >> kManyAt != 0; }
  const List& list(Order order) const;
  Position begin() const { return {}; }
  Position end(Order order) const;
  Position Next(Order order, Position position) const;
  Position Previous(Order order, Position position) const;
  const One& record(Order order, Position position) const;
  const One* Seek(Owner owner) const;
  // What is left of the lock without this holder.
  Lock* Without(Owner holder);
  // The first hold that is not `before`, or the end.
  template <typename Before>
  Position Search(Order order, Before before) const;

  friend bool EndsHold(const Lock& lock, const Released& released);
  friend Lock* Apply(Lock* lock, const Held& held);
  friend Lock* Apply(Lock* lock, const Released& released);
  friend Lock* Apply(Lock* lock, const Ended& ended);
  friend Lock* Apply(Lock* lock, const Expired& expired);
  friend Lock* Apply(Lock* lock, const SessionsEnded& ended);
};

class Lock::Iterator {
 public:
  using iterator_category = std::bidirectional_iterator_tag;
  using value_type = Hold;
  using difference_type = ptrdiff_t;
  using pointer = void;
  using reference = Hold;

  Hold operator*() const;
  Iterator& operator++() {
    position_ = lock_->Next(order_, position_);
    return *this;
  }
  Iterator& operator--() {
    position_ = lock_->Previous(order_, position_);
    return *this;
  }
  friend bool operator==(const Iterator&, const Iterator&) = default;

 private:
  friend class Lock;

  Iterator(const Lock* lock, Order order, Position position)
      : lock_(lock), order_(order), position_(position) {}

  const Lock* lock_;
  Order order_;
  Position position_;
};

struct Lock::Holds {
  Iterator begin_;
  Iterator end_;

  Iterator begin() const { return begin_; }
  Iterator end() const { return end_; }
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
// then `lock` still belongs to the caller, unchanged.
//
// Of n holds each costs O(log n), but for the last two, which remove many at once: those cost
// O(k log n), and O(n) at most where k of them is a large part of n (O(n log n) if they linger).
Lock* Apply(Lock* lock, const Held& held);
Lock* Apply(Lock* lock, const Released& released);
Lock* Apply(Lock* lock, const Ended& ended);
Lock* Apply(Lock* lock, const Expired& expired);
Lock* Apply(Lock* lock, const SessionsEnded& ended);

}  // namespace turnstile

#endif  // TURNSTILE_CORE_LOCK_H_
