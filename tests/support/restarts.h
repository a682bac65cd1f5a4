// What must be as it was after a crash and a restart.

#ifndef TURNSTILE_TESTS_SUPPORT_RESTARTS_H_
#define TURNSTILE_TESTS_SUPPORT_RESTARTS_H_

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "support/client.h"
#include "support/reply.h"
#include "support/server.h"

namespace turnstile::testing {

// Calls `before` on a new server and `after` once it was killed and started again: from an RDB
// file, from an AOF of commands, and from an AOF that begins with an RDB file.
inline void AcrossRestarts(const std::function<void(Client&)>& before,
                           const std::function<void(Client&)>& after) {
  for (const std::vector<std::string>& args :
       {std::vector<std::string>{},
        {"--appendonly", "yes", "--appendfsync", "always", "--aof-use-rdb-preamble", "no"},
        {"--appendonly", "yes", "--appendfsync", "always", "--aof-use-rdb-preamble", "yes"}}) {
    Server server({.args = args});
    Client client = server.Connect();
    before(client);
    if (args.empty()) {
      ASSERT_EQ(client.Do("SAVE"), Reply::Ok());
    }
    server.Kill9();
    server.Restart();
    client = server.Connect();
    after(client);
  }
}

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_SUPPORT_RESTARTS_H_
