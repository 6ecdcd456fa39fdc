"""
The order of the problems: epochs, and curricula with stages.

A curriculum determines the problems of a generation batch from its number and from the batch at which each stage began.
The trainer's state saves when stages began, so a resumed run sees the same problems as an uninterrupted one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from datasets import Dataset
from torch.utils.data import Sampler
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState
from trl.trainer.utils import RepeatSampler


class Curriculum(TrainerCallback, ExportableState):
    """
    Trains in stages, by the values of a dataset column such as the difficulty or the source.

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
            wanted = stage.split("+")
            for value in wanted:
                if value not in texts:
                    raise ValueError(
                        f"curriculum_stages={self.stages} has {value!r}, but no problem has this value. Use values among "
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


class CurriculumSampler(Sampler):
    """Replaces the problems of TRL's sampler by those of a curriculum. Repetition and length stay the same."""

    def __init__(self, sampler: RepeatSampler, curriculum: Curriculum, epoch: Callable[[], int]):
        self.sampler = sampler
        self.curriculum = curriculum
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        batches = len(self.sampler.data_source) // self.sampler.batch_size
        first = self.epoch() * batches
        for batch in range(first, first + batches):
            problems = self.curriculum.draw(batch)
            for _ in range(self.sampler.repeat_count):
                for problem in problems:
                    yield from [problem] * self.sampler.mini_repeat_count

    def __len__(self) -> int:
        return len(self.sampler)


def make_curriculum(args: Any, dataset: Any, batch_size: int) -> Curriculum | None:
    """
    Makes the curriculum of a configuration.

    Args:
        args (`MultiAgentConfig`): Configuration with `curriculum_...` fields.
        dataset (`Dataset`): Training problems.
        batch_size (`int`): Number of problems in a generation batch, over all processes.

    Returns:
        [`Curriculum`], or `None` if `args.curriculum_column` is not set.

    Raises:
        ValueError: If the fields contradict each other or do not fit the dataset.
    """
    column = args.curriculum_column
    if column is None:
        for name in ("curriculum_stages", "curriculum_steps", "curriculum_pass_rate"):
            if getattr(args, name) is not None:
                raise ValueError(
                    f"{name}={getattr(args, name)} needs a column. Set curriculum_column='difficulty', for example."
                )
        return None
    if not isinstance(dataset, Dataset):
        raise ValueError(
            f"curriculum_column={column!r} does not support an IterableDataset. Pass a Dataset as train_dataset."
        )
    if column not in dataset.column_names:
        raise ValueError(
            f"curriculum_column={column!r} is not a column of train_dataset. Set it to one of {dataset.column_names}."
        )
    if args.dataloader_num_workers:
        raise ValueError(
            f"dataloader_num_workers={args.dataloader_num_workers} would fetch problems before the curriculum chooses them. Set "
            "dataloader_num_workers=0."
        )
    values = list(dataset[column])
    if args.curriculum_stages is not None:
        stages = [str(stage) for stage in args.curriculum_stages]
    else:
        stages = [str(value) for value in sorted(set(values))]
    if (args.curriculum_steps is None) == (args.curriculum_pass_rate is None):
        raise ValueError(
            f"A curriculum needs either curriculum_steps or curriculum_pass_rate, but curriculum_steps={args.curriculum_steps} "
            f"and curriculum_pass_rate={args.curriculum_pass_rate}. Set curriculum_pass_rate=0.6 alone, for example."
        )
    starts = None
    if args.curriculum_steps is not None:
        steps = list(args.curriculum_steps)
        if len(steps) != len(stages) - 1 or sorted(set(steps)) != steps or min(steps, default=1) < 1:
            raise ValueError(
                f"curriculum_steps={steps} must rise and have one step fewer than the {len(stages)} stages {stages}. Set "
                f"curriculum_steps={[100 * (i + 1) for i in range(len(stages) - 1)]}, for example."
            )
        per_step = args.gradient_accumulation_steps / (args.steps_per_generation * args.num_iterations)
        starts = [0, *(math.ceil(step * per_step) for step in steps)]
    return Curriculum(
        values,
        stages,
        batch_size,
        starts,
        args.curriculum_pass_rate,
        args.curriculum_window,
        args.seed,
        args.shuffle_dataset,
    )


class OrderOfEpoch(Sampler):
    """TRL's order of the problems. Resumed runs continue with the current epoch; TRL's sampler would restart at the first."""

    def __init__(self, sampler: RepeatSampler, seed: int, epoch: Callable[[], int]):
        self.sampler = sampler
        self.seed = seed
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        if self.sampler.shuffle:
            generator = self.sampler.generator.manual_seed(self.seed)
            for _ in range(self.epoch()):
                torch.randperm(self.sampler.num_samples, generator=generator)
        return iter(self.sampler)

    def __len__(self) -> int:
        return len(self.sampler)
