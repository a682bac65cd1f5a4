// A client in a process of its own, which can be stopped for any time, and killed. It takes the
// locks that the driver's clients take, shows its token to the register outside, renews, releases,
// and writes its own history, by the same clock.

#ifndef TURNSTILE_TESTS_FAULT_PROCESS_CLIENT_H_
#define TURNSTILE_TESTS_FAULT_PROCESS_CLIENT_H_

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "fault/history.h"

namespace turnstile::fault {

class ProcessClient {
 public:
  static constexpr Time kLease = 100 * kMillisecond;

  // `number` makes its owners different from those of others.
  ProcessClient(int port, uint32_t number, uint64_t seed);
  ~ProcessClient();
  ProcessClient(ProcessClient&& other) noexcept;
  ProcessClient& operator=(ProcessClient&&) = delete;

  void Stop() const;
  void Continue() const;
  void Kill();
  // A new process after Kill().
  void Restart();
  // Ends it and reads what it wrote.
  void Finish();
  const History& history() const { return history_; }

  // The main function of such a process: `arguments` are those that Restart() gave.
  static constexpr const char* kOption = "--process-client";
  static int Main(int count, char** arguments);

 private:
  void Signal(int signal) const;
  void Collect();

  int port_;
  uint32_t number_;
  uint64_t seed_;
  std::string path_;
  pid_t pid_ = -1;
  uint32_t lives_ = 0;
  History history_;
};

}  // namespace turnstile::fault

#endif  // TURNSTILE_TESTS_FAULT_PROCESS_CLIENT_H_
