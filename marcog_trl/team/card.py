"""
The model card of a team, `README.md`: what the team is, how to use it, its results, and how it was trained.

The first parts are rendered from `card.md.jinja`. From "Training procedure" on, it is the card that TRL's trainer wrote, which stays
when a folder's card is written again without the trainer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from huggingface_hub import ModelCard, ModelCardData

from marcog_trl.agents import ask
from marcog_trl.files import read_json
from marcog_trl.parsing.prompts import fill
from marcog_trl.report.results import result_rows
from marcog_trl.team.description import TEAM_FILE


AGENTS_FOLDER = "agents"
EXPORT_FILE = "export.json"
CARD_FILE = "README.md"
RESULTS_FILE = "results.json"
_TEMPLATE = Path(__file__).with_name("card.md.jinja")
_TRAINING, _OF_TRAINER = "\n## Training procedure\n", "generated_from_trainer"  # in TRL's cards
_TASK = "def add(a, b):  # the sum of a and b"  # the problem that the snippets solve
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the values that --max-lora-rank takes


def write_card(
    folder: str | Path,
    repo_id: str | None = None,
    team: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> None:
    """
    Write the card of a team from the files of its folder and from the card that is there.

    Args:
        folder (`str` or `Path`): Folder of the team, with a card.
        repo_id (`str`, *optional*): Repository that the card's snippets load. Defaults to the folder itself.
        team (`dict`, *optional*): Description of the team. Defaults to the folder's `team.json`.
        settings (`dict`, *optional*): Settings to add to what a card of TRL says of the training.
        name (`str`, *optional*): Title of a new card, which takes the place of one that no trainer of TRL wrote.

    Raises:
        ValueError: If the card was not written by a trainer of TRL, and `name` is not given.
    """
    path = Path(folder) / CARD_FILE
    team = read_json(path.parent / TEAM_FILE) if team is None else team
    data, training = ModelCardData(), ""
    if path.is_file():
        before = ModelCard(path.read_text(encoding="utf-8"))
        data, training = cast(ModelCardData, before.data), before.text.partition(_TRAINING)[2]
    if not training or _OF_TRAINER not in (data.get("tags") or ()):  # PEFT's card may have this heading, too
        if name is None:
            raise ValueError(
                f"{str(path)!r} is not the card of a team of this version. Write one with trainer.create_model_card() or "
                "recipes/export.py."
            )
        data = ModelCardData(
            base_model=team["base_model"],
            library_name="transformers" if team["settings"].get("full_finetuning") else "peft",
            model_name=name,
            tags=[_OF_TRAINER, "trl", "marcog-trl"],
        )
        training = f"\nThis model was trained with {team['trainer']}.\n"
    if settings:
        rows = (f"| {setting} | {value} |\n" for setting, value in settings.items())
        training = "".join(("\n| setting | value |\n| --- | --- |\n", *rows, training))
    context = _describe_base(team) | _describe_agents(path.parent, team)
    card = ModelCard.from_template(
        data,
        template_path=str(_TEMPLATE),
        **context,
        title=repo_id.rpartition("/")[2] if repo_id else data.get("model_name") or path.absolute().parent.name,
        team=team,
        repo_id=repo_id,
        source=repo_id or ".",
        task=_TASK,
        has_chat_template=(path.parent / "chat_template.jinja").is_file() and not _continues_text(team),
        system_prompt=repr(system_prompt) if (system_prompt := team["settings"].get("system_prompt")) else None,
        results=_describe_results(path.parent),
        training=_TRAINING + training,
    )
    partial = path.with_name(f"{CARD_FILE}.partial")
    card.save(partial)
    os.replace(partial, path)


def _continues_text(team: Mapping[str, Any]) -> bool:
    """Whether the only agent continues plain text without a chat template."""
    return team["workflow"] == "Single" and not team["agents"][0]["role"]


def _describe_base(team: Mapping[str, Any]) -> dict[str, Any]:
    """The base model as a snippet loads it. The folder of a local model is not given away."""
    model, name = team["base_model"], Path(team["base_model"]).name
    is_local = Path(model).is_absolute() or Path(model).is_dir()
    return {"base": f"path/to/{name}" if is_local else model, "base_name": name, "base_is_local": is_local}


def _describe_agents(folder: Path, team: Mapping[str, Any]) -> dict[str, Any]:
    """The agents, and how to use them one by one if the folder has the adapters of these very agents."""
    endpoints = team["settings"].get("endpoints") or {}
    outside = [
        {**agent, "model": endpoints[agent["name"]]["model"]} for agent in team["agents"] if agent["name"] in endpoints
    ]
    agents = [
        {**agent, "adapter": f"{AGENTS_FOLDER}/{agent['name']}"}
        for agent in team["agents"]
        if agent["name"] not in endpoints
    ]
    path = folder / AGENTS_FOLDER / EXPORT_FILE
    exported = read_json(path, "agents") if path.is_file() else None
    if exported is None or set(exported["agents"]) != {agent["name"] for agent in agents}:
        return {"agents": agents, "outside": outside, "exported": None, "max_lora_rank": None}
    role, task = agents[0]["role"], {"prompt": _TASK, "entry_point": "add"}
    config = json.loads((folder / agents[0]["adapter"] / "adapter_config.json").read_text())
    rank = max([config["r"], *config["rank_pattern"].values()]) if config["peft_type"] == "LORA" else None
    max_lora_rank = None if rank is None else next((served for served in _VLLM_RANKS if served >= rank), None)
    return {
        "agents": agents,
        "outside": outside,
        "exported": exported,
        "prompt": repr(ask(fill(role, task), _TASK)[-1]["content"] if role else _TASK),
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
