"""Turns problems and solutions into jobs for the executor, and checks problems."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from marcog_trl.execution import Job, UnusableTests
from marcog_trl.execution.jobs import plan
from marcog_trl.execution.packages import fault_of_imports, importable
from marcog_trl.parsing.replies import code_in
from marcog_trl.problems.checkers import setup_of
from marcog_trl.problems.tests import tests_of


MOST_FAULTS, MOST_ROWS = 100, 5  # different faults that one error lists, and rows of each


def make_job(problem: Mapping[str, Any], code: str, **limits: Any) -> Job:
    """
    Make the job that runs the tests of a problem on a piece of code.

    Args:
        problem (`Mapping`): One dataset row.
        code (`str`): Complete source of the solution.
        **limits: Limits of the job: `timeout` for all tests and `test_timeout` for each, in seconds (by default the
            columns of these names, if the problem has them), and `memory_mb`, in MiB.

    Returns:
        [`Job`]: Ready for a `CodeExecutor`.

    Raises:
        ValueError: If the problem has no `test` or no `test_format`, or if its tests cannot be run.
    """
    if not problem.get("test"):
        raise ValueError(f"Problem {problem.get('task_id')!r} has test={problem.get('test')!r}. Set 'test'.")
    tests = tests_of(problem)
    if not problem.get("test_format"):
        raise ValueError(
            f"Problem {problem.get('task_id')!r} has test_format={problem.get('test_format')!r}. Set 'test_format'."
        )
    own = {name: problem[name] for name in ("timeout", "test_timeout") if problem.get(name) is not None}
    return Job(
        code=code,
        tests=tests.tests,
        test_format=tests.test_format,
        setup=setup_of(problem, tests.setup, tests.test_format),
        entry_point=tests.entry_point,
        **(own | limits),
    )


def solution_job(problem: Mapping[str, Any], solution: str) -> Job:
    """
    Make the job that runs the tests of a problem on a solution. Workflows and rewards both use it, so that rewards can reuse
    the verdicts of jobs that a workflow has executed. The columns `timeout` (for all tests) and `test_timeout` (for each),
    in seconds, go before the limits of the executor.

    Args:
        problem (`Mapping`): One dataset row.
        solution (`str`): The solution of a workflow, or a completion.

    Returns:
        `Job`: The job, with the code that [`~marcog_trl.parsing.replies.code_in`] finds.
    """
    job = make_job(problem, "")
    try:
        names = plan(job).exports
    except UnusableTests:  # the executor's verdict says why
        names = ()
    return replace(job, code=code_in(problem, solution, names=names))


def check_problems(
    name: str,
    problems: Iterable[Mapping[str, Any]],
    needed: Mapping[str, str],
    packages: Sequence[str] | None = (),
) -> None:
    """
    Check problems, and raise one error for all that cannot be used.

    Args:
        name (`str`): Name of the problems in the error, such as `"train_dataset"`.
        problems (`Iterable[Mapping]`): Dataset rows.
        needed (`Mapping[str, str]`): Columns that must not be empty → what needs them. With `"test"`, the tests must also
            be ones that can be run.
        packages (`Sequence[str]`, *optional*, defaults to `()`): The packages that tests may import, as in
            [`~marcog_trl.execution.CodeExecutor`]. With `None`, imports are not checked.

    Raises:
        ValueError: If a row lacks a column, its prompt is neither text nor chat messages, or its tests cannot be run.
    """
    list_faults(name, [(row.get("task_id"), i, fault_of(row, needed, packages)) for i, row in enumerate(problems)])


def list_faults(name: str, faults: Iterable[tuple[Any, int, str | None]]) -> None:
    """Raise an error that lists the faults of rows, given as `(task_id, index of the row, fault or None)`."""
    faults = list(faults)
    rows: dict[str, list[str]] = {}  # fault -> the rows that have it
    for task_id, i, fault in faults:
        if fault is not None:
            rows.setdefault(fault.rstrip("."), []).append(f"row {i}" if task_id is None else f"task_id {task_id!r}")
    if not rows:
        return
    if len(faults) > 1 and [len(found) for found in rows.values()] == [len(faults)]:
        raise ValueError(f"{name}: no problem can be used, since all have the same fault: {next(iter(rows))}.")
    count = sum(map(len, rows.values()))
    listed = [
        f"{', '.join(found[:MOST_ROWS])}{' and others' * (len(found) > MOST_ROWS)}: {fault}"
        for fault, found in rows.items()
    ]
    others = [f"and {len(listed) - MOST_FAULTS} more faults"] * (len(listed) > MOST_FAULTS)
    raise ValueError(
        f"{name}: {count} problem{'s' * (count > 1)} cannot be used: {'; '.join([*listed[:MOST_FAULTS], *others])}. Correct or drop "
        "these rows."
    )


def fault_of(
    problem: Mapping[str, Any], needed: Mapping[str, str], packages: Sequence[str] | None = None
) -> str | None:
    """Reason why a problem cannot be used, in one line; `None` if it can be used. See [`check_problems`]."""
    for column, reader in needed.items():
        if not problem.get(column) and not (column == "test_format" and problem.get("test")):
            return f"it has no {column!r}, which {reader} needs"
    fault = fault_of_prompt(problem["prompt"]) if "prompt" in needed else None
    if fault is None and "test" in needed:
        try:
            fault = _fault_of_tests(problem, needed, packages)
        except ValueError as error:
            fault = " ".join(str(error).split())
    return fault


def _fault_of_tests(
    problem: Mapping[str, Any], needed: Mapping[str, str], packages: Sequence[str] | None
) -> str | None:
    tests_of(problem)
    if not problem.get("test_format"):
        return f"it has no 'test_format', which {needed.get('test_format', needed['test'])} needs"
    job = make_job(problem, "")
    imports = plan(job).imports
    if packages is not None and (fault := fault_of_imports(imports, importable(tuple(packages)))) is not None:
        return fault
    if job.entry_point is None or job.test_format not in ("asserts", "unittest"):
        return None  # others pass the entry point to `check`, or have none
    name = job.entry_point.partition("(")[0]
    text = "\n".join([job.setup, *([job.tests] if isinstance(job.tests, str) else map(str, job.tests))])
    if re.search(rf"\b{re.escape(name)}\b", text):
        return None
    return f"its tests never use entry_point={name!r}: set it to the function that they call"


def fault_of_prompt(prompt: Any) -> str | None:
    """Reason why a prompt (text or chat messages) cannot be used; `None` if it can be used."""
    if isinstance(prompt, str):
        return None if prompt.strip() else f"its prompt={prompt!r} is blank"
    if not isinstance(prompt, list) or not prompt or not all(isinstance(message, Mapping) for message in prompt):
        return f"its prompt={prompt!r:.80} is neither text nor a list of chat messages"
    for i, message in enumerate(prompt):
        if not isinstance(message.get("role"), str):
            return f"its prompt[{i}]={message!r:.80} has no 'role'"
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            return f"its prompt[{i}]={message!r:.80} has no text as its 'content'"
    last = prompt[-1]
    if not isinstance(last.get("content"), str) or not last["content"].strip():
        return f"its last message {last!r:.80} is blank"
    return None
