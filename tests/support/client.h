// A RESP2 connection through hiredis. Since that is an independent implementation, what it
// understands is what users' clients understand. For RESP3, replies nested deeper than 7 and other
// wire-level checks see resp3.h.
//
//   Client client = server.Connect();
//   EXPECT_EQ(client.Do("LOCK.ACQUIRE", "job", owner, "PX", 1000), ...);
//
//   client.Send("LOCK.ACQUIRE", "job", "b", "PX", 1000, "WAIT", 5000);
//   EXPECT_FALSE(client.HasReply(Milliseconds{100}));  // still waiting
//   ... release ...
//   EXPECT_TRUE(client.Read().IsInteger());

#ifndef TURNSTILE_TESTS_SUPPORT_CLIENT_H_
#define TURNSTILE_TESTS_SUPPORT_CLIENT_H_

#include <concepts>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "support/eventually.h"
#include "support/reply.h"

struct redisContext;

namespace turnstile::testing {

using Command = std::vector<std::string>;

// An argument of a command: text, binary safe, or an integer (but neither a single character nor a
// bool, whose representation would be ambiguous).
template <typename T>
concept Argument = std::convertible_to<const T&, std::string_view> ||
    (std::integral<T> && !std::same_as<T, bool> && !std::same_as<T, char>);

template <Argument T>
std::string ArgumentText(const T& value) {
  if constexpr (std::integral<T>) {
    return std::to_string(value);
  } else {
    return std::string(std::string_view(value));
  }
}

class Client {
 public:
  // A failure to connect shows in connected() and in every later reply.
  explicit Client(int port, const std::string& host = "127.0.0.1");
  ~Client();
  Client(Client&&) noexcept;
  Client& operator=(Client&&) noexcept;

  bool connected() const;

  // Sends a command and reads its reply. A lost connection gives an error reply "DISCONNECTED:
  // ...". No reply in time gives "TIMEOUT: ..." and closes the connection, so that the late reply
  // can never be mistaken for that of the next command.
  Reply Do(const Command& command);
  template <Argument... Args>
  Reply Do(const Args&... args) {
    return Do(Command{ArgumentText(args)...});
  }

  // The two halves of Do, for pipelines and for blocking commands. If no reply arrives in time
  // ("TIMEOUT: ..."), Read leaves the connection unchanged: the reply may be read later.
  void Send(const Command& command);
  template <Argument... Args>
  void Send(const Args&... args) {
    Send(Command{ArgumentText(args)...});
  }
  Reply Read(Milliseconds within = kPatience);

  // Whether a reply (or the end of the connection) can be read, now or within the given time.
  bool HasReply(Milliseconds within = Milliseconds{0});

  // Closes the connection like a client that crashed: without QUIT.
  void Close();

 private:
  struct Deleter {
    void operator()(redisContext* context) const;
  };

  bool Fill(Clock::time_point deadline);  // true: `next_` or `lost_` is set
  void Lose(std::string why);

  std::unique_ptr<redisContext, Deleter> context_;
  std::string lost_;         // why the connection was lost
  std::vector<Reply> next_;  // at most one reply that HasReply() has read ahead
};

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_SUPPORT_CLIENT_H_
