// Storms: histories of everything that clients, strangers and servers can do to a primary and its
// replica, over several databases, checked after every step.
//
// The simulator (tests/fault/simulator) judges what clients were told; here the state is judged, by
// what the contract says about one step: what was there before, what was done, what is there now.
// Nothing else is remembered of a lock. What happens is chosen by whoever makes the storm: a seeded
// generator (storm_test.cc) or the bytes of a fuzzer (tests/fuzz/sequence_fuzz.cc).

#ifndef TURNSTILE_TESTS_SIM_STORM_H_
#define TURNSTILE_TESTS_SIM_STORM_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <variant>
#include <vector>

#include "sim/sim_host.h"

namespace turnstile::sim {

// Where the choices of a storm come from.
class Choices {
 public:
  // A number from 0 to bound - 1.
  virtual uint64_t Below(uint64_t bound) = 0;
  // Whether there are no more. Then each is the largest that it can be.
  virtual bool at_end() const = 0;

 protected:
  ~Choices() = default;
};

class SeededChoices final : public Choices {
 public:
  explicit SeededChoices(uint64_t seed) : random_(seed) {}
  uint64_t Below(uint64_t bound) override { return random_() % bound; }
  bool at_end() const override { return false; }

 private:
  std::mt19937_64 random_;
};

// A byte for each choice, two if one is too few.
class ByteChoices final : public Choices {
 public:
  explicit ByteChoices(std::span<const uint8_t> bytes) : bytes_(bytes) {}
  uint64_t Below(uint64_t bound) override;
  bool at_end() const override { return bytes_.empty(); }

 private:
  uint64_t Next();

  std::span<const uint8_t> bytes_;
};

class Storm {
 public:
  explicit Storm(Choices& choices);
  ~Storm();
  Storm(const Storm&) = delete;
  Storm& operator=(const Storm&) = delete;

  // Runs so many steps, or until the choices end, and then until nobody waits any more. Returns
  // what is wrong; nothing if all is well.
  std::string Run(int steps);
  // What happened, step by step.
  const std::string& story() const { return story_; }

 private:
  // A hold as it is stored.
  struct StoredHold {
    int db = 0;
    std::string key;
    std::string owner;
    Token token;
    Instant end;
    Millis linger{0};
    uint32_t count = 1;
    uint32_t weight = 1;
    Instant since;
    std::optional<Instant> cap;
    std::string tag;
    Mode mode = Mode::kExclusive;
    std::optional<uint64_t> bound_to;
    std::optional<Instant> expiry;  // of the key

    Instant blocks_until() const { return end + linger; }
    // It has ended with its connection and been told as lost; it only lingers.
    bool was_told() const { return end == kMinInstant; }
  };
  using Holds = std::vector<StoredHold>;

  // What a call that waits has asked for.
  struct Asked {
    uint64_t connection = 0;
    int db = 0;
    std::vector<std::string> keys;
    std::string owner;
    std::string user;
    Mode mode = Mode::kExclusive;
    uint32_t limit = 1;
    bool session = false;
    Millis lease{0};
    Millis linger{0};
    bool reentrant = false;
    uint32_t weight = 1;
    Millis max_hold{0};
    std::string tag;
    std::optional<std::pair<std::string, std::string>> notify;  // channel and id
    std::optional<Token> floor;
    uint64_t arrival = 0;
    bool upgrade = false;
    bool holds_plain = false;  // when the pass begins in which it is answered
    bool is_queued = true;
    bool ends_later = false;  // it is still in its queues until the next pass
    bool lost_slot = false;   // it has been refused, and may be told later
    Tick until;

    bool IsFor(int database, std::string_view key) const;
    bool IsForAny(int database, const std::vector<std::string>& names) const;
  };

  struct Event {
    int db;
    std::string key;
    LockEvent event;
    std::optional<Loss> how;
  };

  // A message of the primary.
  struct Message {
    std::string channel;
    std::string id;
    std::string user;
    std::string key;
    std::variant<WaitAnswer, HoldLoss> what;
    size_t receivers;
    size_t answers_before;  // how many blocked calls of the pass had been answered
  };
  // What is to be published when a hold is lost.
  struct Binding {
    std::string channel;
    std::string id;
    Token token;
  };
  using HoldName = std::tuple<int, std::string, std::string>;

  // What the server has counted.
  struct Counters {
    uint64_t acquired_immediately;
    uint64_t acquired_after_wait;
    uint64_t reacquired;
    uint64_t lost;
  };
  // What there was before a step.
  struct Before {
    Holds holds;
    Counters counters;
  };

  // What may have become of holds in a step.
  struct Deed {
    std::string what;
    // The owner gives this hold up; the step may end it though it keeps others out.
    std::function<bool(const StoredHold&)> gives_up = nullptr;
    std::function<bool(const StoredHold&)> may_end = nullptr;
    std::set<Token> granted{};      // holds may be replaced by others of their owners under these
    bool moves_away = false;        // to another node: what is live is not lost
    Loss in_force = Loss::kForced;  // how a hold is lost that could have stayed
    bool brings = false;            // holds come that nobody acquired
    std::optional<std::pair<int, std::string>> renamed{};  // is not counted again when it ends
    // What was here has gone, also if the like is here again; and what was in these two databases
    // is in the other one.
    std::optional<std::pair<int, std::string>> overwritten{};
    std::optional<std::pair<int, int>> swapped{};

    int DbAfter(int db) const;
  };

  // A request as words. The keys are the first word and those after ALSO.
  struct Words {
    std::vector<std::string> words;
    std::vector<std::string> keys;
    std::string owner;

    std::vector<std::string_view> views() const { return {words.begin(), words.end()}; }
    std::vector<std::string_view> key_views() const { return {keys.begin(), keys.end()}; }
    bool Names(std::string_view key) const;
  };

  // --- Choices

  uint64_t Below(uint64_t bound) { return choices_.Below(bound); }
  bool OneIn(uint64_t n) { return Below(n) == 0; }
  int AnyDb();
  const std::string& AnyKey();
  const std::string& AnyOwner();
  Caller AnyCaller();
  Words AnyWords();
  Millis AnyLease();

  // --- The story

  void Wrong(const std::string& what);
  void Tell(const std::string& what);

  // --- What clients do

  void Acquire();
  void Ask(const Caller& caller, const Words& words, const AcquireRequest& request);
  void GrantedAtOnce(const Asked& asked, const AcquireRequest& request, Token token,
                     const Before& before);
  void StandInLine(uint64_t tag, Asked asked, uint32_t max_line);
  void Retract(const Asked& asked, bool waits);
  void CheckLineIsFull(const Asked& asked, uint32_t max_line);
  void Release();
  void Touch();
  void Fence();
  void Leave();
  void Hangup(uint64_t connection);

  // --- What others do

  void Meddle();
  void ExpireKeys();
  void Change();
  void MoveSlot();
  void SetClockBack();
  void ToggleConsumers();
  void Synchronise();
  void Restart();
  void Replace(std::unique_ptr<SimHost> again);
  void FailOver();
  void RoleChanged();
  void Permit();
  void Watch(SimHost& host);

  // --- Time

  void Step();
  void Pass();
  // What is found in a pass about those who waited.
  struct PassGrants {
    Deed deed;
    size_t granted = 0;
    size_t held_already = 0;
    std::map<std::pair<int, std::string>, Asked> last;  // of the new holders of each lock
  };
  void Answer(const Answered& answered, const Holds& before, PassGrants& grants);
  void Hear(const Message& message, const Holds& before, PassGrants& grants);
  void HearLoss(const Message& message, const HoldLoss& loss);
  void Granted(const Asked& asked, Token token, const Holds& before, PassGrants& grants);
  void Deliver();
  void Deliver(const Answered& answered);
  void GrantedAfterWait(const Asked& asked, Token token, const Holds& before);
  void CheckAnswer(const Asked& asked, const WaitAnswer& answer);
  void ComeToRest();

  // --- What is there

  Holds Look() const;
  static const StoredHold* Find(const Holds& holds, int db, std::string_view key,
                                std::string_view owner);
  // Whether it is live as far as the server can see; and whether nothing but its owner or a
  // stranger may end it now.
  bool IsLive(const StoredHold& hold) const;
  bool MustStay(const StoredHold& hold) const;
  const StoredHold* FindLive(const Holds& holds, int db, std::string_view key,
                             std::string_view owner) const;
  bool HoldsPlain(int db, std::string_view key, std::string_view owner) const;
  bool IsOther(int db, std::string_view key) const;
  bool HasWork() const;
  bool Waits(int db, std::string_view key, std::string_view owner) const;
  bool HasPerhapsEnded(const Asked& asked) const;

  // --- What must be so

  Counters Count() const;
  size_t Unreceived() const;
  Before Begin();
  // Every hold that has gone, and every one that has come, is explained by what was done, told to
  // subscribers, and counted.
  void Reckon(const Before& before, const Deed& deed);
  void CheckEvents(const Holds& before, const Holds& after, const Deed& deed, const Holds& lost,
                   const Holds& perhaps_lost, size_t given_up);
  void CheckGrant(const Asked& asked, Token token, const Holds& before);
  void CheckOrder(const Asked& asked);
  void CheckRoom(int db, std::string_view key, Mode mode, uint32_t limit, bool waited);
  void CheckCycle(const Asked& asker, const std::vector<ParkResult::Step>& cycle);
  void CheckStored();
  void CheckCopies();
  void CheckWaits();
  void CheckSessions();
  void CheckTtls();
  void CheckTakenBack();
  // Whoever is to be told that it has lost a hold has been told, if nothing is pending.
  void CheckLossesAreTold();
  void CheckFloorOfStart();
  void Check();

  // The owner has been told of its hold by another call.
  void Heard(Token token);
  // Holds may be elsewhere now, or come back.
  void Displace();
  void Bind(Token token, const std::vector<std::string>& keys, std::optional<uint64_t> connection);
  void BindChannel(const Asked& asked, Token token, const Holds& before);
  bool IsBound(const HoldName& name) const;
  void ForgetChannels();
  void UnbindChannels(const std::function<bool(const HoldName&)>& which);
  // Holds that a stranger takes elsewhere or brings back are ordinary ones from then on.
  void Unbind(int db, std::string_view key);
  void Replicate(size_t but_for = 0);

  Choices& choices_;
  Now now_{.wall = FineInstant{std::chrono::hours{24 * 365 * 50}},
           .steady = FineTick{std::chrono::hours{100}}};
  std::unique_ptr<SimHost> primary_;
  std::unique_ptr<SimHost> replica_;
  size_t applied_ = 0;                             // how much of the primary's log the replica has
  std::map<const SimHost*, SimHost::Copy> bases_;  // what each one's log begins with
  size_t budget_ = 5'000;
  // What most requests of this storm have in common, if anything: many holders and long lines come
  // of that.
  bool one_database_ = false;
  size_t hot_key_ = 0;
  uint64_t usual_mode_ = 0;
  Millis set_back_{0};  // so much the wall clock was
  uint64_t next_connection_ = 1;
  uint64_t next_tag_ = 1;
  uint64_t arrivals_ = 0;
  Token highest_;
  std::optional<Instant> promoted_;
  bool floor_is_checked_ = true;  // since then

  std::map<uint64_t, Asked> waiting_;  // by tag
  std::vector<uint64_t> sessions_;     // connections that may have a hold bound to them
  std::map<std::pair<Token, std::string>, uint64_t> bound_;  // to which connection
  std::set<uint64_t> gone_;                                  // connections
  std::vector<Answered> in_flight_;
  // Of these grants nobody but the answer on its way tells; and those whose answer was lost. Those
  // that a stranger may have taken elsewhere (true) may be taken back, the others have to be.
  std::map<Token, bool> untold_;
  std::map<Token, bool> undelivered_;
  std::set<std::string> strange_ttls_;  // names of keys whose TTL a failover has made permanent

  std::optional<Holds> seen_;  // what there was after the last step
  std::vector<Event> events_;
  std::vector<Message> messages_;
  std::map<const SimHost*, size_t> unreceived_;  // grants that were published to nobody
  std::map<HoldName, Binding> bindings_;
  std::vector<std::pair<HoldName, Binding>> losses_to_tell_;  // of holds before those
  std::vector<std::pair<HoldName, Binding>> perhaps_told_;    // of holds that went elsewhere
  size_t warnings_ = 0;
  // Tokens of holds that were counted as lost when their key was renamed; and of those of whom that
  // is not certain, because another server counted.
  std::multiset<Token> counted_;
  std::set<Token> doubtful_;

  std::string wrong_;
  std::string story_;
};

}  // namespace turnstile::sim

#endif  // TURNSTILE_TESTS_SIM_STORM_H_
