#include "fault/driver.h"

#include <arpa/inet.h>
#include <hiredis/hiredis.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include "support/client.h"
#include "support/eventually.h"
#include "support/resp3.h"

namespace turnstile::fault {
namespace {

using testing::Command;
using testing::EncodeCommand;

// The probers succeed every few milliseconds; a longer gap counts as an outage.
constexpr Time kProbeEvery = 3 * kMillisecond;
constexpr Time kOutage = 20 * kMillisecond;
constexpr Time kObserveEvery = 7 * kMillisecond;
constexpr Time kBeforeReconnecting = 3 * kMillisecond;
// A client gives up so long after the time-out of its request.
constexpr Time kPatience = 3 * kSecond;
// The server has noticed by then that a connection was closed.
constexpr Time kCloseNoticed = 20 * kMillisecond;

// A client that only listens asks so often whether anybody is there.
constexpr Time kPingEvery = 40 * kMillisecond;
// Who wants to listen first gives up after this.
constexpr Time kListenWithin = 100 * kMillisecond;
// Where nobody may tell it of the outcome, a client does not wait for that for longer.
constexpr Time kPatienceInSilence = 500 * kMillisecond;

constexpr uint16_t kLimit = 3;

std::string OwnerName(uint32_t owner) { return "o" + std::to_string(owner); }
std::string TagOf(std::string_view owner_name) {
  return "a client's " + std::string(owner_name.substr(1));
}

std::string_view FirstWord(std::string_view text) { return text.substr(0, text.find(' ')); }

// What a server may answer while it is being attacked. Anything else is a violation.
bool IsExpected(std::string_view word) {
  static const std::set<std::string_view> kExpected = {
      "UNBLOCKED", "NOREPLICAS",  "MISCONF", "READONLY", "OOM",  "LOADING",  "MASTERDOWN",
      "TRYAGAIN",  "CLUSTERDOWN", "MOVED",   "ASK",      "BUSY", "DEADLOCK", "WAITLIMIT"};
  return kExpected.contains(word);
}

// Who has lost a right is told so. (Servers tell scripts in other words.)
bool IsDenied(std::string_view error) {
  return FirstWord(error) == "NOPERM" ||
         error.starts_with("ERR The user executing the script can") ||
         error.starts_with("ERR ACL failure in script");
}

// At a role change a grant may have been on its way.
bool MayHaveBeenGranted(std::string_view error) {
  return error.find("instance state changed") != std::string_view::npos;
}

std::string_view TextOf(const redisReply& reply) { return {reply.str, reply.len}; }

// The value of a field in a flat list of fields and values, or null.
const redisReply* FieldOf(const redisReply& map, std::string_view name) {
  if (map.type != REDIS_REPLY_ARRAY) return nullptr;
  for (size_t i = 0; i + 1 < map.elements; i += 2) {
    if (TextOf(*map.element[i]) == name) return map.element[i + 1];
  }
  return nullptr;
}

}  // namespace

Time Now() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// --- A connection that comes back ---------------------------------------------------------------

class Driver::Peer {
 public:
  Peer(Driver& driver, uint64_t seed, bool half, uint32_t database = 0)
      : driver_(driver), half_(half), database_(database), random_(seed) {}
  virtual ~Peer() { Close(); }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  Time wake() const { return wake_; }
  const Address& at() const { return at_; }
  bool connected() const { return fd_ >= 0; }

  void Turn(Time now) {
    if (generation_ != driver_.generation_) {
      generation_ = driver_.generation_;
      redirected_.reset();
      if (fd_ >= 0) Lose();
    }
    if (now >= wake_) Act(now);
  }

  void Handle(uint32_t events) {
    if (fd_ >= 0 && (events & EPOLLOUT) != 0) Flush();
    if (fd_ >= 0 && (events & (EPOLLIN | EPOLLERR | EPOLLHUP)) != 0) Receive();
  }

 protected:
  // It is time to do something.
  virtual void Act(Time now) = 0;
  virtual void OnReply(const redisReply& reply) = 0;
  // The connection is gone, with or without an answer outstanding.
  virtual void OnLost() = 0;
  // By what name it logs in; "": it does not.
  virtual std::string User() const { return ""; }
  // Where it connects to when it goes to `address`.
  virtual Address WayTo(const Address& address) const { return address; }

  bool half() const { return half_; }
  uint32_t database() const { return database_; }
  // (The first request of a connection has to wait until the server has accepted that.)
  bool direct() const { return driver_.workload_.direct && !by_half_ && accepted_; }
  bool by_half() const { return by_half_; }
  uint32_t server() const {
    return driver_.life_ * 65536U + static_cast<uint32_t>(at_.port & 0xffff);
  }

  // False: there is nowhere to go.
  bool Connect() {
    if (fd_ >= 0) return true;
    const Route route = driver_.CurrentRoute();
    by_half_ = half_ && route.half.port != 0;
    at_ = redirected_ ? *redirected_ : by_half_ ? route.half : route.address;
    if (at_.port == 0) return false;
    fd_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    const int one = 1;
    setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    const Address way = WayTo(at_);
    address.sin_port = htons(static_cast<uint16_t>(way.port));
    inet_pton(AF_INET, way.host.c_str(), &address.sin_addr);
    if (connect(fd_, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 &&
        errno != EINPROGRESS) {
      Close();
      return false;
    }
    reader_ = redisReaderCreate();
    epoll_event event{};
    event.events = EPOLLIN | EPOLLOUT;
    event.data.ptr = this;
    epoll_ctl(driver_.epoll_, EPOLL_CTL_ADD, fd_, &event);
    watches_output_ = true;
    accepted_ = false;
    alive_at_ = Now();
    if (const std::string user = User(); !user.empty()) Introduce({"AUTH", user, "any"});
    if (database_ != 0) Introduce({"SELECT", std::to_string(database_)});
    const std::lock_guard guard(driver_.mutex_);
    ++driver_.traffic_.connections;
    return true;
  }

  void Send(const Command& command, bool in_transaction = false) {
    asked_at_ = Now();
    if (in_transaction) {
      out_ += EncodeCommand({"MULTI"}) + EncodeCommand(command) + EncodeCommand({"EXEC"});
      answers_left_ = 3;
      return Flush();
    }
    if (ask_once_) {
      out_ += EncodeCommand({"ASKING"});
      ++skip_;
    }
    out_ += EncodeCommand(command);
    Flush();
  }

  void Close() {
    if (fd_ >= 0) close(fd_);
    if (reader_ != nullptr) redisReaderFree(reader_);
    fd_ = -1;
    reader_ = nullptr;
    out_.clear();
    skip_ = 0;
    answers_left_ = 0;
    refused_.reset();
    ask_once_ = false;
  }

  void Lose() { Lose(Now()); }
  // The server has ended the connection, as was heard elsewhere.
  void LearnOfEnd() {
    if (fd_ >= 0) Lose(alive_at_);
  }

  // When the connection was there for the last time, as far as this client can know.
  Time ended() const { return ended_; }

  // Whether the error sends the client elsewhere; then this connection is closed.
  bool Redirect(std::string_view error) {
    const std::string_view word = FirstWord(error);
    if (word != "MOVED" && word != "ASK") return false;
    const size_t space = error.rfind(' ');
    const size_t colon = error.rfind(':');
    if (space == std::string_view::npos || colon == std::string_view::npos || colon < space) {
      return false;
    }
    Address to{.host = std::string(error.substr(space + 1, colon - space - 1))};
    std::from_chars(error.data() + colon + 1, error.data() + error.size(), to.port);
    const bool once = word == "ASK";
    Close();
    redirected_ = to;
    if (once) {
      ask_once_ = Connect();
      redirected_.reset();
    }
    return true;
  }

  // From now on it goes there, until the route changes.
  void GoTo(const Address& address) {
    if (at_.host == address.host && at_.port == address.port) return;
    if (fd_ >= 0) Lose();
    redirected_ = address;
  }

  bool asks_elsewhere() const { return ask_once_; }

  // After a question that was asked elsewhere by way of exception.
  void EndExcursion() {
    if (ask_once_) Close();
  }

  uint64_t Below(uint64_t end) { return random_() % end; }
  bool OneIn(uint64_t n) { return Below(n) == 0; }
  Time Between(Time least, Time most) {
    return least + static_cast<Time>(Below(static_cast<uint64_t>(most - least + 1)));
  }

  Driver& driver_;
  Time wake_ = 0;

 private:
  // Says something before the first request, whatever the answer.
  void Introduce(const Command& command) {
    out_ += EncodeCommand(command);
    ++skip_;
  }

  // If the server has ended it, that was at any time since a request was sent that was answered:
  // the answer may have been read late.
  void Lose(Time last) {
    ended_ = last;
    Close();
    OnLost();
  }

  void Flush() {
    while (!out_.empty()) {
      const ssize_t size = send(fd_, out_.data(), out_.size(), MSG_NOSIGNAL);
      if (size <= 0) break;  // Not yet, or an error that reading will find too.
      out_.erase(0, static_cast<size_t>(size));
    }
    const bool watch = !out_.empty();
    if (watch == watches_output_) return;
    watches_output_ = watch;
    epoll_event event{};
    event.events = EPOLLIN | (watch ? static_cast<uint32_t>(EPOLLOUT) : 0U);
    event.data.ptr = this;
    epoll_ctl(driver_.epoll_, EPOLL_CTL_MOD, fd_, &event);
  }

  void Receive() {
    std::array<char, 16384> buffer;
    const ssize_t size = recv(fd_, buffer.data(), buffer.size(), 0);
    if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (size <= 0) return Lose(alive_at_);
    accepted_ = true;
    redisReaderFeed(reader_, buffer.data(), static_cast<size_t>(size));
    while (fd_ >= 0) {
      void* parsed = nullptr;
      if (redisReaderGetReply(reader_, &parsed) != REDIS_OK) return Lose();
      if (parsed == nullptr) return;
      OwnedReply reply(static_cast<redisReply*>(parsed));
      if (skip_ > 0) {
        --skip_;
      } else if (answers_left_ > 0) {
        OnReplyInTransaction(std::move(reply));
      } else {
        alive_at_ = asked_at_;
        OnReply(*reply);
      }
    }
  }

  struct FreeReply {
    void operator()(redisReply* reply) const { freeReplyObject(reply); }
  };
  using OwnedReply = std::unique_ptr<redisReply, FreeReply>;

  // The answers to MULTI, the command and EXEC: the command's own is among them.
  void OnReplyInTransaction(OwnedReply reply) {
    const bool is_error = reply->type == REDIS_REPLY_ERROR;
    if (--answers_left_ > 0) {
      if (is_error && !refused_) refused_ = std::move(reply);
      return;
    }
    alive_at_ = asked_at_;
    const OwnedReply refused = std::move(refused_);
    const bool carried_out = reply->type == REDIS_REPLY_ARRAY && reply->elements == 1;
    // What is refused as a whole says why.
    constexpr std::string_view kBecause = "EXECABORT Transaction discarded because of: ";
    if (is_error && TextOf(*reply).starts_with(kBecause)) {
      reply->len -= kBecause.size();
      std::memmove(reply->str, reply->str + kBecause.size(), reply->len + 1);
    }
    OnReply(refused ? *refused : carried_out ? *reply->element[0] : *reply);
  }

  const bool half_;
  const uint32_t database_;
  std::mt19937_64 random_;
  int fd_ = -1;
  redisReader* reader_ = nullptr;
  std::string out_;
  bool watches_output_ = false;
  Address at_;
  bool by_half_ = false;
  bool accepted_ = false;  // something has been received
  Time asked_at_ = 0;
  Time alive_at_ = 0;
  Time ended_ = 0;
  std::optional<Address> redirected_;
  bool ask_once_ = false;
  int skip_ = 0;          // answers to ASKING
  int answers_left_ = 0;  // of a transaction
  OwnedReply refused_;    // the first of them that is an error
  uint64_t generation_ = 0;
};

// --- Where a client listens ---------------------------------------------------------------------

class Driver::Subscriber : public Peer {
 public:
  Subscriber(Driver& driver, uint64_t seed, bool half, size_t number)
      : Peer(driver, seed, half),
        channel_(driver.workload_.prefix + "of client " + std::to_string(number)) {}

  void set_worker(Worker* worker) { worker_ = worker; }
  const std::string& channel() const { return channel_; }

  // Whether it listens at that server.
  bool IsAt(const Address& address) const {
    return subscribed_ && at().host == address.host && at().port == address.port;
  }
  void ListenAt(const Address& address) { GoTo(address); }
  // It comes back at once.
  void HangUp() {
    if (connected()) Lose();
  }
  // Whether messages come later than answers.
  bool IsHeldBack() const { return half() && driver_.CurrentRoute().listeners.port != 0; }
  // It comes back in a moment, by the same connection.
  void Unsubscribe();

 private:
  std::string User() const override { return driver_.workload_.user; }
  Address WayTo(const Address& address) const override {
    const Route route = driver_.CurrentRoute();
    return IsHeldBack() && address.port == route.address.port ? route.listeners : address;
  }

  void Act(Time now) override {
    wake_ = now + kPingEvery;
    if (!Connect()) {
      wake_ = now + kBeforeReconnecting;
    } else if (!asked_) {
      asked_ = true;
      heard_ = now;
      Send({driver_.workload_.sharded ? "SSUBSCRIBE" : "SUBSCRIBE", channel_});
    } else if (now - heard_ > kPatience) {
      Lose();
    } else if (subscribed_) {
      Send({"PING"});
    }
  }

  void OnReply(const redisReply& reply) override;
  void OnLost() override;

  const std::string channel_;
  Worker* worker_ = nullptr;
  bool asked_ = false;
  bool subscribed_ = false;
  Time heard_ = 0;
};

// --- A client with work to do -------------------------------------------------------------------

class Driver::Worker : public Peer {
 public:
  Worker(Driver& driver, uint64_t seed, bool half, uint32_t database, Subscriber* subscriber)
      : Peer(driver, seed, half, database), subscriber_(subscriber) {}

  bool idle() const { return pending_.empty() && awaited_.empty(); }

  void OnMessage(std::string_view text);
  void OnSubscriptionLost();

 private:
  struct Hold {
    uint32_t owner = 0;
    std::vector<uint32_t> locks;
    Sharing sharing = Sharing::kExclusive;
    Time lease = 0;
    Time wait = 0;
    Time linger = 0;
    bool session = false;
    bool reentrant = false;
    int64_t floor = 0;
    int64_t token = 0;  // 0: asked for, not obtained
    int attempts = 0;
    int releases = 0;       // that are needed, as far as it knows
    int deeds = 0;          // still to be done
    bool changing = false;  // it is asked for in the other mode
    uint16_t weight = 1;
    bool other_weight = false;  // it was asked for by another one than it has, perhaps
    uint16_t max_line = 0;
    Time max_hold = 0;
    bool tagged = false;
    bool told = false;     // of a hold, ever
    std::string id;        // by which it is notified; none: it blocks
    std::string bound;     // the id that the hold is bound to
    Time asked_since = 0;  // by the present id, without an outcome
    int asks = 0;          // by it
    Time listens_by = 0;   // it gives up to listen first
    bool cancelled = false;
  };

  std::string User() const override { return driver_.workload_.user; }

  void Act(Time now) override {
    if (!pending_.empty()) {
      if (now >= give_up_) {
        Lose();
      } else if (dies_at_ != 0 && now >= dies_at_) {
        Die();
      }
      return;
    }
    if (!awaited_.empty()) {
      if (driver_.quiet_ && !hold_->cancelled && Connect()) {
        LeaveLine();
      } else if (driver_.quiet_ || now >= outcome_by_) {
        LoseAwaited();
        if (hold_->cancelled) Forget();
        wake_ = now;
      } else if (acts_in_line_at_ != 0 && now >= acts_in_line_at_) {
        ActInLine(now);
      }
      return;
    }
    if (driver_.quiet_) {
      Forget();
      wake_ = now + kMillisecond;
      return;
    }
    if (!Connect()) {
      wake_ = now + kBeforeReconnecting;
      return;
    }
    if (!hold_) Begin();
    if (hold_->token == 0) {
      Ask();
    } else if (hold_->deeds > 0) {
      --hold_->deeds;
      DoSomething(now);
    } else {
      Leave(now);
    }
  }

  void Begin() {
    const Workload& workload = driver_.workload_;
    Hold hold{.owner = ++driver_.owners_};
    const auto first =
        static_cast<uint32_t>(Below(OneIn(2) ? std::min(workload.locks, 6U) : workload.locks));
    hold.locks = {first};
    // Each lock is of a kind: of six, three are exclusive, one is for readers and writers, one has
    // a limit, one is exclusive and mostly taken together with others.
    const uint32_t kind = first % 6;
    if (workload.sharing && kind == 3) {
      hold.sharing = OneIn(4) ? Sharing::kExclusive : Sharing::kShared;
    } else if (workload.sharing && kind == 4) {
      hold.sharing = Sharing::kLimit;
    } else if (workload.several && kind == 5) {
      for (uint32_t lock = 1; lock < std::min(workload.locks, 3U); lock++) {
        if (OneIn(2)) hold.locks.push_back(lock);
      }
    }
    hold.lease = OneIn(4) ? Between(5, 25) * kMillisecond
                          : Between(workload.longest_lease / 4, workload.longest_lease);
    hold.lease -= hold.lease % kMillisecond;
    if (!OneIn(4)) {
      hold.wait = OneIn(3) ? Between(1, 30) * kMillisecond
                           : Between(workload.longest_wait / 10, workload.longest_wait);
      hold.wait -= hold.wait % kMillisecond;
    }
    if (OneIn(10)) hold.linger = Between(1, workload.longest_linger / kMillisecond) * kMillisecond;
    hold.session = workload.sessions && OneIn(5);
    hold.reentrant = hold.locks.size() == 1 && hold.sharing != Sharing::kLimit && OneIn(6);
    if (hold.sharing != Sharing::kLimit && OneIn(10)) hold.floor = Above(last_token_);
    if (hold.sharing == Sharing::kLimit && OneIn(2)) {
      hold.weight = static_cast<uint16_t>(Between(1, kLimit));
    }
    if (hold.wait > 0 && OneIn(5)) hold.max_line = static_cast<uint16_t>(Between(1, 6));
    if (OneIn(5)) hold.max_hold = hold.lease + Between(0, 60) * kMillisecond;
    hold.tagged = OneIn(3);
    for (uint32_t& lock : hold.locks) lock += database() * workload.locks;
    hold_ = std::move(hold);
    if (subscriber_ != nullptr && OneIn(2)) UseNewId();
  }

  // One that nobody can guess.
  void UseNewId() {
    hold_->id = OwnerName(hold_->owner) + ":" + std::to_string(Below(uint64_t{1} << 62));
    hold_->asked_since = 0;
    hold_->asks = 0;
  }

  // Somewhat above the token and above what the clock would give. The server may refuse it.
  int64_t Above(int64_t token) {
    using std::chrono::microseconds;
    const int64_t wall = std::chrono::duration_cast<microseconds>(
                             std::chrono::system_clock::now().time_since_epoch())
                             .count();
    return std::max(token + Between(1, 3), wall + Between(0, 20 * kMillisecond));
  }

  Command Named(const char* command) const {
    return {command, driver_.LockName(hold_->locks[0]), OwnerName(hold_->owner)};
  }

  void AddOthers(Command& command) const {
    if (hold_->locks.size() == 1) return;
    command.insert(command.end(), {"ALSO", std::to_string(hold_->locks.size() - 1)});
    for (size_t i = 1; i < hold_->locks.size(); i++) {
      command.push_back(driver_.LockName(hold_->locks[i]));
    }
  }

  // Who is to be notified listens first, at the same server.
  bool Listens() {
    if (hold_->id.empty() || subscriber_->IsAt(at())) return true;
    const Time now = Now();
    if (hold_->listens_by == 0) hold_->listens_by = now + kListenWithin;
    if (now >= hold_->listens_by) {
      hold_->id.clear();
      return true;
    }
    subscriber_->ListenAt(at());
    wake_ = now + kMillisecond;
    return false;
  }

  void Ask() {
    // Messages of earlier calls by the same id may be on their way.
    const int most = hold_->bound == hold_->id ? 1 : 0;
    if (!hold_->id.empty() && hold_->asked_since == 0 && hold_->asks > most) UseNewId();
    if (!Listens()) return;
    Command command = Named("LOCK.ACQUIRE");
    const auto option = [&](const char* name, int64_t value) {
      command.insert(command.end(), {name, std::to_string(value)});
    };
    option("PX", hold_->lease / kMillisecond);
    if (hold_->wait > 0) option("WAIT", hold_->wait / kMillisecond);
    if (hold_->linger > 0) option("LINGER", hold_->linger / kMillisecond);
    if (hold_->sharing == Sharing::kShared) command.emplace_back("SHARED");
    if (hold_->sharing == Sharing::kLimit) option("LIMIT", kLimit);
    if (hold_->weight > 1) option("WEIGHT", hold_->weight);
    if (hold_->wait > 0 && hold_->max_line > 0) option("MAXLINE", hold_->max_line);
    const Time max_hold = hold_->max_hold == 0 ? 0 : std::max(hold_->max_hold, hold_->lease);
    if (max_hold > 0) option("MAXHOLD", max_hold / kMillisecond);
    if (hold_->tagged) command.insert(command.end(), {"TAG", TagOf(OwnerName(hold_->owner))});
    if (!hold_->id.empty()) {
      command.insert(command.end(), {"NOTIFY", subscriber_->channel(), hold_->id});
    }
    if (hold_->session) command.emplace_back("SESSION");
    if (hold_->reentrant) command.emplace_back("REENTRANT");
    if (hold_->floor > 0) option("FLOOR", hold_->floor);
    AddOthers(command);
    Operation op = Prepared(Verb::kAcquire);
    op.retry = hold_->attempts > 0;
    op.reentrant = hold_->reentrant;
    op.session = hold_->session;
    op.floor = hold_->floor;
    op.wait = hold_->wait;
    op.linger = hold_->linger;
    op.lease = hold_->lease;
    op.max_line = hold_->max_line;
    op.max_hold = max_hold;
    op.notified = !hold_->id.empty();
    op.bound = op.notified && hold_->bound == hold_->id;
    if (op.notified && subscriber_->IsHeldBack()) op.direct = false;
    if (op.notified && hold_->asked_since == 0) hold_->asked_since = Now();
    if (op.notified) ++hold_->asks;
    hold_->listens_by = 0;
    ++hold_->attempts;
    Request(command, op, hold_->locks);
    if (OneIn(100)) wake_ = dies_at_ = Now() + Between(0, hold_->wait);
  }

  void AskAgain() {
    const uint32_t kind = hold_->locks[0] % driver_.workload_.locks % 6;
    const bool reads_and_writes = driver_.workload_.sharing && kind == 3;
    if (reads_and_writes && OneIn(2)) {
      ToggleSharing();
      hold_->changing = true;
    } else if (hold_->sharing == Sharing::kShared && OneIn(3)) {
      NameGivenToken();
    } else if (hold_->sharing == Sharing::kExclusive && OneIn(3)) {
      hold_->floor = Above(hold_->token);
    } else if (hold_->sharing == Sharing::kLimit && OneIn(3)) {
      hold_->weight = static_cast<uint16_t>(hold_->weight % kLimit + 1);
      hold_->other_weight = true;
    }
    if (OneIn(4)) hold_->max_hold = hold_->lease + Between(0, 30) * kMillisecond;
    // By the channel and id of the hold, by another id, or by none.
    if (hold_->changing || OneIn(3)) hold_->id.clear();
    if (hold_->id.empty() && subscriber_ != nullptr && OneIn(2)) UseNewId();
    Ask();
  }

  // Beside other holders it may name only a token that was given, and that nobody else names:
  // another one may be theirs.
  void NameGivenToken() {
    const GivenToken given = std::exchange(driver_.given_, {});
    if (given.lock != hold_->locks[0] && given.token > hold_->token) hold_->floor = given.token;
  }

  void ToggleSharing() {
    hold_->sharing = hold_->sharing == Sharing::kShared ? Sharing::kExclusive : Sharing::kShared;
    hold_->floor = 0;
  }

  void DoSomething(Time now) {
    const uint64_t dice = Below(100);
    if (dice < 25) {
      Command command = Named("LOCK.TOUCH");
      hold_->lease =
          OneIn(2) ? driver_.workload_.longest_lease : std::max(5 * kMillisecond, hold_->lease / 2);
      hold_->lease -= hold_->lease % kMillisecond;
      command.insert(command.end(), {"PX", std::to_string(hold_->lease / kMillisecond)});
      AddOthers(command);
      Operation op = Prepared(Verb::kTouch);
      op.lease = hold_->lease;
      Request(command, op, hold_->locks);
    } else if (dice < 55) {
      const std::string key = driver_.LockName(hold_->locks[0]);
      Command command = {"LOCK.FENCE", key, std::to_string(hold_->token)};
      if (OneIn(2)) command.insert(command.end(), {"THEN", "INCR", key + ":counter"});
      Request(command, Prepared(Verb::kFence), {hold_->locks[0]});
    } else if (dice < 75) {
      Operation op = Prepared(Verb::kWrite);
      op.sent = op.answered = now;
      RecordForEach(op);
    } else if (dice < 81) {
      AskAgain();
    } else if (dice < 84) {
      Operation op = Prepared(Verb::kRelease);
      op.stranger = true;
      op.owner = ++driver_.owners_;
      Request({"LOCK.RELEASE", driver_.LockName(hold_->locks[0]), OwnerName(op.owner)}, op,
              {hold_->locks[0]});
    } else if (dice < 98) {
      wake_ = now + Between(0, 3) * kMillisecond;
    } else if (dice < 99) {
      wake_ = now + hold_->lease + Between(1, 60) * kMillisecond;
      hold_->deeds = 3;
      Count(&Traffic::pauses);
    } else {
      Die();
    }
  }

  void Leave(Time now) {
    if (OneIn(40)) {  // The lease will end it.
      Forget();
      wake_ = now + kMillisecond;
      return;
    }
    Command command = Named("LOCK.RELEASE");
    AddOthers(command);
    Request(command, Prepared(Verb::kRelease), hold_->locks);
  }

  // Leaves what it holds to itself. The lease ends that, or sooner the end of this connection.
  void Forget() {
    LoseAwaited();
    if (hold_ && hold_->session && hold_->token != 0) RecordClose(Answer::kLost, Now());
    hold_.reset();
  }

  void RecordClose(Answer answer, Time sent) {
    Operation op = Prepared(Verb::kClose);
    op.sent = sent;
    op.answered = Now() + kCloseNoticed;
    op.answer = answer;
    RecordForEach(op);
  }

  void Die() {
    Count(&Traffic::deaths);
    Lose();
    hold_.reset();
  }

  Operation Prepared(Verb verb) const {
    Operation op;
    op.verb = verb;
    op.owner = hold_->owner;
    op.sharing = hold_->sharing;
    op.limit = kLimit;
    op.weight = hold_->weight;
    op.several = hold_->locks.size() > 1;
    op.direct = direct();
    op.server = server();
    if (verb == Verb::kFence || verb == Verb::kWrite) op.token = hold_->token;
    return op;
  }

  void Request(const Command& command, Operation op, const std::vector<uint32_t>& locks) {
    op.sent = Now();
    for (const uint32_t lock : locks) {
      op.lock = lock;
      pending_.push_back(op);
    }
    give_up_ = op.sent + op.wait + kPatience;
    wake_ = give_up_;
    dies_at_ = 0;
    command_ = command;
    // In scripts and transactions a wait would be one try.
    // (Inside a script there is no connection that a hold could be bound to.)
    const bool binds = op.verb == Verb::kAcquire && hold_->session;
    // A request that is to be notified waits there too.
    const bool blocks = op.wait > 0 && !op.notified;
    const bool in_script = !blocks && op.verb != Verb::kFence && !binds && OneIn(12);
    in_transaction_ = !blocks && unread_ == 0 && OneIn(12);
    if (in_script) Count(&Traffic::scripts);
    if (in_transaction_) Count(&Traffic::transactions);
    Send(in_script ? InScript(command, locks) : command, in_transaction_);
  }

  Command InScript(const Command& command, const std::vector<uint32_t>& locks) const {
    Command script = {"EVAL", "return redis.pcall(unpack(ARGV))", std::to_string(locks.size())};
    for (const uint32_t lock : locks) script.push_back(driver_.LockName(lock));
    script.insert(script.end(), command.begin(), command.end());
    return script;
  }

  // ASK is about this request and no other one, and it is not for later.
  void RepeatElsewhere(std::vector<Operation> refused) {
    pending_ = std::move(refused);
    for (Operation& op : pending_) {
      op.sent = Now();
      op.server = server();
      op.direct = direct();
    }
    give_up_ = pending_[0].sent + pending_[0].wait + kPatience;
    wake_ = give_up_;
    in_transaction_ = false;
    Send(command_);
  }

  void RecordForEach(Operation op) {
    const std::lock_guard guard(driver_.mutex_);
    for (const uint32_t lock : hold_->locks) {
      op.lock = lock;
      driver_.history_.operations.push_back(op);
    }
  }

  void Count(uint64_t Traffic::*what) {
    const std::lock_guard guard(driver_.mutex_);
    ++(driver_.traffic_.*what);
  }

  void Answered(Answer answer, int64_t token = 0) {
    Count(&Traffic::requests);
    Record(pending_, answer, token);
  }

  // Writes down how these operations ended, and forgets them.
  void Record(std::vector<Operation>& operations, Answer answer, int64_t token) {
    const Time now = Now();
    const std::lock_guard guard(driver_.mutex_);
    for (Operation& op : operations) {
      op.answer = answer;
      op.answered = now;
      if (token != 0) op.token = token;
      driver_.history_.operations.push_back(op);
    }
    operations.clear();
  }

  void OnReply(const redisReply& reply) override {
    if (unread_ > 0) {  // a message came before it
      --unread_;
      return;
    }
    if (pending_.empty()) return;
    const Time now = Now();
    const Verb verb = pending_[0].verb;
    const bool stranger = pending_[0].stranger;
    wake_ = now;
    if (reply.type == REDIS_REPLY_ERROR) return OnError(TextOf(reply), verb);
    if (reply.type == REDIS_REPLY_NIL) {
      if (verb == Verb::kAcquire && pending_[0].max_line > 0 && pending_[0].wait > 0 &&
          now - pending_[0].sent < pending_[0].wait) {
        Count(&Traffic::shed);
      }
      Answered(Answer::kNull);
      if (verb == Verb::kAcquire) Refused();
      wake_ = now + Between(0, 2) * kMillisecond;
    } else if (reply.type != REDIS_REPLY_INTEGER) {
      Unexpected("a reply of another type");
      Answered(Answer::kError);
    } else if (verb == Verb::kAcquire && reply.integer == 0 && pending_[0].notified &&
               pending_[0].wait > 0) {
      StandInLine(now);
    } else if (verb == Verb::kAcquire) {
      const Operation asked = pending_[0];
      Answered(Answer::kToken, reply.integer);
      TakeGrant(asked, reply.integer);
    } else if (verb == Verb::kFence) {
      // With THEN it is the result of the guarded INCR, which is not 0 either.
      Answered(reply.integer != 0 ? Answer::kYes : Answer::kNo);
    } else {
      const auto count = static_cast<uint64_t>(reply.integer);
      // Of several some: nobody knows which.
      const bool all = count == pending_.size();
      Answered(all ? Answer::kYes : count == 0 ? Answer::kNo : Answer::kLost);
      if (verb == Verb::kTouch && std::exchange(confirming_, false)) {
        if (all) {
          Count(&Traffic::confirmed);
        } else {
          hold_->deeds = 0;  // it releases what it may have
        }
      }
      if (verb == Verb::kRelease && !stranger && !awaited_.empty()) {
        wake_ = outcome_by_;  // what it waited for ends with an error
      } else if (verb == Verb::kRelease && !stranger && (--hold_->releases <= 0 || count == 0)) {
        hold_.reset();
      }
    }
    EndExcursion();
  }

  void TakeGrant(const Operation& asked, int64_t token) {
    const bool once_more = hold_->reentrant && hold_->token != 0 && !asked.bound;
    if (once_more) Count(&Traffic::reentries);
    if (hold_->changing) {
      Count(hold_->sharing == Sharing::kShared ? &Traffic::downgrades : &Traffic::upgrades);
      if (once_more) Count(&Traffic::reentrant_changes);
    }
    if (hold_->floor == token) {
      Count(&Traffic::floors);
      if (hold_->sharing == Sharing::kShared) Count(&Traffic::reader_floors);
    } else if (hold_->sharing == Sharing::kExclusive && hold_->locks.size() == 1) {
      driver_.given_ = {asked.lock, token};
    }
    if (asked.weight > 1) Count(&Traffic::heavy);
    if (asked.max_hold > 0) Count(&Traffic::capped);
    if (hold_->tagged) Count(&Traffic::tagged);
    hold_->changing = false;
    if (once_more) {
      ++hold_->releases;
    } else if (!asked.bound || hold_->releases == 0) {
      hold_->releases = 1;
    }
    last_token_ = std::max(last_token_, token);
    if (hold_->token == 0) {
      hold_->deeds = static_cast<int>(Below(5));
      if (OneIn(20)) hold_->deeds = 20;
    }
    hold_->token = token;
    hold_->told = true;
    hold_->asked_since = 0;
    if (asked.notified) hold_->bound = hold_->id;
  }

  // The answer is that a message will tell.
  void StandInLine(Time now) {
    {
      const std::lock_guard guard(driver_.mutex_);
      ++driver_.traffic_.requests;
      ++driver_.traffic_.in_line;
    }
    awaited_ = std::exchange(pending_, {});
    for (Operation& op : awaited_) op.queued = now;
    const bool may_be_silent = !driver_.workload_.user.empty();
    outcome_by_ =
        awaited_[0].sent + awaited_[0].wait + (may_be_silent ? kPatienceInSilence : kPatience);
    wake_ = outcome_by_;
    acts_in_line_at_ = 0;
    if (OneIn(8)) wake_ = acts_in_line_at_ = now + Between(0, awaited_[0].wait);
    if (!subscriber_->IsAt(at())) {  // it was sent elsewhere, and does not listen there
      LoseAwaited();
      wake_ = now;
    }
    EndExcursion();
  }

  void ActInLine(Time now) {
    acts_in_line_at_ = 0;
    wake_ = outcome_by_;
    const uint64_t dice = Below(8);
    if (dice == 0) {
      subscriber_->HangUp();  // and so it hears nothing
    } else if (!Connect()) {
      wake_ = acts_in_line_at_ = now + kBeforeReconnecting;
    } else if (dice < 3) {
      LeaveLine();
    } else {  // in its own place, or in that of a call that blocks or has another id
      LoseAwaited();
      if (dice == 3) UseNewId();
      if (dice == 4) hold_->id.clear();
      Ask();
    }
  }

  void LeaveLine() {
    Count(&Traffic::left_the_line);
    hold_->cancelled = true;
    Command command = Named("LOCK.RELEASE");
    AddOthers(command);
    Request(command, Prepared(Verb::kRelease), hold_->locks);
  }

  // It will not hear any more what becomes of that, or does not want to.
  void LoseAwaited() {
    if (awaited_.empty()) return;
    Count(&Traffic::unheard);
    Record(awaited_, Answer::kLost, 0);
    if (hold_) hold_->changing = false;
  }

  void TakeOutcome(std::string_view kind, std::string_view rest, bool busy);
  void TakeLoss(std::string_view rest);
  void Confirm();

  // Who wanted to write and may not still reads.
  void Refused() {
    if (!hold_->changing || hold_->sharing == Sharing::kShared) return Forget();
    TakeBackChange();
  }

  void TakeBackChange() {
    if (!std::exchange(hold_->changing, false)) return;
    ToggleSharing();
  }

  void OnError(std::string_view error, Verb verb) {
    const std::string word(FirstWord(error));
    {
      const std::lock_guard guard(driver_.mutex_);
      ++driver_.traffic_.errors[word];
    }
    if (word == "FENCED" && verb == Verb::kFence) {
      Answered(Answer::kNo);
      EndExcursion();
      return;
    }
    // Who asks again for several locks may meanwhile hold only some of them.
    const bool holds_some = word == "ERR" && hold_ && hold_->locks.size() > 1 &&
                            hold_->attempts > 1 && verb == Verb::kAcquire;
    // Who frees memory is not refused for want of it. (To queue a command may be: that is the
    // server's rule.)
    const bool refused =
        word == "OOM" && (verb == Verb::kRelease || verb == Verb::kTouch) && !in_transaction_;
    const bool floor_refused =
        hold_ && hold_->floor > 0 && error.find("FLOOR is too far ahead") != std::string_view::npos;
    // Who has it by another weight is refused.
    const bool weight_refused =
        hold_ && hold_->other_weight && error.find("another weight") != std::string_view::npos;
    const bool denied = !driver_.workload_.user.empty() && IsDenied(error);
    const bool expected =
        IsExpected(word) || holds_some || floor_refused || weight_refused || denied;
    if (refused || !expected) Unexpected(error);
    confirming_ = false;
    std::vector<Operation> refused_ones = pending_;
    Answered(MayHaveBeenGranted(error) ? Answer::kLost : Answer::kError);
    if (Redirect(error)) {
      if (asks_elsewhere()) return RepeatElsewhere(std::move(refused_ones));
      if (hold_ && verb == Verb::kAcquire && hold_->token == 0) --hold_->attempts;
      if (hold_) TakeBackChange();
      return;
    }
    if (floor_refused) hold_->floor = 0;
    if (weight_refused) hold_->weight = static_cast<uint16_t>(1 + (hold_->weight + 1) % kLimit);
    EndExcursion();
    wake_ = Now() + Between(1, 10) * kMillisecond;
    if (holds_some || OneIn(2)) {
      Forget();
    } else if (hold_ && MayHaveBeenGranted(error)) {
      hold_->changing = false;
    } else if (hold_) {
      TakeBackChange();
    }
  }

  void Unexpected(std::string_view what) {
    driver_.Report(
        {"C8", "an answer that nobody expects: " + std::string(what), pending_[0].lock, Now(), {}});
  }

  void OnLost() override {
    const Time now = Now();
    const bool asked = !pending_.empty() && pending_[0].verb == Verb::kAcquire;
    if (!pending_.empty()) Answered(Answer::kLost);
    unread_ = 0;
    confirming_ = false;
    wake_ = now + kBeforeReconnecting;
    if (!hold_) return;
    // A wait by messages belongs to its owner, not to the connection.
    if (!awaited_.empty()) {
      if (hold_->token == 0 && !hold_->session) return;
      LoseAwaited();
    }
    hold_->changing = false;
    if (hold_->session && hold_->token != 0) {
      RecordClose(driver_.workload_.sessions_end && !by_half() ? Answer::kYes : Answer::kLost,
                  ended());
    }
    // A request that was lost may yet bind the hold to the connection that was lost.
    if (asked ? hold_->attempts > 4 || hold_->session || OneIn(4) : OneIn(2)) {
      hold_.reset();
    } else {
      Count(&Traffic::retries);
    }
  }

  Subscriber* const subscriber_;  // or null
  std::optional<Hold> hold_;
  int64_t last_token_ = 0;
  std::vector<Operation> awaited_;  // in line: messages tell what becomes of it
  Time outcome_by_ = 0;
  Time acts_in_line_at_ = 0;
  int unread_ = 0;                  // answers that say nothing any more
  bool confirming_ = false;         // it touches what a message told of
  std::vector<Operation> pending_;  // one for each lock of the request
  Command command_;
  bool in_transaction_ = false;
  Time give_up_ = 0;
  Time dies_at_ = 0;
};

// --- Messages -----------------------------------------------------------------------------------

void Driver::Subscriber::OnReply(const redisReply& reply) {
  heard_ = Now();
  if (reply.type == REDIS_REPLY_ERROR) {
    if (Redirect(TextOf(reply))) {
      wake_ = heard_;
      return OnLost();
    }
    return Lose();
  }
  if (reply.type != REDIS_REPLY_ARRAY || reply.elements < 2) return;
  const std::string_view what = TextOf(*reply.element[0]);
  if (what == "subscribe" || what == "ssubscribe") {
    subscribed_ = true;
    const std::lock_guard guard(driver_.mutex_);
    ++driver_.traffic_.subscriptions;
  } else if (what == "sunsubscribe") {  // the slot has gone
    Lose();
  } else if ((what == "message" || what == "smessage") && reply.elements == 3) {
    worker_->OnMessage(TextOf(*reply.element[2]));
  }
}

void Driver::Subscriber::Unsubscribe() {
  if (!subscribed_) return;
  Send({driver_.workload_.sharded ? "SUNSUBSCRIBE" : "UNSUBSCRIBE", channel_});
  asked_ = subscribed_ = false;
  wake_ = Now() + Between(0, 50) * kMillisecond;
  worker_->OnSubscriptionLost();
}

void Driver::Subscriber::OnLost() {
  asked_ = false;
  wake_ = Now() + kBeforeReconnecting;
  if (std::exchange(subscribed_, false)) worker_->OnSubscriptionLost();
}

// What may have been told meanwhile is asked for again.
void Driver::Worker::OnSubscriptionLost() {
  if (awaited_.empty()) return;
  LoseAwaited();
  if (!pending_.empty()) return;
  if (hold_->cancelled) Forget();
  wake_ = Now();
}

// The first word, which is taken off.
std::string_view TakeWord(std::string_view& text) {
  const std::string_view word = FirstWord(text);
  text.remove_prefix(std::min(word.size() + 1, text.size()));
  return word;
}

void Driver::Worker::OnMessage(std::string_view text) {
  Count(&Traffic::messages);
  const std::string_view id = TakeWord(text);
  if (!hold_ || id != hold_->id) return;
  const std::string_view kind = TakeWord(text);
  if (kind == "lost") return TakeLoss(text);
  // The message may come before the answer that says that it is in line.
  const bool asking =
      !pending_.empty() && pending_[0].verb == Verb::kAcquire && pending_[0].notified;
  if (awaited_.empty() && !asking) return;
  // It asked again for what it knew. (In line it may be told of a hold that a stranger brought
  // back.)
  const bool in_line = !awaited_.empty() && hold_->asked_since >= awaited_[0].sent - kMillisecond;
  if (kind == "granted" && !in_line && hold_->token != 0 &&
      FirstWord(text) == std::to_string(hold_->token)) {
    return;
  }
  if (asking) {
    LoseAwaited();
    awaited_ = std::exchange(pending_, {});
    ++unread_;
  }
  const bool busy = !pending_.empty();
  // Of a call that took over the place of another one it may be the other's message: then nobody
  // knows what becomes of this one. And a server that is not the one that was asked may publish
  // what it does not write.
  const bool takes_over = hold_->asked_since < awaited_[0].sent - kMillisecond;
  const bool elsewhere = !subscriber_->IsAt(at());
  if (takes_over || elsewhere) {
    std::vector<Operation> merged = awaited_;
    LoseAwaited();
    // Nor whether it is older than what it was told since, or than the end of its session.
    if (hold_->told || elsewhere || hold_->session) {
      if (busy) return;
      if (hold_->cancelled) return Forget();
      UseNewId();
      wake_ = Now();
      return;
    }
    awaited_ = std::move(merged);
    for (Operation& op : awaited_) {
      op.wait += op.sent - hold_->asked_since;
      op.sent = hold_->asked_since;
      op.direct = false;
      op.queued = 0;
    }
  }
  hold_->asked_since = 0;
  TakeOutcome(kind, text, busy);
}

// `busy`: something else that it asked is not answered yet.
void Driver::Worker::TakeOutcome(std::string_view kind, std::string_view rest, bool busy) {
  const Time now = Now();
  if (!busy) wake_ = now;
  const Operation asked = awaited_[0];
  if (kind == "granted") {
    Count(&Traffic::granted_by_message);
    const std::string_view word = TakeWord(rest);
    int64_t token = 0;
    std::from_chars(word.data(), word.data() + word.size(), token);
    if (token <= 0 || rest != driver_.LockName(asked.lock)) {
      driver_.Report({"C8", "a message that nobody expects: granted", asked.lock, now, {}});
    }
    Record(awaited_, Answer::kToken, token);
    TakeGrant(asked, token);
    if (busy) return;
    if (hold_->cancelled) {
      hold_->deeds = 0;  // it releases once more
    } else if (Connect()) {
      Confirm();
    }
    return;
  }
  if (kind == "timeout") {
    Record(awaited_, Answer::kNull, 0);
    if (busy) return;
    if (hold_->cancelled) return Forget();
    Refused();
    return;
  }
  const std::string code(FirstWord(rest));
  {
    const std::lock_guard guard(driver_.mutex_);
    ++driver_.traffic_.errors[code];
  }
  const bool denied = !driver_.workload_.user.empty() && IsDenied(rest);
  if (kind != "error" || !(IsExpected(code) || denied)) {
    driver_.Report(
        {"C8", "a message that nobody expects: " + std::string(rest), asked.lock, now, {}});
  }
  Record(awaited_, Answer::kError, 0);
  if (busy) return;
  if (hold_->cancelled || OneIn(2)) return Forget();
  TakeBackChange();
  wake_ = now + Between(1, 10) * kMillisecond;
}

// With the lease that it really wants, for all of its locks.
void Driver::Worker::Confirm() {
  Command command = Named("LOCK.TOUCH");
  hold_->lease = driver_.workload_.longest_lease;
  hold_->lease -= hold_->lease % kMillisecond;
  command.insert(command.end(), {"PX", std::to_string(hold_->lease / kMillisecond)});
  AddOthers(command);
  Operation op = Prepared(Verb::kTouch);
  op.lease = hold_->lease;
  Request(command, op, hold_->locks);
  confirming_ = true;
}

void Driver::Worker::TakeLoss(std::string_view rest) {
  Count(&Traffic::told_of_loss);
  const std::string_view word = TakeWord(rest);
  const std::string_view why = TakeWord(rest);
  int64_t token = 0;
  std::from_chars(word.data(), word.data() + word.size(), token);
  Operation op = Prepared(Verb::kLoss);
  op.answer = Answer::kNo;
  op.token = token;
  op.sent = op.answered = Now();
  for (const uint32_t lock : hold_->locks) {
    if (rest != driver_.LockName(lock)) continue;
    op.lock = lock;
    const std::lock_guard guard(driver_.mutex_);
    driver_.history_.operations.push_back(op);
  }
  if (token != hold_->token) return;
  if (why == "session") return LearnOfEnd();
  // Some go on, and are refused.
  if (idle() && !OneIn(3)) {
    hold_.reset();
    wake_ = Now();
  }
}

// --- Whether the servers serve ------------------------------------------------------------------

class Driver::Prober : public Peer {
 public:
  Prober(Driver& driver, uint64_t seed, bool half)
      : Peer(driver, seed, half),
        number_(half ? 1 : 0),
        lock_(driver.workload_.prefix + "probe" + std::to_string(number_)) {}

 private:
  void Act(Time now) override {
    wake_ = now + kProbeEvery;
    if (outstanding_) {
      if (now - sent_ > kPatience) Lose();
      return;
    }
    if (driver_.all_quiet_ || !Connect()) return;
    outstanding_ = true;
    sent_ = now;
    Send({"LOCK.ACQUIRE", lock_, "prober", "PX", "1000"});
    Send({"LOCK.RELEASE", lock_, "prober"});
  }

  void OnReply(const redisReply& reply) override {
    if (reply.type == REDIS_REPLY_ERROR && Redirect(TextOf(reply))) {
      wake_ = Now();
      return OnLost();
    }
    if (!granted_) {
      granted_ = reply.type == REDIS_REPLY_INTEGER && reply.integer != 0;
      return;
    }
    if (*granted_) driver_.Served(number_, Now());
    OnLost();
    EndExcursion();
  }

  void OnLost() override {
    outstanding_ = false;
    granted_.reset();
  }

  const size_t number_;
  const std::string lock_;
  bool outstanding_ = false;
  Time sent_ = 0;
  std::optional<bool> granted_;
};

// --- A look at the locks ------------------------------------------------------------------------

class Driver::Observer : public Peer {
 public:
  using Peer::Peer;

 private:
  void Act(Time now) override {
    wake_ = now + kObserveEvery;
    if (outstanding_) {
      if (now - sent_ > kPatience) Lose();
      return;
    }
    if (!Connect()) return;
    outstanding_ = true;
    sent_ = now;
    const uint32_t locks = driver_.workload_.locks;
    lock_ = database() * locks + static_cast<uint32_t>(Below(locks));
    Send({"LOCK.INFO", driver_.LockName(lock_)});
  }

  void OnReply(const redisReply& reply) override {
    outstanding_ = false;
    if (reply.type == REDIS_REPLY_ERROR) {
      Redirect(TextOf(reply));
      return;
    }
    {
      const std::lock_guard guard(driver_.mutex_);
      ++driver_.traffic_.infos;
    }
    EndExcursion();
    if (reply.type != REDIS_REPLY_ARRAY) return;
    const redisReply* mode = FieldOf(reply, "mode");
    const redisReply* holders = FieldOf(reply, "holders");
    const redisReply* line = FieldOf(reply, "waiters");
    if (mode == nullptr || holders == nullptr || line == nullptr) {
      return Wrong("C8", "LOCK.INFO lacks a field");
    }
    const std::string_view kind = TextOf(*mode);
    if (kind == "exclusive" && holders->elements > 1) {
      Wrong("C1", "LOCK.INFO tells of two exclusive holders");
    }
    if (kind == "limit" && WeightOf(*holders) > kLimit) {
      Wrong("C1", "LOCK.INFO tells of holders that weigh more than the limit");
    }
    CheckTags(*holders);
    CheckTags(*line);
    CheckDifferent(*holders, "owner", "LOCK.INFO tells of an owner that holds the lock twice");
    CheckDifferent(*line, "owner", "LOCK.INFO tells of an owner that stands in line twice");
    if (kind != "plain") {
      CheckDifferent(*holders, "token", "LOCK.INFO tells of two holders with one token");
    }
  }

  static int64_t WeightOf(const redisReply& holders) {
    int64_t weight = 0;
    for (size_t i = 0; i < holders.elements; i++) {
      const redisReply* value = FieldOf(*holders.element[i], "weight");
      weight += value == nullptr ? 0 : value->integer;
    }
    return weight;
  }

  // Each owner has one tag, or none.
  void CheckTags(const redisReply& maps) {
    for (size_t i = 0; i < maps.elements; i++) {
      const redisReply* tag = FieldOf(*maps.element[i], "tag");
      const redisReply* owner = FieldOf(*maps.element[i], "owner");
      if (tag == nullptr || owner == nullptr) return Wrong("C8", "LOCK.INFO lacks a field");
      if (tag->type == REDIS_REPLY_STRING && TextOf(*tag) != TagOf(TextOf(*owner))) {
        Wrong("C6", "LOCK.INFO tells of a tag that its owner never named");
      }
    }
  }

  void CheckDifferent(const redisReply& maps, std::string_view field, const char* what) {
    std::set<std::pair<std::string_view, int64_t>> seen;
    for (size_t i = 0; i < maps.elements; i++) {
      const redisReply* value = FieldOf(*maps.element[i], field);
      if (value == nullptr || !seen.emplace(TextOf(*value), value->integer).second) {
        return Wrong("C6", what);
      }
    }
  }

  void Wrong(const char* check, const char* what) {
    driver_.Report({check, what, lock_, Now(), {}});
  }

  void OnLost() override { outstanding_ = false; }

  bool outstanding_ = false;
  Time sent_ = 0;
  uint32_t lock_ = 0;
};

// --- The driver ---------------------------------------------------------------------------------

Driver::Driver(const Workload& workload, uint64_t seed)
    : workload_(workload), epoll_(epoll_create1(EPOLL_CLOEXEC)), random_(seed) {
  std::mt19937_64 seeds(seed);
  for (size_t i = 0; i < workload.workers; i++) {
    const bool half = i % 2 == 1;
    std::unique_ptr<Subscriber> subscriber;
    if (workload.notified && i % 4 < 2) {
      subscriber = std::make_unique<Subscriber>(*this, seeds(), half, i);
    }
    const uint32_t database = static_cast<uint32_t>(i / 4) % workload.databases;
    auto worker = std::make_unique<Worker>(*this, seeds(), half, database, subscriber.get());
    if (subscriber != nullptr) {
      subscriber->set_worker(worker.get());
      subscribers_.push_back(subscriber.get());
    }
    workers_.push_back(worker.get());
    peers_.push_back(std::move(worker));
    if (subscriber != nullptr) peers_.push_back(std::move(subscriber));
  }
  for (const bool half : {false, true}) {
    peers_.push_back(std::make_unique<Prober>(*this, seeds(), half));
  }
  for (uint32_t database = 0; database < workload.databases; database++) {
    peers_.push_back(std::make_unique<Observer>(*this, seeds(), false, database));
  }
  for (std::atomic<Time>& last : last_success_) last = Now();
  thread_ = std::thread([this] { Loop(); });
}

Driver::~Driver() {
  stopping_ = true;
  thread_.join();
  peers_.clear();
  close(epoll_);
}

void Driver::Loop() {
  std::array<epoll_event, 64> events;
  while (!stopping_) {
    const Time now = Now();
    Time next = now + 20 * kMillisecond;
    for (int left = unsubscribe_.exchange(0); left > 0 && !subscribers_.empty(); left--) {
      subscribers_[random_() % subscribers_.size()]->Unsubscribe();
    }
    for (const std::unique_ptr<Peer>& peer : peers_) {
      peer->Turn(now);
      next = std::min(next, peer->wake());
    }
    all_quiet_ = quiet_ && std::all_of(workers_.begin(), workers_.end(),
                                       [](const Worker* worker) { return worker->idle(); });
    const Time left = std::max(next - Now(), Time{0});
    const int count = epoll_wait(epoll_, events.data(), static_cast<int>(events.size()),
                                 static_cast<int>((left + kMillisecond - 1) / kMillisecond));
    for (int i = 0; i < count; i++) {
      const epoll_event& event = events.at(static_cast<size_t>(i));
      static_cast<Peer*>(event.data.ptr)->Handle(event.events);
    }
  }
}

Driver::Route Driver::CurrentRoute() const {
  const std::lock_guard guard(mutex_);
  return route_;
}

void Driver::Go(const Address& address, const Address& half, const Address& listeners) {
  const std::lock_guard guard(mutex_);
  route_ = {address, half, listeners};
  ++generation_;
}

void Driver::NewLife() { ++life_; }

void Driver::Note(Mark mark) {
  const std::lock_guard guard(mutex_);
  history_.marks.push_back(std::move(mark));
}

void Driver::Add(const History& history) {
  const std::lock_guard guard(mutex_);
  history_.operations.insert(history_.operations.end(), history.operations.begin(),
                             history.operations.end());
}

void Driver::Report(Violation violation) {
  const std::lock_guard guard(mutex_);
  violations_.push_back(std::move(violation));
}

void Driver::Served(size_t prober, Time now) {
  const Time last = last_success_.at(prober).exchange(now);
  if (now - last < kOutage) return;
  const std::lock_guard guard(mutex_);
  history_.marks.push_back({.begin = last, .end = now, .what = "nothing was granted"});
  traffic_.unavailable += now - last;
}

bool Driver::AwaitService(std::chrono::milliseconds within) {
  const Time since = Now();
  return testing::Eventually([&] { return last_success_[0] > since && last_success_[1] > since; },
                             within);
}

void Driver::Quiesce() {
  quiet_ = true;
  testing::Eventually([&] { return all_quiet_.load(); }, std::chrono::seconds{20});
}

History Driver::TakeHistory() {
  const Time now = Now();
  const std::lock_guard guard(mutex_);
  for (const std::atomic<Time>& last : last_success_) {
    if (now - last < kOutage) continue;
    history_.marks.push_back({.begin = last, .end = now, .what = "nothing was granted at the end"});
  }
  return std::exchange(history_, {});
}

std::vector<Violation> Driver::TakeViolations() {
  const std::lock_guard guard(mutex_);
  return std::exchange(violations_, {});
}

Traffic Driver::traffic() const {
  const std::lock_guard guard(mutex_);
  return traffic_;
}

}  // namespace turnstile::fault
