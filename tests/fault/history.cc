#include "fault/history.h"

#include <array>
#include <istream>
#include <ostream>
#include <sstream>
#include <stdexcept>
#include <string_view>

namespace turnstile::fault {
namespace {

constexpr std::array<std::string_view, 7> kVerbs = {"acquire", "release", "touch", "fence",
                                                    "write",   "close",   "loss"};
constexpr std::array<std::string_view, 6> kAnswers = {"token", "null",  "yes",
                                                      "no",    "error", "lost"};
constexpr std::array<std::string_view, 3> kSharings = {"exclusive", "shared", "limit"};
constexpr std::array<std::string_view, 4> kMarks = {"unavailable", "forced", "lossy", "step"};
// The flags of an operation, each a letter or a dot.
constexpr std::string_view kFlags = "srxdcbnh";

template <typename Enum, size_t kSize>
std::string_view NameOf(Enum value, const std::array<std::string_view, kSize>& names) {
  return names.at(static_cast<size_t>(value));
}

template <typename Enum, size_t kSize>
Enum Named(const std::string& name, const std::array<std::string_view, kSize>& names) {
  for (size_t i = 0; i < kSize; i++) {
    if (names.at(i) == name) return static_cast<Enum>(i);
  }
  throw std::runtime_error("no such word: " + name);
}

std::string LockName(uint32_t lock) {
  return lock == kAllLocks ? "all locks" : "lock " + std::to_string(lock);
}

std::string Ms(Time time) {
  std::ostringstream out;
  out.setf(std::ios::fixed);
  out.precision(3);
  out << static_cast<double>(time) / kMillisecond << " ms";
  return out.str();
}

}  // namespace

void Write(const History& history, std::ostream& out) {
  for (const Operation& op : history.operations) {
    const std::array<bool, kFlags.size()> set = {op.several,   op.retry,   op.stranger, op.direct,
                                                 op.reentrant, op.session, op.notified, op.bound};
    std::string flags;
    for (size_t i = 0; i < set.size(); i++) flags += set.at(i) ? kFlags[i] : '.';
    out << "op " << NameOf(op.verb, kVerbs) << ' ' << NameOf(op.answer, kAnswers) << ' '
        << NameOf(op.sharing, kSharings) << ' ' << op.limit << ' ' << op.weight << ' '
        << op.max_line << ' ' << flags << ' ' << op.lock << ' ' << op.owner << ' ' << op.server
        << ' ' << op.token << ' ' << op.floor << ' ' << op.lease << ' ' << op.wait << ' '
        << op.linger << ' ' << op.max_hold << ' ' << op.sent << ' ' << op.queued << ' '
        << op.answered << '\n';
  }
  for (const Mark& mark : history.marks) {
    out << "mark " << NameOf(mark.kind, kMarks) << ' ' << mark.lock << ' ' << mark.begin << ' '
        << mark.end << ' ' << mark.amount << ' ' << mark.what << '\n';
  }
}

History ReadHistory(std::istream& in) {
  History history;
  for (std::string line; std::getline(in, line);) {
    std::istringstream words(line);
    std::string word;
    words >> word;
    if (word == "op") {
      Operation& op = history.operations.emplace_back();
      std::string verb;
      std::string answer;
      std::string sharing;
      std::string flags;
      words >> verb >> answer >> sharing >> op.limit >> op.weight >> op.max_line >> flags >>
          op.lock >> op.owner >> op.server >> op.token >> op.floor >> op.lease >> op.wait >>
          op.linger >> op.max_hold >> op.sent >> op.queued >> op.answered;
      if (words.fail() || flags.size() != kFlags.size()) throw std::runtime_error(line);
      op.verb = Named<Verb>(verb, kVerbs);
      op.answer = Named<Answer>(answer, kAnswers);
      op.sharing = Named<Sharing>(sharing, kSharings);
      op.several = flags[0] != '.';
      op.retry = flags[1] != '.';
      op.stranger = flags[2] != '.';
      op.direct = flags[3] != '.';
      op.reentrant = flags[4] != '.';
      op.session = flags[5] != '.';
      op.notified = flags[6] != '.';
      op.bound = flags[7] != '.';
    } else if (word == "mark") {
      Mark& mark = history.marks.emplace_back();
      std::string kind;
      words >> kind >> mark.lock >> mark.begin >> mark.end >> mark.amount;
      if (words.fail()) throw std::runtime_error(line);
      mark.kind = Named<Mark::Kind>(kind, kMarks);
      std::getline(words >> std::ws, mark.what);
    } else {
      throw std::runtime_error(line);
    }
  }
  return history;
}

std::string ToText(const Operation& op) {
  std::ostringstream out;
  out << Ms(op.sent) << " to " << Ms(op.answered) << ": owner " << op.owner;
  if (op.stranger) out << " (a stranger)";
  out << ' ' << NameOf(op.verb, kVerbs) << ' ' << LockName(op.lock);
  if (op.several) out << " and others";
  if (op.verb == Verb::kAcquire) {
    out << ' ' << NameOf(op.sharing, kSharings);
    if (op.sharing == Sharing::kLimit) out << ' ' << op.limit;
    if (op.weight != 1) out << ", weight " << op.weight;
    if (op.wait > 0) out << ", wait " << Ms(op.wait);
    if (op.max_line > 0) out << ", max line " << op.max_line;
    if (op.linger > 0) out << ", linger " << Ms(op.linger);
    if (op.max_hold > 0) out << ", max hold " << Ms(op.max_hold);
    if (op.reentrant) out << ", reentrant";
    if (op.session) out << ", session";
    if (op.floor > 0) out << ", floor " << op.floor;
    if (op.retry) out << ", again";
    if (op.notified) out << (op.bound ? ", notified as before" : ", notified");
    if (op.queued > 0) out << ", in line at " << Ms(op.queued);
  }
  if (op.lease > 0) out << ", lease " << Ms(op.lease);
  if (op.verb != Verb::kWrite && op.verb != Verb::kLoss) {
    out << ", at server " << op.server << ": " << NameOf(op.answer, kAnswers);
  }
  if (op.token != 0) out << ' ' << op.token;
  return out.str();
}

std::string ToText(const Mark& mark) {
  std::ostringstream out;
  out << Ms(mark.begin) << " to " << Ms(mark.end) << ": " << NameOf(mark.kind, kMarks) << ", "
      << LockName(mark.lock);
  if (mark.amount != 0) out << ", by " << Ms(mark.amount);
  if (!mark.what.empty()) out << ": " << mark.what;
  return out.str();
}

}  // namespace turnstile::fault
