// Which holds end with which connection.
//
// A binding connects a hold, identified by its lock and its owner, to the connection that acquired
// it. It exists only in the memory of the server that granted the hold: after a failover the hold
// is an ordinary one, and its lease is the safety net. Code that ends a hold must also unbind it,
// so a binding always refers to an existing hold.
//
// A connection may have any number of holds, which are ended one after the other. Until that is
// done the bindings to a closed connection stay, so that it is known which holds have already
// ended.

#ifndef TURNSTILE_CORE_SESSIONS_H_
#define TURNSTILE_CORE_SESSIONS_H_

#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/bound_holds.h"
#include "core/intrusive_list.h"
#include "core/types.h"

namespace turnstile {

class Sessions {
 public:
  using Client = uint64_t;

  Sessions() = default;
  Sessions(const Sessions&) = delete;
  Sessions& operator=(const Sessions&) = delete;

  bool empty() const { return bindings_.empty(); }
  // The connection that the hold of `owner` is bound to, if any.
  std::optional<Client> BoundTo(LockName lock, Owner owner) const;
  bool IsBound(LockName lock, Owner owner) const { return BoundTo(lock, owner).has_value(); }
  bool HasAny(Client client) const { return clients_.contains(client); }

  // Binds the hold of `owner` to `client`, replacing any other binding.
  void Bind(Client client, LockName lock, Owner owner);
  void Unbind(LockName lock, Owner owner);
  void UnbindAll(LockName lock);
  // All bindings of one database, or of all databases if `db` is absent.
  void UnbindAll(std::optional<int> db);
  void SwapDatabases(int first, int second) { bindings_.SwapDatabases(first, second); }

  // The connection closed: the holds bound to it have ended.
  void Close(Client client);
  // Whether there are holds that have ended this way and have not been taken out yet.
  bool has_ended() const { return !closed_.empty(); }
  // The number of these holds in a lock; and whether the hold of `owner` is one of them.
  size_t CountEnded(LockName lock) const;
  bool HasEnded(LockName lock, Owner owner) const;

  // Owners of these holds in one lock, taken out of the bindings.
  struct EndedHolds {
    std::vector<std::string> owners;
    bool more = false;  // there may be others in this lock
  };
  // A lock with such holds. Requires has_ended(). TakeFirstEnded takes out those of its holds that
  // are found within `steps` steps, which must be at least 1: at least one hold is taken out.
  LockName FirstWithEnded() const;
  EndedHolds TakeFirstEnded(size_t steps);
  // Takes out those of a given lock that are found within `steps` steps.
  EndedHolds TakeEnded(LockName lock, size_t steps);

  // For tests: whether all redundant data structures agree.
  bool IsConsistent() const;

 private:
  struct Binding {
    Client client;
    const BoundHold* hold = nullptr;
    Link<Binding> of_client;
  };
  using Bindings = BoundHolds<Binding>;

  Bindings::Iterator Erase(Bindings::Iterator binding);
  bool HasEnded(const Binding& binding) const { return closed_.contains(binding.client); }
  EndedHolds TakeEndedFrom(Bindings::Iterator at, LockName lock, size_t steps);

  Bindings bindings_;
  std::unordered_map<Client, IntrusiveList<Binding, &Binding::of_client>> clients_;
  std::set<Client> closed_;  // those that have bindings
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_SESSIONS_H_
