#include "fault/proxy.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <iterator>
#include <system_error>
#include <utility>

namespace turnstile::fault {

using testing::Clock;
using testing::Milliseconds;

namespace {

// How much of one stream is held back before its sender has to wait.
constexpr size_t kHeldAtMost = size_t{1} << 20;

// epoll's names for what is no connection. Side s of connection n is 2 * n + s, and n is above 0.
constexpr uint64_t kListenerEvent = 0;
constexpr uint64_t kWakeEvent = 1;

[[noreturn]] void Fail(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

sockaddr_in Loopback(int port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

int NewSocket() { return socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0); }

void SendAtOnce(int fd) {
  const int on = 1;
  setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

void CloseSocket(int fd, bool reset) {
  if (fd < 0) return;
  const linger at_once{1, 0};
  if (reset) setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  close(fd);
}

}  // namespace

void Proxy::Stream::Add(Piece piece) {
  size += piece.bytes.size();
  pieces.push_back(std::move(piece));
}

void Proxy::Stream::Pop() {
  size -= pieces.front().bytes.size();
  sent = 0;
  pieces.pop_front();
}

Proxy::Proxy(int target_port) : target_(target_port) {
  sockaddr_in address = Loopback(0);
  socklen_t size = sizeof address;
  listener_ = NewSocket();
  if (listener_ < 0 || bind(listener_, reinterpret_cast<sockaddr*>(&address), size) != 0 ||
      listen(listener_, 1024) != 0 ||
      getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size) != 0) {
    Fail("the proxy's port");
  }
  port_ = ntohs(address.sin_port);
  epoll_ = epoll_create1(EPOLL_CLOEXEC);
  wake_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (epoll_ < 0 || wake_ < 0) Fail("the proxy's epoll");
  for (const auto& [fd, event] : {std::pair{listener_, kListenerEvent}, {wake_, kWakeEvent}}) {
    epoll_event watch{.events = EPOLLIN, .data = {.u64 = event}};
    if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd, &watch) != 0) Fail("epoll_ctl");
  }
  thread_ = std::thread([this] { Run(); });
}

Proxy::~Proxy() {
  {
    const std::lock_guard guard(mutex_);
    stop_ = true;
    Wake();
  }
  thread_.join();
  for (const auto& [number, connection] : connections_) Close(connection, /*reset=*/true);
  close(listener_);
  close(epoll_);
  close(wake_);
}

void Proxy::SetRequestDelay(Milliseconds delay) {
  const std::lock_guard guard(mutex_);
  request_delay_ = delay;
}

void Proxy::SetReplyDelay(Milliseconds delay) {
  const std::lock_guard guard(mutex_);
  reply_delay_ = delay;
}

void Proxy::DropReplies(bool drop) {
  const std::lock_guard guard(mutex_);
  drop_replies_ = drop;
  for (auto it = connections_.begin(); it != connections_.end();) {
    if (drop || !it->second.deaf) {
      ++it;
    } else {
      Reset(it->second);
      it = connections_.erase(it);
    }
  }
}

bool Proxy::LoseNextReply(uint64_t which) {
  const std::lock_guard guard(mutex_);
  if (connections_.empty()) return false;
  const auto chosen = static_cast<ptrdiff_t>(which % connections_.size());
  std::next(connections_.begin(), chosen)->second.loses_next = true;
  return true;
}

void Proxy::Cut() {
  const std::lock_guard guard(mutex_);
  cut_ = true;
  for (const auto& [number, connection] : connections_) Reset(connection);
  connections_.clear();
  WatchListener();
}

void Proxy::Heal() {
  const std::lock_guard guard(mutex_);
  cut_ = false;
  WatchListener();
}

void Proxy::Blackhole(bool on) {
  const std::lock_guard guard(mutex_);
  blackhole_ = on;
  WatchListener();
  Wake();
}

ProxyStats Proxy::stats() const {
  const std::lock_guard guard(mutex_);
  ProxyStats result = stats_;
  result.open = static_cast<int64_t>(connections_.size());
  return result;
}

void Proxy::Wake() const { eventfd_write(wake_, 1); }

void Proxy::Run() {
  std::array<epoll_event, 256> events{};
  std::unique_lock lock(mutex_);
  while (!stop_) {
    const Clock::time_point now = Clock::now();
    next_due_ = Clock::time_point::max();
    for (auto it = connections_.begin(); it != connections_.end();) {
      if (Pump(it->second, now)) {
        Watch(it->first, it->second);
        ++it;
      } else {
        it = connections_.erase(it);
      }
    }
    int timeout = -1;
    if (next_due_ != Clock::time_point::max()) {
      timeout = static_cast<int>(std::chrono::ceil<Milliseconds>(next_due_ - now).count());
    }
    lock.unlock();
    const int ready = epoll_wait(epoll_, events.data(), static_cast<int>(events.size()), timeout);
    lock.lock();
    for (int i = 0; i < ready; i++) {
      const uint64_t name = events[static_cast<size_t>(i)].data.u64;
      if (name == kListenerEvent) {
        Accept();
      } else if (name == kWakeEvent) {
        eventfd_t ignored = 0;
        eventfd_read(wake_, &ignored);
      } else if (const auto it = connections_.find(name / 2); it != connections_.end()) {
        Receive(it->second, static_cast<Side>(name % 2));
      }
    }
  }
}

// In a blackhole new connections stay with the kernel.
void Proxy::WatchListener() const {
  epoll_event watch{.events = blackhole_ && !cut_ ? 0U : EPOLLIN, .data = {.u64 = kListenerEvent}};
  epoll_ctl(epoll_, EPOLL_CTL_MOD, listener_, &watch);
}

void Proxy::Accept() {
  while (cut_ || !blackhole_) {
    const int client = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (client < 0) return;
    if (cut_) {
      CloseSocket(client, /*reset=*/true);
      stats_.turned_away++;
      continue;
    }
    const int server = NewSocket();
    const sockaddr_in address = Loopback(target_);
    if (server < 0 ||
        (connect(server, reinterpret_cast<const sockaddr*>(&address), sizeof address) != 0 &&
         errno != EINPROGRESS)) {
      CloseSocket(client, /*reset=*/true);
      CloseSocket(server, /*reset=*/true);
      stats_.resets++;
      continue;
    }
    SendAtOnce(client);
    SendAtOnce(server);
    connections_[next_number_++].fds = {client, server};  // watched from the next Pump() on
    stats_.connections++;
  }
}

void Proxy::Receive(Connection& connection, Side side) {
  Stream& stream = connection.from[side];
  connection.from[1 - side].full = false;  // perhaps; PumpStream() finds out
  if (stream.ended || stream.size >= kHeldAtMost) return;
  std::array<char, 1 << 16> buffer;
  const ssize_t size = recv(connection.fds[side], buffer.data(), buffer.size(), 0);
  if (size < 0 && (errno == EAGAIN || errno == EINTR)) return;
  stream.ended = size <= 0;
  const Milliseconds delay = side == kClient ? request_delay_ : reply_delay_;
  const auto read = static_cast<size_t>(std::max<ssize_t>(size, 0));
  stream.Add({Clock::now() + delay, std::string(buffer.data(), read)});
}

bool Proxy::Pump(Connection& connection, Clock::time_point now) {
  if (blackhole_) return true;
  return PumpStream(connection, kClient, now) && PumpStream(connection, kServer, now);
}

bool Proxy::PumpStream(Connection& connection, Side side, Clock::time_point now) {
  Stream& stream = connection.from[side];
  const int to = connection.fds[1 - side];
  for (; !stream.pieces.empty() && !stream.full; stream.Pop()) {
    const Piece& piece = stream.pieces.front();
    if (piece.due > now) {
      next_due_ = std::min(next_due_, piece.due);
      return true;
    }
    if (piece.bytes.empty()) {
      if (side == kServer) {  // the server has closed it: there is nobody to talk to
        Close(connection, /*reset=*/false);
        return false;
      }
      shutdown(to, SHUT_WR);
      continue;
    }
    if (side == kServer && (drop_replies_ || connection.deaf || connection.loses_next)) {
      stats_.replies_swallowed++;
      connection.deaf = true;
      if (connection.loses_next) {
        Reset(connection);
        return false;
      }
      continue;
    }
    while (!stream.dead && stream.sent < piece.bytes.size()) {
      const ssize_t sent = send(to, piece.bytes.data() + stream.sent,
                                piece.bytes.size() - stream.sent, MSG_NOSIGNAL);
      if (sent > 0) {
        stream.sent += static_cast<size_t>(sent);
        (side == kClient ? stats_.request_bytes : stats_.reply_bytes) += sent;
      } else if (errno == EAGAIN) {
        stream.full = true;
        return true;
      } else if (errno != EINTR) {
        stream.dead = true;  // the end of that side is read from it, in its time
      }
    }
  }
  return true;
}

// A side that has ended is watched no more: its hang-up would be reported again and again.
void Proxy::Watch(uint64_t number, Connection& connection) const {
  for (const Side side : {kClient, kServer}) {
    const Stream& from = connection.from[side];
    uint32_t wanted = 0;
    if (!from.ended && from.size < kHeldAtMost) wanted |= EPOLLIN;
    if (connection.from[1 - side].full) wanted |= EPOLLOUT;
    uint32_t& watched = connection.interest[side];
    if (wanted == watched) continue;
    epoll_event watch{.events = wanted, .data = {.u64 = 2 * number + side}};
    const int change = watched == 0 ? EPOLL_CTL_ADD : wanted == 0 ? EPOLL_CTL_DEL : EPOLL_CTL_MOD;
    epoll_ctl(epoll_, change, connection.fds[side], &watch);
    watched = wanted;
  }
}

void Proxy::Close(const Connection& connection, bool reset) {
  for (const int fd : connection.fds) CloseSocket(fd, reset);
}

void Proxy::Reset(const Connection& connection) {
  Close(connection, /*reset=*/true);
  stats_.resets++;
}

}  // namespace turnstile::fault
