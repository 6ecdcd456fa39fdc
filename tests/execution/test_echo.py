"""What the program prints, warns of and logs reaches the tests, and what they patch reaches the program: no test passes
because the two run in different processes. The programs of `honest/` show that right programs pass."""

import pytest

from marcog_trl.execution import CodeExecutor, Job


@pytest.fixture(scope="module")
def executor():
    with CodeExecutor(num_workers=1, timeout=5.0, isolation="best_effort") as executor:
        yield executor


OUTPUT = "import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    r = f(1)\n"
MOCK = "import time\nfrom unittest import mock\n"
RECORD = (
    "import warnings\nwith warnings.catch_warnings(record=True) as w:\n    warnings.simplefilter('always')\n    f(1)\n"
)
STRICT = "import warnings\nwith warnings.catch_warnings():\n    warnings.simplefilter('error')\n    f(1)\n"
# What a program does that the test forbids; a program that does nothing passes the test
FORBIDDEN = {
    "prints": ("print('debug')", OUTPUT + "assert out.getvalue() == ''"),
    "writes": ("import sys; sys.stdout.write('debug')", OUTPUT + "assert not out.getvalue()"),
    "prints to the first output": ("import sys; print('debug', file=sys.__stdout__)", OUTPUT + "assert not out.getvalue()"),
    "prints to stderr": ("import sys; print('x', file=sys.stderr)", OUTPUT.replace("out(", "err(") + "assert not out.getvalue()"),
    "prints to a patched output": (
        "print(2)",
        "import io\nfrom unittest import mock\nwith mock.patch('sys.stdout', new_callable=io.StringIO) as o:\n    f(1)\n"
        "assert o.getvalue() == ''",
    ),
    "calls print": ("print(2)", MOCK + "with mock.patch('builtins.print') as p:\n    f(1)\np.assert_not_called()\nassert True"),
    "sleeps": ("import time; time.sleep(0.01)", MOCK + "with mock.patch('time.sleep') as p: f(1)\nassert not p.called"),
    "sleeps, patched by hand": (
        "import time; time.sleep(0.01)",
        "import time\ncalls, real = [], time.sleep\ntime.sleep = calls.append\nf(1)\ntime.sleep = real\nassert calls == []",
    ),
    "opens a file": (
        "import contextlib\n    with contextlib.suppress(Exception): open('/dev/null').read()",
        MOCK + "with mock.patch('builtins.open') as p: f(1)\nassert p.call_count == 0",
    ),
    "uses a class's method": (
        "import pathlib; pathlib.Path('/dev/null').exists()",
        "import pathlib\nfrom unittest import mock\nwith mock.patch.object(pathlib.Path, 'exists') as p: f(1)\nassert not p.called",
    ),
    "warns": ("import warnings; warnings.warn('w')", RECORD + "assert w == []"),
    "warns where that is an error": ("import warnings; warnings.warn('w')", STRICT + "assert True"),
    "logs": (
        "import logging; logging.getLogger('a').error('e')",
        "import unittest\nwith unittest.TestCase().assertNoLogs('a'): f(1)\nassert True",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORBIDDEN)
def test_what_is_forbidden_is_seen(executor, name):
    action, test = FORBIDDEN[name]
    jobs = [Job(f"def f(x):\n    {do}\n    return x", [test], entry_point="f") for do in ("pass", action)]
    right, wrong = executor.run(jobs)
    assert right.status == "passed", right
    assert wrong.status == "failed", wrong


def test_a_patch_that_cannot_reach_the_program_passes_nobody(executor):
    """A patch with an object of the standard library that cannot be sent to the program fails the test."""
    test = (
        "import time, threading\nreal = time.sleep\ntime.sleep = threading.Lock()\n{}\ntime.sleep = real\nassert True"
    )
    [job] = [Job("def f(x): return x", [test.format("try: f(1)\nexcept TypeError: pass")], entry_point="f")]
    verdict = executor.run([job])[0]
    assert verdict.status == "failed" and "cannot pass" in verdict.message


def test_a_patch_ends_with_the_test_that_made_it(executor):
    tests = [
        MOCK + "with mock.patch('time.time', return_value=5): assert f(1) == 5",
        "assert f(1) > 1000",
        "p = mock.patch('time.time', return_value=7)\np.start()\nassert f(0) == 7",
        "assert f(1) == 7",
        "p.stop()\nassert f(1) > 1000",
    ]
    code = "import os, time\ndef f(x): return int(time.time())"
    assert executor.run([Job(code, tests)])[0].message == ""
    dies = code.replace("return", "return x or os._exit(0) if False else")
    assert executor.run([Job(dies, tests)])[0].message == ""


def test_a_patch_reaches_the_process_that_follows_a_death(executor):
    code = "import os, time\ndef f(x): return int(time.time()) if x else os._exit(0)"
    tests = [MOCK + "p = mock.patch('time.time', return_value=7)\np.start()\nassert f(0) == 7", "assert f(1) == 7"]
    assert [test.status for test in executor.run([Job(code, tests)])[0].tests] == ["error", "passed"]


def test_floods_are_cut(executor):
    """A program that prints endlessly uses little memory and time."""
    code = "def f(n):\n    for _ in range(n): print('x' * 1000)\n    return n"
    tests = [OUTPUT.replace("f(1)", "f(20000)") + "assert r == 20000 and len(out.getvalue()) == 1 << 20"]
    verdict = executor.run([Job(code, tests, memory_mb=100), Job(code, ["assert f(10) + f(3) == 13"])])
    assert [v.message for v in verdict] == ["", ""]


def test_what_is_printed_before_the_tests_is_not_theirs(executor):
    code = "import warnings\nprint('loading')\nwarnings.warn('loading')\ndef f(x):\n    print(x)\n    return x"
    tests = [OUTPUT + "assert out.getvalue() == '1\\n'", RECORD + "assert w == []"]
    assert executor.run([Job(code, tests)])[0].message == ""


def test_output_and_callbacks_keep_their_order(executor):
    code = "def f(g):\n    print('a')\n    g('b')\n    print('c')"
    test = (
        "import io, contextlib\nout = io.StringIO()\nwith contextlib.redirect_stdout(out):\n    f(print)\n    f(lambda x: print(x))\n"
        "assert out.getvalue() == 'a\\nb\\nc\\n' * 2"
    )
    assert executor.run([Job(code, [test])])[0].message == ""
