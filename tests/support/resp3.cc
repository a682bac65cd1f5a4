#include "support/resp3.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace turnstile::testing {
namespace {

constexpr int kMaxDepth = 32;
constexpr int64_t kMaxElements = 1 << 20;
constexpr int64_t kMaxBulk = 512 << 20;

// Recursive descent over bytes that may end anywhere. Incomplete is thrown, not returned, because
// it can happen at every step and always means the same: start again when more bytes are available.
struct Incomplete {};

class Parser {
 public:
  Parser(std::string_view bytes, Protocol protocol) : bytes_(bytes), protocol_(protocol) {}

  Reply Next(int depth = 0) {
    if (depth > kMaxDepth) Violation("nested too deeply");
    const std::string line = Line();
    if (line.empty()) Violation("empty line in place of a reply");
    const char type = line[0];
    const std::string rest = line.substr(1);
    if (protocol_ == Protocol::kResp2 && !std::strchr("+-:$*", type)) {
      Violation("not a RESP2 type: " + Quoted(line));
    }
    Reply reply;
    reply.text = rest;
    switch (type) {
      case '+':
        reply.kind = Reply::Kind::kStatus;
        return reply;
      case '-':
        if (rest.empty()) Violation("error without a text");
        reply.kind = Reply::Kind::kError;
        return reply;
      case ':':
        return Reply::Int(Integer(rest));
      case '$':
        return Bulk(Reply::Kind::kString, rest);
      case '*':
        return Aggregate(Reply::Kind::kArray, rest, 1, depth);
      case '%':
        return Aggregate(Reply::Kind::kMap, rest, 2, depth);
      case '~':
        return Aggregate(Reply::Kind::kSet, rest, 1, depth);
      case '>':
        if (depth > 0) Violation("push inside a reply");
        return Aggregate(Reply::Kind::kPush, rest, 1, depth);
      case '|':
        Aggregate(Reply::Kind::kMap, rest, 2, depth);
        return Next(depth + 1);
      case '!':
        return Bulk(Reply::Kind::kError, rest);
      case '=': {
        Reply verbatim = Bulk(Reply::Kind::kVerbatim, rest);
        if (verbatim.text.size() < 4 || verbatim.text[3] != ':') {
          Violation("verbatim string without a format: " + Quoted(verbatim.text));
        }
        return verbatim;
      }
      case '_':
        if (!rest.empty()) Violation("null with a value: " + Quoted(line));
        return Reply::Nil();
      case '#':
        if (rest != "t" && rest != "f") Violation("neither true nor false: " + Quoted(line));
        return Reply::Bool(rest == "t");
      case ',': {
        char* end = nullptr;
        std::strtod(rest.c_str(), &end);
        if (rest.empty() || *end != '\0') Violation("not a double: " + Quoted(line));
        reply.kind = Reply::Kind::kDouble;
        return reply;
      }
      case '(':
        if (rest.find_first_not_of("0123456789", rest.starts_with('-') ? 1 : 0) !=
                std::string::npos ||
            rest.empty() || rest == "-") {
          Violation("not a big number: " + Quoted(line));
        }
        reply.kind = Reply::Kind::kBigNumber;
        return reply;
      default:
        Violation("unknown type: " + Quoted(line));
    }
  }

  size_t position() const { return position_; }

 private:
  [[noreturn]] void Violation(const std::string& what) const {
    const size_t start = position_ < 64 ? 0 : position_ - 64;
    throw ProtocolError("protocol violation: " + what +
                        "; just read: " + Quoted(bytes_.substr(start, position_ - start)));
  }

  // Up to CR LF, and neither of the two anywhere else.
  std::string Line() {
    const size_t end = bytes_.find_first_of("\r\n", position_);
    if (end == std::string_view::npos) throw Incomplete();
    std::string line(bytes_.substr(position_, end - position_));
    if (bytes_[end] == '\n') Violation("newline without CR after " + Quoted(line));
    if (end + 1 == bytes_.size()) throw Incomplete();
    if (bytes_[end + 1] != '\n') Violation("CR without newline after " + Quoted(line));
    position_ = end + 2;
    return line;
  }

  int64_t Integer(const std::string& text) const {
    int64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    // Comparing with the canonical form catches "", "+1", "01", "-0" and trailing bytes at once.
    if (error != std::errc() || std::to_string(value) != text) {
      Violation("not an integer: " + Quoted(text));
    }
    return value;
  }

  // The length of a bulk string or aggregate; nothing for RESP2's null.
  std::optional<size_t> Length(const std::string& text, int64_t limit, bool nullable) const {
    const int64_t length = Integer(text);
    if (length == -1 && nullable) {
      if (protocol_ == Protocol::kResp3) Violation("RESP2's null on a RESP3 connection");
      return std::nullopt;
    }
    if (length < 0 || length > limit) Violation("length out of range: " + text);
    return static_cast<size_t>(length);
  }

  Reply Bulk(Reply::Kind kind, const std::string& length) {
    const auto size = Length(length, kMaxBulk, kind == Reply::Kind::kString);
    if (!size) return Reply::Nil();
    if (bytes_.size() - position_ < *size + 2) throw Incomplete();
    Reply reply;
    reply.kind = kind;
    reply.text = bytes_.substr(position_, *size);
    position_ += *size;
    if (bytes_.substr(position_, 2) != "\r\n") {
      Violation("no CR LF after a string of " + length + " bytes");
    }
    position_ += 2;
    return reply;
  }

  Reply Aggregate(Reply::Kind kind, const std::string& length, size_t each, int depth) {
    const auto size = Length(length, kMaxElements, kind == Reply::Kind::kArray);
    if (!size) return Reply::Nil();
    Reply reply;
    reply.kind = kind;
    for (size_t i = 0; i < *size * each; i++) reply.elements.push_back(Next(depth + 1));
    return reply;
  }

  const std::string_view bytes_;
  const Protocol protocol_;
  size_t position_ = 0;
};

}  // namespace

std::optional<Reply> ParseReply(std::string_view bytes, Protocol protocol, size_t* size) {
  Parser parser(bytes, protocol);
  try {
    Reply reply = parser.Next();
    *size = parser.position();
    return reply;
  } catch (const Incomplete&) {
    return std::nullopt;
  }
}

std::string EncodeCommand(const Command& command) {
  std::string out = "*" + std::to_string(command.size()) + "\r\n";
  for (const std::string& argument : command) {
    out += "$" + std::to_string(argument.size()) + "\r\n" + argument + "\r\n";
  }
  return out;
}

RawConnection::RawConnection(int port, const std::string& host)
    : fd_(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = inet_addr(host.c_str());
  if (fd_ < 0 || connect(fd_, reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) {
    const std::string why = std::strerror(errno);
    Close();
    throw ConnectionError("no connection to port " + std::to_string(port) + ": " + why);
  }
  const int on = 1;
  setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

RawConnection RawConnection::FromFd(int fd) {
  RawConnection connection;
  connection.fd_ = fd;
  return connection;
}

RawConnection::RawConnection(RawConnection&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)),
      protocol_(other.protocol_),
      buffer_(std::move(other.buffer_)),
      consumed_(other.consumed_),
      pushes_(std::move(other.pushes_)) {}

RawConnection::~RawConnection() { Close(); }

void RawConnection::Close() {
  if (fd_ >= 0) close(fd_);
  fd_ = -1;
}

void RawConnection::WriteRaw(std::string_view bytes) const {
  while (!bytes.empty()) {
    const ssize_t sent = send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) throw ConnectionError(std::string("cannot write: ") + std::strerror(errno));
    bytes.remove_prefix(static_cast<size_t>(sent));
  }
}

bool RawConnection::Fill(Clock::time_point deadline) {
  if (!WaitReadable(fd_, deadline)) {
    throw ConnectionError("nothing more came in time; unread so far: " + Quoted(buffer_));
  }
  std::array<char, 65536> chunk;
  const ssize_t got = recv(fd_, chunk.data(), chunk.size(), MSG_DONTWAIT);
  if (got > 0) {
    buffer_.append(chunk.data(), static_cast<size_t>(got));
    return true;
  }
  return got < 0 && (errno == EAGAIN || errno == EINTR);
}

std::string RawConnection::Take(size_t size) {
  std::string taken = buffer_.substr(0, size);
  buffer_.erase(0, size);
  consumed_ += size;
  return taken;
}

Reply RawConnection::ReadReply(Milliseconds within) {
  const auto deadline = Clock::now() + within;
  for (;;) {
    size_t size = 0;
    if (auto reply = ParseReply(buffer_, protocol_, &size)) {
      Take(size);
      return *std::move(reply);
    }
    if (!Fill(deadline)) {
      throw ConnectionError("connection ended; unread so far: " + Quoted(buffer_));
    }
  }
}

Reply RawConnection::Do(const Command& command) {
  SendCommand(command);
  for (;;) {
    Reply reply = ReadReply();
    if (reply.kind != Reply::Kind::kPush) return reply;
    pushes_.push_back(std::move(reply));
  }
}

Reply RawConnection::Hello(int version) {
  protocol_ = version == 3 ? Protocol::kResp3 : Protocol::kResp2;  // already for this reply
  return Do("HELLO", version);
}

std::string RawConnection::ReadExactly(size_t size, Milliseconds within) {
  const auto deadline = Clock::now() + within;
  while (buffer_.size() < size) {
    if (!Fill(deadline)) throw ConnectionError("connection ended after " + Quoted(buffer_));
  }
  return Take(size);
}

std::string RawConnection::ReadUntil(std::string_view delimiter, Milliseconds within) {
  const auto deadline = Clock::now() + within;
  size_t end;
  while ((end = buffer_.find(delimiter)) == std::string::npos) {
    if (!Fill(deadline)) throw ConnectionError("connection ended after " + Quoted(buffer_));
  }
  std::string taken = Take(end + delimiter.size());
  taken.resize(end);
  return taken;
}

bool RawConnection::Readable(Milliseconds within) {
  return !buffer_.empty() || WaitReadable(fd_, Clock::now() + within);
}

bool RawConnection::Ends(Milliseconds within) {
  const auto deadline = Clock::now() + within;
  while (buffer_.empty() && WaitReadable(fd_, deadline)) {
    if (!Fill(deadline)) return true;
  }
  return false;
}

}  // namespace turnstile::testing
