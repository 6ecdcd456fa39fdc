"""Feedback for agents between two turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

from marcog_trl.execution import Job, TestResult, Verdict


VisibleTests = int | None

FeedbackMode = Literal["level_feedback", "level_passed", "passed", "plain", "expert_edits"]
FEEDBACK_MODES = get_args(FeedbackMode)

Feedback = Callable[[Mapping[str, Any], str, str, str], str]
"""Custom feedback: `(problem, name of the agent, its reply, results of the visible tests) -> text for the agent`."""


class Level(NamedTuple):
    """One level of feedback: its name, what was found, and whether it passed."""

    name: str
    finding: str
    passed: bool


def visible_results(job: Job, verdict: Verdict, visible_tests: VisibleTests = 1) -> str:
    """
    Describe the results of the tests that feedback may show.

    Args:
        job (`Job`): The job that was executed.
        verdict (`Verdict`): Its verdict.
        visible_tests (`int`, *optional*, defaults to `1`): How many tests to show. A negative number counts from the end;
            `0` shows none, and `None` all.

    Returns:
        `str`: "Tests: k of n passed", counting the visible tests, and one line per failed test.
    """
    if visible_tests == 0:
        return "Tests: not shown"
    if verdict.status == "infrastructure":
        return "Tests: could not be run"
    results = shown_tests(verdict, visible_tests)
    failed = [(i, result) for i, result in results if result.status != "passed"]
    lines = [f"Tests: {len(results) - len(failed)} of {len(results)} passed"]
    for i, result in failed:
        test = ""
        if job.test_format == "asserts":
            test = f"{str(job.tests[i]).strip()}: "
        elif job.test_format == "stdio":
            test = f"input {job.tests[i][0]!r}, output {job.tests[i][1]!r}: "
        lines.append(f"{test}{result.message or result.status}")
    return "\n".join(dict.fromkeys(lines))


def shown_tests(verdict: Verdict, visible_tests: VisibleTests) -> list[tuple[int, TestResult]]:
    """The tests that feedback may show, with their indices."""
    results = list(enumerate(verdict.tests))
    if visible_tests is None:
        return results
    return results[:visible_tests] if visible_tests >= 0 else results[visible_tests:]
