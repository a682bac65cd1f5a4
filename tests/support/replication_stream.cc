#include "support/replication_stream.h"

#include <strings.h>

#include <algorithm>
#include <string>

namespace turnstile::testing {
namespace {

constexpr Milliseconds kSyncWithin{20000};
constexpr Milliseconds kAcknowledgeEvery{50};

// The primary keeps a waiting replica alive with bare newlines.
std::string SkipNewlines(RawConnection& connection) {
  for (;;) {
    const std::string line = connection.ReadUntil("\n", kSyncWithin);
    if (!line.empty()) return line.substr(0, line.find('\r'));
  }
}

bool Is(const Command& command, const char* name) {
  return !command.empty() && strcasecmp(command[0].c_str(), name) == 0;
}

bool IsFloor(const Command& command) {
  return Is(command, "LOCK.FACT") && command.size() == 3 && command[1] == "FLOOR";
}

}  // namespace

ReplicationStream::ReplicationStream(int port, Options options)
    : connection_(port), options_(options) {
  Command capabilities = {"REPLCONF", "capa", "psync2"};
  if (options.diskless) capabilities.insert(capabilities.end(), {"capa", "eof"});
  if (const Reply reply = connection_.Do(capabilities); reply != Reply::Ok()) {
    throw ProtocolError("REPLCONF: " + reply.ToString());
  }

  connection_.SendCommand({"PSYNC", "?", "-1"});
  const std::string answer = SkipNewlines(connection_);  // +FULLRESYNC <id> <offset>
  if (!answer.starts_with("+FULLRESYNC ")) throw ProtocolError("PSYNC: " + answer);
  offset_ = std::stoull(answer.substr(answer.rfind(' ') + 1));

  const std::string framing = SkipNewlines(connection_);
  if (framing.starts_with("$EOF:")) {
    connection_.ReadUntil(framing.substr(5), kSyncWithin);
  } else if (framing.starts_with("$")) {
    connection_.ReadExactly(std::stoull(framing.substr(1)), kSyncWithin);  // no CR LF follows
  } else {
    throw ProtocolError("neither $<length> nor $EOF: " + Quoted(framing));
  }
  base_ = connection_.consumed();
  Acknowledge();
}

void ReplicationStream::Acknowledge() {
  const uint64_t offset = offset_ + (connection_.consumed() - base_);
  connection_.SendCommand({"REPLCONF", "ACK", std::to_string(offset)});
}

Command ReplicationStream::Next(Milliseconds within) {
  const auto deadline = Clock::now() + within;
  for (;;) {
    // After a diskless sync the primary holds the stream back until it has reaped its child and
    // then receives an acknowledgement. That moment is not visible here, so the acknowledgement is
    // repeated, as replicas do.
    while (!connection_.Readable(
        std::min(kAcknowledgeEvery, std::chrono::ceil<Milliseconds>(deadline - Clock::now())))) {
      if (Clock::now() >= deadline) return {};
      Acknowledge();
    }
    const Reply reply = connection_.ReadReply();
    if (!reply.IsArray()) throw ProtocolError("not a command: " + reply.ToString());
    Command command = reply.Texts();
    if (Is(command, "REPLCONF")) {
      Acknowledge();
    } else if (Is(command, "SELECT") && command.size() == 2) {
      db_ = std::stoi(command[1]);
      if (options_.show_select) return command;
    } else if (!Is(command, "PING") && !IsFloor(command)) {
      return command;
    }
  }
}

std::vector<Command> ReplicationStream::Until(Client& client) {
  // PUBLISH is replicated, but changes no key and is not written to the AOF.
  const Command marker = {"PUBLISH", "replication-stream", std::to_string(++markers_)};
  if (const Reply reply = client.Do(marker); !reply.IsInteger()) {
    throw ProtocolError("PUBLISH: " + reply.ToString());
  }
  std::vector<Command> commands;
  for (;;) {
    Command command = Next();
    if (command.empty()) throw ConnectionError("the marker did not come through the stream");
    if (command == marker) break;
    commands.push_back(std::move(command));
  }
  // A SELECT just before the marker belongs to the marker.
  if (!commands.empty() && Is(commands.back(), "SELECT")) commands.pop_back();
  return commands;
}

}  // namespace turnstile::testing
