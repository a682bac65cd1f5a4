// What this server is right now, as far as every command has to know: who may decide, and whether
// anybody takes what it replicates. To ask the server each time costs more than the answer is
// worth, so answers are kept until an event says that they may be others.

#ifndef TURNSTILE_REDIS_SERVER_STATE_H_
#define TURNSTILE_REDIS_SERVER_STATE_H_

#include <string_view>

#include "core/types.h"
#include "redis/redis_api.h"

namespace turnstile {

// Where a command comes from decides what may be done with it.
enum class Source {
  kCaller,   // a client of a primary: decide
  kObeyed,   // the primary or the AOF: apply what was decided, never decide
  kReplica,  // a client of a replica: only look, also when the replica is writable
};

class ServerState {
 public:
  Source SourceOf(RedisModuleCtx* ctx) { return only_callers_ ? Source::kCaller : Ask(ctx); }

  // Whether a change has to be told. Building a fact costs more than granting a lock, and most of
  // that even when nobody listens: no replica, no backlog from which one could catch up, no AOF.
  // Nobody begins to listen without a copy of all data: the server saves, forks or loads one, or
  // changes its role. While somebody listens, we look once a second whether that is still so, as
  // the server does not tell when it gives up its backlog.
  bool SomebodyListens(Instant now) {
    return !nobody_listens_ && (now < look_again_ || LookForListeners(now));
  }

  // Whether a client may hear of the events that we publish; and whether anybody may, another
  // module too.
  static bool ClientsWatch();
  bool SomebodyWatches() const { return has_other_modules_ || ClientsWatch(); }

  // To be called when the server saves, forks, loads data, changes its role or its settings, and
  // when a replica comes or goes.
  void MayHaveChanged() {
    only_callers_ = false;
    nobody_listens_ = false;
    look_again_ = kMinInstant;
  }

  // To be called when we are loaded, and when any module is.
  void LookForModules(RedisModuleCtx* ctx);
  void ModuleCame(std::string_view name);

 private:
  Source Ask(RedisModuleCtx* ctx);
  bool LookForListeners(Instant now);

  bool only_callers_ = false;    // a primary that neither loads nor is in a cluster
  bool nobody_listens_ = false;  // nor is it in a cluster, where slots are copied too
  Instant look_again_ = kMinInstant;
  bool has_other_modules_ = false;
};

ServerState& TheServer();

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_SERVER_STATE_H_
