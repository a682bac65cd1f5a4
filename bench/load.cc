// Load for the server on a port of this machine: operations as fast as they go.
//
//   load --port P --command "REPLY WORD ..." [--command ...] [--operations N] [--clients N]
//        [--pipeline N] [--keys N] [--seed N]
//
// An operation is these commands, one after the other. The word @key is a random key, @owner a
// random owner; both are the same for all commands of an operation. REPLY says what must come back:
//
//   ok     OK
//   one    the integer 1
//   token  an integer from 1 on
//
// The operations leave the database as it was. Opens the connections before the clock starts.
// Without --operations it then prints a line "ready" and reads from standard input how many
// operations to run, line by line, until the end: so that somebody can count in between. After
// each run it prints a JSON object. A client has keys of its own, and sends a pipeline when all of
// the last one is answered. Any unexpected reply ends the run with status 1.

#include <hiredis/hiredis.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

namespace {

constexpr size_t kKeySize = 16;
constexpr size_t kOwnerSize = 32;
constexpr size_t kBuffer = 65536;
constexpr int kPatienceMs = 60000;

struct Settings {
  std::vector<std::string> commands;
  int port = 0;
  long operations = 0;  // 0: as standard input says
  long clients = 50;
  long pipeline = 16;
  long keys = 100000;
  uint64_t seed = 1;
};

[[noreturn]] void Fail(const std::string& why) {
  std::fprintf(stderr, "load: %s\n", why.c_str());
  std::exit(1);
}

// --- Random numbers, keys and owners ----------------------------------------------------------

// splitmix64: good enough, and next to free beside a request.
uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

class Random {
 public:
  explicit Random(uint64_t seed) : state_(Mix(seed)) {}
  uint64_t Next() { return Mix(state_ += 0x9e3779b97f4a7c15); }

 private:
  uint64_t state_;
};

using Key = std::array<char, kKeySize>;
using Owner = std::array<char, kOwnerSize>;

Key MakeKey(uint64_t index) {
  Key key;
  for (size_t i = kKeySize; i-- > 0; index /= 10) key[i] = static_cast<char>('0' + index % 10);
  std::memcpy(key.data(), "lock:", 5);
  return key;
}

Owner MakeOwner(Random& random) {
  Owner owner;
  for (size_t i = 0; i < kOwnerSize; i += 16) {
    uint64_t bits = random.Next();
    for (size_t j = 0; j < 16; ++j, bits >>= 4) owner[i + j] = "0123456789abcdef"[bits & 15];
  }
  return owner;
}

// --- Commands -----------------------------------------------------------------------------------

enum class Expect { kOk, kToken, kOne };

Expect ExpectNamed(const std::string& name) {
  if (name == "ok") return Expect::kOk;
  if (name == "one") return Expect::kOne;
  if (name == "token") return Expect::kToken;
  Fail("no reply is named '" + name + "'");
}

// A command as it goes over the wire; only key and owner are filled in for each request.
class Command {
 public:
  explicit Command(const std::string& text) {
    std::istringstream words(text);
    std::string word;
    words >> word;
    expect_ = ExpectNamed(word);
    size_t count = 0;
    for (; words >> word; ++count) {
      const bool is_key = word == "@key";
      const bool is_owner = word == "@owner";
      if (is_key) word.assign(kKeySize, ' ');
      if (is_owner) word.assign(kOwnerSize, ' ');
      bytes_ += "$" + std::to_string(word.size()) + "\r\n";
      if (is_key) key_at_ = bytes_.size();
      if (is_owner) owner_at_ = bytes_.size();
      bytes_ += word + "\r\n";
    }
    const std::string head = "*" + std::to_string(count) + "\r\n";
    bytes_.insert(0, head);
    if (key_at_ == 0) Fail("a command without a key: " + text);
    key_at_ += head.size();
    if (owner_at_ != 0) owner_at_ += head.size();
  }

  void AppendTo(std::string& out, const Key& key, const Owner& owner) const {
    const size_t start = out.size();
    out += bytes_;
    std::memcpy(out.data() + start + key_at_, key.data(), kKeySize);
    if (owner_at_ != 0) std::memcpy(out.data() + start + owner_at_, owner.data(), kOwnerSize);
  }

  // Whether a reply, one line without its end, is the expected one.
  bool Accepts(std::string_view reply) const {
    switch (expect_) {
      case Expect::kOk:
        return reply == "+OK";
      case Expect::kOne:
        return reply == ":1";
      case Expect::kToken:
        return reply.size() > 1 && reply[0] == ':' && reply[1] >= '1' && reply[1] <= '9';
    }
    return false;
  }

 private:
  Expect expect_ = Expect::kOk;
  std::string bytes_;
  size_t key_at_ = 0;    // 0: none
  size_t owner_at_ = 0;  // 0: none
};

// --- A connection under load --------------------------------------------------------------------

struct ContextDeleter {
  void operator()(redisContext* context) const { redisFree(context); }
};
using Context = std::unique_ptr<redisContext, ContextDeleter>;

Context Connect(int port) {
  Context context(redisConnect("127.0.0.1", port));
  if (context == nullptr || context->err != 0) Fail("no connection");
  redisSetTimeout(context.get(), timeval{kPatienceMs / 1000, 0});
  return context;
}

class Connection {
 public:
  Connection(Context context, const std::vector<Command>& operation)
      : context_(std::move(context)), operation_(operation), in_(kBuffer, '\0') {}

  int fd() const { return context_->fd; }

  // Sends up to `pipeline` commands. `next(key, owner)` begins an operation, or says that there
  // are none left. False: nothing to send.
  template <typename Next>
  bool Send(long pipeline, const Next& next) {
    out_.clear();
    for (long i = 0; i < pipeline; ++i) {
      if (step_ == 0 && !next(key_, owner_)) break;
      operation_[step_].AppendTo(out_, key_, owner_);
      step_ = (step_ + 1) % operation_.size();
      ++unanswered_;
    }
    // Blocks if it must: the server always reads on.
    for (size_t sent = 0; sent < out_.size();) {
      const ssize_t n = send(fd(), out_.data() + sent, out_.size() - sent, MSG_NOSIGNAL);
      if (n < 0 && errno != EINTR) Fail(std::string("send: ") + std::strerror(errno));
      if (n > 0) sent += static_cast<size_t>(n);
    }
    return !out_.empty();
  }

  // Takes the replies that are there. True: all are.
  bool Receive() {
    const ssize_t n = recv(fd(), in_.data() + begun_, in_.size() - begun_, MSG_DONTWAIT);
    if (n == 0) Fail("the server closed a connection");
    if (n < 0 && errno != EAGAIN && errno != EINTR) {
      Fail(std::string("recv: ") + std::strerror(errno));
    }
    if (n < 0) return false;
    std::string_view rest(in_.data(), begun_ + static_cast<size_t>(n));
    // Every reply that is expected is one line.
    for (size_t end; (end = rest.find('\n')) != std::string_view::npos;) {
      const std::string_view line = rest.substr(0, end == 0 ? 0 : end - 1);
      if (unanswered_ == 0 || !operation_[answered_].Accepts(line)) {
        Fail("unexpected reply: " + std::string(line));
      }
      answered_ = (answered_ + 1) % operation_.size();
      --unanswered_;
      rest.remove_prefix(end + 1);
    }
    begun_ = rest.size();
    if (begun_ == in_.size()) Fail("a reply without an end");
    std::memmove(in_.data(), rest.data(), begun_);
    return unanswered_ == 0;
  }

 private:
  Context context_;
  const std::vector<Command>& operation_;
  size_t step_ = 0;      // the command of the operation to send next
  size_t answered_ = 0;  // the command of the operation to be answered next
  long unanswered_ = 0;
  Key key_{};  // of the operation that goes on
  Owner owner_{};
  std::string out_;
  std::string in_;
  size_t begun_ = 0;  // bytes of a reply that is not complete
};

// --- The run ------------------------------------------------------------------------------------

class Load {
 public:
  explicit Load(const Settings& settings)
      : settings_(settings), slice_(settings.keys / settings.clients), random_(settings.seed) {
    if (slice_ == 0) Fail("fewer keys than clients");
    if (settings.commands.empty()) Fail("no command");
    for (const std::string& text : settings.commands) operation_.emplace_back(text);
    epoll_ = epoll_create1(EPOLL_CLOEXEC);
    for (long i = 0; i < settings.clients; ++i) {
      connections_.emplace_back(Connect(settings.port), operation_);
      epoll_event event{.events = EPOLLIN, .data = {.u64 = static_cast<uint64_t>(i)}};
      if (epoll_ctl(epoll_, EPOLL_CTL_ADD, connections_.back().fd(), &event) != 0) Fail("epoll");
    }
  }

  // Runs that many operations. The seconds they took.
  double Run(long operations) {
    const auto began = std::chrono::steady_clock::now();
    long left = operations;
    size_t active = 0;
    const auto send = [&](size_t client) {
      return connections_[client].Send(settings_.pipeline, [&](Key& key, Owner& owner) {
        if (left == 0) return false;
        --left;
        Choose(client, key, owner);
        return true;
      });
    };
    for (size_t i = 0; i < connections_.size(); ++i) {
      if (send(i)) ++active;
    }
    std::array<epoll_event, 64> events;
    while (active > 0) {
      const int count =
          epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), kPatienceMs);
      if (count == 0) Fail("no reply");
      if (count < 0 && errno != EINTR) Fail("epoll");
      for (int i = 0; i < count; ++i) {
        const size_t client = events[static_cast<size_t>(i)].data.u64;
        if (connections_[client].Receive() && !send(client)) --active;
      }
    }
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
  }

 private:
  // The key and the owner of an operation. The clients' keys are apart, so nobody is ever in the
  // way of another.
  void Choose(size_t client, Key& key, Owner& owner) {
    const auto slice = static_cast<uint64_t>(slice_);
    const uint64_t index = client * slice + random_.Next() % slice;
    key = MakeKey(index);
    owner = MakeOwner(random_);
  }

  const Settings settings_;
  const long slice_;  // keys of a client
  Random random_;
  std::vector<Command> operation_;
  std::vector<Connection> connections_;
  int epoll_ = -1;
};

long Number(const std::string& text, const std::string& what) {
  char* end = nullptr;
  const long number = std::strtol(text.c_str(), &end, 10);
  if (text.empty() || *end != '\0' || number < 1) Fail(what + " needs a number, 1 or more");
  return number;
}

Settings Parse(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i < argc; i += 2) {
    const std::string option = argv[i];
    const std::string value = i + 1 < argc ? argv[i + 1] : "";
    if (option == "--command") {
      settings.commands.push_back(value);
    } else if (option == "--port") {
      settings.port = static_cast<int>(Number(value, option));
    } else if (option == "--operations") {
      settings.operations = Number(value, option);
    } else if (option == "--clients") {
      settings.clients = Number(value, option);
    } else if (option == "--pipeline") {
      settings.pipeline = Number(value, option);
    } else if (option == "--keys") {
      settings.keys = Number(value, option);
    } else if (option == "--seed") {
      settings.seed = static_cast<uint64_t>(Number(value, option));
    } else {
      Fail("no option " + option);
    }
  }
  return settings;
}

int Main(int argc, char** argv) {
  const Settings settings = Parse(argc, argv);
  Load load(settings);
  const auto run = [&load](long operations) {
    const double seconds = load.Run(operations);
    std::printf("{\"operations\": %ld, \"seconds\": %.6f}\n", operations, seconds);
    std::fflush(stdout);
  };
  if (settings.operations > 0) {
    run(settings.operations);
    return 0;
  }
  std::puts("ready");
  std::fflush(stdout);
  for (std::string line; std::getline(std::cin, line);) run(Number(line, "standard input"));
  return 0;
}

}  // namespace

int main(int argc, char** argv) { return Main(argc, argv); }
