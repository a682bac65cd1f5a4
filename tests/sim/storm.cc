#include "sim/storm.h"

#include <algorithm>
#include <array>
#include <tuple>
#include <variant>

#include "core/request.h"

namespace turnstile::sim {
namespace {

constexpr int kDatabases = 3;
constexpr Millis kMargin{1000};
constexpr Millis kMostSetBack{300};
constexpr size_t kAmpleBudget = 5'000;

// Odd ones among them: no bytes at all, bytes that no text has, one that begins like another, the
// longest one, a word of the grammar.
const std::array kKeys = {std::string("red"), std::string("b\0\r\n", 4), std::string(),
                          std::string("green")};
const std::array kOwners = {std::string("ann"),           std::string("an"),
                            std::string("\0\r\n\xff", 4), std::string(256, 'z'),
                            std::string("LIMIT"),         std::string("bob")};
const std::array kUsers = {std::string("default"), std::string("guest")};
// Nobody ever listens to the last of them.
const std::array kChannels = {std::string("news"), std::string("b\0 \n", 4), std::string("empty")};

std::string Digits(int64_t number) { return std::to_string(number); }

std::string NameOf(int db, std::string_view key) { return Quoted(key) + " in " + Digits(db); }

bool Contains(const std::vector<std::string>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

// --- Choices ------------------------------------------------------------------------------------

uint64_t ByteChoices::Next() {
  const uint8_t byte = bytes_.front();
  bytes_ = bytes_.subspan(1);
  return byte;
}

uint64_t ByteChoices::Below(uint64_t bound) {
  if (bytes_.empty()) return bound - 1;
  uint64_t number = Next();
  if (bound > 256 && !bytes_.empty()) number = number << 8U | Next();
  return number % bound;
}

int Storm::AnyDb() { return one_database_ || OneIn(2) ? 0 : static_cast<int>(Below(kDatabases)); }
const std::string& Storm::AnyKey() {
  const bool hot = hot_key_ < kKeys.size() && !OneIn(3);
  return kKeys.at(hot ? hot_key_ : Below(kKeys.size()));
}
const std::string& Storm::AnyOwner() { return kOwners.at(Below(kOwners.size())); }

Millis Storm::AnyLease() {
  return OneIn(30) ? Millis{std::chrono::hours{24}} : Millis{1 + Below(40)};
}

Caller Storm::AnyCaller() {
  Caller caller{.connection = next_connection_++, .tag = next_tag_++, .db = AnyDb()};
  caller.user = OneIn(20) ? std::string() : kUsers.at(Below(kUsers.size()));
  caller.may_block = !OneIn(10);
  caller.in_script = OneIn(15);
  if (sessions_.empty() || !OneIn(3)) return caller;
  // One that has sent something before, and waits for no answer.
  const uint64_t connection = sessions_[Below(sessions_.size())];
  const bool busy = primary_->IsParked(connection) ||
                    std::any_of(in_flight_.begin(), in_flight_.end(), [&](const Answered& each) {
                      return each.connection == connection;
                    });
  if (!busy) caller.connection = connection;
  return caller;
}

bool Storm::Words::Names(std::string_view key) const { return Contains(keys, key); }

Storm::Words Storm::AnyWords() {
  Words request{.keys = {AnyKey()}, .owner = AnyOwner()};
  request.words = {request.keys.front(), request.owner};
  const size_t more = OneIn(3) ? 1 + Below(kKeys.size() - 1) : 0;
  if (more == 0) return request;
  const auto first = std::find(kKeys.begin(), kKeys.end(), request.keys.front()) - kKeys.begin();
  for (size_t i = 1; i <= more; ++i) {
    request.keys.push_back(kKeys.at((static_cast<size_t>(first) + i) % kKeys.size()));
  }
  request.words.insert(request.words.end(), {"also", std::to_string(more)});
  request.words.insert(request.words.end(), request.keys.begin() + 1, request.keys.end());
  return request;
}

// --- The story ----------------------------------------------------------------------------------

void Storm::Wrong(const std::string& what) {
  if (wrong_.empty()) wrong_ = what;
}

void Storm::Tell(const std::string& what) {
  story_ += Digits(now_.moment().time_since_epoch().count()) + ' ' + what + '\n';
}

Storm::Storm(Choices& choices)
    : choices_(choices),
      primary_(std::make_unique<SimHost>()),
      replica_(std::make_unique<SimHost>()) {
  for (SimHost* host : {primary_.get(), replica_.get()}) {
    Settings& settings = host->engine().settings();
    settings.token_margin = kMargin;
    settings.max_holders = 1 + Below(4);
    if (OneIn(4)) settings.failover_grace = Millis{Below(30)};
    if (OneIn(6)) settings.max_waiters = 1 + Below(4);
    if (OneIn(6)) settings.max_waiters_per_user = 1 + Below(3);
    Watch(*host);
  }
  budget_ = OneIn(3) ? 1 + Below(20) : kAmpleBudget;
  primary_->expiry_lag = Millis{OneIn(3) ? 1 : 0};
  one_database_ = OneIn(2);
  hot_key_ = Below(2 * kKeys.size());
  usual_mode_ = Below(6);
  primary_->BeOldPrimary(now_.wall);
}

Storm::~Storm() {
  for (const Answered& answered : in_flight_) primary_->Replied(answered, /*delivered=*/true);
}

void Storm::Watch(SimHost& host) {
  host.on_event = [this, &host](LockName lock, LockEvent event, std::optional<Loss> how) {
    if (&host == primary_.get()) events_.push_back({lock.db, std::string(lock.key), event, how});
  };
  host.on_notice = [this, &host](const Notice& notice, size_t receivers) {
    if (&host != primary_.get()) return;
    messages_.push_back({.channel = std::string(notice.to.channel),
                         .id = std::string(notice.to.id),
                         .user = std::string(notice.user),
                         .key = std::string(notice.key),
                         .what = notice.what,
                         .receivers = receivers,
                         .answers_before = host.answered().size()});
  };
  host.on_warning = [this, &host](const std::string& /*text*/) {
    if (&host == primary_.get()) ++warnings_;
  };
}

std::string Storm::Run(int steps) {
  for (int i = 0; i < steps && wrong_.empty() && !choices_.at_end(); ++i) {
    Step();
    if (OneIn(4)) continue;  // more commands before the event loop sleeps
    do {
      Pass();
    } while (OneIn(4) && wrong_.empty() && !choices_.at_end());
  }
  if (wrong_.empty()) ComeToRest();
  return wrong_;
}

// --- What is there ------------------------------------------------------------------------------

Storm::Holds Storm::Look() const {
  Holds holds;
  for (const auto& [db, key] : primary_->Keys()) {
    const Lock* lock = primary_->FindLock(db, key);
    if (lock == nullptr) continue;
    for (const Hold& hold : lock->holds(Lock::Order::kByToken)) {
      holds.push_back({.db = db,
                       .key = key,
                       .owner = std::string(hold.owner.bytes),
                       .token = hold.token,
                       .end = hold.end,
                       .linger = hold.linger,
                       .count = hold.count,
                       .weight = hold.weight,
                       .since = hold.since,
                       .cap = hold.cap,
                       .tag = std::string(hold.tag),
                       .mode = lock->mode(),
                       .bound_to = primary_->engine().sessions().BoundTo({db, key}, hold.owner),
                       .expiry = primary_->ExpiryOf(db, key)});
    }
  }
  return holds;
}

const Storm::StoredHold* Storm::Find(const Holds& holds, int db, std::string_view key,
                                     std::string_view owner) {
  const auto found = std::find_if(holds.begin(), holds.end(), [&](const StoredHold& hold) {
    return hold.db == db && hold.key == key && hold.owner == owner;
  });
  return found == holds.end() ? nullptr : &*found;
}

bool Storm::IsLive(const StoredHold& hold) const {
  if (now_.moment() > hold.end) return false;
  if (hold.bound_to.has_value() && gone_.contains(*hold.bound_to)) return false;
  return !hold.expiry.has_value() || *hold.expiry >= now_.moment() - primary_->expiry_lag;
}

// A stranger's EXPIRE counts while writes are paused, and the lease cannot be restored.
bool Storm::MustStay(const StoredHold& hold) const {
  if (now_.moment() > hold.blocks_until()) return false;
  if (hold.bound_to.has_value() && gone_.contains(*hold.bound_to)) return false;
  return !hold.expiry.has_value() || *hold.expiry >= now_.moment();
}

const Storm::StoredHold* Storm::FindLive(const Holds& holds, int db, std::string_view key,
                                         std::string_view owner) const {
  const StoredHold* hold = Find(holds, db, key, owner);
  return hold != nullptr && IsLive(*hold) ? hold : nullptr;
}

bool Storm::HoldsPlain(int db, std::string_view key, std::string_view owner) const {
  const KeyState state = primary_->StateOf(db, key);
  return state.plain.has_value() && state.plain->value == owner &&
         state.plain->LiveAt(now_.moment());
}

// Whether the key holds what is no lock, or does as soon as it is opened.
bool Storm::IsOther(int db, std::string_view key) const {
  const auto keys = primary_->Keys();
  const bool exists = std::any_of(keys.begin(), keys.end(), [&](const auto& each) {
    return each.first == db && each.second == key;
  });
  const std::optional<Instant> expiry = primary_->ExpiryOf(db, key);
  if (!exists || (expiry.has_value() && *expiry < now_.moment() - primary_->expiry_lag)) {
    return false;
  }
  const KeyState state = primary_->StateOf(db, key);
  return state.lock == nullptr && !state.plain.has_value();
}

bool Storm::HasWork() const { return primary_->NextDue().IsDueAt(now_.moment()); }

bool Storm::Asked::IsFor(int database, std::string_view key) const {
  return is_queued && db == database && Contains(keys, key);
}

bool Storm::Asked::IsForAny(int database, const std::vector<std::string>& names) const {
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& name) { return IsFor(database, name); });
}

bool Storm::Waits(int db, std::string_view key, std::string_view owner) const {
  return std::any_of(waiting_.begin(), waiting_.end(), [&](const auto& each) {
    return each.second.owner == owner && each.second.IsFor(db, key);
  });
}

// A wait for a slot that is lost ends before its caller is told, if the pass is cut short.
bool Storm::HasPerhapsEnded(const Asked& asked) const {
  return std::any_of(asked.keys.begin(), asked.keys.end(), [this](const std::string& key) {
    return primary_->keys_of_lost_slots.contains(key);
  });
}

// --- What clients do ----------------------------------------------------------------------------

void Storm::Acquire() {
  const Caller caller = AnyCaller();
  Words request = AnyWords();
  const auto add = [&request](std::initializer_list<std::string> words) {
    request.words.insert(request.words.end(), words);
  };
  const Millis lease = AnyLease();
  add({"PX", Digits(lease.count())});
  if (OneIn(2)) {
    add({"wait", std::to_string(1 + Below(60))});
    if (OneIn(6)) add({"MAXLINE", std::to_string(1 + Below(3))});
  }
  const uint64_t mode = usual_mode_ < 3 && !OneIn(3) ? usual_mode_ : Below(3);
  if (mode == 1) add({"SHARED"});
  if (mode == 2) {
    const uint64_t limit = 1 + Below(3);
    add({"Limit", std::to_string(limit)});
    if (OneIn(2)) add({"weight", std::to_string(1 + Below(limit))});
  }
  if (mode != 2 && OneIn(4)) add({"REENTRANT"});
  if (OneIn(3)) add({"SESSION"});
  if (OneIn(4)) add({"LINGER", std::to_string(1 + Below(20))});
  if (OneIn(4)) add({"MAXHOLD", Digits((lease + Millis{Below(60)}).count())});
  if (OneIn(4)) add({"TAG", OneIn(2) ? "host 1" : "a"});
  if (OneIn(2)) {
    // An id belongs to one owner, and here also to one database: it tells whose message it is.
    const auto owner = std::find(kOwners.begin(), kOwners.end(), request.owner) - kOwners.begin();
    add({"NOTIFY", kChannels.at(Below(kChannels.size())),
         "o" + std::to_string(owner) + "d" + std::to_string(caller.db) + "n" +
             std::to_string(Below(3))});
  }
  if (OneIn(12)) {
    const int64_t lead = static_cast<int64_t>(Below(700)) * 1'000;
    add({"FLOOR", Digits(now_.wall.time_since_epoch().count() + lead - 50'000)});
  }
  const std::vector<std::string_view> views = request.views();
  const auto parsed = ParseAcquire(views, {.max_lease = primary_->engine().settings().max_lease});
  if (const auto* error = std::get_if<ParseError>(&parsed)) return Wrong(error->text);
  for (const std::string& key : request.keys) {
    if (primary_->WriteRefusal(caller.user, key, /*needs_memory=*/true).has_value()) return;
  }
  Ask(caller, request, std::get<AcquireRequest>(parsed));
}

void Storm::Ask(const Caller& caller, const Words& words, const AcquireRequest& request) {
  using Kind = AcquireResult::Kind;
  Asked asked{.connection = caller.connection,
              .db = caller.db,
              .keys = words.keys,
              .owner = words.owner,
              .user = caller.user,
              .mode = request.mode,
              .limit = request.limit,
              .session = request.session,
              .lease = request.lease,
              .linger = request.linger,
              .reentrant = request.reentrant,
              .weight = request.weight,
              .max_hold = request.max_hold,
              .tag = std::string(request.tag),
              .floor = request.floor,
              .arrival = ++arrivals_,
              .until = std::chrono::ceil<Millis>(now_.steady + request.wait)};
  if (request.notify.has_value()) {
    asked.notify = {std::string(request.notify->channel), std::string(request.notify->id)};
  }
  for (const std::string& key : asked.keys) {
    asked.holds_plain = asked.holds_plain || HoldsPlain(asked.db, key, asked.owner);
  }
  const uint64_t full = primary_->engine().stats().rejected_line_full;
  const Before before = Begin();
  const StoredHold* own = FindLive(before.holds, asked.db, asked.keys.front(), asked.owner);
  asked.upgrade = asked.keys.size() == 1 && own != nullptr && own->mode == Mode::kShared &&
                  asked.mode == Mode::kExclusive;
  const AcquireResult result = primary_->Acquire(caller, words.key_views(), request, now_);
  Tell("acquire " + NameOf(asked.db, asked.keys.front()) + " and " +
       std::to_string(asked.keys.size() - 1) + " more by " + Quoted(asked.owner) + " over " +
       std::to_string(asked.connection) + ": " + std::to_string(static_cast<int>(result.kind)) +
       ' ' + std::to_string(result.token.value));
  Deed deed{.what = "LOCK.ACQUIRE"};
  if (result.kind == Kind::kGranted) deed.granted.insert(result.token);
  Reckon(before, deed);
  if (result.kind == Kind::kGranted) {
    GrantedAtOnce(asked, request, result.token, before);
  } else if (result.kind == Kind::kWaits || result.kind == Kind::kQueued) {
    if ((result.kind == Kind::kQueued) != asked.notify.has_value()) Wrong("blocked or not");
    StandInLine(caller.tag, std::move(asked), request.max_line);
  } else if (primary_->engine().stats().rejected_line_full > full) {
    if (result.kind != Kind::kBusy) Wrong("a full line is answered with something else");
    CheckLineIsFull(asked, request.max_line);
  } else if (result.kind == Kind::kNotifyRefused) {
    if (!caller.user.empty() && !primary_->users_who_may_not_publish.contains(caller.user)) {
      Wrong("somebody may not publish");
    }
  } else if (result.kind == Kind::kDeadlock) {
    CheckCycle(asked, result.cycle);
  } else if (result.kind == Kind::kNoSession) {
    if (!caller.in_script) Wrong("a connection is not known");
  } else if (result.kind == Kind::kCannotWait) {
    if (!primary_->lets_nobody_wait) Wrong("somebody is not let wait");
  }
}

void Storm::GrantedAtOnce(const Asked& asked, const AcquireRequest& request, Token token,
                          const Before& before) {
  const StoredHold* own = FindLive(before.holds, asked.db, asked.keys.front(), asked.owner);
  const bool is_new = own == nullptr || asked.upgrade;
  const Counters counters = Count();
  if (counters.acquired_immediately - before.counters.acquired_immediately != (is_new ? 1U : 0U) ||
      counters.reacquired - before.counters.reacquired != (is_new ? 0U : 1U)) {
    Wrong("a grant is not counted as what it is");
  }
  if (is_new) {
    if (token <= highest_) Wrong("a token is not above all before it");
    CheckOrder(asked);
  } else if (token != std::max(own->token, request.floor.value_or(kMinToken))) {
    Wrong("who asks again gets another token");
  }
  if (token < request.floor.value_or(kMinToken)) Wrong("a token is below the floor asked for");
  highest_ = std::max(highest_, token);
  for (const std::string& key : asked.keys) {
    const StoredHold* held = FindLive(before.holds, asked.db, key, asked.owner);
    if (held != nullptr) Heard(held->token);
    if (is_new) CheckRoom(asked.db, key, asked.mode, asked.limit, asked.holds_plain);
  }
  CheckGrant(asked, token, before.holds);
  Retract(asked, /*waits=*/false);
  Bind(token, asked.keys, asked.session ? std::optional(asked.connection) : std::nullopt);
}

// Of a wait whose channel and id are now this one's nothing is heard any more. One that ends only
// in the next pass is replaced if this one waits for the same.
void Storm::Retract(const Asked& asked, bool waits) {
  std::erase_if(waiting_, [&](const auto& each) {
    const Asked& other = each.second;
    if (other.is_queued || !other.notify.has_value() || other.notify != asked.notify) return false;
    const bool is_same = other.db == asked.db && std::any_of(asked.keys.begin(), asked.keys.end(),
                                                             [&](const std::string& key) {
                                                               return Contains(other.keys, key);
                                                             });
    return !other.ends_later || (waits && is_same);
  });
}

// The same owner waiting twice for the same keys in the same mode: the newer call takes over the
// place. With other keys that overlap, or another mode, it goes to the end.
void Storm::StandInLine(uint64_t tag, Asked asked, uint32_t max_line) {
  std::vector<Asked*> olders;
  for (auto& [other_tag, other] : waiting_) {
    if (other.owner != asked.owner) continue;
    if (other.IsForAny(asked.db, asked.keys)) olders.push_back(&other);
  }
  for (const std::string& key : asked.keys) {
    const auto ahead = std::count_if(waiting_.begin(), waiting_.end(), [&](const auto& each) {
      return each.second.owner != asked.owner && each.second.IsFor(asked.db, key) &&
             !HasPerhapsEnded(each.second);
    });
    if (olders.empty() && max_line > 0 && ahead >= static_cast<ptrdiff_t>(max_line)) {
      Wrong("somebody joins a line that is too long for it");
    }
  }
  if (olders.size() == 1 && olders.front()->mode == asked.mode &&
      std::is_permutation(asked.keys.begin(), asked.keys.end(), olders.front()->keys.begin(),
                          olders.front()->keys.end())) {
    asked.arrival = olders.front()->arrival;
    asked.upgrade = olders.front()->upgrade;
  }
  for (Asked* older : olders) older->is_queued = false;
  Retract(asked, /*waits=*/true);
  if (asked.session) sessions_.push_back(asked.connection);
  waiting_.emplace(tag, std::move(asked));
}

void Storm::CheckLineIsFull(const Asked& asked, uint32_t max_line) {
  const bool full = std::any_of(asked.keys.begin(), asked.keys.end(), [&](const std::string& key) {
    const auto ahead = std::count_if(waiting_.begin(), waiting_.end(), [&](const auto& each) {
      // One that ends with its connection is there until the next pass.
      const Asked& other = each.second;
      return other.IsFor(asked.db, key) || (other.session && gone_.contains(other.connection) &&
                                            other.db == asked.db && Contains(other.keys, key));
    });
    return ahead >= static_cast<ptrdiff_t>(max_line);
  });
  if (!full) Wrong("a line is said to be full");
}

void Storm::Release() {
  const Caller caller = AnyCaller();
  const Words request = AnyWords();
  const std::vector<std::string_view> views = request.views();
  const auto parsed = ParseRelease(views);
  if (const auto* error = std::get_if<ParseError>(&parsed)) return Wrong(error->text);
  if (primary_->lacks_replicas) return;
  const Before before = Begin();
  size_t expected = 0;
  size_t ended_perhaps = 0;
  bool other = false;
  bool plain = false;
  for (const std::string& key : request.keys) {
    const bool holds_plain = HoldsPlain(caller.db, key, request.owner);
    const bool holds = FindLive(before.holds, caller.db, key, request.owner) != nullptr;
    const bool waits = Waits(caller.db, key, request.owner);
    // A wait ends with its connection, but only in the next pass.
    const bool waits_perhaps = std::any_of(waiting_.begin(), waiting_.end(), [&](const auto& each) {
      const Asked& asked = each.second;
      return asked.owner == request.owner && asked.session && gone_.contains(asked.connection) &&
             asked.db == caller.db && Contains(asked.keys, key);
    });
    if (holds || holds_plain || waits || waits_perhaps) ++expected;
    if (!holds && !holds_plain && (waits ? !primary_->keys_of_lost_slots.empty() : waits_perhaps)) {
      ++ended_perhaps;  // see HasPerhapsEnded
    }
    plain = plain || holds_plain;
    other = other || IsOther(caller.db, key);
  }
  const CountResult result =
      primary_->Release(caller, request.key_views(), Owner{request.owner}, now_);
  Tell("release " + NameOf(caller.db, request.keys.front()) + " and " +
       std::to_string(request.keys.size() - 1) + " more by " + Quoted(request.owner) + ": " +
       std::to_string(result.count));
  if (result.kind != CountResult::Kind::kDone) {
    const bool missing = result.kind == CountResult::Kind::kMissingCommand;
    if (missing ? !plain || primary_->missing_command == nullptr : !other) {
      Wrong("a release is refused without a reason");
    }
    return Reckon(before, {.what = "a release that is refused"});
  }
  if (other || result.count > expected || result.count + ended_perhaps < expected) {
    Wrong("a release is answered wrongly");
  }
  const auto is_own = [&](const StoredHold& hold) {
    return hold.owner == request.owner && hold.db == caller.db && request.Names(hold.key);
  };
  Reckon(before, {.what = "LOCK.RELEASE", .gives_up = is_own, .may_end = is_own});
  const Holds& after = *seen_;
  for (const StoredHold& hold : before.holds) {
    if (!is_own(hold) || !IsLive(hold)) continue;
    const StoredHold* left = Find(after, hold.db, hold.key, hold.owner);
    if ((left == nullptr ? 0 : left->count) != hold.count - 1) {
      Wrong("a release gives up another count than one");
    }
  }
  UnbindChannels([&](const HoldName& name) {
    const auto& [db, key, owner] = name;
    const bool is_named = db == caller.db && owner == request.owner && request.Names(key);
    if (!is_named || Find(after, db, key, owner) != nullptr ||
        FindLive(before.holds, db, key, owner) == nullptr) {
      return false;
    }
    perhaps_told_.emplace_back(name, bindings_.at(name));  // if a RESTORE had replaced it
    return true;
  });
  for (auto& [tag, asked] : waiting_) {
    if (asked.owner == request.owner && asked.IsForAny(caller.db, request.keys)) {
      asked.is_queued = false;
    }
  }
}

void Storm::Touch() {
  const Caller caller = AnyCaller();
  Words request = AnyWords();
  const Millis lease = AnyLease();
  request.words.insert(request.words.end(), {"px", Digits(lease.count())});
  const std::vector<std::string_view> views = request.views();
  const auto parsed = ParseTouch(views, {.max_lease = primary_->engine().settings().max_lease});
  if (const auto* error = std::get_if<ParseError>(&parsed)) return Wrong(error->text);
  if (primary_->lacks_replicas) return;
  const Before before = Begin();
  size_t expected = 0;
  for (const std::string& key : request.keys) {
    if (FindLive(before.holds, caller.db, key, request.owner) != nullptr ||
        HoldsPlain(caller.db, key, request.owner)) {
      ++expected;
    }
  }
  const CountResult result =
      primary_->Touch(caller, request.key_views(), Owner{request.owner}, lease, now_);
  Tell("touch " + NameOf(caller.db, request.keys.front()) + " by " + Quoted(request.owner) + ": " +
       std::to_string(result.count));
  Reckon(before, {.what = "LOCK.TOUCH"});
  if (result.kind != CountResult::Kind::kDone) return;
  if (result.count != expected) Wrong("a touch is answered wrongly");
  const Holds& after = *seen_;
  for (const std::string& key : request.keys) {
    const StoredHold* hold = FindLive(before.holds, caller.db, key, request.owner);
    if (hold == nullptr) continue;
    Heard(hold->token);
    const StoredHold* touched = Find(after, caller.db, key, request.owner);
    const Instant end = std::min(now_.moment() + lease, hold->cap.value_or(kMaxInstant));
    if (touched == nullptr || touched->end != std::max(end, now_.moment()) ||
        std::tie(touched->token, touched->linger, touched->count, touched->mode, touched->weight,
                 touched->cap, touched->tag,
                 touched->since) != std::tie(hold->token, hold->linger, hold->count, hold->mode,
                                             hold->weight, hold->cap, hold->tag, hold->since)) {
      Wrong("a touch does not set the lease, and only that");
    }
  }
}

void Storm::Fence() {
  const Caller caller = AnyCaller();
  const std::string& key = AnyKey();
  const Before before = Begin();
  std::vector<Token> known = {highest_};
  std::set<Token> live;
  for (const StoredHold& hold : before.holds) {
    known.push_back(hold.token);
    if (hold.db == caller.db && hold.key == key && IsLive(hold)) live.insert(hold.token);
  }
  const Token token = std::max(known[Below(known.size())], kMinToken);
  if (primary_->lacks_replicas) return;
  const bool other = IsOther(caller.db, key);
  const FenceResult result = primary_->Fence(caller, key, token, now_);
  Tell("fence " + NameOf(caller.db, key) + ": " + std::to_string(token.value));
  Reckon(before, {.what = "LOCK.FENCE"});
  if (result.wrong_type != other) Wrong("a fence is of the wrong type");
  if (result.wrong_type) return;
  const Token highest = live.empty() ? Token{} : *live.rbegin();
  if (result.current != live.contains(token) || result.holds.value_or(Token{}) != highest) {
    Wrong("a fence is passed by another token than one that holds the lock");
  }
}

void Storm::Hangup(uint64_t connection) {
  gone_.insert(connection);
  std::erase(sessions_, connection);
  std::erase_if(waiting_, [&](const auto& each) {
    return each.second.connection == connection && !each.second.notify.has_value();
  });
  for (auto& [tag, asked] : waiting_) {
    if (asked.connection != connection || !asked.session) continue;
    asked.ends_later = asked.is_queued;
    asked.is_queued = false;
  }
  primary_->Disconnect(connection, now_);
}

void Storm::Leave() {
  if (!sessions_.empty() && OneIn(2)) {
    const uint64_t connection = sessions_[Below(sessions_.size())];
    Tell("disconnects: " + std::to_string(connection));
    // An answer that is on its way to it is lost with it.
    for (const Answered& answered : std::exchange(in_flight_, {})) {
      if (answered.connection == connection) {
        Deliver(answered);
      } else {
        in_flight_.push_back(answered);
      }
    }
    return Hangup(connection);
  }
  if (waiting_.empty()) return;
  auto waits = waiting_.begin();
  std::advance(waits, static_cast<ptrdiff_t>(Below(waiting_.size())));
  const uint64_t connection = waits->second.connection;
  Tell("leaves its wait: " + std::to_string(connection));
  if (waits->second.notify.has_value() || !OneIn(2)) return Hangup(connection);
  waiting_.erase(waits);
  primary_->Unblock(connection, OneIn(2), now_);
}

// --- What others do -----------------------------------------------------------------------------

void Storm::Unbind(int db, std::string_view key) {
  const Lock* lock = primary_->FindLock(db, key);
  if (lock == nullptr) return;
  for (const Hold& hold : lock->holds(Lock::Order::kByToken)) {
    std::erase_if(bound_, [&](const auto& bound) { return bound.first.first == hold.token; });
  }
}

void Storm::Displace() {
  for (auto& [token, displaced] : untold_) displaced = true;
  for (auto& [token, displaced] : undelivered_) displaced = true;
}

void Storm::Meddle() {
  const int db = AnyDb();
  const std::string& key = AnyKey();
  const auto is_here = [db, &key](const StoredHold& hold) {
    return hold.db == db && hold.key == key;
  };
  const Before before = Begin();
  Deed deed{.may_end = is_here};
  const auto tell = [&](const std::string& what) {
    deed.what = what;
    Tell(what + ' ' + NameOf(db, key));
  };
  switch (Below(13)) {
    case 0:
      tell("DEL");
      primary_->Delete(db, key, now_);
      break;
    case 1:
      tell("SET");
      primary_->Set(db, key, OneIn(3) ? AnyOwner() : "x",
                    OneIn(4) ? std::nullopt : std::optional(now_.moment() + Millis{1 + Below(30)}),
                    now_);
      break;
    case 2:
      if (!OneIn(4)) return;
      tell("LPUSH");
      primary_->Push(db, key, now_);
      break;
    case 3: {
      const std::string& to = AnyKey();
      tell("RENAME to " + Quoted(to) + " of");
      Unbind(db, key);
      Displace();
      deed.may_end = [db, &key, &to](const StoredHold& hold) {
        return hold.db == db && (hold.key == key || hold.key == to);
      };
      deed.brings = true;
      if (primary_->Rename(db, key, to, now_)) {
        deed.renamed = {db, key};
        deed.overwritten = {db, to};
      }
      break;
    }
    case 4: {
      const int to = static_cast<int>(Below(kDatabases));
      tell("MOVE to " + Digits(to) + " of");
      Unbind(db, key);
      Displace();
      deed.brings = true;
      if (primary_->Move(db, key, to, now_)) deed.renamed = {db, key};
      break;
    }
    case 5:
    case 6: {
      const int other = static_cast<int>(Below(kDatabases));
      tell("SWAPDB with " + Digits(other) + " of");
      Displace();
      primary_->Swap(db, other, now_);
      deed.swapped = {db, other};
      std::map<HoldName, Binding> swapped;
      for (const auto& [name, binding] : bindings_) {
        const auto& [in, lock, owner] = name;
        swapped.emplace(HoldName(deed.DbAfter(in), lock, owner), binding);
      }
      bindings_ = std::move(swapped);
      break;
    }
    case 7: {
      if (!OneIn(4)) return;
      const std::optional<int> flushed = OneIn(2) ? std::nullopt : std::optional(db);
      tell(flushed.has_value() ? "FLUSHDB" : "FLUSHALL");
      deed.in_force = Loss::kFlushed;
      deed.may_end = [flushed](const StoredHold& hold) {
        return hold.db == flushed.value_or(hold.db);
      };
      primary_->Flush(flushed, now_);
      break;
    }
    case 8: {
      const bool persist = OneIn(3);
      tell(persist ? "PERSIST" : "EXPIRE");
      primary_->Expire(
          db, key, persist ? std::nullopt : std::optional(now_.moment() + Millis{Below(60)}), now_);
      break;
    }
    case 9:
      tell("the server evicts");
      if (primary_->Evict(db, key, now_)) deed.in_force = Loss::kEvicted;
      break;
    case 10:
      tell("MIGRATE");
      primary_->keys_of_lost_slots.insert(key);
      deed.moves_away = true;
      primary_->Migrate(db, key, now_);
      break;
    default: {
      const std::string& from = AnyKey();
      const std::string bytes = primary_->Dump(db, from);
      if (bytes.empty()) return;
      Unbind(db, from);
      Displace();
      tell("RESTORE");
      deed.brings = true;
      if (primary_->Restore(db, key, bytes, now_.moment() + Millis{1 + Below(40)}, now_)) {
        deed.overwritten = {db, key};
      }
    }
  }
  Reckon(before, deed);
  // What is not bound any more is to be told; what is there again under that name is another hold.
  UnbindChannels([&](const HoldName& name) {
    const auto& [in, lock, owner] = name;
    if (IsBound(name) || primary_->keys_of_lost_slots.contains(lock)) return false;
    losses_to_tell_.emplace_back(name, bindings_.at(name));
    return true;
  });
}

void Storm::ExpireKeys() {
  const Before before = Begin();
  primary_->ExpireCycle(now_);
  Reckon(before, {.what = "the server's own expiry"});
}

void Storm::Change() {
  static constexpr std::array<const char*, 3> kMissing = {nullptr, "DEL", "PEXPIREAT"};
  switch (Below(10)) {
    case 0:
      primary_->may_write = OneIn(2);
      break;
    case 9:
      primary_->subscribers[kChannels.front()] = Below(3);
      primary_->subscribers[kChannels.at(1)] = Below(2);
      break;
    case 1:
      primary_->out_of_memory = OneIn(3);
      primary_->grants_until_out_of_memory =
          OneIn(3) ? std::optional<size_t>(Below(3)) : std::nullopt;
      break;
    case 2:
      primary_->users_without_rights.clear();
      if (OneIn(3)) primary_->users_without_rights.emplace("guest");
      primary_->users_who_may_not_publish.clear();
      if (OneIn(3)) primary_->users_who_may_not_publish.emplace("guest");
      break;
    case 3:
      primary_->keys_of_lost_slots.clear();
      if (OneIn(4)) primary_->keys_of_lost_slots.emplace(AnyKey());
      break;
    case 4:
      primary_->lacks_replicas = OneIn(3);
      break;
    case 5:
      primary_->lets_nobody_wait = OneIn(3);
      break;
    case 6:
      primary_->may_replicate_floor = OneIn(2);
      break;
    case 7:
      primary_->missing_command = kMissing.at(Below(kMissing.size()));
      break;
    default:
      primary_->engine().settings().plain_locks = !OneIn(4);
      primary_->engine().settings().max_holders = 1 + Below(4);
      primary_->engine().OnSettingsChanged();
  }
  Tell("the server allows something else");
}

// All keys are in one slot. It goes to another node with all that is in it, or comes back from
// there, where tokens were issued meanwhile.
void Storm::MoveSlot() {
  if (primary_->keys_of_lost_slots.size() == kKeys.size()) {
    Tell("the slot comes");
    primary_->keys_of_lost_slots.clear();
    primary_->keys_of_new_slots = {kKeys.begin(), kKeys.end()};
    const auto wall = static_cast<uint64_t>(now_.wall.time_since_epoch().count());
    highest_ = std::max(highest_, Token{wall + Below(500) * 1'000});
    return;
  }
  Tell("the slot leaves");
  primary_->keys_of_lost_slots = {kKeys.begin(), kKeys.end()};
  const Before before = Begin();
  for (const auto& [db, key] : primary_->Keys()) primary_->Migrate(db, key, now_);
  Reckon(before, {.what = "a slot that leaves",
                  .may_end = [](const StoredHold&) { return true; },
                  .moves_away = true});
}

void Storm::SetClockBack() {
  const Millis step{1 + Below(40)};
  if (set_back_ + step > kMostSetBack) return;
  Tell("the clock is set back by " + Digits(step.count()));
  set_back_ += step;
  now_.wall -= step;
  if (promoted_.has_value()) *promoted_ -= step;
  // A hold whose lease was over when its connection closed, or when its grant was to be taken back,
  // may be live again (storm 3699).
  for (auto& [token, displaced] : undelivered_) displaced = true;
  std::erase_if(bound_, [this](const auto& bound) { return gone_.contains(bound.second); });
}

void Storm::Synchronise() {
  Tell("the replica takes a copy");
  const SimHost::Copy copy = primary_->GainConsumers(now_.wall);
  replica_->Load(copy);
  bases_[primary_.get()] = copy;
  bases_[replica_.get()] = copy;
  applied_ = 0;
}

void Storm::ToggleConsumers() {
  if (!primary_->has_consumers() || OneIn(3)) return Synchronise();
  Tell("nobody reads what is replicated");
  primary_->LoseConsumers();
}

void Storm::Permit() {
  for (SimHost* host : {primary_.get(), replica_.get()}) {
    host->may_write = true;
    host->out_of_memory = false;
    host->grants_until_out_of_memory.reset();
    host->lacks_replicas = false;
    host->lets_nobody_wait = false;
    host->may_replicate_floor = true;
    host->missing_command = nullptr;
    host->users_without_rights.clear();
    host->users_who_may_not_publish.clear();
    host->subscribers = {{kChannels.front(), 1}, {kChannels.at(1), 2}};
    host->keys_of_lost_slots.clear();
    host->keys_of_new_slots.clear();
  }
}

// The server that issues has just begun to. What only the old one remembered is gone: sessions,
// grants to be taken back, TTLs to be restored.
void Storm::RoleChanged() {
  promoted_ = now_.moment();
  floor_is_checked_ = false;
  primary_->engine().PublishPending();  // of what it applied
  events_.clear();
  seen_.reset();
  warnings_ = 0;
  untold_.clear();
  undelivered_.clear();
  sessions_.clear();
  bound_.clear();
  ForgetChannels();
  doubtful_.insert(counted_.begin(), counted_.end());
  counted_.clear();
  for (const auto& [db, key] : primary_->Keys()) {
    const Lock* lock = primary_->FindLock(db, key);
    if (lock != nullptr && primary_->ExpiryOf(db, key) != lock->blocks_until()) {
      strange_ttls_.insert(key);
    }
  }
}

void Storm::FailOver() {
  enum { kClean, kInTheMiddle, kLosesWrites, kThereAndBack };
  const uint64_t how = Below(4);
  Tell("fails over, " + std::to_string(how));
  if (!primary_->has_consumers()) Synchronise();
  if (how == kClean) {
    Permit();
    budget_ = kAmpleBudget;
    Deliver();
    Pass();
    Deliver();
  }
  const bool may_lose = LeadOf(highest_, now_.wall) < kMargin - Millis{10};
  Replicate(how == kLosesWrites && may_lose ? Below(20) : 0);
  primary_->BecomeReplica(now_);
  for (const auto& [connection, tag] : std::exchange(primary_->sent_away(), {})) {
    if (waiting_.erase(tag) == 0) Wrong("somebody is sent away who does not wait");
  }
  ForgetChannels();
  for (auto& [tag, asked] : waiting_) {
    asked.ends_later = asked.ends_later || asked.is_queued;
    asked.is_queued = false;
  }
  if (how != kThereAndBack || OneIn(2)) {
    primary_->Turn(now_, kAmpleBudget);
    PassGrants none;
    for (const Message& message : std::exchange(messages_, {})) Hear(message, {}, none);
    if (!waiting_.empty()) Wrong("somebody waits at a replica");
  }
  // Whether these arrive does not matter any more: another primary may have told the owner.
  for (const Answered& answered : std::exchange(in_flight_, {})) {
    primary_->Replied(answered, OneIn(2));
  }
  if (how != kThereAndBack) {
    std::swap(primary_, replica_);
    Permit();
    Synchronise();
  }
  primary_->BecomePrimary();
  RoleChanged();
}

// From its own log, which is its AOF; or with nothing, as far as the margin covers that.
void Storm::Restart() {
  const auto make = [this] {
    auto again = std::make_unique<SimHost>();
    again->engine().settings() = primary_->engine().settings();
    again->expiry_lag = primary_->expiry_lag;
    return again;
  };
  if (OneIn(4) && LeadOf(highest_, now_.wall) < kMargin - Millis{10}) {
    Tell("restarts with nothing");
    return Replace(make());
  }
  if (!primary_->has_consumers()) return;
  std::unique_ptr<SimHost> again;
  for (SimHost* host : {replica_.get(), primary_.get()}) {
    again = make();
    again->Load(bases_[host]);
    again->Replay(host->log());
    if (again->fault() != nullptr) Wrong(std::string("restart: ") + again->fault());
    if (again->HasSameData(*host)) continue;
    Wrong("a restart brings back something else:\n" + host->Describe() + "from\n" +
          again->Describe());
  }
  if (!OneIn(2)) return;
  Tell("restarts");
  Replace(std::move(again));
}

void Storm::Replace(std::unique_ptr<SimHost> again) {
  for (const Answered& answered : std::exchange(in_flight_, {})) {
    primary_->Replied(answered, /*delivered=*/true);
  }
  waiting_.clear();
  messages_.clear();
  again->subscribers = primary_->subscribers;
  unreceived_.erase(primary_.get());
  primary_ = std::move(again);
  Watch(*primary_);
  primary_->engine().OnStarted(now_.wall);
  primary_->BecomePrimary();
  RoleChanged();
  Synchronise();
}

// --- Time ---------------------------------------------------------------------------------------

void Storm::Step() {
  const auto passes = Micros{static_cast<int64_t>(OneIn(3) ? Below(20'000) : Below(2'000))};
  now_.wall += passes;
  now_.steady += passes;
  if (OneIn(5)) ExpireKeys();
  switch (Below(22)) {
    case 0:
    case 1:
    case 2:
      Release();
      break;
    case 3:
      Touch();
      break;
    case 4:
    case 5:
      Leave();
      break;
    case 6:
    case 7:
    case 8:
      Meddle();
      break;
    case 9:
      Change();
      break;
    case 10:
      if (OneIn(10)) FailOver();
      break;
    case 11:
      if (OneIn(5)) Restart();
      break;
    case 12:
      Fence();
      break;
    case 13: {
      const uint64_t what = Below(12);
      if (what == 0) MoveSlot();
      if (what == 1) SetClockBack();
      if (what == 2) ToggleConsumers();
      break;
    }
    default:
      Acquire();
  }
  Check();
}

// A pass of the event loop, and what the network does with its answers.
void Storm::Pass() {
  if (!OneIn(4)) Deliver();
  for (auto& [tag, asked] : waiting_) {
    asked.lost_slot = asked.lost_slot || HasPerhapsEnded(asked);
    asked.holds_plain = false;
    for (const std::string& key : asked.keys) {
      asked.holds_plain = asked.holds_plain || HoldsPlain(asked.db, key, asked.owner);
    }
  }
  const Before before = Begin();
  primary_->Turn(now_, budget_);
  PassGrants grants;
  grants.deed.what = "a pass";
  grants.deed.may_end = [this](const StoredHold& hold) {
    return undelivered_.contains(hold.token);
  };
  // In the order in which the server told them.
  const std::vector<Answered> answers = std::exchange(primary_->answered(), {});
  const std::vector<Message> messages = std::exchange(messages_, {});
  auto answer = answers.begin();
  for (const Message& message : messages) {
    while (answer < answers.begin() + static_cast<ptrdiff_t>(message.answers_before)) {
      Answer(*answer++, before.holds, grants);
    }
    Hear(message, before.holds, grants);
  }
  while (answer != answers.end()) Answer(*answer++, before.holds, grants);
  if (!wrong_.empty()) return;
  const auto& [deed, granted, held_already, last] = grants;
  Reckon(before, deed);
  for (const auto& [lock, asked] : last) {
    CheckRoom(lock.first, lock.second, asked.mode, asked.limit, /*waited=*/true);
  }
  const Counters after = Count();
  const auto counted = [](const Counters& counters) {
    return counters.acquired_after_wait + counters.reacquired;
  };
  if (counted(after) - counted(before.counters) != granted) {
    Wrong("a grant after a wait is not counted as one");
  }
  if (after.reacquired - before.counters.reacquired < held_already) {
    Wrong("a hold that its owner had already is counted as new");
  }
  Check();
  CheckWaits();
  CheckSessions();
  CheckTtls();
  CheckTakenBack();
  CheckLossesAreTold();
  CheckFloorOfStart();
}

void Storm::Answer(const Answered& answered, const Holds& before, PassGrants& grants) {
  const auto waits = waiting_.extract(answered.tag);
  if (waits.empty()) return Wrong("an answer that nobody waits for");
  const Asked& asked = waits.mapped();
  const auto* token = std::get_if<Token>(&answered.call->answer());
  Tell("answers " + std::to_string(answered.connection) +
       (token != nullptr ? " with " + std::to_string(token->value) : ""));
  CheckAnswer(asked, answered.call->answer());
  in_flight_.push_back(answered);
  if (token == nullptr) return;
  if (*token > highest_) {
    // A hold that the owner had already is only raised to its floor, and not taken back
    // (storm 58247).
    const StoredHold* own = FindLive(before, asked.db, asked.keys.front(), asked.owner);
    const bool raised = own != nullptr && asked.floor.has_value() && *token == *asked.floor;
    if (!raised) untold_.emplace(*token, false);
  }
  Granted(asked, *token, before, grants);
}

void Storm::Granted(const Asked& asked, Token token, const Holds& before, PassGrants& grants) {
  ++grants.granted;
  grants.deed.granted.insert(token);
  if (token > highest_) {
    for (const std::string& key : asked.keys) grants.last[{asked.db, key}] = asked;
  } else {
    ++grants.held_already;
  }
  GrantedAfterWait(asked, token, before);
}

void Storm::Hear(const Message& message, const Holds& before, PassGrants& grants) {
  Tell("publishes " + message.id + " of " + Quoted(message.key) + " to " +
       std::to_string(message.receivers));
  if (const auto* loss = std::get_if<HoldLoss>(&message.what)) return HearLoss(message, *loss);
  const auto& answer = std::get<WaitAnswer>(message.what);
  const auto waits = std::find_if(waiting_.begin(), waiting_.end(), [&](const auto& each) {
    const Asked& asked = each.second;
    // One that is given up and one that is not may be for the same key. What was refused with its
    // slot may have been given up since.
    const auto* end = std::get_if<WaitEnd>(&answer);
    const bool is_over = end != nullptr && *end != WaitEnd::kWrongType;
    return asked.notify == std::pair(message.channel, message.id) &&
           asked.keys.front() == message.key && asked.user == message.user &&
           (asked.is_queued != is_over || std::holds_alternative<std::string>(answer));
  });
  if (waits == waiting_.end()) return Wrong("a message that nobody waits for");
  const Asked asked = waits->second;
  waiting_.erase(waits);
  CheckAnswer(asked, answer);
  const auto* token = std::get_if<Token>(&answer);
  if (token == nullptr) return;
  if (message.receivers > 0) return Granted(asked, *token, before, grants);
  ++unreceived_[primary_.get()];
  for (const std::string& key : asked.keys) {
    const Lock* lock = primary_->FindLock(asked.db, key);
    const auto hold = lock == nullptr ? std::nullopt : lock->Find(Owner{asked.owner});
    if (hold.has_value() && Find(before, asked.db, key, asked.owner) == nullptr) {
      Wrong("a grant that nobody received is written");
    }
  }
}

void Storm::HearLoss(const Message& message, const HoldLoss& loss) {
  const auto is_it = [&](std::string_view key, const Binding& binding) {
    return key == message.key && binding.channel == message.channel && binding.id == message.id &&
           binding.token == loss.token;
  };
  const auto take = [&](auto& losses) {
    const auto found = std::find_if(losses.begin(), losses.end(), [&](const auto& each) {
      return is_it(std::get<1>(each.first), each.second);
    });
    if (found == losses.end()) return false;
    losses.erase(found);
    return true;
  };
  if (take(losses_to_tell_)) return;
  const auto bound = std::find_if(bindings_.begin(), bindings_.end(), [&](const auto& each) {
    return is_it(std::get<1>(each.first), each.second);
  });
  if (bound == bindings_.end()) {
    if (!take(perhaps_told_)) Wrong("a loss is told of what is not bound");
    return;
  }
  const auto& [db, key, owner] = bound->first;
  const Lock* lock = primary_->FindLock(db, key);
  const auto hold = lock == nullptr ? std::nullopt : lock->Find(Owner{owner});
  // In its last millisecond the server may have expired it.
  if (hold.has_value() && hold->token == loss.token && hold->end > now_.moment()) {
    Wrong("a hold is said to be lost that is not");
  }
  bindings_.erase(bound);
}

void Storm::CheckLossesAreTold() {
  if (HasWork() || !primary_->engine().IsConsistent()) return;
  for (auto& [name, binding] : bindings_) {
    const auto& [db, key, owner] = name;
    const StoredHold* hold = Find(*seen_, db, key, owner);
    // An upgrade that is taken back leaves the shared hold under its own token.
    if (hold != nullptr && undelivered_.contains(binding.token)) binding.token = hold->token;
    if (hold == nullptr || hold->token != binding.token || hold->end < now_.moment()) {
      Wrong("nobody is told that " + Quoted(owner) + " has lost " + NameOf(db, key));
    }
  }
  // What is there again was not lost: it is bound as before, or to something else.
  for (const auto& [name, binding] : std::exchange(losses_to_tell_, {})) {
    const auto& [db, key, owner] = name;
    const StoredHold* hold = Find(*seen_, db, key, owner);
    if (hold != nullptr && hold->token == binding.token && hold->end >= now_.moment()) {
      bindings_.try_emplace(name, binding);
      continue;
    }
    Wrong("nobody is told on " + Quoted(binding.id) + " that " + NameOf(db, key) +
          " was lost under " + std::to_string(binding.token.value));
  }
  if (bindings_.size() != primary_->engine().channels().size()) Wrong("another binding");
}

void Storm::BindChannel(const Asked& asked, Token token, const Holds& before) {
  for (const std::string& key : asked.keys) {
    const HoldName name(asked.db, key, asked.owner);
    // The loss of a hold that has just ended is yet to be told.
    if (FindLive(before, asked.db, key, asked.owner) == nullptr) {
      if (const auto old = bindings_.extract(name); !old.empty()) {
        losses_to_tell_.emplace_back(name, old.mapped());
      }
    }
    if (asked.notify.has_value()) {
      bindings_[name] = {asked.notify->first, asked.notify->second, token};
    } else if (const auto bound = bindings_.find(name); bound != bindings_.end()) {
      bound->second.token = token;
    }
  }
}

bool Storm::IsBound(const HoldName& name) const {
  const auto& [db, key, owner] = name;
  const Binding& binding = bindings_.at(name);
  return primary_->engine().channels().IsBoundTo({db, key}, Owner{owner},
                                                 {binding.channel, binding.id});
}

// Holds are ordinary ones from now on. What was lost before may still be told.
void Storm::ForgetChannels() {
  for (const auto& [name, binding] : std::exchange(bindings_, {})) {
    perhaps_told_.emplace_back(name, binding);
  }
  for (const auto& loss : std::exchange(losses_to_tell_, {})) perhaps_told_.push_back(loss);
}

void Storm::UnbindChannels(const std::function<bool(const HoldName&)>& which) {
  std::erase_if(bindings_, [&](const auto& each) { return which(each.first); });
}

void Storm::GrantedAfterWait(const Asked& asked, Token token, const Holds& before) {
  const StoredHold* own = FindLive(before, asked.db, asked.keys.front(), asked.owner);
  if (token > highest_) {
    highest_ = token;
    CheckOrder(asked);
  } else if (own == nullptr ||
             token != std::max(own->token, asked.floor.value_or(kMinToken))) {  // storm 64949
    Wrong("a token is not above all before it");
  }
  CheckGrant(asked, token, before);
  Bind(token, asked.keys, asked.session ? std::optional(asked.connection) : std::nullopt);
}

// Answers arrive, or turn out not to.
void Storm::Deliver() {
  for (const Answered& answered : std::exchange(in_flight_, {})) Deliver(answered);
}

void Storm::Deliver(const Answered& answered) {
  enum { kGoneBefore, kGoneThen, kUnblocked, kGoneAfter };
  const uint64_t how = Below(16);
  const auto* token = std::get_if<Token>(&answered.call->answer());
  const bool lost = how < kGoneAfter;
  if (lost) Tell("the answer to " + std::to_string(answered.connection) + " is lost");
  if (token != nullptr) {
    const auto untold = untold_.extract(*token);
    if (!untold.empty() && lost) undelivered_.emplace(*token, untold.mapped());
  }
  if (how == kGoneBefore) Hangup(answered.connection);
  primary_->Replied(answered, !lost);
  // CLIENT UNBLOCK … ERROR comes between an answer and its delivery, and the client stays.
  if (how == kGoneThen || how == kGoneAfter) Hangup(answered.connection);
}

// Everything is allowed again, and nobody comes any more.
void Storm::ComeToRest() {
  Permit();
  Tell("comes to rest");
  for (int i = 0; i < 2'000 && wrong_.empty(); ++i) {
    const bool done = primary_->IsQueueClean() && in_flight_.empty() && !HasWork();
    if (done && i > 0) break;
    now_.wall += Millis{2};
    now_.steady += Millis{2};
    Deliver();
    Pass();
  }
  if (!wrong_.empty()) return;
  Deliver();
  if (!primary_->IsQueueClean() || !waiting_.empty()) {
    Wrong("something is left of those who waited");
  }
}

// --- What must be so ----------------------------------------------------------------------------

Storm::Counters Storm::Count() const {
  const Stats& stats = primary_->engine().stats();
  return {.acquired_immediately = stats.acquired_immediately,
          .acquired_after_wait = stats.acquired_after_wait,
          .reacquired = stats.reacquired,
          .lost = stats.expired + stats.evicted + stats.forced + stats.session_ended +
                  stats.undelivered - Unreceived()};
}

size_t Storm::Unreceived() const {
  const auto found = unreceived_.find(primary_.get());
  return found == unreceived_.end() ? 0 : found->second;
}

Storm::Before Storm::Begin() {
  if (!events_.empty()) Wrong("an event of nothing");
  if (!seen_.has_value()) seen_ = Look();
  return {*std::exchange(seen_, std::nullopt), Count()};
}

int Storm::Deed::DbAfter(int db) const {
  if (!swapped.has_value()) return db;
  return db == swapped->first ? swapped->second : db == swapped->second ? swapped->first : db;
}

void Storm::Reckon(const Before& before, const Deed& deed) {
  primary_->engine().PublishPending();
  Holds after = Look();
  Holds lost;
  Holds perhaps_lost;
  size_t given_up = 0;
  size_t counted = 0;
  size_t doubted = 0;
  for (const StoredHold& hold : before.holds) {
    const StoredHold* next = Find(after, deed.DbAfter(hold.db), hold.key, hold.owner);
    const bool stays = next != nullptr && next->token == hold.token &&
                       next->was_told() == hold.was_told() &&
                       deed.overwritten != std::pair(hold.db, hold.key);
    if (stays) continue;
    const bool replaced =
        next != nullptr && next->token > hold.token && deed.granted.contains(next->token);
    const bool gives_up = deed.gives_up && deed.gives_up(hold) && IsLive(hold);
    if (MustStay(hold) && !replaced && !gives_up && !(deed.may_end && deed.may_end(hold))) {
      Wrong(deed.what + " loses the hold of " + Quoted(hold.owner) + " on " +
            NameOf(hold.db, hold.key));
    }
    // Told already; or upgraded, or raised to a floor.
    if (hold.was_told() || (replaced && IsLive(hold))) continue;
    const bool leased = now_.moment() <= hold.end;
    if (deed.moves_away && leased) continue;
    if (primary_->keys_of_lost_slots.contains(hold.key) && leased && !gives_up) {
      perhaps_lost.push_back(hold);  // another node may have it
      ++doubted;
      continue;
    }
    const auto renamed = counted_.find(hold.token);
    const bool counted_before = renamed != counted_.end();
    if (counted_before) counted_.erase(renamed);
    if (gives_up) {
      ++given_up;
      continue;
    }
    lost.push_back(hold);
    if (counted_before) continue;
    // An upgrade that is taken back leaves the shared hold, which may end in the same pass
    // (storm 19989).
    if (undelivered_.contains(hold.token)) ++doubted;
    ++(doubtful_.contains(hold.token) ? doubted : counted);
  }
  for (const StoredHold& hold : lost) {
    if (deed.renamed != std::pair(hold.db, hold.key)) continue;
    // The token is all that tells it from others of its set, wherever they are.
    const auto of_set = std::count_if(before.holds.begin(), before.holds.end(),
                                      [&](const auto& each) { return each.token == hold.token; });
    of_set > 1 ? static_cast<void>(doubtful_.insert(hold.token))
               : static_cast<void>(counted_.insert(hold.token));
  }
  const uint64_t told = Count().lost - before.counters.lost;
  if (told < counted || told > counted + doubted) {
    Wrong(deed.what + " ends " + std::to_string(counted) + " holds, and counts " +
          std::to_string(told));
  }
  CheckEvents(before.holds, after, deed, lost, perhaps_lost, given_up);
  seen_ = std::move(after);
}

void Storm::CheckEvents(const Holds& before, const Holds& after, const Deed& deed,
                        const Holds& lost, const Holds& perhaps_lost, size_t given_up) {
  using Name = std::pair<int, std::string>;
  std::multiset<Name> acquired;
  size_t released = 0;
  std::set<Name> told;
  for (const Event& event : std::exchange(events_, {})) {
    if (event.event == LockEvent::kAcquired) acquired.emplace(event.db, event.key);
    if (event.event == LockEvent::kReleased) ++released;
    if (event.event != LockEvent::kLost) continue;
    told.emplace(event.db, event.key);
    // Somebody has lost it in this way.
    const bool in_force =
        event.how == Loss::kForced || event.how == Loss::kEvicted || event.how == Loss::kFlushed;
    if (in_force && event.how != deed.in_force) Wrong(deed.what + " tells of another deed");
    const auto fits = [&](const StoredHold& hold) {
      // In its last millisecond a key may have been expired by the server as well.
      const bool leased = now_.moment() <= hold.end;
      const bool ends = now_.moment() >= hold.end;
      return hold.db == event.db && hold.key == event.key &&
             (event.how == Loss::kExpired ? ends : !in_force || leased);
    };
    if (std::none_of(lost.begin(), lost.end(), fits) &&
        std::none_of(perhaps_lost.begin(), perhaps_lost.end(), fits)) {
      Wrong(deed.what + " tells wrongly how " + NameOf(event.db, event.key) + " was lost");
    }
  }
  std::multiset<Name> came;
  for (const StoredHold& hold : after) {
    const StoredHold* own = Find(before, deed.DbAfter(hold.db), hold.key, hold.owner);
    const bool was_there = own != nullptr && own->token == hold.token;
    if (was_there || deed.brings) continue;
    // What an upgrade left behind, when that is taken back.
    if (own == nullptr || own->token < hold.token) came.emplace(hold.db, hold.key);
  }
  for (const StoredHold& hold : lost) {
    if (!told.contains({hold.db, hold.key})) {
      Wrong(deed.what + " does not tell that " + NameOf(hold.db, hold.key) + " was lost");
    }
  }
  if (acquired != came) Wrong(deed.what + " does not tell who has become a holder");
  if (released != given_up) Wrong(deed.what + " does not tell what was given up");
}

// What was granted is stored, for as long as was asked for from now on.
void Storm::CheckGrant(const Asked& asked, Token token, const Holds& before) {
  const StoredHold* first = FindLive(before, asked.db, asked.keys.front(), asked.owner);
  const bool is_new = first == nullptr || asked.upgrade;
  const std::optional<Instant> grace_end =
      promoted_.has_value()
          ? std::optional(*promoted_ + primary_->engine().settings().failover_grace)
          : std::nullopt;
  if (is_new && grace_end > promoted_ && now_.moment() <= *grace_end) {
    Wrong("somebody becomes a holder within the grace");
  }
  for (const std::string& key : asked.keys) {
    const StoredHold* own = FindLive(before, asked.db, key, asked.owner);
    // Who asks again under the id that its hold is bound to does not enter once more.
    const auto bound = bindings_.find(HoldName(asked.db, key, asked.owner));
    const bool again = asked.notify.has_value() && bound != bindings_.end() &&
                       std::pair(bound->second.channel, bound->second.id) == *asked.notify;
    const uint32_t count = own == nullptr ? 1 : own->count + (asked.reentrant && !again ? 1 : 0);
    const std::string tag = own != nullptr && asked.tag.empty() ? own->tag : asked.tag;
    const Instant since = own == nullptr ? now_.moment() : own->since;
    Instant cap = own == nullptr ? kMaxInstant : own->cap.value_or(kMaxInstant);
    if (asked.max_hold > Millis{0}) cap = std::min(cap, since + asked.max_hold);
    const Instant end = std::max(std::min(now_.moment() + asked.lease, cap), now_.moment());
    const Lock* lock = primary_->FindLock(asked.db, key);
    const auto hold = lock == nullptr ? std::nullopt : lock->Find(Owner{asked.owner});
    if (!hold.has_value() || lock->mode() != asked.mode || hold->token != token ||
        hold->end != end || hold->linger != asked.linger || hold->count != count ||
        hold->weight != asked.weight || hold->tag != tag || hold->since != since ||
        hold->cap.value_or(kMaxInstant) != cap) {
      Wrong("what is granted is not what is held");
    }
  }
  BindChannel(asked, token, before);
}

// Nobody who came before waits for what this one gets and could not hold it beside it.
void Storm::CheckOrder(const Asked& asked) {
  if (asked.upgrade || asked.holds_plain) return;
  for (const auto& [tag, other] : waiting_) {
    if (!other.IsForAny(asked.db, asked.keys) || other.arrival >= asked.arrival) continue;
    if (HasPerhapsEnded(other)) continue;
    if (other.mode != asked.mode || asked.mode == Mode::kExclusive) {
      Wrong(Quoted(other.owner) + " is overtaken by " + Quoted(asked.owner));
    }
  }
}

// A new holder has room beside the others, and beside those who came before, if it did not wait.
void Storm::CheckRoom(int db, std::string_view key, Mode mode, uint32_t limit, bool waited) {
  const Lock* lock = primary_->FindLock(db, key);
  if (lock == nullptr) return Wrong("what is granted is not held");
  size_t holders = 0;
  uint64_t weight = 0;
  for (const Hold& hold : lock->holds(Lock::Order::kByOwner)) {
    if (!hold.BlocksAt(now_.moment())) continue;
    ++holders;
    weight += hold.weight;
  }
  const size_t most = mode == Mode::kExclusive ? 1 : primary_->engine().settings().max_holders;
  if (holders > most) Wrong("there are more holders than may be");
  if (mode != Mode::kLimit) return;
  if (weight > limit) Wrong("the holders weigh more than they may");
  if (waited) return;
  size_t ahead = 0;
  for (const auto& [tag, other] : waiting_) {
    if (!other.IsFor(db, key) || HasPerhapsEnded(other)) continue;
    ++ahead;
    weight += other.weight;
    limit = std::min(limit, other.limit);
  }
  if (ahead > 0 && (weight > limit || holders + ahead > most)) {
    Wrong("there is no room for those who came before");
  }
}

// Everybody in it holds, or waits for, what the one before wants.
void Storm::CheckCycle(const Asked& asker, const std::vector<ParkResult::Step>& cycle) {
  if (cycle.empty()) Wrong("a deadlock of nobody");
  for (size_t i = 0; i < cycle.size(); ++i) {
    const ParkResult::Step& step = cycle[i];
    const std::string& owner = cycle[(i + 1) % cycle.size()].name;
    const bool is_tag = std::find(kOwners.begin(), kOwners.end(), owner) == kOwners.end();
    if (is_tag) continue;
    const Lock* lock = primary_->FindLock(step.db, step.key);
    const bool holds = (lock != nullptr && lock->Find(Owner{owner}).has_value()) ||
                       HoldsPlain(step.db, step.key, owner);
    const bool asks = owner == asker.owner && asker.IsFor(step.db, step.key);
    if (!holds && !asks && !Waits(step.db, step.key, owner)) Wrong("a deadlock is not closed");
  }
}

void Storm::CheckAnswer(const Asked& asked, const WaitAnswer& answer) {
  const auto any_key = [&asked](auto is) {
    return std::any_of(asked.keys.begin(), asked.keys.end(), is);
  };
  const bool refused = any_key([&](const std::string& key) {
    return primary_->WriteRefusal(asked.user, key, primary_->out_of_memory).has_value();
  });
  if (std::holds_alternative<Token>(answer)) {
    if (refused) Wrong("granted what must be refused");
    if (!asked.is_queued) Wrong("somebody is granted what it does not wait for any more");
  } else if (std::holds_alternative<std::monostate>(answer)) {
    if (now_.tick() < asked.until) Wrong("a wait times out too early");
  } else if (std::holds_alternative<std::string>(answer)) {
    if (!refused && !asked.lost_slot && primary_->grants_until_out_of_memory != 0U) {
      Wrong("refused without a reason");
    }
  } else if (const auto* end = std::get_if<WaitEnd>(&answer)) {
    const bool other = any_key([&](const std::string& key) { return IsOther(asked.db, key); });
    if (*end == WaitEnd::kWrongType ? !other : asked.is_queued) {
      Wrong("a wait is ended without a reason");
    }
  }
}

void Storm::CheckStored() {
  for (const auto& [db, key] : primary_->Keys()) {
    const Lock* lock = primary_->FindLock(db, key);
    if (lock != nullptr && lock->mode() == Mode::kExclusive && lock->size() != 1) {
      Wrong("an exclusive holder is not alone");
    }
  }
}

void Storm::Replicate(size_t but_for) {
  while (applied_ + but_for < primary_->log().size()) {
    replica_->Apply(primary_->log().Read(applied_++));
  }
}

void Storm::CheckCopies() {
  Replicate();
  if (replica_->fault() != nullptr) Wrong(std::string("replica: ") + replica_->fault());
  if (!primary_->HasSameData(*replica_)) {
    Wrong("the replica differs:\n" + primary_->Describe() + "from\n" + replica_->Describe());
  }
  const Token last = primary_->engine().tokens().clock().last();
  if (replica_->engine().tokens().clock().last() < last && LeadOf(last, now_.wall) > Micros{0}) {
    Wrong("the replica does not know the last token");
  }
}

// Where a server begins to issue is known to its replica before anything is granted.
void Storm::CheckFloorOfStart() {
  if (floor_is_checked_ || !primary_->may_write || !primary_->may_replicate_floor || HasWork()) {
    return;
  }
  floor_is_checked_ = true;
  if (!primary_->has_consumers() || !primary_->engine().tokens().issuing()) return;
  Replicate();
  const auto floor = primary_->engine().tokens().ToSave(now_.wall);
  if (floor.has_value() && replica_->engine().tokens().clock().last() < *floor) {
    Wrong("the replica does not know where tokens begin");
  }
}

void Storm::Check() {
  // What was there again in time is bound as before.
  std::erase_if(losses_to_tell_, [this](const auto& loss) {
    const auto& [name, binding] = loss;
    const auto& [db, key, owner] = name;
    return primary_->engine().channels().IsBoundTo({db, key}, Owner{owner},
                                                   {binding.channel, binding.id}) &&
           bindings_.try_emplace(name, binding).second;
  });
  // What another node has now is not bound here any more; but it may have been lost just before.
  UnbindChannels([this](const HoldName& name) {
    const auto& [db, key, owner] = name;
    if (!primary_->keys_of_lost_slots.contains(key) || IsBound(name)) return false;
    perhaps_told_.emplace_back(name, bindings_.at(name));
    return true;
  });
  if (primary_->fault() != nullptr) Wrong(primary_->fault());
  if (!primary_->engine().IsConsistent()) Wrong("the engine contradicts itself");
  CheckStored();
  if (primary_->has_consumers() && OneIn(3)) CheckCopies();
  const auto blocked = std::count_if(waiting_.begin(), waiting_.end(), [](const auto& each) {
    return !each.second.notify.has_value();
  });
  if (primary_->waiting() != static_cast<size_t>(blocked) ||
      primary_->engine().waiting().blocked() != primary_->waiting()) {
    Wrong("somebody's wait is forgotten");
  }
  size_t places = 0;
  for (const auto& [tag, asked] : waiting_) {
    if (asked.notify.has_value()) places += asked.keys.size();
  }
  const auto& notified = primary_->engine().waiting();
  if (notified.places() + notified.ended_places() != places) Wrong("another number of places");
  const Stats& stats = primary_->engine().stats();
  if (warnings_ > stats.evicted + stats.undelivered && doubtful_.empty()) {
    Wrong("a warning of nothing");
  }
}

void Storm::CheckWaits() {
  // Whom the server would refuse is tried too, and told so.
  if (primary_->may_write && primary_->LeavesSomebodyWaiting(now_)) {
    Wrong("somebody waits for nothing");
  }
  if (primary_->KeepsSomebodyTooLong(now_.steady - std::chrono::milliseconds{25})) {
    Wrong("somebody waits for too long");
  }
  for (const auto& [tag, asked] : waiting_) {
    const bool all_lost = std::all_of(
        asked.keys.begin(), asked.keys.end(),
        [this](const std::string& key) { return primary_->keys_of_lost_slots.contains(key); });
    // While writes are paused, what a short pass leaves is looked at 10 ms later (storm 23034).
    if (all_lost && asked.is_queued && primary_->may_write && !HasWork()) {
      Wrong("somebody waits for a slot that has left");
    }
  }
}

void Storm::Bind(Token token, const std::vector<std::string>& keys,
                 std::optional<uint64_t> connection) {
  for (const std::string& key : keys) {
    bound_.erase({token, key});
    if (connection.has_value()) bound_.emplace(std::pair(token, key), *connection);
  }
  if (connection.has_value()) sessions_.push_back(*connection);
}

// Only what is held is bound to a connection, and no hold outlives the one that it is bound to,
// once nothing is pending.
void Storm::CheckSessions() {
  const Sessions& sessions = primary_->engine().sessions();
  for (int db = 0; db < kDatabases && !sessions.empty(); ++db) {
    for (const std::string& key : kKeys) {
      for (const std::string& owner : kOwners) {
        if (sessions.IsBound({db, key}, Owner{owner}) && Find(*seen_, db, key, owner) == nullptr) {
          Wrong("a hold of " + Quoted(owner) + " on " + NameOf(db, key) + " is bound and not held");
        }
      }
    }
  }
  if (primary_->engine().sessions().has_ended()) return;
  for (const StoredHold& hold : *seen_) {
    const auto bound = bound_.find({hold.token, hold.key});
    if (bound != bound_.end() && gone_.contains(bound->second) && IsLive(hold)) {
      Wrong("the hold of " + Quoted(hold.owner) + " on " + NameOf(hold.db, hold.key) +
            " outlives its connection");
    }
  }
}

// The lease decides, not the TTL that a stranger has given to the key.
void Storm::CheckTtls() {
  if (!primary_->may_write || HasWork()) return;
  for (const auto& [db, key] : primary_->Keys()) {
    const Lock* lock = primary_->FindLock(db, key);
    if (lock != nullptr && primary_->ExpiryOf(db, key) != lock->blocks_until() &&
        !strange_ttls_.contains(key)) {
      Wrong("the TTL of " + Quoted(key) + " is not that of its lease");
    }
  }
}

void Storm::Heard(Token token) {
  for (auto* grants : {&untold_, &undelivered_}) {
    const auto grant = grants->find(token);
    if (grant != grants->end() && !grant->second) grants->erase(grant);
  }
}

void Storm::CheckTakenBack() {
  if (undelivered_.empty() || !primary_->may_write || HasWork()) return;
  for (const StoredHold& hold : *seen_) {
    const auto grant = undelivered_.find(hold.token);
    if (grant != undelivered_.end() && !grant->second && IsLive(hold)) {
      Wrong("a grant that nobody has heard of is not taken back");
    }
  }
}

}  // namespace turnstile::sim
