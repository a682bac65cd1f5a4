// The project's own files, for tests that compare documentation with the implementation.

#ifndef TURNSTILE_TESTS_SUPPORT_SOURCE_FILES_H_
#define TURNSTILE_TESTS_SUPPORT_SOURCE_FILES_H_

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <vector>

namespace turnstile::testing {

// `path` is relative to the top of the source tree, e.g. "docs/commands.md".
inline std::string SourcePath(const std::string& path) {
  const char* given = std::getenv("TURNSTILE_SOURCE_DIR");
  return std::string(given != nullptr ? given : TURNSTILE_SOURCE_DIR) + "/" + path;
}

inline std::vector<std::string> ReadSource(const std::string& path) {
  std::ifstream file(SourcePath(path));
  EXPECT_TRUE(file.is_open()) << SourcePath(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_SUPPORT_SOURCE_FILES_H_
