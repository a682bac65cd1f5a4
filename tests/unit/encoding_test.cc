// A lock as bytes: what was written comes back, and nothing else is believed.

#include "core/encoding.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "printers.h"

namespace turnstile {
namespace {

using namespace std::string_literals;

constexpr Hold kExample{.owner = Owner{"worker-7"},
                        .token = Token{1'700'000'000'123'456},
                        .since = Instant{Millis{1'700'000'000'123}},
                        .end = Instant{Millis{1'700'000'030'123}}};

// The bytes of kExample, written down by hand. Stored data looks like this: they never change.
const std::string kExampleBytes =
    "\x40\x22\x20\x18\x24\x0a\x06\x00"  // token, least byte first
    "\x7b\x68\xe5\xcf\x8b\x01\x00\x00"  // since
    "\xab\xdd\xe5\xcf\x8b\x01\x00\x00"  // end
    "worker-7"s;

constexpr size_t kOwnerAt = 24;

std::optional<Hold> DecodeNow(std::string_view bytes) { return Decode(bytes, kCurrentEncoding); }

// The edges of every field, in every combination.
std::vector<Hold> Edges(const std::vector<std::string>& owners) {
  std::vector<Hold> holds;
  for (const std::string& owner : owners) {
    for (const Token token : {kMinToken, Token{255}, Token{256}, kExample.token, kMaxToken}) {
      for (const Instant since : {kMinInstant, kExample.since, kMaxInstant}) {
        for (const Instant end : {kMinInstant, kExample.end, kMaxInstant}) {
          holds.push_back({Owner{owner}, token, since, end});
        }
      }
    }
  }
  return holds;
}

TEST(Encoding, WritesTheseBytes) {
  EXPECT_EQ(Encode(kExample), kExampleBytes);
  EXPECT_EQ(DecodeNow(kExampleBytes), kExample);
}

TEST(Encoding, VersionsKeepTheirNumbers) {
  EXPECT_EQ(static_cast<int>(EncodingVersion::kOneHold), 1);
  EXPECT_EQ(kCurrentEncoding, EncodingVersion::kOneHold);
}

TEST(Encoding, EdgesComeBack) {
  const std::vector<std::string> owners = {"o", "\0"s, "\xff", std::string(256, '\0'),
                                           std::string(256, '\xff')};
  for (const Hold& hold : Edges(owners)) {
    const std::string bytes = Encode(hold);
    EXPECT_EQ(bytes.size(), kOwnerAt + hold.owner.bytes.size());
    EXPECT_EQ(DecodeNow(bytes), hold);
  }
}

TEST(Encoding, RandomHoldsComeBack) {
  constexpr uint64_t kSeed = 99;
  SCOPED_TRACE(kSeed);
  std::mt19937_64 random(kSeed);
  for (int i = 0; i < 20'000; ++i) {
    std::string owner(1 + random() % kMaxOwnerBytes, '\0');
    std::generate(owner.begin(), owner.end(), [&] { return static_cast<char>(random() & 0xff); });
    const auto moment = [&] {
      return Instant{Millis{static_cast<int64_t>(random() >> (11 + random() % 53))}};
    };
    const Token token{1 + (random() >> 11 >> random() % 53) % kMaxToken.value};
    const Hold hold{.owner = Owner{owner}, .token = token, .since = moment(), .end = moment()};
    ASSERT_TRUE(IsWellFormed(hold));
    ASSERT_EQ(DecodeNow(Encode(hold)), hold);
  }
}

TEST(Encoding, DecodedOwnerIsAViewIntoTheBytes) {
  const std::string bytes = kExampleBytes;
  EXPECT_EQ(DecodeNow(bytes)->owner.bytes.data(), bytes.data() + kOwnerAt);
}

TEST(Encoding, CutAtAnyByte) {
  for (size_t size = 0; size < kExampleBytes.size(); ++size) {
    // A copy of exactly that size, so that a sanitizer sees a step beyond it.
    const std::vector<char> cut(kExampleBytes.begin(),
                                kExampleBytes.begin() + static_cast<std::ptrdiff_t>(size));
    const auto hold = DecodeNow({cut.data(), cut.size()});
    if (size <= kOwnerAt) {
      EXPECT_EQ(hold, std::nullopt) << size;
    } else {
      // The owner has no length of its own: the container of the bytes has.
      ASSERT_TRUE(hold.has_value()) << size;
      EXPECT_EQ(hold->owner.bytes, "worker-7"s.substr(0, size - kOwnerAt));
      EXPECT_EQ(hold->token, kExample.token);
    }
  }
}

TEST(Encoding, OwnerOf1To256Bytes) {
  const std::string header = kExampleBytes.substr(0, kOwnerAt);
  EXPECT_EQ(DecodeNow(header), std::nullopt);
  EXPECT_TRUE(DecodeNow(header + "o").has_value());
  EXPECT_TRUE(DecodeNow(header + std::string(256, 'o')).has_value());
  EXPECT_EQ(DecodeNow(header + std::string(257, 'o')), std::nullopt);
  EXPECT_EQ(DecodeNow(header + std::string(size_t{10} << 20, 'o')), std::nullopt);
}

// A flipped bit is noticed or gives another hold, well-formed and with bytes of its own: no two
// byte strings mean the same.
TEST(Encoding, AnyFlippedBit) {
  int rejected = 0;
  for (size_t bit = 0; bit < kExampleBytes.size() * 8; ++bit) {
    SCOPED_TRACE(bit);
    std::string bytes = kExampleBytes;
    bytes[bit / 8] = static_cast<char>(bytes[bit / 8] ^ (1 << bit % 8));
    const auto hold = DecodeNow(bytes);
    // Each number is below 2^53: its highest eleven bits must be clear.
    const bool beyond = bit < kOwnerAt * 8 && bit % 64 >= 53;
    EXPECT_EQ(hold.has_value(), !beyond);
    if (hold.has_value()) {
      EXPECT_TRUE(IsWellFormed(*hold));
      EXPECT_FALSE(*hold == kExample);
      EXPECT_EQ(Encode(*hold), bytes);
    } else {
      ++rejected;
    }
  }
  EXPECT_EQ(rejected, 3 * 11);
}

TEST(Encoding, NumbersOutOfRange) {
  const auto bytes_with = [](size_t field, uint64_t word) {
    std::string bytes = kExampleBytes;
    for (size_t i = 0; i < 8; ++i) bytes[field * 8 + i] = static_cast<char>(word >> (8 * i) & 0xff);
    return bytes;
  };
  constexpr uint64_t kLast = (uint64_t{1} << 53) - 1;
  for (size_t field = 0; field < 3; ++field) {
    SCOPED_TRACE(field);
    EXPECT_EQ(DecodeNow(bytes_with(field, 0)).has_value(), field != 0);  // token 0 is none
    EXPECT_TRUE(DecodeNow(bytes_with(field, 1)).has_value());
    EXPECT_TRUE(DecodeNow(bytes_with(field, kLast)).has_value());
    for (const uint64_t word : {kLast + 1, kLast + 2, uint64_t{1} << 62, uint64_t{1} << 63,
                                (uint64_t{1} << 63) + 1, ~uint64_t{0}}) {
      EXPECT_EQ(DecodeNow(bytes_with(field, word)), std::nullopt) << word;
    }
  }
}

TEST(Encoding, UnknownVersions) {
  for (const int version : {0, 2, 3, 255, 1023, -1, INT32_MAX, INT32_MIN}) {
    EXPECT_EQ(Decode(kExampleBytes, static_cast<EncodingVersion>(version)), std::nullopt)
        << version;
  }
}

TEST(Encoding, RandomBytesAreRejectedOrExact) {
  constexpr uint64_t kSeed = 1234;
  SCOPED_TRACE(kSeed);
  std::mt19937_64 random(kSeed);
  int decoded = 0;
  for (int i = 0; i < 50'000; ++i) {
    std::string bytes(random() % 300, '\0');
    for (size_t at = 0; at < bytes.size(); ++at) {
      // Small high bytes now and then, so that some numbers are in range.
      const bool high = at < kOwnerAt && at % 8 >= 6;
      bytes[at] = static_cast<char>(high && random() % 4 != 0 ? 0 : random() & 0xff);
    }
    const auto hold = DecodeNow(bytes);
    if (!hold.has_value()) continue;
    ++decoded;
    ASSERT_TRUE(IsWellFormed(*hold));
    ASSERT_EQ(Encode(*hold), bytes);
  }
  EXPECT_GT(decoded, 1000);
}

}  // namespace
}  // namespace turnstile
