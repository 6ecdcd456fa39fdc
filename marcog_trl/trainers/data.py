"""Batches that hold whole problems: trees of episodes that processes share, and batch sizes that fit them."""

from __future__ import annotations

import math
import warnings
from typing import Any, cast

from datasets import Dataset

from marcog_trl.rollout.tree import Level, Tree
from marcog_trl.trainers.config import MultiAgentConfig


def spreads_siblings(tree: Tree) -> bool:
    """
    Whether a group of siblings may be spread over several processes, as in TRL. Only with one slot and without branches: otherwise
    an episode has several replies, and one process must play all of them.
    """
    return len(set(tree.slots)) == 1 and not tree.by_stage


def tree_of_process(tree: Tree) -> Tree:
    """Returns the tree that a process plays: one episode per row if others may play its siblings."""
    if not spreads_siblings(tree):
        return tree
    [level] = tree.levels
    return Tree((Level(level.turn, level.slots, 1, 1),))


def check_rows(problems: list[dict[str, Any]], block: int, process: int) -> None:
    """
    Refuses a batch that does not repeat every problem `block` times in a row.

    Args:
        problems (`list[dict]` of length B): The dataset row of each row of this process.
        block (`int`): Rows of a problem.
        process (`int`): Index of this process. A problem may begin on another one.
    """
    begin = process * len(problems)
    for i, problem in enumerate(problems):
        first = max(0, i - (begin + i) % block)
        if problem["prompt"] != problems[first]["prompt"]:
            raise ValueError(
                f"rows {first} and {i} of a batch have different problems, but a batch must repeat every problem {block} "
                "times in a row. Use the dataloaders of the trainer."
            )


# Batch sizes


def fit_batches(args: MultiAgentConfig, tree: Tree, eval_tree: Tree, train_dataset: Any = None) -> None:
    """
    Sets the batch sizes and `save_steps` that `args` leaves open, and checks the others.

    Args:
        args ([`MultiAgentConfig`]): Configuration, which is changed.
        tree, eval_tree ([`~marcog_trl.rollout.tree.Tree`]): The episodes of a problem, in training and in evaluation.
        train_dataset (`Dataset`, *optional*): Training problems.

    Raises:
        ValueError: If a batch does not hold whole problems, or `train_dataset` is smaller than a generation batch.
    """
    _fit_train_batch(args, tree, train_dataset)
    _fit_eval_batch(args, eval_tree)
    _fit_save_steps(args)


def _fit_train_batch(args: MultiAgentConfig, tree: Tree, train_dataset: Any) -> None:
    num_processes = args.world_size
    whole = len(tree.slots)
    # Number of processes over which the rows of a problem are spread
    spread = num_processes if spreads_siblings(tree) else 1
    if args.auto_generation_batch:
        # The smallest number of micro-batches that holds whole problems and whole accumulation windows
        micro_batches = whole // math.gcd(whole, args.per_device_train_batch_size * spread)
        args.steps_per_generation = math.lcm(micro_batches, args.gradient_accumulation_steps)
        args.generation_batch_size = args.per_device_train_batch_size * args.steps_per_generation * num_processes
    # The configuration sets these
    assert args.steps_per_generation is not None and args.generation_batch_size is not None
    rows = args.per_device_train_batch_size * args.steps_per_generation * spread
    layout = f"{whole} rows ({_factors(args, tree)})"
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


def _factors(args: MultiAgentConfig, tree: Tree) -> str:
    """What the number of rows of a training problem consists of."""
    if args.credit == "counterfactual":
        return " + ".join(
            str(rows * len(level.slots)) for rows, level in zip(tree.rows_of_slot, tree.levels, strict=True)
        )
    kind = "slots" if len(tree.siblings) == len(set(tree.slots)) else "groups of a tree"
    return f"num_generations={args.num_generations} x {len(tree.siblings)} {kind}"


def _fit_eval_batch(args: MultiAgentConfig, tree: Tree) -> None:
    assert args.num_generations_eval is not None and args.per_device_eval_batch_size is not None
    whole = len(tree.slots)
    spread = args.world_size if spreads_siblings(tree) else 1
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


def warn_of_schedule(args: Any, tree: Tree) -> None:
    """Warns if a rollout is used for several steps, or if no run can resume from some of the checkpoints."""
    steps_per_generation, accumulation = cast(int, args.steps_per_generation), args.gradient_accumulation_steps
    if args.auto_generation_batch and steps_per_generation > accumulation:
        warnings.warn(
            f"Each rollout is used for {steps_per_generation // accumulation} optimizer steps: it has "
            f"{args.generation_batch_size} rows, because it holds whole problems of {len(tree.slots)} rows "
            f"({_factors(args, tree)}), and a step has "
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
