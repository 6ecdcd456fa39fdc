"""
The files that a saved team has beside its ordinary PEFT adapter.

`team.json` (format 1) says what the team is: agents with their role texts, workflow, base model, sharing, package
versions. `team_modules.safetensors` holds the value head, the core decoder and the latent networks, where the team has
them; keys are those of [`TeamModule`].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import version
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer


TEAM_FILE = "team.json"
MODULES_FILE = "team_modules.safetensors"
FORMAT_VERSION = 1
# The settings without which a saved team would speak otherwise than it did
_SETTINGS = (
    "workflow", "num_turns", "num_agents", "roles", "centralized", "class_split", "feedback", "visible_tests", "expert_model",
    "expert_base_url", "critic", "critic_backprop", "parameter_sharing",
    "latent_scope", "latent_size", "sigma_min", "max_completion_length", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "generation_kwargs", "chat_template_kwargs", "early_termination_threshold",
)  # fmt: skip
# Earlier versions saved them, though they say nothing of a team: where it computes, and in which precision
_OF_MACHINE = ("use_cpu", "bf16")
# What must agree for a checkpoint to be continued
_IDENTITY = ("format_version", "trainer", "base_model", "agents", "workflow", "num_turns", "modules")


def describe_team(trainer: MultiAgentTrainer, modules: dict[str, Any]) -> dict[str, Any]:
    """
    Args:
        trainer (`MultiAgentTrainer`): The trainer of the team.
        modules (`dict`): What determines the shapes of the team's own modules, such as the size of the latent.

    Returns:
        `dict`: The content of `team.json`.
    """
    quantised = getattr(trainer.model.config, "quantization_config", None)
    return {
        "format_version": FORMAT_VERSION,
        "trainer": type(trainer).__name__,
        "base_model": trainer.model.config.name_or_path,
        **({} if quantised is None else {"quantization_config": quantised.to_dict()}),
        "agents": [{"name": agent.name, "role": agent.role} for agent in trainer.workflow.agents],
        "workflow": type(trainer.workflow).__name__,
        "num_turns": trainer.workflow.num_turns,
        "modules": modules,
        "rewards": trainer.reward_func_names,
        "settings": {f.name: getattr(trainer.args, f.name) for f in fields(trainer.args) if f.name in _SETTINGS},
        "versions": {package: version(package) for package in ("marcog-trl", "trl", "transformers", "peft", "torch")},
    }


def settings_of(team: Mapping[str, Any]) -> dict[str, Any]:
    """The settings in the content of a `team.json`, without those of the machine that older versions saved."""
    return {name: value for name, value in team["settings"].items() if name not in _OF_MACHINE}


def differing(
    saved: dict[str, Any], current: dict[str, Any], but: tuple[str, ...] = ()
) -> tuple[str, Any, Any] | None:
    """
    In what a saved team is another one.

    Args:
        saved, current (`dict`): Contents of `team.json`.
        but (`tuple[str, ...]`, *optional*): Keys that may differ.

    Returns:
        `tuple`, *optional*: The first key that differs, and what either says; `None` if they are the same team.
    """
    for key in _IDENTITY:
        if key not in but and saved.get(key) != current[key]:
            return key, saved.get(key), current[key]
    return None
