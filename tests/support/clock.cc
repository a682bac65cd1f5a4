#include "support/clock.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace turnstile::testing {

ClockShift::ClockShift() {
  const char* folder = std::getenv("TMPDIR");
  path_ = std::string(folder == nullptr ? "/tmp" : folder) + "/turnstile-clock-XXXXXX";
  const int fd = mkstemp(path_.data());
  if (fd >= 0 && ftruncate(fd, sizeof *shift_) == 0) {
    void* mapped = mmap(nullptr, sizeof *shift_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (mapped != MAP_FAILED) shift_ = static_cast<int64_t*>(mapped);
  }
  if (shift_ == nullptr) ADD_FAILURE() << "no clock in " << path_ << ": " << std::strerror(errno);
  if (fd >= 0) close(fd);
}

ClockShift::~ClockShift() {
  if (shift_ != nullptr) munmap(shift_, sizeof *shift_);
  unlink(path_.c_str());
}

void ClockShift::Set(std::chrono::microseconds ahead) {
  if (shift_ != nullptr) std::atomic_ref(*shift_).store(ahead.count(), std::memory_order_relaxed);
}

std::vector<std::string> ClockShift::environment() const {
  return {"LD_PRELOAD=" TURNSTILE_CLOCK_SHIFT_LIBRARY, "TURNSTILE_CLOCK_SHIFT_FILE=" + path_};
}

}  // namespace turnstile::testing
