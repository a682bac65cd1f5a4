#include "core/deadlock.h"

#include <algorithm>
#include <deque>
#include <optional>

namespace turnstile {

// Breadth first over owners, so that the first way to each has the fewest steps.
class DeadlockSearch {
 public:
  using Line = WaitQueue::Line;
  using Party = WaitQueue::Party;
  using Waiter = WaitQueue::Waiter;

  DeadlockSearch(WaitQueue& queue, const Waiter& waiter, std::span<Waiter* const> ignored,
                 Instant now, const ShowPlace& show)
      : queue_(queue),
        waiter_(waiter),
        self_(*waiter.party_),
        ignored_(ignored),
        now_(now),
        show_(show),
        number_(++queue.searches_) {}

  std::vector<CycleStep> Find() {
    ReachFrom(waiter_, nullptr);
    for (size_t i = 0; i < reached_.size() && !Done(); ++i) {
      const Party& party = *reached_[i];
      for (const Waiter* wait = party.waits.first(); wait != nullptr && !Done();
           wait = wait->of_party_.after) {
        if (!IsIgnored(*wait)) ReachFrom(*wait, &party);
      }
    }
    return Steps();
  }

 private:
  // A place in a line, as the queue knows it.
  using Standing = WaitQueue::Place;

  // What the search knows of a line.
  struct Seen {
    std::optional<Mode> held;  // in which mode the lock is held, if at all
    std::vector<const Party*> waiting_holders;
    bool reached_holders = false;
    // How far each of the three lists of the line has been walked; null: not at all.
    const Standing* all = nullptr;
    const Standing* unshared = nullptr;
    const Standing* unlimited = nullptr;
  };

  bool IsReached(const Party& party) const { return party.reached_by == number_; }
  bool Done() const { return IsReached(self_) || gave_up_; }

  bool IsIgnored(const Waiter& wait) const {
    return std::find(ignored_.begin(), ignored_.end(), &wait) != ignored_.end();
  }

  void ReachFrom(const Waiter& wait, const Party* from) {
    for (const Standing& place : wait.places_) {
      if (++places_visited_ > kMostPlacesSearched) gave_up_ = true;
      if (Done()) return;
      ReachHolders(place, from);
      ReachThoseAhead(place, from);
    }
  }

  // `from`: null if it is the new wait itself.
  void Reach(const Party& party, const Party* from, LockName over) {
    if (IsReached(party)) return;
    party.reached_by = number_;
    party.reached_from = from;
    party.reached_over = over;
    reached_.push_back(&party);
  }

  static bool MindsHolders(const AcquireRequest& request, Mode held) {
    if (request.mode != held || held == Mode::kExclusive) return true;
    return held == Mode::kLimit && request.limit == 1;
  }

  void ReachHolders(const Standing& place, const Party* from) {
    const Waiter& wait = *place.waiter_;
    Seen& seen = LookAt(*place.line_);
    if (!seen.held.has_value() || !MindsHolders(wait.request_, *seen.held)) return;
    const LockName lock = place.line_->lock_;
    if (!seen.reached_holders) {
      seen.reached_holders = true;
      for (const Party* holder : seen.waiting_holders) {
        // One's own hold, which an upgrade has, is not in one's way; but it is in others'.
        if (holder != wait.party_) Reach(*holder, from, lock);
      }
    } else if (wait.party_ != &self_ && Holds(seen, self_)) {
      Reach(self_, from, lock);
    }
  }

  static bool Holds(const Seen& seen, const Party& party) {
    return std::find(seen.waiting_holders.begin(), seen.waiting_holders.end(), &party) !=
           seen.waiting_holders.end();
  }

  Seen& LookAt(const Line& line) {
    if (line.seen_by_ == number_) return seen_[line.seen_at_];
    line.seen_by_ = number_;
    line.seen_at_ = seen_.size();
    Seen& seen = seen_.emplace_back();
    show_(line.lock_, [this, &seen](const Place& place) { LookAtHolders(place, seen); });
    return seen;
  }

  void LookAtHolders(const Place& place, Seen& seen) {
    if (place.plain.has_value() && now_ <= place.plain->end) {
      seen.held = Mode::kExclusive;
      CountHolders(1);
      AddHolder(queue_.FindParty(Owner{place.plain->value}), seen);
    }
    if (place.lock == nullptr) return;
    const Lock& lock = *place.lock;
    seen.held = lock.mode();
    CountHolders(std::min(lock.size(), queue_.party_list_.size()));
    if (gave_up_) return;
    if (lock.size() <= queue_.party_list_.size()) {
      for (size_t i = 0; i < lock.size(); ++i) {
        const Hold hold = lock.at(Lock::Order::kByOwner, i);
        if (hold.LiveAt(now_)) AddHolder(queue_.FindParty(hold.owner), seen);
      }
      return;
    }
    for (const Party* party = queue_.party_list_.first(); party != nullptr;
         party = party->link.after) {
      const std::optional<Hold> hold = lock.Find(party->owner);
      if (hold.has_value() && hold->LiveAt(now_)) AddHolder(party, seen);
    }
  }

  static void AddHolder(const Party* party, Seen& seen) {
    if (party != nullptr) seen.waiting_holders.push_back(party);
  }

  // Goes through those of the line that the request minds, from the front; where an earlier walk
  // through the same list has been, everybody has been reached.
  void ReachThoseAhead(const Standing& place, const Party* from) {
    const Line& line = *place.line_;
    Seen& seen = LookAt(line);
    const bool holds_itself = Holds(seen, self_);
    switch (place.waiter_->request_.mode) {
      case Mode::kExclusive:
        Walk(line.places_, &Standing::link_, seen.all, holds_itself, place, from);
        break;
      case Mode::kShared:
        Walk(line.unshared_, &Standing::among_unshared_, seen.unshared, holds_itself, place, from);
        break;
      case Mode::kLimit:
        Walk(line.unlimited_, &Standing::among_unlimited_, seen.unlimited, holds_itself, place,
             from);
        break;
    }
  }

  template <typename List>
  void Walk(const List& list, Link<Standing> Standing::*link, const Standing*& walked,
            bool holds_itself, const Standing& place, const Party* from) {
    const Line& line = *place.line_;
    // Those who stand in this line only lead to its holders, and so does any one of them; but to a
    // hold of one's own only who minds that leads back.
    const bool is_self = place.waiter_ == &waiter_;
    const size_t own = is_self && self_.places > 1 ? 1 : 0;
    const bool one_will_do = line.with_other_places_ == own && !(is_self && holds_itself);
    if (one_will_do && !is_self && StandsAhead(place)) Reach(self_, from, line.lock_);
    const Standing* next = walked == nullptr ? list.first() : (walked->*link).after;
    for (; next != nullptr && next->order_ < place.order_ && !gave_up_;
         next = (next->*link).after) {
      if (++places_visited_ > kMostPlacesSearched) gave_up_ = true;
      walked = next;
      const Waiter& ahead = *next->waiter_;
      if (IsIgnored(ahead) || ahead.party_ == place.waiter_->party_) continue;
      Reach(*ahead.party_, from, line.lock_);
      if (one_will_do) break;
    }
  }

  // Whether the new wait, which is the only one of its owner, is in the way of `place`.
  bool StandsAhead(const Standing& place) const {
    const Standing& own = waiter_.places_.front();
    const Mode mode = place.waiter_->request_.mode;
    return own.line_ == place.line_ && own.order_ < place.order_ &&
           (mode == Mode::kExclusive || mode != waiter_.request_.mode);
  }

  void CountHolders(size_t count) {
    holders_visited_ += count;
    if (holders_visited_ > kMostHoldersSearched) gave_up_ = true;
  }

  // The way back from the owner itself; empty if it was not reached.
  std::vector<CycleStep> Steps() const {
    std::vector<CycleStep> steps;
    if (!IsReached(self_)) return steps;
    const Party* party = &self_;
    do {
      const Party* from = party->reached_from;
      steps.push_back({from == nullptr ? self_.owner : from->owner, party->reached_over});
      party = from;
    } while (party != nullptr);
    std::reverse(steps.begin(), steps.end());
    return steps;
  }

  WaitQueue& queue_;
  const Waiter& waiter_;
  const Party& self_;
  std::span<Waiter* const> ignored_;
  Instant now_;
  const ShowPlace& show_;
  uint64_t number_;
  std::deque<Seen> seen_;
  std::vector<const Party*> reached_;
  size_t places_visited_ = 0;
  size_t holders_visited_ = 0;
  bool gave_up_ = false;
};

std::vector<CycleStep> FindCycle(WaitQueue& queue, const WaitQueue::Waiter& waiter,
                                 std::span<WaitQueue::Waiter* const> ignored, Instant now,
                                 const ShowPlace& show) {
  return DeadlockSearch(queue, waiter, ignored, now, show).Find();
}

std::string DescribeCycle(const std::vector<CycleStep>& cycle,
                          const std::function<bool(LockName)>& visible) {
  constexpr size_t kShown = 8;
  const auto lock_text = [&](LockName lock) { return visible(lock) ? Quoted(lock.key) : "?"; };
  std::string text = "waiting for " + lock_text(cycle.front().lock) + " would close the cycle ";
  for (size_t i = 0; i < cycle.size() && i < kShown; ++i) {
    const bool known = i == 0 || visible(cycle[i - 1].lock);
    text += (known ? Unquoted(cycle[i].owner.bytes) : "?") + " -> " + lock_text(cycle[i].lock);
    text += " -> ";
  }
  if (cycle.size() > kShown) text += "... -> ";
  return text + Unquoted(cycle.front().owner.bytes);
}

}  // namespace turnstile
