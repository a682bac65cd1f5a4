#include "core/lock.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

namespace turnstile {

static_assert(std::endian::native == std::endian::little, "records are stored as they are");

// A lock of one hold, or one hold of a lock of many: a record of two words and the owner's bytes.
// Tokens are microseconds of a clock that is close to the wall clock, so the second word holds how
// far the token leads `since`, in milliseconds, and the end of the lease in 42 bits, which last
// until the year 2109. A hold for which that is not enough, or that lingers or is counted, has all
// that in full between the words and the owner: it is wide.
class Lock::One : public Lock {
 public:
  static One* Make(Mode mode, const Hold& hold) {
    const uint64_t times = Times(hold);
    const size_t size = Size(IsWide(times), hold.owner.bytes.size());
    return ::new (::operator new(size)) One(mode, hold, times);
  }

  // See Lock::Adopt.
  static One* Adopt(char* bytes, size_t size) {
    if (size < sizeof(One)) return nullptr;
    uint64_t words[2];
    std::memcpy(words, bytes, sizeof(words));
    One* one = ::new (bytes) One(words[0], words[1]);
    const bool whole = !one->many() && size == one->size() && one->mode() <= Mode::kLimit;
    if (!whole) return nullptr;
    const Hold hold = one->hold();
    return IsWellFormed(hold) && one->times_ == Times(hold) ? one : nullptr;
  }

  Hold hold() const {
    Hold hold{.owner = owner(), .token = token()};
    if (wide()) {
      Wide wide;
      std::memcpy(&wide, behind(), kWideSize);
      hold.since = Instant{Millis{wide.since}};
      hold.end = Instant{Millis{wide.end}};
      hold.linger = Millis{wide.linger};
      hold.count = wide.count;
    } else {
      hold.since =
          MomentOf(token()) - Millis{static_cast<int64_t>(times_ << kEndBits) >> kLeadShift};
      hold.end = narrow_end();
    }
    return hold;
  }

  Token token() const { return Token{head_ & kMaxToken.value}; }
  Owner owner() const { return Owner{{behind() + (wide() ? kWideSize : 0), owner_size()}}; }
  Instant closes() const { return wide() ? hold().closes() : narrow_end(); }
  bool counted() const { return wide() && hold().count > 1; }
  size_t size() const { return Size(wide(), owner_size()); }

  // Takes on the values of `hold`, which has the same owner. False: it needs a record of another
  // size.
  bool Renew(Mode mode, const Hold& hold) {
    const uint64_t times = Times(hold);
    if (IsWide(times) != wide()) return false;
    head_ = Head(mode, hold);
    times_ = times;
    if (wide()) SetWide(hold);
    return true;
  }

 private:
  struct Wide {
    int64_t since;
    int64_t end;
    int64_t linger;
    uint32_t count;
  };
  static constexpr size_t kWideSize = 28;  // without the padding
  static constexpr uint64_t kWideTimes = 1;
  static constexpr int kEndBits = 42;
  static constexpr int kLeadShift = kEndBits + 1;  // the lowest bit says whether it is wide
  static constexpr int kLeadBits = 64 - kLeadShift;

  One(uint64_t head, uint64_t times) : Lock(head), times_(times) {}
  One(Mode mode, const Hold& hold, uint64_t times) : One(Head(mode, hold), times) {
    if (wide()) SetWide(hold);
    std::memcpy(behind() + (wide() ? kWideSize : 0), hold.owner.bytes.data(),
                hold.owner.bytes.size());
  }

  static size_t Size(bool wide, size_t owner_size) {
    return sizeof(One) + (wide ? kWideSize : 0) + owner_size;
  }
  static uint64_t Head(Mode mode, const Hold& hold) {
    return hold.token.value | (hold.owner.bytes.size() - 1) << kOwnerSizeAt |
           static_cast<uint64_t>(mode) << kModeAt;
  }
  static Instant MomentOf(Token token) {
    return ToInstant(FineInstant{Micros{static_cast<int64_t>(token.value)}});
  }
  static bool IsWide(uint64_t times) { return (times & kWideTimes) != 0; }
  static uint64_t Times(const Hold& hold) {
    constexpr int64_t kMostLead = (int64_t{1} << (kLeadBits - 1)) - 1;
    const int64_t lead = (MomentOf(hold.token) - hold.since).count();
    const int64_t end = hold.end.time_since_epoch().count();
    if (hold.linger != Millis{0} || hold.count != 1 || lead > kMostLead || lead < -kMostLead ||
        end >> kEndBits != 0) {
      return kWideTimes;
    }
    return static_cast<uint64_t>(end) << (64 - kEndBits) |
           static_cast<uint64_t>(lead) << kLeadShift >> kEndBits;
  }
  void SetWide(const Hold& hold) {
    const Wide wide{hold.since.time_since_epoch().count(), hold.end.time_since_epoch().count(),
                    hold.linger.count(), hold.count};
    std::memcpy(behind(), &wide, kWideSize);
  }

  bool wide() const { return IsWide(times_); }
  size_t owner_size() const { return (head_ >> kOwnerSizeAt & 0xff) + 1; }
  Instant narrow_end() const {
    return Instant{Millis{static_cast<int64_t>(times_ >> (64 - kEndBits))}};
  }
  char* behind() { return reinterpret_cast<char*>(this + 1); }
  const char* behind() const { return reinterpret_cast<const char*>(this + 1); }

  uint64_t times_;
};

// A lock that has, or had, several holds.
class Lock::Many : public Lock {
 public:
  // The holds are of different owners.
  Many(Mode mode, std::span<const Hold> holds) : Lock(ManyHead(mode)) {
    std::vector<One*> made;
    made.reserve(holds.size());
    for (const Hold& hold : holds) made.push_back(One::Make(mode, hold));
    ForEachOrder([&made](std::vector<One*>& sorted, auto before) {
      sorted = made;
      std::sort(sorted.begin(), sorted.end(), before);
    });
  }
  ~Many() {
    for (One* record : records(Order::kByOwner)) delete record;
  }

  const std::vector<One*>& records(Order order) const {
    return records_[static_cast<size_t>(order)];
  }

  // A hold of a new owner, or the new values of an owner's hold.
  void Put(const Hold& hold) {
    One* record = Take(hold.owner);
    if (record == nullptr || !record->Renew(mode(), hold)) {
      One* other = One::Make(mode(), hold);
      delete record;
      record = other;
    }
    ForEachOrder([record](std::vector<One*>& sorted, auto before) {
      sorted.insert(std::lower_bound(sorted.begin(), sorted.end(), record, before), record);
    });
  }

  void Remove(Owner owner) { delete Take(owner); }

 private:
  // Takes the owner's record out, or returns null.
  One* Take(Owner owner) {
    auto* record = const_cast<One*>(Seek(owner));
    if (record == nullptr) return nullptr;
    ForEachOrder([record](std::vector<One*>& sorted, auto before) {
      sorted.erase(std::lower_bound(sorted.begin(), sorted.end(), record, before));
    });
    return record;
  }

  // Calls `act` with each list and its order, in which no two records are equal.
  template <typename Act>
  void ForEachOrder(Act act) {
    act(records_[static_cast<size_t>(Order::kByOwner)],
        [](const One* a, const One* b) { return a->owner().bytes < b->owner().bytes; });
    act(records_[static_cast<size_t>(Order::kByToken)], [](const One* a, const One* b) {
      return std::tuple(a->token(), a->owner().bytes) < std::tuple(b->token(), b->owner().bytes);
    });
    act(records_[static_cast<size_t>(Order::kByClosing)], [](const One* a, const One* b) {
      return std::tuple(a->closes(), a->owner().bytes) < std::tuple(b->closes(), b->owner().bytes);
    });
  }

  std::array<std::vector<One*>, 3> records_;
};

Lock* Lock::Adopt(char* bytes, size_t size) { return One::Adopt(bytes, size); }

Lock* Lock::Make(const Held& held) { return One::Make(held.mode, held.hold); }

Lock* Lock::Make(Mode mode, std::span<const Hold> holds) {
  if (holds.size() == 1) return One::Make(mode, holds.front());
  return new Many(mode, holds);
}

void Lock::operator delete(Lock* lock, std::destroying_delete_t /*destroying*/) {
  if (lock->many()) {
    static_cast<Many*>(lock)->~Many();
  } else {
    static_cast<One*>(lock)->~One();
  }
  ::operator delete(lock);
}

size_t Lock::size() const {
  return many() ? static_cast<const Many*>(this)->records(Order::kByOwner).size() : 1;
}

const Lock::One& Lock::record(Order order, size_t index) const {
  if (!many()) return static_cast<const One&>(*this);
  return *static_cast<const Many*>(this)->records(order)[index];
}

std::string_view Lock::AsBytes() const {
  const One& one = record(Order::kByOwner, 0);
  return {reinterpret_cast<const char*>(&one), one.size()};
}

Hold Lock::at(Order order, size_t index) const { return record(order, index).hold(); }

template <typename Before>
size_t Lock::Search(Order order, Before before) const {
  size_t from = 0;
  size_t to = size();
  while (from < to) {
    const size_t middle = from + (to - from) / 2;
    if (before(record(order, middle))) {
      from = middle + 1;
    } else {
      to = middle;
    }
  }
  return from;
}

const Lock::One* Lock::Seek(Owner owner) const {
  const size_t index =
      many()
          ? Search(Order::kByOwner, [&](const One& one) { return one.owner().bytes < owner.bytes; })
          : 0;
  if (index == size()) return nullptr;
  const One& found = record(Order::kByOwner, index);
  return found.owner() == owner ? &found : nullptr;
}

std::optional<Hold> Lock::Find(Owner owner) const {
  const One* found = Seek(owner);
  if (found == nullptr) return std::nullopt;
  return found->hold();
}

bool Lock::HasLive(Token token, Instant now) const {
  size_t index = Search(Order::kByToken, [&](const One& one) { return one.token() < token; });
  for (; index < size() && record(Order::kByToken, index).token() == token; ++index) {
    if (at(Order::kByToken, index).LiveAt(now)) return true;
  }
  return false;
}

size_t Lock::KeepingOut(Instant now) const {
  return size() - Search(Order::kByClosing, [&](const One& one) { return one.closes() < now; });
}

size_t Lock::Allocated(size_t (*size_of)(void*)) const {
  size_t bytes = size_of(const_cast<Lock*>(this));
  if (!many()) return bytes;
  for (const Order order : {Order::kByOwner, Order::kByToken, Order::kByClosing}) {
    const std::vector<One*>& records = static_cast<const Many*>(this)->records(order);
    if (records.capacity() > 0) bytes += size_of(const_cast<One**>(records.data()));
  }
  for (One* one : static_cast<const Many*>(this)->records(Order::kByOwner)) bytes += size_of(one);
  return bytes;
}

Lock* Lock::Without(Owner holder) {
  if (size() == 1) return nullptr;
  static_cast<Many*>(this)->Remove(holder);
  return this;
}

bool Joins(const Lock* lock, Mode mode) {
  return lock != nullptr && mode != Mode::kExclusive && lock->mode() == mode;
}

bool Replaces(const Lock* lock, const Held& held) {
  return lock != nullptr && !Joins(lock, held.mode) &&
         (lock->size() > 1 || !lock->Find(held.hold.owner).has_value());
}

bool EndsHold(const Lock& lock, const Released& released) {
  const Lock::One* hold = lock.Seek(released.owner);
  return hold != nullptr && !hold->counted();
}

Lock* Apply(Lock* lock, const Held& held) {
  if (lock != nullptr && !lock->many()) {
    auto& one = static_cast<Lock::One&>(*lock);
    if (one.owner() == held.hold.owner && one.Renew(held.mode, held.hold)) return lock;
    if (one.owner() == held.hold.owner || !Joins(lock, held.mode)) return Lock::Make(held);
    return Lock::Make(held.mode, std::array{one.hold(), held.hold});
  }
  if (!Joins(lock, held.mode)) return Lock::Make(held);
  static_cast<Lock::Many*>(lock)->Put(held.hold);
  return lock;
}

Lock* Apply(Lock* lock, const Released& released) {
  const Lock::One* found = lock == nullptr ? nullptr : lock->Seek(released.owner);
  if (found == nullptr) return lock;
  if (!found->counted()) return lock->Without(released.owner);
  Hold hold = found->hold();
  --hold.count;
  return Apply(lock, Held{lock->mode(), hold});
}

Lock* Apply(Lock* lock, const Ended& ended) {
  return lock == nullptr || lock->Seek(ended.owner) == nullptr ? lock : lock->Without(ended.owner);
}

}  // namespace turnstile
