// Untrusted values: damaged or forged RESTORE payloads and RDB files. Anything that is not exactly
// a lock is refused, and the server survives.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "support/client.h"
#include "support/clock.h"
#include "support/dump_payload.h"
#include "support/eventually.h"
#include "support/failover.h"
#include "support/lock_test.h"
#include "support/replication_stream.h"
#include "support/reply.h"
#include "support/server.h"

namespace turnstile::testing {
namespace {

constexpr int64_t kMaxToken = (int64_t{1} << 53) - 1;
constexpr int64_t kFarFuture = 7258118400000;  // the year 2200
constexpr size_t kModuleIdEnd = 10;  // the type byte, the length mark and the 64-bit module id

// A number in little-endian bytes.
std::string Word(uint64_t value, int bytes = 8) {
  std::string word;
  for (int i = 0; i < bytes; i++) word += static_cast<char>(value >> (8 * i) & 0xff);
  return word;
}

// The bytes of a lock as described in docs/storage-format.md.
constexpr int kExclusive = 0;
constexpr int kShared = 1;
constexpr int kLimit = 2;

struct StoredHold {
  int64_t token = 1'700'000'000'000'000;
  int64_t since = 1000;
  int64_t end = kFarFuture;
  int64_t linger = 0;
  uint64_t count = 1;
  std::string owner = "me";
  int64_t cap = 0;  // none
  uint64_t weight = 1;
  std::string tag = {};
};

std::string Number(int64_t value) { return Word(static_cast<uint64_t>(value)); }

// A lock of one hold is a record; several holds are a list after a header word.
std::string Record(int mode, const StoredHold& hold, bool wide) {
  const uint64_t head = static_cast<uint64_t>(hold.token) | (hold.owner.size() - 1) << 53 |
                        static_cast<uint64_t>(mode) << 61;
  const auto end = static_cast<uint64_t>(hold.end);
  const auto lead = static_cast<uint64_t>(hold.token / 1000 - hold.since);
  if (!wide) return Word(head) + Word(end << 22 | (lead & 0x1fffff) << 1) + hold.owner;
  return Word(head) + Word(1) + Number(hold.since) + Number(hold.end) + Number(hold.linger) +
         Number(hold.cap) + Word(hold.count, 4) + Word(hold.weight, 4) + Word(hold.tag.size(), 1) +
         hold.owner + hold.tag;
}

std::string Value(int mode, const std::vector<StoredHold>& holds) {
  if (holds.size() != 1) {
    std::string value = Word(uint64_t{1} << 63 | static_cast<uint64_t>(mode) << 61);
    for (const StoredHold& hold : holds) {
      value += Number(hold.token) + Number(hold.since) + Number(hold.end) + Number(hold.linger) +
               Number(hold.cap) + Word(hold.count, 4) + Word(hold.weight, 4) +
               Word(hold.tag.size(), 1) + Word(hold.owner.size(), 2) + hold.owner + hold.tag;
    }
    return value;
  }
  const StoredHold& hold = holds.front();
  const int64_t lead = hold.token / 1000 - hold.since;
  const bool narrow = hold.linger == 0 && hold.count == 1 && hold.cap == 0 && hold.weight == 1 &&
                      hold.tag.empty() && lead > -(1 << 20) && lead < (1 << 20) &&
                      hold.end < (int64_t{1} << 42);
  return Record(mode, hold, !narrow);
}

constexpr int64_t kTenMinutes = 600'000'000;
constexpr int64_t kSinceOfToken = 1'700'000'000'000;
constexpr int64_t kEndOfNarrow = 4'000'000'000'000;  // the year 2096

class RestoreTest : public SharedServerTest<RestoreTest> {
 public:
  static ServerOptions Options() { return {.args = {"--rdbcompression", "no"}}; }

 protected:
  RestoreTest() {
    MustAcquire(client_, "original", "me");
    original_ = *DumpPayload::Open(client_.Do("DUMP", "original").text);
  }

  // A payload with a valid frame, whatever the value.
  std::string Frame(const std::string& value) const {
    DumpPayload payload = original_;
    payload.body.resize(kModuleIdEnd);
    payload.body += '\x05';  // a string follows, with a length of 6 or 14 bits
    if (value.size() >= 64) payload.body += static_cast<char>(0x40 | value.size() >> 8);
    payload.body += static_cast<char>(value.size() & 0xff);
    payload.body += value + '\0';
    return payload.Seal();
  }

  Reply Restore(const std::string& payload) {
    return client_.Do("RESTORE", "job", 0, payload, "REPLACE");
  }

  int64_t NowMicros() { return 1000 * ServerNow(client_); }

  DumpPayload original_;
};

// What LOCK.INFO and the key's TTL must show for a restored lock.
void ExpectHolders(Client& client, int mode, std::vector<StoredHold> holds) {
  const Reply info = client.Do("LOCK.INFO", "job");
  ASSERT_TRUE(info.IsArray()) << info;
  const std::vector<std::string> modes = {"exclusive", "shared", "limit"};
  EXPECT_EQ(info.Field("mode"), Reply::Str(modes.at(static_cast<size_t>(mode))));
  int64_t closes = 0;
  for (const StoredHold& hold : holds) closes = std::max(closes, hold.end + hold.linger);
  // Inside the server the maximum time also means "no TTL": it may or may not be set.
  if (closes != kMaxToken) {
    EXPECT_EQ(EndOf(client, "job"), closes);
  }
  std::stable_sort(holds.begin(), holds.end(),
                   [](const StoredHold& a, const StoredHold& b) { return a.token < b.token; });
  const std::vector<Reply> holders = info.Field("holders").elements;
  ASSERT_EQ(holders.size(), holds.size()) << info;
  for (size_t i = 0; i < holds.size(); i++) {
    EXPECT_EQ(holders[i].Field("owner"), Reply::Str(holds[i].owner));
    EXPECT_EQ(holders[i].Field("token"), Reply::Int(holds[i].token));
    EXPECT_EQ(holders[i].Field("count"), Reply::Int(static_cast<int64_t>(holds[i].count)));
    EXPECT_EQ(holders[i].Field("linger-ms"), Reply::Int(holds[i].linger));
    EXPECT_EQ(holders[i].Field("weight"), Reply::Int(static_cast<int64_t>(holds[i].weight)));
    EXPECT_EQ(holders[i].Field("max-hold-left-ms").IsNil(), holds[i].cap == 0);
    EXPECT_EQ(holders[i].Field("tag"),
              holds[i].tag.empty() ? Reply::Nil() : Reply::Str(holds[i].tag));
  }
}

// Which bytes are a lock is decided, and tested, in the core. Here: valid bytes become that lock,
// and others change nothing.
TEST_F(RestoreTest, ValidPayloadIsRestoredAndAnyOtherRefused) {
  struct Good {
    int mode;
    std::vector<StoredHold> holds;
  };
  const std::vector<Good> good = {
      {kExclusive, {{}}},
      {kShared, {{.since = kSinceOfToken - 1, .end = kEndOfNarrow}}},
      {kLimit, {{.since = kSinceOfToken + 1, .end = kEndOfNarrow}}},
      {kExclusive, {{.end = kMaxToken, .linger = kMaxToken}}},
      {kExclusive, {{.count = 0xffffffff}}},
      {kExclusive, {{.owner = std::string(256, 'x')}}},
      {kExclusive, {{.owner = std::string("\0\r\n", 3)}}},
      {kShared, {{.token = 3, .owner = "a"}, {.token = 2, .owner = "b"}, {.owner = "c"}}},
      {kShared, {{.linger = 5, .count = 7, .owner = "a"}, {.end = kMaxToken, .owner = "b"}}},
      {kLimit, {{.linger = 5, .owner = "a"}, {.count = 2, .owner = "b"}}},
      {kExclusive, {{.cap = kFarFuture, .tag = "x"}}},
      {kLimit, {{.weight = 100000}}},
      {kShared, {{.owner = "a", .tag = std::string(64, '~')}, {.owner = "b", .cap = kMaxToken}}},
      {kLimit, {{.owner = "a", .weight = 2, .tag = " "}, {.owner = "b", .cap = kFarFuture}}},
  };
  for (const auto& [mode, holds] : good) {
    const std::string payload = Frame(Value(mode, holds));
    SCOPED_TRACE(Quoted(payload));
    EXPECT_EQ(Restore(payload), Reply::Ok());
    EXPECT_EQ(client_.Do("DUMP", "job"), Reply::Str(payload));
    ExpectHolders(client_, mode, holds);
  }
  for (const int64_t end : {int64_t{0}, int64_t{3000}}) {
    EXPECT_EQ(Restore(Frame(Value(kExclusive, {{.end = end}}))), Reply::Ok());
    EXPECT_EQ(client_.Do("LOCK.INFO", "job"), Reply::Nil()) << "long over";
    EXPECT_EQ(Restore(Frame(Value(kShared, {{.end = end, .owner = "a"}, {.owner = "b"}}))),
              Reply::Ok());
    ExpectHolders(client_, kShared, {{.owner = "b"}});
  }

  client_.Do("DEL", "job");
  MustAcquire(client_, "job", "holder");
  const Reply before = client_.Do("DEBUG", "DIGEST-VALUE", "job");
  for (const std::string& value :
       {Record(3, {}, true), Record(kExclusive, {.token = 0}, true),
        Record(kExclusive, {.since = kSinceOfToken, .end = kEndOfNarrow}, true),  // needlessly wide
        Record(kExclusive, {}, true) + '\0', Value(kShared, {{.owner = "b"}, {.owner = "a"}}),
        Value(kExclusive, {{.owner = "a"}, {.owner = "b"}}), std::string(),
        Value(kExclusive, {{.weight = 2}}), Value(kShared, {{.weight = 2}}),
        Value(kLimit, {{.weight = 100001}}), Record(kLimit, {.weight = 0}, true),
        Value(kExclusive, {{.cap = kMaxToken + 1}}), Value(kExclusive, {{.cap = -1}}),
        Value(kExclusive, {{.tag = "new\nline"}}),
        Value(kExclusive, {{.tag = std::string(65, 'x')}}), Value(kExclusive, {{.tag = "x"}}) + "y",
        Value(kShared, {{.owner = "a", .weight = 2}, {.owner = "b"}}),
        Value(kShared, {{.owner = "a", .tag = "\x7f"}, {.owner = "b"}})}) {
    EXPECT_TRUE(Restore(Frame(value)).IsError("ERR Bad data format")) << Quoted(value);
  }
  EXPECT_EQ(client_.Do("DEBUG", "DIGEST-VALUE", "job"), before);
}

TEST_F(RestoreTest, ForgedTokensAreRefused) {
  const auto restore = [&](int64_t token) {
    return Restore(Frame(Value(kExclusive, {{.token = token}})));
  };
  const auto last_token = [&] {
    const std::string info = client_.Do("INFO", "turnstile").text;
    const size_t start = info.find("turnstile_last_token:");
    return info.substr(start, info.find('\r', start) - start);
  };
  const std::string before = last_token();
  EXPECT_TRUE(restore(kMaxToken).IsError("ERR Bad data format"));
  const int64_t too_far = NowMicros() + kTenMinutes + 60'000'000;
  EXPECT_TRUE(restore(too_far).IsError("ERR Bad data format"));
  // Also if only one of several holders has it.
  const StoredHold forger = {.token = too_far, .owner = "b"};
  EXPECT_TRUE(Restore(Frame(Value(kShared, {{.owner = "a"}, forger, {.owner = "c"}})))
                  .IsError("ERR Bad data format"));
  EXPECT_EQ(client_.Do("EXISTS", "job"), Reply::Int(0));
  EXPECT_EQ(last_token(), before);
  EXPECT_TRUE(Eventually([&] {
    return server().Log().find("leads the wall clock by more than ten minutes") !=
           std::string::npos;
  }));

  const int64_t token = NowMicros() + kTenMinutes - 1'000'000;
  EXPECT_EQ(restore(token), Reply::Ok());
  EXPECT_EQ(client_.Do("LOCK.FENCE", "job", token), Reply::Int(1));
  EXPECT_EQ(MustAcquire(client_, "after", "me"), token + 1);

  // Nor by a script or a transaction.
  const std::string forged = Frame(Value(kExclusive, {{.token = kMaxToken}}));
  EXPECT_TRUE(
      client_.Do("EVAL", "return redis.call('RESTORE', KEYS[1], 0, ARGV[1])", 1, "forged", forged)
          .IsError("ERR Bad data format"));
  client_.Do("MULTI");
  client_.Do("RESTORE", "forged", 0, forged);
  EXPECT_TRUE(client_.Do("EXEC").elements.at(0).IsError("ERR Bad data format"));
}

// Tokens that the clock has already reached can be restored, however far ahead.
TEST_F(RestoreTest, TokensUpToTheClockAreAccepted) {
  ClockShift clock;
  Server server({.environment = clock.environment()});
  Client client = server.Connect();
  const int64_t token = MustAcquire(client, "job", "me", 2 * 60 * kMinute);
  const std::string payload = client.Do("DUMP", "job").text;
  clock.Set(std::chrono::hours{-1}, client);
  EXPECT_EQ(client.Do("RESTORE", "copy", 0, payload), Reply::Ok());
  const std::string forged = Frame(Value(kExclusive, {{.token = token + 1'000'000}}));
  EXPECT_TRUE(client.Do("RESTORE", "forged", 0, forged).IsError("ERR Bad data format"));
  EXPECT_EQ(MustAcquire(client, "after", "me"), token + 1);
}

// A replica cannot know who sent a RESTORE, so it accepts the lock; but its clock advances only up
// to a bound.
TEST_F(RestoreTest, ForgedTokensDoNotAdvanceClockOfReplica) {
  Server replica({.args = {"--replica-read-only", "no"}});
  Client client = replica.Connect();
  ASSERT_EQ(client.Do("REPLICAOF", "127.0.0.1", kNowhere), Reply::Ok());
  const auto restore = [&](const char* key, int64_t token) {
    return client.Do("RESTORE", key, 0, Frame(Value(kExclusive, {{.token = token}})));
  };
  EXPECT_EQ(restore("last", kMaxToken), Reply::Ok());
  EXPECT_EQ(restore("far", NowMicros() + 2 * kTenMinutes + 60'000'000), Reply::Ok());
  const int64_t near = NowMicros() + 2 * kTenMinutes - 60'000'000;
  EXPECT_EQ(restore("near", near), Reply::Ok());
  ASSERT_EQ(client.Do("REPLICAOF", "NO", "ONE"), Reply::Ok());
  EXPECT_EQ(MustAcquire(client, "job", "me"), near + 3'000'001);
}

// A lease beyond the year 2109 needs a wider record than the one that replaces it.
TEST_F(RestoreTest, RestoredWideRecordCanBeTouched) {
  StoredHold hold = {.since = kSinceOfToken, .end = int64_t{1} << 42, .owner = "the owner"};
  EXPECT_EQ(Restore(Frame(Value(kExclusive, {hold}))), Reply::Ok());
  ReplicationStream stream(server().port());
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", hold.owner, "PX", kMinute), Reply::Int(1));
  hold.end = EndOf(client_, "job");
  ExpectHolders(client_, kExclusive, {hold});
  EXPECT_EQ(stream.Until(client_),
            (Commands{HeldCommand("job", hold.owner, {hold.token, hold.since, hold.end})}));
  EXPECT_EQ(client_.Do("DUMP", "job"), Reply::Str(Frame(Value(kExclusive, {hold}))));
}

TEST_F(RestoreTest, OtherVersionsTypesAndFramesAreRefused) {
  const std::string& body = original_.body;
  const auto restore = [&](const std::string& changed) {
    return Restore(DumpPayload{changed, original_.rdb_version}.Seal());
  };
  EXPECT_EQ(restore(body), Reply::Ok());
  // The module id ends with ten bits of encoding version.
  for (const int version : {0, 2, 3, 255}) {
    std::string other = body;
    other[kModuleIdEnd - 1] = static_cast<char>(version);
    EXPECT_TRUE(restore(other).IsError("ERR Bad data format")) << version;
  }
  for (size_t i = 2; i < kModuleIdEnd - 2; i++) {
    std::string other = body;
    other[i] = static_cast<char>(other[i] ^ 0x10);
    EXPECT_TRUE(restore(other).IsError("ERR Bad data format")) << "not our type: " << i;
  }
  // Truncated by more than the ten bytes of the footer, which the server would otherwise read.
  for (size_t size = 1; size + 10 < body.size(); size++) {
    EXPECT_TRUE(restore(body.substr(0, size)).IsError("ERR Bad data format")) << size;
  }
  // The string replaced by an integer, a double or nothing; a second string; an endless length.
  const std::string head = body.substr(0, kModuleIdEnd);
  const std::string value = body.substr(kModuleIdEnd, body.size() - kModuleIdEnd - 1);
  const std::string end(1, '\0');
  EXPECT_EQ(restore(head + value + end), Reply::Ok());
  EXPECT_TRUE(restore(head + "\x02\x05" + end).IsError("ERR Bad data format"));
  EXPECT_TRUE(restore(head + "\x04" + Word(5) + end).IsError("ERR Bad data format"));
  EXPECT_TRUE(restore(head + end).IsError("ERR Bad data format"));
  EXPECT_TRUE(restore(head + value + value + end).IsError("ERR Bad data format"));
  for (const char* length : {"\x80\x7f\xff\xff\xff", "\x81\x7f\xff\xff\xff\xff\xff\xff\xff",
                             "\x81\xff\xff\xff\xff\xff\xff\xff\xff", "\xc3\x05\x20"}) {
    std::string endless = head;
    endless += '\x05';
    endless += length;
    endless += value.substr(2);
    EXPECT_TRUE(restore(endless).IsError("ERR Bad data format"));
  }
  std::string flipped = original_.Seal();
  flipped.back() = static_cast<char>(flipped.back() ^ 1);
  EXPECT_TRUE(Restore(flipped).IsError("ERR DUMP payload version or checksum"));
}

// --- RDB files -----------------------------------------------------------------------------------

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

// redis-check-rdb, or the equivalent next to REDIS_SERVER.
int CheckRdb(const std::string& path) {
  const char* server = std::getenv("REDIS_SERVER");
  std::string checker = server != nullptr && *server != '\0' ? server : "redis-server";
  checker.replace(checker.rfind("server"), 6, "check-rdb");
  const std::string command = checker + " " + path + " > " + path + ".check 2>&1";
  return std::system(command.c_str());
}

TEST(RdbFileTest, RdbCheckerAcceptsLocks) {
  Server server({.args = {"--rdbchecksum", "no"}});
  Client client = server.Connect();
  for (const char* key : {"a", "b"}) MustAcquire(client, key, std::string(200, 'x'));
  for (const char* owner : {"a", "b", "c"}) {
    EXPECT_TRUE(client.Do("LOCK.ACQUIRE", "c", owner, "PX", kMinute, "SHARED").IsInteger());
  }
  client.Do("SET", "plain", "me");
  EXPECT_EQ(client.Do("SAVE"), Reply::Ok());
  const std::string path = server.dir() + "/dump.rdb";
  EXPECT_EQ(CheckRdb(path), 0) << ReadFile(path + ".check");
  EXPECT_NE(ReadFile(path + ".check").find("4 keys read"), std::string::npos);
  // Before the first lock: where a file ends inside the value of a module, the checker of Redis 7.0
  // never does.
  WriteFile(path, ReadFile(path).substr(0, 60));
  EXPECT_NE(CheckRdb(path), 0) << "otherwise the check proves nothing";
}

// An invalid value stops the start cleanly, with the reason in the log.
TEST(RdbFileTest, DamagedValuePreventsStart) {
  Server server({.args = {"--rdbchecksum", "no", "--rdbcompression", "no"}});
  Client client = server.Connect();
  const int64_t token = MustAcquire(client, "job", "somebody");
  const int64_t end = EndOf(client, "job");
  const StoredHold hold = {.token = token, .since = end - kMinute, .end = end, .owner = "somebody"};
  const std::string value = Value(kExclusive, {hold});
  EXPECT_EQ(client.Do("SAVE"), Reply::Ok());
  server.Stop();
  const std::string path = server.dir() + "/dump.rdb";
  const std::string intact = ReadFile(path);
  const size_t at = intact.find(value);
  ASSERT_NE(at, std::string::npos) << "the format is not what docs/storage-format.md says";

  // Replaces the bytes at `offset` of the value.
  const auto with = [&](size_t offset, const std::string& bytes) {
    std::string damaged = intact;
    return damaged.replace(at + offset, bytes.size(), bytes);
  };
  const auto with_token = [&](int64_t other) {
    StoredHold changed = hold;
    changed.token = other;
    return with(0, Record(kExclusive, changed, false).substr(0, 8));
  };
  constexpr size_t kMode = 7;  // with the highest bits of the owner's size
  constexpr size_t kTimes = 8;
  std::string version = intact;
  version[at - 3] = '\x02';  // the end of the module id, before the string's opcode and length
  std::string shorter = intact;
  shorter[at - 1] = '\x17';
  for (const std::string& damaged :
       {with(kMode, "\x60"), with(kMode, "\x80"), with_token(0), with(kTimes, Word(1)),
        with(kTimes, Word(~uint64_t{0})), version, shorter, intact.substr(0, at + 5)}) {
    WriteFile(path, damaged);
    server.options().must_start = false;
    EXPECT_FALSE(server.Restart());
    EXPECT_LT(server.exit_code().value_or(255), 128)
        << "no signal; the server itself is not sure of its code";
    EXPECT_EQ(server.CrashReport(), "");
  }
  EXPECT_NE(server.Log().find("not a lock: 24 bytes, encoding version 1"), std::string::npos);
  EXPECT_NE(server.Log().find("encoding version 2"), std::string::npos);

  // Loaded values are trusted, even a token that no client could RESTORE.
  WriteFile(path, with_token(kMaxToken));
  server.options().must_start = true;
  ASSERT_TRUE(server.Restart());
  client = server.Connect();
  EXPECT_EQ(client.Do("LOCK.FENCE", "job"), Reply::Int(kMaxToken));
}

}  // namespace
}  // namespace turnstile::testing
