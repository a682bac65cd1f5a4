// What the module brings along instead of parts of the C++ runtime, so that one turnstile.so works
// with every glibc from 2.17 on and with musl. script/symbols checks the result.
//
// libstdc++ reports a broken precondition, such as a string that would be too long, by calling
// std::__throw_length_error and the like. Its own versions throw, and so bring in the exception
// classes, the unwinder and, by way of std::random_device, functions of glibc 2.36. The module is
// compiled without exceptions: it could only end the server. These do so directly, with a line in
// the log.
//
// The names are reserved for the library, and a newer library may call more of them. Then the
// linker reports duplicates, or script/symbols a newer glibc: add the missing function here.
// (Considered and rejected: libc++, which is larger and needs glibc 2.35; a build on an old
// distribution, whose compiler does not know C++20.)

#include <sys/auxv.h>

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>

#include "redis/server.h"

namespace {

[[noreturn]] void End(const char* why) {
  if (RedisModule_Log != nullptr) {
    RedisModule_Log(nullptr, "warning",
                    "turnstile %s: internal error in the C++ library: %s; the server is stopped. "
                    "Please report this with the lines above",
                    TURNSTILE_VERSION, why);
  }
  std::abort();
}

}  // namespace

namespace std {

void __throw_bad_alloc() { End("bad_alloc"); }
void __throw_bad_array_new_length() { End("bad_array_new_length"); }
void __throw_bad_function_call() { End("bad_function_call"); }
void __throw_invalid_argument(const char* what) { End(what); }
void __throw_length_error(const char* what) { End(what); }
void __throw_logic_error(const char* what) { End(what); }
void __throw_out_of_range(const char* what) { End(what); }

// It understands %s and %zu.
void __throw_out_of_range_fmt(const char* format, ...) {
  char what[200];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(what, sizeof(what), format, arguments);
  va_end(arguments);
  End(what);
}

// Declared extern by the headers of g++ 13 and later, and there it comes with all of <string>.
#if defined(_GLIBCXX_RELEASE) && _GLIBCXX_RELEASE >= 13
template void basic_string<char>::_M_replace_cold(char*, size_type, const char*, const size_type,
                                                  const size_type);
#endif

}  // namespace std

// On ARM64 the stack protector compares with a variable that glibc keeps in ld.so, by whose name
// musl has no library. The module has one of its own, with the kernel's random bytes as glibc has.
#ifdef __aarch64__
extern "C" {
__attribute__((used, visibility("hidden"))) uintptr_t __stack_chk_guard = 0;
}

namespace {
__attribute__((constructor(101), no_stack_protector)) void SetStackGuard() {
  // getauxval returns an integer that is a pointer to 16 bytes.
  uintptr_t guard = 0;
  if (const auto* random = reinterpret_cast<const char*>(getauxval(AT_RANDOM)); random != nullptr) {
    std::memcpy(&guard, random, sizeof(guard));
  }
  __stack_chk_guard = guard & ~uintptr_t{0xff};  // a zero byte stops functions that copy strings
}
}  // namespace
#endif
