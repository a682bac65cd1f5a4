// Values that come from strangers: RESTORE payloads and RDB files that are damaged or forged. What
// is not exactly a lock is refused, and the server lives.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <random>
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

// The bytes of a lock as docs/storage-format.md has them. Version 1: one exclusive hold.
std::string OldValue(int64_t token, int64_t since, int64_t end, std::string_view owner) {
  return Word(static_cast<uint64_t>(token)) + Word(static_cast<uint64_t>(since)) +
         Word(static_cast<uint64_t>(end)) + std::string(owner);
}

// Version 2: the mode and all holds.
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
};

std::string Value(int mode, const std::vector<StoredHold>& holds) {
  std::string value = Word(static_cast<uint64_t>(mode), 1);
  for (const StoredHold& hold : holds) {
    value += Word(static_cast<uint64_t>(hold.token)) + Word(static_cast<uint64_t>(hold.since)) +
             Word(static_cast<uint64_t>(hold.end)) + Word(static_cast<uint64_t>(hold.linger)) +
             Word(hold.count, 4) + Word(hold.owner.size(), 2) + hold.owner;
  }
  return value;
}

// Version 3, which is written today: one hold is a record, several are as in version 2 behind a
// word of their own.
std::string Record(int mode, const StoredHold& hold, bool wide) {
  const uint64_t head = static_cast<uint64_t>(hold.token) | (hold.owner.size() - 1) << 53 |
                        static_cast<uint64_t>(mode) << 61;
  const auto since = static_cast<uint64_t>(hold.since);
  const auto end = static_cast<uint64_t>(hold.end);
  const auto lead = static_cast<uint64_t>(hold.token / 1000 - hold.since);
  if (!wide) return Word(head) + Word(end << 22 | (lead & 0x1fffff) << 1) + hold.owner;
  return Word(head) + Word(1) + Word(since) + Word(end) + Word(static_cast<uint64_t>(hold.linger)) +
         Word(hold.count, 4) + hold.owner;
}

std::string Today(int mode, const std::vector<StoredHold>& holds) {
  if (holds.size() != 1) {
    return Word(uint64_t{1} << 63 | static_cast<uint64_t>(mode) << 61) +
           Value(mode, holds).substr(1);
  }
  const StoredHold& hold = holds.front();
  const int64_t lead = hold.token / 1000 - hold.since;
  const bool narrow = hold.linger == 0 && hold.count == 1 && lead > -(1 << 20) &&
                      lead < (1 << 20) && hold.end < (int64_t{1} << 42);
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

  // A payload whose frame is right, whatever the value.
  std::string Frame(const std::string& value, int version) const {
    DumpPayload payload = original_;
    payload.body.resize(kModuleIdEnd - 1);
    payload.body += static_cast<char>(version);  // the module id ends with ten bits of it
    payload.body += '\x05';                      // a string follows, its length as 6 bits or as 14
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

// What LOCK.INFO and the key's TTL must show of a lock that was restored.
void ExpectHolders(Client& client, int mode, std::vector<StoredHold> holds) {
  const Reply info = client.Do("LOCK.INFO", "job");
  ASSERT_TRUE(info.IsArray()) << info;
  const std::vector<std::string> modes = {"exclusive", "shared", "limit"};
  EXPECT_EQ(info.Field("mode"), Reply::Str(modes.at(static_cast<size_t>(mode))));
  int64_t closes = 0;
  for (const StoredHold& hold : holds) closes = std::max(closes, hold.end + hold.linger);
  // Inside the server the very last moment also stands for "no TTL": it may or may not be set.
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
  }
}

TEST_F(RestoreTest, EveryFieldIsHeldToItsRange) {
  struct Good {
    int mode;
    std::vector<StoredHold> holds;
  };
  const std::vector<Good> good = {
      {kExclusive, {{}}},
      {kShared, {{}}},
      {kLimit, {{}}},
      {kExclusive, {{.since = kSinceOfToken, .end = kEndOfNarrow}}},
      {kShared, {{.since = kSinceOfToken - 1, .end = kEndOfNarrow}}},
      {kLimit, {{.since = kSinceOfToken + 1, .end = kEndOfNarrow}}},
      {kExclusive, {{.token = 1}}},
      {kExclusive, {{.since = 0}}},
      {kExclusive, {{.since = kMaxToken}}},
      {kExclusive, {{.end = kMaxToken}}},
      {kExclusive, {{.linger = 1}}},
      {kExclusive, {{.linger = kMaxToken}}},
      {kExclusive, {{.end = kMaxToken, .linger = kMaxToken}}},
      {kExclusive, {{.count = 2}}},
      {kExclusive, {{.count = 0xffffffff}}},
      {kExclusive, {{.owner = "x"}}},
      {kExclusive, {{.owner = std::string(256, 'x')}}},
      {kExclusive, {{.owner = std::string("\0\r\n", 3)}}},
      {kShared, {{.token = 3, .owner = "a"}, {.token = 2, .owner = "b"}, {.owner = "c"}}},
      {kShared, {{.owner = "a"}, {.owner = "aa"}, {.owner = "b"}}},
      {kShared, {{.owner = std::string(1, '\0')}, {.owner = "\x7f"}, {.owner = "\x80"}}},
      {kShared, {{.linger = 5, .count = 7, .owner = "a"}, {.end = kMaxToken, .owner = "b"}}},
      {kLimit, {{.linger = 5, .owner = "a"}, {.count = 2, .owner = "b"}}},
  };
  for (const auto& [mode, holds] : good) {
    const std::string today = Frame(Today(mode, holds), 3);
    for (const std::string& payload : {Frame(Value(mode, holds), 2), today}) {
      SCOPED_TRACE(Quoted(payload));
      EXPECT_EQ(Restore(payload), Reply::Ok());
      EXPECT_EQ(client_.Do("DUMP", "job"), Reply::Str(today));
      ExpectHolders(client_, mode, holds);
    }
  }
  for (const int64_t end : {int64_t{0}, int64_t{3000}}) {
    EXPECT_EQ(Restore(Frame(Today(kExclusive, {{.end = end}}), 3)), Reply::Ok());
    EXPECT_EQ(client_.Do("LOCK.INFO", "job"), Reply::Nil()) << "long over";
    EXPECT_EQ(Restore(Frame(Today(kShared, {{.end = end, .owner = "a"}, {.owner = "b"}}), 3)),
              Reply::Ok());
    ExpectHolders(client_, kShared, {{.owner = "b"}});
  }

  client_.Do("DEL", "job");
  MustAcquire(client_, "job", "holder");
  const Reply before = client_.Do("DEBUG", "DIGEST-VALUE", "job");
  const std::string one = Value(kExclusive, {{}});
  const std::string two = Value(kShared, {{.owner = "a"}, {.owner = "b"}});
  const std::vector<std::string> bad_of_version_2 = {
      Value(3, {{}}),
      Value(255, {{}}),
      Value(kExclusive, {{.token = 0}}),
      Value(kExclusive, {{.token = kMaxToken + 1}}),
      Value(kExclusive, {{.token = -1}}),
      Value(kExclusive, {{.since = kMaxToken + 1}}),
      Value(kExclusive, {{.since = -1}}),
      Value(kExclusive, {{.end = kMaxToken + 1}}),
      Value(kExclusive, {{.end = -1}}),
      Value(kExclusive, {{.linger = kMaxToken + 1}}),
      Value(kExclusive, {{.linger = -1}}),
      Value(kExclusive, {{.count = 0}}),
      Value(kExclusive, {{.owner = ""}}),
      Value(kExclusive, {{.owner = std::string(257, 'x')}}),
      Value(kExclusive, {{.owner = std::string(10000, 'x')}}),
      // One holder only; none twice; in their order.
      Value(kExclusive, {{.owner = "a"}, {.owner = "b"}}),
      Value(kShared, {{.owner = "a"}, {.owner = "a"}}),
      Value(kShared, {{.owner = "b"}, {.owner = "a"}}),
      Value(kLimit, {{.owner = "a"}, {.owner = "c"}, {.owner = "b"}}),
      Value(kShared, {{.owner = "\x80"}, {.owner = "\x7f"}}),
      Value(kShared, {{.owner = "aa"}, {.owner = "a"}}),
      // Each hold is looked at.
      Value(kShared, {{.token = 0, .owner = "a"}, {.owner = "b"}}),
      Value(kShared, {{.owner = "a"}, {.count = 0, .owner = "b"}}),
      Value(kShared, {{.owner = "a"}, {.owner = "b"}, {.linger = -1, .owner = "c"}}),
      // More or less than there should be.
      "",
      Value(kShared, {}),
      one + '\0',
      two + "x",
      two + Word(0),
      Value(kExclusive, {{.owner = std::string(257, 'x')}}).substr(0, one.size()),
      OldValue(1'700'000'000'000'000, 1000, kFarFuture, "me"),
  };
  for (const std::string& value : bad_of_version_2) {
    EXPECT_TRUE(Restore(Frame(value, 2)).IsError("ERR Bad data format")) << Quoted(value);
  }
  const StoredHold narrow = {.since = kSinceOfToken, .end = kEndOfNarrow};
  const std::string several = Today(kShared, {{.owner = "a"}, {.owner = "b"}});
  const std::vector<std::string> bad_of_version_3 = {
      Record(3, narrow, false),
      Record(4 + kShared, narrow, false),  // said to be several
      Record(kExclusive, {.token = 0, .since = 0, .end = kEndOfNarrow}, false),
      Record(kExclusive, {.token = 0}, true),
      Record(kExclusive, {.since = kMaxToken + 1}, true),
      Record(kExclusive, {.since = -1}, true),
      Record(kExclusive, {.end = kMaxToken + 1}, true),
      Record(kExclusive, {.end = -1}, true),
      Record(kExclusive, {.linger = kMaxToken + 1}, true),
      Record(kExclusive, {.linger = -1}, true),
      Record(kExclusive, {.count = 0}, true),
      Record(kExclusive, narrow, true),  // wider than it need be
      Record(kExclusive, {}, true).replace(8, 8, Word(3)),
      Record(kExclusive, narrow, false) + '\0',
      Record(kExclusive, {}, true) + '\0',
      // One is not several, an exclusive one least of all; and each is looked at.
      several.substr(0, 8),
      several.substr(0, 8) + Value(kShared, {{}}).substr(1),
      Today(kExclusive, {{.owner = "a"}, {.owner = "b"}}),
      Today(3, {{.owner = "a"}, {.owner = "b"}}),
      Word(uint64_t{1} << 63 | uint64_t{1} << 61 | 1) + several.substr(8),
      Today(kShared, {{.owner = "b"}, {.owner = "a"}}),
      Today(kShared, {{.owner = "a"}, {.token = 0, .owner = "b"}}),
      several + "x",
      one,
      two,
      OldValue(0, 1000, kFarFuture, "me"),
      "",
  };
  for (const std::string& value : bad_of_version_3) {
    EXPECT_TRUE(Restore(Frame(value, 3)).IsError("ERR Bad data format")) << Quoted(value);
  }
  for (size_t size = 0; size < two.size(); size++) {
    EXPECT_TRUE(size >= one.size() ||
                Restore(Frame(one.substr(0, size), 2)).IsError("ERR Bad data format"))
        << size;
    // What is left when the last hold is cut off is a lock.
    if (size == Value(kShared, {{.owner = "a"}}).size()) continue;
    EXPECT_TRUE(Restore(Frame(two.substr(0, size), 2)).IsError("ERR Bad data format")) << size;
  }
  for (const std::string& whole :
       {Record(kExclusive, narrow, false), Record(kExclusive, {}, true), several}) {
    for (size_t size = 0; size < whole.size(); size++) {
      EXPECT_TRUE(Restore(Frame(whole.substr(0, size), 3)).IsError("ERR Bad data format")) << size;
    }
  }
  EXPECT_EQ(client_.Do("DEBUG", "DIGEST-VALUE", "job"), before);
}

// Dumps of version 1 are exclusive locks. What is written from then on is version 3.
TEST_F(RestoreTest, TheOldVersionIsHeldToItsOwnRanges) {
  const int64_t token = 1'700'000'000'000'000;
  const std::vector<StoredHold> good = {
      {},
      {.token = 1},
      {.since = 0},
      {.since = kMaxToken},
      {.end = kMaxToken},
      {.owner = "x"},
      {.owner = std::string(256, 'x')},
      {.owner = std::string("\0\r\n", 3)},
  };
  for (const StoredHold& hold : good) {
    const std::string old = OldValue(hold.token, hold.since, hold.end, hold.owner);
    SCOPED_TRACE(Quoted(old));
    EXPECT_EQ(Restore(Frame(old, 1)), Reply::Ok());
    EXPECT_EQ(client_.Do("DUMP", "job"), Reply::Str(Frame(Today(kExclusive, {hold}), 3)));
    ExpectHolders(client_, kExclusive, {hold});
  }
  for (const int64_t end : {int64_t{0}, int64_t{3000}}) {
    EXPECT_EQ(Restore(Frame(OldValue(token, 1000, end, "me"), 1)), Reply::Ok());
    EXPECT_EQ(client_.Do("LOCK.INFO", "job"), Reply::Nil()) << "long over";
  }

  client_.Do("DEL", "job");
  MustAcquire(client_, "job", "holder");
  const Reply before = client_.Do("DEBUG", "DIGEST-VALUE", "job");
  const std::vector<std::string> bad = {
      OldValue(0, 1000, kFarFuture, "me"),
      OldValue(kMaxToken + 1, 1000, kFarFuture, "me"),
      OldValue(-1, 1000, kFarFuture, "me"),
      OldValue(token, kMaxToken + 1, kFarFuture, "me"),
      OldValue(token, -1, kFarFuture, "me"),
      OldValue(token, 1000, kMaxToken + 1, "me"),
      OldValue(token, 1000, -1, "me"),
      OldValue(token, 1000, kFarFuture, ""),
      OldValue(token, 1000, kFarFuture, std::string(257, 'x')),
      OldValue(token, 1000, kFarFuture, std::string(10000, 'x')),
      OldValue(token, 1000, kFarFuture, "me").substr(0, 23),
      "",
  };
  for (const std::string& value : bad) {
    EXPECT_TRUE(Restore(Frame(value, 1)).IsError("ERR Bad data format")) << Quoted(value);
  }
  EXPECT_EQ(client_.Do("DEBUG", "DIGEST-VALUE", "job"), before);
}

TEST_F(RestoreTest, ForgedTokensAreRefused) {
  const auto restore = [&](int64_t token) {
    return Restore(Frame(Today(kExclusive, {{.token = token}}), 3));
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
  EXPECT_TRUE(
      Restore(Frame(OldValue(too_far, 1000, kFarFuture, "me"), 1)).IsError("ERR Bad data format"));
  // Whoever of several holds it.
  const StoredHold forger = {.token = too_far, .owner = "b"};
  for (const int version : {2, 3}) {
    const std::vector<StoredHold> holds = {{.owner = "a"}, forger, {.owner = "c"}};
    const std::string value = version == 2 ? Value(kShared, holds) : Today(kShared, holds);
    EXPECT_TRUE(Restore(Frame(value, version)).IsError("ERR Bad data format")) << version;
  }
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

  // Nor through a script or a transaction.
  const std::string forged = Frame(Today(kExclusive, {{.token = kMaxToken}}), 3);
  EXPECT_TRUE(
      client_.Do("EVAL", "return redis.call('RESTORE', KEYS[1], 0, ARGV[1])", 1, "forged", forged)
          .IsError("ERR Bad data format"));
  client_.Do("MULTI");
  client_.Do("RESTORE", "forged", 0, forged);
  EXPECT_TRUE(client_.Do("EXEC").elements.at(0).IsError("ERR Bad data format"));
}

// What the clock has reached already can be restored, however far ahead it is.
TEST_F(RestoreTest, TokensUpToTheClockAreAccepted) {
  ClockShift clock;
  Server server({.environment = clock.environment()});
  Client client = server.Connect();
  const int64_t token = MustAcquire(client, "job", "me", 2 * 60 * kMinute);
  const std::string payload = client.Do("DUMP", "job").text;
  clock.Set(std::chrono::hours{-1}, client);
  EXPECT_EQ(client.Do("RESTORE", "copy", 0, payload), Reply::Ok());
  const std::string forged = Frame(Today(kExclusive, {{.token = token + 1'000'000}}), 3);
  EXPECT_TRUE(client.Do("RESTORE", "forged", 0, forged).IsError("ERR Bad data format"));
  EXPECT_EQ(MustAcquire(client, "after", "me"), token + 1);
}

// A replica cannot know who sends a RESTORE, so it takes the lock; but its clock goes only so far.
TEST_F(RestoreTest, ForgedTokensDoNotPushTheClockOfAReplica) {
  Server replica({.args = {"--replica-read-only", "no"}});
  Client client = replica.Connect();
  ASSERT_EQ(client.Do("REPLICAOF", "127.0.0.1", kNowhere), Reply::Ok());
  const auto restore = [&](const char* key, int64_t token) {
    return client.Do("RESTORE", key, 0, Frame(Today(kExclusive, {{.token = token}}), 3));
  };
  EXPECT_EQ(restore("last", kMaxToken), Reply::Ok());
  EXPECT_EQ(restore("far", NowMicros() + 2 * kTenMinutes + 60'000'000), Reply::Ok());
  const int64_t near = NowMicros() + 2 * kTenMinutes - 60'000'000;
  EXPECT_EQ(restore("near", near), Reply::Ok());
  ASSERT_EQ(client.Do("REPLICAOF", "NO", "ONE"), Reply::Ok());
  EXPECT_EQ(MustAcquire(client, "job", "me"), near + 3'000'001);
}

// A lease beyond the year 2109 needs a wider record than the one that takes its place.
TEST_F(RestoreTest, TouchedAfterItWasWide) {
  StoredHold hold = {.since = kSinceOfToken, .end = int64_t{1} << 42, .owner = "the owner"};
  EXPECT_EQ(Restore(Frame(Today(kExclusive, {hold}), 3)), Reply::Ok());
  ReplicationStream stream(server().port());
  EXPECT_EQ(client_.Do("LOCK.TOUCH", "job", hold.owner, "PX", kMinute), Reply::Int(1));
  hold.end = EndOf(client_, "job");
  ExpectHolders(client_, kExclusive, {hold});
  EXPECT_EQ(
      stream.Until(client_),
      (std::vector<Command>{{"LOCK.FACT", "HELD", "job", hold.owner, std::to_string(hold.token),
                             std::to_string(hold.since), std::to_string(hold.end)}}));
  EXPECT_EQ(client_.Do("DUMP", "job"), Reply::Str(Frame(Today(kExclusive, {hold}), 3)));
}

TEST_F(RestoreTest, OtherVersionsTypesAndFramesAreRefused) {
  const std::string& body = original_.body;
  const auto restore = [&](const std::string& changed) {
    return Restore(DumpPayload{changed, original_.rdb_version}.Seal());
  };
  EXPECT_EQ(restore(body), Reply::Ok());
  // The module id ends with ten bits of encoding version. What is said to be of an older version is
  // read as such, and is too short for it.
  for (const int version : {0, 1, 2, 4, 255}) {
    std::string other = body;
    other[kModuleIdEnd - 1] = static_cast<char>(version);
    EXPECT_TRUE(restore(other).IsError("ERR Bad data format")) << version;
  }
  for (size_t i = 2; i < kModuleIdEnd - 2; i++) {
    std::string other = body;
    other[i] = static_cast<char>(other[i] ^ 0x10);
    EXPECT_TRUE(restore(other).IsError("ERR Bad data format")) << "not our type: " << i;
  }
  // Cut by more than the footer's ten bytes, into which the server would read on.
  for (size_t size = 1; size + 10 < body.size(); size++) {
    EXPECT_TRUE(restore(body.substr(0, size)).IsError("ERR Bad data format")) << size;
  }
  // The string replaced by an integer, a double, nothing; a second one; a length without end.
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

// --- Random damage -------------------------------------------------------------------------------

class Mutator {
 public:
  explicit Mutator(unsigned seed) : random_(seed) {}

  // `bytes` with one to four kinds of damage from `first` on.
  std::string operator()(std::string bytes, size_t first) {
    for (size_t i = Below(4) + 1; i > 0 && bytes.size() > first; i--) {
      const size_t at = first + Below(bytes.size() - first);
      switch (Below(6)) {
        case 0:
          bytes[at] = static_cast<char>(bytes[at] ^ 1 << Below(8));
          break;
        case 1:
          bytes[at] = Byte();
          break;
        case 2:
          bytes.erase(at, Below(4) + 1);
          break;
        case 3:
          bytes.resize(at);
          break;
        case 4:
          for (size_t more = Below(8) + 1; more > 0; more--) bytes.insert(at, 1, Byte());
          break;
        default:  // a piece of itself somewhere else
          bytes.insert(at, bytes.substr(first + Below(bytes.size() - first), Below(32)));
          break;
      }
    }
    return bytes;
  }

  size_t Below(size_t limit) { return random_() % limit; }

 private:
  // Any byte, but often one that means something.
  char Byte() {
    constexpr std::string_view kTelling("\x00\x01\x02\x05\x3f\x40\x7f\x80\x81\xc3\xff", 11);
    return Below(2) == 0 ? kTelling[Below(kTelling.size())] : static_cast<char>(Below(256));
  }

  std::mt19937 random_;
};

// Whether the payload may hold a length in 32 or 64 bits that is beyond 16 MB. An allocator that is
// asked for so much fails or not, and both is fine; AddressSanitizer's takes ages or ends the
// server.
bool AsksForMuchMemory(std::string_view payload) {
  for (size_t i = kModuleIdEnd; i + 3 < payload.size(); i++) {
    if (payload[i] == '\x80' && payload[i + 1] != 0) return true;
    if (payload[i] == '\x81' && payload.substr(i + 1, 5) != std::string_view("\0\0\0\0\0", 5)) {
      return true;
    }
  }
  return false;
}

TEST_F(RestoreTest, DamagedPayloadsNeverHarmTheServer) {
  const bool sanitized = std::getenv("TURNSTILE_SERVER_PRELOAD") != nullptr;
  constexpr size_t kPayloads = 24000;
  constexpr size_t kBatch = 1000;
  Mutator mutate(20260101);
  client_.Do("DEL", "original");
  const std::string lease = std::to_string(kMinute);
  const std::vector<Commands> makers = {
      {{"LOCK.ACQUIRE", "original", "x", "PX", lease}},
      {{"LOCK.ACQUIRE", "original", std::string(20, 'x'), "PX", lease, "REENTRANT"},
       {"LOCK.ACQUIRE", "original", std::string(20, 'x'), "PX", lease, "REENTRANT", "LINGER", "9"}},
      {{"LOCK.ACQUIRE", "original", "a", "PX", lease, "SHARED"},
       {"LOCK.ACQUIRE", "original", "b", "PX", lease, "SHARED", "LINGER", lease},
       {"LOCK.ACQUIRE", "original", "c", "PX", lease, "SHARED", "REENTRANT"}},
      {{"LOCK.ACQUIRE", "original", std::string(100, 'x'), "PX", lease, "LIMIT", "2"},
       {"LOCK.ACQUIRE", "original", std::string(256, 'x'), "PX", lease, "LIMIT", "2"}},
  };
  std::vector<std::string> originals;  // bodies of several kinds and lengths
  for (const Commands& maker : makers) {
    const bool longest = &maker == &makers.back();
    client_.Do("CONFIG", "SET", "rdbcompression", longest ? "yes" : "no");
    for (const Command& command : maker) EXPECT_TRUE(client_.Do(command).IsInteger());
    originals.push_back(DumpPayload::Open(client_.Do("DUMP", "original").text)->body);
    client_.Do("DEL", "original");
  }
  client_.Do("CONFIG", "SET", "rdbcompression", "no");

  size_t accepted = 0;
  size_t live = 0;
  std::vector<std::string> dumps;
  for (size_t sent = 0; sent < kPayloads; sent += kBatch) {
    for (size_t i = 0; i < kBatch; i++) {
      const std::string& body = originals[i % originals.size()];
      // Half of them damaged anywhere behind the type byte, which would lead away from our type;
      // half of them damaged only in the value, in a frame that is right.
      std::string payload;
      if (i % 8 < 4) {
        do {
          payload = DumpPayload{mutate(body, 1), original_.rdb_version}.Seal();
        } while (sanitized && AsksForMuchMemory(payload));
      } else {
        std::vector<StoredHold> holds(i % 8 == 4 ? 1 : 1 + mutate.Below(3));
        for (size_t j = 0; j < holds.size(); j++) {
          holds[j].token += static_cast<int64_t>(mutate.Below(1000));
          holds[j].owner = std::string(j + 1, 'o') + std::string(mutate.Below(254), 'x');
          std::sort(holds[j].owner.begin(), holds[j].owner.end());
        }
        const int mode = holds.size() == 1 ? kExclusive : kShared;
        const int version = i % 8 == 4 ? 1 : i % 8 == 5 ? 2 : 3;
        if (mutate.Below(2) == 0) {  // narrow in version 3
          holds[0].since = kSinceOfToken;
          holds[0].end = kEndOfNarrow;
        }
        const std::string value = version == 1
                                      ? OldValue(holds[0].token, 1000, kFarFuture, holds[0].owner)
                                  : version == 2 ? Value(mode, holds)
                                                 : Today(mode, holds);
        payload = Frame(mutate(value, 0), version);
      }
      client_.Send("RESTORE", "job", 0, payload, "REPLACE");
      client_.Send("LOCK.INFO", "job");
      client_.Send("DUMP", "job");
    }
    for (size_t i = 0; i < kBatch; i++) {
      const Reply restored = client_.Read();
      const Reply info = client_.Read();
      const Reply dump = client_.Read();
      if (restored.IsError("ERR Bad data format")) continue;
      ASSERT_EQ(restored, Reply::Ok());
      accepted++;
      if (info.IsNil()) continue;  // its lease is over
      live++;
      for (const Reply& holder : info.Field("holders").elements) {
        const Reply token = holder.Field("token");
        ASSERT_TRUE(token.IsInteger()) << info;
        ASSERT_GE(token.integer, 1);
        ASSERT_LE(token.integer, kMaxToken);
        const std::string owner = holder.Field("owner").text;
        ASSERT_GE(owner.size(), 1U);
        ASSERT_LE(owner.size(), 256U);
        ASSERT_GE(holder.Field("count").integer, 1);
        ASSERT_GE(holder.Field("linger-ms").integer, 0);
        ASSERT_LE(holder.Field("linger-ms").integer, kMaxToken);
      }
      ASSERT_TRUE(dump.IsString()) << dump;
      dumps.push_back(dump.text);
    }
  }
  ASSERT_TRUE(server().running());
  EXPECT_GT(accepted, kPayloads / 20) << "else the damage is too great to test anything";
  EXPECT_LT(accepted, kPayloads * 3 / 4) << "else it is too small";
  EXPECT_GT(live, accepted / 4);

  // What was believed is a lock like any other. In transactions: when the TTL is set back, holds
  // that are over go.
  for (const std::string& dump : dumps) {
    client_.Send("MULTI");
    client_.Send("RESTORE", "again", 0, dump, "REPLACE");
    client_.Send("DUMP", "again");
    client_.Send("EXEC");
  }
  for (const std::string& dump : dumps) {
    for (int i = 0; i < 3; i++) ASSERT_FALSE(client_.Read().IsError());
    ASSERT_EQ(client_.Read(), Reply::Array({Reply::Ok(), Reply::Str(dump)}));
  }
  EXPECT_LT(MustAcquire(client_, "new", "me"), NowMicros() + kTenMinutes + 60'000'000);
}

// --- RDB files -----------------------------------------------------------------------------------

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary) << bytes;
}

// redis-check-rdb, or whatever stands beside REDIS_SERVER under that kind of name.
int CheckRdb(const std::string& path) {
  const char* server = std::getenv("REDIS_SERVER");
  std::string checker = server != nullptr && *server != '\0' ? server : "redis-server";
  checker.replace(checker.rfind("server"), 6, "check-rdb");
  const std::string command = checker + " " + path + " > " + path + ".check 2>&1";
  return std::system(command.c_str());
}

TEST(RdbFileTest, CheckerUnderstandsLocks) {
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
  WriteFile(path, ReadFile(path).substr(0, 200));
  EXPECT_NE(CheckRdb(path), 0) << "else the check checks nothing";
}

// A value that no lock can have ends the start, in good order and with the reason in the log.
TEST(RdbFileTest, DamagedValueEndsTheStart) {
  Server server({.args = {"--rdbchecksum", "no", "--rdbcompression", "no"}});
  Client client = server.Connect();
  const int64_t token = MustAcquire(client, "job", "somebody");
  const int64_t end = EndOf(client, "job");
  const StoredHold hold = {.token = token, .since = end - kMinute, .end = end, .owner = "somebody"};
  const std::string value = Today(kExclusive, {hold});
  EXPECT_EQ(client.Do("SAVE"), Reply::Ok());
  server.Stop();
  const std::string path = server.dir() + "/dump.rdb";
  const std::string intact = ReadFile(path);
  const size_t at = intact.find(value);
  ASSERT_NE(at, std::string::npos) << "the format is not what docs/storage-format.md says";

  // `bytes` in the place of those at `offset` of the value.
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
  version[at - 3] = '\x04';  // before the string's opcode and its length: the end of the module id
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
  EXPECT_NE(server.Log().find("not a lock: 24 bytes, encoding version 3"), std::string::npos);
  EXPECT_NE(server.Log().find("encoding version 4"), std::string::npos);

  // What is loaded is believed, also a token that no client could RESTORE.
  WriteFile(path, with_token(kMaxToken));
  server.options().must_start = true;
  ASSERT_TRUE(server.Restart());
  client = server.Connect();
  EXPECT_EQ(client.Do("LOCK.FENCE", "job"), Reply::Int(kMaxToken));
}

}  // namespace
}  // namespace turnstile::testing
