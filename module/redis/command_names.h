// The names of commands that are used in more than one place.

#ifndef TURNSTILE_REDIS_COMMAND_NAMES_H_
#define TURNSTILE_REDIS_COMMAND_NAMES_H_

namespace turnstile {

// The command whose rights a waiter needs.
inline constexpr const char* kAcquireCommand = "LOCK.ACQUIRE";
inline constexpr const char* kReleaseCommand = "LOCK.RELEASE";
inline constexpr const char* kTouchCommand = "LOCK.TOUCH";

// The command whose rights decide what a user is told about a lock.
inline constexpr const char* kInfoCommand = "LOCK.INFO";

// Does nothing, but is checked by the server as LOCK.ACQUIRE is: whether a grant that no command
// carries is allowed now can be asked by calling it.
inline constexpr const char* kProbeCommand = "LOCK.PROBE";

// The commands that carry facts (see core/fact.h).
inline constexpr const char* kFactCommand = "LOCK.FACT";
inline constexpr const char* kHeldCommand = "LOCK.HELD";

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_COMMAND_NAMES_H_
