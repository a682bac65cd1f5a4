// The keyspace events of a server, as a subscriber receives them.
//
//   EventLog log(server);
//   client.Do("LOCK.ACQUIRE", "job", "alice", "PX", 1000);
//   EXPECT_EQ(log.Until(client), (Texts{"job lock.acquired"}));

#ifndef TURNSTILE_TESTS_SUPPORT_EVENTS_H_
#define TURNSTILE_TESTS_SUPPORT_EVENTS_H_

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/client.h"
#include "support/reply.h"
#include "support/server.h"

namespace turnstile::testing {

using Texts = std::vector<std::string>;

class EventLog {
 public:
  // Subscribes to every keyspace event of a database.
  explicit EventLog(const Server& server, int db = 0)
      : client_(server.Connect()), prefix_("__keyspace@" + std::to_string(db) + "__:") {
    EXPECT_TRUE(client_.Do("PSUBSCRIBE", prefix_ + "*").IsArray());
    EXPECT_TRUE(client_.Do("SUBSCRIBE", mark_).IsArray());
  }

  // The events published so far, as "key event", including those caused by earlier commands of
  // `client`. Waits until there are at least `at_least` events.
  Texts Until(Client& client, size_t at_least = 0) {
    Texts events;
    do {
      EXPECT_EQ(client.Do("PUBLISH", mark_, "now"), Reply::Int(1));
    } while (ReadUpToMark(events) && events.size() < at_least);
    return events;
  }

 private:
  static inline int logs_ = 0;

  bool ReadUpToMark(Texts& events) {
    while (true) {
      const Texts message = client_.Read().Texts();
      if (message.size() == 3 && message[1] == mark_) return true;
      if (message.size() != 4) {
        ADD_FAILURE() << "no message";
        return false;
      }
      events.push_back(message[2].substr(prefix_.size()) + " " + message[3]);
    }
  }

  Client client_;
  std::string prefix_;
  std::string mark_ = "the channel of log " + std::to_string(logs_++);
};

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_SUPPORT_EVENTS_H_
