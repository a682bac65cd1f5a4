#include "support/client.h"

#include <fcntl.h>
#include <hiredis/hiredis.h>
#include <sys/time.h>

#include <csignal>
#include <utility>

namespace turnstile::testing {
namespace {

Reply FromHiredis(const redisReply& raw) {
  const auto text = [&raw] { return std::string(raw.str, raw.len); };
  switch (raw.type) {
    case REDIS_REPLY_INTEGER:
      return Reply::Int(raw.integer);
    case REDIS_REPLY_STRING:
      return Reply::Str(text());
    case REDIS_REPLY_STATUS:
      return Reply::Status(text());
    case REDIS_REPLY_ERROR:
      return Reply::Error(text());
    case REDIS_REPLY_ARRAY: {
      Reply array = Reply::Array({});
      for (size_t i = 0; i < raw.elements; i++) {
        array.elements.push_back(FromHiredis(*raw.element[i]));
      }
      return array;
    }
    default:
      return Reply::Nil();
  }
}

}  // namespace

void Client::Deleter::operator()(redisContext* context) const { redisFree(context); }

Client::Client(int port, const std::string& host) {
  // hiredis uses write(2): writing to a server that was just killed raises SIGPIPE.
  signal(SIGPIPE, SIG_IGN);
  const timeval patience{kPatience.count() / 1000, 0};
  context_.reset(redisConnectWithTimeout(host.c_str(), port, patience));
  if (context_ == nullptr || context_->err != 0) {
    Lose("no connection to port " + std::to_string(port) + ": " +
         (context_ ? context_->errstr : "out of memory"));
    return;
  }
  redisSetTimeout(context_.get(), patience);  // for writes; reads poll first
  // hiredis 0.14 does not set this: a server started later would keep this connection open.
  fcntl(context_->fd, F_SETFD, FD_CLOEXEC);
}

Client::~Client() = default;
Client::Client(Client&&) noexcept = default;
Client& Client::operator=(Client&&) noexcept = default;

bool Client::connected() const { return context_ != nullptr; }

void Client::Close() { Lose("closed by the test"); }

void Client::Lose(std::string why) {
  lost_ = std::move(why);
  context_.reset();
}

Reply Client::Do(const Command& command) {
  Send(command);
  Reply reply = Read();
  if (reply.IsError("TIMEOUT:")) Lose("an earlier reply did not come in time");
  return reply;
}

void Client::Send(const Command& command) {
  if (!connected()) return;
  std::vector<const char*> arguments;
  std::vector<size_t> lengths;
  for (const std::string& argument : command) {
    arguments.push_back(argument.data());
    lengths.push_back(argument.size());
  }
  redisAppendCommandArgv(context_.get(), static_cast<int>(command.size()), arguments.data(),
                         lengths.data());
  for (int done = 0; done == 0;) {
    // Replies that hiredis has already received can still be read; after them Fill() finds the
    // error.
    if (redisBufferWrite(context_.get(), &done) != REDIS_OK) return;
  }
}

Reply Client::Read(Milliseconds within) {
  if (!Fill(Clock::now() + within)) {
    return Reply::Error("TIMEOUT: no reply within " + std::to_string(within.count()) + " ms");
  }
  if (next_.empty()) return Reply::Error("DISCONNECTED: " + lost_);
  Reply reply = std::move(next_.back());
  next_.clear();
  return reply;
}

bool Client::HasReply(Milliseconds within) { return Fill(Clock::now() + within); }

// redisGetReply() would consider the connection lost after its time-out, so the socket is polled
// here, and hiredis only reads and parses.
bool Client::Fill(Clock::time_point deadline) {
  while (next_.empty() && connected()) {
    void* raw = nullptr;
    if (redisReaderGetReply(context_->reader, &raw) != REDIS_OK) {
      Lose(std::string("protocol error: ") + context_->reader->errstr);
    } else if (raw != nullptr) {
      next_.push_back(FromHiredis(*static_cast<redisReply*>(raw)));
      freeReplyObject(raw);
    } else if (!WaitReadable(context_->fd, deadline)) {
      return false;
    } else if (redisBufferRead(context_.get()) != REDIS_OK) {
      Lose(context_->errstr);
    }
  }
  return true;
}

}  // namespace turnstile::testing
