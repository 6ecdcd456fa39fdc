"""What is to be executed for one problem and one piece of code."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from marcog_trl.execution import Job


def make_job(problem: Mapping[str, Any], code: str, **limits: Any) -> Job:
    """
    The job that runs a problem's tests on a piece of code. The imports and helpers that come before the entry point in the
    problem's `starter_code` are put before the code. Code that parses only as a continuation of `starter_code` (a
    function's body) is joined to it.

    Args:
        problem (`Mapping`): One row of a problem set.
        code (`str`): The solution's source.
        **limits: Limits of the job: `timeout` in seconds, `memory_mb` in MiB.

    Returns:
        [`Job`]: Ready for a `CodeExecutor`.

    Raises:
        ValueError: If the problem has no tests.
    """
    if not problem.get("test"):
        raise ValueError(f"problem {problem.get('task_id')!r} has test={problem.get('test')!r}; give it a test")
    starter_code, entry_point = problem.get("starter_code") or "", problem.get("entry_point") or None
    if starter_code and parse(code) is None and parse(starter_code + code) is not None:
        code = starter_code + code
    elif "from __future__" not in code:  # which must come first
        code = preamble(starter_code, entry_point) + code
    return Job(
        code=code,
        tests=problem["test"],
        test_format=problem["test_format"],
        setup=problem.get("setup") or "",
        entry_point=entry_point,
        **limits,
    )


def parse(code: str) -> ast.Module | None:
    """The syntax tree of some source, None if it has none."""
    try:
        return ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def preamble(starter_code: str, entry_point: str | None) -> str:
    """
    Imports and helpers that a problem gives before the function that it asks for.

    Args:
        starter_code (`str`): Source that ends with the signature and docstring of the entry point.
        entry_point (`str` or `None`): Name of the function that is asked for.

    Returns:
        `str`: The lines before the entry point, empty where there are none.
    """
    tree = parse(starter_code)
    for node in tree.body if tree else ():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and node.name == entry_point:
            first = min((decorator.lineno for decorator in node.decorator_list), default=node.lineno)
            return "".join(starter_code.splitlines(keepends=True)[: first - 1])
    return ""
