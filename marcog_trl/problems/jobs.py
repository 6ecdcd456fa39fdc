"""What is to be executed for one problem and one piece of code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from marcog_trl.execution import Job


def make_job(problem: Mapping[str, Any], code: str, **limits: Any) -> Job:
    """
    The job that runs a problem's tests on a piece of code.

    Args:
        problem (`Mapping`): One row of a problem set.
        code (`str`): The solution's source, complete.
        **limits: Limits of the job: `timeout` of all tests together and `test_timeout` of each, in seconds (by default the
            problem's own, where it has such columns), `memory_mb` in MiB.

    Returns:
        [`Job`]: Ready for a `CodeExecutor`.

    Raises:
        ValueError: If the problem has no tests.
    """
    if not problem.get("test"):
        raise ValueError(f"problem {problem.get('task_id')!r} has test={problem.get('test')!r}; give it a test")
    own = {name: float(problem[name]) for name in ("timeout", "test_timeout") if problem.get(name) is not None}
    return Job(
        code=code,
        tests=problem["test"],
        test_format=problem["test_format"],
        setup=problem.get("setup") or "",
        entry_point=problem.get("entry_point") or None,
        **(own | limits),
    )
