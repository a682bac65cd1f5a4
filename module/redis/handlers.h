// One function per command: parse, call the engine, reply.

#ifndef TURNSTILE_REDIS_HANDLERS_H_
#define TURNSTILE_REDIS_HANDLERS_H_

#include "redis/redis_api.h"

namespace turnstile {

// How the commands use their keys. The server is told twice: by key specifications, which clients
// read too (command_table.cc), and by the handlers themselves, when they are called to name the
// keys of a request. Only the second makes 7.0 check the slots of the keys after ALSO.
inline constexpr int kUpdatesKey = REDISMODULE_CMD_KEY_RW | REDISMODULE_CMD_KEY_UPDATE;
inline constexpr int kReleasesKey = REDISMODULE_CMD_KEY_RW | REDISMODULE_CMD_KEY_DELETE;
inline constexpr int kLooksAtKey = REDISMODULE_CMD_KEY_RO | REDISMODULE_CMD_KEY_ACCESS;

int HandleAcquire(RedisModuleCtx* ctx, RedisModuleString** argv, int argc);
int HandleRelease(RedisModuleCtx* ctx, RedisModuleString** argv, int argc);
int HandleTouch(RedisModuleCtx* ctx, RedisModuleString** argv, int argc);
int HandleFence(RedisModuleCtx* ctx, RedisModuleString** argv, int argc);
int HandleInfo(RedisModuleCtx* ctx, RedisModuleString** argv, int argc);
int HandleList(RedisModuleCtx* ctx, RedisModuleString** argv, int argc);
int HandleTop(RedisModuleCtx* ctx, RedisModuleString** argv, int argc);
int HandleProbe(RedisModuleCtx* ctx, RedisModuleString** argv, int argc);
int HandleHeld(RedisModuleCtx* ctx, RedisModuleString** argv, int argc);
int HandleFact(RedisModuleCtx* ctx, RedisModuleString** argv, int argc);

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_HANDLERS_H_
