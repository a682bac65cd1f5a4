// Clients that wait in the queue of a lock.
//
//   class OrderTest : public SharedWaitingTest<OrderTest> {};
//
//   TEST_F(OrderTest, NextWaiterIsGranted) {
//     MustAcquire(client_, "job", "alice");
//     Waiter bob(server(), "job", "bob");  // returns when bob is queued
//     client_.Do("LOCK.RELEASE", "job", "alice");
//     EXPECT_TRUE(bob.Read().IsInteger());
//   }

#ifndef TURNSTILE_TESTS_SUPPORT_WAITING_H_
#define TURNSTILE_TESTS_SUPPORT_WAITING_H_

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "support/client.h"
#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/reply.h"
#include "support/resp3.h"
#include "support/server.h"

namespace turnstile::testing {

// How many clients wait on this server.
inline std::string WaitersNow(Client& client) {
  return InfoField(client, "turnstile", "turnstile_waiters");
}

// The address of a connection, as CLIENT LIST shows it.
inline std::string AddressOf(Client& client, int64_t id) {
  const std::string listed = client.Do("CLIENT", "LIST", "ID", id).text;
  const std::string field = " addr=";
  const size_t at = listed.find(field);
  if (at == std::string::npos) return "no connection " + std::to_string(id);
  const size_t begin = at + field.size();
  return listed.substr(begin, listed.find(' ', begin) - begin);
}

// How many clients wait for a lock.
inline int64_t WaitingFor(Client& client, std::string_view key) {
  const Reply info = client.Do("LOCK.INFO", key);
  return info.IsNil() ? 0 : info.Field("waiting").integer;
}

// The owners that wait for a lock, in order (the first 100).
inline std::vector<std::string> LineOf(Client& client, std::string_view key) {
  std::vector<std::string> owners;
  const Reply info = client.Do("LOCK.INFO", key);
  if (info.IsNil()) return owners;
  for (const Reply& place : info.Field("waiters").elements) {
    owners.push_back(place.Field("owner").text);
  }
  return owners;
}

// The owner that holds a lock, "" if nobody does.
inline std::string HolderOf(Client& client, std::string_view key) {
  const Reply info = client.Do("LOCK.INFO", key);
  if (info.IsNil()) return "";
  const Reply holders = info.Field("holders");
  return holders.elements.empty() ? "" : holders.elements[0].Field("owner").text;
}

// All owners that hold a lock, in the order of their tokens.
inline std::vector<std::string> HoldersOf(Client& client, std::string_view key) {
  std::vector<std::string> owners;
  const Reply info = client.Do("LOCK.INFO", key);
  if (info.IsNil()) return owners;
  for (const Reply& holder : info.Field("holders").elements) {
    owners.push_back(holder.Field("owner").text);
  }
  return owners;
}

// The entry of LOCK.INFO for one of the holders; null if `owner` is not one.
inline Reply HoldOf(Client& client, std::string_view key, std::string_view owner) {
  const Reply info = client.Do("LOCK.INFO", key);
  if (info.IsNil()) return Reply::Nil();
  for (const Reply& holder : info.Field("holders").elements) {
    if (holder.Field("owner").text == owner) return holder;
  }
  return Reply::Nil();
}

// In which mode a lock is held; "" if it is free.
inline std::string ModeOf(Client& client, std::string_view key) {
  const Reply info = client.Do("LOCK.INFO", key);
  return info.IsNil() ? "" : info.Field("mode").text;
}

// LOCK.ACQUIRE with further options.
inline Command Acquiring(std::string_view key, std::string_view owner, const Command& options,
                         int64_t lease_ms = kMinute) {
  Command command = {"LOCK.ACQUIRE", std::string(key), std::string(owner), "PX",
                     std::to_string(lease_ms)};
  command.insert(command.end(), options.begin(), options.end());
  return command;
}

// An ACQUIRE that must be granted at once. Returns the token; 0 after a failure.
template <typename Connection>
int64_t MustObtain(Connection& connection, const Command& acquire) {
  const Reply reply = connection.Do(acquire);
  EXPECT_TRUE(reply.IsInteger()) << acquire[2] << " asks for " << acquire[1] << ": " << reply;
  return reply.integer;
}

struct WaitOptions {
  int64_t wait_ms = kMinute;
  int64_t lease_ms = kMinute;
};

inline Command AcquireWaiting(std::string_view key, std::string_view owner,
                              WaitOptions options = {}) {
  return {"LOCK.ACQUIRE",
          std::string(key),
          std::string(owner),
          "PX",
          std::to_string(options.lease_ms),
          "WAIT",
          std::to_string(options.wait_ms)};
}

// Waits until the client with this id is blocked.
inline void AwaitBlocked(Client& client, int64_t id) {
  EXPECT_TRUE(Eventually([&] {
    return client.Do("CLIENT", "LIST", "ID", id).text.find(" flags=b ") != std::string::npos;
  })) << "client "
      << id << " does not wait: " << client.Do("CLIENT", "LIST", "ID", id);
}

// Waits until the connection with this id is closed and the server has handled that.
inline void AwaitGone(Client& client, int64_t id) {
  EXPECT_TRUE(Eventually([&] { return client.Do("CLIENT", "LIST", "ID", id).text.empty(); }))
      << client.Do("CLIENT", "LIST", "ID", id);
  client.Do("PING");  // in a later pass of the event loop
}

// A connection that waits for a lock.
class Waiter : public Client {
 public:
  // `login`, if given, is sent first: AUTH or SELECT.
  explicit Waiter(const Server& server, const Command& login = {})
      : Client(server.port()), port_(server.port()) {
    if (!login.empty()) {
      EXPECT_EQ(Do(login), Reply::Ok());
    }
    id_ = Do("CLIENT", "ID").integer;
  }
  Waiter(const Server& server, std::string_view key, std::string_view owner,
         WaitOptions options = {})
      : Waiter(server) {
    Wait(key, owner, options);
  }

  // Waits by an arbitrary command.
  static Waiter Asking(const Server& server, const Command& command) {
    Waiter waiter(server);
    waiter.Wait(command);
    return waiter;
  }

  // Requests the lock and returns when the server has queued this connection.
  void Wait(std::string_view key, std::string_view owner, WaitOptions options = {}) {
    Wait(AcquireWaiting(key, owner, options));
  }
  void Wait(const Command& command) {
    Send(command);
    Client observer(port_);
    AwaitBlocked(observer, id_);
  }

  int64_t id() const { return id_; }

 private:
  int port_;
  int64_t id_ = 0;
};

// The same at a lower level: a socket that can be closed in every way, and replies that are checked
// byte by byte.
class RawWaiter {
 public:
  explicit RawWaiter(const Server& server, const Command& login = {}) : port_(server.port()) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port_));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    EXPECT_EQ(connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
    if (!login.empty()) {
      EXPECT_EQ(connection.Do(login), Reply::Ok());
    }
    id_ = connection.Do("CLIENT", "ID").integer;
  }

  void Wait(std::string_view key, std::string_view owner, WaitOptions options = {}) {
    connection.SendCommand(AcquireWaiting(key, owner, options));
    Client observer(port_);
    AwaitBlocked(observer, id_);
  }

  // Half-closes the connection: replies can still be read.
  void HalfClose() const { EXPECT_EQ(shutdown(fd_, SHUT_WR), 0); }
  // Closes with RST instead of FIN.
  void Reset() {
    const linger at_once{1, 0};
    EXPECT_EQ(setsockopt(fd_, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once), 0);
    connection.Close();
  }

  int64_t id() const { return id_; }

 private:
  int port_;
  int fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  int64_t id_ = 0;

 public:
  RawConnection connection = RawConnection::FromFd(fd_);
};

// Sends commands in one write, so that the server runs them in one pass of its event loop: nothing
// that it defers happens between them.
inline void SendAtOnce(const RawConnection& connection, const Commands& commands) {
  std::string bytes;
  for (const Command& command : commands) bytes += EncodeCommand(command);
  connection.WriteRaw(bytes);
}

inline std::vector<Reply> ReadReplies(RawConnection& connection, size_t count) {
  std::vector<Reply> replies;
  for (size_t i = 0; i < count; i++) replies.push_back(connection.ReadReply());
  return replies;
}

inline std::vector<Reply> DoAtOnce(RawConnection& connection, const Commands& commands) {
  SendAtOnce(connection, commands);
  return ReadReplies(connection, commands.size());
}

// The commands of `passes`, padded so that the server handles each group in a later pass of its
// event loop than the previous one, and the second in the very next pass: a server reads 16 to 20
// KB of a new connection at first.
inline Commands InPasses(const std::vector<Commands>& passes) {
  const Command filler = {"EXISTS", std::string(size_t{24} * 1024, 'x')};
  Commands commands;
  for (size_t i = 0; i < passes.size(); i++) {
    if (i > 0) commands.insert(commands.end(), i == 1 ? 1 : 6, filler);
    commands.insert(commands.end(), passes[i].begin(), passes[i].end());
  }
  return commands;
}

// The first millisecond in which another owner can get a lock that was held until `end`. A hold is
// live through its last millisecond; but the active expiry of Redis 8 may remove a key as soon as
// that begins.
inline int64_t FirstFree(Client& client, int64_t end) {
  return EngineOf(client).starts_with("Redis 8.") ? end : end + 1;
}

// A script that runs for at least that long.
inline Command BusyScript(int64_t ms) {
  return {"EVAL", std::string(kLuaNow) + " local stop = now() + ARGV[1] while now() < stop do end",
          "0", std::to_string(ms)};
}

// Tests that share a server. Nobody waits on it when a test begins.
template <typename Suite>
class SharedWaitingTest : public SharedServerTest<Suite> {
 protected:
  SharedWaitingTest() { StartAfresh(); }

  void StartAfresh() {
    EXPECT_TRUE(Eventually([&] { return WaitersNow(client_) == "0"; })) << WaitersNow(client_);
    EXPECT_EQ(client_.Do("FLUSHALL"), Reply::Ok());  // also what the last were granted
  }

  using SharedServerTest<Suite>::client_;
};

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_SUPPORT_WAITING_H_
