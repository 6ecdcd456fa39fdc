"""A judge that sees several programs with the same tests judges each as if it were the only one."""

import random
import re

import pytest

from marcog_trl.execution import CodeExecutor, Job
from marcog_trl.execution.jobs import plan


SETUP = "import random\nseen = []\ndef note(value):\n    seen.append(value)\n    return value"
TESTS = [
    "assert note(f(1)) == 2",
    "assert len(seen) == 1",
    "assert note(f(random.randint(2, 9))) > 2",
    "assert f(3) == 4",
]
RIGHT = "def f(x): return x + 1"
CHECK = "def check(candidate):\n    for k in range(3):\n        assert candidate(k) == k + 1\n    assert candidate(9) == 10\n"
UNITTEST = (
    "import unittest\n\nclass T(unittest.TestCase):\n    def test_one(self):\n        self.assertEqual(f(1), 2)\n\n"
    "    def test_two(self):\n        self.assertEqual(f(2), 3)\n"
)
PROGRAMS = {
    "right": RIGHT,
    "wrong": "def f(x): return x",
    "partly": "def f(x): return x + 1 if x == 1 else 0",
    "no-python": "def f(x) return",
    "missing": "def g(x): return x",
    "raises": "def f(x): raise KeyError(x)",
    "dies": "import os\ndef f(x): os._exit(0)",
    "dies-loading": "import os\nos._exit(0)",
    "hangs": "def f(x):\n    while True: pass",
    "prints": "def f(x):\n    print('x' * 100000)\n    return x + 1",
    "object": "class E(int):\n    def __eq__(self, other): return True\n    __hash__ = None\ndef f(x): return E(0)",
    "generator": "def f(x):\n    yield x + 1",
    "other-right": "f = lambda x: 1 + x",
}


def jobs(test_format, names):
    tests, setup = {"asserts": (TESTS, SETUP), "check": (CHECK, SETUP), "unittest": (UNITTEST, "")}[test_format]
    return [Job(PROGRAMS[name], tests, test_format, setup, entry_point="f", timeout=1.0) for name in names]


def outcome(verdict):
    messages = [verdict.message, *(test.message for test in verdict.tests)]
    messages = [re.sub("0x[0-9a-f]+", "an address", message) for message in messages]
    return verdict.status, [(test.status, test.raised) for test in verdict.tests], messages


@pytest.mark.parametrize("test_format", ["asserts", "check", "unittest"])
def test_siblings_get_the_verdicts_that_they_get_alone(test_format):
    with CodeExecutor(num_workers=1) as executor:
        alone = {}
        for name in PROGRAMS:
            between = Job(RIGHT, [f"assert note(f(1)) == 2, {name!r}"], setup=SETUP, entry_point="f")
            verdict, _ = executor.run([*jobs(test_format, [name]), between])  # other tests end the judge
            alone[name] = outcome(verdict)
        assert alone["right"][0] == alone["other-right"][0] == "passed"
        assert {alone[name][0] for name in PROGRAMS if "right" not in name and name != "prints"} == {
            "failed", "error", "timeout"
        }  # fmt: skip
        names = [*PROGRAMS, *PROGRAMS]
        random.Random(0).shuffle(names)
        for name, verdict in zip(names, executor.run(jobs(test_format, names)), strict=True):
            assert outcome(verdict) == alone[name], name


def test_nothing_of_a_program_reaches_the_next():
    """Settings that tests change, and objects that they keep, are as at the start for every program."""
    setup = (
        "import builtins, decimal, sys\n"
        "fresh = not hasattr(builtins, 'kept') and oct.__name__ == 'oct' and decimal.getcontext().prec == 28\n"
        "depth = sys.getrecursionlimit()\nbuiltins.kept = 1\nbuiltins.oct = lambda x: 0\n"
        "decimal.getcontext().prec = 3\nsys.setrecursionlimit(depth + 50)"
    )
    tests = ["assert fresh", "assert depth == 1000, depth", "assert f(1) == 2"]
    with CodeExecutor(num_workers=1) as executor:
        for verdict in executor.run([Job(f"{RIGHT}  # {k}", tests, setup=setup, entry_point="f") for k in range(4)]):
            assert verdict.status == "passed", verdict


def test_a_judge_with_threads_of_the_tests_sees_one_program():
    setup = (
        "import builtins, threading, time\nfirst = not getattr(threading, 'started', False)\nthreading.started = True\n"
        "threading.Thread(target=time.sleep, args=(30,), daemon=True).start()"
    )
    with CodeExecutor(num_workers=1) as executor:
        for verdict in executor.run(
            [Job(f"{RIGHT}  # {k}", ["assert first and f(1) == 2"], setup=setup) for k in range(3)]
        ):
            assert verdict.status == "passed", verdict


@pytest.mark.parametrize(
    ("test", "call"),
    [
        ("assert f(3 * 19, -2 ** 3) == 2 ** 10 - 1", ([57, -8], 1023)),
        ("assert f([1, 0 ** 0], k={'a': 7 // 2}) == 1 / 4", ([[1, 1]], 0.25)),
        ("assert f(1) == 2, 'f(1) is ' + str(f(1))", ([1], 2)),
        ("assert f(9 ** 99 ** 9) == 1", None),
        ("assert f(1 / 0) == 1", None),
        ("assert f('a' * 3) == 1", None),
        ("assert f(1) == 2, (x := 3)", None),
    ],
)
def test_arithmetic_and_messages_take_no_judge(test, call):
    calls = plan(Job(RIGHT, [test], entry_point="f")).calls
    if call is None:
        assert calls is None
    else:
        assert (calls[0]["call"][1][0] if len(call[0]) == 1 else calls[0]["call"][1]) is not None
        with CodeExecutor(num_workers=1) as executor:
            code = f"def f(*args, **kwargs):\n    assert list(args) == {call[0]!r}\n    return {call[1]!r}"
            assert executor.run([Job(code, [test], entry_point="f")])[0].status == "passed"
