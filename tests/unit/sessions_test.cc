#include "core/sessions.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <optional>
#include <random>
#include <string>
#include <vector>

namespace turnstile {
namespace {

constexpr LockName kDoor{0, "door"};
constexpr LockName kGate{0, "gate"};
constexpr Owner kAlice{"alice"};
constexpr Owner kBob{"bob"};

std::string NameOf(int db, const std::string& key, const std::string& owner) {
  std::string name = std::to_string(db);
  for (const std::string& part : {key, owner}) name.append("/").append(part);
  return name;
}

using Holds = std::vector<std::string>;

// All holds that ended with their connections, as "db/key/owner", sorted. Removes them.
Holds TakeAllEnded(Sessions& sessions) {
  Holds ended;
  while (sessions.has_ended()) {
    const LockName lock = sessions.FirstWithEnded();
    const std::string key(lock.key);  // a copy: the binding that it is a view of is removed
    const size_t count = sessions.CountEnded(lock);
    const std::vector<std::string> owners = sessions.TakeEnded({lock.db, key}, 1'000).owners;
    EXPECT_EQ(owners.size(), count);
    EXPECT_FALSE(owners.empty());
    if (owners.empty()) break;
    for (const std::string& owner : owners) ended.push_back(NameOf(lock.db, key, owner));
  }
  std::sort(ended.begin(), ended.end());
  return ended;
}

Holds Close(Sessions& sessions, Sessions::Client client) {
  sessions.Close(client);
  return TakeAllEnded(sessions);
}

TEST(SessionsTest, NothingIsBoundInitially) {
  Sessions sessions;
  EXPECT_TRUE(sessions.empty());
  EXPECT_FALSE(sessions.IsBound(kDoor, kAlice));
  EXPECT_FALSE(sessions.HasAny(1));
  EXPECT_FALSE(sessions.has_ended());
  EXPECT_FALSE(sessions.HasEnded(kDoor, kAlice));
  EXPECT_EQ(sessions.CountEnded(kDoor), 0U);
  EXPECT_EQ(sessions.TakeEnded(kDoor, 1'000).owners, Holds());
  sessions.Close(1);
  EXPECT_FALSE(sessions.has_ended());
  sessions.Unbind(kDoor, kAlice);
  sessions.UnbindAll(kDoor);
  sessions.UnbindAll(std::nullopt);
}

TEST(SessionsTest, ClosedConnectionEndsAllItsHolds) {
  Sessions sessions;
  sessions.Bind(1, kDoor, kAlice);
  sessions.Bind(1, kGate, kAlice);
  sessions.Bind(2, kDoor, kBob);
  EXPECT_TRUE(sessions.IsBound(kDoor, kAlice));
  EXPECT_EQ(sessions.BoundTo(kDoor, kBob), 2U);
  EXPECT_EQ(Close(sessions, 1), (Holds{"0/door/alice", "0/gate/alice"}));
  EXPECT_FALSE(sessions.IsBound(kDoor, kAlice));
  EXPECT_FALSE(sessions.HasAny(1));
  EXPECT_EQ(Close(sessions, 1), Holds()) << "only once";
  EXPECT_TRUE(sessions.IsBound(kDoor, kBob));
  EXPECT_EQ(Close(sessions, 2), Holds{"0/door/bob"});
  EXPECT_TRUE(sessions.empty());
}

TEST(SessionsTest, EndedHoldIsKnownUntilTaken) {
  Sessions sessions;
  sessions.Bind(1, kDoor, kAlice);
  sessions.Bind(2, kDoor, kBob);
  sessions.Bind(3, kDoor, Owner{"carol"});
  sessions.Bind(1, kGate, kAlice);
  EXPECT_FALSE(sessions.HasEnded(kDoor, kAlice));
  sessions.Close(1);
  sessions.Close(3);
  EXPECT_TRUE(sessions.has_ended());
  EXPECT_TRUE(sessions.HasEnded(kDoor, kAlice));
  EXPECT_FALSE(sessions.HasEnded(kDoor, kBob));
  EXPECT_FALSE(sessions.HasEnded(kGate, kBob));
  EXPECT_FALSE(sessions.HasEnded({1, "door"}, kAlice));
  EXPECT_EQ(sessions.CountEnded(kDoor), 2U);
  EXPECT_EQ(sessions.CountEnded(kGate), 1U);
  EXPECT_EQ(sessions.CountEnded({1, "door"}), 0U);
  EXPECT_TRUE(sessions.IsBound(kDoor, kAlice)) << "the binding is still there";

  EXPECT_EQ(sessions.TakeEnded(kDoor, 1'000).owners, (Holds{"alice", "carol"}));
  EXPECT_FALSE(sessions.HasEnded(kDoor, kAlice));
  EXPECT_FALSE(sessions.IsBound(kDoor, kAlice));
  EXPECT_TRUE(sessions.IsBound(kDoor, kBob));
  EXPECT_EQ(sessions.TakeEnded(kDoor, 1'000).owners, Holds());
  ASSERT_TRUE(sessions.has_ended());
  EXPECT_TRUE(sessions.FirstWithEnded() == kGate);
  EXPECT_EQ(sessions.TakeEnded(kGate, 1'000).owners, Holds{"alice"});
  EXPECT_FALSE(sessions.has_ended());
  EXPECT_FALSE(sessions.empty()) << "bob is connected";
}

TEST(SessionsTest, EndedHoldCanBeBoundAgain) {
  Sessions sessions;
  sessions.Bind(1, kDoor, kAlice);
  sessions.Bind(1, kGate, kAlice);
  sessions.Close(1);
  sessions.Bind(2, kDoor, kAlice);
  EXPECT_FALSE(sessions.HasEnded(kDoor, kAlice));
  EXPECT_EQ(TakeAllEnded(sessions), Holds{"0/gate/alice"});
  EXPECT_EQ(sessions.BoundTo(kDoor, kAlice), 2U);
}

TEST(SessionsTest, UnboundHoldDoesNotEndAgain) {
  Sessions sessions;
  sessions.Bind(1, kDoor, kAlice);
  sessions.Bind(1, kGate, kAlice);
  sessions.Close(1);
  sessions.Unbind(kDoor, kAlice);
  EXPECT_TRUE(sessions.has_ended());
  sessions.UnbindAll(kGate);
  EXPECT_FALSE(sessions.has_ended());
  sessions.Bind(1, kDoor, kBob);
  EXPECT_FALSE(sessions.has_ended()) << "nothing is kept of a connection without holds";
}

TEST(SessionsTest, EndedHoldsFollowDatabaseSwap) {
  Sessions sessions;
  sessions.Bind(1, kDoor, kAlice);
  sessions.Close(1);
  sessions.SwapDatabases(0, 3);
  EXPECT_FALSE(sessions.HasEnded(kDoor, kAlice));
  EXPECT_TRUE(sessions.FirstWithEnded() == (LockName{3, "door"}));
  EXPECT_EQ(TakeAllEnded(sessions), Holds{"3/door/alice"});
}

TEST(SessionsTest, HoldIsBoundToLastConnectionOnly) {
  Sessions sessions;
  sessions.Bind(1, kDoor, kAlice);
  sessions.Bind(2, kDoor, kAlice);
  EXPECT_FALSE(sessions.HasAny(1));
  EXPECT_EQ(Close(sessions, 1), Holds());
  EXPECT_TRUE(sessions.IsBound(kDoor, kAlice));
  sessions.Bind(2, kDoor, kAlice);
  EXPECT_EQ(Close(sessions, 2), Holds{"0/door/alice"}) << "bound twice is bound once";
}

TEST(SessionsTest, UnboundHoldDoesNotEnd) {
  Sessions sessions;
  sessions.Bind(1, kDoor, kAlice);
  sessions.Bind(1, kDoor, kBob);
  sessions.Bind(1, kGate, kBob);
  sessions.Unbind(kDoor, kBob);
  EXPECT_EQ(Close(sessions, 1), (Holds{"0/door/alice", "0/gate/bob"}));

  sessions.Bind(1, kDoor, kAlice);
  sessions.Bind(1, kDoor, kBob);
  sessions.Bind(1, kGate, kBob);
  sessions.Bind(1, LockName{1, "door"}, kAlice);
  sessions.UnbindAll(kDoor);
  EXPECT_EQ(Close(sessions, 1), (Holds{"0/gate/bob", "1/door/alice"}));
}

TEST(SessionsTest, KeysWithCommonPrefixAreDistinct) {
  Sessions sessions;
  const std::string nul("door\0x", 6);
  for (const std::string& key : {std::string("door"), std::string("door2"), nul, std::string()}) {
    sessions.Bind(1, LockName{0, key}, kAlice);
  }
  sessions.UnbindAll(kDoor);
  EXPECT_EQ(Close(sessions, 1), (Holds{"0//alice", "0/" + nul + "/alice", "0/door2/alice"}));
}

TEST(SessionsTest, DatabasesCanBeFlushedAndSwapped) {
  Sessions sessions;
  for (int db = 0; db < 3; ++db) sessions.Bind(1, LockName{db, "door"}, kAlice);
  sessions.SwapDatabases(0, 2);
  sessions.SwapDatabases(1, 5);
  sessions.UnbindAll(2);
  EXPECT_EQ(Close(sessions, 1), (Holds{"0/door/alice", "5/door/alice"}));
  sessions.Bind(1, kDoor, kAlice);
  sessions.UnbindAll(std::nullopt);
  EXPECT_TRUE(sessions.empty());
  EXPECT_FALSE(sessions.HasAny(1));
}

// Random operations, compared with a plain list.
TEST(SessionsTest, RandomHistoryMatchesReferenceList) {
  std::mt19937 random(7);
  const auto pick = [&random](int n) {
    return static_cast<int>(random() % static_cast<unsigned>(n));
  };
  struct Bound {
    int db;
    std::string key;
    std::string owner;
    Sessions::Client client;
    bool ended;
  };
  Sessions sessions;
  std::vector<Bound> model;
  Sessions::Client connections = 0;
  std::array<Sessions::Client, 4> clients{};
  for (int step = 0; step < 20'000; ++step) {
    const int db = pick(3);
    const std::string key(1, static_cast<char>('a' + pick(4)));
    const std::string owner(1, static_cast<char>('x' + pick(3)));
    Sessions::Client& client = clients.at(static_cast<size_t>(pick(4)));
    if (client == 0) client = ++connections;
    const LockName lock{db, key};
    const auto of_lock = [&](const Bound& bound) { return bound.db == db && bound.key == key; };
    const auto same_hold = [&](const Bound& bound) {
      return of_lock(bound) && bound.owner == owner;
    };
    switch (pick(14)) {
      case 0: {
        const bool has_any = std::any_of(
            model.begin(), model.end(), [&](const Bound& bound) { return bound.client == client; });
        EXPECT_EQ(sessions.HasAny(client), has_any);
        sessions.Close(client);
        for (Bound& bound : model) bound.ended = bound.ended || bound.client == client;
        client = 0;  // the next one gets a new number
        break;
      }
      case 1:
      case 2:
        sessions.Unbind(lock, Owner{owner});
        std::erase_if(model, same_hold);
        break;
      case 3:
        sessions.UnbindAll(lock);
        std::erase_if(model, of_lock);
        break;
      case 4: {
        const int other = pick(3);
        sessions.SwapDatabases(db, other);
        for (Bound& bound : model) {
          if (bound.db == db || bound.db == other) bound.db = db + other - bound.db;
        }
        break;
      }
      case 5:
        if (pick(10) > 0) break;
        sessions.UnbindAll(db);
        std::erase_if(model, [db](const Bound& bound) { return bound.db == db; });
        break;
      case 6: {
        Holds expected;
        for (const Bound& bound : model) {
          if (of_lock(bound) && bound.ended) expected.push_back(bound.owner);
        }
        std::sort(expected.begin(), expected.end());
        EXPECT_EQ(sessions.TakeEnded(lock, 1'000).owners, expected);
        std::erase_if(model, [&](const Bound& bound) { return of_lock(bound) && bound.ended; });
        break;
      }
      default:
        sessions.Bind(client, lock, Owner{owner});
        std::erase_if(model, same_hold);
        model.push_back({db, key, owner, client, false});
    }
    const auto count = [&model](const auto& is_meant) {
      return static_cast<size_t>(std::count_if(model.begin(), model.end(), is_meant));
    };
    const auto has_ended = [](const Bound& bound) { return bound.ended; };
    EXPECT_EQ(sessions.empty(), model.empty());
    EXPECT_EQ(sessions.IsBound(lock, Owner{owner}), count(same_hold) > 0);
    EXPECT_EQ(sessions.HasEnded(lock, Owner{owner}),
              count([&](const Bound& bound) { return same_hold(bound) && bound.ended; }) > 0);
    EXPECT_EQ(sessions.CountEnded(lock),
              count([&](const Bound& bound) { return of_lock(bound) && bound.ended; }));
    EXPECT_EQ(sessions.has_ended(), count(has_ended) > 0);
    if (sessions.has_ended()) {
      EXPECT_GT(sessions.CountEnded(sessions.FirstWithEnded()), 0U);
    }
    ASSERT_FALSE(testing::Test::HasFailure()) << "step " << step;
  }
}

TEST(Sessions, EndedHoldsAreTakenInBatches) {
  Sessions sessions;
  constexpr LockName kCrowded{0, "crowded"};
  for (char owner = 'a'; owner <= 'j'; ++owner) {
    sessions.Bind(owner < 'f' ? 1 : 2, kCrowded, Owner{{&owner, 1}});
  }
  sessions.Close(2);
  // The first five steps skip the holds of the open connection.
  Sessions::EndedHolds ended = sessions.TakeEnded(kCrowded, 5);
  EXPECT_TRUE(ended.owners.empty());
  EXPECT_TRUE(ended.more);
  // But an ended one is found at once.
  EXPECT_EQ(sessions.FirstWithEnded(), kCrowded);
  ended = sessions.TakeFirstEnded(2);
  EXPECT_EQ(ended.owners, (std::vector<std::string>{"f", "g"}));
  EXPECT_TRUE(ended.more);
  EXPECT_TRUE(sessions.has_ended());
  EXPECT_EQ(sessions.TakeFirstEnded(3).owners.size(), 3U);
  EXPECT_FALSE(sessions.has_ended());
  EXPECT_TRUE(sessions.IsBound(kCrowded, Owner{"a"}));
}

}  // namespace
}  // namespace turnstile
