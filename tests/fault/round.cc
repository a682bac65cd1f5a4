#include "fault/round.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <utility>

#include "support/eventually.h"
#include "support/fleet.h"
#include "support/lock_test.h"
#include "support/ordeals.h"
#include "support/waiting.h"

namespace turnstile::fault {

using testing::Client;
using testing::Eventually;
using testing::InfoField;
using testing::Milliseconds;
using testing::Reply;
using testing::Server;

namespace {

// For servers that have been healed, their grace and a full synchronisation included.
constexpr Milliseconds kHealed{20000};
constexpr Time kAfterHealing = 100 * kMillisecond;
// What a server itself may keep: tables that grew, statistics by command and by error.
constexpr int64_t kMemoryTolerance = int64_t{1} << 20;

}  // namespace

Driver& Round::Start(const Workload& workload, const Address& address, const Address& half,
                     const Address& listeners) {
  driver_ = std::make_unique<Driver>(workload, random_());
  driver_->Go(address, half, listeners);
  Expect(driver_->AwaitService(kHealed), "C4", "nothing is granted at the beginning");
  begin_ = Now();
  return *driver_;
}

void Round::LetWork(Time least, Time most) {
  testing::LetPass(std::chrono::microseconds(Between(least, most)));
}

void Round::Finish() {
  Expect(driver_->AwaitService(kHealed), "C4", "nothing is granted after all was healed");
  LetWork(kAfterHealing, kAfterHealing);
  driver_->Quiesce();
}

Time Round::Between(Time least, Time most) {
  return least + static_cast<Time>(Below(static_cast<uint64_t>(most - least + 1)));
}

void Round::Violate(const char* check, const std::string& text) {
  violations_.push_back({check, text, kAllLocks, Now(), {}});
}

bool Round::Expect(bool good, const char* check, const std::string& text) {
  if (!good) Violate(check, text);
  return good;
}

Mark Round::Begin(Mark::Kind kind, const std::string& what, uint32_t lock) {
  return {.kind = kind, .lock = lock, .begin = Now(), .what = what};
}

void Round::End(Mark mark, Time amount) {
  mark.end = Now();
  mark.amount = amount;
  driver_->Note(std::move(mark));
}

std::vector<Violation> Round::TakeViolations() {
  std::vector<Violation> all = std::exchange(violations_, {});
  if (driver_ != nullptr) {
    for (Violation& violation : driver_->TakeViolations()) all.push_back(std::move(violation));
  }
  return all;
}

void Round::FailOverTo(const Server& primary, const Server& replica) {
  Client client = primary.Connect();
  const Reply reply = client.Do("FAILOVER", "TO", replica.address(), replica.port());
  Expect(reply == Reply::Ok(), "C8", "FAILOVER is answered " + reply.ToString());
  const bool done = Eventually(
      [&] {
        return InfoField(client, "replication", "master_failover_state") == "no-failover" &&
               InfoField(client, "replication", "role") == "slave";
      },
      kHealed);
  Expect(done, "C4", "FAILOVER does not come to its end");
  Count("FAILOVER");
  CountFailover();
}

bool Round::AwaitFollower(const Server& primary, const Server& replica) {
  // By offsets, not by tokens: a primary on which nobody has locked anything yet tells nobody of
  // its token clock.
  const auto offset = [](Client& client) {
    const std::string text = InfoField(client, "replication", "master_repl_offset");
    return text.empty() ? -1 : std::strtoll(text.c_str(), nullptr, 10);
  };
  // Something has to be written, twice: a replica that has loaded its copy may have to wait for the
  // stream, and it is told of the clock when it gets that.
  int times = 0;
  // Connections end when a role changes, so each look has one of its own.
  const bool follows = Eventually(
      [&] {
        Client of_primary = primary.Connect();
        Client of_replica = replica.Connect();
        of_primary.Do("PUBLISH", "fault", "a replica follows");  // which replicas are told of
        const int64_t written = offset(of_primary);
        return written >= 0 &&
               InfoField(of_replica, "replication", "master_port") ==
                   std::to_string(primary.port()) &&
               testing::LinkIsUp(of_replica) &&
               Eventually([&] { return offset(of_replica) >= written; }) && ++times >= 2;
      },
      kHealed);
  return Expect(follows, "C7", "a server does not come to follow its primary");
}

void Round::CheckCopies(Client& primary, Client& replica) {
  Reply of_primary;
  Reply of_replica;
  // Leases end meanwhile, and replicas are told of that.
  const bool equal = Eventually(
      [&] {
        of_replica = replica.Do("DEBUG", "DIGEST");
        of_primary = primary.Do("DEBUG", "DIGEST");
        return of_primary == of_replica && !of_primary.IsError();
      },
      kHealed);
  Expect(equal, "C7",
         "the replica does not come to have what the primary has: " + of_primary.ToString() +
             " and " + of_replica.ToString());
}

namespace {

std::string KeptAsText(Client& client, const std::vector<std::string>& keys) {
  std::ostringstream text;
  for (const Reply& kept : testing::KeptOfAll(client, keys)) text << kept << '\n';
  return text.str();
}

}  // namespace

void Round::Keep(Server& server) {
  keeper_ = std::make_unique<Client>(server.Connect());
  kept_keys_ = testing::HoldOneOfEachKind(*keeper_);
  kept_ = KeptAsText(*keeper_, kept_keys_);
}

void Round::CompareKept(Server& server) {
  Client client = server.Connect();
  const std::string now = KeptAsText(client, kept_keys_);
  Expect(now == kept_, "C7", "holds were not kept:\n" + kept_ + "became\n" + now);
  keeper_.reset();
}

void Round::CheckMemory(Server& server, int64_t used_before) {
  driver_->Go({});
  Client client = server.Connect();
  // The driver's connections end, and with them whoever still waits.
  Expect(Eventually([&] { return testing::WaitersNow(client) == "0"; }), "C8",
         "somebody waits who is not there: " + testing::WaitersNow(client));
  client.Do("FLUSHALL");
  client.Do("FUNCTION", "FLUSH");
  Expect(InfoField(client, "turnstile", "turnstile_locks") == "0", "C8",
         "locks are counted where there are none");
  client.Close();
  int64_t used = 0;
  const bool back = Eventually([&] {
    used = UsedMemory(server);
    return used - used_before < kMemoryTolerance;
  });
  Expect(back, "C8",
         "memory does not come back: " + std::to_string(used_before) + " bytes, then " +
             std::to_string(used));
}

int64_t UsedMemory(Server& server) {
  Client client = server.Connect();
  return std::stoll(InfoField(client, "memory", "used_memory"));
}

Workload ForgetfulSessions() {
  Workload workload;
  workload.sessions_end = false;
  return workload;
}

Workload ShortLeases() {
  Workload workload = ForgetfulSessions();
  workload.longest_lease = 120 * kMillisecond;
  workload.longest_linger = 20 * kMillisecond;
  return workload;
}

// With a margin that melts between two failovers.
const std::vector<std::string> kGraceOfShortLeases = {"--turnstile.failover-grace-ms", "150",
                                                      "--turnstile.token-margin-ms",
                                                      std::to_string(kMarginOfShortLeasesMs)};

std::vector<Kind> AllKinds() {
  std::vector<Kind> all;
  for (const auto& some : {SingleServerKinds(), StorageKinds(), DatabaseKinds(), ClientKinds(),
                           ReplicationKinds(), MemberKinds(), ClusterKinds(), NetworkKinds()}) {
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

}  // namespace turnstile::fault
