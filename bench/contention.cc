// Many clients, one lock: waiting in line against the three ways in which people wait today.
//
//   contention [--seconds S] [--rounds R] [--clients N]
//
// Part 1. N clients think for 0 to 10 ms, acquire one lock, hold it for 0 to 1 ms and release it.
// The ways of waiting take turns within each round, on one server, and each figure is the median
// over the rounds; what counts are the ratios.
//
//   line     LOCK.ACQUIRE … WAIT and LOCK.RELEASE
//   polling  SET NX PX, tried again every 100 ms with jitter; release by the usual Lua script
//   blpop    a list with one token: BLPOP and RPUSH (no owner, no lease)
//   pubsub   SET NX PX, tried again when the release is published to all who wait
//
// Part 2. What a hand-over costs the server while 10 to 9,000 clients wait.
//
// Each holder checks that it is alone; the first violation, and any unexpected reply, ends the run
// with status 1.

#include <poll.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "support/client.h"
#include "support/eventually.h"
#include "support/server.h"

namespace turnstile::testing {
namespace {

using Micros = std::chrono::duration<double, std::micro>;
using Random = std::mt19937;

struct Settings {
  double seconds = 2;
  int rounds = 7;
  int clients = 50;
};

[[noreturn]] void Fail(const std::string& why) {
  std::fprintf(stderr, "contention: %s\n", why.c_str());
  std::_Exit(1);  // the server dies with us
}

void Pass(Micros time) {
  const timespec t{0, static_cast<long>(time.count() * 1000)};
  nanosleep(&t, nullptr);
}

Micros Between(double least, double most, Random& random) {
  return Micros{std::uniform_real_distribution<double>(least, most)(random)};
}

// CPU time of a process so far, in microseconds.
double CpuMicros(pid_t pid) {
  std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(
      std::fopen(("/proc/" + std::to_string(pid) + "/stat").c_str(), "r"), std::fclose);
  unsigned long user = 0;
  unsigned long system = 0;
  if (file == nullptr ||
      std::fscanf(file.get(), "%*d %*s %*c %*d %*d %*d %*d %*d %*u %*u %*u %*u %*u %lu %lu", &user,
                  &system) != 2) {
    Fail("cannot read the server's CPU time");
  }
  return 1e6 * static_cast<double>(user + system) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

// --- Part 1: the ways to wait -----------------------------------------------------------------

constexpr const char* kLease = "10000";
constexpr const char* kReleaseScript =
    "if redis.call('get',KEYS[1])==ARGV[1] then return redis.call('del',KEYS[1]) end return 0";
constexpr const char* kReleaseAndPublishScript =
    "if redis.call('get',KEYS[1])==ARGV[1] then redis.call('del',KEYS[1]) "
    "return redis.call('publish',KEYS[1],'free') end return 0";

// One client's side of one way of waiting.
class Way {
 public:
  Way(int port, int number) : client_(port), owner_("owner-" + std::to_string(number)) {}
  virtual ~Way() = default;
  virtual void Acquire(Random& random) = 0;
  virtual void Release() = 0;
  size_t requests() const { return requests_; }

 protected:
  template <typename... Args>
  Reply Ask(const Args&... args) {
    ++requests_;
    Reply reply = client_.Do(args...);
    if (reply.IsError()) Fail(reply.text);
    return reply;
  }
  const std::string& owner() const { return owner_; }
  int64_t Script(const std::string& sha) { return Ask("EVALSHA", sha, 1, "lock", owner_).integer; }
  std::string Load(const char* script) { return client_.Do("SCRIPT", "LOAD", script).text; }

 private:
  Client client_;
  std::string owner_;
  size_t requests_ = 0;
};

class InLine : public Way {
 public:
  using Way::Way;
  void Acquire(Random& /*random*/) override {
    if (!Ask("LOCK.ACQUIRE", "lock", owner(), "PX", kLease, "WAIT", 60000).IsInteger()) {
      Fail("a wait of a minute ran out");
    }
  }
  void Release() override {
    if (Ask("LOCK.RELEASE", "lock", owner()) != Reply::Int(1)) Fail("a release was refused");
  }
};

class Polling : public Way {
 public:
  Polling(int port, int number) : Way(port, number), release_(Load(kReleaseScript)) {}
  void Acquire(Random& random) override {
    while (Ask("SET", "lock", owner(), "NX", "PX", kLease).IsNil()) {
      Pass(Between(50000, 150000, random));
    }
  }
  void Release() override {
    if (Script(release_) != 1) Fail("a release was refused");
  }

 private:
  std::string release_;
};

class Blpop : public Way {
 public:
  using Way::Way;
  void Acquire(Random& /*random*/) override {
    if (!Ask("BLPOP", "token", 60).IsArray()) Fail("a wait of a minute ran out");
  }
  void Release() override { Ask("RPUSH", "token", "1"); }
};

class Pubsub : public Way {
 public:
  Pubsub(int port, int number)
      : Way(port, number), release_(Load(kReleaseAndPublishScript)), messages_(port) {
    messages_.Do("SUBSCRIBE", "lock");
  }
  void Acquire(Random& /*random*/) override {
    while (messages_.HasReply()) messages_.Read();  // of earlier releases
    while (Ask("SET", "lock", owner(), "NX", "PX", kLease).IsNil()) {
      messages_.Read(Milliseconds{1000});
    }
  }
  void Release() override { Script(release_); }

 private:
  std::string release_;
  Client messages_;
};

using MakeWay = std::function<std::unique_ptr<Way>(int port, int number)>;

template <typename T>
std::unique_ptr<Way> Make(int port, int number) {
  return std::make_unique<T>(port, number);
}

struct Figures {
  double rate = 0;  // acquisitions a second
  double p50 = 0;   // of the time to acquire, in milliseconds
  double p99 = 0;
  double most = 0;
  double cpu = 0;       // of the server, microseconds for each acquisition
  double requests = 0;  // for each acquisition
  double fairness = 0;  // acquisitions of the luckiest client over those of the unluckiest
};

double Quantile(const std::vector<double>& sorted, double q) {
  return sorted[static_cast<size_t>(q * static_cast<double>(sorted.size() - 1))];
}

Figures Run(Server& server, const MakeWay& make, const Settings& settings) {
  {
    Client client = server.Connect();
    client.Do("FLUSHALL");
    client.Do("RPUSH", "token", "1");
  }
  struct Tally {
    std::vector<double> waits;  // in milliseconds
    size_t requests = 0;
  };
  std::vector<Tally> tallies(static_cast<size_t>(settings.clients));
  std::atomic<int> inside = 0;
  std::atomic<int> ready = 0;
  std::atomic<bool> go = false;
  std::atomic<bool> stop = false;
  std::vector<std::thread> threads;
  for (int i = 0; i < settings.clients; ++i) {
    threads.emplace_back([&, i] {
      const std::unique_ptr<Way> way = make(server.port(), i);
      Random random(static_cast<unsigned>(i));
      Tally& tally = tallies[static_cast<size_t>(i)];
      ++ready;
      while (!go) Pass(Micros{200});
      while (!stop) {
        Pass(Between(0, 10000, random));
        const auto asked = Clock::now();
        way->Acquire(random);
        tally.waits.push_back(Micros(Clock::now() - asked).count() / 1000);
        if (inside.fetch_add(1) != 0) Fail("two clients hold the lock");
        Pass(Between(0, 1000, random));
        inside.fetch_sub(1);
        way->Release();
      }
      tally.requests = way->requests();
    });
  }
  while (ready < settings.clients) Pass(Micros{200});
  const double cpu_before = CpuMicros(server.pid());
  const auto began = Clock::now();
  go = true;
  LetPass(Milliseconds{static_cast<int>(settings.seconds * 1000)});
  stop = true;
  const double seconds = Micros(Clock::now() - began).count() / 1e6;
  const double cpu = CpuMicros(server.pid()) - cpu_before;
  size_t counted = 0;
  for (const Tally& tally : tallies) counted += tally.waits.size();
  for (std::thread& thread : threads) thread.join();

  Figures figures;
  std::vector<double> waits;
  size_t requests = 0;
  size_t luckiest = 0;
  size_t unluckiest = SIZE_MAX;
  for (const Tally& tally : tallies) {
    waits.insert(waits.end(), tally.waits.begin(), tally.waits.end());
    requests += tally.requests;
    luckiest = std::max(luckiest, tally.waits.size());
    unluckiest = std::min(unluckiest, tally.waits.size());
  }
  std::sort(waits.begin(), waits.end());
  figures.rate = static_cast<double>(counted) / seconds;
  figures.p50 = Quantile(waits, 0.5);
  figures.p99 = Quantile(waits, 0.99);
  figures.most = waits.back();
  figures.cpu = cpu / static_cast<double>(counted);
  figures.requests = static_cast<double>(requests) / static_cast<double>(waits.size());
  figures.fairness =
      static_cast<double>(luckiest) / static_cast<double>(std::max<size_t>(unluckiest, 1));
  return figures;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return Quantile(values, 0.5);
}

void CompareWays(const Settings& settings) {
  const std::vector<std::pair<const char*, MakeWay>> ways = {{"line", Make<InLine>},
                                                             {"polling", Make<Polling>},
                                                             {"blpop", Make<Blpop>},
                                                             {"pubsub", Make<Pubsub>}};
  Server server;
  std::map<std::string, std::vector<Figures>> results;
  Random shuffle(1);
  for (int round = 0; round < settings.rounds; ++round) {
    std::vector<size_t> order(ways.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), shuffle);
    for (const size_t i : order) {
      results[ways[i].first].push_back(Run(server, ways[i].second, settings));
    }
    std::fprintf(stderr, "contention: round %d of %d\n", round + 1, settings.rounds);
  }
  std::printf(
      "%d clients, one lock, hold 0 to 1 ms, think 0 to 10 ms, median of %d rounds of %.1f s\n\n",
      settings.clients, settings.rounds, settings.seconds);
  std::printf(
      "| way | acquisitions/s | p50 ms | p99 ms | max ms | server CPU us each | requests each | "
      "most/least |\n");
  std::printf("|---|---|---|---|---|---|---|---|\n");
  for (const auto& [name, make] : ways) {
    const std::vector<Figures>& all = results[name];
    const auto median = [&all](double Figures::*field) {
      std::vector<double> values;
      values.reserve(all.size());
      for (const Figures& figures : all) values.push_back(figures.*field);
      return Median(values);
    };
    std::printf("| %s | %.0f | %.2f | %.2f | %.1f | %.1f | %.2f | %.2f |\n", name,
                median(&Figures::rate), median(&Figures::p50), median(&Figures::p99),
                median(&Figures::most), median(&Figures::cpu), median(&Figures::requests),
                median(&Figures::fairness));
  }
  std::printf("\n| line against | acquisitions/s | p99 | server CPU each |\n|---|---|---|---|\n");
  for (const auto& way : ways) {
    const std::string name = way.first;
    if (name == "line") continue;
    // Paired within each round: the machine's mood cancels out.
    const auto ratio = [&](double Figures::*field) {
      std::vector<double> values;
      for (size_t i = 0; i < results[name].size(); ++i) {
        values.push_back(results["line"][i].*field / results[name][i].*field);
      }
      return Median(values);
    };
    std::printf("| %s | %.2f times | 1/%.1f | %.2f times |\n", name.c_str(), ratio(&Figures::rate),
                1 / ratio(&Figures::p99), ratio(&Figures::cpu));
  }
}

// --- Part 2: the cost of a hand-over ----------------------------------------------------------

// Server CPU, in microseconds, for each hand-over while `waiters` clients wait; what the server
// spends on that many idle clients in the same time (its cron) is taken off.
double HandoverMicros(int waiters, int handovers) {
  Server server({.args = {"--maxclients", "20000", "--turnstile.max-waiters", "20000"}});
  std::vector<Client> clients;
  const auto enqueue = [&](int i) {
    clients[static_cast<size_t>(i)].Send("LOCK.ACQUIRE", "lock", "owner-" + std::to_string(i), "PX",
                                         600000, "WAIT", 600000);
  };
  Client admin = server.Connect();
  for (int i = 0; i <= waiters; ++i) {
    clients.push_back(server.Connect());
    enqueue(i);
    // One after the other: the order of arrival is the order of service.
    if (i > 0 && i % 100 == 0) {
      Eventually([&] { return admin.Do("LOCK.INFO", "lock").Field("waiting") == Reply::Int(i); });
    }
  }
  if (!Eventually(
          [&] { return admin.Do("LOCK.INFO", "lock").Field("waiting") == Reply::Int(waiters); })) {
    Fail("the line did not form");
  }
  // The next in line is the next number: whoever was served goes to the end again.
  const auto pass_on = [&](int count, int first) {
    for (int done = 0; done < count; ++done) {
      const int i = (first + done) % (waiters + 1);
      Client& client = clients[static_cast<size_t>(i)];
      if (!client.Read(Milliseconds{20000}).IsInteger()) Fail("out of order");
      client.Send("LOCK.RELEASE", "lock", "owner-" + std::to_string(i));
      if (client.Read() != Reply::Int(1)) Fail("a release was refused");
      enqueue(i);
    }
    return (first + count) % (waiters + 1);
  };
  const int next = pass_on(1000, 0);
  const double idle_before = CpuMicros(server.pid());
  const auto idle_began = Clock::now();
  LetPass(Milliseconds{2000});
  const double idle =
      (CpuMicros(server.pid()) - idle_before) / Micros(Clock::now() - idle_began).count();
  const double before = CpuMicros(server.pid());
  const auto began = Clock::now();
  pass_on(handovers, next);
  const double spent = CpuMicros(server.pid()) - before;
  return (spent - idle * Micros(Clock::now() - began).count()) / handovers;
}

void MeasureHandovers() {
  constexpr int kHandovers = 20000;
  std::printf(
      "\n| waiting clients | server CPU us for each hand-over (a RELEASE and an ACQUIRE … WAIT) "
      "|\n|---|---|\n");
  for (const int waiters : {10, 100, 1000, 9000}) {
    std::vector<double> values;
    for (int round = 0; round < 3; ++round) values.push_back(HandoverMicros(waiters, kHandovers));
    std::printf("| %d | %.1f |\n", waiters, Median(values));
    std::fflush(stdout);
  }
}

int Main(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string option = argv[i];
    if (option == "--seconds") settings.seconds = std::atof(argv[i + 1]);
    if (option == "--rounds") settings.rounds = std::atoi(argv[i + 1]);
    if (option == "--clients") settings.clients = std::atoi(argv[i + 1]);
  }
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);
  CompareWays(settings);
  MeasureHandovers();
  return 0;
}

}  // namespace
}  // namespace turnstile::testing

int main(int argc, char** argv) { return turnstile::testing::Main(argc, argv); }
