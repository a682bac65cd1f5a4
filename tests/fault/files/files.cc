// Hostile payloads and damaged files against real servers.
//
//   turnstile_fault_files [--seed S] [--payloads N] [--files N] [--all-cuts]
//
// Payloads of RESTORE, RDB files and append-only files are damaged in many ways. What a server
// makes of them is a clear error or a right load: never a crash, and never a lock that is not well
// formed. A cut append-only file gives the state after its last whole command. Ends with status 1
// at the first violation, with the seed and what was damaged.
//
//   --payloads N   how many payloads are sent to RESTORE (20000)
//   --files N      how many damaged files of each kind a server is started on (50)
//   --all-cuts     every byte cut of the last 64 KB of an append-only file, not a sample

#include "files.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <regex>
#include <sstream>

#include "support/lock_test.h"
#include "support/reply.h"

namespace turnstile::testing {

std::string KeptAs(const std::string& name) {
  const std::filesystem::path folder = "build/faults";
  std::filesystem::create_directories(folder);
  return folder / name;
}

void Report(const std::string& file, const std::string& kept, const char* what) {
  throw Violation(file + ", kept as " + kept + ": " + what);
}

void Table::Add(const std::string& what, int64_t count) {
  const auto row = std::find_if(rows_.begin(), rows_.end(),
                                [&what](const auto& entry) { return entry.first == what; });
  if (row == rows_.end()) {
    rows_.emplace_back(what, count);
  } else {
    row->second += count;
  }
}

void Table::Print() const {
  for (const auto& [what, count] : rows_) {
    std::printf("%12lld  %s\n", static_cast<long long>(count), what.c_str());
  }
}

std::string ReadWhole(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void WriteWhole(const std::string& path, std::string_view bytes) {
  std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
}

std::string Hex(std::string_view bytes) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string hex;
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    hex += kDigits[byte / 16];
    hex += kDigits[byte % 16];
  }
  return hex;
}

namespace {

// Where a field ends, and where signs change.
constexpr std::array<uint64_t, 16> kNumbers = {0,
                                               1,
                                               2,
                                               0x7f,
                                               0xff,
                                               0x100,
                                               0xffff,
                                               0xffffffff,
                                               uint64_t{1} << 42,
                                               (uint64_t{1} << 53) - 1,
                                               uint64_t{1} << 53,
                                               uint64_t{1} << 61,
                                               uint64_t{1} << 62,
                                               uint64_t{1} << 63,
                                               (uint64_t{1} << 63) - 1,
                                               ~uint64_t{0}};

void DamageOnce(std::string& bytes, const std::string& other, Random& random) {
  const size_t at = random.Below(bytes.size() + 1);
  const size_t some = 1 + random.Below(9);
  switch (random.Below(9)) {
    case 0:
    case 1:
      if (at < bytes.size()) bytes[at] = static_cast<char>(bytes[at] ^ 1 << random.Below(8));
      return;
    case 2:
      if (at < bytes.size()) bytes[at] = random.Byte();
      return;
    case 3: {
      const uint64_t number = kNumbers.at(random.Below(kNumbers.size()));
      for (size_t i = 0; i < some && at + i < bytes.size(); i++) {
        bytes[at + i] = static_cast<char>(i < 8 ? number >> (8 * i) & 0xff : 0);
      }
      return;
    }
    case 4:
      return bytes.resize(at);
    case 5:
      bytes.insert(at, some, random.Byte());
      return;
    case 6:
      bytes.erase(at, some);
      return;
    case 7:
      bytes.insert(at, bytes.substr(random.Below(bytes.size() + 1), some * some));
      return;
    default:
      bytes = bytes.substr(0, at) + other.substr(random.Below(other.size() + 1));
  }
}

}  // namespace

std::string Damaged(std::string bytes, const std::string& other, Random& random) {
  for (uint64_t damages = 1 + random.Below(random.OneIn(3) ? 4 : 1); damages > 0; damages--) {
    DamageOnce(bytes, other, random);
  }
  return bytes;
}

std::vector<Command> Makers() {
  const std::string lease = std::to_string(kHour);
  const auto acquire = [&lease](const std::string& key, const std::string& owner,
                                const Command& options = {}) {
    Command command = {"LOCK.ACQUIRE", key, owner, "PX", lease};
    command.insert(command.end(), options.begin(), options.end());
    return command;
  };
  return {acquire("one", "x"),
          acquire("long", std::string(256, 'o')),
          acquire("binary", std::string("\0\r\n\xff", 4)),
          acquire("counted", "counting-owner", {"REENTRANT"}),
          acquire("counted", "counting-owner", {"REENTRANT"}),
          acquire("lingering", "4fd1c2a7-6c1e-4d0c-a3f0", {"LINGER", lease}),
          acquire("read-by-one", "reader-a", {"SHARED"}),
          acquire("read", "reader-a", {"SHARED"}),
          acquire("read", "reader-b", {"SHARED", "LINGER", "60000"}),
          acquire("read", "reader-c", {"SHARED", "REENTRANT"}),
          acquire("read", std::string(200, 'r'), {"SHARED", "REENTRANT"}),
          acquire("limited", "worker-1", {"LIMIT", "5"}),
          acquire("limited", "worker-2", {"LIMIT", "5", "LINGER", "5"}),
          acquire("limited", std::string(100, 'w'), {"LIMIT", "5"}),
          acquire("set-1", "owner-of-all", {"ALSO", "2", "set-2", "set-3"}),
          {"SET", "plain", "plain-owner", "PX", lease},
          {"SET", "text",
           "no lock at all, but a string that is long enough to be compressed: "
           "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}};
}

namespace {

// What LOCK.INFO says, held to its ranges. `story` goes in front of every complaint.
void CheckInfo(const Reply& info, const std::string& story) {
  const std::string mode = info.Field("mode").text;
  Require(mode == "exclusive" || mode == "shared" || mode == "limit", story + "no such mode");
  const std::vector<Reply> holders = info.Field("holders").elements;
  Require(mode != "exclusive" || holders.size() <= 1, story + "two exclusive holders");
  Require(!holders.empty() || info.Field("linger-left-ms").integer > 0, story + "held by nobody");
  constexpr int64_t kMost = (int64_t{1} << 53) - 1;
  int64_t last_token = 1;
  for (const Reply& holder : holders) {
    const int64_t token = holder.Field("token").integer;
    Require(token >= last_token && token <= kMost, story + "a token is out of range or order");
    last_token = token;
    const size_t owner_size = holder.Field("owner").text.size();
    Require(owner_size >= 1 && owner_size <= 256, story + "an owner has no such size");
    Require(holder.Field("count").integer >= 1, story + "a count below one");
    const int64_t linger = holder.Field("linger-ms").integer;
    Require(linger >= 0 && linger <= kMost, story + "a linger is out of range");
    const int64_t left = holder.Field("lease-left-ms").integer;
    Require(left >= 0 && left <= kMost, story + "a lease is out of range");
    const int64_t weight = holder.Field("weight").integer;
    Require(weight >= 1 && (weight == 1 || mode == "limit"), story + "no such weight");
    const std::string tag = holder.Field("tag").text;
    const auto is_printable = [](char c) { return c >= ' ' && c <= '~'; };
    Require(tag.size() <= 64 && std::all_of(tag.begin(), tag.end(), is_printable),
            story + "no such tag");
  }
}

// The owners ask again, and give up what they hold.
void UseLock(Client& client, const std::string& key, const Reply& info, const std::string& story) {
  for (const Reply& holder : info.Field("holders").elements) {
    const std::string owner = holder.Field("owner").text;
    Command again = {"LOCK.ACQUIRE", key, owner, "PX", std::to_string(kHour)};
    if (info.Field("mode").text == "shared") again.emplace_back("SHARED");
    if (info.Field("mode").text == "limit") {
      const std::string weight = std::to_string(holder.Field("weight").integer);
      again.insert(again.end(), {"LIMIT", weight, "WEIGHT", weight});
    }
    const Reply token = client.Do(again);
    // A lease may have ended meanwhile; with others there it is null then.
    if (holder.Field("lease-left-ms").integer < kHour / 100) continue;
    Require(token == holder.Field("token"), story + "its owner is told " + token.ToString());
    const Reply released = client.Do("LOCK.RELEASE", key, owner);
    Require(released == Reply::Int(1), story + "a release is told " + released.ToString());
    const Reply touched = client.Do("LOCK.TOUCH", key, owner, "PX", kHour);
    const int64_t left = holder.Field("count").integer > 1 ? 1 : 0;
    Require(touched == Reply::Int(left), story + "a touch is told " + touched.ToString());
  }
}

}  // namespace

bool CheckLock(Client& client, const std::string& key, Ttl ttl) {
  const std::string copy = "copy of " + key;
  Reply info;
  std::string story;
  for (int tries = 0;; tries++) {
    if (client.Do("TYPE", key) != Reply::Status("turnstile")) return false;
    info = client.Do("LOCK.INFO", key);
    if (info.IsNil()) return false;  // its leases are over
    story = "the lock " + Quoted(key) + ", " + info.ToString() + ": ";
    Require(info.IsArray(), story + "not as LOCK.INFO answers");
    const Reply dump = client.Do("DUMP", key);
    if (dump.IsNil()) return false;  // now they are
    story += "DUMP " + Hex(dump.text) + ": ";
    CheckInfo(info, story);
    // In a transaction: after it the TTL is set to the leases, and holds that are over go.
    client.Do("MULTI");
    client.Do("RESTORE", copy, 0, dump.text, "REPLACE");
    client.Do("DUMP", copy);
    const Reply copied = client.Do("EXEC");
    const bool forged = copied.IsArray() && copied.elements[0].IsError("ERR Bad data format");
    // The digest tells whether there is a TTL.
    const Reply digests = client.Do("DEBUG", "DIGEST-VALUE", key, copy);
    const bool same_ttl = client.Do("PEXPIRETIME", key) == client.Do("PEXPIRETIME", copy) &&
                          digests.elements.size() == 2 &&
                          digests.elements[0] == digests.elements[1];
    const bool same = copied == Reply::Array({Reply::Ok(), dump}) && (same_ttl || ttl == Ttl::kAny);
    client.Do("DEL", copy);
    if (same || forged) break;  // forged: its token leads the clock by more than ten minutes
    // A hold may have ended between two of these commands; that does not happen twice.
    Require(tries < 2, story + "its copy differs: " + copied.ToString() + digests.ToString());
  }
  UseLock(client, key, info, story);
  return true;
}

int64_t CheckAllLocks(Client& client, Ttl ttl) {
  int64_t locks = 0;
  const Reply keys = client.Do("KEYS", "*");
  Require(keys.IsArray(), "KEYS: " + keys.ToString());
  for (const std::string& key : keys.Texts()) locks += CheckLock(client, key, ttl) ? 1 : 0;
  return locks;
}

void CheckLog(Server& server) {
  Require(server.running(), "the server ended by itself:\n" + server.Log());
  Require(server.CrashReport().empty(), server.CrashReport());
  WriteWhole(server.dir() + "/server.log", "");
}

namespace {

// What the log of a server says when it ends a start.
bool IsComplaint(const std::string& log) {
  constexpr std::array kComplaints = {"Short read or OOM loading DB",
                                      "Wrong signature trying to load DB",
                                      "Internal error in RDB",
                                      "Fatal error loading the DB",
                                      "RDB CRC error",
                                      "Can't handle RDB format version",
                                      "Bad file format",
                                      "Unknown command",
                                      "The RDB file contains",
                                      "Unexpected end of file",
                                      "FATAL",
                                      "Error reading the RDB preamble",
                                      "Unrecoverable error reading",
                                      "Unable to load"};
  return std::any_of(kComplaints.begin(), kComplaints.end(),
                     [&log](const char* text) { return log.find(text) != std::string::npos; });
}

constexpr Milliseconds kShortStart{3000};
constexpr Milliseconds kLongStart{30000};

// A server that loads an AOF does not count the arguments of its own commands, and reads beyond
// their end: the crash is in the command that the loader itself called.
bool LacksArguments(const std::string& report) {
  static const std::regex called(R"(Command\+0x[0-9a-f]+\)[^\n]*\n[^\n]*loadSingleAppendOnlyFile)");
  return std::regex_search(report, called);
}

bool IsForeseen(const std::string& report) {
  return report.find("Guru Meditation") != std::string::npos ||
         report.find("ASSERTION FAILED") != std::string::npos || LacksArguments(report);
}

// The line of a crash report that tells it from others.
std::string Assertion(const std::string& log) {
  std::istringstream lines(log);
  for (std::string line; std::getline(lines, line);) {
    for (const char* sign : {"Guru Meditation", "==> "}) {
      if (const size_t at = line.find(sign); at != std::string::npos) return line.substr(at);
    }
  }
  return LacksArguments(log) ? "a command of its own lacks arguments" : "an assertion";
}

}  // namespace

bool StartOnDamaged(Server& server, Table& table, const std::string& what) {
  server.Kill9();
  const std::string log = server.dir() + "/server.log";
  WriteWhole(log, "");
  server.options().start_within = kShortStart;
  bool up = server.Restart();
  const bool circles = !up && server.exit_code() == 128 + SIGKILL && IsComplaint(server.Log());
  if (!up && server.exit_code() == 128 + SIGKILL && !circles) {  // a slow machine
    server.options().start_within = kLongStart;
    up = server.Restart();
  }
  const std::string report = server.CrashReport();
  Require(report.find(ModulePath() + "(") == std::string::npos,
          "a crash in the module:\n" + report);
  Require(report.find("Sanitizer") == std::string::npos, report);
  // Heap that the module spoiled would show elsewhere: of the server's own ends only those are
  // taken for that which it foresaw.
  Require(report.empty() || IsForeseen(report), "a crash:\n" + report);
  if (up) {
    table.Add(what + ": loaded");
    return true;
  }
  // After a refusal the server checks the file once more with the code of redis-check-rdb, which
  // knows no modules. It may find the file good: then the code is 0. At a file that ends inside the
  // value of a module Redis 7.0 goes round in circles there, for ever.
  if (circles) {
    table.Add(what + ": refused, then the server's own check of the file went on for ever");
    return false;
  }
  const int code = server.exit_code().value_or(-1);
  if (report.empty()) {
    Require(code >= 0 && code < 128,
            "the server ended with " + std::to_string(code) + " and this log:\n" + server.Log());
    Require(IsComplaint(server.Log()), "a refusal without a word:\n" + server.Log());
  }
  table.Add(what + (report.empty() ? ": refused, with the reason in the log"
                                   : ": the server itself: " + Assertion(server.Log())));
  WriteWhole(log, "");
  return false;
}

namespace {

std::optional<FilesOptions> ParseOptions(int argc, char** argv) {
  FilesOptions options;
  for (int i = 1; i < argc; i++) {
    const std::string word = argv[i];
    if (word == "--all-cuts") {
      options.all_cuts = true;
      continue;
    }
    if (i + 1 == argc) return std::nullopt;
    const int64_t number = std::strtoll(argv[++i], nullptr, 10);
    if (word == "--seed") {
      options.seed = static_cast<uint64_t>(number);
    } else if (word == "--payloads") {
      options.payloads = number;
    } else if (word == "--files") {
      options.files = number;
    } else {
      return std::nullopt;
    }
  }
  return options;
}

int Run(int argc, char** argv) {
  const std::optional<FilesOptions> options = ParseOptions(argc, argv);
  if (!options.has_value()) {
    std::fprintf(stderr, "usage: %s [--seed S] [--payloads N] [--files N] [--all-cuts]\n", argv[0]);
    return 2;
  }
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  std::printf("seed %llu\n", static_cast<unsigned long long>(options->seed));
  Table table;
  int status = 0;
  try {
    RunPayloads(*options, table);
    RunRdbFiles(*options, table);
    RunAofFiles(*options, table);
  } catch (const std::exception& violation) {
    std::printf("VIOLATION with --seed %llu: %s\n", static_cast<unsigned long long>(options->seed),
                violation.what());
    status = 1;
  }
  table.Print();
  // What the servers complain of in the end is recorded as failures of no test.
  if (::testing::UnitTest::GetInstance()->Failed()) status = 1;
  std::printf("%s\n", status == 0 ? "no violation" : "FAILED");
  return status;
}

}  // namespace
}  // namespace turnstile::testing

int main(int argc, char** argv) { return turnstile::testing::Run(argc, argv); }
