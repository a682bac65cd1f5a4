// A folder on a disk that is soon full.
//
//   SmallDisk disk(8 << 20);
//   Server server({.args = {"--appendonly", "yes"}, .dir = disk.path()});
//   disk.Fill();
//   disk.Free();
//   disk.SetReadOnly(true);

#ifndef TURNSTILE_TESTS_FAULT_SMALL_DISK_H_
#define TURNSTILE_TESTS_FAULT_SMALL_DISK_H_

#include <cstddef>
#include <string>

namespace turnstile::fault {

class SmallDisk {
 public:
  // Why there can be none here: no root, or no right to mount. Empty if there can.
  static std::string WhyNot();

  // A tmpfs in a new folder. What processes that were killed have left of theirs is removed on the
  // occasion. Throws std::system_error.
  explicit SmallDisk(size_t bytes = size_t{16} << 20);
  ~SmallDisk();
  SmallDisk(const SmallDisk&) = delete;
  SmallDisk& operator=(const SmallDisk&) = delete;

  // For ServerOptions::dir. A server's log (server.log) is a link to a file on another disk, so
  // that it tells what happened.
  const std::string& path() const { return path_; }

  size_t Left() const;  // bytes

  // Takes all that is left. A file that exists can still grow to the end of its last page: 4095
  // bytes at most.
  void Fill() const;
  // Gives it back.
  void Free() const;

  // Requires that no file on it is open for writing. Throws std::system_error.
  void SetReadOnly(bool read_only) const;

 private:
  std::string FillerPath() const { return path_ + "/filler"; }

  std::string path_;
};

}  // namespace turnstile::fault

#endif  // TURNSTILE_TESTS_FAULT_SMALL_DISK_H_
