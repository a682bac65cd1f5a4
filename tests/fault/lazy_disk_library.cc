// Loaded into a server with LD_PRELOAD: notes how long each file was when an fsync of it began that
// succeeded, and makes each fsync take longer. The file named by TURNSTILE_LAZY_DISK_FILE is a
// LazyDiskTable. See LazyDisk in lazy_disk.h.
//
// It uses nothing of the C++ library, which a server need not have loaded.

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "fault/lazy_disk_table.h"

namespace turnstile::fault {
namespace {

LazyDiskTable* MapTable() {
  const char* path = getenv("TURNSTILE_LAZY_DISK_FILE");
  const int fd = path == nullptr ? -1 : open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return nullptr;
  void* mapped = mmap(nullptr, sizeof(LazyDiskTable), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  return mapped == MAP_FAILED ? nullptr : static_cast<LazyDiskTable*>(mapped);
}

// Set before main(). A child that rewrites a file shares it.
LazyDiskTable* const table = MapTable();

void Delay() {
  const uint32_t least = table->least_delay_us.load();
  const uint32_t most = table->most_delay_us.load();
  if (most == 0) return;
  timespec now{};
  clock_gettime(CLOCK_MONOTONIC, &now);
  // The lowest digits of the clock are random enough.
  const uint32_t dice = static_cast<uint32_t>(now.tv_nsec) * 2654435761U;
  const uint32_t delay = least + (most > least ? dice % (most - least + 1) : 0);
  const timespec time{delay / 1'000'000, static_cast<long>(delay % 1'000'000) * 1000};
  nanosleep(&time, nullptr);
}

void NoteSynced(int fd, int64_t size) {
  char link[64];
  char path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, path, sizeof path);
  if (length <= 0) return;
  LazyDiskTable::File* file =
      table->Find(LazyDiskTable::HashOf(path, static_cast<size_t>(length)), /*add=*/true);
  if (file != nullptr) file->synced.store(size);
}

int Sync(long call, int fd) {
  if (table == nullptr) return static_cast<int>(syscall(call, fd));
  struct stat before {};
  const bool known = fstat(fd, &before) == 0;
  Delay();
  const int result = static_cast<int>(syscall(call, fd));
  if (result == 0 && known) NoteSynced(fd, before.st_size);
  if (result == 0) ++table->syncs;
  return result;
}

}  // namespace
}  // namespace turnstile::fault

extern "C" __attribute__((visibility("default"))) int fsync(int fd) {
  return turnstile::fault::Sync(SYS_fsync, fd);
}

extern "C" __attribute__((visibility("default"))) int fdatasync(int fildes) {
  return turnstile::fault::Sync(SYS_fdatasync, fildes);
}
