// One function a command: parse, open, decide, carry out, reply.

#ifndef TURNSTILE_REDIS_HANDLERS_H_
#define TURNSTILE_REDIS_HANDLERS_H_

#include "redis/redis_api.h"

namespace turnstile {

int HandleAcquire(RedisModuleCtx* ctx, RedisModuleString** argv, int argc);
int HandleRelease(RedisModuleCtx* ctx, RedisModuleString** argv, int argc);
int HandleTouch(RedisModuleCtx* ctx, RedisModuleString** argv, int argc);
int HandleFence(RedisModuleCtx* ctx, RedisModuleString** argv, int argc);
int HandleInfo(RedisModuleCtx* ctx, RedisModuleString** argv, int argc);
int HandleHelp(RedisModuleCtx* ctx, RedisModuleString** argv, int argc);
int HandleProbe(RedisModuleCtx* ctx, RedisModuleString** argv, int argc);
int HandleFact(RedisModuleCtx* ctx, RedisModuleString** argv, int argc);

}  // namespace turnstile

#endif  // TURNSTILE_REDIS_HANDLERS_H_
