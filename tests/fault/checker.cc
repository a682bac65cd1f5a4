#include "fault/checker.h"

#include <algorithm>
#include <array>
#include <limits>
#include <map>
#include <numeric>
#include <optional>
#include <span>
#include <sstream>
#include <tuple>
#include <utility>

namespace turnstile::fault {
namespace {

constexpr int64_t kTokensEnd = int64_t{1} << 53;
constexpr Time kNever = std::numeric_limits<Time>::max();

// A span of time in which an owner certainly holds the lock: from an answer until the earliest end
// that its lease can have.
struct Certain {
  size_t op = 0;  // whose answer said so
  Time from = 0;
  Time until = 0;
  Time closed_until = 0;    // so long it keeps others out: it may linger
  Time entitled_until = 0;  // until the server may have forgotten, which is not before
};

// One hold of which a client was told.
struct Hold {
  size_t op = 0;  // that told it first
  uint32_t owner = 0;
  int64_t token = 0;
  Sharing sharing = Sharing::kExclusive;
  uint16_t limit = 1;
  std::vector<Certain> certain;
  Time possible_until = 0;  // it may keep others out for so long,
  Time live_until = 0;      // and be its owner's;
  Time over_at = 0;         // without a step of the clock it surely is over then
  bool revived = false;     // and yet it was live later
  bool may_write = false;   // it is kShared at least, and perhaps kExclusive
};

struct Span {
  Time from = 0;
  Time until = 0;
};

// Disjoint spans in order.
class Spans {
 public:
  void Assign(std::vector<Span> spans) {
    std::sort(spans.begin(), spans.end(),
              [](const Span& a, const Span& b) { return a.from < b.from; });
    spans_.clear();
    for (const Span& span : spans) {
      if (!spans_.empty() && span.from <= spans_.back().until) {
        spans_.back().until = std::max(spans_.back().until, span.until);
      } else {
        spans_.push_back(span);
      }
    }
  }

  // How much of the time between `from` and `until` they cover.
  Time Within(Time from, Time until) const {
    Time sum = 0;
    for (auto span = FirstEndingAfter(from); span != spans_.end() && span->from < until; ++span) {
      sum += std::min(span->until, until) - std::max(span->from, from);
    }
    return sum;
  }

  std::vector<Span>::const_iterator FirstEndingAfter(Time time) const {
    return std::partition_point(spans_.begin(), spans_.end(),
                                [&](const Span& span) { return span.until <= time; });
  }

  const std::vector<Span>& all() const { return spans_; }

 private:
  std::vector<Span> spans_;
};

bool IsRequest(const Operation& op) { return op.verb != Verb::kWrite && op.verb != Verb::kClose; }
bool IsAnswered(const Operation& op) { return op.answer != Answer::kLost; }
bool IsGrant(const Operation& op) {
  return op.verb == Verb::kAcquire && op.answer == Answer::kToken;
}

class Checker {
 public:
  Checker(const History& history, const Rules& rules)
      : ops_(history.operations), marks_(history.marks), rules_(rules) {}

  Findings Run() {
    findings_.operations = ops_.size();
    std::vector<Span> unavailable;
    for (const Mark& mark : marks_) {
      if (mark.kind == Mark::Kind::kUnavailable) unavailable.push_back({mark.begin, mark.end});
    }
    unavailable_.Assign(std::move(unavailable));
    is_new_.assign(ops_.size(), false);
    is_rightful_.assign(ops_.size(), false);
    FindArrivals();

    std::vector<size_t> order(ops_.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
      return std::tuple(ops_[a].lock, ops_[a].sent, a) < std::tuple(ops_[b].lock, ops_[b].sent, b);
    });
    for (auto begin = order.begin(); begin != order.end();) {
      const uint32_t lock = ops_[*begin].lock;
      const auto end =
          std::find_if(begin, order.end(), [&](size_t op) { return ops_[op].lock != lock; });
      CheckLock(lock, {begin, end});
      begin = end;
    }
    std::stable_sort(findings_.violations.begin(), findings_.violations.end(),
                     [](const Violation& a, const Violation& b) { return a.when < b.when; });
    return std::move(findings_);
  }

 private:
  using Indices = std::span<const size_t>;

  void Report(const char* check, std::string text, std::vector<size_t> operations) {
    const Operation& last = ops_[operations.back()];
    findings_.violations.push_back(
        {check, std::move(text), last.lock, last.answered, std::move(operations)});
  }

  // A server takes requests in the order in which they arrive, and answers those of a pass of its
  // event loop at the pass's end. So what was sent before another request, which has been answered,
  // had arrived by then.
  void FindArrivals() {
    arrived_before_.assign(ops_.size(), 0);
    std::vector<size_t> by_sent;
    std::vector<size_t> by_answer;
    for (size_t i = 0; i < ops_.size(); i++) {
      if (!IsRequest(ops_[i]) || !ops_[i].direct) continue;
      by_sent.push_back(i);
      if (IsAnswered(ops_[i])) by_answer.push_back(i);
    }
    const auto by = [&](auto field) {
      return [this, field](size_t a, size_t b) { return ops_[a].*field < ops_[b].*field; };
    };
    std::sort(by_sent.begin(), by_sent.end(), by(&Operation::sent));
    std::sort(by_answer.begin(), by_answer.end(), by(&Operation::answered));
    std::map<uint32_t, Time> arrived;  // by server: everything that was sent before this
    auto answer = by_answer.begin();
    for (const size_t i : by_sent) {
      for (; answer != by_answer.end() && ops_[*answer].answered < ops_[i].sent; ++answer) {
        Time& until = arrived[ops_[*answer].server];
        until = std::max(until, ops_[*answer].sent);
      }
      arrived_before_[i] = arrived[ops_[i].server];
    }
  }

  void CheckLock(uint32_t lock, Indices indices) {
    forced_.clear();
    lossy_.clear();
    steps_.clear();
    for (const Mark& mark : marks_) {
      if (mark.lock != lock && mark.lock != kAllLocks) continue;
      if (mark.kind == Mark::Kind::kForced) forced_.push_back(&mark);
      if (mark.kind == Mark::Kind::kLossy) lossy_.push_back(&mark);
      if (mark.kind == Mark::Kind::kStep) steps_.push_back(&mark);
    }
    std::sort(steps_.begin(), steps_.end(),
              [](const Mark* a, const Mark* b) { return a->begin < b->begin; });
    only_exclusive_ = std::all_of(indices.begin(), indices.end(),
                                  [&](size_t i) { return ops_[i].sharing == Sharing::kExclusive; });
    holds_.clear();
    possible_.clear();
    shut_.clear();
    RecordTokens(indices);
    RecordHolders(indices);
    std::vector<size_t> by_owner(indices.begin(), indices.end());
    std::stable_sort(by_owner.begin(), by_owner.end(),
                     [&](size_t a, size_t b) { return ops_[a].owner < ops_[b].owner; });
    for (auto begin = by_owner.begin(); begin != by_owner.end();) {
      const auto end = std::find_if(
          begin, by_owner.end(), [&](size_t op) { return ops_[op].owner != ops_[*begin].owner; });
      FollowOwner({begin, end});
      begin = end;
    }
    CheckExclusion();
    CheckTokensDiffer();
    if (only_exclusive_) CheckRegister(indices);
    CheckWaits(indices);
    CheckOrder(indices);
  }

  // --- What has been told when

  // The highest token that had been told before some moment.
  struct Told {
    Time when = 0;
    int64_t token = 0;
    size_t op = 0;
  };

  void RecordTokens(Indices indices) {
    told_.clear();
    for (const size_t i : indices) {
      if (IsGrant(ops_[i])) told_.push_back({ops_[i].answered, ops_[i].token, i});
    }
    std::sort(told_.begin(), told_.end(),
              [](const Told& a, const Told& b) { return a.when < b.when; });
    for (size_t i = 1; i < told_.size(); i++) {
      if (told_[i].token < told_[i - 1].token) {
        told_[i].token = told_[i - 1].token;
        told_[i].op = told_[i - 1].op;
      }
    }
  }

  // When somebody surely still had an exclusive lock under some token: at the earliest when it sent
  // a request that was then obeyed. Whoever has a higher token got it later, unless older data came
  // back or a stranger brought a lock here.
  struct Seen {
    int64_t token = 0;
    Time when = 0;  // of this token or a lower one, the latest
  };

  void RecordHolders(Indices indices) {
    seen_.clear();
    if (!only_exclusive_ || !lossy_.empty() || !forced_.empty()) return;
    for (const size_t i : indices) {
      const Operation& op = ops_[i];
      if (IsGrant(op) || (op.verb == Verb::kFence && op.answer == Answer::kYes)) {
        seen_.push_back({op.token, op.sent});
      }
    }
    // Who released or touched it has the token that it was told last, unless it asked again and was
    // told nothing.
    struct Teller {
      int64_t token = 0;
      bool unsure = false;
    };
    std::map<uint32_t, Teller> tellers;
    for (const size_t i : indices) {
      const Operation& op = ops_[i];
      if (op.verb == Verb::kAcquire) {
        Teller& teller = tellers[op.owner];
        if (IsGrant(op)) teller.token = op.token;
        teller.unsure = teller.unsure || op.answer == Answer::kLost;
      } else if ((op.verb == Verb::kRelease || op.verb == Verb::kTouch) &&
                 op.answer == Answer::kYes) {
        const auto teller = tellers.find(op.owner);
        if (teller != tellers.end() && !teller->second.unsure && teller->second.token != 0) {
          seen_.push_back({teller->second.token, op.sent});
        }
      }
    }
    std::sort(seen_.begin(), seen_.end(),
              [](const Seen& a, const Seen& b) { return a.token < b.token; });
    for (size_t i = 1; i < seen_.size(); i++) {
      seen_[i].when = std::max(seen_[i].when, seen_[i - 1].when);
    }
  }

  Time GrantedAfter(int64_t token) const {
    const auto higher = std::partition_point(seen_.begin(), seen_.end(),
                                             [&](const Seen& seen) { return seen.token < token; });
    return higher == seen_.begin() ? 0 : std::prev(higher)->when;
  }

  const Told* ToldBefore(Time time) const {
    const auto after = std::partition_point(told_.begin(), told_.end(),
                                            [&](const Told& told) { return told.when < time; });
    return after == told_.begin() ? nullptr : &*std::prev(after);
  }

  // --- One owner

  // What is known of the owner at hand.
  struct Known {
    Hold* hold = nullptr;             // what it has, as far as it knows
    std::optional<Time> asked_since;  // what is not answered for certain,
    std::optional<Time> first_asked;  // and anything at all
    bool lost = false;                // some of that
    int64_t token = 0;                // the last, told by
    size_t op = 0;
    bool may_be_newer = false;  // it asked again, and was not told
    bool late = false;          // and that may arrive after what it asked since
    Time linger = 0;
    Time least_lost_lease = kNever;  // of calls that may still be carried out
    int64_t lost_floor = 0;          // the highest of those
    bool lost_upgrade = false;
    bool changes_mode = false;
    bool mode_unsure = false;  // it reads, and perhaps it writes
    // How often it has the hold.
    bool reentrant = false;
    int least_count = 0;
    int most_count = 0;
    int lost_counts = 0;
  };

  // Of older data.
  static constexpr int kAnyCount = std::numeric_limits<int>::max() / 2;

  void FollowOwner(Indices indices) {
    Known known;
    for (const size_t i : indices) {
      const Operation& op = ops_[i];
      if (op.stranger) {
        if (op.answer == Answer::kYes) Report("C6", "a stranger was obeyed", {i});
        continue;
      }
      const bool rightful = known.hold != nullptr && IsRightful(*known.hold, op);
      if (known.hold != nullptr) FollowMode(op, known);
      switch (op.verb) {
        case Verb::kAcquire:
          Acquired(i, rightful, known);
          break;
        case Verb::kTouch:
          if (known.hold != nullptr) Touched(i, rightful, known);
          break;
        case Verb::kRelease:
        case Verb::kClose:
          if (known.hold != nullptr) Released(i, rightful, known);
          break;
        case Verb::kFence:
          if (op.answer == Answer::kYes) {
            const bool known_hold = known.hold != nullptr && op.token == known.token;
            if (CheckNotReplaced(i, op.token) && known_hold) CheckNotOver(i, *known.hold);
          }
          if (op.answer == Answer::kNo && rightful && IsCurrent(op, known)) {
            Report("C2", "the token of a rightful holder was refused", {known.op, i});
          }
          break;
        case Verb::kWrite:
          // One whose hold came back with older data is rightful here, and rightly refused there.
          is_rightful_[i] =
              rightful && IsCurrent(op, known) && !MayBeOlderData(*known.first_asked, op.answered);
          break;
      }
    }
  }

  // Whether the token that is shown is that of the hold. A touch does not tell what it touched.
  bool IsCurrent(const Operation& op, const Known& known) const {
    return op.token == known.token && !known.may_be_newer && !MayHaveChanged(known) &&
           !MayBeOlderData(ops_[known.op].sent, op.answered);
  }

  // Whether a call that was lost may have changed the token.
  static bool MayHaveChanged(const Known& known) {
    return known.lost_upgrade || known.lost_floor > known.token;
  }

  // Whether an owner that changes between reading and writing does the one or the other is not
  // known any more after such a change was lost, or where older data may be back.
  void FollowMode(const Operation& op, Known& known) {
    const bool changes = op.verb == Verb::kAcquire && op.sharing != known.hold->sharing;
    known.changes_mode = known.changes_mode || changes;
    if (!known.changes_mode) return;
    known.mode_unsure =
        known.mode_unsure || (changes && op.answer == Answer::kLost) || MayBeOlder(known, op);
    if (!known.mode_unsure) return;
    Downgrade(known, op.sent);
    known.hold->may_write = true;
  }

  // Whether what the owner has may be of any time since it first asked.
  bool MayBeOlder(const Known& known, const Operation& op) const {
    return MayBeOlderData(*known.first_asked, op.answered) ||
           IsForced(*known.first_asked, op.answered);
  }

  void Acquired(size_t i, bool rightful, Known& known) {
    const Operation& op = ops_[i];
    if (!known.asked_since) known.asked_since = op.sent;
    if (!known.first_asked) known.first_asked = op.sent;
    known.linger = std::max(known.linger, op.linger);
    known.reentrant = known.reentrant || op.reentrant;
    const bool upgrade = known.hold != nullptr && known.hold->sharing == Sharing::kShared &&
                         op.sharing == Sharing::kExclusive;
    if (op.answer == Answer::kNull && rightful && !upgrade) {
      Report("C6", "a rightful holder asked again in vain", {known.op, i});
    }
    const int more = op.reentrant ? 1 : 0;
    if (op.answer == Answer::kLost) {
      known.may_be_newer = true;
      known.late = known.late || !op.direct;
      known.lost = true;
      known.lost_upgrade = known.lost_upgrade || upgrade;
      known.lost_floor = std::max(known.lost_floor, op.floor);
      known.lost_counts += more;
      known.most_count += more;
      known.least_lost_lease = std::min(known.least_lost_lease, op.lease);
      const Time latest = ServedFrom(op.answered) + op.wait + op.lease + kMillisecond;
      MayHold({op.sent, AtLatest(op.sent, latest + op.linger)}, op.sharing);
      if (known.hold != nullptr) {
        known.hold->live_until = std::max(known.hold->live_until, AtLatest(op.sent, latest));
      }
      Shorten(known.hold, op);
    }
    // What the next grant can be an answer to.
    const Time asked =
        MayBeOlderData(*known.first_asked, op.answered) ? *known.first_asked : *known.asked_since;
    if (!known.lost) known.asked_since.reset();
    if (op.answer != Answer::kToken) return;
    if (op.token < op.floor) Report("C3", "a token below the floor that was asked for", {i});
    if (known.hold == nullptr || op.token != known.token) {
      const bool raised = op.token == op.floor && op.floor > known.token;
      CheckChange(i, rightful && !upgrade && !raised, known);
      CheckToken(i, asked);
      // A token that is raised is that of the same hold, and so is that of an upgrade.
      const bool may_be_same = raised || upgrade || MayHaveChanged(known);
      known.least_count = rightful && raised ? known.least_count + more : 1;
      known.most_count = std::max(1 + known.lost_counts, may_be_same ? known.most_count + more : 0);
      BeginHold(i, known);
    } else {
      if (upgrade && !known.hold->may_write) {
        Report("C6", "a hold became exclusive under its old token", {known.op, i});
      }
      if (op.sharing == Sharing::kShared && known.hold->sharing == Sharing::kExclusive) {
        IsGone(*known.hold, op, op.answered);
        Downgrade(known, op.sent);
      }
      IsThere(known);
      known.least_count += more;
      known.most_count += more;
    }
    if (known.reentrant && MayBeOlder(known, op)) known.most_count = kAnyCount;
    Renew(i, known);
    known.may_be_newer = known.late;
    known.token = op.token;
    known.op = i;
  }

  // An owner was told another token than before.
  void CheckChange(size_t i, bool keeps_its_token, const Known& known) {
    const Operation& op = ops_[i];
    if (known.hold == nullptr || MayBeOlderData(ops_[known.op].sent, op.answered)) return;
    if (op.token < known.token && op.sent > ops_[known.op].answered) {
      Report("C6", "an owner that asked again got an older token", {known.op, i});
    }
    if (keeps_its_token && !MayHaveChanged(known)) {
      Report("C6", "an owner that holds the lock and asked again got another token", {known.op, i});
    }
  }

  void BeginHold(size_t i, Known& known) {
    const Operation& op = ops_[i];
    if (known.hold != nullptr) {
      IsGone(*known.hold, op, op.answered);
      // It is replaced, also if it only lingered.
      Shorten(known.hold, op);
      for (Certain& certain : known.hold->certain) {
        certain.until = std::min(certain.until, op.answered);
      }
      EndLinger(*known.hold, op.sent);
    }
    is_new_[i] = true;
    ++findings_.holds;
    known.hold = &holds_.emplace_back();
    known.hold->op = i;
    known.hold->owner = op.owner;
    known.hold->token = op.token;
    known.hold->sharing = known.mode_unsure ? Sharing::kShared : op.sharing;
    known.hold->may_write = known.mode_unsure;
    known.hold->limit = op.limit;
  }

  // From now on all that is certain is that its owner reads.
  void Downgrade(Known& known, Time now) {
    if (known.hold->sharing != Sharing::kExclusive) return;
    Hold shared = *known.hold;
    shared.sharing = Sharing::kShared;
    for (Certain& certain : shared.certain) certain.from = std::max(certain.from, now);
    GiveUp(*known.hold, now, now);
    known.hold = &holds_.emplace_back(std::move(shared));
  }

  // It was obeyed as somebody who has the hold at least once.
  static void IsThere(Known& known) {
    known.least_count = std::max(known.least_count, 1);
    known.most_count = std::max(known.most_count, 1);
  }

  // From now on the owner does not count on it.
  static void GiveUp(Hold& hold, Time now, Time closed_until) {
    for (Certain& certain : hold.certain) {
      certain.until = std::min(certain.until, now);
      certain.closed_until = std::min(certain.closed_until, closed_until);
      certain.entitled_until = std::min(certain.entitled_until, now);
    }
  }

  void Touched(size_t i, bool rightful, Known& known) {
    const Operation& op = ops_[i];
    if (op.answer == Answer::kYes) {
      CheckObeyed(i, known);
      IsThere(known);
      Renew(i, known);
    } else if (op.answer == Answer::kNo) {
      if (rightful) Report("C2", "a rightful holder could not touch its lock", {known.op, i});
    } else if (op.answer == Answer::kLost) {
      known.least_lost_lease = std::min(known.least_lost_lease, op.lease);
      const Time latest = ServedFrom(op.answered) + op.lease + kMillisecond;
      known.hold->live_until = std::max(known.hold->live_until, AtLatest(op.sent, latest));
      known.hold->possible_until =
          std::max(known.hold->possible_until, AtLatest(op.sent, latest + known.linger));
      Shorten(known.hold, op);
    }
  }

  void Released(size_t i, bool rightful, Known& known) {
    const Operation& op = ops_[i];
    if (op.verb == Verb::kRelease) {
      if (op.answer == Answer::kNo && rightful) {
        Report("C2", "a rightful holder had nothing to release", {known.op, i});
      }
      if (op.answer == Answer::kYes) CheckObeyed(i, known);
      if (CountDown(i, known)) return;
    }
    // The end of a session is no release: the hold lingers.
    const Time linger = op.verb == Verb::kClose ? known.linger : 0;
    // Whatever the answer, the owner has given up. (The millisecond in which the hold ended counts
    // as one of the linger's.)
    const Time closed = AtEarliest(op.sent, op.sent + linger - kMillisecond - rules_.lease_slack);
    GiveUp(*known.hold, op.sent, std::max(closed, op.sent));
    const bool ended = op.verb == Verb::kClose || known.most_count <= 0;
    if (op.answer == Answer::kNo || (op.answer == Answer::kYes && ended)) {
      // One that was over may still be stored, and live again when the clock is set back.
      const Time gone = op.answered + linger;
      const Time latest = op.answer == Answer::kNo ? AtLatest(op.sent, gone) : gone;
      IsGone(*known.hold, op, latest);
    }
  }

  // A release that comes when the lease is over ends the linger, whatever the count.
  static void EndLinger(Hold& hold, Time now) {
    for (Certain& certain : hold.certain) {
      certain.closed_until = std::min(certain.closed_until, std::max(certain.until, now));
    }
  }

  // One release less. Returns whether some are surely left.
  bool CountDown(size_t i, Known& known) {
    const Operation& op = ops_[i];
    const bool may_be_older = MayBeOlder(known, op);
    if (known.reentrant && may_be_older) {
      known.least_count = std::min(known.least_count, 1);
      known.most_count = kAnyCount;
    }
    if (op.answer == Answer::kYes) {
      // (What was over may be live again when the clock is set back.)
      if (known.most_count <= 0 && !known.lost && !may_be_older &&
          !IsSetBack(*known.first_asked, op.answered)) {
        Report("C6", "a hold was released more often than it was acquired", {known.op, i});
      }
      --known.most_count;
    }
    if (op.answer == Answer::kYes || op.answer == Answer::kLost) --known.least_count;
    if (op.answer == Answer::kNo) known.least_count = known.most_count = 0;
    if (op.answer == Answer::kLost) EndLinger(*known.hold, op.sent);
    return known.least_count > 0;
  }

  // `op` ended the hold at `latest`, unless that was lost: then it keeps others out for as long as
  // its lease says to the server that still has it.
  void IsGone(Hold& hold, const Operation& op, Time latest) const {
    if (MayBeOlderData(op.sent, op.answered)) return;
    hold.possible_until = std::min(hold.possible_until, latest);
  }

  // The lease begins anew.
  void Renew(size_t i, const Known& known) {
    const Operation& op = ops_[i];
    const Time begin = std::max(op.sent, std::min(GrantedAfter(op.token), op.answered));
    const Time lease = std::min(op.lease, known.least_lost_lease) - rules_.lease_slack;
    const Time until = AtEarliest(op.sent, begin + lease);
    const Time closed = AtEarliest(op.sent, begin + lease + known.linger);
    for (Certain& before : known.hold->certain) {
      before.until = std::min(before.until, std::max(until, op.sent));
      before.closed_until = std::min(before.closed_until, std::max(closed, op.sent));
      before.entitled_until = std::min(before.entitled_until, before.until);
    }
    Certain certain{.op = i, .from = op.answered, .until = until, .closed_until = closed};
    for (const Mark* forced : forced_) {
      if (forced->end < op.sent) continue;
      certain.until = std::min(certain.until, forced->begin);
      certain.closed_until = std::min(certain.closed_until, forced->begin);
    }
    certain.entitled_until = certain.until;
    for (const Mark* lossy : lossy_) {
      if (lossy->end >= op.sent) {
        certain.entitled_until = std::min(certain.entitled_until, lossy->begin);
      }
    }
    known.hold->revived |= IsRevived(*known.hold, op);
    if (certain.from < certain.until && !known.hold->revived) {
      known.hold->certain.push_back(certain);
    }
    // It lives through the whole of its last millisecond.
    const Time latest = op.answered + op.lease + kMillisecond + rules_.lease_slack;
    known.hold->over_at = latest;
    known.hold->live_until = AtLatest(op.sent, latest);
    const Time before = known.hold->possible_until;
    known.hold->possible_until = AtLatest(op.sent, latest + known.linger);
    if (MayBeOlderData(op.sent, op.answered)) {
      known.hold->possible_until = std::max(known.hold->possible_until, before);
    }
  }

  // A hold that was over, and replaced, is live again where the one that replaced it was lost and
  // the clock is behind: then nobody holds the lock for certain.
  bool IsRevived(const Hold& hold, const Operation& op) const {
    return hold.over_at != 0 && op.sent > hold.over_at &&
           MayBeOlderData(ops_[hold.op].sent, op.answered) &&
           IsSetBack(ops_[hold.op].sent, op.answered);
  }

  // What lasts from `from` until `until`, if no clock is set forward meanwhile.
  Time AtEarliest(Time from, Time until) const {
    Time earliest = until;
    for (const Mark* step : steps_) {
      if (step->amount > 0 && step->end >= from && step->begin <= until) earliest -= step->amount;
    }
    return earliest;
  }

  // What lasts from `from` until `until`, if no clock is set back meanwhile, or later so far that
  // it is live again.
  Time AtLatest(Time from, Time until) const {
    for (const Mark* step : steps_) {
      const Time later = until - step->amount;
      if (later > until && step->end >= from && step->begin <= later) until = later;
    }
    return until;
  }

  // What was on its way at `time` reaches its server by then.
  Time ServedFrom(Time time) const {
    const auto span = unavailable_.FirstEndingAfter(time);
    return span == unavailable_.all().end() || span->from > time ? time : span->until;
  }

  // A call whose answer was lost may have set a shorter lease.
  void Shorten(Hold* hold, const Operation& op) const {
    if (hold == nullptr) return;
    Time until = op.sent + op.lease - rules_.lease_slack;
    for (const Mark* step : steps_) {
      if (step->end >= op.sent && step->amount > 0) until -= step->amount;
    }
    for (Certain& certain : hold->certain) {
      certain.until = std::min(certain.until, std::max(certain.from, until));
      certain.closed_until = std::min(certain.closed_until, certain.until);
      certain.entitled_until = std::min(certain.entitled_until, certain.until);
    }
  }

  // Whether the owner certainly holds the lock, and the server knows it, all through `op`.
  static bool IsRightful(const Hold& hold, const Operation& op) {
    return std::any_of(hold.certain.rbegin(), hold.certain.rend(), [&](const Certain& certain) {
      return certain.from <= op.sent && op.answered < certain.entitled_until;
    });
  }

  void CheckToken(size_t i, Time asked) {
    const int64_t token = ops_[i].token;
    if (token <= 0 || token >= kTokensEnd) Report("C3", "a token out of range", {i});
    const Told* before = ToldBefore(asked);
    if (before != nullptr && before->token >= token) {
      Report("C3", "a new hold has a token that is not above one told before it was asked for",
             {before->op, i});
    }
  }

  // Whether writes of that time may have been lost: what was there before may be back.
  bool MayBeOlderData(Time since, Time until) const {
    return std::any_of(lossy_.begin(), lossy_.end(), [&](const Mark* lossy) {
      return lossy->begin <= until && lossy->end >= since;
    });
  }

  bool IsForced(Time since, Time until) const {
    return std::any_of(forced_.begin(), forced_.end(), [&](const Mark* mark) {
      return mark->begin <= until && mark->end >= since;
    });
  }

  bool IsSetBack(Time since, Time until) const {
    return std::any_of(steps_.begin(), steps_.end(), [&](const Mark* step) {
      return step->amount < 0 && step->begin <= until && step->end >= since;
    });
  }

  // Of exclusive locks: nobody has been told a higher token before `i` was sent. After a loss of
  // writes older data may be back.
  bool CheckNotReplaced(size_t i, int64_t token) {
    if (!only_exclusive_) return true;
    const Told* newest = ToldBefore(ops_[i].sent);
    if (newest == nullptr || newest->token <= token || ops_[newest->op].owner == ops_[i].owner ||
        MayBeOlderData(ops_[newest->op].sent, ops_[i].answered)) {
      return true;
    }
    Report("C2", "an owner that has been replaced was obeyed", {newest->op, i});
    return false;
  }

  // The server did what the owner of this hold asked for.
  void CheckObeyed(size_t i, const Known& known) {
    if (!known.may_be_newer && CheckNotReplaced(i, known.token)) CheckNotOver(i, *known.hold);
  }

  void CheckNotOver(size_t i, const Hold& hold) {
    if (ops_[i].sent <= hold.live_until) return;
    const Time since = ops_[hold.op].sent;
    const Time until = ops_[i].answered;
    // A lease that was over may be live again when the clock is set back.
    if (IsForced(since, until) || MayBeOlderData(since, until) || IsSetBack(since, until)) return;
    Report("C2", "a hold that was over was obeyed", {hold.op, i});
  }

  void CheckTokensDiffer() {
    std::vector<const Hold*> by_token;
    by_token.reserve(holds_.size());
    for (const Hold& hold : holds_) by_token.push_back(&hold);
    std::sort(by_token.begin(), by_token.end(),
              [](const Hold* a, const Hold* b) { return a->token < b->token; });
    for (size_t i = 1; i < by_token.size(); i++) {
      const Hold& a = *by_token[i - 1];
      const Hold& b = *by_token[i];
      if (a.token != b.token || a.owner == b.owner) continue;
      // Who holds older data and names a floor gets just that, though it may have been given
      // before.
      const auto is_floor = [&](const Hold& hold) { return ops_[hold.op].floor == hold.token; };
      const Time since = std::min(ops_[a.op].sent, ops_[b.op].sent);
      const Time until = std::max(ops_[a.op].answered, ops_[b.op].answered);
      if ((is_floor(a) || is_floor(b)) && MayBeOlderData(since, until)) continue;
      Report("C3", "two owners have the same token", {a.op, b.op});
    }
  }

  // --- C1

  struct Inside {
    const Hold* hold = nullptr;
    Certain certain;
  };

  void CheckExclusion() {
    inside_.clear();
    for (const Hold& hold : holds_) {
      for (const Certain& certain : hold.certain) {
        if (certain.from >= certain.closed_until) continue;
        if (!inside_.empty() && inside_.back().hold == &hold &&
            certain.from <= inside_.back().certain.closed_until) {
          inside_.back().certain.closed_until =
              std::max(inside_.back().certain.closed_until, certain.closed_until);
        } else {
          inside_.push_back({&hold, certain});
        }
      }
    }
    std::sort(inside_.begin(), inside_.end(),
              [](const Inside& a, const Inside& b) { return a.certain.from < b.certain.from; });
    present_.clear();
    for (const Inside& next : inside_) {
      std::erase_if(present_, [&](const Inside* other) {
        return other->certain.closed_until <= next.certain.from;
      });
      size_t others = 0;
      uint16_t largest = next.hold->limit;
      for (const Inside* other : present_) {
        if (other->hold->owner == next.hold->owner) continue;
        ++others;
        largest = std::max(largest, other->hold->limit);
        const bool alike =
            other->hold->sharing == next.hold->sharing && next.hold->sharing != Sharing::kExclusive;
        if (!alike) {
          Report("C1", "two owners hold the lock that may not do so together",
                 {other->certain.op, next.certain.op});
        }
      }
      if (next.hold->sharing == Sharing::kLimit && others + 1 > largest) {
        Report("C1", "more owners hold the lock than its limit allows",
               {present_.front()->certain.op, next.certain.op});
      }
      present_.push_back(&next);
    }
  }

  // --- C2: the register outside

  void CheckRegister(Indices indices) {
    const Operation* highest = nullptr;
    size_t highest_at = 0;
    for (const size_t i : indices) {
      const Operation& op = ops_[i];
      if (op.verb != Verb::kWrite) continue;
      ++findings_.writes;
      if (highest != nullptr && op.token < highest->token) {
        ++findings_.refused;
        if (is_rightful_[i]) {
          Report("C2", "the register refuses a rightful holder", {highest_at, i});
        }
      } else {
        if (highest != nullptr && op.token == highest->token && op.owner != highest->owner) {
          Report("C2", "the register was shown one token by two owners", {highest_at, i});
        }
        highest = &op;
        highest_at = i;
      }
    }
  }

  // --- C4

  void CheckWaits(Indices indices) {
    for (const size_t i : indices) {
      const Operation& op = ops_[i];
      if (!IsRequest(op)) continue;
      if (op.verb == Verb::kAcquire && op.wait > 0 && IsAnswered(op)) ++findings_.waits;
      const Time late = op.answered - op.sent - op.wait - unavailable_.Within(op.sent, op.answered);
      findings_.longest_late = std::max(findings_.longest_late, late);
      if (late > rules_.wait_slack) Report("C4", "no answer in time", {i});
    }
    CheckIdleness(indices);
  }

  void MayHold(Span span, Sharing sharing) {
    possible_.push_back(span);
    if (sharing != Sharing::kShared) shut_.push_back(span);
  }

  void CheckIdleness(Indices indices) {
    for (const size_t i : indices) {
      const Operation& op = ops_[i];
      if (op.verb != Verb::kAcquire) continue;
      // Whoever waits for several locks keeps others waiting, and who wants to write keeps readers.
      if (op.several) MayHold({op.sent, op.answered}, Sharing::kExclusive);
      if (op.sharing != Sharing::kShared) shut_.push_back({op.sent, op.answered});
    }
    for (const Mark* forced : forced_) {
      MayHold({forced->begin, AtLatest(forced->begin, forced->end + forced->amount)},
              Sharing::kExclusive);
    }
    // A server tells of a hold as soon as there is one.
    for (const Hold& hold : holds_) {
      const Operation& told = ops_[hold.op];
      MayHold({told.direct ? told.answered : told.sent, hold.possible_until},
              hold.may_write ? Sharing::kExclusive : hold.sharing);
    }
    busy_.Assign(possible_);
    busy_for_readers_.Assign(shut_);
    for (const size_t i : indices) {
      const Operation& op = ops_[i];
      if (op.verb != Verb::kAcquire || op.wait == 0 || op.several || !op.direct ||
          !IsAnswered(op)) {
        continue;
      }
      const Spans& spans = op.sharing == Sharing::kShared ? busy_for_readers_ : busy_;
      const std::vector<Span>& busy = spans.all();
      auto next = spans.FirstEndingAfter(op.sent);
      for (Time from = op.sent; from < op.answered;) {
        const Time until = next == busy.end() ? op.answered : std::min(next->from, op.answered);
        const Time idle = until - from - unavailable_.Within(from, until);
        findings_.longest_idle = std::max(findings_.longest_idle, idle);
        if (idle > rules_.idle_limit) {
          Report("C4",
                 "the lock was free for " + std::to_string(idle / kMillisecond) +
                     " ms while somebody waited for it",
                 {i});
          break;
        }
        if (next == busy.end()) break;
        from = std::max(from, next->until);
        ++next;
      }
    }
  }

  // --- C5

  void CheckOrder(Indices indices) {
    std::map<uint32_t, std::vector<size_t>> by_server;
    for (const size_t i : indices) {
      const Operation& op = ops_[i];
      if (op.verb == Verb::kAcquire && op.direct && !op.stranger) by_server[op.server].push_back(i);
    }
    for (const auto& [server, here] : by_server) CheckOrderOn(here);
  }

  // Of those who came before: the highest token, and who stood in line for longest, in vain or not.
  struct Latest {
    int64_t token = 0;
    size_t token_op = 0;
    Time in_vain_until = 0;
    size_t in_vain_op = 0;
    Time stood_until = 0;
    size_t stood_op = 0;
  };

  void CheckOrderOn(Indices indices) {
    // By whether it is for several locks, and by its kind.
    std::array<std::array<Latest, 3>, 2> earlier{};
    auto candidate = indices.begin();
    for (const size_t i : indices) {
      const Operation& op = ops_[i];
      for (; candidate != indices.end() && ops_[*candidate].sent < arrived_before_[i];
           ++candidate) {
        const Operation& before = ops_[*candidate];
        Remember(*candidate,
                 earlier.at(before.several ? 1 : 0).at(static_cast<size_t>(before.sharing)));
      }
      if (!is_new_[i] || op.retry) continue;
      if (candidate != indices.begin()) ++findings_.ordered;
      for (size_t several = 0; several < earlier.size(); several++) {
        for (size_t sharing = 0; sharing < earlier.at(several).size(); sharing++) {
          const bool alike =
              sharing == static_cast<size_t>(op.sharing) && op.sharing != Sharing::kExclusive;
          // One that waits for another lock lets pass whom it is compatible with.
          if (alike && several == 1) continue;
          CheckAfter(earlier.at(several).at(sharing), i, alike);
        }
      }
    }
  }

  void Remember(size_t i, Latest& latest) const {
    const Operation& op = ops_[i];
    if (is_new_[i] && op.token > latest.token) {
      latest.token = op.token;
      latest.token_op = i;
    }
    if (op.wait == 0 || (op.answer != Answer::kNull && !is_new_[i])) return;
    if (op.answered > latest.stood_until) {
      latest.stood_until = op.answered;
      latest.stood_op = i;
    }
    if (op.answer == Answer::kNull && op.answered > latest.in_vain_until) {
      latest.in_vain_until = op.answered;
      latest.in_vain_op = i;
    }
  }

  void CheckAfter(const Latest& latest, size_t i, bool alike) {
    const Operation& op = ops_[i];
    const auto stood_longer = [&](Time until) {
      return until > op.answered + rules_.order_slack + unavailable_.Within(op.answered, until);
    };
    if (alike) {
      // Those who can hold it together come in together, in any order.
      if (stood_longer(latest.stood_until)) {
        Report("C5", "somebody who came later was let in, and an earlier one of its kind was not",
               {latest.stood_op, i});
      }
      return;
    }
    // (A token that had been told before is a matter of C3.)
    if (latest.token > op.token && ops_[latest.token_op].answered >= op.sent) {
      Report("C5", "somebody who came later was served first", {latest.token_op, i});
    }
    if (stood_longer(latest.in_vain_until)) {
      Report("C5", "somebody who came later was served while an earlier one waited in vain",
             {latest.in_vain_op, i});
    }
  }

  const std::vector<Operation>& ops_;
  const std::vector<Mark>& marks_;
  const Rules& rules_;
  Findings findings_;
  Spans unavailable_;
  std::vector<Time> arrived_before_;  // by operation: what was sent before this had arrived
  std::vector<bool> is_new_;          // by operation: it told of a new hold
  std::vector<bool> is_rightful_;     // by operation, of writes

  // Of the lock at hand:
  std::vector<const Mark*> forced_;
  std::vector<const Mark*> lossy_;
  std::vector<const Mark*> steps_;
  bool only_exclusive_ = true;
  std::vector<Told> told_;
  std::vector<Seen> seen_;  // by token
  std::vector<Hold> holds_;
  std::vector<Span> possible_;  // somebody may hold it,
  std::vector<Span> shut_;      // or want to, as others than readers
  Spans busy_;
  Spans busy_for_readers_;
  std::vector<Inside> inside_;
  std::vector<const Inside*> present_;
};

}  // namespace

Findings Check(const History& history, const Rules& rules) { return Checker(history, rules).Run(); }

std::string Story(const History& history, const Violation& violation, size_t lines) {
  struct Line {
    Time when;
    size_t distance;  // from what shows the violation
    std::string text;
  };
  const auto shows = [&](size_t i) {
    return std::find(violation.operations.begin(), violation.operations.end(), i) !=
           violation.operations.end();
  };
  Time from = violation.when;
  Time until = violation.when;
  for (const size_t i : violation.operations) {
    from = std::min(from, history.operations[i].sent);
    until = std::max(until, history.operations[i].answered);
  }
  const auto distance = [&](Time begin, Time end) {
    return static_cast<size_t>(std::max({Time{0}, from - end, begin - until}));
  };
  std::vector<Line> all;
  for (size_t i = 0; i < history.operations.size(); i++) {
    const Operation& op = history.operations[i];
    if (op.lock != violation.lock && !shows(i)) continue;
    all.push_back({op.sent, shows(i) ? 0 : 1 + distance(op.sent, op.answered),
                   (shows(i) ? "  >> " : "     ") + ToText(op)});
  }
  for (const Mark& mark : history.marks) {
    if (mark.lock != violation.lock && mark.lock != kAllLocks) continue;
    all.push_back({mark.begin, distance(mark.begin, mark.end), "   * " + ToText(mark)});
  }
  // Those nearest to the violation, in the order of time.
  std::stable_sort(all.begin(), all.end(),
                   [](const Line& a, const Line& b) { return a.distance < b.distance; });
  if (all.size() > lines) all.resize(lines);
  std::stable_sort(all.begin(), all.end(),
                   [](const Line& a, const Line& b) { return a.when < b.when; });
  std::ostringstream out;
  out << violation.check;
  if (violation.lock != kAllLocks) out << ", lock " << violation.lock;
  out << ": " << violation.text << '\n';
  for (const Line& line : all) out << line.text << '\n';
  return out.str();
}

}  // namespace turnstile::fault
