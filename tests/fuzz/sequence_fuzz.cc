// libFuzzer: any sequence of commands, of moments and of strangers' deeds, against the core.
//
// Input: each step is a byte that says what happens and a few that say how. Commands are written as
// words and parsed; what is decided is carried out on a primary, written as facts, parsed again and
// obeyed by a replica. Callers stand in line, time out and are handed over; the clock goes on, and
// sometimes back; locks are written and read again; the replica takes the primary's place.
//
// What clients were told is written down beside, by rules of a few lines. After every step the
// primary and the replica must be equal, and both must agree with that: nobody holds beside
// somebody incompatible, nothing is lost or revived, tokens rise. Nobody is overtaken, nobody waits
// whom the grant rule admits, and everybody is answered.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "core/deadlock.h"
#include "core/decide.h"
#include "core/encoding.h"
#include "core/fact.h"
#include "core/lock.h"
#include "core/request.h"
#include "core/token_clock.h"
#include "core/types.h"
#include "core/wait_queue.h"

namespace turnstile {
namespace {

void Require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "broken: %s\n", what);
  std::abort();
}

const std::array kKeys = {std::string("red"), std::string("b\0\r\n", 4), std::string(),
                          std::string("green")};
const std::array kOwners = {std::string("ann"),           std::string("an"),
                            std::string("\0\r\n\xff", 4), std::string(256, 'z'),
                            std::string("LIMIT"),         std::string("bob")};
constexpr Limits kLimits{.max_lease = std::chrono::hours{24}};
constexpr Millis kMargin = std::chrono::seconds{30};

size_t NumberOf(std::string_view key) {
  return static_cast<size_t>(std::find(kKeys.begin(), kKeys.end(), key) - kKeys.begin());
}
LockName NameOf(size_t key) { return {.db = 0, .key = kKeys.at(key)}; }

using Wire = std::vector<std::string>;
std::vector<std::string_view> Views(const Wire& wire) { return {wire.begin(), wire.end()}; }

class Input {
 public:
  Input(const uint8_t* data, size_t size) : data_(data), size_(size) {}
  bool empty() const { return at_ == size_; }
  size_t Byte() { return empty() ? 0 : data_[at_++]; }
  size_t Key() { return Byte() % kKeys.size(); }
  const std::string& Owner() { return kOwners.at(Byte() % kOwners.size()); }
  int64_t Duration() {
    constexpr std::array<int64_t, 8> kDurations = {1, 2, 5, 20, 100, 3'000, 60'000, 86'400'000};
    return kDurations.at(Byte() % kDurations.size());
  }

 private:
  const uint8_t* data_;
  size_t size_;
  size_t at_ = 0;
};

// What a server stores.
struct Node {
  struct Entry {
    std::unique_ptr<Lock> lock;
    std::optional<std::string> plain;
    Instant plain_end;
  };
  std::array<Entry, kKeys.size()> entries;
  TokenClock clock;

  Entry& At(size_t key) { return entries.at(key); }
  Place PlaceAt(size_t key) const {
    const Entry& entry = entries.at(key);
    if (!entry.plain.has_value()) return {.lock = entry.lock.get(), .plain = std::nullopt};
    return {.lock = nullptr, .plain = PlainLock{*entry.plain, entry.plain_end}};
  }
  void Keep(size_t key, Lock* lock) {
    Entry& entry = At(key);
    if (lock != entry.lock.get()) entry.lock.reset(lock);
    entry.plain.reset();
  }

  // What a replica does.
  void Obey(const Wire& wire) {
    const auto words = Views(wire);
    const Args args = Args(words).subspan(1);
    if (wire[0] == "LOCK.HELD") {
      const auto parsed = ParseHeldFact(args);
      Require(parsed.index() == 0, "a hold is told as one");
      const auto& [key, held] = std::get<HeldFact>(parsed);
      clock.Observe(held.hold.token);
      Keep(NumberOf(key), Apply(At(NumberOf(key)).lock.get(), held));
    } else if (wire[0] == "LOCK.RELEASE") {
      const auto parsed = ParseRelease(args);
      Require(parsed.index() == 0, "a release is told as one");
      const size_t key = NumberOf(words[1]);
      const auto [outcome, change] =
          Decide(PlaceAt(key), std::get<ReleaseRequest>(parsed), kBeforeAnyEnd);
      Require(change.has_value() && change->index() == 1, "a release that is told is obeyed");
      Keep(key, Apply(At(key).lock.get(), std::get<Released>(*change)));
    } else {
      const auto parsed = ParseFact(args);
      Require(parsed.index() == 0, "a fact is told as one");
      const Fact& fact = std::get<Fact>(parsed);
      if (const auto* floor = std::get_if<FloorFact>(&fact); floor != nullptr) {
        clock.Observe(floor->token);
        return;
      }
      const size_t key = NumberOf(words[2]);
      Lock* const lock = At(key).lock.get();
      Require(lock != nullptr, "what ends was there");
      if (const auto* expired = std::get_if<ExpiredFact>(&fact); expired != nullptr) {
        Keep(key, Apply(lock, expired->expired));
      } else if (const auto* session = std::get_if<SessionFact>(&fact); session != nullptr) {
        Keep(key, Apply(lock, session->ended()));
      } else {
        Keep(key, Apply(lock, std::get<EndedFact>(fact).ended));
      }
    }
  }
};

Wire WireOf(size_t key, const Change& change) {
  if (const auto* held = std::get_if<Held>(&change)) {
    const Hold& hold = held->hold;
    Wire wire = {"LOCK.HELD", kKeys.at(key), std::string(hold.owner.bytes),
                 std::string(HeldNumbers(hold).text())};
    if (held->mode != Mode::kExclusive) wire.emplace_back(WordFor(held->mode));
    if (hold.count != 1) {
      wire.insert(wire.end(), {std::string(kCountWord), std::to_string(hold.count)});
    }
    if (hold.linger != Millis{0}) {
      wire.insert(wire.end(), {std::string(kLingerWord), std::to_string(hold.linger.count())});
    }
    return wire;
  }
  if (const auto* released = std::get_if<Released>(&change)) {
    return {"LOCK.RELEASE", kKeys.at(key), std::string(released->owner.bytes)};
  }
  const auto number = [](Instant moment) {
    return std::to_string(moment.time_since_epoch().count());
  };
  if (const auto* expired = std::get_if<Expired>(&change)) {
    return {"LOCK.FACT", "EXPIRED", kKeys.at(key), number(expired->before)};
  }
  if (const auto* sessions = std::get_if<SessionsEnded>(&change)) {
    Wire wire = {"LOCK.FACT", "SESSION", kKeys.at(key), number(sessions->at)};
    for (const Owner owner : sessions->owners) wire.emplace_back(owner.bytes);
    return wire;
  }
  const Ended& ended = std::get<Ended>(change);
  Wire wire = {"LOCK.FACT", "ENDED", kKeys.at(key), std::string(ended.owner.bytes)};
  if (!WordFor(ended.how).empty()) wire.emplace_back(WordFor(ended.how));
  return wire;
}

// A hold as its owner knows it.
struct Told {
  Mode mode;
  Token token;
  Instant end;
  Instant closes;
  uint32_t count;
};

class World {
 public:
  explicit World(Input input) : in_(input) {}

  void Run() {
    while (!in_.empty()) {
      const size_t what = in_.Byte();
      Step(what % 32);
      if (what < 160) BeforeSleep();
      CheckState();
    }
    grace_ = Grace::kOver;
    queue_.WakeAll(std::nullopt);
    for (int i = 0; !parked_.empty(); ++i) {
      Require(i < 10'000, "everybody is answered in the end");
      BeforeSleep();
      CheckState();
      if (NextDue() != kMaxInstant) now_ = std::max(now_, FineInstant{NextDue()});
    }
  }

 private:
  struct Parked : WaitQueue::Waiter {
    using Waiter::Waiter;
    std::vector<size_t> keys;
    int arrival = 0;
    bool was_upgrade = false;
  };
  struct Grant {  // to one that waited
    std::vector<size_t> keys;
    std::string owner;
    Token token;
    std::optional<Hold> upgraded;
  };

  Instant now() const { return ToInstant(now_); }
  FineTick fine_tick() const { return FineTick{now_.time_since_epoch() + set_back_}; }
  Tick tick() const { return ToTick(fine_tick()); }
  // By the wall clock; rounded up, as a deadline is.
  Instant NextDue() const {
    if (queue_.empty()) return queue_.NextDue();
    const FineInstant time_out{queue_.NextTimeOut().time_since_epoch() - set_back_};
    return std::min(queue_.NextDue(), std::chrono::ceil<Millis>(time_out));
  }
  static bool IsLive(const Told* told, Instant now) { return told != nullptr && now <= told->end; }
  Told* ToldTo(size_t key, std::string_view owner) {
    const auto found = told_.at(key).find(owner);
    return found == told_.at(key).end() ? nullptr : &found->second;
  }
  bool IsOwnPlain(size_t key, std::string_view owner) {
    const Node::Entry& entry = primary_.At(key);
    return entry.plain == owner && now() <= entry.plain_end;
  }

  void Step(size_t what) {
    if (what < 12) {
      Acquire();
    } else if (what < 17) {
      ReleaseOrTouch(what);
    } else if (what < 21) {
      PassTime();
    } else if (what == 21) {
      EndSession();
    } else if (what == 22) {
      TakeBack();
    } else if (what == 23) {
      Remove(in_.Key());
    } else if (what == 24) {
      Set();
    } else if (what == 25) {
      Rename(in_.Key(), in_.Key());
    } else if (what == 26) {
      Reload(primary_);
      Reload(replica_);
    } else if (what == 27) {
      FailOver();
    } else if (what == 28) {
      grace_ = grace_ == Grace::kOn ? Grace::kOver : Grace::kOn;
      queue_.WakeAll(std::nullopt);
    } else if (what == 29) {
      GoBack();
    } else if (what == 30) {
      if (!parked_.empty()) Leave(*parked_[in_.Byte() % parked_.size()]);
    } else {
      LoseAll();
    }
  }

  // --- Commands

  // A key, an owner, maybe more keys behind the options.
  Wire Words(size_t flags, std::vector<size_t>& keys) {
    keys = {in_.Key()};
    Wire words = {kKeys.at(keys[0]), in_.Owner()};
    if (flags % 4 == 3) {
      for (size_t i = 1 + in_.Byte() % (kKeys.size() - 1); i > 0; --i) {
        keys.push_back((keys[0] + i) % kKeys.size());
      }
      words.insert(words.end(), {"also", std::to_string(keys.size() - 1)});
      for (size_t i = 1; i < keys.size(); ++i) words.push_back(kKeys.at(keys[i]));
    }
    return words;
  }

  void Acquire() {
    const size_t flags = in_.Byte();
    std::vector<size_t> keys;
    Wire words = Words(flags, keys);
    words.insert(words.end(), {"PX", std::to_string(in_.Duration())});
    if ((flags & 4) != 0) words.insert(words.end(), {"WAIT", std::to_string(in_.Duration())});
    const size_t mode = flags >> 3 & 3;
    if (mode == 1) words.emplace_back("SHARED");
    if (mode == 2) words.insert(words.end(), {"LIMIT", std::to_string(1 + in_.Byte() % 3)});
    if ((flags & 32) != 0) words.insert(words.end(), {"LINGER", std::to_string(in_.Duration())});
    if ((flags & 64) != 0) words.emplace_back("REENTRANT");
    if ((flags & 128) != 0) {
      const auto lead = static_cast<int64_t>(in_.Byte()) * 3'000'000;
      words.insert(words.end(),
                   {"FLOOR", std::to_string(now_.time_since_epoch().count() + lead - 30'000'000)});
    }
    const auto views = Views(words);
    const auto parsed = ParseAcquire(views, kLimits);
    Require((parsed.index() == 0) == (mode != 2 || (flags & 64) == 0), "it is understood");
    if (parsed.index() == 0) Acquire(std::get<AcquireRequest>(parsed), keys);
  }

  void Acquire(const AcquireRequest& request, const std::vector<size_t>& keys) {
    const bool upgrade = keys.size() == 1 && IsUpgrade(primary_.PlaceAt(keys[0]), request, now());
    std::vector<LockName> names;
    std::vector<Site> sites;
    for (const size_t key : keys) {
      names.push_back(NameOf(key));
      const WaitQueue::Line* line = queue_.Find(names.back());
      sites.push_back(
          {primary_.PlaceAt(key), line == nullptr ? Crowd{} : line->Ahead(upgrade, now())});
    }
    const Admission admission = Decide(sites, request, now_, primary_.clock, {.grace = grace_});
    if (admission.granted()) return Admit(request, keys, admission, nullptr);
    if (!admission.busy() || request.wait == Millis{0}) return;

    const auto olders = queue_.FindWaiters(names, request.owner);
    auto waiter = std::make_unique<Parked>(request, tick(), tick() + request.wait);
    waiter->keys = keys;
    waiter->arrival = ++arrivals_;
    waiter->was_upgrade = upgrade;
    if (olders.size() == 1 && WaitQueue::WaitsFor(*olders[0], names, request.mode)) {
      auto& older = static_cast<Parked&>(*olders[0]);
      waiter->keys = older.keys;
      waiter->arrival = older.arrival;
      waiter->was_upgrade = older.was_upgrade;
      queue_.TakeOver(*waiter, older);
      Require(!older.in_line(), "whose place is taken stands in no line");
      if (!FindCycleOf(*waiter, olders).empty()) return queue_.TakeOver(older, *waiter);
      Forget(older);
      parked_.push_back(std::move(waiter));
      return;
    }
    queue_.Enter(*waiter, names, request.owner, upgrade);
    Block(*waiter, sites);
    const auto cycle = FindCycleOf(*waiter, olders);
    for (size_t i = 0; i < cycle.size(); ++i) {
      Require(IsInTheWay(cycle[i].lock, cycle[(i + 1) % cycle.size()].owner), "a cycle is closed");
    }
    parked_.push_back(std::move(waiter));
    if (!cycle.empty()) return Leave(*parked_.back());
    for (WaitQueue::Waiter* older : olders) Leave(static_cast<Parked&>(*older));
  }

  std::vector<CycleStep> FindCycleOf(const Parked& waiter,
                                     const std::vector<WaitQueue::Waiter*>& olders) {
    const auto show = [this](LockName lock, const auto& see) {
      see(primary_.PlaceAt(NumberOf(lock.key)));
    };
    return FindCycle(queue_, waiter, olders, now(), show);
  }

  void Block(Parked& waiter, const std::vector<Site>& sites) {
    for (size_t i = 0; i < sites.size(); ++i) {
      if (!IsBlocked(sites[i], waiter.request(), now())) continue;
      return queue_.Block(waiter, i, NextEnd(sites[i].place, now()));
    }
    Require(grace_ == Grace::kOn, "who waits is blocked");
    queue_.Suspend(waiter);
  }

  // Whether `owner` holds the lock or stands in its line.
  bool IsInTheWay(LockName lock, Owner owner) {
    const size_t key = NumberOf(lock.key);
    if (ToldTo(key, owner.bytes) != nullptr || IsOwnPlain(key, owner.bytes)) return true;
    for (auto* place = queue_.Find(lock)->first(); place != nullptr; place = place->behind()) {
      if (place->waiter().request().owner == owner) return true;
    }
    return false;
  }

  void ReleaseOrTouch(size_t what) {
    std::vector<size_t> keys;
    Wire words = Words(in_.Byte(), keys);
    const bool touch = what >= 15;
    if (touch) words.insert(words.end(), {"px", std::to_string(in_.Duration())});
    const auto views = Views(words);
    const auto touching = ParseTouch(views, kLimits);
    const auto releasing = ParseRelease(views);
    Require((touch ? touching.index() : releasing.index()) == 0, "it is understood");
    if (!touch) {
      std::vector<LockName> names;
      for (const size_t key : keys) names.push_back(NameOf(key));
      for (auto* wait : queue_.FindWaiters(names, Owner{words[1]})) {
        Leave(static_cast<Parked&>(*wait));
      }
    }
    for (const size_t key : keys) {
      Told* told = ToldTo(key, words[1]);
      const bool plain = IsOwnPlain(key, words[1]);
      const bool live = IsLive(told, now());
      const Place place = primary_.PlaceAt(key);
      if (touch) {
        const TouchRequest& request = std::get<TouchRequest>(touching);
        Require(CarryOut(key, Decide(place, request, now())) == (live || plain), "a touch is told");
        if (!live) continue;
        told->closes += now() + request.lease - told->end;
        told->end = now() + request.lease;
        continue;
      }
      const Decision decision = Decide(place, std::get<ReleaseRequest>(releasing), now());
      const bool counted = decision.outcome == Outcome::kReleased;
      CarryOut(key, decision);
      Require(counted == (live || plain), "a release is told");
      if (live && --told->count > 0) continue;
      if (told != nullptr && now() <= told->closes) told_.at(key).erase(words[1]);
    }
  }

  void EndSession() {
    const size_t key = in_.Key();
    const size_t which = in_.Byte();
    std::vector<Owner> owners;
    for (size_t i = 0; i < kOwners.size(); ++i) {
      if (which % kOwners.size() == i || (which >> i & 1) != 0) owners.push_back({kOwners.at(i)});
    }
    const std::vector<Owner> end = DecideSessionEnd(primary_.PlaceAt(key), owners, now());
    if (!end.empty()) CarryOut(key, SessionsEnded{now(), which < 128 ? end : owners});
    size_t ended = 0;
    for (const Owner owner : owners) {
      Told* told = ToldTo(key, owner.bytes);
      if (!IsLive(told, now())) continue;
      ++ended;
      if (told->closes == told->end) {
        told_.at(key).erase(std::string(owner.bytes));
      } else {
        told->closes += now() - Millis{1} - told->end;
        told->end = kMinInstant;
      }
    }
    Require(end.size() == ended, "a session ends a live hold");
  }

  // The last who was handed a lock never heard of it.
  void TakeBack() {
    if (!last_grant_.has_value()) return;
    const Grant grant = *std::exchange(last_grant_, std::nullopt);
    std::optional<Hold> upgraded = grant.upgraded;
    if (upgraded.has_value()) upgraded->owner = Owner{grant.owner};
    for (const size_t key : grant.keys) {
      const Told* told = ToldTo(key, grant.owner);
      const bool takes = IsLive(told, now()) && told->token == grant.token;
      Require(CarryOut(key, DecideTakeBack(primary_.PlaceAt(key), Owner{grant.owner}, grant.token,
                                           upgraded, now())) == takes,
              "what nobody was told is taken back");
      if (!takes) continue;
      told_.at(key).erase(grant.owner);
      if (upgraded.has_value() && upgraded->KeepsOutAt(now())) {
        told_.at(key).emplace(grant.owner, Told{Mode::kShared, upgraded->token, upgraded->end,
                                                upgraded->closes(), upgraded->count});
      }
    }
  }

  // --- Strangers, the clock and the server

  void Remove(size_t key) {
    primary_.At(key) = {};
    replica_.At(key) = {};
    told_.at(key).clear();
    queue_.Wake(NameOf(key));
  }

  void Set() {
    const size_t key = in_.Key();
    const std::string& value = in_.Owner();
    const size_t ttl = in_.Byte();
    Remove(key);
    for (Node* node : {&primary_, &replica_}) {
      node->At(key).plain = value;
      node->At(key).plain_end = ttl < 64 ? kMaxInstant : now() + Millis{ttl};
    }
    queue_.Wake(NameOf(key));
  }

  void Rename(size_t from, size_t to) {
    const Place place = primary_.PlaceAt(from);
    if (from == to || (place.lock == nullptr && !place.plain.has_value())) return;
    for (Node* node : {&primary_, &replica_}) node->At(to) = std::exchange(node->At(from), {});
    told_.at(to) = std::exchange(told_.at(from), {});
    queue_.Wake(NameOf(from));
    queue_.Wake(NameOf(to));
  }

  static void Reload(Node& node) {
    for (Node::Entry& entry : node.entries) {
      if (entry.lock == nullptr) continue;
      const std::string bytes = Encode(*entry.lock);
      entry.lock = Decode(bytes, kCurrentEncoding);
      Require(entry.lock != nullptr && Encode(*entry.lock) == bytes, "what is written is read");
    }
  }

  void StartToIssue() {
    while (!parked_.empty()) Leave(*parked_.back());
    last_grant_.reset();
    const Token floor = primary_.clock.StartIssuing(now_, kMargin);
    Require(floor >= highest_, "a start is above all tokens");
    primary_.clock.Observe(floor);  // as everybody who is told of it
    replica_.Obey({"LOCK.FACT", "FLOOR", std::to_string(floor.value)});
  }

  void FailOver() {
    std::swap(primary_, replica_);
    StartToIssue();
  }

  // A start with nothing, as far as the margin covers it.
  void LoseAll() {
    if (LeadOf(highest_, now_) >= kMargin) return;
    for (size_t key = 0; key < kKeys.size(); ++key) Remove(key);
    primary_.clock = replica_.clock = TokenClock();
    StartToIssue();
  }

  void PassTime() {
    constexpr std::array<int64_t, 6> kMicros = {1, 400, 1'000, 7'000, 90'000, 40'000'000};
    const size_t how = in_.Byte() % (kMicros.size() + 2);
    const Instant due = NextDue();
    if (how < kMicros.size()) {
      now_ += Micros{kMicros.at(how)};
    } else if (due != kMaxInstant) {
      now_ = std::max(now_, FineInstant{due - Millis{how == kMicros.size() ? 0 : 1}});
    }
  }

  // A hold that was over must not live again: the timers have taken it out.
  void GoBack() {
    for (size_t key = 0; key < kKeys.size(); ++key) TakeOutOverdue(key);
    BeforeSleep();
    for (auto& told : told_) {
      std::erase_if(told, [&](const auto& entry) { return entry.second.closes < now(); });
    }
    const Micros step{static_cast<int64_t>(in_.Byte()) * 200};
    now_ -= step;
    set_back_ += step;
  }

  // --- Carrying out

  // Whether there was anything to carry out.
  bool CarryOut(size_t key, const Decision& decision) {
    if (decision.change.has_value()) CarryOut(key, *decision.change);
    return decision.change.has_value();
  }

  void CarryOut(size_t key, const Change& change) {
    const auto overdue = OverdueBefore(primary_.PlaceAt(key), change, now());
    if (overdue.has_value()) Tell(key, *overdue);
    if (std::holds_alternative<PlainFreed>(change)) return Remove(key);
    if (const auto* extended = std::get_if<PlainExtended>(&change)) {
      for (Node* node : {&primary_, &replica_}) node->At(key).plain_end = extended->end;
      return queue_.Wake(NameOf(key));
    }
    Tell(key, change);
    Require(!Overdue(primary_.PlaceAt(key), now()).has_value(),
            "what is over goes before a change");
  }

  // Applies a fact here and sends it there.
  void Tell(size_t key, const Change& change) {
    const Wire wire = WireOf(key, change);
    Lock* const lock = primary_.At(key).lock.get();
    if (const auto* held = std::get_if<Held>(&change)) {
      const Held fact = *held;
      const bool same_mode = lock != nullptr && lock->mode() == fact.mode;
      primary_.clock.Observe(fact.hold.token);
      primary_.Keep(key, Apply(lock, fact));
      queue_.NoteEnd(NameOf(key), fact.hold.closes());
      if (!same_mode) queue_.Wake(NameOf(key));
    } else {
      std::visit(
          [&](const auto& fact) {
            if constexpr (requires { Apply(lock, fact); }) primary_.Keep(key, Apply(lock, fact));
          },
          change);
      queue_.Wake(NameOf(key));
    }
    replica_.Obey(wire);
  }

  void TakeOutOverdue(size_t key) {
    const Place place = primary_.PlaceAt(key);
    if (place.plain.has_value() && place.plain->end < now()) return Remove(key);
    if (place.lock != nullptr && place.lock->closes() < now()) return Remove(key);
    if (const auto overdue = Overdue(place, now()); overdue.has_value()) Tell(key, *overdue);
  }

  void Admit(const AcquireRequest& request, const std::vector<size_t>& keys,
             const Admission& admission, const Parked* waiter) {
    if (admission.is_new()) Require(admission.token > highest_, "tokens rise");
    Require(!admission.is_new() || grace_ == Grace::kOver, "nobody is new while the grace is on");
    Require(admission.token >= request.floor.value_or(kMinToken), "a floor is kept");
    Require(admission.token <= kMaxToken, "a token is in range");
    highest_ = std::max(highest_, admission.token);
    for (const size_t key : keys) {
      CheckRoom(key, request);
      if (admission.is_new()) CheckOrder(key, request, admission, waiter);
      Told* told = ToldTo(key, request.owner.bytes);
      if (!IsLive(told, now())) told = nullptr;
      const bool again = !admission.is_new() || admission.outcome == Outcome::kUpgraded;
      Require(again == (told != nullptr), "who holds asks again, and nobody else");
      Require(admission.is_new() || admission.token == told->token || request.floor.has_value(),
              "who asks again has the same token");
      uint32_t count = told == nullptr ? 1 : told->count;
      if (told != nullptr && request.reentrant) ++count;
      const Change held = HeldBy(primary_.PlaceAt(key), request, admission.token, now());
      CarryOut(key, held);
      const Instant end = now() + request.lease;
      if (request.mode == Mode::kExclusive) told_.at(key).clear();
      std::erase_if(told_.at(key), [&](const auto& entry) { return entry.second.closes < now(); });
      told_.at(key)[std::string(request.owner.bytes)] = {request.mode, admission.token, end,
                                                         end + request.linger, count};
    }
  }

  // --- Before the event loop sleeps

  void Leave(Parked& waiter) {
    queue_.Leave(waiter);
    Require(!waiter.in_line(), "who has left stands in no line");
    Forget(waiter);
  }

  void Forget(const Parked& waiter) {
    const size_t answered =
        std::erase_if(parked_, [&](const auto& parked) { return parked.get() == &waiter; });
    Require(answered == 1, "everybody is answered once");
  }

  void BeforeSleep() {
    while (WaitQueue::Waiter* waiter = queue_.FirstTimedOut(tick())) {
      Require(waiter->deadline() <= tick(), "nobody times out too early");
      Leave(static_cast<Parked&>(*waiter));
    }
    for (int tries = 0; WaitQueue::Waiter* waiter = queue_.NextToTry(now()); ++tries) {
      Require(tries < 10'000, "nobody is tried again and again");
      TryGrant(static_cast<Parked&>(*waiter));
    }
    CheckWaiting();
  }

  void TryGrant(Parked& waiter) {
    const AcquireRequest request = waiter.request();
    for (const size_t key : waiter.keys) TakeOutOverdue(key);
    std::vector<Site> sites;
    for (size_t i = 0; i < waiter.size(); ++i) {
      sites.push_back({primary_.PlaceAt(waiter.keys[i]), waiter.AheadOf(i)});
    }
    const Admission admission = Decide(sites, request, now_, primary_.clock, {.grace = grace_});
    if (admission.busy()) return Block(waiter, sites);
    if (admission.granted()) {
      last_grant_ = {waiter.keys, std::string(request.owner.bytes), admission.token,
                     HoldToUpgrade(sites[0].place, request, now())};
      Admit(request, waiter.keys, admission, &waiter);
    }
    const bool alone = admission.granted() && request.mode == Mode::kExclusive;
    queue_.Leave(waiter, alone ? WaitQueue::Left::kHoldsAlone : WaitQueue::Left::kGone);
    Forget(waiter);
  }

  // --- Checks

  void CheckRoom(size_t key, const AcquireRequest& request) {
    const Node::Entry& entry = primary_.At(key);
    Require(
        !entry.plain.has_value() || entry.plain_end < now() || *entry.plain == request.owner.bytes,
        "a plain lock keeps others out");
    uint32_t others = 0;
    for (const auto& [owner, told] : told_.at(key)) {
      if (owner == request.owner.bytes || told.closes < now()) continue;
      ++others;
      Require(told.mode == request.mode && told.mode != Mode::kExclusive, "one holder at a time");
    }
    const bool asks_anew = !IsLive(ToldTo(key, request.owner.bytes), now());
    Require(!asks_anew || request.mode != Mode::kLimit || others < request.limit,
            "no more holders than the limit allows");
  }

  // Whoever came before can hold the lock beside this one.
  void CheckOrder(size_t key, const AcquireRequest& request, const Admission& admission,
                  const Parked* self) {
    const bool passes = admission.outcome == Outcome::kUpgraded ||
                        (self != nullptr && self->was_upgrade) ||
                        IsOwnPlain(key, request.owner.bytes);
    const WaitQueue::Line* line = queue_.Find(NameOf(key));
    if (passes || line == nullptr) return;
    for (const auto* place = line->first(); place != nullptr; place = place->behind()) {
      const auto& other = static_cast<const Parked&>(place->waiter());
      if (self != nullptr && other.arrival >= self->arrival) continue;
      Require(other.request().mode == request.mode && request.mode != Mode::kExclusive,
              "nobody is overtaken");
    }
  }

  void CheckWaiting() {
    for (const auto& waiter : parked_) {
      Require(waiter->deadline() > tick() && queue_.NextTimeOut() <= waiter->deadline(),
              "a time-out is due");
      std::vector<Site> sites;
      bool holds = false;
      for (size_t i = 0; i < waiter->size(); ++i) {
        const size_t key = waiter->keys[i];
        sites.push_back({primary_.PlaceAt(key), waiter->AheadOf(i)});
        // One that holds a lock and stands behind others whom it keeps out must wait for itself.
        const Told* told = ToldTo(key, waiter->request().owner.bytes);
        holds = holds || told != nullptr || IsOwnPlain(key, waiter->request().owner.bytes);
      }
      // It may be that it would be refused: a floor is too high for a clock that went back.
      Require(
          holds ||
              !Decide(sites, waiter->request(), now_, primary_.clock, {.grace = grace_}).granted(),
          "nobody waits whom the grant rule admits");
    }
  }

  void CheckState() {
    Require(queue_.size() == parked_.size(), "who waits is in line");
    Require(primary_.clock.last() == replica_.clock.last(), "both know the last token");
    for (size_t key = 0; key < kKeys.size(); ++key) {
      const Node::Entry& here = primary_.At(key);
      const Node::Entry& there = replica_.At(key);
      Require(here.plain == there.plain && (here.lock == nullptr) == (there.lock == nullptr),
              "the replica is equal");
      size_t kept_out = 0;
      std::optional<Token> current;
      for (const auto& [owner, told] : told_.at(key)) {
        if (told.closes < now()) continue;
        ++kept_out;
        const auto hold = here.lock == nullptr ? std::nullopt : here.lock->Find(Owner{owner});
        Require(hold.has_value() && here.lock->mode() == told.mode && hold->token == told.token &&
                    hold->end == told.end && hold->closes() == told.closes &&
                    hold->count == told.count,
                "what was told is true");
        if (now() <= told.end) current = std::max(current.value_or(told.token), told.token);
      }
      const Place place = primary_.PlaceAt(key);
      Require(place.plain.has_value() || CountHolders(place, now()) == kept_out,
              "nobody else holds it");
      Require(CurrentToken(place, now()) == current, "the current token is the highest");
      if (here.lock == nullptr) continue;
      const std::string bytes = Encode(*here.lock);
      Require(bytes == Encode(*there.lock), "the replica stores the same");
      const auto again = Decode(bytes, kCurrentEncoding);
      Require(again != nullptr && Encode(*again) == bytes, "what is stored can be read");
    }
  }

  Input in_;
  FineInstant now_{Micros{1'700'000'000'000'000}};
  Micros set_back_{0};  // so much the wall clock was
  Grace grace_ = Grace::kOver;
  Node primary_;
  Node replica_;
  WaitQueue queue_;
  std::vector<std::unique_ptr<Parked>> parked_;
  int arrivals_ = 0;
  std::array<std::map<std::string, Told, std::less<>>, kKeys.size()> told_;
  Token highest_;
  std::optional<Grant> last_grant_;
};

}  // namespace
}  // namespace turnstile

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  turnstile::World(turnstile::Input(data, size)).Run();
  return 0;
}
