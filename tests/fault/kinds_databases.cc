// Locks that wander between databases while clients in several of them work.

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "fault/round.h"
#include "support/client.h"
#include "support/eventually.h"
#include "support/reply.h"
#include "support/server.h"

namespace turnstile::fault {
namespace {

using testing::Client;
using testing::Command;
using testing::Reply;
using testing::Server;
using Marked = Mark::Kind;

constexpr uint32_t kDatabases = 3;         // in which clients work,
constexpr uint32_t kAll = kDatabases + 1;  // and one in which nobody does

class DatabaseStorm {
 public:
  DatabaseStorm(Round& round, const Server& server) : round_(round), client_(server.Connect()) {}

  void DoSomething() {
    using Deed = void (DatabaseStorm::*)();
    static constexpr std::array<Deed, 8> kDeeds = {
        &DatabaseStorm::Swap, &DatabaseStorm::Swap,   &DatabaseStorm::Move, &DatabaseStorm::Move,
        &DatabaseStorm::Move, &DatabaseStorm::Rename, &DatabaseStorm::Copy, &DatabaseStorm::Flush};
    (this->*kDeeds.at(round_.Below(kDeeds.size())))();
  }

 private:
  uint32_t AnyDatabase() { return static_cast<uint32_t>(round_.Below(kAll)); }
  uint32_t AnotherDatabase(uint32_t database) {
    return (database + 1 + static_cast<uint32_t>(round_.Below(kAll - 1))) % kAll;
  }
  uint32_t AnyNumber() {
    return static_cast<uint32_t>(round_.Below(round_.driver().workload().locks));
  }
  // Of a lock that is held there, if there are any.
  uint32_t HeldNumber(uint32_t database) {
    client_.Do("SELECT", database);
    uint32_t number = AnyNumber();
    for (int tries = 0; tries < 12 && client_.Do("EXISTS", Name(number)) == Reply::Int(0);
         tries++) {
      number = AnyNumber();
    }
    return number;
  }
  uint32_t LockIn(uint32_t database, uint32_t number) const {
    return database * round_.driver().workload().locks + number;
  }
  std::string Name(uint32_t number) const { return round_.driver().LockName(number); }

  // What was elsewhere may keep others out for so long.
  Time LongestHold() const {
    const Workload& workload = round_.driver().workload();
    return workload.longest_lease + workload.longest_linger + 10 * kMillisecond;
  }

  // Does that in a database. Holds of these locks may end by it, and others may come.
  Reply Force(uint32_t database, const Command& command, const std::vector<uint32_t>& locks) {
    const std::string& what = command[0];
    const Mark mark = round_.Begin(Marked::kForced, what);
    client_.Do("SELECT", database);
    Reply reply = client_.Do(command);
    for (const uint32_t lock : locks) {
      if (lock >= round_.driver().locks()) continue;  // where nobody works
      // What comes back may be as old as if writes had been lost.
      Mark forced = mark;
      forced.lock = lock;
      Mark lossy = forced;
      lossy.kind = Marked::kLossy;
      round_.End(std::move(forced), LongestHold());
      round_.End(std::move(lossy));
    }
    const bool refused = what == "COPY" && reply.IsError("ERR");
    round_.Expect(!reply.IsError() || refused || reply.text.starts_with("ERR no such key"), "C8",
                  what + " is answered " + reply.ToString());
    // Of what there is nothing to be done with, nothing is said.
    if (refused || !(reply.IsError() || reply == Reply::Int(0))) round_.Count(what);
    return reply;
  }

  std::vector<uint32_t> AllIn(uint32_t database) const {
    std::vector<uint32_t> locks;
    const uint32_t count = round_.driver().workload().locks;
    for (uint32_t number = 0; number < count; number++) locks.push_back(LockIn(database, number));
    return locks;
  }

  void Swap() {
    const uint32_t one = AnyDatabase();
    const uint32_t other = AnotherDatabase(one);
    std::vector<uint32_t> locks = AllIn(one);
    for (const uint32_t lock : AllIn(other)) locks.push_back(lock);
    Force(one, {"SWAPDB", std::to_string(one), std::to_string(other)}, locks);
  }

  void Move() {
    const uint32_t from = AnyDatabase();
    const uint32_t to = AnotherDatabase(from);
    const uint32_t number = HeldNumber(from);
    Force(from, {"MOVE", Name(number), std::to_string(to)},
          {LockIn(from, number), LockIn(to, number)});
  }

  void Rename() {
    const uint32_t database = AnyDatabase();
    const uint32_t from = HeldNumber(database);
    const uint32_t to = AnyNumber();
    if (from == to) return;
    const bool if_free = round_.OneIn(2);
    Force(database, {if_free ? "RENAMENX" : "RENAME", Name(from), Name(to)},
          {LockIn(database, from), LockIn(database, to)});
  }

  // A lock is never copied. To a place where nobody works, so that it shows.
  void Copy() {
    const uint32_t from = static_cast<uint32_t>(round_.Below(kDatabases));
    const std::string name = Name(HeldNumber(from));
    Force(from, {"COPY", name, "copy of " + name, "DB", std::to_string(kDatabases), "REPLACE"}, {});
    client_.Do("SELECT", kDatabases);
    round_.Expect(client_.Do("TYPE", "copy of " + name) != Reply::Status("turnstile"), "C1",
                  "a lock was copied to another database");
    client_.Do("DEL", "copy of " + name);
  }

  void Flush() {
    if (!round_.OneIn(4)) return Swap();
    const uint32_t database = AnyDatabase();
    Command command = {"FLUSHDB"};
    if (round_.OneIn(2)) command.emplace_back("ASYNC");
    Force(database, command, AllIn(database));
  }

  Round& round_;
  Client client_;
};

// What other commands do to a line, in two databases where nobody else works: who waits is served
// when the holder's lock is gone, and the holder has it where it went.
class LineOfItsOwn {
 public:
  LineOfItsOwn(Round& round, const Server& server) : round_(round), server_(server) {}

  void Check() {
    Client client = ConnectTo(kHere);
    Client blocked = ConnectTo(kHere);
    Client listener = server_.Connect();
    listener.Do("SUBSCRIBE", "own");
    const Reply token =
        client.Do("LOCK.ACQUIRE", "own", "keeper", "PX", 9000, "NOTIFY", "own", "keeper");
    blocked.Send("LOCK.ACQUIRE", "own", "first", "PX", 9000, "WAIT", 9000);
    AwaitLine(client, 1);
    client.Do("LOCK.ACQUIRE", "own", "second", "PX", 9000, "WAIT", 9000, "NOTIFY", "own", "id");
    AwaitLine(client, 2);
    const Command command = std::array<Command, 4>{
        {{"SWAPDB", std::to_string(kHere), std::to_string(kThere)},
         {"MOVE", "own", std::to_string(kThere)},
         {"RENAME", "own", "away"},
         {"FLUSHDB"}}}.at(round_.Below(4));
    what_ = command[0];
    const Reply done = client.Do(command);
    Expect(!done.IsError(), "is answered", done);
    const Reply granted = blocked.Read(kAtOnce);
    Expect(granted.IsInteger(), "the first in line is told", granted);
    Expect(granted.integer > token.integer, "the token is no higher", granted);
    Expect(client.Do("LOCK.RELEASE", "own", "first") == Reply::Int(1), "cannot be released",
           granted);
    ExpectMessage(listener, "id granted ");
    if (what_ != "FLUSHDB") {
      const std::string name = what_ == "RENAME" ? "away" : "own";
      Client there = ConnectTo(what_ == "RENAME" ? kHere : kThere);
      const Reply kept = there.Do("LOCK.FENCE", name);
      Expect(kept == token, "the holder has, where its lock went,", kept);
      there.Do("EXPIRE", name, 1000);
      Reply left;
      Expect(testing::Eventually([&] {
               left = there.Do("PTTL", name);
               return left.integer > 0 && left.integer <= 9000;
             }),
             "a TTL is not set back", left);
      there.Do("DEL", name);
    }
    ExpectMessage(listener, "keeper lost ");
    for (const uint32_t database : {kHere, kThere}) ConnectTo(database).Do("FLUSHDB");
    round_.Count(what_);
  }

 private:
  static constexpr uint32_t kHere = kAll;
  static constexpr uint32_t kThere = kAll + 1;
  static constexpr testing::Milliseconds kAtOnce{2000};

  Client ConnectTo(uint32_t database) {
    Client client = server_.Connect();
    client.Do("SELECT", database);
    return client;
  }

  void AwaitLine(Client& client, int length) {
    testing::Eventually(
        [&] { return client.Do("LOCK.INFO", "own").Field("waiting") == Reply::Int(length); });
  }

  void Expect(bool good, const std::string& text, const Reply& reply) {
    round_.Expect(good, "C4", what_ + ": " + text + " " + reply.ToString());
  }

  // The next one begins so, or the one after it.
  void ExpectMessage(Client& listener, const std::string& begin) {
    if (std::erase_if(early_, [&](const std::string& text) { return text.starts_with(begin); }) >
        0) {
      return;
    }
    Reply reply;
    for (int messages = 0; messages < 2; messages++) {
      reply = listener.Read(kAtOnce);
      if (!reply.IsArray() || reply.elements.empty()) break;
      const std::string& text = reply.elements.back().text;
      if (text.starts_with(begin)) return;
      early_.push_back(text);
    }
    Expect(false, "instead of \"" + begin + "\" comes", reply);
  }

  Round& round_;
  const Server& server_;
  std::string what_;
  std::vector<std::string> early_;
};

// Calm times are as long as leases: then everything is certain again.
void SeveralDatabases(Round& round) {
  Server server;
  const int64_t used = UsedMemory(server);
  Workload workload = ForgetfulSessions();  // RENAME and MOVE take a hold away from its session
  workload.databases = kDatabases;
  workload.workers = 36;
  workload.locks = 12;
  round.Start(workload, {.port = server.port()});
  DatabaseStorm storm(round, server);
  while (!round.over()) {
    round.LetWork(0, 400 * kMillisecond);
    LineOfItsOwn(round, server).Check();
    for (uint64_t deeds = 1 + round.Below(24); deeds > 0; deeds--) {
      storm.DoSomething();
      if (round.OneIn(2)) round.LetWork(0, 5 * kMillisecond);
    }
  }
  round.Finish();
  round.CheckMemory(server, used);
}

}  // namespace

std::vector<Kind> DatabaseKinds() {
  return {
      {"several-databases",
       "SWAPDB, MOVE, RENAME, COPY and FLUSHDB, with clients in three databases",
       &SeveralDatabases},
  };
}

}  // namespace turnstile::fault
