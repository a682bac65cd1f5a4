// Calls that wait: parked, granted, timed out or disconnected.
//
// The host blocks the caller, unless the request names a channel: then the caller goes on, and the
// answer is published there. The call's entries are in the WaitQueue. Everything that may allow a
// grant only wakes a queue and opens no key: inside a server event that could remove an expired
// key, and replicate the removal in the wrong order or into the wrong database. All answers to
// waiting callers are sent in Engine::RunDueWork, just before the event loop sleeps. There a write
// is replicated in the right order, and on 7.0 no command can run between the answer and its
// delivery.
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
#include <set>
#include <span>
#include <string>
#include <unordered_map>
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

// Holds granted to a call whose caller may not have received the reply.
struct UnconfirmedGrant {
  int db;
  std::vector<std::string> keys;
  std::string owner;
  Token token;
  std::optional<Hold> upgraded;      // the shared hold that was upgraded; its owner is `owner`,
  std::string tag;                   // and its tag this
  std::optional<uint64_t> bound_to;  // the connection that the upgraded hold was bound to
  bool confirmed = false;            // by another call, or it can no longer be taken back
  Link<UnconfirmedGrant> link;

  bool IsFor(LockName lock, Owner to, Token under) const;
};

// A call that waits. One that blocks its client exists until the host no longer needs it
// (Engine::OnReplied), one that is notified until its answer is published.
class WaitingCall : public WaitQueue::Waiter {
 private:
  // These fit into what is left of the last word of Waiter. The first three are of calls that are
  // notified.
  uint8_t places_ = 0;         // how many it counts for
  uint8_t term_ = 0;           // WaitingCalls::term_ when it began
  uint8_t first_ : 7 = 0;      // the index of the lock that the call named first
  uint8_t has_ended_ : 1 = 0;  // whether it is in WaitingCalls::ended_

 public:
  // `connection`: of the caller; zero if the wait is not bound to any. `user` must outlive it.
  WaitingCall(const AcquireRequest& request, const Now& now, uint64_t connection,
              const std::string& user);

  const std::string& user() const { return *user_; }
  bool is_notified() const { return request().notify.has_value(); }
  // The connection to bind the hold to.
  std::optional<uint64_t> session() const {
    return request().session ? std::optional(client_id()) : std::nullopt;
  }
  // Requires that the wait has ended.
  const WaitAnswer& answer() const { return ending_->answer; }

  // For the host's own use.
  void* handle = nullptr;

 private:
  friend class WaitingCalls;

  // What is needed when the wait ends.
  struct Ending {
    WaitAnswer answer;
    std::string key;    // that the message names, and
    std::string owner;  // who asked, if the call is notified
    std::unique_ptr<UnconfirmedGrant> grant;
  };
  Ending& ending() {
    if (ending_ == nullptr) ending_ = std::make_unique<Ending>();
    return *ending_;
  }

  const std::string* user_;
  std::unique_ptr<Ending> ending_;
  Link<WaitingCall> link_;

  Link<WaitingCall> of_kind_;        // among those that are notified, or those that are not
  Link<WaitingCall> of_connection_;  // of one that is notified
};

// Whether a call waits, or why it may not.
struct ParkResult {
  enum class Kind {
    kWaits,
    kLineFull,
    kWaitLimit,
    kUserWaitLimit,
    kQueueLimit,
    kCannotWait,
    kDeadlock
  };
  Kind kind;
  size_t limit = 0;

  struct Step {
    std::string name;  // the tag of the wait, or else its owner
    int db;
    std::string key;
  };
  std::vector<Step> cycle;
};

class WaitingCalls {
 public:
  WaitingCalls(EngineState& state, Writer& writer)
      : state_(state), host_(state.host), queue_(state.queue), writer_(writer) {}
  ~WaitingCalls();
  WaitingCalls(const WaitingCalls&) = delete;
  WaitingCalls& operator=(const WaitingCalls&) = delete;

  bool empty() const { return queue_.empty(); }
  // The number of calls that block their clients; the number of entries of those that do not; and
  // how many entries those had whose end is not published yet.
  size_t blocked() const { return blocked_.size(); }
  size_t places() const { return places_; }
  size_t ended_places() const { return ended_places_; }
  // Whether any wait ends with its connection.
  bool has_sessions() const { return !of_connections_.empty(); }

  // The waiters that would be ahead of a new request for the lock.
  WaitersAhead AheadOfNewcomer(LockName lock, const KeyState& key_state,
                               const AcquireRequest& request, Instant now) const;

  // Makes the running call wait for the locks in `keys`, for which its request found `views`. If it
  // is to be notified, its caller is not blocked.
  ParkResult Park(const OpenKeys& keys, std::span<const LockView> views,
                  const AcquireRequest& request, const Host::ParkableCaller& caller,
                  const Now& now);

  // Ends the owner's waits for any of `locks`, in all their queues. Their callers are answered in
  // the next pass of the event loop. Returns for each lock whether the owner was waiting for it.
  std::vector<bool> CancelWaits(std::span<const LockName> locks, Owner owner);

  // A call of this owner was answered under this id: nothing is published of an earlier one of it
  // that used the id.
  void Retract(Owner owner, const NotifyTarget& target);

  // Whether there is a grant that may not have reached its caller yet.
  bool has_unconfirmed() const { return !in_flight_.empty() || !to_take_back_.empty(); }
  // The owner has learned of its hold under `token` through another call: the grant of that hold,
  // if its reply is still in transit to another of its connections, will not be taken back.
  void ConfirmGrants(LockName lock, Owner owner, Token token);

  // --- In RunDueWork

  // Answers calls that were superseded or cancelled, or whose connection or server is not what it
  // was. Writes nothing.
  void AnswerEnded(Budget& budget);
  // The same with half of the budget, and then those that have timed out.
  void TimeOut(Tick now, Budget& budget);
  // Takes back grants that were not delivered. Requires that this server may write.
  void TakeBackUndelivered(Instant now, Budget& budget);
  // Grants free locks to waiters. Requires that this server may write.
  void GrantWaiters(const Now& now, Budget& budget);
  // Slots may have been lost: looks at all waits, and ends those for locks that are no longer
  // served here. They are answered by TimeOut.
  void LookForLostSlots();
  void EndWaitsForLostSlots(Budget& budget);

  // --- Reports of the host

  // The caller stopped waiting: either through CLIENT UNBLOCK … TIMEOUT, which counts as a
  // time-out; or because it disconnected, was killed, was unblocked by CLIENT UNBLOCK … ERROR, or
  // the server was demoted.
  void OnUnblocked(WaitingCall& call, bool timed_out, Tick now);
  // The host no longer needs the call. Destroys it.
  void OnReplied(WaitingCall* call, bool delivered);
  // The connection closed: the waits that are bound to it end. Returns whether there are any.
  bool OnDisconnected(uint64_t connection);
  // This server was demoted: pending work no longer concerns it. The host ends the waits of those
  // that it has blocked; the others end in TimeOut.
  void OnDemoted();
  // This server is a primary again. Calls that are still waiting (Valkey 9 unblocks waiters only
  // when another server has taken over) are tried again.
  void OnPromoted() { awaits_grace_end_ = !empty(); }

  // When RunDueWork will have work for waiting calls, other than time-outs.
  Due NextDue() const;
  bool has_undelivered() const { return !to_take_back_.empty(); }
  // Whether some wait has ended and its caller is not answered yet, or may have with its slot.
  bool has_ended() const {
    return !ended_.empty() || !closed_.empty() || HasFormerTerm() || LooksForLostSlots();
  }

 private:
  using OfConnection = IntrusiveList<WaitingCall, &WaitingCall::of_connection_>;

  static WaitingCall& CallOf(WaitQueue::Waiter& waiter) {
    return static_cast<WaitingCall&>(waiter);
  }

  // The calls that block their clients, or those that are notified; in order of arrival.
  using OfKind = IntrusiveList<WaitingCall, &WaitingCall::of_kind_>;

  bool LooksForLostSlots() const {
    return next_blocked_to_look_at_ != nullptr || next_notified_to_look_at_ != nullptr;
  }
  // Whoever goes is not looked at any more.
  void RemoveOfKind(WaitingCall& call);
  // Whether a call is left that began before this server was last demoted.
  bool HasFormerTerm() const { return !notified_.empty() && notified_.first()->term_ != term_; }
  bool IsLineFull(std::span<const LockName> locks, const AcquireRequest& request,
                  std::span<WaitQueue::Waiter* const> older_waits) const;
  // Why one more call may not wait, if it may not.
  std::optional<ParkResult> FindLimit(const AcquireRequest& request, size_t places,
                                      const std::string& user,
                                      std::span<WaitQueue::Waiter* const> older_waits) const;
  void CountWait(const WaitingCall& call, Tick now);
  // Must be called before a call leaves its queues, which have the names that its ending needs.
  static void RememberNames(WaitingCall& call);
  void Leave(WaitingCall& call, WaitQueue::LeaveReason why = WaitQueue::LeaveReason::kGone);
  // Adds a call that is notified to all state here, and takes it out again.
  void AddNotified(WaitingCall& call, size_t first);
  void RemoveNotified(WaitingCall& call);
  // Counts a call of a user. Returns the name that the call keeps.
  const std::string& CountUser(const std::string& user);
  void UncountUser(const std::string& user);
  // Publishes what a notified call is answered.
  Delivery Publish(const WaitingCall& call, WaitAnswer answer, std::string_view key);
  // A call whose connection has closed, or of a former term. EndOrphans ends these.
  bool IsOrphan(const WaitingCall& call) const;
  void EndOrphans(Budget& budget);
  size_t EndOrphan(WaitingCall& call);
  void EndWait(WaitingCall& call, WaitAnswer answer);
  // These return what is to be added to the price of an answer.
  size_t AnswerWith(WaitingCall& call, WaitAnswer answer,
                    WaitQueue::LeaveReason why = WaitQueue::LeaveReason::kGone);
  size_t Unpark(WaitingCall& call);
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
  OfKind blocked_;
  size_t places_ = 0;
  size_t ended_places_ = 0;  // that they had, of those whose end is not published yet
  uint8_t term_ = 0;         // changes with each demotion
  OfKind notified_;
  WaitingCall* next_blocked_to_look_at_ = nullptr;
  WaitingCall* next_notified_to_look_at_ = nullptr;
  std::unordered_map<uint64_t, OfConnection> of_connections_;  // those that end with theirs
  std::set<uint64_t> closed_;                                  // connections with such calls
  // Calls that have left the queue and have an answer, which is sent in RunDueWork.
  IntrusiveList<WaitingCall, &WaitingCall::link_> ended_;
  IntrusiveList<UnconfirmedGrant, &UnconfirmedGrant::link>
      in_flight_;  // answered, not yet delivered
  std::deque<std::unique_ptr<UnconfirmedGrant>> to_take_back_;
  bool awaits_grace_end_ = false;  // some call waits for the end of the grace
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_WAITING_CALLS_H_
