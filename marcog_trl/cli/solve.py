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

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from marcog_trl.cli.arguments import PlayingTeamArguments
from marcog_trl.cli.console import RunStatus, one_line
from marcog_trl.cli.parsing import Parser
from marcog_trl.cli.progress import hide_bars_of_libraries
from marcog_trl.endpoints import EndpointError
from marcog_trl.execution.__main__ import read_file
from marcog_trl.problems.tests import read_problem
from marcog_trl.rollout.player import WorkflowError
from marcog_trl.team.team import Answer


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
        print("No reply has code." + " Add --messages to see the replies." * (not messages), file=sys.stderr)
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
    with one_line(ValueError, OSError, EndpointError, WorkflowError):
        (args,) = Parser(SolveArguments, prog="marcog-trl solve", description=__doc__).parse(argv)
        with contextlib.redirect_stdout(sys.stderr):  # libraries print there too
            answer = solve(args)
    return show(answer, args.messages)
