"""
Writes the agents of a team as ordinary PEFT adapters, one per agent, alone or in a folder with the team and its card. If all
weights were trained, the agents are one ordinary model.

A folder is written to a temporary path and renamed, so readers never see a partial one.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import gather_object, reduce
from peft.utils.integrations import gather_params_ctx

from marcog_trl.files import read_json, write_json
from marcog_trl.heterogeneity.fold import fold_adapters, save_adapters, split_adapter
from marcog_trl.processes import on_main, this_process
from marcog_trl.team.card import AGENTS_FOLDER, CARD_FILE, EXPORT_FILE, RESULTS_FILE, write_card
from marcog_trl.team.description import ADAPTER_FILES, TEAM_FILE, TeamDescription
from marcog_trl.team.dropout import own_dropout
from marcog_trl.team.modules import ForwardContext
from marcog_trl.team.team import Team


_OF_RUN = (RESULTS_FILE, "report.html")  # what was measured of the team that was trained
EXPORT_FORMAT = 1
_PROBLEMS_AT_ONCE = 64


def export_agents(
    team: Team, path: str | Path, problems: Iterable[Mapping[str, Any]] | None = None
) -> dict[str, dict[str, float]]:
    """
    Write one ordinary PEFT adapter per agent, `path/<agent>`, and `path/export.json`.

    With `parameter_sharing="latent"`, the latent of the agent is folded into the shared adapter. In agent scope, this is the
    latent of the role text, and the adapter gives the same outputs as the agent. In observation scope, the agent has another
    latent for every prompt. The adapter then holds the mean of its latents on `problems`, and the returned KL says how far
    it is from the agent, measured on the agent's replies. With `"separate"`, the adapter is the agent's own block. With
    `"shared"`, and for trainers without latents, every agent gets a copy of the shared adapter. Agents that speak through
    endpoints have no adapter.

    If all weights were trained (`full_finetuning`), there are no adapters: `path` is one ordinary model with its tokenizer, which
    all agents share.

    With several processes, all of them must call it (also under ZeRO-3). Only the main process writes.

    Args:
        team ([`Team`]): The team, such as a trainer's `team`.
        path (`str` or `Path`): Folder to write. An earlier export in its place is replaced.
        problems (`Dataset` or `list[dict]`, *optional*):
            Problems to play in observation scope, elsewhere not read.

    Returns:
        `dict[str, dict[str, float]]`: For each agent `kl_per_token`, the mean of KL(agent ‖ exported) over the tokens that
        the agent wrote, in nats, and `tokens`, their number. Both are 0 if nothing had to be measured, because the adapter
        equals the agent. Rounding to the dtype of the adapter is not included.

    Raises:
        ValueError: If `path` contains other files than an export, an agent's name cannot be used for a folder, there are no
            problems, an agent writes no reply on them, or all agents speak through endpoints.
    """
    path = Path(path).absolute()
    own = team.own_agents
    if not own:
        raise ValueError(f"All agents {team.agents} speak through endpoints, so there is no adapter to export.")
    for agent in own:
        # The name of a folder, a word of a command line, and a name for PEFT, where '.' would separate modules
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_-]*", agent):
            raise ValueError(
                f"Agent {agent!r} cannot be exported, because its name is not a valid name for a folder and an adapter. Use "
                f"letters, digits, '_' and '-', such as {re.sub(r'[^A-Za-z0-9_-]+', '_', agent).strip('_-') or 'main'!r}."
            )
    on_main(lambda: _check_replaceable(path, own))
    sharing = team.settings.parameter_sharing
    scope = team.settings.latent_scope if sharing == "latent" else None
    report: dict[str, dict[str, float]] = {agent: {"kl_per_token": 0.0, "tokens": 0} for agent in own}
    writes = this_process().is_main_process
    with _whole_folder(path, writes) as partial:
        folders = [partial / agent for agent in own]
        if team.description.full_finetuning:
            _save_whole(team, partial, writes)
        elif scope is not None:
            cores, report = _fold_latents(team, scope, problems, report)
            save_adapters(team.model, fold_adapters(team.model, cores, "auto"), folders, writes)
        elif sharing == "separate":
            blocks = [partial / agent if agent in own else None for agent in team.agents]
            save_adapters(team.model, split_adapter(team.model, len(blocks), "auto"), blocks, writes)
        else:
            _save_shared(team, folders, writes)
        if writes:
            content = {
                "format_version": EXPORT_FORMAT,
                "base_model": team.model.config.name_or_path,
                "full_finetuning": team.description.full_finetuning,
                "parameter_sharing": sharing,
                "latent_scope": scope,
                "agents": report,
                "endpoints": team.outside,
                "files": entries_in(partial),
                "versions": {package: version(package) for package in ("marcog-trl", "peft")},
            }
            write_json(partial / EXPORT_FILE, content)
    this_process().wait_for_everyone()
    return report


def export_team(
    team: Team,
    folder: str | Path,
    path: str | Path,
    problems: Iterable[Mapping[str, Any]] | None = None,
) -> dict[str, dict[str, float]]:
    """
    Write a saved team, its agents as ordinary adapters, and a card as one folder, which [`~marcog_trl.team.hub.push_team`] takes.
    If all weights were trained, the model of the team is there, and there are no adapters.

    Args:
        team ([`Team`]): `Team.from_pretrained(folder)`, or one of another size or with other roles on the same weights, such as
            `Team.from_pretrained(folder, num_agents=4)`, which is then what is written.
        folder (`str` or `Path`): Folder of the saved team. Its files are copied, pickles left out.
        path (`str` or `Path`): New folder to write.
        problems (`Dataset` or `list[dict]`, *optional*): See [`export_agents`].

    Returns:
        `dict[str, dict[str, float]]`: See [`export_agents`].

    Raises:
        ValueError: As [`export_agents`], and if `path` exists, or `folder` is not the saved team.
    """
    folder, path = Path(folder), Path(path).absolute()
    if not (folder / TEAM_FILE).is_file():
        raise ValueError(f"{str(folder)!r} has no {TEAM_FILE}. Use a folder that a trainer's save_model wrote.")
    saved, current = TeamDescription.read(folder / TEAM_FILE), team.description
    for key, its, ours in (
        ("workflow", saved.workflow, current.workflow),
        ("modules", saved.modules, current.modules),
    ):
        if its != ours:
            raise ValueError(
                f"The team's {key} is {ours!r}, but that of {str(folder)!r} is {its!r}. Load the team from that folder."
            )
    on_main(lambda: check_new(path))
    writes = this_process().is_main_process
    with _whole_folder(path, writes) as partial:
        if writes:
            for name in root_files(folder):
                shutil.copy(folder / name, partial / name)
            if (saved.agents, saved.workflow_sha256) != (current.agents, current.workflow_sha256):
                _describe_another(partial, saved, current)
        report = {} if current.full_finetuning else export_agents(team, partial / AGENTS_FOLDER, problems)
        if writes:
            write_card(partial, name=folder.absolute().name)
    this_process().wait_for_everyone()
    return report


def check_new(path: Path) -> None:
    """Raises a `ValueError` if the path exists."""
    if path.exists():
        raise ValueError(f"{str(path)!r} exists already. Use a new folder.")


def _check_replaceable(path: Path, agents: list[str]) -> None:
    if path.exists() and not path.is_dir():
        raise ValueError(f"path={str(path)!r} is a file. Use a new folder.")
    replaceable = {
        f"{agent}/{name}" for agent in agents for name in ADAPTER_FILES
    }  # which `save_model` may have written
    replaceable.update(exported_files(path))
    others = [entry for entry in entries_in(path) if entry not in replaceable]
    if others:
        raise ValueError(f"path={str(path)!r} contains {others[0]!r}, which is not an export. Use a new folder.")


def entries_in(path: Path) -> list[str]:
    """The files and empty folders below a folder."""
    entries = (entry for entry in sorted(path.rglob("*")) if not entry.is_dir() or not any(entry.iterdir()))
    return [entry.relative_to(path).as_posix() for entry in entries]


def exported_files(path: Path) -> list[str]:
    """The files that an export in this folder wrote."""
    file = path / EXPORT_FILE
    return [EXPORT_FILE, *read_json(file).get("files", [])] if file.is_file() else []


def delete_export(path: Path) -> None:
    """Deletes what an export wrote, and leaves everything else in its folder."""
    files = [path / name for name in exported_files(path)]
    for file in files:
        file.unlink(missing_ok=True)
    for folder in {file.parent for file in files} - {path}:
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()


@contextmanager
def _whole_folder(path: Path, writes: bool) -> Iterator[Path]:
    """A folder to write to, beside `path`. It is renamed to `path` at the end, and deleted if something fails."""
    partial, old = (path.with_name(f".{path.name}.{suffix}") for suffix in ("partial", "old"))

    def begin() -> None:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)

    on_main(begin)  # before any process goes on: libraries make the folders that they are told to save to
    if not writes:
        yield partial
        return
    try:
        yield partial
        shutil.rmtree(old, ignore_errors=True)
        if path.exists():
            os.replace(path, old)
        os.replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)


def _save_whole(team: Team, folder: Path, writes: bool) -> None:
    """The model, without the team's modules."""
    with gather_params_ctx(list(team.model.parameters()), modifier_rank=None), own_dropout(team.model):
        team.model.save_pretrained(folder, is_main_process=writes)
    if writes:
        team.tokenizer.save_pretrained(folder)


def _save_shared(team: Team, folders: list[Path], writes: bool) -> None:
    """The shared adapter, of any type that PEFT knows, as PEFT saves it."""
    first, *others = folders
    parameters = [p for name, p in team.model.named_parameters() if p.requires_grad or "default" in name.split(".")]
    with gather_params_ctx(parameters, modifier_rank=None):
        team.model.save_pretrained(first, selected_adapters=["default"], is_main_process=writes)
    if writes:
        (first / CARD_FILE).unlink()  # an empty template
        for folder in others:
            shutil.copytree(first, folder)


@torch.no_grad()
def _fold_latents(
    team: Team, scope: str, problems: Iterable[Mapping[str, Any]] | None, report: dict[str, dict[str, float]]
) -> tuple[list[torch.Tensor], dict[str, dict[str, float]]]:
    """Cores to fold, of every layer `(N, r, r)` for the N agents with an adapter, and the report."""
    assert team.modules is not None
    with team.evaluating():  # where a latent is its mean
        if scope == "agent":
            with team.gathered():
                own = [team.agents.index(agent) for agent in team.own_agents]
                latents, _ = team.modules.latents(team.role_observations[own])
        else:
            latents, report = _mean_latents(team, problems)
        with team.gathered():
            return team.modules.cores(latents), report


def _mean_latents(
    team: Team, problems: Iterable[Mapping[str, Any]] | None
) -> tuple[torch.Tensor, dict[str, dict[str, float]]]:
    """The mean latent of each agent over its replies, `(N, d)`, and how far that is from the agent itself."""
    if problems is None:
        raise ValueError("problems=None, but latents in observation scope are averaged over problems. Pass some.")
    rows = [dict(problem) for problem in problems]
    if not rows or "prompt" not in rows[0]:
        found = f"problems with the columns {list(rows[0])}" if rows else "problems=[]"
        raise ValueError(f"{found} cannot be played. Pass problems with a column 'prompt'.")
    state, device = this_process(), team.model.device
    # Padded, since every process must play: generation is a collective operation
    with state.split_between_processes(rows, apply_padding=True) as own, torch.random.fork_rng():
        torch.manual_seed(state.process_index)
        replies = []
        for start in range(0, len(own), _PROBLEMS_AT_ONCE):
            for episode in team.play(own[start : start + _PROBLEMS_AT_ONCE]):
                replies += [(row, row.latent) for row in episode.rows if row.completion is None]
    own_agents = team.own_agents
    agent = torch.tensor([own_agents.index(row.slot.agent) for row, _ in replies], device=device)
    latents = torch.stack([z for _, z in replies])
    one_hot = torch.nn.functional.one_hot(agent, len(own_agents)).to(latents)
    total = reduce(one_hot.T @ latents, reduction="sum")
    count = reduce(one_hot.sum(0), reduction="sum")
    for name, spoken in zip(own_agents, count.tolist(), strict=True):
        if not spoken:
            raise ValueError(
                f"Agent {name!r} wrote no reply on the {len(rows)} problems. Pass problems on which all agents speak."
            )
    means = total / count[:, None]

    sums = torch.zeros(len(own_agents), 2, dtype=torch.float64, device=device)
    with team.gathered():
        # Under ZeRO-3 a forward pass is a collective operation too
        for i in range(max(gather_object([len(replies)]))):
            row, z = replies[i % len(replies)]
            divergence = _divergence(team, row, torch.stack([z, means[agent[i % len(replies)]]]))
            if i < len(replies):
                sums[agent[i]] += torch.tensor([divergence, len(row.completion_ids)]).to(sums)
    measured = reduce(sums, reduction="sum").tolist()
    return means, {
        name: {"kl_per_token": kl / tokens, "tokens": int(tokens)}
        for name, (kl, tokens) in zip(own_agents, measured, strict=True)
    }


def _divergence(team: Team, row: Any, z: torch.Tensor) -> float:
    """KL(first ‖ second) of the agents with the latents `z`, `(2, d)`, summed over the tokens of one reply."""
    assert team.modules is not None
    ids = torch.tensor([[*row.prompt_ids, *row.completion_ids]] * 2, device=team.model.device)
    with team.modules.rows(ForwardContext(z=z)), team.autocast():
        logits = team.model(input_ids=ids, logits_to_keep=len(row.completion_ids) + 1, use_cache=False).logits
    live, folded = (logits[:, :-1].float() / team.settings.temperature).log_softmax(-1)
    return (live.exp() * (live - folded)).sum(-1).clamp(min=0).sum().item()


def _describe_another(folder: Path, saved: TeamDescription, current: TeamDescription) -> None:
    """Changes the copy of a saved team to one with other agents or another file of its workflow, which was not evaluated."""
    for name in _OF_RUN:
        (folder / name).unlink(missing_ok=True)
    settings = saved.settings | {name: current.settings[name] for name in ("num_agents", "roles", "workflow")}
    trained_as = saved.trained_as if saved.agents == current.agents else saved.trained_as or saved.agents
    dataclasses.replace(
        saved, agents=current.agents, settings=settings, trained_as=trained_as, source_file=current.source_file
    ).write(folder)


def root_files(folder: Path) -> list[str]:
    """
    The files of a team in a repository, without its agents. Pickles are left out: loading one can run any code. So are names
    that begin with `_`, as in the pushes of transformers' `Trainer`.
    """
    files = (entry for entry in sorted(folder.iterdir()) if entry.is_file() and not entry.name.startswith((".", "_")))
    return [entry.name for entry in files if entry.suffix not in (".bin", ".pt", ".pth", ".pkl", ".partial")]
