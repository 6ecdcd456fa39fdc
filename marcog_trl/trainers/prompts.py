"""How the prompts of a user's datasets reach the model."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from datasets import Dataset, IterableDataset

from marcog_trl.agents import Workflow
from marcog_trl.problems.schema import list_faults
from marcog_trl.rollout.chats import with_system_prompt
from marcog_trl.rollout.engine import encode_prompts, replay
from marcog_trl.workflows import Single
from marcog_trl.workflows.rounds import SOLVER


def as_in_trl(workflow: Workflow, args: Any, dataset: Dataset | IterableDataset | None) -> Workflow:
    """
    Lets [`Single`] continue plain text, as TRL does, in datasets that are none of our problem sets.

    Args:
        workflow ([`Workflow`]): The workflow of a trainer.
        args ([`MultiAgentConfig`]): Its configuration. `roles` is set, so that the saved team has it.
        dataset (`Dataset` or `IterableDataset`, *optional*): Its training data.

    Returns:
        [`Workflow`]: The workflow, or a copy without a role text if `roles` has none, the first row's prompt is plain text, and it
        has no `test_format`, which [`load_problems`] adds to all problems.
    """
    if not isinstance(workflow, Single) or args.roles is not None or workflow.agents[0].role != SOLVER:
        return workflow
    first: Mapping[str, Any] = next(iter(dataset), {}) if isinstance(dataset, Dataset | IterableDataset) else {}
    if not isinstance(first.get("prompt"), str) or "test_format" in first:
        return workflow
    workflow = copy.copy(workflow)
    workflow.agents = tuple(replace(agent, role="") for agent in workflow.agents)
    args.roles = {agent.name: "" for agent in workflow.agents}
    return workflow


def check_prompts(datasets: Mapping[str, Any], workflow: Workflow, args: Any, tokenizer: Any, warn: bool) -> None:
    """
    Checks that the chat template accepts the prompts, one of each order of roles in a dataset.

    Args:
        datasets (`Mapping[str, Dataset]`): Datasets by their names in errors. Others than a `Dataset` are not read.
        workflow ([`Workflow`]): The workflow, which is asked for its first prompts.
        args ([`MultiAgentConfig`]): Settings of prompts.
        tokenizer (`PreTrainedTokenizerBase`): The tokenizer.
        warn (`bool`): Whether to warn that plain text is continued.

    Raises:
        ValueError: If the chat template refuses a prompt, or `system_prompt` is set and the model continues plain text.
    """
    continues = isinstance(workflow, Single) and not workflow.agents[0].role
    instead = f"Set roles={{'solver': {SOLVER!r}}}, for example, to send it as a chat message that ends with this text"
    for name, dataset in datasets.items():
        if not isinstance(dataset, Dataset):
            continue
        first_of: dict[Any, int] = {}
        for i, prompt in enumerate(dataset["prompt"]):
            roles = None if isinstance(prompt, str) else tuple(message["role"] for message in prompt)
            first_of.setdefault(roles, i)
        rows = [(i, dataset[i]) for i in first_of.values()]
        list_faults(name, [(row.get("task_id"), i, _fault_in(row, workflow, args, tokenizer)) for i, row in rows])
        if None in first_of and continues and args.system_prompt is not None:
            raise ValueError(
                f"system_prompt={args.system_prompt!r} needs chat messages, but {name} has plain text, which the model continues. "
                f"{instead}."
            )
        if None in first_of and continues and warn and tokenizer.chat_template:
            warn = False
            warnings.warn(
                f"{name} has prompts in plain text, which the model continues without its chat template, as in TRL. {instead}, or "
                "roles={'solver': ''} to leave it as it is.",
                stacklevel=3,
            )


def _fault_in(row: Mapping[str, Any], workflow: Workflow, args: Any, tokenizer: Any) -> str | None:
    """Says why the first prompts of a problem cannot be tokenized, or returns `None`."""
    [request] = replay(workflow, row, ())
    asked = request.values() if isinstance(request, dict) else ()
    prompts = [with_system_prompt(prompt, args.system_prompt) for prompt in asked]
    try:
        encode_prompts(tokenizer, prompts, **(args.chat_template_kwargs or {}))
    except ValueError as error:
        return str(error)
    return None
