// Calls that wait: parked, granted, timed out or disconnected.
//
// The host blocks the caller; its entries are in the WaitQueue. Everything that may allow a grant
// only wakes a queue and opens no key: inside a server event that could remove an expired key, and
// replicate the removal in the wrong order or into the wrong database. All answers to waiting
// callers are sent in Engine::RunDueWork, just before the event loop sleeps. There a write is
// replicated in the right order, and on 7.0 no command can run between the answer and its delivery.
//
// Rejected: blocking on keys (RM_BlockClientOnKeys). Servers do not wake such clients when the key
// is removed, or wake all of them, and a lost grant could not be distinguished from a delivered
// one. Rejected: granting inside LOCK.RELEASE. A client unblocked there can still be timed out or
// killed in the same pass of the event loop, and 7.0 then loses its reply.

#ifndef TURNSTILE_CORE_WAITING_CALLS_H_
#define TURNSTILE_CORE_WAITING_CALLS_H_

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "core/budget.h"
#include "core/deadlock.h"
#include "core/decide.h"
#include "core/engine_state.h"
#include "core/host.h"
#include "core/intrusive_list.h"
#include "core/wait_queue.h"
#include "core/writer.h"

namespace turnstile {

// Why a wait ended that was neither granted nor timed out.
enum class WaitEnd {
  kSuperseded,  // a newer call of the same owner took over its entries
  kCancelled,   // a LOCK.RELEASE of the same owner
  kWrongType,   // a key now holds another type
};

// The answer to a waiting call: nothing (it timed out), a token, why the request cannot be granted,
// how the wait ended, or an error of the server.
using WaitAnswer = std::variant<std::monostate, Token, Outcome, WaitEnd, std::string>;

// Holds granted to a call whose caller may not have received the reply.
struct UnconfirmedGrant {
  int db;
  std::vector<std::string> keys;
  std::string owner;
  Token token;
  std::optional<Hold> upgraded;      // the shared hold that was upgraded; its owner is `owner`
  std::optional<uint64_t> bound_to;  // the connection that the upgraded hold was bound to
  bool confirmed = false;            // by another call, or it can no longer be taken back
  Link<UnconfirmedGrant> link;

  bool IsFor(LockName lock, Owner to, Token under) const;
};

// A call that waits. Exists until the host no longer needs it (Engine::OnReplied).
class WaitingCall : public WaitQueue::Waiter {
 public:
  WaitingCall(const AcquireRequest& request, const Now& now, Host::ParkableCaller caller,
              std::optional<uint64_t> session_connection);

  const std::string& user() const { return user_; }
  // The connection to bind the hold to.
  std::optional<uint64_t> session() const { return session_; }
  const WaitAnswer& answer() const { return answer_; }

  // For the host's own use.
  void* handle = nullptr;

 private:
  friend class WaitingCalls;

  std::optional<uint64_t> session_;
  std::string user_;
  WaitAnswer answer_;
  std::unique_ptr<UnconfirmedGrant> grant_;
  bool has_ended_ = false;  // in WaitingCalls::ended_
  Link<WaitingCall> link_;
};

// Whether a call waits, or why it may not.
struct ParkResult {
  enum class Kind { kWaits, kWaitLimit, kUserWaitLimit, kCannotWait, kDeadlock };
  Kind kind;
  size_t limit = 0;

  struct Step {
    std::string owner;
    int db;
    std::string key;
  };
  std::vector<Step> cycle;
};

class WaitingCalls {
 public:
  WaitingCalls(EngineState& state, Writer& writer)
      : state_(state), host_(state.host), queue_(state.queue), writer_(writer) {}
  WaitingCalls(const WaitingCalls&) = delete;
  WaitingCalls& operator=(const WaitingCalls&) = delete;

  bool empty() const { return queue_.empty(); }

  // The waiters that would be ahead of a new request for the lock.
  WaitersAhead AheadOfNewcomer(LockName lock, const KeyState& key_state,
                               const AcquireRequest& request, Instant now) const;

  // Makes the running call wait for the locks in `keys`, for which its request found `views`.
  ParkResult Park(const OpenKeys& keys, std::span<const LockView> views,
                  const AcquireRequest& request, std::optional<uint64_t> session,
                  Host::ParkableCaller caller, const Now& now);

  // Ends the owner's waits for any of `locks`, in all their queues. Their callers are answered in
  // the next pass of the event loop. Returns for each lock whether the owner was waiting for it.
  std::vector<bool> CancelWaits(std::span<const LockName> locks, Owner owner);

  // Whether there is a grant that may not have reached its caller yet.
  bool has_unconfirmed() const { return !in_flight_.empty() || !to_take_back_.empty(); }
  // The owner has learned of its hold under `token` through another call: the grant of that hold,
  // if its reply is still in transit to another of its connections, will not be taken back.
  void ConfirmGrants(LockName lock, Owner owner, Token token);

  // --- In RunDueWork

  // Answers calls that have timed out, were superseded or were cancelled. Writes nothing.
  void TimeOut(Tick now, Budget& budget);
  // Takes back grants that were not delivered. Requires that this server may write.
  void TakeBackUndelivered(Instant now, Budget& budget);
  // Grants free locks to waiters. Requires that this server may write.
  void GrantWaiters(const Now& now, Budget& budget);
  // Ends waits for locks whose slots are no longer served here. They are answered by TimeOut.
  void EndWaitsForLostSlots();

  // --- Reports of the host

  // The caller stopped waiting: either through CLIENT UNBLOCK … TIMEOUT, which counts as a
  // time-out; or because it disconnected, was killed, was unblocked by CLIENT UNBLOCK … ERROR, or
  // the server was demoted.
  void OnUnblocked(WaitingCall& call, bool timed_out, Tick now);
  // The host no longer needs the call. Destroys it.
  void OnReplied(WaitingCall* call, bool delivered);
  // This server was demoted: pending work no longer concerns it.
  void OnDemoted();
  // This server is a primary again. Calls that are still waiting (Valkey 9 unblocks waiters only
  // when another server has taken over) are tried again.
  void OnPromoted() { awaits_grace_end_ = !empty(); }

  // When RunDueWork will have work for waiting calls, other than time-outs.
  Due NextDue() const;
  bool has_undelivered() const { return !to_take_back_.empty(); }
  // Whether some wait has ended and its caller is not answered yet.
  bool has_ended() const { return !ended_.empty(); }

 private:
  static WaitingCall& CallOf(WaitQueue::Waiter& waiter) {
    return static_cast<WaitingCall&>(waiter);
  }

  void CountWait(const WaitingCall& call, Tick now);
  void EndWait(WaitingCall& call, WaitAnswer answer);
  void AnswerWith(WaitingCall& call, WaitAnswer answer,
                  WaitQueue::LeaveReason why = WaitQueue::LeaveReason::kGone);
  void Unpark(WaitingCall& call);
  // Records in the queue what blocks `call`, which must be queued.
  void Block(WaitingCall& call, std::span<const LockView> views, Instant now);
  std::vector<CycleStep> FindCycle(const WaitingCall& call,
                                   std::span<WaitQueue::Waiter* const> older_waits, Instant now);
  bool IsStillBlocked(WaitingCall& call, Instant now);
  // Returns about how many microseconds it took.
  size_t TryGrant(WaitingCall& call, const Now& now);
  void Grant(WaitingCall& call, OpenKeys& keys, std::span<const LockView> views,
             const Admission& admission, const Now& now);
  void TakeBack(const UnconfirmedGrant& grant, Instant now);

  EngineState& state_;
  Host& host_;
  WaitQueue& queue_;
  Writer& writer_;
  std::unordered_map<std::string, size_t> waiting_by_user_;
  // Calls that have left the queue and have an answer, which is sent in RunDueWork.
  IntrusiveList<WaitingCall, &WaitingCall::link_> ended_;
  IntrusiveList<UnconfirmedGrant, &UnconfirmedGrant::link>
      in_flight_;  // answered, not yet delivered
  std::deque<std::unique_ptr<UnconfirmedGrant>> to_take_back_;
  bool awaits_grace_end_ = false;  // some call waits for the end of the grace
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_WAITING_CALLS_H_
