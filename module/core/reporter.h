// Publishes what happens to locks to subscribers, and counts it.
//
// Keyspace events of the module class (d): lock.acquired, lock.touched, lock.released, and
// lock.lost, which is followed by lock.lost.<cause>. No event names an owner: channels have access
// rights of their own, and knowing an owner proves ownership.
//
// When the server removes a lock by itself or for another command (DEL, expiry, eviction, SET,
// RENAME), the type's unlink callback reports the removal just before the server publishes the
// cause. The loss is kept until the next one, the next event of ours or the end of the pass of the
// event loop. By then the cause is known, the server's own event has been published first, and ours
// are published in order.

#ifndef TURNSTILE_CORE_REPORTER_H_
#define TURNSTILE_CORE_REPORTER_H_

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/host.h"
#include "core/lock.h"
#include "core/lock_events.h"
#include "core/stats.h"

namespace turnstile {

class Reporter {
 public:
  Reporter(Host& host, Stats& stats) : host_(host), stats_(stats) {}
  Reporter(const Reporter&) = delete;
  Reporter& operator=(const Reporter&) = delete;

  void Emit(const OpenKey& key, LockEvent event) {
    PublishPending();
    host_.Emit(key.content(), event);
  }
  // `held`: how long the lock was held, if the release was decided here.
  void OnReleased(const OpenKey& key, Token token, std::optional<Millis> held);
  // Holds lost through a fact. `now`: when it was decided, if it was decided here. Losses are
  // counted only then.
  void OnLost(const OpenKey& key, const std::vector<LostHold>& lost, std::optional<Instant> now);

  // The server is removing this lock, and not because of a fact of ours. `counts`: whether this
  // server decides, and so counts the loss. `moves`: whether its live holds move to another node.
  void OnRemoved(LockName name, const Lock& lock, bool counts, bool moves, Instant now);
  // The server has just removed this key because it needed memory.
  void OnEvicted(LockName name);
  // The server has just moved this key to another name or database.
  void OnRenamed(LockName old_name);
  // The server is about to empty the database of this lock.
  void OnFlushed(LockName name, const Lock& lock, bool counts, Instant now);

  bool has_pending() const { return is_pending_; }
  // Publishes and counts what is still pending.
  void PublishPending() {
    if (is_pending_) PublishRemoval();
  }

 private:
  struct Removal {
    int db;
    std::string key;
    bool counts;
    Instant at;
    bool any_live = false;
    size_t ended = 0;  // holds to count whose leases had ended,
    size_t live = 0;   // and those whose leases had not
    Loss how_live = Loss::kForced;
    std::vector<Token> tokens;  // of all holds, including those counted before
    std::string tag;            // of a hold that was live, if any has one
  };
  // At most one warning of a kind per minute; the next one says how many there were in between.
  struct Warnings {
    std::optional<Instant> last;
    uint64_t since = 0;
  };

  void PublishRemoval();
  bool IsPending(LockName name) const;
  uint64_t& CounterFor(Loss how);
  // A hold that has ended counts for at most the length of its lease.
  void AddHoldTime(const Hold& hold, Instant now);
  // Returns whether the loss had not been counted before.
  bool CountLoss(const Hold& hold, Loss how, Instant now);
  bool TakeRenamed(Token token);
  // Names the lock, and the tag of its holder if there is one.
  void Warn(Warnings& warnings, uint64_t count, std::string_view key, std::string_view tag,
            Instant now, const char* what);

  Host& host_;
  Stats& stats_;
  Removal removal_{};  // kept, so that many locks that expire at once cost few allocations
  bool is_pending_ = false;
  // Holds that were counted as lost when their key was renamed or moved, by token; the holds of one
  // request share a token. They continue under another name and are not counted again when they end
  // there.
  std::map<Token, size_t> renamed_;
  Warnings evictions_;
  Warnings undelivered_;
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_REPORTER_H_
