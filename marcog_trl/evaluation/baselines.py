"""What a trained team is compared with: a model as it is, as a team or as a single agent with the team's budget of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from marcog_trl.agents import Workflow
from marcog_trl.team.description import TEAM_FILE, TeamDescription
from marcog_trl.team.loading import find_team, load_base_model, settings_with
from marcog_trl.team.settings import TeamSettings
from marcog_trl.team.team import Team


def untrained_team(
    model: str,
    settings: TeamSettings | None = None,
    workflow: Workflow | None = None,
    tokenizer: Any = None,
    model_init_kwargs: Mapping[str, Any] | None = None,
    device: Any = None,
) -> Team:
    """
    A team on a model as it is, without an adapter.

    Args:
        model (`str`): Name or path of the model.
        settings ([`TeamSettings`], *optional*): Its workflow, which is `"single"` by default, and how replies are sampled.
        workflow ([`Workflow`], *optional*): The team's workflow, where it is not a built-in one.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Defaults to the model's own.
        model_init_kwargs (`Mapping`, *optional*): Arguments of the model's `from_pretrained`.
        device (`str` or `torch.device`, *optional*): Where the model computes. Defaults to this process's accelerator, or the CPU.

    Returns:
        [`Team`].

    Raises:
        ValueError: If the settings do not fit the workflow.
    """
    settings = settings or TeamSettings()
    played = settings.make_workflow(workflow)
    executor = settings.make_executor() if played.needs_tests else None  # which may refuse this machine
    if tokenizer is None:
        tokenizer = AutoTokenizer.from_pretrained(model, padding_side="left")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    loaded = load_base_model(model, None, model_init_kwargs or {}, device).eval()
    description = TeamDescription.of("", loaded, played, ["execution_reward"], settings, {})
    return Team(loaded, tokenizer, played, settings, description, executor=executor)


def single_agent(
    path: str | Path, workflow: Workflow | None = None, base_model: str | None = None, **settings: Any
) -> Team:
    """
    The untrained base model of a saved team as one agent, which may write as many tokens in a turn as all the team's replies
    together. Its reward is `execution_reward`, since that of a team may need one.

    Args:
        path (`str`): Folder of the saved team, or a repository of the Hub.
        workflow ([`Workflow`], *optional*): The team's workflow, where it is not a built-in one.
        base_model (`str`, *optional*): Where the base model is, if not where it was.
        **settings: Fields of [`TeamSettings`] that replace the saved ones, such as `temperature`, or `max_completion_length`,
            which is that of one reply of the team.

    Returns:
        [`Team`].

    Raises:
        ValueError: If the folder is not a saved team.
    """
    path = find_team(path)
    saved = TeamDescription.read(path / TEAM_FILE)
    of_team, _ = settings_with(path, saved, settings, workflow)
    played = replace(of_team).make_workflow(workflow)
    of_one = replace(
        of_team,
        workflow="single",
        max_completion_length=of_team.max_completion_length * len(played.slots) // played.num_turns,
        num_agents=None,
        roles=None,
        class_split=None,
        centralized=False,
        parameter_sharing="shared",
    )
    tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    return untrained_team(base_model or saved.base_model, of_one, tokenizer=tokenizer)
