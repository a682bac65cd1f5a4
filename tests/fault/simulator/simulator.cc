#include "fault/simulator/simulator.h"

#include <algorithm>
#include <memory>
#include <ostream>
#include <utility>

namespace turnstile::fault {
namespace {

// The wall clock of a server that is right, when a schedule begins.
constexpr Time kWallAtStart = 1'700'000'000'000'000;
// Owners that never ask for a lock.
constexpr uint32_t kFirstStranger = 250;
constexpr size_t kMostEvents = 10'000;

Sharing SharingOf(Mode mode) {
  switch (mode) {
    case Mode::kShared:
      return Sharing::kShared;
    case Mode::kLimit:
      return Sharing::kLimit;
    default:
      return Sharing::kExclusive;
  }
}

Time ToTime(Millis span) { return span.count() * kMillisecond; }

}  // namespace

const char* NameOf(Thing thing) {
  static constexpr std::array<const char*, kThings> kNames = {
      "operations",
      "holds",
      "waits",
      "grants whose order was known",
      "writes outside",
      "writes refused",
      "handed over",
      "shared grants",
      "limited grants",
      "grants of several locks",
      "grants that linger",
      "granted once more",
      "upgrades",
      "downgrades",
      "grants with a floor",
      "heavy grants",
      "grants with a cap",
      "leases cut by a cap",
      "grants with a tag",
      "kept from long lines",
      "other weights refused",
      "in line, to be notified",
      "grants by message",
      "confirmed",
      "not confirmed",
      "time-outs by message",
      "errors by message",
      "waits ended by demotion",
      "messages of former primaries",
      "messages before answers",
      "messages missed",
      "messages late",
      "grants sent to nobody",
      "losses told",
      "subscriptions",
      "subscriptions lost",
      "cancelled in line",
      "places taken over",
      "superseded",
      "rights to publish taken away",
      "refused to notify",
      "asked again",
      "timed out",
      "grants taken back",
      "sessions ended",
      "releases by other owners",
      "messages lost",
      "client deaths",
      "client pauses",
      "server pauses",
      "restarts with AOF",
      "restarts with a cut AOF",
      "restarts with RDB",
      "restarts with nothing",
      "failovers with loss",
      "failovers without loss",
      "planned failovers",
      "links cut",
      "full synchronisations",
      "AOF rewrites",
      "DEL",
      "FLUSHALL",
      "SET",
      "RENAME",
      "clock steps",
      "copies compared",
  };
  return kNames.at(static_cast<size_t>(thing));
}

// Neighbouring seeds must not give neighbouring worlds.
Random::Random(uint64_t seed) {
  uint64_t mixed = seed + 0x9E3779B97F4A7C15ULL;
  mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9ULL;
  mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EBULL;
  mixed ^= mixed >> 31;
  state_ = mixed == 0 ? 1 : mixed;
}

Simulator::Simulator(const Exemptions& exemptions) : exemptions_(exemptions) {}
Simulator::~Simulator() = default;

std::vector<Violation> Simulator::Run(uint64_t seed, std::ostream* story) {
  story_ = story;
  Begin(seed);
  size_t handled = 0;
  while (!events_.empty() && violations_.empty()) {
    std::pop_heap(events_.begin(), events_.end(), [](const Event& a, const Event& b) {
      return a.at != b.at ? a.at > b.at : a.order > b.order;
    });
    const Event event = events_.back();
    events_.pop_back();
    now_ = event.at;
    Handle(event);
    if (++handled > kMostEvents) Broken("C8", "the schedule does not come to rest");
  }
  if (violations_.empty()) Finish();
  return Judge();
}

void Simulator::Begin(uint64_t seed) {
  for (Node& node : nodes_) node = Node();
  random_ = Random(seed);
  now_ = 0;
  order_ = 0;
  primary_ = 0;
  busy_until_ = 0;
  lives_ = 0;
  next_owner_ = 0;
  highest_token_ = 0;
  set_back_ = 0;
  events_.clear();
  connections_.assign(1, Connection{.open_at_client = false, .open_at_server = false});
  calls_.clear();
  replies_.clear();
  messages_.clear();
  may_publish_.fill(true);
  register_.fill(0);
  for (auto& of_lock : ledger_) of_lock.fill(kMinInstant);
  clients_.fill(Client());
  history_.operations.clear();
  history_.marks.clear();
  violations_.clear();

  ChooseWorld();
  for (size_t i = 0; i < server_count_; ++i) {
    nodes_[i].server = MakeServer();
    nodes_[i].life = ++lives_;
    nodes_[i].linked = i != primary_;
    nodes_[i].synced = i != primary_;
  }
  nodes_[primary_].server->BeOldPrimary(WallOf(primary_));
  for (size_t i = 0; i < client_count_; ++i) ActIn(i, 0, 3 * kMillisecond);
  ChooseDisasters();
}

void Simulator::ChooseWorld() {
  Random& random = random_;
  client_count_ = static_cast<size_t>(random.Between(3, kMostClients));
  server_count_ = random.OneIn(3) ? 3 : 2;
  lock_count_ = static_cast<uint32_t>(random.OneIn(3) ? 1 : random.Between(2, kLocks));
  for (size_t i = 0; i < kLocks; ++i) {
    constexpr std::array kStyles = {Sharing::kExclusive, Sharing::kExclusive, Sharing::kShared,
                                    Sharing::kLimit};
    styles_[i] = kStyles[random.Below(kStyles.size())];
    limits_[i] = static_cast<uint16_t>(random.Between(1, 3));
  }
  lossy_ = random.OneIn(2);
  has_sessions_ = random.OneIn(2);
  horizon_ = random.Between(20, 60) * kMillisecond;
  constexpr std::array kLeases = {3, 8, 8, 20};
  constexpr std::array kWaits = {5, 15, 40};
  longest_lease_ = kLeases[random.Below(kLeases.size())];
  longest_linger_ = random.OneIn(3) ? random.Between(1, 6) : 0;
  longest_wait_ = kWaits[random.Below(kWaits.size())];
  delay_ = random.Between(20, 400);
  jitter_ = random.OneIn(3) ? random.Between(1, 5'000) : 0;
  link_delay_ = random.OneIn(3) ? random.Between(1, 10'000) : random.Between(1, 500);
  constexpr std::array<uint32_t, 3> kLoses = {0, 10, 30};
  loses_one_in_ = kLoses[random.Below(kLoses.size())];

  constexpr std::array kMargins = {5, 60, 30'000};
  settings_.margin = Millis{kMargins[random.Below(kMargins.size())]};
  // Some servers have so much to do that a pass ends after a step or two.
  settings_.budget = random.Below(4) == 0 ? 1 + random.Below(30) : 5'000;
  settings_.grace = lossy_ ? Millis{longest_lease_ + longest_linger_ + 1} : Millis{0};
  const bool skewed = random.OneIn(2);
  for (size_t i = 0; i < kServers && skewed; ++i) {
    const Time most = random.OneIn(4) ? 100 * kMillisecond : 5 * kMillisecond;
    nodes_[i].clock_offset = random.Between(-most, most);
  }
  for (size_t i = 0; i < client_count_; ++i) clients_[i].direct = jitter_ == 0 || random.OneIn(2);
  slow_answers_ = random.OneIn(3);
  constexpr std::array<uint32_t, 3> kNotifies = {0, 1, 3};
  notifies_one_in_ = kNotifies[random.Below(kNotifies.size())];
  settings_.listened = random.OneIn(8);
  has_caps_ = random.OneIn(3);
}

std::unique_ptr<Server> Simulator::MakeServer() {
  auto server = std::make_unique<Server>(settings_, ledger_);
  for (uint32_t i = 0; i < kMostClients; ++i) server->SetMayPublish(i, may_publish_[i]);
  return server;
}

void Simulator::ChooseDisasters() {
  using enum Disaster;
  constexpr std::array kLossless = {kRestartWithAof, kRestartWithAof, kFailover, kFailover,
                                    kPlannedFailover};
  constexpr std::array kLossy = {kRestartWithCutAof, kRestartWithRdb, kRestartWithNothing,
                                 kFailover,          kFailover,       kPlannedFailover};
  constexpr std::array kOther = {kCutLink, kPauseServer, kDelete,    kFlush,
                                 kSet,     kRename,      kStepClock, kForbidToPublish};
  const auto count = random_.Below(4);
  for (uint32_t i = 0; i < count; ++i) {
    Disaster disaster = kDelete;
    if (random_.OneIn(2)) {
      disaster = kOther[random_.Below(kOther.size())];
    } else if (lossy_) {
      disaster = kLossy[random_.Below(kLossy.size())];
    } else {
      disaster = kLossless[random_.Below(kLossless.size())];
    }
    Push(random_.Between(kMillisecond, horizon_), What::kDisaster, 0,
         static_cast<uint32_t>(disaster));
  }
  if (random_.OneIn(4)) {
    Push(random_.Between(0, horizon_), What::kDisaster, 0, static_cast<uint32_t>(kRewriteAof));
  }
}

void Simulator::Push(Time at, What what, size_t who, uint32_t number, uint32_t generation) {
  events_.push_back({.at = at,
                     .order = order_++,
                     .what = what,
                     .who = static_cast<uint8_t>(who),
                     .number = number,
                     .generation = generation});
  std::push_heap(events_.begin(), events_.end(), [](const Event& a, const Event& b) {
    return a.at != b.at ? a.at > b.at : a.order > b.order;
  });
}

void Simulator::Broken(const char* check, const std::string& text) {
  violations_.push_back({.check = check, .text = text, .when = now_});
}

void Simulator::Handle(const Event& event) {
  Node& node = nodes_[event.who % kServers];
  const bool is_of_server = event.what == What::kServerTurns || event.what == What::kStreamArrives;
  if (is_of_server && now_ < node.paused_until) {
    if (event.what == What::kServerTurns && event.at == node.turn_at) {
      node.turn_at = node.paused_until;
    }
    Push(node.paused_until, event.what, event.who, event.number, event.generation);
    return;
  }
  switch (event.what) {
    case What::kClientActs:
      if (event.generation == clients_[event.who].generation) Act(event.who);
      break;
    case What::kClientGivesUp:
      if (event.generation != clients_[event.who].generation) break;
      if (event.number == 0) {
        LoseCall(event.who);
      } else {
        Die(event.who);
      }
      break;
    case What::kRequestArrives:
      Arrive(event);
      break;
    case What::kReplyArrives: {
      const Reply& reply = replies_[event.number];
      const Connection& connection = connections_[reply.connection];
      const Client& client = clients_[connection.client];
      if (connection.open_at_client && client.waits_for_answer &&
          client.pending.call.number == reply.call) {
        TakeReply(connection.client, reply);
      }
      break;
    }
    case What::kClientLearns: {
      const Connection& connection = connections_[event.number];
      if (!connection.open_at_client) break;
      if (connection.subscriber) {
        LoseSubscription(connection.client);
      } else if (clients_[connection.client].waits_for_answer) {
        LoseCall(connection.client);
      } else {
        Close(connection.client);
      }
      break;
    }
    case What::kServerLearns:
      ServerLearns(event.number);
      break;
    case What::kServerTurns:
      if (node.up && event.at == node.turn_at) Turn(event.who);
      break;
    case What::kStreamArrives:
      if (node.up && node.linked && event.generation == node.link) Deliver(event.who, event.number);
      break;
    case What::kDisaster:
      Strike(static_cast<Disaster>(event.number));
      break;
    case What::kRestarts:
      Restart(event.who);
      break;
    case What::kPromotes:
      Promote(event.who);
      break;
    case What::kSwitches:
      Switch(event.who);
      break;
    case What::kRejoins:
      Rejoin(event.who);
      break;
    case What::kBreaks: {
      const Connection& connection = connections_[event.number];
      if (connection.open_at_client && connection.broken == kNever &&
          nodes_[connection.server].server->host().IsParked(event.number)) {
        Break(event.number);
      }
      break;
    }
    case What::kSubscribes:
      SubscriberArrives(event.number);
      break;
    case What::kSubscribed: {
      Client& client = clients_[event.who];
      if (client.subscription != event.number) break;
      client.subscribed = true;
      if (client.doing == Doing::kSubscribing) {
        client.doing = Doing::kAsking;
        Act(event.who);
      }
      break;
    }
    case What::kMessageArrives: {
      const SentMessage& sent = messages_[event.number];
      const Connection& connection = connections_[sent.connection];
      if (!connection.open_at_client) {
        Count(Thing::kMessagesMissed);
        break;
      }
      const Node& from = nodes_[connection.server];
      if (!from.up || from.life != sent.life) Count(Thing::kMessagesOfFormerPrimaries);
      std::optional<Sent>& awaited = clients_[event.who].awaited;
      if (sent.late && awaited.has_value()) awaited->direct = false;
      if (sent.late) clients_[event.who].pending.direct = false;
      TakeMessage(event.who, sent.message);
      break;
    }
    case What::kMayPublishAgain:
      SetMayPublish(event.who, true);
      break;
  }
}

// When nothing more happens.
void Simulator::Finish() {
  for (size_t i = 0; i < server_count_; ++i) {
    const Server& server = *nodes_[i].server;
    Count(Thing::kGrantsTakenBack, server.taken_back());
    Count(Thing::kSessionsEnded, server.sessions_ended());
    Count(Thing::kGrantsSentToNobody, server.sent_to_nobody());
    Count(Thing::kKeptFromLines, server.kept_from_lines());
    Count(Thing::kLeasesCut, server.leases_cut());
    if (server.HasForeignTag()) Broken("C7", "a hold has a tag that its owner never named");
    if (!server.IsQueueClean()) Broken("C8", "something is left of those who waited");
    if (i == primary_) continue;
    if (!nodes_[i].linked || nodes_[i].applied != nodes_[primary_].server->log().size()) {
      Broken("C7", "a replica does not come to an end with its stream");
    } else {
      Compare(i);
    }
  }
}

std::vector<Violation> Simulator::Judge() {
  Findings findings = JudgeHistory(exemptions_);
  Count(Thing::kOperations, findings.operations);
  Count(Thing::kHolds, findings.holds);
  Count(Thing::kWaits, findings.waits);
  Count(Thing::kOrdered, findings.ordered);
  Count(Thing::kWrites, findings.writes);
  Count(Thing::kWritesRefused, findings.refused);
  std::vector<Violation> all = std::move(findings.violations);
  all.insert(all.end(), violations_.begin(), violations_.end());
  return all;
}

std::vector<Violation> Simulator::JudgeWithout(Exemption exemption) const {
  return JudgeHistory(exemptions_.Without(exemption)).violations;
}

Findings Simulator::JudgeHistory(const Exemptions& exemptions) const {
  const Rules rules{.lease_slack = 0,
                    .wait_slack = 35 * kMillisecond,
                    .idle_limit = (slow_answers_ ? 5 : 4) * kMillisecond + delay_ + jitter_,
                    .order_slack = 3 * kMillisecond,
                    .exemptions = exemptions};
  Findings findings = Check(history_, rules);
  std::erase_if(findings.violations,
                [&](const Violation& violation) { return IsExcused(violation, exemptions); });
  return findings;
}

// The token that the owner had been told when it sent `op`, or by it.
int64_t Simulator::TokenOf(const Operation& op) const {
  int64_t token = op.token;
  for (const Operation& other : history_.operations) {
    if (other.verb == Verb::kAcquire && other.answer == Answer::kToken && other.lock == op.lock &&
        other.owner == op.owner && other.answered <= op.answered) {
      token = std::max(token, other.token);
    }
  }
  return token;
}

// What the checker cannot know: an owner goes on with a hold that is back with older data, though
// it had lost or released it. Only what the token guards is safe from that.
bool Simulator::IsExcused(const Violation& violation, const Exemptions& exemptions) const {
  if (violation.operations.size() != 2 || !exemptions.Has(Exemption::kReturnedHoldIsUsed)) {
    return false;
  }
  const Operation& first = history_.operations[violation.operations[0]];
  const Operation& second = history_.operations[violation.operations[1]];
  if (violation.check != "C1" && !(violation.check == "C2" && second.verb == Verb::kWrite)) {
    return false;
  }
  const Operation& older = TokenOf(first) < TokenOf(second) ? first : second;
  return std::any_of(history_.marks.begin(), history_.marks.end(), [&](const Mark& mark) {
    return mark.kind == Mark::Kind::kLossy && mark.begin <= older.sent;
  });
}

// --- Clients ----------------------------------------------------------------------------------

void Simulator::ActIn(size_t client, Time least, Time most) {
  Push(now_ + random_.Between(least, most), What::kClientActs, client, 0,
       ++clients_[client].generation);
}

void Simulator::BeIdle(size_t client, Time least, Time most) {
  clients_[client].doing = Doing::kIdle;
  ActIn(client, least, most);
}

void Simulator::Act(size_t number) {
  Client& client = clients_[number];
  const bool begins = client.doing == Doing::kIdle;
  if (begins && (now_ >= horizon_ || next_owner_ >= kFirstStranger)) return;
  if (client.connection == kNone && !Connect(number)) {
    ActIn(number, kMillisecond, 3 * kMillisecond);
    return;
  }
  switch (client.doing) {
    case Doing::kIdle:
      ChooseRequest(client);
      Ask(number);
      break;
    case Doing::kSubscribing:
    case Doing::kAsking:
      Ask(number);
      break;
    case Doing::kAwaiting:
      ActInLine(number);
      break;
    case Doing::kReleasing: {
      Call call = client.asked;
      call.verb = Verb::kRelease;
      call.token = {};
      ++client.tries;
      Send(number, call, Doing::kReleasing);
      break;
    }
    default:
      UseHold(number);
      break;
  }
}

bool Simulator::Connect(size_t number) {
  Client& client = clients_[number];
  if (!nodes_[primary_].up || !nodes_[primary_].server->is_primary()) return false;
  client.connection = static_cast<uint32_t>(connections_.size());
  connections_.push_back({.client = static_cast<uint8_t>(number),
                          .server = static_cast<uint8_t>(primary_),
                          .direct = client.direct});
  return true;
}

void Simulator::ChooseRequest(Client& client) {
  LoseSession(client);
  LoseAwaited(client);
  Call& call = client.asked;
  call = Call{.client = static_cast<uint32_t>(&client - clients_.data()), .owner = next_owner_++};
  const uint32_t first = random_.Below(lock_count_);
  for (uint32_t i = 0; i < lock_count_; ++i) call.locks[i] = (first + i) % lock_count_;
  call.count = lock_count_ > 1 && random_.OneIn(4)
                   ? static_cast<size_t>(random_.Between(2, lock_count_))
                   : 1;
  Sharing style = styles_[first];
  for (size_t i = 1; i < call.count; ++i) {
    if (styles_[call.locks[i]] != style) style = Sharing::kExclusive;
  }
  if (style == Sharing::kShared && !random_.OneIn(3)) call.mode = Mode::kShared;
  if (style == Sharing::kLimit && !random_.OneIn(8)) {
    call.mode = Mode::kLimit;
    call.limit = random_.OneIn(8) ? static_cast<uint32_t>(random_.Between(1, 3)) : limits_[first];
    if (random_.OneIn(2)) call.weight = static_cast<uint32_t>(random_.Between(1, call.limit));
  }
  call.lease =
      Millis{std::max(random_.Between(1, longest_lease_), random_.Between(1, longest_lease_))};
  if (!random_.OneIn(3)) call.wait = Millis{random_.Between(1, longest_wait_)};
  if (random_.OneIn(5)) call.max_line = static_cast<uint32_t>(random_.Between(1, 3));
  if (has_caps_ && random_.OneIn(2)) {
    call.max_hold = call.lease + Millis{random_.Between(0, 2 * longest_lease_)};
  }
  call.tagged = random_.OneIn(3);
  call.notify = notifies_one_in_ > 0 && random_.OneIn(notifies_one_in_);
  if (longest_linger_ > 0 && random_.OneIn(2)) {
    call.linger = Millis{random_.Between(1, longest_linger_)};
  }
  call.session = has_sessions_ && random_.OneIn(3);
  call.reentrant = call.count == 1 && call.mode != Mode::kLimit && random_.OneIn(6);
  if (call.mode == Mode::kExclusive && random_.OneIn(12)) call.token = FloorAbove(0);
  client.asked_before = false;
  client.changing = false;
  client.releases = 0;
  client.tries = 0;
  client.deeds = 0;
  client.token = 0;
  client.cancelled = false;
  client.told = false;
  client.bound.reset();
  client.ids = 0;
  if (call.notify) UseNewId(client);
}

// Somewhat ahead of what a server would give, but never far ahead of its clock.
Token Simulator::FloorAbove(int64_t token) {
  return Token{static_cast<uint64_t>(std::max(
      token + random_.Between(1, 3), kWallAtStart + now_ + random_.Between(0, kMillisecond)))};
}

// In the same mode or in the other one, and perhaps for a higher token.
void Simulator::AskAgain(size_t number) {
  Client& client = clients_[number];
  Call& call = client.asked;
  const bool reads_and_writes = call.count == 1 && styles_[call.locks[0]] == Sharing::kShared;
  if (reads_and_writes && !call.reentrant && random_.OneIn(2)) {
    ToggleMode(client);
    client.changing = true;
  } else if (call.mode == Mode::kExclusive && random_.OneIn(3)) {
    call.token = FloorAbove(client.token);
  } else if (call.mode == Mode::kLimit && call.limit > 1 && random_.OneIn(3)) {
    Call other = call;
    other.weight = other.weight % other.limit + 1;
    other.wait = Millis{0};
    other.notify = false;
    return Send(number, other, Doing::kUsing);
  }
  if (has_caps_ && random_.OneIn(3)) {
    call.max_hold = call.lease + Millis{random_.Between(0, longest_lease_)};
  }
  call.tagged = random_.OneIn(2);
  // By the id of its hold, by another one, or by none.
  if (client.changing || random_.OneIn(3)) call.notify = false;
  if (!call.notify && notifies_one_in_ > 0 && random_.OneIn(2)) UseNewId(client);
  Ask(number);
}

void Simulator::ToggleMode(Client& client) {
  Call& call = client.asked;
  call.mode = call.mode == Mode::kShared ? Mode::kExclusive : Mode::kShared;
  call.token = {};
}

void Simulator::Ask(size_t number) {
  Client& client = clients_[number];
  // Messages of earlier calls by the same id may be on their way.
  const size_t most = client.bound == client.asked.id ? 1 : 0;
  if (client.asked.notify && client.asking_since == kNever && client.asks > most) UseNewId(client);
  // Some do not listen.
  if (client.asked.notify && NeedsSubscription(client) && !random_.OneIn(8)) {
    return Subscribe(number);
  }
  ++client.tries;
  const bool retry = std::exchange(client.asked_before, true);
  if (retry) Count(Thing::kAskedAgain);
  LoseAwaited(client);
  Send(number, client.asked, Doing::kAsking);
  client.pending.retry = retry;
  client.pending.bound = client.asked.notify && client.bound == client.asked.id;
  if (!client.asked.notify) return;
  client.asking_since = std::min(client.asking_since, now_);
  ++client.asks;
}

// A holder does something with what it has.
void Simulator::UseHold(size_t number) {
  Client& client = clients_[number];
  if (client.token == 0) return BeIdle(number, 0, kMillisecond);  // it was told that it is lost
  constexpr int kMostDeeds = 4;
  const uint32_t dice = ++client.deeds > kMostDeeds ? 0 : random_.Below(20);
  Call call = client.asked;
  call.token = {};
  if (dice < 6) {
    client.tries = 0;
    client.doing = Doing::kReleasing;
    Act(number);
  } else if (dice < 10) {
    call.verb = Verb::kTouch;
    call.lease = Millis{random_.Between(1, longest_lease_)};
    Send(number, call, Doing::kUsing);
  } else if (dice < 12) {
    call.verb = Verb::kFence;
    call.locks[0] = call.locks[random_.Below(static_cast<uint32_t>(call.count))];
    call.count = 1;
    call.token = Token{static_cast<uint64_t>(client.token)};
    Send(number, call, Doing::kUsing);
  } else if (dice < 15) {
    WriteOutside(client);
    ActIn(number, 0, 2 * kMillisecond);
  } else if (dice == 15) {
    AskAgain(number);
  } else if (dice == 16) {
    Count(Thing::kClientPauses);
    const Time left = std::max(client.hold_until - now_, Time{0});
    ActIn(number, left, left + 8 * kMillisecond);
  } else if (dice == 17) {
    Die(number);
  } else if (dice == 18) {
    Count(Thing::kStrangersReleases);
    call.verb = Verb::kRelease;
    call.owner = kFirstStranger + random_.Below(kOwners - kFirstStranger);
    Send(number, call, Doing::kUsing);
    client.pending.stranger = true;
  } else {
    BeIdle(number, 0, 4 * kMillisecond);  // its lease will end by itself
  }
}

void Simulator::WriteOutside(Client& client) {
  if (client.asked.mode != Mode::kExclusive) return;
  const uint32_t lock =
      client.asked.locks[random_.Below(static_cast<uint32_t>(client.asked.count))];
  int64_t& highest = register_[lock];
  const bool accepted = client.token >= highest;
  highest = std::max(highest, client.token);
  history_.operations.push_back({.verb = Verb::kWrite,
                                 .answer = accepted ? Answer::kYes : Answer::kNo,
                                 .lock = lock,
                                 .owner = client.asked.owner,
                                 .token = client.token,
                                 .sent = now_,
                                 .answered = now_});
}

void Simulator::Send(size_t number, const Call& call, Doing doing) {
  Client& client = clients_[number];
  Connection& connection = connections_[client.connection];
  client.doing = doing;
  client.pending = {.call = call,
                    .at = now_,
                    .life = nodes_[connection.server].life,
                    .direct = client.direct,
                    .retry = call.verb == Verb::kAcquire};
  client.pending.call.number = static_cast<uint32_t>(calls_.size());
  client.pending.call.connection = client.connection;
  client.waits_for_answer = true;
  calls_.push_back(client.pending.call);

  // It may die while it waits.
  const Time patience = random_.Between(15, 25) * kMillisecond;
  const bool dies = random_.OneIn(30);
  const Time until = now_ + ToTime(call.verb == Verb::kAcquire ? call.wait : Millis{0}) + patience;
  Push(dies ? random_.Between(now_, until) : until, What::kClientGivesUp, number, dies ? 1 : 0,
       ++client.generation);

  if (connection.broken != kNever) return;
  if (loses_one_in_ > 0 && random_.OneIn(loses_one_in_)) {
    Break(client.connection);
    return;
  }
  const Time on_the_way = delay_ + (connection.direct ? 0 : random_.Between(0, jitter_));
  connection.last_in = std::max(connection.last_in, now_ + on_the_way);
  Push(connection.last_in, What::kRequestArrives, connection.server, client.pending.call.number);
  // Or its connection may break while it waits.
  if (call.verb == Verb::kAcquire && call.wait > Millis{0} && !call.notify && loses_one_in_ > 0 &&
      random_.OneIn(loses_one_in_)) {
    Push(now_ + random_.Between(0, ToTime(call.wait)), What::kBreaks, number, client.connection);
  }
}

void Simulator::Record(const Sent& sent, Answer answer, int64_t token) {
  const Call& call = sent.call;
  const bool is_acquire = call.verb == Verb::kAcquire;
  for (size_t i = 0; i < call.count; ++i) {
    history_.operations.push_back(
        {.verb = call.verb,
         .answer = answer,
         .sharing = SharingOf(call.mode),
         .limit = static_cast<uint16_t>(call.limit),
         .weight = static_cast<uint16_t>(call.weight),
         .max_line = static_cast<uint16_t>(is_acquire ? call.max_line : 0),
         .several = call.count > 1,
         .retry = sent.retry,
         .stranger = sent.stranger,
         .direct = sent.direct,
         .reentrant = call.reentrant,
         .session = call.session,
         .notified = is_acquire && call.notify,
         .bound = sent.bound,
         .lock = call.locks[i],
         .owner = call.owner,
         .server = sent.life,
         .token = is_acquire ? token : static_cast<int64_t>(call.token.value),
         .floor = is_acquire ? static_cast<int64_t>(call.token.value) : 0,
         .lease = is_acquire || call.verb == Verb::kTouch ? ToTime(call.lease) : 0,
         .wait = is_acquire ? ToTime(call.wait) : 0,
         .linger = is_acquire ? ToTime(call.linger) : 0,
         .max_hold = is_acquire ? ToTime(call.max_hold) : 0,
         .sent = sent.at,
         .queued = sent.queued,
         .answered = now_});
  }
}

void Simulator::TakeReply(size_t number, const Reply& reply) {
  Client& client = clients_[number];
  const Sent sent = client.pending;
  const Call& call = sent.call;
  client.waits_for_answer = false;
  if (reply.queued) return StandInLine(number);
  if (reply.refused) {
    Count(Thing::kNotifyRefused);
    if (random_.OneIn(2)) client.asked.notify = false;
  }
  Answer answer = reply.answer;
  // One that was done to some of its locks does not say to which.
  if (answer == Answer::kYes && call.verb != Verb::kFence && reply.done != call.count) {
    answer = Answer::kLost;
  }
  Record(sent, answer, reply.token);
  if (call.verb == Verb::kAcquire && client.doing == Doing::kUsing) {
    if (answer == Answer::kError) {
      Count(Thing::kOtherWeightsRefused);
    } else {
      client.asked.weight = call.weight;
      client.doing = Doing::kAsking;
    }
  }
  if (answer == Answer::kError) return TakeError(number);
  switch (client.doing) {
    case Doing::kReleasing:
      if (answer == Answer::kYes && --client.releases > 0) return Act(number);
      if (!client.awaited.has_value()) return BeIdle(number, 0, 4 * kMillisecond);
      // What it waited for ends with an error, or has been granted before.
      client.doing = Doing::kAwaiting;
      Push(now_ + random_.Between(0, 6 * kMillisecond), What::kClientGivesUp, number, 0,
           ++client.generation);
      return;
    case Doing::kAsking:
      if (call.notify) client.asking_since = kNever;
      if (answer != Answer::kToken) return TakeRefusal(number, call);
      if (reply.waited) Count(Thing::kHandedOver);
      TakeGrant(sent, reply.token);
      break;
    case Doing::kConfirming:
      Count(answer == Answer::kYes ? Thing::kGrantsConfirmed : Thing::kGrantsNotConfirmed);
      if (answer != Answer::kYes) {  // it may have some of them
        client.doing = Doing::kReleasing;
        client.tries = 0;
        return ActIn(number, 0, kMillisecond);
      }
      client.hold_until = sent.at + ToTime(call.lease);
      break;
    default:
      if (call.verb == Verb::kTouch && answer == Answer::kYes) {
        client.hold_until = sent.at + ToTime(call.lease);
      }
      break;
  }
  client.doing = Doing::kHolding;
  ActIn(number, 0, 3 * kMillisecond);
}

void Simulator::TakeGrant(const Sent& sent, int64_t token) {
  Client& client = clients_[sent.call.client];
  const Call& call = sent.call;
  if (call.mode == Mode::kShared) Count(Thing::kSharedGrants);
  if (call.mode == Mode::kLimit) Count(Thing::kLimitGrants);
  if (call.count > 1) Count(Thing::kGrantsOfSeveral);
  if (call.linger > Millis{0}) Count(Thing::kGrantsThatLinger);
  if (call.token.value > 0) Count(Thing::kFloors);
  if (call.weight > 1) Count(Thing::kHeavyGrants);
  if (call.max_hold > Millis{0}) Count(Thing::kCappedGrants);
  if (call.tagged) Count(Thing::kTaggedGrants);
  if (client.changing) {
    Count(call.mode == Mode::kShared ? Thing::kDowngrades : Thing::kUpgrades);
  }
  client.changing = false;
  const bool once_more = call.reentrant && client.token != 0 && !sent.bound;
  if (once_more) {
    Count(Thing::kReentries);
    ++client.releases;
  } else if (!sent.bound || client.releases == 0) {
    client.releases = 1;
  }
  client.token = token;
  client.told = true;
  client.hold_until = sent.at + ToTime(call.lease);
  if (call.notify) client.bound = call.id;
}

void Simulator::TakeError(size_t number) {
  Client& client = clients_[number];
  constexpr int kMostTries = 3;
  if (client.doing == Doing::kUsing) client.doing = Doing::kHolding;
  if (client.doing == Doing::kConfirming) client.doing = Doing::kReleasing;
  if (client.connection != kNone &&
      !nodes_[connections_[client.connection].server].server->is_primary()) {
    Close(number);
  }
  if (client.doing != Doing::kHolding && client.tries >= kMostTries) client.doing = Doing::kIdle;
  ActIn(number, kMillisecond, 4 * kMillisecond);
}

void Simulator::TakeRefusal(size_t number, const Call& call) {
  Client& client = clients_[number];
  if (call.wait > Millis{0}) Count(Thing::kTimedOut);
  if (!client.changing || call.mode == Mode::kShared) {
    return BeIdle(number, 0, 4 * kMillisecond);
  }
  // Who wanted to write and may not still reads.
  ToggleMode(client);
  client.changing = false;
  client.doing = Doing::kHolding;
  ActIn(number, 0, 3 * kMillisecond);
}

// No answer will come.
void Simulator::LoseCall(size_t number) {
  Client& client = clients_[number];
  if (client.waits_for_answer) Record(client.pending, Answer::kLost, 0);
  client.waits_for_answer = false;
  client.changing = false;
  if (client.doing == Doing::kSubscribing || client.doing == Doing::kAwaiting) {
    // Nothing comes there: who listens elsewhere may hear more.
    if (client.doing == Doing::kSubscribing || random_.OneIn(2)) CloseSubscription(client);
    LoseAwaited(client);
    if (client.cancelled) return BeIdle(number, 0, kMillisecond);
    client.doing = Doing::kAsking;
  }
  LoseAwaited(client);
  if (client.doing == Doing::kConfirming) client.doing = Doing::kReleasing;
  constexpr int kMostTries = 3;
  const bool tries_again = client.tries < kMostTries && !random_.OneIn(3);
  if (client.doing == Doing::kUsing) {
    client.doing = Doing::kHolding;
  } else if (!tries_again && client.doing == Doing::kAsking && random_.OneIn(2)) {
    client.doing = Doing::kReleasing;
    client.tries = 0;
  } else if (!tries_again) {
    client.doing = Doing::kIdle;
  }
  Close(number);
  ActIn(number, 0, 4 * kMillisecond);
}

void Simulator::Die(size_t number) {
  Client& client = clients_[number];
  Count(Thing::kClientDeaths);
  if (client.waits_for_answer) Record(client.pending, Answer::kLost, 0);
  client.waits_for_answer = false;
  LoseAwaited(client);
  CloseSubscription(client);
  Close(number);
  BeIdle(number, kMillisecond, 6 * kMillisecond);
}

// Also if the connection is gone already and the client has just learned that.
void Simulator::Close(size_t number) {
  Client& client = clients_[number];
  if (client.connection == kNone) return;
  Connection& connection = connections_[client.connection];
  connection.open_at_client = false;
  if (connection.open_at_server) {
    const Time late = random_.OneIn(2) ? delay_ : random_.Between(0, 30 * kMillisecond);
    Push(now_ + late, What::kServerLearns, connection.server, client.connection);
  }
  if (client.asked.session && client.doing == Doing::kHolding) client.doing = Doing::kIdle;
  LoseSession(client);
  client.connection = kNone;
}

// A client does not count on a hold that is bound to its connection any more. Perhaps the server
// has ended it before.
void Simulator::LoseSession(Client& client) {
  if (!client.asked.session || std::exchange(client.token, 0) == 0) return;
  const Time since = std::min(now_, connections_[client.connection].broken);
  for (size_t i = 0; i < client.asked.count; ++i) {
    history_.operations.push_back({.verb = Verb::kClose,
                                   .sharing = SharingOf(client.asked.mode),
                                   .limit = static_cast<uint16_t>(client.asked.limit),
                                   .weight = static_cast<uint16_t>(client.asked.weight),
                                   .several = client.asked.count > 1,
                                   .direct = false,
                                   .lock = client.asked.locks[i],
                                   .owner = client.asked.owner,
                                   .server = client.pending.life,
                                   .sent = since,
                                   .answered = since});
  }
}

// --- Clients that are notified ----------------------------------------------------------------

// By an id that nobody has used.
void Simulator::UseNewId(Client& client) {
  client.asked.notify = client.ids < kIdsOfOwner;
  if (!client.asked.notify) return;
  client.asked.id = static_cast<uint32_t>(client.asked.owner * kIdsOfOwner + client.ids++);
  client.asking_since = kNever;
  client.asks = 0;
}

bool Simulator::NeedsSubscription(const Client& client) const {
  return client.subscription == kNone || !client.subscribed ||
         connections_[client.subscription].server != connections_[client.connection].server;
}

void Simulator::Subscribe(size_t number) {
  Client& client = clients_[number];
  Count(Thing::kSubscriptions);
  CloseSubscription(client);
  client.doing = Doing::kSubscribing;
  client.subscription = static_cast<uint32_t>(connections_.size());
  connections_.push_back({.client = static_cast<uint8_t>(number),
                          .server = connections_[client.connection].server,
                          .direct = client.direct,
                          .subscriber = true});
  Push(now_ + random_.Between(10, 20) * kMillisecond, What::kClientGivesUp, number, 0,
       ++client.generation);
  if (loses_one_in_ > 0 && random_.OneIn(loses_one_in_)) return Break(client.subscription);
  Push(now_ + delay_, What::kSubscribes, number, client.subscription);
}

void Simulator::SubscriberArrives(uint32_t number) {
  Connection& connection = connections_[number];
  Node& node = nodes_[connection.server];
  if (!node.up || !connection.open_at_server || connection.broken != kNever) return;
  if (now_ < node.paused_until) {
    Push(node.paused_until, What::kSubscribes, connection.client, number);
    return;
  }
  connection.counted = true;
  node.server->Subscribe(connection.client);
  Push(now_ + delay_, What::kSubscribed, connection.client, number);
}

void Simulator::CloseSubscription(Client& client) {
  client.subscribed = false;
  const uint32_t number = std::exchange(client.subscription, kNone);
  if (number == kNone) return;
  Connection& connection = connections_[number];
  connection.open_at_client = false;
  if (!connection.open_at_server) return;
  const Time late = random_.OneIn(2) ? delay_ : random_.Between(0, 20 * kMillisecond);
  Push(now_ + late, What::kServerLearns, connection.server, number);
}

// After every new subscription it asks again.
void Simulator::LoseSubscription(size_t number) {
  Client& client = clients_[number];
  Count(Thing::kSubscriptionsLost);
  CloseSubscription(client);
  if (client.doing == Doing::kSubscribing) return ActIn(number, 0, 2 * kMillisecond);
  if (client.doing != Doing::kAwaiting) return;
  LoseAwaited(client);
  if (client.cancelled) return BeIdle(number, 0, kMillisecond);
  client.doing = Doing::kAsking;
  ActIn(number, 0, 2 * kMillisecond);
}

// The answer is that it is in line.
void Simulator::StandInLine(size_t number) {
  Client& client = clients_[number];
  Count(Thing::kInLine);
  client.awaited = client.pending;
  client.awaited->queued = now_;
  client.doing = Doing::kAwaiting;
  const Time wait = ToTime(client.pending.call.wait);
  if (random_.OneIn(4)) return ActIn(number, 0, wait);
  const Time patience = random_.Between(10, 20) * kMillisecond;
  const bool dies = random_.OneIn(30);
  const Time until = client.pending.at + wait + patience;
  Push(dies ? random_.Between(now_, std::max(now_, until)) : std::max(now_, until),
       What::kClientGivesUp, number, dies ? 1 : 0, ++client.generation);
}

// It does not only wait.
void Simulator::ActInLine(size_t number) {
  Client& client = clients_[number];
  const uint32_t dice = random_.Below(10);
  client.tries = 0;
  if (dice < 3) {
    Count(Thing::kCancelledInLine);
    client.cancelled = true;
    client.releases = 1;
    client.doing = Doing::kReleasing;
    return Act(number);
  }
  if (dice < 6) {
    Count(Thing::kPlacesTakenOver);
    if (random_.OneIn(2)) CloseSubscription(client);  // and listens anew
  } else if (dice < 8) {
    Count(Thing::kSuperseded);
    if (dice == 6) {
      UseNewId(client);
    } else {
      client.asked.notify = false;
    }
  } else {  // it does not listen any more: nobody is told, unless it comes back in time
    CloseSubscription(client);
    LoseAwaited(client);
    client.doing = dice == 8 ? Doing::kIdle : Doing::kReleasing;
    return ActIn(number, 0, 8 * kMillisecond);
  }
  Ask(number);
}

// It will not be told any more what becomes of that, or does not want to know.
void Simulator::LoseAwaited(Client& client) {
  if (!client.awaited.has_value()) return;
  Record(*client.awaited, Answer::kLost, 0);
  client.awaited.reset();
}

void Simulator::TakeMessage(size_t number, const Message& message) {
  Client& client = clients_[number];
  if (message.kind == Message::Kind::kLost) return TakeLoss(number, message);
  // The message may come before the answer that says that it is in line.
  const bool in_line = client.awaited.has_value() && client.awaited->call.id == message.id;
  const bool asking = client.waits_for_answer && client.pending.call.verb == Verb::kAcquire &&
                      client.pending.call.notify && client.pending.call.id == message.id;
  if (!in_line && !asking) return;
  // It asked again for what it knew.
  const bool is_of_this = in_line && client.asking_since >= client.awaited->at;
  if (message.kind == Message::Kind::kGranted && !is_of_this && message.token == client.token) {
    return;
  }
  if (asking) {
    Count(Thing::kMessagesBeforeAnswers);
    LoseAwaited(client);
    client.waits_for_answer = false;
    client.awaited = client.pending;
  }
  // Of a call that took over the place of another one it may be the other's message: then nobody
  // knows what becomes of this one.
  Sent& awaited = *client.awaited;
  const bool takes_over = client.asking_since < awaited.at;
  const bool ended =
      awaited.call.session && (takes_over || awaited.call.connection != client.connection);
  if (takes_over || ended) {
    Record(awaited, Answer::kLost, 0);
    if (client.told || ended) {
      // Nor whether what it says is older than what the client was told since, or than the end of
      // the connection that the hold is bound to: it asks anew.
      client.awaited.reset();
      if (client.waits_for_answer) return;
      if (client.cancelled) return BeIdle(number, 0, kMillisecond);
      UseNewId(client);
      client.doing = Doing::kAsking;
      return ActIn(number, 0, kMillisecond);
    }
    awaited.call.wait += std::chrono::ceil<Millis>(Micros{awaited.at - client.asking_since});
    awaited.at = client.asking_since;
    awaited.direct = false;
    awaited.queued = 0;
  }
  client.asking_since = kNever;
  TakeOutcome(number, message);
}

void Simulator::TakeOutcome(size_t number, const Message& message) {
  Client& client = clients_[number];
  const Sent sent = *std::exchange(client.awaited, std::nullopt);
  // What was asked meanwhile on the other connection goes on.
  const bool is_busy = client.waits_for_answer;
  switch (message.kind) {
    case Message::Kind::kGranted: {
      Count(Thing::kGrantsByMessage);
      Record(sent, Answer::kToken, message.token);
      highest_token_ = std::max(highest_token_, message.token);
      TakeGrant(sent, message.token);
      if (is_busy) return;
      if (client.cancelled) {
        client.tries = 0;
        client.doing = Doing::kReleasing;
        return ActIn(number, 0, kMillisecond);
      }
      Call call = client.asked;
      call.verb = Verb::kTouch;
      call.token = {};
      call.lease = Millis{random_.Between(1, longest_lease_)};
      client.doing = Doing::kHolding;
      // Some do not ask whether it is true.
      if (random_.OneIn(8) || (client.connection == kNone && !Connect(number))) {
        return ActIn(number, 0, kMillisecond);
      }
      return Send(number, call, Doing::kConfirming);
    }
    case Message::Kind::kTimeout:
      Count(Thing::kTimeoutsByMessage);
      Record(sent, Answer::kNull, 0);
      if (is_busy) return;
      return client.cancelled ? BeIdle(number, 0, kMillisecond) : TakeRefusal(number, sent.call);
    default:
      Count(Thing::kErrorsByMessage);
      if (message.demoted) Count(Thing::kWaitsEndedByDemotion);
      Record(sent, Answer::kError, 0);
      if (is_busy) return;
      if (client.cancelled) return BeIdle(number, 0, kMillisecond);
      client.doing = Doing::kAsking;
      return TakeError(number);
  }
}

void Simulator::TakeLoss(size_t number, const Message& message) {
  Client& client = clients_[number];
  Count(Thing::kLossesTold);
  const Call& call = client.asked;
  if (OwnerOfId(message.id) != call.owner) return;
  history_.operations.push_back({.verb = Verb::kLoss,
                                 .answer = Answer::kNo,
                                 .sharing = SharingOf(call.mode),
                                 .limit = static_cast<uint16_t>(call.limit),
                                 .weight = static_cast<uint16_t>(call.weight),
                                 .several = call.count > 1,
                                 .direct = client.direct,
                                 .lock = message.lock,
                                 .owner = call.owner,
                                 .server = client.pending.life,
                                 .token = message.token,
                                 .sent = now_,
                                 .answered = now_});
  if (message.token != client.token) return;
  // The server may know before the client that its connection is gone.
  const bool ended = call.session;
  LoseSession(client);
  // Some go on, and are refused.
  if (client.doing == Doing::kHolding && (ended || !random_.OneIn(3))) {
    BeIdle(number, 0, 4 * kMillisecond);
  }
}

// --- The network ------------------------------------------------------------------------------

// What is on its way is lost, and what comes later too.
void Simulator::Break(uint32_t number) {
  Count(Thing::kMessagesLost);
  Connection& connection = connections_[number];
  connection.broken = now_;
  if (!random_.OneIn(3)) {
    Push(now_ + random_.Between(100, 5 * kMillisecond), What::kClientLearns, connection.client,
         number);
  }
  const Time late = (random_.OneIn(3) ? 40 : 3) * kMillisecond;
  Push(now_ + random_.Between(0, late), What::kServerLearns, connection.server, number);
}

void Simulator::Arrive(const Event& event) {
  const Call& call = calls_[event.number];
  const Connection& connection = connections_[call.connection];
  Node& node = nodes_[connection.server];
  if (!node.up || !connection.open_at_server || !connection.open_at_client ||
      connection.broken != kNever) {
    return;
  }
  if (now_ < node.paused_until) {
    Push(node.paused_until, event.what, event.who, event.number);
    return;
  }
  node.server->Handle(call, NowOf(connection.server));
  // Others may arrive in the same pass of the event loop.
  TurnAt(connection.server, now_ + (random_.OneIn(2) ? 0 : random_.Between(0, 200)));
}

void Simulator::ServerLearns(uint32_t number) {
  Connection& connection = connections_[number];
  Node& node = nodes_[connection.server];
  if (!connection.open_at_server || !node.up) return;
  if (now_ < node.paused_until) {
    Push(node.paused_until, What::kServerLearns, connection.server, number);
    return;
  }
  connection.open_at_server = false;
  if (connection.counted) node.server->Unsubscribe(connection.client);
  if (!connection.subscriber) node.server->ConnectionClosed(number, NowOf(connection.server));
  TurnAt(connection.server, now_);
}

void Simulator::SendReplies(size_t node, bool to_waiters) {
  Server& server = *nodes_[node].server;
  for (const Reply& reply : server.TakeReplies(to_waiters)) {
    Connection& connection = connections_[reply.connection];
    highest_token_ = std::max(highest_token_, reply.token);
    const bool gone = !connection.open_at_client || connection.broken != kNever;
    // The server may learn just now that its client is gone.
    const bool learns = connection.open_at_server && gone && reply.waited &&
                        reply.answer == Answer::kToken && random_.OneIn(2);
    if (reply.waited) server.Replied(reply, connection.open_at_server && !learns);
    if (!connection.open_at_server) continue;
    if (learns) {
      connection.open_at_server = false;
      server.ConnectionClosed(reply.connection, NowOf(node));
    }
    if (gone) continue;
    if (loses_one_in_ > 0 && random_.OneIn(loses_one_in_)) {
      Break(reply.connection);
      continue;
    }
    const Time on_the_way = delay_ + (connection.direct ? 0 : random_.Between(0, jitter_));
    connection.last_out = std::max(connection.last_out, now_ + on_the_way);
    Push(connection.last_out, What::kReplyArrives, connection.client,
         static_cast<uint32_t>(replies_.size()));
    replies_.push_back(reply);
  }
  if (to_waiters) SendMessages(node);
}

// Each goes to who listens as far as the server knows.
void Simulator::SendMessages(size_t node) {
  for (const Message& message : nodes_[node].server->TakeMessages()) {
    highest_token_ = std::max(highest_token_, message.token);
    for (size_t i = 1; i < connections_.size(); ++i) {
      Connection& connection = connections_[i];
      if (!connection.counted || !connection.open_at_server ||
          connection.client != message.client || connection.server != node) {
        continue;
      }
      if (!connection.open_at_client || connection.broken != kNever) {
        Count(Thing::kMessagesMissed);
        continue;
      }
      if (loses_one_in_ > 0 && random_.OneIn(loses_one_in_)) {
        Count(Thing::kMessagesMissed);
        Break(static_cast<uint32_t>(i));
        continue;
      }
      const bool late = random_.OneIn(10);
      if (late) Count(Thing::kMessagesLate);
      const Time on_the_way = delay_ + (connection.direct ? 0 : random_.Between(0, jitter_)) +
                              (late ? random_.Between(0, 10 * kMillisecond) : 0);
      const bool held_up = connection.last_out > now_ + on_the_way;  // by one that is late
      connection.last_out = std::max(connection.last_out, now_ + on_the_way);
      Push(connection.last_out, What::kMessageArrives, connection.client,
           static_cast<uint32_t>(messages_.size()));
      messages_.push_back({.message = message,
                           .connection = static_cast<uint32_t>(i),
                           .life = nodes_[node].life,
                           .late = late || held_up});
    }
  }
}

// --- Servers ----------------------------------------------------------------------------------

FineInstant Simulator::WallOf(size_t node) const {
  return FineInstant{Micros{kWallAtStart + now_ + nodes_[node].clock_offset}};
}

Time Simulator::TimeOf(size_t node, Instant moment) const {
  return ToTime(moment.time_since_epoch()) - kWallAtStart - nodes_[node].clock_offset;
}

void Simulator::TurnAt(size_t node, Time at) {
  if (at >= nodes_[node].turn_at) return;
  nodes_[node].turn_at = at;
  Push(at, What::kServerTurns, node);
}

void Simulator::Turn(size_t number) {
  Node& node = nodes_[number];
  node.turn_at = kNever;
  SendReplies(number);  // what was held back
  node.server->Turn(NowOf(number));
  node.flushed = node.server->log().size();
  SendStream(number);
  if (slow_answers_ && random_.OneIn(2)) {
    SendReplies(number, /*to_waiters=*/false);
    TurnAt(number, now_ + random_.Between(0, kMillisecond));
  } else {
    SendReplies(number);
  }
  CheckServer(number);
  const Due due = node.server->NextDue();
  const Instant moment = NowOf(number).moment();
  if (due.IsDueAt(moment)) {
    TurnAt(number, now_);
  } else if (const auto later = due.NotBefore(moment); later.has_value()) {
    TurnAt(number, std::max(now_, TimeOf(number, *later)));
  }
}

void Simulator::CheckServer(size_t number) {
  Server& server = *nodes_[number].server;
  if (server.fault() != nullptr) Broken("C7", server.fault());
  if (server.LeavesSomebodyWaiting(NowOf(number))) {
    Broken("C4", "somebody waits whom the grant rule admits, and nobody will look after it");
  }
  if (server.KeepsSomebodyTooLong(TickNow())) {
    Broken("C4", "somebody waits though its time is over");
  }
}

void Simulator::SendStream(size_t number) {
  if (number != primary_) return;
  const size_t flushed = nodes_[number].flushed;
  for (size_t i = 0; i < server_count_; ++i) {
    Node& replica = nodes_[i];
    if (i == primary_ || !replica.linked || replica.on_the_way >= flushed) continue;
    replica.on_the_way = flushed;
    replica.last_arrival =
        std::max(replica.last_arrival, now_ + link_delay_ + random_.Between(0, link_delay_));
    Push(replica.last_arrival, What::kStreamArrives, i, static_cast<uint32_t>(flushed),
         replica.link);
  }
}

void Simulator::Deliver(size_t number, size_t until) {
  Node& replica = nodes_[number];
  const Node& primary = nodes_[primary_];
  for (; replica.applied < until; ++replica.applied) {
    replica.server->Apply(primary.server->log().Read(replica.applied));
  }
  replica.flushed = replica.server->log().size();
  if (replica.server->fault() != nullptr) Broken("C7", replica.server->fault());
  if (until == primary.server->log().size() && random_.OneIn(4)) Compare(number);
}

void Simulator::Compare(size_t number) {
  Count(Thing::kCopiesCompared);
  if (!nodes_[number].server->HasSameData(*nodes_[primary_].server)) {
    Broken("C7", "a replica differs from its primary");
  }
}

// --- What goes wrong --------------------------------------------------------------------------

Time Simulator::Longest() const {
  return (longest_lease_ + longest_linger_ + longest_wait_ + 5) * kMillisecond;
}

void Simulator::Note(Mark::Kind kind, uint32_t lock, Time begin, Time end, Time amount,
                     const char* what) {
  history_.marks.push_back({.kind = kind,
                            .lock = lock,
                            .begin = begin,
                            .end = end,
                            .amount = amount,
                            .what = story_ == nullptr ? "" : what});
}

// Tokens rise after a start as long as those that the server does not know of are covered by the
// margin: if they are not, its clock was wrong, and somebody sets it right.
void Simulator::KeepTokensPromise(size_t number) {
  const Node& node = nodes_[number];
  const bool knows_all = !lost_writes_ && highest_token_ > node.unknown_until;
  const Time wall = kWallAtStart + now_ + node.clock_offset;
  const Time missing = highest_token_ - wall - Micros{settings_.margin}.count();
  if (!knows_all && missing >= 0) StepClock(number, missing + 1);
}

size_t Simulator::FindReplica() const {
  for (size_t i = 0; i < server_count_; ++i) {
    const Node& node = nodes_[i];
    if (i != primary_ && node.up && node.linked && node.synced && now_ >= node.paused_until) {
      return i;
    }
  }
  return primary_;
}

void Simulator::Strike(Disaster disaster) {
  Node& primary = nodes_[primary_];
  // What ends in this very moment has not ended yet.
  if (now_ <= busy_until_ || !primary.up || now_ < primary.paused_until) return;
  switch (disaster) {
    case Disaster::kRestartWithAof:
    case Disaster::kRestartWithCutAof:
    case Disaster::kRestartWithRdb:
    case Disaster::kRestartWithNothing:
      lost_writes_ = disaster != Disaster::kRestartWithAof;
      disaster_ = disaster;
      Crash(primary_);
      busy_until_ = now_ + random_.Between(1, 6) * kMillisecond;
      Push(busy_until_, What::kRestarts, primary_);
      break;
    case Disaster::kFailover:
      BeginFailover(/*planned=*/false);
      break;
    case Disaster::kPlannedFailover:
      BeginFailover(/*planned=*/true);
      break;
    case Disaster::kCutLink: {
      const size_t replica = FindReplica();
      if (replica == primary_) break;
      Count(Thing::kLinksCut);
      nodes_[replica].linked = false;
      ++nodes_[replica].link;
      Push(now_ + random_.Between(1, 15) * kMillisecond, What::kRejoins, replica);
      break;
    }
    case Disaster::kPauseServer: {
      Count(Thing::kServerPauses);
      const Time until = now_ + random_.Between(1, 20) * kMillisecond;
      const size_t replica = FindReplica();
      if (replica != primary_ && random_.OneIn(4)) {
        nodes_[replica].paused_until = until;
        break;
      }
      primary.paused_until = until;
      Note(Mark::Kind::kUnavailable, kAllLocks, now_, until + kMillisecond, 0, "paused");
      break;
    }
    case Disaster::kForbidToPublish: {
      Count(Thing::kRightsTakenAway);
      const size_t client = random_.Below(static_cast<uint32_t>(client_count_));
      SetMayPublish(client, false);
      Push(now_ + random_.Between(1, 15) * kMillisecond, What::kMayPublishAgain, client);
      break;
    }
    case Disaster::kStepClock: {
      const Time most = random_.OneIn(4) ? 200 * kMillisecond : 10 * kMillisecond;
      StepClock(primary_, random_.Between(-most, most));
      break;
    }
    default:
      StrikeData(disaster);
      break;
  }
}

void Simulator::SetMayPublish(size_t client, bool may) {
  may_publish_[client] = may;
  for (size_t i = 0; i < server_count_; ++i) {
    nodes_[i].server->SetMayPublish(static_cast<uint32_t>(client), may);
  }
}

// What strangers do to the data, and what happens to its copies.
void Simulator::StrikeData(Disaster disaster) {
  Node& primary = nodes_[primary_];
  Server& server = *primary.server;
  const Instant moment = ToInstant(WallOf(primary_));
  const uint32_t lock = random_.Below(lock_count_);
  switch (disaster) {
    case Disaster::kDelete:
      Count(Thing::kDeletes);
      server.Delete(lock, NowOf(primary_));
      Note(Mark::Kind::kForced, lock, now_, now_, 0, "DEL");
      break;
    case Disaster::kFlush:
      Count(Thing::kFlushes);
      server.Flush(NowOf(primary_));
      Note(Mark::Kind::kForced, kAllLocks, now_, now_, 0, "FLUSHALL");
      break;
    case Disaster::kSet: {
      Count(Thing::kSets);
      const Millis ttl{random_.Between(1, 10)};
      server.Set(lock, "of-a-plain-client", moment + ttl, NowOf(primary_));
      Note(Mark::Kind::kForced, lock, now_, now_, ToTime(ttl) + 2 * kMillisecond, "SET");
      break;
    }
    case Disaster::kRename: {
      const uint32_t to = lock + 1;
      if (to >= lock_count_) break;
      Count(Thing::kRenames);
      server.Rename(lock, to, NowOf(primary_));
      Note(Mark::Kind::kForced, lock, now_, now_, 0, "RENAME");
      // What is brought here may last for longer by a clock that was set back before.
      Note(Mark::Kind::kForced, to, now_, now_, Longest() + set_back_, "RENAME");
      break;
    }
    default:
      Count(Thing::kAofRewrites);
      primary.base = server.Save(WallOf(primary_));
      primary.rdb = primary.base;
      primary.aof_from = server.log().size();
      primary.unknown_until = primary.base.clock.has_value() ? 0 : highest_token_;
      break;
  }
  TurnAt(primary_, now_);
}

// The server is gone from one moment to the next.
void Simulator::Crash(size_t number) {
  Node& node = nodes_[number];
  crashed_at_ = now_;
  node.up = false;
  node.turn_at = kNever;
  node.life = ++lives_;
  for (size_t i = 1; i < connections_.size(); ++i) {
    Connection& connection = connections_[i];
    if (connection.server != number || !connection.open_at_server) continue;
    connection.open_at_server = false;
    connection.broken = std::min(connection.broken, now_);
    if (random_.OneIn(4)) continue;
    Push(now_ + random_.Between(100, 4 * kMillisecond), What::kClientLearns, connection.client,
         static_cast<uint32_t>(i));
  }
  for (size_t i = 0; i < server_count_; ++i) {
    nodes_[i].linked = false;
    ++nodes_[i].link;
  }
}

void Simulator::Restart(size_t number) {
  Node& node = nodes_[number];
  const std::unique_ptr<Server> old = std::move(node.server);
  node.server = MakeServer();
  size_t kept = node.flushed;
  switch (disaster_) {
    case Disaster::kRestartWithCutAof:
      Count(Thing::kRestartsWithCutAof);
      kept = std::max(node.aof_from, kept - std::min<size_t>(kept, random_.Below(8)));
      break;
    case Disaster::kRestartWithRdb:
      Count(Thing::kRestartsWithRdb);
      node.base = node.rdb.value_or(Server::Copy());
      kept = node.aof_from;
      break;
    case Disaster::kRestartWithNothing:
      Count(Thing::kRestartsWithNothing);
      node.base = Server::Copy();
      node.rdb.reset();
      kept = node.aof_from;
      break;
    default:
      Count(Thing::kRestartsWithAof);
      break;
  }
  node.server->Load(node.base);
  for (size_t i = node.aof_from; i < kept; ++i) node.server->Apply(old->log().Read(i));
  if (node.server->fault() != nullptr) Broken("C7", node.server->fault());
  if (node.server->HasLongerLease()) Broken("C7", "a lease is longer after a restart");
  // What was not in the AOF yet had not been told to anybody.
  const bool all = !lost_writes_ && node.flushed == old->log().size();
  if (all && !node.server->HasSameData(*old)) {
    Broken("C7", "a restart does not bring back what was there");
  }
  node.aof_from = 0;
  node.flushed = node.server->log().size();
  Promote(number);
}

void Simulator::BeginFailover(bool planned) {
  const size_t replica = FindReplica();
  if (replica == primary_) return;
  Node& primary = nodes_[primary_];
  busy_until_ = now_ + random_.Between(1, 6) * kMillisecond;
  lost_writes_ = false;
  if (planned) {
    Count(Thing::kFailoversPlanned);
    primary.paused_until = busy_until_;
    crashed_at_ = now_;
    Push(busy_until_, What::kSwitches, replica);
    return;
  }
  lost_writes_ = lossy_ && !random_.OneIn(4);
  if (!lost_writes_) Deliver(replica, primary.flushed);
  Count(lost_writes_ ? Thing::kFailoversWithLoss : Thing::kFailoversWithoutLoss);
  Crash(primary_);
  Push(busy_until_, What::kPromotes, replica);
}

// The old primary has stopped to write, and its replica has everything.
void Simulator::Switch(size_t number) {
  Node& old = nodes_[primary_];
  SendReplies(primary_);
  old.flushed = old.server->log().size();
  Deliver(number, old.flushed);
  Compare(number);
  old.server->BecomeReplica(NowOf(primary_));
  SendReplies(primary_);
  TurnAt(primary_, now_);  // it tells those who wait by messages
  old.life = ++lives_;
  for (size_t i = 0; i < server_count_; ++i) {
    nodes_[i].linked = false;
    ++nodes_[i].link;
  }
  Promote(number);
}

// When writes were lost a hold that was released may be back, and live for longer by a step back of
// the clock. Nobody can tell then how long.
Time Simulator::ReturnedUntil(Time step) const {
  return lossy_ && step < 0 ? now_ - step + Longest() : now_;
}

// From now on this server decides.
void Simulator::Promote(size_t number) {
  Node& node = nodes_[number];
  const Time skew = node.clock_offset - nodes_[primary_].clock_offset;
  set_back_ += std::max(-skew, Time{0});
  if (skew != 0) {
    Note(Mark::Kind::kStep, kAllLocks, crashed_at_, now_, skew, "another server's clock");
  }
  const Time grace_end = now_ + ToTime(settings_.grace) + 3 * kMillisecond;
  Note(Mark::Kind::kUnavailable, kAllLocks, crashed_at_, std::max(grace_end, ReturnedUntil(skew)),
       0, "down, and in its grace");
  if (lost_writes_) Note(Mark::Kind::kLossy, kAllLocks, crashed_at_, now_, 0, "writes lost");
  primary_ = number;
  node.up = true;
  node.life = ++lives_;
  node.linked = false;
  KeepTokensPromise(number);
  node.unknown_until = 0;  // its floor goes into its log
  busy_until_ = now_ + 1;
  node.server->BecomePrimary();
  if (node.server->HasLongerLease()) Broken("C7", "a lease is longer after a failover");
  TurnAt(number, now_);
  for (size_t i = 0; i < server_count_; ++i) {
    if (i == primary_) continue;
    nodes_[i].synced = false;
    Push(now_ + random_.Between(1, 12) * kMillisecond, What::kRejoins, i);
  }
}

void Simulator::Rejoin(size_t number) {
  Node& node = nodes_[number];
  Node& primary = nodes_[primary_];
  if (number == primary_ || node.linked) return;
  if (!primary.up || now_ < primary.paused_until || now_ < node.paused_until) {
    Push(now_ + 2 * kMillisecond, What::kRejoins, number);
    return;
  }
  node.linked = true;
  ++node.link;
  node.last_arrival = now_;
  if (node.synced && random_.OneIn(2)) {  // it goes on where the link was cut
    node.on_the_way = node.applied;
    SendStream(primary_);
    return;
  }
  Count(Thing::kFullSyncs);
  // One that is up goes on with what it remembers: it may have been a primary.
  if (!node.up) node.server = MakeServer();
  node.base = primary.server->Save(WallOf(primary_));
  node.server->Load(node.base);
  if (node.server->fault() != nullptr) Broken("C7", node.server->fault());
  node.unknown_until = node.base.clock.has_value() ? 0 : highest_token_;
  node.up = true;
  node.synced = true;
  node.life = ++lives_;
  node.turn_at = kNever;
  node.aof_from = 0;
  node.flushed = 0;
  node.applied = primary.server->log().size();
  node.on_the_way = node.applied;
  Compare(number);
  TurnAt(number, now_);  // it may have answers to send
  TurnAt(primary_, now_);
}

void Simulator::StepClock(size_t number, Time amount) {
  Count(Thing::kClockSteps);
  nodes_[number].clock_offset += amount;
  set_back_ += std::max(-amount, Time{0});
  Note(Mark::Kind::kStep, kAllLocks, now_, now_, amount, "clock");
  const Time grace_end = TimeOf(number, nodes_[number].server->GraceEnd()) + 3 * kMillisecond;
  const Time until = std::max(grace_end, ReturnedUntil(amount));
  if (until > now_) {
    Note(Mark::Kind::kUnavailable, kAllLocks, now_, until, 0, "in its grace, for longer");
  }
  TurnAt(number, now_);
}

}  // namespace turnstile::fault
