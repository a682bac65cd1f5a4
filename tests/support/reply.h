// A reply of the server as a plain value, the same for RESP2 (Client) and RESP3 (RawConnection), so
// that tests compare whole replies and failures print both like redis-cli.
//
//   EXPECT_EQ(client.Do("LOCK.RELEASE", "job", "me"), Reply::Int(1));
//   EXPECT_TRUE(client.Do("LOCK.RELEASE", "job").IsError("ERR the owner is missing")) << ...;

#ifndef TURNSTILE_TESTS_SUPPORT_REPLY_H_
#define TURNSTILE_TESTS_SUPPORT_REPLY_H_

#include <cstdint>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace turnstile::testing {

struct Reply {
  enum class Kind {
    kNil,
    kInteger,
    kString,
    kStatus,
    kError,
    kArray,
    // RESP3 only:
    kMap,
    kSet,
    kPush,
    kBoolean,
    kDouble,
    kVerbatim,
    kBigNumber,
  };

  Kind kind = Kind::kNil;
  int64_t integer = 0;          // kInteger; kBoolean as 0 or 1
  std::string text;             // the text, for every kind with one; kVerbatim with its "txt:"
  std::vector<Reply> elements;  // kMap: key, value, key, value ...

  static Reply Nil() { return {}; }
  static Reply Int(int64_t value) { return {Kind::kInteger, value, {}, {}}; }
  static Reply Bool(bool value) { return {Kind::kBoolean, value ? 1 : 0, {}, {}}; }
  static Reply Str(std::string value) { return {Kind::kString, 0, std::move(value), {}}; }
  static Reply Status(std::string value) { return {Kind::kStatus, 0, std::move(value), {}}; }
  static Reply Ok() { return Status("OK"); }
  static Reply Queued() { return Status("QUEUED"); }
  static Reply Error(std::string value) { return {Kind::kError, 0, std::move(value), {}}; }
  static Reply Array(std::vector<Reply> values) { return {Kind::kArray, 0, {}, std::move(values)}; }
  static Reply Map(std::vector<Reply> keys_and_values) {
    return {Kind::kMap, 0, {}, std::move(keys_and_values)};
  }

  bool IsNil() const { return kind == Kind::kNil; }
  bool IsInteger() const { return kind == Kind::kInteger; }
  bool IsString() const { return kind == Kind::kString; }
  bool IsArray() const { return kind == Kind::kArray; }
  bool IsMap() const { return kind == Kind::kMap; }
  // An error whose text begins with `prefix`. A lost or timed-out connection also gives errors
  // ("DISCONNECTED: ...", "TIMEOUT: ..."), so name the expected one.
  bool IsError(std::string_view prefix = "") const {
    return kind == Kind::kError && text.compare(0, prefix.size(), prefix) == 0;
  }

  // The value of a field of a map, or of RESP2's flat array of fields and values. If it is missing,
  // an error reply that says so, which makes any comparison fail with a readable message.
  Reply Field(std::string_view name) const;

  // The texts of the elements, e.g. the arguments of a command.
  std::vector<std::string> Texts() const;

  // As redis-cli prints it, without a newline at the end.
  std::string ToString() const;

  friend bool operator==(const Reply&, const Reply&) = default;
  friend std::ostream& operator<<(std::ostream& out, const Reply& reply) {
    return out << reply.ToString();
  }
};

// `bytes` in double quotes, with non-printable bytes escaped, as redis-cli does.
std::string Quoted(std::string_view bytes);

}  // namespace turnstile::testing

#endif  // TURNSTILE_TESTS_SUPPORT_REPLY_H_
