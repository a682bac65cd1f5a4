// One round of the campaign: servers, clients on them, and faults of one kind, for some seconds.
//
// A kind is a function that starts servers, lets the round's driver work on them, injects faults
// until the round is over, heals what it broke, and says what it checked on the servers themselves.
// What clients were told is checked afterwards, by whoever runs the round.

#ifndef TURNSTILE_TESTS_FAULT_ROUND_H_
#define TURNSTILE_TESTS_FAULT_ROUND_H_

#include <cstdint>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "fault/driver.h"
#include "support/client.h"
#include "support/server.h"

namespace turnstile::fault {

class Round {
 public:
  // Every choice of a fault follows from the seed.
  Round(uint64_t seed, Time length) : random_(seed), begin_(Now()), length_(length) {}

  // --- Clients

  // Makes the driver, and waits until it is served.
  Driver& Start(const Workload& workload, const Address& address, const Address& half = {},
                const Address& listeners = {});
  Driver& driver() { return *driver_; }
  bool has_driver() const { return driver_ != nullptr; }

  // Lets clients work for some time between the two.
  void LetWork(Time least, Time most);
  // Whether the time for faults is over.
  bool over() const { return Now() >= begin_ + length_; }
  // Everything has been healed: waits until the servers serve, for a moment more, and until nobody
  // asks for anything any more.
  void Finish();

  // --- Choices

  uint64_t Below(uint64_t end) { return random_() % end; }
  bool OneIn(uint64_t n) { return Below(n) == 0; }
  Time Between(Time least, Time most);
  uint32_t AnyLock() { return static_cast<uint32_t>(Below(driver_->locks())); }

  // --- What happened

  // So many more faults of this name.
  void Count(const std::string& fault, uint64_t times = 1) { faults_[fault] += times; }
  void CountFailover() { ++failovers_; }
  void Violate(const char* check, const std::string& text);
  // Says so unless `good`; returns it.
  bool Expect(bool good, const char* check, const std::string& text);

  // A mark that begins now; it is noted when it is told to end.
  Mark Begin(Mark::Kind kind, const std::string& what, uint32_t lock = kAllLocks);
  void End(Mark mark, Time amount = 0);

  const std::map<std::string, uint64_t>& faults() const { return faults_; }
  uint64_t failovers() const { return failovers_; }
  // Also what the driver reported.
  std::vector<Violation> TakeViolations();

  // --- Faults that several kinds inject

  // FAILOVER: nothing is lost. Clients are not sent there yet.
  void FailOverTo(const testing::Server& primary, const testing::Server& replica);

  // --- Checks of servers (C7, C8), for when the clients are quiet

  // A replica comes to follow its primary, and to know its clock: with a first copy it may hear of
  // that only when the stream begins, up to a second after its link is up, and what it misses until
  // then leads the wall clock by more than the margin.
  bool AwaitFollower(const testing::Server& primary, const testing::Server& replica);
  // A replica comes to have what its primary has.
  void CheckCopies(testing::Client& primary, testing::Client& replica);
  // Locks of every kind are the same after `ordeal`: holders, tokens, ends of leases.
  template <typename Ordeal>
  void CheckKept(testing::Server& server, Ordeal ordeal) {
    Keep(server);
    ordeal();
    CompareKept(server);
  }
  // Nobody waits any more; without locks and clients the memory is what it was.
  void CheckMemory(testing::Server& server, int64_t used_before);

 private:
  void Keep(testing::Server& server);
  void CompareKept(testing::Server& server);

  std::mt19937_64 random_;
  Time begin_;
  Time length_;
  std::unique_ptr<Driver> driver_;
  std::map<std::string, uint64_t> faults_;
  uint64_t failovers_ = 0;
  std::vector<Violation> violations_;
  std::unique_ptr<testing::Client> keeper_;  // whose sessions are kept too
  std::vector<std::string> kept_keys_;
  std::string kept_;
};

int64_t UsedMemory(testing::Server& server);

// Servers that forget which connection a hold belongs to.
Workload ForgetfulSessions();
// For losses of writes: no hold is as long as this grace.
Workload ShortLeases();
extern const std::vector<std::string> kGraceOfShortLeases;
inline constexpr int64_t kMarginOfShortLeasesMs = 5000;

struct Kind {
  const char* name;
  const char* what;
  void (*run)(Round& round);
  std::string (*why_not)() = nullptr;  // "" or null: it can be run here
};

// All that exist, in a fixed order.
std::vector<Kind> AllKinds();

// By file.
std::vector<Kind> SingleServerKinds();
std::vector<Kind> StorageKinds();
std::vector<Kind> DatabaseKinds();
std::vector<Kind> ClientKinds();
std::vector<Kind> ReplicationKinds();
std::vector<Kind> MemberKinds();
std::vector<Kind> ClusterKinds();
std::vector<Kind> NetworkKinds();

}  // namespace turnstile::fault

#endif  // TURNSTILE_TESTS_FAULT_ROUND_H_
