// Which holds are bound to which channel, so that their loss can be published there.
//
// Like a session (sessions.h), a binding exists only in the memory of the server that granted the
// hold. It follows the hold through renewals and changes of mode, and ends with it: a release ends
// it silently, a loss with a message. The end of a lease is published when it comes, whether or not
// the lock is touched then: a lock that lingers or that nobody wants stays as it is.
//
// Messages are published in Engine::RunDueWork only, as many as its budget allows.

#ifndef TURNSTILE_CORE_CHANNELS_H_
#define TURNSTILE_CORE_CHANNELS_H_

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "core/bound_holds.h"
#include "core/budget.h"
#include "core/lock.h"
#include "core/notice.h"
#include "core/types.h"

namespace turnstile {

class Host;

class Channels {
 public:
  Channels() = default;
  Channels(const Channels&) = delete;
  Channels& operator=(const Channels&) = delete;

  bool empty() const { return bindings_.empty(); }
  size_t size() const { return bindings_.size(); }

  // Whether the hold of `owner` is bound to exactly this target.
  bool IsBoundTo(LockName lock, Owner owner, const NotifyTarget& target) const;

  // Binds a hold of the lock to a channel, on behalf of `user`, in place of any other binding.
  void Bind(LockName lock, const Hold& hold, const NotifyTarget& target, std::string_view user);
  // The hold, if it is bound, has got another lease or token.
  void Renew(LockName lock, const Hold& hold);
  // The hold has ended, and nothing is said of it.
  void Unbind(LockName lock, Owner owner);
  void UnbindAll(LockName lock);
  void Clear();
  void SwapDatabases(int first, int second) { bindings_.SwapDatabases(first, second); }

  // The hold was lost. Published later.
  void Lose(LockName lock, Owner owner, Loss how);
  // The key was removed at `now`: its holds whose leases have ended are lost because of that, the
  // others by force, or not at all if the lock `moves` to another node. `expires`: the server
  // removed the key because its time was over. Returns whether a loss is to be published.
  bool OnRemoved(LockName lock, bool expires, bool moves, Instant now);
  // Likewise, a database, or all of them, is flushed.
  void OnFlushed(std::optional<int> db, Instant now);
  // The key that was just removed was removed because the server needed memory.
  void OnEvicted(LockName lock);

  // Publishes losses, and the ends of leases that have come. A hold that has come back under its
  // token meanwhile, for example by a restart of the data in place or a RESTORE, is bound again
  // instead, if `may_look`: whether keys may be opened now.
  void Publish(Host& host, Instant now, bool may_look, Budget& budget);
  // Whether something is to be published that waits for no time.
  bool has_unpublished() const { return !lost_.empty(); }
  // When Publish will have something to do. Whoever asks has to call it then.
  Due NextDue();
  // Whether that has become earlier since it was last asked for.
  bool IsDueEarlier() const;

  // For tests: whether all redundant data structures agree.
  bool IsConsistent();

 private:
  struct Binding {
    std::string channel;
    std::string id;
    std::string user;
    Token token;
    Instant end;
    uint64_t number = 0;

    NotifyTarget target() const { return {.channel = channel, .id = id}; }
  };
  using Bindings = BoundHolds<Binding>;
  struct Lost {
    Binding binding;
    BoundHold hold;
    Loss how;
  };

  // A hold is live through its last millisecond.
  static bool HasEnded(Instant end, Instant now) { return end < now; }

  // Whether the hold is there. Then it is bound again, unless it has been bound to something else,
  // or all bindings were cleared meanwhile.
  bool HasComeBack(Host& host, const Lost& lost, Instant now);
  void Forget(Bindings::Iterator at);
  Bindings::Iterator Lose(Bindings::Iterator at, Loss how);

  Bindings bindings_;
  std::map<std::pair<Instant, uint64_t>, const BoundHold*> ends_;
  std::deque<Lost> lost_;      // not published yet
  size_t lost_with_last_ = 0;  // how many of them with the key that was removed last
  uint64_t numbers_ = 0;
  uint64_t cleared_ = 0;              // bindings up to this number are not made again
  std::optional<Instant> announced_;  // the time that NextDue returned last
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_CHANNELS_H_
