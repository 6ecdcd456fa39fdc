"""
Checkpoints of a team: complete ones only, from which runs resume exactly.

The Trainer writes, loads and deletes checkpoints, by `save_strategy`, `load_best_model_at_end` and `save_total_limit`. Here is
what it does not do: it saves the team and its modules too, keeps other runs out of the folder (`_run.lock`), and marks a
checkpoint as complete. That is what `complete.json` says, which is written last and lists all other files, of all processes,
with their sizes. Older checkpoints are deleted only then.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from accelerate import PartialState
from accelerate.utils import gather_object, is_peft_model
from filelock import FileLock, Timeout
from peft import PeftConfig
from transformers import EarlyStoppingCallback, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.trainer import OPTIMIZER_NAME, TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, rotate_checkpoints
from trl.trainer.base_trainer import _BaseTrainer

from marcog_trl.files import write_json
from marcog_trl.processes import on_main
from marcog_trl.team.description import MODULES_FILE, TEAM_FILE, TeamDescription
from marcog_trl.team.lending import lent
from marcog_trl.team.loading import find_team
from marcog_trl.team.modules import ATTRIBUTE


COMPLETE_FILE = "complete.json"
LOCK_FILE = "_run.lock"  # pushes to the Hub skip this name
DEEPSPEED_FILE = "latest"
# Settings of an adapter that say where it comes from, how it began or how it is regularised
MAY_DIFFER = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "eva_config", "inference_mode", "init_lora_weights", "loftq_config",
    "lora_dropout", "lora_ga_config", "peft_version", "revision", "runtime_config", "task_type",
}  # fmt: skip


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
    step = TrainerState.load_from_json(str(Path(whole) / TRAINER_STATE_NAME)).global_step
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


def check_same_adapter(name: str, folder: Path, model: Any) -> None:
    """
    Checks that a saved team has an adapter like the one of this run. PEFT would load what matches, and drop the rest.

    Args:
        name, folder: See [`check_same_team`].
        model ([`~peft.PeftModel`]): The model of this run.

    Raises:
        ValueError: If the adapters differ in a setting that changes what they are.
    """
    theirs, ours = PeftConfig.from_pretrained(str(folder)), model.peft_config["default"]
    for key in (field.name for field in dataclasses.fields(ours) if field.name not in MAY_DIFFER):
        its, own = getattr(theirs, key, None), getattr(ours, key)
        if _as_saved(its) != _as_saved(own):
            raise ValueError(
                f"{name} has another adapter: {key} is {its!r}, but {own!r} in this run. Set {key} in peft_config as in that run, or "
                "begin a new run."
            )


def _as_saved(value: Any) -> str:
    """A setting of an adapter as text, where the order of names does not count."""
    is_names = isinstance(value, set | list | tuple) and all(isinstance(name, str) for name in value)
    return json.dumps(sorted(value) if is_names else value, default=str)


def check_resumable(name: str, checkpoint: Path, description: TeamDescription) -> None:
    """
    Checks that a checkpoint is of the team of this run, has all that a run needs to go on, and that the file of the workflow has not
    changed since.

    Args:
        name, description: See [`check_same_team`].
        checkpoint (`Path`): The checkpoint.

    Raises:
        ValueError: If the checkpoint has another team, another optimizer's state or none, or another version of the file.
    """
    check_same_team(name, checkpoint, description)
    saved = TeamDescription.read(checkpoint / TEAM_FILE)
    ours = description.settings.get("optim", "").removesuffix("_fused")
    its = saved.settings.get("optim", ours).removesuffix("_fused")
    if its != ours:
        raise ValueError(f"{name} has the state of optim={its!r}, but optim={ours!r} in this run. Set optim={its!r}.")
    if not any((checkpoint / file).exists() for file in (OPTIMIZER_NAME, DEEPSPEED_FILE)):
        raise ValueError(
            f"{name} has no state of the optimizer: it was saved with save_only_model=True. To begin a new run from its weights, call "
            "trainer.load_team(checkpoint) before trainer.train()."
        )
    both = saved.source_file is not None and description.source_file is not None
    if both and saved.workflow_sha256 != description.workflow_sha256:
        raise ValueError(
            f"{name} has another version of the workflow's file, {str(checkpoint / saved.workflow_file)!r}, than this run. "
            f"Set --workflow {checkpoint / saved.settings['workflow']} to resume with that version, or start a new run."
        )


@contextmanager
def how_to_go_on_noted(args: TrainingArguments) -> Iterator[None]:
    """
    Adds a note to errors of training that says how to go on: from which checkpoint, and how much space is left for others.

    Args:
        args (`TrainingArguments`): Settings of the run. Uses `output_dir` and `world_size`.
    """
    try:
        yield
    except Exception as error:
        output_dir = Path(str(args.output_dir))
        whole = last_whole_checkpoint(output_dir)
        if whole is None:
            note = "There is no complete checkpoint: start the run again."
        else:
            note = (
                f"The last complete checkpoint is {whole}. Resume from it with resume_from_checkpoint=True "
                "(--resume_from_checkpoint true)."
            )
        if args.world_size > 1:
            note += " If another process failed first, its own output says why."
        # PyTorch only says that a write failed
        error.add_note(f"{note} The disk has {shutil.disk_usage(output_dir).free / 2**20:.0f} MiB of free space.")
        raise


# The trainer's part


class Checkpointing(_BaseTrainer):
    """The part of a team's trainer that starts, resumes and saves runs, the team's own modules included."""

    args: Any
    team: Any
    model: Any

    def train(self, resume_from_checkpoint: str | bool | None = None, *args, **kwargs):
        with only_run_in(self._folder(None)):
            check_disks(self.args)
            checkpoint = find_checkpoint(self.args, resume_from_checkpoint)
            if checkpoint is not None:
                name = f"resume_from_checkpoint={checkpoint!r}"
                check_resumable(name, Path(checkpoint), self.team.description)
                if is_peft_model(self.model):
                    check_same_adapter(name, Path(checkpoint), self.model)
            elif (
                self.args.save_strategy != "no"
                and self.is_world_process_zero()
                and (earlier := checkpoints_in(self._folder(None)))
            ):
                warnings.warn(
                    f"output_dir={self.args.output_dir!r} has {earlier[-1].name} of an earlier run, and this run adds its own "
                    "checkpoints. Set another output_dir, or delete the earlier ones.",
                    stacklevel=2,
                )
            with how_to_go_on_noted(self.args):
                return super().train(checkpoint, *args, **kwargs)

    def _init_training_state(self, max_steps, num_update_steps_per_epoch, num_train_epochs, *args):
        begin = super()._init_training_state(max_steps, num_update_steps_per_epoch, num_train_epochs, *args)
        # If a run resumes at its end, no epoch is left; the Trainer would make one more step
        return (num_train_epochs, 0) if self.state.global_step >= max_steps else begin

    # Saving

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        # ZeRO-3 gathers the weights on the first process only
        each_node = self.args.save_on_each_node and not is_deepspeed_zero3_enabled()
        with lent(self.args, save_on_each_node=each_node):
            super().save_model(output_dir, _internal_call)
        if self.args.should_save:
            self._folder(output_dir).mkdir(parents=True, exist_ok=True)
            self.team.description.write(self._folder(output_dir))

    def _save(self, output_dir: str | None = None, state_dict: dict | None = None) -> None:
        marker, gathered = f"{ATTRIBUTE}.", dict(state_dict or {})  # by DeepSpeed: names start at the wrapped model
        super()._save(output_dir, state_dict=state_dict)
        if not self.args.should_save or self.team.modules is None:
            return
        if state_dict is None:
            modules = self.team.modules.state_dict()
        else:
            modules = {key.partition(marker)[2]: tensor for key, tensor in gathered.items() if marker in key}
        modules |= self._other_modules()
        if modules:
            path = self._folder(output_dir) / MODULES_FILE
            modules = {key: tensor.detach().cpu().contiguous() for key, tensor in modules.items()}
            safetensors.torch.save_file(modules, f"{path}.partial", metadata={"format": "pt"})
            os.replace(f"{path}.partial", path)

    def _other_modules(self) -> dict[str, torch.Tensor]:
        """Weights of modules that the trainer does not hold or change, to be saved with the others."""
        return {}

    def _save_checkpoint(self, model, trial) -> None:
        checkpoint = Path(self._get_output_dir(trial=trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.args.should_save:
            (checkpoint / COMPLETE_FILE).unlink(missing_ok=True)
        self.accelerator.wait_for_everyone()
        # The Trainer would delete older checkpoints before the other processes have written their parts of this one
        limit = self.args.save_total_limit
        with lent(self.args, save_total_limit=None):
            super()._save_checkpoint(model, trial)
        self._mark_complete(checkpoint)
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            rotate_checkpoints(str(checkpoint.parent), limit, best_model_checkpoint=best, use_mtime=True)

    def _mark_complete(self, checkpoint: Path) -> None:
        """Lists the files of a checkpoint that all processes have written."""
        rollout_begun = self._rollout_begun()
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            if self.is_deepspeed_enabled and not self.is_world_process_zero():
                # With save_on_each_node. DeepSpeed writes it on the first node only, and cannot load without it
                (checkpoint / "latest").write_text(f"global_step{self.model_wrapped.global_steps}")
            mark_complete(checkpoint, rollout_begun)

    def _rollout_begun(self) -> bool:
        """Whether rows of the last rollout are not trained on yet."""
        return False

    # Loading

    def _load_callback_state(self) -> None:
        states = cast(dict, self.state.stateful_callbacks)
        # What the algorithm knows from earlier batches is there, too. The Trainer would warn that it is no callback
        memory = {name: value for name, value in states.items() if not _is_of_callbacks(value)}
        for name in memory:
            del states[name]
        super()._load_callback_state()
        states.update(memory)
        for callback in self.callback_handler.callbacks:
            saved = states.get(type(callback).__name__)
            # The Trainer does not restore callbacks by default, so early stopping would lose its patience counter
            if isinstance(callback, EarlyStoppingCallback) and isinstance(saved, dict):
                callback.early_stopping_patience_counter = saved["attributes"]["early_stopping_patience_counter"]
            # The Trainer expects every callback's state when it saves the next checkpoint
            if isinstance(callback, ExportableState) and saved is None:
                states[type(callback).__name__] = callback.state()

    def load_team(self, path: str | Path) -> None:
        """
        Loads the adapter and the modules of a saved team.

        Args:
            path (`str` or `Path`): Folder written by `save_model`, a checkpoint, or a repository on the Hub.

        Raises:
            ValueError: If `path` is not a saved team, or not the trainer's team.
        """
        folder = find_team(path)
        check_same_team(f"path={str(path)!r}", folder, self.team.description)
        if is_peft_model(self.model):
            check_same_adapter(f"path={str(path)!r}", folder, self.model)
        self._load_from_checkpoint(str(folder))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model=None) -> None:
        dtypes = {name: p.dtype for name, p in self.model.named_parameters() if p.requires_grad}
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        for name, p in self.model.named_parameters():
            if p.dtype != dtypes.get(name, p.dtype):  # PEFT loads in float32 what TRL trains in bfloat16
                p.data = p.data.to(dtypes[name])
        self._load_modules(resume_from_checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        if not self.is_deepspeed_enabled:  # which has restored all trainable parameters
            self._load_modules(cast(str, self.state.best_model_checkpoint))

    def _load_modules(self, checkpoint: str) -> None:
        modules = self.team.modules
        if modules is not None and any(True for _ in modules.parameters()):
            weights = safetensors.torch.load_file(Path(checkpoint) / MODULES_FILE)
            own, others = modules.state_dict(), self._other_modules()
            modules.load_state_dict({name: x for name, x in weights.items() if name in own or name not in others})

    def _folder(self, output_dir: str | None) -> Path:
        folder = output_dir or self.args.output_dir
        assert folder is not None
        return Path(folder)


def _is_of_callbacks(state: Any) -> bool:
    """Whether an entry of `stateful_callbacks` is the state of a callback, or of several of one class."""
    first = state[0] if isinstance(state, list) and state else state
    return isinstance(first, dict) and "attributes" in first
