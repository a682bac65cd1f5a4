// The test harness itself, on a server without the module: a broken tool would make every other
// test worthless.

#include <gtest/gtest-spi.h>
#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "support/aof.h"
#include "support/client.h"
#include "support/dump_payload.h"
#include "support/eventually.h"
#include "support/replication_stream.h"
#include "support/resp3.h"
#include "support/server.h"

namespace turnstile::testing {
namespace {

using Commands = std::vector<Command>;

ServerOptions Plain(std::vector<std::string> args = {}) {
  return {.args = std::move(args), .load_module = false};
}

TEST(Harness, Resp2Replies) {
  Server server(Plain());
  Client client = server.Connect();
  const std::string binary("a\0b\r\n\xff", 6);
  EXPECT_EQ(client.Do("SET", "k", binary), Reply::Ok());
  EXPECT_EQ(client.Do("GET", std::string_view("k")), Reply::Str(binary));
  EXPECT_EQ(client.Do("GET", "k").ToString(), R"("a\x00b\r\n\xff")");
  EXPECT_EQ(client.Do("INCRBY", "n", -42), Reply::Int(-42));
  EXPECT_EQ(client.Do("GET", "none"), Reply::Nil());
  EXPECT_TRUE(client.Do("INCR", "k").IsError("ERR value is not an integer"));
  EXPECT_EQ(client.Do({"MGET", "n", "none"}), Reply::Array({Reply::Str("-42"), Reply::Nil()}));
  EXPECT_EQ(client.Do("EVAL", "return {1,{2,'x'}}", 0).ToString(),
            "1) (integer) 1\n2) 1) (integer) 2\n   2) \"x\"");
  EXPECT_EQ(client.Do("XINFO", "STREAM", "none"), Reply::Error("ERR no such key"));
  EXPECT_TRUE(client.Do("CONFIG", "GET", "port").Field("port") ==
              Reply::Str(std::to_string(server.port())));
  EXPECT_TRUE(client.Do("CONFIG", "GET", "port").Field("nix").IsError("NOFIELD"));
}

TEST(Harness, ClientWaitsPipelinesAndSurvivesServerExit) {
  Server server(Plain());
  Client waiter = server.Connect();
  Client client = server.Connect();
  waiter.Send("BLPOP", "list", 0);
  waiter.Send("PING");
  EXPECT_FALSE(waiter.HasReply(Milliseconds{50}));
  EXPECT_TRUE(waiter.Read(Milliseconds{1}).IsError("TIMEOUT:"));
  EXPECT_EQ(client.Do("RPUSH", "list", "x"), Reply::Int(1));
  EXPECT_EQ(waiter.Read(), Reply::Array({Reply::Str("list"), Reply::Str("x")}));
  EXPECT_EQ(waiter.Read(), Reply::Status("PONG"));

  // The server notices a closed connection, even if another server was started in between.
  Server other(Plain());
  waiter.Close();
  EXPECT_TRUE(waiter.Do("PING").IsError("DISCONNECTED: closed by the test"));
  EXPECT_TRUE(Eventually([&] {
    return client.Do("INFO", "clients").text.find("connected_clients:1\r") != std::string::npos;
  }));

  server.Kill9();
  EXPECT_EQ(server.exit_code(), 128 + 9);
  EXPECT_TRUE(client.Do("PING").IsError("DISCONNECTED:"));
  EXPECT_TRUE(client.Do("PING").IsError("DISCONNECTED:"));
  EXPECT_FALSE(server.Connect().connected());
}

TEST(Harness, Resp3Replies) {
  Server server(Plain());
  RawConnection raw = server.ConnectRaw();
  const Reply hello = raw.Hello(3);
  ASSERT_TRUE(hello.IsMap()) << hello;
  EXPECT_EQ(hello.Field("proto"), Reply::Int(3));
  EXPECT_EQ(raw.Do("GET", "none"), Reply::Nil());
  EXPECT_EQ(raw.Do("DEBUG", "PROTOCOL", "true"), Reply::Bool(true));
  EXPECT_EQ(raw.Do("DEBUG", "PROTOCOL", "double").text, "3.141");
  EXPECT_EQ(raw.Do("DEBUG", "PROTOCOL", "bignum").kind, Reply::Kind::kBigNumber);
  EXPECT_EQ(raw.Do("DEBUG", "PROTOCOL", "verbatim").text, "txt:This is a verbatim\nstring");
  EXPECT_EQ(raw.Do("DEBUG", "PROTOCOL", "set").kind, Reply::Kind::kSet);
  EXPECT_EQ(raw.Do("DEBUG", "PROTOCOL", "map").ToString(),
            "1# (integer) 0 => (false)\n2# (integer) 1 => (true)\n3# (integer) 2 => (false)");
  EXPECT_EQ(raw.Do("DEBUG", "PROTOCOL", "attrib").text, "Some real reply following the attribute");
  EXPECT_TRUE(raw.Do("COMMAND", "DOCS").IsMap());

  raw.Do("CLIENT", "TRACKING", "ON");
  raw.Do("GET", "k");
  server.Connect().Do("SET", "k", "v");
  EXPECT_EQ(raw.Do("PING"), Reply::Status("PONG"));
  ASSERT_EQ(raw.pushes().size(), 1U);
  EXPECT_EQ(raw.pushes()[0].elements[0], Reply::Str("invalidate"));

  EXPECT_TRUE(raw.Hello(2).IsArray());
  raw.SendCommand({"QUIT"});
  EXPECT_EQ(raw.ReadUntil("\r\n"), "+OK");
  EXPECT_TRUE(raw.Ends());
}

TEST(Harness, ProtocolViolationsAreDetected) {
  const auto parse = [](const std::string& bytes, Protocol protocol) -> std::string {
    size_t size = 0;
    try {
      const auto reply = ParseReply(bytes, protocol, &size);
      return !reply ? "incomplete" : size == bytes.size() ? "ok" : "bytes left";
    } catch (const ProtocolError&) {
      return "violation";
    }
  };
  for (const char* bytes : {"-ERR a\nb\r\n", "-ERR a\rb\r\n", "-\r\n", "\r\n", "?x\r\n", ":+1\r\n",
                            ":01\r\n", ":-0\r\n", ":\r\n", ":1 \r\n", ":9223372036854775808\r\n",
                            "$-2\r\n", "$1\r\nab\r\n", "$?\r\n", "*1048577\r\n", "*1\r\nx\r\n"}) {
    EXPECT_EQ(parse(bytes, Protocol::kResp2), "violation") << Quoted(bytes);
    EXPECT_EQ(parse(bytes, Protocol::kResp3), "violation") << Quoted(bytes);
  }
  for (const char* bytes : {"_\r\n", "%0\r\n", "#t\r\n", ",1.5\r\n", "(12\r\n", "~0\r\n",
                            ">1\r\n+x\r\n", "=5\r\ntxt:x\r\n", "!3\r\nERR\r\n"}) {
    EXPECT_EQ(parse(bytes, Protocol::kResp2), "violation") << Quoted(bytes);
    EXPECT_EQ(parse(bytes, Protocol::kResp3), "ok") << Quoted(bytes);
  }
  for (const char* bytes : {"$-1\r\n", "*-1\r\n"}) {
    EXPECT_EQ(parse(bytes, Protocol::kResp2), "ok") << Quoted(bytes);
    EXPECT_EQ(parse(bytes, Protocol::kResp3), "violation") << Quoted(bytes);
  }
  for (const char* bytes :
       {"#x\r\n", "_x\r\n", "(1x\r\n", ",x\r\n", "=2\r\nxx\r\n", "%-1\r\n", "*1\r\n>1\r\n+x\r\n"}) {
    EXPECT_EQ(parse(bytes, Protocol::kResp3), "violation") << Quoted(bytes);
  }
  std::string deep;
  for (int i = 0; i < 1000; i++) deep += "*1\r\n";
  EXPECT_EQ(parse(deep + ":1\r\n", Protocol::kResp3), "violation");

  const std::string whole = "*3\r\n$3\r\na\r\n\r\n%1\r\n+k\r\n_\r\n-ERR x\r\n";
  for (size_t cut = 0; cut < whole.size(); cut++) {
    EXPECT_EQ(parse(whole.substr(0, cut), Protocol::kResp3), "incomplete") << cut;
  }
  EXPECT_EQ(parse(whole, Protocol::kResp3), "ok");

  // The same over a socket, where a reply arrives in pieces and a time-out consumes nothing.
  std::array<int, 2> ends{};
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends.data()), 0);
  RawConnection reader = RawConnection::FromFd(ends[0]);
  RawConnection writer = RawConnection::FromFd(ends[1]);
  writer.WriteRaw("$5\r\nhel");
  EXPECT_THROW(reader.ReadReply(Milliseconds{1}), ConnectionError);
  writer.WriteRaw("lo\r\n-ERR a\nb\r\n");
  EXPECT_EQ(reader.ReadReply(), Reply::Str("hello"));
  EXPECT_THROW(reader.ReadReply(), ProtocolError);
}

TEST(Harness, RestartKeepsPortFolderAndData) {
  Server server(Plain({"--appendonly", "yes", "--appendfsync", "always"}));
  const int port = server.port();
  const std::string dir = server.dir();
  EXPECT_EQ(server.Connect().Do("SET", "k", "v"), Reply::Ok());
  const pid_t first = server.pid();
  server.Kill9();
  EXPECT_FALSE(server.running());
  ASSERT_TRUE(server.Restart());
  EXPECT_NE(server.pid(), first);
  EXPECT_EQ(server.port(), port);
  EXPECT_EQ(server.dir(), dir);
  EXPECT_EQ(server.Connect().Do("GET", "k"), Reply::Str("v"));
  EXPECT_EQ(server.Stop(), 0);

  server.options().args = {"--requirepass", "secret"};
  ASSERT_TRUE(server.Restart());
  EXPECT_TRUE(server.Connect().Do("GET", "k").IsError("NOAUTH"));

  server.Pause();
  Client client = server.Connect();
  client.Send("AUTH", "secret");
  EXPECT_FALSE(client.HasReply(Milliseconds{50}));
  server.Continue();
  EXPECT_EQ(client.Read(), Reply::Ok());
}

TEST(Harness, FolderAndProcessAreRemovedAtEnd) {
  std::string dir;
  pid_t pid;
  {
    Server server(Plain());
    dir = server.dir();
    pid = server.pid();
    EXPECT_TRUE(std::filesystem::exists(dir));
    server.Pause();  // it is stopped all the same
  }
  EXPECT_FALSE(std::filesystem::exists(dir));
  EXPECT_NE(kill(pid, 0), 0);
}

// EXPECT_NONFATAL_FAILURE expects one statement without commas.
void StartWith(ServerOptions options, const Command& command = {"PING"}) {
  Server server(std::move(options));
  server.Connect().Do(command);
}

TEST(Harness, ServerErrorsFailTest) {
  EXPECT_NONFATAL_FAILURE(StartWith(Plain(), {"DEBUG", "SEGFAULT"}), "crashed by signal: 11");
  EXPECT_NONFATAL_FAILURE(StartWith(Plain(), {"DEBUG", "ASSERT"}), "ASSERTION FAILED");
  EXPECT_NONFATAL_FAILURE(StartWith(Plain(), {"SHUTDOWN"}), "ended by itself, exit code 0");
  EXPECT_NONFATAL_FAILURE(StartWith(Plain({"--nonsense", "1"})), ">>> 'nonsense");

  Server server(
      {.args = {"--loadmodule", "/nowhere.so"}, .load_module = false, .must_start = false});
  EXPECT_FALSE(server.running());
  EXPECT_EQ(server.exit_code(), 1);
  EXPECT_NE(server.Log().find("/nowhere.so"), std::string::npos);
  EXPECT_EQ(server.CrashReport(), "");
}

TEST(Harness, ReplicationStreamShowsEveryCommand) {
  for (const bool diskless : {true, false}) {
    Server server(Plain({"--repl-diskless-sync", diskless ? "yes" : "no"}));
    Client client = server.Connect();
    client.Do("SET", "before", std::string(100000, 'x'));
    ReplicationStream stream(server.port(), {.show_select = true, .diskless = diskless});
    client.Do("SET", "k", "a\r\nb");
    client.Do("GET", "k");
    client.Do("MULTI");
    client.Do("INCR", "n");
    client.Do("INCR", "n");
    client.Do("EXEC");
    EXPECT_EQ(client.Do("WAIT", 1, 1), Reply::Int(0)) << "nobody has read the stream yet";
    EXPECT_EQ(stream.Until(client), (Commands{{"SELECT", "0"},
                                              {"SET", "k", "a\r\nb"},
                                              {"MULTI"},
                                              {"INCR", "n"},
                                              {"INCR", "n"},
                                              {"EXEC"}}));
    client.Do("SELECT", 3);
    client.Do("SET", "k", 3);
    EXPECT_EQ(stream.Next(), (Command{"SELECT", "3"}));
    EXPECT_EQ(stream.Next(), (Command{"SET", "k", "3"}));
    EXPECT_EQ(stream.db(), 3);
    EXPECT_EQ(stream.Until(client), Commands{});
    EXPECT_TRUE(Eventually([&] {
      EXPECT_TRUE(stream.Next(Milliseconds{100}).empty());
      return client.Do("WAIT", 1, 100) == Reply::Int(1);
    })) << "all read and acknowledged";
  }
}

TEST(Harness, AofIsReadFromAllItsFiles) {
  for (const bool preamble : {true, false}) {
    Server server(
        Plain({"--appendonly", "yes", "--appendfsync", "always", "--aof-timestamp-enabled", "yes",
               "--aof-use-rdb-preamble", preamble ? "yes" : "no"}));
    Client client = server.Connect();
    client.Do("SET", "a", 1);
    client.Do("SELECT", 2);
    client.Do("SET", "b", "x\r\ny");
    EXPECT_EQ(
        ReadAof(server.dir()),
        (Commands{{"SELECT", "0"}, {"SET", "a", "1"}, {"SELECT", "2"}, {"SET", "b", "x\r\ny"}}));
    client.Do("BGREWRITEAOF");
    ASSERT_TRUE(Eventually([&] {
      const std::string info = client.Do("INFO", "persistence").text;
      return info.find("aof_rewrite_in_progress:0") != std::string::npos &&
             info.find("aof_rewrite_scheduled:0") != std::string::npos;
    }));
    client.Do("DEL", "b");
    Commands expected;
    if (!preamble) {
      expected = {{"SELECT", "0"}, {"SET", "a", "1"}, {"SELECT", "2"}, {"SET", "b", "x\r\ny"}};
    }
    expected.insert(expected.end(), {{"SELECT", "2"}, {"DEL", "b"}});
    EXPECT_EQ(ReadAof(server.dir()), expected);
  }
  EXPECT_THROW(ParseAof("*1\r\n$4\r\nPI"), ProtocolError);
}

TEST(Harness, DumpPayloadsCanBeParsedAndResealed) {
  Server server(Plain());
  Client client = server.Connect();
  client.Do("SET", "k", "hello");
  const std::string payload = client.Do("DUMP", "k").text;
  auto opened = DumpPayload::Open(payload);
  ASSERT_TRUE(opened) << Quoted(payload);
  EXPECT_EQ(opened->body, std::string("\0\5hello", 7));
  EXPECT_EQ(opened->Seal(), payload);

  opened->body[2] = 'J';
  EXPECT_EQ(client.Do("RESTORE", "j", 0, opened->Seal()), Reply::Ok());
  EXPECT_EQ(client.Do("GET", "j"), Reply::Str("Jello"));

  std::string flipped = payload;
  flipped[3] = static_cast<char>(flipped[3] ^ 1);
  EXPECT_FALSE(DumpPayload::Open(flipped));
  EXPECT_FALSE(DumpPayload::Open("short"));
}

}  // namespace
}  // namespace turnstile::testing
