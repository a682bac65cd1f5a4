// Starts on append-only files that were cut or damaged.
//
// A cut file must give the state after its last whole command, or before the MULTI whose EXEC is
// missing. What that state is follows from the commands themselves, read by a few naive rules.

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <future>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "files.h"
#include "support/aof.h"
#include "support/lock_test.h"
#include "support/ordeals.h"
#include "support/reply.h"
#include "support/resp3.h"

namespace turnstile::testing {
namespace {

constexpr size_t kTail = size_t{64} * 1024;
constexpr size_t kWorkers = 2;

// --- What the commands of a file say --------------------------------------------------------

struct StoredHold {
  int64_t token = 0;
  int64_t end = 0;
  int64_t linger = 0;
  int64_t count = 1;
};

struct StoredKey {
  std::optional<std::string> text;  // of a string
  int64_t text_end = 0;             // 0: none
  std::string mode;                 // of a lock
  std::map<std::string, StoredHold> holds;

  int64_t closes() const {
    int64_t last = 0;
    for (const auto& [owner, hold] : holds) last = std::max(last, hold.end + hold.linger);
    return last;
  }
};

using State = std::map<std::string, StoredKey>;

void ApplyHeld(State& state, const Command& fact) {
  const HeldNumbers numbers = NumbersOf(fact);
  StoredHold hold{.token = numbers.token, .end = numbers.end};
  std::string mode = "exclusive";
  for (size_t i = 4; i < fact.size(); i++) {
    if (fact[i] == "SHARED") mode = "shared";
    if (fact[i] == "LIMIT") mode = "limit";
    if (fact[i] == "COUNT") hold.count = std::stoll(fact[++i]);
    if (fact[i] == "LINGER") hold.linger = std::stoll(fact[++i]);
  }
  StoredKey& key = state[fact[1]];
  if (mode == "exclusive" || key.mode != mode) key = {};
  key.mode = mode;
  key.holds[fact[2]] = hold;
}

void EndHold(State& state, const std::string& key, const std::string& owner) {
  const auto found = state.find(key);
  if (found == state.end()) return;
  found->second.holds.erase(owner);
  if (found->second.holds.empty()) state.erase(found);
}

void EndExpired(State& state, const std::string& key, int64_t before) {
  const auto found = state.find(key);
  if (found == state.end()) return;
  std::erase_if(found->second.holds,
                [&](const auto& hold) { return hold.second.end + hold.second.linger < before; });
  if (found->second.holds.empty()) state.erase(found);
}

void Apply(State& state, const Command& command) {
  const std::string& name = command[0];
  if (name == "LOCK.HELD") {
    ApplyHeld(state, command);
  } else if (name == "LOCK.FACT" && command[1] == "ENDED") {
    EndHold(state, command[2], command[3]);
  } else if (name == "LOCK.FACT" && command[1] == "EXPIRED") {
    EndExpired(state, command[2], std::stoll(command[3]));
  } else if (name == "LOCK.RELEASE") {
    Require(command.size() == 3, "a release of several locks in a file");
    if (--state[command[1]].holds[command[2]].count <= 0) EndHold(state, command[1], command[2]);
  } else if (name == "DEL" || name == "UNLINK") {
    for (size_t i = 1; i < command.size(); i++) state.erase(command[i]);
  } else if (name == "SET") {
    StoredKey& key = state[command[1]];
    key = {};
    key.text = command[2];
    if (command.size() == 5 && command[3] == "PXAT") key.text_end = std::stoll(command[4]);
  } else if (name == "PEXPIREAT") {
    // Of a lock the leases decide.
    if (state[command[1]].text.has_value()) state[command[1]].text_end = std::stoll(command[2]);
  } else if (name == "RENAME") {
    state[command[2]] = state[command[1]];
    state.erase(command[1]);
  } else {
    const bool known = name == "SELECT" || name == "MULTI" || name == "EXEC" ||
                       (name == "LOCK.FACT" && command[1] == "FLOOR");
    Require(known, "a file with a command that is not known here: " + name);
  }
}

// --- A file ----------------------------------------------------------------------------------

struct Written {
  size_t end;  // where the command ends in the file
  Command command;
};

// The files of a server that has stopped, and what they say.
struct AofFiles {
  std::map<std::string, std::string> others;  // the base and the manifest
  std::string name;                           // of the last increment
  std::string bytes;
  State base;
  std::vector<Written> commands;
  std::set<std::string> keys;

  void WriteTo(const std::string& dir, std::string_view increment) const {
    const std::filesystem::path folder = dir;
    for (const auto& [other, content] : others) WriteWhole(folder / other, content);
    WriteWhole(folder / name, increment);
  }

  // After the last whole command before `cut`.
  State StateAt(size_t cut) const {
    State state = base;
    std::optional<State> before_multi;
    for (const Written& written : commands) {
      if (written.end > cut) break;
      if (written.command[0] == "MULTI") before_multi = state;
      if (written.command[0] == "EXEC") before_multi.reset();
      Apply(state, written.command);
    }
    return before_multi.value_or(state);
  }
};

std::vector<Written> ParseWritten(const std::string& bytes) {
  std::vector<Written> commands;
  std::string_view rest = bytes;
  while (!rest.empty()) {
    size_t size = 0;
    const auto command = ParseReply(rest, Protocol::kResp2, &size);
    Require(command.has_value() && command->IsArray(), "the file does not end with a command");
    rest.remove_prefix(size);
    commands.push_back({bytes.size() - rest.size(), command->Texts()});
  }
  return commands;
}

// One of a history of all that can happen to a few locks. Most leases last.
void DoSomething(Server& server, Client& client, Random& random) {
  const std::string key = "job " + std::to_string(random.Below(9));
  const std::string owner = "owner " + std::to_string(random.Below(6));
  const std::string lease = random.OneIn(8) ? "2" : std::to_string(kHour + random.Below(1000));
  Command acquire = {"LOCK.ACQUIRE", key, owner, "PX", lease};
  const uint64_t mode = random.Below(4);
  if (mode == 1) acquire.emplace_back("SHARED");
  if (mode == 2) acquire.insert(acquire.end(), {"LIMIT", "3"});
  if (mode != 2 && random.OneIn(3)) acquire.emplace_back("REENTRANT");
  if (random.OneIn(4)) acquire.insert(acquire.end(), {"LINGER", random.OneIn(3) ? lease : "3"});
  if (mode == 3) {
    const std::string other = "job " + std::to_string(random.Below(9));
    if (other != key) acquire.insert(acquire.end(), {"ALSO", "1", other});
  }
  switch (random.Below(16)) {
    case 0:
    case 1:
    case 2:
      client.Do("LOCK.TOUCH", key, owner, "PX", lease);
      return;
    case 3:
    case 4:
    case 5:
      client.Do("LOCK.RELEASE", key, owner);
      return;
    case 6:
      if (random.OneIn(4)) client.Do("DEL", key);
      return;
    case 7:
      if (random.OneIn(4)) client.Do("SET", key, owner, "PX", lease);
      return;
    case 8:
      if (random.OneIn(8)) client.Do("RENAME", key, "job 0");
      return;
    case 9: {
      client.Do("MULTI");
      client.Do(acquire);
      client.Do("LOCK.TOUCH", key, owner, "PX", kHour);
      client.Do("LOCK.RELEASE", "job 1", owner);
      client.Do("EXEC");
      return;
    }
    case 10: {  // handed over, or in vain
      Client waiter = server.Connect();
      acquire.insert(acquire.end(), {"WAIT", "5"});
      waiter.Send(acquire);
      client.Do("LOCK.RELEASE", key, "owner 1");
      waiter.Read();
      return;
    }
    default:
      client.Do(acquire);
  }
}

AofFiles MakeFiles(uint64_t seed, const char* preamble, size_t size) {
  Server server({.args = Aof(preamble)});
  Client client = server.Connect();
  Random random(seed);
  const std::string dir = server.dir() + "/appendonlydir";
  for (const Command& maker : Makers()) client.Do(maker);
  for (int i = 0; i < 30; i++) DoSomething(server, client, random);
  // Nothing goes by itself any more, so that the base is what the file says now.
  client.Do("SET", "quiet", "yes");
  Require(Eventually([&] { return std::filesystem::exists(dir); }), "no AOF");
  AofFiles files;
  const auto read_base = [&] {
    files.base.clear();
    for (const Command& command : ReadAof(server.dir())) Apply(files.base, command);
    return files.base.size();
  };
  const auto is_quiet = [&] {
    const int64_t kept = client.Do("DBSIZE").integer;
    return static_cast<int64_t>(read_base()) == kept;
  };
  Require(Eventually(is_quiet), "the file and the server do not agree on the keys");
  RewriteAof(server);

  for (const auto& entry : std::filesystem::directory_iterator(dir)) {
    const std::string name = entry.path().filename();
    if (name.ends_with(".incr.aof")) files.name = name;
  }
  while (std::filesystem::file_size(dir + "/" + files.name) < size) {
    DoSomething(server, client, random);
  }
  server.Kill9();
  for (const auto& entry : std::filesystem::directory_iterator(dir)) {
    const std::string name = entry.path().filename();
    (name == files.name ? files.bytes : files.others[name]) = ReadWhole(entry.path());
  }
  files.commands = ParseWritten(files.bytes);
  for (const auto& [key, stored] : files.base) files.keys.insert(key);
  State state = files.base;
  for (const Written& written : files.commands) {
    Apply(state, written.command);
    for (const auto& [key, stored] : state) files.keys.insert(key);
  }
  return files;
}

// --- What the server says --------------------------------------------------------------------

int64_t WallNow() {
  return std::chrono::duration_cast<Milliseconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

void CompareLock(const StoredKey& stored, const Reply& info, const Reply& end,
                 const std::string& story) {
  const int64_t now = WallNow();
  if (stored.closes() < now) return Require(info.IsNil(), story + "it should be over");
  Require(end == Reply::Int(stored.closes()), story + "its TTL is " + end.ToString());
  Require(info.Field("mode") == Reply::Str(stored.mode), story + "the mode differs");
  size_t live = 0;
  for (const auto& [owner, hold] : stored.holds) live += hold.end >= now ? 1 : 0;
  const std::vector<Reply> holders = info.Field("holders").elements;
  Require(holders.size() == live, story + "so many should hold it: " + std::to_string(live));
  for (const Reply& holder : holders) {
    const auto found = stored.holds.find(holder.Field("owner").text);
    Require(found != stored.holds.end(), story + "a holder too many");
    const StoredHold& hold = found->second;
    Require(holder.Field("token") == Reply::Int(hold.token), story + "a token differs");
    Require(holder.Field("count") == Reply::Int(hold.count), story + "a count differs");
    Require(holder.Field("linger-ms") == Reply::Int(hold.linger), story + "a linger differs");
    const int64_t late = hold.end - now - holder.Field("lease-left-ms").integer;
    Require(std::abs(late) < 2000, story + "a lease ends at another time");
  }
}

void Compare(const State& expected, const std::set<std::string>& keys, Server& server) {
  RawConnection raw = server.ConnectRaw();
  std::string bytes;
  for (const std::string& key : keys) {
    for (const char* command : {"LOCK.INFO", "GET", "PEXPIRETIME"}) {
      bytes += EncodeCommand({command, key});
    }
  }
  raw.WriteRaw(bytes);
  for (const std::string& key : keys) {
    const Reply info = raw.ReadReply();
    const Reply text = raw.ReadReply();
    const Reply end = raw.ReadReply();
    const std::string story = Quoted(key) + ", " + info.ToString() + ": ";
    const auto found = expected.find(key);
    if (found == expected.end()) {
      Require(info.IsNil() && text.IsNil(), story + "it should not be there");
    } else if (!found->second.text.has_value()) {
      CompareLock(found->second, info, end, story);
    } else if (found->second.text_end == 0 || found->second.text_end > WallNow()) {
      Require(text == Reply::Str(*found->second.text), story + "the string differs");
    } else {
      Require(text.IsNil(), story + "the string should be over");
    }
  }
}

// --- Cuts ------------------------------------------------------------------------------------

std::vector<size_t> ChooseCuts(const AofFiles& files, const FilesOptions& options, bool all) {
  std::vector<size_t> cuts;
  const size_t size = files.bytes.size();
  if (all) {
    for (size_t cut = size - kTail; cut <= size; cut++) cuts.push_back(cut);
    return cuts;
  }
  if (options.files == 0) return cuts;
  for (size_t back = 0; back < 50; back++) cuts.push_back(size - back);
  Random random(options.seed);
  for (int64_t i = 0; i < options.files; i++) cuts.push_back(size - random.Below(kTail));
  return cuts;
}

std::vector<std::string> LoadingOptions() {
  return {"--appendonly", "yes", "--appendfsync", "no", "--auto-aof-rewrite-percentage", "0"};
}

void RunCuts(const AofFiles& files, const std::vector<size_t>& cuts, std::atomic<size_t>& next) {
  Server server({.args = LoadingOptions()});
  server.options().must_start = false;
  const std::string dir = server.dir() + "/appendonlydir";
  Table unused;
  for (size_t i = next++; i < cuts.size(); i = next++) {
    const size_t cut = cuts[i];
    server.Kill9();
    files.WriteTo(dir, std::string_view(files.bytes).substr(0, cut));
    try {
      Require(StartOnDamaged(server, unused, "AOF"), "it does not start:\n" + server.Log());
      Compare(files.StateAt(cut), files.keys, server);
      CheckLog(server);
    } catch (const std::exception& violation) {
      next = cuts.size();
      const std::string kept = KeptAs("violation-aof");
      std::filesystem::create_directories(kept);
      files.WriteTo(kept, std::string_view(files.bytes).substr(0, cut));
      Report("AOF, cut after byte " + std::to_string(cut), kept, violation.what());
    }
    if (cuts.size() > 5000 && i % 5000 == 0) std::printf("cut %zu of %zu\n", i, cuts.size());
  }
  server.Kill9();
}

void RunDamaged(const AofFiles& files, const FilesOptions& options, const std::string& name,
                Table& table) {
  Server server({.args = LoadingOptions()});
  server.options().must_start = false;
  const std::string dir = server.dir() + "/appendonlydir";
  Random random(options.seed + 3);
  for (int64_t i = 0; i < options.files; i++) {
    server.Kill9();
    // Two damages in one, because most of the first kind end the start.
    const size_t at = random.Below(files.bytes.size());
    std::string damaged = files.bytes;
    if (random.OneIn(2)) {
      damaged[at] = static_cast<char>(damaged[at] ^ 1 << random.Below(8));
    } else {
      damaged = damaged.substr(0, at) + Damaged(damaged.substr(at), files.bytes, random);
    }
    files.WriteTo(dir, damaged);
    try {
      if (!StartOnDamaged(server, table, name + ", damaged")) continue;
      Client client = server.Connect();
      CheckAllLocks(client, Ttl::kAny);
      CheckLog(server);
    } catch (const std::exception& violation) {
      const std::string kept = KeptAs("violation-aof");
      std::filesystem::create_directories(kept);
      files.WriteTo(kept, damaged);
      Report(name + ", damaged file " + std::to_string(i), kept, violation.what());
    }
  }
  server.Kill9();
}

}  // namespace

void RunAofFiles(const FilesOptions& options, Table& table) {
  if (options.files == 0 && !options.all_cuts) return;
  for (const char* preamble : {"no", "yes"}) {
    const std::string name = std::string("AOF, base ") + (*preamble == 'y' ? "an RDB" : "an AOF");
    const AofFiles files = MakeFiles(options.seed, preamble, kTail + 2000);
    const bool all = options.all_cuts && *preamble == 'n';
    const std::vector<size_t> cuts = ChooseCuts(files, options, all);
    std::atomic<size_t> next = 0;
    std::vector<std::future<void>> workers;
    for (size_t i = 0; i < kWorkers; i++) {
      workers.push_back(std::async(std::launch::async, [&] { RunCuts(files, cuts, next); }));
    }
    for (std::future<void>& worker : workers) worker.wait();
    for (std::future<void>& worker : workers) worker.get();
    table.Add(name + ", cut: loaded, as its whole commands say", static_cast<int64_t>(cuts.size()));
    table.Add(name + ", commands in the file", static_cast<int64_t>(files.commands.size()));
    RunDamaged(files, options, name, table);
  }
}

}  // namespace turnstile::testing
