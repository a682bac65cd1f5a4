#include "core/sessions.h"

#include <utility>

namespace turnstile {

std::optional<Sessions::Client> Sessions::BoundTo(LockName lock, Owner owner) const {
  const auto binding = bindings_.find(Before::View(lock.db, lock.key, owner.bytes));
  return binding == bindings_.end() ? std::nullopt : std::optional(binding->second.client);
}

void Sessions::Bind(Client client, LockName lock, Owner owner) {
  Unbind(lock, owner);
  BoundHold hold{lock.db, std::string(lock.key), std::string(owner.bytes)};
  const auto added = bindings_.try_emplace(std::move(hold), Binding{.client = client}).first;
  added->second.hold = &added->first;
  clients_[client].Append(added->second);
}

Sessions::Bindings::iterator Sessions::Erase(Bindings::iterator binding) {
  const auto client = clients_.find(binding->second.client);
  client->second.Remove(binding->second);
  if (client->second.empty()) clients_.erase(client);
  return bindings_.erase(binding);
}

void Sessions::Unbind(LockName lock, Owner owner) {
  const auto binding = bindings_.find(Before::View(lock.db, lock.key, owner.bytes));
  if (binding != bindings_.end()) Erase(binding);
}

void Sessions::UnbindAll(LockName lock) {
  auto binding = bindings_.lower_bound(Before::View(lock.db, lock.key, ""));
  while (binding != bindings_.end() && binding->first.lock() == lock) binding = Erase(binding);
}

void Sessions::UnbindAll(std::optional<int> db) {
  for (auto binding = bindings_.begin(); binding != bindings_.end();) {
    const bool meant = !db.has_value() || binding->first.db == *db;
    binding = meant ? Erase(binding) : std::next(binding);
  }
}

void Sessions::SwapDatabases(int first, int second) {
  // Nodes, and with them the addresses that the lists know, stay as they are.
  Bindings swapped;
  while (!bindings_.empty()) {
    auto binding = bindings_.extract(bindings_.begin());
    int& db = binding.key().db;
    if (db == first) {
      db = second;
    } else if (db == second) {
      db = first;
    }
    swapped.insert(std::move(binding));
  }
  bindings_ = std::move(swapped);
}

std::vector<Sessions::BoundHold> Sessions::Close(Client client) {
  std::vector<BoundHold> closed;
  for (auto found = clients_.find(client); found != clients_.end(); found = clients_.find(client)) {
    closed.push_back(*found->second.first()->hold);
    Erase(bindings_.find(closed.back()));
  }
  return closed;
}

}  // namespace turnstile
