"""The reason why a solution fails: the first check that it does not pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marcog_trl.execution import Job, Verdict
from marcog_trl.parsing.predicates import defines
from marcog_trl.parsing.replies import error_in


FAILURES = {
    "unusable": "tests that cannot be run",
    "no_code": "no code",
    "syntax": "syntax error",
    "wrong_name": "wrong function name",
    "crash": "crash",
    "timeout": "timeout",
    "tests": "wrong result",
}
"""Kinds of failure in the order of the checks, and what people read. A crash is code that cannot be loaded, or that dies."""


def failure_kind(problem: Mapping[str, Any], solution: str, job: Job, verdict: Verdict) -> str | None:
    """
    Find the first check that a solution fails.

    Args:
        problem (`Mapping`): One dataset row.
        solution (`str`): The solution.
        job ([`Job`]): The job of the solution, see [`~marcog_trl.problems.solution_job`].
        verdict ([`Verdict`]): The verdict on the job, from code that was executed.

    Returns:
        `str` or `None`: A key of `FAILURES`; `None` if all tests pass.
    """
    if verdict.status == "passed":
        return None
    if verdict.unusable:
        return "unusable"
    if not job.code:
        return "no_code" if error_in(problem, solution) is None else "syntax"
    if verdict.status != "error":
        return "timeout" if verdict.status == "timeout" else "tests"
    return "crash" if job.entry_point is None or defines(job.code, job.entry_point) else "wrong_name"
