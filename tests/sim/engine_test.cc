// Single scenarios on the engine that ships: regressions that random runs found.

#include <gtest/gtest.h>

#include <optional>
#include <string_view>
#include <variant>
#include <vector>

#include "sim/sim_host.h"

namespace turnstile::sim {
namespace {

constexpr Now kNow{.wall = FineInstant{Micros{1'576'800'000'000'000}},
                   .steady = FineTick{Micros{5'000'000}}};

class EngineTest : public testing::Test {
 protected:
  EngineTest() { host_.BeOldPrimary(kNow.wall); }

  AcquireResult Acquire(uint64_t connection, const std::vector<std::string_view>& keys,
                        std::string_view owner, Millis wait = Millis{0},
                        std::optional<Token> floor = std::nullopt) {
    const AcquireRequest request{
        .owner = Owner{owner}, .lease = Millis{60'000}, .wait = wait, .floor = floor};
    return host_.Acquire({.connection = connection, .tag = connection}, keys, request, kNow);
  }

  // The owner waits for a and b and is granted both. Its answer is on its way.
  Answered GrantSetAfterWait(std::string_view owner) {
    Acquire(1, {"a"}, "ann");
    EXPECT_EQ(Acquire(2, {"a", "b"}, owner, Millis{1'000}).kind, AcquireResult::Kind::kWaits);
    host_.Release({.connection = 1}, std::vector<std::string_view>{"a"}, Owner{"ann"}, kNow);
    host_.Turn(kNow);
    EXPECT_EQ(host_.answered().size(), 1);
    const Answered answered = host_.answered().front();
    host_.answered().clear();
    return answered;
  }

  SimHost host_;
};

// The owner was told of a new hold of one lock, not of the set that it was granted before.
TEST_F(EngineTest, UndeliveredSetIsTakenBackThoughOneOfItsLocksWasAcquiredAnew) {
  const Answered lost = GrantSetAfterWait("bob");
  host_.Delete(0, "a", kNow);
  const AcquireResult anew = Acquire(3, {"a"}, "bob");
  ASSERT_EQ(anew.kind, AcquireResult::Kind::kGranted);
  host_.Replied(lost, /*delivered=*/false);
  host_.Turn(kNow);

  EXPECT_EQ(host_.FindLock(0, "b"), nullptr);
  const Lock* lock = host_.FindLock(0, "a");
  ASSERT_NE(lock, nullptr);
  EXPECT_TRUE(lock->HasLive(anew.token, kNow.moment()));
}

// It was told of that hold, though under a higher token.
TEST_F(EngineTest, UndeliveredSetIsKeptIfOwnerWasToldByRaisingOneToken) {
  const Answered lost = GrantSetAfterWait("bob");
  const Token token = std::get<Token>(lost.call->answer());
  ASSERT_EQ(Acquire(3, {"a"}, "bob", Millis{0}, Token{token.value + 1}).token.value,
            token.value + 1);
  host_.Replied(lost, /*delivered=*/false);
  host_.Turn(kNow);
  EXPECT_NE(host_.FindLock(0, "a"), nullptr);
  EXPECT_NE(host_.FindLock(0, "b"), nullptr);
}

// The shared hold that is left was bound to a connection that closed while the upgrade was granted.
TEST_F(EngineTest, SharedHoldOfClosedConnectionEndsWhenUpgradeIsTakenBack) {
  const auto acquire = [this](uint64_t connection, std::string_view owner, Mode mode, Millis wait,
                              bool session) {
    const AcquireRequest request{.owner = Owner{owner},
                                 .lease = Millis{60'000},
                                 .wait = wait,
                                 .mode = mode,
                                 .session = session};
    return host_
        .Acquire({.connection = connection, .tag = connection}, std::vector<std::string_view>{"a"},
                 request, kNow)
        .kind;
  };
  using Kind = AcquireResult::Kind;
  ASSERT_EQ(acquire(1, "ann", Mode::kShared, Millis{0}, false), Kind::kGranted);
  ASSERT_EQ(acquire(2, "bob", Mode::kShared, Millis{0}, true), Kind::kGranted);
  ASSERT_EQ(acquire(3, "bob", Mode::kExclusive, Millis{1'000}, false), Kind::kWaits);
  host_.Release({.connection = 1}, std::vector<std::string_view>{"a"}, Owner{"ann"}, kNow);
  host_.Turn(kNow);
  ASSERT_EQ(host_.answered().size(), 1);
  const Answered lost = host_.answered().front();
  host_.answered().clear();
  host_.Disconnect(2, kNow);
  host_.Replied(lost, /*delivered=*/false);
  host_.Turn(kNow);
  host_.Turn(kNow);
  EXPECT_EQ(host_.FindLock(0, "a"), nullptr);
}

// The hold came by RENAME while its owner waited: it was told of it when it acquired it.
TEST_F(EngineTest, HoldThatOwnerHadAlreadyIsNotTakenBack) {
  Acquire(1, {"b"}, "bob");
  Acquire(1, {"a"}, "ann");
  ASSERT_EQ(Acquire(2, {"a"}, "bob", Millis{1'000}).kind, AcquireResult::Kind::kWaits);
  ASSERT_TRUE(host_.Rename(0, "b", "a", kNow));
  host_.Turn(kNow);
  ASSERT_EQ(host_.answered().size(), 1);
  host_.Replied(host_.answered().front(), /*delivered=*/false);
  host_.answered().clear();
  host_.Turn(kNow);
  const Lock* lock = host_.FindLock(0, "a");
  ASSERT_NE(lock, nullptr);
  EXPECT_TRUE(lock->Find(Owner{"bob"}).has_value());
}

// A server may expire a key in the last millisecond of its TTL, in which its hold is still live.
TEST_F(EngineTest, HoldWhoseKeyIsRemovedInItsLastMillisecondHasExpired) {
  Acquire(1, {"a"}, "ann");
  Now last = kNow;
  last.wall += Millis{60'000};
  last.steady += Millis{60'000};
  ASSERT_TRUE(host_.FindLock(0, "a")->blocks_until() == last.moment());
  host_.Delete(0, "a", last);
  host_.Turn(last);
  EXPECT_EQ(host_.engine().stats().expired, 1);
  EXPECT_EQ(host_.engine().stats().forced, 0);
}

// Earlier it was removed by force.
TEST_F(EngineTest, HoldWhoseKeyIsRemovedBeforeItsLastMillisecondIsForced) {
  Acquire(1, {"a"}, "ann");
  Now before = kNow;
  before.wall += Millis{59'999};
  before.steady += Millis{59'999};
  host_.Delete(0, "a", before);
  host_.Turn(before);
  EXPECT_EQ(host_.engine().stats().expired, 0);
  EXPECT_EQ(host_.engine().stats().forced, 1);
}

}  // namespace
}  // namespace turnstile::sim
