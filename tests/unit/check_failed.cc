// What a broken invariant (core/check.h) does in unit tests and fuzzers: it ends the process.

#include <cstdio>
#include <cstdlib>

#include "core/check.h"

void turnstile::OnCheckFailed(const char* condition, const char* function) {
  std::fprintf(stderr, "%s: not (%s)\n", function, condition);
  std::abort();
}
