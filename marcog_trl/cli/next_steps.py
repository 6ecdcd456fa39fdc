"""What to do after a training: three commands that work as they are printed."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from marcog_trl.cli.arguments import TeamArguments
from marcog_trl.cli.solve import read_problem


PROBLEM_FILE, TESTS_FILE = "problem.py", "problem_tests.py"
_READ = ("prompt", "entry_point", "test", "test_format", "setup")  # what `read_problem` returns


def next_steps(
    script: TeamArguments, folder: Path, isolation: str, problems: Iterable[Mapping[str, Any]]
) -> list[str]:
    """
    Commands that solve a held-out problem with a saved team, measure the team, and export its agents.

    Args:
        script ([`TeamArguments`]): The arguments of the training.
        folder (`Path`): Folder of the team. The problem is written there.
        isolation (`str`): How programs were confined in training.
        problems (`Iterable[Mapping]`): Held-out problems. The first that fits into a Python file is the one to solve.

    Returns:
        `list[str]`: Lines to print: what a command does, and the command. There is none that solves a problem if no problem
        is a function to write.
    """
    train, test = script.dataset_train_split, script.dataset_test_split
    everywhere = ["--isolation", isolation] if isolation != "strict" else []
    data = ["--dataset_name", script.dataset_name] if script.dataset_name != "builtin" else []
    data += ["--dataset_columns", *script.dataset_columns] if script.dataset_columns else []
    measured = ["--dataset_test_split", test] if test != "test" else []
    averaged = ["--dataset_split", train] if train != "train" else []  # of the latents of agents in observation scope
    recipes, team = Path(sys.argv[0]).parent, ["--adapter", str(folder)]
    commands = {
        "Solve a held-out problem": ["python", "-m", "marcog_trl", "solve", "--team", str(folder)],
        "Evaluate": ["python", str(recipes / "evaluate.py"), *team, *data, *measured],
        "Export the agents": [
            "python", str(recipes / "export.py"), *team, "--output_dir", f"{folder}-agents", *data, *averaged
        ],
    }  # fmt: skip
    written = write_problem(folder, problems)
    if written:
        commands["Solve a held-out problem"] += written
    else:
        del commands["Solve a held-out problem"]
    return [f"{what}: {shlex.join([*command, *everywhere])}" for what, command in commands.items()]


def write_problem(folder: Path, problems: Iterable[Mapping[str, Any]]) -> list[str]:
    """
    Writes the first problem that `solve` reads as it is: a Python file, with asserts in it, or other tests beside it.

    Args:
        folder (`Path`): Folder to write to.
        problems (`Iterable[Mapping]`): Dataset rows.

    Returns:
        `list[str]`: Flags of `solve`; empty if there is no such problem.
    """
    for problem in problems:
        prompt, test = problem["prompt"], problem.get("test")
        if not isinstance(prompt, str) or not test:
            continue
        source, tests = f"{prompt.rstrip()}\n", test
        if problem["test_format"] == "asserts":
            source, tests = "\n".join([f"{source}\n", *test, ""]), None
        try:
            found = read_problem(source, tests)
        except (ValueError, TypeError):  # not Python, or other tests than text
            continue
        if any(_plain(found.get(name)) != _plain(problem.get(name)) for name in _READ):
            continue
        (folder / PROBLEM_FILE).write_text(source)
        flags = ["--problem", str(folder / PROBLEM_FILE)]
        if tests is not None:
            (folder / TESTS_FILE).write_text(tests)
            flags += ["--tests", str(folder / TESTS_FILE)]
        return flags
    return []


def _plain(value: Any) -> Any:
    return [text.strip() for text in value] if isinstance(value, list) else (value or "").strip()
