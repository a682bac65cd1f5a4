// A server of the simulator: the simulated host (tests/sim) with the engine that ships, spoken to
// in the simulator's own words.

#ifndef TURNSTILE_TESTS_FAULT_SIMULATOR_SERVER_H_
#define TURNSTILE_TESTS_FAULT_SIMULATOR_SERVER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "core/types.h"
#include "fault/history.h"
#include "sim/sim_host.h"

namespace turnstile::fault {

inline constexpr size_t kLocks = 3;
inline constexpr size_t kOwners = 256;

// Locks and owners are numbers to the simulator and names to the core.
std::string_view NameOfLock(uint32_t lock);
std::string_view NameOfOwner(uint32_t owner);

// What a client asks of a server.
struct Call {
  Verb verb = Verb::kAcquire;
  Mode mode = Mode::kExclusive;
  bool session = false;
  bool reentrant = false;
  uint32_t limit = 1;
  uint32_t number = 0;
  uint32_t owner = 0;
  uint32_t connection = 0;
  std::array<uint32_t, kLocks> locks{};
  size_t count = 1;  // of locks
  Millis lease{0};
  Millis wait{0};
  Millis linger{0};
  Token token;  // of Verb::kFence, or the floor of Verb::kAcquire
};

struct Reply {
  uint32_t call = 0;
  uint32_t connection = 0;
  Answer answer = Answer::kNull;
  int64_t token = 0;  // of an acquired lock,
  size_t done = 0;    // or how many locks were released or touched
  bool waited = false;
  WaitingCall* waiting_call = nullptr;  // of one that was granted after a wait
};

class Server {
 public:
  struct Settings {
    Millis margin{0};
    Millis grace{0};
    size_t budget = 5'000;  // of a pass of the event loop
  };
  using Copy = sim::SimHost::Copy;

  // The latest moment up to which any server let this owner keep others out of the lock.
  using Ledger = std::array<std::array<Instant, kOwners>, kLocks>;

  Server(const Settings& settings, Ledger& ledger);
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // --- What clients do

  void Handle(const Call& call, const Now& now);
  void ConnectionClosed(uint32_t connection, const Now& now) { host_.Disconnect(connection, now); }
  // Answers that nobody has taken yet, or only those to who did not wait. Of each that waited,
  // Replied says whether it reached its client, as far as the server knows.
  std::vector<Reply> TakeReplies(bool to_waiters);
  void Replied(const Reply& reply, bool delivered);

  // --- What strangers do, on a primary

  void Delete(uint32_t lock, const Now& now) { host_.Delete(0, NameOfLock(lock), now); }
  void Flush(const Now& now) { host_.Flush(std::nullopt, now); }
  void Set(uint32_t lock, std::string_view value, Instant end, const Now& now) {
    host_.Set(0, NameOfLock(lock), value, end, now);
  }
  void Rename(uint32_t from, uint32_t to, const Now& now);

  // --- What the server does by itself

  // Whatever is due, as before the event loop sleeps.
  void Turn(const Now& now) { host_.Turn(now, settings_.budget); }
  // When a turn has something to do, if anything is due.
  Due NextDue() const { return host_.NextDue(); }

  bool is_primary() { return host_.role() == Role::kPrimary; }
  // Issues from its next turn on, as after a start or a promotion; or has done so for long.
  void BecomePrimary() { host_.BecomePrimary(); }
  void BeOldPrimary(FineInstant now) { host_.BeOldPrimary(now); }
  // Those who wait are answered with an error.
  void BecomeReplica(const Now& now);

  // A command of the log of the primary, or of its own.
  void Apply(const sim::CommandLog::Command& command) { host_.Apply(command); }
  Copy Save(FineInstant now) { return host_.Save(now); }
  void Load(const Copy& copy) { host_.Load(copy); }

  // --- What others see

  sim::SimHost& host() { return host_; }
  const sim::CommandLog& log() const { return host_.log(); }
  bool HasSameData(const Server& other) const { return host_.HasSameData(other.host_); }
  Instant GraceEnd() const { return host_.engine().tokens().GraceEnd().value_or(kMinInstant); }
  // Whether somebody keeps others out for longer than any server let it.
  bool HasLongerLease() const;

  bool LeavesSomebodyWaiting(const Now& now) { return host_.LeavesSomebodyWaiting(now); }
  bool KeepsSomebodyTooLong(FineTick now) const { return host_.KeepsSomebodyTooLong(now); }
  bool IsQueueClean() const { return host_.IsQueueClean(); }
  // What cannot be, if anything of that happened.
  const char* fault() const { return host_.fault(); }

  size_t taken_back() const { return host_.engine().stats().undelivered; }
  size_t sessions_ended() const { return host_.engine().stats().session_ended; }

 private:
  Settings settings_;
  Ledger& ledger_;
  std::vector<Reply> replies_;
  sim::SimHost host_;
};

}  // namespace turnstile::fault

#endif  // TURNSTILE_TESTS_FAULT_SIMULATOR_SERVER_H_
