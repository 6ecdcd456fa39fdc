"""Values of real programs cross between program and tests with their types, identities and changes."""

import importlib.util

import pytest

from marcog_trl.execution import CodeExecutor, Job
from marcog_trl.execution.jobs import plan


@pytest.fixture(scope="module")
def executor():
    with CodeExecutor(num_workers=2, timeout=10.0, isolation="best_effort") as executor:
        yield executor


# name: (program, tests that a right program passes)
PROGRAMS = {
    "containers": (
        "def f(x): return x\ndef kinds(): return [{1, 2}, (1, (2,)), frozenset([3]), {(1, 2): 't', 3: 4.5, None: b'x'}]",
        [
            "assert kinds() == [{1, 2}, (1, (2,)), frozenset([3]), {(1, 2): 't', 3: 4.5, None: b'x'}]",
            "assert [type(k) for k in kinds()] == [set, tuple, frozenset, dict]",
            "assert f({(1, 2): {3: [4]}}) == {(1, 2): {3: [4]}}",
            "assert list(f({2: 0, 1: 0})) == [2, 1]",
            "assert f(bytearray(b'ab')) == bytearray(b'ab') and f(b'\\xff') == b'\\xff'",
        ],
    ),
    "numbers": (
        "def f(x): return x\ndef g(k): return 10 ** k",
        [
            "assert g(5000) == 10 ** 5000 and f(-(2 ** 70)) == -(2 ** 70)",
            "assert f(float('inf')) == float('inf') and f(float('nan')) != f(float('nan'))",
            "assert str(f(-0.0)) == '-0.0' and f(0.1) + 0.2 == 0.1 + 0.2 and f(1j) == 1j",
            "assert f(True) is True and f(1) is not True and type(f(1.0)) is float",
            "import math\nassert math.isclose(f(0.3), 0.1 + 0.2)",
        ],
    ),
    "text": (
        "def f(s): return s",
        ["for s in ('', 'ä€😀', '\\ud800x', '\\x00\\n', '\\ud83d\\ude00'): assert f(s) == s and len(f(s)) == len(s)"],
    ),
    "decimal and fraction": (
        "from decimal import Decimal\nfrom fractions import Fraction\n"
        "def d(s): return Decimal(s) / 3\ndef q(a, b): return Fraction(a, b)\ndef half(x): return x / 2",
        [
            "from decimal import Decimal\nassert d('1') == Decimal(1) / 3 and type(d('1')) is Decimal",
            "from fractions import Fraction\nassert q(1, 3) + 1 == Fraction(4, 3) and half(Fraction(1, 2)) == Fraction(1, 4)",
            "assert half(Decimal('0.10')).as_tuple() == Decimal('0.05').as_tuple()",
        ],
    ),
    "dates": (
        "import datetime as dt\ndef day(): return dt.date(2024, 2, 29)\n"
        "def moment(): return dt.datetime(2024, 1, 2, 3, 4, 5, 6, dt.timezone(dt.timedelta(hours=2)))\n"
        "def later(t): return t + dt.timedelta(days=1)\ndef parts(): return dt.time(1, 2), dt.timedelta(1, 2, 3)",
        [
            "import datetime\nassert day() == datetime.date(2024, 2, 29)",
            "assert moment().utcoffset() == datetime.timedelta(hours=2) and moment().microsecond == 6",
            "assert later(datetime.datetime(2024, 1, 1)) == datetime.datetime(2024, 1, 2)",
            "assert parts() == (datetime.time(1, 2), datetime.timedelta(1, 2, 3))",
        ],
    ),
    "collections": (
        "from collections import *\ndef count(s): return Counter(s)\ndef queue(n): return deque(range(n), maxlen=3)\n"
        "def ordered(): return OrderedDict([('b', 1), ('a', 2)])\n"
        "def groups(xs):\n    d = defaultdict(list)\n    for x in xs: d[len(x)].append(x)\n    return d",
        [
            "from collections import *\nassert count('aab') == Counter('aab') and count('aab').most_common(1) == [('a', 2)]",
            "assert queue(5) == deque([2, 3, 4]) and queue(5).maxlen == 3",
            "assert list(ordered()) == ['b', 'a'] and ordered() != OrderedDict([('a', 2), ('b', 1)])",
            "assert groups(['a', 'bb', 'c']) == {1: ['a', 'c'], 2: ['bb']} and groups([])[5] == []",
        ],
    ),
    "namedtuples and ranges": (
        "from collections import namedtuple\nfrom typing import NamedTuple\nP = namedtuple('P', 'x y')\n"
        "class Q(NamedTuple):\n    a: int\n    b: str = 'z'\ndef p(): return P(1, 2)\ndef q(): return Q(3)\n"
        "def r(n): return range(0, n, 2)\ndef views(): d = {1: 2}; return d.keys(), d.values(), d.items()",
        [
            "assert p() == (1, 2) and p().x == 1 and p()._fields == ('x', 'y')",
            "assert q().b == 'z' and q() == (3, 'z') and P(5, 6).y == 6",
            "assert r(6) == range(0, 6, 2) and list(r(6)) == [0, 2, 4]",
            "assert list(views()[0]) == [1] and list(views()[1]) == [2] and list(views()[2]) == [(1, 2)]",
        ],
    ),
    "enums": (
        "import enum\nclass Color(enum.Enum):\n    RED = 1\n    BLUE = 2\nclass Level(enum.IntEnum):\n    LOW = 1\n"
        "def color(n): return Color(n)\ndef level(): return Level.LOW",
        [
            "assert color(1) is Color.RED and color(1) == Color.RED and color(2) != Color.RED",
            "assert color(2).name == 'BLUE' and color(2).value == 2",
            "assert level() == 1 and level() + 1 == 2 and level().name == 'LOW' and level() < 2",
            "assert {Color.RED: 'r'}[color(1)] == 'r'",
        ],
    ),
    "generators and iterators": (
        "def squares(n):\n    for i in range(n): yield i * i\n"
        "def forever():\n    n = 0\n    while True:\n        got = yield n\n        n = n + 1 if got is None else got\n"
        "def pairs(xs): return zip(xs, xs[1:])\ndef total(it): return sum(it)\n"
        "def broken():\n    yield 1\n    raise KeyError('gone')",
        [
            "import types\nassert list(squares(5)) == [0, 1, 4, 9, 16] and isinstance(squares(1), types.GeneratorType)",
            "g = forever()\nassert [next(g) for _ in range(3)] == [0, 1, 2] and g.send(10) == 10 and next(g) == 11",
            "import itertools\nassert list(itertools.islice(forever(), 600)) == list(range(600))",
            "assert dict(pairs([1, 2, 3])) == {1: 2, 2: 3} and next(pairs([1, 2])) == (1, 2)",
            "assert total(x for x in [1, 2, 3]) == 6 and total(iter([4])) == 4 and total(squares(3)) == 5",
            "out = []\ntry:\n    for x in broken(): out.append(x)\nexcept KeyError as e: out.append(str(e))\nassert out == [1, \"'gone'\"]",
        ],
    ),
    "callables as arguments": (
        "def twice(f, x): return f(f(x))\ndef apply(f, xs): return list(map(f, xs))\ndef adder(n): return lambda m: n + m\n"
        "def compose(*fs):\n    def run(x):\n        for f in fs: x = f(x)\n        return x\n    return run\n"
        "def safe(f):\n    try: return f()\n    except ZeroDivisionError as e: return 'caught ' + str(e)\n"
        "def walk(f, d): return 0 if d == 0 else f(d) + walk(f, d - 1)",
        [
            "assert twice(lambda x: x + 1, 3) == 5",
            "assert apply(len, ['a', 'bb']) == [1, 2] and apply(str, [1]) == ['1'] and apply(int, ['7']) == [7]",
            "assert adder(3)(4) == 7 and compose(adder(1), lambda x: x * 2)(3) == 8",
            "seen = []\napply(seen.append, [1, 2])\nassert seen == [1, 2]",
            "assert safe(lambda: 1 / 0) == 'caught division by zero'",
            "assert walk(lambda d: walk(lambda e: e, d), 3) == 10",
        ],
    ),
    "changes in place": (
        "def tidy(xs): xs.sort(); xs.append([9])\ndef bump(d):\n    for k in d: d[k] += 1\n    d['new'] = []\n"
        "def same(xs): return xs\ndef grow(s, q, b): s.add(3); q.appendleft(0); b.extend(b'x')\n"
        "def deep(m): m[0][1] = 5; return m[0]\nkept = []\ndef keep(xs): kept.append(xs)\ndef later(): kept[0].append('later')",
        [
            "xs = [3, 1, 2]\ntidy(xs)\nassert xs == [1, 2, 3, [9]]",
            "d = {'a': 1}\nbump(d)\nassert d == {'a': 2, 'new': []}",
            "ys = [1]\nassert same(ys) is ys",
            "from collections import deque\ns, q, b = {1}, deque([1]), bytearray()\ngrow(s, q, b)\n"
            "assert (s, q, b) == ({1, 3}, deque([0, 1]), bytearray(b'x'))",
            "m = [[0, 0], [0, 0]]\nrow = m[0]\nassert deep(m) is row and row == [0, 5] and m == [[0, 5], [0, 0]]",
            "zs = []\nkeep(zs)\nlater()\nassert zs == ['later']",
            "ws = [[]]\nws.append(ws[0])\nassert same(ws)[0] is same(ws)[1]",
        ],
    ),
    "exceptions": (
        "import json\nclass Empty(ValueError):\n    def __init__(self, n): super().__init__(f'no {n}'); self.n = n\n"
        "def parse(s):\n    if not s: raise ValueError('empty', 3)\n    return json.loads(s)\ndef pop(n): raise Empty(n)\n"
        "def stop(): raise SystemExit(2)",
        [
            "try:\n    parse('')\n    assert False\nexcept ValueError as e:\n    assert e.args == ('empty', 3)",
            "import json\ntry:\n    parse('{')\n    assert False\nexcept json.JSONDecodeError: pass",
            "try:\n    pop(4)\n    assert False\nexcept Empty as e:\n    assert str(e) == 'no 4' and e.n == 4 and isinstance(e, ValueError)",
            "import unittest\nt = unittest.TestCase()\nwith t.assertRaises(Empty): pop(1)",
            "with t.assertRaisesRegex(ValueError, 'no 1'): pop(1)",
            "try: stop()\nexcept SystemExit as e: assert e.code == 2",
        ],
    ),
    "objects": (
        "class Stack:\n    limit = 3\n    def __init__(self, *xs): self.items = list(xs)\n"
        "    def push(self, x): self.items.append(x); return self\n    def __len__(self): return len(self.items)\n"
        "    def __getitem__(self, k): return self.items[k]\n    def __str__(self): return f'Stack{self.items}'\n"
        "    def __add__(self, o): return Stack(*self.items, *o.items)\n    def __enter__(self): return self\n"
        "    def __exit__(self, *a): self.items.clear()\n    @property\n    def top(self): return self.items[-1]\n"
        "    @staticmethod\n    def make(): return Stack(7)\nclass Small(Stack): pass\ndef is_stack(s): return isinstance(s, Stack)\n"
        "class Tag(str):\n    def shout(self): return self.upper()\n",
        [
            "s = Stack(1)\nassert s.push(2) is s and len(s) == 2 and s[0] == 1 and s.top == 2 and str(s) == 'Stack[1, 2]'",
            "assert list(s) == [1, 2] and 2 in s and (s + Stack(5)).items == [1, 2, 5]",
            "s.items = [4]\nassert s.top == 4 and s.items == [4] and is_stack(s)",
            "s.items.append(8)\nassert s.top == 8",
            "assert isinstance(s, Stack) and not isinstance(s, Small) and issubclass(Small, Stack) and Stack.limit == 3",
            "with Stack(1) as w: assert len(w) == 1\nassert len(w) == 0 and Stack.make().top == 7",
            "assert Tag('a') == 'a' and Tag('a').shout() == 'A' and hasattr(s, 'push') and not hasattr(s, 'pull')",
        ],
    ),
    "coroutines": (
        "import asyncio\nasync def slow(x):\n    await asyncio.sleep(0)\n    return x * 2",
        ["import asyncio\nassert asyncio.run(slow(4)) == 8"],
    ),
    "modules that only the program imports": (
        "import math\ndef area(r): return math.pi * r * r",
        ["assert math.isclose(area(1), 3.141592653589793)"],
    ),
    "rare types": (
        "import uuid, types, zoneinfo, datetime\ndef u(): return uuid.UUID(int=5)\ndef n(): return types.SimpleNamespace(a=1)\n"
        "def e(): return ...\ndef k(): return [int, dict]\ndef s(): return slice(1, 2)",
        [
            "import uuid\nassert u() == uuid.UUID(int=5)",
            "assert n().a == 1 and e() is ... and k() == [int, dict] and s() == slice(1, 2)",
        ],
    ),
}
WRONG = {
    "not a tuple": ("def f(): return [1, 2]", ["assert f() == (1, 2)"]),
    "nan": ("def f(): return float('nan')", ["assert f() == f()"]),
    "changed too much": ("def f(xs): xs.clear()", ["xs = [1]\nf(xs)\nassert xs == [1]"]),
    "wrong exception": ("def f(): raise KeyError", ["try: f()\nexcept ValueError: pass"]),
    "no exception": ("def f(): pass", ["try:\n    f()\n    assert False\nexcept ValueError: pass"]),
    "generator of other values": ("def f(): yield 2", ["assert list(f()) == [1]"]),
    "object for number": ("class f: pass", ["assert f() == 1"]),
    "callback result ignored": ("def f(g): g(); return 2", ["assert f(lambda: 1) == 1"]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_cross(executor, name):
    code, tests = PROGRAMS[name]
    verdict = executor.run([Job(code=code, tests=tests)])[0]
    assert verdict.status == "passed", [(t, r.message) for t, r in zip(tests, verdict.tests, strict=True) if r.message]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_values_do_not_pass(executor, name):
    code, tests = WRONG[name]
    assert executor.run([Job(code=code, tests=tests)])[0].status == "failed"


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
    "too large": ("def f(): return 'a' * (20 << 20)", "assert f() == 'a'", "larger than 2097152"),
    "too large for a judge": ("def f(): return 'a' * (20 << 20)", "assert len(f()) > 1", "larger than 16777216"),
    "lock": ("def f(x): return 1", "import threading\nassert f(threading.Lock()) == 1", "object of type lock"),
    "module": ("def f(x): return x", "import math\nassert f(math) is math", "object of type module"),
    "object as operand": (
        "class A:\n    def __add__(self, n): return n",
        "x = A() + 1",
        "A of the program cannot be combined with int of the tests",
    ),
    "object in order": (
        "class A:\n    def __lt__(self, other): return True",
        "assert A() < 1",
        "objects of the program (A) are not compared by <",
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
    code += "def o(): return np.array([None])"
    tests = ["assert n() == 3", "assert b() == True", "assert [np_free for np_free in a()] == [1]"]
    verdict = executor.run([Job(code=code, tests=tests, memory_mb=2048, timeout=20)])[0]
    assert verdict.status == "passed", verdict
    jobs = [Job(code=code, tests=[f"assert {name}() == [1]"], memory_mb=2048, timeout=20) for name in "ao"]
    array, objects = executor.run(jobs)
    assert array.status == "failed" and "a numpy array, which equals no literal" in array.message
    assert objects.status == "failed" and "numpy data of type object" in objects.message


OWN_ERRORS = (
    "import os\nclass Base(Exception): pass\nclass Derived(Base): pass\ndef die(): os._exit(3)\n"
    "def base(): raise Base('b')\ndef derived(): raise Derived('d')\nitems = [1]\ndef add(): items.append(2)"
)
# description: (program, tests, which of them pass)
VERDICTS = {
    "a defaultdict whose default cannot cross is compared as a dict": (
        "from collections import defaultdict\ndef f(): return defaultdict(lambda: 0, a=1)",
        ["assert f() == {'a': 1}"],
        [True],
    ),
    "exception classes of the program derive from one another": (
        OWN_ERRORS,
        [
            "assert Derived.__name__ == 'Derived'",
            "try: derived()\nexcept Base: pass",
            "assert issubclass(Derived, Base)",
        ],
        [True, True, True],
    ),
    "an exception with two base classes is an instance of both": (
        "class Lost(ValueError, LookupError): pass\ndef lose(): raise Lost",
        ["try: lose()\nexcept ValueError: pass", "try: lose()\nexcept LookupError: pass"],
        [True, True],
    ),
    "exception classes outlive a process that died": (
        OWN_ERRORS,
        ["die()", "try: base()\nexcept Base: pass"],
        [False, True],
    ),
    "containers are the new process's when one has died": (
        OWN_ERRORS,
        ["die()", "add()\nassert items == [1, 2]"],
        [False, True],
    ),
    "__exit__ is told what was raised": (
        "class Quiet:\n    def __enter__(self): return self\n    def __exit__(self, kind, *rest): return kind is ValueError",
        ["with Quiet(): raise ValueError('x')"],
        [True],
    ),
    "an exception goes through a context manager unchanged": (
        "import contextlib\n@contextlib.contextmanager\ndef plain(): yield",
        ["try:\n    with plain(): raise KeyError('x')\nexcept KeyError: pass"],
        [True],
    ),
    "docstrings are the program's": (
        "def f():\n    'Adds.'",
        ["assert f.__doc__ == 'Adds.'"],
        [True],
    ),
    "exception classes of Python come back as themselves": (
        "def kind(): return ValueError",
        ["assert kind() is ValueError"],
        [True],
    ),
    "exceptions that are returned are exceptions": (
        "def error(): return ValueError('x')",
        ["assert isinstance(error(), ValueError)"],
        [True],
    ),
    "limit: builtin functions come back as the program's": (
        "def builtin(): return len",
        ["assert builtin() is len"],
        [False],
    ),
    "no context manager of the program swallows the assertion of a test": (
        "class Calm:\n    value = 2\n    def __enter__(self): return self\n    def __exit__(self, *info): return True",
        ["with Calm() as calm: assert calm.value == 1"],
        [False],
    ),
    "no program swallows the assertion of a function that a test passes to it": (
        "def each(f, xs):\n    for x in xs:\n        try: f(x)\n        except BaseException: pass",
        ["def visit(x): assert x == 1\neach(visit, [2])"],
        [False],
    ),
}


@pytest.mark.parametrize("what", VERDICTS)
def test_verdicts_are_those_of_the_tests_beside_the_program(executor, what):
    """Verdicts are the same as in one process, except for the limits."""
    code, tests, right = VERDICTS[what]
    verdict = executor.run([Job(code=code, tests=tests)])[0]
    assert [result.status == "passed" for result in verdict.tests] == right, verdict


def test_a_comparison_with_an_object_of_the_program_says_so(executor):
    code = f"{PREAMBLE}def f(): return UserList([1])"
    verdict = executor.run([Job(code=code, tests=["assert f() == [1]"], setup="judged = True")])[0]
    assert verdict.status == "failed" and "object" in verdict.message, verdict


def test_an_assertion_after_the_last_test_is_not_swallowed_either(executor):
    code = "def each(f, xs):\n    for x in xs:\n        try: f(x)\n        except BaseException: pass"
    check = "def check(candidate):\n    def visit(x): assert x == {}\n    assert candidate(print, []) is None\n    candidate(visit, [2])"
    jobs = [Job(code, check.format(x), "check", entry_point="each") for x in (1, 2)]
    assert [verdict.status for verdict in executor.run(jobs)] == ["failed", "passed"]
