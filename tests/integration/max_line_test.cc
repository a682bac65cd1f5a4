// MAXLINE: a request that does not join a line that is long already.

#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

#include "support/lock_test.h"
#include "support/notices.h"
#include "support/reply.h"
#include "support/server.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

using Owners = std::vector<std::string>;

Command AtMost(int line, const Command& options = {}) {
  Command all = {"WAIT", "60000", "MAXLINE", std::to_string(line)};
  all.insert(all.end(), options.begin(), options.end());
  return all;
}

class MaxLineTest : public SharedNotifyTest<MaxLineTest> {
 protected:
  Reply Ask(std::string_view owner, const Command& options, std::string_view key = "job") {
    return client_.Do(Acquiring(key, owner, options));
  }
};

TEST_F(MaxLineTest, FullLineIsAnsweredWithNullAtOnce) {
  MustAcquire(client_, "job", "alice");
  Waiter bob = Waiter::Asking(server(), Acquiring("job", "bob", AtMost(1)));
  EXPECT_EQ(Ask("carol", AtMost(1)), Reply::Nil());
  EXPECT_EQ(client_.Do(Notified("job", "carol", notices_, "1", {"MAXLINE", "1"})), Reply::Nil());
  EXPECT_EQ(Figure("rejected_line_full"), "2");
  EXPECT_EQ(Figure("rejected"), "0") << "counted once";
  EXPECT_EQ(Figure("waits"), "1");
  EXPECT_EQ(LineOf(client_, "job"), Owners{"bob"});
  // Both kinds of waiters count.
  EXPECT_EQ(client_.Do(Notified("job", "carol", notices_, "1", {"MAXLINE", "2"})), Reply::Int(0));
  EXPECT_EQ(Ask("dave", AtMost(2)), Reply::Nil());
  MustQueue("job", "dave", "2", {"MAXLINE", "3"});
  EXPECT_EQ(LineOf(client_, "job"), (Owners{"bob", "carol", "dave"}));
  // Others join as they like.
  Waiter erin(server(), "job", "erin");
  // A place that becomes free can be taken.
  EXPECT_EQ(Release("job", "carol"), Reply::Int(1));
  EXPECT_EQ(notices_.Next(), "1 " + kCancelledNotice);
  MustQueue("job", "frank", "3", {"MAXLINE", "4"});
}

TEST_F(MaxLineTest, FreeLockIsGrantedWhateverTheLine) {
  EXPECT_TRUE(Ask("alice", AtMost(1)).IsInteger());
  MustQueue("job", "bob", "1");
  EXPECT_TRUE(Ask("alice", AtMost(1)).IsInteger()) << "she holds it";
  EXPECT_EQ(Figure("rejected_line_full"), "0");
}

// Readers that a reader ahead lets in do not wait.
TEST_F(MaxLineTest, OnlyCallsThatWouldWaitAreJudged) {
  MustObtain(client_, Acquiring("job", "alice", {"LIMIT", "4"}));
  MustObtain(client_, Acquiring("job", "bob", {"LIMIT", "4", "WEIGHT", "2"}));
  EXPECT_TRUE(Ask("carol", AtMost(1, {"LIMIT", "4"})).IsInteger());
  MustQueue("job", "dave", "1", {"LIMIT", "4"});
  EXPECT_EQ(Ask("erin", AtMost(1, {"LIMIT", "4"})), Reply::Nil());
}

TEST_F(MaxLineTest, WaitOfZeroIsOneTry) {
  MustAcquire(client_, "job", "alice");
  EXPECT_EQ(Ask("bob", {"WAIT", "0", "MAXLINE", "1"}), Reply::Nil());
  EXPECT_EQ(Figure("rejected"), "1");
  EXPECT_EQ(Figure("rejected_line_full"), "0");
}

// Taking over one's own place is not joining.
TEST_F(MaxLineTest, OwnPlaceIsTakenOver) {
  MustAcquire(client_, "job", "alice");
  MustQueue("job", "bob", "1", {"MAXLINE", "1"});
  MustQueue("job", "carol", "2");
  MustQueue("job", "dave", "3");
  MustQueue("job", "bob", "1", {"MAXLINE", "1"});
  EXPECT_EQ(LineOf(client_, "job"), (Owners{"bob", "carol", "dave"}));
  Waiter carol = Waiter::Asking(server(), Acquiring("job", "carol", AtMost(1)));
  EXPECT_EQ(notices_.Next(), "2 " + kSupersededNotice);
  EXPECT_EQ(LineOf(client_, "job"), (Owners{"bob", "carol", "dave"}));
  EXPECT_EQ(Figure("rejected_line_full"), "0");
}

// With another mode it gives up its place and joins the end: those who are then before it count.
TEST_F(MaxLineTest, OwnOlderWaitDoesNotCountAndStaysIfRefused) {
  MustAcquire(client_, "job", "alice");
  MustQueue("job", "bob", "1");
  MustQueue("job", "bob", "1", {"MAXLINE", "1", "SHARED"});
  MustQueue("job", "carol", "2");
  EXPECT_EQ(client_.Do(Notified("job", "bob", notices_, "1", {"MAXLINE", "1"})), Reply::Nil());
  EXPECT_EQ(LineOf(client_, "job"), (Owners{"bob", "carol"})) << "the older wait stays";
  EXPECT_EQ(client_.Do("LOCK.INFO", "job").Field("waiters").elements.at(0).Field("mode"),
            Reply::Str("shared"));
  EXPECT_EQ(notices_.Until(client_), Texts{});
  MustQueue("job", "bob", "1", {"MAXLINE", "2"});
  EXPECT_EQ(LineOf(client_, "job"), (Owners{"carol", "bob"}));
}

TEST_F(MaxLineTest, EveryLineOfASetCounts) {
  MustAcquire(client_, "a", "alice");
  MustAcquire(client_, "b", "alice");
  MustQueue("b", "bob", "1");
  EXPECT_EQ(Ask("carol", AtMost(1, {"ALSO", "1", "b"}), "a"), Reply::Nil());
  EXPECT_EQ(Ask("carol", AtMost(1, {"ALSO", "2", "b", "free"}), "a"), Reply::Nil());
  EXPECT_EQ(LineOf(client_, "a"), Owners{});
  EXPECT_EQ(LineOf(client_, "free"), Owners{});
  EXPECT_EQ(Figure("rejected_line_full"), "2");
  MustQueue("a", "carol", "2", {"MAXLINE", "2", "ALSO", "1", "b"});
  EXPECT_EQ(Ask("dave", AtMost(1), "a"), Reply::Nil()) << "she waits for it too";
  MustQueue("a", "carol", "2", {"MAXLINE", "1", "ALSO", "1", "b"});
  EXPECT_EQ(LineOf(client_, "b"), (Owners{"bob", "carol"}));
}

TEST_F(MaxLineTest, WaitIsOneTryInTransactionsAndScripts) {
  MustAcquire(client_, "job", "alice");
  client_.Do("MULTI");
  client_.Do(Acquiring("job", "bob", AtMost(1)));
  client_.Do(Notified("job", "carol", notices_, "1", {"MAXLINE", "1"}));
  client_.Do(Notified("job", "dave", notices_, "2", {"MAXLINE", "1"}));
  EXPECT_EQ(client_.Do("EXEC"), Reply::Array({Reply::Nil(), Reply::Int(0), Reply::Nil()}));
  EXPECT_EQ(Figure("rejected"), "1") << "one try";
  EXPECT_EQ(Figure("rejected_line_full"), "1") << "a line that is full";
  EXPECT_EQ(client_.Do("EVAL",
                       "return redis.call('LOCK.ACQUIRE', 'job', 'dave', 'PX', 1, 'WAIT', 9, "
                       "'MAXLINE', 1, 'NOTIFY', 'c', '1')",
                       1, "job"),
            Reply::Nil());
  EXPECT_EQ(Figure("rejected_line_full"), "2");
}

// It is judged before other reasons not to wait.
TEST_F(MaxLineTest, FullLineComesBeforeWaitLimitAndDeadlock) {
  MustAcquire(client_, "a", "alice");
  MustAcquire(client_, "b", "bob");
  MustQueue("b", "alice", "1");
  EXPECT_TRUE(Ask("bob", AtMost(1), "a").IsError("DEADLOCK"));
  MustQueue("a", "carol", "2");
  EXPECT_EQ(Ask("bob", AtMost(1), "a"), Reply::Nil());
  EXPECT_EQ(client_.Do("CONFIG", "SET", "turnstile.max-queued", 2), Reply::Ok());
  EXPECT_TRUE(client_.Do(Notified("a", "dave", notices_, "3")).IsError("WAITLIMIT"));
  EXPECT_EQ(client_.Do(Notified("a", "dave", notices_, "3", {"MAXLINE", "1"})), Reply::Nil());
  EXPECT_EQ(client_.Do("CONFIG", "SET", "turnstile.max-queued", 100000), Reply::Ok());
}

TEST_F(MaxLineTest, LargestLineWorks) {
  MustAcquire(client_, "job", "alice");
  MustQueue("job", "bob", "1", {"MAXLINE", "10000000"});
}

}  // namespace
}  // namespace turnstile::testing
