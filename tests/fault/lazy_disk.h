// A disk that has only what was fsynced when the power fails, and that may be slow at it.
//
//   LazyDisk disk;
//   Server server({.args = {"--appendonly", "yes"}, .environment = disk.environment()});
//   disk.SetDelay(10 * kMillisecond, 300 * kMillisecond);   // of each fsync from now on
//   server.Kill9();
//   disk.LoseUnsynced(server.dir());                        // of its AOF
//   server.Restart();
//
// Names of files and their order are kept: it is the end of the newest files that is lost.

#ifndef TURNSTILE_TESTS_FAULT_LAZY_DISK_H_
#define TURNSTILE_TESTS_FAULT_LAZY_DISK_H_

#include <cstdint>
#include <string>
#include <vector>

#include "fault/history.h"
#include "fault/lazy_disk_table.h"

namespace turnstile::fault {

class LazyDisk {
 public:
  LazyDisk();  // throws std::system_error
  ~LazyDisk();
  LazyDisk(const LazyDisk&) = delete;
  LazyDisk& operator=(const LazyDisk&) = delete;

  // For ServerOptions, of one server.
  std::vector<std::string> environment() const;

  // 0 and 0: none.
  void SetDelay(Time least, Time most);

  // Waits until something that is written from now on has been fsynced, if anything is. False if
  // that takes too long.
  bool AwaitSync() const;

  // Of a server that has been killed: cuts the increments of its AOF to what was fsynced. Returns
  // the number of bytes that are lost.
  uint64_t LoseUnsynced(const std::string& folder);

 private:
  std::string path_;
  LazyDiskTable* table_ = nullptr;  // mapped, as in the server
};

}  // namespace turnstile::fault

#endif  // TURNSTILE_TESTS_FAULT_LAZY_DISK_H_
