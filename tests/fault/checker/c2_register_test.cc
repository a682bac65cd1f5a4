#include <gtest/gtest.h>

#include <vector>

#include "fault/checker/test_histories.h"

namespace turnstile::fault {
namespace {

TEST(RegisterTest, TheRegister) {
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

TEST(RegisterTest, TheServerRefusesNoRightfulHolder) {
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
TEST(RegisterTest, ATouchDoesNotTellTheToken) {
  const std::vector<Operation> ops = {Granted(1, 10, 0, 1), Touched(1, 400, 401, 1000),
                                      Shown(Verb::kFence, 1, 10, 500, Answer::kNo)};
  EXPECT_EQ(ChecksOf({ops, {}}), Checks{"C2"});
  EXPECT_EQ(ChecksOf({ops, {During(Mark::Kind::kLossy, 300, 310)}}), Checks{});
}

TEST(RegisterTest, NobodyWhoWasReplacedIsObeyed) {
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
TEST(RegisterTest, OneThatWasReplacedMayHaveComeAgain) {
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

// A RENAME takes the lock away, and another one brings it back.
TEST(RegisterTest, ReplacedHoldMayBeBroughtBack) {
  const std::vector<Operation> ops = {Granted(1, 10, 0, 1), Granted(2, 20, 200, 201, 100),
                                      Shown(Verb::kFence, 1, 10, 400)};
  const Mark away = During(Mark::Kind::kForced, 100, 100);
  EXPECT_EQ(ChecksOf({ops, {away, During(Mark::Kind::kForced, 350, 350, 1000)}}), Checks{});
  EXPECT_EQ(ChecksOf({ops, {away}}), Checks{"C2"});
}

TEST(RegisterTest, AHoldThatIsOverIsNotObeyed) {
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

TEST(RegisterTest, AHoldThatHasLastedAsLongAsItMayIsNotObeyed) {
  const Operation first = WithMaxHold(1200, Granted(1, 10, 0, 1));
  const Operation touched = Touched(1, 900, 901, 1000);
  const std::vector<Operation> late = {Touched(1, 1250, 1251, 1000), Released(1, 1250, 1251),
                                       Shown(Verb::kFence, 1, 10, 1250)};
  for (const Operation& op : late) {
    EXPECT_EQ(ChecksOf({{first, touched, op}, {}}), Checks{"C2"});
    EXPECT_EQ(ChecksOf({{WithMaxHold(1300, first), touched, op}, {}}), Checks{});
    EXPECT_EQ(ChecksOf({{first, Lost(touched), op}, {}}), Checks{"C2"});
    EXPECT_EQ(ChecksOf({{first, touched, op}, {During(Mark::Kind::kStep, 500, 501, -200)}}),
              Checks{});
    // Also if that was set later, though not if nobody knows.
    const Operation again = WithMaxHold(1200, Granted(1, 10, 500, 501));
    const Operation plain = Granted(1, 10, 0, 1);
    EXPECT_EQ(ChecksOf({{plain, again, touched, op}, {}}), Checks{"C2"});
    EXPECT_EQ(ChecksOf({{plain, Lost(again), touched, op}, {}}), Checks{});
    EXPECT_EQ(ChecksOf({{first, WithMaxHold(9000, again), touched, op}, {}}), Checks{"C2"});
  }
}

TEST(RegisterTest, AnUpgradeDoesNotBeginAnew) {
  const Operation reads = WithMaxHold(1200, Reading(Granted(1, 10, 0, 1)));
  const Operation writes = Granted(1, 12, 500, 501);
  const Operation late = Shown(Verb::kFence, 1, 12, 1250);
  EXPECT_EQ(ChecksOf({{reads, writes, Touched(1, 900, 901, 1000), late}, {}}), Checks{"C2"});
  // It may have been a new hold.
  const Operation anew = Granted(1, 12, 500, 1010);
  EXPECT_EQ(ChecksOf({{reads, anew, Touched(1, 1100, 1101, 1000), late}, {}}), Checks{});
}

TEST(RegisterTest, AHoldIsNotSaidToBeLostWhileItIsLive) {
  const Operation first = Granted(1, 10, 0, 1);
  EXPECT_EQ(ChecksOf({{first, SaidToBeLost(1, 10, 500)}, {}}), Checks{"C2"});
  EXPECT_EQ(ChecksOf({{first, SaidToBeLost(1, 10, 1050)}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{first, SaidToBeLost(1, 9, 500)}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{first, Touched(1, 900, 901, 1000), SaidToBeLost(1, 10, 1050)}, {}}),
            Checks{"C2"});
  for (const Mark& mark :
       {During(Mark::Kind::kForced, 300, 301), During(Mark::Kind::kLossy, 300, 301),
        During(Mark::Kind::kStep, 300, 301, 700), During(Mark::Kind::kStep, 300, 301, -700)}) {
    EXPECT_EQ(ChecksOf({{first, SaidToBeLost(1, 10, 500)}, {mark}}), Checks{});
  }
  EXPECT_EQ(
      ChecksOf(
          {{WithMaxHold(1000, first), Touched(1, 900, 901, 1000), SaidToBeLost(1, 10, 1050)}, {}}),
      Checks{});
}

// The lease was over, the clock was set back, and the owner had asked again when it read of the
// loss.
TEST(RegisterTest, HoldMayBeLiveAgainThatIsSaidToBeLost) {
  const Operation first = Granted(1, 10, 0, 1);
  const Operation lost = SaidToBeLost(1, 10, 1160);
  const Operation released = Released(1, 1400, 1401);
  const Mark step = During(Mark::Kind::kStep, 1100, 1100, -500);
  EXPECT_EQ(ChecksOf({{first, Granted(1, 10, 1150, 1200), lost, released}, {step}}), Checks{});
  EXPECT_EQ(ChecksOf({{first, Granted(1, 10, 1150, 1155), lost, released}, {step}}),
            (Checks{"C2", "C2"}));
}

TEST(RegisterTest, AHoldThatIsSaidToBeLostIsNotObeyed) {
  const Operation first = Granted(1, 10, 0, 900);
  const Operation lost = SaidToBeLost(1, 10, 1500);
  const std::vector<Operation> late = {Touched(1, 1600, 1601, 1000), Released(1, 1600, 1601),
                                       Shown(Verb::kFence, 1, 10, 1600)};
  for (const Operation& op : late) {
    EXPECT_EQ(ChecksOf({{first, op}, {}}), Checks{});
    EXPECT_EQ(ChecksOf({{first, lost, op}, {}}), Checks{"C2"});
    EXPECT_EQ(ChecksOf({{first, lost, op}, {During(Mark::Kind::kStep, 1550, 1551, -200)}}),
              Checks{});
    EXPECT_EQ(ChecksOf({{first, lost, op}, {During(Mark::Kind::kForced, 1550, 1551, 100)}}),
              Checks{});
  }
}

// A message that a lock is granted says what an answer would say.
TEST(RegisterTest, WhoWasToldByAMessageIsRightful) {
  const Operation granted = Notified(Granted(1, 10, 0, 100, 1000, 500), 1);
  EXPECT_EQ(ChecksOf({{granted, Touched(1, 110, 111, 1000)}, {}}), Checks{});
  EXPECT_EQ(ChecksOf({{granted, Touched(1, 110, 111, 1000, Answer::kNo)}, {}}), Checks{"C2"});
  EXPECT_EQ(ChecksOf({{granted, Shown(Verb::kFence, 1, 10, 110, Answer::kNo)}, {}}), Checks{"C2"});
}

}  // namespace
}  // namespace turnstile::fault
