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

constexpr uint16_t kLimit = 2;

std::string OwnerName(uint32_t owner) { return "o" + std::to_string(owner); }

std::string_view FirstWord(std::string_view text) { return text.substr(0, text.find(' ')); }

// What a server may answer while it is being attacked. Anything else is a violation.
bool IsExpected(std::string_view word) {
  static const std::set<std::string_view> kExpected = {
      "UNBLOCKED", "NOREPLICAS",  "MISCONF", "READONLY", "OOM",  "LOADING",  "MASTERDOWN",
      "TRYAGAIN",  "CLUSTERDOWN", "MOVED",   "ASK",      "BUSY", "DEADLOCK", "WAITLIMIT"};
  return kExpected.contains(word);
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
  Peer(Driver& driver, uint64_t seed, bool half) : driver_(driver), half_(half), random_(seed) {}
  virtual ~Peer() { Close(); }
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  Time wake() const { return wake_; }

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
    address.sin_port = htons(static_cast<uint16_t>(at_.port));
    inet_pton(AF_INET, at_.host.c_str(), &address.sin_addr);
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

// --- A client with work to do -------------------------------------------------------------------

class Driver::Worker : public Peer {
 public:
  using Peer::Peer;

  bool idle() const { return pending_.empty(); }

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
  };

  void Act(Time now) override {
    if (!pending_.empty()) {
      if (now >= give_up_) {
        Lose();
      } else if (dies_at_ != 0 && now >= dies_at_) {
        Die();
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
    if (hold.sharing == Sharing::kExclusive && OneIn(10)) hold.floor = Above(last_token_);
    hold_ = std::move(hold);
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

  void Ask() {
    Command command = Named("LOCK.ACQUIRE");
    const auto option = [&](const char* name, int64_t value) {
      command.insert(command.end(), {name, std::to_string(value)});
    };
    option("PX", hold_->lease / kMillisecond);
    if (hold_->wait > 0) option("WAIT", hold_->wait / kMillisecond);
    if (hold_->linger > 0) option("LINGER", hold_->linger / kMillisecond);
    if (hold_->sharing == Sharing::kShared) command.emplace_back("SHARED");
    if (hold_->sharing == Sharing::kLimit) option("LIMIT", kLimit);
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
    ++hold_->attempts;
    Request(command, op, hold_->locks);
    if (OneIn(100)) wake_ = dies_at_ = Now() + Between(0, hold_->wait);
  }

  void AskAgain() {
    const bool reads_and_writes = driver_.workload_.sharing && hold_->locks[0] % 6 == 3;
    if (reads_and_writes && !hold_->reentrant && OneIn(2)) {
      ToggleSharing();
      hold_->changing = true;
    } else if (hold_->sharing == Sharing::kExclusive && OneIn(3)) {
      hold_->floor = Above(hold_->token);
    }
    Ask();
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
    const bool in_script = op.wait == 0 && op.verb != Verb::kFence && !binds && OneIn(12);
    in_transaction_ = op.wait == 0 && OneIn(12);
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
    const Time now = Now();
    const std::lock_guard guard(driver_.mutex_);
    ++driver_.traffic_.requests;
    for (Operation& op : pending_) {
      op.answer = answer;
      op.answered = now;
      if (token != 0) op.token = token;
      driver_.history_.operations.push_back(op);
    }
    pending_.clear();
  }

  void OnReply(const redisReply& reply) override {
    if (pending_.empty()) return;
    const Time now = Now();
    const Verb verb = pending_[0].verb;
    const bool stranger = pending_[0].stranger;
    wake_ = now;
    if (reply.type == REDIS_REPLY_ERROR) return OnError(TextOf(reply), verb);
    if (reply.type == REDIS_REPLY_NIL) {
      Answered(Answer::kNull);
      if (verb == Verb::kAcquire) Refused();
      wake_ = now + Between(0, 2) * kMillisecond;
    } else if (reply.type != REDIS_REPLY_INTEGER) {
      Unexpected("a reply of another type");
      Answered(Answer::kError);
    } else if (verb == Verb::kAcquire) {
      Answered(Answer::kToken, reply.integer);
      const bool once_more = hold_->reentrant && hold_->token != 0;
      if (once_more) Count(&Traffic::reentries);
      if (hold_->changing) {
        Count(hold_->sharing == Sharing::kShared ? &Traffic::downgrades : &Traffic::upgrades);
      }
      if (hold_->floor == reply.integer) Count(&Traffic::floors);
      hold_->changing = false;
      hold_->releases = once_more ? hold_->releases + 1 : 1;
      last_token_ = std::max<int64_t>(last_token_, reply.integer);
      if (hold_->token == 0) {
        hold_->deeds = static_cast<int>(Below(5));
        if (OneIn(20)) hold_->deeds = 20;
      }
      hold_->token = reply.integer;
    } else if (verb == Verb::kFence) {
      // With THEN it is the result of the guarded INCR, which is not 0 either.
      Answered(reply.integer != 0 ? Answer::kYes : Answer::kNo);
    } else {
      const auto count = static_cast<uint64_t>(reply.integer);
      // Of several some: nobody knows which.
      Answered(count == pending_.size() ? Answer::kYes : count == 0 ? Answer::kNo : Answer::kLost);
      if (verb == Verb::kRelease && !stranger && (--hold_->releases <= 0 || count == 0)) {
        hold_.reset();
      }
    }
    EndExcursion();
  }

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
    if (refused || (!IsExpected(word) && !holds_some && !floor_refused)) Unexpected(error);
    std::vector<Operation> refused_ones = pending_;
    Answered(MayHaveBeenGranted(error) ? Answer::kLost : Answer::kError);
    if (Redirect(error)) {
      if (asks_elsewhere()) return RepeatElsewhere(std::move(refused_ones));
      if (hold_ && verb == Verb::kAcquire && hold_->token == 0) --hold_->attempts;
      if (hold_) TakeBackChange();
      return;
    }
    if (floor_refused) hold_->floor = 0;
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
    wake_ = now + kBeforeReconnecting;
    if (!hold_) return;
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

  std::optional<Hold> hold_;
  int64_t last_token_ = 0;
  std::vector<Operation> pending_;  // one for each lock of the request
  Command command_;
  bool in_transaction_ = false;
  Time give_up_ = 0;
  Time dies_at_ = 0;
};

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
    lock_ = static_cast<uint32_t>(Below(driver_.workload_.locks));
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
    if (kind == "limit" && holders->elements > kLimit) {
      Wrong("C1", "LOCK.INFO tells of more holders than the limit");
    }
    CheckDifferent(*holders, "owner", "LOCK.INFO tells of an owner that holds the lock twice");
    CheckDifferent(*line, "owner", "LOCK.INFO tells of an owner that stands in line twice");
    if (kind != "plain") {
      CheckDifferent(*holders, "token", "LOCK.INFO tells of two holders with one token");
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
    : workload_(workload), epoll_(epoll_create1(EPOLL_CLOEXEC)) {
  std::mt19937_64 seeds(seed);
  for (size_t i = 0; i < workload.workers; i++) {
    auto worker = std::make_unique<Worker>(*this, seeds(), i % 2 == 1);
    workers_.push_back(worker.get());
    peers_.push_back(std::move(worker));
  }
  for (const bool half : {false, true}) {
    peers_.push_back(std::make_unique<Prober>(*this, seeds(), half));
  }
  peers_.push_back(std::make_unique<Observer>(*this, seeds(), false));
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

void Driver::Go(const Address& address, const Address& half) {
  const std::lock_guard guard(mutex_);
  route_ = {address, half};
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
