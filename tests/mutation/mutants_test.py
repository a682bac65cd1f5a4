#!/usr/bin/python3
"""What mutants.py makes of small sources."""

import pathlib
import sys
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.dont_write_bytecode = True

import mutants  # noqa: E402


def changed(source, operator):
    """The lines that mutants of one operator have in place of others, without the space around them."""
    found = []
    for mutant in mutants.mutants_of({"module/core/a.cc": source}):
        if mutant.operator == operator:
            new = mutant.apply(source).splitlines()
            old = source.splitlines()
            found += [line.strip() for line, before in zip(new, old) if line != before]
    return found


def body(*lines):
    return "namespace a {\n\nint F(int a, int b) {\n  " + "\n  ".join(lines) + "\n}\n\n}  // namespace a\n"


class Operators(unittest.TestCase):
    def check(self, operator, line, *expected):
        self.assertEqual(changed(body(line), operator), list(expected))

    def test_each_changes_what_it_says(self):
        self.check("boundary", "while (a < b) G();", "while (a <= b) G();")
        self.check("equality", "c = a == b;", "c = a != b;")
        self.check("logic", "c = a && b;", "c = a || b;")
        self.check("negate", "if (a) G();", "if (!(a)) G();")
        self.check("negate", "if (int c = a; c > b) G();", "if (int c = a; !(c > b)) G();")
        self.check("drop-not", "if (!a) G();", "if (a) G();")
        self.check("arithmetic", "c = a + b;", "c = a - b;")
        self.check("increment", "++a;", "--a;")
        self.check("min-max", "c = std::min(a, b);", "c = std::max(a, b);")
        self.check("off-by-one", "c = 1'000U;", "c = 1001U;")
        self.check("off-by-one", "c = 0x0f;", "c = 0x10;")
        self.check("zero", "c = 7;", "c = 0;")
        self.check("zero", "c = 1;")
        self.check("bool", "c = true;", "c = false;")
        self.check("drop-statement", "if (a) G(b);", "if (a) ;")
        self.check("drop-statement", "a->b[1].c = d;", ";")
        self.check("drop-field", "return H{.a = a, .b = b};", "return H{ .b = b};", "return H{.a = a};")
        self.check("drop-else", "if (a) G(); else H();", "if (a) G();  H();")
        self.check("swap-arguments", "G(a, b + 1);", "G(b + 1, a);")
        self.check("swap-branches", "c = a ? G(1) : 2;", "c = a ? 2 : G(1);")
        self.check("return-empty", "return a + b;", "return {};")

    def test_constant_of_enumeration_becomes_the_next(self):
        source = "enum class E : int { kA, kB = 3, kC };\n" + body("return E::kA;", "c = E::kC;")
        self.assertEqual(changed(source, "enumerator"), ["return E::kB;", "c = E::kA;"])

    def test_only_functions_that_return_bool_return_the_opposite(self):
        source = "bool F() { return a; }\nint G() { return a; }\n"
        self.assertEqual(changed(source, "return-not"), ["bool F() { return !(a); }"])

    def test_result_of_a_lambda_is_not_that_of_its_function(self):
        self.assertEqual(changed("bool F() {\n  auto f = [] { return a; };\n}\n", "return-not"), [])


class LeavesAlone(unittest.TestCase):
    def check(self, *lines):
        self.assertEqual(mutants.mutants_of({"module/core/a.cc": body(*lines)}), [])

    def test_comments_texts_and_preprocessor_lines(self):
        self.check("// a == 1 && b", "/* a < 2 */")
        self.check('const char* text = "a == 1 && true";', "const char c = '<';")
        self.assertEqual(mutants.mutants_of({"module/core/a.h": "#if A == 1 && \\\n    B == 2\n#endif\n"}), [])

    def test_checks_and_logs(self):
        self.check("static_assert(a == 1);", "TURNSTILE_DCHECK(a < b);")
        self.check("TURNSTILE_CHECK(a && b == 1);")
        self.check('RedisModule_Log(ctx, "notice", a + 1);')

    def test_arguments_whose_order_does_not_matter(self):
        self.assertEqual(changed(body("std::swap(a, b);"), "swap-arguments"), [])

    def test_templates_and_declarations(self):
        self.check("std::vector<std::pair<A, B>> c;", "const A& d = c;", "A* e = d;", "A&& f;")


class Identity(unittest.TestCase):
    def test_mutants_of_a_line_are_numbered(self):
        found = mutants.mutants_of({"module/core/a.cc": body("c = a && b && d;")})
        self.assertEqual([mutant.id for mutant in found if mutant.operator == "logic"],
                         ["module/core/a.cc:4:logic", "module/core/a.cc:4:logic#2"])

    def test_lines_of_the_same_text_have_keys_of_their_own(self):
        found = mutants.mutants_of({"module/core/a.cc": body("c = a && b;", "c = a && b;")})
        self.assertEqual(len({mutant.key for mutant in found}), len(found))

    def test_key_is_the_same_when_lines_move(self):
        source = body("c = a && b;")
        keys = [[mutant.key for mutant in mutants.mutants_of({"module/core/a.cc": text})]
                for text in (source, "\n\n" + source)]
        self.assertEqual(*keys)


if __name__ == "__main__":
    unittest.main()
