// Races around the grant, provoked thousands of times; and queues under load.

#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <functional>
#include <iostream>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "support/eventually.h"
#include "support/lateness.h"
#include "support/lock_test.h"
#include "support/replication_stream.h"
#include "support/resp3.h"
#include "support/server.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

// --- A grant and the end of its client --------------------------------------------------------
//
// alice holds "job"; first and second wait for it. She releases, and around that time something
// happens to first. Whatever the order of events: if first received a token, it holds the lock,
// otherwise second does, and nobody has to wait for a lease to end (leases last a minute).

const Command kRelease = {"LOCK.RELEASE", "job", "alice"};
// The owner of the waiting call reacquires over another connection.
const Command kAskAgain = {"LOCK.ACQUIRE", "job", "first", "PX", "60000"};
const Command kTouch = {"LOCK.TOUCH", "job", "first", "PX", "60000"};

class RaceTest : public SharedWaitingTest<RaceTest> {
 protected:
  static constexpr int kRounds = 1000;

  // alice holds the lock, and first and second wait for it.
  void Prepare() {
    MustAcquire(client_, "job", "alice");
    if (first_ == nullptr) first_ = std::make_unique<RawWaiter>(server());
    first_->connection.SendCommand(AcquireWaiting("job", "first"));
    AwaitWaiting(1);
    second_.SendCommand(AcquireWaiting("job", "second"));
    AwaitWaiting(2);
  }

  Command Kill() const { return {"CLIENT", "KILL", "ID", std::to_string(first_->id())}; }
  Command Unblock(const std::string& how) const {
    return {"CLIENT", "UNBLOCK", std::to_string(first_->id()), how};
  }

  // What first finally received; nothing if its connection was closed without a reply.
  std::optional<Reply> ReplyToFirst() {
    if (first_->connection.Ends(Milliseconds{0})) return std::nullopt;
    try {
      return first_->connection.ReadReply();
    } catch (const ConnectionError&) {
      return std::nullopt;
    }
  }

  // Checks a round after it has settled. `token`: the one that first received by any call, or 0.
  void Judge(int64_t token) {
    if (token != 0) {
      delivered_++;
      ASSERT_EQ(HolderOf(client_, "job"), "first");
      if (token > 1) {
        ASSERT_EQ(client_.Do("LOCK.FENCE", "job"), Reply::Int(token));
      }
      ASSERT_FALSE(second_.Readable());
      ASSERT_EQ(client_.Do("LOCK.RELEASE", "job", "first"), Reply::Int(1));
    }
    const Reply reply = second_.ReadReply();
    ASSERT_TRUE(reply.IsInteger()) << reply;
    ASSERT_EQ(HolderOf(client_, "job"), "second");
    ASSERT_EQ(WaitersNow(client_), "0");
    ASSERT_EQ(client_.Do("LOCK.RELEASE", "job", "second"), Reply::Int(1));
  }

  // One round in which everything is sent over one connection. `closes`: first's connection will
  // close.
  void Round(const std::vector<Commands>& passes, bool closes) {
    const Commands commands = InPasses(passes);
    RawConnection driver = server().ConnectRaw();
    SendAtOnce(driver, commands);
    int64_t token = 0;
    for (const Command& command : commands) {
      const Reply reply = driver.ReadReply();
      ASSERT_FALSE(reply.IsError()) << reply;
      if (command == kAskAgain || command == kTouch) token = std::max(token, reply.integer);
    }
    const std::optional<Reply> reply = ReplyToFirst();
    ASSERT_TRUE(reply.has_value() || closes);
    if (reply.has_value()) {
      ASSERT_TRUE(reply->IsInteger() || reply->IsNil() || reply->IsError("UNBLOCKED ")) << *reply;
      if (reply->IsInteger()) {
        ASSERT_TRUE(token <= 1 || token == reply->integer) << token << " " << *reply;
        token = reply->integer;
      }
    }
    ASSERT_NO_FATAL_FAILURE(Judge(token));
    if (closes) {
      ASSERT_TRUE(first_->connection.Ends());
      first_.reset();
    } else {
      ASSERT_EQ(first_->connection.Do("PING"), Reply::Status("PONG")) << "one reply each";
    }
  }

  // How often a grant to first was taken back, according to the replication stream. Prints it, too.
  int CountTakenBack(const std::string& what) {
    int taken_back = 0;
    for (const Command& command : stream_.Until(client_)) {
      if (command == Command{"LOCK.FACT", "ENDED", "job", "first", "UNDELIVERED"}) taken_back++;
    }
    EXPECT_EQ(Undelivered(), undelivered_before_ + taken_back);
    const std::string log = server().Log();
    EXPECT_EQ(log.find("grants were taken back because their clients were gone before the reply; "
                       "the last lock was \"job\"") != std::string::npos,
              Undelivered() > 0);
    EXPECT_EQ(log.find("taken back"), log.rfind("taken back")) << "not for each of them";
    std::cout << what << ": first received " << delivered_ << " times, taken back " << taken_back
              << " times\n";
    return taken_back;
  }

  // 7.0 delivers a grant in the pass in which it is made; later servers do so in the next one.
  bool DeliversAtOnce() { return EngineOf(client_).starts_with("Redis 7.0."); }

  void AwaitWaiting(int64_t count) {
    ASSERT_TRUE(Eventually([&] { return WaitingFor(client_, "job") == count; }));
  }

  RawConnection second_ = server().ConnectRaw();
  std::unique_ptr<RawWaiter> first_;
  ReplicationStream stream_{server().port()};
  int64_t Undelivered() {
    return std::stoll(InfoField(client_, "turnstile", "turnstile_undelivered"));
  }

  int delivered_ = 0;
  int64_t undelivered_before_ = Undelivered();
};

TEST_F(RaceTest, WaiterKilledInPassOfRelease) {
  for (int i = 0; i < kRounds; i++) {
    ASSERT_NO_FATAL_FAILURE(Prepare());
    ASSERT_NO_FATAL_FAILURE(Round({{kRelease, Kill()}}, /*closes=*/true)) << "round " << i;
  }
  EXPECT_EQ(CountTakenBack("killed in the same pass"), 0);
  EXPECT_EQ(delivered_, 0);
}

TEST_F(RaceTest, WaiterUnblockedInPassOfRelease) {
  for (int i = 0; i < kRounds; i++) {
    ASSERT_NO_FATAL_FAILURE(Prepare());
    ASSERT_NO_FATAL_FAILURE(
        Round({{kRelease, Unblock(i % 2 == 0 ? "ERROR" : "TIMEOUT")}}, /*closes=*/false))
        << "round " << i;
  }
  EXPECT_EQ(CountTakenBack("unblocked in the same pass"), 0);
  EXPECT_EQ(delivered_, 0);
}

TEST_F(RaceTest, WaiterKilledInNextPass) {
  for (int i = 0; i < kRounds; i++) {
    ASSERT_NO_FATAL_FAILURE(Prepare());
    ASSERT_NO_FATAL_FAILURE(Round({{kRelease}, {Kill()}}, /*closes=*/true)) << "round " << i;
  }
  const int taken_back = CountTakenBack("killed in the next pass");
  EXPECT_EQ(taken_back > 0, !DeliversAtOnce());
  EXPECT_EQ(delivered_ + taken_back, kRounds);
}

TEST_F(RaceTest, WaiterUnblockedInNextPass) {
  for (int i = 0; i < kRounds; i++) {
    ASSERT_NO_FATAL_FAILURE(Prepare());
    ASSERT_NO_FATAL_FAILURE(
        Round({{kRelease}, {Unblock(i % 2 == 0 ? "ERROR" : "TIMEOUT")}}, /*closes=*/false))
        << "round " << i;
  }
  const int taken_back = CountTakenBack("unblocked in the next pass");
  EXPECT_EQ(taken_back > 0, !DeliversAtOnce());
}

// The owner learns of its hold by another call, before or after its waiting connection is killed
// but before the hold could be taken back: it keeps the hold.
TEST_F(RaceTest, GrantLearntByAnotherCallIsNotTakenBack) {
  for (int i = 0; i < kRounds; i++) {
    ASSERT_NO_FATAL_FAILURE(Prepare());
    const Command& call = i % 2 == 0 ? kAskAgain : kTouch;
    const Commands pass = i % 4 < 2 ? Commands{call, Kill()} : Commands{Kill(), call};
    ASSERT_NO_FATAL_FAILURE(Round({{kRelease}, pass}, /*closes=*/true)) << "round " << i;
  }
  EXPECT_EQ(CountTakenBack("learnt by another call"), 0);
  EXPECT_EQ(delivered_, kRounds);
}

// The owner calls when the hold has just been taken back: the reply is that of an ordinary call.
TEST_F(RaceTest, ReacquireAfterGrantWasTakenBackIsAnsweredNormally) {
  for (int i = 0; i < kRounds; i++) {
    ASSERT_NO_FATAL_FAILURE(Prepare());
    ASSERT_NO_FATAL_FAILURE(Round({{kRelease}, {Kill()}, {kAskAgain}}, /*closes=*/true))
        << "round " << i;
  }
  const int taken_back = CountTakenBack("asked too late");
  EXPECT_EQ(taken_back > 0, !DeliversAtOnce());
}

// The release and the disconnection come over different connections, unordered.
class UnorderedRaceTest : public RaceTest {
 protected:
  void Rounds(const std::string& what, const std::function<void()>& end, bool closes) {
    std::mt19937 random(7);  // NOLINT: reproducible
    for (int i = 0; i < kRounds; i++) {
      ASSERT_NO_FATAL_FAILURE(Prepare());
      const auto pause = std::chrono::microseconds{random() % 150};
      const bool release_first = random() % 2 == 0;
      if (release_first) driver_.SendCommand(kRelease);
      for (const auto until = Clock::now() + pause; Clock::now() < until;) {
      }
      end();
      if (!release_first) driver_.SendCommand(kRelease);
      ASSERT_EQ(driver_.ReadReply(), Reply::Int(1));
      std::optional<Reply> reply;
      if (first_->connection.Readable(kPatience)) reply = ReplyToFirst();
      ASSERT_TRUE(reply.has_value() || closes);
      if (reply.has_value()) {
        ASSERT_TRUE(reply->IsInteger() || reply->IsError("UNBLOCKED ")) << *reply;
      }
      ASSERT_NO_FATAL_FAILURE(Judge(reply.has_value() ? reply->integer : 0)) << "round " << i;
      if (closes) first_.reset();
    }
    CountTakenBack(what);
  }

  RawConnection driver_ = server().ConnectRaw();
  RawConnection other_ = server().ConnectRaw();
};

TEST_F(UnorderedRaceTest, WaiterKilledAroundRelease) {
  Rounds(
      "killed by another connection", [this] { other_.SendCommand(Kill()); }, /*closes=*/true);
}

TEST_F(UnorderedRaceTest, WaiterUnblockedAroundRelease) {
  Rounds(
      "unblocked by another connection", [this] { other_.SendCommand(Unblock("ERROR")); },
      /*closes=*/false);
}

// Half-closed, so that the test can still read what was sent before.
TEST_F(UnorderedRaceTest, WaiterHalfClosedAroundRelease) {
  Rounds(
      "half-closed", [this] { first_->HalfClose(); }, /*closes=*/true);
}

// Many clients, some of which are killed or unblocked at any time. Those that received a token use
// the lock and release it; the others start again. A single lost grant would stop everything,
// because leases outlast the test. Only a call that need not wait can lose its reply: a client that
// is killed in the pass in which it found the lock free. So a client that lost its connection
// releases.
TEST_F(RaceTest, NoGrantIsLostAmongManyClients) {
  constexpr int kClients = 12;
  constexpr int kGrants = 4000;
  std::atomic<int> grants = 0;
  std::atomic<int> ends = 0;
  std::atomic<int64_t> lost = 0;
  std::atomic<int> user = -1;
  std::atomic<bool> failed = false;
  std::array<std::atomic<int64_t>, kClients> ids{};
  const auto work = [&](int me) {
    int name = 0;
    while (grants < kGrants && !failed) {
      Client connection = server().Connect();
      ids.at(static_cast<size_t>(me)) = connection.Do("CLIENT", "ID").integer;
      while (grants < kGrants && !failed) {
        const std::string owner = std::to_string(me) + "." + std::to_string(name++);
        const Reply reply = connection.Do(AcquireWaiting("job", owner));
        if (reply.IsError("UNBLOCKED") || reply.IsNil()) {
          ends++;
          continue;
        }
        if (reply.IsError("DISCONNECTED")) {
          ends++;
          lost += server().Connect().Do("LOCK.RELEASE", "job", owner).integer;
          break;
        }
        int nobody = -1;
        if (!reply.IsInteger() || !user.compare_exchange_strong(nobody, me)) {
          ADD_FAILURE() << owner << " got " << reply << " while " << nobody << " uses the lock";
          failed = true;
          break;
        }
        grants++;
        user = -1;
        // Even if it was killed meanwhile.
        if (connection.Do("LOCK.RELEASE", "job", owner).IsError("DISCONNECTED")) {
          server().Connect().Do("LOCK.RELEASE", "job", owner);
          break;
        }
      }
    }
  };
  std::vector<std::thread> threads;
  for (int i = 0; i < kClients; i++) threads.emplace_back(work, i);
  std::mt19937 random(8);  // NOLINT: the threads make it random
  const auto deadline = Clock::now() + Milliseconds{120000};
  while (grants < kGrants && !failed) {
    failed = failed || Clock::now() > deadline;
    const int64_t id = ids.at(random() % kClients);
    switch (random() % 4) {
      case 0:
        client_.Do("CLIENT", "KILL", "ID", id);
        break;
      case 1:
        client_.Do("CLIENT", "UNBLOCK", id);
        break;
      default:
        client_.Do("CLIENT", "UNBLOCK", id, "ERROR");
    }
  }
  for (std::thread& thread : threads) thread.join();
  std::cout << grants << " grants, " << ends << " waits ended otherwise, " << lost
            << " answers were lost\n";
  EXPECT_GE(grants, kGrants) << "held by " << HolderOf(client_, "job");
  EXPECT_LT(lost, kGrants / 100);
  EXPECT_GT(ends, 100);
  EXPECT_TRUE(Eventually([&] { return WaitersNow(client_) == "0"; }));
  EXPECT_EQ(HolderOf(client_, "job"), "");
}

// --- Load -------------------------------------------------------------------------------------

class QueueLoadTest : public SharedWaitingTest<QueueLoadTest> {};

// A resource that detects concurrent use and tokens that do not rise.
class Resource {
 public:
  void Use(int user, int64_t token, std::chrono::microseconds time) {
    int nobody = -1;
    if (!user_.compare_exchange_strong(nobody, user)) {
      ADD_FAILURE() << user << " while " << nobody << " is here";
    }
    if (last_token_.exchange(token) >= token) ADD_FAILURE() << "tokens must rise";
    LetPass(time);
    user_ = -1;
  }

 private:
  std::atomic<int> user_ = -1;
  std::atomic<int64_t> last_token_ = 0;
};

TEST_F(QueueLoadTest, TenThousandHandOversAmong50Clients) {
  constexpr int kClients = 50;
  constexpr int kEach = 200;
  Resource resource;
  std::atomic<bool> failed = false;
  const auto work = [&](int me) {
    std::mt19937 random(static_cast<unsigned>(me));
    Client client = server().Connect();
    const std::string owner = "owner-" + std::to_string(me);
    for (int i = 0; i < kEach && !failed; i++) {
      const Reply token = client.Do(AcquireWaiting("job", owner));
      if (token.IsInteger()) {
        resource.Use(me, token.integer, std::chrono::microseconds{random() % 1001});
      }
      if (!token.IsInteger() || client.Do("LOCK.RELEASE", "job", owner) != Reply::Int(1)) {
        ADD_FAILURE() << owner << " got " << token;
        failed = true;
      }
    }
  };
  const auto start = Clock::now();
  std::vector<std::thread> threads;
  for (int i = 0; i < kClients; i++) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
  const std::chrono::duration<double> time = Clock::now() - start;
  std::cout << kClients * kEach << " hand-overs in " << time.count() << " s\n";
  EXPECT_EQ(WaitersNow(client_), "0");
  EXPECT_EQ(client_.Do("DBSIZE"), Reply::Int(0));
}

// A separate process that acquires the lock and is killed.
class Holder {
 public:
  Holder(int port, const std::string& owner, int64_t lease_ms) {
    std::array<int, 2> ends{};
    EXPECT_EQ(pipe(ends.data()), 0);
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      Client client(port);
      const int64_t token = client.Do("LOCK.ACQUIRE", "job", owner, "PX", lease_ms).integer;
      (void)!write(ends[1], &token, sizeof token);
      for (;;) pause();
    }
    close(ends[1]);
    EXPECT_EQ(read(ends[0], &token_, sizeof token_), ssize_t{sizeof token_});
    close(ends[0]);
  }
  ~Holder() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Holder(const Holder&) = delete;
  Holder& operator=(const Holder&) = delete;

  int64_t token() const { return token_; }

 private:
  pid_t pid_;
  int64_t token_ = 0;
};

TEST_F(QueueLoadTest, LockOfKilledHolderIsGrantedWhenLeaseEnds) {
  client_.Do("EVAL",
             "for i = 1, 100000 do redis.call('SET', 'filler:' .. i, 'x', 'PX', 3600000 + i) end",
             0);
  ASSERT_EQ(client_.Do("DBSIZE"), Reply::Int(100000));
  Lateness lateness(client_);
  RawConnection raw = server().ConnectRaw();
  for (int round = 0; round < 9; round++) {
    auto holder = std::make_unique<Holder>(server().port(), "dies", kMinute);
    ASSERT_GT(holder->token(), 0);
    Waiter bob(server(), "job", "bob");
    const int64_t token = holder->token();
    holder.reset();
    // The lease goes on, but not for a minute.
    const std::vector<Reply> shorter =
        DoAtOnce(raw, {{"LOCK.TOUCH", "job", "dies", "PX", "200"}, {"PEXPIRETIME", "job"}});
    ASSERT_EQ(shorter[0], Reply::Int(1));
    const int64_t end = shorter[1].integer;
    const Reply reply = bob.Read();
    const std::chrono::duration<double, std::milli> now =
        std::chrono::system_clock::now().time_since_epoch();
    ASSERT_GT(reply.integer, token) << reply;
    lateness.Add(now.count() - static_cast<double>(end));
    ASSERT_EQ(bob.Do("LOCK.RELEASE", "job", "bob"), Reply::Int(1));
  }
  EXPECT_TRUE(lateness.IsLessThanCron("locks of a killed holder"));
  EXPECT_GT(lateness.least(), 0) << "a hold lives through its last millisecond";
}

// --- Memory -----------------------------------------------------------------------------------

TEST(WaiterMemoryTest, MemoryOfWaitersIsFreed) {
  Server server;
  Client client = server.Connect();
  const auto used = [&] { return std::stoll(InfoField(client, "memory", "used_memory")); };
  const auto back_at = [&](int64_t start) {
    return Eventually([&] { return used() < start + 300'000; }, Milliseconds{30000});
  };
  constexpr int kWaiters = 300;  // 7.0 frees 50 every 100 ms
  const auto grow = [&](const std::function<Command(int)>& command) {
    const int64_t start = used();
    std::vector<Client> clients;
    for (int i = 0; i < kWaiters; i++) {
      clients.push_back(server.Connect());
      clients.back().Send(command(i));
    }
    EXPECT_TRUE(Eventually([&] {
      return InfoField(client, "clients", "blocked_clients") == std::to_string(kWaiters);
    }));
    const int64_t each = (used() - start) / kWaiters;
    for (Client& waiter : clients) waiter.Close();
    EXPECT_TRUE(
        Eventually([&] { return InfoField(client, "clients", "connected_clients") == "1"; }));
    EXPECT_TRUE(back_at(start)) << "from " << start << " to " << used();
    return each;
  };
  MustAcquire(client, "job", "alice", 10 * kMinute);
  for (int i = 0; i < kWaiters; i++) MustAcquire(client, std::to_string(i), "alice", 10 * kMinute);
  const auto one_line = [](int i) { return AcquireWaiting("job", std::to_string(i)); };
  const auto many_lines = [](int i) {
    return AcquireWaiting(std::to_string(i), std::to_string(i));
  };
  grow(one_line);  // a first time, for what the server allocates permanently
  const int64_t start = used();
  const int64_t blpop = grow([](int i) {
    return Command{"BLPOP", "list" + std::to_string(i), "0"};
  });
  const int64_t one = grow(one_line);
  const int64_t many = grow(many_lines);
  std::cout << "bytes for each waiting client: " << one << " in one queue, " << many
            << " in lines of their own; BLPOP " << blpop << '\n';
  EXPECT_TRUE(back_at(start)) << "from " << start << " to " << used();
}

}  // namespace
}  // namespace turnstile::testing
