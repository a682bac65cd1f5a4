#include "core/sessions.h"

#include <utility>

#include "core/check.h"

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
  if (!TURNSTILE_CHECK(client != clients_.end())) return bindings_.erase(binding);
  client->second.Remove(binding->second);
  if (client->second.empty()) {
    closed_.erase(client->first);
    clients_.erase(client);
  }
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
  // The nodes keep their addresses, to which the lists point.
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

void Sessions::Close(Client client) {
  if (HasAny(client)) closed_.insert(client);
}

LockName Sessions::FirstWithEnded() const {
  return clients_.find(*closed_.begin())->second.first()->hold->lock();
}

bool Sessions::HasEnded(LockName lock, Owner owner) const {
  if (!has_ended()) return false;
  const std::optional<Client> client = BoundTo(lock, owner);
  return client.has_value() && closed_.contains(*client);
}

size_t Sessions::CountEnded(LockName lock) const {
  if (!has_ended()) return 0;
  size_t count = 0;
  for (auto at = bindings_.lower_bound(Before::View(lock.db, lock.key, ""));
       at != bindings_.end() && at->first.lock() == lock; ++at) {
    if (HasEnded(at->second)) ++count;
  }
  return count;
}

Sessions::EndedHolds Sessions::TakeFirstEnded(size_t steps) {
  const BoundHold first = *clients_.find(*closed_.begin())->second.first()->hold;
  return TakeEndedFrom(bindings_.find(first), first.lock(), steps);
}

Sessions::EndedHolds Sessions::TakeEnded(LockName lock, size_t steps) {
  return TakeEndedFrom(bindings_.lower_bound(Before::View(lock.db, lock.key, "")), lock, steps);
}

Sessions::EndedHolds Sessions::TakeEndedFrom(Bindings::iterator at, LockName lock, size_t steps) {
  EndedHolds ended;
  for (; has_ended() && at != bindings_.end() && at->first.lock() == lock; --steps) {
    if (steps == 0) {
      ended.more = true;
      break;
    }
    if (HasEnded(at->second)) {
      ended.owners.push_back(at->first.owner);
      at = Erase(at);
    } else {
      ++at;
    }
  }
  return ended;
}

bool Sessions::IsConsistent() const {
  size_t listed = 0;
  for (const auto& [client, of_client] : clients_) {
    listed += of_client.size();
    if (of_client.empty()) return false;
    for (const Binding* binding = of_client.first(); binding != nullptr;
         binding = binding->of_client.after) {
      const auto found = bindings_.find(*binding->hold);
      if (binding->client != client || found == bindings_.end() || &found->second != binding) {
        return false;
      }
    }
  }
  for (const Client client : closed_) {
    if (!clients_.contains(client)) return false;
  }
  return listed == bindings_.size();
}

}  // namespace turnstile
