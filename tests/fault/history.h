// What clients asked and were told, and what was done to the servers meanwhile: all that a checker
// may look at. Both the campaign on real servers and the simulator of the core write histories.
//
// Times are microseconds of one clock that never steps: the driver's monotonic clock, or the true
// time of the simulation. What a client was told says nothing about the moment of the decision but
// that it lies between `sent` and `answered`.

#ifndef TURNSTILE_TESTS_FAULT_HISTORY_H_
#define TURNSTILE_TESTS_FAULT_HISTORY_H_

#include <cstdint>
#include <iosfwd>
#include <limits>
#include <string>
#include <vector>

namespace turnstile::fault {

using Time = int64_t;  // in microseconds
inline constexpr Time kMillisecond = 1'000;
inline constexpr Time kSecond = 1'000'000;

enum class Verb : uint8_t {
  kAcquire,
  kRelease,
  kTouch,
  kFence,  // LOCK.FENCE key token, with or without THEN
  kWrite,  // the holder shows its token to a register outside: `sent` is the moment of that
  kClose,  // the connection of a session is closed: kYes if the server knows by `answered`, else
           // kLost
  kLoss,   // a message says that the hold under `token` is lost: it was read at `sent`
};

enum class Answer : uint8_t {
  kToken,
  kNull,
  kYes,    // 1, or the guarded command was run
  kNo,     // 0, or FENCED
  kError,  // the server says that it did nothing
  kLost,   // the connection ended, or the client gave up: the server may have done it or not
};

enum class Sharing : uint8_t { kExclusive, kShared, kLimit };

struct Operation {
  Verb verb = Verb::kAcquire;
  Answer answer = Answer::kLost;
  Sharing sharing = Sharing::kExclusive;
  uint16_t limit = 1;      // of Sharing::kLimit,
  uint16_t weight = 1;     // and as how many of them it counts
  uint16_t max_line = 0;   // do not stand in line behind so many; 0: behind any number
  bool several = false;    // part of a request for several locks: each has an operation
  bool retry = false;      // this owner asked before, and an older call of it may still wait
  bool stranger = false;   // in the name of an owner that never asked for this lock
  bool direct = true;      // nothing (a proxy, a pause) holds back the request or the answer
  bool reentrant = false;  // each grant of it has to be released
  bool session = false;    // it ends with its connection
  bool notified = false;   // it does not block: what becomes of it may be told by a message
  bool bound = false;      // the owner's hold has the same channel and id: not counted once more
  uint32_t lock = 0;
  uint32_t owner = 0;   // a name is used for one hold, except that its client may ask again
  uint32_t server = 0;  // the life of a server: another number after each restart and role change
  int64_t token = 0;    // told by an ACQUIRE, or shown by FENCE and WRITE
  int64_t floor = 0;    // of ACQUIRE: the token is at least this
  Time lease = 0;       // of ACQUIRE and TOUCH
  Time wait = 0;
  Time linger = 0;
  Time max_hold = 0;  // after the first grant it lasts no longer; 0: for ever
  Time sent = 0;
  Time queued = 0;    // of one that is notified: when it was told that it is in line, if ever
  Time answered = 0;  // when the answer or message was read, or when the client gave up
};

inline constexpr uint32_t kAllLocks = std::numeric_limits<uint32_t>::max();

// What was done to the servers. Between `begin` and `end` it may have happened at any moment.
struct Mark {
  enum class Kind : uint8_t {
    kUnavailable,  // a server did not run, was not reachable, paused, in its grace or stalled; or
                   // the driver was: nobody can expect an answer
    kForced,       // a stranger may have removed or replaced the lock, and may have it for `amount`
    kLossy,        // writes may have been lost, under a grace: holders may be forgotten, but nobody
                   // else is let in before their leases are over
    kStep,         // a wall clock was moved by `amount`
  };
  Kind kind = Kind::kUnavailable;
  uint32_t lock = kAllLocks;
  Time begin = 0;
  Time end = 0;
  Time amount = 0;
  std::string what;  // for the story
};

struct History {
  std::vector<Operation> operations;  // in any order
  std::vector<Mark> marks;            // in any order
};

// As JSON lines, which README.md documents: one for each operation and mark,
void Write(const History& history, std::ostream& out);
// and a first one with the name, so that a file may have many histories.
void WriteNamed(const std::string& name, const History& history, std::ostream& out);
// Reads one history, with or without a name. Throws std::runtime_error with the line that it does
// not understand.
History ReadHistory(std::istream& in);

std::string ToText(const Operation& operation);
std::string ToText(const Mark& mark);

}  // namespace turnstile::fault

#endif  // TURNSTILE_TESTS_FAULT_HISTORY_H_
