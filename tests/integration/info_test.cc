// INFO turnstile: every field, and its documentation.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/markdown.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

using Figures = std::map<std::string, std::string>;

// All fields in order, without the prefix; sections too, as "# counters".
std::vector<std::pair<std::string, std::string>> ReadInfo(Client& client) {
  std::vector<std::pair<std::string, std::string>> fields;
  std::istringstream stream(client.Do("INFO", "turnstile").text);
  for (std::string line; std::getline(stream, line);) {
    if (!line.empty() && line.back() == '\r') line.pop_back();
    const std::string prefix = line.starts_with("#") ? "# turnstile_" : "turnstile_";
    if (line.empty()) continue;
    EXPECT_TRUE(line.starts_with(prefix)) << line;
    const size_t colon = std::min(line.find(':'), line.size());
    const std::string name = line.substr(prefix.size(), colon - prefix.size());
    fields.emplace_back(line.starts_with("#") ? "# " + name : name,
                        line.substr(std::min(colon + 1, line.size())));
  }
  return fields;
}

class InfoTest : public SharedWaitingTest<InfoTest> {
 protected:
  InfoTest() { Reset(); }

  Reply Do(const Command& command) { return client_.Do(command); }
  void Reset() { EXPECT_EQ(Do({"CONFIG", "SET", "turnstile.reset-stats", "yes"}), Reply::Ok()); }

  // All counters that are not zero.
  Figures Counted() {
    Figures counted;
    bool inside = false;
    for (const auto& [name, value] : ReadInfo(client_)) {
      if (name.starts_with("# ")) inside = name == "# counters";
      if (inside && value != "0" && value != "0.00" && !value.empty()) counted[name] = value;
    }
    return counted;
  }
  std::string Figure(const std::string& name) {
    return InfoField(client_, "turnstile", "turnstile_" + name);
  }
  int64_t Number(const std::string& name) { return std::stoll(Figure(name)); }
};

TEST_F(InfoTest, EveryFieldIsDocumented) {
  std::vector<std::string> fields;
  for (const auto& [name, value] : ReadInfo(client_)) {
    if (!name.starts_with("# ")) fields.push_back("turnstile_" + name);
  }
  std::vector<std::string> documented;
  for (const Row& row : ReadTable("docs/operations.md", "field of INFO turnstile")) {
    documented.push_back(row.at(0));
  }
  EXPECT_EQ(documented, fields);
}

TEST_F(InfoTest, HasFourSections) {
  std::vector<std::string> sections;
  for (const auto& [name, value] : ReadInfo(client_)) {
    if (name.starts_with("# ")) sections.push_back(name);
  }
  EXPECT_EQ(sections,
            (std::vector<std::string>{"# state", "# counters", "# latencies", "# clock"}));
}

// --- Counters ---------------------------------------------------------------------------------

TEST_F(InfoTest, CountsAcquisitionsAndReleases) {
  MustAcquire(client_, "job", "alice");
  EXPECT_EQ(Counted(), (Figures{{"acquired", "1"}, {"acquired_immediately", "1"}}));
  MustAcquire(client_, "job", "alice");
  Do({"LOCK.TOUCH", "job", "alice", "PX", "60000"});
  Do({"LOCK.TOUCH", "job", "bob", "PX", "60000"});
  Do({"LOCK.RELEASE", "job", "bob"});
  Do({"LOCK.RELEASE", "job", "alice"});
  Do({"LOCK.RELEASE", "job", "alice"});
  EXPECT_EQ(Counted(), (Figures{{"acquired", "1"},
                                {"acquired_immediately", "1"},
                                {"reacquired", "1"},
                                {"touched", "1"},
                                {"stale_touches", "1"},
                                {"released", "1"},
                                {"stale_releases", "2"}}));
}

TEST_F(InfoTest, AcquireCountsRequestsReleaseAndTouchCountLocks) {
  Do(Acquiring("a", "me", {"ALSO", "2", "b", "c"}));
  Do({"LOCK.TOUCH", "a", "me", "PX", "60000", "ALSO", "2", "b", "x"});
  Do({"LOCK.RELEASE", "a", "me", "ALSO", "3", "b", "x", "y"});
  EXPECT_EQ(Counted(), (Figures{{"acquired", "1"},
                                {"acquired_immediately", "1"},
                                {"touched", "2"},
                                {"stale_touches", "1"},
                                {"released", "2"},
                                {"stale_releases", "2"}}));
}

TEST_F(InfoTest, CountsRejectionsWaitsAndTimeOuts) {
  MustAcquire(client_, "job", "alice");
  Reset();
  EXPECT_TRUE(Do({"LOCK.ACQUIRE", "job", "bob", "PX", "60000"}).IsNil());
  EXPECT_EQ(Counted(), (Figures{{"rejected", "1"}, {"contention_percent", "100.00"}}));
  EXPECT_TRUE(Do(AcquireWaiting("job", "bob", {.wait_ms = 5})).IsNil());
  EXPECT_EQ(Counted(), (Figures{{"rejected", "1"},
                                {"waits", "1"},
                                {"wait_timeouts", "1"},
                                {"contention_percent", "100.00"}}));
  Waiter carol(server(), "job", "carol");
  Do({"LOCK.RELEASE", "job", "alice"});
  EXPECT_TRUE(carol.Read().IsInteger());
  EXPECT_EQ(Counted(), (Figures{{"acquired", "1"},
                                {"acquired_after_wait", "1"},
                                {"rejected", "1"},
                                {"waits", "2"},
                                {"wait_timeouts", "1"},
                                {"released", "1"},
                                {"contention_percent", "100.00"}}));
  for (int i = 0; i < 2; i++) MustAcquire(client_, "other:" + std::to_string(i), "alice");
  EXPECT_EQ(Figure("contention_percent"), "60.00") << "3 of 5";

  Waiter dave(server(), "job", "dave");
  Do({"CLIENT", "UNBLOCK", std::to_string(dave.id()), "TIMEOUT"});
  EXPECT_TRUE(dave.Read().IsNil());
  EXPECT_EQ(Figure("wait_timeouts"), "2");
}

TEST_F(InfoTest, CountsDeadlocksAndWaitLimitErrors) {
  MustAcquire(client_, "a", "alice");
  MustAcquire(client_, "b", "bob");
  Waiter alice(server(), "b", "alice");
  EXPECT_TRUE(Do(AcquireWaiting("a", "bob")).IsError("DEADLOCK"));
  EXPECT_EQ(Figure("deadlocks"), "1");
  EXPECT_EQ(Figure("waits"), "1");
  EXPECT_EQ(Do({"CONFIG", "SET", "turnstile.max-waiters", "1"}), Reply::Ok());
  EXPECT_TRUE(Do(AcquireWaiting("a", "carol")).IsError("WAITLIMIT"));
  EXPECT_EQ(Figure("rejected_wait_limit"), "1");
  EXPECT_EQ(Figure("waits"), "1");
  EXPECT_EQ(Figure("contention_percent"), "60.00") << "3 of 5";
  EXPECT_EQ(Do({"CONFIG", "SET", "turnstile.max-waiters", "5000"}), Reply::Ok());
}

TEST_F(InfoTest, CountsLinesThatAreTooLong) {
  MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob");
  Reset();
  EXPECT_TRUE(Do(Acquiring("job", "carol", {"WAIT", "60000", "MAXLINE", "1"})).IsNil());
  EXPECT_EQ(Counted(), (Figures{{"rejected_line_full", "1"}, {"contention_percent", "100.00"}}));
}

TEST_F(InfoTest, ShowsPlacesOfNotifiedWaits) {
  MustAcquire(client_, "a", "alice");
  EXPECT_EQ(Do(Acquiring("a", "bob", {"WAIT", "60000", "NOTIFY", "c", "1", "ALSO", "1", "b"})),
            Reply::Int(0));
  Waiter carol(server(), "a", "carol");
  EXPECT_EQ(Figure("queued"), "2");
  EXPECT_EQ(Figure("waiters"), "1");
  EXPECT_EQ(Figure("contended_locks"), "2");
  Do({"LOCK.RELEASE", "a", "alice"});
  EXPECT_TRUE(carol.Read().IsInteger());
  EXPECT_EQ(Figure("queued"), "0");
  EXPECT_EQ(Figure("undelivered"), "1") << "nobody has subscribed";
}

TEST_F(InfoTest, CountsFencedCommands) {
  const int64_t token = MustAcquire(client_, "job", "alice");
  Reset();
  client_.Do("LOCK.FENCE", "job");
  client_.Do("LOCK.FENCE", "job", token);
  client_.Do("LOCK.FENCE", "job", 1);
  EXPECT_EQ(Counted(), Figures{}) << "only commands are counted";
  client_.Do("LOCK.FENCE", "job", token, "THEN", "SET", "x", "y");
  EXPECT_TRUE(client_.Do("LOCK.FENCE", "job", token, "THEN", "INCR", "x").IsError());
  EXPECT_TRUE(client_.Do("LOCK.FENCE", "job", 1, "THEN", "SET", "x", "y").IsError("FENCED"));
  EXPECT_EQ(Counted(), (Figures{{"fence_passed", "2"}, {"fence_rejected", "1"}}));
}

TEST_F(InfoTest, FlushCountsOnlyLocksOfItsDatabase) {
  Client other = server().Connect();
  other.Do("SELECT", 2);
  for (int i = 0; i < 3; i++) MustAcquire(client_, "job:" + std::to_string(i), "alice");
  MustAcquire(other, "job", "alice");
  Reset();
  EXPECT_EQ(Figure("locks"), "4");
  other.Do("FLUSHDB");
  EXPECT_EQ(Figure("forced"), "1");
  EXPECT_TRUE(Eventually([&] { return Figure("locks") == "3"; }));
  Do({"FLUSHALL"});
  EXPECT_EQ(Figure("forced"), "4");
}

// Locks that are queued for freeing are not counted as flushed again.
TEST_F(InfoTest, LocksPendingAsyncFreeAreCountedOnce) {
  RawConnection raw = server().ConnectRaw();
  Commands commands;
  for (int i = 0; i < 20000; i++) {
    commands.push_back({"LOCK.ACQUIRE", "job:" + std::to_string(i), "alice", "PX", "60000"});
  }
  DoAtOnce(raw, commands);
  DoAtOnce(raw, {{"FLUSHALL", "ASYNC"},
                 {"LOCK.ACQUIRE", "job", "alice", "PX", "60000"},
                 {"FLUSHALL", "ASYNC"}});
  EXPECT_EQ(Figure("forced"), "20001");
  // While another thread still frees them, the next tests would count them.
  EXPECT_TRUE(
      Eventually([&] { return InfoField(client_, "memory", "lazyfree_pending_objects") == "0"; }));
}

TEST_F(InfoTest, CountsExpiredHolds) {
  MustObtain(client_, Acquiring("job", "a", {"SHARED"}, 20));
  MustObtain(client_, Acquiring("job", "b", {"SHARED"}, 10));
  MustAcquire(client_, "task", "c", 5);
  EXPECT_TRUE(Eventually([&] { return Figure("expired") == "3"; })) << Figure("expired");
  EXPECT_EQ(Counted(),
            (Figures{{"acquired", "3"}, {"acquired_immediately", "3"}, {"expired", "3"}}));
  EXPECT_EQ(Figure("locks"), "0");
}

TEST_F(InfoTest, CountsHoldsEndedBySession) {
  Waiter holder(server());
  MustObtain(holder, Acquiring("job", "alice", {"SESSION"}));
  MustObtain(holder, Acquiring("task", "alice", {"SESSION", "LINGER", "60000"}));
  Reset();
  holder.Close();
  EXPECT_TRUE(Eventually([&] { return Figure("session_ended") == "2"; }));
  Do({"DEL", "task"});
  EXPECT_EQ(Counted(), (Figures{{"session_ended", "2"}})) << "and not forced, it was lost before";
}

TEST_F(InfoTest, InvalidRequestsAreNotCounted) {
  Do({"LOCK.ACQUIRE", "job", "alice", "PX", "0"});
  Do({"LOCK.RELEASE", "job", ""});
  Do({"LPUSH", "list", "x"});
  Do({"LOCK.ACQUIRE", "list", "alice", "PX", "1000"});
  Do({"LOCK.RELEASE", "list", "alice"});
  EXPECT_EQ(Counted(), Figures{});
}

TEST_F(InfoTest, CountsRequestsForPlainLocks) {
  Do({"SET", "job", "alice", "PX", "60000"});
  EXPECT_TRUE(Do({"LOCK.ACQUIRE", "job", "bob", "PX", "1000"}).IsNil());
  Do({"LOCK.TOUCH", "job", "alice", "PX", "1000"});
  Do({"LOCK.RELEASE", "job", "alice"});
  EXPECT_EQ(Counted(), (Figures{{"rejected", "1"},
                                {"touched", "1"},
                                {"released", "1"},
                                {"contention_percent", "100.00"}}));
  EXPECT_EQ(Figure("locks"), "0") << "they are strings";
}

// --- State ------------------------------------------------------------------------------------

TEST_F(InfoTest, ShowsNumberOfLocksWaitersAndContendedLocks) {
  EXPECT_TRUE(Eventually([&] { return Figure("locks") == "0"; }));
  MustAcquire(client_, "a", "alice");
  MustAcquire(client_, "b", "alice");
  MustObtain(client_, Acquiring("c", "x", {"SHARED"}));
  MustObtain(client_, Acquiring("c", "y", {"SHARED"}));
  EXPECT_EQ(Figure("locks"), "3") << "locks, not holders";
  Waiter bob(server(), "a", "bob");
  Waiter carol(server(), "a", "carol");
  Waiter dave(server(), "b", "dave");
  EXPECT_EQ(Figure("waiters"), "3");
  EXPECT_EQ(Figure("contended_locks"), "2");
  // However locks are added and removed.
  Do({"RENAME", "a", "renamed"});
  EXPECT_TRUE(bob.Read().IsInteger());
  EXPECT_EQ(Figure("locks"), "4");
  Do({"MOVE", "renamed", "5"});
  EXPECT_EQ(Figure("locks"), "4");
  const std::string dump = Do({"DUMP", "b"}).text;
  Do({"RESTORE", "b", "0", dump, "REPLACE"});
  EXPECT_EQ(Figure("locks"), "4");
  Do({"SET", "c", "x"});
  EXPECT_EQ(Figure("locks"), "3");
  Do({"DEBUG", "RELOAD"});
  EXPECT_EQ(Figure("locks"), "3");
  Do({"FLUSHALL"});
  EXPECT_TRUE(carol.Read().IsInteger());
  EXPECT_TRUE(dave.Read().IsInteger());
  EXPECT_TRUE(Eventually([&] { return Figure("locks") == "2"; })) << Figure("locks");
}

// --- Latencies --------------------------------------------------------------------------------

TEST_F(InfoTest, ShowsWaitAndHoldTimes) {
  for (const char* name : {"wait_p50_ms", "wait_p99_ms", "wait_p999_ms", "wait_max_ms",
                           "hold_p50_ms", "hold_p99_ms", "hold_p999_ms", "hold_max_ms"}) {
    EXPECT_EQ(Figure(name), "0") << name;
  }
  RawConnection raw = server().ConnectRaw();
  for (const Reply& token :
       DoAtOnce(raw, {Acquiring("job", "alice", {}, 200), AcquireWaiting("job", "bob")})) {
    EXPECT_TRUE(token.IsInteger()) << token;
  }
  EXPECT_GE(Number("wait_max_ms"), 190);
  EXPECT_LT(Number("wait_max_ms"), 10000);
  EXPECT_EQ(Figure("wait_p50_ms"), Figure("wait_max_ms"));
  EXPECT_EQ(Figure("hold_max_ms"), "200") << "as long as its lease";
  EXPECT_EQ(Figure("hold_p999_ms"), "200");
  for (int i = 0; i < 10; i++) {
    MustAcquire(client_, "quick", "alice");
    Do({"LOCK.RELEASE", "quick", "alice"});
  }
  EXPECT_LT(Number("hold_p50_ms"), 200);
  EXPECT_EQ(Figure("hold_max_ms"), "200");
  Reset();
  EXPECT_EQ(Figure("hold_max_ms"), "0");
  EXPECT_EQ(Figure("wait_max_ms"), "0");
}

TEST_F(InfoTest, WaitTimeIncludesWaitsThatTimedOut) {
  MustAcquire(client_, "job", "alice");
  EXPECT_TRUE(Do(AcquireWaiting("job", "bob", {.wait_ms = 50})).IsNil());
  EXPECT_GE(Number("wait_max_ms"), 50);
}

// --- Reset ------------------------------------------------------------------------------------

TEST_F(InfoTest, ResetClearsOnlyCounters) {
  MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob");
  const std::string token = Figure("last_token");
  Reset();
  EXPECT_EQ(Counted(), Figures{});
  EXPECT_EQ(Figure("locks"), "1");
  EXPECT_EQ(Figure("waiters"), "1");
  EXPECT_EQ(Figure("last_token"), token);
  EXPECT_EQ(Do({"CONFIG", "GET", "turnstile.reset-stats"}).Field("turnstile.reset-stats"),
            Reply::Str("no"));
  EXPECT_EQ(Do({"CONFIG", "SET", "turnstile.reset-stats", "no"}), Reply::Ok());
  Do({"LOCK.RELEASE", "job", "alice"});
  EXPECT_TRUE(bob.Read().IsInteger());
  EXPECT_EQ(Figure("acquired_after_wait"), "1") << "and goes on counting";
  EXPECT_EQ(Do({"CONFIG", "SET", "turnstile.reset-stats", "no"}), Reply::Ok());
  EXPECT_EQ(Figure("acquired_after_wait"), "1");
  // A loss that was not published before the reset is not counted after it.
  RawConnection raw = server().ConnectRaw();
  DoAtOnce(raw, {{"DEL", "job"}, {"CONFIG", "SET", "turnstile.reset-stats", "yes"}});
  EXPECT_EQ(Counted(), Figures{});
}

TEST_F(InfoTest, SlowlogExcludesWaitTime) {
  Do({"CONFIG", "SET", "slowlog-log-slower-than", "100000"});
  Do({"SLOWLOG", "RESET"});
  MustAcquire(client_, "job", "alice", 200);
  EXPECT_TRUE(Do(AcquireWaiting("job", "bob")).IsInteger());
  EXPECT_EQ(Do({"SLOWLOG", "LEN"}), Reply::Int(0));
  Do({"CONFIG", "SET", "slowlog-log-slower-than", "10000"});
}

}  // namespace
}  // namespace turnstile::testing
