// A server of the simulator: the simulated host (tests/sim) with the engine that ships, spoken to
// in the simulator's own words.

#ifndef TURNSTILE_TESTS_FAULT_SIMULATOR_SERVER_H_
#define TURNSTILE_TESTS_FAULT_SIMULATOR_SERVER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

#include "core/types.h"
#include "fault/history.h"
#include "sim/sim_host.h"

namespace turnstile::fault {

inline constexpr size_t kLocks = 3;
inline constexpr size_t kOwners = 256;
inline constexpr size_t kIdsOfOwner = 8;
inline constexpr size_t kMostClients = 6;

// Locks and owners are numbers to the simulator and names to the core. So are the ids by which
// owners are notified: those of an owner follow each other. Each client has a channel and is a
// user.
std::string_view NameOfLock(uint32_t lock);
std::string_view NameOfOwner(uint32_t owner);
std::string_view NameOfTag(uint32_t owner);
std::string_view NameOfId(uint32_t id);
std::string_view NameOfChannel(uint32_t client);
std::string_view NameOfUser(uint32_t client);
inline uint32_t OwnerOfId(uint32_t id) { return id / kIdsOfOwner; }

// What a client asks of a server.
struct Call {
  Verb verb = Verb::kAcquire;
  Mode mode = Mode::kExclusive;
  bool session = false;
  bool reentrant = false;
  bool tagged = false;
  bool notify = false;
  uint32_t limit = 1;
  uint32_t weight = 1;
  uint32_t max_line = 0;
  uint32_t client = 0;  // whose channel it is to be notified on,
  uint32_t id = 0;      // and as what
  uint32_t number = 0;
  uint32_t owner = 0;
  uint32_t connection = 0;
  std::array<uint32_t, kLocks> locks{};
  size_t count = 1;  // of locks
  Millis lease{0};
  Millis wait{0};
  Millis linger{0};
  Millis max_hold{0};
  Token token;  // of Verb::kFence, or the floor of Verb::kAcquire
};

struct Reply {
  uint32_t call = 0;
  uint32_t connection = 0;
  Answer answer = Answer::kNull;
  int64_t token = 0;  // of an acquired lock,
  size_t done = 0;    // or how many locks were released or touched
  bool waited = false;
  bool queued = false;                  // it is in line, and a message will say what becomes of it
  bool refused = false;                 // because its user may not publish to its channel
  WaitingCall* waiting_call = nullptr;  // of one that was granted after a wait
};

// What is published on a channel.
struct Message {
  enum class Kind : uint8_t { kGranted, kTimeout, kError, kLost };
  Kind kind = Kind::kGranted;
  uint32_t client = 0;  // whose channel it is
  uint32_t id = 0;
  uint32_t lock = 0;
  int64_t token = 0;
  bool demoted = false;  // the wait ends because the server is not a primary any more
};

class Server {
 public:
  struct Settings {
    Millis margin{0};
    Millis grace{0};
    size_t budget = 5'000;  // of a pass of the event loop
    bool listened = false;  // somebody else subscribes to every channel
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
  // Messages that somebody was subscribed to, as far as the server knows.
  std::vector<Message> TakeMessages();

  void Subscribe(uint32_t client) { ++host_.subscribers[std::string(NameOfChannel(client))]; }
  void Unsubscribe(uint32_t client) { --host_.subscribers[std::string(NameOfChannel(client))]; }
  void SetMayPublish(uint32_t client, bool may);

  // --- What strangers do, on a primary

  void Delete(uint32_t lock, const Now& now) { host_.Delete(0, NameOfLock(lock), now); }
  void Flush(const Now& now) { host_.Flush(std::nullopt, now); }
  void Set(uint32_t lock, std::string_view value, Instant end, const Now& now) {
    host_.Set(0, NameOfLock(lock), value, end, now);
  }
  void Rename(uint32_t from, uint32_t to, const Now& now);

  // --- What the server does by itself

  // Whatever is due, as before the event loop sleeps.
  void Turn(const Now& now);
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
  bool KeepsSomebodyTooLong(FineTick now) const;
  bool IsQueueClean() const { return host_.IsQueueClean() && waits_.empty(); }
  // Whether a hold has a tag that its owner never named.
  bool HasForeignTag() const;
  // What cannot be, if anything of that happened.
  const char* fault() const { return fault_ != nullptr ? fault_ : host_.fault(); }

  size_t sent_to_nobody() const { return sent_to_nobody_; }
  size_t kept_from_lines() const { return host_.engine().stats().rejected_line_full; }
  size_t leases_cut() const { return leases_cut_; }
  size_t taken_back() const { return host_.engine().stats().undelivered; }
  size_t sessions_ended() const { return host_.engine().stats().session_ended; }

 private:
  // A wait of which a message is due.
  struct NotifiedWait {
    FineTick until;
    uint32_t owner;
    size_t count;  // of locks
  };
  // A grant that has been published. Only then, and if somebody got it, it is written.
  struct PublishedGrant {
    uint32_t owner;
    Token token;
    size_t unwritten;  // on so many locks
  };

  void Fail(const char* what) {
    if (fault_ == nullptr) fault_ = what;
  }
  void OnHoldSet(LockName lock, const HoldSet& held);
  void OnNotice(const Notice& notice, size_t receivers);
  void OnLossNotice(const Notice& notice, uint32_t id, const HoldLoss& loss);
  void OnGrantNotice(const NotifiedWait& wait, Token token, size_t receivers);

  Settings settings_;
  Ledger& ledger_;
  std::vector<Reply> replies_;
  std::vector<Message> messages_;
  std::map<uint32_t, NotifiedWait> waits_;  // by id
  std::vector<PublishedGrant> published_;   // in this turn
  std::vector<PublishedGrant> unreceived_;  // likewise: to be written nowhere
  Now now_{};                               // of this turn
  std::array<bool, kLocks> brought_{};      // by RENAME, ever
  size_t sent_to_nobody_ = 0;
  size_t leases_cut_ = 0;
  const char* fault_ = nullptr;
  sim::SimHost host_;
};

}  // namespace turnstile::fault

#endif  // TURNSTILE_TESTS_FAULT_SIMULATOR_SERVER_H_
