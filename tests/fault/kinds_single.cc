// Faults of one server and its clients.

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fault/process_client.h"
#include "fault/proxy.h"
#include "fault/round.h"
#include "fault/small_disk.h"
#include "support/clock.h"
#include "support/dump_payload.h"
#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/ordeals.h"

namespace turnstile::fault {
namespace {

using testing::Client;
using testing::ClockShift;
using testing::Command;
using testing::InfoField;
using testing::Milliseconds;
using testing::Reply;
using testing::Server;
using Args = std::vector<std::string>;
using Marked = Mark::Kind;

constexpr Milliseconds kRewritten{15000};

// --- Nothing ------------------------------------------------------------------------------------

void Quiet(Round& round) {
  Server server;
  const int64_t used = UsedMemory(server);
  round.Start({}, {.port = server.port()});
  while (!round.over()) round.LetWork(50 * kMillisecond, 50 * kMillisecond);
  round.Finish();
  round.CheckMemory(server, used);
}

// --- Restarts -----------------------------------------------------------------------------------

void KillAndRestart(Round& round, Server& server, const std::string& fault) {
  server.Kill9();
  server.Restart();
  round.driver().NewLife();
  round.Count(fault);
}

// A process that is killed loses nothing that it had written to its AOF before it answered.
// Returns when the AOF has been written anew.
void RewriteAof(Client& client) {
  client.Do("BGREWRITEAOF");
  testing::Eventually([&] { return testing::RewritesNoAof(client); }, kRewritten);
}

void RestartWithAof(Round& round) {
  Args args = testing::Aof(round.OneIn(2) ? "yes" : "no");
  if (round.OneIn(2)) args.insert(args.end(), {"--appendfsync", "no"});
  Server server({.args = args});
  round.Start(ForgetfulSessions(), {.port = server.port()});
  while (!round.over()) {
    round.LetWork(20 * kMillisecond, 400 * kMillisecond);
    if (round.OneIn(4)) server.Connect().Do("BGREWRITEAOF");
    KillAndRestart(round, server, "kill -9, AOF");
  }
  round.Finish();
  round.CheckKept(server, [&] { KillAndRestart(round, server, "kill -9, AOF"); });
}

// With everysec a server puts off its writes for up to two seconds while the disk is slow. Tokens
// of that time may be lost, so that restarts have to be further apart than the margin.
void RestartEverySecond(Round& round) {
  Args args = testing::Aof(round.OneIn(2) ? "yes" : "no");
  args.insert(args.end(), kGraceOfShortLeases.begin(), kGraceOfShortLeases.end());
  args.insert(args.end(), {"--appendfsync", "everysec", "--turnstile.token-margin-ms", "300"});
  Server server({.args = args});
  round.Start(ShortLeases(), {.port = server.port()});
  while (!round.over()) {
    round.LetWork(400 * kMillisecond, 4 * kSecond);
    Mark lossy = round.Begin(Marked::kLossy, "killed, the AOF was written late");
    lossy.begin -= 2 * kSecond;
    KillAndRestart(round, server, "kill -9, AOF everysec");
    round.End(lossy);
  }
  round.Finish();
}

void RestartWithNothing(Round& round) {
  Server server({.args = kGraceOfShortLeases});
  round.Start(ShortLeases(), {.port = server.port()});
  while (!round.over()) {
    round.LetWork(20 * kMillisecond, 500 * kMillisecond);
    const Mark lossy = round.Begin(Marked::kLossy, "killed, restarts with nothing");
    KillAndRestart(round, server, "kill -9, nothing kept");
    round.End(lossy);
  }
  round.Finish();
}

// The newest increment of the AOF, or nothing.
std::optional<std::filesystem::path> LastIncrement(const Server& server) {
  std::optional<std::filesystem::path> last;
  for (const auto& entry : std::filesystem::directory_iterator(server.dir() + "/appendonlydir")) {
    const std::string path = entry.path();
    if (!path.ends_with(".incr.aof")) continue;
    // They end with a number, which has a digit more at times.
    if (!last || std::pair(last->string().size(), last->string()) < std::pair(path.size(), path)) {
      last = entry.path();
    }
  }
  return last;
}

// So many bytes at the end may go. The floor that a life begins with has to stay: tokens that lead
// the wall clock by more than the margin may not be lost.
int64_t MayBeCut(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  const std::string content(std::istreambuf_iterator<char>(in), {});
  constexpr std::string_view kFloor = "FLOOR";
  constexpr size_t kNumber = 32;  // its token and all that is around it
  const size_t floor = content.rfind(kFloor);
  if (floor == std::string::npos || floor + kNumber > content.size()) return 0;
  return static_cast<int64_t>(std::min(content.size() - floor - kNumber, size_t{3000}));
}

void CutAof(Round& round) {
  Args args = testing::Aof(round.OneIn(2) ? "yes" : "no");
  args.insert(args.end(), kGraceOfShortLeases.begin(), kGraceOfShortLeases.end());
  Server server({.args = args});
  round.Start(ShortLeases(), {.port = server.port()});
  while (!round.over()) {
    round.LetWork(20 * kMillisecond, 400 * kMillisecond);
    Mark lossy = round.Begin(Marked::kLossy, "the AOF was cut");
    lossy.begin -= 200 * kMillisecond;  // The probers alone write more in that time.
    server.Kill9();
    if (const auto file = LastIncrement(server)) {
      const auto size = static_cast<int64_t>(std::filesystem::file_size(*file));
      const int64_t cut = round.Between(0, MayBeCut(*file));
      std::filesystem::resize_file(*file, static_cast<uintmax_t>(size - cut));
    }
    server.Restart();
    round.driver().NewLife();
    round.Count("AOF cut at a byte");
    round.End(lossy);
    // A transaction that was cut within a command stays open in the file, and swallows what is
    // written behind it (seen on Redis 7.0): the file is written anew.
    Client client = server.Connect();
    RewriteAof(client);
  }
  round.Finish();
}

// --- Saving and loading while clients work ------------------------------------------------------

void Reload(Round& round) {
  Server server({.args = testing::Aof(round.OneIn(2) ? "yes" : "no")});
  round.Start(ForgetfulSessions(), {.port = server.port()});
  Client client = server.Connect();
  while (!round.over()) {
    round.LetWork(10 * kMillisecond, 100 * kMillisecond);
    const Command command = std::array<Command, 6>{
        {{"DEBUG", "RELOAD"},
         {"DEBUG", "LOADAOF"},
         {"BGREWRITEAOF"},
         {"SAVE"},
         {"BGSAVE"},
         {"CONFIG", "SET", "appendonly",
          "no"}}}.at(round.Below(6));
    round.Count(command[0] + (command.size() > 1 ? " " + command[1] : ""));
    client.Do(command);
    if (command[0] == "CONFIG") client.Do("CONFIG", "SET", "appendonly", "yes");
    // Until it has been written anew the AOF is an old one. And the server loses count of its
    // changes if data is loaded during a BGSAVE: it may write DEBUG LOADAOF into the AOF then.
    testing::Eventually(
        [&] {
          return testing::RewritesNoAof(client) &&
                 InfoField(client, "persistence", "rdb_bgsave_in_progress") == "0";
        },
        kRewritten);
    round.driver().NewLife();
  }
  round.Finish();
  round.CheckKept(server, [&] { client.Do("DEBUG", "RELOAD"); });
  round.CheckKept(server, [&] {
    RewriteAof(client);
    KillAndRestart(round, server, "kill -9, AOF");
  });
}

// --- Strangers ----------------------------------------------------------------------------------

class Stranger {
 public:
  Stranger(Round& round, const Server& server) : round_(round), client_(server.Connect()) {}

  void DoSomething() {
    using Deed = void (Stranger::*)();
    static constexpr std::array<Deed, 12> kDeeds = {
        &Stranger::Remove, &Stranger::Remove, &Stranger::Remove,  &Stranger::ChangeTtl,
        &Stranger::Rename, &Stranger::Copy,   &Stranger::Set,     &Stranger::Set,
        &Stranger::Swap,   &Stranger::Move,   &Stranger::Restore, &Stranger::Forge};
    (this->*kDeeds.at(round_.Below(kDeeds.size())))();
  }

 private:
  std::string Name(uint32_t lock) const { return round_.driver().LockName(lock); }
  Time LongestHold() const {
    const Workload& workload = round_.driver().workload();
    return workload.longest_lease + workload.longest_linger + 10 * kMillisecond;
  }

  // A command that may end the hold of this lock, which somebody unknown may then have for a while.
  Reply Force(const Command& command, uint32_t lock, Time held_after = 0) {
    const Mark mark = round_.Begin(Marked::kForced, command[0], lock);
    Reply reply = client_.Do(command);
    round_.End(mark, held_after);
    round_.Count(command[0]);
    return reply;
  }

  void Remove() {
    const uint32_t lock = round_.AnyLock();
    switch (round_.Below(8)) {
      case 0:
        Force({"FLUSHALL"}, kAllLocks);
        break;
      case 1:
        Force({"FLUSHDB", "ASYNC"}, kAllLocks);
        break;
      case 2:
        Force({"UNLINK", Name(lock)}, lock);
        break;
      case 3:
        Force({"PEXPIREAT", Name(lock), "1"}, lock);
        break;
      default:
        Force({"DEL", Name(lock)}, lock);
    }
  }

  // A plain lock has nothing but its TTL.
  bool IsPlain(const std::string& name) {
    return client_.Do("TYPE", name) == Reply::Status("string");
  }

  // The leases decide, whatever happens to the TTL: nothing is marked.
  void ChangeTtl() {
    const std::string name = Name(round_.AnyLock());
    if (IsPlain(name)) return;
    const bool longer = round_.OneIn(2);
    const Reply reply = longer ? client_.Do("EXPIRE", name, 100) : client_.Do("PERSIST", name);
    round_.Expect(reply.IsInteger(), "C8", "unexpected: " + reply.ToString());
    round_.Count(longer ? "EXPIRE" : "PERSIST");
  }

  void Rename() {
    const uint32_t from = round_.AnyLock();
    const uint32_t to = round_.AnyLock();
    if (from == to) return;
    Mark mark = round_.Begin(Marked::kForced, "RENAME", from);
    Force({"RENAME", Name(from), Name(to)}, to, LongestHold());
    round_.End(mark);
  }

  void Copy() {
    const Reply reply = client_.Do("COPY", Name(round_.AnyLock()), "copy", "REPLACE");
    round_.Expect(
        reply.IsError() || reply == Reply::Int(0) || !client_.Do("TYPE", "copy").IsError(), "C8",
        "unexpected: " + reply.ToString());
    round_.Expect(client_.Do("TYPE", "copy") != Reply::Status("turnstile"), "C1",
                  "a lock was copied");
    client_.Do("DEL", "copy");
    round_.Count("COPY");
  }

  void Set() {
    const uint32_t lock = round_.AnyLock();
    const Time px = round_.Between(1, 60);
    Command command = {"SET", Name(lock), "a plain owner", "PX", std::to_string(px)};
    if (round_.OneIn(2)) command.emplace_back("NX");
    Force(command, lock, (px + 5) * kMillisecond);
  }

  // There and back. Meanwhile clients meet the other database's locks.
  void Swap() {
    Mark lossy = round_.Begin(Marked::kLossy, "SWAPDB");
    Mark mark = round_.Begin(Marked::kForced, "SWAPDB");
    client_.Do("SWAPDB", 0, 1);
    round_.LetWork(1 * kMillisecond, 20 * kMillisecond);
    client_.Do("SWAPDB", 0, 1);
    round_.End(mark, LongestHold());
    round_.End(lossy);
    round_.Count("SWAPDB");
  }

  void Move() {
    const uint32_t lock = round_.AnyLock();
    Force({"MOVE", Name(lock), "1"}, lock);
    client_.Do("SELECT", 1);
    client_.Do("DEL", Name(lock));
    client_.Do("SELECT", 0);
  }

  // A hold comes back as it was dumped.
  void Restore() {
    const uint32_t lock = round_.AnyLock();
    if (IsPlain(Name(lock))) return;
    const Reply dump = client_.Do("DUMP", Name(lock));
    if (!dump.IsString()) return;
    round_.LetWork(1 * kMillisecond, 30 * kMillisecond);
    Mark lossy = round_.Begin(Marked::kLossy, "RESTORE", lock);
    const Reply reply =
        Force({"RESTORE", Name(lock), "0", dump.text, "REPLACE"}, lock, LongestHold());
    round_.End(lossy);
    round_.Expect(reply == Reply::Ok(), "C8", "RESTORE of a dump: " + reply.ToString());
  }

  // What only a primary or an AOF may say.
  void Forge() {
    const std::string name = Name(round_.AnyLock());
    const int64_t now = testing::ServerNow(client_);
    const std::string words =
        "9007199254740991 " + std::to_string(now) + " " + std::to_string(now + 60000);
    for (const Command& command : {Command{"LOCK.HELD", name, "forger", words},
                                   Command{"LOCK.FACT", "FLOOR", "9007199254740991"},
                                   Command{"LOCK.FACT", "ENDED", name, "forger"}}) {
      const Reply reply = client_.Do(command);
      round_.Expect(reply.IsError(), "C6", command[0] + " was obeyed: " + reply.ToString());
    }
    round_.Count("LOCK.HELD, LOCK.FACT");
  }

  Round& round_;
  Client client_;
};

void Strangers(Round& round) {
  Server server;
  const int64_t used = UsedMemory(server);
  // RENAME and MOVE take a hold away from its session.
  round.Start(ForgetfulSessions(), {.port = server.port()});
  Stranger stranger(round, server);
  while (!round.over()) {
    round.LetWork(0, 20 * kMillisecond);
    stranger.DoSomething();
  }
  round.Finish();
  round.CheckMemory(server, used);
}

// --- Hostile input ------------------------------------------------------------------------------

std::string Mutated(Round& round, const std::string& dump) {
  auto payload = testing::DumpPayload::Open(dump);
  if (!payload) return dump;
  std::string& body = payload->body;
  for (uint64_t changes = 1 + round.Below(4); changes > 0; changes--) {
    const size_t at = round.Below(body.size());
    switch (round.Below(4)) {
      case 0:
        body[at] = static_cast<char>(body[at] ^ (1 << round.Below(8)));
        break;
      case 1:
        body[at] = static_cast<char>(round.Below(256));
        break;
      case 2:
        if (body.size() > 2) body.resize(1 + round.Below(body.size() - 1));
        break;
      default:
        body.insert(at, 1 + round.Below(9), static_cast<char>(round.Below(256)));
    }
  }
  return payload->Seal();
}

void Hostile(Round& round) {
  Server server;
  const int64_t used = UsedMemory(server);
  round.Start({}, {.port = server.port()});
  Client client = server.Connect();
  const std::string huge(size_t{10} << 20, 'o');
  while (!round.over()) {
    const Reply dump = client.Do("DUMP", round.driver().LockName(round.AnyLock()));
    if (!dump.IsString()) continue;
    for (int i = 0; i < 100; i++) {
      const Reply reply = client.Do("RESTORE", "hostile:" + std::to_string(i), 0,
                                    Mutated(round, dump.text), "REPLACE");
      round.Expect(reply == Reply::Ok() || reply.IsError("ERR") || reply.IsError("BUSYKEY"), "C8",
                   "RESTORE answers " + reply.ToString());
      if (reply == Reply::Ok()) {
        const Reply info = client.Do("LOCK.INFO", "hostile:" + std::to_string(i));
        // It may have become a value of another type.
        round.Expect(info.IsArray() || info.IsNil() || info.IsError("WRONGTYPE"), "C8",
                     "LOCK.INFO: " + info.ToString());
      }
      round.Count("RESTORE of a mutated payload");
    }
    const Command bad = std::array<Command, 5>{
        {{"LOCK.ACQUIRE", "x", huge, "PX", "1000"},
         {"LOCK.ACQUIRE", "x", "o", "PX", "-1"},
         {"LOCK.ACQUIRE", "x", "o", "PX", "99999999999999999999"},
         {"LOCK.ACQUIRE", "x", "o", "PX", "1000", "FLOOR", "9007199254740991"},
         {"LOCK.ACQUIRE", "x", std::string("\0", 1), "PX", "1000",
          "WAIT"}}}.at(round.Below(5));
    const Reply reply = client.Do(bad);
    round.Expect(reply.IsError("ERR"), "C8", "bad input is answered " + reply.ToString());
    round.Count("bad input");
  }
  round.Finish();
  round.CheckMemory(server, used);
}

// --- Clients ------------------------------------------------------------------------------------

// The ids of all connections but our own.
std::vector<std::string> OtherClients(Client& client) {
  std::vector<std::string> ids;
  const std::string own = std::to_string(client.Do("CLIENT", "ID").integer);
  const std::string list = "\n" + client.Do("CLIENT", "LIST").text;
  for (size_t at = list.find("\nid="); at != std::string::npos; at = list.find("\nid=", at + 1)) {
    const std::string id = list.substr(at + 4, list.find(' ', at) - at - 4);
    if (id != own) ids.push_back(id);
  }
  return ids;
}

void KillClients(Round& round) {
  Server server;
  const int64_t used = UsedMemory(server);
  round.Start({}, {.port = server.port()});
  Client client = server.Connect();
  while (!round.over()) {
    round.LetWork(0, 10 * kMillisecond);
    const std::vector<std::string> ids = OtherClients(client);
    if (ids.empty()) continue;
    const std::string& id = ids[round.Below(ids.size())];
    switch (round.Below(12)) {
      case 0:
      case 1:
      case 2:
      case 3:
        client.Do("CLIENT", "KILL", "ID", id);
        round.Count("CLIENT KILL");
        break;
      case 4:
      case 5:
      case 6:
        client.Do("CLIENT", "UNBLOCK", id, "TIMEOUT");
        round.Count("CLIENT UNBLOCK TIMEOUT");
        break;
      case 7:
      case 8:
      case 9:
        client.Do("CLIENT", "UNBLOCK", id, "ERROR");
        round.Count("CLIENT UNBLOCK ERROR");
        break;
      case 10:
        client.Do("CLIENT", "KILL", "TYPE", "normal");
        round.Count("CLIENT KILL of all");
        break;
      default:
        client.Do("CLIENT", "PAUSE", round.Between(5, 120), round.OneIn(2) ? "ALL" : "WRITE");
        round.LetWork(0, 100 * kMillisecond);
        client.Do("CLIENT", "UNPAUSE");
        round.Count("CLIENT PAUSE");
    }
  }
  round.Finish();
  round.CheckMemory(server, used);
}

void PauseServer(Round& round) {
  Server server;
  const int64_t used = UsedMemory(server);
  round.Start({}, {.port = server.port()});
  while (!round.over()) {
    round.LetWork(20 * kMillisecond, 300 * kMillisecond);
    server.Pause();
    round.LetWork(5 * kMillisecond, round.OneIn(5) ? 1500 * kMillisecond : 200 * kMillisecond);
    server.Continue();
    round.Count("SIGSTOP of the server");
  }
  round.Finish();
  round.CheckMemory(server, used);
}

// Clients in processes of their own, stopped for longer than their leases last.
void PauseClients(Round& round) {
  Server server;
  const int64_t used = UsedMemory(server);
  round.Start({}, {.port = server.port()});
  std::vector<ProcessClient> clients;
  for (uint32_t i = 0; i < 3; i++) clients.emplace_back(server.port(), i, round.Below(1 << 30));
  while (!round.over()) {
    ProcessClient& client = clients[round.Below(clients.size())];
    round.LetWork(0, 50 * kMillisecond);
    if (round.OneIn(20)) {
      client.Kill();
      client.Restart();
      round.Count("kill -9 of a client");
      continue;
    }
    client.Stop();
    round.LetWork(20 * kMillisecond, 2 * ProcessClient::kLease);
    client.Continue();
    round.Count("SIGSTOP of a client");
  }
  for (ProcessClient& client : clients) client.Finish();
  round.Finish();
  for (const ProcessClient& client : clients) round.driver().Add(client.history());
  round.CheckMemory(server, used);
}

void LoseReplies(Round& round) {
  Server server;
  const int64_t used = UsedMemory(server);
  Proxy proxy(server.port());
  round.Start(ForgetfulSessions(), {.port = server.port()}, {.port = proxy.port()});
  while (!round.over()) {
    round.LetWork(5 * kMillisecond, 60 * kMillisecond);
    switch (round.Below(8)) {
      case 0:
        proxy.SetReplyDelay(Milliseconds(round.Between(0, 60)));
        round.Count("replies delayed");
        break;
      case 1:
        proxy.SetRequestDelay(Milliseconds(round.Between(0, 60)));
        round.Count("requests delayed");
        break;
      case 2:
        proxy.DropReplies(true);
        round.LetWork(5 * kMillisecond, 100 * kMillisecond);
        proxy.DropReplies(false);
        round.Count("all replies dropped");
        break;
      case 3:
        proxy.Blackhole(true);
        round.LetWork(5 * kMillisecond, 300 * kMillisecond);
        proxy.Blackhole(false);
        round.Count("silence");
        break;
      case 4:
        proxy.Cut();
        round.LetWork(0, 50 * kMillisecond);
        proxy.Heal();
        round.Count("all connections reset");
        break;
      default:
        for (uint64_t i = 1 + round.Below(4); i > 0; i--) {
          proxy.LoseNextReply(round.Below(1000));
          round.Count("one reply lost");
        }
    }
  }
  proxy.SetReplyDelay(Milliseconds{0});
  proxy.SetRequestDelay(Milliseconds{0});
  round.Finish();
  round.CheckMemory(server, used);
}

// --- The wall clock -----------------------------------------------------------------------------

void StepClock(Round& round) {
  ClockShift clock;
  Server server({.environment = clock.environment()});
  const int64_t used = UsedMemory(server);
  round.Start({}, {.port = server.port()});
  Client client = server.Connect();
  Time ahead = 0;
  const auto move = [&](Time to) {
    const Time step = to - std::exchange(ahead, to);
    const Mark mark = round.Begin(Marked::kStep, "the wall clock is moved");
    clock.Set(std::chrono::microseconds(to), client);
    round.End(mark, step);
    round.Count(step > 0 ? "clock forward" : "clock back");
  };
  while (!round.over()) {
    round.LetWork(20 * kMillisecond, 300 * kMillisecond);
    const Time size = round.OneIn(4) ? 5 * kSecond : 200 * kMillisecond;
    move(round.Between(-size, size));
  }
  move(0);
  round.Finish();
  client.Close();
  round.CheckMemory(server, used);
}

// --- Memory and disk ----------------------------------------------------------------------------

void FillMemory(Round& round) {
  static constexpr std::array<const char*, 8> kPolicies = {
      "noeviction",   "allkeys-lru",  "allkeys-lfu",     "allkeys-random",
      "volatile-lru", "volatile-lfu", "volatile-random", "volatile-ttl"};
  Server server;
  const int64_t used = UsedMemory(server);
  round.Start({}, {.port = server.port()});
  Client client = server.Connect();
  const std::string filler(10'000, 'x');
  while (!round.over()) {
    const std::string policy = kPolicies.at(round.Below(kPolicies.size()));
    round.LetWork(20 * kMillisecond, 100 * kMillisecond);
    const Mark mark = round.Begin(Marked::kForced, "eviction under " + policy);
    client.Do("CONFIG", "SET", "maxmemory-policy", policy);
    client.Do("CONFIG", "SET", "maxmemory", UsedMemory(server) + 300'000);
    Command fillers = {"UNLINK"};
    for (const Time until = Now() + round.Between(50, 300) * kMillisecond; Now() < until;) {
      fillers.push_back("filler:" + std::to_string(fillers.size()));
      Command set = {"SET", fillers.back(), filler};
      if (round.OneIn(2)) set.insert(set.end(), {"PX", "100000"});
      client.Do(set);
    }
    client.Do("CONFIG", "SET", "maxmemory", 0);
    if (policy != "noeviction") round.End(mark);
    client.Do(fillers);
    round.Count("memory full, " + policy);
  }
  round.Finish();
  round.CheckMemory(server, used);
}

void FillDisk(Round& round) {
  SmallDisk disk(size_t{24} << 20);
  Server server({.args = {"--appendonly", "yes", "--appendfsync", "no",
                          "--auto-aof-rewrite-percentage", "0", "--save", "3600 1"},
                 .dir = disk.path()});
  round.Start(ForgetfulSessions(), {.port = server.port()});
  Client client = server.Connect();
  while (!round.over()) {
    round.LetWork(100 * kMillisecond, 300 * kMillisecond);
    disk.Fill();
    if (round.OneIn(2)) {
      client.Do("BGSAVE");  // which fails
      round.Count("disk full at BGSAVE");
    } else {
      round.Count("disk full for the AOF");
    }
    round.LetWork(50 * kMillisecond, 1500 * kMillisecond);
    disk.Free();
    // The server tries again to write once a second; a good save ends the refusals of a bad one.
    round.Expect(testing::Eventually(
                     [&] {
                       client.Do("BGSAVE");
                       return InfoField(client, "persistence", "aof_last_write_status") == "ok" &&
                              InfoField(client, "persistence", "rdb_last_bgsave_status") == "ok";
                     },
                     kRewritten),
                 "C4", "the server does not recover from a full disk");
    if (round.OneIn(3)) {
      client.Do("BGREWRITEAOF");
      testing::Eventually([&] { return testing::RewritesNoAof(client); }, kRewritten);
    }
  }
  round.Finish();
  client.Do("BGREWRITEAOF");
  testing::Eventually([&] { return testing::RewritesNoAof(client); }, kRewritten);
  round.CheckKept(server, [&] { KillAndRestart(round, server, "kill -9, AOF"); });
}

}  // namespace

std::vector<Kind> SingleServerKinds() {
  return {
      {"quiet", "no fault but clients that die and pause", &Quiet},
      {"restart", "kill -9 and restart from the AOF", &RestartWithAof},
      {"everysec", "kill -9 and restart from an AOF that is written late, under a grace",
       &RestartEverySecond},
      {"empty-restart", "kill -9 and restart with nothing, under a grace", &RestartWithNothing},
      {"aof-cut", "kill -9, the AOF cut at any byte, restart, under a grace", &CutAof},
      {"reload", "DEBUG RELOAD, LOADAOF, saves, rewrites, AOF off and on", &Reload},
      {"other-commands", "DEL, FLUSHALL, RENAME, SET, SWAPDB, RESTORE, forged facts, ...",
       &Strangers},
      {"hostile", "mutated payloads and bad input", &Hostile},
      {"kill-clients", "CLIENT KILL, UNBLOCK and PAUSE", &KillClients},
      {"pause-server", "SIGSTOP of the server", &PauseServer},
      {"pause-client", "SIGSTOP of clients past their leases, kill -9 of clients", &PauseClients},
      {"lost-replies", "a proxy that drops, delays and resets", &LoseReplies},
      {"clock", "steps of the wall clock, up to 5 s forward and back", &StepClock},
      {"memory", "maxmemory under every policy", &FillMemory},
      {"disk", "a full disk for AOF and RDB", &FillDisk, &SmallDisk::WhyNot},
  };
}

}  // namespace turnstile::fault
