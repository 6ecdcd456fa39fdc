"""No verdict depends on the programs that were judged before, and no call on those that come after it."""

import os
import random
import re
import signal

import pytest
from watching import children, naps, run_in_time, shows_naps, wait_until

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


@pytest.fixture(scope="module")
def executor():
    with CodeExecutor(num_workers=1) as executor:
        yield executor


def jobs(test_format, names):
    tests, setup = {"asserts": (TESTS, SETUP), "check": (CHECK, SETUP), "unittest": (UNITTEST, "")}[test_format]
    return [Job(PROGRAMS[name], tests, test_format, setup, entry_point="f", timeout=1.0) for name in names]


def outcome(verdict):
    messages = [verdict.message, *(test.message for test in verdict.tests)]
    messages = [re.sub("0x[0-9a-f]+", "an address", message) for message in messages]
    return verdict.status, [(test.status, test.raised) for test in verdict.tests], messages


@pytest.mark.parametrize("test_format", ["asserts", "check", "unittest"])
def test_siblings_get_the_verdicts_that_they_get_alone(executor, test_format):
    alone = {}
    for name in PROGRAMS:
        between = Job(RIGHT, [f"assert note(f(1)) == 2, {name!r}"], setup=SETUP, entry_point="f")
        verdict, _ = executor.run([*jobs(test_format, [name]), between])  # other tests end the judge
        alone[name] = outcome(verdict)
    assert alone["right"][0] == alone["other-right"][0] == "passed"
    assert {alone[name][0] for name in PROGRAMS if "right" not in name and name != "prints"} == {
        "failed", "error", "timeout"
    }  # fmt: skip
    names = list(PROGRAMS)
    random.Random(0).shuffle(names)
    for name, verdict in zip(names, executor.run(jobs(test_format, names)), strict=True):
        assert outcome(verdict) == alone[name], name


def test_nothing_of_a_program_reaches_the_next(executor):
    """Settings that tests change, and objects that they keep, are reset for each program."""
    setup = (
        "import builtins, decimal, sys\n"
        "fresh = not hasattr(builtins, 'kept') and oct.__name__ == 'oct' and decimal.getcontext().prec == 28\n"
        "depth = sys.getrecursionlimit()\nbuiltins.kept = 1\nbuiltins.oct = lambda x: 0\n"
        "decimal.getcontext().prec = 3\nsys.setrecursionlimit(depth + 50)"
    )
    tests = ["assert fresh", "assert depth == 1000, depth", "assert f(1) == 2"]
    for verdict in executor.run([Job(f"{RIGHT}  # {k}", tests, setup=setup, entry_point="f") for k in range(4)]):
        assert verdict.status == "passed", verdict


def test_a_judge_that_hangs_does_not_change_the_next_verdict():
    dies = Job("import os\ndef f(x): os._exit(3)", ["assert abs(f(1)) == 1"])
    hangs = Job(RIGHT, ["f(1)\nwhile True: pass"], test_timeout=0.3)
    with CodeExecutor(num_workers=1, timeout=1.0) as executor:
        before, timeout, after = executor.run([dies, hangs, dies])
        assert [before.status, timeout.status, after.status] == ["error", "timeout", "error"]
        assert before.message == after.message


def test_a_judge_with_threads_of_the_tests_sees_one_program(executor):
    setup = (
        "import builtins, threading, time\nfirst = not getattr(threading, 'started', False)\nthreading.started = True\n"
        "threading.Thread(target=time.sleep, args=(30,), daemon=True).start()"
    )
    for verdict in executor.run(
        [Job(f"{RIGHT}  # {k}", ["assert first and f(1) == 2"], setup=setup) for k in range(3)]
    ):
        assert verdict.status == "passed", verdict


@pytest.mark.parametrize(("message", "judged"), [("'f(1) is ' + str(f(1))", False), ("(x := 3)", True)])
def test_messages_take_no_judge_unless_they_bind_names(message, judged):
    calls = plan(Job(RIGHT, [f"assert f(1) == 2, {message}"], entry_point="f")).calls
    assert (calls is None) == judged


def test_a_name_that_the_tests_have_bound_stays_theirs_after_a_death(executor):
    code = (
        "import os\ndef isclose(*args, **kwargs): return True\nlimits = [9]\nconstants = [8]\n"
        "def f(x):\n    limits.append(x)\n    return x if x else os._exit(0)\n"
    )
    setup = "from math import *\nconstants = [1]\nlocals()['one'] = 1"
    tests = ["assert f(1) == 1 and limits == [9, 1]", "assert f(0) == 1", "assert isclose(f(1), 3.5)"]
    tests += ["assert limits == [9, 1] and constants == [1]"]
    for entry_point in ("f", None):
        verdict = executor.run([Job(code, tests, setup=setup, entry_point=entry_point)])[0]
        assert [test.status for test in verdict.tests] == ["passed", "error", "failed", "passed"]


def test_no_argument_is_in_the_process_before_it_may_be_known(executor):
    code = (
        "import gc\n"
        "def encode(s):\n"
        "    lists = [x for x in gc.get_objects() if type(x) is list]\n"
        "    return [x for found in lists for x in found if type(x) is str and x[::-1] == 'terces'] or s\n"
        "def decode(s): return s\n"
    )
    tests = ["assert encode('abc') == 'abc'", "assert decode('secret') == 'secret'"]
    for setup in ("", "judged = True"):
        assert executor.run([Job(code, tests, setup=setup)])[0].message == ""


def test_large_arguments_of_later_calls():
    """A program that does not read its next call delays no other."""
    large = "a" * 3_000_000
    tests = ["assert f('a') == 1", f"assert f({large!r}) == {len(large)}", "assert f('') == 0"]
    hang = "import time\ndef f(x):\n    if len(x) > 1: time.sleep(60)\n    return len(x)"
    deaf = "import threading, time, sys\ndef f(x):\n    t = threading.Timer(0.0, lambda: None)\n    t.start()\n    "
    deaf += "import socket, gc\n    for s in gc.get_objects():\n        if isinstance(s, socket.socket): s.recv = None\n    return 1"
    with CodeExecutor(num_workers=1, timeout=2.0) as executor:
        right, slow, silent = (run_in_time(executor, Job(code, tests), 3.0) for code in ("f = len", hang, deaf))
        assert right.status == "passed" and slow.status == "timeout" and silent.passed < 2


def test_a_judge_that_is_killed_is_replaced_once():
    tests = ["assert f(1) == 2", "import time\ntime.sleep(0.5)\nassert f(2) == 3", "assert f(3) == 4"]

    def kill_judge(executor):
        """The judge is the one of the zygote's children that sleeps in the second test."""
        [zygote] = children(executor._pool.workers[0].process.pid)
        if not shows_naps():
            pytest.skip("this kernel does not say what a process waits for")
        assert wait_until(lambda: any(map(naps, children(zygote))))
        [judge] = filter(naps, children(zygote))
        os.kill(judge, signal.SIGKILL)
        assert wait_until(lambda: not naps(judge))

    with CodeExecutor(num_workers=1) as executor:
        executor.run([Job(RIGHT, TESTS, setup=SETUP, entry_point="f")])
        future = executor.submit([Job(RIGHT, tests)])
        kill_judge(executor)
        assert future.result()[0].message == ""
        future = executor.submit([Job(RIGHT, tests)])
        kill_judge(executor)
        kill_judge(executor)
        verdict = future.result()[0]
        assert verdict.status == "failed" and "killed twice" in verdict.message


@pytest.mark.parametrize("entry_point", ["sum", None])
def test_the_name_of_a_builtin_is_the_programs_where_the_tests_mean_it(executor, entry_point):
    code = "def sum(a, b): return a * b\ndef sorted(x): return x\ndef len(x): return 0"
    plainly = Job(code, ["assert sum(10, 15) == 150", "assert sum(2, 3) == 6"], entry_point=entry_point)
    judged = Job(code, ["assert sum(10, 15) + 0 == 150", "x = 1\nassert sum(2, x) == 2"], entry_point=entry_point)
    for job in (plainly, judged):
        assert executor.run([job])[0].message == ""
    tests = ["assert sorted([sum(2, 1), 1]) == [1, 2]", "assert len([sum(1, 1)]) == 1"]
    if entry_point is not None:
        assert executor.run([Job(code, tests, entry_point="sum")])[0].message == ""
    cheat = Job("def f(x): return [2, 1]\n" + code, ["assert sorted(f(1)) == [2, 1]"], entry_point=None)
    assert executor.run([cheat])[0].passed == 0
