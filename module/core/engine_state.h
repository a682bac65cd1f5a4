// State that the parts of the engine share.

#ifndef TURNSTILE_CORE_ENGINE_STATE_H_
#define TURNSTILE_CORE_ENGINE_STATE_H_

#include <optional>
#include <set>
#include <vector>

#include "core/channels.h"
#include "core/host.h"
#include "core/keyed_hash.h"
#include "core/name_filter.h"
#include "core/reporter.h"
#include "core/sessions.h"
#include "core/settings.h"
#include "core/stats.h"
#include "core/token_issuer.h"
#include "core/wait_queue.h"

namespace turnstile {

// The databases that may contain locks; all others contain none. There are few.
class LockDatabases {
 public:
  const std::vector<int>& all() const { return databases_; }
  bool Has(int db) const;
  void Add(int db) {
    if (databases_.size() != 1 || databases_.front() != db) Insert(db);
  }
  // Forgets all databases if `db` is absent.
  void Forget(std::optional<int> db);
  void Swap(int first, int second);

 private:
  void Insert(int db);

  std::vector<int> databases_;  // in ascending order
};

struct EngineState {
  EngineState(Host& the_host, const HashKey& hash_key)
      : host(the_host), tokens(settings), queue(hash_key), reporter(the_host, stats) {}

  Host& host;
  Settings settings;
  Stats stats;
  TokenIssuer tokens;
  Sessions sessions;
  Channels channels;
  WaitQueue queue;
  Reporter reporter;
  LockDatabases databases;
  NameFilter names;  // of locks

  // The rules by which requests are granted now.
  GrantRules RulesAt(Instant now) const {
    return {.grace = tokens.GraceAt(now), .max_holders = settings.max_holders};
  }
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_ENGINE_STATE_H_
