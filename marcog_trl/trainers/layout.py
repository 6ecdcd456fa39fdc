"""Batch sizes that hold whole problems."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any, cast

from datasets import Dataset

from marcog_trl.rollout.tree import Tree
from marcog_trl.trainers.config import MultiAgentConfig


if TYPE_CHECKING:
    from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer


def fit_batches(trainer: MultiAgentTrainer, args: MultiAgentConfig, train_dataset: Any) -> None:
    """
    Sets the batch sizes and `save_steps` that `args` leaves open, and checks the others.

    Raises:
        ValueError: If a batch does not hold whole problems, or `train_dataset` is smaller than a generation batch.
    """
    _fit_train_batch(trainer, args, train_dataset)
    _fit_eval_batch(trainer, args)
    _fit_save_steps(args)


def _fit_train_batch(trainer: MultiAgentTrainer, args: MultiAgentConfig, train_dataset: Any) -> None:
    tree, num_processes = trainer._tree(training=True), args.world_size
    whole = len(tree.slots)
    # Number of processes over which the rows of a problem are spread
    spread = num_processes if trainer._splits_groups(training=True) else 1
    if args.auto_generation_batch:
        # The smallest number of micro-batches that holds whole problems and whole accumulation windows
        micro_batches = whole // math.gcd(whole, args.per_device_train_batch_size * spread)
        args.steps_per_generation = math.lcm(micro_batches, args.gradient_accumulation_steps)
        args.generation_batch_size = args.per_device_train_batch_size * args.steps_per_generation * num_processes
    # The configuration sets these
    assert args.steps_per_generation is not None and args.generation_batch_size is not None
    rows = args.per_device_train_batch_size * args.steps_per_generation * spread
    layout = f"{whole} rows ({_factors(trainer, tree)})"
    if rows % whole:
        fitting = math.lcm(whole, args.per_device_train_batch_size * spread) * (num_processes // spread)
        where = f" on each of {num_processes} processes" if spread < num_processes else ""
        raise ValueError(
            f"generation_batch_size={args.generation_batch_size} cannot hold whole problems of {layout}{where}. Set "
            f"generation_batch_size={fitting}."
        )
    if isinstance(train_dataset, Dataset) and len(train_dataset) < args.generation_batch_size // whole:
        raise ValueError(
            f"train_dataset has {len(train_dataset)} problems, but a generation batch of "
            f"generation_batch_size={args.generation_batch_size} rows needs {args.generation_batch_size // whole}. Add "
            "problems, or set a smaller generation_batch_size."
        )


def _factors(trainer: MultiAgentTrainer, tree: Tree) -> str:
    """What the number of rows of a training problem consists of."""
    args = trainer.args
    if args.credit == "counterfactual":
        return " + ".join(
            str(rows * len(level.slots)) for rows, level in zip(tree.rows_of_slot, tree.levels, strict=True)
        )
    kind = "slots" if len(tree.siblings) == len(trainer.workflow.slots) else "groups of a tree"
    return f"num_generations={args.num_generations} x {len(tree.siblings)} {kind}"


def _fit_eval_batch(trainer: MultiAgentTrainer, args: MultiAgentConfig) -> None:
    assert args.num_generations_eval is not None and args.per_device_eval_batch_size is not None
    tree = trainer._tree(training=False)
    whole = len(tree.slots)
    spread = args.world_size if trainer._splits_groups(training=False) else 1
    if args.auto_eval_batch:
        args.per_device_eval_batch_size = whole * max(1, math.ceil(8 / whole))
    elif args.per_device_eval_batch_size * spread % whole:
        unit = whole // math.gcd(whole, spread)
        raise ValueError(
            f"per_device_eval_batch_size={args.per_device_eval_batch_size} cannot hold whole problems of {whole} rows "
            f"(num_generations_eval={args.num_generations_eval} x {len(tree.siblings)} slots). Set "
            f"per_device_eval_batch_size={unit * math.ceil(args.per_device_eval_batch_size / unit)}."
        )


def _fit_save_steps(args: MultiAgentConfig) -> None:
    """A run that resumes inside a generation cycle would have other rollouts than an uninterrupted run."""
    assert args.save_steps is not None
    if args.auto_save_steps:
        cycle = generation_cycle(args)
        # The best model must be both saved and evaluated at the same step
        best = _evaluates_by_steps(args) and args.load_best_model_at_end
        unit = math.lcm(cycle, int(cast(float, args.eval_steps))) if best else cycle
        args.save_steps = unit * math.ceil(args.save_steps / unit)


def _evaluates_by_steps(args: MultiAgentConfig) -> bool:
    return args.eval_strategy == "steps" and args.eval_steps is not None and args.eval_steps >= 1


def generation_cycle(args: MultiAgentConfig) -> int:
    """Returns the number of optimizer steps between two steps that begin with a new rollout."""
    micro_batches = cast(int, args.steps_per_generation) * args.num_iterations
    return math.lcm(micro_batches, args.gradient_accumulation_steps) // args.gradient_accumulation_steps


def warn_of_schedule(trainer: Any) -> None:
    """Warns if a rollout is used for several steps, or if no run can resume from some of the checkpoints."""
    args = trainer.args
    steps_per_generation, accumulation = cast(int, args.steps_per_generation), args.gradient_accumulation_steps
    if args.auto_generation_batch and steps_per_generation > accumulation:
        tree = trainer._tree(training=True)
        warnings.warn(
            f"Each rollout is used for {steps_per_generation // accumulation} optimizer steps: it has "
            f"{args.generation_batch_size} rows, because it holds whole problems of {len(tree.slots)} rows "
            f"({_factors(trainer, tree)}), and a step has "
            f"{cast(int, args.generation_batch_size) * accumulation // steps_per_generation}. Set "
            f"gradient_accumulation_steps={steps_per_generation} for one step per rollout.",
            stacklevel=3,
        )
    cycle = generation_cycle(args)
    name = {"steps": "save_steps", "best": "eval_steps" if _evaluates_by_steps(args) else None}.get(args.save_strategy)
    interval = 0 if name is None else getattr(args, name)
    if interval % cycle:
        # A value below 1 is a share of the run, and may fall on any step
        fitting = cycle * math.ceil((interval if interval >= 1 else 500) / cycle)
        warnings.warn(
            f"{name}={interval} saves inside a generation cycle of {cycle} optimizer steps. Runs resume only from checkpoints at "
            f"the end of a cycle; others can be loaded. Set {name}={fitting}.",
            stacklevel=3,
        )
    if args.save_strategy != "no" and args.max_steps > 0 and args.max_steps % cycle:
        warnings.warn(
            f"max_steps={args.max_steps} ends inside a generation cycle of {cycle} optimizer steps, so runs cannot resume from "
            f"the last checkpoint. Set max_steps={cycle * math.ceil(args.max_steps / cycle)}.",
            stacklevel=3,
        )
