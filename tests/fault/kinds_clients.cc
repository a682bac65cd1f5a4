// Clients whose rights change, and clients that are not heard of, or hear nothing, for a while.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "fault/proxy.h"
#include "fault/round.h"
#include "support/client.h"
#include "support/eventually.h"
#include "support/reply.h"
#include "support/server.h"

namespace turnstile::fault {
namespace {

using testing::Client;
using testing::Command;
using testing::Eventually;
using testing::Milliseconds;
using testing::Reply;
using testing::Server;
using Marked = Mark::Kind;

// --- Rights -------------------------------------------------------------------------------------

constexpr char kWorkers[] = "workers";

class Rights {
 public:
  Rights(Round& round, const Server& server)
      : round_(round), server_(server), client_(server.Connect()) {
    GiveAll();
  }

  void TakeSome() {
    switch (round_.Below(10)) {
      case 0:
      case 1:
        Take("rights to a key", AllKeysBut(round_.AnyLock()));
        break;
      case 2:
        Take("right to write keys", {"resetkeys", "%R~*"});
        break;
      case 3:
        // Subscribers are closed by that.
        Take("rights to channels", {"resetchannels"});
        break;
      case 4:
        Take("right to PUBLISH", {"-publish"});
        break;
      case 5:
      case 6:
        TakeCommand();
        break;
      case 7:
        Remove();
        break;
      default:
        DenyThoseWhoWait();
    }
  }

  // What nobody may be granted any more while it waits, of each kind.
  void CheckNotices() {
    CheckNotice({"-publish"});
    CheckNotice({"resetchannels"});
    CheckNotice({"-lock.acquire"});
    CheckNotice({"resetkeys"});
  }

 private:
  void GiveAll() { Set({"reset", "on", "nopass", "allkeys", "allchannels", "+@all"}); }

  void Set(Command rules) {
    rules.insert(rules.begin(), {"ACL", "SETUSER", kWorkers});
    const Reply reply = client_.Do(rules);
    round_.Expect(reply == Reply::Ok(), "C8", "ACL SETUSER: " + reply.ToString());
  }

  void Take(const std::string& what, const Command& rules) {
    Set(rules);
    round_.LetWork(0, round_.OneIn(4) ? 300 * kMillisecond : 50 * kMillisecond);
    GiveAll();
    round_.Count(what + " taken away");
  }

  void TakeCommand() {
    static constexpr std::array<const char*, 5> kCommands = {"lock.acquire", "lock.touch",
                                                             "lock.release", "lock.fence", "incr"};
    const std::string command = kCommands.at(round_.Below(kCommands.size()));
    Take("right to " + command, {"-" + command});
  }

  // Its connections are closed.
  void Remove() {
    client_.Send("ACL", "DELUSER", kWorkers);
    GiveAllAfter();
    round_.Count("user removed");
  }

  // Nobody can log in between the two.
  void GiveAllAfter() {
    client_.Send("ACL", "SETUSER", kWorkers, "on", "nopass", "allkeys", "allchannels", "+@all");
    const Reply removed = client_.Read();
    const Reply made = client_.Read();
    round_.Expect(removed == Reply::Int(1) && made == Reply::Ok(), "C8",
                  "ACL DELUSER and SETUSER: " + removed.ToString() + ", " + made.ToString());
  }

  Command AllKeysBut(uint32_t denied) const {
    Command rules = {"resetkeys"};
    for (uint32_t lock = 0; lock < round_.driver().locks(); lock++) {
      if (lock == denied) continue;
      const std::string name = round_.driver().LockName(lock);
      rules.insert(rules.end(), {"~" + name, "~" + name + ":*"});
    }
    return rules;
  }

  // A lock becomes free, and none of those who wait for it may have it any more.
  void DenyThoseWhoWait() {
    const uint32_t lock = round_.AnyLock();
    const std::string name = round_.driver().LockName(lock);
    const Mark forced = round_.Begin(Marked::kForced, "a keeper with all rights", lock);
    const bool kept =
        client_.Do("LOCK.ACQUIRE", name, "keeper", "PX", 5000, "WAIT", 200).integer > 0;
    if (kept) {
      round_.LetWork(0, 60 * kMillisecond);
      const bool key = round_.OneIn(2);
      Set(key ? AllKeysBut(lock) : Command{"-lock.acquire"});
      client_.Send("LOCK.RELEASE", name, "keeper");
      client_.Send("LOCK.INFO", name);
      const Reply released = client_.Read();
      round_.Expect(released == Reply::Int(1), "C2",
                    "the keeper's release is answered " + released.ToString());
      ExpectNobodyIn(name, client_.Read());
      round_.LetWork(0, 20 * kMillisecond);
      ExpectNobodyIn(name, client_.Do("LOCK.INFO", name));
      constexpr Milliseconds kToldAtOnce{1000};
      Reply info;
      const bool told = Eventually(
          [&] {
            info = client_.Do("LOCK.INFO", name);
            return info.IsNil();
          },
          kToldAtOnce);
      round_.Expect(told, "C4", "who may not have the lock still waits: " + info.ToString());
      ExpectNobodyIn(name, info);
      GiveAll();
      round_.Count(key ? "rights to a key taken from those who wait"
                       : "right to lock.acquire taken from those who wait");
    }
    round_.End(forced);
  }

  void ExpectNobodyIn(const std::string& name, const Reply& info) {
    round_.Expect(info.IsNil() || info.Field("holding") == Reply::Int(0), "C8",
                  name + " was granted to who may not have it: " + info.ToString());
  }

  // With a lock, a waiter and a channel of its own.
  void CheckNotice(const Command& rules) {
    Client waiter = server_.Connect();
    waiter.Do("AUTH", kWorkers, "any");
    Client listener = server_.Connect();
    listener.Do("SUBSCRIBE", "notices");
    client_.Do("LOCK.ACQUIRE", "rights", "keeper", "PX", 5000);
    const Reply queued = waiter.Do("LOCK.ACQUIRE", "rights", "waiter", "PX", 5000, "WAIT", 5000,
                                   "NOTIFY", "notices", "id");
    round_.Expect(queued == Reply::Int(0), "C8", "a wait is answered " + queued.ToString());
    Set(rules);
    client_.Do("LOCK.RELEASE", "rights", "keeper");
    Reply info;
    const bool ended = Eventually([&] {
      info = client_.Do("LOCK.INFO", "rights");
      return info.IsNil();
    });
    round_.Expect(ended, "C8", rules[0] + ", and a wait ends so: " + info.ToString());
    if (listener.HasReply(Milliseconds{10})) {
      const std::vector<std::string> message = listener.Read().Texts();
      const std::string text = message.empty() ? "" : message.back();
      round_.Expect(text.starts_with("id error NOPERM"), "C8",
                    rules[0] + ", and a message: " + text);
    }
    GiveAll();
    round_.Count("rights taken from a wait with NOTIFY");
  }

  Round& round_;
  const Server& server_;
  Client client_;
};

void ChangeRights(Round& round) {
  Server server;
  const int64_t used = UsedMemory(server);
  Rights rights(round, server);
  Workload workload;
  workload.user = kWorkers;
  round.Start(workload, {.port = server.port()});
  while (!round.over()) {
    round.LetWork(0, 60 * kMillisecond);
    rights.TakeSome();
  }
  round.Finish();
  rights.CheckNotices();
  round.CheckMemory(server, used);
}

// --- Subscribers --------------------------------------------------------------------------------

class Listeners {
 public:
  Listeners(Round& round, const Server& server)
      : round_(round), server_(server), client_(server.Connect()), proxy_(server.port()) {}

  Address proxy() const { return {.port = proxy_.port()}; }

  void Disturb() {
    switch (round_.Below(12)) {
      case 0:
        client_.Do("CLIENT", "KILL", "TYPE", "pubsub");
        round_.Count("CLIENT KILL of all subscribers");
        break;
      case 1:
      case 2:
        KillSome();
        break;
      case 3:
      case 4:
      case 5:
        for (uint64_t some = 1 + round_.Below(8); some > 0; some--) {
          round_.driver().Unsubscribe();
          round_.Count("UNSUBSCRIBE");
        }
        break;
      case 6:
        proxy_.SetReplyDelay(Milliseconds(round_.Between(0, 60)));
        round_.Count("messages delayed");
        break;
      case 7:
        proxy_.DropReplies(true);
        round_.LetWork(5 * kMillisecond, 60 * kMillisecond);
        proxy_.DropReplies(false);
        round_.Count("all messages dropped");
        break;
      case 8:
        proxy_.LoseNextReply(round_.Below(1000));
        round_.Count("one message lost");
        break;
      case 9:
        proxy_.Cut();
        round_.LetWork(0, 50 * kMillisecond);
        proxy_.Heal();
        round_.Count("connections of subscribers reset");
        break;
      case 10:
        Overflow();
        break;
      default:
        ListenToAll();
    }
  }

  // A lock goes to the next in line if nobody hears that it is granted.
  void CheckUnheard() {
    stranger_.reset();
    testing::Eventually([&] { return client_.Do("PUBSUB", "NUMPAT") == Reply::Int(0); });
    Client listener = server_.Connect();
    listener.Do("SUBSCRIBE", "own");
    client_.Do("LOCK.ACQUIRE", "own", "keeper", "PX", 9000);
    client_.Do("LOCK.ACQUIRE", "own", "unheard", "PX", 9000, "WAIT", 9000, "NOTIFY", "own", "id");
    Client blocked = server_.Connect();
    blocked.Send("LOCK.ACQUIRE", "own", "next", "PX", 9000, "WAIT", 9000);
    testing::Eventually(
        [&] { return client_.Do("LOCK.INFO", "own").Field("waiting") == Reply::Int(2); });
    if (round_.OneIn(2)) {
      listener.Do("UNSUBSCRIBE", "own");
    } else {
      listener.Close();
    }
    testing::Eventually(
        [&] { return client_.Do("PUBSUB", "NUMSUB", "own").elements.back() == Reply::Int(0); });
    client_.Do("LOCK.RELEASE", "own", "keeper");
    const Reply granted = blocked.Read(Milliseconds{2000});
    round_.Expect(granted.IsInteger(), "C4",
                  "who waits behind a grant that nobody hears of is told " + granted.ToString());
    const Reply released = client_.Do("LOCK.RELEASE", "own", "unheard");
    round_.Expect(released == Reply::Int(0), "C6",
                  "a grant that nobody heard of was written: " + released.ToString());
    client_.Do("DEL", "own");
    round_.Count("nobody hears of a grant");
  }

  void Calm() {
    proxy_.SetReplyDelay(Milliseconds{0});
    stranger_.reset();
  }

 private:
  std::vector<std::string> Ids() {
    std::vector<std::string> ids;
    const std::string list = "\n" + client_.Do("CLIENT", "LIST", "TYPE", "pubsub").text;
    for (size_t at = list.find("\nid="); at != std::string::npos; at = list.find("\nid=", at + 1)) {
      ids.push_back(list.substr(at + 4, list.find(' ', at) - at - 4));
    }
    return ids;
  }

  void KillSome() {
    const std::vector<std::string> ids = Ids();
    for (uint64_t some = 1 + round_.Below(4); some > 0 && !ids.empty(); some--) {
      client_.Do("CLIENT", "KILL", "ID", ids[round_.Below(ids.size())]);
      round_.Count("CLIENT KILL of a subscriber");
    }
  }

  // More than the server keeps for a subscriber: it closes the connection, and messages that it
  // counts as received are lost.
  void Overflow() {
    client_.Do("CONFIG", "SET", "client-output-buffer-limit", "pubsub 10000 0 0");
    const std::string junk(200'000, '.');
    for (const std::string& channel : client_.Do("PUBSUB", "CHANNELS").Texts()) {
      if (!round_.OneIn(4)) continue;
      client_.Do("PUBLISH", channel, junk);
      round_.Count("subscriber beyond its output limit");
    }
    client_.Do("CONFIG", "SET", "client-output-buffer-limit", "pubsub 33554432 8388608 60");
  }

  // Then every message is received by somebody, whoever else listens.
  void ListenToAll() {
    if (stranger_) {
      stranger_.reset();
      return;
    }
    stranger_ = server_.Connect();
    stranger_->Do("PSUBSCRIBE", "*");
    round_.Count("PSUBSCRIBE to all channels");
  }

  Round& round_;
  const Server& server_;
  Client client_;
  Proxy proxy_;
  std::optional<Client> stranger_;
};

void Subscribers(Round& round) {
  Server server;
  const int64_t used = UsedMemory(server);
  Listeners listeners(round, server);
  const Address direct{.port = server.port()};
  round.Start({}, direct, {}, listeners.proxy());
  while (!round.over()) {
    round.LetWork(0, 40 * kMillisecond);
    listeners.Disturb();
    if (round.OneIn(8)) listeners.CheckUnheard();
  }
  listeners.Calm();
  round.Finish();
  round.CheckMemory(server, used);
}

}  // namespace

std::vector<Kind> ClientKinds() {
  return {
      {"rights", "ACL SETUSER: keys, commands and channels taken away and given back",
       &ChangeRights},
      {"subscribers", "subscribers that are killed, unsubscribe, hear late or nothing, come back",
       &Subscribers},
  };
}

}  // namespace turnstile::fault
