#include "fault/history.h"

#include <array>
#include <istream>
#include <nlohmann/json.hpp>
#include <ostream>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <tuple>
#include <type_traits>

namespace turnstile::fault {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array<std::string_view, 7> kVerbs = {"acquire", "release", "touch", "fence",
                                                    "write",   "close",   "loss"};
constexpr std::array<std::string_view, 6> kAnswers = {"token", "null",  "yes",
                                                      "no",    "error", "lost"};
constexpr std::array<std::string_view, 3> kSharings = {"exclusive", "shared", "limit"};
constexpr std::array<std::string_view, 4> kMarks = {"unavailable", "forced", "lossy", "step"};

const auto& NamesOf(Verb) { return kVerbs; }
const auto& NamesOf(Answer) { return kAnswers; }
const auto& NamesOf(Sharing) { return kSharings; }
const auto& NamesOf(Mark::Kind) { return kMarks; }

template <typename Enum>
std::string_view NameOf(Enum value) {
  return NamesOf(value).at(static_cast<size_t>(value));
}

template <typename Enum>
Enum Named(const std::string& name) {
  const auto& names = NamesOf(Enum());
  for (size_t i = 0; i < names.size(); i++) {
    if (names.at(i) == name) return static_cast<Enum>(i);
  }
  throw std::runtime_error("no such word: " + name);
}

// A field of a line. One that is not `always` there is left out if it has its default value.
template <typename Struct, typename Value>
struct Field {
  const char* name;
  Value Struct::*member;
  bool always = false;
};
template <typename Struct, typename Value>
Field(const char*, Value Struct::*) -> Field<Struct, Value>;
template <typename Struct, typename Value>
Field(const char*, Value Struct::*, bool) -> Field<Struct, Value>;

constexpr std::tuple kOperation{
    Field{"verb", &Operation::verb, true},
    Field{"answer", &Operation::answer, true},
    Field{"lock", &Operation::lock, true},
    Field{"owner", &Operation::owner, true},
    Field{"server", &Operation::server, true},
    Field{"sent_us", &Operation::sent, true},
    Field{"answered_us", &Operation::answered, true},
    Field{"token", &Operation::token},
    Field{"mode", &Operation::sharing},
    Field{"limit", &Operation::limit},
    Field{"weight", &Operation::weight},
    Field{"max_line", &Operation::max_line},
    Field{"floor", &Operation::floor},
    Field{"lease_us", &Operation::lease},
    Field{"wait_us", &Operation::wait},
    Field{"linger_us", &Operation::linger},
    Field{"max_hold_us", &Operation::max_hold},
    Field{"queued_us", &Operation::queued},
    Field{"several", &Operation::several},
    Field{"retry", &Operation::retry},
    Field{"unknown_owner", &Operation::stranger},
    Field{"direct", &Operation::direct},
    Field{"reentrant", &Operation::reentrant},
    Field{"session", &Operation::session},
    Field{"notified", &Operation::notified},
    Field{"bound", &Operation::bound},
};

constexpr std::tuple kMark{
    Field{"kind", &Mark::kind, true},      Field{"lock", &Mark::lock},
    Field{"begin_us", &Mark::begin, true}, Field{"end_us", &Mark::end, true},
    Field{"amount_us", &Mark::amount},     Field{"what", &Mark::what},
};

template <typename Struct, typename Fields>
void WriteLine(const char* type, const Struct& from, const Fields& fields, std::ostream& out) {
  const Struct usual;
  Json line{{"type", type}};
  const auto write = [&](const auto& field) {
    const auto& value = from.*field.member;
    if (!field.always && value == usual.*field.member) return;
    if constexpr (std::is_enum_v<std::decay_t<decltype(value)>>) {
      line[field.name] = NameOf(value);
    } else {
      line[field.name] = value;
    }
  };
  std::apply([&](const auto&... each) { (write(each), ...); }, fields);
  out << line.dump(-1, ' ', /*ensure_ascii=*/true, Json::error_handler_t::replace) << '\n';
}

template <typename Struct, typename Fields>
Struct ReadLine(const Json& line, const Fields& fields) {
  Struct into;
  const auto read = [&](const auto& field) {
    auto& value = into.*field.member;
    using Value = std::decay_t<decltype(value)>;
    if (!field.always && !line.contains(field.name)) return;
    if constexpr (std::is_enum_v<Value>) {
      value = Named<Value>(line.at(field.name).template get<std::string>());
    } else {
      line.at(field.name).get_to(value);
    }
  };
  std::apply([&](const auto&... each) { (read(each), ...); }, fields);
  return into;
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
  for (const Operation& op : history.operations) WriteLine("operation", op, kOperation, out);
  for (const Mark& mark : history.marks) WriteLine("mark", mark, kMark, out);
}

void WriteNamed(const std::string& name, const History& history, std::ostream& out) {
  out << Json{{"type", "history"},
              {"name", name},
              {"operations", history.operations.size()},
              {"marks", history.marks.size()}}
      << '\n';
  Write(history, out);
}

History ReadHistory(std::istream& in) {
  History history;
  for (std::string text; std::getline(in, text);) {
    try {
      const Json line = Json::parse(text);
      const auto type = line.at("type").get<std::string>();
      if (type == "operation") {
        history.operations.push_back(ReadLine<Operation>(line, kOperation));
      } else if (type == "mark") {
        history.marks.push_back(ReadLine<Mark>(line, kMark));
      } else if (type != "history" || !history.operations.empty()) {
        throw std::runtime_error("a line of type " + type);
      }
    } catch (const std::exception& error) {
      throw std::runtime_error(std::string(error.what()) + ": " + text);
    }
  }
  return history;
}

std::string ToText(const Operation& op) {
  std::ostringstream out;
  out << Ms(op.sent) << " to " << Ms(op.answered) << ": owner " << op.owner;
  if (op.stranger) out << " (another client)";
  out << ' ' << NameOf(op.verb) << ' ' << LockName(op.lock);
  if (op.several) out << " and others";
  if (op.verb == Verb::kAcquire) {
    out << ' ' << NameOf(op.sharing);
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
    out << ", at server " << op.server << ": " << NameOf(op.answer);
  }
  if (op.token != 0) out << ' ' << op.token;
  return out.str();
}

std::string ToText(const Mark& mark) {
  std::ostringstream out;
  out << Ms(mark.begin) << " to " << Ms(mark.end) << ": " << NameOf(mark.kind) << ", "
      << LockName(mark.lock);
  if (mark.amount != 0) out << ", by " << Ms(mark.amount);
  if (!mark.what.empty()) out << ": " << mark.what;
  return out.str();
}

}  // namespace turnstile::fault
