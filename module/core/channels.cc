#include "core/channels.h"

#include <algorithm>
#include <utility>

#include "core/host.h"

namespace turnstile {

bool Channels::IsBoundTo(LockName lock, Owner owner, const NotifyTarget& target) const {
  const auto found = bindings_.Find(lock, owner);
  return found != bindings_.end() && found->second.target() == target;
}

void Channels::Forget(Bindings::Iterator at) {
  ends_.erase({at->second.end, at->second.number});
  bindings_.Erase(at);
}

void Channels::Bind(LockName lock, const Hold& hold, const NotifyTarget& target,
                    std::string_view user) {
  Unbind(lock, hold.owner);
  const auto added = bindings_.Add(lock, hold.owner,
                                   {.channel = std::string(target.channel),
                                    .id = std::string(target.id),
                                    .user = std::string(user),
                                    .token = hold.token,
                                    .end = hold.end,
                                    .number = ++numbers_});
  ends_.emplace(std::pair(hold.end, numbers_), &added->first);
}

void Channels::Renew(LockName lock, const Hold& hold) {
  const auto found = bindings_.Find(lock, hold.owner);
  if (found == bindings_.end()) return;
  Binding& binding = found->second;
  binding.token = hold.token;
  if (binding.end == hold.end) return;
  ends_.erase({binding.end, binding.number});
  binding.end = hold.end;
  ends_.emplace(std::pair(binding.end, binding.number), &found->first);
}

void Channels::Unbind(LockName lock, Owner owner) {
  if (const auto found = bindings_.Find(lock, owner); found != bindings_.end()) Forget(found);
}

void Channels::UnbindAll(LockName lock) {
  lost_with_last_ = 0;
  if (empty()) return;
  auto at = bindings_.FirstOf(lock);
  while (bindings_.IsOf(at, lock)) Forget(std::exchange(at, std::next(at)));
}

void Channels::Clear() {
  while (!bindings_.empty()) Forget(bindings_.begin());
  cleared_ = numbers_;
}

Channels::Bindings::Iterator Channels::Lose(Bindings::Iterator at, Loss how) {
  const auto next = std::next(at);
  ends_.erase({at->second.end, at->second.number});
  auto [hold, binding] = bindings_.Extract(at);
  lost_.push_back({std::move(binding), std::move(hold), how});
  return next;
}

void Channels::Lose(LockName lock, Owner owner, Loss how) {
  const auto found = bindings_.Find(lock, owner);
  if (found == bindings_.end()) return;
  lost_with_last_ = 0;
  Lose(found, how);
}

bool Channels::OnRemoved(LockName lock, bool expires, bool moves, Instant now) {
  lost_with_last_ = 0;
  if (empty()) return false;
  for (auto at = bindings_.FirstOf(lock); bindings_.IsOf(at, lock);) {
    const bool ended = expires || HasEnded(at->second.end, now);
    if (moves && !ended) {
      Forget(std::exchange(at, std::next(at)));
    } else {
      at = Lose(at, ended ? Loss::kExpired : Loss::kForced);
      ++lost_with_last_;
    }
  }
  return lost_with_last_ > 0;
}

void Channels::OnFlushed(std::optional<int> db, Instant now) {
  lost_with_last_ = 0;
  auto at = db.has_value() ? bindings_.FirstIn(*db) : bindings_.begin();
  while (at != bindings_.end() && at->first.db == db.value_or(at->first.db)) {
    at = Lose(at, HasEnded(at->second.end, now) ? Loss::kExpired : Loss::kFlushed);
  }
}

void Channels::OnEvicted(LockName lock) {
  const size_t last = std::min(std::exchange(lost_with_last_, 0), lost_.size());
  for (size_t i = 0; i < last; ++i) {
    Lost& lost = lost_[lost_.size() - 1 - i];
    if (lost.hold.lock() == lock && lost.how == Loss::kForced) lost.how = Loss::kEvicted;
  }
}

bool Channels::HasComeBack(Host& host, const Lost& lost, Instant now) {
  const LockName lock = lost.hold.lock();
  const OpenKey key(host, {.lock = lock}, Access::kInspect);
  const auto hold = key.lock() == nullptr ? std::nullopt : key.lock()->Find(Owner{lost.hold.owner});
  if (!hold.has_value() || hold->token != lost.binding.token || !hold->LiveAt(now)) return false;
  const bool ends = lost.binding.number <= cleared_;
  if (!ends && bindings_.Find(lock, hold->owner) == bindings_.end()) {
    Bind(lock, *hold, lost.binding.target(), lost.binding.user);
  }
  return true;
}

void Channels::Publish(Host& host, Instant now, bool may_look, Budget& budget) {
  constexpr size_t kCost = 4;
  for (; !lost_.empty() && !budget.spent(); budget.Spend(kCost)) {
    const Lost lost = std::move(lost_.front());
    lost_.pop_front();
    const bool by_others = lost.how == Loss::kForced || lost.how == Loss::kFlushed;
    if (by_others && may_look && HasComeBack(host, lost, now)) continue;
    const Delivery delivery = host.Publish({.to = lost.binding.target(),
                                            .user = lost.binding.user,
                                            .key = lost.hold.key,
                                            .what = HoldLoss{lost.binding.token, lost.how}});
    budget.Spend(delivery.cost);
  }
  while (!ends_.empty() && HasEnded(ends_.begin()->first.first, now) && !budget.spent()) {
    const BoundHold& hold = *ends_.begin()->second;
    const auto at = bindings_.Find(hold.lock(), Owner{hold.owner});
    const Delivery delivery = host.Publish({.to = at->second.target(),
                                            .user = at->second.user,
                                            .key = at->first.key,
                                            .what = HoldLoss{at->second.token, Loss::kExpired}});
    Forget(at);
    budget.Spend(kCost + delivery.cost);
  }
}

Due Channels::NextDue() {
  announced_ = ends_.empty() ? std::nullopt : std::optional(ends_.begin()->first.first);
  if (has_unpublished()) return Due::AtOnce();
  return announced_.has_value() ? Due::At(*announced_ + Millis{1}) : Due::Never();
}

bool Channels::IsDueEarlier() const {
  if (ends_.empty()) return false;
  return !announced_.has_value() || ends_.begin()->first.first < *announced_;
}

bool Channels::IsConsistent() {
  if (ends_.size() != bindings_.size()) return false;
  for (auto at = bindings_.begin(); at != bindings_.end(); ++at) {
    const auto end = ends_.find({at->second.end, at->second.number});
    if (end == ends_.end() || end->second != &at->first) return false;
  }
  return true;
}

}  // namespace turnstile
