// ALSO: all of several locks under one token, or none. Its effect in each mode is decided, and
// tested, in the core.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/replication_stream.h"
#include "support/resp3.h"
#include "support/server.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

using Owners = std::vector<std::string>;
using Names = std::vector<std::string>;

// ALSO and all names but the first.
Command Also(const Names& names) {
  Command also = {"ALSO", std::to_string(names.size() - 1)};
  also.insert(also.end(), names.begin() + 1, names.end());
  return also;
}

// ACQUIRE of all `names` for a minute.
Command AcquiringAll(const Names& names, std::string_view owner, Command options = {}) {
  const Command also = Also(names);
  options.insert(options.end(), also.begin(), also.end());
  return Acquiring(names[0], owner, options);
}

Command WaitingForAll(const Names& names, std::string_view owner, Command options = {}) {
  options.insert(options.end(), {"WAIT", std::to_string(kMinute)});
  return AcquiringAll(names, owner, std::move(options));
}

Command ReleasingAll(const Names& names, std::string_view owner) {
  Command command = {"LOCK.RELEASE", names[0], std::string(owner)};
  const Command also = Also(names);
  command.insert(command.end(), also.begin(), also.end());
  return command;
}

class AlsoTest : public SharedWaitingTest<AlsoTest> {
 protected:
  Reply Release(std::string_view key, std::string_view owner) {
    return client_.Do("LOCK.RELEASE", key, owner);
  }
  Waiter WaitForAll(const Names& names, std::string_view owner, Command options = {}) {
    return Waiter::Asking(server(), WaitingForAll(names, owner, std::move(options)));
  }

  // `owner` holds all the locks, alone, under this token.
  void ExpectHeld(const Names& names, const std::string& owner, const Reply& token) {
    for (const std::string& name : names) {
      EXPECT_EQ(HoldersOf(client_, name), Owners{owner}) << name;
      EXPECT_EQ(client_.Do("LOCK.FENCE", name), token) << name;
    }
  }
};

// --- All or nothing ---------------------------------------------------------------------------

TEST_F(AlsoTest, GrantsAllLocksUnderOneToken) {
  const int64_t token = MustObtain(client_, AcquiringAll({"a", "b", "c"}, "alice"));
  ExpectHeld({"a", "b", "c"}, "alice", Reply::Int(token));
  for (const char* key : {"a", "b", "c"}) {
    EXPECT_EQ(client_.Do("LOCK.FENCE", key, token), Reply::Int(1));
    EXPECT_EQ(EndOf(client_, key), EndOf(client_, "a"));
    EXPECT_EQ(client_.Do(Acquiring(key, "bob", {})), Reply::Nil());
  }
  EXPECT_EQ(client_.Do(ReleasingAll({"b", "c", "a"}, "alice")), Reply::Int(3)) << "in any order";
  EXPECT_EQ(client_.Do("DBSIZE"), Reply::Int(0));
  EXPECT_GT(MustAcquire(client_, "b", "bob"), token);
}

TEST_F(AlsoTest, Accepts64AdditionalKeys) {
  Names names;
  for (int i = 0; i < 65; i++) names.push_back("k" + std::to_string(i));
  const int64_t token = MustObtain(client_, AcquiringAll(names, "alice"));
  ExpectHeld(names, "alice", Reply::Int(token));
  EXPECT_EQ(client_.Do(AcquiringAll(names, "alice")), Reply::Int(token));
  Waiter bob = WaitForAll(names, "bob");
  EXPECT_EQ(WaitingFor(client_, "k64"), 1);
  EXPECT_EQ(client_.Do(ReleasingAll(names, "alice")), Reply::Int(65));
  const Reply next = bob.Read();
  ExpectHeld(names, "bob", next);
  EXPECT_EQ(client_.Do(ReleasingAll(names, "bob")), Reply::Int(65));
  names.emplace_back("k65");
  for (const Command& command : {AcquiringAll(names, "alice"), ReleasingAll(names, "alice")}) {
    EXPECT_EQ(client_.Do(command),
              Reply::Error("ERR ALSO must be an integer from 1 to 64 in plain digits, not "
                           "\"65\""));
  }
  EXPECT_EQ(client_.Do("DBSIZE"), Reply::Int(0));
}

// --- Releasing and touching, names and keys ---------------------------------------------------

TEST_F(AlsoTest, ReleaseAndTouchReturnNumberOfLocks) {
  MustObtain(client_, AcquiringAll({"a", "b"}, "alice"));
  MustAcquire(client_, "c", "alice");  // under another token
  MustAcquire(client_, "d", "bob");
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "a", "alice", "PX", 30000, "ALSO", 3, "c", "d", "free"),
            Reply::Int(2));
  EXPECT_LE(client_.Do("PTTL", "a").integer, 30000);
  EXPECT_GT(client_.Do("PTTL", "b").integer, 30000) << "was not named";
  EXPECT_LE(client_.Do("PTTL", "c").integer, 30000);
  EXPECT_GT(client_.Do("PTTL", "d").integer, 30000) << "is not hers";
  EXPECT_EQ(client_.Do("lock.touch", "a", "alice", "also", 1, "b", "ex", 20), Reply::Int(2));
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "d", "alice", "ALSO", 3, "c", "free", "a"), Reply::Int(2));
  EXPECT_EQ(client_.Do("KEYS", "*").elements.size(), 2U);
  EXPECT_EQ(HoldersOf(client_, "b"), Owners{"alice"});
  EXPECT_EQ(HoldersOf(client_, "d"), Owners{"bob"});
  EXPECT_EQ(client_.Do("LOCK.RELEASE", "a", "alice", "ALSO", 1, "c"), Reply::Int(0));
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "a", "alice", "PX", 1, "ALSO", 1, "c"), Reply::Int(0));
}

// Keys and owners may have the names of options, and any bytes.
TEST_F(AlsoTest, KeysAndOwnersMayLookLikeOptions) {
  const std::string bytes("\0\r\n*3\xff", 6);
  const Names names = {"ALSO", "PX", bytes, "", "2", "WAIT"};
  const int64_t token = MustObtain(client_, AcquiringAll(names, "ALSO"));
  ExpectHeld(names, "ALSO", Reply::Int(token));
  EXPECT_EQ(
      client_.Do("COMMAND", "GETKEYS", "LOCK.RELEASE", "ALSO", "ALSO", "ALSO", "1", "PX").Texts(),
      (Names{"ALSO", "PX"}));
  EXPECT_EQ(client_.Do(ReleasingAll(names, "ALSO")), Reply::Int(6));
}

TEST_F(AlsoTest, CommandGetKeysReportsAllKeys) {
  const auto keys = [this](const Command& command) {
    Command getkeys = {"COMMAND", "GETKEYS"};
    getkeys.insert(getkeys.end(), command.begin(), command.end());
    return client_.Do(getkeys).Texts();
  };
  EXPECT_EQ(keys({"LOCK.ACQUIRE", "a", "me", "PX", "1", "ALSO", "2", "b", "c", "SHARED"}),
            (Names{"a", "b", "c"}));
  EXPECT_EQ(keys({"LOCK.ACQUIRE", "a", "me", "also", "1", "b", "PX", "1"}), (Names{"a", "b"}));
  EXPECT_EQ(keys({"LOCK.ACQUIRE", "a", "me", "PX", "1"}), Names{"a"});
  EXPECT_EQ(keys({"LOCK.RELEASE", "a", "me", "ALSO", "1", "b"}), (Names{"a", "b"}));
  EXPECT_EQ(keys({"LOCK.TOUCH", "a", "me", "PX", "1", "ALSO", "1", "b"}), (Names{"a", "b"}));
  EXPECT_EQ(keys({"LOCK.RELEASE", "a", "ALSO"}), Names{"a"}) << "an owner of that name";
  for (const char* name : {"LOCK.ACQUIRE", "LOCK.RELEASE", "LOCK.TOUCH"}) {
    const Names flags = client_.Do("COMMAND", "INFO", name).elements[0].elements[2].Texts();
    EXPECT_EQ(std::count(flags.begin(), flags.end(), "movablekeys"), 1) << name;
  }
}

// --- Waiting ----------------------------------------------------------------------------------

TEST_F(AlsoTest, HoldsNothingWhileItWaits) {
  MustAcquire(client_, "a", "zoe");
  MustAcquire(client_, "b", "yan");
  Waiter alice = WaitForAll({"a", "b", "c"}, "alice");
  for (const char* key : {"a", "b", "c"}) EXPECT_EQ(LineOf(client_, key), Owners{"alice"}) << key;
  EXPECT_EQ(client_.Do("EXISTS", "c"), Reply::Int(0));
  EXPECT_EQ(WaitersNow(client_), "1") << "one client, in three queues";
  Release("a", "zoe");
  EXPECT_EQ(client_.Do("EXISTS", "a"), Reply::Int(0));
  EXPECT_FALSE(alice.HasReply());
  // A later request does not get a free lock of the set.
  for (const char* key : {"a", "c"}) {
    EXPECT_EQ(client_.Do(Acquiring(key, "mallory", {})), Reply::Nil()) << key;
  }
  Waiter mallory(server(), "a", "mallory");
  EXPECT_EQ(LineOf(client_, "a"), (Owners{"alice", "mallory"}));
  Release("b", "yan");
  const Reply token = alice.Read();
  ASSERT_TRUE(token.IsInteger()) << token;
  ExpectHeld({"a", "b", "c"}, "alice", token);
  EXPECT_FALSE(mallory.HasReply());
  EXPECT_EQ(client_.Do(ReleasingAll({"a", "b", "c"}, "alice")), Reply::Int(3));
  EXPECT_TRUE(mallory.Read().IsInteger());
}

// The waiters behind it are served when it leaves.
TEST_F(AlsoTest, WaitersBehindAreServedWhenItLeaves) {
  for (const char* how : {"time-out", "close", "unblock"}) {
    SCOPED_TRACE(how);
    StartAfresh();
    MustAcquire(client_, "a", "zoe");
    Waiter alice = Waiter::Asking(
        server(), AcquiringAll({"a", "b", "c"}, "alice",
                               {"WAIT", how == std::string("time-out") ? "2500" : "60000"}));
    Waiter bob(server(), "b", "bob");
    Waiter carol(server(), "c", "carol");
    if (how == std::string("close")) {
      alice.Close();
    } else if (how == std::string("unblock")) {
      client_.Do("CLIENT", "UNBLOCK", alice.id());
    }
    EXPECT_TRUE(bob.Read().IsInteger());
    EXPECT_TRUE(carol.Read().IsInteger());
    if (how != std::string("close")) {
      EXPECT_EQ(alice.Read(), Reply::Nil());
    }
    EXPECT_EQ(LineOf(client_, "a"), Owners{});
  }
}

// The same under load: many clients that want one key each, and one that wants all of them.
TEST_F(AlsoTest, NobodyStarvesUnderLoad) {
  const Names names = {"a", "b", "c"};
  std::vector<RawConnection> singles;
  for (size_t i = 0; i < 6; i++) singles.push_back(server().ConnectRaw());
  RawConnection all = server().ConnectRaw();
  const auto key = [&](size_t i) { return names[i % 3]; };
  const auto owner = [](size_t i) { return "single " + std::to_string(i); };
  for (size_t i = 0; i < singles.size(); i++) {
    singles[i].SendCommand(AcquireWaiting(key(i), owner(i)));
  }
  all.SendCommand(WaitingForAll(names, "all"));
  int sets = 0;
  int since = 0;
  int most = 0;
  const auto deadline = Clock::now() + Milliseconds{20000};
  while (sets < 100 && Clock::now() < deadline) {
    for (size_t i = 0; i < singles.size(); i++) {
      if (!singles[i].Readable()) continue;
      ASSERT_TRUE(singles[i].ReadReply().IsInteger());
      since++;
      ASSERT_EQ(singles[i].Do("LOCK.RELEASE", key(i), owner(i)), Reply::Int(1));
      singles[i].SendCommand(AcquireWaiting(key(i), owner(i)));
    }
    if (!all.Readable()) continue;
    const Reply token = all.ReadReply();
    ASSERT_TRUE(token.IsInteger()) << token;
    for (const std::string& name : names) ASSERT_EQ(client_.Do("LOCK.FENCE", name), token);
    ASSERT_EQ(all.Do(ReleasingAll(names, "all")), Reply::Int(3));
    most = std::max(most, since);
    since = 0;
    sets++;
    all.SendCommand(WaitingForAll(names, "all"));
  }
  EXPECT_EQ(sets, 100);
  EXPECT_LE(most, 12) << "each single at most twice between two sets";
}

TEST_F(AlsoTest, IsGrantedWhenAllLeasesHaveEnded) {
  MustAcquire(client_, "a", "zoe", 1500);
  const int64_t first = EndOf(client_, "a");
  MustAcquire(client_, "b", "yan", 2000);
  const int64_t second = EndOf(client_, "b");
  Waiter alice = WaitForAll({"a", "b"}, "alice");
  const Reply token = alice.Read();
  ASSERT_TRUE(token.IsInteger()) << token;
  ExpectHeld({"a", "b"}, "alice", token);
  EXPECT_GT(EndOf(client_, "a") - kMinute, std::max(first, second));
}

// --- The same owner ---------------------------------------------------------------------------

TEST_F(AlsoTest, NewerCallTakesOverOnlyForSameLocksAndMode) {
  MustAcquire(client_, "b", "zoe");
  Waiter older = WaitForAll({"a", "b"}, "alice");
  Waiter bob = WaitForAll({"b", "c"}, "bob");
  // The same locks in another order: the newer call takes over the positions.
  Waiter same = WaitForAll({"b", "a"}, "alice");
  EXPECT_TRUE(older.Read().IsError("UNBLOCKED "));
  EXPECT_EQ(LineOf(client_, "b"), (Owners{"alice", "bob"}));
  // Overlapping locks: it goes to the end.
  Waiter overlapping = WaitForAll({"b", "c", "d"}, "alice");
  EXPECT_TRUE(same.Read().IsError("UNBLOCKED "));
  EXPECT_EQ(LineOf(client_, "b"), (Owners{"bob", "alice"}));
  EXPECT_EQ(LineOf(client_, "a"), Owners{});
  EXPECT_EQ(LineOf(client_, "d"), Owners{"alice"});
  // Another mode: likewise.
  Waiter carol(server(), "d", "carol");
  Waiter shared = WaitForAll({"b", "c", "d"}, "alice", {"SHARED"});
  EXPECT_TRUE(overlapping.Read().IsError("UNBLOCKED "));
  EXPECT_TRUE(carol.Read().IsInteger()) << "d was free";
  EXPECT_EQ(WaitersNow(client_), "2");
  // One that names fewer locks, and differs from two waits at once.
  MustAcquire(client_, "e", "zoe");
  Waiter elsewhere(server(), "e", "alice");
  Waiter both = WaitForAll({"e", "b"}, "alice");
  EXPECT_TRUE(shared.Read().IsError("UNBLOCKED "));
  EXPECT_TRUE(elsewhere.Read().IsError("UNBLOCKED "));
  Release("b", "zoe");
  EXPECT_TRUE(bob.Read().IsInteger());
  client_.Do(ReleasingAll({"b", "c"}, "bob"));
  EXPECT_FALSE(both.HasReply());
  Release("e", "zoe");
  EXPECT_TRUE(both.Read().IsInteger());
}

// The older call is in every queue in which the newer one looks for what blocks it.
TEST_F(AlsoTest, RetryIsGrantedWhenBlockingLockIsReleased) {
  for (const Names& order : {Names{"a", "b"}, Names{"b", "a"}}) {
    MustAcquire(client_, "b", "zoe");
    Waiter older = WaitForAll({"a", "b"}, "alice");
    Waiter newer = WaitForAll(order, "alice");
    EXPECT_TRUE(older.Read().IsError("UNBLOCKED "));
    Release("b", "zoe");
    EXPECT_TRUE(newer.Read().IsInteger());
    EXPECT_EQ(client_.Do(ReleasingAll({"a", "b"}, "alice")), Reply::Int(2));
  }
}

// While it waits for all, the owner acquires one of them by another call. Neither the error nor the
// grant may be sent twice.
TEST_F(AlsoTest, OwnerAcquiringOneLockSeparatelyEndsWaitOnce) {
  MustAcquire(client_, "a", "zoe");
  Waiter alice = WaitForAll({"a", "b"}, "alice");
  EXPECT_EQ(client_.Do(Acquiring("b", "alice", {})), Reply::Nil()) << "her own position is ahead";
  MustAcquire(client_, "x", "alice");
  EXPECT_EQ(client_.Do("RENAME", "x", "b"), Reply::Ok());
  EXPECT_FALSE(alice.HasReply()) << "zoe still has her wait";
  Release("a", "zoe");
  const Reply reply = alice.Read();
  EXPECT_TRUE(reply.IsError("ERR this owner holds some of these locks")) << reply;
  EXPECT_EQ(WaitersNow(client_), "0");
}

// --- Deadlocks --------------------------------------------------------------------------------

TEST_F(AlsoTest, DetectsDeadlockOfTwoSets) {
  MustObtain(client_, AcquiringAll({"a", "b"}, "alice"));
  MustObtain(client_, AcquiringAll({"c", "d"}, "bob"));
  Waiter alice = WaitForAll({"x", "d"}, "alice");
  EXPECT_EQ(client_.Do(WaitingForAll({"y", "b"}, "bob")),
            Reply::Error("DEADLOCK waiting for \"b\" would close the cycle bob -> \"b\" -> alice "
                         "-> \"d\" -> bob"));
  EXPECT_EQ(client_.Do(AcquiringAll({"y", "b"}, "bob")), Reply::Nil())
      << "a single try does not wait";
  EXPECT_EQ(LineOf(client_, "y"), Owners{});
  EXPECT_EQ(LineOf(client_, "b"), Owners{});
  EXPECT_EQ(client_.Do(ReleasingAll({"c", "d"}, "bob")), Reply::Int(2));
  EXPECT_TRUE(alice.Read().IsInteger());
}

// --- Other keys -------------------------------------------------------------------------------

TEST_F(AlsoTest, PlainLocksCanBePartOfSet) {
  client_.Do("SET", "b", "plain");
  EXPECT_EQ(client_.Do(AcquiringAll({"a", "b"}, "alice")), Reply::Nil());
  EXPECT_EQ(client_.Do("EXISTS", "a"), Reply::Int(0));
  Waiter alice = WaitForAll({"a", "b"}, "alice");
  EXPECT_EQ(client_.Do("SET", "b", "plain", "PX", 30), Reply::Ok());
  Reply token = alice.Read();
  ASSERT_TRUE(token.IsInteger()) << token;
  ExpectHeld({"a", "b"}, "alice", token);
  client_.Do(ReleasingAll({"a", "b"}, "alice"));

  // Her own value in some of them, in all of them, and next to a lock of hers.
  client_.Do("SET", "b", "alice");
  EXPECT_TRUE(client_.Do(AcquiringAll({"a", "b"}, "alice")).IsError("ERR this owner holds some"));
  EXPECT_EQ(client_.Do("TYPE", "b"), Reply::Status("string"));
  MustAcquire(client_, "a", "alice");
  EXPECT_TRUE(
      client_.Do(AcquiringAll({"a", "b"}, "alice")).IsError("ERR this owner holds these locks"));
  client_.Do("SET", "a", "alice");
  token = client_.Do(AcquiringAll({"a", "b"}, "alice"));
  ExpectHeld({"a", "b"}, "alice", token);

  // RELEASE and TOUCH work on both kinds.
  client_.Do("SET", "c", "alice");
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "c", "alice", "PX", 20000, "ALSO", 1, "a"), Reply::Int(2));
  EXPECT_LE(client_.Do("PTTL", "c").integer, 20000);
  EXPECT_EQ(client_.Do(ReleasingAll({"a", "c", "b"}, "alice")), Reply::Int(3));
  EXPECT_EQ(client_.Do("DBSIZE"), Reply::Int(0));
}

TEST_F(AlsoTest, OneKeyOfOtherTypeRefusesRequest) {
  client_.Do("RPUSH", "list", "x");
  MustAcquire(client_, "mine", "alice");
  const Reply before = client_.Do("DEBUG", "DIGEST");
  for (const Names& names : {Names{"a", "list"}, {"list", "a"}, {"mine", "a", "list"}}) {
    for (const Command& command :
         {AcquiringAll(names, "alice"), WaitingForAll(names, "alice"), ReleasingAll(names, "alice"),
          Command{"LOCK.TOUCH", names[0], "alice", "PX", "1", "ALSO", "1", names[1]}}) {
      if (command[0] == "LOCK.TOUCH" && names.size() == 3) continue;  // names no list
      const Reply reply = client_.Do(command);
      EXPECT_TRUE(reply.IsError("WRONGTYPE ")) << command[0] << ": " << reply;
    }
  }
  EXPECT_EQ(client_.Do("DEBUG", "DIGEST"), before);

  // A key that becomes a list while somebody waits.
  MustAcquire(client_, "a", "zoe");
  Waiter waiter = WaitForAll({"a", "b"}, "bob");
  Waiter behind(server(), "a", "carol");
  EXPECT_EQ(client_.Do("RENAME", "list", "b"), Reply::Ok());
  EXPECT_EQ(LineOf(client_, "a"), (Owners{"bob", "carol"})) << "it is not his turn";
  Release("a", "zoe");
  EXPECT_TRUE(waiter.Read().IsError("WRONGTYPE "));
  EXPECT_TRUE(behind.Read().IsInteger());
}

TEST_F(AlsoTest, IsGrantedWhenKeysAreRemovedByOtherCommands) {
  // Each frees "a" (zoe's) or "b" (yan's).
  const std::vector<std::pair<Commands, Commands>> ways = {
      {{{"DEL", "a"}}, {{"DEL", "b"}}},
      {{{"RENAME", "b", "elsewhere"}}, {{"UNLINK", "a"}}},
      {{{"LOCK.RELEASE", "b", "yan"}}, {{"RENAME", "a", "elsewhere"}}},
      {{{"MULTI"}, {"DEL", "a"}, {"EXEC"}}, {{"EXPIRE", "b", "-1"}}},
      {{{"SET", "a", "zoe"}}, {{"DEL", "b"}, {"DEL", "a"}}},
      {{}, {{"FLUSHALL"}}},
      {{}, {{"SWAPDB", "0", "9"}}},
      {{}, {{"DEL", "a", "b"}}},
  };
  for (const auto& [half, rest] : ways) {
    SCOPED_TRACE((half.empty() ? "" : half[0][0] + " ") + rest[0][0]);
    StartAfresh();
    MustAcquire(client_, "a", "zoe");
    MustAcquire(client_, "b", "yan");
    Waiter alice = WaitForAll({"a", "b"}, "alice");
    for (const Command& command : half) EXPECT_FALSE(client_.Do(command).IsError());
    client_.Do("PING");
    EXPECT_FALSE(alice.HasReply());
    EXPECT_EQ(LineOf(client_, "a"), Owners{"alice"});
    EXPECT_EQ(LineOf(client_, "b"), Owners{"alice"});
    for (const Command& command : rest) EXPECT_FALSE(client_.Do(command).IsError());
    const Reply token = alice.Read();
    ASSERT_TRUE(token.IsInteger()) << token;
    ExpectHeld({"a", "b"}, "alice", token);
  }
}

// Another lock is renamed onto a key that had become free.
TEST_F(AlsoTest, WaitsForLockRenamedOntoFreedKey) {
  MustAcquire(client_, "a", "zoe");
  MustAcquire(client_, "b", "yan");
  MustAcquire(client_, "other", "xia");
  Waiter alice = WaitForAll({"a", "b"}, "alice");
  Release("a", "zoe");
  client_.Do("RENAME", "other", "a");
  Release("b", "yan");
  EXPECT_FALSE(alice.HasReply());
  EXPECT_EQ(HoldersOf(client_, "a"), Owners{"xia"});
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "a", "xia", "PX", 1), Reply::Int(1));
  EXPECT_TRUE(alice.Read().IsInteger());
}

TEST_F(AlsoTest, WorksInTransactionsAndScripts) {
  client_.Do("MULTI");
  client_.Do(AcquiringAll({"a", "b"}, "alice"));
  client_.Do(WaitingForAll({"b", "c"}, "bob"));
  const Reply replies = client_.Do("EXEC");
  ASSERT_EQ(replies.elements.size(), 2U) << replies;
  ExpectHeld({"a", "b"}, "alice", replies.elements[0]);
  EXPECT_EQ(replies.elements[1], Reply::Nil()) << "one try";
  EXPECT_EQ(
      client_.Do("EVAL", "return redis.call('LOCK.RELEASE', KEYS[1], 'alice', 'ALSO', 1, KEYS[2])",
                 2, "a", "b"),
      Reply::Int(2));
}

// --- Access rights ----------------------------------------------------------------------------

class AlsoAccessTest : public AlsoTest {
 protected:
  AlsoAccessTest() { SetRights({"~my:*", "~b"}); }

  void SetRights(const std::vector<std::string>& keys) {
    Command set_user = {"ACL",         "SETUSER",    "worker",        "reset",
                        "on",          ">secret",    "+lock.acquire", "+lock.release",
                        "+lock.touch", "+lock.info", "+client"};
    set_user.insert(set_user.end(), keys.begin(), keys.end());
    EXPECT_EQ(client_.Do(set_user), Reply::Ok());
  }
};

TEST_F(AlsoAccessTest, PermissionIsRequiredForEveryKey) {
  Waiter worker(server(), {"AUTH", "worker", "secret"});
  MustAcquire(client_, "secret", "alice");
  MustAcquire(client_, "my:held", "alice");
  const Reply before = client_.Do("DEBUG", "DIGEST");
  for (const Names& names : {Names{"my:a", "secret"},
                             {"secret", "my:a"},
                             {"my:a", "b", "free"},
                             {"my:held", "secret"}}) {
    for (const Command& command :
         {AcquiringAll(names, "alice"), WaitingForAll(names, "bob"), ReleasingAll(names, "alice"),
          Command{"LOCK.TOUCH", names[0], "alice", "ALSO", "1", names.back(), "PX", "1"}}) {
      const Reply reply = worker.Do(command);
      EXPECT_TRUE(reply.IsError("NOPERM")) << command[0] << " " << names[0] << ": " << reply;
    }
  }
  EXPECT_EQ(client_.Do("DEBUG", "DIGEST"), before);
  EXPECT_EQ(WaitersNow(client_), "0");
  EXPECT_TRUE(worker.Do(AcquiringAll({"my:a", "b"}, "carol")).IsInteger());
}

// The rights at the time of the grant count, for each of the keys.
TEST_F(AlsoAccessTest, PermissionLostWhileWaitingRefusesGrant) {
  for (const bool first_key : {true, false}) {
    SCOPED_TRACE(first_key ? "the first key" : "the second key");
    StartAfresh();
    SetRights({"~my:*", "~b"});
    MustAcquire(client_, "my:a", "zoe");
    Waiter worker(server(), {"AUTH", "worker", "secret"});
    worker.Wait(WaitingForAll(first_key ? Names{"b", "my:a"} : Names{"my:a", "b"}, "alice"));
    Waiter bob(server(), "b", "bob");
    SetRights({"~my:*"});
    Release("my:a", "zoe");
    const Reply reply = worker.Read();
    EXPECT_TRUE(reply.IsError("NOPERM")) << reply;
    EXPECT_TRUE(bob.Read().IsInteger()) << "the next waiter is tried";
    EXPECT_EQ(client_.Do("EXISTS", "my:a"), Reply::Int(0)) << "nothing was taken";
  }
}

// The described cycle contains no key that the caller may not read.
TEST_F(AlsoAccessTest, DeadlockErrorHidesUnreadableKeys) {
  MustAcquire(client_, "my:a", "me");
  MustAcquire(client_, "my:b", "colleague");
  MustAcquire(client_, "secret", "stranger");
  Waiter colleague = WaitForAll({"free", "secret"}, "colleague");
  Waiter stranger = WaitForAll({"my:a", "my:free"}, "stranger");
  Waiter worker(server(), {"AUTH", "worker", "secret"});
  EXPECT_EQ(worker.Do(WaitingForAll({"my:other", "my:b"}, "me")),
            Reply::Error("DEADLOCK waiting for \"my:b\" would close the cycle me -> \"my:b\" -> "
                         "colleague -> ? -> ? -> \"my:a\" -> me"));
}

// --- Replication ------------------------------------------------------------------------------

// Replicas and the AOF get all locks of a set or none.
TEST_F(AlsoTest, IsReplicatedAtomically) {
  ReplicationStream stream(server().port());
  stream.Until(client_);
  const auto held = [this](const std::string& key, const std::string& owner, const Reply& token) {
    return GrantedFact(client_, key, owner, token);
  };
  const Reply token = client_.Do(AcquiringAll({"a", "b"}, "alice"));
  EXPECT_EQ(stream.Until(client_),
            (Commands{{"MULTI"}, held("a", "alice", token), held("b", "alice", token), {"EXEC"}}));
  Waiter bob = WaitForAll({"a", "b"}, "bob");
  EXPECT_EQ(stream.Until(client_), Commands{}) << "waiting changes nothing";
  client_.Do(ReleasingAll({"a", "b"}, "alice"));
  const Reply next = bob.Read();
  const Commands replicated = stream.Until(client_);
  const auto at = [&](const Command& command) {
    return std::find(replicated.begin(), replicated.end(), command) - replicated.begin();
  };
  const auto first = at(held("a", "bob", next));
  const auto second = at(held("b", "bob", next));
  ASSERT_LT(std::max(first, second), std::ssize(replicated));
  EXPECT_EQ(std::abs(first - second), 1);
  // Both in the same transaction.
  const auto open =
      std::find(replicated.rend() - std::min(first, second), replicated.rend(), Command{"MULTI"});
  ASSERT_NE(open, replicated.rend()) << "not in a transaction";
  EXPECT_EQ(std::count(open.base(), replicated.begin() + std::max(first, second), Command{"EXEC"}),
            0);
  EXPECT_EQ(replicated.back(), Command{"EXEC"});
}

// --- Clusters ---------------------------------------------------------------------------------

TEST(AlsoClusterTest, AllKeysMustBeInOneSlot) {
  Server server({.args = {"--cluster-enabled", "yes"}});
  Client client = server.Connect();
  ASSERT_EQ(client.Do("CLUSTER", "ADDSLOTSRANGE", 0, 16383), Reply::Ok());
  ASSERT_TRUE(Eventually(
      [&] {
        return client.Do("CLUSTER", "INFO").text.find("cluster_state:ok") != std::string::npos;
      },
      Milliseconds{20000}));
  for (const Command& command :
       {AcquiringAll({"a", "b"}, "alice"), ReleasingAll({"a", "b"}, "alice"),
        WaitingForAll({"{x}a", "{x}b", "c"}, "alice"),
        Command{"LOCK.TOUCH", "a", "alice", "PX", "1", "ALSO", "1", "b"}}) {
    const Reply reply = client.Do(command);
    EXPECT_TRUE(reply.IsError("CROSSSLOT")) << reply;
  }
  EXPECT_EQ(client.Do("DBSIZE"), Reply::Int(0));

  const Names names = {"{x}a", "{x}b"};
  const int64_t token = MustObtain(client, AcquiringAll(names, "alice"));
  EXPECT_EQ(client.Do("LOCK.FENCE", "{x}b"), Reply::Int(token));
  Waiter bob = Waiter::Asking(server, WaitingForAll(names, "bob"));
  EXPECT_EQ(client.Do(ReleasingAll(names, "alice")), Reply::Int(2));
  EXPECT_GT(bob.Read().integer, token);
}

}  // namespace
}  // namespace turnstile::testing
