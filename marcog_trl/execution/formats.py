"""Reads a file of tests: its format, and the asserts in it."""

import ast
from io import StringIO

from .jobs import TestFormat


def split_asserts(source: str) -> list[str]:
    """
    Cuts a module into tests: each ends with an assert and begins after the one before.

    Args:
        source (`str`): Python source.

    Returns:
        `list[str]`: the tests in order; statements after the last assert are a test of their own.
    """
    lines, tests, start = StringIO(source, newline=None).read().split("\n"), [], 0
    body = ast.parse(source).body
    for k, node in enumerate(body):
        if isinstance(node, ast.Assert) or k == len(body) - 1:
            end = node.end_lineno or len(lines)
            tests.append("\n".join(lines[start:end]))
            start = end
    return tests


def guess_format(source: str) -> TestFormat:
    """`check` if the module defines a function of that name, `unittest` if it has classes with test methods, else
    `asserts`."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == "check":
            return "check"
        if isinstance(node, ast.ClassDef) and any(getattr(item, "name", "").startswith("test") for item in node.body):
            return "unittest"
    return "asserts"
