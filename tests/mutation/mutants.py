"""Makes mutants of C++ source: one small change each, found in its tokens.

The tokens tell what is needed: comments, strings and preprocessor lines are left alone, brackets are
matched, and each brace is a namespace, a type, the body of a function or an initialiser. It relies
on the format that clang-format gives our files: an operator with spaces around it is a relation or
a sum, one without is a template or a pointer.
"""

import bisect
import dataclasses
import difflib
import re

OPERATORS = {
    "boundary": "`<` and `<=`, `>` and `>=` are exchanged",
    "equality": "`==` and `!=` are exchanged",
    "logic": "`&&` and `||` are exchanged",
    "negate": "the condition of an `if` is negated",
    "drop-not": "a `!` is removed",
    "arithmetic": "`+` and `-`, `*` and `/` are exchanged",
    "increment": "`++` and `--`, `+=` and `-=` are exchanged",
    "min-max": "`std::min` and `std::max` are exchanged",
    "off-by-one": "a number is one larger",
    "zero": "a number is 0",
    "bool": "`true` and `false` are exchanged",
    "enumerator": "a constant of an enumeration is the next one",
    "drop-statement": "a statement is removed",
    "drop-field": "a field of an initialiser is left out",
    "drop-else": "an `else` is removed: what follows always runs",
    "swap-arguments": "two arguments of a call are exchanged",
    "swap-branches": "the values of a `? :` are exchanged",
    "return-empty": "`return {}` instead of a value",
    "return-not": "a function returns the opposite",
}

TOKEN = re.compile(
    r"""(?P<space>\s+)
    |(?P<comment>//[^\n]*|/\*.*?\*/)
    |(?P<directive>(?<![^\n])[ \t]*\#(?:[^\n]*\\\n)*[^\n]*)
    |(?P<string>(?:u8|[uUL])?R"(?P<mark>[^(\s]*)\(.*?\)(?P=mark)"|(?:u8|[uUL])?"(?:\\.|[^"\\\n])*")
    |(?P<char>'(?:\\.|[^'\\\n])+')
    |(?P<number>\.?\d(?:'?[\w.])*)
    |(?P<name>[A-Za-z_]\w*)
    |(?P<mark2><=>|<<=|>>=|\.\.\.|->\*|->|::|\+\+|--|<=|>=|==|!=|&&|\|\||[-+*/%&|^]=|\.\*|.)""",
    re.VERBOSE | re.DOTALL)

EXCHANGED = {
    "<": ("boundary", "<="), "<=": ("boundary", "<"), ">": ("boundary", ">="), ">=": ("boundary", ">"),
    "==": ("equality", "!="), "!=": ("equality", "=="),
    "&&": ("logic", "||"), "||": ("logic", "&&"),
    "+": ("arithmetic", "-"), "-": ("arithmetic", "+"), "*": ("arithmetic", "/"),
    "/": ("arithmetic", "*"),
    "+=": ("increment", "-="), "-=": ("increment", "+="),
}  # fmt: skip
CLOSING = {"(": ")", "[": "]", "{": "}"}
# What a statement that can be removed does not begin with.
KEYWORDS = frozenset(
    """if else for while do switch case default return break continue goto using typedef friend
    template class struct union enum namespace public private protected const constexpr static auto
    inline virtual explicit operator static_assert static_cast delete throw try catch typename
    TURNSTILE_CHECK TURNSTILE_DCHECK""".split())
# What these are called with is not changed: checks of our own, which nothing ever fails, and texts
# for people.
UNTOUCHED_CALLS = frozenset(
    "static_assert TURNSTILE_CHECK TURNSTILE_DCHECK RedisModule_Log RedisModule_LogIOError".split())
STATEMENT = re.compile(r"^[U*]?N(?:[.]N|T|P|S)*(?P<assigned>=.*)?$")


@dataclasses.dataclass(frozen=True)
class Token:
    kind: str
    text: str
    begin: int
    end: int


@dataclasses.dataclass(frozen=True)
class Mutant:
    file: str  # from the top of the repository
    line: int
    operator: str
    number: int  # among those of its operator on its line, from 1
    text: str  # the line without the space around it
    place: int  # among the lines of this text where there is such a mutant, from 1
    edits: tuple  # (begin, end, new text), in order

    @property
    def id(self):
        number = f"#{self.number}" if self.number > 1 else ""
        return f"{self.file}:{self.line}:{self.operator}{number}"

    @property
    def key(self):
        """What it is called when lines move."""
        key = self.file, self.operator, self.number, self.text
        return key if self.place == 1 else (*key, self.place)

    def apply(self, source):
        for begin, end, text in reversed(self.edits):
            source = source[:begin] + text + source[end:]
        return source

    def diff(self, source):
        return "".join(difflib.unified_diff(
            source.splitlines(keepends=True), self.apply(source).splitlines(keepends=True),
            "a/" + self.file, "b/" + self.file, n=2))


def tokens_of(source):
    """All tokens but space, comments and preprocessor lines."""
    tokens = []
    for match in TOKEN.finditer(source):
        kind = match.lastgroup if match.lastgroup != "mark" else "string"
        if kind not in ("space", "comment", "directive"):
            tokens.append(Token("mark" if kind == "mark2" else kind, match[0], *match.span()))
    return tokens


def enumerations_of(source):
    """{name: its constants} of each `enum class`."""
    tokens = tokens_of(source)
    found = {}
    for i, token in enumerate(tokens):
        if token.text != "enum" or tokens[i + 1].text != "class":
            continue
        name, at = tokens[i + 2].text, i + 3
        while tokens[at].text not in "{;":
            at += 1
        if tokens[at].text == ";":
            continue
        constants = []
        while tokens[at].text != "}":
            if tokens[at].text in "{," and tokens[at + 1].kind == "name":
                constants.append(tokens[at + 1].text)
            at += 1
        # One name that two enumerations have is known by the constants of both.
        found.setdefault(name, []).append(constants)
    return found


class File:
    """The tokens of one file, and where its mutants are."""

    def __init__(self, name, source, enumerations):
        self.name = name
        self.source = source
        self.enumerations = enumerations
        self.tokens = tokens_of(source)
        self.lines = [0] + [match.end() for match in re.finditer("\n", source)]
        self.partner = {}  # of each bracket
        self.inside = []  # for each token, the innermost open bracket
        self.match_brackets()
        self.kinds = {}  # of each brace: namespace, type, function or values
        self.heads = {}  # of each function's brace: the index of its first token
        self.classify_braces()
        self.untouched = self.find_untouched()

    def text(self, i):
        return self.tokens[i].text if 0 <= i < len(self.tokens) else ""

    def kind(self, i):
        return self.tokens[i].kind if 0 <= i < len(self.tokens) else ""

    def spaced(self, i):
        """Whether there is space on both sides, as there is around operators with two operands."""
        token = self.tokens[i]
        return self.source[token.begin - 1].isspace() and self.source[token.end].isspace()

    def match_brackets(self):
        open_ones = []
        for i, token in enumerate(self.tokens):
            if token.kind == "mark" and token.text in CLOSING.values():
                first = open_ones.pop()
                assert CLOSING[self.text(first)] == token.text, (self.name, token)
                self.partner[first], self.partner[i] = i, first
            self.inside.append(open_ones[-1] if open_ones else None)
            if token.kind == "mark" and token.text in CLOSING:
                open_ones.append(i)
        assert not open_ones, self.name

    def classify_braces(self):
        for i, token in enumerate(self.tokens):
            if token.kind != "mark" or token.text != "{":
                continue
            outer = self.brace_around(i)
            outer_kind = self.kinds[outer] if outer is not None else "namespace"
            start = i
            while start > 0 and self.text(start - 1) not in (";", "{", "}"):
                closes = self.text(start - 1) in (")", "]")
                start = self.partner[start - 1] if closes else start - 1
                if self.inside[start] != self.inside[i]:
                    break
            head = [self.text(at) for at in range(start, i)]
            self.kinds[i] = self.kind_of_brace(i, head, outer_kind)
            if self.kinds[i] == "function":
                self.heads[i] = start

    def kind_of_brace(self, i, head, outer):
        before = self.text(i - 1)
        if "namespace" in head:
            return "namespace"
        if self.inside[i] == self.brace_around(i) and any(
                word in head for word in ("class", "struct", "union", "enum")) and ")" not in head:
            return "type"
        if outer in ("namespace", "type"):
            if not head and outer == "type":  # behind the } of a constructor's field
                return "function"
            ends = before in (")", "const", "override", "final", "noexcept") or "->" in head
            values = "=" in head and "(" not in head[:head.index("=")] and "operator" not in head
            return "function" if (ends or (")" in head and ":" in head)) and not values else "values"
        if before in (")", "else", "do", "{", "}", ";", ":", "mutable", "") or "->" in head[-4:]:
            # A call's parenthesis in front of a brace would be a value: there is no such thing.
            return "function"
        if before == "]":  # a lambda without parameters, or an array
            return "function" if self.text(self.partner[i - 1] - 1) in ("=", "(", ",", "return") \
                else "values"
        return "values"

    def brace_around(self, i):
        at = self.inside[i]
        while at is not None and self.text(at) != "{":
            at = self.inside[at]
        return at

    def in_function(self, i):
        """The innermost brace of a function around a token, or None."""
        at = self.brace_around(i)
        while at is not None and self.kinds[at] == "values":
            at = self.brace_around(at)
        return at if at is not None and self.kinds[at] == "function" else None

    def find_untouched(self):
        """The places that no mutant changes, as sorted (first, last) tokens."""
        places = []
        for i, token in enumerate(self.tokens):
            if token.text in UNTOUCHED_CALLS and self.text(i + 1) == "(":
                places.append((i, self.partner[i + 1]))
            elif token.text == "template" and self.text(i + 1) == "<":
                places.append((i, self.end_of_template(i + 1)))
            elif token.text in ("using", "typedef", "requires", "friend") and token.kind == "name":
                at = i
                while self.text(at) not in (";", "{"):
                    at += 1
                if token.text != "friend" or self.text(at) == ";":
                    places.append((i, at))
        return sorted(places)

    def is_untouched(self, i):
        at = bisect.bisect_right(self.untouched, (i, len(self.tokens)))
        return any(first <= i <= last for first, last in self.untouched[:at])

    def end_of_template(self, i):
        """The > that belongs to the < at `i`; `i` if there is none."""
        depth, at = 0, i
        while at < len(self.tokens):
            text = self.text(at)
            if text in CLOSING:
                at = self.partner[at]
            elif text in (")", "]", "}", ";"):
                return i
            elif text == "<":
                depth += 1
            elif text == ">":
                depth -= 1
                if depth == 0:
                    return at
            at += 1
        return i

    def end_of_statement(self, i):
        """The first ; at the level of `i`, or None."""
        at = i
        while at < len(self.tokens) and self.text(at) != ";":
            if self.text(at) in CLOSING and self.kind(at) == "mark":
                at = self.partner[at]
            elif self.text(at) in CLOSING.values() and self.kind(at) == "mark":
                return None
            at += 1
        return at if at < len(self.tokens) else None

    def position(self, first, last):
        return self.tokens[first].begin, self.tokens[last].end

    def slice(self, first, last):
        begin, end = self.position(first, last)
        return self.source[begin:end]

    def replace(self, first, last, text):
        return (*self.position(first, last), text)

    def mutants(self):
        found = []
        for i in range(len(self.tokens)):
            if self.is_untouched(i):
                continue
            for rule in (self.marks, self.values, self.conditions, self.statements, self.calls,
                         self.branches, self.returns):
                for operator, *edits in rule(i):
                    found.append((operator, tuple(sorted(edits))))
        return self.name_them(found)

    def name_them(self, found):
        counts, places, made, seen = {}, {}, [], set()
        for operator, edits in sorted(found, key=lambda one: one[1]):
            if edits in seen:
                continue
            seen.add(edits)
            number = bisect.bisect_right(self.lines, edits[0][0])
            begin = self.lines[number - 1]
            text = self.source[begin:self.source.find("\n", begin)].strip()
            count = counts[number, operator] = counts.get((number, operator), 0) + 1
            place = places[operator, count, text] = places.get((operator, count, text), 0) + 1
            made.append(Mutant(self.name, number, operator, count, text, place, edits))
        return made

    # --- The operators: each yields (its name, edits ...) for what begins at a token ---------------

    def marks(self, i):
        token = self.tokens[i]
        if token.kind == "mark" and token.text in EXCHANGED and self.text(i - 1) != "operator":
            if self.spaced(i):
                operator, other = EXCHANGED[token.text]
                yield operator, self.replace(i, i, other)
        elif token.text in ("++", "--") and token.kind == "mark":
            yield "increment", self.replace(i, i, "--" if token.text == "++" else "++")
        elif token.text == "!" and token.kind == "mark":
            yield "drop-not", self.replace(i, i, "")
        elif token.text in ("min", "max") and self.text(i - 1) == "::" and self.text(i + 1) == "(" \
                and self.text(i - 2) == "std":
            yield "min-max", self.replace(i, i, "max" if token.text == "min" else "min")

    def values(self, i):
        token = self.tokens[i]
        if token.kind == "number" and "." not in token.text:
            if token.text == "0" and self.text(i - 1) == "=" and \
                    self.text(i - 2) in (")", "const", "override"):
                return  # a pure virtual function
            yield "off-by-one", self.replace(i, i, self.one_more(token.text))
            if int(re.match(r"0[xX][\da-fA-F']+|[\d']+", token.text)[0].replace("'", ""), 0) > 1:
                yield "zero", self.replace(i, i, "0")
        elif token.text in ("true", "false") and token.kind == "name":
            yield "bool", self.replace(i, i, "false" if token.text == "true" else "true")
        elif token.kind == "name" and self.text(i - 1) == "::" and self.text(i + 1) != "::":
            case = i - 2
            while self.text(case - 1) == "::":
                case -= 2
            if self.text(case - 1) == "case":
                return
            for constants in self.enumerations.get(self.text(i - 2), []):
                if token.text in constants:
                    following = constants[(constants.index(token.text) + 1) % len(constants)]
                    yield "enumerator", self.replace(i, i, following)
                    return

    @staticmethod
    def one_more(text):
        number = re.match(r"0[xX][\da-fA-F']+|[\d']+", text)[0]
        value = int(number.replace("'", ""), 0) + 1
        return (hex(value) if number[:2] in ("0x", "0X") else str(value)) + text[len(number):]

    def conditions(self, i):
        if self.text(i) != "if" or self.text(i + 1) != "(":
            return
        first, last = i + 2, self.partner[i + 1] - 1
        at = first
        while at <= last:  # if (declaration; condition)
            if self.text(at) == ";":
                first = at + 1
                break
            at = self.partner[at] + 1 if self.text(at) in CLOSING else at + 1
        levels = [self.text(at) for at in range(first, last + 1)]
        if levels[0] in ("const", "auto"):
            return  # a declaration that is the condition
        if levels[0] == "!" and "&&" not in levels and "||" not in levels:
            return  # the same as without the !
        if levels[0] == "!" and levels[1] == "TURNSTILE_CHECK":
            return
        yield ("negate", (self.tokens[first].begin, self.tokens[first].begin, "!("),
               (self.tokens[last].end, self.tokens[last].end, ")"))

    def begins_statement(self, i):
        brace = self.inside[i]
        if brace is None or self.text(brace) != "{" or self.kinds[brace] != "function":
            return False
        before = self.text(i - 1)
        if before == ")":  # of an if, for, while or switch
            word = self.partner[i - 1] - 1
            return self.text(word) in ("if", "for", "while", "constexpr")
        return before in (";", "{", "}", "else", ":", "do") and \
            (before != ":" or self.is_label(i - 1))

    def is_label(self, i):
        at = i - 1
        while self.text(at) == "::" or self.kind(at) in ("name", "number", "char"):
            if self.text(at) in ("case", "default"):
                return True
            at -= 1
        return False

    def statements(self, i):
        if self.in_function(i) is None:
            return
        if self.text(i) == "." and self.text(i - 1) in ("{", ",") and self.kind(i + 1) == "name" \
                and self.text(i + 2) in ("=", "{"):
            end = self.end_of_value(i)
            if self.text(end) == ",":
                yield "drop-field", self.replace(i, end, "")
            elif self.text(i - 1) == ",":
                yield "drop-field", self.replace(i - 1, end - 1, "")
            else:
                yield "drop-field", self.replace(i, end - 1, "")
            return
        if not self.begins_statement(i):
            return
        end = self.end_of_statement(i)
        if end is None:
            return
        if self.text(i) in ("break", "continue") or \
                (self.text(i) == "return" and self.text(i + 1) == ";"):
            yield "drop-statement", self.replace(i, end - 1, "")
        elif self.text(i) not in KEYWORDS and self.is_plain_statement(i, end):
            yield "drop-statement", self.replace(i, end - 1, "")

    def end_of_value(self, i):
        """The , or closing bracket behind a value."""
        at = i
        while self.text(at) != "," and self.text(at) not in CLOSING.values():
            at = self.partner[at] + 1 if self.text(at) in CLOSING else at + 1
        return at

    def is_plain_statement(self, i, end):
        """A call or an assignment, and not a declaration."""
        shape, at = "", i
        while at < end:
            text, kind = self.text(at), self.kind(at)
            if text in UNTOUCHED_CALLS:
                return False
            if kind == "name":
                shape += "N"
            elif text in ("::", ".", "->"):
                shape += "."
            elif text == "(" or text == "[":
                shape += "P" if text == "(" else "S"
                at = self.partner[at]
            elif text == "<" and not self.spaced(at):
                shape += "T"
                at = self.end_of_template(at)
            elif text in ("++", "--"):
                shape += "U"
            elif text == "*":
                shape += "*"
            elif text in ("=", "+=", "-=", "|=", "&=", "^=", "*=", "/=", "<<=", ">>="):
                shape += "="
                break
            else:
                return False
            at += 1
        return STATEMENT.match(shape) is not None and any(mark in shape for mark in "PU=")

    def arguments(self, i):
        """The arguments between the bracket at `i` and its partner, as (first, last) tokens."""
        found, first, at = [], i + 1, i + 1
        last = self.partner[i]
        while at <= last:
            text = self.text(at)
            if at == last or text == ",":
                if at > first:
                    found.append((first, at - 1))
                first = at + 1
            elif text in CLOSING:
                at = self.partner[at]
            elif text == "<" and not self.spaced(at):
                at = self.end_of_template(at)
            at += 1
        return found

    def calls(self, i):
        if self.text(i) != "(" or self.in_function(i) is None:
            return
        if not (self.kind(i - 1) == "name" or self.text(i - 1) == ">"):
            return
        if self.text(i - 1) in ("if", "for", "while", "switch", "return", "sizeof", "case"):
            return
        if self.text(i - 1) in ("min", "max", "swap"):
            return  # whose arguments may be in any order
        arguments = self.arguments(i)
        for (a, b), (c, d) in zip(arguments, arguments[1:]):
            one, other = self.slice(a, b), self.slice(c, d)
            kinds = {self.kind(a), self.kind(c)}
            if one == other or one.startswith("[") or other.startswith("["):
                continue
            if len(kinds) == 2 and "string" in kinds:
                continue  # a text for something else does not compile
            yield "swap-arguments", self.replace(a, b, other), self.replace(c, d, one)

    def branches(self, i):
        if self.text(i) == "else":
            yield "drop-else", self.replace(i, i, "")
        if self.text(i) != "?" or self.kind(i) != "mark":
            return
        colon, depth = i + 1, 0
        while True:
            text = self.text(colon)
            if text in CLOSING:
                colon = self.partner[colon]
            elif text == "?":
                depth += 1
            elif text == ":":
                if depth == 0:
                    break
                depth -= 1
            colon += 1
        end = colon + 1
        while self.text(end) not in (",", ";", ")", "]", "}"):
            end = self.partner[end] + 1 if self.text(end) in CLOSING else end + 1
        yield ("swap-branches", self.replace(i + 1, colon - 1, self.slice(colon + 1, end - 1)),
               self.replace(colon + 1, end - 1, self.slice(i + 1, colon - 1)))

    def returns(self, i):
        if self.text(i) != "return" or self.text(i + 1) in (";", "{"):
            return
        body = self.in_function(i)
        end = self.end_of_statement(i)
        if body is None or end is None:
            return
        value = self.slice(i + 1, end - 1)
        if value in ("true", "false", "nullptr", "0", "std::nullopt") or value == "*this":
            return
        function = body
        while function is not None and self.kinds.get(self.brace_around(function)) == "function":
            if "[" in (self.text(at) for at in range(self.heads[function], function)):
                break  # a lambda
            function = self.brace_around(function)
        head = [self.text(at) for at in range(self.heads[function], function)]
        while head and head[0] in ("static", "constexpr", "inline", "virtual", "public", "private",
                                   ":", "template", "const"):
            head.pop(0)
        if head and head[0] == "bool":
            yield "return-not", (self.tokens[i + 1].begin, self.tokens[i + 1].begin, "!("), (
                self.tokens[end - 1].end, self.tokens[end - 1].end, ")")
        yield "return-empty", self.replace(i + 1, end - 1, "{}")


def mutants_of(sources):
    """All mutants of {file: its source}, in order."""
    enumerations = {}
    for source in sources.values():
        for name, groups in enumerations_of(source).items():
            enumerations.setdefault(name, []).extend(groups)
    found = []
    for name in sorted(sources):
        found += File(name, sources[name], enumerations).mutants()
    return found
