// Clients that wait in line: parked, granted, timed out, gone.
//
// A waiting client is blocked in the server; its place is in the core's WaitQueue. Everything that
// may let it in only wakes its line, and opens no key: inside an event of the server that could
// remove a key that has expired, and replicate the removal in the wrong order or into the wrong
// database. Whatever is answered to a client is answered just before the event loop sleeps (TimeOut
// and GrantWaiters, called by deferred.cc): there a write is replicated in the right order, and on
// 7.0 no command can come between the answer and its delivery.
//
// Rejected: blocking on keys (RM_BlockClientOnKeys). Servers do not wake such clients when the key
// goes, or wake all of them, and a lost grant could not be told from a delivered one. Rejected:
// granting inside LOCK.RELEASE. A client unblocked there can still be timed out or killed in the
// same pass of the event loop, and 7.0 then loses its reply.

#ifndef TURNSTILE_REDIS_WAITERS_H_
#define TURNSTILE_REDIS_WAITERS_H_

#include <deque>
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
#include "core/intrusive_list.h"
#include "core/wait_queue.h"
#include "redis/cluster.h"
#include "redis/lock_type.h"
#include "redis/redis_api.h"

namespace turnstile {

class Waiters {
 public:
  bool empty() const { return queue_.empty(); }
  size_t size() const { return queue_.size(); }
  // How many locks they wait for.
  size_t lines() const { return queue_.lines(); }
  std::vector<const WaitQueue::Line*> LongestLines(int db, size_t most) const {
    return queue_.LongestLines(db, most);
  }

  // The line of a lock, or null.
  WaitQueue::Line* Find(LockName lock) { return empty() ? nullptr : queue_.Find(lock); }

  // Whom a newcomer to the lock would find before it.
  Crowd AheadOfNewcomer(LockName lock, const Place& place, const AcquireRequest& request,
                        Instant now);

  // Lets the calling client wait for the locks in `keys`, in which a request found `sites` that
  // keep it waiting; or answers why it may not. `session`: the connection to bind the hold to.
  int Park(RedisModuleCtx* ctx, LockKeys& keys, const Sites& sites, const AcquireRequest& request,
           std::optional<uint64_t> session, FineInstant now);

  // A hold is new in the lock, or renewed, and blocks others until `end`.
  void HoldSet(LockName lock, Instant end) {
    if (!empty()) queue_.NoteEnd(lock, end);
  }
  // The lock may block fewer than before.
  void LockChanged(LockName lock) {
    if (!empty()) queue_.Wake(lock);
  }
  // So may whatever is in a key of this name, in whatever database: in a transaction Valkey 9 does
  // not tell which.
  void KeyChanged(std::string_view key) {
    if (!empty()) queue_.WakeEvery(key);
  }
  // A whole database, or all of them, was emptied or exchanged; or another rule says what is a
  // lock.
  void DatabaseChanged(std::optional<int> db) { queue_.WakeAll(db); }

  // The owner gives up its waits for any of `locks`, in all their lines; their callers are answered
  // UNBLOCKED in the next pass of the event loop. Returns for each lock whether it was waited for.
  std::vector<bool> CancelWaits(std::span<const LockName> locks, Owner owner);

  // The owner heard of its hold by a call of its own: a grant that is still on its way to another
  // of its connections will not be taken back.
  void OwnerWasTold(LockName lock, Owner owner) {
    if (!in_flight_.empty() || !to_take_back_.empty()) KeepGrants(lock, owner);
  }

  // Answers those whose time is over, whose place was taken over or whose wait was cancelled.
  // Writes nothing.
  void TimeOut(Tick now, Budget& budget);

  // Takes back what did not arrive. Only where this server may write.
  void TakeBackUndelivered(RedisModuleCtx* ctx, Instant now, Budget& budget);
  // Hands over what is free. Only where this server may write.
  void GrantWaiters(RedisModuleCtx* ctx, FineInstant now, Budget& budget);

  // Answers those who wait for locks that this node of a cluster does not serve any more. Writes
  // nothing.
  void LeaveLostSlots(ClusterView& cluster);

  // This server was demoted: what it owes is no longer its business.
  void ForgetDebts();
  // This server is a primary again. Who still waits (Valkey 9 sends waiters away only when another
  // has taken over) is looked at anew.
  void Promoted() { held_back_ = !empty(); }

  // When TimeOut will have something to do because somebody's time is over,
  Tick NextTimeOut() const { return queue_.NextTimeOut(); }
  // and when GrantWaiters or TakeBackUndelivered will, or TimeOut for another reason.
  Instant NextDue() const;

 private:
  struct Parked;
  // Holds that were granted to a waiter whose client may not have heard of it.
  struct Grant {
    int db;
    std::vector<std::string> keys;
    std::string owner;
    Token token;
    std::optional<Hold> upgraded;      // the shared hold that became this one; its owner is `owner`
    std::optional<uint64_t> bound_to;  // what connection that one was bound to
    bool told = false;                 // by another call, or it is not ours to take back any more
    Link<Grant> link;

    bool IsFor(LockName lock, Owner to) const;
  };
  using Answer = std::variant<std::monostate, Token, std::string>;  // null, token, error

  void UnblockLater(Parked& parked, const char* why);
  void KeepGrants(LockName lock, Owner owner);
  Parked* FindParked(RedisModuleBlockedClient* client);
  void Send(Parked& parked, Answer answer, WaitQueue::Left why = WaitQueue::Left::kGone);
  void Unpark(Parked& parked);
  // What keeps the waiter waiting, which is in line.
  void Block(Parked& parked, std::span<const Site> sites, Instant now);
  std::vector<CycleStep> FindCycle(RedisModuleCtx* ctx, const Parked& parked,
                                   std::span<WaitQueue::Waiter* const> olders, Instant now);
  bool IsStillBlocked(RedisModuleCtx* ctx, Parked& parked, Instant now);
  // Returns about how many microseconds that took.
  size_t TryGrant(RedisModuleCtx* ctx, Parked& parked, ClusterView& cluster, FineInstant now);
  void TakeBack(RedisModuleCtx* ctx, const Grant& grant, Instant now);

  // What the server calls back: to write the answer; at CLIENT UNBLOCK … TIMEOUT; at any other end
  // of the wait (closed, killed, CLIENT UNBLOCK … ERROR, demoted); at the very end.
  static int OnReply(RedisModuleCtx* ctx, RedisModuleString** argv, int argc);
  static int OnUnblocked(RedisModuleCtx* ctx, RedisModuleString** argv, int argc);
  static void OnDisconnect(RedisModuleCtx* ctx, RedisModuleBlockedClient* client);
  static void OnFree(RedisModuleCtx* ctx, void* data);

  WaitQueue queue_;
  std::unordered_map<RedisModuleBlockedClient*, Parked*> parked_;  // not answered yet
  std::unordered_map<std::string, size_t> waiting_by_user_;
  std::vector<Parked*> to_unblock_;               // out of line, with their answer
  IntrusiveList<Grant, &Grant::link> in_flight_;  // answered, not yet delivered
  std::deque<std::unique_ptr<Grant>> to_take_back_;
  bool held_back_ = false;  // somebody waits for the end of the grace
};

Waiters& TheWaiters();

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_WAITERS_H_
