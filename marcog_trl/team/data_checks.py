"""
Checks, before any work starts, that a dataset has the columns that episodes, the workflow and the rewards need.
"""

from __future__ import annotations

import ast
import functools
import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset, IterableDataset

from marcog_trl.agents import Slot, Workflow
from marcog_trl.execution.packages import importable
from marcog_trl.parsing.syntax import find, is_empty, parse
from marcog_trl.problems.loading import complete_problems
from marcog_trl.problems.schema import fault_of, list_faults, number_of_tests
from marcog_trl.problems.tests import GUESSED
from marcog_trl.rewards.requirements import needs
from marcog_trl.rollout.engine import replay
from marcog_trl.rollout.player import WorkflowError
from marcog_trl.workflows import ClassTeam, Coverage, Single


_GIVEN = (
    *("replies", "rows", "turn", "verdicts", "advice", "previous_solution", "previous_verdicts"),
    *("executor", "workflow"),
)
"""Arguments of reward functions that do not come from the dataset. Columns have these names only where nobody reads ours."""


def check_dataset(
    name: str, dataset: Any, workflow: Workflow, reward_funcs: Sequence[Any], packages: Sequence[str] | None = None
) -> None:
    """
    Checks that a dataset has what episodes, the workflow and the rewards need.

    Checks all rows of a `Dataset`, but only the columns of an `IterableDataset` (see [`usable`]).

    Args:
        name (`str`): Name of the dataset in errors.
        dataset (`Dataset` or `IterableDataset`): The problems.
        workflow ([`Workflow`]): The workflow that plays them.
        reward_funcs (`list`): The reward functions.
        packages (`list[str]`, *optional*): The packages that tests may import.

    Raises:
        TypeError: If `dataset` is not a dataset.
        ValueError: If the dataset is empty, lacks a column, or has invalid rows, or if a package is not installed. The error
            lists all of these rows.
    """
    if not isinstance(dataset, Dataset | IterableDataset):
        raise TypeError(f"{name} is a {type(dataset).__name__}. Pass a Dataset with a column 'prompt'.")
    if isinstance(dataset, Dataset) and len(dataset) == 0:
        raise ValueError(f"{name} is empty. Pass at least one problem.")
    columns = dataset.column_names
    if columns is None:  # an `IterableDataset` may not know its columns
        return
    if "prompt" not in columns:
        raise ValueError(f"{name} has no column 'prompt', only {columns}. Use rename_column(..., 'prompt').")
    # As in TRL, if there is one agent with one reply, and no reward of this package
    means_column = isinstance(workflow, Single) and workflow.num_turns == 1 and not any(map(_is_ours, reward_funcs))
    for column in ("executor",) if means_column else _GIVEN:
        if column in columns:
            raise ValueError(
                f"{name} has a column {column!r}, but rewards get another argument of this name. Use "
                f"rename_column({column!r}, ...)."
            )
    if "image" in columns or "images" in columns:
        raise ValueError(f"{name} has images, but agents read text only. Remove the column.")
    needed = needed_columns(workflow, reward_funcs)
    for column, reader in needed.items():
        if column not in columns:
            raise ValueError(f"{name} has no column {column!r}, which {reader} needs, only {columns}. Add the column.")
    hides_tests = any(needs(func, "hidden_tests") for func in reward_funcs)
    if not hides_tests:
        shown = None
    elif isinstance(workflow, Coverage):
        shown = workflow.visible_tests
    else:
        raise ValueError("coverage_reward compares the programs of several agents. Set workflow='coverage'.")
    importable(tuple(packages or ()))  # raises an error if one is not installed
    if isinstance(dataset, Dataset):
        faults = []
        for i, row in enumerate(dataset):
            fault = fault_in(row, workflow, needed, packages)
            if fault is None and shown is not None and shown >= (count := number_of_tests(row)):
                fault = f"visible_tests={shown} shows all of its {count} tests, so that none is hidden: set a smaller number"
            faults.append((row.get("task_id"), i, fault))
        list_faults(name, faults)


def completed(name: str, dataset: Any, workflow: Workflow, reward_funcs: Sequence[Any]) -> Any:
    """
    Guesses the columns that the workflow and the rewards need, and that the tests of problems tell, as [`load_problems`] does.

    Args:
        name, dataset, workflow, reward_funcs: See [`check_dataset`].

    Returns:
        `Dataset`: The problems. What was guessed is said in a warning. Unchanged if nothing is missing, or cannot be guessed.
    """
    if isinstance(dataset, dict):
        return {key: completed(f"{name}[{key!r}]", part, workflow, reward_funcs) for key, part in dataset.items()}
    if not isinstance(dataset, Dataset) or not len(dataset) or not {"prompt", "test"} <= {*dataset.column_names}:
        return dataset
    missing = [c for c in needed_columns(workflow, reward_funcs) if c in GUESSED and c not in dataset.column_names]
    if not missing:
        return dataset
    dataset = complete_problems(name, dataset)
    told = " and ".join(f"{column}={dataset[0][column]!r}" for column in missing)
    warnings.warn(
        f"{name} has no column {' and '.join(map(repr, missing))}, which was read from its prompts and tests: the first problem has {told}.",
        stacklevel=2,
    )
    return dataset


def _is_ours(reward_func: Any) -> bool:
    """Whether this package has the reward, which then reads our arguments."""
    func = reward_func.func if isinstance(reward_func, functools.partial) else reward_func
    module = inspect.getmodule(func if inspect.isroutine(func) else type(func))
    return module is not None and module.__name__.startswith("marcog_trl.")


def check_eval_dataset(
    dataset: Any, workflow: Workflow, reward_funcs: Sequence[Any], packages: Sequence[str] | None = None
) -> None:
    """Checks the evaluation dataset of a trainer: one, several by name, or none (see [`check_dataset`])."""
    parts = dataset if isinstance(dataset, dict) else {None: dataset}
    for key, part in parts.items():
        name = "eval_dataset" if key is None else f"eval_dataset[{key!r}]"
        if part is not None:
            check_dataset(name, part, workflow, reward_funcs, packages)


def needed_columns(workflow: Workflow, reward_funcs: Sequence[Any]) -> dict[str, str]:
    """Maps each column that must not be empty to the name of what needs it."""
    if reward_funcs:
        # A team outside of training does not need this slow import
        from trl.trainer.utils import get_callable_name

    readers = {"prompt": "every episode"}
    for need, columns in {"tests": ("test", "test_format"), "entry_point": ("entry_point",)}.items():
        names = [f"workflow {type(workflow).__name__}"] if needs(workflow, need) else []
        names += [f"reward {get_callable_name(func)}" for func in reward_funcs if needs(func, need)]
        readers |= dict.fromkeys(columns, names[0]) if names else {}
    return readers


def usable(
    name: str, dataset: Any, workflow: Workflow, reward_funcs: Sequence[Any], packages: Sequence[str] | None = None
) -> Any:
    """
    Filters invalid problems out of an `IterableDataset`, with a warning for each. Returns a `Dataset` unchanged, because
    [`check_dataset`] has checked its rows.
    """
    if not isinstance(dataset, IterableDataset):
        return dataset
    needed = needed_columns(workflow, reward_funcs)
    return dataset.filter(functools.partial(_keep, name=name, workflow=workflow, needed=needed, packages=packages))


def _keep(
    row: Mapping[str, Any],
    name: str,
    workflow: Workflow,
    needed: Mapping[str, str],
    packages: Sequence[str] | None,
) -> bool:
    fault = fault_in(row, workflow, needed, packages)
    if fault is not None:
        warnings.warn(
            f"{name} has an invalid problem, which is skipped: task_id {row.get('task_id')!r}: {fault}",
            stacklevel=2,
        )
    return fault is None


def fault_in(
    row: Mapping[str, Any], workflow: Workflow, needed: Mapping[str, str], packages: Sequence[str] | None = None
) -> str | None:
    """Says why a problem cannot be played or scored, or returns `None`. Asks the workflow for its first request."""
    fault = fault_of(row, needed, packages or ())
    if fault is None:
        try:
            [request] = replay(workflow, row, ())
        except (ValueError, WorkflowError) as error:
            if isinstance(error.__cause__, ValueError):  # what the workflow itself says of the problem
                return str(error.__cause__)
            return " ".join([*str(error).split(), *getattr(error, "__notes__", ())[-1:]])
        using = {agent.name for agent in workflow.agents if agent.tools}
        for key, prompt in request.items() if isinstance(request, dict) else ():
            agent = key.agent if isinstance(key, Slot) else key
            if agent in using and isinstance(prompt, str):
                fault = NEEDS_MESSAGES.format(agent=agent)
    return fault


def fault_of_task(row: Mapping[str, Any], workflow: Workflow) -> str | None:
    """Reason why a team has no function to write: it is there already, or a class is asked for. `None` if it has one."""
    if (
        not workflow.needs_entry_point
        or not type(workflow).__module__.startswith("marcog_trl.")
        or isinstance(workflow, ClassTeam)
    ):
        return None
    asked = find(parse(str(row["prompt"])), row["entry_point"])
    if isinstance(asked, ast.ClassDef):
        return f"{asked.name} is a class, but the agents of {type(workflow).__name__} write functions"
    if isinstance(asked, ast.FunctionDef) and not is_empty(asked):
        return f"the function {asked.name} has a body, so there is nothing to write: leave only its docstring, or write '...'"
    return None


NEEDS_MESSAGES = (
    "Agent {agent!r} has tools, but its prompt is text. Use chat messages as the prompt: "
    "[{{'role': 'user', 'content': prompt}}]."
)
"""Why a prompt cannot describe tools."""
