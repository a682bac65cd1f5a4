#include "core/encoding.h"

#include <algorithm>
#include <limits>
#include <new>
#include <vector>

namespace turnstile {
namespace {

// Numbers are little-endian on every machine.
void Put(std::string& out, uint64_t number, size_t bytes) {
  for (size_t i = 0; i < bytes; ++i) out += static_cast<char>(number >> (8 * i) & 0xff);
}

uint64_t Number(Instant moment) { return static_cast<uint64_t>(moment.time_since_epoch().count()); }

// Reads bytes from left to right. Reading beyond the end returns zero or nothing, which is not
// valid for any field, and makes the reader fail.
class ByteReader {
 public:
  explicit ByteReader(std::string_view bytes) : rest_(bytes) {}

  bool AtEnd() const { return rest_.empty(); }
  bool failed() const { return failed_; }

  std::string_view TakeBytes(size_t count) {
    failed_ = failed_ || rest_.size() < count;
    if (failed_) return {};
    const std::string_view taken = rest_.substr(0, count);
    rest_.remove_prefix(count);
    return taken;
  }

  uint64_t TakeNumber(size_t bytes) {
    uint64_t number = 0;
    size_t shift = 0;
    for (const char byte : TakeBytes(bytes)) {
      number |= uint64_t{static_cast<unsigned char>(byte)} << shift;
      shift += 8;
    }
    return number;
  }

  // A value out of range gives a time that is not valid in any hold.
  Instant TakeInstant() { return Instant{TakeMillis()}; }
  Millis TakeMillis() {
    const uint64_t number = TakeNumber(8);
    constexpr auto kMost = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    return Millis{number > kMost ? -1 : static_cast<int64_t>(number)};
  }

 private:
  std::string_view rest_;
  bool failed_ = false;
};

// Requires two holds or more.
std::unique_ptr<Lock> DecodeHolds(ByteReader& reader, Mode mode) {
  std::vector<Hold> holds;
  while (!reader.AtEnd()) {
    Hold hold{};
    hold.token = Token{reader.TakeNumber(8)};
    hold.since = reader.TakeInstant();
    hold.end = reader.TakeInstant();
    hold.linger = reader.TakeMillis();
    if (const Instant cap = reader.TakeInstant(); cap != Instant{}) hold.cap = cap;
    hold.count = static_cast<uint32_t>(reader.TakeNumber(4));
    hold.weight = static_cast<uint32_t>(reader.TakeNumber(4));
    const size_t tag_size = reader.TakeNumber(1);
    hold.owner = Owner{reader.TakeBytes(reader.TakeNumber(2))};
    hold.tag = reader.TakeBytes(tag_size);
    if (reader.failed() || !IsWellFormed(hold)) return nullptr;
    if (hold.weight != 1 && mode != Mode::kLimit) return nullptr;
    if (!holds.empty() && hold.owner.bytes <= holds.back().owner.bytes) return nullptr;
    holds.push_back(hold);
  }
  if (holds.size() < 2) return nullptr;
  return std::unique_ptr<Lock>(Lock::Make(mode, holds));
}

std::unique_ptr<Lock> DecodeOneRecord(std::string_view bytes) {
  auto* copy = static_cast<char*>(::operator new(bytes.size()));
  std::copy(bytes.begin(), bytes.end(), copy);
  std::unique_ptr<Lock> lock(Lock::Adopt(copy, bytes.size()));
  if (lock == nullptr) ::operator delete(copy);
  return lock;
}

// Several holds are preceded by the first word of a lock of many, which no record begins with.
std::unique_ptr<Lock> DecodeRecords(std::string_view bytes) {
  ByteReader reader(bytes);
  const uint64_t head = reader.TakeNumber(8);
  if (head >> Lock::kTableAt == 0) return DecodeOneRecord(bytes);
  for (const Mode mode : {Mode::kShared, Mode::kLimit}) {
    if (head == Lock::TableHead(mode)) return DecodeHolds(reader, mode);
  }
  return nullptr;
}

}  // namespace

Encoded::Encoded(const Lock& lock) {
  if (lock.size() == 1) {
    bytes_ = lock.AsBytes();
    return;
  }
  std::string& out = several_;
  Put(out, Lock::TableHead(lock.mode()), 8);
  for (const Hold& hold : lock.holds(Lock::Order::kByOwner)) {
    Put(out, hold.token.value, 8);
    Put(out, Number(hold.since), 8);
    Put(out, Number(hold.end), 8);
    Put(out, static_cast<uint64_t>(hold.linger.count()), 8);
    Put(out, Number(hold.cap.value_or(Instant{})), 8);
    Put(out, hold.count, 4);
    Put(out, hold.weight, 4);
    Put(out, hold.tag.size(), 1);
    Put(out, hold.owner.bytes.size(), 2);
    out += hold.owner.bytes;
    out += hold.tag;
  }
  bytes_ = out;
}

std::string Encode(const Lock& lock) { return std::string(Encoded(lock).bytes()); }

std::unique_ptr<Lock> Decode(std::string_view bytes, EncodingVersion version) {
  return version == EncodingVersion::kRecords ? DecodeRecords(bytes) : nullptr;
}

std::unique_ptr<Lock> DecodeAndTake(char* bytes, size_t size, EncodingVersion version) {
  if (version == EncodingVersion::kRecords) {
    if (Lock* lock = Lock::Adopt(bytes, size); lock != nullptr) return std::unique_ptr<Lock>(lock);
  }
  std::unique_ptr<Lock> lock = Decode({bytes, size}, version);
  ::operator delete(bytes);
  return lock;
}

}  // namespace turnstile
