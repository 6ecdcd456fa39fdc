"""What to do after a training: three commands that work as they are printed."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from marcog_trl import rewards
from marcog_trl.cli.arguments import TeamArguments
from marcog_trl.cli.solve import read_problem
from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer


PROBLEM_FILE, TESTS_FILE = "problem.py", "problem_tests.py"
_READ = ("prompt", "entry_point", "test", "test_format", "setup")  # what `read_problem` returns


def next_steps(
    script: TeamArguments, trainer: MultiAgentTrainer, problems: Iterable[Mapping[str, Any]]
) -> dict[str, str]:
    """
    Commands that solve a held-out problem with the saved team of a trainer, measure the team, and export its agents.

    Args:
        script ([`TeamArguments`]): The arguments of the training.
        trainer ([`MultiAgentTrainer`]): The trainer, whose team is in its output folder. The problem is written there.
        problems (`Iterable[Mapping]`): Held-out problems. The first that fits into a Python file is the one to solve.

    Returns:
        `dict[str, str]`: What a command does → the command. None solves a problem if no problem is a function to write.
    """
    folder = str(trainer.args.output_dir)
    written = write_problem(Path(folder), problems)
    train = script.dataset_train_split
    averaged = ["--dataset_split", train] if train != "train" else []  # of the latents of agents in observation scope
    return {
        **({"Solve a held-out problem": _command("solve", trainer, *written)} if written else {}),
        "Evaluate": evaluation(script, trainer),
        "Export the agents": _command(
            "export", trainer, "--output_dir", f"{folder}-agents", *_problem_set(script), *averaged
        ),
    }


def evaluation(script: TeamArguments, trainer: MultiAgentTrainer) -> str:
    """The command that measures the saved team of a trainer on the held-out problems."""
    test = script.dataset_test_split
    split = ["--dataset_test_split", test] if test != "test" else []
    ours = set(trainer.team.description.rewards) <= set(rewards.__all__)
    reward = [] if ours else ["--reward", "execution_reward"]  # a reward model, for example
    return _command("evaluate", trainer, *_problem_set(script), *split, *reward)


def _problem_set(script: TeamArguments) -> list[str]:
    name = ["--dataset_name", script.dataset_name] if script.dataset_name != "builtin" else []
    return name + (["--dataset_columns", *script.dataset_columns] if script.dataset_columns else [])


def _command(name: str, trainer: MultiAgentTrainer, *flags: str) -> str:
    """A command of `marcog-trl` on the trainer's team, as a shell in this folder takes it."""
    isolation, own_workflow = trainer.args.isolation, trainer.team.description.source_file is not None
    trust = ["--trust_remote_code"] if own_workflow else []
    confined = ["--isolation", isolation] if isolation != "strict" else []
    words = [*_program(), name, "--team", str(trainer.args.output_dir), *flags, *trust, *confined]
    return shlex.join(words)


def _program() -> list[str]:
    """What starts `marcog-trl`, also in a shell that does not have the environment of this process on its path."""
    python = Path(sys.executable)
    script = python.with_name("marcog-trl")
    program = script if script.is_file() else python
    on_path = shutil.which(program.name)
    if program.is_relative_to(Path.cwd()):
        name = str(program.relative_to(Path.cwd()))
    else:
        name = program.name if on_path is not None and Path(on_path) == program else str(program)
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
