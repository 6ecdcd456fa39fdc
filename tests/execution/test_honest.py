"""Honest programs get the same results as in plain Python, except for those that the README lists."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from honest import LIMIT, programs

from marcog_trl.execution import CodeExecutor, Job


PROGRAMS = programs()
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


def differences(native, verdicts):
    """The programs with a test that passes only here or only in plain Python, with the messages of the tests."""
    found = {}
    for name, verdict in verdicts.items():
        passed = [test.status == "passed" for test in verdict.tests]
        if PROGRAMS[name][2] == "check":
            passed = [all(passed)]
        if passed != native[name]:
            messages = [test.message for test in verdict.tests if test.message]
            found[name] = {"natively": native[name], "here": passed, "messages": messages}
    return found


def test_programs_are_many_and_honest(native):
    assert len(PROGRAMS) >= 300
    assert sum(1 if type(answer) is str else len(answer) for answer in native.values()) >= 1250
    assert {name: answer for name, answer in native.items() if type(answer) is str} == {}
    right = [answer for answer in native.values() if all(answer)]
    assert len(right) >= 0.9 * len(native)  # the others have tests that a right sandbox must fail


def test_differences_are_those_of_the_guide(native, verdicts):
    found = differences(native, verdicts)
    listed = [line.split("`")[1] for line in GUIDE.read_text().splitlines() if line.startswith("| `")]
    listed = [name for name in listed if name in PROGRAMS]
    assert {name: found[name] for name in found if name not in listed} == {}
    assert [name for name in listed if name not in found] == []
    assert len(listed) < 20


def test_the_examples_of_the_guide_run():
    for example in GUIDE.read_text().split("```python\n")[1:]:
        exec(compile(example.split("```")[0], str(GUIDE), "exec"), {})
