#include "core/sessions.h"

#include <utility>

#include "core/check.h"

namespace turnstile {

std::optional<Sessions::Client> Sessions::BoundTo(LockName lock, Owner owner) const {
  const auto binding = bindings_.Find(lock, owner);
  return binding == bindings_.end() ? std::nullopt : std::optional(binding->second.client);
}

void Sessions::Bind(Client client, LockName lock, Owner owner) {
  Unbind(lock, owner);
  const auto added = bindings_.Add(lock, owner, Binding{.client = client});
  added->second.hold = &added->first;
  clients_[client].Append(added->second);
}

Sessions::Bindings::Iterator Sessions::Erase(Bindings::Iterator binding) {
  const auto client = clients_.find(binding->second.client);
  if (!TURNSTILE_CHECK(client != clients_.end())) return bindings_.Erase(binding);
  client->second.Remove(binding->second);
  if (client->second.empty()) {
    closed_.erase(client->first);
    clients_.erase(client);
  }
  return bindings_.Erase(binding);
}

void Sessions::Unbind(LockName lock, Owner owner) {
  const auto binding = bindings_.Find(lock, owner);
  if (binding != bindings_.end()) Erase(binding);
}

void Sessions::UnbindAll(LockName lock) {
  auto binding = bindings_.FirstOf(lock);
  while (bindings_.IsOf(binding, lock)) binding = Erase(binding);
}

void Sessions::UnbindAll(std::optional<int> db) {
  for (auto binding = bindings_.begin(); binding != bindings_.end();) {
    const bool meant = !db.has_value() || binding->first.db == *db;
    binding = meant ? Erase(binding) : std::next(binding);
  }
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
  for (auto at = bindings_.FirstOf(lock); bindings_.IsOf(at, lock); ++at) {
    if (HasEnded(at->second)) ++count;
  }
  return count;
}

Sessions::EndedHolds Sessions::TakeFirstEnded(size_t steps) {
  const BoundHold first = *clients_.find(*closed_.begin())->second.first()->hold;
  return TakeEndedFrom(bindings_.Find(first.lock(), Owner{first.owner}), first.lock(), steps);
}

Sessions::EndedHolds Sessions::TakeEnded(LockName lock, size_t steps) {
  return TakeEndedFrom(bindings_.FirstOf(lock), lock, steps);
}

Sessions::EndedHolds Sessions::TakeEndedFrom(Bindings::Iterator at, LockName lock, size_t steps) {
  EndedHolds ended;
  for (; has_ended() && bindings_.IsOf(at, lock); --steps) {
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
      const auto found = bindings_.Find(binding->hold->lock(), Owner{binding->hold->owner});
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
