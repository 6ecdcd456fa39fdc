"""
Takes a trained team to where others use it: one ordinary PEFT adapter per agent, a model card, the Hub.

A repository is what `save_model` writes (`team_files.py`), the folder `agents` that [`export_agents`] writes, and a card,
`README.md`. It has the same files locally and on the Hub. A folder appears by rename, whole, and so does a file.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils import broadcast_object_list, gather_object
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard
from huggingface_hub.utils import validate_repo_id
from peft.utils.integrations import gather_params_ctx
from transformers.trainer_utils import HubStrategy

from marcog_trl.files import write_json
from marcog_trl.heterogeneity import save_folded_adapters, save_split_adapters
from marcog_trl.report.results import ROWS
from marcog_trl.team.description import MODULES_FILE, TEAM_FILE, settings_of
from marcog_trl.team.modules import Flight
from marcog_trl.trainers.checkpoints import on_main
from marcog_trl.trainers.shppo_config import SHPPOConfig


if TYPE_CHECKING:
    from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer


AGENTS_FOLDER = "agents"
EXPORT_FILE = "export.json"
CARD_FILE = "README.md"
RESULTS_FILE = "results.json"
_OF_RUN = (RESULTS_FILE, "report.html", "curves.png")  # what was measured of the team that was trained
FORMAT_VERSION = 1
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
NUM_PROBLEMS = 64  # where the caller gives none
NUM_PROBLEMS_OF_CHECKPOINT = 16
# What the card says of the run beside what `team.json` has
_SETTINGS = (
    "num_generations", "generation_batch_size", "num_iterations", "learning_rate", "critic_learning_rate",
    "latent_learning_rate", "inference_learning_rate", "advantage", "loss_type", "beta", "gamma", "lam", "gamma_turn",
    "temperature", "max_completion_length", "seed",
)  # fmt: skip
# TRL's card from here on is kept: how the team was trained, versions, citations
_TRAINING, _VERSIONS = "## Training procedure", "### Framework versions"
_PROBLEM = {"prompt": "def add(a, b):  # the sum of a and b", "entry_point": "add"}  # of the card's snippets
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the values that --max-lora-rank takes


class PushError(RuntimeError):
    """The Hub did not take a team; the local files stay."""


# Agents as ordinary adapters


def export_agents(
    trainer: MultiAgentTrainer, path: str | Path, problems: Iterable[Mapping[str, Any]] | None = None
) -> dict[str, dict[str, float]]:
    """
    Write one ordinary PEFT adapter per agent, `path/<agent>`, and `path/export.json`.

    With `parameter_sharing="latent"` the cores of the agent's latent are folded into the shared adapter. In agent scope it
    is the latent of the role text, and the adapter is the agent that evaluation plays. In observation scope it is the mean
    of the latents that the agent has on the problems, and the report says how far that is from the live agent, on the
    replies that the live agent writes there. With `"separate"` it is the agent's own block, with `"shared"`, and for
    trainers without latents, the shared adapter, once per agent.

    With several processes, ZeRO-3 included, all of them call it, and the main one writes.

    Args:
        trainer ([`MultiAgentTrainer`]): Holds the team.
        path (`str` or `Path`): Folder to write. An earlier export in its place is replaced.
        problems (`Dataset` or `list[dict]`, *optional*):
            Problems to play in observation scope, elsewhere not read. Defaults to the first 64 that the trainer trains on.

    Returns:
        `dict[str, dict[str, float]]`: By agent `kl_per_token`, the mean of KL(live ‖ exported) over the tokens that the
        live agent wrote, in nats, and `tokens`, their number. Both are 0 where the adapter is the agent, so that nothing is
        measured. The rounding to the adapter's dtype is not part of it.

    Raises:
        ValueError: If `path` holds something else than an export, an agent's name cannot be that of a folder, there are no
            problems, or an agent does not speak on them.
    """
    path = Path(path).absolute()
    for agent in trainer.agents:
        # A folder, a name of PEFT, in which '.' would be a level, and a word of a command line
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", agent):
            raise ValueError(
                f"agent {agent!r} cannot have a folder and an adapter of that name; letters, digits, '_' and '-', such as "
                f"{re.sub(r'[^A-Za-z0-9_-]+', '_', agent).strip('_-') or 'main'!r}, work"
            )
    on_main(lambda: _check_replaceable(path))
    args = trainer.args
    sharing = args.parameter_sharing if isinstance(args, SHPPOConfig) else "shared"
    scope = args.latent_scope if isinstance(args, SHPPOConfig) and sharing == "latent" else None
    report: dict[str, dict[str, float]] = {agent: {"kl_per_token": 0.0, "tokens": 0} for agent in trainer.agents}
    writes = trainer.is_world_process_zero()
    with _whole_folder(path, writes) as partial:
        folders = [partial / agent for agent in trainer.agents]
        if scope is not None:
            cores, report = _fold_latents(trainer, scope, problems, report)
            save_folded_adapters(trainer.model, cores, folders, is_main_process=writes)
        elif sharing == "separate":
            save_split_adapters(trainer.model, folders, is_main_process=writes)
        else:
            _save_shared(trainer, folders, writes)
        if writes:
            content = {
                "format_version": FORMAT_VERSION,
                "base_model": trainer.model.config.name_or_path,
                "parameter_sharing": sharing,
                "latent_scope": scope,
                "agents": report,
                "versions": {package: version(package) for package in ("marcog-trl", "peft")},
            }
            write_json(partial / EXPORT_FILE, content)
    trainer.accelerator.wait_for_everyone()
    return report


def _check_new(path: Path) -> None:
    if path.exists():
        raise ValueError(f"{str(path)!r} exists; a new folder works")


def _check_replaceable(path: Path) -> None:
    if path.exists() and not path.is_dir():
        raise ValueError(f"path={str(path)!r} is a file; a new folder works")
    for entry in sorted(path.iterdir()) if path.exists() else ():
        if entry.name != EXPORT_FILE and not (entry / "adapter_config.json").is_file():
            raise ValueError(f"path={str(path)!r} holds {entry.name!r}, which no export wrote; a new folder works")


@contextmanager
def _whole_folder(path: Path, writes: bool) -> Iterator[Path]:
    """A folder beside `path` to write to, which takes its place when all is written, or else leaves nothing behind."""
    partial, old = (path.with_name(f".{path.name}.{suffix}") for suffix in ("partial", "old"))
    if not writes:
        yield partial
        return
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            os.replace(path, old)
        os.replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _save_shared(trainer: MultiAgentTrainer, folders: list[Path], writes: bool) -> None:
    """The shared adapter, of any type that PEFT knows, as PEFT saves it."""
    first, *others = folders
    parameters = [p for name, p in trainer.model.named_parameters() if p.requires_grad or "default" in name.split(".")]
    with gather_params_ctx(parameters, modifier_rank=None):
        trainer.model.save_pretrained(first, selected_adapters=["default"], is_main_process=writes)
    if writes:
        (first / CARD_FILE).unlink()  # an empty template
        for folder in others:
            shutil.copytree(first, folder)


@torch.no_grad()
def _fold_latents(
    trainer: Any, scope: str, problems: Iterable[Mapping[str, Any]] | None, report: dict[str, dict[str, float]]
) -> tuple[list[torch.Tensor], dict[str, dict[str, float]]]:
    """Cores to fold, of every layer `(N, r, r)`, and the report."""
    was_training = trainer.model.training
    trainer.model.eval()  # where a latent is its mean
    try:
        if scope == "agent":
            with trainer._gathered_before_training():
                latents, _ = trainer.team.latent_net(trainer._role_observations)
        else:
            latents, report = _mean_latents(trainer, problems)
        with trainer._gathered_before_training():
            return trainer.team.core_decoder(latents), report
    finally:
        trainer.model.train(was_training)


def _mean_latents(
    trainer: Any, problems: Iterable[Mapping[str, Any]] | None
) -> tuple[torch.Tensor, dict[str, dict[str, float]]]:
    """Mean over its replies of each agent's latents, `(N, d)`, and how far the agent is then from the live one."""
    if problems is None:
        problems = itertools.islice(trainer.train_dataset, NUM_PROBLEMS)
    rows = [dict(problem) for problem in problems]
    if not rows or "prompt" not in rows[0]:
        found = f"problems with the columns {list(rows[0])}" if rows else "problems=[]"
        raise ValueError(f"{found} cannot be played; rows with a column 'prompt' work")
    accelerator = trainer.accelerator
    # Padded, since every process must play: generation is a collective operation
    with accelerator.split_between_processes(rows, apply_padding=True) as own, torch.random.fork_rng():
        torch.manual_seed(accelerator.process_index)
        replies = []
        for start in range(0, len(own), NUM_PROBLEMS):
            for episode in trainer.play_unscored(own[start : start + NUM_PROBLEMS]):
                replies += [(row, trainer._latents[row.episode, row.slot]) for row in episode.rows]
    agent = torch.tensor([trainer.agents.index(row.slot.agent) for row, _ in replies], device=accelerator.device)
    latents = torch.stack([z for _, z in replies])
    one_hot = torch.nn.functional.one_hot(agent, len(trainer.agents)).to(latents)
    total = accelerator.reduce(one_hot.T @ latents, reduction="sum")
    count = accelerator.reduce(one_hot.sum(0), reduction="sum")
    for name, spoken in zip(trainer.agents, count.tolist(), strict=True):
        if not spoken:
            raise ValueError(
                f"agent {name!r} never spoke on the {len(rows)} problems; others, on which it speaks, work"
            )
    means = total / count[:, None]

    sums = torch.zeros(len(trainer.agents), 2, dtype=torch.float64, device=accelerator.device)
    with trainer._gathered_before_training():
        # Under ZeRO-3 a forward pass is a collective operation too
        for i in range(max(gather_object([len(replies)]))):
            row, z = replies[i % len(replies)]
            divergence = _divergence(trainer, row, torch.stack([z, means[agent[i % len(replies)]]]))
            if i < len(replies):
                sums[agent[i]] += torch.tensor([divergence, len(row.completion_ids)]).to(sums)
    measured = accelerator.reduce(sums, reduction="sum").tolist()
    return means, {
        name: {"kl_per_token": kl / tokens, "tokens": int(tokens)}
        for name, (kl, tokens) in zip(trainer.agents, measured, strict=True)
    }


def _divergence(trainer: Any, row: Any, z: torch.Tensor) -> float:
    """KL(first ‖ second) of the agents with the latents `z`, `(2, d)`, summed over the tokens of one reply."""
    ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]] * 2, device=trainer.accelerator.device)
    with trainer.team.rows(Flight(z=z)), trainer.accelerator.autocast():
        logits = trainer.model(input_ids=ids, logits_to_keep=len(row.completion_ids) + 1, use_cache=False).logits
    live, folded = (logits[:, :-1].float() / trainer.temperature).log_softmax(-1)
    return (live.exp() * (live - folded)).sum(-1).clamp(min=0).sum().item()


# Repositories


def export_team(
    trainer: MultiAgentTrainer,
    team: str | Path,
    path: str | Path,
    problems: Iterable[Mapping[str, Any]] | None = None,
) -> dict[str, dict[str, float]]:
    """
    Write a saved team, its agents as ordinary adapters, and a card as one folder, which [`push_team`] takes.

    Args:
        trainer ([`MultiAgentTrainer`]):
            Holds the team, as `Team.from_pretrained(team).trainer` does, or one of another size or with other roles on the
            same weights, as `Team.from_pretrained(team, num_agents=4).trainer` does, which is then what is written.
        team (`str` or `Path`): Folder of the saved team. Its files are copied, pickles left out.
        path (`str` or `Path`): New folder to write.
        problems (`Dataset` or `list[dict]`, *optional*): See [`export_agents`].

    Returns:
        `dict[str, dict[str, float]]`: See [`export_agents`].

    Raises:
        ValueError: As [`export_agents`], and if `path` exists, `team` is no saved team, or the trainer's is not a team of
            its workflow.
    """
    team, path = Path(team), Path(path).absolute()
    if not (team / TEAM_FILE).is_file():
        raise ValueError(f"{str(team)!r} has no {TEAM_FILE}. Use a folder that a trainer's save_model wrote.")
    saved, current = _read_json(team / TEAM_FILE), trainer.team_description()
    for key in ("workflow", "modules"):
        if saved[key] != current[key]:
            raise ValueError(
                f"the trainer's {key} is {current[key]!r}, that of {str(team)!r} is {saved[key]!r}; the same works"
            )
    another = saved["agents"] != current["agents"]
    on_main(lambda: _check_new(path))
    writes = trainer.is_world_process_zero()
    with _whole_folder(path, writes) as partial:
        if writes:
            for name in _root_files(team):
                shutil.copy(team / name, partial / name)
            if another:
                _describe_another(partial, saved, current)
        report = export_agents(trainer, partial / AGENTS_FOLDER, problems)
        if writes:
            card = partial / CARD_FILE
            if not card.is_file() or _TRAINING not in card.read_text():  # that of PEFT is an empty template
                trainer.create_model_card(team.absolute().name)
                shutil.copy(Path(cast(str, trainer.args.output_dir)) / CARD_FILE, card)
            write_card(partial)
    trainer.accelerator.wait_for_everyone()
    return report


def _describe_another(folder: Path, saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Makes the copy of a saved team that of a team of other agents, which has no results yet."""
    for name in _OF_RUN:
        (folder / name).unlink(missing_ok=True)
    settings = settings_of(saved) | {name: current["settings"][name] for name in ("num_agents", "roles")}
    of_team = {
        "agents": current["agents"],
        "settings": settings,
        "trained_as": saved.get("trained_as", saved["agents"]),
    }
    write_json(folder / TEAM_FILE, saved | of_team)


def _root_files(folder: Path) -> list[str]:
    """What a repository has beside its agents; a pickle could run code on whoever loads it, and nothing needs one."""
    files = (entry for entry in sorted(folder.iterdir()) if entry.is_file() and not entry.name.startswith("."))
    return [entry.name for entry in files if entry.suffix not in (".bin", ".pt", ".pth", ".pkl", ".partial")]


def save_repository(
    trainer: MultiAgentTrainer,
    problems: Iterable[Mapping[str, Any]] | None = None,
    model_name: str | None = None,
    dataset_name: str | None = None,
) -> None:
    """
    Save the team, its agents as ordinary adapters, and a card to the trainer's `output_dir`, which [`push_team`] takes.

    With several processes all of them call it.

    Args:
        trainer ([`MultiAgentTrainer`]): Holds the team.
        problems (`Dataset` or `list[dict]`, *optional*): See [`export_agents`].
        model_name (`str`, *optional*): Title of the card. Defaults to the folder's name.
        dataset_name (`str`, *optional*): Problem set, for the card.

    Raises:
        ValueError: As [`export_agents`].
    """
    folder = Path(cast(str, trainer.args.output_dir))
    trainer.save_model(_internal_call=True)
    export_agents(trainer, folder / AGENTS_FOLDER, problems)
    trainer.create_model_card(model_name or folder.absolute().name, dataset_name)


def push_agents(
    trainer: MultiAgentTrainer,
    repo_id: str,
    problems: Iterable[Mapping[str, Any]] | None = None,
    dataset_name: str | None = None,
    **options: Any,
) -> CommitInfo | None:
    """
    Save the team and its agents to the trainer's `output_dir`, then push them to the Hub.

    With several processes all of them call it, and the main one pushes.

    Args:
        trainer ([`MultiAgentTrainer`]): Holds the team.
        repo_id (`str`): Repository, such as `"user/team"`; created if it does not exist.
        problems (`Dataset` or `list[dict]`, *optional*): See [`export_agents`].
        dataset_name (`str`, *optional*): Problem set, for the card.
        **options: `token`, `private`, `revision` and `commit_message`, see [`push_team`].

    Returns:
        `CommitInfo`: Of the commit; `None` on the other processes.

    Raises:
        ValueError: As [`export_agents`], or if `repo_id` is not the name of a repository.
        PushError: If the Hub does not take it; what was saved stays, and [`push_team`] pushes it again.
    """
    check_repo_id(repo_id)
    save_repository(trainer, problems, repo_id.rpartition("/")[2], dataset_name)
    return (
        push_team(cast(str, trainer.args.output_dir), repo_id, **options) if trainer.is_world_process_zero() else None
    )


def begin_checkpoint_push(trainer: MultiAgentTrainer, checkpoint: str | Path) -> bool:
    """
    Put a checkpoint's team, its agents as ordinary adapters, and a card into `output_dir`, from where the Trainer pushes
    the adapter of the checkpoint: all of one step.

    With several processes all of them call it. Agents with latents in observation scope are averaged on the first 16
    problems that the trainer trains on.

    Args:
        trainer ([`MultiAgentTrainer`]): The trainer, which has just written the checkpoint and changed nothing since.
        checkpoint (`str` or `Path`): Folder of the checkpoint.

    Returns:
        `bool`: Whether to push, the same on all processes. If not, which is where the Trainer would not push either, no file
        has changed: the push before may still be reading them.
    """
    args = trainer.args
    busy = [False]
    if trainer.is_world_process_zero():
        busy = [trainer.push_in_progress is not None and not trainer.push_in_progress.is_done()]
    broadcast_object_list(busy)
    if args.hub_strategy == HubStrategy.END or (busy[0] and not args.hub_always_push):
        return False
    folder = Path(cast(str, args.output_dir))
    if trainer.is_world_process_zero():
        trainer._finish_current_push()
        # The Trainer copies those that it knows
        for name in (TEAM_FILE, MODULES_FILE):
            if (Path(checkpoint) / name).is_file():
                shutil.copy(Path(checkpoint) / name, folder)
    trainer.accelerator.wait_for_everyone()
    try:
        problems = itertools.islice(cast(Iterable, trainer.train_dataset), NUM_PROBLEMS_OF_CHECKPOINT)
        export_agents(trainer, folder / AGENTS_FOLDER, problems)
    except ValueError as error:  # no reason to end a run; the agents of an earlier step do not go with this adapter
        warnings.warn(f"step {trainer.state.global_step} is pushed without {AGENTS_FOLDER}: {error}", stacklevel=2)
        if trainer.is_world_process_zero() and (folder / AGENTS_FOLDER / EXPORT_FILE).is_file():
            shutil.rmtree(folder / AGENTS_FOLDER)
    if trainer.is_world_process_zero():
        write_card(folder, trainer.hub_model_id, trainer.team_description())
    return True


def push_team(
    folder: str | Path,
    repo_id: str,
    token: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "A team and its agents",
) -> CommitInfo:
    """
    Push a written team to the Hub: the shared adapter, the team's modules and description, its agents, and the card.

    Checkpoints, logs and pickles that lie beside them stay where they are.

    Args:
        folder (`str` or `Path`): What [`save_repository`] or [`export_team`] wrote.
        repo_id (`str`): Repository, such as `"user/team"`; created if it does not exist.
        token (`str`, *optional*): Token with write access. Defaults to the one that is logged in, or `HF_TOKEN`.
        private (`bool`, *optional*): Whether a repository that is created is private. Defaults to the owner's setting.
        revision (`str`, *optional*): Branch. Defaults to the main one.
        commit_message (`str`, *optional*): The commit's message.

    Returns:
        `CommitInfo`: Of the commit.

    Raises:
        ValueError: If the folder is no such team, or `repo_id` not the name of a repository.
        PushError: If the Hub does not take it: no network, no rights, ... Nothing local is lost.
    """
    check_repo_id(repo_id)
    folder = Path(folder)
    needed = [TEAM_FILE, f"{AGENTS_FOLDER}/{EXPORT_FILE}", CARD_FILE, *_ADAPTER_FILES]
    if (folder / TEAM_FILE).is_file():
        for agent in _read_json(folder / TEAM_FILE, "agents")["agents"]:
            needed += [f"{AGENTS_FOLDER}/{agent['name']}/{name}" for name in _ADAPTER_FILES]
    for name in needed:
        if not (folder / name).is_file():
            raise ValueError(
                f"{str(folder)!r} has no {name}; a folder that recipes/export.py or push_agents_to_hub wrote works"
            )
    write_card(folder, repo_id)
    agents = sorted(path for path in (folder / AGENTS_FOLDER).rglob("*") if path.is_file())
    names = [*_root_files(folder), *(path.relative_to(folder).as_posix() for path in agents)]
    api = HfApi()
    with clear_push_errors(repo_id, folder):
        api.create_repo(repo_id, token=token, private=private, exist_ok=True)
        # One commit, where upload_folder makes several of a large folder: a repository is never half a team
        return api.create_commit(
            repo_id,
            [
                *(CommitOperationAdd(name, folder / name) for name in names),
                *_deletions(api, repo_id, folder, token, revision),
            ],
            commit_message=commit_message,
            token=token,
            revision=revision,
        )


def drop_other_agents(repo_id: str, folder: Path, token: str | None = None, revision: str | None = None) -> None:
    """Takes agents out of a repository that the team in a folder, which was pushed to it, does not have."""
    api = HfApi()
    deletions = _deletions(api, repo_id, folder, token, revision)
    if deletions:
        api.create_commit(repo_id, deletions, commit_message="Agents of now", token=token, revision=revision)


def _deletions(
    api: HfApi, repo_id: str, folder: Path, token: str | None, revision: str | None
) -> list[CommitOperationDelete]:
    there = api.list_repo_files(repo_id, revision=revision, token=token)
    agents = (name for name in there if name.startswith(f"{AGENTS_FOLDER}/"))
    return [CommitOperationDelete(name) for name in agents if not (folder / name).is_file()]


def check_repo_id(repo_id: str) -> None:
    """Refuses what cannot be the name of a repository."""
    validate_repo_id(repo_id)
    if repo_id.count("/") != 1:
        raise ValueError(f"repo_id={repo_id!r} has no owner; 'user/{repo_id}' works")


@contextmanager
def clear_push_errors(repo_id: str | None, folder: str | Path) -> Iterator[None]:
    """
    Says what a push failed for, that local files stay, and how to push them again.

    Args:
        repo_id (`str`, *optional*): The repository.
        folder (`str` or `Path`): What is to be pushed.

    Raises:
        PushError: In place of any error, which is its cause.
    """
    try:
        yield
    except PushError:
        raise
    except Exception as error:  # of huggingface_hub, and of the HTTP and storage clients beneath it
        reason = " ".join(str(error).split()) or type(error).__name__
        if (Path(folder) / AGENTS_FOLDER / EXPORT_FILE).is_file():
            again = f"python recipes/export.py --output_dir {shlex.quote(str(folder))} --push {repo_id or 'user/team'}"
            way = f"{str(folder)!r} keeps everything; to push it again: {again}"
        else:
            way = "log in with a token with write access (hf auth login), or set push_to_hub=False"
        name = repo_id or Path(folder).absolute().name  # as the Trainer calls a repository without a name
        raise PushError(f"the push to {name!r} failed: {reason} -- {way}") from error


# Model cards


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
        settings = {f.name: getattr(trainer.args, f.name) for f in fields(trainer.args) if f.name in _SETTINGS}
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
    _, heading, training = card.text.partition(_TRAINING)
    if not heading:
        raise ValueError(
            f"{str(folder / CARD_FILE)!r} has no section {_TRAINING!r}; trainer.create_model_card() works"
        )
    if team is None:
        team = _read_json(folder / TEAM_FILE)
    if settings:
        rows = [(f"`{name}`" if name in _SETTINGS else name, value) for name, value in settings.items()]
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


def _read_json(path: Path, *keys: str) -> dict[str, Any]:
    """A JSON file, which must be a mapping with these keys; errors name it."""
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{str(path)!r} is no JSON: {error}; one that this package wrote works") from None
    if not isinstance(content, dict) or not content.keys() >= set(keys):
        raise ValueError(f"{str(path)!r} has {content!r:.60} and no {list(keys)}; one that this package wrote works")
    return content


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
    exported = _read_json(path, "agents") if path.is_file() else {"agents": {}}
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
    results = _read_json(path) if path.is_file() else {}
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
