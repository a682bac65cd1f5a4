// Poses as a replica: requests a full sync from the primary, discards the data and returns the
// commands that follow, one by one, as they arrive.
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
    bool show_select = false;  // return SELECT too; otherwise see db()
    bool diskless = true;      // accept an RDB of unknown length ($EOF:), if the primary sends one
  };

  // Returns when the sync is done: every later write is in the stream. Throws ProtocolError or
  // ConnectionError on failure.
  explicit ReplicationStream(int port) : ReplicationStream(port, Options{}) {}
  ReplicationStream(int port, Options options);

  // The next command; empty if none arrives in time. PING and REPLCONF are skipped, and every
  // request for an acknowledgement is answered, so that WAIT works. The floor of the token clock is
  // skipped too: a primary sends it after a sync while its clock leads.
  Command Next(Milliseconds within = kPatience);

  // All commands up to now, marked by a message that `client`, connected to the same primary,
  // publishes. This proves that nothing else was sent, without waiting for a time-out.
  std::vector<Command> Until(Client& client);

  // The database of the last returned command; -1 before the first SELECT.
  int db() const { return db_; }

 private:
  void Acknowledge();

  RawConnection connection_;
  Options options_;
  uint64_t offset_ = 0;  // of the primary, when connection_ had returned `base_` bytes
  size_t base_ = 0;
  int db_ = -1;
  int markers_ = 0;
};

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_SUPPORT_REPLICATION_STREAM_H_
