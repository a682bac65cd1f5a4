// Carries out decisions: the one place that writes locks, replicates the change, publishes events,
// and keeps the queue and the sessions consistent.

#ifndef TURNSTILE_CORE_WRITER_H_
#define TURNSTILE_CORE_WRITER_H_

#include <optional>
#include <string>
#include <vector>

#include "core/budget.h"
#include "core/engine_state.h"
#include "core/host.h"

namespace turnstile {

class Writer {
 public:
  explicit Writer(EngineState& state) : state_(state), host_(state.host) {}
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  // Carries out a change that was decided here, and replicates the same fact. Overdue holds are
  // removed first.
  void Execute(OpenKey& key, const Change& change, Instant now, Via via);

  // Carries out a granted request on one of its locks. `session`: the connection to bind the hold
  // to, if any. `user`: who asks, if the request names a channel.
  void ExecuteGrant(OpenKey& key, const AcquireRequest& request, Token token, Instant now,
                    std::optional<uint64_t> session, std::string_view user, Via via);

  // Removes overdue holds while other holds remain.
  void RemoveOverdue(OpenKey& key, Instant now);

  // Carry out what another server decided, or this one before a restart.
  void ApplyReplicated(OpenKey& key, const HoldSet& held) { Set(key, held, std::nullopt); }
  void ApplyReplicated(OpenKey& key, const HoldReleased& released);
  void ApplyReplicated(OpenKey& key, const HoldEnded& ended);
  void ApplyReplicated(OpenKey& key, const HoldsExpired& expired);
  void ApplyReplicated(OpenKey& key, const SessionsEnded& ended);

  // Holds whose connection has closed have ended for everybody, even while they are still in their
  // keys. These functions remove them. In a deferred pass, as many as the budget allows:
  void EndClosedSessions(Instant now, Budget& budget);
  // Within a command, those of one key that are found within `steps` steps; returns whether these
  // were all:
  bool EndClosedSessionsIn(OpenKey& key, Instant now, size_t steps);
  // Within a command, that of one owner, if it has ended:
  void EndClosedSessionOf(OpenKey& key, Owner owner, Instant now);

  // Binds the owner's hold to `connection`, or unbinds it if there is none.
  void BindSession(LockName lock, Owner owner, std::optional<uint64_t> connection);

  // Must be called whenever a lock is removed from its key, except by FLUSHDB, FLUSHALL and SWAPDB.
  // `now`: absent while the server is loading its data.
  void OnKeyRemoved(LockName name, const Lock& lock, Role role, std::optional<Instant> now);
  bool is_removing() const { return deleting_; }
  // Whether the lock that was removed last may have had this name.
  bool WasLastRemoved(std::string_view key) const {
    return last_removed_ == NameFilter::HashOf(key);
  }

 private:
  template <typename Fact>
  void ExecuteFact(OpenKey& key, const Fact& fact, Instant now, Via via);
  void Do(OpenKey& key, const HoldSet& held, Instant now, Via via);
  void Do(OpenKey& key, const HoldReleased& released, Instant now, Via via);
  void Do(OpenKey& key, const HoldEnded& ended, Instant now, Via via);
  void Do(OpenKey& key, const HoldsExpired& expired, Instant now, Via via);
  void Do(OpenKey& key, const SessionsEnded& ended, Instant now, Via via);
  void Do(OpenKey& key, const PlainFreed& freed, Instant now, Via via);
  void Do(OpenKey& key, const PlainExtended& extended, Instant now, Via via);

  // `now`: when it was decided, if it was decided here.
  void Set(OpenKey& key, const HoldSet& held, std::optional<Instant> now);
  void Release(OpenKey& key, const HoldReleased& released, std::optional<Instant> now);
  void End(OpenKey& key, const HoldEnded& ended, std::optional<Instant> now);
  void Expire(OpenKey& key, const HoldsExpired& expired, std::optional<Instant> now);
  void EndSessions(OpenKey& key, const SessionsEnded& ended, std::optional<Instant> now);
  template <typename Fact>
  void RemoveHold(OpenKey& key, const Fact& fact);
  template <typename Fact>
  void StoreWithout(OpenKey& key, const Fact& fact);
  void Delete(OpenKey& key);
  void EndHolds(OpenKey& key, const std::vector<std::string>& names, Instant now, Via via);

  // Publishes and counts losses.
  void ReportLost(OpenKey& key, const std::vector<LostHold>& lost, std::optional<Instant> now);
  // The channels have something to publish, or earlier than they said.
  void PublishSoon() {
    if (state_.channels.has_unpublished() || state_.channels.IsDueEarlier()) host_.RunSoon();
  }

  void LockChanged(LockName lock) {
    if (!state_.queue.empty()) state_.queue.Wake(lock);
  }
  void HoldGone(LockName lock, Owner owner) {
    if (!state_.sessions.empty()) state_.sessions.Unbind(lock, owner);
    if (!state_.channels.empty()) state_.channels.Unbind(lock, owner);
  }
  void NoteHoldEnd(LockName lock, Instant end) {
    if (!state_.queue.empty()) state_.queue.NoteHoldEnd(lock, end);
  }

  EngineState& state_;
  Host& host_;
  std::optional<NameFilter::Hash> last_removed_;  // of its name
  bool deleting_ = false;  // a key is being deleted because of a fact of ours
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_WRITER_H_
