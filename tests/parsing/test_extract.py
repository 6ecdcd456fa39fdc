"""Code comes out of completions complete."""

import ast
import textwrap
import time

import pytest

from marcog_trl.parsing.extract import extract_code, syntax_error
from marcog_trl.parsing.markup import blocks_of
from marcog_trl.parsing.predicates import calls, defines, ignores_result, is_thin_wrapper, returns_value
from marcog_trl.parsing.syntax import combine, parse
from marcog_trl.problems import load_problems


# As in HumanEval: imports and a helper in the prompt, a body that nests, decorates and spans lines.
PROMPT = '''import math
from typing import List


def poly(xs: List[float], x: float) -> float:
    """Value of a polynomial at x."""
    return sum(c * math.pow(x, i) for i, c in enumerate(xs))


def find_zero(xs: List[float]) -> float:
    """A zero of poly.
    >>> round(find_zero([1, 2]), 2)
    -0.5
    """
'''
BODY = """    from functools import lru_cache

    @lru_cache
    def value(x):
        return poly(xs,
                    x)

    async def unused():
        return 0

    text = "def find_zero(xs): return 1"
    begin, end = -1.0, 1.0
    while value(begin) * value(end) > 0:
        begin, end = begin * 2, end * 2
    return (begin +
            end) / 2
"""
FULL = PROMPT + BODY
FORMS = {
    "raw": FULL,
    "fenced": f"```python\n{FULL}```",
    "prose": f"Sure! Here's how, don't worry:\n\n```python\n{FULL}```\n\nIt's O(n).\n```\n>>> example\n```",
    "prose without fence": f"Here is the code:\n\n{FULL}\nThis isn't hard.",
    "listed": "1. The code:\n" + textwrap.indent(f"```py\n{FULL}```", "   "),
    "truncated after": f"{FULL}\n\ndef other(x):\n    return [x for",
    "never closed": f"Code:\n```python\n{FULL}\n\ndef other(x):\n    return [x for",
    "carriage returns": FULL.replace("\n", "\r\n"),
    "body": BODY,
    "body, first indent stripped": BODY.lstrip(),
    "byte order mark": f"\ufeff{FULL}",
    "byte order mark in a fence": f"Code:\n```python\n\ufeff{FULL}```",
    "fence ends the last line": f"```python\n{FULL.rstrip()}```",
    "fence ends the last line, then prose": f"Code:\n```python\n{FULL.rstrip()}```\nIt's O(n):\n```\nfind_zero([1, 2])\n```",
    "fence ends a body's last line": f"```python\n{BODY.rstrip()}```\nThat's it.",
    "signature afterwards": f"```python\n{FULL}```\nIt is:\n```python\ndef find_zero(xs: list) -> float: ...\n```",
    "signature afterwards, no fence": f"{FULL}\nIt's this:\n\ndef find_zero(xs: list) -> float: ...",
}


def same(code, expected):
    return ast.dump(ast.parse(code)) == ast.dump(ast.parse(expected))


@pytest.mark.parametrize("form", FORMS)
def test_extraction_is_complete_and_idempotent(form):
    text = FORMS[form]
    code = extract_code(text, "find_zero", PROMPT)
    assert same(code, FULL)
    assert extract_code(code, "find_zero", PROMPT) == code
    assert extract_code(code, "find_zero") == code
    assert syntax_error(text, "find_zero", PROMPT) is None


WORK = "def f(x):\n    return 2 * x"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>\nMaybe\n```python\n{code}\n```\nno.\n</think>\nI do not know.", ""),
        ("<think>\nLet me try:\n{code}\nHmm, wait", ""),
        ("Let me try:\n{code}\nNo.\n</think>\n\nI do not know.", ""),
        ("<think>\n```\ndef f(x):\n    return 0\n```\n</think>\n```python\n{code}\n```", WORK),
        ("```\ndef f(x):\n    return 0\n```\n</think>\n\n{code}", WORK),
        ("<think></think>\n{code}", WORK),
        ("  <think>It is simple.</think>{code}", WORK),
    ],
)
def test_thoughts_are_not_the_answer(text, expected):
    text = text.format(code=WORK)
    assert extract_code(text, "f", "def f(x):\n") == expected
    assert syntax_error(text, "f", "def f(x):\n") is None


def test_code_about_thoughts_is_code():
    code = 'def f(x):\n    """Remove <think>...</think>."""\n    return x.partition("</think>")[2]'
    assert extract_code(code, "f") == code
    assert extract_code(f"```python\n{code}\n```", "f") == code


ANSWER = "def f(x):\n    return twice(x) + floor(ONE)"
TWICE = "@lru_cache\ndef twice(x):\n    return 2 * x"


def test_helpers_in_earlier_fences_belong_to_the_answer():
    text = (
        "Imports:\n```python\nfrom math import floor\nimport os\nfrom functools import lru_cache\n```\nThe helper:\n"
        f"```python\n{TWICE}\n\ndef unused(x):\n    return x\n\nprint(twice(2))\nx = 3\nONE = 1.5\n```\n"
        f"Then:\n```python\n{ANSWER}\n```\nFor example:\n```python\nONE = f(2)\n```"
    )
    code = extract_code(text, "f", "Write f.")
    assert same(code, f"from math import floor\nfrom functools import lru_cache\n{TWICE}\nONE = 1.5\n{ANSWER}")
    assert extract_code(code, "f", "Write f.") == code
    unclosed = text.removesuffix("\n```\nFor example:\n```python\nONE = f(2)\n```")
    assert extract_code(unclosed, "f") == code


def test_the_last_of_earlier_definitions_counts():
    text = "```\ndef g():\n    return 1\n```\n```\ndef g():\n    return 2\n```\n```\ndef f(x):\n    return g()\n```"
    assert same(extract_code(text, "f"), "def g():\n    return 2\n\ndef f(x):\n    return g()")
    star = "```\nfrom math import *\n```\n```\ndef f(x):\n    return floor(x)\n```"
    assert same(extract_code(star, "f"), "from math import *\n\ndef f(x):\n    return floor(x)")
    assert extract_code(star.replace("floor(x)", "abs(x)"), "f") == "def f(x):\n    return abs(x)"


def test_fence_inside_a_string_is_not_a_fence():
    body = BODY.replace('"def find_zero(xs): return 1"', '"""\n```python\nreturn 1\n```\n"""')
    assert "```" in body
    for text in (PROMPT + body, body):
        assert same(extract_code(text, "find_zero", PROMPT), PROMPT + body)


def test_fence_at_the_end_of_a_line_ends_only_what_parses():
    for line in ('s = """```', "# such as ```", 's = "```', "x = 1  # as ```x```"):
        text = f"```python\ndef f(x):\n    {line}\n    return x\n```"
        assert [block.text for block in blocks_of(text)] == [text.removeprefix("```python\n").removesuffix("\n```")]


def test_a_stub_is_taken_where_there_is_nothing_else():
    stub = "def f(x):\n    ..."
    assert extract_code(f"Like this:\n```\n{stub}\n```", "f") == stub
    broken = "```python\ndef f(x):\n    return (x\n```"
    assert syntax_error(f"{broken}\nIn short:\n```\n{stub}\n```", "f") is None  # the stub is what was found
    cut = "```python\ndef f(x):\n    x += 1\n    return (x\n```"
    assert syntax_error(f"{cut}\nIn short:\n```\n{stub}\n```", "f").startswith("line 3")


def test_an_empty_entry_point_is_none():
    slow = "n = int(input())\nr = 0\nfor i in range(n):\n    r += 2\nprint(r)"
    fast = "print(2 * int(input()))"
    text = f"First:\n```python\n{slow}\n```\nBetter:\n```python\n{fast}\n```\nThat's it."
    assert extract_code(text, "", "Double n.") == extract_code(text, None, "Double n.") == fast
    broken = f"First:\n```python\n{slow}\n```\nBetter:\n```python\nn = int(input())\nprint(2 * n\n```"
    assert syntax_error(broken, "", "Double n.") == syntax_error(broken) == "line 2, column 6: '(' was never closed"


def test_prompt_supplies_what_the_code_lacks():
    function = ast.unparse(ast.parse(FULL).body[-1])
    code = extract_code(function, "find_zero", PROMPT)
    assert same(code, FULL)
    assert extract_code(function, "find_zero") == function
    # What the code brings along stays as it is
    own = f"import math\n\ndef poly(xs, x):\n    return 0\n\n{function}"
    assert extract_code(own, "find_zero", PROMPT) == f"from typing import List\n\n\n{own}"


@pytest.mark.parametrize("form", ["raw", "fenced", "prose", "body"])
def test_all_humaneval_references_come_out_complete(form):
    rows = load_problems("humaneval", split="test")
    assert len(rows) == 164
    for row in rows:
        full = row["prompt"] + row["canonical_solution"]
        text = {
            "raw": full,
            "fenced": f"```python\n{full}\n```",
            "prose": f"Here's the solution:\n\n```python\n{full}\n```\nIt doesn't fail.\n\n```\nf(1)\n```",
            "body": row["canonical_solution"],
        }[form]
        assert same(extract_code(text, row["entry_point"], row["prompt"]), full), row["task_id"]
        assert syntax_error(text, row["entry_point"], row["prompt"]) is None


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("", "f", ""),
        ("I cannot do that.", "f", ""),
        ("Sure\n\ndef f(x):\n    return x\n\nDone", "f", "def f(x):\n    return x"),
        ("Note: this\ndef f(x):\n    return x", "f", "def f(x):\n    return x"),
        ("f = lambda x: x", "f", "f = lambda x: x"),
        ("'''\ndef f(x):\n    return x\n'''", "f", "def f(x):\n    return x"),
        ("\tdef f(x):\n\t\treturn x", "f", "def f(x):\n\treturn x"),
        (" def f(x):\n     return x", "f", "def f(x):\n    return x"),
        # the last complete block that defines what is asked for
        ("```\ndef f(x): return 1\n```\n```\ndef f(x): return 2\n```\n```\nf(3)\n```", "f", "def f(x): return 2"),
        ("```\ndef f(x): return 1\n```\n```\ndef f(x): return", "f", "def f(x): return 1"),
        # nothing that is asked for: the longest piece
        ("def g(x):\n    return x", "f", "def g(x):\n    return x"),
        ("def f(x):\n    y = x\n    return (y", "f", "def f(x):\n    y = x"),
        ("x = 1; 'a'\x00", "f", ""),
        ("def f(x):\n    return x", None, "def f(x):\n    return x"),
    ],
)
def test_extraction_cases(text, name, expected):
    assert extract_code(text, name) == expected


SCRIPTS = [  # for standard input: nothing is defined, and every line counts
    "*a, = map(int, input().split())\nprint(sum(a))",
    "(n, m) = map(int, input().split())\nprint(n + m)",
    "[n, m] = map(int, input().split())\nprint(n + m)",
    '"""Adds up."""\nn, m = map(int, input().split())\nprint(n + m)',
    "n, m = map(int, input().split())\nprint(n + m) if n < m else print(m + n)",
    "t = int(input())\n[print(sum(map(int, input().split()))) for _ in range(t)]",
    "n = int(input())\nn > 3 and print(n)",
    "(n := int(input()))\nprint(n)",
]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    "form", ["{}", "```python\n{}\n```", "Here:\n```\n{}\n```\nDone.", "Here it is:\n\n{}", "```\n{}\nfor i in ra("]
)
def test_scripts_come_out_complete(script, form):
    text = form.format(script)
    assert extract_code(text, None, "Read numbers.") == script
    assert extract_code(script, None, "Read numbers.") == script


def test_prose_and_printed_values_are_no_script():
    prose = "Sure\n(see below)\n- sorted(x)\n* one, two\n[this]\n'Quoted.'\n{n}"
    output = "```\n3\n```\n```\n[1, 2]\n```\n```\n'yes'\n```\n```\n# Output: 3\n```"
    assert extract_code(prose) == extract_code(output) == extract_code(f"{prose}\n{output}") == ""
    assert extract_code(f"{prose}\n```\nprint(3)\n```\n{output}") == "print(3)"


def test_another_function_is_no_body():
    stub = 'def f(x):\n    """Doc."""\n'
    for text in ("def g(x):\n    return x", "def g(x):\n    return x\n\ndef h(", "Sorry."):
        assert not returns_value(extract_code(text, "f", stub), "f")
        assert not defines(extract_code(text, "f", stub), "f")


HOSTILE = {
    "statements": "a;" * 32_000,
    "names": "a\n" * 32_000,
    "definitions": "def f():pass\n" * 5000,
    "broken definitions": "def f(:\n" * 8000,
    "lambdas": "lambda:0\n" * 7000,
    "decorators": "@a\n" * 21_000 + "def f():pass",
    "brackets": "(" * 65_000,
    "open lists": "x = [\n" * 10_000,
    "late error": "(f(),\n" * 150 + "a,\n" * 20_000 + ")" * 150 + "= 1",
    "sum": "1+" * 32_000,
    "conditions": "if x:\n" * 10_000,
    "finally": "".join(f"{' ' * i}try:a\n{' ' * i}finally:\n" for i in range(18)) + " " * 18 + "a\n",
    "fences": "```\n" * 16_000,
    "broken blocks": "```\ndef f(x: return\n```\n" * 2600,
    "quoted fences": "```\n" + "x = '```\n" * 7000,
    "strings": "'\n" * 32_000,
    "triple quotes": "'''\na\n" * 12_000,
    "backslashes": "\\\n" * 32_000,
    "bad end": "a\n" * 32_000 + "(",
    "prose": "the quick brown fox\n" * 3200,
    "one line": "word " * 13_000,
    "helpers": "".join(f"```\ndef g{i}(): return g{i + 1}\n```\n" for i in range(1700))
    + "```\ndef f(): return g0\n```",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_costs_bounded_time(name):
    """Each of them is 64 KiB; several took minutes, others hours."""
    start = time.process_time()
    for entry_point, prompt in (("f", "def f(x):\n"), ("g", "def g(x):\n"), (None, None)):
        extract_code(HOSTILE[name], entry_point, prompt)
        syntax_error(HOSTILE[name], entry_point, prompt)
    assert time.process_time() - start < 6 * 0.5  # a call takes 0.2 s or less where nothing else runs


def test_code_after_hostile_text_is_found():
    good = "def f(x):\n    return x"
    for text in HOSTILE.values():
        if "```" not in text and "'''" not in text:
            assert extract_code(f"{text}\n```python\n{good}\n```", "f") == good


DEGENERATE = {
    "elif": "if x == 0:\n    y = 0\n" + "".join(f"elif x == {i}:\n    y = {i}\n" for i in range(1, 900)) + "return 1",
    "sum": "return " + " + ".join(["x"] * 900),
    "long sum": "return " + " + ".join(["x"] * 5000),
    "attributes": "return x" + ".x" * 900,
    "many attributes": "return x" + ".x" * 5000,
    "brackets": "return " + "[" * 150 + "x" + "]" * 150,
    "many brackets": "return " + "(" * 5000 + "x" + ")" * 5000,
    "not": "return " + "not " * 900 + "x",
    "calls": "return x" + "()" * 900,
    "blocks": "".join(f"{'    ' * i}if x:\n" for i in range(95)) + "    " * 95 + "return x",
    "lambdas": "return " + "lambda: " * 900 + "x",
    "classes": "".join(f"{'    ' * i}class A:\n" for i in range(95)) + "    " * 95 + "x = 1",
}


@pytest.mark.parametrize("name", DEGENERATE)
def test_no_text_is_too_deep(name):
    """Depths that Python still reads, and depths that it refuses; texts are a body, a function and a script."""
    body, stub = textwrap.indent(DEGENERATE[name], "    "), 'def f(x):\n    """Doc."""\n'
    script = DEGENERATE[name].replace("return ", "y = ")
    for text in (body, stub + body, f"```\n{stub}{body}\n```", script, f"x = 1\n{script}\ndef f(x):\n    return x"):
        for entry_point in ("f", None):
            for prompt in (stub, f"import math\n\n{stub}", None):
                code = extract_code(text, entry_point, prompt)
                assert parse(code) is not None
                syntax_error(text, entry_point, prompt)
        for judge in (returns_value, defines, calls, is_thin_wrapper, ignores_result):
            judge(code, "f")
        combine(code, f"from __future__ import annotations\n{code}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(x):\n    return x", None),
        ("I cannot do that.", None),
        ("def f(x):\n    return (x\n", "line 2, column 12: '(' was never closed"),
        ("Here:\n```python\ndef f(x):\nreturn x\n```", "line 2"),
        ("Here is it.\n\ndef f(x):\n    y = 1\n    return y +\n", "line 5"),
        ("```python\nx ===== 2\n```", "line 1"),
        ("def f(x):\n    return x\n\nIt isn't hard.", None),
    ],
)
def test_syntax_error_names_the_place(text, expected):
    error = syntax_error(text, "f")
    assert error is None if expected is None else error.startswith(expected), error


def test_a_class_skeleton_is_not_continued_by_prose():
    skeleton = "class Counter:\n    def add(self, x):\n        '''Add x.'''\n\n    def total(self):\n        '''All of them.'''\n"
    assert extract_code("I cannot.", "Counter", skeleton) == ""
    body = "        return self.sum\n"
    assert extract_code(body, "Counter", skeleton).endswith("return self.sum")
