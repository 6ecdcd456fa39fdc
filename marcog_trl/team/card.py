"""The model card of a team, `README.md`: what the team is, how to use it, what was measured, how it was trained."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from huggingface_hub import ModelCard

from marcog_trl.files import read_json
from marcog_trl.report.results import ROWS
from marcog_trl.team.description import TEAM_FILE


if TYPE_CHECKING:
    from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer


AGENTS_FOLDER = "agents"
EXPORT_FILE = "export.json"
CARD_FILE = "README.md"
RESULTS_FILE = "results.json"
# What the card says of the run beside what `team.json` has
_SETTINGS_OF_CARD = (
    "num_generations", "generation_batch_size", "num_iterations", "learning_rate", "critic_learning_rate",
    "latent_learning_rate", "inference_learning_rate", "advantage", "loss_type", "beta", "gamma", "lam", "gamma_turn",
    "temperature", "max_completion_length", "seed",
)  # fmt: skip
# TRL's card from here on is kept: how the team was trained, versions, citations
TRAINING, _VERSIONS = "## Training procedure", "### Framework versions"
_PROBLEM = {"prompt": "def add(a, b):  # the sum of a and b", "entry_point": "add"}  # of the card's snippets
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the values that --max-lora-rank takes


def finish_card(trainer: MultiAgentTrainer) -> None:
    """
    Make TRL's card, which `create_model_card` has just written to `output_dir`, that of a team.

    Args:
        trainer ([`MultiAgentTrainer`]): The team's trainer.
    """
    if not trainer.is_world_process_zero():
        return
    settings = {}
    if trainer.state.global_step:  # 0 where a saved team was loaded, whose training this trainer does not know
        settings = {f.name: getattr(trainer.args, f.name) for f in fields(trainer.args) if f.name in _SETTINGS_OF_CARD}
        settings = {"optimizer steps": trainer.state.global_step, **settings}
    folder = Path(cast(str, trainer.args.output_dir))
    write_card(folder, trainer.hub_model_id, trainer.team_description(), settings)


def write_card(
    folder: str | Path,
    repo_id: str | None = None,
    team: Mapping[str, Any] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """
    Write the part of a card that says what the team is and how to use it; of the card that is there, metadata and all
    from "Training procedure" on is kept.

    Args:
        folder (`str` or `Path`): Folder of the team, with a card that a trainer wrote.
        repo_id (`str`, *optional*): Repository that the card's snippets load. Defaults to the folder itself.
        team (`dict`, *optional*): Description of the team. Defaults to the folder's `team.json`.
        settings (`dict`, *optional*): Settings of the training, to be added to what is kept.

    Raises:
        ValueError: If the card was not written by a trainer.
    """
    folder = Path(folder)
    card = ModelCard((folder / CARD_FILE).read_text())
    _, heading, training = card.text.partition(TRAINING)
    if not heading:
        raise ValueError(f"{str(folder / CARD_FILE)!r} has no section {TRAINING!r}; trainer.create_model_card() works")
    if team is None:
        team = read_json(folder / TEAM_FILE)
    if settings:
        rows = [(f"`{name}`" if name in _SETTINGS_OF_CARD else name, value) for name, value in settings.items()]
        training = training.replace(_VERSIONS, f"{_table(['setting', 'value'], rows)}\n\n{_VERSIONS}", 1)
    sections = [
        _introduction(card.data, team, repo_id),
        _agents(folder, team),
        *_usage(folder, team, repo_id),
        *_results(folder),
    ]
    card.text = "\n" + "\n\n".join(sections) + f"\n\n{heading}{training}"
    partial = folder / f"{CARD_FILE}.partial"
    partial.write_text(str(card))
    os.replace(partial, folder / CARD_FILE)


def _table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    header = list(header)
    lines = [header, ["---"] * len(header), *rows]
    cells = ([" ".join(str(cell).split()).replace("|", "\\|") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def _is_local(model: str) -> bool:
    return Path(model).is_absolute() or Path(model).is_dir()


def _loadable(model: str) -> str:
    """What a snippet loads the base model from; where it lies on this machine is nobody's business."""
    return f"path/to/{Path(model).name}" if _is_local(model) else model


def _introduction(data: Any, team: Mapping[str, Any], repo_id: str | None) -> str:
    base = team["base_model"]
    link = f"the local model `{Path(base).name}`" if _is_local(base) else f"[{base}](https://huggingface.co/{base})"
    problems = f" on `{data.datasets}`" if data.datasets else ""
    number = len(team["agents"])
    agents = "One LLM agent" if number == 1 else f"A team of {number} LLM agents that share one base model,"
    title = repo_id.rpartition("/")[2] if repo_id else data.model_name
    rewards = ", ".join(f"`{reward}`" for reward in team["rewards"])
    other = ""
    if "trained_as" in team:
        trained = ", ".join(f"`{agent['name']}`" for agent in team["trained_as"])
        other = f" It was trained with other agents or role texts ({trained}), and not trained further with these."
    return (
        f"# {title}\n\n{agents} {'on ' if number == 1 else ''}{link}, trained{problems} by reinforcement learning with "
        f"`marcog_trl`, a plugin of [TRL](https://github.com/huggingface/trl). Trainer: `{team['trainer']}`; workflow: "
        f"`{team['workflow']}`, {team['num_turns']} turn{'s' * (team['num_turns'] > 1)}; rewards: {rewards}.{other}"
    )


def _exported(folder: Path, team: Mapping[str, Any]) -> dict[str, Any] | None:
    """What `export.json` says, if the agents that were exported are this team's."""
    path = folder / AGENTS_FOLDER / EXPORT_FILE
    exported = read_json(path, "agents") if path.is_file() else {"agents": {}}
    return exported if set(exported["agents"]) == {agent["name"] for agent in team["agents"]} else None


def _agents(folder: Path, team: Mapping[str, Any]) -> str:
    exported = _exported(folder, team)
    header = ["agent", "role", *(["adapter"] if exported else [])]
    rows = [
        [agent["name"], agent["role"], *([f"`{AGENTS_FOLDER}/{agent['name']}`"] if exported else [])]
        for agent in team["agents"]
    ]
    text = ""
    if exported and exported["latent_scope"] == "observation":
        header.append("KL per token")
        for row in rows:
            measured = exported["agents"][row[0]]
            row.append(f"{measured['kl_per_token']:.2g} ({measured['tokens']} tokens)")
        text = (
            "The live agents adapt to each prompt (latents in observation scope). The adapter of an agent holds the mean of "
            "its latents; the table says how far it is from the live agent, KL(live ‖ adapter) in nats per token that the "
            "live agent wrote."
        )
    elif exported and exported["latent_scope"] == "agent":
        text = (
            "The adapter of an agent is the shared one with the agent's latent folded in, which is the agent exactly."
        )
    elif exported and exported["parameter_sharing"] == "separate":
        text = "Each agent was trained with an adapter of its own."
    elif exported and len(rows) > 1:
        text = "All agents use the shared adapter; the copies are equal, and the agents differ by their prompts."
    return "\n\n".join(filter(None, ["## Agents", _table(header, rows), text, team.get("note")]))


def _usage(folder: Path, team: Mapping[str, Any], repo_id: str | None) -> list[str]:
    names = [agent["name"] for agent in team["agents"]]
    base, source = _loadable(team["base_model"]), repo_id or "."
    whole = f"""## The whole team

```python
from marcog_trl import Team

team = Team.from_pretrained("{source}")
print(team.solve({_PROBLEM!r}).code)
```"""
    if _exported(folder, team) is None:
        return [whole]
    asked = "" if team["workflow"] == "Single" else f"{team['agents'][0]['role']}\n\n"
    asked += _PROBLEM["prompt"]
    if (folder / "chat_template.jinja").is_file():
        tokenized = (
            'tokenizer.apply_chat_template(\n    [{"role": "user", "content": prompt}], add_generation_prompt=True, '
            'return_dict=True, return_tensors="pt"\n)'
        )
    else:
        tokenized = 'tokenizer(prompt, return_tensors="pt")'
    more = "".join(
        f'model.load_adapter(team, subfolder="{AGENTS_FOLDER}/{name}", adapter_name="{name}")\n' for name in names[1:]
    )
    peft = f"""## One agent with PEFT

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer

team = "{source}"
tokenizer = AutoTokenizer.from_pretrained(team)
model = AutoModelForCausalLM.from_pretrained("{base}", dtype="auto", device_map="auto")
model = PeftModel.from_pretrained(model, team, subfolder="{AGENTS_FOLDER}/{names[0]}", adapter_name="{names[0]}")
{more}
model.set_adapter("{names[0]}")
prompt = {asked!r}
inputs = {tokenized}.to(model.device)
output = model.generate(**inputs, max_new_tokens={team["settings"]["max_completion_length"]})
print(tokenizer.decode(output[0, inputs["input_ids"].size(1) :], skip_special_tokens=True))
```"""
    config = json.loads((folder / AGENTS_FOLDER / names[0] / "adapter_config.json").read_text())
    rank = max([config["r"], *config["rank_pattern"].values()]) if config["peft_type"] == "LORA" else None
    if rank is None or rank > _VLLM_RANKS[-1]:
        return [peft, whole]
    modules = " ".join(f"{name}={'team/' if repo_id else ''}{AGENTS_FOLDER}/{name}" for name in names)
    download = f"hf download {repo_id} --local-dir team\n" if repo_id else ""
    vllm = f"""## All agents with vLLM

```bash
{download}vllm serve {base} --enable-lora --max-loras {len(names)} --max-lora-rank {min(r for r in _VLLM_RANKS if r >= rank)} \\
    --lora-modules {modules}
```

A request names its agent as its model, such as `"model": "{names[0]}"`."""
    return [peft, vllm, whole]


def _results(folder: Path) -> list[str]:
    """A table of what the recipes measured, where there is one."""
    path = folder / RESULTS_FILE
    results = read_json(path) if path.is_file() else {}
    columns = [name for name in ("untrained", "trained") if name in results]
    if not columns:
        return []
    rows = []
    for key, label in ROWS:
        row = [label]
        for name in columns:
            interval = results[name].get(f"{key}_interval")
            row.append(f"{results[name][key]:.3f}" + (f" ± {interval:.3f}" if interval is not None else ""))
        rows.append(row)
    samples = results[columns[-1]]["samples"]
    note = f"On held-out problems; {samples} sampled episodes, ± half the width of a 95 % interval."
    return ["## Results\n\n" + _table(["", *columns], rows) + f"\n\n{note}"]
