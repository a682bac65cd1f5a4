// Memory for one schedule: taken from front to back and given back as a whole.
//
// Two things need it. A million schedules a minute leave no time for an allocator. And the wait
// queue keeps woken lines in a table by address: with the same addresses each time, a seed gives
// the same history each time, so that a violation can be looked at again.
//
// Builds with a sanitizer do without, because it could not see what is freed too early or never.

#ifndef TURNSTILE_TESTS_FAULT_SIMULATOR_ARENA_H_
#define TURNSTILE_TESTS_FAULT_SIMULATOR_ARENA_H_

#if defined(__SANITIZE_ADDRESS__)
#define TURNSTILE_HAS_ARENA 0
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define TURNSTILE_HAS_ARENA 0
#endif
#endif
#ifndef TURNSTILE_HAS_ARENA
#define TURNSTILE_HAS_ARENA 1
#endif

namespace turnstile::fault {

// While one lives, `new` on this thread takes from the arena. What is made so must not outlive the
// next ResetArena().
class ArenaScope {
 public:
  ArenaScope();
  ~ArenaScope();
  ArenaScope(const ArenaScope&) = delete;
  ArenaScope& operator=(const ArenaScope&) = delete;

 private:
  bool before_;
};

// One thread of a process may use the arena.
void ResetArena();

}  // namespace turnstile::fault

#endif  // TURNSTILE_TESTS_FAULT_SIMULATOR_ARENA_H_
