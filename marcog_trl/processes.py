"""Work of one process that all of them wait for."""

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list


T = TypeVar("T")


def this_process() -> PartialState:
    """Which process this is, and how many there are; on a machine without accelerator, launched processes find each other too."""
    deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"  # has a way of its own
    return PartialState(cpu=not torch.accelerator.is_available() and not deepspeed)


def on_main(work: Callable[[], T]) -> T:
    """
    Does something on the main process, since others may not see a folder, or see it too late; a collective operation.

    Args:
        work (`Callable`): What to do. Its result must be picklable.

    Returns:
        The result, on every process.

    Raises:
        ValueError, OSError: What `work` raised, on every process.
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
