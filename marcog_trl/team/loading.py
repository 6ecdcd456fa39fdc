"""Loads a saved team."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from peft import PeftConfig, PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from marcog_trl.agents import Workflow, with_tools
from marcog_trl.checks import nearest
from marcog_trl.heterogeneity.cores import LoraCores
from marcog_trl.heterogeneity.networks import CoreDecoder, LatentNet
from marcog_trl.processes import this_process
from marcog_trl.team.base_models import fingerprint, load_tokenizer, same_weights
from marcog_trl.team.description import (
    ADAPTER_FILES,
    MODULES_FILE,
    OF_TRAINING,
    TEAM_FILE,
    USE_SAVED_TEAM,
    TeamDescription,
    agents_of,
    saved_settings,
)
from marcog_trl.team.modules import TeamModule
from marcog_trl.team.settings import TeamSettings
from marcog_trl.workflows import is_own, make_workflow
from marcog_trl.workflows.from_file import in_folder
from marcog_trl.workflows.program import OPTIONS as PROGRAM_OPTIONS


def load_team(
    cls: Any,
    path: str | Path,
    workflow: Workflow | str | None,
    base_model: str | None,
    quantization_config: Any,
    model_init_kwargs: Mapping[str, Any] | None,
    device: Any,
    trust_remote_code: bool,
    tools: Any,
    overrides: dict[str, Any],
) -> Any:
    """See [`~marcog_trl.Team.from_pretrained`]. `overrides` are fields of [`TeamSettings`], and `cls` is the class of the team."""
    path = find_team(path)
    saved = TeamDescription.read(path / TEAM_FILE)
    settings, others = settings_with(path, saved, overrides, workflow, trust_remote_code)
    given, workflow = workflow is not None, with_tools(settings.make_workflow(workflow), tools)
    check_tools_of(path, saved, workflow)
    # First, because it raises on machines without isolation
    executor = settings.make_executor() if workflow.needs_tests else None
    described = _describe(path, saved, settings, workflow, overrides, others, base_model, given)
    with reading(f"The tokenizer of {str(path)!r}", USE_SAVED_TEAM):
        tokenizer = load_tokenizer(path)
    if saved.full_finetuning and base_model is not None:
        raise ValueError(
            f"base_model={base_model!r} does not apply to {str(path)!r}, which has all weights of its model. Leave it out."
        )
    if not saved.full_finetuning:
        check_adapter(path, saved)
    base = str(path) if saved.full_finetuning else described.base_model
    if not base:
        raise ValueError(
            f"{str(path)!r} was trained on a model that was made in memory. Set base_model to the folder in which you saved that model."
        )
    described.trusted = trust_remote_code
    modules = None
    hint = USE_SAVED_TEAM if saved.full_finetuning else "Set base_model to the model that it was trained on."
    with reading(f"{str(path)!r}, on the base model {base!r},", hint):
        model = load_base_model(base, quantization_config, as_trained(described, model_init_kwargs), device)
        if not saved.full_finetuning:
            check_base(saved, model)
            warn_of_quantization(path, saved, model)
            with warnings.catch_warnings():
                # `check_layers` raises instead
                warnings.filterwarnings("ignore", message="Found missing adapter keys")
                model = PeftModel.from_pretrained(model, str(path))
            check_layers(model, path / ADAPTER_FILES[1])
            modules = load_modules(path, model, settings, described.names)
    model.requires_grad_(False).eval()
    return cls(model, tokenizer, workflow, settings, described, modules, executor)


def as_trained(saved: TeamDescription, model_init_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Keyword arguments for the base model of a saved team: unless they name `dtype` and `revision`, it has those of the training."""
    return {"dtype": saved.dtype, **of_revision(saved, model_init_kwargs)}


def of_revision(saved: TeamDescription, model_init_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Keyword arguments for the base model of a saved team: unless they name a `revision`, it has that of the training."""
    revision = {} if saved.revision is None else {"revision": saved.revision}
    return {**revision, **(model_init_kwargs or {})}


def load_base_model(name: str, quantization_config: Any, model_init_kwargs: Mapping[str, Any], device: Any) -> Any:
    """Loads a base model onto a device, in float32 unless `model_init_kwargs` sets `dtype`, as in TRL."""
    options = {"dtype": "float32", **model_init_kwargs}
    device = this_process().device if device is None else torch.device(device)
    if quantization_config is not None:
        options |= {"quantization_config": quantization_config, "device_map": {"": device}}
    model = AutoModelForCausalLM.from_pretrained(name, **options)
    return model if quantization_config is not None or "device_map" in options else model.to(device)


def make_modules(model: Any, settings: TeamSettings, agents: list[str], core_scale: float = 0.0) -> TeamModule:
    """Makes the modules that generation needs: the core decoder, whose cores have this size, and LatentNet."""
    cores, networks = LoraCores(model), {}
    if settings.has_latents:
        networks = {
            "core_decoder": CoreDecoder(settings.latent_size, cores.ranks, core_scale),
            "latent_net": LatentNet(2 * model.config.get_text_config().hidden_size, settings.latent_size),
        }
    return TeamModule(cores=cores, agents=agents, **networks)  # type: ignore[arg-type]


def load_modules(path: Path, model: Any, settings: TeamSettings, agents: list[str]) -> TeamModule | None:
    """Loads the modules that generation needs. Returns `None` for a team without them."""
    if settings.parameter_sharing == "shared":
        return None
    modules = make_modules(model, settings, agents)
    if settings.has_latents:
        weights = load_file(path / MODULES_FILE)
        modules.load_state_dict({name: weights[name] for name in modules.state_dict() if name in weights})
    modules.to(model.device)
    modules.attach(model.get_base_model())
    return modules


# Checks


def settings_with(
    path: Path,
    saved: TeamDescription,
    overrides: Mapping[str, Any],
    workflow: Workflow | str | None,
    trust_remote_code: bool,
) -> tuple[TeamSettings, tuple[str, ...]]:
    """
    Applies overrides to the settings of a saved team. `workflow` replaces the saved one.

    Returns:
        `tuple[TeamSettings, tuple[str, ...]]`: The settings, and which of `num_agents` and `roles` change the agents.

    Raises:
        ValueError: If a setting is unknown, `num_agents` would change a team with one adapter per agent, or the saved
            workflow is in a file that is not trusted or missing.
    """
    known = {f.name for f in fields(TeamSettings)}
    for name in overrides:
        if name not in known:
            near = nearest(name, known)
            raise ValueError(f"A team has no setting {name!r}." + (near and f" Did you mean {near!r}?"))
    asked = {name for name, value in saved.settings.items() if value is not None}
    unknown = asked - known - OF_TRAINING
    if unknown:
        raise ValueError(
            f"{str(path / TEAM_FILE)!r} has an unknown setting {min(unknown)!r}. Remove it from the file."
        )
    overrides = dict(overrides)
    separate = saved.settings.get("parameter_sharing") == "separate"
    if separate and overrides.get("num_agents") == len(saved.agents):
        del overrides["num_agents"]
    others = tuple(name for name in ("num_agents", "roles") if overrides.get(name) is not None)
    if separate and "num_agents" in others:
        raise ValueError(
            f"num_agents={overrides['num_agents']} does not fit {str(path)!r}: each of its agents {saved.names} has its own "
            "adapter. Leave num_agents out, or use a team that shares one adapter."
        )
    own = {name: value for name, value in saved.settings.items() if name in known}
    if saved.workflow == "Program" and not is_own(own["workflow"]):  # it was an instance, which is not saved
        own = {name: value for name, value in own.items() if name not in PROGRAM_OPTIONS}
    if isinstance(workflow, str):
        own["workflow"] = workflow
    elif workflow is None and is_own(own.get("workflow", "")):
        own["workflow"] = _trusted_workflow(path, saved, trust_remote_code)
    elif (
        workflow is None and own.get("roles") is None and saved.workflow in ("Collaboration", "Discussion", "Pipeline")
    ):
        size = {"num_agents": own["num_agents"]} if own.get("num_agents") is not None else {}
        now = agents_of(make_workflow(own["workflow"], **size))
        if saved.agents != now and saved.names == [agent["name"] for agent in now]:
            # It keeps the texts that it was trained with
            own["roles"] = {agent["name"]: agent["role"] for agent in saved.agents}
    if not isinstance(workflow, Workflow) and others:
        # Of the agents that remain, it keeps the saved ones
        by_agent = {name: own[name] for name in ("roles", "endpoints") if own.get(name)}
        if by_agent and "num_agents" in others:
            agents = make_workflow(own["workflow"], num_agents=overrides["num_agents"]).agents
            own |= {
                name: {a.name: of[a.name] for a in agents if a.name in of} or None for name, of in by_agent.items()
            }
        overrides["roles"] = {**(own.get("roles") or {}), **(overrides.get("roles") or {})} or None
    return TeamSettings(**own | overrides), others


def _describe(
    path: Path,
    saved: TeamDescription,
    settings: TeamSettings,
    workflow: Workflow,
    overrides: Mapping[str, Any],
    others: tuple[str, ...],
    base_model: str | None,
    given: bool,
) -> TeamDescription:
    """Describes the loaded team, and checks that it fits the saved one. `given`: whether the caller passed a workflow."""
    if not given and saved.workflow != type(workflow).__name__:
        raise ValueError(
            f"{str(path)!r} was trained with the workflow {saved.workflow}, which is not in the folder. Pass it: "
            f"workflow={saved.workflow}(...), or workflow='my_team.py:{saved.workflow}' (--workflow)."
        )
    current = saved.settings | saved_settings(settings)
    described = dataclasses.replace(
        saved,
        base_model=base_model or saved.base_model,
        revision=None if base_model else saved.revision,
        agents=agents_of(workflow),
        workflow=type(workflow).__name__,
        num_turns=workflow.num_turns,
        modules={name: current.get(name, value) for name, value in saved.modules.items()},
        settings=current,
        source_file=(workflow.source_file if is_own(settings.workflow) else None) or saved.source_file,
    )
    but = tuple(name for name, given in (("agents", others), ("base_model", base_model)) if given)
    but += ("num_turns",) if "num_turns" in overrides else ()
    if (difference := saved.difference(described, but)) is not None:
        key, its, ours = difference
        raise ValueError(
            f"{str(path)!r} was saved with {key}={its!r}, but is loaded with {ours!r}, which does not fit the weights. Use the "
            "workflow and the settings of the training. For other role texts, pass roles={'main': ...} or --agents agents.yaml."
        )
    return described


def check_tools_of(path: Path, saved: TeamDescription, workflow: Workflow) -> None:
    """
    Checks that the agents have the tools that they were trained with. Tools are functions, which `team.json` cannot hold.

    Raises:
        ValueError: If the names of an agent's tools differ.
    """
    current = {agent["name"]: agent.get("tools", []) for agent in agents_of(workflow)}
    for agent in saved.agents:
        before = agent.get("tools", [])
        now = current.get(agent["name"], before)
        if now != before:
            raise ValueError(
                f"Agent {agent['name']!r} of {str(path)!r} was trained with the tools {before}, but has {now}. A saved team has "
                "no tools: pass tools=[...] with these functions, or a workflow whose agents have them."
            )


def _trusted_workflow(path: Path, saved: TeamDescription, trust_remote_code: bool) -> str:
    """Returns the name of a saved workflow that is in a file of the team's folder."""
    name = saved.settings["workflow"]
    own = f"pass your copy of it: workflow={name!r} (--workflow {name})"
    if saved.workflow_file and saved.source_file is None:
        raise ValueError(
            f"{str(path)!r} has no {saved.workflow_file}, which defines its workflow. Restore it, or {own}."
        )
    if not trust_remote_code:
        raise ValueError(
            f"{str(path)!r} has its workflow in {saved.workflow_file or name}, and to load it runs this file. Read the file, then "
            f"set trust_remote_code=True (--trust_remote_code), or {own}."
        )
    return in_folder(name, path)


def check_adapter(path: Path, saved: TeamDescription) -> None:
    """
    Checks that the adapter in a folder is the one of the team there.

    Raises:
        ValueError: If a file of it is missing, or it belongs to another base model.
    """
    for name in ADAPTER_FILES:  # PEFT would look for a repository of the folder's name
        if not (path / name).is_file():
            raise ValueError(f"{str(path)!r} has no {name}. {USE_SAVED_TEAM}")
    config = PeftConfig.from_pretrained(str(path))
    if (config.base_model_name_or_path or "") != saved.base_model:
        raise ValueError(
            f"The adapter in {str(path)!r} is for {config.base_model_name_or_path!r}, but {TEAM_FILE} names the base model "
            f"{saved.base_model!r}. {USE_SAVED_TEAM}"
        )


def check_base(saved: TeamDescription, model: Any) -> None:
    """
    Checks that a base model is the one that a team was trained on, if the team knows it.

    Args:
        saved ([`TeamDescription`]): The team.
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]): The model that was loaded as its base.

    Raises:
        ValueError: If the model has other weights. A collective operation under ZeRO-3.
    """
    ours = fingerprint(model)
    theirs = saved.base_fingerprint or ours
    if not same_weights(theirs, ours):
        vocabularies = f"{theirs['vocab_size']} tokens in training, {ours['vocab_size']} now"
        raise ValueError(
            f"the weights of {model.config.name_or_path!r} are not those that the team was trained on (vocabulary: {vocabularies})"
        )


def check_has_adapter(name: str, saved: TeamDescription) -> None:
    """Refuses a team of which all weights were trained, where an adapter is trained further."""
    if saved.full_finetuning:
        raise ValueError(
            f"{name} has all weights of its model and no adapter, which this training continues. Use a team that was trained "
            "without full_finetuning."
        )


def warn_of_quantization(path: Path, saved: TeamDescription, model: Any) -> None:
    """Warns if a team was trained on a quantised base model, but the loaded one is not quantised."""
    if saved.quantization_config and not getattr(model, "is_quantized", False):
        warnings.warn(
            f"{str(path)!r} was trained on a quantised base model ({saved.quantization_config}), but is loaded without "
            "quantisation. Pass the same quantization_config to get the trained policy.",
            stacklevel=4,
        )


def check_layers(model: Any, file: Path) -> None:
    """
    Checks that an adapter fits the layers of the model. PEFT would load only the layers that match.

    Raises:
        ValueError: If a layer is missing on either side.
    """
    with safe_open(file, "pt") as weights:
        saved = {name for name in weights.keys() if "lora_" in name}
    current = {name for name in get_peft_model_state_dict(model) if "lora_" in name}
    for how, names in (("lacks", current - saved), ("has also", saved - current)):
        if names:
            raise ValueError(f"{file.name} {how} {min(names)}.")


@contextmanager
def reading(what: str, instead: str) -> Iterator[None]:
    """Turns any error of a library into a `ValueError` of one line that says what cannot be loaded."""
    try:
        yield
    except Exception as error:
        why = " ".join(str(error).split())[:300] if str(error).strip() else type(error).__name__
        raise ValueError(f"{what} cannot be loaded: {why.rstrip('.')}. {instead}") from error


def find_team(path: str | Path) -> Path:
    """
    Returns the folder of a saved team, and downloads it from the Hub if needed.

    Args:
        path (`str`): A folder, or a repository on the Hub.

    Returns:
        `Path`: A folder with a `team.json` that this version can read.

    Raises:
        ValueError: If there is no saved team.
    """
    folder = Path(path)
    if not folder.is_dir() and len(folder.parts) == 2 and not folder.is_absolute():
        try:
            folder = Path(snapshot_download(str(path)))
        except LocalEntryNotFoundError as error:  # offline
            raise ValueError(
                f"{str(path)!r} is not a folder, and the Hub, where it may be a repository, cannot be reached. {USE_SAVED_TEAM}"
            ) from error
        except (HfHubHTTPError, OSError) as error:
            cause = str(error).strip().splitlines()[0]
            raise ValueError(
                f"{str(path)!r} is not a folder, and the Hub did not return such a repository: {cause.rstrip('.')}. {USE_SAVED_TEAM}"
            ) from error
    if not (folder / TEAM_FILE).is_file():
        missing = f"has no {TEAM_FILE}" if folder.is_dir() else "is not a folder"
        raise ValueError(f"{str(path)!r} {missing}. {USE_SAVED_TEAM}")
    TeamDescription.read(folder / TEAM_FILE)
    return folder
