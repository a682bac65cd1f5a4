#include "core/wait_queue.h"

#include <algorithm>
#include <limits>

namespace turnstile {
namespace {

// A hold lives through its last millisecond.
constexpr Instant After(Instant end) { return end + Millis{1}; }

// How much a waiter minds somebody else, who holds the lock or stands before it.
enum class Obstacle {
  kNone,   // it enters beside it
  kPeer,   // it enters beside so many, and no more
  kStone,  // it must see it gone
};

Obstacle ObstacleBetween(Mode waits, Mode other) {
  if (waits != other || waits == Mode::kExclusive) return Obstacle::kStone;
  return waits == Mode::kShared ? Obstacle::kNone : Obstacle::kPeer;
}

}  // namespace

WaitQueue::~WaitQueue() {
  while (!ends_.empty()) Remove(*ends_.begin()->second);
}

LockName WaitQueue::Waiter::lock(size_t index) const { return places_[index].line_->lock_; }

Crowd WaitQueue::Waiter::AheadOf(size_t index) const {
  Crowd crowd;
  for (const Place* place = places_[index].link_.before; place != nullptr && !crowd.IsMixed();
       place = place->link_.before) {
    crowd.Add(place->waiter_->request_.mode, place->waiter_->request_.limit);
  }
  return crowd;
}

WaitQueue::Place* WaitQueue::Line::FirstBlockedByShared() const {
  Place* place = places_.first();
  while (place != nullptr && place->waiter_->request_.mode == Mode::kShared) {
    place = place->link_.after;
  }
  return place;
}

Crowd WaitQueue::Line::Ahead(bool upgrade) const {
  const Place* end = upgrade ? FirstBlockedByShared() : nullptr;
  Crowd crowd;
  for (const Place* place = places_.first(); place != end && !crowd.IsMixed();
       place = place->link_.after) {
    crowd.Add(place->waiter_->request_.mode, place->waiter_->request_.limit);
  }
  return crowd;
}

WaitQueue::Line* WaitQueue::Find(LockName lock) {
  const auto db = lines_.find(lock.db);
  if (db == lines_.end()) return nullptr;
  const auto line = db->second.find(lock.key);
  return line == db->second.end() ? nullptr : &line->second;
}

std::vector<LockName> WaitQueue::Locks(std::optional<int> db) const {
  std::vector<LockName> locks;
  for (const auto& [number, of_db] : lines_) {
    if (db.has_value() && number != *db) continue;
    for (const auto& [key, line] : of_db) locks.push_back(line.lock_);
  }
  return locks;
}

WaitQueue::Line& WaitQueue::LineOf(LockName lock) {
  if (Line* line = Find(lock); line != nullptr) return *line;
  const auto added = lines_[lock.db].try_emplace(std::string(lock.key)).first;
  added->second.lock_ = LockName{lock.db, added->first};
  return added->second;
}

WaitQueue::Party* WaitQueue::FindParty(Owner owner) {
  const auto party = parties_.find(owner.bytes);
  return party == parties_.end() ? nullptr : &party->second;
}

WaitQueue::Party& WaitQueue::PartyOf(Owner owner) {
  if (Party* party = FindParty(owner); party != nullptr) return *party;
  const auto added = parties_.try_emplace(std::string(owner.bytes)).first;
  added->second.owner = Owner{added->first};
  return added->second;
}

void WaitQueue::DropIfIdle(Party& party) {
  if (party.waits.empty() && party.held.empty()) parties_.erase(parties_.find(party.owner.bytes));
}

std::vector<WaitQueue::Waiter*> WaitQueue::FindWaiters(std::span<const LockName> locks,
                                                       Owner owner) {
  std::vector<Waiter*> found;
  const Party* party = FindParty(owner);
  if (party == nullptr) return found;
  for (Waiter* wait = party->waits.first(); wait != nullptr; wait = wait->of_party_.after) {
    const bool overlaps =
        std::any_of(wait->places_.begin(), wait->places_.end(), [locks](const Place& place) {
          return std::find(locks.begin(), locks.end(), place.line_->lock_) != locks.end();
        });
    if (overlaps) found.push_back(wait);
  }
  return found;
}

bool WaitQueue::WaitsFor(const Waiter& waiter, std::span<const LockName> locks, Mode mode) {
  return waiter.request_.mode == mode && waiter.size() == locks.size() &&
         std::all_of(waiter.places_.begin(), waiter.places_.end(), [locks](const Place& place) {
           return std::find(locks.begin(), locks.end(), place.line_->lock_) != locks.end();
         });
}

void WaitQueue::Enter(Waiter& waiter, std::span<const LockName> locks, Owner owner, bool upgrade) {
  waiter.party_ = &PartyOf(owner);
  waiter.party_->waits.Append(waiter);
  waiter.request_.owner = waiter.party_->owner;
  waiter.places_.resize(locks.size());
  for (size_t i = 0; i < locks.size(); ++i) {
    Place& place = waiter.places_[i];
    Line& line = LineOf(locks[i]);
    place.waiter_ = &waiter;
    place.line_ = &line;
    line.places_.InsertBefore(upgrade ? line.FirstBlockedByShared() : nullptr, place);
  }
  timeouts_.emplace(waiter.deadline_, &waiter);
}

void WaitQueue::TakeOver(Waiter& newer, Waiter& older) {
  newer.places_ = std::exchange(older.places_, {});
  for (Place& place : newer.places_) {
    place.waiter_ = &newer;
    woken_.insert(place.line_);  // it may ask for less than the older did
  }
  newer.party_ = std::exchange(older.party_, nullptr);
  newer.party_->waits.Append(newer);
  newer.party_->waits.Remove(older);
  newer.request_.owner = newer.party_->owner;
  timeouts_.erase({older.deadline_, &older});
  timeouts_.emplace(newer.deadline_, &newer);
}

void WaitQueue::Leave(Waiter& waiter) {
  timeouts_.erase({waiter.deadline_, &waiter});
  Party& party = *std::exchange(waiter.party_, nullptr);
  party.waits.Remove(waiter);
  DropIfIdle(party);
  for (Place& place : waiter.places_) {
    Line& line = *place.line_;
    line.places_.Remove(place);
    if (line.places_.empty()) {
      Drop(line);
    } else {
      woken_.insert(&line);
    }
  }
  waiter.places_ = std::vector<Place>();
  if (!empty()) return;
  // After a rush the tables, though empty, would stay large.
  lines_ = decltype(lines_)();
  parties_ = decltype(parties_)();
  woken_ = decltype(woken_)();
}

void WaitQueue::Drop(Line& line) {
  ClearHolders(line);
  woken_.erase(&line);
  auto& of_db = lines_.find(line.lock_.db)->second;
  of_db.erase(of_db.find(line.lock_.key));
}

void WaitQueue::Remove(Holding& holding) {
  ends_.erase({holding.until, &holding});
  holding.line->holdings_.Remove(holding);
  Party& party = *holding.party;
  party.held.Remove(holding);
  DropIfIdle(party);
  delete &holding;
}

void WaitQueue::ClearHolders(Line& line) {
  while (!line.holdings_.empty()) Remove(*line.holdings_.first());
}

namespace {

// The holding of `party` in `line`, or null.
WaitQueue::Holding* HoldingIn(const WaitQueue::Line& line, const WaitQueue::Party* party) {
  if (party == nullptr) return nullptr;
  WaitQueue::Holding* holding = party->held.first();
  while (holding != nullptr && holding->line != &line) holding = holding->of_party.after;
  return holding;
}

}  // namespace

void WaitQueue::SetHolder(LockName lock, Mode mode, Owner owner, Instant until, Company company,
                          Millis linger) {
  Line* line = Find(lock);
  if (line == nullptr) return;
  if (!line->holdings_.empty() && line->mode_ != mode) woken_.insert(line);
  line->mode_ = mode;
  Party& party = PartyOf(owner);
  Holding* holding = HoldingIn(*line, &party);
  if (holding == nullptr) {
    holding = new Holding{.party = &party, .line = line};
    party.held.Append(*holding);
    line->holdings_.Append(*holding);
  } else {
    ends_.erase({holding->until, holding});
  }
  holding->until = until;
  holding->end = until - linger;
  ends_.emplace(until, holding);
  if (company == Company::kWithOthers) return;
  for (Holding* other = line->holdings_.first(); other != nullptr;) {
    Holding* next = other->of_line.after;
    if (other != holding) Remove(*other);
    other = next;
  }
}

void WaitQueue::RemoveHolder(LockName lock, Owner owner) {
  Line* line = Find(lock);
  if (line == nullptr) return;
  if (Holding* holding = HoldingIn(*line, FindParty(owner)); holding != nullptr) Remove(*holding);
  woken_.insert(line);
}

void WaitQueue::ClearHolders(LockName lock) {
  Line* line = Find(lock);
  if (line == nullptr) return;
  ClearHolders(*line);
  woken_.insert(line);
}

void WaitQueue::Wake(LockName lock) {
  if (Line* line = Find(lock); line != nullptr) woken_.insert(line);
}

void WaitQueue::WakeAll() {
  for (auto& [db, of_db] : lines_) {
    for (auto& [key, line] : of_db) woken_.insert(&line);
  }
}

WaitQueue::Line* WaitQueue::FirstWoken(Instant now) {
  while (!ends_.empty() && ends_.begin()->first < now) {
    Holding& over = *ends_.begin()->second;
    woken_.insert(over.line);
    Remove(over);
  }
  return woken_.empty() ? nullptr : *woken_.begin();
}

WaitQueue::Waiter* WaitQueue::FirstTimedOut(Instant now) const {
  if (timeouts_.empty() || timeouts_.begin()->first > now) return nullptr;
  return timeouts_.begin()->second;
}

Instant WaitQueue::NextDue() const {
  if (!woken_.empty()) return kMinInstant;
  const Instant timeout = timeouts_.empty() ? kMaxInstant : timeouts_.begin()->first;
  const Instant end = ends_.empty() ? kMaxInstant : After(ends_.begin()->first);
  return std::min(timeout, end);
}

// One search for a cycle. Its marks are numbers that no other search uses.
class WaitQueue::CycleSearch {
 public:
  CycleSearch(uint64_t& numbers, const Waiter& waiter, std::span<Waiter* const> ignored,
              Instant now)
      : numbers_(numbers), number_(++numbers), waiter_(waiter), self_(*waiter.party_), now_(now) {
    for (Waiter* older : ignored) older->ignored_ = number_;
  }

  // The steps of the shortest way, if every peer counted. Where limits are involved there may be
  // less to it.
  std::vector<Step> Find() {
    Spread(/*everybody=*/false);
    if (!met_peers_) return Steps();
    Spread(/*everybody=*/true);
    if (self_.seen != seen_) return {};
    FindStuck();
    only_stuck_ = true;
    Spread(/*everybody=*/false);
    return Steps();
  }

 private:
  // Reaches whoever the wait waits for, breadth first over parties, so that the first way to each
  // has the fewest steps: everybody, or until it reaches the owner itself.
  void Spread(bool everybody) {
    seen_ = ++numbers_;
    reached_.clear();
    ReachFrom(waiter_, nullptr);
    for (size_t i = 0; i < reached_.size() && (everybody || self_.seen != seen_); ++i) {
      const Party* from = reached_[i];
      for (const Waiter* wait = from->waits.first(); wait != nullptr;
           wait = wait->of_party_.after) {
        if (wait->ignored_ != number_) ReachFrom(*wait, from);
      }
    }
  }

  // Finds out who is really stuck: at first everybody who was reached, then no longer those whose
  // waits the others let through, until nothing changes.
  void FindStuck() {
    std::vector<Party*> stuck = reached_;
    for (Party* party : stuck) party->stuck = number_;
    self_.stuck = number_;
    const auto can_move = [this](Party* party) {
      if (party == &self_) return false;
      for (const Waiter* wait = party->waits.first(); wait != nullptr;
           wait = wait->of_party_.after) {
        if (wait->ignored_ != number_ && IsStuck(*wait)) return false;
      }
      party->stuck = 0;
      return true;
    };
    size_t moved = 1;
    while (moved > 0) moved = std::erase_if(stuck, can_move);
  }

  // The way by which the last Spread came to the owner itself; empty if it did not.
  std::vector<Step> Steps() const {
    std::vector<Step> steps;
    if (self_.seen != seen_) return steps;
    const Party* party = &self_;
    do {
      const Party* from = party->reached_from;
      steps.push_back({from == nullptr ? self_.owner : from->owner, party->reached_over});
      party = from;
    } while (party != nullptr);
    std::reverse(steps.begin(), steps.end());
    return steps;
  }

  // Calls `meet` with each party, and its mode, that holds the lock of `place` or stands before it.
  // `meet` returns whether to go on.
  template <typename Meet>
  void ForEachAhead(const Place& place, Meet meet) const {
    const Party* own = place.waiter_->party_;
    const Line& line = *place.line_;
    for (const Holding* holding = line.holdings_.first(); holding != nullptr;
         holding = holding->of_line.after) {
      if (holding->party == own || holding->end < now_) continue;
      if (!meet(*holding->party, line.mode_, std::numeric_limits<uint32_t>::max())) return;
    }
    for (const Place* other = place.link_.before; other != nullptr; other = other->link_.before) {
      const Waiter& ahead = *other->waiter_;
      if (ahead.party_ == own || ahead.ignored_ == number_) continue;
      if (!meet(*ahead.party_, ahead.request_.mode, ahead.request_.limit)) return;
    }
  }

  // Whether the waits of stuck parties keep this wait from ever being granted.
  bool IsStuck(const Waiter& waiter) const {
    return std::any_of(waiter.places_.begin(), waiter.places_.end(),
                       [this](const Place& place) { return IsStuck(place); });
  }

  bool IsStuck(const Place& place) const {
    const AcquireRequest& request = place.waiter_->request_;
    bool stone = false;
    size_t peers = 0;
    uint32_t least = request.limit;
    ForEachAhead(place, [&](const Party& party, Mode mode, uint32_t limit) {
      if (party.stuck != number_) return true;
      const Obstacle obstacle = ObstacleBetween(request.mode, mode);
      stone = obstacle == Obstacle::kStone;
      if (obstacle == Obstacle::kPeer) {
        ++peers;
        least = std::min(least, limit);
      }
      return !stone;
    });
    return stone || (peers > 0 && peers + 1 > least);
  }

  void ReachFrom(const Waiter& waiter, const Party* from) {
    for (const Place& place : waiter.places_) {
      if (only_stuck_) {
        ReachStuck(place, from);
      } else {
        ReachAll(const_cast<Place&>(place), from);
      }
    }
  }

  void Reach(Party& party, const Party* from, LockName over) {
    if (party.seen == seen_) return;
    party.seen = seen_;
    party.reached_from = from;
    party.reached_over = over;
    reached_.push_back(&party);
  }

  // Where an earlier walk up the same line has been, everybody further ahead has been reached too.
  // A shared waiter does not mind shared ones ahead, so its walk leaves marks of its own.
  void ReachAll(Place& place, const Party* from) {
    const Mode mode = place.waiter_->request_.mode;
    const Line& line = *place.line_;
    const auto meet = [&](Party& party, Mode other) {
      const Obstacle obstacle = ObstacleBetween(mode, other);
      met_peers_ = met_peers_ || obstacle == Obstacle::kPeer;
      if (obstacle != Obstacle::kNone) Reach(party, from, line.lock_);
    };
    const Party* own = place.waiter_->party_;
    for (const Holding* holding = line.holdings_.first(); holding != nullptr;
         holding = holding->of_line.after) {
      if (holding->party != own && holding->end >= now_) meet(*holding->party, line.mode_);
    }
    const auto mark = mode == Mode::kShared ? &Place::passed_by_shared_ : &Place::passed_;
    for (Place* other = place.link_.before; other != nullptr; other = other->link_.before) {
      if (other->passed_ == seen_ || other->*mark == seen_) break;
      other->*mark = seen_;
      const Waiter& ahead = *other->waiter_;
      if (ahead.ignored_ == number_ || ahead.party_ == own) continue;
      meet(*ahead.party_, ahead.request_.mode);
    }
  }

  void ReachStuck(const Place& place, const Party* from) {
    const Mode mode = place.waiter_->request_.mode;
    const bool stuck = IsStuck(place);
    ForEachAhead(place, [&](Party& party, Mode other, uint32_t /*limit*/) {
      const Obstacle obstacle = ObstacleBetween(mode, other);
      if (stuck && party.stuck == number_ && obstacle != Obstacle::kNone) {
        Reach(party, from, place.line_->lock_);
      }
      return true;
    });
  }

  uint64_t& numbers_;
  uint64_t number_;
  uint64_t seen_ = 0;  // the number of the last Spread
  const Waiter& waiter_;
  Party& self_;
  Instant now_;
  bool only_stuck_ = false;
  bool met_peers_ = false;
  std::vector<Party*> reached_;
};

std::vector<WaitQueue::Step> WaitQueue::FindCycle(const Waiter& waiter,
                                                  std::span<Waiter* const> ignored, Instant now) {
  return CycleSearch(searches_, waiter, ignored, now).Find();
}

std::string DescribeCycle(const std::vector<WaitQueue::Step>& cycle,
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
