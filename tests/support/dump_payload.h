// The payload of DUMP and RESTORE: a type byte and the value's encoding, then the RDB version (2
// bytes) and a CRC-64 of all that precedes it (8 bytes), both little-endian. With these functions a
// test can alter the value and make RESTORE read it, instead of only refusing its checksum.

#ifndef TURNSTILE_TESTS_SUPPORT_DUMP_PAYLOAD_H_
#define TURNSTILE_TESTS_SUPPORT_DUMP_PAYLOAD_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace turnstile::testing {

// CRC-64/Jones as Redis computes it: reflected, initial value 0, no final XOR.
uint64_t Crc64(std::string_view bytes);

struct DumpPayload {
  std::string body;  // the type byte and what follows
  uint16_t rdb_version = 0;

  // Nothing if `payload` is too short or its checksum is wrong.
  static std::optional<DumpPayload> Open(std::string_view payload);

  // The payload of this body and version, with a correct checksum.
  std::string Seal() const;
};

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_SUPPORT_DUMP_PAYLOAD_H_
