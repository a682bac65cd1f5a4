#include "core/wait_queue.h"

#include <algorithm>
#include <functional>

namespace turnstile {
namespace {

// A hold lives through its last millisecond.
constexpr Instant After(Instant end) { return end + Millis{1}; }

}  // namespace

LockName WaitQueue::Waiter::lock(size_t index) const { return places_[index].line_->lock_; }

bool WaitQueue::Waiter::WaitsFor(LockName lock) const {
  return std::any_of(places_.begin(), places_.end(),
                     [lock](const Place& place) { return place.line_->lock_ == lock; });
}

// An exclusive request minds anybody and a shared one anybody who is not shared, so to know whether
// there is one is enough. For a request with a limit those ahead are counted, up to its limit.
Crowd WaitQueue::Waiter::AheadOf(size_t index) const {
  const Place& place = places_[index];
  const Line& line = *place.line_;
  Crowd crowd;
  if (line.places_.first() == &place) return crowd;
  const auto stands_ahead = [&place](const Place* other) {
    return other != nullptr && other->order_ < place.order_;
  };
  if (request_.mode != Mode::kLimit || stands_ahead(line.unlimited_.first())) {
    crowd.size = 1;
    crowd.all_limit = false;
    crowd.all_shared = !stands_ahead(line.unshared_.first());
    return crowd;
  }
  for (const Place* other = place.link_.before;
       other != nullptr && crowd.size < std::min(request_.limit, crowd.least_limit);
       other = other->link_.before) {
    crowd.Add(Mode::kLimit, other->waiter_->request_.limit);
  }
  return crowd;
}

Crowd WaitQueue::Line::Ahead(bool upgrade, Instant now) const {
  Crowd crowd;
  if (upgrade) {
    // Those who ask for a shared hold and stand in front; that there is one is enough to know.
    if (first()->waiter().request().mode == Mode::kShared) crowd.Add(Mode::kShared, /*limit=*/1);
    return crowd;
  }
  crowd.size = size();
  crowd.all_shared = unshared_.empty() && !put_off(now);
  crowd.all_limit = unlimited_.empty() && !put_off(now);
  if (!limits_.empty()) crowd.least_limit = limits_.begin()->first;
  return crowd;
}

Tick WaitQueue::Line::waiting_since() const {
  constexpr int kFront = 100;
  Tick since = kMaxTick;
  const Place* place = first();
  for (int i = 0; place != nullptr && i < kFront; ++i, place = place->behind()) {
    since = std::min(since, place->waiter().since());
  }
  return since;
}

void WaitQueue::Line::Insert(Place& place, bool upgrade) {
  const AcquireRequest& request = place.waiter_->request_;
  Place* next = upgrade ? unshared_.first() : nullptr;
  place.order_ = next == nullptr ? Order{.arrival = place.waiter_->number_}
                                 : Order{next->order_.arrival, next->order_.before - 1};
  places_.InsertBefore(next, place);
  if (request.mode != Mode::kShared) unshared_.InsertBefore(next, place);
  if (request.mode != Mode::kLimit) {
    // Whoever stands before an upgrade asks for a shared hold, so it is in this list.
    Place* next_unlimited = nullptr;
    if (next != nullptr) {
      const Place* before = place.link_.before;
      next_unlimited = before == nullptr ? unlimited_.first() : before->among_unlimited_.after;
    }
    unlimited_.InsertBefore(next_unlimited, place);
  }
  Count(request);
}

void WaitQueue::Line::Remove(Place& place) {
  const AcquireRequest& request = place.waiter_->request_;
  places_.Remove(place);
  if (request.mode != Mode::kShared) unshared_.Remove(place);
  if (request.mode != Mode::kLimit) unlimited_.Remove(place);
  Discount(request);
}

void WaitQueue::Line::Count(const AcquireRequest& request) {
  if (request.mode == Mode::kLimit) ++limits_[request.limit];
}

void WaitQueue::Line::Discount(const AcquireRequest& request) {
  if (request.mode != Mode::kLimit) return;
  const auto same = limits_.find(request.limit);
  if (--same->second == 0) limits_.erase(same);
}

WaitQueue::Line* WaitQueue::Find(LockName lock) {
  const auto db = lines_.find(lock.db);
  if (db == lines_.end()) return nullptr;
  const auto line = db->second.find(lock.key);
  return line == db->second.end() ? nullptr : &line->second;
}

size_t WaitQueue::lines() const {
  size_t count = 0;
  for (const auto& [db, of_db] : lines_) count += of_db.size();
  return count;
}

std::vector<const WaitQueue::Line*> WaitQueue::LongestLines(int db, size_t most) const {
  std::vector<const Line*> found;
  auto of_size = by_size_.lower_bound(Size{db + 1, 0});
  while (of_size != by_size_.begin() && found.size() < most) {
    --of_size;
    if (of_size->first.db != db) break;
    for (const Line* line = of_size->second.first(); line != nullptr && found.size() < most;
         line = line->of_size_.after) {
      found.push_back(line);
    }
  }
  std::sort(found.begin(), found.end(), [](const Line* a, const Line* b) {
    return a->size() != b->size() ? a->size() > b->size() : a->lock_.key < b->lock_.key;
  });
  return found;
}

void WaitQueue::List(Line& line) {
  if (line.size() > 0) by_size_[{line.lock_.db, line.size()}].Append(line);
}

void WaitQueue::Unlist(Line& line) {
  const auto of_size = by_size_.find({line.lock_.db, line.size()});
  if (of_size == by_size_.end()) return;
  of_size->second.Remove(line);
  if (of_size->second.empty()) by_size_.erase(of_size);
}

WaitQueue::Line& WaitQueue::LineOf(LockName lock) {
  if (Line* line = Find(lock); line != nullptr) return *line;
  const auto added = lines_[lock.db].try_emplace(std::string(lock.key)).first;
  added->second.lock_ = LockName{lock.db, added->first};
  added->second.number_ = ++numbers_;
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
  party_list_.Append(added->second);
  return added->second;
}

void WaitQueue::DropIfIdle(Party& party) {
  if (!party.waits.empty()) return;
  party_list_.Remove(party);
  parties_.erase(parties_.find(party.owner.bytes));
}

WaitQueue::Place& WaitQueue::OnlyPlace(const Party& party) {
  return party.waits.first()->places_.front();
}

std::vector<WaitQueue::Waiter*> WaitQueue::Waiters() const {
  std::vector<Waiter*> waiters;
  waiters.reserve(size());
  for (const auto& [when, waiter] : timeouts_) waiters.push_back(waiter);
  return waiters;
}

std::vector<WaitQueue::Waiter*> WaitQueue::FindWaiters(std::span<const LockName> locks,
                                                       Owner owner) {
  std::vector<Waiter*> found;
  const Party* party = FindParty(owner);
  if (party == nullptr) return found;
  std::vector<const Line*> lines;  // compared by address, and in no order that matters
  for (const LockName lock : locks) {
    if (const Line* line = Find(lock); line != nullptr) lines.push_back(line);
  }
  if (lines.empty()) return found;
  std::sort(lines.begin(), lines.end(), std::less<>());
  for (Waiter* wait = party->waits.first(); wait != nullptr; wait = wait->of_party_.after) {
    const bool overlaps =
        std::any_of(wait->places_.begin(), wait->places_.end(), [&lines](const Place& place) {
          return std::binary_search(lines.begin(), lines.end(), place.line_, std::less<>());
        });
    if (overlaps) found.push_back(wait);
  }
  return found;
}

bool WaitQueue::WaitsFor(const Waiter& waiter, std::span<const LockName> locks, Mode mode) {
  return waiter.request_.mode == mode && waiter.size() == locks.size() &&
         std::all_of(locks.begin(), locks.end(),
                     [&waiter](LockName lock) { return waiter.WaitsFor(lock); });
}

void WaitQueue::Enter(Waiter& waiter, std::span<const LockName> locks, Owner owner, bool upgrade) {
  Party& party = PartyOf(owner);
  if (party.places == 1) ++OnlyPlace(party).line_->with_other_places_;
  party.places += locks.size();
  party.waits.Append(waiter);
  waiter.party_ = &party;
  waiter.request_.owner = party.owner;
  waiter.number_ = ++numbers_;
  waiter.blocked_at_.reset();
  waiter.places_.resize(locks.size());
  for (size_t i = 0; i < locks.size(); ++i) {
    Place& place = waiter.places_[i];
    Line& line = LineOf(locks[i]);
    place.waiter_ = &waiter;
    place.line_ = &line;
    Unlist(line);
    line.Insert(place, upgrade);
    List(line);
    if (party.places > 1) ++line.with_other_places_;
  }
  timeouts_.emplace(std::pair(waiter.deadline_, waiter.number_), &waiter);
}

void WaitQueue::TakeOver(Waiter& newer, Waiter& older) {
  Unregister(older);
  newer.places_ = std::exchange(older.places_, {});
  newer.party_ = std::exchange(older.party_, nullptr);
  newer.party_->waits.Append(newer);
  newer.party_->waits.Remove(older);
  newer.request_.owner = newer.party_->owner;
  newer.number_ = ++numbers_;
  newer.blocked_at_.reset();
  newer.registered_ = true;
  timeouts_.erase({older.deadline_, older.number_});
  timeouts_.emplace(std::pair(newer.deadline_, newer.number_), &newer);
  for (Place& place : newer.places_) {
    Line& line = *place.line_;
    place.waiter_ = &newer;
    line.Discount(older.request_);
    line.Count(newer.request_);
    Register(place);
    WakeLine(line);
  }
}

void WaitQueue::Leave(Waiter& waiter, Left why) {
  Unregister(waiter);
  timeouts_.erase({waiter.deadline_, waiter.number_});
  Party& party = *std::exchange(waiter.party_, nullptr);
  party.waits.Remove(waiter);
  const bool had_others = party.places > 1;
  party.places -= waiter.size();
  if (had_others && party.places == 1) --OnlyPlace(party).line_->with_other_places_;
  DropIfIdle(party);
  for (Place& place : waiter.places_) {
    Line& line = *place.line_;
    if (had_others) --line.with_other_places_;
    Unlist(line);
    line.Remove(place);
    List(line);
    if (line.places_.empty()) {
      Drop(line);
    } else if (why == Left::kHoldsAlone) {
      Sleep(line);
    } else {
      WakeLine(line);
    }
  }
  waiter.places_ = std::vector<Place>();
  if (!empty()) return;
  // After a rush the tables, though empty, would stay large.
  lines_ = decltype(lines_)();
  parties_ = decltype(parties_)();
}

void WaitQueue::Drop(Line& line) {
  auto& of_db = lines_.find(line.lock_.db)->second;
  of_db.erase(of_db.find(line.lock_.key));
}

void WaitQueue::Register(Place& place) {
  Line& line = *place.line_;
  line.to_try_.emplace_hint(line.to_try_.end(), place.order_, &place);
  Reorder(line);
}

void WaitQueue::Unregister(Place& place) {
  Line& line = *place.line_;
  line.to_try_.erase(place.order_);
  Reorder(line);
  if (line.to_try_.empty()) SetEnd(line, std::nullopt);
}

void WaitQueue::Unregister(Waiter& waiter) {
  if (!std::exchange(waiter.registered_, false)) return;
  if (waiter.blocked_at_.has_value()) {
    Unregister(waiter.places_[*waiter.blocked_at_]);
  } else {
    for (Place& place : waiter.places_) Unregister(place);
  }
}

void WaitQueue::Reorder(Line& line) {
  if (!line.woken_.has_value()) return;
  if (line.to_try_.empty()) {
    Sleep(line);
  } else if (const Order first = line.to_try_.begin()->first; first != *line.woken_) {
    woken_.erase({*line.woken_, line.number_});
    line.woken_ = first;
    woken_.emplace(std::pair(first, line.number_), &line);
  }
}

void WaitQueue::WakeLine(Line& line) {
  if (line.woken_.has_value() || line.to_try_.empty()) return;
  line.woken_ = line.to_try_.begin()->first;
  woken_.emplace(std::pair(*line.woken_, line.number_), &line);
}

void WaitQueue::Sleep(Line& line) {
  if (!line.woken_.has_value()) return;
  woken_.erase({*line.woken_, line.number_});
  line.woken_.reset();
}

void WaitQueue::SetEnd(Line& line, std::optional<Instant> end) {
  if (line.end_ == end) return;
  if (line.end_.has_value()) ends_.erase({*line.end_, line.number_});
  line.end_ = end;
  if (end.has_value()) ends_.emplace(std::pair(*end, line.number_), &line);
}

void WaitQueue::Block(Waiter& waiter, size_t index, std::optional<Instant> next_end) {
  Place& place = waiter.places_[index];
  Line& line = *place.line_;
  if (!waiter.registered_ || waiter.blocked_at_ != index) {
    Unregister(waiter);
    waiter.blocked_at_ = index;
    waiter.registered_ = true;
    Register(place);
  }
  if (line.to_try_.begin()->second == &place) {
    Sleep(line);
    SetEnd(line, next_end);
  } else if (next_end.has_value()) {
    // Somebody ahead is to be tried too: what was to wake it stays.
    NoteEnd(line, *next_end);
  }
}

void WaitQueue::Suspend(Waiter& waiter) {
  Unregister(waiter);
  waiter.blocked_at_.reset();
  waiter.registered_ = true;
  for (Place& place : waiter.places_) {
    Register(place);
    Sleep(*place.line_);
  }
}

void WaitQueue::NoteEnd(LockName lock, Instant end) {
  Line* line = Find(lock);
  if (line != nullptr && !line->to_try_.empty()) NoteEnd(*line, end);
}

void WaitQueue::NoteEnd(Line& line, Instant end) {
  if (!line.end_.has_value() || end < *line.end_) SetEnd(line, end);
}

void WaitQueue::Wake(LockName lock) {
  if (Line* line = Find(lock); line != nullptr) WakeLine(*line);
}

void WaitQueue::WakeEvery(std::string_view key) {
  for (auto& [number, of_db] : lines_) {
    if (const auto line = of_db.find(key); line != of_db.end()) WakeLine(line->second);
  }
}

void WaitQueue::WakeAll(std::optional<int> db) {
  for (auto& [number, of_db] : lines_) {
    if (db.has_value() && number != *db) continue;
    for (auto& [key, line] : of_db) WakeLine(line);
  }
}

WaitQueue::Waiter* WaitQueue::NextToTry(Instant now) {
  while (!ends_.empty() && ends_.begin()->first.first < now) {
    Line& line = *ends_.begin()->second;
    SetEnd(line, std::nullopt);
    WakeLine(line);
  }
  return woken_.empty() ? nullptr : woken_.begin()->second->to_try_.begin()->second->waiter_;
}

WaitQueue::Waiter* WaitQueue::FirstTimedOut(Tick now) const {
  if (timeouts_.empty() || timeouts_.begin()->first.first > now) return nullptr;
  return timeouts_.begin()->second;
}

Tick WaitQueue::NextTimeOut() const {
  return timeouts_.empty() ? kMaxTick : timeouts_.begin()->first.first;
}

Instant WaitQueue::NextDue() const {
  if (!woken_.empty()) return kMinInstant;
  return ends_.empty() ? kMaxInstant : After(ends_.begin()->first.first);
}

}  // namespace turnstile
