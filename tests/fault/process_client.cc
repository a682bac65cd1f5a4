#include "fault/process_client.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <random>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "fault/driver.h"
#include "support/client.h"
#include "support/reply.h"

namespace turnstile::fault {

using testing::Client;
using testing::Reply;

namespace {

// Owners of the driver begin at 1; those of processes are far above.
constexpr uint32_t kFirstOwner = 1U << 30;
constexpr uint32_t kOwnersOfOne = 1U << 18;  // in one life
constexpr uint32_t kLives = 1U << 10;
constexpr uint32_t kLocks = 3;  // the exclusive ones

volatile sig_atomic_t told_to_end = 0;

}  // namespace

ProcessClient::ProcessClient(int port, uint32_t number, uint64_t seed)
    : port_(port), number_(number), seed_(seed) {
  std::string path = std::filesystem::temp_directory_path() / "turnstile-client-XXXXXX";
  const int fd = mkstemp(path.data());
  if (fd >= 0) close(fd);
  path_ = path;
  Restart();
}

ProcessClient::ProcessClient(ProcessClient&& other) noexcept
    : port_(other.port_),
      number_(other.number_),
      seed_(other.seed_),
      path_(std::exchange(other.path_, {})),
      pid_(std::exchange(other.pid_, -1)),
      lives_(other.lives_),
      history_(std::move(other.history_)) {}

ProcessClient::~ProcessClient() {
  if (pid_ > 0) Kill();
  std::error_code ignored;
  if (!path_.empty()) std::filesystem::remove(path_, ignored);
}

// Never to -1, which is everybody.
void ProcessClient::Signal(int signal) const {
  if (pid_ > 0) kill(pid_, signal);
}
void ProcessClient::Stop() const { Signal(SIGSTOP); }
void ProcessClient::Continue() const { Signal(SIGCONT); }

void ProcessClient::Kill() {
  Signal(SIGKILL);
  if (pid_ > 0) waitpid(pid_, nullptr, 0);
  pid_ = -1;
  Collect();
}

void ProcessClient::Restart() {
  const uint32_t first_owner = kFirstOwner + (number_ * kLives + lives_++) * kOwnersOfOne;
  std::array<std::string, 6> arguments = {"turnstile_faults",
                                          kOption,
                                          std::to_string(port_),
                                          std::to_string(first_owner),
                                          std::to_string(seed_ + lives_),
                                          path_};
  std::array<char*, 7> pointers{};
  for (size_t i = 0; i < arguments.size(); i++) pointers.at(i) = arguments.at(i).data();
  const pid_t parent = getpid();
  pid_ = fork();
  if (pid_ < 0) throw std::runtime_error("no process for a client");
  if (pid_ != 0) return;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(126);
  execv("/proc/self/exe", pointers.data());
  _exit(127);
}

void ProcessClient::Finish() {
  Signal(SIGTERM);
  Signal(SIGCONT);
  if (pid_ > 0) waitpid(pid_, nullptr, 0);
  pid_ = -1;
  Collect();
}

void ProcessClient::Collect() {
  std::ifstream file(path_);
  // One that was killed may not have finished its last line.
  std::stringstream whole;
  for (std::string line; std::getline(file, line) && !file.eof();) whole << line << '\n';
  const History more = ReadHistory(whole);
  for (const Operation& op : more.operations) {
    // An answer takes the place of what was written down before it came.
    std::vector<Operation>& all = history_.operations;
    if (!all.empty() && all.back().answer == Answer::kLost && all.back().verb == op.verb &&
        all.back().owner == op.owner && all.back().sent == op.sent) {
      all.pop_back();
    }
    all.push_back(op);
  }
  file.close();
  std::filesystem::resize_file(path_, 0);
}

int ProcessClient::Main(int count, char** arguments) {
  if (count != 4) return 2;
  const int port = std::atoi(arguments[0]);
  auto owner = static_cast<uint32_t>(std::strtoul(arguments[1], nullptr, 10));
  std::mt19937_64 random(std::strtoull(arguments[2], nullptr, 10));
  std::ofstream file(arguments[3], std::ios::app);
  struct sigaction action {};
  action.sa_handler = [](int) { told_to_end = 1; };
  sigaction(SIGTERM, &action, nullptr);

  Client client(port);
  Operation op;
  const auto record = [&] {
    Write({{op}, {}}, file);
    file.flush();
  };
  // What is under way when the process is killed has to be known of: a request that changes
  // something is written down before it is sent, as lost, and once more when there is an answer.
  const auto ask = [&](Verb verb, const testing::Command& command) {
    op.verb = verb;
    op.sent = Now();
    op.answer = Answer::kLost;
    op.answered = op.sent;
    if (verb != Verb::kFence) record();
    const Reply reply = client.Do(command);
    op.answered = Now();
    op.answer = reply.IsNil()            ? Answer::kNull
                : !reply.IsInteger()     ? Answer::kLost
                : verb == Verb::kAcquire ? Answer::kToken
                : reply.integer != 0     ? Answer::kYes
                                         : Answer::kNo;
    if (op.answer == Answer::kToken) op.token = reply.integer;
    record();
    if (!client.connected()) client = Client(port);
    return op.answer;
  };

  while (told_to_end == 0) {
    op = {};
    op.owner = ++owner;
    op.direct = false;  // Who is stopped reads its answers late.
    op.lock = static_cast<uint32_t>(random() % kLocks);
    op.lease = kLease;
    op.wait = 100 * kMillisecond;
    const std::string lock = "lock:" + std::to_string(op.lock);
    const std::string name = "p" + std::to_string(op.owner);
    const std::string lease = std::to_string(kLease / kMillisecond);
    if (ask(Verb::kAcquire, {"LOCK.ACQUIRE", lock, name, "PX", lease, "WAIT", "100"}) !=
        Answer::kToken) {
      continue;
    }
    op.wait = 0;
    for (uint64_t deeds = random() % 20; deeds > 0; deeds--) {
      op.verb = Verb::kWrite;
      op.sent = op.answered = Now();
      record();
      ask(Verb::kFence, {"LOCK.FENCE", lock, std::to_string(op.token)});
      if (deeds % 4 == 0) ask(Verb::kTouch, {"LOCK.TOUCH", lock, name, "PX", lease});
    }
    ask(Verb::kRelease, {"LOCK.RELEASE", lock, name});
  }
  return 0;
}

}  // namespace turnstile::fault
