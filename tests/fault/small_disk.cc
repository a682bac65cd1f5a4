#include "fault/small_disk.h"

#include <fcntl.h>
#include <sys/mount.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string_view>
#include <system_error>
#include <vector>

namespace turnstile::fault {
namespace {

constexpr std::string_view kName = "/turnstile-disk-";

std::string Room() {
  const char* folder = std::getenv("TMPDIR");
  return folder != nullptr && *folder != '\0' ? folder : "/tmp";
}

std::string LogOf(const std::string& path) { return path + ".log"; }

void Remove(const std::string& path) {
  umount2(path.c_str(), MNT_DETACH);
  rmdir(path.c_str());
  unlink(LogOf(path).c_str());
}

// The process is in the name: what belongs to none that lives is removed.
void RemoveLeftovers() {
  std::ifstream mounts("/proc/self/mounts");
  std::vector<std::string> leftovers;
  for (std::string line; std::getline(mounts, line);) {
    std::istringstream fields(line);
    std::string device;
    std::string path;
    fields >> device >> path;
    const size_t name = path.find(kName);
    if (name == std::string::npos) continue;
    const pid_t process = std::atoi(path.c_str() + name + kName.size());
    if (process > 0 && kill(process, 0) != 0 && errno == ESRCH) leftovers.push_back(path);
  }
  for (const std::string& path : leftovers) Remove(path);
}

}  // namespace

std::string SmallDisk::WhyNot() {
  static const std::string why = []() -> std::string {
    if (geteuid() != 0) return "a small disk needs root";
    try {
      const SmallDisk probe(size_t{1} << 20);
    } catch (const std::system_error& error) {
      return error.what();
    }
    return "";
  }();
  return why;
}

SmallDisk::SmallDisk(size_t bytes)
    : path_(Room() + std::string(kName) + std::to_string(getpid()) + "-XXXXXX") {
  RemoveLeftovers();
  if (mkdtemp(path_.data()) == nullptr) {
    throw std::system_error(errno, std::generic_category(), path_);
  }
  const std::string options = "mode=0755,size=" + std::to_string(bytes);
  if (mount("tmpfs", path_.c_str(), "tmpfs", 0, options.c_str()) != 0) {
    const int error = errno;
    rmdir(path_.c_str());
    throw std::system_error(error, std::generic_category(), "no tmpfs on " + path_);
  }
  std::filesystem::create_symlink(LogOf(path_), path_ + "/server.log");
}

SmallDisk::~SmallDisk() { Remove(path_); }

size_t SmallDisk::Left() const {
  struct statvfs space {};
  statvfs(path_.c_str(), &space);
  return size_t{space.f_bavail} * space.f_bsize;
}

void SmallDisk::Fill() const {
  const int fd = open(FillerPath().c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
  const std::string piece(size_t{1} << 16, '\0');
  // A write that does not fit is done in part, and the next one fails.
  ssize_t written = 0;
  do {
    written = write(fd, piece.data(), piece.size());
  } while (written > 0 || (written < 0 && errno == EINTR));
  close(fd);
}

void SmallDisk::Free() const { unlink(FillerPath().c_str()); }

void SmallDisk::SetReadOnly(bool read_only) const {
  const unsigned long flags = MS_REMOUNT | (read_only ? MS_RDONLY : 0);
  if (mount("tmpfs", path_.c_str(), "tmpfs", flags, nullptr) != 0) {
    throw std::system_error(errno, std::generic_category(), "remount of " + path_);
  }
}

}  // namespace turnstile::fault
