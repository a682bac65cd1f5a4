// Small histories, each with one thing wrong, and their twins with nothing wrong.

#include "fault/checker.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace turnstile::fault {
namespace {

constexpr Time kMs = kMillisecond;

// Histories are written in milliseconds.
Operation Op(Verb verb, uint32_t owner, Time sent, Time answered, Answer answer) {
  Operation op;
  op.verb = verb;
  op.owner = owner;
  op.sent = sent * kMs;
  op.answered = answered * kMs;
  op.answer = answer;
  return op;
}

Operation Granted(uint32_t owner, int64_t token, Time sent, Time answered, Time lease = 1000,
                  Time wait = 0) {
  Operation op = Op(Verb::kAcquire, owner, sent, answered, Answer::kToken);
  op.token = token;
  op.lease = lease * kMs;
  op.wait = wait * kMs;
  return op;
}

Operation Null(uint32_t owner, Time sent, Time answered, Time wait = 0) {
  Operation op = Op(Verb::kAcquire, owner, sent, answered, Answer::kNull);
  op.lease = kSecond;
  op.wait = wait * kMs;
  return op;
}

Operation Released(uint32_t owner, Time sent, Time answered, Answer answer = Answer::kYes) {
  return Op(Verb::kRelease, owner, sent, answered, answer);
}

Operation Touched(uint32_t owner, Time sent, Time answered, Time lease,
                  Answer answer = Answer::kYes) {
  Operation op = Op(Verb::kTouch, owner, sent, answered, answer);
  op.lease = lease * kMs;
  return op;
}

Operation Shown(Verb verb, uint32_t owner, int64_t token, Time sent, Answer answer = Answer::kYes) {
  Operation op = Op(verb, owner, sent, sent, answer);
  op.token = token;
  return op;
}

Operation As(Sharing sharing, uint16_t limit, Operation op) {
  op.sharing = sharing;
  op.limit = limit;
  return op;
}

Operation OnSeveral(Operation op) {
  op.several = true;
  return op;
}

Mark During(Mark::Kind kind, Time begin, Time end, Time amount = 0) {
  return {.kind = kind, .begin = begin * kMs, .end = end * kMs, .amount = amount * kMs};
}

using Checks = std::vector<std::string>;

Checks ChecksOf(const History& history) {
  Checks checks;
  for (const Violation& violation : Check(history).violations) checks.push_back(violation.check);
  return checks;
}

TEST(CheckerTest, NothingIsWrongWithNothing) { EXPECT_EQ(ChecksOf({}), Checks{}); }

TEST(CheckerTest, TwoHoldersAtOnce) {
  EXPECT_EQ(ChecksOf({{Granted(1, 10, 0, 1), Granted(2, 20, 500, 501)}, {}}), Checks{"C1"});
  // The first lease may be over.
  EXPECT_EQ(ChecksOf({{Granted(1, 10, 0, 1), Granted(2, 20, 500, 999)}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{Granted(1, 10, 0, 1), Released(1, 400, 401), Granted(2, 20, 500, 501)}, {}}),
            Checks{});
  // A release counts from the moment of its sending, whether or not it is answered.
  EXPECT_EQ(ChecksOf({{Granted(1, 10, 0, 1), Released(1, 400, 600, Answer::kLost),
                       Granted(2, 20, 300, 500)},
                      {}}),
            Checks{});
}

TEST(CheckerTest, ATouchMakesTheHoldLonger) {
  const Operation first = Granted(1, 10, 0, 1);
  EXPECT_EQ(ChecksOf({{first, Touched(1, 900, 901, 1000), Granted(2, 20, 1500, 1501)}, {}}),
            Checks{"C1"});
  EXPECT_EQ(ChecksOf({{first, Touched(1, 900, 901, 1000), Granted(2, 20, 1500, 1900)}, {}}),
            Checks{});
  // Or shorter, also if nobody knows whether it was carried out.
  for (const Answer answer : {Answer::kYes, Answer::kLost}) {
    EXPECT_EQ(ChecksOf({{first, Touched(1, 100, 101, 50, answer), Granted(2, 20, 500, 501)}, {}}),
              Checks{});
  }
  // And a step of the clock cuts that.
  const std::vector<Operation> lost = {first, Touched(1, 100, 101, 800, Answer::kLost),
                                       Granted(2, 20, 600, 601)};
  EXPECT_EQ(ChecksOf({lost, {}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({lost, {During(Mark::Kind::kStep, 300, 310, 350)}}), Checks{});
}

TEST(CheckerTest, SharersAndLimits) {
  const auto shared = [](const Operation& op) { return As(Sharing::kShared, 1, op); };
  const auto limit = [](const Operation& op) { return As(Sharing::kLimit, 2, op); };
  const Operation a = Granted(1, 10, 0, 1);
  const Operation b = Granted(2, 20, 100, 101);
  const Operation c = Granted(3, 30, 200, 201);
  EXPECT_EQ(ChecksOf({{shared(a), shared(b), shared(c)}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{limit(a), limit(b)}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{limit(a), limit(b), limit(c)}, {}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({{shared(a), b}, {}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({{a, shared(b)}, {}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({{shared(a), limit(b)}, {}}), Checks{"C1"});
}

TEST(CheckerTest, StrangersAndClocksEndHolds) {
  const std::vector<Operation> ops = {Granted(1, 10, 0, 1), Granted(2, 20, 500, 501)};
  EXPECT_EQ(ChecksOf({ops, {During(Mark::Kind::kForced, 300, 310)}}), Checks{});
  EXPECT_EQ(ChecksOf({ops, {During(Mark::Kind::kForced, 600, 610)}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({ops, {During(Mark::Kind::kStep, 300, 310, 600)}}), Checks{});
  EXPECT_EQ(ChecksOf({ops, {During(Mark::Kind::kStep, 300, 310, 400)}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({ops, {During(Mark::Kind::kStep, 300, 310, -600)}}), Checks{"C1"});
  // A loss of writes does not: that is what the grace is for.
  EXPECT_EQ(ChecksOf({ops, {During(Mark::Kind::kLossy, 300, 310)}}), Checks{"C1"});
}

TEST(CheckerTest, TheRegister) {
  const Operation first = Granted(1, 30, 0, 1);
  const Operation later = Granted(2, 20, 2000, 2001);  // with a lower token, which is C3
  EXPECT_EQ(ChecksOf({{first, Shown(Verb::kWrite, 1, 30, 10), Released(1, 20, 21), later,
                       Shown(Verb::kWrite, 2, 20, 2010)},
                      {}}),
            (Checks{"C3", "C2"}));
  // Who is late is refused, rightly.
  const History late{{Granted(1, 10, 0, 1), Granted(2, 20, 1500, 1501),
                      Shown(Verb::kWrite, 2, 20, 1510), Shown(Verb::kWrite, 1, 10, 1520)},
                     {}};
  EXPECT_EQ(ChecksOf(late), Checks{});
  EXPECT_EQ(Check(late).writes, 2U);
  EXPECT_EQ(Check(late).refused, 1U);
}

TEST(CheckerTest, TheServerRefusesNoRightfulHolder) {
  const Operation grant = Granted(1, 10, 0, 1);
  const std::vector<Operation> refusals = {Touched(1, 500, 501, 1000, Answer::kNo),
                                           Released(1, 500, 501, Answer::kNo),
                                           Shown(Verb::kFence, 1, 10, 500, Answer::kNo)};
  for (const Operation& refusal : refusals) {
    EXPECT_EQ(ChecksOf({{grant, refusal}, {}}), Checks{"C2"});
    EXPECT_EQ(ChecksOf({{grant, refusal}, {During(Mark::Kind::kForced, 0, 100)}}), Checks{});
    EXPECT_EQ(ChecksOf({{grant, refusal}, {During(Mark::Kind::kLossy, 100, 200)}}), Checks{});
  }
  EXPECT_EQ(ChecksOf({{grant, Touched(1, 997, 999, 1000, Answer::kNo)}, {}}), Checks{});
}

// A touch after a loss of writes may be of an older hold.
TEST(CheckerTest, ATouchDoesNotTellTheToken) {
  const std::vector<Operation> ops = {Granted(1, 10, 0, 1), Touched(1, 400, 401, 1000),
                                      Shown(Verb::kFence, 1, 10, 500, Answer::kNo)};
  EXPECT_EQ(ChecksOf({ops, {}}), Checks{"C2"});
  EXPECT_EQ(ChecksOf({ops, {During(Mark::Kind::kLossy, 300, 310)}}), Checks{});
}

TEST(CheckerTest, NobodyWhoWasReplacedIsObeyed) {
  const std::vector<Operation> replaced = {Granted(1, 10, 0, 1), Granted(2, 20, 1500, 1501)};
  const std::vector<Operation> calls = {Touched(1, 1600, 1601, 1), Released(1, 1600, 1601),
                                        Shown(Verb::kFence, 1, 10, 1600)};
  for (const Operation& call : calls) {
    std::vector<Operation> ops = replaced;
    ops.push_back(call);
    EXPECT_EQ(ChecksOf({ops, {}}), Checks{"C2"});
    EXPECT_EQ(ChecksOf({ops, {During(Mark::Kind::kLossy, 1550, 1560)}}), Checks{});
  }
}

// Who asked again and was not told may have a newer hold.
TEST(CheckerTest, OneThatWasReplacedMayHaveComeAgain) {
  Operation again = Op(Verb::kAcquire, 1, 1200, 1300, Answer::kLost);
  again.lease = kSecond;
  const std::vector<Operation> before = {Granted(1, 10, 0, 1), Granted(2, 20, 1100, 1101),
                                         Released(2, 1150, 1151)};
  for (const Operation& op : {Released(1, 1400, 1401), Touched(1, 1400, 1401, 50)}) {
    std::vector<Operation> ops = before;
    ops.push_back(op);
    EXPECT_EQ(ChecksOf({ops, {}}), Checks{"C2"});
    ops.push_back(again);
    EXPECT_EQ(ChecksOf({ops, {}}), Checks{});
  }
  // A touch does not tell which.
  EXPECT_EQ(ChecksOf({{Granted(1, 10, 0, 1), again, Touched(1, 1400, 1401, 1000),
                       Shown(Verb::kFence, 1, 10, 1500, Answer::kNo)},
                      {}}),
            Checks{});
  // One that was held back may come after what was asked since.
  std::vector<Operation> late = {Granted(1, 10, 0, 1, 50), Granted(1, 12, 910, 911, 50),
                                 Granted(2, 20, 970, 971, 20), Touched(1, 1000, 1001, 10)};
  late.push_back(Op(Verb::kAcquire, 1, 60, 900, Answer::kLost));
  late.back().lease = 50 * kMs;
  EXPECT_EQ(ChecksOf({late, {}}), Checks{"C2"});
  late.back().direct = false;
  EXPECT_EQ(ChecksOf({late, {}}), Checks{});
  // Its token tells which.
  std::vector<Operation> ops = before;
  ops.push_back(again);
  ops.push_back(Shown(Verb::kFence, 1, 10, 1400));
  EXPECT_EQ(ChecksOf({ops, {}}), Checks{"C2"});
}

TEST(CheckerTest, AHoldThatIsOverIsNotObeyed) {
  const Operation first = Granted(1, 10, 0, 1);
  const std::vector<Operation> late = {Touched(1, 1100, 1101, 1000), Released(1, 1100, 1101),
                                       Shown(Verb::kFence, 1, 10, 1100)};
  for (const Operation& op : late) {
    EXPECT_EQ(ChecksOf({{first, op}, {}}), Checks{"C2"});
    EXPECT_EQ(ChecksOf({{first, Touched(1, 500, 501, 1000), op}, {}}), Checks{});
    EXPECT_EQ(ChecksOf({{first, Touched(1, 500, 501, 1000, Answer::kLost), op}, {}}), Checks{});
    EXPECT_EQ(ChecksOf({{first, op}, {During(Mark::Kind::kStep, 500, 501, -200)}}), Checks{});
    // What lingers is not its owner's any more.
    Operation lingers = first;
    lingers.linger = 500 * kMs;
    EXPECT_EQ(ChecksOf({{lingers, op}, {}}), Checks{"C2"});
  }
}

TEST(CheckerTest, WhatLingersKeepsOthersOut) {
  Operation first = Granted(1, 10, 0, 1);
  const Operation second = Granted(2, 20, 1100, 1101);
  EXPECT_EQ(ChecksOf({{first, second}, {}}), Checks{});
  first.linger = 500 * kMs;
  EXPECT_EQ(ChecksOf({{first, second}, {}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({{first, Released(1, 900, 901), second}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{first, second}, {During(Mark::Kind::kForced, 1050, 1051)}}), Checks{});
  // The end of a session is no release.
  const Operation closed = Op(Verb::kClose, 1, 700, 720, Answer::kYes);
  EXPECT_EQ(ChecksOf({{first, closed, second}, {}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({{first, closed, Granted(2, 20, 1250, 1251)}, {}}), Checks{});
}

TEST(CheckerTest, TokensRise) {
  const Operation first = Granted(1, 10, 0, 1, 100);
  EXPECT_EQ(ChecksOf({{first, Granted(2, 9, 200, 201)}, {}}), Checks{"C3"});
  EXPECT_EQ(ChecksOf({{first, Granted(2, 10, 200, 201)}, {}}), (Checks{"C3", "C3"}));
  EXPECT_EQ(ChecksOf({{first, Granted(2, 11, 200, 201)}, {}}), Checks{});
  // It was asked for before the other token was told.
  EXPECT_EQ(ChecksOf({{Granted(1, 10, 0, 5, 1), Granted(2, 9, 4, 30)}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{Granted(1, int64_t{1} << 53, 0, 1)}, {}}), Checks{"C3"});
}

// The next hold of an owner is a new one too.
TEST(CheckerTest, TokensRiseForWhoComesAgain) {
  const std::vector<Operation> ops = {Granted(1, 100, 0, 1), Granted(2, 200, 1100, 1101),
                                      Released(2, 1150, 1151), Granted(1, 150, 1200, 1201)};
  EXPECT_EQ(ChecksOf({ops, {}}), Checks{"C3"});
}

// A lost hold, and the one before it, which is live again by a clock that is behind.
TEST(CheckerTest, WhatWasReplacedMayBeLiveAgain) {
  Operation revived = Op(Verb::kTouch, 1, 350, 351, Answer::kYes);
  revived.lease = kSecond;
  Operation touched = Op(Verb::kTouch, 1, 360, 361, Answer::kYes);
  touched.lease = kSecond;
  const std::vector<Operation> ops = {Granted(1, 10, 0, 1, 100), Granted(2, 20, 200, 201), revived,
                                      touched};
  const Mark lossy = During(Mark::Kind::kLossy, 300, 310);
  const Mark back = During(Mark::Kind::kStep, 300, 310, -500);
  EXPECT_EQ(ChecksOf({ops, {lossy, back}}), Checks{});
  EXPECT_EQ(ChecksOf({ops, {lossy}}), Checks{"C1"});
}

TEST(CheckerTest, WaitsEnd) {
  const Operation holder = Granted(9, 1, 0, 1, 60000);
  EXPECT_EQ(ChecksOf({{holder, Null(1, 2, 1602, 500)}, {}}), Checks{"C4"});
  EXPECT_EQ(ChecksOf({{holder, Null(1, 2, 1402, 500)}, {}}), Checks{});
  EXPECT_EQ(
      ChecksOf({{holder, Null(1, 2, 1602, 500)}, {During(Mark::Kind::kUnavailable, 100, 300)}}),
      Checks{});
}

TEST(CheckerTest, FreeLocksAreHandedOver) {
  const auto handed_over = [](Time at) {
    return std::vector<Operation>{Granted(1, 10, 0, 1), Granted(2, 20, 100, at, 1000, 2000),
                                  Released(1, 400, 401)};
  };
  EXPECT_EQ(ChecksOf({handed_over(450), {}}), Checks{});
  EXPECT_EQ(ChecksOf({handed_over(600), {}}), Checks{"C4"});
  EXPECT_EQ(ChecksOf({handed_over(600), {During(Mark::Kind::kUnavailable, 420, 580)}}), Checks{});
  // A lease that is over, its linger over too.
  const auto expired = [](Time linger, Time at) {
    Operation first = Granted(1, 10, 0, 1);
    first.linger = linger * kMs;
    return std::vector<Operation>{first, Granted(2, 20, 100, at, 1000, 2000)};
  };
  EXPECT_EQ(ChecksOf({expired(0, 1050), {}}), Checks{});
  EXPECT_EQ(ChecksOf({expired(0, 1150), {}}), Checks{"C4"});
  EXPECT_EQ(ChecksOf({expired(300, 1350), {}}), Checks{});
  // A release that was lost with a server.
  EXPECT_EQ(ChecksOf({handed_over(950), {During(Mark::Kind::kLossy, 395, 410)}}), Checks{});
  EXPECT_EQ(ChecksOf({handed_over(950), {During(Mark::Kind::kLossy, 495, 510)}}), Checks{"C4"});
  EXPECT_EQ(ChecksOf({handed_over(1150), {During(Mark::Kind::kLossy, 395, 410)}}), Checks{"C4"});
  // The end of a session.
  std::vector<Operation> closed = handed_over(600);
  closed[2] = Op(Verb::kClose, 1, 400, 420, Answer::kYes);
  EXPECT_EQ(ChecksOf({closed, {}}), Checks{"C4"});
  closed[2].answer = Answer::kLost;
  EXPECT_EQ(ChecksOf({closed, {}}), Checks{});
  // Somebody whose answer was lost may hold it.
  std::vector<Operation> ops = handed_over(600);
  ops.push_back(Op(Verb::kAcquire, 3, 50, 60, Answer::kLost));
  ops.back().lease = kSecond;
  EXPECT_EQ(ChecksOf({ops, {}}), Checks{});
  // For longer, if the clock is set back meanwhile.
  ops.back().lease = 100 * kMs;
  EXPECT_EQ(ChecksOf({ops, {}}), Checks{"C4"});
  EXPECT_EQ(ChecksOf({ops, {During(Mark::Kind::kStep, 90, 91, -450)}}), Checks{});
}

TEST(CheckerTest, FirstComeFirstServed) {
  // What owner 9 asked and was told in between shows that the first request had arrived.
  const Operation holder = Granted(8, 1, 0, 1, 60000);
  const Operation release = Released(8, 300, 301);
  const Operation between = Null(9, 110, 120);
  const Operation early = Granted(1, 20, 100, 340, 10, 1000);
  const Operation late = Granted(2, 10, 200, 302, 10, 1000);
  EXPECT_EQ(ChecksOf({{holder, release, between, early, late}, {}}), Checks{"C5"});
  EXPECT_EQ(ChecksOf({{holder, release, early, late}, {}}), Checks{});
  Operation again = late;
  again.retry = true;
  EXPECT_EQ(ChecksOf({{holder, release, between, early, again}, {}}), Checks{});
  // In vain.
  EXPECT_EQ(ChecksOf({{holder, release, between, Null(1, 100, 390, 280), late}, {}}), Checks{"C5"});
  EXPECT_EQ(ChecksOf({{holder, release, between, Null(1, 100, 310, 200), late}, {}}), Checks{});
  // Readers come in together, in any order.
  const auto reader = [](const Operation& op) { return As(Sharing::kShared, 1, op); };
  EXPECT_EQ(ChecksOf({{holder, release, between, reader(Granted(1, 20, 100, 310, 10, 1000)),
                       reader(late)},
                      {}}),
            Checks{});
  EXPECT_EQ(ChecksOf({{holder, release, between, reader(early), reader(late)}, {}}), Checks{"C5"});
  // Readers pass a reader that waits for another lock.
  EXPECT_EQ(ChecksOf({{holder, release, between, OnSeveral(reader(early)), reader(late)}, {}}),
            Checks{});
  EXPECT_EQ(ChecksOf({{holder, release, between, OnSeveral(reader(early)), late}, {}}),
            Checks{"C5"});
}

TEST(CheckerTest, AskingAgain) {
  const Operation first = Granted(1, 10, 0, 1);
  EXPECT_EQ(ChecksOf({{first, Granted(1, 10, 100, 101)}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{first, Granted(1, 12, 100, 101)}, {}}), Checks{"C6"});
  EXPECT_EQ(ChecksOf({{first, Null(1, 100, 101)}, {}}), Checks{"C6"});
  EXPECT_EQ(ChecksOf({{first, Granted(1, 12, 1100, 1101)}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{first, Granted(1, 9, 1100, 1101)}, {}}), (Checks{"C6", "C3"}));
  // Unless what was there before is back.
  EXPECT_EQ(ChecksOf({{first, Granted(1, 9, 1100, 1101)}, {During(Mark::Kind::kLossy, 500, 510)}}),
            Checks{});
  Operation stranger = Released(7, 100, 101);
  stranger.stranger = true;
  EXPECT_EQ(ChecksOf({{first, stranger}, {}}), Checks{"C6"});
}

TEST(CheckerTest, EachGrantHasToBeReleased) {
  const auto counted = [](Operation op) {
    op.reentrant = true;
    return op;
  };
  const Operation first = counted(Granted(1, 10, 0, 1));
  const Operation again = counted(Granted(1, 10, 100, 101));
  const Operation once = Released(1, 200, 201);
  const Operation twice = Released(1, 300, 301);
  const Operation next = Granted(2, 20, 400, 401);
  EXPECT_EQ(ChecksOf({{first, again, once, twice, next}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{first, again, once, next}, {}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({{first, again, once, Released(1, 300, 301, Answer::kNo)}, {}}), Checks{"C2"});
  EXPECT_EQ(ChecksOf({{first, once, twice}, {}}), Checks{"C6"});
  // Without REENTRANT the second is the same grant.
  EXPECT_EQ(ChecksOf({{first, Granted(1, 10, 100, 101), once, next}, {}}), Checks{});
  // One whose answer was lost may count or not, and so may a release.
  Operation lost = again;
  lost.answer = Answer::kLost;
  EXPECT_EQ(ChecksOf({{first, lost, once, next}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{first, lost, once, twice, next}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{first, again, Released(1, 200, 201, Answer::kLost), next}, {}}),
            Checks{"C1"});
  EXPECT_EQ(ChecksOf({{first, again, Released(1, 200, 201, Answer::kLost), twice, next}, {}}),
            Checks{});
  // When the lease is over one release ends the linger.
  Operation lingers = again;
  lingers.linger = 500 * kMs;
  const Operation later = Granted(2, 20, 1300, 1301);
  EXPECT_EQ(ChecksOf({{first, lingers, later}, {}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({{first, lingers, Released(1, 1200, 1201, Answer::kLost), later}, {}}),
            Checks{});
  // It is free at the last, and not before.
  const auto handed_over = [&](Time at) {
    return std::vector<Operation>{first, again, once, twice, Granted(2, 20, 150, at, 1000, 2000)};
  };
  EXPECT_EQ(ChecksOf({handed_over(350), {}}), Checks{});
  EXPECT_EQ(ChecksOf({handed_over(250), {}}), (Checks{"C1", "C2"}));
  EXPECT_EQ(ChecksOf({handed_over(450), {}}), Checks{"C4"});
  // Older data has another count.
  for (const auto kind : {Mark::Kind::kLossy, Mark::Kind::kForced}) {
    const Mark mark = During(kind, 150, 151);
    EXPECT_EQ(ChecksOf({{first, again, once, next}, {mark}}), Checks{});
    EXPECT_EQ(ChecksOf({{first, again, once, twice, Released(1, 310, 311)}, {mark}}), Checks{});
  }
  // Also if it came back after the owner had got another hold.
  EXPECT_EQ(
      ChecksOf({{first, again, counted(Granted(1, 15, 170, 171)), Granted(1, 10, 190, 191), once,
                 twice, Released(1, 310, 311)},
                {During(Mark::Kind::kForced, 150, 180), During(Mark::Kind::kLossy, 150, 180)}}),
      Checks{});
  // And what was over may be live again.
  const std::vector<Operation> over = {first, Released(1, 1100, 1101, Answer::kNo),
                                       Released(1, 1200, 1201)};
  EXPECT_EQ(ChecksOf({over, {}}), (Checks{"C2", "C6"}));
  EXPECT_EQ(ChecksOf({over, {During(Mark::Kind::kStep, 1150, 1160, -500)}}), Checks{});
  // The end of a session ends all of them.
  EXPECT_EQ(ChecksOf({{first, again, Op(Verb::kClose, 1, 200, 220, Answer::kYes), next}, {}}),
            Checks{});
}

TEST(CheckerTest, Floors) {
  const auto above = [](int64_t floor, Operation op) {
    op.floor = floor;
    return op;
  };
  const Operation first = Granted(1, 10, 0, 1);
  EXPECT_EQ(ChecksOf({{above(10, first)}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{above(11, first)}, {}}), Checks{"C3"});
  // A holder keeps a token that is high enough, and gets exactly the floor otherwise.
  EXPECT_EQ(ChecksOf({{first, above(9, Granted(1, 10, 100, 101))}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{first, above(9, Granted(1, 12, 100, 101))}, {}}), Checks{"C6"});
  EXPECT_EQ(ChecksOf({{first, above(12, Granted(1, 12, 100, 101))}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{first, above(12, Granted(1, 13, 100, 101))}, {}}), Checks{"C6"});
  // If the answer was lost, nobody knows which token it is.
  const Operation lost = [&] {
    Operation op = above(12, Granted(1, 0, 100, 101));
    op.answer = Answer::kLost;
    return op;
  }();
  EXPECT_EQ(ChecksOf({{first, lost, Shown(Verb::kFence, 1, 10, 200, Answer::kNo)}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{first, lost, Granted(1, 12, 200, 201)}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{first, Shown(Verb::kFence, 1, 10, 200, Answer::kNo)}, {}}), Checks{"C2"});
  // It is the same hold: a release ends it.
  EXPECT_EQ(ChecksOf({{first, above(12, Granted(1, 12, 100, 101)), Released(1, 200, 201),
                       Granted(2, 20, 300, 301)},
                      {}}),
            Checks{});
  EXPECT_EQ(ChecksOf({{first, above(12, Granted(1, 12, 100, 101)), Granted(2, 20, 300, 301)}, {}}),
            Checks{"C1"});
  const auto handed_over = [&](Time at) {
    return std::vector<Operation>{first, above(12, Granted(1, 12, 100, 101)), Released(1, 200, 201),
                                  Granted(2, 20, 150, at, 1000, 2000)};
  };
  EXPECT_EQ(ChecksOf({handed_over(250), {}}), Checks{});
  EXPECT_EQ(ChecksOf({handed_over(350), {}}), Checks{"C4"});
  // A holder that is back with older data may name a token that was given since.
  const std::vector<Operation> back = {first, Released(1, 50, 51), Granted(2, 12, 100, 101, 50),
                                       above(12, Granted(1, 12, 300, 301))};
  EXPECT_EQ(ChecksOf({back, {During(Mark::Kind::kLossy, 200, 201)}}), Checks{});
  EXPECT_EQ(ChecksOf({back, {}}), (Checks{"C3", "C3"}));
  // Or a lower one, which the register refuses.
  const std::vector<Operation> refused = {first,
                                          Released(1, 50, 51),
                                          Granted(2, 20, 100, 101, 50),
                                          Shown(Verb::kWrite, 2, 20, 110),
                                          above(12, Granted(1, 12, 300, 301)),
                                          Shown(Verb::kWrite, 1, 12, 310)};
  EXPECT_EQ(ChecksOf({refused, {During(Mark::Kind::kLossy, 200, 201)}}), Checks{});
  EXPECT_EQ(ChecksOf({refused, {}}), (Checks{"C3", "C2"}));
}

TEST(CheckerTest, ReadersThatWriteAndWritersThatRead) {
  const auto shared = [](const Operation& op) { return As(Sharing::kShared, 1, op); };
  const Operation reader = shared(Granted(1, 10, 0, 1));
  const Operation other = shared(Granted(2, 20, 300, 301));
  // An upgrade is a new token,
  const Operation upgraded = Granted(1, 12, 100, 101);
  EXPECT_EQ(ChecksOf({{reader, upgraded}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{reader, Granted(1, 10, 100, 101)}, {}}), Checks{"C6"});
  // may be in vain,
  EXPECT_EQ(ChecksOf({{reader, Null(1, 100, 101), other}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{reader, Null(1, 100, 101), Granted(2, 20, 300, 301)}, {}}), Checks{"C1"});
  // keeps others out, and is the only hold of its owner.
  EXPECT_EQ(ChecksOf({{reader, upgraded, other}, {}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({{reader, upgraded, Released(1, 200, 201), Granted(2, 20, 300, 301)}, {}}),
            Checks{});
  // One that was lost is one or not.
  Operation lost = upgraded;
  lost.answer = Answer::kLost;
  EXPECT_EQ(ChecksOf({{reader, lost, other}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{reader, lost, Shown(Verb::kFence, 1, 10, 200, Answer::kNo)}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{reader, lost, Granted(2, 20, 300, 301)}, {}}), Checks{"C1"});

  // Who only reads from now on keeps its token, and lets other readers in.
  const Operation writer = Granted(1, 10, 0, 1);
  const Operation downgraded = shared(Granted(1, 10, 100, 101));
  EXPECT_EQ(ChecksOf({{writer, downgraded, other}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{writer, downgraded, Granted(2, 20, 300, 301)}, {}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({{writer, shared(Granted(1, 12, 100, 101))}, {}}), Checks{"C6"});
  EXPECT_EQ(ChecksOf({{writer, shared(Null(1, 100, 101))}, {}}), Checks{"C6"});
  lost = downgraded;
  lost.answer = Answer::kLost;
  EXPECT_EQ(ChecksOf({{writer, lost, other}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{writer, lost, Granted(2, 20, 300, 301)}, {}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({{writer, downgraded, Released(1, 200, 201), Granted(2, 20, 300, 301)}, {}}),
            Checks{});
}

// A change may be undone, or not be carried out: then nobody knows whether its owner writes.
TEST(CheckerTest, ReadersThatPerhapsWrite) {
  const auto shared = [](const Operation& op) { return As(Sharing::kShared, 1, op); };
  const auto lost = [](Operation op) {
    op.answer = Answer::kLost;
    return op;
  };
  const Operation touched = Touched(1, 300, 301, 1000);
  const Operation reader = shared(Granted(1, 10, 0, 1));
  const Operation upgraded = Granted(1, 12, 100, 101);
  const Operation other = shared(Granted(2, 20, 1150, 1151));
  const Mark lossy = During(Mark::Kind::kLossy, 200, 210);
  EXPECT_EQ(ChecksOf({{reader, upgraded, touched, other}, {}}), Checks{"C1"});
  EXPECT_EQ(ChecksOf({{reader, upgraded, touched, other}, {lossy}}), Checks{});
  EXPECT_EQ(ChecksOf({{reader, upgraded, touched, Granted(2, 20, 1150, 1151)}, {lossy}}),
            Checks{"C1"});
  EXPECT_EQ(ChecksOf({{reader, upgraded, touched, Null(1, 310, 311)}, {}}), Checks{"C6"});
  EXPECT_EQ(ChecksOf({{reader, upgraded, touched, Null(1, 310, 311)}, {lossy}}), Checks{});
  // Others wait for who perhaps writes.
  const Operation writer = Granted(1, 10, 0, 1);
  const Operation downgraded = shared(Granted(1, 10, 100, 101));
  const Operation waiter = shared(Granted(2, 20, 350, 900, 1000, 2000));
  EXPECT_EQ(ChecksOf({{writer, downgraded, touched, waiter}, {}}), Checks{"C4"});
  EXPECT_EQ(ChecksOf({{writer, downgraded, touched, waiter}, {lossy}}), Checks{});
  EXPECT_EQ(ChecksOf({{writer, lost(downgraded), touched, waiter}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{reader, lost(upgraded), touched, waiter}, {}}), Checks{});
}

TEST(CheckerTest, ReadersAreLetInBesideReaders) {
  const auto shared = [](const Operation& op) { return As(Sharing::kShared, 1, op); };
  const Operation reader = shared(Granted(1, 10, 0, 1));
  const Operation late = shared(Granted(2, 20, 100, 350, 1000, 2000));
  EXPECT_EQ(ChecksOf({{reader, late}, {}}), Checks{"C4"});
  EXPECT_EQ(ChecksOf({{reader, late}, {During(Mark::Kind::kUnavailable, 100, 300)}}), Checks{});
  // Unless somebody waits who wants to write.
  EXPECT_EQ(ChecksOf({{reader, Null(3, 90, 300, 210), late}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{reader, Null(3, 90, 200, 110), late}, {}}), Checks{"C4"});
  // A writer that reads from now on lets them in.
  const Operation writer = Granted(1, 10, 0, 1);
  const auto downgraded = [&](Time at) { return shared(Granted(1, 10, at, at + 1)); };
  EXPECT_EQ(ChecksOf({{writer, downgraded(300), late}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{writer, downgraded(200), late}, {}}), Checks{"C4"});
}

TEST(HistoryTest, IsReadAsItWasWritten) {
  Operation odd = OnSeveral(As(Sharing::kLimit, 7, Granted(1, 10, 0, 1, 5, 6)));
  odd.retry = true;
  odd.reentrant = true;
  odd.session = true;
  odd.floor = 9;
  odd.linger = 3;
  odd.server = 4;
  Mark mark = During(Mark::Kind::kForced, 1, 2, 3);
  mark.what = "a DEL of all";
  const History history{{odd, Released(2, 3, 4, Answer::kLost)}, {mark}};
  std::stringstream text;
  Write(history, text);
  const std::string written = text.str();
  const History read = ReadHistory(text);
  std::stringstream again;
  Write(read, again);
  EXPECT_EQ(again.str(), written);
  EXPECT_EQ(read.marks[0].what, mark.what);
  EXPECT_EQ(ToText(read.operations[0]), ToText(odd));
  std::istringstream nonsense("op acquire token\n");
  EXPECT_THROW(ReadHistory(nonsense), std::runtime_error);
}

TEST(StoryTest, TellsWhatIsNearAndPointsItOut) {
  History history{{Granted(1, 10, 0, 1), Granted(2, 20, 500, 501)},
                  {During(Mark::Kind::kLossy, 300, 310)}};
  for (uint32_t i = 0; i < 100; i++) {
    history.operations.push_back(Null(100 + i, 2000 + i, 2000 + i));
  }
  const std::vector<Violation> violations = Check(history).violations;
  ASSERT_EQ(violations.size(), 1U);
  const std::string story = Story(history, violations[0], 5);
  EXPECT_NE(story.find("  >> 0.000 ms to 1.000 ms: owner 1"), std::string::npos) << story;
  EXPECT_NE(story.find("  >> 500.000 ms to 501.000 ms: owner 2"), std::string::npos) << story;
  EXPECT_NE(story.find("lossy"), std::string::npos) << story;
  EXPECT_EQ(std::count(story.begin(), story.end(), '\n'), 6) << story;
}

}  // namespace
}  // namespace turnstile::fault
