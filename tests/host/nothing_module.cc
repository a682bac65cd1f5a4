// A module that does nothing: no command, no type, no event. What a server does otherwise with it
// than without is what any module changes.
//
// Without the option below the server would not load a replica's data beside the old data
// (repl-diskless-load swapdb), which is its caution about modules that have not thought of that.

#include <redismodule.h>

extern "C" __attribute__((visibility("default"))) int RedisModule_OnLoad(
    RedisModuleCtx* ctx, RedisModuleString** /*argv*/, int /*argc*/) {
  if (RedisModule_Init(ctx, "nothing", 1, REDISMODULE_APIVER_1) == REDISMODULE_ERR) {
    return REDISMODULE_ERR;
  }
  RedisModule_SetModuleOptions(
      ctx, REDISMODULE_OPTIONS_HANDLE_IO_ERRORS | REDISMODULE_OPTIONS_HANDLE_REPL_ASYNC_LOAD);
  return REDISMODULE_OK;
}
