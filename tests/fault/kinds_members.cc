// Replicas that come and go, and servers that are restarted one after the other.

#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "fault/round.h"
#include "support/client.h"
#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/ordeals.h"
#include "support/server.h"

namespace turnstile::fault {
namespace {

using testing::Client;
using testing::Server;
using Args = std::vector<std::string>;

Address AddressOf(const Server& server) { return {.port = server.port()}; }

// --- Rolling restarts ---------------------------------------------------------------------------

// The module under one name after the other, as new versions of it are installed.
class ModuleFiles {
 public:
  ModuleFiles() {
    folder_ = std::filesystem::temp_directory_path() / "turnstile-module-XXXXXX";
    if (mkdtemp(folder_.data()) == nullptr) throw std::runtime_error("no folder " + folder_);
    Install();
  }
  ~ModuleFiles() {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }
  ModuleFiles(const ModuleFiles&) = delete;
  ModuleFiles& operator=(const ModuleFiles&) = delete;

  const std::string& current() const { return current_; }

  // A new file beside the old one, which servers still have.
  void Install() {
    current_ = folder_ + "/turnstile-" + std::to_string(++version_) + ".so";
    std::filesystem::copy_file(testing::ModulePath(), current_);
  }

 private:
  std::string folder_;
  std::string current_;
  int version_ = 0;
};

// A primary and two replicas.
class RollingServers {
 public:
  explicit RollingServers(Round& round)
      : round_(round), with_aof_(round.OneIn(3)), preamble_(round.OneIn(2) ? "yes" : "no") {
    for (auto& server : servers_) {
      server = std::make_unique<Server>(
          testing::ServerOptions{.args = ArgsOf(nullptr), .load_module = false});
    }
    for (size_t i = 1; i < servers_.size(); i++) Follow(*servers_.at(i));
  }

  Server& primary() { return *servers_.at(primary_); }

  // Replicas first, then a failover to one of them, then the old primary.
  void Upgrade() {
    const bool other_file = round_.OneIn(2);
    if (other_file) files_.Install();
    for (size_t i = 0; i < servers_.size(); i++) {
      if (i != primary_) Restart(*servers_.at(i), "replica", other_file);
    }
    round_.LetWork(0, 100 * kMillisecond);
    const size_t old = primary_;
    const size_t next = (old + 1 + round_.Below(servers_.size() - 1)) % servers_.size();
    round_.FailOverTo(*servers_.at(old), *servers_.at(next));
    primary_ = next;
    round_.driver().NewLife();
    round_.driver().Go(AddressOf(primary()));
    for (const auto& server : servers_) {
      if (server.get() != &primary()) Follow(*server);
    }
    Restart(*servers_.at(old), "old primary", other_file);
  }

  void CheckCopies() {
    Client client = primary().Connect();
    for (const auto& server : servers_) {
      if (server.get() == &primary()) continue;
      Client replica = server->Connect();
      round_.CheckCopies(client, replica);
    }
  }

 private:
  Args ArgsOf(const Server* primary) const {
    Args args = {"--loadmodule", files_.current()};
    if (with_aof_) {
      const Args aof = testing::Aof(preamble_);
      args.insert(args.end(), aof.begin(), aof.end());
    }
    if (primary != nullptr) {
      args.insert(args.end(), {"--replicaof", primary->address(), std::to_string(primary->port())});
    }
    return args;
  }

  void Follow(const Server& replica) {
    replica.Connect().Do("REPLICAOF", "127.0.0.1", primary().port());
    round_.AwaitFollower(primary(), replica);
  }

  // With what it has saved it may get the rest only, else it gets a full copy.
  void Restart(Server& server, const std::string& what, bool other_file) {
    server.options().args = ArgsOf(&primary());
    if (round_.OneIn(2)) {
      server.Connect().Do("SHUTDOWN", "SAVE");
      server.WaitForExit();
    }
    server.Restart();
    round_.AwaitFollower(primary(), server);
    Client client = server.Connect();
    const std::string modules = client.Do("MODULE", "LIST").ToString();
    round_.Expect(modules.find(files_.current()) != std::string::npos, "C8",
                  "a server has another module: " + modules);
    round_.Count(what + (other_file ? " restarted with a new file" : " restarted"));
    round_.LetWork(0, 50 * kMillisecond);
  }

  Round& round_;
  const bool with_aof_;
  const char* const preamble_;
  ModuleFiles files_;
  std::array<std::unique_ptr<Server>, 3> servers_;
  size_t primary_ = 0;
};

void Upgrade(Round& round) {
  RollingServers servers(round);
  round.Start(ForgetfulSessions(), AddressOf(servers.primary()));
  do {
    round.LetWork(20 * kMillisecond, 200 * kMillisecond);
    servers.Upgrade();
  } while (!round.over());
  round.Finish();
  servers.CheckCopies();
}

// --- Replicas that come and go ------------------------------------------------------------------

// Two servers, of which the one that is not the primary comes and goes.
class Guests {
 public:
  explicit Guests(Round& round) : round_(round) { Fill(); }

  Address address() const { return AddressOf(primary()); }
  const Server& primary() const { return servers_.at(primary_); }
  Server& guest() { return servers_.at(1 - primary_); }

  void Attach() {
    const bool diskless = round_.OneIn(2);
    Client client = primary().Connect();
    client.Do("CONFIG", "SET", "repl-diskless-sync", diskless ? "yes" : "no");
    // Valkey has one more way, other servers refuse it.
    client.Do("CONFIG", "SET", "dual-channel-replication-enabled", round_.OneIn(2) ? "yes" : "no");
    client.Do("CONFIG", "SET", "rdb-key-save-delay", round_.OneIn(2) ? 50 : 0);
    static constexpr std::array<const char*, 3> kLoads = {"disabled", "on-empty-db", "swapdb"};
    const std::string load = kLoads.at(round_.Below(kLoads.size()));
    Follow(load);
    if (round_.OneIn(2)) {
      round_.LetWork(0, 60 * kMillisecond);
      Disturb(load);
    }
    round_.AwaitFollower(primary(), guest());
    round_.Count(std::string("replica attached, ") +
                 (diskless ? "diskless, load " + load : "by disk"));
  }

  // What it has been told is all there is to know.
  void Promote() {
    round_.FailOverTo(servers_.at(primary_), guest());
    primary_ = 1 - primary_;
    round_.driver().NewLife();
    round_.driver().Go(address());
    round_.AwaitFollower(primary(), guest());
  }

  void Leave() {
    switch (round_.Below(3)) {
      case 0:
        guest().Connect().Do("REPLICAOF", "NO", "ONE");
        round_.Count("replica left");
        break;
      case 1:
        guest().Kill9();
        guest().Restart();
        round_.Count("kill -9 of the replica");
        break;
      default:
        guest().Restart();
        round_.Count("replica restarted");
    }
  }

  void CheckCopies() {
    Client of_primary = primary().Connect();
    Client of_guest = guest().Connect();
    round_.CheckCopies(of_primary, of_guest);
  }

 private:
  // So that a copy takes its time.
  void Fill() { primary().Connect().Do("DEBUG", "POPULATE", 3000); }

  void Follow(const std::string& load) {
    Client client = guest().Connect();
    client.Do("CONFIG", "SET", "repl-diskless-load", load);
    client.Do("REPLICAOF", "127.0.0.1", primary().port());
  }

  // While the copy is made, sent or loaded, as it happens.
  void Disturb(const std::string& load) {
    switch (round_.Below(5)) {
      case 0:
        primary().Connect().Do("CLIENT", "KILL", "TYPE", "replica");
        round_.Count("replica's connection closed while it attaches");
        break;
      case 1:
        guest().Kill9();
        guest().Restart();
        Follow(load);
        round_.Count("kill -9 of the replica while it attaches");
        break;
      case 2:
        guest().Pause();
        round_.LetWork(5 * kMillisecond, 150 * kMillisecond);
        guest().Continue();
        round_.Count("SIGSTOP of the replica while it attaches");
        break;
      case 3:
        guest().Connect().Do("REPLICAOF", "NO", "ONE");
        round_.LetWork(0, 20 * kMillisecond);
        Follow(load);
        round_.Count("replica left while it attaches");
        break;
      default:
        primary().Connect().Do("BGSAVE");
        round_.Count("BGSAVE while a replica attaches");
    }
  }

  Round& round_;
  std::array<Server, 2> servers_;
  size_t primary_ = 0;
};

void Attach(Round& round) {
  Guests guests(round);
  round.Start(ForgetfulSessions(), guests.address());
  while (!round.over()) {
    round.LetWork(0, 100 * kMillisecond);
    guests.Attach();
    if (round.OneIn(3)) {
      guests.Promote();
      round.LetWork(0, 100 * kMillisecond);
    }
    guests.Leave();
  }
  guests.Attach();
  round.Finish();
  guests.CheckCopies();
}

}  // namespace

std::vector<Kind> MemberKinds() {
  return {
      {"upgrade", "rolling restarts: replicas, a failover, the old primary; with another file too",
       &Upgrade},
      {"attach", "a replica that attaches by disk, diskless, swapdb, and leaves", &Attach},
  };
}

}  // namespace turnstile::fault
