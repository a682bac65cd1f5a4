#include "support/aof.h"

#include <fstream>
#include <sstream>
#include <string_view>

#include "support/resp3.h"

namespace turnstile::testing {
namespace {

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw ProtocolError("cannot open " + path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace

std::vector<Command> ParseAof(const std::string& bytes) {
  std::vector<Command> commands;
  std::string_view rest = bytes;
  while (!rest.empty()) {
    size_t size = 0;
    if (rest[0] == '#') {
      size = rest.find('\n');
      if (size == std::string_view::npos) throw ProtocolError("AOF ends inside an annotation");
      size++;
    } else {
      const auto command = ParseReply(rest, Protocol::kResp2, &size);
      if (!command) throw ProtocolError("AOF ends inside a command: " + Quoted(rest));
      if (!command->IsArray()) throw ProtocolError("not a command: " + command->ToString());
      commands.push_back(command->Texts());
    }
    rest.remove_prefix(size);
  }
  return commands;
}

Command HeldCommand(const std::string& key, const std::string& owner, const HeldNumbers& numbers,
                    const Command& details) {
  Command held = {"LOCK.HELD", key, owner,
                  std::to_string(numbers.token) + ' ' + std::to_string(numbers.since) + ' ' +
                      std::to_string(numbers.end)};
  held.insert(held.end(), details.begin(), details.end());
  return held;
}

HeldNumbers NumbersOf(const Command& held) {
  HeldNumbers numbers;
  if (held.size() >= 4 && held[0] == "LOCK.HELD") {
    std::istringstream words(held[3]);
    words >> numbers.token >> numbers.since >> numbers.end;
    const Command details(held.begin() + 4, held.end());
    if (held == HeldCommand(held[1], held[2], numbers, details)) return numbers;
  }
  throw ProtocolError("not LOCK.HELD: " + (held.empty() ? "nothing" : Quoted(held[0])));
}

std::vector<Command> ReadAof(const std::string& dir) {
  const std::string folder = dir + "/appendonlydir/";
  std::istringstream manifest(ReadFile(folder + "appendonly.aof.manifest"));
  std::vector<Command> commands;
  std::string line;
  while (std::getline(manifest, line)) {
    // file NAME seq NUMBER type b|h|i, where h is history: superseded and about to be deleted.
    std::istringstream words(line);
    std::string file, name, seq, number, type, kind;
    words >> file >> name >> seq >> number >> type >> kind;
    if (file.empty() || file[0] == '#') continue;
    if (file != "file" || type != "type") throw ProtocolError("AOF manifest: " + Quoted(line));
    if (kind == "h") continue;
    const std::string bytes = ReadFile(folder + name);
    if (bytes.starts_with("REDIS") || bytes.starts_with("VALKEY")) continue;  // an RDB
    std::vector<Command> more = ParseAof(bytes);
    commands.insert(commands.end(), more.begin(), more.end());
  }
  return commands;
}

Command LastInAof(const std::string& dir) {
  const std::vector<Command> commands = ReadAof(dir);
  return commands.empty() ? Command{} : commands.back();
}

}  // namespace turnstile::testing
