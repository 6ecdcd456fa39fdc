"""Programs that cheat, hang, grow, escape or break. None passes wrongly, none leaks, and no good program is lost.

`hostile_cases.json` is a list of objects: `name`, `program` (a text, or pieces with the number of their repetitions),
`tests`, `expected` (`pass`, `fail`, `timeout`, `error`), `either` (`fail` and `error` are equally right), `slow` (needs a
limit of 10 s), `why`. Programs named `probe_*` try something forbidden and pass only if it was refused.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from watching import is_idle, run_in_time

from marcog_trl.execution import CodeExecutor, Job
from marcog_trl.execution.isolation import probe


CASES = json.loads((Path(__file__).parent / "hostile_cases.json").read_text())
STATUS = {"pass": "passed", "fail": "failed", "timeout": "timeout", "error": "error"}
ADD = ["assert add(1, 2) == 3", "assert add(-5, 5) == 0", "assert add(10, 20) == 30"]

pytestmark = pytest.mark.skipif(not all(probe()), reason="Landlock or seccomp are missing")


@pytest.fixture(scope="module")
def executor():
    os.environ["MARCOG_CANARY_TOKEN"] = "canary"
    with CodeExecutor(num_workers=1, timeout=2.0, isolation="strict") as executor:
        yield executor
    del os.environ["MARCOG_CANARY_TOKEN"]


def program(case):
    text = case["program"]
    return text if isinstance(text, str) else "".join(piece * count for piece, count in text)


def left_behind():
    folders = [Path(folder) for folder in ("/tmp", "/var/tmp", "/dev/shm") if Path(folder).is_dir()]
    return [str(path) for folder in folders for path in folder.glob("*marcog_canary*")]


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_hostile_programs(executor, case):
    limit = 10.0 if case["slow"] else 2.0
    for _ in range(2 if case["name"] == "probe_state_between_runs" else 1):
        job = Job(code=program(case), tests=case["tests"], timeout=limit)
        verdict = run_in_time(executor, job, limit + 1.0)
        right = {STATUS[case["expected"]]} | ({"failed", "error"} if case["either"] else set())
        assert verdict.status in right, (case["why"], verdict)
    assert not left_behind()
    worker = executor._pool.workers[0].process.pid
    assert is_idle(worker)
    assert len(os.listdir(f"/proc/{worker}/fd")) < 16
    good = Job(code="def add(a, b): return a + b", tests=ADD)
    assert executor.run([good])[0].status == "passed"


def test_as_nobody():
    """An unprivileged user gets the same verdicts on all programs."""
    if os.getuid() != 0:
        pytest.skip("needs to start as root")
    jobs = []
    for case in CASES:
        limit = 10.0 if case["slow"] else 1.0 if case["expected"] == "timeout" else 4.0
        jobs += [[program(case), case["tests"], limit]] * (2 if case["name"] == "probe_state_between_runs" else 1)
    script = (
        "import json, os, sys\nos.setgid(65534)\nos.setuid(65534)\n"
        "from marcog_trl.execution import CodeExecutor, Job\n"
        "jobs = [Job(code=code, tests=tests, timeout=limit) for code, tests, limit in json.load(sys.stdin)]\n"
        "with CodeExecutor(num_workers=2) as executor:\n"
        "    verdicts = executor.run(jobs)\n"
        "print(json.dumps([v.status for v in verdicts]))\n"
    )
    environment = {**os.environ, "MARCOG_CANARY_TOKEN": "canary", "PYTHONPATH": str(Path(__file__).parents[2])}
    options = {"env": environment, "capture_output": True, "text": True, "timeout": 120, "check": False, "cwd": "/"}
    for python in (sys.executable, "/usr/bin/python3"):  # one that an unprivileged user may run
        if Path(python).exists():
            done = subprocess.run([python, "-c", script], input=json.dumps(jobs), **options)
            if done.returncode == 0:
                break
    if "Permission" in done.stderr or "ModuleNotFoundError" in done.stderr or "init_fs_encoding" in done.stderr:
        pytest.skip("an unprivileged user may not read this checkout, or has no Python of the right version")
    assert done.returncode == 0, done.stderr
    repeated = [case for case in CASES for _ in range(2 if case["name"] == "probe_state_between_runs" else 1)]
    statuses = json.loads(done.stdout)
    wrong = {}
    for case, status in zip(repeated, statuses, strict=True):
        right = {STATUS[case["expected"]]} | ({"failed", "error"} if case["either"] else set())
        if status not in right:
            wrong[case["name"]] = status
    assert len(statuses) == len(CASES) + 1 and not wrong
    assert not left_behind()


# Cheats that know how this executor works

LIE = "class Lie:\n    def __eq__(self, o): return True\n    def __ne__(self, o): return False\n    def __hash__(self): return 0\n"
CHEATS = {
    "sub returns zero": (
        "class V:\n    def __sub__(self, o): return 0.0\n    def __rsub__(self, o): return 0.0\ndef f(x): return V()",
        ["assert abs(f(2) - 12.5) < 1e-6"],
    ),
    "abs then less": (
        "class V:\n    def __sub__(self, o): return self\n    def __abs__(self): return self\n"
        "    def __lt__(self, o): return True\ndef f(x): return V()",
        ["assert abs(f(2) - 12.5) < 1e-6"],
    ),
    "entry point is a class": ("class f:\n    def __new__(c, x): return object.__new__(c)\n    def __sub__(s, o): return 0.0",
        ["assert abs(f(2) - 12.5) < 1e-6"]),
    "ordering lies": ("class V:\n    def __gt__(s, o): return True\n    __lt__ = __ge__ = __le__ = __gt__\ndef f(x): return V()",
        ["assert f(2) > 7", "assert 7 < f(2)", "assert f(3) < f(4)"]),
    "contains lies": ("class V:\n    def __contains__(s, o): return True\ndef f(x): return V()", ["assert 3 in f(1)"]),
    "contains lies and iterates": (
        "class V(list):\n    def __contains__(s, o): return True\n    def __iter__(s): return iter([])\ndef f(x): return V()",
        ["assert 3 in f(1)"]),
    "float subclass": ("class F(float):\n    def __eq__(s, o): return True\n    def __sub__(s, o): return 0.0\n"
        "    def __rsub__(s, o): return 0.0\ndef f(x): return F(1)",
        ["assert f(2) == 12.5", "assert abs(f(2) - 12.5) < 1e-6", "import math\nassert math.isclose(f(2), 12.5)"]),
    "str subclass": ("class S(str):\n    def __eq__(s, o): return True\n    def __hash__(s): return 0\n    def strip(s): return s\n"
        "def f(): return S('x')", ["assert f() == 'abc'", "assert f().strip() == 'abc'", "assert f() in {'abc': 1}"]),
    "metaclass lies": ("class M(type):\n    def __eq__(c, o): return True\n    def __hash__(c): return hash(int)\n"
        "    def __instancecheck__(c, o): return True\nclass V(metaclass=M):\n    def __eq__(s, o): return True\n    __hash__ = None\n"
        "def f(): return V()", ["assert f() == 1", "assert type(f()) is int", "assert isinstance(f(), int)"]),
    "lie in a list": (LIE + "def f(): return [Lie(), Lie()]", ["assert f() == [1, 2]", "assert 1 in f()"]),
    "lie as key": (LIE + "def f(): return {Lie(): 1}", ["assert f() == {'a': 1}", "assert f()['a'] == 1"]),
    "lie in a tuple in a set": (LIE + "def f(): return {(Lie(),)}", ["assert f() == {(1,)}"]),
    "namedtuple that lies": ("from collections import namedtuple\nclass P(namedtuple('P', 'x y')):\n"
        "    def __eq__(s, o): return True\ndef f(): return P(0, 0)", ["assert f() == (1, 2)", "assert f().x == 1"]),
    "array interface": ("class A:\n    @property\n    def __array_interface__(s): return {'shape': (1,), 'typestr': '<i8', "
        "'data': (id(7) + 24, True), 'version': 3}\n    def __index__(s): return 8\n    def __array__(s, *a): return 7\ndef f(): return A()",
        ["assert f().__array_interface__['shape'] == (1,)"]),
    "exception that is the answer": ("class E(Exception):\n    def __eq__(s, o): return True\ndef f(): raise E()",
        ["try: r = f()\nexcept Exception as e: r = e\nassert r == 3"]),
    "stop iteration": ("def f(x): raise StopIteration(3)", ["assert f(1) == 3", "assert [f(y) for y in [1]] == [3]"]),
    "skip test": ("import unittest\ndef f(): raise unittest.SkipTest('no')", ["assert f() == 1"]),
    "keyboard interrupt": ("def f(): raise KeyboardInterrupt", ["assert f() == 1"]),
    "system exit": ("def f(): raise SystemExit(0)", ["assert f() == 1"]),
    "generator exit": ("def f(): raise GeneratorExit", ["assert f() == 1"]),
    "generator answers later": ("def f(x):\n    r = yield\n    yield r", ["assert f(1) == 1", "assert list(f(1)) == [1]"]),
    "coroutine": ("async def f(x): return x", ["assert f(1) == 1"]),
    "not implemented": ("def f(x): return NotImplemented", ["assert f(1) == 1"]),
    "import hook": ("import sys\nclass H:\n    def find_spec(s, *a):\n        raise SystemExit(0)\nsys.meta_path.insert(0, H())\n"
        "def f(x): return 0", ["import colorsys\nassert f(1) == 1"]),
    "json patched": ("import json\njson.dumps = lambda *a, **k: '{\"r\": 3}'\njson.encoder.c_make_encoder = None\ndef f(x): return 0",
        ["assert f(1) == 3"]),
    "own frames patched": (
        "import sys\ndef f(x):\n    g = sys._getframe(1)\n    while g:\n        for v in list(g.f_locals.values()) + list(g.f_globals.values()):\n"
        "            if hasattr(v, 'encode') and hasattr(v, 'decode') and type(v).__name__ == 'Codec':\n"
        "                type(v).encode = lambda s, v: 3\n        g = g.f_back\n    return 0", ["assert f(1) == 4"]),
    "interned ints": ("import ctypes\ndef f(x):\n    try: ctypes.memmove(id(8) + 24, id(7) + 24, 4)\n    except Exception: pass\n    return 7",
        ["assert f(1) == 8"]),
    "gc finds the tests": (
        "import gc\ndef f(x):\n    for o in gc.get_objects():\n        if type(o) is dict and 'expected' in o: return o['expected']\n"
        "    for o in gc.get_objects():\n        if type(o) is list and o and type(o[0]) is str and 'assert' in o[0]: return 41\n",
        ["assert f(1) == 41"]),
    "del answers": ("class D:\n    def __del__(s):\n        import os\n        for fd in range(3, 20):\n            try: os.write(fd, b'\\x08\\x00\\x00\\x00{\"r\": 3}')\n"
        "            except OSError: pass\nd = D()\ndef f(x):\n    global d\n    d = None\n    return 0", ["assert f(1) == 4", "assert f(2) == 4"]),
    "replies in advance": ("import os\ndef f(x):\n    for fd in range(3, 20):\n        try: os.write(fd, b'\\x11\\x00\\x00\\x00{\"r\":0,\"s\":\"done\"}' * 9)\n"
        "        except OSError: pass\n    return 0", ["assert f(1) == 4", "assert abs(f(2)) == 4"]),
    "claims to be the judge": ("import os\nbody = b'{\"t\":0,\"s\":\"passed\",\"m\":\"\"}'\nfor fd in range(3, 20):\n    try: os.write(fd, len(body).to_bytes(4, 'little') + body)\n"
        "    except OSError: pass\ndef f(x): return 0", ["assert abs(f(1)) == 4"]),
    "length that never comes": ("import os\ndef f(x):\n    for fd in range(3, 20):\n        try: os.write(fd, b'\\xff\\xff\\xff\\x7f')\n        except OSError: pass\n"
        "    return 0", ["assert f(1) == 4"]),
    "colliding set": ("def f(x): return {k * (2 ** 61 - 1) for k in range(2)} | {1}", ["assert f(1) == {1}"]),
    "module that agrees": ("class math:\n    @staticmethod\n    def isclose(*a, **k): return True\n    pi = 3\ndef f(x): return 0",
        ["assert math.isclose(f(1), 3.5)"]),
    "numpy that agrees": ("class np:\n    @staticmethod\n    def allclose(*a): return True\ndef f(x): return 0", ["assert np.allclose(f(1), 3.5)"]),
    "predicts the judge's dice": ("import random\ndef f(h):\n    random.seed(0)\n    return random.random()",
        ["import random\nx = random.random()\nassert f(hash(x)) == x"]),
    "shadows a builtin": ("def all(x): return True\ndef len(x): return 2\ndef f(): return [3]", ["assert len(f()) == 2", "assert all(x == 1 for x in f())"]),
    "thread answers": ("import threading, os, time\ndef spam():\n    while True:\n        for fd in (3, 4, 5, 6):\n            try: os.write(fd, b'\\x07\\x00\\x00\\x00{\"r\":1}')\n"
        "            except OSError: pass\n        time.sleep(0.001)\nthreading.Thread(target=spam, daemon=True).start()\ndef f(x): return 0",
        ["assert f(1) == 4", "assert f(2) == 5"]),
    "node of the judge": ("def f(x):\n    x.clear(); x.append(4)\n    return x", ["assert f([1]) == [1]", "assert abs(f([1])[0]) == 1"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CHEATS)
def test_cheats_do_not_pass(executor, name):
    """Runs each test alone, compared directly where that is possible, and under a judge."""
    code, tests = CHEATS[name]
    jobs = [Job(code=code, tests=[test]) for test in tests]
    jobs += [Job(code=code, tests=[test + "\n0"]) for test in tests]  # what is more than one statement needs a judge
    assert [verdict.passed for verdict in executor.run(jobs)] == [0] * len(jobs)


def test_stdio_cannot_be_guessed(executor):
    everything = "for n in range(100): print(n)"
    died = "import os\nprint(6, flush=True)\nos._exit(3)"
    jobs = [
        Job(code=code, tests=[("3", "6")], test_format="stdio") for code in (everything, died, "print(6); exit(1)")
    ]
    assert [verdict.passed for verdict in executor.run(jobs)] == [0, 0, 0]
    honest = [
        "import os, sys\nprint(6, flush=True)\nos._exit(0)",
        "print(6); exit()",
        "import sys\nsys.stdout.write('6\\r\\n')",
    ]
    jobs = [Job(code=code, tests=[("3", "6\n")], test_format="stdio") for code in honest]
    assert [verdict.status for verdict in executor.run(jobs)] == ["passed"] * 3


def test_unittest_cannot_be_patched(executor):
    tests = "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertEqual(f(), 1)\n"
    patch = "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\nunittest.TestCase.run = lambda *a: None\ndef f(): return 2"
    swallow = "class Stop(KeyboardInterrupt): pass\ndef f(): raise Stop"
    jobs = [
        Job(code=code, tests=tests, test_format="unittest") for code in (patch, swallow, LIE + "def f(): return Lie()")
    ]
    assert [verdict.passed for verdict in executor.run(jobs)] == [0, 0, 0]


def test_no_program_has_itself_excused(executor):
    """No program can cause `infrastructure`, which would spare it a low reward."""
    bombs = [
        "import os\ndef f(x):\n    for fd in range(3, 20):\n        try: os.write(fd, b'\\x00' * 100000)\n        except OSError: pass\n    return 0",
        "def f(x): return [[[] for _ in range(1000)] for _ in range(1000)]",
        "def f(x): return {k * (2 ** 61 - 1) for k in range(20000)}",
        "def f(x): return 'x' * (1 << 26)",
        "def f(x): return 1 << (1 << 26)",
        "from fractions import Fraction\ndef f(x): return Fraction((1 << 900000) + 1, (1 << 800000) - 1)",
        "def f(x):\n    v = []\n    for _ in range(60): v = [v, v]\n    return v",
        "def f(x): raise BaseExceptionGroup('g', [SystemExit()])",
        "import os\ndef f(x): os.kill(os.getppid(), 9); return 0",
    ]
    tests = ("assert f(1) == 1", "assert abs(f(1)) == 1")
    jobs = [Job(code=code, tests=[test], timeout=1.0) for code in bombs for test in tests]
    statuses = [verdict.status for verdict in executor.run(jobs)]
    assert set(statuses) <= {"failed", "error", "timeout"}, statuses


def test_bigger_than_the_channel_is_said(executor):
    verdict = executor.run([Job(code="def f(x): return 'x' * (1 << 25)", tests=["assert f(1) == 'x'"])])[0]
    assert verdict.status in ("failed", "error") and "bytes" in verdict.message
