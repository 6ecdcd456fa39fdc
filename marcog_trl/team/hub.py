"""
Pushes a team to the Hub.

A repository is what `save_model` writes, the folder `agents` that [`export_agents`] writes, and the model card. It has the
same files locally and on the Hub.
"""

from __future__ import annotations

import itertools
import shlex
import shutil
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from accelerate.utils import broadcast_object_list
from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.utils import validate_repo_id
from transformers.trainer_utils import HubStrategy

from marcog_trl.files import read_json
from marcog_trl.team.card import AGENTS_FOLDER, CARD_FILE, EXPORT_FILE, write_card
from marcog_trl.team.description import MODULES_FILE, TEAM_FILE
from marcog_trl.team.export import export_agents, root_files


if TYPE_CHECKING:
    from marcog_trl.trainers.multi_agent_trainer import MultiAgentTrainer


_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
NUM_PROBLEMS_OF_CHECKPOINT = 16


class PushError(RuntimeError):
    """A push to the Hub failed. The local files are kept."""


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
    Push a team to the Hub in one commit: the shared adapter, modules and description of the team, its agents, and the card.

    Checkpoints, logs and pickles in the folder are not pushed.

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
        PushError: If the push fails, such as without network or rights. The local files are kept.
    """
    check_repo_id(repo_id)
    folder = Path(folder)
    needed = [TEAM_FILE, f"{AGENTS_FOLDER}/{EXPORT_FILE}", CARD_FILE, *_ADAPTER_FILES]
    if (folder / TEAM_FILE).is_file():
        for agent in read_json(folder / TEAM_FILE, "agents")["agents"]:
            needed += [f"{AGENTS_FOLDER}/{agent['name']}/{name}" for name in _ADAPTER_FILES]
    for name in needed:
        if not (folder / name).is_file():
            raise ValueError(
                f"{str(folder)!r} has no {name}. Use a folder that recipes/export.py or push_agents_to_hub wrote."
            )
    write_card(folder, repo_id)
    agents = sorted(path for path in (folder / AGENTS_FOLDER).rglob("*") if path.is_file())
    names = [*root_files(folder), *(path.relative_to(folder).as_posix() for path in agents)]
    api = HfApi()
    with clear_push_errors(repo_id, folder):
        api.create_repo(repo_id, token=token, private=private, exist_ok=True)
        # upload_folder splits large folders into several commits; with one, a repository never holds half a team
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
    """Removes agents from a repository that the pushed team does not have."""
    api = HfApi()
    deletions = _deletions(api, repo_id, folder, token, revision)
    if deletions:
        api.create_commit(
            repo_id,
            deletions,
            commit_message="Remove agents that the team no longer has",
            token=token,
            revision=revision,
        )


def _deletions(
    api: HfApi, repo_id: str, folder: Path, token: str | None, revision: str | None
) -> list[CommitOperationDelete]:
    there = api.list_repo_files(repo_id, revision=revision, token=token)
    agents = (name for name in there if name.startswith(f"{AGENTS_FOLDER}/"))
    return [CommitOperationDelete(name) for name in agents if not (folder / name).is_file()]


def check_repo_id(repo_id: str) -> None:
    """Raises a `ValueError` for what cannot be the name of a repository."""
    validate_repo_id(repo_id)
    if repo_id.count("/") != 1:
        raise ValueError(f"repo_id={repo_id!r} has no owner. Use 'user/{repo_id}'.")


@contextmanager
def clear_push_errors(repo_id: str | None, folder: str | Path) -> Iterator[None]:
    """
    Replaces the error of a failed push by one that says why, that local files are kept, and how to push again.

    Args:
        repo_id (`str`, *optional*): The repository.
        folder (`str` or `Path`): The folder to push.

    Raises:
        PushError: Instead of any other error, which is its cause.
    """
    try:
        yield
    except PushError:
        raise
    except Exception as error:  # of huggingface_hub, and of the HTTP and storage clients beneath it
        reason = " ".join(str(error).split()) or type(error).__name__
        if (Path(folder) / AGENTS_FOLDER / EXPORT_FILE).is_file():
            again = f"python recipes/export.py --output_dir {shlex.quote(str(folder))} --push {repo_id or 'user/team'}"
            way = f"Everything is kept in {str(folder)!r}. To push it again: {again}"
        else:
            way = "Log in with a token with write access (hf auth login), or set push_to_hub=False."
        name = repo_id or Path(folder).absolute().name  # as the Trainer calls a repository without a name
        raise PushError(f"The push to {name!r} failed: {reason} -- {way}") from error
