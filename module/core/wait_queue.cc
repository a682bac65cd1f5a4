#include "core/wait_queue.h"

#include <algorithm>
#include <iterator>
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

LockName WaitQueue::Waiter::lock(size_t index) const { return places_[index].line_->lock_; }

bool WaitQueue::Waiter::WaitsFor(LockName lock) const {
  return std::any_of(places_.begin(), places_.end(),
                     [lock](const Place& place) { return place.line_->lock_ == lock; });
}

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
  Crowd crowd;
  if (!upgrade) {
    crowd.size = size();
    crowd.all_shared = shared_ == size();
    crowd.all_limit = limited_ == size();
    if (!limits_.empty()) crowd.least_limit = limits_.begin()->first;
    return crowd;
  }
  const Place* blocked = FirstBlockedByShared();
  for (const Place* place = places_.first(); place != blocked; place = place->link_.after) {
    crowd.Add(Mode::kShared, /*limit=*/1);
  }
  return crowd;
}

Tick WaitQueue::Line::waiting_since() const {
  Tick since = kMaxTick;
  for (const Place* place = first(); place != nullptr; place = place->behind()) {
    since = std::min(since, place->waiter().since());
  }
  return since;
}

void WaitQueue::Line::Insert(Place* next, Place& place) {
  places_.InsertBefore(next, place);
  Count(place.waiter_->request_);
}

void WaitQueue::Line::Remove(Place& place) {
  places_.Remove(place);
  Discount(place.waiter_->request_);
}

void WaitQueue::Line::Count(const AcquireRequest& request) {
  if (request.mode == Mode::kShared) ++shared_;
  if (request.mode != Mode::kLimit) return;
  ++limited_;
  ++limits_[request.limit];
}

void WaitQueue::Line::Discount(const AcquireRequest& request) {
  if (request.mode == Mode::kShared) --shared_;
  if (request.mode != Mode::kLimit) return;
  --limited_;
  const auto same = limits_.find(request.limit);
  if (--same->second == 0) limits_.erase(same);
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

size_t WaitQueue::lines() const {
  size_t count = 0;
  for (const auto& [db, of_db] : lines_) count += of_db.size();
  return count;
}

std::vector<const WaitQueue::Line*> WaitQueue::LongestLines(int db, size_t most) const {
  std::vector<const Line*> found;
  const auto of_db = lines_.find(db);
  if (of_db == lines_.end()) return found;
  for (const auto& [key, line] : of_db->second) found.push_back(&line);
  std::sort(found.begin(), found.end(), [](const Line* a, const Line* b) {
    return a->size() != b->size() ? a->size() > b->size() : a->lock_.key < b->lock_.key;
  });
  if (found.size() > most) found.resize(most);
  return found;
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
    line.Insert(upgrade ? line.FirstBlockedByShared() : nullptr, place);
  }
  timeouts_.emplace(waiter.deadline_, &waiter);
}

void WaitQueue::TakeOver(Waiter& newer, Waiter& older) {
  newer.places_ = std::exchange(older.places_, {});
  for (Place& place : newer.places_) {
    place.waiter_ = &newer;
    place.line_->Discount(older.request_);
    place.line_->Count(newer.request_);
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
    line.Remove(place);
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

WaitQueue::HoldingAt WaitQueue::Remove(Line& line, HoldingAt holding) {
  Holding& removed = holding->second;
  ends_.erase({removed.until, &removed});
  Party& party = *removed.party;
  party.held.Remove(removed);
  const HoldingAt next = line.holdings_.erase(holding);
  DropIfIdle(party);
  return next;
}

void WaitQueue::ClearHolders(Line& line) {
  for (HoldingAt at = line.holdings_.begin(); at != line.holdings_.end();) at = Remove(line, at);
}

void WaitQueue::SetHolder(LockName lock, Mode mode, Owner owner, Instant until, Company company,
                          Millis linger) {
  Line* line = Find(lock);
  if (line == nullptr) return;
  if (!line->holdings_.empty() && line->mode_ != mode) woken_.insert(line);
  line->mode_ = mode;
  Party& party = PartyOf(owner);
  const auto [at, added] = line->holdings_.try_emplace(party.owner.bytes);
  Holding& holding = at->second;
  if (added) {
    holding.party = &party;
    holding.line = line;
    party.held.Append(holding);
  } else {
    ends_.erase({holding.until, &holding});
  }
  holding.until = until;
  holding.end = until - linger;
  ends_.emplace(until, &holding);
  if (company == Company::kWithOthers) return;
  for (HoldingAt other = line->holdings_.begin(); other != line->holdings_.end();) {
    other = &other->second == &holding ? std::next(other) : Remove(*line, other);
  }
}

void WaitQueue::RemoveHolder(LockName lock, Owner owner) {
  Line* line = Find(lock);
  if (line == nullptr) return;
  const HoldingAt holding = line->holdings_.find(owner.bytes);
  if (holding != line->holdings_.end()) Remove(*line, holding);
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
    const Holding& over = *ends_.begin()->second;
    Line& line = *over.line;
    woken_.insert(&line);
    Remove(line, line.holdings_.find(over.party->owner.bytes));
  }
  return woken_.empty() ? nullptr : *woken_.begin();
}

WaitQueue::Waiter* WaitQueue::FirstTimedOut(Tick now) const {
  if (timeouts_.empty() || timeouts_.begin()->first > now) return nullptr;
  return timeouts_.begin()->second;
}

Tick WaitQueue::NextTimeOut() const {
  return timeouts_.empty() ? kMaxTick : timeouts_.begin()->first;
}

Instant WaitQueue::NextDue() const {
  if (!woken_.empty()) return kMinInstant;
  return ends_.empty() ? kMaxInstant : After(ends_.begin()->first);
}

// One search for a cycle. Its marks are numbers that no other search uses.
class WaitQueue::CycleSearch {
 public:
  CycleSearch(uint64_t& numbers, Waiter& waiter, std::span<Waiter* const> ignored, Instant now,
              From from)
      : numbers_(numbers),
        number_(++numbers),
        waiter_(waiter),
        self_(*waiter.party_),
        now_(now),
        from_(from) {
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
    if (from_ == From::kAnyWait) ReachFromAll(self_, nullptr);
    for (size_t i = 0; i < reached_.size() && (everybody || self_.seen != seen_); ++i) {
      ReachFromAll(*reached_[i], reached_[i]);
    }
  }

  void ReachFromAll(const Party& party, const Party* from) {
    for (Waiter* wait = party.waits.first(); wait != nullptr; wait = wait->of_party_.after) {
      if (wait->ignored_ != number_) ReachFrom(*wait, from);
    }
  }

  // Finds out who is really stuck: at first everybody who was reached, then no longer those whose
  // waits the others let through, until nothing changes.
  void FindStuck() {
    for (Party* party : reached_) {
      party->stuck_places = 0;
      for (Waiter* wait = party->waits.first(); wait != nullptr; wait = wait->of_party_.after) {
        if (wait->ignored_ != number_) BeginStuck(*wait);
      }
      if (party->stuck_places > 0) party->stuck = number_;
    }
    self_.stuck = number_;
    while (!to_search_.empty()) {
      Line& line = *to_search_.back();
      to_search_.pop_back();
      line.searched_ = 0;
      LetThrough(line);
    }
  }

  void BeginStuck(Waiter& waiter) {
    waiter.party_->stuck_places += waiter.size();
    for (Place& place : waiter.places_) {
      place.stuck_ = number_;
      SearchAgain(*place.line_);
    }
  }

  void SearchAgain(Line& line) {
    if (line.searched_ == number_) return;
    line.searched_ = number_;
    to_search_.push_back(&line);
  }

  // Those who stand in the way, by what they are to whoever comes behind.
  struct StuckAhead {
    size_t of_mode[3] = {0, 0, 0};
    uint32_t least_limit = std::numeric_limits<uint32_t>::max();

    size_t& Of(Mode mode) { return of_mode[static_cast<size_t>(mode)]; }
    size_t all() const { return of_mode[0] + of_mode[1] + of_mode[2]; }
    // Whether they keep a request waiting for ever.
    bool Stop(const AcquireRequest& request) {
      if (request.mode == Mode::kExclusive) return all() > 0;
      const size_t same = Of(request.mode);
      if (all() > same) return true;
      return request.mode == Mode::kLimit && same > 0 &&
             same + 1 > std::min(request.limit, least_limit);
    }
  };

  // Goes through a line from the front; whoever is not kept for ever by those who are stuck may
  // move, and those behind it need not mind it any more.
  void LetThrough(Line& line) {
    StuckAhead ahead;
    for (const auto& [owner, holding] : line.holdings_) {
      if (holding.end >= now_ && holding.party->stuck == number_) ++ahead.Of(line.mode_);
    }
    for (Place* place = line.places_.first(); place != nullptr; place = place->link_.after) {
      const Waiter& waiter = *place->waiter_;
      Party& party = *waiter.party_;
      if (party.stuck != number_ || waiter.ignored_ == number_) continue;
      if (place->stuck_ == number_ && !IsStopped(line, party, ahead, waiter.request_)) {
        place->stuck_ = 0;
        if (--party.stuck_places == 0 && &party != &self_) {
          Free(party);
          continue;
        }
      }
      ++ahead.Of(waiter.request_.mode);
      if (waiter.request_.mode == Mode::kLimit) {
        ahead.least_limit = std::min(ahead.least_limit, waiter.request_.limit);
      }
    }
  }

  // One's own hold, which an upgrade has, is not in one's way.
  bool IsStopped(const Line& line, const Party& party, StuckAhead ahead,
                 const AcquireRequest& request) const {
    const auto own = line.holdings_.find(party.owner.bytes);
    if (own != line.holdings_.end() && own->second.end >= now_) --ahead.Of(line.mode_);
    return ahead.Stop(request);
  }

  void Free(Party& party) {
    party.stuck = 0;
    for (const Holding* held = party.held.first(); held != nullptr; held = held->of_party.after) {
      SearchAgain(*held->line);
    }
    for (Waiter* wait = party.waits.first(); wait != nullptr; wait = wait->of_party_.after) {
      for (Place& place : wait->places_) SearchAgain(*place.line_);
    }
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

  void ReachFrom(Waiter& waiter, const Party* from) {
    for (Place& place : waiter.places_) {
      if (!only_stuck_ || place.stuck_ == number_) ReachAll(place, from);
    }
  }

  void Reach(Party& party, const Party* from, LockName over) {
    if (party.seen == seen_ || (only_stuck_ && party.stuck != number_)) return;
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
    for (const auto& [owner, holding] : line.holdings_) {
      if (holding.party != own && holding.end >= now_) meet(*holding.party, line.mode_);
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

  uint64_t& numbers_;
  uint64_t number_;
  uint64_t seen_ = 0;  // the number of the last Spread
  Waiter& waiter_;
  Party& self_;
  Instant now_;
  From from_;
  bool only_stuck_ = false;
  bool met_peers_ = false;
  std::vector<Party*> reached_;
  std::vector<Line*> to_search_;
};

std::vector<WaitQueue::Step> WaitQueue::FindCycle(Waiter& waiter, std::span<Waiter* const> ignored,
                                                  Instant now, From from) {
  return CycleSearch(searches_, waiter, ignored, now, from).Find();
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
