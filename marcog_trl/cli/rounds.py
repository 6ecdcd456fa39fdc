"""Trains a team in rounds from a command line: what MADPO and MARLHF share."""

from __future__ import annotations

import gc
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from datasets import Dataset
from peft import LoraConfig
from rich.console import Console
from rich.table import Table
from transformers import Trainer
from trl import ModelConfig, get_peft_config, get_quantization_config

from marcog_trl.agents import Workflow
from marcog_trl.cli.arguments import TeamArguments
from marcog_trl.cli.endings import Kept, one_line
from marcog_trl.cli.next_steps import SavedTeam, print_next_steps
from marcog_trl.cli.parsing import read_training_arguments
from marcog_trl.cli.recipe import TrainingRecipe
from marcog_trl.cli.showing import hide_bars_of_libraries, show
from marcog_trl.cli.train import check_run, resume_choice
from marcog_trl.evaluation.evaluate import evaluate_team
from marcog_trl.preferences.pairs import collect_preferences
from marcog_trl.preferences.rounds import ROUNDS_FILE, Phase, Rounds, RoundsSettings
from marcog_trl.preferences.untrained import save_untrained_team
from marcog_trl.processes import on_main, this_process
from marcog_trl.report.metrics_file import MetricsFile
from marcog_trl.report.results import result_rows, write_results
from marcog_trl.team.data_checks import check_dataset
from marcog_trl.team.description import TEAM_FILE, TeamDescription
from marcog_trl.team.hub import root_files
from marcog_trl.team.loading import find_team, settings_with
from marcog_trl.team.settings import TeamSettings
from marcog_trl.team.team import Team
from marcog_trl.trainers.adapter_targets import outside_zero3
from marcog_trl.trainers.checkpointing import check_disks, only_run_in
from marcog_trl.trainers.reward_functions import named_reward


# Settings that a run may continue with others of
_CHANGEABLE = {"num_rounds", "min_pairs", "num_workers", "isolation"}
# Settings of training that it may not
_TRAINING = {
    "learning_rate", "num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps",
    "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "weight_decay", "max_grad_norm", "optim", "bf16", "seed",
    "beta", "loss_type", "loss_weights", "label_smoothing", "f_divergence_type", "f_alpha_divergence_coef", "discopop_tau",
    "margin", "reference", "gamma_turn", "max_length", "start_team", "init_core_scale", "num_generations", "num_iterations",
    "epsilon", "epsilon_high", "advantage", "scale_rewards", "turn_weights", "turn_tree", "joint_mode", "reward_model",
    "reward_learning_rate", "reward_num_train_epochs", "reward_batch_size", "reward_max_length", "held_out_problems",
}  # fmt: skip
_MODEL = ("model_name_or_path", "dtype", "lora_r", "lora_alpha", "lora_dropout", "lora_target_modules", "load_in_4bit")
_DATA = ("dataset_name", "dataset_train_split", "dataset_test_split", "dataset_columns", "reward")


@dataclass
class RoundsRun:
    """
    A run that is ready to begin.

    Args:
        script, args, model: What the command line says.
        train_dataset, test_dataset (`Dataset`): Problems.
    """

    script: TeamArguments
    args: Any
    model: ModelConfig
    train_dataset: Dataset
    test_dataset: Dataset

    @property
    def folder(self) -> Path:
        return Path(self.args.output_dir)

    @property
    def trust_remote_code(self) -> bool:
        """Whether to run the file of the team's workflow: the user's own, unless it came with another team."""
        return self.args.start_team is None or self.args.trust_remote_code

    @cached_property
    def workflow(self) -> Workflow:
        """The workflow that the first team plays."""
        if self.args.start_team is None:
            return TeamSettings.of(self.args).make_workflow()
        folder = find_team(self.args.start_team)
        saved = TeamDescription.read(folder / TEAM_FILE)
        settings, _ = settings_with(folder, saved, {}, None, self.trust_remote_code)
        return settings.make_workflow()

    @contextmanager
    def team(self, policy: Path) -> Iterator[Team]:
        """A saved team, loaded on every process as long as it plays."""
        args = self.args
        with outside_zero3(args.deepspeed_plugin):
            team = Team.from_pretrained(
                policy,
                quantization_config=get_quantization_config(self.model),
                model_init_kwargs=args.model_init_kwargs,
                trust_remote_code=self.trust_remote_code,
                num_workers=args.num_workers,
                execution_timeout=args.execution_timeout,
                execution_memory_mb=args.execution_memory_mb,
                isolation=args.isolation,
            )
        try:
            yield team
        finally:
            team.close()
            del team
            gc.collect()

    def start(self, path: Path) -> None:
        """Saves the team that the first round begins with."""
        if self.args.start_team is not None:
            folder = find_team(self.args.start_team)
            path.mkdir(parents=True)
            for name in root_files(folder):
                shutil.copy(folder / name, path / name)
            return
        with outside_zero3(self.args.deepspeed_plugin):
            save_untrained_team(
                path,
                str(self.model.model_name_or_path),
                TeamSettings.of(self.args),
                cast(LoraConfig, get_peft_config(self.model)),
                rewards=tuple(self.script.reward),
                init_core_scale=self.args.init_core_scale,
                seed=self.args.seed,
                model_init_kwargs=self.args.model_init_kwargs,
            )

    def collect(self, policy: Path, number: int) -> Dataset:
        """The pairs of a round."""
        args = self.args
        with self.team(policy) as team:
            return collect_preferences(
                team,
                self.train_dataset,
                args.num_candidates,
                args.pairing,
                args.pairs_per_problem,
                args.min_gap,
                args.unit,
                self.script.reward,
                args.gamma_turn,
                seed=args.seed * 1009 + number,
            )

    def fit(self, trainer: Trainer, **options: Any) -> None:
        """Trains, shows it as `console` says, and writes all metrics to the trainer's folder."""
        trainer.add_callback(MetricsFile(str(trainer.args.output_dir)))
        show(trainer, self.script.console)
        trainer.train(**options)

    def evaluate(self, policy: Path, path: Path) -> dict[str, float]:
        """Measures a team on the held-out problems."""
        with self.team(policy) as team:
            return evaluate_team(
                team, self.test_dataset, self.script.num_test_samples, output=path, overwrite_output=True,
                reward_funcs=self.script.reward,
            )  # fmt: skip


def train_in_rounds(
    recipe: TrainingRecipe,
    argv: Sequence[str] | None,
    kept: Kept | None,
    phases: Callable[[RoundsRun], tuple[Phase, Mapping[str, Phase]]],
) -> None:
    """
    Runs the rounds of a recipe, and saves the last team.

    Args:
        recipe ([`TrainingRecipe`]): The recipe.
        argv (`list[str]`, *optional*): The command line; defaults to the process's own.
        kept ([`Kept`], *optional*): Told what an interruption leaves behind.
        phases (`Callable`): `phases(run)` returns the phase that trains, and those before it by name.

    Raises:
        SystemExit: With one line, if anything in the command line, the data, the model or the output folder is wrong.
    """
    kept = kept or Kept()
    hide_bars_of_libraries()
    with ExitStack() as stack, one_line(ValueError, TypeError, OSError):
        script, args, model = read_training_arguments(recipe, argv)
        run = RoundsRun(script, args, model, *script.load_splits())
        rewards = [named_reward(name) for name in script.reward]
        check_dataset("train_dataset", run.train_dataset, run.workflow, rewards)
        stack.enter_context(only_run_in(run.folder))
        check_disks(args, must_share=True)
        on_main(
            lambda: _check_folder(run.folder, resume_choice(args.resume_from_checkpoint), script.overwrite_output_dir)
        )
        check_run(script, args, model)
        train, before = phases(run)
        rounds = Rounds(
            run.folder,
            args,
            _identity(run),
            run.start,
            run.collect,
            train,
            run.evaluate if script.num_test_samples else None,
            before,
        )
        kept.now = lambda: (
            f"Finished rounds are in {run.folder}. The same command with --resume_from_checkpoint true continues them."
        )
        results = rounds.run()
        last = rounds.last()  # on all processes together
        if this_process().is_main_process:
            _finish(run, rounds.policy(last), results)
        this_process().wait_for_everyone()


def _check_folder(folder: Path, resume: str | bool | None, overwrite: bool) -> None:
    if not (folder / ROUNDS_FILE).is_file():
        return
    if overwrite and not resume:
        for path in (*folder.glob("round_*"), folder / ROUNDS_FILE):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    elif not resume:
        raise ValueError(
            f"output_dir={str(folder)!r} holds rounds of an earlier run. Set --resume_from_checkpoint true to continue it, "
            "--overwrite_output_dir true to delete its rounds, or another --output_dir."
        )


def _identity(run: RoundsRun) -> dict[str, Any]:
    """What a run that continues this one must agree on."""
    settings, model, data = run.args.to_dict(), asdict(run.model), asdict(run.script)
    team = {f.name for cls in (RoundsSettings, TeamSettings) for f in fields(cls)} - _CHANGEABLE
    file = run.workflow.source_file
    return {
        **{name: settings[name] for name in sorted((team | _TRAINING) & settings.keys())},
        **{name: model[name] for name in _MODEL},
        **{name: data[name] for name in _DATA},
        "workflow_sha256": None if file is None else hashlib.sha256(file.content).hexdigest(),
    }


def _finish(run: RoundsRun, policy: Path, results: list[dict[str, float]]) -> None:
    """Copies the last team, `policy`, to the output folder, and prints what came out."""
    if run.script.save_final_model:
        for name in root_files(policy):
            shutil.copy(policy / name, run.folder / name)
        agents = policy / "agents"
        if agents.is_dir():
            shutil.copytree(agents, run.folder / "agents", dirs_exist_ok=True)
    if results:
        named = {"untrained" if i == 0 else f"round {i}": result for i, result in enumerate(results)}
        write_results(run.folder / "results.json", {"untrained": results[0], "trained": results[-1], "rounds": named})
        table = Table(
            "", title=f"{len(run.test_dataset)} held-out problems, {run.script.num_test_samples} samples each"
        )
        for name in named:
            table.add_column(name, justify="right")
        for row in result_rows(named, list(named)):
            table.add_row(*row)
        Console().print(table)
        print(f"Results: {run.folder / 'results.json'}")
    folder = run.folder if run.script.save_final_model else policy
    print(f"Team: {folder}")
    saved = SavedTeam(str(folder), TeamDescription.read(folder / TEAM_FILE), run.args.isolation)
    print_next_steps(saved, run.script, run.test_dataset)
