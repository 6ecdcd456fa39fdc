"""Makes a trainer again from a saved team, to measure it or to go on from it."""

from __future__ import annotations

import difflib
import json
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset, IterableDataset
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from peft import PeftConfig, get_peft_model_state_dict
from safetensors import safe_open
from transformers import AutoTokenizer

from marcog_trl.agents import Workflow
from marcog_trl.team.base_models import check_model
from marcog_trl.team.description import FORMAT_VERSION, MODULES_FILE, TEAM_FILE, differing, settings_of
from marcog_trl.trainers.multi_agent_grpo_trainer import MultiAgentGRPOTrainer
from marcog_trl.trainers.multi_agent_ppo_trainer import MultiAgentPPOTrainer
from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer
from marcog_trl.trainers.shppo_trainer import SHPPOTrainer
from marcog_trl.workflows import make_workflow


TRAINERS = {
    cls.__name__: cls for cls in (MultiAgentTrainer, MultiAgentGRPOTrainer, MultiAgentPPOTrainer, SHPPOTrainer)
}
_SAVED = "Use a folder that a trainer's save_model wrote."
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")


def load_trainer(
    path: str | Path,
    problems: Dataset | IterableDataset,
    workflow: Workflow | None = None,
    reward_funcs: Any = None,
    base_model: str | None = None,
    quantization_config: Any = None,
    **settings: Any,
) -> MultiAgentTrainer:
    """
    A trainer that holds a saved team, or one of another size or with other roles that shares its weights.

    Args:
        path (`str`): Folder that `save_model` wrote, a checkpoint, or a repository of the Hub.
        problems (`Dataset`): Problems with tests.
        workflow (`Workflow`, *optional*): The team's workflow, where it is not a built-in one.
        reward_funcs (`str`, `Callable` or `list`, *optional*): As in [`MultiAgentTrainer`]. By default those of the run,
            which must then be functions of this package.
        base_model (`str`, *optional*): Where the base model is, if not where it was.
        quantization_config (`BitsAndBytesConfig`, *optional*): How the base model is quantised, as in [`MultiAgentTrainer`].
        **settings: Fields of the trainer's configuration that replace the saved ones. With `num_agents` or `roles` the team
            may be another one than was trained; agents without a text in `roles` keep the one that they were trained with.

    Returns:
        [`MultiAgentTrainer`]: With the team's adapter and modules; of the class that saved it.

    Raises:
        ValueError: If the folder is not a saved team of this format, lacks a file, has one that cannot be read or does not
            fit the base model, its team is not that of the workflow, a setting is unknown, or agents with adapters of their
            own would have to be others.
    """
    path = find_team(path)
    team = json.loads((path / TEAM_FILE).read_text())
    trainer_class, saved = TRAINERS[team["trainer"]], settings_of(team)
    # Where each agent has an adapter of its own, the trainer stacks them itself
    separate = saved.get("parameter_sharing") == "separate"
    known = [f.name for f in fields(trainer_class._config_class)]
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ValueError(f"{team['trainer']} has no setting {name!r}.{hint}")
    for name in saved:
        if name not in known:
            raise ValueError(f"{str(path / TEAM_FILE)!r} has the unknown setting {name!r}. Remove it from the file.")
    if separate and settings.get("num_agents") == len(team["agents"]):
        del settings["num_agents"]
    others = tuple(name for name in ("num_agents", "roles") if settings.get(name) is not None)
    if separate and "num_agents" in others:
        raise ValueError(
            f"num_agents={settings['num_agents']} does not fit {str(path)!r}, where each of the agents "
            f"{[agent['name'] for agent in team['agents']]} has its own adapter. Leave num_agents out, or use a team that shares "
            "one adapter."
        )
    if workflow is None and others:
        settings["roles"] = _roles(saved, settings)
    folders = [path / "agents" / agent["name"] for agent in team["agents"]] if separate else []
    for folder in (path, *folders):
        for name in ADAPTER_FILES:
            if not (folder / name).is_file():
                raise ValueError(f"{str(folder)!r} has no {name}. {_SAVED}")
    for file in (*(folder / ADAPTER_FILES[1] for folder in (path, *folders)), path / MODULES_FILE):
        if file.is_file():
            with _reading(file), safe_open(file, "pt"):
                pass
    adapter = folders[0] if separate else path
    args = trainer_class._config_class(
        output_dir=tempfile.mkdtemp(prefix="marcog-trl-"), report_to="none", **{**saved, **settings}
    )
    with _reading(adapter / ADAPTER_FILES[0]):
        peft_config = PeftConfig.from_pretrained(str(adapter))
    if peft_config.base_model_name_or_path != team["base_model"]:
        raise ValueError(
            f"the adapter in {str(adapter)!r} is for {peft_config.base_model_name_or_path!r}, but {TEAM_FILE} names the base "
            f"model {team['base_model']!r}. {_SAVED}"
        )
    peft_config.inference_mode = False  # as which PEFT saves it, and which would freeze it
    with _reading(path / "tokenizer.json"):
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left")
    names = tokenizer.vocab_files_names.values()
    if not any(
        (path / name).is_file() for name in names
    ):  # an empty vocabulary, to which transformers has no objection
        raise ValueError(f"{str(path)!r} has none of {', '.join(names)}. {_SAVED}")
    model = base_model or team["base_model"]
    try:
        check_model("base_model", model, tokenizer=False)  # the team brings its own
    except ValueError as error:
        raise ValueError(f"{error} It is the base model of {str(path)!r}: set base_model to where it is.") from error
    trainer = trainer_class(
        model=model,
        reward_funcs=team["rewards"] if reward_funcs is None else reward_funcs,
        args=args,
        train_dataset=problems,
        processing_class=tokenizer,
        quantization_config=quantization_config,
        peft_config=peft_config,
        workflow=workflow,
    )
    quantised = team.get("quantization_config")
    if quantised and not getattr(trainer.model.get_base_model(), "is_quantized", False):
        warnings.warn(
            f"{str(path)!r} was trained on a quantised base model ({quantised}), and is loaded on one that is not quantised. Pass "
            "the same quantization_config to get what was trained.",
            stacklevel=2,
        )
    listed = [agent["name"] for agent in team["agents"]]
    # With num_turns, num_agents or roles, the same weights are another team
    replaced = {name: value for name, value in settings.items() if name in saved and value != saved[name]}
    but = tuple(name for name, given in (("agents", others), ("base_model", base_model)) if given)
    but += ("num_turns",) if "num_turns" in replaced else ()
    if not others and listed != trainer.agents:
        if workflow is not None:
            raise ValueError(
                f"the given workflow has the agents {trainer.agents}, but the team of {str(path)!r} has {listed}. Use the "
                "workflow that the team was trained with."
            )
        raise ValueError(
            f"{str(path / TEAM_FILE)!r} has the agents {listed}, but its workflow {type(trainer.workflow).__name__} has "
            f"{trainer.agents}. {_SAVED}"
        )
    found = differing(team, trainer.team_description(), but)
    if found is not None:
        key, its, ours = found
        if replaced:
            raise ValueError(
                f"{str(path)!r} was saved with {key}={its!r}. With {', '.join(f'{k}={v!r}' for k, v in replaced.items())} it "
                f"would be {ours!r}, which its weights do not fit. Leave these settings out."
            )
        raise ValueError(
            f"{str(path / TEAM_FILE)!r} contradicts itself: {key} is {its!r}, but its settings give {ours!r}. {_SAVED} For other "
            "role texts, pass roles={'main': ...} or --agents agents.yaml."
        )
    what = f"the weights of {str(path)!r}, on the base model {model!r},"
    with _reading(what, "Set base_model to the one that they were trained on."):
        _check_layers(trainer, path / ADAPTER_FILES[1])
        trainer._load_from_checkpoint(str(path))
    return trainer


def _check_layers(trainer: MultiAgentTrainer, file: Path) -> None:
    """Refuses an adapter of other layers than the base model has, which PEFT would load in part."""
    with safe_open(file, "pt") as weights:
        saved = {name for name in weights.keys() if "lora_" in name}
    current = {name for name in get_peft_model_state_dict(trainer.model) if "lora_" in name}
    for found, names in (("lacks", current - saved), ("has also", saved - current)):
        if names:
            raise ValueError(f"{file.name} {found} {min(names)}.")


@contextmanager
def _reading(what: Path | str, instead: str = "") -> Iterator[None]:
    """Says in one line what could not be read; libraries raise many kinds of errors, some of them many lines long."""
    try:
        yield
    except Exception as error:
        why = " ".join(str(error).split())[:300] if str(error).strip() else type(error).__name__
        what = repr(str(what)) if isinstance(what, Path) else what
        raise ValueError(f"{what} cannot be read: {why.rstrip('.')}. {instead or _SAVED}") from error


def find_team(path: str | Path) -> Path:
    """
    The folder of a saved team.

    Args:
        path (`str`): A folder, or a repository of the Hub, which is downloaded.

    Returns:
        `Path`: A folder with a `team.json`.

    Raises:
        TypeError: If `path` is not a path.
        ValueError: If there is none, or one that this version cannot read.
    """
    if not isinstance(path, str | Path):
        raise TypeError(f"path={path!r} is not a path. {_SAVED}")
    folder = Path(path)
    if not folder.is_dir() and len(folder.parts) == 2 and not folder.is_absolute():
        try:
            folder = Path(snapshot_download(str(path)))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            cause = str(error).strip().splitlines()[0]
            raise ValueError(
                f"{str(path)!r} is not a folder, and not a repository that can be read: {cause.rstrip('.')}. {_SAVED}"
            ) from error
    if not (folder / TEAM_FILE).is_file():
        missing = f"has no {TEAM_FILE}" if folder.is_dir() else "is not a folder"
        raise ValueError(f"{str(path)!r} {missing}. {_SAVED}")
    _check_description(folder / TEAM_FILE)
    return folder


_AGENT = ("name", "role")


def _check_description(path: Path) -> None:
    """Refuses a `team.json` that this version cannot read."""
    try:
        team = json.loads(path.read_text())
    except ValueError as error:  # also where it is no UTF-8
        raise ValueError(f"{str(path)!r} is not valid JSON: {error}. {_SAVED}") from error
    found = team.get("format_version") if isinstance(team, dict) else None
    if found != FORMAT_VERSION:
        raise ValueError(f"{str(path)!r} has format_version={found}. This version reads {FORMAT_VERSION}.")
    for key in ("trainer", "base_model", "agents", "workflow", "rewards", "settings"):
        if key not in team:
            raise ValueError(f"{str(path)!r} has no {key!r}. {_SAVED}")
    if team["trainer"] not in list(TRAINERS):
        raise ValueError(f"{str(path)!r} has trainer={team['trainer']!r}, which is not one of {', '.join(TRAINERS)}.")
    if not isinstance(team["settings"], dict):
        raise ValueError(f"{str(path)!r} has settings={team['settings']!r:.100}, which is not a mapping. {_SAVED}")
    agents = team["agents"] if isinstance(team["agents"], list) else []
    if not agents or not all(isinstance(a, dict) and all(isinstance(a.get(k), str) for k in _AGENT) for a in agents):
        raise ValueError(
            f"{str(path)!r} has agents={team['agents']!r:.100}, which is not a list of names and role texts. {_SAVED}"
        )


def _roles(saved: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, str] | None:
    """The role texts of a team of another size or with other roles: the trained ones of agents that it has, and new ones."""
    kept = saved.get("roles") or {}
    if kept and settings.get("num_agents") is not None:
        agents = make_workflow(saved["workflow"], num_agents=settings["num_agents"]).agents
        kept = {agent.name: kept[agent.name] for agent in agents if agent.name in kept}
    return {**kept, **(settings.get("roles") or {})} or None


# A team of other agents, as a user writes it down

_EXAMPLE = "Write [{name: helper, role: Write aux.}, {name: main, role: Write the function.}], for example."


class _OneOfEach(yaml.SafeLoader):
    """Refuses a mapping with a key that stands twice, of which YAML would take the last."""

    def construct_mapping(self, node, deep=False):
        names = [key.value for key, _ in node.value]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name!r} {names.count(name)} times. Rename one of them, such as to '{name}2'.")
        return super().construct_mapping(node, deep)


def agent_settings(num_agents: int | None = None, agents: str | Path | None = None) -> dict[str, Any]:
    """
    What `--num_agents` and `--agents` say, as settings of [`load_trainer`].

    Args:
        num_agents (`int`, *optional*): Size of the team.
        agents (`str` or `Path`, *optional*): YAML file with the agents. A list of `{name: ..., role: ...}` is the whole team,
            whose size it tells; a mapping of names to role texts replaces the texts of some agents. Names are those that
            the workflow gives to its agents.

    Returns:
        `dict[str, Any]`: `num_agents` and `roles`, as far as they are given.

    Raises:
        ValueError: If the file cannot be read, or has an unknown key, a name twice, an empty text, or a list of another
            length than `num_agents`.
    """
    settings: dict[str, Any] = {} if num_agents is None else {"num_agents": num_agents}
    if agents is None:
        return settings
    try:
        content = yaml.load(Path(agents).read_text(encoding="utf-8"), _OneOfEach)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"agents={str(agents)!r} cannot be read: {error}. {_EXAMPLE}") from error
    except ValueError as error:
        raise ValueError(f"agents={str(agents)!r} has {error}") from error
    if isinstance(content, list):
        pairs = [_agent(agents, i, entry) for i, entry in enumerate(content)]
        if num_agents is not None and num_agents != len(pairs):
            raise ValueError(
                f"agents={str(agents)!r} lists {len(pairs)} agents, but num_agents={num_agents}. Set num_agents={len(pairs)}, or "
                "write a mapping of names to role texts into the file."
            )
        settings["num_agents"] = len(pairs)
    else:
        pairs = list(content.items()) if isinstance(content, dict) else []
    if not pairs:
        raise ValueError(f"agents={str(agents)!r} has no agents. {_EXAMPLE}")
    names = [name for name, _ in pairs]
    for name, role in pairs:
        if names.count(name) > 1:
            raise ValueError(
                f"agents={str(agents)!r} has {name!r} {names.count(name)} times. Rename one of them, such as to '{name}2'."
            )
        for what, text in (("name", name), ("role", role)):
            if not isinstance(text, str) or not text.strip():
                raise ValueError(
                    f"agents={str(agents)!r} has {what}={text!r} for agent {name!r}, which must be a text. {_EXAMPLE}"
                )
    return settings | {"roles": dict(pairs)}


def _agent(agents: str | Path, i: int, entry: Any) -> tuple[Any, Any]:
    """Name and role text of an entry of the list."""
    if not isinstance(entry, dict) or entry.keys() != set(_AGENT):
        found = f"the keys {list(entry)}" if isinstance(entry, dict) else repr(entry)
        raise ValueError(f"agents={str(agents)!r} has {found} at {i}, but needs the keys name and role. {_EXAMPLE}")
    return entry["name"], entry["role"]
