// Clients by the dozen in one thread: they take locks, work, renew, pause, die and come back, and
// write down what they asked and what they were told.
//
//   Driver driver({.workers = 32, .locks = 24}, seed);
//   driver.Go({"127.0.0.1", port});
//   ... faults ...
//   driver.Quiesce();              // nobody asks for anything any more, and all have their answers
//   History history = driver.TakeHistory();
//
// Every other client has a second connection, where it listens: some of its requests do not block,
// and it is told there what becomes of them. It listens first, names an id that nobody can guess,
// confirms by LOCK.TOUCH what it is told, and asks again after every new subscription.
//
// Three more clients help. The probers, one on each way to the server, take and release a lock of
// their own every few milliseconds: while one does not succeed the servers count as unavailable,
// whatever the reason. The observer looks at the locks with LOCK.INFO and checks that each reply is
// possible.

#ifndef TURNSTILE_TESTS_FAULT_DRIVER_H_
#define TURNSTILE_TESTS_FAULT_DRIVER_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "fault/checker/checker.h"
#include "fault/history.h"

namespace turnstile::fault {

// Microseconds of the monotonic clock.
Time Now();

struct Address {
  std::string host = "127.0.0.1";
  int port = 0;  // 0: nowhere
};

struct Workload {
  size_t workers = 32;
  uint32_t locks = 24;  // of which the first six are asked for as often as all others together
  std::string prefix = "lock:";  // of the locks' names
  Time longest_lease = 120 * kMillisecond;
  Time longest_linger = 20 * kMillisecond;
  Time longest_wait = 500 * kMillisecond;
  bool sharing = true;       // some locks are shared or have a limit
  bool several = true;       // some requests are for several locks
  bool sessions = true;      // some holds end with their connection,
  bool sessions_end = true;  // at once: no server forgets them
  bool direct = true;        // false: packets may be lost on the way, and come late
  bool notified = true;      // some requests do not block,
  bool sharded = false;      // and channels belong to the slots of a cluster
  uint32_t databases = 1;    // clients are spread over these, and each has all of the locks
  std::string user = {};     // who the clients are (without a password): its rights may change
};

// Counted over the life of a driver.
struct Traffic {
  uint64_t requests = 0;
  std::map<std::string, uint64_t> errors;  // by first word
  uint64_t connections = 0;
  uint64_t deaths = 0;  // clients that closed while they waited or held
  uint64_t pauses = 0;  // clients that slept past their leases
  uint64_t retries = 0;
  uint64_t reentries = 0;
  uint64_t upgrades = 0;
  uint64_t downgrades = 0;
  uint64_t floors = 0;  // tokens that are just what was asked for
  uint64_t heavy = 0;   // grants that count for more than one
  uint64_t capped = 0;  // grants with the most that they may last
  uint64_t tagged = 0;
  uint64_t shed = 0;               // requests that were kept from a long line, as far as they know
  uint64_t reader_floors = 0;      // of them, those of readers
  uint64_t reentrant_changes = 0;  // changes of mode that count the hold once more
  uint64_t subscriptions = 0;
  uint64_t in_line = 0;  // requests of which a message is to tell
  uint64_t messages = 0;
  uint64_t granted_by_message = 0;
  uint64_t confirmed = 0;
  uint64_t told_of_loss = 0;
  uint64_t left_the_line = 0;
  uint64_t unheard = 0;  // requests in line whose client did not hear any more
  uint64_t scripts = 0;
  uint64_t transactions = 0;
  uint64_t infos = 0;
  Time unavailable = 0;
};

class Driver {
 public:
  Driver(const Workload& workload, uint64_t seed);
  ~Driver();
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  // Where clients go from now on; who is elsewhere hangs up. With `half`, every other client goes
  // that way instead, which is not the direct one. With `listeners`, every other client that is to
  // be notified listens by that way, and asks directly.
  void Go(const Address& address, const Address& half = {}, const Address& listeners = {});
  // A client that listens stops that for a moment.
  void Unsubscribe() { ++unsubscribe_; }
  // A server was restarted or changed its role: nothing is known of the order of arrival.
  void NewLife();
  void Note(Mark mark);
  // What clients outside have written down.
  void Add(const History& history);
  void Report(Violation violation);

  // Whether the probers succeed in time.
  bool AwaitService(std::chrono::milliseconds within);

  void Quiesce();

  // After Quiesce(): what has been written down since the last time.
  History TakeHistory();
  std::vector<Violation> TakeViolations();
  Traffic traffic() const;

  const Workload& workload() const { return workload_; }
  // Locks are numbered through all databases.
  uint32_t locks() const { return workload_.locks * workload_.databases; }
  uint32_t DatabaseOf(uint32_t lock) const { return lock / workload_.locks; }
  std::string LockName(uint32_t lock) const {
    return workload_.prefix + std::to_string(lock % workload_.locks);
  }

 private:
  class Peer;
  class Worker;
  class Subscriber;
  class Prober;
  class Observer;

  struct Route {
    Address address;
    Address half;
    Address listeners;
  };

  // A token that a client was given for another lock.
  struct GivenToken {
    uint32_t lock = 0;
    int64_t token = 0;
  };

  void Loop();
  // A prober succeeded.
  void Served(size_t prober, Time now);
  Route CurrentRoute() const;

  const Workload workload_;
  int epoll_ = -1;
  std::vector<std::unique_ptr<Peer>> peers_;  // of the loop's thread
  std::vector<Worker*> workers_;
  std::vector<Subscriber*> subscribers_;
  std::mt19937_64 random_;
  GivenToken given_;

  std::atomic<bool> stopping_ = false;
  std::atomic<bool> quiet_ = false;
  std::atomic<bool> all_quiet_ = false;
  std::atomic<uint32_t> life_ = 1;
  std::atomic<uint64_t> generation_ = 0;             // of the route
  std::array<std::atomic<Time>, 2> last_success_{};  // of the probers
  std::atomic<uint32_t> owners_ = 0;
  std::atomic<int> unsubscribe_ = 0;  // so many clients are to do that

  mutable std::mutex mutex_;  // for what follows
  Route route_;
  History history_;
  std::vector<Violation> violations_;
  Traffic traffic_;

  std::thread thread_;
};

}  // namespace turnstile::fault

#endif  // TURNSTILE_TESTS_FAULT_DRIVER_H_
