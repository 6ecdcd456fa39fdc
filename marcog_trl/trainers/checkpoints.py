"""
The output folder of a run: its checkpoints, and who may write there.

A checkpoint is whole once it has `complete.json`, which is written last: it lists all other files, of all processes, with
their sizes. `_run.lock` keeps a second run out of the folder.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from accelerate import PartialState
from accelerate.utils import gather_object
from filelock import FileLock, Timeout
from transformers import TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from marcog_trl.files import write_json
from marcog_trl.processes import on_main
from marcog_trl.team.description import TEAM_FILE, TeamDescription


if TYPE_CHECKING:
    pass


COMPLETE_FILE = "complete.json"
LOCK_FILE = "_run.lock"  # a name that a push to the Hub leaves out


class CheckpointError(RuntimeError):
    """A checkpoint could not be written; the ones before it are as they were."""


# One run per folder


@contextmanager
def only_run_in(output_dir: str | Path) -> Iterator[None]:
    """
    Keeps other runs out of an output folder, which is made if need be; a collective operation. May be nested.

    Args:
        output_dir (`str` or `Path`): The folder.

    Raises:
        ValueError: If another run writes there, or the folder cannot be written.
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


def checkpoints_in(output_dir: str | Path) -> list[Path]:
    """The checkpoints of an output folder, whole or not, in the order of their steps."""
    prefix = f"{PREFIX_CHECKPOINT_DIR}-"
    folders = [path for path in Path(output_dir).glob(f"{prefix}*") if path.is_dir()]
    steps = {path: path.name.removeprefix(prefix) for path in folders}
    return sorted((path for path, step in steps.items() if step.isdecimal()), key=lambda path: int(steps[path]))


def start_from(args: TrainingArguments, resume_from_checkpoint: str | bool | None, overwrite: bool) -> str | None:
    """
    Where a new run begins, settled before any work; a collective operation.

    Args:
        args (`TrainingArguments`): Settings of the run.
        resume_from_checkpoint (`str` or `bool`, *optional*): As in [`find_checkpoint`].
        overwrite (`bool`): Whether checkpoints of an earlier run in `output_dir` may be deleted.

    Returns:
        `str`, *optional*: The checkpoint to continue; `None` for a new run.

    Raises:
        ValueError: If the checkpoint cannot be continued, or if checkpoints of an earlier run would be mixed with new ones.
    """
    checkpoint = find_checkpoint(args, resume_from_checkpoint)
    output_dir = Path(str(args.output_dir))
    continues = checkpoint is not None and Path(checkpoint).resolve().parent == output_dir.resolve()
    if continues and overwrite:
        raise ValueError(
            f"overwrite_output_dir=True would delete the checkpoints of output_dir={str(output_dir)!r}, and "
            f"resume_from_checkpoint={resume_from_checkpoint!r} continues one of them. Set one of the two."
        )
    earlier = on_main(lambda: checkpoints_in(output_dir))
    if earlier and not continues and not overwrite:
        raise ValueError(
            f"output_dir={str(output_dir)!r} has {earlier[-1].name} of an earlier run. Set --resume_from_checkpoint true to "
            "continue that run, --overwrite_output_dir true to delete its checkpoints, or another --output_dir."
        )
    return checkpoint


def delete_checkpoints(output_dir: str | Path) -> None:
    """Deletes all checkpoints of an output folder; a collective operation."""

    def delete() -> None:
        for path in checkpoints_in(output_dir):
            shutil.rmtree(path)

    on_main(delete)


# Whole checkpoints


def mark_complete(checkpoint: Path, rollout_begun: bool = False) -> None:
    """
    Lists the files of a checkpoint in `complete.json`; called by one process, after all of them have written theirs.

    Args:
        checkpoint (`Path`): Its folder.
        rollout_begun (`bool`, *optional*, defaults to `False`):
            Whether a part of the rows that were generated last is still to be trained on, which a resumed run would not do.
    """
    sizes = {
        path.relative_to(checkpoint).as_posix(): path.stat().st_size
        for path in sorted(checkpoint.rglob("*"))
        if path.is_file() and path.name != COMPLETE_FILE and path.suffix != ".partial"
    }
    write_json(checkpoint / COMPLETE_FILE, {"files": sizes, "rollout_begun": rollout_begun})


def what_is_missing(checkpoint: Path) -> str | None:
    """
    Why a checkpoint is not whole: the run was killed while it was written, or while it was deleted, or it was written while
    rows were left to be trained on.

    Args:
        checkpoint (`Path`): A `checkpoint-*` folder.

    Returns:
        `str`, *optional*: What is missing; `None` if the checkpoint is whole.
    """
    if not checkpoint.is_dir():
        return "it does not exist"
    if not (checkpoint / TEAM_FILE).is_file():
        return f"it has no {TEAM_FILE}, which every checkpoint of a team has"
    if not (checkpoint / COMPLETE_FILE).is_file():
        return f"it has no {COMPLETE_FILE}, which is written last"
    complete = json.loads((checkpoint / COMPLETE_FILE).read_text())
    if complete.get("rollout_begun"):
        return "it was written inside a generation cycle, and the rows that were still to be trained on are gone"
    for name, size in complete["files"].items():
        path = checkpoint / name
        if not path.is_file():
            return f"it has no {name}"
        if path.stat().st_size != size:
            return f"its {name} has {path.stat().st_size} bytes, and had {size}"
    return None


def last_whole_checkpoint(output_dir: str | Path) -> Path | None:
    """The last checkpoint of an output folder that this process finds whole."""
    return next((path for path in reversed(checkpoints_in(output_dir)) if what_is_missing(path) is None), None)


def find_checkpoint(args: TrainingArguments, resume_from_checkpoint: str | bool | None) -> str | None:
    """
    The checkpoint to continue; with several processes, a collective operation.

    Args:
        args (`TrainingArguments`): Settings of the run: `output_dir` and `max_steps` are read.
        resume_from_checkpoint (`str` or `bool`, *optional*): As in `Trainer.train`. `True` stands for the last checkpoint
            of `output_dir` that is whole for every process; later ones that are not are left aside with a warning.

    Returns:
        `str`, *optional*: The folder of a whole checkpoint; `None` if none is asked for.

    Raises:
        ValueError: If there is no checkpoint, it is not whole, it is not a team's, or it is beyond `max_steps`.
    """
    if not resume_from_checkpoint:
        return None
    name = f"resume_from_checkpoint={resume_from_checkpoint!r}"
    if resume_from_checkpoint is True:
        paths = [str(path) for path in reversed(checkpoints_in(str(args.output_dir)))]
    else:
        paths = [str(resume_from_checkpoint)]
    # Nodes without a common disk may have been killed at different moments
    everywhere = gather_object([{path: what_is_missing(Path(path)) for path in paths}])
    missing = {
        path: next((why for of in everywhere if (why := of.get(path, "a process does not find it")) is not None), None)
        for path in dict.fromkeys(path for of in everywhere for path in of)
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
            f"{name}: {path} cannot be continued: {why}. Set resume_from_checkpoint to a whole checkpoint, or start a new run."
        )
    for path, why in missing.items():
        if path == whole:
            break
        if PartialState().is_main_process:
            warnings.warn(f"{path} is left aside: {why}. The run continues from {whole}.", stacklevel=3)
    step = json.loads((Path(whole) / TRAINER_STATE_NAME).read_text())["global_step"]
    if 0 < args.max_steps < step:
        raise ValueError(
            f"{name}: {whole} is at step {step}, which is beyond max_steps={args.max_steps}. Set max_steps above {step}."
        )
    return whole


def check_same_team(name: str, folder: Path, description: TeamDescription) -> None:
    """
    Refuses a saved team that is another one.

    Args:
        name (`str`): What errors call the folder.
        folder (`Path`): A checkpoint, or what `save_model` wrote.
        description ([`TeamDescription`]): The team of this run.

    Raises:
        ValueError: If the saved team has other agents, another base model or another format.
    """
    found = TeamDescription.read(folder / TEAM_FILE).difference(description)
    if found is not None:
        key, its, ours = found
        raise ValueError(f"{name} is of another team: its {key} is {its!r}, this run's is {ours!r}")


# What a full disk does


@contextmanager
def full_disk_explained(folder: Path, output_dir: Path) -> Iterator[None]:
    """
    Says that the disk is full, where PyTorch and safetensors only say that a write failed.

    Args:
        folder (`Path`): What is being written.
        output_dir (`Path`): The run's output folder, whose checkpoints are kept.

    Raises:
        CheckpointError: In place of the error with which a write failed; other errors are passed on.
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
        whole = last_whole_checkpoint(output_dir)
        kept = (
            "There is no whole checkpoint before it. Free some space, then start the run again."
            if whole is None
            else f"The last whole checkpoint, {whole}, is safe. Free some space, then continue from it with "
            "resume_from_checkpoint=True (--resume_from_checkpoint true)."
        )
        raise CheckpointError(
            f"{folder} could not be written: {why} (free space there: {free:.1f} MiB). {kept}"
        ) from error


def _why_not_written(folder: Path, error: Exception) -> str | None:
    """What keeps files from being written to a folder; `None` if it is not the disk."""
    causes = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    if isinstance(error, OSError):
        return error.strerror if error.errno in causes else None
    # The libraries' own errors have no number, so the disk is asked for room for one more file
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
