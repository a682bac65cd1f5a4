// Loaded into a server with LD_PRELOAD: shifts its wall clock while it runs. The file named by
// TURNSTILE_CLOCK_SHIFT_FILE contains one int64_t, the microseconds to add. It is mapped, so that a
// change applies from the next clock reading on. The monotonic clock is not shifted.
//
// See ClockShift in clock.h. Not part of the tests' own library, because it would shift their
// clock.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace {

int64_t* MapShift() {
  const char* path = std::getenv("TURNSTILE_CLOCK_SHIFT_FILE");
  const int fd = path == nullptr ? -1 : open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) return nullptr;
  void* mapped = mmap(nullptr, sizeof(int64_t), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  close(fd);
  return mapped == MAP_FAILED ? nullptr : static_cast<int64_t*>(mapped);
}

// Set before main(); earlier readings return the true time.
int64_t* const shift = MapShift();

}  // namespace

// A direct system call, because the C library's function is the one being replaced.
extern "C" __attribute__((visibility("default"))) int clock_gettime(clockid_t clock_id,
                                                                    timespec* tp) noexcept {
  const long result = syscall(SYS_clock_gettime, clock_id, tp);
  const bool wall = clock_id == CLOCK_REALTIME || clock_id == CLOCK_REALTIME_COARSE;
  if (result == 0 && wall && shift != nullptr) {
    constexpr int64_t kMicros = 1'000'000;
    constexpr int64_t kNanos = 1000 * kMicros;
    const int64_t added = std::atomic_ref(*shift).load(std::memory_order_relaxed);
    tp->tv_sec += added / kMicros;
    tp->tv_nsec += added % kMicros * 1000;
    const int64_t carried = tp->tv_nsec < 0 ? -1 : tp->tv_nsec / kNanos;
    tp->tv_sec += carried;
    tp->tv_nsec -= carried * kNanos;
  }
  return static_cast<int>(result);
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
