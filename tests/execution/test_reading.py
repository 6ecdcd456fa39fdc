"""Tests in the forms in which people write them: all are run, or refused with the reason, and none passes every program."""

import json
import subprocess
import sys

import numpy as np
import pytest

from marcog_trl.execution import Job, UnusableTests, read_tests


RIGHT, WRONG = "def f(x):\n    return 2 * x", "def f(x):\n    return 0"
CASE = "import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        self.assertEqual(f(1), 2)\n"
ECHO = [("1\n", "2\n"), ("2\n", "4\n")]


def jobs_of(value, codes, entry_point="f"):
    tests = read_tests(value, entry_point=entry_point)
    return [Job(code, tests.tests, tests.test_format, tests.setup, tests.entry_point) for code in codes]


FORMS = {
    "function of pytest": ["def test_f():\n    assert f(1) == 2"],
    "functions of pytest": "def test_a():\n    assert f(1) == 2\n\ndef test_b():\n    assert f(2) == 4\n",
    "helper after its use": "def test_a():\n    check_it(1)\n\ndef check_it(x):\n    assert f(x) == 2 * x\n",
    "coroutine of pytest": "async def test_f():\n    assert f(1) == 2\n",
    "class of pytest": ["class TestF:\n    def test_f(self):\n        assert f(1) == 2"],
    "class with a set-up": "class TestF:\n    def setup_method(self):\n        self.x = 1\n    def test_f(self):\n        assert f(self.x) == 2\n",
    "functions and a case": CASE + "def test_g():\n    assert f(2) == 4\n",
    "check in a list": ["def check(candidate):\n    assert candidate(1) == 2"],
    "check that is called": "def check(candidate):\n    assert candidate(1) == 2\n\ncheck(f)\n",
    "check by main": "def check(candidate):\n    assert candidate(1) == 2\n\nif __name__ == '__main__':\n    check(f)\n",
    "check as a helper": "def check(x, y):\n    assert f(x) == y\n\ncheck(1, 2)\ncheck(2, 4)\n",
    "case": [CASE],
    "case with main": CASE + "if __name__ == '__main__':\n    unittest.main()\n",
    "case with a bare main": CASE + "unittest.main()\n",
    "case with a runner": CASE + "unittest.TextTestRunner().run(unittest.TestLoader().loadTestsFromTestCase(T))\n",
    "main block": ["if __name__ == '__main__':\n    assert f(1) == 2\n    print('ok')"],
    "script": "def test():\n    assert f(1) == 2\n\ntest()\n",
    "script in lines": ["def test():", "    assert f(1) == 2", "", "test()"],
    "helper": "def assert_eq(a, b):\n    assert a == b\n\nassert_eq(f(1), 2)\n",
    "library": "import numpy as np\nnp.testing.assert_allclose(f(1), 2)\n",
    "branch": "if f(1) != 2:\n    raise AssertionError('no')\n",
    "exit": "import sys\nif f(1) != 2:\n    sys.exit(1)\n",
    "loop": "for x in range(1, 3):\n    assert f(x) == 2 * x\n",
    "coroutine": "import asyncio\nasync def t():\n    assert f(1) == 2\nasyncio.run(t())\n",
    "exception": "try:\n    f(None)\n    raise AssertionError('no error')\nexcept TypeError:\n    pass\n",
    "noted failures": "wrong = 0\ntry:\n    assert f(1) == 2\nexcept AssertionError:\n    wrong += 1\nassert wrong == 0\n",
    "coroutine of a case": CASE.replace("TestCase", "IsolatedAsyncioTestCase").replace("def", "async def"),
    "lambda": "same = lambda x, y: (_ for _ in ()).throw(AssertionError) if x != y else None\nassert f(1) == 2\n",
    "imports from the program": ["from solution import f\nassert f(1) == 2"],
    "imports under another name": "from main import f as g\n\ndef test_g():\n    assert g(1) == 2\n",
    "module of the program": "import your_module as m\nassert m.f(1) == 2\n",
    "module by its package": "import package.solution\nassert package.solution.f(1) == 2\n",
    "relative import": "from .double import f\nassert f(1) == 2\n",
    "module named as nothing else": "from double_the_number import f\nassert f(1) == 2\n",
    "star": "from solution import *\nassert f(1) == 2\n",
    "mark of Windows": "\ufeffassert f(1) == 2\r\nassert f(2) == 4\r\n",
    "main of pytest": "import pytest\n\ndef test_f():\n    assert f(1) == 2\n\nif __name__ == '__main__':\n    import sys\n    sys.exit(pytest.main([__file__]))\n",
    "unittest without an import": CASE.removeprefix("import unittest\n"),
    "margin": "    assert f(1) == 2\n    assert f(2) == 4\n",
    "array": np.array(["assert f(1) == 2"]),
    "calls": {"fn_name": "f", "inputs": [[1], [2]], "outputs": [2, 4]},
    "calls with wrapped outputs": json.dumps({"fn_name": "f", "inputs": [[1], [2]], "outputs": [[2], [4]]}),
    "calls in rows": [{"input": "1", "output": "2", "testtype": "functional"}],
    "calls in JSON": json.dumps([{"fn_name": "f", "input": [1], "output": 2, "type": "function_call"}]),
    "cases in a field": {"language": "python", "test_cases": [{"fn_name": "f", "input": [1], "output": 2}]},
    "asserts in JSON": json.dumps(["assert f(1) == 2"]),
}


@pytest.mark.parametrize("form", FORMS)
def test_right_programs_pass_and_wrong_ones_fail(executor, form):
    right, wrong = executor.run(jobs_of(FORMS[form], [RIGHT, WRONG]))
    assert right.status == "passed" and right.passed == right.total, right
    assert wrong.passed == 0 and wrong.status == "failed", wrong


STREAMS = {
    "pairs": [list(pair) for pair in ECHO],
    "columns": {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]},
    "columns in JSON": json.dumps({"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"]}),
    "columns as Python": str({"inputs": ["1\n", "2\n"], "outputs": ["2\n", "4\n"], "fn_name": None}),
    "singular columns": {"input": ["1\n", "2\n"], "output": ["2\n", "4\n"]},
    "rows": [{"input": given, "output": wanted, "testtype": "stdin"} for given, wanted in ECHO],
    "rows in JSON": json.dumps([{"stdin": given, "expected_output": wanted} for given, wanted in ECHO]),
    "rows in a list of one text": [json.dumps([{"input": given, "output": wanted} for given, wanted in ECHO])],
    "numbers": [[1, 2], [2, 4]],
    "lines": {"inputs": [["1"], ["2"]], "outputs": [["2"], ["4"]]},
}


@pytest.mark.parametrize("form", STREAMS)
def test_standard_input_and_output(executor, form):
    right, wrong = executor.run(jobs_of(STREAMS[form], ["print(2 * int(input()))", "print(0)"], None))
    assert (right.passed, right.total, wrong.passed) == (2, 2, 0)


def test_each_function_has_its_own_verdict(executor):
    text = "def test_a():\n    assert f(0) == 0\n\ndef test_b():\n    assert f(1) == 2\n\nclass TestC:\n    def test_c(self):\n        assert f(0) == 0\n"
    [verdict] = executor.run(jobs_of(text + CASE, [WRONG]))
    assert sorted(result.status for result in verdict.tests) == ["failed", "failed", "passed", "passed"]


def test_a_death_ends_only_the_test_of_a_function(executor):
    program = "import os\ndef f(x):\n    return os._exit(0) if x == 1 else 2 * x\n"
    text = "def test_a():\n    assert f(1) == 2\n\ndef test_b():\n    assert f(2) == 4\n"
    [verdict] = executor.run(jobs_of(text, [program]))
    assert [result.status for result in verdict.tests] == ["error", "passed"]


CHEATS = {
    "the tests' names": "def test_f(): pass\ntest_a = test_b = TestF = check = lambda *a, **k: None\ndef f(x): return 0",
    "an exit": "def f(x): raise SystemExit(0)",
    "a lying object": "class A:\n    def __eq__(self, other): return True\ndef f(x): return A()",
    "a module of tests": "import sys, types\nsys.modules['tests'] = types.ModuleType('tests')\ndef f(x): return 0",
    "a skip": "import unittest\ndef f(x): raise unittest.SkipTest('no')",
    "an assertion": "AssertionError = Exception\ndef f(x): raise KeyboardInterrupt",
}


@pytest.mark.parametrize("cheat", CHEATS)
@pytest.mark.parametrize(
    "form",
    ["functions of pytest", "class of pytest", "coroutine of pytest", "functions and a case", "script", "main block"],
)
def test_no_form_lets_a_program_cheat(executor, cheat, form):
    [verdict] = executor.run(jobs_of(FORMS[form], [CHEATS[cheat]]))
    assert verdict.passed == 0


def test_statements_that_are_not_tests_belong_to_the_next_test():
    for value, expected in (
        ("assert f(1) == 2\nassert f(2) == 4\nprint('All tests passed!')\n", ["assert f(1) == 2", "assert f(2) == 4"]),
        ("assert f(1) == 2\n\nif __name__ == '__main__':\n    print('ok')\n", ["assert f(1) == 2"]),
        (["import math", "assert f(1) == 2"], ["import math\nassert f(1) == 2"]),
        (["x = 1", "", "assert f(x) == 2", "print(x)"], ["x = 1\nassert f(x) == 2"]),
        ("assert f(1) == 2; assert f(2) == 4; x = 1\n", ["assert f(1) == 2; assert f(2) == 4; x = 1"]),
        ("assert True\nassert f(1) == 2\n", ["assert True\nassert f(1) == 2"]),
        (["assert f(1) == 2\nassert f(2) == 4"], ["assert f(1) == 2\nassert f(2) == 4"]),
    ):
        read = read_tests(value)
        assert [*read.tests] == expected and read_tests([*read.tests], read.test_format) == read


def test_the_entry_point_that_tests_name():
    assert read_tests("def check(candidate):\n    assert candidate(1)\ncheck(f)").entry_point == "f"
    assert read_tests("from solution import f\ndef test_f():\n    assert f(1)\n").entry_point == "f"
    assert read_tests({"fn_name": "f", "inputs": [[1]], "outputs": [2]}).entry_point == "f"
    assert read_tests("from solution import f\nassert f(1)", entry_point="g").entry_point == "g"
    assert read_tests("from solution import f, g\nassert f(g(1))").entry_point is None


def test_methods_of_a_class_as_the_entry_point(executor):
    program = "class Solution:\n    def f(self, x):\n        return 2 * x"
    for value in (
        "def check(candidate):\n    assert candidate(x=1) == 2\n",
        {"fn_name": "f", "inputs": [[1]], "outputs": [2]},
    ):
        right, wrong = executor.run(jobs_of(value, [program, program.replace("2 *", "3 *")], "Solution().f"))
        assert (right.status, wrong.status) == ("passed", "failed")


def test_lists_and_tuples_are_the_same_in_JSON(executor):
    value = {"fn_name": "f", "inputs": [[1], [2]], "outputs": [[1, [1]], [2, [2]]]}
    [verdict] = executor.run(jobs_of(value, ["def f(x):\n    return x, (x,)"]))
    assert verdict.status == "passed"


REFUSED = {
    "comparison": (["f(1) == 2"], "'f.1. == 2' is not asserted: write 'assert' before it"),
    "comparison among asserts": ("assert f(1) == 2\nf(2) == 4\n", "'f.2. == 4' is not asserted"),
    "comparison in a loop": ("for x in (1, 2):\n    f(x) == 2 * x\n", "'f.x. == 2 . x' is not asserted"),
    "truth": ("not f(1)", "is not asserted"),
    "tuple": (["assert (f(1) == 2, 'message')"], "asserts a tuple, which is always true: leave out the parentheses"),
    "generator": ("assert (f(x) == x for x in (1, 2))", "asserts what is always true"),
    "list": ("assert [f(1) == 2]", "asserts what is always true"),
    "or": ("assert f(1) == 2 or 'message'", "asserts what is always true"),
    "true constant": ("f(1)\nassert True", "assert nothing"),
    "tuple in a function": ("def test_f():\n    assert (f(1) == 2, 'no')\n", "in test_f, .* asserts a tuple"),
    "check that returns": ("def check(candidate):\n    return candidate(1) == 2\n", "check returns a value.*write 'assert' instead of 'return'"),
    "check that compares": ("def check(candidate):\n    candidate(1) == 2\n", "in check, 'candidate.1. == 2' is not asserted"),
    "check of two": ("def check(candidate, x):\n    assert candidate(x) == 2\n", r"check takes \(candidate, x\), but must take one"),
    "function that returns": ("def test_f():\n    return f(1) == 2\n", "test_f returns a value"),
    "function that compares": ("def test_f():\n    f(1) == 2\n", "in test_f, .* is not asserted"),
    "function that prints": ("def test_f():\n    print(f(1))\n", "test_f asserts nothing"),
    "method that returns": ("import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        return f(1) == 2\n", "test_f returns a value"),
    "method of an assertion of a tuple": ("import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        assert (f(1), 2)\n", "asserts a tuple"),
    "truth of a tuple": ("import unittest\nclass T(unittest.TestCase):\n    def test_f(self):\n        self.assertTrue((f(1), 2))\n", "test_f asserts nothing"),
    "fixture": ("def test_f(x):\n    assert f(x) == 2\n", "test_f takes x: fixtures and parameters"),
    "parameters": ("import pytest\n@pytest.mark.parametrize('x', [1])\ndef test_f(x):\n    assert f(x) == 2\n", "test_f takes x"),
    "set-up of the module": ("def setup_module():\n    pass\ndef test_f():\n    assert f(1) == 2\n", "setup_module is a fixture of pytest"),
    "generator of tests": ("def test_f():\n    yield f(1) == 2\n", "test_f yields"),
    "generator with an assert": ("def test_f():\n    yield\n    assert f(1) == 2\n", "test_f yields, so that it would not be run"),
    "swallowed": ("try:\n    assert f(1) == 2\n    print('ok')\nexcept AssertionError as e:\n    print(e)\n", "swallows its own AssertionError"),
    "swallowed by all": ("try:\n    assert f(1) == 2\nexcept:\n    pass\nassert f(2) == 4\n", "swallows its own AssertionError"),
    "swallowed in a function": ("def test_f():\n    try:\n        assert f(1) == 2\n    except Exception:\n        print('no')\n", "swallows its own AssertionError"),
    "suppressed": ("import contextlib\nwith contextlib.suppress(AssertionError):\n    assert f(1) == 2\n", "swallows its own AssertionError"),
    "never called": ("def verify():\n    assert f(1) == 2\n", "'def verify.*' is never called: call it, or name it test_verify"),
    "branches that print": ("if f(1) == 2:\n    print('ok')\nelse:\n    print('wrong')\n", "assert nothing"),
    "print": ("print(f(1) == 2)", "assert nothing"),
    "name": (["f"], "assert nothing"),
    "own program": ("def f(x):\n    return 2 * x\n\nassert f(1) == 2\n", "define f themselves, so that they would not test the program"),
    "own import": ("from math import sqrt as f\nassert f(4) == 2\n", "define f themselves, so that they would not test the program"),
    "function itself": ("assert f\nassert f(1) == 2\n", "'assert f' is true for every program: call f"),
    "coroutine of a case": (CASE + "    async def test_g(self):\n        assert f(1) == 2\n", "test_g is a coroutine, which TestCase does not await"),
    "generator of a case": (CASE + "    def test_g(self):\n        yield\n        assert f(1) == 2\n", "test_g yields"),
    "no program": ("assert 1 + 1 == 2\n", "use nothing of the program"),
    "no tests": ([], "no tests"),
    "blank": (["", "\n"], "no tests"),
    "nothing": (None, "no tests"),
    "number": (3, "tests=3 is a int"),
    "numbers": ([3], r"tests\[0\] must be a \(stdin, expected_stdout\) pair of texts, got 3"),
    "triples": ([["1", "2", "3"]], r"tests\[0\] must be a"),
    "keys": ({"question": "1"}, r"the keys \['question'\], but needs one of inputs, input, stdin"),
    "lengths": ({"inputs": ["1", "2"], "outputs": ["1"]}, "the tests have 2 inputs, but 1 outputs"),
    "kinds": ([{"input": "1", "output": "1", "fn_name": "f"}, {"input": "1", "output": "1"}], "some tests call a function"),
    "not JSON": ([{"input": "x y", "output": "1", "fn_name": "f"}], r"tests\[0\] has 'x y', which is not JSON"),
    "syntax": (["assert f(1) =="], r"tests\[0\]='assert f\(1\) ==' does not parse: invalid syntax"),
}  # fmt: skip


@pytest.mark.parametrize("form", REFUSED)
def test_what_cannot_fail_is_refused(form):
    value, message = REFUSED[form]
    with pytest.raises(UnusableTests, match=message) as error:
        read_tests(value, entry_point="f" if form.startswith("own") else None)
    assert "\n" not in str(error.value)


def test_a_format_that_the_tests_do_not_have_is_refused():
    with pytest.raises(UnusableTests, match="test_format='unittest', but the tests are 'stdio'"):
        read_tests([["1", "2"]], "unittest")
    with pytest.raises(UnusableTests, match=r"must define a function check\(candidate\)"):
        read_tests("assert f(1) == 2", "check")


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("def test_f():\n    assert f(1) == 2", "only defines something, which every program passes"),
        ("if __name__ == '__main__':\n    assert f(1) == 2", "only defines something"),
        ("assert (f(1) == 2, 'no')", "asserts a tuple"),
        ("f(1) == 2", "is not asserted"),
        ("import solution\nassert vars(solution)['f'](1) == 2", "use the module solution itself"),
    ],
)
def test_jobs_refuse_what_is_no_test(executor, test, message):
    [verdict] = executor.run([Job(RIGHT, ["assert f(1) == 2", test])])
    assert verdict.unusable and verdict.status == "error" and message in verdict.message


def test_imports_are_checked_before_anything_runs(executor):
    for text, message in (
        ("import pytest\nassert f(1) == pytest.approx(2)", r"import 'pytest', which needs packages=\['pytest'\]"),
        (
            "from no_such_package.inner import g\nassert f(1) == g(2)",
            "import 'no_such_package', which is not installed",
        ),
        ("assert f(1) == pytest.approx(2)", "import 'pytest'"),
        ("import os.path, yaml\nassert f(1) == 2", "import 'yaml'"),
    ):
        job = Job(RIGHT, [text], entry_point="f")
        with pytest.raises(UnusableTests, match=message):
            executor.check(job)
        assert executor.run([job])[0].unusable
    executor.check(Job(RIGHT, ["import math, numpy as np\nassert f(1) == np.int64(2)"]))
    executor.check(Job(RIGHT, ["try:\n    import torch\nexcept ImportError:\n    torch = None\nassert f(1) == 2"]))


def run_command(tmp_path, tests, *flags):
    (tmp_path / "program.py").write_text(RIGHT)
    (tmp_path / "tests.txt").write_text(tests, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "marcog_trl.execution",
        tmp_path / "program.py",
        "--tests",
        tmp_path / "tests.txt",
    ]
    command += ["--isolation", "best_effort", *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_command_reads_the_same_forms(tmp_path):
    done = run_command(tmp_path, FORMS["functions of pytest"])
    assert done.returncode == 0 and "2 of 2 tests passed" in done.stdout
    done = run_command(tmp_path, "def verify():\n    assert f(1) == 2\n")
    assert done.returncode == 2 and "is never called" in done.stderr and done.stderr.count("\n") == 1
    done = run_command(tmp_path, "import pytest\n\ndef test_f():\n    assert f(1) == pytest.approx(2)\n")
    assert done.returncode == 2 and "packages=['pytest']" in done.stderr
    done = run_command(
        tmp_path, "import pytest\n\ndef test_f():\n    assert f(1) == pytest.approx(2)\n", "--packages", "pytest"
    )
    assert done.returncode == 0, done
