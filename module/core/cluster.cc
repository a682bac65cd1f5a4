#include "core/cluster.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>

namespace turnstile {
namespace {

constexpr auto kCrcTable = [] {
  std::array<uint16_t, 256> table{};
  for (unsigned byte = 0; byte < table.size(); ++byte) {
    unsigned crc = byte << 8;
    for (int bit = 0; bit < 8; ++bit) crc = (crc & 0x8000) != 0 ? crc << 1 ^ 0x1021 : crc << 1;
    table[byte] = static_cast<uint16_t>(crc);
  }
  return table;
}();

unsigned Crc16(std::string_view bytes) {
  unsigned crc = 0;
  for (const char byte : bytes) {
    crc = (crc << 8 & 0xffff) ^ kCrcTable[(crc >> 8 ^ static_cast<unsigned char>(byte)) & 0xff];
  }
  return crc;
}

// Removes and returns the text up to the next `separator`.
std::string_view TakeUntil(std::string_view& text, char separator) {
  const size_t end = std::min(text.find(separator), text.size());
  const std::string_view taken = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return taken;
}

std::optional<Slot> ParseSlot(std::string_view text) {
  Slot slot = 0;
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, slot);
  if (error != std::errc() || stop != end || slot >= kSlots) return std::nullopt;
  return slot;
}

bool HasFlag(std::string_view flags, std::string_view flag) {
  while (!flags.empty()) {
    if (TakeUntil(flags, ',') == flag) return true;
  }
  return false;
}

// 10.0.0.1:6379@16379,host.example,more
ClusterNode ParseAddress(std::string_view text) {
  const std::string_view endpoint = TakeUntil(text, '@');
  TakeUntil(text, ',');
  const size_t colon = std::min(endpoint.rfind(':'), endpoint.size());  // earlier ones: IPv6
  return {.ip = std::string(endpoint.substr(0, colon)),
          .port = std::string(endpoint.substr(std::min(colon + 1, endpoint.size()))),
          .hostname = std::string(TakeUntil(text, ','))};
}

}  // namespace

Slot SlotOf(std::string_view key) {
  const size_t open = key.find('{');
  if (open != std::string_view::npos) {
    const std::string_view rest = key.substr(open + 1);
    const size_t close = rest.find('}');
    if (close != std::string_view::npos && close > 0) key = rest.substr(0, close);
  }
  return static_cast<Slot>(Crc16(key) % kSlots);
}

ClusterMap::ClusterMap(std::string_view nodes) : served_by_(kSlots, 0) {
  while (!nodes.empty()) AddNode(TakeUntil(nodes, '\n'));
}

// <id> <address> <flags> <primary> <ping> <pong> <epoch> <link> [slots ...]
void ClusterMap::AddNode(std::string_view line) {
  TakeUntil(line, ' ');
  const std::string_view address = TakeUntil(line, ' ');
  const std::string_view flags = TakeUntil(line, ' ');
  if (flags.empty()) return;
  nodes_.push_back(ParseAddress(address));
  const auto node = static_cast<uint16_t>(nodes_.size());
  const bool ours = HasFlag(flags, "myself");
  for (int skipped = 0; skipped < 5; ++skipped) TakeUntil(line, ' ');
  while (!line.empty()) AddSlots(TakeUntil(line, ' '), node, ours);
}

// 7 or 0-5460; for this node also [93-<-id] for an arriving slot, [77->-id] for a leaving one.
void ClusterMap::AddSlots(std::string_view range, uint16_t node, bool ours) {
  if (range.starts_with('[')) {
    range.remove_prefix(1);
    const auto slot = ParseSlot(TakeUntil(range, '-'));
    if (slot.has_value() && range.starts_with('<')) arriving_.set(*slot);
    if (slot.has_value() && range.starts_with('>')) leaving_.set(*slot);
    return;
  }
  const std::string_view first_text = TakeUntil(range, '-');
  const auto first = ParseSlot(first_text);
  const auto last = ParseSlot(range.empty() ? first_text : range);
  if (!first.has_value() || !last.has_value()) return;
  for (unsigned slot = *first; slot <= *last; ++slot) {
    served_by_[slot] = node;
    if (ours) ours_.set(slot);
  }
}

SlotState ClusterMap::StateOf(Slot slot) const {
  if (ours_[slot]) return SlotState::kOurs;
  if (arriving_[slot]) return SlotState::kArriving;
  return served_by_[slot] == 0 ? SlotState::kUnserved : SlotState::kElsewhere;
}

const ClusterNode* ClusterMap::ServerOf(Slot slot) const {
  const uint16_t node = served_by_[slot];
  return node == 0 ? nullptr : &nodes_[node - 1U];
}

}  // namespace turnstile
