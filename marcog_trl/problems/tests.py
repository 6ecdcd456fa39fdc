"""Reads the tests and the prompt of a problem: the format, the entry point, and helpers of the tests."""

from __future__ import annotations

import ast
import builtins
from collections.abc import Mapping
from io import StringIO
from typing import Any

from marcog_trl.execution import Tests, UnusableTests, read_tests
from marcog_trl.parsing.syntax import bound_names, combine, parse


GUESSED = ("test_format", "entry_point", "starter_code", "setup", "canonical_solution")
"""Columns of a problem that its prompt and its tests may tell."""


def tests_of(problem: Mapping[str, Any]) -> Tests:
    """The tests of a dataset row, as the executor runs them. Raises an `UnusableTests` as [`read_tests`] does."""
    columns = ("test", "test_format", "entry_point", "setup")
    return read_tests(*(problem.get(column) for column in columns))


def complete(problem: Mapping[str, Any]) -> dict[str, Any]:
    """
    A dataset row with the common columns that it lacks.

    Args:
        problem (`Mapping`): A row with `prompt`, and with `test` if it has tests.

    Returns:
        `dict`: The row with the columns [`GUESSED`], which are empty where neither the prompt nor the tests tell, and with its
        asserts as a list. Tests that cannot be read stay as they are, and [`check_problems`] says what is wrong with them.
    """
    given, problem = problem, dict(problem)
    prompt = problem.get("prompt", "")
    guessed = dict.fromkeys(GUESSED, "")
    if problem.get("test"):
        try:
            tests = tests_of(problem)
        except UnusableTests:
            return guessed | {name: value for name, value in problem.items() if value or name not in GUESSED}
        guessed |= {"test_format": tests.test_format, "entry_point": tests.entry_point or ""}
        if tests.test_format == "asserts":
            problem["test"] = list(tests.tests)
            reference = problem.get("canonical_solution") or prompt
            guessed["entry_point"] = tests.entry_point or called_name(str(tests.tests[0]), reference)
    entry_point = problem.get("entry_point") or guessed["entry_point"]
    stub = stub_line(prompt, entry_point)
    if stub:
        guessed |= {"starter_code": prompt, "setup": helpers_before(prompt, stub)}
    completed = problem | {name: problem.get(name) or guessed[name] for name in GUESSED}
    if problem.get("test"):  # the tests may bring helpers of their own
        completed["setup"] = tests_of({**given, "setup": completed["setup"]}).setup
    return completed


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
    tree = parse(prompt) if isinstance(prompt, str) else None
    body = tree.body if tree else ()
    functions = (node for node in body if isinstance(node, ast.FunctionDef) and node.name == entry_point)
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


def read_problem(source: str, tests: str | None = None) -> dict[str, Any]:
    """
    Read a problem from Python source.

    Args:
        source (`str`): Imports, helpers, then the function or class to write, then asserts that test it.
        tests (`str`, *optional*): Source of tests, if `source` has none.

    Returns:
        `dict`: `prompt`, `entry_point`, and, if there are tests, `test`, `test_format` and `setup`.

    Raises:
        ValueError: If `source` or `tests` is not Python, `source` defines no function or class, or both have tests.
    """
    example = "Write 'def f(x):' with a docstring in the next line, for example."
    body = _parse_python(source, "the problem is", example)
    asked = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    if not asked:
        raise ValueError(f"the problem defines no function. {example}")
    end = asked[-1].end_lineno or 0
    lines = StringIO(source, newline=None).readlines()  # see `helpers_before`
    below = "".join(lines[end:]) if body[-1] is not asked[-1] else ""  # comments are not tests
    problem: dict[str, Any] = {"prompt": "".join(lines[:end]).rstrip() + "\n", "entry_point": asked[-1].name}
    if below.strip() and tests is not None:
        raise ValueError("the problem has tests after its function, and --tests has others. Use one of them.")
    given, tests = tests is not None, below if tests is None else tests
    statements = _parse_python(tests, "the tests are", "Write 'assert f(1) == 2', for example.")
    if given and not statements:
        raise ValueError("the tests are empty. Write 'assert f(1) == 2', for example, or leave out --tests.")
    if statements:
        first_line = min([asked[-1].lineno, *(decorator.lineno for decorator in asked[-1].decorator_list)])
        setup = helpers_before(source, first_line)
        read = read_tests(tests, entry_point=asked[-1].name, setup=setup)
        as_list = list(read.tests) if isinstance(read.tests, tuple) else read.tests
        problem |= {"test": as_list, "test_format": read.test_format, "setup": read.setup}
    return problem


def as_problem(prompt: str) -> dict[str, Any]:
    """A prompt as a problem: what [`read_problem`] reads, if it is Python that defines a function, or the prompt alone."""
    tree = parse(prompt)
    is_code = tree is not None and any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in tree.body)
    return read_problem(prompt) if is_code else {"prompt": prompt}


def _parse_python(source: str, what: str, instead: str) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{what} not Python: {error}. {instead}") from None
