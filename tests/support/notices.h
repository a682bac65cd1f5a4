// What LOCK.ACQUIRE with NOTIFY publishes, as a subscriber receives it.
//
//   class NotifyTest : public SharedNotifyTest<NotifyTest> {};
//
//   TEST_F(NotifyTest, NextInLineIsToldOfItsGrant) {
//     MustAcquire(client_, "job", "alice");
//     EXPECT_EQ(client_.Do(Notified("job", "bob", notices_, "1")), Reply::Int(0));
//     client_.Do("LOCK.RELEASE", "job", "alice");
//     EXPECT_GT(MustBeGranted("1", "job"), 0);
//     EXPECT_EQ(notices_.Until(client_), Texts{}) << "nothing more";
//   }

#ifndef TURNSTILE_TESTS_SUPPORT_NOTICES_H_
#define TURNSTILE_TESTS_SUPPORT_NOTICES_H_

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/client.h"
#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/reply.h"
#include "support/server.h"
#include "support/waiting.h"

namespace turnstile::testing {

// How many places of waits by NOTIFY there are on this server.
inline std::string QueuedNow(Client& client) {
  return InfoField(client, "turnstile", "turnstile_queued");
}

// A connection that is subscribed to one channel.
class Notices {
 public:
  using Texts = std::vector<std::string>;

  // To a channel that no other test uses.
  explicit Notices(const Server& server)
      : Notices(server, "channel " + std::to_string(++channels_)) {}
  // `subscribe`: SUBSCRIBE, SSUBSCRIBE, or PSUBSCRIBE, for which `channel` is a pattern.
  Notices(const Server& server, std::string channel, std::string_view subscribe = "SUBSCRIBE")
      : client_(server.Connect()), channel_(std::move(channel)) {
    id_ = client_.Do("CLIENT", "ID").integer;
    EXPECT_TRUE(client_.Do(subscribe, channel_).IsArray());
    EXPECT_TRUE(client_.Do("SUBSCRIBE", mark_).IsArray());
  }

  const std::string& channel() const { return channel_; }

  // The next message. None in time is a failure, which the text names.
  std::string Next(Milliseconds within = kPatience) {
    while (true) {
      const Texts message = client_.Read(within).Texts();
      if (message.size() < 3) return "no message";
      if (message[1] != mark_) return message.back();
    }
  }

  // All further messages, including those caused by earlier commands of `client`.
  Texts Until(Client& client) {
    // What a command causes is published before the next command, at the latest in the next pass of
    // the event loop.
    client.Do("PING");
    EXPECT_EQ(client.Do("PUBLISH", mark_, "now"), Reply::Int(1));
    Texts messages;
    while (true) {
      const Texts message = client_.Read().Texts();
      if (message.size() < 3) {
        ADD_FAILURE() << "no message";
        return messages;
      }
      if (message[1] == mark_) return messages;
      messages.push_back(message.back());
    }
  }

  // Whether a message has arrived, or arrives within the given time.
  bool HasNext(Milliseconds within = Milliseconds{0}) { return client_.HasReply(within); }

  // Ends the subscription. Returns when the server has noticed.
  void Close(Client& client) {
    client_.Close();
    AwaitGone(client, id_);
  }

 private:
  static inline int channels_ = 0;

  Client client_;
  std::string channel_;
  std::string mark_ = "the mark of subscriber " + std::to_string(++channels_);
  int64_t id_ = 0;
};

using Texts = Notices::Texts;

// The options of a request that waits for at most `wait_ms` and is notified.
inline Command Notifying(const std::string& channel, const std::string& id,
                         int64_t wait_ms = kMinute) {
  return {"WAIT", std::to_string(wait_ms), "NOTIFY", channel, id};
}

// LOCK.ACQUIRE that is to be notified, with further options.
inline Command Notified(std::string_view key, std::string_view owner, const Notices& to,
                        const std::string& id, const Command& options = {}) {
  Command all = Notifying(to.channel(), id);
  all.insert(all.end(), options.begin(), options.end());
  return Acquiring(key, owner, all);
}

inline std::string GrantedNotice(const std::string& id, int64_t token, const std::string& key) {
  return id + " granted " + std::to_string(token) + " " + key;
}

inline std::string LostNotice(const std::string& id, int64_t token, const std::string& reason,
                              const std::string& key) {
  return id + " lost " + std::to_string(token) + " " + reason + " " + key;
}

inline const std::string kSupersededNotice =
    "error UNBLOCKED replaced by a newer call of the same owner";
inline const std::string kCancelledNotice =
    "error UNBLOCKED cancelled by a LOCK.RELEASE of the same owner";

// The message says that `key` was granted, and somebody holds it under that token. Returns the
// token; 0 after a failure.
inline int64_t MustBeGranted(Client& client, Notices& notices, const std::string& id,
                             const std::string& key) {
  const std::string message = notices.Next();
  const std::string prefix = id + " granted ";
  EXPECT_TRUE(message.starts_with(prefix)) << message;
  if (!message.starts_with(prefix)) return 0;
  const int64_t token = std::stoll(message.substr(prefix.size()));
  EXPECT_EQ(message, GrantedNotice(id, token, key));
  EXPECT_EQ(client.Do("LOCK.FENCE", key, token), Reply::Int(1)) << message;
  return token;
}

// Tests that share a server. Nobody waits on it when a test begins, not by NOTIFY either.
template <typename Suite>
class SharedNotifyTest : public SharedServerTest<Suite> {
 protected:
  SharedNotifyTest() { StartAfresh(); }

  void StartAfresh() {
    // A flush serves those who still wait.
    EXPECT_TRUE(Eventually([&] {
      client_.Do("FLUSHALL");
      return WaitersNow(client_) == "0" && QueuedNow(client_) == "0" &&
             client_.Do("DBSIZE") == Reply::Int(0);
    }));
    EXPECT_EQ(client_.Do("CONFIG", "SET", "turnstile.reset-stats", "yes"), Reply::Ok());
    notices_.Until(client_);
  }

  // A request that must join the line.
  void MustQueue(const Command& request) {
    const Reply reply = client_.Do(request);
    EXPECT_EQ(reply, Reply::Int(0)) << request[2] << " asks for " << request[1];
  }
  void MustQueue(std::string_view key, std::string_view owner, const std::string& id,
                 const Command& options = {}) {
    MustQueue(Notified(key, owner, notices_, id, options));
  }

  int64_t MustBeGranted(const std::string& id, const std::string& key) {
    return testing::MustBeGranted(client_, notices_, id, key);
  }

  Reply Release(std::string_view key, std::string_view owner) {
    return client_.Do("LOCK.RELEASE", key, owner);
  }

  std::string Figure(const std::string& name) {
    return InfoField(client_, "turnstile", "turnstile_" + name);
  }

  using SharedServerTest<Suite>::client_;
  Notices notices_{SharedServerTest<Suite>::server()};
};

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_SUPPORT_NOTICES_H_
