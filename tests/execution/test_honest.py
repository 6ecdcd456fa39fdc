"""Honest programs get the same results as in plain Python, except for patterns that are given up for the sake of safety."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from honest import FOLDER, LIMIT, programs

from marcog_trl.execution import CodeExecutor, Job


PROGRAMS = programs()
GIVEN_UP = json.loads((FOLDER / "given_up.json").read_text(encoding="utf-8"))  # names of programs by pattern
GUIDE = Path(__file__).parents[2] / "marcog_trl" / "execution" / "README.md"


@pytest.fixture(scope="module")
def native():
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    command = [sys.executable, str(Path(__file__).parents[1] / "helpers" / "honest.py")]
    return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)


@pytest.fixture(scope="module")
def verdicts():
    jobs = [Job(code, tests, kind, entry_point=entry, timeout=LIMIT) for code, tests, kind, entry in PROGRAMS.values()]
    with CodeExecutor(num_workers=2, isolation="best_effort") as executor:
        return dict(zip(PROGRAMS, executor.run(jobs), strict=True))


def passed_tests(name, verdict):
    """Whether each test passed; one answer for a whole `check`."""
    passed = [test.status == "passed" for test in verdict.tests]
    if len(passed) == 1 and verdict.status == "error":  # tests that a judge cannot run
        passed *= len(PROGRAMS[name][1])
    return [all(passed)] if PROGRAMS[name][2] == "check" else passed


def test_programs_are_many_and_honest(native):
    assert len(PROGRAMS) >= 450
    assert sum(1 if type(answer) is str else len(answer) for answer in native.values()) >= 1900
    assert {name: answer for name, answer in native.items() if type(answer) is str} == {}
    right = [answer for answer in native.values() if all(answer)]
    assert len(right) >= 0.9 * len(native)  # the others have tests that a right sandbox must fail


def test_differences_are_those_that_are_given_up(native, verdicts):
    found = {name: verdict for name, verdict in verdicts.items() if passed_tests(name, verdict) != native[name]}
    given_up = {name for names in GIVEN_UP.values() for name in names}
    messages = {name: [test.message for test in found[name].tests if test.message] for name in found.keys() - given_up}
    assert messages == {}
    assert given_up - found.keys() == set()


def test_no_test_passes_that_fails_in_plain_python(native, verdicts):
    for name, verdict in verdicts.items():
        passed = passed_tests(name, verdict)
        if len(passed) == len(native[name]):
            assert not any(here and not there for here, there in zip(passed, native[name], strict=True)), (
                name,
                verdict,
            )


def test_the_guide_lists_what_is_given_up():
    guide = GUIDE.read_text()
    assert [pattern for pattern in GIVEN_UP if f"| {pattern} |" not in guide] == []


def test_the_examples_of_the_guide_run():
    for example in GUIDE.read_text().split("```python\n")[1:]:
        exec(compile(example.split("```")[0], str(GUIDE), "exec"), {})
