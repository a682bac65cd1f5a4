// Who may be notified: the right to publish, at the call and later, and how many may stand in line.

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/notices.h"
#include "support/reply.h"
#include "support/server.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

using Owners = std::vector<std::string>;

const Reply kNoPermission =
    Reply::Error("NOPERM this user has no permissions to publish to the channel after NOTIFY");

// --- The right to publish ---------------------------------------------------------------------

class NotifyAccessTest : public SharedNotifyTest<NotifyAccessTest> {
 protected:
  // A connection of a new user with these rights and that to acquire locks.
  static Client ConnectAs(const std::string& user, Command rights) {
    rights.insert(rights.end(), {"~*", "+lock.acquire", "+eval", "+ping"});
    return server().ConnectAs(user, rights);
  }
  static Client ConnectPublisher() { return ConnectAs("worker", {"&*", "+publish"}); }

  void SetUser(const Command& rights) {
    Command command = {"ACL", "SETUSER", "worker"};
    command.insert(command.end(), rights.begin(), rights.end());
    EXPECT_EQ(client_.Do(command), Reply::Ok());
  }

  // The only entry of the server's log of refusals.
  Reply Refusal() {
    const std::vector<Reply> log = client_.Do("ACL", "LOG").elements;
    EXPECT_EQ(log.size(), 1U);
    return log.size() == 1 ? log[0] : Reply::Nil();
  }
};

TEST_F(NotifyAccessTest, CallNeedsRightToPublishToTheChannel) {
  Notices mine(server(), "mine:1");
  const std::vector<std::pair<const char*, Command>> users = {
      {"no command", {"&*"}},
      {"no channel", {"resetchannels", "+publish"}},
      {"another channel", {"resetchannels", "&other:*", "+publish"}},
      {"another command", {"&*", "+spublish", "+subscribe"}},
  };
  for (const bool busy : {false, true}) {
    if (busy) MustAcquire(client_, "job", "alice");
    for (const auto& [name, rights] : users) {
      SCOPED_TRACE(name);
      Client worker = ConnectAs("worker", rights);
      EXPECT_EQ(worker.Do(Notified("job", "bob", mine, "1")), kNoPermission);
      EXPECT_EQ(worker.Do(Acquiring("job", "bob", {"NOTIFY", "mine:1", "1"})), kNoPermission);
      EXPECT_TRUE(worker
                      .Do("EVAL",
                          "return redis.call('LOCK.ACQUIRE', 'job', 'bob', 'PX', 1, 'NOTIFY', "
                          "'mine:1', '1')",
                          1, "job")
                      .IsError("NOPERM"));
      EXPECT_EQ(HolderOf(client_, "job"), busy ? "alice" : "") << "nothing has changed";
      EXPECT_EQ(QueuedNow(client_), "0");
    }
  }
  Client worker = ConnectAs("worker", {"resetchannels", "&mine:*", "+publish"});
  EXPECT_EQ(worker.Do(Notified("job", "bob", mine, "1")), Reply::Int(0));
  EXPECT_EQ(Release("job", "alice"), Reply::Int(1));
  testing::MustBeGranted(client_, mine, "1", "job");
}

TEST_F(NotifyAccessTest, RightIsCheckedBeforeTheKey) {
  client_.Do("LPUSH", "list", "x");
  Client worker = ConnectAs("worker", {"&*"});
  EXPECT_EQ(worker.Do(Notified("list", "bob", notices_, "1")), kNoPermission);
  EXPECT_TRUE(worker.Do(Notified("list", "bob", notices_, "")).IsError("ERR the id after NOTIFY"))
      << "but after the syntax";
  EXPECT_TRUE(client_.Do(Notified("list", "bob", notices_, "1")).IsError("WRONGTYPE"));
}

TEST_F(NotifyAccessTest, RefusalIsLogged) {
  Client worker = ConnectAs("worker", {"resetchannels", "&other:*", "+publish"});
  EXPECT_EQ(client_.Do("ACL", "LOG", "RESET"), Reply::Ok());
  EXPECT_EQ(worker.Do(Acquiring("job", "bob", Notifying("mine:1", "1"))), kNoPermission);
  EXPECT_EQ(Refusal().Field("reason"), Reply::Str("channel"));
  EXPECT_EQ(Refusal().Field("object"), Reply::Str("mine:1"));
  EXPECT_EQ(Refusal().Field("username"), Reply::Str("worker"));

  worker = ConnectAs("worker", {"&*"});
  EXPECT_EQ(client_.Do("ACL", "LOG", "RESET"), Reply::Ok());
  EXPECT_EQ(worker.Do(Acquiring("job", "bob", Notifying("mine:1", "1"))), kNoPermission);
  EXPECT_EQ(Refusal().Field("reason"), Reply::Str("command"));
  EXPECT_EQ(client_.Do("ACL", "LOG", "RESET"), Reply::Ok());
}

// Nothing is published that the user could not publish, so its grant counts as undelivered.
TEST_F(NotifyAccessTest, GrantIsSkippedWhenRightIsGone) {
  for (const Command& taken : Commands{{"-publish"}, {"resetchannels"}, {"resetchannels", "&x"}}) {
    SCOPED_TRACE(taken[0]);
    StartAfresh();
    Client worker = ConnectPublisher();
    MustAcquire(client_, "job", "alice");
    EXPECT_EQ(worker.Do(Notified("job", "bob", notices_, "1")), Reply::Int(0));
    EXPECT_EQ(worker.Do(Notified("job", "carol", notices_, "2")), Reply::Int(0));
    MustQueue("job", "dave", "3");
    SetUser(taken);
    Release("job", "alice");
    MustBeGranted("3", "job");
    EXPECT_EQ(notices_.Until(client_), Texts{});
    EXPECT_EQ(Figure("undelivered"), "2");
  }
}

TEST_F(NotifyAccessTest, GrantIsSkippedWhenUserIsDeleted) {
  Client worker = ConnectPublisher();
  MustAcquire(client_, "job", "alice");
  EXPECT_EQ(worker.Do(Notified("job", "bob", notices_, "1")), Reply::Int(0));
  MustQueue("job", "carol", "2");
  EXPECT_EQ(client_.Do("ACL", "DELUSER", "worker"), Reply::Int(1));
  EXPECT_EQ(LineOf(client_, "job"), (Owners{"bob", "carol"})) << "nothing happens before his turn";
  Release("job", "alice");
  MustBeGranted("2", "job");
  EXPECT_EQ(notices_.Until(client_), Texts{});
}

// The rights of the user who asks last count.
TEST_F(NotifyAccessTest, NewerCallOfAnotherUserCounts) {
  Client worker = ConnectPublisher();
  MustAcquire(client_, "job", "alice");
  EXPECT_EQ(worker.Do(Notified("job", "bob", notices_, "1")), Reply::Int(0));
  MustQueue("job", "bob", "1");
  SetUser({"-publish"});
  Release("job", "alice");
  MustBeGranted("1", "job");
}

TEST_F(NotifyAccessTest, ErrorIsPublishedWhenRightToAcquireIsGone) {
  for (const Command& taken : Commands{{"-lock.acquire"}, {"resetkeys", "~other"}}) {
    SCOPED_TRACE(taken[0]);
    StartAfresh();
    Client worker = ConnectPublisher();
    MustAcquire(client_, "job", "alice");
    EXPECT_EQ(worker.Do(Notified("job", "bob", notices_, "1")), Reply::Int(0));
    MustQueue("job", "carol", "2");
    SetUser(taken);
    Release("job", "alice");
    EXPECT_EQ(notices_.Next(),
              "1 error NOPERM this user may no longer acquire the lock it waited for");
    MustBeGranted("2", "job");
  }
}

TEST_F(NotifyAccessTest, NothingElseIsPublishedEitherWhenRightIsGone) {
  Client worker = ConnectPublisher();
  MustAcquire(client_, "job", "alice");
  EXPECT_TRUE(worker.Do(Notified("held", "bob", notices_, "1")).integer > 0);
  EXPECT_EQ(worker.Do(Acquiring("job", "carol", Notifying(notices_.channel(), "2", 1500))),
            Reply::Int(0));
  EXPECT_EQ(worker.Do(Notified("job", "dave", notices_, "3")), Reply::Int(0));
  SetUser({"-publish"});
  client_.Do("DEL", "held");
  EXPECT_EQ(Release("job", "dave"), Reply::Int(1));
  EXPECT_TRUE(Eventually([&] { return QueuedNow(client_) == "0"; }));
  EXPECT_EQ(Figure("wait_timeouts"), "1");
  EXPECT_EQ(notices_.Until(client_), Texts{});
}

// The keys of a request are found by the word ALSO, whatever the options before it say.
TEST_F(NotifyAccessTest, OptionsDoNotHideKeysFromAccessChecks) {
  Client worker = server().ConnectAs("worker", {"~lock:*", "&*", "+lock.acquire", "+publish"});
  const Command harmless = {"TAG", "x", "WAIT", "0", "MAXLINE", "1", "MAXHOLD", "60000"};
  Command request = Acquiring("lock:1", "bob", harmless);
  request.insert(request.end(), {"NOTIFY", "c", "1", "ALSO", "1", "secret"});
  EXPECT_TRUE(worker.Do(request).IsError("NOPERM"));
  request.back() = "lock:2";
  EXPECT_GT(worker.Do(request).integer, 0);
  Command getkeys = request;
  getkeys.insert(getkeys.begin(), {"COMMAND", "GETKEYS"});
  EXPECT_EQ(client_.Do(getkeys).Texts(), (std::vector<std::string>{"lock:1", "lock:2"}));
}

// --- Limits -----------------------------------------------------------------------------------

class NotifyLimitsTest : public SharedNotifyTest<NotifyLimitsTest> {
 protected:
  ~NotifyLimitsTest() override {
    Set("max-queued", 100000);
    Set("max-waiters", 5000);
    Set("max-waiters-per-user", 0);
  }

  void Set(const std::string& name, int64_t value) {
    EXPECT_EQ(client_.Do("CONFIG", "SET", "turnstile." + name, value), Reply::Ok());
  }
};

TEST_F(NotifyLimitsTest, PlacesAreLimited) {
  Set("max-queued", 3);
  const Reply refused = Reply::Error(
      "WAITLIMIT this server allows at most 3 queue entries (turnstile.max-queued): try again "
      "later");
  MustAcquire(client_, "a", "alice");
  MustQueue("a", "bob", "1", {"ALSO", "1", "b"});  // two places
  EXPECT_EQ(client_.Do(Notified("a", "carol", notices_, "2", {"ALSO", "1", "c"})), refused);
  MustQueue("a", "carol", "2");
  EXPECT_EQ(client_.Do(Notified("a", "dave", notices_, "3")), refused);
  EXPECT_EQ(Figure("rejected_wait_limit"), "2");
  EXPECT_EQ(QueuedNow(client_), "3");
  EXPECT_EQ(LineOf(client_, "a"), (Owners{"bob", "carol"}));
  EXPECT_EQ(LineOf(client_, "c"), Owners{}) << "nothing of a refused call is left";

  // A call that replaces waits counts as if they were gone.
  MustQueue("a", "carol", "2");
  MustQueue("a", "bob", "1", {"ALSO", "1", "b"});
  MustQueue("a", "bob", "1");
  EXPECT_EQ(QueuedNow(client_), "2");
  EXPECT_EQ(client_.Do(Notified("a", "bob", notices_, "1", {"ALSO", "2", "b", "c"})), refused);
  EXPECT_EQ(LineOf(client_, "a"), (Owners{"carol", "bob"})) << "the older wait stays";
  MustQueue("a", "dave", "3");
  // One that leaves makes room.
  EXPECT_EQ(client_.Do(Notified("a", "erin", notices_, "4")), refused);
  EXPECT_EQ(Release("a", "dave"), Reply::Int(1));
  EXPECT_EQ(notices_.Next(), "3 " + kCancelledNotice);
  MustQueue("a", "erin", "4");
  // Locks that need not be waited for are not limited.
  EXPECT_GT(client_.Do(Notified("free", "erin", notices_, "5")).integer, 0);
  EXPECT_EQ(notices_.Until(client_), Texts{});
}

TEST_F(NotifyLimitsTest, BlockedClientsAndPlacesAreLimitedSeparately) {
  Set("max-queued", 1);
  Set("max-waiters", 1);
  MustAcquire(client_, "job", "alice");
  Waiter bob(server(), "job", "bob");
  MustQueue("job", "carol", "1");
  EXPECT_TRUE(client_.Do(AcquireWaiting("job", "dave"))
                  .IsError("WAITLIMIT this server allows at most 1 waiting clients "
                           "(turnstile.max-waiters): "));
  EXPECT_TRUE(client_.Do(Notified("job", "dave", notices_, "2"))
                  .IsError("WAITLIMIT this server allows at most 1 queue entries "));
  // Each kind may replace the other only where there is room for it.
  EXPECT_TRUE(client_.Do(Notified("job", "bob", notices_, "3"))
                  .IsError("WAITLIMIT this server allows at most 1 queue entries "));
  EXPECT_TRUE(client_.Do(AcquireWaiting("job", "carol"))
                  .IsError("WAITLIMIT this server allows at most 1 waiting clients "));
  EXPECT_EQ(LineOf(client_, "job"), (Owners{"bob", "carol"}));
  EXPECT_FALSE(bob.HasReply());
  EXPECT_EQ(notices_.Until(client_), Texts{});
  Set("max-queued", 0);
  EXPECT_TRUE(client_.Do(Notified("job", "dave", notices_, "2"))
                  .IsError("WAITLIMIT this server allows at most 0 queue entries "));
  Release("job", "alice");
  EXPECT_TRUE(bob.Read().IsInteger());
  Release("job", "bob");
  MustBeGranted("1", "job");
}

TEST_F(NotifyLimitsTest, WaitsOfOneUserAreLimitedWhateverTheirKind) {
  Client greedy = server().ConnectAs("greedy", {"~*", "&*", "+@all"});
  const std::string full =
      "WAITLIMIT this server allows at most 2 waiting requests of this user "
      "(turnstile.max-waiters-per-user): ";
  Set("max-waiters-per-user", 2);
  MustAcquire(client_, "job", "alice");
  EXPECT_EQ(greedy.Do(Notified("job", "bob", notices_, "1", {"ALSO", "2", "x", "y"})),
            Reply::Int(0))
      << "one wait, of three places";
  Waiter carol(server(), {"AUTH", "greedy", "secret"});
  carol.Wait("job", "carol");
  EXPECT_TRUE(greedy.Do(Notified("job", "dave", notices_, "2")).IsError(full));
  EXPECT_TRUE(greedy.Do(AcquireWaiting("job", "dave")).IsError(full));
  // Other users may wait, and who replaces a wait of its own does not count.
  MustQueue("job", "erin", "3");
  EXPECT_EQ(greedy.Do(Notified("job", "bob", notices_, "1", {"ALSO", "2", "x", "y"})),
            Reply::Int(0));
  EXPECT_EQ(greedy.Do(Notified("job", "carol", notices_, "2")), Reply::Int(0));
  EXPECT_TRUE(carol.Read().IsError("UNBLOCKED"));
  EXPECT_TRUE(greedy.Do(Notified("job", "dave", notices_, "4")).IsError(full));
  EXPECT_EQ(Release("job", "bob"), Reply::Int(1));
  EXPECT_EQ(notices_.Next(), "1 " + kCancelledNotice);
  EXPECT_EQ(greedy.Do(Notified("job", "dave", notices_, "4")), Reply::Int(0));
}

}  // namespace
}  // namespace turnstile::testing
