"""
The files that a saved team has beside its ordinary PEFT adapter.

`team.json` (format 1) says what the team is: agents with their role texts, workflow, base model, sharing, package
versions. `team_modules.safetensors` holds the value head, the core decoder and the latent networks, where the team has
them; keys are those of [`TeamModule`]. `complete.json` is in checkpoints only: it lists all other files, of all processes,
with their sizes, and is written last.
"""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import gather_object
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR


if TYPE_CHECKING:
    from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer


TEAM_FILE = "team.json"
MODULES_FILE = "team_modules.safetensors"
COMPLETE_FILE = "complete.json"
FORMAT_VERSION = 1
# The settings without which a saved team would speak otherwise than it did
_SETTINGS = (
    "workflow", "num_turns", "num_agents", "roles", "centralized", "class_split", "feedback", "visible_tests", "expert_model",
    "expert_base_url", "critic", "critic_backprop", "parameter_sharing",
    "latent_scope", "latent_size", "sigma_min", "max_completion_length", "temperature", "top_p", "top_k", "min_p",
    "repetition_penalty", "generation_kwargs", "chat_template_kwargs", "early_termination_threshold", "use_cpu", "bf16",
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


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes a JSON file that is either whole or absent."""
    write_whole(path, (json.dumps(content, indent=2) + "\n").encode())


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file that is either whole or absent, or what it was before: it appears by rename."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(content)
    os.replace(partial, path)


def mark_complete(checkpoint: Path, rollout_begun: bool = False) -> None:
    """
    Lists the files of a checkpoint in `complete.json`; called by one process, after all of them have written theirs.

    Args:
        checkpoint (`Path`): Its folder.
        rollout_begun (`bool`, *optional*, defaults to `False`):
            Whether a part of the rows that were generated last is still to be trained on, which a resumed run would not do.
    """
    sizes = {
        path.relative_to(checkpoint).as_posix(): path.stat().st_size
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name != COMPLETE_FILE and path.suffix != ".partial"
    }
    write_json(checkpoint / COMPLETE_FILE, {"files": sizes, "rollout_begun": rollout_begun})


def what_is_missing(checkpoint: Path) -> str | None:
    """
    Why a checkpoint is not whole: the run was killed while it was written, or while it was deleted, or it was written while
    rows were left to be trained on.

    Args:
        checkpoint (`Path`): A `checkpoint-*` folder.

    Returns:
        `str`, *optional*: What is missing; `None` if the checkpoint is whole.
    """
    if not (checkpoint / COMPLETE_FILE).is_file():
        return f"it has no {COMPLETE_FILE}, which is written last"
    complete = json.loads((checkpoint / COMPLETE_FILE).read_text())
    if complete.get("rollout_begun"):
        return "it was written inside a generation cycle, and the rows that were still to be trained on are gone"
    for name, size in complete["files"].items():
        path = checkpoint / name
        if not path.is_file():
            return f"it has no {name}"
        if path.stat().st_size != size:
            return f"its {name} has {path.stat().st_size} bytes, and had {size}"
    return None


def find_checkpoint(trainer: MultiAgentTrainer, resume_from_checkpoint: str | bool | None) -> str | bool | None:
    """
    The checkpoint to continue; with several processes, a collective operation.

    Args:
        trainer (`MultiAgentTrainer`): The trainer that is about to continue it.
        resume_from_checkpoint (`str` or `bool`, *optional*): As in `Trainer.train`. `True` stands for the last checkpoint
            of `output_dir` that is whole for every process; later ones that are not are left aside with a warning.

    Returns:
        `str` or `bool`, *optional*: The folder of a whole checkpoint of this team. What was given, if it asks for none, or
        if there is none, which the Trainer reports.

    Raises:
        ValueError: If the checkpoint, or every one of `output_dir`, is not whole, or it is not this team's.
    """
    if not resume_from_checkpoint:
        return resume_from_checkpoint
    if resume_from_checkpoint is True:
        prefix = f"{PREFIX_CHECKPOINT_DIR}-"
        folders = [path for path in Path(str(trainer.args.output_dir)).glob(f"{prefix}*") if path.is_dir()]
        step_of = {str(path): path.name.removeprefix(prefix) for path in folders}
        paths = [path for path, step in step_of.items() if step.isdecimal()]
        paths.sort(key=lambda path: int(step_of[path]), reverse=True)
    else:
        paths = [str(resume_from_checkpoint)]
        check_checkpoint(trainer, paths[0])
    # Nodes without a common disk may have been killed at different moments
    everywhere = gather_object([{path: what_is_missing(Path(path)) for path in paths}])
    missing = {
        path: next((why for of in everywhere if (why := of.get(path, "a process does not find it")) is not None), None)
        for path in dict.fromkeys(path for of in everywhere for path in of)
    }
    whole = next((path for path, why in missing.items() if why is None), None)
    for path, why in missing.items():
        if whole is None:
            raise ValueError(
                f"resume_from_checkpoint={resume_from_checkpoint!r}: {path} is not whole: {why}; a checkpoint-* folder that "
                f"{type(trainer).__name__} wrote to its end, or a new run, works"
            )
        if path == whole:
            check_checkpoint(trainer, whole)
            return whole
        if trainer.accelerator.is_main_process:
            warnings.warn(f"{path} is left aside: {why}; {whole} is continued", stacklevel=3)
    return resume_from_checkpoint


def check_checkpoint(trainer: MultiAgentTrainer, checkpoint: str, but: tuple[str, ...] = ()) -> None:
    """
    Refuses a checkpoint that is not this team's.

    Args:
        trainer (`MultiAgentTrainer`): The trainer that is about to continue it.
        checkpoint (`str`): Its folder.
        but (`tuple[str, ...]`, *optional*): Keys of `team.json` that may differ.

    Raises:
        ValueError: If the checkpoint has no `team.json`, or another team, base model or format.
    """
    path = Path(checkpoint) / TEAM_FILE
    if not path.is_file():
        raise ValueError(
            f"resume_from_checkpoint={checkpoint!r} has no {TEAM_FILE}; a checkpoint-* folder written by "
            f"{type(trainer).__name__} works"
        )
    found = differing(json.loads(path.read_text()), trainer.team_description(), but)
    if found is not None:
        key, its, ours = found
        raise ValueError(
            f"resume_from_checkpoint={checkpoint!r} is of another team: its {key} is {its!r}, this run's is {ours!r}"
        )


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
