"""Values of real programs cross between program and tests with their types, identities and changes."""

import importlib.util

import pytest

from marcog_trl.execution import Job
from marcog_trl.execution.jobs import plan


@pytest.mark.skipif(importlib.util.find_spec("numpy") is None, reason="numpy is not installed")
def test_numpy_arrays_cross(executor):
    code = "import numpy as np\ndef f(n): return np.arange(n) * 2.0\ndef m(a): return a.mean()\ndef t(a): return a.T.tolist()"
    tests = [
        "import numpy as np\nassert np.array_equal(f(3), np.array([0.0, 2.0, 4.0])) and f(3).dtype == np.float64",
        "assert m(np.array([1, 2, 3])) == 2 and type(m(np.array([1]))) is np.float64",
        "assert t(np.array([[1, 2], [3, 4]])) == [[1, 3], [2, 4]]",
    ]
    verdict = executor.run([Job(code=code, tests=tests, memory_mb=2048, timeout=20)])[0]
    assert verdict.status == "passed", verdict
    single = Job(code=code, tests=["assert m([1, 2]) == 1.5"], setup="", memory_mb=2048, timeout=20)
    single = Job(
        code="import numpy as np\ndef m(a): return np.mean(a)", tests=single.tests, memory_mb=2048, timeout=20
    )
    assert executor.run([single])[0].status == "passed"


PREAMBLE = """
import collections, dataclasses, datetime, enum, types, typing
from collections import Counter, OrderedDict, UserList, defaultdict, deque, namedtuple
from decimal import Decimal
from fractions import Fraction
P = namedtuple("P", "x y")
class Q(typing.NamedTuple):
    a: int
    b: str = "z"
class Color(enum.Enum):
    RED = 1
class Level(enum.IntEnum):
    LOW = 1
class Text(str): pass
class Items(list): pass
class Table(dict): pass
class Whole(int): pass
class Pair(tuple): pass
class Yes:
    def __eq__(self, other): return True
def ident(x): return x
def nest(n):
    x = []
    for _ in range(n): x = [x]
    return x
"""
# what a program returns: literals to compare it with
LITERALS = {
    "{1, 2}": ["{2, 1}", "[1, 2]"],
    "(1, [2])": ["(1, [2])", "[1, [2]]"],
    "{(1, 2): 3, None: b'x', 1.5: True}": ["{(1, 2): 3, None: b'x', 1.5: 1}", "{}"],
    "{1: 'a'}": ["{True: 'a'}", "{'1': 'a'}"],
    "b'ab'": ["b'ab'", "'ab'"],
    "bytearray(b'ab')": ["b'ab'"],
    "10 ** 5000": ["1" + "0" * 4000, "1e308"],
    "10 ** 400": ["1" + "0" * 400],
    "float('inf')": ["1e999", "-1e999"],
    "float('nan')": ["0.0", "None"],
    "-0.0": ["0.0", "0"],
    "True": ["1", "1.0"],
    "1": ["True", "1.0", "1 + 0j", "'1'"],
    "None": ["None", "0", "False"],
    "Decimal('1.5')": ["1.5", "2"],
    "Decimal('0.1')": ["0.1"],
    "Decimal('NaN')": ["0"],
    "Fraction(1, 2)": ["0.5", "1"],
    "Fraction(1, 3)": ["0.3333333333333333"],
    "datetime.date(2024, 1, 1)": ["'2024-01-01'"],
    "Counter('aab')": ["{'a': 2, 'b': 1}", "{'a': 2}", "{'a': 2, 'b': 1, 'c': 0}"],
    "deque([1, 2])": ["[1, 2]"],
    "OrderedDict([('b', 1), ('a', 2)])": ["{'a': 2, 'b': 1}"],
    "defaultdict(list, {1: [2]})": ["{1: [2]}", "{}"],
    "P(1, 2)": ["(1, 2)", "[1, 2]"],
    "[Q(3)]": ["[(3, 'z')]"],
    "Color.RED": ["1", "'RED'"],
    "[Level.LOW]": ["[1]", "[True]", "[2]"],
    "range(3)": ["[0, 1, 2]"],
    "{1: 2}.keys()": ["[1]", "{1}"],
    "{1: 2}.items()": ["[(1, 2)]", "{(1, 2)}"],
    "(n for n in [1])": ["[1]"],
    "map(str, [1])": ["['1']"],
    "[Text('a'), {Text('k'): Whole(1)}]": ["['a', {'k': 1}]", "['a', {'k': 2}]"],
    "{Text('a')}": ["{'a'}"],
    "Items([1])": ["[1]", "(1,)"],
    "Table(a=1)": ["{'a': 1}"],
    "Whole(3)": ["3", "3.0", "4"],
    "Pair((1,))": ["(1,)", "[1]"],
    "ident": ["1"],
    "int": ["1"],
    "...": ["...", "1"],
    "'\\ud800ä😀'": ["'\\ud800ä😀'", "'ä😀'"],
    "[[[]] * 2] * 2": ["[[[], []], [[], []]]"],
}


@pytest.mark.parametrize("value", LITERALS)
def test_values_compare_with_literals_as_they_do_natively(executor, value):
    """With a judge and without one."""
    code = f"{PREAMBLE}def f(): return {value}"
    tests = [f"assert f() {operator} {literal}" for literal in LITERALS[value] for operator in ("==", "!=")]
    tests += ["assert f()", "assert not f()", "assert f() is None", "assert f() is not True"]
    jobs = [Job(code=code, tests=tests), Job(code=code, tests=tests, setup="judged = True")]
    assert [plan(job).calls is None for job in jobs] == [False, True]
    native = []
    for test in tests:
        space = {"__name__": "solution"}
        exec(code, space)
        try:
            exec(test, space)
            native.append("passed")
        except AssertionError:
            native.append("failed")
    for verdict in executor.run(jobs):
        assert [result.status for result in verdict.tests] == native, dict(zip(tests, verdict.tests, strict=True))


# a test that a program fails because a value cannot be sent, and what the message must contain
UNCROSSABLE = {
    "object": ("def f(): return object()", "assert f() == 1", "object of type object"),
    "inside a container": ("class A: pass\ndef f(): return {1: A()}", "assert f() == {1: 2}", "object of type A"),
    "generator": ("def f(): yield 1", "assert f() == [1]", "object of type generator"),
    "own type": (f"{PREAMBLE}def f(): return Yes()", "assert f() == 1", "object of type Yes"),
    "buffer": ("def f(): return memoryview(b'a')", "assert f() == b'a'", "object of type memoryview"),
    "too deep": (f"{PREAMBLE}def f(): return nest(300)", "assert f() == []", "more than 200 levels"),
    "too deep for a judge": (f"{PREAMBLE}def f(): return nest(300)", "x = f()", "more than 200 levels"),
    "too large": ("def f(): return 'a' * (20 << 20)", "assert f() == 'a'", "too large"),
    "too large for a judge": ("def f(): return 'a' * (20 << 20)", "assert len(f()) > 1", "too large"),
    "lock": ("def f(x): return 1", "import threading\nassert f(threading.Lock()) == 1", "object of type lock"),
    "module": ("def f(x): return x", "import math\nassert f(math) is math", "object of type module"),
    "object as operand": (
        "class A:\n    def __add__(self, n): return n",
        "x = A() + 1",
        "an object of the program combined with a value of the tests must give an object",
    ),
    "object in order": (
        "class A:\n    def __lt__(self, other): return True",
        "assert A() < 1",
        "is not ordered relative to int of the tests",
    ),
}


@pytest.mark.parametrize("name", UNCROSSABLE)
def test_what_cannot_cross_is_said(executor, name):
    code, test, words = UNCROSSABLE[name]
    verdict = executor.run([Job(code=code, tests=[test])])[0]
    assert verdict.status == "failed" and words in verdict.message, verdict


@pytest.mark.skipif(importlib.util.find_spec("numpy") is None, reason="numpy is not installed")
def test_numpy_values_and_literals(executor):
    code = "import numpy as np\ndef n(): return np.int64(3)\ndef b(): return np.True_\ndef a(): return np.array([1])\n"
    code += "def o(): return np.array([None])\ndef l(): return np.longdouble(1)\ndef c(): return [np.clongdouble(1)]"
    tests = ["assert n() == 3", "assert b() == True", "assert [np_free for np_free in a()] == [1]"]
    verdict = executor.run([Job(code=code, tests=tests, memory_mb=2048, timeout=20)])[0]
    assert verdict.status == "passed", verdict
    jobs = [Job(code=code, tests=[f"assert {name}() == [1]"], memory_mb=2048, timeout=20) for name in "aolc"]
    array, objects, long, complex_ = executor.run(jobs)
    assert array.status == "failed" and "a numpy array, which equals no literal" in array.message
    assert objects.status == "failed" and "numpy data of type object" in objects.message
    for verdict in (long, complex_):
        assert (
            verdict.status == "failed" and "numpy data of type" in verdict.message and "nested" not in verdict.message
        )


def test_a_comparison_with_an_object_of_the_program_says_so(executor):
    code = f"{PREAMBLE}def f(): return UserList([1])"
    verdict = executor.run([Job(code=code, tests=["assert f() == [1]"], setup="judged = True")])[0]
    assert verdict.status == "failed" and "object" in verdict.message, verdict


def test_an_assertion_after_the_last_test_is_not_swallowed_either(executor):
    code = "def each(f, xs):\n    for x in xs:\n        try: f(x)\n        except BaseException: pass"
    check = "def check(candidate):\n    def visit(x): assert x == {}\n    assert candidate(print, []) is None\n    candidate(visit, [2])"
    jobs = [Job(code, check.format(x), "check", entry_point="each") for x in (1, 2)]
    assert [verdict.status for verdict in executor.run(jobs)] == ["failed", "passed"]
