#include "core/lock.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

namespace turnstile {

// A lock of one hold, or one hold of a lock of many: the base's word, two moments, what few holds
// have if this one has it, the owner's bytes.
class Lock::One : public Lock {
 public:
  static One* Make(Mode mode, const Hold& hold) {
    const bool rare = HasRare(hold);
    const size_t bytes = sizeof(One) + (rare ? sizeof(Rare) : 0) + hold.owner.bytes.size();
    return ::new (::operator new(bytes)) One(mode, hold, rare);
  }

  Hold hold() const {
    Hold hold{.owner = owner(),
              .token = Token{token_},
              .since = Instant{Millis{static_cast<int64_t>(since_)}},
              .end = Instant{Millis{end_}}};
    if (has_rare_) {
      Rare rare;
      std::memcpy(&rare, behind(), sizeof(rare));
      hold.linger = rare.linger;
      hold.count = rare.count;
    }
    return hold;
  }

  Owner owner() const {
    return Owner{{behind() + (has_rare_ ? sizeof(Rare) : 0), size_t{owner_size_less_one_} + 1}};
  }
  Token token() const { return Token{token_}; }
  Instant closes() const { return has_rare_ ? hold().closes() : Instant{Millis{end_}}; }

  // Takes on the values of `hold`, which has the same owner. False: there is no room for them.
  bool Renew(Mode mode, const Hold& hold) {
    if (HasRare(hold) && !has_rare_) return false;
    mode_ = static_cast<uint64_t>(mode) & 0x3;
    Set(hold);
    return true;
  }

 private:
  struct Rare {
    Millis linger;
    uint32_t count;
  };

  One(Mode mode, const Hold& hold, bool rare) : Lock(mode, /*many=*/false), has_rare_(rare) {
    owner_size_less_one_ = (hold.owner.bytes.size() - 1) & 0xff;
    Set(hold);
    std::memcpy(behind() + (rare ? sizeof(Rare) : 0), hold.owner.bytes.data(),
                hold.owner.bytes.size());
  }

  static bool HasRare(const Hold& hold) { return hold.linger != Millis{0} || hold.count != 1; }

  void Set(const Hold& hold) {
    token_ = hold.token.value & ((uint64_t{1} << 53) - 1);
    since_ = static_cast<uint64_t>(hold.since.time_since_epoch().count()) & (~uint64_t{0} >> 1);
    end_ = hold.end.time_since_epoch().count();
    if (!has_rare_) return;
    const Rare rare{hold.linger, hold.count};
    std::memcpy(behind(), &rare, sizeof(rare));
  }

  char* behind() { return reinterpret_cast<char*>(this + 1); }
  const char* behind() const { return reinterpret_cast<const char*>(this + 1); }

  uint64_t since_ : 63 = 0;
  uint64_t has_rare_ : 1;
  int64_t end_ = 0;
};

// A lock that has, or had, several holds.
class Lock::Many : public Lock {
 public:
  // The holds are of different owners.
  Many(Mode mode, std::span<const Hold> holds) : Lock(mode, /*many=*/true) {
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
      One* larger = One::Make(mode(), hold);
      delete record;
      record = larger;
    }
    ForEachOrder([record](std::vector<One*>& sorted, auto before) {
      sorted.insert(std::lower_bound(sorted.begin(), sorted.end(), record, before), record);
    });
  }

  void Remove(Owner owner) { delete Take(owner); }

 private:
  // Takes the owner's record out, or returns null.
  One* Take(Owner owner) {
    const size_t index =
        Search(Order::kByOwner, [&](const One& one) { return one.owner().bytes < owner.bytes; });
    if (index == size() || this->record(Order::kByOwner, index).owner() != owner) return nullptr;
    One* record = records(Order::kByOwner)[index];
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

Lock* Lock::Make(const Held& held) { return One::Make(held.mode, held.hold); }

Lock* Lock::Make(Mode mode, std::span<const Hold> holds) {
  if (holds.size() == 1) return One::Make(mode, holds.front());
  return new Many(mode, holds);
}

void Lock::operator delete(Lock* lock, std::destroying_delete_t /*destroying*/) {
  if (lock->many_) {
    static_cast<Many*>(lock)->~Many();
  } else {
    static_cast<One*>(lock)->~One();
  }
  ::operator delete(lock);
}

size_t Lock::size() const {
  return many_ ? static_cast<const Many*>(this)->records(Order::kByOwner).size() : 1;
}

const Lock::One& Lock::record(Order order, size_t index) const {
  if (!many_) return static_cast<const One&>(*this);
  return *static_cast<const Many*>(this)->records(order)[index];
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

std::optional<Hold> Lock::Find(Owner owner) const {
  const size_t index =
      Search(Order::kByOwner, [&](const One& one) { return one.owner().bytes < owner.bytes; });
  if (index == size()) return std::nullopt;
  const One& found = record(Order::kByOwner, index);
  return found.owner() == owner ? std::optional(found.hold()) : std::nullopt;
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
  if (!many_) return bytes;
  for (const Order order : {Order::kByOwner, Order::kByToken, Order::kByClosing}) {
    const std::vector<One*>& records = static_cast<const Many*>(this)->records(order);
    if (records.capacity() > 0) bytes += size_of(const_cast<One**>(records.data()));
  }
  for (One* one : static_cast<const Many*>(this)->records(Order::kByOwner)) bytes += size_of(one);
  return bytes;
}

bool Joins(const Lock* lock, Mode mode) {
  return lock != nullptr && mode != Mode::kExclusive && lock->mode() == mode;
}

bool Replaces(const Lock* lock, const Held& held) {
  return lock != nullptr && !Joins(lock, held.mode) &&
         (lock->size() > 1 || !lock->Find(held.hold.owner).has_value());
}

bool EndsHold(const Lock& lock, const Released& released) {
  const std::optional<Hold> hold = lock.Find(released.owner);
  return hold.has_value() && hold->count == 1;
}

Lock* Apply(Lock* lock, const Held& held) {
  if (lock != nullptr && !lock->many_) {
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
  if (lock == nullptr) return nullptr;
  std::optional<Hold> hold = lock->Find(released.owner);
  if (!hold.has_value()) return lock;
  if (hold->count == 1) return Apply(lock, Ended{released.owner});
  --hold->count;
  return Apply(lock, Held{lock->mode(), *hold});
}

Lock* Apply(Lock* lock, const Ended& ended) {
  if (lock == nullptr || !lock->Find(ended.owner).has_value()) return lock;
  if (lock->size() == 1) return nullptr;
  static_cast<Lock::Many*>(lock)->Remove(ended.owner);
  return lock;
}

}  // namespace turnstile
