// Loaded into a server with LD_PRELOAD: its wall clock and its monotonic clock stand still until
// the test moves them. The file that TURNSTILE_SPEC_CLOCK names holds two int64_t, the microseconds
// that the wall clock and the monotonic clock show; it is mapped, so that a change counts from the
// next look at the clock on. CPU-time clocks are left alone.
//
// A server that would rather count the processor's ticks than ask the system for the time looks up
// their rate in /proc/cpuinfo: it finds no such file.

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr int64_t kMicros = 1'000'000;

struct Clocks {
  std::atomic<int64_t> wall;
  std::atomic<int64_t> monotonic;
};

Clocks* MapClocks() {
  const char* path = std::getenv("TURNSTILE_SPEC_CLOCK");
  const int fd = path == nullptr ? -1 : open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return nullptr;
  void* mapped = mmap(nullptr, sizeof(Clocks), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  return mapped == MAP_FAILED ? nullptr : static_cast<Clocks*>(mapped);
}

// Set before main(); a look at the clock that comes even earlier sees the true time.
Clocks* const clocks = MapClocks();

FILE* Open(const char* function, const char* path, const char* mode) {
  if (std::strcmp(path, "/proc/cpuinfo") == 0) {
    errno = ENOENT;
    return nullptr;
  }
  using Function = FILE* (*)(const char*, const char*);
  return reinterpret_cast<Function>(dlsym(RTLD_NEXT, function))(path, mode);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int clock_gettime(clockid_t clock_id,
                                                                    timespec* tp) noexcept {
  if (clocks != nullptr) {
    switch (clock_id) {
      case CLOCK_REALTIME:
      case CLOCK_REALTIME_COARSE: {
        const int64_t now = clocks->wall.load();
        *tp = {now / kMicros, now % kMicros * 1000};
        return 0;
      }
      case CLOCK_MONOTONIC:
      case CLOCK_MONOTONIC_COARSE:
      case CLOCK_MONOTONIC_RAW:
      case CLOCK_BOOTTIME: {
        const int64_t now = clocks->monotonic.load();
        *tp = {now / kMicros, now % kMicros * 1000};
        return 0;
      }
      default:
        break;
    }
  }
  return static_cast<int>(syscall(SYS_clock_gettime, clock_id, tp));
}

extern "C" __attribute__((visibility("default"))) int gettimeofday(timeval* __restrict tv,
                                                                   void* __restrict) noexcept {
  timespec now{};
  if (clock_gettime(CLOCK_REALTIME, &now) != 0) return -1;
  *tv = {now.tv_sec, now.tv_nsec / 1000};
  return 0;
}

extern "C" __attribute__((visibility("default"))) time_t time(time_t* timer) noexcept {
  timespec now{};
  clock_gettime(CLOCK_REALTIME, &now);
  if (timer != nullptr) *timer = now.tv_sec;
  return now.tv_sec;
}

extern "C" __attribute__((visibility("default"))) FILE* fopen(const char* __restrict filename,
                                                              const char* __restrict modes) {
  return Open("fopen", filename, modes);
}

extern "C" __attribute__((visibility("default"))) FILE* fopen64(const char* __restrict filename,
                                                                const char* __restrict modes) {
  return Open("fopen64", filename, modes);
}
