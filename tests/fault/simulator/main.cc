// turnstile_simulator: runs schedules of the simulator, many or one.

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <limits>
#include <new>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "core/request.h"
#include "fault/checker/checker.h"
#include "fault/checker/exemptions.h"
#include "fault/history.h"
#include "fault/simulator/simulator.h"

namespace turnstile::fault {
namespace {

constexpr const char* kUsage =
    "usage: turnstile_simulator [--schedules N] [--seed FIRST] [--jobs J] [--only SEED]\n"
    "                           [--histories]               print all of them, as JSON lines\n"
    "                           [--without-exemption NAME]  judge more strictly than is right\n"
    "                           [--find-exemption-seeds N]  what forces each in N schedules\n";
constexpr size_t kMostJobs = 256;
constexpr uint64_t kNoSeed = std::numeric_limits<uint64_t>::max();

struct Options {
  uint64_t schedules = 1'000'000;
  uint64_t first = 1;
  uint64_t jobs = std::max(1U, std::thread::hardware_concurrency());
  std::optional<uint64_t> only;
  bool histories = false;
  std::optional<uint64_t> find_exemption_seeds;
  Exemptions exemptions;
};

std::optional<Options> ParseOptions(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string_view name = argv[i];
    if (name == "--histories") {
      options.histories = true;
      --i;
      continue;
    }
    if (name == "--without-exemption" && i + 1 < argc) {
      const std::optional<Exemption> exemption = FindExemption(argv[i + 1]);
      if (!exemption.has_value()) return std::nullopt;
      options.exemptions = options.exemptions.Without(*exemption);
      continue;
    }
    const auto value = i + 1 < argc ? ParseDigits(argv[i + 1]) : std::nullopt;
    if (!value.has_value()) return std::nullopt;
    const auto number = static_cast<uint64_t>(*value);
    if (name == "--schedules") {
      options.schedules = number;
    } else if (name == "--seed") {
      options.first = number;
    } else if (name == "--jobs" && number > 0) {
      options.jobs = std::min<uint64_t>(number, kMostJobs);
    } else if (name == "--only") {
      options.only = number;
    } else if (name == "--find-exemption-seeds") {
      options.find_exemption_seeds = number;
    } else {
      return std::nullopt;
    }
  }
  return options;
}

// What the processes share. Each runs every so-manyth seed, up to the first that is wrong.
struct Shared {
  struct Job {
    std::atomic<uint64_t> seed{0};  // that it runs now
    std::atomic<uint64_t> done{0};
    Tally tally{};
  };
  std::atomic<uint64_t> wrong{kNoSeed};
  Job jobs[kMostJobs];
};

Shared* MakeShared() {
  void* memory =
      mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  return memory == MAP_FAILED ? nullptr : ::new (memory) Shared;
}

void IsWrong(Shared& shared, uint64_t seed) {
  uint64_t known = shared.wrong;
  while (seed < known && !shared.wrong.compare_exchange_weak(known, seed)) {
  }
}

void Work(Shared& shared, const Options& options, uint64_t number) {
  Shared::Job& job = shared.jobs[number];
  Simulator simulator(options.exemptions);
  for (uint64_t i = number; i < options.schedules; i += options.jobs) {
    const uint64_t seed = options.first + i;
    if (seed > shared.wrong) break;
    job.seed = seed;
    if (!simulator.Run(seed).empty()) IsWrong(shared, seed);
    ++job.done;
  }
  job.tally = simulator.tally();
}

// Everything that happens in one schedule.
int TellOne(uint64_t seed, const Exemptions& exemptions) {
  Simulator simulator(exemptions);
  const std::vector<Violation> violations = simulator.Run(seed, &std::cout);
  Write(simulator.history(), std::cout);
  if (violations.empty()) {
    std::cout << "seed " << seed << ": nothing is wrong\n";
    return EXIT_SUCCESS;
  }
  for (const Violation& violation : violations) {
    std::cout << "seed " << seed << ": " << Story(simulator.history(), violation);
  }
  return EXIT_FAILURE;
}

int PrintHistories(const Options& options) {
  Simulator simulator(options.exemptions);
  for (uint64_t i = 0; i < options.schedules; ++i) {
    const uint64_t seed = options.first + i;
    if (!simulator.Run(seed).empty()) {
      std::cerr << "seed " << seed << " is wrong\n";
      return EXIT_FAILURE;
    }
    WriteNamed("seed " + std::to_string(seed), simulator.history(), std::cout);
  }
  return std::cout.flush() ? EXIT_SUCCESS : EXIT_FAILURE;
}

// Prints, for each exemption, its name and the first seed that forces it, or 0 if none does.
int FindExemptionSeeds(uint64_t schedules) {
  std::array<uint64_t, kExemptions> seeds{};
  size_t found = 0;
  Simulator simulator;
  for (uint64_t seed = 1; seed <= schedules && found < kExemptions; ++seed) {
    if (!simulator.Run(seed).empty()) {
      std::cerr << "seed " << seed << " is wrong with all exemptions\n";
      return EXIT_FAILURE;
    }
    for (size_t i = 0; i < kExemptions; ++i) {
      if (seeds[i] != 0 || simulator.JudgeWithout(static_cast<Exemption>(i)).empty()) continue;
      seeds[i] = seed;
      ++found;
    }
  }
  for (const ExemptionRow& row : ExemptionTable()) {
    std::cout << row.name << ' ' << seeds[static_cast<size_t>(row.exemption)] << '\n';
  }
  return EXIT_SUCCESS;
}

int RunMany(const Options& options) {
  Shared* shared = MakeShared();
  if (shared == nullptr) {
    std::cerr << "no memory\n";
    return EXIT_FAILURE;
  }
  const auto begin = std::chrono::steady_clock::now();
  std::vector<pid_t> children;
  for (uint64_t i = 0; i < options.jobs; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      Work(*shared, options, i);
      std::exit(EXIT_SUCCESS);  // which writes down what was reached, if that is measured
    }
    children.push_back(child);
  }
  bool crashed = false;
  for (size_t i = 0; i < children.size(); ++i) {
    int status = 0;
    const bool ended = children[i] > 0 && waitpid(children[i], &status, 0) == children[i];
    if (ended && WIFEXITED(status) && WEXITSTATUS(status) == EXIT_SUCCESS) continue;
    crashed = true;
    IsWrong(*shared, shared->jobs[i].seed);
  }
  const double seconds =
      std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();

  uint64_t done = 0;
  Tally tally{};
  for (const Shared::Job& job : shared->jobs) {
    done += job.done;
    for (size_t i = 0; i < kThings; ++i) tally[i] += job.tally[i];
  }
  for (size_t i = 0; i < kThings; ++i) {
    std::printf("%12" PRIu64 "  %s\n", tally[i], NameOf(static_cast<Thing>(i)));
  }
  std::printf("%12" PRIu64 "  schedules in %.1f s with %" PRIu64 " jobs: %.0f a second\n", done,
              seconds, options.jobs, static_cast<double>(done) / seconds);
  std::fflush(stdout);
  if (shared->wrong == kNoSeed) {
    std::printf("nothing is wrong\n");
    return EXIT_SUCCESS;
  }
  const uint64_t seed = shared->wrong;
  if (crashed) {
    std::printf("seed %" PRIu64 ": C8, the schedule crashes, after %" PRIu64 " schedules\n", seed,
                seed - options.first + 1);
    return EXIT_FAILURE;
  }
  Simulator simulator(options.exemptions);
  const std::vector<Violation> violations = simulator.Run(seed);
  std::printf("seed %" PRIu64 ": %s, after %" PRIu64 " schedules\n", seed,
              violations.empty() ? "another outcome this time" : violations.front().check.c_str(),
              seed - options.first + 1);
  for (const Violation& violation : violations) {
    std::printf("%s", Story(simulator.history(), violation).c_str());
  }
  return EXIT_FAILURE;
}

}  // namespace
}  // namespace turnstile::fault

int main(int argc, char** argv) {
  const auto options = turnstile::fault::ParseOptions(argc, argv);
  if (!options.has_value()) {
    std::fputs(turnstile::fault::kUsage, stderr);
    return EXIT_FAILURE;
  }
  if (options->find_exemption_seeds.has_value()) {
    return turnstile::fault::FindExemptionSeeds(*options->find_exemption_seeds);
  }
  if (options->only.has_value()) {
    return turnstile::fault::TellOne(*options->only, options->exemptions);
  }
  if (options->histories) return turnstile::fault::PrintHistories(*options);
  return turnstile::fault::RunMany(*options);
}
