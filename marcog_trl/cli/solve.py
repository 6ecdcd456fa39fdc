"""
Solves a problem with a saved team:

    marcog-trl solve --team outputs/quickstart --problem recipes/examples/problem.py

The problem is a Python file whose last function has a docstring and no body. Asserts after the function are its tests. Pass other
tests, such as `check(candidate)` or unittest classes, with `--tests tests.py`. The code is printed to standard output, and the
results of the tests to standard error. The exit status is 1 if a test fails, or no reply has code.

A team with a workflow of its own, whose file is saved with it; or with a copy of that file:

    marcog-trl solve --team outputs/debate --problem problem.py --trust_remote_code
    marcog-trl solve --team outputs/debate --problem problem.py --workflow my_team.py:Debate
"""

from __future__ import annotations

import ast
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from marcog_trl.cli.arguments import PlayingTeamArguments
from marcog_trl.cli.console import RunStatus, one_line
from marcog_trl.cli.parsing import Parser
from marcog_trl.cli.progress import hide_bars_of_libraries
from marcog_trl.endpoints import EndpointError
from marcog_trl.execution.__main__ import read_file
from marcog_trl.execution.analysis import guess_format, split_asserts
from marcog_trl.problems.tests import helpers_before
from marcog_trl.team.team import Answer


def read_problem(source: str, tests: str | None = None) -> dict[str, Any]:
    """
    Reads a problem from Python source.

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
    lines = source.splitlines(keepends=True)
    below = "".join(lines[end:]) if body[-1] is not asked[-1] else ""  # comments are not tests
    problem: dict[str, Any] = {"prompt": "".join(lines[:end]).rstrip() + "\n", "entry_point": asked[-1].name}
    if below.strip() and tests is not None:
        raise ValueError("the problem has tests after its function, and --tests has others. Use one of them.")
    given, tests = tests is not None, below if tests is None else tests
    statements = _parse_python(tests, "the tests are", "Write 'assert f(1) == 2', for example.")
    if given and not statements:
        raise ValueError("the tests are empty. Write 'assert f(1) == 2', for example, or leave out --tests.")
    if statements:
        kind = guess_format(tests)
        problem |= {"test": split_asserts(tests) if kind == "asserts" else tests, "test_format": kind}
        first_line = min([asked[-1].lineno, *(decorator.lineno for decorator in asked[-1].decorator_list)])
        problem["setup"] = helpers_before(source, first_line)
    return problem


def _parse_python(source: str, what: str, instead: str) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{what} not Python: {error}. {instead}") from None


@dataclass(kw_only=True)
class SolveArguments(PlayingTeamArguments):
    """Arguments of `marcog-trl solve`; see its `--help`."""

    problem: str = field(metadata={"help": "Python file with the function to write."})
    tests: str | None = field(default=None, metadata={"help": "Python file with tests."})
    sample: bool = field(default=False, metadata={"help": "Whether to sample instead of decoding greedily."})
    messages: bool = field(
        default=False, metadata={"help": "Whether to print every agent's replies to standard error."}
    )


def solve(args: SolveArguments) -> Answer:
    """Loads the team and solves the problem."""
    problem = read_problem(read_file(Path(args.problem)), read_file(Path(args.tests)) if args.tests else None)
    team = args.load_team()
    answer = team.solve(problem, greedy=not args.sample)
    team.close()
    return answer


def show(answer: Answer, messages: bool) -> int:
    """
    Prints the code to standard output and the rest to standard error. Returns the exit status: 1 if a test failed, or there is
    no code.
    """
    if messages:
        for message in answer.messages:
            print(f"--- {message['agent']}, turn {message['turn']}\n{message['reply'].strip()}", file=sys.stderr)
    if answer.code:
        print(answer.code)
    else:
        print("No reply has code. Add --messages to see the replies.", file=sys.stderr)
    if answer.verdict is None:
        return 0 if answer.code else 1
    for number, result in enumerate(answer.verdict.tests, start=1):
        print(f"{number:4d}  {result.status:8s} {result.message}".rstrip(), file=sys.stderr)
    verdict = answer.verdict
    print(f"{verdict.status}: {verdict.passed} of {verdict.total} tests passed", file=sys.stderr)
    return 0 if answer.verdict.status == "passed" else 1


def main(argv: Sequence[str], status: RunStatus) -> int:
    """Runs `marcog-trl solve` with these flags. Returns the exit status."""
    hide_bars_of_libraries()
    with one_line(ValueError, OSError, EndpointError):
        (args,) = Parser(SolveArguments, prog="marcog-trl solve", description=__doc__).parse(argv)
        with contextlib.redirect_stdout(sys.stderr):  # libraries print there too
            answer = solve(args)
    return show(answer, args.messages)
