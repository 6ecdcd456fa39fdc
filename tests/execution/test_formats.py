"""The four test formats, result by result. `honest/scripts.txt` has scripts that end as under the interpreter."""

import pytest

from marcog_trl.execution import CodeExecutor, Job
from marcog_trl.execution.sandbox.limits import WALL_CLOCK


def statuses(verdict):
    return [result.status for result in verdict.tests]


def test_direct_and_judged_tests_agree(executor):
    """Tests that are compared without a judge get the verdict that a judge would give."""
    code = (
        "def f(x, y=0, *, z=0):\n    return x + y + z\ndef yes(): return [1]\ndef no(): return ''\ndef one(): return 1\n"
        "def bad(): raise KeyError('k')\ndef obj(): return object()\ndef txt():\n    class S(str): pass\n    return S('a')"
    )
    tests = [
        "assert f(1, y=2, z=-3) == 0",
        "assert 3 == f(1, 2)",
        "assert f(1) != 1",
        "assert yes()",
        "assert not no()",
    ]
    tests += [
        "assert one() is True",
        "assert one() is not None",
        "assert bad() == 1",
        "assert obj() == 1",
        "assert txt() == 'a'",
    ]
    tests += [
        "assert f([1], [2], z=[]) == [1, 2]",
        "assert no()",
        "assert one() == 1.0, 'a message'",
        "assert obj() is not None",
    ]
    direct, judged = executor.run(
        [Job(code=code, tests=tests), Job(code=code, tests=[*tests, "assert abs(one()) == 1"])]
    )
    expected = [True, True, False, True, True, False, True, False, False, True, True, False, True, True]
    assert [status == "passed" for status in statuses(direct)] == expected
    assert statuses(judged)[:-1] == statuses(direct)
    assert direct.tests[2].message == "f(1) returned 1, expected != 1"
    assert "KeyError: 'k'" in direct.tests[7].message and "KeyError: 'k'" in judged.tests[7].message


def test_asserts_share_a_namespace(executor):
    tests = ["x = f(2)\nassert x == 4", "assert x + 1 == 5", "y = 1 / 0", "assert f(x) == 16"]
    verdict = executor.run([Job(code="def f(n): return n * n", tests=tests)])[0]
    assert statuses(verdict) == ["passed", "passed", "failed", "passed"]
    assert verdict.status == "failed" and verdict.message == "ZeroDivisionError: division by zero (line 1)"


def test_check_counts_its_asserts(executor):
    check = (
        "import math\ndef check(candidate):\n    assert True, 'counts as nothing'\n    assert candidate(1) == 1\n"
        "    for k in range(5):\n        assert candidate(k) == k * k, 'in a loop'\n    values = [candidate(k) for k in (1, 2)]\n"
        "    assert values[1] == math.floor(4.5)\n    try:\n        candidate('a')\n        assert False\n    except TypeError:\n        pass\n"
    )
    codes = [
        "def f(x): return x * x + (x - x)",
        "def f(x): return x",
        "def f(x):\n    if x == 2: raise ValueError('two')\n    return x * x",
    ]
    jobs = [Job(code=code, tests=check, test_format="check", entry_point="f") for code in codes]
    right, wrong, raising = executor.run(jobs)
    assert (right.status, right.passed, right.total) == ("passed", 3, 3)
    assert statuses(wrong) == ["passed", "failed", "failed"]
    assert statuses(raising) == ["passed", "failed", "failed"] and "two" in raising.message


def test_check_that_is_one_test(executor):
    check = (
        "def check(candidate):\n    def inner(x):\n        assert candidate(x) == x\n    for k in range(3): inner(k)\n"
    )
    jobs = [Job(code=f"def f(x): return {c}", tests=check, test_format="check", entry_point="f") for c in ("x", "0")]
    assert [(v.status, v.total) for v in executor.run(jobs)] == [("passed", 1), ("failed", 1)]


def test_check_fails_if_it_raises_after_its_asserts(executor):
    check = "def check(candidate):\n    assert candidate(1) == [1]\n    candidate(2).undefined()\n"
    job = Job(code="def f(x): return [x]", tests=check, test_format="check", entry_point="f")
    assert executor.run([job])[0].status == "failed"


def test_helpers_in_the_setup_are_not_the_programs(executor):
    code = "def f(x): return 0\ndef helper(x): return 0"
    check = "def check(candidate):\n    assert candidate(3) == helper(3)\n"
    own = Job(code=code, tests=check, test_format="check", entry_point="f", setup="def helper(x): return x")
    taken = Job(code=code, tests=check, test_format="check", entry_point="f")
    assert [v.status for v in executor.run([own, taken])] == ["failed", "passed"]


def test_entry_point_beats_the_setup(executor):
    job = Job(
        code="def pow(a): return 7", tests=["assert pow(1) + 0 == 7"], setup="from math import *", entry_point="pow"
    )
    assert executor.run([job])[0].status == "passed"


def test_a_missing_name_fails_only_where_it_is_used(executor):
    tests = ["assert f(1) == 1", "assert g(1) == 1"]
    assert statuses(executor.run([Job(code="def f(x): return x", tests=tests)])[0]) == ["passed", "failed"]
    assert statuses(executor.run([Job(code="def f(x): return x", tests=tests, entry_point="g")])[0]) == [
        "error",
        "error",
    ]


def test_stdio(executor):
    code = "import sys\nn = int(input())\nprint(sum(map(int, sys.stdin.read().split()[:n])), end='')\nsys.exit()"
    tests = [("2\n1 2\n", "3\n"), ("1\n5", " 5 "), ("1\n1", "2"), ("x", "0")]
    verdict = executor.run([Job(code=code, tests=tests, test_format="stdio")])[0]
    assert statuses(verdict) == ["passed", "passed", "failed", "failed"]
    assert verdict.tests[2].message == "printed '1', expected '2'" and "ValueError" in verdict.tests[3].message
    main = "def main():\n    print(open(0).read().upper())\nif __name__ == '__main__':\n    main()"
    assert executor.run([Job(code=main, tests=[("ä\n", "Ä")], test_format="stdio")])[0].status == "passed"
    broken = executor.run([Job(code="print(", tests=[("", "")] * 2, test_format="stdio")])[0]
    assert broken.status == "error" and "SyntaxError" in broken.message


@pytest.mark.parametrize(
    "end",
    [
        "import threading\nthreading.Thread(target=forever).start()",
        "import atexit\natexit.register(forever)",
        "class Late:\n    def __del__(self, forever=forever): forever()\nlate = Late()",
    ],
)
def test_scripts_that_do_not_end_reach_the_limit(executor, end):
    code = "import time\ndef forever(sleep=time.sleep):\n    while True: sleep(1)\nprint(11, flush=True)\n" + end
    job = Job(code=code, tests=[("", "11")], test_format="stdio", timeout=0.5)
    assert executor.run([job])[0].status == "timeout"
    failed = Job(code=code + "\nraise ValueError('first')", tests=[("", "11")], test_format="stdio", timeout=5)
    assert "ValueError: first" in executor.run([failed])[0].message  # waits for nothing


def test_stdio_with_a_checker(executor):
    setup = "def check_output(stdin, expected, output):\n    return abs(float(output) - float(expected)) < 0.1\n"
    tests = [("1", "1.05"), ("2", "1.0"), ("a", "1")]
    verdict = executor.run([Job(code="print(float(input()))", tests=tests, test_format="stdio", setup=setup)])[0]
    assert statuses(verdict) == ["passed", "failed", "failed"]
    broken = Job(code="print('x')", tests=[("", "1")], test_format="stdio", setup=setup)
    assert "could not convert" in executor.run([broken])[0].message


def test_time_limits_per_test():
    code = "import time\ndef f(x):\n    if x < 0:\n        while True: pass\n    return x"
    direct = [f"assert f({x}) == {x}" for x in (1, -1, 2, -2, 3, -3, 4)]
    judged = [test.replace("f(", "abs(f(").replace(") ==", ")) ==").replace("== -", "== ") for test in direct]
    with CodeExecutor(
        num_workers=2, timeout=5.0, test_timeout=0.3, max_timeouts=2, isolation="best_effort"
    ) as executor:
        for verdict in executor.run([Job(code=code, tests=direct), Job(code=code, tests=judged)]):
            assert statuses(verdict) == ["passed", "timeout", "passed", "timeout", "skipped", "skipped", "skipped"]
            assert verdict.status == "timeout" and verdict.seconds < 2 * 0.3 * WALL_CLOCK
            assert 0.25 < verdict.tests[1].seconds < 0.3 * WALL_CLOCK


def test_time_limits_per_test_of_a_job(executor):
    code = "import time\ndef f(x):\n    time.sleep(max(0, -x))\n    return x"
    tests = [f"assert f({x}) == {x}" for x in (1, -9, 2)]
    jobs = [Job(code=code, tests=tests, test_timeout=0.3), Job(code=code, tests=["x = f", *tests], test_timeout=0.3)]
    script = code + "\nprint(f(int(input())))"
    jobs.append(Job(script, [("1", "1"), ("-9", "-9"), ("2", "2")], test_format="stdio", test_timeout=0.3))
    for verdict in executor.run(jobs):
        assert statuses(verdict)[-3:] == ["passed", "timeout", "passed"]
        assert 0.25 < verdict.tests[-2].seconds < 0.8


def test_tests_after_a_death_run_in_a_fresh_process(executor):
    code = "import os\nseen = []\ndef f(x):\n    seen.append(x)\n    if x == 2: os._exit(0)\n    return len(seen)"
    direct = ["assert f(1) == 1", "assert f(2) == 2", "assert f(3) == 1"]
    judged = [*direct, "assert f(2) + 0 == 2", "assert abs(f(5)) == 1"]
    one, two = executor.run([Job(code=code, tests=direct), Job(code=code, tests=judged)])
    assert statuses(one) == ["passed", "error", "passed"] and one.status == "error"
    assert statuses(two) == ["passed", "error", "passed", "error", "passed"]


def test_a_judge_that_hangs_is_a_timeout(executor):
    tests = ["assert f(1) == 1", "while f(1): pass", "assert f(1) == 1"]
    verdict = executor.run([Job(code="def f(x): return x", tests=tests, timeout=1.0)])[0]
    assert statuses(verdict) == ["passed", "timeout", "skipped"] and verdict.status == "timeout"


def test_cpu_time_is_limited():
    code = "import threading\ndef spin():\n    while True: pass\ndef f(x):\n    for _ in range(3): threading.Thread(target=spin, daemon=True).start()\n    spin()"
    with CodeExecutor(num_workers=1, timeout=0.5, isolation="best_effort") as executor:
        assert executor.run([Job(code=code, tests=["assert f(1) == 1"])])[0].status == "timeout"


def test_verdicts_repeat(executor):
    """Hash and random seeds are fixed, so that verdicts are reproducible."""
    code = "import random\ndef f(): return [random.random(), list({'a', 'b', 'c', 'd'}), hash('x')]"
    message = {executor.run([Job(code=code, tests=["assert f() == 0"])])[0].message for _ in range(4)}
    assert len(message) == 1


# Programs, and whether their one test in each format fails by an exception of theirs; `None` where it does not fail
RAISED = {
    "right": ("def f(x): return x + 1", None),
    "wrong": ("def f(x): return x", False),
    "wrong type": ("def f(x): return None", False),
    "raises": ("def f(x): raise KeyError(x)", True),
    "asserts": ("def f(x):\n    assert x > 99, '1 == 2 does not hold'\n    return x + 1", True),
    "exits": ("def f(x): raise SystemExit(3)", True),
    "stops": ("def f(x): raise StopIteration", True),
    "raises what is no assertion but looks like one": (
        "class AssertionError(AssertionError):\n    __slots__ = ()\n    __module__ = 'builtins'\n"
        "    __dict__ = property(lambda self: {})\ndef f(x): raise AssertionError('1 != 2')",
        True,
    ),
    "raises what cannot be made": (
        "class E(Exception):\n    def __init__(self, a, b, c): self.args = (a,)\ndef f(x): raise E(1, 2, 3)",
        True,
    ),
    "catches its own": ("def f(x):\n    try: raise KeyError\n    except KeyError: return 'nothing'", False),
}
RAISED_IN = {
    "direct": {"tests": ["assert f(1) == 2"]},
    "judged": {"tests": ["assert same(f(1), 2)"], "setup": "def same(a, b): return a == b"},
    "check": {"tests": "def check(candidate):\n    assert abs(candidate(1) - 1) == 1", "test_format": "check"},
    "check outside of asserts": {
        "tests": "def check(candidate):\n    x = candidate(1)\n    assert x == 2",
        "test_format": "check",
    },
    "unittest": {
        "tests": "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        self.assertEqual(f(1), 2)",
        "test_format": "unittest",
    },
    "stdio": {"tests": [("1", "2")], "test_format": "stdio"},
}


@pytest.mark.parametrize("name", RAISED_IN)
def test_exceptions_of_the_program_are_told_from_wrong_answers(executor, name):
    jobs = []
    for code, _ in RAISED.values():
        script = f"{code}\nprint(f(int(input())))" if name == "stdio" else code
        jobs.append(Job(script, entry_point=None if name == "stdio" else "f", **RAISED_IN[name]))
    for program, (_, raised), verdict in zip(RAISED, RAISED.values(), executor.run(jobs), strict=True):
        [result] = verdict.tests
        assert (result.status, result.raised) == (("passed", False) if raised is None else ("failed", raised)), (
            program,
            result,
        )


def test_what_tests_make_of_an_exception_is_theirs(executor):
    """An assertion of the tests about whether the program raises counts as a wrong answer."""
    tests = (
        "import unittest\nclass T(unittest.TestCase):\n    def test_1(self):\n        self.assertRaises(KeyError, f, 1)\n"
        "    def test_2(self):\n        try:\n            f(2)\n        except ValueError:\n            self.fail('raised')\n"
        "    def test_3(self):\n        def look(x):\n            self.assertEqual(x, 3)\n        g(look)\n"
    )
    code = "def f(x):\n    if x == 2: raise ValueError\ndef g(look):\n    try: look(4)\n    except AssertionError: raise KeyError"
    [verdict] = executor.run([Job(code, tests, "unittest")])
    assert [(result.status, result.raised) for result in verdict.tests] == [("failed", False)] * 3


def test_names_that_the_program_lacks_and_truth_that_it_refuses_are_its_exceptions(executor):
    code = "class B:\n    def __bool__(self): raise ValueError\ndef f(): return B()"
    for extra in ([], ["assert abs(1) == 1"]):  # without a judge, and with one
        [verdict] = executor.run([Job(code, ["assert f()", "assert g() == 1", *extra])])
        assert [result.raised for result in verdict.tests[:2]] == [True, True]


def test_a_test_that_runs_several_times_keeps_its_first_failure(executor):
    check = "def check(candidate):\n    for k in range(3):\n        assert candidate(k) == 0"
    code = "def f(k):\n    if k == {}: raise KeyError\n    return k"
    jobs = [Job(code.format(k), check, "check", entry_point="f") for k in (0, 2)]
    assert [verdict.tests[0].raised for verdict in executor.run(jobs)] == [True, False]
