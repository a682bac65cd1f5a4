#include "support/reply.h"

namespace turnstile::testing {
namespace {

// Elements are numbered, and nested ones stand under their parent: "1) 1) "a"" and below it
// "   2) "b"".
std::string RenderElements(const Reply& reply, const std::string& indent);

std::string Render(const Reply& reply, const std::string& indent) {
  switch (reply.kind) {
    case Reply::Kind::kNil:
      return "(nil)";
    case Reply::Kind::kInteger:
      return "(integer) " + std::to_string(reply.integer);
    case Reply::Kind::kBoolean:
      return reply.integer != 0 ? "(true)" : "(false)";
    case Reply::Kind::kString:
      return Quoted(reply.text);
    case Reply::Kind::kStatus:
      return reply.text;
    case Reply::Kind::kError:
      return "(error) " + reply.text;
    case Reply::Kind::kDouble:
      return "(double) " + reply.text;
    case Reply::Kind::kBigNumber:
      return "(big number) " + reply.text;
    case Reply::Kind::kVerbatim:
      return "(verbatim) " + Quoted(reply.text);
    case Reply::Kind::kArray:
    case Reply::Kind::kMap:
    case Reply::Kind::kSet:
    case Reply::Kind::kPush:
      return RenderElements(reply, indent);
  }
  return "(unknown kind)";
}

std::string RenderElements(const Reply& reply, const std::string& indent) {
  const bool map = reply.kind == Reply::Kind::kMap;
  const char* mark = map                                ? "# "
                     : reply.kind == Reply::Kind::kSet  ? "~ "
                     : reply.kind == Reply::Kind::kPush ? "> "
                                                        : ") ";
  if (reply.elements.empty()) return map ? "(empty map)" : "(empty array)";
  std::string out;
  const size_t step = map ? 2 : 1;
  for (size_t i = 0; i < reply.elements.size(); i += step) {
    const std::string number = std::to_string(i / step + 1) + mark;
    const std::string inner = indent + std::string(number.size(), ' ');
    if (i > 0) out += "\n" + indent;
    out += number + Render(reply.elements[i], inner);
    if (map && i + 1 < reply.elements.size()) {
      out += " => ";
      const Reply& value = reply.elements[i + 1];
      if (!value.elements.empty()) out += "\n" + inner;
      out += Render(value, inner);
    }
  }
  return out;
}

}  // namespace

Reply Reply::Field(std::string_view name) const {
  for (size_t i = 0; i + 1 < elements.size(); i += 2) {
    if (elements[i].text == name) return elements[i + 1];
  }
  return Error("NOFIELD: no field '" + std::string(name) + "' in: " + ToString());
}

std::vector<std::string> Reply::Texts() const {
  std::vector<std::string> texts;
  texts.reserve(elements.size());
  for (const Reply& element : elements) texts.push_back(element.text);
  return texts;
}

std::string Reply::ToString() const { return Render(*this, ""); }

std::string Quoted(std::string_view bytes) {
  std::string out = "\"";
  for (const char c : bytes) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '"' || c == '\\') {
      out += {'\\', c};
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '\r') {
      out += "\\r";
    } else if (byte < 0x20 || byte > 0x7e) {
      constexpr std::string_view kDigits = "0123456789abcdef";
      out += {'\\', 'x', kDigits[byte >> 4], kDigits[byte & 15]};
    } else {
      out += c;
    }
  }
  return out + "\"";
}

}  // namespace turnstile::testing
