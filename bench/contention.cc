// Many clients, one lock: waiting in line against the ways in which people wait today. Works on
// servers of this machine that are there already, and prints JSON.
//
//   contention compete --port P --pid PID --way WAY [--clients N] [--think MS] [--seconds S]
//                      [--seed N]
//
// N clients, each with a thread and a connection of its own, think for 0 to MS milliseconds,
// acquire the lock, hold it for 0 to 1 ms and release it.
//
//   line     LOCK.ACQUIRE … WAIT and LOCK.RELEASE
//   polling  SET NX PX, tried again every 100 ms with jitter; release by the usual script
//   token    a list with one token, BLPOP and RPUSH: no owner, and a holder that dies keeps it
//   signal   SET NX PX, BLPOP of a signal if it is held, and again; release by a script that
//            signals: a token with an owner and a lease
//   pubsub   SET NX PX, tried again when the release is published to all
//
//   contention hand-over --way line|token --server PORT,PID,N [--server …] [--rounds R] [--count C]
//                        [--seed N]
//
// What a hand-over costs each of these servers while N clients wait there; C of them on each, R
// times. The CPU time that a server spends on that many clients while nothing happens (its cron) is
// taken off.
//
// Each holder checks that it is alone; the first violation, and any unexpected reply, ends the run
// with status 1.

#include <sys/resource.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "support/client.h"
#include "support/eventually.h"

namespace turnstile::testing {
namespace {

using Seconds = std::chrono::duration<double>;
using Random = std::mt19937;

[[noreturn]] void Fail(const std::string& why) {
  std::fprintf(stderr, "contention: %s\n", why.c_str());
  std::_Exit(1);
}

struct ServerWithLine {
  int port = 0;
  int pid = 0;
  int waiters = 0;
};

struct Settings {
  int port = 0;
  int pid = 0;
  std::vector<ServerWithLine> servers;
  std::string way;
  int clients = 50;
  double think = 10;  // milliseconds
  double seconds = 2;
  unsigned seed = 1;
  int rounds = 10;
  int count = 1000;
};

Seconds UpTo(double milliseconds, Random& random) {
  return Seconds{std::uniform_real_distribution<double>(0, milliseconds / 1000)(random)};
}

void Pass(Seconds time) { LetPass(std::chrono::duration_cast<std::chrono::nanoseconds>(time)); }

std::string RandomOwner(Random& random) {
  std::string owner(32, ' ');
  for (char& digit : owner) digit = "0123456789abcdef"[random() % 16];
  return owner;
}

// CPU time of the server's main thread so far. The kernel counts it in nanoseconds.
double CpuMicros(int pid) {
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(
      std::fopen(("/proc/" + std::to_string(pid) + "/schedstat").c_str(), "r"), std::fclose);
  long long nanoseconds = 0;
  if (file == nullptr || std::fscanf(file.get(), "%lld", &nanoseconds) != 1) {
    Fail("cannot read the server's CPU time");
  }
  return static_cast<double>(nanoseconds) / 1000;
}

Reply Checked(Reply reply) {
  if (reply.IsError()) Fail(reply.text);
  return reply;
}

// --- The ways to wait -------------------------------------------------------------------------

constexpr const char* kLease = "10000";
constexpr const char* kReleaseScript =
    "if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('del',KEYS[1]) end return 0";
constexpr const char* kReleaseAndSignalScript =
    "if redis.call('get',KEYS[1])~=ARGV[1] then return 0 end "
    "redis.call('del',KEYS[1],KEYS[2]) redis.call('rpush',KEYS[2],1) "
    "redis.call('pexpire',KEYS[2],10000) return 1";
constexpr const char* kReleaseAndPublishScript =
    "if redis.call('get',KEYS[1])==ARGV[1] then redis.call('del',KEYS[1]) "
    "return redis.call('publish',KEYS[1],'free') end return 0";

std::atomic<size_t> requests = 0;  // of all clients

// One client's side of one way of waiting.
class Way {
 public:
  Way(int port, unsigned seed) : client_(port), random_(seed), owner_(RandomOwner(random_)) {
    Checked(client_.Do("PING"));
  }
  virtual ~Way() = default;
  virtual void Acquire() = 0;
  virtual void Release() = 0;

 protected:
  template <typename... Args>
  Reply Ask(const Args&... args) {
    ++requests;
    return Checked(client_.Do(args...));
  }
  bool Set() { return !Ask("SET", "lock", owner_, "NX", "PX", kLease).IsNil(); }
  int64_t Run(const std::string& sha) {
    return Ask("EVALSHA", sha, 2, "lock", "signal", owner_).integer;
  }
  std::string Load(const char* script) {
    return Checked(client_.Do("SCRIPT", "LOAD", script)).text;
  }

  Client client_;
  Random random_;
  std::string owner_;
};

// One that waits by one request; the request and its answer also apart, for a thread that has many.
class OneRequest : public Way {
 public:
  using Way::Way;
  virtual Command AcquireCommand() = 0;
  virtual bool IsGrant(const Reply& reply) = 0;
  void Acquire() override { Expect(Ask(AcquireCommand())); }
  void Begin() { client_.Send(AcquireCommand()); }
  void Await() { Expect(Checked(client_.Read())); }

 private:
  void Expect(const Reply& reply) {
    if (!IsGrant(reply)) Fail("no grant: " + reply.ToString());
  }
};

class Line : public OneRequest {
 public:
  using OneRequest::OneRequest;
  Command AcquireCommand() override {
    return {"LOCK.ACQUIRE", "lock", owner_, "PX", "600000", "WAIT", "600000"};
  }
  bool IsGrant(const Reply& reply) override { return reply.IsInteger(); }
  void Release() override {
    if (Ask("LOCK.RELEASE", "lock", owner_) != Reply::Int(1)) Fail("a release was refused");
  }
};

class Token : public OneRequest {
 public:
  using OneRequest::OneRequest;
  Command AcquireCommand() override { return {"BLPOP", "token", "600"}; }
  bool IsGrant(const Reply& reply) override { return reply.IsArray(); }
  void Release() override {
    if (!Ask("RPUSH", "token", 1).IsInteger()) Fail("a release was refused");
  }
};

class Polling : public Way {
 public:
  Polling(int port, unsigned seed) : Way(port, seed), release_(Load(kReleaseScript)) {}
  void Acquire() override {
    while (!Set()) Pass(Seconds{0.05} + UpTo(100, random_));
  }
  void Release() override {
    if (Run(release_) != 1) Fail("a release was refused");
  }

 private:
  std::string release_;
};

class Signal : public Way {
 public:
  Signal(int port, unsigned seed) : Way(port, seed), release_(Load(kReleaseAndSignalScript)) {}
  void Acquire() override {
    while (!Set()) Ask("BLPOP", "signal", 1);
  }
  void Release() override {
    if (Run(release_) != 1) Fail("a release was refused");
  }

 private:
  std::string release_;
};

class Pubsub : public Way {
 public:
  Pubsub(int port, unsigned seed)
      : Way(port, seed), release_(Load(kReleaseAndPublishScript)), messages_(port) {
    Checked(messages_.Do("SUBSCRIBE", "lock"));
  }
  void Acquire() override {
    while (messages_.HasReply()) Checked(messages_.Read());  // of earlier releases
    while (!Set()) {
      if (messages_.HasReply(Milliseconds{1000})) Checked(messages_.Read());
    }
  }
  void Release() override {
    if (Run(release_) < 1) Fail("a release was refused, or nobody heard of it");
  }

 private:
  std::string release_;
  Client messages_;
};

using MakeWay = std::function<std::unique_ptr<Way>(int port, unsigned seed)>;

template <typename T>
std::unique_ptr<Way> Make(int port, unsigned seed) {
  return std::make_unique<T>(port, seed);
}

MakeWay WayNamed(const std::string& name) {
  const std::map<std::string, MakeWay> ways = {{"line", Make<Line>},
                                               {"polling", Make<Polling>},
                                               {"token", Make<Token>},
                                               {"signal", Make<Signal>},
                                               {"pubsub", Make<Pubsub>}};
  const auto found = ways.find(name);
  if (found == ways.end()) Fail("no way is named '" + name + "'");
  return found->second;
}

// The keys of others stay.
void Empty(Client& client) {
  Checked(client.Do("DEL", "lock", "signal", "token"));
  Checked(client.Do("RPUSH", "token", 1));
}

// --- Competing --------------------------------------------------------------------------------

// What one client did while it was measured.
struct Tally {
  size_t acquisitions = 0;
  std::vector<double> waits;  // in milliseconds
};

class Contest {
 public:
  explicit Contest(const Settings& settings)
      : settings_(settings), tallies_(static_cast<size_t>(settings.clients)) {}

  void Run() {
    Client client(settings_.port);
    Empty(client);
    std::vector<std::thread> threads;
    for (size_t i = 0; i < tallies_.size(); ++i) threads.emplace_back([this, i] { Compete(i); });
    while (ready_ < settings_.clients) Pass(Seconds{0.001});
    go_ = true;
    Pass(Seconds{0.3});  // until a line has formed
    const size_t requests_before = requests;
    const double cpu_before = CpuMicros(settings_.pid);
    begins_ = Now();
    Pass(Seconds{settings_.seconds});
    ends_ = Now();
    const double cpu = CpuMicros(settings_.pid) - cpu_before;
    const size_t sent = requests - requests_before;
    for (std::thread& thread : threads) thread.join();
    Print(cpu, sent);
  }

 private:
  static double Now() { return Seconds(Clock::now().time_since_epoch()).count(); }

  void Compete(size_t number) {
    const unsigned seed = settings_.seed * 1000 + static_cast<unsigned>(number);
    const std::unique_ptr<Way> way = WayNamed(settings_.way)(settings_.port, seed);
    Random random(seed);
    Tally& tally = tallies_[number];
    ++ready_;
    while (!go_) Pass(Seconds{0.001});
    while (Now() < ends_) {
      if (settings_.think > 0) Pass(UpTo(settings_.think, random));
      const double asked = Now();
      way->Acquire();
      const double got = Now();
      if (inside_.fetch_add(1) != 0) Fail("two clients hold the lock");
      Pass(UpTo(1, random));
      inside_.fetch_sub(1);
      way->Release();
      if (got < begins_ || asked > ends_) continue;
      // A wait that the end has cut counts with what it had lasted by then.
      tally.waits.push_back(1000 * (std::min<double>(got, ends_) - asked));
      if (got < ends_) ++tally.acquisitions;
    }
  }

  void Print(double cpu, size_t sent) {
    std::vector<double> waits;
    size_t acquisitions = 0;
    size_t most = 0;
    size_t least = SIZE_MAX;
    for (const Tally& tally : tallies_) {
      waits.insert(waits.end(), tally.waits.begin(), tally.waits.end());
      acquisitions += tally.acquisitions;
      most = std::max(most, tally.acquisitions);
      least = std::min(least, tally.acquisitions);
    }
    if (acquisitions == 0) Fail("nobody got the lock");
    std::sort(waits.begin(), waits.end());
    const auto quantile = [&waits](double q) {
      return waits[static_cast<size_t>(q * static_cast<double>(waits.size() - 1))];
    };
    std::printf(
        "{\"seconds\": %.4f, \"acquisitions\": %zu, \"requests\": %zu, \"cpu_us\": %.1f, "
        "\"p50_ms\": %.4f, \"p99_ms\": %.4f, \"max_ms\": %.4f, \"most\": %zu, \"least\": %zu}\n",
        ends_ - begins_, acquisitions, sent, cpu, quantile(0.5), quantile(0.99), waits.back(), most,
        least);
  }

  Settings settings_;
  std::vector<Tally> tallies_;
  std::atomic<int> inside_ = 0;
  std::atomic<int> ready_ = 0;
  std::atomic<bool> go_ = false;
  std::atomic<double> begins_ = HUGE_VAL;
  std::atomic<double> ends_ = HUGE_VAL;
};

// --- Handing over -----------------------------------------------------------------------------

// A server where clients stand in one line, driven by this thread.
class LongLine {
 public:
  LongLine(int port, int pid, int waiters, const Settings& settings) : pid_(pid) {
    Client client(port);
    Empty(client);
    for (int i = 0; i <= waiters; ++i) {
      const unsigned seed = settings.seed + static_cast<unsigned>(i);
      if (settings.way == "line") {
        line_.push_back(std::make_unique<Line>(port, seed));
      } else if (settings.way == "token") {
        line_.push_back(std::make_unique<Token>(port, seed));
      } else {
        Fail("this way needs a thread for each client");
      }
      line_.back()->Begin();
      Checked(client.Do("PING"));  // comes behind: the order of numbers is the order of service
    }
    const std::string all = "blocked_clients:" + std::to_string(waiters) + "\r";
    if (!Eventually([&] {
          return Checked(client.Do("INFO", "clients")).text.find(all) != std::string::npos;
        })) {
      Fail("the line did not form");
    }
  }

  // Whoever is served releases and goes to the end of the line again.
  void HandOver(int count) {
    for (; count > 0; --count) {
      OneRequest& holder = *line_[next_];
      holder.Await();
      holder.Release();
      holder.Begin();
      next_ = (next_ + 1) % line_.size();
    }
  }

  // What so many hand-overs cost the server in microseconds of CPU time, each, without its cron.
  double Measure(int count) {
    const auto began = Clock::now();
    const double before = CpuMicros(pid_);
    HandOver(count);
    const double cpu = CpuMicros(pid_) - before;
    const double micros = 1e6 * Seconds(Clock::now() - began).count();
    return (cpu - cron_ * micros) / count;
  }

  void BeginIdle() { cron_ = -CpuMicros(pid_); }
  void EndIdle(Seconds time) { cron_ = (cron_ + CpuMicros(pid_)) / (1e6 * time.count()); }
  double cron() const { return cron_; }

 private:
  int pid_;
  std::vector<std::unique_ptr<OneRequest>> line_;
  size_t next_ = 0;
  double cron_ = 0;  // the share of its time that the server works while nothing happens
};

// Measures the lines in turns, so that what disturbs the machine disturbs all of them.
void MeasureHandOvers(const Settings& settings) {
  std::vector<LongLine> lines;
  for (const auto& [port, pid, waiters] : settings.servers) {
    lines.emplace_back(port, pid, waiters, settings);
  }
  for (LongLine& line : lines) line.HandOver(settings.count);
  const Seconds idle{1};
  for (LongLine& line : lines) line.BeginIdle();
  Pass(idle);
  for (LongLine& line : lines) line.EndIdle(idle);
  std::vector<std::vector<double>> micros(lines.size());
  std::vector<size_t> order(lines.size());
  std::iota(order.begin(), order.end(), 0);
  Random random(settings.seed);
  for (int round = 0; round < settings.rounds; ++round) {
    std::shuffle(order.begin(), order.end(), random);
    for (const size_t i : order) micros[i].push_back(lines[i].Measure(settings.count));
  }
  std::printf("[");
  for (size_t i = 0; i < lines.size(); ++i) {
    std::printf("%s{\"waiters\": %d, \"cron_share\": %.6f, \"cpu_us\": [", i == 0 ? "" : ", ",
                settings.servers[i].waiters, lines[i].cron());
    for (size_t k = 0; k < micros[i].size(); ++k) {
      std::printf("%s%.3f", k == 0 ? "" : ", ", micros[i][k]);
    }
    std::printf("]}");
  }
  std::printf("]\n");
}

int Main(int argc, char** argv) {
  Settings settings;
  const std::string task = argc > 1 ? argv[1] : "";
  for (int i = 2; i + 1 < argc; i += 2) {
    const std::string option = argv[i];
    const char* value = argv[i + 1];
    if (option == "--port") settings.port = std::atoi(value);
    if (option == "--pid") settings.pid = std::atoi(value);
    if (option == "--server") {
      ServerWithLine& server = settings.servers.emplace_back();
      if (std::sscanf(value, "%d,%d,%d", &server.port, &server.pid, &server.waiters) != 3) {
        Fail("--server needs PORT,PID,WAITERS");
      }
    }
    if (option == "--way") settings.way = value;
    if (option == "--clients") settings.clients = std::atoi(value);
    if (option == "--think") settings.think = std::atof(value);
    if (option == "--seconds") settings.seconds = std::atof(value);
    if (option == "--seed") settings.seed = static_cast<unsigned>(std::atoi(value));
    if (option == "--rounds") settings.rounds = std::atoi(value);
    if (option == "--count") settings.count = std::atoi(value);
  }
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  if (task == "compete") {
    Contest(settings).Run();
  } else if (task == "hand-over") {
    MeasureHandOvers(settings);
  } else {
    Fail("say compete or hand-over");
  }
  return 0;
}

}  // namespace
}  // namespace turnstile::testing

int main(int argc, char** argv) { return turnstile::testing::Main(argc, argv); }
