"""What a trained team is compared with: a model as it is, as a team or as a single agent with the team's budget of tokens."""

from __future__ import annotations

import json
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import AutoTokenizer

from marcog_trl.agents import Workflow
from marcog_trl.team.description import TEAM_FILE, settings_of
from marcog_trl.trainers.multi_agent_config import MultiAgentConfig
from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer
from marcog_trl.trainers.saved import find_team


def untrained_team(
    model: str,
    problems: Dataset,
    reward_funcs: Any = "execution_reward",
    processing_class: Any = None,
    **settings: Any,
) -> MultiAgentTrainer:
    """
    A trainer that holds a team on a model as it is: its adapter is new, and changes nothing.

    Args:
        model (`str`): Name or path of the model.
        problems (`Dataset`): Problems with tests.
        reward_funcs (`str`, `Callable` or `list`, *optional*, defaults to `"execution_reward"`): As in
            [`MultiAgentTrainer`].
        processing_class (`PreTrainedTokenizerBase`, *optional*): Defaults to the model's own.
        **settings: Fields of [`MultiAgentConfig`], such as `workflow`, which is `"single"` by default.

    Returns:
        [`MultiAgentTrainer`].

    Raises:
        ValueError: If workflow, problems and rewards do not fit each other.
    """
    args = MultiAgentConfig(output_dir=tempfile.mkdtemp(prefix="marcog-trl-"), report_to="none", **settings)
    return MultiAgentTrainer(model, reward_funcs, args, problems, processing_class=processing_class)


def single_agent(
    path: str | Path,
    problems: Dataset,
    workflow: Workflow | None = None,
    base_model: str | None = None,
    **settings: Any,
) -> MultiAgentTrainer:
    """
    A trainer that holds the untrained base model of a saved team as one agent, which may write as many tokens in a turn as
    all the team's replies together. Its reward is `execution_reward`, since that of a team may need one.

    Args:
        path (`str`): Folder of the saved team, or a repository of the Hub.
        problems (`Dataset`): Problems with tests.
        workflow (`Workflow`, *optional*): The team's workflow, where it is not a built-in one.
        base_model (`str`, *optional*): Where the base model is, if not where it was.
        **settings: Fields of the team's configuration that replace the saved ones, such as `temperature`, or
            `max_completion_length`, which is that of one reply of the team.

    Returns:
        [`MultiAgentTrainer`].

    Raises:
        ValueError: If the folder is not a saved team.
    """
    path = find_team(path)
    team = json.loads((path / TEAM_FILE).read_text())
    known = {field.name for field in fields(MultiAgentConfig)}
    of_team = {name: value for name, value in {**settings_of(team), **settings}.items() if name in known}
    if workflow is None:
        workflow = MultiAgentTrainer._make_workflow(None, MultiAgentConfig(tempfile.gettempdir(), **of_team))
    budget = of_team["max_completion_length"] * len(workflow.slots) // workflow.num_turns
    of_one = {"workflow": "single", "max_completion_length": budget, "num_agents": None, "roles": None}
    return untrained_team(
        base_model or team["base_model"],
        problems,
        processing_class=AutoTokenizer.from_pretrained(path, padding_side="left"),
        **{**of_team, **of_one, "class_split": None, "centralized": False},
    )
