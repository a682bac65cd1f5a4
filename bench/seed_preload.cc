// Preloaded into a server whose instructions are counted. The server takes the seed of its hash
// tables from /dev/urandom, so which keys and which commands collide differs from start to start,
// by more than the differences that are to be seen. Here it reads from the file that
// TURNSTILE_BENCH_SEED names instead.

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

using Open = FILE* (*)(const char*, const char*);

FILE* OpenFile(const char* name, const char* path, const char* mode) {
  const auto open = reinterpret_cast<Open>(dlsym(RTLD_NEXT, name));
  const char* seed = std::getenv("TURNSTILE_BENCH_SEED");
  return open(seed != nullptr && std::strcmp(path, "/dev/urandom") == 0 ? seed : path, mode);
}

}  // namespace

extern "C" __attribute__((visibility("default"))) FILE* fopen(const char* filename,
                                                              const char* modes) {
  return OpenFile("fopen", filename, modes);
}

extern "C" __attribute__((visibility("default"))) FILE* fopen64(const char* filename,
                                                                const char* modes) {
  return OpenFile("fopen64", filename, modes);
}
