"""Trains a team from a command line: checks, evaluation, training, evaluation, and what is written at the end."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

from datasets import Dataset
from trl import ModelConfig, get_peft_config, get_quantization_config

import marcog_trl
from marcog_trl.cli.arguments import TeamArguments
from marcog_trl.cli.console import RunStatus, begin, one_line
from marcog_trl.cli.next_steps import next_steps
from marcog_trl.cli.parsing import read_training_arguments
from marcog_trl.cli.progress import hide_bars_of_libraries, show
from marcog_trl.cli.recipe import TrainingRecipe
from marcog_trl.endpoints import EndpointError
from marcog_trl.evaluation.evaluate import evaluate_team
from marcog_trl.preferences.reward_model import TeamRewardModel, is_team_reward_model
from marcog_trl.report.console import print_table
from marcog_trl.report.metrics_file import METRICS_FILE, MetricsFile
from marcog_trl.report.results import change_rows, examples, write_results
from marcog_trl.rollout.player import WorkflowError
from marcog_trl.team.base_models import check_model
from marcog_trl.team.hub import PushError
from marcog_trl.trainers.adapter_targets import outside_zero3
from marcog_trl.trainers.checkpointing import (
    check_disks,
    check_resumable,
    delete_checkpoints,
    last_whole_checkpoint,
    only_run_in,
    start_from,
)
from marcog_trl.trainers.config import MultiAgentConfig
from marcog_trl.trainers.trainer import MultiAgentTrainer
from marcog_trl.workflows.from_file import names_file


# The settings of every recipe that differ from the configuration's
DEFAULTS: Mapping[str, Any] = MappingProxyType({"write_report": True, "eval_strategy": "steps", "eval_steps": 20})


@dataclass
class _Run:
    """A run that is ready to train."""

    script: TeamArguments
    trainer: MultiAgentTrainer
    test_dataset: Dataset
    checkpoint: str | None
    started: float
    # Of the untrained and the trained team: figures, and a record of each held-out problem
    results: dict[str, Any] = field(default_factory=dict)
    records: dict[str, list[dict[str, Any]]] = field(default_factory=dict)


def train(
    recipe: TrainingRecipe,
    argv: Sequence[str] | None = None,
    status: RunStatus | None = None,
    trainer_class: Callable[..., Any] | None = None,
) -> None:
    """
    Evaluates the untrained team, trains it, saves it, evaluates it, and pushes it.

    Args:
        recipe ([`TrainingRecipe`]): The recipe.
        argv (`list[str]`, *optional*): The command line; defaults to the process's own.
        status ([`RunStatus`], *optional*): Told what an interruption leaves behind.
        trainer_class (`Callable`, *optional*): Defaults to the recipe's trainer.

    Raises:
        SystemExit: With one line, if anything in the command line, the data, the model or the output folder is wrong.
    """
    status = status or RunStatus()
    started = time.perf_counter()
    recipe = replace(recipe, defaults={**DEFAULTS, **recipe.defaults})
    hide_bars_of_libraries()
    with ExitStack() as stack:
        # ImportError: what a way of loading the model needs
        with one_line(ValueError, ImportError, OSError, PushError):
            script, args, model = read_training_arguments(recipe, argv)
            set_max_steps(args, script.num_replies)
            train_dataset, test_dataset = script.load_splits()
            stack.enter_context(only_run_in(cast(str, args.output_dir)))
            check_disks(args)
            resume = resume_choice(args.resume_from_checkpoint)
            checkpoint = start_from(args, resume, script.overwrite_output_dir)
            check_run(script, args, model)
            begin(f"Loading {model.model_name_or_path}")
            trainer = (trainer_class or getattr(marcog_trl, recipe.trainer))(
                model=str(model.model_name_or_path),
                reward_funcs=[_reward(name, args) for name in script.reward],
                args=args,
                train_dataset=train_dataset,
                eval_dataset=script.eval_split(test_dataset) if args.eval_strategy != "no" else None,
                quantization_config=get_quantization_config(model),
                peft_config=get_peft_config(model),
            )
            trainer.get_optimizer_cls_and_kwargs(args, trainer.model)  # which may need a package
            trainer.add_callback(MetricsFile())
            if checkpoint is not None:
                check_resumable(f"resume_from_checkpoint={checkpoint!r}", Path(checkpoint), trainer.team.description)
            trainer.accelerator.print(f"Code execution: {trainer.executor.isolation}")
        with one_line(EndpointError, PushError, WorkflowError):
            _run(_Run(script, trainer, test_dataset, checkpoint, started), status)


def _run(run: _Run, status: RunStatus) -> None:
    script, trainer = run.script, run.trainer
    args, output_dir = trainer.args, Path(cast(str, trainer.args.output_dir))
    if script.num_test_samples:
        trainer.accelerator.print(f"Evaluating the untrained team on {len(run.test_dataset)} held-out problems ...")
        _evaluate(run, "untrained")
    if script.overwrite_output_dir:
        delete_checkpoints(output_dir, args.save_on_each_node)
    status.now = lambda: _kept_by_training(trainer)
    show(trainer, script.console)
    trainer.train(resume_from_checkpoint=run.checkpoint)
    if script.save_final_model:
        trainer.save_model(args.output_dir, _internal_call=True)  # without a push, which comes last
        measure = _next_steps(run)["Evaluate"]
        status.now = lambda: f"The trained team is in {output_dir}. Measure it with: {measure}"
    if script.num_test_samples:
        trainer.accelerator.print("Evaluating the trained team ...")
        _evaluate(run, "trained")
    if trainer.accelerator.is_main_process:
        _write_results(run, output_dir)
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=script.dataset_name)


def _evaluate(run: _Run, name: str) -> None:
    found = evaluate_team(run.trainer, run.test_dataset, run.script.num_test_samples, sampling="stream")
    run.results[name], run.records[name] = found, found.records


def _write_results(run: _Run, output_dir: Path) -> None:
    """Writes figures, model card, report and curves, and prints where they are and what to do next."""
    script, trainer = run.script, run.trainer
    adapter = str(output_dir) if script.save_final_model else "not saved (save_final_model=false)"
    results = {**run.results, "seconds": time.perf_counter() - run.started, "adapter": adapter}
    write_results(output_dir / "results.json", results)
    if script.num_test_samples:
        title = f"{len(run.test_dataset)} held-out problems, {script.num_test_samples} samples each"
        print_table(("untrained", "trained", "change"), change_rows(results), title)
    if script.save_final_model:
        trainer.create_model_card(output_dir.name, script.dataset_name)  # with the results
    if trainer.report is not None:
        records = run.records
        read = examples(run.test_dataset, records["untrained"], records["trained"]) if records else []
        trainer.report.write(trainer.args, trainer.state, run.results, read)
        print(f"Report: {output_dir / 'report.html'}")
    print(
        f"{'Model' if trainer.args.full_finetuning else 'Adapter'}: {adapter}\nResults: {output_dir / 'results.json'}\nMetrics: {output_dir / METRICS_FILE}"
    )
    if script.save_final_model:
        solved = [record["greedy"]["status"] == "passed" for record in run.records.get("trained", ())]
        # Problems that the trained team solves come first
        order = sorted(range(len(run.test_dataset)), key=lambda i: not (solved and solved[i]))
        steps = _next_steps(run, (run.test_dataset[i] for i in order))
        print("", *(f"{what}: {command}" for what, command in steps.items()), sep="\n")


def _next_steps(run: _Run, problems: Iterable[Mapping[str, Any]] = ()) -> dict[str, str]:
    args = run.trainer.args
    return next_steps(str(args.output_dir), run.trainer.team.description, run.script, args.isolation, problems)


def _kept_by_training(trainer: MultiAgentTrainer) -> str:
    """Line on what a run that was interrupted during training leaves, and how to continue."""
    step = f"Training was at step {trainer.state.global_step} of {trainer.state.max_steps}."
    checkpoint = last_whole_checkpoint(cast(str, trainer.args.output_dir))
    if checkpoint is None and trainer.args.save_strategy == "steps":
        first = int(trainer.state.save_steps)
        return f"{step} The first checkpoint comes at step {first}. Set a smaller --save_steps to keep one before."
    if checkpoint is None and trainer.args.save_strategy != "no":
        return f"{step} The first checkpoint comes later. Set --save_strategy steps --save_steps 10 to keep one every 10 steps."
    if checkpoint is None:
        return f"{step} No checkpoint was kept. Set --save_strategy steps --save_steps 10 to keep one every 10 steps."
    return f"{step} {checkpoint} was kept. The same command with --resume_from_checkpoint true continues from it."


# Settings and checks


def resume_choice(value: str | None) -> str | bool | None:
    """
    Interprets `--resume_from_checkpoint`.

    Args:
        value (`str`, *optional*): The flag's value.

    Returns:
        `str` or `bool`, *optional*: What `Trainer.train` takes: `True` (the last complete checkpoint) for `"true"`, `None` for
        `"false"`, otherwise the folder of a checkpoint.
    """
    return {"true": True, "false": None, "none": None}.get(str(value).lower(), value)


def set_max_steps(args: MultiAgentConfig, num_replies: float | None) -> None:
    """
    Turns a number of replies into `max_steps`.

    Args:
        args (`MultiAgentConfig`): Changed in place.
        num_replies (`float`, *optional*): Number of replies to train on. If `None`, `args` does not change.
    """
    if num_replies is not None:
        rows = args.per_device_train_batch_size * args.world_size * args.gradient_accumulation_steps
        args.max_steps = math.ceil(num_replies * args.num_iterations / rows)


def check_run(script: TeamArguments, args: MultiAgentConfig, model: ModelConfig) -> None:
    """
    Checks the account of Weights & Biases and the files of models, before any work is done.

    Args:
        script ([`TeamArguments`]): The recipe's arguments.
        args (`MultiAgentConfig`): The trainer's configuration.
        model ([`~trl.ModelConfig`]): The model, as [`read_training_arguments`] returns it.

    Raises:
        ValueError: If there is no account for Weights & Biases, or a model cannot be loaded.
    """
    _check_wandb(args)
    for name in script.reward:
        # a reward model of TRL; others are functions, or reward models of teams
        if "/" in name and not names_file(name) and not is_team_reward_model(name):
            check_model("reward", name)
    check_model("model_name_or_path", str(model.model_name_or_path), **cast(dict, args.model_init_kwargs))


def _reward(name: str, args: MultiAgentConfig) -> Any:
    """The reward that the command line names: the folder of a [`TeamRewardModel`], or what trainers accept."""
    if not is_team_reward_model(name):
        return name
    with outside_zero3(args.deepspeed_plugin):  # every process scores with the whole model
        return TeamRewardModel.from_pretrained(name)


def _check_wandb(args: MultiAgentConfig) -> None:
    if "wandb" in cast(list[str], args.report_to):
        import wandb

        if folder := os.environ.get("WANDB_DIR"):
            Path(folder).mkdir(parents=True, exist_ok=True)  # wandb would write elsewhere
        if wandb.setup().settings.mode == "online" and not wandb.login(prompt=False, verify=False):
            raise ValueError(
                "report_to='wandb' needs an account. Run `wandb login`, set WANDB_MODE=offline, or set --report_to none."
            )
