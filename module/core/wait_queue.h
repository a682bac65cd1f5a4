// Who waits for which locks, in which order, and who would wait for whom in a circle.
//
// One line a lock, in order of arrival. A waiting call stands in the line of every lock that it
// asks for. A place in a line costs O(1) to enter, to leave and to be granted: lines are intrusive
// lists. Only what is due at some time (time-outs, ends of holds) is kept in order, in two ordered
// sets.
//
// The queue grants nothing. It says which lines may have a new holder (they were *woken*: the lock
// was freed, a lease ended, somebody left the line) and offers those who stand in it to the caller
// (Settle), who decides each request exactly as a newcomer's. So there is one grant rule, the one
// in decide.h; and nobody overtakes, because everybody is told who came before.
//
// A shared holder that waits to become an exclusive one stands before all whom it already blocks:
// they could not enter before it anyway, and behind them it would wait for ever.
//
// Deadlocks. Owners wait for owners: whoever stands in a line waits for those holders of the lock,
// and those ahead in the line, that it is not compatible with. A wait by which an owner would wait
// for itself, over any number of steps, must not begin. Among limits it takes more: such a wait is
// stuck only when so many holders, and waiters ahead, are stuck themselves that the others could
// not make room. A hold that lingers is waited for, but its owner is not. Nobody can wait for an
// owner that neither holds a lock with a line nor stands in one: for nearly all callers the check
// is that one look-up. Checking when a wait begins is enough: a grant and a leave only take edges
// away. (A stranger's SET or RENAME can still close a cycle; the leases open it again.)
//
// The holders of a lock with a line are remembered here, with the ends of their holds, and the
// caller keeps that true (SetHolder, RemoveHolder, ClearHolders); so the search needs to look at no
// key.

#ifndef TURNSTILE_CORE_WAIT_QUEUE_H_
#define TURNSTILE_CORE_WAIT_QUEUE_H_

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/decide.h"
#include "core/intrusive_list.h"
#include "core/request.h"
#include "core/types.h"

namespace turnstile {

// A lock of this server. A view: whoever keeps it copies it.
struct LockName {
  int db = 0;
  std::string_view key;
  friend constexpr bool operator==(LockName, LockName) = default;
};

class WaitQueue {
 public:
  class Line;
  class Waiter;
  struct Party;  // an owner that waits, or that somebody waits for

  // A waiting call's place in one line.
  class Place {
   public:
    Waiter& waiter() const { return *waiter_; }
    const Place* behind() const { return link_.after; }

   private:
    friend class WaitQueue;

    Waiter* waiter_ = nullptr;
    Line* line_ = nullptr;
    Link<Place> link_;
    uint64_t passed_ = 0;            // the last search that came past,
    uint64_t passed_by_shared_ = 0;  // the last that came past on behalf of a shared waiter,
    uint64_t stuck_ = 0;             // and the last that found no way on from here
  };

  // One waiting call. Derive from it to say how to reach the caller.
  class Waiter {
   public:
    // `client_id`: the connection that waits; 0 if nobody needs to know.
    Waiter(const AcquireRequest& request, Tick since, Tick deadline, uint64_t client_id = 0)
        : request_(request), since_(since), deadline_(deadline), client_id_(client_id) {
      request_.also = {};
    }
    Waiter(const Waiter&) = delete;
    Waiter& operator=(const Waiter&) = delete;

    // What is asked for. Its owner is valid while the waiter stands in line; its other keys are
    // the locks below.
    const AcquireRequest& request() const { return request_; }

    // Of which locks; in the order in which the caller named them.
    size_t size() const { return places_.size(); }
    LockName lock(size_t index) const;
    // Who stands before this waiter there.
    Crowd AheadOf(size_t index) const;

    Tick since() const { return since_; }
    Tick deadline() const { return deadline_; }
    uint64_t client_id() const { return client_id_; }
    bool in_line() const { return !places_.empty(); }
    bool WaitsFor(LockName lock) const;

   private:
    friend class WaitQueue;

    AcquireRequest request_;
    Tick since_;
    Tick deadline_;
    uint64_t client_id_;
    std::vector<Place> places_;
    Party* party_ = nullptr;
    Link<Waiter> of_party_;  // among all waits of the owner
    uint64_t ignored_ = 0;   // the last search that took it for gone
  };

  // A party that holds the lock of a line.
  struct Holding {
    Party* party = nullptr;
    Line* line = nullptr;
    Instant until;  // it keeps others out
    Instant end;    // it is its owner's; after that it only lingers, and goes by itself
    Link<Holding> of_party;
  };

  // All who wait for one lock. Exists while somebody does.
  class Line {
   public:
    LockName lock() const { return lock_; }
    const Place* first() const { return places_.first(); }
    size_t size() const { return places_.size(); }

    // Those whom a newcomer would find before it, counted and not looked at one by one: a rush of
    // readers costs no more for each. An upgrade finds only those whom its shared hold does not
    // block.
    Crowd Ahead(bool upgrade) const;

    // How many are known to hold the lock.
    size_t holders() const { return holdings_.size(); }

    // Since when whoever has waited longest waits.
    Tick waiting_since() const;

   private:
    friend class WaitQueue;

    Place* FirstBlockedByShared() const;
    void Insert(Place* next, Place& place);
    void Remove(Place& place);
    // Whoever stands in a place is counted by its request.
    void Count(const AcquireRequest& request);
    void Discount(const AcquireRequest& request);

    LockName lock_;  // a view of the key that this line is found by
    IntrusiveList<Place, &Place::link_> places_;
    std::map<std::string_view, Holding> holdings_;  // by owner, so that a cycle has one name
    Mode mode_ = Mode::kExclusive;                  // of the holders; meaningless without any
    uint64_t searched_ = 0;                         // the last search that looks at it
    size_t shared_ = 0;                             // how many wait for a shared hold,
    size_t limited_ = 0;                            // how many for one with a limit,
    std::map<uint32_t, size_t> limits_;             // and how many with each limit
  };

  // `owner` waits for `lock`; the owner of the next step, or of the first after the last, holds it
  // or stands before.
  struct Step {
    Owner owner;
    LockName lock;
  };

  WaitQueue() = default;
  WaitQueue(const WaitQueue&) = delete;
  WaitQueue& operator=(const WaitQueue&) = delete;

  size_t size() const { return timeouts_.size(); }
  bool empty() const { return timeouts_.empty(); }

  // The line of a lock, or null if nobody waits for it.
  Line* Find(LockName lock);

  // The locks that somebody waits for, of one database or of all.
  std::vector<LockName> Locks(std::optional<int> db) const;
  // How many they are.
  size_t lines() const;
  // The `most` longest lines of a database, the longest first; equal ones by name.
  std::vector<const Line*> LongestLines(int db, size_t most) const;

  // The waiting calls of `owner` for any of `locks`.
  std::vector<Waiter*> FindWaiters(std::span<const LockName> locks, Owner owner);

  // Whether `waiter` waits for exactly `locks`, in whatever order, in this mode.
  static bool WaitsFor(const Waiter& waiter, std::span<const LockName> locks, Mode mode);

  // Whether somebody may wait for `owner`. If not, a wait of it closes no cycle.
  bool MayBeWaitedFor(Owner owner) { return FindParty(owner) != nullptr; }

  // Puts `waiter` at the end of the lines of `locks`; an upgrade, which is of one lock, before all
  // whom its shared hold blocks. A line that did not exist has no holders yet: SetHolder.
  void Enter(Waiter& waiter, std::span<const LockName> locks, Owner owner, bool upgrade);

  // The steps by which the owner of `waiter` waits for itself since that wait began: the fewest,
  // that wait first. Empty if it does not. The waits of `ignored` are taken for gone; all other
  // waits of the owner for any of the same locks must be among them. Views into the queue.
  //
  // kAnyWait: one that took over a place and asks for less room than its predecessor did. Those
  // behind may wait for it now who did not before, so another wait of its owner may be the first.
  enum class From { kThisWait, kAnyWait };
  std::vector<Step> FindCycle(Waiter& waiter, std::span<Waiter* const> ignored, Instant now,
                              From from = From::kThisWait);

  // Puts `newer` into the places of `older`, a waiter for the same locks under the same owner.
  void TakeOver(Waiter& newer, Waiter& older);

  // Takes `waiter` out. Those behind move up: the lines, where there still are any, wake.
  void Leave(Waiter& waiter);

  // `owner` holds the lock until `until`, the last `linger` of that as a hold that has ended:
  // alone, or with those that do so already. The line wakes when the hold is over, or now if the
  // mode changes. Nothing happens if nobody waits for the lock; nor do the next two do anything
  // then.
  enum class Company { kAlone, kWithOthers };
  void SetHolder(LockName lock, Mode mode, Owner owner, Instant until, Company company,
                 Millis linger = Millis{0});
  // `owner` does not hold it any more. The line wakes.
  void RemoveHolder(LockName lock, Owner owner);
  // Nobody holds it. The line wakes.
  void ClearHolders(LockName lock);

  // The locks may have changed in ways that only a look at them can tell.
  void Wake(LockName lock);
  void WakeAll();

  // A woken line, or null. It stays woken until it is settled.
  Line* FirstWoken(Instant now);

  // Calls `offer` with each who stands in the line, from the front, and says who stands before it.
  // `offer` takes the waiter out and returns kLeft, or kTookAll if it holds the lock alone now; or
  // it leaves it where it is and says whether this lock or only another one keeps it waiting. Whom
  // this lock keeps waiting keeps waiting all behind it.
  enum class Offered { kLeft, kTookAll, kBlockedHere, kBlockedElsewhere };
  template <typename Offer>
  void Settle(Line& line, Offer offer);

  // A waiter whose time is over, or null. The caller takes it out.
  Waiter* FirstTimedOut(Tick now) const;
  // When there is one next; kMaxTick if nobody waits.
  Tick NextTimeOut() const;

  // The moment at which a line wakes without anything happening before; kMaxInstant if none does.
  // `kMinInstant` if one is awake.
  Instant NextDue() const;

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
  };
  template <typename Value>
  using ByText = std::unordered_map<std::string, Value, Hash, std::equal_to<>>;

  class CycleSearch;

  Line& LineOf(LockName lock);
  Party& PartyOf(Owner owner);
  Party* FindParty(Owner owner);
  void DropIfIdle(Party& party);
  void Drop(Line& line);
  using HoldingAt = std::map<std::string_view, Holding>::iterator;
  // Returns the next of the line.
  HoldingAt Remove(Line& line, HoldingAt holding);
  void ClearHolders(Line& line);

  std::unordered_map<int, ByText<Line>> lines_;  // by database and key
  ByText<Party> parties_;
  std::unordered_set<Line*> woken_;
  std::set<std::pair<Instant, Holding*>> ends_;
  std::set<std::pair<Tick, Waiter*>> timeouts_;
  uint64_t searches_ = 0;
};

struct WaitQueue::Party {
  Owner owner;  // a view of the key that this party is found by
  IntrusiveList<Waiter, &Waiter::of_party_> waits;
  IntrusiveList<Holding, &Holding::of_party> held;

  // How the search numbered `seen` came here: by which waiting party, over which lock.
  uint64_t seen = 0;
  const Party* reached_from = nullptr;
  LockName reached_over;
  uint64_t stuck = 0;       // the last search that found it stuck,
  size_t stuck_places = 0;  // in so many places
};

template <typename Offer>
void WaitQueue::Settle(Line& line, Offer offer) {
  Crowd ahead;
  Offered offered = Offered::kLeft;
  // Whoever leaves takes only its own places along, and with the last of them the line.
  Place* place = line.places_.first();
  while (place != nullptr && offered != Offered::kBlockedHere && offered != Offered::kTookAll) {
    Waiter& waiter = *place->waiter_;
    place = place->link_.after;
    offered = offer(waiter, std::as_const(ahead));
    const bool stays = offered == Offered::kBlockedHere || offered == Offered::kBlockedElsewhere;
    if (stays) ahead.Add(waiter.request_.mode, waiter.request_.limit);
  }
  if (ahead.size > 0 || place != nullptr) woken_.erase(&line);
}

// For a cycle, which is not empty:
// "waiting for "b" would close the cycle worker-1 -> "b" -> worker-2 -> "a" -> worker-1". Locks
// that are not `visible` to the reader, and those who hold them or stand before, appear as "?".
std::string DescribeCycle(const std::vector<WaitQueue::Step>& cycle,
                          const std::function<bool(LockName)>& visible);

}  // namespace turnstile

#endif  // TURNSTILE_CORE_WAIT_QUEUE_H_
