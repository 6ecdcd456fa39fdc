"""
Lets a saved team solve a problem:

    python -m marcog_trl solve --team outputs/quickstart --problem problem.py

The problem is a Python file that ends in the function to write, with its docstring and no body; asserts after it are its
tests. Other tests, also `check(candidate)` or unittest classes, come with `--tests tests.py`.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from marcog_trl.execution.__main__ import OneLineParser, read_file
from marcog_trl.execution.formats import guess_format, split_asserts
from marcog_trl.execution.isolation import ISOLATION_LEVELS
from marcog_trl.problems.loading import helpers_before


if TYPE_CHECKING:
    from marcog_trl.team.team import Answer


def read_problem(source: str, tests: str | None = None) -> dict[str, Any]:
    """
    The problem that a Python file states.

    Args:
        source (`str`): Imports, helpers, and at last the function or class to write; asserts after it are tests.
        tests (`str`, *optional*): Source of other tests.

    Returns:
        `dict`: `prompt`, `entry_point`, and, if there are tests, `test`, `test_format` and `setup`.

    Raises:
        ValueError: If problem or tests are not Python, or the problem defines nothing to write, or has tests although others
            are given.
    """
    example = "Write 'def f(x):' with a docstring in the next line, for example."
    body = _parse(source, "the problem is", example)
    asked = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    if not asked:
        raise ValueError(f"the problem defines no function. {example}")
    end = asked[-1].end_lineno or 0
    lines = source.splitlines(keepends=True)
    below = "".join(lines[end:]) if body[-1] is not asked[-1] else ""  # a comment is no test
    problem: dict[str, Any] = {"prompt": "".join(lines[:end]).rstrip() + "\n", "entry_point": asked[-1].name}
    if below.strip() and tests is not None:
        raise ValueError("the problem has tests after its function, and --tests has others. Use one of them.")
    stated = _parse(below if tests is None else tests, "the tests are", "Write 'assert f(1) == 2', for example.")
    if tests is not None and not stated:
        raise ValueError("the tests are empty. Write 'assert f(1) == 2', for example, or leave out --tests.")
    if stated:
        tests = below if tests is None else tests
        kind = guess_format(tests)
        problem |= {"test": split_asserts(tests) if kind == "asserts" else tests, "test_format": kind}
        first_line = min([asked[-1].lineno, *(decorator.lineno for decorator in asked[-1].decorator_list)])
        problem["setup"] = helpers_before(source, first_line)
    return problem


def _parse(source: str, what: str, instead: str) -> list[ast.stmt]:
    try:
        return ast.parse(source).body
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"{what} not Python: {error}. {instead}") from None


def solve(args: argparse.Namespace) -> Answer:
    """What a team makes of the problem."""
    problem = read_problem(read_file(args.problem), read_file(args.tests) if args.tests else None)
    from marcog_trl.team.team import Team
    from marcog_trl.trainers.saved import agent_settings

    settings = agent_settings(args.num_agents, args.agents)
    team = Team.from_pretrained(args.team, base_model=args.base_model, isolation=args.isolation, **settings)
    answer = team.solve(problem, greedy=not args.sample)
    team.close()
    return answer


def show(answer: Answer, messages: bool) -> int:
    """Prints an answer: the code to standard output, all else to standard error; the exit code says whether it is right."""
    if messages:
        for message in answer.messages:
            print(f"--- {message['agent']}, turn {message['turn']}\n{message['reply'].strip()}", file=sys.stderr)
    print(answer.code)
    if answer.verdict is None:
        return 0
    for number, result in enumerate(answer.verdict.tests, start=1):
        print(f"{number:4d}  {result.status:8s} {result.message}".rstrip(), file=sys.stderr)
    said = f"{answer.verdict.status}: {answer.verdict.passed} of {answer.verdict.total} tests passed"
    print(said, file=sys.stderr)
    return 0 if answer.verdict.status == "passed" else 1


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m marcog_trl", description="Works with saved teams.")
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser(
        "solve", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, help="solves a problem"
    )
    command.add_argument("--team", required=True, help="folder of a saved team, or a repository of the Hub")
    command.add_argument("--problem", type=Path, required=True, help="Python file with the function to write")
    command.add_argument("--tests", type=Path, help="Python file with tests")
    command.add_argument("--base_model", help="where the team's base model is, if not where it was")
    command.add_argument("--num_agents", type=int, help="size of the team, if not that which was trained")
    command.add_argument(
        "--agents", type=Path, help="YAML file: a list of all agents, or a mapping of names to role texts"
    )
    command.add_argument("--sample", action="store_true", help="sample in place of taking what is most likely")
    command.add_argument("--messages", action="store_true", help="print what every agent wrote, to standard error")
    command.add_argument("--isolation", choices=ISOLATION_LEVELS, default="strict")
    args = parser.parse_args(argv)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # libraries print there too
            answer = solve(args)
    except (ValueError, OSError) as error:
        parser.exit(2, f"error: {' '.join(str(error).split())}\n")
    except KeyboardInterrupt:
        parser.exit(130, "Interrupted. Nothing was written.\n")
    return show(answer, args.messages)


if __name__ == "__main__":
    sys.exit(main())
