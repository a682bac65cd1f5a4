// Tables and code in the project's documents, for tests that compare them with the implementation.

#ifndef TURNSTILE_TESTS_SUPPORT_MARKDOWN_H_
#define TURNSTILE_TESTS_SUPPORT_MARKDOWN_H_

#include <gtest/gtest.h>

#include <sstream>
#include <string>
#include <vector>

#include "support/source_files.h"

namespace turnstile::testing {

using Row = std::vector<std::string>;  // the cells of one row

// Strips surrounding spaces and backticks.
inline std::string Trim(const std::string& text) {
  const size_t begin = text.find_first_not_of(" `");
  return begin == std::string::npos ? ""
                                    : text.substr(begin, text.find_last_not_of(" `") - begin + 1);
}

inline std::vector<std::string> Split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, separator);) parts.push_back(Trim(part));
  return parts;
}

// The rows of the table whose first heading is `heading`.
inline std::vector<Row> ReadTable(const std::string& path, const std::string& heading) {
  std::vector<Row> rows;
  bool inside = false;
  for (const std::string& line : ReadSource(path)) {
    if (line.starts_with("| " + heading + " |")) {
      inside = true;
    } else if (inside && !line.starts_with("|")) {
      break;
    } else if (inside && !line.starts_with("|---")) {
      rows.push_back(Split(line.substr(1), '|'));
    }
  }
  EXPECT_FALSE(rows.empty()) << "no table of " << heading << " in " << path;
  return rows;
}

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_SUPPORT_MARKDOWN_H_
