// A replica that is not one: it asks the primary for a full sync, throws the data away and hands
// out the commands that follow, one by one, as they came over the wire.
//
//   ReplicationStream stream(server.port());
//   client.Do("LOCK.RELEASE", "job", "me");
//   EXPECT_THAT(stream.Until(client), ElementsAre(ElementsAre("LOCK.RELEASE", "job", "me")));

#ifndef TURNSTILE_TESTS_SUPPORT_REPLICATION_STREAM_H_
#define TURNSTILE_TESTS_SUPPORT_REPLICATION_STREAM_H_

#include <cstdint>
#include <vector>

#include "support/client.h"
#include "support/resp3.h"

namespace turnstile::testing {

class ReplicationStream {
 public:
  struct Options {
    bool show_select = false;  // hand out SELECT too; else see db()
    bool diskless = true;      // accept an RDB of unknown length ($EOF:), if the primary sends one
  };

  // Returns when the sync is done: every write from now on is in the stream. Throws ProtocolError
  // or ConnectionError if it does not work out.
  explicit ReplicationStream(int port) : ReplicationStream(port, Options{}) {}
  ReplicationStream(int port, Options options);

  // The next command; empty if none comes in time. PING and REPLCONF are left out, and each request
  // for an acknowledgement is answered, so WAIT works. The floor of the token clock is left out
  // too: a primary tells it after a sync, while its clock leads.
  Command Next(Milliseconds within = kPatience);

  // All commands up to now, "now" being a message that `client`, connected to the same primary,
  // publishes for this purpose. This shows that nothing else came without waiting for nothing.
  std::vector<Command> Until(Client& client);

  // The database of the command that was handed out last; -1 before the first SELECT.
  int db() const { return db_; }

 private:
  void Acknowledge();

  RawConnection connection_;
  Options options_;
  uint64_t offset_ = 0;  // of the primary, at the point where connection_ had handed out `base_`
  size_t base_ = 0;
  int db_ = -1;
  int markers_ = 0;
};

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_SUPPORT_REPLICATION_STREAM_H_
