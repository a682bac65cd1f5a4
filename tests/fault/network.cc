#include "fault/network.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <thread>

namespace turnstile::fault {
namespace {

constexpr int kMostHosts = 250;
constexpr int kDriverNumber = 254;  // the last number of its address
constexpr char kInterface[] = "eth0";

// What each host has from the beginning: a list of those whom it does not hear.
constexpr char kFilter[] = R"(
  table ip turnstile {
    set unheard {
      type ipv4_addr
    }
    chain input {
      type filter hook input priority 0; policy accept;
      ip saddr @unheard drop
    }
  }
)";

int CurrentSpace() { return open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC); }

// The descriptor of a new network namespace, in which the thread then is.
int NewSpace() {
  const int space = unshare(CLONE_NEWNET) == 0 ? CurrentSpace() : -1;
  if (space < 0) {
    throw std::runtime_error(std::string("no network namespace: ") + std::strerror(errno));
  }
  return space;
}

std::string Contents(int fd) {
  std::string text;
  std::array<char, 4096> buffer{};
  ssize_t size = 0;
  while ((size = pread(fd, buffer.data(), buffer.size(), static_cast<off_t>(text.size()))) > 0) {
    text.append(buffer.data(), static_cast<size_t>(size));
  }
  return text;
}

}  // namespace

std::string Network::WhyNot() {
  static const std::string why = [] {
    if (geteuid() != 0) return std::string("network namespaces need root");
    std::string reason;
    // In a thread of its own, since a Network changes the namespace of its thread.
    std::thread([&reason] {
      try {
        const Network probe(2);
        probe.Partition({0}, {1});
        probe.Heal();
      } catch (const std::exception& error) {
        reason = error.what();
      }
    }).join();
    return reason;
  }();
  return why;
}

Network::Network(int hosts) : original_(CurrentSpace()) {
  try {
    if (hosts < 1 || hosts > kMostHosts) throw std::runtime_error("a network has 1 to 250 hosts");
    for (int i = 0; i <= hosts; i++) spaces_.push_back(NewSpace());
    Build();
  } catch (...) {
    Leave();
    throw;
  }
}

Network::~Network() { Leave(); }

void Network::Leave() const {
  setns(original_, CLONE_NEWNET);
  close(original_);
  for (const int space : spaces_) close(space);
}

void Network::Build() const {
  std::string bridge = "link set lo up\nlink add bridge0 type bridge\nlink set bridge0 up\n";
  bridge.append("addr add ").append(AddressOf(kDriver)).append("/24 dev bridge0\n");
  for (int host = 0; host < hosts(); host++) {
    const std::string port = "host" + std::to_string(host);
    bridge.append("link add ").append(port).append(" type veth peer name ").append(kInterface);
    bridge.append(" netns ").append(NamespaceOf(host)).append("\n");
    bridge.append("link set ").append(port).append(" master bridge0 up\n");
  }
  MustRun(kDriver, {"ip", "-batch", "-"}, bridge);
  for (int host = 0; host < hosts(); host++) {
    std::string own = "link set lo up\n";
    own.append("link set ").append(kInterface).append(" up\n");
    own.append("addr add ").append(AddressOf(host)).append("/24 dev ").append(kInterface);
    MustRun(host, {"ip", "-batch", "-"}, own + "\n");
  }
  for (int host = kDriver; host < hosts(); host++) MustRun(host, {"nft", "-f", "-"}, kFilter);
}

std::string Network::AddressOf(int host) {
  return "10.77.0." + std::to_string(host == kDriver ? kDriverNumber : host + 1);
}

int Network::SpaceOf(int host) const {
  return host == kDriver ? spaces_.back() : spaces_.at(static_cast<size_t>(host));
}

std::string Network::NamespaceOf(int host) const {
  return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(SpaceOf(host));
}

void Network::PartitionOneWay(const std::vector<int>& from, const std::vector<int>& to) const {
  std::string addresses;
  for (const int host : from) addresses += (addresses.empty() ? "" : ", ") + AddressOf(host);
  if (addresses.empty()) return;
  for (const int host : to) {
    MustRun(host, {"nft", "-f", "-"}, "add element ip turnstile unheard { " + addresses + " }\n");
  }
}

void Network::Partition(const std::vector<int>& group, const std::vector<int>& other) const {
  PartitionOneWay(group, other);
  PartitionOneWay(other, group);
}

void Network::Isolate(int host) const {
  std::vector<int> others;
  for (int other = kDriver; other < hosts(); other++) {
    if (other != host) others.push_back(other);
  }
  Partition({host}, others);
}

void Network::Heal() const {
  for (int host = kDriver; host < hosts(); host++) {
    MustRun(host, {"nft", "-f", "-"}, "flush set ip turnstile unheard\n");
  }
}

bool Network::Run(int host, std::vector<std::string> arguments, const std::string& input,
                  std::string* output) const {
  const int in = memfd_create("input", MFD_CLOEXEC);
  const int out = memfd_create("output", MFD_CLOEXEC);
  const auto size = static_cast<ssize_t>(input.size());
  const bool ready = in >= 0 && out >= 0 && pwrite(in, input.data(), input.size(), 0) == size;
  std::vector<char*> argv;
  argv.reserve(arguments.size() + 1);
  for (std::string& argument : arguments) argv.push_back(argument.data());
  argv.push_back(nullptr);
  const int space = SpaceOf(host);
  const pid_t child = ready ? fork() : -1;
  if (child == 0) {  // perhaps a copy of a process with threads: system calls only
    if (setns(space, CLONE_NEWNET) != 0) _exit(126);
    dup2(in, STDIN_FILENO);
    dup2(out, STDOUT_FILENO);
    dup2(out, STDERR_FILENO);
    execvp(argv[0], argv.data());
    _exit(127);
  }
  int status = -1;
  while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  *output = Contents(out);
  if (WIFEXITED(status) && WEXITSTATUS(status) == 127) *output += "there is no " + arguments[0];
  close(in);
  close(out);
  return child > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

void Network::MustRun(int host, const std::vector<std::string>& arguments,
                      const std::string& input) const {
  std::string output;
  if (Run(host, arguments, input, &output)) return;
  throw std::runtime_error("no network of hosts: " + arguments[0] + ": " + output);
}

}  // namespace turnstile::fault
