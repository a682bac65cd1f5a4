// The C++ client of client-examples/cpp against real servers with the module, one for each test:
// TURNSTILE_MODULE and REDIS_SERVER name them. tests/clients/run-cpp builds and runs this.

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <string_view>
#include <thread>
#include <tuple>
#include <typeinfo>
#include <utility>
#include <vector>

#include "turnstile.h"

namespace {

using namespace std::chrono_literals;
using std::chrono::milliseconds;
using turnstile::Client;
using turnstile::Clock;
using turnstile::Command;
using turnstile::Hold;
using turnstile::Lock;
using turnstile::Options;
using turnstile::Reply;

constexpr auto kPatience = 10s;  // for what must happen; longer means that it will not
constexpr auto kSlack = 250ms;   // what a busy machine may add to a delay

bool Await(const std::function<bool()>& condition) {
  for (const auto end = Clock::now() + kPatience; !condition();) {
    if (Clock::now() > end) return false;
    std::this_thread::sleep_for(5ms);
  }
  return true;
}

milliseconds Since(Clock::time_point start) {
  return std::chrono::duration_cast<milliseconds>(Clock::now() - start);
}

void ExpectBetween(milliseconds took, milliseconds least, milliseconds most) {
  EXPECT_GE(took.count(), least.count());
  EXPECT_LE(took.count(), most.count());
}

sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(static_cast<std::uint16_t>(port));
  return address;
}

// A socket that listens on a free port of the loopback, and that port.
std::pair<int, int> Listen() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof address;
  auto* const generic = reinterpret_cast<sockaddr*>(&address);
  if (bind(fd, generic, size) != 0 || listen(fd, 16) != 0 || getsockname(fd, generic, &size) != 0) {
    throw std::runtime_error("no free port");
  }
  return {fd, ntohs(address.sin_port)};
}

class Server {
 public:
  explicit Server(const std::vector<std::string>& options = {}) {
    std::string pattern = (std::filesystem::temp_directory_path() / "turnstile-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
    for (int i = 0; i < 20; ++i) {
      if (Start(options)) return;
    }
    std::filesystem::remove_all(folder_);
    throw std::runtime_error("the server does not start");
  }

  ~Server() {
    Kill();
    std::filesystem::remove_all(folder_);
  }

  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  int port() const { return port_; }
  Client& client() { return *client_; }

  void Signal(int signal) const { kill(pid_, signal); }

  // An operator's own connection, which no test breaks.
  Reply Do(const Command& command) { return operator_->Call(command, Clock::now() + kPatience); }

  bool Exists(const std::string& key) { return Do({"EXISTS", key}).integer == 1; }
  long long Fence(const std::string& key) { return Do({"LOCK.FENCE", key}).integer; }

  // A field of INFO turnstile.
  long long Info(const std::string& field) {
    const std::string text = Do({"INFO", "turnstile"}).text;
    const auto at = text.find("turnstile_" + field + ":");
    return at == std::string::npos ? -1 : std::stoll(text.substr(text.find(':', at) + 1));
  }

  bool AwaitWaiters(long long count) {
    return Await([&] { return Info("waiters") == count; });
  }

  // So many more renewals, of which there are three in the time of a lease.
  bool AwaitRenewals(int count) {
    const auto before = Info("touched");
    return Await([&] { return Info("touched") >= before + count; });
  }

  // The id of a client that waits.
  std::string BlockedClient() {
    std::istringstream lines(Do({"CLIENT", "LIST"}).text);
    for (std::string line; std::getline(lines, line);) {
      if (line.find(" flags=b ") != std::string::npos) return line.substr(3, line.find(' ') - 3);
    }
    return "0";
  }

  // How many connections acquired a lock and did nothing since.
  int Sessions() {
    std::istringstream lines(Do({"CLIENT", "LIST"}).text);
    int count = 0;
    for (std::string line; std::getline(lines, line);) {
      count += strcasestr(line.c_str(), " cmd=lock.acquire ") != nullptr ? 1 : 0;
    }
    return count;
  }

  // Whether a client has sent something that the server has not read yet.
  bool HasUnread() const {
    std::ifstream connections("/proc/net/tcp");
    std::string line;
    std::getline(connections, line);  // the names of the columns
    while (std::getline(connections, line)) {
      // " 0: 0100007F:18EB 0100007F:D2A4 01 00000000:00000000 …": here, there, state, queues
      unsigned here = 0;
      unsigned state = 0;
      unsigned unread = 0;
      std::sscanf(line.c_str(), " %*d: %*x:%x %*x:%*x %x %*x:%x", &here, &state, &unread);
      const bool ours = here == static_cast<unsigned>(port_) && state == TCP_ESTABLISHED;
      if (ours && unread > 0) return true;
    }
    return false;
  }

 private:
  static std::string Environment(const char* name, const char* otherwise) {
    const char* value = std::getenv(name);
    return value != nullptr && *value != 0 ? value : otherwise;
  }

  bool Start(const std::vector<std::string>& options) {
    // Free now, perhaps taken a moment later: then the server ends, and we try another.
    const auto [fd, port] = Listen();
    close(fd);
    if (port > 55535) return false;  // no room for a cluster's second port
    port_ = port;
    std::vector<std::string> words = {
        Environment("REDIS_SERVER", "redis-server"),
        "--bind",
        "127.0.0.1",
        "--port",
        std::to_string(port),
        "--save",
        "",
        "--dir",
        folder_,
        "--loadmodule",
        std::filesystem::absolute(Environment("TURNSTILE_MODULE", "build/turnstile.so")).string()};
    words.insert(words.end(), options.begin(), options.end());
    std::vector<char*> arguments;
    for (std::string& word : words) arguments.push_back(word.data());
    arguments.push_back(nullptr);
    pid_ = fork();
    if (pid_ == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      const int null = open("/dev/null", O_WRONLY);
      dup2(null, STDOUT_FILENO);
      execvp(arguments[0], arguments.data());
      _exit(127);
    }
    const std::string mine = "process_id:" + std::to_string(pid_) + "\r\n";
    const bool up_or_gone = Await([&] {
      if (waitpid(pid_, nullptr, WNOHANG) == pid_) {
        pid_ = -1;
        return true;
      }
      try {
        operator_.emplace(turnstile::Address{.port = port_}, Clock::now() + 1s);
        return Do({"INFO", "server"}).text.find(mine) != std::string::npos;
      } catch (const turnstile::Error&) {
        return false;
      }
    });
    if (!up_or_gone) Kill();
    if (pid_ <= 0) return false;
    client_ = std::make_unique<Client>("127.0.0.1", port);
    return true;
  }

  void Kill() {
    if (pid_ <= 0) return;
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

  std::string folder_;
  pid_t pid_ = -1;
  int port_ = 0;
  std::optional<turnstile::Connection> operator_;
  std::unique_ptr<Client> client_;
};

// Forwards to a server, and loses replies: it swallows them and closes the connection, or keeps
// silent.
class Proxy {
 public:
  explicit Proxy(int server_port, bool silent = false)
      : server_port_(server_port), silent_(silent) {
    std::tie(listener_, port_) = Listen();
    thread_ = std::jthread([this](const std::stop_token& stop) { Accept(stop); });
  }

  ~Proxy() {
    thread_.request_stop();
    thread_.join();
    connections_.clear();
    close(listener_);
  }

  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  int port() const { return port_; }
  int lost() const { return lost_; }

  // Keeps the next request that contains `what`, and its connection, from the server.
  void HoldBack(const std::string& what) {
    const std::lock_guard guard(mutex_);
    held_back_ = what;
  }
  bool holds_back() const { return holds_back_; }
  void LetThrough() { holds_back_ = false; }

  // Loses the replies to the next `count` requests that contain `what`.
  void Lose(const std::string& what, int count) {
    const std::lock_guard guard(mutex_);
    what_ = what;
    left_ = count;
  }

 private:
  static bool Readable(int fd, const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      pollfd one{.fd = fd, .events = POLLIN, .revents = 0};
      if (poll(&one, 1, 20) > 0) return true;
    }
    return false;
  }

  void Accept(const std::stop_token& stop) {
    while (Readable(listener_, stop)) {
      const int client = accept(listener_, nullptr, nullptr);
      connections_.emplace_back([this, client](const std::stop_token& end) {
        Forward(client, end);
        close(client);
      });
    }
  }

  // Takes turns: a request, as our small ones come in one piece, then its reply.
  void Forward(int client, const std::stop_token& stop) {
    const int server = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    const sockaddr_in address = Loopback(server_port_);
    std::array<char, 1 << 16> buffer{};
    const auto read_from = [&](int fd) -> std::size_t {
      if (!Readable(fd, stop)) return 0;
      const auto size = recv(fd, buffer.data(), buffer.size(), 0);
      return size > 0 ? static_cast<std::size_t>(size) : 0;
    };
    if (connect(server, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0) {
      while (const std::size_t request = read_from(client)) {
        if (HoldsBack({buffer.data(), request})) {
          while (holds_back_ && !stop.stop_requested()) std::this_thread::sleep_for(1ms);
        }
        const bool loses = Loses({buffer.data(), request});
        send(server, buffer.data(), request, MSG_NOSIGNAL);
        const std::size_t reply = read_from(server);
        if (reply == 0) break;
        if (loses) {
          while (silent_ && read_from(client) != 0) {
          }
          break;
        }
        send(client, buffer.data(), reply, MSG_NOSIGNAL);
      }
    }
    close(server);
  }

  bool HoldsBack(std::string_view request) {
    const std::lock_guard guard(mutex_);
    if (held_back_.empty() || request.find(held_back_) == std::string_view::npos) return false;
    held_back_.clear();
    holds_back_ = true;
    return true;
  }

  bool Loses(std::string_view request) {
    const std::lock_guard guard(mutex_);
    if (left_ == 0 || request.find(what_) == std::string_view::npos) return false;
    --left_;
    ++lost_;
    return true;
  }

  const int server_port_;
  const bool silent_;
  int listener_ = -1;
  int port_ = 0;
  std::mutex mutex_;
  std::string what_;
  int left_ = 0;
  std::atomic<int> lost_ = 0;
  std::string held_back_;
  std::atomic<bool> holds_back_ = false;
  std::vector<std::jthread> connections_;
  std::jthread thread_;
};

class CppClientTest : public testing::Test {
 protected:
  Lock Of(Options options, const std::string& key = "k") {
    return Lock(server_.client(), key, std::move(options));
  }

  // Acquires in a thread of its own.
  static std::future<Hold> Waiting(Lock lock, std::stop_token cancel = {}) {
    return std::async(std::launch::async, [lock = std::move(lock), cancel = std::move(cancel)] {
      return lock.Acquire(cancel);
    });
  }

  Server server_;
};

TEST_F(CppClientTest, OneHolderAtATime) {
  const Lock lock = Of({});
  Hold first = lock.Acquire();
  EXPECT_THROW(lock.Acquire(), turnstile::NotAcquired);
  EXPECT_FALSE(lock.TryAcquire());
  EXPECT_EQ(server_.Fence("k"), first.token());
  first.Release();
  first.Release();  // Once more does nothing.
  EXPECT_FALSE(first.lost());
  EXPECT_THROW(first.Check(), turnstile::Lost);
  EXPECT_THROW(first.Touch(), turnstile::Lost);
  EXPECT_EQ(server_.Info("stale_touches"), 0);  // It did not even ask.
  EXPECT_FALSE(server_.Exists("k"));

  std::optional<Hold> second = lock.TryAcquire();
  ASSERT_TRUE(second);
  EXPECT_GT(second->token(), first.token());
  EXPECT_NE(second->owner(), first.owner());
  EXPECT_EQ(second->owner().size(), 32U);
  second.reset();  // Its end gives the lock up.
  EXPECT_FALSE(server_.Exists("k"));
}

TEST_F(CppClientTest, MovesAndIsReleasedOnce) {
  std::vector<Hold> holds;
  holds.push_back(Of({}, "a").Acquire());
  holds.push_back(Of({}, "b").Acquire());
  holds[0] = std::move(holds[1]);
  EXPECT_FALSE(server_.Exists("a"));
  EXPECT_EQ(server_.Fence("b"), holds[0].token());
  holds.clear();
  EXPECT_FALSE(server_.Exists("b"));
  EXPECT_EQ(server_.Info("released"), 2);
  EXPECT_EQ(server_.Info("stale_releases"), 0);
}

TEST_F(CppClientTest, WaitsInLine) {
  Hold first = Of({}).Acquire();
  // Longer than the time-out for a slow server, which must not end it.
  auto start = Clock::now();
  EXPECT_THROW(Of({.wait = 700ms, .timeout = 200ms}).Acquire(), turnstile::NotAcquired);
  ExpectBetween(Since(start), 690ms, 700ms + kSlack);
  EXPECT_EQ(server_.Info("waits"), 1);  // in one go
  start = Clock::now();
  EXPECT_FALSE(Of({.wait = 700ms}).TryAcquire());
  ExpectBetween(Since(start), 0ms, kSlack);

  std::future<Hold> second = Waiting(Of({.wait = kPatience}));
  ASSERT_TRUE(server_.AwaitWaiters(1));
  first.Release();
  EXPECT_GT(second.get().token(), first.token());
}

// A grant after a wait that was longer than the lease must not look as if it were over already.
TEST_F(CppClientTest, WaitsLongForAShortLease) {
  server_.Do({"LOCK.ACQUIRE", "k", "other", "PX", "600"});
  Hold hold = Of({.lease = 200ms, .wait = kPatience}).Acquire();
  EXPECT_TRUE(server_.AwaitRenewals(7));  // two leases later
  hold.Check();
  hold.Release();
  EXPECT_EQ(server_.Info("reacquired"), 1);
}

TEST_F(CppClientTest, WithAlwaysReleases) {
  const Lock lock = Of({});
  EXPECT_EQ(lock.With([this](Hold& hold, const std::stop_token&) {
    EXPECT_EQ(server_.Fence("k"), hold.token());
    return 42;
  }),
            42);
  EXPECT_FALSE(server_.Exists("k"));

  EXPECT_THROW(lock.With([](Hold&, const std::stop_token&) { throw std::logic_error("own"); }),
               std::logic_error);
  EXPECT_FALSE(server_.Exists("k"));

  // The release fails too: the work's own error comes first. Without one, the loss is told.
  EXPECT_THROW(lock.With([this](Hold&, const std::stop_token&) {
    server_.Do({"DEL", "k"});
    throw std::logic_error("own");
  }),
               std::logic_error);
  EXPECT_THROW(lock.With([this](Hold&, const std::stop_token&) {
    server_.Do({"DEL", "k"});
  }),
               turnstile::Lost);
}

TEST_F(CppClientTest, RenewsInTheBackground) {
  constexpr auto kLease = 300ms;
  const auto start = Clock::now();
  Hold hold = Of({.lease = kLease}).Acquire();
  EXPECT_TRUE(Await([&] {
    EXPECT_EQ(server_.Fence("k"), hold.token());
    return server_.Info("touched") >= 15;
  }));
  EXPECT_GE(Since(start), 4 * kLease) << "not more often than need be";
  hold.Check();
  hold.Release();
  EXPECT_FALSE(server_.Exists("k"));
  // While the next holder is renewed, the last one is not.
  Hold next = Of({.lease = kLease}).Acquire();
  EXPECT_TRUE(server_.AwaitRenewals(4));
  EXPECT_EQ(server_.Info("stale_touches"), 0);
}

TEST_F(CppClientTest, TouchStartsTheLeaseAnew) {
  Hold hold = Of({.lease = 60s}).Acquire();
  EXPECT_TRUE(Await([this] { return server_.Do({"PTTL", "k"}).integer <= 59'900; }));
  const auto before = server_.Do({"PEXPIRETIME", "k"}).integer;
  hold.Touch();
  EXPECT_GE(server_.Do({"PEXPIRETIME", "k"}).integer, before + 90);
  server_.Do({"DEL", "k"});
  EXPECT_THROW(hold.Touch(), turnstile::Lost);
  EXPECT_TRUE(hold.lost());
  EXPECT_THROW(hold.Check(), turnstile::Lost);
  EXPECT_THROW(hold.Release(), turnstile::Lost);
}

TEST_F(CppClientTest, TellsTheWorkThatTheHoldIsLost) {
  static constexpr auto kLease = 900ms;
  EXPECT_THROW(Of({.lease = kLease}).With([this](Hold& hold, const std::stop_token& lost) {
    const auto start = Clock::now();
    server_.Do({"DEL", "k"});
    EXPECT_TRUE(Await([&lost] { return lost.stop_requested(); }));
    ExpectBetween(Since(start), 0ms, kLease / 3 + kSlack);
    EXPECT_TRUE(hold.lost());
    hold.Check();
  }),
               turnstile::Lost);
}

// A callback runs in the thread that renews, and may look at the hold.
TEST_F(CppClientTest, CallbacksMayLook) {
  Hold hold = Of({.lease = 300ms}).Acquire();
  std::atomic<bool> told = false;
  const std::stop_callback tell(hold.stop_token(), [&] {
    EXPECT_THROW(hold.Check(), turnstile::Lost);
    told = true;
  });
  server_.Do({"DEL", "k"});
  EXPECT_TRUE(Await([&told] { return told.load(); }));
}

class SilentServerTest : public CppClientTest, public testing::WithParamInterface<int> {};

TEST_P(SilentServerTest, LosesTheHoldAtTheEndOfTheLease) {
  constexpr milliseconds kLease = 1s;
  const auto before = Clock::now();
  Hold hold = Of({.lease = kLease, .timeout = kSlack}).Acquire();
  const auto acquiring = Since(before);
  server_.Signal(GetParam());
  EXPECT_TRUE(Await([&hold] { return hold.lost(); }));
  ExpectBetween(Since(before), kLease, acquiring + kLease + kSlack);
  EXPECT_THROW(hold.Check(), turnstile::Lost);
  EXPECT_THROW(hold.Release(), turnstile::Lost);
}

INSTANTIATE_TEST_SUITE_P(Signals, SilentServerTest, testing::Values(SIGSTOP, SIGKILL));

TEST_F(CppClientTest, ShortSilenceCostsNothing) {
  constexpr milliseconds kLease = 1500ms;
  Hold hold = Of({.lease = kLease}).Acquire();
  server_.Signal(SIGSTOP);
  EXPECT_TRUE(Await([this] { return server_.HasUnread(); }));  // asked, and not answered
  server_.Signal(SIGCONT);
  EXPECT_TRUE(server_.AwaitRenewals(4));
  hold.Check();
  hold.Release();
}

TEST_F(CppClientTest, Maximum) {
  constexpr auto kLease = 300ms;
  constexpr auto kMax = 800ms;
  const Lock lock = Of({.lease = kLease, .max_hold = kMax});
  const auto start = Clock::now();
  Hold hold = lock.Acquire();
  EXPECT_TRUE(Await([&hold] { return hold.lost(); }));
  ExpectBetween(Since(start), kMax, kMax + kSlack);
  EXPECT_THROW(hold.Check(), turnstile::MaxHold);
  EXPECT_THROW(hold.Touch(), turnstile::MaxHold);
  // Nobody renews it now, and nobody has released it.
  EXPECT_TRUE(Await([this] { return !server_.Exists("k"); }));
  ExpectBetween(Since(start), kMax, kMax + kLease + kSlack);
  EXPECT_THROW(hold.Release(), turnstile::Lost);

  lock.With([](Hold&, const std::stop_token& lost) {
    EXPECT_TRUE(Await([&lost] { return lost.stop_requested(); }));
  });
  EXPECT_FALSE(server_.Exists("k"));
}

TEST_F(CppClientTest, LostReply) {
  Proxy proxy(server_.port());
  Client client("127.0.0.1", proxy.port());
  for (const milliseconds wait : {0ms, 1000ms}) {
    server_.Do({"CONFIG", "RESETSTAT"});
    const auto acquired = server_.Info("acquired");
    const auto again = server_.Info("reacquired");
    const auto lost = proxy.lost();
    proxy.Lose("LOCK.ACQUIRE", 2);
    Hold hold = Lock(client, "k", {.wait = wait}).Acquire();
    EXPECT_EQ(proxy.lost(), lost + 2);
    EXPECT_EQ(server_.Info("acquired"), acquired + 1);
    EXPECT_EQ(server_.Info("reacquired"), again + 2);
    EXPECT_EQ(server_.Fence("k"), hold.token());
    hold.Release();
    EXPECT_FALSE(server_.Exists("k"));
  }
}

TEST_F(CppClientTest, ConnectionLostInLine) {
  server_.Do({"LOCK.ACQUIRE", "k", "other", "PX", "60000"});
  std::future<Hold> waiting = Waiting(Of({.wait = kPatience}));
  for (int i = 1; i <= 2; ++i) {
    ASSERT_TRUE(server_.AwaitWaiters(1));
    server_.Do({"CLIENT", "KILL", "ID", server_.BlockedClient()});
    ASSERT_TRUE(Await([&] { return server_.Info("waits") == i + 1; }));
  }
  server_.Do({"LOCK.RELEASE", "k", "other"});
  waiting.get().Release();
  EXPECT_EQ(server_.Info("waiters"), 0);
}

TEST_F(CppClientTest, GivingUpLeavesNothingBehind) {
  for (const bool silent : {false, true}) {
    const auto acquired = server_.Info("acquired");
    Proxy proxy(server_.port(), silent);
    Client client("127.0.0.1", proxy.port());
    proxy.Lose("LOCK.ACQUIRE", 1 << 30);
    const auto start = Clock::now();
    EXPECT_THROW(Lock(client, "k", {.wait = 300ms, .timeout = 400ms}).Acquire(),
                 turnstile::ConnectionError);
    ExpectBetween(Since(start), 600ms, 1100ms + kSlack);  // two time-outs
    EXPECT_EQ(server_.Info("acquired"), acquired + 1);
    EXPECT_FALSE(server_.Exists("k"));

    // Nor in the name of an owner that the caller has chosen.
    const Lock mine(client, "k", {.timeout = 200ms, .owner = "worker"});
    EXPECT_THROW(mine.Acquire(), turnstile::ConnectionError);
    EXPECT_EQ(server_.Info("acquired"), acquired + 2);
    EXPECT_FALSE(server_.Exists("k"));

    // But what that owner holds through another call is kept.
    proxy.Lose("LOCK.ACQUIRE", 0);
    Hold older = mine.Acquire();
    proxy.Lose("LOCK.ACQUIRE", 1 << 30);
    EXPECT_THROW(mine.Acquire(), turnstile::ConnectionError);
    older.Touch();
    older.Release();
    EXPECT_FALSE(server_.Exists("k"));
  }
}

TEST_F(CppClientTest, LostReplyToARelease) {
  Proxy proxy(server_.port());
  Client client("127.0.0.1", proxy.port());
  Hold hold = Lock(client, "k").Acquire();
  proxy.Lose("LOCK.RELEASE", 1);
  hold.Release();  // The second try gets 0. While the lease lasts only the first can have done it.
  EXPECT_EQ(proxy.lost(), 1);
  EXPECT_FALSE(server_.Exists("k"));

  // With a session it can have been lost as well.
  Hold session = Lock(client, "k", {.session = true}).Acquire();
  proxy.Lose("LOCK.RELEASE", 1);
  EXPECT_THROW(session.Release(), turnstile::Lost);

  // No answer at all: nobody can know.
  Hold unknown = Lock(client, "k").Acquire();
  proxy.Lose("LOCK.RELEASE", 2);
  EXPECT_THROW(unknown.Release(), turnstile::ConnectionError);
  EXPECT_FALSE(server_.Exists("k"));
}

TEST_F(CppClientTest, LostReplyToAReleaseAfterTheLease) {
  Proxy proxy(server_.port(), true);
  Client client("127.0.0.1", proxy.port());
  Hold hold = Lock(client, "k", {.lease = 300ms, .timeout = 500ms}).Acquire();
  proxy.Lose("LOCK.RELEASE", 1);
  EXPECT_THROW(hold.Release(), turnstile::Lost);
}

TEST_F(CppClientTest, NobodyThere) {
  server_.Signal(SIGKILL);
  const auto start = Clock::now();
  EXPECT_THROW(Of({.timeout = kSlack}).Acquire(), turnstile::ConnectionError);
  ExpectBetween(Since(start), 0ms, 2 * kSlack);
}

// Broken connections that are kept for later fail one call, not one after the other.
TEST_F(CppClientTest, IdleConnectionsThatBroke) {
  Hold hold = Of({}).Acquire();
  std::vector<turnstile::Connection> connections;
  for (int i = 0; i < 4; ++i) connections.push_back(server_.client().Take(Clock::now() + 1s));
  for (auto& connection : connections) server_.client().Give(std::move(connection));
  server_.Do({"CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"});
  hold.Release();
}

TEST_F(CppClientTest, CancelledInLine) {
  server_.Do({"LOCK.ACQUIRE", "k", "other", "PX", "60000"});
  std::stop_source cancel;
  std::future<Hold> waiting = Waiting(Of({.wait = 60s}), cancel.get_token());
  ASSERT_TRUE(server_.AwaitWaiters(1));
  const auto start = Clock::now();
  cancel.request_stop();
  EXPECT_THROW(waiting.get(), turnstile::Cancelled);
  ExpectBetween(Since(start), 0ms, kSlack);
  EXPECT_TRUE(server_.AwaitWaiters(0));
  server_.Do({"LOCK.RELEASE", "k", "other"});
  EXPECT_FALSE(server_.Exists("k"));
  const auto released = server_.Info("stale_releases");
  EXPECT_THROW(Of({}).Acquire(cancel.get_token()), turnstile::Cancelled);
  EXPECT_FALSE(server_.Exists("k"));
  EXPECT_EQ(server_.Info("stale_releases"), released);  // Nothing was asked for.
}

// Cancelled at the moment of the grant, again and again: a hold or an error, never both or neither.
TEST_F(CppClientTest, CancelledAtTheGrant) {
  for (int i = 0; i < 60; ++i) {
    server_.Do({"LOCK.ACQUIRE", "k", "other", "PX", "60000"});
    std::stop_source cancel;
    std::future<Hold> waiting =
        Waiting(Of({.wait = kPatience, .session = i % 2 == 0}), cancel.get_token());
    ASSERT_TRUE(server_.AwaitWaiters(1));
    const std::jthread canceller([&cancel] { cancel.request_stop(); });
    server_.Do({"LOCK.RELEASE", "k", "other"});
    try {
      Hold hold = waiting.get();
      EXPECT_EQ(server_.Fence("k"), hold.token());
      hold.Touch();
      hold.Release();
    } catch (const turnstile::Cancelled&) {
    }
    ASSERT_TRUE(Await([this] { return !server_.Exists("k") && server_.Info("waiters") == 0; }));
  }
}

// When Acquire() was cancelled, the server has neither a hold nor a waiter of it. Many times,
// because what is at stake is which of two connections the server reads first.
class CancelledAcquireTest : public CppClientTest, public testing::WithParamInterface<bool> {
 protected:
  static constexpr int kTries = 200;

  // The random one of the client, or one that the caller chooses.
  static std::string Owner(int i) { return GetParam() ? "worker " + std::to_string(i) : ""; }

  long long Keys() { return server_.Do({"DBSIZE"}).integer; }
};

TEST_P(CancelledAcquireTest, InLineLeavesNothing) {
  for (int i = 0; i < kTries; ++i) {
    const std::string key = "k" + std::to_string(i);
    Hold hold = Of({.lease = 60s}, key).Acquire();
    std::stop_source cancel;
    std::future<Hold> waiting = Waiting(Of({.lease = 60s,
                                            .wait = 60s,
                                            .session = i % 3 == 0,
                                            .also = {key + "b"},
                                            .owner = Owner(i)},
                                           key),
                                        cancel.get_token());
    ASSERT_TRUE(server_.AwaitWaiters(1));
    cancel.request_stop();
    if (i % 2 == 0) waiting.wait();
    hold.Release();
    EXPECT_THROW(waiting.get(), turnstile::Cancelled);
    EXPECT_EQ(server_.Info("waiters"), 0);
  }
  EXPECT_EQ(Keys(), 0);
}

TEST_P(CancelledAcquireTest, AtAnyMomentLeavesNothing) {
  for (int i = 0; i < kTries; ++i) {
    const std::string key = "k" + std::to_string(i);
    if (i % 2 == 0) server_.Do({"LOCK.ACQUIRE", key, "other", "PX", "60000"});
    std::stop_source cancel;
    std::future<Hold> waiting =
        Waiting(Of({.lease = 60s, .wait = 60s, .owner = Owner(i)}, key), cancel.get_token());
    std::this_thread::sleep_for(std::chrono::microseconds(i % 40 * 50));
    cancel.request_stop();
    server_.Do({"LOCK.RELEASE", key, "other"});
    try {
      waiting.get().Release();
    } catch (const turnstile::Cancelled&) {
    }
    EXPECT_EQ(server_.Info("waiters"), 0);
  }
  EXPECT_EQ(Keys(), 0);
}

// The release overtakes the request.
TEST_P(CancelledAcquireTest, BeforeTheRequestArrives) {
  for (const bool released_before : {false, true}) {
    Proxy proxy(server_.port());
    Client client("127.0.0.1", proxy.port());
    server_.Do({"LOCK.ACQUIRE", "k", "other", "PX", "60000"});
    proxy.HoldBack("LOCK.ACQUIRE");
    const auto stale = server_.Info("stale_releases");
    std::stop_source cancel;
    const Options options{.lease = 60s, .wait = 60s, .timeout = kPatience, .owner = Owner(0)};
    std::future<Hold> waiting = Waiting(Lock(client, "k", options), cancel.get_token());
    ASSERT_TRUE(Await([&] { return proxy.holds_back(); }));
    cancel.request_stop();
    ASSERT_TRUE(Await([&] { return server_.Info("stale_releases") > stale; }));
    if (released_before) server_.Do({"LOCK.RELEASE", "k", "other"});
    proxy.LetThrough();
    EXPECT_THROW(waiting.get(), turnstile::Cancelled);
    EXPECT_EQ(server_.Info("waiters"), 0);
    server_.Do({"LOCK.RELEASE", "k", "other"});
    EXPECT_EQ(Keys(), 0);
  }
}

// The server reads the request when nobody waits for the answer any more.
TEST_P(CancelledAcquireTest, NoAnswerInTimeLeavesNothing) {
  server_.Signal(SIGSTOP);
  EXPECT_THROW(Of({.lease = 60s, .wait = 100ms, .timeout = 200ms, .owner = Owner(0)}).Acquire(),
               turnstile::ConnectionError);
  server_.Signal(SIGCONT);
  EXPECT_TRUE(Await([&] { return server_.Info("acquired") == 1; }));
  EXPECT_TRUE(Await([&] { return Keys() == 0; }));
}

INSTANTIATE_TEST_SUITE_P(, CancelledAcquireTest, testing::Bool(), [](const auto& owner) {
  return owner.param ? "OwnerOfTheCaller" : "RandomOwner";
});

TEST_F(CppClientTest, CancelledUpgradeKeepsTheSharedHold) {
  Hold other = Of({.shared = true}).Acquire();
  Hold reader = Of({.shared = true, .owner = "worker"}).Acquire();
  for (int i = 0; i < 20; ++i) {
    std::stop_source cancel;
    std::future<Hold> waiting = Waiting(Of({.wait = 60s, .owner = "worker"}), cancel.get_token());
    ASSERT_TRUE(server_.AwaitWaiters(1));
    cancel.request_stop();
    EXPECT_THROW(waiting.get(), turnstile::Cancelled);
    ASSERT_TRUE(server_.AwaitWaiters(0));
    reader.Touch();
  }
  other.Release();
  reader.Run({"SET", "data", "x"});  // under the token of before
  reader.Release();
  EXPECT_FALSE(server_.Exists("k"));
}

TEST_F(CppClientTest, GuardedWrites) {
  Hold hold = Of({}).Acquire();
  EXPECT_EQ(hold.Run({"SET", "value", "1"}).text, "OK");
  EXPECT_EQ(hold.Run({"INCR", "value"}).integer, 2);
  EXPECT_EQ(hold.Run({"MGET", "value", "none"}).elements.at(0).text, "2");
  EXPECT_THROW(hold.Run({"LPUSH", "value", "1"}), turnstile::ReplyError);  // the write's own
  hold.Check();
  server_.Do({"DEL", "k"});
  EXPECT_THROW(hold.Run({"SET", "value", "3"}), turnstile::Fenced);
  EXPECT_EQ(server_.Do({"GET", "value"}).text, "2");
  EXPECT_TRUE(hold.lost());
  EXPECT_THROW(hold.Check(), turnstile::Lost);
}

TEST_F(CppClientTest, ErrorsAreToldApart) {
  // Two workers that hold a lock each want the other's.
  const auto of = [this](const std::string& owner, const std::string& key) {
    return Of({.wait = kPatience, .owner = owner}, key);
  };
  Hold a = of("a", "x").Acquire();
  Hold b = of("b", "y").Acquire();
  std::future<Hold> waiting = Waiting(of("a", "y"));
  ASSERT_TRUE(server_.AwaitWaiters(1));
  EXPECT_THROW(of("b", "x").Acquire(), turnstile::Deadlock);

  server_.Do({"CONFIG", "SET", "turnstile.max-waiters", "1"});
  EXPECT_THROW(of("c", "x").Acquire(), turnstile::WaitLimit);

  server_.Do({"CLIENT", "UNBLOCK", server_.BlockedClient(), "ERROR"});
  EXPECT_THROW(waiting.get(), turnstile::Superseded);

  // A newer call of the same owner: the older one must not give up what the newer one gets. Not
  // even if it lost its connection, and so does not know what it has.
  waiting = Waiting(of("a", "y"));
  ASSERT_TRUE(server_.AwaitWaiters(1));
  const auto waited = server_.Info("waits");
  server_.Do({"CLIENT", "KILL", "ID", server_.BlockedClient()});
  ASSERT_TRUE(Await([&] { return server_.Info("waits") == waited + 1; }));
  server_.Do({"CONFIG", "SET", "turnstile.max-waiters", "2"});
  std::future<Hold> newer = Waiting(of("a", "y"));
  EXPECT_THROW(waiting.get(), turnstile::Superseded);
  EXPECT_EQ(server_.Info("stale_releases"), 0);
  b.Release();
  const Hold got = newer.get();
  EXPECT_EQ(server_.Fence("y"), got.token());

  try {
    Of({.lease = 100000h}).Acquire();
    ADD_FAILURE() << "a lease that is too long";
  } catch (const turnstile::ReplyError& error) {
    EXPECT_EQ(typeid(error), typeid(turnstile::ReplyError));
  }

  server_.Do({"REPLICAOF", "127.0.0.1", "1"});
  EXPECT_THROW(of("a", "z").Acquire(), turnstile::NotPrimary);
  EXPECT_THROW(a.Touch(), turnstile::NotPrimary);
  a.Check();  // A fail-over may still end well.
  EXPECT_THROW(a.Run({"SET", "value", "1"}), turnstile::NotPrimary);

  Server cluster({"--cluster-enabled", "yes"});
  EXPECT_THROW(Lock(cluster.client(), "k").Acquire(), turnstile::Moved);
}

TEST_F(CppClientTest, PasswordsAndUsers) {
  server_.Do({"ACL", "SETUSER", "worker", "on", ">secret", "~*", "+@all"});
  server_.Do({"ACL", "SETUSER", "default", ">secret2"});
  server_.Do({"CONFIG", "SET", "requirepass", "secret2"});
  Client worker({.port = server_.port(), .user = "worker", .password = "secret"});
  Client anybody({.port = server_.port(), .password = "secret2"});
  Client wrong({.port = server_.port(), .user = "worker", .password = "wrong"});
  Lock(worker, "k").Acquire().Release();
  Lock(anybody, "k").Acquire().Release();
  EXPECT_THROW(Lock(wrong, "k").Acquire(), turnstile::ReplyError);
}

TEST_F(CppClientTest, Modes) {
  const auto try_it = [this](const std::string& key, Options options) {
    return Of(std::move(options), key).TryAcquire();
  };
  std::optional<Hold> first = try_it("shared", {.shared = true});
  std::optional<Hold> second = try_it("shared", {.shared = true});
  EXPECT_TRUE(first && second);
  EXPECT_FALSE(try_it("shared", {}));
  first.reset();
  second.reset();
  first = try_it("shared", {});
  EXPECT_FALSE(try_it("shared", {.shared = true}));

  first = try_it("limit", {.limit = 2});
  second = try_it("limit", {.limit = 2});
  EXPECT_TRUE(first && second);
  EXPECT_FALSE(try_it("limit", {.limit = 2}));
  first.reset();
  EXPECT_TRUE(try_it("limit", {.limit = 2}));

  // Several locks are one hold: all or none, renewed, lost and released together.
  const Options many = {.lease = 300ms, .also = {"many2", "many3"}};
  first = try_it("many1", many);
  ASSERT_TRUE(first);
  EXPECT_FALSE(try_it("many3", {}));
  EXPECT_TRUE(server_.AwaitRenewals(3 * 7));  // of three locks, for two leases
  for (const char* key : {"many1", "many2", "many3"}) {
    EXPECT_EQ(server_.Fence(key), first->token());
  }
  first->Release();
  EXPECT_EQ(server_.Do({"EXISTS", "many1", "many2", "many3"}).integer, 0);
  first = try_it("many1", many);
  server_.Do({"DEL", "many2"});
  EXPECT_TRUE(Await([&first] { return first->lost(); }));
  EXPECT_THROW(first->Release(), turnstile::Lost);
  EXPECT_EQ(server_.Do({"EXISTS", "many1", "many3"}).integer, 0);

  first = try_it("linger", {.linger = 60s});
  EXPECT_GE(server_.Do({"PTTL", "linger"}).integer, 60000);
}

TEST_F(CppClientTest, Session) {
  constexpr auto kLease = 900ms;
  const Lock lock = Of({.lease = kLease, .session = true});
  std::optional<Hold> hold = lock.Acquire();
  EXPECT_TRUE(server_.AwaitRenewals(7));  // two leases later
  hold->Check();
  EXPECT_EQ(server_.Sessions(), 1);
  hold->Release();
  EXPECT_TRUE(Await([this] { return server_.Sessions() == 0; }));

  hold.emplace(lock.Acquire());
  const auto start = Clock::now();
  server_.Do({"CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes"});
  EXPECT_TRUE(Await([this] { return !server_.Exists("k"); }));
  EXPECT_TRUE(Await([&hold] { return hold->lost(); }));
  ExpectBetween(Since(start), 0ms, kLease / 3 + kLease / 10 + kSlack);
  EXPECT_THROW(hold->Release(), turnstile::Lost);
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);  // as turnstile.h asks for
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
