// Small worlds in simulated time: servers of the pure core, clients, a network between them, and
// whatever can go wrong. Each world, a schedule, follows from its seed; it writes a history, which
// the checker judges as it judges those of real servers.
//
// What is not about histories is checked here, as C7 and C8: copies agree when nothing is on its
// way between them, a restart brings back what was there, no lease gets longer, and nothing is left
// of those who waited. That nobody waits whom the grant rule admits is looked at after every pass
// of a server (C4).

#ifndef TURNSTILE_TESTS_FAULT_SIMULATOR_SIMULATOR_H_
#define TURNSTILE_TESTS_FAULT_SIMULATOR_SIMULATOR_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "fault/checker/checker.h"
#include "fault/checker/exemptions.h"
#include "fault/history.h"
#include "fault/simulator/server.h"

namespace turnstile::fault {

// What happens in schedules. One in which nothing happens proves nothing.
enum class Thing : uint8_t {
  kOperations,
  kHolds,
  kWaits,
  kOrdered,
  kWrites,
  kWritesRefused,
  kHandedOver,
  kSharedGrants,
  kLimitGrants,
  kGrantsOfSeveral,
  kGrantsThatLinger,
  kReentries,
  kUpgrades,
  kDowngrades,
  kFloors,
  kHeavyGrants,
  kCappedGrants,
  kLeasesCut,
  kTaggedGrants,
  kKeptFromLines,
  kOtherWeightsRefused,
  kInLine,
  kGrantsByMessage,
  kGrantsConfirmed,
  kGrantsNotConfirmed,
  kTimeoutsByMessage,
  kErrorsByMessage,
  kWaitsEndedByDemotion,
  kMessagesOfFormerPrimaries,
  kMessagesBeforeAnswers,
  kMessagesMissed,
  kMessagesLate,
  kGrantsSentToNobody,
  kLossesTold,
  kSubscriptions,
  kSubscriptionsLost,
  kCancelledInLine,
  kPlacesTakenOver,
  kSuperseded,
  kRightsTakenAway,
  kNotifyRefused,
  kAskedAgain,
  kTimedOut,
  kGrantsTakenBack,
  kSessionsEnded,
  kStrangersReleases,
  kMessagesLost,
  kClientDeaths,
  kClientPauses,
  kServerPauses,
  kRestartsWithAof,
  kRestartsWithCutAof,
  kRestartsWithRdb,
  kRestartsWithNothing,
  kFailoversWithLoss,
  kFailoversWithoutLoss,
  kFailoversPlanned,
  kLinksCut,
  kFullSyncs,
  kAofRewrites,
  kDeletes,
  kFlushes,
  kSets,
  kRenames,
  kClockSteps,
  kCopiesCompared,
  kThings,
};
inline constexpr size_t kThings = static_cast<size_t>(Thing::kThings);
using Tally = std::array<uint64_t, kThings>;
const char* NameOf(Thing thing);

// xorshift64*: small, fast, and good enough to choose what happens.
class Random {
 public:
  explicit Random(uint64_t seed = 1);

  uint64_t Next() {
    state_ ^= state_ >> 12;
    state_ ^= state_ << 25;
    state_ ^= state_ >> 27;
    return state_ * 0x2545F4914F6CDD1DULL;
  }
  uint32_t Below(uint32_t bound) {
    return static_cast<uint32_t>((Next() >> 32) * uint64_t{bound} >> 32);
  }
  // Both ends are possible.
  int64_t Between(int64_t least, int64_t most) {
    return least + Below(static_cast<uint32_t>(most - least + 1));
  }
  bool OneIn(uint32_t n) { return Below(n) == 0; }

 private:
  uint64_t state_;
};

class Simulator {
 public:
  explicit Simulator(const Exemptions& exemptions = {});
  ~Simulator();
  Simulator(const Simulator&) = delete;
  Simulator& operator=(const Simulator&) = delete;

  // Runs the schedule of a seed and checks it. Empty: nothing is wrong. If there is a `story`,
  // everything that happens is told there.
  std::vector<Violation> Run(uint64_t seed, std::ostream* story = nullptr);

  // Of the last schedule.
  const History& history() const { return history_; }

  // What would be called wrong in the last history without an exemption.
  std::vector<Violation> JudgeWithout(Exemption exemption) const;

  // Of all schedules.
  const Tally& tally() const { return tally_; }

 private:
  static constexpr size_t kServers = 3;

  static constexpr Time kNever = std::numeric_limits<Time>::max();
  static constexpr uint32_t kNone = 0;  // no connection

  enum class What : uint8_t {
    kClientActs,
    kClientGivesUp,
    kRequestArrives,
    kReplyArrives,
    kClientLearns,  // that its connection is gone
    kServerLearns,
    kServerTurns,
    kStreamArrives,
    kDisaster,
    kRestarts,
    kPromotes,
    kSwitches,  // the end of a planned failover
    kRejoins,
    kBreaks,  // a connection
    kSubscribes,
    kSubscribed,
    kMessageArrives,
    kMayPublishAgain,
  };
  struct Event {
    Time at = 0;
    uint32_t order = 0;  // among those of one moment
    What what = What::kClientActs;
    uint8_t who = 0;  // which client or server
    uint32_t number = 0;
    uint32_t generation = 0;  // an event of an older one is void
  };
  enum class Disaster : uint8_t {
    kRestartWithAof,
    kRestartWithCutAof,
    kRestartWithRdb,
    kRestartWithNothing,
    kFailover,
    kPlannedFailover,
    kCutLink,
    kPauseServer,
    kDelete,
    kFlush,
    kSet,
    kRename,
    kStepClock,
    kForbidToPublish,
    kRewriteAof,
  };
  enum class Doing : uint8_t {
    kIdle,
    kSubscribing,
    kAsking,
    kAwaiting,    // a message
    kConfirming,  // what a message said
    kHolding,
    kUsing,
    kReleasing
  };

  struct Connection {
    uint8_t client = 0;
    uint8_t server = 0;
    bool direct = true;
    bool open_at_client = true;
    bool open_at_server = true;
    bool subscriber = false;  // only messages come here,
    bool counted = false;     // and the server knows that
    Time broken = kNever;     // since when nothing gets through any more
    Time last_in = 0;
    Time last_out = 0;
  };
  // A request that was sent.
  struct Sent {
    Call call;
    Time at = 0;
    Time queued = 0;
    uint32_t life = 0;  // of the server that it was sent to
    bool direct = true;
    bool retry = false;
    bool stranger = false;
    bool bound = false;
  };
  struct Client {
    Doing doing = Doing::kIdle;
    bool direct = true;
    bool asked_before = false;  // for the same hold
    bool waits_for_answer = false;
    uint32_t connection = kNone;
    uint32_t subscription = kNone;
    bool subscribed = false;        // and the server has said so
    uint32_t generation = 0;        // of what it is about to do
    Call asked;                     // for the locks that it wants or holds
    Sent pending;                   // that is not answered
    std::optional<Sent> awaited;    // that is in line, and a message is to tell of it
    Time asking_since = kNever;     // by the present id
    size_t asks = 0;                // by it
    uint32_t ids = 0;               // that were used for this hold
    std::optional<uint32_t> bound;  // the id that its hold is bound to
    bool cancelled = false;         // it does not want what it waits for any more
    bool told = false;              // of a hold, ever
    int64_t token = 0;
    Time hold_until = 0;
    int releases = 0;       // that are needed, as far as it knows
    bool changing = false;  // it asks for it in the other mode
    int deeds = 0;          // with this hold
    int tries = 0;
  };
  struct Node {
    std::unique_ptr<Server> server;
    bool up = true;
    uint32_t life = 0;
    Time paused_until = 0;
    Time turn_at = kNever;
    Time clock_offset = 0;
    size_t flushed = 0;   // so much of its log is in its AOF and on its way to replicas
    Server::Copy base;    // what its AOF begins with,
    size_t aof_from = 0;  // and where in the log it goes on
    std::optional<Server::Copy> rdb;
    int64_t unknown_until = 0;  // tokens up to this are in none of that
    // As a replica:
    bool linked = false;
    bool synced = false;  // it has data of its primary
    uint32_t link = 0;    // generation
    size_t applied = 0;   // of the primary's log
    size_t on_the_way = 0;
    Time last_arrival = 0;
  };

  void Begin(uint64_t seed);
  void ChooseWorld();
  void ChooseDisasters();
  void Handle(const Event& event);
  void Finish();
  std::vector<Violation> Judge();
  Findings JudgeHistory(const Exemptions& exemptions) const;
  int64_t TokenOf(const Operation& op) const;
  bool IsExcused(const Violation& violation, const Exemptions& exemptions) const;
  void Push(Time at, What what, size_t who, uint32_t number = 0, uint32_t generation = 0);
  void Broken(const char* check, const std::string& text);
  void Count(Thing thing, uint64_t times = 1) { tally_[static_cast<size_t>(thing)] += times; }

  // --- Clients

  void ActIn(size_t client, Time least, Time most);
  void Act(size_t number);
  bool Connect(size_t number);
  void ChooseRequest(Client& client);
  Token FloorAbove(int64_t token);
  void Ask(size_t number);
  void AskAgain(size_t number);
  static void ToggleMode(Client& client);
  void UseHold(size_t number);
  void WriteOutside(Client& client);
  void Send(size_t number, const Call& call, Doing doing);
  void Record(const Sent& sent, Answer answer, int64_t token);
  void TakeReply(size_t number, const Reply& reply);
  void TakeGrant(const Sent& sent, int64_t token);
  void TakeError(size_t number);
  void TakeRefusal(size_t number, const Call& call);
  void LoseCall(size_t number);
  void Die(size_t number);
  void Close(size_t number);
  void LoseSession(Client& client);
  void BeIdle(size_t client, Time least, Time most);

  // --- Clients that are notified

  bool NeedsSubscription(const Client& client) const;
  void Subscribe(size_t number);
  void CloseSubscription(Client& client);
  void LoseSubscription(size_t number);
  void UseNewId(Client& client);
  void StandInLine(size_t number);
  void ActInLine(size_t number);
  void LoseAwaited(Client& client);
  void TakeMessage(size_t number, const Message& message);
  void TakeOutcome(size_t number, const Message& message);
  void TakeLoss(size_t number, const Message& message);

  // --- The network

  void Break(uint32_t number);
  void Arrive(const Event& event);
  // Those who waited may have to wait a little longer, while others are served.
  void SendReplies(size_t node, bool to_waiters = true);
  void SendMessages(size_t node);
  void SubscriberArrives(uint32_t number);
  void ServerLearns(uint32_t number);

  // --- Servers

  FineInstant WallOf(size_t node) const;
  FineTick TickNow() const { return FineTick{Micros{now_}}; }
  Now NowOf(size_t node) const { return {.wall = WallOf(node), .steady = TickNow()}; }
  Time TimeOf(size_t node, Instant moment) const;
  void TurnAt(size_t node, Time at);
  void Turn(size_t number);
  void SendStream(size_t number);
  void Deliver(size_t number, size_t until);
  void Compare(size_t number);
  void CheckServer(size_t number);

  // --- What goes wrong

  std::unique_ptr<Server> MakeServer();
  void Strike(Disaster disaster);
  void SetMayPublish(size_t client, bool may);
  void StrikeData(Disaster disaster);
  void Crash(size_t number);
  void Restart(size_t number);
  void Promote(size_t number);
  void BeginFailover(bool planned);
  void Switch(size_t number);
  void Rejoin(size_t number);
  void StepClock(size_t number, Time amount);
  void KeepTokensPromise(size_t number);
  size_t FindReplica() const;
  void Note(Mark::Kind kind, uint32_t lock, Time begin, Time end, Time amount, const char* what);
  // After this, nothing that was asked before has an effect any more.
  Time Longest() const;
  Time ReturnedUntil(Time step) const;

  const Exemptions exemptions_;
  Random random_;
  Time now_ = 0;

  // The world.
  Time horizon_ = 0;  // nothing new begins after
  size_t client_count_ = 0;
  size_t server_count_ = 0;
  uint32_t lock_count_ = 0;
  std::array<Sharing, kLocks> styles_{};
  std::array<uint16_t, kLocks> limits_{};
  bool lossy_ = false;  // writes may be lost, and a grace is set
  bool has_sessions_ = false;
  bool slow_answers_ = false;
  uint32_t notifies_one_in_ = 0;  // 0: nobody is notified
  bool has_caps_ = false;
  Server::Settings settings_;
  Time delay_ = 0;
  Time jitter_ = 0;
  Time link_delay_ = 0;
  uint32_t loses_one_in_ = 0;
  int64_t longest_lease_ = 0;
  int64_t longest_linger_ = 0;
  int64_t longest_wait_ = 0;

  std::vector<Event> events_;  // a heap
  uint32_t order_ = 0;
  std::array<Client, kMostClients> clients_;
  std::array<Node, kServers> nodes_;
  size_t primary_ = 0;
  Time busy_until_ = 0;  // with the last disaster
  Time crashed_at_ = 0;
  Disaster disaster_ = Disaster::kRestartWithAof;  // the last that took the primary down
  bool lost_writes_ = false;                       // by it
  uint32_t lives_ = 0;
  uint32_t next_owner_ = 0;
  std::vector<Connection> connections_;  // the first is nobody's
  std::vector<Call> calls_;
  std::vector<Reply> replies_;
  struct SentMessage {
    Message message;
    uint32_t connection;
    uint32_t life;  // of the server that published it
    bool late;
  };
  std::vector<SentMessage> messages_;
  std::array<bool, kMostClients> may_publish_{};
  std::array<int64_t, kLocks> register_{};  // the highest token that it was shown
  int64_t highest_token_ = 0;               // that was told
  Time set_back_ = 0;                       // by all steps back of the clocks
  Server::Ledger ledger_{};
  History history_;
  std::vector<Violation> violations_;
  std::ostream* story_ = nullptr;
  Tally tally_{};
};

}  // namespace turnstile::fault

#endif  // TURNSTILE_TESTS_FAULT_SIMULATOR_SIMULATOR_H_
