"""How the standard output of programs is compared: word by word, with a tolerance for numbers, or by a function of the problem."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any


_WITHIN = """
def check_output(stdin, expected, output):
    def close(word, wanted):
        try:
            number, aim = float(word), float(wanted)
        except ValueError:
            return False
        return abs(number - aim) <= {tolerance!r} * max(1.0, abs(aim))

    words, wanted = output.split(), expected.split()
    return len(words) == len(wanted) and all(a == b or close(a, b) for a, b in zip(words, wanted))
"""
_CHECKED = """
def check_output(stdin, expected, output):
    return check(stdin, output, expected)
"""
_EXAMPLE = "Write 'def check(input, output, expected):' with a return of True or False."


def setup_of(problem: Mapping[str, Any], setup: str, test_format: str) -> str:
    """
    The set-up of the tests, with the comparison of outputs that the columns `checker` and `float_tolerance` ask for.

    Args:
        problem (`Mapping`): One dataset row.
        setup (`str`): The set-up of its tests.
        test_format (`str`): Their format.

    Returns:
        `str`: The set-up. It runs outside of the program's process.

    Raises:
        ValueError: If both columns are set, the tests are not `stdio`, or a value cannot be used.
    """
    checker, tolerance = problem.get("checker"), problem.get("float_tolerance")
    if not checker and not tolerance:
        return setup
    name = "checker" if checker else "float_tolerance"
    if test_format != "stdio":
        raise ValueError(f"{name} compares standard output, but the tests are {test_format!r}. Leave it out")
    if checker and tolerance:
        raise ValueError("it has checker and float_tolerance. Set one of them")
    if checker:
        _check(checker)
        return f"{setup}\n{checker}\n{_CHECKED}"
    if isinstance(tolerance, bool) or not isinstance(tolerance, int | float) or not 0 < tolerance < 1:
        raise ValueError(f"float_tolerance={tolerance!r} must be a number between 0 and 1, such as 1e-6")
    return setup + _WITHIN.format(tolerance=float(tolerance))


def _check(checker: Any) -> None:
    try:
        body = ast.parse(checker).body
    except (SyntaxError, ValueError, TypeError) as error:
        raise ValueError(f"checker={checker!r:.60} is not Python: {error}. {_EXAMPLE}") from None
    found = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == "check"]
    if not found or len(found[-1].args.args) != 3:
        raise ValueError(f"checker={checker!r:.60} defines no function check of three arguments. {_EXAMPLE}")
