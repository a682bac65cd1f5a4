// What this server is right now, as far as every command has to know: who may decide, and whether
// anybody takes what it replicates. To ask the server each time costs more than the answer is
// worth, so answers are kept until an event says that they may be others.

#ifndef TURNSTILE_REDIS_SERVER_STATE_H_
#define TURNSTILE_REDIS_SERVER_STATE_H_

#include <optional>
#include <string_view>

#include "core/host.h"
#include "core/types.h"
#include "redis/redis_api.h"

namespace turnstile {

// Where a command comes from decides what may be done with it.
enum class Source {
  kCaller,   // a client of a primary: decide
  kObeyed,   // the primary or the AOF: apply what was decided, never decide
  kReplica,  // a client of a replica: only look, also when the replica is writable
};

// The one place that tells what this server is, from the flags of a context.
Role RoleOf(int context_flags);

class ServerState {
 public:
  // To be called when we are loaded.
  void Register(RedisModuleCtx* ctx);
  bool in_cluster() const { return in_cluster_; }

  Source SourceOf(RedisModuleCtx* ctx) { return only_callers_ ? Source::kCaller : Ask(ctx); }

  // Whether a change has to be told. Building a fact costs more than granting a lock, and most of
  // that even when nobody listens: no replica, no backlog from which one could catch up, no AOF.
  // Nobody begins to listen without a copy of all data: the server saves, forks or loads one, or
  // changes its role. While somebody listens, we look once a second whether that is still so, as
  // the server does not tell when it gives up its backlog.
  bool HasReplicationConsumers(Instant now) {
    return !no_consumers_ &&
           ((look_again_.has_value() && now < *look_again_) || LookForConsumers(now));
  }

  // Whether a client may hear of the events that we publish; and whether anybody may, another
  // module too.
  static bool ClientsWatch();
  bool SomebodyWatches() const { return has_other_modules_ || ClientsWatch(); }

  // To be called when the server saves, forks, loads data, changes its role or its settings, and
  // when a replica comes or goes.
  void InvalidateCache() {
    only_callers_ = false;
    no_consumers_ = false;
    look_again_.reset();
  }

  // To be called when any module is loaded.
  void ModuleCame(std::string_view name);

 private:
  Source Ask(RedisModuleCtx* ctx);
  bool HasConsumers() const;
  void LookForModules(RedisModuleCtx* ctx);
  bool LookForConsumers(Instant now);

  bool in_cluster_ = false;
  bool only_callers_ = false;          // a primary that neither loads nor is in a cluster
  bool no_consumers_ = false;          // nor is it in a cluster, where slots are copied too
  std::optional<Instant> look_again_;  // none: at once
  bool has_other_modules_ = false;
};

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_SERVER_STATE_H_
