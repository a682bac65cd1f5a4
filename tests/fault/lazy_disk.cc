#include "fault/lazy_disk.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "support/eventually.h"

namespace turnstile::fault {

LazyDisk::LazyDisk() : path_(std::filesystem::temp_directory_path() / "turnstile-sync-XXXXXX") {
  const int fd = mkstemp(path_.data());
  void* mapped = MAP_FAILED;
  if (fd >= 0 && ftruncate(fd, sizeof *table_) == 0) {
    mapped = mmap(nullptr, sizeof *table_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  const int error = errno;
  if (fd >= 0) close(fd);
  if (mapped == MAP_FAILED) throw std::system_error(error, std::generic_category(), path_);
  table_ = static_cast<LazyDiskTable*>(mapped);
}

LazyDisk::~LazyDisk() {
  munmap(table_, sizeof *table_);
  unlink(path_.c_str());
}

std::vector<std::string> LazyDisk::environment() const {
  return {"LD_PRELOAD=" TURNSTILE_LAZY_DISK_LIBRARY, "TURNSTILE_LAZY_DISK_FILE=" + path_};
}

void LazyDisk::SetDelay(Time least, Time most) {
  table_->least_delay_us = static_cast<uint32_t>(least);
  table_->most_delay_us = static_cast<uint32_t>(most);
}

bool LazyDisk::AwaitSync() const {
  // One may be under way.
  const uint64_t enough = table_->syncs + 2;
  return testing::Eventually([&] { return table_->syncs >= enough; });
}

uint64_t LazyDisk::LoseUnsynced(const std::string& folder) {
  uint64_t lost = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder + "/appendonlydir")) {
    const std::string path = std::filesystem::canonical(entry.path());
    if (!path.ends_with(".incr.aof")) continue;
    const LazyDiskTable::File* file =
        table_->Find(LazyDiskTable::HashOf(path.data(), path.size()), /*add=*/false);
    const auto size = static_cast<int64_t>(std::filesystem::file_size(path));
    const int64_t synced = std::min(file == nullptr ? 0 : file->synced.load(), size);
    if (synced == size) continue;
    std::filesystem::resize_file(path, static_cast<uintmax_t>(synced));
    lost += static_cast<uint64_t>(size - synced);
  }
  return lost;
}

}  // namespace turnstile::fault
