// What happens to locks, told to those who subscribe, and counted.
//
// Keyspace events of the class for modules (d): lock.acquired, lock.touched, lock.released, and
// lock.lost, which is followed by lock.lost.<why>. No event names an owner: channels have rights of
// their own, and an owner is what proves ownership.
//
// Locks that the server removes by itself or for others (DEL, expiry, eviction, SET, RENAME) are
// known from the type's unlink callback, a moment before the server tells why. Such a loss is kept
// until the next one, the next event of ours or the end of the pass of the event loop: so the why
// is known when it is told, the server's own event comes first, and ours come in order.

#ifndef TURNSTILE_CORE_REPORTER_H_
#define TURNSTILE_CORE_REPORTER_H_

#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "core/host.h"
#include "core/lock.h"
#include "core/news.h"
#include "core/stats.h"

namespace turnstile {

class Reporter {
 public:
  Reporter(Host& host, Stats& stats) : host_(host), stats_(stats) {}
  Reporter(const Reporter&) = delete;
  Reporter& operator=(const Reporter&) = delete;

  void Acquired(const OpenKey& key) { Emit(key, LockEvent::kAcquired); }
  void Touched(const OpenKey& key) { Emit(key, LockEvent::kTouched); }
  // `held`: for how long, if that was decided here.
  void Released(const OpenKey& key, Token token, std::optional<Millis> held);
  // By a fact. `now`: when it was decided, if it was decided here. Only then it is counted.
  void Lost(const OpenKey& key, const std::vector<Lost>& lost, std::optional<Instant> now);

  // The server is removing this lock, and no fact of ours tells it to. `counts`: this server
  // decides. `moves`: what is live of it goes to another node.
  void Removed(LockName name, const Lock& lock, bool counts, bool moves, Instant now);
  // It has just removed this key because it needed the memory.
  void Evicted(LockName name);
  // It has just taken this key to another name or database.
  void Renamed(LockName old_name);
  // It is about to empty the database of this lock.
  void Flushed(LockName name, const Lock& lock, bool counts, Instant now);

  // Tells what has not been told yet.
  void Drain() {
    if (removal_.has_value()) DrainRemoval();
  }

 private:
  struct Removal {
    int db;
    std::string key;
    bool counts;
    Instant at;
    bool any_live = false;
    size_t ended = 0;  // holds to count whose leases were over,
    size_t live = 0;   // and those whose were not
    Loss how_live = Loss::kForced;
    std::vector<Token> tokens;  // of all holds, also those that were counted before
  };
  // At most one warning of a kind a minute; the next one tells how many there were meanwhile.
  struct Warnings {
    std::optional<Instant> last;
    uint64_t since = 0;
  };

  void Emit(const OpenKey& key, LockEvent event) {
    Drain();
    host_.Emit(key.content(), event);
  }
  void DrainRemoval();
  bool IsPending(LockName name) const;
  uint64_t& CounterFor(Loss how);
  // A hold that is over lasted as long as its lease at most.
  void AddHoldTime(const Hold& hold, Instant now);
  void CountLoss(const Hold& hold, Loss how, Instant now);
  bool TakeRenamed(Token token);
  void Warn(Warnings& warnings, uint64_t count, std::string_view key, Instant now,
            const char* what);

  Host& host_;
  Stats& stats_;
  std::optional<Removal> removal_;
  // Holds that were counted as lost when their key was renamed or moved, by token; several of a set
  // share one. They live on under another name and are not counted again when they end there.
  std::map<Token, size_t> renamed_;
  Warnings evictions_;
  Warnings undelivered_;
};

}  // namespace turnstile

#endif  // TURNSTILE_CORE_REPORTER_H_
