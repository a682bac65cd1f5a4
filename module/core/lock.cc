#include "core/lock.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstring>
#include <memory>
#include <tuple>
#include <utility>
#include <vector>

#include "core/check.h"

namespace turnstile {

static_assert(std::endian::native == std::endian::little, "records are stored as they are");

// A lock of one hold, or one hold of a lock of many: a record of two words followed by the owner's
// bytes. Tokens are microseconds of a clock that is close to the wall clock, so the second word
// contains how far the token leads `since`, in milliseconds, and the end of the lease in 42 bits,
// which suffice until the year 2109. A hold for which that is not enough, or that has anything else
// (a linger time, a count, a weight, a cap, a tag), has all its values in full between the two
// words and the owner, and its tag behind the owner: it is wide.
class Lock::HoldRecord : public Lock {
 public:
  static HoldRecord* Make(Mode mode, const Hold& hold) {
    const uint64_t times = Times(hold);
    const size_t size = Size(IsWide(times), hold.owner.bytes.size(), hold.tag.size());
    return ::new (::operator new(size)) HoldRecord(mode, hold, times);
  }

  // See Lock::Adopt.
  static HoldRecord* Adopt(char* bytes, size_t size) {
    if (size < sizeof(HoldRecord)) return nullptr;
    uint64_t words[2];
    std::memcpy(words, bytes, sizeof(words));
    HoldRecord* one = ::new (bytes) HoldRecord(words[0], words[1]);
    if (one->is_table() || one->mode() > Mode::kLimit) return nullptr;
    if (one->wide() && size < Size(/*wide=*/true, /*owner_size=*/0, /*tag_size=*/0)) return nullptr;
    if (size != one->size()) return nullptr;
    const Hold hold = one->hold();
    const bool is_valid = IsWellFormed(hold) && one->times_ == Times(hold) &&
                          (hold.weight == 1 || one->mode() == Mode::kLimit);
    return is_valid ? one : nullptr;
  }

  Hold hold() const {
    Hold hold{.owner = owner(), .token = token()};
    if (wide()) {
      const Wide values = wide_values();
      hold.since = Instant{Millis{values.since}};
      hold.end = Instant{Millis{values.end}};
      hold.linger = Millis{values.linger};
      if (values.cap != 0) hold.cap = Instant{Millis{values.cap}};
      hold.count = values.count;
      hold.weight = values.weight;
      hold.tag = {tail() + kWideSize + owner_size(), values.tag_size};
    } else {
      hold.since =
          MomentOf(token()) - Millis{static_cast<int64_t>(times_ << kEndBits) >> kLeadShift};
      hold.end = narrow_end();
    }
    return hold;
  }

  Token token() const { return Token{head_ & kMaxToken.value}; }
  Owner owner() const { return Owner{{tail() + (wide() ? kWideSize : 0), owner_size()}}; }
  Instant blocks_until() const { return wide() ? hold().blocks_until() : narrow_end(); }
  bool counted() const { return wide() && wide_values().count > 1; }
  uint32_t weight() const { return wide() ? wide_values().weight : 1; }
  size_t size() const {
    return Size(wide(), owner_size(), wide() ? wide_values().tag_size : size_t{0});
  }

  // A record that is about to be removed together with others is marked, so that each list can be
  // swept in one pass. The mark is the bit for "many", which a record never has otherwise.
  void SetDoomed(bool doomed) {
    constexpr uint64_t kBit = uint64_t{1} << kTableAt;
    head_ = doomed ? head_ | kBit : head_ & ~kBit;
  }
  bool doomed() const { return is_table(); }

  // The record may be marked or not.
  static void Free(HoldRecord* record) {
    record->~HoldRecord();
    ::operator delete(record);
  }

  // Takes the values of `hold`, which must have the same owner. Returns false if it needs a record
  // of another size.
  bool Renew(Mode mode, const Hold& hold) {
    const uint64_t times = Times(hold);
    if (IsWide(times) != wide()) return false;
    if (wide() && hold.tag.size() != wide_values().tag_size) return false;
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
    int64_t cap;  // zero: none
    uint32_t count;
    uint32_t weight;
    uint8_t tag_size;
  };
  static constexpr size_t kWideSize = 41;  // without the padding
  static constexpr uint64_t kWideTimes = 1;
  static constexpr int kEndBits = 42;
  static constexpr int kLeadShift = kEndBits + 1;  // the lowest bit says whether it is wide
  static constexpr int kLeadBits = 64 - kLeadShift;

  HoldRecord(uint64_t head, uint64_t times) : Lock(head), times_(times) {}
  HoldRecord(Mode mode, const Hold& hold, uint64_t times) : HoldRecord(Head(mode, hold), times) {
    std::memcpy(tail() + (wide() ? kWideSize : 0), hold.owner.bytes.data(),
                hold.owner.bytes.size());
    if (wide()) SetWide(hold);
  }

  static size_t Size(bool wide, size_t owner_size, size_t tag_size) {
    return sizeof(HoldRecord) + (wide ? kWideSize + tag_size : 0) + owner_size;
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
    if (hold.linger != Millis{0} || hold.count != 1 || hold.weight != 1 || hold.cap.has_value() ||
        !hold.tag.empty() || lead > kMostLead || lead < -kMostLead || end >> kEndBits != 0) {
      return kWideTimes;
    }
    return static_cast<uint64_t>(end) << (64 - kEndBits) |
           static_cast<uint64_t>(lead) << kLeadShift >> kEndBits;
  }
  void SetWide(const Hold& hold) {
    const Wide values{
        .since = hold.since.time_since_epoch().count(),
        .end = hold.end.time_since_epoch().count(),
        .linger = hold.linger.count(),
        .cap = hold.cap.has_value() ? hold.cap->time_since_epoch().count() : 0,
        .count = hold.count,
        .weight = hold.weight,
        .tag_size = static_cast<uint8_t>(hold.tag.size()),
    };
    std::memcpy(tail(), &values, kWideSize);
    // The tag may be the one in this record.
    if (!hold.tag.empty()) {
      std::memmove(tail() + kWideSize + owner_size(), hold.tag.data(), hold.tag.size());
    }
  }

  bool wide() const { return IsWide(times_); }
  Wide wide_values() const {
    Wide values;
    std::memcpy(&values, tail(), kWideSize);
    return values;
  }
  size_t owner_size() const { return (head_ >> kOwnerSizeAt & 0xff) + 1; }
  Instant narrow_end() const {
    return Instant{Millis{static_cast<int64_t>(times_ >> (64 - kEndBits))}};
  }
  char* tail() { return reinterpret_cast<char*>(this + 1); }
  const char* tail() const { return reinterpret_cast<const char*>(this + 1); }

  uint64_t times_;
};

// Up to kMost pointers to records, in one allocation.
class Lock::Leaf {
 public:
  static constexpr size_t kMost = 512;

  Leaf() = default;
  explicit Leaf(std::span<HoldRecord* const> records) {
    Reallocate(records.size());
    Append(records);
  }
  Leaf(Leaf&& other) noexcept : block_(std::exchange(other.block_, nullptr)) {}
  Leaf& operator=(Leaf&& other) noexcept {
    std::swap(block_, other.block_);
    return *this;
  }
  Leaf(const Leaf&) = delete;
  Leaf& operator=(const Leaf&) = delete;
  ~Leaf() { ::operator delete(block_); }

  size_t size() const { return block_ == nullptr ? 0 : block_->size; }
  bool empty() const { return size() == 0; }
  HoldRecord*& operator[](size_t at) { return records()[at]; }
  const HoldRecord* operator[](size_t at) const { return records()[at]; }
  const HoldRecord* back() const { return records()[size() - 1]; }
  std::span<HoldRecord* const> all() const { return {records(), size()}; }

  void Insert(size_t at, HoldRecord* record) {
    const size_t count = size();
    TURNSTILE_DCHECK(at <= count && count < kMost);
    if (count == capacity()) Reallocate(count < 4 ? count + 1 : std::min(count * 3 / 2, kMost));
    std::copy_backward(records() + at, records() + count, records() + count + 1);
    records()[at] = record;
    ++block_->size;
  }
  void Append(std::span<HoldRecord* const> more) {
    if (more.empty()) return;
    const size_t count = size();
    if (count + more.size() > capacity()) Reallocate(count + more.size());
    std::copy(more.begin(), more.end(), records() + count);
    block_->size += static_cast<uint32_t>(more.size());
  }
  void Erase(size_t at) {
    std::copy(records() + at + 1, records() + size(), records() + at);
    Truncate(size() - 1);
  }
  void Truncate(size_t size) {
    block_->size = static_cast<uint32_t>(size);
    if (size < capacity() / 4 || size == 0) Reallocate(size);
  }

  size_t Allocated(size_t (*size_of)(void*)) const {
    return block_ == nullptr ? 0 : size_of(block_);
  }

 private:
  struct Block {  // the records follow
    uint32_t size;
    uint32_t capacity;
  };

  static constexpr size_t kPointerSize = sizeof(void*);

  size_t capacity() const { return block_ == nullptr ? 0 : block_->capacity; }
  HoldRecord** records() const {
    return block_ == nullptr ? nullptr : reinterpret_cast<HoldRecord**>(block_ + 1);
  }

  void Reallocate(size_t capacity) {
    Block* block = nullptr;
    if (capacity > 0) {
      block = static_cast<Block*>(::operator new(sizeof(Block) + capacity * kPointerSize));
      *block = {.size = static_cast<uint32_t>(size()), .capacity = static_cast<uint32_t>(capacity)};
      const std::span<HoldRecord* const> kept = all();
      std::copy(kept.begin(), kept.end(), reinterpret_cast<HoldRecord**>(block + 1));
    }
    ::operator delete(std::exchange(block_, block));
  }

  Block* block_ = nullptr;
};

// Pointers to records in one order, split into leaves. No leaf is empty, except in an empty list.
// Two neighbouring leaves together always have more than half of Leaf::kMost records, so there are
// few leaves.
class Lock::List {
 public:
  size_t leaves() const { return rest_ == nullptr ? 1 : 1 + rest_->size(); }
  Leaf& leaf(size_t index) { return index == 0 ? first_ : (*rest_)[index - 1]; }
  const Leaf& leaf(size_t index) const { return index == 0 ? first_ : (*rest_)[index - 1]; }
  const HoldRecord& record(Position position) const { return *leaf(position.leaf)[position.at]; }
  Position end() const { return {leaves() - 1, leaf(leaves() - 1).size()}; }

  // The first record for which `before` is false, or the end.
  template <typename Before>
  Position Search(Before before) const {
    size_t in = 0;
    if (leaves() > 1) {
      in = FirstNot(leaves(), [&](size_t index) { return before(*leaf(index).back()); });
      if (in == leaves()) return end();
    }
    const Leaf& found = leaf(in);
    return {in, FirstNot(found.size(), [&](size_t at) { return before(*found[at]); })};
  }

  // The number of records before `position`, out of `size`.
  size_t Rank(Position position, size_t size) const {
    size_t rank = position.at;
    if (position.leaf <= leaves() / 2) {
      for (size_t i = 0; i < position.leaf; ++i) rank += leaf(i).size();
      return rank;
    }
    for (size_t i = position.leaf; i < leaves(); ++i) size -= leaf(i).size();
    return size + rank;
  }

  // The position of the record that has `rank` records before it, out of `size`.
  Position PositionOf(size_t rank, size_t size) const {
    if (rank <= size / 2) {
      size_t in = 0;
      for (; rank >= leaf(in).size(); ++in) rank -= leaf(in).size();
      return {in, rank};
    }
    size_t in = leaves() - 1;
    size_t from = size - leaf(in).size();
    for (; rank < from; --in) from -= leaf(in - 1).size();
    return {in, rank - from};
  }

  void Insert(Position position, HoldRecord* record) {
    if (leaf(position.leaf).size() == Leaf::kMost) position = MakeRoom(position);
    leaf(position.leaf).Insert(position.at, record);
  }

  void Erase(Position position) {
    leaf(position.leaf).Erase(position.at);
    if (leaves() == 1) return;
    if (leaf(position.leaf).empty()) {
      Drop(position.leaf);
      return;
    }
    if (position.leaf + 1 < leaves()) MergeWithNext(position.leaf);
    if (position.leaf > 0) MergeWithNext(position.leaf - 1);
  }

  // The records must be sorted.
  void Assign(std::span<HoldRecord* const> records) {
    rest_.reset();
    constexpr size_t kFilled = Leaf::kMost * 3 / 4;  // leaves space for more
    const size_t count = records.size();
    const size_t parts = count <= Leaf::kMost ? 1 : (count + kFilled - 1) / kFilled;
    first_ = Leaf(records.subspan(0, count / parts));
    if (parts == 1) return;
    rest_ = std::make_unique<std::vector<Leaf>>();
    rest_->reserve(parts - 1);
    for (size_t i = 1; i < parts; ++i) {
      const size_t from = count * i / parts;
      rest_->emplace_back(records.subspan(from, count * (i + 1) / parts - from));
    }
  }

  std::vector<HoldRecord*> All() const {
    std::vector<HoldRecord*> records;
    for (size_t i = 0; i < leaves(); ++i) {
      const std::span<HoldRecord* const> more = leaf(i).all();
      records.insert(records.end(), more.begin(), more.end());
    }
    return records;
  }

  void RemoveDoomed() {
    std::vector<HoldRecord*> kept = All();
    std::erase_if(kept, [](const HoldRecord* record) { return record->doomed(); });
    Assign(kept);
  }

  size_t Allocated(size_t (*size_of)(void*)) const {
    size_t bytes = first_.Allocated(size_of);
    if (rest_ == nullptr) return bytes;
    bytes += size_of(rest_.get()) + size_of(rest_->data());
    for (const Leaf& leaf : *rest_) bytes += leaf.Allocated(size_of);
    return bytes;
  }

  // Whether the list is as described above, with `size` records.
  template <typename Before>
  bool IsSound(size_t size, Before before) const {
    const std::vector<HoldRecord*> all = All();
    for (size_t i = 1; i < leaves(); ++i) {
      if (leaf(i - 1).empty() || leaf(i).empty()) return false;
      if (leaf(i - 1).size() + leaf(i).size() <= Leaf::kMost / 2) return false;
    }
    return all.size() == size && std::is_sorted(all.begin(), all.end(), before);
  }

 private:
  // The first of `count` numbers for which `before` is false, as it must be for all after it;
  // otherwise `count`.
  template <typename Before>
  static size_t FirstNot(size_t count, Before before) {
    size_t from = 0;
    size_t to = count;
    while (from < to) {
      const size_t middle = from + (to - from) / 2;
      if (before(middle)) {
        from = middle + 1;
      } else {
        to = middle;
      }
    }
    return from;
  }

  // Splits the full leaf of `position` and returns the new position. A list that grows at its end
  // has full leaves.
  Position MakeRoom(Position position) {
    if (rest_ == nullptr) rest_ = std::make_unique<std::vector<Leaf>>();
    const bool at_end = position == end();
    const size_t stay = at_end ? Leaf::kMost : Leaf::kMost / 2;
    Leaf next(leaf(position.leaf).all().subspan(stay));
    leaf(position.leaf).Truncate(stay);
    rest_->insert(rest_->begin() + static_cast<ptrdiff_t>(position.leaf), std::move(next));
    if (!at_end && position.at <= stay) return position;
    return {position.leaf + 1, position.at - stay};
  }

  void MergeWithNext(size_t index) {
    const Leaf& next = leaf(index + 1);
    if (leaf(index).size() + next.size() > Leaf::kMost / 2) return;
    leaf(index).Append(next.all());
    Drop(index + 1);
  }

  void Drop(size_t index) {
    if (index == 0) {
      first_ = std::move(rest_->front());
      index = 1;
    }
    rest_->erase(rest_->begin() + static_cast<ptrdiff_t>(index - 1));
    if (rest_->empty()) rest_.reset();
  }

  Leaf first_;
  std::unique_ptr<std::vector<Leaf>> rest_;  // null if there are no more
};

// A lock that has, or had, several holds.
class Lock::HoldTable : public Lock {
 public:
  // No two holds may have the same owner.
  HoldTable(Mode mode, std::span<const Hold> holds) : Lock(TableHead(mode)), size_(holds.size()) {
    std::vector<HoldRecord*> made;
    made.reserve(holds.size());
    for (const Hold& hold : holds) {
      made.push_back(HoldRecord::Make(mode, hold));
      NoteLinger(hold);
      added_weight_ += hold.weight - 1;
    }
    ForEachOrder([&made](List& list, auto before) {
      std::sort(made.begin(), made.end(), before);
      list.Assign(made);
    });
    Check();
  }
  ~HoldTable() {
    const List& all = list(Order::kByOwner);
    for (size_t i = 0; i < all.leaves(); ++i) {
      for (HoldRecord* record : all.leaf(i).all()) HoldRecord::Free(record);
    }
  }

  const List& list(Order order) const { return lists_[static_cast<size_t>(order)]; }
  size_t size() const { return size_; }
  bool may_linger() const { return may_linger_; }
  // By how much the weights of all holds exceed their number.
  uint64_t added_weight() const { return added_weight_; }

  // Adds a hold of a new owner, or updates the hold of an existing one. Only the orders in which
  // the hold moves are changed: a renewal changes neither owner nor token.
  void Put(const Hold& hold) {
    NoteLinger(hold);
    if (auto* record = const_cast<HoldRecord*>(Seek(hold.owner)); record != nullptr) {
      Change(record, hold);
    } else {
      added_weight_ += hold.weight - 1;
      InsertInto(Order::kByOwner, record = HoldRecord::Make(mode(), hold));
      InsertInto(Order::kByToken, record);
      InsertInto(Order::kByBlocksUntil, record);
      ++size_;
    }
    Check();
  }

  // The owner must have a hold.
  void Remove(Owner owner) {
    auto* record = const_cast<HoldRecord*>(Seek(owner));
    // Seek returns the lock itself only if it is a single record, not a table.
    TURNSTILE_DCHECK(record != static_cast<Lock*>(this));
    EraseEverywhere(record);
    HoldRecord::Free(record);
    Check();
  }

  // Requires that some hold, but not every one, blocks others only until before `moment`.
  void RemoveEndedBefore(Instant moment) {
    std::vector<HoldRecord*> doomed;
    const List& closing = list(Order::kByBlocksUntil);
    for (Position at; closing.record(at).blocks_until() < moment;
         at = Next(Order::kByBlocksUntil, at)) {
      doomed.push_back(const_cast<HoldRecord*>(&closing.record(at)));
    }
    RemoveAll(doomed);
  }

  // Returns false, and changes nothing, if all holds would end.
  bool EndSessions(const SessionsEnded& ended) {
    std::vector<HoldRecord*> doomed;
    std::vector<HoldRecord*> lingering;
    for (const Owner owner : ended.owners) {
      auto* record = const_cast<HoldRecord*>(Seek(owner));
      if (record == nullptr || record->doomed()) continue;
      const Hold hold = record->hold();
      if (!hold.LiveAt(ended.at)) continue;
      if (hold.linger == Millis{0}) {
        record->SetDoomed(true);
        doomed.push_back(record);
      } else {
        lingering.push_back(record);
      }
    }
    if (doomed.size() == size_) {
      for (HoldRecord* record : doomed) record->SetDoomed(false);
      return false;
    }
    if (!doomed.empty()) RemoveAll(doomed);
    if (!lingering.empty()) EndSessionsOf(lingering, ended.at);
    return true;
  }

 private:
  void NoteLinger(const Hold& hold) { may_linger_ = may_linger_ || hold.linger > Millis{0}; }

  // Whether so many changes at once cost more one by one than a pass over all records.
  bool IsLargePart(size_t changes) const { return changes > size_ / 32; }

  void Change(HoldRecord* record, const Hold& hold) {
    const bool moves_by_token = record->token() != hold.token;
    const bool moves_by_closing = record->blocks_until() != hold.blocks_until();
    added_weight_ += hold.weight;
    added_weight_ -= record->weight();
    if (moves_by_token) EraseFrom(Order::kByToken, record);
    if (moves_by_closing) EraseFrom(Order::kByBlocksUntil, record);
    if (!record->Renew(mode(), hold)) {
      HoldRecord* other =
          HoldRecord::Make(mode(), hold);  // first, because the owner's bytes may be in `record`
      ReplaceIn(Order::kByOwner, record, other);
      if (!moves_by_token) ReplaceIn(Order::kByToken, record, other);
      if (!moves_by_closing) ReplaceIn(Order::kByBlocksUntil, record, other);
      HoldRecord::Free(std::exchange(record, other));
    }
    if (moves_by_token) InsertInto(Order::kByToken, record);
    if (moves_by_closing) InsertInto(Order::kByBlocksUntil, record);
  }

  // No record may be named twice.
  void RemoveAll(std::span<HoldRecord* const> doomed) {
    TURNSTILE_DCHECK(doomed.size() < size_);
    if (IsLargePart(doomed.size())) {
      for (HoldRecord* record : doomed) {
        record->SetDoomed(true);
        added_weight_ -= record->weight() - 1;
      }
      for (List& list : lists_) list.RemoveDoomed();
      size_ -= doomed.size();
    } else {
      for (HoldRecord* record : doomed) EraseEverywhere(record);
    }
    for (HoldRecord* record : doomed) HoldRecord::Free(record);
    Check();
  }

  void EndSessionsOf(std::span<HoldRecord* const> lingering, Instant at) {
    const bool sort = IsLargePart(lingering.size());
    for (HoldRecord* record : lingering) {
      if (!record->hold().LiveAt(at)) continue;  // named twice
      const Hold hold = AfterSession(record->hold(), at);
      if (!sort) EraseFrom(Order::kByBlocksUntil, record);
      [[maybe_unused]] const bool renewed = record->Renew(mode(), hold);
      TURNSTILE_DCHECK(renewed);  // it is wide, because it lingers
      if (!sort) InsertInto(Order::kByBlocksUntil, record);
    }
    if (sort) {
      ForOrder(Order::kByBlocksUntil, [](List& list, auto before) {
        std::vector<HoldRecord*> records = list.All();
        std::sort(records.begin(), records.end(), before);
        list.Assign(records);
      });
    }
    Check();
  }

  void InsertInto(Order order, HoldRecord* record) {
    ForOrder(order, [record](List& list, auto before) {
      list.Insert(PositionIn(list, record, before), record);
    });
  }
  void EraseFrom(Order order, const HoldRecord* record) {
    ForOrder(order, [record](List& list, auto before) {
      const Position position = PositionIn(list, record, before);
      TURNSTILE_DCHECK(&list.record(position) == record);
      list.Erase(position);
    });
  }
  // The two records must be equal in this order.
  void ReplaceIn(Order order, const HoldRecord* record, HoldRecord* other) {
    ForOrder(order, [&](List& list, auto before) {
      const Position position = PositionIn(list, record, before);
      TURNSTILE_DCHECK(&list.record(position) == record);
      list.leaf(position.leaf)[position.at] = other;
    });
  }
  void EraseEverywhere(const HoldRecord* record) {
    for (const Order order : kOrders) EraseFrom(order, record);
    added_weight_ -= record->weight() - 1;
    --size_;
  }

  template <typename Before>
  static Position PositionIn(const List& list, const HoldRecord* record, Before before) {
    return list.Search([&](const HoldRecord& other) { return before(&other, record); });
  }

  // Calls `act` with a list and its order, in which no two records are equal.
  template <typename Act>
  void ForOrder(Order order, Act act) {
    List& list = lists_[static_cast<size_t>(order)];
    switch (order) {
      case Order::kByOwner:
        return act(list, [](const HoldRecord* a, const HoldRecord* b) {
          return a->owner().bytes < b->owner().bytes;
        });
      case Order::kByToken:
        return act(list, [](const HoldRecord* a, const HoldRecord* b) {
          if (a->token() != b->token()) return a->token() < b->token();
          return a->owner().bytes < b->owner().bytes;
        });
      case Order::kByBlocksUntil:
        return act(list, [](const HoldRecord* a, const HoldRecord* b) {
          const Instant blocks_until = a->blocks_until();
          const Instant other = b->blocks_until();
          return blocks_until != other ? blocks_until < other : a->owner().bytes < b->owner().bytes;
        });
    }
  }
  template <typename Act>
  void ForEachOrder(Act act) {
    for (const Order order : kOrders) ForOrder(order, act);
  }

  // With TURNSTILE_DCHECKS only. Most of the larger locks are checked only occasionally.
  void Check() {
#ifdef TURNSTILE_DCHECKS
    constexpr size_t kSmall = 64;
    constexpr size_t kNowAndThen = 97;
    if (size_ > kSmall && size_ % kNowAndThen != 0) return;
    ForEachOrder(
        [this](const List& list, auto before) { TURNSTILE_DCHECK(list.IsSound(size_, before)); });
#endif
  }

  static constexpr std::array kOrders = {Order::kByOwner, Order::kByToken, Order::kByBlocksUntil};

  size_t size_;
  uint64_t added_weight_ = 0;
  bool may_linger_ = false;  // some hold has lingered, or will
  std::array<List, 3> lists_;
};

Lock* Lock::Adopt(char* bytes, size_t size) { return HoldRecord::Adopt(bytes, size); }

Lock* Lock::Make(const HoldSet& held) { return HoldRecord::Make(held.mode, held.hold); }

Lock* Lock::Make(Mode mode, std::span<const Hold> holds) {
  if (holds.size() == 1) return HoldRecord::Make(mode, holds.front());
  return new HoldTable(mode, holds);
}

void Lock::operator delete(Lock* lock, std::destroying_delete_t /*destroying*/) {
  if (lock->is_table()) {
    static_cast<HoldTable*>(lock)->~HoldTable();
  } else {
    static_cast<HoldRecord*>(lock)->~HoldRecord();
  }
  ::operator delete(lock);
}

const Lock::List& Lock::list(Order order) const {
  return static_cast<const HoldTable*>(this)->list(order);
}

size_t Lock::size() const { return is_table() ? static_cast<const HoldTable*>(this)->size() : 1; }

Lock::Position Lock::end(Order order) const {
  return is_table() ? list(order).end() : Position{.leaf = 0, .at = 1};
}

Lock::Position Lock::Next(Order order, Position position) const {
  ++position.at;
  if (is_table() && position.at == list(order).leaf(position.leaf).size() &&
      position.leaf + 1 < list(order).leaves()) {
    return {position.leaf + 1, 0};
  }
  return position;
}

Lock::Position Lock::Previous(Order order, Position position) const {
  if (position.at > 0) return {position.leaf, position.at - 1};
  return {position.leaf - 1, list(order).leaf(position.leaf - 1).size() - 1};
}

const Lock::HoldRecord& Lock::record(Order order, Position position) const {
  return is_table() ? list(order).record(position) : static_cast<const HoldRecord&>(*this);
}

std::string_view Lock::AsBytes() const {
  const HoldRecord& one = record(Order::kByOwner, begin());
  return {reinterpret_cast<const char*>(&one), one.size()};
}

Hold Lock::Iterator::operator*() const { return lock_->record(order_, position_).hold(); }

Lock::Holds Lock::holds(Order order) const {
  return {{this, order, begin()}, {this, order, end(order)}};
}

Hold Lock::at(Order order, size_t index) const {
  return record(order, is_table() ? list(order).PositionOf(index, size()) : begin()).hold();
}

Hold Lock::first(Order order) const { return record(order, begin()).hold(); }

Hold Lock::last(Order order) const {
  return (is_table() ? *list(order).leaf(list(order).leaves() - 1).back()
                     : static_cast<const HoldRecord&>(*this))
      .hold();
}

template <typename Before>
Lock::Position Lock::Search(Order order, Before before) const {
  if (is_table()) return list(order).Search(before);
  return before(static_cast<const HoldRecord&>(*this)) ? end(order) : begin();
}

const Lock::HoldRecord* Lock::Seek(Owner owner) const {
  if (!is_table()) {
    const auto* one = static_cast<const HoldRecord*>(this);
    return one->owner() == owner ? one : nullptr;
  }
  const Position found = Search(
      Order::kByOwner, [&](const HoldRecord& other) { return other.owner().bytes < owner.bytes; });
  if (found == end(Order::kByOwner)) return nullptr;
  const HoldRecord& one = record(Order::kByOwner, found);
  return one.owner() == owner ? &one : nullptr;
}

std::optional<Hold> Lock::Find(Owner owner) const {
  const HoldRecord* found = Seek(owner);
  if (found == nullptr) return std::nullopt;
  return found->hold();
}

bool Lock::HasLive(Token token, Instant now) const {
  Position at = Search(Order::kByToken, [&](const HoldRecord& one) { return one.token() < token; });
  for (; at != end(Order::kByToken); at = Next(Order::kByToken, at)) {
    const HoldRecord& one = record(Order::kByToken, at);
    if (one.token() != token) break;
    if (one.hold().LiveAt(now)) return true;
  }
  return false;
}

bool Lock::MayLinger() const {
  return is_table() ? static_cast<const HoldTable*>(this)->may_linger()
                    : first(Order::kByOwner).linger > Millis{0};
}

size_t Lock::CountBlocking(Instant now) const {
  const Position first = Search(Order::kByBlocksUntil,
                                [&](const HoldRecord& one) { return one.blocks_until() < now; });
  if (!is_table()) return 1 - first.at;
  return size() - list(Order::kByBlocksUntil).Rank(first, size());
}

uint64_t Lock::WeightBlocking(Instant now) const {
  const size_t blocking = CountBlocking(now);
  if (!is_table()) {
    return blocking == 0 ? 0 : static_cast<const HoldRecord*>(this)->weight();
  }
  const uint64_t added = static_cast<const HoldTable*>(this)->added_weight();
  if (added == 0) return blocking;
  // What the holds from `position` on, `count` of them, weigh more than 1 each.
  const auto added_by = [this](Position position, size_t count) {
    uint64_t sum = 0;
    for (; count > 0; --count, position = Next(Order::kByBlocksUntil, position)) {
      sum += record(Order::kByBlocksUntil, position).weight() - 1;
    }
    return sum;
  };
  const size_t ended = size() - blocking;
  if (ended <= blocking) return blocking + added - added_by(begin(), ended);
  return blocking + added_by(list(Order::kByBlocksUntil).PositionOf(ended, size()), blocking);
}

size_t Lock::Allocated(size_t (*size_of)(void*)) const {
  size_t bytes = size_of(const_cast<Lock*>(this));
  if (!is_table()) return bytes;
  for (const Order order : {Order::kByOwner, Order::kByToken, Order::kByBlocksUntil}) {
    bytes += list(order).Allocated(size_of);
  }
  const List& all = list(Order::kByOwner);
  for (size_t i = 0; i < all.leaves(); ++i) {
    for (HoldRecord* one : all.leaf(i).all()) bytes += size_of(one);
  }
  return bytes;
}

Lock* Lock::Without(Owner holder) {
  if (size() == 1) return nullptr;
  static_cast<HoldTable*>(this)->Remove(holder);
  return this;
}

Hold AfterSession(const Hold& hold, Instant at) {
  Hold lingers = hold;
  const Millis until = std::max(at - Millis{1}, kMinInstant) - kMinInstant;
  lingers.linger = std::min(hold.linger + until, kMaxInstant - kMinInstant);
  lingers.end = kMinInstant;
  return lingers;
}

bool Joins(const Lock* lock, Mode mode) {
  return lock != nullptr && mode != Mode::kExclusive && lock->mode() == mode;
}

bool Replaces(const Lock* lock, const HoldSet& held) {
  return lock != nullptr && !Joins(lock, held.mode) &&
         (lock->size() > 1 || !lock->Find(held.hold.owner).has_value());
}

bool EndsHold(const Lock& lock, const HoldReleased& released) {
  const Lock::HoldRecord* hold = lock.Seek(released.owner);
  return hold != nullptr && !hold->counted();
}

Lock* Apply(Lock* lock, const HoldSet& held) {
  TURNSTILE_DCHECK(IsWellFormed(held.hold));
  if (lock != nullptr && !lock->is_table()) {
    auto& one = static_cast<Lock::HoldRecord&>(*lock);
    if (one.owner() == held.hold.owner && one.Renew(held.mode, held.hold)) return lock;
    if (one.owner() == held.hold.owner || !Joins(lock, held.mode)) return Lock::Make(held);
    return Lock::Make(held.mode, std::array{one.hold(), held.hold});
  }
  if (!Joins(lock, held.mode)) return Lock::Make(held);
  static_cast<Lock::HoldTable*>(lock)->Put(held.hold);
  return lock;
}

Lock* Apply(Lock* lock, const HoldReleased& released) {
  const Lock::HoldRecord* found = lock == nullptr ? nullptr : lock->Seek(released.owner);
  if (found == nullptr) return lock;
  if (!found->counted()) return lock->Without(released.owner);
  Hold hold = found->hold();
  --hold.count;
  return Apply(lock, HoldSet{lock->mode(), hold});
}

Lock* Apply(Lock* lock, const HoldEnded& ended) {
  return lock == nullptr || lock->Seek(ended.owner) == nullptr ? lock : lock->Without(ended.owner);
}

Lock* Apply(Lock* lock, const HoldsExpired& expired) {
  if (lock == nullptr || lock->blocks_until() < expired.before) return nullptr;
  if (lock->first(Lock::Order::kByBlocksUntil).blocks_until() < expired.before) {
    static_cast<Lock::HoldTable*>(lock)->RemoveEndedBefore(expired.before);
  }
  return lock;
}

Lock* Apply(Lock* lock, const SessionsEnded& ended) {
  if (lock == nullptr) return nullptr;
  if (lock->is_table()) {
    return static_cast<Lock::HoldTable*>(lock)->EndSessions(ended) ? lock : nullptr;
  }
  const Hold hold = static_cast<const Lock::HoldRecord*>(lock)->hold();
  const bool named =
      std::find(ended.owners.begin(), ended.owners.end(), hold.owner) != ended.owners.end();
  if (!named || !hold.LiveAt(ended.at)) return lock;
  if (hold.linger == Millis{0}) return nullptr;
  return Apply(lock, HoldSet{lock->mode(), AfterSession(hold, ended.at)});
}

}  // namespace turnstile
