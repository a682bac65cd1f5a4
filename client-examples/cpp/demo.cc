// SPDX-License-Identifier: BSD-3-Clause
// Copyright (c) 2026 The Turnstile authors

// Shows what turnstile.h can do, step by step, against a server with the module: demo [host [port]]

#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <future>
#include <iostream>
#include <mutex>
#include <stdexcept>
#include <stop_token>
#include <string>
#include <vector>

#include "turnstile.h"

namespace {

using namespace std::chrono_literals;
using turnstile::Client;
using turnstile::Hold;
using turnstile::Lock;

void Expect(bool condition, const std::string& otherwise) {
  if (!condition) throw std::runtime_error(otherwise);
}

// Stands for something that takes a while and looks at its stop_token. Whether it got to its end.
bool Work(const std::stop_token& lost, std::chrono::milliseconds duration) {
  std::mutex mutex;
  std::condition_variable_any wake;
  std::unique_lock guard(mutex);
  wake.wait_for(guard, lost, duration, [] { return false; });
  return !lost.stop_requested();
}

void Demo(Client& client) {
  const auto ask = [&client](const turnstile::Command& command) {
    return client.Call(command, turnstile::Clock::now() + 1s);
  };
  const Lock table(client, "demo:table:12", {.lease = 2s, .wait = 3s});

  std::cout << "1. With: the work gets the token, and a write that only the holder can make.\n";
  table.With([](Hold& hold, const std::stop_token&) {
    std::cout << "   token " << hold.token() << '\n';
    hold.Run({"SET", "demo:table:12:guest", "alice"});
  });

  std::cout << "2. Acquire, touch, release. Meanwhile a second one is refused.\n";
  Hold first = table.Acquire();
  first.Touch();
  Expect(!table.TryAcquire(), "two at one table");

  std::cout << "3. Another one waits in line and gets the lock at the moment of the release.\n";
  auto second = std::async(std::launch::async, [&table] { return table.Acquire().token(); });
  first.Release();
  Expect(second.get() > first.token(), "the token did not rise");

  std::cout << "4. Work that takes longer than its lease: it is renewed in the background.\n";
  const Lock report(client, "demo:report", {.lease = 300ms});
  Expect(report.With([](Hold&, const std::stop_token& lost) { return Work(lost, 1s); }),
         "it was not renewed");

  std::cout << "5. An operator removes the lock: the work is told.\n";
  try {
    report.With([&ask](Hold& hold, const std::stop_token& lost) {
      ask({"DEL", "demo:report"});
      Work(lost, 1min);
      hold.Check();
    });
    Expect(false, "nobody told the work");
  } catch (const turnstile::Lost& error) {
    std::cout << "   " << error.what() << '\n';
  }

  std::cout << "6. A late write is refused, whatever the writer believes.\n";
  try {
    Hold late = report.Acquire();
    ask({"DEL", "demo:report"});
    late.Run({"SET", "demo:report:page", "stale"});
    Expect(false, "a stale write went through");
  } catch (const turnstile::Fenced&) {
  }

  std::cout << "7. A job that may not go on for ever.\n";
  const Lock bounded(client, "demo:report", {.lease = 300ms, .max_hold = 500ms});
  Expect(!bounded.With([](Hold&, const std::stop_token& lost) { return Work(lost, 1min); }),
         "it went on");

  std::cout << "8. Readers together; at most two at the printer; two tables at once; a session.\n";
  const Lock menu(client, "demo:menu", {.shared = true});
  const std::vector<Hold> readers = [&menu] {
    std::vector<Hold> holds;
    holds.push_back(menu.Acquire());
    holds.push_back(menu.Acquire());
    return holds;
  }();
  const Lock printer(client, "demo:printer", {.limit = 2});
  const Hold one = printer.Acquire();
  const Hold two = printer.Acquire();
  Expect(!printer.TryAcquire(), "three at the printer");
  const Hold both = Lock(client, "demo:table:{a}13", {.also = {"demo:table:{a}14"}}).Acquire();
  const Hold leader = Lock(client, "demo:leader", {.session = true}).Acquire();

  ask({"DEL", "demo:table:12:guest"});
}

}  // namespace

int main(int argc, char** argv) {
  std::signal(SIGPIPE, SIG_IGN);
  try {
    Client client(argc > 1 ? argv[1] : "127.0.0.1", argc > 2 ? std::stoi(argv[2]) : 6379);
    Demo(client);
    std::cout << "done\n";
  } catch (const std::exception& error) {
    std::cerr << "demo: " << error.what() << '\n';
    return EXIT_FAILURE;
  }
}
