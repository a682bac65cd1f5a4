// NOTIFY and MAXLINE on the engine that ships: who is told what, in which order, and when nothing
// is said.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "sim/sim_host.h"
#include "unit/printers.h"

namespace turnstile::sim {
namespace {

using Kind = AcquireResult::Kind;
using Texts = std::vector<std::string>;
using Names = std::vector<std::string_view>;

const char* NameOf(Kind kind) {
  switch (kind) {
    case Kind::kGranted:
      return "granted";
    case Kind::kBusy:
      return "busy";
    case Kind::kWaits:
      return "waits";
    case Kind::kQueued:
      return "queued";
    case Kind::kRefused:
      return "refused";
    case Kind::kWrongType:
      return "wrong type";
    case Kind::kNoSession:
      return "no session";
    case Kind::kNotifyRefused:
      return "notify refused";
    case Kind::kWaitLimit:
      return "wait limit";
    case Kind::kUserWaitLimit:
      return "user wait limit";
    case Kind::kQueueLimit:
      return "queue limit";
    case Kind::kCannotWait:
      return "cannot wait";
    case Kind::kDeadlock:
      return "deadlock";
  }
  return "?";
}

const char* NameOf(WaitEnd end) {
  switch (end) {
    case WaitEnd::kSuperseded:
      return "superseded";
    case WaitEnd::kCancelled:
      return "cancelled";
    case WaitEnd::kWrongType:
      return "wrong type";
    case WaitEnd::kDisconnected:
      return "disconnected";
    case WaitEnd::kDemoted:
      return "demoted";
  }
  return "?";
}

std::string TextOf(Loss how) {
  std::ostringstream text;
  PrintTo(how, &text);
  return text.str();
}

std::string TextOf(const WaitAnswer& answer) {
  if (std::holds_alternative<std::monostate>(answer)) return "timeout";
  if (std::holds_alternative<Token>(answer)) return "granted";
  if (const auto* outcome = std::get_if<Outcome>(&answer)) {
    return std::string("refused ") + turnstile::NameOf(*outcome);
  }
  if (const auto* end = std::get_if<WaitEnd>(&answer)) return NameOf(*end);
  return "error " + std::get<std::string>(answer);
}

class NotifyTest : public testing::Test {
 protected:
  NotifyTest() {
    host_.BeOldPrimary(now_.wall);
    host_.subscribers["c"] = 1;
    host_.on_notice = [this](const Notice& notice, size_t receivers) {
      std::string text(notice.to.id);
      if (notice.to.channel != "c") text = std::string(notice.to.channel) + '/' + text;
      if (const auto* loss = std::get_if<HoldLoss>(&notice.what)) {
        text += " lost " + TextOf(loss->how);
        token_ = loss->token;
      } else {
        const auto& answer = std::get<WaitAnswer>(notice.what);
        text += ' ' + TextOf(answer);
        if (const auto* token = std::get_if<Token>(&answer)) {
          token_ = *token;
          EXPECT_FALSE(OwnerHolds(notice.key, *token)) << "a grant is published, then written";
        }
      }
      text.append(" ").append(notice.key);
      if (receivers == 0) text += " (to nobody)";
      told_.push_back(text);
    };
  }

  void TearDown() override {
    Turn();
    EXPECT_EQ(host_.fault(), nullptr) << host_.fault();
    EXPECT_TRUE(host_.engine().IsConsistent());
    EXPECT_FALSE(host_.LeavesSomebodyWaiting(now_));
  }

  // What is asked for, and by whom.
  struct Ask {
    std::string_view owner;
    Names keys = {"a"};
    std::optional<std::string_view> id = std::nullopt;  // NOTIFY c id
    Millis wait{1'000};
    std::string_view channel = "c";
    Mode mode = Mode::kExclusive;
    uint32_t limit = 1;
    uint32_t weight = 1;
    uint32_t max_line = 0;
    bool reentrant = false;
    bool session = false;
    Millis lease{60'000};
    Millis max_hold{0};
    Millis linger{0};
    std::string_view tag = "";
    uint64_t connection = 1;
    std::string user = "default";
    bool may_block = true;
    bool in_script = false;
  };

  Kind Acquire(const Ask& ask) {
    AcquireRequest request{.owner = Owner{ask.owner},
                           .lease = ask.lease,
                           .wait = ask.wait,
                           .max_line = ask.max_line,
                           .mode = ask.mode,
                           .limit = ask.limit,
                           .weight = ask.weight,
                           .reentrant = ask.reentrant,
                           .session = ask.session,
                           .linger = ask.linger,
                           .max_hold = ask.max_hold,
                           .tag = ask.tag};
    if (ask.id.has_value()) request.notify = {ask.channel, *ask.id};
    const Caller caller{.connection = ask.connection,
                        .tag = ask.connection,
                        .user = ask.user,
                        .may_block = ask.may_block,
                        .in_script = ask.in_script};
    result_ = host_.Acquire(caller, ask.keys, request, now_);
    return result_.kind;
  }
  // As it is answered, in a word.
  std::string Try(const Ask& ask) { return NameOf(Acquire(ask)); }
  void Hold(std::string_view owner, const Names& keys = {"a"}) {
    ASSERT_EQ(Try({.owner = owner, .keys = keys, .wait = Millis{0}}), "granted");
  }
  size_t Release(std::string_view owner, const Names& keys = {"a"}) {
    return host_.Release({}, keys, Owner{owner}, now_).count;
  }
  // A pass of the event loop, and what was published in it.
  Texts Turn(size_t budget = 5'000) {
    host_.Turn(now_, budget);
    for (const Answered& answered : std::exchange(host_.answered(), {})) {
      answers_.push_back(std::to_string(answered.connection) + ' ' +
                         TextOf(answered.call->answer()));
      host_.Replied(answered, /*delivered=*/true);
    }
    return std::exchange(told_, {});
  }
  void Pass(int64_t ms) {
    now_.wall += Millis{ms};
    now_.steady += Millis{ms};
  }
  Texts TakeAnswers() { return std::exchange(answers_, {}); }

  std::optional<turnstile::Hold> Find(std::string_view key, std::string_view owner) const {
    const Lock* lock = host_.FindLock(0, key);
    return lock == nullptr ? std::nullopt : lock->Find(Owner{owner});
  }
  bool Holds(std::string_view owner, std::string_view key = "a") const {
    const auto hold = Find(key, owner);
    return hold.has_value() && hold->LiveAt(now_.moment());
  }
  bool OwnerHolds(std::string_view key, Token token) const {
    const Lock* lock = host_.FindLock(0, key);
    return lock != nullptr && lock->HasLive(token, now_.moment());
  }
  // The owners who wait, in order; and how many.
  std::string OwnersIn(std::string_view key = "a") const {
    std::string owners;
    for (const WaitQueue::LockQueue* line : host_.engine().queue().LongestQueues(0, 100)) {
      if (line->lock().key != key) continue;
      for (const auto* entry = line->first(); entry != nullptr; entry = entry->behind()) {
        owners.append(entry->waiter().request().owner.bytes).append(" ");
      }
    }
    return owners;
  }
  size_t Line(std::string_view key = "a") const {
    const std::string owners = OwnersIn(key);
    return static_cast<size_t>(std::count(owners.begin(), owners.end(), ' '));
  }
  const Stats& stats() const { return host_.engine().stats(); }
  Settings& settings() { return host_.engine().settings(); }
  size_t places() const { return host_.engine().waiting().places(); }

  Now now_{.wall = FineInstant{Micros{1'576'800'000'000'000}},
           .steady = FineTick{Micros{5'000'000}}};
  SimHost host_;
  AcquireResult result_{};
  Token token_{};  // of the last message
  Texts told_;
  Texts answers_;  // of calls that blocked
};

// --- One wait -----------------------------------------------------------------------------------

TEST_F(NotifyTest, WaitNeverBlocksAndItsGrantIsPublished) {
  Hold("ann");
  EXPECT_EQ(Try({.owner = "bob", .id = "i"}), "queued");
  EXPECT_EQ(host_.waiting(), 0U) << "nobody is blocked";
  EXPECT_FALSE(host_.Fence({}, "a", Token{0}, now_).current) << "0 is no token";
  EXPECT_EQ(stats().waits, 1U);
  EXPECT_EQ(Turn(), Texts());
  Release("ann");
  EXPECT_EQ(Turn(), Texts{"i granted a"});
  EXPECT_TRUE(Holds("bob"));
  EXPECT_EQ(Find("a", "bob")->token, token_);
  EXPECT_EQ(stats().acquired_after_wait, 1U);
  EXPECT_EQ(Turn(), Texts());
  EXPECT_EQ(places(), 0U);
}

TEST_F(NotifyTest, WaitsAlsoWhereNobodyCanBeBlocked) {
  Hold("ann");
  EXPECT_EQ(Try({.owner = "bob", .id = "i", .may_block = false}), "queued");
  EXPECT_EQ(Try({.owner = "cid", .id = "j", .in_script = true}), "queued");
  EXPECT_EQ(Try({.owner = "dan", .may_block = false}), "busy") << "without NOTIFY one try";
  Release("ann");
  EXPECT_EQ(Turn(), Texts{"i granted a"});
  Release("bob");
  EXPECT_EQ(Turn(), Texts{"j granted a"});
}

TEST_F(NotifyTest, TokenThatTheCallAnswersIsNotPublished) {
  EXPECT_EQ(Try({.owner = "ann", .id = "i"}), "granted");
  EXPECT_EQ(Try({.owner = "ann", .id = "i"}), "granted") << "asked again";
  EXPECT_EQ(Turn(), Texts());
  EXPECT_EQ(Release("ann"), 1U);
  Pass(100'000);
  EXPECT_EQ(Turn(), Texts()) << "nothing is said of a release";
}

TEST_F(NotifyTest, WithoutWaitItIsOneTry) {
  Hold("ann");
  EXPECT_EQ(Try({.owner = "bob", .id = "i", .wait = Millis{0}}), "busy");
  EXPECT_EQ(stats().rejected, 1U);
  Release("ann");
  EXPECT_EQ(Turn(), Texts());
  EXPECT_EQ(Try({.owner = "bob", .id = "i", .wait = Millis{0}}), "granted");
  EXPECT_TRUE(host_.engine().channels().IsBoundTo({0, "a"}, Owner{"bob"}, {"c", "i"}));
}

TEST_F(NotifyTest, TimeOutIsPublishedWithTheFirstKeyOfTheCall) {
  Hold("ann", {"b"});
  EXPECT_EQ(Try({.owner = "bob", .keys = {"z", "b", "a"}, .id = "i", .wait = Millis{50}}),
            "queued");
  Pass(49);
  EXPECT_EQ(Turn(), Texts());
  // Asked again in another order: that call names b first.
  EXPECT_EQ(Try({.owner = "bob", .keys = {"b", "a", "z"}, .id = "i", .wait = Millis{50}}),
            "queued");
  Pass(49);
  EXPECT_EQ(Turn(), Texts()) << "it took the new time-out";
  Pass(1);
  EXPECT_EQ(Turn(), Texts{"i timeout b"});
  EXPECT_EQ(stats().wait_timeouts, 1U);
  EXPECT_EQ(Line("a") + Line("b") + Line("z"), 0U);
}

TEST_F(NotifyTest, AskedAgainWithShorterWaitItTimesOutEarlier) {
  Hold("ann");
  Try({.owner = "bob", .id = "i", .wait = Millis{5'000}});
  Try({.owner = "bob", .id = "i", .wait = Millis{10}});
  Pass(10);
  EXPECT_EQ(Turn(), Texts{"i timeout a"});
}

TEST_F(NotifyTest, WhoMayNotPublishIsRefusedBeforeAnythingElse) {
  host_.users_who_may_not_publish.insert("mute");
  EXPECT_EQ(Try({.owner = "bob", .id = "i", .user = "mute"}), "notify refused");
  EXPECT_EQ(result_.text, "NOPERM");
  EXPECT_EQ(host_.FindLock(0, "a"), nullptr);
  host_.Push(0, "a", now_);
  EXPECT_EQ(Try({.owner = "bob", .id = "i", .user = "mute"}), "notify refused");
  EXPECT_EQ(Try({.owner = "bob", .id = "i"}), "wrong type");
  EXPECT_EQ(Try({.owner = "bob", .id = "i", .session = true, .user = "mute", .in_script = true}),
            "no session")
      << "that comes first";
}

// --- Grants that nobody receives ----------------------------------------------------------------

TEST_F(NotifyTest, GrantThatNobodyReceivesIsNotWrittenAndTheNextIsTriedAtOnce) {
  Hold("ann");
  Try({.owner = "bob", .id = "i", .channel = "deaf"});
  Try({.owner = "cid", .id = "j", .channel = "deaf"});
  Try({.owner = "dan", .id = "k"});
  Try({.owner = "eve", .id = "l"});
  Release("ann");
  const size_t log_size = host_.log().size();
  EXPECT_EQ(Turn(),
            (Texts{"deaf/i granted a (to nobody)", "deaf/j granted a (to nobody)", "k granted a"}));
  EXPECT_EQ(host_.log().size(), log_size + 1) << "one hold was written";
  EXPECT_TRUE(Holds("dan"));
  EXPECT_EQ(OwnersIn(), "eve ");
  EXPECT_EQ(stats().undelivered, 2U);
  EXPECT_EQ(stats().acquired_after_wait, 1U);
  Pass(2'000);
  EXPECT_EQ(Turn(), Texts{"l timeout a"}) << "of those who were not there nothing more is said";
}

TEST_F(NotifyTest, WaitForSeveralLocksEndsInAllItsLinesIfNobodyReceivesItsGrant) {
  Hold("ann", {"a"});
  Try({.owner = "bob", .keys = {"b", "a", "c"}, .id = "i", .channel = "deaf"});
  Try({.owner = "cid", .keys = {"c"}, .id = "j"});
  Try({.owner = "dan", .keys = {"b"}, .id = "k"});
  EXPECT_EQ(Turn(), Texts());
  Release("ann");
  EXPECT_EQ(Turn(), (Texts{"deaf/i granted b (to nobody)", "j granted c", "k granted b"}));
  EXPECT_EQ(host_.FindLock(0, "a"), nullptr);
  EXPECT_EQ(places(), 0U);
}

// A right that is gone: no message, and the next is tried.
TEST_F(NotifyTest, GrantOfUserWhoMayNoLongerPublishGoesToTheNext) {
  Hold("ann");
  Try({.owner = "bob", .id = "i", .user = "fickle"});
  Try({.owner = "cid", .id = "j"});
  host_.users_who_may_not_publish.insert("fickle");
  Release("ann");
  EXPECT_EQ(Turn(), (Texts{"i granted a (to nobody)", "j granted a"}));
  EXPECT_TRUE(Holds("cid"));
}

TEST_F(NotifyTest, NoMoreReceiversAreLookedForThanTheBudgetAllows) {
  constexpr size_t kDeaf = 1'000;
  Hold("ann");
  std::vector<std::string> owners;
  for (size_t i = 0; i < kDeaf; ++i) owners.push_back("deaf-" + std::to_string(i));
  for (const std::string& owner : owners) {
    ASSERT_EQ(Try({.owner = owner, .id = "i", .channel = "deaf"}), "queued");
  }
  Try({.owner = "bob", .id = "j"});
  Release("ann");
  size_t passes = 0;
  Texts told;
  while (!Holds("bob") && passes < 1'000) {
    ASSERT_TRUE(passes == 0 || host_.NextDue().IsDueAt(now_.moment())) << "the rest is due at once";
    const Texts more = Turn(160);
    EXPECT_LE(more.size(), 10U) << "each costs 16 units";
    told.insert(told.end(), more.begin(), more.end());
    ++passes;
    if (passes == 1) {
      // A newcomer does not overtake those who are still to be tried.
      EXPECT_EQ(Try({.owner = "zoe", .wait = Millis{0}}), "busy");
    }
  }
  EXPECT_GE(passes, kDeaf / 10);
  EXPECT_EQ(told.size(), kDeaf + 1);
  EXPECT_EQ(told.back(), "j granted a");
  EXPECT_EQ(stats().undelivered, kDeaf);
}

// The server writes each message to each of them.
TEST_F(NotifyTest, ManyReceiversOfAMessageCostWhatTheyCost) {
  host_.subscribers["c"] = 1'000;
  const auto one_by_one = [this](size_t messages) {
    for (size_t i = 0; i < messages; ++i) {
      EXPECT_EQ(Turn(1'000).size(), 1U) << i;
      EXPECT_TRUE(i + 1 == messages || host_.NextDue().IsDueAt(now_.moment())) << i;
    }
    EXPECT_EQ(Turn(), Texts());
  };
  const std::vector<std::string> keys = {"a", "b", "d", "e", "f"};
  const auto hold_all = [&] {
    for (const std::string& key : keys) Hold("ann", {key});
  };
  const auto queue_all = [&](Millis wait, bool session = false) {
    for (const std::string& key : keys) {
      ASSERT_EQ(Try({.owner = "bob",
                     .keys = {key},
                     .id = "i",
                     .wait = wait,
                     .session = session,
                     .lease = Millis{5'000},
                     .connection = 5}),
                "queued");
    }
    ASSERT_EQ(Turn(), Texts());
  };
  hold_all();
  queue_all(Millis{1'000});
  Pass(1'000);
  one_by_one(keys.size());  // time-outs
  queue_all(Millis{1'000});
  for (const std::string& key : keys) Release("bob", {key});
  one_by_one(keys.size());  // cancelled
  queue_all(Millis{1'000}, /*session=*/true);
  host_.Disconnect(5, now_);
  one_by_one(keys.size());  // disconnected
  queue_all(Millis{1'000});
  for (const std::string& key : keys) Release("ann", {key});
  one_by_one(keys.size());  // granted
  Pass(5'001);
  one_by_one(keys.size());  // ends of leases
  for (const std::string& key : keys) {
    ASSERT_EQ(Try({.owner = "cid", .keys = {key}, .id = "i"}), "granted");
  }
  for (const std::string& key : keys) host_.Delete(0, key, now_);
  one_by_one(keys.size());  // losses
  hold_all();
  queue_all(Millis{1'000});
  host_.BecomeReplica(now_);
  one_by_one(keys.size());  // demoted
}

TEST_F(NotifyTest, MessagesDoNotKeepFreeLocksFromWaiters) {
  constexpr size_t kLost = 200;
  std::vector<std::string> keys;
  for (size_t i = 0; i < kLost; ++i) keys.push_back("lost-" + std::to_string(i));
  for (const std::string& key : keys) {
    ASSERT_EQ(Try({.owner = "bob", .keys = {key}, .id = "i"}), "granted");
  }
  Hold("ann");
  Try({.owner = "cid", .id = "waits", .wait = Millis{5'000}});
  Turn();
  for (const std::string& key : keys) host_.Delete(0, key, now_);
  Release("ann");
  const Texts first = Turn(160);
  EXPECT_EQ(std::count(first.begin(), first.end(), "waits granted a"), 1);
  EXPECT_LT(first.size(), kLost / 2) << "the pass is bounded";
  size_t told = first.size();
  while (told < kLost + 1) {
    ASSERT_TRUE(host_.NextDue().IsDueAt(now_.moment()));
    const Texts more = Turn(160);
    ASSERT_FALSE(more.empty());
    told += more.size();
  }
  EXPECT_EQ(Turn(), Texts());
}

// In a cluster a slot leaves with all who wait for its locks.
TEST_F(NotifyTest, WaitsForLostSlotsEndWithinTheBudget) {
  constexpr size_t kWaits = 300;
  Hold("ann");
  Hold("ann", {"b"});
  EXPECT_EQ(Try({.owner = "dan", .keys = {"b"}, .id = "stays"}), "queued");
  EXPECT_EQ(Try({.owner = "eve", .connection = 9}), "waits");
  std::vector<std::string> owners;
  for (size_t i = 0; i < kWaits; ++i) owners.push_back("owner-" + std::to_string(i));
  for (const std::string& owner : owners) Try({.owner = owner, .id = "i"});
  Turn();
  host_.keys_of_lost_slots.insert("a");
  size_t passes = 0;
  size_t told = 0;
  do {
    told += Turn(100).size();
    ++passes;
  } while (host_.NextDue().IsDueAt(now_.moment()) && passes < kWaits);
  EXPECT_GE(passes, kWaits * 4 / 100) << "each answer costs 4 units";
  EXPECT_EQ(told, kWaits);
  EXPECT_EQ(TakeAnswers(), Texts{"9 error MOVED"});
  EXPECT_EQ(OwnersIn("b"), "dan ");
  EXPECT_EQ(Line(), 0U);
}

TEST_F(NotifyTest, UpgradeThatNobodyReceivesLeavesTheSharedHold) {
  ASSERT_EQ(Try({.owner = "ann", .mode = Mode::kShared}), "granted");
  ASSERT_EQ(Try({.owner = "bob", .mode = Mode::kShared}), "granted");
  const Token shared = result_.token;
  EXPECT_EQ(Try({.owner = "bob", .id = "i", .channel = "deaf"}), "queued");
  Release("ann");
  EXPECT_EQ(Turn(), Texts{"deaf/i granted a (to nobody)"});
  EXPECT_EQ(host_.FindLock(0, "a")->mode(), Mode::kShared);
  EXPECT_EQ(Find("a", "bob")->token, shared);
}

// --- What a grant is refused for ----------------------------------------------------------------

TEST_F(NotifyTest, RefusalsArePublishedAsTheServerWordsThem) {
  Hold("ann");
  Try({.owner = "bob", .id = "i", .user = "outcast"});
  Try({.owner = "cid", .id = "j"});
  host_.users_without_rights.insert("outcast");
  Release("ann");
  EXPECT_EQ(Turn(), (Texts{"i error NOPERM a", "j granted a"}));
  EXPECT_TRUE(Holds("cid"));
}

TEST_F(NotifyTest, KeyOfAnotherTypeEndsTheWait) {
  Hold("ann");
  Try({.owner = "bob", .id = "i"});
  host_.Push(0, "a", now_);
  EXPECT_EQ(Turn(), Texts{"i wrong type a"});
}

TEST_F(NotifyTest, SlotThatLeavesEndsTheWait) {
  Hold("ann");
  Try({.owner = "bob", .id = "i"});
  Try({.owner = "cid", .keys = {"b"}, .id = "j"});
  host_.keys_of_lost_slots.insert("a");
  EXPECT_EQ(Turn(), Texts{"i error MOVED a"});
  EXPECT_EQ(Line(), 0U);
}

// The owner came to hold the lock meanwhile, with another weight.
TEST_F(NotifyTest, RequestThatCannotBeGrantedAnyMoreIsRefused) {
  Hold("ann");
  Try({.owner = "bob", .id = "i", .mode = Mode::kLimit, .limit = 5, .weight = 2});
  host_.Delete(0, "a", now_);
  host_.Restore(
      0, "a",
      [&] {
        const std::unique_ptr<Lock> lock(Lock::Make({Mode::kLimit,
                                                     {.owner = Owner{"bob"},
                                                      .token = Token{77},
                                                      .since = now_.moment(),
                                                      .end = now_.moment() + Millis{500}}}));
        return std::string(lock->AsBytes());
      }(),
      now_.moment() + Millis{500}, now_);
  EXPECT_EQ(Turn(), Texts{"i refused kOtherWeight a"});
}

TEST_F(NotifyTest, DeadlockIsRefusedAndNamesTags) {
  ASSERT_EQ(Try({.owner = "ann", .keys = {"a"}}), "granted");
  ASSERT_EQ(Try({.owner = "bob", .keys = {"b"}}), "granted");
  EXPECT_EQ(Try({.owner = "ann", .keys = {"b"}, .id = "i", .tag = "host-1"}), "queued");
  EXPECT_EQ(Try({.owner = "bob", .keys = {"a"}, .id = "j"}), "deadlock");
  ASSERT_EQ(result_.cycle.size(), 2U);
  EXPECT_EQ(result_.cycle[0].name, "bob");
  EXPECT_EQ(result_.cycle[1].name, "host-1");
  EXPECT_EQ(places(), 1U) << "the refused call left nothing behind";
  EXPECT_EQ(Line("a"), 0U);
}

TEST_F(NotifyTest, WaitOfClosedConnectionClosesNoCycleAndHidesNone) {
  Hold("ann", {"a"});
  Hold("bob", {"b"});
  ASSERT_EQ(Try({.owner = "ann", .keys = {"b"}, .id = "i", .session = true, .connection = 5}),
            "queued");
  ASSERT_EQ(Try({.owner = "eve", .keys = {"e"}, .id = "e", .wait = Millis{0}}), "granted");
  ASSERT_EQ(Try({.owner = "cid", .keys = {"e"}, .id = "k", .session = true, .connection = 6}),
            "queued");
  host_.Disconnect(6, now_);
  EXPECT_EQ(Try({.owner = "bob", .keys = {"a"}, .id = "j"}), "deadlock");
  host_.Disconnect(5, now_);
  EXPECT_EQ(Try({.owner = "bob", .keys = {"a"}, .id = "j"}), "queued") << "ann waits no longer";
}

// Its place is given up already, so others behind it wait for nobody there.
TEST_F(NotifyTest, PlaceOfClosedConnectionIsNotTakenOver) {
  Hold("eve");
  ASSERT_EQ(Try({.owner = "ann", .id = "i", .session = true, .connection = 5}), "queued");
  ASSERT_EQ(Try({.owner = "bob", .id = "j"}), "queued");
  host_.Disconnect(5, now_);
  ASSERT_EQ(Try({.owner = "ann", .id = "k"}), "queued");
  EXPECT_EQ(OwnersIn(), "bob ann ");
}

// --- The same owner asks again ------------------------------------------------------------------

TEST_F(NotifyTest, SameChannelAndIdTakesOverThePlaceSilently) {
  Hold("ann");
  Try({.owner = "bob", .id = "i"});
  Try({.owner = "cid", .id = "j"});
  EXPECT_EQ(Try({.owner = "bob", .id = "i"}), "queued");
  EXPECT_EQ(OwnersIn(), "bob cid ");
  EXPECT_EQ(places(), 2U);
  EXPECT_EQ(Turn(), Texts());
  Release("ann");
  EXPECT_EQ(Turn(), Texts{"i granted a"});
}

TEST_F(NotifyTest, SameIdForOtherKeysOrModeGoesToTheEndSilently) {
  Hold("ann", {"a"});
  Hold("zoe", {"b"});
  Try({.owner = "bob", .id = "i"});
  Try({.owner = "cid", .id = "j"});
  EXPECT_EQ(Try({.owner = "bob", .keys = {"b", "a"}, .id = "i"}), "queued");
  EXPECT_EQ(OwnersIn(), "cid bob ");
  EXPECT_EQ(Turn(), Texts());
  EXPECT_EQ(Try({.owner = "cid", .id = "j", .mode = Mode::kShared}), "queued");
  EXPECT_EQ(OwnersIn(), "bob cid ");
  EXPECT_EQ(places(), 3U);
  EXPECT_EQ(Turn(), Texts());
}

TEST_F(NotifyTest, OtherIdOrChannelSupersedesTheOlderCall) {
  host_.subscribers["d"] = 1;
  Hold("ann");
  Try({.owner = "bob", .id = "i"});
  Try({.owner = "cid", .id = "x"});
  Try({.owner = "bob", .id = "j"});
  EXPECT_EQ(Turn(), Texts{"i superseded a"});
  Try({.owner = "bob", .id = "j", .channel = "d"});
  EXPECT_EQ(Turn(), Texts{"j superseded a"});
  EXPECT_EQ(OwnersIn(), "bob cid ") << "the place is kept";
  Release("ann");
  EXPECT_EQ(Turn(), Texts{"d/j granted a"});
  EXPECT_EQ(places(), 1U);
}

// Two owners may have chosen the same id.
TEST_F(NotifyTest, CallOfAnotherOwnerWithTheSameIdRetractsNothing) {
  Hold("ann");
  Hold("ann", {"b"});
  Try({.owner = "bob", .id = "i"});
  Release("bob");
  EXPECT_EQ(Try({.owner = "cid", .keys = {"b"}, .id = "i"}), "queued");
  EXPECT_EQ(Turn(), Texts{"i cancelled a"});
  Release("cid", {"b"});
  EXPECT_EQ(Try({.owner = "cid", .keys = {"b"}, .id = "i"}), "queued");
  EXPECT_EQ(Turn(), Texts()) << "the newer call was answered under this id";
}

// Two changes before anybody was told.
TEST_F(NotifyTest, EachOlderCallIsToldOnce) {
  Hold("ann");
  for (const std::string_view id : {"i", "j", "k"}) Try({.owner = "bob", .id = id});
  EXPECT_EQ(Turn(), (Texts{"i superseded a", "j superseded a"}));
  EXPECT_EQ(places(), 1U);
}

TEST_F(NotifyTest, BlockingCallAndNotifiedCallSupersedeEachOther) {
  Hold("ann");
  Try({.owner = "bob", .id = "i"});
  EXPECT_EQ(Try({.owner = "bob", .connection = 7}), "waits");
  EXPECT_EQ(Turn(), Texts{"i superseded a"});
  EXPECT_EQ(places(), 0U);
  EXPECT_EQ(Try({.owner = "bob", .id = "j"}), "queued");
  EXPECT_EQ(Turn(), Texts());
  EXPECT_EQ(TakeAnswers(), Texts{"7 superseded"});
  Release("ann");
  EXPECT_EQ(Turn(), Texts{"j granted a"});
}

TEST_F(NotifyTest, OneTryLeavesTheWaitAlone) {
  Hold("ann");
  Try({.owner = "bob", .id = "i"});
  EXPECT_EQ(Try({.owner = "bob", .id = "i", .wait = Millis{0}}), "busy");
  EXPECT_EQ(Try({.owner = "bob", .wait = Millis{0}}), "busy");
  EXPECT_EQ(Turn(), Texts());
  Release("ann");
  EXPECT_EQ(Turn(), Texts{"i granted a"});
}

// --- REENTRANT ----------------------------------------------------------------------------------

TEST_F(NotifyTest, AskingAgainForWhatItWasToldDoesNotEnterOnceMore) {
  const auto count = [this] { return Find("a", "bob")->count; };
  Hold("ann");
  Try({.owner = "bob", .id = "i", .reentrant = true});
  Release("ann");
  EXPECT_EQ(Turn(), Texts{"i granted a"});
  EXPECT_EQ(count(), 1U);
  EXPECT_EQ(Try({.owner = "bob", .id = "i", .reentrant = true}), "granted") << "a retry";
  EXPECT_EQ(count(), 1U);
  EXPECT_EQ(Try({.owner = "bob", .id = "j", .reentrant = true}), "granted");
  EXPECT_EQ(count(), 2U) << "another id is another entry";
  EXPECT_EQ(Try({.owner = "bob", .id = "j", .reentrant = true}), "granted");
  EXPECT_EQ(count(), 2U);
  EXPECT_EQ(Try({.owner = "bob", .reentrant = true}), "granted");
  EXPECT_EQ(count(), 3U) << "without NOTIFY each counts";
}

// --- Losses -------------------------------------------------------------------------------------

TEST_F(NotifyTest, EndOfLeaseIsPublishedThoughNobodyTouchesTheLock) {
  Try({.owner = "ann", .id = "i", .lease = Millis{100}});
  Turn();
  EXPECT_EQ(host_.NextDue(), Due::At(now_.moment() + Millis{101}));
  const Token token = result_.token;
  Pass(100);
  EXPECT_EQ(Turn(), Texts());
  Pass(1);
  EXPECT_EQ(Turn(), Texts{"i lost kExpired a"});
  EXPECT_EQ(token_, token);
}

TEST_F(NotifyTest, EndOfLeaseOfLingeringHoldIsPublishedBeforeItsLingerEnds) {
  Try({.owner = "ann", .id = "i", .lease = Millis{100}, .linger = Millis{5'000}});
  Turn();
  Pass(101);
  EXPECT_EQ(Turn(), Texts{"i lost kExpired a"});
  Pass(10'000);
  host_.ExpireCycle(now_);
  EXPECT_EQ(Turn(), Texts()) << "once";
}

TEST_F(NotifyTest, RenewedHoldIsLostLater) {
  Try({.owner = "ann", .id = "i", .lease = Millis{100}});
  Turn();
  host_.Touch({}, Names{"a"}, Owner{"ann"}, Millis{300}, now_);
  Turn();
  Pass(200);
  EXPECT_EQ(Turn(), Texts());
  host_.Touch({}, Names{"a"}, Owner{"ann"}, Millis{5}, now_);
  Turn();
  Pass(6);
  EXPECT_EQ(Turn(), Texts{"i lost kExpired a"});
}

TEST_F(NotifyTest, EveryWayToLoseAHoldHasItsReason) {
  const auto bind = [&](std::string_view id, bool session = false) {
    ASSERT_EQ(Try({.owner = "ann", .id = id, .session = session, .connection = 5}), "granted");
    Turn();
  };
  bind("1");
  host_.Delete(0, "a", now_);
  EXPECT_EQ(Turn(), Texts{"1 lost kForced a"});
  bind("2");
  host_.Evict(0, "a", now_);
  EXPECT_EQ(Turn(), Texts{"2 lost kEvicted a"});
  bind("3");
  host_.Flush(std::nullopt, now_);
  EXPECT_EQ(Turn(), Texts{"3 lost kFlushed a"});
  bind("4");
  host_.Rename(0, "a", "b", now_);
  EXPECT_EQ(Turn(), Texts{"4 lost kForced a"});
  host_.Delete(0, "b", now_);
  bind("5");
  host_.Set(0, "a", "somebody", std::nullopt, now_);
  EXPECT_EQ(Turn(), Texts{"5 lost kForced a"});
  host_.Delete(0, "a", now_);
  bind("6", /*session=*/true);
  host_.Disconnect(5, now_);
  EXPECT_EQ(Turn(), Texts{"6 lost kSession a"});
  EXPECT_TRUE(host_.engine().channels().empty());
}

TEST_F(NotifyTest, HoldThatIsRestoredBeforeAnybodyWasToldIsNotLost) {
  Try({.owner = "ann", .id = "i"});
  Turn();
  const std::string bytes = host_.Dump(0, "a");
  const Instant end = Find("a", "ann")->end;
  host_.Delete(0, "a", now_);
  ASSERT_TRUE(host_.Restore(0, "a", bytes, end, now_));
  EXPECT_EQ(Turn(), Texts());
  EXPECT_TRUE(host_.engine().channels().IsBoundTo({0, "a"}, Owner{"ann"}, {"c", "i"}));
  host_.Delete(0, "a", now_);
  EXPECT_EQ(Turn(), Texts{"i lost kForced a"});
}

TEST_F(NotifyTest, LossIsPublishedForEachLockOfTheSet) {
  Try({.owner = "ann", .keys = {"b", "a"}, .id = "i", .lease = Millis{100}});
  Turn();
  Pass(101);
  Texts told = Turn();
  std::sort(told.begin(), told.end());
  EXPECT_EQ(told, (Texts{"i lost kExpired a", "i lost kExpired b"}));
}

TEST_F(NotifyTest, LossIsPublishedBeforeTheGrantThatItAllows) {
  Try({.owner = "ann", .id = "i", .lease = Millis{100}});
  Try({.owner = "bob", .id = "j"});
  Turn();
  Pass(101);
  EXPECT_EQ(Turn(), (Texts{"i lost kExpired a", "j granted a"}));
  host_.Delete(0, "a", now_);
  Try({.owner = "cid", .id = "k"});
  EXPECT_EQ(Turn(), Texts{"j lost kForced a"});
}

TEST_F(NotifyTest, SwappedDatabasesTakeTheirBindingsWithThem) {
  Try({.owner = "ann", .id = "i"});
  Turn();
  host_.Swap(0, 1, now_);
  EXPECT_EQ(Try({.owner = "ann", .id = "j"}), "granted") << "another hold, of the same name";
  host_.Delete(1, "a", now_);
  EXPECT_EQ(Turn(), Texts{"i lost kForced a"});
  host_.Delete(0, "a", now_);
  EXPECT_EQ(Turn(), Texts{"j lost kForced a"});
}

TEST_F(NotifyTest, LockThatMovesToAnotherNodeIsNotLost) {
  Try({.owner = "ann", .id = "i"});
  Turn();
  host_.Migrate(0, "a", now_);
  Pass(100'000);
  EXPECT_EQ(Turn(), Texts());
}

TEST_F(NotifyTest, LaterCallWithoutNotifyLeavesTheChannelBoundAndOneWithNotifyMovesIt) {
  Try({.owner = "ann", .id = "i"});
  Try({.owner = "ann"});
  host_.Delete(0, "a", now_);
  EXPECT_EQ(Turn(), Texts{"i lost kForced a"});
  Try({.owner = "ann", .id = "i"});
  Try({.owner = "ann", .id = "j"});
  host_.Delete(0, "a", now_);
  EXPECT_EQ(Turn(), Texts{"j lost kForced a"});
}

TEST_F(NotifyTest, LossIsNotPublishedForUserWhoMayNotPublish) {
  Try({.owner = "ann", .id = "i", .user = "fickle"});
  host_.users_who_may_not_publish.insert("fickle");
  host_.Delete(0, "a", now_);
  EXPECT_EQ(Turn(), Texts{"i lost kForced a (to nobody)"}) << "the host decides";
}

// --- SESSION ------------------------------------------------------------------------------------

TEST_F(NotifyTest, WaitWithSessionEndsWithItsConnection) {
  Hold("ann");
  Try({.owner = "bob", .id = "i", .session = true, .connection = 5});
  Try({.owner = "cid", .id = "j", .connection = 5});
  Try({.owner = "dan", .id = "k", .session = true, .connection = 6});
  host_.Disconnect(7, now_);
  EXPECT_EQ(Turn(), Texts());
  host_.Disconnect(5, now_);
  EXPECT_EQ(Turn(), Texts{"i disconnected a"}) << "without SESSION the wait belongs to the owner";
  EXPECT_EQ(OwnersIn(), "cid dan ");
  Release("ann");
  EXPECT_EQ(Turn(), Texts{"j granted a"});
  EXPECT_FALSE(host_.engine().sessions().IsBound({0, "a"}, Owner{"cid"}));
  Release("cid");
  EXPECT_EQ(Turn(), Texts{"k granted a"});
  EXPECT_EQ(host_.engine().sessions().BoundTo({0, "a"}, Owner{"dan"}), 6U);
  host_.Disconnect(6, now_);
  EXPECT_EQ(Turn(), Texts{"k lost kSession a"});
  EXPECT_EQ(host_.FindLock(0, "a"), nullptr);
}

TEST_F(NotifyTest, WaitThatTookOverWithoutSessionOutlivesTheConnection) {
  Hold("ann");
  Try({.owner = "bob", .id = "i", .session = true, .connection = 5});
  Try({.owner = "bob", .id = "i", .connection = 6});
  host_.Disconnect(5, now_);
  EXPECT_EQ(Turn(), Texts());
  Try({.owner = "bob", .id = "i", .session = true, .connection = 8});
  host_.Disconnect(6, now_);
  EXPECT_EQ(Turn(), Texts());
  host_.Disconnect(8, now_);
  EXPECT_EQ(Turn(), Texts{"i disconnected a"});
}

TEST_F(NotifyTest, ManyWaitsOfAClosedConnectionEndWithinTheBudget) {
  Hold("ann");
  std::vector<std::string> owners;
  for (int i = 0; i < 100; ++i) owners.push_back("owner-" + std::to_string(i));
  for (const std::string& owner : owners) {
    Try({.owner = owner, .id = "i", .session = true, .connection = 5});
  }
  Turn();
  host_.Disconnect(5, now_);
  size_t told = 0;
  for (int pass = 0; pass < 10; ++pass) {
    EXPECT_TRUE(host_.NextDue().IsDueAt(now_.moment()));
    told += Turn(40).size();
    EXPECT_EQ(told, static_cast<size_t>(10 * (pass + 1)));
  }
  EXPECT_EQ(Line(), 0U);
  EXPECT_FALSE(host_.engine().has_sessions());
}

// --- Demotion -----------------------------------------------------------------------------------

TEST_F(NotifyTest, DemotionEndsWaitsAndForgetsBindings) {
  ASSERT_EQ(Try({.owner = "ann", .id = "h", .lease = Millis{100}}), "granted");
  Try({.owner = "bob", .id = "i"});
  Try({.owner = "cid", .keys = {"b", "a"}, .id = "j"});
  EXPECT_EQ(Try({.owner = "dan", .connection = 9}), "waits");
  host_.BecomeReplica(now_);
  EXPECT_EQ(Turn(), (Texts{"i demoted a", "j demoted b"}));
  EXPECT_EQ(Line("a") + Line("b"), 0U);
  EXPECT_EQ(places(), 0U);
  EXPECT_TRUE(host_.engine().channels().empty());
  Pass(5'000);
  EXPECT_EQ(Turn(), Texts()) << "neither a time-out nor the end of the lease";
}

// It was demoted and promoted again before it told anybody: the waits of then are over, those that
// began since are not.
TEST_F(NotifyTest, WaitsOfAFormerTermEndThoughTheServerIsAPrimaryAgain) {
  Hold("ann");
  Try({.owner = "bob", .id = "i"});
  host_.BecomeReplica(now_);
  host_.BecomePrimary();
  Try({.owner = "cid", .id = "j"});
  EXPECT_EQ(Turn(), Texts{"i demoted a"});
  EXPECT_EQ(OwnersIn(), "cid ");
}

TEST_F(NotifyTest, WaitThatIsAskedAgainInTheNewTermGoesOn) {
  Hold("ann");
  Try({.owner = "bob", .id = "i"});
  host_.BecomeReplica(now_);
  host_.BecomePrimary();
  EXPECT_EQ(Try({.owner = "bob", .id = "i"}), "queued");
  EXPECT_EQ(Turn(), Texts()) << "its id now belongs to the newer call";
  EXPECT_EQ(OwnersIn(), "bob ");
}

// --- LOCK.RELEASE -------------------------------------------------------------------------------

TEST_F(NotifyTest, ReleaseCancelsTheWaitInAllItsLines) {
  Hold("ann", {"a"});
  Try({.owner = "bob", .keys = {"b", "a"}, .id = "i"});
  Try({.owner = "cid", .keys = {"b"}, .id = "j"});
  EXPECT_EQ(Release("bob", {"a"}), 1U);
  EXPECT_EQ(Release("bob", {"a"}), 0U) << "once";
  EXPECT_EQ(Turn(), (Texts{"i cancelled b", "j granted b"}));
  EXPECT_EQ(stats().waits_cancelled, 1U);
  EXPECT_EQ(stats().released, 0U);
  EXPECT_EQ(places(), 0U);
}

TEST_F(NotifyTest, ReleaseGivesUpHoldAndWaitAlike) {
  ASSERT_EQ(Try({.owner = "ann", .mode = Mode::kShared}), "granted");
  ASSERT_EQ(Try({.owner = "bob", .id = "h", .mode = Mode::kShared}), "granted");
  EXPECT_EQ(Try({.owner = "bob", .id = "i"}), "queued") << "an upgrade";
  EXPECT_EQ(Release("bob"), 1U);
  EXPECT_EQ(Turn(), Texts{"i cancelled a"}) << "and nothing is said of the hold";
  EXPECT_FALSE(Holds("bob"));
}

TEST_F(NotifyTest, ReleaseCountsEachNamedLockThatItHeldOrWaitedFor) {
  Hold("ann", {"a"});
  Hold("bob", {"c"});
  Try({.owner = "bob", .keys = {"b", "a"}, .id = "i"});
  EXPECT_EQ(Release("bob", {"a", "b", "c", "d"}), 3U);
  EXPECT_EQ(Turn(), Texts{"i cancelled b"});
}

// --- MAXLINE ------------------------------------------------------------------------------------

TEST_F(NotifyTest, MaxLineRefusesToWaitBehindSoMany) {
  Hold("ann");
  EXPECT_EQ(Try({.owner = "bob", .id = "i", .max_line = 1}), "queued") << "the line is empty";
  EXPECT_EQ(Try({.owner = "cid", .id = "j", .max_line = 1}), "busy");
  EXPECT_EQ(Try({.owner = "cid", .id = "j", .max_line = 2}), "queued");
  EXPECT_EQ(Try({.owner = "dan", .max_line = 2, .connection = 9}), "busy") << "blocking or not";
  EXPECT_EQ(Try({.owner = "dan", .max_line = 3, .connection = 9}), "waits");
  EXPECT_EQ(Try({.owner = "eve", .id = "k", .max_line = 3}), "busy") << "who blocks counts too";
  EXPECT_EQ(stats().rejected_line_full, 3U);
  EXPECT_EQ(stats().rejected, 0U) << "not counted twice";
  EXPECT_EQ(stats().waits, 3U);
  EXPECT_EQ(OwnersIn(), "bob cid dan ");
}

TEST_F(NotifyTest, MaxLineDoesNotMatterToWhoGetsTheLock) {
  EXPECT_EQ(Try({.owner = "ann", .max_line = 1}), "granted");
  EXPECT_EQ(Try({.owner = "ann", .max_line = 1}), "granted");
  Try({.owner = "bob", .id = "i"});
  EXPECT_EQ(Try({.owner = "ann", .max_line = 1}), "granted") << "the holder asks again";
}

TEST_F(NotifyTest, MaxLineCountsTheLineOfEachNamedLock) {
  Hold("ann", {"a"});
  Hold("zoe", {"b"});
  Try({.owner = "bob", .keys = {"a"}, .id = "i"});
  Try({.owner = "cid", .keys = {"b"}, .id = "j"});
  EXPECT_EQ(Try({.owner = "dan", .keys = {"a", "b"}, .id = "k", .max_line = 2}), "queued")
      << "one in each line";
  EXPECT_EQ(Try({.owner = "eve", .keys = {"free", "b"}, .id = "l", .max_line = 2}), "busy")
      << "two in the line of b";
  EXPECT_EQ(Line("free"), 0U);
  EXPECT_EQ(Try({.owner = "eve", .keys = {"free", "b"}, .id = "l", .max_line = 3}), "queued");
  EXPECT_EQ(stats().rejected_line_full, 1U);
}

TEST_F(NotifyTest, MaxLineNeverRefusesToTakeOverTheOwnPlace) {
  Hold("ann");
  Try({.owner = "bob", .id = "i"});
  Try({.owner = "cid", .id = "j"});
  Try({.owner = "dan", .id = "k"});
  EXPECT_EQ(Try({.owner = "cid", .id = "j", .max_line = 1}), "queued");
  EXPECT_EQ(Try({.owner = "dan", .id = "new", .max_line = 1}), "queued");
  EXPECT_EQ(OwnersIn(), "bob cid dan ");
  EXPECT_EQ(Turn(), Texts{"k superseded a"});
}

TEST_F(NotifyTest, MaxLineDoesNotCountOwnWaitsThatTheCallReplaces) {
  Hold("ann", {"a"});
  Hold("zoe", {"b"});
  Try({.owner = "bob", .keys = {"a"}, .id = "i"});
  Try({.owner = "cid", .keys = {"a"}, .id = "j"});
  // Other keys: not a take over, but its own place does not count.
  EXPECT_EQ(Try({.owner = "cid", .keys = {"a", "b"}, .id = "j", .max_line = 1}), "busy");
  EXPECT_EQ(OwnersIn(), "bob cid ") << "the older wait stays";
  EXPECT_EQ(Turn(), Texts());
  EXPECT_EQ(Try({.owner = "cid", .keys = {"a", "b"}, .id = "j", .max_line = 2}), "queued");
  EXPECT_EQ(Line("a"), 2U);
  EXPECT_EQ(Line("b"), 1U);
}

TEST_F(NotifyTest, MaxLineIsJudgedBeforeTheLimitsOfTheServer) {
  settings().max_queued = 1;
  Hold("ann");
  Try({.owner = "bob", .id = "i"});
  EXPECT_EQ(Try({.owner = "cid", .id = "j", .max_line = 1}), "busy");
  EXPECT_EQ(Try({.owner = "cid", .id = "j", .max_line = 2}), "queue limit");
  EXPECT_EQ(stats().rejected_line_full, 1U);
  EXPECT_EQ(stats().rejected_wait_limit, 1U);
}

TEST_F(NotifyTest, MaxLineWhereNobodyCanWaitIsOneTry) {
  Hold("ann");
  Try({.owner = "bob", .id = "i"});
  EXPECT_EQ(Try({.owner = "cid", .max_line = 1, .may_block = false}), "busy");
  EXPECT_EQ(Try({.owner = "cid", .wait = Millis{0}, .max_line = 1}), "busy");
  EXPECT_EQ(stats().rejected, 2U);
  EXPECT_EQ(stats().rejected_line_full, 0U);
}

// --- max-queued, max-waiters and max-waiters-per-user -------------------------------------------

TEST_F(NotifyTest, MaxQueuedCountsPlacesNotCalls) {
  settings().max_queued = 4;
  Hold("ann");
  EXPECT_EQ(Try({.owner = "bob", .keys = {"a", "b", "c"}, .id = "i"}), "queued");
  EXPECT_EQ(places(), 3U);
  EXPECT_EQ(Try({.owner = "cid", .keys = {"a", "d"}, .id = "j"}), "queue limit");
  EXPECT_EQ(result_.limit, 4U);
  EXPECT_EQ(Try({.owner = "cid", .id = "j"}), "queued");
  EXPECT_EQ(Try({.owner = "dan", .id = "k"}), "queue limit");
  EXPECT_EQ(Try({.owner = "dan", .connection = 9}), "waits") << "who blocks takes no such place";
  EXPECT_EQ(stats().rejected_wait_limit, 2U);
  // Every end of a wait frees its places.
  EXPECT_EQ(Release("bob", {"c"}), 1U);
  EXPECT_EQ(Turn(), Texts{"i cancelled a"});
  EXPECT_EQ(places(), 1U);
  Pass(1'000);
  EXPECT_EQ(Turn(), Texts{"j timeout a"});
  EXPECT_EQ(places(), 0U);
  EXPECT_EQ(TakeAnswers(), Texts{"9 timeout"});
}

TEST_F(NotifyTest, MaxQueuedTreatsReplacedWaitsAsGone) {
  settings().max_queued = 3;
  Hold("ann", {"a"});
  Try({.owner = "bob", .keys = {"a", "b"}, .id = "i"});
  Try({.owner = "cid", .keys = {"a"}, .id = "j"});
  EXPECT_EQ(Try({.owner = "bob", .keys = {"b", "a"}, .id = "i"}), "queued") << "taken over";
  EXPECT_EQ(Try({.owner = "bob", .keys = {"a", "d"}, .id = "i"}), "queued") << "replaced";
  EXPECT_EQ(Try({.owner = "bob", .keys = {"a", "d", "e"}, .id = "i"}), "queue limit");
  EXPECT_EQ(OwnersIn(), "cid bob ") << "what it had stays";
  EXPECT_EQ(Try({.owner = "cid", .keys = {"a"}, .id = "new"}), "queued") << "superseded";
  EXPECT_EQ(Try({.owner = "cid", .keys = {"a"}, .id = "newer"}), "queued");
  EXPECT_EQ(Turn(), (Texts{"j superseded a", "new superseded a"}));
  EXPECT_EQ(places(), 3U);
  settings().max_queued = 1;
  EXPECT_EQ(Try({.owner = "cid", .keys = {"a"}, .id = "newer"}), "queued")
      << "also beyond a limit that was lowered";
}

// A script can enter and leave a line any number of times before anything is published.
TEST_F(NotifyTest, MaxQueuedBoundsWhatIsToBePublished) {
  settings().max_queued = 3;
  Hold("ann");
  for (const std::string_view id : {"1", "2", "3", "4"}) {
    EXPECT_EQ(Try({.owner = "bob", .id = id}), "queued");
    EXPECT_EQ(Release("bob"), 1U);
  }
  EXPECT_EQ(places(), 0U);
  EXPECT_EQ(host_.engine().waiting().ended_places(), 4U);
  EXPECT_EQ(Try({.owner = "cid", .id = "j"}), "queue limit");
  EXPECT_EQ(Try({.owner = "dan", .connection = 9}), "waits");
  EXPECT_EQ(Turn().size(), 4U);
  EXPECT_EQ(Try({.owner = "cid", .id = "j"}), "queued");
  EXPECT_EQ(Try({.owner = "cid", .id = "k"}), "queued");
  EXPECT_EQ(Try({.owner = "cid", .id = "l"}), "queued");
  EXPECT_EQ(Try({.owner = "cid", .id = "m"}), "queued");
  EXPECT_EQ(Try({.owner = "cid", .id = "n"}), "queue limit") << "three are superseded already";
  EXPECT_EQ(Turn(), (Texts{"j superseded a", "k superseded a", "l superseded a"}));
}

TEST_F(NotifyTest, MaxWaitersCountsBlockedClientsOnly) {
  settings().max_waiters = 1;
  Hold("ann");
  Try({.owner = "bob", .id = "i"});
  Try({.owner = "cid", .id = "j"});
  EXPECT_EQ(Try({.owner = "dan", .connection = 9}), "waits");
  EXPECT_EQ(Try({.owner = "eve", .connection = 10}), "wait limit");
  EXPECT_EQ(Try({.owner = "eve", .id = "k"}), "queued");
  // Taking over a notified wait would block one client more.
  EXPECT_EQ(Try({.owner = "bob", .connection = 11}), "wait limit");
  EXPECT_EQ(OwnersIn(), "bob cid dan eve ");
  EXPECT_EQ(Try({.owner = "dan", .connection = 12}), "waits") << "in place of its own";
}

TEST_F(NotifyTest, MaxWaitersPerUserCountsBothKindsOfWaits) {
  settings().max_waiters_per_user = 2;
  Hold("ann");
  Try({.owner = "bob", .keys = {"a", "b", "c"}, .id = "i", .user = "u"});
  EXPECT_EQ(Try({.owner = "cid", .connection = 9, .user = "u"}), "waits") << "waits, not places";
  EXPECT_EQ(Try({.owner = "dan", .id = "j", .user = "u"}), "user wait limit");
  EXPECT_EQ(result_.limit, 2U);
  EXPECT_EQ(Try({.owner = "dan", .connection = 10, .user = "u"}), "user wait limit");
  EXPECT_EQ(Try({.owner = "dan", .id = "j", .user = "v"}), "queued");
  EXPECT_EQ(Try({.owner = "bob", .keys = {"a", "b", "c"}, .id = "i", .user = "u"}), "queued")
      << "taken over";
  EXPECT_EQ(Try({.owner = "bob", .keys = {"a", "b", "c"}, .id = "k", .user = "u"}), "queued")
      << "superseded";
  Turn();
  EXPECT_EQ(Try({.owner = "eve", .id = "j", .user = "u"}), "user wait limit");
  Release("bob", {"b"});
  Turn();
  EXPECT_EQ(Try({.owner = "eve", .id = "j", .user = "u"}), "queued");
}

TEST_F(NotifyTest, MaxWaitersPerUserIsNotPassedByReplacingWaitsOfAnotherUser) {
  settings().max_waiters_per_user = 1;
  Hold("ann");
  Hold("ann", {"b"});
  Try({.owner = "bob", .id = "i", .user = "u"});
  Try({.owner = "bob", .keys = {"b"}, .id = "j", .user = "v"});
  EXPECT_EQ(Try({.owner = "bob", .keys = {"b"}, .id = "k", .user = "u"}), "user wait limit");
  EXPECT_EQ(OwnersIn("b"), "bob ") << "the older wait stays";
  EXPECT_EQ(Turn(), Texts());
}

// --- WEIGHT and MAXHOLD of those who wait -------------------------------------------------------

TEST_F(NotifyTest, HeavyRequestHoldsBackThoseBehindIt) {
  const auto ask = [](std::string_view owner, std::string_view id, uint32_t weight) {
    return Ask{.owner = owner, .id = id, .mode = Mode::kLimit, .limit = 10, .weight = weight};
  };
  EXPECT_EQ(Try(ask("ann", "1", 4)), "granted");
  EXPECT_EQ(Try(ask("bob", "2", 5)), "granted");
  EXPECT_EQ(Try(ask("cid", "3", 6)), "queued");
  EXPECT_EQ(Try(ask("dan", "4", 1)), "queued") << "it would fit, but for Cid";
  Release("ann");
  EXPECT_EQ(Turn(), Texts()) << "5 and 6 are too much";
  Release("bob");
  EXPECT_EQ(Turn(), (Texts{"3 granted a", "4 granted a"}));
  EXPECT_EQ(host_.FindLock(0, "a")->WeightBlocking(now_.moment()), 7U);
}

// A wait that takes over with a smaller weight lets it and those behind in.
TEST_F(NotifyTest, LighterRequestThatTakesOverIsTriedAtOnce) {
  const auto ask = [](std::string_view owner, std::string_view id, uint32_t weight) {
    return Ask{.owner = owner, .id = id, .mode = Mode::kLimit, .limit = 10, .weight = weight};
  };
  Try(ask("ann", "1", 6));
  Try(ask("bob", "2", 5));
  Try(ask("cid", "3", 1));
  EXPECT_EQ(Turn(), Texts());
  EXPECT_EQ(Try(ask("bob", "2", 3)), "queued");
  EXPECT_EQ(Turn(), (Texts{"2 granted a", "3 granted a"}));
}

TEST_F(NotifyTest, CapCountsFromTheGrantNotFromTheCall) {
  Hold("ann");
  Try({.owner = "bob", .id = "i", .lease = Millis{100}, .max_hold = Millis{300}, .tag = "job"});
  Pass(500);
  Release("ann");
  EXPECT_EQ(Turn(), Texts{"i granted a"});
  EXPECT_EQ(Find("a", "bob")->cap, now_.moment() + Millis{300});
  EXPECT_EQ(Find("a", "bob")->tag, "job");
  const Instant cap = now_.moment() + Millis{300};
  Pass(50);
  EXPECT_EQ(host_.Touch({}, Names{"a"}, Owner{"bob"}, Millis{60'000}, now_).count, 1U);
  EXPECT_EQ(Find("a", "bob")->end, cap);
  Turn();
  Pass(251);
  EXPECT_EQ(Turn(), Texts{"i lost kExpired a"});
}

}  // namespace
}  // namespace turnstile::sim
