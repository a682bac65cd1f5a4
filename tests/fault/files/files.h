// What the parts of turnstile_fault_files share.

#ifndef TURNSTILE_TESTS_FAULT_FILES_FILES_H_
#define TURNSTILE_TESTS_FAULT_FILES_FILES_H_

#include <cstdint>
#include <random>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/client.h"
#include "support/server.h"

namespace turnstile::testing {

inline constexpr int64_t kHour = 3'600'000;  // a lease that does not end meanwhile

struct FilesOptions {
  uint64_t seed = 1;
  int64_t payloads = 20'000;
  int64_t files = 50;
  bool all_cuts = false;
};

// What must never happen, with all that is needed to see it again.
struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Where something of this name is kept for whoever looks into it: beside the campaign's histories.
std::string KeptAs(const std::string& name);

// `what` happened to this file, of which a copy is kept.
[[noreturn]] void Report(const std::string& file, const std::string& kept, const char* what);

inline void Require(bool condition, const std::string& what) {
  if (!condition) throw Violation(what);
}

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  uint64_t Below(uint64_t bound) { return engine_() % bound; }
  bool OneIn(uint64_t n) { return Below(n) == 0; }
  char Byte() { return static_cast<char>(Below(256)); }

 private:
  std::mt19937_64 engine_;
};

// What was done, in the order in which it is printed.
class Table {
 public:
  void Add(const std::string& what, int64_t count = 1);
  void Print() const;

 private:
  std::vector<std::pair<std::string, int64_t>> rows_;
};

std::string ReadWhole(const std::string& path);
void WriteWhole(const std::string& path, std::string_view bytes);
// Two digits for each byte.
std::string Hex(std::string_view bytes);

// Bytes with one to four damages: bits, bytes, numbers, a cut, an insertion, something repeated or
// left out, or the end of `other` in the place of its own.
std::string Damaged(std::string bytes, const std::string& other, Random& random);

// Locks of every kind in all states that last, and two strings: the commands that make them.
std::vector<Command> Makers();

// Holds the lock to what it says of itself: LOCK.INFO, DUMP, a copy made by RESTORE, and what its
// owners get when they ask again and release. The lock is changed by that. A key that is gone, or
// no lock, is left alone. Returns whether it was a lock that somebody holds.
//
// A TTL stands beside the value in an RDB file: if that was damaged, it may be any.
enum class Ttl { kOfTheLeases, kAny };
bool CheckLock(Client& client, const std::string& key, Ttl ttl = Ttl::kOfTheLeases);
// The same of all that a server holds. Returns how many it holds.
int64_t CheckAllLocks(Client& client, Ttl ttl = Ttl::kOfTheLeases);

// Requires that nothing in the server's log speaks of a crash, and empties the log, so that a
// million complaints of the server do not fill the disk.
void CheckLog(Server& server);

// One start on damaged files in the folder of `server`, which need not succeed. Whether it did.
//
// A server ends the start by itself with a line in its log and a code below 128 ("Short read or
// OOM loading DB", "Bad file format", "not a lock"). Without a checksum damage also reaches the
// server's own parts; then it may fail an assertion of its own, which is not ours to prevent: it is
// counted, and it is a violation if a frame of the module stands in the report.
bool StartOnDamaged(Server& server, Table& table, const std::string& what);

void RunPayloads(const FilesOptions& options, Table& table);
void RunRdbFiles(const FilesOptions& options, Table& table);
void RunAofFiles(const FilesOptions& options, Table& table);

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_FAULT_FILES_FILES_H_
