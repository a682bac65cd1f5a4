// The one place for work that no command of ours carries.
//
// Inside a keyspace notification or a server event a write is applied after, but replicated before,
// the command that caused it; and outside a command the server does not check whether a write is
// allowed at all: under CLIENT PAUSE it crashes, on a replica it silently diverges. So callbacks
// only record what is owed, and it is paid just before the event loop sleeps, in one function that
// first asks whether this server may write now. If it may not, the debt stays.
//
// Owed are: the floor of the token clock, to be told to replicas and the AOF when this server
// starts to issue, and again to those who get a copy of the data; the TTL of locks that strangers
// changed (EXPIRE, PERSIST, RESTORE), to be set back to their leases; the end of holds whose
// connection closed; and everything that waiting clients wait for.

#ifndef TURNSTILE_REDIS_DEFERRED_H_
#define TURNSTILE_REDIS_DEFERRED_H_

#include "redis/redis_api.h"

namespace turnstile {

bool SubscribeToEvents(RedisModuleCtx* ctx);

// From now on every write that can change a plain lock is noticed: somebody waits for one. Not from
// the start, because it costs every SET of every client a callback.
void FollowPlainLocks(RedisModuleCtx* ctx);

// Makes the event loop turn once more, at once. Whoever records a debt outside a client's command
// calls it: the loop may have decided already how long it will sleep.
void WakeEventLoop();

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_DEFERRED_H_
