// The load test: thousands of clients of one server, half of which wait, and a million held locks.
//
//   turnstile_fault_load [--clients 10000] [--waiters 5000] [--locks 1000000] [--seconds 60]
//                        [--rate 10000] [--seed 1] [--aof]
//
// Somewhat more clients than --waiters contend for a few locks and wait in line. The others
// release, acquire, touch and check the held locks at random, --rate times a second. Meanwhile
// connections are killed, unblocked and closed at random and made again. Each reply is checked
// against what it must be. In the end all is released and closed, and the server's memory and file
// descriptors have to be what they were before.
//
// Prints what was seen as Markdown. Ends with 1 if there was a violation, with 2 if it cannot run
// here.

#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iomanip>
#include <iostream>
#include <map>
#include <mutex>
#include <optional>
#include <queue>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "support/client.h"
#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/reply.h"
#include "support/resp3.h"
#include "support/server.h"

namespace turnstile::fault {
namespace {

using testing::Client;
using testing::Clock;
using testing::Command;
using testing::EncodeCommand;
using testing::EngineOf;
using testing::Eventually;
using testing::InfoField;
using testing::Milliseconds;
using testing::ParseReply;
using testing::Protocol;
using testing::RawConnection;
using testing::Reply;
using testing::Server;
using testing::ServerOptions;
using testing::WaitReadable;

// The lease of a contended lock: longer than any wait for it and any hold of it.
constexpr Milliseconds kContendedLease{6000};
constexpr Milliseconds kShortestWait{50};
constexpr Milliseconds kLongestWait{3000};
constexpr Milliseconds kLongestHold{100};
// By how much a wait may outlast its time-out, not counting the time in which the server or this
// program had no processor.
constexpr Milliseconds kLateAtMost{1000};
// Longer from one turn of this program to the next, and the machine stood still.
constexpr Milliseconds kLongestTurn{100};
constexpr int64_t kLongLease = 3600000;

// What of the server's memory may be left at the end: the larger of the two.
constexpr int64_t kMemoryLeftBytes = int64_t{2} << 20;
constexpr double kMemoryLeftShare = 0.01;

struct Settings {
  int64_t clients = 10000;
  int64_t waiters = 5000;
  int64_t locks = 1000000;
  int64_t seconds = 60;
  int64_t rate = 10000;
  uint64_t seed = 1;
  bool aof = false;
};

// Those who wait, and some more for those who just hold or are on their way.
int64_t Contenders(const Settings& settings) { return settings.waiters + settings.waiters / 5; }

// --- What went wrong --------------------------------------------------------------------------

class Violations {
 public:
  void Add(const std::string& text) {
    const std::lock_guard guard(mutex_);
    if (count_++ < kShown) std::cerr << "VIOLATION: " << text << "\n";
  }
  int64_t count() const {
    const std::lock_guard guard(mutex_);
    return count_;
  }

 private:
  static constexpr int64_t kShown = 20;

  mutable std::mutex mutex_;
  int64_t count_ = 0;
};

std::string Text(const Reply& reply) {
  std::ostringstream text;
  text << reply;
  return text.str();
}

// --- Times ------------------------------------------------------------------------------------

class Times {
 public:
  void Add(Clock::duration time) { all_.push_back(time); }
  size_t size() const { return all_.size(); }

  // In milliseconds; 1.0 is the longest.
  double At(double share) {
    if (all_.empty()) return 0;
    std::sort(all_.begin(), all_.end());
    const auto place = static_cast<size_t>(share * static_cast<double>(all_.size() - 1));
    return std::chrono::duration<double, std::milli>(all_[place]).count();
  }

 private:
  std::vector<Clock::duration> all_;
};

// --- What the server says of itself -----------------------------------------------------------

int64_t Number(Client& client, std::string_view section, const std::string& field) {
  const std::string text = InfoField(client, section, field);
  return text.starts_with("no field") ? -1 : std::stoll(text);
}

std::string ProcOf(const Server& server) { return "/proc/" + std::to_string(server.pid()); }

int64_t OpenFiles(const Server& server) {
  const std::filesystem::directory_iterator files(ProcOf(server) + "/fd");
  return std::distance(begin(files), end(files));
}

// What the kernel counts of a thread: how long it had a processor, and how long it waited for one.
class ProcessorTime {
 public:
  // `thread` is a folder in /proc.
  explicit ProcessorTime(const std::string& thread)
      : fd_(open((thread + "/schedstat").c_str(), O_RDONLY | O_CLOEXEC)) {}
  ~ProcessorTime() { close(fd_); }
  ProcessorTime(const ProcessorTime&) = delete;
  ProcessorTime& operator=(const ProcessorTime&) = delete;

  std::chrono::nanoseconds Had() const { return Read().first; }
  std::chrono::nanoseconds Waited() const { return Read().second; }

 private:
  std::pair<std::chrono::nanoseconds, std::chrono::nanoseconds> Read() const {
    std::array<char, 100> text{};
    if (pread(fd_, text.data(), text.size() - 1, 0) <= 0) return {};
    char* rest = nullptr;
    const int64_t had = std::strtoll(text.data(), &rest, 10);
    return {std::chrono::nanoseconds(had), std::chrono::nanoseconds(std::strtoll(rest, &rest, 10))};
  }

  int fd_;
};

// The longest of each kind of delay that the server's latency monitor has seen since the last call.
std::string LatencyEvents(Client& client) {
  std::map<std::string, int64_t> longest;
  for (const Reply& event : client.Do("LATENCY", "LATEST").elements) {
    if (event.elements.size() == 4) longest[event.elements[0].text] = event.elements[3].integer;
  }
  client.Do("LATENCY", "RESET");
  std::string text;
  for (const auto& [name, time] : longest) {
    text.append(text.empty() ? "" : ", ").append(name).append(" ");
    text.append(std::to_string(time)).append(" ms");
  }
  return text.empty() ? "none" : text;
}

// --- The observer -----------------------------------------------------------------------------

enum Phase : size_t { kLoad, kChurn, kRelease, kPhases };
constexpr std::array kPhaseNames = {"loading the locks", "churn", "releasing all"};

// Asks the server on a connection of its own each millisecond, and notes how long the answer takes;
// now and then what the server says of itself.
class Observer {
 public:
  explicit Observer(const Server& server) : server_(server), thread_([this] { Run(); }) {}
  ~Observer() { Stop(); }
  Observer(const Observer&) = delete;
  Observer& operator=(const Observer&) = delete;

  void SetPhase(Phase phase) { phase_ = phase; }
  void Stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }

  // After Stop():
  std::array<Times, kPhases> answers;  // to PING
  // The same without the time in which the server, or this thread, waited for a processor.
  std::array<Times, kPhases> net_answers;
  std::vector<int64_t> waiters;  // during the churn
  int64_t peak_memory = 0;

 private:
  void Run() {
    // The observer should not have to wait for a processor. It may if there is no right to this.
    setpriority(PRIO_PROCESS, 0, -15);
    const ProcessorTime servers(ProcOf(server_));
    const ProcessorTime own("/proc/thread-self");
    RawConnection ping = server_.ConnectRaw();
    Client info = server_.Connect();
    auto next_info = Clock::now();
    while (!stop_) {
      const size_t phase = phase_;
      WaitReadable(-1, Clock::now() + Milliseconds{1});
      const auto start = Clock::now();
      const auto servers_before = servers.Waited();
      const auto own_before = own.Waited();
      ping.SendCommand({"PING"});
      ping.ReadReply(Milliseconds{60000});
      const auto took = Clock::now() - start;
      answers[phase].Add(took);
      const auto delay = servers.Waited() - servers_before + own.Waited() - own_before;
      net_answers[phase].Add(std::max<Clock::duration>(took - delay, Clock::duration::zero()));
      if (start < next_info) continue;
      next_info = start + Milliseconds{250};
      peak_memory = std::max(peak_memory, Number(info, "memory", "used_memory"));
      if (phase == kChurn) waiters.push_back(Number(info, "turnstile", "turnstile_waiters"));
    }
  }

  const Server& server_;
  std::atomic<Phase> phase_ = kLoad;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

// --- Held locks -------------------------------------------------------------------------------

std::string HeldKey(size_t lock) { return "held:" + std::to_string(lock); }
std::string HeldOwner(size_t lock) { return "owner:" + std::to_string(lock); }

// Does one command for each held lock, in pipelines.
void ForEachLock(const Server& server, size_t locks, const std::function<Command(size_t)>& command,
                 const std::function<void(size_t, const Reply&)>& check) {
  constexpr size_t kPipeline = 200;
  RawConnection connection = server.ConnectRaw();
  for (size_t first = 0; first < locks; first += kPipeline) {
    const size_t last = std::min(locks, first + kPipeline);
    std::string requests;
    for (size_t lock = first; lock < last; lock++) requests += EncodeCommand(command(lock));
    connection.WriteRaw(requests);
    for (size_t lock = first; lock < last; lock++) check(lock, connection.ReadReply());
  }
}

// --- The crowd --------------------------------------------------------------------------------

struct Counts {
  int64_t granted = 0;       // to contenders, at once or after a wait
  int64_t timed_out = 0;     // null, at the end of WAIT
  int64_t told_to_stop = 0;  // null, by CLIENT UNBLOCK … TIMEOUT
  int64_t unblocked = 0;     // -UNBLOCKED, by CLIENT UNBLOCK … ERROR
  int64_t released = 0;
  int64_t killed = 0;         // CLIENT KILL
  int64_t left = 0;           // closed by the client itself
  int64_t operations = 0;     // on held locks
  int64_t unblocks_sent = 0;  // CLIENT UNBLOCK of both kinds
  int64_t replies = 0;        // all
};

// How a contender asks for a lock.
enum class Mode { kExclusive, kShared, kLimit };

// What a client on held locks has asked.
enum class Ask { kNothing, kAcquire, kAgain, kRelease, kTouch, kCheck, kFence, kStranger };

enum class Step {
  kClosed,
  kArriving,   // has asked for its id
  kIdle,       //
  kWaiting,    // contenders: LOCK.ACQUIRE … WAIT is sent
  kHolding,    // contenders: granted
  kReleasing,  // contenders: LOCK.RELEASE is sent
  kAsking,     // the others: something is sent
};

struct Peer {
  int fd = -1;
  Step step = Step::kClosed;
  uint64_t life = 0;  // how many connections it has had
  int64_t id = 0;     // CLIENT ID
  bool doomed = false;
  std::string in;  // what was read and is no whole reply

  // Contenders:
  std::string owner;
  size_t contended = 0;
  Mode mode = Mode::kExclusive;
  Clock::time_point asked;
  std::chrono::nanoseconds starved_before{0};  // of all, when it asked
  Milliseconds patience{0};
  int64_t token_before = 0;
  bool reported_late = false;
  int stops_under_way = 0;   // CLIENT UNBLOCK … TIMEOUT that were not answered yet
  int errors_under_way = 0;  // … ERROR
  bool may_stop = false;     // the present wait may end by one of them
  bool may_fail = false;

  // The others:
  size_t lock = 0;
  Ask ask = Ask::kNothing;
  bool unsure = false;  // the connection was lost: the lock may be held or not
};

class Crowd {
 public:
  Crowd(const Settings& settings, const Server& server, Violations& violations)
      : settings_(settings),
        port_(server.port()),
        server_waits_(ProcOf(server)),
        violations_(violations),
        random_(settings.seed),
        contenders_(static_cast<size_t>(Contenders(settings))),
        peers_(static_cast<size_t>(settings.clients)),
        lines_(std::max<size_t>(1, static_cast<size_t>(settings.waiters) / 12)),
        tokens_(static_cast<size_t>(settings.locks)) {
    epoll_ = epoll_create1(EPOLL_CLOEXEC);
    for (size_t i = contenders_; i < peers_.size(); i++) peers_[i].lock = i - contenders_;
  }
  ~Crowd() {
    CloseAll();
    close(epoll_);
  }
  Crowd(const Crowd&) = delete;
  Crowd& operator=(const Crowd&) = delete;

  const Counts& counts() const { return counts_; }
  std::vector<int64_t>& tokens() { return tokens_; }
  size_t contenders() const { return contenders_; }
  size_t lines() const { return lines_.size(); }

  static std::string LineKey(size_t line) { return "line:" + std::to_string(line); }

  // How long a release needs to reach the next in line, and by how much null came after WAIT.
  Times hand_overs;
  Times late;

  // Connects all, and returns when each has been answered.
  void ConnectAll() {
    for (size_t i = 0; i < peers_.size(); i++) {
      Arrive(i);
      if (i % 500 == 499) Turn(Milliseconds{0});
    }
    Connect(killer_, kKiller);
    RunUntil([this] {
      return std::all_of(peers_.begin(), peers_.end(),
                         [](const Peer& peer) { return peer.step == Step::kIdle; });
    });
  }

  void CloseAll() {
    for (Peer& peer : peers_) Disconnect(peer);
    Disconnect(killer_);
  }

  void Churn(Clock::duration time) {
    const auto start = Clock::now();
    auto last = start;
    double operations_due = 0;
    double troubles_due = 0;
    auto next_look = start;
    for (auto now = start; now < start + time; now = Clock::now()) {
      const double passed = std::chrono::duration<double>(now - last).count();
      last = now;
      operations_due += passed * static_cast<double>(settings_.rate);
      troubles_due += passed * kTroublesASecond;
      for (; operations_due >= 1; operations_due--) Operate(contenders_ + Pick(others()));
      for (; troubles_due >= 1; troubles_due--) Trouble();
      for (int i = 0; i < 50 && started_ < contenders_; i++, started_++) {
        if (peers_[started_].step == Step::kIdle) Contend(started_);
      }
      if (now >= next_look) {
        LookForLateWaits(now);
        next_look = now + Milliseconds{100};
      }
      ReleaseWhatIsDue(now);
      Turn(Milliseconds{1});
    }
  }

  // The others finish what they have asked, and make sure that they hold their locks.
  void Settle() {
    const auto settled = [this] {
      bool all = true;
      for (size_t i = contenders_; i < peers_.size(); i++) {
        Peer& peer = peers_[i];
        if (peer.step == Step::kIdle && (peer.unsure || tokens_[peer.lock] == 0)) {
          Request(i, Ask::kAcquire);
        }
        all = all && peer.step == Step::kIdle;
      }
      return all;
    };
    quiet_ = true;
    RunUntil(settled);
  }

 private:
  struct Line {
    int64_t token = 0;  // the highest that was heard of
    std::optional<size_t> holder;
    Clock::time_point released{};
  };
  struct Due {
    Clock::time_point when;
    size_t peer;
    uint64_t life;
    bool operator>(const Due& other) const { return when > other.when; }
  };

  static constexpr size_t kKiller = ~size_t{0};
  static constexpr double kTroublesASecond = 400;

  size_t others() const { return peers_.size() - contenders_; }
  size_t Pick(size_t below) { return static_cast<size_t>(random_() % below); }
  bool Chance(unsigned percent) { return random_() % 100 < percent; }

  std::string Name(size_t i) const {
    return (i < contenders_ ? "contender " : "client ") + std::to_string(i) + " (connection " +
           std::to_string(peers_[i].life) + ")";
  }

  // --- Connections ---

  void Connect(Peer& peer, uint64_t name) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port_));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    peer.fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (peer.fd < 0 ||
        connect(peer.fd, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
      throw std::runtime_error(std::string("cannot connect: ") + std::strerror(errno));
    }
    const int on = 1;
    setsockopt(peer.fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    epoll_event watch{.events = EPOLLIN, .data = {.u64 = name}};
    epoll_ctl(epoll_, EPOLL_CTL_ADD, peer.fd, &watch);
  }

  void Arrive(size_t i) {
    Peer& peer = peers_[i];
    const uint64_t life = peer.life + 1;
    // What it has done to its lock stays done.
    const size_t lock = peer.lock;
    const bool unsure = peer.unsure;
    peer = {};
    peer.life = life;
    peer.lock = lock;
    peer.unsure = unsure;
    // Another one each time: nobody knows what has become of the old one's request.
    peer.owner = "contender:" + std::to_string(i) + ":" + std::to_string(life);
    Connect(peer, i);
    peer.step = Step::kArriving;
    Send(i, {"CLIENT", "ID"});
  }

  // Closes it as a client that died does, without leaving the port to TIME_WAIT.
  static void Disconnect(Peer& peer) {
    if (peer.fd < 0) return;
    const linger at_once{1, 0};
    setsockopt(peer.fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    close(peer.fd);
    peer.fd = -1;
    peer.step = Step::kClosed;
  }

  // The connection is gone, by whatever cause. A new one takes its place.
  void Renew(size_t i) {
    Peer& peer = peers_[i];
    if (peer.step == Step::kAsking) peer.unsure = true;
    if (i < contenders_) ForgetHolder(i);
    Disconnect(peer);
    Arrive(i);
  }

  void Send(size_t i, const Command& command) {
    const std::string bytes = EncodeCommand(command);
    // It is short and all before it is answered, so it fits. A dead connection shows in Read().
    (void)!send(peers_[i].fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
  }

  template <typename Predicate>
  void RunUntil(Predicate&& done) {
    const auto deadline = Clock::now() + std::chrono::minutes(2);
    while (!done()) {
      ReleaseWhatIsDue(Clock::now());
      Turn(Milliseconds{5});
      if (Clock::now() > deadline) throw std::runtime_error("the server does not answer");
    }
  }

  void Turn(Milliseconds wait) {
    std::array<epoll_event, 1024> events;
    const int ready = epoll_wait(epoll_, events.data(), static_cast<int>(events.size()),
                                 static_cast<int>(wait.count()));
    // A machine that stands still is not seen in what anybody waited for a processor.
    const auto now = Clock::now();
    if (now - last_turn_ > kLongestTurn) stood_still_ += now - last_turn_;
    last_turn_ = now;
    starved_ = server_waits_.Waited() + own_waits_.Waited() + stood_still_;
    for (int i = 0; i < ready; i++) {
      const uint64_t name = events[static_cast<size_t>(i)].data.u64;
      if (name == kKiller) {
        ReadKiller();
      } else {
        Read(static_cast<size_t>(name));
      }
    }
  }

  // False at the end of the connection.
  static bool Receive(Peer& peer) {
    std::array<char, 4096> buffer;
    const ssize_t size = recv(peer.fd, buffer.data(), buffer.size(), MSG_DONTWAIT);
    if (size > 0) peer.in.append(buffer.data(), static_cast<size_t>(size));
    return size > 0 || (size < 0 && (errno == EAGAIN || errno == EINTR));
  }

  static std::optional<Reply> TakeReply(Peer& peer) {
    size_t size = 0;
    std::optional<Reply> reply = ParseReply(peer.in, Protocol::kResp2, &size);
    if (reply) peer.in.erase(0, size);
    return reply;
  }

  void Read(size_t i) {
    const uint64_t life = peers_[i].life;
    const bool open = Receive(peers_[i]);
    while (peers_[i].life == life) {
      const std::optional<Reply> reply = TakeReply(peers_[i]);
      if (!reply) break;
      counts_.replies++;
      Answered(i, *reply);
    }
    if (open || peers_[i].life != life) return;
    if (!peers_[i].doomed) violations_.Add(Name(i) + ": the server closed the connection");
    Renew(i);
  }

  void Answered(size_t i, const Reply& reply) {
    switch (peers_[i].step) {
      case Step::kArriving:
        peers_[i].id = reply.integer;
        peers_[i].step = Step::kIdle;
        if (!reply.IsInteger()) violations_.Add(Name(i) + ": CLIENT ID: " + Text(reply));
        if (i < started_ && !quiet_) Contend(i);
        return;
      case Step::kWaiting:
        return WaitEnded(i, reply);
      case Step::kReleasing:
        return Released(i, reply);
      case Step::kAsking:
        return Told(i, reply);
      default:
        violations_.Add(Name(i) + ": a reply to nothing: " + Text(reply));
    }
  }

  // --- Contenders ---

  // Most lines are exclusive, some are for readers and writers, some let three in.
  static Mode ModeOf(size_t line, bool reader) {
    if (line % 8 == 6 && reader) return Mode::kShared;
    return line % 8 == 7 ? Mode::kLimit : Mode::kExclusive;
  }
  static bool Excludes(size_t line) { return line % 8 < 6; }

  void Contend(size_t i) {
    Peer& peer = peers_[i];
    peer.contended = Pick(lines_.size());
    peer.mode = ModeOf(peer.contended, Chance(50));
    peer.patience =
        kShortestWait +
        Milliseconds{static_cast<int64_t>(Pick((kLongestWait - kShortestWait).count()))};
    peer.token_before = lines_[peer.contended].token;
    peer.reported_late = false;
    peer.may_stop = peer.stops_under_way > 0;
    peer.may_fail = peer.errors_under_way > 0;
    Command command = {"LOCK.ACQUIRE",
                       LineKey(peer.contended),
                       peer.owner,
                       "PX",
                       std::to_string(kContendedLease.count()),
                       "WAIT",
                       std::to_string(peer.patience.count())};
    if (peer.mode == Mode::kShared) command.emplace_back("SHARED");
    if (peer.mode == Mode::kLimit) command.insert(command.end(), {"LIMIT", "3"});
    if (Chance(50)) command.emplace_back("SESSION");
    peer.step = Step::kWaiting;
    peer.asked = Clock::now();
    peer.starved_before = starved_;
    Send(i, command);
  }

  bool TooLate(const Peer& peer, Clock::time_point now) const {
    return now - peer.asked > peer.patience + kLateAtMost + (starved_ - peer.starved_before);
  }

  void WaitEnded(size_t i, const Reply& reply) {
    Peer& peer = peers_[i];
    const auto now = Clock::now();
    const auto waited = now - peer.asked;
    if (TooLate(peer, now) && !peer.reported_late) {
      violations_.Add(Name(i) + ": a wait of " + std::to_string(peer.patience.count()) +
                      " ms ended more than a second too late");
    }
    if (reply.IsInteger()) return Granted(i, reply.integer, now);
    peer.step = Step::kIdle;
    if (reply.IsNil()) {
      // The server's clock of milliseconds may be one behind ours.
      const bool in_time = waited >= peer.patience - Milliseconds{2};
      if (in_time) {
        counts_.timed_out++;
        late.Add(waited - peer.patience);
      } else if (peer.may_stop) {
        counts_.told_to_stop++;
      } else {
        violations_.Add(Name(i) + ": null before the end of WAIT " +
                        std::to_string(peer.patience.count()));
      }
    } else if (reply.IsError("UNBLOCKED") && peer.may_fail) {
      counts_.unblocked++;
    } else {
      violations_.Add(Name(i) + ": LOCK.ACQUIRE … WAIT: " + Text(reply));
    }
    if (!quiet_) Contend(i);
  }

  void Granted(size_t i, int64_t token, Clock::time_point now) {
    Peer& peer = peers_[i];
    Line& line = lines_[peer.contended];
    counts_.granted++;
    if (token <= peer.token_before) {
      violations_.Add(Name(i) + ": token " + std::to_string(token) + " of " +
                      LineKey(peer.contended) + " is not above " +
                      std::to_string(peer.token_before));
    }
    line.token = std::max(line.token, token);
    if (Excludes(peer.contended)) {
      if (line.holder && HoldsForSure(*line.holder, peer.contended, now)) {
        violations_.Add(Name(i) + " got " + LineKey(peer.contended) + " while " +
                        Name(*line.holder) + " held it");
      }
      line.holder = i;
      if (peer.asked < line.released) hand_overs.Add(now - line.released);
    }
    peer.step = Step::kHolding;
    due_.push({now + Milliseconds{static_cast<int64_t>(Pick(kLongestHold.count()))}, i, peer.life});
  }

  // A killed connection may have lost its hold before we hear of its end.
  bool HoldsForSure(size_t i, size_t line, Clock::time_point now) const {
    const Peer& peer = peers_[i];
    return peer.step == Step::kHolding && peer.contended == line && !peer.doomed &&
           now < peer.asked + kContendedLease;
  }

  void ForgetHolder(size_t i) {
    std::optional<size_t>& holder = lines_[peers_[i].contended].holder;
    if (holder == i) holder.reset();
  }

  void ReleaseWhatIsDue(Clock::time_point now) {
    for (; !due_.empty() && due_.top().when <= now; due_.pop()) {
      const size_t i = due_.top().peer;
      Peer& peer = peers_[i];
      if (peer.life != due_.top().life || peer.step != Step::kHolding) continue;
      if (Excludes(peer.contended)) lines_[peer.contended].released = now;
      ForgetHolder(i);
      peer.step = Step::kReleasing;
      Send(i, {"LOCK.RELEASE", LineKey(peer.contended), peer.owner});
    }
  }

  void Released(size_t i, const Reply& reply) {
    Peer& peer = peers_[i];
    const bool held = Clock::now() < peer.asked + kContendedLease;
    if (held ? reply != Reply::Int(1) : !reply.IsInteger()) {
      violations_.Add(Name(i) + ": LOCK.RELEASE by the holder: " + Text(reply));
    }
    counts_.released++;
    peer.step = Step::kIdle;
    if (!quiet_) Contend(i);
  }

  void LookForLateWaits(Clock::time_point now) {
    for (size_t i = 0; i < contenders_; i++) {
      Peer& peer = peers_[i];
      if (peer.step != Step::kWaiting || peer.reported_late || peer.doomed) continue;
      if (!TooLate(peer, now)) continue;
      violations_.Add(Name(i) + ": a wait of " + std::to_string(peer.patience.count()) +
                      " ms is not over, more than a second later");
      peer.reported_late = true;
    }
  }

  // --- Held locks ---

  // Each of the others has locks of its own, so that it knows what its replies must be.
  void Operate(size_t i) {
    Peer& peer = peers_[i];
    if (peer.step != Step::kIdle) return;
    if (peer.unsure || tokens_[peer.lock] == 0) return Request(i, Ask::kAcquire);
    const size_t first = i - contenders_;
    peer.lock = first + others() * Pick((tokens_.size() - first - 1) / others() + 1);
    const uint64_t dice = random_() % 100;
    Request(i, dice < 30   ? Ask::kRelease
               : dice < 55 ? Ask::kTouch
               : dice < 70 ? Ask::kCheck
               : dice < 80 ? Ask::kFence
               : dice < 90 ? Ask::kAgain
                           : Ask::kStranger);
  }

  void Request(size_t i, Ask ask) {
    Peer& peer = peers_[i];
    const std::string key = HeldKey(peer.lock);
    const std::string owner = HeldOwner(peer.lock);
    const std::string lease = std::to_string(kLongLease);
    peer.ask = ask;
    peer.step = Step::kAsking;
    counts_.operations++;
    switch (ask) {
      case Ask::kNothing:
        break;
      case Ask::kAcquire:
      case Ask::kAgain:
        return Send(i, {"LOCK.ACQUIRE", key, owner, "PX", lease});
      case Ask::kRelease:
        return Send(i, {"LOCK.RELEASE", key, owner});
      case Ask::kTouch:
        return Send(i, {"LOCK.TOUCH", key, owner, "PX", lease});
      case Ask::kCheck:
        return Send(i, {"LOCK.FENCE", key, std::to_string(tokens_[peer.lock])});
      case Ask::kFence:
        return Send(i, {"LOCK.FENCE", key});
      case Ask::kStranger:
        return Send(i, {"LOCK.RELEASE", key, "a stranger"});
    }
  }

  void Told(size_t i, const Reply& reply) {
    Peer& peer = peers_[i];
    int64_t& token = tokens_[peer.lock];
    bool right = false;
    switch (peer.ask) {
      case Ask::kNothing:
        break;
      case Ask::kAcquire:
        // After a lost reply it may be the same token: then the lock was never released.
        right = reply.IsInteger() && reply.integer > 0 &&
                (peer.unsure ? reply.integer >= token : reply.integer > last_tokens_[peer.lock]);
        token = reply.integer;
        break;
      case Ask::kAgain:
      case Ask::kFence:
        right = reply == Reply::Int(token);
        break;
      case Ask::kRelease:
        right = reply == Reply::Int(1);
        last_tokens_[peer.lock] = token;
        token = 0;
        break;
      case Ask::kTouch:
      case Ask::kCheck:
        right = reply == Reply::Int(1);
        break;
      case Ask::kStranger:
        right = reply == Reply::Int(0);
        break;
    }
    if (!right) {
      violations_.Add(Name(i) + ": request " + std::to_string(static_cast<int>(peer.ask)) + " on " +
                      HeldKey(peer.lock) + ": " + Text(reply));
    }
    peer.unsure = false;
    peer.step = Step::kIdle;
  }

  // --- Trouble ---

  void Trouble() {
    const uint64_t kind = random_() % 4;
    const size_t i = Pick(kind < 2 ? peers_.size() : contenders_);
    Peer& peer = peers_[i];
    if (peer.id == 0 || peer.doomed) return;
    if (kind == 0) {
      peer.doomed = true;
      counts_.killed++;
      OrderKiller({"CLIENT", "KILL", "ID", std::to_string(peer.id)}, {i, peer.life, kind});
    } else if (kind == 1) {
      counts_.left++;
      Renew(i);
    } else {
      const bool error = kind == 3;
      (error ? peer.errors_under_way : peer.stops_under_way)++;
      (error ? peer.may_fail : peer.may_stop) = true;
      counts_.unblocks_sent++;
      OrderKiller({"CLIENT", "UNBLOCK", std::to_string(peer.id), error ? "ERROR" : "TIMEOUT"},
                  {i, peer.life, kind});
    }
  }

  struct Order {
    size_t peer;
    uint64_t life;
    uint64_t kind;
  };

  void OrderKiller(const Command& command, const Order& what) {
    const std::string bytes = EncodeCommand(command);
    (void)!send(killer_.fd, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    orders_.push(what);
  }

  void ReadKiller() {
    if (!Receive(killer_)) throw std::runtime_error("the server closed the killer's connection");
    while (const std::optional<Reply> reply = TakeReply(killer_)) {
      const Order what = orders_.front();
      orders_.pop();
      counts_.replies++;
      const bool right = what.kind == 0 ? *reply == Reply::Int(1)
                                        : *reply == Reply::Int(1) || *reply == Reply::Int(0);
      Peer& peer = peers_[what.peer];
      const bool same = peer.life == what.life;
      if (!right) violations_.Add("CLIENT KILL or UNBLOCK: " + Text(*reply));
      if (same && what.kind == 2) peer.stops_under_way--;
      if (same && what.kind == 3) peer.errors_under_way--;
    }
  }

  const Settings& settings_;
  const int port_;
  const ProcessorTime server_waits_;
  const ProcessorTime own_waits_{"/proc/thread-self"};
  std::chrono::nanoseconds starved_{0};  // the server and this thread, as of this turn
  std::chrono::nanoseconds stood_still_{0};
  Clock::time_point last_turn_ = Clock::now();
  Violations& violations_;
  std::mt19937_64 random_;
  const size_t contenders_;  // the first of peers_
  std::vector<Peer> peers_;
  std::vector<Line> lines_;                                         // by contended lock
  std::vector<int64_t> tokens_;                                     // by held lock; 0: released
  std::vector<int64_t> last_tokens_ = tokens_;                      // before the release
  std::priority_queue<Due, std::vector<Due>, std::greater<>> due_;  // ends of holds
  Peer killer_;
  std::queue<Order> orders_;
  size_t started_ = 0;  // contenders that contend
  bool quiet_ = false;  // contenders do not go on
  int epoll_ = -1;
  Counts counts_;
};

// --- The whole --------------------------------------------------------------------------------

// Files for the clients here, and for the server as many, which takes over our limit.
bool RaiseFileLimit(int64_t clients) {
  const auto needed = static_cast<rlim_t>(clients + 2100);
  rlimit limit{};
  getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_max = std::max(limit.rlim_max, needed);
  limit.rlim_cur = limit.rlim_max;
  if (setrlimit(RLIMIT_NOFILE, &limit) == 0) return true;
  getrlimit(RLIMIT_NOFILE, &limit);
  std::cerr << "This needs " << needed << " open files, and the limit is " << limit.rlim_max
            << ": see ulimit -n.\n";
  return false;
}

std::string Fixed(double value, int digits = 1) {
  std::ostringstream text;
  text << std::fixed << std::setprecision(digits) << value;
  return text.str();
}

std::string Megabytes(int64_t bytes) {
  return Fixed(static_cast<double>(bytes) / (1 << 20), 2) + " MB";
}

double Seconds(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

void Row(const std::string& what, const std::string& value) {
  std::cout << "| " << what << " | " << value << " |\n";
}
void Row(const std::string& what, int64_t value) { Row(what, std::to_string(value)); }

// Every command once, for what the server keeps of each.
void WarmUp(const Server& server, Crowd& crowd) {
  Client client = server.Connect();
  // clang-format off
  const std::vector<Command> commands = {
      {"LOCK.ACQUIRE", "warm", "alice", "PX", "1000"},
      {"LOCK.ACQUIRE", "warm", "bob", "PX", "1000", "WAIT", "10"},
      {"LOCK.TOUCH", "warm", "alice", "PX", "1000"},
      {"LOCK.FENCE", "warm"},
      {"LOCK.RELEASE", "warm", "alice"},
      {"CLIENT", "UNBLOCK", "1", "ERROR"},
      {"CLIENT", "KILL", "ID", "1000000"},
      {"LATENCY", "LATEST"},
      {"LATENCY", "RESET"},
      {"DEL", "warm"},
      {"PING"},
  };
  // clang-format on
  for (const Command& command : commands) client.Do(command);
  crowd.ConnectAll();
  crowd.CloseAll();
}

// The server's memory when it has nothing to do: the least of some time.
int64_t IdleMemory(Client& client, int64_t hoped_for, Milliseconds within) {
  int64_t least = std::numeric_limits<int64_t>::max();
  Eventually(
      [&] {
        least = std::min(least, Number(client, "memory", "used_memory"));
        return least <= hoped_for;
      },
      within);
  return least;
}

int Run(const Settings& settings) {
  Violations violations;
  const auto begin = Clock::now();
  ServerOptions options{.args = {"--maxclients", std::to_string(settings.clients + 2000),
                                 "--tcp-backlog", "4096", "--slowlog-log-slower-than", "-1",
                                 "--latency-monitor-threshold", "1", "--turnstile.max-waiters",
                                 std::to_string(Contenders(settings))}};
  if (settings.aof) {
    options.args.insert(options.args.end(), {"--appendonly", "yes", "--appendfsync", "everysec"});
  }
  Server server(options);
  Client client = server.Connect();
  const auto locks = static_cast<size_t>(settings.locks);
  const auto alone = [&] {
    return Eventually([&] { return Number(client, "clients", "connected_clients") == 1; },
                      Milliseconds{60000});
  };
  const auto waiters = [&] { return Number(client, "turnstile", "turnstile_waiters"); };

  {
    Crowd first(settings, server, violations);
    WarmUp(server, first);
  }
  if (!alone()) violations.Add("connections are left after the warm-up");
  const int64_t memory_before = IdleMemory(client, 0, Milliseconds{1000});
  const int64_t files_before = OpenFiles(server);
  LatencyEvents(client);

  Observer observer(server);
  std::array<std::string, kPhases> latency;
  std::array<Clock::duration, kPhases> took;
  auto phase_start = Clock::now();
  const ProcessorTime processor(ProcOf(server));
  std::array<std::chrono::nanoseconds, kPhases> worked{};
  std::array<std::chrono::nanoseconds, kPhases> starved{};
  auto worked_before = processor.Had();
  auto starved_before = processor.Waited();
  const auto end_phase = [&](Phase phase) {
    worked[phase] = processor.Had() - worked_before;
    starved[phase] = processor.Waited() - starved_before;
    worked_before += worked[phase];
    starved_before += starved[phase];
    latency[phase] = LatencyEvents(client);
    took[phase] = Clock::now() - phase_start;
    if (phase + 1 < kPhases) observer.SetPhase(static_cast<Phase>(phase + 1));
    phase_start = Clock::now();
  };

  Crowd crowd(settings, server, violations);
  const std::string lease = std::to_string(kLongLease);
  ForEachLock(
      server, locks,
      [&](size_t lock) {
        return Command{"LOCK.ACQUIRE", HeldKey(lock), HeldOwner(lock), "PX", lease};
      },
      [&](size_t lock, const Reply& reply) {
        if (!reply.IsInteger()) violations.Add(HeldKey(lock) + ": " + Text(reply));
        crowd.tokens()[lock] = reply.integer;
      });
  const int64_t memory_locks = Number(client, "memory", "used_memory");
  crowd.ConnectAll();
  const int64_t memory_clients = Number(client, "memory", "used_memory");
  end_phase(kLoad);

  crowd.Churn(std::chrono::seconds(settings.seconds));
  end_phase(kChurn);

  const int64_t held_in_the_end = Number(client, "turnstile", "turnstile_locks");
  crowd.Settle();
  crowd.CloseAll();
  if (!Eventually([&] { return waiters() == 0; })) {
    violations.Add(std::to_string(waiters()) + " waiters are left when all connections are closed");
  }
  size_t released = 0;
  ForEachLock(
      server, locks,
      [&](size_t lock) {
        return Command{"LOCK.RELEASE", HeldKey(lock), HeldOwner(lock)};
      },
      [&](size_t lock, const Reply& reply) {
        if (reply == Reply::Int(1)) {
          released++;
        } else {
          violations.Add("the release of " + HeldKey(lock) + " in the end: " + Text(reply));
        }
      });
  // The contended locks of those who died holding them.
  for (size_t line = 0; line < crowd.lines(); line++) client.Do("DEL", Crowd::LineKey(line));
  const auto held = [&] { return Number(client, "turnstile", "turnstile_locks"); };
  if (!Eventually([&] { return held() == 0; })) {
    violations.Add(std::to_string(held()) + " locks are left");
  }
  observer.Stop();
  end_phase(kRelease);
  if (!alone()) violations.Add("connections are left");
  const int64_t allowed =
      std::max(kMemoryLeftBytes,
               static_cast<int64_t>(kMemoryLeftShare * static_cast<double>(observer.peak_memory)));
  const int64_t memory_after =
      IdleMemory(client, memory_before + kMemoryLeftBytes / 8, Milliseconds{20000});
  const int64_t left = memory_after - memory_before;
  if (left > allowed) violations.Add(Megabytes(left) + " of memory are left");
  if (!Eventually([&] { return OpenFiles(server) <= files_before; })) {
    violations.Add("the server has more open files than before");
  }
  const int64_t files_after = OpenFiles(server);
  if (!server.running()) violations.Add("the server is gone");

  const Counts& counts = crowd.counts();
  std::vector<int64_t>& waiting = observer.waiters;
  // While the crowd starts not all of them can wait.
  if (waiting.size() > 8) waiting.erase(waiting.begin(), waiting.begin() + 4);
  std::sort(waiting.begin(), waiting.end());
  const int64_t median = waiting.empty() ? 0 : waiting[waiting.size() / 2];
  // Where others take the processors the clients cannot ask as fast as their waits end.
  const bool busy = starved[kChurn] > took[kChurn] / 4;
  if (median < settings.waiters * 9 / 10 && !busy) {
    violations.Add("only " + std::to_string(median) + " clients waited");
  }

  std::cout << "\n| load | " << EngineOf(client) << (settings.aof ? ", AOF everysec" : "")
            << " |\n|---|---|\n";
  Row("connections", settings.clients);
  Row("waiting at a time: least, median, most",
      waiting.empty() ? "none"
                      : std::to_string(waiting.front()) + ", " + std::to_string(median) + ", " +
                            std::to_string(waiting.back()));
  if (busy) Row("the machine was too busy for the whole load", "yes: times say little");
  Row("contended locks", static_cast<int64_t>(crowd.lines()));
  Row("locks held", settings.locks);
  Row("locks held at the end of the churn", held_in_the_end);
  Row("churn", std::to_string(settings.seconds) + " s, seed " + std::to_string(settings.seed));
  Row("replies checked", counts.replies);
  Row("operations on held locks", counts.operations);
  Row("grants to contenders", counts.granted);
  Row("waits that timed out (null)", counts.timed_out);
  Row("waits ended by CLIENT UNBLOCK TIMEOUT (null)", counts.told_to_stop);
  Row("waits ended by CLIENT UNBLOCK ERROR (-UNBLOCKED)", counts.unblocked);
  Row("CLIENT UNBLOCK sent", counts.unblocks_sent);
  Row("connections killed by CLIENT KILL and made again", counts.killed);
  Row("connections closed by the client and made again", counts.left);
  Row("release to grant of the next: p50, p99, longest",
      Fixed(crowd.hand_overs.At(0.5), 2) + ", " + Fixed(crowd.hand_overs.At(0.99), 2) + ", " +
          Fixed(crowd.hand_overs.At(1), 1) + " ms");
  Row("null after the end of WAIT: p50, p99, longest", Fixed(crowd.late.At(0.5), 2) + ", " +
                                                           Fixed(crowd.late.At(0.99), 2) + ", " +
                                                           Fixed(crowd.late.At(1), 1) + " ms");
  for (size_t phase = 0; phase < kPhases; phase++) {
    const std::string name = kPhaseNames[phase];
    const auto percentiles = [](Times& times) {
      return Fixed(times.At(0.5), 2) + ", " + Fixed(times.At(0.99), 2) + ", " +
             Fixed(times.At(0.999)) + ", " + Fixed(times.At(1)) + " ms";
    };
    Row("PING each ms, " + name + " (" + Fixed(Seconds(took[phase])) +
            " s): p50, p99, p99.9, longest",
        percentiles(observer.answers[phase]));
    Row("… without waiting for a processor", percentiles(observer.net_answers[phase]));
    Row("… the server had a processor, and waited for one",
        Fixed(Seconds(worked[phase])) + " s, " + Fixed(Seconds(starved[phase])) + " s");
    Row("LATENCY, " + name + ": longest of each event", latency[phase]);
  }
  Row("used_memory before", Megabytes(memory_before));
  Row("used_memory with the locks", Megabytes(memory_locks) + ", " +
                                        Fixed(static_cast<double>(memory_locks - memory_before) /
                                              static_cast<double>(settings.locks)) +
                                        " bytes each");
  Row("used_memory with the connections", Megabytes(memory_clients));
  Row("used_memory, peak", Megabytes(observer.peak_memory));
  Row("used_memory after", Megabytes(memory_after) + ", " + Megabytes(left) + " more than before");
  Row("open files of the server before, after",
      std::to_string(files_before) + ", " + std::to_string(files_after));
  Row("released in the end", static_cast<int64_t>(released));
  Row("violations", violations.count());
  Row("took", Fixed(Seconds(Clock::now() - begin)) + " s");
  std::cout.flush();
  server.Stop();
  return violations.count() == 0 && !::testing::Test::HasFailure() ? 0 : 1;
}

std::optional<Settings> Parse(const std::vector<std::string>& arguments) {
  Settings settings;
  const std::map<std::string, int64_t*> numbers = {{"--clients", &settings.clients},
                                                   {"--waiters", &settings.waiters},
                                                   {"--locks", &settings.locks},
                                                   {"--seconds", &settings.seconds},
                                                   {"--rate", &settings.rate}};
  for (size_t i = 0; i < arguments.size(); i++) {
    if (arguments[i] == "--aof") {
      settings.aof = true;
      continue;
    }
    const auto number = numbers.find(arguments[i]);
    if ((number == numbers.end() && arguments[i] != "--seed") || i + 1 == arguments.size()) {
      return {};
    }
    const int64_t value = std::atoll(arguments[++i].c_str());
    if (number == numbers.end()) {
      settings.seed = static_cast<uint64_t>(value);
    } else if (value < 1) {
      return {};
    } else {
      *number->second = value;
    }
  }
  if (Contenders(settings) >= settings.clients) return {};
  if (settings.locks < settings.clients) return {};
  return settings;
}

}  // namespace
}  // namespace turnstile::fault

int main(int argc, char** argv) {
  const auto settings = turnstile::fault::Parse({argv + 1, argv + argc});
  if (!settings) {
    std::cerr << "turnstile_fault_load [--clients N] [--waiters N] [--locks N] [--seconds N] "
                 "[--rate N] [--seed N] [--aof]\n"
                 "The waiters and a fifth more must be fewer than the clients, and the clients "
                 "no more than the locks.\n";
    return 2;
  }
  if (!turnstile::fault::RaiseFileLimit(settings->clients)) return 2;
  try {
    return turnstile::fault::Run(*settings);
  } catch (const std::exception& error) {
    std::cerr << "turnstile_fault_load: " << error.what() << "\n";
    return 1;
  }
}
