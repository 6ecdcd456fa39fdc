"""The first check that a solution fails."""

import pytest

from marcog_trl.execution import CodeExecutor, Job, Verdict
from marcog_trl.problems import solution_job
from marcog_trl.rewards.failures import FAILURES, failure_kind


PROBLEM = {"prompt": "Write f.", "entry_point": "f", "test": ["assert f(1) == 1"], "test_format": "asserts"}
UNUSABLE = Job("def f(x):\n    return x", ["import nowhere\nassert f(1) == 1"], entry_point="f")
SOLUTIONS = {
    "no_code": "I would rather not.",
    "syntax": "def f(x):\n    return (x",
    "wrong_name": "def g(x):\n    return x",
    "crash": "import nowhere\ndef f(x):\n    return x",
    "timeout": "def f(x):\n    while True: pass",
    "tests": "def f(x):\n    return x + 1",
    None: "def f(x):\n    return x",
}


@pytest.fixture(scope="module")
def verdicts():
    jobs = {kind: solution_job(PROBLEM, solution) for kind, solution in SOLUTIONS.items()} | {"unusable": UNUSABLE}
    with CodeExecutor(num_workers=1, timeout=1.0, isolation="best_effort") as executor:
        return dict(zip(jobs, zip(jobs.values(), executor.run(list(jobs.values())), strict=True), strict=True))


@pytest.mark.parametrize("kind", [*SOLUTIONS, "unusable"])
def test_each_kind(verdicts, kind):
    assert failure_kind(PROBLEM, SOLUTIONS.get(kind, UNUSABLE.code), *verdicts[kind]) == kind
    assert {*FAILURES, None} == {*verdicts}


def test_tests_that_cannot_be_run_are_not_the_fault_of_a_program(verdicts):
    job, verdict = verdicts["unusable"]
    assert verdict.unusable and "'nowhere', which is not installed" in verdict.message
    assert failure_kind(PROBLEM, "", job, verdict) == "unusable"
    assert not any(each.unusable for kind, (_, each) in verdicts.items() if kind != "unusable")


def test_a_program_without_an_entry_point_has_no_wrong_name():
    problem = {"prompt": "Print 1.", "test": [["", "1"]], "test_format": "stdio"}
    job = Job("print(2)", [("", "1")], "stdio")
    assert failure_kind(problem, "print(2)", job, Verdict("failed", 0, 1)) == "tests"
