// Waits that would never end are refused at once, and no others.

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

class DeadlockTest : public SharedWaitingTest<DeadlockTest> {
 protected:
  // `owner` requests `key` and would wait.
  Reply Ask(std::string_view key, std::string_view owner) {
    return client_.Do(AcquireWaiting(key, owner));
  }

  static Reply Cycle(const std::string& text) { return Reply::Error("DEADLOCK " + text); }
};

TEST_F(DeadlockTest, CycleOfTwoIsRefused) {
  MustAcquire(client_, "a", "worker-1");
  MustAcquire(client_, "b", "worker-2");
  Waiter two(server(), "a", "worker-2");
  EXPECT_EQ(Ask("b", "worker-1"),
            Cycle("waiting for \"b\" would close the cycle worker-1 -> \"b\" -> worker-2 -> \"a\" "
                  "-> worker-1"));
  // The queue is unchanged, a call without WAIT is allowed, and releasing resolves the conflict.
  EXPECT_EQ(WaitersNow(client_), "1");
  EXPECT_EQ(client_.Do("LOCK.ACQUIRE", "b", "worker-1", "PX", 1), Reply::Nil());
  EXPECT_EQ(client_.Do(AcquireWaiting("b", "worker-1", {.wait_ms = 0})), Reply::Nil());
  EXPECT_EQ(client_.Do("EVAL", "return redis.call('LOCK.ACQUIRE','b','worker-1','PX',1,'WAIT',9)",
                       1, "b"),
            Reply::Nil());
  client_.Do("LOCK.RELEASE", "a", "worker-1");
  EXPECT_TRUE(two.Read().IsInteger());
  Waiter one(server(), "b", "worker-1");
  client_.Do("LOCK.RELEASE", "b", "worker-2");
  EXPECT_TRUE(one.Read().IsInteger());
}

TEST_F(DeadlockTest, CycleOfThreeIsRefused) {
  MustAcquire(client_, "a", "1");
  MustAcquire(client_, "b", "2");
  MustAcquire(client_, "c", "3");
  Waiter one(server(), "b", "1");
  Waiter two(server(), "c", "2");
  EXPECT_EQ(Ask("a", "3"),
            Cycle("waiting for \"a\" would close the cycle 3 -> \"a\" -> 1 -> \"b\" -> 2 -> \"c\" "
                  "-> 3"));
  EXPECT_EQ(Ask("b", "3"),
            Cycle("waiting for \"b\" would close the cycle 3 -> \"b\" -> 2 -> \"c\" -> 3"));
}

// A ring of 50, closed by the last.
TEST_F(DeadlockTest, CycleOfFiftyIsRefused) {
  std::vector<Waiter> waiters;
  for (int i = 0; i < 50; i++) MustAcquire(client_, "k" + std::to_string(i), std::to_string(i));
  for (int i = 0; i < 49; i++) {
    waiters.emplace_back(server(), "k" + std::to_string(i + 1), std::to_string(i));
  }
  const Reply refused = Ask("k0", "49");
  EXPECT_TRUE(
      refused.IsError("DEADLOCK waiting for \"k0\" would close the cycle 49 -> \"k0\" -> "
                      "0 -> \"k1\" -> 1 -> "))
      << refused;
  EXPECT_TRUE(refused.text.ends_with(" -> 49")) << refused;
  EXPECT_LT(refused.text.size(), 500U);
  EXPECT_TRUE(Ask("k1", "49").IsError("DEADLOCK"));
  Waiter outsider(server(), "k0", "outsider");
}

// Waiters ahead are waited for, too.
TEST_F(DeadlockTest, WaiterAheadCanCloseCycle) {
  MustAcquire(client_, "a", "alice");
  MustAcquire(client_, "b", "bob");
  Waiter carol(server(), "a", "carol");
  Waiter dave(server(), "b", "carol");  // carol also waits for bob
  // bob would wait behind carol, who waits for bob's lock.
  EXPECT_EQ(Ask("a", "bob"),
            Cycle("waiting for \"a\" would close the cycle bob -> \"a\" -> carol -> \"b\" -> bob"));
  // Once she has left that queue he can wait.
  dave.Close();
  ASSERT_TRUE(Eventually([&] { return WaitersNow(client_) == "1"; }));
  Waiter bob(server(), "a", "bob");
}

// Also indirectly: bob holds what alice requests, and waits behind carol, who waits for alice.
TEST_F(DeadlockTest, WaiterAheadOfOtherOwnerCanCloseCycle) {
  MustAcquire(client_, "a", "alice");
  MustAcquire(client_, "b", "bob");
  MustAcquire(client_, "c", "outsider");
  Waiter carol(server(), "c", "carol");
  Waiter bob(server(), "c", "bob");
  Waiter dave(server(), "c", "dave");
  Waiter again(server(), "a", "carol");
  EXPECT_EQ(Ask("b", "alice"),
            Cycle("waiting for \"b\" would close the cycle alice -> \"b\" -> bob -> \"c\" -> carol "
                  "-> \"a\" -> alice"));
  // Waiters behind bob do not matter to him.
  carol.Close();
  ASSERT_TRUE(Eventually([&] {
    return LineOf(client_, "c") == std::vector<std::string>{"bob", "dave"};
  }));
  Waiter alice(server(), "b", "alice");
}

TEST_F(DeadlockTest, OwnLocksCloseNoCycle) {
  MustAcquire(client_, "a", "alice");
  const Reply token = client_.Do("LOCK.FENCE", "a");
  Waiter bob(server(), "a", "bob");
  EXPECT_EQ(Ask("a", "alice"), token) << "she holds it";
  MustAcquire(client_, "b", "carol");
  Waiter alice(server(), "b", "alice");
  Waiter again(server(), "b", "alice");  // takes over her own position
  EXPECT_TRUE(alice.Read().IsError("UNBLOCKED"));
  Waiter dave(server(), "b", "dave");
}

TEST_F(DeadlockTest, PlainLockCanCloseCycle) {
  client_.Do("SET", "a", "worker-1");
  MustAcquire(client_, "b", "worker-2");
  Waiter two(server(), "a", "worker-2");
  EXPECT_EQ(Ask("b", "worker-1"),
            Cycle("waiting for \"b\" would close the cycle worker-1 -> \"b\" -> worker-2 -> \"a\" "
                  "-> worker-1"));
  client_.Do("SET", "a", "somebody else");
  Waiter one(server(), "b", "worker-1");
}

// A key of the same name in another database is another lock.
TEST_F(DeadlockTest, CycleAcrossDatabasesIsRefused) {
  Client other = server().Connect();
  other.Do("SELECT", 1);
  MustAcquire(client_, "a", "worker-1");
  MustAcquire(other, "a", "worker-2");
  Waiter two(server(), "a", "worker-2");
  EXPECT_EQ(other.Do(AcquireWaiting("a", "worker-1")),
            Cycle("waiting for \"a\" would close the cycle worker-1 -> \"a\" -> worker-2 -> \"a\" "
                  "-> worker-1"));
}

TEST_F(DeadlockTest, ReleaseBreaksCycle) {
  MustAcquire(client_, "a", "worker-1");
  MustAcquire(client_, "b", "worker-2");
  Waiter one(server(), "b", "worker-1");
  // In one pass: worker-1 has not been served yet, but nothing blocks it from "b".
  RawConnection two = server().ConnectRaw();
  SendAtOnce(two, {{"LOCK.RELEASE", "b", "worker-2"}, AcquireWaiting("a", "worker-2")});
  EXPECT_EQ(two.ReadReply(), Reply::Int(1));
  EXPECT_TRUE(one.Read().IsInteger());
  EXPECT_FALSE(two.Readable(Milliseconds{50}));
  client_.Do("LOCK.RELEASE", "a", "worker-1");
  EXPECT_TRUE(two.ReadReply().IsInteger());
}

TEST_F(DeadlockTest, LeaseEndTimeOutAndDeletionBreakCycle) {
  const auto expect_free_way = [this](const char* how, const Command& first, const Command& after) {
    SCOPED_TRACE(how);
    StartAfresh();
    client_.Do(first);
    MustAcquire(client_, "b", "worker-2");
    const int64_t wait_ms = std::string(how) == "time-out" ? 1500 : 9000;
    Waiter two(server(), "a", "worker-2", {.wait_ms = wait_ms});
    EXPECT_TRUE(Ask("b", "worker-1").IsError("DEADLOCK "));
    if (after.empty()) {
      ASSERT_FALSE(two.Read().IsError());
    } else {
      client_.Do(after);
    }
    Waiter one(server(), "b", "worker-1");
    EXPECT_FALSE(one.HasReply());
  };
  expect_free_way("lease", {"LOCK.ACQUIRE", "a", "worker-1", "PX", "1500"}, {});
  expect_free_way("time-out", {"LOCK.ACQUIRE", "a", "worker-1", "PX", "60000"}, {});
  expect_free_way("DEL", {"LOCK.ACQUIRE", "a", "worker-1", "PX", "60000"}, {"DEL", "a"});
  expect_free_way("RENAME", {"LOCK.ACQUIRE", "a", "worker-1", "PX", "60000"},
                  {"RENAME", "a", "elsewhere"});
}

// Events in other databases change nothing, not even temporarily.
TEST_F(DeadlockTest, EventsInOtherDatabasesDoNotBreakCycle) {
  MustAcquire(client_, "a", "worker-1");
  MustAcquire(client_, "b", "worker-2");
  Waiter two(server(), "a", "worker-2");
  RawConnection raw = server().ConnectRaw();
  for (const Commands& elsewhere :
       {Commands{{"SWAPDB", "3", "4"}}, {{"SELECT", "3"}, {"FLUSHDB"}, {"SELECT", "0"}}}) {
    SCOPED_TRACE(elsewhere[0][0]);
    DoAtOnce(raw, elsewhere);
    EXPECT_TRUE(Ask("b", "worker-1").IsError("DEADLOCK ")) << "afterwards";
    Commands commands = elsewhere;
    commands.push_back(AcquireWaiting("b", "worker-1", {.wait_ms = 1000}));
    const Reply reply = DoAtOnce(raw, commands).back();
    EXPECT_TRUE(reply.IsError("DEADLOCK ")) << "in the same pass: " << reply;
  }
}

// Locks on which the caller may not run LOCK.INFO are hidden, with the owners that hold them.
TEST_F(DeadlockTest, ErrorHidesKeysCallerMayNotInspect) {
  Client worker =
      server().ConnectAs("worker", {"~my:*", "+lock.acquire", "+lock.info", "(~secret +get)"});
  MustAcquire(client_, "my:a", "me");
  MustAcquire(client_, "my:b", "colleague");
  MustAcquire(client_, "secret", "stranger");
  Waiter colleague(server(), "secret", "colleague");
  Waiter stranger(server(), "my:a", "stranger");
  EXPECT_EQ(worker.Do(AcquireWaiting("my:b", "me")),
            Cycle("waiting for \"my:b\" would close the cycle me -> \"my:b\" -> colleague -> ? -> "
                  "? -> \"my:a\" -> me"));
  Client blind = server().ConnectAs("blind", {"~my:*", "+lock.acquire"});
  EXPECT_EQ(blind.Do(AcquireWaiting("my:b", "me")),
            Cycle("waiting for ? would close the cycle me -> ? -> ? -> ? -> ? -> ? -> me"));
  EXPECT_EQ(Ask("my:b", "me"),
            Cycle("waiting for \"my:b\" would close the cycle me -> \"my:b\" -> colleague -> "
                  "\"secret\" -> stranger -> \"my:a\" -> me"));
}

TEST_F(DeadlockTest, ErrorQuotesUnprintableNames) {
  const std::string key = "a \"key\"\r\n";
  const std::string owner("two words\0", 10);
  MustAcquire(client_, key, owner);
  MustAcquire(client_, "b", "bob");
  Waiter bob(server(), key, "bob");
  RawConnection raw = server().ConnectRaw();  // detects a newline in the error
  EXPECT_EQ(raw.Do(AcquireWaiting("b", owner)),
            Cycle(R"(waiting for "b" would close the cycle "two words\x00" -> "b" -> bob -> )"
                  R"("a \"key\"\x0d\x0a" -> "two words\x00")"));
}

// The same under load: clients that take two locks in opposite orders never wait for ever, because
// one of them gets an error.
TEST_F(DeadlockTest, ClientsLockingInOppositeOrdersMakeProgress) {
  std::vector<RawConnection> philosophers;
  constexpr size_t kSeats = 5;
  for (size_t i = 0; i < kSeats; i++) philosophers.push_back(server().ConnectRaw());
  const auto fork = [](size_t i) { return "fork-" + std::to_string(i % kSeats); };
  int meals = 0;
  int deadlocks = 0;
  std::vector<bool> has_first(kSeats, false);
  for (size_t i = 0; i < kSeats; i++) {
    philosophers[i].SendCommand(AcquireWaiting(fork(i), std::to_string(i)));
  }
  const auto deadline = Clock::now() + Milliseconds{20000};
  for (size_t i = 0; meals < 300 && Clock::now() < deadline; i = (i + 1) % kSeats) {
    RawConnection& me = philosophers[i];
    if (!me.Readable()) continue;
    const std::string name = std::to_string(i);
    const Reply reply = me.ReadReply();
    if (reply.IsInteger() && !has_first[i]) {
      has_first[i] = true;
      me.SendCommand(AcquireWaiting(fork(i + 1), name));
      continue;
    }
    if (reply.IsInteger()) {
      meals++;
      EXPECT_EQ(me.Do("LOCK.RELEASE", fork(i + 1), name), Reply::Int(1));
    } else {
      deadlocks++;
      EXPECT_TRUE(reply.IsError("DEADLOCK ")) << reply;
    }
    EXPECT_EQ(me.Do("LOCK.RELEASE", fork(i), name), Reply::Int(1));
    has_first[i] = false;
    me.SendCommand(AcquireWaiting(fork(i), name));
  }
  EXPECT_EQ(meals, 300) << "and " << deadlocks << " deadlocks";
  EXPECT_GT(deadlocks, 0);
}

}  // namespace
}  // namespace turnstile::testing
