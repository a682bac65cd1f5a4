#include "fault/simulator/server.h"

#include <algorithm>
#include <charconv>
#include <utility>
#include <variant>

#include "core/deadlock.h"
#include "core/encoding.h"
#include "core/fact.h"
#include "fault/simulator/arena.h"

namespace turnstile::fault {
namespace {

constexpr std::string_view kHeldCommand = "LOCK.HELD";
constexpr std::string_view kFactCommand = "LOCK.FACT";
constexpr std::string_view kReleaseCommand = "LOCK.RELEASE";

LockName LockNameOf(uint32_t lock) { return {0, NameOfLock(lock)}; }

uint32_t LockOf(std::string_view name) { return static_cast<uint32_t>(name.front() - 'a'); }

size_t NumberOf(Owner owner) {
  size_t number = 0;
  std::from_chars(owner.bytes.data(), owner.bytes.data() + owner.bytes.size(), number);
  return number;
}

// A number in the words of a command.
class Digits {
 public:
  explicit Digits(int64_t number)
      : size_(static_cast<size_t>(
            std::to_chars(text_.data(), text_.data() + text_.size(), number).ptr - text_.data())) {}
  std::string_view text() const { return {text_.data(), size_}; }

 private:
  std::array<char, 20> text_;
  size_t size_;
};

int64_t ToNumber(Instant moment) { return moment.time_since_epoch().count(); }

Instant ParseInstant(std::string_view text) {
  return Instant{Millis{ParseDigits(text).value_or(0)}};
}

// Some are short and some long, because they are stored behind what is fixed.
std::array<std::string, kOwners> MakeOwnerNames() {
  std::array<std::string, kOwners> names;
  for (size_t i = 0; i < kOwners; ++i) {
    names[i] = std::to_string(i);
    if (i % 4 == 3) names[i] += "-and-a-name-that-is-as-long-as-a-uuid";
  }
  return names;
}

AcquireRequest RequestOf(const Call& call) {
  return {.owner = Owner{NameOfOwner(call.owner)},
          .lease = call.lease,
          .wait = call.wait,
          .mode = call.mode,
          .limit = call.limit,
          .reentrant = call.reentrant,
          .session = call.session,
          .linger = call.linger,
          .floor = call.token.value > 0 ? std::optional(call.token) : std::nullopt};
}

std::span<const uint32_t> LocksOf(const Call& call) {
  return std::span(call.locks).first(call.count);
}

}  // namespace

std::string_view NameOfLock(uint32_t lock) { return std::string_view("abc").substr(lock, 1); }

std::string_view NameOfOwner(uint32_t owner) {
  static const std::array<std::string, kOwners> names = MakeOwnerNames();
  return names[owner];
}

void CommandLog::Clear() {
  bytes_.clear();
  words_.clear();
  commands_.clear();
}

void CommandLog::Append(std::span<const std::string_view> words) {
  for (const std::string_view word : words) {
    bytes_ += word;
    words_.push_back(static_cast<uint32_t>(bytes_.size()));
  }
  commands_.push_back(static_cast<uint32_t>(words_.size()));
}

std::span<const std::string_view> CommandLog::Read(size_t index, Words& words) const {
  const size_t first = index == 0 ? 0 : commands_[index - 1];
  const size_t count = commands_[index] - first;
  size_t begin = first == 0 ? 0 : words_[first - 1];
  for (size_t i = 0; i < count; ++i) {
    const size_t end = words_[first + i];
    words[i] = std::string_view(bytes_).substr(begin, end - begin);
    begin = end;
  }
  return std::span(words).first(count);
}

struct Server::Parked : WaitQueue::Waiter {
  Parked(const Call& asked, const AcquireRequest& request, FineTick now)
      : Waiter(request, ToTick(now), std::chrono::ceil<Millis>(now + request.wait)),
        call(asked),
        came(now) {}
  Call call;
  FineTick came;
};

Server::~Server() {
  for (Parked* parked : superseded_) delete parked;
  for (Parked* parked : parked_) {
    queue_.Leave(*parked);
    delete parked;
  }
}

// --- Keys -------------------------------------------------------------------------------------

Place Server::PlaceOf(uint32_t lock) const {
  const Slot& slot = slots_[lock];
  Place place{.lock = slot.lock.get()};
  if (slot.is_plain) place.plain = PlainLock{.value = slot.plain, .end = slot.plain_end};
  return place;
}

void Server::Open(uint32_t lock, Instant now) {
  const Slot& slot = slots_[lock];
  const bool over =
      slot.is_plain ? slot.plain_end < now : slot.lock != nullptr && slot.lock->closes() < now;
  if (over) Delete(lock);
}

// The key goes, whatever is in it.
void Server::Remove(uint32_t lock) {
  Slot& slot = slots_[lock];
  const bool was_lock = slot.lock != nullptr;
  slot.lock.reset();
  slot.is_plain = false;
  LockChanged(lock);
  if (was_lock && !sessions_.empty()) sessions_.UnbindAll(LockNameOf(lock));
}

void Server::Delete(uint32_t lock) {
  const ArenaScope arena;
  if (slots_[lock].lock == nullptr && !slots_[lock].is_plain) return;
  Emit(std::array{std::string_view("DEL"), NameOfLock(lock)});
  Remove(lock);
}

void Server::Flush() {
  const ArenaScope arena;
  Emit(std::array{std::string_view("FLUSHALL")});
  for (uint32_t lock = 0; lock < kLocks; ++lock) Remove(lock);
}

void Server::Set(uint32_t lock, std::string_view value, Instant end) {
  const ArenaScope arena;
  const Digits digits(ToNumber(end));
  Emit(std::array{std::string_view("SET"), NameOfLock(lock), value, digits.text()});
  Remove(lock);
  Slot& slot = slots_[lock];
  slot.is_plain = true;
  slot.plain = value;
  slot.plain_end = end;
  LockChanged(lock);
}

void Server::Rename(uint32_t from, uint32_t to, Instant now) {
  const ArenaScope arena;
  Open(from, now);
  if (slots_[from].lock == nullptr && !slots_[from].is_plain) return;
  Emit(std::array{std::string_view("RENAME"), NameOfLock(from), NameOfLock(to)});
  Remove(to);
  std::swap(slots_[from], slots_[to]);
  sessions_.UnbindAll(LockNameOf(from));
  for (size_t owner = 0; owner < kOwners; ++owner) {
    ledger_[to][owner] = std::max(ledger_[to][owner], ledger_[from][owner]);
  }
  LockChanged(from);
  LockChanged(to);
}

void Server::LockChanged(uint32_t lock) {
  if (!queue_.empty()) queue_.Wake(LockNameOf(lock));
}

bool Server::HasSameData(const Server& other) const {
  const ArenaScope arena;
  for (size_t i = 0; i < kLocks; ++i) {
    const Slot& a = slots_[i];
    const Slot& b = other.slots_[i];
    if (a.is_plain != b.is_plain || (a.lock == nullptr) != (b.lock == nullptr)) return false;
    if (a.is_plain && (a.plain != b.plain || a.plain_end != b.plain_end)) return false;
    if (a.lock != nullptr && Encoded(*a.lock).bytes() != Encoded(*b.lock).bytes()) return false;
  }
  return true;
}

bool Server::HasLongerLease() const {
  for (size_t i = 0; i < kLocks; ++i) {
    const Lock* lock = slots_[i].lock.get();
    for (size_t j = 0; lock != nullptr && j < lock->size(); ++j) {
      const Hold hold = lock->at(Lock::Order::kByOwner, j);
      if (hold.closes() > ledger_[i][NumberOf(hold.owner)]) return true;
    }
  }
  return false;
}

// --- Tokens -----------------------------------------------------------------------------------

const TokenClock& Server::Issuing(FineInstant now) {
  if (!issuing_) {
    issuing_ = true;
    issuing_since_ = ToInstant(now);
    untold_floor_ = clock_.StartIssuing(now, settings_.margin);
  }
  return clock_;
}

void Server::BeOldPrimary(FineInstant now) {
  is_primary_ = true;
  issuing_ = true;
  issuing_since_ = ToInstant(now) - settings_.grace - Millis{1};
  clock_.SetMargin(settings_.margin);
}

Instant Server::GraceEnd() const {
  return issuing_ && settings_.grace > Millis{0} ? issuing_since_ + settings_.grace : kMinInstant;
}

void Server::BecomeReplica() {
  const ArenaScope arena;
  is_primary_ = false;
  issuing_ = false;
  untold_floor_.reset();
  clock_.ForgetFloor();
  held_back_ = false;
  to_take_back_.clear();
  sessions_.UnbindAll(std::nullopt);
  while (!parked_.empty()) Send(*parked_.back(), Reply{.answer = Answer::kError});
}

// --- From a decision to its effects -----------------------------------------------------------

void Server::EmitHeld(uint32_t lock, const Held& held) {
  const HeldNumbers numbers(held.hold);
  const Digits count(held.hold.count);
  const Digits linger(held.hold.linger.count());
  CommandLog::Words words = {kHeldCommand, NameOfLock(lock), held.hold.owner.bytes, numbers.text()};
  size_t size = 4;
  if (held.mode != Mode::kExclusive) words[size++] = WordFor(held.mode);
  if (held.hold.count != 1) {
    words[size++] = kCountWord;
    words[size++] = count.text();
  }
  if (held.hold.linger != Millis{0}) {
    words[size++] = kLingerWord;
    words[size++] = linger.text();
  }
  Emit(std::span(words).first(size));
}

void Server::EmitEnded(uint32_t lock, const Ended& ended) {
  const std::string_view how = WordFor(ended.how);
  const std::array words = {kFactCommand, kFactEnded, NameOfLock(lock), ended.owner.bytes, how};
  Emit(std::span(words).first(how.empty() ? 4 : 5));
}

void Server::Store(uint32_t lock, const Held& held) {
  Slot& slot = slots_[lock];
  const LockName name = LockNameOf(lock);
  if (!sessions_.empty() && Replaces(slot.lock.get(), held)) sessions_.UnbindAll(name);
  const bool same_mode = slot.lock != nullptr && slot.lock->mode() == held.mode;
  Lock* stored = Apply(slot.lock.get(), held);
  if (stored != slot.lock.get()) slot.lock.reset(stored);
  slot.is_plain = false;
  clock_.Observe(held.hold.token);
  if (queue_.empty()) return;
  queue_.NoteEnd(name, held.hold.closes());
  if (!same_mode) queue_.Wake(name);
}

template <typename Fact>
void Server::TakeOut(uint32_t lock, const Fact& fact) {
  Slot& slot = slots_[lock];
  // First, because the owner's bytes may be in the lock.
  if (slot.lock->size() > 1 && EndsHold(*slot.lock, fact)) HoldGone(lock, fact.owner);
  ApplyRemoval(lock, fact);
}

void Server::HoldGone(uint32_t lock, Owner owner) {
  LockChanged(lock);
  if (!sessions_.empty()) sessions_.Unbind(LockNameOf(lock), owner);
}

void Server::TakeOutExpired(uint32_t lock, const Expired& expired) {
  const Lock& stored = *slots_[lock].lock;
  for (const Hold& hold : stored.holds(Lock::Order::kByClosing)) {
    if (hold.KeepsOutAt(expired.before)) break;
    if (stored.size() > 1) HoldGone(lock, hold.owner);
  }
  ApplyRemoval(lock, expired);
}

void Server::EndSessionsOf(uint32_t lock, const SessionsEnded& ended) {
  for (const Owner owner : ended.owners) {
    const Lock& stored = *slots_[lock].lock;
    const std::optional<Hold> hold = stored.Find(owner);
    const bool ends = hold.has_value() && hold->LiveAt(ended.at);
    if (ends && hold->linger == Millis{0} && stored.size() > 1) HoldGone(lock, owner);
  }
  ApplyRemoval(lock, ended);
  const Lock* left = slots_[lock].lock.get();
  if (left == nullptr || queue_.empty()) return;
  for (const Owner owner : ended.owners) {
    const std::optional<Hold> hold = left->Find(owner);
    if (hold.has_value()) queue_.NoteEnd(LockNameOf(lock), hold->closes());
  }
}

template <typename Fact>
void Server::ApplyRemoval(uint32_t lock, const Fact& fact) {
  Slot& slot = slots_[lock];
  Lock* left = Apply(slot.lock.get(), fact);
  if (left == nullptr) {
    Remove(lock);
  } else if (left != slot.lock.get()) {
    slot.lock.reset(left);
  }
}

void Server::Do(uint32_t lock, const Held& held) {
  Instant& latest = ledger_[lock][NumberOf(held.hold.owner)];
  latest = std::max(latest, held.hold.closes());
  Store(lock, held);
  EmitHeld(lock, held);
}

void Server::Do(uint32_t lock, const Released& released) {
  Emit(std::array{kReleaseCommand, NameOfLock(lock), released.owner.bytes});
  TakeOut(lock, released);
}

void Server::Do(uint32_t lock, const Ended& ended) {
  EmitEnded(lock, ended);
  TakeOut(lock, ended);
}

void Server::Do(uint32_t lock, const Expired& expired) {
  const Digits before(ToNumber(expired.before));
  Emit(std::array{std::string_view(kFactCommand), kFactExpired, NameOfLock(lock), before.text()});
  TakeOutExpired(lock, expired);
}

void Server::Do(uint32_t lock, const SessionsEnded& ended) {
  const Digits at(ToNumber(ended.at));
  CommandLog::Words words = {kFactCommand, kFactSession, NameOfLock(lock), at.text()};
  size_t size = 4;
  for (const Owner owner : ended.owners) words.at(size++) = owner.bytes;
  Emit(std::span(words).first(size));
  EndSessionsOf(lock, ended);
}

void Server::Do(uint32_t lock, const PlainFreed& /*freed*/) { Delete(lock); }

void Server::Do(uint32_t lock, const PlainExtended& extended) {
  const Digits digits(ToNumber(extended.end));
  Emit(std::array{std::string_view("PEXPIREAT"), NameOfLock(lock), digits.text()});
  slots_[lock].plain_end = extended.end;
}

void Server::CarryOut(uint32_t lock, const Change& change, Instant now) {
  if (const auto overdue = OverdueBefore(PlaceOf(lock), change, now); overdue.has_value()) {
    Do(lock, *overdue);
  }
  std::visit([&](const auto& fact) { Do(lock, fact); }, change);
}

void Server::CarryOutGrant(uint32_t lock, const AcquireRequest& request, const Call& call,
                           Token token, Instant now) {
  CarryOut(lock, HeldBy(PlaceOf(lock), request, token, now), now);
  if (call.session) {
    sessions_.Bind(call.connection, LockNameOf(lock), request.owner);
  } else if (!sessions_.empty()) {
    sessions_.Unbind(LockNameOf(lock), request.owner);
  }
}

void Server::Obey(std::span<const std::string_view> words) {
  const ArenaScope arena;
  const std::string_view command = words.front();
  const Args args = words.subspan(1);
  Emit(words);
  if (command == kHeldCommand) {
    const auto parsed = ParseHeldFact(args);
    if (const auto* fact = std::get_if<HeldFact>(&parsed)) {
      Store(LockOf(fact->key), fact->held);
    } else {
      fault_ = "a fact is not understood";
    }
  } else if (command == kFactCommand) {
    ObeyFact(args);
  } else if (command == kReleaseCommand) {
    ObeyRelease(args);
  } else if (command == "DEL") {
    Remove(LockOf(args[0]));
  } else if (command == "FLUSHALL") {
    for (uint32_t lock = 0; lock < kLocks; ++lock) Remove(lock);
  } else if (command == "SET") {
    Remove(LockOf(args[0]));
    Slot& slot = slots_[LockOf(args[0])];
    slot.is_plain = true;
    slot.plain = args[1];
    slot.plain_end = ParseInstant(args[2]);
  } else if (command == "RENAME") {
    Remove(LockOf(args[1]));
    std::swap(slots_[LockOf(args[0])], slots_[LockOf(args[1])]);
  } else if (command == "PEXPIREAT") {
    slots_[LockOf(args[0])].plain_end = ParseInstant(args[1]);
  }
}

void Server::ObeyFact(Args args) {
  const auto parsed = ParseFact(args);
  const auto* fact = std::get_if<Fact>(&parsed);
  if (fact == nullptr) {
    fault_ = "a fact is not understood";
  } else if (const auto* floor = std::get_if<FloorFact>(fact)) {
    clock_.Observe(floor->token);
  } else if (const auto* ended = std::get_if<EndedFact>(fact)) {
    if (slots_[LockOf(ended->key)].lock != nullptr) TakeOut(LockOf(ended->key), ended->ended);
  } else if (const auto* expired = std::get_if<ExpiredFact>(fact)) {
    const uint32_t lock = LockOf(expired->key);
    if (slots_[lock].lock != nullptr) TakeOutExpired(lock, expired->expired);
  } else if (const auto* session = std::get_if<SessionFact>(fact)) {
    const uint32_t lock = LockOf(session->key);
    if (slots_[lock].lock != nullptr) EndSessionsOf(lock, session->ended());
  }
}

void Server::ObeyRelease(Args args) {
  const auto parsed = ParseRelease(args);
  const auto* request = std::get_if<ReleaseRequest>(&parsed);
  if (request == nullptr) {
    fault_ = "a release is not understood";
    return;
  }
  const uint32_t lock = LockOf(args[0]);
  const Decision decision = Decide(PlaceOf(lock), *request, kBeforeAnyEnd);
  if (!decision.change.has_value()) return;
  if (const auto* released = std::get_if<Released>(&*decision.change)) TakeOut(lock, *released);
  if (const auto* ended = std::get_if<Ended>(&*decision.change)) TakeOut(lock, *ended);
}

Server::Copy Server::Save(FineInstant now) {
  const ArenaScope arena;
  Copy copy;
  for (size_t i = 0; i < kLocks; ++i) {
    const Slot& slot = slots_[i];
    if (slot.is_plain) {
      copy.values[i] = {.is_plain = true, .bytes = slot.plain, .plain_end = slot.plain_end};
    } else if (slot.lock != nullptr) {
      copy.values[i].bytes = Encode(*slot.lock);
    }
  }
  if (clock_.LeadAt(now) > Micros{0}) {
    copy.clock = clock_.reading();
    if (issuing_) untold_floor_ = clock_.reading();
  }
  return copy;
}

void Server::Load(const Copy& copy) {
  const ArenaScope arena;
  log_.Clear();
  for (uint32_t i = 0; i < kLocks; ++i) {
    const Copy::Value& value = copy.values[i];
    Remove(i);
    if (value.bytes.empty()) continue;
    Slot& slot = slots_[i];
    if (value.is_plain) {
      slot.is_plain = true;
      slot.plain = value.bytes;
      slot.plain_end = value.plain_end;
      continue;
    }
    slot.lock = Decode(value.bytes, kCurrentEncoding);
    if (slot.lock == nullptr) {
      fault_ = "a lock that was saved does not load";
      return;
    }
    clock_.Observe(slot.lock->at(Lock::Order::kByToken, slot.lock->size() - 1).token);
  }
  if (copy.clock.has_value()) clock_.Observe(*copy.clock);
}

// --- What clients ask -------------------------------------------------------------------------

void Server::Handle(const Call& call, FineInstant now, FineTick tick) {
  const ArenaScope arena;
  const Instant moment = ToInstant(now);
  if (!is_primary_) {
    replies_.push_back(
        {.call = call.number, .connection = call.connection, .answer = Answer::kError});
    return;
  }
  for (const uint32_t lock : LocksOf(call)) {
    Open(lock, moment);
    EndSessionsIn(lock, moment);
  }
  switch (call.verb) {
    case Verb::kAcquire:
      return Acquire(call, now, tick);
    case Verb::kRelease:
      return ReleaseAll(call, moment);
    case Verb::kTouch:
      return TouchAll(call, moment);
    default:
      return Fence(call, moment);
  }
}

Crowd Server::AheadOfNewcomer(uint32_t lock, const AcquireRequest& request, Instant now) {
  if (queue_.empty()) return {};
  const WaitQueue::Line* line = queue_.Find(LockNameOf(lock));
  return line == nullptr ? Crowd() : line->Ahead(IsUpgrade(PlaceOf(lock), request, now), now);
}

void Server::Acquire(const Call& call, FineInstant now, FineTick tick) {
  const Instant moment = ToInstant(now);
  const AcquireRequest request = RequestOf(call);
  Sites sites;
  for (size_t i = 0; i < call.count; ++i) {
    sites[i] = {PlaceOf(call.locks[i]), AheadOfNewcomer(call.locks[i], request, moment)};
  }
  const TokenClock& clock = Issuing(now);
  const Admission admission =
      Decide(std::span(sites).first(call.count), request, now, clock, {.grace = GraceAt(moment)});
  Reply reply{.call = call.number, .connection = call.connection, .answer = Answer::kError};
  if (admission.granted()) {
    for (const uint32_t lock : LocksOf(call)) {
      CarryOutGrant(lock, request, call, admission.token, moment);
    }
    OwnerWasTold(call);
    reply.answer = Answer::kToken;
    reply.token = static_cast<int64_t>(admission.token.value);
  } else if (admission.busy() && request.wait > Millis{0}) {
    return Park(call, sites, request, moment, tick);
  } else if (admission.busy()) {
    reply.answer = Answer::kNull;
  }
  replies_.push_back(reply);
}

void Server::Block(Parked& parked, const Sites& sites, Instant now) {
  for (size_t i = 0; i < parked.size(); ++i) {
    if (!IsBlocked(sites[i], parked.request(), now)) continue;
    queue_.Block(parked, i, NextEnd(sites[i].place, now));
    return;
  }
  held_back_ = true;
  queue_.Suspend(parked);
}

void Server::Park(const Call& call, const Sites& sites, const AcquireRequest& request, Instant now,
                  FineTick tick) {
  std::array<LockName, kLocks> names;
  for (size_t i = 0; i < call.count; ++i) names[i] = LockNameOf(call.locks[i]);
  const auto locks = std::span(names).first(call.count);
  const std::vector<WaitQueue::Waiter*> olders = queue_.FindWaiters(locks, request.owner);
  auto parked = std::make_unique<Parked>(call, request, tick);
  if (olders.size() == 1 && WaitQueue::WaitsFor(*olders.front(), locks, request.mode)) {
    // It stands there in the order in which the older named the locks.
    parked->call.locks = static_cast<Parked*>(olders.front())->call.locks;
    queue_.TakeOver(*parked, *olders.front());
  } else {
    const bool upgrade = call.count == 1 && IsUpgrade(PlaceOf(call.locks[0]), request, now);
    queue_.Enter(*parked, locks, request.owner, upgrade);
    Block(*parked, sites, now);
  }
  const auto show = [this](LockName lock, const auto& see) { see(PlaceOf(LockOf(lock.key))); };
  if (!FindCycle(queue_, *parked, olders, now, show).empty()) {
    if (!olders.empty() && !olders.front()->in_line()) {
      queue_.TakeOver(*olders.front(), *parked);
    } else {
      queue_.Leave(*parked);
    }
    replies_.push_back(
        {.call = call.number, .connection = call.connection, .answer = Answer::kError});
    return;
  }
  for (WaitQueue::Waiter* older : olders) UnblockLater(*static_cast<Parked*>(older));
  parked_.push_back(parked.release());
}

// The wait is over; its caller is answered before the event loop sleeps.
void Server::UnblockLater(Parked& parked) {
  superseded_.push_back(&parked);
  std::erase(parked_, &parked);
  if (parked.in_line()) queue_.Leave(parked);
}

void Server::ReleaseAll(const Call& call, Instant now) {
  Reply reply{.call = call.number, .connection = call.connection};
  const ReleaseRequest request{Owner{NameOfOwner(call.owner)}, {}};
  std::array<LockName, kLocks> names;
  std::array<bool, kLocks> waited{};
  for (size_t i = 0; i < call.count; ++i) names[i] = LockNameOf(call.locks[i]);
  for (WaitQueue::Waiter* wait :
       queue_.FindWaiters(std::span(names).first(call.count), request.owner)) {
    for (size_t i = 0; i < call.count; ++i) waited[i] = waited[i] || wait->WaitsFor(names[i]);
    UnblockLater(*static_cast<Parked*>(wait));
  }
  for (size_t i = 0; i < call.count; ++i) {
    const Decision decision = Decide(PlaceOf(call.locks[i]), request, now);
    if (decision.change.has_value()) CarryOut(call.locks[i], *decision.change, now);
    if (decision.outcome == Outcome::kReleased || waited[i]) ++reply.done;
  }
  reply.answer = reply.done == 0 ? Answer::kNo : Answer::kYes;
  replies_.push_back(reply);
}

void Server::TouchAll(const Call& call, Instant now) {
  Reply reply{.call = call.number, .connection = call.connection};
  const TouchRequest request{Owner{NameOfOwner(call.owner)}, call.lease, {}};
  for (const uint32_t lock : LocksOf(call)) {
    const Decision decision = Decide(PlaceOf(lock), request, now);
    if (!decision.change.has_value()) continue;
    CarryOut(lock, *decision.change, now);
    OwnerWasTold(call);
    ++reply.done;
  }
  reply.answer = reply.done == 0 ? Answer::kNo : Answer::kYes;
  replies_.push_back(reply);
}

void Server::Fence(const Call& call, Instant now) {
  const bool current = IsCurrent(PlaceOf(call.locks[0]), call.token, now);
  replies_.push_back({.call = call.number,
                      .connection = call.connection,
                      .answer = current ? Answer::kYes : Answer::kNo});
}

// A grant that is still on its way to another connection of the owner will not be taken back.
void Server::OwnerWasTold(const Call& call) {
  const auto tell = [&call](Grant& grant) {
    const auto locks = LocksOf(grant.call);
    const bool overlaps = std::any_of(locks.begin(), locks.end(), [&](uint32_t lock) {
      return std::find(LocksOf(call).begin(), LocksOf(call).end(), lock) != LocksOf(call).end();
    });
    grant.told = grant.told || (grant.call.owner == call.owner && overlaps);
  };
  std::for_each(in_flight_.begin(), in_flight_.end(), tell);
  std::for_each(to_take_back_.begin(), to_take_back_.end(), tell);
}

void Server::Send(Parked& parked, const Reply& reply) {
  replies_.push_back(reply);
  replies_.back().call = parked.call.number;
  replies_.back().connection = parked.call.connection;
  replies_.back().waited = true;
  Forget(parked);
}

void Server::Forget(Parked& parked) {
  if (parked.in_line()) queue_.Leave(parked);
  std::erase(parked_, &parked);
  std::erase(superseded_, &parked);
  delete &parked;
}

void Server::ConnectionClosed(uint32_t connection) {
  const ArenaScope arena;
  for (size_t i = parked_.size(); i > 0; --i) {
    Parked& parked = *parked_[i - 1];
    if (parked.call.connection == connection) Forget(parked);
  }
  sessions_.Close(connection);
}

void Server::NotDelivered(uint32_t call) {
  const ArenaScope arena;
  for (const Grant& grant : in_flight_) {
    if (grant.call.number == call && !grant.told) to_take_back_.push_back(grant);
  }
}

// --- Before the event loop sleeps -------------------------------------------------------------

Instant Server::NextDue() const {
  if (!superseded_.empty()) return kMinInstant;
  Instant due = queue_.NextDue();
  if (!is_primary_) return due;
  if (!issuing_ || untold_floor_.has_value() || !to_take_back_.empty() || sessions_.has_ended()) {
    return kMinInstant;
  }
  if (held_back_) due = std::min(due, GraceEnd() + Millis{1});
  return due;
}

void Server::Turn(FineInstant now, FineTick tick) {
  const ArenaScope arena;
  const Instant moment = ToInstant(now);
  TimeOut(ToTick(tick));
  in_flight_.clear();
  if (!is_primary_) return;
  Issuing(now);
  if (untold_floor_.has_value()) {
    const Token floor = *std::exchange(untold_floor_, std::nullopt);
    clock_.Observe(floor);  // from here on others know it
    const Digits digits(static_cast<int64_t>(floor.value));
    Emit(std::array{kFactCommand, kFactFloor, digits.text()});
  }
  for (const Grant& grant : std::exchange(to_take_back_, {})) {
    if (!grant.told) TakeBack(grant, moment);
  }
  EndSessions(moment);
  GrantWaiters(now);
}

void Server::TimeOut(Tick now) {
  while (!superseded_.empty()) Send(*superseded_.back(), Reply{.answer = Answer::kError});
  while (WaitQueue::Waiter* waiter = queue_.FirstTimedOut(now)) {
    Send(*static_cast<Parked*>(waiter), Reply{.answer = Answer::kNull});
  }
}

void Server::TakeBack(const Grant& grant, Instant now) {
  ++taken_back_;
  const Owner owner{NameOfOwner(grant.call.owner)};
  for (const uint32_t lock : LocksOf(grant.call)) {
    Open(lock, now);
    std::optional<Hold> upgraded = grant.upgraded;
    if (upgraded.has_value()) upgraded->owner = owner;
    const Decision decision = DecideTakeBack(PlaceOf(lock), owner, grant.token, upgraded, now);
    if (!decision.change.has_value()) continue;
    CarryOut(lock, *decision.change, now);
    if (!std::holds_alternative<Held>(*decision.change)) continue;
    if (grant.bound_to.has_value()) {
      sessions_.Bind(*grant.bound_to, LockNameOf(lock), owner);
    } else {
      sessions_.Unbind(LockNameOf(lock), owner);
    }
  }
}

void Server::EndSessions(Instant now) {
  while (sessions_.has_ended()) {
    const uint32_t lock = LockOf(sessions_.FirstWithEnded().key);
    Open(lock, now);
    EndSessionsIn(lock, now);
  }
}

void Server::EndSessionsIn(uint32_t lock, Instant now) {
  if (!is_primary_) return;
  for (const std::string& name : sessions_.TakeEnded(LockNameOf(lock), kOwners).owners) {
    const std::array owners = {Owner{name}};
    if (DecideSessionEnd(PlaceOf(lock), owners, now).empty()) continue;
    ++sessions_ended_;
    CarryOut(lock, SessionsEnded{now, owners}, now);
  }
}

void Server::GrantWaiters(FineInstant now) {
  const Instant moment = ToInstant(now);
  if (held_back_ && GraceAt(moment) == Grace::kOver) {
    held_back_ = false;
    queue_.WakeAll(std::nullopt);
  }
  int tries = 0;
  while (WaitQueue::Waiter* waiter = queue_.NextToTry(moment)) {
    constexpr int kManyTries = 1000;
    if (++tries > kManyTries) {
      fault_ = "waiters are tried for ever";
      return;
    }
    // As on a server that has much to do.
    if (settings_.tries_per_pass > 0 && tries > settings_.tries_per_pass) return;
    TryGrant(static_cast<Parked&>(*waiter), now);
  }
}

void Server::TryGrant(Parked& parked, FineInstant now) {
  const Instant moment = ToInstant(now);
  const AcquireRequest& request = parked.request();
  Sites sites;
  for (size_t i = 0; i < parked.size(); ++i) {
    const uint32_t lock = parked.call.locks[i];
    Open(lock, moment);
    EndSessionsIn(lock, moment);
    const Lock* stored = slots_[lock].lock.get();
    if (stored != nullptr && stored->KeepingOut(moment) > 0) {
      if (const auto overdue = Overdue(PlaceOf(lock), moment); overdue.has_value()) {
        Do(lock, *overdue);
      }
    }
  }
  for (size_t i = 0; i < parked.size(); ++i) {
    sites[i] = {PlaceOf(parked.call.locks[i]), parked.AheadOf(i)};
  }
  const Admission admission = Decide(std::span(sites).first(parked.size()), request, now,
                                     Issuing(now), {.grace = GraceAt(moment)});
  if (admission.busy()) return Block(parked, sites, moment);
  if (!admission.granted()) return Send(parked, Reply{.answer = Answer::kError});
  const Call call = parked.call;
  in_flight_.push_back({.call = call,
                        .token = admission.token,
                        .upgraded = HoldToUpgrade(sites[0].place, request, moment),
                        .bound_to = sessions_.BoundTo(parked.lock(0), request.owner)});
  for (const uint32_t lock : LocksOf(call)) {
    CarryOutGrant(lock, request, call, admission.token, moment);
  }
  const bool alone = request.mode == Mode::kExclusive;
  queue_.Leave(parked, alone ? WaitQueue::Left::kHoldsAlone : WaitQueue::Left::kGone);
  Send(parked,
       Reply{.answer = Answer::kToken, .token = static_cast<int64_t>(admission.token.value)});
}

bool Server::LeavesSomebodyWaiting(FineInstant now) {
  const ArenaScope arena;
  const Instant moment = ToInstant(now);
  if (parked_.empty() || NextDue() <= moment) return false;
  for (const Parked* parked : parked_) {
    Sites sites;
    // One whose own hold keeps those ahead waiting is right where it is, unless it stands in front
    // because of that.
    bool holds = false;
    for (size_t i = 0; i < parked->size(); ++i) {
      const Place place = PlaceOf(parked->call.locks[i]);
      sites[i] = {place, parked->AheadOf(i)};
      holds = holds ||
              (place.lock != nullptr && place.lock->Find(parked->request().owner).has_value() &&
               !(parked->size() == 1 && IsUpgrade(place, parked->request(), moment)));
    }
    if (holds) continue;
    const Admission admission = Decide(std::span(sites).first(parked->size()), parked->request(),
                                       now, clock_, {.grace = GraceAt(moment)});
    if (admission.granted()) return true;
  }
  return false;
}

bool Server::KeepsSomebodyTooLong(FineTick now) const {
  return std::any_of(parked_.begin(), parked_.end(), [&](const Parked* parked) {
    return parked->came + parked->call.wait + Millis{1} < now;
  });
}

bool Server::IsQueueClean() const {
  return parked_.empty() && superseded_.empty() && queue_.empty() && queue_.lines() == 0 &&
         queue_.NextDue() == kMaxInstant;
}

}  // namespace turnstile::fault
