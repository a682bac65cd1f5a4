// A real redis-server process owned by one test: it has its own folder and port, and is removed
// however the test ends, even if it crashes or is killed.
//
//   Server server;                                     // with the module, on an empty folder
//   Client client = server.Connect();
//
//   Server server({.args = {"--appendonly", "yes", "--turnstile.max-lease-ms", "5000"}});
//   server.Kill9();
//   server.Restart();                                  // same port, same folder, same arguments
//
// A server that does not start, that exits unexpectedly, or that leaves a crash or sanitizer report
// in its log fails the test, with the relevant lines of the log.
//
// Environment:
//   REDIS_SERVER              the program, default "redis-server" (a wrapper must exec it)
//   TURNSTILE_MODULE          the module, default what the build made
//   TURNSTILE_SERVER_PRELOAD  LD_PRELOAD for the server only, e.g. the AddressSanitizer library

#ifndef TURNSTILE_TESTS_SUPPORT_SERVER_H_
#define TURNSTILE_TESTS_SUPPORT_SERVER_H_

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

#include "support/client.h"
#include "support/eventually.h"
#include "support/resp3.h"

namespace turnstile::testing {

struct ServerOptions {
  // Further options for the server, after the default ones (the last one wins). They may include
  // settings of the module: the server keeps them until the module is loaded.
  std::vector<std::string> args = {};

  // The text of a configuration file, written before the first start. The server may rewrite it.
  std::string config = {};
  bool sentinel = false;  // monitors other servers, as `config` says; loads no module

  bool load_module = true;
  std::vector<std::string> module_args = {};  // after the path: --loadmodule PATH ARG...

  // "NAME=value" for the server's environment. Appended to variables that are lists: LD_PRELOAD and
  // ASAN_OPTIONS.
  std::vector<std::string> environment = {};

  // Where it listens. Other addresses than this are for servers in network namespaces.
  std::string address = "127.0.0.1";
  // The network namespace that the server runs in, as a file for setns(2). Empty: the test's own.
  std::string network_namespace = {};

  int port = 0;          // 0: a free one
  std::string dir = {};  // empty: a new one, removed at the end; a given one must exist and is kept

  // False for tests of a server that refuses to start: see running(), exit_code() and Log().
  bool must_start = true;
  Milliseconds start_within{30000};
};

// The path of the module.
std::string ModulePath();

class Server {
 public:
  // Starts the server and waits until it responds. The thread that creates a Server must outlive
  // it: the kernel kills the server when that thread ends.
  explicit Server(ServerOptions options = {});
  ~Server();  // stops the server as Stop() does
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  int port() const { return port_; }
  const std::string& address() const { return options_.address; }
  const std::string& dir() const { return dir_; }
  pid_t pid() const { return pid_; }  // -1 while it is not running
  bool running();

  // The exit code of the last process, or 128 + the signal. Nothing while it runs.
  std::optional<int> exit_code() const { return exit_code_; }

  // Everything the server has written since the first start: its log, stdout and stderr.
  std::string Log() const;

  // The part of the log that reports a crash, a failed assertion or a sanitizer error; or "". If it
  // is not empty, the test fails in the end.
  std::string CrashReport() const;

  Client Connect() const { return Client(port_, options_.address); }
  // As a new user that has exactly these rights.
  Client ConnectAs(const std::string& user, const Command& rights) const;
  RawConnection ConnectRaw() const { return RawConnection(port_, options_.address); }

  // SIGKILL, like a power failure.
  void Kill9();

  // SHUTDOWN NOSAVE, else SIGTERM, else SIGKILL and a failure. Only this way reports leaks and
  // writes coverage data. Returns the exit code, -1 if it was not running.
  int Stop();

  // For a server that the test stops by other means, e.g. SHUTDOWN SAVE. Nothing if it still runs
  // at the deadline.
  std::optional<int> WaitForExit(Milliseconds within = kPatience);

  // Restarts it on the same port and folder with options().args; stops it first if it runs.
  bool Restart();
  ServerOptions& options() { return options_; }

  // SIGSTOP, returning when it has stopped, and SIGCONT.
  void Pause();
  void Continue();

 private:
  enum class Start { kUp, kFailed, kPortTaken };

  bool StartUp();
  void ChoosePort();
  Start TryStart(Clock::time_point deadline);
  void Spawn();
  void Reap(bool block);
  void Signal(int signal) const;
  std::string LogPath() const { return dir_ + "/server.log"; }
  std::string ConfigPath() const { return dir_ + "/server.conf"; }

  ServerOptions options_;
  int port_ = 0;
  int port_claim_ = -1;  // see ClaimPort()
  std::string dir_;
  pid_t pid_ = -1;
  bool paused_ = false;
  bool came_up_ = false;        // the last start succeeded
  bool exit_expected_ = false;  // otherwise an exit of the process is a failure
  std::optional<int> exit_code_;
};

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_SUPPORT_SERVER_H_
