// A real redis-server process that one test owns: its own folder, its own port, gone with the test
// on every way out, also when the test crashes or is killed.
//
//   Server server;                                     // with the module, on an empty folder
//   Client client = server.Connect();
//
//   Server server({.args = {"--appendonly", "yes", "--turnstile.max-lease-ms", "5000"}});
//   server.Kill9();
//   server.Restart();                                  // same port, same folder, same arguments
//
// A server that does not start, that ends without having been told to, or that leaves a crash or
// sanitizer report in its log fails the test, with the lines of the log that say why.
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
  // More options for the server, after ours (the last one wins). Options of the module too: the
  // server keeps them until the module is loaded.
  std::vector<std::string> args = {};

  // The text of a configuration file, written before the first start. The server may rewrite it.
  std::string config = {};
  bool sentinel = false;  // watches other servers, as `config` says; loads no module

  bool load_module = true;
  std::vector<std::string> module_args = {};  // after the path: --loadmodule PATH ARG...

  // "NAME=value" for the server's environment. To a variable that is a list, LD_PRELOAD or
  // ASAN_OPTIONS, it is added.
  std::vector<std::string> environment = {};

  // Where it listens. Other addresses than this are for servers in network namespaces.
  std::string address = "127.0.0.1";
  // The network namespace that the server runs in, as a file for setns(2). Empty: the test's own.
  std::string network_namespace = {};

  int port = 0;          // 0: one that is free
  std::string dir = {};  // empty: a new one, removed at the end; a given one must exist and stays

  // False for tests of a server that refuses to start: see running(), exit_code() and Log().
  bool must_start = true;
  Milliseconds start_within{30000};
};

// Where the module is.
std::string ModulePath();

class Server {
 public:
  // Starts the server and waits until it answers. A thread that makes a Server must outlive it:
  // the kernel ends the server when that thread ends.
  explicit Server(ServerOptions options = {});
  ~Server();  // stops the server as Stop() does
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  int port() const { return port_; }
  const std::string& address() const { return options_.address; }
  const std::string& dir() const { return dir_; }
  pid_t pid() const { return pid_; }  // -1 while it does not run
  bool running();

  // How the last process ended: its exit code, or 128 + the signal. Nothing while it runs.
  std::optional<int> exit_code() const { return exit_code_; }

  // Everything the server wrote, over all its starts: its log, stdout and stderr.
  std::string Log() const;

  // The part of the log that reports a crash, a failed assertion or a sanitizer's finding; or "".
  // What makes it differ from "" fails the test in the end.
  std::string CrashReport() const;

  Client Connect() const { return Client(port_, options_.address); }
  // As a new user who has just these rights.
  Client ConnectAs(const std::string& user, const Command& rights) const;
  RawConnection ConnectRaw() const { return RawConnection(port_, options_.address); }

  // Ends it as a power cut would.
  void Kill9();

  // SHUTDOWN NOSAVE, else SIGTERM, else SIGKILL and a failure. Leaks are reported and coverage is
  // written on this way out only. Returns the exit code, -1 if it was not running.
  int Stop();

  // For a server that the test makes end by other means, e.g. SHUTDOWN SAVE. Nothing if it still
  // runs at the deadline.
  std::optional<int> WaitForExit(Milliseconds within = kPatience);

  // Starts it anew on the same port and folder with options().args; stops it first if it runs.
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
  bool came_up_ = false;      // the last start worked
  bool told_to_end_ = false;  // else an end of the process is a failure
  std::optional<int> exit_code_;
};

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_SUPPORT_SERVER_H_
