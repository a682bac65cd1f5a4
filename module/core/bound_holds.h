// Data about holds, each identified by its lock and its owner, in the memory of the server that
// granted them.

#ifndef TURNSTILE_CORE_BOUND_HOLDS_H_
#define TURNSTILE_CORE_BOUND_HOLDS_H_

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "core/types.h"

namespace turnstile {

struct BoundHold {
  int db;
  std::string key;
  std::string owner;

  LockName lock() const { return {db, key}; }
};

template <typename Data>
class BoundHolds {
 private:
  struct Before {
    using is_transparent = void;
    using View = std::tuple<int, std::string_view, std::string_view>;
    static View ToView(const BoundHold& hold) { return {hold.db, hold.key, hold.owner}; }
    static View ToView(const View& view) { return view; }
    bool operator()(const auto& a, const auto& b) const { return ToView(a) < ToView(b); }
  };
  using View = typename Before::View;

 public:
  using Map = std::map<BoundHold, Data, Before>;
  using Iterator = typename Map::iterator;
  using ConstIterator = typename Map::const_iterator;

  bool empty() const { return map_.empty(); }
  size_t size() const { return map_.size(); }
  Iterator begin() { return map_.begin(); }
  Iterator end() { return map_.end(); }
  ConstIterator end() const { return map_.end(); }

  Iterator Find(LockName lock, Owner owner) {
    return map_.find(View(lock.db, lock.key, owner.bytes));
  }
  ConstIterator Find(LockName lock, Owner owner) const {
    return map_.find(View(lock.db, lock.key, owner.bytes));
  }
  // The first hold in the database, or in one of those after it.
  Iterator FirstIn(int db) { return map_.lower_bound(View(db, "", "")); }
  // The first hold of the lock, or whatever follows; and whether `at` is a hold of the lock.
  Iterator FirstOf(LockName lock) { return map_.lower_bound(View(lock.db, lock.key, "")); }
  ConstIterator FirstOf(LockName lock) const {
    return map_.lower_bound(View(lock.db, lock.key, ""));
  }
  bool IsOf(ConstIterator at, LockName lock) const {
    return at != map_.end() && at->first.lock() == lock;
  }

  Iterator Add(LockName lock, Owner owner, Data data) {
    BoundHold hold{lock.db, std::string(lock.key), std::string(owner.bytes)};
    return map_.try_emplace(std::move(hold), std::move(data)).first;
  }
  Iterator Erase(Iterator at) { return map_.erase(at); }
  // Removes a hold, and returns it without a copy of its names.
  std::pair<BoundHold, Data> Extract(Iterator at) {
    auto node = map_.extract(at);
    return {std::move(node.key()), std::move(node.mapped())};
  }

  // Keeps the addresses of holds and data. Costs nothing for holds in other databases.
  void SwapDatabases(int first, int second) {
    std::vector<typename Map::node_type> moved = Take(first, second);
    for (auto& node : Take(second, first)) moved.push_back(std::move(node));
    for (auto& node : moved) {
      // They come in order, so each goes to the end of its database.
      const Iterator behind = FirstIn(node.key().db + 1);
      map_.insert(behind, std::move(node));
    }
  }

 private:
  // Removes the holds in a database, which are in `to` from now on.
  std::vector<typename Map::node_type> Take(int from, int to) {
    std::vector<typename Map::node_type> taken;
    auto at = FirstIn(from);
    while (at != map_.end() && at->first.db == from) {
      taken.push_back(map_.extract(at++));
      taken.back().key().db = to;
    }
    return taken;
  }

  Map map_;
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_BOUND_HOLDS_H_
