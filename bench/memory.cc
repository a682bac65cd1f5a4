// What locks and waiting clients cost in memory, on the server that REDIS_SERVER names.
//
//   memory [--locks N] [--waiters N]
//
// Bytes of used_memory for each: a plain lock (SET NX PX) and a Turnstile lock, with keys of 16 and
// owners of 32 bytes; an idle connection, and what it costs more while it waits in line. Prints a
// table; any unexpected reply ends the run with status 1.

#include <sys/resource.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "support/client.h"
#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/server.h"

namespace turnstile::testing {
namespace {

[[noreturn]] void Fail(const std::string& why) {
  std::fprintf(stderr, "memory: %s\n", why.c_str());
  std::_Exit(1);  // the server dies with us
}

std::string Padded(long number, size_t size) {
  const std::string digits = std::to_string(number);
  return std::string(size - digits.size(), '0') + digits;
}

double UsedMemory(Client& client) { return std::stod(InfoField(client, "memory", "used_memory")); }

// Memory for each of `count` keys that `command` makes.
template <typename MakeCommand>
double BytesForEach(Client& client, long count, MakeCommand command) {
  if (client.Do("FLUSHALL", "SYNC").IsError()) Fail("FLUSHALL is refused");
  const double before = UsedMemory(client);
  constexpr long kPipeline = 1000;
  for (long done = 0; done < count; done += kPipeline) {
    for (long i = done; i < done + kPipeline; i++) {
      client.Send(command(Padded(i, 16), Padded(i, 32)));
    }
    for (long i = 0; i < kPipeline; i++) {
      if (const Reply reply = client.Read(); reply.IsError() || reply.IsNil()) Fail(reply.text);
    }
  }
  return (UsedMemory(client) - before) / static_cast<double>(count);
}

int Run(long locks, long waiters) {
  rlimit files{};
  getrlimit(RLIMIT_NOFILE, &files);
  files.rlim_cur = files.rlim_max;
  setrlimit(RLIMIT_NOFILE, &files);

  Server server({.args = {"--maxclients", std::to_string(waiters + 100), "--turnstile.max-waiters",
                          std::to_string(waiters)}});
  Client client = server.Connect();
  const double plain = BytesForEach(client, locks, [](auto key, auto owner) {
    return Command{"SET", key, owner, "NX", "PX", "3600000"};
  });
  const double ours = BytesForEach(client, locks, [](auto key, auto owner) {
    return Command{"LOCK.ACQUIRE", key, owner, "PX", "3600000"};
  });

  client.Do("FLUSHALL", "SYNC");
  if (!client.Do("LOCK.ACQUIRE", "lock", "holder", "PX", 3600000).IsInteger()) Fail("no lock");
  const double without = UsedMemory(client);
  std::vector<Client> line;
  for (long i = 0; i < waiters; i++) {
    line.push_back(server.Connect());
    if (line.back().Do("PING").IsError()) Fail("a connection is refused");
  }
  const double idle = UsedMemory(client);
  for (long i = 0; i < waiters; i++) {
    line[static_cast<size_t>(i)].Send("LOCK.ACQUIRE", "lock", Padded(i, 32), "PX", 3600000, "WAIT",
                                      3600000);
  }
  const bool all_wait = Eventually(
      [&] {
        return InfoField(client, "turnstile", "turnstile_waiters") == std::to_string(waiters);
      },
      Milliseconds{60000});
  if (!all_wait) Fail("not all clients came to wait");
  const double waiting = UsedMemory(client);
  const auto each = [waiters](double bytes) { return bytes / static_cast<double>(waiters); };
  std::printf(
      "| server         | plain lock | Turnstile lock | ratio | idle connection | waiting, more |\n"
      "|---|--:|--:|--:|--:|--:|\n");
  std::printf("| %-14s | %10.0f | %14.0f | %5.2f | %15.0f | %13.0f |\n", EngineOf(client).c_str(),
              plain, ours, ours / plain, each(idle - without), each(waiting - idle));
  return 0;
}

}  // namespace
}  // namespace turnstile::testing

int main(int argc, char** argv) {
  long locks = 1000000;
  long waiters = 1000;
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string option = argv[i];
    const long value = std::atol(argv[i + 1]);
    if (option == "--locks") locks = value;
    if (option == "--waiters") waiters = value;
  }
  return turnstile::testing::Run(locks, waiters);
}
