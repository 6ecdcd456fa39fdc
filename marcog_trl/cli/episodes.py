"""
Shows the episodes of a training or of an evaluation.

    marcog-trl episodes outputs/run
    marcog-trl episodes outputs/run --step 20 --status failed --sort reward
    marcog-trl episodes evaluation.parquet --problem HumanEval/3

The last row of the table, in full, or that of another number:

    marcog-trl episodes outputs/run --show 7

What changed on one problem between two steps:

    marcog-trl episodes outputs/run --problem builtin/12 --diff 1 40
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from marcog_trl.checks import NOT_NEGATIVE, check_number, nearest
from marcog_trl.cli.console import RunStatus, one_line
from marcog_trl.report.episode_files import read_rows
from marcog_trl.report.traces import episode_trace, verdict_of


_SORTS = ("step", "problem", "reward", "tests_passed", "tokens")


class _Parser(argparse.ArgumentParser):
    """Errors are `ValueError`s that name the nearest flag. TRL's parser, which the other commands use, takes a second to import."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        args, rest = self.parse_known_args(argv)
        if rest:
            near = nearest(rest[0], self._option_string_actions)
            raise ValueError(f"unknown flag {rest[0]}." + (near and f" Did you mean {near}?"))
        return args


def read_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """
    Reads the flags of `marcog-trl episodes`.

    Raises:
        ValueError: If a flag is unknown, or its value is wrong.
    """
    parser = _Parser(
        prog="marcog-trl episodes",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--run", required=True, help="Output folder of a training, or the .parquet file of an evaluation.")
    add("--step", type=int, help="Only episodes of this step.")
    add("--split", help="Only 'train' or 'eval'; of an evaluation, 'greedy' or 'sampled'.")
    add("--problem", help="Only problems with this task_id, or this text in the prompt.")
    add("--agent", help="Only episodes in which this agent replied.")
    add("--status", help="Only this verdict: 'passed', 'failed', 'error', ...")
    add("--min_reward", type=float, help="Only episodes that earned at least this.")
    add("--max_reward", type=float, help="Only episodes that earned at most this.")
    add("--sort", default="step", help=f"One of {', '.join(_SORTS)}. Default: step.")
    add("--limit", type=int, default=30, help="Number of rows, the last ones. 0 shows all. Default: 30.")
    add("--show", type=int, help="Number of the episode to show in full.")
    add("--diff", type=int, nargs="+", help="Two steps whose solutions of --problem are compared.")
    args = parser.parse(argv)
    check_number("limit", args.limit, NOT_NEGATIVE, whole=True, default=30)
    if args.sort not in _SORTS:
        raise ValueError(f"sort={args.sort!r} is unknown. Use one of {', '.join(_SORTS)}.")
    if args.diff is not None and (len(args.diff) != 2 or args.problem is None):
        raise ValueError("--diff compares two steps of one problem. Set --problem and --diff 1 40, for example.")
    return args


def select(args: argparse.Namespace) -> list[tuple[int, dict[str, Any]]]:
    """The episodes that the flags ask for, with their numbers among all of the run."""
    rows = list(enumerate(read_rows(args.run), start=1))
    known = {
        "step": {row["step"] for _, row in rows},
        "split": {row["split"] for _, row in rows},
        "status": {row["status"] for _, row in rows},
        "agent": {message["agent"] for _, row in rows for message in row["messages"]},
    }
    for name, values in known.items():
        asked = getattr(args, name)
        if asked is not None and asked not in values:
            raise ValueError(
                f"No episode has {name}={asked!r}. There are {', '.join(map(str, sorted(values, key=str)))}."
            )
    found = [
        (number, row)
        for number, row in rows
        if args.step in (None, row["step"])
        and args.split in (None, row["split"])
        and args.status in (None, row["status"])
        and (args.problem is None or args.problem == row["task_id"] or args.problem in row["problem"])
        and (args.agent is None or any(message["agent"] == args.agent for message in row["messages"]))
        and (args.min_reward is None or (row["reward"] is not None and row["reward"] >= args.min_reward))
        and (args.max_reward is None or (row["reward"] is not None and row["reward"] <= args.max_reward))
    ]
    if not found:
        raise ValueError("No episode fits the flags. Leave some of them out.")
    keys = {
        "problem": lambda row: row["task_id"],
        "reward": lambda row: -1e9 if row["reward"] is None else row["reward"],
        "tests_passed": lambda row: row["tests_passed"] or 0,
        "tokens": lambda row: sum(message["tokens"] for message in row["messages"]),
    }
    return found if args.sort == "step" else sorted(found, key=lambda pair: keys[args.sort](pair[1]))


def table(rows: Sequence[tuple[int, dict[str, Any]]]) -> Table:
    """One line per episode."""
    shown = Table("number", "step", "split", "problem", "verdict", "tests", "reward", "tokens", "solution")
    for number, row in rows:
        tokens = " ".join(f"{message['agent']} {message['tokens']}" for message in row["messages"])
        first = next((line for line in row["solution"].splitlines() if line.strip(" `") not in ("", "python")), "")
        cells = (
            str(number),
            str(row["step"]),
            row["split"],
            row["task_id"],
            row["status"],
            "" if row["tests"] is None else f"{row['tests_passed']}/{row['tests']}",
            "–" if row["reward"] is None else f"{row['reward']:.3f}",
            tokens,
            first[:48],
        )
        shown.add_row(*map(Text, cells))  # a list in code is no markup
    return shown


def difference(rows: Sequence[tuple[int, dict[str, Any]]], steps: Sequence[int]) -> str:
    """The change of the solution between two steps, as a unified diff."""
    pair = []
    for step in steps:
        row = next((row for _, row in rows if row["step"] == step), None)
        if row is None:
            raise ValueError(
                f"No episode of the problem has step {step}. There are {sorted({row['step'] for _, row in rows})}."
            )
        pair.append((row["solution"].splitlines(), f"step {step}: {verdict_of(row)}"))
    (before, first), (after, second) = pair
    lines = list(difflib.unified_diff(before, after, first, second, lineterm="", n=99))
    return "\n".join(lines) or f"Steps {steps[0]} and {steps[1]} have the same solution. {second}"


def main(argv: Sequence[str], status: RunStatus) -> int:
    """Runs `marcog-trl episodes` with these flags. Returns the exit status."""
    if argv and not argv[0].startswith("-"):
        argv = ["--run", *argv]
    with one_line(ValueError, OSError):
        args = read_arguments(argv)
        rows = select(args)
        console = Console()
        if args.diff is not None:
            console.print(Syntax(difference(rows, args.diff), "diff", theme="ansi_light", word_wrap=True))
        elif args.show is not None:
            row = dict(rows).get(args.show)
            if row is None:
                raise ValueError(
                    f"There is no episode {args.show} among those that the flags ask for. See the table without --show."
                )
            console.print(episode_trace(row, f"episode {args.show}, step {row['step']}, {row['task_id']}"))
        else:
            console.print(table(rows[-args.limit :]))
            if args.limit and len(rows) > args.limit:
                print(f"The last {args.limit} of {len(rows)} episodes. --limit 0 shows all.", file=sys.stderr)
    return 0
