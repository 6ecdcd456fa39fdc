"""
Whether a dataset holds what episodes, the workflow and the rewards read, asked before any work starts.

Knows nothing about training.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset, IterableDataset

from marcog_trl.agents import Workflow
from marcog_trl.problems.schema import fault_of, list_faults
from marcog_trl.rewards.requirements import needs
from marcog_trl.rollout.engine import replay


_GIVEN = ("replies", "turn", "verdicts", "previous_solution", "previous_verdicts", "executor")
"""Names under which rewards are given something else than a column."""


def check_dataset(name: str, dataset: Any, workflow: Workflow, reward_funcs: Sequence[Any]) -> None:
    """
    Refuses a dataset that lacks what episodes, the workflow and the rewards read. Of a `Dataset`, all rows are checked; of
    a stream, only the columns (see [`usable`]).

    Args:
        name (`str`): What errors call the dataset.
        dataset (`Dataset` or `IterableDataset`): The problems.
        workflow ([`Workflow`]): The workflow that plays them.
        reward_funcs (`list`): The reward functions.

    Raises:
        TypeError: If it is no dataset.
        ValueError: If it is empty, lacks a column, or has rows that cannot be used; the error names all of these rows.
    """
    if not isinstance(dataset, Dataset | IterableDataset):
        raise TypeError(f"{name} is a {type(dataset).__name__}. Pass a Dataset with a column 'prompt'.")
    if isinstance(dataset, Dataset) and len(dataset) == 0:
        raise ValueError(f"{name} is empty. Pass at least one problem.")
    columns = dataset.column_names
    if columns is None:  # a stream that does not know its columns before it is read
        return
    if "prompt" not in columns:
        raise ValueError(f"{name} has no column 'prompt' but {columns}. Use rename_column(..., 'prompt').")
    for column in _GIVEN:
        if column in columns:
            raise ValueError(
                f"{name} has a column {column!r}, a name under which rewards are given something else. Use "
                f"rename_column({column!r}, ...)."
            )
    if "image" in columns or "images" in columns:
        raise ValueError(f"{name} has images, but agents read text only. Drop the column.")
    needed = needed_columns(workflow, reward_funcs)
    for column, reader in needed.items():
        if column not in columns:
            raise ValueError(f"{name} has no column {column!r}, which {reader} needs, but {columns}.")
    if isinstance(dataset, Dataset):
        list_faults(name, [(row.get("task_id"), i, fault_in(row, workflow, needed)) for i, row in enumerate(dataset)])


def needed_columns(workflow: Workflow, reward_funcs: Sequence[Any]) -> dict[str, str]:
    """Columns in which every problem must have something → who needs it."""
    if reward_funcs:
        from trl.trainer.utils import (
            get_callable_name,
        )  # which imports much that a team outside of training does not need

    readers = {"prompt": "every episode"}
    for need, columns in (("tests", ("test", "test_format")), ("entry_point", ("entry_point",))):
        names = [f"workflow {type(workflow).__name__}"] if needs(workflow, need) else []
        names += [f"reward {get_callable_name(func)}" for func in reward_funcs if needs(func, need)]
        readers |= dict.fromkeys(columns, names[0]) if names else {}
    return readers


def usable(name: str, dataset: Any, workflow: Workflow, reward_funcs: Sequence[Any]) -> Any:
    """
    A stream without the problems that cannot be used, of which it warns when it comes to them; a `Dataset` has been
    checked, and stays as it is.
    """
    if not isinstance(dataset, IterableDataset):
        return dataset
    needed = needed_columns(workflow, reward_funcs)
    return dataset.filter(functools.partial(_keep, name=name, workflow=workflow, needed=needed))


def _keep(row: Mapping[str, Any], name: str, workflow: Workflow, needed: Mapping[str, str]) -> bool:
    fault = fault_in(row, workflow, needed)
    if fault is not None:
        warnings.warn(
            f"{name} has a problem that cannot be used and is left out: task_id {row.get('task_id')!r}: {fault}",
            stacklevel=2,
        )
    return fault is None


def fault_in(row: Mapping[str, Any], workflow: Workflow, needed: Mapping[str, str]) -> str | None:
    """Why a problem cannot be played or scored, `None` if it can: the workflow makes its first request to see."""
    fault = fault_of(row, needed)
    if fault is None:
        try:
            replay(workflow, row, ())
        except ValueError as error:
            fault = " ".join(str(error).split())
    return fault
