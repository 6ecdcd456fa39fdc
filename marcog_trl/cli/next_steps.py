"""What to do after a training: three commands that work as they are printed."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marcog_trl import rewards
from marcog_trl.cli.arguments import TeamArguments
from marcog_trl.cli.solve import read_problem
from marcog_trl.team.description import TeamDescription


_READ = ("prompt", "entry_point", "test", "test_format", "setup")  # what `read_problem` returns


@dataclass(frozen=True)
class SavedTeam:
    """
    A team that was trained and saved.

    Args:
        folder (`str`): Its folder.
        description ([`TeamDescription`]): What it is.
        isolation (`str`): How programs were confined in training.
    """

    folder: str
    description: TeamDescription
    isolation: str

    def command(self, name: str, *flags: str) -> str:
        """A command of `marcog-trl` on the team, as a shell in the current folder takes it."""
        trust = ["--trust_remote_code"] if self.description.source_file is not None else []
        confined = ["--isolation", self.isolation] if self.isolation != "strict" else []
        return shlex.join([*_program(), name, "--team", self.folder, *flags, *trust, *confined])


def print_next_steps(team: SavedTeam, script: TeamArguments, problems: Iterable[Mapping[str, Any]]) -> None:
    """Prints [`next_steps`], one in a line."""
    print("", *(f"{what}: {command}" for what, command in next_steps(team, script, problems).items()), sep="\n")


def next_steps(team: SavedTeam, script: TeamArguments, problems: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """
    Commands that solve a held-out problem with a team, measure the team, and export its agents.

    Args:
        team ([`SavedTeam`]): The team. The problem is written to its folder.
        script ([`TeamArguments`]): The arguments of the training.
        problems (`Iterable[Mapping]`): Held-out problems. The first that fits into a Python file is the one to solve.

    Returns:
        `dict[str, str]`: What a command does → the command. None solves a problem if no problem is a function to write.
    """
    written = write_problem(Path(team.folder), problems)
    train = script.dataset_train_split
    averaged = ["--dataset_split", train] if train != "train" else []  # of the latents of agents in observation scope
    return {
        **({"Solve a held-out problem": team.command("solve", *written)} if written else {}),
        "Evaluate": evaluation(team, script),
        "Export the agents": team.command(
            "export", "--output_dir", f"{team.folder}-agents", *_problem_set(script), *averaged
        ),
    }


def evaluation(team: SavedTeam, script: TeamArguments) -> str:
    """The command that measures a team on the held-out problems."""
    test = script.dataset_test_split
    split = ["--dataset_test_split", test] if test != "test" else []
    ours = set(team.description.rewards) <= set(rewards.__all__)
    reward = [] if ours else ["--reward", "execution_reward"]  # a reward model, for example
    return team.command("evaluate", *_problem_set(script), *split, *reward)


def _problem_set(script: TeamArguments) -> list[str]:
    name = ["--dataset_name", script.dataset_name] if script.dataset_name != "builtin" else []
    return name + (["--dataset_columns", *script.dataset_columns] if script.dataset_columns else [])


def _program() -> list[str]:
    """What starts `marcog-trl`, also in a shell that does not have the environment of this process on its path."""
    script = Path(sys.executable).with_name("marcog-trl")
    program = script if script.is_file() else Path(sys.executable)
    name = str(program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program)
    if shutil.which(program.name) == name:
        name = program.name
    return [name] if program == script else [name, "-m", "marcog_trl"]


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
        prompt, tests = problem["prompt"], problem.get("test")
        if not isinstance(prompt, str) or not tests:
            continue
        source = f"{prompt.rstrip()}\n"
        if problem["test_format"] == "asserts":
            source, tests = "\n".join([f"{source}\n", *tests, ""]), None
        try:
            found = read_problem(source, tests)
        except (ValueError, TypeError):  # not Python, or other tests than text
            continue
        if any(_plain(found.get(name)) != _plain(problem.get(name)) for name in _READ):
            continue
        flags: list[str] = []
        for flag, name, text in (("--problem", "problem.py", source), ("--tests", "problem_tests.py", tests)):
            if text:
                (folder / name).write_text(text)
                flags += [flag, str(folder / name)]
        return flags
    return []


def _plain(value: Any) -> Any:
    return [text.strip() for text in value] if isinstance(value, list) else (value or "").strip()
