// Calls that wait in line: parked, granted, timed out, gone.
//
// The caller is blocked by the host; its place is in the WaitQueue. Everything that may let it in
// only wakes its line, and opens no key: inside an event of the server that could remove a key that
// has expired, and replicate the removal in the wrong order or into the wrong database. Whatever is
// answered to a caller is answered in Engine::RunDueWork, just before the event loop sleeps: there
// a write is replicated in the right order, and on 7.0 no command can come between the answer and
// its delivery.
//
// Rejected: blocking on keys (RM_BlockClientOnKeys). Servers do not wake such clients when the key
// goes, or wake all of them, and a lost grant could not be told from a delivered one. Rejected:
// granting inside LOCK.RELEASE. A client unblocked there can still be timed out or killed in the
// same pass of the event loop, and 7.0 then loses its reply.

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
  kSuperseded,  // a newer call of the same owner took over its place
  kCancelled,   // a LOCK.RELEASE of the same owner
  kWrongType,   // a key holds something else now
};

// What a waiting call is answered: nothing (its time is over), a token, why the request cannot be
// granted, how the wait ended, or the server's own words.
using WaitAnswer = std::variant<std::monostate, Token, Outcome, WaitEnd, std::string>;

// Holds that were granted to a call whose caller may not have heard of it.
struct UnconfirmedGrant {
  int db;
  std::vector<std::string> keys;
  std::string owner;
  Token token;
  std::optional<Hold> upgraded;      // the shared hold that became this one; its owner is `owner`
  std::optional<uint64_t> bound_to;  // what connection that one was bound to
  bool confirmed = false;            // by another call, or it is not ours to take back any more
  Link<UnconfirmedGrant> link;

  bool IsFor(LockName lock, Owner to) const;
};

// A call that waits. Lives until the host is done with it (Engine::OnReplied).
class WaitingCall : public WaitQueue::Waiter {
 public:
  WaitingCall(const AcquireRequest& request, const Now& now, uint64_t connection,
              std::optional<uint64_t> session_connection, std::string user_name);

  const std::string& user() const { return user_; }
  // The connection to bind the hold to.
  std::optional<uint64_t> session() const { return session_; }
  const WaitAnswer& answer() const { return answer_; }

  // The host's own.
  void* handle = nullptr;

 private:
  friend class WaitingCalls;

  std::optional<uint64_t> session_;
  std::string user_;
  WaitAnswer answer_;
  std::unique_ptr<UnconfirmedGrant> grant_;
};

// Why a call may not wait, or that it does.
struct ParkResult {
  enum class Kind { kWaits, kNobody, kWaitLimit, kUserWaitLimit, kCannotWait, kDeadlock };
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

  // Whom a newcomer to the lock would find before it.
  Crowd AheadOfNewcomer(LockName lock, const Place& place, const AcquireRequest& request,
                        Instant now) const;

  // Lets the running call wait for the locks in `keys`, in which its request found `sites`.
  ParkResult Park(const OpenKeys& keys, std::span<const Site> sites, const AcquireRequest& request,
                  std::optional<uint64_t> session, const Now& now);

  // The owner gives up its waits for any of `locks`, in all their lines; their callers are answered
  // in the next pass of the event loop. Returns for each lock whether it was waited for.
  std::vector<bool> CancelWaits(std::span<const LockName> locks, Owner owner);

  // The owner heard of its hold by a call of its own: a grant that is still on its way to another
  // of its connections will not be taken back.
  void OnOwnerReplied(LockName lock, Owner owner) {
    if (!in_flight_.empty() || !to_take_back_.empty()) ConfirmGrants(lock, owner);
  }

  // --- In RunDueWork

  // Answers those whose time is over, whose place was taken over or whose wait was cancelled.
  // Writes nothing.
  void TimeOut(Tick now, Budget& budget);
  // Takes back what did not arrive. Only where this server may write.
  void TakeBackUndelivered(Instant now, Budget& budget);
  // Hands over what is free. Only where this server may write.
  void GrantWaiters(const Now& now, Budget& budget);
  // Answers those who wait for locks of which `why` tells why they cannot be granted here any more.
  // Writes nothing.
  void EndWaits(const std::function<std::optional<std::string>(LockName)>& why);

  // --- What the host tells

  // The caller stopped waiting: CLIENT UNBLOCK … TIMEOUT, which counts as a time-out; or it closed,
  // was killed, CLIENT UNBLOCK … ERROR, demoted.
  void OnUnblocked(WaitingCall& call, bool timed_out, Tick now);
  // The host is done with the call, which ends here.
  void OnReplied(WaitingCall* call, bool delivered);
  // This server was demoted: what is pending is no longer its business.
  void OnDemoted();
  // This server is a primary again. Who still waits (Valkey 9 sends waiters away only when another
  // has taken over) is looked at anew.
  void OnPromoted() { awaits_grace_ = !empty(); }

  // When RunDueWork will have something to do for them, other than time-outs: now if that is in the
  // past; none if nothing is due by itself.
  std::optional<Instant> NextDue() const;
  // Whether that is now.
  bool has_pending() const { return !to_unblock_.empty() || !to_take_back_.empty(); }

 private:
  static WaitingCall& CallOf(WaitQueue::Waiter& waiter) {
    return static_cast<WaitingCall&>(waiter);
  }

  void ConfirmGrants(LockName lock, Owner owner);
  void CountWait(const WaitingCall& call, Tick now);
  void UnblockLater(WaitingCall& call, WaitEnd why);
  void Send(WaitingCall& call, WaitAnswer answer, WaitQueue::Left why = WaitQueue::Left::kGone);
  void Unpark(WaitingCall& call);
  // What keeps the call waiting, which is in line.
  void Block(WaitingCall& call, std::span<const Site> sites, Instant now);
  std::vector<CycleStep> FindCycle(const WaitingCall& call,
                                   std::span<WaitQueue::Waiter* const> olders, Instant now);
  bool IsStillBlocked(WaitingCall& call, Instant now);
  // Returns about how many microseconds that took.
  size_t TryGrant(WaitingCall& call, const Now& now);
  void Grant(WaitingCall& call, OpenKeys& keys, std::span<const Site> sites,
             const Admission& admission, const Now& now);
  void TakeBack(const UnconfirmedGrant& grant, Instant now);

  EngineState& state_;
  Host& host_;
  WaitQueue& queue_;
  Writer& writer_;
  std::unordered_map<std::string, size_t> waiting_by_user_;
  std::vector<WaitingCall*> to_unblock_;  // out of line, with their answer
  IntrusiveList<UnconfirmedGrant, &UnconfirmedGrant::link>
      in_flight_;  // answered, not yet delivered
  std::deque<std::unique_ptr<UnconfirmedGrant>> to_take_back_;
  bool awaits_grace_ = false;  // somebody waits for the end of the grace
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_WAITING_CALLS_H_
