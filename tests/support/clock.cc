#include "support/clock.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "support/eventually.h"

namespace turnstile::testing {
namespace {

std::chrono::microseconds TrueTime() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
      std::chrono::system_clock::now().time_since_epoch());
}

}  // namespace

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

void ClockShift::Set(std::chrono::microseconds ahead, Client& client) {
  if (shift_ == nullptr) return;
  std::atomic_ref(*shift_).store(ahead.count(), std::memory_order_relaxed);
  constexpr std::chrono::microseconds kTolerance{500};
  EXPECT_TRUE(Eventually([&] {
    // Between two readings of the true time.
    const auto before = TrueTime();
    const std::vector<std::string> time = client.Do("TIME").Texts();
    const auto after = TrueTime();
    if (time.size() != 2) return false;
    const auto seen = std::chrono::seconds{std::stoll(time[0])} +
                      std::chrono::microseconds{std::stoll(time[1])} - ahead;
    return before - kTolerance <= seen && seen <= after + kTolerance;
  })) << "the server does not follow the shifted clock";
}

std::vector<std::string> ClockShift::environment() const {
  return {"LD_PRELOAD=" TURNSTILE_CLOCK_SHIFT_LIBRARY, "TURNSTILE_CLOCK_SHIFT_FILE=" + path_};
}

}  // namespace turnstile::testing
