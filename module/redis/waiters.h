// Clients that wait in line: parked, granted, timed out, gone.
//
// A waiting client is blocked in the server; its place is in the core's WaitQueue. Everything that
// may let it in only wakes its line. Whatever is answered to it is answered just before the event
// loop sleeps (TimeOut and Settle, called by deferred.cc): there a write is replicated in the right
// order, and on 7.0 no command can come between the answer and its delivery.
//
// Rejected: blocking on keys (RM_BlockClientOnKeys). Servers do not wake such clients when the key
// goes, or wake all of them, and a lost grant could not be told from a delivered one. Rejected:
// granting inside LOCK.RELEASE. A client unblocked there can still be timed out or killed in the
// same pass of the event loop, and 7.0 then loses its reply.

#ifndef TURNSTILE_REDIS_WAITERS_H_
#define TURNSTILE_REDIS_WAITERS_H_

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

#include "core/decide.h"
#include "core/lock.h"
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

  // Lets the calling client wait for the locks in `keys`, or answers why it may not. `session`: the
  // connection to bind the hold to.
  int Park(RedisModuleCtx* ctx, LockKeys& keys, const AcquireRequest& request,
           std::optional<uint64_t> session, FineInstant now);

  // `hold` is new in the lock, or renewed.
  void LockHeld(LockName name, const Lock& lock, const Hold& hold);
  // The owner's hold is over, and others are not.
  void HoldGone(LockName lock, Owner owner);
  // Nobody holds the lock any more.
  void LockGone(LockName lock);
  // Somebody wrote to a key, which may be a lock with a line.
  void KeyChanged(RedisModuleCtx* ctx, RedisModuleString* name);
  // A whole database, or all of them, was emptied or exchanged.
  void DatabaseChanged(RedisModuleCtx* ctx, std::optional<int> db);

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
  void TimeOut(Tick now);

  // Takes back what did not arrive. Only where this server may write.
  void TakeBackUndelivered(RedisModuleCtx* ctx, Instant now);
  // Hands over what is free. Only where this server may write.
  void Settle(RedisModuleCtx* ctx, FineInstant now);

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
  // and when Settle will, or TimeOut for another reason.
  Instant NextDue() const;

 private:
  struct Parked;
  struct Grant;
  using Answer = std::variant<std::monostate, Token, std::string>;  // null, token, error

  void UnblockLater(Parked& parked, const char* why);
  void KeepGrants(LockName lock, Owner owner);
  Parked* FindParked(RedisModuleBlockedClient* client);
  void Send(Parked& parked, Answer answer);
  void LetGo(Parked& parked);
  void LookAtHolders(LockName lock, const Place& place, Instant now);
  void LookAgain(LockName lock, const Place& place, Instant now);
  void SettleLine(RedisModuleCtx* ctx, WaitQueue::Line& line, ClusterView& cluster,
                  FineInstant now);
  WaitQueue::Offered Offer(RedisModuleCtx* ctx, Parked& parked, LockName here, const Crowd& ahead,
                           ClusterView& cluster, FineInstant now);
  void TakeBack(RedisModuleCtx* ctx, const Grant& grant, Instant now);

  // What the server calls back: to write the answer; at CLIENT UNBLOCK … TIMEOUT; at any other end
  // of the wait (closed, killed, CLIENT UNBLOCK … ERROR, demoted); at the very end.
  static int OnReply(RedisModuleCtx* ctx, RedisModuleString** argv, int argc);
  static int OnUnblocked(RedisModuleCtx* ctx, RedisModuleString** argv, int argc);
  static void OnGone(RedisModuleCtx* ctx, RedisModuleBlockedClient* client);
  static void OnFree(RedisModuleCtx* ctx, void* data);

  WaitQueue queue_;
  std::unordered_map<RedisModuleBlockedClient*, Parked*> parked_;  // not answered yet
  std::vector<Parked*> to_unblock_;                                // out of line, with their answer
  std::vector<Grant*> in_flight_;                                  // answered, not yet delivered
  std::vector<std::unique_ptr<Grant>> to_take_back_;
  bool held_back_ = false;  // somebody waits for the end of the grace
};

Waiters& TheWaiters();

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_WAITERS_H_
