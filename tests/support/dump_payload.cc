#include "support/dump_payload.h"

#include <array>
#include <cstddef>

namespace turnstile::testing {
namespace {

constexpr std::array<uint64_t, 256> MakeTable() {
  constexpr uint64_t kReflectedPolynomial = 0x95ac9329ac4bc9b5;
  std::array<uint64_t, 256> table{};
  for (uint64_t i = 0; i < table.size(); i++) {
    uint64_t crc = i;
    for (int bit = 0; bit < 8; bit++) {
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? kReflectedPolynomial : 0);
    }
    table[i] = crc;
  }
  return table;
}

constexpr std::array<uint64_t, 256> kTable = MakeTable();

constexpr uint64_t Compute(std::string_view bytes) {
  uint64_t crc = 0;
  for (const char c : bytes) {
    crc = kTable[(crc ^ static_cast<unsigned char>(c)) & 0xff] ^ (crc >> 8);
  }
  return crc;
}

static_assert(Compute("123456789") == 0xe9c6d914c4b8d9ca);  // the check value in Redis' crc64.c

constexpr size_t kVersionSize = 2;
constexpr size_t kFooterSize = kVersionSize + 8;

void AppendLittleEndian(std::string* out, uint64_t value, size_t size) {
  for (size_t i = 0; i < size; i++) out->push_back(static_cast<char>((value >> (8 * i)) & 0xff));
}

}  // namespace

uint64_t Crc64(std::string_view bytes) { return Compute(bytes); }

std::optional<DumpPayload> DumpPayload::Open(std::string_view payload) {
  if (payload.size() < kFooterSize) return std::nullopt;
  const size_t end = payload.size() - kFooterSize;
  const auto low = static_cast<unsigned char>(payload[end]);
  const auto high = static_cast<unsigned char>(payload[end + 1]);
  DumpPayload opened{std::string(payload.substr(0, end)), static_cast<uint16_t>(low | high << 8)};
  if (opened.Seal() != payload) return std::nullopt;
  return opened;
}

std::string DumpPayload::Seal() const {
  std::string payload = body;
  AppendLittleEndian(&payload, rdb_version, kVersionSize);
  AppendLittleEndian(&payload, Crc64(payload), kFooterSize - kVersionSize);
  return payload;
}

}  // namespace turnstile::testing
