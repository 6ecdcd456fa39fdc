"""Baselines for a trained team: the untrained model as the same team, or as a single agent with the same token budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from marcog_trl.agents import Workflow
from marcog_trl.team.base_models import load_tokenizer
from marcog_trl.team.description import TEAM_FILE, TeamDescription
from marcog_trl.team.loading import as_trained, find_team, load_base_model, settings_with
from marcog_trl.team.settings import TeamSettings
from marcog_trl.team.team import Team
from marcog_trl.workflows.program import OPTIONS as PROGRAM_OPTIONS


def untrained_team(
    model: str,
    settings: TeamSettings,
    tokenizer: Any = None,
    model_init_kwargs: Mapping[str, Any] | None = None,
) -> Team:
    """
    Builds a team on an untrained model, without an adapter.

    Args:
        model (`str`): Name or path of the model.
        settings ([`TeamSettings`]): Workflow and generation settings.
        tokenizer (`PreTrainedTokenizerBase`, *optional*): Defaults to the model's tokenizer.
        model_init_kwargs (`Mapping`, *optional*): Keyword arguments for the model's `from_pretrained`.

    Returns:
        [`Team`].

    Raises:
        ValueError: If the settings do not fit the workflow.
    """
    played = settings.make_workflow()
    executor = settings.make_executor() if played.needs_tests else None  # raises on machines without isolation
    tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
    loaded = load_base_model(model, None, model_init_kwargs or {}, None).eval()
    description = TeamDescription.of("", loaded, played, ["execution_reward"], settings, {})
    return Team(loaded, tokenizer, played, settings, description, executor=executor)


def single_agent(
    path: str | Path,
    workflow: Workflow | str | None = None,
    base_model: str | None = None,
    trust_remote_code: bool = False,
    model_init_kwargs: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Team:
    """
    Builds a single agent on the untrained base model of a saved team.

    In a turn, the agent may write as many tokens as all replies of the team together. Its reward is `execution_reward`,
    because the team's own reward may need several agents.

    Args:
        path (`str`): Folder of the saved team, or a repository on the Hub.
        workflow, trust_remote_code: As in [`Team.from_pretrained`]. The workflow is asked for the number of its replies.
        base_model (`str`, *optional*): Name or path of the base model. Defaults to the one that the team was saved with.
        model_init_kwargs (`Mapping`, *optional*): Keyword arguments for the base model's `from_pretrained`. `dtype` defaults to
            that of the training.
        **settings: Fields of [`TeamSettings`] that override the saved ones, such as `temperature`.
            `max_completion_length` is the length of one reply of the team, and `roles` may have a text for the single agent,
            `solver`.

    Returns:
        [`Team`].

    Raises:
        ValueError: If the folder is not a saved team.
    """
    path = find_team(path)
    saved = TeamDescription.read(path / TEAM_FILE)
    roles = dict(settings.pop("roles", None) or {})
    solver = {"solver": roles.pop("solver")} if "solver" in roles else {}
    if roles:
        settings["roles"] = roles
    if not solver and saved.workflow == "Single":
        solver = saved.settings.get("roles") or {}
    of_team, _ = settings_with(path, saved, settings, workflow, trust_remote_code)
    played = replace(of_team).make_workflow(workflow)
    of_one = replace(
        of_team,
        workflow="single",
        max_completion_length=of_team.max_completion_length * len(played.slots) // played.num_turns,
        num_agents=None,
        roles=solver or None,
        endpoints=None,
        class_split=None,
        centralized=False,
        parameter_sharing="shared",
    )
    for field in fields(TeamSettings):
        if field.name in PROGRAM_OPTIONS:
            setattr(of_one, field.name, field.default)
    base = base_model or saved.base_model
    of_base = replace(saved, base_model=base, revision=None if base_model else saved.revision)
    return untrained_team(base, of_one, load_tokenizer(path), as_trained(of_base, model_init_kwargs))
