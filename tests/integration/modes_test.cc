// SHARED, LIMIT and REENTRANT on a server: one scenario for each, the effect of leases and
// connections, and mutual exclusion under load. The rules of who may hold a lock together are
// decided, and tested, in the core.

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <iostream>
#include <memory>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "support/eventually.h"
#include "support/lateness.h"
#include "support/lock_test.h"
#include "support/reply.h"
#include "support/resp3.h"
#include "support/server.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

using Owners = std::vector<std::string>;

const Command kExclusive = {};
const Command kShared = {"SHARED"};

Command Limit(int n) { return {"LIMIT", std::to_string(n)}; }

Command Waiting(Command options) {
  options.insert(options.end(), {"WAIT", std::to_string(kMinute)});
  return options;
}

class ModesTest : public SharedWaitingTest<ModesTest> {
 protected:
  Reply Ask(std::string_view owner, const Command& options, int64_t lease_ms = kMinute) {
    return client_.Do(Acquiring("job", owner, options, lease_ms));
  }
  int64_t Must(std::string_view owner, const Command& options, int64_t lease_ms = kMinute) {
    return MustObtain(client_, Acquiring("job", owner, options, lease_ms));
  }
  Waiter Wait(std::string_view owner, const Command& options, std::string_view key = "job") {
    return Waiter::Asking(server(), Acquiring(key, owner, Waiting(options)));
  }
  Reply Release(std::string_view owner, std::string_view key = "job") {
    return client_.Do("LOCK.RELEASE", key, owner);
  }
  Reply Fence(int64_t token) { return client_.Do("LOCK.FENCE", "job", token); }

  // The end of one holder's lease, give or take the duration of the query.
  int64_t LeaseLeft(std::string_view owner) {
    return HoldOf(client_, "job", owner).Field("lease-left-ms").integer;
  }
  int64_t CountOf(std::string_view owner) {
    return HoldOf(client_, "job", owner).Field("count").integer;
  }
};

// --- SHARED -----------------------------------------------------------------------------------

TEST_F(ModesTest, ReadersShareLockAndBlockWriters) {
  const int64_t alice = Must("alice", kShared, 40000);
  const int64_t bob = Must("bob", kShared, 50000);
  const int64_t carol = Must("carol", kShared, 30000);
  EXPECT_LT(alice, bob);
  EXPECT_LT(bob, carol);
  EXPECT_EQ(HoldersOf(client_, "job"), (Owners{"alice", "bob", "carol"}));
  EXPECT_EQ(ModeOf(client_, "job"), "shared");
  // Each has its own lease; the key has the longest.
  EXPECT_LE(LeaseLeft("alice"), 40000);
  EXPECT_GT(LeaseLeft("alice"), 30000);
  EXPECT_LE(LeaseLeft("carol"), 30000);
  EXPECT_GT(client_.Do("PTTL", "job").integer, 40000);
  // Nobody else can enter.
  EXPECT_EQ(Ask("writer", kExclusive), Reply::Nil());
  EXPECT_EQ(Ask("permit", Limit(100)), Reply::Nil());

  EXPECT_EQ(Release("bob"), Reply::Int(1));
  EXPECT_EQ(Release("bob"), Reply::Int(0));
  EXPECT_EQ(HoldersOf(client_, "job"), (Owners{"alice", "carol"}));
  EXPECT_LE(client_.Do("PTTL", "job").integer, 40000) << "the longest of those that are left";
  EXPECT_EQ(Release("alice"), Reply::Int(1));
  EXPECT_EQ(Ask("writer", kExclusive), Reply::Nil());
  EXPECT_EQ(Release("carol"), Reply::Int(1));
  EXPECT_EQ(client_.Do("EXISTS", "job"), Reply::Int(0));
  EXPECT_GT(Must("writer", kExclusive), carol);
}

TEST_F(ModesTest, NeitherReadersNorWritersStarve) {
  const int64_t first = Must("reader 1", kShared);
  Waiter writer = Wait("writer 1", kExclusive);
  EXPECT_EQ(Ask("reader 2", kShared), Reply::Nil()) << "a writer came first";
  EXPECT_EQ(Ask("reader 1", kShared), Reply::Int(first)) << "a reacquire is not a new arrival";
  Waiter second = Wait("reader 2", kShared);
  Waiter third = Wait("reader 3", kShared);
  Waiter last = Wait("writer 2", kExclusive);
  Waiter late = Wait("reader 4", kShared);
  EXPECT_EQ(LineOf(client_, "job"),
            (Owners{"writer 1", "reader 2", "reader 3", "writer 2", "reader 4"}));
  Release("reader 1");
  EXPECT_GT(writer.Read().integer, first);
  EXPECT_FALSE(second.HasReply());
  Release("writer 1");
  EXPECT_TRUE(second.Read().IsInteger());
  EXPECT_TRUE(third.Read().IsInteger());
  EXPECT_EQ(HoldersOf(client_, "job"), (Owners{"reader 2", "reader 3"}));
  EXPECT_EQ(LineOf(client_, "job"), (Owners{"writer 2", "reader 4"}));
  EXPECT_FALSE(late.HasReply()) << "not past the writer";
  Release("reader 2");
  EXPECT_EQ(LineOf(client_, "job"), (Owners{"writer 2", "reader 4"}));
  Release("reader 3");
  EXPECT_TRUE(last.Read().IsInteger());
  Release("writer 2");
  EXPECT_TRUE(late.Read().IsInteger());
}

// The writer enters when the last lease ends, and no earlier.
TEST_F(ModesTest, WriterWaitsForLastReadersLease) {
  Must("alice", kShared, 100);
  Must("bob", kShared, 1500);
  Must("carol", kShared, 200);
  const int64_t end = EndOf(client_, "job");
  Waiter writer = Wait("writer", kExclusive);
  EXPECT_TRUE(writer.Read().IsInteger());
  EXPECT_GE(EndOf(client_, "job") - kMinute, FirstFree(client_, end));
  EXPECT_EQ(HoldersOf(client_, "job"), Owners{"writer"});
}

// --- Upgrade ----------------------------------------------------------------------------------

TEST_F(ModesTest, OnlyReaderIsUpgradedAtOnce) {
  const int64_t shared = Must("alice", kShared);
  const int64_t exclusive = Must("alice", kExclusive, 30000);
  EXPECT_GT(exclusive, shared);
  EXPECT_EQ(Fence(shared), Reply::Int(0));
  EXPECT_EQ(Fence(exclusive), Reply::Int(1));
  EXPECT_EQ(ModeOf(client_, "job"), "exclusive");
  EXPECT_LE(LeaseLeft("alice"), 30000);
  EXPECT_EQ(Ask("bob", kShared), Reply::Nil());
  EXPECT_EQ(Release("alice"), Reply::Int(1));
  EXPECT_EQ(client_.Do("EXISTS", "job"), Reply::Int(0));
}

TEST_F(ModesTest, UpgradeIsServedBeforeWaitersItBlocks) {
  const int64_t alice = Must("alice", kShared, 50000);
  Must("bob", kShared);
  Waiter carol = Wait("carol", kExclusive);
  Waiter dave = Wait("dave", kShared);
  const Reply before = client_.Do("DEBUG", "DIGEST-VALUE", "job");
  Waiter upgrade = Wait("alice", kExclusive);
  EXPECT_EQ(LineOf(client_, "job"), (Owners{"alice", "carol", "dave"}));
  EXPECT_EQ(client_.Do("DEBUG", "DIGEST-VALUE", "job"), before) << "she holds what she held";
  EXPECT_EQ(Ask("alice", kShared, 50000), Reply::Int(alice)) << "and may ask again";
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", "alice", "PX", 40000), Reply::Int(1));
  Release("bob");
  const Reply token = upgrade.Read();
  EXPECT_GT(token.integer, alice) << token;
  EXPECT_EQ(ModeOf(client_, "job"), "exclusive");
  EXPECT_EQ(HoldersOf(client_, "job"), Owners{"alice"});
  EXPECT_EQ(Fence(alice), Reply::Int(0));
  EXPECT_EQ(LineOf(client_, "job"), (Owners{"carol", "dave"}));
  EXPECT_EQ(Release("alice"), Reply::Int(1));
  EXPECT_TRUE(carol.Read().IsInteger());
  Release("carol");
  EXPECT_TRUE(dave.Read().IsInteger());
}

TEST_F(ModesTest, TimedOutUpgradeKeepsSharedHold) {
  const int64_t alice = Must("alice", kShared);
  Must("bob", kShared);
  Waiter upgrade = Waiter::Asking(server(), Acquiring("job", "alice", {"WAIT", "1500"}));
  Waiter reader = Wait("reader", kShared);  // behind her, who waits to hold it alone
  EXPECT_EQ(LineOf(client_, "job"), (Owners{"alice", "reader"}));
  EXPECT_EQ(upgrade.Read(), Reply::Nil());
  EXPECT_TRUE(reader.Read().IsInteger());
  EXPECT_EQ(HoldersOf(client_, "job"), (Owners{"alice", "bob", "reader"}));
  EXPECT_EQ(Fence(alice), Reply::Int(1));
}

// Releasing the shared hold also cancels the upgrade.
TEST_F(ModesTest, ReleaseByUpgraderEndsItsWait) {
  Must("alice", kShared);
  Must("bob", kShared);
  Waiter carol = Wait("carol", kExclusive);
  Waiter upgrade = Wait("alice", kExclusive);
  EXPECT_EQ(Release("alice"), Reply::Int(1));
  EXPECT_TRUE(upgrade.Read().IsError("UNBLOCKED "));
  EXPECT_EQ(LineOf(client_, "job"), Owners{"carol"});
  Release("bob");
  EXPECT_TRUE(carol.Read().IsInteger());
}

// alice waits for an upgrade; bob releases, and around that time her waiting connection is killed.
// If she received a token she holds the lock exclusively under it, otherwise she is still a reader.
TEST_F(ModesTest, KilledUpgradeIsEitherGrantedOrStaysShared) {
  constexpr int kRounds = 150;
  const bool delivers_at_once = EngineOf(client_).starts_with("Redis 7.0.");
  for (const bool same_pass : {true, false}) {
    SCOPED_TRACE(same_pass ? "in the pass of the release" : "in the next pass");
    int delivered = 0;
    for (int i = 0; i < kRounds; i++) {
      const int64_t shared = Must("alice", {"SHARED", "REENTRANT"});
      Must("alice", {"SHARED", "REENTRANT"});
      Must("bob", kShared);
      RawWaiter upgrade(server());
      upgrade.connection.SendCommand(AcquireWaiting("job", "alice", {.lease_ms = 90000}));
      ASSERT_TRUE(Eventually([&] { return WaitingFor(client_, "job") == 1; }));
      Waiter reader(server());
      reader.Send(Acquiring("job", "reader", Waiting(kShared)));
      ASSERT_TRUE(Eventually([&] { return WaitingFor(client_, "job") == 2; }));
      const Command release = {"LOCK.RELEASE", "job", "bob"};
      const Command kill = {"CLIENT", "KILL", "ID", std::to_string(upgrade.id())};
      RawConnection driver = server().ConnectRaw();
      const Commands commands = same_pass ? Commands{release, kill} : InPasses({{release}, {kill}});
      for (const Reply& reply : DoAtOnce(driver, commands)) {
        ASSERT_FALSE(reply.IsError()) << reply;
      }
      Reply token = Reply::Nil();
      if (!upgrade.connection.Ends()) token = upgrade.connection.ReadReply();
      ASSERT_TRUE(token.IsNil() || token.integer > shared) << token;
      if (token.IsInteger()) {
        delivered++;
        ASSERT_EQ(ModeOf(client_, "job"), "exclusive");
        ASSERT_EQ(client_.Do("LOCK.FENCE", "job"), token);
        ASSERT_EQ(CountOf("alice"), 2);
        ASSERT_FALSE(reader.HasReply());
        ASSERT_TRUE(Release("alice") == Reply::Int(1) && Release("alice") == Reply::Int(1));
        ASSERT_TRUE(reader.Read().IsInteger());
      } else {
        ASSERT_TRUE(reader.Read().IsInteger()) << "round " << i;
        ASSERT_EQ(HoldersOf(client_, "job"), (Owners{"alice", "reader"}));
        ASSERT_EQ(Fence(shared), Reply::Int(1));
        ASSERT_LE(LeaseLeft("alice"), kMinute) << "not the lease that the upgrade asked for";
        ASSERT_EQ(CountOf("alice"), 2);
      }
      ASSERT_EQ(WaitersNow(client_), "0");
      client_.Do("DEL", "job");
    }
    std::cout << "killed " << (same_pass ? "in the same pass" : "in the next pass")
              << ": delivered " << delivered << " of " << kRounds << " upgrades\n";
    if (same_pass) {
      EXPECT_EQ(delivered, 0);
    } else {
      EXPECT_EQ(delivered == kRounds, delivers_at_once);
    }
  }
}

// --- Downgrade --------------------------------------------------------------------------------

TEST_F(ModesTest, DowngradeAdmitsWaitingReaders) {
  const int64_t alice = Must("alice", kExclusive);
  Waiter bob = Wait("bob", kShared);
  Waiter carol = Wait("carol", kShared);
  Waiter writer = Wait("writer", kExclusive);
  Waiter dave = Wait("dave", kShared);
  EXPECT_EQ(Ask("alice", kShared, 30000), Reply::Int(alice)) << "the same token";
  EXPECT_GT(bob.Read().integer, alice);
  EXPECT_GT(carol.Read().integer, alice);
  EXPECT_EQ(ModeOf(client_, "job"), "shared");
  EXPECT_EQ(HoldersOf(client_, "job"), (Owners{"alice", "bob", "carol"}));
  EXPECT_EQ(LineOf(client_, "job"), (Owners{"writer", "dave"}));
  EXPECT_EQ(Fence(alice), Reply::Int(1));
  EXPECT_LE(LeaseLeft("alice"), 30000) << "the lease that she asked for";
  EXPECT_FALSE(writer.HasReply());
}

// --- LIMIT ------------------------------------------------------------------------------------

TEST_F(ModesTest, LimitAdmitsThatManyHolders) {
  const int64_t alice = Must("alice", Limit(3), 30000);
  const int64_t bob = Must("bob", Limit(3), 50000);
  const int64_t carol = Must("carol", Limit(3), 40000);
  EXPECT_LT(alice, bob);
  EXPECT_LT(bob, carol);
  EXPECT_EQ(Ask("dave", Limit(3)), Reply::Nil());
  EXPECT_EQ(Ask("reader", kShared), Reply::Nil());
  EXPECT_EQ(Ask("writer", kExclusive), Reply::Nil());
  EXPECT_EQ(ModeOf(client_, "job"), "limit");
  EXPECT_EQ(HoldersOf(client_, "job"), (Owners{"alice", "bob", "carol"}));
  EXPECT_LE(LeaseLeft("alice"), 30000);
  EXPECT_GT(LeaseLeft("bob"), 40000);
  EXPECT_GT(client_.Do("PTTL", "job").integer, 40000);

  Waiter dave = Wait("dave", Limit(3));
  EXPECT_EQ(Release("bob"), Reply::Int(1));
  EXPECT_GT(dave.Read().integer, carol);
  EXPECT_EQ(HoldersOf(client_, "job"), (Owners{"alice", "carol", "dave"}));
  for (const char* owner : {"alice", "carol", "dave"}) EXPECT_EQ(Release(owner), Reply::Int(1));
  EXPECT_EQ(client_.Do("LOCK.INFO", "job"), Reply::Nil());
}

// Polls: refused in the last millisecond of the lease, granted in the next.
TEST_F(ModesTest, PermitIsFreeAfterItsLease) {
  for (const bool active_expiry : {true, false}) {
    client_.Do("DEBUG", "SET-ACTIVE-EXPIRE", active_expiry ? 1 : 0);
    for (int round = 0; round < 5; round++) {
      Must("alice", Limit(2), 20);
      const int64_t end = EndOf(client_, "job");
      Must("other", Limit(2), 30000);
      for (;;) {
        const int64_t before = ServerNow(client_);
        const Reply reply = Ask("bob", Limit(2));
        if (reply.IsInteger()) break;
        ASSERT_EQ(reply, Reply::Nil());
        ASSERT_LE(before, end) << "it should have been free";
      }
      // bob has the longest lease: the key ends with it.
      EXPECT_GT(EndOf(client_, "job") - kMinute, end) << "too early";
      EXPECT_EQ(HoldersOf(client_, "job"), (Owners{"other", "bob"}));
      client_.Do("DEL", "job");
    }
  }
  client_.Do("DEBUG", "SET-ACTIVE-EXPIRE", 1);
}

// The same for a waiter, without the server's own expiry.
TEST_F(ModesTest, WaiterGetsFreedPermitWhenLeaseEnds) {
  client_.Do("DEBUG", "SET-ACTIVE-EXPIRE", 0);
  Lateness lateness(client_);
  for (int round = 0; round < 9; round++) {
    Must("alice", Limit(2));
    Must("other", Limit(2), 30000);
    Waiter bob = Wait("bob", Limit(2));
    Waiter carol = Wait("carol", Limit(2));
    const int64_t end = ServerNow(client_) + 150;  // at the earliest
    EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", "alice", "PX", 150), Reply::Int(1));
    EXPECT_TRUE(bob.Read().IsInteger());
    const int64_t granted = EndOf(client_, "job") - kMinute;
    EXPECT_GT(granted, end) << "a hold lives through its last millisecond";
    lateness.Add(static_cast<double>(granted - end));
    EXPECT_FALSE(carol.HasReply());
    EXPECT_EQ(HoldersOf(client_, "job"), (Owners{"other", "bob"}));
    carol.Close();
    ASSERT_TRUE(Eventually([&] { return WaitersNow(client_) == "0"; }));
    client_.Do("DEL", "job");
  }
  client_.Do("DEBUG", "SET-ACTIVE-EXPIRE", 1);
  EXPECT_TRUE(lateness.IsLessThanCron("permits"));
}

// A newer call takes over the position of an older one, but is checked for deadlocks like a first
// call: with a limit of one it would wait for holders that wait for its owner.
TEST_F(ModesTest, NewerCallWithSmallerLimitIsCheckedForDeadlock) {
  MustAcquire(client_, "x", "alice");
  for (const char* owner : {"bob", "carol", "dave"}) Must(owner, Limit(3));
  Waiter bob = Wait("bob", kExclusive, "x");
  const Reply direct = Ask("alice", Waiting(Limit(1)));
  EXPECT_TRUE(direct.IsError("DEADLOCK ")) << direct;
  Waiter older = Wait("alice", Limit(3));  // carol and dave can make room
  const Reply newer = Ask("alice", {"LIMIT", "1", "WAIT", "100"});
  EXPECT_EQ(newer, direct);
  EXPECT_FALSE(older.HasReply()) << "what was refused has changed nothing";
  EXPECT_EQ(LineOf(client_, "job"), Owners{"alice"});
}

// --- REENTRANT --------------------------------------------------------------------------------

TEST_F(ModesTest, ReentrantHoldNeedsOneReleasePerAcquire) {
  const Command again = {"REENTRANT"};
  const int64_t token = Must("alice", again);
  EXPECT_EQ(CountOf("alice"), 1);
  EXPECT_EQ(Ask("alice", again), Reply::Int(token));
  EXPECT_EQ(Ask("alice", again, 50000), Reply::Int(token));
  EXPECT_EQ(CountOf("alice"), 3);
  EXPECT_LE(LeaseLeft("alice"), 50000) << "each call restarts the lease";
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", "alice", "PX", 40000), Reply::Int(1));
  EXPECT_EQ(CountOf("alice"), 3);
  EXPECT_EQ(Ask("alice", kExclusive), Reply::Int(token));
  EXPECT_EQ(CountOf("alice"), 3) << "without REENTRANT it is a retry";
  Waiter bob = Wait("bob", again);
  EXPECT_EQ(Ask("alice", again), Reply::Int(token));
  for (const int64_t left : {3, 2, 1}) {
    EXPECT_EQ(Release("alice"), Reply::Int(1));
    EXPECT_EQ(CountOf("alice"), left);
    EXPECT_EQ(client_.Do("LOCK.FENCE", "job"), Reply::Int(token));
    EXPECT_FALSE(bob.HasReply());
  }
  EXPECT_EQ(Release("alice"), Reply::Int(1));
  EXPECT_TRUE(bob.Read().IsInteger());
  EXPECT_EQ(Release("alice"), Reply::Int(0));
  EXPECT_EQ(CountOf("bob"), 1);
}

// --- LOCK.INFO --------------------------------------------------------------------------------

// All fields of holders and waiters, in both versions of the protocol.
TEST_F(ModesTest, InfoShowsHoldersAndWaitersOfEveryMode) {
  struct Case {
    std::string mode;
    Command options;
    Owners owners;
  };
  const std::vector<Case> cases = {{"exclusive", kExclusive, {"alice"}},
                                   {"shared", kShared, {"alice", "bob", "carol"}},
                                   {"limit", Limit(3), {"alice", "bob", "carol"}}};
  for (const Case& held : cases) {
    for (const Case& waits : cases) {
      SCOPED_TRACE("held " + held.mode + ", waits " + waits.mode);
      StartAfresh();
      Waiter holder(server());
      std::vector<int64_t> tokens;
      for (const std::string& owner : held.owners) {
        Command options = held.options;
        options.insert(options.end(), {"LINGER", "77", "SESSION"});
        if (held.mode != "limit") options.emplace_back("REENTRANT");
        tokens.push_back(MustObtain(holder, Acquiring("job", owner, options)));
        if (held.mode != "limit") MustObtain(holder, Acquiring("job", owner, options));
      }
      Waiter writer = Wait("writer", kExclusive);  // so that readers and permits wait too
      Waiter waiter = Wait("waiter", waits.options);
      for (const int version : {2, 3}) {
        RawConnection raw = server().ConnectRaw();
        raw.Hello(version);
        const Reply info = raw.Do("LOCK.INFO", "job");
        const auto map = [version](std::vector<Reply> fields) {
          return version == 3 ? Reply::Map(std::move(fields)) : Reply::Array(std::move(fields));
        };
        // Fields that change with time are checked against bounds and then taken from the reply.
        const auto moving = [](const Reply& from, const char* field, int64_t least, int64_t most) {
          EXPECT_GE(from.Field(field).integer, least) << field;
          EXPECT_LE(from.Field(field).integer, most) << field;
          return from.Field(field);
        };
        std::vector<Reply> holders;
        ASSERT_EQ(info.Field("holders").elements.size(), held.owners.size()) << info;
        for (size_t i = 0; i < held.owners.size(); i++) {
          const Reply shown = info.Field("holders").elements[i];
          // clang-format off
          holders.push_back(map({
              Reply::Str("owner"), Reply::Str(held.owners[i]),
              Reply::Str("token"), Reply::Int(tokens[i]),
              Reply::Str("tag"), Reply::Nil(),
              Reply::Str("lease-left-ms"), moving(shown, "lease-left-ms", 50000, kMinute),
              Reply::Str("held-ms"), moving(shown, "held-ms", 0, 10000),
              Reply::Str("count"), Reply::Int(held.mode == "limit" ? 1 : 2),
              Reply::Str("weight"), Reply::Int(1),
              Reply::Str("session"), version == 3 ? Reply::Bool(true) : Reply::Int(1),
              Reply::Str("linger-ms"), Reply::Int(77),
              Reply::Str("max-hold-left-ms"), Reply::Nil(),
              Reply::Str("client-id"), Reply::Int(holder.id()),
              Reply::Str("client-addr"), Reply::Str(AddressOf(client_, holder.id()))}));
          // clang-format on
        }
        std::vector<Reply> line;
        ASSERT_EQ(info.Field("waiters").elements.size(), 2U) << info;
        for (const auto& [owner, mode, id] :
             {std::tuple<std::string, std::string, int64_t>{"writer", "exclusive", writer.id()},
              {"waiter", waits.mode, waiter.id()}}) {
          const Reply shown = info.Field("waiters").elements[line.size()];
          // clang-format off
          line.push_back(map({
              Reply::Str("owner"), Reply::Str(owner),
              Reply::Str("tag"), Reply::Nil(),
              Reply::Str("mode"), Reply::Str(mode),
              Reply::Str("waited-ms"), moving(shown, "waited-ms", 0, 10000),
              Reply::Str("left-ms"), moving(shown, "left-ms", 50000, kMinute + 1),
              Reply::Str("client-id"), Reply::Int(id),
              Reply::Str("client-addr"), Reply::Str(AddressOf(client_, id))}));
          // clang-format on
        }
        // clang-format off
        EXPECT_EQ(info, map({
            Reply::Str("mode"), Reply::Str(held.mode),
            Reply::Str("holding"), Reply::Int(static_cast<int64_t>(holders.size())),
            Reply::Str("holders"), Reply::Array(holders),
            Reply::Str("linger-left-ms"), Reply::Int(0),
            Reply::Str("waiting"), Reply::Int(2),
            Reply::Str("waiters"), Reply::Array(line),
            Reply::Str("grace-left-ms"), Reply::Int(0)}));
        // clang-format on
      }
    }
  }
}

TEST_F(ModesTest, InfoShowsFirst100Holders) {
  constexpr int64_t kHolders = 150;
  std::vector<std::string> owners;
  for (int64_t i = 0; i < kHolders; i++) {
    owners.push_back("owner " + std::to_string(i));
    Must(owners.back(), kShared);
  }
  EXPECT_EQ(client_.Do("LOCK.INFO", "job").Field("holding"), Reply::Int(kHolders));
  EXPECT_EQ(HoldersOf(client_, "job"), std::vector(owners.begin(), owners.begin() + 100));
  // A holder in front leaves: the 101st appears.
  EXPECT_EQ(Release(owners[7]), Reply::Int(1));
  owners.erase(owners.begin() + 7);
  EXPECT_EQ(client_.Do("LOCK.INFO", "job").Field("holding"), Reply::Int(kHolders - 1));
  EXPECT_EQ(HoldersOf(client_, "job"), std::vector(owners.begin(), owners.begin() + 100));
}

// An ended hold that lingers blocks others, but its owner is not a holder.
TEST_F(ModesTest, InfoDoesNotCountLingeringHolds) {
  MustObtain(client_, Acquiring("job", "lingers", {"SHARED", "LINGER", "60000"}, 1));
  Must("holds", kShared);
  EXPECT_TRUE(Eventually([&] { return HoldersOf(client_, "job").size() == 1; }));
  const Reply info = client_.Do("LOCK.INFO", "job");
  EXPECT_EQ(info.Field("holding"), Reply::Int(1));
  EXPECT_GT(info.Field("linger-left-ms").integer, 0);
  EXPECT_EQ(HoldersOf(client_, "job"), std::vector<std::string>{"holds"});
}

// There is no holder and the first waiter has not been served yet: INFO shows its mode.
TEST_F(ModesTest, InfoShowsModeOfFirstWaiterBeforeGrant) {
  Must("alice", kExclusive);
  Waiter bob = Wait("bob", kShared);
  RawConnection raw = server().ConnectRaw();
  const Reply info = DoAtOnce(raw, {{"LOCK.RELEASE", "job", "alice"}, {"LOCK.INFO", "job"}})[1];
  EXPECT_EQ(info.Field("mode"), Reply::Str("shared"));
  EXPECT_EQ(info.Field("holders"), Reply::Array({}));
  EXPECT_TRUE(bob.Read().IsInteger());
}

// --- A resource that detects violations -------------------------------------------------------
//
// Many clients use a few locks in all modes. A client that received a token enters, and leaves
// before it releases the lock. The clients inside must be compatible at all times.

class Resource {
 public:
  enum class As { kWriter, kReader, kPermit };

  explicit Resource(uint64_t permits) : permits_(permits) {}

  // False if an incompatible client is inside.
  bool Enter(As as) {
    const uint64_t now = inside_.fetch_add(One(as)) + One(as);
    return IsAllowed(now);
  }
  void Leave(As as) { inside_.fetch_sub(One(as)); }
  // The same client in another role: an upgrade or a downgrade.
  bool Become(As from, As to) {
    const uint64_t change = One(to) - One(from);
    return IsAllowed(inside_.fetch_add(change) + change);
  }
  uint64_t permits() const { return permits_; }
  bool empty() const { return inside_ == 0; }

 private:
  static uint64_t One(As as) { return uint64_t{1} << (20 * static_cast<int>(as)); }
  bool IsAllowed(uint64_t inside) const {
    const auto count = [inside](As as) { return (inside / One(as)) % (1 << 20); };
    const uint64_t writers = count(As::kWriter);
    const uint64_t readers = count(As::kReader);
    const uint64_t permits = count(As::kPermit);
    if (writers > 0) return writers == 1 && readers == 0 && permits == 0;
    return (readers == 0 || permits == 0) && permits <= permits_;
  }

  uint64_t permits_;
  std::atomic<uint64_t> inside_ = 0;
};

TEST_F(ModesTest, NoIncompatibleHoldersUnderLoad) {
  using As = Resource::As;
  constexpr size_t kClients = 12;
  constexpr size_t kKeys = 3;
  constexpr Milliseconds kFor{2000};
  const std::vector<std::string> names = {"a", "b", "c"};
  std::array<Resource, kKeys> resources = {Resource(1), Resource(2), Resource(3)};
  std::atomic<bool> failed = false;
  enum What { kWrites, kReads, kPermits, kUpgrades, kDowngrades, kSets, kSessions, kNulls, kWhats };
  std::array<std::atomic<int>, kWhats> done{};
  const auto deadline = Clock::now() + kFor;

  const auto work = [&](size_t me) {
    std::mt19937 random(static_cast<uint32_t>(me));
    auto connection = std::make_unique<Client>(server().port());
    const auto fail = [&](const std::string& owner, const char* what) {
      ADD_FAILURE() << owner << ": " << what;
      failed = true;
    };
    for (int round = 0; !failed && Clock::now() < deadline; round++) {
      const std::string owner = std::to_string(me) + "." + std::to_string(round);
      // Some of the keys, in any order.
      std::vector<size_t> keys = {0, 1, 2};
      std::shuffle(keys.begin(), keys.end(), random);
      const size_t more = random() % 4 == 0 ? 1 + random() % 2 : 0;
      keys.resize(1 + more);
      const auto mode = static_cast<As>(random() % 3);
      Command options;
      if (mode == As::kReader) options = kShared;
      if (mode == As::kPermit) {
        // What every key of the set allows.
        uint64_t permits = resources.at(keys[0]).permits();
        for (const size_t key : keys) permits = std::min(permits, resources.at(key).permits());
        options = Limit(static_cast<int>(permits));
      }
      if (random() % 8 != 0) options.insert(options.end(), {"WAIT", "20000"});
      bool session = random() % 8 == 0;
      if (session) options.emplace_back("SESSION");
      Command also;
      if (more > 0) {
        also = {"ALSO", std::to_string(more)};
        for (size_t i = 1; i < keys.size(); i++) also.push_back(names[keys[i]]);
      }
      Command acquire = Acquiring(names[keys[0]], owner, options);
      acquire.insert(acquire.end(), also.begin(), also.end());
      Command release = {"LOCK.RELEASE", names[keys[0]], owner};
      release.insert(release.end(), also.begin(), also.end());

      const Reply reply = connection->Do(acquire);
      if (reply.IsNil()) {
        done.at(kNulls)++;
        if (connection->Do(release) != Reply::Int(0)) fail(owner, "null, but something was taken");
        continue;
      }
      if (!reply.IsInteger()) {
        fail(owner, reply.text.c_str());
        break;
      }
      As as = mode;
      for (const size_t key : keys) {
        if (!resources.at(key).Enter(as)) fail(owner, "entered beside somebody");
      }
      done.at(mode == As::kWriter ? kWrites : mode == As::kReader ? kReads : kPermits)++;
      if (more > 0) done.at(kSets)++;
      if (more == 0 && as == As::kReader && random() % 4 == 0) {
        const Reply upgraded = connection->Do(Acquiring(names[keys[0]], owner, {"WAIT", "20000"}));
        if (upgraded.IsInteger()) {
          done.at(kUpgrades)++;
          session = false;
          as = As::kWriter;
          if (!resources.at(keys[0]).Become(As::kReader, as)) fail(owner, "upgraded among others");
        } else if (!upgraded.IsError("DEADLOCK ")) {
          fail(owner, "neither upgraded nor refused with an error");
        }
      }
      if (as == As::kWriter && random() % 4 == 0) {
        as = As::kReader;
        for (const size_t key : keys) resources.at(key).Become(As::kWriter, as);
        Command downgrade = Acquiring(names[keys[0]], owner, kShared);
        downgrade.insert(downgrade.end(), also.begin(), also.end());
        if (!connection->Do(downgrade).IsInteger()) fail(owner, "not downgraded");
        done.at(kDowngrades)++;
        session = false;
      } else if (random() % 2 == 0) {
        connection->Do("PING");  // holds the lock for a while
      }
      for (const size_t key : keys) resources.at(key).Leave(as);
      if (session && random() % 2 == 0) {
        done.at(kSessions)++;
        connection = std::make_unique<Client>(server().port());  // closes the old one
        continue;
      }
      if (connection->Do(release) != Reply::Int(static_cast<int64_t>(keys.size()))) {
        fail(owner, "could not release all that it had");
      }
    }
  };
  std::vector<std::thread> threads;
  for (size_t i = 0; i < kClients; i++) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
  std::cout << done.at(kWrites) << " writes, " << done.at(kReads) << " reads, " << done.at(kPermits)
            << " permits, " << done.at(kSets) << " sets, " << done.at(kUpgrades) << " upgrades, "
            << done.at(kDowngrades) << " downgrades, " << done.at(kSessions) << " closed sessions, "
            << done.at(kNulls) << " nulls\n";
  for (const std::atomic<int>& count : done) EXPECT_GT(count, 0);
  for (const Resource& resource : resources) EXPECT_TRUE(resource.empty());
  EXPECT_EQ(WaitersNow(client_), "0");
  EXPECT_TRUE(Eventually([&] { return client_.Do("DBSIZE") == Reply::Int(0); }));
}

}  // namespace
}  // namespace turnstile::testing
