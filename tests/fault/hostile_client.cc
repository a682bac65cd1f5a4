#include "fault/hostile_client.h"

#include <array>
#include <utility>
#include <vector>

#include "support/eventually.h"

namespace turnstile::fault {

using testing::Client;
using testing::Command;

namespace {

constexpr int kLines = 65;  // the most that one request can name

Command Plus(Command command, std::initializer_list<std::string> more) {
  command.insert(command.end(), more);
  return command;
}

// `key`, and the others of its 65.
void AddOthers(Command& command, const std::string& key) {
  command.insert(command.end(), {"ALSO", std::to_string(kLines - 1)});
  for (int i = 1; i < kLines; i++) command.push_back(key + ":" + std::to_string(i));
}

std::string Owner(int number) { return "hostile owner " + std::to_string(number); }

Command Acquire(const std::string& key, const std::string& owner, int lease) {
  return {"LOCK.ACQUIRE", key, owner, "PX", std::to_string(lease)};
}

// Nobody listens there.
constexpr char kChannel[] = "hostile channel";

}  // namespace

HostileClient::HostileClient(int port, uint64_t seed)
    : random_(seed), port_(port), thread_([this] { Work(); }) {}

HostileClient::~HostileClient() { Finish(); }

std::map<std::string, uint64_t> HostileClient::Finish() {
  stopping_ = true;
  if (thread_.joinable()) thread_.join();
  return std::exchange(deeds_, {});
}

void HostileClient::Work() {
  int at = 0;
  while (!stopping_) {
    if (at != port_ || !client_ || !client_->connected()) {
      at = port_;
      client_.emplace(at);
      if (!client_->connected()) testing::LetPass(std::chrono::milliseconds{5});
      continue;
    }
    DoSomething();
    testing::LetPass(std::chrono::milliseconds{Between(0, 30)});
  }
  client_.reset();
}

void HostileClient::DoSomething() {
  using Deed = void (HostileClient::*)();
  static constexpr std::array<std::pair<const char*, Deed>, 8> kDeeds = {{
      {"many holders of one lock", &HostileClient::ManyHolders},
      {"long line", &HostileClient::LongLine},
      {"waits in 65 lines each", &HostileClient::ManyLines},
      {"names of 20 kB", &HostileClient::BigNames},
      {"time-outs at one moment", &HostileClient::TimeOutsTogether},
      {"leases that end at one moment", &HostileClient::LeasesTogether},
      {"connections that wait and close together", &HostileClient::BlockedConnections},
      {"lists of all locks", &HostileClient::Lists},
  }};
  const auto& [name, deed] = kDeeds.at(Below(kDeeds.size()));
  (this->*deed)();
  ++deeds_[std::string("hostile: ") + name];
}

void HostileClient::Send(int times, const Make& make) {
  for (int i = 0; i < times; i++) client_->Send(make(i));
  for (int i = 0; i < times && client_->connected(); i++) client_->Read();
}

void HostileClient::ManyHolders() {
  const int lease = Between(50, 400);
  Send(Between(200, 1000),
       [&](int i) { return Plus(Acquire("hostile:holders", Owner(i), lease), {"SHARED"}); });
  Send(20, [&](int) { return Plus(Acquire("hostile:holders", "writer", lease), {"WAIT", "1"}); });
  Send(5, [](int) { return Command{"LOCK.INFO", "hostile:holders"}; });
}

// Of whom nobody is heard: the line moves up at once.
void HostileClient::LongLine() {
  client_->Do(Acquire("hostile:line", "keeper", 2000));
  Send(Between(200, 1500), [](int i) {
    return Plus(Acquire("hostile:line", Owner(i), 100),
                {"WAIT", "3000", "NOTIFY", kChannel, std::to_string(i)});
  });
  client_->Do("LOCK.RELEASE", "hostile:line", "keeper");
}

void HostileClient::ManyLines() {
  Command keeper = Acquire("hostile:lines", "keeper", 300);
  AddOthers(keeper, "hostile:lines");
  client_->Do(keeper);
  Client other(port_);
  const int waits = Between(20, 150);
  for (int i = 0; i < waits; i++) {
    Command command = Plus(Acquire("hostile:lines", Owner(i), 100),
                           {"SHARED", "WAIT", "1000", "SESSION", "NOTIFY", kChannel, "id"});
    AddOthers(command, "hostile:lines");
    other.Send(command);
  }
  for (int i = 0; i < waits && other.connected(); i++) other.Read();
  other.Close();  // and so they all end
  Command release = {"LOCK.RELEASE", "hostile:lines", "keeper"};
  AddOthers(release, "hostile:lines");
  client_->Do(release);
}

void HostileClient::BigNames() {
  const std::string name(20'000, static_cast<char>('a' + Below(8)));
  Send(8, [&](int i) {
    Command command = Plus(Acquire(name, std::string(256, static_cast<char>('0' + i)), 50),
                           {"WAIT", "100", "MAXLINE", "3", "NOTIFY", kChannel, "id"});
    AddOthers(command, name);
    return command;
  });
}

void HostileClient::TimeOutsTogether() {
  client_->Do(Acquire("hostile:times", "keeper", 1000));
  const int waits = Between(100, 800);
  for (int i = 0; i < waits; i++) {
    client_->Send(Plus(Acquire("hostile:times", Owner(i), 100),
                       {"WAIT", "50", "NOTIFY", kChannel, std::to_string(i)}));
  }
  for (int i = 0; i < waits && client_->connected(); i++) client_->Read();
}

void HostileClient::LeasesTogether() {
  Send(Between(200, 1000), [](int i) {
    return Plus(Acquire("hostile:lease:" + std::to_string(i), Owner(i), 60),
                {"NOTIFY", kChannel, std::to_string(i), "LINGER", "10", "TAG", "hostile"});
  });
}

void HostileClient::BlockedConnections() {
  std::vector<Client> waiters;
  client_->Do(Acquire("hostile:blocked", "keeper", 500));
  for (int i = 0; i < 30; i++) {
    waiters.emplace_back(port_);
    Command command = Plus(Acquire("hostile:blocked", Owner(i), 100), {"WAIT", "1000"});
    AddOthers(command, "hostile:blocked:" + std::to_string(i % 3));
    waiters.back().Send(command);
  }
  testing::LetPass(std::chrono::milliseconds{Between(0, 50)});
  waiters.clear();
}

void HostileClient::Lists() {
  client_->Do("LOCK.LIST", "COUNT", 100000);
  client_->Do("LOCK.TOP", 1000);
}

}  // namespace turnstile::fault
