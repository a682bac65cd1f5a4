#include "support/server.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <map>
#include <random>
#include <sstream>
#include <string_view>
#include <utility>

#ifndef TURNSTILE_MODULE_DEFAULT
#define TURNSTILE_MODULE_DEFAULT "build/turnstile.so"
#endif

namespace turnstile::testing {
namespace {

// The ports lie below the range that the kernel uses for outgoing connections, so that none of
// those can take the port of a server that is down for a restart, and low enough that the cluster
// bus (port + 10000) does too.
constexpr int kFirstPort = 10000;
constexpr int kPorts = 12000;

constexpr Milliseconds kStopWithin{15000};

constexpr std::array kCrashSigns = {
    "ERROR: AddressSanitizer", "runtime error:",    "BUG REPORT START",
    "internal error in",       "crashed by signal", "ASSERTION FAILED"};

std::string EnvironmentOr(const char* name, const char* fallback) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : fallback;
}

// Claims a port among all processes that use this library, for as long as the returned descriptor
// is open: an abstract socket with the port in its name. Unlike a file it cannot be left behind,
// and unlike the port itself it can be held while the server is down. -1 if it is already claimed.
int ClaimPort(int port) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  const std::string text = "turnstile-test-port-" + std::to_string(port);
  std::memcpy(name.sun_path + 1, text.data(), text.size());
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + text.size());
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd >= 0 && bind(fd, reinterpret_cast<sockaddr*>(&name), size) == 0) return fd;
  close(fd);
  return -1;
}

bool PortIsFree(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const int on = 1;
  setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);  // as the server does
  const bool free = bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  close(fd);
  return free;
}

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::string LastLines(const std::string& text, int lines) {
  size_t start = text.size();
  for (; lines >= 0 && start != std::string::npos && start > 0; lines--) {
    start = text.rfind('\n', start - 1);
  }
  return start == std::string::npos || start == 0 ? text : text.substr(start + 1);
}

// The environment of this process with some variables replaced, or extended if they are lists.
std::vector<std::string> ServerEnvironment(const std::vector<std::string>& changes) {
  std::map<std::string, std::string> values;
  const auto split = [](const std::string& variable) {
    const size_t equals = variable.find('=');
    return std::pair(variable.substr(0, equals),
                     equals == std::string::npos ? "" : variable.substr(equals + 1));
  };
  for (char** variable = environ; *variable != nullptr; variable++) values.insert(split(*variable));
  const std::string preload = EnvironmentOr("TURNSTILE_SERVER_PRELOAD", "");
  if (!preload.empty()) {
    values["LD_PRELOAD"] = preload;
    values.try_emplace("UBSAN_OPTIONS", "print_stacktrace=1");
    // A server tries to allocate as much memory as a payload claims to need, and expects a null.
    values.try_emplace("ASAN_OPTIONS", "allocator_may_return_null=1");
  }
  for (const std::string& change : changes) {
    const auto [name, value] = split(change);
    const bool is_list = name == "LD_PRELOAD" || name == "ASAN_OPTIONS";
    std::string& present = values[name];
    present = is_list && !present.empty() ? present + ":" + value : value;
  }
  std::vector<std::string> result;
  for (const auto& [name, value] : values) result.push_back(name + "=" + value);
  return result;
}

// For execve(2): pointers into `strings`, which must outlive them.
std::vector<char*> Pointers(std::vector<std::string>& strings) {
  std::vector<char*> pointers;
  pointers.reserve(strings.size() + 1);
  for (std::string& text : strings) pointers.push_back(text.data());
  pointers.push_back(nullptr);
  return pointers;
}

}  // namespace

std::string ModulePath() {
  // Absolute, because a server changes to its own folder.
  return std::filesystem::absolute(EnvironmentOr("TURNSTILE_MODULE", TURNSTILE_MODULE_DEFAULT));
}

Server::Server(ServerOptions options) : options_(std::move(options)), dir_(options_.dir) {
  if (dir_.empty()) {
    dir_ = EnvironmentOr("TMPDIR", "/tmp") + "/turnstile-test-XXXXXX";
    if (mkdtemp(dir_.data()) == nullptr) {
      ADD_FAILURE() << "mkdtemp " << dir_ << ": " << std::strerror(errno);
      dir_.clear();
      return;
    }
  }
  if (!options_.config.empty()) std::ofstream(ConfigPath()) << options_.config;
  StartUp();
}

Server::~Server() {
  Stop();
  if (const std::string report = CrashReport(); !report.empty()) {
    ADD_FAILURE() << "the server on port " << port_ << " reports:\n" << report;
  } else if (!exit_expected_) {
    ADD_FAILURE() << "the server on port " << port_ << " ended by itself, exit code "
                  << exit_code_.value_or(-1) << "; its log ends with:\n"
                  << LastLines(Log(), 20);
  } else if (::testing::Test::HasFailure()) {
    std::cerr << "Log of the server on port " << port_ << ":\n" << LastLines(Log(), 20);
  }
  if (port_claim_ >= 0) close(port_claim_);
  std::error_code ignored;
  if (options_.dir.empty() && !dir_.empty()) std::filesystem::remove_all(dir_, ignored);
}

Client Server::ConnectAs(const std::string& user, const Command& rights) const {
  Command set_user = {"ACL", "SETUSER", user, "reset", "on", ">secret"};
  set_user.insert(set_user.end(), rights.begin(), rights.end());
  EXPECT_EQ(Connect().Do(set_user), Reply::Ok());
  Client client = Connect();
  EXPECT_EQ(client.Do("AUTH", user, "secret"), Reply::Ok());
  return client;
}

bool Server::running() {
  Reap(/*block=*/false);
  return pid_ > 0;
}

std::string Server::Log() const { return ReadFile(LogPath()); }

std::string Server::CrashReport() const {
  std::istringstream log(Log());
  std::string report;
  std::string line;
  for (int lines = 0; lines < 60 && std::getline(log, line);) {
    // A server that refuses to start does not clean up; its leaks are ignored.
    const bool leak = line.find("LeakSanitizer") != std::string::npos ||
                      line.find("byte(s) leaked in") != std::string::npos;
    const bool crash =
        std::any_of(kCrashSigns.begin(), kCrashSigns.end(),
                    [&line](const char* sign) { return line.find(sign) != std::string::npos; });
    if (report.empty() && !(leak ? came_up_ : crash)) continue;
    report += line + "\n";
    lines++;
  }
  return report;
}

bool Server::Restart() {
  Stop();
  return StartUp();
}

bool Server::StartUp() {
  exit_code_.reset();
  exit_expected_ = false;
  came_up_ = false;
  const auto deadline = Clock::now() + options_.start_within;
  const bool any_port = port_ == 0 && options_.port == 0;
  if (port_ == 0 && !any_port) {
    port_ = options_.port;
    port_claim_ = ClaimPort(port_);
  }
  Start result = Start::kPortTaken;
  while (result == Start::kPortTaken && Clock::now() < deadline) {
    if (any_port) ChoosePort();
    result = TryStart(deadline);
    // A port that must stay the same was taken by another process, which may release it again.
    if (!any_port && !options_.must_start) break;
  }
  came_up_ = result == Start::kUp;
  if (came_up_) return true;
  if (options_.must_start) {
    ADD_FAILURE() << "the server did not start, exit code " << exit_code_.value_or(-1)
                  << "; its log ends with:\n"
                  << LastLines(Log(), 20);
  }
  if (running()) Kill9();
  exit_expected_ = true;  // reported, or expected
  return false;
}

void Server::ChoosePort() {
  std::random_device random;
  for (;;) {
    if (port_claim_ >= 0) close(port_claim_);
    port_ = kFirstPort + static_cast<int>(random() % kPorts);
    port_claim_ = ClaimPort(port_);
    if (port_claim_ >= 0 && PortIsFree(port_)) return;
  }
}

Server::Start Server::TryStart(Clock::time_point deadline) {
  const size_t old_log = Log().size();
  Spawn();
  const std::string process_id = "\r\nprocess_id:" + std::to_string(pid_) + "\r\n";
  bool up = false;
  Eventually(
      [&] {
        if (!running()) return true;
        Client client(port_, options_.address);
        const Reply pong = client.Do("PING");
        if (pong.IsError("LOADING") || pong.IsError("DISCONNECTED:") || pong.IsError("TIMEOUT:")) {
          return false;
        }
        // The process that answers must be ours, as far as it reveals that to an unauthenticated
        // client (NOAUTH, NOPERM).
        const Reply info = client.Do("INFO", "server");
        up = info.IsError() ? client.connected() : info.text.find(process_id) != std::string::npos;
        return up;
      },
      std::chrono::duration_cast<Milliseconds>(deadline - Clock::now()));
  if (up) return Start::kUp;
  const bool taken = Log().find("Address already in use", old_log) != std::string::npos;
  return taken && !running() ? Start::kPortTaken : Start::kFailed;
}

void Server::Spawn() {
  std::vector<std::string> arguments = {EnvironmentOr("REDIS_SERVER", "redis-server")};
  if (!options_.config.empty()) arguments.push_back(ConfigPath());
  if (options_.sentinel) arguments.emplace_back("--sentinel");
  // clang-format off
  arguments.insert(arguments.end(), {
      "--bind", options_.address,
      "--port", std::to_string(port_),
      "--dir", dir_,
      "--logfile", LogPath(),
      "--daemonize", "no",
      "--save", "",
      "--appendonly", "no",
      "--enable-debug-command", "yes",
      "--enable-module-command", "yes",
      "--repl-diskless-sync-delay", "0",
      "--shutdown-timeout", "0",  // do not wait for replicas that a test has paused or faked
  });
  // clang-format on
  if (options_.address != ServerOptions{}.address) {
    arguments.insert(arguments.end(), {"--protected-mode", "no"});
  }
  if (options_.load_module && !options_.sentinel) {
    arguments.push_back("--loadmodule");
    arguments.push_back(ModulePath());
    arguments.insert(arguments.end(), options_.module_args.begin(), options_.module_args.end());
  }
  arguments.insert(arguments.end(), options_.args.begin(), options_.args.end());
  std::vector<std::string> environment = ServerEnvironment(options_.environment);
  const std::vector<char*> argv = Pointers(arguments);
  const std::vector<char*> envp = Pointers(environment);
  const std::string log = LogPath();
  const pid_t parent = getpid();

  paused_ = false;
  pid_ = fork();
  if (pid_ != 0) return;
  // In the child of a process that may have threads: system calls only.
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(126);  // the parent died before the line above
  const rlimit no_core{0, 0};
  setrlimit(RLIMIT_CORE, &no_core);
  if (!options_.network_namespace.empty()) {
    const int space = open(options_.network_namespace.c_str(), O_RDONLY | O_CLOEXEC);
    if (space < 0 || setns(space, CLONE_NEWNET) != 0) _exit(125);
  }
  // Captures what is written before the server opens its log (a bad option), or past it
  // (sanitizers).
  const int output = open(log.c_str(), O_WRONLY | O_CREAT | O_APPEND, 0644);
  const int input = open("/dev/null", O_RDONLY);
  dup2(input, STDIN_FILENO);
  dup2(output, STDOUT_FILENO);
  dup2(output, STDERR_FILENO);
  close_range(3, ~0U, 0);  // the test's connections must end when the test closes them
  execvpe(argv[0], argv.data(), envp.data());
  constexpr std::string_view kMessage = "cannot execute REDIS_SERVER\n";
  (void)!write(STDERR_FILENO, kMessage.data(), kMessage.size());
  _exit(127);
}

void Server::Reap(bool block) {
  int status = 0;
  pid_t ended = 0;
  while (pid_ > 0 && (ended = waitpid(pid_, &status, block ? 0 : WNOHANG)) < 0 && errno == EINTR) {
  }
  if (ended <= 0) return;
  exit_code_ = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  pid_ = -1;
}

void Server::Signal(int signal) const {
  if (pid_ > 0) kill(pid_, signal);
}

void Server::Kill9() {
  exit_expected_ = true;
  Signal(SIGKILL);
  Reap(/*block=*/true);
}

int Server::Stop() {
  if (!running()) return -1;
  if (paused_) Continue();
  Client client(port_, options_.address);
  // No longer listening: it may be exiting by itself.
  if (!client.connected() && Eventually([this] { return !running(); })) return *exit_code_;
  exit_expected_ = true;
  // NOW: without waiting for replicas. On success the connection is closed instead of a reply.
  const bool accepted = client.connected() &&
                        client.Do("SHUTDOWN", "NOSAVE", "NOW", "FORCE").IsError("DISCONNECTED:");
  if (!accepted) Signal(SIGTERM);
  if (!Eventually([this] { return !running(); }, kStopWithin)) {
    ADD_FAILURE() << "the server on port " << port_ << " did not stop; its log ends with:\n"
                  << LastLines(Log(), 20);
    Kill9();
  }
  return exit_code_.value_or(-1);
}

std::optional<int> Server::WaitForExit(Milliseconds within) {
  exit_expected_ = true;
  Eventually([this] { return !running(); }, within);
  return exit_code_;
}

void Server::Pause() {
  Signal(SIGSTOP);
  int status = 0;
  while (pid_ > 0 && waitpid(pid_, &status, WUNTRACED) < 0 && errno == EINTR) {
  }
  paused_ = true;
}

void Server::Continue() {
  Signal(SIGCONT);
  paused_ = false;
}

}  // namespace turnstile::testing
