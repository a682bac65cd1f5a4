// Load for the server on a port of this machine: acquire and release, or touch, as fast as it goes.
//
//   load --port P --mode MODE [--operations N] [--clients N] [--pipeline N] [--keys N] [--seed N]
//
// Modes whose operation is a pair, acquire and release of a random key:
//
//   set-del          SET NX PX and DEL: no owner check, no token
//   turnstile        LOCK.ACQUIRE and LOCK.RELEASE
//   evalsha          SET NX PX, and the usual script that releases for the owner only
//   evalsha-fencing  the same release; the acquire is a script too, which counts tokens
//   fcall-fencing    these two as functions
//
// Modes whose operation is one touch of a random lock out of --keys that are held:
//
//   pexpire          PEXPIRE of a plain lock: no owner check
//   touch            LOCK.TOUCH
//   evalsha-extend   the usual script that extends a plain lock for the owner only
//
// Empties the server, loads what the mode needs and opens the connections before the clock starts.
// Without --operations it then prints a line "ready" and reads from standard input how many
// operations to run, line by line, until the end: so that somebody can count in between. After
// each run it prints a JSON object. A client has keys of its own, and sends a pipeline when all of
// the last one is answered. Any unexpected reply ends the run with status 1.

#include <hiredis/hiredis.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace {

constexpr size_t kKeySize = 16;
constexpr size_t kOwnerSize = 32;
constexpr size_t kBuffer = 65536;
constexpr int kPatienceMs = 60000;
constexpr const char* kLease = "30000";
constexpr const char* kLongLease = "3600000";

struct Settings {
  std::string mode;
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

// Who holds a lock that is only touched: random, but the same each time.
Owner HolderOf(uint64_t index, uint64_t seed) {
  Random random(seed + index);
  return MakeOwner(random);
}

// --- Commands -----------------------------------------------------------------------------------

enum class Expect { kOk, kToken, kOne };

// Places for the key and the owner in a command.
constexpr std::string_view kKey = "0123456789abcdef";
constexpr std::string_view kOwner = "0123456789abcdef0123456789ABCDEF";
static_assert(kKey.size() == kKeySize && kOwner.size() == kOwnerSize);

// A command as it goes over the wire; only key and owner are filled in for each request.
class Command {
 public:
  Command(Expect expect, const std::vector<std::string_view>& arguments) : expect_(expect) {
    bytes_ = "*" + std::to_string(arguments.size()) + "\r\n";
    for (const std::string_view argument : arguments) {
      bytes_ += "$" + std::to_string(argument.size()) + "\r\n";
      if (argument == kKey) key_at_ = bytes_.size();
      if (argument == kOwner) owner_at_ = bytes_.size();
      bytes_ += argument;
      bytes_ += "\r\n";
    }
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
  Expect expect_;
  std::string bytes_;
  size_t key_at_ = 0;
  size_t owner_at_ = 0;
};

// --- Modes --------------------------------------------------------------------------------------

constexpr const char* kReleaseScript = R"(
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
)";

constexpr const char* kExtendScript = R"(
if redis.call('GET', KEYS[1]) == ARGV[1] then
  return redis.call('PEXPIRE', KEYS[1], ARGV[2])
end
return 0
)";

constexpr const char* kAcquireScript = R"(
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then
  return redis.call('INCR', KEYS[2])
end
return false
)";

constexpr const char* kLibrary = R"(#!lua name=bench
redis.register_function('bench_acquire', function(keys, args)
  if redis.call('SET', keys[1], args[1], 'NX', 'PX', args[2]) then
    return redis.call('INCR', keys[2])
  end
  return false
end)
redis.register_function('bench_release', function(keys, args)
  if redis.call('GET', keys[1]) == args[1] then
    return redis.call('DEL', keys[1])
  end
  return 0
end)
)";

// One counter for all locks: the cheapest way to fence with a script.
constexpr const char* kCounter = "fencing-counter";

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

// The reply of a command of the preparation, which must not fail.
std::string Ask(redisContext* context, const std::vector<const char*>& arguments) {
  const int count = static_cast<int>(arguments.size());
  const std::unique_ptr<redisReply, void (*)(void*)> reply(
      static_cast<redisReply*>(
          redisCommandArgv(context, count, const_cast<const char**>(arguments.data()), nullptr)),
      freeReplyObject);
  const std::string what = arguments[0];
  if (reply == nullptr) Fail(what + ": " + context->errstr);
  if (reply->type == REDIS_REPLY_ERROR) Fail(what + ": " + reply->str);
  if (reply->str == nullptr) Fail(what + ": unexpected reply");
  return reply->str;
}

std::string LoadScript(redisContext* context, const char* script) {
  return Ask(context, {"SCRIPT", "LOAD", script});
}

struct Mode {
  std::vector<Command> operation;  // what is measured
  std::vector<Command> held = {};  // one command that takes a lock beforehand, or none
};

Command SetCommand(const char* lease) {
  return {Expect::kOk, {"SET", kKey, kOwner, "NX", "PX", lease}};
}

Command AcquireCommand(const char* lease) {
  return {Expect::kToken, {"LOCK.ACQUIRE", kKey, kOwner, "PX", lease}};
}

Command EvalReleaseCommand(redisContext* context) {
  return {Expect::kOne, {"EVALSHA", LoadScript(context, kReleaseScript), "1", kKey, kOwner}};
}

// Loads what the mode needs into the server.
Mode MakeMode(const std::string& name, redisContext* context) {
  const std::map<std::string, std::function<Mode()>> modes = {
      {"set-del",
       [] {
         return Mode{{SetCommand(kLease), {Expect::kOne, {"DEL", kKey}}}};
       }},
      {"turnstile",
       [] {
         return Mode{{AcquireCommand(kLease), {Expect::kOne, {"LOCK.RELEASE", kKey, kOwner}}}};
       }},
      {"evalsha",
       [&] {
         return Mode{{SetCommand(kLease), EvalReleaseCommand(context)}};
       }},
      {"evalsha-fencing",
       [&] {
         const std::string acquire = LoadScript(context, kAcquireScript);
         return Mode{{{Expect::kToken, {"EVALSHA", acquire, "2", kKey, kCounter, kOwner, kLease}},
                      EvalReleaseCommand(context)}};
       }},
      {"fcall-fencing",
       [&] {
         Ask(context, {"FUNCTION", "LOAD", "REPLACE", kLibrary});
         return Mode{
             {{Expect::kToken, {"FCALL", "bench_acquire", "2", kKey, kCounter, kOwner, kLease}},
              {Expect::kOne, {"FCALL", "bench_release", "1", kKey, kOwner}}}};
       }},
      {"pexpire",
       [] {
         return Mode{{{Expect::kOne, {"PEXPIRE", kKey, kLease}}}, {SetCommand(kLongLease)}};
       }},
      {"touch",
       [] {
         return Mode{{{Expect::kOne, {"LOCK.TOUCH", kKey, kOwner, "PX", kLease}}},
                     {AcquireCommand(kLongLease)}};
       }},
      {"evalsha-extend",
       [&] {
         const std::string extend = LoadScript(context, kExtendScript);
         return Mode{{{Expect::kOne, {"EVALSHA", extend, "1", kKey, kOwner, kLease}}},
                     {SetCommand(kLongLease)}};
       }},
  };
  const auto found = modes.find(name);
  if (found == modes.end()) Fail("no mode " + name);
  return found->second();
}

// --- A connection under load --------------------------------------------------------------------

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
    const Context context = Connect(settings.port);
    Ask(context.get(), {"FLUSHALL", "SYNC"});
    mode_ = MakeMode(settings.mode, context.get());
    if (!mode_.held.empty()) TakeLocks();

    epoll_ = epoll_create1(EPOLL_CLOEXEC);
    for (long i = 0; i < settings.clients; ++i) {
      connections_.emplace_back(Connect(settings.port), mode_.operation);
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
    owner = mode_.held.empty() ? MakeOwner(random_) : HolderOf(index, settings_.seed);
  }

  void TakeLocks() {
    Connection connection(Connect(settings_.port), mode_.held);
    uint64_t index = 0;
    const auto next = [&](Key& key, Owner& owner) {
      if (index == static_cast<uint64_t>(settings_.keys)) return false;
      key = MakeKey(index);
      owner = HolderOf(index, settings_.seed);
      ++index;
      return true;
    };
    while (connection.Send(1000, next)) {
      do {
        pollfd wanted{.fd = connection.fd(), .events = POLLIN, .revents = 0};
        if (poll(&wanted, 1, kPatienceMs) == 0) Fail("no reply");
      } while (!connection.Receive());
    }
  }

  const Settings settings_;
  const long slice_;  // keys of a client
  Random random_;
  Mode mode_;
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
    if (option == "--mode") {
      settings.mode = value;
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
