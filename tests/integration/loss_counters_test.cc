// Every way to lose a hold, and what INFO turnstile counts: each hold once, whatever happens to the
// key afterwards.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

using Counts = std::map<std::string, std::string>;

// Steps that are not commands of the server.
const Command kCloseSession = {"close the connection that took locks with SESSION"};
const Command kEvictAll = {"let the server evict all keys"};
Command UntilEnded(const std::string& key) { return {"until the last lease is over", key}; }
Command UntilRemoved(const std::string& key) { return {"until the key is removed", key}; }

struct Loss {
  const char* name;
  Commands acquire;
  Commands lose;
  Counts counted;     // right afterwards
  Counts after = {};  // after FLUSHALL, if that counts any more
};

void PrintTo(const Loss& loss, std::ostream* out) { *out << loss.name; }

class LossCountersTest : public SharedWaitingTest<LossCountersTest>,
                         public ::testing::WithParamInterface<Loss> {
 protected:
  ~LossCountersTest() override {
    client_.Do("CONFIG", "SET", "maxmemory", 0, "maxmemory-policy", "noeviction");
  }

  void Run(const Command& step) {
    if (step == kCloseSession) {
      session_->Close();
    } else if (step == kEvictAll) {
      client_.Do("CONFIG", "SET", "maxmemory-policy", "allkeys-random", "maxmemory", 1);
      EXPECT_TRUE(Eventually([&] {
        client_.Do("SET", "x", "y");  // memory is checked before a command that may need more
        return client_.Do("DBSIZE") == Reply::Int(0);
      }));
    } else if (step[0] == UntilEnded("")[0]) {
      EXPECT_TRUE(Eventually([&] { return client_.Do("LOCK.FENCE", step[1]).IsNil(); }));
    } else if (step[0] == UntilRemoved("")[0]) {
      EXPECT_TRUE(Eventually([&] { return client_.Do("EXISTS", step[1]) == Reply::Int(0); }));
    } else {
      const bool in_session = std::find(step.begin(), step.end(), "SESSION") != step.end();
      const Reply reply = (in_session ? *session_ : client_).Do(step);
      EXPECT_FALSE(reply.IsError() || reply.IsNil()) << step[0] << ": " << reply;
    }
  }

  Counts Counted() {
    Counts counted;
    for (const char* name :
         {"released", "expired", "evicted", "forced", "session_ended", "undelivered"}) {
      const std::string value = InfoField(client_, "turnstile", std::string("turnstile_") + name);
      if (value != "0") counted[name] = value;
    }
    return counted;
  }

  std::unique_ptr<Client> session_ = std::make_unique<Client>(server().Connect());
};

TEST_P(LossCountersTest, EachHoldIsCountedOnce) {
  const Loss& loss = GetParam();
  for (const Command& step : loss.acquire) Run(step);
  ASSERT_EQ(client_.Do("CONFIG", "SET", "turnstile.reset-stats", "yes"), Reply::Ok());
  for (const Command& step : loss.lose) Run(step);
  // Leases and sessions end asynchronously.
  EXPECT_TRUE(Eventually([&] { return Counted() == loss.counted; }))
      << ::testing::PrintToString(Counted());
  EXPECT_EQ(client_.Do("FLUSHALL", "SYNC"), Reply::Ok());
  EXPECT_EQ(Counted(), loss.after.empty() ? loss.counted : loss.after);
}

const Command kJob = Acquiring("job", "alice", {});
const Command kLingering = Acquiring("job", "alice", {"LINGER", "60000"}, 5);
const Command kSession = Acquiring("job", "alice", {"SESSION"});
const Command kSessionLingering = Acquiring("job", "alice", {"SESSION", "LINGER", "60000"});

// Seven live holds of four locks, among keys of other types.
const Commands kMany = {{"SET", "string", "x"},
                        {"RPUSH", "list", "x"},
                        kJob,
                        Acquiring("shared", "a", {"SHARED"}),
                        Acquiring("shared", "b", {"SHARED"}),
                        Acquiring("shared", "c", {"SHARED"}),
                        Acquiring("limit", "a", {"LIMIT", "3"}),
                        Acquiring("limit", "b", {"LIMIT", "3"}),
                        Acquiring("counted", "a", {"REENTRANT"}),
                        Acquiring("counted", "a", {"REENTRANT"})};

// A live hold, a lingering one, and an ended one next to a live one.
const Commands kSomeEnded = {Acquiring("shared", "live", {"SHARED"}),
                             Acquiring("shared", "over", {"SHARED"}, 5),
                             Acquiring("live", "alice", {}), kLingering, UntilEnded("job")};

INSTANTIATE_TEST_SUITE_P(
    By, LossCountersTest,
    ::testing::Values(
        Loss{"Release", {kJob}, {{"LOCK.RELEASE", "job", "alice"}}, {{"released", "1"}}},
        Loss{"Del", {kJob}, {{"DEL", "job"}}, {{"forced", "1"}}},
        Loss{"DelOfMany", kMany, {{"DEL", "job", "shared", "limit", "counted"}}, {{"forced", "7"}}},
        Loss{"DelWhileLingering",
             {kLingering, UntilEnded("job")},
             {{"DEL", "job"}},
             {{"expired", "1"}}},
        Loss{"Unlink", {kJob}, {{"UNLINK", "job"}}, {{"forced", "1"}}},
        Loss{"Set", {kJob}, {{"SET", "job", "x"}}, {{"forced", "1"}}},
        Loss{"RenameOfAStringOverIt",
             {kJob, {"SET", "string", "x"}},
             {{"RENAME", "string", "job"}},
             {{"forced", "1"}}},
        Loss{"RenameOfALockOverIt",
             {kJob, Acquiring("other", "bob", {})},
             {{"RENAME", "other", "job"}},
             {{"forced", "2"}}},
        Loss{"Rename", {kJob}, {{"RENAME", "job", "away"}}, {{"forced", "1"}}},
        Loss{"RenameOfMany",
             kMany,
             {{"RENAME", "shared", "away"}, {"RENAME", "limit", "gone"}},
             {{"forced", "5"}},
             {{"forced", "7"}}},
        Loss{"RenameThereAndBack",
             {kJob},
             {{"RENAME", "job", "away"}, {"RENAME", "away", "job"}},
             {{"forced", "1"}}},
        Loss{"RenameAndDel",
             {kJob},
             {{"RENAME", "job", "away"}, {"DEL", "away"}},
             {{"forced", "1"}}},
        Loss{"RenameAndExpiry",
             {kJob},
             {{"RENAME", "job", "away"},
              {"LOCK.TOUCH", "away", "alice", "PX", "5"},
              UntilRemoved("away")},
             {{"forced", "1"}}},
        Loss{"RenameAndRelease",
             {kJob},
             {{"RENAME", "job", "away"}, {"LOCK.RELEASE", "away", "alice"}},
             {{"forced", "1"}, {"released", "1"}}},
        Loss{"RenameWhileLingering",
             {kLingering, UntilEnded("job")},
             {{"RENAME", "job", "away"}},
             {{"expired", "1"}}},
        Loss{"RenameAndNewHolder",
             {Acquiring("job", "a", {"SHARED"})},
             {{"RENAME", "job", "away"}, Acquiring("away", "b", {"SHARED"}), {"DEL", "away"}},
             {{"forced", "2"}}},
        Loss{"Move", {kJob}, {{"MOVE", "job", "1"}}, {{"forced", "1"}}},
        Loss{"MoveWhileLingering",
             {kLingering, UntilEnded("job")},
             {{"MOVE", "job", "1"}},
             {{"expired", "1"}}},
        Loss{"SwapdbIsNone", {kJob}, {{"SWAPDB", "0", "1"}}, {}, {{"forced", "1"}}},
        Loss{"Flushdb", kMany, {{"FLUSHDB"}}, {{"forced", "7"}}},
        Loss{"FlushdbAsync", kMany, {{"FLUSHDB", "ASYNC"}}, {{"forced", "7"}}},
        Loss{"Flushall", kMany, {{"FLUSHALL"}}, {{"forced", "7"}}},
        Loss{"FlushallAsync", kMany, {{"FLUSHALL", "ASYNC"}}, {{"forced", "7"}}},
        Loss{"FlushallOfSomeThatHadEnded",
             kSomeEnded,
             {{"FLUSHALL"}},
             {{"forced", "2"}, {"expired", "2"}}},
        Loss{"FlushdbOfSomeThatHadEnded",
             kSomeEnded,
             {{"FLUSHDB"}},
             {{"forced", "2"}, {"expired", "2"}}},
        Loss{"FlushallAfterRename",
             {kJob},
             {{"RENAME", "job", "away"}, {"FLUSHALL"}},
             {{"forced", "1"}}},
        Loss{"Expiry",
             {},
             {Acquiring("job", "alice", {}, 5), UntilRemoved("job")},
             {{"expired", "1"}}},
        Loss{"ExpiryOfMany",
             {},
             {Acquiring("shared", "a", {"SHARED"}, 5), Acquiring("shared", "b", {"SHARED"}, 20),
              UntilRemoved("shared")},
             {{"expired", "2"}}},
        Loss{"ExpiryAfterLingering",
             {},
             {Acquiring("job", "alice", {"LINGER", "20"}, 5), UntilRemoved("job")},
             {{"expired", "1"}}},
        Loss{"ExpiryOfASet",
             {},
             {Acquiring("a", "alice", {"ALSO", "2", "b", "c"}, 5), UntilRemoved("a"),
              UntilRemoved("b"), UntilRemoved("c")},
             {{"expired", "3"}}},
        Loss{"ReleaseWhileLingering",
             {kLingering, UntilEnded("job")},
             {{"LOCK.RELEASE", "job", "alice"}},
             {{"expired", "1"}}},
        Loss{"NewTokenWhileLingering",
             {kLingering, UntilEnded("job")},
             {kJob},
             {{"expired", "1"}},
             {{"expired", "1"}, {"forced", "1"}}},
        Loss{"Eviction",
             {kJob, Acquiring("shared", "a", {"SHARED"}), Acquiring("shared", "b", {"SHARED"})},
             {kEvictAll},
             {{"evicted", "3"}}},
        Loss{"Session", {kSession}, {kCloseSession}, {{"session_ended", "1"}}},
        Loss{"SessionOfMany",
             {kSession, Acquiring("a", "alice", {"SESSION", "ALSO", "2", "b", "c"})},
             {kCloseSession},
             {{"session_ended", "4"}}},
        Loss{"SessionThatLingers", {kSessionLingering}, {kCloseSession}, {{"session_ended", "1"}}},
        Loss{"SessionThatLingersAndDel",
             {kSessionLingering},
             {kCloseSession, UntilEnded("job"), {"DEL", "job"}},
             {{"session_ended", "1"}}},
        Loss{"SessionThatLingersAndRename",
             {kSessionLingering},
             {kCloseSession, UntilEnded("job"), {"RENAME", "job", "away"}},
             {{"session_ended", "1"}}},
        Loss{"DelOfASet",
             {Acquiring("a", "alice", {"ALSO", "2", "b", "c"})},
             {{"DEL", "a", "b"}},
             {{"forced", "2"}},
             {{"forced", "3"}}},
        Loss{"FlushallOfASet",
             {Acquiring("a", "alice", {"ALSO", "2", "b", "c"})},
             {{"FLUSHALL"}},
             {{"forced", "3"}}},
        Loss{"RenameInASet",
             {Acquiring("a", "alice", {"ALSO", "1", "b"})},
             {{"RENAME", "a", "away"}, {"LOCK.RELEASE", "away", "alice"}, {"DEL", "b"}},
             {{"forced", "2"}, {"released", "1"}}}),
    [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace turnstile::testing
