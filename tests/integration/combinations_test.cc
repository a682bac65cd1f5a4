// The tables of docs/commands.md that say which options can be combined, and what a request does to
// a lock that its owner already holds. Every cell is tried on a real server.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include "support/eventually.h"
#include "support/lock_test.h"
#include "support/notices.h"
#include "support/source_files.h"
#include "support/waiting.h"

namespace turnstile::testing {
namespace {

using Row = std::vector<std::string>;  // the first cell names it
using Table = std::vector<Row>;        // the first row has the headings

std::string Trim(const std::string& text) {
  const size_t begin = text.find_first_not_of(' ');
  return begin == std::string::npos ? ""
                                    : text.substr(begin, text.find_last_not_of(' ') - begin + 1);
}

// The tables between "### Combinations" and the next heading.
std::vector<Table> ReadTables() {
  std::vector<Table> tables;
  bool inside = false;
  bool in_table = false;
  for (const std::string& line : ReadSource("docs/commands.md")) {
    if (line.starts_with("#")) inside = line == "### Combinations";
    const bool row = inside && line.starts_with("|");
    if (row && !in_table) tables.emplace_back();
    in_table = row;
    if (!row || line.starts_with("|---")) continue;
    Row cells;
    std::istringstream stream(line.substr(1));
    for (std::string cell; std::getline(stream, cell, '|');) cells.push_back(Trim(cell));
    tables.back().push_back(cells);
  }
  return tables;
}

class CombinationsTest : public SharedWaitingTest<CombinationsTest> {
 protected:
  // Table `index`, which must have that many rows and columns, not counting the headings.
  static Table TableOf(size_t index, size_t rows, size_t columns) {
    const std::vector<Table> tables = ReadTables();
    EXPECT_EQ(tables.size(), 3U);
    if (tables.size() != 3) return {};
    EXPECT_EQ(tables[index].size(), rows + 1);
    for (const Row& row : tables[index]) EXPECT_EQ(row.size(), columns + 1) << row[0];
    return tables[index];
  }

  Reply Digest() { return client_.Do("DEBUG", "DIGEST"); }
};

// --- Options of one request -------------------------------------------------------------------

// How each option is written.
const std::map<std::string, Command> kOptions = {{"WAIT", {"WAIT", "60000"}},
                                                 {"MAXLINE", {"MAXLINE", "1"}},
                                                 {"SHARED", {"SHARED"}},
                                                 {"LIMIT", {"LIMIT", "3"}},
                                                 {"WEIGHT", {"WEIGHT", "2"}},
                                                 {"REENTRANT", {"REENTRANT"}},
                                                 {"SESSION", {"SESSION"}},
                                                 {"LINGER", {"LINGER", "12345"}},
                                                 {"MAXHOLD", {"MAXHOLD", "70000"}},
                                                 {"TAG", {"TAG", "my tag"}},
                                                 {"NOTIFY", {"NOTIFY", "my channel", "my-id"}},
                                                 {"FLOOR", {"FLOOR", "5"}},
                                                 {"ALSO", {"ALSO", "1", "job2"}}};

// The option that another one needs.
const std::map<std::string, std::string> kNeeds = {{"MAXLINE", "WAIT"}, {"WEIGHT", "LIMIT"}};

class OptionCombinationsTest : public CombinationsTest {
 protected:
  // A request for "job" with both options, and with what they need.
  static Command Request(const std::string& first, const std::string& second) {
    Command request = Acquiring("job", "me", {});
    const auto add = [&request](const Command& option) {
      request.insert(request.end(), option.begin(), option.end());
    };
    for (const auto& [option, needed] : kNeeds) {
      if (first == needed || second == needed) continue;
      if (first == option || second == option) add(kOptions.at(needed));
    }
    add(kOptions.at(first));
    add(kOptions.at(second));
    if (first == "ALSO" && second == "ALSO") request.back() = "job3";
    return request;
  }

  // "job" is held and waited for; then it is released. Returns the token that the request obtains.
  Reply ObtainAfterWait(Waiter& requester, const Command& request, bool has_max_line,
                        bool is_notified) {
    MustAcquire(client_, "job", "another");
    if (has_max_line) {
      MustBeInLine(client_.Do(Acquiring("job", "stranger", Notifying("a channel", "1"))));
      EXPECT_EQ(requester.Do(request), Reply::Nil()) << "one waits already";
      EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "stranger"), Reply::Int(1));
    }
    EXPECT_EQ(client_.Do("LOCK.INFO", "job").Field("waiting"), Reply::Int(0));
    if (is_notified) {
      MustBeInLine(requester.Do(request));
    } else {
      requester.Wait(request);
    }
    EXPECT_EQ(LineOf(client_, "job"), std::vector<std::string>{"me"});
    EXPECT_EQ(client_.Do("LOCK.RELEASE", "job", "another"), Reply::Int(1));
    if (!is_notified) return requester.Read();
    return Reply::Int(MustBeGranted(client_, notices_, "my-id", "job"));
  }

  static void MustBeInLine(const Reply& reply) { EXPECT_EQ(reply, Reply::Int(0)); }

  // `requester` requests "job" with these options; then the effect of each of them is checked.
  void ExpectWorks(const std::string& first, const std::string& second) {
    const auto given = [&](const std::string& option) {
      return first == option || second == option ||
             std::any_of(kNeeds.begin(), kNeeds.end(), [&](const auto& needs) {
               return needs.second == option && (first == needs.first || second == needs.first);
             });
    };
    const Command request = Request(first, second);
    notices_.Until(client_);

    // Without WAIT the lock is free; with it the lock is released while the call waits.
    Waiter requester(server());
    const Reply token = given("WAIT")
                            ? ObtainAfterWait(requester, request, given("MAXLINE"), given("NOTIFY"))
                            : requester.Do(request);
    ASSERT_TRUE(token.IsInteger()) << token;
    const int64_t weight = given("WEIGHT") ? 2 : 1;
    const std::string rest = std::to_string(3 - weight);  // of the limit
    // A retry of a call that is notified does not count once more.
    const int64_t count = given("REENTRANT") && !given("NOTIFY") ? 2 : 1;

    std::vector<std::string> keys = {"job"};
    if (given("ALSO")) keys.emplace_back("job2");
    for (const std::string& key : keys) {
      const Reply hold = HoldOf(client_, key, "me");
      EXPECT_EQ(hold.Field("token"), token);
      EXPECT_EQ(ModeOf(client_, key), given("SHARED")  ? "shared"
                                      : given("LIMIT") ? "limit"
                                                       : "exclusive");
      EXPECT_EQ(hold.Field("count"), Reply::Int(1));
      EXPECT_EQ(hold.Field("session"), Reply::Int(given("SESSION") ? 1 : 0));
      EXPECT_EQ(hold.Field("linger-ms"), Reply::Int(given("LINGER") ? 12345 : 0));
      EXPECT_EQ(hold.Field("weight"), Reply::Int(weight));
      EXPECT_EQ(hold.Field("tag"), given("TAG") ? Reply::Str("my tag") : Reply::Nil());
      EXPECT_EQ(hold.Field("max-hold-left-ms").IsNil(), !given("MAXHOLD"));
      EXPECT_LE(hold.Field("max-hold-left-ms").integer, 70000);
      // Which other owners can enter.
      EXPECT_EQ(client_.Do(Acquiring(key, "reader", {"SHARED"})).IsInteger(), given("SHARED"));
      EXPECT_EQ(client_.Do(Acquiring(key, "permit", {"LIMIT", "3", "WEIGHT", rest})).IsInteger(),
                given("LIMIT"));
      EXPECT_EQ(client_.Do(Acquiring(key, "one too many", {"LIMIT", "3"})), Reply::Nil());
      EXPECT_EQ(client_.Do(Acquiring(key, "writer", {})), Reply::Nil());
    }
    EXPECT_EQ(client_.Do("EXISTS", "job2"), Reply::Int(given("ALSO") ? 1 : 0));

    // Reacquiring on the same connection.
    EXPECT_EQ(requester.Do(request), token);
    for (const std::string& key : keys) {
      EXPECT_EQ(HoldOf(client_, key, "me").Field("count"), Reply::Int(count));
      const Reply touched = client_.Do("LOCK.TOUCH", key, "me", "PX", 90000);
      EXPECT_EQ(touched, Reply::Int(1));
      EXPECT_EQ(HoldOf(client_, key, "me").Field("lease-left-ms").integer <= 70000,
                given("MAXHOLD"));
    }
    requester.Close();
    AwaitGone(client_, requester.id());
    for (const std::string& key : keys) {
      EXPECT_EQ(HoldOf(client_, key, "me").IsNil(), given("SESSION")) << "the connection closed";
      if (given("SESSION") && given("LINGER")) {
        EXPECT_GT(client_.Do("LOCK.INFO", key).Field("linger-left-ms").integer, 0);
      } else if (!given("SESSION")) {
        EXPECT_EQ(client_.Do("LOCK.RELEASE", key, "me"), Reply::Int(1));
        EXPECT_EQ(HoldOf(client_, key, "me").IsNil(), count == 1);
      }
    }
    std::vector<std::string> lost;
    if (given("NOTIFY") && given("SESSION")) {
      for (const std::string& key : keys) {
        lost.push_back(LostNotice("my-id", token.integer, "session", key));
      }
    }
    EXPECT_EQ(notices_.Until(client_), lost) << "nothing is said of a release";
  }

  void ExpectError(const std::string& first, const std::string& second, const std::string& text) {
    const Reply reply = client_.Do(Request(first, second));
    EXPECT_TRUE(reply.IsError("ERR syntax error: ")) << reply;
    EXPECT_NE(reply.text.find(text), std::string::npos) << reply;
    EXPECT_EQ(client_.Do("DBSIZE"), Reply::Int(0)) << "nothing has happened";
  }

  Notices notices_{server(), "my channel"};
};

TEST_F(OptionCombinationsTest, EveryPairBehavesAsDocumented) {
  const Table table = TableOf(0, kOptions.size(), kOptions.size());
  ASSERT_FALSE(table.empty());
  size_t cells = 0;
  for (size_t y = 1; y < table.size(); y++) {
    for (size_t x = 1; x < table[y].size(); x++) {
      const std::string& first = table[y][0];
      const std::string& second = table[0][x];
      const std::string& cell = table[y][x];
      SCOPED_TRACE(::testing::Message() << first << " " << second << ": " << cell);
      ASSERT_TRUE(kOptions.contains(first) && kOptions.contains(second));
      StartAfresh();
      if (cell == "works") {
        ExpectWorks(first, second);
      } else if (cell == "error") {
        ExpectError(first, second, "");
      } else {
        ASSERT_EQ(cell, "twice: error");
        ExpectError(first, second, "twice");
      }
      cells++;
    }
  }
  EXPECT_EQ(cells, 169U);
}

// --- A lock that the owner already holds ------------------------------------------------------

// The request for each heading.
const std::map<std::string, Command> kRequests = {{"asks for exclusive", {}},
                                                  {"asks for SHARED", {"SHARED"}},
                                                  {"asks for LIMIT", {"LIMIT", "2"}}};

class HoldCombinationsTest : public CombinationsTest {
 protected:
  // Sets up the state that the first cell of a row describes, for "me" and these keys. Returns the
  // highest token that "me" holds.
  using Prepare = std::function<int64_t()>;

  // The options and, for several keys, ALSO.
  Command Request(Command options, int64_t lease_ms = kMinute) const {
    if (keys_.size() > 1) {
      options.insert(options.end(), {"ALSO", std::to_string(keys_.size() - 1)});
      options.insert(options.end(), keys_.begin() + 1, keys_.end());
    }
    return Acquiring(keys_[0], "me", options, lease_ms);
  }

  int64_t Hold(const Command& options) { return MustObtain(client_, Request(options)); }

  int64_t HoldWithOthers() {
    const int64_t token = Hold({"SHARED"});
    MustObtain(client_, Acquiring(keys_[0], "another", {"SHARED"}));
    return token;
  }

  int64_t HoldStrings() {
    for (const std::string& key : keys_) EXPECT_EQ(client_.Do("SET", key, "me"), Reply::Ok());
    return 0;
  }

  int64_t LetLinger() {
    const int64_t token = MustObtain(client_, Request({"LINGER", "60000"}, 1));
    EXPECT_TRUE(Eventually([&] {
      return std::all_of(keys_.begin(), keys_.end(), [&](const std::string& key) {
        return client_.Do("LOCK.FENCE", key) == Reply::Nil();
      });
    }));
    for (const std::string& key : keys_) EXPECT_EQ(client_.Do("EXISTS", key), Reply::Int(1));
    return token;
  }

  // One request for each key.
  int64_t HoldApart(const Command& options, size_t how_many) {
    int64_t token = 0;
    for (size_t i = 0; i < how_many; i++) {
      token = MustObtain(client_, Acquiring(keys_[i], "me", options));
    }
    return token;
  }

  // Sends the request, and checks its reply and the resulting holds against the cell.
  void ExpectCell(const std::string& cell, const Command& options, int64_t held) {
    const Reply before = Digest();
    const auto modes = [this] {
      std::vector<std::string> all;
      for (const std::string& key : keys_) all.push_back(ModeOf(client_, key));
      return all;
    };
    const std::vector<std::string> old_modes = modes();
    const Reply reply = client_.Do(Request(options));
    const auto expect_held = [&](const std::vector<std::string>& new_modes) {
      EXPECT_EQ(modes(), new_modes);
      for (const std::string& key : keys_) {
        const Reply hold = HoldOf(client_, key, "me");
        EXPECT_EQ(hold.Field("token"), reply);
        EXPECT_GT(hold.Field("lease-left-ms").integer, kMinute - 10000) << "the lease is new";
        EXPECT_EQ(client_.Do("LOCK.FENCE", key, reply.integer), Reply::Int(1));
      }
      EXPECT_EQ(WaitersNow(client_), "0");
    };
    const std::string same = "same token";
    const std::string fresh = "new token, ";
    if (cell == "error") {
      EXPECT_TRUE(reply.IsError("ERR ")) << reply;
      EXPECT_EQ(Digest(), before) << "nothing has happened";
    } else if (cell == "null, still shared") {
      EXPECT_EQ(reply, Reply::Nil());
      EXPECT_EQ(Digest(), before) << "nothing has happened";
      EXPECT_EQ(HoldOf(client_, keys_[0], "me").Field("token"), Reply::Int(held));
      EXPECT_EQ(ModeOf(client_, keys_[0]), "shared");
    } else if (cell == same) {
      EXPECT_EQ(reply, Reply::Int(held));
      expect_held(old_modes);
    } else if (cell.starts_with(same + ", ")) {
      EXPECT_EQ(reply, Reply::Int(held));
      expect_held(std::vector(keys_.size(), cell.substr(same.size() + 2)));
    } else if (cell.starts_with(fresh)) {
      EXPECT_TRUE(reply.IsInteger()) << reply;
      EXPECT_GT(reply.integer, held);
      expect_held(std::vector(keys_.size(), cell.substr(fresh.size())));
      EXPECT_EQ(client_.Do("LOCK.INFO", keys_[0]).Field("linger-left-ms"), Reply::Int(0));
    } else {
      ADD_FAILURE() << "unknown cell: " << cell;
    }
  }

  // All cells of a table, each with every way to set up the state of its row.
  void ExpectTable(const Table& table, const std::map<std::string, std::vector<Prepare>>& rows) {
    ASSERT_EQ(table.size(), rows.size() + 1);
    for (size_t y = 1; y < table.size(); y++) {
      ASSERT_TRUE(rows.contains(table[y][0])) << table[y][0];
      for (size_t x = 1; x < table[y].size(); x++) {
        ASSERT_TRUE(kRequests.contains(table[0][x])) << table[0][x];
        const std::vector<Prepare>& ways = rows.at(table[y][0]);
        for (size_t way = 0; way < ways.size(); way++) {
          SCOPED_TRACE(table[y][0] + " (" + std::to_string(way) + "), " + table[0][x] + ": " +
                       table[y][x]);
          StartAfresh();
          ExpectCell(table[y][x], kRequests.at(table[0][x]), ways[way]());
        }
      }
    }
  }

  std::vector<std::string> keys_ = {"job"};
};

TEST_F(HoldCombinationsTest, RequestsForOneHeldLockBehaveAsDocumented) {
  ExpectTable(TableOf(1, 6, 3), {
                                    {"exclusive", {[this] { return Hold({}); }}},
                                    {"shared, alone", {[this] { return Hold({"SHARED"}); }}},
                                    {"shared, with others", {[this] { return HoldWithOthers(); }}},
                                    {"limit", {[this] {
                                       return Hold({"LIMIT", "2"});
                                     }}},
                                    {"plain string", {[this] { return HoldStrings(); }}},
                                    {"ended, lingers", {[this] { return LetLinger(); }}},
                                });
}

TEST_F(HoldCombinationsTest, RequestsForHeldSetBehaveAsDocumented) {
  keys_ = {"a", "b", "c"};
  const auto apart = [this](const Command& options, size_t how_many) -> Prepare {
    return [=, this] { return HoldApart(options, how_many); };
  };
  ExpectTable(
      TableOf(2, 7, 3),
      {
          {"all, exclusive, one token", {[this] { return Hold({}); }}},
          {"all, shared, one token",
           {[this] { return Hold({"SHARED"}); }, [this] { return HoldWithOthers(); }}},
          {"all, limit, one token", {[this] {
             return Hold({"LIMIT", "2"});
           }}},
          {"all, different tokens", {apart({}, 3), apart({"SHARED"}, 3), apart({"LIMIT", "2"}, 3)}},
          {"some of them",
           {apart({}, 1), apart({"SHARED"}, 2), apart({"LIMIT", "2"}, 1),
            [this] {
              const int64_t token = Hold({});
              EXPECT_EQ(client_.Do("LOCK.RELEASE", "b", "me"), Reply::Int(1));
              return token;
            },
            [this] {
              client_.Do("SET", "c", "me");
              return int64_t{0};
            }}},
          {"all, plain strings", {[this] { return HoldStrings(); }}},
          {"none, all linger", {[this] { return LetLinger(); }}},
      });
}

}  // namespace
}  // namespace turnstile::testing
