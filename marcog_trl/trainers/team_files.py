"""
The files that a saved team has beside its ordinary PEFT adapter.

`team.json` (format 1) says what the team is: agents with their role texts, workflow, base model, sharing, package
versions. `team_modules.safetensors` holds the value head, the core decoder and the latent networks, where the team has
them; keys are those of [`TeamModule`].
"""

from __future__ import annotations

import json
import os
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer_utils import get_last_checkpoint


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
    "repetition_penalty", "use_cpu", "bf16",
)  # fmt: skip
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
    return {
        "format_version": FORMAT_VERSION,
        "trainer": type(trainer).__name__,
        "base_model": trainer.model.config.name_or_path,
        "agents": [{"name": agent.name, "role": agent.role} for agent in trainer.workflow.agents],
        "workflow": type(trainer.workflow).__name__,
        "num_turns": trainer.workflow.num_turns,
        "modules": modules,
        "rewards": trainer.reward_func_names,
        "settings": {f.name: getattr(trainer.args, f.name) for f in fields(trainer.args) if f.name in _SETTINGS},
        "versions": {package: version(package) for package in ("marcog-trl", "trl", "transformers", "peft", "torch")},
    }


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a file that is either whole or absent: it appears by rename."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(partial, path)


def check_checkpoint(
    trainer: MultiAgentTrainer, resume_from_checkpoint: str | bool | None, but: tuple[str, ...] = ()
) -> None:
    """
    Refuses a checkpoint that is not this team's.

    Args:
        trainer (`MultiAgentTrainer`): The trainer that is about to continue it.
        resume_from_checkpoint (`str` or `bool`, *optional*): As in `Trainer.train`.
        but (`tuple[str, ...]`, *optional*): Keys of `team.json` that may differ.

    Raises:
        ValueError: If the checkpoint has no `team.json`, or another team, base model or format.
    """
    if not resume_from_checkpoint:
        return
    if resume_from_checkpoint is True:
        resume_from_checkpoint = get_last_checkpoint(trainer.args.output_dir)
        if resume_from_checkpoint is None:
            return  # the Trainer says so
    path = Path(str(resume_from_checkpoint)) / TEAM_FILE
    if not path.is_file():
        raise ValueError(
            f"resume_from_checkpoint={resume_from_checkpoint!r} has no {TEAM_FILE}; a checkpoint-* folder written by "
            f"{type(trainer).__name__} works"
        )
    saved, current = json.loads(path.read_text()), trainer.team_description()
    for key in _IDENTITY:
        if key not in but and saved.get(key) != current[key]:
            raise ValueError(
                f"resume_from_checkpoint={resume_from_checkpoint!r} is of another team: its {key} is {saved.get(key)!r}, "
                f"this run's is {current[key]!r}"
            )
