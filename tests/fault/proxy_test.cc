#include "fault/proxy.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "support/client.h"
#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/reply.h"
#include "support/resp3.h"

namespace turnstile::fault {
namespace {

using testing::Client;
using testing::Clock;
using testing::Eventually;
using testing::InfoField;
using testing::Milliseconds;
using testing::RawConnection;
using testing::Reply;
using testing::SharedServerTest;

const Reply kPong = Reply::Status("PONG");

class ProxyTest : public SharedServerTest<ProxyTest> {
 protected:
  int64_t Value(const std::string& key) {
    const Reply reply = client_.Do("GET", key);
    return reply.IsString() ? std::stoll(reply.text) : 0;
  }

  // The server has no connection but that of the test itself.
  bool AllGone() {
    return Eventually([this] { return InfoField(client_, "clients", "connected_clients") == "1"; });
  }

  Proxy proxy_{server().port()};
};

TEST_F(ProxyTest, PassesOnWhatComesInItsOrder) {
  Client through(proxy_.port());
  EXPECT_EQ(through.Do("PING"), kPong);
  for (int i = 0; i < 1000; i++) through.Send("RPUSH", "list", i);
  for (int i = 0; i < 1000; i++) EXPECT_EQ(through.Read(), Reply::Int(i + 1));
  const std::vector<std::string> list = through.Do("LRANGE", "list", 0, -1).Texts();
  ASSERT_EQ(list.size(), 1000U);
  for (size_t i = 0; i < list.size(); i++) EXPECT_EQ(list[i], std::to_string(i));
  EXPECT_EQ(proxy_.stats().connections, 1);
  EXPECT_EQ(proxy_.stats().open, 1);
  EXPECT_EQ(proxy_.stats().replies_swallowed, 0);
}

TEST_F(ProxyTest, PassesOnMoreThanItHoldsBack) {
  RawConnection through(proxy_.port());
  const std::string large(8 << 20, 'x');
  EXPECT_EQ(through.Do("SET", "large", large), Reply::Ok());
  // Nobody reads: the replies fill the proxy and every buffer on the way.
  for (int i = 0; i < 4; i++) through.SendCommand({"GET", "large"});
  Client other(proxy_.port());
  EXPECT_EQ(other.Do("PING"), kPong);
  for (int i = 0; i < 4; i++) EXPECT_TRUE(through.ReadReply() == Reply::Str(large));
}

TEST_F(ProxyTest, ServesManyConnections) {
  std::vector<Client> many;
  for (int i = 0; i < 300; i++) many.emplace_back(proxy_.port());
  for (Client& one : many) one.Send("INCR", "count");
  for (Client& one : many) EXPECT_TRUE(one.Read().IsInteger());
  EXPECT_EQ(Value("count"), 300);
  many.clear();
  EXPECT_TRUE(Eventually([this] { return proxy_.stats().open == 0; }));
  EXPECT_TRUE(AllGone());
}

TEST_F(ProxyTest, PassesOnTheEndOfAServer) {
  Client through(proxy_.port());
  const Reply id = through.Do("CLIENT", "ID");
  EXPECT_EQ(client_.Do("CLIENT", "KILL", "ID", id.integer), Reply::Int(1));
  EXPECT_TRUE(through.Do("PING").IsError("DISCONNECTED:"));
  const Proxy nowhere(1);
  EXPECT_TRUE(Client(nowhere.port()).Do("PING").IsError("DISCONNECTED:"));
}

TEST_F(ProxyTest, HoldsBackReplies) {
  Client through(proxy_.port());
  proxy_.SetReplyDelay(Milliseconds{300});
  const auto start = Clock::now();
  through.Send("INCR", "count");
  EXPECT_TRUE(Eventually([this] { return Value("count") == 1; }));
  through.Send("INCR", "count");
  EXPECT_TRUE(Eventually([this] { return Value("count") == 2; }));
  proxy_.SetReplyDelay(Milliseconds{0});
  through.Send("INCR", "count");  // its reply does not overtake the others
  for (int i = 1; i <= 3; i++) EXPECT_EQ(through.Read(), Reply::Int(i));
  EXPECT_GE(Clock::now() - start, Milliseconds{300});
}

TEST_F(ProxyTest, HoldsBackRequests) {
  Client through(proxy_.port());
  proxy_.SetRequestDelay(Milliseconds{200});
  const auto start = Clock::now();
  through.Send("INCR", "count");
  EXPECT_EQ(through.Read(), Reply::Int(1));
  EXPECT_GE(Clock::now() - start, Milliseconds{200});
  // What is on its way arrives though its sender is gone.
  through.Send("INCR", "count");
  through.Close();
  EXPECT_TRUE(Eventually([this] { return Value("count") == 2; }));
}

TEST_F(ProxyTest, DropsReplies) {
  Client through(proxy_.port());
  EXPECT_EQ(through.Do("INCR", "count"), Reply::Int(1));
  proxy_.DropReplies(true);
  for (int i = 0; i < 3; i++) through.Send("INCR", "count");
  EXPECT_TRUE(Eventually([this] { return Value("count") == 4; }));
  EXPECT_TRUE(Eventually([this] { return proxy_.stats().replies_swallowed > 0; }));
  EXPECT_FALSE(through.HasReply(Milliseconds{50}));
  Client other(proxy_.port());
  proxy_.DropReplies(false);
  // The stream of the first has a hole: it must not go on. That of the other has none.
  EXPECT_TRUE(through.Read().IsError("DISCONNECTED:"));
  EXPECT_EQ(other.Do("PING"), kPong);
}

TEST_F(ProxyTest, LosesOneReplyOfOneConnection) {
  EXPECT_FALSE(proxy_.LoseNextReply(0));
  Client first(proxy_.port());
  EXPECT_EQ(first.Do("PING"), kPong);
  Client second(proxy_.port());
  EXPECT_EQ(second.Do("PING"), kPong);
  EXPECT_TRUE(proxy_.LoseNextReply(3));
  EXPECT_EQ(first.Do("INCR", "count"), Reply::Int(1));
  EXPECT_TRUE(second.Do("INCR", "count").IsError("DISCONNECTED:"));
  EXPECT_EQ(Value("count"), 2);
  EXPECT_EQ(first.Do("INCR", "count"), Reply::Int(3));
  EXPECT_EQ(proxy_.stats().replies_swallowed, 1);
  EXPECT_EQ(proxy_.stats().resets, 1);
}

TEST_F(ProxyTest, CutsAndHeals) {
  Client through(proxy_.port());
  EXPECT_EQ(through.Do("PING"), kPong);
  proxy_.Cut();
  EXPECT_EQ(proxy_.stats().open, 0);
  EXPECT_TRUE(through.Do("PING").IsError("DISCONNECTED:"));
  EXPECT_TRUE(Client(proxy_.port()).Do("PING").IsError("DISCONNECTED:"));
  EXPECT_TRUE(AllGone());
  proxy_.Heal();
  EXPECT_EQ(Client(proxy_.port()).Do("PING"), kPong);
}

TEST_F(ProxyTest, HoldsBackAllAndGivesItBack) {
  Client through(proxy_.port());
  EXPECT_EQ(through.Do("PING"), kPong);
  proxy_.Blackhole(true);
  through.Send("INCR", "count");
  Client late(proxy_.port());
  late.Send("INCR", "late");
  Client gone(proxy_.port());
  gone.Send("INCR", "late");
  gone.Close();
  EXPECT_FALSE(through.HasReply(Milliseconds{100}));
  EXPECT_EQ(Value("count"), 0);
  EXPECT_EQ(Value("late"), 0);
  proxy_.Blackhole(false);
  EXPECT_EQ(through.Read(), Reply::Int(1));
  EXPECT_TRUE(late.Read().IsInteger());
  EXPECT_TRUE(Eventually([this] { return Value("late") == 2; }));
  EXPECT_TRUE(Eventually([this] { return proxy_.stats().open == 2; }));
}

TEST_F(ProxyTest, CutsInABlackholeToo) {
  Client through(proxy_.port());
  EXPECT_EQ(through.Do("PING"), kPong);
  proxy_.Blackhole(true);
  Client late(proxy_.port());
  proxy_.Cut();
  EXPECT_TRUE(through.Do("PING").IsError("DISCONNECTED:"));
  EXPECT_TRUE(late.Do("PING").IsError("DISCONNECTED:"));
  proxy_.Heal();
  late = Client(proxy_.port());
  late.Send("PING");
  EXPECT_FALSE(late.HasReply(Milliseconds{50}));
  proxy_.Blackhole(false);
  EXPECT_EQ(late.Read(), kPong);
}

TEST_F(ProxyTest, ALostGrantIsGotAgain) {
  Client through(proxy_.port());
  EXPECT_EQ(through.Do("PING"), kPong);
  EXPECT_TRUE(proxy_.LoseNextReply(0));
  EXPECT_TRUE(through.Do("LOCK.ACQUIRE", "job", "alice", "PX", 60000).IsError("DISCONNECTED:"));
  const Reply token = client_.Do("LOCK.FENCE", "job");
  EXPECT_TRUE(token.IsInteger());
  EXPECT_EQ(Client(proxy_.port()).Do("LOCK.ACQUIRE", "job", "alice", "PX", 60000), token);
}

}  // namespace
}  // namespace turnstile::fault
