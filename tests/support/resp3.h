// The wire protocol: a strict reader of RESP2 and RESP3, and a raw connection that uses it. A byte
// that the protocol does not allow is a ProtocolError and never skipped. This is how tests detect a
// newline in an error text, a RESP3 type sent to a RESP2 client or `$-1` sent to a RESP3 one.
//
//   RawConnection raw = server.ConnectRaw();
//   raw.Hello(3);
//   EXPECT_TRUE(raw.Do("LOCK.INFO", "job").IsMap());
//
// Tests are not meant to catch the exceptions: GoogleTest turns them into failures.

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

// The peer violated the protocol.
struct ProtocolError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The connection ended, or the expected data did not arrive in time.
struct ConnectionError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Protocol { kResp2, kResp3 };

// Parses the reply at the start of `bytes` and stores its length in `*size`. Returns nothing if
// `bytes` ends before the reply does. Throws ProtocolError. Attributes (RESP3's `|`) are checked
// and skipped.
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

  // The next reply or push. A time-out consumes nothing, so that the call can be repeated.
  Reply ReadReply(Milliseconds within = kPatience);

  // Sends a command and reads its reply; pushes that arrive before it are stored in pushes().
  // (SUBSCRIBE in RESP3 is answered by pushes only: use SendCommand and ReadReply.)
  Reply Do(const Command& command);
  template <Argument... Args>
  Reply Do(const Args&... args) {
    return Do(Command{ArgumentText(args)...});
  }
  std::vector<Reply>& pushes() { return pushes_; }

  // HELLO 2 or HELLO 3. From then on replies must conform to that version.
  Reply Hello(int version);

  // For data that is not RESP. ReadUntil returns what precedes the delimiter and consumes both.
  std::string ReadExactly(size_t size, Milliseconds within = kPatience);
  std::string ReadUntil(std::string_view delimiter, Milliseconds within = kPatience);

  // Whether anything (including the end of the connection) can be read, now or within the given
  // time.
  bool Readable(Milliseconds within = Milliseconds{0});

  // Whether the peer closes the connection in time, with nothing left to read.
  bool Ends(Milliseconds within = kPatience);

  // How many bytes the Read functions have returned.
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
