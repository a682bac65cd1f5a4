#include "core/encoding.h"

namespace turnstile {
namespace {

constexpr size_t kWord = 8;
constexpr size_t kHeader = 3 * kWord;

// Little-endian, whatever the machine.
void PutWord(std::string& out, uint64_t word) {
  for (size_t i = 0; i < kWord; ++i) out += static_cast<char>(word >> (8 * i) & 0xff);
}

uint64_t GetWord(std::string_view bytes, size_t index) {
  uint64_t word = 0;
  for (size_t i = 0; i < kWord; ++i) {
    word |= uint64_t{static_cast<unsigned char>(bytes[index * kWord + i])} << (8 * i);
  }
  return word;
}

Instant ToMoment(uint64_t word) { return Instant{Millis{static_cast<int64_t>(word)}}; }

uint64_t ToWord(Instant moment) { return static_cast<uint64_t>(moment.time_since_epoch().count()); }

}  // namespace

std::string Encode(const Hold& hold) {
  std::string out;
  out.reserve(kHeader + hold.owner.bytes.size());
  PutWord(out, hold.token.value);
  PutWord(out, ToWord(hold.since));
  PutWord(out, ToWord(hold.end));
  out += hold.owner.bytes;
  return out;
}

std::optional<Hold> Decode(std::string_view bytes, EncodingVersion version) {
  if (version != EncodingVersion::kOneHold || bytes.size() < kHeader) return std::nullopt;
  const Hold hold{.owner = Owner{bytes.substr(kHeader)},
                  .token = Token{GetWord(bytes, 0)},
                  .since = ToMoment(GetWord(bytes, 1)),
                  .end = ToMoment(GetWord(bytes, 2))};
  if (!IsWellFormed(hold)) return std::nullopt;
  return hold;
}

}  // namespace turnstile
