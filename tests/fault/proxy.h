// A TCP proxy between a client and a server on 127.0.0.1, which can be told to misbehave.
//
//   Proxy proxy(server.port());
//   Client client(proxy.port());
//   proxy.SetReplyDelay(Milliseconds{50});
//   proxy.LoseNextReply(0);   // the server does what it is told, the client never hears of it
//   proxy.Cut();              // all connections are reset, new ones too
//   proxy.Heal();
//
// What arrives is always a beginning of what was sent, in its order, as TCP promises: a connection
// of which a byte was swallowed never gets a later one.

#ifndef TURNSTILE_TESTS_FAULT_PROXY_H_
#define TURNSTILE_TESTS_FAULT_PROXY_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "support/eventually.h"

namespace turnstile::fault {

struct ProxyStats {
  int64_t connections = 0;        // accepted and passed on
  int64_t turned_away = 0;        // reset because of Cut()
  int64_t open = 0;               // now
  int64_t request_bytes = 0;      // handed to the server
  int64_t reply_bytes = 0;        // handed to the client
  int64_t replies_swallowed = 0;  // pieces, as they were read: mostly one for each reply
  int64_t resets = 0;             // connections that the proxy ended by itself
};

class Proxy {
 public:
  // Listens on a port of its own choice. Throws std::system_error if it cannot.
  explicit Proxy(int target_port);
  ~Proxy();  // resets what is open
  Proxy(const Proxy&) = delete;
  Proxy& operator=(const Proxy&) = delete;

  int port() const { return port_; }

  // All of these may be called by any thread, and count when they return.

  // How long bytes are held back, counted from when the proxy has read them. What is on its way
  // keeps its delay.
  void SetRequestDelay(testing::Milliseconds delay);
  void SetReplyDelay(testing::Milliseconds delay);

  // Requests go through, replies are swallowed. At its end all connections that lost something are
  // reset.
  void DropReplies(bool drop);

  // The next reply of one connection is swallowed, and the connection is reset then. The number
  // picks among the open ones, oldest first, modulo how many there are. False if there are none.
  bool LoseNextReply(uint64_t which);

  // Resets all connections, on both sides, and each new one, until Heal().
  void Cut();
  void Heal();

  // Nothing goes through in either direction, not even the end of a connection. Afterwards all of
  // it does, unless somebody has lost patience.
  void Blackhole(bool on);

  ProxyStats stats() const;

 private:
  enum Side : size_t { kClient, kServer };

  // A part of a stream, on its way since it was read. Without bytes: the end of the stream.
  struct Piece {
    testing::Clock::time_point due;
    std::string bytes;
  };

  // One half of a connection: what comes from one side and goes to the other.
  struct Stream {
    void Add(Piece piece);
    void Pop();

    std::deque<Piece> pieces;
    size_t sent = 0;     // of the first piece
    size_t size = 0;     // of all pieces
    bool ended = false;  // no more will be read
    bool dead = false;   // the other side takes no more
    bool full = false;   // the other side takes no more at the moment
  };

  struct Connection {
    std::array<int, 2> fds{-1, -1};          // by Side
    std::array<uint32_t, 2> interest{0, 0};  // what epoll watches
    std::array<Stream, 2> from;              // by Side: from the client, from the server
    bool deaf = false;                       // a reply was swallowed
    bool loses_next = false;
  };

  void Run();
  void Wake() const;
  void Accept();
  void WatchListener() const;
  void Receive(Connection& connection, Side side);
  // These send what is due. False: the connection is at its end.
  bool Pump(Connection& connection, testing::Clock::time_point now);
  bool PumpStream(Connection& connection, Side side, testing::Clock::time_point now);
  void Watch(uint64_t number, Connection& connection) const;
  static void Close(const Connection& connection, bool reset);
  void Reset(const Connection& connection);

  const int target_;
  int listener_ = -1;
  int epoll_ = -1;
  int wake_ = -1;  // an eventfd
  int port_ = 0;

  // Protects all that follows. The proxy's thread has it except while it waits.
  mutable std::mutex mutex_;
  bool stop_ = false;
  testing::Milliseconds request_delay_{0};
  testing::Milliseconds reply_delay_{0};
  bool drop_replies_ = false;
  bool cut_ = false;
  bool blackhole_ = false;
  uint64_t next_number_ = 1;
  std::map<uint64_t, Connection> connections_;  // by number, in order of age
  testing::Clock::time_point next_due_;         // of what the last Pump() left
  ProxyStats stats_;

  std::thread thread_;
};

}  // namespace turnstile::fault

#endif  // TURNSTILE_TESTS_FAULT_PROXY_H_
