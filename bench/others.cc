// The same pair, acquire and release of a free lock, on different systems with one driver.
//
//   others --system SYSTEM --port P [--clients N] [--seconds S] [--seed N] [--password-file FILE]
//
//   turnstile   LOCK.ACQUIRE and LOCK.RELEASE
//   set-del     SET NX PX and DEL
//   postgresql  pg_try_advisory_lock and pg_advisory_unlock, prepared; as the user "bench" with
//               the password in FILE
//   etcd        a transaction that puts the key if there is none, under a lease that each client
//               was granted once; and one that deletes it if it is the owner's. HTTP and JSON
//
// A client is a connection on loopback. It sends its next request when the last one is answered, a
// random key and a random owner for each pair. Prints a JSON object: pairs in so many seconds,
// and the median and the 99th percentile of the time that a pair took. Any unexpected reply ends
// the run with status 1.

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr int kPatienceMs = 60000;
constexpr Seconds kWarmUp{0.25};

struct Settings {
  std::string system;
  int port = 0;
  long clients = 50;
  double seconds = 2;
  uint64_t seed = 1;
  std::string password;
};

[[noreturn]] void Fail(const std::string& why) {
  std::fprintf(stderr, "others: %s\n", why.c_str());
  std::exit(1);
}

// --- A connection -------------------------------------------------------------------------------

class Connection {
 public:
  explicit Connection(int port) : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const int on = 1;
    const timeval patience{kPatienceMs / 1000, 0};
    if (connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0 ||
        setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)) != 0 ||
        setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)) != 0) {
      Fail(std::string("no connection: ") + std::strerror(errno));
    }
  }
  ~Connection() { close(fd_); }
  Connection(const Connection&) = delete;
  Connection& operator=(const Connection&) = delete;

  int fd() const { return fd_; }

  void Send(std::string_view bytes) const {
    while (!bytes.empty()) {
      const ssize_t n = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n < 0 && errno != EINTR) Fail(std::string("send: ") + std::strerror(errno));
      if (n > 0) bytes.remove_prefix(static_cast<size_t>(n));
    }
  }

  // What has come and was not taken yet.
  std::string_view received() const { return received_; }
  void Take(size_t bytes) { received_.erase(0, bytes); }

  // Waits until something more has come.
  void Receive() {
    std::array<char, 16384> more;
    const ssize_t n = recv(fd_, more.data(), more.size(), 0);
    if (n == 0) Fail("the server closed a connection");
    if (n < 0 && errno != EINTR) Fail(std::string("recv: ") + std::strerror(errno));
    if (n > 0) received_.append(more.data(), static_cast<size_t>(n));
  }

 private:
  int fd_;
  std::string received_;
};

// --- Systems ------------------------------------------------------------------------------------

struct Lock {
  uint64_t number;    // up to 11 digits
  std::string key;    // 16 bytes with that number
  std::string owner;  // 32 bytes
};

// How one client talks to a system.
class Session {
 public:
  explicit Session(const Settings& settings) : connection_(settings.port) {}
  virtual ~Session() = default;
  Session(const Session&) = delete;
  Session& operator=(const Session&) = delete;

  Connection& connection() { return connection_; }

  virtual std::string Acquire(const Lock& lock) = 0;
  virtual std::string Release(const Lock& lock) = 0;

  // The size of the reply to one of these at the start of what was received, if it is complete.
  // Fails if it does not say that the lock was obtained or given up.
  virtual std::optional<size_t> CheckAcquired(std::string_view received) = 0;
  virtual std::optional<size_t> CheckReleased(std::string_view received) = 0;

 protected:
  // For what has to be said before the clock starts: waits until `check` has a reply.
  template <typename Check>
  std::string Ask(std::string_view request, const Check& check) {
    connection_.Send(request);
    std::optional<size_t> size;
    while (!(size = check(connection_.received())).has_value()) connection_.Receive();
    std::string reply(connection_.received().substr(0, *size));
    connection_.Take(*size);
    return reply;
  }

 private:
  Connection connection_;
};

class RedisSession : public Session {
 public:
  using Session::Session;

 protected:
  static std::string Command(const std::vector<std::string_view>& words) {
    std::string bytes = "*" + std::to_string(words.size()) + "\r\n";
    for (const std::string_view word : words) {
      bytes += "$" + std::to_string(word.size()) + "\r\n";
      bytes += word;
      bytes += "\r\n";
    }
    return bytes;
  }

  // Every reply that is expected is one line.
  static std::optional<size_t> CheckLine(std::string_view received, std::string_view begin) {
    const size_t end = received.find("\r\n");
    if (end == std::string_view::npos) return std::nullopt;
    const std::string_view line = received.substr(0, end);
    if (!line.starts_with(begin) || line == ":0") Fail("unexpected reply: " + std::string(line));
    return end + 2;
  }
};

class Turnstile : public RedisSession {
 public:
  using RedisSession::RedisSession;
  std::string Acquire(const Lock& lock) override {
    return Command({"LOCK.ACQUIRE", lock.key, lock.owner, "PX", "30000"});
  }
  std::string Release(const Lock& lock) override {
    return Command({"LOCK.RELEASE", lock.key, lock.owner});
  }
  std::optional<size_t> CheckAcquired(std::string_view received) override {
    return CheckLine(received, ":");
  }
  std::optional<size_t> CheckReleased(std::string_view received) override {
    return CheckLine(received, ":1");
  }
};

class SetDel : public RedisSession {
 public:
  using RedisSession::RedisSession;
  std::string Acquire(const Lock& lock) override {
    return Command({"SET", lock.key, lock.owner, "NX", "PX", "30000"});
  }
  std::string Release(const Lock& lock) override { return Command({"DEL", lock.key}); }
  std::optional<size_t> CheckAcquired(std::string_view received) override {
    return CheckLine(received, "+OK");
  }
  std::optional<size_t> CheckReleased(std::string_view received) override {
    return CheckLine(received, ":1");
  }
};

// The wire protocol, version 3.0. A message is a byte that says what it is, its size with these
// four bytes, and its content. Numbers are big-endian.
class PostgreSql : public Session {
 public:
  explicit PostgreSql(const Settings& settings) : Session(settings) {
    Greet(settings.password);
    Prepare("acquire", "SELECT pg_try_advisory_lock($1)");
    Prepare("release", "SELECT pg_advisory_unlock($1)");
  }
  std::string Acquire(const Lock& lock) override { return Execute("acquire", lock); }
  std::string Release(const Lock& lock) override { return Execute("release", lock); }
  std::optional<size_t> CheckAcquired(std::string_view received) override {
    return CheckTrue(received);
  }
  std::optional<size_t> CheckReleased(std::string_view received) override {
    return CheckTrue(received);
  }

 private:
  struct Message {
    char kind;
    std::string_view content;
  };

  static std::string Number(uint64_t number, size_t bytes) {
    std::string out;
    for (size_t i = bytes; i-- > 0;) out += static_cast<char>(number >> (8 * i) & 0xff);
    return out;
  }
  static std::string Text(std::string_view text) { return std::string(text) + '\0'; }
  static std::string Framed(std::string_view kind, const std::string& content) {
    return std::string(kind) + Number(content.size() + 4, 4) + content;
  }

  // A message that was not expected. Its fields end with zero bytes.
  [[noreturn]] static void Refuse(std::string_view content) {
    std::string text(content);
    std::replace(text.begin(), text.end(), '\0', ' ');
    Fail("PostgreSQL: " + text);
  }

  static std::optional<Message> First(std::string_view received) {
    if (received.size() < 5) return std::nullopt;
    size_t size = 0;
    for (const char byte : received.substr(1, 4)) size = size << 8 | static_cast<uint8_t>(byte);
    if (received.size() < 1 + size) return std::nullopt;
    if (size < 4) Refuse("not a message");
    return Message{received[0], received.substr(5, size - 4)};
  }

  // Calls `look` with each message up to the one that says that the server is ready. The size of
  // all of them, if they are there.
  template <typename Look>
  static std::optional<size_t> UntilReady(std::string_view received, const Look& look) {
    size_t size = 0;
    while (true) {
      const std::optional<Message> message = First(received.substr(size));
      if (!message.has_value()) return std::nullopt;
      if (message->kind == 'E') Refuse(message->content);
      size += 5 + message->content.size();
      if (message->kind == 'Z') return size;
      look(*message);
    }
  }

  void Greet(const std::string& password) {
    const std::string version = Number(3 << 16, 4);
    const std::string start =
        version + Text("user") + Text("bench") + Text("database") + Text("postgres");
    const std::string asked = Ask(Framed("", start + '\0'), [](std::string_view received) {
      const std::optional<Message> message = First(received);
      return message.has_value() ? std::optional(5 + message->content.size()) : std::nullopt;
    });
    constexpr std::string_view kForPassword{"R\0\0\0\x08\0\0\0\x03", 9};
    if (asked != kForPassword) Refuse(asked.substr(5));
    Ask(Framed("p", Text(password)),
        [](std::string_view received) { return UntilReady(received, [](const Message&) {}); });
  }

  void Prepare(std::string_view name, std::string_view query) {
    constexpr uint64_t kInt8 = 20;  // the type bigint
    Ask(Framed("P", Text(name) + Text(query) + Number(1, 2) + Number(kInt8, 4)) + Framed("S", ""),
        [](std::string_view received) { return UntilReady(received, [](const Message&) {}); });
  }

  // With one parameter in binary form.
  static std::string Execute(std::string_view name, const Lock& lock) {
    const std::string parameter = Number(8, 4) + Number(lock.number, 8);
    const std::string bind = Text("") + Text(name) + Number(1, 2) + Number(1, 2) + Number(1, 2) +
                             parameter + Number(0, 2);
    return Framed("B", bind) + Framed("E", Text("") + Number(0, 4)) + Framed("S", "");
  }

  // One row with one column, which is true.
  static std::optional<size_t> CheckTrue(std::string_view received) {
    static constexpr std::string_view kTrue{"\0\x01\0\0\0\x01t", 7};
    size_t rows = 0;
    const std::optional<size_t> size = UntilReady(received, [&rows](const Message& message) {
      if (message.kind != 'D') return;
      if (message.content != kTrue) Refuse("the lock was not free, or not held");
      ++rows;
    });
    if (size.has_value() && rows != 1) Refuse("not one row");
    return size;
  }
};

class Etcd : public Session {
 public:
  explicit Etcd(const Settings& settings) : Session(settings) {
    const std::string granted = Ask(Post("/v3/lease/grant", R"({"TTL":"600"})"), HttpSize);
    constexpr std::string_view kName = R"("ID":")";
    const size_t begin = granted.find(kName);
    const size_t end = granted.find('"', begin + kName.size());
    if (begin == std::string::npos || end == std::string::npos) Fail("etcd grants no lease");
    lease_ = granted.substr(begin + kName.size(), end - begin - kName.size());
  }
  std::string Acquire(const Lock& lock) override {
    const std::string key = Field("key", Base64(lock.key));
    return Transaction(key + R"(,"target":"CREATE","create_revision":"0")",
                       R"("request_put":{)" + key + "," + Field("value", Base64(lock.owner)) + "," +
                           Field("lease", lease_) + "}");
  }
  std::string Release(const Lock& lock) override {
    const std::string key = Field("key", Base64(lock.key));
    return Transaction(key + R"(,"target":"VALUE",)" + Field("value", Base64(lock.owner)),
                       R"("request_delete_range":{)" + key + "}");
  }
  std::optional<size_t> CheckAcquired(std::string_view received) override {
    return CheckSucceeded(received);
  }
  std::optional<size_t> CheckReleased(std::string_view received) override {
    return CheckSucceeded(received);
  }

 private:
  static std::string Field(const std::string& name, const std::string& value) {
    return "\"" + name + "\":\"" + value + "\"";
  }

  static std::string Base64(std::string_view bytes) {
    constexpr std::string_view kDigits =
        "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    std::string out;
    for (size_t i = 0; i < bytes.size(); i += 3) {
      const std::string_view group = bytes.substr(i, 3);
      uint32_t bits = 0;
      for (size_t j = 0; j < 3; ++j) {
        bits = bits << 8 | (j < group.size() ? static_cast<uint8_t>(group[j]) : 0);
      }
      for (size_t j = 0; j < 4; ++j) {
        out += j <= group.size() ? kDigits[bits >> (18 - 6 * j) & 63] : '=';
      }
    }
    return out;
  }

  static std::string Post(const std::string& path, const std::string& body) {
    return "POST " + path + " HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" +
           "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
  }

  // If the key is as `compare` says, then `act`.
  static std::string Transaction(const std::string& compare, const std::string& act) {
    return Post("/v3/kv/txn",
                R"({"compare":[{"result":"EQUAL",)" + compare + R"(}],"success":[{)" + act + "}]}");
  }

  static std::optional<size_t> HttpSize(std::string_view received) {
    const size_t head = received.find("\r\n\r\n");
    if (head == std::string_view::npos) return std::nullopt;
    if (!received.starts_with("HTTP/1.1 200")) Fail("etcd: " + std::string(received));
    constexpr std::string_view kLength = "\r\nContent-Length: ";
    const size_t length = received.find(kLength);
    if (length >= head) Fail("etcd: a reply of unknown length");
    const size_t size =
        head + 4 + std::strtoul(received.data() + length + kLength.size(), nullptr, 10);
    return received.size() < size ? std::nullopt : std::optional(size);
  }

  static std::optional<size_t> CheckSucceeded(std::string_view received) {
    const std::optional<size_t> size = HttpSize(received);
    if (size.has_value() &&
        received.substr(0, *size).find(R"("succeeded":true)") == std::string_view::npos) {
      Fail("etcd: unexpected reply: " + std::string(received));
    }
    return size;
  }

  std::string lease_;
};

template <typename Kind>
std::unique_ptr<Session> Open(const Settings& settings) {
  return std::make_unique<Kind>(settings);
}

using Opener = std::function<std::unique_ptr<Session>(const Settings&)>;

const std::map<std::string, Opener>& Systems() {
  static const std::map<std::string, Opener> systems = {
      {"turnstile", Open<Turnstile>},
      {"set-del", Open<SetDel>},
      {"postgresql", Open<PostgreSql>},
      {"etcd", Open<Etcd>},
  };
  return systems;
}

// --- The run ------------------------------------------------------------------------------------

class Random {
 public:
  explicit Random(uint64_t seed) : numbers_(seed) {}

  Lock NextLock() {
    constexpr uint64_t kElevenDigits = 100000000000;
    Lock lock{.number = numbers_() % kElevenDigits, .key = {}, .owner = {}};
    const std::string digits = std::to_string(lock.number);
    lock.key = "lock:" + std::string(11 - digits.size(), '0') + digits;
    for (int word = 0; word < 2; ++word) {
      uint64_t bits = numbers_();
      for (int i = 0; i < 16; ++i, bits >>= 4) lock.owner += "0123456789abcdef"[bits & 15];
    }
    return lock;
  }

 private:
  std::mt19937_64 numbers_;
};

// A client and the pair that it is at.
class Client {
 public:
  explicit Client(std::unique_ptr<Session> session) : session_(std::move(session)) {}

  int fd() { return session_->connection().fd(); }

  void Begin(Lock lock) {
    lock_ = std::move(lock);
    acquired_ = false;
    began_ = Clock::now();
    session_->connection().Send(session_->Acquire(lock_));
  }

  // Takes what has come. How long the pair took, if that was its end.
  std::optional<Clock::duration> Continue() {
    Connection& connection = session_->connection();
    connection.Receive();
    const std::optional<size_t> size = acquired_ ? session_->CheckReleased(connection.received())
                                                 : session_->CheckAcquired(connection.received());
    if (!size.has_value()) return std::nullopt;
    connection.Take(*size);
    if (acquired_) return Clock::now() - began_;
    acquired_ = true;
    connection.Send(session_->Release(lock_));
    return std::nullopt;
  }

 private:
  std::unique_ptr<Session> session_;
  Lock lock_{};
  bool acquired_ = false;
  Clock::time_point began_;
};

double Percentile(std::vector<double>& values, double part) {
  const auto index = static_cast<size_t>(part * static_cast<double>(values.size() - 1));
  const auto at = values.begin() + static_cast<std::ptrdiff_t>(index);
  std::nth_element(values.begin(), at, values.end());
  return *at;
}

int Run(const Settings& settings) {
  const auto system = Systems().find(settings.system);
  if (system == Systems().end()) Fail("no system " + settings.system);
  Random random(settings.seed);
  const int epoll = epoll_create1(EPOLL_CLOEXEC);
  std::vector<Client> clients;
  for (long i = 0; i < settings.clients; ++i) {
    clients.emplace_back(system->second(settings));
    epoll_event event{.events = EPOLLIN, .data = {.u64 = static_cast<uint64_t>(i)}};
    if (epoll_ctl(epoll, EPOLL_CTL_ADD, clients.back().fd(), &event) != 0) Fail("epoll");
  }

  const auto duration = [](Seconds seconds) {
    return std::chrono::duration_cast<Clock::duration>(seconds);
  };
  const Clock::time_point begin = Clock::now() + duration(kWarmUp);
  const Clock::time_point end = begin + duration(Seconds{settings.seconds});
  std::vector<double> took_ms;
  for (Client& client : clients) client.Begin(random.NextLock());
  std::array<epoll_event, 64> events;
  for (size_t active = clients.size(); active > 0;) {
    const int count =
        epoll_wait(epoll, events.data(), static_cast<int>(events.size()), kPatienceMs);
    if (count == 0) Fail("no reply");
    if (count < 0 && errno != EINTR) Fail("epoll");
    for (int i = 0; i < count; ++i) {
      Client& client = clients[events[static_cast<size_t>(i)].data.u64];
      const std::optional<Clock::duration> took = client.Continue();
      if (!took.has_value()) continue;
      const Clock::time_point now = Clock::now();
      if (now >= begin && now < end) {
        took_ms.push_back(std::chrono::duration<double, std::milli>(*took).count());
      }
      if (now < end) {
        client.Begin(random.NextLock());
      } else {
        --active;
      }
    }
  }
  close(epoll);
  if (took_ms.empty()) Fail("no pair was done in time");
  std::printf("{\"pairs\": %zu, \"seconds\": %g, \"p50_ms\": %.4f, \"p99_ms\": %.4f}\n",
              took_ms.size(), settings.seconds, Percentile(took_ms, 0.5),
              Percentile(took_ms, 0.99));
  return 0;
}

double Number(const std::string& text, const std::string& what) {
  char* end = nullptr;
  const double number = std::strtod(text.c_str(), &end);
  if (text.empty() || *end != '\0' || !(number > 0)) Fail(what + " needs a number above 0");
  return number;
}

Settings Parse(int argc, char** argv) {
  Settings settings;
  for (int i = 1; i < argc; i += 2) {
    const std::string option = argv[i];
    const std::string value = i + 1 < argc ? argv[i + 1] : "";
    if (option == "--system") {
      settings.system = value;
    } else if (option == "--port") {
      settings.port = static_cast<int>(Number(value, option));
    } else if (option == "--clients") {
      settings.clients = static_cast<long>(Number(value, option));
    } else if (option == "--seconds") {
      settings.seconds = Number(value, option);
    } else if (option == "--seed") {
      settings.seed = static_cast<uint64_t>(Number(value, option));
    } else if (option == "--password-file") {
      std::ifstream file(value);
      if (!std::getline(file, settings.password)) Fail("no password in " + value);
    } else {
      Fail("no option " + option);
    }
  }
  return settings;
}

}  // namespace

int main(int argc, char** argv) { return Run(Parse(argc, argv)); }
