// Clients that share locks while servers fail over.
//
//   Fleet fleet([&] { return group.PrimaryPort(); });
//   fleet.Start({{.lock = "a"}, {.lock = "a"}, {.lock = "b", .mode = FleetJob::Mode::kShared}});
//   EXPECT_TRUE(fleet.AllAdvance(3));  // each worker has been inside three times more
//   ... a failover ...
//   EXPECT_TRUE(fleet.AllAdvance(3));
//   fleet.Stop();
//
// Each worker finds the primary, waits for its lock, enters the section, works, checks that its
// token is still current, leaves and releases. After an error it finds the primary again and
// retries as the same owner, as a client should. The following fail the test, whenever they happen:
//
//   - incompatible workers are inside (two writers, a writer and a reader, more than the limit);
//   - a worker enters with a token that is not above those of all that had to leave before;
//   - a worker that is inside learns from the current primary that its token is not current, or
//     that it has nothing to release: a grant that it received is lost;
//   - a request gets no reply (a token, null or an error) until long after its time-out.

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
  bool session = false;  // releases the lock by closing its connection
};

// The section that one lock protects; detects violations.
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
  // A token that a worker received.
  struct Grant {
    std::string lock;
    int64_t token = 0;
    int port = 0;  // of the server
    // An earlier request of the owner got no reply, so the token may be older than this reply.
    bool asked_again = false;
    Clock::time_point when;
  };

  // `find_primary` returns the port of the primary, or 0 if it is unknown; all workers call it
  // concurrently.
  explicit Fleet(std::function<int()> find_primary);
  ~Fleet();  // as Stop()
  Fleet(const Fleet&) = delete;
  Fleet& operator=(const Fleet&) = delete;

  // The number of replicas that must confirm (WAIT) a grant before a worker enters, and a release
  // before it starts again.
  void ConfirmBy(int replicas) { confirm_by_ = replicas; }

  void Start(const std::vector<FleetJob>& jobs);
  void Stop();

  // Whether each worker enters that many more times within the given time.
  bool AllAdvance(int times, Milliseconds within = Milliseconds{30000});

  std::vector<Grant> grants() const;
  // When a worker first entered with a grant of this server.
  std::optional<Clock::time_point> FirstInside(int port) const;
  // Errors that workers recovered from, by their first words.
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
  // Sends one request and reads the reply. After an error the connection is closed; a request that
  // could not be sent for lack of a primary is an error too.
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

  mutable std::mutex mutex_;  // guards what follows
  std::vector<Grant> grants_;
  std::map<int, Clock::time_point> first_inside_;
  std::map<std::string, int> errors_;
};

// "master" or "slave"; "" if the server does not report it.
std::string RoleOf(Client& client);

// Acquires locks of every kind, all held by "holder" for a minute and some by "other" for longer;
// those with a session are bound to this connection. Called again, the holders keep what they have.
// Returns the keys; the first lock is exclusive.
std::vector<std::string> HoldOneOfEachKind(Client& client);

// Everything that is stored for locks: holders, tokens and ends.
std::vector<Reply> KeptOfAll(Client& client, const std::vector<std::string>& keys);

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_SUPPORT_FLEET_H_
