// A server made of the pure core alone: what module/redis does around it, without Redis.
//
// It decides as a primary and obeys as a replica. What it decides goes into a log as the words of
// real commands, which is both its AOF and its stream to replicas; who reads the log parses those
// words again. A copy of its data is the real encoded bytes.

#ifndef TURNSTILE_TESTS_FAULT_SIMULATOR_SERVER_H_
#define TURNSTILE_TESTS_FAULT_SIMULATOR_SERVER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "core/decide.h"
#include "core/lock.h"
#include "core/request.h"
#include "core/sessions.h"
#include "core/token_clock.h"
#include "core/types.h"
#include "core/wait_queue.h"
#include "fault/history.h"

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
};

// Commands, each a row of words.
class CommandLog {
 public:
  static constexpr size_t kMostWords = 10;
  using Words = std::array<std::string_view, kMostWords>;

  size_t size() const { return commands_.size(); }
  void Clear();
  void Append(std::span<const std::string_view> words);
  // Views into the log.
  std::span<const std::string_view> Read(size_t index, Words& words) const;

 private:
  std::string bytes_;
  std::vector<uint32_t> words_;     // where each ends in bytes_
  std::vector<uint32_t> commands_;  // where each ends in words_
};

class Server {
 public:
  struct Settings {
    Millis margin{0};
    Millis grace{0};
    int tries_per_pass = 0;  // of the event loop: how many waiters are tried at most; 0: all
  };

  // All data at one moment, as an RDB file or a full synchronisation carries it.
  struct Copy {
    struct Value {
      bool is_plain = false;
      std::string bytes;  // of a lock encoded; empty: no key
      Instant plain_end;
    };
    std::array<Value, kLocks> values;
    std::optional<Token> clock;  // if it leads the wall clock
  };

  // The latest moment up to which any server let this owner keep others out of the lock.
  using Ledger = std::array<std::array<Instant, kOwners>, kLocks>;

  Server(const Settings& settings, Ledger& ledger) : settings_(settings), ledger_(ledger) {}
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  // --- What clients do

  void Handle(const Call& call, FineInstant now, FineTick tick);
  void ConnectionClosed(uint32_t connection);
  // The answer to this call, which waited, did not reach its client, and the server knows.
  void NotDelivered(uint32_t call);

  // --- What strangers do, on a primary

  void Delete(uint32_t lock);
  void Flush();
  void Set(uint32_t lock, std::string_view value, Instant end);
  void Rename(uint32_t from, uint32_t to, Instant now);

  // --- What the server does by itself

  // Whatever is due, as before the event loop sleeps.
  void Turn(FineInstant now, FineTick tick);
  // When a turn has something to do; kMaxInstant if nothing is due,
  Instant NextDue() const;
  // but for those who have waited long enough; kMaxTick if nobody waits.
  Tick NextTimeOut() const { return queue_.NextTimeOut(); }

  bool is_primary() const { return is_primary_; }
  // Issues from its next turn on, as after a start or a promotion; or has done so for long.
  void BecomePrimary() { is_primary_ = true; }
  void BeOldPrimary(FineInstant now);
  // Those who wait are answered with an error.
  void BecomeReplica();

  // A command of the log of the primary, or of its own.
  void Obey(std::span<const std::string_view> words);

  Copy Save(FineInstant now);
  void Load(const Copy& copy);

  // --- What others see

  // Answers that nobody has taken yet.
  std::vector<Reply>& replies() { return replies_; }
  const CommandLog& log() const { return log_; }
  bool HasSameData(const Server& other) const;
  const TokenClock& clock() const { return clock_; }
  Instant GraceEnd() const;
  const Lock* lock(uint32_t lock) const { return slots_[lock].lock.get(); }
  // Whether somebody keeps others out for longer than any server let it.
  bool HasLongerLease() const;

  // Somebody waits though nothing keeps it from its lock, and nobody will look after it.
  bool LeavesSomebodyWaiting(FineInstant now);
  // Somebody waits for longer than it asked to.
  bool KeepsSomebodyTooLong(FineTick now) const;
  // Nothing is left of those who waited.
  bool IsQueueClean() const;
  // What cannot be, if anything of that happened.
  const char* fault() const { return fault_; }

  size_t taken_back() const { return taken_back_; }
  size_t sessions_ended() const { return sessions_ended_; }

 private:
  struct Slot {
    std::unique_ptr<Lock> lock;
    bool is_plain = false;
    std::string plain;
    Instant plain_end;
  };
  struct Parked;
  struct Grant {
    Call call;
    Token token;
    std::optional<Hold> upgraded = {};
    std::optional<uint64_t> bound_to = {};
    bool told = false;
  };
  using Sites = std::array<Site, kLocks>;

  void Acquire(const Call& call, FineInstant now, FineTick tick);
  void Park(const Call& call, const Sites& sites, const AcquireRequest& request, Instant now,
            FineTick tick);
  void ReleaseAll(const Call& call, Instant now);
  void TouchAll(const Call& call, Instant now);
  void Fence(const Call& call, Instant now);
  void OwnerWasTold(const Call& call);

  const TokenClock& Issuing(FineInstant now);
  Grace GraceAt(Instant now) const { return now <= GraceEnd() ? Grace::kOn : Grace::kOver; }

  Place PlaceOf(uint32_t lock) const;
  // Removes the key if its time is over, as any access to it does.
  void Open(uint32_t lock, Instant now);
  void Remove(uint32_t lock);
  void LockChanged(uint32_t lock);
  Crowd AheadOfNewcomer(uint32_t lock, const AcquireRequest& request, Instant now);

  void CarryOut(uint32_t lock, const Change& change, Instant now);
  void CarryOutGrant(uint32_t lock, const AcquireRequest& request, const Call& call, Token token,
                     Instant now);
  void Do(uint32_t lock, const Held& held);
  void Do(uint32_t lock, const Released& released);
  void Do(uint32_t lock, const Ended& ended);
  void Do(uint32_t lock, const Expired& expired);
  void Do(uint32_t lock, const SessionsEnded& ended);
  void Do(uint32_t lock, const PlainFreed& freed);
  void Do(uint32_t lock, const PlainExtended& extended);
  void Store(uint32_t lock, const Held& held);
  template <typename Fact>
  void TakeOut(uint32_t lock, const Fact& fact);
  void TakeOutExpired(uint32_t lock, const Expired& expired);
  void EndSessionsOf(uint32_t lock, const SessionsEnded& ended);
  void HoldGone(uint32_t lock, Owner owner);
  template <typename Fact>
  void ApplyRemoval(uint32_t lock, const Fact& fact);
  void ObeyFact(Args args);
  void ObeyRelease(Args args);

  void TimeOut(Tick now);
  void TakeBack(const Grant& grant, Instant now);
  void EndSessions(Instant now);
  void EndSessionsIn(uint32_t lock, Instant now);
  void Block(Parked& parked, const Sites& sites, Instant now);
  void GrantWaiters(FineInstant now);
  void TryGrant(Parked& parked, FineInstant now);
  void UnblockLater(Parked& parked);
  void Send(Parked& parked, const Reply& reply);
  void Forget(Parked& parked);

  void Emit(std::span<const std::string_view> words) { log_.Append(words); }
  void EmitHeld(uint32_t lock, const Held& held);
  void EmitEnded(uint32_t lock, const Ended& ended);

  Settings settings_;
  Ledger& ledger_;
  bool is_primary_ = false;
  bool issuing_ = false;
  Instant issuing_since_ = kMinInstant;
  std::optional<Token> untold_floor_;
  TokenClock clock_;
  std::array<Slot, kLocks> slots_;
  WaitQueue queue_;
  Sessions sessions_;
  std::vector<Parked*> parked_;      // in line
  std::vector<Parked*> superseded_;  // their places were taken over
  std::vector<Grant> in_flight_;     // of the last turn
  std::vector<Grant> to_take_back_;
  bool held_back_ = false;  // somebody waits for the end of the grace
  std::vector<Reply> replies_;
  CommandLog log_;
  const char* fault_ = nullptr;
  size_t taken_back_ = 0;
  size_t sessions_ended_ = 0;
};

}  // namespace turnstile::fault

#endif  // TURNSTILE_TESTS_FAULT_SIMULATOR_SERVER_H_
