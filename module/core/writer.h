// From a decision to its effects: the one place that writes locks, replicates the change, tells
// subscribers, and keeps the queue and the sessions in step.

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

  // Carries out what was decided here, and replicates the same fact; first the end of holds that
  // are over.
  void Execute(OpenKey& key, const Change& change, Instant now, Via via);

  // Carries out a granted request on one of its locks. `session`: the connection that the hold is
  // bound to, if it is bound to one.
  void ExecuteGrant(OpenKey& key, const AcquireRequest& request, Token token, Instant now,
                    std::optional<uint64_t> session, Via via);

  // Removes holds that are over while others are not.
  void RemoveOverdue(OpenKey& key, Instant now);

  // Carries out what another server decided, or this one before it was started.
  void ApplyReplicated(OpenKey& key, const Held& held) { Set(key, held, std::nullopt); }
  void ApplyReplicated(OpenKey& key, const Released& released);
  void ApplyReplicated(OpenKey& key, const Ended& ended);
  void ApplyReplicated(OpenKey& key, const Expired& expired);
  void ApplyReplicated(OpenKey& key, const SessionsEnded& ended);

  // Holds whose connection has closed have ended for everybody, also while they are still in their
  // keys. These take them out: as many as the budget allows, in a deferred pass;
  void EndClosedSessions(Instant now, Budget& budget);
  // within a command, those of one key that are found in so many steps, and returns whether these
  // were all;
  bool EndClosedSessionsIn(OpenKey& key, Instant now, size_t steps);
  // within a command, that of one owner, if it has ended.
  void EndClosedSessionOf(OpenKey& key, Owner owner, Instant now);

  // The connection, or none, that the owner's hold is bound to from now on.
  void Bind(LockName lock, Owner owner, std::optional<uint64_t> connection);

  // Whatever removes a lock from its key, other than FLUSHDB, FLUSHALL and SWAPDB, ends here.
  // `now`: none while the server loads its data.
  void OnKeyRemoved(LockName name, const Lock& lock, std::optional<Instant> now);
  bool is_removing() const { return deleting_; }

 private:
  template <typename Fact>
  void ExecuteFact(OpenKey& key, const Fact& fact, Instant now, Via via);
  void Do(OpenKey& key, const Held& held, Instant now, Via via);
  void Do(OpenKey& key, const Released& released, Instant now, Via via);
  void Do(OpenKey& key, const Ended& ended, Instant now, Via via);
  void Do(OpenKey& key, const Expired& expired, Instant now, Via via);
  void Do(OpenKey& key, const SessionsEnded& ended, Instant now, Via via);
  void Do(OpenKey& key, const PlainFreed& freed, Instant now, Via via);
  void Do(OpenKey& key, const PlainExtended& extended, Instant now, Via via);

  // `now`: when it was decided, if it was decided here.
  void Set(OpenKey& key, const Held& held, std::optional<Instant> now);
  void Release(OpenKey& key, const Released& released, std::optional<Instant> now);
  void End(OpenKey& key, const Ended& ended, std::optional<Instant> now);
  void Expire(OpenKey& key, const Expired& expired, std::optional<Instant> now);
  void EndSessions(OpenKey& key, const SessionsEnded& ended, std::optional<Instant> now);
  template <typename Fact>
  void RemoveHold(OpenKey& key, const Fact& fact);
  template <typename Fact>
  void StoreWithout(OpenKey& key, const Fact& fact);
  void EndHolds(OpenKey& key, const std::vector<std::string>& names, Instant now, Via via);

  void LockChanged(LockName lock) {
    if (!state_.queue.empty()) state_.queue.Wake(lock);
  }
  void HoldGone(LockName lock, Owner owner) {
    if (!state_.sessions.empty()) state_.sessions.Unbind(lock, owner);
  }
  void NoteEnd(LockName lock, Instant end) {
    if (!state_.queue.empty()) state_.queue.NoteEnd(lock, end);
  }

  EngineState& state_;
  Host& host_;
  bool deleting_ = false;  // a key, because of a fact of ours
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_WRITER_H_
