// Clients that share locks while servers come and go.
//
//   Fleet fleet([&] { return group.PrimaryPort(); });
//   fleet.Start({{.lock = "a"}, {.lock = "a"}, {.lock = "b", .mode = FleetJob::Mode::kShared}});
//   EXPECT_TRUE(fleet.AllAdvance(3));  // each worker has been inside three times more
//   ... a failover ...
//   EXPECT_TRUE(fleet.AllAdvance(3));
//   fleet.Stop();
//
// Each worker finds the primary, waits for its lock, goes inside, works, asks whether its token is
// still current, leaves and releases. After an error it finds the primary anew and asks again in
// the same name, as a client should. These are failures of the test, whenever they happen:
//
//   - two are inside that must not be (two writers, a writer and a reader, more than the limit);
//   - who goes inside has a token that is not above those of all who had to leave before;
//   - a worker that is inside hears that its token is not current, or that it has nothing to
//     release, from whatever server is the primary by then: a grant that it was told of is lost;
//   - a request has no answer (a token, null or an error) at its time-out and long after it.

#ifndef TURNSTILE_TESTS_SUPPORT_FLEET_H_
#define TURNSTILE_TESTS_SUPPORT_FLEET_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "support/client.h"
#include "support/eventually.h"
#include "support/reply.h"

namespace turnstile::testing {

struct FleetJob {
  enum class Mode { kExclusive, kShared, kLimit };

  std::string lock;
  Mode mode = Mode::kExclusive;
  int limit = 2;         // of kLimit
  bool session = false;  // gives the lock up by closing its connection
};

// What one lock protects, seen by those who go inside.
class FleetSection {
 public:
  void Enter(const FleetJob& job, int64_t token);
  void Leave(const FleetJob& job);

 private:
  std::mutex mutex_;
  int exclusive_ = 0;
  int shared_ = 0;
  int limited_ = 0;
  int64_t last_exclusive_ = 0;  // its token
  int64_t highest_ = 0;         // of all tokens
  std::set<int64_t> tokens_;
};

class Fleet {
 public:
  // A token that a worker was told of.
  struct Grant {
    std::string lock;
    int64_t token = 0;
    int port = 0;  // of the server
    // The owner had asked before without an answer, so the token may be older than this answer.
    bool asked_again = false;
    Clock::time_point when;
  };

  // `find_primary` returns its port, or 0 if it is not known; it is called by all workers at once.
  explicit Fleet(std::function<int()> find_primary);
  ~Fleet();  // as Stop()
  Fleet(const Fleet&) = delete;
  Fleet& operator=(const Fleet&) = delete;

  // From how many replicas a worker wants to hear (WAIT) that they know of its grant before it goes
  // inside, and of its release before it begins anew.
  void ConfirmBy(int replicas) { confirm_by_ = replicas; }

  void Start(const std::vector<FleetJob>& jobs);
  void Stop();

  // Whether each worker has been inside so many times more, in good time.
  bool AllAdvance(int times, Milliseconds within = Milliseconds{30000});

  std::vector<Grant> grants() const;
  // When a worker was inside for the first time with a grant of this server's.
  std::optional<Clock::time_point> FirstInside(int port) const;
  // Errors that workers got over, by their first words.
  std::map<std::string, int> errors() const;

 private:
  struct Worker {
    std::string name;
    FleetJob job;
    FleetSection* section = nullptr;
    std::optional<Client> client;
    int port = 0;
    std::atomic<int> times_inside = 0;
    std::thread thread;
  };

  void Work(Worker& worker);
  // One request and its answer. An error has ended the connection; a request that was not sent, for
  // want of a primary, is an error too.
  Reply Ask(Worker& worker, const Command& command, Milliseconds wait = Milliseconds{0});
  bool Confirmed(Worker& worker);
  int64_t Obtain(Worker& worker, const std::string& owner);  // 0: the fleet stops
  void GiveUp(Worker& worker, const std::string& owner, int64_t token);
  bool Connect(Worker& worker);

  std::function<int()> find_primary_;
  std::atomic<int> confirm_by_ = 0;
  std::atomic<bool> stopping_ = false;
  std::map<std::string, FleetSection> sections_;
  std::deque<Worker> workers_;

  mutable std::mutex mutex_;  // for what follows
  std::vector<Grant> grants_;
  std::map<int, Clock::time_point> first_inside_;
  std::map<std::string, int> errors_;
};

// "master" or "slave"; "" if the server does not say.
std::string RoleOf(Client& client);

// Locks of every kind, all held by "holder" for a minute and some by "other" longer; those with a
// session are bound to this connection. Asked again, the holders keep what they have. Returns the
// names; the first is exclusive.
std::vector<std::string> HoldOneOfEachKind(Client& client);

// Everything that is kept of locks: who holds, under which tokens, until when.
std::vector<Reply> KeptOfAll(Client& client, const std::vector<std::string>& keys);

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_SUPPORT_FLEET_H_
