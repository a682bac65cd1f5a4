// The descriptions of the commands agree with each other and with their behaviour: in the server
// (LOCK.HELP, COMMAND DOCS), in docs/commands.md, in the README and above the handlers.

#include <gtest/gtest.h>
#include <stdio.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "support/lock_test.h"
#include "support/markdown.h"
#include "support/source_files.h"

namespace turnstile::testing {
namespace {

using Lines = std::vector<std::string>;
class DocsTest : public SharedServerTest<DocsTest> {
 protected:
  Reply Do(const Command& command) { return client_.Do(command); }

  // LOCK.HELP without the summary of each command.
  Lines HelpGrammar() {
    Lines lines = Do({"LOCK.HELP"}).Texts();
    EXPECT_FALSE(lines.empty());
    std::erase_if(lines, [](const std::string& line) { return line.starts_with(" "); });
    return lines;
  }

  // The names in LOCK.HELP, in its order.
  Lines CommandNames() {
    Lines names = HelpGrammar();
    for (std::string& name : names) name.resize(std::min(name.find(' '), name.size()));
    return names;
  }

  Reply Docs(const std::string& name) { return Do({"COMMAND", "DOCS", name}).Field(name); }

  // The fields of COMMAND INFO: name, arity, flags, first, last, step, categories, tips, key specs.
  std::vector<Reply> Info(const std::string& name) {
    const Reply reply = Do({"COMMAND", "INFO", name});
    if (reply.elements.size() != 1 || reply.elements[0].elements.size() < 9) {
      ADD_FAILURE() << name << ": " << reply;
      return std::vector<Reply>(9);
    }
    return reply.elements[0].elements;
  }
};

// --- Grammar ----------------------------------------------------------------------------------

std::string Render(const Reply& arguments, const std::string& between);

// An argument as COMMAND DOCS describes it, in the notation of the Redis documentation.
std::string RenderOne(const Reply& argument) {
  const Lines flags = argument.Field("flags").Texts();
  const bool optional = std::count(flags.begin(), flags.end(), "optional") != 0;
  const bool multiple = std::count(flags.begin(), flags.end(), "multiple") != 0;
  const std::string type = argument.Field("type").text;
  std::string value;
  if (type == "oneof") {
    value = Render(argument.Field("arguments"), " | ");
    if (!optional) value = "<" + value + ">";
  } else if (type == "block") {
    value = Render(argument.Field("arguments"), " ");
  } else if (type != "pure-token") {
    value = argument.Field("name").text;
  }
  if (multiple) value += optional ? " ..." : " [" + value + " ...]";
  if (const Reply token = argument.Field("token"); token.IsString()) {
    value = value.empty() ? token.text : token.text + " " + value;
  }
  return optional ? "[" + value + "]" : value;
}

std::string Render(const Reply& arguments, const std::string& between) {
  std::string text;
  for (const Reply& argument : arguments.elements) {
    if (!text.empty()) text += between;
    text += RenderOne(argument);
  }
  return text;
}

TEST_F(DocsTest, HelpListsEveryPublicCommand) {
  EXPECT_EQ(CommandNames(), (Lines{"LOCK.ACQUIRE", "LOCK.RELEASE", "LOCK.TOUCH", "LOCK.FENCE",
                                   "LOCK.INFO", "LOCK.LIST", "LOCK.TOP", "LOCK.HELP"}));
  Lines registered = Do({"COMMAND", "LIST", "FILTERBY", "MODULE", "turnstile"}).Texts();
  Lines expected = CommandNames();
  expected.insert(expected.end(), {"LOCK.FACT", "LOCK.HELD", "LOCK.PROBE"});
  std::sort(registered.begin(), registered.end());
  std::sort(expected.begin(), expected.end());
  EXPECT_EQ(registered, expected) << "the internal commands are not for callers";
}

TEST_F(DocsTest, CommandDocsAgreeWithHelp) {
  const Lines help = Do({"LOCK.HELP"}).Texts();
  Lines rendered;
  for (const std::string& name : CommandNames()) {
    const Reply docs = Docs(name);
    rendered.push_back(name);
    const std::string arguments = Render(docs.Field("arguments"), " ");
    if (!arguments.empty()) rendered.back() += " " + arguments;
    rendered.push_back("    " + docs.Field("summary").text);
  }
  EXPECT_EQ(rendered, help);
}

// The complexity of each command.
const std::map<std::string, std::string> kComplexities = {
    {"LOCK.ACQUIRE", "O(log N) for each lock"},
    {"LOCK.RELEASE", "O(log N) for each lock, where N is the number of its holders, and O(1) for"},
    {"LOCK.TOUCH", "O(log N) for each lock"},
    {"LOCK.FENCE", "O(log N) for each lock"},
    {"LOCK.INFO", "O(N) where N is the number of holders"},
    {"LOCK.LIST", "O(N) where N is COUNT"},
    {"LOCK.TOP", "O(N log N) where N is the number of locks with waiting requests"},
    {"LOCK.HELP", "O(1)"},
};

TEST_F(DocsTest, CommandDocsAreComplete) {
  for (const std::string& name : CommandNames()) {
    const Reply docs = Docs(name);
    EXPECT_GT(docs.Field("summary").text.size(), 10U) << docs;
    EXPECT_EQ(docs.Field("since"), Reply::Str("0.1.0"));
    EXPECT_TRUE(docs.Field("complexity").text.starts_with(kComplexities.at(name))) << docs;
    EXPECT_EQ(docs.Field("group"), Reply::Str("module"));
    EXPECT_EQ(docs.Field("module"), Reply::Str("turnstile"));
  }
}

// Each section of docs/commands.md begins with the grammar of its command.
TEST_F(DocsTest, ReferenceAgreesWithHelp) {
  Lines grammar;
  bool wanted = false;
  bool goes_on = false;  // a long grammar takes several lines
  for (const std::string& line : ReadSource("docs/commands.md")) {
    if (line.starts_with("## ")) wanted = line.starts_with("## LOCK.");
    const bool is_code = line.starts_with("    ");
    if (is_code && goes_on) {
      grammar.back() += " " + Trim(line);
    } else if (is_code && wanted) {
      grammar.push_back(Trim(line));
      wanted = false;
      goes_on = true;
      continue;
    }
    goes_on = goes_on && is_code;
  }
  EXPECT_EQ(grammar, HelpGrammar());
}

TEST_F(DocsTest, ReferenceHasSectionForEachCommand) {
  Lines headings;
  for (const std::string& line : ReadSource("docs/commands.md")) {
    if (line.starts_with("## LOCK.")) headings.push_back(line.substr(3));
  }
  EXPECT_EQ(headings, CommandNames());
}

// The comment above each handler, of one or more lines, is the grammar of its command.
TEST_F(DocsTest, HandlerCommentsAgreeWithHelp) {
  const std::regex handler(R"(int Handle(\w+)\(.*\{)");
  Lines grammar;
  std::string comment;  // above the current line
  for (const std::string& line : ReadSource("module/redis/commands.cc")) {
    std::smatch match;
    if (line.starts_with("// ")) {
      comment += (comment.empty() ? "" : " ") + line.substr(3);
      continue;
    }
    if (std::regex_match(line, match, handler) && match[1] != "Fact" && match[1] != "Held" &&
        match[1] != "Probe") {
      EXPECT_TRUE(comment.starts_with("LOCK.")) << line << " below: " << comment;
      grammar.push_back(comment);
    }
    comment.clear();
  }
  EXPECT_EQ(grammar, HelpGrammar());
}

// --- The table of commands.md: flags, keys, memory, replicas ----------------------------------

struct TableRow {
  std::string name;
  std::set<std::string> flags;
  std::set<std::string> key_access;  // empty: no key
  std::string when_full;
  std::string on_a_replica;
};

std::vector<TableRow> CommandTable() {
  std::vector<TableRow> table;
  for (const Row& row : ReadTable("docs/commands.md", "command")) {
    EXPECT_EQ(row.size(), 5U);
    if (row.size() != 5) continue;
    const std::vector<std::string> flags = Split(row[1], ',');
    const std::vector<std::string> access = Split(row[2], ',');
    table.push_back(
        {row[0], std::set(flags.begin(), flags.end()),
         row[2] == "no key" ? std::set<std::string>() : std::set(access.begin(), access.end()),
         row[3], row[4]});
  }
  return table;
}

// A valid request for each command.
Command RequestOf(const std::string& name) {
  if (name == "LOCK.HELP" || name == "LOCK.LIST" || name == "LOCK.TOP") return {name};
  if (name == "LOCK.ACQUIRE" || name == "LOCK.TOUCH") return {name, "job", "alice", "PX", "60000"};
  if (name == "LOCK.RELEASE") return {name, "job", "alice"};
  return {name, "job"};
}

// The most common mistakes and the replies: as documented, up to the ellipsis.
TEST_F(DocsTest, CommonMistakesGetDocumentedReplies) {
  const std::vector<Row> rows = ReadTable("docs/commands.md", "request");
  EXPECT_EQ(rows.size(), 7U);
  for (const Row& row : rows) {
    SCOPED_TRACE(row.at(0));
    const std::string& answer = row.at(1);
    const size_t dots = answer.find("…");
    const std::string reply = Do(Split(row[0], ' ')).text;
    EXPECT_EQ(reply.substr(0, dots), answer.substr(0, dots));
  }
}

TEST_F(DocsTest, CommandTableHasEveryCommand) {
  Lines names;
  for (const TableRow& row : CommandTable()) names.push_back(row.name);
  EXPECT_EQ(names, CommandNames());
}

TEST_F(DocsTest, CommandTableHasFlagsAndKeys) {
  for (const TableRow& row : CommandTable()) {
    SCOPED_TRACE(row.name);
    const std::vector<Reply> info = Info(row.name);
    const Lines flags = info[2].Texts();
    std::set<std::string> expected = row.flags;
    expected.insert("module");
    EXPECT_EQ(std::set(flags.begin(), flags.end()), expected);

    // Keys at other positions than the first are those after ALSO, which have a key specification,
    // and those after THEN, which the module reports itself.
    const std::vector<Reply>& specs = info[8].elements;
    const bool then = row.name == "LOCK.FENCE";
    const bool also = row.flags.contains("movablekeys") && !then;
    ASSERT_EQ(specs.size(), row.key_access.empty() ? 0U : also ? 2U : 1U);
    if (also) {
      EXPECT_EQ(specs[1].Field("begin_search").Field("spec").Field("keyword"), Reply::Str("ALSO"));
      EXPECT_EQ(specs[1].Field("find_keys").Field("type"), Reply::Str("keynum"));
    }
    for (const Reply& spec : specs) {
      const Lines access = spec.Field("flags").Texts();
      std::set<std::string> expected_access = row.key_access;
      if (then) expected_access.insert("variable_flags");
      EXPECT_EQ(std::set(access.begin(), access.end()), expected_access);
    }
    const int64_t position = row.key_access.empty() ? 0 : 1;
    EXPECT_EQ(info[3], Reply::Int(position));
    EXPECT_EQ(info[4], Reply::Int(position));

    if (row.key_access.empty()) continue;
    Command getkeys = RequestOf(row.name);
    getkeys.insert(getkeys.begin(), {"COMMAND", "GETKEYS"});
    Lines expected_keys = {"job"};
    EXPECT_EQ(Do(getkeys).Texts(), expected_keys);
    if (also) {
      getkeys.insert(getkeys.end(), {"ALSO", "2", "PX", "task"});
      expected_keys.insert(expected_keys.end(), {"PX", "task"});
      EXPECT_EQ(Do(getkeys).Texts(), expected_keys);
    }
    getkeys[1] = "GETKEYSANDFLAGS";
    const Reply keys = Do(getkeys);
    ASSERT_EQ(keys.elements.size(), expected_keys.size()) << keys;
    for (const Reply& key : keys.elements) {
      const Lines access = key.elements.at(1).Texts();
      EXPECT_EQ(std::set(access.begin(), access.end()), row.key_access);
    }
  }
}

// "works", or the documented error.
void ExpectOutcome(const Reply& reply, const std::string& outcome) {
  if (outcome == "works") {
    EXPECT_FALSE(reply.IsError()) << reply;
  } else {
    ASSERT_TRUE(outcome.starts_with("-")) << outcome;
    EXPECT_TRUE(reply.IsError(outcome.substr(1) + " ")) << reply;
  }
}

TEST_F(DocsTest, CommandTableStatesWhatWorksWhenMemoryIsFull) {
  EXPECT_EQ(Do({"CONFIG", "SET", "maxmemory", "1"}), Reply::Ok());
  for (const TableRow& row : CommandTable()) {
    SCOPED_TRACE(row.name);
    ExpectOutcome(Do(RequestOf(row.name)), row.when_full);
  }
  EXPECT_EQ(Do({"CONFIG", "SET", "maxmemory", "0"}), Reply::Ok());
}

TEST_F(DocsTest, CommandTableStatesWhatWorksOnReplica) {
  // The primary need not be reachable.
  EXPECT_EQ(Do({"REPLICAOF", "127.0.0.1", "1"}), Reply::Ok());
  for (const char* read_only : {"yes", "no"}) {
    EXPECT_EQ(Do({"CONFIG", "SET", "replica-read-only", read_only}), Reply::Ok());
    for (const TableRow& row : CommandTable()) {
      SCOPED_TRACE(row.name + ", replica-read-only " + read_only);
      ExpectOutcome(Do(RequestOf(row.name)), row.on_a_replica);
    }
  }
  // Only LOCK.HELP is flagged as usable with stale data.
  EXPECT_EQ(Do({"CONFIG", "SET", "replica-serve-stale-data", "no"}), Reply::Ok());
  for (const TableRow& row : CommandTable()) {
    SCOPED_TRACE(row.name);
    ExpectOutcome(Do(RequestOf(row.name)), row.flags.contains("stale") ? "works" : "-MASTERDOWN");
  }
  EXPECT_EQ(Do({"CONFIG", "SET", "replica-serve-stale-data", "yes", "replica-read-only", "yes"}),
            Reply::Ok());
  EXPECT_EQ(Do({"REPLICAOF", "NO", "ONE"}), Reply::Ok());
}

// --- README and examples ----------------------------------------------------------------------

// Replaces each 16-digit token by the corresponding one of this run.
std::string Translate(const std::string& text, const std::map<std::string, std::string>& tokens) {
  std::string result = text;
  for (const auto& [written, live] : tokens) {
    for (size_t at = 0; (at = result.find(written, at)) != std::string::npos; at += live.size()) {
      result.replace(at, written.size(), live);
    }
  }
  return result;
}

// The session in the README: what is typed at the prompt, and the lines printed below it.
struct Exchange {
  std::string request;
  std::string reply;
};

std::vector<Exchange> ReadSession() {
  const std::string prompt = "127.0.0.1:6379> ";
  std::vector<Exchange> session;
  bool inside = false;
  for (const std::string& line : ReadSource("README.md")) {
    if (line.starts_with(prompt)) {
      session.push_back({line.substr(prompt.size()), ""});
      inside = true;
    } else if (line.starts_with("```")) {
      inside = false;
    } else if (inside) {
      session.back().reply += (session.back().reply.empty() ? "" : "\n") + line;
    }
  }
  return session;
}

TEST_F(DocsTest, ReadmeSessionGivesPrintedReplies) {
  const std::regex token(R"(\(integer\) (\d{16}))");
  std::map<std::string, std::string> tokens;  // documented -> issued in this run
  const std::vector<Exchange> session = ReadSession();
  EXPECT_EQ(session.size(), 10U);
  for (const Exchange& exchange : session) {
    const std::string request = Translate(exchange.request, tokens);
    const std::string reply = Do(Split(request, ' ')).ToString();
    std::smatch written;
    std::smatch issued;
    if (std::regex_match(exchange.reply, written, token) &&
        std::regex_match(reply, issued, token)) {
      tokens.emplace(written[1], issued[1]);  // the first time it is seen
    }
    EXPECT_EQ(reply, Translate(exchange.reply, tokens)) << request;
  }
  ASSERT_EQ(tokens.size(), 2U);
  EXPECT_LT(tokens.begin()->second, tokens.rbegin()->second) << "they rise as they are written";
}

TEST_F(DocsTest, ReadmeCommandsAgreeWithHelp) {
  std::set<std::string> named;
  const std::regex name(R"(LOCK\.[A-Z]+)");
  for (const std::string& line : ReadSource("README.md")) {
    for (std::sregex_iterator at(line.begin(), line.end(), name); at != std::sregex_iterator();
         ++at) {
      named.insert(at->str());
    }
  }
  const Lines names = CommandNames();
  EXPECT_EQ(named, std::set(names.begin(), names.end()));
}

TEST_F(DocsTest, SettingsTableMatchesServer) {
  const std::vector<Row> rows = ReadTable("docs/operations.md", "setting");
  const Reply settings = Do({"CONFIG", "GET", "turnstile.*"});
  EXPECT_EQ(settings.elements.size(), 2 * rows.size()) << settings;
  for (const Row& row : rows) {
    ASSERT_GE(row.size(), 3U);
    const std::string& name = row[0];
    SCOPED_TRACE(name);
    EXPECT_EQ(settings.Field(name), Reply::Str(row[1])) << "default";
    if (row[2] == "yes, no") {
      const bool button = name == "turnstile.reset-stats";  // always reads as "no"
      for (const std::string value : {"yes", "no", "yes"}) {
        EXPECT_EQ(Do({"CONFIG", "SET", name, value}), Reply::Ok());
        EXPECT_EQ(Do({"CONFIG", "GET", name}).Field(name), Reply::Str(button ? "no" : value));
      }
      EXPECT_TRUE(Do({"CONFIG", "SET", name, "maybe"}).IsError("ERR CONFIG SET failed"));
      EXPECT_EQ(Do({"CONFIG", "SET", name, row[1]}), Reply::Ok());
      continue;
    }
    std::smatch range;
    ASSERT_TRUE(std::regex_match(row[2], range, std::regex(R"((\d+) to (\d+))"))) << row[2];
    const int64_t least = std::stoll(range[1]);
    const int64_t most = std::stoll(range[2]);
    for (const int64_t inside : {least, most}) {
      EXPECT_EQ(client_.Do("CONFIG", "SET", name, inside), Reply::Ok());
      EXPECT_EQ(Do({"CONFIG", "GET", name}).Field(name), Reply::Str(std::to_string(inside)));
    }
    for (const int64_t outside : {least - 1, most + 1}) {
      EXPECT_TRUE(client_.Do("CONFIG", "SET", name, outside).IsError("ERR CONFIG SET failed"));
      EXPECT_EQ(Do({"CONFIG", "GET", name}).Field(name), Reply::Str(std::to_string(most)));
    }
    EXPECT_EQ(Do({"CONFIG", "SET", name, row[1]}), Reply::Ok());
  }
}

struct Outcome {
  int status;  // as of waitpid
  std::string output;
};

Outcome RunShell(const std::string& command) {
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  if (pipe == nullptr) return {-1, ""};
  std::string output;
  for (int c = fgetc(pipe); c != EOF; c = fgetc(pipe)) output += static_cast<char>(c);
  return {pclose(pipe), output};
}

TEST_F(DocsTest, RedisCliExampleRuns) {
  const std::string script = SourcePath("client-examples/redis-cli/table-12.sh");
  const auto [status, output] =
      RunShell("sh '" + script + "' -p " + std::to_string(server().port()));
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << output;
  EXPECT_TRUE(output.ends_with("Everybody got the right answer.\n")) << output;
  EXPECT_EQ(Do({"DBSIZE"}), Reply::Int(0)) << "it tidies up";
}

// Every page: links, anchors, LOCK commands, configurations, scripts, settings and fields.
TEST_F(DocsTest, LinksCommandsAndConfigurationsAreCorrect) {
  const auto [status, output] =
      RunShell("TURNSTILE_MODULE='" + ModulePath() + "' TURNSTILE_SOURCE_DIR='" + SourcePath("") +
               "' /usr/bin/python3 '" + SourcePath("tests/docs/check") + "'");
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << output;
}

}  // namespace
}  // namespace turnstile::testing
