// A module as other people may have one beside ours. FORWARD command [arg ...] calls any command as
// nobody; FORWARD.WAITING allows it to block, where the server knows how; OVERHEARD tells how many
// events of modules' keys it has heard of.

#include <redismodule.h>

namespace {

long long overheard = 0;

int Overhear(RedisModuleCtx* /*ctx*/, int /*type*/, const char* /*event*/,
             RedisModuleString* /*key*/) {
  ++overheard;
  return REDISMODULE_OK;
}

int Overheard(RedisModuleCtx* ctx, RedisModuleString** /*argv*/, int /*argc*/) {
  return RedisModule_ReplyWithLongLong(ctx, overheard);
}

int Call(RedisModuleCtx* ctx, RedisModuleString** argv, int argc, const char* format) {
  if (argc < 2) return RedisModule_WrongArity(ctx);
  const char* command = RedisModule_StringPtrLen(argv[1], nullptr);
  RedisModuleCallReply* reply =
      RedisModule_Call(ctx, command, format, argv + 2, static_cast<size_t>(argc - 2));
  if (reply == nullptr) return RedisModule_ReplyWithError(ctx, "ERR no reply");
  RedisModule_ReplyWithCallReply(ctx, reply);
  RedisModule_FreeCallReply(reply);
  return REDISMODULE_OK;
}

int Forward(RedisModuleCtx* ctx, RedisModuleString** argv, int argc) {
  return Call(ctx, argv, argc, "vE");
}

int ForwardWaiting(RedisModuleCtx* ctx, RedisModuleString** argv, int argc) {
  return Call(ctx, argv, argc, "vEK");
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int RedisModule_OnLoad(
    RedisModuleCtx* ctx, RedisModuleString** /*argv*/, int /*argc*/) {
  if (RedisModule_Init(ctx, "forwarder", 1, REDISMODULE_APIVER_1) != REDISMODULE_OK) {
    return REDISMODULE_ERR;
  }
  if (RedisModule_SubscribeToKeyspaceEvents(ctx, REDISMODULE_NOTIFY_MODULE, Overhear) !=
          REDISMODULE_OK ||
      RedisModule_CreateCommand(ctx, "OVERHEARD", Overheard, "", 0, 0, 0) != REDISMODULE_OK) {
    return REDISMODULE_ERR;
  }
  if (RedisModule_CreateCommand(ctx, "FORWARD", Forward, "write", 0, 0, 0) != REDISMODULE_OK) {
    return REDISMODULE_ERR;
  }
  return RedisModule_CreateCommand(ctx, "FORWARD.WAITING", ForwardWaiting, "write", 0, 0, 0);
}
