"""Batches that hold whole problems: trees of episodes that processes share, sizes that fit them, and the order of the problems."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, cast

import torch
from datasets import Dataset
from torch.utils.data import Sampler
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from trl.trainer.utils import RepeatSampler

from marcog_trl.checks import Count, NaturalNumber, Range, check_fields
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
    """The factors of the number of rows of a training problem."""
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
    if cycle > 1 and interval % cycle:
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


# The order of the problems: epochs, and curricula with stages


class Curriculum(TrainerCallback, ExportableState):
    """
    Trains in stages, by the values of a dataset column such as the difficulty or the source.

    The problems of a generation batch depend on its number and on the batch at which each stage began, which the trainer's state
    keeps. So a resumed run sees the same problems as an uninterrupted one.

    Args:
        values (`Sequence`): Value of each problem, in the order of the dataset.
        stages (`Sequence[str]`): Values of each stage, in order. `"easy+medium"` joins two values.
        batch_size (`int`): Number of problems in a generation batch, over all processes.
        starts (`Sequence[int]`, *optional*): Generation batch at which each stage begins; the first is 0. Set it to begin
            stages at fixed steps.
        pass_rate (`float`, *optional*): Begin the next stage once the share of passed tests, averaged over `window`
            generation batches of the stage, reaches this value.
        window (`int`, *optional*, defaults to `8`): Number of generation batches to average over.
        seed (`int`, *optional*, defaults to `0`): Seed of the order of the problems.
        shuffle (`bool`, *optional*, defaults to `True`): Whether to shuffle the problems of a stage.

    Raises:
        ValueError: If a stage has fewer problems than a generation batch, or has a value that no problem has.
    """

    def __init__(
        self,
        values: Sequence[Any],
        stages: Sequence[str],
        batch_size: int,
        starts: Sequence[int] | None = None,
        pass_rate: float | None = None,
        window: int = 8,
        seed: int = 0,
        shuffle: bool = True,
    ):
        texts = [str(value) for value in values]
        self.stages = list(stages)
        self.problems = []
        for stage in self.stages:
            wanted = [stage] if stage in texts else stage.split("+")
            for value in wanted:
                if value not in texts:
                    raise ValueError(
                        f"stages={self.stages} has {value!r}, but no problem has this value. Use values among "
                        f"{sorted(set(texts))[:10]}."
                    )
            self.problems.append([i for i, text in enumerate(texts) if text in wanted])
            if len(self.problems[-1]) < batch_size:
                raise ValueError(
                    f"Curriculum stage {stage!r} has {len(self.problems[-1])} problems, but a generation batch needs "
                    f"{batch_size}. Join stages, such as '{'+'.join(sorted(set(texts))[:2])}'."
                )
        self.batch_size = batch_size
        self.pass_rate = pass_rate
        self.seed = seed
        self.shuffle = shuffle
        self.starts = list(starts or [0])
        self.batches = 0  # generated so far
        self.rates: deque[float] = deque(maxlen=window)

    def stage_of(self, batch: int) -> int:
        """Returns the stage of a generation batch, counted from 0."""
        return sum(start <= batch for start in self.starts) - 1

    def draw(self, batch: int) -> list[int]:
        """Returns the problems of a generation batch. A stage repeats a problem only after all others, in a new order."""
        stage = self.stage_of(batch)
        problems = self.problems[stage]
        round_, position = divmod(batch - self.starts[stage], len(problems) // self.batch_size)
        if not self.shuffle:
            return problems[position * self.batch_size :][: self.batch_size]
        generator = torch.Generator().manual_seed(hash((self.seed, stage, round_)) % 2**63)
        order = torch.randperm(len(problems), generator=generator).tolist()
        return [problems[i] for i in order[position * self.batch_size :][: self.batch_size]]

    def note(self, pass_rate: float | None) -> None:
        """Records the share of passed tests of a generation batch, or `None` if nothing was tested."""
        if pass_rate is not None and self.stage_of(self.batches) == len(self.starts) - 1:
            self.rates.append(pass_rate)
        self.batches += 1

    def on_step_end(self, args, state, control, **kwargs):
        if (
            self.pass_rate is None
            or len(self.starts) == len(self.stages)
            or len(self.rates) < cast(int, self.rates.maxlen)
        ):
            return
        if sum(self.rates) / len(self.rates) >= self.pass_rate:
            # The next batch may already be drawn: dataloaders fetch one batch ahead
            self.starts.append(self.batches + 1)
            self.rates.clear()

    def state(self) -> dict:
        return {"args": {}, "attributes": {"starts": self.starts, "batches": self.batches, "rates": list(self.rates)}}

    def on_train_begin(self, args, state, control, **kwargs):
        saved = state.stateful_callbacks.get(type(self).__name__)
        if state.global_step and saved:
            attributes = saved["attributes"]
            self.starts, self.batches = list(attributes["starts"]), attributes["batches"]
            self.rates = deque(attributes["rates"], maxlen=self.rates.maxlen)


@dataclass
class CurriculumSettings:
    """The fields of `MultiAgentConfig.curriculum`: see there."""

    column: str
    stages: list[str] | None = None
    steps: list[NaturalNumber] | None = None
    pass_rate: Annotated[float, Range(0, 1, above=True)] | None = None
    window: Count = 8


def make_curriculum(args: Any, dataset: Any, batch_size: int) -> Curriculum | None:
    """
    Makes the curriculum of a configuration.

    Args:
        args (`MultiAgentConfig`): Configuration.
        dataset (`Dataset`): Training problems.
        batch_size (`int`): Number of problems in a generation batch, over all processes.

    Returns:
        [`Curriculum`], or `None` if `args.curriculum` is not set.

    Raises:
        ValueError: If the settings contradict each other or do not fit the dataset.
    """
    if args.curriculum is None:
        return None
    name, known = f"curriculum={args.curriculum}", [field.name for field in fields(CurriculumSettings)]
    if "column" not in args.curriculum or not args.curriculum.keys() <= set(known):
        raise ValueError(f"{name} needs a column, and may have {known[1:]}. Set curriculum={_EXAMPLE}, for example.")
    given = CurriculumSettings(**args.curriculum)
    check_fields(given)
    if not isinstance(dataset, Dataset):
        raise ValueError(f"{name} does not support an IterableDataset. Pass a Dataset as train_dataset.")
    if given.column not in dataset.column_names:
        raise ValueError(f"{name}: train_dataset has no such column. Set column to one of {dataset.column_names}.")
    if args.dataloader_num_workers:
        raise ValueError(
            f"dataloader_num_workers={args.dataloader_num_workers} would fetch problems before the curriculum chooses them. Set "
            "dataloader_num_workers=0."
        )
    values = list(dataset[given.column])
    for row, value in enumerate(values):
        if not isinstance(value, str | int | float):
            raise ValueError(f"{name}: row {row} of the column has {value!r:.40}. Use a column of texts or numbers.")
    stages = [str(stage) for stage in (sorted(set(values)) if given.stages is None else given.stages)]
    if (given.steps is None) == (given.pass_rate is None):
        raise ValueError(f"{name} needs either steps or a pass_rate. Set curriculum={_EXAMPLE}, for example.")
    starts = None
    if given.steps is not None:
        steps = list(given.steps)
        if len(steps) != len(stages) - 1 or sorted(set(steps)) != steps or min(steps, default=1) < 1:
            raise ValueError(
                f"{name}: steps must rise, and be one fewer than the {len(stages)} stages {stages}. Set "
                f"steps={[100 * (i + 1) for i in range(len(stages) - 1)]}, for example."
            )
        per_step = args.gradient_accumulation_steps / (args.steps_per_generation * args.num_iterations)
        starts = [0, *(math.ceil(step * per_step) for step in steps)]
    return Curriculum(
        values, stages, batch_size, starts, given.pass_rate, given.window, args.seed, args.shuffle_dataset
    )


_EXAMPLE = {"column": "difficulty", "pass_rate": 0.6}


class OrderOfEpoch(Sampler):
    """
    TRL's order of the problems, or the problems of a curriculum in its place. Resumed runs continue with the current epoch; TRL's
    sampler would restart at the first. Repetition and length stay the same.
    """

    def __init__(self, sampler: RepeatSampler, seed: int, epoch: Callable[[], int], curriculum: Curriculum | None):
        self.sampler = sampler
        self.seed = seed
        self.epoch = epoch
        self.curriculum = curriculum

    def __iter__(self) -> Iterator[int]:
        if self.curriculum is not None:
            return self._drawn(self.curriculum)
        if self.sampler.shuffle:
            generator = self.sampler.generator.manual_seed(self.seed)
            for _ in range(self.epoch()):
                torch.randperm(self.sampler.num_samples, generator=generator)
        return iter(self.sampler)

    def _drawn(self, curriculum: Curriculum) -> Iterator[int]:
        batches = len(self.sampler.data_source) // self.sampler.batch_size
        first = self.epoch() * batches
        for batch in range(first, first + batches):
            problems = curriculum.draw(batch)
            for _ in range(self.sampler.repeat_count):
                for problem in problems:
                    yield from [problem] * self.sampler.mini_repeat_count

    def __len__(self) -> int:
        return len(self.sampler)
