"""Results are shown as far as they may be."""

import pytest

from marcog_trl.execution import Job, TestResult, Verdict
from marcog_trl.workflows.feedback import visible_results


RESULTS = (TestResult("passed"), TestResult("failed", "AssertionError"), TestResult("timeout", "over 10 s"))


@pytest.mark.parametrize(
    ("visible_tests", "expected"),
    [
        (1, ["Tests: 1 of 1 passed"]),
        (2, ["Tests: 1 of 2 passed", "assert total([]) == 0: AssertionError"]),
        (-1, ["Tests: 0 of 1 passed", "assert total([5]) == 10: over 10 s"]),
        *((shown, ["Tests: 1 of 3 passed", "assert total([]) == 0: AssertionError", "assert total([5]) == 10: over 10 s"])
          for shown in (None, 9, -9)),
        (0, ["Tests: not shown"]),
    ],
)  # fmt: skip
def test_visible_tests(visible_tests, expected):
    job = Job("", ["assert total([1, 2]) == 6", "assert total([]) == 0", "assert total([5]) == 10"])
    verdict = Verdict("timeout", 1, 3, RESULTS, "AssertionError")
    assert visible_results(job, verdict, visible_tests).split("\n") == expected


def test_visible_tests_of_other_formats():
    job = Job("print(1)", [["1\n", "2\n"]], "stdio")
    verdict = Verdict("failed", 0, 1, (TestResult("failed", "wrong output"),))
    assert visible_results(job, verdict).endswith("input '1\\n', output '2\\n': wrong output")
    job = Job("def f(): pass", "def check(candidate):\n    assert candidate() == 1", "check", entry_point="f")
    verdict = Verdict("failed", 0, 1, (TestResult("failed", "AssertionError"),))
    assert visible_results(job, verdict) == "Tests: 0 of 1 passed\nAssertionError"
    assert visible_results(job, Verdict("infrastructure", 0, 1)) == "Tests: could not be run"
