// Which losses of holds are published, on which channel, when and in which order.

#include "core/channels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "core/budget.h"
#include "core/host.h"
#include "core/lock.h"
#include "core/lock_events.h"
#include "printers.h"

namespace turnstile {
namespace {

using Texts = std::vector<std::string>;

constexpr Instant At(int64_t ms) { return Instant{Millis{ms}}; }

constexpr LockName kA{0, "a"};
constexpr LockName kB{0, "b"};
constexpr LockName kOtherA{1, "a"};
constexpr NotifyTarget kTarget{"channel", "id"};

// For example "user@channel: id lost 7 expired a".
std::string TextOf(const NotifyTarget& to, std::string_view user, Token token, Loss how,
                   std::string_view key) {
  std::string text(user);
  text.append("@").append(to.channel).append(": ").append(to.id).append(" lost ");
  text.append(std::to_string(token.value)).append(" ").append(NameOf(how));
  return text.append(" ").append(key);
}

// A server that does nothing but publish, and show its keys. Channels use nothing else.
class PublishingHost final : public Host {
 public:
  // What is in the key, for whoever looks.
  void Put(LockName name, const HoldSet& held) {
    locks_[{name.db, std::string(name.key)}].reset(Lock::Make(held));
  }
  void Remove(LockName name) { locks_.erase({name.db, std::string(name.key)}); }
  size_t looks() const { return looks_; }

  Texts TakePublished() { return std::exchange(published_, {}); }

  Delivery Publish(const Notice& notice) override {
    const auto* loss = std::get_if<HoldLoss>(&notice.what);
    published_.push_back(loss == nullptr
                             ? "something else"
                             : TextOf(notice.to, notice.user, loss->token, loss->how, notice.key));
    return {};  // whether somebody listens does not matter to a loss
  }

  KeyContent Open(const KeyName& name, Access access) override {
    EXPECT_EQ(access, Access::kInspect);
    ++looks_;
    KeyContent content{.name = name.lock};
    const auto found = locks_.find({name.lock.db, std::string(name.lock.key)});
    if (found != locks_.end()) content.lock = found->second.get();
    return content;
  }
  void Close(KeyContent& /*key*/) override {}
  PlainLock ReadPlain(const KeyContent& /*key*/) override { return Never(), PlainLock{}; }
  void Store(KeyContent& /*key*/, Lock* /*lock*/) override { Never(); }
  void Delete(KeyContent& /*key*/) override { Never(); }
  std::optional<Instant> ExpiryOf(const KeyContent& /*key*/) override {
    return Never(), std::nullopt;
  }
  const char* MissingCommandFor(const Change& /*change*/) override { return Never(), nullptr; }
  void ChangePlain(KeyContent& /*key*/, const Change& /*change*/) override { Never(); }
  size_t StoredLocks() override { return Never(), 0; }
  size_t CountKeys(int /*db*/) override { return Never(), 0; }
  void VisitLocks(int /*db*/,
                  const std::function<bool(LockName, const Lock&)>& /*visit*/) override {
    Never();
  }
  void Replicate(const KeyContent& /*key*/, const HoldSet& /*held*/, Via /*via*/,
                 Instant /*now*/) override {
    Never();
  }
  void Replicate(const KeyContent& /*key*/, const HoldReleased& /*released*/,
                 Via /*via*/) override {
    Never();
  }
  void Replicate(const KeyContent& /*key*/, const HoldEnded& /*ended*/) override { Never(); }
  void Replicate(const KeyContent& /*key*/, const HoldsExpired& /*expired*/) override { Never(); }
  void Replicate(const KeyContent& /*key*/, const SessionsEnded& /*ended*/) override { Never(); }
  void ReplicateVerbatim() override { Never(); }
  void ReplicateFloor(Token /*floor*/) override { Never(); }
  bool HasReplicationConsumers(Instant /*now*/) override { return Never(), false; }
  bool MayReplicateFloor() override { return Never(), false; }
  void Emit(const KeyContent& /*key*/, LockEvent /*event*/) override { Never(); }
  void EmitLost(const KeyContent& /*key*/, Loss /*how*/) override { Never(); }
  void EmitLost(LockName /*lock*/, Loss /*how*/) override { Never(); }
  void Warn(const std::string& /*text*/) override { Never(); }
  std::optional<uint64_t> CallerConnection() override { return Never(), std::nullopt; }
  std::optional<ParkableCaller> CallerToPark() override { return Never(), std::nullopt; }
  NotifiedCaller CallerToNotify(std::string_view /*channel*/, LockName /*lock*/) override {
    return Never(), NotifiedCaller{};
  }
  bool Park(WaitingCall& /*call*/) override { return Never(), false; }
  void Answer(WaitingCall& /*call*/) override { Never(); }
  bool IsConnected(uint64_t /*connection*/) override { return Never(), false; }
  Role role() override { return Never(), Role::kPrimary; }
  bool MayWrite() override { return Never(), false; }
  std::optional<std::string> GrantRefusal(const WaitingCall& /*call*/,
                                          const KeyContent& /*key*/) override {
    return Never(), std::nullopt;
  }
  void BeforeGrant(LockName /*lock*/, FineInstant /*now*/) override { Never(); }
  SlotRefresh RefreshSlots(FineInstant /*now*/) override { return Never(), SlotRefresh{}; }
  std::optional<std::string> SlotRefusal(LockName /*lock*/) override {
    return Never(), std::nullopt;
  }
  bool MovesAway(LockName /*lock*/) override { return Never(), false; }
  void RunSoon() override { Never(); }
  void WakeEventLoop() override { Never(); }
  void WatchConnections() override { Never(); }
  void WatchKeys() override { Never(); }
  void ListenForStringWrites() override { Never(); }

 private:
  static KeyContent Never() {
    ADD_FAILURE() << "channels only publish";
    return {};
  }

  Texts published_;
  std::map<std::pair<int, std::string>, std::unique_ptr<Lock>> locks_;
  size_t looks_ = 0;
};

class ChannelsTest : public testing::Test {
 protected:
  void TearDown() override {
    EXPECT_TRUE(channels_.IsConsistent());
    channels_.Clear();
    EXPECT_TRUE(channels_.empty());
    EXPECT_FALSE(channels_.IsDueEarlier());
  }

  static Hold HoldOf(std::string_view owner, uint64_t token, int64_t end) {
    return {.owner = Owner{owner}, .token = Token{token}, .since = At(1), .end = At(end)};
  }
  void Bind(LockName lock, std::string_view owner, uint64_t token, int64_t end,
            const NotifyTarget& target = kTarget, std::string_view user = "user") {
    channels_.Bind(lock, HoldOf(owner, token, end), target, user);
  }
  Texts Publish(int64_t now, size_t units = 100'000, bool may_look = true) {
    Budget budget(units);
    channels_.Publish(host_, At(now), may_look, budget);
    return host_.TakePublished();
  }

  PublishingHost host_;
  Channels channels_;
};

// --- Bindings -----------------------------------------------------------------------------------

TEST_F(ChannelsTest, NothingIsBoundInitially) {
  EXPECT_TRUE(channels_.empty());
  EXPECT_EQ(channels_.size(), 0U);
  EXPECT_FALSE(channels_.IsBoundTo(kA, Owner{"ann"}, kTarget));
  EXPECT_FALSE(channels_.has_unpublished());
  EXPECT_TRUE(channels_.NextDue().is_never());
  EXPECT_FALSE(channels_.IsDueEarlier());
  channels_.Unbind(kA, Owner{"ann"});
  channels_.UnbindAll(kA);
  channels_.Renew(kA, HoldOf("ann", 7, 100));
  channels_.Lose(kA, Owner{"ann"}, Loss::kForced);
  channels_.OnRemoved(kA, true, false, At(5));
  channels_.OnFlushed(std::nullopt, At(5));
  channels_.OnEvicted(kA);
  channels_.SwapDatabases(0, 1);
  EXPECT_TRUE(channels_.empty());
  EXPECT_EQ(Publish(1'000'000), Texts());
}

TEST_F(ChannelsTest, HoldIsBoundToOneTarget) {
  Bind(kA, "ann", 7, 100);
  EXPECT_TRUE(channels_.IsBoundTo(kA, Owner{"ann"}, kTarget));
  EXPECT_FALSE(channels_.IsBoundTo(kA, Owner{"ann"}, {"channel", "other"}));
  EXPECT_FALSE(channels_.IsBoundTo(kA, Owner{"ann"}, {"other", "id"}));
  EXPECT_FALSE(channels_.IsBoundTo(kA, Owner{"bob"}, kTarget));
  EXPECT_FALSE(channels_.IsBoundTo(kB, Owner{"ann"}, kTarget));
  EXPECT_FALSE(channels_.IsBoundTo(kOtherA, Owner{"ann"}, kTarget));
  Bind(kA, "ann", 8, 200, {"other", "id2"}, "user2");
  EXPECT_EQ(channels_.size(), 1U) << "it moved";
  EXPECT_FALSE(channels_.IsBoundTo(kA, Owner{"ann"}, kTarget));
  EXPECT_TRUE(channels_.IsBoundTo(kA, Owner{"ann"}, {"other", "id2"}));
  EXPECT_EQ(Publish(201), Texts{"user2@other: id2 lost 8 expired a"});
}

// All texts are those of a command, which ends.
TEST_F(ChannelsTest, CopiesEverything) {
  std::string key = "key";
  std::string owner = "owner";
  std::string channel = "channel";
  std::string id = "id";
  std::string user = "user";
  channels_.Bind({3, key}, HoldOf(owner, 7, 100), {channel, id}, user);
  for (std::string* text : {&key, &owner, &channel, &id, &user}) text->assign(text->size(), '?');
  EXPECT_TRUE(channels_.IsBoundTo({3, "key"}, Owner{"owner"}, kTarget));
  EXPECT_EQ(Publish(101), Texts{"user@channel: id lost 7 expired key"});
}

TEST_F(ChannelsTest, TextsAreAnyBytes) {
  const std::string odd("\0\r\n\xff ", 5);
  channels_.Bind({0, odd}, HoldOf(odd, 7, 100), {odd, "id"}, "user");
  EXPECT_TRUE(channels_.IsBoundTo({0, odd}, Owner{odd}, {odd, "id"}));
  EXPECT_EQ(Publish(101), Texts{"user@" + odd + ": id lost 7 expired " + odd});
}

TEST_F(ChannelsTest, NothingIsSaidOfAReleasedHold) {
  Bind(kA, "ann", 7, 100);
  Bind(kA, "bob", 8, 100);
  Bind(kB, "ann", 9, 100);
  channels_.Unbind(kA, Owner{"ann"});
  EXPECT_EQ(channels_.size(), 2U);
  channels_.UnbindAll(kA);
  EXPECT_EQ(channels_.size(), 1U);
  EXPECT_FALSE(channels_.has_unpublished());
  EXPECT_EQ(Publish(101), Texts{"user@channel: id lost 9 expired b"});
  EXPECT_TRUE(channels_.empty());
}

TEST_F(ChannelsTest, ClearForgetsBindingsButNotWhatWasLostBefore) {
  Bind(kA, "ann", 7, 100);
  Bind(kB, "ann", 8, 100);
  channels_.Lose(kA, Owner{"ann"}, Loss::kForced);
  channels_.Clear();
  EXPECT_TRUE(channels_.empty());
  EXPECT_EQ(Publish(1'000), Texts{"user@channel: id lost 7 forced a"});
}

// --- The end of a lease -------------------------------------------------------------------------

TEST_F(ChannelsTest, EndOfLeaseIsPublishedAfterItsLastMillisecond) {
  Bind(kA, "ann", 7, 100);
  EXPECT_EQ(Publish(99), Texts());
  EXPECT_EQ(Publish(100), Texts()) << "it is live through this millisecond";
  EXPECT_EQ(Publish(101), Texts{"user@channel: id lost 7 expired a"});
  EXPECT_TRUE(channels_.empty());
  EXPECT_EQ(Publish(102), Texts()) << "once";
}

TEST_F(ChannelsTest, RenewedHoldEndsLaterOrEarlierUnderItsNewToken) {
  Bind(kA, "ann", 7, 100);
  channels_.Renew(kA, HoldOf("ann", 7, 200));
  EXPECT_EQ(Publish(150), Texts());
  channels_.Renew(kA, HoldOf("ann", 9, 120));
  EXPECT_TRUE(channels_.IsBoundTo(kA, Owner{"ann"}, kTarget)) << "the binding stays";
  EXPECT_EQ(Publish(121), Texts{"user@channel: id lost 9 expired a"});
  // The same end, another token.
  Bind(kA, "ann", 7, 200);
  channels_.Renew(kA, HoldOf("ann", 8, 200));
  EXPECT_EQ(Publish(201), Texts{"user@channel: id lost 8 expired a"});
}

TEST_F(ChannelsTest, RenewalOfAnotherHoldChangesNothing) {
  Bind(kA, "ann", 7, 100);
  channels_.Renew(kA, HoldOf("bob", 8, 900));
  channels_.Renew(kB, HoldOf("ann", 8, 900));
  channels_.Renew(kOtherA, HoldOf("ann", 8, 900));
  EXPECT_EQ(channels_.size(), 1U) << "nobody is bound by that";
  EXPECT_EQ(Publish(101), Texts{"user@channel: id lost 7 expired a"});
}

TEST_F(ChannelsTest, EndsOfLeasesArePublishedInTheirOrder) {
  Bind(kA, "ann", 1, 130);
  Bind(kA, "bob", 2, 110);
  Bind(kB, "ann", 3, 120);
  Bind(kB, "bob", 4, 110);
  Bind(kB, "cid", 5, 500);
  channels_.Renew(kA, HoldOf("ann", 1, 105));
  EXPECT_EQ(Publish(400), (Texts{"user@channel: id lost 1 expired a",  //
                                 "user@channel: id lost 2 expired a",  //
                                 "user@channel: id lost 4 expired b",  // bound after Bob's of a
                                 "user@channel: id lost 3 expired b"}));
  EXPECT_EQ(channels_.size(), 1U);
}

// --- Losses -------------------------------------------------------------------------------------

TEST_F(ChannelsTest, EveryLossIsPublishedWithItsReasonInOrder) {
  const std::array losses = {Loss::kSession, Loss::kForced, Loss::kExpired, Loss::kEvicted,
                             Loss::kFlushed};
  Texts expected;
  for (size_t i = 0; i < losses.size(); ++i) {
    const std::string owner = "owner " + std::to_string(i);
    Bind(kA, owner, 10 + i, 100);
    channels_.Lose(kA, Owner{owner}, losses.at(i));
    EXPECT_TRUE(channels_.has_unpublished());
    EXPECT_EQ(channels_.NextDue(), Due::AtOnce());
    expected.push_back(TextOf(kTarget, "user", Token{10 + i}, losses.at(i), "a"));
  }
  EXPECT_TRUE(channels_.empty()) << "what is lost is not bound any more";
  EXPECT_EQ(Publish(1), expected) << "whatever the time";
  EXPECT_FALSE(channels_.has_unpublished());
  EXPECT_TRUE(channels_.NextDue().is_never());
}

TEST_F(ChannelsTest, LossesComeBeforeEndsOfLeases) {
  Bind(kA, "ann", 1, 50);
  Bind(kA, "bob", 2, 900);
  channels_.Lose(kA, Owner{"bob"}, Loss::kSession);
  EXPECT_EQ(Publish(100),
            (Texts{"user@channel: id lost 2 session a", "user@channel: id lost 1 expired a"}));
}

TEST_F(ChannelsTest, LossOfAHoldThatIsNotBoundIsNotPublished) {
  Bind(kA, "ann", 1, 500);
  channels_.Lose(kA, Owner{"bob"}, Loss::kForced);
  channels_.Lose(kB, Owner{"ann"}, Loss::kForced);
  channels_.Lose(kOtherA, Owner{"ann"}, Loss::kForced);
  EXPECT_FALSE(channels_.has_unpublished());
  EXPECT_EQ(channels_.size(), 1U);
}

// A hold that was lost and granted again before anything was published.
TEST_F(ChannelsTest, OldLossIsPublishedThoughTheHoldIsBoundAgain) {
  Bind(kA, "ann", 1, 500);
  channels_.Lose(kA, Owner{"ann"}, Loss::kForced);
  Bind(kA, "ann", 2, 600);
  channels_.Renew(kA, HoldOf("ann", 3, 600));
  EXPECT_EQ(Publish(100), Texts{"user@channel: id lost 1 forced a"});
  EXPECT_EQ(Publish(601), Texts{"user@channel: id lost 3 expired a"});
}

TEST_F(ChannelsTest, RemovedKeyLosesItsHoldsByForceUnlessTheyHaveEnded) {
  Bind(kA, "ann", 1, 99);
  Bind(kA, "bob", 2, 100);
  Bind(kA, "cid", 3, 500);
  Bind(kB, "ann", 4, 500);
  Bind(kOtherA, "ann", 5, 500);
  channels_.OnRemoved(kA, /*expires=*/false, /*moves=*/false, At(100));
  EXPECT_EQ(channels_.size(), 2U);
  EXPECT_EQ(Publish(100),
            (Texts{"user@channel: id lost 1 expired a", "user@channel: id lost 2 forced a",
                   "user@channel: id lost 3 forced a"}));
}

TEST_F(ChannelsTest, KeyWhoseTimeIsOverHasExpired) {
  Bind(kA, "ann", 1, 100);  // a server may remove the key in its last millisecond
  channels_.OnRemoved(kA, /*expires=*/true, /*moves=*/false, At(100));
  EXPECT_EQ(Publish(100), Texts{"user@channel: id lost 1 expired a"});
}

// The hold goes on there, so it is not lost; but nobody here knows how it will end.
TEST_F(ChannelsTest, KeyThatMovesToAnotherNodeIsForgotten) {
  Bind(kA, "ann", 1, 99);
  Bind(kA, "bob", 2, 500);
  channels_.OnRemoved(kA, /*expires=*/false, /*moves=*/true, At(100));
  EXPECT_TRUE(channels_.empty());
  EXPECT_EQ(Publish(1'000), Texts{"user@channel: id lost 1 expired a"}) << "had ended before";
}

TEST_F(ChannelsTest, FlushedDatabaseLosesItsHolds) {
  Bind(kA, "ann", 1, 99);
  Bind(kB, "ann", 2, 500);
  Bind(kOtherA, "ann", 3, 500);
  channels_.OnFlushed(0, At(100));
  EXPECT_EQ(Publish(100),
            (Texts{"user@channel: id lost 1 expired a", "user@channel: id lost 2 flushed b"}));
  EXPECT_EQ(channels_.size(), 1U);
  channels_.OnFlushed(7, At(100));
  EXPECT_FALSE(channels_.has_unpublished());
  channels_.OnFlushed(std::nullopt, At(100));
  EXPECT_EQ(Publish(100), Texts{"user@channel: id lost 3 flushed a"});
}

// --- Eviction: the server first says that the key is removed, and then why.

TEST_F(ChannelsTest, KeyThatWasJustRemovedWasEvicted) {
  Bind(kA, "ann", 1, 99);
  Bind(kA, "bob", 2, 500);
  Bind(kA, "cid", 3, 500);
  channels_.OnRemoved(kA, false, false, At(100));
  channels_.OnEvicted(kA);
  EXPECT_EQ(Publish(100),
            (Texts{"user@channel: id lost 1 expired a", "user@channel: id lost 2 evicted a",
                   "user@channel: id lost 3 evicted a"}));
}

TEST_F(ChannelsTest, OnlyTheKeyThatWasJustRemovedWasEvicted) {
  // By force, and later evicted under the same name: the first was not.
  Bind(kA, "ann", 1, 500);
  channels_.OnRemoved(kA, false, false, At(100));
  Bind(kA, "ann", 2, 500);
  channels_.OnRemoved(kA, false, false, At(100));
  channels_.OnEvicted(kA);
  EXPECT_EQ(Publish(100),
            (Texts{"user@channel: id lost 1 forced a", "user@channel: id lost 2 evicted a"}));

  // Another name than that of the key removed last, or another database.
  Bind(kA, "ann", 3, 500);
  Bind(kB, "ann", 4, 500);
  channels_.OnRemoved(kA, false, false, At(100));
  channels_.OnRemoved(kB, false, false, At(100));
  channels_.OnEvicted(kA);
  channels_.OnEvicted(kOtherA);
  EXPECT_EQ(Publish(100),
            (Texts{"user@channel: id lost 3 forced a", "user@channel: id lost 4 forced b"}));

  // A key without bindings was removed last.
  Bind(kA, "ann", 5, 500);
  channels_.OnRemoved(kA, false, false, At(100));
  channels_.OnRemoved(kB, false, false, At(100));
  channels_.OnEvicted(kA);
  EXPECT_EQ(Publish(100), Texts{"user@channel: id lost 5 forced a"});
}

TEST_F(ChannelsTest, OtherLossesAreNotEvictions) {
  Bind(kA, "ann", 1, 500);
  channels_.Lose(kA, Owner{"ann"}, Loss::kForced);  // replaced by a hold of another kind
  channels_.OnEvicted(kA);
  Bind(kA, "ann", 2, 500);
  channels_.OnFlushed(std::nullopt, At(100));
  channels_.OnEvicted(kA);
  Bind(kA, "ann", 3, 500);
  channels_.OnRemoved(kA, false, false, At(100));
  channels_.Lose(kB, Owner{"nobody"}, Loss::kForced);  // concerns no binding
  channels_.OnEvicted(kA);
  channels_.OnEvicted(kA);
  EXPECT_EQ(Publish(100),
            (Texts{"user@channel: id lost 1 forced a", "user@channel: id lost 2 flushed a",
                   "user@channel: id lost 3 evicted a"}));
}

// Something else was lost, or flushed, after the key was removed: the eviction is of another key.
TEST_F(ChannelsTest, EvictionFollowsTheRemovalAtOnce) {
  Bind(kA, "ann", 1, 500);
  channels_.OnRemoved(kA, false, false, At(100));
  Bind(kA, "bob", 2, 500);
  channels_.Lose(kA, Owner{"bob"}, Loss::kForced);
  channels_.OnEvicted(kA);
  EXPECT_EQ(Publish(100),
            (Texts{"user@channel: id lost 1 forced a", "user@channel: id lost 2 forced a"}));
  Bind(kA, "ann", 3, 500);
  channels_.OnRemoved(kA, false, false, At(100));
  channels_.OnFlushed(std::nullopt, At(100));
  channels_.OnEvicted(kA);
  EXPECT_EQ(Publish(100), Texts{"user@channel: id lost 3 forced a"});
}

TEST_F(ChannelsTest, EvictionAfterPublicationChangesNothing) {
  Bind(kA, "ann", 1, 500);
  Bind(kA, "bob", 2, 500);
  channels_.OnRemoved(kA, false, false, At(100));
  EXPECT_EQ(Publish(100, 1), Texts{"user@channel: id lost 1 forced a"});
  channels_.OnEvicted(kA);
  EXPECT_EQ(Publish(100), Texts{"user@channel: id lost 2 evicted a"});
  channels_.OnEvicted(kA);
  EXPECT_FALSE(channels_.has_unpublished());
}

// --- Holds that come back -----------------------------------------------------------------------

// By a RESTORE, or because the server loaded its data anew.
TEST_F(ChannelsTest, HoldThatCameBackUnderItsTokenIsBoundAgainInPlaceOfAMessage) {
  const auto lose = [this](bool by_flush) {
    Bind(kA, "ann", 7, 500);
    if (by_flush) {
      channels_.OnFlushed(std::nullopt, At(100));
    } else {
      channels_.OnRemoved(kA, false, false, At(100));
    }
  };
  for (const bool by_flush : {false, true}) {
    lose(by_flush);
    host_.Put(kA, {Mode::kExclusive, HoldOf("ann", 7, 300)});
    EXPECT_EQ(Publish(100), Texts());
    EXPECT_FALSE(channels_.has_unpublished());
    EXPECT_TRUE(channels_.IsBoundTo(kA, Owner{"ann"}, kTarget));
    EXPECT_EQ(channels_.NextDue(), Due::At(At(301))) << "with the lease that it has now";
    EXPECT_EQ(Publish(301), Texts{"user@channel: id lost 7 expired a"});
  }
}

TEST_F(ChannelsTest, HoldThatIsThereButNotTheSameIsLost) {
  const std::string forced = "user@channel: id lost 7 forced a";
  const auto lose = [this] {
    Bind(kA, "ann", 7, 500);
    channels_.OnRemoved(kA, false, false, At(100));
  };
  lose();
  host_.Put(kA, {Mode::kExclusive, HoldOf("ann", 8, 500)});
  EXPECT_EQ(Publish(100), Texts{forced}) << "a new hold of the same owner";
  lose();
  host_.Put(kA, {Mode::kExclusive, HoldOf("bob", 7, 500)});
  EXPECT_EQ(Publish(100), Texts{forced}) << "another owner";
  lose();
  host_.Put(kA, {Mode::kExclusive, HoldOf("ann", 7, 99)});
  EXPECT_EQ(Publish(100), Texts{forced}) << "it came back too late";
  lose();
  host_.Put(kA, {Mode::kExclusive, HoldOf("ann", 7, 500)});
  EXPECT_EQ(Publish(100, 100'000, /*may_look=*/false), Texts{forced}) << "nobody may look";
  lose();
  host_.Remove(kA);
  host_.Put(kOtherA, {Mode::kExclusive, HoldOf("ann", 7, 500)});
  EXPECT_EQ(Publish(100), Texts{forced}) << "in another database";
  EXPECT_TRUE(channels_.empty());
}

TEST_F(ChannelsTest, HoldThatCameBackKeepsTheChannelThatItWasBoundToMeanwhile) {
  Bind(kA, "ann", 7, 500);
  channels_.OnRemoved(kA, false, false, At(100));
  host_.Put(kA, {Mode::kExclusive, HoldOf("ann", 7, 500)});
  Bind(kA, "ann", 7, 500, {"newer", "id2"});
  EXPECT_EQ(Publish(100), Texts());
  EXPECT_EQ(channels_.size(), 1U);
  EXPECT_TRUE(channels_.IsBoundTo(kA, Owner{"ann"}, {"newer", "id2"}));
}

// A server that was demoted has ended all bindings, and says nothing of it.
TEST_F(ChannelsTest, HoldThatCameBackAfterAllBindingsEndedIsNotBound) {
  Bind(kA, "ann", 7, 500);
  channels_.OnRemoved(kA, false, false, At(100));
  channels_.Clear();
  host_.Put(kA, {Mode::kExclusive, HoldOf("ann", 7, 500)});
  EXPECT_EQ(Publish(100), Texts());
  EXPECT_TRUE(channels_.empty());
}

// Nothing of that comes back, and to look costs more than to say it.
TEST_F(ChannelsTest, OtherLossesAreNotLookedFor) {
  for (const Loss how : {Loss::kExpired, Loss::kSession, Loss::kEvicted}) {
    Bind(kA, "ann", 7, 500);
    host_.Put(kA, {Mode::kExclusive, HoldOf("ann", 7, 500)});
    channels_.Lose(kA, Owner{"ann"}, how);
    EXPECT_EQ(Publish(100).size(), 1U);
  }
  EXPECT_EQ(host_.looks(), 0U);
}

TEST_F(ChannelsTest, LookingForHoldsIsWithinTheBudget) {
  for (uint64_t i = 0; i < 6; ++i) Bind(kA, "owner " + std::to_string(i), 1 + i, 500);
  channels_.OnRemoved(kA, false, false, At(100));
  host_.Put(kA, {Mode::kExclusive, HoldOf("owner 0", 1, 500)});
  EXPECT_EQ(Publish(100, 8).size(), 1U) << "the first came back";
  EXPECT_EQ(host_.looks(), 2U);
}

// --- Databases ----------------------------------------------------------------------------------

TEST_F(ChannelsTest, BindingsFollowTheirDatabase) {
  Bind(kA, "ann", 1, 100);
  Bind(kA, "bob", 2, 500);
  Bind(kOtherA, "ann", 3, 500);
  Bind({2, "a"}, "ann", 4, 500);
  channels_.SwapDatabases(0, 1);
  EXPECT_TRUE(channels_.IsConsistent());
  EXPECT_EQ(channels_.size(), 4U);
  EXPECT_TRUE(channels_.IsBoundTo(kOtherA, Owner{"bob"}, kTarget));
  EXPECT_FALSE(channels_.IsBoundTo(kA, Owner{"bob"}, kTarget));
  channels_.Renew(kOtherA, HoldOf("ann", 7, 120));
  channels_.Renew(kA, HoldOf("ann", 8, 130));
  EXPECT_EQ(Publish(200),
            (Texts{"user@channel: id lost 7 expired a", "user@channel: id lost 8 expired a"}));
  channels_.SwapDatabases(1, 1);
  channels_.SwapDatabases(5, 6);
  channels_.OnFlushed(1, At(200));
  EXPECT_EQ(Publish(200), Texts{"user@channel: id lost 2 flushed a"});
}

// --- How much, and when -------------------------------------------------------------------------

TEST_F(ChannelsTest, PublishesNoMoreThanTheBudgetAllows) {
  for (uint64_t i = 0; i < 6; ++i) Bind(kA, "owner " + std::to_string(i), 1 + i, 50);
  Bind(kB, "ann", 100, 900);
  Bind(kB, "bob", 101, 900);
  channels_.OnRemoved(kB, false, false, At(100));
  EXPECT_EQ(Publish(100, 0), Texts());
  EXPECT_EQ(Publish(100, 1).size(), 1U) << "the last step may cost more than what is left";
  EXPECT_EQ(channels_.NextDue(), Due::AtOnce());
  EXPECT_EQ(Publish(100, 8).size(), 2U) << "the last loss, and the first end of a lease";
  EXPECT_FALSE(channels_.has_unpublished());
  EXPECT_TRUE(channels_.NextDue().IsDueAt(At(100))) << "ends of leases are left";
  EXPECT_EQ(Publish(100, 9).size(), 3U);
  Budget spent(100);
  spent.Spend(100);
  channels_.Publish(host_, At(100), /*may_look=*/true, spent);
  EXPECT_EQ(host_.TakePublished(), Texts());
  EXPECT_EQ(Publish(100).size(), 2U);
  EXPECT_TRUE(channels_.empty());
}

TEST_F(ChannelsTest, SpendsBudgetOfOthersToo) {
  for (uint64_t i = 0; i < 3; ++i) Bind(kA, "owner " + std::to_string(i), 1 + i, 50);
  Budget budget(13);
  channels_.Publish(host_, At(100), /*may_look=*/true, budget);
  EXPECT_EQ(host_.TakePublished().size(), 3U);
  EXPECT_FALSE(budget.spent());
  budget.Spend(1);
  EXPECT_TRUE(budget.spent());
}

TEST_F(ChannelsTest, NextDueIsTheMillisecondAfterTheFirstEnd) {
  Bind(kA, "ann", 1, 300);
  EXPECT_EQ(channels_.NextDue(), Due::At(At(301)));
  Bind(kA, "bob", 2, 200);
  EXPECT_EQ(channels_.NextDue(), Due::At(At(201)));
  channels_.Renew(kA, HoldOf("bob", 2, 400));
  EXPECT_EQ(channels_.NextDue(), Due::At(At(301)));
  channels_.Lose(kA, Owner{"ann"}, Loss::kForced);
  EXPECT_EQ(channels_.NextDue(), Due::AtOnce());
  Publish(100);
  EXPECT_EQ(channels_.NextDue(), Due::At(At(401)));
  channels_.Unbind(kA, Owner{"bob"});
  EXPECT_TRUE(channels_.NextDue().is_never());
}

// Whoever asked for the time relies on it, unless it is told that it became earlier.
TEST_F(ChannelsTest, IsDueEarlierThanItSaid) {
  channels_.NextDue();
  Bind(kA, "ann", 1, 300);
  EXPECT_TRUE(channels_.IsDueEarlier()) << "it said never";
  EXPECT_TRUE(channels_.IsDueEarlier()) << "asking does not change that";
  channels_.NextDue();
  EXPECT_FALSE(channels_.IsDueEarlier());
  Bind(kB, "ann", 2, 300);
  Bind(kB, "bob", 3, 301);
  EXPECT_FALSE(channels_.IsDueEarlier()) << "not earlier";
  Bind(kB, "cid", 4, 299);
  EXPECT_TRUE(channels_.IsDueEarlier());
  channels_.NextDue();
  channels_.Renew(kA, HoldOf("ann", 1, 250));
  EXPECT_TRUE(channels_.IsDueEarlier());
  channels_.Renew(kA, HoldOf("ann", 1, 350));
  EXPECT_FALSE(channels_.IsDueEarlier());
  channels_.Clear();
  EXPECT_FALSE(channels_.IsDueEarlier());
  channels_.NextDue();
  Bind(kA, "ann", 1, 9'000);
  EXPECT_TRUE(channels_.IsDueEarlier());
  // Also where losses made it due at once.
  Bind(kB, "ann", 2, 9'500);
  channels_.Lose(kB, Owner{"ann"}, Loss::kForced);
  EXPECT_EQ(channels_.NextDue(), Due::AtOnce());
  EXPECT_FALSE(channels_.IsDueEarlier());
}

// --- Random operations against a naive model ----------------------------------------------------

class NaiveChannels {
 public:
  struct Binding {
    int db;
    std::string key;
    std::string owner;
    std::string channel;
    std::string id;
    std::string user;
    uint64_t token;
    int64_t end;
  };
  struct Lost {
    Binding binding;
    Loss how;
  };

  bool Is(const Binding& binding, LockName lock) const {
    return binding.db == lock.db && binding.key == lock.key;
  }
  Binding* Find(LockName lock, std::string_view owner) {
    for (Binding& binding : bound) {
      if (Is(binding, lock) && binding.owner == owner) return &binding;
    }
    return nullptr;
  }
  void Unbind(LockName lock, std::string_view owner) {
    std::erase_if(
        bound, [&](const Binding& binding) { return Is(binding, lock) && binding.owner == owner; });
  }
  void Bind(const Binding& binding) {
    Unbind({binding.db, binding.key}, binding.owner);
    bound.push_back(binding);
  }
  // Those for which `is_lost` gives a reason, in order of their databases, keys and owners.
  void LoseAll(const std::function<std::optional<Loss>(const Binding&)>& is_lost) {
    std::vector<Lost> all;
    std::erase_if(bound, [&](const Binding& binding) {
      const std::optional<Loss> how = is_lost(binding);
      if (how.has_value()) all.push_back({binding, *how});
      return how.has_value();
    });
    std::sort(all.begin(), all.end(), [](const Lost& a, const Lost& b) {
      return std::tie(a.binding.db, a.binding.key, a.binding.owner) <
             std::tie(b.binding.db, b.binding.key, b.binding.owner);
    });
    last = all.size();
    lost.insert(lost.end(), all.begin(), all.end());
  }
  static std::string Text(const Binding& binding, Loss how) {
    return TextOf({binding.channel, binding.id}, binding.user, Token{binding.token}, how,
                  binding.key);
  }
  Texts Publish(int64_t now, size_t most) {
    Texts texts;
    while (!lost.empty() && texts.size() < most) {
      texts.push_back(Text(lost.front().binding, lost.front().how));
      lost.erase(lost.begin());
    }
    while (texts.size() < most) {
      const auto first =
          std::min_element(bound.begin(), bound.end(),
                           [](const Binding& a, const Binding& b) { return a.end < b.end; });
      if (first == bound.end() || first->end >= now) break;
      texts.push_back(Text(*first, Loss::kExpired));
      bound.erase(first);
    }
    return texts;
  }
  std::optional<int64_t> FirstEnd() const {
    std::optional<int64_t> first;
    for (const Binding& binding : bound) first = std::min(first.value_or(binding.end), binding.end);
    return first;
  }

  std::vector<Binding> bound;  // in order of Bind
  std::vector<Lost> lost;
  size_t last = 0;  // how many of them were lost with the key removed last
};

TEST_F(ChannelsTest, MatchesNaiveModelInRandomWalk) {
  for (const unsigned seed : {1U, 2U, 3U}) {
    std::mt19937 random(seed);
    const auto below = [&](size_t bound) { return static_cast<size_t>(random() % bound); };
    const std::array<std::string_view, 3> keys = {"a", "b", "ab"};
    const std::array<std::string_view, 4> owners = {"x", "y", "yy", "z"};
    Channels channels;
    NaiveChannels naive;
    int64_t now = 1'000;
    std::optional<int64_t> announced;
    size_t published = 0;
    for (int step = 0; step < 6'000; ++step) {
      SCOPED_TRACE(testing::Message() << "seed " << seed << ", step " << step);
      const LockName lock{static_cast<int>(below(3)), keys.at(below(keys.size()))};
      const std::string_view owner = owners.at(below(owners.size()));
      const uint64_t token = 1 + below(1'000);
      const int64_t end = now - 5 + static_cast<int64_t>(below(40));
      now += static_cast<int64_t>(below(3));
      switch (below(13)) {
        case 0:
        case 1:
        case 2: {
          const std::string channel = "channel " + std::to_string(below(3));
          const std::string id = "id " + std::to_string(below(3));
          channels.Bind(lock, HoldOf(owner, token, end), {channel, id}, "u");
          naive.Bind(
              {lock.db, std::string(lock.key), std::string(owner), channel, id, "u", token, end});
          break;
        }
        case 3:
        case 4: {
          channels.Renew(lock, HoldOf(owner, token, end));
          if (NaiveChannels::Binding* found = naive.Find(lock, owner); found != nullptr) {
            found->token = token;
            found->end = end;
          }
          break;
        }
        case 5:
          channels.Unbind(lock, Owner{owner});
          naive.Unbind(lock, owner);
          break;
        case 6: {
          const Loss how = below(2) == 0 ? Loss::kSession : Loss::kForced;
          channels.Lose(lock, Owner{owner}, how);
          if (naive.Find(lock, owner) == nullptr) break;
          naive.LoseAll([&](const NaiveChannels::Binding& binding) {
            const bool is_it = naive.Is(binding, lock) && binding.owner == owner;
            return is_it ? std::optional(how) : std::nullopt;
          });
          naive.last = 0;
          break;
        }
        case 7: {
          const bool expires = below(4) == 0;
          const bool moves = below(4) == 0;
          channels.OnRemoved(lock, expires, moves, At(now));
          std::erase_if(naive.bound, [&](const NaiveChannels::Binding& binding) {
            return moves && !expires && naive.Is(binding, lock) && binding.end >= now;
          });
          naive.LoseAll([&](const NaiveChannels::Binding& binding) -> std::optional<Loss> {
            if (!naive.Is(binding, lock)) return std::nullopt;
            return expires || binding.end < now ? Loss::kExpired : Loss::kForced;
          });
          if (below(2) == 0) break;
          channels.OnEvicted(lock);
          for (size_t i = 0; i < naive.last; ++i) {
            Loss& how = naive.lost[naive.lost.size() - 1 - i].how;
            if (how == Loss::kForced) how = Loss::kEvicted;
          }
          naive.last = 0;
          break;
        }
        case 8: {
          // Of a key that may not be the one removed last.
          channels.OnEvicted(lock);
          for (size_t i = 0; i < std::min(naive.last, naive.lost.size()); ++i) {
            auto& [binding, how] = naive.lost[naive.lost.size() - 1 - i];
            if (how == Loss::kForced && naive.Is(binding, lock)) how = Loss::kEvicted;
          }
          naive.last = 0;
          break;
        }
        case 9: {
          if (below(4) > 0) break;
          const std::optional<int> db = below(3) == 0 ? std::nullopt : std::optional(lock.db);
          channels.OnFlushed(db, At(now));
          naive.LoseAll([&](const NaiveChannels::Binding& binding) -> std::optional<Loss> {
            if (db.has_value() && binding.db != *db) return std::nullopt;
            return binding.end < now ? Loss::kExpired : Loss::kFlushed;
          });
          naive.last = 0;
          break;
        }
        case 10: {
          const int other = static_cast<int>(below(3));
          channels.SwapDatabases(lock.db, other);
          for (NaiveChannels::Binding& binding : naive.bound) {
            if (binding.db == lock.db || binding.db == other) {
              binding.db = binding.db == lock.db ? other : lock.db;
            }
          }
          break;
        }
        case 11:
          channels.UnbindAll(lock);
          std::erase_if(naive.bound, [&](const NaiveChannels::Binding& binding) {
            return naive.Is(binding, lock);
          });
          break;
        default: {
          const size_t most = below(4);
          Budget budget(4 * most);
          channels.Publish(host_, At(now), below(2) == 0, budget);
          const Texts texts = host_.TakePublished();
          ASSERT_EQ(texts, naive.Publish(now, most));
          published += texts.size();
          const Due due = channels.NextDue();
          announced = naive.FirstEnd();
          if (!naive.lost.empty()) {
            ASSERT_EQ(due, Due::AtOnce());
          } else if (announced.has_value()) {
            ASSERT_EQ(due, Due::At(At(*announced + 1)));
          } else {
            ASSERT_TRUE(due.is_never());
          }
        }
      }
      ASSERT_TRUE(channels.IsConsistent());
      ASSERT_EQ(channels.size(), naive.bound.size());
      ASSERT_EQ(channels.empty(), naive.bound.empty());
      ASSERT_EQ(channels.has_unpublished(), !naive.lost.empty());
      const std::optional<int64_t> first = naive.FirstEnd();
      ASSERT_EQ(channels.IsDueEarlier(),
                first.has_value() && (!announced.has_value() || *first < *announced));
      for (const NaiveChannels::Binding& binding : naive.bound) {
        ASSERT_TRUE(channels.IsBoundTo({binding.db, binding.key}, Owner{binding.owner},
                                       {binding.channel, binding.id}));
      }
    }
    EXPECT_GT(published, 500U);
    channels.Clear();
  }
}

}  // namespace
}  // namespace turnstile
