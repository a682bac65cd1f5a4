#include "fault/simulator/arena.h"

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>
#include <utility>

namespace turnstile::fault {
namespace {

constinit thread_local bool in_arena = false;

#if TURNSTILE_HAS_ARENA

constexpr size_t kSize = size_t{16} << 20;  // more than any schedule takes; beyond it is malloc
constinit char* begin = nullptr;
constinit char* at = nullptr;
constinit char* end = nullptr;

void Map() {
  // Anywhere would do, but the same place in each process gives the same addresses.
  constexpr uintptr_t kPlace = 0x2000'0000'0000;
  auto* const wanted = reinterpret_cast<void*>(kPlace);  // NOLINT(performance-no-int-to-ptr)
  void* got = mmap(wanted, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (got == MAP_FAILED) return;
  begin = static_cast<char*>(got);
  at = begin;
  end = begin + kSize;
}

void* TakeFromArena(size_t size) {
  if (begin == nullptr) Map();
  constexpr size_t kAlign = alignof(std::max_align_t);
  const size_t rounded = (size + kAlign - 1) / kAlign * kAlign;
  if (rounded > static_cast<size_t>(end - at)) return nullptr;
  return std::exchange(at, at + rounded);
}

void* Take(size_t size) {
  void* taken = in_arena ? TakeFromArena(size) : nullptr;
  if (taken == nullptr) taken = std::malloc(size == 0 ? 1 : size);
  if (taken == nullptr) throw std::bad_alloc();
  return taken;
}

void GiveBack(void* taken) noexcept {
  if (taken >= begin && taken < end) return;
  std::free(taken);
}

#endif

}  // namespace

void ResetArena() {
#if TURNSTILE_HAS_ARENA
  at = begin;
#endif
}

ArenaScope::ArenaScope() : before_(std::exchange(in_arena, true)) {}
ArenaScope::~ArenaScope() { in_arena = before_; }

}  // namespace turnstile::fault

#if TURNSTILE_HAS_ARENA

// The whole program's: only what is made inside an ArenaScope comes from the arena.
void* operator new(size_t size) { return turnstile::fault::Take(size); }
void* operator new[](size_t size) { return turnstile::fault::Take(size); }
void operator delete(void* taken) noexcept { turnstile::fault::GiveBack(taken); }
void operator delete[](void* taken) noexcept { turnstile::fault::GiveBack(taken); }
void operator delete(void* taken, size_t /*size*/) noexcept { turnstile::fault::GiveBack(taken); }
void operator delete[](void* taken, size_t /*size*/) noexcept { turnstile::fault::GiveBack(taken); }

#endif
