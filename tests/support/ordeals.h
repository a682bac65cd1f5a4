// What stored locks have to survive: crashes, restarts, reloads, and the transfer to a replica.

#ifndef TURNSTILE_TESTS_SUPPORT_ORDEALS_H_
#define TURNSTILE_TESTS_SUPPORT_ORDEALS_H_

#include <gtest/gtest.h>

#include <ostream>
#include <string>
#include <vector>

#include "support/client.h"
#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/reply.h"
#include "support/server.h"

namespace turnstile::testing {

// Options of a server with an AOF.
inline std::vector<std::string> Aof(const char* preamble) {
  return {"--appendonly", "yes", "--appendfsync", "always", "--aof-use-rdb-preamble", preamble};
}

// Asked in this order, because a scheduled rewrite becomes one in progress.
inline bool RewritesNoAof(Client& client) {
  return InfoField(client, "persistence", "aof_rewrite_scheduled") == "0" &&
         InfoField(client, "persistence", "aof_rewrite_in_progress") == "0";
}

inline void RewriteAof(Server& server) {
  Client client = server.Connect();
  EXPECT_FALSE(client.Do("BGREWRITEAOF").IsError());
  EXPECT_TRUE(Eventually([&] { return RewritesNoAof(client); })) << server.Log();
}

inline void Crash(Server& server) {
  server.Kill9();
  server.Restart();
}

struct SurvivalScenario {
  const char* name;
  std::vector<std::string> args;
  void (*go_through)(Server& server);
};

inline void PrintTo(const SurvivalScenario& scenario, std::ostream* out) { *out << scenario.name; }

inline std::vector<SurvivalScenario> SurvivalScenarios() {
  const auto save = [](Server& server) {
    EXPECT_EQ(server.Connect().Do("SAVE"), Reply::Ok());
    Crash(server);
  };
  const auto shut_down = [](Server& server) {
    server.Connect().Do("SHUTDOWN", "SAVE");
    EXPECT_EQ(server.WaitForExit(), 0);
    server.Restart();
  };
  const auto rewrite = [](Server& server) {
    RewriteAof(server);
    Crash(server);
  };
  const auto again = [](Server& server) {
    Crash(server);
    RewriteAof(server);
    Crash(server);
    RewriteAof(server);
    Crash(server);
  };
  const auto reload = [](Server& server) {
    EXPECT_EQ(server.Connect().Do("DEBUG", "RELOAD"), Reply::Ok());
  };
  const auto load_aof = [](Server& server) {
    EXPECT_EQ(server.Connect().Do("DEBUG", "LOADAOF"), Reply::Ok());
  };
  return {
      {"SaveAndKill", {}, save},
      {"ShutdownSave", {}, shut_down},
      {"DebugReload", {}, reload},
      {"Aof", Aof("no"), Crash},
      {"AofRewritten", Aof("no"), rewrite},
      {"AofAgainAndAgain", Aof("no"), again},
      {"AofWithPreamble", Aof("yes"), Crash},
      {"AofWithPreambleRewritten", Aof("yes"), rewrite},
      {"AofWithPreambleAgainAndAgain", Aof("yes"), again},
      {"DebugLoadAof", Aof("no"), load_aof},
      {"DebugLoadAofWithPreamble", Aof("yes"), load_aof},
      {"DebugReloadWithAof", Aof("yes"), reload},
  };
}

inline bool LinkIsUp(Client& replica) {
  return InfoField(replica, "replication", "master_link_status") == "up";
}

// Waits until the replica has loaded the primary's data and, if it has an AOF, has rewritten it, as
// replicas do after a sync.
inline void AwaitSync(Client& replica) {
  EXPECT_TRUE(
      Eventually([&] { return LinkIsUp(replica) && RewritesNoAof(replica); }, Milliseconds{20000}));
}

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_SUPPORT_ORDEALS_H_
