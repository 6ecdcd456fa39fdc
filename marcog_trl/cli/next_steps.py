"""The next steps after a training: commands that work as they are printed."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from marcog_trl import rewards
from marcog_trl.cli.arguments import TeamArguments
from marcog_trl.problems.tests import read_problem
from marcog_trl.team.description import TeamDescription
from marcog_trl.workflows.from_file import names_file


def next_steps(
    folder: str,
    team: TeamDescription,
    script: TeamArguments,
    isolation: str,
    problems: Iterable[Mapping[str, Any]] = (),
) -> dict[str, str]:
    """
    Commands that solve a held-out problem with a trained team, measure the team, and export its agents.

    Args:
        folder (`str`): Folder of the saved team. The problem is written to it.
        team ([`TeamDescription`]): What the team is.
        script ([`TeamArguments`]): The arguments of the training.
        isolation (`str`): How programs were confined in training.
        problems (`Iterable[Mapping]`, *optional*): Held-out problems. The first that fits into a Python file is the one to solve.

    Returns:
        `dict[str, str]`: What a command does → the command. None solves a problem if no problem fits.
    """
    data = ["--dataset_name", script.dataset_name] if script.dataset_name != "builtin" else []
    data += ["--dataset_columns", *script.dataset_columns] if script.dataset_columns else []
    train, test = script.dataset_train_split, script.dataset_test_split
    evaluate = [*data, "--dataset_test_split", test] if test != "test" else [*data]
    # A reward model, for example
    if not all(name in rewards.REWARD_NAMES or names_file(name) for name in team.rewards):
        evaluate += ["--reward", "execution_reward"]
    # Over the training problems, the latents of agents in observation scope are averaged
    export = ["--output_dir", f"{folder}-agents", *data, *(["--dataset_split", train] if train != "train" else [])]
    commands = {"Evaluate": ["evaluate", *evaluate], "Export the agents": ["export", *export]}
    written = _write_problem(Path(folder), problems)
    if written is not None:
        commands = {"Solve a held-out problem": ["solve", "--problem", written], **commands}
    common = ["--trust_remote_code"] if team.source_file is not None or team.reward_files else []
    common += ["--isolation", isolation] if isolation != "strict" else []
    return {
        what: shlex.join(["marcog-trl", name, "--team", folder, *flags, *common])
        for what, (name, *flags) in commands.items()
    }


def _write_problem(folder: Path, problems: Iterable[Mapping[str, Any]]) -> str | None:
    """Writes the first problem that `solve` reads as it is: a function with asserts. Returns the file."""
    for problem in problems:
        if problem["test_format"] != "asserts" or problem.get("setup") or not isinstance(problem["prompt"], str):
            continue
        source = "\n".join([f"{problem['prompt'].rstrip()}\n\n", *problem["test"], ""])
        try:
            read = read_problem(source)
        except ValueError:  # the prompt is not Python
            continue
        if (read["prompt"].strip(), read["entry_point"]) == (problem["prompt"].strip(), problem["entry_point"]):
            (folder / "problem.py").write_text(source)
            return str(folder / "problem.py")
    return None
