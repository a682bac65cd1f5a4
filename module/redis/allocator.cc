// Every C++ allocation of the module comes from the server's allocator, so that it shows up in
// used_memory, counts against maxmemory and can be defragmented. The linker's version script keeps
// these operators inside turnstile.so.
//
// Nothing may be allocated before the API is connected: a global object that did so would be freed
// by another allocator later.

#include <cstdlib>
#include <new>

#include "redis/redis_api.h"

void* operator new(size_t size) {
  if (RedisModule_Alloc == nullptr) std::abort();
  return RedisModule_Alloc(size);  // the server ends itself rather than return null
}

void operator delete(void* memory) noexcept {
  if (memory != nullptr) RedisModule_Free(memory);
}

void operator delete(void* memory, size_t /*size*/) noexcept { ::operator delete(memory); }
