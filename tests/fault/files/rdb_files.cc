// Starts on RDB files that were cut or damaged.

#include <map>
#include <string>
#include <vector>

#include "files.h"
#include "support/lock_test.h"
#include "support/reply.h"

namespace turnstile::testing {
namespace {

std::map<std::string, std::string> DigestsOf(Client& client) {
  std::map<std::string, std::string> digests;
  for (const std::string& key : client.Do("KEYS", "*").Texts()) {
    digests[key] = client.Do("DEBUG", "DIGEST-VALUE", key).ToString();
  }
  return digests;
}

enum class Checksum { kOn, kOff };

void Run(const FilesOptions& options, Table& table, Checksum checksum, const char* compression) {
  const bool checked = checksum == Checksum::kOn;
  const std::string name = checked ? "RDB, checksum on" : "RDB, checksum off";
  Server server({.args = {"--rdbchecksum", checked ? "yes" : "no", "--rdbcompression", compression,
                          "--sanitize-dump-payload", "yes"}});
  Client client = server.Connect();
  for (const Command& maker : Makers()) client.Do(maker);
  const std::map<std::string, std::string> digests = DigestsOf(client);
  Require(client.Do("SAVE") == Reply::Ok(), "SAVE");
  const std::string path = server.dir() + "/dump.rdb";
  const std::string intact = ReadWhole(path);
  server.options().must_start = false;

  Random random(options.seed + (checked ? 1 : 2));
  for (int64_t i = -1; i < options.files; i++) {
    std::string damaged = intact;
    std::string what = name;
    if (i >= 0 && i % 3 == 0) {
      damaged.resize(random.Below(intact.size()));
      what += ", cut";
    } else if (i >= 0) {
      // Half of them in the last two thirds, where the locks are.
      const size_t skipped = random.OneIn(2) ? intact.size() / 3 : 0;
      damaged = intact.substr(0, skipped) + Damaged(intact.substr(skipped), intact, random);
      what += ", damaged";
    }
    WriteWhole(path, damaged);
    try {
      if (!StartOnDamaged(server, table, i < 0 ? what + ", intact" : what)) {
        Require(damaged != intact, "an intact file is refused");
        continue;
      }
      client = server.Connect();
      // What the checksum covers is as it was, and no part of a file is taken for the whole.
      if (damaged == intact || checked) {
        Require(DigestsOf(client) == digests, "what was loaded differs");
      }
      CheckAllLocks(client, checked ? Ttl::kOfTheLeases : Ttl::kAny);
      CheckLog(server);
    } catch (const Violation& violation) {
      const std::string kept = KeptAs("violation-" + std::to_string(i) + ".rdb");
      WriteWhole(kept, damaged);
      Report(what + ", file " + std::to_string(i), kept, violation.what());
    }
  }
  server.Kill9();
}

}  // namespace

void RunRdbFiles(const FilesOptions& options, Table& table) {
  if (options.files == 0) return;
  Run(options, table, Checksum::kOn, "yes");
  Run(options, table, Checksum::kOff, "no");
}

}  // namespace turnstile::testing
