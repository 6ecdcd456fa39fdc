"""Reads the tests and the prompt of a problem: the format, the entry point, and helpers of the tests."""

from __future__ import annotations

import ast
import builtins
from io import StringIO
from typing import Any

from marcog_trl.execution.analysis import split_asserts
from marcog_trl.parsing.syntax import bound_names, combine, find, parse, top_level


def cut_asserts(text: str) -> list[str]:
    """Cut a text of asserts into tests. A text that does not parse is one test."""
    return split_asserts(text) if parse(text) is not None else [text]


def guess_test_format(test: Any) -> str:
    """Guess the format of tests. For invalid tests, return a format for which [`check_problems`] says what is wrong."""
    if isinstance(test, str):
        return "unittest" if "TestCase" in test else _format_of_text(test)
    return "stdio" if isinstance(test, list) and test and isinstance(test[0], list | tuple) else "asserts"


def with_test_format(problem: dict[str, Any]) -> dict[str, Any]:
    """A dataset row with the format of its tests, which is guessed if it is missing."""
    test = problem.get("test")
    if not test or problem.get("test_format"):
        return problem
    test_format = guess_test_format(test)
    test = cut_asserts(test) if test_format == "asserts" and isinstance(test, str) else test
    return {**problem, "test": test, "test_format": test_format}


def _format_of_text(test: str) -> str:
    tree = parse(test)
    if tree is None or find(tree, "check") is not None:
        return "check"
    return "asserts" if any(isinstance(node, ast.Assert) for node in top_level(tree)) else "check"


def helpers_before(prompt: str, stub: int) -> str:
    """
    The code of a prompt before its stub, for the tests to use, without classes and variables that depend on them: the tests
    must use the classes of the program, which has the prompt's classes too.
    """
    # Not `splitlines`, which also splits at characters that do not end a line of Python
    lines = StringIO(prompt, newline=None).readlines()[: stub - 1]
    left_out: set[str] = set()
    for node in ast.parse("".join(lines)).body:
        used = {leaf.id for leaf in ast.walk(node) if isinstance(leaf, ast.Name)}
        if isinstance(node, ast.ClassDef) or (isinstance(node, ast.Assign | ast.AnnAssign) and used & left_out):
            left_out |= {*bound_names(node)}
            decorators = node.decorator_list if isinstance(node, ast.ClassDef) else []
            first = min([node.lineno, *(decorator.lineno for decorator in decorators)]) - 1
            last = node.end_lineno or node.lineno
            lines[first:last] = [""] * (last - first)
    # In tests, a class of the program is represented by an object that is not a type: do not evaluate annotations
    return combine("from __future__ import annotations", "".join(lines)) if left_out else "".join(lines)


def called_name(test: str, solution: Any) -> str:
    """Name of the first function that an assert calls and that is not a builtin, or that the solution redefines."""
    call = first_call(test, solution if isinstance(solution, str) else "")
    return "" if call is None else call.func.id  # type: ignore[attr-defined]


def stub_line(prompt: Any, entry_point: str) -> int:
    """Line, from 1, where the entry point begins in a prompt that is source code (as in HumanEval); 0 if there is none."""
    try:
        tree = ast.parse(prompt)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return 0
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == entry_point)
    return next((min([node.lineno, *(d.lineno for d in node.decorator_list)]) for node in functions), 0)


def first_call(test: str, solution: str = "") -> ast.Call | None:
    """
    The first call, in a test, of a function that is neither a builtin nor defined by the test. If there is none, the first
    call of a function that the reference solution defines: in MBPP, some have the name of a builtin, such as `sum`.
    """
    tree = parse(test)
    if tree is None:
        return None
    own = {name for node in tree.body for name in bound_names(node)}
    found = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    calls = [(call.func.id, call) for call in found if call.func.id not in own]  # type: ignore[attr-defined]
    meant = [call for name, call in calls if name not in vars(builtins)]
    if not meant and calls:
        reference = parse(solution)
        defined = {name for node in (reference.body if reference else ()) for name in bound_names(node)}
        meant = [call for name, call in calls if name in defined]
    return meant[0] if meant else None
