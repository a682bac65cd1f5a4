// RESTORE of payloads that were damaged, most of them under a checksum that is right again.

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "files.h"
#include "support/dump_payload.h"
#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/reply.h"
#include "support/resp3.h"
#include "support/source_files.h"

namespace turnstile::testing {
namespace {

constexpr int64_t kBatch = 200;
constexpr size_t kNames = 50;        // keys that payloads are restored to
constexpr size_t kModuleIdEnd = 10;  // the type byte, the length mark and the 64-bit module id
constexpr int64_t kMostGrowth = 300'000;

// The DUMPs of the golden files.
std::vector<std::string> GoldenBodies() {
  std::vector<std::string> bodies;
  size_t dumps = 0;
  std::string bytes;
  const auto finish = [&] {
    if (const auto payload = DumpPayload::Open(bytes)) bodies.push_back(payload->body);
    bytes.clear();
  };
  for (const std::string& line : ReadSource("tests/golden/v1-locks.dump.hex")) {
    if (line.starts_with("#")) continue;
    if (line.starts_with("golden:")) {
      if (dumps++ > 0) finish();
      continue;
    }
    for (size_t i = 0; i + 1 < line.size(); i += 2) {
      bytes += static_cast<char>(std::stoi(line.substr(i, 2), nullptr, 16));
    }
  }
  finish();
  Require(dumps > 0 && bodies.size() == dumps, "the golden dumps could not be read");
  return bodies;
}

// The string in the frame of a lock's body; empty if it is compressed.
std::string ValueOf(const std::string& body) {
  if (body.size() < kModuleIdEnd + 3 || body[kModuleIdEnd] != '\x05') return "";
  const auto mark = static_cast<unsigned char>(body[kModuleIdEnd + 1]);
  if (mark >= 0x80) return "";
  const size_t start = kModuleIdEnd + (mark < 0x40 ? 2 : 3);
  return body.substr(start, body.size() - start - 1);
}

// The frame of `body` around another value, maybe of another version.
std::string Framed(std::string body, const std::string& value, Random& random) {
  body.resize(kModuleIdEnd);
  if (random.OneIn(8)) body.back() = static_cast<char>(random.Below(6));
  body += '\x05';
  if (value.size() >= 64) body += static_cast<char>(0x40 | (value.size() >> 8 & 0x3f));
  body += static_cast<char>(value.size() & 0xff);
  return body + value + '\0';
}

class Payloads {
 public:
  Payloads(const FilesOptions& options, Table& table)
      : options_(options),
        table_(table),
        random_(options.seed),
        // What grows by itself is turned off. The deep check keeps the server's own types, which a
        // changed type byte leads to, from harming it.
        server_({.args = {"--rdbcompression", "no", "--latency-tracking", "no",
                          "--slowlog-log-slower-than", "-1", "--sanitize-dump-payload", "yes",
                          "--loglevel", "warning"}}),
        client_(server_.Connect()),
        raw_(server_.ConnectRaw()) {
    for (const Command& maker : Makers()) client_.Do(maker);
    for (const std::string& key : client_.Do("KEYS", "*").Texts()) {
      const auto payload = DumpPayload::Open(client_.Do("DUMP", key).text);
      Require(payload.has_value(), "a DUMP that cannot be opened");
      rdb_version_ = payload->rdb_version;
      if (client_.Do("TYPE", key) == Reply::Status("turnstile")) bodies_.push_back(payload->body);
    }
    // KEYS has no order that a seed could know.
    std::sort(bodies_.begin(), bodies_.end(), [](const std::string& a, const std::string& b) {
      return std::pair(a.size(), a) < std::pair(b.size(), b);
    });
    const std::vector<std::string> golden = GoldenBodies();
    bodies_.insert(bodies_.end(), golden.begin(), golden.end());
  }

  void Run() {
    int64_t sent = 0;
    const auto send = [&](int64_t until) {
      for (; sent < until; sent += kBatch) SendBatch(sent);
    };
    // The first part makes the server allocate what it keeps for ever.
    send(std::min<int64_t>(options_.payloads, 4000));
    const int64_t before = MemoryWhenEmpty();
    send(options_.payloads);
    const bool came_back = Eventually([&] { return MemoryWhenEmpty() - before < kMostGrowth; });
    const int64_t after = MemoryWhenEmpty();
    Require(came_back, "memory grew from " + std::to_string(before) + " to " +
                           std::to_string(after) + " bytes");
    table_.Add("payloads: bytes of memory more at the end than at the start", after - before);
    CheckLog(server_);
  }

 private:
  int64_t MemoryWhenEmpty() {
    client_.Do("FLUSHALL");
    return std::stoll(InfoField(client_, "memory", "used_memory"));
  }

  std::string MakePayload() {
    const std::string& body = bodies_[random_.Below(bodies_.size())];
    const std::string& other = bodies_[random_.Below(bodies_.size())];
    const std::string value = ValueOf(body);
    DumpPayload payload{body, rdb_version_};
    if (!value.empty() && random_.Below(4) < 3) {
      payload.body = Framed(body, Damaged(value, ValueOf(other), random_), random_);
    } else {
      payload.body = Damaged(body, other, random_);
    }
    if (random_.OneIn(50) && !payload.body.empty()) payload.body[0] = random_.Byte();
    if (random_.OneIn(100)) payload.rdb_version = static_cast<uint16_t>(random_.Below(300));
    std::string sealed = payload.Seal();
    if (random_.OneIn(20)) sealed = Damaged(sealed, body, random_);
    return sealed;
  }

  Command MakeRestore() {
    constexpr std::array kTtls = {"0", "0", "0", "1", "1000", "3600000", "99999999999", "-1", "x"};
    Command restore = {"RESTORE", "job " + std::to_string(random_.Below(kNames)),
                       kTtls.at(random_.Below(random_.OneIn(4) ? kTtls.size() : 3)), MakePayload()};
    if (!random_.OneIn(10)) restore.emplace_back("REPLACE");
    if (random_.OneIn(10)) restore.emplace_back("ABSTTL");
    return restore;
  }

  void SendBatch(int64_t first) {
    std::vector<Command> restores;
    std::string bytes;
    for (int64_t i = 0; i < kBatch; i++) {
      restores.push_back(MakeRestore());
      bytes += EncodeCommand(restores.back());
      bytes += EncodeCommand({"LOCK.INFO", restores.back()[1]});
    }
    size_t at = 0;  // the first without an answer
    std::string to_check;
    try {
      raw_.WriteRaw(bytes);
      for (; at < restores.size(); at++) {
        const Reply restored = raw_.ReadReply();
        const Reply info = raw_.ReadReply();
        Count(restored, info);
        if (restored == Reply::Ok() && random_.OneIn(100)) to_check = restores[at][1];
      }
      // The last of those that were chosen is still there, unless another took its place.
      if (!to_check.empty() && CheckLock(client_, to_check)) {
        table_.Add("payloads: locks checked in full, with their copy and their owners");
      }
      CheckLog(server_);
    } catch (const std::exception& error) {
      std::string story = error.what();
      if (at < restores.size()) {
        story += "\nat payload " + std::to_string(first + static_cast<int64_t>(at)) + ": " +
                 restores[at][1] + " " + restores[at][2] + " " + Hex(restores[at][3]);
      }
      throw Violation(story + "\n" + server_.CrashReport());
    }
  }

  void Count(const Reply& restored, const Reply& info) {
    if (restored.IsError()) {
      Require(restored.IsError("ERR ") || restored.IsError("BUSYKEY "), restored.ToString());
      table_.Add("payloads: " + restored.text.substr(0, 60));
    } else {
      Require(restored == Reply::Ok(), restored.ToString());
      const bool lock = info.IsArray() && info.Field("mode") != Reply::Str("plain");
      table_.Add(info.IsNil() ? "payloads: OK, of a lock whose leases are over"
                 : lock       ? "payloads: OK, of a lock"
                              : "payloads: OK, of another type");
    }
    Require(info.IsNil() || info.IsArray() || info.IsError("WRONGTYPE "), info.ToString());
  }

  const FilesOptions& options_;
  Table& table_;
  Random random_;
  Server server_;
  Client client_;
  RawConnection raw_;
  std::vector<std::string> bodies_;
  uint16_t rdb_version_ = 0;
};

}  // namespace

void RunPayloads(const FilesOptions& options, Table& table) {
  if (options.payloads > 0) Payloads(options, table).Run();
}

}  // namespace turnstile::testing
