// An example of another module in the same server. FORWARD command [arg ...] calls any command
// without a user; FORWARD.WAITING allows it to block, if the server supports that; FORWARD.EVENTS
// returns how many module events it has received.

#include <redismodule.h>

namespace {

long long events_received = 0;

int OnEvent(RedisModuleCtx* /*ctx*/, int /*type*/, const char* /*event*/,
            RedisModuleString* /*key*/) {
  ++events_received;
  return REDISMODULE_OK;
}

int ReplyWithEventsReceived(RedisModuleCtx* ctx, RedisModuleString** /*argv*/, int /*argc*/) {
  return RedisModule_ReplyWithLongLong(ctx, events_received);
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
  if (RedisModule_SubscribeToKeyspaceEvents(ctx, REDISMODULE_NOTIFY_MODULE, OnEvent) !=
          REDISMODULE_OK ||
      RedisModule_CreateCommand(ctx, "FORWARD.EVENTS", ReplyWithEventsReceived, "", 0, 0, 0) !=
          REDISMODULE_OK) {
    return REDISMODULE_ERR;
  }
  if (RedisModule_CreateCommand(ctx, "FORWARD", Forward, "write", 0, 0, 0) != REDISMODULE_OK) {
    return REDISMODULE_ERR;
  }
  return RedisModule_CreateCommand(ctx, "FORWARD.WAITING", ForwardWaiting, "write", 0, 0, 0);
}
