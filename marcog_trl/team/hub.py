"""
Pushes a team to the Hub.

A repository is what `save_model` writes, the folder `agents` that [`export_agents`] writes, and the model card. It has the
same files locally and on the Hub.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.utils import validate_repo_id

from marcog_trl.team.card import AGENTS_FOLDER, CARD_FILE, EXPORT_FILE, write_card
from marcog_trl.team.description import ADAPTER_FILES, MODEL_FILES, TEAM_FILE, TeamDescription
from marcog_trl.team.export import root_files


class PushError(RuntimeError):
    """A push to the Hub failed. The local files are kept."""


def push_team(
    folder: str | Path,
    repo_id: str,
    token: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
    commit_message: str = "A team and its agents",
) -> CommitInfo:
    """
    Push a team to the Hub in one commit: the shared adapter or the whole model, modules and description of the team, its agents,
    and the card.

    Checkpoints, logs and pickles in the folder are not pushed.

    Args:
        folder (`str` or `Path`): What `push_agents_to_hub` or [`export_team`] wrote.
        repo_id (`str`): Repository, such as `"user/team"`; created if it does not exist.
        token (`str`, *optional*): Token with write access. Defaults to the one that is logged in, or `HF_TOKEN`.
        private (`bool`, *optional*): Whether a repository that is created is private. Defaults to the owner's setting.
        revision (`str`, *optional*): Branch. Defaults to the main one.
        commit_message (`str`, *optional*): The commit's message.

    Returns:
        `CommitInfo`: Of the commit.

    Raises:
        ValueError: If the folder is not such a team, or `repo_id` is not the name of a repository.
        PushError: If the push fails, such as without network or rights. The local files are kept.
    """
    check_repo_id(repo_id)
    folder = Path(folder)
    needed = [TEAM_FILE, CARD_FILE]
    if (folder / TEAM_FILE).is_file():
        if TeamDescription.read(folder / TEAM_FILE).full_finetuning:
            needed.append(next((name for name in MODEL_FILES if (folder / name).is_file()), MODEL_FILES[0]))
        else:
            needed += [f"{AGENTS_FOLDER}/{EXPORT_FILE}", *ADAPTER_FILES]
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
        if (Path(folder) / TEAM_FILE).is_file() and (Path(folder) / CARD_FILE).is_file():
            again = f"python recipes/export.py --output_dir {shlex.quote(str(folder))} --push {repo_id or 'user/team'}"
            way = f"Everything is kept in {str(folder)!r}. To push it again: {again}"
        else:
            way = "Log in with a token with write access (hf auth login), or set push_to_hub=False."
        name = repo_id or Path(folder).absolute().name  # as the Trainer calls a repository without a name
        raise PushError(f"The push to {name!r} failed: {reason} -- {way}") from error
