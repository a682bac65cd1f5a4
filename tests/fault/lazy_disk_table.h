// What a server with the library of a LazyDisk shares with it: a file that both have mapped.

#ifndef TURNSTILE_TESTS_FAULT_LAZY_DISK_TABLE_H_
#define TURNSTILE_TESTS_FAULT_LAZY_DISK_TABLE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace turnstile::fault {

struct LazyDiskTable {
  static constexpr size_t kFiles = 4096;  // more than a server makes in a round

  struct File {
    std::atomic<uint64_t> name;   // HashOf its path; 0: no file
    std::atomic<int64_t> synced;  // so many bytes of it are on the disk
  };

  std::atomic<uint64_t> syncs;  // that succeeded
  // How long each fsync takes, in addition. 0 and 0: no longer than it does.
  std::atomic<uint32_t> least_delay_us;
  std::atomic<uint32_t> most_delay_us;
  File files[kFiles];

  // FNV-1a.
  static uint64_t HashOf(const char* path, size_t size) {
    uint64_t hash = 14695981039346656037U;
    for (size_t i = 0; i < size; i++) {
      hash = (hash ^ static_cast<unsigned char>(path[i])) * 1099511628211U;
    }
    return hash == 0 ? 1 : hash;
  }

  // Null if it is not there, or cannot be added.
  File* Find(uint64_t name, bool add) {
    for (size_t i = 0; i < kFiles; i++) {
      File& file = files[(name + i) % kFiles];
      uint64_t present = file.name.load();
      if (present == 0 && add && file.name.compare_exchange_strong(present, name)) return &file;
      if (present == name) return &file;
      if (present == 0 && !add) return nullptr;
    }
    return nullptr;
  }
};

}  // namespace turnstile::fault

#endif  // TURNSTILE_TESTS_FAULT_LAZY_DISK_TABLE_H_
