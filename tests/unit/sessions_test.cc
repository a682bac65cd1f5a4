#include "core/sessions.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <tuple>
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

// What Close returns, as "db/key/owner", sorted.
std::vector<std::string> Close(Sessions& sessions, Sessions::Client client) {
  std::vector<std::string> closed;
  for (const Sessions::BoundHold& hold : sessions.Close(client)) {
    closed.push_back(NameOf(hold.db, hold.key, hold.owner));
  }
  std::sort(closed.begin(), closed.end());
  return closed;
}

using Holds = std::vector<std::string>;

TEST(SessionsTest, NothingIsBoundAtFirst) {
  Sessions sessions;
  EXPECT_TRUE(sessions.empty());
  EXPECT_FALSE(sessions.IsBound(kDoor, kAlice));
  EXPECT_FALSE(sessions.HasAny(1));
  EXPECT_EQ(Close(sessions, 1), Holds());
  sessions.Unbind(kDoor, kAlice);
  sessions.UnbindAll(kDoor);
  sessions.UnbindAll(std::nullopt);
}

TEST(SessionsTest, AConnectionThatClosesTakesAllItsHoldsAlong) {
  Sessions sessions;
  sessions.Bind(1, kDoor, kAlice);
  sessions.Bind(1, kGate, kAlice);
  sessions.Bind(2, kDoor, kBob);
  EXPECT_TRUE(sessions.IsBound(kDoor, kAlice));
  EXPECT_EQ(Close(sessions, 1), (Holds{"0/door/alice", "0/gate/alice"}));
  EXPECT_FALSE(sessions.IsBound(kDoor, kAlice));
  EXPECT_FALSE(sessions.HasAny(1));
  EXPECT_EQ(Close(sessions, 1), Holds()) << "only once";
  EXPECT_TRUE(sessions.IsBound(kDoor, kBob));
  EXPECT_EQ(Close(sessions, 2), Holds{"0/door/bob"});
  EXPECT_TRUE(sessions.empty());
}

TEST(SessionsTest, AHoldIsBoundToTheLastConnectionOnly) {
  Sessions sessions;
  sessions.Bind(1, kDoor, kAlice);
  sessions.Bind(2, kDoor, kAlice);
  EXPECT_FALSE(sessions.HasAny(1));
  EXPECT_EQ(Close(sessions, 1), Holds());
  EXPECT_TRUE(sessions.IsBound(kDoor, kAlice));
  sessions.Bind(2, kDoor, kAlice);
  EXPECT_EQ(Close(sessions, 2), Holds{"0/door/alice"}) << "bound twice is bound once";
}

TEST(SessionsTest, WhatIsUnboundDoesNotEnd) {
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

TEST(SessionsTest, KeysThatBeginAlikeAreOthers) {
  Sessions sessions;
  const std::string nul("door\0x", 6);
  for (const std::string& key : {std::string("door"), std::string("door2"), nul, std::string()}) {
    sessions.Bind(1, LockName{0, key}, kAlice);
  }
  sessions.UnbindAll(kDoor);
  EXPECT_EQ(Close(sessions, 1), (Holds{"0//alice", "0/" + nul + "/alice", "0/door2/alice"}));
}

TEST(SessionsTest, DatabasesAreEmptiedAndSwapped) {
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

// Everything at random, against a plain set.
TEST(SessionsTest, RandomHistory) {
  const unsigned seed = 7;
  SCOPED_TRACE(seed);
  std::mt19937 random(seed);
  const auto pick = [&random](int n) {
    return static_cast<int>(random() % static_cast<unsigned>(n));
  };
  Sessions sessions;
  using Bound = std::tuple<int, std::string, std::string, Sessions::Client>;
  std::set<Bound> model;
  for (int step = 0; step < 50'000; ++step) {
    const int db = pick(3);
    const std::string key(1, static_cast<char>('a' + pick(4)));
    const std::string owner(1, static_cast<char>('x' + pick(3)));
    const auto client = static_cast<Sessions::Client>(pick(4));
    const LockName lock{db, key};
    const auto same_hold = [&](const Bound& bound) {
      return std::get<0>(bound) == db && std::get<1>(bound) == key && std::get<2>(bound) == owner;
    };
    switch (pick(12)) {
      case 0: {
        Holds expected;
        for (const auto& [bound_db, bound_key, bound_owner, bound_client] : model) {
          if (bound_client != client) continue;
          expected.push_back(NameOf(bound_db, bound_key, bound_owner));
        }
        EXPECT_EQ(sessions.HasAny(client), !expected.empty());
        EXPECT_EQ(Close(sessions, client), expected);
        std::erase_if(model, [&](const Bound& bound) { return std::get<3>(bound) == client; });
        break;
      }
      case 1:
      case 2:
        sessions.Unbind(lock, Owner{owner});
        std::erase_if(model, same_hold);
        break;
      case 3:
        sessions.UnbindAll(lock);
        std::erase_if(model, [&](const Bound& bound) {
          return std::get<0>(bound) == db && std::get<1>(bound) == key;
        });
        break;
      case 4: {
        const int other = pick(3);
        sessions.SwapDatabases(db, other);
        std::set<Bound> swapped;
        for (auto [bound_db, bound_key, bound_owner, bound_client] : model) {
          if (bound_db == db || bound_db == other) bound_db = db + other - bound_db;
          swapped.emplace(bound_db, bound_key, bound_owner, bound_client);
        }
        model = swapped;
        break;
      }
      default:
        sessions.Bind(client, lock, Owner{owner});
        std::erase_if(model, same_hold);
        model.emplace(db, key, owner, client);
    }
    EXPECT_EQ(sessions.empty(), model.empty());
    EXPECT_EQ(sessions.IsBound(lock, Owner{owner}),
              std::any_of(model.begin(), model.end(), same_hold));
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace turnstile
