// Disks that lose what was not fsynced, that are slow, and that cannot be written to.

#include <string>
#include <vector>

#include "fault/lazy_disk.h"
#include "fault/round.h"
#include "fault/small_disk.h"
#include "support/client.h"
#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/ordeals.h"
#include "support/reply.h"
#include "support/server.h"

namespace turnstile::fault {
namespace {

using testing::Client;
using testing::Eventually;
using testing::InfoField;
using testing::Milliseconds;
using testing::Reply;
using testing::Server;
using Args = std::vector<std::string>;
using Marked = Mark::Kind;

constexpr Milliseconds kRecovered{15000};

// --- Power failures -----------------------------------------------------------------------------

// A server with an AOF. With `always` nothing may be lost that a client was told of, with everysec
// what is younger than the last fsync. But the floor that a life begins with has to stay: tokens
// that lead the wall clock by more than the margin may not be lost.
class ServerOnLazyDisk {
 public:
  explicit ServerOnLazyDisk(Round& round)
      : round_(round),
        always_(round.OneIn(2)),
        server_({.args = Arguments(), .environment = disk_.environment()}) {}

  Server& server() { return server_; }
  LazyDisk& disk() { return disk_; }
  bool always() const { return always_; }
  Workload MatchingWorkload() const { return always_ ? ForgetfulSessions() : ShortLeases(); }

  void LetWork() {
    if (!always_) {
      round_.driver().AwaitService(kRecovered);
      round_.Expect(disk_.AwaitSync(), "C8", "the AOF is not synced");
    }
    round_.LetWork(20 * kMillisecond, always_ ? 400 * kMillisecond : 1200 * kMillisecond);
  }

  void FailPower() {
    Mark lossy = round_.Begin(Marked::kLossy, "a power failure, the AOF is synced once a second");
    lossy.begin -= 3 * kSecond;
    server_.Kill9();
    const uint64_t lost = disk_.LoseUnsynced(server_.dir());
    server_.Restart();
    round_.driver().NewLife();
    if (!always_) round_.End(lossy);
    round_.Count(std::string("kill -9, ") + (lost > 0 ? "unsynced writes lost" : "all was synced") +
                 (always_ ? ", AOF always" : ", AOF everysec"));
  }

  void RewriteAof() {
    server_.Connect().Do("BGREWRITEAOF");
    round_.Count("BGREWRITEAOF");
  }

 private:
  Args Arguments() {
    Args args = testing::Aof(round_.OneIn(2) ? "yes" : "no");
    if (!always_) {
      args.insert(args.end(), kGraceOfShortLeases.begin(), kGraceOfShortLeases.end());
      args.insert(args.end(), {"--appendfsync", "everysec"});
    }
    return args;
  }

  Round& round_;
  const bool always_;
  LazyDisk disk_;
  Server server_;
};

// Each fsync takes a moment, so that there is something to lose.
void LostWrites(Round& round) {
  ServerOnLazyDisk lazy(round);
  round.Start(lazy.MatchingWorkload(), {.port = lazy.server().port()});
  lazy.disk().SetDelay(0, 5 * kMillisecond);
  while (!round.over()) {
    lazy.LetWork();
    if (round.OneIn(4)) lazy.RewriteAof();
    lazy.FailPower();
  }
  lazy.disk().SetDelay(0, 0);
  round.Finish();
  if (lazy.always()) round.CheckKept(lazy.server(), [&] { lazy.FailPower(); });
}

void SlowFsync(Round& round) {
  ServerOnLazyDisk lazy(round);
  round.Start(lazy.MatchingWorkload(), {.port = lazy.server().port()});
  while (!round.over()) {
    lazy.LetWork();
    lazy.disk().SetDelay(10 * kMillisecond, 300 * kMillisecond);
    round.LetWork(100 * kMillisecond, 1000 * kMillisecond);
    round.Count(lazy.always() ? "slow fsync, AOF always" : "slow fsync, AOF everysec");
    if (round.OneIn(4)) lazy.RewriteAof();
    if (round.OneIn(3)) lazy.FailPower();
    lazy.disk().SetDelay(0, 0);
  }
  round.Finish();
}

// --- A disk that is read-only -------------------------------------------------------------------

// The server saves now and then, and has no file open meanwhile.
void FailToSave(Round& round, const SmallDisk& disk) {
  Server server({.args = {"--save", "3600 1"}, .dir = disk.path()});
  round.Start({}, {.port = server.port()});
  Client client = server.Connect();
  while (!round.over()) {
    round.LetWork(100 * kMillisecond, 300 * kMillisecond);
    disk.SetReadOnly(true);
    if (round.OneIn(2)) {
      client.Do("BGSAVE");  // after that nothing may be written, until another one succeeds
      round.Count("disk read-only at BGSAVE");
    } else {
      const Reply reply = client.Do("CONFIG", "SET", "appendonly", "yes");
      round.Expect(reply.IsError(), "C8", "the AOF is turned on: " + reply.ToString());
      round.Count("disk read-only when the AOF is turned on");
    }
    round.LetWork(50 * kMillisecond, 1000 * kMillisecond);
    disk.SetReadOnly(false);
    const bool recovered = Eventually(
        [&] {
          client.Do("BGSAVE");
          return InfoField(client, "persistence", "rdb_bgsave_in_progress") == "0" &&
                 InfoField(client, "persistence", "rdb_last_bgsave_status") == "ok";
        },
        kRecovered);
    round.Expect(recovered, "C4", "the server does not recover from a read-only disk");
  }
  round.Finish();
}

// The server needs its AOF to start.
void FailToStart(Round& round, const SmallDisk& disk) {
  Server server({.args = testing::Aof(round.OneIn(2) ? "yes" : "no"), .dir = disk.path()});
  round.Start(ForgetfulSessions(), {.port = server.port()});
  while (!round.over()) {
    round.LetWork(50 * kMillisecond, 400 * kMillisecond);
    server.Kill9();
    disk.SetReadOnly(true);
    server.options().must_start = false;
    round.Expect(!server.Restart(), "C8", "a server starts without its AOF");
    server.options().must_start = true;
    disk.SetReadOnly(false);
    server.Restart();
    round.driver().NewLife();
    round.Count("kill -9, disk read-only at the start");
  }
  round.Finish();
}

void ReadOnlyDisk(Round& round) {
  const SmallDisk disk(size_t{24} << 20);
  if (round.OneIn(2)) {
    FailToSave(round, disk);
  } else {
    FailToStart(round, disk);
  }
}

}  // namespace

std::vector<Kind> StorageKinds() {
  return {
      {"lost-writes", "power failures: what was not fsynced is lost, with always and everysec",
       &LostWrites},
      {"slow-fsync", "fsyncs that take up to 300 ms, and power failures", &SlowFsync},
      {"read-only-disk", "a disk that is read-only for RDB, AOF and starts", &ReadOnlyDisk,
       &SmallDisk::WhyNot},
  };
}

}  // namespace turnstile::fault
