"""Trains a team in rounds from a command line: MADPO and MARLHF."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from datasets import Dataset

from marcog_trl.cli.arguments import TeamArguments
from marcog_trl.cli.console import RunStatus, one_line
from marcog_trl.cli.next_steps import next_steps
from marcog_trl.cli.parsing import read_training_arguments
from marcog_trl.cli.progress import hide_bars_of_libraries, show
from marcog_trl.cli.recipe import TrainingRecipe
from marcog_trl.cli.train import check_run, resume_choice
from marcog_trl.endpoints import EndpointError
from marcog_trl.preferences.rounds import (
    ROUNDS_FILE,
    IterativeMADPOConfig,
    MADPORounds,
    MARLHFRounds,
    PreferenceRounds,
)
from marcog_trl.processes import on_main, this_process
from marcog_trl.report.console import print_table
from marcog_trl.report.results import result_rows, write_results
from marcog_trl.rollout.player import WorkflowError
from marcog_trl.team.description import TEAM_FILE, TeamDescription
from marcog_trl.team.hub import root_files
from marcog_trl.trainers.checkpointing import check_disks, only_run_in


_DATA = ("dataset_name", "dataset_train_split", "dataset_test_split", "dataset_columns")


def train(recipe: TrainingRecipe, argv: Sequence[str] | None = None, status: RunStatus | None = None) -> None:
    """
    Runs the rounds of a recipe, and saves the last team.

    Args:
        recipe ([`TrainingRecipe`]): The recipe.
        argv (`list[str]`, *optional*): The command line; defaults to the process's own.
        status ([`RunStatus`], *optional*): Told what an interruption leaves behind.

    Raises:
        SystemExit: With one line, if anything in the command line, the data, the model or the output folder is wrong.
    """
    status = status or RunStatus()
    hide_bars_of_libraries()
    # ImportError: what a way of loading the model needs
    with ExitStack() as stack, one_line(ValueError, TypeError, ImportError, OSError, EndpointError, WorkflowError):
        script, args, model = read_training_arguments(recipe, argv)
        if script.num_replies is not None:
            raise ValueError(
                f"num_replies={script.num_replies} is not supported in rounds. Set --max_steps, which counts optimizer steps of "
                "each round, or --num_train_epochs."
            )
        train_dataset, test_dataset = script.load_splits()
        rounds_class = MADPORounds if isinstance(args, IterativeMADPOConfig) else MARLHFRounds
        rounds: PreferenceRounds = rounds_class(
            args,
            model,
            train_dataset,
            test_dataset,
            script.reward,
            script.num_test_samples,
            identity={name: getattr(script, name) for name in _DATA},
            show=lambda trainer: show(trainer, script.console),
        )
        folder = rounds.folder
        stack.enter_context(only_run_in(folder))
        check_disks(args, must_share=True)
        on_main(lambda: _check_folder(folder, resume_choice(args.resume_from_checkpoint), script.overwrite_output_dir))
        check_run(script, args, model)
        status.now = lambda: (
            f"Finished rounds are in {folder}. The same command with --resume_from_checkpoint true continues them."
        )
        results = rounds.run()
        if this_process().is_main_process:
            _finish(rounds, script, test_dataset, rounds.policy(rounds.last), results)
        this_process().wait_for_everyone()


def _check_folder(folder: Path, resume: str | bool | None, overwrite: bool) -> None:
    if not (folder / ROUNDS_FILE).is_file():
        return
    if overwrite and not resume:
        for path in folder.glob("round_[0-9][0-9]*"):
            if path.is_dir() and path.name.removeprefix("round_").isdecimal():
                shutil.rmtree(path)
        (folder / ROUNDS_FILE).unlink()
    elif not resume:
        raise ValueError(
            f"output_dir={str(folder)!r} holds rounds of an earlier run. Set --resume_from_checkpoint true to continue it, "
            "--overwrite_output_dir true to delete its rounds, or another --output_dir."
        )


def _finish(
    rounds: PreferenceRounds,
    script: TeamArguments,
    test: Dataset,
    policy: Path,
    results: Sequence[Mapping[str, float]],
) -> None:
    """Copies the last team, `policy`, to the output folder, and prints what came out."""
    if script.save_final_model:
        for name in root_files(policy):
            shutil.copy(policy / name, rounds.folder / name)
        agents = policy / "agents"
        if agents.is_dir():
            shutil.copytree(agents, rounds.folder / "agents", dirs_exist_ok=True)
    if results:
        named = {"untrained" if i == 0 else f"round {i}": result for i, result in enumerate(results)}
        write_results(
            rounds.folder / "results.json", {"untrained": results[0], "trained": results[-1], "rounds": named}
        )
        title = f"{len(test)} held-out problems, {script.num_test_samples} samples each"
        print_table(list(named), result_rows(named, list(named)), title)
        print(f"Results: {rounds.folder / 'results.json'}")
    folder = rounds.folder if script.save_final_model else policy
    print(f"Team: {folder}")
    team = TeamDescription.read(folder / TEAM_FILE)
    steps = next_steps(str(folder), team, script, rounds.args.isolation, test)
    print("", *(f"{what}: {command}" for what, command in steps.items()), sep="\n")
