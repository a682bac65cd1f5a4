// The wire itself: a strict reader of RESP2 and RESP3, and a raw connection to use it on. A byte
// that the protocol does not allow is a ProtocolError, never skipped: this is how a test notices a
// newline in an error text, a RESP3 type sent to a RESP2 client or `$-1` sent to a RESP3 one.
//
//   RawConnection raw = server.ConnectRaw();
//   raw.Hello(3);
//   EXPECT_TRUE(raw.Do("LOCK.INFO", "job").IsMap());
//
// The exceptions are not meant to be caught by tests: GoogleTest turns them into failures.

#ifndef TURNSTILE_TESTS_SUPPORT_RESP3_H_
#define TURNSTILE_TESTS_SUPPORT_RESP3_H_

#include <cstddef>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "support/client.h"
#include "support/eventually.h"
#include "support/reply.h"

namespace turnstile::testing {

// The peer broke the protocol.
struct ProtocolError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The connection ended, or what was to come did not come in time.
struct ConnectionError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Protocol { kResp2, kResp3 };

// Parses the reply at the start of `bytes` and says in `*size` how long it was. Nothing if `bytes`
// ends before the reply does. Throws ProtocolError. Attributes (RESP3's `|`) are checked and left
// out.
std::optional<Reply> ParseReply(std::string_view bytes, Protocol protocol, size_t* size);

// A command as clients send it: an array of bulk strings.
std::string EncodeCommand(const Command& command);

class RawConnection {
 public:
  // Throws ConnectionError. `host` is an IPv4 address.
  explicit RawConnection(int port, const std::string& host = "127.0.0.1");
  ~RawConnection();
  RawConnection(RawConnection&& other) noexcept;
  RawConnection& operator=(RawConnection&&) = delete;

  // Takes over a connected socket, e.g. one end of a socketpair(2).
  static RawConnection FromFd(int fd);

  void WriteRaw(std::string_view bytes) const;
  void SendCommand(const Command& command) const { WriteRaw(EncodeCommand(command)); }

  // The next reply or push. After a time-out nothing is consumed and it may be tried again.
  Reply ReadReply(Milliseconds within = kPatience);

  // Sends a command and reads its reply; pushes that come before it are put aside in pushes().
  // (SUBSCRIBE in RESP3 is answered by pushes only: use SendCommand and ReadReply.)
  Reply Do(const Command& command);
  template <Argument... Args>
  Reply Do(const Args&... args) {
    return Do(Command{ArgumentText(args)...});
  }
  std::vector<Reply>& pushes() { return pushes_; }

  // HELLO 2 or HELLO 3. From then on replies are held to that version.
  Reply Hello(int version);

  // For what is not RESP. ReadUntil returns what precedes the delimiter and consumes both.
  std::string ReadExactly(size_t size, Milliseconds within = kPatience);
  std::string ReadUntil(std::string_view delimiter, Milliseconds within = kPatience);

  // Whether anything (also the end of the connection) can be read, or comes in time.
  bool Readable(Milliseconds within = Milliseconds{0});

  // Whether the peer closes the connection in time, with nothing left to read.
  bool Ends(Milliseconds within = kPatience);

  // How many bytes have been handed out by the Read functions.
  size_t consumed() const { return consumed_; }

  void Close();

 private:
  RawConnection() = default;

  bool Fill(
      Clock::time_point deadline);  // false at the end of the connection; throws at the deadline
  std::string Take(size_t size);

  int fd_ = -1;
  Protocol protocol_ = Protocol::kResp2;
  std::string buffer_;
  size_t consumed_ = 0;
  std::vector<Reply> pushes_;
};

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_SUPPORT_RESP3_H_
