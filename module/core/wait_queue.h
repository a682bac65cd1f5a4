// Who waits for which locks, in which order, and whom to try next.
//
// One queue per lock (a line), in order of arrival. A waiting call has a place in the line of every
// lock that it asks for. Entering and leaving a line costs O(log n) in the number of those who
// wait.
//
// The queue grants nothing. It says who may have a chance now (NextToTry); the caller decides that
// request exactly as a newcomer's, so there is one grant rule, the one in decide.h. Whoever cannot
// be granted is told to the queue together with the lock that blocks it (Block), and is not tried
// again before that line wakes: because the lock was freed, a lease ended, or somebody ahead left.
// What wakes at the same time is tried in order of arrival over all lines, so tokens follow arrival
// within every lock.
//
// Whom a lock keeps waiting keeps waiting all behind it in that line: nobody overtakes.
//
// A shared holder that waits to become an exclusive one stands before all whom it already blocks:
// they could not enter before it anyway, and behind them it would wait for ever.
//
// Order comes from sequence numbers only, never from addresses or hashes: the same calls give the
// same history in every build.
//
// Rejected: trying everybody in every woken line. A call that waits for 65 locks was then tried 65
// times for each call that left, against everybody ahead of it in 65 lines: cubic. Rejected: a copy
// of the holders of each lock with a line. It made a wait cost as much as the lock has holders.

#ifndef TURNSTILE_CORE_WAIT_QUEUE_H_
#define TURNSTILE_CORE_WAIT_QUEUE_H_

#include <compare>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/decide.h"
#include "core/intrusive_list.h"
#include "core/request.h"
#include "core/types.h"

namespace turnstile {

class WaitQueue {
 public:
  class Line;
  class Waiter;
  struct Party;

  // Where a place stands: by arrival, and an upgrade just before the place that it was put before.
  struct Order {
    uint64_t arrival = 0;
    int64_t before = 0;  // zero or negative
    friend constexpr auto operator<=>(const Order&, const Order&) = default;
  };

  // A waiting call's place in one line.
  class Place {
   public:
    Waiter& waiter() const { return *waiter_; }
    const Place* behind() const { return link_.after; }

   private:
    friend class WaitQueue;
    friend class DeadlockSearch;

    Waiter* waiter_ = nullptr;
    Line* line_ = nullptr;
    Order order_;
    Link<Place> link_;
    Link<Place> among_unshared_;
    Link<Place> among_unlimited_;
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
    bool WaitsFor(LockName lock) const;
    // Who stands before this waiter there, as far as its request is concerned.
    Crowd AheadOf(size_t index) const;
    // Which of its locks was found to block it last, if one was.
    std::optional<size_t> blocked_at() const { return blocked_at_; }

    Tick since() const { return since_; }
    Tick deadline() const { return deadline_; }
    uint64_t client_id() const { return client_id_; }
    bool in_line() const { return !places_.empty(); }

   private:
    friend class WaitQueue;
    friend class DeadlockSearch;

    AcquireRequest request_;
    Tick since_;
    Tick deadline_;
    uint64_t client_id_;
    uint64_t number_ = 0;  // unique among those that wait, in order of Enter and TakeOver
    std::vector<Place> places_;
    std::optional<size_t> blocked_at_;
    bool registered_ = false;  // in the line of that lock, or in all its lines
    Party* party_ = nullptr;
    Link<Waiter> of_party_;  // among all waits of the owner
  };

  // All who wait for one lock. Exists while somebody does.
  class Line {
   public:
    LockName lock() const { return lock_; }
    const Place* first() const { return places_.first(); }
    size_t size() const { return places_.size(); }

    // Whom a newcomer with this request would find before it. An upgrade finds only those whom its
    // shared hold does not block. While the line has work that was put off, nobody is compatible
    // with those who wait: a newcomer must not be served before them.
    Crowd Ahead(bool upgrade, Instant now) const;

    // Whether somebody may have a chance who has not been tried yet.
    bool put_off(Instant now) const {
      return woken_.has_value() || (end_.has_value() && *end_ < now);
    }

    // Since when whoever has waited longest waits. Looks only at the front, where that one stands
    // unless many have taken over the places of older calls.
    Tick waiting_since() const;

   private:
    friend class WaitQueue;
    friend class DeadlockSearch;

    void Insert(Place& place, bool upgrade);
    void Remove(Place& place);
    // Whoever stands in a place is counted by its request.
    void Count(const AcquireRequest& request);
    void Discount(const AcquireRequest& request);

    LockName lock_;  // a view of the key that this line is found by
    uint64_t number_ = 0;
    IntrusiveList<Place, &Place::link_> places_;
    // The same without those who ask for a shared hold, and without those who ask for one with a
    // limit: whom a request of that kind minds.
    IntrusiveList<Place, &Place::among_unshared_> unshared_;
    IntrusiveList<Place, &Place::among_unlimited_> unlimited_;
    std::map<uint32_t, size_t> limits_;  // how many wait with each limit
    // Those that this lock blocks, as far as is known, and those of whom nothing is known.
    std::map<Order, Place*> to_try_;
    std::optional<Order> woken_;    // as what it stands among the woken lines
    std::optional<Instant> end_;    // after this moment it wakes
    size_t with_other_places_ = 0;  // how many here have owners with more than one place
    Link<Line> of_size_;

    // Where the deadlock search of this number keeps what it knows of the line.
    mutable uint64_t seen_by_ = 0;
    mutable size_t seen_at_ = 0;
  };

  // An owner that waits.
  struct Party {
    Owner owner;  // a view of the key that this party is found by
    IntrusiveList<Waiter, &Waiter::of_party_> waits;
    size_t places = 0;  // of all its waits
    Link<Party> link;   // among all parties, in order of arrival

    // How the deadlock search of this number came here: from which party, over which lock.
    mutable uint64_t reached_by = 0;
    mutable const Party* reached_from = nullptr;
    mutable LockName reached_over;
  };

  WaitQueue() = default;
  WaitQueue(const WaitQueue&) = delete;
  WaitQueue& operator=(const WaitQueue&) = delete;

  size_t size() const { return timeouts_.size(); }
  bool empty() const { return timeouts_.empty(); }

  // The line of a lock, or null if nobody waits for it.
  Line* Find(LockName lock);

  // How many locks somebody waits for.
  size_t lines() const;
  // The `most` longest lines of a database, the longest first; equal ones by name.
  std::vector<const Line*> LongestLines(int db, size_t most) const;

  // All who wait, those whose time is over first coming first.
  std::vector<Waiter*> Waiters() const;
  // The waiting calls of `owner` for any of `locks`.
  std::vector<Waiter*> FindWaiters(std::span<const LockName> locks, Owner owner);

  // Whether `waiter` waits for exactly `locks`, in whatever order, in this mode.
  static bool WaitsFor(const Waiter& waiter, std::span<const LockName> locks, Mode mode);

  // Puts `waiter` at the end of the lines of `locks`; an upgrade, which is of one lock, before all
  // whom its shared hold blocks. The caller has tried it, and calls Block or Suspend.
  void Enter(Waiter& waiter, std::span<const LockName> locks, Owner owner, bool upgrade);

  // Puts `newer` into the places of `older`, a waiter for the same locks under the same owner. Its
  // lines wake: it may ask for less than the older did.
  void TakeOver(Waiter& newer, Waiter& older);

  // Why a waiter leaves its lines.
  enum class Left {
    kGone,        // those behind move up: the lines wake
    kHoldsAlone,  // it has become the only holder of its locks, which blocks all behind it
  };
  void Leave(Waiter& waiter, Left why = Left::kGone);

  // `waiter` was tried, and its lock `index` blocks it. No hold of that lock ends before
  // `next_end`, if any does by itself.
  void Block(Waiter& waiter, size_t index, std::optional<Instant> next_end);
  // `waiter` was tried, and no lock blocks it, but nobody may become a holder now. Its lines sleep
  // until they are woken.
  void Suspend(Waiter& waiter);

  // A hold of the lock ends at `end`, maybe sooner than was known.
  void NoteEnd(LockName lock, Instant end);

  // The lock may have changed in a way that lets somebody in.
  void Wake(LockName lock);
  // So may the lock of this name in every database.
  void WakeEvery(std::string_view key);
  // So may all locks of a database, or of all.
  void WakeAll(std::optional<int> db);

  // Of those in woken lines who are not known to be blocked elsewhere, the one that came first;
  // null if there is none. The caller tries it, and calls Leave, Block or Suspend.
  Waiter* NextToTry(Instant now);

  // A waiter whose time is over, or null. The caller takes it out.
  Waiter* FirstTimedOut(Tick now) const;
  // When there is one next; kMaxTick if nobody waits.
  Tick NextTimeOut() const;

  // The moment at which a line wakes without anything happening before; kMaxInstant if none does.
  // `kMinInstant` if one is awake.
  Instant NextDue() const;

 private:
  friend class DeadlockSearch;

  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
  };
  template <typename Value>
  using ByText = std::unordered_map<std::string, Value, Hash, std::equal_to<>>;

  // The lines of one database and of one length.
  struct Size {
    int db;
    size_t size;
    friend constexpr auto operator<=>(const Size&, const Size&) = default;
  };
  using Lines = IntrusiveList<Line, &Line::of_size_>;

  Line& LineOf(LockName lock);
  Party& PartyOf(Owner owner);
  Party* FindParty(Owner owner);
  void DropIfIdle(Party& party);
  void Drop(Line& line);
  // By its length.
  void List(Line& line);
  void Unlist(Line& line);
  // The only place of a party that has one.
  static Place& OnlyPlace(const Party& party);

  // Whether the waiter in `place` is to be tried when the line wakes.
  void Register(Place& place);
  void Unregister(Place& place);
  // In no line.
  void Unregister(Waiter& waiter);
  // The first to be tried in a woken line may be another one now.
  void Reorder(Line& line);
  void WakeLine(Line& line);
  void Sleep(Line& line);
  void SetEnd(Line& line, std::optional<Instant> end);
  void NoteEnd(Line& line, Instant end);

  std::unordered_map<int, ByText<Line>> lines_;  // by database and key
  std::map<Size, Lines> by_size_;
  ByText<Party> parties_;
  IntrusiveList<Party, &Party::link> party_list_;
  std::map<std::pair<Order, uint64_t>, Line*> woken_;   // with the number of the line
  std::map<std::pair<Instant, uint64_t>, Line*> ends_;  // likewise
  std::map<std::pair<Tick, uint64_t>, Waiter*> timeouts_;
  uint64_t numbers_ = 0;   // given to waiters and lines
  uint64_t searches_ = 0;  // for deadlocks
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_WAIT_QUEUE_H_
