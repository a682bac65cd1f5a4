// Invariants as code.
//
// A failed check means that our own state is wrong, never that a caller did something wrong. Debug
// and sanitizer builds, unit tests and the simulator report it and stop. A release build logs it
// and the macro evaluates to false, so that the caller can refuse the operation instead of
// corrupting a lock:
//
//     if (!TURNSTILE_CHECK(token > highest)) return Refuse();
//
// TURNSTILE_DCHECK is for checks that are too expensive for a release build or whose failure cannot
// be handled. It is evaluated in debug, sanitizer and fuzzing builds and in tests only.

#ifndef TURNSTILE_CORE_CHECK_H_
#define TURNSTILE_CORE_CHECK_H_

// In debug builds nothing goes on after a failed check: the static analyzer should not follow such
// paths either.
#ifdef __clang__
#define TURNSTILE_STOPS_ANALYSIS __attribute__((analyzer_noreturn))
#else
#define TURNSTILE_STOPS_ANALYSIS
#endif

namespace turnstile {

// Defined by the program that links the core: module/redis/module.cc for the module,
// tests/unit/check_failed.cc and tests/sim/sim_host.cc for tests.
void OnCheckFailed(const char* condition, const char* function) TURNSTILE_STOPS_ANALYSIS;

}  // namespace turnstile

#define TURNSTILE_CHECK(condition)                   \
  (__builtin_expect(static_cast<bool>(condition), 1) \
       ? true                                        \
       : (::turnstile::OnCheckFailed(#condition, __builtin_FUNCTION()), false))

#ifdef TURNSTILE_DCHECKS
#define TURNSTILE_DCHECK(condition) static_cast<void>(TURNSTILE_CHECK(condition))
#else
#define TURNSTILE_DCHECK(condition) static_cast<void>(0)
#endif

#endif  // TURNSTILE_CORE_CHECK_H_
