// SPDX-License-Identifier: BSD-3-Clause
// Copyright (c) 2026 The Turnstile authors
//
// A small client for the locks of the Turnstile module, over hiredis. One file, to copy. C++20.
//
//   turnstile::Client client("127.0.0.1", 6379);
//   turnstile::Lock lock(client, "table:12", {.lease = 10s, .wait = 5s});
//   lock.With([](turnstile::Hold& hold, std::stop_token lost) {
//     hold.Run({"SET", "table:12:guest", "alice"});  // written only while this hold has the lock
//   });
//
// While the work runs, a thread renews the lease at each third of it. When the hold is lost, `lost`
// is requested to stop and hold.Check() throws why. Hand hold.token() to every store outside that
// can refuse a token lower than one it has seen.
//
// hiredis does not keep SIGPIPE away: ignore it in main(), or a broken connection may end the
// program.

#ifndef TURNSTILE_H_
#define TURNSTILE_H_

#include <fcntl.h>
#include <hiredis/hiredis.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

namespace turnstile {

using Clock = std::chrono::steady_clock;  // which nobody sets
using std::chrono::milliseconds;

// --- Errors -----------------------------------------------------------------------------------

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

struct NotAcquired : Error {  // others hold the lock, or the wait ran out
  NotAcquired() : Error("others hold the lock") {}
};
struct Lost : Error {  // the hold is over, or we cannot know that it is not
  using Error::Error;
};
struct MaxHold : Error {  // held for the maximum time
  MaxHold() : Error("held for the maximum time") {}
};
struct Cancelled : Error {  // the caller stopped the wait
  Cancelled() : Error("cancelled") {}
};
struct ConnectionError : Error {  // nobody there, no answer in time, cut off
  using Error::Error;
};

struct ReplyError : Error {  // the server's own words
  using Error::Error;
};
struct Fenced : ReplyError {  // the token does not hold the lock, nothing was written
  using ReplyError::ReplyError;
};
struct Deadlock : ReplyError {  // waiting would close a cycle
  using ReplyError::ReplyError;
};
struct Superseded : ReplyError {  // the wait was ended from outside, or the server was demoted
  using ReplyError::ReplyError;
};
struct WaitLimit : ReplyError {  // too many wait on this server
  using ReplyError::ReplyError;
};
struct NotPrimary : ReplyError {  // this server is a replica
  using ReplyError::ReplyError;
};
struct Moved : ReplyError {  // the cluster keeps this lock elsewhere: look it up and ask again
  using ReplyError::ReplyError;
};

[[noreturn]] inline void ThrowReply(const std::string& text) {
  const std::string word = text.substr(0, text.find(' '));
  if (word == "FENCED") throw Fenced(text);
  if (word == "DEADLOCK") throw Deadlock(text);
  if (word == "UNBLOCKED") throw Superseded(text);
  if (word == "WAITLIMIT") throw WaitLimit(text);
  if (word == "READONLY") throw NotPrimary(text);
  if (word == "MOVED" || word == "ASK" || word == "TRYAGAIN" || word == "CLUSTERDOWN") {
    throw Moved(text);
  }
  throw ReplyError(text);
}

// --- Connections ------------------------------------------------------------------------------

using Command = std::vector<std::string>;

struct Reply {
  enum class Kind { kNull, kInteger, kText, kArray };
  Kind kind = Kind::kNull;
  long long integer = 0;
  std::string text = {};
  std::vector<Reply> elements = {};
};

struct Address {
  std::string host = "127.0.0.1";
  int port = 6379;
  std::string user = {};
  std::string password = {};
};

// Becomes readable when a stop is requested, for poll().
class StopPipe {
 public:
  explicit StopPipe(const std::stop_token& stop) {
    if (pipe(fds_.data()) != 0) throw Error("no file descriptors left");
    for (const int fd : fds_) fcntl(fd, F_SETFD, FD_CLOEXEC);
    on_stop_.emplace(stop, [fd = fds_[1]] { [[maybe_unused]] const auto n = write(fd, "", 1); });
  }
  ~StopPipe() {
    on_stop_.reset();
    for (const int fd : fds_) close(fd);
  }

  StopPipe(const StopPipe&) = delete;
  StopPipe& operator=(const StopPipe&) = delete;

  int fd() const { return fds_[0]; }

 private:
  std::array<int, 2> fds_ = {-1, -1};
  std::optional<std::stop_callback<std::function<void()>>> on_stop_;
};

// One connection of hiredis, for one thread at a time. Every call ends at its deadline; only
// looking up a host by its name, when connecting, takes as long as the system lets it.
class Connection {
 public:
  Connection(const Address& address, Clock::time_point deadline)
      : context_(redisConnectWithTimeout(address.host.c_str(), address.port, Until(deadline))) {
    if (!context_) throw ConnectionError("out of memory");
    if (context_->err != 0) Fail();
    if (address.password.empty()) return;
    Command login = {"AUTH", address.password};
    if (!address.user.empty()) login.insert(login.begin() + 1, address.user);
    Call(login, deadline);
  }

  Reply Call(const Command& command, Clock::time_point deadline) {
    Send(command, deadline);
    return Receive(deadline);
  }

  void Send(const Command& command, Clock::time_point deadline) {
    std::vector<const char*> words;
    std::vector<std::size_t> sizes;
    for (const std::string& word : command) {
      words.push_back(word.data());
      sizes.push_back(word.size());
    }
    if (redisSetTimeout(context_.get(), Until(deadline)) != REDIS_OK ||
        redisAppendCommandArgv(context_.get(), static_cast<int>(words.size()), words.data(),
                               sizes.data()) != REDIS_OK) {
      Fail();
    }
    for (int done = 0; done == 0;) {
      if (redisBufferWrite(context_.get(), &done) != REDIS_OK) Fail();
    }
  }

  Reply Receive(Clock::time_point deadline) {
    if (redisSetTimeout(context_.get(), Until(deadline)) != REDIS_OK) Fail();
    void* raw = nullptr;
    if (redisGetReply(context_.get(), &raw) != REDIS_OK) Fail();
    const std::unique_ptr<void, decltype(&freeReplyObject)> reply(raw, &freeReplyObject);
    const auto& answer = *static_cast<const redisReply*>(reply.get());
    if (answer.type == REDIS_REPLY_ERROR) ThrowReply(std::string(answer.str, answer.len));
    return Read(answer);
  }

  // Waits for the reply to the only command that was sent. False if `deadline` or `stop` is first.
  bool AwaitReply(Clock::time_point deadline, const StopPipe* stop = nullptr) const {
    std::array<pollfd, 2> fds{{{.fd = context_->fd, .events = POLLIN, .revents = 0},
                               {.fd = stop ? stop->fd() : -1, .events = POLLIN, .revents = 0}}};
    int ready = 0;
    do {
      const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now()).count();
      const auto ms = std::clamp<milliseconds::rep>(left, 0, std::numeric_limits<int>::max());
      ready = poll(fds.data(), fds.size(), static_cast<int>(ms));
    } while (ready < 0 && errno == EINTR);
    return ready > 0 && fds[1].revents == 0;
  }

  bool usable() const { return context_->err == 0; }

 private:
  struct Free {
    void operator()(redisContext* context) const { redisFree(context); }
  };

  static timeval Until(Clock::time_point deadline) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    const auto ms = std::max<milliseconds::rep>(left.count(), 1);  // 0 would mean for ever
    return {.tv_sec = ms / 1000, .tv_usec = ms % 1000 * 1000};
  }

  static Reply Read(const redisReply& from) {
    switch (from.type) {
      case REDIS_REPLY_NIL:
        return {};
      case REDIS_REPLY_INTEGER:
        return {.kind = Reply::Kind::kInteger, .integer = from.integer};
      case REDIS_REPLY_ARRAY: {
        Reply reply{.kind = Reply::Kind::kArray};
        for (std::size_t i = 0; i < from.elements; ++i) {
          reply.elements.push_back(Read(*from.element[i]));
        }
        return reply;
      }
      default:
        return {.kind = Reply::Kind::kText, .text = std::string(from.str, from.len)};
    }
  }

  [[noreturn]] void Fail() const {
    const bool late = context_->err == REDIS_ERR_IO && (errno == EAGAIN || errno == ETIMEDOUT);
    throw ConnectionError(late ? "no answer in time" : context_->errstr);
  }

  std::unique_ptr<redisContext, Free> context_;
};

// A server, for any number of threads. Outlives its locks and their holds. Since a waiting call
// keeps its connection busy and renewing must not be late, each call has a connection to itself;
// idle ones are kept.
class Client {
 public:
  explicit Client(Address address) : address_(std::move(address)) {}
  Client(std::string host, int port) : Client(Address{.host = std::move(host), .port = port}) {}

  Reply Call(const Command& command, Clock::time_point deadline) {
    Connection connection = Take(deadline);
    try {
      Reply reply = connection.Call(command, deadline);
      Give(std::move(connection));
      return reply;
    } catch (const ReplyError&) {
      Give(std::move(connection));
      throw;
    } catch (const ConnectionError&) {
      Forget();
      throw;
    }
  }

  Connection Take(Clock::time_point deadline) {
    {
      const std::lock_guard guard(mutex_);
      if (!idle_.empty()) {
        Connection connection = std::move(idle_.back());
        idle_.pop_back();
        return connection;
      }
    }
    return Connection(address_, deadline);
  }

  void Give(Connection connection) {
    const std::lock_guard guard(mutex_);
    if (connection.usable() && idle_.size() < kMaxIdle) idle_.push_back(std::move(connection));
  }

  // When one connection is broken, those that are idle are probably no better.
  void Forget() {
    const std::lock_guard guard(mutex_);
    idle_.clear();
  }

  // That an owner whom the caller chose holds these locks. A call in the name of the same owner
  // that fails must not release them.
  class Claim {
   public:
    Claim(Client& client, const std::string& owner, const std::vector<std::string>& keys)
        : client_(client) {
      const std::lock_guard guard(client_.mutex_);
      for (const std::string& key : keys) claims_.push_back(client_.claims_.emplace(owner, key));
    }
    ~Claim() {
      const std::lock_guard guard(client_.mutex_);
      for (const auto claim : claims_) client_.claims_.erase(claim);
    }

    Claim(const Claim&) = delete;
    Claim& operator=(const Claim&) = delete;

   private:
    Client& client_;
    std::vector<std::multiset<std::pair<std::string, std::string>>::iterator> claims_;
  };

  bool IsClaimed(const std::string& owner, const std::vector<std::string>& keys) {
    const std::lock_guard guard(mutex_);
    return std::any_of(keys.begin(), keys.end(), [&](const std::string& key) {
      return claims_.contains({owner, key});
    });
  }

 private:
  static constexpr std::size_t kMaxIdle = 8;

  const Address address_;
  std::mutex mutex_;
  std::vector<Connection> idle_;
  std::multiset<std::pair<std::string, std::string>> claims_;  // owner and key
};

// --- Locks ------------------------------------------------------------------------------------

struct Options {
  milliseconds lease{10'000};  // how long the lock outlives a holder that died
  milliseconds wait{0};        // how long to stand in line; 0: one try
  milliseconds max_hold{0};  // renew no longer than this and tell the work; 0: as long as it takes
  milliseconds timeout{2'000};  // how long the server may be slow or away, on top of `wait`

  bool shared = false;                 // together with other shared holders
  int limit = 0;                       // up to so many holders
  bool session = false;                // the hold also ends when this process does
  milliseconds linger{0};              // after a crash the lock stays closed for so much longer
  std::vector<std::string> also = {};  // these locks too, all or none; but see Hold::Run

  // A new random one for each hold if empty. The server sees a deadlock only if it knows who waits
  // for whom: a worker that takes one lock while it holds another gives both the same owner, a
  // random string that no other thread uses, because for the server the same owner is the same
  // holder. An Acquire() that fails releases what it may have got, unless the owner has another
  // Hold of the same lock from the same Client: that one is kept. So an upgrade that is cancelled
  // leaves the shared hold as it is; if it was granted in the same moment, that hold is exclusive
  // and has a new token.
  std::string owner = {};
};

// What a lock and its holds have in common: whom they ask, and how.
struct Terms {
  Client& client;
  std::string key;
  Options options;

  // Key, owner, options, further keys: so do all commands of an owner begin and end.
  Command Request(const std::string& name, const std::string& owner,
                  const Command& words = {}) const {
    Command command = {name, key, owner};
    command.insert(command.end(), words.begin(), words.end());
    if (!options.also.empty()) {
      command.insert(command.end(), {"ALSO", std::to_string(options.also.size())});
      command.insert(command.end(), options.also.begin(), options.also.end());
    }
    return command;
  }

  std::vector<std::string> Keys() const {
    std::vector<std::string> keys = {key};
    keys.insert(keys.end(), options.also.begin(), options.also.end());
    return keys;
  }

  // Whether it was done to all of the locks.
  bool All(const Reply& reply) const {
    return reply.integer == 1 + static_cast<long long>(options.also.size());
  }
};

// A lock that was acquired. Its end gives the lock up.
class Hold {
 public:
  Hold(Terms terms, std::string owner, long long token, Clock::time_point sent,
       std::optional<Connection> session)
      : state_(std::make_unique<State>(std::move(terms), std::move(owner), token, sent,
                                       std::move(session))) {}

  long long token() const { return state_->token; }  // larger than that of every earlier holder
  const std::string& owner() const { return state_->owner; }

  // Is requested to stop when the hold is lost or was held for the maximum time. Callbacks run in
  // the thread that renews: they may not end the hold.
  std::stop_token stop_token() const { return state_->told.get_token(); }
  bool lost() const { return state_->told.stop_requested(); }

  // Throws Lost or MaxHold if the work should have stopped, Lost also if the hold was released.
  void Check() const { state_->Check(); }

  // Starts the lease anew now. The hold does that by itself; call it before a step that must not be
  // cut short. Throws Lost if the hold is gone or was released.
  void Touch() { state_->Touch(Clock::now() + state_->terms.options.lease / 3); }

  // Runs a command if and only if this hold still has the lock, in one step of the server; throws
  // Fenced if not. With Options::also it looks at the first lock only, the one that Lock was given:
  // name the lock that guards what is written first.
  Reply Run(const Command& command) { return state_->Run(command); }

  // Gives the lock up. Throws Lost if it was not ours to the end: then the work may have had
  // company. After the first call it does nothing.
  void Release() { state_->Release(); }

 private:
  struct State {
    State(Terms t, std::string o, long long n, Clock::time_point sent, std::optional<Connection> s)
        : terms(std::move(t)),
          owner(std::move(o)),
          token(n),
          session(std::move(s)),
          // From before the request: the server cannot have started the lease earlier.
          valid_until(sent + terms.options.lease),
          max_until(terms.options.max_hold > milliseconds(0) ? sent + terms.options.max_hold
                                                             : Clock::time_point::max()),
          claim(terms.options.owner.empty()
                    ? nullptr
                    : std::make_unique<Client::Claim>(terms.client, owner, terms.Keys())),
          renewal([this, sent](const std::stop_token& stop) { Renew(stop, sent); }) {}

    ~State() {
      try {
        Release();
      } catch (const std::exception&) {  // Who wants to know calls Release().
      }
    }

    State(const State&) = delete;
    State& operator=(const State&) = delete;

    // At each third of the lease, so that one failure costs nothing. After a failure it goes on
    // trying until the lease may be over.
    void Renew(const std::stop_token& stop, Clock::time_point sent) {
      const auto third = terms.options.lease / 3;
      auto next = sent + third;
      std::unique_lock guard(mutex);
      while (Clock::now() < std::min(valid_until, max_until)) {
        wake.wait_until(guard, stop, std::min({next, valid_until, max_until}),
                        [this] { return over; });
        if (over || stop.stop_requested()) return;
        if (Clock::now() < next) continue;
        next = Clock::now() + third;
        const auto deadline = std::min({next, valid_until, max_until});
        guard.unlock();
        try {
          Touch(deadline);
        } catch (const std::exception&) {  // If it was Lost, we are over.
          next = Clock::now() + terms.options.lease / 10;
        }
        guard.lock();
      }
      const bool too_late = Clock::now() >= valid_until;
      guard.unlock();
      too_late ? Finish(Lost("could not renew the hold in time")) : Finish(MaxHold());
    }

    void Touch(Clock::time_point deadline) {
      Check();
      const auto sent = Clock::now();
      const auto lease = terms.options.lease;
      const Command touch =
          terms.Request("LOCK.TOUCH", owner, {"PX", std::to_string(lease.count())});
      if (!terms.All(terms.client.Call(touch, deadline))) {
        const Lost lost("the server no longer knows the hold");
        Finish(lost);
        throw lost;
      }
      const std::lock_guard guard(mutex);
      valid_until = sent + lease;
    }

    Reply Run(const Command& command) {
      Command fence = {"LOCK.FENCE", terms.key, std::to_string(token), "THEN"};
      fence.insert(fence.end(), command.begin(), command.end());
      try {
        return terms.client.Call(fence, Clock::now() + terms.options.timeout);
      } catch (const Fenced& error) {
        Finish(Lost(error.what()));
        throw;
      }
    }

    void Release() {
      {
        const std::lock_guard guard(mutex);
        if (released) return;
        released = over = true;
        claim.reset();
      }
      renewal.request_stop();
      const std::optional<Connection> ends_after_this = std::move(session);
      bool done = false;
      std::exception_ptr trouble;
      try {
        done = SendRelease();
      } catch (const Error&) {
        trouble = std::current_exception();
      }
      const std::lock_guard guard(mutex);
      if (const Lost* lost = std::get_if<Lost>(&why)) throw *lost;
      if (trouble) std::rethrow_exception(trouble);
      if (!done) throw Lost("the hold ended before its release");
    }

    // Whether there was something to release.
    bool SendRelease() {
      const auto send = [this] {
        return terms.client.Call(terms.Request("LOCK.RELEASE", owner),
                                 Clock::now() + terms.options.timeout);
      };
      try {
        return terms.All(send());
      } catch (const ConnectionError&) {
        // Perhaps only the reply was lost, so once more. Then 0 means that the first try did it if
        // the lease lasts yet; but a session may have ended together with the connection.
        const Reply reply = send();
        const std::lock_guard guard(mutex);
        const bool lasts = !terms.options.session && Clock::now() < valid_until;
        return terms.All(reply) || (reply.integer == 0 && lasts);
      }
    }

    void Check() const {
      const std::lock_guard guard(mutex);
      if (const Lost* lost = std::get_if<Lost>(&why)) throw *lost;
      if (std::holds_alternative<MaxHold>(why)) throw MaxHold();
      if (released) throw Lost("the hold was released");
    }

    using Reason = std::variant<std::monostate, Lost, MaxHold>;

    void Finish(Reason reason) {
      {
        const std::lock_guard guard(mutex);
        if (over) return;
        over = true;
        claim.reset();
        why = std::move(reason);
      }
      wake.notify_all();
      told.request_stop();  // without the mutex: callbacks may ask us
    }

    const Terms terms;
    const std::string owner;
    const long long token;
    std::optional<Connection> session;  // with whose end the hold ends
    std::stop_source told;

    mutable std::mutex mutex;
    std::condition_variable_any wake;
    Clock::time_point valid_until;
    const Clock::time_point max_until;
    bool over = false;  // lost, held for the maximum time, or released
    bool released = false;
    Reason why;
    std::unique_ptr<Client::Claim> claim;  // until it is over

    std::jthread renewal;  // the last, so that it ends first
  };

  std::unique_ptr<State> state_;
};

// Names a lock and how to take it. Any number of threads may share one.
class Lock {
 public:
  Lock(Client& client, std::string key, Options options = {})
      : terms_{client, std::move(key), std::move(options)} {}

  // Takes the lock, or stands in line for it for Options::wait; else throws NotAcquired. `cancel`
  // ends the waiting, with Cancelled: as soon as the server has confirmed that nothing is held and
  // nobody waits, or after Options::timeout.
  Hold Acquire(const std::stop_token& cancel = {}) const {
    return Ask(terms_.options.wait, cancel);
  }

  // Takes the lock if that is possible at once.
  std::optional<Hold> TryAcquire() const {
    try {
      return Ask(milliseconds(0), {});
    } catch (const NotAcquired&) {
      return std::nullopt;
    }
  }

  // Takes the lock, does the work, gives the lock up and returns what the work returns. If the work
  // throws, the lock is given up too, and whether that went well matters no more.
  template <typename Work>
  auto With(Work&& work, const std::stop_token& cancel = {}) const {
    Hold hold = Acquire(cancel);
    if constexpr (std::is_void_v<std::invoke_result_t<Work, Hold&, std::stop_token>>) {
      std::forward<Work>(work)(hold, hold.stop_token());
      hold.Release();
    } else {
      auto result = std::forward<Work>(work)(hold, hold.stop_token());
      hold.Release();
      return result;
    }
  }

 private:
  static constexpr milliseconds kRetryPause{50};

  Hold Ask(milliseconds wait, const std::stop_token& cancel) const {
    if (cancel.stop_requested()) throw Cancelled();
    // As long as the owner is the same, asking twice is safe: the server answers with the same
    // token. So after a lost reply or a reconnect we simply ask again.
    const std::string owner = terms_.options.owner.empty() ? NewOwner() : terms_.options.owner;
    auto wait_end = Clock::now() + wait;
    const auto give_up = wait_end + terms_.options.timeout;  // always longer than the wait
    std::optional<Connection> connection;
    bool unsure = false;  // whether the server may have granted a hold that we do not know of
    bool late = false;    // whether the reply may come yet
    while (true) {
      const auto sent = Clock::now();
      try {
        if (!connection) connection = terms_.client.Take(give_up);
        const std::optional<Reply> reply =
            Stand(*connection, owner, wait_end - sent, give_up, cancel);
        late = !reply;
        if (late) throw ConnectionError("no answer in time");
        if (reply->kind == Reply::Kind::kNull) {
          terms_.client.Give(std::move(*connection));
          throw NotAcquired();
        }
        if (cancel.stop_requested() || Clock::now() > give_up) throw ConnectionError("too late");
        if (Clock::now() - sent < terms_.options.lease / 3) {
          if (!terms_.options.session) {
            terms_.client.Give(std::move(*connection));
            connection.reset();
          }
          return Hold(terms_, owner, reply->integer, sent, std::move(connection));
        }
        // We stood in line, so the lease began somewhere in the time that the call took. Asking
        // once more, without waiting, starts it anew: then we know a moment that it cannot have
        // begun before.
        unsure = true;
        wait_end = sent;
      } catch (const ConnectionError&) {
        unsure = unsure || connection;  // Without one, nothing was sent.
        if (!late) {
          connection.reset();
          terms_.client.Forget();
        }
        if (late || cancel.stop_requested() || Clock::now() + kRetryPause > give_up) {
          if (unsure) LeaveNothing(owner, connection);
          if (cancel.stop_requested()) throw Cancelled();
          throw;
        }
        std::this_thread::sleep_for(kRetryPause);
      } catch (const Superseded&) {
        // A newer call of the same owner may have taken over the place: not ours to give up.
        connection.reset();
        if (unsure && terms_.options.owner.empty()) LeaveNothing(owner, connection);
        throw;
      } catch (const ReplyError&) {
        connection.reset();
        if (unsure) LeaveNothing(owner, connection);
        throw;
      }
    }
  }

  // Nothing if `cancel` or the end of our patience came before the reply.
  std::optional<Reply> Stand(Connection& connection, const std::string& owner, Clock::duration wait,
                             Clock::time_point give_up, const std::stop_token& cancel) const {
    const Options& o = terms_.options;
    const auto ms = std::chrono::duration_cast<milliseconds>(wait).count();
    Command words = {"PX", std::to_string(o.lease.count())};
    const auto add = [&words](const Command& more) {
      words.insert(words.end(), more.begin(), more.end());
    };
    if (ms > 0) add({"WAIT", std::to_string(ms)});
    if (o.shared) add({"SHARED"});
    if (o.limit > 0) add({"LIMIT", std::to_string(o.limit)});
    if (o.session) add({"SESSION"});
    if (o.linger > milliseconds(0)) add({"LINGER", std::to_string(o.linger.count())});
    std::optional<StopPipe> stop;
    if (cancel.stop_possible()) stop.emplace(cancel);
    connection.Send(terms_.Request("LOCK.ACQUIRE", owner, words), give_up);
    if (!connection.AwaitReply(give_up, stop ? &*stop : nullptr)) return std::nullopt;
    return connection.Receive(give_up);
  }

  // Ends the wait and gives up what may have been granted; `abandoned` is where a reply may come
  // yet. Closing that connection is not enough: the server may hand us the lock before it notices.
  // If this fails too, the lease ends what we may hold.
  void LeaveNothing(const std::string& owner, std::optional<Connection>& abandoned) const {
    // An upgrade: a release would give up the older hold too, so the wait ends with its connection.
    if (terms_.client.IsClaimed(owner, terms_.Keys())) return;
    const Command release = terms_.Request("LOCK.RELEASE", owner);
    const auto end = Clock::now() + terms_.options.timeout;
    const auto try_release = [&] {
      try {
        terms_.client.Call(release, end);
      } catch (const Error&) {  // There may be another try.
      }
    };
    try {
      if (abandoned) abandoned->Send(release, end);  // Behind the request: it may arrive later.
      while (true) {
        try_release();
        if (!abandoned) return;
        if (abandoned->AwaitReply(std::min<Clock::time_point>(end, Clock::now() + kRetryPause))) {
          if (abandoned->Receive(end).kind == Reply::Kind::kInteger) try_release();  // Granted.
          return;
        }
        // Perhaps the release has overtaken the request: then it did nothing.
        if (Clock::now() >= end) return;
      }
    } catch (const ReplyError&) {  // The wait has ended.
    } catch (const ConnectionError&) {
      try_release();
    }
  }

  static std::string NewOwner() {
    std::random_device random;
    std::string owner;
    for (int i = 0; i < 4; ++i) {
      char word[9];
      std::snprintf(word, sizeof word, "%08x", random());
      owner += word;
    }
    return owner;
  }

  const Terms terms_;
};

}  // namespace turnstile

#endif  // TURNSTILE_H_
