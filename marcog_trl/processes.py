"""Helpers for several processes."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list, gather, reduce


T = TypeVar("T")


def this_process() -> PartialState:
    """Returns the state of this process. Launched processes also find each other on machines without accelerator."""
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"  # DeepSpeed initialises itself
    return PartialState(cpu=not torch.accelerator.is_available() and not deepspeed)


def sum_over_processes(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the sum of a tensor over all processes, on each of them. A collective operation."""
    return reduce(tensor, reduction="sum")


def most_over_processes(count: int) -> int:
    """Returns the maximum of a number over all processes. A collective operation."""
    return int(gather(torch.tensor([count], device=this_process().device)).max())


def equally_many(chosen: torch.Tensor, multiple_of: int = 1) -> torch.Tensor:
    """
    Returns the indices of the rows that are chosen, and of as many others as it takes for all processes to have equally many, at
    least one: every process takes part in every forward pass. A collective operation.

    Args:
        chosen (`torch.Tensor` of shape `(B,)`): Whether each row of this process is chosen.
        multiple_of (`int`, *optional*, defaults to `1`): What the number of rows is a multiple of. It divides B.
    """
    number = most_over_processes(max(1, int(chosen.sum())))
    number += -number % multiple_of
    return chosen.int().argsort(descending=True, stable=True)[:number].sort().values


def gather_rows(*rows: torch.Tensor) -> tuple[slice, list[torch.Tensor]]:
    """
    Gathers tensors that have a row for each of the same things. A collective operation.

    Args:
        *rows (`torch.Tensor` of shape `(B, ...)`): Tensors, of the same size on all processes.

    Returns:
        `tuple[slice, list[torch.Tensor]]`: Where the rows of this process are, and the rows of all processes.
    """
    begin = this_process().process_index * len(rows[0])
    return slice(begin, begin + len(rows[0])), [gather(x) for x in rows]


def on_main(work: Callable[[], T]) -> T:
    """
    Calls a function on the main process, and returns its result on all processes. A collective operation.

    Use it for files, which other processes may see late or not at all.

    Args:
        work (`Callable`): The function. Its result must be picklable.

    Returns:
        The result, on every process.

    Raises:
        ValueError, OSError: The error of `work`, on every process.
    """
    outcome: list[Any] = [None, None]
    if this_process().is_main_process:
        try:
            outcome[0] = work()
        except (ValueError, OSError) as error:
            outcome[1] = error
    broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]
