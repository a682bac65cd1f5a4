// Small histories for tests, written in milliseconds.

#ifndef TURNSTILE_TESTS_FAULT_CHECKER_TEST_HISTORIES_H_
#define TURNSTILE_TESTS_FAULT_CHECKER_TEST_HISTORIES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "fault/checker/checker.h"
#include "fault/history.h"

namespace turnstile::fault {

inline constexpr Time kMs = kMillisecond;

inline Operation Op(Verb verb, uint32_t owner, Time sent, Time answered, Answer answer) {
  Operation op;
  op.verb = verb;
  op.owner = owner;
  op.sent = sent * kMs;
  op.answered = answered * kMs;
  op.answer = answer;
  return op;
}

inline Operation Granted(uint32_t owner, int64_t token, Time sent, Time answered, Time lease = 1000,
                         Time wait = 0) {
  Operation op = Op(Verb::kAcquire, owner, sent, answered, Answer::kToken);
  op.token = token;
  op.lease = lease * kMs;
  op.wait = wait * kMs;
  return op;
}

inline Operation Null(uint32_t owner, Time sent, Time answered, Time wait = 0) {
  Operation op = Op(Verb::kAcquire, owner, sent, answered, Answer::kNull);
  op.lease = kSecond;
  op.wait = wait * kMs;
  return op;
}

inline Operation Released(uint32_t owner, Time sent, Time answered, Answer answer = Answer::kYes) {
  return Op(Verb::kRelease, owner, sent, answered, answer);
}

inline Operation Touched(uint32_t owner, Time sent, Time answered, Time lease,
                         Answer answer = Answer::kYes) {
  Operation op = Op(Verb::kTouch, owner, sent, answered, answer);
  op.lease = lease * kMs;
  return op;
}

inline Operation Shown(Verb verb, uint32_t owner, int64_t token, Time sent,
                       Answer answer = Answer::kYes) {
  Operation op = Op(verb, owner, sent, sent, answer);
  op.token = token;
  return op;
}

inline Operation As(Sharing sharing, uint16_t limit, Operation op) {
  op.sharing = sharing;
  op.limit = limit;
  return op;
}

inline Operation Reading(const Operation& op) { return As(Sharing::kShared, 1, op); }

inline Operation Lost(Operation op) {
  op.answer = Answer::kLost;
  return op;
}

inline Operation Reentrant(Operation op) {
  op.reentrant = true;
  return op;
}

inline Operation WithFloor(int64_t floor, Operation op) {
  op.floor = floor;
  return op;
}

inline Operation WithLinger(Time linger, Operation op) {
  op.linger = linger * kMs;
  return op;
}

inline Operation WithMaxHold(Time max_hold, Operation op) {
  op.max_hold = max_hold * kMs;
  return op;
}

// So much of a limited number.
inline Operation Weighing(uint16_t weight, uint16_t limit, Operation op) {
  op.weight = weight;
  return As(Sharing::kLimit, limit, op);
}

// It does not block; it was told at `queued` that it is in line, and of its outcome by a message.
inline Operation Notified(Operation op, Time queued = 0) {
  op.notified = true;
  op.queued = queued * kMs;
  return op;
}

// By the channel and id of its hold.
inline Operation NotifiedAsBefore(Operation op) {
  op.bound = true;
  return Notified(op);
}

// A message says that a hold is lost.
inline Operation SaidToBeLost(uint32_t owner, int64_t token, Time at) {
  Operation op = Op(Verb::kLoss, owner, at, at, Answer::kNo);
  op.token = token;
  return op;
}

// Something may hold back the request or the answer.
inline Operation HeldBack(Operation op) {
  op.direct = false;
  return op;
}

inline Operation OnSeveral(Operation op) {
  op.several = true;
  return op;
}

inline Mark During(Mark::Kind kind, Time begin, Time end, Time amount = 0) {
  return {.kind = kind, .begin = begin * kMs, .end = end * kMs, .amount = amount * kMs};
}

using Checks = std::vector<std::string>;

// Those that call something in the history wrong, in the order of time.
inline Checks ChecksOf(const History& history, const Rules& rules = {}) {
  Checks checks;
  for (const Violation& violation : Check(history, rules).violations) {
    checks.push_back(violation.check);
  }
  return checks;
}

}  // namespace turnstile::fault

#endif  // TURNSTILE_TESTS_FAULT_CHECKER_TEST_HISTORIES_H_
