"""
The output folder of a run: its lock and its checkpoints.

A checkpoint is complete once it has `complete.json`. This file is written last, and lists all other files, of all
processes, with their sizes. `_run.lock` keeps other runs out of the folder.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import gather_object
from filelock import FileLock, Timeout
from transformers import TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy

from marcog_trl.files import write_json
from marcog_trl.processes import on_main
from marcog_trl.team.description import TEAM_FILE, TeamDescription


COMPLETE_FILE = "complete.json"
LOCK_FILE = "_run.lock"  # pushes to the Hub skip this name


class CheckpointError(RuntimeError):
    """Raised if a checkpoint cannot be written. Earlier checkpoints are unchanged."""


class ProcessLostError(RuntimeError):
    """Raised if another process of the run has ended, or does not answer any more."""


# One run per folder


@contextmanager
def only_run_in(output_dir: str | Path) -> Iterator[None]:
    """
    Locks an output folder, and creates it if needed. A collective operation, which may be nested.

    Args:
        output_dir (`str` or `Path`): The folder.

    Raises:
        ValueError: If another run has the lock, or the folder cannot be written.
    """
    folder = Path(output_dir)
    lock = FileLock(folder / LOCK_FILE, timeout=0, is_singleton=True)

    def acquire() -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except Timeout:
            raise ValueError(
                f"output_dir={str(folder)!r} is in use by another run. Wait for its end, or set another output_dir."
            ) from None
        except OSError as error:
            raise ValueError(
                f"output_dir={str(folder)!r} cannot be written: {error.strerror}. Set another output_dir."
            ) from None

    on_main(acquire)
    try:
        yield
    finally:
        if PartialState().is_main_process:
            lock.release()


def check_disks(args: TrainingArguments, must_share: bool = False) -> None:
    """
    Checks that each node can save its part of a checkpoint, and find it again. A collective operation.

    Args:
        args (`TrainingArguments`): Settings of the run. Uses `output_dir`, `save_strategy` and `save_on_each_node`.
        must_share (`bool`, *optional*, defaults to `False`):
            Whether the nodes read each other's files, and so must share `output_dir` in any case.

    Raises:
        ValueError: If the nodes do not share `output_dir`, but only the first one saves, or if they share it and each of them
            saves.
    """
    folder, state = Path(str(args.output_dir)), PartialState()
    name = on_main(lambda: f".{uuid.uuid4().hex}.partial")
    folder.mkdir(parents=True, exist_ok=True)  # also makes NFS forget that the folder was not there
    on_main(lambda: (folder / name).touch())
    sees = (folder / name).exists()
    # Of each node but the first
    others = gather_object([sees] if state.is_local_main_process and not state.is_main_process else [])
    on_main(lambda: (folder / name).unlink())
    if args.save_on_each_node and any(others):
        raise ValueError(
            f"save_on_each_node=True does not support output_dir={str(folder)!r}, a folder that several nodes share: they "
            "would overwrite each other's files. Set save_on_each_node=False, or an output_dir on a disk of each node."
        )
    if must_share and not all(others):
        raise ValueError(
            f"output_dir={str(folder)!r} is not on a disk that all nodes share, which this run needs. Set another output_dir."
        )
    if not all(others) and not args.save_on_each_node and args.save_strategy != SaveStrategy.NO:
        raise ValueError(
            f"output_dir={str(folder)!r} is not on a disk that all nodes share, so no run could resume from its checkpoints. "
            "Set another output_dir, or save_on_each_node=True (--save_on_each_node true)."
        )


def checkpoints_in(output_dir: str | Path) -> list[Path]:
    """Returns the checkpoints of an output folder, complete or not, sorted by step."""
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    folders = [path for path in Path(output_dir).glob(f"{prefix}*") if path.is_dir()]
    steps = {path: path.name.removeprefix(prefix) for path in folders}
    return sorted((path for path, step in steps.items() if step.isdecimal()), key=lambda path: int(steps[path]))


def start_from(args: TrainingArguments, resume_from_checkpoint: str | bool | None, overwrite: bool) -> str | None:
    """
    Finds the checkpoint that a run starts from, before any work. A collective operation.

    Args:
        args (`TrainingArguments`): Settings of the run.
        resume_from_checkpoint (`str` or `bool`, *optional*): As in [`find_checkpoint`].
        overwrite (`bool`): Whether checkpoints of an earlier run in `output_dir` may be deleted.

    Returns:
        `str`, *optional*: The checkpoint to resume from. `None` for a new run.

    Raises:
        ValueError: If the checkpoint cannot be resumed, or `output_dir` has checkpoints of another run.
    """
    checkpoint = find_checkpoint(args, resume_from_checkpoint)
    output_dir = Path(str(args.output_dir))
    continues = checkpoint is not None and Path(checkpoint).resolve().parent == output_dir.resolve()
    if continues and overwrite:
        raise ValueError(
            f"overwrite_output_dir=True would delete the checkpoints in output_dir={str(output_dir)!r}, but "
            f"resume_from_checkpoint={resume_from_checkpoint!r} needs one of them. Set only one of the two options."
        )
    earlier = on_main(lambda: checkpoints_in(output_dir))
    if earlier and not continues and not overwrite:
        raise ValueError(
            f"output_dir={str(output_dir)!r} has {earlier[-1].name} of an earlier run. Set --resume_from_checkpoint true to "
            "continue that run, --overwrite_output_dir true to delete its checkpoints, or another --output_dir."
        )
    return checkpoint


def delete_checkpoints(output_dir: str | Path, on_each_node: bool = False) -> None:
    """Deletes all checkpoints of an output folder, or of the folders of all nodes. A collective operation."""

    def delete() -> None:
        for path in checkpoints_in(output_dir):
            shutil.rmtree(path)

    on_main(delete)
    if on_each_node and PartialState().is_local_main_process:
        delete()


# Complete checkpoints


def mark_complete(checkpoint: Path, rollout_begun: bool = False) -> None:
    """
    Lists the files of a checkpoint in `complete.json`. Call it on one process, after all processes have saved.

    Args:
        checkpoint (`Path`): Folder of the checkpoint.
        rollout_begun (`bool`, *optional*, defaults to `False`):
            Whether rows of the last rollout are not trained on yet. A resumed run would skip them.
    """
    sizes = {
        path.relative_to(checkpoint).as_posix(): path.stat().st_size
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name != COMPLETE_FILE and path.suffix != ".partial"
    }
    write_json(checkpoint / COMPLETE_FILE, {"files": sizes, "rollout_begun": rollout_begun})


def what_is_missing(checkpoint: Path) -> str | None:
    """
    Says why a checkpoint is not complete.

    The run may have been killed while it wrote or deleted the checkpoint, or rows of the last rollout were not trained on
    yet.

    Args:
        checkpoint (`Path`): A `checkpoint-*` folder.

    Returns:
        `str`, *optional*: The reason. `None` if the checkpoint is complete.
    """
    if not checkpoint.is_dir():
        return "it does not exist"
    if not (checkpoint / TEAM_FILE).is_file():
        return f"it has no {TEAM_FILE}, so it is not a checkpoint of a team"
    if not (checkpoint / COMPLETE_FILE).is_file():
        return f"it has no {COMPLETE_FILE}, so it was not written completely"
    complete = json.loads((checkpoint / COMPLETE_FILE).read_text())
    if complete.get("rollout_begun"):
        return "it was written inside a generation cycle, before all rows of the rollout were trained on"
    for name, size in complete["files"].items():
        path = checkpoint / name
        if not path.is_file():
            return f"it has no {name}"
        if path.stat().st_size != size:
            return f"its {name} has {path.stat().st_size} bytes instead of {size}"
    return None


def last_whole_checkpoint(output_dir: str | Path) -> Path | None:
    """Returns the last checkpoint of an output folder that is complete for this process."""
    return next((path for path in reversed(checkpoints_in(output_dir)) if what_is_missing(path) is None), None)


def find_checkpoint(args: TrainingArguments, resume_from_checkpoint: str | bool | None) -> str | None:
    """
    Finds the checkpoint to resume from. A collective operation.

    Args:
        args (`TrainingArguments`): Settings of the run. Uses `output_dir` and `max_steps`.
        resume_from_checkpoint (`str` or `bool`, *optional*): As in `Trainer.train`. `True` selects the last checkpoint in
            `output_dir` that is complete for every process, and warns of later ones that are not.

    Returns:
        `str`, *optional*: Folder of a complete checkpoint. `None` if `resume_from_checkpoint` is not set.

    Raises:
        ValueError: If there is no checkpoint, or it is not complete, not a team's, or beyond `max_steps`.
    """
    if not resume_from_checkpoint:
        return None
    name = f"resume_from_checkpoint={resume_from_checkpoint!r}"
    if resume_from_checkpoint is True:
        paths = [str(path) for path in reversed(checkpoints_in(str(args.output_dir)))]
    else:
        paths = [str(resume_from_checkpoint)]
    # Nodes without a shared disk may have other paths, and may have been killed at different times
    here = {Path(path).name: path for path in paths}
    everywhere = gather_object([{step: _what_is_missing_here(args, Path(path)) for step, path in here.items()}])
    missing = {
        here.get(step, step): next(
            (why for of in everywhere if (why := of.get(step, "a process cannot find it")) is not None), None
        )
        for step in dict.fromkeys(step for of in everywhere for step in of)
    }
    if not missing:
        raise ValueError(
            f"{name}: output_dir={str(args.output_dir)!r} has no checkpoint-* folder. Set another output_dir, or leave "
            "resume_from_checkpoint out to start a new run."
        )
    whole = next((path for path, why in missing.items() if why is None), None)
    if whole is None:
        path, why = next(iter(missing.items()))
        raise ValueError(
            f"{name}: cannot resume from {path}: {why}. Set resume_from_checkpoint to a complete checkpoint, or start a new run."
        )
    for path, why in missing.items():
        if path == whole:
            break
        if PartialState().is_main_process:
            warnings.warn(f"{path} is skipped: {why}. The run resumes from {whole}.", stacklevel=3)
    step = json.loads((Path(whole) / TRAINER_STATE_NAME).read_text())["global_step"]
    if 0 < args.max_steps < step:
        raise ValueError(
            f"{name}: {whole} is at step {step}, which is beyond max_steps={args.max_steps}. Set max_steps above {step}."
        )
    return whole


def _what_is_missing_here(args: TrainingArguments, checkpoint: Path) -> str | None:
    """As [`what_is_missing`]. A folder of one node must also have the part of this process."""
    part = f"rng_state_{args.process_index}.pth"
    if args.save_on_each_node and args.world_size > 1 and checkpoint.is_dir() and not (checkpoint / part).is_file():
        return f"it has no {part}, so process {args.process_index} did not run on this node. Give each node its earlier rank"
    return what_is_missing(checkpoint)


def check_same_team(name: str, folder: Path, description: TeamDescription, but: tuple[str, ...] = ()) -> None:
    """
    Checks that a saved team is the team of this run.

    Args:
        name (`str`): Name of the folder in errors.
        folder (`Path`): A checkpoint, or a folder written by `save_model`.
        description ([`TeamDescription`]): The team of this run.
        but (`tuple[str, ...]`, *optional*): Keys that may differ.

    Raises:
        ValueError: If the saved team has, for example, other agents, another base model or another format.
    """
    found = TeamDescription.read(folder / TEAM_FILE).difference(description, but)
    if found is not None:
        key, its, ours = found
        raise ValueError(
            f"{name} has another team: {key} is {its!r}, but {ours!r} in this run. Use a checkpoint of the same team."
        )


def check_resumable(name: str, checkpoint: Path, description: TeamDescription) -> None:
    """
    Checks that a checkpoint is of the team of this run, and that the file of the workflow has not changed since.

    Args:
        name, description: See [`check_same_team`].
        checkpoint (`Path`): The checkpoint.

    Raises:
        ValueError: If the checkpoint has another team, or another version of the file.
    """
    check_same_team(name, checkpoint, description)
    saved = TeamDescription.read(checkpoint / TEAM_FILE)
    both = saved.source_file is not None and description.source_file is not None
    if both and saved.workflow_sha256 != description.workflow_sha256:
        raise ValueError(
            f"{name} has another version of the workflow's file, {str(checkpoint / saved.workflow_file)!r}, than this run. "
            f"Set --workflow {checkpoint / saved.settings['workflow']} to resume with that version, or start a new run."
        )


# Errors of a lost process, and of a full disk


@contextmanager
def lost_process_explained(args: TrainingArguments) -> Iterator[None]:
    """
    Explains errors of communication with a process that has ended, or that does not answer within `ddp_timeout`.

    Args:
        args (`TrainingArguments`): Settings of the run. Uses `output_dir` and `ddp_timeout`.

    Raises:
        ProcessLostError: If another process was lost. Other errors are raised unchanged.
    """
    try:
        yield
    except RuntimeError as error:
        # gloo's errors have no class of their own
        if not isinstance(error, torch.distributed.DistError) and "gloo/transport" not in str(error):
            raise
        raise ProcessLostError(
            f"Another process of this run has ended, or did not answer for ddp_timeout={args.ddp_timeout} seconds. Its own "
            f"output says why. {_how_to_go_on(Path(str(args.output_dir)), 'Find out why, then')}"
        ) from error


def _how_to_go_on(output_dir: Path, first: str) -> str:
    whole = last_whole_checkpoint(output_dir)
    if whole is None:
        return f"There is no complete checkpoint. {first} start the run again."
    return (
        f"The last complete checkpoint is {whole}. {first} resume from it with resume_from_checkpoint=True "
        "(--resume_from_checkpoint true)."
    )


@contextmanager
def full_disk_explained(folder: Path, output_dir: Path) -> Iterator[None]:
    """
    Explains errors of a full disk. PyTorch and safetensors only say that a write failed.

    Args:
        folder (`Path`): Folder that is being written.
        output_dir (`Path`): Output folder of the run.

    Raises:
        CheckpointError: If the disk is full. Other errors are raised unchanged.
    """
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        why = _why_not_written(folder, error)
        if why is None:
            raise
        free = shutil.disk_usage(output_dir).free / 2**20
        raise CheckpointError(
            f"{folder} could not be written: {why} (free space there: {free:.1f} MiB). "
            f"{_how_to_go_on(output_dir, 'Free some space, then')}"
        ) from error


def _why_not_written(folder: Path, error: Exception) -> str | None:
    """Says why the disk refuses files in a folder, or returns `None` if it does not."""
    causes = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if isinstance(error, OSError):
        return error.strerror if error.errno in causes else None
    # Errors of libraries have no error number, so try to allocate one more file
    size = max((path.stat().st_size for path in folder.rglob("*") if path.is_file()), default=0) + 2**20
    probe = folder / ".probe.partial"
    try:
        with probe.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as failed:
        return failed.strerror if failed.errno in causes else None
    finally:
        probe.unlink(missing_ok=True)
    return None
