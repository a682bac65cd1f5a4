// The campaign: round after round, each with faults of another kind, until the time is over or a
// check is violated. See script/faults.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <map>
#include <random>
#include <sstream>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fault/checker/checker.h"
#include "fault/history.h"
#include "fault/process_client.h"
#include "fault/round.h"
#include "support/client.h"
#include "support/lock_test.h"
#include "support/reply.h"
#include "support/server.h"

namespace turnstile::fault {
namespace {

struct Options {
  Time length = kSecond * 180;
  Time round = kSecond * 6;
  uint64_t seed = 1;
  std::vector<std::string> kinds;  // empty: all that can be run here
  std::string folder = "build/faults";
  std::string history;    // to be checked again
  std::string histories;  // the folder in which to keep all of them; "": none
  std::string out;        // the file for the results; "": none
  bool keep_going = false;
  bool list = false;
};

// What the tests' library complains of (a server that crashed, one that did not start).
class Complaints : public ::testing::EmptyTestEventListener {
 public:
  std::vector<Violation> Take() { return std::exchange(all_, {}); }

 private:
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (result.failed()) all_.push_back({"C8", result.message(), kAllLocks, Now(), {}});
  }

  std::vector<Violation> all_;
};

// Sums over rounds.
struct Tally {
  uint64_t rounds = 0;
  uint64_t operations = 0;
  uint64_t holds = 0;
  uint64_t waits = 0;
  uint64_t ordered = 0;
  uint64_t writes = 0;
  uint64_t refused = 0;
  uint64_t failovers = 0;
  uint64_t violations = 0;
  Time longest_late = 0;
  Time longest_idle = 0;
  Traffic traffic;
  std::map<std::string, uint64_t> faults;

  uint64_t CountFaults() const {
    uint64_t sum = 0;
    for (const auto& [name, count] : faults) sum += count;
    return sum;
  }

  void Add(const Tally& other) {
    rounds += other.rounds;
    operations += other.operations;
    holds += other.holds;
    waits += other.waits;
    ordered += other.ordered;
    writes += other.writes;
    refused += other.refused;
    failovers += other.failovers;
    violations += other.violations;
    longest_late = std::max(longest_late, other.longest_late);
    longest_idle = std::max(longest_idle, other.longest_idle);
    traffic.requests += other.traffic.requests;
    traffic.connections += other.traffic.connections;
    traffic.deaths += other.traffic.deaths;
    traffic.pauses += other.traffic.pauses;
    traffic.retries += other.traffic.retries;
    traffic.reentries += other.traffic.reentries;
    traffic.upgrades += other.traffic.upgrades;
    traffic.downgrades += other.traffic.downgrades;
    traffic.floors += other.traffic.floors;
    traffic.heavy += other.traffic.heavy;
    traffic.capped += other.traffic.capped;
    traffic.tagged += other.traffic.tagged;
    traffic.shed += other.traffic.shed;
    traffic.reader_floors += other.traffic.reader_floors;
    traffic.reentrant_changes += other.traffic.reentrant_changes;
    traffic.subscriptions += other.traffic.subscriptions;
    traffic.in_line += other.traffic.in_line;
    traffic.messages += other.traffic.messages;
    traffic.granted_by_message += other.traffic.granted_by_message;
    traffic.confirmed += other.traffic.confirmed;
    traffic.told_of_loss += other.traffic.told_of_loss;
    traffic.left_the_line += other.traffic.left_the_line;
    traffic.unheard += other.traffic.unheard;
    traffic.scripts += other.traffic.scripts;
    traffic.transactions += other.traffic.transactions;
    traffic.infos += other.traffic.infos;
    traffic.unavailable += other.traffic.unavailable;
    for (const auto& [name, count] : other.traffic.errors) traffic.errors[name] += count;
    for (const auto& [name, count] : other.faults) faults[name] += count;
  }
};

std::string Ms(Time time) {
  std::ostringstream out;
  out << std::fixed << std::setprecision(1) << static_cast<double>(time) / kMillisecond;
  return out.str();
}

void KeepHistory(const std::string& folder, const std::string& name, const History& history) {
  std::filesystem::create_directories(folder);
  std::ofstream file(folder + "/" + name + ".jsonl");
  WriteNamed(name, history, file);
}

void Keep(const Options& options, const std::string& name, const History& history,
          const std::string& story) {
  KeepHistory(options.folder, name, history);
  const std::string path = options.folder + "/" + name;
  std::ofstream(path + ".story") << story;
  std::cout << "Kept: " << path << ".jsonl and .story\n";
}

Tally RunRound(const Options& options, const Kind& kind, uint64_t seed, Complaints& complaints) {
  Tally tally;
  tally.rounds = 1;
  std::vector<Violation> violations;
  History history;
  {
    Round round(seed, options.round);
    try {
      kind.run(round);
    } catch (const std::exception& error) {  // for example of a server that is not there any more
      round.Violate("C8", std::string("the round ended with: ") + error.what());
    }
    tally.faults = round.faults();
    tally.failovers = round.failovers();
    if (round.has_driver()) {
      history = round.driver().TakeHistory();
      tally.traffic = round.driver().traffic();
    }
    violations = round.TakeViolations();
  }
  for (Violation& complaint : complaints.Take()) violations.push_back(std::move(complaint));
  const Findings findings = Check(history);
  tally.operations = findings.operations;
  tally.holds = findings.holds;
  tally.waits = findings.waits;
  tally.ordered = findings.ordered;
  tally.writes = findings.writes;
  tally.refused = findings.refused;
  tally.longest_late = findings.longest_late;
  tally.longest_idle = findings.longest_idle;
  violations.insert(violations.end(), findings.violations.begin(), findings.violations.end());
  std::stable_sort(violations.begin(), violations.end(),
                   [](const Violation& a, const Violation& b) { return a.when < b.when; });
  tally.violations = violations.size();

  std::cout << std::left << std::setw(18) << kind.name << " seed " << std::setw(6) << seed
            << std::right << std::setw(8) << tally.operations << " operations" << std::setw(7)
            << tally.CountFaults() << " faults" << std::setw(4) << tally.violations
            << " violations\n"
            << std::flush;
  const std::string name = std::string(kind.name) + "-" + std::to_string(seed);
  if (!options.histories.empty()) KeepHistory(options.histories, name, history);
  if (violations.empty()) return tally;
  std::ostringstream story;
  story << "Again: script/faults --kind " << kind.name << " --seed " << seed << " --round-seconds "
        << options.round / kSecond << "\n\n"
        << Story(history, violations[0]);
  const size_t shown = std::min(violations.size(), size_t{8});
  for (size_t i = 1; i < shown; i++) {
    story << violations[i].check << ": " << violations[i].text << '\n';
  }
  if (violations.size() > shown) story << "and " << violations.size() - shown << " more\n";
  std::cout << story.str();
  Keep(options, name, history, story.str());
  return tally;
}

void PrintTable(const std::vector<std::pair<std::string, Tally>>& rows) {
  std::cout << "\n| kind | rounds | operations | holds | waits | in known order | faults | "
               "failovers | outage s | answer late by ms | hand-over ms | violations |\n"
            << "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|\n";
  for (const auto& [name, row] : rows) {
    std::cout << "| " << name << " | " << row.rounds << " | " << row.operations << " | "
              << row.holds << " | " << row.waits << " | " << row.ordered << " | "
              << row.CountFaults() << " | " << row.failovers << " | "
              << row.traffic.unavailable / kSecond << " | " << Ms(row.longest_late) << " | "
              << Ms(row.longest_idle) << " | " << row.violations << " |\n";
  }
}

void PrintSummary(const std::vector<Kind>& kinds, const std::map<std::string, Tally>& tallies,
                  Time length) {
  std::vector<std::pair<std::string, Tally>> rows;
  Tally all;
  for (const Kind& kind : kinds) {
    const auto found = tallies.find(kind.name);
    if (found == tallies.end()) continue;
    rows.push_back(*found);
    all.Add(found->second);
  }
  rows.emplace_back("all", all);
  PrintTable(rows);
  std::cout << "\nFaults:\n";
  for (const auto& [name, count] : all.faults) std::cout << "  " << count << " × " << name << '\n';
  std::cout << "Clients: " << all.traffic.connections << " connections, " << all.traffic.deaths
            << " died, " << all.traffic.pauses << " slept past their leases, "
            << all.traffic.retries << " asked again after a loss.\n"
            << "Among the grants: " << all.traffic.reentries << " counted once more, "
            << all.traffic.upgrades << " upgrades, " << all.traffic.downgrades << " downgrades, "
            << all.traffic.reentrant_changes << " of them counted once more, " << all.traffic.floors
            << " whose token is the floor, " << all.traffic.reader_floors << " of them of readers, "
            << all.traffic.heavy << " heavy ones, " << all.traffic.capped
            << " that may last only so long, " << all.traffic.tagged << " with a tag.\n"
            << "Kept from a long line: " << all.traffic.shed << ".\n"
            << "To be notified: " << all.traffic.subscriptions << " subscriptions, "
            << all.traffic.in_line << " times in line, " << all.traffic.messages << " messages, "
            << all.traffic.granted_by_message << " of them grants, " << all.traffic.confirmed
            << " confirmed; told of " << all.traffic.told_of_loss << " losses; left the line "
            << all.traffic.left_the_line << " times; did not hear any more of "
            << all.traffic.unheard << ".\n"
            << "In scripts: " << all.traffic.scripts
            << " requests; in transactions: " << all.traffic.transactions << ".\n"
            << "The register outside: " << all.writes << " writes, " << all.refused
            << " of them late and refused.\n"
            << "LOCK.INFO looked at " << all.traffic.infos << " times.\n"
            << "Errors that clients got over:";
  for (const auto& [word, count] : all.traffic.errors) std::cout << ' ' << word << ' ' << count;
  std::cout << "\nRequests: " << all.traffic.requests << ". In " << length / kSecond << " s: "
            << all.operations / std::max<uint64_t>(1, static_cast<uint64_t>(length / kSecond))
            << " operations a second, over all rounds with their starts and checks.\n";
  for (const Kind& kind : kinds) {
    const std::string why = kind.why_not == nullptr ? "" : kind.why_not();
    if (!why.empty()) std::cout << "Not run: " << kind.name << " (" << why << ")\n";
  }
}

// --- Results for programs -----------------------------------------------------------------------

std::string Quoted(const std::string& text) {
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return quoted + '"';
}

using Numbers = std::map<std::string, uint64_t>;

std::string ToJson(const Numbers& numbers) {
  std::string json = "{";
  for (const auto& [name, value] : numbers) {
    if (json.size() > 1) json += ", ";
    json += Quoted(name) + ": " + std::to_string(value);
  }
  return json + "}";
}

Numbers ClientsOf(const Traffic& traffic) {
  return {{"requests", traffic.requests},
          {"connections", traffic.connections},
          {"deaths", traffic.deaths},
          {"pauses", traffic.pauses},
          {"retries", traffic.retries},
          {"reentries", traffic.reentries},
          {"upgrades", traffic.upgrades},
          {"downgrades", traffic.downgrades},
          {"reentrant_changes", traffic.reentrant_changes},
          {"floors", traffic.floors},
          {"reader_floors", traffic.reader_floors},
          {"heavy", traffic.heavy},
          {"capped", traffic.capped},
          {"tagged", traffic.tagged},
          {"shed", traffic.shed},
          {"subscriptions", traffic.subscriptions},
          {"in_line", traffic.in_line},
          {"messages", traffic.messages},
          {"granted_by_message", traffic.granted_by_message},
          {"confirmed", traffic.confirmed},
          {"told_of_loss", traffic.told_of_loss},
          {"left_the_line", traffic.left_the_line},
          {"unheard", traffic.unheard},
          {"scripts", traffic.scripts},
          {"transactions", traffic.transactions},
          {"infos", traffic.infos}};
}

std::string ToJson(const Tally& tally) {
  const Numbers columns = {{"rounds", tally.rounds},
                           {"operations", tally.operations},
                           {"holds", tally.holds},
                           {"waits", tally.waits},
                           {"in_known_order", tally.ordered},
                           {"failovers", tally.failovers},
                           {"outage_us", static_cast<uint64_t>(tally.traffic.unavailable)},
                           {"answer_late_us", static_cast<uint64_t>(tally.longest_late)},
                           {"hand_over_us", static_cast<uint64_t>(tally.longest_idle)},
                           {"violations", tally.violations},
                           {"writes", tally.writes},
                           {"refused", tally.refused}};
  return "{\"columns\": " + ToJson(columns) + ",\n    \"faults\": " + ToJson(tally.faults) +
         ",\n    \"clients\": " + ToJson(ClientsOf(tally.traffic)) +
         ",\n    \"errors\": " + ToJson(tally.traffic.errors) + "}";
}

// What the rounds run on.
struct Subject {
  std::string engine;
  std::string module_version;
  std::string commit;
};

// "0.1.0" is number 100.
std::string ModuleVersion(testing::Client& client) {
  for (const testing::Reply& module : client.Do("MODULE", "LIST").elements) {
    if (module.Field("name").text != "turnstile") continue;
    const int64_t number = module.Field("ver").integer;
    return std::to_string(number / 10000) + '.' + std::to_string(number / 100 % 100) + '.' +
           std::to_string(number % 100);
  }
  return "unknown";
}

Subject FindSubject() {
  testing::Server server;
  testing::Client client = server.Connect();
  const char* commit = std::getenv("TURNSTILE_COMMIT");
  return {.engine = testing::EngineOf(client),
          .module_version = ModuleVersion(client),
          .commit = commit == nullptr ? "unknown" : commit};
}

// Written anew after each round, so that a campaign may be ended at any time.
void WriteResults(const Options& options, const Subject& subject,
                  const std::map<std::string, Tally>& tallies, Time length) {
  const std::string unfinished = options.out + ".new";
  std::ofstream file(unfinished);
  file << "{\n  \"engine\": " << Quoted(subject.engine)
       << ",\n  \"module_version\": " << Quoted(subject.module_version)
       << ",\n  \"commit\": " << Quoted(subject.commit) << ",\n  \"seed\": " << options.seed
       << ",\n  \"seconds\": " << length / kSecond
       << ",\n  \"round_seconds\": " << options.round / kSecond << ",\n  \"kinds\": {";
  const char* separator = "\n";
  for (const auto& [name, tally] : tallies) {
    file << separator << "   " << Quoted(name) << ": " << ToJson(tally);
    separator = ",\n";
  }
  file << "\n  }\n}\n";
  file.close();
  if (!file) throw std::runtime_error("cannot write " + unfinished);
  std::filesystem::rename(unfinished, options.out);
}

int RunCampaign(const Options& options) {
  const std::vector<Kind> kinds = AllKinds();
  for (const std::string& name : options.kinds) {
    if (std::none_of(kinds.begin(), kinds.end(),
                     [&](const Kind& kind) { return kind.name == name; })) {
      std::cerr << "faults: there is no kind " << name << "; --list names them\n";
      return 2;
    }
  }
  std::vector<const Kind*> chosen;
  for (const Kind& kind : kinds) {
    const bool named =
        std::find(options.kinds.begin(), options.kinds.end(), kind.name) != options.kinds.end();
    const bool possible = kind.why_not == nullptr || kind.why_not().empty();
    if (named && !possible) {
      std::cerr << "faults: " << kind.name << " cannot be run here: " << kind.why_not() << '\n';
      return 2;
    }
    if (named || (options.kinds.empty() && possible)) chosen.push_back(&kind);
  }
  auto* complaints = new Complaints;  // which belongs to GoogleTest
  ::testing::UnitTest::GetInstance()->listeners().Append(complaints);

  std::cout << "Seed " << options.seed << ", " << chosen.size() << " kinds of faults, "
            << options.length / kSecond << " s\n";
  std::map<std::string, Tally> tallies;
  const Subject subject = options.out.empty() ? Subject{} : FindSubject();
  const Time begin = Now();
  uint64_t violations = 0;
  uint64_t number = 0;
  const auto goes_on = [&] { return violations == 0 || options.keep_going; };
  // In each turn every kind has a round, in another order. The first turn is finished in any case.
  while (goes_on() && (number == 0 || Now() - begin < options.length)) {
    std::vector<const Kind*> turn = chosen;
    std::mt19937_64 order(options.seed + number);
    for (size_t i = turn.size(); i > 1; i--) std::swap(turn[i - 1], turn[order() % i]);
    for (const Kind* kind : turn) {
      if (!goes_on() || (number >= chosen.size() && Now() - begin >= options.length)) break;
      const Tally tally = RunRound(options, *kind, options.seed + number, *complaints);
      violations += tally.violations;
      tallies[kind->name].Add(tally);
      ++number;
      if (!options.out.empty()) WriteResults(options, subject, tallies, Now() - begin);
    }
  }
  PrintSummary(kinds, tallies, Now() - begin);
  std::cout << (violations == 0 ? "No violation.\n"
                                : "Violations: " + std::to_string(violations) + "\n");
  return violations == 0 ? 0 : 1;
}

int CheckAgain(const std::string& path) {
  std::ifstream file(path);
  if (!file.is_open()) throw std::runtime_error("cannot read " + path);
  const History history = ReadHistory(file);
  const Findings findings = Check(history);
  for (const Violation& violation : findings.violations) std::cout << Story(history, violation);
  std::cout << findings.operations << " operations, " << findings.violations.size()
            << " violations\n";
  return findings.violations.empty() ? 0 : 1;
}

std::vector<std::string> Split(const std::string& text) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, ',');) parts.push_back(part);
  return parts;
}

Options Parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i++) {
    const std::string_view option = argv[i];
    if (option == "--keep-going") {
      options.keep_going = true;
      continue;
    }
    if (option == "--list") {
      options.list = true;
      continue;
    }
    if (i + 1 >= argc) {
      throw std::invalid_argument("a value is missing after " + std::string(option));
    }
    const std::string value = argv[++i];
    const auto seconds = [&](double unit) {
      return static_cast<Time>(std::stod(value) * unit * kSecond);
    };
    if (option == "--minutes") {
      options.length = seconds(60);
    } else if (option == "--seconds") {
      options.length = seconds(1);
    } else if (option == "--round-seconds") {
      options.round = seconds(1);
    } else if (option == "--seed") {
      options.seed = std::stoull(value);
    } else if (option == "--kind") {
      options.kinds = Split(value);
    } else if (option == "--folder") {
      options.folder = value;
    } else if (option == "--check") {
      options.history = value;
    } else if (option == "--out") {
      options.out = value;
    } else if (option == "--histories") {
      options.histories = value;
    } else {
      throw std::invalid_argument("unknown option " + std::string(option));
    }
  }
  return options;
}

int Main(int argc, char** argv) {
  if (argc > 1 && std::string_view(argv[1]) == ProcessClient::kOption) {
    return ProcessClient::Main(argc - 2, argv + 2);
  }
  try {
    const Options options = Parse(argc, argv);
    if (options.list) {
      for (const Kind& kind : AllKinds()) {
        std::cout << std::left << std::setw(18) << kind.name << kind.what << '\n';
      }
      return 0;
    }
    return options.history.empty() ? RunCampaign(options) : CheckAgain(options.history);
  } catch (const std::exception& error) {
    std::cerr << "faults: " << error.what() << '\n';
    return 2;
  }
}

}  // namespace
}  // namespace turnstile::fault

int main(int argc, char** argv) { return turnstile::fault::Main(argc, argv); }
