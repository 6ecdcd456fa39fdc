"""
The model card of a team, `README.md`: what the team is, how to use it, its results, and how it was trained.

The card is rendered from `card.md.jinja`. What it says of the training is kept in its metadata under `marcog_trl`, so that a
folder's card can be written again without the trainer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from huggingface_hub import ModelCard, ModelCardData
from transformers.integrations import is_wandb_available

from marcog_trl.files import read_json
from marcog_trl.report.results import result_rows
from marcog_trl.team.description import TEAM_FILE


if TYPE_CHECKING:
    from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer


AGENTS_FOLDER = "agents"
EXPORT_FILE = "export.json"
CARD_FILE = "README.md"
RESULTS_FILE = "results.json"
_TEMPLATE = Path(__file__).with_name("card.md.jinja")
_METADATA = "marcog_trl"  # the key of the card's metadata that describes the training
# Shown in the card beside what `team.json` has
_TRAINING_SETTINGS = (
    "num_generations", "generation_batch_size", "num_iterations", "learning_rate", "critic_learning_rate",
    "latent_learning_rate", "inference_learning_rate", "advantage", "loss_type", "beta", "gamma", "lam", "gamma_turn",
    "temperature", "max_completion_length", "seed",
)  # fmt: skip
_PACKAGES = {
    "marcog_trl": "marcog-trl", "TRL": "trl", "Transformers": "transformers", "PEFT": "peft", "PyTorch": "torch",
    "Datasets": "datasets", "Tokenizers": "tokenizers",
}  # fmt: skip
_TASK = "def add(a, b):  # the sum of a and b"  # the problem that the snippets solve
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the values that --max-lora-rank takes


def finish_card(trainer: MultiAgentTrainer) -> None:
    """
    Replace the card that TRL has just written to `output_dir` by that of a team. TRL's metadata is kept.

    Args:
        trainer ([`MultiAgentTrainer`]): The team's trainer.
    """
    if trainer.is_world_process_zero():
        folder = Path(cast(str, trainer.args.output_dir))
        write_card(folder, trainer.hub_model_id, trainer.team_description(), _describe_training(trainer))


def write_card(
    folder: str | Path,
    repo_id: str | None = None,
    team: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
) -> None:
    """
    Write the card of a team from the files of its folder and from the metadata of the card that is there.

    Args:
        folder (`str` or `Path`): Folder of the team, with a card.
        repo_id (`str`, *optional*): Repository that the card's snippets load. Defaults to the folder itself.
        team (`dict`, *optional*): Description of the team. Defaults to the folder's `team.json`.
        training (`dict`, *optional*): Description of the training. Defaults to that in the card's metadata.

    Raises:
        ValueError: If the card was not written by a trainer of this package and `training` is not given.
    """
    path = Path(folder) / CARD_FILE
    data = cast(ModelCardData, ModelCard(path.read_text(encoding="utf-8")).data)
    if training is not None:
        data[_METADATA] = dict(training)
    elif data.get(_METADATA) is None:
        raise ValueError(
            f"{str(path)!r} is not the card of a team of this version. Write one with trainer.create_model_card() or "
            "recipes/export.py."
        )
    team = read_json(path.parent / TEAM_FILE) if team is None else team
    context = _describe_base(team) | _describe_agents(path.parent, team)
    card = ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        **context,
        title=repo_id.rpartition("/")[2] if repo_id else data.model_name,
        team=team,
        repo_id=repo_id,
        source=repo_id or ".",
        task=_TASK,
        has_chat_template=(path.parent / "chat_template.jinja").is_file(),
        results=_describe_results(path.parent),
        training=data[_METADATA],
    )
    partial = path.with_name(f"{CARD_FILE}.partial")
    card.save(partial)
    os.replace(partial, path)


def is_team_card(path: Path) -> bool:
    """Whether a file is a card that [`write_card`] can write again."""
    return path.is_file() and ModelCard(path.read_text(encoding="utf-8")).data.get(_METADATA) is not None


def _describe_training(trainer: MultiAgentTrainer) -> dict[str, Any]:
    """What a card says of the training, as plain values that YAML can hold."""
    settings = {f.name: getattr(trainer.args, f.name) for f in fields(trainer.args) if f.name in _TRAINING_SETTINGS}
    training: dict[str, Any] = {
        "trainer": trainer._name,
        "paper": dict(trainer._paper),
        "links": _run_links(),
        "versions": {name: version(package) for name, package in _PACKAGES.items()},
    }
    if trainer.state.global_step:  # 0 for a loaded team, whose training this trainer does not know
        plain = {name: v if isinstance(v, bool | int | float | None) else str(v) for name, v in settings.items()}
        training |= {"steps": trainer.state.global_step, "settings": plain}
    return training


def _run_links() -> dict[str, str]:
    """Pages of the run in the trackers that TRL's card links to."""
    from trl.trainer.utils import get_comet_experiment_url, get_trackio_space_url

    urls = {"Trackio": get_trackio_space_url(), "Comet": get_comet_experiment_url()}
    if is_wandb_available():
        import wandb

        urls["Weights & Biases"] = wandb.run.url if wandb.run is not None else None
    return {name: url for name, url in urls.items() if url}


def _describe_base(team: Mapping[str, Any]) -> dict[str, Any]:
    """The base model as a snippet loads it. The folder of a local model is not given away."""
    model, name = team["base_model"], Path(team["base_model"]).name
    is_local = Path(model).is_absolute() or Path(model).is_dir()
    return {"base": f"path/to/{name}" if is_local else model, "base_name": name, "base_is_local": is_local}


def _describe_agents(folder: Path, team: Mapping[str, Any]) -> dict[str, Any]:
    """The agents, and how to use them one by one if the folder has the adapters of these very agents."""
    agents = [{**agent, "adapter": f"{AGENTS_FOLDER}/{agent['name']}"} for agent in team["agents"]]
    path = folder / AGENTS_FOLDER / EXPORT_FILE
    exported = read_json(path, "agents") if path.is_file() else None
    if exported is None or set(exported["agents"]) != {agent["name"] for agent in agents}:
        return {"agents": agents, "exported": None, "max_lora_rank": None}
    role = "" if team["workflow"] == "Single" else f"{agents[0]['role']}\n\n"
    config = json.loads((folder / agents[0]["adapter"] / "adapter_config.json").read_text())
    rank = max([config["r"], *config["rank_pattern"].values()]) if config["peft_type"] == "LORA" else None
    max_lora_rank = None if rank is None else next((served for served in _VLLM_RANKS if served >= rank), None)
    return {
        "agents": agents,
        "exported": exported,
        "prompt": repr(role + _TASK),
        "max_lora_rank": max_lora_rank,
    }


def _describe_results(folder: Path) -> dict[str, Any] | None:
    """The table of the figures in `results.json`, if the folder has them."""
    path = folder / RESULTS_FILE
    results = read_json(path) if path.is_file() else {}
    columns = [name for name in ("untrained", "trained") if name in results]
    if not columns:
        return None
    return {"columns": columns, "rows": result_rows(results, columns), "samples": results[columns[-1]]["samples"]}
