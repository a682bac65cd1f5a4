// One lock: its holds, and how a fact changes them.
//
// A request is processed in one direction:
//
//     Decide(views, request, now) -> change -> Apply(lock, change)
//
// *Deciding* (decide.h) only reads, and needs the time and the token clock. *Applying*, here,
// carries out a change that was decided here or elsewhere, and needs neither. A change is a fact:
// it names the owner, the token and the absolute end of the lease, and is never relative like "ten
// seconds more". The primary decides, applies and replicates the same fact; a replica and the AOF
// only apply. So what was replicated is what was applied, by construction, and a replica whose
// clock is wrong cannot come to another result.
//
// All holds of a lock have the same mode. A hold that has ended stays until a fact removes it: only
// the primary knows the time.
//
// Nearly every lock has one holder. Such a lock is one allocation: a packed hold followed by the
// bytes of its owner. A lock with several holders has one such allocation for each, and three
// sorted lists of pointers to them. A list is split into leaves of at most 512 pointers, so a
// change moves at most 4 KB of memory, whether there are a thousand holders or a hundred thousand;
// and a lock of three holders, which may occur by the million, has one leaf per list and stays
// small. Rejected: one array per list, where each change moves memory in proportion to the number
// of holders; search trees, which need three nodes of 40 bytes for each hold.

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

// Facts. Those that are not about one key (see fact.h) do not concern a lock.
//
// The owner in a HoldSet must not be a view into the lock that it is applied to, unless the fact
// states exactly what the lock holds already: applying it may free the old value.
struct HoldSet {  // this owner holds the lock in this mode: alone, or with others of the same mode
  Mode mode = Mode::kExclusive;
  Hold hold;
};
struct HoldReleased {  // this owner gave up one of its counted holds; after the last one, the lock
  Owner owner;
};
struct HoldEnded {  // this owner's hold has ended, whatever its count
  Owner owner;
  Loss how = Loss::kExpired;
};
struct HoldsExpired {  // every hold that blocks others only until before this time is removed
  Instant before;
};
// The connections to which these owners' holds were bound had closed at this time. Those of the
// holds that were live then have ended: they are removed, or linger from then on if they have a
// linger time.
struct SessionsEnded {
  Instant at;
  std::span<const Owner> owners;
};
struct PlainFreed {};  // the string has been deleted
struct PlainExtended {
  Instant end;
};
using Change = std::variant<HoldSet, HoldReleased, HoldEnded, HoldsExpired, SessionsEnded,
                            PlainFreed, PlainExtended>;

// What remains of a live hold with a linger time after its session ended. From then on it only
// lingers: it is never live again at any time, not even if the clock is set back.
Hold AfterSession(const Hold& hold, Instant at);

// The value of a lock's key: one hold or more.
class Lock {
 public:
  // The caller owns the result and frees it with `delete`, on any thread.
  static Lock* Make(const HoldSet& held);
  // Requires one hold or more, no two of the same owner.
  static Lock* Make(Mode mode, std::span<const Hold> holds);
  // Returns the lock of one hold whose AsBytes() these are, or null if they are not valid. The
  // bytes must come from operator new; if a lock is returned, it owns them.
  static Lock* Adopt(char* bytes, size_t size);
  static void operator delete(Lock* lock, std::destroying_delete_t destroying);
  ~Lock() = default;

  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

  Mode mode() const { return static_cast<Mode>(head_ >> kModeAt & 0x3); }

  // Holds can be read in three orders. The owners in them are views into this lock.
  enum class Order { kByOwner, kByToken, kByBlocksUntil };
  class Iterator;
  struct Holds;
  Holds holds(Order order) const;
  size_t size() const;
  // Costs one step for each 512 holds between this one and the nearer end.
  Hold at(Order order, size_t index) const;
  Hold first(Order order) const;
  Hold last(Order order) const;

  std::optional<Hold> Find(Owner owner) const;
  // Whether a hold under this token is live at `now`.
  bool HasLive(Token token, Instant now) const;
  // The number of holds that block others at `now`; and the sum of their weights, which costs more
  // only if some hold weighs more than 1: a step for each hold that does not block others, or for
  // each that does, whichever are fewer.
  size_t CountBlocking(Instant now) const;
  uint64_t WeightBlocking(Instant now) const;
  // If false, no hold lingers, so every hold that blocks others is live.
  bool MayLinger() const;
  // The last millisecond in which any hold blocks others: the TTL of the key.
  Instant blocks_until() const { return last(Order::kByBlocksUntil).blocks_until(); }

  // The sum of `size_of` over all allocations of this lock.
  size_t Allocated(size_t (*size_of)(void*)) const;
  // Whether this object is its only allocation, which can be moved as bytes.
  bool IsOneAllocation() const { return !is_table(); }

  // The first word of a lock. With one hold: its token, the size of its owner minus one, and its
  // mode. With many holds: only the mode and the topmost bit.
  static constexpr int kModeAt = 61;
  static constexpr int kTableAt = 63;
  static constexpr uint64_t TableHead(Mode mode) {
    return static_cast<uint64_t>(mode) << kModeAt | uint64_t{1} << kTableAt;
  }

  // A lock of one hold as bytes; equal holds give equal bytes. docs/storage-format.md calls this a
  // record. The topmost bit of its first 8 bytes, which are little-endian, is zero.
  std::string_view AsBytes() const;

 protected:
  static constexpr int kOwnerSizeAt = 53;

  explicit Lock(uint64_t head) : head_(head) {}

  uint64_t head_;

 private:
  class HoldRecord;
  class Leaf;
  class List;
  class HoldTable;
  // The position of a record in an order: the leaf, and the index in it. The position after the
  // last record is the end of the last leaf. The only record of a lock of one hold is at {0, 0}.
  struct Position {
    size_t leaf = 0;
    size_t at = 0;
    friend bool operator==(Position, Position) = default;
  };

  bool is_table() const { return head_ >> kTableAt != 0; }
  const List& list(Order order) const;
  Position begin() const { return {}; }
  Position end(Order order) const;
  Position Next(Order order, Position position) const;
  Position Previous(Order order, Position position) const;
  const HoldRecord& record(Order order, Position position) const;
  const HoldRecord* Seek(Owner owner) const;
  // The rest of the lock without this holder.
  Lock* Without(Owner holder);
  // The first hold for which `before` is false, or the end.
  template <typename Before>
  Position Search(Order order, Before before) const;

  friend bool EndsHold(const Lock& lock, const HoldReleased& released);
  friend Lock* Apply(Lock* lock, const HoldSet& held);
  friend Lock* Apply(Lock* lock, const HoldReleased& released);
  friend Lock* Apply(Lock* lock, const HoldEnded& ended);
  friend Lock* Apply(Lock* lock, const HoldsExpired& expired);
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

// Whether a hold of `mode` joins the holds of `lock` (null: no lock). Otherwise it replaces them.
bool Joins(const Lock* lock, Mode mode);

// Whether `held` replaces the holds of other owners.
bool Replaces(const Lock* lock, const HoldSet& held);

// Whether the fact removes its owner's hold from the lock.
bool EndsHold(const Lock& lock, const HoldReleased& released);
inline bool EndsHold(const Lock& /*lock*/, const HoldEnded& /*ended*/) { return true; }

// Apply a fact to a key that stores `lock` (null: no lock). Return the lock to store, or null if no
// hold is left. The result is either `lock`, changed in place, or a new lock that replaces it; in
// the latter case, and if null is returned, `lock` is unchanged and still belongs to the caller.
//
// With n holds each costs O(log n), except for the last two, which remove k holds at once: these
// cost O(k log n), and at most O(n) if k is a large part of n (O(n log n) if the holds linger).
Lock* Apply(Lock* lock, const HoldSet& held);
Lock* Apply(Lock* lock, const HoldReleased& released);
Lock* Apply(Lock* lock, const HoldEnded& ended);
Lock* Apply(Lock* lock, const HoldsExpired& expired);
Lock* Apply(Lock* lock, const SessionsEnded& ended);

}  // namespace turnstile

#endif  // TURNSTILE_CORE_LOCK_H_
