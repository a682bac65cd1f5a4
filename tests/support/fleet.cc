#include "support/fleet.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

#include "support/lock_test.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

using Mode = FleetJob::Mode;

constexpr Milliseconds kWait{1000};         // for a wait in the queue, and then once more
constexpr Milliseconds kConfirmation{200};  // for the replicas to answer
constexpr Milliseconds kWork{1};
// How long a worker may take to get its lock, including all failovers. One that takes longer is
// stuck.
constexpr Milliseconds kStuck{40000};

Command AcquireFor(const FleetJob& job, const std::string& owner) {
  // No lease ends during the test: a worker is inside until it leaves.
  Command command = {"LOCK.ACQUIRE",
                     job.lock,
                     owner,
                     "PX",
                     std::to_string(10 * kMinute),
                     "WAIT",
                     std::to_string(kWait.count())};
  if (job.mode == Mode::kShared) command.emplace_back("SHARED");
  if (job.mode == Mode::kLimit) {
    command.insert(command.end(), {"LIMIT", std::to_string(job.limit)});
  }
  if (job.session) command.emplace_back("SESSION");
  return command;
}

// The server reports that it did not run the command. (A closed connection leaves that open.)
bool IsRefusal(const Reply& reply) {
  return reply.IsError() && !reply.IsError("DISCONNECTED:") && !reply.IsError("TIMEOUT:");
}

}  // namespace

void FleetSection::Enter(const FleetJob& job, int64_t token) {
  const std::lock_guard guard(mutex_);
  const int others = exclusive_ + shared_ + limited_;
  bool may_be_inside = false;
  // Among compatible holders the first to enter need not have the lower token.
  int64_t above = last_exclusive_;
  switch (job.mode) {
    case Mode::kExclusive:
      may_be_inside = others == 0;
      above = highest_;
      last_exclusive_ = std::max(last_exclusive_, token);
      ++exclusive_;
      break;
    case Mode::kShared:
      may_be_inside = others == shared_;
      ++shared_;
      break;
    case Mode::kLimit:
      may_be_inside = others == limited_ && limited_ < job.limit;
      ++limited_;
      break;
  }
  highest_ = std::max(highest_, token);
  EXPECT_TRUE(may_be_inside) << job.lock << " has " << others << " inside, token " << token;
  EXPECT_GT(token, above) << job.lock;
  EXPECT_TRUE(tokens_.insert(token).second) << job.lock << ": token " << token << " came twice";
}

void FleetSection::Leave(const FleetJob& job) {
  const std::lock_guard guard(mutex_);
  --(job.mode == Mode::kExclusive ? exclusive_ : job.mode == Mode::kShared ? shared_ : limited_);
}

Fleet::Fleet(std::function<int()> find_primary) : find_primary_(std::move(find_primary)) {}

Fleet::~Fleet() { Stop(); }

void Fleet::Start(const std::vector<FleetJob>& jobs) {
  for (const FleetJob& job : jobs) {
    Worker& worker = workers_.emplace_back();
    worker.name = "worker" + std::to_string(workers_.size());
    worker.job = job;
    worker.section = &sections_[job.lock];
  }
  for (Worker& worker : workers_) worker.thread = std::thread([this, &worker] { Work(worker); });
}

void Fleet::Stop() {
  stopping_ = true;
  for (Worker& worker : workers_) {
    if (worker.thread.joinable()) worker.thread.join();
  }
}

bool Fleet::AllAdvance(int times, Milliseconds within) {
  std::vector<int> goals;
  for (const Worker& worker : workers_) goals.push_back(worker.times_inside + times);
  return Eventually(
      [&] {
        return std::equal(
            goals.begin(), goals.end(), workers_.begin(),
            [](int goal, const Worker& worker) { return worker.times_inside >= goal; });
      },
      within);
}

std::vector<Fleet::Grant> Fleet::grants() const {
  const std::lock_guard guard(mutex_);
  return grants_;
}

std::optional<Clock::time_point> Fleet::FirstInside(int port) const {
  const std::lock_guard guard(mutex_);
  const auto found = first_inside_.find(port);
  return found == first_inside_.end() ? std::nullopt : std::optional(found->second);
}

std::map<std::string, int> Fleet::errors() const {
  const std::lock_guard guard(mutex_);
  return errors_;
}

void Fleet::Work(Worker& worker) {
  for (int turn = 1; !stopping_; ++turn) {
    const std::string owner = worker.name + "." + std::to_string(turn);
    const int64_t token = Obtain(worker, owner);
    if (token == 0) return;
    worker.section->Enter(worker.job, token);
    {
      const std::lock_guard guard(mutex_);
      first_inside_.try_emplace(worker.port, Clock::now());
    }
    LetPass(kWork);
    // Still inside: the lease is long. All servers but primaries refuse LOCK.FENCE.
    Reply current = Reply::Error("");
    EXPECT_TRUE(Eventually(
        [&] {
          current = Ask(worker, {"LOCK.FENCE", worker.job.lock, std::to_string(token)});
          return current.IsInteger();
        },
        kStuck));
    EXPECT_EQ(current, Reply::Int(1)) << owner << " was granted " << worker.job.lock
                                      << " under token " << token << ", which is not known";
    worker.section->Leave(worker.job);
    GiveUp(worker, owner, token);
    ++worker.times_inside;
  }
}

int64_t Fleet::Obtain(Worker& worker, const std::string& owner) {
  int64_t token = 0;
  bool asked_before = false;
  const bool done = Eventually(
      [&] {
        const Reply reply = Ask(worker, AcquireFor(worker.job, owner), kWait);
        const bool granted = reply.IsInteger();
        if (granted) {
          token = reply.integer;
          const std::lock_guard guard(mutex_);
          grants_.push_back({worker.job.lock, token, worker.port, asked_before, Clock::now()});
        }
        // An error (including UNBLOCKED at a demotion) may have replaced a token.
        asked_before = asked_before || granted || reply.IsError();
        if (stopping_ && reply.IsNil()) return true;  // nothing is held or queued
        return granted && Confirmed(worker);
      },
      kStuck);
  EXPECT_TRUE(done) << owner << " does not obtain " << worker.job.lock;
  return done ? token : 0;
}

void Fleet::GiveUp(Worker& worker, const std::string& owner, int64_t token) {
  bool may_be_gone = worker.job.session;
  if (worker.job.session) worker.client.reset();
  // If a failover dropped the binding the lock is an ordinary one, so it is always released.
  EXPECT_TRUE(Eventually(
      [&] {
        const Reply reply = Ask(worker, {"LOCK.RELEASE", worker.job.lock, owner});
        if (reply.IsInteger() && !may_be_gone) {
          EXPECT_EQ(reply, Reply::Int(1))
              << owner << " has lost " << worker.job.lock << ", token " << token;
        }
        may_be_gone = may_be_gone || !IsRefusal(reply);
        return reply.IsInteger() && Confirmed(worker);
      },
      kStuck));
}

bool Fleet::Confirmed(Worker& worker) {
  const int replicas = confirm_by_;
  if (replicas == 0) return true;
  const Reply reply =
      Ask(worker, {"WAIT", std::to_string(replicas), std::to_string(kConfirmation.count())},
          kConfirmation);
  return reply.IsInteger() && reply.integer >= replicas;
}

Reply Fleet::Ask(Worker& worker, const Command& command, Milliseconds wait) {
  if (!worker.client.has_value() && !Connect(worker)) return Reply::Error("NOPRIMARY");
  worker.client->Send(command);
  Reply reply = worker.client->Read(wait + kPatience);
  EXPECT_FALSE(reply.IsError("TIMEOUT:")) << worker.name << ": " << command[0] << ": " << reply;
  if (reply.IsError()) {
    worker.client.reset();
    const std::lock_guard guard(mutex_);
    ++errors_[reply.text.substr(0, reply.text.find(' '))];
  }
  return reply;
}

bool Fleet::Connect(Worker& worker) {
  worker.port = find_primary_();
  if (worker.port == 0) return false;
  worker.client.emplace(worker.port);
  // The server that reported it may be outdated.
  if (RoleOf(*worker.client) == "master") return true;
  worker.client.reset();
  return false;
}

std::string RoleOf(Client& client) {
  const Reply role = client.Do("ROLE");
  return role.IsArray() && !role.elements.empty() ? role.elements[0].text : "";
}

std::vector<std::string> HoldOneOfEachKind(Client& client) {
  const std::vector<std::pair<std::string, Command>> kinds = {
      {"standing:exclusive", {}},
      {"standing:shared", {"SHARED"}},
      {"standing:limit", {"LIMIT", "3"}},
      {"standing:session", {"SESSION"}},
      {"standing:shared session", {"SHARED", "SESSION"}},
      {"standing:linger", {"LINGER", "5000"}},
      {"standing:reentrant", {"REENTRANT"}},
      {"standing:set", {"ALSO", "1", "standing:set too"}},
  };
  std::vector<std::string> keys;
  for (const auto& [key, options] : kinds) {
    keys.push_back(key);
    MustObtain(client, Acquiring(key, "holder", options));
    if (!options.empty() && (options[0] == "SHARED" || options[0] == "LIMIT")) {
      MustObtain(client, Acquiring(key, "other", options, 2 * kMinute));
    }
  }
  keys.emplace_back("standing:set too");
  return keys;
}

std::vector<Reply> KeptOfAll(Client& client, const std::vector<std::string>& keys) {
  std::vector<Reply> all;
  for (const std::string& key : keys) {
    Reply kept = Reply::Array({Reply::Str(key), Kept(client, key)});
    const Reply info = client.Do("LOCK.INFO", key);
    for (const Reply& holder : info.Field("holders").elements) {
      for (const char* field : {"owner", "token", "count", "linger-ms"}) {
        kept.elements.push_back(holder.Field(field));
      }
    }
    all.push_back(std::move(kept));
  }
  return all;
}

}  // namespace turnstile::testing
