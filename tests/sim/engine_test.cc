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
