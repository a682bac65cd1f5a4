// Calls that wait by NOTIFY: very many of them, and what a hand-over takes. Works on servers of
// this machine that are there already, and prints JSON.
//
//   queued storm --port P --pid PID --lines one|many --end END [--count N] [--slow F] [--seed N]
//
// N calls wait, in one line or in N lines, whose locks are held; then all of these waits end:
//
//   hand-over  each holder releases its lock, until everybody has had it
//   time-out   at their time-outs, which come together
//   release    each by a LOCK.RELEASE of its owner
//   leases     the leases of the holders end together, and then those of all who were granted
//
// Where they end together, everything has to be sent before. If that takes too long, it ends with
// status 3; F is how much slower than usual the machine is.
//
// There is one connection for all commands, with a window of 1000 of them, and one that is
// subscribed to the channel. For each phase it prints how long it took, the CPU time of the server,
// and the longest stall that a third connection has seen, which sends a PING every millisecond; at
// points in between the used_memory of the server.
//
//   queued plain --port P --pid PID [--count N]
//
// For comparison, the same pings while the server is idle, while N strings are set and deleted in
// the same windows, and while N strings expire together.
//
//   queued hand-over --port P --pid PID --way WAY --waiters N [--count C] [--seed N]
//
// One lock, N + 1 clients. The holder releases, the next one hears that it holds the lock, and the
// former holder goes to the end of the line; C times. The latency is from the release to the time
// when the next one knows.
//
//   blocked    LOCK.ACQUIRE … WAIT, each client on a connection of its own
//   notify     LOCK.ACQUIRE … WAIT NOTIFY, all clients on one connection, and one subscribed to the
//              channel
//   confirmed  the same, and LOCK.TOUCH before the next one believes it
//   pubsub     SET NX PX; a release is published to all, and all who wait try again; each client
//              with two connections of its own
//
// Every reply and every message is checked; an unexpected one ends the run with status 1.

#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

namespace {

constexpr double kPatience = 60;  // seconds without any progress
constexpr size_t kWindow = 1000;  // commands on their way
constexpr int kTooSlow = 3;       // a status
constexpr const char* kLongMs = "3600000";
constexpr const char* kGrantedMs = "5000";  // the lease where leases end

[[noreturn]] void Fail(const std::string& why) {
  std::fprintf(stderr, "queued: %s\n", why.c_str());
  std::_Exit(1);
}

struct Settings {
  int port = 0;
  int pid = 0;
  std::string lines;
  std::string end;
  std::string way;
  size_t count = 1000;
  size_t waiters = 1;
  double slow = 1;
  unsigned seed = 1;
};

double Seconds(const timespec& time) {
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double Now() {
  timespec time{};
  clock_gettime(CLOCK_MONOTONIC, &time);
  return Seconds(time);
}

void Pass(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

// CPU time of a process. Unlike /proc it counts what a process that runs has used up to now.
class CpuClock {
 public:
  explicit CpuClock(int pid) {
    if (clock_getcpuclockid(pid, &id_) != 0) Fail("cannot read the server's CPU time");
  }
  double Now() const {
    timespec time{};
    if (clock_gettime(id_, &time) != 0) Fail("the server has ended");
    return Seconds(time);
  }

 private:
  clockid_t id_{};
};

// --- Connections
// ----------------------------------------------------------------------------------

std::string Wire(std::initializer_list<std::string_view> words) {
  std::string wire = "*" + std::to_string(words.size()) + "\r\n";
  for (const std::string_view word : words) {
    wire += "$" + std::to_string(word.size()) + "\r\n";
    wire += word;
    wire += "\r\n";
  }
  return wire;
}

// A reply: its first line without the type, or its string; and the elements of an array.
struct Reply {
  char type = 0;
  bool null = false;
  std::string text;
  std::vector<Reply> elements;

  bool IsOk() const { return type == '+' && text == "OK"; }
  bool IsNull() const { return null; }
  bool Is(int64_t number) const { return type == ':' && text == std::to_string(number); }
  bool IsToken() const { return type == ':' && text != "0" && text[0] != '-'; }
};

class Connection {
 public:
  explicit Connection(int port) : socket_(::socket(AF_INET, SOCK_STREAM, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int on = 1;
    if (connect(socket_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
        setsockopt(socket_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) != 0 ||
        fcntl(socket_, F_SETFL, O_NONBLOCK) != 0) {
      Fail("cannot connect");
    }
  }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;
  ~Connection() { close(socket_); }

  int socket() const { return socket_; }
  bool has_output() const { return sent_ < output_.size(); }
  void Add(std::string_view data) { output_ += data; }

  void Flush() {
    while (has_output()) {
      const ssize_t size =
          ::send(socket_, output_.data() + sent_, output_.size() - sent_, MSG_NOSIGNAL);
      if (size < 0 && errno == EAGAIN) return;
      if (size < 0) Fail("the server closed a connection");
      sent_ += static_cast<size_t>(size);
    }
    output_.clear();
    sent_ = 0;
  }

  void Fill() {
    if (parsed_ == input_.size()) {
      input_.clear();
      parsed_ = 0;
    }
    char buffer[65536];
    const ssize_t size = recv(socket_, buffer, sizeof(buffer), 0);
    if (size < 0 && errno == EAGAIN) return;
    if (size <= 0) Fail("the server closed a connection");
    input_.append(buffer, static_cast<size_t>(size));
  }

  // The next reply that has come, as far as it has been read.
  std::optional<Reply> Next() {
    size_t at = parsed_;
    Reply reply;
    if (!Parse(at, reply)) return std::nullopt;
    parsed_ = at;
    return reply;
  }

  Reply Read() {
    while (true) {
      if (std::optional<Reply> reply = Next()) return *std::move(reply);
      pollfd ready{socket_, POLLIN, 0};
      if (poll(&ready, 1, static_cast<int>(1000 * kPatience)) <= 0) Fail("no reply");
      Fill();
    }
  }

  void Send(std::string_view data) {
    Add(data);
    while (true) {
      Flush();
      if (!has_output()) return;
      pollfd ready{socket_, POLLOUT, 0};
      if (poll(&ready, 1, static_cast<int>(1000 * kPatience)) <= 0) Fail("cannot send");
    }
  }

  Reply Ask(std::initializer_list<std::string_view> words) {
    Send(Wire(words));
    return Read();
  }

 private:
  bool Parse(size_t& at, Reply& reply) {
    const size_t end = input_.find("\r\n", at);
    if (end == std::string::npos) return false;
    reply.type = input_[at];
    reply.text.assign(input_, at + 1, end - at - 1);
    at = end + 2;
    if (reply.type == '-') Fail("the server answers: " + reply.text);
    if (reply.type != '$' && reply.type != '*') return true;
    const long size = std::atol(reply.text.c_str());
    reply.null = size < 0;
    if (size < 0) return true;
    if (reply.type == '*') {
      reply.elements.resize(static_cast<size_t>(size));
      return std::all_of(reply.elements.begin(), reply.elements.end(),
                         [&](Reply& element) { return Parse(at, element); });
    }
    if (input_.size() < at + static_cast<size_t>(size) + 2) return false;
    reply.text.assign(input_, at, static_cast<size_t>(size));
    at += static_cast<size_t>(size) + 2;
    return true;
  }

  int socket_;
  std::string output_;
  size_t sent_ = 0;
  std::string input_;
  size_t parsed_ = 0;
};

double InfoField(Connection& connection, const char* section, const std::string& name) {
  const Reply info = connection.Ask({"INFO", section});
  const size_t at = info.text.find("\r\n" + name + ":");
  if (at == std::string::npos) Fail("INFO has no " + name);
  return std::atof(info.text.c_str() + at + name.size() + 3);
}

// --- Stalls
// ---------------------------------------------------------------------------------------

// Sends a PING every millisecond from a thread of its own, and keeps how long each took, by the
// clock and in CPU time of the server. The first includes the time in which server or thread had to
// wait for a core; the second does not.
class Pinger {
 public:
  struct Ping {
    double sent;
    double wall;
    double cpu;
  };

  Pinger(int port, int pid) : connection_(port), cpu_(pid), thread_([this] { Run(); }) {}
  ~Pinger() {
    ends_ = true;
    thread_.join();
  }

  // The pings that were sent in this time.
  std::vector<Ping> Between(double begin, double end) {
    while (last_sent_ < end) Pass(0.001);
    const std::lock_guard<std::mutex> guard(mutex_);
    std::vector<Ping> found;
    for (const Ping& ping : pings_) {
      if (ping.sent >= begin && ping.sent < end) found.push_back(ping);
    }
    return found;
  }

 private:
  void Run() {
    // Ahead of other processes, where that is allowed: else it would measure how busy they are.
    sched_param first{};
    first.sched_priority = 1;
    sched_setscheduler(0, SCHED_FIFO, &first);
    while (!ends_) {
      const double sent = Now();
      const double cpu = cpu_.Now();
      if (connection_.Ask({"PING"}).text != "PONG") Fail("no PONG");
      const double wall = Now() - sent;
      const Ping ping{sent, wall, std::min(wall, cpu_.Now() - cpu)};
      {
        const std::lock_guard<std::mutex> guard(mutex_);
        pings_.push_back(ping);
      }
      last_sent_ = sent;
      Pass(0.001);
    }
  }

  Connection connection_;
  CpuClock cpu_;
  std::mutex mutex_;
  std::vector<Ping> pings_;
  std::atomic<double> last_sent_ = 0;
  std::atomic<bool> ends_ = false;
  std::thread thread_;
};

// Measures phases, and prints each as a member of a JSON object.
class Meter {
 public:
  Meter(int port, int pid) : port_(port), cpu_(pid), pinger_(port, pid) {}

  void Begin() {
    begin_ = Now();
    cpu_before_ = cpu_.Now();
  }

  // `from`: when the work began, if that was later.
  void End(const char* phase, std::optional<double> from = std::nullopt) {
    const double cpu = cpu_.Now() - cpu_before_;
    const double end = Now();
    std::vector<Pinger::Ping> pings = pinger_.Between(begin_ - 0.002, end);
    if (pings.empty()) Fail("no ping was sent meanwhile");
    std::vector<double> walls;
    std::vector<double> cpus;
    for (const Pinger::Ping& ping : pings) {
      walls.push_back(1000 * ping.wall);
      cpus.push_back(1000 * ping.cpu);
    }
    std::sort(walls.begin(), walls.end());
    std::sort(cpus.begin(), cpus.end());
    const auto p99 = [](const std::vector<double>& sorted) {
      return sorted[static_cast<size_t>(0.99 * static_cast<double>(sorted.size() - 1))];
    };
    Member(phase);
    std::printf(
        "{\"seconds\": %.4f, \"cpu_s\": %.6f, \"pings\": %zu, \"wall_p99_ms\": %.3f, "
        "\"wall_max_ms\": %.3f, \"cpu_p99_ms\": %.3f, \"cpu_max_ms\": %.3f}",
        end - from.value_or(begin_), cpu, pings.size(), p99(walls), walls.back(), p99(cpus),
        cpus.back());
  }

  // Asks on a connection of its own, which is as large each time.
  void Memory(const char* point) {
    Connection connection(port_);
    Member(point);
    std::printf("%.0f", InfoField(connection, "memory", "used_memory"));
  }

  void Close() { std::printf("}\n"); }

 private:
  void Member(const char* name) {
    std::printf("%s\"%s\": ", any_ ? ", " : "{", name);
    any_ = true;
  }

  int port_;
  CpuClock cpu_;
  Pinger pinger_;
  double begin_ = 0;
  double cpu_before_ = 0;
  bool any_ = false;
};

// --- Very many waiters
// ----------------------------------------------------------------------------

// One connection for commands, in windows, and one for messages.
class Driver {
 public:
  using OnMessage = std::function<void(const std::string&)>;

  Driver(int port, const std::string& channel) : commands_(port), messages_(port) {
    if (messages_.Ask({"SUBSCRIBE", channel}).elements.size() != 3) Fail("cannot subscribe");
  }

  Connection& connection() { return commands_; }

  // Sends a command, some time soon. Its reply must be this.
  void Send(std::string command, bool (*expect)(const Reply&)) {
    waiting_.push_back({std::move(command), expect});
  }

  // Until all is sent and answered, and that many messages have come in all.
  void Run(size_t messages, const OnMessage& on_message) {
    while (true) {
      while (next_ < waiting_.size() && next_ - answered_ < kWindow) {
        commands_.Add(waiting_[next_].command);
        waiting_[next_++].command = {};
      }
      commands_.Flush();
      if (answered_ == waiting_.size()) {
        waiting_.clear();
        next_ = answered_ = 0;
        if (heard_ >= messages) return;
      }
      const short wanted = commands_.has_output() ? POLLIN | POLLOUT : POLLIN;
      pollfd ready[] = {{commands_.socket(), wanted, 0}, {messages_.socket(), POLLIN, 0}};
      if (poll(ready, 2, static_cast<int>(1000 * kPatience)) <= 0) {
        Fail("nothing happens; " + std::to_string(heard_) + " messages of " +
             std::to_string(messages));
      }
      if ((ready[0].revents & POLLIN) != 0) {
        commands_.Fill();
        while (const std::optional<Reply> reply = commands_.Next()) {
          if (!waiting_[answered_++].expect(*reply)) Fail("unexpected reply: " + reply->text);
        }
      }
      if ((ready[1].revents & POLLIN) != 0) {
        messages_.Fill();
        while (const std::optional<Reply> reply = messages_.Next()) {
          if (reply->elements.size() != 3) Fail("no message");
          ++heard_;
          on_message(reply->elements[2].text);
        }
      }
    }
  }
  void Run() {
    Run(heard_, [](const std::string& message) { Fail("unexpected message: " + message); });
  }
  size_t heard() const { return heard_; }

 private:
  struct Waiting {
    std::string command;
    bool (*expect)(const Reply&);
  };

  Connection commands_;
  Connection messages_;
  std::vector<Waiting> waiting_;
  size_t next_ = 0;
  size_t answered_ = 0;
  size_t heard_ = 0;
};

bool IsZero(const Reply& reply) { return reply.Is(0); }
bool IsOne(const Reply& reply) { return reply.Is(1); }
bool IsToken(const Reply& reply) { return reply.IsToken(); }
bool IsOk(const Reply& reply) { return reply.IsOk(); }

std::string Padded(const char* prefix, size_t number) {
  char text[32];
  std::snprintf(text, sizeof(text), "%s%011zu", prefix, number);
  return text;
}

std::string MillisUntil(double time) {
  return std::to_string(std::max(1L, std::lround(1000 * (time - Now()))));
}

std::string RandomWord(std::mt19937& random, size_t size) {
  std::string word(size, ' ');
  for (char& digit : word) digit = "0123456789abcdef"[random() % 16];
  return word;
}

class Storm {
 public:
  explicit Storm(const Settings& settings)
      : settings_(settings),
        random_(settings.seed),
        channel_("replies:" + RandomWord(random_, 16)),
        salt_(RandomWord(random_, 12)),
        meter_(settings.port, settings.pid),
        is_one_line_(settings.lines == "one"),
        answered_(settings.count) {
    for (size_t i = 0; i < settings.count; ++i) owners_.push_back(RandomWord(random_, 32));
    for (size_t i = 0; i < locks(); ++i) holders_.push_back(RandomWord(random_, 32));
  }

  void Run() {
    meter_.Memory("memory_start");
    driver_ = std::make_unique<Driver>(settings_.port, channel_);
    const bool by_leases = settings_.end == "leases";
    const bool by_time_outs = settings_.end == "time-out";
    const double until = Now() + 2 + settings_.slow * static_cast<double>(settings_.count) / 20000;
    for (size_t i = 0; i < locks(); ++i) {
      const std::string lease = by_leases ? MillisUntil(until) : kLongMs;
      driver_->Send(Wire({"LOCK.ACQUIRE", Key(i), holders_[i], "PX", lease}), IsToken);
      if (by_leases && i % kWindow == 0) driver_->Run();
    }
    driver_->Run();
    meter_.Memory("memory_held");
    Enter(until);
    if ((by_leases || by_time_outs) && Now() > until - 0.3) std::_Exit(kTooSlow);
    CheckQueued(settings_.count);
    meter_.Memory("memory_waiting");
    if (by_leases || by_time_outs) Pass(until - Now() - 0.2);
    if (by_leases) {
      EndByLeases(until);
    } else if (by_time_outs) {
      EndByTimeOuts(until);
    } else if (settings_.end == "release") {
      EndByReleases();
    } else if (is_one_line_) {
      HandOverOneLine();
    } else {
      HandOverManyLines();
    }
    CheckQueued(0);
    // The buffers of the connections are not those of the waiters, and tables shrink a little
    // later, in the server's cron.
    driver_.reset();
    Pass(1);
    meter_.Memory("memory_end");
    meter_.Close();
  }

 private:
  size_t locks() const { return is_one_line_ ? 1 : settings_.count; }
  std::string Key(size_t lock) const { return Padded("held:", lock); }
  std::string KeyOf(size_t waiter) const { return Key(is_one_line_ ? 0 : waiter); }
  std::string Id(size_t waiter) const { return salt_ + Padded("", waiter).substr(1); }

  // The waiter that a message of this kind is for; each has exactly one.
  size_t WaiterOf(const std::string& message, std::string_view kind, int round) {
    size_t waiter = 0;
    const size_t begin = salt_.size();
    const size_t end = message.find(' ');
    if (end == std::string::npos || message.compare(0, begin, salt_) != 0 ||
        message.compare(end + 1, kind.size(), kind) != 0) {
      Fail("unexpected message: " + message);
    }
    std::from_chars(message.data() + begin, message.data() + end, waiter);
    if (waiter >= answered_.size() || answered_[waiter]++ != round) {
      Fail("too many messages: " + message);
    }
    return waiter;
  }
  Driver::OnMessage Check(std::string_view kind, int round = 0) {
    return [=, this](const std::string& message) { WaiterOf(message, kind, round); };
  }
  void CheckQueued(size_t count) {
    const double queued = InfoField(driver_->connection(), "turnstile", "turnstile_queued");
    if (static_cast<size_t>(queued) != count) Fail("not as many are in line as should be");
  }

  void Enter(double until) {
    const bool by_time_outs = settings_.end == "time-out";
    const std::string lease = settings_.end == "leases" ? kGrantedMs : kLongMs;
    meter_.Begin();
    for (size_t i = 0; i < settings_.count; ++i) {
      const std::string wait = by_time_outs ? MillisUntil(until) : kLongMs;
      driver_->Send(Wire({"LOCK.ACQUIRE", KeyOf(i), owners_[i], "PX", lease, "WAIT", wait, "NOTIFY",
                          channel_, Id(i)}),
                    IsZero);
      if (by_time_outs && i % kWindow == 0) driver_->Run();
    }
    driver_->Run();
    meter_.End("enter");
  }

  void Release(size_t waiter) {
    driver_->Send(Wire({"LOCK.RELEASE", KeyOf(waiter), owners_[waiter]}), IsOne);
  }
  void ReleaseHolders() {
    for (size_t i = 0; i < locks(); ++i) {
      driver_->Send(Wire({"LOCK.RELEASE", Key(i), holders_[i]}), IsOne);
    }
  }

  void HandOverOneLine() {
    size_t next = 0;
    meter_.Begin();
    ReleaseHolders();
    driver_->Run(settings_.count, [&](const std::string& message) {
      const size_t waiter = WaiterOf(message, "granted ", 0);
      if (waiter != next++) Fail("not in order of arrival");
      Release(waiter);
    });
    meter_.End("end");
  }

  void HandOverManyLines() {
    meter_.Begin();
    ReleaseHolders();
    driver_->Run(settings_.count, Check("granted "));
    meter_.End("end");
    meter_.Memory("memory_granted");
    meter_.Begin();
    for (size_t i = 0; i < settings_.count; ++i) Release(i);
    driver_->Run();
    meter_.End("release_holds");
  }

  void EndByTimeOuts(double until) {
    meter_.Begin();
    driver_->Run(settings_.count, Check("timeout "));
    meter_.End("end", until);
    ReleaseHolders();
    driver_->Run();
  }

  void EndByReleases() {
    meter_.Begin();
    for (size_t i = 0; i < settings_.count; ++i) Release(i);
    driver_->Run(settings_.count, Check("error UNBLOCKED "));
    meter_.End("end");
    ReleaseHolders();
    driver_->Run();
  }

  // The lease of a hold that was granted early may end before the last one is granted.
  void EndByLeases(double until) {
    size_t granted = 0;
    meter_.Begin();
    driver_->Run(2 * settings_.count, [&](const std::string& message) {
      if (message.find(" granted ") == std::string::npos) {
        WaiterOf(message, "lost ", 1);
        return;
      }
      WaiterOf(message, "granted ", 0);
      if (++granted < settings_.count) return;
      meter_.End("end", until);
      meter_.Begin();
    });
    meter_.End("lost");
  }

  Settings settings_;
  std::mt19937 random_;
  std::string channel_;
  std::string salt_;
  std::unique_ptr<Driver> driver_;
  Meter meter_;
  bool is_one_line_;
  std::vector<std::string> owners_;
  std::vector<std::string> holders_;
  std::vector<int> answered_;  // messages to each waiter
};

void MeasurePlain(const Settings& settings) {
  std::mt19937 random(settings.seed);
  Driver driver(settings.port, "nothing");
  Meter meter(settings.port, settings.pid);
  meter.Begin();
  Pass(2);
  meter.End("idle");
  meter.Begin();
  for (size_t i = 0; i < settings.count; ++i) {
    driver.Send(Wire({"SET", Padded("held:", i), RandomWord(random, 32), "NX", "PX", kLongMs}),
                IsOk);
  }
  driver.Run();
  meter.End("set");
  meter.Begin();
  for (size_t i = 0; i < settings.count; ++i) {
    driver.Send(Wire({"DEL", Padded("held:", i)}), IsOne);
  }
  driver.Run();
  meter.End("del");
  const double until = Now() + 2 + static_cast<double>(settings.count) / 15000;
  for (size_t i = 0; i < settings.count; ++i) {
    const std::string left = MillisUntil(until);
    driver.Send(Wire({"SET", Padded("held:", i), RandomWord(random, 32), "NX", "PX", left}), IsOk);
    if (i % kWindow == 0) driver.Run();
  }
  driver.Run();
  Pass(until - Now() - 0.2);
  meter.Begin();
  while (!driver.connection().Ask({"DBSIZE"}).Is(0)) Pass(0.01);
  meter.End("expire", until);
  meter.Close();
}

// --- Hand-overs
// -----------------------------------------------------------------------------------

constexpr const char* kReleaseAndPublishScript =
    "if redis.call('get',KEYS[1])==ARGV[1] then redis.call('del',KEYS[1]) "
    "return redis.call('publish',KEYS[1],'free') end return 0";

// One lock and its clients, all driven by this thread.
class Way {
 public:
  explicit Way(const Settings& settings) : control_(settings.port) {
    std::mt19937 random(settings.seed);
    for (size_t i = 0; i <= settings.waiters; ++i) owners_.push_back(RandomWord(random, 32));
    control_.Ask({"DEL", "lock"});
  }
  virtual ~Way() = default;
  // Client 0 takes the lock, the others wait, in order.
  virtual void Begin() = 0;
  // The holder releases, another one gets the lock and is told, and the former holder waits again.
  // Returns how long it took until the other one was told.
  virtual double HandOver() = 0;

 protected:
  size_t clients() const { return owners_.size(); }
  const std::string& owner(size_t client) const { return owners_[client]; }
  static void Expect(bool right, const Reply& reply) {
    if (!right) Fail("unexpected reply: " + reply.text);
  }
  void Settle() { control_.Ask({"PING"}); }  // comes behind what was sent before

  size_t holder_ = 0;

 private:
  std::vector<std::string> owners_;
  Connection control_;

 protected:
  Connection& control() { return control_; }
};

class Blocked : public Way {
 public:
  explicit Blocked(const Settings& settings) : Way(settings) {
    for (size_t i = 0; i < clients(); ++i) {
      connections_.push_back(std::make_unique<Connection>(settings.port));
    }
  }
  void Begin() override {
    for (size_t i = 0; i < clients(); ++i) {
      Wait(i);
      Settle();
    }
    AwaitGrant(0);
  }
  double HandOver() override {
    Connection& former = *connections_[holder_];
    const size_t next = (holder_ + 1) % clients();
    const double began = Now();
    former.Send(Wire({"LOCK.RELEASE", "lock", owner(holder_)}));
    AwaitGrant(next);
    const double took = Now() - began;
    const Reply released = former.Read();
    Expect(released.Is(1), released);
    Wait(std::exchange(holder_, next));
    return took;
  }

 private:
  void Wait(size_t client) {
    connections_[client]->Send(
        Wire({"LOCK.ACQUIRE", "lock", owner(client), "PX", kLongMs, "WAIT", kLongMs}));
  }
  void AwaitGrant(size_t client) {
    const Reply reply = connections_[client]->Read();
    Expect(reply.IsToken(), reply);
  }

  std::vector<std::unique_ptr<Connection>> connections_;
};

class Notified : public Way {
 public:
  Notified(const Settings& settings, bool confirms)
      : Way(settings),
        confirms_(confirms),
        channel_("replies:" + owner(0).substr(16)),
        commands_(settings.port),
        messages_(settings.port) {
    if (messages_.Ask({"SUBSCRIBE", channel_}).elements.size() != 3) Fail("cannot subscribe");
  }
  void Begin() override {
    for (size_t i = 0; i < clients(); ++i) {
      Wait(i);
      const Reply reply = commands_.Read();
      Expect(i == 0 ? reply.IsToken() : reply.Is(0), reply);
    }
  }
  double HandOver() override {
    const size_t next = (holder_ + 1) % clients();
    const double began = Now();
    commands_.Send(Wire({"LOCK.RELEASE", "lock", owner(holder_)}));
    const Reply message = messages_.Read();
    if (message.elements.size() != 3 || !message.elements[2].text.starts_with(Id(next))) {
      Fail("unexpected message");
    }
    if (!confirms_) return After(Now() - began, next);
    commands_.Send(Wire({"LOCK.TOUCH", "lock", owner(next), "PX", kLongMs}));
    ReadRest();
    ReadOne();
    const Reply touched = commands_.Read();
    Expect(touched.Is(1), touched);
    return After(Now() - began, next);
  }

 private:
  std::string Id(size_t client) const { return owner(client).substr(0, 22); }
  void Wait(size_t client) {
    commands_.Send(Wire({"LOCK.ACQUIRE", "lock", owner(client), "PX", kLongMs, "WAIT", kLongMs,
                         "NOTIFY", channel_, Id(client)}));
  }
  // The former holder goes to the end of the line. That answer is read later, as it is where the
  // client blocks.
  double After(double took, size_t next) {
    if (!confirms_) {
      ReadRest();
      ReadOne();
    }
    Wait(std::exchange(holder_, next));
    is_entering_ = true;
    return took;
  }
  void ReadRest() {
    if (!std::exchange(is_entering_, false)) return;
    const Reply entered = commands_.Read();
    Expect(entered.Is(0), entered);
  }
  void ReadOne() {
    const Reply released = commands_.Read();
    Expect(released.Is(1), released);
  }

  bool confirms_;
  bool is_entering_ = false;
  std::string channel_;
  Connection commands_;
  Connection messages_;
};

class WakeAll : public Way {
 public:
  explicit WakeAll(const Settings& settings) : Way(settings) {
    script_ = control().Ask({"SCRIPT", "LOAD", kReleaseAndPublishScript}).text;
    for (size_t i = 0; i < clients(); ++i) {
      commands_.push_back(std::make_unique<Connection>(settings.port));
      messages_.push_back(std::make_unique<Connection>(settings.port));
      messages_.back()->Ask({"SUBSCRIBE", "lock"});
      polled_.push_back({commands_.back()->socket(), POLLIN, 0});
      polled_.push_back({messages_.back()->socket(), POLLIN, 0});
    }
  }
  void Begin() override {
    for (size_t i = 0; i < clients(); ++i) {
      Try(i);
      const Reply reply = commands_[i]->Read();
      Expect(i == 0 ? reply.IsOk() : reply.IsNull(), reply);
    }
  }
  // Everybody who waits hears of it and tries once; so does the former holder when it is answered.
  double HandOver() override {
    const size_t former = holder_;
    size_t unheard = clients();
    size_t untried = clients();
    double took = 0;
    bool is_released = false;
    const double began = Now();
    commands_[former]->Send(Wire({"EVALSHA", script_, "1", "lock", owner(former)}));
    while (unheard > 0 || untried > 0) {
      if (poll(polled_.data(), polled_.size(), static_cast<int>(1000 * kPatience)) <= 0) {
        Fail("nothing happens");
      }
      for (size_t i = 0; i < clients(); ++i) {
        if (polled_[2 * i].revents != 0) {
          const Reply reply = commands_[i]->Read();
          if (i == former && !std::exchange(is_released, true)) {
            Expect(reply.Is(static_cast<int64_t>(clients())), reply);
            continue;
          }
          --untried;
          if (!reply.IsNull()) {
            Expect(reply.IsOk() && took == 0, reply);
            took = Now() - began;
            holder_ = i;
          }
        }
        if (polled_[2 * i + 1].revents != 0) {
          messages_[i]->Read();
          --unheard;
          if (i != former) Try(i);
        }
      }
      // It comes last, or it could get the lock again at once.
      if (untried == 1 && unheard == 0 && is_released && took > 0) {
        Try(former);
        const Reply reply = commands_[former]->Read();
        Expect(reply.IsNull(), reply);
        --untried;
      }
    }
    return took;
  }

 private:
  void Try(size_t client) {
    commands_[client]->Send(Wire({"SET", "lock", owner(client), "NX", "PX", kLongMs}));
  }

  std::string script_;
  std::vector<std::unique_ptr<Connection>> commands_;
  std::vector<std::unique_ptr<Connection>> messages_;
  std::vector<pollfd> polled_;
};

std::unique_ptr<Way> WayNamed(const Settings& settings) {
  if (settings.way == "blocked") return std::make_unique<Blocked>(settings);
  if (settings.way == "notify") return std::make_unique<Notified>(settings, false);
  if (settings.way == "confirmed") return std::make_unique<Notified>(settings, true);
  if (settings.way == "pubsub") return std::make_unique<WakeAll>(settings);
  Fail("no way is named '" + settings.way + "'");
}

void MeasureHandOvers(const Settings& settings) {
  const std::unique_ptr<Way> way = WayNamed(settings);
  const CpuClock cpu(settings.pid);
  way->Begin();
  for (size_t i = 0; i < settings.count / 5; ++i) way->HandOver();
  std::vector<double> latencies;
  const double before = cpu.Now();
  for (size_t i = 0; i < settings.count; ++i) latencies.push_back(1e6 * way->HandOver());
  const double cpu_us = 1e6 * (cpu.Now() - before) / static_cast<double>(settings.count);
  std::sort(latencies.begin(), latencies.end());
  const auto quantile = [&latencies](double q) {
    return latencies[static_cast<size_t>(q * static_cast<double>(latencies.size() - 1))];
  };
  std::printf("{\"cpu_us\": %.3f, \"p50_us\": %.3f, \"p99_us\": %.3f}\n", cpu_us, quantile(0.5),
              quantile(0.99));
}

int Main(int argc, char** argv) {
  Settings settings;
  const std::string task = argc > 1 ? argv[1] : "";
  for (int i = 2; i + 1 < argc; i += 2) {
    const std::string option = argv[i];
    const char* value = argv[i + 1];
    if (option == "--port") settings.port = std::atoi(value);
    if (option == "--pid") settings.pid = std::atoi(value);
    if (option == "--lines") settings.lines = value;
    if (option == "--end") settings.end = value;
    if (option == "--way") settings.way = value;
    if (option == "--count") settings.count = static_cast<size_t>(std::atol(value));
    if (option == "--waiters") settings.waiters = static_cast<size_t>(std::atol(value));
    if (option == "--slow") settings.slow = std::atof(value);
    if (option == "--seed") settings.seed = static_cast<unsigned>(std::atoi(value));
  }
  if (settings.count < 1 || settings.waiters < 1) Fail("a number must be positive");
  if (task == "storm") {
    Storm(settings).Run();
  } else if (task == "plain") {
    MeasurePlain(settings);
  } else if (task == "hand-over") {
    MeasureHandOvers(settings);
  } else {
    Fail("say storm, plain or hand-over");
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return Main(argc, argv); }
